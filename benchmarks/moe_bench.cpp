#include "moe_layer_bench.hpp"
#include "moe_products.hpp"
#include "moe_rows.hpp"
#include "support/program.hpp"

namespace {

void register_all(heddle::bench::Shapes shapes) {
  heddle::bench::register_moe_rows(shapes);
  heddle::bench::register_moe_products(shapes);
  heddle::bench::register_moe_experts(shapes);
}

}  // namespace

int main(int argc, char** argv) {
  return heddle::bench::run(argc, argv, register_all);
}
