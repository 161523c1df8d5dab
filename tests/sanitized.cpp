// What test_sanitize.py compiles into the C++ kernels: a plain product of matrices in the place of PyTorch's BLAS, so
// that a sanitizer sees each number that it reads and writes.

#include <cstdint>

extern "C" {

// BLAS's sgemm: out (m, n) = alpha a b + beta out, of which out is not read where beta is 0. It counts by columns.
void sgemm_(const char* ta, const char* tb, const int* m, const int* n, const int* k, const float* alpha,
                const float* a, const int* lda, const float* b, const int* ldb, const float* beta, float* out,
                const int* ldout) {
    const int64_t by_row = *ta == 'N' ? 1 : *lda, along_row = *ta == 'N' ? *lda : 1;
    const int64_t along_column = *tb == 'N' ? 1 : *ldb, by_column = *tb == 'N' ? *ldb : 1;
    for (int64_t j = 0; j < *n; ++j)
        for (int64_t i = 0; i < *m; ++i) {
            double sum = 0;
            for (int64_t x = 0; x < *k; ++x)
                sum += double(a[i * by_row + x * along_row]) * b[x * along_column + j * by_column];
            float* entry = out + i + j * int64_t(*ldout);
            *entry = float(*alpha * sum) + (*beta == 0 ? 0.0f : *beta * *entry);
        }
}

int MKL_Set_Num_Threads_Local(int threads) { return threads; }

}  // extern "C"
