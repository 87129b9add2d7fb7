"""Which backend of PyTorch's scaled_dot_product_attention a training runs, and why it is not cuDNN's.

PyTorch chooses by device, shapes, dtype, mask, dropout and determinism. On GPUs of the generations Hopper and
Blackwell (compute capability 9 and 10) it tries cuDNN's attention first, which is the fastest there.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neox_config.counted import counted
from neox_config.spec.model import Attention, ModelSpec
from neox_config.spec.run import RunSpec
from neox_model.assembly.attention import build_attention
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.operators import reference_operators
from neox_model.assembly.transformer import build_adapters
from neox_model.layers.attention import DenseCore, ParallelAttention
from neox_model.parallel.groups import Group
from neox_model.parallel.linear import zero_init
from neox_model.parallel.low_rank import freeze_all_but_adapters
from neox_model.torch_compat import chosen_attention, runtime_cudnn
from neox_model.versions import version_of_cudnn

__all__ = ["AttentionBackend", "Call", "attention_backends", "log_backends", "why_not_cudnn"]

logger = logging.getLogger(__name__)

_CUDNN = "cuDNN"
# PyTorch's name -> name in logs and records.
_NAMES = {
    "CUDNN_ATTENTION": _CUDNN,
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "efficient",
    "MATH": "math",
    "OVERRIDEABLE": "overrideable",
}

# Source of these conditions: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of PyTorch.
_PREFERRING_GENERATIONS = (9, 10)
_PREFERRED_SINCE = 91501
_DEPRIORITIZED = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
_DROPOUT_STEPS = 16
_WIDTH_STEP, _LARGEST_WIDTH = 8, 128

_UNKNOWN = (
    "for a reason that is not known here; torch.backends.cuda.can_use_cudnn_attention with debug=True prints "
    "PyTorch's"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """The backend of one kind of attention in training.

    Args:
        kind: the kind of attention, as in `attention-config`.
        layers: number of layers of this kind in the model.
        name: cuDNN, flash, efficient or math.
        note: why it is not cuDNN's, if PyTorch prefers that on this device; else None.
    """

    kind: str
    layers: int
    name: str
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What decides whether PyTorch runs cuDNN's attention.

    Args:
        capability: compute capability of the GPU; None: no NVIDIA GPU.
        cudnn: version of cuDNN as a number, such as 91900; None: PyTorch has none.
        dtype: dtype of queries, keys and values.
        head_width: channels of a head.
        dropout: dropout probability of attention weights.
        is_deterministic: only deterministic algorithms are allowed.
        is_deprioritized: the environment asks PyTorch not to prefer cuDNN.
        trains_mask: the mask has a gradient (relative positions that are learned).
    """

    capability: tuple[int, int] | None
    cudnn: int | None
    dtype: torch.dtype
    head_width: int
    dropout: float = 0.0
    is_deterministic: bool = False
    is_deprioritized: bool = False
    trains_mask: bool = False


def attention_backends(spec: ModelSpec, run: RunSpec, device: torch.device) -> list[AttentionBackend]:
    """Return the backend of each kind of attention that calls scaled_dot_product_attention in training.

    Kinds that FlexAttention computes, or that store scores, are left out. Call it after
    `use_deterministic_algorithms`. It allocates, and frees, as much as the projection of one layer takes.

    Args:
        spec: the model.
        run: how it runs.
        device: the device that trains.
    """
    kinds, found = spec.kinds, []
    for kind, layers in Counter(kinds).items():
        call = _call_of_layer(spec, kinds.index(kind), run, device)
        if call is not None:
            inputs, options = call
            name = _NAMES[chosen_attention(*inputs, **options).name]
            note = why_not_cudnn(_described(inputs[0], options), name)
            found.append(AttentionBackend(kind=kind, layers=layers, name=name, note=note))
    return found


def log_backends(backends: Sequence[AttentionBackend]) -> None:
    """Log the backend of each kind of attention, and each note once."""
    for backend in backends:
        layers = counted(backend.layers, f"{backend.kind} layer")
        logger.info("scaled_dot_product_attention of %s: %s backend", layers, backend.name)
    for note in dict.fromkeys(backend.note for backend in backends if backend.note):
        logger.info("%s", note)


def why_not_cudnn(call: Call, chosen: str) -> str | None:
    """Return a note if PyTorch prefers cuDNN's attention on this device but runs another; else None.

    Args:
        call: what decides about it.
        chosen: name of the backend that runs.
    """
    is_preferred = call.capability is not None and call.capability[0] in _PREFERRING_GENERATIONS
    if chosen == _CUDNN or not is_preferred:
        return None
    return (
        f"attention runs on the {chosen} backend, not on cuDNN's, which is faster on this GPU: "
        f"{'; '.join(_reasons(call)) or _UNKNOWN}"
    )


def _reasons(call: Call) -> Iterator[str]:
    """Yield each reason why PyTorch does not run cuDNN's attention, with what would allow it."""
    if call.dtype == torch.float32:
        yield "it computes in 16 bits alone; set precision: bfloat16"
    if call.is_deterministic:
        yield "it is not deterministic; deterministic: false allows it"
    if (call.dropout * _DROPOUT_STEPS) % 1 != 0:
        below = math.floor(call.dropout * _DROPOUT_STEPS) / _DROPOUT_STEPS
        yield (
            f"attention-dropout {call.dropout:g} is not a multiple of 1/{_DROPOUT_STEPS}; set {below:g} or "
            f"{below + 1 / _DROPOUT_STEPS:g}"
        )
    heads = f"heads of {call.head_width} channels (hidden-size / num-attention-heads) are"
    if call.head_width % _WIDTH_STEP != 0:
        narrower = call.head_width // _WIDTH_STEP * _WIDTH_STEP
        yield (
            f"{heads} not a multiple of {_WIDTH_STEP}; the next multiples are {narrower} and "
            f"{narrower + _WIDTH_STEP}"
        )
    if call.head_width > _LARGEST_WIDTH:
        yield (
            f"{heads} wider than {_LARGEST_WIDTH}; use more heads, or for 256 channels a PyTorch with cuDNN "
            "since 9.22.1"
        )
    if call.trains_mask:
        yield "it has no gradient for the bias of pos-emb: rpe; use another position embedding"
    if call.cudnn is None or call.cudnn < _PREFERRED_SINCE:
        found = "no cuDNN" if call.cudnn is None else f"cuDNN {version_of_cudnn(call.cudnn)}"
        yield (
            f"{found} is loaded, and PyTorch prefers it since {version_of_cudnn(_PREFERRED_SINCE)}; install "
            "a PyTorch with a newer one, and remove folders with another cuDNN from LD_LIBRARY_PATH"
        )
    if call.is_deprioritized:
        yield f"the variable {_DEPRIORITIZED} is 1; unset it"


# The call of a layer ----------------------------------------------------------------------------------------


_Arguments = tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]
# The sequence is the outermost dimension of queries, keys and values, so that strides do not depend on it.
_FEW_TOKENS = 2


def _call_of_layer(
    spec: ModelSpec, layer_index: int, run: RunSpec, device: torch.device
) -> _Arguments | None:
    """Return arguments as a layer passes them to scaled_dot_product_attention; None if it does not call it.

    The layer runs on a few tokens, and what it passes is stretched to the length of the sequence. Fused
    rotary kernels return other strides, on which no backend depends.
    """
    mixer, size, batch = spec.layers[layer_index].mixer, run.layout.tensor, run.batch.micro
    if not isinstance(mixer, Attention):
        return None
    with torch.device("cpu"):  # The weights are not used: without values they take no memory there.
        attention = build_attention(
            mixer,
            layer_index,
            run,
            width=spec.width,
            init=zero_init,
            output_init=zero_init,
            group=Group(rank=0, size=size, process_group=None, ranks=tuple(range(size))),
            operators=reference_operators(mixer, run.fusions, run.dropout.attention, device),
            adapters=build_adapters(spec.adapters, run.dropout.adapters),
        )()
    assert isinstance(attention, ParallelAttention)
    if type(attention.core) is not DenseCore:
        return None
    freeze_all_but_adapters(attention)
    core = attention.core.to(device)
    dtype = DTYPES[run.precision.computes_in]
    width = attention.qkv.weight.shape[0]
    projected = torch.zeros(_FEW_TOKENS, batch, width, dtype=dtype, device=device, requires_grad=True)
    documents = torch.zeros(batch, _FEW_TOKENS, dtype=torch.int64, device=device)
    inputs, options = core.arguments(
        *attention.heads(projected), documents if run.batch.separates_tokens else None
    )
    length, mask = run.batch.length, options["attn_mask"]
    stretched = None if mask is None else mask[..., :1, :1].expand(*mask.shape[:2], length, length)
    return _stretched(inputs, length), options | {"attn_mask": stretched}


def _stretched(inputs: tuple[Tensor, Tensor, Tensor], length: int) -> Any:
    """Return tensors like these inputs_BNSK for a sequence of this length, without values, in one memory."""
    shapes = [(*x.shape[:2], length, x.shape[3]) for x in inputs]
    first, ends = inputs[0], map(_end, shapes, inputs)
    memory = torch.empty(max(ends), dtype=first.dtype, device=first.device, requires_grad=True)
    return tuple(
        memory.as_strided(shape, x.stride(), x.storage_offset())
        for shape, x in zip(shapes, inputs, strict=True)
    )


def _end(shape: tuple[int, ...], like: Tensor) -> int:
    """Return the elements of memory that a tensor of this shape requires, with the other's strides."""
    steps = ((size - 1) * stride for size, stride in zip(shape, like.stride(), strict=True))
    return int(like.storage_offset()) + sum(steps) + 1


def _described(query: Tensor, options: Mapping[str, Any]) -> Call:
    mask = options["attn_mask"]
    is_nvidia = query.device.type == "cuda" and torch.version.cuda is not None
    return Call(
        capability=torch.cuda.get_device_capability(query.device) if is_nvidia else None,
        cudnn=runtime_cudnn(),
        dtype=query.dtype,
        head_width=query.shape[-1],
        dropout=options["dropout_p"],
        is_deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        is_deprioritized=os.environ.get(_DEPRIORITIZED) == "1",
        trains_mask=mask is not None and mask.requires_grad,
    )
