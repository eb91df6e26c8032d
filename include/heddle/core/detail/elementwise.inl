// Loops over spans, compiled once for each path inside its namespace.

template <Elementwise function>
[[gnu::always_inline]] inline F32::Vector apply(F32::Vector x) {
  if constexpr (function == Elementwise::exp) {
    return exp(x);
  } else if constexpr (function == Elementwise::log) {
    return log(x);
  } else if constexpr (function == Elementwise::log1p) {
    return log1p(x);
  } else if constexpr (function == Elementwise::softplus) {
    return softplus(x);
  } else if constexpr (function == Elementwise::sigmoid) {
    return sigmoid(x);
  } else {
    static_assert(function == Elementwise::silu);
    return silu(x);
  }
}

template <Elementwise function>
inline void transform(const float* x, float* y, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + F32::lanes <= count; i += F32::lanes) {
    F32::store(y + i, apply<function>(F32::load(x + i)));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    F32::store_first(y + i, apply<function>(F32::load_first(x + i, rest, 1.0F)), rest);
  }
}

template <class From, class To>
inline void convert(const From* x, To* y, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + F32::lanes <= count; i += F32::lanes) {
    F32::store(y + i, F32::load(x + i));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    F32::store_first(y + i, F32::load_first(x + i, rest, 0), rest);
  }
}
