#include "heddle-pack/pack_file.hpp"

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "heddle-pack/row_report.hpp"
#include "heddle-pack/row_tensors.hpp"
#include "heddle-pack/rows_svg.hpp"
#include "heddle/core/error.hpp"
#include "heddle/packing/pack.hpp"
#include "support/output_file.hpp"
#include "support/rollout_file.hpp"
#include "support/usage_error.hpp"

namespace heddle::pack {
namespace {

using examples::RolloutRecord;
using examples::UsageError;
namespace fs = std::filesystem;

void require_other_than_rollouts(const fs::path& output, const fs::path& rollouts) {
  std::error_code ignored;  // also of a file that does not exist, which is another
  if (fs::equivalent(output, rollouts, ignored)) {
    throw UsageError(output.string() + ": is the file of rollouts, which would be lost");
  }
}

void check_outputs(const PackJob& job) {
  examples::require_output_file(job.out);
  require_other_than_rollouts(job.out, job.rollouts);
  if (!job.svg) {
    return;
  }
  examples::require_output_file(*job.svg);
  require_other_than_rollouts(*job.svg, job.rollouts);
  if (fs::weakly_canonical(*job.svg) == fs::weakly_canonical(job.out)) {
    throw UsageError("--svg = " + *job.svg + ": must be another file than OUT");
  }
}

std::string at_line(const PackJob& job, const RolloutRecord& record) {
  return job.rollouts + ":" + std::to_string(record.line) + ": ";
}

void require_fitting(const std::vector<RolloutRecord>& records, const PackJob& job) {
  for (const RolloutRecord& record : records) {
    const std::size_t length = record.prompt_ids.size() + record.completion_ids.size();
    if (std::cmp_greater(length, job.options.budget)) {
      throw UsageError(at_line(job, record) + "the rollout has " + std::to_string(length) +
                       " tokens: must not exceed --budget (" + std::to_string(job.options.budget) +
                       ")");
    }
  }
}

/// What the packer says of "items[1].returns", of the line that item came from.
[[noreturn]] void refuse(const Error& error, const std::vector<RolloutRecord>& records,
                         const PackJob& job) {
  constexpr std::string_view prefix = "items[";
  const std::string& argument = error.argument();
  std::size_t index = records.size();
  if (argument.starts_with(prefix)) {
    const char* const end = argument.data() + argument.size();
    const auto number = std::from_chars(argument.data() + prefix.size(), end, index);
    const std::string_view rest(number.ptr, end);
    if (number.ec == std::errc() && rest.starts_with("].") && index < records.size()) {
      throw UsageError(at_line(job, records[index]) + std::string(rest.substr(2)) + " = " +
                       error.value() + ": " + error.rule());
    }
  }
  throw error;
}

}  // namespace

void pack_file(const PackJob& job, const examples::Results& results) {
  check_outputs(job);
  const std::vector<RolloutRecord> records = examples::read_rollouts(job.rollouts);
  require_fitting(records, job);
  const std::vector<packing::Rollout> items = examples::views(records);
  const packing::SegmentTable table = packing::plan(items, job.options);

  std::vector<RowReport> reports;
  for (std::int64_t row = 0; row < table.rows(); ++row) {
    reports.push_back(report_row(table, row, job.options));
  }
  try {
    write_rows_file(job.out, items, table, job.options);
  } catch (const Error& error) {
    refuse(error, records, job);
  }
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
