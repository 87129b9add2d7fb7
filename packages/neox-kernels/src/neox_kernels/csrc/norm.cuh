// Layer norm and RMS norm: one forward and one backward kernel. The maths: layer_norm.py, rms_norm.py.
//
// Forward reads a row into registers, computes its statistics (the variance around the mean, not as a difference of
// squares), and writes the result. Backward computes the gradient of the row and, in the same pass, sums over rows for
// weight and bias, which stay in registers until the end of the block. Rows longer than 2,048 vectors are read again in
// each step, and their sums are in scratch memory.

#pragma once

#include "common.cuh"

namespace neox {

// VEC neighbouring elements of a weight or bias (in the activations' type or float32); `otherwise` if it is null.
template <typename T, int VEC>
__device__ inline void load_parameters(float (&values)[VEC], const Parameter& parameter, bool is_float, int64_t column,
                                       float otherwise) {
  if (parameter.address == nullptr) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      values[j] = otherwise;
    }
  } else if (is_float) {
    load_floats(values, static_cast<const float*>(parameter.address) + column);
  } else {
    const Vector<T, VEC> stored = load<VEC>(static_cast<const T*>(parameter.address) + column);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      values[j] = to_float(stored.values[j]);
    }
  }
}

template <bool CENTERED, typename T, int VEC, int ITEMS>
__global__ void __launch_bounds__(kMaxRowThreads)
    norm_forward_kernel(const T* x, Parameter weight, Parameter bias, bool is_float, T* result, float* mean,
                        float* inverse_deviation, int64_t rows, int64_t columns, float epsilon) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; index < rows; index += step) {
    const Row<T, VEC, ITEMS> row(x + index * columns, columns);
    float center = 0.0f;
    if constexpr (CENTERED) {
      for_each_vector<VEC, ITEMS>(columns, [&](int item, int64_t column) {
        const Vector<T, VEC> stored = row.vector(item, column);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          center += to_float(stored.values[j]);
        }
      });
      center = reduce_row<Sum>(center) / static_cast<float>(columns);
    }
    float squares = 0.0f;
    for_each_vector<VEC, ITEMS>(columns, [&](int item, int64_t column) {
      const Vector<T, VEC> stored = row.vector(item, column);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float distance = to_float(stored.values[j]) - center;
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
    for_each_vector<VEC, ITEMS>(columns, [&](int item, int64_t column) {
      const Vector<T, VEC> stored = row.vector(item, column);
      float weights[VEC];
      float biases[VEC];
      load_parameters<T>(weights, weight, is_float, column, 1.0f);
      load_parameters<T>(biases, bias, is_float, column, 0.0f);
      Vector<T, VEC> out;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float normal = (to_float(stored.values[j]) - center) * inverse;
        out.values[j] = from_float<T>(normal * weights[j] + biases[j]);
      }
      store<VEC>(result + index * columns + column, out);
    });
  }
}

// Adds the sums of the block's rows (threadIdx.y) and writes them as row blockIdx.x of `partials`.
template <int VEC, int ITEMS>
__device__ inline void write_row_partials(const float (&sums)[ITEMS][VEC], float* partials, int64_t columns) {
  constexpr int kSharedRows = 4;
  __shared__ float of_thread[kSharedRows][kWarp][VEC + 1];
  float* const target = partials + static_cast<int64_t>(blockIdx.x) * columns;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int64_t column = (static_cast<int64_t>(item) * blockDim.x + threadIdx.x) * VEC;
    float totals[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      totals[j] = sums[item][j];
    }
    if (blockDim.y > 1) {  // Here a row has one warp.
      __syncthreads();
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        of_thread[threadIdx.y][threadIdx.x][j] = totals[j];
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        totals[j] = 0.0f;
        for (int y = 0; y < kSharedRows; ++y) {
          totals[j] += of_thread[y][threadIdx.x][j];
        }
      }
    }
    if (threadIdx.y == 0 && column < columns) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        target[column + j] = totals[j];
      }
    }
  }
}

template <bool CENTERED, typename T, int VEC, int ITEMS>
__global__ void __launch_bounds__(kMaxRowThreads)
    norm_backward_kernel(const T* gradient, const T* x, Parameter weight, bool is_float, const float* mean,
                         const float* inverse_deviation, T* x_gradient, float* weight_partials, float* bias_partials,
                         int64_t rows, int64_t columns) {
  constexpr int kKept = ITEMS > 0 ? ITEMS : 1;
  float weight_sums[kKept][VEC] = {};
  float bias_sums[kKept][VEC] = {};
  if constexpr (ITEMS == 0) {
    for_each_vector<VEC, ITEMS>(columns, [&](int, int64_t column) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        weight_partials[blockIdx.x * columns + column + j] = 0.0f;
        if constexpr (CENTERED) {
          bias_partials[blockIdx.x * columns + column + j] = 0.0f;
        }
      }
    });
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; index < rows; index += step) {
    const Row<T, VEC, ITEMS> from_above(gradient + index * columns, columns);
    const Row<T, VEC, ITEMS> row(x + index * columns, columns);
    const float center = CENTERED ? mean[index] : 0.0f;
    const float inverse = inverse_deviation[index];

    float along = 0.0f;   // sum of weighted gradient times normalized value
    float across = 0.0f;  // sum of weighted gradient
    for_each_vector<VEC, ITEMS>(columns, [&](int item, int64_t column) {
      const Vector<T, VEC> g = from_above.vector(item, column);
      const Vector<T, VEC> stored = row.vector(item, column);
      float weights[VEC];
      load_parameters<T>(weights, weight, is_float, column, 1.0f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float above = to_float(g.values[j]);
        const float normal = (to_float(stored.values[j]) - center) * inverse;
        along += above * weights[j] * normal;
        across += above * weights[j];
        if constexpr (ITEMS > 0) {
          weight_sums[item][j] += above * normal;
          bias_sums[item][j] += above;
        } else {
          weight_partials[blockIdx.x * columns + column + j] += above * normal;
          if constexpr (CENTERED) {
            bias_partials[blockIdx.x * columns + column + j] += above;
          }
        }
      }
    });
    along = reduce_row<Sum>(along) / static_cast<float>(columns);
    across = CENTERED ? reduce_row<Sum>(across) / static_cast<float>(columns) : 0.0f;

    for_each_vector<VEC, ITEMS>(columns, [&](int item, int64_t column) {
      const Vector<T, VEC> g = from_above.vector(item, column);
      const Vector<T, VEC> stored = row.vector(item, column);
      float weights[VEC];
      load_parameters<T>(weights, weight, is_float, column, 1.0f);
      Vector<T, VEC> out;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float normal = (to_float(stored.values[j]) - center) * inverse;
        out.values[j] = from_float<T>(inverse * (to_float(g.values[j]) * weights[j] - normal * along - across));
      }
      store<VEC>(x_gradient + index * columns + column, out);
    });
  }
  if constexpr (ITEMS > 0) {
    write_row_partials(weight_sums, weight_partials, columns);
    if constexpr (CENTERED) {
      write_row_partials(bias_sums, bias_partials, columns);
    }
  }
}

// True if the parameters are float32 and the activations 16-bit; all parameters must have the same type.
inline bool parameters_are_float(Dtype dtype, const Parameter& weight, const Parameter& bias) {
  const Dtype given = weight.address != nullptr ? weight.dtype : bias.dtype;
  const bool mixed = weight.address != nullptr && bias.address != nullptr && weight.dtype != bias.dtype;
  if (mixed || (given != dtype && given != Dtype::float32)) {
    throw std::invalid_argument("norm: weight and bias must both be of the input's type or both float32");
  }
  return given == Dtype::float32;
}

template <bool CENTERED>
void norm_forward(const Launch& where, Dtype dtype, const void* x, Parameter weight, Parameter bias, void* result,
                  float* mean, float* inverse_deviation, int64_t rows, int64_t columns, float epsilon) {
  if (rows * columns == 0) {
    return;
  }
  const bool is_float = parameters_are_float(dtype, weight, bias);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectorized = columns % static_cast<int64_t>(16 / sizeof(T)) == 0 && is_aligned(x) &&
                            is_aligned(result) && is_aligned(weight.address) && is_aligned(bias.address);
    with_row_plan<T>(columns, vectorized, [&](auto vec, auto items, dim3 block) {
      const int64_t blocks = ceil_div(rows, block.y);
      const dim3 grid(static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX));
      launch(where, grid, block, norm_forward_kernel<CENTERED, T, vec(), items()>, static_cast<const T*>(x), weight,
             bias, is_float, static_cast<T*>(result), mean, inverse_deviation, rows, columns, epsilon);
    });
  });
}

template <bool CENTERED>
void norm_backward(const Launch& where, Dtype dtype, const void* gradient, const void* x, Parameter weight,
                   const float* mean, const float* inverse_deviation, void* x_gradient,
                   ParameterGradient weight_gradient, ParameterGradient bias_gradient, float* partials, int64_t rows,
                   int64_t columns) {
  if (columns == 0) {
    return;
  }
  const bool is_float = parameters_are_float(dtype, weight, Parameter{nullptr, weight.dtype});
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectorized = columns % static_cast<int64_t>(16 / sizeof(T)) == 0 && is_aligned(gradient) &&
                            is_aligned(x) && is_aligned(x_gradient) && is_aligned(weight.address);
    const int64_t blocks = norm_partial_rows(where.device, rows, columns);
    float* bias_partials = CENTERED ? partials + blocks * columns : nullptr;
    with_row_plan<T>(columns, vectorized, [&](auto vec, auto items, dim3 block) {
      launch(where, dim3(static_cast<unsigned>(blocks)), block, norm_backward_kernel<CENTERED, T, vec(), items()>,
             static_cast<const T*>(gradient), static_cast<const T*>(x), weight, is_float, mean, inverse_deviation,
             static_cast<T*>(x_gradient), partials, bias_partials, rows, columns);
    });
    sum_partials(where, partials, blocks, columns, weight_gradient);
    if (CENTERED && bias_gradient.address != nullptr) {
      sum_partials(where, bias_partials, blocks, columns, bias_gradient);
    }
  });
}

}  // namespace neox
