"""`neox-launch` with `autotuning.enabled`: runs trials instead of training, and prints their results."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from neox_config import Resolved, resolve
from neox_config.command_line import INTERRUPTED
from neox_config.derive.problems import refusal
from neox_config.estimate.resolved import estimate_resolved
from neox_config.estimate.suggest import Cluster
from neox_config.pluralize import pluralize
from neox_config.problems import Problem
from neox_launcher.autotuning.report import list_experiments, render_experiments, render_results
from neox_launcher.autotuning.results import Result, Results, best_of
from neox_launcher.autotuning.search import in_order, search
from neox_launcher.autotuning.space import Candidate, search_space
from neox_launcher.autotuning.trials import StoppedError, Trials
from neox_launcher.controller.dry_run import print_refusal_reasons
from neox_launcher.controller.launch import refuse_what_cannot_run, run_plan
from neox_launcher.controller.terminal import print_message
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.protocol.outcome import Outcome
from neox_launcher.resources.local_gpus import smallest_gpu_memory

__all__ = ["candidates_in_order", "is_tuned", "tune"]


def is_tuned(plan: LaunchPlan) -> bool:
    """Return whether the configuration requests autotuning instead of a run."""
    return plan.program == "train" and plan.resolved.config.autotuning.autotuning.enabled


def tune(
    request: Request,
    plan: LaunchPlan,
    *,
    dry_run: str | None,
    run: Callable[[LaunchPlan], Outcome] = run_plan,
) -> int:
    """Run the trials, print the best settings and return the exit code.

    After Ctrl-C, the next command with the same configuration continues with the remaining trials.

    Args:
        request: request of the command line.
        plan: plan of the run.
        dry_run: text or json only list the experiments; None runs them.
        run: runs one plan.

    Raises:
        NeoXError: the configuration allows no trial, or none can be started.
    """
    resolved = _tried(plan)
    stages = candidates_in_order(plan, resolved)
    if dry_run is not None:
        listed = {"experiments": list_experiments(stages)}
        is_json = dry_run == "json"
        click.echo(json.dumps(listed, indent=2, allow_nan=False) if is_json else render_experiments(stages))
        return print_refusal_reasons(plan)
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
            found = result.reason if result.seconds is None else f"{result.seconds:.4g} s per iteration"
            earlier = ", from an earlier run" if result.was_reused else ""
            name = f"trial {len(results)}, {result.experiment.name}"
            print_message(f"{name}: {result.status}{earlier}: {found}\n")
            if result.fingerprint and not result.was_reused:
                kept.add(result)
    except StoppedError as stop:
        exit_code = stop.exit_code
    except KeyboardInterrupt:
        # Between two trials no other handler is installed.
        exit_code = INTERRUPTED
    click.echo(render_results(results, tuning.metric))
    if exit_code:
        print_message(f"stopped early; run the same command again to continue from {kept.path}\n")
        return exit_code
    return 0 if best_of(results, tuning.metric) is not None else 1


def candidates_in_order(plan: LaunchPlan, resolved: Resolved) -> list[list[Candidate]]:
    """Return all candidates by stage, in the order of trials; only this machine's device memory is read.

    Raises:
        ConfigError: there are no candidates.
    """
    config = resolved.config
    costs, _ = estimate_resolved(resolved)
    memory = smallest_gpu_memory() if plan.world.gpus else None
    per_host = max(len(host.slots) for host in plan.world.hosts)
    cluster = Cluster(devices=plan.world.size, memory=memory or 0, devices_per_host=per_host)
    found = search_space(resolved, costs.setup, cluster, device_memory=memory)
    tuning = config.autotuning.autotuning
    if not found:
        what, remedy = _why_nothing(resolved)
        raise refusal(config, Problem("autotuning.enabled", what, remedy))
    return in_order(found, tuning, seed=config.training.seed)


def _why_nothing(resolved: Resolved) -> tuple[str, str]:
    most = resolved.config.autotuning.autotuning.max_train_batch_size
    copies = resolved.run.layout.data
    if most is not None:
        return (
            f"leaves nothing to try within autotuning.max_train_batch_size: {most} on "
            f"{pluralize(copies, 'copy', 'copies')} of the model",
            "raise it, or lower train-batch-size or gradient-accumulation-steps",
        )
    return "finds no candidate that fits into device memory", "use more devices, or offload optimizer states"


def _tried(plan: LaunchPlan) -> Resolved:
    """Return the configuration that trials vary, with `mp_size` as model-parallel size if it is given.

    Raises:
        ConfigError: elasticity is enabled, or the devices cannot be divided by `mp_size`.
    """
    config, layout = plan.resolved.config, plan.resolved.run.layout
    if config.elasticity.elasticity.enabled:
        what = "varies the micro-batch, which elasticity.enabled also sets"
        raise refusal(config, Problem("autotuning.enabled", what, "disable one of them"))
    if "autotuning.mp_size" not in config.sources:
        return plan.resolved
    parallelism = config.parallelism.replaced(model_parallel_size=config.autotuning.autotuning.mp_size)
    varied = config.model_copy(update={"parallelism": parallelism})
    return resolve(varied, devices=layout.world, hosts=layout.hosts)


def _plan_trial(request: Request, path: Path) -> LaunchPlan:
    """Return the plan of one trial, without restarts.

    Raises:
        NeoXError: it cannot be started.
    """
    own = replace(request, paths=(str(path),), overrides=(), directory=None, max_restarts=0)
    plan = plan_launch(own)
    refuse_what_cannot_run(plan)
    return plan
