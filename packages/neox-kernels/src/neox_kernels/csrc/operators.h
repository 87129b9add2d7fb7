// The operators as functions of raw addresses, sizes, strides in elements, and a launch target. No torch, no CUDA.
//
// Matrices are `rows x columns`, contiguous unless a stride is given. A null address means no bias.
// A backward pass with sums over rows has a scratch memory `partials` of `partial_rows * columns` floats (twice that for two
// sums). `partial_rows` is the number of blocks over the rows: what the function *_partial_rows returned.

#pragma once

#include <cstdint>

namespace neox {

enum class Dtype : int { float32 = 0, float16 = 1, bfloat16 = 2 };

struct Launch {
  int device;
  uintptr_t stream;
};

// A weight or bias: its type may differ from the activations'.
struct Parameter {
  const void* address;
  Dtype dtype;
};

struct ParameterGradient {
  void* address;
  Dtype dtype;
};

// softmax.cu. Scores are [lead, queries, keys]; the mask has lead = outer * inner and a stride for each of
// (outer, inner, queries, keys), 0 for broadcast dimensions.
struct Mask {
  const bool* masked_out;
  int64_t inner;
  int64_t strides[4];
};
void softmax_forward(const Launch& where, Dtype dtype, const void* scores, const Mask& mask, void* probabilities,
                     int64_t lead, int64_t queries, int64_t keys, float scale, bool causal);
void softmax_backward(const Launch& where, Dtype dtype, const void* gradient, const void* probabilities, void* result,
                      int64_t lead, int64_t queries, int64_t keys, float scale, bool causal);

// bias_gelu.cu
void bias_gelu_forward(const Launch& where, Dtype dtype, const void* x, Parameter bias, void* result, int64_t rows,
                       int64_t columns, bool tanh_form);
void bias_gelu_backward(const Launch& where, Dtype dtype, const void* gradient, const void* x, Parameter bias,
                        void* x_gradient, ParameterGradient bias_gradient, float* partials, int64_t partial_rows,
                        int64_t rows, int64_t columns, bool tanh_form);
int64_t bias_gelu_partial_rows(int device, Dtype dtype, int64_t rows, int64_t columns, bool tanh_form);

// bias_dropout_add.cu. An element is kept if its 16 random bits are below `keep_below`; `seed` is one 64-bit number in
// device memory, not read if keep_below is 2^16. Without a bias, `partials` is null.
void bias_dropout_add_forward(const Launch& where, Dtype dtype, const void* x, Parameter bias, const void* residual,
                              const int64_t* seed, void* result, int64_t rows, int64_t columns, int64_t keep_below,
                              float keep_scale);
void bias_dropout_add_backward(const Launch& where, Dtype dtype, const void* gradient, const int64_t* seed,
                               void* x_gradient, ParameterGradient bias_gradient, float* partials,
                               int64_t partial_rows, int64_t rows, int64_t columns, int64_t keep_below,
                               float keep_scale);
int64_t bias_dropout_add_partial_rows(int device, Dtype dtype, int64_t rows, int64_t columns);

// gated.cu. Backward stores the product of the forward pass again in `product`, unless it is null. Without biases,
// `partials` is null; with one of them, it has room for the sums of both.
enum class Activation : int { silu = 0, gelu_tanh = 1, gelu_erf = 2 };
void gated_forward(const Launch& where, Dtype dtype, Activation activation, const void* up, int64_t up_stride,
                   const void* gate, int64_t gate_stride, Parameter up_bias, Parameter gate_bias, void* result,
                   int64_t rows, int64_t columns);
void gated_backward(const Launch& where, Dtype dtype, Activation activation, const void* gradient, const void* up,
                    int64_t up_stride, const void* gate, int64_t gate_stride, Parameter up_bias, Parameter gate_bias,
                    void* up_gradient, void* gate_gradient, void* product, ParameterGradient up_bias_gradient,
                    ParameterGradient gate_bias_gradient, float* partials, int64_t partial_rows, int64_t rows,
                    int64_t columns);
int64_t gated_partial_rows(int device, Dtype dtype, Activation activation, int64_t rows, int64_t columns);

// rotary.cu. A tensor is [sequence, batch, heads, width] with three strides; the last dimension is contiguous.
// cos and sin are [sequence, pairs] float32, contiguous.
struct Heads {
  const void* input;
  int64_t input_strides[3];
  void* result;
  int64_t result_strides[3];
  int64_t heads;
};
void rotary(const Launch& where, Dtype dtype, const Heads& query, const Heads& key, const float* cos, const float* sin,
            int64_t sequence, int64_t batch, int64_t width, int64_t pairs, bool inverse);

// layer_norm.cu, rms_norm.cu. `mean` and `inverse_deviation` hold one float per row. With `residual`, its sum with x is
// normalized, and stored in `sum`; `of_sum` is added to the gradient. Null: no addition.
void layer_norm_forward(const Launch& where, Dtype dtype, const void* x, const void* residual, Parameter weight,
                        Parameter bias, void* sum, void* result, float* mean, float* inverse_deviation, int64_t rows,
                        int64_t columns, float epsilon);
int64_t layer_norm_partial_rows(int device, Dtype dtype, Dtype of_parameters, int64_t rows, int64_t columns);
void layer_norm_backward(const Launch& where, Dtype dtype, const void* gradient, const void* of_sum, const void* x,
                         Parameter weight, const float* mean, const float* inverse_deviation, void* x_gradient,
                         ParameterGradient weight_gradient, ParameterGradient bias_gradient, float* partials,
                         int64_t partial_rows, int64_t rows, int64_t columns);
void rms_norm_forward(const Launch& where, Dtype dtype, const void* x, const void* residual, Parameter weight, void* sum,
                      void* result, float* inverse_deviation, int64_t rows, int64_t columns, float epsilon);
int64_t rms_norm_partial_rows(int device, Dtype dtype, Dtype of_parameters, int64_t rows, int64_t columns);
void rms_norm_backward(const Launch& where, Dtype dtype, const void* gradient, const void* of_sum, const void* x,
                       Parameter weight, const float* inverse_deviation, void* x_gradient, ParameterGradient weight_gradient,
                       float* partials, int64_t partial_rows, int64_t rows, int64_t columns);

// cross_entropy.cu. Logits are [rows, columns], contiguous; columns from `width` on count as -inf. A label outside
// [0, width) is in another rank's columns. `log_totals` and `picked` hold one float per row. With `weights`, the logits
// are overwritten with their gradient. `given_log_totals`, if not null, replace the logarithms of these rows' sums.
void cross_entropy(const Launch& where, Dtype dtype, void* logits, const int64_t* labels, const float* weights,
                   const float* given_log_totals, float* log_totals, float* picked, int64_t rows, int64_t columns,
                   int64_t width);

// column_sum.cu. The partial sums of `second`, if its address is not null, follow those of `first`.
void sum_partials(const Launch& where, const float* partials, int64_t partial_rows, int64_t columns,
                  ParameterGradient first, ParameterGradient second = {nullptr, Dtype::float32});

}  // namespace neox
