"""Name the documents of a batch, for error messages."""

from neox_data.blend import SampleDataset
from neox_data.trace import passages

__all__ = ["documents_of"]

_NAMED = 12


def documents_of(dataset: SampleDataset | None, samples: range) -> str:
    """Name the documents of a range of training samples, at most twelve of each dataset.

    Args:
        dataset: the training dataset; None on a rank without data.
        samples: range of samples, in training order.
    """
    if dataset is None:
        return "documents unknown to this rank"
    found: dict[str, dict[int, None]] = {}
    for sample in samples:
        for passage in passages(dataset, sample):
            found.setdefault(str(passage.indexed.prefix), {})[passage.document] = None
    return "; ".join(f"{prefix}: {_listed(list(documents))}" for prefix, documents in found.items())


def _listed(documents: list[int]) -> str:
    more = f" and {len(documents) - _NAMED:,} more" if len(documents) > _NAMED else ""
    named = ", ".join(map(str, documents[:_NAMED]))
    return f"document{'s' if len(documents) > 1 else ''} {named}{more}"
