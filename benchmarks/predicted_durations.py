"""Predict the time of an update on GPUs, from the work of a device and its speeds.

A matrix product takes its operations at the device's sustained speed, reduced where its smallest dimension is
short, or the time of moving its matrices, whichever is longer. Element-wise operators take the time of moving
their tensors. Tensor-parallel and pipeline messages are not overlapped; ZeRO 2 and 3 communicate while the
layers run. The slowest stage of a pipeline sets its pace.

The constants are shares of the speeds in data sheets. Those that are marked as fitted make the predictions of
published runs right in the mean; `published_runs.py` prints the errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from neox_config.estimate.communication import communication_bytes
from neox_config.estimate.memory import hidden_bytes
from neox_config.estimate.mixers import core_operations, keeps_scores
from neox_config.estimate.parameters import layer_weights, local_parameters, number_of_each
from neox_config.estimate.setup import Setup
from neox_config.spec.model import MLP, Attention, Layer, Rotary, SpatialMLP

__all__ = ["DEVICES", "Constants", "Device", "Duration", "Execution", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU in a host with others of its kind, as the vendors' data sheets state it.

    Args:
        memory: bytes of memory.
        peak: operations per second of dense 16-bit matrix products.
        sustained: share of `peak` that its power limit allows in long matrix products.
        memory_bandwidth: bytes per second between the GPU and its memory.
        link_bandwidth: bytes per second that the GPU sends to others in its host.
        network_bandwidth: bytes per second that the GPU's own network adapter sends to other hosts.
    """

    memory: int
    peak: float
    sustained: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float


_A100 = {"peak": 312e12, "sustained": 1.0, "link_bandwidth": 300e9, "network_bandwidth": 25e9}
_HOPPER = {"peak": 989e12, "link_bandwidth": 450e9, "network_bandwidth": 50e9}

# `sustained` of the H100 at 500 W was fitted to published runs (published_runs.py). The others may
# draw 700 W; their clock, and so their speed, is assumed to grow with the cube root of the power.
DEVICES: Mapping[str, Device] = {
    "A100-40": Device(memory=40 * 10**9, memory_bandwidth=1.555e12, **_A100),
    "A100-80": Device(memory=80 * 10**9, memory_bandwidth=2.039e12, **_A100),
    "H100-500W": Device(memory=80 * 10**9, sustained=0.59, memory_bandwidth=3.35e12, **_HOPPER),
    "H100": Device(memory=80 * 10**9, sustained=0.66, memory_bandwidth=3.35e12, **_HOPPER),
    "H200": Device(memory=141 * 10**9, sustained=0.66, memory_bandwidth=4.8e12, **_HOPPER),
}
"""Name -> GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants of the prediction.

    Args:
        products: share of the sustained speed in large matrix products (fitted).
        half: smallest dimension with which a product attains half of that (fitted).
        half_head: the same for the products of attention, whose smallest dimension is the head size.
        flash: share of the sustained speed in flash attention.
        memory: share of the memory bandwidth.
        link: share of the bandwidth within a host.
        network: share of the bandwidth between hosts.
        unfused: factor of the element-wise bytes without fusion: eager operators store every result, and
            norms and rotary embeddings compute in float32.
        backward: factor of the element-wise bytes of the backward pass.
    """

    products: float = 0.89
    half: float = 507.0
    half_head: float = 64.0
    flash: float = 0.55
    memory: float = 0.8
    link: float = 0.75
    network: float = 0.7
    unfused: float = 2.3
    backward: float = 1.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a layout is executed, where that does not change what is communicated.

    Args:
        recomputed: what the backward pass computes again: "none"; "core", the attention without its
            projections (arXiv:2205.05198); "half" of the operators of a layer; "all".
        chunks: parts of the model per pipeline stage (interleaved schedule, arXiv:2104.04473).
        is_fused: True if element-wise operators are fused, by a compiler or by kernels.
        devices_per_host: devices of a host.
    """

    recomputed: Literal["none", "core", "half", "all"] = "none"
    chunks: int = 1
    is_fused: bool = True
    devices_per_host: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """Seconds of an update by cause; those of the stages are of the slowest one.

    Args:
        products: matrix products outside attention.
        attention: attention without its projections.
        elementwise: operators that only move tensors through memory.
        model: tensor-parallel messages.
        pipe: messages between pipeline stages.
        bubble: waiting for other stages.
        data: messages over data-parallel ranks that are not overlapped.
        update: the optimizer.
    """

    products: float
    attention: float
    elementwise: float
    model: float
    pipe: float
    bubble: float
    data: float
    update: float

    @property
    def total(self) -> float:
        """Seconds of the update."""
        running = self.products + self.attention + self.elementwise + self.model + self.pipe
        return running + self.bubble + self.data + self.update


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds of a forward pass, a backward pass or both."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    model: float = 0.0

    def __add__(self, other: "_Pass") -> "_Pass":
        return _Pass(
            self.products + other.products,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            self.model + other.model,
        )

    def __mul__(self, factor: float) -> "_Pass":
        return _Pass(
            factor * self.products, factor * self.attention, factor * self.elementwise, factor * self.model
        )

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.elementwise + self.model


# Bytes that the update of a parameter reads and writes: gradient, master weight, two moments, weight.
_UPDATE_BYTES = 32
# The backward pass of a product is two; flash attention computes the scores again in its own.
_BACKWARD_PRODUCTS, _BACKWARD_FLASH = 2.0, 2.5
# Bytes per attention score, where scores are stored: written by the product, read and written by the softmax
# and by the dropout with its mask, and read by the product; then the same for gradients.
_SCORE_BYTES_FORWARD, _SCORE_BYTES_BACKWARD = 14, 17
# Bytes per logit of the loss: read and written in float32 by softmax and its gradient.
_LOGIT_BYTES = 24
_BYTES = 2


def predict(
    setup: Setup,
    device: Device,
    execution: Execution,
    constants: Constants | None = None,
) -> Duration:
    """Predict the time of an update in 16 bits.

    Args:
        setup: what is predicted; its recomputation is ignored for `Execution.recomputed`.
        device: the GPU.
        execution: how it is executed.
        constants: None: those that fit the published runs.
    """
    model = _Model(setup, device, execution, constants or Constants())
    stages, accumulation = setup.run.layout.stages, setup.run.batch.accumulation
    layers = model.layers() * (1 / stages)
    slowest = (layers + model.head()) * accumulation
    sent = _sent_between_stages(model) * accumulation
    bubble = (stages - 1) / execution.chunks * (layers.seconds + _sent_between_stages(model))
    running = slowest.seconds + sent + bubble
    return Duration(
        products=slowest.products,
        attention=slowest.attention,
        elementwise=slowest.elementwise,
        model=slowest.model,
        pipe=sent,
        bubble=bubble,
        data=_exposed(model, running),
        update=model.update(),
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """Work of one device on a micro-batch."""

    setup: Setup
    device: Device
    execution: Execution
    constants: Constants

    @property
    def tokens(self) -> int:
        return self.setup.run.batch.micro * self.setup.run.batch.length

    @property
    def ranks(self) -> int:
        return self.setup.run.layout.tensor

    @property
    def memory_speed(self) -> float:
        return self.device.memory_bandwidth * self.constants.memory

    @property
    def link_speed(self) -> float:
        return self.device.link_bandwidth * self.constants.link

    def speed_between(self, *, ranks: int, ranks_per_host: int) -> float:
        """Return the bytes per second of a ring of ranks.

        Between hosts, the ring uses the network adapters of all its ranks on a host at the same time.
        """
        if ranks <= ranks_per_host:
            return self.link_speed
        adapter = self.constants.network * self.device.network_bandwidth
        return min(self.link_speed, adapter * ranks_per_host)

    def layers(self) -> _Pass:
        """Return the time of all layers in both passes."""
        model = self.setup.model
        kinds = number_of_each(model, range(len(model.layers)))
        return sum((self._layer(kind) * number for kind, number in kinds), _Pass())

    def head(self) -> _Pass:
        """Return the time of the head and the loss in both passes."""
        columns = self.setup.entries / self.ranks
        products = self._product(self.setup.model.width, columns) * (1 + _BACKWARD_PRODUCTS)
        return _Pass(products, 0.0, self.tokens * columns * _LOGIT_BYTES / self.memory_speed, 0.0)

    def update(self) -> float:
        """Return the time of the optimizer, which works on the part that the rank holds."""
        held = _weights(self)
        shared = self.setup.run.layout.data if self.setup.run.layout.zero else 1
        return held / shared * _UPDATE_BYTES / self.memory_speed

    def _layer(self, layer: Layer) -> _Pass:
        forward = _Pass(
            self._products(layer),
            self._core_seconds(layer),
            self._moved(layer) / self.memory_speed,
            self._sent(),
        )
        backward = _Pass(
            forward.products * _BACKWARD_PRODUCTS,
            self._core_backward(layer),
            forward.elementwise * self.constants.backward,
            forward.model,
        )
        return forward + backward + self._again(forward)

    def _again(self, forward: _Pass) -> _Pass:
        """Return the time of what the backward pass computes again."""
        return {
            "none": _Pass(),
            "core": _Pass(attention=forward.attention),
            "half": _Pass(products=forward.products, elementwise=forward.elementwise) * 0.5,
            "all": forward,
        }[self.execution.recomputed]

    def _products(self, layer: Layer) -> float:
        return sum(
            self._product(tensor.row, tensor.numbers / tensor.row / (self.ranks if tensor.is_split else 1))
            for tensor in layer_weights(self.setup.model, layer)
            if tensor.multiplies
        )

    def _product(self, rows: float, columns: float) -> float:
        """Return the time of multiplying all tokens with a matrix."""
        tokens = self.tokens
        shortest = min(tokens, rows, columns)
        share = self.constants.products * shortest / (shortest + self.constants.half)
        computing = 2 * tokens * rows * columns / (self.device.peak * self.device.sustained * share)
        moved = _BYTES * (tokens * rows + rows * columns + tokens * columns)
        return max(computing, moved / self.memory_speed)

    def _core_operations(self, layer: Layer) -> float:
        """Return the operations of a layer's products that have no weights, in the forward pass."""
        each = core_operations(layer, self.setup.model, self.setup.run.batch.length, "full")
        return self.tokens * each / self.ranks

    def _core_seconds(self, layer: Layer) -> float:
        return self._core(layer, products=1.0, flash=1.0, score_bytes=_SCORE_BYTES_FORWARD)

    def _core_backward(self, layer: Layer) -> float:
        return self._core(
            layer, products=_BACKWARD_PRODUCTS, flash=_BACKWARD_FLASH, score_bytes=_SCORE_BYTES_BACKWARD
        )

    def _core(self, layer: Layer, *, products: float, flash: float, score_bytes: int) -> float:
        operations = self._core_operations(layer)
        speed = self.device.peak * self.device.sustained
        mixer, run = layer.mixer, self.setup.run
        if not isinstance(mixer, Attention):
            return products * operations / (speed * self.constants.products)
        if not keeps_scores(mixer, run):
            # The half that a causal mask hides is not computed.
            share_computed = 1.0 if self.setup.model.is_encoder else 0.5
            return flash * operations * share_computed / (speed * self.constants.flash)
        size = mixer.head_width
        share = self.constants.products * size / (size + self.constants.half_head)
        scores = self.tokens * run.batch.length * mixer.heads / self.ranks
        return products * operations / (speed * share) + scores * score_bytes / self.memory_speed

    def _moved(self, layer: Layer) -> float:
        """Return the bytes that element-wise operators move in the forward pass."""
        ranks, mixer = self.ranks, layer.mixer
        # Two norms (read, write) and two sums with the residual stream (read two, write one, mask).
        alone = 2 * 2 + 2 * 3.5
        replicated = alone * self.setup.model.width / (ranks if self.setup.run.layout.splits_sequence else 1)
        inner = [each for each in (mixer, layer.channel) if isinstance(each, MLP | SpatialMLP)]
        tensors = (3 if isinstance(each, MLP) and each.is_gated else 2 for each in inner)
        activation = sum(number * each.width for number, each in zip(tensors, inner, strict=True)) / ranks
        turned = 0.0
        if isinstance(mixer, Attention) and isinstance(mixer.position, Rotary):
            turned = 2 * (mixer.query_width + mixer.key_width) / ranks
        moved = self.tokens * _BYTES * (replicated + activation + turned)
        return moved if self.execution.is_fused else moved * self.constants.unfused

    def _sent(self) -> float:
        """Return the time of a layer's tensor-parallel messages in one pass: two all-reduces."""
        each = 2 * hidden_bytes(self.setup) * (self.ranks - 1) / self.ranks
        return 2 * each / self.link_speed


def _weights(model: _Model) -> int:
    return max(local_parameters(model.setup, stage) for stage in {0, model.setup.run.layout.stages - 1})


def _sent_between_stages(model: _Model) -> float:
    """Return the time of sending a micro-batch's activations and gradients to the next stages."""
    if model.setup.run.layout.stages == 1:
        return 0.0
    hidden = hidden_bytes(model.setup) / model.ranks
    speed = model.device.network_bandwidth * model.constants.network
    return 2 * model.execution.chunks * hidden / speed


def _exposed(model: _Model, running: float) -> float:
    """Return the time of data-parallel messages that is not hidden behind the passes."""
    layout = model.setup.run.layout
    per_host = max(1, model.execution.devices_per_host // model.ranks)
    speed = model.speed_between(ranks=layout.data, ranks_per_host=per_host)
    sending = communication_bytes(model.setup).data / speed
    return max(0.0, sending - running) if layout.zero >= 2 else sending
