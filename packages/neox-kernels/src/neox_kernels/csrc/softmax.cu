// Softmax of scaled scores, with a causal mask, a boolean mask, or neither. The maths: scaled_softmax.py.
//
// A row is read into registers, reduced twice (maximum, sum), and written. Keys hidden by the causal mask are not read.
// A row of up to 128 vectors (1,024 16-bit keys) belongs to one warp, which needs no barrier, a longer one to up to 16.
// Rows of more than 2,048 vectors (16,384 16-bit keys) are read again in each of the three steps.

#include "common.cuh"

namespace neox {
namespace {

enum class Hides { nothing, later_keys, masked_keys };

// Rows ----------------------------------------------------------------------------------------------------------

constexpr int kRowThreads = 512;
constexpr int kItems = 4;  // vectors of a thread; eight would spill, or leave too few threads

// Columns of a row in registers have 32 bits.
template <int ITEMS>
using Column = std::conditional_t<ITEMS == 0, int64_t, int>;

// A row of the input, read once into registers; with ITEMS == 0 (rows too long for registers), at each use.
template <typename T, int VEC, int ITEMS>
class Row {
 public:
  __device__ Row(const T* start, Column<ITEMS> limit) : start_(start) {
    if constexpr (ITEMS > 0) {
      for_each_vector<VEC, ITEMS>(limit, [&](int item, int column) { items_[item] = load_words<VEC>(start + column); });
    }
  }

  __device__ Words<T, VEC> words(int item, Column<ITEMS> column) const {
    if constexpr (ITEMS > 0) {
      return items_[item];
    } else {
      return load_words<VEC>(start_ + column);
    }
  }

 private:
  const T* start_;
  Words<T, VEC> items_[ITEMS > 0 ? ITEMS : 1];
};

// Calls body(Constant<VEC>{}, Constant<ITEMS>{}, block): block.x threads for a row, with ITEMS vectors each (0: a loop),
// and block.y rows.
template <typename T, typename Body>
void with_row_plan(int64_t columns, bool vectorized, Body body) {
  constexpr int kVec = 16 / sizeof(T);
  const int64_t vectors = vectorized ? columns / kVec : columns;
  const int64_t threads = ceil_div(ceil_div(vectors, kItems), kWarp) * kWarp;
  const auto run = [&](auto vec) {
    if (threads > kRowThreads) {
      return body(vec, Constant<0>{}, dim3(kRowThreads));
    }
    const dim3 block = threads <= kWarp ? dim3(kWarp, 4) : dim3(static_cast<unsigned>(threads));
    return body(vec, Constant<kItems>{}, block);
  };
  return vectorized ? run(Constant<kVec>{}) : run(Constant<1>{});
}

__device__ inline int64_t visible_keys(int64_t query, int64_t queries, int64_t keys) {
  const int64_t visible = query + 1 + keys - queries;
  return visible < 0 ? 0 : visible;
}

// Replaces what the mask hides.
template <int VEC>
__device__ inline void hide_masked(float (&values)[VEC], const bool* mask) {
  if constexpr (VEC == 1) {
    values[0] = *mask ? -INFINITY : values[0];
  } else {
    uint32_t words[VEC / 4];
    memcpy(words, __builtin_assume_aligned(mask, VEC), sizeof words);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      values[j] = (words[j / 4] & 0xffu << 8 * (j % 4)) != 0 ? -INFINITY : values[j];
    }
  }
}

// Replaces what is from `count` on; vectors without such elements, almost all, skip it.
template <int VEC>
__device__ inline void replace_from(int64_t count, float (&values)[VEC], float replacement) {
  if (count < VEC) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      values[j] = j < static_cast<int>(count) ? values[j] : replacement;
    }
  }
}

template <typename T, int VEC>
__device__ inline void store_zeros(T* address) {
  Vector<T, VEC> zeros;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    zeros.values[j] = from_float<T>(0.0f);
  }
  store<VEC>(address, zeros);
}

// Kernels -------------------------------------------------------------------------------------------------------

template <typename T, int VEC, int ITEMS, Hides HIDES>
__global__ void __launch_bounds__(kRowThreads, 1)
    softmax_forward_kernel(const T* __restrict__ scores, Mask mask, T* __restrict__ probabilities, int64_t lead,
                           int64_t queries, int64_t keys, float scale) {
  using Index = Column<ITEMS>;
  const int64_t query = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (query >= queries) {
    return;  // A block with several rows has one warp per row and no barrier.
  }
  const Index width = static_cast<Index>(keys);
  const Index visible =
      HIDES == Hides::later_keys ? static_cast<Index>(visible_keys(query, queries, keys)) : width;
  for (int64_t batch = blockIdx.y; batch < lead; batch += gridDim.y) {
    const int64_t offset = (batch * queries + query) * keys;
    const Row<T, VEC, ITEMS> row(scores + offset, visible);
    const bool* mask_row = nullptr;
    if constexpr (HIDES == Hides::masked_keys) {
      mask_row = mask.masked_out + batch / mask.inner * mask.strides[0] + batch % mask.inner * mask.strides[1] +
                 query * mask.strides[2];
    }

    // Scaled scores of one vector; -inf if hidden.
    auto scaled = [&](int item, Index column, float (&values)[VEC]) {
      const Words<T, VEC> stored = row.words(item, column);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        values[j] = stored.value(j) * scale;
      }
      if constexpr (HIDES == Hides::later_keys) {
        replace_from(visible - column, values, -INFINITY);
      } else if constexpr (HIDES == Hides::masked_keys) {
        hide_masked(values, mask_row + column * (VEC > 1 ? 1 : mask.strides[3]));
      }
    };

    // Registers hold the scaled scores, then their exponentials. The logarithm of 2 is not in the scale: the product
    // may overflow where the scaled score does not.
    float kept[ITEMS > 0 ? ITEMS : 1][VEC];
    float peak = -INFINITY;
    for_each_vector<VEC, ITEMS>(visible, [&](int item, Index column) {
      scaled(item, column, kept[item]);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        peak = fmaxf(peak, kept[item][j]);
      }
    });
    peak = reduce_row<Maximum>(peak);
    const float base = peak == -INFINITY ? 0.0f : peak;

    float total = 0.0f;
    for_each_vector<VEC, ITEMS>(visible, [&](int item, Index column) {
      if constexpr (ITEMS == 0) {
        scaled(item, column, kept[item]);
      }
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        kept[item][j] = exponential<T>(kept[item][j] - base);
        total += kept[item][j];
      }
    });
    total = reduce_row<Sum>(total);
    const float inverse = total == 0.0f ? 0.0f : __fdividef(1.0f, total);

    for_each_vector<VEC, ITEMS>(width, [&](int item, Index column) {
      T* const place = probabilities + offset + column;
      if (HIDES == Hides::later_keys && column >= visible) {
        return store_zeros<T, VEC>(place);
      }
      if constexpr (ITEMS == 0) {
        scaled(item, column, kept[item]);
      }
      Vector<T, VEC> written;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float weight = ITEMS == 0 ? exponential<T>(kept[item][j] - base) : kept[item][j];
        written.values[j] = from_float<T>(weight * inverse);
      }
      store<VEC>(place, written);
    });
  }
}

template <typename T, int VEC, int ITEMS, bool CAUSAL>
__global__ void __launch_bounds__(kRowThreads, 1)
    softmax_backward_kernel(const T* __restrict__ gradient, const T* __restrict__ probabilities, T* __restrict__ result,
                            int64_t lead, int64_t queries, int64_t keys, float scale) {
  using Index = Column<ITEMS>;
  const int64_t query = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (query >= queries) {
    return;
  }
  const Index width = static_cast<Index>(keys);
  const Index visible = CAUSAL ? static_cast<Index>(visible_keys(query, queries, keys)) : width;
  for (int64_t batch = blockIdx.y; batch < lead; batch += gridDim.y) {
    const int64_t offset = (batch * queries + query) * keys;
    const Row<T, VEC, ITEMS> gradients(gradient + offset, visible);
    const Row<T, VEC, ITEMS> weights(probabilities + offset, visible);

    float product = 0.0f;
    for_each_vector<VEC, ITEMS>(visible, [&](int item, Index column) {
      const Words<T, VEC> g = gradients.words(item, column);
      const Words<T, VEC> p = weights.words(item, column);
      float products[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        products[j] = g.value(j) * p.value(j);
      }
      if constexpr (CAUSAL) {
        replace_from(visible - column, products, 0.0f);
      }
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        product += products[j];
      }
    });
    product = reduce_row<Sum>(product);

    for_each_vector<VEC, ITEMS>(width, [&](int item, Index column) {
      T* const place = result + offset + column;
      if (CAUSAL && column >= visible) {
        return store_zeros<T, VEC>(place);
      }
      const Words<T, VEC> g = gradients.words(item, column);
      const Words<T, VEC> p = weights.words(item, column);
      float values[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        values[j] = scale * p.value(j) * (g.value(j) - product);
      }
      if constexpr (CAUSAL) {
        replace_from(visible - column, values, 0.0f);
      }
      Vector<T, VEC> written;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        written.values[j] = from_float<T>(values[j]);
      }
      store<VEC>(place, written);
    });
  }
}

dim3 rows_grid(int64_t lead, int64_t queries, dim3 block) {
  const int64_t blocks = ceil_div(queries, block.y);
  if (blocks > INT32_MAX) {
    throw std::invalid_argument("softmax: " + std::to_string(queries) + " rows are more than one launch can take");
  }
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(lead < 65535 ? lead : 65535));
}

// Whether VEC booleans can be read at once: they are contiguous, and each row starts at a multiple of VEC.
bool is_vectorizable(const Mask& mask, int64_t vec) {
  return mask.strides[3] == 1 && is_aligned(mask.masked_out) && mask.strides[0] % vec == 0 &&
         mask.strides[1] % vec == 0 && mask.strides[2] % vec == 0;
}

}  // namespace

void softmax_forward(const Launch& where, Dtype dtype, const void* scores, const Mask& mask, void* probabilities,
                     int64_t lead, int64_t queries, int64_t keys, float scale, bool causal) {
  if (lead * queries * keys == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int64_t kVec = 16 / sizeof(T);
    const bool is_masked = mask.masked_out != nullptr;
    const bool vectorized = keys % kVec == 0 && is_aligned(scores) && is_aligned(probabilities) &&
                            (!is_masked || is_vectorizable(mask, kVec));
    with_row_plan<T>(keys, vectorized, [&](auto vec, auto items, dim3 block) {
      const auto kernel = is_masked ? softmax_forward_kernel<T, vec(), items(), Hides::masked_keys>
                          : causal  ? softmax_forward_kernel<T, vec(), items(), Hides::later_keys>
                                    : softmax_forward_kernel<T, vec(), items(), Hides::nothing>;
      launch(where, rows_grid(lead, queries, block), block, kernel, static_cast<const T*>(scores), mask,
             static_cast<T*>(probabilities), lead, queries, keys, scale);
    });
  });
}

void softmax_backward(const Launch& where, Dtype dtype, const void* gradient, const void* probabilities, void* result,
                      int64_t lead, int64_t queries, int64_t keys, float scale, bool causal) {
  if (lead * queries * keys == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectorized = keys % static_cast<int64_t>(16 / sizeof(T)) == 0 && is_aligned(gradient) &&
                            is_aligned(probabilities) && is_aligned(result);
    with_row_plan<T>(keys, vectorized, [&](auto vec, auto items, dim3 block) {
      const auto kernel = causal ? softmax_backward_kernel<T, vec(), items(), true>
                                 : softmax_backward_kernel<T, vec(), items(), false>;
      launch(where, rows_grid(lead, queries, block), block, kernel, static_cast<const T*>(gradient),
             static_cast<const T*>(probabilities), static_cast<T*>(result), lead, queries, keys, scale);
    });
  });
}

}  // namespace neox
