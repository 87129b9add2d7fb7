"""Saving and loading of checkpoints."""

from typing import Literal

from neox_config.facts.hugging_face import HfFamily
from neox_config.facts.stores import MULTIPART_BYTES
from neox_config.schema.parameter import Section, block, param
from neox_config.schema.paths import PathText

__all__ = ["CheckpointOptions", "CheckpointSection", "HfFamily", "ParallelWrite"]


class ParallelWrite(Section):
    """Parallel writing of checkpoints."""

    pipeline_stage: bool = param(
        False, origin="DSC", doc="Not used: pipeline stages always write their layers in parallel."
    )


class CheckpointOptions(Section):
    """Options of DeepSpeed's own checkpoint format, which this project does not write."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = param(
        "Warn",
        origin="DSC",
        doc="Not used: checkpoints are named after the iteration, which is the same on all ranks.",
    )
    use_node_local_storage: bool = param(
        False,
        origin="DSC",
        doc="`save` and `load` are folders on the local disk of each host: ranks write their parts there, "
        "and a load copies what a host lacks from the others. All hosts that wrote a checkpoint must take "
        "part in loading it.",
    )
    load_universal: bool = param(
        False, origin="DSC", doc="Not used: every checkpoint loads under every parallel layout."
    )
    parallel_write: ParallelWrite = block(ParallelWrite, origin="DSC", doc="Parallel writing of checkpoints.")


class CheckpointSection(Section, resume="free"):
    """Where checkpoints are saved and loaded, how often, and what they contain."""

    save: PathText | None = param(
        None, origin="Meg", none_means="nothing is saved", doc="Directory to save checkpoints in."
    )
    load: PathText | None = param(
        None,
        origin="Meg",
        none_means="start from new weights",
        doc="Directory to load checkpoints from. Training resumes from the latest complete checkpoint, or "
        "starts from new weights if there is none. Or the directory of one checkpoint, such as "
        "checkpoints/global_step1000: that one is loaded, and training saves in `save` as always. Or the URL "
        "of a folder in an object store: the latest checkpoint is downloaded into store-cache and loaded "
        "from there.",
    )
    save_interval: int | None = param(
        None,
        origin="Meg",
        gt=0,
        none_means="not set; required with `save`, unless save_growth, save_interval_minutes or "
        "extra_save_iters is set",
        doc="Iterations between checkpoints.",
    )
    save_growth: float | None = param(
        None,
        origin="ours",
        ge=1.01,
        le=1_000_000_000,
        none_means="not set",
        doc="Save at iterations 1, g, g^2, g^3, ... rounded down, instead of every save-interval iterations; "
        "2 saves at 1, 2, 4, 8. Called checkpoint_factor with checkpoint_scale: log in GPT-NeoX.",
    )
    extra_save_iters: tuple[int, ...] | None = param(
        None,
        origin="NeoX",
        none_means="none",
        used_when="save is set",
        doc="Iterations after which to save in addition, in any order. 0 saves the state before the first "
        "iteration, except in a run that resumes from that checkpoint in the same folder. "
        "keep-last-n-checkpoints counts and deletes these too.",
    )
    save_interval_minutes: float | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="not set",
        doc="Save as well when this many minutes have passed since the last save, or since the start, by the "
        "clock of rank 0. The time is checked after each iteration; the save follows one iteration later.",
    )
    async_save: bool = param(
        False,
        origin="ours",
        used_when="save is set",
        doc="Write scheduled checkpoints while the run continues: each rank copies its part to host "
        "memory, from which another process writes it at the lowest priority. The run waits only for "
        "the copy, and for the previous save. Requires Linux, and host memory for one copy of the weights "
        "and optimizer states. The save at the end of a run or after a request to stop is synchronous. "
        "A writer without progress for hang-timeout has failed.",
    )
    keep_last_n_checkpoints: int | None = param(
        None,
        origin="NeoX",
        gt=0,
        none_means="keep all",
        doc="Number of latest checkpoints to keep; older ones are deleted.",
    )
    hf_export: PathText | None = param(
        None,
        origin="ours",
        none_means="no export",
        used_when="save is set",
        doc="Folder to create at the end of a run that reached train-iters: its last checkpoint as a "
        "model of Hugging Face's transformers, as by neox-convert to-hf. A model or a tokenizer that "
        "transformers does not have is refused at the start. --hf-export-at-end of neox-launch.",
    )
    hf_family: HfFamily | None = param(
        None,
        origin="ours",
        none_means="the first class that computes the model",
        doc="Class of transformers that neox-convert to-hf and hf_export write, by its model_type. "
        "neox-convert from-hf sets the one that it read; --family of to-hf overrides it.",
    )
    checkpoint_store: str | None = param(
        None,
        origin="ours",
        none_means="checkpoints are not uploaded",
        used_when="save is set",
        doc="URL of a folder in an object store, to which each saved checkpoint is uploaded in the "
        "background: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or another URL that fsspec reads and writes. "
        "Nothing is deleted there. Called s3_path in GPT-NeoX.",
    )
    store_chunk_size: int = param(
        104_857_600,
        origin="ours",
        ge=MULTIPART_BYTES,
        used_when="checkpoint_store is set",
        doc="Bytes of each part of an upload; the uploading process holds one part in memory. Called "
        "s3_chunk_size in GPT-NeoX.",
    )
    store_cache: PathText | None = param(
        None,
        origin="ours",
        none_means="neox-checkpoints in $XDG_CACHE_HOME or ~/.cache",
        used_when="load or lora_base is set",
        doc="Directory for checkpoints that are downloaded because `load` or `lora_base` is a URL; each host "
        "downloads there what it does not find. Downloads are kept; delete them when nothing loads from "
        "them.",
    )
    no_save_optim: bool = param(False, origin="Meg", doc="Do not save optimizer states.")
    no_save_rng: bool = param(False, origin="Meg", doc="Do not save random number generator states.")
    no_load_optim: bool = param(False, origin="Meg", doc="Do not load optimizer states.")
    no_load_rng: bool = param(False, origin="Meg", doc="Do not load random number generator states.")
    finetune: bool = param(
        False,
        origin="Meg",
        doc="Load only the weights, without optimizer and random number generator states, and start at "
        "iteration 0. The model may differ from that of the checkpoint as long as its weights have the same "
        "names and shapes.",
    )
    load_ema: bool = param(
        False,
        origin="ours",
        used_when="load is set",
        doc="Load the averages of the weights (ema-decay) in place of the weights: in neox-launch generate, "
        "evaluate and serve, and in a training with finetune: true. A training that resumes loads both.",
    )
    checkpoint_validation_with_forward_pass: bool = param(
        False,
        origin="NeoX",
        doc="Save the loss of a forward pass on the first batch of the training data with each checkpoint, "
        "and compare it after loading (relative tolerance 1e-5, or 2e-3 if either is in 16-bit precision). "
        "A difference ends the run. Not compared if the batch changes. Costs one forward pass per save.",
    )
    checkpoint: CheckpointOptions = block(
        CheckpointOptions, origin="DSC", doc="Options of DeepSpeed's own checkpoint format."
    )
