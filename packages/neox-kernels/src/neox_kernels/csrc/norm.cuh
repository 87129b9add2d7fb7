// Layer norm and RMS norm: one forward and one backward kernel. The maths: layer_norm.py, rms_norm.py.
//
// With ADDS, forward normalizes the sum of x and a residual, which it stores as well, and backward adds the gradient
// that arrives at the sum: neither takes a pass of its own.
//
// Forward reads a row into registers as floats, computes its statistics (the variance around the mean, not as a
// difference of squares), and writes the result.

#pragma once

#include "norm_backward.cuh"

namespace neox {

// Forward ------------------------------------------------------------------------------------------------------

// Reads a vector of the row; with ADDS, the sum of x and the residual, rounded as it is stored.
template <bool ADDS, typename T, int VEC>
__device__ inline void load_row(float (&values)[VEC], const T* x, const T* residual) {
  load_as_floats(values, x);
  if constexpr (ADDS) {
    float others[VEC];
    load_as_floats(others, residual);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      values[j] = to_float(from_float<T>(values[j] + others[j]));
    }
  }
}

template <bool CENTERED, bool ADDS, typename T, typename W, int VEC, int ITEMS>
__global__ void __launch_bounds__(kNormThreads, VEC * ITEMS == kShort ? 3 : kNormBlocks)
    norm_forward_kernel(const T* __restrict__ x, const T* __restrict__ residual, const W* __restrict__ weight,
                        const W* __restrict__ bias, T* __restrict__ sum, T* __restrict__ result,
                        float* __restrict__ mean, float* __restrict__ inverse_deviation, int64_t rows,
                        ColumnIndex<ITEMS> columns, float epsilon) {
  using Index = ColumnIndex<ITEMS>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; index < rows; index += step) {
    const int64_t start = index * columns;
    float kept[ITEMS > 0 ? ITEMS : 1][VEC];
    auto read = [&](int item, Index column) {
      load_row<ADDS>(kept[item], x + start + column, residual + start + column);
    };
    // The values of a vector: in registers, or read at each use.
    auto fetch = [&](int item, Index column) {
      if constexpr (ITEMS == 0) {
        read(item, column);
      }
    };
    if constexpr (ITEMS > 0) {
      for_each_of_row<VEC, ITEMS>(columns, read);
    }
    float center = 0.0f;
    if constexpr (CENTERED) {
      for_each_of_row<VEC, ITEMS>(columns, [&](int item, Index column) {
        fetch(item, column);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          center += kept[item][j];
        }
      });
      center = reduce_row<Sum>(center) / static_cast<float>(columns);
    }
    float squares = 0.0f;
    for_each_of_row<VEC, ITEMS>(columns, [&](int item, Index column) {
      fetch(item, column);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float distance = kept[item][j] - center;
        squares += distance * distance;
      }
    });
    const float inverse = rsqrtf(reduce_row<Sum>(squares) / static_cast<float>(columns) + epsilon);
    if (threadIdx.x == 0) {
      inverse_deviation[index] = inverse;
      if constexpr (CENTERED) {
        mean[index] = center;
      }
    }
    for_each_of_row<VEC, ITEMS>(columns, [&](int item, Index column) {
      fetch(item, column);
      float weights[VEC];
      float biases[VEC] = {};
      load_as_floats(weights, weight + column);
      if constexpr (CENTERED) {
        load_as_floats(biases, bias + column);
      }
      Vector<T, VEC> out;
      Vector<T, VEC> total;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float normal = (kept[item][j] - center) * inverse;
        out.values[j] = from_float<T>(normal * weights[j] + biases[j]);
        total.values[j] = from_float<T>(kept[item][j]);
      }
      store<VEC>(result + start + column, out);
      if constexpr (ADDS) {
        store<VEC>(sum + start + column, total);
      }
    });
  }
}

// Launching ----------------------------------------------------------------------------------------------------

template <typename T>
bool fills_vectors(int64_t columns) {
  return columns % static_cast<int64_t>(16 / sizeof(T)) == 0;
}

// Calls body(std::bool_constant{}): whether there is something to add.
template <typename Body>
void with_addition(const void* added, Body body) {
  if (added == nullptr) {
    return body(std::false_type{});
  }
  return body(std::true_type{});
}

template <bool CENTERED>
void norm_forward(const Launch& where, Dtype dtype, const void* x, const void* residual, Parameter weight,
                  Parameter bias, void* sum, void* result, float* mean, float* inverse_deviation, int64_t rows,
                  int64_t columns, float epsilon) {
  if (rows * columns == 0) {
    return;
  }
  if (CENTERED && bias.dtype != weight.dtype) {
    throw std::invalid_argument("norm: weight and bias must have the same type");
  }
  with_norm_types(dtype, weight.dtype, [&](auto type, auto of_parameters) {
    using T = typename decltype(type)::type;
    using W = typename decltype(of_parameters)::type;
    const bool vectorized = fills_vectors<T>(columns) && is_aligned(x) && is_aligned(residual) && is_aligned(sum) &&
                            is_aligned(result) && is_aligned(weight.address) && is_aligned(bias.address);
    with_norm_plan<T>(columns, vectorized, [&](auto vec, auto items, dim3 block) {
      const int64_t blocks = ceil_div(rows, block.y);
      const dim3 grid(static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX));
      with_addition(residual, [&](auto adds) {
        launch(where, grid, block, norm_forward_kernel<CENTERED, adds(), T, W, vec(), items()>,
               static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const W*>(weight.address),
               static_cast<const W*>(bias.address), static_cast<T*>(sum), static_cast<T*>(result), mean,
               inverse_deviation, rows, static_cast<ColumnIndex<items()>>(columns), epsilon);
      });
    });
  });
}

template <bool CENTERED>
int64_t norm_partial_rows(int device, Dtype dtype, Dtype of_parameters, int64_t rows, int64_t columns) {
  int64_t blocks = 1;
  with_norm_types(dtype, of_parameters, [&](auto type, auto weights) {
    using T = typename decltype(type)::type;
    using W = typename decltype(weights)::type;
    with_norm_plan<T>(columns, fills_vectors<T>(columns), [&](auto vec, auto items, dim3 block) {
      constexpr int kVec = vec();
      constexpr int kItems = items();
      const int64_t most = resident_blocks(device, block, norm_shared_bytes<CENTERED, T, W, kVec, kItems>(block),
                                           norm_backward_kernel<CENTERED, false, T, W, kVec, kItems>);
      // A row of sums is written and read: as much as two to three rows of data. So each block has eight rows, unless
      // multiprocessors would be idle.
      const int64_t rounds = ceil_div(rows, block.y);
      const int64_t multiprocessors = num_multiprocessors(device);
      const int64_t useful = ceil_div(rounds, 8);
      const int64_t wanted = useful < multiprocessors ? (rounds < multiprocessors ? rounds : multiprocessors) : useful;
      blocks = wanted < most ? wanted : most;
    });
  });
  return blocks < 1 ? 1 : blocks;
}

template <bool CENTERED>
void norm_backward(const Launch& where, Dtype dtype, const void* gradient, const void* of_sum, const void* x,
                   Parameter weight, const float* mean, const float* inverse_deviation, void* x_gradient,
                   ParameterGradient weight_gradient, ParameterGradient bias_gradient, float* partials,
                   int64_t partial_rows, int64_t rows, int64_t columns) {
  if (columns == 0) {
    return;
  }
  with_norm_types(dtype, weight.dtype, [&](auto type, auto of_parameters) {
    using T = typename decltype(type)::type;
    using W = typename decltype(of_parameters)::type;
    const bool vectorized = fills_vectors<T>(columns) && is_aligned(gradient) && is_aligned(of_sum) && is_aligned(x) &&
                            is_aligned(x_gradient) && is_aligned(weight.address) && is_aligned(partials);
    with_norm_plan<T>(columns, vectorized, [&](auto vec, auto items, dim3 block) {
      constexpr int kVec = vec();
      constexpr int kItems = items();
      with_addition(of_sum, [&](auto adds) {
        launch_with_shared(where, dim3(static_cast<unsigned>(partial_rows)), block,
                           norm_shared_bytes<CENTERED, T, W, kVec, kItems>(block),
                           norm_backward_kernel<CENTERED, adds(), T, W, kVec, kItems>, static_cast<const T*>(gradient),
                           static_cast<const T*>(of_sum), static_cast<const T*>(x),
                           static_cast<const W*>(weight.address), mean, inverse_deviation, static_cast<T*>(x_gradient),
                           partials, rows, static_cast<ColumnIndex<kItems>>(columns));
      });
    });
    sum_partials(where, partials, partial_rows, columns, weight_gradient, bias_gradient);
  });
}

}  // namespace neox
