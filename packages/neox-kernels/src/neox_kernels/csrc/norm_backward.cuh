// Backward of norm.cuh.
//
// Backward is a grid of as many blocks as the device holds, each of which takes every n-th row. It computes the
// gradient of the row and, in the same pass, adds to the sums over rows for weight and bias. These would fill the
// registers, so that they are in shared memory, where each thread uses its own columns only. While a row is computed, the
// next one is read: into registers if there is room, else into the second-level cache. Two blocks of 256 threads with up
// to 128 registers are resident at every width:
//
//   columns    of a thread   kept in registers                  sums of weight    sums of bias
//   4,096      16            two factors per value, next row    shared memory     shared memory
//   8,192      32            row as it is stored, next row      shared memory     shared memory
//   16,384     64            nothing: the row is read twice     shared memory     registers and shared memory
//   more       in a loop     nothing: the row is read twice     scratch memory    scratch memory
//
// That is for 16-bit types. With float32, the next row is in registers up to 4,096 columns, and the loop begins above
// 8,192. Without vectors, there are 8 columns of a thread, or a loop above 2,048.

#pragma once

#include "norm_rows.cuh"

namespace neox {

// Where a thread of the backward kernel keeps what.
template <bool CENTERED, typename T, typename W, int VEC, int ITEMS>
struct Places {
  static constexpr int kColumns = VEC * ITEMS;
  static constexpr int kRowWords = 2 * ITEMS * Packed<T, VEC>::kWords;
  static constexpr int kRoom = 64;  // words of rows
  // Vectors whose sums of the bias are in registers. With all sums in shared memory, a block would have too much of it.
  static constexpr int kHeldItems = CENTERED && kColumns == kLong ? 6 : 0;
  // For the second pass: what the first computed of the row, or the row.
  static constexpr bool kKeepsTerms = ITEMS > 0 && kColumns <= kShort;
  static constexpr bool kKeepsRow = VEC > 1 && ITEMS > 0 && kColumns < kLong && kRowWords <= kRoom;
  static constexpr bool kReadsAhead = kKeepsRow && 2 * kRowWords <= kRoom;
  static constexpr bool kKeepsWeight = kReadsAhead && sizeof(W) == 2;
  static constexpr int kSharedColumns = kColumns + (CENTERED ? kColumns - kHeldItems * VEC : 0);
};

template <bool CENTERED, typename T, typename W, int VEC, int ITEMS>
int norm_shared_bytes(dim3 block) {
  using Kept = Places<CENTERED, T, W, VEC, ITEMS>;
  return static_cast<int>(block.x * block.y * Kept::kSharedColumns * sizeof(float));
}

// The sums of this thread's columns in shared memory: four neighbours at a time, threads next to each other.
template <int VEC>
class SharedSums {
 public:
  static constexpr int kWide = VEC % 4 == 0 ? 4 : 1;

  __device__ SharedSums(float* memory, int thread, int threads)
      : start_(memory + thread * kWide), distance_(threads * kWide) {}

  // The sums of another row of the block.
  __device__ SharedSums of(int threads_away) const { return SharedSums(start_ + threads_away * kWide, distance_); }

  __device__ void clear(int item) const {
    float zeros[VEC] = {};
    write(item, zeros);
  }

  __device__ void add(int item, const float (&values)[VEC]) const {
    float sums[VEC];
    read(item, sums);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      sums[j] += values[j];
    }
    write(item, sums);
  }

  __device__ void read(int item, float (&sums)[VEC]) const {
#pragma unroll
    for (int part = 0; part < VEC / kWide; ++part) {
      const float* const from = start_ + (item * (VEC / kWide) + part) * distance_;
      if constexpr (kWide == 4) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        sums[4 * part] = four.x;
        sums[4 * part + 1] = four.y;
        sums[4 * part + 2] = four.z;
        sums[4 * part + 3] = four.w;
      } else {
        sums[part] = *from;
      }
    }
  }

 private:
  __device__ SharedSums(float* start, int distance) : start_(start), distance_(distance) {}

  __device__ void write(int item, const float (&sums)[VEC]) const {
#pragma unroll
    for (int part = 0; part < VEC / kWide; ++part) {
      float* const to = start_ + (item * (VEC / kWide) + part) * distance_;
      if constexpr (kWide == 4) {
        *reinterpret_cast<float4*>(to) =
            make_float4(sums[4 * part], sums[4 * part + 1], sums[4 * part + 2], sums[4 * part + 3]);
      } else {
        *to = sums[part];
      }
    }
  }

  float* start_;
  int distance_;
};

// The normalized values of a row. 16-bit values do not notice that their distance from the mean is not exact: theirs is
// one multiplication and addition.
template <typename T>
class Normal {
 public:
  __device__ Normal(float center, float inverse)
      : center_(sizeof(T) == 2 ? -center * inverse : center), inverse_(inverse) {}

  __device__ float of(float value) const { return of(value, 1.0f, 0.0f); }

  // Times `factor`, plus `added`.
  __device__ float of(float value, float factor, float added) const {
    if constexpr (sizeof(T) == 2) {
      return value * (inverse_ * factor) + (center_ * factor + added);
    } else {
      return (value - center_) * (inverse_ * factor) + added;
    }
  }

 private:
  float center_;  // with 16-bit values: what is added to value * inverse
  float inverse_;
};

// One or two sums over the threads of a row with one barrier: rows alternate between two places, so that no thread
// writes to one before all have read it. Of two sums, each half of a warp adds one.
template <bool BOTH>
__device__ inline float2 reduce_sums(float2 sums, int place) {
  constexpr int kLanes = BOTH ? kWarp / 2 : kWarp;
  constexpr int kWarps = kNormThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  float sum = sums.x;
  if constexpr (BOTH) {
    const bool upper = lane >= kLanes;
    sum = (upper ? sums.y : sums.x) + __shfl_xor_sync(0xffffffffu, upper ? sums.x : sums.y, kLanes);
  }
  sum = reduce_warp<Sum, kLanes>(sum);
  if (blockDim.x > kWarp) {
    __shared__ float of_warp[2][kWarp / kLanes][kWarps];
    if (lane % kLanes == 0) {
      of_warp[place][lane / kLanes][threadIdx.x / kWarp] = sum;
    }
    __syncthreads();
    const int warp = lane % kWarps;
    sum = warp < static_cast<int>(blockDim.x) / kWarp ? of_warp[place][lane / kLanes][warp] : 0.0f;
    sum = reduce_warp<Sum, kWarps>(sum);
  }
  if constexpr (BOTH) {
    return {__shfl_sync(0xffffffffu, sum, 0), __shfl_sync(0xffffffffu, sum, kLanes)};
  }
  return {sum, 0.0f};
}

// `partials` has a row of sums per block for the weight, then one per block for the bias. With ADDS, `of_sum` is the
// gradient of the sum that was normalized, apart from what comes through the norm.
template <bool CENTERED, bool ADDS, typename T, typename W, int VEC, int ITEMS>
__global__ void __launch_bounds__(kNormThreads, kNormBlocks)
    norm_backward_kernel(const T* __restrict__ gradient, const T* __restrict__ of_sum, const T* __restrict__ x,
                         const W* __restrict__ weight, const float* __restrict__ mean,
                         const float* __restrict__ inverse_deviation, T* __restrict__ x_gradient,
                         float* __restrict__ partials, int64_t rows, ColumnIndex<ITEMS> columns) {
  using Index = ColumnIndex<ITEMS>;
  using Kept = Places<CENTERED, T, W, VEC, ITEMS>;
  constexpr int kItems = Kept::kKeepsRow ? ITEMS : 1;
  NEOX_DYNAMIC_SHARED(memory);
  const int threads = kThreads<VEC * ITEMS> > 0 ? kThreads<VEC * ITEMS> : static_cast<int>(blockDim.x * blockDim.y);
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const SharedSums<VEC> weight_sums(memory, thread, threads);
  const SharedSums<VEC> bias_sums(memory + threads * Kept::kColumns, thread, threads);
  float held_bias_sums[Kept::kHeldItems > 0 ? Kept::kHeldItems : 1][VEC] = {};
  float* const weight_partials = partials + static_cast<int64_t>(blockIdx.x) * columns;
  float* const bias_partials = weight_partials + static_cast<int64_t>(gridDim.x) * columns;

  for_each_of_row<VEC, ITEMS>(columns, [&](int item, Index column) {
    if constexpr (ITEMS == 0) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        weight_partials[column + j] = 0.0f;
        if constexpr (CENTERED) {
          bias_partials[column + j] = 0.0f;
        }
      }
    } else {
      weight_sums.clear(item);
      if (CENTERED && item >= Kept::kHeldItems) {
        bias_sums.clear(item - Kept::kHeldItems);
      }
    }
  });

  Packed<T, VEC> above[kItems];
  Packed<T, VEC> values[kItems];
  Packed<T, VEC> next_above[kItems];
  Packed<T, VEC> next_values[kItems];
  // The two factors of each value: its gradient times the weight, and the normalized value.
  float weighted[Kept::kKeepsTerms ? ITEMS : 1][VEC];
  float normal[Kept::kKeepsTerms ? ITEMS : 1][VEC];
  Packed<W, VEC> kept_weight[Kept::kKeepsWeight ? ITEMS : 1];
  if constexpr (Kept::kKeepsWeight) {
    for_each_of_row<VEC, ITEMS>(columns, [&](int item, Index column) { kept_weight[item].read(weight + column); });
  }
  auto read_row = [&](Packed<T, VEC>(&to_above)[kItems], Packed<T, VEC>(&to_values)[kItems], const T* gradient_row,
                      const T* row_of_x) {
    for_each_of_row<VEC, ITEMS>(columns, [&](int item, Index column) {
      to_above[item].read(gradient_row + column);
      to_values[item].read(row_of_x + column);
    });
  };

  const int row_step = static_cast<int>(gridDim.x * blockDim.y);
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if constexpr (Kept::kReadsAhead) {
    if (row < rows) {
      read_row(next_above, next_values, gradient + row * columns, x + row * columns);
    }
  }
  const float of_row = 1.0f / static_cast<float>(columns);
  for (int place = 0; row < rows; row += row_step, place ^= 1) {
    const int64_t start = row * columns;
    const int64_t step = static_cast<int64_t>(row_step) * columns;
    const float inverse = inverse_deviation[row];
    const Normal<T> normalized(CENTERED ? mean[row] : 0.0f, inverse);
    if constexpr (Kept::kReadsAhead) {
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        above[item] = next_above[item];
        values[item] = next_values[item];
      }
    } else if constexpr (Kept::kKeepsRow) {
      read_row(above, values, gradient + start, x + start);
    }
    // The vectors of the row and of the weight: unpacked or read again in each of two passes.
    int64_t place_of_row = start;
    const W* weights_from = read_after(inverse, weight);
    auto fetch = [&](Index column) {
      if constexpr (!Kept::kKeepsRow) {
        above[0].read(gradient + place_of_row + column);
        values[0].read(x + place_of_row + column);
      }
    };
    auto weights_of = [&](int item, Index column, float(&weights)[VEC]) {
      if constexpr (Kept::kKeepsWeight) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          weights[j] = kept_weight[item].value(j);
        }
      } else {
        load_as_floats(weights, weights_from + column);
      }
    };

    float2 sums = {0.0f, 0.0f};  // of weighted gradients times normalized values, and of weighted gradients
    for_each_of_row<VEC, ITEMS>(columns, [&](int item, Index column) {
      const int slot = Kept::kKeepsRow ? item : 0;
      const int term = Kept::kKeepsTerms ? item : 0;
      fetch(column);
      if (!Kept::kReadsAhead && row + row_step < rows) {
        prefetch(gradient + place_of_row + step + column);
        prefetch(x + place_of_row + step + column);
      }
      float weights[VEC];
      weights_of(item, column, weights);
      float for_weight[VEC];
      float for_bias[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        for_bias[j] = above[slot].value(j);
        normal[term][j] = normalized.of(values[slot].value(j));
        weighted[term][j] = for_bias[j] * weights[j];
        sums.x += weighted[term][j] * normal[term][j];
        sums.y += weighted[term][j];
        for_weight[j] = for_bias[j] * normal[term][j];
      }
      if constexpr (ITEMS == 0) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          weight_partials[column + j] += for_weight[j];
          if constexpr (CENTERED) {
            bias_partials[column + j] += for_bias[j];
          }
        }
      } else {
        weight_sums.add(item, for_weight);
        if (item < Kept::kHeldItems) {
#pragma unroll
          for (int j = 0; j < VEC; ++j) {
            held_bias_sums[item][j] += for_bias[j];
          }
        } else if constexpr (CENTERED) {
          bias_sums.add(item - Kept::kHeldItems, for_bias);
        }
      }
    });
    place_of_row = read_after(sums.x, place_of_row);
    weights_from = read_after(sums.x, weights_from);
    if constexpr (Kept::kReadsAhead) {
      if (row + row_step < rows) {
        read_row(next_above, next_values, gradient + place_of_row + step, x + place_of_row + step);
      }
    }
    sums = reduce_sums<CENTERED>(sums, place);
    const float along = -inverse * sums.x * of_row;
    const float across = CENTERED ? -inverse * sums.y * of_row : 0.0f;
    // Read early, it would take the registers that a row takes which is not kept.
    const T* const of_sum_row = Kept::kKeepsRow ? of_sum + start : read_after(along, of_sum + start);

    for_each_of_row<VEC, ITEMS>(columns, [&](int item, Index column) {
      [[maybe_unused]] Packed<T, VEC> others;
      if constexpr (ADDS) {
        others.read(of_sum_row + column);
        if (row + row_step < rows) {
          prefetch(of_sum_row + step + column);
        }
      }
      Vector<T, VEC> out;
      float weights[VEC];
      const int slot = Kept::kKeepsRow ? item : 0;
      if constexpr (!Kept::kKeepsTerms) {
        fetch(column);
        if constexpr (Kept::kKeepsRow) {
          above[slot].forget_values();
          values[slot].forget_values();
        }
        if constexpr (Kept::kKeepsWeight) {
          kept_weight[item].forget_values();
        }
        weights_of(item, column, weights);
      }
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        float value;
        if constexpr (Kept::kKeepsTerms) {
          value = inverse * weighted[item][j] + (normal[item][j] * along + across);
        } else {
          value = inverse * (above[slot].value(j) * weights[j]) +
                  normalized.of(values[slot].value(j), along, across);
        }
        if constexpr (ADDS) {
          value += others.value(j);
        }
        out.values[j] = from_float<T>(value);
      }
      store<VEC>(x_gradient + start + column, out);
    });
  }

  if constexpr (ITEMS > 0) {
    __syncthreads();
    // Rows of a block, each of one warp, are added by the threads of the first.
    for_each_of_row<VEC, ITEMS>(columns, [&](int item, Index column) {
      float of_weight[VEC];
      float of_bias[VEC] = {};
      if (threadIdx.y > 0) {
        return;
      }
      weight_sums.read(item, of_weight);
      if (item < Kept::kHeldItems) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          of_bias[j] = held_bias_sums[item][j];
        }
      } else if constexpr (CENTERED) {
        bias_sums.read(item - Kept::kHeldItems, of_bias);
      }
      for (int y = 1; y < static_cast<int>(blockDim.y); ++y) {
        float others[VEC];
        weight_sums.of(y * kWarp).read(item, others);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          of_weight[j] += others[j];
        }
        if (CENTERED && item >= Kept::kHeldItems) {  // Rows with sums in registers have several warps.
          bias_sums.of(y * kWarp).read(item - Kept::kHeldItems, others);
#pragma unroll
          for (int j = 0; j < VEC; ++j) {
            of_bias[j] += others[j];
          }
        }
      }
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        weight_partials[column + j] = of_weight[j];
        if constexpr (CENTERED) {
          bias_partials[column + j] = of_bias[j];
        }
      }
    });
  }
}

}  // namespace neox
