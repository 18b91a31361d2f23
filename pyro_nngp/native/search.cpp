// Exact nearest neighbors on CPUs: a k-d tree, descended by 16 queries at a time, whose leaves are scanned in float32.
//
// Queries that lie close together share a descent, one vector lane each, so that the distances of all of them to the
// box of a node cost a few instructions. Of a leaf that some of them need, the distances to its 64 points are computed
// for one or two queries at a time, one lane per point. Single precision only sieves: what may belong to the k nearest
// is kept, with a margin for rounding, and judged in the end by its exact distance, in float64 from differences, summed
// over the dimensions in order; ties by number. So answers depend neither on the instruction set nor on other queries.
//
// Rounding: float32 coordinates are relative to the first point of a *frame*, a subtree whose diagonal R is less than
// 1/32 of that of the frame around it. With u = 2^-24 every coordinate of a difference is off by at most u (2 R + 2 d)
// and the sum of squares by a factor of 1 + (D + 2) u, so a computed distance, to a point or to a box, is off by at
// most eta (R + d), where d is the true one and eta = (D / 2 + 5) u. Candidates for which that is more than d / 2^11
// are measured again in float64, so that those kept are known to within a factor of 1 + rho. Coordinates are scaled by
// a power of two so that no square overflows, and R is at least so large that what underflows, in float32 and in the
// exact squares, is less than eta R.
//
// Nodes are numbered in preorder; of a node over leaves a..b-1, the left child holds those up to the middle. Only the
// last leaf is not full.
//
// Plain C interface for ctypes, C++17, vector extensions of GCC and Clang, no intrinsics. Comparisons of vectors are
// written as the sign of integer differences (bit patterns of floats >= 0 rank as the floats do): GCC takes apart
// comparisons of 64-byte vectors.
// Symbols: P points, Q queries, D dimensions, k neighbors, W lanes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#include "vectors.h"

extern "C" {

enum SearchStatus { DONE, NO_MEMORY };

// Mirrored by Queries in structures.py.
struct Queries {
    int64_t num_rows, num_neighbors;
    const int64_t *rows;    // which of the Q queries to answer, one after the other
    const double *places;   // (Q, D)
    const int64_t *limit;   // (Q,), only points with smaller numbers are wanted
    const int64_t *exclude; // (Q,), the number of one point that is not, negative for none
    int64_t *index;         // (Q, k), nearest first, -1 where no point is left
    double *value;          // (Q, k), squared distances, infinite where no point is left
};
}

namespace {

constexpr int LEAF = 64;  // points
constexpr int GROUP = 16; // queries that descend together
constexpr int SCALE = 30; // coordinates reach to about 2^SCALE
constexpr double FRAME_RATIO = 0x1p-5, COARSE = 0x1p11;
constexpr int32_t NO_POINT = std::numeric_limits<int32_t>::max();

int64_t middle(const int64_t a, const int64_t b) { return a + (b - a + 1) / 2; }

struct Header {
    int64_t num_points, num_dims;
    double scale, smallest; // the least R
};

// The parts of a tree, which lie one after the other in memory of the caller.
struct Tree {
    const int64_t P, D, leaves, nodes;
    Header *header;
    float *blocks;   // (leaves, D, LEAF), coordinates in float32
    float *boxes;    // (nodes, 2, D), least and greatest coordinates of the points
    float *radii;    // (nodes,), R of the frame
    float *cuts;     // (nodes,), where the points are divided
    double *rows;    // (P, D), coordinates as given, leaf by leaf
    int32_t *axes;   // (nodes,), between which coordinates
    int32_t *frames; // (nodes,), the row of the first point of the frame
    int32_t *first;  // (nodes,), the smallest number of a point
    int32_t *ids;    // (leaves, LEAF), numbers of the points, NO_POINT after the last
    int32_t *dims;   // (D,), widest first: the order of the coordinates in `blocks` and `boxes`
    int64_t bytes;   // of all

    Tree(const void *memory, const int64_t num_points, const int64_t num_dims)
        : P(num_points), D(num_dims), leaves((P + LEAF - 1) / LEAF), nodes(2 * leaves - 1) {
        const uintptr_t start = reinterpret_cast<uintptr_t>(memory);
        uintptr_t used = 0;
        const auto part = [&](auto *&pointer, const int64_t count) {
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(start + used);
            used += (count * sizeof(*pointer) + 63) / 64 * 64;
        };
        part(header, 1);
        part(blocks, leaves * D * LEAF);
        part(boxes, nodes * 2 * D);
        part(radii, nodes);
        part(cuts, nodes);
        part(rows, P * D);
        part(axes, nodes);
        part(frames, nodes);
        part(first, nodes);
        part(ids, leaves * LEAF);
        part(dims, D);
        bytes = int64_t(used);
    }
};

// Order-preserving.
uint64_t as_key(const float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(x));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The n-th smallest of different numbers goes to its place, smaller ones before it: without branches on the numbers,
// which makes it faster than std::nth_element, to which it leaves arrangements that it divides badly.
INLINE void select(uint64_t *numbers, const int64_t count, const int64_t n) {
    int64_t from = 0, to = count;
    for (int rounds = 0; to - from > 1; ++rounds) {
        if (rounds == 64) {
            std::nth_element(numbers + from, numbers + n, numbers + to);
            return;
        }
        uint64_t &x = numbers[from], &y = numbers[from + (to - from) / 2], &z = numbers[to - 1];
        const uint64_t pivot = std::max(std::min(x, y), std::min(std::max(x, y), z));
        std::swap(pivot == x ? x : pivot == y ? y : z, z);
        int64_t less = from;
        for (int64_t i = from; i < to - 1; ++i) {
            const uint64_t number = numbers[i];
            numbers[i] = numbers[less];
            numbers[less] = number;
            less += number < pivot;
        }
        std::swap(numbers[less], numbers[to - 1]);
        if (less == n) return;
        (n < less ? to : from) = n < less ? less : less + 1;
    }
}

// An order of points in which blocks of `size` are leaves of a k-d tree: divided at the median of the widest side.
struct Partition {
    const double *points;
    const int64_t P, D, size;
    double scale = 1;
    std::vector<int32_t> order;
    std::vector<double> spread; // (D,), variance over the square of the scale

    Partition(const double *p, const int64_t num_points, const int64_t num_dims, const int64_t leaf_size)
        : points(p), P(num_points), D(num_dims), size(leaf_size), order(P), spread(D), keys(P) {
        for (int64_t i = 0; i < P; ++i) order[i] = int32_t(i);
        std::vector<double> low(points, points + D), high = low, sum(D), squares(D);
        for (int64_t i = 0; i < P; ++i)
            for (int64_t d = 0; d < D; ++d) {
                low[d] = std::min(low[d], points[i * D + d]);
                high[d] = std::max(high[d], points[i * D + d]);
            }
        double range = 0;
        for (int64_t d = 0; d < D; ++d) range = std::max(range, high[d] - low[d]);
        int exponent = 0;
        std::frexp(range, &exponent);
        if (range > 0) scale = std::ldexp(1, std::min(SCALE - exponent, 500));
        const int64_t step = stride(P);
        for (int64_t i = 0; i < P; i += step)
            for (int64_t d = 0; d < D; ++d) {
                const double x = (points[i * D + d] - low[d]) * scale;
                sum[d] += x;
                squares[d] += x * x;
            }
        const double count = double((P + step - 1) / step);
        for (int64_t d = 0; d < D; ++d) spread[d] = squares[d] / count - sum[d] / count * (sum[d] / count);
    }

    void run() { run(0, 0, (P + size - 1) / size, [](int64_t, int64_t) {}); }

    // `tell` learns the axis of each node.
    template <class F> void run(const int64_t node, const int64_t a, const int64_t b, const F &tell) {
        if (b - a == 1) return;
        const int64_t from = a * size, to = std::min(b * size, P), m = middle(a, b), step = stride(to - from);
        int64_t axis = 0;
        double widest = -1, start = 0;
        for (int64_t d = 0; d < D; ++d) {
            double low = points[order[from] * D + d], high = low;
            for (int64_t i = from; i < to; i += step) {
                low = std::min(low, points[order[i] * D + d]);
                high = std::max(high, points[order[i] * D + d]);
            }
            if (high - low > widest) widest = high - low, axis = d, start = low;
        }
        for (int64_t i = from; i < to; ++i) {
            const float x = float((points[order[i] * D + axis] - start) * scale);
            keys[i] = as_key(x) << 32 | uint32_t(order[i]);
        }
        select(keys.data() + from, to - from, m * size - from);
        for (int64_t i = from; i < to; ++i) order[i] = int32_t(uint32_t(keys[i]));
        tell(node, axis);
        run(node + 1, a, m, tell);
        run(node + 2 * (m - a), m, b, tell);
    }

  private:
    std::vector<uint64_t> keys;

    static int64_t stride(const int64_t count) { return std::max<int64_t>(1, count / 256); } // a sample suffices
};

// Fills a tree.
struct Builder {
    Tree &tree;
    Partition partition;
    const double smallest; // R; underflow costs sqrt(D) 2^-63 in float32, sqrt(D) 2^-511 before scaling in float64
    std::vector<double> low, high; // (nodes, D)

    Builder(Tree &t, const double *points)
        : tree(t), partition(points, t.P, t.D, LEAF),
          smallest(std::sqrt(double(t.D)) * std::max(0x1p-36, 0x1p-480 * partition.scale)), low(t.nodes * t.D),
          high(t.nodes * t.D) {}

    void run() {
        *tree.header = {tree.P, tree.D, partition.scale, smallest};
        for (int64_t d = 0; d < tree.D; ++d) tree.dims[d] = int32_t(d);
        const auto &spread = partition.spread;
        std::stable_sort(tree.dims, tree.dims + tree.D, [&](int i, int j) { return spread[i] > spread[j]; });
        std::vector<int32_t> place(tree.D);
        for (int64_t e = 0; e < tree.D; ++e) place[tree.dims[e]] = int32_t(e);
        partition.run(0, 0, tree.leaves, [&](const int64_t node, const int64_t d) { tree.axes[node] = place[d]; });
        bound(0, 0, tree.leaves);
        store(0, 0, tree.leaves, 0, std::numeric_limits<double>::infinity());
    }

  private:
    const double *point(const int64_t row) const { return partition.points + partition.order[row] * tree.D; }

    // Boxes and smallest numbers, from the leaves upwards.
    void bound(const int64_t node, const int64_t a, const int64_t b) {
        const int64_t D = tree.D;
        double *const l = &low[node * D], *const h = &high[node * D];
        const auto extend = [&](const double *from_low, const double *from_high) {
            for (int64_t d = 0; d < D; ++d) l[d] = std::min(l[d], from_low[d]), h[d] = std::max(h[d], from_high[d]);
        };
        if (b - a == 1) {
            const int64_t from = a * LEAF, to = std::min(b * LEAF, tree.P);
            std::sort(partition.order.begin() + from, partition.order.begin() + to);
            std::copy_n(point(from), D, l);
            std::copy_n(point(from), D, h);
            for (int64_t i = from + 1; i < to; ++i) extend(point(i), point(i));
            tree.first[node] = partition.order[from];
            return;
        }
        const int64_t m = middle(a, b), left = node + 1, right = node + 2 * (m - a);
        bound(left, a, m);
        bound(right, m, b);
        std::copy_n(&low[left * D], D, l);
        std::copy_n(&high[left * D], D, h);
        extend(&low[right * D], &high[right * D]);
        tree.first[node] = std::min(tree.first[left], tree.first[right]);
    }

    // Everything that is relative to a frame, from the root downwards.
    void store(const int64_t node, const int64_t a, const int64_t b, int64_t frame, double radius) {
        const int64_t D = tree.D;
        const double *l = &low[node * D], *h = &high[node * D], scale = partition.scale;
        double squares = 0;
        for (int64_t d = 0; d < D; ++d) squares += (h[d] - l[d]) * scale * ((h[d] - l[d]) * scale);
        const double diagonal = std::max(std::sqrt(squares), smallest);
        if (diagonal < FRAME_RATIO * radius) frame = a * LEAF, radius = diagonal;
        const double *center = point(frame);
        tree.frames[node] = int32_t(frame);
        tree.radii[node] = float(radius * (1 + 0x1p-20));
        float *box = tree.boxes + node * 2 * D;
        for (int64_t e = 0; e < D; ++e) {
            const int32_t d = tree.dims[e];
            box[e] = float((l[d] - center[d]) * scale);
            box[D + e] = float((h[d] - center[d]) * scale);
        }
        if (b - a == 1) {
            leaf(a, center);
            return;
        }
        const int64_t m = middle(a, b), left = node + 1, right = node + 2 * (m - a), d = tree.dims[tree.axes[node]];
        tree.cuts[node] = float((high[left * D + d] / 2 + low[right * D + d] / 2 - center[d]) * scale);
        store(left, a, m, frame, radius);
        store(right, m, b, frame, radius);
    }

    void leaf(const int64_t a, const double *center) {
        const int64_t D = tree.D, live = std::min<int64_t>(LEAF, tree.P - a * LEAF);
        float *block = tree.blocks + a * D * LEAF;
        for (int64_t i = 0; i < LEAF; ++i) {
            const bool real = i < live;
            const double *p = point(a * LEAF + (real ? i : 0));
            tree.ids[a * LEAF + i] = real ? partition.order[a * LEAF + i] : NO_POINT;
            if (real) std::copy_n(p, D, tree.rows + (a * LEAF + i) * D);
            for (int64_t e = 0; e < D; ++e)
                block[e * LEAF + i] = float((p[tree.dims[e]] - center[tree.dims[e]]) * partition.scale);
        }
    }
};

struct Neighbor {
    double value;
    int64_t id;
    bool operator<(const Neighbor &other) const {
        return value < other.value || (value == other.value && id < other.id);
    }
};

// One number for each query of a group.
template <class T> struct alignas(64) Line {
    T values[GROUP];
    T &operator[](const int l) { return values[l]; }
    const T &operator[](const int l) const { return values[l]; }
};

template <int BYTES> struct Search {
    using V = typename Lanes<float, BYTES>::V;
    using I = typename Lanes<int32_t, BYTES>::V;
    using U = typename Lanes<uint32_t, BYTES>::V;
    using L = typename Lanes<int64_t, BYTES>::V;
    static constexpr int W = BYTES / 4, PARTS = LEAF / W, GROUP_PARTS = GROUP / W;
    static constexpr int64_t STAGE = 8; // dimensions after which a leaf may be given up

    // One query on its way.
    struct Query {
        const double *place;        // (D,)
        std::vector<uint64_t> kept; // squared distance in float32 and row of candidates, `count` of them
        int64_t count, full;        // at `full` it is time to drop some
        double reach;               // the k-th neighbor is no farther
        int32_t exclude;
    };

    const Tree tree;
    const Queries &queries;
    const int64_t D, k;
    const double scale, eta, rho;
    const float nothing; // what underflows, squared
    Query group[GROUP];
    Line<float> within; // squared distance, for the present frame, beyond which nothing is wanted
    Line<int32_t> limit;
    std::vector<Line<float>> offset;  // (D, GROUP), coordinates of the queries in the present frame
    std::vector<Line<double>> places; // (D, GROUP), as given
    std::vector<double> squares;      // (D,)
    std::vector<Neighbor> found;
    int32_t frame; // the present one
    float radius;  // its R
    float coarse;  // squared distances below are measured again

    Search(const Header *header, const Queries &q)
        : tree(header, header->num_points, header->num_dims), queries(q), D(tree.D), k(q.num_neighbors),
          scale(header->scale), eta((0.5 * D + 5) * 0x1p-24),
          rho(2 / COARSE + 4 * eta), nothing(squared(eta * header->smallest)),
          offset(D), places(D), squares(D) {
        for (Query &query : group) query.kept.resize(2 * std::min(k, tree.P) + 2 * LEAF);
    }

    template <class T> INLINE static auto load(const T *from) {
        typename Lanes<T, BYTES>::V x;
        std::memcpy(&x, from, BYTES);
        return x;
    }

    INLINE static I as_integer(const V x) {
        I bits;
        std::memcpy(&bits, &x, BYTES);
        return bits;
    }

    // Bit i says whether lane i is negative.
    INLINE static uint32_t signs(const I x) {
        const auto bytes = __builtin_convertvector(U(x) >> 31, typename Lanes<uint8_t, W>::V);
        uint32_t bits = 0;
        for (int i = 0; i < W; i += 8) {
            uint64_t word = 0;
            std::memcpy(&word, reinterpret_cast<const char *>(&bytes) + i, W < 8 ? W : 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
            word = __builtin_bswap64(word);
#endif
            bits |= uint32_t(word * 0x0102040810204080u >> 56) << i;
        }
        return bits;
    }

    INLINE static float squared(const double x) { return float(x * x * (1 + 0x1p-20)); } // rounded up

    // As far as a point at that distance may seem to be in the present frame.
    INLINE double widened(const double distance) const { return (distance + eta * radius) * (1 + 2 * eta); }

    // A subtree and one inside it may have frames that differ in R only.
    INLINE bool elsewhere(const int64_t node) const {
        return tree.frames[node] != frame || tree.radii[node] != radius;
    }

    INLINE void enter(const int64_t node) {
        frame = tree.frames[node];
        radius = tree.radii[node];
        const double *center = tree.rows + frame * D;
        for (int64_t e = 0; e < D; ++e)
            for (int l = 0; l < GROUP; ++l) offset[e][l] = float((places[e][l] - center[tree.dims[e]]) * scale);
        for (int l = 0; l < GROUP; ++l) within[l] = squared(widened(group[l].reach));
        coarse = squared(COARSE * eta * radius);
    }

    // Which queries of the group need a node.
    INLINE uint32_t test(const int64_t node) const {
        const float *low = tree.boxes + node * 2 * D, *high = low + D;
        V sum[GROUP_PARTS] = {};
        for (int64_t e = 0; e < D; ++e) {
            const V l = low[e] - V{}, h = high[e] - V{};
#pragma GCC unroll 4
            for (int g = 0; g < GROUP_PARTS; ++g) {
                const V x = load(&offset[e][g * W]), above = x > l ? x : l, inside = above < h ? above : h;
                sum[g] += (x - inside) * (x - inside);
            }
        }
        uint32_t needed = 0;
#pragma GCC unroll 4
        for (int g = 0; g < GROUP_PARTS; ++g) {
            const I near = ~(as_integer(load(&within[g * W])) - as_integer(sum[g]));
            needed |= signs(near & (tree.first[node] - load(&limit[g * W]))) << (g * W);
        }
        return needed;
    }

    // The points of a leaf for one or two queries.
    template <int COUNT> INLINE void scan(const int64_t leaf, const int *lanes) {
        const float *block = tree.blocks + leaf * D * LEAF;
        const int32_t *ids = tree.ids + leaf * LEAF;
        V sum[COUNT][PARTS] = {};
        I bound[COUNT];
#pragma GCC unroll 2
        for (int c = 0; c < COUNT; ++c) bound[c] = as_integer(within[lanes[c]] - V{});
        for (int64_t e = 0; e < D;) {
            const int64_t stop = std::min(D, e + STAGE);
#pragma GCC unroll 2
            for (; e < stop; ++e)
#pragma GCC unroll 2
                for (int c = 0; c < COUNT; ++c) {
                    const V x = offset[e][lanes[c]] - V{};
#pragma GCC unroll 16
                    for (int p = 0; p < PARTS; ++p) {
                        const V difference = load(block + e * LEAF + p * W) - x;
                        sum[c][p] += difference * difference;
                    }
                }
            if (e == D) break;
            I some = {};
#pragma GCC unroll 2
            for (int c = 0; c < COUNT; ++c)
#pragma GCC unroll 16
                for (int p = 0; p < PARTS; ++p) some |= ~(bound[c] - as_integer(sum[c][p]));
            if (!signs(some)) return;
        }
#pragma GCC unroll 2
        for (int c = 0; c < COUNT; ++c) {
            I near[PARTS], some = {};
#pragma GCC unroll 16
            for (int p = 0; p < PARTS; ++p) {
                near[p] = ~(bound[c] - as_integer(sum[c][p])) & (load(ids + p * W) - limit[lanes[c]]);
                some |= near[p];
            }
            if (signs(some)) keep(leaf, lanes[c], sum[c], near);
        }
    }

    INLINE void keep(const int64_t leaf, const int lane, const V *sum, const I *near) {
        Query &query = group[lane];
        float values[LEAF];
        std::memcpy(values, sum, sizeof(values));
        uint64_t which = 0;
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; ++p) which |= uint64_t(signs(near[p])) << (p * W);
        uint64_t *kept = query.kept.data();
        int64_t count = query.count;
        for (; which; which &= which - 1) {
            const int i = __builtin_ctzll(which);
            const int64_t row = leaf * LEAF + i;
            if (values[i] < coarse) values[i] = measure(query.place, tree.rows + row * D);
            uint32_t bits;
            std::memcpy(&bits, &values[i], sizeof(bits));
            kept[count] = uint64_t(bits) << 32 | uint64_t(row);
            count += tree.ids[row] != query.exclude;
        }
        query.count = count;
        if (count >= query.full) drop(lane);
    }

    __attribute__((noinline)) float measure(const double *p, const double *q) const {
        double sum = 0;
        for (int64_t d = 0; d < D; ++d) sum += (p[d] - q[d]) * scale * ((p[d] - q[d]) * scale);
        return std::max(float(sum), nothing);
    }

    // Drop the candidates that cannot belong to the k nearest of those found so far.
    INLINE void drop(const int lane) {
        Query &query = group[lane];
        uint64_t *kept = query.kept.data();
        select(kept, query.count, k - 1);
        const uint32_t bits = uint32_t(kept[k - 1] >> 32);
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        query.reach = std::sqrt(double(value)) * (1 + rho);
        const float last = squared(query.reach * (1 + rho));
        uint32_t last_bits;
        std::memcpy(&last_bits, &last, sizeof(last));
        int64_t count = k;
        for (int64_t i = k; i < query.count; ++i) {
            const uint64_t candidate = kept[i];
            kept[count] = candidate;
            count += candidate >> 32 <= last_bits;
        }
        within[lane] = squared(widened(query.reach));
        query.count = count;
        query.full = count + std::max(k, int64_t(LEAF) / 4);
        if (query.kept.size() < size_t(query.full + LEAF)) query.kept.resize(2 * query.full + LEAF);
    }

    INLINE void start(const int64_t begin, const int live) {
        for (int l = 0; l < GROUP; ++l) {
            const int64_t row = queries.rows[begin + (l < live ? l : 0)];
            for (int64_t e = 0; e < D; ++e) places[e][l] = queries.places[row * D + tree.dims[e]];
            limit[l] = l < live ? int32_t(std::max<int64_t>(0, std::min(queries.limit[row], tree.P))) : 0;
            group[l].place = queries.places + row * D;
            const int64_t other = queries.exclude[row];
            group[l].exclude = int32_t(other < tree.P ? std::max<int64_t>(other, -1) : -1);
            group[l].count = 0;
            group[l].full = 2 * k;
            group[l].reach = std::numeric_limits<double>::infinity();
        }
        frame = -1;
    }

    // Nearer children first; grandchildren at once, which saves the tests of every other level.
    INLINE void descend() {
        struct Range {
            int64_t node, a, b;
        } stack[128];
        int top = 0;
        stack[top++] = {0, 0, tree.leaves};
        while (top) {
            const Range here = stack[--top];
            if (elsewhere(here.node)) enter(here.node);
            uint32_t needed = test(here.node);
            if (!needed) continue;
            if (here.b - here.a > 1) {
                Range near, far, child[2];
                divide(here, child[0], child[1]);
                for (const Range &each : child)
                    if (each.b - each.a == 1 || elsewhere(each.node))
                        stack[top++] = each;
                    else {
                        divide(each, far, near);
                        stack[top++] = far;
                        stack[top++] = near;
                    }
                continue;
            }
            while (needed) {
                int lanes[2] = {__builtin_ctz(needed), 0};
                needed &= needed - 1;
                if (needed) {
                    lanes[1] = __builtin_ctz(needed);
                    needed &= needed - 1;
                    scan<2>(here.a, lanes);
                } else
                    scan<1>(here.a, lanes);
            }
        }
    }

    template <class R> INLINE void divide(const R &node, R &far, R &near) const {
        const int64_t m = middle(node.a, node.b);
        const bool left = offset[tree.axes[node.node]][GROUP / 2] < tree.cuts[node.node];
        (left ? near : far) = {node.node + 1, node.a, m};
        (left ? far : near) = {node.node + 2 * (m - node.a), m, node.b};
    }

    // Exact distances, and the k nearest by them.
    INLINE void finish(const int lane, const int64_t row) {
        const Query &query = group[lane];
        const int64_t count = query.count, wanted = std::min(count, k);
        found.resize(count);
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t candidate = uint32_t(query.kept[i]);
            const double *p = tree.rows + candidate * D;
            for (int64_t d = 0; d < D; ++d) squares[d] = (p[d] - query.place[d]) * (p[d] - query.place[d]);
            asm volatile("" : : "r"(squares.data()) : "memory"); // no fusing of multiplication and addition
            double sum = 0;
            for (int64_t d = 0; d < D; ++d) sum += squares[d];
            found[i] = {sum, tree.ids[candidate]};
        }
        int64_t *index = queries.index + row * k;
        double *value = queries.value + row * k;
        if (count > BYTES || !rank(index, value)) {
            if (count > 2 * k) std::nth_element(found.begin(), found.begin() + k, found.end());
            std::sort(found.begin(), found.begin() + (count > 2 * k ? k : count));
            for (int64_t i = 0; i < wanted; ++i) index[i] = found[i].id, value[i] = found[i].value;
        }
        std::fill(index + wanted, index + k, -1);
        std::fill(value + wanted, value + k, std::numeric_limits<double>::infinity());
    }

    // Sort few of them by counting the smaller ones of each. Ties are refused: two would get one place.
    INLINE bool rank(int64_t *index, double *value) const {
        constexpr int64_t WIDTH = BYTES / sizeof(int64_t);
        int64_t bits[BYTES + WIDTH], order[BYTES + WIDTH], total = 0;
        const int64_t count = found.size();
        for (int64_t i = 0; i < count; ++i) std::memcpy(bits + i, &found[i].value, sizeof(double));
        std::fill_n(bits + count, WIDTH, 0);
        for (int64_t i = 0; i < count; i += WIDTH) {
            const L own = load(bits + i);
            L place = {};
#pragma GCC unroll 4
            for (int64_t j = 0; j < count; ++j) place -= (bits[j] - own) >> 63;
            std::memcpy(order + i, &place, BYTES);
        }
        for (int64_t i = 0; i < count; ++i) total += order[i];
        if (2 * total != count * (count - 1)) return false;
        for (int64_t i = 0; i < count; ++i)
            if (order[i] < k) index[order[i]] = found[i].id, value[order[i]] = found[i].value;
        return true;
    }

    INLINE void run() {
        for (int64_t begin = 0; begin < queries.num_rows; begin += GROUP) {
            const int live = int(std::min<int64_t>(GROUP, queries.num_rows - begin));
            start(begin, live);
            descend();
            for (int l = 0; l < live; ++l) {
                if (group[l].count > k) drop(l);
                for (int64_t i = 0; i < group[l].count; ++i)
                    __builtin_prefetch(tree.rows + uint32_t(group[l].kept[i]) * D);
            }
            for (int l = 0; l < live; ++l) finish(l, queries.rows[begin + l]);
        }
    }
};

// One worker per instruction set, compiled for it; everything above is inlined into these.
using Worker = void (*)(const Header *, const Queries &);

#define WORKER(NAME, BYTES, TARGET)                                                                                    \
    TARGET void NAME(const Header *tree, const Queries &queries) { Search<BYTES>(tree, queries).run(); }

WORKER(any, 16, )
#if defined(__x86_64__)
WORKER(avx2, 32, AVX2)
WORKER(avx512, 64, AVX512)
const Worker WORKERS[] = {any, avx2, avx512};
#else
const Worker WORKERS[] = {any};
#endif

template <class F> int64_t guarded(const F &work) {
    try {
        work();
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
    return DONE;
}

} // namespace

extern "C" {

// Bytes of the structure of queries, for the caller to compare.
int64_t nn_search_size() { return sizeof(Queries); }

// Bytes of a tree over that many points, at least one and fewer than 2^31.
int64_t nn_search_bytes(const int64_t num_points, const int64_t num_dims) {
    return Tree(nullptr, num_points, num_dims).bytes;
}

// Build a tree over points (P, D) in that many bytes, which start at a multiple of 16; returns a SearchStatus.
int64_t nn_search_build(const double *points, const int64_t num_points, const int64_t num_dims, void *memory) {
    return guarded([&] {
        Tree tree(memory, num_points, num_dims);
        Builder(tree, points).run();
    });
}

// An order in which neighbors in space follow each other, (P,); returns a SearchStatus.
int64_t nn_search_order(const double *points, const int64_t num_points, const int64_t num_dims, int64_t *order) {
    return guarded([&] {
        Partition partition(points, num_points, num_dims, GROUP);
        partition.run();
        std::copy(partition.order.begin(), partition.order.end(), order);
    });
}

// Answer queries by an instruction set below nn_levels(), fastest in an order like the above; returns a SearchStatus.
int64_t nn_search_run(const void *tree, const Queries *queries, const int64_t level) {
    return guarded([&] { WORKERS[level](static_cast<const Header *>(tree), *queries); });
}
}
