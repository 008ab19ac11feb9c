// Steps of circles, spheres and flat space in one pass over memory, steps of small orthogonal matrices in the
// cache and of large ones between their products, and a counter-based source of normal numbers.
//
// Everything works on small blocks that stay in the first cache: each letter of a scheme is a plain loop
// over a block, which the compiler turns into vector instructions. Loaded by ctypes; no Python inside.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#ifdef __SSE2__
#include <xmmintrin.h>
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

constexpr int LETTERS = 16;

// The same in build.py.
struct Word {  // letter k has the numbers x[k], and y[k] for its noise
    int32_t count;
    char letters[LETTERS];
    float x[LETTERS], y[LETTERS];
    float radius, sign, decay;  // the force is sign * g + decay * q at the start of the step
};

struct Job {  // a tensor to move: on circles if it has slack xi
    int64_t n;
    float *q, *v, *xi;
    const float* g;
};

struct Leap {  // a step of orthogonal matrices
    float h, a, b, c;          // of the drift, and of the kick v <- a v + b g + c q before it
    float enough, rounding;    // where the iteration ends
    int32_t iterations, settle;
};

struct Span {
    int64_t n;
    const float* x;
};

struct Stored {  // noise of letter k for weights and slack; null: none
    const float *R[LETTERS], *S[LETTERS];
    int64_t stride;  // from row to row
};

struct Stream {  // the same as numbers of a stream a row; the place is negative: none
    const uint64_t* keys;
    int64_t R[LETTERS], S[LETTERS];
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

// sin and cos of |t| <= pi/4 (polynomials of the Cephes library).
inline void sincos_octant(float t, float& s, float& c) {
    const float z = t * t;
    s = t + t * z * (-1.6666654611e-1f + z * (8.3321608736e-3f - z * 1.9515295891e-4f));
    c = 1.0f - 0.5f * z +
        z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
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
// keeps the length but for rounding, so one of Newton's steps from 1/r puts it right; pairs that were not on
// their circles before (somebody has changed the weights) keep their direction, and are put there after.
template <void (*SINCOS)(float, float&, float&)>
void rotate(const Block& b, float h, float r) {
    float *__restrict q = b.q, *__restrict xi = b.xi;
    const float* __restrict v = b.v;
    const float per = 1.0f / (r * r);
    float top = 0.0f;
    for (int64_t from = 0; from < b.n; from += CHUNK) {
        const int64_t to = std::min(from + CHUNK, b.n);
        fetch_next(b, from);
#pragma omp simd reduction(max : top)
        for (int64_t i = from; i < to; ++i) {
            float s, c;
            SINCOS(h * v[i], s, c);
            const float new_q = c * q[i] - s * xi[i], new_xi = c * xi[i] + s * q[i];
            const float excess = (new_q * new_q + new_xi * new_xi) * per - 1.0f;
            const float scale = std::max(1.0f - 0.5f * excess, 0.125f);
            top = std::fabs(excess) > top ? std::fabs(excess) : top;
            q[i] = new_q * scale;
            xi[i] = new_xi * scale;
        }
    }
    if (top < 1e-4f) return;
    for (int64_t i = 0; i < b.n; ++i)  // those that are right keep their bits
        if (!(std::fabs((q[i] * q[i] + xi[i] * xi[i]) * per - 1.0f) < 1e-6f)) to_circle(q[i], xi[i], r);
}

template <bool CIRCLE>
void letter(char name, const Block& b, float x, float y, float r) {
    float *__restrict q = b.q, *__restrict v = b.v, *__restrict xi = b.xi;
    const float *__restrict g = b.g, *__restrict R = b.R, *__restrict S = b.S;
    const int64_t n = b.n;
    switch (name) {
        case 'A':
            if (CIRCLE) {
                const float angle = largest(v, n) * std::fabs(x);
                if (angle < 0.785f)
                    rotate<sincos_octant>(b, x, r);
                else if (angle < 1e4f)
                    rotate<sincos>(b, x, r);
                else
                    rotate<sincos_exact>(b, x, r);
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

void scale_row(const Row& row, float r) {
    float* __restrict q = row.q;
    float length2 = row.xi ? *row.xi * *row.xi : 0.0f;
#pragma omp simd reduction(+ : length2)
    for (int64_t i = 0; i < row.n; ++i) length2 += q[i] * q[i];
    const float scale = r / std::sqrt(std::max(length2, 1.17549435e-38f));
    for (int64_t i = 0; i < row.n; ++i) q[i] *= scale;
    if (row.xi) *row.xi *= scale;
}

// A great circle along the tangent part w - a q of the momentum w.
void turn_row(const Row& row, float h, float r) {
    float *__restrict q = row.q, *__restrict w = row.v;
    float length2 = 0.0f, speed2 = 0.0f, dot = 0.0f;
    if (row.xi) {
        length2 = *row.xi * *row.xi;
        speed2 = *row.eta * *row.eta;
        dot = *row.xi * *row.eta;
    }
#pragma omp simd reduction(+ : length2, speed2, dot)
    for (int64_t i = 0; i < row.n; ++i) {
        length2 += q[i] * q[i];
        speed2 += w[i] * w[i];
        dot += q[i] * w[i];
    }
    const double a = static_cast<double>(dot) / length2;
    const double tangent2 = std::max(0.0, speed2 - a * a * length2);
    const double angle = h * std::sqrt(tangent2 / length2);
    const double cosine = std::cos(angle);
    const double turn = angle > 1e-8 ? h * std::sin(angle) / angle : h;
    const float keep_q = static_cast<float>(cosine + turn * a), from_w = static_cast<float>(turn);
    const float keep_w = static_cast<float>(cosine);
    const float from_q = static_cast<float>(turn * tangent2 / length2 - cosine * a);
    for (int64_t i = 0; i < row.n; ++i) {
        const float old_q = q[i], old_w = w[i];
        q[i] = keep_q * old_q - from_w * old_w;
        w[i] = keep_w * old_w + from_q * old_q;
    }
    if (row.xi) {
        const float old_q = *row.xi, old_w = *row.eta;
        *row.xi = keep_q * old_q - from_w * old_w;
        *row.eta = keep_w * old_w + from_q * old_q;
    }
    scale_row(row, r);
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
            scale_row(row, r);
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

inline uint32_t magnitude(float x) { return as_bits(x) & 0x7fffffffu; }  // ordered as |x|, and NaN on top

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

// C = A B; rows is a multiple of ROWS, columns of LANES.
void multiply(int64_t rows, int64_t inner, int64_t columns, const float* A, int64_t by_row, int64_t by_column,
              const float* B, float* C) {
    for (int64_t j = 0; j < columns; j += 2 * LANES)
        for (int64_t i = 0; i < rows; i += ROWS) {
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

inline uint32_t roll(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

// Threefry-2x32 with 20 rounds (Salmon et al. 2011): a bijection of (x0, x1) for every key.
inline void threefry(uint32_t& x0, uint32_t& x1, uint32_t k0, uint32_t k1) {
    const uint32_t key[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
    constexpr int by[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    x0 += k0;
    x1 += k1;
#pragma GCC unroll 20
    for (int i = 0; i < 20; ++i) {
        x0 += x1;
        x1 = roll(x1, by[i % 8]) ^ x0;
        if (i % 4 == 3) {
            const int j = i / 4 + 1;
            x0 += key[j % 3];
            x1 += key[(j + 1) % 3] + static_cast<uint32_t>(j);
        }
    }
}

void fill_pairs(int64_t count, float* __restrict out, uint64_t from, uint32_t k0, uint32_t k1) {
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t place = from + static_cast<uint64_t>(i);
        uint32_t x0 = static_cast<uint32_t>(place), x1 = static_cast<uint32_t>(place >> 32);
        threefry(x0, x1, k0, k1);
        const float u = static_cast<float>(static_cast<int32_t>(x0 >> 8)) * 0x1p-24f + 0x1p-25f;
        const float radius = std::sqrt(-2.0f * log_unit(u));
        // 24 bits for the angle within its octant, three others for which octant it is.
        const float t = (static_cast<float>(static_cast<int32_t>(x1) >> 8) + 0.5f) * (0.785398163f * 0x1p-23f);
        float s, c;
        sincos_octant(t, s, c);
        out[2 * i] = radius * as_float(as_bits(x1 & 1u ? s : c) ^ ((x1 & 2u) << 30));
        out[2 * i + 1] = radius * as_float(as_bits(x1 & 1u ? c : s) ^ ((x1 & 4u) << 29));
    }
}

// The numbers from..., in blocks of their own: for R or S of one letter.
const float* noise_of(const float* stored, int64_t stride, const Stream* stream, int64_t place, int64_t row,
                      int64_t start, int64_t size, float* room) {
    if (stored) return stored + row * stride + start;
    if (!stream || place < 0) return nullptr;
    const uint64_t key = stream->keys[row];
    fill_pairs((size + 1) / 2, room, static_cast<uint64_t>(place + start) / 2,
               static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
    return room;
}

const float* force_of(const Word& w, const float* g, const float* q, int64_t n, float* room) {
    if (w.sign == 1.0f && w.decay == 0.0f) return g;
    for (int64_t i = 0; i < n; ++i) room[i] = w.sign * g[i] + w.decay * q[i];
    return room;
}

}  // namespace

extern "C" {

// Apply a word to rows of n weights each, on circles (if they have slack xi) or in flat space. The noise
// is stored, or drawn from a stream, or there is none. No number depends on how many threads there are.
void holonomic_step(const Word* word, int64_t rows, int64_t n, float* q, float* v, float* xi,
                    const float* g, const Stored* stored, const Stream* stream, int32_t threads) {
    const Word& w = *word;
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, stride = stored ? stored->stride : 0;
#pragma omp parallel num_threads(team(rows * n, threads))
    {
        const FlushTiny flush;
        alignas(64) float force[BLOCK], R[2 * BLOCK], S[2 * BLOCK];
#pragma omp for schedule(static)
        for (int64_t block = 0; block < rows * blocks; ++block) {
            const int64_t row = block / blocks, start = block % blocks * BLOCK;
            const int64_t size = std::min(BLOCK, n - start), at = row * n + start;
            const float* f = force_of(w, g + at, q + at, size, force);
            for (int32_t k = 0; k < w.count; ++k) {
                const float* r = noise_of(stored ? stored->R[k] : nullptr, stride, stream,
                                          stream ? stream->R[k] : -1, row, start, size, R);
                const float* s = noise_of(stored ? stored->S[k] : nullptr, stride, stream,
                                          stream ? stream->S[k] : -1, row, start, size, S);
                const Block b{q + at, v ? v + at : nullptr, xi ? xi + at : nullptr, f, r, s, size};
                if (xi)
                    letter<true>(w.letters[k], b, w.x[k], w.y[k], w.radius);
                else
                    letter<false>(w.letters[k], b, w.x[k], w.y[k], w.radius);
            }
        }
    }
}

// The same without noise for many tensors.
void holonomic_steps(const Word* word, int64_t count, const Job* jobs, int32_t threads) {
    for (const Job* j = jobs; j < jobs + count; ++j)
        holonomic_step(word, 1, j->n, j->q, j->v, j->xi, j->g, nullptr, nullptr, threads);
}

// The same for rows on spheres; xi, eta (null: no slack) and S have an entry a row.
void holonomic_sphere_step(const Word* word, int64_t rows, int64_t n, float* q, float* v, float* xi,
                           float* eta, const float* g, const Stored* stored, int32_t threads) {
    const Word& w = *word;
#pragma omp parallel num_threads(team(rows * n, threads))
    {
        const FlushTiny flush;
        std::vector<float> force(static_cast<size_t>(n));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t at = row * n;
            const float* f = force_of(w, g + at, q + at, n, force.data());
            for (int32_t k = 0; k < w.count; ++k) {
                const Row here{q + at,
                               v ? v + at : nullptr,
                               xi ? xi + row : nullptr,
                               eta ? eta + row : nullptr,
                               f,
                               stored && stored->R[k] ? stored->R[k] + at : nullptr,
                               stored && stored->S[k] ? stored->S[k] + row : nullptr,
                               n};
                letter(w.letters[k], here, w.x[k], w.y[k], w.radius);
            }
        }
    }
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

// The start of the iteration for `count` matrices s x s: from C = Q^T W, M = -h/2 (C + C^T) and
// D = I - h C - M/2; and of every matrix the largest norm of a column of K + M, where K = h C.
void holonomic_orthogonal_begin(int64_t count, int64_t s, float h, const float* C, float* M, float* D,
                                float* norms, int32_t threads) {
    const int64_t tiles = (s + TILE - 1) / TILE;
    std::vector<float> squares(static_cast<size_t>(count * tiles * s));
#pragma omp parallel for schedule(static) num_threads(team(count * s * s, threads))
    for (int64_t strip = 0; strip < count * tiles; ++strip) {
        const int64_t at = strip / tiles * s * s;
        float* columns = squares.data() + strip * s;
        over_strip(C + at, s, strip % tiles * TILE,
                   [=](int64_t row, int64_t column, int64_t n, const float* __restrict other) {
                       const int64_t here = at + row * s + column;
                       const float* __restrict c = C + here;
                       float *__restrict m = M + here, *__restrict d = D + here;
                       float* __restrict square = columns + column;
#pragma omp simd
                       for (int64_t b = 0; b < n; ++b) {
                           m[b] = -0.5f * h * (c[b] + other[b]);
                           d[b] = -h * c[b] - 0.5f * m[b];
                           const float e = h * c[b] + m[b];
                           square[b] += e * e;
                       }
                       if (column <= row && row < column + n) d[row - column] += 1.0f;
                   });
    }
    for (int64_t k = 0; k < count; ++k)
        norms[k] = std::sqrt(largest_column(squares.data() + k * tiles * s, tiles, s));
}

// One update of the iteration, from the residual F = G - T - T^T: M += F/2, D -= F/4. A matrix is done (its M
// may be larger than 1) when max |F| <= enough, or when the next residual is sure to be within `rounding`: it
// is ((K + M)^T F + F (K + M)) / 2 + F^2 / 4, so no entry exceeds x y + y^2 / 4 for the largest norms x and y
// of columns of K + M and of F. It is lost when F is far beyond that: then it changes no more. Returns how
// many matrices are to go on.
int64_t holonomic_orthogonal_update(int64_t count, int64_t s, float enough, float rounding, const float* G,
                                    const float* T, float* M, float* D, float* norms, uint8_t* state,
                                    int32_t threads) {
    const int64_t tiles = (s + TILE - 1) / TILE;
    std::vector<float> squares(static_cast<size_t>(count * tiles * s));
    std::vector<uint32_t> tops(static_cast<size_t>(count * tiles));  // the largest |F|
    std::vector<float> sizes(tops.size());                           // |M|^2
#pragma omp parallel for schedule(static) num_threads(team(count * s * s, threads))
    for (int64_t strip = 0; strip < count * tiles; ++strip) {
        if (state[strip / tiles] != GOING) continue;
        const int64_t at = strip / tiles * s * s;
        float* columns = squares.data() + strip * s;
        alignas(64) uint32_t highest[TILE] = {};
        alignas(64) float size[TILE] = {};
        over_strip(T + at, s, strip % tiles * TILE,
                   [=, &highest, &size](int64_t row, int64_t column, int64_t n, const float* __restrict other) {
                       const int64_t here = at + row * s + column;
                       const float *__restrict g = G + here, *__restrict t = T + here;
                       float *__restrict m = M + here, *__restrict d = D + here;
                       float* __restrict square = columns + column;
#pragma omp simd
                       for (int64_t b = 0; b < n; ++b) {
                           const float f = g[b] - t[b] - other[b];
                           m[b] += 0.5f * f;
                           d[b] -= 0.25f * f;
                           square[b] += f * f;
                           highest[b] = std::max(highest[b], magnitude(f));
                           size[b] += m[b] * m[b];
                       }
                   });
        tops[static_cast<size_t>(strip)] = *std::max_element(highest, highest + TILE);
        sizes[static_cast<size_t>(strip)] = std::accumulate(size, size + TILE, 0.0f);
    }
    int64_t going = 0;
    for (int64_t k = 0; k < count; ++k) {
        if (state[k] != GOING) continue;
        const auto begin = k * tiles, end = begin + tiles;
        const uint32_t top = *std::max_element(tops.begin() + begin, tops.begin() + end);
        const float size = std::accumulate(sizes.begin() + begin, sizes.begin() + end, 0.0f);
        const float y = std::sqrt(largest_column(squares.data() + begin * s, tiles, s));
        if (top >= as_bits(1e3f))
            state[k] = LOST;
        else if (top <= as_bits(enough) || norms[k] * y + 0.25f * y * y <= rounding)
            state[k] = size < 1.0f ? DONE : LARGE;
        norms[k] += 0.5f * y;
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
// null), the iteration, and Q <- Q - h W - Q M with its momentum, which is projected if `settle`. Matrices whose
// state is not DONE at the end have not been touched.
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
        std::vector<float> room(static_cast<size_t>(4 * tall + 4 * small));  // zero, beyond the matrices too
        float* at = room.data();
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        float *Q = take(tall), *W = take(tall), *B = take(tall), *N = take(tall);
        float *C = take(small), *G = take(small), *M = take(small), *D = take(small);
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
            multiply(ld, r, ld, Q, 1, ld, W, C);
            multiply(ld, r, ld, B, 1, ld, B, G);
            for (int64_t i = 0; i < s; ++i) G[i * ld + i] -= 1.0f;
            float norm;
            holonomic_orthogonal_begin(1, ld, l.h, C, M, D, &norm, 1);
            state[k] = GOING;
            for (int32_t i = 0; i < l.iterations; ++i) {
                multiply(ld, s, ld, D, 1, ld, M, C);
                if (!holonomic_orthogonal_update(1, ld, l.enough, l.rounding, G, C, M, D, &norm, state + k, 1)) break;
            }
            if (state[k] != DONE) continue;
            multiply(padded(r, ROWS), s, ld, Q, ld, 1, M, N);
            for (int64_t i = 0; i < r * ld; ++i) {
                Q[i] = B[i] - N[i];
                W[i] += per * N[i];
            }
            if (l.settle) {
                multiply(ld, r, ld, Q, 1, ld, W, C);
                holonomic_orthogonal_begin(1, ld, 1.0f, C, M, D, &norm, 1);  // M = -sym C
                multiply(padded(r, ROWS), s, ld, Q, ld, 1, M, N);
                for (int64_t i = 0; i < r * ld; ++i) W[i] += N[i];
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

// Standard normal numbers for `rows` streams: row i gets the numbers first, first + 1, ... of stream
// keys[i], by Box-Muller on Threefry. A number depends on its key and its place alone; first is even.
void holonomic_normal(int64_t rows, int64_t n, float* out, uint64_t first, const uint64_t* keys,
                      int32_t threads) {
    const int64_t blocks = (n + 2 * BLOCK - 1) / (2 * BLOCK);
#pragma omp parallel for schedule(static) num_threads(team(rows * n, threads))
    for (int64_t block = 0; block < rows * blocks; ++block) {
        alignas(64) float pairs[2 * BLOCK];
        const int64_t row = block / blocks, start = block % blocks * 2 * BLOCK;
        const int64_t size = std::min(2 * BLOCK, n - start);
        fill_pairs((size + 1) / 2, pairs, (first + static_cast<uint64_t>(start)) / 2,
                   static_cast<uint32_t>(keys[row]), static_cast<uint32_t>(keys[row] >> 32));
        std::memcpy(out + row * n + start, pairs, static_cast<size_t>(size) * sizeof(float));
    }
}
}
