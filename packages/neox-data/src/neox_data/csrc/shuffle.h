// Part of native.cpp: numpy's legacy generator and shuffle, with identical results.
#pragma once

#include <algorithm>
#include <cstdint>

// MT19937, seeded like numpy.random.RandomState with a number below 2**32.
class MersenneTwister {
 public:
  explicit MersenneTwister(uint32_t seed) {
    for (uint32_t i = 0; i < kWords; ++i) {
      key_[i] = seed;
      seed = 1812433253u * (seed ^ (seed >> 30)) + i + 1;
    }
  }

  uint32_t next() {
    if (position_ == kWords) refill();
    return words_[position_++];
  }

 private:
  static constexpr int kWords = 624, kFar = 397;

  // All words at once, in loops that the compiler can vectorize.
  void refill() {
    auto mix = [](uint32_t high, uint32_t low) {
      uint32_t word = (high & 0x80000000u) | (low & 0x7fffffffu);
      return (word >> 1) ^ (0x9908b0dfu & -(low & 1));
    };
    for (int i = 0; i < kWords - kFar; ++i) key_[i] = key_[i + kFar] ^ mix(key_[i], key_[i + 1]);
    for (int i = kWords - kFar; i < kWords - 1; ++i) key_[i] = key_[i + kFar - kWords] ^ mix(key_[i], key_[i + 1]);
    key_[kWords - 1] = key_[kFar - 1] ^ mix(key_[kWords - 1], key_[0]);
    for (int i = 0; i < kWords; ++i) {
      uint32_t word = key_[i];
      word ^= word >> 11;
      word ^= (word << 7) & 0x9d2c5680u;
      word ^= (word << 15) & 0xefc60000u;
      words_[i] = word ^ (word >> 18);
    }
    position_ = 0;
  }

  uint32_t key_[kWords], words_[kWords];
  int position_ = kWords;
};

// Fisher-Yates shuffle from the last position down. The position to swap with is uniform in 0 to `last`: words are
// masked with the smallest covering mask and rejected if above `last`. Positions are drawn ahead, to prefetch memory,
// and without a branch on rejection, which would be unpredictable.
template <typename T>
void shuffle_array(T* values, int64_t size, MersenneTwister& random) {
  constexpr int64_t kAhead = 64;
  int64_t places[kAhead + 1];
  uint64_t mask = 1;
  while (size > 1 && mask < static_cast<uint64_t>(size - 1)) mask = (mask << 1) | 1;
  for (int64_t last = size - 1; last > 0;) {
    int64_t count = std::min(kAhead, last);
    for (int64_t drawn = 0; drawn < count;) {
      uint64_t limit = last - drawn, word = random.next();
      while ((mask >> 1) >= limit) mask >>= 1;
      if (limit > 0xffffffffu) word = (word << 32) | random.next();
      word &= mask;
      places[drawn] = static_cast<int64_t>(word);
      drawn += word <= limit;
    }
    for (int64_t k = 0; k < count; ++k) __builtin_prefetch(values + places[k], 1);
    for (int64_t k = 0; k < count; ++k) std::swap(values[last - k], values[places[k]]);
    last -= count;
  }
}
