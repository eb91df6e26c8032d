#include "heddle-train/score.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heddle-train/checkpoint.hpp"
#include "heddle-train/dtype.hpp"
#include "heddle-train/model.hpp"
#include "heddle-train/output_tensors.hpp"
#include "heddle-train/parameters.hpp"
#include "heddle-train/row_passes.hpp"
#include "heddle/head/target.hpp"
#include "heddle/loss/token_loss.hpp"
#include "support/model_config.hpp"
#include "support/output_file.hpp"
#include "support/safetensors.hpp"
#include "support/tensor.hpp"
#include "support/usage_error.hpp"

namespace heddle::train {
namespace {

using examples::Shape;
using examples::Tensor;
using examples::TensorFile;
using examples::TensorView;
using examples::UsageError;

// What TOKENS holds, as rows.
struct TokenRows {
  Shape shape;  // [T] or [B,T]
  std::int64_t rows = 0;
  std::int64_t tokens = 0;  // of a row
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> segment_ids;
  std::vector<std::int32_t> segment_positions;  // may be empty

  [[nodiscard]] RowInputs row(std::int64_t index) const {
    const auto part = [&](const std::vector<std::int32_t>& values) {
      return values.empty()
                 ? std::span<const std::int32_t>()
                 : std::span<const std::int32_t>(values).subspan(
                       static_cast<std::size_t>(index * tokens), static_cast<std::size_t>(tokens));
    };
    return {.token_ids = part(token_ids),
            .segment_ids = part(segment_ids),
            .segment_positions = part(segment_positions),
            .forced_experts = {}};
  }
};

std::vector<std::int32_t> read_ids(const TensorFile& file, const std::string& name,
                                   const Shape& shape) {
  const TensorView tensor = file.at(name);
  const std::string what = file.path() + ": tensor '" + name + "' is ";
  if (tensor.dtype != examples::Dtype::i32) {
    throw UsageError(what + std::string(examples::dtype_name(tensor.dtype)) + ": must be I32");
  }
  if (tensor.shape != shape) {
    throw UsageError(what + examples::shape_text(tensor.shape) + ": must be " +
                     examples::shape_text(shape) + ", like token_ids");
  }
  return tensor.converted<std::int32_t>();
}

TokenRows read_token_rows(const TensorFile& file, std::int64_t vocab) {
  TokenRows rows;
  rows.shape = file.at("token_ids").shape;
  if (rows.shape.size() != 1 && rows.shape.size() != 2) {
    throw UsageError(file.path() + ": tensor 'token_ids' is " + examples::shape_text(rows.shape) +
                     ": must be [T] or [B, T]");
  }
  rows.rows = rows.shape.size() == 2 ? rows.shape[0] : 1;
  rows.tokens = rows.shape.back();
  rows.token_ids = read_ids(file, "token_ids", rows.shape);
  if (file.find("segment_ids")) {
    rows.segment_ids = read_ids(file, "segment_ids", rows.shape);
  } else {
    rows.segment_ids.assign(rows.token_ids.size(), 1);
  }
  if (file.find("segment_positions")) {
    rows.segment_positions = read_ids(file, "segment_positions", rows.shape);
  }
  const auto refuse = [&](const char* name, std::size_t i, std::int32_t value,
                          const std::string& rule) {
    throw UsageError(file.path() + ": " + element_name(name, i) + " = " + std::to_string(value) +
                     ": " + rule);
  };
  for (std::size_t i = 0; i < rows.token_ids.size(); ++i) {
    if (rows.segment_ids[i] < 0) {
      refuse("segment_ids", i, rows.segment_ids[i], "must be >= 0");
    }
    const std::int32_t id = rows.token_ids[i];
    if (rows.segment_ids[i] > 0 && (id < 0 || id >= vocab)) {
      refuse("token_ids", i, id,
             "must be in the model's vocabulary [0, " + std::to_string(vocab) + ")");
    }
  }
  return rows;
}

std::int64_t count_scored(const TokenRows& tokens) {
  std::int64_t count = 0;
  std::vector<std::uint8_t> scored(static_cast<std::size_t>(tokens.tokens));
  for (std::int64_t row = 0; row < tokens.rows; ++row) {
    const RowInputs inputs = tokens.row(row);
    head::scored_tokens(inputs.segment_ids, inputs.segment_positions, scored);
    count += std::count(scored.begin(), scored.end(), std::uint8_t{1});
  }
  return count;
}

template <Storage S>
void score_as(const ScoreOptions& options) {
  using A = AccumulatorOf<S>;
  const examples::ModelConfig config = read_config(options.checkpoint);
  const ParameterLayout layout(model_dims(config));
  const ModelDims& dims = layout.dims();
  const std::vector<A> parameters = load_parameters<A>(options.checkpoint, layout);
  const TokenRows tokens = read_token_rows(examples::read_safetensors(options.tokens), dims.vocab);
  const Model<S> model(layout, parameters, moe::RouterTraining::trained);

  const std::int64_t positions = tokens.rows * tokens.tokens;
  const std::int64_t scored = count_scored(tokens);
  const loss::NllTokenLoss<A> mean_nll(scored == 0 ? 0.0 : 1.0 / static_cast<double>(scored));
  std::vector<RowInputs> rows;
  for (std::int64_t row = 0; row < tokens.rows; ++row) {
    rows.push_back(tokens.row(row));
  }

  std::vector<A> logps(static_cast<std::size_t>(positions));
  std::vector<A> entropy(logps.size());
  std::vector<std::int32_t> expert_ids(
      static_cast<std::size_t>(dims.layers * positions * dims.experts_per_token));
  std::vector<A> logits(options.logits ? static_cast<std::size_t>(positions * dims.vocab) : 0);
  std::vector<A> gradient(options.gradients ? static_cast<std::size_t>(layout.size()) : 0);
  double total = 0;
  RowSlots<S> slots;
  const auto fold = [&](std::int64_t row, const RowActivations<S>& kept) {
    const std::int64_t first = row * tokens.tokens;
    std::copy(kept.logps.begin(), kept.logps.end(), logps.begin() + first);
    std::copy(kept.entropy.begin(), kept.entropy.end(), entropy.begin() + first);
    copy_expert_ids(kept, positions, first, std::span(expert_ids));
    for (const A logp : kept.logps) {
      total -= static_cast<double>(logp);
    }
    if (options.logits) {
      const Matrix<A> own = model.logits(kept);
      std::copy_n(own.data(), own.size(), logits.begin() + first * dims.vocab);
    }
  };
  if (options.gradients) {
    pass_rows_with_loss(
        model, std::span<const RowInputs>(rows), slots, std::span<A>(gradient),
        [&](std::int64_t) -> const loss::NllTokenLoss<A>& { return mean_nll; },
        [&](std::int64_t row, const RowActivations<S>& kept, double) { fold(row, kept); });
  } else {
    pass_rows(
        model, std::span<const RowInputs>(rows), slots, std::span<A>(),
        [](std::int64_t, const RowActivations<S>&, std::span<A>) { return false; }, fold);
  }

  Shape with_vocab = tokens.shape;
  with_vocab.push_back(dims.vocab);
  std::vector<Tensor> out;
  out.push_back(Tensor::of("logps", tokens.shape, logps));
  out.push_back(Tensor::of("entropy", tokens.shape, entropy));
  out.push_back(Tensor::of(
      "loss", {1},
      std::vector<A>{scored == 0 ? A(0) : static_cast<A>(total / static_cast<double>(scored))}));
  out.push_back(
      Tensor::of("expert_ids", {dims.layers, positions, dims.experts_per_token}, expert_ids));
  if (options.logits) {
    out.push_back(Tensor::of("logits", with_vocab, logits));
  }
  if (options.gradients) {
    append_parameter_tensors("grad.", layout, std::span<const A>(gradient), out);
  }
  examples::write_safetensors(options.out, out, {});
}

}  // namespace

void score(const ScoreOptions& options) {
  examples::require_output_file(options.out);
  examples::require_other_file(options.out, options.tokens, "tokens");
  with_storage(options.dtype, [&](auto storage) { score_as<decltype(storage)>(options); });
}

}  // namespace heddle::train
