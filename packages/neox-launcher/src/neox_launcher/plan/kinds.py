"""What parameters name: each kind of file has one check, which yields what is wrong and what to do.

Only headers and manifests are read. The package that reads a file reports what is wrong inside.
"""

import codecs
import glob
import importlib.util
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.facts.checkpoints import complete_checkpoints, gpt_neox_checkpoint, is_checkpoint
from neox_config.facts.stores import is_url, packages_for
from neox_config.facts.tokenizers import TOKENIZER_FACTS
from neox_config.files import why_not_readable
from neox_launcher.plan.dataset_files import check_indexed_files, index_path, manifest_path

__all__ = [
    "FileKind",
    "block_index",
    "checkpoint_folder",
    "checkpoint_to_load",
    "dataset_prefix",
    "entries_of_tokenizer",
    "existing_path",
    "new_block_index",
    "output_file",
    "output_folder",
    "packages",
    "prompts_file",
    "readable_file",
    "store",
    "texts_or_dataset",
]

Findings = Iterator[tuple[str, str]]
FileKind = Callable[[str, NeoXConfig], Findings]

_BLOCK_INDEX = "index.json"
_NO_CHECKPOINT = "contains no checkpoint"
_GPT_NEOX = ("is a checkpoint of GPT-NeoX", "contains a checkpoint of GPT-NeoX")


def readable_file(path: str, config: NeoXConfig) -> Findings:
    """Require a file that this user can read."""
    reason = why_not_readable(path)
    if reason is not None:
        yield reason, _check(path)


def prompts_file(path: str, config: NeoXConfig) -> Findings:
    """Require a file with prompts."""
    yield from readable_file(path, config)
    if why_not_readable(path) is None and not Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).strip():
        yield "contains no prompts", "write one prompt per line"


def existing_path(path: str, config: NeoXConfig, *, is_folder: bool = False) -> Findings:
    """Require a path that exists, or a folder."""
    if not (os.path.isdir if is_folder else os.path.exists)(path):
        yield "is not a folder" if is_folder else "does not exist", _check(path)


def dataset_prefix(path: str, config: NeoXConfig, *, made_by: str = "preprocess_data") -> Findings:
    """Require the two files of a dataset, made with a vocabulary of the tokenizer's size."""
    found = check_indexed_files(path)
    if found is not None:
        yield found, _remedy_for_dataset(path, found, made_by)
        return
    made, entries = _entries_of_maker(path), entries_of_tokenizer(config)
    if made is not None and entries is not None and made != entries:
        what = "was tokenized with a vocabulary of {:,} entries; the configured tokenizer has {:,}"
        yield (
            what.format(made, entries),
            "use the tokenizer of the dataset, or preprocess it again with this one",
        )


def _remedy_for_dataset(prefix: str, found: str, made_by: str) -> str:
    if not found.endswith("does not exist"):
        return f"check the permissions, or create the two files again with {made_by}"
    parent, name = Path(prefix).parent, Path(prefix).name
    names = sorted({path.stem for path in parent.glob("*.idx")} - {name})
    # preprocess_data appends a key to the prefix that it is given.
    near = [each for each in names if each.startswith(f"{name}_")] or get_close_matches(name, names)
    return f"did you mean {parent / near[0]}?" if near else f"{_check(prefix)}, or create it with {made_by}"


def _entries_of_maker(prefix: str) -> int | None:
    """Return the entries of the tokenizer that made a dataset; None if no manifest states them."""
    try:
        return int(json.loads(manifest_path(prefix).read_text(encoding="utf-8"))["tokenizer"]["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def entries_of_tokenizer(config: NeoXConfig) -> int | None:
    """Return the entries of the configured tokenizer; None if its files do not state them."""
    try:
        return TOKENIZER_FACTS[config.tokenizer.tokenizer_type].read_entries(config.tokenizer.vocab_file)
    except (OSError, ValueError):
        return None


def texts_or_dataset(path: str, config: NeoXConfig) -> Findings:
    """Require a dataset, or files of texts: paths and patterns, separated by commas."""
    if os.path.lexists(index_path(path)):
        yield from dataset_prefix(path, config)
    elif not os.path.lexists(path) and not glob.has_magic(path) and "," not in path:
        yield f"does not exist, and neither does the dataset {index_path(path)}", _check(path)


def output_folder(path: str, config: NeoXConfig) -> Findings:
    """Require a folder in which files can be created, once it exists."""
    existing = Path(path)
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    try:
        # Permissions do not tell what a file system accepts: /proc, or a network's for its root user.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        what = f"cannot be written to: no file can be created in {existing} ({error.strerror})"
        yield what, "choose another folder, or change its permissions"


def output_file(path: str, config: NeoXConfig) -> Findings:
    """Require a file, or the beginning of its name, in a folder that can be written to."""
    return output_folder(os.path.dirname(path) or ".", config)


def new_block_index(path: str, config: NeoXConfig) -> Findings:
    """Require a folder that can be made, or an index of blocks to complete."""
    if os.path.lexists(path) and any(block_index(path, config)):
        yield "exists, and is not an index of blocks", "use a new folder"
    else:
        yield from output_file(os.path.abspath(path), config)


def block_index(path: str, config: NeoXConfig) -> Findings:
    """Require the folder of an index of blocks."""
    if not Path(path, _BLOCK_INDEX).is_file():
        yield "has no index of blocks", "make it with neox-launch index-blocks"


def packages(*required: str, install: str = "") -> FileKind:
    """Return a check that packages are installed, if neox-model, which uses them, is installed here."""

    def check(path: str, config: NeoXConfig) -> Findings:
        for package in required:
            if importlib.util.find_spec("neox_model") and not importlib.util.find_spec(package):
                yield f"needs the package {package}, which is missing", f"pip install {install or package}"

    return check


def store(path: str, config: NeoXConfig) -> Findings:
    """Require the packages that reach an object store; folders require none."""
    return packages(*(packages_for(path) if is_url(path) else ()))(path, config)


def checkpoint_folder(path: str, config: NeoXConfig) -> Findings:
    """Require a complete checkpoint in a folder."""
    yield from store(path, config)
    reason = _why_no_checkpoint(path)
    if reason in _GPT_NEOX:
        theirs = shlex.quote(str(gpt_neox_checkpoint(Path(path))))
        yield reason, f"run neox-convert from-neox {theirs} --output imported, and set it to imported"
    elif reason not in (None, _NO_CHECKPOINT):
        yield reason, "check the path and the permissions of its folders"
    elif reason is not None and Path(path, "config.json").is_file():
        command = f"neox-convert from-hf {shlex.quote(path)} --output imported"
        yield reason, f"run {command}, and set it to imported"
    elif reason is not None and _why_no_checkpoint(os.path.dirname(os.path.abspath(path))) is None:
        yield reason, f"set it to {Path(path).parent}, the folder of all checkpoints"
    elif reason is not None:
        yield reason, "set it to the folder in which a run saved checkpoints"


def checkpoint_to_load(path: str, config: NeoXConfig, *, resumes: bool = False) -> Findings:
    """Require a checkpoint, or a folder with one, unless a run resumes from the folder it saves to."""
    save = config.checkpoint.save
    saves_there = save is not None and Path(path).absolute() == Path(save).absolute()
    is_local = config.checkpoint.checkpoint.use_node_local_storage
    if not is_url(path) and (is_local or is_checkpoint(Path(path))):
        return
    for reason, remedy in checkpoint_folder(path, config):
        if reason != _NO_CHECKPOINT or config.checkpoint.finetune or not (saves_there or resumes):
            yield reason, remedy
        elif not resumes:
            yield "contains no checkpoint yet", "train first: start neox-launch with the same configuration"
        elif not saves_there:
            yield reason, f"{remedy}; to start from new weights, remove load"


def _why_no_checkpoint(path: str) -> str | None:
    """Return why no checkpoint can be loaded from a folder; None if it contains a complete one."""
    try:
        if is_url(path) or complete_checkpoints(Path(path)):
            return None
        theirs = gpt_neox_checkpoint(Path(path))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return _NO_CHECKPOINT if theirs is None else _GPT_NEOX[theirs != Path(path)]


def _check(path: str) -> str:
    """Return the remedy for a path that names nothing."""
    return "check the path" if os.path.isabs(path) else "check the path (relative to the working directory)"
