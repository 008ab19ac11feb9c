// Steps of circles, spheres and flat space in one pass over memory, and a counter-based source of normal numbers.
//
// Everything works on small blocks that stay in the first cache: each letter of a scheme is a plain loop
// over a block, which the compiler turns into vector instructions. Loaded by ctypes; no Python inside.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
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

constexpr int64_t BLOCK = 1024;
constexpr int LETTERS = 16;

// The same in build.py.
struct Word {  // letter k has the numbers x[k], and y[k] for its noise
    int32_t count;
    char letters[LETTERS];
    float x[LETTERS], y[LETTERS];
    float radius, sign, decay;  // the force is sign * g + decay * q at the start of the step
};

struct Stored {  // noise of letter k for weights and slack; null: none
    const float *R[LETTERS], *S[LETTERS];
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

// The pairs (q, xi) by the angles h v. Steps of training turn by less than an octant, almost always.
template <void (*SINCOS)(float, float&, float&)>
void rotate(const Block& b, float h, float r) {
    float *__restrict q = b.q, *__restrict xi = b.xi;
    const float* __restrict v = b.v;
    for (int64_t i = 0; i < b.n; ++i) {
        float s, c;
        SINCOS(h * v[i], s, c);
        float new_q = c * q[i] - s * xi[i], new_xi = c * xi[i] + s * q[i];
        to_circle(new_q, new_xi, r);
        q[i] = new_q;
        xi[i] = new_xi;
    }
}

template <bool CIRCLE>
void letter(char name, const Block& b, float x, float y, float r) {
    float *__restrict q = b.q, *__restrict v = b.v, *__restrict xi = b.xi;
    const float *__restrict g = b.g, *__restrict R = b.R, *__restrict S = b.S;
    const int64_t n = b.n;
    switch (name) {
        case 'A':
            if (CIRCLE) {
                if (largest(v, n) * std::fabs(x) < 0.785f)
                    rotate<sincos_octant>(b, x, r);
                else
                    rotate<sincos>(b, x, r);
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
const float* noise_of(const float* stored, int64_t at, const Stream* stream, int64_t place, int64_t row,
                      int64_t start, int64_t size, float* room) {
    if (stored) return stored + at;
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
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    {
        const FlushTiny flush;
        alignas(64) float force[BLOCK], R[2 * BLOCK], S[2 * BLOCK];
#pragma omp for schedule(static)
        for (int64_t block = 0; block < rows * blocks; ++block) {
            const int64_t row = block / blocks, start = block % blocks * BLOCK;
            const int64_t size = std::min(BLOCK, n - start), at = row * n + start;
            const float* f = force_of(w, g + at, q + at, size, force);
            for (int32_t k = 0; k < w.count; ++k) {
                const float* r = noise_of(stored ? stored->R[k] : nullptr, at, stream,
                                          stream ? stream->R[k] : -1, row, start, size, R);
                const float* s = noise_of(stored ? stored->S[k] : nullptr, at, stream,
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

// The same for rows on spheres; xi, eta (null: no slack) and S have an entry a row.
void holonomic_sphere_step(const Word* word, int64_t rows, int64_t n, float* q, float* v, float* xi,
                           float* eta, const float* g, const Stored* stored, int32_t threads) {
    const Word& w = *word;
#pragma omp parallel num_threads(threads)
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

// Standard normal numbers for `rows` streams: row i gets the numbers first, first + 1, ... of stream
// keys[i], by Box-Muller on Threefry. A number depends on its key and its place alone; first is even.
void holonomic_normal(int64_t rows, int64_t n, float* out, uint64_t first, const uint64_t* keys,
                      int32_t threads) {
    const int64_t blocks = (n + 2 * BLOCK - 1) / (2 * BLOCK);
#pragma omp parallel for schedule(static) num_threads(threads)
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
