"""`neox-launch verify-resume`: runs the runs, compares them and prints the verdict."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from neox_config import NeoXConfig, Resolved
from neox_config.derive.problems import refusal
from neox_config.errors import LaunchError, NeoXError
from neox_config.facts.checkpoints import MANIFEST, complete_checkpoints
from neox_config.problems import Problem
from neox_launcher.controller.dry_run import Form, show_plan
from neox_launcher.controller.launch import refuse_what_cannot_run, run_plan
from neox_launcher.controller.terminal import print_message
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.protocol.exit_codes import SIGNALLED
from neox_launcher.protocol.kept_checkpoints import KeptCheckpoint, latest_kept
from neox_launcher.protocol.outcome import Outcome
from neox_launcher.protocol.stop_signals import handling, signals_blocked
from neox_launcher.protocol.verification import Answer, Comparison
from neox_launcher.verify_resume.phases import (
    Phase,
    Span,
    comparison_plan,
    phases_of,
    side_of,
    titles,
)
from neox_launcher.verify_resume.report import render_answer

__all__ = ["VerifyRequest", "verify_resume"]

_DIFFERENT = 1
# Handled here only between runs; while a training runs, its launch handles them.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# From the finest rounding to the coarsest.
_PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """The options of `verify-resume`.

    Args:
        steps: iterations before and after the interruption.
        resume_set: settings as `name=value` for the resumed run only.
        work_dir: folder for temporary files; None for the default.
        keep: do not remove the temporary files.
        evaluate: evaluate as configured.
    """

    steps: int
    resume_set: tuple[str, ...] = ()
    work_dir: str | None = None
    keep: bool = False
    evaluate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The runs to run and compare."""

    plan: LaunchPlan
    resumed: LaunchPlan
    span: Span
    source: KeptCheckpoint | None
    rounding: str | None
    same_sizes: bool

    @property
    def config(self) -> NeoXConfig:
        return self.plan.resolved.config


class _StoppedError(Exception):
    """A run failed or was stopped, with its outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.exit_code)
        self.outcome = outcome


def verify_resume(
    request: Request,
    plan: LaunchPlan,
    wanted: VerifyRequest,
    *,
    dry_run: Form | None,
    run: Callable[[LaunchPlan], Outcome] = run_plan,
) -> Outcome:
    """Train, interrupt, resume and compare; print the table and the verdict.

    Args:
        request: common options of the command line.
        plan: plan of the run.
        wanted: options of `verify-resume`.
        dry_run: only print what would be done.
        run: runs one plan.

    Returns:
        The outcome. Its exit code is 0 only if everything agrees; a failed run determines its own.

    Raises:
        NeoXError: the request is invalid, or a run cannot be started.
    """
    job = _plan_job(request, plan, wanted)
    if dry_run is not None:
        return _show(job, dry_run)
    refuse_what_cannot_run(job.plan)
    if job.resumed is not job.plan:
        # Its checkpoint exists only after the previous runs.
        checkpoint = job.resumed.resolved.config.checkpoint.replaced(load=None, finetune=False)
        resolved = job.resumed.resolved.replaced(checkpoint=checkpoint)
        refuse_what_cannot_run(replace(job.resumed, resolved=resolved))
    try:
        with _stopping_on_signals(), _work_folder(job, wanted) as folder:
            return _carry_out(job, folder, wanted, run)
    except _StoppedError as stop:
        return stop.outcome


def _plan_job(request: Request, plan: LaunchPlan, wanted: VerifyRequest) -> _Job:
    resumed = plan
    if wanted.resume_set:
        resumed = plan_launch(replace(request, resume_overrides=wanted.resume_set))
    _refuse_another_training(plan, resumed)
    _refuse_incomplete_checkpoints(plan.resolved.config)
    source, span = _new_span(plan.resolved, wanted)
    same_sizes = _sizes(resumed) == _sizes(plan)
    has_changed = bool(wanted.resume_set) or not same_sizes
    precisions = {plan.resolved.run.precision.computes_in, resumed.resolved.run.precision.computes_in}
    if not same_sizes:
        _refuse_dropout(resumed.resolved.config)
    return _Job(
        plan=plan,
        resumed=resumed,
        span=span,
        source=source,
        rounding=max(precisions, key=_PRECISIONS.index) if has_changed else None,
        same_sizes=same_sizes,
    )


def _new_span(resolved: Resolved, wanted: VerifyRequest) -> tuple[KeptCheckpoint | None, Span]:
    config = resolved.config
    source = latest_kept(config.checkpoint.load)
    start = 0 if source is None or config.checkpoint.finetune else source.iteration
    left = config.training.iterations - start
    if left < 2 * wanted.steps:
        after = f" after {source.path.name}" if source is not None and start else ""
        fitting = f"give at most --steps {left // 2}, or " if left > 1 else ""
        raise LaunchError(
            f"--steps {wanted.steps:,} trains {2 * wanted.steps:,} iterations, but train-iters leaves only "
            f"{left:,}{after}: {fitting}set a larger train-iters (--set train-iters=...)"
        )
    return source, Span(start=start, middle=start + wanted.steps, end=start + 2 * wanted.steps)


def _refuse_another_training(plan: LaunchPlan, resumed: LaunchPlan) -> None:
    """Require that the resumed run reads the same samples in the same steps."""
    one, other = plan.resolved, resumed.resolved
    for name, before, after in (
        ("train-batch-size", one.run.batch.whole, other.run.batch.whole),
        ("train-iters", one.config.training.iterations, other.config.training.iterations),
        ("seq-length", one.config.model.seq_length, other.config.model.seq_length),
    ):
        if before != after:
            raise LaunchError(
                f"--resume-set changes {name} from {before:,} to {after:,}, so that no step equals one of "
                f"the uninterrupted run; keep the value, for example with --resume-set {name}={before}"
            )


def _refuse_incomplete_checkpoints(config: NeoXConfig) -> None:
    differs = "from checkpoints, so no resumed run equals an uninterrupted one"
    local = "leaves no host with a whole checkpoint, which verify-resume compares in a folder that all share"
    reasons = {
        "no_save_optim": (f"omits the optimizer states {differs}", "to verify everything else"),
        "no_save_rng": (f"omits the random states {differs}", "to verify everything else"),
        "checkpoint.use_node_local_storage": (local, "and --work-dir with a shared folder"),
    }
    for name, (what, more) in reasons.items():
        if config.value_of(name):
            remedy = f"add --set {name if '.' in name else name.replace('_', '-')}=false {more}"
            raise refusal(config, Problem(name, what, remedy))


def _refuse_dropout(config: NeoXConfig) -> None:
    """Refuse dropout with another layout, where random states are reset and dropout masks differ."""
    if config.model.hidden_dropout or config.model.attention_dropout:
        raise LaunchError(
            "with another layout dropout uses other random numbers, so no loss would agree; add --set "
            "hidden-dropout=0 --set attention-dropout=0 to verify everything else"
        )


def _sizes(plan: LaunchPlan) -> tuple[int, int, int]:
    layout = plan.resolved.run.layout
    return layout.data, layout.tensor, layout.stages


def _show(job: _Job, form: Form) -> Outcome:
    if form == "text":
        for number, title in enumerate(titles(job.span, job.source), 1):
            click.echo(f"training {number}: {title}")
        click.echo("")
    # The runs are shown as plain lines, whatever `terminal` requests.
    config = job.config.model_copy(update={"launch": job.config.launch.replaced(terminal="plain")})
    shown = replace(job.plan, resolved=replace(job.plan.resolved, config=config))
    return Outcome(exit_code=show_plan(shown, form))


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """Raise `_StoppedError` on signals that would end the process, so that the folder is removed."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _StoppedError(Outcome(exit_code=SIGNALLED + number, was_stopped=True))

    with handling(stop, *_ENDING_SIGNALS):
        yield


@contextmanager
def _work_folder(job: _Job, wanted: VerifyRequest) -> Iterator[Path]:
    """Create a folder for all files, and remove it at the end.

    Raises:
        LaunchError: it cannot be created.
    """
    parent = _parent_folder(job.config, wanted.work_dir)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".verify-resume-", dir=parent)).absolute()
    except OSError as error:
        raise LaunchError(
            f"cannot create a temporary folder in {parent}: {error.strerror}; set another one with --work-dir"
        ) from error
    try:
        yield folder
    finally:
        if wanted.keep:
            print_message(f"temporary files are kept in {folder}\n")
        else:
            with signals_blocked(_ENDING_SIGNALS):
                shutil.rmtree(folder, ignore_errors=True)


def _parent_folder(config: NeoXConfig, work_dir: str | None) -> Path:
    """Return the parent of the work folder: `save` or its nearest existing parent, which all hosts share."""
    if work_dir is not None:
        if not os.path.isdir(work_dir):
            raise LaunchError(f"--work-dir {work_dir} is not a folder; create it, or choose another")
        return Path(work_dir)
    if config.checkpoint.save is None:
        return Path(tempfile.gettempdir())
    folder = Path(config.checkpoint.save).absolute()
    while not os.path.isdir(folder):
        folder = folder.parent
    return folder


def _carry_out(
    job: _Job, folder: Path, wanted: VerifyRequest, run: Callable[[LaunchPlan], Outcome]
) -> Outcome:
    """Train and compare. A resumed run that fails is compared until then, since it may show the cause.

    Raises:
        _StoppedError: a run failed before there was something to compare, or was stopped.
    """
    settings: dict[str, Any] = {"span": job.span, "folder": folder, "evaluates": wanted.evaluate}
    phases = list(phases_of(job.plan, job.resumed, source=job.source, **settings))
    resumed = _train(phases, run)
    print_message("\ncomparing\n")
    answer = _compare(job, folder, run)
    click.echo(render_answer(answer, is_complete=not resumed.exit_code))
    if resumed.exit_code:
        return resumed
    return Outcome(exit_code=_DIFFERENT if answer.first else 0)


def _compare(job: _Job, folder: Path, run: Callable[[LaunchPlan], Outcome]) -> Answer:
    outcome = run(comparison_plan(job.plan, _comparison(job, folder)))
    if outcome.exit_code or outcome.was_stopped:
        raise _StoppedError(outcome)
    try:
        return Answer.from_facts(outcome.facts[0])
    except KeyError as error:
        raise NeoXError("the comparing worker ended without a result; see its output above") from error


def _train(phases: list[Phase], run: Callable[[LaunchPlan], Outcome]) -> Outcome:
    """Run the runs one after the other.

    Returns:
        The outcome of the last one, which may have failed after it had restored the checkpoint.

    Raises:
        _StoppedError: a run failed before that, or was stopped.
        NeoXError: a run ended too early with exit code 0.
    """
    outcome = Outcome(exit_code=0)
    for number, phase in enumerate(phases, 1):
        print_message(f"\ntraining {number} of {len(phases)}: {phase.title}\n")
        started = time.monotonic()
        outcome = run(phase.plan)
        has_restored = phase is phases[-1] and bool(complete_checkpoints(phase.folder / "middle"))
        if outcome.was_stopped or (outcome.exit_code and not has_restored):
            raise _StoppedError(outcome)
        name = f"training {number} of {len(phases)}"
        if not outcome.exit_code and not (phase.end / MANIFEST).is_file():
            # Workers that a signal stops end early with exit code 0.
            raise NeoXError(
                f"{name} ended before iteration {phase.last:,}: {phase.end} does not exist. Its workers may "
                "have received SIGUSR1 or SIGTERM, or the folder is not shared by all hosts (set another one "
                "with --work-dir); see the output above, and run the command again",
                code="ended-early",
            )
        ended = "failed" if outcome.exit_code else "ended"
        print_message(f"{name} {ended} after {time.monotonic() - started:.0f} s\n")
    return outcome


def _comparison(job: _Job, folder: Path) -> Comparison:
    span = job.span
    return Comparison(
        expected=side_of(folder / "uninterrupted", span, last=span.end),
        interrupted=side_of(folder / "interrupted", span, last=span.middle, has_middle=False),
        resumed=side_of(folder / "resumed", span, last=span.end),
        start=span.start,
        middle=span.middle,
        end=span.end,
        samples=job.plan.resolved.run.batch.whole,
        rounding=job.rounding,
        same_sizes=job.same_sizes,
    )
