// Data movement of the packers for x86-64, inside a path's namespace.

/// out[k * stride + j] = word k of line j, for 8 lines and 8 words of 32 bits.
inline void transpose_block(const void* const* lines, std::int64_t first, void* out,
                            std::int64_t stride) {
  __m256 row[8];
  __m256 pair[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    row[j] = _mm256_loadu_ps(static_cast<const float*>(lines[j]) + first);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 8; j += 2) {
    pair[j] = _mm256_unpacklo_ps(row[j], row[j + 1]);
    pair[j + 1] = _mm256_unpackhi_ps(row[j], row[j + 1]);
  }
#pragma GCC unroll 2
  for (int j = 0; j < 8; j += 4) {
    row[j] = _mm256_shuffle_ps(pair[j], pair[j + 2], 0x44);
    row[j + 1] = _mm256_shuffle_ps(pair[j], pair[j + 2], 0xee);
    row[j + 2] = _mm256_shuffle_ps(pair[j + 1], pair[j + 3], 0x44);
    row[j + 3] = _mm256_shuffle_ps(pair[j + 1], pair[j + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    pair[j] = _mm256_permute2f128_ps(row[j], row[j + 4], 0x20);
    pair[j + 4] = _mm256_permute2f128_ps(row[j], row[j + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    _mm256_storeu_ps(static_cast<float*>(out) + j * stride, pair[j]);
  }
}

/// out = even[0], odd[0], even[1], odd[1], ... of `count` elements each.
template <int count>
inline void interleave(const bfloat16* even, const bfloat16* odd, bfloat16* out) {
  if constexpr (count == 16) {
    const __m256i e = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even));
    const __m256i o = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd));
    const __m256i low = _mm256_unpacklo_epi16(e, o);
    const __m256i high = _mm256_unpackhi_epi16(e, o);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16),
                        _mm256_permute2x128_si256(low, high, 0x31));
  } else {
    static_assert(count == 8);
    const __m128i e = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even));
    const __m128i o = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi16(e, o));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), _mm_unpackhi_epi16(e, o));
  }
}
