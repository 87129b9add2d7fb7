"""Which backend of PyTorch's scaled_dot_product_attention a training runs.

PyTorch chooses by device, shapes, dtype, mask, dropout and determinism. On GPUs of the generations Hopper and
Blackwell (compute capability 9 and 10) it tries cuDNN's attention first, which is the fastest there.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neox_config.pluralize import pluralize
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
from neox_model.torch_compat import chosen_attention

__all__ = ["AttentionBackend", "attention_backends", "log_backends"]

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
            note = _note(name, device)
            found.append(AttentionBackend(kind=kind, layers=layers, name=name, note=note))
    return found


def log_backends(backends: Sequence[AttentionBackend]) -> None:
    """Log the backend of each kind of attention, and each note once."""
    for backend in backends:
        layers = pluralize(backend.layers, f"{backend.kind} layer")
        logger.info("scaled_dot_product_attention of %s: %s backend", layers, backend.name)
    for note in dict.fromkeys(backend.note for backend in backends if backend.note):
        logger.info("%s", note)


def _note(chosen: str, device: torch.device) -> str | None:
    """Return a note if PyTorch prefers cuDNN's attention on this device but runs another; else None."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    capability = torch.cuda.get_device_capability(device)[0] if is_nvidia else None
    # On these PyTorch tries cuDNN's attention first (aten's sdp_utils.cpp).
    if chosen == _CUDNN or capability not in (9, 10):
        return None
    return (
        f"attention runs on the {chosen} backend, not on cuDNN's, which is faster on this GPU; "
        "docs/performance.md lists the settings and versions for which PyTorch refuses cuDNN"
    )


# The sequence is the outermost dimension of queries, keys and values, so that strides do not depend on it.
_FEW_TOKENS = 2


def _call_of_layer(
    spec: ModelSpec, layer_index: int, run: RunSpec, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]] | None:
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
    first = inputs[0]
    # The elements of memory that each requires, with the strides of the input.
    ends = [
        x.storage_offset() + 1 + sum((size - 1) * step for size, step in zip(shape, x.stride(), strict=True))
        for shape, x in zip(shapes, inputs, strict=True)
    ]
    memory = torch.empty(max(ends), dtype=first.dtype, device=first.device, requires_grad=True)
    return tuple(
        memory.as_strided(shape, x.stride(), x.storage_offset())
        for shape, x in zip(shapes, inputs, strict=True)
    )
