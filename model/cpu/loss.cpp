// Cross-entropy of rows of logits, in place, for the head's loss on a CPU (model/loss.py). __init__.py calls it.

#include "cpu.h"

namespace {

// Return the loss of one row. If `gradient`, the row becomes softmax - onehot, else its values are undefined.
float row_loss(float* x, int64_t target, int64_t vocabulary, bool gradient) {
    constexpr int64_t BLOCK = 1024;  // summed in float32; the total is a double
    const float at_target = x[target];
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
    if (gradient) {
        const float scale = 1 / total;
#pragma omp simd
        for (int64_t j = 0; j < vocabulary; ++j) x[j] *= scale;
        x[target] -= 1;
    }
    return std::log(total) + (top - at_target);
}

}  // namespace

extern "C" {

void cross_entropy(float* logits, const int64_t* targets, float* losses, int64_t rows, int64_t vocabulary,
                   int64_t gradient) {
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i) losses[i] = row_loss(logits + i * vocabulary, targets[i], vocabulary, gradient);
}

}  // extern "C"
