"""The formulas against published figures and against counts made by hand."""

from dataclasses import replace

import pytest

from neox_config.derive.layer_sharing import weight_owners
from neox_config.estimate import (
    activation_bytes_per_layer,
    bubble_share,
    communication_bytes,
    count_parameters,
    device_memory,
    estimate,
    flops_per_token,
    local_parameters,
)
from neox_config.estimate.parameters import bucketed_parameters, trained_parameters
from neox_config.estimate.shapes import Layout, Shape
from neox_config.estimate.step import model_bytes, step_collectives
from neox_config.facts.attention import Sparsity
from neox_config.facts.vocabulary import pad_vocabulary


def make_shape(layers=2, hidden=8, heads=2, length=4, vocab=10, **changes):
    return Shape(
        **{
            "num_layers": layers,
            "hidden_size": hidden,
            "heads": heads,
            "seq_length": length,
            "vocab_size": vocab,
            "mlp_width": 4 * hidden,
            "attention_types": ("global",) * layers,
            "max_positions": length,
        }
        | changes
    )


GPT2 = make_shape(12, 768, 12, 1024, 50_257)
GPT3 = make_shape(96, 12288, 96, 2048, 51_200, keeps_scores=True, hidden_dropout=0.1, attention_dropout=0.1)
NEOX_20B = make_shape(44, 6144, 64, 2048, 50_432, position="rotary", is_tied=False)


def total(shape):
    return sum(count_parameters(shape).values())


def test_gpt2_has_its_published_size():
    assert total(GPT2) == 124_439_808
    assert total(make_shape(48, 1600, 25, 1024, 50_257)) == 1_557_611_200


def test_gpt_neox_20b_has_its_published_size():
    assert total(NEOX_20B) == 20_554_567_680
    assert pad_vocabulary(50_277, 256) == 50_432


# Parameters of two layers of width 8, two heads, four positions, ten tokens, counted on paper.
# attention: 8 x 24 + 24 + 8 x 8 + 8 = 288; plain MLP: 8 x 32 + 32 + 32 x 8 + 8 = 552.
BASE = {"embedding": 80, "positions": 32, "attention": 576, "mlp": 1104, "norms": 80, "head": 0}


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({}, {}),
        ({"is_tied": False}, {"head": 80}),
        ({"position": "rotary"}, {"positions": 0}),
        ({"position": "sinusoidal"}, {"positions": 0}),
        ({"position": "rpe", "rpe_buckets": 32}, {"positions": 2 * 32 * 2}),
        ({"norm": "rmsnorm"}, {"norms": 40}),
        ({"norm": "scalenorm"}, {"norms": 5}),
        ({"norm": "apexlayernorm"}, {}),
        # 2 x (8 x 21 + 21) + 21 x 8 + 8 per layer
        ({"activation": "geglu", "mlp_width": 21}, {"mlp": 2 * 554}),
        ({"has_bias": False, "has_attention_bias": False}, {"attention": 2 * 256, "mlp": 2 * 512}),
        ({"weight_owners": (0, 0)}, {"attention": 288, "mlp": 552, "norms": 48}),
        # up 8 x 64 + 64, mixing 4 x 4 + 4, down 32 x 8 + 8; norms of 8 and of 32 channels
        ({"attention_types": ("gmlp", "gmlp")}, {"attention": 0, "mlp": 2 * 860, "norms": 2 * 80 + 16}),
        # query-key-value of all 64 channels, 3 wide each, and 3 to 32
        (
            {"attention_types": ("global", "amlp"), "gmlp_attention_width": 3},
            {"attention": 288 + 64 * 9 + 9 + 3 * 32 + 32, "mlp": 552 + 860, "norms": 32 + 80 + 16},
        ),
    ],
)
def test_parameters_of_each_part(changes, differences):
    assert count_parameters(make_shape(**changes)) == BASE | differences


@pytest.mark.parametrize(
    ("style", "owners", "owned", "of_second_stage"),
    [
        ("grouped", (0, 1, 0, 1), ("global", "gmlp"), ("global", "gmlp")),
        ("spaced", (0, 0, 2, 2), ("global", "global"), ("global",)),
    ],
)
def test_shared_layers_own_the_types_of_the_first_to_use_them(style, owners, owned, of_second_stage):
    assert weight_owners(4, 2, style) == owners
    types = ("global", "gmlp", "global", "gmlp")
    shape = make_shape(4, weight_owners=owners, attention_types=types)
    assert shape.owned_types == owned
    assert shape.owned_within(range(2, 4)) == of_second_stage


def test_as_many_sets_of_weights_as_layers_share_nothing():
    assert weight_owners(4, 4, "grouped") is None
    assert weight_owners(4, None, "spaced") is None


def test_a_stage_holds_each_shared_set_once():
    shape = make_shape(4, is_tied=False, weight_owners=(0, 1, 0, 1))
    alone = make_shape(4, is_tied=False)
    one_layer = total(make_shape(2)) - total(make_shape(1))
    assert local_parameters(alone, Layout(), 0) - local_parameters(shape, Layout(), 0) == 2 * one_layer
    stages = Layout(stages=2)
    for stage in (0, 1):
        assert local_parameters(shape, stages, stage) == local_parameters(alone, stages, stage)


def test_activations_are_megatrons_formula():
    # arXiv:2205.05198: s b h (34 + 5 a s / h); the second term is 80 for GPT-3 and 64 for MT-NLG.
    per_token = 2048 * 12288
    assert activation_bytes_per_layer(GPT3, Layout()) == per_token * (34 + 80)
    assert activation_bytes_per_layer(GPT3, Layout(model_parallel=8)) == per_token * (10 + 24 // 8 + 80 // 8)
    mt_nlg = replace(GPT3, hidden_size=20480, heads=128, mlp_width=4 * 20480)
    assert activation_bytes_per_layer(mt_nlg, Layout(micro_batch=2)) == 2 * 2048 * 20480 * (34 + 64)


def test_flash_attention_keeps_a_sum_per_query_and_head_instead_of_scores():
    flash = replace(GPT3, keeps_scores=False)
    assert activation_bytes_per_layer(flash, Layout()) == 2048 * (34 * 12288 + 4 * 96)


def test_without_dropout_no_masks_are_kept():
    plain = replace(GPT3, hidden_dropout=0.0, attention_dropout=0.0)
    assert activation_bytes_per_layer(plain, Layout()) == 2048 * 12288 * (32 + 32)


def test_recomputation_keeps_the_input_of_each_segment_and_one_segment_at_work():
    shape = make_shape(4, 64, 4, 128, 100)
    hidden, layer = 2 * 128 * 64, activation_bytes_per_layer(shape, Layout())
    assert device_memory(shape, Layout(segment_layers=1)).activations == 4 * hidden + layer
    assert device_memory(shape, Layout(segment_layers=2)).activations == 2 * hidden + 2 * layer
    shared = device_memory(shape, Layout(segment_layers=1, model_parallel=2, splits_inputs=True))
    one = activation_bytes_per_layer(shape, Layout(model_parallel=2))
    assert shared.activations == 4 * hidden // 2 + one
    on_host = device_memory(shape, Layout(segment_layers=1, inputs_on_host=True))
    assert (on_host.activations, on_host.host) == (layer, 4 * hidden)


def test_the_logits_of_a_large_vocabulary_outweigh_a_recomputed_layer():
    shape = make_shape(1, 8, 2, 16, 1000)
    # the segment's input, the final norm's, the head's, logits and their gradient, in two bytes each
    inputs = 16 * (2 * 8 + 2 * 8 + 2 * 8)
    whole = device_memory(shape, Layout(segment_layers=1, has_loss_in_chunks=False))
    assert whole.activations == inputs + 16 * 4 * 1000
    # logits, again in float32, the gradients of the matrix in float32, and of the hidden states
    chunks = device_memory(shape, Layout(segment_layers=1))
    assert chunks.activations == inputs + 16 * (2 + 4) * 1000 + 8 * 4 * 1000 + 16 * 2 * 8


def test_the_loss_in_chunks_needs_no_more_logits_for_more_tokens():
    shape = make_shape(1, 8, 2, 4096, 2**20)
    one, two = (
        device_memory(shape, Layout(micro_batch=micro_batch, segment_layers=1)).activations
        for micro_batch in (1, 2)
    )
    # the three inputs, and the gradient of the hidden states
    assert two - one == 4096 * 4 * 2 * 8


def test_sequence_parallelism_splits_the_activations_between_matrices():
    # arXiv:2205.05198: s b h (34 + 5 a s / h) / t.
    layout = Layout(model_parallel=8, splits_sequence=True)
    assert activation_bytes_per_layer(GPT3, layout) == 2048 * 12288 * (34 + 80) // 8
    # Recomputed layers keep the gathered inputs of matrices until their backward pass.
    at_work = activation_bytes_per_layer(GPT3, replace(layout, segment_layers=1))
    assert at_work == 2048 * 12288 * (6 / 8 + 4 + 24 / 8 + 80 / 8)
    shape = make_shape(4, 64, 4, 128, 100)
    layout = Layout(segment_layers=1, model_parallel=2, splits_sequence=True)
    one = activation_bytes_per_layer(shape, layout)
    assert device_memory(shape, layout).activations == 4 * 2 * 128 * 64 // 2 + one


def test_the_first_stage_holds_the_activations_of_as_many_micro_batches_as_there_are_stages():
    shape = make_shape(8, 64, 4, 128, 100)
    layout = Layout(stages=4, accumulation=16)
    layer = activation_bytes_per_layer(shape, layout)
    kept = [device_memory(shape, layout, stage).activations for stage in range(4)]
    assert kept[:3] == [2 * layer * 4, 2 * layer * 3, 2 * layer * 2]
    assert device_memory(shape, replace(layout, accumulation=2), 0).activations == 2 * layer * 2


def test_with_one_micro_batch_gradients_take_the_place_of_activations():
    shape = make_shape(8, 64, 4, 128, 100)
    once, twice = (device_memory(shape, Layout(accumulation=number)) for number in (1, 2))
    assert once.reused == once.gradients == twice.gradients > 0
    assert twice.reused == 0
    assert twice.total - once.total == once.gradients
    # The end of the backward pass is the peak: the gradients, and the activations of one layer.
    few_tokens = replace(shape, seq_length=8)
    memory = device_memory(few_tokens, Layout())
    assert memory.gradients > memory.activations
    assert memory.reused == memory.activations - activation_bytes_per_layer(few_tokens, Layout())
    assert device_memory(shape, Layout(data_parallel=2, zero_stage=1, engine="deepspeed")).reused == 0


def test_a_parallel_residual_stores_the_input_of_both_norms_once():
    one, two = (
        activation_bytes_per_layer(replace(GPT2, parallel_residual=is_so), Layout())
        for is_so in (True, False)
    )
    assert two - one == 1024 * 2 * 768


def test_layers_are_compiled_on_gpus_except_at_stage_3():
    assert Layout().compiles_on("cuda")
    assert not Layout().compiles_on("cpu")
    assert not Layout(zero_stage=3, compiles=True).compiles_on("cuda")
    swiglu = replace(GPT2, activation="swiglu", norm="rmsnorm")
    stored = [activation_bytes_per_layer(swiglu, Layout(compiles=is_so)) for is_so in (True, False)]
    # the activated gate
    assert stored[1] - stored[0] == 1024 * 2 * swiglu.mlp_width


# arXiv:1910.02054, figure 1: 7.5 billion parameters, 64 devices, Adam: 120, 31.4, 16.6 and 1.9 GB.
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_shares_as_published(stage, gigabytes):
    # 36 layers of width 4096 and a small vocabulary: 7.25 billion, scaled to the published 7.5.
    shape = make_shape(36, 4096, 32, 1024, 128)
    memory = device_memory(shape, Layout(data_parallel=64, zero_stage=stage, engine="deepspeed"))
    states = memory.weights + memory.gradients + memory.optimizer
    assert states / total(shape) * 7.5 == pytest.approx(gigabytes, abs=0.05)


def test_parts_of_fully_shard_are_float32_and_whole_weights_exist_besides_below_stage_3():
    shape, layout = make_shape(), Layout(data_parallel=4, accumulation=2)
    part = 1872 // 4
    for stage, weights, gradients, optimizer in (
        (1, 2 * 1872, 2 * 1872, 12 * part),
        (2, 2 * 1872, 4 * part, 12 * part),
        # A layer, and the final norm and the tied embedding.
        (3, 2 * (872 + 16 + 80 + 32), 4 * part, 12 * part),
    ):
        found = device_memory(shape, replace(layout, zero_stage=stage))
        assert (found.weights, found.gradients, found.optimizer) == (weights, gradients, optimizer), stage
    # A single micro-batch is reduced at once.
    found = device_memory(shape, replace(layout, zero_stage=1, accumulation=1))
    assert found.gradients == 4 * part
    # One rank has nothing to partition.
    alone = replace(layout, data_parallel=1)
    assert device_memory(shape, replace(alone, zero_stage=3)) == device_memory(shape, alone)


def test_ranks_that_divide_rows_store_their_rows_of_states_and_all_maxima_of_columns():
    shape, layout = make_shape(), Layout(data_parallel=2, zero_stage=1)
    # Of each layer 8 x 24 + 8 x 8 + 2 x 8 x 32 elements in matrices, which have a momentum alone.
    matrices = 2 * (192 + 64 + 512)
    muon = device_memory(shape, replace(layout, matrix_states=1, joins_rows="matrices"))
    assert muon.optimizer == 4 * (1872 + 2 * 1872 - matrices) // 2
    sm3 = device_memory(
        shape, replace(layout, optimizer_states=0, has_slice_states=True, joins_rows="maxima")
    )
    rows = 10 + 4 + 16 + 2 * (32 + 24 + 24 + 8 + 8 + 32 + 32 + 8 + 8)
    columns = 8 + 8 + 2 * (8 + 8 + 8 + 32)
    assert sm3.optimizer == 4 * ((1872 + rows) // 2 + columns)


def test_float32_training_needs_no_master_weights():
    memory = device_memory(make_shape(), Layout(element_bytes=4, gradient_bytes=4))
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * 1872, 4 * 1872, 8 * 1872)


def test_replicas_that_compress_store_their_errors():
    """One number per parameter for what a replica lost, and this replica's share of one for the mean."""
    shape, layout = make_shape(), Layout(element_bytes=4, gradient_bytes=4, has_replica_states=True)
    assert device_memory(shape, layout).optimizer == 8 * 1872
    alone, several = device_memory(shape, layout), device_memory(shape, replace(layout, data_parallel=3))
    assert several.optimizer == (8 + 4) * 1872 + 4 * 624
    plain = device_memory(shape, replace(layout, data_parallel=3, has_replica_states=False))
    # Besides the buckets of gradients, which both have: 15 bytes for each number that is averaged at once.
    assert several.buffers - plain.buffers == 15 * 1872
    assert alone.buffers == device_memory(shape, replace(layout, has_replica_states=False)).buffers


def test_autocast_keeps_copies_of_the_weights_for_every_micro_batch_in_flight():
    shape, layout = make_shape(), Layout(element_bytes=4, gradient_bytes=4)
    for changes, copies in (({}, 1), ({"stages": 2, "accumulation": 4}, 2), ({"segment_layers": 1}, 1)):
        plain = replace(layout, **changes)
        local = device_memory(shape, plain).weights // 4
        cast = device_memory(shape, replace(plain, autocasts=True))
        assert cast.buffers - device_memory(shape, plain).buffers == 2 * local * copies


def test_adapters_alone_have_gradients_and_states():
    plain = make_shape(2, 64, 4, 8, 100)
    adapted = replace(plain, adapter_rank=4, adapted=("qkv", "down", "gate"))
    # Of each layer: 4 x 64 and 192 x 4 of qkv, 4 x 256 and 64 x 4 of down; there is no gate.
    trained = 2 * 4 * (64 + 192 + 256 + 64)
    assert count_parameters(adapted) == {**count_parameters(plain), "adapters": trained}
    layout = Layout(data_parallel=1)
    whole, memory = device_memory(plain, layout), device_memory(adapted, layout)
    assert memory.weights == whole.weights + 2 * trained
    assert (memory.gradients, memory.optimizer) == (2 * trained, (4 + 8) * trained)
    zero = device_memory(adapted, Layout(data_parallel=4, zero_stage=2, engine="deepspeed"))
    assert (zero.weights, zero.gradients, zero.optimizer) == (memory.weights, trained // 2, 3 * trained)
    assert device_memory(adapted, replace(layout, saves_in_background=True)).snapshot == 12 * trained


def test_tensor_parallel_ranks_split_one_matrix_of_each_adapter():
    adapted = make_shape(1, 64, 4, 8, 100, adapter_rank=4, adapted=("qkv", "down"))
    of_two = device_memory(adapted, Layout(model_parallel=2)).gradients
    # qkv: A whole, B halved; down: A halved, B whole.
    assert of_two == 2 * 4 * (64 + 192 // 2 + 256 // 2 + 64)


def test_offloading_moves_states_to_the_host():
    shape, plain = make_shape(), Layout(data_parallel=2, zero_stage=2, engine="deepspeed")
    memory = device_memory(shape, replace(plain, optimizer_on_host=True))
    assert (memory.optimizer, memory.gradients, memory.host) == (0, 0, (12 + 2) * 936)
    stage3 = replace(plain, zero_stage=3, optimizer_on_host=True, parameters_on_host=True)
    memory = device_memory(shape, stage3)
    assert (memory.weights, memory.optimizer, memory.host) == (0, 0, (12 + 2 + 2) * 936)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_an_asynchronous_save_copies_the_float32_weights_and_states_of_a_rank(zero_stage):
    shape, layout = make_shape(), Layout(data_parallel=2, zero_stage=zero_stage, saves_in_background=True)
    assert device_memory(shape, layout).snapshot == (4 + 4 + 4) * 936
    assert device_memory(shape, replace(layout, saves_states=False)).snapshot == 4 * 936
    assert device_memory(shape, replace(layout, saves_in_background=False)).snapshot == 0


def test_an_asynchronous_save_copies_all_that_only_this_replica_has():
    shape, layout = make_shape(), Layout(data_parallel=3, has_replica_states=True, saves_in_background=True)
    assert device_memory(shape, layout).snapshot == (4 + 4 + 4) * 624 + 4 * 1872 + 4 * 624


def test_tensor_parallel_ranks_share_matrices_and_copy_the_rest():
    memory = device_memory(make_shape(vocab=11), Layout(model_parallel=2))
    # Six of the eleven rows; per layer 192/2 + 24/2 + 64/2 + 8, 256/2 + 32/2 + 256/2 + 8 and norms of 32.
    assert memory.weights == 2 * (6 * 8 + 2 * (148 + 280 + 32) + 32 + 16)


def test_the_last_stage_holds_a_copy_of_a_tied_embedding():
    tied, untied = make_shape(4), make_shape(4, is_tied=False)
    layout = Layout(stages=2)
    assert device_memory(tied, layout, 1).weights == device_memory(untied, layout, 1).weights
    # two layers of 288 + 552 + 32, the embedding and positions in front, the norm and the head behind
    assert device_memory(tied, layout, 0).weights == 2 * (2 * 872 + 80 + 32)
    assert device_memory(tied, layout, 1).weights == 2 * (2 * 872 + 16 + 80)


def test_operations_are_the_formula_of_megatron():
    # arXiv:2104.04473: 96 B s l h^2 (1 + s / 6h + V / 16lh) with recomputation, per token here.
    h, s, layers, vocab = 12288, 2048, 96, 51_200
    published = 96 * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert flops_per_token(GPT3, is_recomputed=True) == pytest.approx(published, rel=1e-12)
    assert flops_per_token(GPT3) == 72 * layers * h**2 + 12 * layers * s * h + 6 * vocab * h


def test_gpt3_takes_the_published_time():
    # arXiv:2104.04473, section 5.1: 300 billion tokens, 1024 A100 at 140 TFLOP/s with recomputation: 34 days.
    layout = Layout(model_parallel=8, stages=8, data_parallel=16, accumulation=96, segment_layers=1)
    result = estimate(GPT3, layout)
    assert layout.samples == 1536
    iterations = 300e9 / result.tokens_per_iteration
    seconds = result.computed_flops_per_iteration / (140e12 * 1024)
    assert seconds * iterations / 86400 == pytest.approx(34, abs=1)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("global", 256),
        ("local", 3 * 16),
        ("sparse_fixed", 4 * 16 + 256 // 64 * 16),
        ("sparse_variable", (4 + 1 + 2) * 16),
        ("bigbird", (3 + 1 + 2) * 16),
        ("bslongformer", (3 + 1) * 16),
    ],
)
def test_sparse_attention_multiplies_with_fewer_keys(kind, keys):
    shape = make_shape(1, 8, 2, 256, 10, attention_types=(kind,), sparsity=Sparsity(random_blocks=2))
    # matrices: 24 h^2 forward; the head 2 V h
    assert flops_per_token(shape) == 3 * (24 * 64 + 4 * keys * 8 + 2 * 10 * 8)


@pytest.mark.parametrize(
    ("kind", "sparsity", "keys"),
    [
        ("global", Sparsity(is_causal=False), 256),
        ("global", Sparsity(is_causal=False, window=20), 2 * 20 + 1),
        ("global", Sparsity(is_causal=False, window=200), 256),
        ("local", Sparsity(is_causal=False), 5 * 16),
        ("bigbird", Sparsity(is_causal=False, random_blocks=2), (3 + 1 + 2) * 16),
    ],
)
def test_windows_of_masked_models_reach_to_both_sides(kind, sparsity, keys):
    shape = make_shape(1, 8, 2, 256, 10, attention_types=(kind,), sparsity=sparsity)
    assert flops_per_token(shape) == 3 * (24 * 64 + 4 * keys * 8 + 2 * 10 * 8)


def test_gmlp_mixes_half_of_its_channels_over_all_positions():
    shape = make_shape(1, attention_types=("gmlp",))
    assert flops_per_token(shape) == 3 * (2 * (8 * 64 + 32 * 8) + 2 * 4 * 32 + 2 * 10 * 8)


def llama_1b():
    return make_shape(
        *(16, 2048, 32, 4096, 128_256),
        kv_heads=8,
        mlp_width=8192,
        activation="swiglu",
        norm="rmsnorm",
        position="rotary",
        has_bias=False,
        has_attention_bias=False,
    )


@pytest.mark.parametrize(
    ("shape", "tokens", "seconds", "full", "causal"),
    [
        # 6 x (matrices + layers x length x hidden x 2 or 1) x tokens per second / 989e12, computed by hand.
        (make_shape(24, 2048, 16, 2048, 50_304, is_tied=False), 8 * 2048, 0.2917, 0.515, 0.481),
        (llama_1b(), 4 * 4096, 0.2843, 0.526, 0.479),
        (make_shape(12, 768, 12, 2048, 50_304, is_tied=False), 16 * 2048, 0.0753, 0.426, 0.376),
    ],
)
def test_utilization_by_both_conventions(shape, tokens, seconds, full, causal):
    for convention, expected in (("full", full), ("causal", causal)):
        rate = tokens / seconds * flops_per_token(shape, convention=convention)
        assert rate / 989e12 == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("kind", "sparsity", "counted"),
    [
        ("global", Sparsity(), 128),
        # A window of 64: all but the first queries see it.
        ("global", Sparsity(window=63), 64 - 64 * 64 / 512),
        # One that is longer than the sequence hides nothing more than the causal mask.
        ("global", Sparsity(window=300), 128),
        ("local", Sparsity(), 48 - 48 * 48 / 512),
        ("global", Sparsity(is_causal=False), 256),
        ("global", Sparsity(is_causal=False, window=20), 41),
    ],
)
def test_what_the_causal_mask_hides_is_not_counted_by_the_causal_convention(kind, sparsity, counted):
    shape = make_shape(1, 8, 2, 256, 10, attention_types=(kind,), sparsity=sparsity)
    expected = 3 * (24 * 64 + 4 * counted * 8 + 2 * 10 * 8)
    assert flops_per_token(shape, convention="causal") == expected
    result = estimate(shape, Layout())
    assert result.causal_flops_per_token == expected
    assert result.flops_per_token == flops_per_token(shape, convention="full") == flops_per_token(shape)


def test_a_causal_gmlp_layer_mixes_half_of_the_positions():
    shape = make_shape(1, attention_types=("amlp",), gmlp_attention_width=6)
    matrices = flops_per_token(shape) - 3 * (4 * 4 * (2 * 8 + 6))
    assert flops_per_token(shape, convention="causal") == matrices + 3 * (4 * 2 * (2 * 8 + 6))


@pytest.mark.parametrize(("stage", "sent"), [(0, 2 * 2), (1, 4), (2, 3 * 2 + 2), (3, 3 * (2 + 2 * 2))])
def test_data_parallel_bytes(stage, sent):
    shape = make_shape()
    layout = Layout(data_parallel=4, zero_stage=stage, accumulation=3)
    assert communication_bytes(shape, layout).data == sent * 1872 * 3 // 4


def test_recomputed_attention_keeps_no_scores():
    # arXiv:2205.05198: s b h 34 / t with selective recomputation; the scores of one layer exist at a time.
    layout = Layout(model_parallel=8, splits_sequence=True, recomputes_attention=True)
    assert activation_bytes_per_layer(GPT3, layout) == 2048 * 12288 * 34 // 8
    shape = replace(make_shape(4, 64, 4, 128, 100), keeps_scores=True, attention_dropout=0.1)
    layer, scores = activation_bytes_per_layer(shape, Layout(recomputes_attention=True)), 5 * 4 * 128 * 128
    assert activation_bytes_per_layer(shape, Layout()) == layer + scores
    assert device_memory(shape, Layout(recomputes_attention=True)).activations == 4 * layer + scores
    assert flops_per_token(shape, recomputes_attention=True) == flops_per_token(shape) + 4 * 4 * 128 * 64


def test_model_parallel_bytes_are_those_of_the_collectives_of_a_step():
    shape = make_shape(3)
    layout = Layout(model_parallel=4, micro_batch=5, accumulation=2)
    hidden = 2 * 4 * 5 * 8
    ring = 2 * hidden * 3 // 4
    # Two numbers per token and rank for the loss, and the norm of the gradients.
    others = 2 * (2 * 4 * 20 * 4 * 3 // 4) + 2 * 4 * 3 // 4
    assert communication_bytes(shape, layout).model == 2 * (3 * 4 + 2) * ring + others
    # The last sum of a recomputed layer is not needed.
    recomputed = replace(layout, segment_layers=1)
    assert communication_bytes(shape, recomputed).model == 2 * (3 * 5 + 2) * ring + others
    once = replace(shape, parallel_residual=True)
    norms = 3 * 4 * 8 * 2 * 2 * 3 // 4
    assert communication_bytes(once, layout).model == 2 * (3 * 2 + 2) * ring + others + norms


def test_layers_with_adapters_send_for_each_branch():
    shape = replace(make_shape(3), parallel_residual=True, adapter_rank=2, adapted=("qkv",))
    layout = Layout(model_parallel=4, micro_batch=5, accumulation=2)
    assert model_bytes(shape, layout) == model_bytes(replace(shape, parallel_residual=False), layout)


def test_pipeline_bytes_are_activations_and_their_gradients():
    shape, hidden = make_shape(4, is_tied=False), 2 * 4 * 8
    assert communication_bytes(shape, Layout(stages=1)).pipe == 0
    assert communication_bytes(shape, Layout(stages=2, accumulation=6)).pipe == 6 * hidden
    assert communication_bytes(shape, Layout(stages=4, accumulation=6)).pipe == 6 * 2 * hidden
    assert communication_bytes(make_shape(4), Layout(stages=4)).pipe == 2 * hidden + 2 * 80


def test_bubble():
    assert bubble_share(Layout(stages=1, accumulation=3)) == 0
    assert bubble_share(Layout(stages=4, accumulation=9)) == 3 / 12


def test_a_schedule_that_splits_the_backward_pass_keeps_gathered_inputs():
    layout = Layout(model_parallel=8, stages=2, splits_sequence=True)
    split = replace(layout, schedule="zbv", chunks=2)
    kept = activation_bytes_per_layer(GPT3, split) - activation_bytes_per_layer(GPT3, layout)
    # Two inputs of split matrices, in two bytes, of which a rank otherwise keeps its part.
    assert kept == 2048 * 2 * 2 * 12288 * 7 // 8
    assert model_bytes(GPT3, split) < model_bytes(GPT3, layout)


def test_replicated_gradients_are_summed_once_per_update_except_by_deepspeeds_zero():
    layout = Layout(model_parallel=2, splits_sequence=True, accumulation=3)

    def sums(**options: object) -> list[tuple[str, int]]:
        found = step_collectives(GPT3, replace(layout, **options))
        reduced = [each for each in found if each.operation == "all_reduce" and each.group == "model"]
        return [(each.part, each.calls) for each in reduced]

    # The second message is the norm of all gradients, which is not counted with ZeRO.
    assert sums() == [("update", 2)]
    assert sums(data_parallel=2, zero_stage=1) == [("update", 1)]
    ((part, calls),) = sums(data_parallel=2, zero_stage=1, engine="deepspeed")
    assert part == "replicated parameters"
    assert calls > 3 * GPT3.num_layers


def test_gradients_are_averaged_in_small_messages_from_the_head_to_the_embedding():
    shape = make_shape(1, 1024, 16, 8, 2000, is_tied=False)
    layout = Layout(data_parallel=2)
    found = bucketed_parameters(shape, layout)
    assert sum(found) == trained_parameters(shape, layout, 0)
    # The head, the final norm and the last bias; then the last matrix, and the one before with its biases.
    assert found[:2] == [2000 * 1024 + 2 * 1024 + 1024, 1024 * 4096]
    assert max(found) == 1024 * 4096
    # Some are summed over tensor-parallel ranks first.
    later = bucketed_parameters(shape, layout, later=4 * 1024)
    assert (later[-1], sum(later)) == (4 * 1024, sum(found))
    assert bucketed_parameters(shape, replace(layout, overlaps=False)) == [sum(found)]
    assert bucketed_parameters(shape, layout, device="cpu") == [sum(found)]


@pytest.mark.parametrize(
    "change", [{"zero_stage": 1}, {"stages": 2}, {"engine": "deepspeed"}, {"data_parallel": 1}]
)
def test_layouts_derived_from_one_that_averages_gradients_early_do_not_count_its_messages(change):
    layout = Layout(data_parallel=2)
    assert layout.reduces_early("cuda")
    assert not replace(layout, **change).reduces_early("cuda")


@pytest.mark.parametrize("segment", [None, 1])
def test_a_retrieval_model_stores_the_activations_of_two_texts(segment):
    """Those of the layers are twice those of another model; recomputed layers are those of one tower."""
    layout = Layout(micro_batch=4, segment_layers=segment)
    shape = make_shape(6, 256, 4, 128, 2048, position="rotary", is_tied=False)
    layer, inputs = activation_bytes_per_layer(shape, layout, device="cpu"), 4 * 4 * 128 * 256
    norm = 4 * 128 * 256 * layout.element_bytes
    for towers in (1, 2):
        model = replace(shape, towers=towers, embedding_size=64)
        assert activation_bytes_per_layer(model, layout, device="cpu") == 2 * layer
        kept = 2 * 6 * layer if segment is None else 2 * 6 * inputs * layout.element_bytes // 4
        working = 0 if segment is None else 2 * layer // towers
        found = device_memory(model, layout, device="cpu").activations
        assert found == kept + max(working, 2 * norm)
