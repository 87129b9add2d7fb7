// residual + dropout(x + bias). The maths: bias_dropout_add.py; the random bits: philox.py.
//
// The mask is not stored: forward and backward compute it from the seed and the element's index, independent of the
// launch configuration, the vector width and the device. A group of 8 elements has one counter, an element 16 bits.

#include "columns.cuh"

namespace neox {
namespace {

constexpr int kGroup = 8;

// Philox4x32-7. The keys of its rounds follow from the seed alone and are computed once.
class Philox {
 public:
  __device__ explicit Philox(uint64_t seed) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      keys_[round][0] = static_cast<uint32_t>(seed) + round * 0x9E3779B9u;
      keys_[round][1] = static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
    }
  }

  // The random words of a group: elements 2 i and 2 i + 1 of it have the lower and the upper half of word i.
  __device__ void draw(uint32_t (&words)[4], uint64_t group) const {
    words[0] = static_cast<uint32_t>(group);
    words[1] = static_cast<uint32_t>(group >> 32);
    words[2] = 0;
    words[3] = 0;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * words[0];
      const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * words[2];
      words[0] = static_cast<uint32_t>(product1 >> 32) ^ words[1] ^ keys_[round][0];
      words[1] = static_cast<uint32_t>(product1);
      words[2] = static_cast<uint32_t>(product0 >> 32) ^ words[3] ^ keys_[round][1];
      words[3] = static_cast<uint32_t>(product0);
    }
  }

 private:
  static constexpr int kRounds = 7;
  uint32_t keys_[kRounds][2];
};

// Sets values that dropout drops to 0: those of VEC neighbours, starting at element `first`, whose 16 bits are not below
// `keep_below`, which is less than 2^16. What is dropped may be infinite or NaN.
template <int VEC>
__device__ inline void drop(float (&values)[VEC], const Philox& philox, int64_t first, uint32_t keep_below) {
  uint32_t words[4];
  philox.draw(words, static_cast<uint64_t>(first) / kGroup);
  const uint32_t upper_bound = keep_below << 16;
  if constexpr (VEC == 1) {
    const int place = static_cast<int>(first % kGroup);
    const uint32_t low = place < 2 ? words[0] : words[1];
    const uint32_t high = place < 6 ? words[2] : words[3];
    const uint32_t word = place < 4 ? low : high;
    values[0] = (place % 2 == 0 ? word << 16 : word) < upper_bound ? values[0] : 0.0f;
  } else {
    // `first` is a multiple of VEC, which is 4 or 8.
    const bool is_second_half = VEC == 4 && first % kGroup != 0;
#pragma unroll
    for (int j = 0; j < VEC; j += 2) {
      const uint32_t word = VEC == 4 && is_second_half ? words[(j + 4) / 2 % 4] : words[j / 2];
      values[j] = word << 16 < upper_bound ? values[j] : 0.0f;
      values[j + 1] = word < upper_bound ? values[j + 1] : 0.0f;
    }
  }
}

constexpr int64_t kKeepAll = 1 << 16;

template <typename T, int VEC, bool DROPS>
__global__ void __launch_bounds__(kWarp* kTileRows, 3)
    bias_dropout_add_forward_kernel(const T* __restrict__ x, Parameter bias, const T* __restrict__ residual,
                                    const int64_t* __restrict__ seed, T* __restrict__ result, int64_t rows,
                                    int64_t columns, uint32_t keep_below, float keep_scale) {
  const Tile<VEC> tile(columns);
  const Philox philox(DROPS ? static_cast<uint64_t>(*seed) : 0);
  float shift[VEC];
  load_bias(shift, bias, tile);
  Words<T, VEC> in[2];
  Words<T, VEC> kept_aside[2];
  for_each_row<2>(
      tile, rows,
      [&](int slot, int64_t row) {
        in[slot] = load_words<VEC>(x + row * columns + tile.column);
        kept_aside[slot] = load_words<VEC>(residual + row * columns + tile.column);
      },
      [&](int slot, int64_t row) {
        const int64_t first = row * columns + tile.column;
        float values[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          values[j] = in[slot].value(j) + shift[j];
        }
        if constexpr (DROPS) {
          drop(values, philox, first, keep_below);
        }
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float aside = kept_aside[slot].value(j);
          out.values[j] = from_float<T>(DROPS ? aside + values[j] * keep_scale : aside + values[j]);
        }
        store<VEC>(result + first, out);
      });
}

template <typename T, int VEC, bool DROPS>
__global__ void __launch_bounds__(kWarp* kTileRows, 3)
    bias_dropout_add_backward_kernel(const T* __restrict__ gradient, const int64_t* __restrict__ seed,
                                     T* __restrict__ x_gradient, float* __restrict__ partials, int64_t rows,
                                     int64_t columns, uint32_t keep_below, float keep_scale) {
  const Tile<VEC> tile(columns);
  const Philox philox(DROPS ? static_cast<uint64_t>(*seed) : 0);
  float sums[VEC] = {};
  Words<T, VEC> from_above[4];
  for_each_row<4>(
      tile, rows,
      [&](int slot, int64_t row) { from_above[slot] = load_words<VEC>(gradient + row * columns + tile.column); },
      [&](int slot, int64_t row) {
        const int64_t first = row * columns + tile.column;
        float values[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          values[j] = DROPS ? from_above[slot].value(j) * keep_scale : from_above[slot].value(j);
        }
        if constexpr (DROPS) {
          drop(values, philox, first, keep_below);
        }
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          sums[j] += values[j];
          out.values[j] = from_float<T>(values[j]);
        }
        store<VEC>(x_gradient + first, out);
      });
  if (partials != nullptr) {
    write_partials(sums, partials, columns, tile);
  }
}

// Calls body(Type<T>{}, Constant<VEC>{}).
template <typename Body>
void with_type_and_vector(Dtype dtype, bool vectorized, Body body) {
  with_type(dtype, [&](auto type) {
    with_vector<typename decltype(type)::type>(vectorized, [&](auto vec) { body(type, vec); });
  });
}

}  // namespace

void bias_dropout_add_forward(const Launch& where, Dtype dtype, const void* x, Parameter bias, const void* residual,
                              const int64_t* seed, void* result, int64_t rows, int64_t columns, int64_t keep_below,
                              float keep_scale) {
  if (rows * columns == 0) {
    return;
  }
  const bool vectorized = fills_vectors(dtype, columns) && are_aligned({x, bias.address, residual, result});
  with_type_and_vector(dtype, vectorized, [&](auto type, auto vec) {
    using T = typename decltype(type)::type;
    const auto kernel = keep_below == kKeepAll ? bias_dropout_add_forward_kernel<T, vec(), false>
                                               : bias_dropout_add_forward_kernel<T, vec(), true>;
    launch(where, tile_grid(columns / vec(), forward_row_blocks(rows)), kTileBlock, kernel, static_cast<const T*>(x),
           bias, static_cast<const T*>(residual), seed, static_cast<T*>(result), rows, columns,
           static_cast<uint32_t>(keep_below), keep_scale);
  });
}

int64_t bias_dropout_add_partial_rows(int device, Dtype dtype, int64_t rows, int64_t columns) {
  int64_t blocks = 1;
  with_type_and_vector(dtype, fills_vectors(dtype, columns), [&](auto type, auto vec) {
    using T = typename decltype(type)::type;
    blocks = sum_row_blocks(device, rows, columns / vec(), bias_dropout_add_backward_kernel<T, vec(), true>);
  });
  return blocks;
}

void bias_dropout_add_backward(const Launch& where, Dtype dtype, const void* gradient, const int64_t* seed,
                               void* x_gradient, ParameterGradient bias_gradient, float* partials,
                               int64_t partial_rows, int64_t rows, int64_t columns, int64_t keep_below,
                               float keep_scale) {
  if (columns == 0 || (partials == nullptr && rows == 0)) {
    return;
  }
  const bool vectorized = fills_vectors(dtype, columns) && are_aligned({gradient, x_gradient, partials});
  with_type_and_vector(dtype, vectorized, [&](auto type, auto vec) {
    using T = typename decltype(type)::type;
    const auto kernel = keep_below == kKeepAll ? bias_dropout_add_backward_kernel<T, vec(), false>
                                               : bias_dropout_add_backward_kernel<T, vec(), true>;
    const int64_t row_blocks = partials == nullptr ? forward_row_blocks(rows) : partial_rows;
    launch(where, tile_grid(columns / vec(), row_blocks), kTileBlock, kernel, static_cast<const T*>(gradient), seed,
           static_cast<T*>(x_gradient), partials, rows, columns, static_cast<uint32_t>(keep_below), keep_scale);
  });
  if (partials != nullptr) {
    sum_partials(where, partials, partial_rows, columns, bias_gradient);
  }
}

}  // namespace neox
