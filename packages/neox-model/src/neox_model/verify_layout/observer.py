"""What a run computes, recorded in one process and compared on several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from neox_model.assembly.zero_sharding import gathered_parameter, whole_parameter
from neox_model.checkpoint.blocks import Block
from neox_model.checkpoint.logical import engine_fragments, optimizer_parts
from neox_model.checkpoint.shards import Part
from neox_model.engine.updater import Updater
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import Logical, named_logical_parameters
from neox_model.parallel.random import mixed_seed
from neox_model.train.run import Callback, Extensions
from neox_model.train.state import StepReport
from neox_model.verify_layout.rows import Limit, Piece, Place, Row, compare_values, elements

__all__ = ["Comparer", "Recorder", "Values"]

# Of weights that the scheme makes constant, such as those of norms: then a swapped part of one shows, too.
_SPREAD = 0.2
_MOST_ELEMENTS = 20_000_000


@dataclass(frozen=True, slots=True)
class Values:
    """What the reference computed: whole tensors by kind, step and logical name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def put(self, kind: str, step: int, name: str, values: Tensor) -> None:
        """Keep a copy of a whole tensor."""
        self.tensors[f"{kind}/{step}/{name}"] = values.detach().clone()

    def get(self, kind: str, step: int, name: str) -> Tensor | None:
        """Return a whole tensor; None if the reference has none of this name."""
        return self.tensors.get(f"{kind}/{step}/{name}")

    def weight_before(self, step: int, name: str) -> Tensor | None:
        """Return a weight before an update."""
        return self.get("first weights", 0, name) if step == 1 else self.get("weights", step - 1, name)

    def names(self, kind: str, step: int) -> list[str]:
        """Return the names of the tensors of a kind."""
        prefix = f"{kind}/{step}/"
        return [name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)]

    def micro_batches(self, step: int, name: str) -> list[Tensor]:
        """Return what each micro-batch added to a gradient; empty if this was not recorded."""
        found: list[Tensor] = []
        while (part := self.get(f"micro-batch {len(found)}", step, name)) is not None:
            found.append(part)
        return found


class _Observer(Callback):
    """Sees every update of a run: before it is applied, and after."""

    def on_load(self) -> None:
        """Observe a run from its next step on."""
        self.engine, self.groups = self.run.engine, self.run.groups
        self.step = 1
        update = self.engine.update
        if isinstance(update, Updater):
            self._names = update.names()
            update.mixed.before_update.append(self._before)
        else:
            update.optimizer.register_step_pre_hook(self._before_step)

    @property
    def extensions(self) -> Extensions:
        """What a run needs to be observed."""
        return Extensions(callbacks=[self], fill=self.fill)

    def fill(self, model: nn.Module, groups: Groups) -> None:
        """Give every weight its first value."""
        raise NotImplementedError

    def take_number(self, kind: str, value: float) -> None:
        """Take a number that all ranks have."""
        raise NotImplementedError

    def take(self, kind: str, part: Part, target: Tensor, *, is_split: bool, scale: float = 1.0) -> None:
        """Take this rank's part of a tensor; `target` has its elements, times `scale`, in the run."""
        raise NotImplementedError

    def on_step(self, report: StepReport) -> None:
        """Take the loss, the norm, the weights and the states after an update."""
        assert report.loss is not None, "no batch is left out"
        self.take_number("loss", float(report.loss))
        if report.grad_norm is not None:
            self.take_number("gradient norm", float(report.grad_norm))
        update = self.engine.update
        with torch.no_grad(), update.in_memory(changes=True):
            for fragment in engine_fragments(self.engine):
                is_split, values = fragment.logical.model_parallel, fragment.weight
                self.take("weights", fragment.as_part(fragment.name, values), values, is_split=is_split)
                for part in optimizer_parts(fragment, update.optimizer)[0]:
                    self.take("optimizer states", part, part.values, is_split=is_split)
        for each in self.run.model_states:
            part = Part(
                name=each.name, shape=each.shape, block=each.slices, start=each.start, values=each.values
            )
            self.take("model states", part, part.values, is_split=each.is_split_over_model)
        update.to_model()
        self.step += 1

    def _before(
        self, parameters: Sequence[Parameter], gradients: Sequence[Tensor], scaled_norm: Tensor
    ) -> None:
        """Take the gradients of an update, which are not clipped."""
        update = self.engine.update
        assert isinstance(update, Updater)
        scale = 1.0 if update.loss_scale is None else float(update.loss_scale)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            logical: Logical = parameter.logical  # type: ignore[attr-defined]
            own = without_padding(gradient, logical.slices)
            values = own if scale == 1.0 else own / scale
            name = self._names[id(parameter)]
            part = Part(
                name=name, shape=logical.shape, block=logical.slices, start=0, values=values.reshape(-1)
            )
            self.take("gradients", part, own, is_split=logical.model_parallel, scale=scale)

    def _before_step(self, optimizer: Any, *_: object) -> None:
        """Take the gradients that DeepSpeed's ZeRO gives to the optimizer; nothing clips them here."""
        # It may step with one group of parameters at a time.
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for fragment in engine_fragments(self.engine):
            gradient = fragment.held.holder.grad
            if gradient is not None and id(fragment.held.holder) in stepped:
                values = fragment.part_of(gradient)
                is_split = fragment.logical.model_parallel
                self.take("gradients", fragment.as_part(fragment.name, values), values, is_split=is_split)


class Recorder(_Observer):
    """Keeps what one process computes.

    Args:
        values: receives it.
        rounded_to: dtype to which the first weights are rounded, in which the layout computes.
    """

    def __init__(self, values: Values, *, rounded_to: torch.dtype) -> None:
        self.values, self._rounded_to = values, rounded_to
        self._counts: dict[str, int] = {}

    def on_load(self) -> None:
        """Observe a run; of a small model also what each micro-batch adds to gradients."""
        super().on_load()
        named = list(named_logical_parameters(self.run.model))
        if sum(parameter.numel() for _, parameter in named) > _MOST_ELEMENTS:
            return
        for name, parameter in named:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._adder(name))

    def _adder(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that keeps what a backward pass has added to a gradient."""
        before: list[Tensor] = []

        def added(parameter: Tensor) -> None:
            assert parameter.grad is not None
            whole = parameter.grad.detach().clone()
            number = self._counts.get(name, 0)
            self.values.put(f"micro-batch {number}", self.step, name, whole - before[0] if number else whole)
            before[:] = [whole]
            self._counts[name] = number + 1

        return added

    def fill(self, model: nn.Module, groups: Groups) -> None:
        """Keep the weights; draw those of constant tensors by their name, and make no matrix small."""
        with torch.no_grad():
            for name, parameter in named_logical_parameters(model):
                self.values.put("initial weights", 0, name, parameter)
                if parameter.numel() and bool((parameter == parameter.reshape(-1)[0]).all()):
                    generator = torch.Generator().manual_seed(mixed_seed("verify", name))
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_(noise.to(parameter) * _SPREAD)
                elif parameter.dim() > 1:
                    # Outputs as large as inputs: else layers, and what they add to gradients, are near zero.
                    parameter.mul_(parameter.shape[-1] ** -0.5 / parameter.std())
                parameter.copy_(parameter.to(self._rounded_to))
                self.values.put("first weights", 0, name, parameter)

    def take_number(self, kind: str, value: float) -> None:
        """Keep a number."""
        self.values.put(kind, self.step, kind, torch.tensor(value, dtype=torch.float64))

    def take(self, kind: str, part: Part, target: Tensor, *, is_split: bool, scale: float = 1.0) -> None:
        """Keep a tensor, which is whole."""
        assert part.values.numel() == prod(part.shape), f"{part.name} is not whole in one process"
        self.values.put(kind, self.step, part.name, part.values.view(part.shape))

    def on_step(self, report: StepReport) -> None:
        """Keep what an update computed."""
        super().on_step(report)
        self._counts.clear()


class Comparer(_Observer):
    """Compares what a rank computes, and gives it the reference's values afterwards.

    A difference thereby shows once, where it arises: the update follows from the reference's gradients, and
    the next step from the reference's weights and states.

    Args:
        values: what the reference computed.
        place: this rank.
        limit: what is rounding.
        compares_initial: the reference's initial weights are drawn in the same dtype.
    """

    def __init__(self, values: Values, place: Place, *, limit: Limit, compares_initial: bool) -> None:
        self.rows: list[Row] = []
        self.pieces: list[Piece] = []
        self.missing: list[tuple[str, str]] = []
        self._values, self._place, self._limit = values, place, limit
        self._compares_initial = compares_initial
        self._floors: dict[tuple[str, int], float] = {}

    def fill(self, model: nn.Module, groups: Groups) -> None:
        """Compare the initial weights, and set the first ones of the reference."""
        self.step = 0
        with torch.no_grad():
            for name, parameter in named_logical_parameters(model):
                logical: Logical = parameter.logical  # type: ignore[attr-defined]
                own = without_padding(whole_parameter(parameter, groups), logical.slices)
                first = self._values.get("first weights", 0, name)
                part = Part(
                    name=name, shape=logical.shape, block=logical.slices, start=0, values=own.reshape(-1)
                )
                if self._compares_initial or first is None:
                    self.take("initial weights", part, own, is_split=logical.model_parallel)
                if first is None:
                    continue
                with gathered_parameter(parameter, groups) as target:
                    if target is not None:
                        target.zero_()
                        block = first[tuple(slice(*bounds) for bounds in logical.slices)]
                        without_padding(target, logical.slices).copy_(block)

    def take_number(self, kind: str, value: float) -> None:
        """Compare a number."""
        whole = self._values.get(kind, self.step, kind)
        if whole is not None:
            part = Part(
                name=kind, shape=(), block=(), start=0, values=torch.tensor([value], dtype=torch.float64)
            )
            self._compare(kind, part, whole, is_split=False)

    def take(self, kind: str, part: Part, target: Tensor, *, is_split: bool, scale: float = 1.0) -> None:
        """Compare a part, and write the reference's values in its place."""
        whole = self._values.get(kind, self.step, part.name)
        if whole is None:
            self.missing.append((kind, part.name))
            return
        expected = self._compare(kind, part, whole, is_split=is_split)
        target.copy_((expected * scale).view(target.shape))

    def _compare(self, kind: str, part: Part, whole: Tensor, *, is_split: bool) -> Tensor:
        """Add a row; return the reference's values."""
        found = part.values.detach().double().cpu().reshape(-1).clone()
        place = part.block, part.start, found.numel()
        expected = elements(whole, *place)
        # Of weights, what the update has changed is compared.
        before = self._values.weight_before(self.step, part.name) if kind == "weights" else None
        start = 0.0 if before is None else elements(before, *place)
        changed = found - start
        # A weight is rounded in its own dtype, however little it has changed.
        rounding = torch.finfo(part.values.dtype).eps * float(torch.linalg.vector_norm(expected))
        row = compare_values(
            changed,
            expected - start,
            scale=max(
                float(torch.linalg.vector_norm(expected - start)),
                self._floor(kind),
                0.0 if before is None else rounding / self._limit.error,
            ),
            step=self.step,
            kind=kind,
            name=part.name,
            place=self._place,
            is_split=is_split,
        )
        self.rows.append(row)
        if row.differs(self._limit) and expected.numel() <= _MOST_ELEMENTS:
            # Only what comes first is explained.
            if self.pieces and row.order < self.pieces[0].row.order:
                self.pieces.clear()
            if not self.pieces or row.order == self.pieces[0].row.order:
                self.pieces.append(Piece(row=row, block=part.block, start=part.start, values=changed))
        return expected

    def _floor(self, kind: str) -> float:
        """Return the least scale: rounding of values that cancel is relative to the others."""
        if kind not in ("gradients", "weights"):
            return 0.0
        known = self._floors.get((kind, self.step))
        if known is None:
            total, count = 0.0, 0
            for name in self._values.names(kind, self.step):
                whole = self._values.tensors[f"{kind}/{self.step}/{name}"].double()
                before = self._values.weight_before(self.step, name) if kind == "weights" else None
                changed = whole if before is None else whole - before.double()
                total, count = total + float(changed.square().sum()), count + 1
            known = self._floors[kind, self.step] = self._limit.floor * sqrt(total / max(1, count))
        return known


def without_padding(values: Tensor, block: Block) -> Tensor:
    """Return the part of a rank's tensor that belongs to the block."""
    for dim, (start, stop) in enumerate(block):
        values = values.narrow(dim, 0, stop - start)
    return values
