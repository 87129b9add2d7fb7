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

// exp(x). For 16-bit results by the fast instruction, whose error of about 1e-6 is far below their rounding.
template <typename T>
__device__ inline float exponential(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    constexpr float kLog2E = 1.4426950408889634f;
#ifdef __CUDA_ARCH__
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * kLog2E));
    return power;
#else
    return exp2f(x * kLog2E);
#endif
  }
}

// 1 / x by the fast instruction, with an error of about 1e-7 of the result; 0 above 2^126.
__device__ inline float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + exp(-x)); exp(-x) = inf gives 0, which is correct.
template <typename T>
__device__ inline float sigmoid(float x) {
  const float divisor = 1.0f + exponential<T>(-x);
  return sizeof(T) == 4 ? __fdividef(1.0f, divisor) : reciprocal(divisor);
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

// A vector as 32-bit words. nvcc 13.0 gives each 16-bit element of a Vector a register of its own, and compiles an
// assignment of a Vector to a store for each element (seen in its PTX).
template <typename T, int N>
struct Words {
  static constexpr int kBytes = static_cast<int>(sizeof(T)) * N;
  static constexpr int kCount = kBytes < 4 ? 1 : kBytes / 4;
  uint32_t words[kCount];

  Words() = default;

  __device__ explicit Words(const Vector<T, N>& vector) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = bits_of<uint32_t>(vector.values[i]);
      } else if constexpr (N == 1) {
        words[i] = bits_of<uint16_t>(vector.values[i]);
      } else {
        words[i] = static_cast<uint32_t>(bits_of<uint16_t>(vector.values[2 * i + 1])) << 16 |
                   bits_of<uint16_t>(vector.values[2 * i]);
      }
    }
  }

  __device__ float value(int j) const {
    if constexpr (sizeof(T) == 4) {
      return bits_of<float>(words[j]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return bits_of<float>(j % 2 == 0 ? words[j / 2] << 16 : words[j / 2] & 0xffff0000u);
    } else {
      return to_float(bits_of<T>(static_cast<uint16_t>(j % 2 == 0 ? words[j / 2] : words[j / 2] >> 16)));
    }
  }
};

template <int N, typename T>
__device__ inline Words<T, N> load_words(const T* address) {
  Words<T, N> read;
  if constexpr (Words<T, N>::kBytes == 16) {
    const uint4 four = *reinterpret_cast<const uint4*>(address);
    read.words[0] = four.x;
    read.words[1] = four.y;
    read.words[2] = four.z;
    read.words[3] = four.w;
  } else if constexpr (Words<T, N>::kBytes == 8) {
    const uint2 two = *reinterpret_cast<const uint2*>(address);
    read.words[0] = two.x;
    read.words[1] = two.y;
  } else if constexpr (Words<T, N>::kBytes == 4) {
    read.words[0] = *reinterpret_cast<const uint32_t*>(address);
  } else {
    read.words[0] = bits_of<uint16_t>(*address);
  }
  return read;
}

template <int N, typename T>
__device__ inline Vector<T, N> load(const T* address) {
  if constexpr (sizeof(T) * N == 16) {
    return bits_of<Vector<T, N>>(*reinterpret_cast<const uint4*>(address));
  } else {
    return *reinterpret_cast<const Vector<T, N>*>(address);
  }
}

// One instruction. Unlike an intrinsic, it may be moved across reads, but not across other stores of this kind: no kernel
// reads what it has stored.
template <int N, typename T>
__device__ inline void store(T* address, const Vector<T, N>& vector) {
  const Words<T, N> in(vector);
#ifdef __CUDA_ARCH__
  if constexpr (Words<T, N>::kBytes == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(in.words[0]), "r"(in.words[1]),
                 "r"(in.words[2]), "r"(in.words[3]));
  } else if constexpr (Words<T, N>::kBytes == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(in.words[0]), "r"(in.words[1]));
  } else if constexpr (Words<T, N>::kBytes == 4) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(in.words[0]));
  } else {
    asm volatile("st.global.b16 [%0], %1;" ::"l"(address), "h"(static_cast<uint16_t>(in.words[0])));
  }
#else
  memcpy(address, in.words, in.kBytes);
#endif
}

// VEC neighbouring floats, in accesses of up to 16 bytes, of which the address must be a multiple.
template <int VEC>
__device__ inline void load_floats(float (&values)[VEC], const float* address) {
  constexpr int kPart = VEC < 4 ? VEC : 4;
#pragma unroll
  for (int part = 0; part < VEC / kPart; ++part) {
    const Words<float, kPart> words = load_words<kPart>(address + part * kPart);
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      values[part * kPart + j] = words.value(j);
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

// Every LANES neighbours of a warp get their common result.
template <typename Operation, int LANES = kWarp>
__device__ inline float reduce_warp(float value) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
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
// blockDim.x vectors apart; with ITEMS == 0, as many as required. `limit` may have 32 bits if ITEMS > 0. THREADS is
// blockDim.x, if that is a constant: then a thread's addresses differ by constants; 0: it is not.
template <int VEC, int ITEMS, int THREADS = 0, typename Index, typename Body>
__device__ inline void for_each_vector(Index limit, Body body) {
  if constexpr (ITEMS > 0) {
    const Index threads = THREADS > 0 ? THREADS : static_cast<Index>(blockDim.x);
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const Index column = (item * threads + static_cast<Index>(threadIdx.x)) * VEC;
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

// Launching ---------------------------------------------------------------------------------------------------

inline void check(cudaError_t status) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
  }
}

inline int64_t ceil_div(int64_t amount, int64_t divisor) { return (amount + divisor - 1) / divisor; }

inline int64_t attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

inline int64_t num_multiprocessors(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

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
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, arguments...);
  const cudaError_t last = cudaGetLastError();  // Also forgets it: the next call is not to blame.
  check(status != cudaSuccess ? status : last);
}

template <typename... Expected, typename... Given>
void launch(const Launch& where, dim3 grid, dim3 block, void (*kernel)(Expected...), Given... arguments) {
  launch_with_shared(where, grid, block, 0, kernel, arguments...);
}

inline bool is_aligned(const void* address, int64_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

inline bool are_aligned(std::initializer_list<const void*> addresses) {
  for (const void* address : addresses) {
    if (!is_aligned(address)) {
      return false;
    }
  }
  return true;
}

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// Whether rows of this many elements, or with this stride, consist of whole vectors of 16 bytes.
inline bool fills_vectors(Dtype dtype, int64_t elements) { return elements * size_of(dtype) % 16 == 0; }

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

}  // namespace neox
