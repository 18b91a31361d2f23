// Greedy farthest-point ordering on CPUs: a k-d tree whose nodes know their point farthest from all placed ones.
//
// The next point is the one that the root knows. It is placed by a descent that leaves out every node whose box is at
// least as far from it as the farthest point of the node is from the points placed before: nothing changes there. Boxes
// are measured as points are, and rounding is monotone, so that this is exact in floating point, too. The compiler must
// not contract products and sums, as no ISO mode of GCC does, for the result to be that of NumPy.
//
// Cost: late placements touch a few leaves, early ones all points: O(P log P) in low dimensions, at most O(P^2 D).
// Symbols: P points, D dimensions; of a node, the range of its points in the order of the tree.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t LEAF = 8; // most points

class FarthestPoints {
  public:
    FarthestPoints(const double *points, const int64_t P, const int64_t D) : P(P), D(D), rows(P) {
        std::iota(rows.begin(), rows.end(), int64_t{0});
        int64_t leaves = 1;
        while (leaves * LEAF < P) leaves *= 2;
        nodes.resize(2 * leaves), boxes.resize(2 * leaves * 2 * D);
        divide(points, 1, 0, P);
        places.resize(P * D), distances.assign(P, std::numeric_limits<double>::infinity()), position.resize(P);
        for (int64_t p = 0; p < P; ++p) {
            position[rows[p]] = p;
            std::copy_n(points + rows[p] * D, D, &places[p * D]);
        }
    }

    // Places `row`, then always the farthest point; writes the placed ones, and returns how many they are: points that
    // coincide with others are left.
    int64_t run(const int64_t row, int64_t *order) {
        int64_t count = 0, next = position[row];
        do {
            order[count++] = rows[next];
            here = &places[next * D];
            distances[next] = -1;
            place(1);
            next = nodes[1].farthest;
        } while (nodes[1].distance > 0 && count < P);
        return count;
    }

  private:
    struct Node {
        int64_t begin = 0, end = 0;
        double distance = std::numeric_limits<double>::infinity(); // of its farthest point, negative if all are placed
        int64_t farthest = 0;                                      // its place
    };

    const int64_t P, D;
    std::vector<int64_t> rows, position; // the row at each place, and the place of each row
    std::vector<Node> nodes;             // node i has the children 2 i and 2 i + 1, unless it is a leaf
    std::vector<double> boxes;           // (nodes, 2, D), least and greatest coordinates
    std::vector<double> places;          // (P, D)
    std::vector<double> distances;       // (P,), squared, to the nearest placed point; -1 of placed points
    const double *here = nullptr;        // the point that is being placed

    void divide(const double *points, const int64_t node, const int64_t begin, const int64_t end) {
        nodes[node].begin = begin, nodes[node].end = end;
        double *least = &boxes[node * 2 * D], *most = least + D;
        std::copy_n(points + rows[begin] * D, D, least);
        std::copy_n(least, D, most);
        for (int64_t p = begin + 1; p < end; ++p)
            for (int64_t d = 0; d < D; ++d) {
                const double x = points[rows[p] * D + d];
                least[d] = std::min(least[d], x), most[d] = std::max(most[d], x);
            }
        if (2 * node >= int64_t(nodes.size()) || end - begin < 2) return;
        int64_t axis = 0;
        for (int64_t d = 1; d < D; ++d)
            if (most[d] - least[d] > most[axis] - least[axis]) axis = d;
        const int64_t middle = begin + (end - begin + 1) / 2;
        std::nth_element(rows.begin() + begin, rows.begin() + middle, rows.begin() + end,
                         [&](const int64_t a, const int64_t b) { return points[a * D + axis] < points[b * D + axis]; });
        divide(points, 2 * node, begin, middle);
        divide(points, 2 * node + 1, middle, end);
    }

    // Lower the distances in a node.
    void place(const int64_t index) {
        Node &node = nodes[index];
        const double *least = &boxes[index * 2 * D], *most = least + D;
        double gap = 0;
        for (int64_t d = 0; d < D; ++d) {
            const double outside = std::max(std::max(least[d] - here[d], here[d] - most[d]), 0.0);
            gap += outside * outside;
        }
        if (gap >= node.distance) return;
        node.distance = -1;
        if (2 * index >= int64_t(nodes.size()) || node.end - node.begin < 2) {
            for (int64_t p = node.begin; p < node.end; ++p) {
                double distance = 0;
                for (int64_t d = 0; d < D; ++d) {
                    const double difference = places[p * D + d] - here[d];
                    distance += difference * difference;
                }
                distances[p] = std::min(distances[p], distance);
                take(node, distances[p], p);
            }
            return;
        }
        for (const int64_t child : {2 * index, 2 * index + 1}) {
            place(child);
            take(node, nodes[child].distance, nodes[child].farthest);
        }
    }

    // At ties the smaller row is the farther one.
    void take(Node &node, const double distance, const int64_t p) const {
        if (distance > node.distance || (distance == node.distance && rows[p] < rows[node.farthest]))
            node.distance = distance, node.farthest = p;
    }
};

} // namespace

extern "C" {

// Rows from `first` on, each the farthest from all before it, at ties the smaller row; writes them to order (P,) and
// returns how many they are, without those that coincide with others; -1 if there is no memory.
int64_t nn_farthest_points(const double *points, const int64_t num_points, const int64_t num_dims, const int64_t first,
                           int64_t *order) {
    try {
        return FarthestPoints(points, num_points, num_dims).run(first, order);
    } catch (const std::bad_alloc &) {
        return -1;
    }
}
}
