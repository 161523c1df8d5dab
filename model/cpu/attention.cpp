// Causal attention in float32 over logits A(t) q.k + M(t) in bits, with t the distance from query back to key. Forward
// and backward pass work in tiles that fit a core's cache (FlashAttention-2, Dao 2023, arXiv 2307.08691). The matrix
// products use PyTorch's BLAS. __init__.py calls the functions.
//
// The tables of A and M are reversed, A[length - 1 - t], so a row of keys reads them forwards. Calls without key biases
// (BIASED) or gradients of learned tables (LEARNED) run templates without their code. A window and the start of a
// document hide keys. A row's running sum begins with the sink.

#include <vector>

#include "cpu.h"

extern "C" {  // in PyTorch's library

void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
            const float*, const int*, const float*, float*, const int*);
// Sets the threads of the calling thread's products. Only oneMKL has it; with other libraries the address is null.
int MKL_Set_Num_Threads_Local(int) __attribute__((weak));

}  // extern "C"

namespace {

// out (m, n) = alpha op(a) op(b) + beta out. BLAS stores matrices by columns, so it computes the transpose of out.
void multiply(const char* ta, const char* tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
              const float* b, int64_t ldb, float beta, float* out, int64_t ldout) {
    const int M = m, N = n, K = k, LDA = lda, LDB = ldb, LDOUT = ldout;
    sgemm_(tb, ta, &N, &M, &K, &alpha, b, &LDB, a, &LDA, &beta, out, &LDOUT);
}

// While an object exists, matrix products of its thread use only this thread. oneMKL does not know that all other
// threads are busy, so it would wait for them.
struct OneThread {
    const int before = MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0;
    ~OneThread() {
        if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before);
    }
};

template <bool BIASED>
void forward_tile(const Head& head, int64_t start, std::vector<float>& scratch) {
    const Call& c = head.call;
    const int64_t rows = std::min(c.tile_queries, c.queries - start), width = c.tile_keys;
    float *S = scratch.data(), *peak = S + c.tile_queries * width, *total = peak + c.tile_queries;
    head.begin_rows(start, rows, peak, total);
    const int64_t first = head.first_key(start), end = c.q_offset + start + rows;
    for (int64_t j = first; j < end; j += width) {
        const int64_t keys = std::min(width, end - j);
        multiply("N", "T", rows, keys, c.dim, 1, head.row(c.q, start), c.q.token, head.row(c.k, j),
                 c.k.token, 0, S, width);
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t hidden = head.hidden(start + i, j, keys), seen = head.visible(start + i, j, keys) - hidden;
            const int64_t entry = head.entry(start + i, j) + hidden;
            float *row = S + i * width, *s = row + hidden;
            const float *A = head.A + entry, *M = head.M + entry;
            const float *bias = head.bias + j + hidden, diagonal = head.diagonal_bias(start + i);
            float top = peak[i];
#pragma omp simd reduction(max : top)
            for (int64_t x = 0; x < seen; ++x) {
                s[x] = A[x] * s[x] + M[x];
                if constexpr (BIASED) s[x] += LOG2E * (bias[x] - diagonal);
                top = s[x] > top ? s[x] : top;
            }
            const float shrink = peak[i] == -INFINITY ? 0.0f : std::exp2(peak[i] - top);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t x = 0; x < seen; ++x) {
                s[x] = exp2_of_negative(s[x] - top);
                sum += s[x];
            }
            std::fill(row, s, 0.0f);
            std::fill(s + seen, row + keys, 0.0f);
            total[i] = total[i] * shrink + sum;
            peak[i] = top;
            if (j > first && shrink != 1.0f) {
                float* o = head.row(c.o, start + i);
                for (int64_t d = 0; d < c.dim; ++d) o[d] *= shrink;
            }
        }
        multiply("N", "N", rows, c.dim, keys, 1, S, width, head.row(c.v, j), c.v.token, j > first,
                 head.row(c.o, start), c.o.token);
    }
    for (int64_t i = 0; i < rows; ++i) {
        float* o = head.row(c.o, start + i);
        for (int64_t d = 0; d < c.dim; ++d) o[d] /= total[i];
        c.lse[head.n * c.queries + start + i] = peak[i] + std::log2(total[i]);
    }
}

// Add the gradients dk and dv of the keys j .. j + width - 1, and their part of dq.
template <bool BIASED, bool LEARNED>
void backward_tile(const Head& head, int64_t j, const Matrix& dq, float* dA, float* dlogits,
                   std::vector<float>& scratch) {
    const Call& c = head.call;
    const int64_t width = c.tile_keys, keys = std::min(width, c.keys - j);
    float *P = scratch.data(), *dS = P + c.tile_queries * width;
    float* dM = LEARNED ? dA + c.keys : nullptr;
    const int64_t first = std::max<int64_t>(j - c.q_offset, 0) / c.tile_queries * c.tile_queries;
    for (int64_t start = first; start < head.last_query(j + keys - 1); start += c.tile_queries) {
        const int64_t rows = std::min(c.tile_queries, c.queries - start);
        const int64_t from = std::max(j, head.first_key(start)), end = std::min(j + keys, c.q_offset + start + rows);
        const int64_t used = end - from;  // keys that any of these queries sees
        if (used <= 0) break;             // later queries see no key of this tile
        const float *q = head.row(c.q, start), *dout = head.row(c.dout, start);
        const float *k = head.row(c.k, from), *v = head.row(c.v, from);
        multiply("N", "T", rows, used, c.dim, 1, q, c.q.token, k, c.k.token, 0, P, width);
        multiply("N", "T", rows, used, c.dim, 1, dout, c.dout.token, v, c.v.token, 0, dS, width);
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t seen = head.visible(start + i, from, used), hidden = head.hidden(start + i, from, used);
            const int64_t entry = head.entry(start + i, from);
            const float *A = head.A + entry, *M = head.M + entry, *bias = head.bias + from;
            float* dbias = c.dbias + head.n * c.keys + from;
            float *p = P + i * width, *ds = dS + i * width;
            const float lse = c.lse[head.n * c.queries + start + i], delta = c.delta[head.n * c.queries + start + i];
            const float diagonal = head.diagonal_bias(start + i);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t x = hidden; x < seen; ++x) {
                const float s = p[x];
                float logit = A[x] * s + M[x];
                if constexpr (BIASED) logit += LOG2E * (bias[x] - diagonal);
                p[x] = exp2_of_negative(logit - lse);
                const float dL = p[x] * (ds[x] - delta);
                ds[x] = dL * A[x];
                if constexpr (BIASED) dbias[x] += dL;
                if constexpr (BIASED) sum += dL;
                if constexpr (LEARNED) dA[entry + x] += LN2 * s * dL;
                if constexpr (LEARNED) dM[entry + x] += LN2 * dL;
            }
            if constexpr (BIASED) dlogits[start + i] += sum;
            std::fill(p, p + hidden, 0.0f);
            std::fill(ds, ds + hidden, 0.0f);
            std::fill(p + seen, p + used, 0.0f);
            std::fill(ds + seen, ds + used, 0.0f);
        }
        float *dk = head.row(c.dk, from), *dv = head.row(c.dv, from);
        float* dq_rows = head.row(dq, start);
        multiply("T", "N", used, c.dim, rows, 1, P, width, dout, c.dout.token, 1, dv, c.dv.token);
        multiply("T", "N", used, c.dim, rows, LN2, dS, width, q, c.q.token, 1, dk, c.dk.token);
        multiply("N", "N", rows, c.dim, used, LN2, dS, width, k, c.k.token, 1, dq_rows, dq.token);
    }
}

}  // namespace

extern "C" {

void forward(const Call* call) {
    const int64_t tiles = (call->queries + call->tile_queries - 1) / call->tile_queries;
    const auto run_tile = call->bias ? forward_tile<true> : forward_tile<false>;
#pragma omp parallel
    {
        const OneThread one_thread;
        std::vector<float> scratch(call->tile_queries * (call->tile_keys + 2));
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < call->batch * call->heads * tiles; ++item)  // the longest rows first
            run_tile(Head(*call, item / tiles), (tiles - 1 - item % tiles) * call->tile_queries, scratch);
    }
}

// dq, dk and dv start at 0. dq has `parts` consecutive copies. A copy is the sum over every parts-th tile of keys.
void backward(const Call* call) {
    const int64_t heads = call->batch * call->heads;
    const bool learned = call->dtables;
    const auto run_tile = call->bias ? (learned ? backward_tile<true, true> : backward_tile<true, false>)
                                     : (learned ? backward_tile<false, true> : backward_tile<false, false>);
#pragma omp parallel
    {
        const OneThread one_thread;
        std::vector<float> scratch(2 * call->tile_queries * call->tile_keys);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < heads * call->parts; ++item) {
            const int64_t n = item / call->parts, part = item % call->parts;
            const Head head(*call, n);
            Matrix dq = call->dq;
            dq.data += part * call->batch * dq.batch;
            float* dA = call->dtables ? call->dtables + (part * heads + n) * 2 * call->keys : nullptr;
            float* dlogits = call->dlogits + (part * heads + n) * call->queries;
            for (int64_t j = part * call->tile_keys; j < call->keys; j += call->parts * call->tile_keys)
                run_tile(head, j, dq, dA, dlogits, scratch);
        }
    }
}

}  // extern "C"
