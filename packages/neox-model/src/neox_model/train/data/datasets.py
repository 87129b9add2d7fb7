"""Build datasets from the data section: documents, number of samples, order. Without torch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from neox_config import NeoXConfig, Resolved
from neox_config.counted import counted
from neox_config.derive.curricula import NO_DIFFICULTIES
from neox_config.derive.objective import is_retrieval, tokens_behind_input
from neox_config.derive.tokenizer import tokenizer_files
from neox_config.facts.difficulty import DifficultySchedule
from neox_config.facts.vocabulary import pad_vocabulary
from neox_data.blend import SampleDataset, build_blend
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
from neox_model.train.data.curriculum import drawn_by_difficulty
from neox_model.train.data.position import START, Position

__all__ = [
    "ORDERS",
    "Datasets",
    "all_blocks",
    "blocks_of",
    "build_datasets",
    "check_passes",
    "check_tokenizers",
    "data_weights",
    "held_out_blocks",
    "num_samples",
]

Datasets = dict[str, SampleDataset]

PARTS = ("train", "valid", "test")


def num_samples(resolved: Resolved, position: Position = START) -> dict[str, int]:
    """Return the number of samples that the whole training reads from each part, before and after `position`.

    Source: GPT-NeoX, so that datasets are shuffled the same.
    """
    training, batch = resolved.config.training, resolved.derived.train_batch_size
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
        position: position in the data from which the training resumes.
        difficulties: the schedules of custom curricula, by the name of their block.

    Raises:
        DataError: files are missing, damaged or too small; or a curriculum that selects samples requires the
            batch sizes before `position`, which are unknown.
    """
    counts = num_samples(resolved, position)
    datasets = _before_curriculum(
        resolved, {part: count for part, count in counts.items() if count and part in parts}
    )
    if "train" in datasets:
        datasets["train"] = drawn_by_difficulty(
            resolved, datasets["train"], position, difficulties=difficulties
        )
    return datasets


def check_passes(resolved: Resolved, position: Position = START) -> None:
    """Check the number of iterations that was computed from `train_epochs` against the data of this host.

    Args:
        resolved: the configuration.
        position: position in the data from which the training resumes.

    Raises:
        DataError: the data differs from that of the host that computed the number of iterations, or the
            checkpoint was written with another batch size.
    """
    config, batch = resolved.config, resolved.derived.train_batch_size
    epochs, data, iterations = config.training.train_epochs, config.data, config.training.iterations
    if epochs is None:
        return
    prefix = data.data_path if data.data_path is not None else _paths(resolved, "train")[0]
    indexed = _open(resolved, prefix)
    whole = range(len(indexed))
    documents = whole if data.data_path is None else split_documents(data.split, len(indexed))["train"]
    tokens = int(indexed.sizes[documents.start : documents.stop].sum(dtype=np.int64))
    samples = samples_of_passes(
        epochs, tokens, seq_length=config.model.seq_length, is_lazy=data.sample_order == "lazy"
    )
    if samples // batch != iterations:
        raise DataError(
            f"{prefix} has {tokens:,} tokens for training on this host, which are "
            f"{counted(samples // batch, 'iteration')} (train-epochs: {epochs:,}), but the training was "
            f"started with {iterations:,}; make sure that all hosts read the same files"
        )
    if position.samples != position.iteration * batch:
        left = position.iteration + max(0, samples - position.samples) // batch
        raise DataError(
            f"the checkpoint of iteration {position.iteration:,} was written with another batch size than "
            f"{batch:,}, so train-epochs is not {iterations:,} iterations any more; replace train-epochs by "
            f"train-iters: {left}, which ends after the same samples, and set lr-decay-iters to keep the "
            "learning rate schedule"
        )


def _before_curriculum(resolved: Resolved, wanted: dict[str, int]) -> Datasets:
    if resolved.config.data.data_path is not None:
        return _split_one(resolved, resolved.config.data.data_path, wanted)
    return {part: _blend(resolved, part, count) for part, count in wanted.items() if _paths(resolved, part)}


def check_tokenizers(resolved: Resolved, tokenizer: Tokenizer) -> None:
    """Refuse data whose manifest names another tokenizer or a token outside the vocabulary.

    Raises:
        TokenizerError: it was made with another one, or contains such a token.
        IndexedDatasetError: a manifest is damaged.
    """
    vocab_size = pad_vocabulary(tokenizer.vocab_size, resolved.config.model.make_vocab_size_divisible_by)
    titles = [resolved.config.objective.titles_data_path] if is_retrieval(resolved.config) else []
    for prefix in dict.fromkeys([*_prefixes(resolved), *filter(None, titles)]):
        check_tokenizer(prefix, tokenizer)
        check_largest_token(prefix, vocab_size)


def _prefixes(resolved: Resolved) -> list[str]:
    """Return the prefixes of all datasets of the data, each once."""
    whole = resolved.config.data.data_path
    if whole is not None:
        return [whole]
    prefixes = [path for part in PARTS for path in (*_paths(resolved, part), *_labels(resolved, part))]
    return list(dict.fromkeys(prefixes))


def data_weights(resolved: Resolved, part: str, sources: Sequence[IndexedDataset]) -> list[float]:
    """Return the relative weights of a blend's datasets."""
    data = resolved.config.data
    if data.weight_by_num_documents:
        lengths = [len(source) for source in sources]
        return weights_by_num_documents(lengths, data.weighted_sampler_alpha).tolist()
    weights = getattr(data, f"{part}_data_weights")
    # The lazy blend divides by the sum once more. Its order depends on the last bit, so this division stays.
    checked = normalise_weights if data.sample_order == "lazy" else relative_weights
    return checked(weights, len(sources)).tolist()


def _split_one(resolved: Resolved, prefix: str, wanted: dict[str, int]) -> Datasets:
    indexed = _open(resolved, prefix)
    parts = split_documents(resolved.config.data.split, len(indexed))
    return {
        part: _dataset(resolved, _Source(indexed, None, prefix), part, parts[part], count)
        for part, count in wanted.items()
        if parts[part]
    }


def _blend(resolved: Resolved, part: str, count: int) -> SampleDataset:
    sources = _sources(resolved, part)
    counts_passes = part == "train" and resolved.config.training.train_epochs is not None

    def build(number: int, share: int) -> SampleDataset:
        source = sources[number]
        # GPT-NeoX's reserve of half a percent would mix the documents of a further pass into these.
        share = count if counts_passes else share
        return _dataset(resolved, source, f"{part}_{number}", range(len(source.tokens)), share)

    order = ORDERS[resolved.config.data.sample_order]
    weights = data_weights(resolved, part, [source.tokens for source in sources])
    return order.blend(build, weights, count)


class _Source(NamedTuple):
    """The files of one dataset: its tokens, the labels if it has any, and the prefix of the tokens."""

    tokens: IndexedDataset
    labels: IndexedDataset | None
    prefix: str


def _sources(resolved: Resolved, part: str) -> list[_Source]:
    prefixes = _paths(resolved, part)
    given: list[IndexedDataset | None] = [_open(resolved, label) for label in _labels(resolved, part)]
    labels = given or [None] * len(prefixes)
    return [
        _Source(_open(resolved, prefix), label, prefix)
        for prefix, label in zip(prefixes, labels, strict=True)
    ]


def _dataset(resolved: Resolved, source: _Source, name: str, documents: range, count: int) -> SampleDataset:
    config = resolved.config
    if is_retrieval(config):
        return _inverse_cloze(config, source, name, documents, count)
    is_whole = config.data.pack_impl != "packed"
    settings: dict[str, Any] = {
        "name": name,
        "documents": documents,
        "num_samples": count,
        # Samples have one token more, for which whole documents do not have room if no model reads it.
        "seq_length": config.model.seq_length - (1 - tokens_behind_input(config) if is_whole else 0),
        "seed": config.training.seed,
        "prefix": source.prefix,
        "cache_dir": config.data.data_cache_dir,
    }
    if is_whole:
        return WholeDocumentDataset(
            source.tokens,
            labels=source.labels,
            pack_impl=config.data.pack_impl,
            allow_chopped=config.data.allow_chopped,
            **{**settings, "documents": np.arange(documents.start, documents.stop)},
        )
    build = partial(ORDERS[config.data.sample_order].dataset, **settings)
    if source.labels is None:
        return build(source.tokens)
    return LabelledDataset(build, source.tokens, source.labels)


def _inverse_cloze(
    config: NeoXConfig, source: _Source, name: str, documents: range, count: int
) -> InverseClozeDataset:
    return InverseClozeDataset(
        blocks_of(config, source.tokens, documents),
        name=name,
        num_samples=count,
        seed=config.training.seed,
        query_in_block=config.objective.query_in_block_prob,
    )


def blocks_of(config: NeoXConfig, tokens: IndexedDataset, documents: range) -> Blocks:
    """Return the blocks of some documents of a dataset, of the objective ict."""
    section, tokenizer = config.objective, config.tokenizer
    titles = section.titles_data_path
    return Blocks(
        indexed=tokens,
        titles=None if titles is None else open_indexed(titles, config.data.data_impl),
        documents=documents,
        seq_length=config.model.seq_length,
        ends=SentenceEnds(build_tokenizer(tokenizer.tokenizer_type, **tokenizer_files(tokenizer))),
        has_single=section.use_one_sent_docs,
    )


def all_blocks(resolved: Resolved) -> dict[str, Blocks]:
    """Return the blocks of all documents of the data, by the prefix of their dataset.

    Raises:
        DataError: files are missing or damaged, or a dataset has no block.
    """
    opened = {prefix: _open(resolved, prefix) for prefix in _prefixes(resolved)}
    return {
        prefix: blocks_of(resolved.config, tokens, range(len(tokens))) for prefix, tokens in opened.items()
    }


def held_out_blocks(resolved: Resolved) -> tuple[str, dict[str, Blocks]]:
    """Return the blocks of the test documents, or of those for validation if there are none.

    Returns:
        The name of the part, and the blocks by the prefix of their dataset.

    Raises:
        DataError: there are no such documents, or they have no block.
    """
    for part in ("test", "valid"):
        documents = _documents_of(resolved, part)
        if any(documents.values()):
            return part, {
                prefix: blocks_of(resolved.config, _open(resolved, prefix), each)
                for prefix, each in documents.items()
            }
    if resolved.config.data.data_path is None:
        raise DataError("there is no document for the test or validation; set valid-data-paths")
    raise DataError("split leaves no document for the test or validation; give one of them a share")


def _documents_of(resolved: Resolved, part: str) -> dict[str, range]:
    data = resolved.config.data
    prefixes = _paths(resolved, part) if data.data_path is None else (data.data_path,)
    counts = {prefix: len(_open(resolved, prefix)) for prefix in prefixes}
    if data.data_path is None:
        return {prefix: range(count) for prefix, count in counts.items()}
    return {prefix: split_documents(data.split, count)[part] for prefix, count in counts.items()}


def _gpt_neox(indexed: IndexedDataset, *, documents: range, **settings: Any) -> GPTDataset:
    return GPTDataset(indexed, documents=np.arange(documents.start, documents.stop), **settings)


def _lazy(indexed: IndexedDataset, *, prefix: str, cache_dir: str | None, **settings: Any) -> LazyGPTDataset:
    return LazyGPTDataset(indexed, **settings)


class _Order(NamedTuple):
    dataset: Callable[..., GPTDataset | LazyGPTDataset]
    blend: Callable[[Callable[[int, int], SampleDataset], list[float], int], SampleDataset]


ORDERS = {"gpt_neox": _Order(_gpt_neox, build_blend), "lazy": _Order(_lazy, LazyBlendedDataset)}


def _open(resolved: Resolved, prefix: str) -> IndexedDataset:
    data = resolved.config.data
    indexed = open_indexed(prefix, data.data_impl, warmup=data.mmap_warmup)
    # A damaged offset can be a valid place in the .bin: only the hash shows it.
    verify_manifest(prefix, (".idx",))
    return indexed


def _paths(resolved: Resolved, part: str) -> Sequence[str]:
    return getattr(resolved.config.data, f"{part}_data_paths") or ()


def _labels(resolved: Resolved, part: str) -> Sequence[str]:
    return getattr(resolved.config.data, f"{part}_label_data_paths") or ()
