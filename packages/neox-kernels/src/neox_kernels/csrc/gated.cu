// (up + up_bias) * activation(gate + gate_bias). The maths: gated.py. The inputs may be halves of one matrix: each has
// a row stride.

#include "columns.cuh"
#include "gelu.cuh"

namespace neox {
namespace {

template <typename T>
struct Rows {
  const T* start;
  int64_t stride;
};

template <typename T, int VEC, typename Function>
__global__ void __launch_bounds__(kWarp* kTileRows, 3)
    gated_forward_kernel(Rows<T> up, Rows<T> gate, Parameter up_bias, Parameter gate_bias, T* __restrict__ result,
                         int64_t rows, int64_t columns) {
  const Tile<VEC> tile(columns);
  float up_shift[VEC];
  float gate_shift[VEC];
  load_bias(up_shift, up_bias, tile);
  load_bias(gate_shift, gate_bias, tile);
  Vector<T, VEC> ups[2];
  Vector<T, VEC> gates[2];
  for_each_row<2>(
      tile, rows,
      [&](int slot, int64_t row) {
        ups[slot] = load<VEC>(up.start + row * up.stride + tile.column);
        gates[slot] = load<VEC>(gate.start + row * gate.stride + tile.column);
      },
      [&](int slot, int64_t row) {
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float u = to_float(ups[slot].values[j]) + up_shift[j];
          const float g = to_float(gates[slot].values[j]) + gate_shift[j];
          out.values[j] = from_float<T>(u * Function::value(g));
        }
        store<VEC>(result + row * columns + tile.column, out);
      });
}

template <typename T, int VEC, typename Function>
__global__ void __launch_bounds__(kWarp* kTileRows, 2)
    gated_backward_kernel(const T* __restrict__ gradient, Rows<T> up, Rows<T> gate, Parameter up_bias,
                          Parameter gate_bias, T* __restrict__ up_gradient, T* __restrict__ gate_gradient,
                          float* __restrict__ up_partials, float* __restrict__ gate_partials, int64_t rows,
                          int64_t columns) {
  const Tile<VEC> tile(columns);
  float up_shift[VEC];
  float gate_shift[VEC];
  load_bias(up_shift, up_bias, tile);
  load_bias(gate_shift, gate_bias, tile);
  float up_sums[VEC] = {};
  float gate_sums[VEC] = {};
  Vector<T, VEC> from_above[2];
  Vector<T, VEC> ups[2];
  Vector<T, VEC> gates[2];
  for_each_row<2>(
      tile, rows,
      [&](int slot, int64_t row) {
        from_above[slot] = load<VEC>(gradient + row * columns + tile.column);
        ups[slot] = load<VEC>(up.start + row * up.stride + tile.column);
        gates[slot] = load<VEC>(gate.start + row * gate.stride + tile.column);
      },
      [&](int slot, int64_t row) {
        Vector<T, VEC> for_up;
        Vector<T, VEC> for_gate;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float above = to_float(from_above[slot].values[j]);
          const float u = to_float(ups[slot].values[j]) + up_shift[j];
          const float g = to_float(gates[slot].values[j]) + gate_shift[j];
          const float up_product = above * Function::value(g);
          const float gate_product = above * u * Function::slope(g);
          up_sums[j] += up_product;
          gate_sums[j] += gate_product;
          for_up.values[j] = from_float<T>(up_product);
          for_gate.values[j] = from_float<T>(gate_product);
        }
        store<VEC>(up_gradient + row * columns + tile.column, for_up);
        store<VEC>(gate_gradient + row * columns + tile.column, for_gate);
      });
  if (up_partials != nullptr) {
    write_partials(up_sums, up_partials, columns, tile);
  }
  if (gate_partials != nullptr) {
    write_partials(gate_sums, gate_partials, columns, tile);
  }
}

template <typename Body>
void with_activation(Activation activation, Body body) {
  switch (activation) {
    case Activation::silu:
      return body(Type<Silu>{});
    case Activation::gelu_tanh:
      return body(Type<GeluTanh>{});
    case Activation::gelu_erf:
      return body(Type<GeluErf>{});
  }
  throw std::invalid_argument("unknown activation code " + std::to_string(static_cast<int>(activation)));
}

}  // namespace

void gated_forward(const Launch& where, Dtype dtype, Activation activation, const void* up, int64_t up_stride,
                   const void* gate, int64_t gate_stride, Parameter up_bias, Parameter gate_bias, void* result,
                   int64_t rows, int64_t columns) {
  if (rows * columns == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectorized = columns * sizeof(T) % 16 == 0 && up_stride * sizeof(T) % 16 == 0 &&
                            gate_stride * sizeof(T) % 16 == 0 && is_aligned(up) && is_aligned(gate) &&
                            is_aligned(result);
    with_vector<T>(vectorized, [&](auto vec) {
      with_activation(activation, [&](auto function) {
        launch(where, tile_grid(columns / vec(), forward_row_blocks(rows)), kTileBlock,
               gated_forward_kernel<T, vec(), typename decltype(function)::type>,
               Rows<T>{static_cast<const T*>(up), up_stride}, Rows<T>{static_cast<const T*>(gate), gate_stride},
               up_bias, gate_bias, static_cast<T*>(result), rows, columns);
      });
    });
  });
}

void gated_backward(const Launch& where, Dtype dtype, Activation activation, const void* gradient, const void* up,
                    int64_t up_stride, const void* gate, int64_t gate_stride, Parameter up_bias, Parameter gate_bias,
                    void* up_gradient, void* gate_gradient, ParameterGradient up_bias_gradient,
                    ParameterGradient gate_bias_gradient, float* partials, int64_t rows, int64_t columns) {
  if (columns == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t row_blocks = partial_rows(where.device, rows, columns, sizeof(T));
    float* up_partials = up_bias_gradient.address == nullptr ? nullptr : partials;
    float* gate_partials = gate_bias_gradient.address == nullptr ? nullptr : partials + row_blocks * columns;
    const bool vectorized = columns * sizeof(T) % 16 == 0 && up_stride * sizeof(T) % 16 == 0 &&
                            gate_stride * sizeof(T) % 16 == 0 && is_aligned(gradient) && is_aligned(up) &&
                            is_aligned(gate) && is_aligned(up_gradient) && is_aligned(gate_gradient);
    with_vector<T>(vectorized, [&](auto vec) {
      with_activation(activation, [&](auto function) {
        launch(where, tile_grid(columns / vec(), row_blocks), kTileBlock,
               gated_backward_kernel<T, vec(), typename decltype(function)::type>, static_cast<const T*>(gradient),
               Rows<T>{static_cast<const T*>(up), up_stride}, Rows<T>{static_cast<const T*>(gate), gate_stride},
               up_bias, gate_bias, static_cast<T*>(up_gradient), static_cast<T*>(gate_gradient), up_partials,
               gate_partials, rows, columns);
      });
    });
    if (up_partials != nullptr) {
      sum_partials(where, up_partials, row_blocks, columns, up_bias_gradient);
    }
    if (gate_partials != nullptr) {
      sum_partials(where, gate_partials, row_blocks, columns, gate_bias_gradient);
    }
  });
}

}  // namespace neox
