"""`neox-launch verify-layout`: compare each layout with one process, and print what agrees."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from neox_config import NeoXConfig, Resolved, encode_resolved, load_config, resolve
from neox_config.errors import LaunchError, NeoXError
from neox_config.estimate.setup import fewest_devices
from neox_config.pluralize import pluralize
from neox_launcher.controller.launch import run_plan
from neox_launcher.controller.terminal import print_message
from neox_launcher.plan.environment import travelling_variables
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.protocol.layout_verification import LayoutAnswer, LayoutRequest
from neox_launcher.protocol.outcome import Outcome
from neox_launcher.resources.host import Host
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.world import World
from neox_launcher.verify_layout.report import render_answer, render_case, render_kept
from neox_launcher.verify_layout.sizes import Sizes, parse_layout, sizes_of
from neox_launcher.verify_layout.small import Small, reference_settings, small_config, with_settings

__all__ = ["Case", "LayoutVerification", "case_of", "plan_of", "verify_layouts"]

_DIFFERENT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutVerification:
    """The options of `verify-layout`.

    Args:
        paths: configuration files.
        overrides: settings as `name=value`.
        directory: directory of the files.
        layouts: values of `--layout`; empty: the configuration's own.
        steps: updates to compare.
        precision: "float64", or "configured" for the configuration's; None: float64 where it is possible.
        on_gpus: run on the GPUs of this machine.
        full: keep the sizes of the model.
        as_json: print JSON.
        keep: keep the temporary files.
    """

    paths: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    directory: str | None = None
    layouts: tuple[str, ...] = ()
    steps: int = 3
    precision: str | None = None
    on_gpus: bool = False
    full: bool = False
    as_json: bool = False
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layout to verify."""

    layout: str
    small: Small
    sizes: Sizes
    in_float64: bool
    gpus: int

    @property
    def title(self) -> str:
        """The layout, as text."""
        return self.layout or "the layout of the configuration"


def verify_layouts(wanted: LayoutVerification, *, run: Callable[[LaunchPlan], Outcome] = run_plan) -> Outcome:
    """Compare every layout with one process, and print the tables and the verdicts.

    Args:
        wanted: the options.
        run: runs a plan.

    Returns:
        The outcome. Its exit code is 0 only if everything agrees; a failed run determines its own.

    Raises:
        NeoXError: the configuration, a layout, or its small copy is invalid.
    """
    # All are checked before the first one runs.
    cases = [case_of(wanted, layout) for layout in wanted.layouts or ("",)]
    results, failed = [], None
    for case in cases:
        if not wanted.as_json:
            click.echo(render_case(case.title, case.sizes, case.in_float64, wanted.steps))
            click.echo(render_kept(case.small))
        outcome, answer = _compare(case, wanted, run)
        if answer is None:
            failed = outcome
            break
        without = {} if answer.agrees else dict(_agreements(case, wanted, run))
        results.append((case, answer, without))
        if not wanted.as_json:
            click.echo(render_answer(answer, without, case.sizes))
    if wanted.as_json:
        click.echo(json.dumps([_as_json(*each) for each in results], indent=2, allow_nan=False))
    agrees = all(answer.agrees for _, answer, _ in results)
    return failed or Outcome(exit_code=0 if agrees else _DIFFERENT)


def _compare(
    case: Case, wanted: LayoutVerification, run: Callable[[LaunchPlan], Outcome]
) -> tuple[Outcome, LayoutAnswer | None]:
    """Run one layout; the answer is None if it failed or was stopped."""
    with _work_folder(keep=wanted.keep) as folder:
        outcome = run(plan_of(case, folder, wanted.steps))
    failed = outcome.exit_code or outcome.was_stopped
    return outcome, None if failed else _answer(outcome)


def _agreements(
    case: Case, wanted: LayoutVerification, run: Callable[[LaunchPlan], Outcome]
) -> Iterator[tuple[str, bool]]:
    """Yield whether a layout agrees without each kind of parallelism, of which it has several."""
    stage = case.small.config.zero.zero_optimization.stage
    kinds = {
        "tp=1,sp=false": case.sizes.tensor > 1,
        "pp=1": case.sizes.stages > 1,
        "ep=1": case.sizes.experts > 1,
        "dp=1": case.sizes.data > 1,
        "zero=0": stage > 0,
    }
    used = [kind for kind, is_used in kinds.items() if is_used]
    for kind in used if len(used) > 1 else ():
        try:
            other = case_of(wanted, f"{case.layout},{kind}")
        except NeoXError:
            continue  # This layout requires it.
        outcome, answer = _compare(other, wanted, run)
        if outcome.was_stopped:
            return
        if answer is not None:
            yield kind, answer.agrees


def case_of(wanted: LayoutVerification, layout: str) -> Case:
    """Return what is verified of one `--layout`; "" is the configuration's own.

    Raises:
        NeoXError: the layout, or its small copy, is invalid.
    """
    given = parse_layout(layout)
    settings = [f"{name}={value}" for name, value in given.items() if name != "dp"]
    config = load_config(wanted.paths, overrides=[*wanted.overrides, *settings], directory=wanted.directory)
    # Report what is wrong with the user's file, with its lines: shrinking must not hide or add anything.
    resolve(config, devices=fewest_devices(config))
    sizes = sizes_of(config, given, is_cut=not wanted.full)
    small = small_config(config, sizes, keeps_sizes=wanted.full)
    resolved = resolve(small.config, devices=sizes.processes)
    why_not = _why_not_float64(resolved)
    if wanted.precision == "float64" and why_not is not None:
        raise LaunchError(
            f"--precision float64 is not possible with {why_not}; use --precision configured",
            code="no-float64",
        )
    in_float64 = wanted.precision != "configured" and why_not is None
    gpus = count_gpus() if wanted.on_gpus else 0
    if wanted.on_gpus and sizes.processes > gpus:
        have = pluralize(gpus, "visible GPU")
        raise LaunchError(
            f"--devices gpu: the layout takes {sizes.processes} processes, a GPU each, but this machine has "
            f"{have}; use smaller sizes in --layout, or --devices cpu",
            code="too-few-gpus",
        )
    return Case(
        layout=layout,
        small=small,
        sizes=sizes,
        in_float64=in_float64,
        gpus=gpus,
    )


def _why_not_float64(resolved: Resolved) -> str | None:
    """Return what computes in less than float64, whatever the tensors are; None if nothing does."""
    if resolved.run.engine.name == "deepspeed":
        return "DeepSpeed's engine"
    return None


@contextmanager
def _work_folder(*, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="verify-layout-"))
    try:
        yield folder
    finally:
        if keep:
            print_message(f"temporary files are kept in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def plan_of(case: Case, folder: Path, steps: int) -> LaunchPlan:
    """Return the plan of the processes of a layout, all on this machine."""
    ends = {"exit_interval": steps, "eval_interval": steps}
    own = with_settings(case.small.config, ends, name="the small configuration")
    plain = with_settings(own, reference_settings(own, case.sizes), name="the configuration of one process")
    processes, dropping = case.sizes.processes, None
    if any(case.small.dropout.values()):
        drops = with_settings(own, {**case.small.dropout, "exit_interval": 1}, name="the one with dropout")
        dropping = encode_resolved(_resolved(drops, processes))
    request = LayoutRequest(
        reference=encode_resolved(_resolved(plain, 1)),
        in_float64=case.in_float64,
        dropping=dropping,
    )
    return LaunchPlan(
        program="verify-layout",
        launcher="local",
        world=World(hosts=(Host("localhost", tuple(range(processes))),), gpus=case.gpus),
        hosts_from="verify-layout",
        devices="",
        master_addr="127.0.0.1",
        master_port=0,
        environment={
            **travelling_variables(os.environ, home=Path.home(), folder=Path.cwd()),
            # A thread per process: they share the cores of this machine.
            "OMP_NUM_THREADS": "1",
            **request.as_variables(),
        },
        resolved=_resolved(own, processes),
        python=sys.executable,
        working_directory=str(folder),
    )


def _resolved(config: NeoXConfig, devices: int) -> Resolved:
    """Resolve a configuration without the checkpoint of adapters' base, whose values are drawn."""
    resolved = resolve(config, devices=devices)
    return resolved.replaced(adapters=resolved.config.adapters.replaced(lora_base=None))


def _answer(outcome: Outcome) -> LayoutAnswer:
    try:
        return LayoutAnswer.from_facts(outcome.facts[0])
    except KeyError as error:
        raise NeoXError("the workers ended without a result; see their output above") from error


def _as_json(case: Case, answer: LayoutAnswer, without: Mapping[str, bool]) -> dict[str, Any]:
    return {
        "layout": case.title,
        "processes": case.sizes.processes,
        "precision": "float64" if case.in_float64 else "configured",
        "changed": {change.name: change.after for change in case.small.changes},
        "agrees": answer.agrees,
        "agrees_with": without,
        **asdict(answer),
    }
