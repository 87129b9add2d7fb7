"""`neox-launch` with `autotuning.enabled`: trials instead of a training, and what came of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from neox_launcher.autotuning.report import list_experiments, render_experiments, render_results
from neox_launcher.autotuning.results import Result, Results, best_of
from neox_launcher.autotuning.search import in_order, search
from neox_launcher.autotuning.space import Candidate, search_space
from neox_launcher.autotuning.trials import StoppedError, Trials
from neox_launcher.config import Resolved, resolve
from neox_launcher.config.problems import Problem, config_error, in_words, place_of
from neox_launcher.config.suggest import Cluster
from neox_launcher.config_estimate_cli import estimate_resolved
from neox_launcher.dry_run import tell_hindrances
from neox_launcher.launch import Request, plan_launch, refuse_what_cannot_run, run_plan
from neox_launcher.outcome import Outcome
from neox_launcher.plan import LaunchPlan
from neox_launcher.resources.local_gpus import smallest_gpu_memory
from neox_launcher.terminal import tell

__all__ = ["candidates_in_order", "is_tuned", "tune"]

_INTERRUPTED = 130


def is_tuned(plan: LaunchPlan) -> bool:
    """Whether the configuration asks for trials in place of this training."""
    return plan.program == "train" and plan.resolved.config.autotuning.autotuning.enabled


def tune(
    request: Request,
    plan: LaunchPlan,
    *,
    dry_run: str | None,
    run: Callable[[LaunchPlan], Outcome] = run_plan,
) -> int:
    """Try, and print the best settings; gives the exit code.

    Ctrl-C ends the trial that runs, and the next command with the same configuration goes on after the
    results that are there.

    Args:
        request: the command line.
        plan: the training that it asks for.
        dry_run: text or json only list the experiments; None carries them out.
        run: carries one launch out.

    Raises:
        NeoXError: the configuration allows no trial, or none can be started.
    """
    resolved = _tried(plan)
    stages = candidates_in_order(plan, resolved)
    if dry_run is not None:
        _show(stages, dry_run)
        return tell_hindrances(plan)
    refuse_what_cannot_run(plan)
    tuning = resolved.config.autotuning.autotuning
    kept = Results(Path(tuning.results_dir), overwrite=tuning.overwrite)
    trials = Trials(
        resolved.config, plan_for=lambda path: _plan_trial(request, path), run=run, earlier=kept.of
    )
    results: list[Result] = []
    exit_code = 0
    try:
        for result in search(stages, tuning, trials.attempt):
            results.append(result)
            _tell(result, len(results))
            if result.fingerprint and not result.was_reused:
                kept.add(result)
    except StoppedError as stop:
        exit_code = stop.exit_code
    except KeyboardInterrupt:
        # Between two trials nothing else listens.
        exit_code = _INTERRUPTED
    click.echo(render_results(results, tuning.metric))
    if exit_code:
        tell(f"stopped before the end; the same command goes on from {kept.path}\n")
        return exit_code
    return 0 if best_of(results, tuning.metric) is not None else 1


def candidates_in_order(plan: LaunchPlan, resolved: Resolved) -> list[list[Candidate]]:
    """All candidates, by stage, as they will be tried; devices' memory is asked for on this machine alone.

    Raises:
        ConfigError: there is none.
    """
    config = resolved.config
    costs, _ = estimate_resolved(resolved)
    memory = smallest_gpu_memory() if plan.world.gpus else None
    per_host = max(len(host.slots) for host in plan.world.hosts)
    cluster = Cluster(devices=plan.world.size, memory=memory or 0, devices_per_host=per_host)
    found = search_space(resolved, costs.shape, cluster, device_memory=memory)
    tuning = config.autotuning.autotuning
    if not found:
        what, remedy = _why_nothing(resolved)
        name = "autotuning.enabled"
        problem = Problem(name, what, remedy).located(place_of(config.sources, name), in_words(True))
        raise config_error([problem], config.files)
    return in_order(found, tuning, seed=config.training.seed)


def _why_nothing(resolved: Resolved) -> tuple[str, str]:
    most = resolved.config.autotuning.autotuning.max_train_batch_size
    copies = resolved.derived.data_parallel_size
    if most is not None:
        return (
            f"leaves nothing to try within autotuning.max_train_batch_size: {most} on {copies:,} "
            f"cop{'ies' if copies > 1 else 'y'} of the model",
            "raise it, or lower train-batch-size or gradient-accumulation-steps",
        )
    return "finds nothing that fits into the devices' memory", "use more devices, or offload optimizer states"


def _tried(plan: LaunchPlan) -> Resolved:
    """The configuration that trials vary: with `mp_size` for its model-parallel size, where that was given.

    Raises:
        ConfigError: elasticity chooses the batch, or the devices cannot be split so.
    """
    config, derived = plan.resolved.config, plan.resolved.derived
    if config.elasticity.elasticity.enabled:
        name = "autotuning.enabled"
        what = "varies the micro-batch, which elasticity.enabled leaves to its own block"
        problem = Problem(name, what, "switch one of them off")
        raise config_error([problem.located(place_of(config.sources, name), in_words(True))], config.files)
    if "autotuning.mp_size" not in config.sources:
        return plan.resolved
    parallelism = config.parallelism.replaced(model_parallel_size=config.autotuning.autotuning.mp_size)
    varied = config.model_copy(update={"parallelism": parallelism})
    return resolve(varied, devices=derived.world_size, hosts=derived.hosts)


def _plan_trial(request: Request, path: Path) -> LaunchPlan:
    """The launch of one trial; a failed one is not begun again.

    Raises:
        NeoXError: it cannot run.
    """
    own = replace(request, paths=(str(path),), overrides=(), directory=None, max_restarts=0)
    plan = plan_launch(own)
    refuse_what_cannot_run(plan)
    return plan


def _show(stages: Sequence[Sequence[Candidate]], form: str) -> None:
    if form == "json":
        click.echo(json.dumps({"experiments": list_experiments(stages)}, indent=2))
    else:
        click.echo(render_experiments(stages))


def _tell(result: Result, number: int) -> None:
    found = f"{result.seconds:.4g} s per iteration" if result.seconds is not None else result.reason
    earlier = ", known from an earlier command" if result.was_reused else ""
    tell(f"trial {number}, {result.experiment.name}: {result.status}{earlier}: {found}\n")
