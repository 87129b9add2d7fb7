"""Faults planted in the run of `verify-layout` on a layout: each is found, and its text names it.

A fault replaces one function or method in the run on the layout; the reference is not affected. The
faults are those that users of other frameworks have reported. The patterns say what a user must be able to
read: the kind of fault, and the ranks or the group of ranks.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import distributed

from neox_launcher.protocol.layout_verification import LayoutAnswer
from neox_launcher.verify_layout.verify import LayoutVerification, case_of
from neox_model.initialization import initialize_parameters
from neox_model.parallel.collectives import all_reduce, gather_from_group
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.parallel.linear import zero_init
from neox_model.parallel.logical import named_logical_parameters, split_dim_of
from neox_model.parallel.random import seed_streams
from neox_model.parallel.sequence import TPInput, from_row_parallel
from support.distributed import run_ranks
from support.layout_answers import answer_of_ranks, arguments_of, rank_answer
from support.layout_faults import (
    Fault,
    Make,
    differing,
    first_argument,
    names_it,
    nothing,
    on_rank,
    rank,
    texts,
    times,
)
from support.settings import TINY

BASE = TINY | {"engine": "torch"}
STEPS = 2


def sums_copies_too(original: Any) -> Any:
    def sum_parts(self: Any) -> None:
        original(self)
        for parameter in self.parameters:
            if split_dim_of(parameter) is None:
                all_reduce(parameter.grad, self._groups.model)

    return sum_parts


def norm_without(*axes: str) -> Make:
    def make(original: Any) -> Any:
        def norm(parameters: Any, gradients: Any, groups: Any, *, are_sharded: bool = False) -> Any:
            others = replace(groups, **dict.fromkeys({*axes} - {"data"}, SINGLE_RANK))
            return original(parameters, gradients, others, are_sharded=are_sharded and "data" not in axes)

        return norm

    return make


def loses_gradients(original: Any) -> Any:
    def begin_last_pass(self: Any) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        original(self)

    return begin_last_pass


def loses_sharded_gradients(original: Any) -> Any:
    def begin(self: Any, *, is_last: bool) -> None:
        original(self, is_last=is_last)
        for held in self._held.values() if is_last else ():
            held.param.grad = None

    return begin


def swaps_parts_of_down(original: Any) -> Any:
    def initialize(model: Any, *arguments: Any, **named: Any) -> None:
        initialize_parameters(model, *arguments, **named)
        for name, parameter in named_logical_parameters(model):
            if name == "layers.1.mlp.down.weight":
                parts = [torch.empty_like(parameter) for _ in range(2)]
                distributed.all_gather(parts, parameter.data)
                parameter.data.copy_(parts[1 - rank()])

    return initialize


def orders_query_key_value_by_kind(original: Any) -> Any:
    def initialize(model: Any, *arguments: Any, **named: Any) -> None:
        initialize_parameters(model, *arguments, **named)
        for name, parameter in named_logical_parameters(model):
            if name.endswith("qkv.weight"):
                by_head = parameter.data.view(-1, 3, 8, parameter.shape[1])
                parameter.data = by_head.transpose(0, 1).reshape(parameter.shape).clone()

    return initialize


def own_mean(original: Any) -> Any:
    return lambda wide, group: wide.mean(-1, keepdim=True)


def sees_one_token_less(original: Any) -> Any:
    return lambda self, head, query, key: original(self, head, query, key + 1) | (query == key)


def with_logarithms_of_two(original: Any) -> Any:
    def loss(logits_CV: Any, labels: Any, weights_C: Any, vocabulary: Any) -> Any:
        return original(
            logits_CV, labels, weights_C, replace(vocabulary, z_loss=vocabulary.z_loss / math.log(2))
        )

    return loss


def parameters_of_first_rank(original: Any) -> Any:
    def widened(tensor: Any) -> Any:
        if not isinstance(tensor, torch.nn.Parameter):
            return original(tensor)
        first = tensor.detach().clone()
        distributed.broadcast(first, 0)
        return original(first + tensor - tensor.detach())

    return widened


def enters_without_sum(original: Any) -> Any:
    return lambda hidden, group: TPInput(hidden, hidden)


def sums_at_once_too(original: Any) -> Any:
    def mark(parameter: Any, group: Any) -> None:
        original(parameter, group)
        parameter.register_hook(lambda gradient: all_reduce(gradient.clone(), group))

    return mark


def leaves_out_biases(original: Any) -> Any:
    def apply(self: Any) -> None:
        kept = [
            (parameter, parameter.detach().clone())
            for parameter in self.parameters
            if parameter.logical.init is zero_init and split_dim_of(parameter) is None
        ]
        original(self)
        for parameter, before in kept:
            parameter.data.copy_(before)

    return apply


def adds_bias_on_every_rank(original: Any) -> Any:
    def forward(self: Any, inputs: Any, *, reduces: bool = True, product: Any = None) -> Any:
        partial_sums = torch.nn.functional.linear(inputs, self.weight, self.bias)
        return from_row_parallel(partial_sums, self.group), None

    return forward


def swaps_experts(original: Any) -> Any:
    """One expert's rows are computed with another's matrix, on the first rank."""

    def compute(self: Any, rows: Any, counts: Any) -> Any:
        if rank() == 0:
            counts = counts[[1, 0, *range(2, len(counts))]]
        return original(self, rows, counts)

    return compute


def adds_on_each_rank(original: Any) -> Any:
    return lambda rows, places, bias, **share: original(rows, places, bias)


def sums_parts_at_once_too(original: Any) -> Any:
    def make(shape: Any, *, is_partial: bool = False, **options: Any) -> Any:
        parameter = original(shape, is_partial=is_partial, **options)
        if is_partial:
            parameter.register_hook(lambda gradient: all_reduce(gradient.clone(), options["group"]))
        return parameter

    return make


def counts_own_tokens(original: Any) -> Any:
    """The biases of experts move by this rank's tokens alone."""

    def around_step(self: Any, step: Any, batches: Any) -> Any:
        self._groups = replace(self._groups, data=SINGLE_RANK)
        return original(self, step, batches)

    return around_step


def seeds_alike(original: Any) -> Any:
    return lambda seed, groups: seed_streams(seed, replace(groups, data=SINGLE_RANK))


def seeds_by_rank(original: Any) -> Any:
    return lambda seed, groups: seed_streams(seed + rank(), groups)


def first_rows(original: Any) -> Any:
    return lambda tensor, group: tensor.chunk(group.size)[0]


def sees_later_tokens(original: Any) -> Any:
    def arguments(self: Any, *given: Any) -> Any:
        inputs, options = original(self, *given)
        return inputs, options | {"is_causal": False}

    return arguments


def padded_vocabulary(original: Any) -> Any:
    def local(vocab_size: int, group: Any) -> tuple[int, int]:
        columns = -(-vocab_size // group.size)
        return group.rank * columns, (group.rank + 1) * columns

    return local


def of_first_replica(*, only_masks: bool) -> Make:
    def make(original: Any) -> Any:
        def train_batch(self: Any, micro_batches: Any) -> Any:
            def received() -> Iterator[Any]:
                for inputs, (labels, mask) in micro_batches:
                    for tensor in (mask,) if only_masks else (inputs, labels, mask):
                        distributed.broadcast(tensor, 0)
                    yield inputs, (labels, mask)

            return original(self, received())

        return train_batch

    return make


def own_norms(original: Any) -> Any:
    return lambda weights, norms, *groups: norms


def more_decay_on_later_ranks(original: Any) -> Any:
    return lambda parameters, decay: original(parameters, decay * (1 + rank()))


def twice_the_rate(original: property) -> property:
    return property(lambda self: 2 * original.fget(self))  # type: ignore[misc]


def clips_by_own_norm(original: Any) -> Any:
    def scale(self: Any, gradients: Any, scaled_norm: Any) -> None:
        own = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        original(self, gradients, own)
        self.norm = scaled_norm

    return scale


def updates_a_copy(original: Any) -> Any:
    def held(parameter: Any) -> Any:
        holder, found = original(parameter)
        holder.data = holder.data.clone()
        return holder, found

    return held


def own_gradient(original: Any) -> Any:
    return lambda tensor, group: gather_from_group(tensor, group, 0)


def stops_third_micro_batch(original: Any) -> Any:
    passes: list[None] = []

    def forward(self: Any, *inputs: Any, **targets: Any) -> Any:
        outputs = original(self, *inputs, **targets)
        passes.append(None)
        if len(passes) % 4 == 3 and outputs.requires_grad:
            outputs.register_hook(torch.zeros_like)
        return outputs

    return forward


def tokens_of_own_rank(original: Any) -> Any:
    return lambda *arguments, data: original(*arguments, data=SINGLE_RANK)


def sum_of_parts(original: Any) -> Any:
    def reduce(self: Any, output_tensor: Any, input_tensor: Any, *arguments: Any, **named: Any) -> None:
        original(self, output_tensor, input_tensor, *arguments, **named)
        output_tensor.mul_(2)

    return reduce


def own_parts(original: Any) -> Any:
    def reduce(self: Any, output_tensor: Any, input_tensor: Any, *arguments: Any, **named: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(2)[rank()])

    return reduce


def own_loss(original: Any) -> Any:
    return lambda group, loss: loss


def later_parts_first(original: Any) -> Any:
    return lambda tensor, group: original(tensor, group).roll(len(tensor), 0)


def in_one_stream(original: Any) -> Any:
    return lambda group, device, function: function()


def all_but_the_first(original: Any) -> Any:
    return lambda self, gradients: original(self, gradients[1:])


def without_division(original: Any) -> Any:
    return partialmethod(original, scale_wrt_gas=False)


_MIXED = "neox_model.optim.mixed_precision"
_OPTIMIZER = f"{_MIXED}.MixedPrecisionOptimizer"
_TENSOR, _DATA, _STAGES = r"tensor-parallel", r"data-parallel|replica", r"pipeline|stage"
_MISSING = r"missing|not summed|left out|without the sum"
_TWO = r"\b2(\.0+)? times|twice|once too often"

_WINDOWS = {
    "attention_config": [[["near"], "all"]],
    "attention_kinds": {"near": {"sliding_window_width": 4}},
}
_EXPERTS: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_expert_bias": True,
    "moe_expert_bias_rate": 0.1,
}

FAULTS: dict[str, Fault] = {
    "gradients of copies summed over tensor-parallel ranks": Fault(
        "tp=2,dp=1",
        f"{_OPTIMIZER}._sum_parts",
        sums_copies_too,
        (r"^gradients", _TWO, _TENSOR),
        is_quick=True,
    ),
    "input gradients of column-parallel matrices not summed": Fault(
        "tp=2,dp=1",
        "neox_model.parallel.sequence.copy_to_group",
        first_argument,
        (r"^gradients", _MISSING, _TENSOR),
    ),
    "input gradient of the head not summed": Fault(
        "tp=2,dp=1",
        "neox_model.layers.lm_head.to_column_parallel",
        first_argument,
        (r"^gradients", _MISSING, _TENSOR),
    ),
    "gradients not averaged over replicas": Fault(
        "dp=2",
        "neox_model.parallel.gradient_reduction.GradientReduction.__call__",
        nothing,
        (r"^gradients", r"only|own|not averaged|missing", _DATA),
        is_quick=True,
    ),
    "gradients summed over replicas": Fault(
        "dp=2",
        "neox_model.parallel.gradient_reduction.GradientReduction.finish",
        times(2),
        (r"^gradients", _TWO, _DATA),
    ),
    "gradients summed over replicas, on four ranks": Fault(
        "tp=2,dp=2",
        "neox_model.parallel.gradient_reduction.GradientReduction.finish",
        times(2),
        (r"^gradients", _TWO, _DATA),
    ),
    "gradients of norms not summed over parts of the sequence": Fault(
        "tp=2,sp=true,dp=1",
        f"{_MIXED}.sum_partial_gradients",
        nothing,
        (r"^gradients", r"norm", _MISSING, _TENSOR),
    ),
    "gradients of norms not summed with a parallel residual": Fault(
        "tp=2,dp=1",
        f"{_MIXED}.sum_partial_gradients",
        nothing,
        (r"^gradients", r"norm", _MISSING, _TENSOR),
        {"gpt_j_residual": True},
    ),
    "gradients of norms of outputs not summed over parts of the sequence": Fault(
        "tp=2,sp=true,dp=1",
        f"{_MIXED}.sum_partial_gradients",
        nothing,
        (r"^gradients", r"norm1_after", _MISSING, _TENSOR),
        {"norm_placement": "after"},
    ),
    "norm of queries and keys over the heads of one rank": Fault(
        "tp=2,dp=1",
        "neox_model.layers.attention.head_norms._mean",
        own_mean,
        (r"^loss", _TENSOR),
        {"qk_norm": "width", "norm": "rmsnorm"},
    ),
    "gradients of norms of heads not summed": Fault(
        "tp=2,dp=1",
        "neox_model.layers.attention.head_norms.mark_partial",
        nothing,
        (r"^gradients", r"qk_norm", _MISSING, _TENSOR),
        {"qk_norm": "head"},
    ),
    "gradients of norms of heads summed twice": Fault(
        "tp=2,sp=true,dp=1",
        "neox_model.layers.attention.head_norms.mark_partial",
        sums_at_once_too,
        (r"^gradients", r"qk_norm", _TWO, _TENSOR),
        {"qk_norm": "head"},
    ),
    "window of one rank's heads is off by one": Fault(
        "tp=2,dp=1",
        "neox_model.layers.attention.patterns.LocalPattern.forward",
        on_rank(1, sees_one_token_less),
        (r"^loss", _TENSOR),
        _WINDOWS,
    ),
    "window of one stage is off by one": Fault(
        "pp=2,dp=1",
        "neox_model.layers.attention.patterns.LocalPattern.forward",
        on_rank(1, sees_one_token_less),
        (r"^loss", _STAGES),
        _WINDOWS,
    ),
    "z-loss with logarithms of base 2": Fault(
        "tp=2,dp=1",
        "neox_model.parallel.cross_entropy._loss_and_gradient_with_z",
        with_logarithms_of_two,
        (r"^gradients", _TENSOR),
        {"z_loss": 0.1},
    ),
    "sinks of the first rank's heads on every rank": Fault(
        "tp=2,dp=1",
        "neox_model.layers.attention.dense.widen",
        parameters_of_first_rank,
        (r"^loss", _TENSOR),
        {"attention_sinks": True},
    ),
    "input gradients of gate and attention not summed": Fault(
        "tp=2,dp=1",
        "neox_model.layers.attention.parallel_attention.gather_input",
        enters_without_sum,
        (r"^gradients", _MISSING, _TENSOR),
        {"attention_gate": "head"},
    ),
    "norm without the tensor-parallel group": Fault(
        "tp=2,dp=1",
        f"{_MIXED}.global_gradient_norm",
        norm_without("model"),
        (r"^gradient norm", r"misses|without|missing|different", _TENSOR),
    ),
    "norm without the stages": Fault(
        "pp=2,dp=1",
        f"{_MIXED}.global_gradient_norm",
        norm_without("pipe"),
        (r"^gradient norm", r"misses|without|missing|different", _STAGES),
    ),
    "norm without the parts of ZeRO": Fault(
        "zero=2,dp=2",
        f"{_MIXED}.global_gradient_norm",
        norm_without("data"),
        (r"^gradient norm", r"misses|without|missing|different", rf"ZeRO|{_DATA}"),
    ),
    "norm with both copies of a tied weight": Fault(
        "pp=2,dp=1",
        "neox_model.optim.gradient_norm.is_stage_copy",
        lambda original: lambda parameter: False,
        (r"^gradient norm", r"twice|more than once", rf"tied|{_STAGES}"),
    ),
    "loss not divided by accumulation": Fault(
        "pp=2,dp=1",
        "neox_model.engine.updater.Updater.guard",
        times(4),
        (r"^gradients", r"\b4(\.0+)? times", r"accumulation|micro-batch"),
    ),
    "loss divided by accumulation twice": Fault(
        "tp=2,dp=1",
        "neox_model.engine.updater.Updater.guard",
        times(1 / 3),
        (r"^gradients", r"\b1/3 times", r"accumulation|micro-batch"),
    ),
    "only the last micro-batch counts": Fault(
        "dp=2",
        f"{_OPTIMIZER}.begin_last_pass",
        loses_gradients,
        (r"^gradients", r"only", r"last micro-batch|micro-batch(es)? (number )?3|lost|overwrit"),
        is_quick=True,
    ),
    "only the last micro-batch counts with ZeRO": Fault(
        "zero=2,dp=2",
        "neox_model.parallel.sharding.ShardedModel.begin",
        loses_sharded_gradients,
        (r"^gradients", r"only", r"last micro-batch|micro-batch(es)? (number )?3|lost|overwrit"),
    ),
    "gradient of a tied weight not summed over stages": Fault(
        "pp=2,dp=1",
        f"{_OPTIMIZER}._sum_over_stages",
        nothing,
        (r"^gradients", r"word_embeddings", _MISSING, _STAGES),
    ),
    "parts of a weight swapped": Fault(
        "tp=2,dp=1",
        "neox_model.assembly.model.initialize_parameters",
        swaps_parts_of_down,
        (r"^initial weights", r"mlp\.down", r"swap|another rank|other rank", _TENSOR),
    ),
    "rows of query, key and value in another order": Fault(
        "tp=2,dp=1",
        "neox_model.assembly.model.initialize_parameters",
        orders_query_key_value_by_kind,
        (r"^initial weights", r"qkv", r"permuted|another order|other order"),
    ),
    "stale biases on one tensor-parallel rank": Fault(
        "tp=2,dp=1",
        f"{_OPTIMIZER}._apply",
        on_rank(1, leaves_out_biases),
        (r"^weights", r"bias", r"rank 1\b", r"not (been )?(updated|changed)|stale|unchanged|\bold\b|kept"),
    ),
    "row-parallel bias added on every rank": Fault(
        "tp=2,dp=1",
        "neox_model.parallel.linear.RowParallelLinear.forward",
        adds_bias_on_every_rank,
        (r"^loss", _TENSOR),
    ),
    "replicas drop the same elements": Fault(
        "dp=2",
        "neox_model.train.open_run.seed_streams",
        seeds_alike,
        (r"^random streams", r"same", _DATA),
        {"hidden_dropout": 0.1},
    ),
    "tensor-parallel ranks drop different elements": Fault(
        "tp=2,dp=1",
        "neox_model.train.open_run.seed_streams",
        seeds_by_rank,
        (r"^random streams", r"different", _TENSOR),
        {"hidden_dropout": 0.1},
    ),
    "parts of the sequence drop the same elements": Fault(
        "tp=2,sp=true,dp=1",
        "neox_model.parallel.sequence.in_split_stream",
        in_one_stream,
        (r"^random streams", r"same", _TENSOR),
        {"hidden_dropout": 0.1},
    ),
    "heads of all tensor-parallel ranks drop the same elements": Fault(
        "tp=2,dp=1",
        "neox_model.layers.attention.dense.in_split_stream",
        in_one_stream,
        (r"^random streams", r"same", _TENSOR),
        {"attention_dropout": 0.1},
    ),
    "positions of the first part of the sequence on every rank": Fault(
        "tp=2,sp=true,dp=1",
        "neox_model.layers.embedding.own_rows",
        first_rows,
        (r"^loss", rf"{_TENSOR}|sequence"),
    ),
    "parts of the sequence gathered in another order": Fault(
        "tp=2,sp=true,dp=1",
        "neox_model.parallel.sequence.gather_to_group",
        later_parts_first,
        (r"^loss", rf"{_TENSOR}|sequence"),
    ),
    "heads of one rank see later tokens": Fault(
        "tp=2,dp=1",
        "neox_model.layers.attention.dense.DenseCore.arguments",
        on_rank(1, sees_later_tokens),
        (r"^loss", _TENSOR),
    ),
    "padding of the vocabulary counts in the loss": Fault(
        "tp=2,dp=1",
        "neox_model.parallel.cross_entropy.local_vocabulary",
        padded_vocabulary,
        (r"^loss", rf"{_TENSOR}|vocabulary|padding"),
    ),
    "all replicas train on the samples of the first": Fault(
        "dp=2",
        "neox_model.engine.torch_engine.TorchEngine.train_batch",
        of_first_replica(only_masks=False),
        (r"^loss", _DATA),
    ),
    "loss masks of another replica": Fault(
        "dp=2",
        "neox_model.engine.torch_engine.TorchEngine.train_batch",
        of_first_replica(only_masks=True),
        (r"^loss", _DATA),
        {"eod_mask_loss": True},
    ),
    "reported loss not averaged over replicas": Fault(
        "dp=2",
        "neox_model.engine.torch_engine.mean_over",
        own_loss,
        (r"^loss", _DATA),
    ),
    "loss divided by the tokens of the own replica": Fault(
        "dp=2",
        "neox_model.train.data.streams.weighted_globally",
        tokens_of_own_rank,
        (r"^loss", _DATA),
        {"eod_mask_loss": True, "loss_normalization": "global"},
    ),
    "LAMB with the norms of parts": Fault(
        "tp=2,dp=1",
        "neox_model.optim.lamb.whole_norms",
        own_norms,
        (r"^weights", r"factor|norm", rf"{_TENSOR}|rank's (own )?part"),
        {"optimizer": {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}}},
    ),
    "LAMB with the norms of ZeRO's parts": Fault(
        "zero=1,dp=2",
        "neox_model.optim.lamb.whole_norms",
        own_norms,
        (r"^weights", r"factor|norm", rf"ZeRO|{_DATA}|rank's (own )?part"),
        {"optimizer": {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}}},
    ),
    "twice the weight decay on the second stage": Fault(
        "pp=2,dp=1",
        "neox_model.assembly.optimizer.split_by_weight_decay",
        more_decay_on_later_ranks,
        (r"^weights", r"decay", r"stage 1|rank 1\b|second stage|last stage"),
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}},
    ),
    "twice the learning rate on one replica": Fault(
        "dp=2",
        "neox_model.optim.lr_schedule.LearningRateSchedule.current_rate",
        on_rank(1, twice_the_rate),
        (r"^weights", rf"{_TWO}|learning rate", r"rank 1\b|replica 1"),
    ),
    "clipping by the norm of one tensor-parallel rank": Fault(
        "tp=2,dp=1",
        f"{_OPTIMIZER}._scale",
        clips_by_own_norm,
        (r"^(weights|optimizer states)", r"clip|norm", rf"{_TENSOR}|rank's (own )?part"),
        {"gradient_clipping": 0.1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    ),
    "clipping by the norm of one stage, with Adam": Fault(
        "pp=2,dp=1",
        f"{_OPTIMIZER}._scale",
        clips_by_own_norm,
        (r"^(weights|optimizer states)", r"clip|norm", rf"{_STAGES}|rank's (own )?part"),
        {"gradient_clipping": 0.1},
    ),
    "updated parts of one rank not gathered": Fault(
        "zero=1,dp=2",
        "neox_model.parallel.sharding._held",
        on_rank(1, updates_a_copy),
        (r"not compute with the updated|stale|\bold\b|gather|before the update", rf"ZeRO|{_DATA}|rank 1\b"),
    ),
    "input gradients not reduced to parts of the sequence": Fault(
        "tp=2,sp=true,dp=1",
        "neox_model.parallel.sequence.gather_to_group",
        own_gradient,
        (r"^gradients", rf"{_TENSOR}|sequence"),
    ),
    "the first stage loses a micro-batch": Fault(
        "pp=2,dp=1",
        "neox_model.assembly.as_stages.Chunk.forward",
        on_rank(0, stops_third_micro_batch),
        (r"^gradients", r"micro-batch", r"stage 0|rank 0|first stage"),
    ),
    "input gradients of adapters not summed": Fault(
        "tp=2,dp=1",
        "neox_model.parallel.low_rank.to_column_parallel",
        first_argument,
        (r"^gradients", r"adapter\.a\b", _MISSING, _TENSOR),
        {"lora_rank": 2, "lora_alpha": 8.0, "lora_base": "base"},
    ),
    "gradients summed over ZeRO's replicas": Fault(
        "zero=2,dp=2",
        "neox_model.parallel.sharding.MeanReduceScatter.__call__",
        sum_of_parts,
        (r"^gradients", _TWO, _DATA),
    ),
    "gradients of copies summed over tensor-parallel ranks, on four ranks": Fault(
        "tp=2,dp=2",
        f"{_OPTIMIZER}._sum_parts",
        sums_copies_too,
        (r"^gradients", _TWO, _TENSOR),
    ),
    "gradients of norms not summed over parts of the sequence, on four ranks": Fault(
        "tp=2,sp=true,dp=2",
        f"{_MIXED}.sum_partial_gradients",
        nothing,
        (r"^gradients", r"norm", _MISSING, _TENSOR),
    ),
    "gradient of a tied weight not summed over stages, on four ranks": Fault(
        "pp=2,dp=2",
        f"{_OPTIMIZER}._sum_over_stages",
        nothing,
        (r"^gradients", r"word_embeddings", _MISSING, _STAGES),
    ),
    "one gradient not averaged over replicas": Fault(
        "dp=2",
        "neox_model.parallel.gradient_reduction.GradientReduction.__call__",
        all_but_the_first,
        (r"^gradients", r"word_embeddings", r"only|own|not averaged|missing", _DATA),
    ),
    "accumulation not divided by DeepSpeed": Fault(
        "zero=1,dp=2",
        "deepspeed.runtime.engine.DeepSpeedEngine.backward",
        without_division,
        (r"^gradients", _TWO, r"accumulation|micro-batch"),
        {"engine": "deepspeed", "precision": "fp32"},
    ),
    "the gradient of a router summed twice": Fault(
        "tp=2",
        "neox_model.layers.experts.router.logical_parameter",
        sums_parts_at_once_too,
        (r"^gradients", _TWO, r"router"),
        _EXPERTS,
        is_quick=True,
    ),
    "the biases of experts added on each rank": Fault(
        "tp=2",
        "neox_model.layers.experts.blocks._biased",
        adds_on_each_rank,
        (r"^loss",),
        _EXPERTS | {"use_bias_in_experts": True},
    ),
    "the gradient of biases of experts summed twice": Fault(
        "tp=2",
        "neox_model.layers.experts.blocks.logical_parameter",
        sums_parts_at_once_too,
        (r"^gradients", _TWO, r"down_bias"),
        _EXPERTS | {"use_bias_in_experts": True},
    ),
    "two experts exchanged on a rank": Fault(
        "tp=2",
        "neox_model.layers.experts.blocks.ExpertBlocks.forward",
        swaps_experts,
        (r"^loss",),
        _EXPERTS,
    ),
    "a balance of the tokens of each replica": Fault(
        "dp=2",
        "neox_model.train.callbacks.experts.ExpertBalance.around_step",
        counts_own_tokens,
        (r"^model states",),
        _EXPERTS,
    ),
    "gradients of ZeRO's parts not averaged over replicas": Fault(
        "zero=3,dp=2",
        "neox_model.parallel.sharding.MeanReduceScatter.__call__",
        own_parts,
        (r"^gradients", r"only|own|not averaged|missing", _DATA),
    ),
}


def verify(folder: Path, fault: Fault, name: str | None) -> LayoutAnswer:
    """The answer on the layout of a fault, which is planted if its name is given."""
    path = folder / "settings.yml"
    path.write_text(yaml.safe_dump(BASE | fault.settings))
    case = case_of(LayoutVerification(paths=(str(path),)), fault.layout)
    return answer_of_ranks(run_ranks(answer_here, name=name, **arguments_of(case, folder, steps=STEPS)))


def answer_here(folder: str, resolved: str, request: str, name: str | None) -> list[dict[str, Any]]:
    return rank_answer(folder, resolved, request, nullcontext if name is None else FAULTS[name].planted)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if fault.is_quick else pytest.mark.slow) for name, fault in FAULTS.items()],
)
def test_a_fault_is_found_and_named(name: str, tmp_path: Path) -> None:
    answer = verify(tmp_path, FAULTS[name], name)
    assert differing(answer), "the fault has no effect"
    found = texts(answer)
    assert any(names_it(each, FAULTS[name].says) for each in found), "\n".join(found) or "no findings"


_CASES = {f"{fault.layout} {fault.settings}": fault for fault in FAULTS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES)
def test_nothing_is_found_without_a_fault(case: str, tmp_path: Path) -> None:
    answer = verify(tmp_path, _CASES[case], None)
    assert (differing(answer), texts(answer)) == ([], [])
    assert answer.parts
