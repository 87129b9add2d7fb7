"""Preflight checks: find what would make the workers of a plan fail, before any of them is started."""

import codecs
import glob
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.counted import counted
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.curricula import LEGACY, METRICS, custom_curricula, enabled_metrics
from neox_config.derive.evaluation import evaluates_texts
from neox_config.derive.generation import generation_mode
from neox_config.derive.objective import WITHOUT_TEXTS, is_encoder, is_retrieval
from neox_config.errors import ConfigError
from neox_config.estimate.resolved import estimate_resolved
from neox_config.facts.checkpoints import (
    TOKEN_EMBEDDING,
)
from neox_config.facts.corpora import ENDINGS, is_corpus_file
from neox_config.facts.splits import (
    EVALUATED,
    empty_parts,
    parts_with_documents,
    parts_without_share,
)
from neox_config.facts.stores import is_url, packages_for
from neox_config.facts.tokenizers import TOKENIZER_FACTS, is_tokenizer_json, is_vocab_json
from neox_config.files import why_not_readable
from neox_config.problems import DEFAULTS, Place, Problem, config_error, in_words, place_of
from neox_config.schema.parameter import InvalidValue
from neox_config.spec.recorded import contents_of, latest_checkpoint
from neox_launcher.plan.checkpoint_files import (
    base_for_adapters,
    check_loaded,
    checkpoint_to_load,
    checkpoint_to_resume_from,
    has_local_checkpoints,
    load_remedy,
    masked_model,
    teacher_to_load,
    why_no_checkpoint,
)
from neox_launcher.plan.dataset_files import (
    BLOCK_INDEX,
    check_indexed_files,
    count_documents,
    index_path,
    manifest_path,
)
from neox_launcher.plan.moved import name_moved_folder, refuse_copied_folder, refuse_moved_checkpoints
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.resuming import PARTIAL_LOADS
from neox_launcher.plan.usable_documents import evaluated_documents, trained_documents
from neox_launcher.resources.host import Host
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.local_memory import usable_memory
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

# Endings of texts whose first bytes are checked, and how many.
_PLAIN_TEXTS = (".jsonl", ".json", ".txt", ".md", ".markdown")
_HEAD_BYTES = 1 << 16


def preflight(plan: LaunchPlan) -> list[Problem]:
    """Return what would stop a plan: unsupported settings, missing devices, missing or invalid files."""
    config = plan.resolved.config
    problems = _preflight(config, program=plan.program, world=plan.world)
    if not any(problem.name == "load" for problem in problems):
        problems += check_loaded(plan.resolved, program=plan.program)
    return [*problems, *_memory_without_gpus(plan), *_restarts_from_local_checkpoints(plan)]


def _memory_without_gpus(plan: LaunchPlan) -> Iterator[Problem]:
    """Refuse a training on CPUs that needs more memory than this host has, which would only swap.

    The workers on GPUs end by themselves when these are full.
    """
    if plan.program != "train" or plan.world.gpus != 0:
        return
    config, workers = plan.resolved.config, plan.world.size
    try:
        stages = estimate_resolved(plan.resolved, device="cpu")[0].memory
    except ConfigError:
        return  # The vocabulary cannot be counted here; the checks of files say why.
    needed = sum(stage.total + stage.host for stage in stages) * workers // len(stages)
    present = usable_memory()
    if needed <= present:
        return
    one_copy = workers // plan.resolved.run.layout.data
    can_be_fewer = one_copy < workers and needed * one_copy <= present * workers
    fewer = f", or start fewer workers: --set num-gpus={one_copy}" if can_be_fewer else ""
    problem = Problem(
        "hidden_size",
        f"is too large for this host: the training needs about {needed / 2**30:,.1f} GiB of memory for "
        f"{counted(workers, 'worker')}, and the host has {present / 2**30:,.1f} GiB",
        f"set a smaller hidden-size, num-layers or train-micro-batch-size-per-gpu{fewer} (neox-config "
        "estimate shows what needs the memory)",
    )
    yield problem.located(place_of(config.sources, "hidden_size"), in_words(config.model.hidden_size))


def _restarts_from_local_checkpoints(plan: LaunchPlan) -> Iterator[Problem]:
    """Require that a restart resumes although the launcher cannot see what was saved."""
    config = plan.resolved.config
    if not plan.max_restarts or not has_local_checkpoints(config):
        return
    section = config.checkpoint
    if section.load != section.save:
        what = "is not save, so a restart (--max-restarts) would not find what was saved on the hosts' disks"
        problem = Problem("load", what, "set it to the same folder as save", value=in_words(section.load))
        yield problem.located(place_of(config.sources, "load"), None)
    for name in PARTIAL_LOADS:
        if config.value_of(name):
            what = (
                "would leave states out of each restart (--max-restarts) with checkpoints on the hosts' disks"
            )
            problem = Problem(name, what, "remove it, or --max-restarts")
            yield problem.located(place_of(config.sources, name), in_words(True))


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
    problems = [*_preflight(config, program=program, world=world), *_tuned_by_the_launcher(config)]
    if has_functions:
        problems = [problem for problem in problems if not problem.name.endswith(".schedule_type")]
    if problems:
        raise config_error(problems, config.files)


def _tuned_by_the_launcher(config: NeoXConfig) -> list[Problem]:
    name = "autotuning.enabled"
    if not config.value_of(name):
        return []
    problem = Problem(
        name, "needs neox-launch, which starts the trials", "use neox-launch, or set it to false"
    )
    return [problem.located(place_of(config.sources, name), "true")]


def _preflight(config: NeoXConfig, *, program: str, world: World) -> list[Problem]:
    devices = missing_devices(config, world)
    return devices + check_files(config, program=program)


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
        config: configuration that names the files. Checks that read a value that was invalid are ended.
        program: train, generate, serve, evaluate, index-blocks, find-blocks or doctor; prompts for the
            prompts of generate alone, model for all but these.
    """
    loaded: tuple[Check, ...] = (checkpoint_to_load, base_for_adapters, _vocabulary, _store_to_load_from)
    of_data: tuple[Check, ...] = (_datasets, _documents_for_training, _evaluations, evaluated_documents)
    retrieves: tuple[Check, ...] = (_finds_blocks, _datasets, _tokenizer, _towers)
    checks: dict[str, tuple[Check, ...]] = {
        "train": (
            refuse_copied_folder,
            refuse_moved_checkpoints,
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
            _results_of_training,
            _store_to_upload_to,
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
        # In a configuration that was refused, a value may be invalid, which has been reported.
        with suppress(InvalidValue):
            problems.extend(check(config))
    with suppress(InvalidValue):
        problems = name_moved_folder(config, problems)
    return [
        problem.located(place_of(config.sources, problem.name), in_words(config.value_of(problem.name)))
        for problem in problems
    ]


def _datasets(config: NeoXConfig) -> Iterator[Problem]:
    data = config.data
    named = {"data_path": (data.data_path,) if data.data_path is not None else None}
    named |= {
        f"{part}_{kind}": getattr(data, f"{part}_{kind}")
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
        for prefix in dict.fromkeys(prefixes or ()):
            found = check_indexed_files(prefix)
            if found is not None:
                yield Problem(name, found, _dataset_remedy(prefix, found), value=prefix)
            else:
                yield from _made_with_another_tokenizer(config, name, prefix)


def _documents_for_training(config: NeoXConfig) -> Iterator[Problem]:
    count, empty = empty_parts_of(config)
    if "train" in empty:
        what = f"leaves no document for training: {config.data.data_path} has {count:,}"
        yield problem_of_split(config, what, "give training a larger share")


def _share_of_training(config: NeoXConfig) -> Iterator[Problem]:
    if config.data.data_path is not None and "train" in parts_without_share(config.data.split):
        yield problem_of_split(config, "has no share for training", "write three numbers, as in 969,30,1")


def _continues_texts(config: NeoXConfig) -> Iterator[Problem]:
    """Refuse to generate texts with a model that does not predict the next token."""
    if is_encoder(config):
        what, _, remedy = WITHOUT_TEXTS.partition("; ")
        yield Problem("objective", what, remedy)


def _finds_blocks(config: NeoXConfig) -> Iterator[Problem]:
    """Refuse to embed blocks with a model that was not trained for retrieval."""
    if not is_retrieval(config):
        yield Problem("objective", "has no towers that embed blocks", "use a model that was trained with ict")


def _towers(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint of the towers."""
    folder = config.objective.ict_load
    if folder is None:
        yield from checkpoint_to_load(config)
        yield from _store_to_load_from(config)
        return
    yield from _store_packages("ict_load", folder)
    reason = None if has_local_checkpoints(config) else why_no_checkpoint(folder)
    if reason is not None:
        yield Problem("ict_load", reason, load_remedy(folder, reason, name="ict-load"))


def _index_to_write(config: NeoXConfig) -> Iterator[Problem]:
    folder = config.objective.block_data_path
    if folder is None:
        yield Problem("block_data_path", "is missing", "add block-data-path: FOLDER, a new folder", value="")
    elif os.path.lexists(folder) and not Path(folder, BLOCK_INDEX).is_file():
        yield Problem("block_data_path", "exists, and is not an index of blocks", "use a new folder")
    elif (reason := _why_not_writable(Path(folder).absolute().parent)) is not None:
        yield Problem("block_data_path", f"cannot be written: {reason}", "choose another folder")


def _index_to_read(config: NeoXConfig) -> Iterator[Problem]:
    folder = config.objective.block_data_path
    if folder is None:
        yield Problem("block_data_path", "is missing", "add block-data-path: FOLDER of the index", value="")
    elif not Path(folder, BLOCK_INDEX).is_file():
        yield Problem("block_data_path", "has no index of blocks", "make it with neox-launch index-blocks")


def _evaluations(config: NeoXConfig) -> Iterator[Problem]:
    """Check that there is something to evaluate on; `notes_on_data` notes an evaluation that is skipped."""
    data = config.data
    if not config.training.eval_iters:
        yield Problem("eval_iters", "is 0, so nothing would be evaluated", "set eval-iters: 10")
    count = None if data.data_path is None else count_documents(data.data_path)
    if count is not None and not set(EVALUATED) & set(parts_with_documents(data.split, count)):
        what = f"leaves no document for validation and the test: {data.data_path} has {count:,}"
        yield problem_of_split(config, what, "give one of them a larger share")


def _texts_and_tasks(config: NeoXConfig) -> Iterator[Problem]:
    """Check what an evaluation on tasks and texts reads."""
    section = config.generation
    if section.eval_tasks:
        yield from _missing("eval_tasks", "lm_eval", install="'neox-model[eval]'")
        if section.eval_include_path is not None and not os.path.isdir(section.eval_include_path):
            yield Problem("eval_include_path", "is not a folder", _check(section.eval_include_path))
    if section.eval_data is not None:
        yield from _texts(config, section.eval_data)


def _results(config: NeoXConfig) -> Iterator[Problem]:
    """Check that the results of an evaluation on tasks and texts can be written."""
    folder = Path(config.generation.eval_results_prefix or ".").parent
    if evaluates_texts(config) and (reason := _why_not_writable(folder)) is not None:
        yield Problem("eval_results_prefix", f"cannot be written to: {reason}", "choose another folder")


def _results_of_training(config: NeoXConfig) -> Iterator[Problem]:
    """Check the same for a training, which writes them only with a prefix."""
    if config.generation.eval_results_prefix:
        yield from _results(config)


def _texts(config: NeoXConfig, source: str) -> Iterator[Problem]:
    if os.path.lexists(index_path(source)):
        found = check_indexed_files(source)
        if found is not None:
            yield Problem("eval_data", found, _dataset_remedy(source, found))
        else:
            yield from _made_with_another_tokenizer(config, "eval_data", source)
    elif not os.path.lexists(source) and not glob.has_magic(source) and "," not in source:
        what = f"does not exist, and neither does the dataset {index_path(source)}"
        yield Problem("eval_data", what, _check(source))
    else:
        for path in _text_files(source):
            if not is_corpus_file(path):
                remedy = f"use files that end in {ENDINGS}"
                yield Problem("eval_data", f"{path} has an unsupported ending", remedy)
            elif path.suffix.lower() in _PLAIN_TEXTS and (place := _where_not_utf_8(path)):
                remedy = "use other files, or convert it to UTF-8, for example with iconv"
                yield Problem("eval_data", f"{path} is not UTF-8 ({place})", remedy)


def _where_not_utf_8(path: Path) -> str:
    """Return the first byte at the beginning of a file that is not UTF-8; empty without one.

    The rest is left to the worker, and so is a file that cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            decoder.decode(file.read(_HEAD_BYTES))
    except UnicodeDecodeError as error:
        return f"byte 0x{error.object[error.start]:02x} at position {error.start + 1:,}"
    except OSError:
        pass
    return ""


def _text_files(source: str) -> list[Path]:
    """Return the files that a source of texts names itself; those in folders are chosen by their endings."""
    names = [source]
    if not os.path.lexists(source):
        names = [name.strip() for name in source.split(",")] if "," in source else glob.glob(source)
    return [path for path in map(Path, names) if os.path.isfile(path)]


def _made_with_another_tokenizer(config: NeoXConfig, name: str, prefix: str) -> Iterator[Problem]:
    """Compare the vocabulary size in the manifest of a dataset with that of the configured tokenizer."""
    made, entries = _entries_of_maker(manifest_path(prefix)), _entries_of_tokenizer(config)
    if made is not None and entries is not None and made != entries:
        yield Problem(
            name,
            f"was tokenized with a vocabulary of {made:,} entries; the configured tokenizer has {entries:,}",
            "configure the tokenizer that was used for the dataset, or preprocess it again with this one",
            value=prefix,
        )


def _entries_of_maker(manifest: Path) -> int | None:
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))["tokenizer"]["vocab_size"]
    except (OSError, ValueError, LookupError, TypeError):
        # Many datasets have no manifest. A damaged one is reported by the package that reads it.
        return None
    return entries if isinstance(entries, int) else None


def _curricula(config: NeoXConfig) -> Iterator[Problem]:
    """Check the analysis files by which a curriculum chooses samples."""
    for key in custom_curricula(config.data_efficiency):
        what = "is a Python function, which a configuration file cannot contain"
        remedy = "use fixed_linear, fixed_root or fixed_discrete, or train with neox_model.Trainer"
        yield Problem(f"{key if key == LEGACY else f'{METRICS}.{key}'}.schedule_type", what, remedy)
    for key, metric in enabled_metrics(config.data_efficiency).items():
        name = f"{METRICS}.{key}"
        for path in ("index_to_sample_path", "index_to_metric_path"):
            found = check_indexed_files(getattr(metric, path))
            if found is not None and metric.clustering_type == "schedule_based":
                yield Problem(f"{name}.{path}", found, "create the files with neox-data analyze")


def _dataset_remedy(prefix: str, found: str) -> str:
    if "cannot be read (" in found:
        return "check the path and the permissions of its folders"
    if not found.endswith("does not exist"):
        return "create the two files again with preprocess_data"
    if prefix.endswith((".bin", ".idx")):
        return f"write the prefix only: {prefix[:-4]}"
    if os.path.isfile(index_path(prefix)):
        return (
            "its index is there, so the dataset lacks only this file: copy it again, or create both files "
            "again with neox-data prepare or preprocess_data"
        )
    folder, name = Path(prefix).parent, Path(prefix).name
    names = sorted(path.stem for path in folder.glob("*.idx")) if os.path.isdir(folder) else []
    # preprocess_data appends a key to the prefix that it is given.
    near = [each for each in names if each.startswith(f"{name}_")] or get_close_matches(name, names) or names
    if near:
        return "did you mean " + ", ".join(str(folder / each) for each in near[:3]) + "?"
    return f"{_check(prefix)}, or create the dataset with preprocess_data"


def _check(path: str) -> str:
    """Return the remedy for a path that names nothing."""
    return "check the path" if os.path.isabs(path) else "check the path (relative to the working directory)"


def _tokenizer(config: NeoXConfig) -> Iterator[Problem]:
    section, kind = config.tokenizer, config.tokenizer.tokenizer_type
    if kind != "HFTokenizer" and section.vocab_file is not None and is_tokenizer_json(section.vocab_file):
        what = f"does not read vocab-file: {section.vocab_file}, which is a tokenizer.json"
        yield Problem("tokenizer_type", what, "set tokenizer-type: HFTokenizer, which requires no merge-file")
        return
    if kind == "HFTokenizer" and section.vocab_file is not None and is_vocab_json(section.vocab_file):
        what = f"does not read vocab-file: {section.vocab_file}, which is a vocab.json"
        remedy = "set tokenizer-type: GPT2BPETokenizer, and merge-file: path/to/merges.txt"
        yield Problem("tokenizer_type", what, remedy)
    if kind == "HFGPT2Tokenizer" and section.vocab_file is not None and Path(section.vocab_file).is_file():
        what = (
            f"reads a folder with a tokenizer.json, or a name of the hub, and {section.vocab_file} is a file"
        )
        remedy = "set tokenizer-type: GPT2BPETokenizer for vocab.json and merges.txt, or name the folder"
        yield Problem("tokenizer_type", what, remedy)
    for name, example in TOKENIZER_FACTS[kind].files.items():
        path, dashed = getattr(section, name), name.replace("_", "-")
        if path is None:
            yield Problem(
                name,
                f"is missing; {kind} requires it",
                f"add {dashed}: path/to/{example}",
                value="",
            )
        elif os.path.isfile(inside := os.path.join(path, example)):
            yield Problem(name, "is a folder", f"write {dashed}: {inside}")
        elif (reason := why_not_readable(path)) is not None:
            hf = "" if kind == "HFTokenizer" else " for tokenizer-type: HFTokenizer"
            train = f", or train one{hf}: neox-data train-tokenizer"
            yield Problem(name, reason, _check(path) + (train if name == "vocab_file" else ""))


def _folders_to_write(config: NeoXConfig) -> Iterator[Problem]:
    logging, monitors = config.logging, config.monitors
    for name, path in (
        ("save", None if has_local_checkpoints(config) else config.checkpoint.save),
        ("tensorboard_dir", logging.tensorboard_dir),
        ("log_dir", logging.log_dir),
        ("memory_profiling_path", logging.memory_profiling_path if logging.memory_profiling else None),
        (
            "tensorboard.output_path",
            monitors.tensorboard.output_path if monitors.tensorboard.enabled else None,
        ),
        (
            "csv_monitor.output_path",
            monitors.csv_monitor.output_path if monitors.csv_monitor.enabled else None,
        ),
    ):
        reason = None if path is None else _why_not_writable(Path(path))
        if reason is not None:
            yield Problem(
                name, f"cannot be written to: {reason}", "choose another folder, or change its permissions"
            )


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
    key = settings.api_key_file
    if key is not None and (reason := why_not_readable(key)) is not None:
        yield Problem("serve.api_key_file", reason, _check(key))
    template = settings.chat_template
    if template is not None and not Path(template).exists():
        yield Problem("serve.chat_template", "does not exist", _check(template))


def _store_to_upload_to(config: NeoXConfig) -> Iterator[Problem]:
    yield from _store_packages("checkpoint_store", config.checkpoint.checkpoint_store)


def _store_to_load_from(config: NeoXConfig) -> Iterator[Problem]:
    yield from _store_packages("load", config.checkpoint.load)
    yield from _store_packages("lora_base", base_of_adapters(config))


def _store_packages(name: str, url: str | None) -> Iterator[Problem]:
    """Check that the packages that reach an object store are installed; folders require none."""
    for package in packages_for(url) if url is not None and is_url(url) else ():
        yield from _missing(name, package)


def _missing(
    name: str, package: str, *, install: str | None = None, instead: str | None = None
) -> Iterator[Problem]:
    """Yield a problem if a package is not installed, but neox-model, which uses it, is installed here."""
    if importlib.util.find_spec("neox_model") is None or importlib.util.find_spec(package) is not None:
        return
    what = f"needs the package {package}, which is not installed here"
    remedy = f"pip install {install or package}"
    yield Problem(name, what, remedy if instead is None else f"{remedy}, or {instead}")


def _why_not_writable(path: Path) -> str | None:
    """Return why files cannot be created in a folder, which may not exist yet, or None if they can."""
    existing = path
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            return f"{existing} is a file"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"no write permission for {existing}"
    try:
        # Permissions do not tell what a file system accepts: /proc, or a network's for its root user.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return f"no file can be created in {existing} ({error.strerror})"
    return None


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
    mode = generation_mode(config)
    if mode == "unconditional" and config.generation.num_samples == 0:
        yield Problem("num_samples", "is 0, so no text would be generated", "add num-samples: 10")
    if mode == "input-file":
        yield from _input_file(config.generation.sample_input_file)


def _input_file(path: str | None) -> Iterator[Problem]:
    if path is None:
        yield Problem("text_gen_type", "requires sample-input-file", "add sample-input-file: prompts.txt")
    elif (reason := why_not_readable(path)) is not None:
        yield Problem("sample_input_file", reason, _check(path))
    elif not _has_text(Path(path)):
        yield Problem("sample_input_file", "contains no prompts", "write one prompt per line")


def _has_text(path: Path) -> bool:
    """Return False if a file contains only spaces; True if it cannot be read, which the workers report."""
    try:
        return bool(path.read_bytes().removeprefix(codecs.BOM_UTF8).strip())
    except OSError:
        return True


def _vocabulary(config: NeoXConfig) -> Iterator[Problem]:
    """Check that the tokenizer has at most as many entries as the token embedding of the checkpoint."""
    rows, entries = _rows_of_checkpoint(config), _entries_of_tokenizer(config)
    if rows is not None and entries is not None and entries > rows:
        name = "vocab_file" if config.tokenizer.vocab_file is not None else "tokenizer_type"
        yield Problem(
            name,
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
