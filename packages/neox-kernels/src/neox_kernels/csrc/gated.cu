// (up + up_bias) * activation(gate + gate_bias). The maths: gated.py. The inputs may be halves of one matrix: each has
// a row stride. Backward stores the product again, if asked to, for what did not keep it.

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
  Words<T, VEC> ups[2];
  Words<T, VEC> gates[2];
  for_each_row<2>(
      tile, rows,
      [&](int slot, int64_t row) {
        ups[slot] = load_words<VEC>(up.start + row * up.stride + tile.column);
        gates[slot] = load_words<VEC>(gate.start + row * gate.stride + tile.column);
      },
      [&](int slot, int64_t row) {
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float u = ups[slot].value(j) + up_shift[j];
          const float g = gates[slot].value(j) + gate_shift[j];
          out.values[j] = from_float<T>(u * Function::value(g));
        }
        store<VEC>(result + row * columns + tile.column, out);
      });
}

// With biases, it keeps their sums.
template <typename T, int VEC, typename Function, bool SUMS>
__global__ void __launch_bounds__(kWarp* kTileRows, SUMS ? 2 : 3)
    gated_backward_kernel(const T* __restrict__ gradient, Rows<T> up, Rows<T> gate, Parameter up_bias,
                          Parameter gate_bias, T* __restrict__ up_gradient, T* __restrict__ gate_gradient,
                          T* __restrict__ product, float* __restrict__ partials, int64_t rows, int64_t columns) {
  const Tile<VEC> tile(columns);
  float up_shift[VEC];
  float gate_shift[VEC];
  load_bias(up_shift, up_bias, tile);
  load_bias(gate_shift, gate_bias, tile);
  float up_sums[VEC] = {};
  float gate_sums[VEC] = {};
  Words<T, VEC> from_above[2];
  Words<T, VEC> ups[2];
  Words<T, VEC> gates[2];
  for_each_row<2>(
      tile, rows,
      [&](int slot, int64_t row) {
        from_above[slot] = load_words<VEC>(gradient + row * columns + tile.column);
        ups[slot] = load_words<VEC>(up.start + row * up.stride + tile.column);
        gates[slot] = load_words<VEC>(gate.start + row * gate.stride + tile.column);
      },
      [&](int slot, int64_t row) {
        Vector<T, VEC> for_up;
        Vector<T, VEC> for_gate;
        Vector<T, VEC> again;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float above = from_above[slot].value(j);
          const float u = ups[slot].value(j) + up_shift[j];
          const float g = gates[slot].value(j) + gate_shift[j];
          const float value = Function::value(g);
          const float up_product = above * value;
          const float gate_product = above * u * Function::slope(g);
          if constexpr (SUMS) {
            up_sums[j] += up_product;
            gate_sums[j] += gate_product;
          }
          for_up.values[j] = from_float<T>(up_product);
          for_gate.values[j] = from_float<T>(gate_product);
          again.values[j] = from_float<T>(u * value);
        }
        store<VEC>(up_gradient + row * columns + tile.column, for_up);
        store<VEC>(gate_gradient + row * columns + tile.column, for_gate);
        if (product != nullptr) {
          store<VEC>(product + row * columns + tile.column, again);
        }
      });
  if constexpr (SUMS) {
    write_partials(up_sums, partials, columns, tile);
    write_partials(gate_sums, partials + gridDim.y * columns, columns, tile);
  }
}

// Calls body(Type<T>{}, Constant<VEC>{}, Type<Function>{}).
template <typename Body>
void with_activation(Dtype dtype, bool vectorized, Activation activation, Body body) {
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_vector<T>(vectorized, [&](auto vec) {
      switch (activation) {
        case Activation::silu:
          return body(type, vec, Type<Silu<T>>{});
        case Activation::gelu_tanh:
          return body(type, vec, Type<GeluTanh<T>>{});
        case Activation::gelu_erf:
          return body(type, vec, Type<GeluErf<T>>{});
      }
      throw std::invalid_argument("unknown activation code " + std::to_string(static_cast<int>(activation)));
    });
  });
}

}  // namespace

void gated_forward(const Launch& where, Dtype dtype, Activation activation, const void* up, int64_t up_stride,
                   const void* gate, int64_t gate_stride, Parameter up_bias, Parameter gate_bias, void* result,
                   int64_t rows, int64_t columns) {
  if (rows * columns == 0) {
    return;
  }
  const bool vectorized = fills_vectors(dtype, columns) && fills_vectors(dtype, up_stride) &&
                          fills_vectors(dtype, gate_stride) &&
                          are_aligned({up, gate, up_bias.address, gate_bias.address, result});
  with_activation(dtype, vectorized, activation, [&](auto type, auto vec, auto function) {
    using T = typename decltype(type)::type;
    launch(where, tile_grid(columns / vec(), forward_row_blocks(rows)), kTileBlock,
           gated_forward_kernel<T, vec(), typename decltype(function)::type>,
           Rows<T>{static_cast<const T*>(up), up_stride}, Rows<T>{static_cast<const T*>(gate), gate_stride}, up_bias,
           gate_bias, static_cast<T*>(result), rows, columns);
  });
}

int64_t gated_partial_rows(int device, Dtype dtype, Activation activation, int64_t rows, int64_t columns) {
  int64_t blocks = 1;
  with_activation(dtype, fills_vectors(dtype, columns), activation, [&](auto type, auto vec, auto function) {
    using T = typename decltype(type)::type;
    blocks = sum_row_blocks(device, rows, columns / vec(),
                            gated_backward_kernel<T, vec(), typename decltype(function)::type, true>);
  });
  return blocks;
}

void gated_backward(const Launch& where, Dtype dtype, Activation activation, const void* gradient, const void* up,
                    int64_t up_stride, const void* gate, int64_t gate_stride, Parameter up_bias, Parameter gate_bias,
                    void* up_gradient, void* gate_gradient, void* product, ParameterGradient up_bias_gradient,
                    ParameterGradient gate_bias_gradient, float* partials, int64_t partial_rows, int64_t rows,
                    int64_t columns) {
  if (columns == 0 || (partials == nullptr && rows == 0)) {
    return;
  }
  const bool vectorized =
      fills_vectors(dtype, columns) && fills_vectors(dtype, up_stride) && fills_vectors(dtype, gate_stride) &&
      are_aligned({gradient, up, gate, up_bias.address, gate_bias.address, up_gradient, gate_gradient, product,
                   partials});
  with_activation(dtype, vectorized, activation, [&](auto type, auto vec, auto function) {
    using T = typename decltype(type)::type;
    using Function = typename decltype(function)::type;
    const auto kernel = partials == nullptr ? gated_backward_kernel<T, vec(), Function, false>
                                            : gated_backward_kernel<T, vec(), Function, true>;
    const int64_t row_blocks = partials == nullptr ? forward_row_blocks(rows) : partial_rows;
    launch(where, tile_grid(columns / vec(), row_blocks), kTileBlock, kernel, static_cast<const T*>(gradient),
           Rows<T>{static_cast<const T*>(up), up_stride}, Rows<T>{static_cast<const T*>(gate), gate_stride}, up_bias,
           gate_bias, static_cast<T*>(up_gradient), static_cast<T*>(gate_gradient), static_cast<T*>(product), partials,
           rows, columns);
  });
  if (up_bias_gradient.address != nullptr) {
    sum_partials(where, partials, partial_rows, columns, up_bias_gradient);
  }
  if (gate_bias_gradient.address != nullptr) {
    sum_partials(where, partials + partial_rows * columns, partial_rows, columns, gate_bias_gradient);
  }
}

}  // namespace neox
