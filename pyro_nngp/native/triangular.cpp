// Substitution in the sparse unit triangle I - A of nearest-neighbor conditionals, or in its transpose, on CPUs.
//
// Row by row in an order in which each row follows its neighbors, for all right-hand sides at once: the values of a row
// lie together, so that one pass over the weights serves them all. Bound by memory, so one thread and no vector types.
//
// Plain C interface for ctypes, C++17. Symbols: L triangles on the same neighbors, T scalar type, N rows, K neighbors,
// S right-hand sides.

#include <cstdint>

extern "C" {

enum TriangleStatus { SOLVED, NO_SUCH_ROW };

// Mirrored by Triangle in structures.py.
struct Triangle {
    int64_t num_sets, num_rows, num_neighbors, num_right, transposed;
    const int64_t *order;     // (N,), each row after its neighbors
    const int64_t *neighbors; // (N, K), negative for none
    const void *w;            // (L, N, K), the weights A
    void *u;                  // (L, N, S), right-hand sides, overwritten by the solutions
};
}

namespace {

// One row with one right-hand side; false for a neighbor that is no row.
template <class T> inline bool single(const Triangle &triangle, const T *const w, const int64_t row, T *const u) {
    const int64_t N = triangle.num_rows, K = triangle.num_neighbors;
    const int64_t *const neighbors = triangle.neighbors + row * K;
    const T own = u[row];
    T sum = 0;
    for (int64_t k = 0; k < K; ++k) {
        const int64_t near = neighbors[k];
        if (near < 0) continue;
        if (near >= N) return false;
        if (triangle.transposed)
            u[near] += w[k] * own;
        else
            sum += w[k] * u[near];
    }
    if (!triangle.transposed) u[row] = own + sum;
    return true;
}

template <class T> TriangleStatus solve(const Triangle &triangle, const int64_t set) {
    const int64_t N = triangle.num_rows, K = triangle.num_neighbors, S = triangle.num_right;
    const T *weights = static_cast<const T *>(triangle.w) + set * N * K;
    T *const u = static_cast<T *>(triangle.u) + set * N * S;
    for (int64_t i = 0; i < N; ++i) {
        const int64_t row = triangle.order[triangle.transposed ? N - 1 - i : i];
        if (row < 0 || row >= N) return NO_SUCH_ROW;
        T *const own = u + row * S;
        if (S == 1) { // the common case, without the inner loop
            if (!single(triangle, weights + row * K, row, u)) return NO_SUCH_ROW;
            continue;
        }
        for (int64_t k = 0; k < K; ++k) {
            const int64_t near = triangle.neighbors[row * K + k];
            if (near < 0) continue;
            if (near >= N) return NO_SUCH_ROW;
            const T w = weights[row * K + k];
            T *const other = u + near * S;
            if (triangle.transposed)
                for (int64_t s = 0; s < S; ++s) other[s] += w * own[s];
            else
                for (int64_t s = 0; s < S; ++s) own[s] += w * other[s];
        }
    }
    return SOLVED;
}

} // namespace

extern "C" {

// Bytes of the structure of arguments, for the caller to compare.
int64_t nn_triangular_size() { return sizeof(Triangle); }

// Overwrite right-hand sides with solutions; returns a TriangleStatus.
int64_t nn_triangular_solve(const Triangle *triangle, const int64_t is_double) {
    TriangleStatus status = SOLVED;
    for (int64_t set = 0; set < triangle->num_sets && status == SOLVED; ++set)
        status = is_double ? solve<double>(*triangle, set) : solve<float>(*triangle, set);
    return status;
}
}
