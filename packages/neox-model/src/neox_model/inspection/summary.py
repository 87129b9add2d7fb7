"""Describe a checkpoint from its manifest, without reading tensors."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from neox_config.facts.checkpoints import MANIFEST, TOKEN_EMBEDDING
from neox_config.pluralize import pluralize
from neox_config.problems import in_words
from neox_config.spec.resume import IN_EFFECT, SAMPLES_PER_ITERATION
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import quoted
from neox_model.checkpoint.names import in_model_order, is_random_state, is_weight, state_of
from neox_model.inspection.finding import is_latest

__all__ = ["describe", "summary", "tensor_lines"]

# Shown of the state of the training loop, which has more for the loop itself.
_POSITION = ("samples_per_iteration", "samples", "validation_samples", "tokens", "skipped_iterations")

# Parameters of the model, in the order in which they are shown.
_MODEL = {
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "num_attention_heads": "attention heads",
    "num_kv_heads": "key-value heads",
    "mlp_width": "MLP width",
    "seq_length": "sequence length",
    "pos_emb": "positions",
    "norm": "norm",
    "activation": "activation",
}
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def summary(folder: Path, manifest: Manifest, *, with_tensors: bool) -> dict[str, Any]:
    """Return what a checkpoint contains, as plain values.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        with_tensors: include a list of all tensors.
    """
    records, training = manifest.tensors, dict(manifest.training)
    weights = {name: record for name, record in records.items() if is_weight(name)}
    states = [name for name in records if state_of(name) is not None]
    effects = {label: _effective(manifest, name) for name, label in _MODEL.items()}
    embedding = records.get(TOKEN_EMBEDDING)
    effects["vocabulary"] = embedding.shape[0] if embedding is not None and embedding.shape else None
    zero = manifest.config.get("zero_optimization")
    found: dict[str, Any] = {
        "folder": str(folder),
        "iteration": manifest.iteration,
        "is_latest": is_latest(folder),
        "model": {label: value for label, value in effects.items() if value is not None},
        "parameters": sum(prod(record.shape) for record in weights.values()),
        "weights": len(weights),
        "dtypes": dict(Counter(record.dtype for record in weights.values())),
        "layout": {
            "data": manifest.layout.data,
            "model": manifest.layout.model,
            "pipe": manifest.layout.pipe,
            "zero_stage": zero.get("stage") if isinstance(zero, Mapping) else None,
        },
        "precision": _effective(manifest, "precision"),
        "optimizer": {
            "class": manifest.optimizer,
            "states": sorted({state_of(name) or "" for name in states}),
            "numbers": sorted({key for held in manifest.optimizer_scalars.values() for key in held}),
        },
        "schedule": dict(manifest.schedule),
        "engine": dict(manifest.engine),
        "data": {
            "samples_per_iteration": manifest.config.get(SAMPLES_PER_ITERATION),
            **{name: value for name, value in training.items() if name != "iteration"},
        },
        "random_states": sum(is_random_state(name) and name.endswith("/torch") for name in records),
        "files": dict(manifest.files),
        "bytes": sum(manifest.files.values()) + (folder / MANIFEST).stat().st_size,
        "packages": dict(manifest.packages),
    }
    if with_tensors:
        found["tensors"] = [
            {
                "name": name,
                "shape": list(records[name].shape),
                "dtype": records[name].dtype,
                "bytes": records[name].num_bytes,
                "files": sorted({piece.file for piece in records[name].pieces}),
                "pieces": len(records[name].pieces),
            }
            for name in in_model_order(records)
        ]
    return found


def describe(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a summary."""
    yield found["folder"]
    curve = found["schedule"].get("curve")
    shown = _pairs(curve) if isinstance(curve, Mapping) else "unknown"
    latest = " (the latest: a run resumes from it)" if found["is_latest"] else ""
    rows = {
        "iteration": f"{found['iteration']:,}{latest}",
        "model": ", ".join(f"{label} {_value(value)}" for label, value in found["model"].items()),
        "parameters": f"{found['parameters']:,} in {pluralize(found['weights'], 'weight')}, "
        "stored as " + ", ".join(f"{dtype} ({count:,})" for dtype, count in found["dtypes"].items()),
        "layout": _layout(found["layout"]),
        "precision": _value(found["precision"]),
        "optimizer": _optimizer(found["optimizer"]),
        "schedule": f"{shown}; {_value(found['schedule'].get('applied_updates'))} updates applied",
        "data": _pairs({name: found["data"][name] for name in _POSITION if name in found["data"]}),
        "engine": _pairs(found["engine"]),
        "random states": f"of {pluralize(found['random_states'], 'rank')}"
        if found["random_states"]
        else "not saved",
        "files": f"{pluralize(len(found['files']), 'shard')} and the manifest, " + _size(found["bytes"]),
        "packages": " ".join(
            f"{quoted(name)} {quoted(text)}," for name, text in found["packages"].items()
        ).rstrip(",")
        or "not recorded",
    }
    width = max(map(len, rows)) + 2
    for name, text in rows.items():
        yield f"  {name:{width}}{text}"
    if "tensors" in found:
        yield from tensor_lines(found["tensors"])


def tensor_lines(tensors: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of tensors: name, dtype, shape, bytes and pieces."""
    rows = [
        (
            quoted(tensor["name"]),
            tensor["dtype"],
            str(tensor["shape"]),
            _size(tensor["bytes"]),
            f"pieces: {tensor['pieces']:,}, files: {len(tensor['files']):,}",
        )
        for tensor in tensors
    ]
    widths = [max((len(cell) for cell in column), default=0) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _effective(manifest: Manifest, name: str) -> Any:
    """Return the value in effect of a parameter, or else the recorded value; None if there is none."""
    classes = manifest.config.get(IN_EFFECT)
    for values in classes.values() if isinstance(classes, Mapping) else ():
        if isinstance(values, Mapping) and name in values:
            return values[name]
    return manifest.config.get(name)


def _layout(layout: Mapping[str, Any]) -> str:
    ranks = layout["data"] * layout["model"] * layout["pipe"]
    stage = "" if layout["zero_stage"] is None else f"; ZeRO stage {_value(layout['zero_stage'])}"
    return (
        f"written by {pluralize(ranks, 'rank')}: data-parallel {layout['data']:,} "
        f"x model-parallel {layout['model']:,} x pipe-parallel {layout['pipe']:,}{stage}; "
        "any other layout loads it as well"
    )


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    if optimizer["class"] is None:
        return "states are not saved"
    states = ", ".join(map(quoted, (*optimizer["states"], *optimizer["numbers"])))
    return f"{quoted(optimizer['class'])} with {states}" if states else f"{quoted(optimizer['class'])}, new"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{quoted(name)} {_value(value)}" for name, value in values.items()) or "nothing"


def _value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "unknown" if value is None else quoted(in_words(value))


def _size(count: int) -> str:
    return next((f"{count / size:,.1f} {unit}" for unit, size in _UNITS if count >= size), f"{count} bytes")
