// Orders of samples and blends, item for item those of the numpy functions of the same names.
//
// Built when the package is installed, if there is a compiler; nothing needs it. Compiled with -ffp-contract=off: a
// fused multiply-add would decide ties of a blend in another way than IEEE multiplication and subtraction do.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace py = pybind11;

namespace {

// A one-dimensional, contiguous array of T, without a copy.
template <typename T>
struct Span {
  T* data;
  int64_t size;

  Span(const py::buffer& buffer, const char* name, bool writable = false) {
    py::buffer_info info = buffer.request(writable);
    if (info.itemsize != sizeof(T)) throw std::invalid_argument(std::string(name) + " has another item size");
    int64_t expected = info.itemsize;
    for (int64_t axis = info.ndim - 1; axis >= 0; --axis) {
      if (info.shape[axis] > 1 && info.strides[axis] != expected)
        throw std::invalid_argument(std::string(name) + " is not contiguous");
      expected *= info.shape[axis];
    }
    data = static_cast<T*>(info.ptr);
    size = info.size;
  }
};

// ---------------------------------------------------------------- numpy's legacy generator and its shuffle

constexpr int kStateWords = 624;

// MT19937 from and back to the words and the position that numpy's RandomState.get_state gives.
class MersenneTwister {
 public:
  MersenneTwister(const uint32_t* key, int position) : position_(position) { std::copy(key, key + kStateWords, key_); }

  uint32_t next() {
    if (position_ == kStateWords) refill();
    uint32_t word = key_[position_++];
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    return word ^ (word >> 18);
  }

  // Uniform in 0 to limit: words under the smallest covering mask, until one is not above the limit.
  uint64_t interval(uint64_t limit, uint64_t mask) {
    uint64_t value;
    if (limit <= 0xffffffffu) {
      while ((value = next() & mask) > limit) {
      }
    } else {
      do {
        uint64_t high = next();
        value = ((high << 32) | next()) & mask;
      } while (value > limit);
    }
    return value;
  }

  int position() const { return position_; }
  void copy_key(uint32_t* key) const { std::copy(key_, key_ + kStateWords, key); }

 private:
  void refill() {
    auto mix = [](uint32_t high, uint32_t low) {
      uint32_t word = (high & 0x80000000u) | (low & 0x7fffffffu);
      return (word >> 1) ^ ((low & 1) ? 0x9908b0dfu : 0u);
    };
    for (int i = 0; i < 227; ++i) key_[i] = key_[i + 397] ^ mix(key_[i], key_[i + 1]);
    for (int i = 227; i < 623; ++i) key_[i] = key_[i - 227] ^ mix(key_[i], key_[i + 1]);
    key_[623] = key_[396] ^ mix(key_[623], key_[0]);
    position_ = 0;
  }

  uint32_t key_[kStateWords];
  int position_;
};

// Fisher and Yates from the last place down. The places to swap with are drawn ahead, so that memory is fetched in time.
template <typename T>
void shuffle_array(T* values, int64_t size, MersenneTwister& random) {
  constexpr int64_t kAhead = 64;
  int64_t places[kAhead];
  uint64_t mask = 1;
  while (size > 1 && mask < static_cast<uint64_t>(size - 1)) mask = (mask << 1) | 1;
  for (int64_t last = size - 1; last > 0;) {
    int64_t count = std::min(kAhead, last);
    for (int64_t k = 0; k < count; ++k) {
      uint64_t limit = last - k;
      while ((mask >> 1) >= limit) mask >>= 1;
      places[k] = static_cast<int64_t>(random.interval(limit, mask));
      __builtin_prefetch(values + places[k], 1);
    }
    for (int64_t k = 0; k < count; ++k) std::swap(values[last - k], values[places[k]]);
    last -= count;
  }
}

int shuffle(const py::buffer& values, const py::buffer& key, int position) {
  Span<uint32_t> words(key, "key", true);
  if (words.size != kStateWords || position < 0 || position > kStateWords)
    throw std::invalid_argument("not the state of a Mersenne twister");
  py::buffer_info info = values.request(true);
  MersenneTwister random(words.data, position);
  if (info.itemsize == 4) {
    Span<uint32_t> span(values, "values", true);
    py::gil_scoped_release unlocked;
    shuffle_array(span.data, span.size, random);
  } else {
    Span<uint64_t> span(values, "values", true);
    py::gil_scoped_release unlocked;
    shuffle_array(span.data, span.size, random);
  }
  random.copy_key(words.data);
  return random.position();
}

// ---------------------------------------------------------------- places of samples

template <typename T>
void fill_starts(T* starts, int64_t rows, const int32_t* stream, int64_t num_documents, const int32_t* sizes,
                 int64_t seq_length) {
  int64_t begin = 0, position = seq_length, row = 1;
  starts[0] = starts[1] = 0;
  for (int64_t document = 0; document < num_documents && row < rows; ++document) {
    int64_t end = begin + sizes[stream[document]];
    for (; position < end && row < rows; position += seq_length, ++row) {
      starts[2 * row] = static_cast<T>(document);
      starts[2 * row + 1] = static_cast<T>(position - begin);
    }
    begin = end;
  }
  if (row < rows) throw std::invalid_argument("the documents hold fewer tokens than the samples need");
}

void sample_starts(const py::buffer& stream, const py::buffer& sizes, const py::buffer& starts, int64_t seq_length) {
  Span<const int32_t> documents(stream, "stream"), lengths(sizes, "sizes");
  py::buffer_info info = starts.request(true);
  int64_t rows = info.shape.at(0);
  if (info.itemsize == 4) {
    Span<int32_t> out(starts, "starts", true);
    py::gil_scoped_release unlocked;
    fill_starts(out.data, rows, documents.data, documents.size, lengths.data, seq_length);
  } else {
    Span<int64_t> out(starts, "starts", true);
    py::gil_scoped_release unlocked;
    fill_starts(out.data, rows, documents.data, documents.size, lengths.data, seq_length);
  }
}

// ---------------------------------------------------------------- blending

// Finds the furthest dataset by looking at all of them: the fastest way for a few hundred.
class Scan {
 public:
  static constexpr int64_t kLanes = 4, kUnroll = 4;

  // Padded with datasets that are behind every other.
  Scan(const double* weights, int64_t num_datasets)
      : padded_((num_datasets + kLanes * kUnroll - 1) / (kLanes * kUnroll) * (kLanes * kUnroll)),
        weights_(padded_, 0.0), taken_(padded_, std::numeric_limits<double>::infinity()), deficits_(padded_) {
    std::copy(weights, weights + num_datasets, weights_.begin());
    std::fill_n(taken_.begin(), num_datasets, 0.0);
  }

  template <typename T>
  void run(T* order, int64_t first, int64_t last, int64_t* taken) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return run_avx2(order, first, last, taken);
#endif
    for (int64_t k = first; k < last; ++k) {
      double items = static_cast<double>(std::max<int64_t>(k, 1));
      for (int64_t j = 0; j < padded_; ++j) deficits_[j] = weights_[j] * items - taken_[j];
      int64_t furthest = std::max_element(deficits_.begin(), deficits_.end()) - deficits_.begin();
      taken_[furthest] += 1;
      ++taken[furthest];
      order[k] = static_cast<T>(furthest);
    }
  }

 private:
#if defined(__x86_64__)
  template <typename T>
  __attribute__((target("avx2"))) void run_avx2(T* order, int64_t first, int64_t last, int64_t* taken) {
    static const double kOne[2 * kLanes - 1] = {0, 0, 0, 1, 0, 0, 0};
    double* deficits = deficits_.data();
    for (int64_t k = first; k < last; ++k) {
      __m256d items = _mm256_set1_pd(static_cast<double>(std::max<int64_t>(k, 1)));
      __m256d most[kUnroll];
      for (int64_t u = 0; u < kUnroll; ++u) most[u] = deficits_of(u * kLanes, items);
      for (int64_t j = kLanes * kUnroll; j < padded_; j += kLanes * kUnroll)
        for (int64_t u = 0; u < kUnroll; ++u) most[u] = _mm256_max_pd(most[u], deficits_of(j + u * kLanes, items));
      __m256d top = _mm256_max_pd(_mm256_max_pd(most[0], most[1]), _mm256_max_pd(most[2], most[3]));
      top = _mm256_max_pd(top, _mm256_permute2f128_pd(top, top, 1));
      top = _mm256_max_pd(top, _mm256_permute_pd(top, 5));
      int64_t block = 0;
      int found;
      while (!(found = equal_lanes(deficits + block, top))) block += kLanes * kUnroll;
      int lane = __builtin_ctz(found);
      int64_t furthest = block + lane;
      // As a whole vector: the next item loads it again at once, and a lane alone would have to reach memory first.
      double* place = &taken_[furthest / kLanes * kLanes];
      __m256d one = _mm256_loadu_pd(kOne + kLanes - 1 - lane % kLanes);
      _mm256_storeu_pd(place, _mm256_add_pd(_mm256_loadu_pd(place), one));
      ++taken[furthest];
      order[k] = static_cast<T>(furthest);
    }
  }

  __attribute__((target("avx2"))) __m256d deficits_of(int64_t j, __m256d items) {
    __m256d deficits =
        _mm256_sub_pd(_mm256_mul_pd(_mm256_loadu_pd(&weights_[j]), items), _mm256_loadu_pd(&taken_[j]));
    _mm256_storeu_pd(&deficits_[j], deficits);
    return deficits;
  }

  // A bit for each of the next kLanes * kUnroll deficits that equals `top`.
  __attribute__((target("avx2"))) static int equal_lanes(const double* deficits, __m256d top) {
    int bits = 0;
    for (int u = 0; u < kUnroll; ++u) {
      __m256d equal = _mm256_cmp_pd(_mm256_loadu_pd(deficits + u * kLanes), top, _CMP_EQ_OQ);
      bits |= _mm256_movemask_pd(equal) << (u * kLanes);
    }
    return bits;
  }
#endif

  int64_t padded_;
  std::vector<double> weights_, taken_, deficits_;
};

// Finds the furthest dataset in a tournament whose matches are played again only when their outcome can have changed:
// logarithmic in the number of different weights, so the way for thousands of datasets.
//
// Datasets of the same weight take turns, so each weight is one player. A match remembers the first item for which
// rounding aside, or with the worst rounding, the loser could be ahead; until then its winner stands.
class Tournament {
 public:
  Tournament(const double* weights, int64_t num_datasets) {
    std::vector<int64_t> by_weight(num_datasets);
    std::iota(by_weight.begin(), by_weight.end(), 0);
    std::stable_sort(by_weight.begin(), by_weight.end(),
                     [weights](int64_t a, int64_t b) { return weights[a] > weights[b]; });
    for (int64_t j : by_weight) {
      if (players_.empty() || players_.back().weight != weights[j]) players_.push_back({weights[j], 0.0, 0, {}});
      players_.back().members.push_back(j);
    }
    while (num_leaves_ < static_cast<int64_t>(players_.size())) num_leaves_ *= 2;
    matches_.assign(2 * num_leaves_, {-1, kNever, 0});
    for (int64_t leaf = 0; leaf < num_leaves_; ++leaf) {
      matches_[num_leaves_ + leaf].next = kNever;
      if (leaf < static_cast<int64_t>(players_.size())) matches_[num_leaves_ + leaf].winner = leaf;
    }
  }

  template <typename T>
  void run(T* order, int64_t first, int64_t last, int64_t* taken) {
    for (int64_t k = first; k < last; ++k) {
      refresh(1, k);
      int64_t winner = matches_[1].winner;
      Player& player = players_[winner];
      int64_t furthest = player.front();
      if (++player.turn == static_cast<int64_t>(player.members.size())) {
        player.turn = 0;
        player.taken += 1;
      }
      for (int64_t match = (num_leaves_ + winner) / 2; match > 0; match /= 2) matches_[match].next = 0;
      ++taken[furthest];
      order[k] = static_cast<T>(furthest);
    }
  }

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  static constexpr double kRounding = 0x1p-50;

  // All datasets of one weight. The next to be taken is the first that has been taken once less than the others.
  struct Player {
    double weight, taken;
    int64_t turn;
    std::vector<int64_t> members;
    int64_t front() const { return members[turn]; }
  };

  // `fails`: the first item whose match must be played again; `next`: the first of this match and all below it.
  struct Match {
    int64_t winner, fails, next;
  };

  void refresh(int64_t match, int64_t k) {
    if (matches_[match].next > k) return;
    refresh(2 * match, k);
    refresh(2 * match + 1, k);
    play(match, k);
  }

  void play(int64_t match, int64_t k) {
    const Match &left = matches_[2 * match], &right = matches_[2 * match + 1];
    int64_t fails = kNever, winner = left.winner;
    if (right.winner >= 0) {
      bool left_wins = is_ahead(players_[left.winner], players_[right.winner], k);
      winner = left_wins ? left.winner : right.winner;
      fails = first_doubt(players_[winner], players_[left_wins ? right.winner : left.winner], k);
    }
    matches_[match] = {winner, fails, std::min({fails, left.next, right.next})};
  }

  static bool is_ahead(const Player& a, const Player& b, int64_t k) {
    double items = static_cast<double>(std::max<int64_t>(k, 1));
    double deficit_a = a.weight * items - a.taken, deficit_b = b.weight * items - b.taken;
    return deficit_a != deficit_b ? deficit_a > deficit_b : a.front() < b.front();
  }

  // The first item after k for which the computed deficit of `winner` may not be above that of `loser`.
  static int64_t first_doubt(const Player& winner, const Player& loser, int64_t k) {
    double closing = loser.weight - winner.weight + kRounding * (winner.weight + loser.weight);
    double lead = loser.taken - winner.taken - kRounding * (winner.taken + loser.taken);
    if (closing > 0) {
      double doubt = lead / closing * (1 - kRounding);
      return doubt >= 0x1p62 ? kNever : std::max(k + 1, static_cast<int64_t>(std::floor(doubt)));
    }
    return lead > 0 || static_cast<double>(k) * -closing > -lead * (1 + kRounding) ? kNever : k + 1;
  }

  std::vector<Player> players_;
  std::vector<Match> matches_;
  int64_t num_leaves_ = 1;
};

template <typename Order, typename T>
void blend(const double* weights, int64_t num_datasets, T* order, int64_t num_items, int64_t* taken_before,
           int64_t block) {
  Order furthest(weights, num_datasets);
  std::vector<int64_t> taken(num_datasets, 0);
  for (int64_t first = 0; first <= num_items; first += block, taken_before += num_datasets) {
    std::copy(taken.begin(), taken.end(), taken_before);
    furthest.run(order, first, std::min(first + block, num_items), taken.data());
  }
}

template <typename T>
void blend_into(const Span<const double>& weights, const py::buffer& order, int64_t* taken_before, int64_t block,
                int64_t most_scanned) {
  Span<T> items(order, "order", true);
  py::gil_scoped_release unlocked;
  if (weights.size <= most_scanned)
    blend<Scan>(weights.data, weights.size, items.data, items.size, taken_before, block);
  else
    blend<Tournament>(weights.data, weights.size, items.data, items.size, taken_before, block);
}

void blend_order(const py::buffer& weights, const py::buffer& order, const py::buffer& taken_before, int64_t block,
                 int64_t most_scanned) {
  Span<const double> shares(weights, "weights");
  Span<int64_t> taken(taken_before, "taken_before", true);
  py::buffer_info info = order.request(true);
  if (shares.size < 1 || block < 1 || taken.size != (info.size / block + 1) * shares.size)
    throw std::invalid_argument("taken_before must have a row for each block and a column for each weight");
  if (info.itemsize == 1)
    blend_into<uint8_t>(shares, order, taken.data, block, most_scanned);
  else if (info.itemsize == 2)
    blend_into<uint16_t>(shares, order, taken.data, block, most_scanned);
  else
    blend_into<uint32_t>(shares, order, taken.data, block, most_scanned);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.def("shuffle", &shuffle, py::arg("values"), py::arg("key"), py::arg("position"));
  module.def("sample_starts", &sample_starts, py::arg("stream"), py::arg("sizes"), py::arg("starts"),
             py::arg("seq_length"));
  module.def("blend_order", &blend_order, py::arg("weights"), py::arg("order"), py::arg("taken_before"),
             py::arg("block"), py::arg("most_scanned"));
}
