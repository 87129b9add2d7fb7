// Rows of norms: how many columns a thread takes, and vectors as they are stored.

#pragma once

#include "common.cuh"

namespace neox {

constexpr int kNormThreads = 256;
constexpr int kWarpRows = 4;  // rows of a block, if each has one warp
constexpr int kScalars = 8;   // columns of a thread, without vectors
constexpr int kShort = 16;    // with vectors
constexpr int kMiddle = 32;
constexpr int kLong = 64;

constexpr int kNormBlocks = 2;  // of a multiprocessor, at least: 128 registers for a thread

// Threads of a row with this number of columns of a thread; 0: as many as it takes.
template <int OF_THREAD>
constexpr int kThreads = OF_THREAD > kShort ? kNormThreads : 0;

template <int VEC, int ITEMS, typename Index, typename Body>
__device__ inline void for_each_of_row(Index columns, Body body) {
  for_each_vector<VEC, ITEMS, kThreads<VEC * ITEMS>>(columns, body);
}

// Calls body(Constant<VEC>{}, Constant<ITEMS>{}, block): each thread has ITEMS vectors of VEC elements; 0: a loop.
template <typename T, typename Body>
void with_norm_plan(int64_t columns, bool vectorized, Body body) {
  constexpr int kVec = 16 / sizeof(T);
  const auto block = [columns](int of_thread) {
    const int64_t threads = ceil_div(ceil_div(columns, of_thread), kWarp) * kWarp;
    return threads <= kWarp ? dim3(kWarp, kWarpRows) : dim3(static_cast<unsigned>(threads));
  };
  if (!vectorized) {
    if (columns <= kNormThreads * kScalars) {
      return body(Constant<1>{}, Constant<kScalars>{}, block(kScalars));
    }
    return body(Constant<1>{}, Constant<0>{}, dim3(kNormThreads));
  }
  if (columns <= kNormThreads * kShort) {
    return body(Constant<kVec>{}, Constant<kShort / kVec>{}, block(kShort));
  }
  if (columns <= kNormThreads * kMiddle) {
    return body(Constant<kVec>{}, Constant<kMiddle / kVec>{}, dim3(kThreads<kMiddle>));
  }
  if constexpr (sizeof(T) == 2) {
    if (columns <= kNormThreads * kLong) {
      return body(Constant<kVec>{}, Constant<kLong / kVec>{}, dim3(kThreads<kLong>));
    }
  }
  return body(Constant<kVec>{}, Constant<0>{}, dim3(kNormThreads));
}

// Calls body(Type<T>{}, Type<W>{}) for the types of the activations and of weight and bias: the same, or float32.
template <typename Body>
void with_norm_types(Dtype dtype, Dtype of_parameters, Body body) {
  if (of_parameters != dtype && of_parameters != Dtype::float32) {
    throw std::invalid_argument("norm: weight and bias must both be of the input's type or both float32");
  }
  with_type(dtype, [&](auto type) {
    if (of_parameters == dtype) {
      return body(type, type);
    }
    return body(type, Type<float>{});
  });
}

template <int ITEMS>
using ColumnIndex = std::conditional_t<ITEMS == 0, int64_t, int>;

// A vector as it is stored, in 32-bit words.
template <typename T, int VEC>
struct Packed {
  static constexpr int kWords = VEC * sizeof(T) > 4 ? VEC * static_cast<int>(sizeof(T)) / 4 : 1;
  uint32_t words[kWords];

  __device__ void read(const T* address) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (int part = 0; part < kWords / 4; ++part) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(address) + part);
        words[4 * part] = four.x;
        words[4 * part + 1] = four.y;
        words[4 * part + 2] = four.z;
        words[4 * part + 3] = four.w;
      }
    } else if constexpr (sizeof(T) == 2) {
      words[0] = bits_of<uint16_t>(*address);
    } else {
      words[0] = bits_of<uint32_t>(*address);
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

  // Lets the compiler unpack the words again, where it would keep the values in registers until their next use.
  __device__ void forget_values() {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      asm volatile("" : "+r"(words[i]));
    }
#endif
  }
};

// Lets the compiler read from the address again, and only after `known` has been computed, where it would keep what it
// has read in registers, or read early.
template <typename Address>
__device__ inline Address read_after(float known, Address address) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(address) : "f"(known));
#endif
  return address;
}

template <int VEC, typename W>
__device__ inline void load_as_floats(float (&values)[VEC], const W* address) {
  Packed<W, VEC> stored;
  stored.read(address);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    values[j] = stored.value(j);
  }
}

}  // namespace neox
