// bfloat16 for the emulator: the upper half of a float, rounded to nearest even.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 brain) {
  const uint32_t bits = static_cast<uint32_t>(brain.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (std::isnan(value)) {
    return {0x7fff};
  }
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits += 0x7fff + (bits >> 16 & 1);
  return {static_cast<uint16_t>(bits >> 16)};
}
