// The Python module `_native`: operators.h for raw addresses. No torch headers, so one build serves every torch version.
//
// Callers (native.py and the operators' files) own the memory and pass sizes in elements; checked_calls.h refuses what
// cannot be right.

#include <array>
#include <cstdint>
#include <tuple>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "checked_calls.h"

namespace {

namespace py = pybind11;
using neox::Activation;
using neox::Address;
using neox::Call;
using neox::Heads;
using neox::Mask;
using neox::ParameterCode;

// Softmax -------------------------------------------------------------------------------------------------------

void softmax_forward(int device, Address stream, int dtype, Address scores, Address masked_out, int64_t mask_inner,
                     const std::array<int64_t, 4>& mask_strides, Address probabilities, int64_t lead, int64_t queries,
                     int64_t keys, float scale, bool causal) {
  const Call call("softmax_forward", device, stream, dtype);
  const int64_t count = call.count({lead, queries, keys});
  call.require(masked_out == 0 || !causal, "a mask and a causal mask exclude each other");
  call.require(mask_inner >= 1 && lead % mask_inner == 0, "mask_inner does not divide the leading size");
  Mask mask = {call.read<bool>("masked_out", masked_out, 0, 1), mask_inner, {}};
  for (int i = 0; i < 4; ++i) {
    call.require(mask_strides[i] >= 0, "a stride of the mask is negative");
    mask.strides[i] = mask_strides[i];
  }
  const void* from = call.read("scores", scores, count);
  void* to = call.written("probabilities", probabilities, count);
  call.run([&] { neox::softmax_forward(call.where(), call.dtype(), from, mask, to, lead, queries, keys, scale, causal); });
}

void softmax_backward(int device, Address stream, int dtype, Address gradient, Address probabilities, Address result,
                      int64_t lead, int64_t queries, int64_t keys, float scale, bool causal) {
  const Call call("softmax_backward", device, stream, dtype);
  const int64_t count = call.count({lead, queries, keys});
  const void* above = call.read("gradient", gradient, count);
  const void* weights = call.read("probabilities", probabilities, count);
  void* to = call.written("result", result, count);
  call.run([&] {
    neox::softmax_backward(call.where(), call.dtype(), above, weights, to, lead, queries, keys, scale, causal);
  });
}

// Element-wise operators with a bias ----------------------------------------------------------------------------

void bias_gelu_forward(int device, Address stream, int dtype, Address x, const ParameterCode& bias, Address result,
                       int64_t rows, int64_t columns, bool tanh_form) {
  const Call call("bias_gelu_forward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  call.required("bias", bias, count);
  const void* from = call.read("x", x, count);
  void* to = call.written("result", result, count);
  const auto shift = call.parameter("bias", bias);
  call.run([&] { neox::bias_gelu_forward(call.where(), call.dtype(), from, shift, to, rows, columns, tanh_form); });
}

void bias_gelu_backward(int device, Address stream, int dtype, Address gradient, Address x, const ParameterCode& bias,
                        Address x_gradient, const ParameterCode& bias_gradient, Address partials, int64_t partial_rows,
                        int64_t rows, int64_t columns, bool tanh_form) {
  const Call call("bias_gelu_backward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  call.required("bias", bias, columns);
  call.required("bias_gradient", bias_gradient, columns);
  const void* above = call.read("gradient", gradient, count);
  const void* from = call.read("x", x, count);
  void* to = call.written("x_gradient", x_gradient, count);
  const auto shift = call.parameter("bias", bias);
  const auto of_bias = call.gradient("bias_gradient", bias_gradient);
  float* scratch = call.partials(partials, partial_rows, columns);
  call.run([&] {
    neox::bias_gelu_backward(call.where(), call.dtype(), above, from, shift, to, of_bias, scratch, partial_rows, rows,
                             columns, tanh_form);
  });
}

int64_t bias_gelu_partial_rows(int device, int dtype, int64_t rows, int64_t columns, bool tanh_form) {
  const Call call("bias_gelu_partial_rows", device, 0, dtype);
  call.count({rows, columns});
  return call.run([&] { return neox::bias_gelu_partial_rows(device, call.dtype(), rows, columns, tanh_form); });
}

const int64_t* checked_seed(const Call& call, Address seed, int64_t count, int64_t keep_below, float keep_scale) {
  constexpr int64_t kKeepAll = 1 << 16;
  call.require(keep_below >= 0 && keep_below <= kKeepAll, "keep_below is " + std::to_string(keep_below));
  call.require(std::isfinite(keep_scale), "keep_scale is not finite");
  return call.read<int64_t>("seed", seed, keep_below == kKeepAll ? 0 : count, 8);
}

void bias_dropout_add_forward(int device, Address stream, int dtype, Address x, const ParameterCode& bias,
                              Address residual, Address seed, Address result, int64_t rows, int64_t columns,
                              int64_t keep_below, float keep_scale) {
  const Call call("bias_dropout_add_forward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  const void* from = call.read("x", x, count);
  const void* aside = call.read("residual", residual, count);
  void* to = call.written("result", result, count);
  const auto shift = call.parameter("bias", bias);
  const int64_t* of_mask = checked_seed(call, seed, count, keep_below, keep_scale);
  call.run([&] {
    neox::bias_dropout_add_forward(call.where(), call.dtype(), from, shift, aside, of_mask, to, rows, columns,
                                   keep_below, keep_scale);
  });
}

void bias_dropout_add_backward(int device, Address stream, int dtype, Address gradient, Address seed,
                               Address x_gradient, const ParameterCode& bias_gradient, Address partials,
                               int64_t partial_rows, int64_t rows, int64_t columns, int64_t keep_below,
                               float keep_scale) {
  const Call call("bias_dropout_add_backward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  const void* above = call.read("gradient", gradient, count);
  void* to = call.written("x_gradient", x_gradient, count);
  const auto of_bias = call.gradient("bias_gradient", bias_gradient);
  const int64_t* of_mask = checked_seed(call, seed, count, keep_below, keep_scale);
  float* scratch = call.partials(partials, partial_rows, columns, of_bias.address != nullptr);
  call.run([&] {
    neox::bias_dropout_add_backward(call.where(), call.dtype(), above, of_mask, to, of_bias, scratch, partial_rows,
                                    rows, columns, keep_below, keep_scale);
  });
}

int64_t bias_dropout_add_partial_rows(int device, int dtype, int64_t rows, int64_t columns) {
  const Call call("bias_dropout_add_partial_rows", device, 0, dtype);
  call.count({rows, columns});
  return call.run([&] { return neox::bias_dropout_add_partial_rows(device, call.dtype(), rows, columns); });
}

Activation checked_activation(const Call& call, int activation) {
  call.require(activation >= 0 && activation <= 2, "unknown activation code " + std::to_string(activation));
  return static_cast<Activation>(activation);
}

void check_row_strides(const Call& call, int64_t columns, std::initializer_list<int64_t> strides) {
  for (const int64_t stride : strides) {
    call.require(stride >= columns, "a row stride is " + std::to_string(stride) + ", less than the columns");
  }
}

void gated_forward(int device, Address stream, int dtype, int activation, Address up, int64_t up_stride, Address gate,
                   int64_t gate_stride, const ParameterCode& up_bias, const ParameterCode& gate_bias, Address result,
                   int64_t rows, int64_t columns) {
  const Call call("gated_forward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  const Activation function = checked_activation(call, activation);
  check_row_strides(call, rows > 1 ? columns : 0, {up_stride, gate_stride});
  const void* ups = call.read("up", up, count);
  const void* gates = call.read("gate", gate, count);
  void* to = call.written("result", result, count);
  const auto up_shift = call.parameter("up_bias", up_bias);
  const auto gate_shift = call.parameter("gate_bias", gate_bias);
  call.run([&] {
    neox::gated_forward(call.where(), call.dtype(), function, ups, up_stride, gates, gate_stride, up_shift, gate_shift,
                        to, rows, columns);
  });
}

void gated_backward(int device, Address stream, int dtype, int activation, Address gradient, Address up,
                    int64_t up_stride, Address gate, int64_t gate_stride, const ParameterCode& up_bias,
                    const ParameterCode& gate_bias, Address up_gradient, Address gate_gradient, Address product,
                    const ParameterCode& up_bias_gradient, const ParameterCode& gate_bias_gradient, Address partials,
                    int64_t partial_rows, int64_t rows, int64_t columns) {
  const Call call("gated_backward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  const Activation function = checked_activation(call, activation);
  check_row_strides(call, rows > 1 ? columns : 0, {up_stride, gate_stride});
  const void* above = call.read("gradient", gradient, count);
  const void* ups = call.read("up", up, count);
  const void* gates = call.read("gate", gate, count);
  void* to_up = call.written("up_gradient", up_gradient, count);
  void* to_gate = call.written("gate_gradient", gate_gradient, count);
  void* again = call.written("product", product, 0);
  const auto up_shift = call.parameter("up_bias", up_bias);
  const auto gate_shift = call.parameter("gate_bias", gate_bias);
  const auto of_up_bias = call.gradient("up_bias_gradient", up_bias_gradient);
  const auto of_gate_bias = call.gradient("gate_bias_gradient", gate_bias_gradient);
  const bool has_sums = of_up_bias.address != nullptr || of_gate_bias.address != nullptr;
  float* scratch = call.partials(partials, partial_rows, columns, has_sums);
  call.run([&] {
    neox::gated_backward(call.where(), call.dtype(), function, above, ups, up_stride, gates, gate_stride, up_shift,
                         gate_shift, to_up, to_gate, again, of_up_bias, of_gate_bias, scratch, partial_rows, rows,
                         columns);
  });
}

int64_t gated_partial_rows(int device, int dtype, int activation, int64_t rows, int64_t columns) {
  const Call call("gated_partial_rows", device, 0, dtype);
  call.count({rows, columns});
  const Activation function = checked_activation(call, activation);
  return call.run([&] { return neox::gated_partial_rows(device, call.dtype(), function, rows, columns); });
}

// Rotary --------------------------------------------------------------------------------------------------------

// Address and three strides of the input, the same of the result, and the number of heads.
using HeadsCode = std::tuple<Address, std::array<int64_t, 3>, Address, std::array<int64_t, 3>, int64_t>;

Heads heads(const Call& call, const char* tensor, const HeadsCode& code, int64_t of_head) {
  const auto& [input, input_strides, result, result_strides, number] = code;
  const int64_t count = call.count({number, of_head});
  Heads made = {call.read(tensor, input, count), {}, call.written(tensor, result, count), {}, number};
  for (int i = 0; i < 3; ++i) {
    call.require(input_strides[i] >= 0 && result_strides[i] >= 0, std::string("a stride of ") + tensor + " is negative");
    made.input_strides[i] = input_strides[i];
    made.result_strides[i] = result_strides[i];
  }
  return made;
}

void rotary(int device, Address stream, int dtype, const HeadsCode& query, const HeadsCode& key, Address cos,
            Address sin, int64_t sequence, int64_t batch, int64_t width, int64_t pairs, bool inverse) {
  const Call call("rotary", device, stream, dtype);
  const int64_t of_head = call.count({sequence, batch, width});
  const int64_t angles = call.count({sequence, pairs});
  call.require(pairs <= width / 2, std::to_string(pairs) + " pairs do not fit into " + std::to_string(width) + " channels");
  const Heads queries = heads(call, "query", query, of_head);
  const Heads keys = heads(call, "key", key, of_head);
  const float* cosines = call.read<float>("cos", cos, angles, 4);
  const float* sines = call.read<float>("sin", sin, angles, 4);
  call.run([&] {
    neox::rotary(call.where(), call.dtype(), queries, keys, cosines, sines, sequence, batch, width, pairs, inverse);
  });
}

// Norms ---------------------------------------------------------------------------------------------------------

// With a residual there is a sum of it and x, which is normalized.
std::pair<const void*, void*> checked_sum(const Call& call, Address residual, Address sum, int64_t count) {
  call.require((residual != 0) == (sum != 0) || count == 0, "a residual and its sum with x go together");
  return {call.read("residual", residual, 0), call.written("sum", sum, 0)};
}

void layer_norm_forward(int device, Address stream, int dtype, Address x, Address residual, const ParameterCode& weight,
                        const ParameterCode& bias, Address sum, Address result, Address mean,
                        Address inverse_deviation, int64_t rows, int64_t columns, float epsilon) {
  const Call call("layer_norm_forward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  call.required("weight", weight, count);
  call.required("bias", bias, count);
  const void* from = call.read("x", x, count);
  void* to = call.written("result", result, count);
  float* means = call.written<float>("mean", mean, count, 4);
  float* inverse = call.written<float>("inverse_deviation", inverse_deviation, count, 4);
  const auto [added, summed] = checked_sum(call, residual, sum, count);
  const auto factor = call.parameter("weight", weight);
  const auto shift = call.parameter("bias", bias);
  call.run([&, added = added, summed = summed] {
    neox::layer_norm_forward(call.where(), call.dtype(), from, added, factor, shift, summed, to, means, inverse, rows,
                             columns, epsilon);
  });
}

void layer_norm_backward(int device, Address stream, int dtype, Address gradient, Address of_sum, Address x,
                         const ParameterCode& weight, Address mean, Address inverse_deviation, Address x_gradient,
                         const ParameterCode& weight_gradient, const ParameterCode& bias_gradient, Address partials,
                         int64_t partial_rows, int64_t rows, int64_t columns) {
  const Call call("layer_norm_backward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  call.required("weight", weight, columns);
  call.required("weight_gradient", weight_gradient, columns);
  call.required("bias_gradient", bias_gradient, columns);
  const void* above = call.read("gradient", gradient, count);
  const void* from = call.read("x", x, count);
  void* to = call.written("x_gradient", x_gradient, count);
  const float* means = call.read<float>("mean", mean, count, 4);
  const float* inverse = call.read<float>("inverse_deviation", inverse_deviation, count, 4);
  const auto factor = call.parameter("weight", weight);
  const auto of_weight = call.gradient("weight_gradient", weight_gradient);
  const auto of_bias = call.gradient("bias_gradient", bias_gradient);
  const void* above_sum = call.read("of_sum", of_sum, 0);
  float* scratch = call.partials(partials, partial_rows, columns);
  call.run([&] {
    neox::layer_norm_backward(call.where(), call.dtype(), above, above_sum, from, factor, means, inverse, to, of_weight,
                              of_bias, scratch, partial_rows, rows, columns);
  });
}

int64_t layer_norm_partial_rows(int device, int dtype, int dtype_of_parameters, int64_t rows, int64_t columns) {
  const Call call("layer_norm_partial_rows", device, 0, dtype);
  call.count({rows, columns});
  const auto of_parameters = call.dtype_of(dtype_of_parameters);
  return call.run([&] { return neox::layer_norm_partial_rows(device, call.dtype(), of_parameters, rows, columns); });
}

void rms_norm_forward(int device, Address stream, int dtype, Address x, Address residual, const ParameterCode& weight,
                      Address sum, Address result, Address inverse_deviation, int64_t rows, int64_t columns,
                      float epsilon) {
  const Call call("rms_norm_forward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  call.required("weight", weight, count);
  const void* from = call.read("x", x, count);
  void* to = call.written("result", result, count);
  float* inverse = call.written<float>("inverse_deviation", inverse_deviation, count, 4);
  const auto [added, summed] = checked_sum(call, residual, sum, count);
  const auto factor = call.parameter("weight", weight);
  call.run([&, added = added, summed = summed] {
    neox::rms_norm_forward(call.where(), call.dtype(), from, added, factor, summed, to, inverse, rows, columns,
                           epsilon);
  });
}

void rms_norm_backward(int device, Address stream, int dtype, Address gradient, Address of_sum, Address x,
                       const ParameterCode& weight, Address inverse_deviation, Address x_gradient, const ParameterCode& weight_gradient,
                       Address partials, int64_t partial_rows, int64_t rows, int64_t columns) {
  const Call call("rms_norm_backward", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  call.required("weight", weight, columns);
  call.required("weight_gradient", weight_gradient, columns);
  const void* above = call.read("gradient", gradient, count);
  const void* from = call.read("x", x, count);
  void* to = call.written("x_gradient", x_gradient, count);
  const float* inverse = call.read<float>("inverse_deviation", inverse_deviation, count, 4);
  const auto factor = call.parameter("weight", weight);
  const auto of_weight = call.gradient("weight_gradient", weight_gradient);
  const void* above_sum = call.read("of_sum", of_sum, 0);
  float* scratch = call.partials(partials, partial_rows, columns);
  call.run([&] {
    neox::rms_norm_backward(call.where(), call.dtype(), above, above_sum, from, factor, inverse, to, of_weight, scratch,
                            partial_rows, rows, columns);
  });
}

int64_t rms_norm_partial_rows(int device, int dtype, int dtype_of_parameters, int64_t rows, int64_t columns) {
  const Call call("rms_norm_partial_rows", device, 0, dtype);
  call.count({rows, columns});
  const auto of_parameters = call.dtype_of(dtype_of_parameters);
  return call.run([&] { return neox::rms_norm_partial_rows(device, call.dtype(), of_parameters, rows, columns); });
}

// Loss ----------------------------------------------------------------------------------------------------------

void cross_entropy(int device, Address stream, int dtype, Address logits, Address labels, Address weights,
                   Address given_log_totals, Address log_totals, Address picked, int64_t rows, int64_t columns,
                   int64_t width) {
  const Call call("cross_entropy", device, stream, dtype);
  const int64_t count = call.count({rows, columns});
  call.require(width >= 0 && width <= columns,
               "width is " + std::to_string(width) + ", with " + std::to_string(columns) + " columns");
  call.require(rows <= INT32_MAX, std::to_string(rows) + " rows are more than one launch can take");
  void* memory = call.written("logits", logits, count);
  const int64_t* of_rows = call.read<int64_t>("labels", labels, rows, 8);
  const float* factors = call.read<float>("weights", weights, 0, 4);
  const float* given = call.read<float>("given_log_totals", given_log_totals, 0, 4);
  float* totals = call.written<float>("log_totals", log_totals, rows, 4);
  float* found = call.written<float>("picked", picked, rows, 4);
  call.run([&] {
    neox::cross_entropy(call.where(), call.dtype(), memory, of_rows, factors, given, totals, found, rows, columns,
                        width);
  });
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
             arg("x"), arg("bias"), arg("x_gradient"), arg("bias_gradient"), arg("partials"), arg("partial_rows"), arg("rows"),
             arg("columns"), arg("tanh_form"));
  module.def("bias_dropout_add_forward", &bias_dropout_add_forward, arg("device"), arg("stream"), arg("dtype"),
             arg("x"), arg("bias"), arg("residual"), arg("seed"), arg("result"), arg("rows"), arg("columns"),
             arg("keep_below"), arg("keep_scale"));
  module.def("bias_dropout_add_backward", &bias_dropout_add_backward, arg("device"), arg("stream"), arg("dtype"),
             arg("gradient"), arg("seed"), arg("x_gradient"), arg("bias_gradient"), arg("partials"), arg("partial_rows"), arg("rows"),
             arg("columns"), arg("keep_below"), arg("keep_scale"));
  module.def("gated_forward", &gated_forward, arg("device"), arg("stream"), arg("dtype"), arg("activation"),
             arg("up"), arg("up_stride"), arg("gate"), arg("gate_stride"), arg("up_bias"), arg("gate_bias"),
             arg("result"), arg("rows"), arg("columns"));
  module.def("gated_backward", &gated_backward, arg("device"), arg("stream"), arg("dtype"), arg("activation"),
             arg("gradient"), arg("up"), arg("up_stride"), arg("gate"), arg("gate_stride"), arg("up_bias"),
             arg("gate_bias"), arg("up_gradient"), arg("gate_gradient"), arg("product"), arg("up_bias_gradient"),
             arg("gate_bias_gradient"), arg("partials"), arg("partial_rows"), arg("rows"), arg("columns"));
  module.def("rotary", &rotary, arg("device"), arg("stream"), arg("dtype"), arg("query"), arg("key"), arg("cos"),
             arg("sin"), arg("sequence"), arg("batch"), arg("width"), arg("pairs"), arg("inverse"));
  module.def("layer_norm_forward", &layer_norm_forward, arg("device"), arg("stream"), arg("dtype"), arg("x"),
             arg("residual"), arg("weight"), arg("bias"), arg("sum"), arg("result"), arg("mean"), arg("inverse_deviation"), arg("rows"),
             arg("columns"), arg("epsilon"));
  module.def("layer_norm_backward", &layer_norm_backward, arg("device"), arg("stream"), arg("dtype"),
             arg("gradient"), arg("of_sum"), arg("x"), arg("weight"), arg("mean"), arg("inverse_deviation"), arg("x_gradient"),
             arg("weight_gradient"), arg("bias_gradient"), arg("partials"), arg("partial_rows"), arg("rows"),
             arg("columns"));
  module.def("rms_norm_forward", &rms_norm_forward, arg("device"), arg("stream"), arg("dtype"), arg("x"),
             arg("residual"), arg("weight"), arg("sum"), arg("result"), arg("inverse_deviation"), arg("rows"), arg("columns"), arg("epsilon"));
  module.def("rms_norm_backward", &rms_norm_backward, arg("device"), arg("stream"), arg("dtype"), arg("gradient"), arg("of_sum"),
             arg("x"), arg("weight"), arg("inverse_deviation"), arg("x_gradient"), arg("weight_gradient"),
             arg("partials"), arg("partial_rows"), arg("rows"), arg("columns"));
  module.def("cross_entropy", &cross_entropy, arg("device"), arg("stream"), arg("dtype"), arg("logits"),
             arg("labels"), arg("weights"), arg("given_log_totals"), arg("log_totals"), arg("picked"), arg("rows"),
             arg("columns"), arg("width"));
  module.def("bias_gelu_partial_rows", &bias_gelu_partial_rows, arg("device"), arg("dtype"), arg("rows"),
             arg("columns"), arg("tanh_form"));
  module.def("bias_dropout_add_partial_rows", &bias_dropout_add_partial_rows, arg("device"), arg("dtype"), arg("rows"),
             arg("columns"));
  module.def("gated_partial_rows", &gated_partial_rows, arg("device"), arg("dtype"), arg("activation"), arg("rows"),
             arg("columns"));
  module.def("layer_norm_partial_rows", &layer_norm_partial_rows, arg("device"), arg("dtype"),
             arg("dtype_of_parameters"), arg("rows"), arg("columns"));
  module.def("rms_norm_partial_rows", &rms_norm_partial_rows, arg("device"), arg("dtype"), arg("dtype_of_parameters"),
             arg("rows"), arg("columns"));
}
