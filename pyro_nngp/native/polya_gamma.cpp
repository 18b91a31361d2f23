// Exact draws from Polya-Gamma distributions PG(b, c) on CPUs.
//
// b up to 4: sums of draws by Devroye's method (Polson, Scott and Windle 2013, section 4): a mixture of an exponential and
// a truncated inverse Gaussian density, and rejection by the partial sums of an alternating series. The same series serves
// for a fraction h of 1 (Windle, Polson and Scott 2014, equation 6), whose tail is enclosed by that of a Gamma density: for
// h in [1/4, 3/4] the density times exp(pi^2 x / 8) falls beyond x = 1.3, toward that limit. b = 3.5 is 1 + 1 + 1 + 1/2.
//
// Any other b: rejection below three tangents of the logarithm of the saddle-point approximation s(w), taken as a
// density of log w. The ratio of the true density p(w) to s(w) falls from 1 at w = 0 to Gamma's Stirling ratio at
// infinity, which is above exp(-1 / (12 b)), so that
//
//     s(w) exp(-1 / (12 b)) <= p(w) <= s(w),
//
// and p itself, an integral, is evaluated only where a uniform number falls in between: for about one draw in 12 b.
// Bracket and log-concavity, for b >= 1/4, and the fall of the tail are numerical findings that the tests repeat.
//
// A relative standard deviation below 1e-7, at which that arithmetic ends, gives normal draws.
//
// Each entry has a random stream of its own, a function of the seed and its number, so that draws depend neither on the
// number of threads nor on other entries.
//
// Plain C interface for ctypes, C++17. Symbols: v^2 = q solves tanh(v) / v = 4 w / b; cumulants k per unit of b.

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

extern "C" {

// Mirrored by PolyaGammaDraws in structures.py.
struct PolyaGammaDraws {
    int64_t num_entries, num_draws, seed, num_threads;
    const double *concentration; // (B,)
    const double *tilt;          // (B,)
    double *draws;               // (S, B); NaN where b is below least_concentration() or a parameter is not finite
};
}

namespace {

constexpr double PI = 3.14159265358979323846, LOG_2 = 0.69314718055994530942, LEAST = 0.25, MOST_SUMMED = 4, MARGIN = 1e-7, NORMAL = 1e-7;

// xoshiro256++ of Blackman and Vigna (2019), seeded by splitmix64.
struct Random {
    uint64_t state[4];

    Random(const uint64_t seed, const uint64_t entry) {
        uint64_t x = mix(seed) + entry * 0x9e3779b97f4a7c15u;
        for (auto &s : state) s = mix(x += 0x9e3779b97f4a7c15u);
    }

    static uint64_t mix(uint64_t z) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

    static uint64_t rotated(const uint64_t x, const int k) { return (x << k) | (x >> (64 - k)); }

    uint64_t next() {
        const uint64_t result = rotated(state[0] + state[3], 23) + state[0], t = state[1] << 17;
        state[2] ^= state[0];
        state[3] ^= state[1];
        state[1] ^= state[2];
        state[0] ^= state[3];
        state[2] ^= t;
        state[3] = rotated(state[3], 45);
        return result;
    }

    double uniform() { return static_cast<double>((next() >> 11) + 1) * 0x1p-53; } // in (0, 1]
    double exponential() { return -std::log(uniform()); }

    double normal() { // the polar method, of whose two values one is kept
        for (;;) {
            const double x = 2 * uniform() - 1, y = 2 * uniform() - 1, r = x * x + y * y;
            if (r > 0 && r < 1) return x * std::sqrt(-2 * std::log(r) / r);
        }
    }
};

// Inverse Gaussian with mean 1 / z and shape 1, below `cut`.
double truncated_inverse_gaussian(Random &random, const double z, const double cut) {
    if (z * cut < 1) { // the mean is above `cut`
        for (;;) {
            double x;
            if (cut > 1.5) {
                const double n = random.normal();
                x = 1 / (n * n);
                if (!(x <= cut)) continue;
            } else {
                double e, f;
                do {
                    e = random.exponential();
                    f = random.exponential();
                } while (e * e > 2 * f / cut);
                const double root = 1 + cut * e;
                x = cut / (root * root);
            }
            if (random.uniform() <= std::exp(-z * z * x / 2)) return x;
        }
    }
    for (;;) {
        const double mean = 1 / z, y = random.normal(), my = mean * y * y;
        // mean + mean (my - sqrt(4 my + my^2)) / 2, without cancellation
        double x = mean * (1 - 2 * my / (my + std::sqrt(my * (4 + my))));
        if (!(my > 0)) x = mean;
        if (random.uniform() > mean / (mean + x)) x = mean * mean / x;
        if (x <= cut) return x;
    }
}

// 2 exp(-z) times the distribution function of the inverse Gaussian with mean 1 / z and shape 1 at `cut`.
double inverse_gaussian_mass(const double z, const double cut) {
    const double root = std::sqrt(1 / cut);
    return std::exp(-z) * std::erfc((1 - cut * z) * root / std::sqrt(2.0)) +
           std::exp(z) * std::erfc((1 + cut * z) * root / std::sqrt(2.0));
}

constexpr double MOST_TILTED = 300; // beyond it the left part of a mixture has all the mass in floating point

// Sums of `count` draws of PG(1, c) = J / 4, J with z = |c| / 2; `CUT` separates the two parts of the mixture.
class Devroye {
  public:
    Devroye(const int count, const double c) : count(count), z(std::fabs(c) / 2), rate(PI * PI / 8 + z * z / 2) {
        if (!count) return;
        const double right = PI / (2 * rate) * std::exp(-rate * CUT);
        share = z > MOST_TILTED ? 0 : right / (right + inverse_gaussian_mass(z, CUT));
    }

    double draw(Random &random) const {
        double sum = 0;
        for (int i = 0; i < count; ++i) sum += one(random);
        return sum / 4;
    }

  private:
    static constexpr double CUT = 0.64, MOST_SECOND = 0.006; // the second term, relative to the first, is smaller
    int count;
    double z, rate, share = 0;

    double one(Random &random) const {
        for (;;) {
            const double x = random.uniform() < share ? CUT + random.exponential() / rate
                                                           : truncated_inverse_gaussian(random, z, CUT);
            const double u = random.uniform();
            if (u < 1 - MOST_SECOND) return x;
            double sum = term(0, x);
            const double y = u * sum;
            for (int n = 1;; ++n) {
                if (n % 2) {
                    sum -= term(n, x);
                    if (y <= sum) return x;
                } else {
                    sum += term(n, x);
                    if (y > sum) break;
                }
                if (n > 1000) return std::numeric_limits<double>::quiet_NaN();
            }
        }
    }

    static double term(const int n, const double x) {
        const double h = n + 0.5;
        if (x > CUT) return PI * h * std::exp(-h * h * PI * PI * x / 2);
        const double r = 2 / (PI * x);
        return PI * h * r * std::sqrt(r) * std::exp(-2 * h * h / x);
    }
};

// What the tail of J(h), the sum of h such draws, needs of h alone.
struct Tail {
    static constexpr double CUT = 1.3, RATE = PI * PI / 8;
    double h = 0, second = 0; // the second term at CUT, over the first
    double height = 0;        // density times exp(RATE x) at CUT
    double limit = 0;         // and its limit over x^(h - 1)

    void prepare(const double wanted) {
        if (h == wanted) return;
        h = wanted;
        double part = 1, sum = 1;
        for (int n = 1; n < 20; ++n) {
            part *= (n - 1 + h) / n;
            sum += (n % 2 ? -1 : 1) * part * (2 * n + h) / h * std::exp(-2 * n * (n + h) / CUT);
        }
        second = (2 + h) * std::exp(-2 * (1 + h) / CUT);
        height = leading(CUT) * sum * std::exp(RATE * CUT);
        limit = std::pow(PI / 2, h) / std::tgamma(h);
    }

    // The first term of the series.
    double leading(const double x) const {
        return std::pow(2.0, h) * h / std::sqrt(2 * PI * x) / x * std::exp(-h * h / (2 * x));
    }
};

// Sums of `count` draws of PG(h, c), 1/4 <= h <= 3/4, and `ones` draws of PG(1, c).
class Fraction {
  public:
    Fraction(const int ones, const int count, const Tail &tail, const double c)
        : whole(ones, c), count(count), tail(tail), h(tail.h), z(std::fabs(c) / 2), rate(Tail::RATE + z * z / 2) {
        const double right = tail.height / rate * std::exp(-rate * Tail::CUT);
        const double left = std::pow(2.0, h) / 2 * inverse_gaussian_mass(h * z, Tail::CUT / (h * h));
        share = h * z > MOST_TILTED ? 0 : right / (right + left);
    }

    double draw(Random &random) const {
        double sum = 0;
        for (int i = 0; i < count; ++i) sum += one(random);
        return sum / 4 + whole.draw(random);
    }

  private:
    const Devroye whole;
    const int count;
    const Tail &tail;
    const double h, z, rate;
    double share;

    double one(Random &random) const {
        for (;;) {
            const bool right = random.uniform() < share;
            const double x = right ? Tail::CUT + random.exponential() / rate
                                   : h * h * truncated_inverse_gaussian(random, h * z, Tail::CUT / (h * h));
            double u = random.uniform();
            if (right) {
                if (u * tail.height <= tail.limit * std::pow(x, h - 1)) return x;
                u *= tail.height * std::exp(-Tail::RATE * x) / tail.leading(x);
            } else if (u < 1 - tail.second) {
                return x;
            }
            double part = 1, before = 1, sum = 1; // partial sums enclose the limit once the terms fall
            for (int n = 1;; ++n) {
                part *= (n - 1 + h) / n;
                const double term = part * (2 * n + h) / h * std::exp(-2 * n * (n + h) / x);
                sum += n % 2 ? -term : term;
                if (term < before && n % 2 && u <= sum) return x;
                if (term < before && n % 2 == 0 && u > sum) break;
                before = term;
                if (n > 1000) return std::numeric_limits<double>::quiet_NaN();
            }
        }
    }
};

// q with tanh(v) / v = x, v^2 = q: Newton's method for log x as a function of log(q + pi^2 / 4).
double saddle(const double x) {
    constexpr double POLE = PI * PI / 4;
    double square = 1 / (x * x) + 2 / (x + 2 / POLE); // right as x goes to 0 and to infinity
    for (int i = 0; i < 5; ++i) {
        const double q = square - POLE, v = std::sqrt(std::fabs(q));
        double t, slope; // of log t in log square
        if (v < 0.05) {
            t = 1 - q * (1.0 / 3 - q * (2.0 / 15 - q * 17 / 315));
            slope = square * (-1.0 / 3 + q * (4.0 / 15 - q * 51 / 315)) / t;
        } else {
            t = (q > 0 ? std::tanh(v) : std::tan(v)) / v;
            slope = square * (1 - t * t * q - t) / (2 * q * t);
        }
        const double ratio = x / t, step = 2 * (ratio - 1) / (ratio + 1) / slope; // log(ratio) / slope, to third order
        const double half = std::clamp(step / 2, -0.5, 0.5);
        square *= (1 + half) / (1 - half);
        if (std::fabs(step) < 1e-6) break; // the next error is of the order of its square
    }
    return square - POLE;
}

// q + pi^2 / 4 over its approximation for small and large x, as a function of log x on a grid: right to 1e-5 between the
// places of the grid, so that one step of Newton's method leaves 1e-10.
class SaddleTable {
  public:
    static constexpr double FIRST = -8, STEPS = 64, POLE = PI * PI / 4;

    SaddleTable() : ratio(SIZE) {
        for (int i = 0; i < SIZE; ++i) {
            const double x = std::exp(FIRST + i / STEPS);
            ratio[i] = (saddle(x) + POLE) / approximate(x);
        }
    }

    static double approximate(const double x) { return 1 / (x * x) + 2 / (x + 2 / POLE); }

    double operator()(const double x, const double log_x) const {
        const double place = (log_x - FIRST) * STEPS;
        if (!(place >= 0 && place < SIZE - 1)) return saddle(x);
        const int i = static_cast<int>(place);
        const double share = place - i;
        return approximate(x) * (ratio[i] + share * (ratio[i + 1] - ratio[i])) - POLE;
    }

  private:
    static constexpr int SIZE = 1025;
    std::vector<double> ratio;
};

const SaddleTable &saddles() {
    static const SaddleTable table;
    return table;
}

// log s(w) + y - tilt w at w = exp(y), and its derivative by y; `log_4_over_b` is log(4 / b).
struct Height {
    double value, slope;
};

template <bool SLOPE> Height saddle_point(const double w, const double y, const double b, const double log_4_over_b, const double tilt) {
    const double x = w / b, t = 4 * x;
    double q = saddles()(t, y + log_4_over_b);
    double k, k2, k3 = 0; // cumulants per unit of b: of order 0, 2 and 3
    if (std::fabs(q) < 0.05) {
        const double found = 1 - q * (1.0 / 3 - q * (2.0 / 15 - q * (17.0 / 315 - q * 62 / 2835)));
        q += (t - found) / (-1.0 / 3 + q * (4.0 / 15 - q * 51 / 315));
        k = -q * (1.0 / 2 - q * (1.0 / 12 - q * (1.0 / 45 - q * (17.0 / 2520 - q * 31 / 14175))));
        k2 = (2.0 / 3 - q * (8.0 / 15 - q * (34.0 / 105 - q * 496 / 2835))) / 16;
        k3 = (8.0 / 15 - q * (68.0 / 105 - q * 1488 / 2835)) / 32;
    } else {
        const double v = std::sqrt(std::fabs(q));
        double found;
        if (q > 0) {
            const double e = std::exp(-2 * v);
            found = (1 - e) / ((1 + e) * v);
            k = LOG_2 - v - std::log1p(e);
        } else {
            const double cosine = std::cos(v);
            found = std::sqrt(1 - cosine * cosine) / (cosine * v);
            k = -std::log(cosine);
        }
        const double before = (1 - found * found * q - found) / (2 * q), step = (t - found) / before;
        k -= step * (found + step * before / 2) / 2; // dk / dq = -t / 2
        q += step;
        const double one = t * t * q, excess = (t - 1 + one) / q;
        k2 = excess / 16;
        if (SLOPE) k3 = -((1 - one - t) / (2 * q) * (1 + 2 * t * q) + t * t - excess) / (32 * q);
    }
    const double s = -2 * q, value = -0.5 * std::log(2 * PI * b * k2) + b * (k - s * x) + y - tilt * w;
    if (!SLOPE) return {value, 0};
    return {value, 1 - w * k3 / (2 * b * k2 * k2) - w * (s + tilt)};
}

// log p(w | b, 0) + log w - tilt w: the Laplace transform inverted along a parabola through the saddle point by the
// trapezoidal rule, as in pyro_nngp/distributions/polya_gamma.py.
double exact_height(const double w, const double b, const double tilt) {
    constexpr int NODES = 16;
    constexpr double STEP = 0.5, OFFSET = 3.0;
    const double width = 1 / std::sqrt(4 * w);
    const double a = std::max(std::sqrt(saddle(4 * w / b) + PI * PI / 4), OFFSET * width);
    double first = 0, sum = 0;
    for (int i = 0; i < NODES; ++i) {
        const double y = STEP * i * width;
        const std::complex<double> r(a, y), root = std::sqrt(r * r - PI * PI / 4);
        const std::complex<double> cosh = root + std::log(1.0 + std::exp(-2.0 * root)) - LOG_2;
        const double size = 2 * w * (a * a - y * y) - b * cosh.real(), phase = 4 * w * a * y - b * cosh.imag();
        if (i == 0) first = size;
        sum += (i ? 1.0 : 0.5) * std::exp(size - first) * (a * std::cos(phase) - y * std::sin(phase));
    }
    return std::log(4 * STEP / PI) + std::log(width) - PI * PI / 2 * w + first + std::log(sum) + std::log(w) - tilt * w;
}

double tanhc(const double u) { return std::fabs(u) < 1e-4 ? 1 - u * u / 3 : std::tanh(u) / u; }

// (tanh u - u / cosh^2 u) / u^3
double tanhc_slope(const double u) {
    const double q = u * u, t = std::tanh(u);
    if (std::isinf(u * q)) return 1 / u / q;
    if (std::fabs(u) < 0.1) return 2.0 / 3 - q * (8.0 / 15 - q * 102.0 / 315);
    return (t - u * (1 - t) * (1 + t)) / (u * q);
}

class Tangents {
  public:
    Tangents(const double b, const double c)
        : b(b), log_4_over_b(std::log(4 / b)), tilt(c * c / 2), width(1 / (12 * b)) {
        const double mean = b / 4 * tanhc(c / 2), spread = std::sqrt(b / 16 * tanhc_slope(c / 2)) / mean;
        const double rising = b * b / 4 / (1 + std::sqrt(1 + b * c * b * c / 4)), middle = std::log(mean);
        const double points[3] = {std::min(middle - 1.4 * std::min(spread, 1.0), std::log(rising)),
                                  middle - 0.1 * std::min(spread, 1.0), middle + 1.2 * std::min(spread, 1.0)};
        for (int i = 0; i < 3; ++i) {
            const Height height = saddle_point<true>(std::exp(points[i]), points[i], b, log_4_over_b, tilt);
            slope[i] = height.slope;
            rise[i] = height.value + MARGIN - slope[i] * points[i];
        }
        for (int i = 0; i < 2; ++i) corner[i] = (rise[i + 1] - rise[i]) / (slope[i] - slope[i + 1]);
        const double left = rise[0] + slope[0] * corner[0], right = rise[2] + slope[2] * corner[1];
        const double length = corner[1] - corner[0], steep = slope[1] * length;
        const double area = std::fabs(steep) < 1e-6 ? length : std::expm1(steep) / slope[1];
        const double first = 1 / slope[0], third = -std::exp(right - left) / slope[2], total = first + area + third;
        share[0] = first / total;
        share[1] = (first + area) / total;
        valid = slope[0] > 0 && slope[2] < 0 && length > 0 && std::isfinite(total) && total > 0;
    }

    double draw(Random &random) const {
        for (int i = 0; valid && i < MOST_TRIES; ++i) {
            const double pick = random.uniform(), u = random.uniform();
            const int piece = (pick > share[0]) + (pick > share[1]);
            double y;
            if (piece == 1) {
                const double length = corner[1] - corner[0], steep = slope[1] * length;
                y = corner[0] + (std::fabs(steep) < 1e-6 ? u * length : std::log1p(u * std::expm1(steep)) / slope[1]);
            } else {
                y = corner[piece / 2] + std::log(u) / slope[piece];
            }
            const double w = std::exp(y), level = std::log(random.uniform()) + rise[piece] + slope[piece] * y;
            const double above = saddle_point<false>(w, y, b, log_4_over_b, tilt).value;
            if (level < above - width - MARGIN) return w;
            if (level < above + MARGIN && level < exact_height(w, b, tilt)) return w;
        }
        return std::numeric_limits<double>::quiet_NaN();
    }

  private:
    static constexpr int MOST_TRIES = 10000; // three in five are accepted at least; more mean that numbers overflow
    double b, log_4_over_b, tilt, width, rise[3], slope[3], corner[2], share[2];
    bool valid;
};

template <class Sampler> void fill(const Sampler &sampler, const PolyaGammaDraws &call, const int64_t entry) {
    Random random(static_cast<uint64_t>(call.seed), static_cast<uint64_t>(entry));
    for (int64_t s = 0; s < call.num_draws; ++s) call.draws[s * call.num_entries + entry] = sampler.draw(random);
}

// The limit of small relative standard deviations: all cumulants beyond the second are of the order of `spread`.
struct Normal {
    double mean, spread;
    double draw(Random &random) const { return mean * (1 + spread * random.normal()); }
};

struct Undefined {
    double draw(Random &) const { return std::numeric_limits<double>::quiet_NaN(); }
};

void draw_entries(const PolyaGammaDraws &call, const int64_t start, const int64_t stop) {
    Tail tail;
    for (int64_t i = start; i < stop; ++i) {
        const double b = call.concentration[i], c = call.tilt[i];
        if (!(b >= LEAST) || !std::isfinite(b) || !std::isfinite(c))
            fill(Undefined(), call, i);
        else if (b * std::fabs(c) > 2 / (NORMAL * NORMAL)) // c^2 may overflow
            fill(Normal{b / 2 / std::fabs(c), std::sqrt(2 / b / std::fabs(c))}, call, i);
        else if (b <= MOST_SUMMED && b == std::floor(b))
            fill(Devroye(static_cast<int>(b), c), call, i);
        else if (b <= MOST_SUMMED) { // a rest below 1/4 takes one of the ones; a rest above 3/4 is halved
            const double rest = b - std::floor(b), shared = rest < LEAST ? 1 + rest : rest;
            const int count = shared > 1 - LEAST ? 2 : 1;
            tail.prepare(shared / count);
            fill(Fraction(static_cast<int>(b - shared + 0.5), count, tail, c), call, i);
        }
        else if (const double spread = std::sqrt(b / 16 * tanhc_slope(c / 2)) / (b / 4 * tanhc(c / 2)); spread < NORMAL)
            fill(Normal{b / 4 * tanhc(c / 2), spread}, call, i);
        else
            fill(Tangents(b, c), call, i);
    }
}

} // namespace

extern "C" {

// Bytes of the structure of arguments, for the caller to compare.
int64_t nn_polya_gamma_size() { return sizeof(PolyaGammaDraws); }

// Write the draws; returns 0.
int64_t nn_polya_gamma_draw(const PolyaGammaDraws *call) {
    const int64_t parts = std::max<int64_t>(1, std::min(call->num_threads, call->num_entries));
    const int64_t each = (call->num_entries + parts - 1) / parts;
    std::vector<std::thread> threads;
    int64_t start = 0;
    try {
        for (; start + each < call->num_entries; start += each) {
            threads.reserve(parts);
            threads.emplace_back(draw_entries, std::cref(*call), start, start + each);
        }
    } catch (const std::bad_alloc &) { // this thread does the rest
    } catch (const std::system_error &) {
    }
    draw_entries(*call, start, call->num_entries);
    for (auto &thread : threads) thread.join();
    return 0;
}
}
