"""Rules about batch sizes, checkpoints and the engine."""

from collections.abc import Iterator

from neox_config.extras.data_efficiency.curricula import enabled_sampling
from neox_config.facts.stores import has_credentials, is_url
from neox_config.problems import Problem, refusals
from neox_config.schema.config import NeoXConfig


def the_length_of_training_is_given_once(c: NeoXConfig) -> Iterator[Problem]:
    """Require train_iters or train_epochs, and refuse both."""
    iterations, epochs = c.training.train_iters, c.training.train_epochs
    if iterations is None and epochs is None:
        remedy = "add train_iters: 1000 (iterations of the run)"
        yield Problem("train_iters", "is missing, and so is train_epochs", remedy, value="")
    elif iterations is not None and epochs is not None:
        place = f" ({c.sources['train_iters']})" if "train_iters" in c.sources else ""
        remedy = "remove one of them, or set it to null"
        yield Problem("train_epochs", f"and train-iters cannot both be set{place}", remedy)


def a_pass_reads_one_dataset_in_order(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse train_epochs with several training datasets, and with a curriculum that chooses samples."""
    if c.training.train_epochs is None:
        return
    count = len(c.data.train_data_paths or ())
    if count > 1:
        yield Problem(
            "train_epochs",
            f"is not defined for {count} datasets in train-data-paths: they are mixed by weight, so each is "
            "read a different number of times",
            "set train-iters (neox-data blend-report shows the passes), or merge them with neox-data merge",
        )
    if c.data.pack_impl != "packed":
        yield Problem(
            "train_epochs",
            f"cannot be computed before documents are packed whole (pack-impl: {c.data.pack_impl})",
            "set train-iters (neox-data blend-report --config shows the passes), or pack-impl: packed",
        )
    if enabled_sampling(c.data_efficiency) is not None:
        yield Problem(
            "train_epochs",
            "is not defined with data_efficiency.data_sampling, which chooses samples by difficulty",
            "set train-iters",
        )


def micro_batch_or_batch_is_given(c: NeoXConfig) -> Iterator[Problem]:
    """Require a global batch size or a micro-batch size."""
    training = c.training
    sizes = (training.train_batch_size, training.train_micro_batch_size_per_gpu)
    if sizes == (None, None) and not c.elasticity.elasticity.enabled:
        yield Problem(
            "train_micro_batch_size_per_gpu",
            "is missing, and so is train_batch_size",
            "add train_micro_batch_size_per_gpu: 4 (samples per device and forward pass)",
            value="",
        )


def saving_needs_an_interval(c: NeoXConfig) -> Iterator[Problem]:
    """Require save_interval, save_growth, save_interval_minutes or extra_save_iters with `save`."""
    section = c.checkpoint
    when = (
        section.save_interval,
        section.save_growth,
        section.save_interval_minutes,
        section.extra_save_iters,
    )
    if section.save is not None and not any(when):
        yield Problem(
            "save", "requires save-interval", "add save-interval: 1000 (iterations between checkpoints)"
        )


def extra_saves_are_different_iterations(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse negative and repeated numbers in extra_save_iters."""
    given = c.checkpoint.extra_save_iters or ()
    if len(set(given)) < len(given) or min(given, default=0) < 0:
        yield Problem("extra_save_iters", "must be a list of different numbers from 0", "list each once")


def checkpoints_are_saved_locally_first(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a URL as `save`, and what requires `save` without it."""
    section = c.checkpoint
    return refusals(
        (
            section.save is not None and is_url(section.save),
            "save",
            "is a URL, but checkpoints are saved to a folder before an upload",
            "set save to a local folder, and checkpoint-store to this URL",
        ),
        (
            section.checkpoint_store is not None and section.save is None,
            "checkpoint_store",
            "requires save",
            "add save: FOLDER, in which checkpoints are saved before they are uploaded",
        ),
        (
            c.training.on_spike == "rollback" and section.save is None,
            "on_spike",
            "resumes from a checkpoint, but save is not set",
            "add save: FOLDER and save-interval: 1000",
        ),
    )


def local_checkpoints_are_used_alone(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse what requires that all hosts share `save`, or that one of them has whole checkpoints."""
    section, shared = c.checkpoint, "save to a folder that all hosts share"
    if not section.checkpoint.use_node_local_storage or section.save is None:
        return iter(())
    return refusals(
        (
            section.checkpoint_store is not None,
            "checkpoint_store",
            "uploads whole checkpoints, which no host has with checkpoint.use_node_local_storage",
            f"remove it, or set use_node_local_storage: false and {shared}",
        ),
        (
            c.training.on_spike == "rollback",
            "on_spike",
            "passes a list of samples on in save, which hosts do not share (use_node_local_storage)",
            f"set on-spike: skip, or set use_node_local_storage: false and {shared}",
        ),
        (
            section.hf_export is not None,
            "hf_export",
            "reads a whole checkpoint, which no host has with checkpoint.use_node_local_storage",
            shared,
        ),
    )


def exports_need_checkpoints(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse hf_export without checkpoints, or of adapters alone."""
    exports = c.checkpoint.hf_export is not None
    return refusals(
        (
            exports and c.checkpoint.save is None,
            "hf_export",
            "requires save",
            "add save: FOLDER; its last checkpoint is exported",
        ),
        (
            exports and c.adapters.lora_rank,
            "hf_export",
            "exports whole models, but checkpoints of this run contain adapters alone",
            "remove it; after the run, run neox-convert to-peft, or merge them and run to-hf",
        ),
    )


def stores_are_urls(c: NeoXConfig) -> Iterator[Problem]:
    """Require a URL as checkpoint_store, and no user name and password in it, in `load` or in `lora_base`."""
    store = c.checkpoint.checkpoint_store
    if store is not None and not is_url(store):
        yield Problem("checkpoint_store", "is not a URL", "write s3://BUCKET/FOLDER")
    urls = {"checkpoint_store": store, "load": c.checkpoint.load, "lora_base": c.adapters.lora_base}
    for name, url in urls.items():
        if url is not None and is_url(url) and has_credentials(url):
            what = "contains a user name, and every checkpoint would record it"
            remedy = "remove it, and set credentials in the variables or files that the store's package reads"
            yield Problem(name, what, remedy)


def autoresume_requires_checkpoints(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse adlr_autoresume unless the job that starts again continues from the state that was saved."""
    if not c.training.adlr_autoresume:
        return
    if c.checkpoint.save is None or c.checkpoint.load != c.checkpoint.save:
        yield Problem(
            "adlr_autoresume",
            "starts the job again, which resumes only if load and save are the same folder",
            "add save: FOLDER, load: FOLDER and save-interval: 1000",
        )
    section = c.checkpoint
    for name in ("finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng"):
        if getattr(section, name):
            yield Problem(
                "adlr_autoresume",
                f"starts the job again, which with {name.replace('_', '-')}: true would not continue where "
                "it ended",
                f"remove {name.replace('_', '-')} or adlr-autoresume",
            )


def autoresume_names_an_object(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a service that is not MODULE:OBJECT."""
    module, _, name = c.training.adlr_autoresume_service.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        yield Problem(
            "adlr_autoresume_service",
            "is not the name of an object in a module",
            "write it as MODULE:OBJECT, such as userlib.auto_resume:AutoResume",
        )
