"""Rules about datasets and their weights."""

from collections.abc import Iterator
from math import isfinite

from neox_config.pluralize import pluralize
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def data_comes_one_way(c: NeoXConfig) -> Iterator[Problem]:
    """Require either data-path or lists of paths; for validation only if it takes place."""
    data = c.data
    lists = {
        name: getattr(data, name) for name in ("train_data_paths", "valid_data_paths", "test_data_paths")
    }
    given = [name for name, paths in lists.items() if paths is not None]
    if given and data.data_path is not None:
        yield Problem(given[0], "cannot be combined with data-path", "remove one of them")
    elif given and "train_data_paths" not in given:
        yield Problem(given[0], "is given without train-data-paths", "add train-data-paths: [PREFIX]")
    elif given and "valid_data_paths" not in given and c.training.eval_iters:
        what = "is given without valid-data-paths"
        remedy = "add valid-data-paths: [PREFIX] of other documents, or set eval-iters: 0 for no validation"
        yield Problem("train_data_paths", what, remedy)
    for name, paths in lists.items():
        if paths is not None and not paths:
            yield Problem(name, "is empty", "name at least one dataset")


def lists_match_the_paths(c: NeoXConfig) -> Iterator[Problem]:
    """Require one dataset of labels and one weight per dataset, no weight negative and not all zero."""
    for part in ("train", "valid", "test"):
        paths, weights = getattr(c.data, f"{part}_data_paths"), getattr(c.data, f"{part}_data_weights")
        labels = getattr(c.data, f"{part}_label_data_paths")
        for name, given, entries in (
            (f"{part}_label_data_paths", labels, ("dataset of labels", "datasets of labels")),
            (f"{part}_data_weights", weights, ("weight", "weights")),
        ):
            if given is not None and paths is None:
                what = f"is given without {part}-data-paths"
                yield Problem(name, what, f"name the datasets in {part}-data-paths, not in data-path")
            elif given is not None and len(given) != len(paths):
                what = f"has {pluralize(len(given), *entries)} for {pluralize(len(paths), 'dataset')}"
                yield Problem(name, what, "give one entry per dataset, in the same order")
        if weights is not None and (min(weights, default=0) < 0 or not any(weights)):
            yield Problem(
                f"{part}_data_weights",
                "must not contain a negative weight, or only zeros",
                "give each dataset a weight of at least 0, and one a positive weight",
            )


def whole_documents_have_an_order(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a computed order of samples of whole documents, which are listed in index files."""
    if c.data.sample_order == "lazy" and c.data.pack_impl != "packed":
        what = f"cannot order samples of whole documents (pack-impl: {c.data.pack_impl})"
        yield Problem("sample_order", what, "use gpt_neox, or pack-impl: packed")


def split_keeps_something(c: NeoXConfig) -> Iterator[Problem]:
    """Require a positive proportion in `split`."""
    shares = [float(part) for part in c.data.split.replace("/", ",").split(",") if part.strip()]
    if not any(shares):
        yield Problem("split", "must contain a number greater than 0", "use 969,30,1")
    if not isfinite(sum(shares)):
        yield Problem("split", "contains a number that is too large", "use 969,30,1")
