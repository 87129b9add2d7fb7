// Layer norm: see norm.cuh.

#include "norm.cuh"

namespace neox {

int64_t norm_partial_rows(int device, int64_t rows, int64_t columns) {
  // Eight blocks per multiprocessor, if each has at least 32 rows: a row of two partial sums causes as much memory
  // traffic as two to three rows of data.
  const int64_t multiprocessors = num_multiprocessors(device);
  const int64_t useful = ceil_div(rows, 32);
  const int64_t most = multiprocessors * 8;
  const int64_t least = multiprocessors < rows ? multiprocessors : rows;
  const int64_t blocks = useful < most ? useful : most;
  const int64_t bounded = blocks < least ? least : blocks;
  return bounded < 1 ? 1 : bounded;
}

void layer_norm_forward(const Launch& where, Dtype dtype, const void* x, Parameter weight, Parameter bias, void* result,
                        float* mean, float* inverse_deviation, int64_t rows, int64_t columns, float epsilon) {
  norm_forward<true>(where, dtype, x, weight, bias, result, mean, inverse_deviation, rows, columns, epsilon);
}

void layer_norm_backward(const Launch& where, Dtype dtype, const void* gradient, const void* x, Parameter weight,
                         const float* mean, const float* inverse_deviation, void* x_gradient,
                         ParameterGradient weight_gradient, ParameterGradient bias_gradient, float* partials,
                         int64_t rows, int64_t columns) {
  norm_backward<true>(where, dtype, gradient, x, weight, mean, inverse_deviation, x_gradient, weight_gradient,
                      bias_gradient, partials, rows, columns);
}

}  // namespace neox
