// Rows of tables that a minibatch uses, on CPUs: the distinct ones, and Adam's step on them.
//
// Distinct rows are marked in a bitmap, so that they come out in ascending order without a sort, and the place of each is
// a count of bits. Adam reads and writes each row of its tables once.
//
// Plain C interface for ctypes, C++17. Symbols: E numbers, N rows of a table, U distinct ones, L columns.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

extern "C" {

enum RowsStatus { NO_MEMORY = -1, NO_ROW = -2 };

// Mirrored by AdamStep in structures.py.
struct AdamStep {
    int64_t num_rows, num_moved, num_columns;
    double rate, beta1, beta2, eps; // rate: of this step, corrected for the bias of the moments
    const int64_t *rows;            // (U,)
    const void *grad;               // (U, L)
    void *table, *first, *second;   // (N, L)
};
}

namespace {

template <class T> int64_t move(const AdamStep &step) {
    const T *grad = static_cast<const T *>(step.grad);
    T *const table = static_cast<T *>(step.table), *const first = static_cast<T *>(step.first),
            *const second = static_cast<T *>(step.second);
    const T rate = static_cast<T>(step.rate), eps = static_cast<T>(step.eps), rest2 = static_cast<T>(1 - step.beta2);
    const T rest1 = static_cast<T>(1 - step.beta1), beta2 = static_cast<T>(step.beta2);
    const int64_t L = step.num_columns;
    for (int64_t u = 0; u < step.num_moved; ++u)
        if (step.rows[u] < 0 || step.rows[u] >= step.num_rows) return NO_ROW;
    for (int64_t u = 0; u < step.num_moved; ++u) {
        const int64_t at = step.rows[u] * L;
        for (int64_t l = 0; l < L; ++l) {
            const T g = grad[u * L + l];
            T &m = first[at + l], &s = second[at + l];
            m += rest1 * (g - m);
            s = beta2 * s + rest2 * g * g;
            table[at + l] -= rate * m / (std::sqrt(s) + eps);
        }
    }
    return 0;
}

} // namespace

extern "C" {

// Bytes of the structure of arguments, for the caller to compare.
int64_t nn_adam_size() { return sizeof(AdamStep); }

// Move the rows by one step of Adam; returns 0, or NO_ROW and changes nothing.
int64_t nn_adam_step(const AdamStep *step, const int64_t is_double) {
    return is_double ? move<double>(*step) : move<float>(*step);
}

// Write the distinct ones among `count` numbers, ascending, to `rows`, and the place of each number among them to `places`.
// Returns how many there are, or NO_MEMORY, or NO_ROW for a number that is negative or not below `limit`. With `padded`
// negative numbers are left out, and have negative places.
int64_t nn_distinct(const int64_t *numbers, const int64_t count, const int64_t limit, const int64_t padded, int64_t *rows,
                    int64_t *places) {
    int64_t least = 0, most = -1;
    for (int64_t i = 0; i < count; ++i) {
        least = std::min(least, numbers[i]);
        most = std::max(most, numbers[i]);
    }
    if (most >= limit || (least < 0 && !padded)) return NO_ROW;
    const int64_t words = most / 64 + 1;
    std::vector<uint64_t> marks;
    std::vector<int64_t> before;
    try {
        marks.assign(words, 0);
        before.resize(words);
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
    for (int64_t i = 0; i < count; ++i)
        if (numbers[i] >= 0) marks[numbers[i] >> 6] |= uint64_t(1) << (numbers[i] & 63);
    int64_t found = 0;
    for (int64_t w = 0; w < words; ++w) {
        before[w] = found;
        for (uint64_t left = marks[w]; left; left &= left - 1) rows[found++] = w * 64 + __builtin_ctzll(left);
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = numbers[i];
        if (row < 0) {
            places[i] = -1;
            continue;
        }
        const uint64_t lower = marks[row >> 6] & ((uint64_t(1) << (row & 63)) - 1);
        places[i] = before[row >> 6] + __builtin_popcountll(lower);
    }
    return found;
}
}
