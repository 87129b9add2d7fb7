"""`make gpu-minutes`: the measurements that answer the most, in under nine minutes on one GPU.

    python tools/gpu_minutes.py [--rehearse] [--output FOLDER] [--only PART ...]

Every part is a process with a time limit, the most valuable first; one that fails, hangs or crashes is a row
of the report, costs its own time, and keeps what it had measured. The report is rewritten after every part.
FOLDER gets report.md (one table, each figure with the expected one), report.json (with versions, power and
clocks), log.txt, power.csv and traces. --rehearse runs every part on the CPU at tiny sizes.

If `make gpu-minutes-prepare` made the folder .gpu-minutes for this Python, its packages are used, so that
nothing has to be installed or compiled. Needs the standard library alone; the parts need torch.
Exit code 0: nothing failed; 1: something did; 2: there is no GPU, .gpu-minutes is damaged or of other
sources, or FOLDER cannot be written.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from zipfile import BadZipFile

from gpu_parts import PARTS, NotHereError, Part, Row, Run

__all__ = ["main", "run_parts"]

ROOT = Path(__file__).resolve().parents[1]
PREPARED = ROOT / ".gpu-minutes"
# Every process of a part inherits it, so that those which leave its session are found and ended, too.
MARK = "NEOX_GPU_MINUTES_PART"
_MARK_OF_RUN = f"{os.getpid()}-"
LIMIT_SECONDS = 540.0
# A rehearsal is for the code: its parts have the time of a busy machine, two at once.
_REHEARSAL_SECONDS, _REHEARSED_AT_A_TIME = 300.0, 2
_SAMPLE_MILLISECONDS = 500
# "clocks_event_reasons.active" is a set of bits; this one is the power limit.
_POWER_LIMITS = 0x4
_SAMPLED = ("power.draw", "clocks.sm", "clocks.mem", "temperature.gpu", "clocks_event_reasons.active")


@dataclass
class Result:
    """What a part left."""

    title: str
    answers: str
    outcome: str
    seconds: float
    rows: list[Row]
    power: dict[str, float] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether the part or one of its measurements failed."""
        return self.outcome not in ("done", "not run") or any(row.has_failed for row in self.rows)


# Processes --------------------------------------------------------------------------------------------------


def run_part(name: str, part: Part, run: Run, limit: float) -> Result:
    """Run a part in its own process for at most these seconds, and read what it left, however it ended."""
    file, log = run.work / f"{name}.json", run.work / f"{name}.log"
    try:
        command = part.command(run, file)
    except NotHereError as reason:
        return _not_run(part, str(reason))
    except OSError as error:
        return Result(part.title, part.answers, str(error), 0.0, [Row(part.title, note=f"FAILED: {error}")])
    began = time.monotonic()
    variables = {**run.environment, **part.environment, MARK: f"{_MARK_OF_RUN}{name}"}
    outcome = _run_process([sys.executable, *command], log, limit, variables)
    seconds = time.monotonic() - began
    output = log.read_text(encoding="utf-8", errors="replace")
    rows: list[Row] = []
    try:
        rows = part.read(file, output)
    except (OSError, ValueError, LookupError, TypeError) as error:
        if outcome == "done":
            outcome = f"left no figures ({type(error).__name__}: {error})"
    if outcome == "done" and not rows:
        outcome = "left no figures"
    if outcome != "done" and not any(row.has_failed for row in rows):
        rows.append(Row(part.title, note=f"FAILED: {outcome}; {_last_line(output)}"))
    return Result(part.title, part.answers, outcome, seconds, rows)


def _not_run(part: Part, reason: str) -> Result:
    return Result(part.title, part.answers, "not run", 0.0, [Row(part.title, note=f"not measured: {reason}")])


def _run_process(command: Sequence[str], log: Path, limit: float, variables: Mapping[str, str]) -> str:
    """Run a command until it ends or its time is up, and end all that it started; return how it ended."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"did not end within {limit:.0f} s"
        finally:
            _end_processes(f"{variables[MARK]}\0")
            process.wait()
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return "done" if code == 0 else f"ended with exit code {code}"


def _end_processes(mark: str) -> None:
    """Kill all processes whose mark begins so, until none is left."""
    needle = f"\0{MARK}={mark}".encode()
    for _ in range(50):
        found = [pid for pid in _process_ids() if needle in _environment_of(pid)]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _process_ids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _environment_of(pid: int) -> bytes:
    # A process that ended, or of another user, has none to read; a zombie's is empty.
    with suppress(OSError):
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


class Sampler:
    """Reads power and clocks of the first GPU in the background; without nvidia-smi it has no samples."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None
        with suppress(OSError):
            self._process = subprocess.Popen(
                [
                    "nvidia-smi",
                    "--id=0",
                    f"--query-gpu={','.join(_SAMPLED)}",
                    "--format=csv,noheader,nounits",
                    f"--loop-ms={_SAMPLE_MILLISECONDS}",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):  # "[N/A]" on cards that do not report it.
                values = [text.strip() for text in line.split(",")]
                numbers = [int(text, 16) if text.startswith("0x") else float(text) for text in values]
                if len(numbers) == len(_SAMPLED):
                    self._samples.append((time.monotonic(), numbers))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Return means and extremes of the samples in a time; none if there are no samples."""
        inside = [values for moment, values in self._samples if begin <= moment <= end]
        if not inside:
            return {}
        power, clock, _, temperature, reasons = zip(*inside, strict=True)
        limited = sum(bool(int(bits) & _POWER_LIMITS) for bits in reasons) / len(inside)
        return {
            "mean_watts": statistics.mean(power),
            "max_watts": max(power),
            "median_sm_mhz": statistics.median(clock),
            "min_sm_mhz": min(clock),
            "max_celsius": max(temperature),
            "share_limited_by_power": limited,
        }

    def write(self, path: Path) -> None:
        """Write all samples, if there are any."""
        if self._samples:
            began = self._samples[0][0]
            lines = [
                ",".join([f"{moment - began:.2f}", *(f"{value:g}" for value in values)])
                for moment, values in list(self._samples)
            ]
            _write(path, "\n".join([",".join(("seconds", *_SAMPLED)), *lines]) + "\n")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


# The run ----------------------------------------------------------------------------------------------------


def run_parts(parts: Mapping[str, Part], run: Run) -> int:
    """Run all parts, write the report after each, and return the exit code."""
    began, sampler = time.monotonic(), Sampler()
    results: dict[str, Result] = {}
    log = run.output / "log.txt"
    has_report = True

    def one(name: str, part: Part) -> Result:
        start = time.monotonic()
        left = _REHEARSAL_SECONDS if run.rehearses else deadlines[name] - (start - began)
        if part.is_extra and left < part.seconds:
            return _not_run(part, f"{left:.0f} s were left, and it takes up to {part.seconds:g} s")
        result = run_part(name, part, run, left)
        result.power = sampler.between(start, time.monotonic())
        return result

    deadlines = _deadlines(parts)
    pool = ThreadPoolExecutor(_REHEARSED_AT_A_TIME if run.rehearses else 1)
    running = {name: pool.submit(one, name, part) for name, part in parts.items()}
    try:
        for number, (name, future) in enumerate(running.items(), start=1):
            results[name] = result = future.result()
            _show(
                f"{number} of {len(parts)}, {result.title}: {result.outcome}, {result.seconds:.0f} s, "
                f"{sum(row.value is not None for row in result.rows)} figures"
            )
            try:
                _append_log(log, name, run)
                _report(results, parts, run, sampler, time.monotonic() - began)
                has_report = True
            except OSError as error:
                has_report = False
                _show(
                    f"the report cannot be written ({error}); the table of all figures is printed at the end"
                )
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in running.values()):
            _end_processes(_MARK_OF_RUN)
            time.sleep(0.1)
        _show(f"interrupted: the report in {run.output} has {len(results)} of {len(parts)} parts")
        return 1
    finally:
        sampler.close()
    _show("\n" + table(results.values()))
    failed = [result.title for result in results.values() if result.has_failed]
    where = f"the report is {run.output / 'report.md'}" if has_report else "FAILED: there is no whole report"
    _show(f"\n{time.monotonic() - began:.0f} s; {where}")
    if failed:
        _show(f"FAILED: {', '.join(failed)}; the output of each is in {log}")
    return 1 if failed or not has_report else 0


def _deadlines(parts: Mapping[str, Part]) -> dict[str, float]:
    """Return the seconds after which each part must have ended: it also has what those before it left."""
    deadlines: dict[str, float] = {}
    total = 0.0
    for name, part in parts.items():
        total = LIMIT_SECONDS if part.is_extra else total + part.seconds
        deadlines[name] = total
    return deadlines


def _append_log(log: Path, name: str, run: Run) -> None:
    output = run.work / f"{name}.log"
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"==== {name}\n{text}\n")


def table(results: Iterable[Result]) -> str:
    """Return all figures as one Markdown table."""
    lines = ["| figure | measured | expected | note |", "| --- | --: | --: | --- |"]
    for result in results:
        power = _power_of(result)
        lines.append(f"| **{result.title}** ({result.seconds:.0f} s) | | | {power} |")
        for row in result.rows:
            cells = (row.name, _shown(row), row.expected, row.note)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def _shown(row: Row) -> str:
    if row.value is None:
        return ""
    if isinstance(row.value, str):
        return f"{row.value} {row.unit}".strip()
    size = abs(row.value)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 4
    number = f"{row.value:,.{digits}f}" if size >= 1e-3 or size == 0 else f"{row.value:.1e}"
    return f"{number} {row.unit}".strip()


def _power_of(result: Result) -> str:
    if not result.power:
        return ""
    return (
        "{mean_watts:.0f} W, at most {max_watts:.0f} W; {median_sm_mhz:.0f} MHz, at least {min_sm_mhz:.0f} "
        "MHz; {share_limited_by_power:.0%} of the time limited by power"
    ).format(**result.power)


def _report(
    results: Mapping[str, Result], parts: Mapping[str, Part], run: Run, sampler: Sampler, seconds: float
) -> None:
    """Write report.md, report.json and power.csv."""
    missing = [part.title for name, part in parts.items() if name not in results]
    title = "GPU minutes: rehearsal on the CPU" if run.rehearses else "GPU minutes"
    lines = [f"# {title}", ""]
    if run.rehearses:
        lines += ["The figures mean nothing: no GPU was used, and all sizes are tiny.", ""]
    lines += [f"{len(results)} of {len(parts)} parts in {seconds:.0f} s."]
    lines += [f"Not ended: {', '.join(missing)}."] if missing else []
    lines += ["", table(results.values()), "", "## What each part answers", ""]
    lines += [f"- {result.title}: {result.answers} ({result.outcome})" for result in results.values()]
    _write(run.output / "report.md", "\n".join(lines) + "\n")
    record = {
        "rehearses": run.rehearses,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": seconds,
        "parts": {name: asdict(result) for name, result in results.items()},
    }
    _write(run.output / "report.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    sampler.write(run.output / "power.csv")


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _commit() -> str:
    try:
        asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# The environment --------------------------------------------------------------------------------------------


def sources_digest() -> str:
    """Return a digest of the packages' sources, by which a preparation is known to be of them."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.glob("packages/*/src/**/*")):
        # Not what an installation adds.
        if path.is_file() and path.suffix not in (".so", ".pyc") and ".egg-info" not in str(path):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def unpack_prepared(work: Path) -> Path | None:
    """Unpack the packages of .gpu-minutes, and return where; None if there are none for this Python.

    Raises:
        SystemExit: they were made from other sources, or are damaged.
    """
    record = PREPARED / "prepared.json"
    if not record.is_file():
        return None
    try:
        return _unpack(record, work / "site")
    except (OSError, ValueError, LookupError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        sys.stderr.write(
            f".gpu-minutes is damaged ({error}): copy it again, or run make gpu-minutes-prepare again\n"
        )
        raise SystemExit(2) from None


def _unpack(record: Path, site: Path) -> Path | None:
    prepared = json.loads(record.read_text(encoding="utf-8"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if prepared["python"] != version:
        _show(f".gpu-minutes is for Python {prepared['python']} and not used: this is Python {version}")
        return None
    if prepared["digest"] != sources_digest():
        sys.stderr.write(".gpu-minutes was made from other sources: run make gpu-minutes-prepare again\n")
        raise SystemExit(2)
    for wheel in prepared["wheels"]:
        shutil.unpack_archive(PREPARED / "wheels" / wheel, site, format="zip")
    return site


def environment(site: Path | None, work: Path, *, rehearses: bool) -> dict[str, str]:
    """Return the variables of all parts: where packages and scripts are, and one cache of the compiler."""
    paths = [*(str(ROOT / name) for name in ("benchmarks", "tests", "tools")), *([str(site)] if site else [])]
    paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "TRITON_CACHE_DIR": str(work / "triton"),
    }
    if rehearses:
        return variables | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(min(16, os.cpu_count() or 1))} | variables


def _compile_kernels(variables: Mapping[str, str]) -> None:
    """Compile the fused operators for this GPU, unless they are compiled, before the parts begin."""
    _show("compiling the fused operators unless they are compiled: minutes, once")
    code = "from neox_kernels.cli import main; main(['build', '--quiet'])"
    # If it fails, the first part says so.
    subprocess.run([sys.executable, "-c", code], env=dict(variables), check=False)


def _has_gpu(variables: Mapping[str, str]) -> bool:
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], env=dict(variables), check=False).returncode == 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gpu-minutes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="run every part on the CPU, at tiny sizes")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: gpu-minutes")
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.digest:
        _show(sources_digest())
        return 0
    output = options.output or ROOT / ("gpu-minutes-rehearsal" if options.rehearse else "gpu-minutes")
    try:
        (output / "traces").mkdir(parents=True, exist_ok=True)
        (output / "log.txt").write_text("", encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"the folder of the report cannot be written: {error}\n")
        return 2
    # What is ignored, as under nohup, stays so.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _stop)
    with tempfile.TemporaryDirectory(prefix="gpu-minutes-") as folder:
        work = Path(folder)
        site = unpack_prepared(work)
        variables = environment(site, work, rehearses=options.rehearse)
        if not options.rehearse and not _has_gpu(variables):
            sys.stderr.write(
                f"there is no GPU that the torch of {sys.executable} can use; "
                "rehearse on the CPU: REHEARSE=1 make gpu-minutes\n"
            )
            return 2
        if site is None and not options.rehearse:
            _compile_kernels(variables)
        run = Run(rehearses=options.rehearse, output=output.absolute(), work=work, environment=variables)
        return run_parts({name: parts[name] for name in options.only or parts}, run)


if __name__ == "__main__":
    sys.exit(main())
