"""Rules about compression_training, and eigenvalues, which determine its periods."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from neox_config.derive.attention_layers import types_in
from neox_config.derive.engine import chosen_engine, uses_pipeline
from neox_config.derive.experts import has_experts
from neox_config.derive.optimizer_arguments import optimizer_facts
from neox_config.derive.pipeline import splits_backward
from neox_config.derive.recomputation import recomputes_gated_product
from neox_config.extras.compression.facts import (
    FEED_FORWARD_INPUTS,
    HEADS_OUTPUT,
    RELATED_MATRICES,
    block_of,
    is_n_of_m,
)
from neox_config.extras.compression.fields import PruningGroup, SparsePruningGroup
from neox_config.extras.compression.matrices import (
    COMPRESSIONS,
    CompressionGroup,
    compresses,
    compressible_matrices,
    group_memberships,
    kind_of,
    matching,
    matrix_shape,
)
from neox_config.facts.attention import BIASED_SCORES
from neox_config.facts.stores import is_url
from neox_config.pluralize import pluralize
from neox_config.problems import Problem, did_you_mean, refusals
from neox_config.schema.config import NeoXConfig

_NAME = "compression_training"
_WITH_CHANNELS = (*COMPRESSIONS, "channel_pruning")
_WEIGHTS = f"{_NAME}.weight_quantization"
_SPARSE = f"{_NAME}.sparse_pruning.shared_parameters"
_LAYERS = "layers"
_REDUCTION = f"{_NAME}.layer_reduction"
# First part of the names of the modules that a student can copy.
_COPIED = ("embedding", _LAYERS, "final_norm", "lm_head")
_NO_FURTHER_BITS = 3
# Pruned part -> the matrices that it can prune, and what they are.
_PRUNES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "row_pruning": (FEED_FORWARD_INPUTS, "the input matrices of the MLP (mlp.up, mlp.gate)"),
    "head_pruning": ((HEADS_OUTPUT,), "the output matrices of the attention (attention.dense)"),
}


def compression_says_what_it_compresses(c: NeoXConfig) -> Iterator[Problem]:
    """Require at least one group in every enabled part, unless its method selects the weights itself."""
    for part in _WITH_CHANNELS:
        block = getattr(c.compression.compression_training, part)
        finds_them = getattr(block.shared_parameters, "method", "") == "snip_momentum"
        if block.shared_parameters.enabled and not block.different_groups and not finds_them:
            yield Problem(
                f"{_NAME}.{part}.different_groups",
                f"is empty, but {part} is enabled",
                "add a group: {my_group: {params: {...}, modules: [...]}}",
                value="",
            )


def pruning_keeps_something(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a density that rounds to no weight, row or head of a matrix, which would then compute 0."""
    if not _patterns_are_valid(c):
        return
    numbers: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
        "sparse_pruning": ("weights", lambda rows, columns: rows * columns),
        "row_pruning": ("rows", lambda rows, columns: rows),
        "head_pruning": ("heads", lambda rows, columns: c.model.num_attention_heads),
    }
    for part, (what, number_in) in numbers.items():
        for key, group, names in _groups(c, part):
            if group is None:
                continue
            assert isinstance(group, PruningGroup | SparsePruningGroup)
            ratio = group.params.dense_ratio
            name = next(
                (each for each in names if round(ratio * number_in(*matrix_shape(c, each))) < 1), None
            )
            if name is not None:
                total = number_in(*matrix_shape(c, name))
                place = f"{_NAME}.{part}.different_groups.{key}.params.dense_ratio"
                reason = f"keeps none of the {total:,} {what} of {name}, which would compute 0"
                yield Problem(place, reason, f"use at least {1 / total:.2g}")


def pruning_finds_matrices(c: NeoXConfig) -> Iterator[Problem]:
    """Require weights to prune where the method selects them itself."""
    block = c.compression.compression_training.sparse_pruning
    finds_them = block.shared_parameters.method == "snip_momentum"
    if not (block.shared_parameters.enabled and finds_them and _patterns_are_valid(c)):
        return
    for key, _, names in _groups(c, "sparse_pruning"):
        if names:
            continue
        if block.shared_parameters.excluded_modules:
            place, remedy = f"{_SPARSE}.excluded_modules", "exclude fewer"
        else:
            place, remedy = f"{_SPARSE}.enabled", "set it to false"
        group = f" to the group {key}" if key else ""
        yield Problem(place, f"leaves no matrix of the layers{group} to prune", remedy)


def compression_patterns_match(c: NeoXConfig) -> Iterator[Problem]:
    """Require every pattern to be a regular expression that is found in the name of a matrix."""
    if not types_in(c):
        return
    names = compressible_matrices(c)
    for part in COMPRESSIONS:
        block = getattr(c.compression.compression_training, part)
        if not block.shared_parameters.enabled:
            continue
        listed = [
            ("shared_parameters.excluded_modules", getattr(block.shared_parameters, "excluded_modules", ()))
        ]
        for key, group in block.different_groups.items():
            listed.append((f"different_groups.{key}.modules", group.modules))
            related = getattr(group, "related_modules", None) or ()
            listed.append(
                (f"different_groups.{key}.related_modules", [one for each in related for one in each])
            )
        for place, patterns in listed:
            for pattern in patterns:
                yield from _unmatched(f"{_NAME}.{part}.{place}", pattern, names)


def _unmatched(place: str, pattern: str, names: Sequence[str]) -> Iterator[Problem]:
    try:
        if matching([pattern], names):
            return
    except re.error as error:
        yield Problem(
            place, f"contains {pattern!r}, which is not a regular expression: {error}", "correct it"
        )
        return
    kinds = sorted({kind_of(name) for name in names})
    near = (
        did_you_mean(pattern, [*kinds, *names], cutoff=0.5)
        or f"use a part of {', '.join(kinds) or 'no name'}"
    )
    yield Problem(place, f"contains {pattern!r}, which matches no matrix of the layers", near)


def compression_groups_are_disjoint(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a matrix that belongs to two groups of a part."""
    if not _patterns_are_valid(c):
        return
    for part in COMPRESSIONS:
        owners: dict[str, str] = {}
        for key, _, names in _groups(c, part):
            for name in names:
                if owners.setdefault(name, key) != key:
                    what = f"contains {name}, which belongs to the group {owners[name]}, too"
                    yield Problem(f"{_NAME}.{part}.different_groups.{key}.modules", what, "list it once")
                    break


def compressed_layers_are_plain(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse compression of adapters, of shared layers, and where weights of replicas differ."""
    if not compresses(c):
        return iter(())
    cannot, parts = "cannot be combined with compression_training", c.compression.compression_training
    return refusals(
        (c.adapters.lora_rank, "lora_rank", f"{cannot}, which trains the layers' own matrices", "remove it"),
        (
            _shares_weights(c),
            "num_unique_layers",
            f"{cannot}, which knows matrices by their layer",
            "remove it",
        ),
        (
            optimizer_facts(c).replica_states,
            "optimizer.type",
            f"{cannot}: gradients and weights differ between replicas",
            "use Adam",
        ),
        (
            splits_backward(c),
            "pipeline_schedule",
            f"{cannot}: it computes gradients of weights apart",
            "use 1f1b or interleaved",
        ),
        (
            chosen_engine(c).name == "deepspeed" and c.zero.zero_optimization.stage > 0,
            "zero_optimization.stage",
            f"{cannot} under DeepSpeed's engine",
            "use engine: torch, or stage 0",
        ),
        (
            c.optimizer.ema_decay is not None,
            "ema_decay",
            "averages weights that are neither quantized nor pruned, as those of the compressed model are",
            "remove it, or compress after training",
        ),
        *(
            (
                has_experts(c) and getattr(parts, part).shared_parameters.enabled,
                f"compression_training.{part}.shared_parameters.enabled",
                "requires matrices of feed-forward blocks, which experts do not have",
                "set it to false, or moe-num-experts: 1",
            )
            for part in COMPRESSIONS
        ),
    )


def _shares_weights(c: NeoXConfig) -> bool:
    return c.model.num_unique_layers is not None and c.model.num_unique_layers < c.model.num_layers


def bits_do_not_grow(c: NeoXConfig) -> Iterator[Problem]:
    """Require target_bits to be at most start_bits."""
    groups = c.compression.compression_training.weight_quantization.different_groups
    for key, group in groups.items():
        if group.params.target_bits > group.params.start_bits:
            yield Problem(
                f"{_WEIGHTS}.different_groups.{key}.params.target_bits",
                f"is more than start_bits: {group.params.start_bits}",
                f"use at most {group.params.start_bits}",
            )


def few_bits_are_rounded_to_the_nearest(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse stochastic rounding to one or two bits, which have values of their own."""
    block = c.compression.compression_training.weight_quantization
    shared = block.shared_parameters
    if not shared.enabled or shared.quantization_type == "asymmetric" or shared.rounding == "nearest":
        return
    for key, group in block.different_groups.items():
        if group.params.target_bits < _NO_FURTHER_BITS:
            what = "is not possible with rounding: stochastic, unless quantization_type is asymmetric"
            yield Problem(f"{_WEIGHTS}.different_groups.{key}.params.target_bits", what, "use at least 3")


def fp32_weights_are_quantized_forward(c: NeoXConfig) -> Iterator[Problem]:
    """Require 16-bit weights besides their float32 values for quantization in the optimizer step."""
    shared = c.compression.compression_training.weight_quantization.shared_parameters
    if not shared.enabled or shared.quantize_weight_in_forward:
        return iter(())
    name = f"{_WEIGHTS}.shared_parameters.quantize_weight_in_forward"
    has_16_bits = c.precision.is_fp16 or c.precision.is_bf16
    return refusals(
        (
            not has_16_bits,
            name,
            "must be true without fp16 or bf16",
            "set it to true, or enable fp16 or bf16",
        ),
        (
            has_16_bits and c.zero.zero_optimization.stage > 0,
            name,
            "must be true with ZeRO, which makes 16-bit weights during the forward pass",
            "set it to true, or zero_optimization.stage: 0",
        ),
    )


def patterns_of_weights_have_their_density(c: NeoXConfig) -> Iterator[Problem]:
    """Require N < M, and the density N / M for N:M patterns."""
    block = c.compression.compression_training.sparse_pruning
    shared = block.shared_parameters
    if not shared.enabled or shared.method != "snip_momentum":
        return
    first, second = block_of(shared.block_pattern)
    if not first or not second or (is_n_of_m(shared.block_pattern) and first >= second):
        yield Problem(f"{_SPARSE}.block_pattern", "is not possible", "use numbers such as 4x1 or 2:4")
        return
    if not is_n_of_m(shared.block_pattern):
        return
    ratios = {f"{_SPARSE}.dense_ratio": shared.dense_ratio} if not block.different_groups else {}
    for key, group in block.different_groups.items():
        place = f"{_NAME}.sparse_pruning.different_groups.{key}.params.dense_ratio"
        ratios[place] = group.params.dense_ratio
    for place, ratio in ratios.items():
        if ratio != first / second:
            what = f"must be {first / second:g} with block_pattern: {shared.block_pattern}"
            yield Problem(place, what, f"use {first / second:g}")


def groups_and_blocks_divide_their_matrices(c: NeoXConfig) -> Iterator[Problem]:
    """Require that quantization groups, and blocks of weights, have the same size everywhere."""
    if not _patterns_are_valid(c):
        return
    training = c.compression.compression_training
    count = training.weight_quantization.shared_parameters.quantize_groups
    for name in _members(c, "weight_quantization"):
        rows, columns = matrix_shape(c, name)
        if rows * columns % count:
            what = f"does not divide the {rows} x {columns} weights of {name}"
            yield Problem(
                f"{_WEIGHTS}.shared_parameters.quantize_groups",
                what,
                "use a divisor, such as the number of rows",
            )
            break
    sparse = training.sparse_pruning.shared_parameters
    if sparse.method != "snip_momentum":
        return
    high, wide = block_of(sparse.block_pattern)
    high = 1 if is_n_of_m(sparse.block_pattern) else high
    for name in _members(c, "sparse_pruning"):
        rows, columns = matrix_shape(c, name)
        if high and wide and (rows % high or columns % wide):
            what = f"does not divide the {rows} x {columns} weights of {name}"
            yield Problem(f"{_SPARSE}.block_pattern", what, "use other sizes, or exclude the matrix")
            break


def _groups(c: NeoXConfig, part: str) -> Iterator[tuple[str, CompressionGroup | None, list[str]]]:
    return group_memberships(c.compression.compression_training, compressible_matrices(c), part)


def _members(c: NeoXConfig, part: str) -> list[str]:
    return [name for _, _, names in _groups(c, part) for name in names]


def pruned_rows_and_heads_exist(c: NeoXConfig) -> Iterator[Problem]:
    """Require matrices with rows or heads to prune, and related modules that follow them."""
    if not _patterns_are_valid(c):
        return
    training, names = c.compression.compression_training, compressible_matrices(c)
    for part, (kinds, what_kinds) in _PRUNES.items():
        for key, group, members in _groups(c, part):
            assert isinstance(group, PruningGroup)
            place = f"{_NAME}.{part}.different_groups.{key}"
            others = [name for name in members if kind_of(name) not in kinds]
            if others:
                what = f"matches {others[0]}, but {part} prunes {what_kinds}"
                yield Problem(f"{place}.modules", what, f"use {' or '.join(kinds)}")
            elif group.related_modules is not None:
                yield from _related(place, group, members, names)
    heads = training.head_pruning.shared_parameters
    if heads.enabled and heads.num_heads not in (None, c.model.num_attention_heads):
        what = f"must be num-attention-heads: {c.model.num_attention_heads}"
        yield Problem(f"{_NAME}.head_pruning.shared_parameters.num_heads", what, "use that number")


def _related(
    place: str, group: PruningGroup, members: Sequence[str], names: Sequence[str]
) -> Iterator[Problem]:
    assert group.related_modules is not None
    if len(group.related_modules) != len(group.modules):
        lists = pluralize(len(group.related_modules), "list")
        what = f"has {lists}, but modules has {pluralize(len(group.modules), 'pattern')}"
        yield Problem(
            f"{place}.related_modules", what, "write one list of patterns for each pattern of modules"
        )
        return
    for pattern, related in zip(group.modules, group.related_modules, strict=True):
        possible = {kind for name in matching([pattern], members) for kind in RELATED_MATRICES[kind_of(name)]}
        for name in matching(related, names):
            if kind_of(name) not in possible:
                what = f"matches {name}, whose rows and columns are not those of {pattern}"
                yield Problem(f"{place}.related_modules", what, f"use {' and '.join(sorted(possible))}")
                break


def _patterns_are_valid(c: NeoXConfig) -> bool:
    return bool(types_in(c)) and not any(compression_patterns_match(c))


def eigenvalues_are_those_of_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require the names of our layers, and that each process has the whole model."""
    section, layers = c.engine.eigenvalue, c.model.num_layers
    if not section.enabled:
        return iter(())
    divided = "cannot be combined with eigenvalue.enabled: gradients of divided models have no gradients"
    alone = "use data parallelism alone, or set eigenvalue.enabled: false"
    return refusals(
        (
            section.layer_name != _LAYERS,
            "eigenvalue.layer_name",
            "is no module with layers",
            f"use {_LAYERS}",
        ),
        (
            not 1 <= section.layer_num <= layers,
            "eigenvalue.layer_num",
            f"must be between 1 and num-layers: {layers}",
            f"use {layers} for all layers",
        ),
        (
            recomputes_gated_product(c, is_fused=False),
            "recompute_gated_product",
            "cannot be combined with eigenvalue.enabled: what is recomputed has no second derivatives",
            "set recompute-gated-product: auto, or false",
        ),
        (c.parallelism.model_parallel_size > 1, "model_parallel_size", divided, alone),
        (uses_pipeline(c), "pipe_parallel_size", divided, alone),
        (c.zero.zero_optimization.stage > 0, "zero_optimization.stage", divided, alone),
    )


def students_copy_named_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require a teacher, and one of its layers for each layer of the student."""
    reduction, layers = c.compression.compression_training.layer_reduction, c.model.num_layers
    if not reduction.enabled:
        return iter(())
    kept, listed, teacher = reduction.keep_number_layer, reduction.teacher_layer, reduction.teacher
    wanted = pluralize(layers if kept is None else kept, "layer")
    return refusals(
        (
            listed is None and reduction.module_name_prefix,
            f"{_REDUCTION}.teacher_layer",
            "is missing, but module_name_prefix copies layers",
            f"list {wanted} of the teacher",
        ),
        (
            listed is not None and len(listed) != (layers if kept is None else kept),
            f"{_REDUCTION}.teacher_layer",
            f"lists {pluralize(len(listed or ()), 'layer')}, but the student has {wanted}",
            f"list {wanted}",
        ),
        (
            kept not in (None, layers),
            f"{_REDUCTION}.keep_number_layer",
            f"must be num-layers: {layers}",
            f"use {layers}",
        ),
        (
            any(layer < 0 for layer in listed or ()),
            f"{_REDUCTION}.teacher_layer",
            "contains a negative number",
            "count layers from 0",
        ),
        (
            teacher is None,
            f"{_REDUCTION}.teacher",
            "is missing, but layer_reduction is enabled",
            "set it to the folder of its checkpoints",
        ),
        (
            teacher is not None and is_url(teacher),
            f"{_REDUCTION}.teacher",
            "is no folder",
            "download the checkpoint first",
        ),
    )


def students_copy_modules(c: NeoXConfig) -> Iterator[Problem]:
    """Require the names of modules to copy."""
    reduction = c.compression.compression_training.layer_reduction
    if not reduction.enabled:
        return
    if reduction.module_name_prefix not in (None, _LAYERS):
        yield Problem(f"{_REDUCTION}.module_name_prefix", "is no module with layers", f"use {_LAYERS}")
    for other in reduction.other_module_name or ():
        if other.partition(".")[0] not in _COPIED:
            near = did_you_mean(other, _COPIED) or f"use {', '.join(_COPIED)}, or parts of them"
            yield Problem(f"{_REDUCTION}.other_module_name", f"contains {other!r}, which is no module", near)
    copies = reduction.module_name_prefix or reduction.other_module_name
    if not copies and not reduction.distill.enabled:
        yield Problem(
            f"{_REDUCTION}.module_name_prefix",
            "is missing, and so are other_module_name and distill, so that nothing is taken from the teacher",
            "name the modules to copy, or set distill.enabled: true",
            value="",
        )


def copied_layers_keep_their_bias(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse to copy a layer to another place if its bias on scores is multiplied by its number."""
    reduction, attention = c.compression.compression_training.layer_reduction, c.attention
    if not (reduction.enabled and reduction.module_name_prefix and attention.apply_query_key_layer_scaling):
        return
    has_bias = attention.pos_emb in BIASED_SCORES
    if has_bias and any(place != layer for place, layer in enumerate(reduction.teacher_layer or ())):
        what = (
            "multiplies the bias on attention scores by the number of the layer, which is another one in the "
            f"student than in the teacher (pos-emb: {attention.pos_emb})"
        )
        yield Problem("apply_query_key_layer_scaling", what, "copy only the first layers, each to its place")


def students_are_whole_models(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse students with adapters or shared layers, and teachers of divided layers."""
    reduction = c.compression.compression_training.layer_reduction
    if not reduction.enabled:
        return iter(())
    is_taught, change = reduction.distill.enabled, "change it, or set distill.enabled: false"
    cannot, with_teacher = (
        "cannot be combined with layer_reduction",
        "cannot be combined with layer_reduction.distill",
    )
    return refusals(
        (
            c.adapters.lora_rank,
            "lora_rank",
            f"{cannot}: adapters are added to a model whose weights stay",
            "train the student first",
        ),
        (
            _shares_weights(c),
            "num_unique_layers",
            f"{cannot}, which copies every layer from another one",
            "remove it",
        ),
        (
            is_taught and reduction.distill.hidden_states_weight and not reduction.module_name_prefix,
            f"{_REDUCTION}.distill.hidden_states_weight",
            "compares the layers that module_name_prefix copies, and it is missing",
            "set module_name_prefix: layers",
        ),
        (
            is_taught and uses_pipeline(c),
            "pipe_parallel_size",
            f"{with_teacher}: stages have no teacher, whose results are compared where the student's are",
            change,
        ),
        (
            is_taught and c.parallelism.sequence_parallel,
            "sequence_parallel",
            f"{with_teacher}: the results of a part of the tokens are compared with those of all",
            change,
        ),
        (
            is_taught and chosen_engine(c).name == "deepspeed" and c.zero.zero_optimization.stage > 0,
            "zero_optimization.stage",
            f"{with_teacher}: DeepSpeed's engine partitions weights as they are built; use engine: torch",
            change,
        ),
    )
