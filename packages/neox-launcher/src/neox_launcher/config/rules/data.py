"""Rules about datasets and their shares."""

from collections.abc import Iterator

from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig


def data_comes_one_way(c: NeoXConfig) -> Iterator[Problem]:
    """Either one dataset that is split, or three lists."""
    data = c.data
    lists = {
        name: getattr(data, name) for name in ("train_data_paths", "valid_data_paths", "test_data_paths")
    }
    given = [name for name, paths in lists.items() if paths is not None]
    if given and data.data_path is not None:
        yield Problem(given[0], "excludes data-path", "leave one of them out")
    if given and len(given) < len(lists):
        missing = ", ".join(name.replace("_", "-") for name in lists if name not in given)
        yield Problem(given[0], f"is given without {missing}", "give all three lists")
    for name, paths in lists.items():
        if paths is not None and not paths:
            yield Problem(name, "is empty", "name at least one dataset")


def weights_match_the_paths(c: NeoXConfig) -> Iterator[Problem]:
    """One weight per dataset, none negative, not all zero."""
    for part in ("train", "valid", "test"):
        weights = getattr(c.data, f"{part}_data_weights")
        paths = getattr(c.data, f"{part}_data_paths")
        name = f"{part}_data_weights"
        if weights is None:
            continue
        if paths is None:
            yield Problem(
                name, f"has no {part}-data-paths to weigh", f"add {part}-data-paths, or leave it out"
            )
        elif len(weights) != len(paths):
            yield Problem(
                name,
                f"has {_count(len(weights), 'number')} for {_count(len(paths), 'dataset')}",
                "give one number per dataset",
            )
        if any(weight < 0 for weight in weights) or not any(weights):
            yield Problem(name, "must be numbers of which none is negative and one is positive", "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def split_keeps_something(c: NeoXConfig) -> Iterator[Problem]:
    """The shares of the three parts are not all zero."""
    shares = [float(part) for part in c.data.split.replace("/", ",").split(",") if part.strip()]
    if not any(shares):
        yield Problem("split", "gives nothing to any part", "use 969,30,1")
