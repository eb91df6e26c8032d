// GSPO's ratio is a mean over a segment: no single row's logits can tell its cotangent.
// expect: a sequence's ratio needs all its tokens scored first
#include "heddle/loss/token_loss.hpp"

int main() {
#ifdef HEDDLE_MISUSE
  constexpr auto ratio = heddle::loss::RatioLevel::sequence;
#else
  constexpr auto ratio = heddle::loss::RatioLevel::token;
#endif
  const heddle::loss::GrpoTokenLoss<float, ratio> loss({}, {});
  return static_cast<int>(loss(0, -1.0F, 0.0F).loss);
}
