"""Train copies of a model of several widths, and measure how their activations change."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import inf, log
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import torch
from torch import Tensor, nn

from neox_config import Resolved, decode_resolved
from neox_config.atomic import atomic_write
from neox_launcher.protocol.coordinate_check import CoordinateRequest, Growth
from neox_launcher.worker.reporting import report_facts
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_modules
from neox_model.report.coordinates import CHANGE, render_coordinates
from neox_model.train.open_run import open_run
from neox_model.train.run import Callback, Extensions
from neox_model.train.state import StepReport
from neox_model.verify_layout.corpus import write_corpus

__all__ = ["check_in"]

_PROBE = (16, 32)
# Last part of a module's name -> kind of layer.
_KINDS = {
    "embedding": "embedding",
    "attention": "attention",
    "mlp": "mlp",
    "final_norm": "final norm",
    "lm_head": "logits",
}
_HIDDEN = ("attention", "mlp", "layer", "final norm")


def check_in(groups: Groups, resolved: Resolved) -> None:
    """Train the copies one after another; the answer goes to the launcher."""
    for package in ("neox_data", "neox_model"):
        logging.getLogger(package).setLevel(logging.WARNING)
    request = CoordinateRequest.from_environment()
    write_corpus(Path())
    measured: dict[str, dict[int, list[dict[str, float]]]] = {}
    for name, copies in request.copies.items():
        for width, text in copies.items():
            probe = _Probe()
            with open_run(groups, decode_resolved(text), Extensions(callbacks=[probe])) as (_, loop):
                loop.run()
            measured.setdefault(name, {})[width] = probe.sizes
    growths = [growth for name, of_width in measured.items() for growth in _growths(name, of_width)]
    with atomic_write(Path(request.page)) as file:
        file.write(render_coordinates(measured))
    report_facts(0, {"growths": [asdict(each) for each in growths]})


class _Probe(Callback):
    """Measures activations before the first update and after each.

    Attributes:
        sizes: what `_Activations` returned each time.
    """

    def __init__(self) -> None:
        self.sizes: list[dict[str, float]] = []

    def on_load(self) -> None:
        """Measure those of the first weights."""
        self._activations = _Activations(self.run.model, self.run.tokenizer.vocab_size)
        self.sizes.append(self._activations.measured())

    def on_step(self, report: StepReport) -> None:
        """Measure those after an update."""
        self.sizes.append(self._activations.measured())


class _Activations:
    """The activations of a model for a fixed batch of random tokens.

    Args:
        model: maps tokens to logits.
        entries: number of different tokens.
    """

    def __init__(self, model: nn.Module, entries: int) -> None:
        self._model = model
        self._first: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}
        for name, module in named_logical_modules(model):
            if _kind_of(name) is not None:
                module.register_forward_hook(self._keeper(name))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, entries, _PROBE, generator=generator)
        self._tokens = tokens.to(next(model.parameters()).device)

    def _keeper(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._seen[name] = (outputs[0] if isinstance(outputs, tuple) else outputs).detach()

        return keep

    def measured(self) -> dict[str, float]:
        """Return mean absolute values by kind of layer, and those of changes with `CHANGE` behind it."""
        self._model.eval()
        with torch.no_grad():
            self._model(self._tokens)
        self._model.train()
        self._first = self._first or dict(self._seen)
        found: dict[str, list[float]] = {}
        for name, values in self._seen.items():
            kind = _kind_of(name)
            found.setdefault(f"{kind}", []).append(float(values.abs().mean()))
            change = float((values - self._first[name]).abs().mean())
            found.setdefault(f"{kind}{CHANGE}", []).append(change)
        return {kind: fmean(values) for kind, values in found.items()}


def _kind_of(name: str) -> str | None:
    """Return the kind of layer that a module is; None if it is a part of one."""
    place, _, last = name.rpartition(".")
    return "layer" if place == "layers" else _KINDS.get(last)


def _growths(name: str, of_width: Mapping[int, Sequence[Mapping[str, float]]]) -> list[Growth]:
    """Return how the change by all updates grows with the width, for each kind of layer."""
    found = []
    for kind in (kind for kind in of_width[min(of_width)][0] if not kind.endswith(CHANGE)):
        changes = {width: sizes[-1][f"{kind}{CHANGE}"] for width, sizes in of_width.items()}
        slope = None
        if all(0 < change < inf for change in changes.values()):
            logs = [log(width) for width in changes], [log(change) for change in changes.values()]
            slope = linear_regression(*logs).slope
        found.append(
            Growth(
                parametrization=name,
                kind=kind,
                changes={str(width): change for width, change in changes.items()},
                slope=slope,
                is_hidden=kind in _HIDDEN,
            )
        )
    return found
