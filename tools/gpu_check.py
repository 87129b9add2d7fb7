"""`make gpu-check`: everything that needs a GPU, in one run with one report.

    PYTHONPATH=tests python tools/gpu_check.py [--rehearse] [--report FILE] [--only SECTION ...]

Every section runs, even if earlier ones fail; each uses new processes, so that a device that fails in one is
reset in the next. --rehearse uses the CPU instead of the GPU, gloo instead of NCCL, and small sizes.
Exit code 0: something ran and nothing failed; 1: a section failed, or none ran; 2: there is no GPU.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gpu_report import Result, describe_machine, exit_code, render, table, write_report
from gpu_training import (
    COMPARED,
    LAYOUT_LIMIT,
    LIMITS,
    PRECISIONS,
    compare_layout,
    compare_runs,
    find_waits,
    layouts_for,
    run_path,
    train_architectures,
)
from support.corpus import write_corpus
from support.distributed import run_ranks

__all__ = ["SECTIONS", "Check", "main", "run_sections"]

logger = logging.getLogger("gpu-check")

ROOT = Path(__file__).resolve().parents[1]
_LONG, _SHORT = 3600.0, 1200.0
_SHOWN_LINES = 60
_MIB_FOR_LARGE_SHAPE = 60_000
# A rehearsal shows that the code works; other tests go through all of these on the CPU.
_REHEARSED_ARCHITECTURES = COMPARED[1:3]
_REHEARSED_LAYOUTS = ("pipeline 1", "tensor 2")
_NO_GPU = (
    "make gpu-check needs a GPU, and torch finds none here (torch.cuda.is_available() is false). "
    "Install torch for CUDA and look at nvidia-smi, or rehearse on the CPU: REHEARSE=1 make gpu-check\n"
)


@dataclass(frozen=True)
class Check:
    """What a section may use.

    Args:
        rehearses: use the CPU instead of the GPU.
        gpus: how many torch can use.
        memory_mib: of the smallest of them.
        folder: for files that go when the check has ended.
    """

    rehearses: bool
    gpus: int
    memory_mib: int
    folder: Path

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """What ranks communicate over."""
        return "gloo" if self.rehearses else "nccl"

    @property
    def seconds(self) -> float:
        """The longest that one command or training may take."""
        return _SHORT if self.rehearses else _LONG


Section = Callable[[Check], Result]


@dataclass(frozen=True)
class _Done:
    """A command that has ended."""

    command: str
    code: int
    out: str
    err: str

    @property
    def figures(self) -> str:
        """The command and its result."""
        return self._block(self.out)

    @property
    def everything(self) -> str:
        """The same with its errors and its log."""
        return self._block(self.out + self.err)

    def _block(self, text: str) -> str:
        lines = [f"$ {self.command}", *text.strip().splitlines()[-_SHOWN_LINES:], f"exit code {self.code}"]
        return "```\n" + "\n".join(lines) + "\n```"


def _run(check: Check, *argv: str) -> _Done:
    """Run a program of this environment in the repository's root."""
    program = [sys.executable, *argv[1:]] if argv[0] == "python" else [_program(argv[0]), *argv[1:]]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if check.rehearses else {}
    shown = " ".join(argument.replace(f"{check.folder}/", "") for argument in argv)
    try:
        done = subprocess.run(
            program,
            cwd=ROOT,
            env=os.environ | hidden,
            capture_output=True,
            text=True,
            timeout=check.seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Done(shown, 124, "", f"it did not end within {check.seconds:g} s")
    return _Done(shown, done.returncode, done.stdout, done.stderr)


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


# What is marked for a GPU


def gpu_tests(check: Check) -> Result:
    """Run every test marked `gpu`; a rehearsal collects them."""
    files = _files_with_gpu_tests()
    record = check.folder / "gpu-tests.xml"
    options = ["--collect-only"] if check.rehearses else [f"--junitxml={record}"]
    done = _run(check, "python", "-m", "pytest", "-q", "-m", "gpu", *options, *files)
    if check.rehearses:
        found = sum("::" in line for line in done.out.splitlines())
        if done.code or not found:
            return Result("failed", "no test marked gpu can be collected", done.everything)
        return Result("not run", f"tests marked gpu that were collected, and need a GPU: {found}")
    passed, others = _counts(record) if record.exists() else (0, "no test was recorded")
    status: Literal["passed", "failed"] = "passed" if done.code == 0 and passed else "failed"
    return Result(status, f"{passed} passed, {others}", done.everything)


def _files_with_gpu_tests() -> list[str]:
    folders = [ROOT / "tests", *sorted((ROOT / "packages").glob("*/tests"))]
    files = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    marked = [path for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    return [str(path.relative_to(ROOT)) for path in marked]


def _counts(record: Path) -> tuple[int, str]:
    suites = list(ElementTree.parse(record).getroot().iter("testsuite"))
    total = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    failed = total["failures"] + total["errors"]
    return total["tests"] - failed - total["skipped"], f"{failed} failed, {total['skipped']} skipped"


# Kernels


def kernels(check: Check) -> Result:
    """Build the fused operators, compare each with its reference, and run their tests."""
    if check.rehearses:
        commands = [
            _run(check, "neox-kernels", "status"),
            _run(check, "python", "benchmarks/kernels.py", "--rehearse", "--verify"),
        ]
        what = "the operators' CPU forms were compared with their references; no CUDA code ran"
    else:
        commands = [
            _run(check, "neox-kernels", "build"),
            *(_run(check, "neox-kernels", "status", "--dtype", dtype) for dtype in _KERNEL_TYPES),
            _run(
                check, "python", "-m", "pytest", "-q", "-m", "not gpu and not sweep", "packages/neox-kernels"
            ),
        ]
        what = "built; every operator was compared with its reference in three types, and their tests ran"
    wrong = [done for done in commands if done.code or "WRONG" in done.out]
    if wrong:
        details = "\n\n".join(done.everything for done in wrong)
        return Result("failed", f"{len(wrong)} of {len(commands)} commands failed", details)
    details = "\n\n".join(done.figures for done in commands)
    states = [done for done in commands if " status" in done.command]
    if not check.rehearses and not all("correct;" in done.out for done in states):
        return Result("failed", "no fused operator is available on this GPU", details)
    return Result("passed", what, details)


_KERNEL_TYPES = ("float32", "bfloat16", "float16")


# One model on two devices


def devices_agree(check: Check) -> Result:
    """Train architectures in every precision on the CPU and on the GPU, and compare."""
    architectures = _REHEARSED_ARCHITECTURES if check.rehearses else COMPARED
    first = partial(_train_side, check, architectures, side="first", backend="gloo", is_varied=False)
    second = partial(
        _train_side, check, architectures, side="second", backend=check.backend, is_varied=check.rehearses
    )
    with ThreadPoolExecutor(2) as both:
        errors = [running.result() for running in (both.submit(first), both.submit(second))]
    rows, problems = [], [text for side in errors for text in side.values() if text]
    for architecture in architectures:
        for precision in PRECISIONS:
            paths = [run_path(check.folder, architecture, precision, side) for side in ("first", "second")]
            if not all(path.exists() for path in paths):
                rows.append((architecture, precision, *[""] * 4, "no run to compare"))
                continue
            found = compare_runs(*paths)
            exceeded = LIMITS[precision].exceeded_by(found)
            verdict = f"too large: {', '.join(exceeded)} ({found.worst})" if exceeded else "agrees"
            numbers = [f"{value:.1e}" for value in (found.loss, found.ratio, found.angle, found.small)]
            rows.append((architecture, precision, *numbers, verdict))
    return _judged(rows, problems, check)


def _judged(rows: Sequence[tuple[str, ...]], problems: Sequence[str], check: Check) -> Result:
    bad = [row for row in rows if row[-1] != "agrees"]
    pair = "the CPU with and without oneDNN" if check.rehearses else "CPU and GPU"
    head = ("architecture", "precision", "loss", "ratio", "angle", "small", "")
    limits = [
        (f"limit, {name}", "", *(f"{value:.0e}" for value in vars(given).values()), "")
        for name, given in LIMITS.items()
    ]
    details = table(head, [*rows, *limits]) + "\n\n" + _WHAT_IS_COMPARED
    details += "".join(f"\n\n```\n{text.strip()[-4000:]}\n```" for text in problems)
    summary = f"{len(rows) - len(bad)} of {len(rows)} trainings of 20 iterations agree: {pair}"
    return Result("failed" if bad or problems or not rows else "passed", summary, details)


_WHAT_IS_COMPARED = (
    "loss: largest difference of a loss. ratio, angle: the change of each weight, projected on the other "
    "side's: distance from 1, and 1 - cosine. small: the difference of weights that hardly change, "
    "as a share of the largest change."
)


def _train_side(
    check: Check,
    architectures: Sequence[str],
    *,
    side: str,
    backend: Literal["gloo", "nccl"],
    is_varied: bool,
) -> dict[str, str | None]:
    """All trainings of one device; a process for each architecture, but one for all in a rehearsal."""
    groups = [list(architectures)] if check.rehearses else [[name] for name in architectures]
    errors: dict[str, str | None] = {}
    for names in groups:
        try:
            [found] = run_ranks(
                train_architectures,
                size=1,
                backend=backend,
                timeout_seconds=check.seconds,
                architectures=names,
                precisions=list(PRECISIONS),
                folder=str(check.folder),
                side=side,
                is_varied=is_varied,
            )
        except AssertionError as error:
            found = {f"{', '.join(names)} on the {side} device": str(error)}
        errors |= found
    return errors


# Layouts


def layouts_agree(check: Check) -> Result:
    """Train on every layout that fits the GPUs, and compare with one rank."""
    names = _REHEARSED_LAYOUTS if check.rehearses else tuple(layouts_for(check.gpus))
    available = layouts_for(2 if check.rehearses else check.gpus)
    rows, problems = [], []
    run = partial(run_ranks, backend=check.backend, timeout_seconds=check.seconds)
    references: dict[tuple[str, bool], list[float]] = {}
    for number, name in enumerate(names):
        architecture, layout = COMPARED[number % len(COMPARED)], available[name]
        try:
            loss, weight = compare_layout(architecture, name, run, check.folder, references)
            # Written so that NaN does not agree.
            agrees = loss <= LAYOUT_LIMIT and weight <= LAYOUT_LIMIT
            numbers = (f"{loss:.1e}", f"{weight:.1e}")
            rows.append((name, str(layout.ranks), architecture, *numbers, "agrees" if agrees else "too far"))
        except AssertionError as error:
            problems.append(str(error))
            rows.append((name, str(layout.ranks), architecture, "", "", "failed"))
    bad = [row for row in rows if row[-1] != "agrees"]
    head = ("layout", "ranks", "architecture", "loss", "weight", "")
    details = table(head, rows) + f"\n\nLargest differences from one rank; limit {LAYOUT_LIMIT:g}, float32."
    details += "".join(f"\n\n```\n{text.strip()[-4000:]}\n```" for text in problems)
    where = f"over {check.backend}" + ("" if check.rehearses else f" on {check.gpus} GPUs")
    summary = f"{len(rows) - len(bad)} of {len(rows)} layouts train the model of one rank {where}"
    return Result("failed" if bad or not rows else "passed", summary, details)


# Resuming


def resumes_exactly(check: Check) -> Result:
    """Compare a resumed run with an uninterrupted one, to the last bit, compiled and not."""
    corpus, settings = write_corpus(check.folder), check.folder / "resume.yml"
    precision = "fp32" if check.rehearses else "bfloat16"
    settings.write_text(json.dumps(_RESUMED | {"data-path": corpus, "precision": precision}))
    script = ("neox-launch", "verify-resume", "--config", str(settings), "--work-dir", str(check.folder))
    compiles = ("false",) if check.rehearses else ("false", "true")
    commands = [_run(check, *script, "--steps", "5", "--set", f"compile={value}") for value in compiles]
    return _timed(commands, "the last bit agrees", lambda done: done.code != 0, check)


# Wide enough for the compiler's and the attention's usual kernels.
_RESUMED: dict[str, Any] = {
    "deterministic": True,
    "split": "100,0,0",
    "tokenizer-type": "CharLevelTokenizer",
    "num-layers": 2,
    "hidden-size": 128,
    "num-attention-heads": 2,
    "seq-length": 64,
    "max-position-embeddings": 64,
    "pos-emb": "rotary",
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "train-micro-batch-size-per-gpu": 4,
    "train-iters": 20,
    "eval-iters": 0,
    "num-gpus": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    **dict.fromkeys(("rope-fusion", "bias-gelu-fusion", "layernorm-fusion", "bias-dropout-fusion"), "auto"),
}


# Waiting


def steps_do_not_wait(check: Check) -> Result:
    """Train with torch's warning about every synchronization of the host with the device."""
    if check.rehearses:
        return Result("not run", "a CPU does not wait for itself")
    options = {"architectures": list(COMPARED), "precisions": ["bf16"]}
    [waits] = run_ranks(find_waits, size=1, backend=check.backend, timeout_seconds=check.seconds, **options)
    rows = [(name, ", ".join(places) or "none") for name, places in waits.items()]
    bad = [name for name, places in waits.items() if places]
    summary = f"{len(rows) - len(bad)} of {len(rows)} trainings never wait for the device within 5 iterations"
    return Result("failed" if bad or not rows else "passed", summary, table(("training", "waits in"), rows))


# Speed


def training_speed(check: Check) -> Result:
    """Time a training step against its peers; a contender that fails is a failure."""
    script = ("python", "benchmarks/train.py", "--rounds", "1")
    if check.rehearses:
        small = ("--shape", "tiny", "--device", "cpu", "--steps", "6", "--threads", "1")
        commands = [_run(check, *script, *small, "--only", "plain/fp32", "ours/fp32")]
    else:
        commands = [_run(check, *script, "--shape", "125M", "--device", "cuda")]
        if check.memory_mib >= _MIB_FOR_LARGE_SHAPE:
            commands.append(_run(check, *script, "--shape", "1.3B", "--device", "cuda"))
    return _timed(commands, "timed", lambda done: done.code != 0 or ": failed" in done.err, check)


def kernel_speed(check: Check) -> Result:
    """Time every fused operator against PyTorch."""
    options = ("--rehearse",) if check.rehearses else ()
    done = _run(check, "python", "benchmarks/kernels.py", *options, "--time")
    return _timed([done], "timed", lambda found: found.code != 0 or "| forward |" not in found.out, check)


def _timed(commands: Sequence[_Done], what: str, has_failed: Callable[[_Done], bool], check: Check) -> Result:
    failed = [done for done in commands if has_failed(done)]
    details = "\n\n".join(done.everything if done in failed else done.figures for done in commands)
    if failed:
        return Result("failed", f"{len(failed)} of {len(commands)} commands failed", details)
    note = "; figures of a rehearsal mean nothing" if check.rehearses else ""
    return Result(
        "passed", f"{what} by {len(commands)} command{'s' if len(commands) > 1 else ''}{note}", details
    )


SECTIONS: Mapping[str, Section] = {
    "Tests marked gpu": gpu_tests,
    "Kernels": kernels,
    "CPU and GPU train alike": devices_agree,
    "Layouts": layouts_agree,
    "Resume": resumes_exactly,
    "Waiting": steps_do_not_wait,
    "Training speed": training_speed,
    "Kernel speed": kernel_speed,
}


def run_sections(
    sections: Mapping[str, Section], check: Check, *, report: Path, machine: Mapping[str, str]
) -> int:
    """Run all sections, whatever becomes of each; write the report after each; give the exit code."""
    results: dict[str, Result] = {}
    # Nothing is measured in a rehearsal: two sections at a time.
    with ThreadPoolExecutor(2 if check.rehearses else 1) as workers:
        running = {
            name: workers.submit(_run_section, name, section, check) for name, section in sections.items()
        }
        for name, future in running.items():
            results[name] = future.result()
            text = render(results, machine, sections=list(sections), rehearses=check.rehearses)
            write_report(report, text)
    return exit_code(results)


def _run_section(name: str, section: Section, check: Check) -> Result:
    logger.info("%s ...", name)
    began = time.monotonic()
    try:
        found = section(check)
    except Exception:
        trace = f"```\n{traceback.format_exc()}```"
        found = Result("failed", "the check itself ended with an error", trace)
    logger.info("%s: %s, %s", name, found.status, found.summary)
    return replace(found, seconds=time.monotonic() - began)


def _count_gpus() -> tuple[int, int]:
    """How many torch can use, and the memory of the smallest in MiB; asked in another process."""
    code = (
        "import torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
        "print(n, min([torch.cuda.get_device_properties(i).total_memory >> 20 for i in range(n)], default=0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, memory = done.stdout.split()
    return int(count), int(memory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU all that can run there")
    parser.add_argument("--report", type=Path, help="the file to write")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"some of: {', '.join(SECTIONS)}"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    gpus, memory = (0, 0) if options.rehearse else _count_gpus()
    if not options.rehearse and gpus == 0:
        sys.stderr.write(_NO_GPU)
        return 2
    report = options.report or Path("gpu-check-rehearsal.md" if options.rehearse else "gpu-check.md")
    sections = {name: SECTIONS[name] for name in options.only or SECTIONS}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        check = Check(rehearses=options.rehearse, gpus=gpus, memory_mib=memory, folder=Path(folder))
        code = run_sections(sections, check, report=report, machine=describe_machine(ROOT))
    verdict = "passed" if code == 0 else "FAILED"
    logger.info("%s: %s; the report is %s", "rehearsal" if options.rehearse else "gpu-check", verdict, report)
    return code


if __name__ == "__main__":
    sys.exit(main())
