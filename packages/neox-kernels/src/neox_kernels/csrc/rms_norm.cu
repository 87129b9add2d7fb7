// RMS norm: see norm.cuh.

#include "norm.cuh"

namespace neox {

void rms_norm_forward(const Launch& where, Dtype dtype, const void* x, const void* residual, Parameter weight, void* sum,
                      void* result, float* inverse_deviation, int64_t rows, int64_t columns, float epsilon) {
  norm_forward<false>(where, dtype, x, residual, weight, Parameter{nullptr, dtype}, sum, result, nullptr,
                      inverse_deviation, rows, columns, epsilon);
}

int64_t rms_norm_partial_rows(int device, Dtype dtype, Dtype of_parameters, int64_t rows, int64_t columns) {
  return norm_partial_rows<false>(device, dtype, of_parameters, rows, columns);
}

void rms_norm_backward(const Launch& where, Dtype dtype, const void* gradient, const void* of_sum, const void* x,
                       Parameter weight, const float* inverse_deviation, void* x_gradient, ParameterGradient weight_gradient,
                       float* partials, int64_t partial_rows, int64_t rows, int64_t columns) {
  norm_backward<false>(where, dtype, gradient, of_sum, x, weight, nullptr, inverse_deviation, x_gradient, weight_gradient,
                       ParameterGradient{nullptr, dtype}, partials, partial_rows, rows, columns);
}

}  // namespace neox
