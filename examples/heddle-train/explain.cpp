#include "heddle-train/explain.hpp"

#include <ostream>
#include <string>

#include "support/table.hpp"

namespace heddle::train {

void explain(const ParameterLayout& layout, std::size_t bytes_per_weight,
             const packing::PackOptions& pack, std::ostream& out) {
  const ModelDims& dims = layout.dims();
  out << "model: " << layout.size() << " parameters of " << bytes_per_weight << " bytes, "
      << dims.layers << " layers, hidden " << dims.hidden << ", vocabulary " << dims.vocab << ", "
      << dims.experts << " experts of which a token takes " << dims.experts_per_token << "\n"
      << "rows:  " << pack.budget << " positions, padding at the "
      << packing::name(pack.pad_position) << "\n";
  using Align = examples::Table::Align;
  examples::Table phases(
      {{"phase", Align::left}, {"computed by", Align::left}, {"sent", Align::left}});
  const char* const nothing = "nothing: one device";
  phases.add({"packing", "packing::pack, first-fit decreasing", nothing});
  phases.add({"projections", "multiply, a document at a time", nothing});
  phases.add({"mixer", "gdn::reference, a key head at a time", nothing});
  phases.add({"experts", "moe::reference, " + std::to_string(dims.experts) + " experts", nothing});
  phases.add({"head and loss", "head::reference, loss::grpo", nothing});
  phases.add({"gradient", "rows folded in order, then AdamW", nothing});
  phases.print(out);
}

}  // namespace heddle::train
