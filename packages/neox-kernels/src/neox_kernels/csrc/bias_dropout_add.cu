// residual + dropout(x + bias). The maths: bias_dropout_add.py; the random bits: philox.py.
//
// The mask is not stored: forward and backward compute it from the seed and the element's index, independent of the
// launch configuration, the vector width and the device.

#include "columns.cuh"

namespace neox {
namespace {

struct Bits {
  uint32_t values[4];
};

// Philox4x32-10 with the seed as key and `group` as counter: the random bits of elements 4 * group ... 4 * group + 3.
__device__ inline Bits philox(uint64_t seed, uint64_t group) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(group);
  uint32_t c1 = static_cast<uint32_t>(group >> 32);
  uint32_t c2 = 0;
  uint32_t c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Dropout factors (0 or keep_scale) of VEC neighbours, starting at element `first`.
template <int VEC>
__device__ inline void dropout_factors(float (&factors)[VEC], uint64_t seed, int64_t first, int64_t keep_below,
                                       float keep_scale) {
  if constexpr (VEC == 1) {
    const Bits bits = philox(seed, static_cast<uint64_t>(first) / 4);
    const int lane = static_cast<int>(first % 4);
    const uint32_t low = lane % 2 == 0 ? bits.values[0] : bits.values[1];
    const uint32_t high = lane % 2 == 0 ? bits.values[2] : bits.values[3];
    factors[0] = static_cast<int64_t>(lane < 2 ? low : high) < keep_below ? keep_scale : 0.0f;
  } else {
    // `first` is a multiple of VEC, and VEC of 4.
#pragma unroll
    for (int group = 0; group < VEC / 4; ++group) {
      const Bits bits = philox(seed, static_cast<uint64_t>(first) / 4 + group);
#pragma unroll
      for (int lane = 0; lane < 4; ++lane) {
        factors[4 * group + lane] = static_cast<int64_t>(bits.values[lane]) < keep_below ? keep_scale : 0.0f;
      }
    }
  }
}

template <int VEC>
__device__ inline void keep_all(float (&factors)[VEC]) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    factors[j] = 1.0f;
  }
}

constexpr int64_t kKeepAll = static_cast<int64_t>(1) << 32;

template <typename T, int VEC>
__global__ void __launch_bounds__(kWarp* kTileRows, 3)
    bias_dropout_add_forward_kernel(const T* __restrict__ x, Parameter bias, const T* __restrict__ residual,
                                    const int64_t* seed, T* __restrict__ result, int64_t rows, int64_t columns,
                                    int64_t keep_below, float keep_scale) {
  const Tile<VEC> tile(columns);
  const bool drops = keep_below != kKeepAll;
  const uint64_t key = drops ? static_cast<uint64_t>(*seed) : 0;
  float shift[VEC];
  load_bias(shift, bias, tile);
  Vector<T, VEC> in[2];
  Vector<T, VEC> kept_aside[2];
  for_each_row<2>(
      tile, rows,
      [&](int slot, int64_t row) {
        in[slot] = load<VEC>(x + row * columns + tile.column);
        kept_aside[slot] = load<VEC>(residual + row * columns + tile.column);
      },
      [&](int slot, int64_t row) {
        const int64_t first = row * columns + tile.column;
        float factors[VEC];
        if (drops) {
          dropout_factors(factors, key, first, keep_below, keep_scale);
        } else {
          keep_all(factors);
        }
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          // A dropped element is 0 even if x is infinite or NaN.
          const float biased = to_float(in[slot].values[j]) + shift[j];
          const float dropped = factors[j] == 0.0f ? 0.0f : biased * factors[j];
          out.values[j] = from_float<T>(to_float(kept_aside[slot].values[j]) + dropped);
        }
        store<VEC>(result + first, out);
      });
}

template <typename T, int VEC>
__global__ void __launch_bounds__(kWarp* kTileRows, 3)
    bias_dropout_add_backward_kernel(const T* __restrict__ gradient, const int64_t* seed, T* __restrict__ x_gradient,
                                     float* __restrict__ partials, int64_t rows, int64_t columns, int64_t keep_below,
                                     float keep_scale) {
  const Tile<VEC> tile(columns);
  const bool drops = keep_below != kKeepAll;
  const uint64_t key = drops ? static_cast<uint64_t>(*seed) : 0;
  float sums[VEC] = {};
  Vector<T, VEC> from_above[4];
  for_each_row<4>(
      tile, rows,
      [&](int slot, int64_t row) { from_above[slot] = load<VEC>(gradient + row * columns + tile.column); },
      [&](int slot, int64_t row) {
        const int64_t first = row * columns + tile.column;
        float factors[VEC];
        if (drops) {
          dropout_factors(factors, key, first, keep_below, keep_scale);
        } else {
          keep_all(factors);
        }
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float product = factors[j] == 0.0f ? 0.0f : to_float(from_above[slot].values[j]) * factors[j];
          sums[j] += product;
          out.values[j] = from_float<T>(product);
        }
        store<VEC>(x_gradient + first, out);
      });
  if (partials != nullptr) {
    write_partials(sums, partials, columns, tile);
  }
}

}  // namespace

void bias_dropout_add_forward(const Launch& where, Dtype dtype, const void* x, Parameter bias, const void* residual,
                              const int64_t* seed, void* result, int64_t rows, int64_t columns, int64_t keep_below,
                              float keep_scale) {
  if (rows * columns == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectorized =
        columns * sizeof(T) % 16 == 0 && is_aligned(x) && is_aligned(residual) && is_aligned(result);
    with_vector<T>(vectorized, [&](auto vec) {
      launch(where, tile_grid(columns / vec(), forward_row_blocks(rows)), kTileBlock,
             bias_dropout_add_forward_kernel<T, vec()>, static_cast<const T*>(x), bias,
             static_cast<const T*>(residual), seed, static_cast<T*>(result), rows, columns, keep_below, keep_scale);
    });
  });
}

void bias_dropout_add_backward(const Launch& where, Dtype dtype, const void* gradient, const int64_t* seed,
                               void* x_gradient, ParameterGradient bias_gradient, float* partials, int64_t rows,
                               int64_t columns, int64_t keep_below, float keep_scale) {
  if (columns == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t row_blocks = partial_rows(where.device, rows, columns, sizeof(T));
    const bool vectorized = columns * sizeof(T) % 16 == 0 && is_aligned(gradient) && is_aligned(x_gradient);
    with_vector<T>(vectorized, [&](auto vec) {
      launch(where, tile_grid(columns / vec(), row_blocks), kTileBlock, bias_dropout_add_backward_kernel<T, vec()>,
             static_cast<const T*>(gradient), seed, static_cast<T*>(x_gradient), partials, rows, columns, keep_below,
             keep_scale);
    });
    if (partials != nullptr) {
      sum_partials(where, partials, row_blocks, columns, bias_gradient);
    }
  });
}

}  // namespace neox
