// Steps of circles, spheres and flat space in one pass over memory, steps of small orthogonal matrices in the
// cache and of large ones between their products, and a counter-based source of normal numbers.
//
// Everything works on small blocks that stay in the first cache: each letter of a scheme is a plain loop
// over a block, which the compiler turns into vector instructions. Loaded by ctypes; no Python inside.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

// A weight that is driven into its bound has a slack that shrinks for ever, and numbers too small for the
// normal format are ten times slower: they count as 0 while this lives.
class FlushTiny {
#ifdef __SSE2__
   public:
    FlushTiny() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040u); }
    ~FlushTiny() { _mm_setcsr(before); }

   private:
    const unsigned before;
#endif
};

constexpr int64_t BLOCK = 512;  // weights that go through a word together
constexpr int64_t CHUNK = 128;  // of them, those for which memory is asked for at a time
constexpr int64_t PER_THREAD = 1 << 16;  // numbers below which a second thread costs more than it brings

int team(int64_t numbers, int32_t threads) {
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, numbers / PER_THREAD)));
}

constexpr int64_t LINE = 16;  // numbers in a line of the cache
constexpr int LETTERS = 16;
constexpr float RIGHT = 5e-7f;  // a relative error of squared lengths that may stay: about four roundings

// The same in loader.py.
struct Word {  // letter k has the numbers x[k], and y[k] for its noise, if it has any
    int32_t count;
    char letters[LETTERS];
    float x[LETTERS], y[LETTERS];
    uint8_t noisy[LETTERS];
    float radius, sign, decay;  // the force is sign * g + decay * q at the start of the step
    float within;               // relative: weights that fit their manifold less well are left alone
};

struct Job {  // a tensor to move: rows of n weights; xi, eta: their slack and its momentum, or null
    int64_t streams, rows, n;
    float *q, *v, *xi, *eta;
    const float* g;
    const int64_t* keys;  // two words for each stream of noise, or null
};

struct Leap {  // a step of orthogonal matrices, Q^T Q = I / per
    float h, a, b, c;        // of the drift, and of the kick v <- a v + b g + c q before it
    float enough, rounding;  // where the iteration ends
    float per, large;        // and the square of the norm from which M counts as large
    int32_t iterations;
};

struct Span {
    int64_t n;
    const float* x;
};

// ------------------------------------------------------------------ elementary functions
// Single precision is enough for normal numbers and for angles; the errors are below 1e-7.

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline uint32_t magnitude(float x) { return as_bits(x) & 0x7fffffffu; }  // ordered as |x|, and NaN on top

// sin and cos of |t| <= pi/4 (polynomials of the Cephes library).
inline void sincos_octant(float t, float& s, float& c) {
    const float z = t * t;
    s = t + t * z * (-1.6666654611e-1f + z * (8.3321608736e-3f - z * 1.9515295891e-4f));
    c = 1.0f - 0.5f * z +
        z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
}

// The same for |t| <= 1/16, by their series: the terms left out are below 1e-10.
inline void sincos_small(float t, float& s, float& c) {
    const float z = t * t;
    s = t + t * z * (-1.6666666667e-1f + z * 8.3333333333e-3f);
    c = 1.0f + z * (-0.5f + z * 4.1666666667e-2f);
}

// sin and cos of any angle: the nearest multiple of pi/2 is taken off in three parts.
inline void sincos(float a, float& s, float& c) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float shifted = a * 0.636619772367581343f + magic;
    const float n = shifted - magic;
    const uint32_t quadrant = as_bits(shifted);
    const float t = ((a - n * 1.5703125f) - n * 4.837512969970703125e-4f) - n * 7.54978995489188216e-8f;
    float s0, c0;
    sincos_octant(t, s0, c0);
    const bool swap = quadrant & 1u;
    s = as_float(as_bits(swap ? c0 : s0) ^ ((quadrant & 2u) << 30));
    c = as_float(as_bits(swap ? s0 : c0) ^ (((quadrant + 1u) & 2u) << 30));
}

// The same for angles so large that their last digit is more than a turn.
inline void sincos_exact(float a, float& s, float& c) {
    s = std::sin(a);
    c = std::cos(a);
}

inline float log_unit(float u) {  // natural logarithm of a normal number
    uint32_t bits = as_bits(u);
    const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;  // mantissa near 1
    bits -= static_cast<uint32_t>(exponent) << 23;
    const float m = as_float(bits) - 1.0f, z = m * m, e = static_cast<float>(exponent);
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    return m + (m * z * p - 2.12194440e-4f * e - 0.5f * z) + 0.693359375f * e;
}

// 1 / sqrt(x): a first guess from the exponent, and Newton's steps, each of which doubles the digits:
// products alone, where a root and a division would each keep the vector unit busy for longer.
inline float inverse_root(float x) {
    float y = as_float(0x5f375a86u - (as_bits(x) >> 1));
    for (int k = 0; k < 3; ++k) y *= 1.5f - (0.5f * x * y) * y;
    return y;
}

// The letters before the first drift as one kick v <- a v + b f + c R, f the force (on a circle, xi f).
struct Prefix {
    int32_t length = 0;  // of the letters, the drift included; 0: they cannot be taken in one go
    float a = 1.0f, b = 0.0f, c = 0.0f;
    int32_t noisy = -1;  // the letter that has the noise
};

Prefix prefix_of(const Word& w) {
    Prefix p;
    for (int32_t k = 0; k < w.count; ++k) {
        if (w.letters[k] == 'A') {
            p.length = k + 1;
            return p;
        }
        if (w.letters[k] == 'B') {
            p.b += w.x[k];
        } else if (w.letters[k] == 'O' && !(w.noisy[k] && p.noisy >= 0)) {
            p.a *= w.x[k];
            p.b *= w.x[k];
            p.c = w.noisy[k] ? w.y[k] : p.c * w.x[k];
            if (w.noisy[k]) p.noisy = k;
        } else {
            break;
        }
    }
    return Prefix();
}

// ------------------------------------------------------------------ letters on a block
struct Block {
    float *q, *v, *xi;
    const float *g, *R, *S;
    int64_t n;
};

inline void to_circle(float& q, float& xi, float r) {
    const float scale = r * inverse_root(std::max(q * q + xi * xi, 1.17549435e-38f));
    q *= scale;
    xi *= scale;
}

// Whether the pairs of a block are on their circles: if not, somebody has changed the weights.
bool on_circles(const Block& b, float r, float within) {
    const float *__restrict q = b.q, *__restrict xi = b.xi;
    const float per = 1.0f / (r * r);
    uint32_t top = 0;  // integers are ordered as the numbers, and NaN on top
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < b.n; ++i) top = std::max(top, magnitude((q[i] * q[i] + xi[i] * xi[i]) * per - 1.0f));
    return top <= as_bits(within);
}

float largest(const float* __restrict v, int64_t n) {
    float top = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; ++i) top = std::fabs(v[i]) > top ? std::fabs(v[i]) : top;
    return top;
}

// Ask for a chunk of the next block while this one is computed: what else waits for memory in the first letter
// of every block. (To ask for memory that is not there does no harm.)
inline void fetch_next(const Block& b, int64_t from) {
#ifdef __GNUC__
    for (int64_t i = from + BLOCK; i < from + BLOCK + CHUNK; i += 16) {
        __builtin_prefetch(b.v + i, 1);
        __builtin_prefetch(b.q + i, 1);
        __builtin_prefetch(b.xi + i, 1);
        __builtin_prefetch(b.g + i, 0);
    }
#endif
}

// The pairs (q, xi) by the angles h v. Steps of training turn by less than an octant, almost always. A rotation
// keeps the length but for rounding, so one of Newton's steps from 1/r puts it right.
// The velocities are b.v, or, if `STORE`, those of w, which are written to b.v. Lengths that are right to a few
// roundings may be left for the next time (`RIGHT`).
template <bool STORE, bool RIGHT, void (*SINCOS)(float, float&, float&)>
void rotate(const Block& b, const float* __restrict w, float h, float r) {
    float *__restrict q = b.q, *__restrict xi = b.xi, *__restrict v = b.v;
    const float per = 0.5f / (r * r);
    for (int64_t from = 0; from < b.n; from += CHUNK) {
        const int64_t to = std::min(from + CHUNK, b.n);
        fetch_next(b, from);
#pragma omp simd
        for (int64_t i = from; i < to; ++i) {
            float s, c;
            const float velocity = STORE ? w[i] : v[i];
            SINCOS(h * velocity, s, c);
            if (STORE) v[i] = velocity;
            const float new_q = c * q[i] - s * xi[i], new_xi = c * xi[i] + s * q[i];
            const float scale = RIGHT ? 1.0f : 1.5f - (new_q * new_q + new_xi * new_xi) * per;
            q[i] = new_q * scale;
            xi[i] = new_xi * scale;
        }
    }
}

template <bool STORE>
void turn(const Block& b, const float* w, float largest_velocity, bool right, float h, float r) {
    const float angle = largest_velocity * std::fabs(h);
    if (angle < 0.0625f && right)
        rotate<STORE, true, sincos_small>(b, w, h, r);
    else if (angle < 0.0625f)
        rotate<STORE, false, sincos_small>(b, w, h, r);
    else if (angle < 0.785f)
        rotate<STORE, false, sincos_octant>(b, w, h, r);
    else if (angle < 1e4f)
        rotate<STORE, false, sincos>(b, w, h, r);
    else
        rotate<STORE, false, sincos_exact>(b, w, h, r);
}

// Kick and turn in two passes, the first of which writes to `room` alone: if the weights are not on their circles,
// the block is left as it is.
template <bool NOISE>
bool kick_and_turn(const Block& b, const Prefix& p, float h, float r, float within, float* __restrict room) {
    const float *__restrict q = b.q, *__restrict v = b.v, *__restrict xi = b.xi;
    const float *__restrict g = b.g, *__restrict R = b.R;
    const float per = 1.0f / (r * r);
    float top = 0.0f;
    uint32_t off = 0;
#pragma omp simd reduction(max : top, off)
    for (int64_t i = 0; i < b.n; ++i) {
        float w = p.a * v[i] + p.b * (xi[i] * g[i]);
        if (NOISE) w += p.c * R[i];
        room[i] = w;
        top = std::fabs(w) > top ? std::fabs(w) : top;
        off = std::max(off, magnitude((q[i] * q[i] + xi[i] * xi[i]) * per - 1.0f));
    }
    if (!(off <= as_bits(within))) return false;
    turn<true>(b, room, top, off < as_bits(RIGHT), h, r);
    return true;
}

template <bool CIRCLE>
void letter(char name, const Block& b, float x, float y, float r) {
    float *__restrict q = b.q, *__restrict v = b.v, *__restrict xi = b.xi;
    const float *__restrict g = b.g, *__restrict R = b.R, *__restrict S = b.S;
    const int64_t n = b.n;
    switch (name) {
        case 'A':
            if (CIRCLE) {
                turn<false>(b, nullptr, largest(v, n), false, x, r);
            } else {
                for (int64_t i = 0; i < n; ++i) q[i] -= x * v[i];
            }
            break;
        case 'B':
            if (CIRCLE) {
                for (int64_t i = 0; i < n; ++i) v[i] += x * (xi[i] * g[i]);
            } else {
                for (int64_t i = 0; i < n; ++i) v[i] += x * g[i];
            }
            break;
        case 'O':
            if (R) {
                for (int64_t i = 0; i < n; ++i) v[i] = x * v[i] + y * R[i];
            } else {
                for (int64_t i = 0; i < n; ++i) v[i] *= x;
            }
            break;
        default:  // EM
            if (CIRCLE) {
                for (int64_t i = 0; i < n; ++i) {
                    float new_q = q[i] - x * g[i], new_xi = xi[i];
                    if (R) {
                        new_q += y * R[i];
                        new_xi += y * S[i];
                    }
                    to_circle(new_q, new_xi, r);
                    q[i] = new_q;
                    xi[i] = new_xi;
                }
            } else if (R) {
                for (int64_t i = 0; i < n; ++i) q[i] += y * R[i] - x * g[i];
            } else {
                for (int64_t i = 0; i < n; ++i) q[i] -= x * g[i];
            }
    }
}

// ------------------------------------------------------------------ letters on a row of a sphere
struct Row {
    float *q, *v, *xi, *eta;  // xi and eta: the slack of the row, or null
    const float *g, *R, *S;
    int64_t n;
};

// Sums over a row, in pieces: single precision would lose digits in long ones.
template <class Body>
inline double over_row(int64_t n, Body body) {
    constexpr int64_t PIECE = 2048;
    double total = 0.0;
    for (int64_t from = 0; from < n; from += PIECE) total += body(from, std::min(from + PIECE, n));
    return total;
}

// |q|^2 + xi^2.
double length2_of(const Row& row) {
    const float* __restrict q = row.q;
    const double slack = row.xi ? *row.xi : 0.0;
    return slack * slack + over_row(row.n, [q](int64_t from, int64_t to) {
               float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
               for (int64_t i = from; i < to; ++i) sum += q[i] * q[i];
               return sum;
           });
}

// A row of this length, with its slack, scaled to length r.
void scale_row(const Row& row, double length2, float r) {
    float* __restrict q = row.q;
    const float scale = static_cast<float>(r / std::sqrt(std::max(length2, 1.17549435e-38)));
    for (int64_t i = 0; i < row.n; ++i) q[i] *= scale;
    if (row.xi) *row.xi *= scale;
}

// Whether a row is on its sphere: if not, somebody has changed the weights.
bool on_sphere(const Row& row, double r, double within) {
    return std::fabs(length2_of(row) / (r * r) - 1.0) <= within;
}

// A great circle along the tangent part w - a q of the momentum w: q' = keep_q q - from_w w, and
// w' = keep_w w + from_q q.
struct Circle {
    double keep_q, from_w, keep_w, from_q;

    Circle(double length2, double speed2, double dot, double h) {
        const double a = dot / length2;
        const double tangent2 = std::max(0.0, speed2 - a * a * length2);
        const double angle = h * std::sqrt(tangent2 / length2);
        keep_w = std::cos(angle);
        from_w = angle > 1e-8 ? h * std::sin(angle) / angle : h;
        keep_q = keep_w + from_w * a;
        from_q = from_w * tangent2 / length2 - keep_w * a;
    }
};

void turn_row(const Row& row, float h, float r) {
    float *__restrict q = row.q, *__restrict w = row.v;
    const double length2 = static_cast<double>(r) * r;
    double speed2 = 0.0, dot = 0.0;
    if (row.xi) {
        const double xi = *row.xi, eta = *row.eta;
        speed2 = eta * eta;
        dot = xi * eta;
    }
    speed2 += over_row(row.n, [q, w, &dot](int64_t from, int64_t to) {
        float square = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : square, product)
        for (int64_t i = from; i < to; ++i) {
            square += w[i] * w[i];
            product += q[i] * w[i];
        }
        dot += product;
        return square;
    });
    const Circle c(length2, speed2, dot, h);
    const float keep_q = static_cast<float>(c.keep_q), from_w = static_cast<float>(c.from_w);
    const float keep_w = static_cast<float>(c.keep_w), from_q = static_cast<float>(c.from_q);
    double new_length2 = over_row(row.n, [=](int64_t from, int64_t to) {
        float square = 0.0f;
#pragma omp simd reduction(+ : square)
        for (int64_t i = from; i < to; ++i) {
            const float old_q = q[i], old_w = w[i];
            const float new_q = keep_q * old_q - from_w * old_w;
            q[i] = new_q;
            w[i] = keep_w * old_w + from_q * old_q;
            square += new_q * new_q;
        }
        return square;
    });
    if (row.xi) {
        const float old_q = *row.xi, old_w = *row.eta;
        *row.xi = keep_q * old_q - from_w * old_w;
        *row.eta = keep_w * old_w + from_q * old_q;
        new_length2 += static_cast<double>(*row.xi) * *row.xi;
    }
    scale_row(row, new_length2, r);
}

// Kick and turn in two passes, the first of which writes to `room` alone: a row that is not on its sphere is left as
// it is. The great circle through q keeps |q|; the factor that puts |q| right goes into its coefficients.
template <bool NOISE>
bool kick_and_turn(const Row& row, const Prefix& p, float h, float r, double within, float* __restrict room) {
    float *__restrict q = row.q, *__restrict v = row.v;
    const float *__restrict g = row.g, *__restrict R = row.R;
    double speed2 = 0.0, dot = 0.0;
    double length2 = over_row(row.n, [=, &speed2, &dot](int64_t from, int64_t to) {
        float length = 0.0f, square = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : length, square, product)
        for (int64_t i = from; i < to; ++i) {
            float w = p.a * v[i] + p.b * g[i];
            if (NOISE) w += p.c * R[i];
            room[i] = w;
            length += q[i] * q[i];
            square += w * w;
            product += q[i] * w;
        }
        speed2 += square;
        dot += product;
        return length;
    });
    const double xi = row.xi ? *row.xi : 0.0;
    const double eta = row.xi ? p.a * *row.eta + (row.S ? p.c * *row.S : 0.0f) : 0.0;
    length2 += xi * xi;
    speed2 += eta * eta;
    dot += xi * eta;
    if (!(std::fabs(length2 / (static_cast<double>(r) * r) - 1.0) <= within)) return false;
    const Circle c(length2, speed2, dot, h);
    const double scale = r / std::sqrt(length2);
    const float keep_q = static_cast<float>(scale * c.keep_q), from_w = static_cast<float>(scale * c.from_w);
    const float keep_w = static_cast<float>(c.keep_w), from_q = static_cast<float>(c.from_q);
#pragma omp simd
    for (int64_t i = 0; i < row.n; ++i) {
        const float old_q = q[i], w = room[i];
        q[i] = keep_q * old_q - from_w * w;
        v[i] = keep_w * w + from_q * old_q;
    }
    if (row.xi) {
        *row.xi = static_cast<float>(scale * (c.keep_q * xi - c.from_w * eta));
        *row.eta = static_cast<float>(c.keep_w * eta + c.from_q * xi);
    }
    // A radial part as long as q cancels in q', and leaves its rounding errors behind.
    if (!(std::fabs(c.keep_q - c.keep_w) < 1.0)) scale_row(row, length2_of(row), r);
    return true;
}

void letter(char name, const Row& row, float x, float y, float r) {
    float *__restrict q = row.q, *__restrict v = row.v;
    const float *__restrict g = row.g, *__restrict R = row.R;
    const int64_t n = row.n;
    switch (name) {
        case 'A':
            turn_row(row, x, r);
            break;
        case 'B':
            for (int64_t i = 0; i < n; ++i) v[i] += x * g[i];
            break;
        case 'O':
            for (int64_t i = 0; i < n; ++i) v[i] = R ? x * v[i] + y * R[i] : x * v[i];
            if (row.eta) *row.eta = x * *row.eta + (row.S ? y * *row.S : 0.0f);
            break;
        default:  // EM
            for (int64_t i = 0; i < n; ++i) q[i] += R ? y * R[i] - x * g[i] : -x * g[i];
            if (row.xi && row.S) *row.xi += y * *row.S;
            scale_row(row, length2_of(row), r);
    }
}

// ------------------------------------------------------------------ square matrices in tiles
constexpr int64_t TILE = 32;

// The tile of A^T that begins at row i, column j: a matrix read across its rows is slow, a tile is not.
inline void transposed(const float* A, int64_t s, int64_t i, int64_t j, int64_t rows, int64_t columns,
                       float (&out)[TILE][TILE]) {
    const float* corner = A + j * s + i;
#ifdef __SSE2__
    if (rows == TILE && columns == TILE) {
        for (int64_t b = 0; b < TILE; b += 4)
            for (int64_t a = 0; a < TILE; a += 4) {
                const float* from = corner + b * s + a;
                __m128 r0 = _mm_loadu_ps(from), r1 = _mm_loadu_ps(from + s);
                __m128 r2 = _mm_loadu_ps(from + 2 * s), r3 = _mm_loadu_ps(from + 3 * s);
                _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
                _mm_store_ps(&out[a][b], r0);
                _mm_store_ps(&out[a + 1][b], r1);
                _mm_store_ps(&out[a + 2][b], r2);
                _mm_store_ps(&out[a + 3][b], r3);
            }
        return;
    }
#endif
    for (int64_t b = 0; b < columns; ++b)
        for (int64_t a = 0; a < rows; ++a) out[a][b] = corner[b * s + a];
}

// Apply body(row, column, count, the transposed numbers) to the rows of all tiles of a strip of a matrix; inner
// loops of a length the compiler knows are the fast ones.
template <class Body>
inline void over_strip(const float* A, int64_t s, int64_t i, Body body) {
    alignas(64) float other[TILE][TILE];
    const int64_t rows = std::min(TILE, s - i);
    for (int64_t j = 0; j < s; j += TILE) {
        const int64_t columns = std::min(TILE, s - j);
        transposed(A, s, i, j, rows, columns, other);
        for (int64_t a = 0; a < rows; ++a) {
            if (columns == TILE)
                body(i + a, j, TILE, other[a]);
            else
                body(i + a, j, columns, other[a]);
        }
    }
}

// The largest sum of a column, from sums over the strips of a matrix (which are overwritten).
inline float largest_column(float* sums, int64_t strips, int64_t s) {
    for (int64_t strip = 1; strip < strips; ++strip)
        for (int64_t j = 0; j < s; ++j) sums[j] += sums[strip * s + j];
    return *std::max_element(sums, sums + s);
}

enum : uint8_t { GOING = 0, DONE = 1, LARGE = 2, LOST = 3 };  // the state of the iteration of a matrix

// The start of the iteration in the strip of a matrix from row i: from C = per Q^T B, of which Q^T B is given,
// M = (C + C^T) / 2 - I and D = C - M/2. To `squares`, one for every column, those of K + M are added, where K = I - C.
inline void begin_strip(int64_t s, int64_t i, float per, const float* C, float* M, float* D, float* squares) {
    over_strip(C, s, i, [=](int64_t row, int64_t column, int64_t n, const float* __restrict other) {
        const int64_t here = row * s + column;
        const float* __restrict c = C + here;
        float *__restrict m = M + here, *__restrict d = D + here, *__restrict square = squares + column;
#pragma omp simd
        for (int64_t b = 0; b < n; ++b) {
            m[b] = 0.5f * per * (c[b] + other[b]);
            d[b] = per * c[b] - 0.5f * m[b];
            const float e = m[b] - per * c[b];  // on the diagonal, too: both are less by 1
            square[b] += e * e;
        }
        if (column <= row && row < column + n) {
            m[row - column] -= 1.0f;
            d[row - column] += 0.5f;
        }
    });
}

struct Found {
    uint32_t top = 0;   // the largest |F|, as an integer
    float size = 0.0f;  // |M|^2
};

// One update of the iteration in a strip, from the residual F = G - T - T^T: M += F/2, D -= F/4. To `squares` those
// of F are added.
inline Found update_strip(int64_t s, int64_t i, const float* G, const float* T, float* M, float* D, float* squares) {
    alignas(64) uint32_t highest[TILE] = {};
    alignas(64) float sizes[TILE] = {};
    over_strip(T, s, i, [=, &highest, &sizes](int64_t row, int64_t column, int64_t n, const float* __restrict other) {
        const int64_t here = row * s + column;
        const float *__restrict g = G + here, *__restrict t = T + here;
        float *__restrict m = M + here, *__restrict d = D + here, *__restrict square = squares + column;
#pragma omp simd
        for (int64_t b = 0; b < n; ++b) {
            const float f = g[b] - t[b] - other[b];
            m[b] += 0.5f * f;
            d[b] -= 0.25f * f;
            square[b] += f * f;
            highest[b] = std::max(highest[b], magnitude(f));
            sizes[b] += m[b] * m[b];
        }
    });
    return {*std::max_element(highest, highest + TILE), std::accumulate(sizes, sizes + TILE, 0.0f)};
}

// The state of a matrix after an update. It is done (its M may be large) when max |F| <= enough, or when the next
// residual is sure to be within `rounding`: it is ((K + M)^T F + F (K + M)) / 2 + F^2 / 4, so no entry exceeds
// x y + y^2 / 4 for the largest norms x and y of columns of K + M and of F. It is lost when F is far beyond that.
inline uint8_t judge(const Leap& leap, const Found& found, float y, float& x) {
    const bool within = x * y + 0.25f * y * y <= leap.rounding;
    x += 0.5f * y;
    if (found.top >= as_bits(1e3f)) return LOST;
    if (found.top > as_bits(leap.enough) && !within) return GOING;
    return found.size < leap.large ? DONE : LARGE;
}

// ------------------------------------------------------------------ small matrices: a whole step in the cache
#if defined(__AVX512F__)
constexpr int64_t LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, ROWS = 4;
#else
constexpr int64_t LANES = 4, ROWS = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ROWS rows and VECTORS * LANES columns of C = A B, where A[i, k] = A[i * by_row + k * by_column].
template <int64_t VECTORS>
inline void multiply_block(int64_t inner, int64_t columns, const float* a, int64_t by_row, int64_t by_column,
                           const float* b, float* c) {
    Lanes sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < inner; ++k, a += by_column, b += columns) {
        Lanes row[VECTORS];
#pragma GCC unroll 2
        for (int64_t n = 0; n < VECTORS; ++n) row[n] = *reinterpret_cast<const Lanes*>(b + n * LANES);
#pragma GCC unroll 8
        for (int64_t m = 0; m < ROWS; ++m) {
            const float factor = a[m * by_row];
#pragma GCC unroll 2
            for (int64_t n = 0; n < VECTORS; ++n) sums[m][n] += factor * row[n];
        }
    }
#pragma GCC unroll 8
    for (int64_t m = 0; m < ROWS; ++m)
#pragma GCC unroll 2
        for (int64_t n = 0; n < VECTORS; ++n)
            *reinterpret_cast<Lanes*>(c + m * columns + n * LANES) = sums[m][n];
}

// C = A B; rows is a multiple of ROWS, columns of LANES. Of a symmetric C only what is above the diagonal is sure to be
// there.
void multiply(int64_t rows, int64_t inner, int64_t columns, const float* A, int64_t by_row, int64_t by_column,
              const float* B, float* C, bool symmetric = false) {
    for (int64_t j = 0; j < columns; j += 2 * LANES)
        for (int64_t i = 0; i < (symmetric ? std::min(rows, j + 2 * LANES) : rows); i += ROWS) {
            const float* a = A + i * by_row;
            float* c = C + i * columns + j;
            if (columns - j >= 2 * LANES)
                multiply_block<2>(inner, columns, a, by_row, by_column, B + j, c);
            else
                multiply_block<1>(inner, columns, a, by_row, by_column, B + j, c);
        }
}

// out = A^T; their rows are `from` and `to` numbers apart.
void transpose(const float* A, int64_t rows, int64_t columns, int64_t from, float* out, int64_t to) {
    int64_t i = 0;
#ifdef __SSE2__
    for (; i + 4 <= rows; i += 4) {
        int64_t j = 0;
        for (; j + 4 <= columns; j += 4) {
            const float* corner = A + i * from + j;
            __m128 r0 = _mm_loadu_ps(corner), r1 = _mm_loadu_ps(corner + from);
            __m128 r2 = _mm_loadu_ps(corner + 2 * from), r3 = _mm_loadu_ps(corner + 3 * from);
            _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
            float* target = out + j * to + i;
            _mm_storeu_ps(target, r0);
            _mm_storeu_ps(target + to, r1);
            _mm_storeu_ps(target + 2 * to, r2);
            _mm_storeu_ps(target + 3 * to, r3);
        }
        for (; j < columns; ++j)
            for (int64_t k = i; k < i + 4; ++k) out[j * to + k] = A[k * from + j];
    }
#endif
    for (; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) out[j * to + i] = A[i * from + j];
}

// From the strip of G = B^T B that begins at row i, and the rest of its columns: G <- per (G + G^T) / 2 - I. A product
// need not be symmetric to the last bit, and what is not would end up in the momenta, divided by h.
void finish_gram(int64_t s, int64_t i, float per, float* G) {
    alignas(64) float mean[TILE][TILE];
    const int64_t rows = std::min(TILE, s - i);
    for (int64_t j = i; j < s; j += TILE) {
        const int64_t columns = std::min(TILE, s - j);
        transposed(G, s, i, j, rows, columns, mean);
        for (int64_t a = 0; a < rows; ++a) {
            float *__restrict g = G + (i + a) * s + j, *__restrict m = mean[a];
#pragma omp simd
            for (int64_t b = 0; b < columns; ++b) m[b] = 0.5f * per * (g[b] + m[b]);
            if (i == j) m[a] -= 1.0f;
            std::copy_n(m, columns, g);
        }
        if (i != j) transpose(mean[0], rows, columns, TILE, G + j * s + i, s);
    }
}

// C = B^T B; columns is a multiple of LANES.
void multiply_with_itself(int64_t inner, int64_t columns, const float* B, float* C) {
    multiply(columns, inner, columns, B, 1, columns, B, C, true);
    for (int64_t j = 0, below = 2 * LANES; below < columns; j = below, below += 2 * LANES)
        transpose(C + j * columns + below, 2 * LANES, columns - below, columns, C + below * columns + j, columns);
}

// ------------------------------------------------------------------ normal numbers (see philox.py)
constexpr int64_t TILE64 = 64, WIDTH = 16;

// Words of 32 bits in the lower halves of 64: a product needs nothing but them, so whatever the upper halves hold
// does not matter, and nothing has to be shuffled.
#if defined(__AVX512F__)
constexpr int64_t HALVES = 8;
#elif defined(__AVX2__)
constexpr int64_t HALVES = 4;
#else
constexpr int64_t HALVES = 2;
#endif
typedef uint64_t Halves __attribute__((vector_size(8 * HALVES)));

inline Halves everywhere(uint64_t value) { return Halves{} + value; }

inline Halves product(Halves a, Halves b) {  // of the lower halves
#if defined(__AVX512F__)
    return (Halves)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Halves)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (Halves)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

constexpr int ROUNDS = 10;

struct Philox {  // Philox4x32-10 with one key
    Halves keys[ROUNDS][2];

    Philox(uint32_t k0, uint32_t k1) {
        for (auto& key : keys) {
            key[0] = everywhere(k0);
            key[1] = everywhere(k1);
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
    }

    void operator()(Halves (&x)[4]) const {
        const Halves m0 = everywhere(0xD2511F53u), m1 = everywhere(0xCD9E8D57u);
#pragma GCC unroll 10
        for (const auto& key : keys) {
            const Halves high = product(x[0], m0), low = product(x[2], m1);
            x[0] = (low >> 32) ^ x[1] ^ key[0];
            x[1] = low;
            x[2] = (high >> 32) ^ x[3] ^ key[1];
            x[3] = high;
        }
    }
};

// The words that come out of the counters first ... first + WIDTH - 1. Those of even and of odd counters are made
// side by side, so that they only have to be laid into each other.
inline void words_of(const Philox& philox, uint32_t first, uint64_t step, uint32_t slot, uint32_t (&out)[4][WIDTH]) {
    Halves evens;
    for (int64_t i = 0; i < HALVES; ++i) evens[i] = static_cast<uint64_t>(2 * i);
    for (int64_t from = 0; from < WIDTH; from += 2 * HALVES) {
        const Halves rest[3] = {everywhere(slot), everywhere(step), everywhere(step >> 32)};
        const Halves here = evens + (static_cast<uint64_t>(first) + static_cast<uint64_t>(from));
        Halves even[4] = {here, rest[0], rest[1], rest[2]};
        Halves odd[4] = {here + 1u, rest[0], rest[1], rest[2]};
        philox(even);
        philox(odd);
        for (int word = 0; word < 4; ++word) {
            const Halves both = (even[word] & 0xffffffffu) | (odd[word] << 32);
            std::memcpy(&out[word][from], &both, sizeof both);
        }
    }
}

// The tiles from, from + 1, ...: Box and Muller's method for the two pairs that come out of every counter.
void fill_tiles(int64_t tiles, float* __restrict out, uint64_t from, uint64_t step, uint32_t slot, uint32_t k0,
                uint32_t k1) {
    const Philox philox(k0, k1);
    for (int64_t tile = 0; tile < tiles; ++tile, out += TILE64) {
        alignas(64) uint32_t x[4][WIDTH];
        words_of(philox, static_cast<uint32_t>((from + static_cast<uint64_t>(tile)) * WIDTH), step, slot, x);
        for (int64_t pair = 0; pair < 4; pair += 2) {
#pragma omp simd
            for (int64_t i = 0; i < WIDTH; ++i) {
                const uint32_t a = x[pair][i], b = x[pair + 1][i];
                const float u = static_cast<float>(static_cast<int32_t>(a >> 8)) * 0x1p-24f + 0x1p-25f;
                const float radius = std::sqrt(-2.0f * log_unit(u));
                // 24 bits for the angle within its octant, three others for which octant it is.
                const float t =
                    (static_cast<float>(static_cast<int32_t>(b) >> 8) + 0.5f) * (0.785398163f * 0x1p-23f);
                float s, c;
                sincos_octant(t, s, c);
                out[pair * WIDTH + i] = radius * as_float(as_bits(b & 1u ? s : c) ^ ((b & 2u) << 30));
                out[(pair + 1) * WIDTH + i] = radius * as_float(as_bits(b & 1u ? c : s) ^ ((b & 4u) << 29));
            }
        }
    }
}

// Elements start ... start + size - 1 of a stream; room for 2 * TILE64 more than that.
const float* normals(int64_t size, float* room, const int64_t* key, int64_t start, uint64_t step, uint32_t slot) {
    const int64_t first = start / TILE64, last = (start + size + TILE64 - 1) / TILE64;
    fill_tiles(last - first, room, static_cast<uint64_t>(first), step, slot, static_cast<uint32_t>(key[0]),
               static_cast<uint32_t>(key[1]));
    return room + start % TILE64;
}

const float* force_of(const Word& w, const float* g, const float* q, int64_t n, float* room) {
    if (w.sign == 1.0f && w.decay == 0.0f) return g;
    for (int64_t i = 0; i < n; ++i) room[i] = w.sign * g[i] + w.decay * q[i];
    return room;
}

}  // namespace

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif
extern "C" {

#ifndef HOLONOMIC_SOURCE
#define HOLONOMIC_SOURCE ""
#endif

// A digest of this file, as it was when it was compiled.
const char* holonomic_source() { return HOLONOMIC_SOURCE; }

// Apply a word to the tensors of some jobs, on circles (if they have slack xi) or in flat space. A tensor is cut into
// blocks, which no number depends on, nor on how many threads there are. A block whose weights are not on their
// circles is left alone; state says which are done, and the number of the others is returned.
int64_t holonomic_step(const Word* word, int64_t count, const Job* jobs, uint64_t step, uint8_t* state,
                       int32_t threads) {
    const Word& w = *word;
    std::vector<int64_t> ends;  // of the blocks of every job
    int64_t blocks = 0, numbers = 0;
    for (const Job* j = jobs; j < jobs + count; ++j) {
        blocks += j->rows * ((j->n + BLOCK - 1) / BLOCK);
        numbers += j->rows * j->n;
        ends.push_back(blocks);
    }
    const Prefix prefix = prefix_of(w);
    int64_t left = 0;
#pragma omp parallel num_threads(team(numbers, threads)) reduction(+ : left)
    {
        const FlushTiny flush;
        alignas(64) float force[BLOCK], R[BLOCK + 2 * TILE64], S[BLOCK + 2 * TILE64], kicked[BLOCK];
        size_t job = 0;
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block) {
            if (state[block]) continue;
            while (block >= ends[job]) ++job;
            const Job& j = jobs[job];
            const int64_t per_row = (j.n + BLOCK - 1) / BLOCK, here = block - (job ? ends[job - 1] : 0);
            const int64_t row = here / per_row, start = here % per_row * BLOCK;
            const int64_t size = std::min(BLOCK, j.n - start), at = row * j.n + start;
            Block b{j.q + at, j.v ? j.v + at : nullptr, j.xi ? j.xi + at : nullptr, nullptr, nullptr, nullptr, size};
            const int64_t* key = j.keys + 2 * row;
            b.g = force_of(w, j.g + at, b.q, size, force);
            bool fits = true;
            int32_t k = 0;
            if (j.xi && prefix.length) {
                const float h = w.x[prefix.length - 1];
                const uint32_t slot = 2 * static_cast<uint32_t>(prefix.noisy);
                if (prefix.noisy >= 0) b.R = normals(size, R, key, start, step, slot);
                fits = prefix.noisy >= 0 ? kick_and_turn<true>(b, prefix, h, w.radius, w.within, kicked)
                                         : kick_and_turn<false>(b, prefix, h, w.radius, w.within, kicked);
                k = prefix.length;
            } else if (j.xi) {
                fits = on_circles(b, w.radius, w.within);
            }
            if (!fits) {
                ++left;
                continue;
            }
            for (; k < w.count; ++k) {
                const bool noisy = w.noisy[k];
                const uint32_t slot = 2 * static_cast<uint32_t>(k);
                b.R = noisy ? normals(size, R, key, start, step, slot) : nullptr;
                b.S = noisy && j.xi && w.letters[k] == 'E' ? normals(size, S, key, start, step, slot + 1) : nullptr;
                if (j.xi)
                    letter<true>(w.letters[k], b, w.x[k], w.y[k], w.radius);
                else
                    letter<false>(w.letters[k], b, w.x[k], w.y[k], w.radius);
            }
            state[block] = 1;
        }
    }
    return left;
}

// The same for rows on spheres; xi, eta (null: no slack) have one entry per row, and so has state.
int64_t holonomic_sphere_step(const Word* word, int64_t count, const Job* jobs, uint64_t step, uint8_t* state,
                              int32_t threads) {
    const Word& w = *word;
    const Prefix prefix = prefix_of(w);
    int64_t left = 0;
    for (const Job* job = jobs; job < jobs + count; ++job) {
        const Job& j = *job;
        // Rows that take their noise from one stretch of a stream.
        const int64_t of_stream = j.streams ? j.rows / j.streams : 1;
        const int64_t chunk = std::max<int64_t>(1, std::min(of_stream, 4 * BLOCK / std::max<int64_t>(j.n, 1)));
        const int64_t per_stream = (of_stream + chunk - 1) / chunk;
        const int64_t for_R = chunk * j.n + 2 * TILE64, for_S = j.xi ? chunk + 2 * TILE64 : 0;
        const int64_t noisy = w.count - std::count(w.noisy, w.noisy + w.count, 0);
#pragma omp parallel num_threads(team(j.rows * j.n, threads)) reduction(+ : left)
        {
            const FlushTiny flush;
            const std::unique_ptr<float[]> room(new float[static_cast<size_t>(2 * j.n + noisy * (for_R + for_S))]);
            float *const force = room.get(), *const kicked = force + j.n, *const noise = kicked + j.n;
            const float *r[LETTERS] = {}, *s[LETTERS] = {};
#pragma omp for schedule(static)
            for (int64_t part = 0; part < j.streams * per_stream; ++part) {
                const int64_t stream = part / per_stream, from = part % per_stream * chunk;
                const int64_t rows = std::min(chunk, of_stream - from);
                float* next = noise;
                for (int32_t k = 0; k < w.count; ++k) {
                    if (!w.noisy[k]) continue;
                    const int64_t* key = j.keys + 2 * stream;
                    const uint32_t slot = 2 * static_cast<uint32_t>(k);
                    r[k] = normals(rows * j.n, std::exchange(next, next + for_R), key, from * j.n, step, slot);
                    if (j.xi) s[k] = normals(rows, std::exchange(next, next + for_S), key, from, step, slot + 1);
                }
                for (int64_t i = 0; i < rows; ++i) {
                    const int64_t row = stream * of_stream + from + i, at = row * j.n;
                    if (state[row]) continue;
                    Row here{j.q + at, j.v ? j.v + at : nullptr, j.xi ? j.xi + row : nullptr,
                             j.eta ? j.eta + row : nullptr, nullptr, nullptr, nullptr, j.n};
                    here.g = force_of(w, j.g + at, here.q, j.n, force);
                    bool fits;
                    int32_t k = 0;
                    if (prefix.length) {
                        const float h = w.x[prefix.length - 1];
                        const int32_t o = prefix.noisy;
                        here.R = o >= 0 ? r[o] + i * j.n : nullptr;
                        here.S = o >= 0 && j.xi ? s[o] + i : nullptr;
                        fits = o >= 0 ? kick_and_turn<true>(here, prefix, h, w.radius, w.within, kicked)
                                      : kick_and_turn<false>(here, prefix, h, w.radius, w.within, kicked);
                        k = prefix.length;
                    } else {
                        fits = on_sphere(here, w.radius, w.within);
                    }
                    if (!fits) {
                        ++left;
                        continue;
                    }
                    for (; k < w.count; ++k) {
                        here.R = r[k] ? r[k] + i * j.n : nullptr;
                        here.S = s[k] ? s[k] + i : nullptr;
                        letter(w.letters[k], here, w.x[k], w.y[k], w.radius);
                    }
                    state[row] = 1;
                }
            }
        }
        state += j.rows;
    }
    return left;
}

// Whether all numbers of some tensors are finite.
int32_t holonomic_finite(int64_t count, const Span* spans, int32_t threads) {
    for (const Span* span = spans; span < spans + count; ++span) {
        const float* __restrict x = span->x;
        const int64_t n = span->n;
        uint32_t top = 0;
#pragma omp parallel for simd schedule(static) reduction(max : top) num_threads(team(n, threads))
        for (int64_t i = 0; i < n; ++i) top = std::max(top, magnitude(x[i]));
        if (top >= 0x7f800000u) return 0;
    }
    return 1;
}

// Whether |Q z|^2 (of a matrix that is not tall |z Q|^2) is `expected` to a relative `within`, for all of some matrices: if not,
// somebody has changed the weights.
int32_t holonomic_orthogonal_near(int64_t count, int64_t rows, int64_t columns, const float* const* q,
                                  const float* z, double expected, double within, int32_t threads) {
    int32_t off = 0;
#pragma omp parallel for schedule(static) reduction(+ : off) num_threads(team(count * rows * columns, threads))
    for (int64_t k = 0; k < count; ++k) {
        const float* __restrict Q = q[k];
        double size = 0.0;
        if (rows > columns) {  // a square one either way
            for (int64_t i = 0; i < rows; ++i) {
                float y = 0.0f;
#pragma omp simd reduction(+ : y)
                for (int64_t j = 0; j < columns; ++j) y += Q[i * columns + j] * z[j];
                size += static_cast<double>(y) * y;
            }
        } else {
            for (int64_t from = 0; from < columns; from += BLOCK) {
                alignas(64) float y[BLOCK] = {};
                const int64_t n = std::min(BLOCK, columns - from);
                for (int64_t i = 0; i < rows; ++i) {
                    const float* __restrict row = Q + i * columns + from;
                    const float factor = z[i];
#pragma omp simd
                    for (int64_t j = 0; j < n; ++j) y[j] += factor * row[j];
                }
                for (int64_t j = 0; j < n; ++j) size += static_cast<double>(y[j]) * y[j];
            }
        }
        off += !(std::fabs(size / expected - 1.0) <= within);
    }
    return off == 0;
}

// The kick v <- a v + b g + c q (g may be null) and B = q - h v, for n numbers.
void holonomic_orthogonal_kick(int64_t n, const Leap* leap, const float* q, float* v, const float* g, float* B,
                               int32_t threads) {
    const Leap l = *leap;
#pragma omp parallel num_threads(team(n, threads))
    {
        const FlushTiny flush;
#pragma omp for simd schedule(static)
        for (int64_t i = 0; i < n; ++i) {
            if (g) v[i] = l.a * v[i] + l.b * g[i] + l.c * q[i];
            B[i] = q[i] - l.h * v[i];
        }
    }
}

// The start of the iteration for `count` matrices s x s, from Q^T B and B^T B in C and G; and of every matrix the
// largest norm of a column of K + M.
void holonomic_orthogonal_begin(int64_t count, int64_t s, const Leap* leap, const float* C, float* G, float* M,
                                float* D, float* norms, int32_t threads) {
    const int64_t tiles = (s + TILE - 1) / TILE;
    const float per = leap->per;
    std::vector<float> squares(static_cast<size_t>(count * tiles * s));
#pragma omp parallel for schedule(static) num_threads(team(count * s * s, threads))
    for (int64_t strip = 0; strip < count * tiles; ++strip) {
        const int64_t at = strip / tiles * s * s, i = strip % tiles * TILE;
        finish_gram(s, i, per, G + at);
        begin_strip(s, i, per, C + at, M + at, D + at, squares.data() + strip * s);
    }
    for (int64_t k = 0; k < count; ++k)
        norms[k] = std::sqrt(largest_column(squares.data() + k * tiles * s, tiles, s));
}

// One update of the iteration for those that are to go on; returns how many are to go on after it.
int64_t holonomic_orthogonal_update(int64_t count, int64_t s, const Leap* leap, const float* G, const float* T,
                                    float* M, float* D, float* norms, uint8_t* state, int32_t threads) {
    const int64_t tiles = (s + TILE - 1) / TILE;
    std::vector<float> squares(static_cast<size_t>(count * tiles * s));
    std::vector<Found> found(static_cast<size_t>(count * tiles));
#pragma omp parallel for schedule(static) num_threads(team(count * s * s, threads))
    for (int64_t strip = 0; strip < count * tiles; ++strip) {
        if (state[strip / tiles] != GOING) continue;
        const int64_t at = strip / tiles * s * s;
        found[static_cast<size_t>(strip)] = update_strip(s, strip % tiles * TILE, G + at, T + at, M + at, D + at,
                                                         squares.data() + strip * s);
    }
    int64_t going = 0;
    for (int64_t k = 0; k < count; ++k) {
        if (state[k] != GOING) continue;
        Found all;
        for (int64_t strip = k * tiles; strip < (k + 1) * tiles; ++strip) {
            all.top = std::max(all.top, found[static_cast<size_t>(strip)].top);
            all.size += found[static_cast<size_t>(strip)].size;
        }
        const float y = std::sqrt(largest_column(squares.data() + k * tiles * s, tiles, s));
        state[k] = judge(*leap, all, y, norms[k]);
        going += state[k] == GOING;
    }
    return going;
}

// The end of the step: q <- q - h v - N and v <- v + N / h, where N is the normal part.
void holonomic_orthogonal_move(int64_t n, float h, float* q, float* v, const float* N, int32_t threads) {
    const float per = 1.0f / h;
#pragma omp parallel for simd schedule(static) num_threads(team(n, threads))
    for (int64_t i = 0; i < n; ++i) {
        q[i] = (q[i] - h * v[i]) - N[i];
        v[i] += per * N[i];
    }
}

// All of a step for many small matrices, one after the other in the cache: the kick v <- a v + b g + c q (g may be
// null), the iteration, and Q <- Q - h W - Q M with its momentum. Matrices whose state is not DONE at the end have not
// been touched.
void holonomic_orthogonal_leap(const Leap* leap, int64_t count, int64_t rows, int64_t columns, float* const* q,
                               float* const* v, const float* const* g, uint8_t* state, int32_t threads) {
    const Leap& l = *leap;
    const bool wide = rows < columns;
    const int64_t r = std::max(rows, columns), s = std::min(rows, columns), n = r * s;
    const int64_t ld = padded(s, LANES), tall = padded(r, ROWS) * ld, small = ld * ld;
    const float per = 1.0f / l.h;
#pragma omp parallel num_threads(team(count * n, threads))
    {
        const FlushTiny flush;
        std::vector<float> room(static_cast<size_t>(4 * tall + 4 * small + ld + LINE));  // zero, beyond the matrices too
        float* at = room.data();
        while (reinterpret_cast<uintptr_t>(at) % (4 * LINE)) ++at;  // vectors that cross lines of the cache are slow
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        float *Q = take(tall), *W = take(tall), *B = take(tall), *N = take(tall);
        float *C = take(small), *G = take(small), *M = take(small), *D = take(small), *squares = take(ld);
        const auto largest_norm = [squares, ld] { return std::sqrt(*std::max_element(squares, squares + ld)); };
#pragma omp for schedule(static)
        for (int64_t k = 0; k < count; ++k) {
            const float *from_q = q[k], *from_v = v[k], *force = g ? g[k] : nullptr;
            const auto gather = [&](float* to, auto number) {
                float* flat = !wide && ld == s ? to : N;
                for (int64_t i = 0; i < n; ++i) flat[i] = number(i);
                if (wide)
                    transpose(flat, s, r, r, to, ld);
                else if (ld != s)
                    for (int64_t i = 0; i < r; ++i) std::copy_n(flat + i * s, s, to + i * ld);
            };
            gather(Q, [=](int64_t i) { return from_q[i]; });
            if (force)
                gather(W, [=, &l](int64_t i) { return l.a * from_v[i] + l.b * force[i] + l.c * from_q[i]; });
            else
                gather(W, [=](int64_t i) { return from_v[i]; });
            for (int64_t i = 0; i < r * ld; ++i) B[i] = Q[i] - l.h * W[i];
            multiply(ld, r, ld, Q, 1, ld, B, C);
            multiply_with_itself(r, ld, B, G);
            if (l.per != 1.0f)
                for (int64_t i = 0; i < s * ld; ++i) {
                    C[i] *= l.per;
                    G[i] *= l.per;
                }
            for (int64_t i = 0; i < s; ++i) G[i * ld + i] -= 1.0f;
            for (int64_t i = s; i < ld; ++i) C[i * ld + i] = 1.0f;  // columns beyond the matrix: M = 0 there
            std::fill_n(squares, ld, 0.0f);
            for (int64_t i = 0; i < ld; i += TILE) begin_strip(ld, i, 1.0f, C, M, D, squares);
            float norm = largest_norm();
            state[k] = GOING;
            for (int32_t round = 0; round < l.iterations && state[k] == GOING; ++round) {
                multiply(ld, s, ld, D, 1, ld, M, C);
                std::fill_n(squares, ld, 0.0f);
                Found all;
                for (int64_t i = 0; i < ld; i += TILE) {
                    const Found here = update_strip(ld, i, G, C, M, D, squares);
                    all = {std::max(all.top, here.top), all.size + here.size};
                }
                state[k] = judge(l, all, largest_norm(), norm);
            }
            if (state[k] != DONE) continue;
            multiply(padded(r, ROWS), s, ld, Q, ld, 1, M, N);
            for (int64_t i = 0; i < r * ld; ++i) {
                Q[i] = B[i] - N[i];
                W[i] += per * N[i];
            }
            const auto scatter = [&](const float* from, float* to) {
                if (wide)
                    transpose(from, r, s, ld, to, r);
                else
                    for (int64_t i = 0; i < r; ++i) std::copy_n(from + i * ld, s, to + i * s);
            };
            scatter(Q, q[k]);
            scatter(W, v[k]);
        }
    }
}

// The four words that come out of every one of the counters block ... block + 15, as they are.
void holonomic_words(uint32_t* out, const int64_t* key, uint32_t block, uint64_t step, uint32_t slot) {
    alignas(64) uint32_t words[4][WIDTH];
    words_of(Philox(static_cast<uint32_t>(key[0]), static_cast<uint32_t>(key[1])), block, step, slot, words);
    std::memcpy(out, words, sizeof words);
}

// Standard normal numbers: row i gets the elements first, first + 1, ... of the stream with the i-th key.
void holonomic_normal(int64_t rows, int64_t n, float* out, const int64_t* keys, int64_t first, uint64_t step,
                      uint32_t slot, int32_t threads) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(team(rows * n, threads))
    for (int64_t block = 0; block < rows * blocks; ++block) {
        alignas(64) float room[BLOCK + 2 * TILE64];
        const int64_t row = block / blocks, start = block % blocks * BLOCK;
        const int64_t size = std::min(BLOCK, n - start);
        const float* made = normals(size, room, keys + 2 * row, first + start, step, slot);
        std::memcpy(out + row * n + start, made, static_cast<size_t>(size) * sizeof(float));
    }
}
}
