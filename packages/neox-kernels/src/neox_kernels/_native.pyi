"""The compiled module (csrc/bindings.cpp): asynchronous operators over raw device addresses.

csrc/operators.h describes the arguments. A ParameterCode is (address, dtype code), with address 0 for None; a
HeadsCode is input address, its three strides, result address, its three strides, and the number of heads.
"""

ParameterCode = tuple[int, int]
HeadsCode = tuple[int, tuple[int, ...], int, tuple[int, ...], int]

def softmax_forward(
    device: int,
    stream: int,
    dtype: int,
    scores: int,
    masked_out: int,
    mask_inner: int,
    mask_strides: tuple[int, ...],
    probabilities: int,
    lead: int,
    queries: int,
    keys: int,
    scale: float,
    causal: bool,
) -> None: ...
def softmax_backward(
    device: int,
    stream: int,
    dtype: int,
    gradient: int,
    probabilities: int,
    result: int,
    lead: int,
    queries: int,
    keys: int,
    scale: float,
    causal: bool,
) -> None: ...
def bias_gelu_forward(
    device: int,
    stream: int,
    dtype: int,
    x: int,
    bias: ParameterCode,
    result: int,
    rows: int,
    columns: int,
    tanh_form: bool,
) -> None: ...
def bias_gelu_backward(
    device: int,
    stream: int,
    dtype: int,
    gradient: int,
    x: int,
    bias: ParameterCode,
    x_gradient: int,
    bias_gradient: ParameterCode,
    partials: int,
    partial_rows: int,
    rows: int,
    columns: int,
    tanh_form: bool,
) -> None: ...
def bias_dropout_add_forward(
    device: int,
    stream: int,
    dtype: int,
    x: int,
    bias: ParameterCode,
    residual: int,
    seed: int,
    result: int,
    rows: int,
    columns: int,
    keep_below: int,
    keep_scale: float,
) -> None: ...
def bias_dropout_add_backward(
    device: int,
    stream: int,
    dtype: int,
    gradient: int,
    seed: int,
    x_gradient: int,
    bias_gradient: ParameterCode,
    partials: int,
    partial_rows: int,
    rows: int,
    columns: int,
    keep_below: int,
    keep_scale: float,
) -> None: ...
def gated_forward(
    device: int,
    stream: int,
    dtype: int,
    activation: int,
    up: int,
    up_stride: int,
    gate: int,
    gate_stride: int,
    up_bias: ParameterCode,
    gate_bias: ParameterCode,
    result: int,
    rows: int,
    columns: int,
) -> None: ...
def gated_backward(
    device: int,
    stream: int,
    dtype: int,
    activation: int,
    gradient: int,
    up: int,
    up_stride: int,
    gate: int,
    gate_stride: int,
    up_bias: ParameterCode,
    gate_bias: ParameterCode,
    up_gradient: int,
    gate_gradient: int,
    product: int,
    up_bias_gradient: ParameterCode,
    gate_bias_gradient: ParameterCode,
    partials: int,
    partial_rows: int,
    rows: int,
    columns: int,
) -> None: ...
def rotary(
    device: int,
    stream: int,
    dtype: int,
    query: HeadsCode,
    key: HeadsCode,
    cos: int,
    sin: int,
    sequence: int,
    batch: int,
    width: int,
    pairs: int,
    inverse: bool,
) -> None: ...
def layer_norm_forward(
    device: int,
    stream: int,
    dtype: int,
    x: int,
    residual: int,
    weight: ParameterCode,
    bias: ParameterCode,
    sum: int,
    result: int,
    mean: int,
    inverse_deviation: int,
    rows: int,
    columns: int,
    epsilon: float,
) -> None: ...
def layer_norm_backward(
    device: int,
    stream: int,
    dtype: int,
    gradient: int,
    of_sum: int,
    x: int,
    weight: ParameterCode,
    mean: int,
    inverse_deviation: int,
    x_gradient: int,
    weight_gradient: ParameterCode,
    bias_gradient: ParameterCode,
    partials: int,
    partial_rows: int,
    rows: int,
    columns: int,
) -> None: ...
def rms_norm_forward(
    device: int,
    stream: int,
    dtype: int,
    x: int,
    residual: int,
    weight: ParameterCode,
    sum: int,
    result: int,
    inverse_deviation: int,
    rows: int,
    columns: int,
    epsilon: float,
) -> None: ...
def rms_norm_backward(
    device: int,
    stream: int,
    dtype: int,
    gradient: int,
    of_sum: int,
    x: int,
    weight: ParameterCode,
    inverse_deviation: int,
    x_gradient: int,
    weight_gradient: ParameterCode,
    partials: int,
    partial_rows: int,
    rows: int,
    columns: int,
) -> None: ...
def cross_entropy(
    device: int,
    stream: int,
    dtype: int,
    logits: int,
    labels: int,
    weights: int,
    given_log_totals: int,
    log_totals: int,
    picked: int,
    rows: int,
    columns: int,
    width: int,
) -> None: ...
def bias_gelu_partial_rows(device: int, dtype: int, rows: int, columns: int, tanh_form: bool) -> int: ...
def bias_dropout_add_partial_rows(device: int, dtype: int, rows: int, columns: int) -> int: ...
def gated_partial_rows(device: int, dtype: int, activation: int, rows: int, columns: int) -> int: ...
def layer_norm_partial_rows(
    device: int, dtype: int, dtype_of_parameters: int, rows: int, columns: int
) -> int: ...
def rms_norm_partial_rows(
    device: int, dtype: int, dtype_of_parameters: int, rows: int, columns: int
) -> int: ...
