#pragma once

#include "heddle-train/options.hpp"

namespace heddle::train {

/// Scores the token ids of a safetensors file under a checkpoint and writes log-probs, entropies, the
/// mean negative log-prob and, where asked for, logits and its gradient.
///
/// throws    UsageError for what is wrong with the files
void score(const ScoreOptions& options);

}  // namespace heddle::train
