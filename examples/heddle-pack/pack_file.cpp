#include "heddle-pack/pack_file.hpp"

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <vector>

#include "heddle-pack/row_report.hpp"
#include "heddle-pack/row_tensors.hpp"
#include "heddle-pack/rows_svg.hpp"
#include "heddle/packing/pack.hpp"
#include "support/output_file.hpp"
#include "support/rollout_file.hpp"
#include "support/usage_error.hpp"

namespace heddle::pack {

void pack_file(const PackJob& job, const examples::Results& results) {
  examples::require_output_file(job.out);
  if (job.svg) {
    examples::require_output_file(*job.svg);
    if (std::filesystem::weakly_canonical(*job.svg) == std::filesystem::weakly_canonical(job.out)) {
      throw examples::UsageError("--svg = " + *job.svg + ": must be another file than OUT");
    }
  }
  const std::vector<examples::RolloutRecord> records = examples::read_rollouts(job.rollouts);
  const std::vector<packing::Rollout> items = examples::views(records);
  const packing::SegmentTable table = packing::plan(items, job.options);

  std::vector<RowReport> reports;
  for (std::int64_t row = 0; row < table.rows(); ++row) {
    reports.push_back(report_row(table, row, job.options));
  }
  write_rows_file(job.out, items, table, job.options);
  if (job.svg) {
    examples::write_text_file(*job.svg, rows_svg(table, job.options));
  }
  if (results.json()) {
    for (const RowReport& report : reports) {
      results.print(to_json(report));
    }
  } else {
    print(reports, job.options, results.out());
  }
}

}  // namespace heddle::pack
