"""Find datasets without a single document from which a model learns, before the workers read them.

neox-data decides which documents samples contain (`neox_data.samples.whole_documents`); a test compares the
two. Usually the first document can be used, so that little is read.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from neox_config import NeoXConfig
from neox_config.derive.objective import is_retrieval, tokens_behind_input
from neox_config.facts.splits import EVALUATED, PARTS, documents_by_part
from neox_config.problems import Problem
from neox_launcher.plan.dataset_files import count_documents, open_documents

__all__ = ["evaluated_documents", "trained_documents"]


def trained_documents(config: NeoXConfig) -> Iterator[Problem]:
    """Require a document to learn from in each dataset that a training reads."""
    return _usable_documents(config, PARTS if config.training.eval_iters else PARTS[:1])


def evaluated_documents(config: NeoXConfig) -> Iterator[Problem]:
    """Require a document to evaluate on in each dataset that an evaluation reads."""
    return _usable_documents(config, EVALUATED)


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
