"""Build datasets from the data section: documents, number of samples, order. Without torch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from neox_config import Resolved
from neox_config.derive.tokenizer import tokenizer_files
from neox_config.extras.data_efficiency.curricula import (
    NO_DIFFICULTIES,
    difficulty_schedule,
    enabled_curriculum,
)
from neox_config.extras.data_efficiency.difficulty import DifficultySchedule
from neox_config.extras.data_efficiency.fields import DataEfficiencySection
from neox_config.pluralize import pluralize
from neox_config.schema.sections.data import DataSection
from neox_config.schema.sections.training import TrainingSection
from neox_config.spec.run import Batch
from neox_config.spec.update import DataSpec
from neox_data.batch_sizes import BatchSizes
from neox_data.blend import SampleDataset, build_blend
from neox_data.curriculum.dataset import CurriculumDataset, load_or_build_clusters
from neox_data.curriculum.metric_index import MetricIndex
from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import IndexedDataset, open_indexed
from neox_data.inverse_cloze import Blocks, InverseClozeDataset, SentenceEnds
from neox_data.labels import LabelledDataset
from neox_data.lazy_blend import LazyBlendedDataset
from neox_data.lazy_dataset import LazyGPTDataset
from neox_data.manifest import check_largest_token, check_tokenizer, verify_manifest
from neox_data.splits import split_documents
from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_data.weights import normalise_weights, relative_weights, weights_by_num_documents
from neox_data.whole_dataset import WholeDocumentDataset
from neox_launcher.plan.epochs import samples_of_passes
from neox_model.train.data.position import START, Position

__all__ = [
    "ORDERS",
    "Datasets",
    "all_blocks",
    "build_datasets",
    "check_passes",
    "check_tokenizers",
    "drawn_by_difficulty",
    "held_out_blocks",
    "num_samples",
]

Datasets = dict[str, SampleDataset]

PARTS = ("train", "valid", "test")


def num_samples(training: TrainingSection, batch: int, position: Position = START) -> dict[str, int]:
    """Return the number of samples that the whole run reads from each part, before and after `position`.

    Source: GPT-NeoX, so that datasets are shuffled the same.

    Args:
        training: its length and evaluations.
        batch: samples per update over all devices.
        position: position in the data from which the run resumes.
    """
    iterations = max(0, training.iterations - position.iteration)
    evaluations = training.iterations // training.eval_interval + 1
    evaluations = max(1, evaluations - position.iteration // training.eval_interval)
    evaluated = training.eval_iters * batch
    since = position.validation_samples
    if position.due_validation is not None:
        # The evaluation that is due reads batches of this size.
        since = max(since, position.due_validation + evaluated)
    return {
        "train": position.samples + iterations * batch,
        "valid": since + evaluations * evaluated if evaluated else 0,
        "test": evaluated,
    }


def build_datasets(
    resolved: Resolved,
    parts: Collection[str] = PARTS,
    *,
    position: Position = START,
    difficulties: Mapping[str, DifficultySchedule] = NO_DIFFICULTIES,
) -> Datasets:
    """Build the datasets of the parts that have documents and from which samples are read.

    Args:
        resolved: the configuration.
        parts: the parts to build.
        position: position in the data from which the run resumes.
        difficulties: the schedules of custom curricula, by the name of their block.

    Raises:
        DataError: files are missing, damaged or too small; or a curriculum that selects samples requires the
            batch sizes before `position`, which are unknown.
    """
    training, data, batch = resolved.config.training, resolved.data, resolved.run.batch.whole
    counts = num_samples(training, batch, position)
    wanted = {part: count for part, count in counts.items() if count and part in parts}
    make = partial(_dataset, data)
    if data.files.data_path is not None:
        prefix = data.files.data_path
        indexed = _open(data.files, prefix)
        documents = split_documents(data.files.split, len(indexed))
        datasets = {
            part: make(_Source(indexed, None, prefix), part, documents[part], count)
            for part, count in wanted.items()
            if documents[part]
        }
    else:
        passes = {"train"} if training.train_epochs is not None else ()
        datasets = {
            part: _blend(data.files, part, count, make, counts_passes=part in passes)
            for part, count in wanted.items()
            if _paths(data.files, part)
        }
    if "train" in datasets:
        datasets["train"] = drawn_by_difficulty(
            data.efficiency,
            datasets["train"],
            position,
            iterations=training.iterations,
            batch=batch,
            difficulties=difficulties,
        )
    return datasets


def drawn_by_difficulty(
    section: DataEfficiencySection,
    dataset: SampleDataset,
    position: Position,
    *,
    iterations: int,
    batch: int,
    difficulties: Mapping[str, DifficultySchedule] = NO_DIFFICULTIES,
) -> SampleDataset:
    """Return the training samples in the order of the configured curriculum; unchanged without one.

    The difficulty increases at given iterations, so the samples drawn depend on the batch sizes of all
    earlier iterations. A checkpoint records these, so that a run resumes at the next sample with any
    batch size. A checkpoint of an earlier version records one batch size; if this does not match its number
    of samples, the samples drawn are unknown.

    Args:
        section: the curricula.
        dataset: the training samples.
        position: position in the data from which the run resumes.
        iterations: updates of the run.
        batch: samples per update over all devices.
        difficulties: the schedules of custom curricula, by the name of their block.

    Raises:
        DataError: an analysis is missing, damaged, of other data or of another order; or the batch sizes of
            the iterations before `position` are unknown.
    """
    curriculum = enabled_curriculum(section)
    if curriculum is None:
        return dataset
    # The analysis of each metric whose difficulty increases by a schedule.
    indices = {
        name: MetricIndex(
            samples=metric.index_to_sample_path,
            difficulties=metric.index_to_metric_path,
            kind=metric.difficulty_type,
            largest=metric.max_difficulty,
            schedule=difficulty_schedule(metric, difficulties.get(name)),
        )
        for name, metric in curriculum.curriculum_metrics.items()
        if metric.clustering_type == "schedule_based"
    }
    if not indices:
        return dataset
    if not position.knows_batch_sizes:
        raise DataError(
            f"the checkpoint's training read {pluralize(position.samples, 'sample')} in "
            f"{pluralize(position.iteration, 'iteration')} but does not record the batch sizes, so the "
            "remaining samples of the curriculum are "
            "unknown; set finetune: true to start the curriculum again, or "
            "data_efficiency.data_sampling.curriculum_learning.enabled: false to continue without it"
        )
    batch_sizes = BatchSizes(position.batch_sizes).then(position.iteration, batch)
    assert curriculum.data_cluster_path is not None, "needed when the block is enabled"
    clusters = load_or_build_clusters(
        indices, dataset, iterations=iterations, folder=curriculum.data_cluster_path
    )
    efficiency = section.data_efficiency
    return CurriculumDataset(
        dataset,
        clusters,
        batch_sizes=batch_sizes,
        num_samples=max(position.samples, batch_sizes.first_item(iterations)),
        num_epochs=efficiency.data_sampling.num_epochs,
        seed=efficiency.seed,
    )


def check_passes(
    training: TrainingSection, data: DataSection, batch: Batch, position: Position = START
) -> None:
    """Check the number of iterations that was computed from `train_epochs` against the data of this host.

    Args:
        training: its length.
        data: the datasets.
        batch: what an update reads of them.
        position: position in the data from which the run resumes.

    Raises:
        DataError: the data differs from that of the host that computed the number of iterations, or the
            checkpoint was written with another batch size.
    """
    epochs, iterations = training.train_epochs, training.iterations
    if epochs is None:
        return
    prefix = data.data_path if data.data_path is not None else _paths(data, "train")[0]
    indexed = _open(data, prefix)
    whole = range(len(indexed))
    documents = whole if data.data_path is None else split_documents(data.split, len(indexed))["train"]
    tokens = int(indexed.sizes[documents.start : documents.stop].sum(dtype=np.int64))
    samples = samples_of_passes(epochs, tokens, seq_length=batch.length, is_lazy=data.sample_order == "lazy")
    if samples // batch.whole != iterations:
        raise DataError(
            f"{prefix} has {tokens:,} tokens for training on this host, which are "
            f"{pluralize(samples // batch.whole, 'iteration')} (train-epochs: {epochs:,}), but the run "
            f"was started with {iterations:,}; make sure that all hosts read the same files"
        )
    if position.samples != position.iteration * batch.whole:
        left = position.iteration + max(0, samples - position.samples) // batch.whole
        raise DataError(
            f"the checkpoint of iteration {position.iteration:,} was written with another batch size than "
            f"{batch.whole:,}, so train-epochs is not {iterations:,} iterations any more; replace "
            f"train-epochs by train-iters: {left}, which ends after the same samples, and set lr-decay-iters "
            "to keep the learning rate schedule"
        )


def check_tokenizers(data: DataSpec, tokenizer: Tokenizer, *, entries: int) -> None:
    """Refuse data whose manifest names another tokenizer or a token outside the vocabulary.

    Args:
        data: the data.
        tokenizer: the model's tokenizer.
        entries: size of the model's vocabulary.

    Raises:
        TokenizerError: it was made with another one, or contains such a token.
        IndexedDatasetError: a manifest is damaged.
    """
    titles = [data.targets.titles_data_path] if data.objective == "ict" else []
    for prefix in dict.fromkeys([*_prefixes(data.files), *filter(None, titles)]):
        check_tokenizer(prefix, tokenizer)
        check_largest_token(prefix, entries)


def _prefixes(data: DataSection) -> list[str]:
    """Return the prefixes of all datasets of the data, each once."""
    if data.data_path is not None:
        return [data.data_path]
    prefixes = [path for part in PARTS for path in (*_paths(data, part), *_labels(data, part))]
    return list(dict.fromkeys(prefixes))


def _weights(data: DataSection, part: str, sources: Sequence[IndexedDataset]) -> list[float]:
    """Return the relative weights of a blend's datasets."""
    if data.weight_by_num_documents:
        lengths = [len(source) for source in sources]
        return weights_by_num_documents(lengths, data.weighted_sampler_alpha).tolist()
    weights = getattr(data, f"{part}_data_weights")
    # The lazy blend divides by the sum once more. Its order depends on the last bit, so this division stays.
    checked = normalise_weights if data.sample_order == "lazy" else relative_weights
    return checked(weights, len(sources)).tolist()


def _blend(data: DataSection, part: str, count: int, make: "_Make", *, counts_passes: bool) -> SampleDataset:
    prefixes = _paths(data, part)
    given: list[IndexedDataset | None] = [_open(data, label) for label in _labels(data, part)]
    labels = given or [None] * len(prefixes)
    sources = [
        _Source(_open(data, prefix), label, prefix) for prefix, label in zip(prefixes, labels, strict=True)
    ]

    def build(number: int, share: int) -> SampleDataset:
        source = sources[number]
        # GPT-NeoX's reserve of half a percent would mix the documents of a further pass into these.
        share = count if counts_passes else share
        return make(source, f"{part}_{number}", range(len(source.tokens)), share)

    weights = _weights(data, part, [source.tokens for source in sources])
    return ORDERS[data.sample_order].blend(build, weights, count)


class _Source(NamedTuple):
    """The files of one dataset: its tokens, the labels if it has any, and the prefix of the tokens."""

    tokens: IndexedDataset
    labels: IndexedDataset | None
    prefix: str


# (source, name, documents, number of samples) -> dataset
_Make = Callable[[_Source, str, range, int], SampleDataset]


def _dataset(data: DataSpec, source: _Source, name: str, documents: range, count: int) -> SampleDataset:
    files = data.files
    shared: dict[str, Any] = {"name": name, "num_samples": count, "seed": data.seed}
    if data.objective == "ict":
        blocks = _blocks(data, source.tokens, documents)
        return InverseClozeDataset(blocks, query_in_block=data.targets.query_in_block_prob, **shared)
    is_whole = files.pack_impl != "packed"
    # Samples have one token more, for which whole documents do not have room if no model reads it.
    shared["seq_length"] = data.length - (1 - data.behind_input if is_whole else 0)
    shared |= {"prefix": source.prefix, "cache_dir": files.data_cache_dir}
    if is_whole:
        return WholeDocumentDataset(
            source.tokens,
            labels=source.labels,
            pack_impl=files.pack_impl,
            allow_chopped=files.allow_chopped,
            documents=np.arange(documents.start, documents.stop),
            **shared,
        )
    build = partial(ORDERS[files.sample_order].dataset, documents=documents, **shared)
    if source.labels is None:
        return build(source.tokens)
    return LabelledDataset(build, source.tokens, source.labels)


def _blocks(data: DataSpec, tokens: IndexedDataset, documents: range) -> Blocks:
    """Return the blocks of some documents of a dataset, of the objective ict."""
    section, tokenizer = data.targets, data.tokenizer
    titles = section.titles_data_path
    return Blocks(
        indexed=tokens,
        titles=None if titles is None else open_indexed(titles, data.files.data_impl),
        documents=documents,
        seq_length=data.length,
        ends=SentenceEnds(build_tokenizer(tokenizer.tokenizer_type, **tokenizer_files(tokenizer))),
        has_single=section.use_one_sent_docs,
    )


def all_blocks(data: DataSpec) -> dict[str, Blocks]:
    """Return the blocks of all documents of the data, by the prefix of their dataset.

    Raises:
        DataError: files are missing or damaged, or a dataset has no block.
    """
    opened = {prefix: _open(data.files, prefix) for prefix in _prefixes(data.files)}
    return {prefix: _blocks(data, tokens, range(len(tokens))) for prefix, tokens in opened.items()}


def held_out_blocks(data: DataSpec) -> tuple[str, dict[str, Blocks]]:
    """Return the blocks of the test documents, or of those for validation if there are none.

    Returns:
        The name of the part, and the blocks by the prefix of their dataset.

    Raises:
        DataError: there are no such documents, or they have no block.
    """
    files = data.files
    for part in ("test", "valid"):
        if files.data_path is None:
            documents = {prefix: range(len(_open(files, prefix))) for prefix in _paths(files, part)}
        else:
            count = len(_open(files, files.data_path))
            documents = {files.data_path: split_documents(files.split, count)[part]}
        if any(documents.values()):
            return part, {
                prefix: _blocks(data, _open(files, prefix), each) for prefix, each in documents.items()
            }
    if files.data_path is None:
        raise DataError("there is no document for the test or validation; set valid-data-paths")
    raise DataError("split leaves no document for the test or validation; give one of them a share")


def _gpt_neox(indexed: IndexedDataset, *, documents: range, **settings: Any) -> GPTDataset:
    return GPTDataset(indexed, documents=np.arange(documents.start, documents.stop), **settings)


def _lazy(indexed: IndexedDataset, *, prefix: str, cache_dir: str | None, **settings: Any) -> LazyGPTDataset:
    return LazyGPTDataset(indexed, **settings)


class _Order(NamedTuple):
    dataset: Callable[..., GPTDataset | LazyGPTDataset]
    blend: Callable[[Callable[[int, int], SampleDataset], list[float], int], SampleDataset]


ORDERS = {"gpt_neox": _Order(_gpt_neox, build_blend), "lazy": _Order(_lazy, LazyBlendedDataset)}


def _open(data: DataSection, prefix: str) -> IndexedDataset:
    indexed = open_indexed(prefix, data.data_impl, warmup=data.mmap_warmup)
    # A damaged offset can be a valid place in the .bin: only the hash shows it.
    verify_manifest(prefix, (".idx",))
    return indexed


def _paths(data: DataSection, part: str) -> Sequence[str]:
    return getattr(data, f"{part}_data_paths") or ()


def _labels(data: DataSection, part: str) -> Sequence[str]:
    return getattr(data, f"{part}_label_data_paths") or ()
