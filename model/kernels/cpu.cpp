// Causal attention over logits A(t) q.k + M(t), in bits, t the distance from query back to key: forward and backward in
// tiles that fit a core's cache (FlashAttention-2, Dao 2023, arXiv 2307.08691). float32; the matrix products are those
// of the BLAS that PyTorch brings. And, at the end, cross-entropy. Called by cpu.py.
//
// A and M are tables turned round, A[length - 1 - t], so that they are read forwards along a row of keys.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                      const int*, const float*, const int*, const float*, float*, const int*);

constexpr float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

// 2^x for x <= 0 or NaN, to a relative error of 1e-7: a polynomial for the fraction, the exponent's bits for the rest.
// Below 2^-64, which no sum with 1 in it notices, it is 2^-64: products with denormal numbers would take ten times as
// long, and ALiBi's steeper heads are full of them.
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

}  // namespace

extern "C" {

struct Matrix {  // (batch, heads, tokens, head dimension); the last without gaps, the others with these strides
    float* data;
    int64_t batch, head, token;
};

struct Call {
    Gemm gemm;
    Matrix q, k, v, o, dout, dq, dk, dv;
    float* lse;      // (batch, heads, queries), in bits
    float* delta;    // the same
    float* tables;   // (2, table_heads, keys): A and M
    float* dtables;  // (parts, batch, heads, 2, keys) to add to, or null
    int64_t batch, heads, table_heads, queries, keys, dim, q_offset, parts, tile_queries, tile_keys;
};

}  // extern "C"

namespace {

float* at(const Matrix& x, int64_t n, int64_t heads, int64_t token) {
    return x.data + n / heads * x.batch + n % heads * x.head + token * x.token;
}

struct Head {  // one head of one sequence
    const Call& call;
    int64_t n;
    const float *A, *M;
    Head(const Call& call, int64_t n) : call(call), n(n) {
        const int64_t head = call.table_heads > 1 ? n % call.heads : 0;
        A = call.tables + head * call.keys;
        M = A + call.table_heads * call.keys;
    }
    float* row(const Matrix& x, int64_t token) const { return at(x, n, call.heads, token); }
    // Where in the tables the distance from query i back to key j stands; the next keys' follow.
    int64_t entry(int64_t i, int64_t j) const { return call.keys - 1 - (call.q_offset + i - j); }
    // Keys from j on, of `count`, that query i sees.
    int64_t visible(int64_t i, int64_t j, int64_t count) const {
        return std::clamp<int64_t>(call.q_offset + i - j + 1, 0, count);
    }
    // out (m, n) = alpha a b^T + beta out and so on; BLAS counts by columns, so all is turned round.
    void multiply(const char* ta, const char* tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                  int64_t lda, const float* b, int64_t ldb, float beta, float* out, int64_t ldout) const {
        const int M = m, N = n, K = k, LDA = lda, LDB = ldb, LDOUT = ldout;
        call.gemm(tb, ta, &N, &M, &K, &alpha, b, &LDB, a, &LDA, &beta, out, &LDOUT);
    }
};

void forward_tile(const Head& head, int64_t start, std::vector<float>& scratch) {
    const Call& c = head.call;
    const int64_t rows = std::min(c.tile_queries, c.queries - start), width = c.tile_keys;
    float *S = scratch.data(), *peak = S + c.tile_queries * width, *total = peak + c.tile_queries;
    std::fill_n(peak, rows, -INFINITY);
    std::fill_n(total, rows, 0.0f);
    const int64_t end = c.q_offset + start + rows;
    for (int64_t j = 0; j < end; j += width) {
        const int64_t keys = std::min(width, end - j);
        head.multiply("N", "T", rows, keys, c.dim, 1, head.row(c.q, start), c.q.token, head.row(c.k, j), c.k.token, 0, S,
                      width);
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t seen = head.visible(start + i, j, keys);
            float* s = S + i * width;
            const float *A = head.A + head.entry(start + i, j), *M = head.M + head.entry(start + i, j);
            float top = peak[i];
#pragma omp simd reduction(max : top)
            for (int64_t x = 0; x < seen; ++x) {
                s[x] = A[x] * s[x] + M[x];
                top = s[x] > top ? s[x] : top;
            }
            const float shrink = j == 0 ? 0.0f : std::exp2(peak[i] - top);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t x = 0; x < seen; ++x) {
                s[x] = exp2_of_negative(s[x] - top);
                sum += s[x];
            }
            std::fill(s + seen, s + keys, 0.0f);
            total[i] = total[i] * shrink + sum;
            peak[i] = top;
            if (j > 0 && shrink != 1.0f) {
                float* o = head.row(c.o, start + i);
                for (int64_t d = 0; d < c.dim; ++d) o[d] *= shrink;
            }
        }
        head.multiply("N", "N", rows, c.dim, keys, 1, S, width, head.row(c.v, j), c.v.token, j > 0, head.row(c.o, start),
                      c.o.token);
    }
    for (int64_t i = 0; i < rows; ++i) {
        float* o = head.row(c.o, start + i);
        for (int64_t d = 0; d < c.dim; ++d) o[d] /= total[i];
        c.lse[head.n * c.queries + start + i] = peak[i] + std::log2(total[i]);
    }
}

// The keys j .. j + width - 1: their dk and dv, and their part in dq.
void backward_tile(const Head& head, int64_t j, const Matrix& dq, float* dA, std::vector<float>& scratch) {
    const Call& c = head.call;
    const int64_t width = c.tile_keys, keys = std::min(width, c.keys - j);
    float *P = scratch.data(), *dS = P + c.tile_queries * width;
    float* dM = dA ? dA + c.keys : nullptr;
    const int64_t first = std::max<int64_t>(j - c.q_offset, 0) / c.tile_queries * c.tile_queries;
    for (int64_t start = first; start < c.queries; start += c.tile_queries) {
        const int64_t rows = std::min(c.tile_queries, c.queries - start);
        const float *q = head.row(c.q, start), *dout = head.row(c.dout, start), *k = head.row(c.k, j);
        const int64_t used = std::min(keys, c.q_offset + start + rows - j);  // keys that any of these queries sees
        head.multiply("N", "T", rows, used, c.dim, 1, q, c.q.token, k, c.k.token, 0, P, width);
        head.multiply("N", "T", rows, used, c.dim, 1, dout, c.dout.token, head.row(c.v, j), c.v.token, 0, dS, width);
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t seen = head.visible(start + i, j, used), entry = head.entry(start + i, j);
            const float *A = head.A + entry, *M = head.M + entry;
            float *p = P + i * width, *ds = dS + i * width;
            const float lse = c.lse[head.n * c.queries + start + i], delta = c.delta[head.n * c.queries + start + i];
            if (dA) {
#pragma omp simd
                for (int64_t x = 0; x < seen; ++x) {
                    const float s = p[x];
                    p[x] = exp2_of_negative(A[x] * s + M[x] - lse);
                    const float dL = p[x] * (ds[x] - delta);
                    ds[x] = dL * A[x];
                    dA[entry + x] += LN2 * s * dL;
                    dM[entry + x] += LN2 * dL;
                }
            } else {
#pragma omp simd
                for (int64_t x = 0; x < seen; ++x) {
                    p[x] = exp2_of_negative(A[x] * p[x] + M[x] - lse);
                    ds[x] = p[x] * (ds[x] - delta) * A[x];
                }
            }
            std::fill(p + seen, p + used, 0.0f);
            std::fill(ds + seen, ds + used, 0.0f);
        }
        head.multiply("T", "N", used, c.dim, rows, 1, P, width, dout, c.dout.token, 1, head.row(c.dv, j), c.dv.token);
        head.multiply("T", "N", used, c.dim, rows, LN2, dS, width, q, c.q.token, 1, head.row(c.dk, j), c.dk.token);
        head.multiply("N", "N", rows, c.dim, used, LN2, dS, width, k, c.k.token, 1, head.row(dq, start), dq.token);
    }
}

}  // namespace

extern "C" {

void forward(const Call* call) {
    const int64_t tiles = (call->queries + call->tile_queries - 1) / call->tile_queries;
#pragma omp parallel
    {
        std::vector<float> scratch(call->tile_queries * (call->tile_keys + 2));
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < call->batch * call->heads * tiles; ++item)  // the longest rows first
            forward_tile(Head(*call, item / tiles), (tiles - 1 - item % tiles) * call->tile_queries, scratch);
    }
}

// dq, dk, dv start at 0; dq holds `parts` copies one after another, each of which gets every parts-th tile of keys.
void backward(const Call* call) {
    const int64_t heads = call->batch * call->heads;
#pragma omp parallel
    {
        std::vector<float> scratch(2 * call->tile_queries * call->tile_keys);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < heads * call->parts; ++item) {
            const int64_t n = item / call->parts, part = item % call->parts;
            const Head head(*call, n);
            Matrix dq = call->dq;
            dq.data += part * call->batch * dq.batch;
            float* dA = call->dtables ? call->dtables + (part * heads + n) * 2 * call->keys : nullptr;
            for (int64_t j = part * call->tile_keys; j < call->keys; j += call->parts * call->tile_keys)
                backward_tile(head, j, dq, dA, scratch);
        }
    }
}

// The losses of rows of logits, which become softmax - onehot if `gradient`; else they are left without meaning.
void cross_entropy(float* logits, const int64_t* targets, float* losses, int64_t rows, int64_t vocabulary,
                   int64_t gradient) {
    constexpr int64_t BLOCK = 1024;  // summed in float32; their sums, in double
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i) {
        float* x = logits + i * vocabulary;
        const float target = x[targets[i]];
        float top = x[0];
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < vocabulary; ++j) top = x[j] > top ? x[j] : top;
        double total = 0;
        for (int64_t start = 0; start < vocabulary; start += BLOCK) {
            const int64_t end = std::min(start + BLOCK, vocabulary);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = start; j < end; ++j) {
                x[j] = exp2_of_negative((x[j] - top) * LOG2E);
                sum += x[j];
            }
            total += sum;
        }
        losses[i] = std::log(total) + (top - target);
        if (!gradient) continue;
        const float scale = 1 / total;
#pragma omp simd
        for (int64_t j = 0; j < vocabulary; ++j) x[j] *= scale;
        x[targets[i]] -= 1;
    }
}

}  // extern "C"
