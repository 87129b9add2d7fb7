"""Preflight checks: find what would make the workers of a plan fail, before any of them is started."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from neox_config import NeoXConfig, Resolved
from neox_config.derive.evaluation import evaluates_texts
from neox_config.derive.generation import generation_mode
from neox_config.derive.objective import WITHOUT_TEXTS, is_encoder, is_retrieval
from neox_config.derive.problems import placed, refusal
from neox_config.extras.data_efficiency.curricula import LEGACY, METRICS, custom_curricula, enabled_metrics
from neox_config.facts.checkpoints import TOKEN_EMBEDDING, iteration_of
from neox_config.facts.splits import PARTS
from neox_config.facts.tokenizers import TOKENIZER_FACTS
from neox_config.problems import Problem, in_words
from neox_config.spec.recorded import contents_of, latest_checkpoint
from neox_config.spec.refusals import refusals_of
from neox_launcher.plan import kinds
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.resuming import PARTIAL_LOADS
from neox_launcher.plan.usable_documents import evaluated_documents, trained_documents
from neox_launcher.resources.host import Host
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.world import World, missing_devices

__all__ = ["check_files", "check_loaded", "preflight", "refuse_worker_by_hand"]

_TRAIN, _GENERATE, _PROMPTS, _SERVE = ("train",), ("generate",), ("generate", "prompts"), ("serve",)
# An evaluation on tasks and texts reads other files than one on the data of the run.
_EVALUATE, _TEXTS, _BLOCKS = ("evaluate",), ("evaluate on texts",), ("index-blocks", "find-blocks")
_LOAD = (*_GENERATE, *_SERVE, *_EVALUATE, *_TEXTS, "model")
_DATA = (*_TRAIN, *_EVALUATE, *_BLOCKS)


class _Use(NamedTuple):
    """A parameter that names files or requires packages; `missing` is the finding without a value."""

    name: str
    kind: kinds.FileKind
    programs: tuple[str, ...]
    applies: bool = True
    missing: tuple[str, str] | None = None


def _uses(config: NeoXConfig) -> Iterator[_Use]:
    """Yield the parameters that name files, with their kinds."""
    retrieves, finetunes = is_retrieval(config), config.checkpoint.finetune
    kind, tasks, monitors = config.tokenizer.tokenizer_type, config.generation, config.monitors
    student, towers = config.compression.compression_training.layer_reduction, config.objective.ict_load
    is_local, loaded = config.checkpoint.checkpoint.use_node_local_storage, config.checkpoint.load
    starts = loaded is None or any(kinds.checkpoint_to_load(loaded, config))

    paths = [f"{part}{labels}_data_paths" for labels in ("", "_label") for part in PARTS]
    has_data = any(map(config.value_of, ("data_path", *paths)))
    example = "add data-path: PREFIX, that of the files PREFIX.bin and PREFIX.idx that preprocess_data writes"
    without = None if has_data else ("is missing, and train-data-paths as well", example)
    yield _Use("data_path", kinds.dataset_prefix, _DATA, missing=without)
    for name in paths:
        yield _Use(name, kinds.dataset_prefix, _DATA)
    yield _Use("titles_data_path", kinds.dataset_prefix, _DATA, retrieves)
    analyzed = partial(kinds.dataset_prefix, made_by="neox-data analyze")
    for key, metric in enabled_metrics(config.data_efficiency).items():
        for path in ("index_to_sample_path", "index_to_metric_path"):
            is_read = metric.clustering_type == "schedule_based"
            yield _Use(f"{METRICS}.{key}.{path}", analyzed, _TRAIN, is_read)
    for name, example in TOKENIZER_FACTS[kind].files.items():
        required = f"is missing; {kind} requires it", f"add {name.replace('_', '-')}: path/to/{example}"
        yield _Use(name, kinds.readable_file, (*_TRAIN, *_LOAD, *_BLOCKS), missing=required)

    load = "is missing", "add load: FOLDER, the folder in which the run saved checkpoints"
    loading = (*_LOAD, *(_BLOCKS if towers is None else ()), *(_TRAIN if finetunes else ()))
    yield _Use("load", kinds.checkpoint_to_load, loading, missing=load)
    yield _Use("load", partial(kinds.checkpoint_to_load, resumes=True), _TRAIN, not finetunes)
    yield _Use("ict_load", kinds.checkpoint_folder, _BLOCKS, not is_local)
    yield _Use("lora_base", kinds.checkpoint_folder, (*_TRAIN, *_LOAD), bool(config.adapters.lora_rank))
    yield _Use("bert_load", kinds.checkpoint_folder, _TRAIN, retrieves and starts)
    teacher, distills = "compression_training.layer_reduction.teacher", starts or student.distill.enabled
    yield _Use(teacher, kinds.checkpoint_folder, _TRAIN, student.enabled and distills)

    index = "is missing", "add block-data-path: FOLDER, that of the index"
    yield _Use("block_data_path", kinds.new_block_index, ("index-blocks",), missing=index)
    yield _Use("block_data_path", kinds.block_index, ("find-blocks",), missing=index)
    mode = generation_mode(config)
    prompts = "is missing; text-gen-type: input-file requires it", "add sample-input-file: prompts.txt"
    yield _Use("sample_input_file", kinds.prompts_file, _PROMPTS, mode == "input-file", missing=prompts)
    yield _Use("serve.api_key_file", kinds.readable_file, _SERVE)
    yield _Use("serve.chat_template", kinds.existing_path, _SERVE)
    yield _Use("serve.port", kinds.packages("starlette", "uvicorn"), _SERVE)

    yield _Use("eval_tasks", kinds.packages("lm_eval", install="'neox-model[eval]'"), (*_TRAIN, *_TEXTS))
    folder = partial(kinds.existing_path, is_folder=True)
    yield _Use("eval_include_path", folder, (*_TRAIN, *_TEXTS), bool(tasks.eval_tasks))
    yield _Use("eval_data", kinds.texts_or_dataset, (*_TRAIN, *_TEXTS))
    writing = (*_TEXTS, *(_TRAIN if tasks.eval_results_prefix else ()))
    yield _Use("eval_results_prefix", kinds.output_file, writing, evaluates_texts(config))

    yield _Use("save", kinds.output_folder, _TRAIN, not is_local)
    yield _Use("checkpoint_store", kinds.store, _TRAIN)
    yield _Use("log_dir", kinds.output_folder, _TRAIN)
    yield _Use("tensorboard_dir", kinds.output_folder, _TRAIN)
    yield _Use("memory_profiling_path", kinds.output_folder, _TRAIN, config.logging.memory_profiling)
    yield _Use("tensorboard.output_path", kinds.output_folder, _TRAIN, monitors.tensorboard.enabled)
    yield _Use("csv_monitor.output_path", kinds.output_folder, _TRAIN, monitors.csv_monitor.enabled)
    yield _Use("tensorboard_dir", kinds.packages("tensorboard"), _TRAIN)
    yield _Use("tensorboard.enabled", kinds.packages("tensorboard"), _TRAIN, monitors.tensorboard.enabled)
    yield _Use("use_wandb", kinds.packages("wandb"), _TRAIN, bool(config.logging.use_wandb))
    yield _Use("wandb.enabled", kinds.packages("wandb"), _TRAIN, monitors.wandb.enabled)
    yield _Use("comet.enabled", kinds.packages("comet_ml"), _TRAIN, monitors.comet.enabled)


def check_files(config: NeoXConfig, *, program: str) -> list[Problem]:
    """Return the problems of the files that a program would use.

    Args:
        config: configuration that names the files.
        program: train, generate, serve, evaluate, index-blocks, find-blocks or doctor, which checks the files
            itself, on every host; prompts for the prompts of generate alone, model for all but these.
    """
    read = _TEXTS[0] if program == "evaluate" and evaluates_texts(config) else program
    found = [
        problem
        for use in _uses(config)
        if use.applies and read in use.programs
        for problem in _check(use, config)
    ]
    return [placed(config, problem) for problem in (*found, *_unfit(config, read))]


def _check(use: _Use, config: NeoXConfig) -> Iterator[Problem]:
    value = config.value_of(use.name)
    if value is None and use.missing is not None:
        yield Problem(use.name, *use.missing, value="")
    values = value if isinstance(value, tuple) and use.kind is kinds.dataset_prefix else (value,)
    for path in dict.fromkeys(values) if value is not None else ():
        yield from (Problem(use.name, *found, value=in_words(path)) for found in use.kind(path, config))


def _vocabulary(config: NeoXConfig) -> Iterator[Problem]:
    """Check that the tokenizer has at most as many entries as the token embedding of the checkpoint."""
    load, entries = config.checkpoint.load, kinds.entries_of_tokenizer(config) or 0
    checkpoint = None if load is None else latest_checkpoint(Path(load))
    try:
        rows = int(contents_of(checkpoint)["tensors"][TOKEN_EMBEDDING]["shape"][0]) if checkpoint else entries
    except (ValueError, LookupError, TypeError):
        return  # The workers report a damaged checkpoint: they can name an older one to use instead.
    if rows < entries:
        name = "vocab_file" if config.tokenizer.vocab_file is not None else "tokenizer_type"
        what = f"has {entries:,} entries, but the model in {load} has {rows:,} tokens"
        yield Problem(name, what, "use the tokenizer that this model was trained with")


def _unfit(config: NeoXConfig, program: str) -> Iterator[Problem]:
    """Yield what a program cannot do with the files and settings together."""
    if program in (*_GENERATE, *_SERVE) and is_encoder(config):
        what, remedy = WITHOUT_TEXTS.split("; ")
        yield Problem("objective", what, remedy)
    if program in _BLOCKS and not is_retrieval(config):
        yield Problem("objective", "has no towers that embed blocks", "use a model that was trained with ict")
    if program in _PROMPTS:
        if generation_mode(config) == "unconditional" and config.generation.num_samples == 0:
            yield Problem("num_samples", "is 0, so no text would be generated", "add num-samples: 10")
        for name in ("sample_input_file", "vocab_file", "merge_file"):
            path, output = config.value_of(name), config.generation.sample_output_file
            # Results are first written to the second name.
            written = () if output is None else map(os.path.realpath, (output, f"{output}.partial"))
            if path is not None and os.path.realpath(path) in written:
                what = f"is also the {name.replace('_', '-')}, which would be overwritten"
                yield Problem("sample_output_file", what, "choose another file")
    if program in _TRAIN:
        yield from trained_documents(config)
        for key in custom_curricula(config.data_efficiency):
            what = "is a Python function, which a configuration file cannot contain"
            remedy = "use fixed_linear, fixed_root or fixed_discrete, or train with neox_model.Trainer"
            yield Problem(f"{key if key == LEGACY else f'{METRICS}.{key}'}.schedule_type", what, remedy)
    if program in _EVALUATE:
        yield from evaluated_documents(config)
    if program in (*_TRAIN, *_LOAD):
        yield from _vocabulary(config)


def preflight(plan: LaunchPlan) -> list[Problem]:
    """Return what would stop a plan: unsupported settings, missing devices, missing or invalid files."""
    config = plan.resolved.config
    problems = missing_devices(config, plan.world) + check_files(config, program=plan.program)
    if not any(problem.name == "load" for problem in problems):
        problems += check_loaded(plan.resolved, program=plan.program)
    if plan.max_restarts and config.checkpoint.checkpoint.use_node_local_storage:
        # The launcher cannot see what was saved there.
        for name, value in {"load": config.checkpoint.save, **dict.fromkeys(PARTIAL_LOADS, False)}.items():
            if config.value_of(name) != value:
                what = (
                    f"must be {in_words(value)}, or --max-restarts would not find all states on hosts' disks"
                )
                problems.append(placed(config, Problem(name, what, "change it, or leave out --max-restarts")))
    return problems


def check_loaded(resolved: Resolved, *, program: str) -> list[Problem]:
    """Return why a program cannot load the checkpoint in `load`, as far as its manifest shows."""
    config, load, trains = resolved.config, resolved.config.checkpoint.load, program == "train"
    is_loaded = program in (*_TRAIN, *_LOAD) and not (trains and config.checkpoint.finetune)
    is_here = load is not None and not config.checkpoint.checkpoint.use_node_local_storage
    checkpoint = latest_checkpoint(Path(load or "")) if is_loaded and is_here else None
    if checkpoint is None:
        return []
    contents, iteration = contents_of(checkpoint), iteration_of(checkpoint.name)
    return [
        placed(config, Problem("load", f"{checkpoint.name}: {refused.what}", refused.remedy))
        for refused in refusals_of(contents, resolved, trains=trains, iteration=iteration)
    ]


def refuse_worker_by_hand(config: NeoXConfig, *, program: str, has_functions: bool = False) -> None:
    """Run the preflight checks of a launch in a worker that was started without the launcher.

    Args:
        config: configuration that the worker read.
        program: as of `check_files`.
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
    if config.mup.use_mup and config.mup.save_base_shapes:
        what = "needs neox-launch, which writes them"
        problems.append(Problem("save_base_shapes", what, "use neox-launch, or set it to false"))
    problems = [each for each in problems if not (has_functions and each.name.endswith(".schedule_type"))]
    if problems:
        raise refusal(config, *problems)
