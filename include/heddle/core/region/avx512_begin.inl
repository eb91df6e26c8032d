// Opens a stretch of code that is compiled for AVX-512 F, BW, DQ, VL whatever the translation unit's
// flags; region/end.inl closes it. See simd.hpp.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
