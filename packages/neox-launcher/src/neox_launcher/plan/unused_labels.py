"""Find labels that lie next to the datasets of a training, and that it does not name."""

import json
from collections.abc import Iterator
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.derive.objective import is_encoder
from neox_config.facts.splits import PARTS
from neox_config.problems import Problem, place_of
from neox_launcher.plan.dataset_files import data_path, index_path, manifest_path

__all__ = ["notes_on_labels"]


def notes_on_labels(config: NeoXConfig) -> list[Problem]:
    """Return a note if a dataset was written with labels that the training does not read."""
    if is_encoder(config):
        return []
    found = dict(_unused(config))
    if not found:
        return []
    name, (prefix, labels) = next(iter(found.items()))
    what = f"has labels next to it, {labels}, that are not used, so the loss counts all tokens"
    note = Problem(name, what, _remedy(name, found, prefix, labels), value=prefix)
    return [note.located(place_of(config.sources, name), None)]


def _unused(config: NeoXConfig) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each parameter with the first of its datasets that has unused labels, and these labels."""
    data = config.data
    named: dict[str, tuple[str, ...]] = {} if data.data_path is None else {"data_path": (data.data_path,)}
    for part in PARTS if config.training.eval_iters else PARTS[:1]:
        if getattr(data, f"{part}_label_data_paths") is None:
            named[f"{part}_data_paths"] = getattr(data, f"{part}_data_paths") or ()
    for name, prefixes in named.items():
        pairs = ((prefix, labels) for prefix in prefixes if (labels := _labels_of(prefix)) is not None)
        yield from ((name, pair) for pair in list(pairs)[:1])


def _remedy(name: str, found: dict[str, tuple[str, str]], prefix: str, labels: str) -> str:
    if name == "data_path":
        return (
            f"to count only those with a label, replace data-path by train-data-paths: [{prefix}] and "
            f"train-label-data-paths: [{labels}], and give lists for validation likewise, or set "
            "eval-iters: 0"
        )
    lists = [f"{each.removesuffix('_data_paths')}-label-data-paths" for each in found]
    rest = f", and the labels of the others in {' and '.join(lists[1:])}" if lists[1:] else ""
    return f"to count only those with a label, add {lists[0]}: [{labels}]{rest}"


def _labels_of(prefix: str) -> str | None:
    """Return the dataset of labels that `preprocess_data --loss-mask` wrote with a dataset of tokens."""
    stem = prefix.removesuffix("_document")
    if stem == prefix:
        return None
    beside = [f"{stem}_label_document", f"{stem.removesuffix('_text')}_label_document"]
    return next((labels for labels in beside if labels != prefix and _are_labels(prefix, labels)), None)


def _are_labels(prefix: str, labels: str) -> bool:
    """Return whether both were written in one run with a loss mask.

    Keys of a corpus may have these names too, so the manifest decides; GPT-NeoX writes none, but the index
    of labels has the size of that of their tokens.
    """
    try:
        if not data_path(labels).is_file():
            return False
        sizes = [index_path(each).stat().st_size for each in (prefix, labels)]
        manifest = manifest_path(prefix)
        return "loss_mask" in _options(manifest) if manifest.is_file() else sizes[0] == sizes[1]
    except OSError:
        return False  # Other checks report files that cannot be read.


def _options(manifest: Path) -> dict[str, object]:
    try:
        return dict(json.loads(manifest.read_text(encoding="utf-8"))["options"])
    except (ValueError, LookupError, TypeError):
        return {}  # The package that reads a damaged manifest reports it.
