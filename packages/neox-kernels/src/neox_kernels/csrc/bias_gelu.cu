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
  Words<T, VEC> in[4];
  for_each_row<4>(
      tile, rows, [&](int slot, int64_t row) { in[slot] = load_words<VEC>(x + row * columns + tile.column); },
      [&](int slot, int64_t row) {
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          out.values[j] = from_float<T>(Gelu::value(in[slot].value(j) + shift[j]));
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
  Words<T, VEC> in[2];
  Words<T, VEC> from_above[2];
  for_each_row<2>(
      tile, rows,
      [&](int slot, int64_t row) {
        in[slot] = load_words<VEC>(x + row * columns + tile.column);
        from_above[slot] = load_words<VEC>(gradient + row * columns + tile.column);
      },
      [&](int slot, int64_t row) {
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float slope = Gelu::slope(in[slot].value(j) + shift[j]);
          const float product = from_above[slot].value(j) * slope;
          sums[j] += product;
          out.values[j] = from_float<T>(product);
        }
        store<VEC>(x_gradient + row * columns + tile.column, out);
      });
  write_partials(sums, partials, columns, tile);
}

// Calls body(Type<T>{}, Constant<VEC>{}, Type<Gelu>{}).
template <typename Body>
void with_form(Dtype dtype, bool vectorized, bool tanh_form, Body body) {
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_vector<T>(vectorized, [&](auto vec) {
      return tanh_form ? body(type, vec, Type<GeluTanh<T>>{}) : body(type, vec, Type<GeluErf<T>>{});
    });
  });
}

}  // namespace

void bias_gelu_forward(const Launch& where, Dtype dtype, const void* x, Parameter bias, void* result, int64_t rows,
                       int64_t columns, bool tanh_form) {
  if (rows * columns == 0) {
    return;
  }
  const bool vectorized = fills_vectors(dtype, columns) && are_aligned({x, bias.address, result});
  with_form(dtype, vectorized, tanh_form, [&](auto type, auto vec, auto gelu) {
    using T = typename decltype(type)::type;
    launch(where, tile_grid(columns / vec(), forward_row_blocks(rows)), kTileBlock,
           bias_gelu_forward_kernel<T, vec(), typename decltype(gelu)::type>, static_cast<const T*>(x), bias,
           static_cast<T*>(result), rows, columns);
  });
}

int64_t bias_gelu_partial_rows(int device, Dtype dtype, int64_t rows, int64_t columns, bool tanh_form) {
  int64_t blocks = 1;
  with_form(dtype, fills_vectors(dtype, columns), tanh_form, [&](auto type, auto vec, auto gelu) {
    using T = typename decltype(type)::type;
    blocks = sum_row_blocks(device, rows, columns / vec(),
                            bias_gelu_backward_kernel<T, vec(), typename decltype(gelu)::type>);
  });
  return blocks;
}

void bias_gelu_backward(const Launch& where, Dtype dtype, const void* gradient, const void* x, Parameter bias,
                        void* x_gradient, ParameterGradient bias_gradient, float* partials, int64_t partial_rows,
                        int64_t rows, int64_t columns, bool tanh_form) {
  if (columns == 0) {
    return;
  }
  const bool vectorized =
      fills_vectors(dtype, columns) && are_aligned({gradient, x, bias.address, x_gradient, partials});
  with_form(dtype, vectorized, tanh_form, [&](auto type, auto vec, auto gelu) {
    using T = typename decltype(type)::type;
    launch(where, tile_grid(columns / vec(), partial_rows), kTileBlock,
           bias_gelu_backward_kernel<T, vec(), typename decltype(gelu)::type>, static_cast<const T*>(gradient),
           static_cast<const T*>(x), bias, static_cast<T*>(x_gradient), partials, rows, columns);
  });
  sum_partials(where, partials, partial_rows, columns, bias_gradient);
}

}  // namespace neox
