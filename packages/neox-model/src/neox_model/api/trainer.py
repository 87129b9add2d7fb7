"""A run in this process, in parts: steps, callbacks, saves."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import finalize

import torch
from torch import Tensor, nn

from neox_config import NeoXConfig, resolve
from neox_config.errors import ConfigError, NeoXError
from neox_config.extras.data_efficiency.curricula import custom_curricula
from neox_config.extras.data_efficiency.difficulty import DifficultySchedule
from neox_config.facts.checkpoints import checkpoint_name, iteration_of
from neox_config.problems import list_problems
from neox_config.spec.resume import with_recorded_form
from neox_launcher.plan.epochs import with_iterations
from neox_launcher.plan.notes import notes_on_data
from neox_launcher.plan.preflight import refuse_worker_by_hand
from neox_model.api.alone import OwnState, groups_of_one
from neox_model.api.model import Model
from neox_model.assembly.model import build_stage
from neox_model.assembly.zero_sharding import gathered_parameter, whole_parameter
from neox_model.checkpoint.directory import find_latest
from neox_model.checkpoint.storage import save_lock
from neox_model.metrics.bus import read_back
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.train.export import export
from neox_model.train.loop import Loop
from neox_model.train.open_run import open_run
from neox_model.train.run import Callback, Extensions, Run
from neox_model.train.saving import save_run
from neox_model.train.state import StepReport, TrainState
from neox_model.worker import our_errors

__all__ = ["Step", "Trainer"]

logger = logging.getLogger(__name__)

Schedule = Callable[[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one iteration of a run did.

    Args:
        iteration: its number, from 1.
        loss: mean loss of its batch, nats per token; None if the batch was left out after a loss spike.
        learning_rate: of its update.
        grad_norm: 2-norm of its gradients before clipping; None if it was not computed.
        skipped: its update was skipped: a gradient or the loss was not finite, or the loss was a spike.
        tokens: tokens that the run has read so far.
    """

    iteration: int
    loss: float | None
    learning_rate: float
    grad_norm: float | None
    skipped: bool
    tokens: int


class Trainer:
    """A run of a configuration in this process: the same as `neox-launch` with one device.

    Use it as a context manager, or call `close`. Between the calls, the random generators, signal handlers,
    garbage collection and torch's defaults of the program are its own; `close` leaves no process group.
    Ctrl-C during `train` ends the run after the iteration, and saves it if `save` is configured.

    Args:
        config: the configuration. Its `load` continues a run, as always.
        callback: called after each iteration, with its results.
        curriculum: the function of a curriculum with `schedule_type: custom`: from an iteration (from 1) to
            the largest difficulty, such as the length of samples. It is called once for every iteration when
            the run starts. With several such curricula, a dictionary from the name of the metric
            (`curriculum_learning` for the older block) to its function.
        start_from: a model whose weights the run starts from, as they are: load it with
            `precision="fp32"` to start from the float32 master weights of a checkpoint. A run in 16 bits
            starts from exactly these at ZeRO stage 0; DeepSpeed rounds them to 16 bits at other stages.

    Raises:
        ConfigError: the configuration is invalid, or requires more than one process.
        NeoXError: the run cannot be set up.
    """

    def __init__(
        self,
        config: NeoXConfig,
        *,
        callback: Callable[[Step], object] | None = None,
        curriculum: Schedule | Mapping[str, Schedule] | None = None,
        start_from: Model | None = None,
    ) -> None:
        if not isinstance(config, NeoXConfig):
            raise NeoXError(
                f"a value of type {type(config).__name__} is not a configuration; pass that of "
                "neox_model.load_config(...)"
            )
        self._is_running = self._has_ended = self._has_failed = self._is_closed = False
        config = with_iterations(with_recorded_form(config), devices=1)
        blocks = custom_curricula(config.data_efficiency)
        difficulties = _difficulties(blocks, config.training.iterations, curriculum)
        if start_from is not None and config.checkpoint.load is not None:
            raise ConfigError(
                "start_from and load are both given, and each has weights to start from; remove one of them"
            )
        if start_from is not None and config.adapters.lora_rank:
            raise ConfigError(
                "start_from and lora-rank are both given, but adapters are added to a saved model; remove "
                "start_from, and set lora-base to a folder with that model (of Trainer.save)"
            )
        self._own = OwnState()
        callbacks = [] if callback is None else [_ProgramCallback(callback, self._own)]
        extensions = Extensions(callbacks=callbacks, difficulties=difficulties)
        if start_from is not None:
            extensions = replace(extensions, fill=partial(_fill, start_from), source=start_from.source)
        with self._inside():
            resolved = resolve(config, devices=1)
            refuse_worker_by_hand(config, program="train", has_functions=bool(difficulties))
            notices = [*config.notices, *notes_on_data(config)]
            if notices:
                logger.warning("%s", list_problems(notices, config.files, called="note"))
            with ExitStack() as resources:
                groups = resources.enter_context(groups_of_one(resolved.run.layout, config.engine))
                run, loop = resources.enter_context(open_run(groups, resolved, extensions))
                # Also when the program ends, or forgets the Trainer.
                self._release = finalize(self, _release, resources.pop_all(), run.state)
        # The run has the memory of the run, which ends with it; the others remain.
        self._open: tuple[Run, Loop] | None = run, loop
        self._config, self._state = run.config, run.state
        self._results = run.evaluator.results
        self._saved = self.iteration

    @property
    def _run(self) -> Run:
        assert self._open is not None, "the Trainer is open"
        return self._open[0]

    @property
    def _loop(self) -> Loop:
        assert self._open is not None, "the Trainer is open"
        return self._open[1]

    @property
    def config(self) -> NeoXConfig:
        """Return the configuration."""
        return self._config

    @property
    def iteration(self) -> int:
        """Return the number of finished iterations."""
        return self._state.iteration

    @property
    def has_ended(self) -> bool:
        """Return whether no iteration is left: all are finished, or the run was stopped."""
        return self._has_ended

    @property
    def stop_reason(self) -> str | None:
        """Return why the run ended before its last iteration, such as a signal; None if it did not."""
        return self._state.stop_reason

    @property
    def losses(self) -> dict[str, float]:
        """Return the loss of the last evaluation by part (valid, test), nats per token."""
        return {part: found.loss for part, found in self._results.items() if part != "train"}

    def train(self, iterations: int | None = None) -> None:
        """Train for some iterations, or until the last one, with the configured evaluations and saves.

        If none is left, a warning is logged.

        Args:
            iterations: number of iterations; None: all that are left.

        Raises:
            NeoXError: the run failed, was stopped, or is closed.
        """
        if iterations is not None and not (isinstance(iterations, Integral) and iterations >= 1):
            raise NeoXError(f"{iterations} iterations cannot be trained; pass at least 1, or nothing for all")
        self._refuse("train")
        if self._has_ended and self.stop_reason:
            raise NeoXError(f"the run has ended: {self.stop_reason}; open another Trainer")
        if self._state.finished:
            logger.warning(
                "no iteration is left to train: the model was trained for %d, and train-iters is %d; to "
                "train further, open another Trainer, with a larger train-iters",
                self.iteration,
                self._state.last_iteration,
            )
        if self._has_ended:
            return
        self._is_running = True
        try:
            with self._inside():
                self._loop.run(iterations)
                if self._state.finished:
                    self._has_ended = True
                    export(self._run)
        except BaseException as error:
            self._has_failed = True
            with self._inside():
                self._loop.pause()
                # The run's record and its snapshots then contain the failure.
                if (released := self._release.detach()) is not None:
                    released[2][0].__exit__(type(error), error, error.__traceback__)
            self._open = None
            raise
        finally:
            self._is_running = False

    def save(self, folder: str | Path | None = None) -> Path:
        """Save a checkpoint from which `neox-launch` and `Trainer` continue, and return its folder.

        Args:
            folder: the folder of checkpoints; None: that of `save`.

        Raises:
            NeoXError: it cannot be written, the last iteration's loss or gradients are not finite, or the
                run failed or is closed.
        """
        self._refuse("save", while_running=True)
        run, own = self._run, self._run.config.checkpoint.save
        target = folder if folder is not None else own
        if target is None:
            raise NeoXError("there is no folder to save to; pass one, or set save in the configuration")
        with self._inside(), ExitStack() as stack:
            if own is None or Path(target).resolve() != Path(own).resolve():
                stack.enter_context(save_lock(Path(target), run.groups, storage=run.storage))
            run.settle()
            run.before_save()
            save_run(run, Path(target))
        self._saved = self.iteration
        return Path(target) / checkpoint_name(self.iteration)

    def model(self) -> Model:
        """Return a copy of the model as it is now, which generates text and computes logits.

        Raises:
            NeoXError: the run failed or is closed.
        """
        self._refuse("copy the model", while_running=True)
        run = self._run
        resolved, tokenizer = run.resolved, run.tokenizer
        with self._inside(), run.engine.update.with_shared_weights():
            # Without what divides it.
            module = build_stage(
                resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=tokenizer.vocab_size
            )
            copies = dict(named_logical_parameters(module))
            for name, parameter in named_logical_parameters(run.model):
                copies[name].data = whole_parameter(parameter, run.groups)
            run.on_copy(module)
            return Model(module.eval(), resolved, tokenizer)

    def close(self) -> None:
        """End the run and release everything; a warning names iterations that were not saved."""
        if self._is_closed:
            return
        if self._is_running:
            raise NeoXError("a callback cannot close its Trainer; close it after train() has returned")
        if not self._has_failed:
            self._warn_of_loss()
        self._has_ended = self._is_closed = True
        with self._inside():
            self._release()
        self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with (
            self._own.exchanged(),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            our_errors(),
        ):
            yield

    def _refuse(self, action: str, *, while_running: bool = False) -> None:
        """Refuse an action that is not possible now."""
        if self._is_running and not while_running:
            raise NeoXError(f"a callback cannot {action}; do it after train() has returned")
        if self._is_closed:
            raise NeoXError(f"cannot {action}: the Trainer is closed; open another one")
        if self._has_failed:
            raise NeoXError(f"cannot {action}: the run has failed; open another Trainer")

    def _warn_of_loss(self) -> None:
        save = self.config.checkpoint.save
        latest = None if save is None else find_latest(Path(save))
        saved = max(self._saved, 0 if latest is None else iteration_of(latest.name) or 0)
        if self.iteration > saved:
            logger.warning(
                "iterations %d to %d are not saved; call save() before close()", saved + 1, self.iteration
            )


class _ProgramCallback(Callback):
    """Calls a function of the program after every iteration, in the program's own state.

    Args:
        callback: the function.
        own: the run's state.
    """

    def __init__(self, callback: Callable[[Step], object], own: OwnState) -> None:
        self._callback, self._own = callback, own
        self._next_rate: Tensor | float = 0.0

    def on_start(self) -> None:
        """Note the first learning rate."""
        self._next_rate = self.run.schedule.current_rate

    def on_step(self, report: StepReport) -> None:
        """Read the results from the device, and call the function."""
        loss, norm, skipped, rate = read_back(
            [report.loss, report.grad_norm, report.skipped, self._next_rate]
        )
        assert rate is not None, "every update has a learning rate"
        step = Step(
            iteration=self.run.state.iteration,
            loss=loss,
            learning_rate=float(rate),
            grad_norm=norm,
            skipped=bool(skipped),
            tokens=self.run.state.tokens,
        )
        self._next_rate = self.run.schedule.current_rate
        with self._own.exchanged():
            self._callback(step)


def _release(resources: ExitStack, state: TrainState) -> None:
    if not state.finished:
        state.request_stop("closed")
    resources.close()


def _fill(source: Model, model: nn.Module, groups: Groups) -> None:
    """Copy the weights of a model, also to parameters that ZeRO partitions."""
    source.copy_to(model, writable=partial(gathered_parameter, groups=groups))


def _difficulties(
    blocks: Mapping[str, Any], iterations: int, curriculum: Schedule | Mapping[str, Schedule] | None
) -> dict[str, DifficultySchedule]:
    """Return the schedules of the custom curricula by name, from the program's functions.

    Raises:
        ConfigError: there are other curricula than functions, or one gives a value that is not possible.
    """
    if isinstance(curriculum, Mapping):
        functions = dict(curriculum)
    else:
        functions = {} if curriculum is None else {next(iter(blocks), "curriculum"): curriculum}
    for name in sorted(functions.keys() ^ blocks.keys()):
        raise ConfigError(
            f"curriculum has a function for {name}, which is no enabled block with schedule_type: custom; "
            "set that in the configuration, or remove the function"
            if name in functions
            else f"{name} has schedule_type: custom, but no function; pass it as Trainer(curriculum=...)"
        )
    return {
        name: _tabulated(name, blocks[name], function, iterations) for name, function in functions.items()
    }


def _tabulated(name: str, block: Any, function: Schedule, iterations: int) -> DifficultySchedule:
    """Return the function's values, checked, as a schedule that counts iterations from 0.

    Raises:
        ConfigError: a value is no whole number, outside the block's limits, or less than the one before.
    """
    values: list[int] = []
    smallest = block.min_difficulty
    for iteration in range(1, iterations + 1):
        value = function(iteration)
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_whole or not smallest <= value <= block.max_difficulty:
            raise ConfigError(
                f"the function of {name} returns {value!r} for iteration {iteration}, but must return a "
                f"whole number of {smallest} to {block.max_difficulty}: between min_difficulty and "
                "max_difficulty, and no less than for the iteration before"
            )
        smallest = int(value)
        values.append(smallest)
    return lambda iteration: values[min(iteration, iterations - 1)]
