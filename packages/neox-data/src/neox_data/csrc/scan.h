// Part of native.cpp: the order of a blend of up to a few hundred datasets, by scanning all of them for each item.
//
// Each item depends on the previous one, so a single sequence leaves most of a core idle. Eight segments are therefore
// computed at the same time. The state at the start of a segment is estimated: each dataset's share, rounded so that
// the sum is right. The estimate usually converges to the true state after a few items. A segment is accepted only if
// its start equals the end of the previous one for every dataset; otherwise it is computed again.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int64_t kSlice = 256, kStreams = 8, kWarmUp = 512, kMostBlocks = 16;

// (weights, taken [streams, padded], padded, first item of each stream, items, found [streams, kSlice], scratch memory
// [streams, padded])
using ScanKernel = void (*)(const double*, double*, int64_t, const int64_t*, int64_t, uint16_t*, double*);

// A one between zeros: a vector loaded from kOne + 7 - j has the one in lane j.
alignas(64) static const double kOne[16] = {0, 0, 0, 0, 0, 0, 0, 1};

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
constexpr int kWidth = 4;
using Vector = __m256d;
static inline Vector load(const double* place) { return _mm256_loadu_pd(place); }
static inline void store(double* place, Vector a) { _mm256_storeu_pd(place, a); }
static inline Vector broadcast(double a) { return _mm256_set1_pd(a); }
static inline Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
static inline Vector subtract(Vector a, Vector b) { return _mm256_sub_pd(a, b); }
static inline Vector multiply(Vector a, Vector b) { return _mm256_mul_pd(a, b); }
static inline Vector larger(Vector a, Vector b) { return _mm256_max_pd(a, b); }
static inline int equal_lanes(Vector a, Vector b) { return _mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_EQ_OQ)); }
static inline Vector largest(Vector a) {
  a = larger(a, _mm256_permute2f128_pd(a, a, 1));
  return larger(a, _mm256_permute_pd(a, 5));
}
#include "scan_kernel.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq")
namespace avx512 {
constexpr int kWidth = 8;
using Vector = __m512d;
static inline Vector load(const double* place) { return _mm512_loadu_pd(place); }
static inline void store(double* place, Vector a) { _mm512_storeu_pd(place, a); }
static inline Vector broadcast(double a) { return _mm512_set1_pd(a); }
static inline Vector add(Vector a, Vector b) { return _mm512_add_pd(a, b); }
static inline Vector subtract(Vector a, Vector b) { return _mm512_sub_pd(a, b); }
static inline Vector multiply(Vector a, Vector b) { return _mm512_mul_pd(a, b); }
static inline Vector larger(Vector a, Vector b) { return _mm512_max_pd(a, b); }
static inline int equal_lanes(Vector a, Vector b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
static inline Vector largest(Vector a) {
  a = larger(a, _mm512_shuffle_f64x2(a, a, 0x4e));
  a = larger(a, _mm512_shuffle_f64x2(a, a, 0xb1));
  return larger(a, _mm512_permute_pd(a, 0x55));
}
#include "scan_kernel.inc"
}  // namespace avx512
#pragma GCC pop_options
#endif

namespace plain {
template <int kStreams>
static void scan(const double* weights, double* taken, int64_t padded, const int64_t* first, int64_t count,
                 uint16_t* found, double* deficits) {
  for (int s = 0; s < kStreams; ++s, taken += padded) {
    for (int64_t k = 0; k < count; ++k) {
      double items = static_cast<double>(std::max<int64_t>(first[s] + k, 1));
      for (int64_t j = 0; j < padded; ++j) deficits[j] = weights[j] * items - taken[j];
      int64_t furthest = std::max_element(deficits, deficits + padded) - deficits;
      taken[furthest] += 1;
      found[s * kSlice + k] = static_cast<uint16_t>(furthest);
    }
  }
}
}  // namespace plain

// The best instruction set of the processor.
struct ScanKernels {
  int64_t padded;
  ScanKernel one, many;

  // `most_lanes`: the widest vectors to use, if the processor supports them.
  ScanKernels(int64_t num_datasets, int64_t most_lanes)
      : padded(num_datasets), one(plain::scan<1>), many(plain::scan<kStreams>) {
#if defined(__x86_64__)
    if (most_lanes >= avx512::kWidth && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
      padded = avx512::padded_size(num_datasets);
      one = avx512::choose_kernel<1>(padded);
      many = avx512::choose_kernel<kStreams>(padded);
    } else if (most_lanes >= avx2::kWidth && __builtin_cpu_supports("avx2")) {
      padded = avx2::padded_size(num_datasets);
      one = avx2::choose_kernel<1>(padded);
      many = avx2::choose_kernel<kStreams>(padded);
    }
#endif
  }
};

template <typename T>
class Scan {
 public:
  Scan(const double* weights, int64_t num_datasets, T* order, int64_t* taken_before, int64_t block, int64_t most_lanes)
      : kernels_(num_datasets, most_lanes), num_datasets_(num_datasets), order_(order), taken_before_(taken_before), block_(block),
        weights_(kernels_.padded, 0.0), deficits_(kStreams * kernels_.padded), found_(kStreams * kSlice) {
    std::copy(weights, weights + num_datasets, weights_.begin());
  }

  void run(int64_t num_items) {
    State state = started();
    int64_t first = 0, wait = 0, patience = 1;
    int64_t stretch = std::min(num_items / (kStreams * block_), kMostBlocks) * block_;
    while (first < num_items) {
      if (stretch >= kWarmUp && !wait && num_items - first >= kStreams * stretch) {
        int64_t good = run_side_by_side(state, first, stretch);
        first += good * stretch;
        // If estimates keep failing, retry after increasing intervals.
        wait = good == kStreams ? 0 : patience;
        patience = good == kStreams ? 1 : 2 * patience;
      } else {
        int64_t count = std::min(block_, num_items - first);
        advance(kernels_.one, 1, state.data(), &first, count, order_ + first, 0);
        first += count;
        wait = std::max<int64_t>(wait - 1, 0);
      }
    }
    if (num_items % block_ == 0) note(state.data(), num_items);
  }

 private:
  using State = std::vector<double>;

  // Nothing taken; the padding of a vector is never selected.
  State started() const {
    State state(kernels_.padded, std::numeric_limits<double>::infinity());
    std::fill_n(state.begin(), num_datasets_, 0.0);
    return state;
  }

  // Returns the number of accepted segments, at least one; `state` is the state after the last of them.
  int64_t run_side_by_side(State& state, int64_t first, int64_t stretch) {
    int64_t padded = kernels_.padded, begins[kStreams], warm[kStreams];
    State states(kStreams * padded), began;
    for (int64_t s = 0; s < kStreams; ++s) {
      begins[s] = first + s * stretch;
      warm[s] = s ? begins[s] - kWarmUp : begins[s];
      State start = s ? guess(warm[s]) : state;
      std::copy(start.begin(), start.end(), states.begin() + s * padded);
    }
    advance(kernels_.many, kStreams, states.data(), warm, kWarmUp, nullptr, 0);
    std::copy(state.begin(), state.end(), states.begin());
    began = states;
    advance(kernels_.many, kStreams, states.data(), begins, stretch, order_ + first, stretch);
    int64_t good = 1;
    while (good < kStreams && std::equal(began.begin() + good * padded, began.begin() + (good + 1) * padded,
                                         states.begin() + (good - 1) * padded))
      ++good;
    std::copy_n(states.begin() + (good - 1) * padded, padded, state.begin());
    return good;
  }

  // Shares of the first `items`, rounded down, plus one for the largest remainders, so that the sum is right.
  State guess(int64_t items) const {
    State state = started(), lost(num_datasets_);
    double missing = static_cast<double>(items);
    for (int64_t j = 0; j < num_datasets_; ++j) {
      double share = weights_[j] * static_cast<double>(items);
      state[j] = std::floor(share);
      lost[j] = share - state[j];
      missing -= state[j];
    }
    std::vector<int64_t> by_loss(num_datasets_);
    std::iota(by_loss.begin(), by_loss.end(), 0);
    std::stable_sort(by_loss.begin(), by_loss.end(), [&lost](int64_t a, int64_t b) { return lost[a] > lost[b]; });
    for (int64_t i = 0; i < num_datasets_ && i < missing; ++i) state[by_loss[i]] += 1;
    return state;
  }

  // Advances each stream by `count` items; writes them to `order`, a stream every `stride` places, unless it is null.
  void advance(ScanKernel kernel, int64_t streams, double* states, const int64_t* begins, int64_t count, T* order,
               int64_t stride) {
    int64_t now[kStreams];
    for (int64_t done = 0; done < count;) {
      int64_t slice = std::min({kSlice, count - done, block_ - done % block_});
      for (int64_t s = 0; s < streams; ++s) {
        now[s] = begins[s] + done;
        if (order && done % block_ == 0) note(states + s * kernels_.padded, now[s]);
      }
      kernel(weights_.data(), states, kernels_.padded, now, slice, found_.data(), deficits_.data());
      for (int64_t s = 0; order && s < streams; ++s)
        std::copy_n(found_.begin() + s * kSlice, slice, order + s * stride + done);
      done += slice;
    }
  }

  // Number of items taken from each dataset before the first item of a block.
  void note(const double* state, int64_t item) {
    std::copy_n(state, num_datasets_, taken_before_ + item / block_ * num_datasets_);
  }

  ScanKernels kernels_;
  int64_t num_datasets_;
  T* order_;
  int64_t* taken_before_;
  int64_t block_;
  std::vector<double> weights_, deficits_;
  std::vector<uint16_t> found_;
};

// Fills `order`, and the number of items taken from each dataset before each block.
template <typename T>
void blend_by_scanning(const double* weights, int64_t num_datasets, T* order, int64_t num_items, int64_t* taken_before,
                       int64_t block, int64_t most_lanes) {
  Scan<T>(weights, num_datasets, order, taken_before, block, most_lanes).run(num_items);
}
