"""Datasets, their mixture, and how samples are built from documents."""

from typing import Literal

from neox_config.schema.parameter import Section, param
from neox_config.schema.paths import PathText

__all__ = ["DataSection"]

_PREFIXES = "Prefixes (without .bin and .idx) of the {} datasets, in place of data-path."
_LABELS = (
    "Prefixes of the labels of the {} datasets, in their order: one label per token, not shifted. Labels "
    "below 0 are left out of the loss. preprocess_data --loss-mask writes them."
)
_GIVEN = "weight_by_num_documents is false"
_WEIGHTS = "Weights of the {} datasets; they need not sum to 1."


class DataSection(Section, resume="training"):
    """Indexed datasets, given by prefix: PREFIX.bin and PREFIX.idx."""

    data_path: PathText | None = param(
        None,
        origin="Meg",
        none_means="train_data_paths is used",
        doc="Prefix (without .bin and .idx) of one dataset, which is divided by `split`.",
    )
    train_data_paths: tuple[PathText, ...] | None = param(
        None, origin="NeoX", none_means="data_path is used", doc=_PREFIXES.format("training")
    )
    valid_data_paths: tuple[PathText, ...] | None = param(
        None,
        origin="NeoX",
        none_means="data_path is used; there is no validation with train-data-paths",
        doc=_PREFIXES.format("validation") + " Required with train-data-paths, unless eval-iters is 0.",
    )
    test_data_paths: tuple[PathText, ...] | None = param(
        None,
        origin="NeoX",
        none_means="data_path is used; there is no test with train-data-paths",
        doc=_PREFIXES.format("test"),
    )
    train_label_data_paths: tuple[PathText, ...] | None = param(
        None, origin="NeoX", none_means="labels are the next tokens", doc=_LABELS.format("training")
    )
    valid_label_data_paths: tuple[PathText, ...] | None = param(
        None, origin="NeoX", none_means="labels are the next tokens", doc=_LABELS.format("validation")
    )
    test_label_data_paths: tuple[PathText, ...] | None = param(
        None, origin="NeoX", none_means="labels are the next tokens", doc=_LABELS.format("test")
    )
    train_data_weights: tuple[float, ...] | None = param(
        None, origin="NeoX", none_means="equal weights", used_when=_GIVEN, doc=_WEIGHTS.format("training")
    )
    valid_data_weights: tuple[float, ...] | None = param(
        None, origin="NeoX", none_means="equal weights", used_when=_GIVEN, doc=_WEIGHTS.format("validation")
    )
    test_data_weights: tuple[float, ...] | None = param(
        None, origin="NeoX", none_means="equal weights", used_when=_GIVEN, doc=_WEIGHTS.format("test")
    )
    weight_by_num_documents: bool = param(
        False,
        origin="NeoX",
        doc="Weight datasets by their number of documents; the weight lists are not used then.",
    )
    weighted_sampler_alpha: float = param(
        0.3,
        origin="NeoX",
        ge=0,
        used_when="weight_by_num_documents is true",
        source="arXiv:1911.02116",
        doc="Exponent of the number of documents: 1 gives weights proportional to it, 0 equal weights.",
    )
    data_impl: Literal["infer", "mmap", "cached", "lazy"] = param(
        "infer",
        origin="Meg",
        resume="free",
        doc="Dataset implementation; infer detects it from the index file.",
    )
    mmap_warmup: bool = param(
        False,
        origin="Meg",
        resume="free",
        used_when="data_impl is mmap or infer",
        doc="Read the files once before training, to fill the page cache.",
    )
    split: str = param(
        "969, 30, 1",
        origin="Meg",
        used_when="data_path is set",
        free_choice="up to three numbers, as in 969,30,1",
        pattern=r"^\s*\d+\.?\d*\s*([,/]\s*\d+\.?\d*\s*){0,2}$",
        doc="Proportions of training, validation and test documents. They need not sum to 1. A missing one "
        "is 0, and a part without documents is not evaluated: 969 alone trains on all documents.",
    )
    sample_order: Literal["gpt_neox", "lazy"] = param(
        "gpt_neox",
        origin="ours",
        doc="How samples are shuffled. gpt_neox: in the same order as GPT-NeoX, stored in index files. lazy: "
        "the position of each sample is computed on demand, without index files or start-up time, for any "
        "number of samples.",
    )
    pack_impl: Literal["packed", "pack_until_overflow", "unpacked", "best_fit"] = param(
        "packed",
        origin="NeoX",
        doc="How documents become samples. packed: one after another, cut at the ends of samples. "
        "pack_until_overflow: whole, in a shuffled order, until the next does not fit; the rest is padding. "
        "unpacked: one document per sample, and padding. best_fit (ours): whole, each in the fullest sample "
        "with room, and little padding. Padding is left out of the loss.",
    )
    allow_chopped: bool = param(
        True,
        origin="NeoX",
        used_when="pack_impl is not packed",
        doc="Use the beginning of documents that are longer than a sample, seq_length + 1 tokens. false: "
        "leave these documents out.",
    )
    data_cache_dir: PathText | None = param(
        None,
        origin="ours",
        resume="free",
        none_means="neox-data in $XDG_CACHE_HOME or ~/.cache",
        used_when="sample_order is gpt_neox",
        doc="Directory for index files if the directory of the data is not writable. Only you may have "
        "access to it (chmod 700).",
    )
    num_workers: int = param(
        2,
        origin="Meg",
        resume="free",
        ge=0,
        le=1_024,
        doc="Threads that prefetch samples; 0 loads each batch when it is needed.",
    )
    reset_position_ids: bool = param(
        False,
        origin="Meg",
        used_when="pos_emb is learned",
        doc="Restart position ids after each end-of-document token.",
    )
    reset_attention_mask: bool = param(
        False, origin="Meg", doc="Mask attention to tokens of other documents."
    )
    eod_mask_loss: bool = param(
        False, origin="Meg", doc="Mask the loss where the input is an end-of-document token."
    )
