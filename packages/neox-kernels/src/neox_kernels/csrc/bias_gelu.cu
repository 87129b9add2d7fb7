// gelu(x + bias). The maths: bias_gelu.py. Forward reads and writes once; backward reads the gradient and x, writes
// the gradient of x, and stores partial sums over rows for the bias.

#include "columns.cuh"
#include "gelu.cuh"

namespace neox {
namespace {

template <typename T, int VEC, typename Gelu>
__global__ void __launch_bounds__(kWarp* kTileRows, 3)
    bias_gelu_forward_kernel(const T* __restrict__ x, Parameter bias, T* __restrict__ result, int64_t rows,
                             int64_t columns) {
  const Tile<VEC> tile(columns);
  float shift[VEC];
  load_bias(shift, bias, tile);
  Vector<T, VEC> in[4];
  for_each_row<4>(
      tile, rows, [&](int slot, int64_t row) { in[slot] = load<VEC>(x + row * columns + tile.column); },
      [&](int slot, int64_t row) {
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          out.values[j] = from_float<T>(Gelu::value(to_float(in[slot].values[j]) + shift[j]));
        }
        store<VEC>(result + row * columns + tile.column, out);
      });
}

template <typename T, int VEC, typename Gelu>
__global__ void __launch_bounds__(kWarp* kTileRows, 3)
    bias_gelu_backward_kernel(const T* __restrict__ gradient, const T* __restrict__ x, Parameter bias,
                              T* __restrict__ x_gradient, float* __restrict__ partials, int64_t rows,
                              int64_t columns) {
  const Tile<VEC> tile(columns);
  float shift[VEC];
  load_bias(shift, bias, tile);
  float sums[VEC] = {};
  Vector<T, VEC> in[2];
  Vector<T, VEC> from_above[2];
  for_each_row<2>(
      tile, rows,
      [&](int slot, int64_t row) {
        in[slot] = load<VEC>(x + row * columns + tile.column);
        from_above[slot] = load<VEC>(gradient + row * columns + tile.column);
      },
      [&](int slot, int64_t row) {
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float slope = Gelu::slope(to_float(in[slot].values[j]) + shift[j]);
          const float product = to_float(from_above[slot].values[j]) * slope;
          sums[j] += product;
          out.values[j] = from_float<T>(product);
        }
        store<VEC>(x_gradient + row * columns + tile.column, out);
      });
  write_partials(sums, partials, columns, tile);
}

template <typename Body>
void with_gelu(bool tanh_form, Body body) {
  if (tanh_form) {
    return body(Type<GeluTanh>{});
  }
  return body(Type<GeluErf>{});
}

}  // namespace

void bias_gelu_forward(const Launch& where, Dtype dtype, const void* x, Parameter bias, void* result, int64_t rows,
                       int64_t columns, bool tanh_form) {
  if (rows * columns == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectorized = columns * sizeof(T) % 16 == 0 && is_aligned(x) && is_aligned(result);
    with_vector<T>(vectorized, [&](auto vec) {
      with_gelu(tanh_form, [&](auto gelu) {
        launch(where, tile_grid(columns / vec(), forward_row_blocks(rows)), kTileBlock,
               bias_gelu_forward_kernel<T, vec(), typename decltype(gelu)::type>, static_cast<const T*>(x), bias,
               static_cast<T*>(result), rows, columns);
      });
    });
  });
}

void bias_gelu_backward(const Launch& where, Dtype dtype, const void* gradient, const void* x, Parameter bias,
                        void* x_gradient, ParameterGradient bias_gradient, float* partials, int64_t rows,
                        int64_t columns, bool tanh_form) {
  if (columns == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t row_blocks = partial_rows(where.device, rows, columns, sizeof(T));
    const bool vectorized =
        columns * sizeof(T) % 16 == 0 && is_aligned(gradient) && is_aligned(x) && is_aligned(x_gradient);
    with_vector<T>(vectorized, [&](auto vec) {
      with_gelu(tanh_form, [&](auto gelu) {
        launch(where, tile_grid(columns / vec(), row_blocks), kTileBlock,
               bias_gelu_backward_kernel<T, vec(), typename decltype(gelu)::type>, static_cast<const T*>(gradient),
               static_cast<const T*>(x), bias, static_cast<T*>(x_gradient), partials, rows, columns);
      });
    });
    sum_partials(where, partials, row_blocks, columns, bias_gradient);
  });
}

}  // namespace neox
