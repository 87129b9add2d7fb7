// Cross entropy of rows of logits: the logarithm of the softmax's denominator, the label's logit, and the gradient,
// which overwrites the logits. The maths: cross_entropy.py.
//
// A block computes a row. The first pass keeps a running maximum and sum in each thread, and the row in shared memory if it
// fits (50,000 16-bit logits in 100 KiB); the second writes the gradient. Longer rows are read again, from the cache.
// Either pass can be left out.

#include "common.cuh"

namespace neox {
namespace {

constexpr int kLossThreads = 512;
constexpr int64_t kOtherSharedBytes = 1024;  // of reductions, which have their own

// The number of a vector; a row in shared memory has fewer than 2^31.
template <bool IN_SHARED>
using Place = std::conditional_t<IN_SHARED, int, int64_t>;

template <typename T, int VEC>
__device__ inline void add_exponentials(const float (&values)[VEC], float& peak, float& total) {
  float highest = values[0];
#pragma unroll
  for (int j = 1; j < VEC; ++j) {
    highest = fmaxf(highest, values[j]);
  }
  if (highest > peak) {
    total *= exponential<T>(peak - highest);
    peak = highest;
  }
  const float base = peak == -INFINITY ? 0.0f : peak;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    total += exponential<T>(values[j] - base);
  }
}

// log(sum(exp(row))) in all threads. Copies whole vectors to `kept`, which each thread reads where it has written.
template <typename T, int VEC, bool IN_SHARED>
__device__ inline float log_total_of(const T* row, int64_t width, Words<T, VEC>* kept) {
  using Index = Place<IN_SHARED>;
  const Index whole = static_cast<Index>(width / VEC);
  float peak = -INFINITY;
  float total = 0.0f;
#pragma unroll 4
  for (Index i = threadIdx.x; i < whole; i += blockDim.x) {
    const Words<T, VEC> words = load_words<VEC>(row + static_cast<int64_t>(i) * VEC);
    if constexpr (IN_SHARED) {
      kept[i] = words;
    }
    float values[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      values[j] = words.value(j);
    }
    add_exponentials<T>(values, peak, total);
  }
  const int64_t tail = static_cast<int64_t>(whole) * VEC + threadIdx.x;
  if (tail < width) {  // Fewer than VEC columns.
    const float value[1] = {to_float(row[tail])};
    add_exponentials<T>(value, peak, total);
  }
  const float row_peak = reduce_row<Maximum>(peak);
  const float base = row_peak == -INFINITY ? 0.0f : row_peak;
  return base + logf(reduce_row<Sum>(total * expf(peak - base)));
}

template <typename T, int VEC, bool IN_SHARED>
__global__ void __launch_bounds__(kLossThreads, 2)
    cross_entropy_kernel(T* __restrict__ logits, const int64_t* __restrict__ labels, const float* __restrict__ weights,
                         const float* __restrict__ given_log_totals, float* __restrict__ log_totals,
                         float* __restrict__ picked, int64_t columns, int64_t width) {
  NEOX_DYNAMIC_SHARED(shared);
  Words<T, VEC>* const kept = reinterpret_cast<Words<T, VEC>*>(shared);
  const int64_t row_number = blockIdx.x;
  T* row = logits + row_number * columns;
  const int64_t label = labels[row_number];
  const bool is_here = label >= 0 && label < width;
  const float of_label = is_here ? to_float(row[label]) : 0.0f;
  if (threadIdx.x == 0) {
    picked[row_number] = of_label;
  }
  __syncthreads();  // The label's logit is read before it is overwritten.
  const float log_total = given_log_totals == nullptr ? log_total_of<T, VEC, IN_SHARED>(row, width, kept)
                                                      : given_log_totals[row_number];
  if (threadIdx.x == 0) {
    log_totals[row_number] = log_total;
  }
  if (weights == nullptr) {
    return;
  }
  const float weight = weights[row_number];
  using Index = Place<IN_SHARED>;
  const Index whole = static_cast<Index>(width / VEC);
#pragma unroll 2
  for (Index i = threadIdx.x; i < whole; i += blockDim.x) {
    T* const place = row + static_cast<int64_t>(i) * VEC;
    Words<T, VEC> words;
    if constexpr (IN_SHARED) {
      words = kept[i];
    } else {
      words = load_words<VEC>(place);
    }
    Vector<T, VEC> written;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      written.values[j] = from_float<T>(exponential<T>(words.value(j) - log_total) * weight);
    }
    store<VEC>(place, written);
  }
  for (int64_t column = static_cast<int64_t>(whole) * VEC + threadIdx.x; column < columns; column += blockDim.x) {
    const float softmax = column < width ? exponential<T>(to_float(row[column]) - log_total) : 0.0f;
    store<1>(row + column, Vector<T, 1>{{from_float<T>(column < width ? softmax * weight : 0.0f)}});
  }
  __syncthreads();
  if (is_here && threadIdx.x == 0) {
    const float softmax = exponential<T>(of_label - log_total);
    store<1>(row + label, Vector<T, 1>{{from_float<T>(softmax * weight - weight)}});
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
    const dim3 block(static_cast<unsigned>(threads < 1 ? kWarp : threads < kLossThreads ? threads : kLossThreads));
    const dim3 grid(static_cast<unsigned>(rows));
    const int64_t bytes = columns * static_cast<int64_t>(sizeof(T));
    const bool is_read_twice = weights != nullptr && given_log_totals == nullptr;
    const auto run = [&](int shared_bytes, auto kernel) {
      launch_with_shared(where, grid, block, shared_bytes, kernel, static_cast<T*>(logits), labels, weights,
                         given_log_totals, log_totals, picked, columns, width);
    };
    if (!is_vectorized) {
      return run(0, cross_entropy_kernel<T, 1, false>);
    }
    if (is_read_twice && bytes + kOtherSharedBytes <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, where.device)) {
      return run(static_cast<int>(bytes), cross_entropy_kernel<T, kVec, true>);
    }
    run(0, cross_entropy_kernel<T, kVec, false>);
  });
}

}  // namespace neox
