#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/core/error.hpp"

namespace heddle::gdn {

/// Which tokens of a row are real and which belong together: worked out once per row from its ids,
/// and the only thing that convolution, recurrence and context parallelism ask. Two sets of
/// boundaries that may disagree are how documents leak into each other.
///   m_t = ids[t] > 0,  act_t = m_t ? ids[t] : act_{t-1},  act_{-1} = initial_segment
///   r_t = m_t and ids[t] != act_{t-1},  epoch E_t = sum_{s <= t} r_s
/// Same document <=> equal epochs, never equal ids: [1,2,1] is three documents, [1,0,1] is one.
///
/// shapes    segment_ids [tokens]: > 0 a document, 0 padding
/// specials  initial_segment = 0: nothing is continued, the first token starts a document. Two
///           neighbouring documents of one id cannot be told apart: number them apart when packing
/// memory    10 bytes a token, owned
/// cost      O(tokens)
/// throws    Error for initial_segment < 0, a negative id
/// source    spec/gdn.md 2.1 (which reads a negative id as padding; every room refuses one instead)
class Segments {
 public:
  Segments(std::span<const std::int32_t> segment_ids, std::int32_t initial_segment)
      : initial_segment_(initial_segment) {
    require(initial_segment >= 0, "gdn::Segments", "initial_segment", initial_segment,
            "must be >= 0");
    active_.reserve(segment_ids.size());
    epoch_.reserve(segment_ids.size());
    valid_.reserve(segment_ids.size());
    starts_.reserve(segment_ids.size());
    std::int32_t active = initial_segment;
    std::int32_t epoch = 0;
    for (const std::int32_t id : segment_ids) {
      const auto token = static_cast<std::int64_t>(valid_.size());
      if (id < 0) [[unlikely]] {
        fail("gdn::Segments", element_name("segment_ids", token), id, "must be >= 0");
      }
      const bool valid = id > 0;
      const bool starts = valid && id != active;
      if (valid) {
        first_valid_ = first_valid_ < 0 ? token : first_valid_;
        last_valid_ = token;
        ++valid_tokens_;
        active = id;
      }
      epoch += starts ? 1 : 0;
      active_.push_back(active);
      epoch_.push_back(epoch);
      valid_.push_back(valid ? 1 : 0);
      starts_.push_back(starts ? 1 : 0);
    }
  }

  [[nodiscard]] std::int64_t tokens() const { return static_cast<std::int64_t>(valid_.size()); }
  [[nodiscard]] std::int32_t initial_segment() const { return initial_segment_; }

  /// m_t: a token, not padding.
  [[nodiscard]] bool valid(std::int64_t token) const { return valid_[index(token)] != 0; }
  /// r_t: the first token of its document; what came before must not reach it.
  [[nodiscard]] bool starts(std::int64_t token) const { return starts_[index(token)] != 0; }
  /// act_t: id of the document that a state after this token belongs to, 0 before any.
  [[nodiscard]] std::int32_t active(std::int64_t token) const { return active_[index(token)]; }
  /// E_t: documents started so far; 0 while the incoming one continues.
  [[nodiscard]] std::int32_t epoch(std::int64_t token) const { return epoch_[index(token)]; }

  /// -1 where the row has no token.
  [[nodiscard]] std::int64_t first_valid() const { return first_valid_; }
  [[nodiscard]] std::int64_t last_valid() const { return last_valid_; }
  [[nodiscard]] std::int64_t valid_tokens() const { return valid_tokens_; }

  /// Documents that start in the row: with none the incoming state reaches its end.
  [[nodiscard]] std::int32_t starts_in_row() const { return epoch_.empty() ? 0 : epoch_.back(); }
  /// act after the last token: initial_segment of a piece that continues this row.
  [[nodiscard]] std::int32_t final_segment() const {
    return active_.empty() ? initial_segment_ : active_.back();
  }

 private:
  [[nodiscard]] static std::size_t index(std::int64_t token) {
    return static_cast<std::size_t>(token);
  }

  std::vector<std::int32_t> active_;
  std::vector<std::int32_t> epoch_;
  std::vector<std::uint8_t> valid_;
  std::vector<std::uint8_t> starts_;
  std::int32_t initial_segment_ = 0;
  std::int64_t first_valid_ = -1;
  std::int64_t last_valid_ = -1;
  std::int64_t valid_tokens_ = 0;
};

}  // namespace heddle::gdn
