"""Compression of the model in training: what changes between two iterations."""

import logging
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from neox_config.extras.compression.facts import block_of, density_at, is_n_of_m
from neox_config.pluralize import pluralize
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.zero_sharding import whole_parameter
from neox_model.checkpoint.logical import copy_model_states
from neox_model.engine.contract import Engine, PendingUpdate
from neox_model.extras.compression.attach import snip_rules
from neox_model.extras.compression.matrices import (
    Compressed,
    PruningRule,
    compressed_matrices,
    learn_masks,
)
from neox_model.extras.compression.pruning import (
    Pruning,
    block_scores,
    keep_n_of_m,
    kept_blocks,
    largest,
    threshold_of,
)
from neox_model.extras.eigenvalues.measure import EigenvaluesCallback
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import LogicalState, begin_iteration, model_states, named_logical_parameters
from neox_model.parallel.param_shard import ParamShard
from neox_model.parallel.partitioned import is_sharded
from neox_model.train.callbacks.measurement import Measurement
from neox_model.train.run import Run
from neox_model.train.state import StepReport

__all__ = ["CompressionCallback", "TrainedCompression", "copy_compression"]

logger = logging.getLogger(__name__)

# Weight of the past in scores of weight times gradient.
_DECAY = 0.9


class TrainedCompression:
    """The compression of the matrices of this rank in a run.

    Between two iterations it updates ranges of inputs, makes masks, sets what they prune for good to zero in
    the master weights, and quantizes the weights of the next iteration. What it does depends on the iteration
    and on the whole model alone.

    Args:
        engine: trains the model.
        groups: this rank's process groups.
        dtype: dtype of the computation, in which masks are made.
        snip: rules of weights pruned by snip_momentum, by scope; the same on every stage.
        factors: returns by how much the period of a matrix's bits grows when they are reduced, given its
            name; used by matrices with periods that grow.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Groups,
        *,
        dtype: torch.dtype,
        snip: Mapping[str, PruningRule],
        factors: Callable[[str], int] = lambda name: 1,
    ) -> None:
        self._factors = factors
        self.matrices = compressed_matrices(engine.model)
        self._engine, self._groups, self._dtype, self._snip = engine, groups, dtype, snip
        self._scores = _SnipScores(self.matrices, engine) if snip else None

    def states(self) -> list[LogicalState]:
        """Return what a checkpoint contains of it besides weights."""
        own = [] if self._scores is None else list(self._scores.states())
        return [*model_states(self._engine.model), *own]

    def bits(self) -> dict[str, int | None]:
        """Return the numbers of bits of quantized weights on this rank, by the name of the matrix."""
        quantizers = {matrix.name: matrix.compression.quantizer for matrix in self.matrices}
        return {name: each.bits for name, each in quantizers.items() if each is not None}

    @torch.no_grad()
    def start(self, iteration: int) -> None:
        """Prepare the first iteration of this process, after a checkpoint was loaded. Collective."""
        # A checkpoint has the masks of its iteration; weights that they prune are zero there.
        self._begin(iteration, makes_masks=iteration == 0)

    @torch.no_grad()
    def after(self, iteration: int) -> None:
        """Prepare the next iteration, whose number is that of the finished ones. Collective."""
        self._update_ranges()
        for matrix in self.matrices:
            bits, progress = matrix.compression.bits, matrix.compression.progress
            if bits is not None and progress is not None:
                # Their periods depend on the eigenvalues of their layers.
                bits.advance(progress, iteration, self._factors(matrix.name))
        self._begin(iteration, makes_masks=True)

    def _begin(self, iteration: int, *, makes_masks: bool) -> None:
        for matrix in self.matrices:
            matrix.compression.begin(iteration)
        learn_masks(self.matrices, self._computing)
        if makes_masks:
            self._make_masks(iteration)
        self._zero_pruned()
        # The 16-bit weights of the computation are made from the master weights, quantized.
        for matrix in self.matrices:
            quantizer, weight = matrix.compression.quantizer, matrix.module.weight
            if quantizer is not None and not quantizer.in_forward:
                master = self._masters()[id(weight)]
                weight.data.copy_(quantizer.rounded(master.data.to(weight.dtype)))

    def _computing(self, parameter: nn.Parameter) -> Tensor:
        """Return what this tensor-parallel rank has of a parameter, as the forward pass has it."""
        return whole_parameter(parameter, self._groups).to(self._dtype)

    def _update_ranges(self) -> None:
        """Add the ranges of this iteration's inputs to the running averages, in one message per group."""
        quantizers = [matrix.compression.inputs for matrix in self.matrices]
        static = [each for each in quantizers if each is not None and not each.is_dynamic]
        if not static:
            return
        seen = torch.stack([each.seen for each in static])
        for group in (self._groups.data, self._groups.model):
            seen = all_reduce(seen, group, ReduceOp.MAX)
        for quantizer, found in zip(static, seen, strict=True):
            quantizer.update_range(found)

    def _make_masks(self, iteration: int) -> None:
        """Make the masks without scores that change in this iteration."""
        for matrix in self.matrices:
            for kind, pruning in matrix.compression.masks():
                rule = matrix.compression.rules[kind]
                if rule.method == "l1" and iteration == rule.offset:
                    size = self._computing(matrix.module.weight).float().abs()
                    size = size.sum(dim=1, keepdim=True) if kind == "rows" else size
                    pruning.set_mask(largest(pruning.whole(size), rule.ratio))
        for scope, rule in self._snip.items():
            density = density_at(
                iteration, start=rule.offset, end=rule.end, stride=rule.stride, target=rule.ratio
            )
            if density is not None:
                self._prune_scope(scope, rule, density)

    def _prune_scope(self, scope: str, rule: PruningRule, density: float) -> None:
        """Make the masks of weights that are compared with each other."""
        assert self._scores is not None
        inside = [
            (matrix, pruning)
            for matrix, pruning in _sparse(self.matrices)
            if matrix.compression.rules["sparse"].scope == scope
        ]
        scores = [pruning.whole(self._scores.block_of(matrix, self._groups)) for matrix, pruning in inside]
        block = block_of(rule.pattern)
        if is_n_of_m(rule.pattern):
            for (_, pruning), score in zip(inside, scores, strict=True):
                pruning.set_mask(keep_n_of_m(score, *block))
            return
        blocks = [block_scores(score, block) for score in scores]
        bound = threshold_of(blocks, density, self._groups.pipe, device=self._engine.device)
        for (_, pruning), found in zip(inside, blocks, strict=True):
            pruning.set_mask(kept_blocks(found >= bound, block))

    def _zero_pruned(self) -> None:
        """Set the weights and biases to zero that masks without scores prune, and their master copies."""
        keeps = {id(parameter): keep for parameter, keep in self._static_masks()}
        if not keeps:
            return
        with self._engine.update.in_memory(changes=True):
            for held in self._engine.update.param_shards():
                keep = keeps.get(id(held.param))
                if keep is None:
                    continue
                mine = keep.flatten()[held.start : held.start + held.numel]
                elements = held.holder.data.view(-1).narrow(0, held.offset, held.numel)
                elements.mul_(mine.to(held.holder.dtype))
                if not is_sharded(held.param):
                    # Copies of the model have the weights of the computation, which may be others in 16 bit.
                    held.param.data.mul_(keep.to(held.param.dtype))

    def _static_masks(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for matrix in self.matrices:
            weight, bias = matrix.module.weight, matrix.module.bias
            (_, _), (first, stop) = matrix.logical.slices
            keeps = [
                (kind, pruning.kept(stop - first))
                for kind, pruning in matrix.compression.masks()
                if pruning.is_on and pruning.scores is None
            ]
            if keeps:
                yield weight, torch.stack([keep for _, keep in keeps]).all(dim=0)
            if bias is not None:
                yield from ((bias, keep[:, 0]) for kind, keep in keeps if kind == "rows")

    def _masters(self) -> dict[int, Tensor]:
        """Return the master weights by the id of the weight, of engines that hold whole ones."""
        return {id(held.param): held.holder for held in self._engine.update.param_shards()}

    @torch.no_grad()
    def report(self) -> dict[str, float]:
        """Return figures of the compression, the same on every rank. Collective over all ranks.

        `compression/bits`: mean number of bits of the quantized weights; `compression/sparsity`: share of
        zeros in pruned matrices; `compression_error/NAME`: norm of the change of a weight over its norm.
        """
        sums: dict[str, list[float]] = {}
        masters = self._masters()
        for matrix in self.matrices:
            quantizer, used = matrix.compression.quantizer, self._computing(matrix.module.weight)
            exact = used.float()
            if quantizer is not None and not quantizer.in_forward:
                # The weights of the computation are quantized already.
                exact = masters[id(matrix.module.weight)].data.float()
            used = matrix.compression.of_weight(used).float()
            figures = [exact.square().sum(), (used - exact).square().sum(), (used == 0).sum()]
            values = torch.stack([figure.double() for figure in figures])
            if matrix.logical.model_parallel:
                values = all_reduce(values, self._groups.model)
            if self._groups.data.rank == 0:
                bits = 0 if quantizer is None or quantizer.bits is None else quantizer.bits
                is_pruned = any(pruning.is_on for _, pruning in matrix.compression.masks())
                sums[matrix.name] = [*values.tolist(), bits, prod(matrix.logical.shape), is_pruned]
        found = {
            name: row for each in all_gather_object(self._groups.control, sums) for name, row in each.items()
        }
        return _figures(found)


def _figures(found: Mapping[str, list[float]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    quantized = [(bits, numel) for _, _, _, bits, numel, _ in found.values() if bits]
    if quantized:
        total = sum(numel for _, numel in quantized)
        metrics["compression/bits"] = sum(bits * numel for bits, numel in quantized) / total
    pruned = [(zeros, numel) for _, _, zeros, _, numel, is_pruned in found.values() if is_pruned]
    if pruned:
        metrics["compression/sparsity"] = sum(zeros for zeros, _ in pruned) / sum(
            numel for _, numel in pruned
        )
    for name, (norm, error, *_) in sorted(found.items()):
        metrics[f"compression_error/{name}"] = (error / norm) ** 0.5 if norm else 0.0
    return metrics


class _SnipScores:
    """The running magnitude of weight times gradient, s = 0.9 s + |w g|, of what this rank updates.

    Args:
        matrices: this rank's.
        engine: shows the gradients of each update.
    """

    def __init__(self, matrices: list[Compressed], engine: Engine) -> None:
        names = {f"{matrix.name}.weight": matrix for matrix, _ in _sparse(matrices)}
        named = dict(named_logical_parameters(engine.model))
        self._splits = engine.update.splits_over_data
        self._held: dict[str, ParamShard] = {}
        self._values: dict[str, Tensor] = {}
        self._logical = {name: matrix.logical for name, matrix in names.items()}
        by_parameter = {id(named[name]): name for name in names}
        for held in engine.update.param_shards():
            name = by_parameter.get(id(held.param))
            if name is not None:
                self._held[name] = held
                self._values[name] = torch.zeros(held.numel, device=held.holder.device)
        engine.update.before(self._add)

    def _add(self, update: PendingUpdate) -> None:
        is_finite = update.norm.isfinite()
        for name, weight, gradient in update.weights():
            if name in self._values:
                score, held = self._values[name], self._held[name]
                saliency = (weight.float() * gradient.float()).abs().reshape(-1)[held.offset :][: held.numel]
                score.copy_(torch.where(is_finite, _DECAY * score + saliency, score))

    def block_of(self, matrix: Compressed, groups: Groups) -> Tensor:
        """Return the scores of this tensor-parallel rank's block; collective over the data group in ZeRO."""
        name, local = f"{matrix.name}.weight", [stop - start for start, stop in matrix.logical.slices]
        block = torch.zeros(local[0] * local[1], device=matrix.module.weight.device)
        if name in self._values:
            block[self._held[name].start :][: self._held[name].numel] = self._values[name]
        return all_reduce(block, groups.data).view(local) if self._splits else block.view(local)

    def states(self) -> Iterator[LogicalState]:
        """Yield the scores for a checkpoint."""
        for name, values in self._values.items():
            logical = self._logical[name]
            yield LogicalState(
                name=f"{name.removesuffix('.weight')}.compression.prunings.sparse/score",
                shape=logical.shape,
                slices=logical.slices,
                start=self._held[name].start,
                values=values,
                is_split_over_model=logical.model_parallel,
                is_split_over_data=self._splits,
            )


def _sparse(matrices: list[Compressed]) -> Iterator[tuple[Compressed, Pruning]]:
    for matrix in matrices:
        for kind, pruning in matrix.compression.masks():
            if kind == "sparse":
                yield matrix, pruning


class CompressionCallback(Measurement):
    """Prepares the compression of the next iteration after every iteration, and writes its figures.

    Args:
        compression: the compression.
        interval: iterations between two writes.
        is_verbose: log every change of a number of bits.
    """

    def __init__(self, compression: TrainedCompression, *, interval: int, is_verbose: bool) -> None:
        super().__init__(interval)
        self._compression = compression
        self._is_verbose = is_verbose

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if the model is compressed."""
        spec, measured = run.resolved.run, run.callback(EigenvaluesCallback)
        if not spec.compressible:
            return None
        compression = TrainedCompression(
            run.engine,
            run.groups,
            dtype=DTYPES[spec.precision.weights],
            snip=snip_rules(spec.compression, spec.compressible),
            factors=(lambda name: 1) if measured is None else measured.eigenvalues.factor,
        )
        shared = run.config.compression.compression_training.weight_quantization.shared_parameters
        return cls(
            compression,
            interval=run.config.logging.log_interval,
            is_verbose=shared.enabled and shared.quantize_verbose,
        )

    def states(self) -> list[LogicalState]:
        """Return masks, ranges and scores."""
        return self._compression.states()

    def on_load(self) -> None:
        """Prepare the first iteration of this process. Collective."""
        self._compression.start(self.run.state.iteration)

    def on_start(self) -> None:
        """Log the numbers of bits."""
        self._log_bits({}, self.run.state.iteration)

    def on_step(self, report: StepReport) -> None:
        """Prepare the next iteration."""
        before = self._compression.bits()
        self._compression.after(self.run.state.iteration)
        self._log_bits(before, self.run.state.iteration)
        super().on_step(report)

    def on_copy(self, model: nn.Module) -> None:
        """Let a copy of the model compute as it does. Collective."""
        copy_compression(self.run.model, model, self.run.state.iteration, self.run.groups)

    def measure(self) -> Mapping[str, float]:
        """Return figures of the compression. Collective."""
        return self._compression.report()

    def _log_bits(self, before: dict[str, int | None], iteration: int) -> None:
        for name, bits in self._compression.bits().items() if self._is_verbose else ():
            if bits is not None and bits != before.get(name):
                logger.info(
                    "iteration %d: the weights of %s have %s", iteration, name, pluralize(bits, "bit")
                )


def copy_compression(source: nn.Module, target: nn.Module, iteration: int, groups: Groups) -> None:
    """Let a copy of a model in training compute as that does. Collective over all ranks.

    Args:
        source: the model in training.
        target: has its weights.
        iteration: finished iterations.
        groups: this rank's process groups.
    """
    # Weights that masks without scores prune are zero.
    small = [state for state in model_states(source) if not state.name.endswith("/keep")]
    quantizers = [matrix.compression.quantizer for matrix in compressed_matrices(source)]
    are_rounded = any(each is not None and not each.in_forward for each in quantizers)
    if any(all_gather_object(groups.control, are_rounded)):
        for matrix in compressed_matrices(target):
            if matrix.compression.quantizer is not None:
                # The copied weights are quantized already.
                matrix.compression.quantizer.in_forward = False
    copy_model_states(small, target, groups)
    begin_iteration(target, iteration)
