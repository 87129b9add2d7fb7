"""Find datasets and parts of the split without a document from which a model learns, before workers start.

neox-data decides which documents samples contain (`neox_data.samples.whole_documents`); a test compares the
two. Usually the first document can be used, so that little is read.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from neox_config import NeoXConfig
from neox_config.derive.evaluation import evaluates_texts
from neox_config.derive.objective import is_retrieval, tokens_behind_input
from neox_config.facts.splits import (
    EVALUATED,
    PARTS,
    documents_by_part,
    empty_parts,
    parts_with_documents,
    parts_without_share,
    shares_left_out,
)
from neox_config.problems import DEFAULTS, Place, Problem, in_words, place_of
from neox_launcher.plan.dataset_files import count_documents, open_documents

__all__ = ["evaluated_documents", "has_evaluation", "skipped_evaluations", "trained_documents"]


def trained_documents(config: NeoXConfig) -> Iterator[Problem]:
    """Require a document to learn from in each dataset that a run reads."""
    if config.data.data_path is not None and "train" in parts_without_share(config.data.split):
        yield _of_split(config, "has no share for training", "write three numbers, as in 969,30,1")
    yield from _empty(config, {"train": "training"}, "give training a larger share")
    yield from _usable_documents(config, PARTS if config.training.eval_iters else PARTS[:1])


def evaluated_documents(config: NeoXConfig) -> Iterator[Problem]:
    """Require a document to evaluate on in each dataset that an evaluation reads."""
    yield from _empty(config, {"train": "training"}, "give training a larger share")
    yield from _without_evaluation(config)
    yield from _usable_documents(config, EVALUATED)


def has_evaluation(config: NeoXConfig) -> bool:
    """Return whether `neox-launch evaluate` would evaluate something."""
    return evaluates_texts(config) or not any(_without_evaluation(config))


def skipped_evaluations(config: NeoXConfig) -> Iterator[Problem]:
    """Note a part of the split without a document, or without a share if that was requested or left out."""
    if config.data.data_path is None or not config.training.eval_iters:
        return
    without = parts_without_share(config.data.split)
    is_requested = "eval_iters" in config.sources or "eval_interval" in config.sources
    if "valid" in without and (is_requested or shares_left_out(config.data.split)):
        parts = "validation and the test, which are" if "test" in without else "validation, which is"
        what = f"has no share for {parts} therefore skipped"
        yield _of_split(config, what, "write three numbers, as in 969,30,1, or set eval-iters: 0")
    called = {
        "valid": "validation, which is therefore skipped",
        "test": "the test, which is therefore skipped",
    }
    yield from _empty(config, called, "give it a larger share, or set eval-iters: 0")


def _without_evaluation(config: NeoXConfig) -> Iterator[Problem]:
    if not config.training.eval_iters:
        yield Problem("eval_iters", "is 0, so nothing would be evaluated", "set eval-iters: 10")
    count = count_documents(config.data.data_path or "")
    if count is not None and not set(EVALUATED) & set(parts_with_documents(config.data.split, count)):
        what = f"leaves no document for validation and the test: {config.data.data_path} has {count:,}"
        yield _of_split(config, what, "give one of them a larger share")


def _empty(config: NeoXConfig, called: Mapping[str, str], remedy: str) -> Iterator[Problem]:
    """Yield a problem for each of these parts that has a share of the split, but not a single document."""
    count = count_documents(config.data.data_path or "")
    for part in () if count is None else empty_parts(config.data.split, count):
        if part in called:
            what = f"leaves no document for {called[part]}: {config.data.data_path} has {count:,}"
            yield _of_split(config, what, remedy)


def _of_split(config: NeoXConfig, what: str, remedy: str) -> Problem:
    """Return a problem of `split`, whose default is as wrong as a given value."""
    place = place_of(config.sources, "split") or Place(DEFAULTS)
    return Problem("split", what, remedy, value=in_words(config.data.split), place=place)


def _usable_documents(config: NeoXConfig, parts: tuple[str, ...]) -> Iterator[Problem]:
    if is_retrieval(config):
        return
    for part in _parts(config, parts):
        # Other checks report missing and damaged files; the workers report what only neox-data reads.
        with suppress(OSError, ValueError):
            yield from _without_any(config, part)


class _Part(NamedTuple):
    """The documents of a dataset that are used for training, validation or the test."""

    parameter: str
    prefix: str
    documents: range
    has_labels: bool


def _parts(config: NeoXConfig, parts: tuple[str, ...]) -> Iterator[_Part]:
    data = config.data
    if data.data_path is not None:
        split = documents_by_part(data.split, count_documents(data.data_path) or 0)
        for part in parts:
            yield _Part("data_path", data.data_path, split.get(part, range(0)), has_labels=False)
    for part in parts:
        labels = getattr(data, f"{part}_label_data_paths")
        parameter = f"{part}_data_paths" if labels is None else f"{part}_label_data_paths"
        # Labels have the documents of their tokens, which neox-data checks.
        for prefix in getattr(data, parameter) or ():
            documents = range(count_documents(prefix) or 0)
            yield _Part(parameter, prefix, documents, has_labels=labels is not None)


def _without_any(config: NeoXConfig, part: _Part) -> Iterator[Problem]:
    """Yield the reasons why no document can be used; nothing if one can."""
    data, room = config.data, config.model.seq_length + tokens_behind_input(config)
    is_whole = data.pack_impl != "packed"
    longest = room if is_whole and not data.allow_chopped else None
    # Nothing predicts the first token of a whole document; GPT-NeoX's `unpacked` does not look at the last.
    looked_at = slice(1, room - (data.pack_impl == "unpacked")) if is_whole else slice(0, None)
    empty = too_long = masked = 0
    with open_documents(part.prefix) as opened:
        for number in part.documents:
            size = opened.size(number)
            if not size:
                empty += 1
            elif longest is not None and size > longest:
                too_long += 1
            elif part.has_labels and not opened.has_label(number, looked_at):
                masked += 1
            else:
                return
    inside = f" in its first {room:,} tokens, which are a sample" if is_whole else ""
    longer = "increase seq-length"
    rows = (
        (empty, "{} empty", "use other data"),
        (too_long, f"{{}} longer than a sample of {room:,} tokens", f"{longer} or set allow-chopped: true"),
        (
            masked,
            f"{{}} without a label that counts{inside}",
            (f"{longer}, shorten the documents, or " if is_whole else "")
            + "create the data again with labels",
        ),
    )
    found = [(what.format(f"{count:,}"), remedy) for count, what, remedy in rows if count]
    if found:
        yield Problem(
            part.parameter,
            f"has no document that can be used: {', '.join(what for what, _ in found)}",
            "; ".join(remedy for _, remedy in found),
            value=part.prefix,
        )
