"""torch.compile of the layers, decided and tried before the training begins.

What is compiled is a layer's `block`: below hooks of ZeRO, checkpoints of activations and sends of a
pipeline. Whatever communicates or has a random stream of its own stays as it is, and divides the graphs.

The trial runs all layers of this rank forwards and backwards as training will, and once as evaluation will.
So a compiler that fails does it here, where it ends nothing, and no iteration waits for one. Ranks that
share a layer run it together; they share a host, so that its compiler fails for all of them or for none.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neox_launcher.config import Resolved
from neox_launcher.config.layer_compilation import why_layers_stay_uncompiled
from neox_model.build.activation_checkpointing import run_layers
from neox_model.build.as_pipeline import PipelineModel
from neox_model.build.as_sequential import SequentialModel
from neox_model.build.choices import DTYPES, all_say_so
from neox_model.build.compiler_cache import private_compiler_cache
from neox_model.errors import ModelError
from neox_model.layers.attention import flex
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel import collectives, random
from neox_model.parallel.groups import Groups

__all__ = ["compile_layers"]

logger = logging.getLogger(__name__)

# What compiling costs and gains at the least, guessed, for whether a trial is worth its time.
_SECONDS_TO_COMPILE = 60.0
_SHARE_GAINED = 0.1
_REPEATS = 3
# Largest |compiled - eager| / |eager| of a stack's output that rounding explains.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Layers may differ in their attention, and each in training and evaluation.
_GRAPHS_OF_A_FUNCTION = 64


def compile_layers(
    model: SequentialModel | PipelineModel, resolved: Resolved, groups: Groups, *, backend: str = "inductor"
) -> None:
    """Compile the layers of this rank where the configuration says so. Collective over all ranks.

    To be called when the weights are of the type and on the device that they train with. Draws from the
    random streams.

    Args:
        model: whose layers they are.
        resolved: the configuration.
        groups: this job's.
        backend: torch.compile's.

    Raises:
        ModelError: `compile` is true, and the compiler fails or makes something else of the layers.
    """
    requested = resolved.config.model.compile
    if requested is False:
        return
    trial = _Trial(model, resolved, groups)
    if requested == "auto":
        reason = _why_not(trial, resolved, groups)
        if reason is not None:
            logger.info("compile: layers are not compiled: %s", reason)
            return
    began = time.perf_counter()
    found = trial.compile(backend)
    reason = found.failure
    is_faster = not trial.layers or found.seconds < found.eager_seconds
    if requested == "auto" and reason is None and not is_faster:
        reason = f"they are no faster for it ({found})"
    if all_say_so(groups.control, reason is None):
        logger.info("compile: layers are compiled, which took %.0f s: %s", time.perf_counter() - began, found)
        return
    trial.undo()
    reason = reason or "another rank cannot, or is no faster for it"
    if requested is True:
        raise ModelError(f"compile: true: {reason}; set compile: false to train without it")
    logger.info("compile: layers are not compiled: %s", reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a trial showed: seconds of a micro-batch forwards and backwards, and what went wrong."""

    eager_seconds: float = 0.0
    seconds: float = 0.0
    failure: str | None = None

    def __str__(self) -> str:
        return (
            f"a micro-batch takes {1e3 * self.seconds:.1f} ms through this rank's, and "
            f"{1e3 * self.eager_seconds:.1f} ms uncompiled"
        )


class _Trial:
    """The layers of this rank, on hidden states of the run's shape.

    Args:
        model: whose layers they are.
        resolved: says what they are given.
        groups: this job's.
    """

    def __init__(self, model: SequentialModel | PipelineModel, resolved: Resolved, groups: Groups) -> None:
        ordered: Any = model.stack if isinstance(model, SequentialModel) else model.forward_funcs
        self.layers = [layer for layer in ordered if isinstance(layer, ResidualLayer)]
        self._model = model
        self._resolved = resolved
        self._groups = groups
        self.device = next((value.device for value in model.parameters()), torch.device("cpu"))

    def eager_seconds(self) -> float:
        """Of a micro-batch, forwards and backwards, as the layers are."""
        return self._in_training(self._seconds)

    def compile(self, backend: str) -> _Found:
        """Compile all layers, and compare with what they were."""
        if not self.layers:
            return _Found()
        eager_seconds, expected = self._in_training(self._seconds), self._output()
        private_compiler_cache()
        torch._dynamo.reset()
        for function in (*collectives.UNCOMPILED, *random.UNCOMPILED, *flex.UNCOMPILED):
            function.keep_out_of_graphs()
        limits = {"recompile_limit": _GRAPHS_OF_A_FUNCTION, "fail_on_recompile_limit_hit": True}
        for name, value in limits.items():
            setattr(torch._dynamo.config, name, value)
        for layer in self.layers:
            layer.compiled = torch.compile(layer.block, dynamic=False, backend=backend)
        try:
            seconds = self._in_training(self._seconds)
            difference = _relative(self._output(), expected)
        except (RuntimeError, OSError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            return _Found(failure=f"the compiler fails: {_told_in_a_line(error)}")
        bound = _TOLERANCE[expected.dtype]
        if not difference <= bound:  # Not a number is a difference too.
            return _Found(
                failure=f"compiled, they give something else: by {difference:.2g} of it, where rounding "
                f"explains {bound:.2g}"
            )
        return _Found(eager_seconds=eager_seconds, seconds=seconds)

    def undo(self) -> None:
        """The layers as they were."""
        for layer in self.layers:
            layer.compiled = None
        torch._dynamo.reset()

    def _in_training(self, run: Callable[[], float]) -> float:
        self._model.train()
        # The first time compiles, or fills what layers keep; the second compiles what goes with that.
        self._train()
        self._train()
        return run()

    def _seconds(self) -> float:
        return min(self._timed_once() for _ in range(_REPEATS))

    def _timed_once(self) -> float:
        began = self._now()
        self._train()
        return self._now() - began

    def _now(self) -> float:
        torch.get_device_module(self.device).synchronize()
        return time.perf_counter()

    def _train(self) -> None:
        """Forwards and backwards; only the stream's gradient is kept, so that nobody else sees any."""
        inputs = self._inputs(requires_grad=True)
        result = run_layers(self.layers, inputs, recomputation=self._model.recomputation)
        hidden_SBD = result if isinstance(result, Tensor) else result[0]
        torch.autograd.grad(hidden_SBD, inputs[0], torch.ones_like(hidden_SBD))

    def _output(self) -> Tensor:
        """What evaluation gets, the same each time."""
        self._model.eval()
        with torch.no_grad():
            result = run_layers(self.layers, self._inputs(requires_grad=False), recomputation=None)
        return result if isinstance(result, Tensor) else result[0]

    def _inputs(self, *, requires_grad: bool) -> tuple[Tensor, ...]:
        config, derived = self._resolved.config, self._resolved.derived
        length, batch = config.model.seq_length, derived.micro_batch_size
        own = length // self._groups.model.size if config.parallelism.sequence_parallel else length
        generator = torch.Generator(self.device).manual_seed(0)
        hidden_SBD = torch.randn(
            own, batch, config.model.hidden_size, generator=generator, device=self.device
        ).to(DTYPES[derived.precision])
        hidden_SBD.requires_grad_(requires_grad)
        if not config.data.reset_attention_mask:
            return (hidden_SBD,)
        return hidden_SBD, torch.zeros(batch, length, dtype=torch.long, device=self.device)


def _why_not(trial: _Trial, resolved: Resolved, groups: Groups) -> str | None:
    """Why `auto` does not even try; None: it does."""
    reason = why_layers_stay_uncompiled(resolved.config)
    if reason is not None:
        return f"not with {reason}"
    if trial.device.type == "cpu":
        return "on a CPU compiling takes minutes and gains a twentieth of the layers' time"
    if resolved.config.attention.apply_query_key_layer_scaling:
        return "with query-key layer scaling each of them is another function"
    iterations, passes = resolved.config.training.train_iters, resolved.derived.accumulation
    gained = _SHARE_GAINED * iterations * passes * (trial.eager_seconds() if trial.layers else 0.0)
    is_long = not trial.layers or gained > _SECONDS_TO_COMPILE
    if all_say_so(groups.control, is_long):
        return None
    return (
        f"a tenth of their time in all {iterations:,} iterations is {gained:.0f} s, less than compiling takes"
    )


def _relative(given: Tensor, expected: Tensor) -> float:
    wide, exact = given.double(), expected.double()
    return float((wide - exact).norm() / exact.norm())


def _told_in_a_line(error: Exception) -> str:
    """What a compiler complains of first, or what torch says of it."""
    cause = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    complaints = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return (complaints or lines or [type(cause).__name__])[0]
