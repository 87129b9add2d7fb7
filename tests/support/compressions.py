"""Compressions of a small model, each a whole `compression_training` block."""

from typing import Any

__all__ = ["COMPRESSIONS", "block"]


def _part(shared: dict[str, Any], **groups: dict[str, Any]) -> dict[str, Any]:
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}


def _group(modules: list[str], related: list[list[str]] | None = None, **params: Any) -> dict[str, Any]:
    return {"modules": modules, "params": params} | ({} if related is None else {"related_modules": related})


def _weights(bits: tuple[int, int], **shared: Any) -> dict[str, Any]:
    start, target = bits
    group = _group(["attention", "mlp"], start_bits=start, target_bits=target, quantization_period=2)
    return {
        "weight_quantization": _part(
            {"quantize_weight_in_forward": True, "schedule_offset": 1, **shared}, all=group
        )
    }


def _inputs(bits: int, **shared: Any) -> dict[str, Any]:
    return {"activation_quantization": _part({"schedule_offset": 2, **shared}, all=_group(["*"], bits=bits))}


def _sparse(ratio: float, **shared: Any) -> dict[str, Any]:
    group = _group(["mlp", "attention.qkv"], dense_ratio=ratio)
    return {"sparse_pruning": _part({"schedule_offset": 2, **shared}, all=group)}


def _rows(method: str) -> dict[str, Any]:
    group = _group([r"mlp\.up"], [["mlp.down"]], dense_ratio=0.5)
    return {"row_pruning": _part({"schedule_offset": 3, "method": method}, all=group)}


def _heads(heads: int) -> dict[str, Any]:
    group = _group([r"attention\.dense"], [["attention.qkv"]], dense_ratio=0.5)
    return {"head_pruning": _part({"schedule_offset": 1, "num_heads": heads}, all=group)}


# The small model has six heads.
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "8 to 6 bits in groups, mixed": _weights(
        (8, 6), quantize_groups=12, fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.3}
    ),
    "asymmetric, stochastic": _weights(
        (5, 5), quantize_groups=4, quantization_type="asymmetric", rounding="stochastic"
    ),
    "two bits, dynamic inputs": _weights((2, 2), quantize_groups=24)
    | _inputs(8, range_calibration="dynamic"),
    "one bit": _weights((1, 1), quantize_groups=2),
    "static inputs": _inputs(8),
    "static asymmetric inputs": _inputs(6, quantization_type="asymmetric"),
    "smallest weights and rows": _sparse(0.6) | _rows("l1"),
    "learned weights, rows and heads": _sparse(0.6, method="topk") | _rows("topk") | _heads(6),
    "snip in blocks": _sparse(
        0.5, method="snip_momentum", block_pattern="2x1", schedule_offset_end=5, schedule_offset_stride=2
    ),
    "snip 2:4, 8 bits": _sparse(0.5, method="snip_momentum", block_pattern="2:4") | _weights((8, 8)),
}


def block(name: str) -> dict[str, Any]:
    """Return a configuration with a compression."""
    return {"compression_training": COMPRESSIONS[name]}
