// Steps of elementwise manifolds in one pass over memory, and a counter-based source of normal numbers.
//
// Everything works on small blocks that stay in the first cache: each letter of a scheme is a plain loop
// over a block, which the compiler turns into vector instructions. Loaded by ctypes; no Python inside.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t BLOCK = 1024;

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

// ------------------------------------------------------------------ letters on a block
struct Block {
    float *q, *v, *xi;
    const float *g, *R, *S;
    int64_t n;
};

inline void to_circle(float& q, float& xi, float r) {
    const float length2 = std::max(q * q + xi * xi, 1.17549435e-38f);
    const float scale = r / std::sqrt(length2);
    q *= scale;
    xi *= scale;
}

template <bool CIRCLE>
void letter(char name, const Block& b, float x, float y, float r) {
    float *__restrict q = b.q, *__restrict v = b.v, *__restrict xi = b.xi;
    const float *__restrict g = b.g, *__restrict R = b.R, *__restrict S = b.S;
    const int64_t n = b.n;
    switch (name) {
        case 'A':
            if (CIRCLE) {
                for (int64_t i = 0; i < n; ++i) {
                    float s, c;
                    sincos(x * v[i], s, c);
                    float new_q = c * q[i] - s * xi[i], new_xi = c * xi[i] + s * q[i];
                    to_circle(new_q, new_xi, r);
                    q[i] = new_q;
                    xi[i] = new_xi;
                }
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

inline uint32_t rotate(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

// Threefry-2x32 with 20 rounds (Salmon et al. 2011): a bijection of (x0, x1) for every key.
inline void threefry(uint32_t& x0, uint32_t& x1, uint32_t k0, uint32_t k1) {
    const uint32_t key[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
    constexpr int by[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    x0 += k0;
    x1 += k1;
#pragma GCC unroll 20
    for (int i = 0; i < 20; ++i) {
        x0 += x1;
        x1 = rotate(x1, by[i % 8]) ^ x0;
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

}  // namespace

extern "C" {

// Apply `count` letters to n weights. Letter k has the numbers x[k] (and y[k] for its noise), and the
// noise R[k], S[k] (null: none). The force is sign * g + decay * q at the start of the step.
void holonomic_step(int64_t n, float* q, float* v, float* xi, const float* g, int32_t count,
                    const char* letters, const float* x, const float* y, const float* const* R,
                    const float* const* S, int32_t circle, float r, float sign, float decay) {
    alignas(64) float force[BLOCK];
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t size = std::min(BLOCK, n - start);
        const float* f = g + start;
        if (sign != 1.0f || decay != 0.0f) {
            for (int64_t i = 0; i < size; ++i) force[i] = sign * g[start + i] + decay * q[start + i];
            f = force;
        }
        for (int32_t k = 0; k < count; ++k) {
            const Block b{q + start,
                          v ? v + start : nullptr,
                          xi ? xi + start : nullptr,
                          f,
                          R[k] ? R[k] + start : nullptr,
                          S[k] ? S[k] + start : nullptr,
                          size};
            if (circle)
                letter<true>(letters[k], b, x[k], y[k], r);
            else
                letter<false>(letters[k], b, x[k], y[k], r);
        }
    }
}

// Standard normal numbers for `rows` streams: row i gets the numbers first, first + 1, ... of stream
// keys[i], by Box-Muller on Threefry. A number depends on its key and its place alone; first is even.
void holonomic_normal(int64_t rows, int64_t n, float* out, uint64_t first, const uint64_t* keys) {
    alignas(64) float pairs[2 * BLOCK];
    for (int64_t row = 0; row < rows; ++row) {
        const uint32_t k0 = static_cast<uint32_t>(keys[row]);
        const uint32_t k1 = static_cast<uint32_t>(keys[row] >> 32);
        for (int64_t start = 0; start < n; start += 2 * BLOCK) {
            const int64_t size = std::min(2 * BLOCK, n - start);
            fill_pairs((size + 1) / 2, pairs, (first + static_cast<uint64_t>(start)) / 2, k0, k1);
            std::memcpy(out + row * n + start, pairs, static_cast<size_t>(size) * sizeof(float));
        }
    }
}
}
