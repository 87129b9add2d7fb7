// Shared by all kernels: types, 16-byte accesses, reductions, and launching.
//
// Sizes and offsets are 64-bit. Values are stored as float, half or bfloat16 and computed in float32. Nothing here
// allocates, synchronizes or keeps state, so every launch can be captured in a CUDA graph.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "operators.h"

namespace neox {

constexpr int kWarp = 32;

// Values ------------------------------------------------------------------------------------------------------

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ inline T from_float(float value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// N neighbouring elements, read or written in one access; N * sizeof(T) is at most 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T values[N];
};

template <typename To, typename From>
__device__ inline To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The four 32-bit words of 16 bytes, combined by shifts and stored by one instruction: nvcc 13.0 compiles an assignment
// to four or eight stores (seen in its PTX).
template <typename T, int N>
__device__ inline uint4 words_of(const Vector<T, N>& vector) {
  static_assert(sizeof(T) * N == 16);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2) {
      words[i] = static_cast<uint32_t>(bits_of<uint16_t>(vector.values[2 * i + 1])) << 16 |
                 bits_of<uint16_t>(vector.values[2 * i]);
    } else {
      words[i] = bits_of<uint32_t>(vector.values[i]);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <int N, typename T>
__device__ inline Vector<T, N> load(const T* address) {
  if constexpr (sizeof(T) * N == 16) {
    return bits_of<Vector<T, N>>(*reinterpret_cast<const uint4*>(address));
  } else {
    return *reinterpret_cast<const Vector<T, N>*>(address);
  }
}

template <int N, typename T>
__device__ inline void store(T* address, const Vector<T, N>& vector) {
  if constexpr (sizeof(T) * N == 16) {
    const uint4 words = words_of(vector);
#ifdef __CUDA_ARCH__
    // Unlike the intrinsic, this may be moved across other accesses: no kernel reads what it has stored.
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w));
#else
    __stwb(reinterpret_cast<uint4*>(address), words);
#endif
  } else {
    *reinterpret_cast<Vector<T, N>*>(address) = vector;
  }
}

// VEC neighbouring floats; if VEC is a multiple of 4, the address must be a multiple of 16 bytes.
template <int VEC>
__device__ inline void load_floats(float (&values)[VEC], const float* address) {
  if constexpr (VEC % 4 == 0) {
#pragma unroll
    for (int part = 0; part < VEC / 4; ++part) {
      const Vector<float, 4> four = load<4>(address + 4 * part);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[4 * part + j] = four.values[j];
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      values[j] = address[j];
    }
  }
}

// Brings the cache line of an address into the second-level cache; takes no register until it is read.
__device__ inline void prefetch(const void* address) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#else
  static_cast<void>(address);
#endif
}

// Memory of the size that the launch states, for all threads of a block. The tests' emulator has its own.
#ifndef NEOX_DYNAMIC_SHARED
#define NEOX_DYNAMIC_SHARED(name) extern __shared__ __align__(16) float name[]
#endif

// One element of a parameter (weight or bias), whose type may differ from the activations'.
__device__ inline float load_parameter(const void* parameter, Dtype dtype, int64_t index) {
  switch (dtype) {
    case Dtype::float16:
      return to_float(static_cast<const __half*>(parameter)[index]);
    case Dtype::bfloat16:
      return to_float(static_cast<const __nv_bfloat16*>(parameter)[index]);
    default:
      return static_cast<const float*>(parameter)[index];
  }
}

__device__ inline void store_parameter(void* parameter, Dtype dtype, int64_t index, float value) {
  switch (dtype) {
    case Dtype::float16:
      static_cast<__half*>(parameter)[index] = from_float<__half>(value);
      break;
    case Dtype::bfloat16:
      static_cast<__nv_bfloat16*>(parameter)[index] = from_float<__nv_bfloat16>(value);
      break;
    default:
      static_cast<float*>(parameter)[index] = value;
  }
}

// Reductions over the threads of a row ------------------------------------------------------------------------

struct Sum {
  static constexpr float identity = 0.0f;
  __device__ static float join(float left, float right) { return left + right; }
};

struct Maximum {
  static constexpr float identity = -INFINITY;
  __device__ static float join(float left, float right) { return fmaxf(left, right); }
};

template <typename Operation>
__device__ inline float reduce_warp(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = Operation::join(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Every thread of the row (all of blockDim.x, the same threadIdx.y) gets the same result. A row of one warp requires
// no barrier, so a block may contain several such rows, which may finish at different times. A row of more warps is
// the only one in its block, and all its threads must call this together.
template <typename Operation>
__device__ inline float reduce_row(float value) {
  value = reduce_warp<Operation>(value);
  if (blockDim.x == kWarp) {
    return value;
  }
  __shared__ float of_warp[kWarp];
  const int lane = threadIdx.x % kWarp;
  __syncthreads();  // An earlier reduction may still be reading.
  if (lane == 0) {
    of_warp[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  value = lane < static_cast<int>(blockDim.x) / kWarp ? of_warp[lane] : Operation::identity;
  return reduce_warp<Operation>(value);
}

// Rows in registers -------------------------------------------------------------------------------------------

// Calls body(item, column) for the columns below `limit` that this thread owns: ITEMS vectors of VEC neighbours,
// blockDim.x vectors apart; with ITEMS == 0, as many as required. `limit` may have 32 bits if ITEMS > 0.
template <int VEC, int ITEMS, typename Index, typename Body>
__device__ inline void for_each_vector(Index limit, Body body) {
  if constexpr (ITEMS > 0) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const Index column = (static_cast<Index>(item) * blockDim.x + threadIdx.x) * VEC;
      if (column < limit) {
        body(item, column);
      }
    }
  } else {
    const int64_t step = static_cast<int64_t>(blockDim.x) * VEC;
    for (int64_t column = static_cast<int64_t>(threadIdx.x) * VEC; column < limit; column += step) {
      body(0, column);
    }
  }
}

// A row of the input, read once into registers; with ITEMS == 0 (rows too long for registers), at each use.
template <typename T, int VEC, int ITEMS>
class Row {
 public:
  template <typename Index>
  __device__ Row(const T* start, Index limit) : start_(start) {
    if constexpr (ITEMS > 0) {
      for_each_vector<VEC, ITEMS>(limit, [&](int item, Index column) { items_[item] = load<VEC>(start + column); });
    }
  }

  __device__ Vector<T, VEC> vector(int item, int64_t column) const {
    if constexpr (ITEMS > 0) {
      return items_[item];
    } else {
      return load<VEC>(start_ + column);
    }
  }

 private:
  const T* start_;
  Vector<T, VEC> items_[ITEMS > 0 ? ITEMS : 1];
};

// Launching ---------------------------------------------------------------------------------------------------

inline void check(cudaError_t status) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
  }
}

inline int64_t ceil_div(int64_t amount, int64_t divisor) { return (amount + divisor - 1) / divisor; }

inline int64_t num_multiprocessors(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Sets the current device for a launch and restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&former_));
    changed_ = device != former_;
    if (changed_) {
      check(cudaSetDevice(device));
    }
  }
  ~DeviceGuard() {
    if (changed_) {
      cudaSetDevice(former_);
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_ = 0;
  bool changed_ = false;
};

// Above this, a kernel must be allowed to have its dynamic shared memory.
constexpr int kSharedBytesOfAnyKernel = 48 * 1024;

template <typename... Expected>
void allow_shared(void (*kernel)(Expected...), int bytes) {
  if (bytes > kSharedBytesOfAnyKernel) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  }
}

// Number of blocks of a kernel that all multiprocessors of a device can hold at the same time.
template <typename... Expected>
int64_t resident_blocks(int device, dim3 block, int shared_bytes, void (*kernel)(Expected...)) {
  DeviceGuard guard(device);
  allow_shared(kernel, shared_bytes);
  int of_one = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one, kernel, static_cast<int>(block.x * block.y),
                                                      static_cast<size_t>(shared_bytes)));
  return num_multiprocessors(device) * (of_one < 1 ? 1 : of_one);
}

template <typename... Expected, typename... Given>
void launch_with_shared(const Launch& where, dim3 grid, dim3 block, int shared_bytes, void (*kernel)(Expected...),
                        Given... arguments) {
  DeviceGuard guard(where.device);
  allow_shared(kernel, shared_bytes);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(where.stream);
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <typename... Expected, typename... Given>
void launch(const Launch& where, dim3 grid, dim3 block, void (*kernel)(Expected...), Given... arguments) {
  launch_with_shared(where, grid, block, 0, kernel, arguments...);
}

inline bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

template <typename T>
struct Type {
  using type = T;
};

// Calls body(Type<T>{}) for the type with the code `dtype`.
template <typename Body>
void with_type(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::float32:
      return body(Type<float>{});
    case Dtype::float16:
      return body(Type<__half>{});
    case Dtype::bfloat16:
      return body(Type<__nv_bfloat16>{});
  }
  throw std::invalid_argument("unknown dtype code " + std::to_string(static_cast<int>(dtype)));
}

template <int N>
using Constant = std::integral_constant<int, N>;

// Threads of a row: block.x threads with `items` vectors each, block.y rows per block.
struct RowPlan {
  dim3 block;
  int items;
};

constexpr int kMaxRowThreads = 512;
constexpr int kFewItems = 2;
constexpr int kMaxItems = 4;  // More would exceed the registers of 512 threads.

inline RowPlan plan_row(int64_t num_vectors, int few_items) {
  for (const int items : {few_items, kMaxItems}) {
    if (num_vectors <= kWarp * items) {
      return {dim3(kWarp, 4), items};
    }
    if (num_vectors <= kMaxRowThreads * items) {
      return {dim3(static_cast<unsigned>(ceil_div(ceil_div(num_vectors, items), kWarp) * kWarp), 1), items};
    }
  }
  return {dim3(kMaxRowThreads, 1), 0};
}

// Calls body(Constant<VEC>{}, Constant<ITEMS>{}, block) with the values for rows of `columns` elements of T.
template <typename T, typename Body>
void with_row_plan(int64_t columns, bool vectorized, Body body) {
  constexpr int kVec = 16 / sizeof(T);
  if (!vectorized) {
    const RowPlan plan = plan_row(columns, kMaxItems);
    if (plan.items == 0) {
      return body(Constant<1>{}, Constant<0>{}, plan.block);
    }
    return body(Constant<1>{}, Constant<kMaxItems>{}, plan.block);
  }
  const RowPlan plan = plan_row(columns / kVec, kFewItems);
  switch (plan.items) {
    case kFewItems:
      return body(Constant<kVec>{}, Constant<kFewItems>{}, plan.block);
    case kMaxItems:
      return body(Constant<kVec>{}, Constant<kMaxItems>{}, plan.block);
    default:
      return body(Constant<kVec>{}, Constant<0>{}, plan.block);
  }
}

}  // namespace neox
