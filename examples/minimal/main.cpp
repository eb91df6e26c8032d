// Scores three tokens of a toy vocabulary: log-probabilities and their gradient with respect to the
// hidden states, in the memory of the caller.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "heddle/core/view.hpp"
#include "heddle/head/reference.hpp"

int main() {
  std::puts("pending");
}
