"""Cases of all commands but training: data, conversion, generation, configurations and plans."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from same_case import Case, Command
from same_training import COPIES, settings_of, training

__all__ = ["configuration_cases", "conversion_cases", "data_cases"]

_PREPROCESS = ("preprocess_data", "--output-prefix", "out", "--quiet", "--input")
_CHARACTERS = ("--tokenizer-type", "CharLevelTokenizer")
_SUBWORDS = ("--tokenizer-type", "HFTokenizer", "--vocab-file", "tokenizer.json")
# Options of preprocess_data; names of the inputs are arguments, too.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "characters": ("words.jsonl", *_CHARACTERS),
    "characters, ends": ("words.jsonl", *_CHARACTERS, "--append-eod"),
    "subwords, ends": ("words.jsonl", *_SUBWORDS, "--append-eod"),
    "subwords, exact, one thread": ("words.jsonl", *_SUBWORDS, "--exact", "--workers", "1"),
    "subwords, four threads": ("words.jsonl", *_SUBWORDS, "--workers", "4"),
    "two keys": ("words.jsonl", *_SUBWORDS, "--jsonl-keys", "text", "title"),
    "compressed": ("words.jsonl.gz", *_SUBWORDS),
    "text files": ("text-0.txt", "text-1.txt", "text-2.txt", *_SUBWORDS, "--append-eod"),
    "long documents, skipped": ("words.jsonl", *_SUBWORDS, "--max-document-bytes", "200"),
    "long documents, split": (
        *("words.jsonl", *_SUBWORDS, "--max-document-bytes", "200"),
        "--split-long-documents",
    ),
    "a shard": ("text-0.txt", "text-1.txt", "text-2.txt", *_SUBWORDS, "--shard", "2/3"),
    "resumable": ("words.jsonl", *_SUBWORDS, "--resume"),
    "prompts and responses": ("pairs.jsonl", *_SUBWORDS, "--loss-mask", "prompt-response"),
    "chats": ("chats.jsonl", *_SUBWORDS, "--loss-mask", "chat", "--chat-template", "template.jinja"),
}
_DATASETS = (*_PREPROCESS, "words.jsonl", *_CHARACTERS, "--append-eod")
# Commands on the dataset that _DATASETS makes.
_OPERATIONS: dict[str, tuple[str, ...]] = {
    "merge": ("neox-data", "merge", "--output", "merged", "out_text_document", "out_text_document"),
    "split": ("neox-data", "split", "out_text_document", "--split", "80,15,5", "--output", "parts"),
    "inspect": ("neox-data", "inspect", "out_text_document"),
    "verify": ("neox-data", "verify", "out_text_document"),
    "prepare": ("neox-data", "prepare", "--input", "words.jsonl", "--output", "run", "--quiet"),
    "train-tokenizer": (
        "neox-data",
        "train-tokenizer",
        "--input",
        "words.jsonl",
        "--output",
        "t.json",
        "--vocab-size",
        "300",
    ),
}
_FILES = ("words.jsonl", "words.jsonl.gz", "pairs.jsonl", "chats.jsonl", "template.jinja")
_FILES += tuple(f"text-{number}.txt" for number in range(3))
_WRITTEN = (
    "*.bin",
    "*.idx",
    "*.npy",
    "*manifest*.json",
    "run/tokenizer.json",
    "run/prepared.json",
    "run/data/*",
    "t.json",
    "parts*",
    "merged*",
)
_TOKENIZER = "hf/llama-plain/tokenizer.json"
# Samples and their order.
_SAMPLES: dict[str, dict[str, Any]] = {
    "packed": {},
    "unpacked": {"pack_impl": "unpacked"},
    "packed until overflow": {"pack_impl": "pack_until_overflow"},
    "not chopped": {
        "pack_impl": "unpacked",
        "allow_chopped": False,
        "seq_length": 90,
        "max_position_embeddings": 90,
    },
    "several epochs": {"train_iters": 90, "save_interval": 90, "eval_iters": 0},
    "blended": {
        "data_path": None,
        "split": None,
        "train_data_paths": ["corpus_text_document", "corpus_text_document"],
        "valid_data_paths": ["corpus_text_document"],
        "test_data_paths": ["corpus_text_document"],
        "train_data_weights": [1.0, 2.5],
    },
    "blended by documents": {
        "data_path": None,
        "split": None,
        "train_data_paths": ["corpus_text_document", "corpus_text_document"],
        "valid_data_paths": ["corpus_text_document"],
        "test_data_paths": ["corpus_text_document"],
        "weight_by_num_documents": True,
    },
    "documents apart": {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True},
    "in the middle": {"fim_rate": 0.5},
    "lazy": {"sample_order": "lazy"},
}


def data_cases() -> Iterator[Case]:
    """Yield runs of preprocess_data and neox-data, and trainings whose samples are made in each way."""
    copies = {name: name for name in _FILES} | {"tokenizer.json": _TOKENIZER}
    for name, options in _OPTIONS.items():
        command = Command((*_PREPROCESS, *options))
        yield Case("data", name, (command,), copies=copies, patterns=_WRITTEN)
    for name, arguments in _OPERATIONS.items():
        commands = Command(_DATASETS), Command(arguments, shows=True)
        yield Case("data", name, commands, copies=copies, patterns=_WRITTEN)
    base = settings_of("learned positions, layernorm, tied", "one process", "fp32")
    for name, changes in _SAMPLES.items():
        settings = base | {"train_iters": 4, "save_interval": 4, "eval_interval": 2} | changes
        settings = {key: value for key, value in settings.items() if value is not None}
        yield training("data", f"samples: {name}", settings, checkpoints=())


def conversion_cases(inputs: Path) -> Iterator[Case]:
    """Yield round trips of models of each family, with generation, and exports of trained models."""
    back = Command(("neox-convert", "to-hf", "--load", "imported", "--output", "exported"))
    written = ("imported/*.*", "exported/*.*")
    for path in sorted((inputs / "hf").iterdir()):
        commands = (
            Command(("neox-convert", "from-hf", "model", "--output", "imported")),
            _generate("imported"),
            back,
        )
        yield Case(
            "conversion",
            f"from and to transformers, {path.name}",
            commands,
            copies={"model": f"hf/{path.name}"},
            checkpoints=("imported/global_step0",),
            patterns=written,
        )
    for path in sorted((inputs / "neox").iterdir()):
        arguments = ("from-neox", "model", "--output", "imported", "--vocab-file", "model/tokenizer.json")
        if path.name.startswith("llama"):
            arguments += ("--qkv-order", "separate")
        yield Case(
            "conversion",
            f"from GPT-NeoX, {path.name}",
            (Command(("neox-convert", *arguments)), _generate("imported")),
            copies={"model": f"neox/{path.name}"},
            patterns=(*written, "imported/*/*.safetensors"),
        )
    for architecture in (
        "learned positions, layernorm, tied",
        "half rotary, parallel residual, untied",
        "grouped queries, rmsnorm, swiglu, no biases",
    ):
        settings = settings_of(architecture, "one process", "bf16") | {
            "tokenizer_type": "HFTokenizer",
            "vocab_file": "tokenizer.json",
        }
        case = training("conversion", f"to transformers, {architecture}", settings)
        preprocess = Command(
            (*_PREPROCESS[:1], "--output-prefix", "corpus", "--input", "corpus.jsonl", *_SUBWORDS)
        )
        commands = (
            preprocess,
            case.commands[-1],
            Command(("neox-convert", "to-hf", "save", "--output", "exported")),
        )
        generate = Command(
            ("-m", "neox_model.generate", "--config", "settings.yml", "--set", "load=save", *_GENERATION),
            shows=True,
        )
        yield Case(
            "conversion",
            case.name,
            (*commands, generate),
            files=case.files,
            copies={**COPIES, "tokenizer.json": _TOKENIZER},
            patterns=written,
        )


_GENERATION = (
    *("--set", "text-gen-type=unconditional", "--set", "prompt=abcd", "--set", "temperature=0"),
    *("--set", "maximum-tokens=8", "--set", "num-samples=2"),
)


def _generate(folder: str) -> Command:
    return Command(("-m", "neox_model.generate", "--config", f"{folder}/model.yml", *_GENERATION), shows=True)


_LAUNCHERS = ("pdsh", "ssh", "openmpi", "mvapich", "mpich", "slurm", "local")
_WORDS = (
    "rope",
    "batch size",
    "checkpointing",
    "num-layers",
    "n_layer",
    "zero",
    "attention",
    "learning rate",
)
_SIZE = "configs/19M.yml"


_QUERIES: dict[str, tuple[str, ...]] = {
    "check": ("check",),
    "show": ("show",),
    "engine": ("show", "--engine", "--devices", "64"),
    "estimate": ("estimate", "--device-memory", "80GiB"),
    "estimate of a step": ("estimate", "--step", "--devices", "64"),
    "schedule": ("schedule",),
}


def configuration_cases(inputs: Path) -> Iterator[Case]:
    """Yield what neox-config and dry runs of neox-launch print about each file of configs/."""
    copies = {"configs": "configs", "hosts": "hosts", "data": "data", "more.yml": "more.yml"}
    for path in sorted((inputs / "configs").rglob("*.yml")):
        name, text = str(path.relative_to(inputs)), path.read_text()
        # Sizes of published models have no training; other files without a size are merged with one.
        files = [name, "more.yml"] if path.parent.name == "models" else [name]
        files += [] if "num-layers" in text else [_SIZE]
        for query, arguments in _QUERIES.items():
            command = Command(("neox-config", arguments[0], *files, *arguments[1:]), shows=True)
            yield Case("configuration", f"{query}, {name}", (command,), copies=copies)
        files += [] if "data-path" in text else ["configs/local-data.yml"]
        command = Command(("neox-launch", *files, "--hostfile", "hosts", "--dry-run=json"), shows=True)
        yield Case("plans", f"train, {name}", (command,), copies=copies)
    for arguments in (("docs",), ("schema",), ("models",), *(("explain", *word.split()) for word in _WORDS)):
        command = Command(("neox-config", *arguments), shows=True)
        yield Case("configuration", " ".join(arguments), (command,))
    yield from _plan_cases(copies, str(inputs / "imported/model.yml"))


def _plan_cases(copies: dict[str, str], imported: str) -> Iterator[Case]:
    hosts = {"local": ("--num-gpus", "2"), "slurm": ("--num-nodes", "2", "--num-gpus", "4")}
    training = ("--config", _SIZE, "--config", "configs/local-data.yml")
    programs = {
        "train": training,
        "evaluate": ("evaluate", "--config", imported, "--set", "data-path=data/llama_text_document"),
        "generate": ("generate", "--config", imported),
    }
    for launcher, (program, words), form in product(_LAUNCHERS, programs.items(), ("text", "json")):
        options = ("--launcher", launcher, *hosts.get(launcher, ("--hostfile", "hosts")), f"--dry-run={form}")
        command = Command(("neox-launch", *words, *options), shows=True)
        yield Case("plans", f"{program} with {launcher}, {form}", (command,), copies=copies)
