"""Whether a resumed run goes on with the samples where the checkpoint's run stopped."""

from collections.abc import Mapping
from typing import Any

__all__ = ["SAMPLES_PER_ITERATION", "change_of_order"]

# Recorded beside the parameters, because it depends on the number of devices, too.
SAMPLES_PER_ITERATION = "samples_per_iteration"

_ALWAYS = (
    SAMPLES_PER_ITERATION,
    "seed",
    "seq_length",
    "sample_order",
    "split",
    "data_path",
    "train_data_paths",
    "train_data_weights",
    "weight_by_num_documents",
    "weighted_sampler_alpha",
)
# The number of samples that is asked for decides how GPT-NeoX's order is shuffled; the lazy one has no end.
_OF_ORDER = {"gpt_neox": ("train_iters",)}


def change_of_order(stored: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """What decides which samples come next and has changed since the checkpoint; None when nothing has.

    Args:
        stored: flat parameter name to value, of the run that wrote the checkpoint.
        here: of this run.
    """
    deciding = (*_ALWAYS, *_OF_ORDER.get(str(here.get("sample_order")), ()))
    differing = [
        f"{name.replace('_', '-')} was {stored[name]}, is {here[name]}"
        for name in deciding
        if name in stored and name in here and stored[name] != here[name]
    ]
    return "; ".join(differing) or None
