// What scripts/sanitize.py compiles into the C++ kernels: plain products of matrices in place of PyTorch's, so that a
// sanitizer sees each number that they read and write; and OpenMP's barriers in a form that ThreadSanitizer knows.

#include <cstdint>
#include <cstring>

namespace {

float from_bfloat16(uint32_t half) {
    const uint32_t bits = half << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

}  // namespace

extern "C" {

// BLAS's sgemm: out (m, n) = alpha a b + beta out, of which out is not read where beta is 0. It counts by columns.
void plain_gemm(const char* ta, const char* tb, const int* m, const int* n, const int* k, const float* alpha,
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

// PyTorch's brgemm: out (m, n) = a b, to which `add` adds what was there; of b, two rows are interleaved.
void plain_brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldout, bool add,
                  const uint16_t* a, const uint32_t* b, float* out, bool) {
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t x = 0; x < k; ++x) {
                const uint32_t pair = b[x / 2 * ldb + j];
                sum += double(from_bfloat16(a[i * lda + x])) * from_bfloat16(x % 2 ? pair >> 16 : pair & 0xFFFF);
            }
            out[i * ldout + j] = float(sum) + (add ? out[i * ldout + j] : 0.0f);
        }
}

void plain_brgemm_release(bool) {}

int plain_set_threads(int threads) { return threads; }

}  // extern "C"

#ifdef __SANITIZE_THREAD__
// GCC's libgomp is not compiled for ThreadSanitizer, which cannot see that its threads wait for each other, and would
// call all that they share a race. The linker sends these calls here (--wrap): what OpenMP promises of each of them,
// and nothing else, is told to ThreadSanitizer.

#define UNSEEN __attribute__((no_sanitize("thread")))

extern "C" {

void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __real_GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
void __real_GOMP_barrier();
void __real_GOMP_loop_end();

}  // extern "C"

namespace {

struct Region {
    void (*work)(void*);
    void* data;
    char begin, end;
};

// A thread can be one barrier ahead of another, not two.
char barriers[2];
thread_local unsigned passed;

UNSEEN void run_thread(void* pointer) {
    Region& region = *static_cast<Region*>(pointer);
    passed = 0;
    __tsan_acquire(&region.begin);
    region.work(region.data);
    __tsan_release(&region.end);
}

UNSEEN void wait_by(void (*wait)()) {
    char* barrier = barriers + passed++ % 2;
    __tsan_release(barrier);
    wait();
    __tsan_acquire(barrier);
}

}  // namespace

extern "C" {

UNSEEN void __wrap_GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags) {
    Region region = {work, data};
    __tsan_release(&region.begin);
    __real_GOMP_parallel(run_thread, &region, threads, flags);
    __tsan_acquire(&region.end);
}

UNSEEN void __wrap_GOMP_barrier() { wait_by(__real_GOMP_barrier); }

UNSEEN void __wrap_GOMP_loop_end() { wait_by(__real_GOMP_loop_end); }

}  // extern "C"
#endif
