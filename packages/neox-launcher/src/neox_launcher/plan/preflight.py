"""Preflight checks: find what would make the workers of a plan fail, before any of them is started."""

import codecs
import glob
import importlib.util
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from neox_config import NeoXConfig, Resolved
from neox_config.counted import counted
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.curricula import LEGACY, METRICS, custom_curricula, enabled_metrics
from neox_config.derive.evaluation import evaluates_texts
from neox_config.derive.generation import generation_mode
from neox_config.derive.objective import WITHOUT_TEXTS, is_encoder, is_retrieval
from neox_config.derive.recorded import contents_of, latest_checkpoint
from neox_config.derive.refusals import refusals_of
from neox_config.errors import ConfigError
from neox_config.estimate.resolved import estimate_resolved
from neox_config.facts.checkpoints import (
    LATEST,
    MANIFEST,
    TOKEN_EMBEDDING,
    checkpoint_name,
    complete_checkpoints,
    gpt_neox_checkpoint,
    is_checkpoint,
    is_gpt_neox,
    iteration_of,
)
from neox_config.facts.corpora import ENDINGS, is_corpus_file
from neox_config.facts.records import RECORD
from neox_config.facts.splits import (
    EVALUATED,
    empty_parts,
    parts_with_documents,
    parts_without_share,
    shares_left_out,
)
from neox_config.facts.stores import is_url, packages_for
from neox_config.facts.tokenizers import TOKENIZER_FACTS, is_tokenizer_json, is_vocab_json
from neox_config.files import why_not_readable
from neox_config.problems import COMMAND_LINE, DEFAULTS, Place, Problem, config_error, in_words, place_of
from neox_config.schema.parameter import InvalidValue
from neox_config.schema.paths import written_paths
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
from neox_launcher.plan.unused_labels import notes_on_labels
from neox_launcher.plan.usable_documents import evaluated_documents, trained_documents
from neox_launcher.resources.host import Host
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.local_memory import usable_memory
from neox_launcher.resources.world import World, missing_devices

__all__ = [
    "check_files",
    "check_loaded",
    "has_evaluation",
    "notes_on_data",
    "notes_on_load",
    "notes_on_record",
    "notes_on_save",
    "preflight",
    "refuse_worker_by_hand",
    "unused_by_hand",
]

Check = Callable[[NeoXConfig], Iterator[Problem]]

_NO_CHECKPOINT = "contains no checkpoint"
_WRONG_LATEST = "has a file latest that names "
_GPT_NEOX = ("is a checkpoint of GPT-NeoX", "contains a checkpoint of GPT-NeoX")
# Endings of texts whose first bytes are checked, and how many.
_PLAIN_TEXTS = (".jsonl", ".json", ".txt", ".md", ".markdown")
_HEAD_BYTES = 1 << 16
# Programs that load the whole model in `load`.
_LOADING = ("train", "generate", "serve", "evaluate")


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
    one_copy = workers // plan.resolved.derived.data_parallel_size
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


def check_loaded(resolved: Resolved, *, program: str) -> list[Problem]:
    """Return why a program cannot load the checkpoint that it would load, as far as its manifest shows.

    A checkpoint that cannot be read here, or is damaged, is left to the workers.
    """
    config = resolved.config
    load = config.checkpoint.load
    if load is None or is_url(load) or _has_local_checkpoints(config):
        return []
    if program not in _LOADING or (program == "train" and config.checkpoint.finetune):
        return []
    try:
        checkpoint = latest_checkpoint(Path(load))
    except OSError:
        return []
    if checkpoint is None:
        return []
    refusals = refusals_of(
        contents_of(checkpoint),
        resolved,
        trains=program == "train",
        iteration=iteration_of(checkpoint.name),
    )
    place = place_of(config.sources, "load")
    return [
        Problem("load", f"{checkpoint.name}: {refusal.what}", refusal.remedy, value=load, place=place)
        for refusal in refusals
    ]


def _restarts_from_local_checkpoints(plan: LaunchPlan) -> Iterator[Problem]:
    """Require that a restart resumes although the launcher cannot see what was saved."""
    config = plan.resolved.config
    if not plan.max_restarts or not _has_local_checkpoints(config):
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


def unused_by_hand(config: NeoXConfig) -> list[Problem]:
    """Return notes about given hosts and devices, which a worker without the launcher does not use."""
    found = []
    for name in ("hostfile", "include", "exclude", "num_nodes", "num_gpus"):
        value, place = config.value_of(name), config.sources.get(name)
        if place is not None and value not in (None, -1, 1):
            what = "has no effect: this is one worker, started without neox-launch"
            found.append(Problem(name, what, "use neox-launch", value=in_words(value), place=place))
    return found


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


def notes_on_data(config: NeoXConfig) -> list[Problem]:
    """Return notes about labels that are not read, and about evaluations for which no document is left."""
    count, empty = _empty_parts(config)
    words = {"valid": "validation", "test": "the test"}
    return [*notes_on_labels(config), *_notes_on_shares(config)] + [
        _of_split(
            config,
            f"leaves no document for {words[part]}, which is therefore skipped: {config.data.data_path} has "
            f"{count:,}",
            "give it a larger share, or set eval-iters: 0",
        )
        for part in empty
        if part in words and config.training.eval_iters
    ]


def _notes_on_shares(config: NeoXConfig) -> list[Problem]:
    """Return a note if the split has no share for validation, though it was requested or merely left out."""
    split = config.data.split
    without = parts_without_share(split)
    is_requested = not {"eval_iters", "eval_interval"}.isdisjoint(config.sources) or shares_left_out(split)
    if config.data.data_path is None or not config.training.eval_iters:
        return []
    if "valid" not in without or not is_requested:
        return []
    parts = "validation and the test, which are" if "test" in without else "validation, which is"
    what = f"has no share for {parts} therefore skipped"
    return [_of_split(config, what, "write three numbers, as in 969,30,1, or set eval-iters: 0")]


def notes_on_save(config: NeoXConfig) -> list[Problem]:
    """Return a note if `save` has checkpoints that the training does not continue, and would replace."""
    section = config.checkpoint
    if section.save is None or section.checkpoint.use_node_local_storage:
        return []
    save = Path(section.save)
    continues = section.load is not None and Path(section.load).resolve() == save.resolve()
    if continues and not section.finetune:
        return []
    try:
        saved = complete_checkpoints(save)
    except OSError:
        # The workers report a folder that cannot be read.
        return []
    if not saved:
        return []
    last, kept = saved[-1].name, section.keep_last_n_checkpoints
    deleted = f" until keep-last-n-checkpoints: {kept}, which counts them, deletes them" if kept else ""
    anew = " and finetune: false" if section.finetune else ""
    return [
        Problem(
            "save",
            f"has checkpoints, up to {last}, that this training does not continue\n"
            "its first save makes its own checkpoint the latest; old ones of the same iterations are "
            f"replaced, and the others stay{deleted}",
            f"to continue them, set load: {section.save}{anew}; to leave them as they are, use another "
            f"folder; to load an old one later, name it: load: {Path(section.save, last)}",
            value=section.save,
            place=place_of(config.sources, "save"),
        )
    ]


def has_evaluation(config: NeoXConfig) -> bool:
    """Return whether `neox-launch evaluate` would evaluate something."""
    return evaluates_texts(config) or not any(_evaluations(config))


def notes_on_load(config: NeoXConfig) -> list[Problem]:
    """Return a note if a program reads `load`, and there are checkpoints in another folder, `save`."""
    section, place = config.checkpoint, place_of(config.sources, "load")
    is_chosen = place is not None and place.file == COMMAND_LINE
    if section.save is None or section.load is None or is_url(section.load):
        return []
    if is_chosen or _has_local_checkpoints(config):
        return []
    save, load = Path(section.save), Path(section.load).resolve()
    if save.resolve() in (load, load.parent):
        return []
    try:
        saved = complete_checkpoints(save)
    except OSError:
        return []  # Only trainings require this folder.
    if not saved:
        return []
    what = f"is read, and not save: {save}, which has checkpoints up to {saved[-1].name}"
    remedy = f"for these, add --set load={shlex.quote(written_paths(str(save)))}"
    return [Problem("load", what, remedy, value=section.load, place=place)]


def notes_on_record(config: NeoXConfig) -> list[Problem]:
    """Return a note if `log_dir` has the record of another training, which this one renames."""
    folder, section = config.logging.log_dir, config.checkpoint
    if folder is None or not os.path.isfile(Path(folder, RECORD)):
        return []
    if not section.finetune and _continues(config):
        return []
    return [
        Problem(
            "log_dir",
            f"has the record of an earlier training ({RECORD}), and this one starts from the beginning\n"
            "the earlier record is kept as metrics.1.jsonl, or the next free number",
            "to keep both apart, set log-dir to another folder",
            value=folder,
            place=place_of(config.sources, "log_dir"),
        )
    ]


def _of_split(config: NeoXConfig, what: str, remedy: str) -> Problem:
    """Return a problem of `split`, whose default is as wrong as a given value."""
    place = place_of(config.sources, "split") or Place(DEFAULTS)
    return Problem("split", what, remedy, value=in_words(config.data.split), place=place)


def _empty_parts(config: NeoXConfig) -> tuple[int, list[str]]:
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
    loaded: tuple[Check, ...] = (_checkpoint, _base_of_adapters, _vocabulary, _store_to_load_from)
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
            _checkpoint_to_resume_from,
            _base_of_adapters,
            _teacher,
            _masked_model,
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
    count, empty = _empty_parts(config)
    if "train" in empty:
        what = f"leaves no document for training: {config.data.data_path} has {count:,}"
        yield _of_split(config, what, "give training a larger share")


def _share_of_training(config: NeoXConfig) -> Iterator[Problem]:
    if config.data.data_path is not None and "train" in parts_without_share(config.data.split):
        yield _of_split(config, "has no share for training", "write three numbers, as in 969,30,1")


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
        yield from _checkpoint(config)
        yield from _store_to_load_from(config)
        return
    yield from _store_packages("ict_load", folder)
    reason = None if _has_local_checkpoints(config) else _why_no_checkpoint(folder)
    if reason is not None:
        yield Problem("ict_load", reason, _load_remedy(folder, reason, name="ict-load"))


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
        yield _of_split(config, what, "give one of them a larger share")


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
    for key in custom_curricula(config):
        what = "is a Python function, which a configuration file cannot contain"
        remedy = "use fixed_linear, fixed_root or fixed_discrete, or train with neox_model.Trainer"
        yield Problem(f"{key if key == LEGACY else f'{METRICS}.{key}'}.schedule_type", what, remedy)
    for key, metric in enabled_metrics(config).items():
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
        ("save", None if _has_local_checkpoints(config) else config.checkpoint.save),
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


def _checkpoint(config: NeoXConfig) -> Iterator[Problem]:
    load = config.checkpoint.load
    if load is None:
        yield Problem(
            "load",
            "is missing",
            "add load: FOLDER, the folder in which the training saved checkpoints",
            value="",
        )
    elif _has_local_checkpoints(config):
        return
    elif (reason := _why_not_loadable(load)) is not None:
        if reason == _NO_CHECKPOINT and _trains_from_the_start(config):
            yield Problem("load", "contains no checkpoint yet", _train_first(config))
        else:
            yield Problem("load", reason, _load_remedy(load, reason))


def _checkpoint_to_resume_from(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint in `load`, unless `load` is `save`: then the first launch finds none yet."""
    section = config.checkpoint
    if section.finetune:
        yield from _checkpoint(config)
        return
    reason = None if section.load is None else _why_not_loadable(section.load)
    if section.load is None or reason is None or _has_local_checkpoints(config):
        return
    if reason != _NO_CHECKPOINT:
        yield Problem("load", reason, _load_remedy(section.load, reason))
    elif section.save is None or not _is_same_folder(section.load, section.save):
        remedy = "to start from new weights, leave load out or set it to the same folder as save"
        yield Problem("load", reason, f"{_load_remedy(section.load, reason)}; {remedy}")


def _train_first(config: NeoXConfig) -> str:
    """Return the remedy for a model that is not trained yet, with the command if files describe it."""
    if not config.files or not all(map(os.path.isfile, config.files)):
        return "train first"
    words = [word for file in config.files for word in ("--config", file)]
    for name in ("save", "load"):
        place = place_of(config.sources, name)
        if place is not None and place.file == COMMAND_LINE:
            words += ["--set", f"{name}={config.value_of(name)}"]
    return f"train first: {shlex.join(['neox-launch', *words])}"


def _trains_from_the_start(config: NeoXConfig) -> bool:
    """Return whether a training with this configuration would save the first checkpoint to `load`."""
    section = config.checkpoint
    if section.load is None or section.save is None or section.finetune:
        return False
    return _is_same_folder(section.load, section.save)


def _is_same_folder(one: str, other: str) -> bool:
    return Path(one).absolute() == Path(other).absolute()


def _has_local_checkpoints(config: NeoXConfig) -> bool:
    """Return whether checkpoints are on the disks of the hosts that train, which may not be this host."""
    return config.checkpoint.checkpoint.use_node_local_storage


def _why_not_loadable(load: str) -> str | None:
    """Return why `load` has no checkpoint, or None if it contains or is a complete one."""
    is_one = not is_url(load) and is_checkpoint(Path(load))
    return None if is_one else _why_no_checkpoint(load)


def _why_no_checkpoint(folder: str) -> str | None:
    """Return why no checkpoint can be loaded from a folder, or None if it contains a complete one.

    The launch host may not reach object stores: the workers report what they find there.
    """
    if is_url(folder):
        return None
    try:
        if complete_checkpoints(Path(folder)):
            return _why_latest_is_wrong(Path(folder))
        theirs = gpt_neox_checkpoint(Path(folder))
        return _NO_CHECKPOINT if theirs is None else _GPT_NEOX[theirs != Path(folder)]
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _why_latest_is_wrong(folder: Path) -> str | None:
    """Return why the file `latest` names no checkpoint; None if it does, is missing, or cannot be read."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None  # The workers report a file that cannot be read.
    if latest_checkpoint(folder) is not None or (name and is_gpt_neox(folder / name)):
        return None
    # The old folder, if the machine stopped while a new one was replacing it.
    if (folder / f".{name}.replaced" / MANIFEST).is_file():
        return None
    return f"{_WRONG_LATEST}{name!r}, which is not a checkpoint in it"


def _base_of_adapters(config: NeoXConfig) -> Iterator[Problem]:
    """Require a complete checkpoint of the model that adapters are added to.

    That is the one on which the adapters to load were trained, and without these the latest.
    """
    base = base_of_adapters(config)
    if base is None or is_url(base):
        return
    recorded, reason = _base_of_loaded(config, Path(base)), _why_no_checkpoint(base)
    # Adapters record the checkpoint that they belong to, whatever `latest` names.
    if reason is not None and not (recorded is not None and reason.startswith(_WRONG_LATEST)):
        moved = "" if os.path.isdir(base) else "; if that was moved or renamed, write its new path"
        yield Problem("lora_base", reason, f"{_load_remedy(base, reason, name='lora-base')}{moved}")
        return
    read = recorded or latest_checkpoint(Path(base))
    if read is None:
        return  # The workers report a file `latest` that cannot be read.
    if not (read / MANIFEST).is_file():
        what = f"does not contain {read.name}, on which the adapters in {config.checkpoint.load} were trained"
        remedy = "set it to a folder with it (keep-last-n-checkpoints deletes earlier ones)"
        yield Problem("lora_base", what, remedy)
        return
    yield from _whole_model("lora_base", read)


def _whole_model(name: str, checkpoint: Path) -> Iterator[Problem]:
    """Require that a checkpoint, whose folder a parameter names, has all files of a model."""
    contents = contents_of(checkpoint)
    if "base" in contents.get("config", {}):
        remedy = "merge them with neox-checkpoint merge, or name the folder of a whole model"
        yield Problem(name, "contains checkpoints of adapters, and no model", remedy)
    files = sorted(contents.get("files", {}))
    lacking = next((file for file in files if not (checkpoint / file).is_file()), None)
    if lacking is not None:
        yield Problem(
            name,
            f"contains {checkpoint.name} without its file {lacking}",
            "copy it again; of a checkpoint on the disks of several hosts, copy the files of all hosts into "
            "one folder",
        )


def _teacher(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint of the teacher, unless a student that has started continues without it."""
    section = config.compression.compression_training.layer_reduction
    if not section.enabled or section.teacher is None or (_continues(config) and not section.distill.enabled):
        return
    yield from _start("compression_training.layer_reduction.teacher", section.teacher, called="teacher")


def _masked_model(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint of the model that towers start from, unless a training continues."""
    folder = config.objective.bert_load
    if is_retrieval(config) and folder is not None and not _continues(config):
        yield from _start("bert_load", folder, called="bert-load")


def _continues(config: NeoXConfig) -> bool:
    load = config.checkpoint.load
    return load is not None and (_has_local_checkpoints(config) or _why_not_loadable(load) is None)


def _start(name: str, folder: str, *, called: str) -> Iterator[Problem]:
    """Require a complete checkpoint of a model in a folder that a parameter names."""
    reason = _why_no_checkpoint(folder)
    if reason is not None:
        yield Problem(name, reason, _load_remedy(folder, reason, name=called))
        return
    read = latest_checkpoint(Path(folder))
    if read is not None:  # The workers report a file `latest` that names none.
        yield from _whole_model(name, read)


def _base_of_loaded(config: NeoXConfig, base: Path) -> Path | None:
    """Return the checkpoint of the base on which the adapters to load were trained; None without these."""
    load = config.checkpoint.load
    if load is None or is_url(load) or _has_local_checkpoints(config) or _why_not_loadable(load):
        return None
    latest = latest_checkpoint(Path(load))
    recorded = {} if latest is None else contents_of(latest).get("config", {}).get("base")
    iteration = recorded.get("iteration") if isinstance(recorded, dict) else None
    return base / checkpoint_name(iteration) if isinstance(iteration, int) else None


def _load_remedy(load: str, reason: str, *, name: str = "load") -> str:
    if reason in _GPT_NEOX:
        theirs = shlex.quote(str(gpt_neox_checkpoint(Path(load))))
        return f"convert it with neox-convert from-neox {theirs} --output imported, then set {name}: imported"
    if reason.startswith(_WRONG_LATEST):
        newest = complete_checkpoints(Path(load))[-1].name
        path = shlex.quote(str(Path(load, LATEST)))
        return f"to load the complete checkpoint of the highest iteration, run: echo {newest} > {path}"
    if reason != _NO_CHECKPOINT:
        return "check the path and the permissions of its folders"
    if (Path(load) / MANIFEST).is_file() and not is_checkpoint(Path(load)):
        example = checkpoint_name(1000)
        return f"it is one, with another name: rename it to global_step and its iteration, as in {example}"
    if _is_hugging_face(Path(load)):
        return (
            f"it contains a model of Hugging Face's transformers; run: neox-convert from-hf {load} --output "
            f"FOLDER, and set {name} to that folder, or launch with its model.yml"
        )
    parent = Path(load).absolute().parent
    if _why_no_checkpoint(str(parent)) is None:
        return f"write {name}: {Path(load).parent}, the folder of all checkpoints"
    return "set it to the folder in which a training saved checkpoints"


def _is_hugging_face(folder: Path) -> bool:
    """Return whether a folder looks like a model of transformers."""
    if not (folder / "config.json").is_file():
        return False
    weights = ("model.safetensors", "pytorch_model.bin")
    return any((folder / f"{name}{end}").is_file() for name in weights for end in ("", ".index.json"))


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
