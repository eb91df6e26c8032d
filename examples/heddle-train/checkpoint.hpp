#pragma once

#include <filesystem>
#include <vector>

#include "heddle-train/parameters.hpp"
#include "heddle/core/scalar.hpp"
#include "support/model_config.hpp"

namespace heddle::train {

/// The model that a config describes.
[[nodiscard]] ModelDims model_dims(const examples::ModelConfig& config);

/// The config.json of a checkpoint folder.
///
/// throws    UsageError as read_model_config, and for tied embeddings: the head of this model has a
///           weight of its own
[[nodiscard]] examples::ModelConfig read_config(const std::filesystem::path& folder);

/// The model that is trained where no checkpoint is given: small enough that a step of some ten
/// thousand tokens takes seconds on two cores.
[[nodiscard]] examples::ModelConfig default_model_config();

/// The parameters of a checkpoint folder: model.safetensors, or the shards that
/// model.safetensors.index.json names.
///
/// dtypes    F32, BF16 or F64 tensors, each converted to A
/// specials  a layer's experts stacked (mlp.experts.gate_up_proj, down_proj) or one by one
///           (mlp.experts.<e>.gate_proj.weight, up_proj.weight, down_proj.weight)
/// throws    UsageError naming the file and tensor: missing, not the model's, of another shape or
///           dtype, in two shards, or in another shard than the index says
template <Accumulator A>
[[nodiscard]] std::vector<A> load_parameters(const std::filesystem::path& folder,
                                             const ParameterLayout& layout);

/// Writes config.json and model.safetensors, experts stacked, into a new folder that appears whole or
/// not at all.
///
/// throws    UsageError where `folder` exists; std::system_error for what fails while writing
template <Accumulator A>
void save_checkpoint(const std::filesystem::path& folder, const examples::ModelConfig& config,
                     const ParameterLayout& layout, const std::vector<A>& parameters);

}  // namespace heddle::train
