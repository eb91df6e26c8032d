// The tiles and packers of the matrix engine, compiled once for each path inside its namespace, which
// provides F32, F64, the Tiling constants, transpose_block and interleave_panel. Nothing here is a
// lambda or calls the standard library: neither would inherit the path's instructions.

/// How a tile's rows of A lie in memory.
enum class AOrder {
  by_step,  ///< step after step, the rows of a step side by side
  by_row,   ///< row after row
};

template <class S>
inline constexpr int vectors_per_panel = 64 /
                                         static_cast<int>(sizeof(typename S::Scalar)) / S::lanes;

/// c += a * b on one element of K: f32 and f64.
template <class S>
struct SingleStep {
  using Accumulate = S;
  using AElement = typename S::Scalar;
  using BVector = typename S::Vector;
  static constexpr int parts = 1;

  /// B's row of one part of a step, `count` vectors of it from successive panels.
  template <int part, int count>
  static void load_b(const char* b, std::int64_t panel_bytes, std::int64_t, BVector (&out)[count]) {
    constexpr int per_panel = vectors_per_panel<S>;
#pragma GCC unroll 16
    for (int v = 0; v < count; ++v) {
      out[v] = S::load(reinterpret_cast<const AElement*>(b + v / per_panel * panel_bytes) +
                       v % per_panel * S::lanes);
    }
  }
  static typename S::Vector broadcast(const AElement* a) {
    return S::broadcast(*a);
  }
  static typename S::Vector fma(typename S::Vector a, BVector b, typename S::Vector c) {
    return S::fma(a, b, c);
  }
};

/// Two elements of K, the odd one first, with bf16 B as it is stored, row-major; A is packed widened,
/// in the same order.
struct PairStepRows {
  using Accumulate = F32;
  using AElement = float;
  using BVector = F32::Vector;
  static constexpr int parts = 2;

  template <int part, int count>
  static void load_b(const char* b, std::int64_t panel_bytes, std::int64_t step_bytes,
                     BVector (&out)[count]) {
    constexpr int per_panel = vectors_per_panel<F32>;
#pragma GCC unroll 16
    for (int v = 0; v < count; ++v) {
      const char* const row = b + (part == 0 ? step_bytes / 2 : 0) + v / per_panel * panel_bytes;
      out[v] = F32::load(reinterpret_cast<const bfloat16*>(row) + v % per_panel * F32::lanes);
    }
  }
  static F32::Vector broadcast(const AElement* a) {
    return F32::broadcast(*a);
  }
  static F32::Vector fma(F32::Vector a, BVector b, F32::Vector c) {
    return F32::fma(a, b, c);
  }
};

/// What a tile does with B besides multiplying it.
enum class BUse {
  read,
  pack,  ///< writes it in panels, as it was multiplied
};

/// Where a packing tile writes B: a cache line of each panel for each part of a step.
struct PackedB {
  char* next;
  std::int64_t panel_bytes;
};

/// One part of one step of a tile.
template <class Step, AOrder order, BUse use, int part, int rows, int vectors>
[[gnu::always_inline]] inline void multiply_part(
    const typename Step::AElement* a, std::int64_t a_stride, const char* b,
    std::int64_t b_step_bytes, std::int64_t b_panel_bytes, PackedB& packed,
    typename Step::Accumulate::Vector (&sum)[rows][vectors]) {
  typename Step::BVector right[vectors];
  Step::template load_b<part, vectors>(b, b_panel_bytes, b_step_bytes, right);
  if constexpr (use == BUse::pack) {
    constexpr int per_panel = vectors_per_panel<typename Step::Accumulate>;
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      __builtin_memcpy(packed.next + v / per_panel * packed.panel_bytes +
                           v % per_panel * static_cast<int>(sizeof right[v]),
                       &right[v], sizeof right[v]);
    }
    packed.next += 64;
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const auto left = Step::broadcast(order == AOrder::by_step ? a + part * a_stride + r
                                                               : a + r * a_stride + part);
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      sum[r][v] = Step::fma(left, right[v], sum[r][v]);
    }
  }
}

/// What one tile fetches of its block's FetchAhead: a piece every so many steps.
struct TileFetch {
  const char* first;
  std::int64_t stride;
  std::int64_t steps;
};

/// Where a tile's chains begin.
enum class Chain {
  fresh,    ///< at +0
  resumed,  ///< at what C holds
};

/// rows x panels of C over one block of K, or one stretch of it. Every accumulator is one chain.
template <class Step, AOrder order, BUse use, Chain chain, int rows, int panels, class C>
inline void tile(const detail::BlockWork<C>& work, const TileFetch& fetch,
                 const typename Step::AElement* a, const char* b, C* c, std::int64_t c_stride,
                 std::int64_t c_panel, bool add) {
  using S = typename Step::Accumulate;
  constexpr int per_panel = vectors_per_panel<S>;
  constexpr int vectors = panels * per_panel;
  typename S::Vector sum[rows][vectors];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      if constexpr (chain == Chain::resumed) {
        sum[r][v] = S::load(c + r * c_stride + v / per_panel * c_panel + v % per_panel * S::lanes);
      } else {
        sum[r][v] = S::zero();
      }
    }
  }
  const std::int64_t a_stride = work.a_stride;
  const std::int64_t b_step_bytes = work.b_step_bytes;
  const std::int64_t b_panel_bytes = work.b_panel_bytes;
  const std::int64_t a_step = Step::parts * (order == AOrder::by_step ? a_stride : 1);
  PackedB packed{static_cast<char*>(work.packed_b), work.packed_b_panel_bytes};
  const char* ahead = fetch.first;
  for (std::int64_t left = work.steps; left > 0; left -= fetch.steps) {
#pragma GCC unroll 4
    for (int byte = 0; byte < detail::fetch_row_bytes; byte += 64) {
      __builtin_prefetch(ahead + byte, 0, 2);
    }
    ahead += fetch.stride;
    std::int64_t step = left < fetch.steps ? left : fetch.steps;
    do {
      multiply_part<Step, order, use, 0>(a, a_stride, b, b_step_bytes, b_panel_bytes, packed, sum);
      if constexpr (Step::parts == 2) {
        multiply_part<Step, order, use, 1>(a, a_stride, b, b_step_bytes, b_panel_bytes, packed,
                                           sum);
      }
      a += a_step;
      b += b_step_bytes;
    } while (--step > 0);
  }
  if (add) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v) {
        C* const to = c + r * c_stride + v / per_panel * c_panel + v % per_panel * S::lanes;
        sum[r][v] = S::add(S::load(to), sum[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      S::store(c + r * c_stride + v / per_panel * c_panel + v % per_panel * S::lanes, sum[r][v]);
    }
  }
}

/// `count` rows by the smallest tile that has them. What a tile has more than exists, of rows (packed
/// A has something there) or of columns, goes into a buffer: in C it is not ours.
template <class Step, AOrder order, int rows, int panels, class C>
inline void tile_of_rows(std::int64_t count, const detail::BlockWork<C>& work,
                         const TileFetch& fetch, const void* a, const char* b, C* c,
                         std::int64_t columns) {
  if constexpr (rows > 1 && order == AOrder::by_step) {
    constexpr int smaller = rows > 4 ? 4 : rows / 2;
    if (count <= smaller) {
      tile_of_rows<Step, order, smaller, panels>(count, work, fetch, a, b, c, columns);
      return;
    }
  }
  constexpr std::int64_t width = panel_columns<C>;
  const bool whole = count == rows && columns >= panels * width;
  C buffer[rows * panels * width];
  tile<Step, order, BUse::read, Chain::fresh, rows, panels>(
      work, fetch, static_cast<const typename Step::AElement*>(a), b, whole ? c : buffer,
      whole ? work.c_stride : panels * width, whole ? work.c_panel : width, whole && work.add);
  if (!whole) {
    const std::int64_t existing = columns < panels * width ? columns : panels * width;
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t j = 0; j < existing; ++j) {
        C* const to = c + r * work.c_stride + j / width * work.c_panel + j % width;
        const C value = buffer[r * panels * width + j];
        *to = work.add ? *to + value : value;
      }
    }
  }
}

/// Pieces of a block's FetchAhead, dealt out to its tiles in turn.
struct BlockFetch {
  std::int64_t next;      ///< piece of the next tile
  std::int64_t per_tile;  ///< pieces
  std::int64_t steps;     ///< of a tile for one piece
};

template <class C>
inline BlockFetch deal_fetch(const detail::BlockWork<C>& work) {
  constexpr std::int64_t rows = Tiling::rows;
  constexpr std::int64_t columns = Tiling::panels * panel_columns<C>;
  const std::int64_t tiles =
      ((work.rows + rows - 1) / rows) * ((work.columns + columns - 1) / columns);
  if (work.ahead.first == nullptr || tiles == 0) {
    return {0, 0, work.steps};
  }
  const std::int64_t per_tile = (work.ahead.pieces + tiles - 1) / tiles;
  return {0, per_tile, (work.steps + per_tile - 1) / per_tile};
}

/// The next tile's share; where there is none left, of what it reads anyway.
template <class C>
inline TileFetch take_fetch(const detail::BlockWork<C>& work, const char* b, BlockFetch& fetch) {
  const detail::FetchAhead& ahead = work.ahead;
  if (fetch.per_tile == 0 || fetch.next >= ahead.pieces) {
    return {b, 0, work.steps};
  }
  const char* const first = ahead.first + fetch.next % ahead.rows * ahead.stride +
                            fetch.next / ahead.rows * detail::fetch_row_bytes;
  fetch.next += fetch.per_tile;
  return {first, ahead.stride, fetch.steps};
}

/// Every row of the block against a tile's panels of B.
template <class Step, AOrder order, int panels, class C>
inline void rows_of_block(const detail::BlockWork<C>& work, BlockFetch& fetch, const char* b, C* c,
                          std::int64_t columns) {
  using AElement = typename Step::AElement;
  constexpr std::int64_t rows = Tiling::rows;
  const auto* const a = static_cast<const char*>(work.a);
  const std::int64_t tile_bytes =
      order == AOrder::by_step ? work.a_panel_bytes
                               : rows * work.a_stride * static_cast<std::int64_t>(sizeof(AElement));
  for (std::int64_t row = 0; row < work.rows; row += rows) {
    const std::int64_t count = work.rows - row < rows ? work.rows - row : rows;
    tile_of_rows<Step, order, Tiling::rows, panels>(count, work, take_fetch(work, b, fetch),
                                                    a + row / rows * tile_bytes, b,
                                                    c + row * work.c_stride, columns);
  }
}

/// A block of a product.
template <class Step, AOrder order, class C>
inline void block(const detail::BlockWork<C>& work) {
  constexpr std::int64_t width = panel_columns<C>;
  BlockFetch fetch = deal_fetch(work);
  for (std::int64_t column = 0; column < work.columns; column += Tiling::panels * width) {
    const std::int64_t panel = column / width;
    const std::int64_t columns = work.columns - column;
    const char* const b = static_cast<const char*>(work.b) + panel * work.b_panel_bytes;
    C* const c = work.c + panel * work.c_panel;
    if (Tiling::panels == 1 || columns <= width) {
      rows_of_block<Step, order, 1>(work, fetch, b, c, columns);
    } else {
      rows_of_block<Step, order, Tiling::panels>(work, fetch, b, c, columns);
    }
  }
}

/// The rows of a block against panels of B that are read as they are stored by the first rows' tile,
/// and by the others as that tile leaves them packed.
template <class Step, class StepRows, int panels, class C>
inline void rows_of_packing_block(const detail::BlockWork<C>& work, BlockFetch& fetch,
                                  const char* b, C* c, std::int64_t columns) {
  static_assert(Step::parts == 1);
  constexpr std::int64_t rows = Tiling::rows;
  tile<StepRows, AOrder::by_step, BUse::pack, Chain::fresh, Tiling::rows, panels>(
      work, take_fetch(work, b, fetch), static_cast<const typename StepRows::AElement*>(work.a), b,
      c, work.c_stride, work.c_panel, work.add);
  detail::BlockWork<C> others = work;
  others.a = static_cast<const char*>(work.a) + work.a_panel_bytes;
  others.rows -= rows;
  others.steps *= StepRows::parts;
  others.b_step_bytes = 64;
  others.b_panel_bytes = work.packed_b_panel_bytes;
  rows_of_block<Step, AOrder::by_step, panels>(
      others, fetch, static_cast<const char*>(work.packed_b), c + rows * work.c_stride, columns);
}

/// A block of a product of at least a tile of rows, whole panels of columns, B in rows.
template <class Step, class StepRows, class C>
inline void packing_block(const detail::BlockWork<C>& work) {
  constexpr std::int64_t width = panel_columns<C>;
  BlockFetch fetch = deal_fetch(work);
  for (std::int64_t column = 0; column < work.columns; column += Tiling::panels * width) {
    const std::int64_t panel = column / width;
    const std::int64_t columns = work.columns - column;
    const char* const b = static_cast<const char*>(work.b) + panel * work.b_panel_bytes;
    C* const c = work.c + panel * work.c_panel;
    if (Tiling::panels == 1 || columns <= width) {
      rows_of_packing_block<Step, StepRows, 1>(work, fetch, b, c, columns);
    } else {
      rows_of_packing_block<Step, StepRows, Tiling::panels>(work, fetch, b, c, columns);
    }
  }
}

/// One stretch of the chains of up to a tile of rows, by the smallest tile that has them; they wait in
/// `sums`, which has rows for the surplus.
template <class Step, Chain chain, int rows, int panels, class C>
inline void stretch_of_rows(std::int64_t count, const detail::BlockWork<C>& work,
                            const TileFetch& fetch, const char* a, const char* b, C* sums) {
  if constexpr (rows > 1) {
    constexpr int smaller = rows > 4 ? 4 : rows / 2;
    if (count <= smaller) {
      stretch_of_rows<Step, chain, smaller, panels>(count, work, fetch, a, b, sums);
      return;
    }
  }
  tile<Step, AOrder::by_step, BUse::read, chain, rows, panels>(
      work, fetch, reinterpret_cast<const typename Step::AElement*>(a), b, sums, work.columns,
      panel_columns<C>, false);
}

template <class Step, Chain chain, int panels, class C>
inline void stretch(const detail::BlockWork<C>& work, const TileFetch& fetch, const char* a,
                    const char* b, C* sums) {
  constexpr std::int64_t rows = Tiling::rows;
  for (std::int64_t row = 0; row < work.rows; row += rows) {
    const std::int64_t count = work.rows - row < rows ? work.rows - row : rows;
    stretch_of_rows<Step, chain, Tiling::rows, panels>(
        count, work, fetch, a + row / rows * work.a_panel_bytes, b, sums + row * work.columns);
  }
}

/// All columns of one stretch of K; meanwhile B is fetched from `ahead` on, in the order of memory.
template <class Step, Chain chain, int depth, class C>
inline void stretch_of_block(const detail::BlockWork<C>& work, const char* a, const char* b,
                             const char* ahead) {
  constexpr std::int64_t width = panel_columns<C>;
  constexpr std::int64_t columns_each = Tiling::panels * width;
  const std::int64_t row_bytes = work.columns / width * work.b_panel_bytes;
  const std::int64_t pieces =
      detail::stretch_depth * Tiling::panels * work.b_panel_bytes / detail::fetch_row_bytes;
  std::int64_t position = 0;
  for (std::int64_t column = 0; column < work.columns; column += columns_each) {
    const TileFetch fetch{
        ahead + position / row_bytes * (work.b_step_bytes / depth) + position % row_bytes,
        detail::fetch_row_bytes, (work.steps + pieces - 1) / pieces};
    position += pieces * detail::fetch_row_bytes;
    const char* const panel = b + column / width * work.b_panel_bytes;
    C* const sums = static_cast<C*>(work.chains) + column;
    if (Tiling::panels == 1 || work.columns - column <= width) {
      stretch<Step, chain, 1>(work, fetch, a, panel, sums);
    } else {
      stretch<Step, chain, Tiling::panels>(work, fetch, a, panel, sums);
    }
  }
}

/// A block of few rows, A step after step, against whole panels of B in rows: one stretch of K over all
/// columns after the other, so that B is read in the order of memory, as fast as it comes.
template <class Step, int depth, class C>
inline void streaming_block(const detail::BlockWork<C>& block) {
  constexpr std::int64_t width = panel_columns<C>;
  constexpr std::int64_t steps = detail::stretch_depth / depth;
  const std::int64_t a_step_bytes =
      Step::parts * block.a_stride * static_cast<std::int64_t>(sizeof(typename Step::AElement));
  detail::BlockWork<C> work = block;
  for (std::int64_t step = 0; step < block.steps; step += steps) {
    work.steps = block.steps - step < steps ? block.steps - step : steps;
    const char* const a = static_cast<const char*>(block.a) + step * a_step_bytes;
    const char* const b = static_cast<const char*>(block.b) + step * block.b_step_bytes;
    const char* const ahead = b + 2 * steps * block.b_step_bytes;
    if (step == 0) {
      stretch_of_block<Step, Chain::fresh, depth>(work, a, b, ahead);
    } else {
      stretch_of_block<Step, Chain::resumed, depth>(work, a, b, ahead);
    }
  }
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const C* const sums = static_cast<const C*>(block.chains) + row * block.columns;
    for (std::int64_t column = 0; column < block.columns; column += width) {
      C* const to = block.c + row * block.c_stride + column / width * block.c_panel;
      for (std::int64_t j = 0; j < width; ++j) {
        to[j] = block.add ? to[j] + sums[column + j] : sums[column + j];
      }
    }
  }
}

// Packers. A panel of A holds Tiling::rows rows, a panel of B a cache line of columns. What a last
// panel lacks is filled with numbers, of A with any, of B with zeros: tiles read them, results do not
// depend on them.

/// out[k * width + j] = lines[j][k], `width` lines of 32-bit words running along K.
template <int width>
inline void pack_word_lines(const void* const* lines, std::int64_t depth, void* out) {
  constexpr int block_lines = Tiling::transpose;
  constexpr int blocks = (width + block_lines - 1) / block_lines;
  const void* filled[blocks * block_lines];
  for (int j = 0; j < blocks * block_lines; ++j) {
    filled[j] = lines[j < width ? j : 0];
  }
  auto* const to = static_cast<char*>(out);
  std::int64_t k = 0;
  for (; k + block_lines <= depth; k += block_lines) {
    // Where the width is no whole number of blocks, the last block spills into the first words of the
    // next rows: so it goes before the first, and at the very end into the slack behind the panel.
#pragma GCC unroll 4
    for (int block = blocks - 1; block >= 0; --block) {
      transpose_block(filled + block * block_lines, k, to + 4 * (k * width + block * block_lines),
                      width);
    }
  }
  for (; k < depth; ++k) {
    for (int j = 0; j < width; ++j) {
      __builtin_memcpy(to + 4 * (k * width + j), static_cast<const char*>(filled[j]) + 4 * k, 4);
    }
  }
}

inline void widen_line(const bfloat16* from, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + F32::lanes <= count; i += F32::lanes) {
    F32::store(to + i, F32::load(from + i));
  }
  if (i < count) {
    F32::store_first(to + i, F32::load_first(from + i, static_cast<int>(count - i), 0),
                     static_cast<int>(count - i));
  }
}

/// Which element of a pair comes first where pairs are widened.
enum class PairOrder {
  even_first,  ///< as K runs
  odd_first,   ///< as the hardware's dot product takes them
};

/// A panel of pairs as a panel of f32. Up to a vector is read behind the pairs and written behind the
/// panel.
template <int width, PairOrder order>
inline void widen_pairs(const bfloat16* pairs, std::int64_t count, float* out) {
  constexpr int even = order == PairOrder::even_first ? 0 : 1;
  for (std::int64_t p = 0; p < count; ++p) {
    float* const to = out + 2 * p * width;
    // The lower row first: what is written behind it belongs to the upper one.
    if constexpr (even == 0) {
      for (int j = 0; j < width; j += F32::lanes) {
        F32::store(to + j, F32::load_even(pairs + 2 * (p * width + j)));
      }
    }
    for (int j = 0; j < width; j += F32::lanes) {
      F32::store(to + (1 - even) * width + j, F32::load_odd(pairs + 2 * (p * width + j)));
    }
    if constexpr (even == 1) {
      for (int j = 0; j < width; j += F32::lanes) {
        F32::store(to + width + j, F32::load_even(pairs + 2 * (p * width + j)));
      }
    }
  }
}

/// Stored as T, packed as T, one element of K a step.
template <class T>
struct PackSame {
  using Source = T;
  using Packed = T;
  static constexpr std::int64_t multiple = 1;  // of K in a panel

  template <int width>
  static void lines(const T* const* lines, int count, std::int64_t depth, T* out) {
    if constexpr (sizeof(T) == 4) {
      const void* words[width];
      for (int j = 0; j < width; ++j) {
        words[j] = lines[j < count ? j : 0];
      }
      pack_word_lines<width>(words, depth, out);
    } else {
      for (std::int64_t k = 0; k < depth; ++k) {
        for (int j = 0; j < count; ++j) {
          out[k * width + j] = lines[j][k];
        }
      }
    }
  }
  template <int width>
  static void rows(const T* const* rows, std::int64_t column, std::int64_t count,
                   std::int64_t depth, T* out, std::int64_t panel_stride) {
    for (std::int64_t k = 0; k < depth; ++k) {
      const T* const from = rows[k] + column;
      T* to = out + k * width;
      std::int64_t j = 0;
      for (; j + width <= count; j += width, to += panel_stride) {
        __builtin_memcpy(to, from + j, sizeof(T) * width);
      }
      for (; j < count; ++j, ++to) {
        *to = from[j];
      }
    }
  }
};

/// Stored as bf16, packed as f32, one element of K a step.
struct PackWidened {
  using Source = bfloat16;
  using Packed = float;
  static constexpr std::int64_t multiple = 1;

  template <int width>
  static void lines(const bfloat16* const* lines, int count, std::int64_t depth, float* out) {
    constexpr std::int64_t stretch = 64;  // 16 x 64 floats: small beside a first-level cache
    float buffer[width * stretch];
    for (std::int64_t k = 0; k < depth; k += stretch) {
      const std::int64_t length = depth - k < stretch ? depth - k : stretch;
      const void* words[width];
      for (int j = 0; j < width; ++j) {
        if (j < count) {
          widen_line(lines[j] + k, length, buffer + j * stretch);
        }
        words[j] = buffer + (j < count ? j : 0) * stretch;
      }
      pack_word_lines<width>(words, length, out + k * width);
    }
  }
  template <int width>
  static void rows(const bfloat16* const* rows, std::int64_t column, std::int64_t count,
                   std::int64_t depth, float* out, std::int64_t panel_stride) {
    for (std::int64_t k = 0; k < depth; ++k) {
      for (std::int64_t j = 0; j < count; j += width) {
        widen_line(rows[k] + column + j, count - j < width ? count - j : width,
                   out + j / width * panel_stride + k * width);
      }
    }
  }
};

/// Stored as bf16, packed as pairs of elements of K side by side; an odd last one is paired with 0.
struct PackPairs {
  using Source = bfloat16;
  using Packed = bfloat16;
  static constexpr std::int64_t multiple = 2;

  template <int width>
  static void lines(const bfloat16* const* lines, int count, std::int64_t depth, bfloat16* out) {
    const void* words[width];
    for (int j = 0; j < width; ++j) {
      words[j] = lines[j < count ? j : 0];
    }
    pack_word_lines<width>(words, depth / 2, out);
    if (depth % 2 != 0) {
      bfloat16* const last = out + (depth - 1) * width;
      __builtin_memset(static_cast<void*>(last), 0, 4 * width);
      for (int j = 0; j < count; ++j) {
        last[2 * j] = lines[j][depth - 1];
      }
    }
  }
  template <int width>
  static void rows(const bfloat16* const* rows, std::int64_t column, std::int64_t count,
                   std::int64_t depth, bfloat16* out, std::int64_t panel_stride) {
    for (std::int64_t k = 0; k < depth; k += 2) {
      const bfloat16* const even = rows[k] + column;
      const bfloat16* const odd = k + 1 < depth ? rows[k + 1] + column : nullptr;
      bfloat16* to = out + k * width;
      std::int64_t j = 0;
      if (odd != nullptr) {
        for (; j + width <= count; j += width, to += panel_stride) {
          interleave<width>(even + j, odd + j, to);
        }
      }
      for (; j < count; j += width, to += panel_stride) {
        const std::int64_t existing = count - j < width ? count - j : width;
        __builtin_memset(static_cast<void*>(to), 0, 4 * width);
        for (std::int64_t i = 0; i < existing; ++i) {
          to[2 * i] = even[j + i];
          if (odd != nullptr) {
            to[2 * i + 1] = odd[j + i];
          }
        }
      }
    }
  }
};

/// Stored as bf16, packed as f32 with the odd element of each pair of K first; an odd last element is
/// paired with 0.
struct PackSwapped {
  using Source = bfloat16;
  using Packed = float;
  static constexpr std::int64_t multiple = 2;

  template <int width>
  static void lines(const bfloat16* const* lines, int count, std::int64_t depth, float* out) {
    constexpr std::int64_t stretch = 64;
    bfloat16 pairs[stretch * width + 2 * F32::lanes];
    const bfloat16* from[width];
    for (std::int64_t k = 0; k < depth; k += stretch) {
      const std::int64_t length = depth - k < stretch ? depth - k : stretch;
      for (int j = 0; j < width; ++j) {
        from[j] = lines[j < count ? j : 0] + k;
      }
      PackPairs::lines<width>(from, width, length, pairs);
      widen_pairs<width, PairOrder::odd_first>(pairs, (length + 1) / 2, out + k * width);
    }
  }
  template <int width>
  static void rows(const bfloat16* const* rows, std::int64_t column, std::int64_t count,
                   std::int64_t depth, float* out, std::int64_t panel_stride) {
    for (std::int64_t k = 0; k < depth; ++k) {
      for (std::int64_t j = 0; j < count; j += width) {
        widen_line(rows[k] + column + j, count - j < width ? count - j : width,
                   out + j / width * panel_stride + (k ^ 1) * width);
      }
    }
    if (depth % 2 != 0) {
      for (std::int64_t j = 0; j < count; j += width) {
        __builtin_memset(out + j / width * panel_stride + (depth - 1) * width, 0,
                         sizeof(float) * width);
      }
    }
  }
};

/// Rows of a panel of `depth` elements of K.
template <class Pack>
inline std::int64_t panel_rows(std::int64_t depth) {
  if constexpr (sizeof(typename Pack::Packed) == 2) {
    return (depth + 1) / 2;
  } else {
    return (depth + Pack::multiple - 1) / Pack::multiple * Pack::multiple;
  }
}

/// Zeros in the last `missing` of the `width` elements of each row of a panel.
inline void fill_panel(std::int64_t missing, std::int64_t width, std::int64_t element_bytes,
                       std::int64_t rows, void* panel) {
  if (missing > 0) {
    for (std::int64_t row = 0; row < rows; ++row) {
      __builtin_memset(static_cast<char*>(panel) + ((row + 1) * width - missing) * element_bytes, 0,
                       static_cast<unsigned>(missing * element_bytes));
    }
  }
}

template <class Pack>
inline void pack_lines_a(const typename Pack::Source* const* lines, int count, std::int64_t depth,
                         void* out) {
  Pack::template lines<Tiling::rows>(lines, count, depth, static_cast<typename Pack::Packed*>(out));
}

template <class Pack>
inline void pack_rows_a(const typename Pack::Source* const* rows, std::int64_t column,
                        std::int64_t count, std::int64_t depth, void* out,
                        std::int64_t panel_bytes) {
  using Packed = typename Pack::Packed;
  Pack::template rows<Tiling::rows>(rows, column, count, depth, static_cast<Packed*>(out),
                                    panel_bytes / static_cast<std::int64_t>(sizeof(Packed)));
  const std::int64_t missing = (Tiling::rows - count % Tiling::rows) % Tiling::rows;
  fill_panel(missing, Tiling::rows, sizeof(Packed) * (sizeof(Packed) == 2 ? 2 : 1),
             panel_rows<Pack>(depth), static_cast<char*>(out) + count / Tiling::rows * panel_bytes);
}

template <class Pack>
inline void pack_lines_b(const typename Pack::Source* const* lines, int count, std::int64_t depth,
                         void* out) {
  using Packed = typename Pack::Packed;
  constexpr int width = static_cast<int>(panel_columns<Packed>);
  Pack::template lines<width>(lines, count, depth, static_cast<Packed*>(out));
  fill_panel(width - count, width, 64 / width, panel_rows<Pack>(depth), out);
}

template <class Pack>
inline void pack_rows_b(const typename Pack::Source* const* rows, std::int64_t column,
                        std::int64_t count, std::int64_t depth, void* out,
                        std::int64_t panel_bytes) {
  using Packed = typename Pack::Packed;
  constexpr std::int64_t width = panel_columns<Packed>;
  Pack::template rows<width>(rows, column, count, depth, static_cast<Packed*>(out),
                             panel_bytes / static_cast<std::int64_t>(sizeof(Packed)));
  fill_panel((width - count % width) % width, width, 64 / width, panel_rows<Pack>(depth),
             static_cast<char*>(out) + count / width * panel_bytes);
}

template <PairOrder order>
inline void widen_panel(const bfloat16* pairs, std::int64_t count, void* out) {
  widen_pairs<16, order>(pairs, count, static_cast<float*>(out));
}

/// The path's kernels for factors stored as Pack*::Source and multiplied by Step.
template <class Step, class StepRows, class PackA, class PackB>
constexpr detail::GemmKernels<typename PackA::Source, typename PackB::Source> make_kernels() {
  using A = typename PackA::Source;
  using C = typename Step::Accumulate::Scalar;
  detail::GemmKernels<A, typename PackB::Source> kernels{};
  kernels.tile_rows = Tiling::rows;
  kernels.a_step_bytes = static_cast<int>(sizeof(typename Step::AElement));
  kernels.step_depth = sizeof(typename PackA::Packed) == 2 ? 2 : 1;
  kernels.depth_multiple = PackA::multiple;
  kernels.pack_lines_a = &pack_lines_a<PackA>;
  kernels.pack_rows_a = &pack_rows_a<PackA>;
  kernels.pack_lines_b = &pack_lines_b<PackB>;
  kernels.pack_rows_b = &pack_rows_b<PackB>;
  kernels.block = &block<Step, AOrder::by_step, C>;
  kernels.block_b_rows = &block<StepRows, AOrder::by_step, C>;
  if constexpr (std::is_same_v<A, typename PackB::Source>) {
    kernels.streaming_block = &streaming_block<StepRows, detail::step_depth<A>, C>;
    kernels.packing_block = &packing_block<Step, StepRows, C>;
  }
  if constexpr (std::is_same_v<A, typename Step::AElement>) {
    kernels.block_a_rows = &block<Step, AOrder::by_row, C>;
  }
  if constexpr (std::is_same_v<PackB, PackSwapped>) {
    kernels.widen_panel = &widen_panel<PairOrder::odd_first>;
  } else if constexpr (std::is_same_v<PackB, PackWidened>) {
    kernels.widen_panel = &widen_panel<PairOrder::even_first>;
  }
  return kernels;
}

/// The path's kernels for factors stored as A and B.
template <class A, class B>
constexpr detail::GemmKernels<A, B> kernels_for() {
  using Single = SingleStep<F32>;
  if constexpr (std::is_same_v<A, double>) {
    return make_kernels<SingleStep<F64>, SingleStep<F64>, PackSame<double>, PackSame<double>>();
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<B, float>) {
    return make_kernels<Single, Single, PackSame<float>, PackSame<float>>();
  } else if constexpr (std::is_same_v<A, float>) {
    return make_kernels<Single, Single, PackSame<float>, PackWidened>();
  } else if constexpr (std::is_same_v<B, float>) {
    return make_kernels<Single, Single, PackWidened, PackSame<float>>();
  } else {
    return make_kernels<Single, PairStepRows, PackSwapped, PackSwapped>();
  }
}

template <class A, class B>
inline constexpr detail::GemmKernels<A, B> gemm_kernels = kernels_for<A, B>();

/// The path's packers of matrices that are kept in panels.
template <class T>
constexpr detail::PanelPackers<T> make_panel_packers() {
  using Pack = std::conditional_t<std::is_same_v<T, bfloat16>, PackPairs, PackSame<T>>;
  return {&pack_lines_b<Pack>, &pack_rows_b<Pack>};
}

template <class T>
inline constexpr detail::PanelPackers<T> panel_packers = make_panel_packers<T>();
