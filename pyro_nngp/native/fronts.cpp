// Solutions with a sparse Cholesky factor that is stored front by front, on CPUs.
//
// From the leaves to the root what each node contributes at its border is subtracted, and on the way back each node is
// solved. Bound by memory, so one thread: two passes over the blocks, without a call for each front.
//
// Plain C interface for ctypes, C++17. Symbols: F fronts, s points of a node, b of its border, N points, L right-hand
// sides.

#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

enum FrontStatus { SOLVED, NO_SUCH_POINT };

// Mirrored by Fronts in structures.py.
struct Fronts {
    int64_t num_fronts, num_points, num_right;
    const int64_t *sizes;   // (F,), s of each front, children first; the nodes follow each other
    const int64_t *widths;  // (F,), b
    const int64_t *borders; // the places of each border, one after the other
    const double *blocks;   // of each front (L11 L11')^-1, (s, s), and Y', (s, b)
    double *z;              // (N, L), right-hand sides, overwritten by the solutions
};
}

namespace {

typedef double V __attribute__((vector_size(32)));

inline V read(const double *const from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline double dot(const double *const a, const double *const b, const int64_t size) {
    V sum = {}, other = {};
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        sum += read(a + i) * read(b + i);
        other += read(a + i + 4) * read(b + i + 4);
    }
    sum += other;
    double total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (; i < size; ++i) total += a[i] * b[i];
    return total;
}

// to += a row of a block times values of all right-hand sides, (size, L); one right-hand side needs no inner loop.
inline void add_product(const double *const row, const double *const values, const int64_t size, const int64_t L,
                        const double sign, double *const to) {
    if (L == 1) {
        *to += sign * dot(row, values, size);
        return;
    }
    for (int64_t i = 0; i < size; ++i)
        for (int64_t l = 0; l < L; ++l) to[l] += sign * row[i] * values[i * L + l];
}

FrontStatus solve(const Fronts &fronts) {
    const int64_t L = fronts.num_right;
    std::vector<double> outer, own;
    const double *block = fronts.blocks;
    const int64_t *border = fronts.borders;
    int64_t first = 0;
    for (int64_t f = 0; f < fronts.num_fronts; ++f) {
        const int64_t s = fronts.sizes[f], b = fronts.widths[f];
        const double *slope = block + s * s;
        outer.assign(b * L, 0.0);
        for (int64_t i = 0; i < s; ++i, slope += b) {
            const double *const z = fronts.z + (first + i) * L;
            for (int64_t j = 0; j < b; ++j)
                for (int64_t l = 0; l < L; ++l) outer[j * L + l] += slope[j] * z[l];
        }
        for (int64_t j = 0; j < b; ++j) {
            if (border[j] < first + s || border[j] >= fronts.num_points) return NO_SUCH_POINT;
            for (int64_t l = 0; l < L; ++l) fronts.z[border[j] * L + l] -= outer[j * L + l];
        }
        first += s, border += b, block += s * (s + b);
    }
    for (int64_t f = fronts.num_fronts; f-- > 0;) {
        const int64_t s = fronts.sizes[f], b = fronts.widths[f];
        first -= s, border -= b, block -= s * (s + b);
        outer.resize(b * L);
        for (int64_t j = 0; j < b; ++j)
            std::memcpy(outer.data() + j * L, fronts.z + border[j] * L, L * sizeof(double));
        double *const z = fronts.z + first * L;
        own.assign(z, z + s * L);
        std::memset(z, 0, s * L * sizeof(double));
        for (int64_t i = 0; i < s; ++i) {
            add_product(block + i * s, own.data(), s, L, 1.0, z + i * L);
            add_product(block + s * s + i * b, outer.data(), b, L, -1.0, z + i * L);
        }
    }
    return SOLVED;
}

} // namespace

extern "C" {

// Bytes of the structure of arguments, for the caller to compare.
int64_t nn_fronts_size() { return sizeof(Fronts); }

// Overwrite right-hand sides with solutions; returns a FrontStatus.
int64_t nn_fronts_solve(const Fronts *const fronts) { return solve(*fronts); }
}
