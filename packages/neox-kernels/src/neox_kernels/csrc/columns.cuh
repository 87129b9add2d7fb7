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

template <int VEC>
__device__ inline void load_bias(float (&values)[VEC], const Parameter& bias, const Tile<VEC>& tile) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const bool present = tile.inside && bias.address != nullptr;
    values[j] = present ? load_parameter(bias.address, bias.dtype, tile.column + j) : 0.0f;
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
  if (threadIdx.y == 0 && tile.inside) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      float sum = 0.0f;
      for (int y = 0; y < kTileRows; ++y) {
        sum += of_thread[y][threadIdx.x][j];
      }
      partials[static_cast<int64_t>(blockIdx.y) * columns + tile.column + j] = sum;
    }
  }
}

inline const dim3 kTileBlock(kWarp, kTileRows);

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

// Calls body(Constant<VEC>{}) for 16-byte vectors of T or for single elements.
template <typename T, typename Body>
void with_vector(bool vectorized, Body body) {
  if (vectorized) {
    return body(Constant<16 / sizeof(T)>{});
  }
  return body(Constant<1>{});
}

}  // namespace neox
