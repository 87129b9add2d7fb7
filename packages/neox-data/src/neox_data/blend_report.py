"""Report what a blend will read from each source, before a run starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from neox_data.blend import BlendedDataset, SampleDataset
from neox_data.curriculum.dataset import CurriculumDataset
from neox_data.inverse_cloze import InverseClozeDataset
from neox_data.lazy_blend import LazyBlendedDataset
from neox_data.samples.build_index import num_samples_in
from neox_data.trace import leaf_dataset
from neox_data.whole_dataset import WholeDocumentDataset

__all__ = ["SourceShare", "report_datasets", "share_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """One source of a blend.

    Attributes:
        prefix: the dataset.
        documents: number of its documents.
        tokens: number of its tokens.
        weight: requested share, from 0 to 1.
        samples: samples that the blend reads from it.
        share: actual share of the blend.
        epochs: average number of times that its tokens are read.
        built_epochs: passes over its documents for which its samples are built.
    """

    prefix: Path
    documents: int
    tokens: int
    weight: float
    samples: int
    share: float
    epochs: float
    built_epochs: int


def report_datasets(dataset: SampleDataset, num_samples: int) -> list[SourceShare]:
    """Return what the first `num_samples` items of a dataset or blend read from each source.

    For a curriculum, the samples that it draws from are counted.
    """
    if isinstance(dataset, CurriculumDataset):
        (dataset,) = dataset.datasets
    if isinstance(dataset, BlendedDataset | LazyBlendedDataset):
        sources, weights = dataset.datasets, dataset.weights.tolist()
        taken = dataset.taken(num_samples)
    else:
        sources, weights, taken = [dataset], [1.0], [num_samples]
    return [
        SourceShare(
            prefix=leaf.indexed.prefix,
            documents=leaf.num_documents,
            tokens=leaf.num_tokens,
            weight=weight,
            samples=samples,
            share=samples / num_samples,
            epochs=leaf.passes(samples)
            if isinstance(leaf, WholeDocumentDataset | InverseClozeDataset)
            else samples / max(num_samples_in(leaf.num_tokens, seq_length=leaf.seq_length), 1),
            built_epochs=leaf.epochs,
        )
        for leaf, weight, samples in zip(map(leaf_dataset, sources), weights, taken, strict=True)
    ]


def share_lines(sources: Sequence[SourceShare]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield (
        f"{'documents':>13} {'tokens':>18} {'weight':>8} {'samples':>13} {'share':>8} {'epochs':>9} "
        f"{'built':>6}  source"
    )
    for source in sources:
        yield (
            f"{source.documents:>13,} {source.tokens:>18,} {source.weight:>8.2%} {source.samples:>13,} "
            f"{source.share:>8.2%} {source.epochs:>9.3f} {source.built_epochs:>6,}  {source.prefix}"
        )
