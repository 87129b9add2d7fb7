"""Whether the files that a configuration names are there and fit, before any worker starts."""

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from neox_launcher.config import NeoXConfig
from neox_launcher.config.problems import Problem, in_words, place_of
from neox_launcher.indexed_files import check_indexed_files

__all__ = ["check_files"]

_EMBEDDING = "embedding.word_embeddings.weight"
_CHAR_LEVEL_ENTRIES = 512

Check = Callable[[NeoXConfig], Iterator[Problem]]


def check_files(config: NeoXConfig, *, program: str) -> list[Problem]:
    """What is wrong with the files that a program would use.

    Args:
        config: names the files.
        program: train, generate, evaluate or doctor.
    """
    checks: dict[str, tuple[Check, ...]] = {
        "train": (
            _datasets,
            _curricula,
            _tokenizer,
            _folders_to_write,
            _checkpoint_to_go_on_from,
            _vocabulary,
            _packages,
        ),
        "evaluate": (_datasets, _tokenizer, _checkpoint, _vocabulary),
        "generate": (_tokenizer, _prompts, _checkpoint, _vocabulary),
        # It looks at the files itself, from every host.
        "doctor": (),
    }
    problems = [problem for check in checks[program] for problem in check(config)]
    return [
        problem.located(place_of(config.sources, problem.name), in_words(config.value_of(problem.name)))
        for problem in problems
    ]


def _datasets(config: NeoXConfig) -> Iterator[Problem]:
    data = config.data
    named = {"data_path": (data.data_path,) if data.data_path is not None else None}
    named |= {
        name: getattr(data, name) for name in ("train_data_paths", "valid_data_paths", "test_data_paths")
    }
    if not any(named.values()):
        yield Problem(
            "data_path",
            "is missing, and so are train-data-paths",
            "add data-path: PREFIX, where PREFIX.bin and PREFIX.idx are what preprocess_data wrote",
            value="",
        )
    for name, prefixes in named.items():
        for prefix in dict.fromkeys(prefixes or ()):
            found = check_indexed_files(prefix)
            if found is not None:
                yield Problem(name, found, _dataset_remedy(prefix, found), value=prefix)
            else:
                yield from _made_with_another_tokenizer(config, name, prefix)


def _made_with_another_tokenizer(config: NeoXConfig, name: str, prefix: str) -> Iterator[Problem]:
    """The manifest beside a dataset says how many entries the tokenizer had that made it."""
    made, entries = _entries_of_maker(Path(f"{prefix}.manifest.json")), _entries_of_tokenizer(config)
    if made is not None and entries is not None and made != entries:
        yield Problem(
            name,
            f"was made with a tokenizer of {made:,} entries; the configured one has {entries:,}",
            "configure the tokenizer that made it, or make the data again with this one",
            value=prefix,
        )


def _entries_of_maker(manifest: Path) -> int | None:
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))["tokenizer"]["vocab_size"]
    except (OSError, ValueError, LookupError, TypeError):
        # Many datasets have none; a damaged one is told by the package that reads it.
        return None
    return entries if isinstance(entries, int) else None


def _curricula(config: NeoXConfig) -> Iterator[Problem]:
    """The analyses that a curriculum chooses samples by."""
    efficiency = config.data_efficiency.data_efficiency
    sampling = efficiency.data_sampling
    if not (efficiency.enabled and sampling.enabled and sampling.curriculum_learning.enabled):
        return
    for key, metric in sampling.curriculum_learning.curriculum_metrics.items():
        name = f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.{key}"
        if metric.schedule_type == "custom":
            what, remedy = (
                "is a function, which no file holds",
                "use fixed_linear, fixed_root or fixed_discrete",
            )
            yield Problem(f"{name}.schedule_type", what, remedy)
        for path in ("index_to_sample_path", "index_to_metric_path"):
            found = check_indexed_files(getattr(metric, path))
            if found is not None and metric.clustering_type == "schedule_based":
                yield Problem(f"{name}.{path}", found, "make the files with neox-data analyze")


def _dataset_remedy(prefix: str, found: str) -> str:
    if not found.endswith("does not exist"):
        return "make the two files again with preprocess_data"
    if prefix.endswith((".bin", ".idx")):
        return f"write the prefix alone: {prefix[:-4]}"
    near = sorted(Path(prefix).parent.glob("*.idx"))[:3] if Path(prefix).parent.is_dir() else []
    if near:
        return "there is " + ", ".join(str(path.with_suffix("")) for path in near)
    return "check the path (relative to where the command is started), or make it with preprocess_data"


def _tokenizer(config: NeoXConfig) -> Iterator[Problem]:
    section = config.tokenizer
    needed = {
        "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
        "HFTokenizer": {"vocab_file": "tokenizer.json"},
        "SentencePieceTokenizer": {"vocab_file": "tokenizer.model"},
        "TiktokenTokenizer": {"vocab_file": "cl100k_base.tiktoken"},
    }
    for name, example in needed.get(section.tokenizer_type, {}).items():
        path = getattr(section, name)
        if path is None:
            dashed = name.replace("_", "-")
            yield Problem(
                name,
                f"is missing: {section.tokenizer_type} needs it",
                f"add {dashed}: path/to/{example}",
                value="",
            )
        elif not Path(path).is_file():
            yield Problem(
                name, "does not exist" if not Path(path).exists() else "is a folder", "check the path"
            )


def _folders_to_write(config: NeoXConfig) -> Iterator[Problem]:
    logging, monitors = config.logging, config.monitors
    for name, path in (
        ("save", config.checkpoint.save),
        ("tensorboard_dir", logging.tensorboard_dir),
        ("log_dir", logging.log_dir),
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
    """Packages of monitors, where this machine is one that trains: without neox-model it only launches."""
    if importlib.util.find_spec("neox_model") is None:
        return
    logging, monitors = config.logging, config.monitors
    for name, is_on, package in (
        ("tensorboard_dir", logging.tensorboard_dir is not None, "tensorboard"),
        ("tensorboard.enabled", monitors.tensorboard.enabled, "tensorboard"),
        ("use_wandb", logging.use_wandb, "wandb"),
        ("wandb.enabled", monitors.wandb.enabled, "wandb"),
        ("comet.enabled", monitors.comet.enabled, "comet_ml"),
    ):
        if is_on and importlib.util.find_spec(package) is None:
            yield Problem(
                name, f"needs the package {package}, which is not installed here", f"pip install {package}"
            )


def _why_not_writable(path: Path) -> str | None:
    """Why nothing can be written below a folder that may not exist yet."""
    existing = path
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            return f"{existing} is a file"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} does not allow it"
    return None


def _checkpoint(config: NeoXConfig) -> Iterator[Problem]:
    load = config.checkpoint.load
    if load is None:
        yield Problem(
            "load", "is missing", "add load: FOLDER, the folder that the training saved to", value=""
        )
    elif not _holds_checkpoint(load):
        yield Problem("load", "holds no checkpoint", _load_remedy(load))


def _checkpoint_to_go_on_from(config: NeoXConfig) -> Iterator[Problem]:
    """Without a checkpoint a training begins with new weights: right only where it saves its own first."""
    section = config.checkpoint
    if section.finetune:
        yield from _checkpoint(config)
    elif section.load is not None and not _holds_checkpoint(section.load):
        if section.save is None or Path(section.load).absolute() != Path(section.save).absolute():
            remedy = "to begin with new weights, leave load out, or give it the folder of save"
            yield Problem("load", "holds no checkpoint", f"{_load_remedy(section.load)}; {remedy}")


def _holds_checkpoint(folder: str) -> bool:
    return any(Path(folder).glob("global_step*/manifest.json"))


def _load_remedy(load: str) -> str:
    parent = Path(load).parent
    if _holds_checkpoint(str(parent)):
        return f"write load: {parent}, the folder of all checkpoints"
    return "name the folder that a training saved to"


def _prompts(config: NeoXConfig) -> Iterator[Problem]:
    section = config.generation
    if section.sample_input_file is not None and not Path(section.sample_input_file).is_file():
        yield Problem("sample_input_file", "does not exist", "check the path")
    if section.text_gen_type == "input-file" and section.sample_input_file is None:
        yield Problem("text_gen_type", "needs sample-input-file", "add sample-input-file: prompts.txt")


def _vocabulary(config: NeoXConfig) -> Iterator[Problem]:
    """A tokenizer may not know more tokens than the checkpoint's model."""
    rows, entries = _rows_of_checkpoint(config), _entries_of_tokenizer(config)
    if rows is not None and entries is not None and entries > rows:
        name = "vocab_file" if config.tokenizer.vocab_file is not None else "tokenizer_type"
        yield Problem(
            name,
            f"has {entries:,} entries, but the model in {config.checkpoint.load} knows {rows:,} tokens",
            "use the tokenizer that this model was trained with, or another folder to load from",
        )


def _rows_of_checkpoint(config: NeoXConfig) -> int | None:
    """Rows of the token embedding in the newest checkpoint; None when there is none to read."""
    if config.checkpoint.load is None:
        return None
    folder = Path(config.checkpoint.load)
    try:
        newest = (folder / "latest").read_text(encoding="utf-8").strip()
        manifest = json.loads((folder / newest / "manifest.json").read_text(encoding="utf-8"))
        return int(manifest["contents"]["tensors"][_EMBEDDING]["shape"][0])
    except (OSError, ValueError, LookupError, TypeError):
        # A damaged checkpoint is the workers' to report: they know the older ones that could serve.
        return None


def _entries_of_tokenizer(config: NeoXConfig) -> int | None:
    """Entries that the tokenizer knows; None when its files do not say it plainly."""
    section = config.tokenizer
    if section.tokenizer_type == "CharLevelTokenizer":
        return _CHAR_LEVEL_ENTRIES
    if section.vocab_file is None or section.tokenizer_type == "HFGPT2Tokenizer":
        return None
    try:
        content = json.loads(Path(section.vocab_file).read_text(encoding="utf-8"))
        return len(content) if section.tokenizer_type == "GPT2BPETokenizer" else _entries(content)
    except (OSError, ValueError, LookupError, TypeError):
        # What is wrong with the file is told, in full, by the package that reads it.
        return None


def _entries(content: dict[str, Any]) -> int:
    """Entries of a `tokenizer.json`, added tokens included."""
    vocabulary = content["model"]["vocab"]
    words = {entry[0] for entry in vocabulary} if isinstance(vocabulary, list) else set(vocabulary)
    return len(words | {token["content"] for token in content.get("added_tokens", ())})
