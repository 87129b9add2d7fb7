"""Compressions of a small model, each a whole `compression_training` block."""

from typing import Any

__all__ = ["COMPRESSIONS", "block", "pruned_rows", "quantized_weights", "sparse_weights"]


def _part(shared: dict[str, Any], **groups: dict[str, Any]) -> dict[str, Any]:
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}


def _group(modules: list[str], related: list[list[str]] | None = None, **params: Any) -> dict[str, Any]:
    return {"modules": modules, "params": params} | ({} if related is None else {"related_modules": related})


def quantized_weights(bits: tuple[int, int], **shared: Any) -> dict[str, Any]:
    """Return the block of quantized weights of all matrices, from the first to the last number of bits."""
    start, target = bits
    group = _group(["attention", "mlp"], start_bits=start, target_bits=target, quantization_period=2)
    return {
        "weight_quantization": _part(
            {"quantize_weight_in_forward": True, "schedule_offset": 1, **shared}, all=group
        )
    }


def _inputs(bits: int, **shared: Any) -> dict[str, Any]:
    return {"activation_quantization": _part({"schedule_offset": 2, **shared}, all=_group(["*"], bits=bits))}


def sparse_weights(ratio: float, **shared: Any) -> dict[str, Any]:
    """Return the block of pruned weights, of which a share is kept."""
    group = _group(["mlp", "attention.qkv"], dense_ratio=ratio)
    return {"sparse_pruning": _part({"schedule_offset": 2, **shared}, all=group)}


def pruned_rows(method: str) -> dict[str, Any]:
    """Return the block of MLPs of which half of the rows is kept."""
    group = _group([r"mlp\.up"], [["mlp.down"]], dense_ratio=0.5)
    return {"row_pruning": _part({"schedule_offset": 3, "method": method}, all=group)}


def _heads(heads: int) -> dict[str, Any]:
    group = _group([r"attention\.dense"], [["attention.qkv"]], dense_ratio=0.5)
    return {"head_pruning": _part({"schedule_offset": 1, "num_heads": heads}, all=group)}


# The small model has six heads.
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "8 to 6 bits in groups, mixed": quantized_weights(
        (8, 6), quantize_groups=12, fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.3}
    ),
    "asymmetric, stochastic": quantized_weights(
        (5, 5), quantize_groups=4, quantization_type="asymmetric", rounding="stochastic"
    ),
    "two bits, dynamic inputs": quantized_weights((2, 2), quantize_groups=24)
    | _inputs(8, range_calibration="dynamic"),
    "one bit": quantized_weights((1, 1), quantize_groups=2),
    "static inputs": _inputs(8),
    "static asymmetric inputs": _inputs(6, quantization_type="asymmetric"),
    "smallest weights and rows": sparse_weights(0.6) | pruned_rows("l1"),
    "learned weights, rows and heads": sparse_weights(0.6, method="topk") | pruned_rows("topk") | _heads(6),
    "snip in blocks": sparse_weights(
        0.5, method="snip_momentum", block_pattern="2x1", schedule_offset_end=5, schedule_offset_stride=2
    ),
    "snip 2:4, 8 bits": sparse_weights(0.5, method="snip_momentum", block_pattern="2:4")
    | quantized_weights((8, 8)),
}


def block(name: str) -> dict[str, Any]:
    """Return a configuration with a compression."""
    return {"compression_training": COMPRESSIONS[name]}
