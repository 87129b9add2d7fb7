"""Preflight checks: find what would make the workers of a plan fail, before any of them is started."""

import codecs
import glob
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.evaluation import evaluates_texts
from neox_config.derive.generation import generation_mode
from neox_config.derive.objective import WITHOUT_TEXTS, is_encoder, is_retrieval
from neox_config.derive.problems import placed, refusal
from neox_config.extras.data_efficiency.curricula import LEGACY, METRICS, custom_curricula, enabled_metrics
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.facts.splits import (
    EVALUATED,
    empty_parts,
    parts_with_documents,
    parts_without_share,
)
from neox_config.facts.stores import is_url, packages_for
from neox_config.facts.tokenizers import TOKENIZER_FACTS
from neox_config.files import why_not_readable
from neox_config.problems import DEFAULTS, Place, Problem, in_words, place_of
from neox_config.spec.recorded import contents_of, latest_checkpoint
from neox_launcher.plan.checkpoint_files import (
    base_for_adapters,
    check_loaded,
    checkpoint_to_load,
    checkpoint_to_resume_from,
    has_local_checkpoints,
    masked_model,
    required_checkpoint,
    teacher_to_load,
)
from neox_launcher.plan.dataset_files import (
    BLOCK_INDEX,
    check_indexed_files,
    count_documents,
    index_path,
    manifest_path,
)
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.resuming import PARTIAL_LOADS
from neox_launcher.plan.usable_documents import evaluated_documents, trained_documents
from neox_launcher.resources.host import Host
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.world import World, missing_devices

__all__ = [
    "check_files",
    "empty_parts_of",
    "has_evaluation",
    "preflight",
    "problem_of_split",
    "refuse_worker_by_hand",
]

Check = Callable[[NeoXConfig], Iterator[Problem]]


def preflight(plan: LaunchPlan) -> list[Problem]:
    """Return what would stop a plan: unsupported settings, missing devices, missing or invalid files."""
    config = plan.resolved.config
    problems = missing_devices(config, plan.world) + check_files(config, program=plan.program)
    if not any(problem.name == "load" for problem in problems):
        problems += check_loaded(plan.resolved, program=plan.program)
    if plan.max_restarts and has_local_checkpoints(config):
        problems += [placed(config, problem) for problem in _restarts_from_local_checkpoints(config)]
    return problems


def _restarts_from_local_checkpoints(config: NeoXConfig) -> Iterator[Problem]:
    """Require that a restart resumes although the launcher cannot see what was saved."""
    if config.checkpoint.load != config.checkpoint.save:
        what = "is not save, so a restart (--max-restarts) would not find what was saved on the hosts' disks"
        yield Problem("load", what, "set it to the same folder as save")
    for name in filter(config.value_of, PARTIAL_LOADS):
        what = "would leave states out of each restart (--max-restarts) with checkpoints on the hosts' disks"
        yield Problem(name, what, "remove it, or --max-restarts")


def refuse_worker_by_hand(config: NeoXConfig, *, program: str, has_functions: bool = False) -> None:
    """Run the preflight checks of a launch in a worker that was started without the launcher.

    Args:
        config: configuration that the worker read.
        program: train, generate or evaluate.
        has_functions: the program has the functions of custom curricula.

    Raises:
        ConfigError: a preflight check fails.
    """
    # A worker uses one device, whichever of the host's it is.
    world = World(hosts=(Host("localhost", (0,)),), gpus=count_gpus())
    problems = missing_devices(config, world) + check_files(config, program=program)
    if config.autotuning.autotuning.enabled:
        what = "needs neox-launch, which starts the trials"
        problems.append(Problem("autotuning.enabled", what, "use neox-launch, or set it to false"))
    if has_functions:
        problems = [problem for problem in problems if not problem.name.endswith(".schedule_type")]
    if problems:
        raise refusal(config, *problems)


def has_evaluation(config: NeoXConfig) -> bool:
    """Return whether `neox-launch evaluate` would evaluate something."""
    return evaluates_texts(config) or not any(_evaluations(config))


def problem_of_split(config: NeoXConfig, what: str, remedy: str) -> Problem:
    """Return a problem of `split`, whose default is as wrong as a given value."""
    place = place_of(config.sources, "split") or Place(DEFAULTS)
    return Problem("split", what, remedy, value=in_words(config.data.split), place=place)


def empty_parts_of(config: NeoXConfig) -> tuple[int, list[str]]:
    """Return the number of documents of data_path, and the parts of the split that are left without one."""
    data = config.data
    count = None if data.data_path is None else count_documents(data.data_path)
    return (0, []) if count is None else (count, empty_parts(data.split, count))


def check_files(config: NeoXConfig, *, program: str) -> list[Problem]:
    """Return the problems of the files that a program would use.

    Args:
        config: configuration that names the files.
        program: train, generate, serve, evaluate, index-blocks, find-blocks or doctor; prompts for the
            prompts of generate alone, model for all but these.
    """
    loaded: tuple[Check, ...] = (checkpoint_to_load, base_for_adapters, _vocabulary, _store_to_load_from)
    of_data: tuple[Check, ...] = (_datasets, _documents_for_training, _evaluations, evaluated_documents)
    retrieves: tuple[Check, ...] = (_finds_blocks, _datasets, _tokenizer, _towers)
    checks: dict[str, tuple[Check, ...]] = {
        "train": (
            _copied_folder,
            _datasets,
            _share_of_training,
            _documents_for_training,
            trained_documents,
            _curricula,
            _tokenizer,
            _folders_to_write,
            checkpoint_to_resume_from,
            base_for_adapters,
            teacher_to_load,
            masked_model,
            _vocabulary,
            _packages,
            _texts_and_tasks,
            _store_to_load_from,
        ),
        "evaluate": (
            *((_texts_and_tasks, _results) if evaluates_texts(config) else of_data),
            *(_tokenizer, *loaded),
        ),
        "generate": (_continues_texts, _tokenizer, _prompts, _generated_file, *loaded),
        "serve": (_continues_texts, _tokenizer, _server, *loaded),
        "index-blocks": (*retrieves, _index_to_write),
        "find-blocks": (*retrieves, _index_to_read),
        "prompts": (_prompts, _generated_file),
        "model": (_tokenizer, *loaded),
        # The doctor checks the files itself, on every host.
        "doctor": (),
    }
    problems: list[Problem] = []
    for check in checks[program]:
        problems.extend(check(config))
    return [placed(config, problem) for problem in problems]


def _copied_folder(config: NeoXConfig) -> Iterator[Problem]:
    """Refuse to train with the configuration of a copied folder that still saves to the original.

    The training would continue there, and may delete old checkpoints. A folder is a copy if the original has
    another configuration file of the same name, and both have the dataset or the folder of checkpoints.
    """
    place, save, data = config.sources.get("save"), config.checkpoint.save, config.data.data_path
    if place is None or place.file not in config.files or save is None:
        return
    file = Path(place.file).absolute()
    for original in Path(save).absolute().parents:
        other = original / file.name
        if file.is_relative_to(original) or not os.path.isfile(other) or other.samefile(file):
            continue
        named = [path for path in (Path(save), index_path(data or "")) if path.is_relative_to(original)]
        copied = filter(os.path.exists, (file.parent / path.relative_to(original) for path in named))
        # A link to the original's is no copy.
        if any(not copy.resolve().is_relative_to(original.resolve()) for copy in copied):
            yield Problem(
                "save",
                f"is in {original}, but {file.parent} looks like a copy of that folder: the training would "
                "write to the original",
                f"write {file.parent} in place of {original} in {file}, or use {other}",
                value=save,
            )
            return


def _datasets(config: NeoXConfig) -> Iterator[Problem]:
    data = config.data
    named = {"data_path": () if data.data_path is None else (data.data_path,)}
    named |= {
        f"{part}_{kind}": getattr(data, f"{part}_{kind}") or ()
        for kind in ("data_paths", "label_data_paths")
        for part in ("train", "valid", "test")
    }
    if not any(named.values()):
        yield Problem(
            "data_path",
            "is missing, and train-data-paths as well",
            "add data-path: PREFIX, where PREFIX.bin and PREFIX.idx are the files written by preprocess_data",
            value="",
        )
    titles = config.objective.titles_data_path
    if is_retrieval(config) and titles is not None:
        named["titles_data_path"] = (titles,)
    for name, prefixes in named.items():
        for prefix in dict.fromkeys(prefixes):
            yield from _dataset(config, name, prefix)


def _dataset(config: NeoXConfig, name: str, prefix: str) -> Iterator[Problem]:
    """Check the files of a dataset, and that it was made with a vocabulary of the tokenizer's size."""
    found = check_indexed_files(prefix)
    if found is not None:
        yield Problem(name, found, _dataset_remedy(prefix, found), value=prefix)
        return
    made, entries = _entries_of_maker(prefix), _entries_of_tokenizer(config)
    if made is not None and entries is not None and made != entries:
        yield Problem(
            name,
            f"was tokenized with a vocabulary of {made:,} entries; the configured tokenizer has {entries:,}",
            "configure the tokenizer that was used for the dataset, or preprocess it again with this one",
            value=prefix,
        )


def _dataset_remedy(prefix: str, found: str) -> str:
    if not found.endswith("does not exist"):
        return "check the permissions, or create the two files again with preprocess_data"
    if prefix.endswith((".bin", ".idx")):
        return f"write the prefix only: {prefix[:-4]}"
    folder, name = Path(prefix).parent, Path(prefix).name
    names = sorted({path.stem for path in folder.glob("*.idx")} - {name})
    # preprocess_data appends a key to the prefix that it is given.
    near = [each for each in names if each.startswith(f"{name}_")] or get_close_matches(name, names)
    if near:
        return "did you mean " + ", ".join(str(folder / each) for each in near[:3]) + "?"
    return f"{_check(prefix)}, or create the dataset with preprocess_data"


def _entries_of_maker(prefix: str) -> int | None:
    try:
        return int(json.loads(manifest_path(prefix).read_text(encoding="utf-8"))["tokenizer"]["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError):
        # Many datasets have no manifest. A damaged one is reported by the package that reads it.
        return None


def _documents_for_training(config: NeoXConfig) -> Iterator[Problem]:
    count, empty = empty_parts_of(config)
    if "train" in empty:
        what = f"leaves no document for training: {config.data.data_path} has {count:,}"
        yield problem_of_split(config, what, "give training a larger share")


def _share_of_training(config: NeoXConfig) -> Iterator[Problem]:
    if config.data.data_path is not None and "train" in parts_without_share(config.data.split):
        yield problem_of_split(config, "has no share for training", "write three numbers, as in 969,30,1")


def _evaluations(config: NeoXConfig) -> Iterator[Problem]:
    """Check that there is something to evaluate on; `notes_on_data` notes an evaluation that is skipped."""
    data = config.data
    if not config.training.eval_iters:
        yield Problem("eval_iters", "is 0, so nothing would be evaluated", "set eval-iters: 10")
    count = None if data.data_path is None else count_documents(data.data_path)
    if count is not None and not set(EVALUATED) & set(parts_with_documents(data.split, count)):
        what = f"leaves no document for validation and the test: {data.data_path} has {count:,}"
        yield problem_of_split(config, what, "give one of them a larger share")


def _continues_texts(config: NeoXConfig) -> Iterator[Problem]:
    """Refuse to generate texts with a model that does not predict the next token."""
    if is_encoder(config):
        what, _, remedy = WITHOUT_TEXTS.partition("; ")
        yield Problem("objective", what, remedy)


def _finds_blocks(config: NeoXConfig) -> Iterator[Problem]:
    """Refuse to embed blocks with a model that was not trained for retrieval."""
    if not is_retrieval(config):
        yield Problem("objective", "has no towers that embed blocks", "use a model that was trained with ict")
    if config.objective.block_data_path is None:
        yield Problem(
            "block_data_path", "is missing", "add block-data-path: FOLDER, that of the index", value=""
        )


def _towers(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint of the towers."""
    folder = config.objective.ict_load
    if folder is None:
        yield from checkpoint_to_load(config)
        yield from _store_to_load_from(config)
        return
    yield from _store_packages("ict_load", folder)
    if not has_local_checkpoints(config):
        yield from required_checkpoint("ict_load", folder)


def _index_to_write(config: NeoXConfig) -> Iterator[Problem]:
    folder = config.objective.block_data_path
    if folder is not None and os.path.lexists(folder) and not Path(folder, BLOCK_INDEX).is_file():
        yield Problem("block_data_path", "exists, and is not an index of blocks", "use a new folder")
    elif folder is not None:
        yield from _writable("block_data_path", Path(folder).absolute().parent)


def _index_to_read(config: NeoXConfig) -> Iterator[Problem]:
    folder = config.objective.block_data_path
    if folder is not None and not Path(folder, BLOCK_INDEX).is_file():
        yield Problem("block_data_path", "has no index of blocks", "make it with neox-launch index-blocks")


def _texts_and_tasks(config: NeoXConfig) -> Iterator[Problem]:
    """Check what an evaluation on tasks and texts reads."""
    section, source = config.generation, config.generation.eval_data
    if section.eval_tasks:
        yield from _missing("eval_tasks", "lm_eval", install="'neox-model[eval]'")
        if section.eval_include_path is not None and not os.path.isdir(section.eval_include_path):
            yield Problem("eval_include_path", "is not a folder", _check(section.eval_include_path))
    if source is None:
        return
    if os.path.lexists(index_path(source)):
        yield from _dataset(config, "eval_data", source)
    elif not os.path.lexists(source) and not glob.has_magic(source) and "," not in source:
        what = f"does not exist, and neither does the dataset {index_path(source)}"
        yield Problem("eval_data", what, _check(source))


def _results(config: NeoXConfig) -> Iterator[Problem]:
    """Check that the results of an evaluation on tasks and texts can be written."""
    yield from _writable("eval_results_prefix", Path(config.generation.eval_results_prefix or ".").parent)


def _curricula(config: NeoXConfig) -> Iterator[Problem]:
    """Check the analysis files by which a curriculum chooses samples."""
    for key in custom_curricula(config.data_efficiency):
        what = "is a Python function, which a configuration file cannot contain"
        remedy = "use fixed_linear, fixed_root or fixed_discrete, or train with neox_model.Trainer"
        yield Problem(f"{key if key == LEGACY else f'{METRICS}.{key}'}.schedule_type", what, remedy)
    for key, metric in enabled_metrics(config.data_efficiency).items():
        for path in ("index_to_sample_path", "index_to_metric_path"):
            found = check_indexed_files(getattr(metric, path))
            if found is not None and metric.clustering_type == "schedule_based":
                yield Problem(f"{METRICS}.{key}.{path}", found, "create the files with neox-data analyze")


def _check(path: str) -> str:
    """Return the remedy for a path that names nothing."""
    return "check the path" if os.path.isabs(path) else "check the path (relative to the working directory)"


def _tokenizer(config: NeoXConfig) -> Iterator[Problem]:
    """Require the files of the tokenizer; the package that reads them reports what is wrong with them."""
    kind = config.tokenizer.tokenizer_type
    for name, example in TOKENIZER_FACTS[kind].files.items():
        path, dashed = getattr(config.tokenizer, name), name.replace("_", "-")
        if path is None:
            what = f"is missing; {kind} requires it"
            yield Problem(name, what, f"add {dashed}: path/to/{example}", value="")
        elif (reason := why_not_readable(path)) is not None:
            train = ", or train one: neox-data train-tokenizer" if kind == "HFTokenizer" else ""
            yield Problem(name, reason, f"{_check(path)}{train}")


def _folders_to_write(config: NeoXConfig) -> Iterator[Problem]:
    logging, monitors, prefix = config.logging, config.monitors, config.generation.eval_results_prefix
    tensorboard, csv = monitors.tensorboard, monitors.csv_monitor
    for name, path in (
        ("save", None if has_local_checkpoints(config) else config.checkpoint.save),
        ("tensorboard_dir", logging.tensorboard_dir),
        ("log_dir", logging.log_dir),
        ("memory_profiling_path", logging.memory_profiling_path if logging.memory_profiling else None),
        ("tensorboard.output_path", tensorboard.output_path if tensorboard.enabled else None),
        ("csv_monitor.output_path", csv.output_path if csv.enabled else None),
    ):
        if path is not None:
            yield from _writable(name, Path(path))
    if prefix and evaluates_texts(config):
        yield from _results(config)
    yield from _store_packages("checkpoint_store", config.checkpoint.checkpoint_store)


def _writable(name: str, path: Path) -> Iterator[Problem]:
    """Require a folder in which files can be created, once it exists."""
    existing = path
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    try:
        # Permissions do not tell what a file system accepts: /proc, or a network's for its root user.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        what = f"cannot be written to: no file can be created in {existing} ({error.strerror})"
        yield Problem(name, what, "choose another folder, or change its permissions")


def _packages(config: NeoXConfig) -> Iterator[Problem]:
    """Check that the packages of the enabled monitors are installed."""
    logging, monitors = config.logging, config.monitors
    for name, is_on, package in (
        ("tensorboard_dir", logging.tensorboard_dir is not None, "tensorboard"),
        ("tensorboard.enabled", monitors.tensorboard.enabled, "tensorboard"),
        ("use_wandb", logging.use_wandb, "wandb"),
        ("wandb.enabled", monitors.wandb.enabled, "wandb"),
        ("comet.enabled", monitors.comet.enabled, "comet_ml"),
    ):
        if is_on:
            off = f"{name.replace('_', '-')}={'null' if name == 'tensorboard_dir' else 'false'}"
            yield from _missing(name, package, instead=f"--set {off}")


def _server(config: NeoXConfig) -> Iterator[Problem]:
    """Check the packages and the files of a server."""
    settings = config.serving.serve
    for package in ("starlette", "uvicorn"):
        yield from _missing("serve.port", package)
    key, template = settings.api_key_file, settings.chat_template
    if key is not None and (reason := why_not_readable(key)) is not None:
        yield Problem("serve.api_key_file", reason, _check(key))
    if template is not None and not Path(template).exists():
        yield Problem("serve.chat_template", "does not exist", _check(template))


def _store_to_load_from(config: NeoXConfig) -> Iterator[Problem]:
    yield from _store_packages("load", config.checkpoint.load)
    yield from _store_packages("lora_base", base_of_adapters(config))


def _store_packages(name: str, url: str | None) -> Iterator[Problem]:
    """Check that the packages that reach an object store are installed; folders require none."""
    for package in packages_for(url) if url is not None and is_url(url) else ():
        yield from _missing(name, package)


def _missing(name: str, package: str, *, install: str = "", instead: str = "") -> Iterator[Problem]:
    """Yield a problem if a package is not installed, but neox-model, which uses it, is installed here."""
    if importlib.util.find_spec("neox_model") is None or importlib.util.find_spec(package) is not None:
        return
    what, remedy = (
        f"needs the package {package}, which is not installed here",
        f"pip install {install or package}",
    )
    yield Problem(name, what, f"{remedy}, or {instead}" if instead else remedy)


def _generated_file(config: NeoXConfig) -> Iterator[Problem]:
    """Refuse to write the generated texts over a file that the generation reads."""
    output = config.generation.sample_output_file
    for name in ("sample_input_file", "vocab_file", "merge_file"):
        path = config.value_of(name)
        if output is None or path is None:
            continue
        # Results are first written to the second name.
        if os.path.realpath(path) in (os.path.realpath(output), os.path.realpath(f"{output}.partial")):
            what = f"is also the {name.replace('_', '-')}, which would be overwritten"
            yield Problem("sample_output_file", what, "choose another file")


def _prompts(config: NeoXConfig) -> Iterator[Problem]:
    """Check what the mode of generation uses; settings of other modes have no effect, which is logged."""
    mode, path = generation_mode(config), config.generation.sample_input_file
    if mode == "unconditional" and config.generation.num_samples == 0:
        yield Problem("num_samples", "is 0, so no text would be generated", "add num-samples: 10")
    if mode != "input-file":
        return
    if path is None:
        yield Problem("text_gen_type", "requires sample-input-file", "add sample-input-file: prompts.txt")
    elif (reason := why_not_readable(path)) is not None:
        yield Problem("sample_input_file", reason, _check(path))
    elif not Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).strip():
        yield Problem("sample_input_file", "contains no prompts", "write one prompt per line")


def _vocabulary(config: NeoXConfig) -> Iterator[Problem]:
    """Check that the tokenizer has at most as many entries as the token embedding of the checkpoint."""
    rows, entries = _rows_of_checkpoint(config), _entries_of_tokenizer(config)
    if rows is not None and entries is not None and entries > rows:
        yield Problem(
            "vocab_file" if config.tokenizer.vocab_file is not None else "tokenizer_type",
            f"has {entries:,} entries, but the model in {config.checkpoint.load} has {rows:,} tokens",
            "use the tokenizer that this model was trained with, or load from another folder",
        )


def _rows_of_checkpoint(config: NeoXConfig) -> int | None:
    """Return the rows of the token embedding in the latest checkpoint, or None if it cannot be read."""
    if config.checkpoint.load is None:
        return None
    try:
        latest = latest_checkpoint(Path(config.checkpoint.load))
        tensors = {} if latest is None else contents_of(latest).get("tensors", {})
        return int(tensors[TOKEN_EMBEDDING]["shape"][0])
    except (OSError, ValueError, LookupError, TypeError):
        # The workers report a damaged checkpoint: they can name an older one to use instead.
        return None


def _entries_of_tokenizer(config: NeoXConfig) -> int | None:
    """Return the vocabulary size of the tokenizer, or None if it cannot be read from its files."""
    section = config.tokenizer
    try:
        return TOKENIZER_FACTS[section.tokenizer_type].read_entries(section.vocab_file)
    except (OSError, ValueError):
        # The package that reads the file reports what is wrong with it.
        return None
