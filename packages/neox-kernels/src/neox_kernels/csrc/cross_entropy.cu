// Cross entropy of rows of logits: the logarithm of the softmax's denominator, the label's logit, and the gradient,
// which overwrites the logits. The maths: cross_entropy.py.
//
// A block computes a row. The first pass keeps a running maximum and sum in each thread; the second reads the row
// again, from the cache if it fits, and writes the gradient. Either can be left out.

#include "common.cuh"

namespace neox {
namespace {

constexpr int kLossThreads = 512;

// Logits of one vector as floats; -inf beyond the vocabulary.
template <typename T, int VEC>
__device__ inline void read_logits(const T* row, int64_t column, int64_t width, float (&values)[VEC]) {
  const Vector<T, VEC> stored = load<VEC>(row + column);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    values[j] = column + j < width ? to_float(stored.values[j]) : -INFINITY;
  }
}

// log(sum(exp(row))) in all threads.
template <typename T, int VEC>
__device__ inline float log_total_of(const T* row, int64_t width) {
  const int64_t step = static_cast<int64_t>(blockDim.x) * VEC;
  float peak = -INFINITY;
  float total = 0.0f;
#pragma unroll 2
  for (int64_t column = static_cast<int64_t>(threadIdx.x) * VEC; column < width; column += step) {
    float values[VEC];
    read_logits<T, VEC>(row, column, width, values);
    float highest = values[0];
#pragma unroll
    for (int j = 1; j < VEC; ++j) {
      highest = fmaxf(highest, values[j]);
    }
    if (highest > peak) {
      total *= expf(peak - highest);
      peak = highest;
    }
    const float base = peak == -INFINITY ? 0.0f : peak;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      total += expf(values[j] - base);
    }
  }
  const float row_peak = reduce_row<Maximum>(peak);
  const float base = row_peak == -INFINITY ? 0.0f : row_peak;
  return base + logf(reduce_row<Sum>(total * expf(peak - base)));
}

template <typename T, int VEC>
__global__ void __launch_bounds__(kLossThreads)
    cross_entropy_kernel(T* logits, const int64_t* labels, const float* weights, const float* given_log_totals,
                         float* log_totals, float* picked, int64_t columns, int64_t width) {
  const int64_t row_number = blockIdx.x;
  T* row = logits + row_number * columns;
  const int64_t label = labels[row_number];
  const bool is_here = label >= 0 && label < width;
  if (threadIdx.x == 0) {
    picked[row_number] = is_here ? to_float(row[label]) : 0.0f;
  }
  __syncthreads();  // The label's logit is read before it is overwritten.
  const float log_total = given_log_totals == nullptr ? log_total_of<T, VEC>(row, width) : given_log_totals[row_number];
  if (threadIdx.x == 0) {
    log_totals[row_number] = log_total;
  }
  if (weights == nullptr) {
    return;
  }
  const float weight = weights[row_number];
  const int64_t step = static_cast<int64_t>(blockDim.x) * VEC;
#pragma unroll 2
  for (int64_t column = static_cast<int64_t>(threadIdx.x) * VEC; column < columns; column += step) {
    float values[VEC];
    read_logits<T, VEC>(row, column, width, values);
    Vector<T, VEC> written;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float softmax = expf(values[j] - log_total);
      const float hit = is_here && column + j == label ? weight : 0.0f;
      written.values[j] = from_float<T>(column + j < width ? softmax * weight - hit : 0.0f);
    }
    store(row + column, written);
  }
}

}  // namespace

void cross_entropy(const Launch& where, Dtype dtype, void* logits, const int64_t* labels, const float* weights,
                   const float* given_log_totals, float* log_totals, float* picked, int64_t rows, int64_t columns,
                   int64_t width) {
  if (rows == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kVec = 16 / sizeof(T);
    const bool is_vectorized = is_aligned(logits) && columns % kVec == 0;
    const int64_t vectors = is_vectorized ? columns / kVec : columns;
    const int64_t threads = ceil_div(vectors, kWarp) * kWarp;
    const dim3 block(static_cast<unsigned>(threads < kLossThreads ? threads : kLossThreads));
    const auto kernel = is_vectorized ? cross_entropy_kernel<T, kVec> : cross_entropy_kernel<T, 1>;
    launch(where, dim3(static_cast<unsigned>(rows)), block, kernel, static_cast<T*>(logits), labels, weights,
           given_log_totals, log_totals, picked, columns, width);
  });
}

}  // namespace neox
