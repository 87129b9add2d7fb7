// Element-wise operators with a bias: each thread handles VEC neighbouring columns of many rows.
//
// Each thread reads its bias once, no index is divided, and the sums over rows for a bias gradient stay in registers.
// A warp reads 512 neighbouring bytes. UNROLL rows are loaded before the first is used: four if one tensor is read,
// two if several are (more would need registers and reduce the number of resident warps).

#pragma once

#include "common.cuh"

namespace neox {

constexpr int kTileRows = 8;

// Rows and column of this thread.
template <int VEC>
struct Tile {
  int64_t column;
  int64_t row;
  int64_t row_step;
  bool inside;

  __device__ explicit Tile(int64_t columns)
      : column((static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x) * VEC),
        row(static_cast<int64_t>(blockIdx.y) * kTileRows + threadIdx.y),
        row_step(static_cast<int64_t>(gridDim.y) * kTileRows),
        inside(column < columns) {}
};

// Calls fetch(slot, row) for up to UNROLL rows, then use(slot, row) for the same rows, until the rows end.
template <int UNROLL, int VEC, typename Fetch, typename Use>
__device__ inline void for_each_row(const Tile<VEC>& tile, int64_t rows, Fetch fetch, Use use) {
  if (!tile.inside) {
    return;
  }
  for (int64_t first = tile.row; first < rows; first += UNROLL * tile.row_step) {
#pragma unroll
    for (int slot = 0; slot < UNROLL; ++slot) {
      const int64_t row = first + slot * tile.row_step;
      if (row < rows) {
        fetch(slot, row);
      }
    }
#pragma unroll
    for (int slot = 0; slot < UNROLL; ++slot) {
      const int64_t row = first + slot * tile.row_step;
      if (row < rows) {
        use(slot, row);
      }
    }
  }
}

template <typename P, int VEC>
__device__ inline void load_as_floats(float (&values)[VEC], const void* start, int64_t column) {
  if constexpr (VEC == 1) {
    values[0] = to_float(static_cast<const P*>(start)[column]);
  } else {
    constexpr int kPart = VEC * sizeof(P) > 16 ? 16 / sizeof(P) : VEC;
#pragma unroll
    for (int part = 0; part < VEC / kPart; ++part) {
      const auto words = load_words<kPart>(static_cast<const P*>(start) + column + part * kPart);
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        values[part * kPart + j] = words.value(j);
      }
    }
  }
}

// The bias of a thread's columns, 0 without a bias. For vectors, its address must be a multiple of 16 bytes.
template <int VEC>
__device__ inline void load_bias(float (&values)[VEC], const Parameter& bias, const Tile<VEC>& tile) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    values[j] = 0.0f;
  }
  if (!tile.inside || bias.address == nullptr) {
    return;
  }
  switch (bias.dtype) {
    case Dtype::float32:
      return load_as_floats<float>(values, bias.address, tile.column);
    case Dtype::float16:
      return load_as_floats<__half>(values, bias.address, tile.column);
    case Dtype::bfloat16:
      return load_as_floats<__nv_bfloat16>(values, bias.address, tile.column);
  }
}

// Adds the sums of the kTileRows threads of each column and writes the result to row blockIdx.y of `partials`. All
// threads of the block must call it.
template <int VEC>
__device__ inline void write_partials(const float (&sums)[VEC], float* partials, int64_t columns, const Tile<VEC>& tile) {
  __shared__ float of_thread[kTileRows][kWarp][VEC + 1];  // + 1: neighbouring threads use different banks.
  __syncthreads();                                        // An earlier call may still be reading.
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    of_thread[threadIdx.y][threadIdx.x][j] = sums[j];
  }
  __syncthreads();
  if (threadIdx.y != 0 || !tile.inside) {
    return;
  }
  float* const place = partials + static_cast<int64_t>(blockIdx.y) * columns + tile.column;
  constexpr int kPart = VEC < 4 ? VEC : 4;
#pragma unroll
  for (int part = 0; part < VEC / kPart; ++part) {
    Vector<float, kPart> out;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      out.values[j] = 0.0f;
#pragma unroll
      for (int y = 0; y < kTileRows; ++y) {
        out.values[j] += of_thread[y][threadIdx.x][part * kPart + j];
      }
    }
    store<kPart>(place + part * kPart, out);
  }
}

inline const dim3 kTileBlock(kWarp, kTileRows);  // 256 threads

inline dim3 tile_grid(int64_t vectors, int64_t row_blocks) {
  const int64_t tiles = ceil_div(vectors, kWarp);
  if (tiles > INT32_MAX) {
    throw std::invalid_argument("rows of " + std::to_string(vectors) + " vectors are more than one launch can take");
  }
  return dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(row_blocks));
}

// Number of blocks over the rows of a forward pass; each makes a few rounds.
inline int64_t forward_row_blocks(int64_t rows) {
  const int64_t blocks = ceil_div(rows, kTileRows * 8);
  return blocks < 1 ? 1 : blocks > 65535 ? 65535 : blocks;
}

// Number of blocks over the rows of a pass with sums: as many as the device holds at once, rounded down to whole waves of
// at least three quarters, and each with at least one round of four rows per thread.
template <typename... Expected>
int64_t sum_row_blocks(int device, int64_t rows, int64_t vectors, void (*kernel)(Expected...)) {
  const int64_t resident = resident_blocks(device, kTileBlock, 0, kernel);
  const int64_t tiles = vectors < 1 ? 1 : ceil_div(vectors, kWarp);
  int64_t blocks = 1;
  for (int64_t waves = 1; waves <= 4; ++waves) {
    blocks = waves * resident / tiles;
    if (4 * blocks * tiles >= 3 * waves * resident) {
      break;
    }
  }
  const int64_t useful = ceil_div(rows, kTileRows * 4);
  blocks = blocks < useful ? blocks : useful;
  return blocks < 1 ? 1 : blocks > 65535 ? 65535 : blocks;
}

// Calls body(Constant<VEC>{}) for 16-byte vectors of T or for single elements.
template <typename T, typename Body>
void with_vector(bool vectorized, Body body) {
  if (vectorized) {
    return body(Constant<16 / sizeof(T)>{});
  }
  return body(Constant<1>{});
}

}  // namespace neox
