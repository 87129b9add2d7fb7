// The Python module `_native`: operators.h for raw addresses. No torch headers, so one build serves every torch version.
//
// Callers (native.py and the operators' files) own the memory, check shapes and types, and pass sizes in elements.

#include <array>
#include <cstdint>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "operators.h"

namespace {

namespace py = pybind11;
using neox::Activation;
using neox::Dtype;
using neox::Heads;
using neox::Launch;
using neox::Mask;
using neox::Parameter;
using neox::ParameterGradient;
using Address = uintptr_t;

template <typename T = void>
const T* read(Address address) {
  return reinterpret_cast<const T*>(address);
}

template <typename T = void>
T* written(Address address) {
  return reinterpret_cast<T*>(address);
}

Dtype dtype_of(int code) { return static_cast<Dtype>(code); }

using ParameterCode = std::pair<Address, int>;  // address (0 for None), dtype code

Parameter parameter(const ParameterCode& code) { return {read(code.first), dtype_of(code.second)}; }

ParameterGradient gradient_of(const ParameterCode& code) { return {written(code.first), dtype_of(code.second)}; }

using HeadsCode = std::tuple<Address, std::array<int64_t, 3>, Address, std::array<int64_t, 3>, int64_t>;

Heads heads(const HeadsCode& code) {
  const auto& [input, input_strides, result, result_strides, count] = code;
  Heads made = {read(input), {}, written(result), {}, count};
  for (int i = 0; i < 3; ++i) {
    made.input_strides[i] = input_strides[i];
    made.result_strides[i] = result_strides[i];
  }
  return made;
}

void softmax_forward(int device, Address stream, int dtype, Address scores, Address masked_out, int64_t mask_inner,
                     const std::array<int64_t, 4>& mask_strides, Address probabilities, int64_t lead, int64_t queries,
                     int64_t keys, float scale, bool causal) {
  Mask mask = {read<bool>(masked_out), mask_inner, {}};
  for (int i = 0; i < 4; ++i) {
    mask.strides[i] = mask_strides[i];
  }
  neox::softmax_forward(Launch{device, stream}, dtype_of(dtype), read(scores), mask, written(probabilities), lead,
                        queries, keys, scale, causal);
}

void softmax_backward(int device, Address stream, int dtype, Address gradient, Address probabilities, Address result,
                      int64_t lead, int64_t queries, int64_t keys, float scale, bool causal) {
  neox::softmax_backward(Launch{device, stream}, dtype_of(dtype), read(gradient), read(probabilities),
                         written(result), lead, queries, keys, scale, causal);
}

void bias_gelu_forward(int device, Address stream, int dtype, Address x, const ParameterCode& bias, Address result,
                       int64_t rows, int64_t columns, bool tanh_form) {
  neox::bias_gelu_forward(Launch{device, stream}, dtype_of(dtype), read(x), parameter(bias), written(result), rows,
                          columns, tanh_form);
}

void bias_gelu_backward(int device, Address stream, int dtype, Address gradient, Address x, const ParameterCode& bias,
                        Address x_gradient, const ParameterCode& bias_gradient, Address partials, int64_t rows,
                        int64_t columns, bool tanh_form) {
  neox::bias_gelu_backward(Launch{device, stream}, dtype_of(dtype), read(gradient), read(x), parameter(bias),
                           written(x_gradient), gradient_of(bias_gradient), written<float>(partials), rows, columns,
                           tanh_form);
}

void bias_dropout_add_forward(int device, Address stream, int dtype, Address x, const ParameterCode& bias,
                              Address residual, Address seed, Address result, int64_t rows, int64_t columns,
                              int64_t keep_below, float keep_scale) {
  neox::bias_dropout_add_forward(Launch{device, stream}, dtype_of(dtype), read(x), parameter(bias), read(residual),
                                 read<int64_t>(seed), written(result), rows, columns, keep_below, keep_scale);
}

void bias_dropout_add_backward(int device, Address stream, int dtype, Address gradient, Address seed,
                               Address x_gradient, const ParameterCode& bias_gradient, Address partials, int64_t rows,
                               int64_t columns, int64_t keep_below, float keep_scale) {
  neox::bias_dropout_add_backward(Launch{device, stream}, dtype_of(dtype), read(gradient), read<int64_t>(seed),
                                  written(x_gradient), gradient_of(bias_gradient), written<float>(partials), rows,
                                  columns, keep_below, keep_scale);
}

void gated_forward(int device, Address stream, int dtype, int activation, Address up, int64_t up_stride, Address gate,
                   int64_t gate_stride, const ParameterCode& up_bias, const ParameterCode& gate_bias, Address result,
                   int64_t rows, int64_t columns) {
  neox::gated_forward(Launch{device, stream}, dtype_of(dtype), static_cast<Activation>(activation), read(up),
                      up_stride, read(gate), gate_stride, parameter(up_bias), parameter(gate_bias), written(result),
                      rows, columns);
}

void gated_backward(int device, Address stream, int dtype, int activation, Address gradient, Address up,
                    int64_t up_stride, Address gate, int64_t gate_stride, const ParameterCode& up_bias,
                    const ParameterCode& gate_bias, Address up_gradient, Address gate_gradient,
                    const ParameterCode& up_bias_gradient, const ParameterCode& gate_bias_gradient, Address partials,
                    int64_t rows, int64_t columns) {
  neox::gated_backward(Launch{device, stream}, dtype_of(dtype), static_cast<Activation>(activation), read(gradient),
                       read(up), up_stride, read(gate), gate_stride, parameter(up_bias), parameter(gate_bias),
                       written(up_gradient), written(gate_gradient), gradient_of(up_bias_gradient),
                       gradient_of(gate_bias_gradient), written<float>(partials), rows, columns);
}

void rotary(int device, Address stream, int dtype, const HeadsCode& query, const HeadsCode& key, Address cos,
            Address sin, int64_t sequence, int64_t batch, int64_t width, int64_t pairs, bool inverse) {
  neox::rotary(Launch{device, stream}, dtype_of(dtype), heads(query), heads(key), read<float>(cos), read<float>(sin),
               sequence, batch, width, pairs, inverse);
}

void layer_norm_forward(int device, Address stream, int dtype, Address x, const ParameterCode& weight,
                        const ParameterCode& bias, Address result, Address mean, Address inverse_deviation,
                        int64_t rows, int64_t columns, float epsilon) {
  neox::layer_norm_forward(Launch{device, stream}, dtype_of(dtype), read(x), parameter(weight), parameter(bias),
                           written(result), written<float>(mean), written<float>(inverse_deviation), rows, columns,
                           epsilon);
}

void layer_norm_backward(int device, Address stream, int dtype, Address gradient, Address x,
                         const ParameterCode& weight, Address mean, Address inverse_deviation, Address x_gradient,
                         const ParameterCode& weight_gradient, const ParameterCode& bias_gradient, Address partials,
                         int64_t partial_rows, int64_t rows, int64_t columns) {
  neox::layer_norm_backward(Launch{device, stream}, dtype_of(dtype), read(gradient), read(x), parameter(weight),
                            read<float>(mean), read<float>(inverse_deviation), written(x_gradient),
                            gradient_of(weight_gradient), gradient_of(bias_gradient), written<float>(partials),
                            partial_rows, rows, columns);
}

int64_t layer_norm_partial_rows(int device, int dtype, int dtype_of_parameters, int64_t rows, int64_t columns) {
  return neox::layer_norm_partial_rows(device, dtype_of(dtype), dtype_of(dtype_of_parameters), rows, columns);
}

int64_t rms_norm_partial_rows(int device, int dtype, int dtype_of_parameters, int64_t rows, int64_t columns) {
  return neox::rms_norm_partial_rows(device, dtype_of(dtype), dtype_of(dtype_of_parameters), rows, columns);
}

void rms_norm_forward(int device, Address stream, int dtype, Address x, const ParameterCode& weight, Address result,
                      Address inverse_deviation, int64_t rows, int64_t columns, float epsilon) {
  neox::rms_norm_forward(Launch{device, stream}, dtype_of(dtype), read(x), parameter(weight), written(result),
                         written<float>(inverse_deviation), rows, columns, epsilon);
}

void rms_norm_backward(int device, Address stream, int dtype, Address gradient, Address x, const ParameterCode& weight,
                       Address inverse_deviation, Address x_gradient, const ParameterCode& weight_gradient,
                       Address partials, int64_t partial_rows, int64_t rows, int64_t columns) {
  neox::rms_norm_backward(Launch{device, stream}, dtype_of(dtype), read(gradient), read(x), parameter(weight),
                          read<float>(inverse_deviation), written(x_gradient), gradient_of(weight_gradient),
                          written<float>(partials), partial_rows, rows, columns);
}

void cross_entropy(int device, Address stream, int dtype, Address logits, Address labels, Address weights,
                   Address given_log_totals, Address log_totals, Address picked, int64_t rows, int64_t columns,
                   int64_t width) {
  neox::cross_entropy(Launch{device, stream}, dtype_of(dtype), written(logits), read<int64_t>(labels),
                      read<float>(weights), read<float>(given_log_totals), written<float>(log_totals),
                      written<float>(picked), rows, columns, width);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  using py::arg;
  module.doc() = "Fused operators over raw device addresses; calls are asynchronous on the given stream.";
  module.def("softmax_forward", &softmax_forward, arg("device"), arg("stream"), arg("dtype"), arg("scores"),
             arg("masked_out"), arg("mask_inner"), arg("mask_strides"), arg("probabilities"), arg("lead"),
             arg("queries"), arg("keys"), arg("scale"), arg("causal"));
  module.def("softmax_backward", &softmax_backward, arg("device"), arg("stream"), arg("dtype"), arg("gradient"),
             arg("probabilities"), arg("result"), arg("lead"), arg("queries"), arg("keys"), arg("scale"),
             arg("causal"));
  module.def("bias_gelu_forward", &bias_gelu_forward, arg("device"), arg("stream"), arg("dtype"), arg("x"),
             arg("bias"), arg("result"), arg("rows"), arg("columns"), arg("tanh_form"));
  module.def("bias_gelu_backward", &bias_gelu_backward, arg("device"), arg("stream"), arg("dtype"), arg("gradient"),
             arg("x"), arg("bias"), arg("x_gradient"), arg("bias_gradient"), arg("partials"), arg("rows"),
             arg("columns"), arg("tanh_form"));
  module.def("bias_dropout_add_forward", &bias_dropout_add_forward, arg("device"), arg("stream"), arg("dtype"),
             arg("x"), arg("bias"), arg("residual"), arg("seed"), arg("result"), arg("rows"), arg("columns"),
             arg("keep_below"), arg("keep_scale"));
  module.def("bias_dropout_add_backward", &bias_dropout_add_backward, arg("device"), arg("stream"), arg("dtype"),
             arg("gradient"), arg("seed"), arg("x_gradient"), arg("bias_gradient"), arg("partials"), arg("rows"),
             arg("columns"), arg("keep_below"), arg("keep_scale"));
  module.def("gated_forward", &gated_forward, arg("device"), arg("stream"), arg("dtype"), arg("activation"),
             arg("up"), arg("up_stride"), arg("gate"), arg("gate_stride"), arg("up_bias"), arg("gate_bias"),
             arg("result"), arg("rows"), arg("columns"));
  module.def("gated_backward", &gated_backward, arg("device"), arg("stream"), arg("dtype"), arg("activation"),
             arg("gradient"), arg("up"), arg("up_stride"), arg("gate"), arg("gate_stride"), arg("up_bias"),
             arg("gate_bias"), arg("up_gradient"), arg("gate_gradient"), arg("up_bias_gradient"),
             arg("gate_bias_gradient"), arg("partials"), arg("rows"), arg("columns"));
  module.def("rotary", &rotary, arg("device"), arg("stream"), arg("dtype"), arg("query"), arg("key"), arg("cos"),
             arg("sin"), arg("sequence"), arg("batch"), arg("width"), arg("pairs"), arg("inverse"));
  module.def("layer_norm_forward", &layer_norm_forward, arg("device"), arg("stream"), arg("dtype"), arg("x"),
             arg("weight"), arg("bias"), arg("result"), arg("mean"), arg("inverse_deviation"), arg("rows"),
             arg("columns"), arg("epsilon"));
  module.def("layer_norm_backward", &layer_norm_backward, arg("device"), arg("stream"), arg("dtype"),
             arg("gradient"), arg("x"), arg("weight"), arg("mean"), arg("inverse_deviation"), arg("x_gradient"),
             arg("weight_gradient"), arg("bias_gradient"), arg("partials"), arg("partial_rows"), arg("rows"),
             arg("columns"));
  module.def("rms_norm_forward", &rms_norm_forward, arg("device"), arg("stream"), arg("dtype"), arg("x"),
             arg("weight"), arg("result"), arg("inverse_deviation"), arg("rows"), arg("columns"), arg("epsilon"));
  module.def("rms_norm_backward", &rms_norm_backward, arg("device"), arg("stream"), arg("dtype"), arg("gradient"),
             arg("x"), arg("weight"), arg("inverse_deviation"), arg("x_gradient"), arg("weight_gradient"),
             arg("partials"), arg("partial_rows"), arg("rows"), arg("columns"));
  module.def("cross_entropy", &cross_entropy, arg("device"), arg("stream"), arg("dtype"), arg("logits"),
             arg("labels"), arg("weights"), arg("given_log_totals"), arg("log_totals"), arg("picked"), arg("rows"),
             arg("columns"), arg("width"));
  module.def("partial_rows", &neox::partial_rows, arg("device"), arg("rows"), arg("columns"), arg("itemsize"));
  module.def("layer_norm_partial_rows", &layer_norm_partial_rows, arg("device"), arg("dtype"),
             arg("dtype_of_parameters"), arg("rows"), arg("columns"));
  module.def("rms_norm_partial_rows", &rms_norm_partial_rows, arg("device"), arg("dtype"), arg("dtype_of_parameters"),
             arg("rows"), arg("columns"));
}
