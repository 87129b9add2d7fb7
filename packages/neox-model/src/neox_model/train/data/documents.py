"""What samples are read: name and count their documents, and digest them.

Digests detect a resumed run that reads samples in a different order.
"""

import hashlib

import numpy as np

from neox_data.blend import BlendedDataset, SampleDataset
from neox_data.curriculum.dataset import CurriculumDataset
from neox_data.lazy_blend import LazyBlendedDataset
from neox_data.trace import passages

__all__ = ["digest_of_samples", "documents_in", "documents_of"]

_COMPARED, _NAMED = 32, 12


def documents_in(dataset: SampleDataset) -> int | None:
    """Return the number of documents of a dataset or a blend, without those of other parts of the split.

    None if a dataset does not know it, as one that wraps another.
    """
    if isinstance(dataset, CurriculumDataset):
        (dataset,) = dataset.datasets
    sources = dataset.datasets if isinstance(dataset, BlendedDataset | LazyBlendedDataset) else [dataset]
    counts = [getattr(source, "num_documents", None) for source in sources]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def digest_of_samples(dataset: SampleDataset, count: int) -> str:
    """Digest the tokens of evenly spaced samples among the first `count`."""
    last = max(0, min(count, len(dataset)) - 1)
    digest = hashlib.sha256()
    for item in sorted({last * step // _COMPARED for step in range(_COMPARED + 1)}):
        digest.update(np.ascontiguousarray(dataset[item], dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


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
    texts = []
    for prefix, documents in found.items():
        more = f" and {len(documents) - _NAMED:,} more" if len(documents) > _NAMED else ""
        named = ", ".join(map(str, list(documents)[:_NAMED]))
        texts.append(f"{prefix}: document{'s' if len(documents) > 1 else ''} {named}{more}")
    return "; ".join(texts)
