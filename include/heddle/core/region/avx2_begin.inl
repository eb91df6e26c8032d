// Opens a stretch of code that is compiled for AVX2 and FMA whatever the translation unit's flags,
// and for nothing above them, so that a unit built for AVX-512 cannot lend this path instructions
// that other machines lack; region/end.inl closes it. See simd.hpp.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,no-avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,no-avx512f")
#endif
