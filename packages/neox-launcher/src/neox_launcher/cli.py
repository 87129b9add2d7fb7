"""`neox-launch`: options -> checked plan -> running workers, or the plan in print."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import click

from neox_launcher.autotuning import is_tuned, tune
from neox_launcher.config.problems import list_problems
from neox_launcher.doctor import examine_hosts
from neox_launcher.dry_run import Form, show_plan
from neox_launcher.errors import NeoXError
from neox_launcher.launch import Request, plan_launch, refuse_what_cannot_run, run_plan
from neox_launcher.plan import LaunchPlan
from neox_launcher.resources.world import slow_without_gpus
from neox_launcher.stop_signals import warning_blocked
from neox_launcher.supervision import Outcome
from neox_launcher.verify_resume.verify import VerifyRequest, verify_resume

__all__ = ["main"]

_DRY_RUN = "--dry-run"
DryRun = Form | None


class _Launch(click.Group):
    """A group whose `--dry-run` may stand alone, before a subcommand too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell out what a bare `--dry-run` means; click would take the next word for its value."""
        return super().parse_args(ctx, [f"{_DRY_RUN}=text" if word == _DRY_RUN else word for word in args])


def request_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every launch has."""
    options = (
        click.option(
            "--config", "paths", multiple=True, metavar="FILE", help="YAML file; several are merged."
        ),
        click.option("-d", "--directory", metavar="DIR", help="Folder of the files."),
        click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Set one parameter."),
        click.option(
            _DRY_RUN,
            type=click.Choice(["text", "json"]),
            help="Print what would run where, and the commands; start nothing and touch no host. "
            "Alone it means text. Exit code 2 where it would not start.",
        ),
        click.option("--bind-cores", is_flag=True, help="Tie each worker to its share of its host's cores."),
        click.option(
            "--max-restarts",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Begin again so often from the newest checkpoint after a failure.",
        ),
        click.option(
            "--output",
            type=click.Choice(["rank0", "all"]),
            default="rank0",
            show_default=True,
            help="Whose output the terminal shows.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(
    cls=_Launch, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@request_options
@click.pass_context
def main(context: click.Context, /, dry_run: DryRun, **options: Any) -> None:
    """Train a model: neox-launch --config FILE [--config FILE ...].

    Ctrl-C, SIGTERM and SIGUSR1 (Slurm's --signal) ask the workers to finish the iteration, save a checkpoint
    and stop. A second Ctrl-C or SIGTERM stops at once; SIGUSR1 may be repeated.

    Exit codes: 0 done; 1 the work failed; 2 the request was wrong and nothing was started; 130, 143, 129 or
    138 stopped by Ctrl-C, SIGTERM, a lost connection or SIGUSR1; else that of the worker that failed first.
    """
    request = Request(program="train", **options)
    context.obj = (request, dry_run)
    if context.invoked_subcommand is None:
        _launch(request, dry_run)


@main.command()
@request_options
@click.pass_obj
def generate(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Generate text with the checkpoint in `load`."""
    _launch(*_merged(common, "generate", **options))


@main.command()
@request_options
@click.pass_obj
def evaluate(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Print the validation and test loss of the checkpoint in `load`."""
    _launch(*_merged(common, "evaluate", **options))


@main.command()
@request_options
@click.pass_obj
def doctor(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Look at all hosts of a job, and at what is between them, before it starts.

    Exit codes: 0 the hosts can run the job; 1 something is to be mended first.
    """
    _launch(*_merged(common, "doctor", **options))


@main.command("verify-resume")
@request_options
@click.option("--steps", type=click.IntRange(min=1), help="Iterations before and after the interruption.")
@click.option(
    "--resume-set",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set one parameter of the resumed training alone, for example of its layout. --set changes all.",
)
@click.option(
    "--from",
    "source",
    metavar="CHECKPOINT",
    help="Resume from this kept checkpoint: folder, name or iteration.",
)
@click.option(
    "--to",
    "target",
    metavar="CHECKPOINT",
    help="Compare with this later checkpoint of the same training.",
)
@click.option(
    "--work-dir",
    metavar="DIR",
    help="Folder for temporary files, shared by all hosts. Default: that of save, else the system's.",
)
@click.option("--keep", is_flag=True, help="Keep the temporary checkpoints and records.")
@click.option("--evaluate", is_flag=True, help="Evaluate as configured; by default nothing is evaluated.")
@click.pass_obj
def verify(
    common: tuple[Request, DryRun],
    /,
    steps: int | None,
    resume_set: tuple[str, ...],
    source: str | None,
    target: str | None,
    work_dir: str | None,
    keep: bool,
    evaluate: bool,
    **options: Any,
) -> None:
    """Verify that a resumed training equals an uninterrupted one.

    Trains 2 N iterations; then N, saves, starts new processes and trains the other N; and compares data,
    losses, weights, optimizer states, counters, learning rate, loss scale and random streams. Starts from the
    checkpoint in `load` if there is one. With --from and --to, resumes a kept checkpoint and compares with a
    later one. Writes to a temporary folder only.

    Exit codes: 0 everything agrees; 1 something differs, or a training failed; 2 the request was wrong.
    """
    request, dry_run = _merged(common, "train", **options)
    wanted = VerifyRequest(
        steps=steps,
        resume_set=resume_set,
        source=source,
        target=target,
        work_dir=work_dir,
        keep=keep,
        evaluate=evaluate,
    )
    _launch(request, dry_run, wanted)


def _merged(
    common: tuple[Request, DryRun], program: str, *, dry_run: DryRun, **options: Any
) -> tuple[Request, DryRun]:
    """Options before the subcommand count as well as those after it."""
    before, dry = common
    after = Request(program=program, **options)
    merged = replace(
        after,
        paths=before.paths + after.paths,
        overrides=before.overrides + after.overrides,
        directory=after.directory or before.directory,
        bind_cores=after.bind_cores or before.bind_cores,
        max_restarts=after.max_restarts or before.max_restarts,
        output=before.output if after.output == "rank0" else after.output,
    )
    return merged, dry_run or dry


def _launch(request: Request, dry_run: DryRun, wanted: VerifyRequest | None = None) -> None:
    if not request.paths:
        raise click.UsageError("nothing says what to do: give at least one --config FILE")
    # Kept until a handler is there: see `stop_signals`.
    with warning_blocked():
        _run(request, dry_run, wanted)


def _run(request: Request, dry_run: DryRun, wanted: VerifyRequest | None) -> NoReturn:
    try:
        plan = plan_launch(request)
        _tell_notices(plan)
        if wanted is None:
            outcome = _carry_out(request, plan, dry_run)
        else:
            outcome = verify_resume(request, plan, wanted, dry_run=dry_run)
    except NeoXError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    _tell_failure(outcome)
    sys.exit(outcome.exit_code)


def _carry_out(request: Request, plan: LaunchPlan, dry_run: DryRun) -> Outcome:
    if is_tuned(plan):
        sys.exit(tune(request, plan, dry_run=dry_run))
    if dry_run is not None:
        sys.exit(show_plan(plan, dry_run))
    refuse_what_cannot_run(plan)
    if plan.program == "doctor":
        _show_diagnosis(plan)
    return run_plan(plan)


def _tell_notices(plan: LaunchPlan) -> None:
    config = plan.resolved.config
    notices = [*config.notices, *slow_without_gpus(config, plan.world)]
    if notices:
        click.echo(list_problems(notices, config.files, called="note") + "\n", err=True)


def _show_diagnosis(plan: LaunchPlan) -> NoReturn:
    diagnosis = examine_hosts(plan)
    click.echo(str(diagnosis))
    sys.exit(0 if diagnosis.is_good else 1)


def _tell_failure(outcome: Outcome) -> None:
    """The first error last and whole, so that it is what the terminal shows."""
    if outcome.first_failure is None:
        return
    others = outcome.num_failures - 1
    if others:
        click.echo(f"\n{others} more worker{'s' if others > 1 else ''} failed after the first", err=True)
    click.echo(f"\n{outcome.first_failure}", err=True)
