"""Train copies of a model of several widths, and measure how their activations change."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import log
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import torch
from torch import Tensor, nn

from neox_config import Resolved, decode_resolved
from neox_config.atomic import atomic_write
from neox_launcher.protocol.coordinate_check import CoordinateRequest, Growth
from neox_launcher.worker.reporting import report_facts
from neox_model.layers.embedding import Embedding
from neox_model.layers.lm_head import LMHead
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_modules
from neox_model.report.coordinates import render_coordinates
from neox_model.train.open_run import open_run
from neox_model.train.run import Callback, Extensions
from neox_model.train.state import StepReport
from neox_model.verify_layout.corpus import write_corpus

__all__ = ["check_in"]

_PROBE = (16, 32)
# End of a module's name -> kind of layer; the first match is used.
_HIDDEN = ("attention", "mlp", "layer")


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
