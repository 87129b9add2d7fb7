// Softmax of scaled scores, with a causal mask, a boolean mask, or neither. The maths: scaled_softmax.py.
//
// A row is read into registers, reduced twice (maximum, sum), and written. Keys hidden by the causal mask are not
// read. Rows longer than 2,048 vectors (16,384 16-bit keys) are read again in each of the three steps.

#include "common.cuh"

namespace neox {
namespace {

__device__ inline int64_t visible_keys(int64_t query, int64_t queries, int64_t keys, bool causal) {
  if (!causal) {
    return keys;
  }
  const int64_t visible = query + 1 + keys - queries;
  return visible < 0 ? 0 : visible;
}

// One bit for each of VEC neighbouring keys: 1 if the mask hides it.
template <int VEC>
__device__ inline unsigned hidden_bits(const bool* row, int64_t stride, bool vectorized, int64_t column) {
  unsigned bits = 0;
  if (vectorized) {
    const Vector<bool, VEC> neighbours = load<VEC>(row + column);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      bits |= neighbours.values[j] ? 1u << j : 0u;
    }
  } else {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      bits |= row[(column + j) * stride] ? 1u << j : 0u;
    }
  }
  return bits;
}

template <typename T, int VEC, int ITEMS>
__global__ void __launch_bounds__(kMaxRowThreads)
    softmax_forward_kernel(const T* scores, Mask mask, bool vectorized_mask, T* probabilities, int64_t lead,
                           int64_t queries, int64_t keys, float scale, bool causal) {
  const int64_t query = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (query >= queries) {
    return;  // A block with several rows has one warp per row and no barrier.
  }
  const int64_t visible = visible_keys(query, queries, keys, causal);
  for (int64_t batch = blockIdx.y; batch < lead; batch += gridDim.y) {
    const int64_t offset = (batch * queries + query) * keys;
    const Row<T, VEC, ITEMS> row(scores + offset, visible);
    const bool* mask_row = nullptr;
    if (mask.masked_out != nullptr) {
      mask_row = mask.masked_out + batch / mask.inner * mask.strides[0] + batch % mask.inner * mask.strides[1] +
                 query * mask.strides[2];
    }

    // Scaled scores of one vector; -inf if hidden.
    auto scaled = [&](int item, int64_t column, float (&values)[VEC]) {
      const Vector<T, VEC> stored = row.vector(item, column);
      const unsigned hidden =
          mask_row == nullptr ? 0u : hidden_bits<VEC>(mask_row, mask.strides[3], vectorized_mask, column);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const bool is_hidden = column + j >= visible || (hidden >> j & 1u);
        values[j] = is_hidden ? -INFINITY : to_float(stored.values[j]) * scale;
      }
    };

    // Registers hold the scaled scores, then their exponentials.
    float kept[ITEMS > 0 ? ITEMS : 1][VEC];
    float peak = -INFINITY;
    for_each_vector<VEC, ITEMS>(visible, [&](int item, int64_t column) {
      scaled(item, column, kept[item]);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        peak = fmaxf(peak, kept[item][j]);
      }
    });
    peak = reduce_row<Maximum>(peak);
    const float base = peak == -INFINITY ? 0.0f : peak;

    float total = 0.0f;
    for_each_vector<VEC, ITEMS>(visible, [&](int item, int64_t column) {
      if constexpr (ITEMS == 0) {
        scaled(item, column, kept[item]);
      }
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        kept[item][j] = expf(kept[item][j] - base);
        total += kept[item][j];
      }
    });
    total = reduce_row<Sum>(total);
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;

    for_each_vector<VEC, ITEMS>(keys, [&](int item, int64_t column) {
      Vector<T, VEC> written;
      if (column >= visible) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          written.values[j] = from_float<T>(0.0f);
        }
      } else {
        if constexpr (ITEMS == 0) {
          scaled(item, column, kept[item]);
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float weight = ITEMS == 0 ? expf(kept[item][j] - base) : kept[item][j];
          written.values[j] = from_float<T>(weight * inverse);
        }
      }
      store<VEC>(probabilities + offset + column, written);
    });
  }
}

template <typename T, int VEC, int ITEMS>
__global__ void __launch_bounds__(kMaxRowThreads)
    softmax_backward_kernel(const T* gradient, const T* probabilities, T* result, int64_t lead, int64_t queries,
                            int64_t keys, float scale, bool causal) {
  const int64_t query = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (query >= queries) {
    return;
  }
  int64_t visible = visible_keys(query, queries, keys, causal);
  for (int64_t batch = blockIdx.y; batch < lead; batch += gridDim.y) {
    const int64_t offset = (batch * queries + query) * keys;
    const Row<T, VEC, ITEMS> gradients(gradient + offset, visible);
    const Row<T, VEC, ITEMS> weights(probabilities + offset, visible);

    float product = 0.0f;
    for_each_vector<VEC, ITEMS>(visible, [&](int item, int64_t column) {
      const Vector<T, VEC> g = gradients.vector(item, column);
      const Vector<T, VEC> p = weights.vector(item, column);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        product += column + j < visible ? to_float(g.values[j]) * to_float(p.values[j]) : 0.0f;
      }
    });
    product = reduce_row<Sum>(product);

    for_each_vector<VEC, ITEMS>(keys, [&](int item, int64_t column) {
      Vector<T, VEC> written;
      if (column >= visible) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          written.values[j] = from_float<T>(0.0f);
        }
      } else {
        const Vector<T, VEC> g = gradients.vector(item, column);
        const Vector<T, VEC> p = weights.vector(item, column);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float value = scale * to_float(p.values[j]) * (to_float(g.values[j]) - product);
          written.values[j] = from_float<T>(column + j < visible ? value : 0.0f);
        }
      }
      store<VEC>(result + offset + column, written);
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

}  // namespace

void softmax_forward(const Launch& where, Dtype dtype, const void* scores, const Mask& mask, void* probabilities,
                     int64_t lead, int64_t queries, int64_t keys, float scale, bool causal) {
  if (lead * queries * keys == 0) {
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int64_t kVec = 16 / sizeof(T);
    const bool vectorized = keys % kVec == 0 && is_aligned(scores) && is_aligned(probabilities);
    // VEC booleans are read at once if they are contiguous and each row starts at a multiple of VEC.
    const bool vectorized_mask = vectorized && mask.masked_out != nullptr && mask.strides[3] == 1 &&
                                 is_aligned(mask.masked_out) && mask.strides[0] % kVec == 0 &&
                                 mask.strides[1] % kVec == 0 && mask.strides[2] % kVec == 0;
    with_row_plan<T>(keys, vectorized, [&](auto vec, auto items, dim3 block) {
      launch(where, rows_grid(lead, queries, block), block, softmax_forward_kernel<T, vec(), items()>,
             static_cast<const T*>(scores), mask, vectorized_mask, static_cast<T*>(probabilities), lead, queries, keys,
             scale, causal);
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
      launch(where, rows_grid(lead, queries, block), block, softmax_backward_kernel<T, vec(), items()>,
             static_cast<const T*>(gradient), static_cast<const T*>(probabilities), static_cast<T*>(result), lead,
             queries, keys, scale, causal);
    });
  });
}

}  // namespace neox
