// What the router does to one token's row of logits, compiled once for each path inside its namespace.
// See router.hpp.

/// A logit as the router orders it: NaN ranks with -inf.
inline F32::Vector ranked(F32::Vector logits) {
  return F32::select(F32::is_nan(logits), F32::broadcast(-__builtin_inff()), logits);
}

template <class S>
inline float ranked_one(const S* logit) {
  const float value = static_cast<float>(*logit);
  return value != value ? -__builtin_inff() : value;
}

/// Puts an id behind all whose logit is at least its own: the lowest id of a tie stays first where ids
/// come in rising order. A full list loses its last.
inline void insert(float value, std::int32_t id, std::int64_t held, float* values,
                   std::int32_t* ids) {
  std::int64_t at = held;
  for (; at > 0 && value > values[at - 1]; --at) {
    values[at] = values[at - 1];
    ids[at] = ids[at - 1];
  }
  values[at] = value;
  ids[at] = id;
}

/// The K largest logits of a row and their ids, best first.
template <class S>
inline void choose(const S* logits, std::int64_t experts, std::int64_t top_k, std::int32_t* ids,
                   float* values) {
  std::int64_t e = 0;
  for (; e < top_k; ++e) {
    insert(ranked_one(logits + e), static_cast<std::int32_t>(e), e, values, ids);
  }
  // Few of the rest are among the K best: a vector without one costs a compare.
  F32::Vector least = F32::broadcast(values[top_k - 1]);
  for (; e < experts; e += F32::lanes) {
    const std::int64_t left = experts - e;
    const int count = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
    const F32::Vector row = ranked(count == F32::lanes
                                       ? F32::load(logits + e)
                                       : F32::load_first(logits + e, count, -__builtin_inff()));
    if (!F32::any(F32::less(least, row))) {
      continue;
    }
    float candidates[F32::lanes];
    F32::store(candidates, row);
    for (int i = 0; i < count; ++i) {
      if (candidates[i] > values[top_k - 1]) {
        insert(candidates[i], static_cast<std::int32_t>(e + i), top_k - 1, values, ids);
      }
    }
    least = F32::broadcast(values[top_k - 1]);
  }
}

/// The logits at given ids.
template <class S>
inline void gather(const S* logits, std::int64_t count, const std::int32_t* ids, float* values) {
  for (std::int64_t k = 0; k < count; ++k) {
    values[k] = ranked_one(logits + ids[k]);
  }
}

/// Maximum of a whole row and sum of e^(l - maximum): column j in lane j % 16 on every path.
template <class S>
inline void row_softmax(const S* logits, std::int64_t experts, float* max, float* sum) {
  const F32::Vector nothing = F32::broadcast(-__builtin_inff());
  F32::Vector lanes[lane_vectors];
  for (int v = 0; v < lane_vectors; ++v) {
    lanes[v] = nothing;
  }
  for (std::int64_t e = 0; e < experts; e += 16) {
    for (int v = 0; v < lane_vectors; ++v) {
      const std::int64_t left = experts - e - v * F32::lanes;
      if (left > 0) {
        const int count = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
        lanes[v] = F32::max(ranked(F32::load_first(logits + e + v * F32::lanes, count,
                                                   -__builtin_inff())),
                            lanes[v]);
      }
    }
  }
  *max = fold_max(lanes);
  const F32::Vector shift = F32::broadcast(*max);
  for (int v = 0; v < lane_vectors; ++v) {
    lanes[v] = F32::zero();
  }
  for (std::int64_t e = 0; e < experts; e += 16) {
    for (int v = 0; v < lane_vectors; ++v) {
      const std::int64_t left = experts - e - v * F32::lanes;
      if (left > 0) {
        const int count = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
        const F32::Vector row = ranked(F32::load_first(logits + e + v * F32::lanes, count,
                                                       -__builtin_inff()));
        lanes[v] = F32::add(lanes[v], exp(F32::sub(row, shift)));
      }
    }
  }
  *sum = fold_sum(lanes);
}

/// values = e^(values - max).
inline void exps_in_place(std::int64_t count, float max, float* values) {
  const F32::Vector shift = F32::broadcast(max);
  for (std::int64_t k = 0; k < count; k += F32::lanes) {
    const std::int64_t left = count - k;
    const int some = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
    F32::store_first(values + k, exp(F32::sub(F32::load_first(values + k, some, max), shift)),
                     some);
  }
}

/// d_logits = -p * mean over a whole row, p = e^(l - max) / sum.
template <class S>
inline void spread_mean(const S* logits, std::int64_t experts, float max, float sum, float mean,
                        float* d_logits) {
  const F32::Vector shift = F32::broadcast(max);
  const F32::Vector total = F32::broadcast(sum);
  const F32::Vector factor = F32::broadcast(-mean);
  for (std::int64_t e = 0; e < experts; e += F32::lanes) {
    const std::int64_t left = experts - e;
    const int count = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
    const F32::Vector row = ranked(F32::load_first(logits + e, count, -__builtin_inff()));
    const F32::Vector p = F32::div(exp(F32::sub(row, shift)), total);
    F32::store_first(d_logits + e, F32::mul(p, factor), count);
  }
}

/// probabilities += p over a whole row.
template <class S>
inline void add_probabilities(const S* logits, std::int64_t experts, float max, float sum,
                              float* probabilities) {
  const F32::Vector shift = F32::broadcast(max);
  const F32::Vector total = F32::broadcast(sum);
  for (std::int64_t e = 0; e < experts; e += F32::lanes) {
    const std::int64_t left = experts - e;
    const int count = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
    const F32::Vector row = ranked(F32::load_first(logits + e, count, -__builtin_inff()));
    const F32::Vector p = F32::div(exp(F32::sub(row, shift)), total);
    F32::store_first(probabilities + e,
                     F32::add(F32::load_first(probabilities + e, count, 0), p), count);
  }
}

/// sum_e cost_e p_e, in 16 lanes.
template <class S>
inline float mean_cost(const S* logits, std::int64_t experts, float max, float sum,
                       const float* cost) {
  const F32::Vector shift = F32::broadcast(max);
  const F32::Vector total = F32::broadcast(sum);
  F32::Vector lanes[lane_vectors];
  for (int v = 0; v < lane_vectors; ++v) {
    lanes[v] = F32::zero();
  }
  for (std::int64_t e = 0; e < experts; e += 16) {
    for (int v = 0; v < lane_vectors; ++v) {
      const std::int64_t at = e + v * F32::lanes;
      const std::int64_t left = experts - at;
      if (left > 0) {
        const int count = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
        const F32::Vector row = ranked(F32::load_first(logits + at, count, -__builtin_inff()));
        const F32::Vector p = F32::div(exp(F32::sub(row, shift)), total);
        lanes[v] = F32::fma(F32::load_first(cost + at, count, 0), p, lanes[v]);
      }
    }
  }
  return fold_sum(lanes) + 0.0F;
}

/// d_logits += p (cost + offset) over a whole row.
template <class S>
inline void add_loss_row(const S* logits, std::int64_t experts, float max, float sum,
                         const float* cost, float offset, float* d_logits) {
  const F32::Vector shift = F32::broadcast(max);
  const F32::Vector total = F32::broadcast(sum);
  const F32::Vector constant = F32::broadcast(offset);
  for (std::int64_t e = 0; e < experts; e += F32::lanes) {
    const std::int64_t left = experts - e;
    const int count = left < F32::lanes ? static_cast<int>(left) : F32::lanes;
    const F32::Vector row = ranked(F32::load_first(logits + e, count, -__builtin_inff()));
    const F32::Vector p = F32::div(exp(F32::sub(row, shift)), total);
    const F32::Vector factor = F32::add(F32::load_first(cost + e, count, 0), constant);
    F32::store_first(d_logits + e,
                     F32::fma(p, factor, F32::load_first(d_logits + e, count, 0)), count);
  }
}

/// log of one value.
inline float log_one(float x) {
  float result;
  F32::store_first(&result, log(F32::broadcast(x)), 1);
  return result;
}

template <class S>
inline heddle::moe::detail::RouterRowFunctions<S> row_functions() {
  return {&choose<S>,      &gather<S>,            &row_softmax<S>, &exps_in_place,
          &spread_mean<S>, &add_probabilities<S>, &mean_cost<S>,   &add_loss_row<S>,
          &log_one};
}
