#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "heddle/packing/pad_position.hpp"

namespace heddle::train {

/// What activations and weights are stored in.
enum class DtypeOption { f32, f64, bf16 };

/// What the command line asks for, checked as far as that goes without reading a file.
struct TrainOptions {
  std::string rollouts;
  std::optional<std::string> checkpoint;
  std::optional<std::string> save;
  std::int64_t steps = 20;
  std::int64_t rollouts_per_step = 64;
  std::int64_t updates_per_step = 1;
  std::optional<std::int64_t> micro_batch;  ///< rows; all of a step where absent
  double learning_rate = 1e-3;
  DtypeOption dtype = DtypeOption::f32;
  std::int64_t budget = 2048;
  std::int64_t segment_align = 16;
  packing::PadPosition pad_position = packing::PadPosition::end;
  std::int64_t pad_align = 0;
  bool freeze_router = false;
  std::uint64_t seed = 0;
  std::optional<std::string> dump_step;
  bool explain = false;
  bool check_against_single = false;
  std::optional<std::int64_t> threads;  ///< oneTBB's own choice where absent
};

struct ScoreOptions {
  std::string tokens;
  std::string out;
  std::string checkpoint;
  bool gradients = false;
  bool logits = false;
  DtypeOption dtype = DtypeOption::f32;
  std::optional<std::int64_t> threads;
};

}  // namespace heddle::train
