// The nearest-neighbor conditional of stationary kernels, sums and products of them, and its gradient on CPUs.
//
// For a target x with neighbors z_1..z_K: w = (K_nn + diag(noise))^-1 k_n and v = k_xx - k_n' w, with the gradient of
// the docstring of pyro_nngp/conditionals/nearest_neighbor.py. Points are worked on in blocks of as many as a vector
// register holds, one lane each: every operation below acts on a whole block and no instruction ever mixes two points.
// A block goes through kernel, Cholesky factor, solves and gradient while its K x K values stay in cache. The backward
// pass takes the factors that the forward pass has left in the caller's memory, or else factorizes again and nothing of
// size B K^2 is stored. Where the gradient can only be one by the scales and the variance, and there are few of them, the
// forward pass leaves the derivatives of w and v instead, while kernel and factor are at hand, and the backward pass is a
// sum of products. Several sets of hyperparameters share the points: a block is gathered once and worked on for one set
// after the other.
//
// Plain C interface for ctypes, C++17, vector extensions of GCC and Clang, no intrinsics. Threads are std::thread,
// started per call: a second OpenMP runtime beside torch's, the alternative, is a known source of crashes.
// A kernel is a sum of products of parts, each a function of the distance in columns of its own; most have one part.
// Symbols: S sets of hyperparameters, F parts of the kernel, T scalar type, V vector of one T per point, R rows and
// columns of a register tile, K padded to multiples of R.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "vectors.h"

extern "C" {

enum Status { DONE, NO_MEMORY, NO_SUCH_POINT };

// Mirrored by Arguments in structures.py. Pointers may be null where that is said.
struct Arguments {
    int64_t num_sets, num_targets, num_neighbors, num_dims, num_points;
    int64_t num_parts, num_terms;
    int64_t noise_of_sets;       // whether each set has its own noise
    int64_t num_threads;
    int64_t by_nu;               // number of tables if derivatives by their smoothness nu are wanted, else 0
    double jitter;
    const int64_t *kernels;      // (F,): numbers of the enumeration Kernel
    const int64_t *columns;      // (F + 1,): the first column of each part, and D
    const int64_t *terms;        // (num_terms,): the parts of each product, one bit each
    const void *x;               // (B, D)
    const void *points;          // (N, D)
    const int64_t *neighbors;    // (B, K), rows of points, negative for none
    const void *scale;           // (S, D), lengthscale times the stretch of the kernel
    const void *variance;        // (S, F)
    const void *table;           // (S, tables, 2, cells, C): correlations and their derivatives by the smoothness, or null
    const void *noise;           // (S, B, K) or (B, K), or null
    const void *explained;       // (B, K + 1, K + 1) of one set, or null: covariances of neighbors and, last, target to
                                 // subtract; without tangents
    uint8_t *failed;             // (S, B): written by the forward pass, read by the backward pass
    void *factors;               // nn_conditional_factors() bytes, or null: likewise
    void *w, *v;                 // (S, B, K), (S, B): written by the forward pass, read by the backward pass
    void *tangent_w, *tangent_v; // (S, B, P, K), (S, B, P + 1), or both null, P = D + by_nu: derivatives of w and v
                                 // by log scale, smoothness and, the last of v, log variance; without noise, of one
                                 // part. Written forward, read backward
    const void *grad_w, *grad_v; // (S, B, K), (S, B): backward pass; null in the forward pass
    void *grad_noise;            // (S, B, K) or null
    void *left;                  // (B, K) or null: 2 grad_v w - (K_nn + diag(noise))^-1 grad_w, minus the gradient of k_n
    void *grad_x, *grad_z;       // (S, B, D), (S, B, K, D), both or neither
    double *sums;                // (S, blocks, P + F) or null: gradients of log scale, smoothness and log variances
};
}

namespace {

enum Kernel { RBF, MATERN12, MATERN32, MATERN52, WENDLAND, CONSTANT, WAVE, TABLE };

constexpr int MAX_PARTS = 8; // as in combination.py

template <class T> struct Real;
template <> struct Real<float> {
    using Int = int32_t;
    static constexpr float highest = 87.33f, magic = 0x1.8p23f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    static constexpr float exponential[] = {0x1.6a2434p-10f, 0x1.1239e2p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f, 0x1.fffffcp-2f, 1, 1};
    static constexpr int bits = 23, bias = 127, cell_bits = 5, coefficients = 4;
};
template <> struct Real<double> {
    using Int = int64_t;
    static constexpr double highest = 708.39, magic = 0x1.8p52, ln2_high = 0x1.62e42fee0p-1, ln2_low = 0x1.a39ef35793c76p-33;
    static constexpr double exponential[] = {0x1.ad7f6f0799ee2p-26, 0x1.28ad72cc30daap-22, 0x1.71df2552390c2p-19,
        0x1.a0199a0c677acp-16, 0x1.a01a012a57b51p-13, 0x1.6c16c1842a11dp-10, 0x1.1111111127be5p-7, 0x1.555555555087cp-5,
        0x1.55555555554fap-3, 0x1.000000000000ap-1, 1, 1};
    static constexpr int bits = 52, bias = 1023, cell_bits = 4, coefficients = 8;
};

// exp(-s) for 0 <= s < highest: -s = n ln 2 + r, |r| <= ln 2 / 2, and the polynomial in r of least relative error, 3e-9
// and 4e-18 before rounding, that begins with 1 + r. NaN stays NaN.
template <class T, class V> INLINE V exp_of_minus(const V s) {
    using C = Real<T>;
    typedef typename C::Int Int __attribute__((vector_size(sizeof(V))));
    const V shifted = C::magic - s * T(1.442695040888963407);
    const V n = shifted - C::magic;
    const V r = (-s - n * C::ln2_high) - n * C::ln2_low;
    V p = V{} + C::exponential[0];
#pragma GCC unroll 16
    for (size_t i = 1; i < sizeof(C::exponential) / sizeof(T); ++i) p = p * r + C::exponential[i];
    Int exponent;
    std::memcpy(&exponent, &shifted, sizeof(V)); // the low bits of `shifted` are n
    exponent = (exponent + C::bias) << C::bits;
    V power;
    std::memcpy(&power, &exponent, sizeof(V));
    return p * power;
}

// The value where exp(-s) is a normal number, and 0 beyond. NaN stays NaN.
template <class T, class V> INLINE V where_normal(const V s, const V value) { return s >= Real<T>::highest ? V{} : value; }

template <class T, class V> INLINE V square_root(const V x) {
    V s;
    for (unsigned l = 0; l < sizeof(V) / sizeof(T); ++l) s[l] = std::sqrt(x[l]);
    return s;
}

// A squared distance that has overflowed is a large one: infinity times exp(-infinity) would be NaN. NaN stays NaN.
template <class T, class V> INLINE V finite(const V q) { return q > T(1e30) ? V{} + T(1e30) : q; }

// Of the tables of pyro_nngp/kernels/matern_table.py: exponents of two between which they have 2^cell_bits cells for each
// octave. The octave below has the constant 1, the one beyond 0.
constexpr int LEAST = -80, MOST = 20;
constexpr double FIRST_Q = 0x1p-81, LAST_Q = 0x1p20;
template <class T> constexpr int CELLS = (MOST - LEAST + 2) << Real<T>::cell_bits;

// out[c] <- the c-th coefficient of the cell of each lane. Whole rows are loaded, four numbers at a time, and
// transposed, which takes a third of the time of gathering numbers.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ROWS
#endif
#endif

#if defined(ROWS)
template <class A, size_t... I> INLINE auto join(const A a, const A b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, int(I)...);
}

// The rows of lanes k, k + 4, k + 8.. one after the other.
template <class T, class V, class Int> INLINE V every_fourth(const T *table, const Int cell, const int k) {
    constexpr int stride = Real<T>::coefficients, lanes = sizeof(V) / sizeof(T);
    typedef T Four __attribute__((vector_size(4 * sizeof(T))));
    Four row[lanes / 4];
#pragma GCC unroll 4
    for (int g = 0; g < lanes / 4; ++g) std::memcpy(&row[g], table + cell[4 * g + k] * stride, sizeof(Four));
    if constexpr (lanes == 4) {
        return row[0];
    } else {
        const auto low = join(row[0], row[1], std::make_index_sequence<8>());
        if constexpr (lanes == 8)
            return low;
        else
            return join(low, join(row[2], row[3], std::make_index_sequence<8>()), std::make_index_sequence<16>());
    }
}

// Of each four lanes: the first two of a and b in turn, or the last two; the first two of a, then of b, or the last two.
constexpr int turn(const int i, const int lanes, const int from) {
    return i % 2 * lanes + i / 4 * 4 + i % 4 / 2 + from;
}
constexpr int halves(const int i, const int lanes, const int from) {
    return i % 4 / 2 * lanes + i / 4 * 4 + i % 2 + from;
}
template <int FROM, class V, size_t... I> INLINE V in_turn(const V a, const V b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, turn(I, sizeof...(I), FROM)...);
}
template <int FROM, class V, size_t... I> INLINE V by_halves(const V a, const V b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, halves(I, sizeof...(I), FROM)...);
}
#endif

template <class T, class V, class Int> INLINE void read_cells(const T *table, const Int cell, V *out) {
    constexpr int count = Real<T>::coefficients, lanes = sizeof(V) / sizeof(T);
#if defined(ROWS)
    if constexpr (lanes >= 4) {
        constexpr auto all = std::make_index_sequence<lanes>();
#pragma GCC unroll 2
        for (int c = 0; c < count; c += 4) {
            const V a = every_fourth<T, V>(table + c, cell, 0), b = every_fourth<T, V>(table + c, cell, 1);
            const V d = every_fourth<T, V>(table + c, cell, 2), e = every_fourth<T, V>(table + c, cell, 3);
            const V ab = in_turn<0>(a, b, all), de = in_turn<0>(d, e, all);
            const V ab2 = in_turn<2>(a, b, all), de2 = in_turn<2>(d, e, all);
            out[c] = by_halves<0>(ab, de, all), out[c + 1] = by_halves<2>(ab, de, all);
            out[c + 2] = by_halves<0>(ab2, de2, all), out[c + 3] = by_halves<2>(ab2, de2, all);
        }
        return;
    }
#endif
    for (int c = 0; c < count; ++c)
        for (int l = 0; l < lanes; ++l) out[c][l] = table[cell[l] * count + c];
}

// The correlation at squared distances q, its slope by q and its derivative by nu, by the polynomial of the cell
// of q, whose number is exponent and first bits of q and whose place the other bits. NaN stays NaN.
template <class T, bool SLOPE, bool NU, class V> INLINE V correlation(const T *table, const V q, V *slope, V *nu_slope) {
    using C = Real<T>;
    using I = typename C::Int;
    typedef I Int __attribute__((vector_size(sizeof(V))));
    constexpr int below = C::bits - C::cell_bits;
    const V from = q < T(FIRST_Q) ? V{} + T(FIRST_Q) : q, known = from < T(LAST_Q) ? from : V{} + T(LAST_Q);
    Int bits;
    std::memcpy(&bits, &known, sizeof(V));
    const Int cell = (bits >> below) - (I(C::bias + LEAST - 1) << C::cell_bits);
    const Int place_bits = (bits & ((I(1) << below) - 1)) | (I(C::bias) << C::bits);
    V place;
    std::memcpy(&place, &place_bits, sizeof(V));
    place = place * T(1 << C::cell_bits) - T((1 << C::cell_bits) + 0.5);
    V terms[C::coefficients], value = finite<T>(q) * T(0), change = {};
    read_cells<T>(table, cell, terms);
#pragma GCC unroll 8
    for (int c = C::coefficients - 1; c >= 0; --c) {
        if (SLOPE) change = change * place + value;
        value = value * place + terms[c];
    }
    if (SLOPE) {
        const Int reciprocal = (I(2 * C::bias + C::cell_bits) - (bits >> C::bits)) << C::bits;
        V width;
        std::memcpy(&width, &reciprocal, sizeof(V)); // one over that of the cell
        *slope = change * width;
    }
    if (NU) {
        V sum = {};
        read_cells<T>(table + CELLS<T> * C::coefficients, cell, terms);
#pragma GCC unroll 8
        for (int c = C::coefficients - 1; c >= 0; --c) sum = sum * place + terms[c];
        *nu_slope = sum;
    }
    return value;
}

// A kernel function of one set of hyperparameters.
template <class T> struct Function {
    int kernel;
    T variance;
    const T *table;

    // Of COUNT squared distances q, what is asked for of k(q), its slope dk/dq and its derivative by nu. k and q
    // share their memory.
    template <int COUNT, bool VALUE, bool SLOPE, bool NU, class V>
    INLINE void evaluate(V *q, V *slope, V *nu_slope) const {
        switch (kernel) {
        case RBF:
            for (int e = 0; e < COUNT; ++e) {
                const V k = where_normal<T>(q[e], variance * exp_of_minus<T>(q[e]));
                if (SLOPE) slope[e] = -k;
                if (VALUE) q[e] = k;
            }
            break;
        case MATERN12:
            for (int e = 0; e < COUNT; ++e) {
                const V s = square_root<T>(q[e]), k = where_normal<T>(s, variance * exp_of_minus<T>(s));
                if (SLOPE) slope[e] = q[e] <= T(1e-24) ? V{} : T(-0.5) * k / s;
                if (VALUE) q[e] = k;
            }
            break;
        case MATERN32:
            for (int e = 0; e < COUNT; ++e) {
                const V s = square_root<T>(q[e]), f = exp_of_minus<T>(s);
                if (SLOPE) slope[e] = where_normal<T>(s, T(-0.5) * variance * f);
                if (VALUE) q[e] = where_normal<T>(s, variance * (f + s * f));
            }
            break;
        case MATERN52:
            for (int e = 0; e < COUNT; ++e) {
                const V s = square_root<T>(q[e]), f = exp_of_minus<T>(s), g = f + s * f;
                if (SLOPE) slope[e] = where_normal<T>(s, T(-1.0 / 6) * variance * g);
                if (VALUE) q[e] = where_normal<T>(s, variance * (g + q[e] * T(1.0 / 3) * f));
            }
            break;
        case WENDLAND:
            for (int e = 0; e < COUNT; ++e) {
                const V far = finite<T>(q[e]), s = square_root<T>(far), left = V{} + T(1) - s, rest = left < 0 ? V{} : left;
                const V squared = rest * rest, fifth = variance * rest * squared * squared;
                if (SLOPE) slope[e] = T(-28.0 / 3) * fifth * (T(1) + T(5) * s);
                if (VALUE) q[e] = T(1.0 / 3) * fifth * rest * (T(35) * far + T(18) * s + T(3));
            }
            break;
        case CONSTANT:
            for (int e = 0; e < COUNT; ++e) {
                if (SLOPE) slope[e] = V{};
                if (VALUE) q[e] = V{} + variance;
            }
            break;
        case WAVE:
            for (int e = 0; e < COUNT; ++e) {
                if (SLOPE) slope[e] = V{} - T(0.5) * variance;
                if (VALUE) q[e] = variance * (T(1) - T(0.5) * q[e]);
            }
            break;
        default:
            for (int e = 0; e < COUNT; ++e) {
                V change = {}, nu_change = {};
                const V k = variance * correlation<T, SLOPE, NU>(table, q[e], &change, &nu_change);
                if (SLOPE) slope[e] = variance * change;
                if (NU) nu_slope[e] = variance * nu_change;
                if (VALUE) q[e] = k;
            }
        }
    }
};

constexpr int64_t round_up(const int64_t count, const int64_t to) { return (count + to - 1) / to * to; }

// Of the rows of a lower triangle, and of a factor: its triangle row by row, then the inverse of its diagonal.
constexpr int64_t offset(const int64_t row) { return row * (row + 1) / 2; }
constexpr int64_t factor_size(const int64_t rows) { return offset(rows) + rows; }

// The working memory of one thread, and what it does to a block of points.
template <class T, int BYTES, int R> struct Block {
    using V = typename Lanes<T, BYTES>::V;
    static constexpr int W = Lanes<T, BYTES>::W;
    static constexpr int64_t PANEL = 12 * R, SLICE = 64, TABLE_SIZE = 2 * CELLS<T> * Real<T>::coefficients;

    const Arguments &arg;
    const int64_t K, D, P, F, rows; // P: D + by_nu; rows: K rounded up to a multiple of R
    std::vector<char> memory;
    Status status = DONE;
    V *near, *real, *z, *mask, *diagonal, *tril, *inverse, *solved[2], *left, *grad_z, *total, *slopes, *nu_slopes;
    int64_t first, live; // the points of the block: from `first` on, `live` <= W of them
    int64_t base, block; // of the set at hand: number of its first point, and of the block, in all that is written
    const T *scale;      // likewise
    T variance;          // of the sum of products
    Function<T> functions[MAX_PARTS];

    explicit Block(const Arguments &a)
        : arg(a), K(a.num_neighbors), D(a.num_dims), P(a.num_dims + a.by_nu), F(a.num_parts),
          rows(round_up(a.num_neighbors, R)) {
        const bool inputs = a.grad_z != nullptr;
        const int64_t own = a.factors ? 0 : factor_size(rows), sharing = a.num_sets > 1 ? 1 : 0;
        const int64_t sloped = a.tangent_w && !a.grad_w ? offset(rows) + rows : 0;
        const size_t count =
            rows * D * (1 + sharing) + (inputs ? (rows + 1) * D : 0) + 6 * rows + own + P + F + sloped * (1 + a.by_nu);
        memory.resize((count + 1) * BYTES); // one more than needed, to start at a multiple of BYTES
        const uintptr_t start = reinterpret_cast<uintptr_t>(memory.data());
        V *next = reinterpret_cast<V *>((start + BYTES - 1) / BYTES * BYTES);
        const auto take = [&next](const int64_t count) { V *part = next; next += count; return part; };
        z = take(rows * D), mask = take(rows), diagonal = take(rows), place(take(own));
        near = sharing ? take(rows * D) : z, real = take(rows);
        solved[0] = take(rows), solved[1] = take(rows), left = take(rows), total = take(P + F);
        grad_z = inputs ? take((rows + 1) * D) : nullptr, slopes = sloped ? take(sloped) : nullptr;
        nu_slopes = sloped && a.by_nu ? take(sloped) : nullptr;
    }
    INLINE void place(V *factor) { tril = factor, inverse = factor + offset(rows); }

    template <class U> static const U *as(const void *pointer) { return static_cast<const U *>(pointer); }

    INLINE int64_t point(const int lane) const { return first + (lane < live ? lane : live - 1); }

    // The covariance to subtract between two neighbors, or a neighbor and the target, number K.
    INLINE V subtracted(const int64_t i, const int64_t j) const {
        V value = {};
        for (int l = 0; i <= K && j <= K && l < W; ++l)
            value[l] = as<T>(arg.explained)[(point(l) * (K + 1) + i) * (K + 1) + j];
        return value;
    }

    // Coordinates relative to the target, and which neighbors there are.
    INLINE void gather() {
        const T *x = as<T>(arg.x), *points = arg.num_points ? as<T>(arg.points) : x;
        int64_t target[W], start[W];
        for (int l = 0; l < W; ++l) target[l] = point(l) * K;
        for (int64_t k = 0; k < rows; ++k) {
            V there = {};
            for (int l = 0; l < W; ++l) {
                int64_t row = k < K ? arg.neighbors[target[l] + k] : -1;
                if (row >= arg.num_points) status = NO_SUCH_POINT, row = -1;
                there[l] = row >= 0;
                start[l] = row < 0 ? 0 : row * D;
            }
            real[k] = there;
            for (int64_t d = 0; d < D; ++d) {
                V value, own;
                for (int l = 0; l < W; ++l) value[l] = points[start[l] + d], own[l] = x[point(l) * D + d];
                near[k * D + d] = (there != 0 ? value : own) - own;
            }
        }
    }

    // For one set of hyperparameters: scaled coordinates, the mask, and the diagonal of the system.
    INLINE void load(const int64_t set) {
        const int64_t blocks = round_up(arg.num_targets, W) / W;
        base = set * arg.num_targets + first, block = set * blocks + first / W;
        scale = as<T>(arg.scale) + set * D;
        int64_t tables = 0;
        for (int64_t f = 0; f < F; ++f) tables += arg.kernels[f] == TABLE;
        const T *variances = as<T>(arg.variance) + set * F, *table = as<T>(arg.table);
        if (table) table += set * tables * TABLE_SIZE;
        for (int64_t f = 0; f < F; ++f) {
            functions[f] = {int(arg.kernels[f]), variances[f], table};
            if (arg.kernels[f] == TABLE) table += TABLE_SIZE;
        }
        variance = 0;
        for (int64_t t = 0; t < arg.num_terms; ++t) variance += product(arg.terms[t]);
        if (arg.factors) place(static_cast<V *>(arg.factors) + block * factor_size(rows));
        const T *noise = as<T>(arg.noise), own = variance * (1 + T(arg.jitter));
        if (noise && arg.noise_of_sets) noise += set * arg.num_targets * K;
        for (int64_t k = 0; k < rows; ++k) mask[k] = real[k];
        for (int64_t d = 0; d < D; ++d) {
            const T rate = 1 / scale[d];
            for (int64_t k = 0; k < rows; ++k) z[k * D + d] = near[k * D + d] * rate;
        }
        for (int l = 0; arg.grad_w && l < W; ++l)
            if (l >= live || arg.failed[base + l])
                for (int64_t k = 0; k < rows; ++k) mask[k][l] = 0;
        for (int64_t k = 0; k < rows; ++k) diagonal[k] = mask[k] != 0 ? V{} + own : V{} + T(1);
        for (int l = 0; noise && l < W; ++l)
            for (int64_t k = 0; k < K; ++k)
                if (mask[k][l] != 0) diagonal[k][l] += noise[point(l) * K + k];
        for (int64_t k = 0; arg.explained && k < K; ++k) diagonal[k] -= subtracted(k, k) * mask[k];
    }

    // The product of the variances of these parts.
    INLINE T product(const int64_t parts) const {
        T value = 1;
        for (int64_t f = 0; f < F; ++f)
            if (parts >> f & 1) value *= functions[f].variance;
        return value;
    }

    // out <- the sum over the terms that contain all these parts, of the products of the values of the others.
    template <int COUNT> INLINE void combine(const int64_t parts, const V (&value)[MAX_PARTS][COUNT], V (&out)[COUNT]) const {
        for (int e = 0; e < COUNT; ++e) out[e] = V{};
        for (int64_t t = 0; t < arg.num_terms; ++t) {
            if ((arg.terms[t] & parts) != parts) continue;
            V term[COUNT];
            for (int e = 0; e < COUNT; ++e) term[e] = V{} + T(1);
            for (int64_t f = 0; f < F; ++f)
                if ((arg.terms[t] & ~parts) >> f & 1)
                    for (int e = 0; e < COUNT; ++e) term[e] *= value[f][e];
            for (int e = 0; e < COUNT; ++e) out[e] += term[e];
        }
    }

    // q[0] <- covariances at the squared distances q[f] of each part f, which are overwritten.
    template <int COUNT> INLINE void covariance(V (&q)[MAX_PARTS][COUNT]) const {
        for (int64_t f = 0; f < F; ++f) functions[f].template evaluate<COUNT, true, false, false>(q[f], q[f], q[f]);
        if (F == 1) return;
        V sum[COUNT];
        combine(0, q, sum);
        for (int e = 0; e < COUNT; ++e) q[0][e] = sum[e];
    }

    // Squared distances between target and neighbor k, by part.
    INLINE void to_target(const int64_t k, V (&q)[MAX_PARTS][1]) const {
        for (int64_t f = 0; f < F; ++f) {
            q[f][0] = V{};
            for (int64_t d = arg.columns[f]; d < arg.columns[f + 1]; ++d) q[f][0] += z[k * D + d] * z[k * D + d];
        }
    }

    // Squared distances of the tile of rows i.. and columns j.., by part.
    INLINE void distances(const int64_t i, const int64_t j, V (&q)[MAX_PARTS][R * R]) const {
        for (int64_t f = 0; f < F; ++f) distances(i, j, arg.columns[f], arg.columns[f + 1], q[f]);
    }

    INLINE void distances(const int64_t i, const int64_t j, const int64_t from, const int64_t to, V (&q)[R * R]) const {
        V sum[R][R] = {};
        for (int64_t d = from; d < to; ++d) {
            V right[R];
#pragma GCC unroll 8
            for (int b = 0; b < R; ++b) right[b] = z[(j + b) * D + d];
#pragma GCC unroll 8
            for (int a = 0; a < R; ++a) {
                const V here = z[(i + a) * D + d];
#pragma GCC unroll 8
                for (int b = 0; b < R; ++b) {
                    const V difference = here - right[b];
                    sum[a][b] += difference * difference;
                }
            }
        }
        for (int a = 0; a < R; ++a)
            for (int b = 0; b < R; ++b) q[a * R + b] = sum[a][b];
    }

    // tile -= L[i.., from..to] L[j.., from..to]'
    INLINE void update(const int64_t i, const int64_t j, const int64_t from, const int64_t to, V (&tile)[R][R]) const {
        const V *below[R], *above[R];
#pragma GCC unroll 8
        for (int a = 0; a < R; ++a) below[a] = tril + offset(i + a), above[a] = tril + offset(j + a);
        for (int64_t k = from; k < to; ++k) {
            V right[R];
#pragma GCC unroll 8
            for (int b = 0; b < R; ++b) right[b] = above[b][k];
#pragma GCC unroll 8
            for (int a = 0; a < R; ++a) {
                const V here = below[a][k];
#pragma GCC unroll 8
                for (int b = 0; b < R; ++b) tile[a][b] -= here * right[b];
            }
        }
    }

    // Cholesky factor of K_nn + noise, in panels of columns and in tiles within them. Panel by panel, first what the
    // columns before it contribute, a slice of columns at a time so that the panel's part of it stays in cache.
    template <bool SLOPES, bool NU> INLINE void factorize() {
        typename Real<T>::Int bad[W] = {};
        for (int64_t start = 0; start < rows; start += PANEL) {
            const int64_t end = start + PANEL < rows ? start + PANEL : rows;
            for (int64_t from = 0; from < start; from += SLICE) {
                const int64_t to = from + SLICE < start ? from + SLICE : start;
                for (int64_t i = start; i < rows; i += R)
                    for (int64_t j = start; j < end && j <= i; j += R) {
                        V tile[R][R] = {};
                        if (from) exchange<false>(i, j, tile);
                        update(i, j, from, to, tile);
                        exchange<true>(i, j, tile);
                    }
            }
            for (int64_t i = start; i < rows; i += R)
                for (int64_t j = start; j < end && j <= i; j += R) {
                    V q[MAX_PARTS][R * R], tile[R][R] = {};
                    distances(i, j, q);
                    if (SLOPES) {
                        V slope[R * R], nu_slope[R * R];
                        functions[0].template evaluate<R * R, true, true, NU>(q[0], slope, nu_slope);
                        for (int a = 0; a < R; ++a)
                            for (int b = 0; b < R && j + b < i + a; ++b) {
                                slopes[offset(i + a) + j + b] = slope[a * R + b];
                                if (NU) nu_slopes[offset(i + a) + j + b] = nu_slope[a * R + b];
                            }
                    } else {
                        covariance(q);
                    }
                    if (arg.explained)
                        for (int a = 0; a < R; ++a)
                            for (int b = 0; b < R && i + a < K && j + b < K; ++b)
                                q[0][a * R + b] -= subtracted(i + a, j + b);
                    if (start) exchange<false>(i, j, tile);
#pragma GCC unroll 8
                    for (int a = 0; a < R; ++a)
#pragma GCC unroll 8
                        for (int b = 0; b < R; ++b)
                            tile[a][b] += i + a == j + b ? diagonal[i + a] : q[0][a * R + b] * mask[i + a] * mask[j + b];
                    update(i, j, start, j, tile);
                    if (i == j)
                        factorize_tile(i, tile, bad);
                    else
                        solve_tile(j, tile);
                    exchange<true>(i, j, tile);
                }
        }
        if (arg.grad_w) return;
        for (int l = 0; l < live; ++l) arg.failed[base + l] = bad[l] != 0;
        for (int l = 0; arg.factors && l < W; ++l)
            if (bad[l]) reset(l);
    }

    // A point that has failed gets the identity for its factor, so that the backward pass meets no NaN.
    INLINE void reset(const int lane) {
        for (int64_t e = 0; e < offset(rows); ++e) tril[e][lane] = 0;
        for (int64_t k = 0; k < rows; ++k) inverse[k][lane] = 1;
    }

    // Store a tile of the lower triangle, or load it; entries above the diagonal are left out.
    template <bool STORE> INLINE void exchange(const int64_t i, const int64_t j, V (&tile)[R][R]) {
#pragma GCC unroll 8
        for (int a = 0; a < R; ++a)
#pragma GCC unroll 8
            for (int b = 0; b < R; ++b) {
                if (i == j && b > a) continue;
                V &entry = tril[offset(i + a) + j + b];
                if (STORE)
                    entry = tile[a][b];
                else
                    tile[a][b] = entry;
            }
    }

    // tile <- tile L_jj^-T
    INLINE void solve_tile(const int64_t j, V (&tile)[R][R]) const {
#pragma GCC unroll 8
        for (int b = 0; b < R; ++b)
#pragma GCC unroll 8
            for (int a = 0; a < R; ++a) {
#pragma GCC unroll 8
                for (int c = 0; c < b; ++c) tile[a][b] -= tile[a][c] * tril[offset(j + b) + j + c];
                tile[a][b] *= inverse[j + b];
            }
    }

    // tile <- its Cholesky factor, noting points whose pivots are not positive.
    template <class Int> INLINE void factorize_tile(const int64_t i, V (&tile)[R][R], Int (&bad)[W]) {
#pragma GCC unroll 8
        for (int b = 0; b < R; ++b) {
#pragma GCC unroll 8
            for (int c = 0; c < b; ++c) tile[b][b] -= tile[b][c] * tile[b][c];
            for (int l = 0; l < W; ++l) bad[l] |= !(tile[b][b][l] > 0);
            tile[b][b] = square_root<T>(tile[b][b]);
            inverse[i + b] = T(1) / tile[b][b];
#pragma GCC unroll 8
            for (int a = b + 1; a < R; ++a) {
#pragma GCC unroll 8
                for (int c = 0; c < b; ++c) tile[a][b] -= tile[a][c] * tile[b][c];
                tile[a][b] *= inverse[i + b];
            }
        }
    }

    // solved[c] <- L^-1 solved[c]
    template <int COUNT> INLINE void solve_lower() {
        for (int64_t i = 0; i < rows; i += R) {
            V sum[COUNT][R];
#pragma GCC unroll 2
            for (int c = 0; c < COUNT; ++c)
#pragma GCC unroll 8
                for (int a = 0; a < R; ++a) sum[c][a] = solved[c][i + a];
            for (int64_t k = 0; k < i; ++k)
#pragma GCC unroll 8
                for (int a = 0; a < R; ++a) {
                    const V entry = tril[offset(i + a) + k];
#pragma GCC unroll 2
                    for (int c = 0; c < COUNT; ++c) sum[c][a] -= entry * solved[c][k];
                }
#pragma GCC unroll 2
            for (int c = 0; c < COUNT; ++c)
                for (int a = 0; a < R; ++a) {
                    for (int e = 0; e < a; ++e) sum[c][a] -= tril[offset(i + a) + i + e] * sum[c][e];
                    solved[c][i + a] = sum[c][a] *= inverse[i + a];
                }
        }
    }

    // solved[c] <- L^-T solved[c]
    template <int COUNT> INLINE void solve_upper() {
        for (int64_t i = rows - R; i >= 0; i -= R) {
            V value[COUNT][R];
#pragma GCC unroll 2
            for (int c = 0; c < COUNT; ++c)
                for (int a = R - 1; a >= 0; --a) {
                    V sum = solved[c][i + a];
                    for (int e = a + 1; e < R; ++e) sum -= tril[offset(i + e) + i + a] * value[c][e];
                    solved[c][i + a] = value[c][a] = sum * inverse[i + a];
                }
            for (int64_t k = 0; k < i; ++k) {
                V sum[COUNT];
#pragma GCC unroll 2
                for (int c = 0; c < COUNT; ++c) sum[c] = solved[c][k];
#pragma GCC unroll 8
                for (int a = 0; a < R; ++a) {
                    const V entry = tril[offset(i + a) + k];
#pragma GCC unroll 2
                    for (int c = 0; c < COUNT; ++c) sum[c] -= entry * value[c][a];
                }
#pragma GCC unroll 2
                for (int c = 0; c < COUNT; ++c) solved[c][k] = sum[c];
            }
        }
    }

    // k_n in solved[0].
    template <bool SLOPES, bool NU> INLINE void cross() {
        for (int64_t k = 0; k < rows; ++k) {
            V q[MAX_PARTS][1], slope = {}, nu_slope = {};
            to_target(k, q);
            if (SLOPES)
                functions[0].template evaluate<1, true, true, NU>(q[0], &slope, &nu_slope);
            else
                covariance(q);
            if (SLOPES) slopes[offset(rows) + k] = slope;
            if (NU) nu_slopes[offset(rows) + k] = nu_slope;
            if (arg.explained && k < K) q[0][0] -= subtracted(k, K);
            solved[0][k] = q[0][0] * mask[k];
        }
    }

    // v before it is kept above its floor, from L^-1 k_n in solved[0].
    INLINE V explained() const {
        V sum = {};
        for (int64_t k = 0; k < rows; ++k) sum += solved[0][k] * solved[0][k];
        if (arg.explained) sum += subtracted(K, K);
        return variance * (1 + T(arg.jitter)) - sum;
    }

    INLINE T floor() const {
        const T relative = T(arg.jitter) * variance;
        const T tiny = sizeof(T) == 4 ? T(1.17549435e-38) : T(2.2250738585072014e-308);
        return relative < tiny ? tiny : relative; // in exact arithmetic v >= jitter k_xx; rounding can violate this
    }

    template <bool SLOPES, bool NU> INLINE void forward() {
        cross<SLOPES, NU>();
        solve_lower<1>();
        const V v = explained();
        solve_upper<1>();
        T *out_w = static_cast<T *>(arg.w), *out_v = static_cast<T *>(arg.v);
        for (int l = 0; l < live; ++l) {
            for (int64_t k = 0; k < K; ++k) out_w[(base + l) * K + k] = solved[0][k][l];
            out_v[base + l] = v[l] < floor() ? floor() : v[l];
        }
        if (SLOPES) tangents<NU>(v);
    }

    // Derivatives by the logs of the scales, two at a time: those of K_nn and k_n are -2 dk/dq times the squared
    // differences of a column, so that dw = K_nn^-1 r with r = dk_n - dK_nn w, and dv = -w' (dk_n + r). By nu
    // they are known.
    template <bool NU> INLINE void tangents(const V v) {
        V *const w = left;
        for (int64_t k = 0; k < rows; ++k) w[k] = solved[0][k];
        for (int64_t d = 0; d < P; d += 2) {
            V of_v[2] = {};
            for (int c = 0; c < 2 && d + c < P; ++c) {
                const V *column = z + d + c;
                if (NU && d + c == D)
                    of_v[c] = residual(c, w, nu_slopes, [](int64_t) { return V{} + T(1); },
                                       [](int64_t, int64_t) { return V{} + T(1); });
                else
                    of_v[c] = residual(c, w, slopes, [&](const int64_t i) { return column[i * D] * column[i * D]; },
                                       [&](const int64_t i, const int64_t j) {
                                           const V difference = column[i * D] - column[j * D];
                                           return difference * difference;
                                       });
            }
            if (d + 1 < P)
                solve_lower<2>(), solve_upper<2>();
            else
                solve_lower<1>(), solve_upper<1>();
            for (int c = 0; c < 2 && d + c < P; ++c) store_tangents(d + c, solved[c], of_v[c], v);
        }
    }

    // r in solved[c] and the sum w' (dk_n + r), where derivatives are `change` times a factor of target or pair.
    template <class OfTarget, class OfPair>
    INLINE V residual(const int c, const V *w, const V *change, OfTarget of_target, OfPair of_pair) {
        V of_v = {};
        for (int64_t i = 0; i < rows; ++i) {
            const V own = w[i], *row = change + offset(i), here = change[offset(rows) + i] * of_target(i) * mask[i];
            V sum = {};
            for (int64_t j = 0; j < i; ++j) {
                const V entry = row[j] * of_pair(i, j);
                sum += entry * w[j];
                solved[c][j] -= entry * own;
            }
            solved[c][i] = here - sum;
            of_v += own * here;
        }
        for (int64_t i = 0; i < rows; ++i) {
            solved[c][i] *= mask[i];
            of_v += w[i] * solved[c][i];
        }
        return of_v;
    }

    // Of one scale or the smoothness, and of the variance; zero for points that have failed, and for v at its floor.
    INLINE void store_tangents(const int64_t d, const V *of_w, const V of_v, const V v) {
        T *out_w = static_cast<T *>(arg.tangent_w), *out_v = static_cast<T *>(arg.tangent_v);
        const T factor = d < D ? T(-2) : T(1);
        for (int l = 0; l < live; ++l) {
            const bool failed = arg.failed[base + l];
            T *const row = out_w + ((base + l) * P + d) * K, *const last = out_v + (base + l) * (P + 1);
            for (int64_t k = 0; k < K; ++k) row[k] = failed ? T(0) : factor * of_w[k][l];
            last[d] = failed || !(v[l] >= floor()) ? T(0) : -factor * of_v[l];
            last[P] = failed || !(v[l] >= floor()) ? T(0) : v[l];
        }
    }

    // The sums over the points of a block of gradients times derivatives.
    INLINE void contract(const int64_t set) {
        const int64_t blocks = round_up(arg.num_targets, W) / W;
        const T *grad_w = as<T>(arg.grad_w), *grad_v = as<T>(arg.grad_v);
        const T *tangent_w = as<T>(arg.tangent_w), *tangent_v = as<T>(arg.tangent_v);
        double *const out = arg.sums + (set * blocks + first / W) * (P + 1);
        for (int64_t d = 0; d <= P; ++d) {
            double sum = 0;
            for (int64_t b = set * arg.num_targets + first, end = b + live; b < end; ++b) {
                T own = grad_v[b] * tangent_v[b * (P + 1) + d];
                for (int64_t k = 0; d < P && k < K; ++k) own += grad_w[b * K + k] * tangent_w[(b * P + d) * K + k];
                sum += own;
            }
            out[d] = sum;
        }
    }

    // out[k] <- the k-th number of each point's row of K, where there is a neighbor; else 0.
    INLINE void read(const T *from, V *out) const {
        for (int64_t k = 0; k < rows; ++k) {
            V value = {};
            for (int l = 0; k < K && l < W; ++l) value[l] = from[(base + (l < live ? l : live - 1)) * K + k];
            out[k] = mask[k] != 0 ? value : V{};
        }
    }

    // With w and v of the forward pass.
    INLINE void backward() {
        const T *grad_v = as<T>(arg.grad_v), *v = as<T>(arg.v);
        V *const a = solved[0], *const w = solved[1];
        read(as<T>(arg.w), w);
        read(as<T>(arg.grad_w), a);
        V bar = {}, kept = {}; // gradients of v, and v, where it is not at its floor
        for (int l = 0; l < live; ++l)
            if (!arg.failed[base + l] && v[base + l] > floor()) bar[l] = grad_v[base + l], kept[l] = v[base + l];
        solve_lower<1>();
        solve_upper<1>();
        V of_variance = bar * kept; // of its log: less what the same change of the noise would give
        V of_diagonal = bar;
        for (int64_t k = 0; k < rows; ++k) {
            const V of_noise = (bar * w[k] - a[k]) * w[k];
            left[k] = T(2) * bar * w[k] - a[k];
            of_diagonal += of_noise;
            of_variance -= of_noise * (diagonal[k] - variance * (1 + T(arg.jitter))) * mask[k];
            if (arg.grad_noise && k < K)
                for (int l = 0; l < live; ++l) static_cast<T *>(arg.grad_noise)[(base + l) * K + k] = of_noise[l];
        }
        if (arg.left)
            for (int l = 0; l < live; ++l)
                for (int64_t k = 0; k < K; ++k) static_cast<T *>(arg.left)[(base + l) * K + k] = left[k][l];
        if (!arg.sums && !arg.grad_z) return;
        if (arg.explained) {
            of_variance += bar * subtracted(K, K);
            for (int64_t i = 0; i < K; ++i) {
                V sum = -left[i] * subtracted(i, K);
                for (int64_t j = 0; j < i; ++j) sum += (left[i] * w[j] - w[i] * a[j]) * subtracted(i, j);
                of_variance += sum * mask[i];
            }
        }
        for (int64_t d = 0; d < P; ++d) total[d] = V{};
        if (F > 1) {
            for (int64_t f = 0; f < F; ++f) {
                T share = 0; // of the variance, in the terms with this part
                for (int64_t t = 0; t < arg.num_terms; ++t)
                    if (arg.terms[t] >> f & 1) share += product(arg.terms[t]);
                total[P + f] = of_diagonal * (share * (1 + T(arg.jitter)));
            }
            arg.grad_z ? pull<true, true, true>() : pull<false, true, true>();
        } else {
            total[P] = of_variance;
            if (arg.by_nu)
                arg.grad_z ? pull<true, true, false>() : pull<false, true, false>();
            else
                arg.grad_z ? pull<true, false, false>() : pull<false, false, false>();
        }
        if (arg.sums)
            for (int64_t d = 0; d < P + F; ++d) {
                double sum = 0;
                for (int l = 0; l < W; ++l) sum += total[d][l];
                arg.sums[block * (P + F) + d] = sum;
            }
        if (arg.grad_z) store_inputs();
    }

    // Gradients through the kernel of every pair of neighbors, then of every neighbor with the target. MANY: parts.
    template <bool INPUTS, bool NU, bool MANY> INLINE void pull() {
        const V *of_w = solved[0], *w = solved[1];
        if (INPUTS)
            for (int64_t e = 0; e < (rows + 1) * D; ++e) grad_z[e] = V{};
        for (int64_t i = 0; i < rows; i += R)
            for (int64_t j = 0; j <= i; j += R) {
                V q[MAX_PARTS][R * R], slope[MAX_PARTS][R * R], nu_slope[MAX_PARTS][R * R], grad[R * R];
                distances(i, j, q);
                for (int64_t f = 0; f < F; ++f)
                    functions[f].template evaluate<R * R, MANY, true, NU>(q[f], slope[f], nu_slope[f]);
#pragma GCC unroll 8
                for (int a = 0; a < R; ++a)
#pragma GCC unroll 8
                    for (int b = 0; b < R; ++b) {
                        const V both = left[i + a] * w[j + b] - w[i + a] * of_w[j + b];
                        grad[a * R + b] = a > b || i != j ? both : V{};
                    }
                int64_t table = D;
                for (int64_t f = 0; f < F; ++f) {
                    V weight[R * R];
                    if (MANY)
                        of_part(f, q, grad, weight);
                    else
                        for (int e = 0; e < R * R; ++e) weight[e] = grad[e];
                    if (NU && arg.by_nu && functions[f].kernel == TABLE) total[table++] += dot(weight, nu_slope[f]);
                    for (int e = 0; e < R * R; ++e) weight[e] *= slope[f][e];
                    for (int64_t d = arg.columns[f]; d < arg.columns[f + 1]; ++d) {
                        V right[R], column[R] = {};
                        V squares = {};
#pragma GCC unroll 8
                        for (int b = 0; b < R; ++b) right[b] = z[(j + b) * D + d];
#pragma GCC unroll 8
                        for (int a = 0; a < R; ++a) {
                            const V here = z[(i + a) * D + d];
                            V row = {};
#pragma GCC unroll 8
                            for (int b = 0; b < R; ++b) {
                                const V difference = here - right[b], force = weight[a * R + b] * difference;
                                squares += force * difference;
                                if (INPUTS) row += force, column[b] += force;
                            }
                            if (INPUTS) grad_z[(i + a) * D + d] += row;
                        }
                        if (INPUTS)
#pragma GCC unroll 8
                            for (int b = 0; b < R; ++b) grad_z[(j + b) * D + d] -= column[b];
                        total[d] += squares;
                    }
                }
            }
        for (int64_t k = 0; k < rows; ++k) {
            V q[MAX_PARTS][1], slope[MAX_PARTS][1], nu_slope[MAX_PARTS][1] = {};
            const V grad[1] = {-left[k]};
            to_target(k, q);
            for (int64_t f = 0; f < F; ++f)
                functions[f].template evaluate<1, MANY, true, NU>(q[f], slope[f], nu_slope[f]);
            int64_t table = D;
            for (int64_t f = 0; f < F; ++f) {
                V weight[1] = {grad[0]};
                if (MANY) of_part(f, q, grad, weight);
                if (NU && arg.by_nu && functions[f].kernel == TABLE) total[table++] += weight[0] * nu_slope[f][0];
                for (int64_t d = arg.columns[f]; d < arg.columns[f + 1]; ++d) {
                    const V force = weight[0] * slope[f][0] * z[k * D + d];
                    total[d] += force * z[k * D + d];
                    if (INPUTS) {
                        grad_z[k * D + d] += force;
                        grad_z[rows * D + d] -= force; // the share of the target: the forces between neighbors cancel
                    }
                }
            }
        }
        for (int64_t d = 0; d < D; ++d) total[d] *= T(-2);
    }

    // weight <- gradients of the values of part f, of which the gradient of its log variance is the sum.
    template <int COUNT>
    INLINE void of_part(const int64_t f, const V (&value)[MAX_PARTS][COUNT], const V (&grad)[COUNT], V (&weight)[COUNT]) {
        combine(int64_t(1) << f, value, weight);
        for (int e = 0; e < COUNT; ++e) weight[e] *= grad[e];
        total[P + f] += dot(weight, value[f]);
    }

    template <int COUNT> static INLINE V dot(const V (&a)[COUNT], const V (&b)[COUNT]) {
        V sum = {};
        for (int e = 0; e < COUNT; ++e) sum += a[e] * b[e];
        return sum;
    }

    INLINE void store_inputs() {
        T *of_x = static_cast<T *>(arg.grad_x), *of_z = static_cast<T *>(arg.grad_z);
        for (int64_t d = 0; d < D; ++d) {
            const T rate = 2 / scale[d];
            for (int64_t k = 0; k <= rows; ++k) grad_z[k * D + d] *= rate;
        }
        for (int l = 0; l < live; ++l) {
            T *const row = of_z + (base + l) * K * D;
            for (int64_t e = 0; e < K * D; ++e) row[e] = grad_z[e][l];
            for (int64_t d = 0; d < D; ++d) of_x[(base + l) * D + d] = grad_z[rows * D + d][l];
        }
    }

    // A unit of work is a block for all sets, or for one set where there are too few blocks for the threads.
    INLINE Status run(std::atomic<int64_t> &next) {
        const int64_t blocks = round_up(arg.num_targets, W) / W, S = arg.num_sets;
        const int64_t together = arg.num_threads == 1 || blocks >= 8 * arg.num_threads ? S : 1;
        for (int64_t unit = next++; unit < blocks * (S / together); unit = next++) {
            first = unit % blocks * W;
            live = arg.num_targets - first < W ? arg.num_targets - first : W;
            const int64_t start = unit / blocks * together;
            if (arg.grad_w && arg.tangent_w) {
                for (int64_t set = start; set < start + together; ++set) contract(set);
                continue;
            }
            gather();
            for (int64_t set = start; set < start + together; ++set) {
                load(set);
                if (nu_slopes) {
                    factorize<true, true>();
                    forward<true, true>();
                } else if (slopes) {
                    factorize<true, false>();
                    forward<true, false>();
                } else {
                    if (!arg.factors || !arg.grad_w) factorize<false, false>();
                    if (arg.grad_w)
                        backward();
                    else
                        forward<false, false>();
                }
            }
        }
        return status;
    }
};

// One worker per instruction set, compiled for it; everything above is inlined into these.
struct Worker {
    Status (*run)(const Arguments &, std::atomic<int64_t> &);
    int64_t bytes, tile; // of a vector; R
};

#define WORKER(NAME, T, BYTES, R, TARGET)                                                                              \
    TARGET Status NAME##_run(const Arguments &arguments, std::atomic<int64_t> &next) {                                 \
        return Block<T, BYTES, R>(arguments).run(next);                                                                \
    }                                                                                                                  \
    const Worker NAME{NAME##_run, BYTES, R};

WORKER(float_any, float, 16, 3, )
WORKER(double_any, double, 16, 3, )
#if defined(__x86_64__)
WORKER(float_avx2, float, 32, 3, AVX2)
WORKER(double_avx2, double, 32, 3, AVX2)
WORKER(float_avx512, float, 64, 4, AVX512)
WORKER(double_avx512, double, 64, 4, AVX512)
const Worker WORKERS[][2] = {
    {float_any, double_any}, {float_avx2, double_avx2}, {float_avx512, double_avx512}};
#else
const Worker WORKERS[][2] = {{float_any, double_any}};
#endif

} // namespace

extern "C" {

// Instruction sets that this build and this processor share, the widest last: x86-64, AVX2, AVX-512; else one.
int64_t nn_levels() {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
    return wide ? 3 : 2;
#else
    return 1;
#endif
}

// Bytes of the structure of arguments, for the caller to compare.
int64_t nn_conditional_size() { return sizeof(Arguments); }

// Points per block at a level; `sums` has one row per block.
int64_t nn_conditional_width(const int64_t level, const int64_t is_double) {
    return WORKERS[level][is_double != 0].bytes / (is_double ? 8 : 4);
}

// Bytes of the factors of that many targets of one set; `factors` starts at a multiple of 64.
int64_t nn_conditional_factors(const int64_t targets, const int64_t neighbors, const int64_t level,
                               const int64_t is_double) {
    const Worker &worker = WORKERS[level][is_double != 0];
    const int64_t width = nn_conditional_width(level, is_double), rows = round_up(neighbors, worker.tile);
    return round_up(targets, width) / width * factor_size(rows) * worker.bytes;
}

// Run the pass that `arguments` describe; returns a Status.
int64_t nn_conditional_run(const Arguments *arguments, const int64_t level, const int64_t is_double) {
    const Worker &worker = WORKERS[level][is_double != 0];
    std::atomic<int64_t> next(0), status(DONE);
    const auto work = [&] {
        try {
            if (const Status own = worker.run(*arguments, next)) status = own;
        } catch (const std::bad_alloc &) {
            status = NO_MEMORY;
        }
    };
    std::vector<std::thread> helpers;
    try {
        for (int64_t i = 1; i < arguments->num_threads; ++i) helpers.emplace_back(work);
    } catch (const std::exception &) {
        // No more threads to be had: those there are, and this one, do the work.
    }
    work();
    for (auto &helper : helpers) helper.join();
    return status;
}
}
