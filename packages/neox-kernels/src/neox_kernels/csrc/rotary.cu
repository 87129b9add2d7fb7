// Rotary position embedding of query and key, in one launch, in place or to new tensors. The maths: rotary.py.
//
// A unit of work is VEC channel pairs of one head, or VEC unchanged channels to copy (none in place): the most that divide
// sizes and strides, up to 16 bytes. The threads of a block have the same positions, so that they share the cosines and
// sines in the cache; each computes its unit at several.

#include "common.cuh"

namespace neox {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPositions = 8;  // of a thread

// Work units of one tensor at one position.
template <typename T>
struct Work {
  const T* input;
  int64_t input_strides[3];
  T* result;
  int64_t result_strides[3];
  uint32_t heads;
  uint32_t units_per_head;
  uint32_t units;
};

template <typename T, int VEC>
__device__ inline void rotate(const T* input, T* result, const float* cos, const float* sin, uint32_t pairs,
                              float direction) {
  const Words<T, VEC> first = load_words<VEC>(input);
  const Words<T, VEC> second = load_words<VEC>(input + pairs);
  float cosines[VEC];
  float sines[VEC];
  load_floats(cosines, cos);
  load_floats(sines, sin);
  Vector<T, VEC> first_out;
  Vector<T, VEC> second_out;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const float a = first.value(j);
    const float b = second.value(j);
    const float s = sines[j] * direction;
    first_out.values[j] = from_float<T>(a * cosines[j] - b * s);
    second_out.values[j] = from_float<T>(b * cosines[j] + a * s);
  }
  store<VEC>(result, first_out);
  store<VEC>(result + pairs, second_out);
}

template <typename T, int VEC>
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(Work<T> query, Work<T> key, const float* __restrict__ cos, const float* __restrict__ sin,
                  int64_t sequence, uint32_t pairs, float direction) {
  const Work<T> work = blockIdx.z == 0 ? query : key;
  const uint32_t unit = blockIdx.x * kThreads + threadIdx.x;
  if (unit >= work.units) {
    return;
  }
  const uint32_t head_number = unit / work.units_per_head;
  const uint32_t place = unit % work.units_per_head;
  const int64_t batch = head_number / work.heads;
  const int64_t head = head_number % work.heads;
  const bool is_rotated = place < pairs / VEC;
  const uint32_t channel = is_rotated ? place * VEC : place * VEC + pairs;  // The units of pairs have two channels each.
  const int64_t start = blockIdx.y;
  const T* input = work.input + channel + start * work.input_strides[0] + batch * work.input_strides[1] +
                   head * work.input_strides[2];
  T* result = work.result + channel + start * work.result_strides[0] + batch * work.result_strides[1] +
              head * work.result_strides[2];
  const int64_t input_step = gridDim.y * work.input_strides[0];
  const int64_t result_step = gridDim.y * work.result_strides[0];
  const uint32_t count = static_cast<uint32_t>((sequence - start + gridDim.y - 1) / gridDim.y);
  if (is_rotated) {
    int64_t angle = start * pairs + channel;
    const int64_t angle_step = static_cast<int64_t>(gridDim.y) * pairs;
#pragma unroll 2
    for (uint32_t i = 0; i < count; ++i) {
      rotate<T, VEC>(input, result, cos + angle, sin + angle, pairs, direction);
      input += input_step;
      result += result_step;
      angle += angle_step;
    }
  } else {
#pragma unroll 2
    for (uint32_t i = 0; i < count; ++i) {
      store<VEC>(result, load<VEC>(input));
      input += input_step;
      result += result_step;
    }
  }
}

// Processes all units of a tensor at one position; 32-bit counters.
template <typename T>
Work<T> plan_work(const Heads& heads, int64_t batch, int64_t width, int64_t pairs, int64_t vec) {
  const bool in_place = heads.input == heads.result;
  const int64_t per_head = pairs / vec + (in_place ? 0 : (width - 2 * pairs) / vec);
  const int64_t units = batch * heads.heads * per_head;
  if (units > INT32_MAX) {
    throw std::invalid_argument("rotary: " + std::to_string(units) +
                                " units at one position are more than one launch can take");
  }
  Work<T> work = {};
  work.input = static_cast<const T*>(heads.input);
  work.result = static_cast<T*>(heads.result);
  for (int i = 0; i < 3; ++i) {
    work.input_strides[i] = heads.input_strides[i];
    work.result_strides[i] = heads.result_strides[i];
  }
  work.heads = static_cast<uint32_t>(heads.heads);
  work.units_per_head = static_cast<uint32_t>(per_head);
  work.units = static_cast<uint32_t>(units);
  return work;
}

bool can_vectorize(const Heads& heads, int64_t vec, int64_t itemsize) {
  bool possible = is_aligned(heads.input, vec * itemsize) && is_aligned(heads.result, vec * itemsize);
  for (int i = 0; i < 3; ++i) {
    possible = possible && heads.input_strides[i] % vec == 0 && heads.result_strides[i] % vec == 0;
  }
  return possible;
}

}  // namespace

void rotary(const Launch& where, Dtype dtype, const Heads& query, const Heads& key, const float* cos, const float* sin,
            int64_t sequence, int64_t batch, int64_t width, int64_t pairs, bool inverse) {
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto fits = [&](int64_t vec) {
      const int64_t of_angles = 4 * (vec < 4 ? vec : 4);
      return pairs % vec == 0 && width % vec == 0 && is_aligned(cos, of_angles) && is_aligned(sin, of_angles) &&
             can_vectorize(query, vec, sizeof(T)) && can_vectorize(key, vec, sizeof(T));
    };
    auto run = [&](auto vec) {
      const Work<T> of_query = plan_work<T>(query, batch, width, pairs, vec());
      const Work<T> of_key = plan_work<T>(key, batch, width, pairs, vec());
      const int64_t units = of_query.units > of_key.units ? of_query.units : of_key.units;
      if (units == 0 || sequence == 0) {
        return;
      }
      const int64_t blocks = ceil_div(sequence, kPositions);
      const dim3 grid(static_cast<unsigned>(ceil_div(units, kThreads)),
                      static_cast<unsigned>(blocks < 65535 ? blocks : 65535), 2);
      launch(where, grid, dim3(kThreads), rotary_kernel<T, vec()>, of_query, of_key, cos, sin, sequence,
             static_cast<uint32_t>(pairs), inverse ? -1.0f : 1.0f);
    };
    constexpr int kVec = 16 / sizeof(T);
    if (fits(kVec)) {
      run(Constant<kVec>{});
    } else if (fits(4)) {
      run(Constant<4>{});
    } else if (fits(2)) {
      run(Constant<2>{});
    } else {
      run(Constant<1>{});
    }
  });
}

}  // namespace neox
