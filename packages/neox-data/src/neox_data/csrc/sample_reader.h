// Part of native.cpp: reads the tokens of a sample from its documents.
#pragma once

#include <cstdint>
#include <cstring>

// Element i of an array at any address: the arrays of an .idx file are not aligned.
template <typename T>
inline T load(const char* data, int64_t i) {
  T value;
  std::memcpy(&value, data + i * sizeof(T), sizeof(T));
  return value;
}

// Integers of 4 bytes (as Small) or 8 bytes.
template <typename Small>
struct Numbers {
  const char* data;
  int64_t size;
  bool is_small;

  int64_t operator[](int64_t i) const {
    return is_small ? static_cast<int64_t>(load<Small>(data, i)) : load<int64_t>(data, i);
  }
};

// The tokens of a .bin; dispatches on their type once per piece.
struct TokenArray {
  const char* data;
  int64_t size, token_bytes;
  bool is_signed;

  void widen(int64_t first, int64_t count, int64_t* out) const {
    switch (token_bytes) {
      case 1: return is_signed ? widen_as<int8_t>(first, count, out) : widen_as<uint8_t>(first, count, out);
      case 2: return is_signed ? widen_as<int16_t>(first, count, out) : widen_as<uint16_t>(first, count, out);
      case 4: return widen_as<int32_t>(first, count, out);
      default: return widen_as<int64_t>(first, count, out);
    }
  }

 private:
  template <typename T>
  void widen_as(int64_t first, int64_t count, int64_t* out) const {
    const char* from = data + first * sizeof(T);
    for (int64_t i = 0; i < count; ++i) out[i] = load<T>(from, i);
  }
};

struct SampleArrays {
  TokenArray tokens;
  Numbers<int32_t> places, sizes;              // Position and number of tokens of each sequence.
  Numbers<int32_t> documents, starts;          // As in SampleIndex; two of `starts` are a row.
  Numbers<uint32_t> shuffle;
  int64_t units_per_token;                     // Of `places`.

  // Writes the tokens of an item; returns false if the item does not exist or the index is inconsistent.
  bool read(int64_t item, int64_t* out, int64_t length) const {
    if (item < 0 || item >= shuffle.size) return false;
    const int64_t sample = shuffle[item], rows = starts.size / 2;
    if (sample < 0 || sample >= rows - 1) return false;
    const int64_t row = 2 * sample;
    int64_t document = starts[row], offset = starts[row + 1];
    const int64_t last = starts[row + 2], end = starts[row + 3];
    if (document < 0 || last >= documents.size) return false;
    for (; document <= last; ++document, offset = 0) {
      const int64_t sequence = documents[document];
      if (sequence < 0 || sequence >= sizes.size) return false;
      const int64_t size = sizes[sequence], place = places[sequence];
      const int64_t first = place / units_per_token;
      if (place < 0 || place % units_per_token || size < 0 || first > tokens.size - size) return false;
      // Compared before anything is added: damaged values may be as large as their type allows.
      if (offset < 0 || offset > size || (document == last && (end < 0 || end >= size))) return false;
      const int64_t count = (document == last ? end + 1 : size) - offset;
      if (count < 0 || count > length) return false;
      tokens.widen(first + offset, count, out);
      out += count;
      length -= count;
    }
    return length == 0;
  }
};
