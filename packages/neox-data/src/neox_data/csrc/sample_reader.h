// Part of native.cpp: a sample's tokens, cut from the pieces of documents that it is made of.
#pragma once

#include <cstdint>
#include <cstring>

// Whole numbers of 4 bytes (as Small) or 8, at any address: the arrays of an .idx file are not aligned.
template <typename Small>
struct Numbers {
  const char* data;
  int64_t size;
  bool is_small;

  int64_t operator[](int64_t i) const {
    if (is_small) {
      Small value;
      std::memcpy(&value, data + i * sizeof(value), sizeof(value));
      return value;
    }
    int64_t value;
    std::memcpy(&value, data + i * sizeof(value), sizeof(value));
    return value;
  }
};

// The tokens of a .bin; of which type they are is asked once a piece.
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
    const T* from = reinterpret_cast<const T*>(data) + first;
    for (int64_t i = 0; i < count; ++i) out[i] = from[i];
  }
};

struct SampleArrays {
  TokenArray tokens;
  Numbers<int32_t> places, sizes;              // Of each sequence: where it begins, and its tokens.
  Numbers<int32_t> documents, starts;          // As in SampleIndex; two of `starts` are a row.
  Numbers<uint32_t> shuffle;
  int64_t units_per_token;                     // Of `places`.

  // Writes the tokens of an item; false where there is no such item, or something is out of its place.
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
      const int64_t count = (document == last ? end + 1 : size) - offset;
      if (offset < 0 || count < 0 || count > size - offset || count > length) return false;
      tokens.widen(first + offset, count, out);
      out += count;
      length -= count;
    }
    return length == 0;
  }
};
