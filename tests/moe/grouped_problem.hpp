#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/grouped_gemm.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle::moe::test {

using heddle::test::poison;

/// Addresses for `count` elements behind which there is nothing: what is touched before it is opened ends
/// the program.
template <class T>
class ReservedMemory {
 public:
  explicit ReservedMemory(std::int64_t count)
      : bytes_(static_cast<std::size_t>(count) * sizeof(T)) {
    memory_ =
        ::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) {
      throw std::bad_alloc();
    }
  }
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;
  ~ReservedMemory() { ::munmap(memory_, bytes_); }

  [[nodiscard]] T* data() const { return static_cast<T*>(memory_); }

  /// Makes the pages of elements [first, first + count) usable.
  std::span<T> open(std::int64_t first, std::int64_t count) {
    const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<std::uintptr_t>(data() + first) / page * page;
    const auto end = reinterpret_cast<std::uintptr_t>(data() + first + count);
    if (::mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE) != 0) {
      throw std::bad_alloc();
    }
    return {data() + first, static_cast<std::size_t>(count)};
  }

 private:
  std::size_t bytes_;
  void* memory_;
};

/// One grouped product with random operands, and its definition in double. The buffer has unfilled rows
/// before and behind the groups, NaN in every input.
template <class S>
struct Grouped {
  using A = AccumulatorOf<S>;

  std::int64_t k;
  std::int64_t n;
  std::vector<std::int64_t> offsets;
  std::int64_t unfilled_behind;
  std::vector<S> rows, weights, d_result;

  Grouped(const std::vector<std::int64_t>& sizes, std::int64_t k_, std::int64_t n_,
          std::int64_t before, std::int64_t behind, std::uint64_t seed)
      : k(k_), n(n_), offsets{before}, unfilled_behind(behind) {
    for (const std::int64_t size : sizes) {
      offsets.push_back(offsets.back() + size);
    }
    heddle::test::Random random(seed);
    rows = random.normals<S>(buffer_rows() * k);
    weights = random.normals<S>(experts() * k * n);
    d_result = random.normals<S>(buffer_rows() * n);
    for (std::int64_t r = 0; r < buffer_rows(); ++r) {
      if (r < offsets.front() || r >= offsets.back()) {
        std::fill_n(rows.begin() + r * k, k, poison<S>());
        std::fill_n(d_result.begin() + r * n, n, poison<S>());
      }
    }
  }

  [[nodiscard]] std::int64_t experts() const {
    return static_cast<std::int64_t>(offsets.size()) - 1;
  }
  [[nodiscard]] std::int64_t buffer_rows() const { return offsets.back() + unfilled_behind; }
  [[nodiscard]] ExpertGroups groups() const { return {offsets}; }
  [[nodiscard]] ConstMatrixView<S> row_view() const { return {rows.data(), buffer_rows(), k}; }
  [[nodiscard]] Factor<S> row_factor() const { return as_is(row_view()); }
  [[nodiscard]] ConstMatrixView<S> weight_view() const {
    return {weights.data(), experts() * k, n};
  }
  [[nodiscard]] Factor<S> d_result_factor() const {
    return as_is(ConstMatrixView<S>(d_result.data(), buffer_rows(), n));
  }

  [[nodiscard]] std::vector<S> product(const Factor<S>& left,
                                       UnfilledRows unfilled = UnfilledRows::zeroed) const {
    std::vector<S> result(static_cast<std::size_t>(buffer_rows() * n), poison<S>());
    Workspace workspace;
    grouped_product(groups(), left, weight_view(), MatrixView<S>(result.data(), buffer_rows(), n),
                    unfilled, workspace);
    return result;
  }
  [[nodiscard]] std::vector<S> product(UnfilledRows unfilled = UnfilledRows::zeroed) const {
    return product(row_factor(), unfilled);
  }
  [[nodiscard]] std::vector<S> d_rows(UnfilledRows unfilled = UnfilledRows::zeroed) const {
    std::vector<S> result(static_cast<std::size_t>(buffer_rows() * k), poison<S>());
    Workspace workspace;
    grouped_product_d_rows(groups(), d_result_factor(), weight_view(),
                           MatrixView<S>(result.data(), buffer_rows(), k), unfilled, workspace);
    return result;
  }
  [[nodiscard]] std::vector<A> d_weights(const Factor<S>& left, A before, Write write) const {
    std::vector<A> result(weights.size(), before);
    Workspace workspace;
    grouped_product_d_weights(groups(), left, d_result_factor(),
                              {MatrixView<A>(result.data(), experts() * k, n), write}, workspace);
    return result;
  }
  [[nodiscard]] std::vector<A> d_weights(A before, Write write) const {
    return d_weights(row_factor(), before, write);
  }
  /// One of the three, into memory that is thrown away.
  void run(int which, Workspace& workspace) const {
    std::vector<S> result(static_cast<std::size_t>(buffer_rows() * std::max(n, k)));
    std::vector<A> d_weight_values(weights.size());
    if (which == 0) {
      grouped_product(groups(), row_factor(), weight_view(),
                      MatrixView<S>(result.data(), buffer_rows(), n), UnfilledRows::zeroed,
                      workspace);
    } else if (which == 1) {
      grouped_product_d_rows(groups(), d_result_factor(), weight_view(),
                             MatrixView<S>(result.data(), buffer_rows(), k), UnfilledRows::zeroed,
                             workspace);
    } else {
      grouped_product_d_weights(groups(), row_factor(), d_result_factor(),
                                {MatrixView<A>(d_weight_values.data(), experts() * k, n)},
                                workspace);
    }
  }

  // By definition, in double; of the magnitudes the sums of |a b|.

  [[nodiscard]] std::vector<double> product_by_definition(bool magnitudes) const {
    std::vector<double> result(static_cast<std::size_t>(buffer_rows() * n), 0.0);
    for_each_term([&](std::int64_t e, std::int64_t r, std::int64_t i, std::int64_t j) {
      result[static_cast<std::size_t>(r * n + j)] +=
          signed_value(rows, r * k + i, magnitudes) *
          signed_value(weights, (e * k + i) * n + j, magnitudes);
    });
    return result;
  }
  [[nodiscard]] std::vector<double> d_rows_by_definition(bool magnitudes) const {
    std::vector<double> result(static_cast<std::size_t>(buffer_rows() * k), 0.0);
    for_each_term([&](std::int64_t e, std::int64_t r, std::int64_t i, std::int64_t j) {
      result[static_cast<std::size_t>(r * k + i)] +=
          signed_value(d_result, r * n + j, magnitudes) *
          signed_value(weights, (e * k + i) * n + j, magnitudes);
    });
    return result;
  }
  [[nodiscard]] std::vector<double> d_weights_by_definition(bool magnitudes) const {
    std::vector<double> result(weights.size(), 0.0);
    for_each_term([&](std::int64_t e, std::int64_t r, std::int64_t i, std::int64_t j) {
      result[static_cast<std::size_t>((e * k + i) * n + j)] +=
          signed_value(rows, r * k + i, magnitudes) * signed_value(d_result, r * n + j, magnitudes);
    });
    return result;
  }

 private:
  template <class Body>
  void for_each_term(const Body& body) const {
    for (std::int64_t e = 0; e < experts(); ++e) {
      for (std::int64_t r = offsets[static_cast<std::size_t>(e)];
           r < offsets[static_cast<std::size_t>(e) + 1]; ++r) {
        for (std::int64_t i = 0; i < k; ++i) {
          for (std::int64_t j = 0; j < n; ++j) {
            body(e, r, i, j);
          }
        }
      }
    }
  }
  [[nodiscard]] static double signed_value(const std::vector<S>& values, std::int64_t index,
                                           bool magnitude) {
    const auto value = static_cast<double>(values[static_cast<std::size_t>(index)]);
    return magnitude ? std::abs(value) : value;
  }
};

}  // namespace heddle::moe::test
