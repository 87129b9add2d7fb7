"""Build the copies of a configuration, run them in one process, and render what they answer."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from neox_config import NeoXConfig, encode_resolved, load_config, resolve
from neox_config.describe.tables import table
from neox_config.errors import LaunchError
from neox_config.spec.mup import base_shapes
from neox_launcher.controller.launch import run_plan
from neox_launcher.plan.environment import travelling_variables
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.protocol.coordinate_check import CoordinateRequest, Growth
from neox_launcher.protocol.outcome import Outcome
from neox_launcher.resources.host import Host
from neox_launcher.resources.world import World
from neox_launcher.verify_layout.sizes import Sizes
from neox_launcher.verify_layout.small import reference_settings, small_config, with_settings

__all__ = ["CoordinateCheck", "check_coordinates", "copies_of"]

_WITH, _WITHOUT = "muP", "without muP"
_SAMPLES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateCheck:
    """The options of `coord-check`.

    Args:
        paths: configuration files.
        overrides: settings as `name=value`.
        directory: directory of the files.
        widths: the widths, at least two, increasing.
        steps: number of updates.
        limit: largest size of the slope of a hidden layer under muP.
        on_gpu: run on a GPU.
        page: HTML file to write.
    """

    paths: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    directory: str | None = None
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    steps: int = 5
    limit: float = 0.05
    on_gpu: bool = False
    page: Path = Path("coord-check.html")


def check_coordinates(wanted: CoordinateCheck, *, run: Callable[[LaunchPlan], Outcome] = run_plan) -> Outcome:
    """Train the copies, and print how their activations change with and without muP.

    Returns:
        The outcome. Its exit code is 1 if a slope of a hidden layer under muP is over the limit.

    Raises:
        NeoXError: the configuration, or a copy of it, is invalid.
    """
    config = load_config(wanted.paths, overrides=wanted.overrides, directory=wanted.directory)
    copies = {
        name: copies_of(config, wanted.widths, steps=wanted.steps, use_mup=name == _WITH)
        for name in (_WITH, _WITHOUT)
    }
    folder = Path(tempfile.mkdtemp(prefix="coord-check-"))
    try:
        outcome = run(_plan(copies, wanted, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.exit_code or outcome.was_stopped:
        return outcome
    growths = [Growth(**each) for each in outcome.facts[0]["growths"]]
    over = [
        each
        for each in growths
        if each.is_hidden and each.parametrization == _WITH and not _is_within(each.slope, wanted.limit)
    ]
    click.echo(_render(growths, wanted.widths))
    click.echo(f"plots: {wanted.page}")
    for each in over:
        click.echo(f"{each.kind}: the slope {_shown(each)} is not within {wanted.limit:g} of 0 under muP")
    return Outcome(exit_code=1 if over else 0)


def copies_of(
    config: NeoXConfig, widths: Sequence[int], *, steps: int, use_mup: bool
) -> dict[int, NeoXConfig]:
    """Return a short configuration for each width, with heads and MLP in proportion, by width.

    The first width is the base of the others. All have a few layers and short samples, and no dropout.

    Raises:
        LaunchError: a width is not a multiple of the smallest possible one.
        ConfigError: a copy breaks a rule.
    """
    small = small_config(config, Sizes()).config
    least = small.model.hidden_size
    for width in widths:
        if width % least:
            raise LaunchError(
                f"--widths {width}: with the heads of this model, widths are multiples of {least}; use such",
                code="invalid-width",
            )
    base = base_shapes(small, of_this_model=True) | _sizes(small, widths[0] // least)
    base.pop("num_kv_heads", None)
    shared = {
        **reference_settings(small, Sizes()),
        "train_micro_batch_size_per_gpu": _SAMPLES,
        "gradient_accumulation_steps": 1,
        "lr_decay_style": "constant",
        "exit_interval": steps,
        "eval_interval": None,
        "precision": "fp32",
        **dict.fromkeys(("fp16", "bf16", "amp", "base_shapes_file", "save_base_shapes", "num_kv_heads")),
        "use_mup": use_mup,
        "mup_base": base if use_mup else None,
    }
    return {
        width: with_settings(small, shared | _sizes(small, width // least), name=f"the copy of width {width}")
        for width in widths
    }


def _sizes(small: NeoXConfig, times: int) -> dict[str, int]:
    """Return the sizes of a model that is this many times as wide."""
    names = ("hidden_size", "num_attention_heads", "mlp_width")
    shapes, shared = base_shapes(small, of_this_model=True), small.model.num_kv_heads
    return {name: times * shapes[name] for name in names} | (
        {} if shared is None else {"num_kv_heads": times * shared}
    )


def _plan(copies: dict[str, dict[int, NeoXConfig]], wanted: CoordinateCheck, folder: Path) -> LaunchPlan:
    request = CoordinateRequest(
        copies={
            name: {width: encode_resolved(resolve(copy, devices=1)) for width, copy in of_width.items()}
            for name, of_width in copies.items()
        },
        page=str(wanted.page.absolute()),
    )
    return LaunchPlan(
        program="coord-check",
        launcher="local",
        world=World(hosts=(Host("localhost", (0,)),), gpus=int(wanted.on_gpu)),
        hosts_from="coord-check",
        devices="",
        master_addr="127.0.0.1",
        master_port=0,
        environment={
            **travelling_variables(os.environ, home=Path.home(), folder=Path.cwd()),
            **request.as_variables(),
        },
        resolved=resolve(copies[_WITH][wanted.widths[0]], devices=1),
        python=sys.executable,
        working_directory=str(folder),
    )


def _is_within(slope: float | None, limit: float) -> bool:
    return slope is not None and abs(slope) <= limit


def _shown(growth: Growth) -> str:
    return "none" if growth.slope is None else f"{growth.slope:+.3f}"


def _render(growths: Sequence[Growth], widths: Sequence[int]) -> str:
    """Render the mean changes by width, and their slopes."""
    rows = [("", "", *(f"{width}" for width in widths), "slope")]
    for each in growths:
        values = (f"{each.changes[str(width)]:.3g}" for width in widths)
        rows.append((each.parametrization, each.kind, *values, _shown(each)))
    return f"mean |change of activations| by width\n{table(rows, left=range(2))}"
