// Second pass of a bias or weight gradient: adds the partial sums in a fixed order.

#include "columns.cuh"

namespace neox {
namespace {

constexpr int kAdders = 16;  // threads of a column

__global__ void __launch_bounds__(kWarp* kAdders)
    sum_partials_kernel(const float* __restrict__ partials, int64_t partial_rows, int64_t columns,
                        ParameterGradient first, ParameterGradient second) {
  __shared__ float of_thread[kAdders][kWarp];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  const ParameterGradient result = blockIdx.y == 0 ? first : second;
  const float* const start = partials + blockIdx.y * partial_rows * columns;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < partial_rows; row += kAdders) {
      sum += start[row * columns + column];
    }
  }
  of_thread[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    float total = 0.0f;
    for (int y = 0; y < kAdders; ++y) {
      total += of_thread[y][threadIdx.x];
    }
    store_parameter(result.address, result.dtype, column, total);
  }
}

}  // namespace

void sum_partials(const Launch& where, const float* partials, int64_t partial_rows, int64_t columns,
                  ParameterGradient first, ParameterGradient second) {
  if (columns == 0) {
    return;
  }
  launch(where, tile_grid(columns, second.address == nullptr ? 1 : 2), dim3(kWarp, kAdders), sum_partials_kernel,
         partials, partial_rows, columns, first, second);
}

}  // namespace neox
