// One step of a left fold over a block, compiled once for each path inside its namespace.

// A NaN that is already in the sum stays as it is, as the fold of one element says. Meanwhile the
// block that is read `next` comes into the cache: no hardware prefetcher follows one input to another.
template <class T>
inline void fold_add(const T* values, const T* next, float* sums, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + F32::lanes <= count; i += F32::lanes) {
    __builtin_prefetch(next + i);
    const F32::Vector sum = F32::load(sums + i);
    F32::store(sums + i, F32::select(F32::is_nan(sum), sum, F32::add(sum, F32::load(values + i))));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    const F32::Vector sum = F32::load_first(sums + i, rest, 0);
    const F32::Vector added = F32::add(sum, F32::load_first(values + i, rest, 0));
    F32::store_first(sums + i, F32::select(F32::is_nan(sum), sum, added), rest);
  }
}
