// Layer norm: see norm.cuh.

#include "norm.cuh"

namespace neox {

void layer_norm_forward(const Launch& where, Dtype dtype, const void* x, const void* residual, Parameter weight,
                        Parameter bias, void* sum, void* result, float* mean, float* inverse_deviation, int64_t rows,
                        int64_t columns, float epsilon) {
  norm_forward<true>(where, dtype, x, residual, weight, bias, sum, result, mean, inverse_deviation, rows, columns,
                     epsilon);
}

int64_t layer_norm_partial_rows(int device, Dtype dtype, Dtype of_parameters, int64_t rows, int64_t columns) {
  return norm_partial_rows<true>(device, dtype, of_parameters, rows, columns);
}

void layer_norm_backward(const Launch& where, Dtype dtype, const void* gradient, const void* of_sum, const void* x,
                         Parameter weight, const float* mean, const float* inverse_deviation, void* x_gradient,
                         ParameterGradient weight_gradient, ParameterGradient bias_gradient, float* partials,
                         int64_t partial_rows, int64_t rows, int64_t columns) {
  norm_backward<true>(where, dtype, gradient, of_sum, x, weight, mean, inverse_deviation, x_gradient, weight_gradient,
                      bias_gradient, partials, partial_rows, rows, columns);
}

}  // namespace neox
