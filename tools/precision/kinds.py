"""The rows of the table of precisions: number formats, and layouts that communicate alike."""

__all__ = ["KINDS", "PRECISION_NAMES", "kind_of"]

PRECISION_NAMES = ("fp32", "bf16", "fp16")
KINDS: dict[str, tuple[str, ...]] = {
    "one process": ("one process",),
    "data parallel": ("data 2",),
    "tensor parallel": ("tensor 2", "tensor 4", "tensor 2 x data 2"),
    "sequence parallel": ("sequence 2", "sequence 4"),
    "pipeline": ("pipeline 1", "pipeline 2", "pipeline 4"),
    "pipeline x tensor": ("tensor 2 x pipeline 2", "sequence 2 x pipeline 2"),
    "torch, pipeline": (
        "torch, pipeline 2",
        "torch, pipeline 2, interleaved",
        "torch, pipeline 4, zero bubble",
        "torch, pipeline 2, ZBV",
        "torch, pipeline 4",
    ),
    "torch, pipeline x data": ("torch, pipeline 2 x data 2", "torch, pipeline 2 x data 2, zero bubble"),
    "torch, pipeline x tensor": (
        "torch, pipeline 2 x tensor 2, interleaved",
        "torch, pipeline 2 x sequence 2, ZBV",
    ),
    "torch, pipeline x ZeRO 1": ("torch, pipeline 2 x data 2, ZeRO 1",),
    "torch, pipeline x ZeRO 2": ("torch, pipeline 2 x data 2, ZeRO 2, zero bubble",),
    "torch, pipeline x ZeRO 3": ("torch, pipeline 2 x data 2, ZeRO 3, interleaved",),
    "pipeline x ZeRO 1": ("pipeline 1 x data 2, ZeRO 1", "pipeline 2 x data 2, ZeRO 1"),
    "ZeRO 1": ("ZeRO 1", "ZeRO 1, states on the host"),
    "ZeRO 2": ("ZeRO 2", "ZeRO 2, states on the host"),
    "ZeRO 3": ("ZeRO 3", "ZeRO 3, second partition", "ZeRO 3, all on the host"),
    "ZeRO 3 x tensor": ("ZeRO 3 x tensor 2", "sequence 2 x ZeRO 3"),
    "torch, ZeRO 1": ("torch, ZeRO 1",),
    "torch, ZeRO 2": ("torch, ZeRO 2",),
    "torch, ZeRO 3": ("torch, ZeRO 3", "torch, ZeRO 3, second partition"),
    "torch, ZeRO x tensor": ("torch, ZeRO 1 x tensor 2", "torch, sequence 2 x ZeRO 3"),
}


def kind_of(layout: str) -> str:
    """Return the row of the table that a layout belongs to."""
    return next(kind for kind, layouts in KINDS.items() if layout in layouts)
