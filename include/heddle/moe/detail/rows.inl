// What moving rows between tokens and experts does to a row, compiled once for each path inside its
// namespace. See sort.hpp.

/// sum over k, ascending, of weights[k] * (row of slot k), from +0 and with both roundings; slots without
/// a row are passed over and not read.
template <int vectors, class S>
inline void block_sum(const heddle::moe::detail::SlotRows<S>& slots, const float* weights,
                      std::int64_t column, F32::Vector (&sum)[vectors]) {
  for (int v = 0; v < vectors; ++v) {
    sum[v] = F32::zero();
  }
  for (std::int64_t k = 0; k < slots.count; ++k) {
    const S* const row = slots.row(k);
    if (row == nullptr) {
      continue;
    }
    const S* const next = slots.next_row(k);
    if (next != nullptr) {
      constexpr int line = 64 / static_cast<int>(sizeof(S));
      for (int c = 0; c < vectors * F32::lanes; c += line) {
        __builtin_prefetch(next + column + c);
      }
    }
    const F32::Vector weight = F32::broadcast(weights == nullptr ? 1.0F : weights[k]);
    for (int v = 0; v < vectors; ++v) {
      sum[v] = F32::add(sum[v], F32::mul(weight, F32::load(row + column + v * F32::lanes)));
    }
  }
}

template <class S>
inline F32::Vector tail_sum(const heddle::moe::detail::SlotRows<S>& slots, const float* weights,
                            std::int64_t column, int columns) {
  F32::Vector sum = F32::zero();
  for (std::int64_t k = 0; k < slots.count; ++k) {
    const S* const row = slots.row(k);
    if (row != nullptr) {
      const F32::Vector weight = F32::broadcast(weights == nullptr ? 1.0F : weights[k]);
      sum = F32::add(sum, F32::mul(weight, F32::load_first(row + column, columns, 0)));
    }
  }
  return sum;
}

/// A cache line of a result past the caches, where that spares reading what it overwrites.
template <class O>
inline void stream_line(O* to, const O* line) {
#if defined(__x86_64__)
  for (int part = 0; part < 4; ++part) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + part,
                     _mm_load_si128(reinterpret_cast<const __m128i*>(line) + part));
  }
#else
  __builtin_memcpy(static_cast<void*>(to), line, 64);
#endif
}

/// out = the weighted sum of a token's rows, or out + it. `streams`: out lies on cache lines and is not
/// read again soon.
template <class S, class O>
inline void weighted_sum(const heddle::moe::detail::SlotRows<S>& slots, const float* weights,
                         bool accumulates, bool streams, O* out, std::int64_t columns) {
  // Eight vectors a step: 256 bytes of each bf16 row, and chains enough to hide the adds. K rows are
  // more streams than the hardware follows, so each row asks for the next token's.
  constexpr int vectors = 8;
  constexpr int block = vectors * F32::lanes;
  constexpr int line = 64 / static_cast<int>(sizeof(O));
  std::int64_t column = 0;
  for (; column + block <= columns; column += block) {
    F32::Vector sum[vectors];
    block_sum<vectors>(slots, weights, column, sum);
    if constexpr (block % line == 0) {
      if (streams) {
        alignas(64) O rounded[block];
        for (int v = 0; v < vectors; ++v) {
          F32::store(rounded + v * F32::lanes, sum[v]);
        }
        for (int c = 0; c < block; c += line) {
          stream_line(out + column + c, rounded + c);
        }
        continue;
      }
    }
    for (int v = 0; v < vectors; ++v) {
      O* const to = out + column + v * F32::lanes;
      F32::store(to, accumulates ? F32::add(F32::load(to), sum[v]) : sum[v]);
    }
  }
  for (; column < columns; column += F32::lanes) {
    const std::int64_t left = columns - column;
    const int rest = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
    F32::Vector sum = tail_sum(slots, weights, column, rest);
    if (accumulates) {
      sum = F32::add(F32::load_first(out + column, rest, 0), sum);
    }
    F32::store_first(out + column, sum, rest);
  }
}

/// scaled = weight * row, rounded once.
template <class S>
inline void scale(float weight, const S* row, S* scaled, std::int64_t columns) {
  const F32::Vector factor = F32::broadcast(weight);
  std::int64_t column = 0;
  for (; column + F32::lanes <= columns; column += F32::lanes) {
    F32::store(scaled + column, F32::mul(factor, F32::load(row + column)));
  }
  if (column < columns) {
    const int rest = static_cast<int>(columns - column);
    F32::store_first(scaled + column, F32::mul(factor, F32::load_first(row + column, rest, 0)),
                     rest);
  }
}

/// <a, b>: 64 lanes on every path, the lane of column j is j % 64, folded in a fixed tree.
template <class S>
inline float dot(const S* a, const S* b, std::int64_t columns) {
  constexpr int chains = 4;
  F32::Vector sum[chains][lane_vectors];
  for (int c = 0; c < chains; ++c) {
    for (int v = 0; v < lane_vectors; ++v) {
      sum[c][v] = F32::zero();
    }
  }
  std::int64_t column = 0;
  for (; column + chains * 16 <= columns; column += chains * 16) {
    for (int c = 0; c < chains; ++c) {
      for (int v = 0; v < lane_vectors; ++v) {
        const std::int64_t at = column + c * 16 + v * F32::lanes;
        sum[c][v] = F32::fma(F32::load(a + at), F32::load(b + at), sum[c][v]);
      }
    }
  }
  for (int c = 0; c < chains; ++c) {
    for (int v = 0; v < lane_vectors; ++v) {
      const std::int64_t at = column + c * 16 + v * F32::lanes;
      const std::int64_t left = columns - at;
      if (left > 0) {
        const int rest = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
        sum[c][v] = F32::fma(F32::load_first(a + at, rest, 0), F32::load_first(b + at, rest, 0),
                             sum[c][v]);
      }
    }
  }
  for (int v = 0; v < lane_vectors; ++v) {
    sum[0][v] = F32::add(F32::add(sum[0][v], sum[1][v]), F32::add(sum[2][v], sum[3][v]));
  }
  return fold_sum(sum[0]) + 0.0F;  // a lane may have underflowed to -0
}
