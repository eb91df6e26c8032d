#include "heddle-pack/command_line.hpp"
#include "support/program.hpp"

int main(int argc, char** argv) {
  return heddle::examples::run_program(
      {.name = "heddle-pack",
       .description =
           "Packs rollouts into rows and counts the attention tiles of each context rank."},
      argc, argv, heddle::pack::set_up);
}
