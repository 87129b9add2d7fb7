"""Compile the layers with torch.compile, after a trial before training starts.

Only a layer's `block` is compiled, inside ZeRO's hooks, activation checkpointing and pipeline communication.
Functions that communicate or draw from a separate random stream are not compiled, and break the graphs.

The trial runs all layers of this rank forward and backward as in training, and once as in evaluation. A
compiler that fails therefore fails here, where `auto` can continue without it, and no iteration waits for the
compiler. Ranks that split a layer's matrices run it together; they are on one host, so that the compiler
fails for all of them or for none. Data-parallel ranks do not wait for each other: weights that they partition
are whole during the trial, and tokens stay on their rank, where other experts than theirs compute them.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neox_config.pluralize import pluralize
from neox_config.spec.run import RunSpec
from neox_model.assembly.activation_checkpointing import run_layers
from neox_model.assembly.choices import DTYPES, all_ranks_agree
from neox_model.assembly.compiler_cache import private_compiler_cache
from neox_model.errors import ModelError
from neox_model.layers.attention import flex, parallel_attention
from neox_model.layers.experts import Experts, Router, blocks, dispatch
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel import collectives, random, sequence
from neox_model.parallel.groups import Groups
from neox_model.parallel.partitioned import gathered
from neox_model.torch_compat import limit_graphs, recompile_limit_error

__all__ = ["compile_layers", "dense_attention"]

logger = logging.getLogger(__name__)

# Estimated cost of compilation, and cautious estimate of its gain, to decide whether a trial is worthwhile.
_SECONDS_TO_COMPILE = 60.0
_SHARE_GAINED = 0.1
# Largest |compiled - eager| / |eager| of the layers' output that is attributed to rounding.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def compile_layers(
    model: Any,
    run: RunSpec,
    groups: Groups,
    *,
    width: int,
    iterations: int,
    backend: str = "inductor",
) -> None:
    """Compile the layers of this rank according to `compile`. Collective over all ranks.

    Call it when the weights have the dtype and device of training. Draws from the random streams.

    Args:
        model: the model whose layers to compile.
        run: how it runs.
        groups: this job's process groups.
        width: channels between layers.
        iterations: iterations of the run, in which the compiler's time must be won back.
        backend: backend of torch.compile.

    Raises:
        ModelError: `compile` is true, and the compiler fails or changes the layers' output.
    """
    requested = run.compilation.requested
    if requested is False:
        return
    trial = _Trial(model, run, groups, width)
    if requested == "auto":
        reason = _why_not(trial, run, groups, iterations)
        if reason is not None:
            logger.info("compile: layers are not compiled: %s", reason)
            return
    began = time.perf_counter()
    found = trial.compile(backend)
    reason = found.failure
    is_faster = not trial.layers or found.seconds < found.eager_seconds
    if requested == "auto" and reason is None and not is_faster:
        reason = f"compilation does not make them faster ({found})"
    if all_ranks_agree(groups.control, reason is None):
        logger.info("compile: layers are compiled (in %.0f s): %s", time.perf_counter() - began, found)
        return
    trial.undo()
    reason = reason or "on another rank compilation fails, or does not make them faster"
    if requested is True:
        raise ModelError(f"compile: true: {reason}; set compile: false to train without it", code="compile")
    logger.info("compile: layers are not compiled: %s", reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The result of a trial: seconds per micro-batch, forward and backward, and the failure if any."""

    eager_seconds: float = 0.0
    seconds: float = 0.0
    failure: str | None = None

    def __str__(self) -> str:
        return (
            f"a micro-batch takes {1e3 * self.seconds:.1f} ms in this rank's compiled layers, and "
            f"{1e3 * self.eager_seconds:.1f} ms uncompiled"
        )


class _Trial:
    """Runs the layers of this rank on hidden states of the run's shape.

    Args:
        model: the model with the layers.
        run: how it runs, which gives the shapes.
        groups: this job's process groups.
        width: channels between layers.
    """

    def __init__(self, model: Any, run: RunSpec, groups: Groups, width: int) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, ResidualLayer)]
        self._model = model
        self._run = run
        self._groups = groups
        self._width = width
        self.device = next((value.device for value in model.parameters()), torch.device("cpu"))

    def eager_seconds(self) -> float:
        """Return the seconds of a micro-batch, forward and backward, with the layers as they are."""
        with self._apart():
            return self._in_training(self._seconds)

    def compile(self, backend: str) -> _Found:
        """Compile all layers, and compare their output and speed with those before."""
        if not self.layers:
            return _Found()
        with self._apart():
            return self._compiled(backend)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Let each rank run its layers by itself, and without effect on buffers."""
        dispatchers = {each.dispatch for each in self._model.modules() if isinstance(each, Experts)}
        with gathered(self._model), _kept_buffers(self.layers):
            for each in dispatchers:
                each.is_alone = True
            try:
                yield
            finally:
                for each in dispatchers:
                    each.is_alone = False

    def _compiled(self, backend: str) -> _Found:
        eager_seconds, expected = self._in_training(self._seconds), self._output()
        private_compiler_cache()
        torch.compiler.reset()
        for module in (collectives, sequence, random, flex, parallel_attention, blocks, dispatch):
            for function in module.COMPILE_DISABLED:
                function.disable_compile()
        # They differ by kind of attention, and between training and evaluation.
        limit_graphs(64)
        for layer in self.layers:
            layer.compiled = torch.compile(layer.block, dynamic=False, backend=backend)
        try:
            seconds = self._in_training(self._seconds)
            difference = self._difference(self._output().double(), expected.double())
        except (RuntimeError, OSError, recompile_limit_error()) as error:
            return _Found(failure=f"the compiler fails: {_in_one_line(error)}")
        bound = _TOLERANCE[DTYPES[self._run.precision.computes_in]]
        if not difference <= bound:  # NaN counts as a difference.
            return _Found(
                failure=f"the output of the compiled layers differs by {difference:.2g} (relative), more "
                f"than the tolerance of {bound:.2g}"
            )
        return _Found(eager_seconds=eager_seconds, seconds=seconds)

    def _difference(self, found: Tensor, exact: Tensor) -> float:
        """Return the relative difference; of the median token if rounding may change a token's experts."""
        dim = -1 if any(isinstance(module, Router) for module in self._model.modules()) else None
        relative = torch.linalg.vector_norm(found - exact, dim=dim) / torch.linalg.vector_norm(exact, dim=dim)
        return float(relative.median())

    def undo(self) -> None:
        """Restore the uncompiled layers."""
        for layer in self.layers:
            layer.compiled = None
        torch.compiler.reset()

    def _in_training(self, run: Callable[[], float]) -> float:
        self._model.train()
        # The first run compiles, or fills the layers' caches; the second compiles the code for filled caches.
        self._train()
        self._train()
        return run()

    def _seconds(self) -> float:
        times = []
        for _ in range(3):
            began = self._now()
            self._train()
            times.append(self._now() - began)
        return min(times)

    def _now(self) -> float:
        torch.get_device_module(self.device).synchronize()
        return time.perf_counter()

    def _train(self) -> None:
        """Run forward and backward, with the gradients of the weights, which no parameter receives.

        Compiled layers always compute them, so uncompiled layers must, to be compared.
        """
        inputs = self._inputs(requires_grad=True)
        with self._model.autocast():
            result = run_layers(self.layers, inputs, recomputation=self._model.recomputation)
        hidden_SBD = result if isinstance(result, Tensor) else result[0]
        weights = [weight for layer in self.layers for weight in layer.parameters() if weight.requires_grad]
        # Weights that a layer does not use, as those of a branch, have no gradient.
        torch.autograd.grad(hidden_SBD, [inputs[0], *weights], torch.ones_like(hidden_SBD), allow_unused=True)

    def _output(self) -> Tensor:
        """Return the output in evaluation, which is deterministic."""
        self._model.eval()
        with torch.no_grad(), self._model.autocast():
            result = run_layers(self.layers, self._inputs(requires_grad=False), recomputation=None)
        return result if isinstance(result, Tensor) else result[0]

    def _inputs(self, *, requires_grad: bool) -> tuple[Tensor, ...]:
        run = self._run
        length, batch = run.batch.length, run.batch.micro
        own = length // self._groups.model.size if run.layout.splits_sequence else length
        generator = torch.Generator(self.device).manual_seed(0)
        hidden_SBD = torch.randn(own, batch, self._width, generator=generator, device=self.device).to(
            DTYPES[run.precision.weights]
        )
        hidden_SBD.requires_grad_(requires_grad)
        if not run.batch.separates_tokens:
            return (hidden_SBD,)
        return hidden_SBD, torch.zeros(batch, length, dtype=torch.long, device=self.device)


@contextmanager
def _kept_buffers(layers: list[ResidualLayer]) -> Iterator[None]:
    """Restore buffers at the end, such as counts of tokens, to which backward passes of a trial add."""
    kept = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _why_not(trial: _Trial, run: RunSpec, groups: Groups, iterations: int) -> str | None:
    """Return the reason why `auto` skips the trial; None if it runs the trial."""
    if run.compilation.why_not is not None:
        return f"compilation does not work with {run.compilation.why_not}"
    if trial.device.type == "cpu":
        return "on a CPU compilation takes minutes and saves a twentieth of the layers' time"
    if run.fusions.scales_by_layer:
        return "with query-key layer scaling each layer needs a separate graph"
    passes = run.batch.accumulation
    gained = _SHARE_GAINED * iterations * passes * (trial.eager_seconds() if trial.layers else 0.0)
    is_long = not trial.layers or gained > _SECONDS_TO_COMPILE
    if all_ranks_agree(groups.control, is_long):
        return None
    return (
        f"the expected gain, a tenth of their time in {pluralize(iterations, 'iteration')}, is {gained:.0f} "
        "s, less than compilation takes"
    )


def _in_one_line(error: Exception) -> str:
    """Return the compiler's first error message, or the first line of torch's message."""
    cause = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    complaints = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return (complaints or lines or [type(cause).__name__])[0]


@contextmanager
def dense_attention(model: nn.Module) -> Iterator[None]:
    """Let the cores of a model not call FlexAttention, which fails where operators are counted."""
    cores = [module for module in model.modules() if isinstance(module, flex.FlexBase)]
    for core in cores:
        core.is_dense = True
    try:
        yield
    finally:
        for core in cores:
            core.is_dense = False
