// CUDA on a CPU, for tests: the kernels of csrc, unchanged, compiled by g++ and run thread by thread.
//
// Each CUDA thread of a block is a fiber (ucontext). It runs until a barrier or a shuffle, and continues when all
// threads have reached it. Shared memory is static memory; blocks run one after the other. Reading too early or at a
// wrong index therefore gives a wrong value, and a barrier that some threads do not reach is reported.
// NEOX_EMULATOR_REVERSE=1 runs threads from the last to the first, to test another order of unsynchronized accesses.

#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint4 __ldg(const uint4* address) { return *address; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}
// NEOX_EMULATOR_FAIL names the function that reports a failed launch.
inline cudaError_t failure_of(const char* function) {
  const char* failing = std::getenv("NEOX_EMULATOR_FAIL");
  return failing != nullptr && std::strcmp(failing, function) == 0 ? cudaErrorInvalidConfiguration : cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return failure_of("cudaGetLastError"); }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
namespace emulator {

constexpr unsigned kWarpSize = 32;
constexpr size_t kSharedBytes = 164 * 1024;         // of a multiprocessor of an A100, 1 KiB of which each block loses
constexpr size_t kSharedBytesByDefault = 48 * 1024;  // of a block
constexpr size_t kResidentThreads = 2048;
constexpr size_t kStackBytes = 64 * 1024;
enum class Place { running, barrier, shuffle, done };

struct Fiber {
  ucontext_t context;
  dim3 thread;
  Place place = Place::running;
  float offered = 0;
  std::vector<char> stack = std::vector<char>(kStackBytes);
};

inline std::vector<Fiber> fibers;  // Threads of the current block, by thread number.
inline ucontext_t scheduler;
inline unsigned current;
inline dim3 grid, block, block_index;
inline std::function<void()> body;
inline std::map<void*, size_t> allowed_shared;  // Kernels that may have more shared memory than by default.
inline std::vector<float4> shared_memory;

inline float* dynamic_shared() { return &shared_memory.data()->x; }

inline void leave(Place place) {
  fibers[current].place = place;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void run_body() {
  body();
  leave(Place::done);
}

inline void start(Fiber& fiber) {
  fiber.place = Place::running;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = fiber.stack.size();
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_body, 0);
}

inline bool all_at(unsigned first, unsigned last, Place place) {
  for (unsigned i = first; i < last; ++i) {
    if (fibers[i].place != place) {
      return false;
    }
  }
  return true;
}

// Runs one fiber until its next barrier or shuffle.
inline void resume(unsigned index) {
  current = index;
  fibers[index].place = Place::running;
  swapcontext(&scheduler, &fibers[index].context);
}

inline void run_block() {
  const unsigned count = block.x * block.y * block.z;
  const float nan = std::nanf("");
  std::fill(shared_memory.begin(), shared_memory.end(), float4{nan, nan, nan, nan});
  const bool reverse = std::getenv("NEOX_EMULATOR_REVERSE") != nullptr;
  if (fibers.size() < count) {
    fibers.resize(count);
  }
  for (unsigned i = 0; i < count; ++i) {
    fibers[i].thread = dim3(i % block.x, i / block.x % block.y, i / block.x / block.y);
    start(fibers[i]);
  }
  // A fiber may run if it is new, or if all participants of its barrier or shuffle have reached it.
  std::vector<char> ready(count, 1);
  unsigned done = 0;
  while (done < count) {
    bool progress = false;
    for (unsigned k = 0; k < count; ++k) {
      const unsigned i = reverse ? count - 1 - k : k;
      if (ready[i]) {
        ready[i] = 0;
        resume(i);
        progress = true;
        done += fibers[i].place == Place::done;
      }
    }
    for (unsigned warp = 0; warp < count; warp += kWarpSize) {
      if (!ready[warp] && all_at(warp, warp + kWarpSize, Place::shuffle)) {
        std::fill(ready.begin() + warp, ready.begin() + warp + kWarpSize, 1);
        progress = true;
      }
    }
    if (all_at(0, count, Place::barrier)) {
      std::fill(ready.begin(), ready.end(), 1);
      progress = true;
    }
    if (!progress && done < count) {
      throw std::runtime_error("emulator: some threads wait for others that never come");
    }
  }
}

}  // namespace emulator

#define threadIdx (emulator::fibers[emulator::current].thread)
inline const dim3& blockIdx = emulator::block_index;
inline const dim3& blockDim = emulator::block;
inline const dim3& gridDim = emulator::grid;

inline void __syncthreads() { emulator::leave(emulator::Place::barrier); }

// All lanes write their value, synchronize, read, and synchronize again before the next shuffle.
inline float __shfl_xor_sync(unsigned mask, float value, int distance) {
  if (mask != 0xffffffffu) {
    throw std::runtime_error("emulator: only whole warps can shuffle");
  }
  const unsigned self = emulator::current;
  emulator::fibers[self].offered = value;
  emulator::leave(emulator::Place::shuffle);
  const float received = emulator::fibers[self ^ static_cast<unsigned>(distance)].offered;
  emulator::leave(emulator::Place::shuffle);
  return received;
}

inline float __shfl_sync(unsigned mask, float value, int lane) {
  const unsigned self = emulator::current;
  return __shfl_xor_sync(mask, value, static_cast<int>(self % emulator::kWarpSize) ^ lane);
}

#define NEOX_DYNAMIC_SHARED(name) float* const name = emulator::dynamic_shared()

inline float __fdividef(float dividend, float divisor) { return dividend / divisor; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  if (which == cudaDevAttrMaxSharedMemoryPerBlockOptin) {
    *value = static_cast<int>(emulator::kSharedBytes - 1024);
    return cudaSuccess;
  }
  const char* count = std::getenv("NEOX_EMULATOR_MULTIPROCESSORS");
  *value = count == nullptr ? 2 : std::atoi(count);
  return cudaSuccess;
}

template <typename... Expected>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Expected...), cudaFuncAttribute, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > emulator::kSharedBytes - 1024) {
    return cudaErrorInvalidValue;
  }
  emulator::allowed_shared[reinterpret_cast<void*>(kernel)] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

// Does not know the registers of a kernel.
template <typename... Expected>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*)(Expected...), int threads,
                                                          size_t shared_bytes) {
  *blocks = static_cast<int>(std::min(emulator::kResidentThreads / static_cast<size_t>(threads),
                                      emulator::kSharedBytes / (shared_bytes + 1024)));
  return cudaSuccess;
}

template <typename... Expected, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...), Given&&... given) {
  if (failure_of("cudaLaunchKernelEx") != cudaSuccess) {
    return cudaErrorInvalidConfiguration;
  }
  using namespace emulator;
  grid = config->gridDim;
  block = config->blockDim;
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (threads == 0 || threads > 1024 || threads % kWarpSize != 0 || grid.x == 0 || grid.x > 2147483647u ||
      grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535) {
    return cudaErrorInvalidConfiguration;
  }
  const auto allowed = allowed_shared.find(reinterpret_cast<void*>(kernel));
  if (config->dynamicSmemBytes > (allowed == allowed_shared.end() ? kSharedBytesByDefault : allowed->second)) {
    return cudaErrorInvalidValue;
  }
  shared_memory.resize(config->dynamicSmemBytes / sizeof(float4));
  std::tuple<Expected...> arguments(given...);
  body = [&] { std::apply(kernel, arguments); };
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        block_index = dim3(x, y, z);
        run_block();
      }
    }
  }
  return cudaSuccess;
}
