"""The parts of `make gpu-minutes`: what each runs, its time limit, and how its figures are read."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["PARTS", "NotHereError", "Part", "Row", "Run"]


@dataclass(frozen=True)
class Row:
    """A figure.

    Args:
        name: what was measured.
        value: a number or a text; None: there is none, and the note says why.
        unit: of the value.
        expected: what was expected before.
        note: anything else; starts with FAILED if the measurement failed.
    """

    name: str
    value: float | str | None = None
    unit: str = ""
    expected: str = ""
    note: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the measurement failed."""
        return self.note.startswith("FAILED")


@dataclass(frozen=True)
class Run:
    """What a part may use.

    Args:
        rehearses: the CPU is used in place of the GPU.
        output: the folder of the report.
        work: a folder that is removed at the end.
        environment: variables of every part.
    """

    rehearses: bool
    output: Path
    work: Path
    environment: Mapping[str, str]


class NotHereError(Exception):
    """A part cannot run on this machine."""


@dataclass(frozen=True)
class Part:
    """A process that measures.

    Args:
        title: in the report.
        answers: the question that it answers.
        seconds: its time limit on a GPU; it also has the time that the parts before it left.
        command: from the run and the file that it writes, the arguments of Python. Raises NotHereError.
        read: from the file and the process's output, its rows. The file may be missing or incomplete.
        environment: more variables.
        is_extra: it runs only if its time is left of LIMIT_SECONDS.
    """

    title: str
    answers: str
    seconds: float
    command: Callable[[Run, Path], list[str]]
    read: Callable[[Path, str], list[Row]]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_extra: bool = False


def script(name: str, *options: str) -> Callable[[Run, Path], list[str]]:
    """Return the command of a script of benchmarks/ that writes rows."""

    def command(run: Run, file: Path) -> list[str]:
        rehearses = ["--rehearse"] if run.rehearses else []
        return [f"benchmarks/{name}", *options, *rehearses, "--json", str(file)]

    return command


def read_rows(file: Path, output: str) -> list[Row]:
    """Read the rows of a script that uses benchmarks/gpu_rows.py."""
    return [Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def steps(case: str, *options: str) -> Callable[[Run, Path], list[str]]:
    """Return the command of benchmarks/one_gpu.py for a case, with a profile."""

    def command(run: Run, file: Path) -> list[str]:
        traces = run.output / "traces" / file.stem
        return script("one_gpu.py", case, *options, "--profile", str(traces))(run, file)

    return command


# Milliseconds of a micro-batch of 16,384 tokens by class of kernel, counted from operations and bytes at the
# rates of an H100, and of the whole step that was measured before with one micro-batch per update.
BUDGET: Mapping[str, Mapping[str, str]] = {
    "neox-1.3b": {
        "accumulation 1": "288.7 (291.7, less 3 for the head)",
        "accumulation 8": "266",
        "products": "194.4",
        "attention": "26.0",
        "compiled": "35.5",
        "loss": "2.0",
        "update": "23.3 per update (26.3 with the gradients to float32, which are among other)",
    },
    "llama-3.2-1b": {
        "accumulation 1": "279.3 (284.3, less 5 for the head)",
        "accumulation 8": "259",
        "products": "175.4",
        "attention": "41.8",
        "compiled": "25.2",
        "loss": "5.2",
        "update": "20.3 per update (23.0 with the gradients to float32, which are among other)",
    },
}


def read_steps(file: Path, output: str) -> list[Row]:
    """Read the figures of benchmarks/one_gpu.py."""
    rows: list[Row] = []
    for found in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        case, accumulation = found["case"], found["accumulation"]
        budget = BUDGET.get(case.partition("/")[0], {}) if case.endswith("/compiled") else {}
        name = f"{case}, accumulation {accumulation}"
        expected = budget.get(f"accumulation {accumulation}", "")
        rows.append(Row(name, found["micro_batch_ms"], "ms per micro-batch", expected))
        rows.append(Row(f"{name}, speed", found["tokens_per_second"], "tokens/s"))
        for key, convention in (("mfu_full", "full attention"), ("mfu_causal", "causal attention")):
            if found[key] is not None:
                rows.append(Row(f"{name}, MFU ({convention})", 100 * found[key], "%"))
        if found["peak_gib"] is not None:
            rows.append(Row(f"{name}, memory", found["peak_gib"], "GiB"))
        for kind, milliseconds in (found["classes"] or {}).items():
            share = budget.get(kind, "") if accumulation == 1 else ""
            rows.append(Row(f"{name}, {kind}", milliseconds, "ms per micro-batch", share))
    return rows


def read_kernels(file: Path, output: str) -> list[Row]:
    """Read the figures of benchmarks/kernels.py."""
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = [Row("checks against float64 that are right", float(found["right"]))]
    rows += [Row("check", note=f"FAILED: {problem}") for problem in found["wrong"]]
    for figure in found.get("figures", ()):
        name = f"{figure['operator']}, {figure['direction']}, {figure['mebibytes']:.0f} MiB"
        expected = "54 (before)" if figure["operator"] == "cross_entropy" else ""
        rows.append(Row(name, 100 * figure["share_of_copy"], "% of a copy's speed", expected))
    return rows


# Those whose present form was never compared with float64 on a GPU.
UNVERIFIED = ("cross_entropy", "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
_SIZES = ("--mebibytes", "256", "--budget", "15")
_KERNELS = ("--verify", "--time", "--sanitizers", "--operators", *UNVERIFIED)


def sanitized(run: Run, file: Path) -> list[str]:
    """Return the command of compute-sanitizer over the same kernels."""
    if run.rehearses:
        raise NotHereError("it needs a GPU")
    if shutil.which("compute-sanitizer") is None:
        raise NotHereError("compute-sanitizer of the CUDA toolkit is not on PATH")
    checked = ["--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no", sys.executable]
    program = ["benchmarks/kernels.py", "--small", "--operators", *UNVERIFIED]
    return ["-c", f"import os; os.execvp('compute-sanitizer', {['compute-sanitizer', *checked, *program]!r})"]


def read_sanitized(file: Path, output: str) -> list[Row]:
    """Read the last line of compute-sanitizer."""
    summaries = [line for line in output.splitlines() if "ERROR SUMMARY" in line]
    return [Row("memcheck of the kernels", line.partition("SUMMARY:")[2].strip()) for line in summaries]


def resume(run: Run, file: Path) -> list[str]:
    """Return the command of `neox-launch verify-resume` with a small model that it writes."""
    corpus = file.with_suffix(".corpus")
    settings = file.with_suffix(".yml")
    settings.write_text(json.dumps(RESUMED | {"data-path": str(corpus)}), encoding="utf-8")
    arguments = ["verify-resume", "--config", str(settings), "--work-dir", str(file.parent), "--steps", "3"]
    # The compiler for CPUs takes a minute, and other tests use it.
    arguments += ["--set", "compile=false"] if run.rehearses else []
    return [
        "-c",
        "import sys; from pathlib import Path; from train_contenders import random_corpus;"
        f"path = Path({str(corpus)!r}); path.mkdir(); prefix = random_corpus(path);"
        f"sys.argv = ['neox-launch', *{arguments!r}, '--set', f'data-path={{prefix}}'];"
        "from neox_launcher.cli.launch import main; main()",
    ]


def read_resume(file: Path, output: str) -> list[Row]:
    """Read the verdict of `neox-launch verify-resume`."""
    lines = [line for line in output.splitlines() if "verdict" in line.lower()]
    return [Row("resumed run, deterministic and compiled", lines[-1].strip())] if lines else []


RESUMED: Mapping[str, Any] = {
    "deterministic": True,
    "compile": True,
    "precision": "bfloat16",
    "split": "100,0,0",
    "tokenizer-type": "CharLevelTokenizer",
    "num-layers": 2,
    "hidden-size": 128,
    "num-attention-heads": 2,
    "seq-length": 64,
    "max-position-embeddings": 64,
    "pos-emb": "rotary",
    "train-micro-batch-size-per-gpu": 4,
    "train-iters": 20,
    "eval-iters": 0,
    "num-gpus": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}

# In the order of what a second buys; the limits add up to less than LIMIT_SECONDS.
PARTS: Mapping[str, Part] = {
    "machine": Part(
        "The machine",
        "which card, driver and libraries computed everything below",
        40,
        script("gpu_machine.py"),
        read_rows,
    ),
    "products": Part(
        "Matrix products",
        "whether the products of a run are slowed by the power limit or by their shapes",
        30,
        script("gpu_products.py"),
        read_rows,
    ),
    "attention": Part(
        "Attention",
        "which backend runs, what another would give, and what documents cost",
        35,
        script("gpu_attention.py"),
        read_rows,
    ),
    "update": Part(
        "The update",
        "what the passes of an update cost, and what one pass less would save",
        20,
        script("gpu_update.py"),
        read_rows,
    ),
    "neox-1.3b": Part(
        "Training steps, GPT-NeoX 1.3B",
        "where the time of a step goes, with 1 and 8 micro-batches per update",
        90,
        steps("neox-1.3b/compiled"),
        read_steps,
    ),
    "ranks": Part(
        "Two ranks on one GPU",
        "whether tensor parallelism, ZeRO and a pipeline train as one rank over NCCL",
        75,
        script("gpu_ranks.py"),
        read_rows,
    ),
    "low-precision": Part(
        "8 bits and experts",
        "what float8 and grouped products can gain",
        25,
        script("gpu_low_precision.py"),
        read_rows,
    ),
    "llama-1b": Part(
        "Training steps, Llama 1B",
        "where the time of a step goes",
        70,
        steps("llama-3.2-1b/compiled"),
        read_steps,
    ),
    "kernels": Part(
        "Fused operators",
        "whether the kernels that were never compared in their present form are right, and their speed",
        35,
        lambda run, file: script("kernels.py", *_KERNELS, *(() if run.rehearses else _SIZES))(run, file),
        read_kernels,
    ),
    "resume": Part(
        "Resuming",
        "whether a deterministic and compiled training resumes to the last bit",
        50,
        resume,
        read_resume,
    ),
    "memcheck": Part(
        "Memory errors of kernels",
        "whether a kernel reads or writes beyond its tensors",
        25,
        sanitized,
        read_sanitized,
    ),
    "bias-gelu": Part(
        "GPT-NeoX 1.3B with the kernel of bias and GELU",
        "whether compiled layers should call it",
        40,
        steps("neox-1.3b/compiled-bias-gelu", "--accumulation", "1"),
        read_steps,
    ),
    "tuned": Part(
        "GPT-NeoX 1.3B with more search of the compiler",
        "what coordinate descent and launches that overlap gain in compiled layers",
        60,
        steps("neox-1.3b/compiled", "--accumulation", "1"),
        read_steps,
        {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1", "TORCHINDUCTOR_ENABLE_PDL": "1"},
        is_extra=True,
    ),
}
