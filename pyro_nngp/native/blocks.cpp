// Blocks of a dense square matrix, on CPUs: its entries at all pairs of some places are added to, or read.
//
// Fronts of a sparse Cholesky factorization spend their time so, beside products of dense matrices: each number is read
// and written once, and no table of positions is formed.
//
// Plain C interface for ctypes, C++17. Symbols: m rows of the matrix, F blocks of k rows.

#include <cstdint>

extern "C" {

// Add blocks (F, k, k) to a matrix (m, m) at places (F, k), or with `take` write its entries there to them. Returns 0, or
// -1 for a place that the matrix does not have, and changes nothing.
int64_t nn_blocks(double *matrix, const int64_t m, const int64_t *places, const int64_t F, const int64_t k, double *blocks,
                  const int64_t take) {
    for (int64_t i = 0; i < F * k; ++i)
        if (places[i] < 0 || places[i] >= m) return -1;
    for (int64_t f = 0; f < F; ++f, places += k)
        for (int64_t i = 0; i < k; ++i, blocks += k) {
            double *const row = matrix + places[i] * m;
            if (take)
                for (int64_t j = 0; j < k; ++j) blocks[j] = row[places[j]];
            else
                for (int64_t j = 0; j < k; ++j) row[places[j]] += blocks[j];
        }
    return 0;
}
}
