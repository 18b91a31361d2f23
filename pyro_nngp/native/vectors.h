// What the compiled sources share: vector types of GCC and Clang, and the instruction sets that code is compiled for.

#pragma once

#define INLINE inline __attribute__((always_inline))

template <class T, int BYTES> struct Lanes {
    static constexpr int W = BYTES / sizeof(T);
    typedef T V __attribute__((vector_size(BYTES)));
};

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,fma,prefer-vector-width=512")))
#endif
