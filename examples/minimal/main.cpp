// Scores three tokens over a vocabulary of four and differentiates their log-probs, all in memory that
// the caller owns.
#include <array>
#include <cstdint>
#include <cstdio>

#include "heddle/core/error.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/chunked_head.hpp"

int main() {
  const heddle::head::Dims dims{.tokens = 3, .hidden = 2, .vocab = 4};
  const std::array<float, 6> hidden = {1, 0, 0, 1, -1, 1};               // [tokens, hidden]
  const std::array<float, 8> weight = {2, 1, 0, -1, 0.5F, 0, -0.5F, 3};  // [hidden, vocab]
  const std::array<std::int32_t, 3> target_ids = {0, 3, 1};
  const heddle::head::Inputs<float> inputs{
      .hidden = {hidden.data(), dims.tokens, dims.hidden},
      .weight = {weight.data(), dims.hidden, dims.vocab},
      .target_ids = target_ids,
  };
  std::array<float, 3> logps{};
  std::array<float, 3> max{};
  std::array<float, 3> exp_sum{};
  const std::array<float, 3> d_logps = {-1, -1, -1};
  std::array<float, 6> d_hidden{};

  try {
    heddle::Workspace workspace;  // scratch, kept from call to call
    heddle::head::forward<float, float, float>(
        dims, inputs, {}, {.logps = logps, .max = max, .exp_sum = exp_sum}, workspace);
    heddle::head::backward<float, float, float>(
        dims, inputs, {}, {.max = max, .exp_sum = exp_sum}, {.d_logps = d_logps},
        {.d_hidden = {d_hidden.data(), dims.tokens, dims.hidden}}, workspace);
  } catch (const heddle::Error& error) {
    std::fprintf(stderr, "minimal: %s\n", error.what());
    return 2;
  }

  std::puts("token  log-prob  d loss / d hidden");
  for (std::size_t t = 0; t < logps.size(); ++t) {
    std::printf("%5zu  %8.4f  %8.4f %8.4f\n", t, static_cast<double>(logps[t]),
                static_cast<double>(d_hidden[2 * t]), static_cast<double>(d_hidden[2 * t + 1]));
  }
}
