"""The command `neox-launch`: builds a plan from the options, checks it, and runs or prints it."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NoReturn

import click

from neox_config.command_line import PATH, option
from neox_config.errors import LaunchError, NeoXError
from neox_config.pluralize import pluralize
from neox_config.read.reading import normal_name
from neox_launcher.agent.join import join_launch
from neox_launcher.autotuning import is_tuned, tune
from neox_launcher.cli.cluster import show_notes
from neox_launcher.cli.coord_check import coord_check
from neox_launcher.cli.habits import (
    DRY_RUN,
    LaunchGroup,
    parameter_option,
    parameter_options,
    refuse_words,
    take_overrides,
)
from neox_launcher.cli.init import init
from neox_launcher.cli.options import CONFIGURATION, directory_option, set_option
from neox_launcher.cli.verify_layout import verify_layout
from neox_launcher.controller.display import Display, open_display
from neox_launcher.controller.doctor import examine_hosts
from neox_launcher.controller.dry_run import Form, show_plan
from neox_launcher.controller.launch import refuse_what_cannot_run, run_plan
from neox_launcher.controller.restarts import checkpoints_of
from neox_launcher.controller.supervision import Outcome
from neox_launcher.controller.terminal import finished_output, print_message
from neox_launcher.plan.base_shapes import save_base_shapes
from neox_launcher.plan.in_use import refuse_what_is_in_use
from neox_launcher.plan.notes import is_noted, notes_on_data, notes_on_load, notes_on_save
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.plan.scheduler import Member
from neox_launcher.protocol.stop_signals import ignore_warning, warning_blocked
from neox_launcher.resources.world import slow_without_gpus
from neox_launcher.verify_resume.verify import VerifyRequest, verify_resume

__all__ = ["main"]

DryRun = Form | None

_LAUNCH = "Launch"
_EXIT_CODES: Mapping[int | str, str] = {
    2: "invalid request, nothing was started",
    "129, 138, 143": "stopped by SIGHUP (lost connection), SIGUSR1, SIGTERM",
    "other": "that of the first worker that failed",
}
_GENERATION, _EVALUATION, _RETRIEVAL = "Generation", "Evaluation", "Retrieval"
_VERIFICATION, _MODE = "Verification", "text_gen_type"


def _launch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all commands of `neox-launch` have."""
    options = (
        option(
            "--config",
            "paths",
            heading=CONFIGURATION,
            multiple=True,
            type=PATH,
            metavar="FILE",
            help="YAML configuration file. May be given several times; the files are merged. The name alone "
            "is enough: neox-launch x.yml.",
        ),
        directory_option,
        set_option,
        option(
            DRY_RUN,
            heading=_LAUNCH,
            type=click.Choice(["text", "json"]),
            help="Print the plan and the commands without starting anything or contacting a host. The value "
            "is optional and defaults to text. Exits with 2 if the launch would be refused, except that host "
            "names are not resolved, and what another job holds is not noticed.",
        ),
        option(
            "--bind-cores",
            heading=_LAUNCH,
            is_flag=True,
            help="Bind each worker to its share of the host's CPU cores.",
        ),
        option(
            "--max-restarts",
            heading=_LAUNCH,
            type=click.IntRange(min=0),
            default=0,
            help="Maximum restarts after a failure; each resumes from the latest checkpoint.",
        ),
        option(
            "--output",
            heading=_LAUNCH,
            type=click.Choice(["rank0", "all"]),
            default="rank0",
            help="Ranks whose output is printed to the terminal.",
        ),
        parameter_options,
    )
    for add in reversed(options):
        command = add(command)
    return command


def request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the configuration files and the options that all commands of `neox-launch` have."""
    return click.argument("files", nargs=-1, type=PATH)(_launch_options(command))


@click.group(
    cls=LaunchGroup,
    invoke_without_command=True,
    subcommand_metavar="[FILE]... | COMMAND [ARGS]...",
    examples=(
        "neox-launch small.yml",
        "neox-launch --config small.yml --config cluster.yml --set train-iters=1000 --max-restarts 3",
    ),
    exit_codes=_EXIT_CODES,
)
@click.version_option(package_name="neox-launcher")
@_launch_options
@click.pass_context
def main(context: click.Context, /, dry_run: DryRun, **options: Any) -> None:
    """Train a model, or run one of the commands below.

    On Ctrl-C, SIGTERM or SIGUSR1 (Slurm's --signal) the workers stop after this iteration or the next, save a
    checkpoint and exit. A second Ctrl-C or SIGTERM, more than a second later, kills them; SIGUSR1 may be
    repeated.
    """
    request = Request(program="train", **take_overrides(options))
    context.obj = (request, dry_run)
    if context.invoked_subcommand is None:
        _launch(request, dry_run)


main.add_command(init)
main.add_command(verify_layout)
main.add_command(coord_check)


@main.command(
    examples=("neox-launch train small.yml", "neox-launch train small.yml --set train-iters=1000"),
    exit_codes=_EXIT_CODES,
)
@request_options
@click.pass_obj
def train(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Train a model, as neox-launch does without a command."""
    _launch(*_merged(common, "train", **options))


@main.command(
    examples=(
        'neox-launch generate small.yml --prompt "Once upon a time"',
        "neox-launch generate small.yml -i prompts.txt -o texts.jsonl",
    ),
    exit_codes=_EXIT_CODES,
)
@parameter_option("--prompt", heading=_GENERATION, metavar="TEXT")
@parameter_option("-i", "--sample_input_file", heading=_GENERATION, type=PATH, metavar="FILE")
@parameter_option("-o", "--sample_output_file", heading=_GENERATION, type=PATH, metavar="FILE")
@request_options
@click.pass_obj
def generate(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Generate text with the latest checkpoint in `load`, or the one that it names.

    Another checkpoint: --set load=CHECKPOINTS/global_step1000.

    In an interactive session, Ctrl-C during a reply ends the reply. Ctrl-C at the prompt, or a second one
    during the same reply, ends the session; sample-output-file, with .partial appended, keeps the replies.
    """
    _refuse_undecoded(options["prompt"])
    request, dry_run = _merged(common, "generate", **options)
    if options["sample_input_file"] is not None:
        if options["prompt"] is not None:
            raise click.UsageError("--prompt and -i exclude each other; give one of them")
        # A configuration file, such as GPT-NeoX's text_generation.yml, may name another mode.
        if not any(normal_name(each.partition("=")[0]) == _MODE for each in request.overrides):
            request = replace(request, overrides=(*request.overrides, f"{_MODE}=input-file"))
    _launch(request, dry_run)


@main.command(
    examples=("neox-launch serve small.yml", "neox-launch serve small.yml --set serve.port=8080"),
    exit_codes={**_EXIT_CODES, 0: "stopped as requested"},
)
@request_options
@click.pass_obj
def serve(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Serve the latest checkpoint in `load` over HTTP, to programs that use OpenAI's API.

    Another checkpoint: --set load=CHECKPOINTS/global_step1000.

    Listens on serve.host and serve.port, by default http://127.0.0.1:8000, where a browser shows a page to
    try the model. On Ctrl-C or SIGTERM no new requests are accepted, and the running ones are completed
    within stop-timeout.
    """
    _launch(*_merged(common, "serve", **options))


def _task_names(context: click.Context, option: click.Parameter, text: str | None) -> list[str] | None:
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise click.BadParameter("names no task; write names separated by commas", context, option)
    return names or None


@main.command(
    examples=(
        "neox-launch evaluate small.yml --tasks lambada_openai,piqa --limit 100",
        "neox-launch evaluate small.yml --data texts.jsonl",
    ),
    exit_codes=_EXIT_CODES,
)
@parameter_option(
    "--tasks",
    "--eval_tasks",
    "--eval-tasks",
    "eval_tasks",
    heading=_EVALUATION,
    callback=_task_names,
    metavar="NAME,...",
    help="Tasks of lm-evaluation-harness, separated by commas. Same as --set eval-tasks=[NAME,...].",
)
@parameter_option("--data", "eval_data", heading=_EVALUATION, metavar="DATA")
@parameter_option("--include-path", "eval_include_path", heading=_EVALUATION, metavar="DIR")
@parameter_option("--num-fewshot", "eval_num_fewshot", heading=_EVALUATION, type=int, metavar="N")
@parameter_option("--limit", "eval_limit", heading=_EVALUATION, type=int, metavar="N")
@request_options
@click.pass_obj
def evaluate(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Evaluate the latest checkpoint in `load`, or the one that it names.

    On tasks (--tasks) and texts (--data) if they are given here or in the configuration, otherwise on the
    validation and test data. Another checkpoint: --set load=CHECKPOINTS/global_step1000. Results on tasks and
    texts are also written to the new file PREFIX_eval_results_yy-mm-dd-HH-MM.json (eval-results-prefix;
    without it eval_results_... in the working directory).
    """
    _launch(*_merged(common, "evaluate", **options))


@main.command(
    "index-blocks",
    examples=(
        "neox-launch index-blocks small.yml --set block-data-path=index",
        "neox-launch index-blocks small.yml --set block-data-path=index --set ict-load=checkpoints",
    ),
    exit_codes=_EXIT_CODES,
)
@request_options
@click.pass_obj
def index_blocks(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Embed all blocks of the data with a retrieval model (objective: ict).

    Writes the folder `block_data_path`. If it was interrupted, the same command continues, with any number of
    processes.
    """
    _launch(*_merged(common, "index-blocks", **options))


@main.command(
    "find-blocks",
    examples=(
        'neox-launch find-blocks small.yml --set block-data-path=index --query "how to open a file"',
        "neox-launch find-blocks small.yml --set block-data-path=index",
    ),
    exit_codes=_EXIT_CODES,
)
@parameter_option("--query", "block_query", heading=_RETRIEVAL, metavar="TEXT")
@parameter_option("--count", "block_count", heading=_RETRIEVAL, type=int, metavar="N")
@request_options
@click.pass_obj
def find_blocks(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Find the best blocks for a text in the index that index-blocks made.

    Without a text, take sentences out of the blocks of the test documents, and report how many find the block
    that they were taken from. The search is exact.
    """
    _refuse_undecoded(options["block_query"])
    _launch(*_merged(common, "find-blocks", **options))


@main.command(
    examples=("neox-launch doctor small.yml", "neox-launch doctor small.yml --hostfile hosts"),
    exit_codes={0: "the hosts can run the job", 1: "problems were found"},
)
@request_options
@click.pass_obj
def doctor(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Check the hosts of a job and the network between them before training."""
    _launch(*_merged(common, "doctor", **options))


@main.command(
    "verify-resume",
    examples=(
        "neox-launch verify-resume small.yml --steps 5",
        "neox-launch verify-resume small.yml --steps 5 --resume-set model-parallel-size=2",
    ),
    exit_codes={0: "everything agrees", 1: "something differs, or a run failed"},
)
@option(
    "--steps",
    heading=_VERIFICATION,
    type=click.IntRange(min=1),
    required=True,
    help="Number of iterations before and after the interruption.",
)
@option(
    "--resume-set",
    heading=_VERIFICATION,
    multiple=True,
    metavar="NAME=VALUE",
    help="Set one parameter of the resumed run only, for example a parallel size. --set applies to all "
    "runs. May be given several times.",
)
@option(
    "--work-dir",
    heading=_VERIFICATION,
    metavar="DIR",
    help="Directory for temporary files, shared by all hosts. Default: save, or its nearest existing parent; "
    "without save the system's temporary directory.",
)
@option("--keep", heading=_VERIFICATION, is_flag=True, help="Keep the temporary checkpoints and records.")
@option(
    "--evaluate", heading=_VERIFICATION, is_flag=True, help="Evaluate as configured. Default: no evaluation."
)
@request_options
@click.pass_obj
def verify(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Verify that a resumed run equals an uninterrupted one.

    Trains 2 N iterations without interruption; then trains N, saves, and trains the other N in new processes.
    Compares data, losses, weights, optimizer states, counters, learning rate, loss scale and random states.
    Starts from the latest checkpoint in `load` if there is one. Writes to a temporary directory only.
    """
    wanted = VerifyRequest(**{each.name: options.pop(each.name) for each in fields(VerifyRequest)})
    _launch(*_merged(common, "train", **options), wanted)


def _refuse_undecoded(text: str | None) -> None:
    """Refuse a text with bytes that the environment could not decode, which a file name may have.

    Raises:
        UnicodeEncodeError: the command reports it.
    """
    (text or "").encode()


def _merged(
    common: tuple[Request, DryRun], program: str, *, files: tuple[str, ...], dry_run: DryRun, **options: Any
) -> tuple[Request, DryRun]:
    """Merge the options given before the subcommand with those given after it."""
    before, dry = common
    options["paths"] += files
    after = Request(program=program, **take_overrides(options))
    directory = after.directory or before.directory
    refuse_words(files, directory, main.commands)
    merged = replace(
        after,
        paths=before.paths + after.paths,
        overrides=before.overrides + after.overrides,
        directory=directory,
        bind_cores=after.bind_cores or before.bind_cores,
        max_restarts=after.max_restarts or before.max_restarts,
        output=before.output if after.output == "rank0" else after.output,
    )
    return merged, dry_run or dry


def _launch(request: Request, dry_run: DryRun, wanted: VerifyRequest | None = None) -> None:
    if not request.paths:
        raise click.UsageError(
            "no configuration file given; give at least one --config FILE (neox-launch init --data FOLDER "
            "writes one)"
        )
    # SIGUSR1 stays pending until a handler is installed: see `stop_signals`.
    with warning_blocked(), finished_output():
        try:
            _run(request, dry_run, wanted)
        finally:
            ignore_warning()


def _run(request: Request, dry_run: DryRun, wanted: VerifyRequest | None) -> NoReturn:
    try:
        plan = plan_launch(request)
        if plan.member is not None:
            _take_part(plan, plan.member, dry_run, several=wanted is not None)
        _print_notes(plan)
        if wanted is None:
            outcome = _carry_out(request, plan, dry_run)
        else:
            outcome = verify_resume(request, plan, wanted, dry_run=dry_run)
    except NeoXError as error:
        print_message(f"{error}\n")
        sys.exit(error.exit_code)
    # At the bottom of the terminal, where it stays visible.
    if outcome.first_failure is not None:
        print_message(f"\n{outcome.first_failure}\n")
        others = outcome.num_failures - 1
        if others:
            print_message(f"\n{pluralize(others, 'more worker')} failed after it\n")
    sys.exit(outcome.exit_code)


def _take_part(plan: LaunchPlan, member: Member, dry_run: DryRun, *, several: bool) -> None:
    """Join the launch of process 0 and exit, if a scheduler has started this program once per host.

    Returns on process 0, which launches.

    Raises:
        LaunchError: the request starts workers several times, but the other processes join once.
    """
    if several or is_tuned(plan) or plan.max_restarts:
        what = "verify-resume" if several else "--max-restarts" if plan.max_restarts else "autotuning"
        raise LaunchError(
            f"{what} starts the workers several times, but {member.origin} has started this program on every "
            "host for a single start; leave it out and let the scheduler restart the job (restartPolicy in "
            "Kubernetes, scontrol requeue in Slurm), or start neox-launch once"
        )
    if member.launches:
        if dry_run is None:
            click.echo(f"process 0 of {len(member.names):,}, started by {member.origin}: launching", err=True)
        return
    if dry_run is not None:
        sys.exit(0)
    if plan.this_host is None:
        click.echo(f"{member.name} is not among the hosts of this job (num-nodes, exclude)", err=True)
        sys.exit(0)
    refuse_what_cannot_run(plan)
    within = plan.resolved.config.launch.start_timeout
    sys.exit(
        join_launch(member.address, member.port, member.token, host_number=plan.this_host, within=within)
    )


def _carry_out(request: Request, plan: LaunchPlan, dry_run: DryRun) -> Outcome:
    if is_tuned(plan):
        sys.exit(tune(request, plan, dry_run=dry_run))
    if dry_run is not None:
        sys.exit(show_plan(plan, dry_run))
    refuse_what_cannot_run(plan)
    refuse_what_is_in_use(plan.resolved.config, program=plan.program, is_local=plan.is_local)
    if plan.program == "doctor":
        diagnosis = examine_hosts(plan)
        click.echo(str(diagnosis))
        sys.exit(0 if diagnosis.is_good else 1)
    if plan.program == "train":
        config = plan.resolved.config
        if config.mup.use_mup and config.mup.save_base_shapes:
            click.echo(f"wrote {save_base_shapes(config)}, the base model of muP")
            return Outcome(exit_code=0)
        return _train(request, plan)
    _print_start(plan)
    return run_plan(plan)


def _print_start(plan: LaunchPlan) -> None:
    # The first line of a worker follows after the import of torch.
    print_message(f"neox-launch: starting {pluralize(plan.world.size, 'worker')}\n")


def _train(request: Request, plan: LaunchPlan) -> Outcome:
    """Train, on a terminal with a live line, and print its result and the commands that continue."""
    live = open_display(plan.resolved.config.launch.terminal)
    # With rich, which other programs do not import.
    from neox_launcher.controller.screens import Result, render_end, render_start

    started = time.monotonic()
    display = live or Display()
    try:
        if live is None:
            _print_start(plan)
        else:
            live.print(lambda width: render_start(plan, width=width))
        saved_before = checkpoints_of(plan)
        outcome = run_plan(plan, display)
        result = Result(
            outcome=outcome,
            metrics=display.metrics,
            iteration=display.highest_iteration,
            saved_before=saved_before,
            seconds=time.monotonic() - started,
            seconds_per_iteration=display.seconds_per_iteration,
            restarts=display.num_attempts - 1,
            warnings=display.num_warnings,
        )
        display.print(lambda width: render_end(plan, request, result, width=width))
    finally:
        display.close()
    return outcome


def _print_notes(plan: LaunchPlan) -> None:
    config = plan.resolved.config
    notices = [each for each in config.notices if is_noted(each, plan.program)]
    notices += slow_without_gpus(config, plan.world)
    if plan.program == "train":
        notices += [*notes_on_data(config), *notes_on_save(config)]
    elif plan.program in ("generate", "serve", "evaluate"):
        notices += notes_on_load(config)
    show_notes(notices, config)
