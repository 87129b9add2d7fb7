// GELU and SiLU with their derivatives, in float32, for results of type T.
//
// The instruction tanh.approx would save one of about ten instructions, but its error of 2^-11 is a fifth of gelu(-3).

#pragma once

#include "common.cuh"

namespace neox {

template <typename T>
struct Silu {
  __device__ static float value(float z) { return z * sigmoid<T>(z); }
  __device__ static float slope(float z) {
    const float s = sigmoid<T>(z);
    return s * (1.0f + z * (1.0f - s));
  }
};

// z (1 + tanh(u)) / 2 = z sigmoid(2u) with 2u = kTwo (z + kCubic z^3): one exponential instead of a tanh.
template <typename T>
struct GeluTanh {
  static constexpr float kTwo = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;
  __device__ static float gate(float z) { return sigmoid<T>(z * (kTwo + kTwo * kCubic * (z * z))); }
  __device__ static float value(float z) { return z * gate(z); }
  __device__ static float slope(float z) {
    const float s = gate(z);
    // If z^2 overflows, s (1 - s) is 0 and the product would be 0 * inf.
    const float bend = s - s * s;
    return bend == 0.0f ? s : s + z * bend * (kTwo + 3.0f * kTwo * kCubic * (z * z));
  }
};

// z times the normal distribution function. For 16-bit results that is formula 7.1.26 of Abramowitz and Stegun, "Handbook
// of mathematical functions", with an error of at most 1e-7 and the exponential that the density needs, too.
template <typename T>
struct GeluErf {
  static constexpr float kRootHalf = 0.7071067811865476f;
  static constexpr float kDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)
  static constexpr float kFalloff = 0.3275911f * kRootHalf;

  __device__ static float bell(float z) { return exponential<T>(-0.5f * (z * z)); }

  __device__ static float normal(float z) {
    if constexpr (sizeof(T) == 4) {
      return 0.5f + 0.5f * erff(z * kRootHalf);
    } else {
      const float t = reciprocal(1.0f + kFalloff * fabsf(z));
      float sum = 0.5f * 1.061405429f;
      sum = sum * t - 0.5f * 1.453152027f;
      sum = sum * t + 0.5f * 1.421413741f;
      sum = sum * t - 0.5f * 0.284496736f;
      sum = sum * t + 0.5f * 0.254829592f;
      const float tail = sum * t * bell(z);
      return z < 0.0f ? tail : 1.0f - tail;
    }
  }

  __device__ static float value(float z) { return z * normal(z); }
  __device__ static float slope(float z) { return normal(z) + z * kDensity * bell(z); }
};

}  // namespace neox
