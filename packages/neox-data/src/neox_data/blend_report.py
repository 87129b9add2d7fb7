"""Report what a blend will read from each source, before a run starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from neox_data.blend import BlendedDataset, SampleDataset, blend_order
from neox_data.curriculum.dataset import CurriculumDataset
from neox_data.indexed.base import IndexedDataset
from neox_data.inverse_cloze import InverseClozeDataset
from neox_data.lazy_blend import LazyBlendedDataset
from neox_data.samples.build_index import num_epochs, num_samples_in
from neox_data.trace import leaf_dataset
from neox_data.weights import blend_shares, samples_per_dataset
from neox_data.whole_dataset import WholeDocumentDataset

__all__ = ["SourceShare", "report_blend", "report_datasets", "share_lines"]


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


def report_blend(
    datasets: Sequence[IndexedDataset], weights: Sequence[float] | None, *, num_samples: int, seq_length: int
) -> list[SourceShare]:
    """Return what a blend of `num_samples` reads from each dataset, counted in the order of training.

    Args:
        datasets: the datasets, with all their documents.
        weights: relative weights; None: equal weights.
        num_samples: samples of the whole run, at least 1.
        seq_length: tokens that a sample predicts.

    Raises:
        DataError: there is not one weight per dataset, or a dataset has no tokens.
    """
    built_shares, shares = blend_shares(weights, len(datasets))
    taken = blend_order(shares, num_samples).taken(num_samples).tolist()
    built = samples_per_dataset(num_samples, built_shares)
    rows = zip(datasets, shares.tolist(), taken, built, strict=True)
    return [
        SourceShare(
            prefix=dataset.prefix,
            documents=len(dataset),
            tokens=dataset.num_tokens,
            weight=weight,
            samples=samples,
            share=samples / num_samples,
            epochs=samples / max(num_samples_in(dataset.num_tokens, seq_length=seq_length), 1),
            built_epochs=num_epochs(
                dataset.num_tokens, num_samples=max(count, samples), seq_length=seq_length
            ),
        )
        for dataset, weight, samples, count in rows
    ]


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
