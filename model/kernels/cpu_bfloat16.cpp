// The attention of cpu.cpp for bfloat16 vectors, on processors that multiply them: products in bfloat16, their sums and
// all between them in float32. The matrix products are PyTorch's own brgemm (oneDNN's, for AMX and AVX512-BF16), which
// takes its second factor with two rows interleaved: a uint32 holds one column of rows 2r and 2r + 1. All packing into
// that form is done once a call; what is packed is padded with zeros to whole tiles.

#pragma GCC target("prefer-vector-width=512")  // such processors do not slow down for them

#include <memory>

#include "cpu.h"

namespace {

using Brgemm = void (*)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldout, bool add,
                        const uint16_t* a, const uint32_t* b, float* out, bool interleaved);

constexpr int64_t UNIT = 32;  // columns and sums are rounded up to so many, so that few shapes of products are compiled

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

uint32_t interleave(uint32_t low, uint32_t high) { return low | high << 16; }

// A (rows, dim) matrix of one head, tile by tile of `size` rows, in the forms that brgemm reads as a second factor.
struct Packed {
    int64_t dim, size, tiles;
    std::unique_ptr<uint32_t[]> data;  // (heads, tiles, size dim / 2)
    Packed(int64_t heads, int64_t rows, int64_t dim, int64_t size)
        : dim(dim), size(size), tiles((rows + size - 1) / size), data(new uint32_t[heads * tiles * size * dim / 2]) {}
    uint32_t* tile(int64_t n, int64_t t) const { return data.get() + (n * tiles + t) * size * dim / 2; }
};

// out (size / 2, dim): pairs of rows, for a product that sums over the rows.
void pack_rows(const uint16_t* x, int64_t stride, int64_t rows, int64_t size, int64_t dim, uint32_t* out) {
    for (int64_t r = 0; r < size; r += 2, out += dim) {
        if (r >= rows) {
            std::fill_n(out, dim, 0u);
            continue;
        }
        const uint16_t *low = x + r * stride, *high = low + stride;
        for (int64_t d = 0; d < dim; ++d) out[d] = interleave(low[d], r + 1 < rows ? high[d] : 0);
    }
}

// out (dim / 2, size): the transposed matrix in pairs of its rows, for a product that sums over dim.
void pack_transposed(const uint16_t* x, int64_t stride, int64_t rows, int64_t size, int64_t dim, uint32_t* out) {
    std::fill_n(out, size * dim / 2, 0u);
    for (int64_t d = 0; d < dim; d += 2)
        for (int64_t r = 0; r < rows; ++r) out[d / 2 * size + r] = interleave(x[r * stride + d], x[r * stride + d + 1]);
}

// out (dim, size): the transposed matrix itself, a first factor.
void transpose(const uint16_t* x, int64_t stride, int64_t rows, int64_t size, int64_t dim, uint16_t* out) {
    std::fill_n(out, size * dim, uint16_t(0));
    for (int64_t d = 0; d < dim; ++d)
        for (int64_t r = 0; r < rows; ++r) out[d * size + r] = x[r * stride + d];
}

template <bool BIASED>
void forward_tile(const Head& head, int64_t start, const Packed& keys, const Packed& values, float* scratch) {
    const Call& c = head.call;
    const auto multiply = reinterpret_cast<Brgemm>(c.gemm);
    const int64_t rows = std::min(c.tile_queries, c.queries - start), width = c.tile_keys, dim = c.dim;
    float *S = scratch, *out = S + c.tile_queries * width, *peak = out + c.tile_queries * dim;
    float* total = peak + c.tile_queries;
    auto P = reinterpret_cast<uint16_t*>(total + c.tile_queries);
    head.begin_rows(start, rows, peak, total);
    const int64_t first = head.first_key(start) / UNIT * UNIT, end = c.q_offset + start + rows;
    for (int64_t j = first, next; j < end; j = next) {
        next = (j / width + 1) * width;
        const int64_t skipped = j % width, used = round_up(std::min(next, end) - j, UNIT);
        multiply(rows, used, dim, c.q.token, width, width, false, head.row<uint16_t>(c.q, start),
                 keys.tile(head.n, j / width) + skipped, S, true);
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t hidden = head.hidden(start + i, j, used), seen = head.visible(start + i, j, used) - hidden;
            const int64_t entry = head.entry(start + i, j) + hidden;
            float* s = S + i * width + hidden;
            uint16_t *row = P + i * width, *p = row + hidden;
            const float *A = head.A + entry, *M = head.M + entry;
            const float *bias = head.bias + j + hidden, own = head.own_bias(start + i);
            float top = peak[i];
#pragma omp simd reduction(max : top)
            for (int64_t x = 0; x < seen; ++x) {
                s[x] = A[x] * s[x] + M[x];
                if constexpr (BIASED) s[x] += LOG2E * (bias[x] - own);
                top = s[x] > top ? s[x] : top;
            }
            const float shrink = peak[i] == -INFINITY ? 0.0f : std::exp2(peak[i] - top);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t x = 0; x < seen; ++x) {
                const float y = exp2_of_negative(s[x] - top);
                sum += y;
                p[x] = to_bfloat16(y);
            }
            std::fill(row, p, uint16_t(0));
            std::fill(p + seen, row + used, uint16_t(0));
            total[i] = total[i] * shrink + sum;
            peak[i] = top;
            if (j > first && shrink != 1.0f)
                for (int64_t d = 0; d < dim; ++d) out[i * dim + d] *= shrink;
        }
        multiply(rows, dim, used, width, dim, dim, j > first, P,
                 values.tile(head.n, j / width) + skipped / 2 * dim, out, true);
    }
    for (int64_t i = 0; i < rows; ++i) {
        uint16_t* o = head.row<uint16_t>(c.o, start + i);
        for (int64_t d = 0; d < dim; ++d) o[d] = to_bfloat16(out[i * dim + d] / total[i]);
        c.lse[head.n * c.queries + start + i] = peak[i] + std::log2(total[i]);
    }
}

// What the backward pass reads of q and dout, both by tiles of queries, and of k, by tiles of keys.
struct Factors {
    Packed q, dout, q_transposed, dout_transposed, k_transposed;
    Factors(const Call& c, int64_t heads)
        : q(heads, c.queries, c.dim, c.tile_queries), dout(heads, c.queries, c.dim, c.tile_queries),
          q_transposed(heads, c.queries, c.dim, c.tile_queries),
          dout_transposed(heads, c.queries, c.dim, c.tile_queries), k_transposed(heads, c.keys, c.dim, c.tile_keys) {}
};

// The keys j .. j + width - 1: their dk and dv, and their part in dq. All (queries, keys) matrices are turned round, as
// dv and dk want them, and the product for dq is too.
template <bool BIASED>
void backward_tile(const Head& head, int64_t j, const Factors& packed, float* dq, float* dA, float* dlogits,
                   float* scratch) {
    const Call& c = head.call;
    const auto multiply = reinterpret_cast<Brgemm>(c.gemm);
    const int64_t width = c.tile_keys, size = c.tile_queries, dim = c.dim, keys = std::min(width, c.keys - j);
    float *S = scratch, *dP = S + width * size, *dk = dP + width * size, *dv = dk + width * dim;
    auto pairs = reinterpret_cast<uint32_t*>(dv + width * dim);  // dS, two keys interleaved: (width / 2, size)
    auto P = reinterpret_cast<uint16_t*>(pairs + width / 2 * size), dS = P + width * size;
    float* dM = dA ? dA + c.keys : nullptr;
    const int64_t first = std::max<int64_t>(j - c.q_offset, 0) / size * size, all = packed.q.tiles * size;
    std::fill_n(dk, 2 * width * dim, 0.0f);
    for (int64_t start = first; start < head.last_query(j + keys - 1); start += size) {
        const int64_t t = start / size, rows = std::min(size, c.queries - start), columns = round_up(rows, UNIT);
        const int64_t skipped = std::max<int64_t>(head.first_key(start) - j, 0) / UNIT * UNIT, from = j + skipped;
        const int64_t used = std::min(j + keys, c.q_offset + start + rows) - from;
        if (used <= 0) break;  // the last queries see none of these keys
        multiply(used, columns, dim, c.k.token, size, size, false, head.row<uint16_t>(c.k, from),
                 packed.q_transposed.tile(head.n, t), S, true);
        multiply(used, columns, dim, c.v.token, size, size, false, head.row<uint16_t>(c.v, from),
                 packed.dout_transposed.tile(head.n, t), dP, true);
        const float *lse = c.lse + head.n * c.queries + start, *delta = c.delta + head.n * c.queries + start;
        for (int64_t x = 0; x < round_up(used, UNIT); ++x) {
            const int64_t key = from + x, distance = c.q_offset + start - key;  // of the first column
            // The columns begin .. end - 1 are queries that see this key.
            const int64_t begin = x < used ? std::clamp<int64_t>(-distance, 0, rows) : columns;
            const int64_t end = std::clamp<int64_t>(c.window - distance, 0, rows);
            const float *A = head.A + distance, *M = head.M + distance;
            const float *s = S + x * size, *dp = dP + x * size;
            uint16_t *p = P + x * size, *ds = dS + x * size;
            const float *own = head.bias + c.q_offset + start, bias = BIASED && x < used ? head.bias[key] : 0.0f;
            float sum = 0;
            std::fill(p, p + begin, uint16_t(0));
            std::fill(ds, ds + begin, uint16_t(0));
            if (dA) {
#pragma omp simd reduction(+ : sum)
                for (int64_t i = begin; i < end; ++i) {
                    float logit = A[i] * s[i] + M[i];
                    if constexpr (BIASED) logit += LOG2E * (bias - own[i]);
                    const float weight = exp2_of_negative(logit - lse[i]);
                    const float dL = weight * (dp[i] - delta[i]);
                    p[i] = to_bfloat16(weight);
                    ds[i] = to_bfloat16(dL * A[i]);
                    dA[distance + i] += LN2 * s[i] * dL;
                    dM[distance + i] += LN2 * dL;
                    if constexpr (BIASED) sum += dL;
                    if constexpr (BIASED) dlogits[start + i] += dL;
                }
            } else {
#pragma omp simd reduction(+ : sum)
                for (int64_t i = begin; i < end; ++i) {
                    float logit = A[i] * s[i] + M[i];
                    if constexpr (BIASED) logit += LOG2E * (bias - own[i]);
                    const float weight = exp2_of_negative(logit - lse[i]);
                    const float dL = weight * (dp[i] - delta[i]);
                    p[i] = to_bfloat16(weight);
                    ds[i] = to_bfloat16(dL * A[i]);
                    if constexpr (BIASED) sum += dL;
                    if constexpr (BIASED) dlogits[start + i] += dL;
                }
            }
            if (BIASED && x < used) c.dbias[head.n * c.keys + key] += sum;
            std::fill(p + std::max(begin, end), p + columns, uint16_t(0));
            std::fill(ds + std::max(begin, end), ds + columns, uint16_t(0));
            if (x % 2 == 0) continue;
            for (int64_t i = 0; i < columns; ++i) pairs[x / 2 * size + i] = interleave(ds[i - size], ds[i]);
        }
        multiply(used, dim, columns, size, dim, dim, true, P, packed.dout.tile(head.n, t), dv + skipped * dim, true);
        multiply(used, dim, columns, size, dim, dim, true, dS, packed.q.tile(head.n, t), dk + skipped * dim, true);
        multiply(dim, columns, round_up(used, UNIT), width, size, all, true,
                 reinterpret_cast<uint16_t*>(packed.k_transposed.tile(head.n, j / width)) + skipped, pairs, dq + start,
                 true);
    }
    for (int64_t x = 0; x < keys; ++x) {
        uint16_t *dk_row = head.row<uint16_t>(c.dk, j + x), *dv_row = head.row<uint16_t>(c.dv, j + x);
        for (int64_t d = 0; d < dim; ++d) dk_row[d] = to_bfloat16(LN2 * dk[x * dim + d]);
        for (int64_t d = 0; d < dim; ++d) dv_row[d] = to_bfloat16(dv[x * dim + d]);
    }
}

// Tile t of the queries: what is read of q and dout, and delta, the sum of each row of dout o.
void prepare_queries(const Head& head, int64_t t, const Factors& packed) {
    const Call& c = head.call;
    const int64_t start = t * c.tile_queries, rows = std::min(c.tile_queries, c.queries - start);
    const uint16_t *q = head.row<uint16_t>(c.q, start), *dout = head.row<uint16_t>(c.dout, start);
    pack_rows(q, c.q.token, rows, c.tile_queries, c.dim, packed.q.tile(head.n, t));
    pack_rows(dout, c.dout.token, rows, c.tile_queries, c.dim, packed.dout.tile(head.n, t));
    pack_transposed(q, c.q.token, rows, c.tile_queries, c.dim, packed.q_transposed.tile(head.n, t));
    pack_transposed(dout, c.dout.token, rows, c.tile_queries, c.dim, packed.dout_transposed.tile(head.n, t));
    for (int64_t i = 0; i < rows; ++i) {
        const uint16_t *o = head.row<uint16_t>(c.o, start + i), *row = dout + i * c.dout.token;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < c.dim; ++d) sum += from_bfloat16(row[d]) * from_bfloat16(o[d]);
        c.delta[head.n * c.queries + start + i] = sum;
    }
}

}  // namespace

extern "C" {

void forward_bfloat16(const Call* call) {
    const Call& c = *call;
    const int64_t heads = c.batch * c.heads, tiles = (c.queries + c.tile_queries - 1) / c.tile_queries;
    const Packed keys(heads, c.keys, c.dim, c.tile_keys), values(heads, c.keys, c.dim, c.tile_keys);
    const auto run_tile = c.bias ? forward_tile<true> : forward_tile<false>;
#pragma omp parallel
    {
        std::unique_ptr<float[]> scratch(new float[c.tile_queries * (c.tile_keys * 3 / 2 + c.dim + 2)]);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < heads * keys.tiles; ++item) {
            const Head head(c, item / keys.tiles);
            const int64_t t = item % keys.tiles, j = t * c.tile_keys, rows = std::min(c.tile_keys, c.keys - j);
            pack_transposed(head.row<uint16_t>(c.k, j), c.k.token, rows, c.tile_keys, c.dim, keys.tile(head.n, t));
            pack_rows(head.row<uint16_t>(c.v, j), c.v.token, rows, c.tile_keys, c.dim, values.tile(head.n, t));
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < heads * tiles; ++item) {
            const int64_t start = (tiles - 1 - item % tiles) * c.tile_queries;  // the longest rows first
            run_tile(Head(c, item / tiles), start, keys, values, scratch.get());
        }
        reinterpret_cast<void (*)(bool)>(c.release)(true);
    }
}

// Here A, M and their gradients are read forwards, tables[distance]. dq is summed up turned round, in float32, by each
// of the parts apart, which get every parts-th tile of keys.
void backward_bfloat16(const Call* call) {
    const Call& c = *call;
    const int64_t heads = c.batch * c.heads;
    const Factors packed(c, heads);
    const int64_t tiles = packed.q.tiles, key_tiles = packed.k_transposed.tiles;
    const int64_t padded = tiles * c.tile_queries, size = heads * c.dim * padded;
    std::unique_ptr<float[]> sums(new float[c.parts * size]);  // (parts, heads, dim, padded)
    const auto run_tile = c.bias ? backward_tile<true> : backward_tile<false>;
#pragma omp parallel
    {
        const int64_t tile = c.tile_queries * c.tile_keys;
        std::unique_ptr<float[]> scratch(new float[tile * 7 / 2 + 2 * c.tile_keys * c.dim]);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < heads * tiles; ++item)
            prepare_queries(Head(c, item / tiles), item % tiles, packed);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < heads * key_tiles; ++item) {
            const Head head(c, item / key_tiles);
            const int64_t t = item % key_tiles, j = t * c.tile_keys;
            transpose(head.row<uint16_t>(c.k, j), c.k.token, std::min(c.tile_keys, c.keys - j), c.tile_keys, c.dim,
                      reinterpret_cast<uint16_t*>(packed.k_transposed.tile(head.n, t)));
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < heads * c.parts; ++item) {
            const int64_t n = item / c.parts, part = item % c.parts;
            float* dq = sums.get() + part * size + n * c.dim * padded;
            float* dA = c.dtables ? c.dtables + (part * heads + n) * 2 * c.keys : nullptr;
            float* dlogits = c.dlogits + (part * heads + n) * c.queries;
            std::fill_n(dq, c.dim * padded, 0.0f);
            for (int64_t j = part * c.tile_keys; j < c.keys; j += c.parts * c.tile_keys)
                run_tile(Head(c, n), j, packed, dq, dA, dlogits, scratch.get());
        }
        reinterpret_cast<void (*)(bool)>(c.release)(true);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < heads * c.queries; ++item) {
            const int64_t n = item / c.queries, i = item % c.queries;
            uint16_t* dq = Head(c, n).row<uint16_t>(c.dq, i);
            for (int64_t d = 0; d < c.dim; ++d) {
                const float* sum = sums.get() + (n * c.dim + d) * padded + i;
                float total = 0;
                for (int64_t part = 0; part < c.parts; ++part) total += sum[part * size];
                dq[d] = to_bfloat16(LN2 * total);
            }
        }
    }
}

}  // extern "C"
