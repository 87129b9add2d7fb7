"""The corpora, their mixture, and how samples are cut from documents."""

from typing import Literal

from neox_launcher.config.parameter import Section, param

__all__ = ["DataSection"]

_PREFIXES = (
    "Prefixes (without .bin and .idx) of the {} data; goes with the other two lists and without data-path."
)
_GIVEN = "weight_by_num_documents is false"
_WEIGHTS = "Share of each of the {} data; any scale."


class DataSection(Section, resume="training"):
    """Indexed datasets by prefix: PREFIX.bin and PREFIX.idx."""

    data_path: str | None = param(
        None,
        origin="Meg",
        none_means="the three lists name the data",
        doc="Prefix (without .bin and .idx) of one dataset, divided by `split`.",
    )
    train_data_paths: tuple[str, ...] | None = param(
        None, origin="NeoX", none_means="data_path is used", doc=_PREFIXES.format("training")
    )
    valid_data_paths: tuple[str, ...] | None = param(
        None, origin="NeoX", none_means="data_path is used", doc=_PREFIXES.format("validation")
    )
    test_data_paths: tuple[str, ...] | None = param(
        None, origin="NeoX", none_means="data_path is used", doc=_PREFIXES.format("test")
    )
    train_data_weights: tuple[float, ...] | None = param(
        None, origin="NeoX", none_means="equal shares", used_when=_GIVEN, doc=_WEIGHTS.format("training")
    )
    valid_data_weights: tuple[float, ...] | None = param(
        None, origin="NeoX", none_means="equal shares", used_when=_GIVEN, doc=_WEIGHTS.format("validation")
    )
    test_data_weights: tuple[float, ...] | None = param(
        None, origin="NeoX", none_means="equal shares", used_when=_GIVEN, doc=_WEIGHTS.format("test")
    )
    weight_by_num_documents: bool = param(
        False, origin="NeoX", doc="Shares follow the number of documents; given weights are not used then."
    )
    weighted_sampler_alpha: float = param(
        0.3,
        origin="NeoX",
        ge=0,
        used_when="weight_by_num_documents is true",
        source="arXiv:1911.02116",
        doc="Exponent of the number of documents: 1 follows the sizes, 0 gives equal shares.",
    )
    data_impl: Literal["infer", "mmap", "cached", "lazy"] = param(
        "infer", origin="Meg", resume="free", doc="How datasets are read; infer looks at the index file."
    )
    mmap_warmup: bool = param(
        False,
        origin="Meg",
        resume="free",
        used_when="data_impl is mmap or infer",
        doc="Read the files once before training.",
    )
    split: str = param(
        "969, 30, 1",
        origin="Meg",
        used_when="data_path is set",
        free_choice="up to three numbers, as in 969,30,1",
        pattern=r"^\s*\d+\.?\d*\s*([,/]\s*\d+\.?\d*\s*){0,2}$",
        doc="Shares of training, validation and test documents; any scale, a missing one is 0.",
    )
    sample_order: Literal["gpt_neox", "lazy"] = param(
        "gpt_neox",
        origin="ours",
        doc="How samples are shuffled: gpt_neox repeats GPT-NeoX's order, kept in index files; lazy computes "
        "where each sample lies, without files or start-up, at any number of samples.",
    )
    data_cache_dir: str | None = param(
        None,
        origin="ours",
        resume="free",
        none_means="neox-data in $XDG_CACHE_HOME or ~/.cache",
        used_when="sample_order is gpt_neox",
        doc="Folder for index files where the data's own folder cannot be written; yours alone (chmod 700).",
    )
    num_workers: int = param(
        2, origin="Meg", resume="free", ge=0, doc="Threads that fetch samples ahead; 0 fetches when asked."
    )
    short_seq_prob: float = param(
        0.1, origin="Meg", resume="free", ge=0, le=1, doc="Not used: it belongs to BERT's samples."
    )
    reset_position_ids: bool = param(
        False,
        origin="Meg",
        used_when="pos_emb is learned",
        doc="Positions start anew after each document's end.",
    )
    reset_attention_mask: bool = param(False, origin="Meg", doc="Tokens see nothing of earlier documents.")
    eod_mask_loss: bool = param(False, origin="Meg", doc="No loss where the input is a document's end.")
