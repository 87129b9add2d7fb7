"""Collective operations by torch.distributed's names, what each moves per link, and sizes of messages.

Source: the bus bandwidths of NVIDIA's nccl-tests (doc/PERFORMANCE.md).
"""

from collections.abc import Callable, Mapping

__all__ = ["BUCKET_ELEMENTS", "BUS_SHARE", "EARLY_BUCKET_ELEMENTS", "EARLY_ELEMENTS"]

# Largest number of gradient elements in one message of stage 0, unless a tensor is larger: 256 MB of float32,
# enough for full bandwidth and small enough for an additional copy in memory.
BUCKET_ELEMENTS = 2**26
# The same for messages that are sent during the backward pass. They are small, because nothing is left to
# compute while the last one is sent.
EARLY_BUCKET_ELEMENTS = 2**22
# Largest number of gradient elements in messages of the backward pass that are under way at the same time.
EARLY_ELEMENTS = 2**24


def _once(size: int) -> float:
    return 1.0


def _from_others(size: int) -> float:
    return (size - 1) / size


def _there_and_back(size: int) -> float:
    return 2 * (size - 1) / size


# operation -> bytes on the busiest link per byte of the message, by the size of the group. The message is the
# whole tensor: of all_gather the output, of reduce_scatter the input.
BUS_SHARE: Mapping[str, Callable[[int], float]] = {
    "all_reduce": _there_and_back,
    "all_reduce_coalesced": _there_and_back,
    "all_gather": _from_others,
    "all_gather_into_tensor": _from_others,
    "reduce_scatter": _from_others,
    "reduce_scatter_tensor": _from_others,
    "all_to_all": _from_others,
    "all_to_all_single": _from_others,
    "broadcast": _once,
    "reduce": _once,
    "gather": _once,
    "scatter": _once,
    "send": _once,
    "recv": _once,
    "barrier": _once,
}
