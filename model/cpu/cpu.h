// The arguments of the attention kernels (library.py fills them in), addresses within them, and 2^x.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

struct Matrix {  // (batch, heads, tokens, head dimension) with these strides; the last dimension has no gaps
    float* data;
    int64_t batch, head, token;
};

struct Call {
    Matrix q, k, v, o, dout, dq, dk, dv;
    float* lse;      // (batch, heads, queries), in bits
    float* delta;    // (batch, heads, queries), each row's sum of o * dout
    float* tables;   // (2, table_heads, keys): A and M
    float* dtables;  // (parts, batch, heads, 2, keys), to add to, or null
    float* bias;     // (batch, heads, keys), added to the logits, or null
    float* dbias;    // (batch, heads, keys), to add to
    float* dlogits;  // (parts, batch, heads, queries), to add each row's sum of the logits' gradients to
    float* sink;     // (heads), one more logit of each row, or null
    int64_t* starts;  // (batch, keys), the first key that each token may see, which never decreases, or null
    int64_t batch, heads, table_heads, queries, keys, dim, q_offset, window, parts, tile_queries, tile_keys;
};

namespace {

constexpr float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

// 2^x for x <= 0 or NaN, with a relative error of 1e-7. A polynomial gives the fraction, the exponent's bits the rest.
// Products of denormal numbers are ten times slower, and ALiBi's steep heads have many. So results below 2^-64 become
// 2^-64, which does not change a float32 sum that contains 1.
inline float exp2_of_negative(float x) {
    x = x < -64.0f ? -64.0f : x;
    const float shifted = x + 12582912.0f;  // 1.5 * 2^23: now the last bits are the integer nearest to x
    const float f = x - (shifted - 12582912.0f);
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + 0x3F800000u;
    float scale;
    std::memcpy(&scale, &bits, 4);
    float y = 1.5345712e-4f;
    y = y * f + 1.3399931e-3f;
    y = y * f + 9.6184891e-3f;
    y = y * f + 5.5503286e-2f;
    y = y * f + 2.4022646e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    return y * scale;
}

struct Head {  // one head of one sequence
    const Call& call;
    int64_t n;
    const float *A, *M, *bias;
    const int64_t* starts;
    Head(const Call& call, int64_t n) : call(call), n(n) {
        const int64_t head = call.table_heads > 1 ? n % call.heads : 0;
        A = call.tables + head * call.keys;
        M = A + call.table_heads * call.keys;
        bias = call.bias ? call.bias + n * call.keys : nullptr;
        starts = call.starts ? call.starts + n / call.heads * call.keys : nullptr;
    }
    float* row(const Matrix& x, int64_t token) const {
        return x.data + n / call.heads * x.batch + n % call.heads * x.head + token * x.token;
    }
    // The index of query i and key j in the reversed tables. The entries of later keys follow.
    int64_t entry(int64_t i, int64_t j) const { return call.keys - 1 - (call.q_offset + i - j); }
    // How many of the `count` keys from j on are not after query i.
    int64_t visible(int64_t i, int64_t j, int64_t count) const {
        return std::clamp<int64_t>(call.q_offset + i - j + 1, 0, count);
    }
    // How many of these keys are before the first key that query i sees.
    int64_t hidden(int64_t i, int64_t j, int64_t count) const { return std::clamp<int64_t>(first_key(i) - j, 0, count); }
    // The first key that query i sees, which never decreases with i, and a bound on the queries that see key j.
    int64_t first_key(int64_t i) const {
        const int64_t start = starts ? starts[call.q_offset + i] : 0;
        return std::max<int64_t>(call.q_offset + i - call.window + 1, start);
    }
    int64_t last_query(int64_t j) const {
        return std::clamp<int64_t>(j + call.window - call.q_offset, 0, call.queries);
    }
    // The bias of query i's own key. It is subtracted from all biases of the row, because large biases are imprecise
    // but their important differences are small. The softmax ignores it, and the log-sum-exp lacks it.
    float diagonal_bias(int64_t i) const { return bias ? bias[call.q_offset + i] : 0.0f; }
    // Set the initial maximum and sum of the online softmax for rows from `start` on: the sink, or no key yet.
    void begin_rows(int64_t start, int64_t rows, float* peak, float* total) const {
        const float* sink = call.sink ? call.sink + n % call.heads : nullptr;
        for (int64_t i = 0; i < rows; ++i) {
            peak[i] = sink ? LOG2E * (*sink - diagonal_bias(start + i)) : -INFINITY;
            total[i] = sink ? 1.0f : 0.0f;
        }
    }
};

}  // namespace
