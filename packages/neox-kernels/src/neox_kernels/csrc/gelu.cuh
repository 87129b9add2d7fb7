// GELU and SiLU with their derivatives, in float32.

#pragma once

#include "common.cuh"

namespace neox {

// 1 / (1 + exp(-x)); the fast division returns 0 if the divisor exceeds 2^126, which is correct.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

struct Silu {
  __device__ static float value(float z) { return z * sigmoid(z); }
  __device__ static float slope(float z) {
    const float s = sigmoid(z);
    return s * (1.0f + z * (1.0f - s));
  }
};

// z (1 + tanh(u)) / 2 = z sigmoid(2u) with 2u = kTwo (z + kCubic z^3): one exponential instead of a tanh.
struct GeluTanh {
  static constexpr float kTwo = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;
  __device__ static float value(float z) { return z * sigmoid(kTwo * z * (1.0f + kCubic * z * z)); }
  __device__ static float slope(float z) {
    const float s = sigmoid(kTwo * z * (1.0f + kCubic * z * z));
    // If z^2 overflows, s (1 - s) is 0 and the product would be 0 * inf.
    const float bend = s * (1.0f - s);
    return bend == 0.0f ? s : s + z * bend * kTwo * (1.0f + 3.0f * kCubic * z * z);
  }
};

struct GeluErf {
  static constexpr float kRootHalf = 0.7071067811865476f;
  static constexpr float kDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)
  __device__ static float normal(float z) { return 0.5f * (1.0f + erff(z * kRootHalf)); }
  __device__ static float value(float z) { return z * normal(z); }
  __device__ static float slope(float z) { return normal(z) + z * kDensity * expf(-0.5f * z * z); }
};

}  // namespace neox
