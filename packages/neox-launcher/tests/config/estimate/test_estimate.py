"""The formulas against published figures and against counts made by hand."""

from dataclasses import replace

import pytest

from neox_config.derive.layer_sharing import weight_owners
from neox_config.estimate import (
    bubble_share,
    communication_bytes,
    count_parameters,
    device_memory,
    estimate,
    flops_per_token,
    local_parameters,
)
from neox_config.estimate import memory as of_memory
from neox_config.estimate.parameters import (
    bucketed_parameters,
    number_of_each,
    trained_parameters,
    weights_within,
)
from neox_config.estimate.step import model_bytes, step_collectives
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.facts.vocabulary import pad_vocabulary
from neox_config.spec.model import Retrieval
from support.setups import make, on

SCORES = {"scaled_upper_triang_masked_softmax_fusion": True}
GPT2 = make(12, 768, 12, 1024, 50_257)
GPT3 = make(96, 12288, 96, 2048, 51_200, **SCORES, hidden_dropout=0.1, attention_dropout=0.1)
NEOX_20B = make(44, 6144, 64, 2048, 50_432, pos_emb="rotary", no_weight_tying=True)


MASKED = {"objective": "masked"}
FLOAT32 = make(precision="fp32", data_types={})
ADAM, ONE_BIT = OPTIMIZER_FACTS["adam"], OPTIMIZER_FACTS["onebitadam"]


def activation_bytes_per_layer(setup, **options):
    return of_memory.activation_bytes_per_layer(setup, setup.model.layers[0], **options)


def parameters(setup):
    return count_parameters(setup.model, setup.entries)


def flops(setup, **options):
    return flops_per_token(setup.model, entries=setup.entries, length=setup.run.batch.length, **options)


def adapters(*matrices, rank=4):
    return {"lora_rank": rank, "lora_target_modules": list(matrices), "lora_base": "base"}


def total(shape):
    return sum(parameters(shape).values())


def test_gpt2_has_its_published_size():
    assert total(GPT2) == 124_439_808
    assert total(make(48, 1600, 25, 1024, 50_257)) == 1_557_611_200


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
        ({"no_weight_tying": True}, {"head": 80}),
        ({"pos_emb": "rotary"}, {"positions": 0}),
        ({"pos_emb": "sinusoidal"}, {"positions": 0}),
        ({"pos_emb": "rpe", "rpe_num_buckets": 32}, {"positions": 2 * 32 * 2}),
        ({"norm": "rmsnorm"}, {"norms": 40}),
        ({"norm": "scalenorm"}, {"norms": 5}),
        ({"norm": "apexlayernorm"}, {}),
        # 2 x (8 x 21 + 21) + 21 x 8 + 8 per layer
        ({"activation": "geglu", "mlp_width": 21}, {"mlp": 2 * 554}),
        (
            {"use_bias_in_mlp": False, "use_bias_in_attn_linear": False},
            {"attention": 2 * 256, "mlp": 2 * 512},
        ),
        ({"num_unique_layers": 1}, {"attention": 288, "mlp": 552, "norms": 48}),
        # up 8 x 64 + 64, mixing 4 x 4 + 4, down 32 x 8 + 8; norms of 8 and of 32 channels
        ({"attention_config": ["gmlp", "gmlp"]}, {"attention": 0, "mlp": 2 * 860, "norms": 2 * 80 + 16}),
        # query-key-value of all 64 channels, 3 wide each, and 3 to 32
        (
            {"attention_config": ["global", "amlp"], "gmlp_attn_dim": 3},
            {"attention": 288 + 64 * 9 + 9 + 3 * 32 + 32, "mlp": 552 + 860, "norms": 32 + 80 + 16},
        ),
    ],
)
def test_parameters_of_each_part(changes, differences):
    assert parameters(make(**changes)) == BASE | differences


@pytest.mark.parametrize(
    ("style", "owners", "of_second_stage"),
    [("grouped", (0, 1, 0, 1), (0, 1)), ("spaced", (0, 0, 2, 2), (2,))],
)
def test_shared_layers_own_the_weights_of_the_first_to_use_them(style, owners, of_second_stage):
    assert weight_owners(4, 2, style) == owners
    model = make(4, num_unique_layers=2, param_sharing_style=style).model
    assert weights_within(model, range(4)) == tuple(sorted(set(owners)))
    assert weights_within(model, range(2, 4)) == of_second_stage


def test_layers_that_differ_in_their_number_alone_are_one_kind():
    settings = {"pos_emb": "alibi", "apply_query_key_layer_scaling": True, "num_unique_layers": 2}
    model = make(4, **settings).model
    assert len(set(model.layers)) == 4
    ((_, number),) = number_of_each(model, range(4))
    assert number == 4


def test_as_many_sets_of_weights_as_layers_share_nothing():
    assert weight_owners(4, 4, "grouped") is None
    assert weight_owners(4, None, "spaced") is None


def test_a_stage_holds_each_shared_set_once():
    shape = make(4, no_weight_tying=True, num_unique_layers=2)
    alone = make(4, no_weight_tying=True)
    one_layer = total(make(2)) - total(make(1))
    assert local_parameters(alone, 0) - local_parameters(shape, 0) == 2 * one_layer
    for stage in (0, 1):
        of_stage = [local_parameters(on(each, stages=2), stage) for each in (shape, alone)]
        assert of_stage[0] == of_stage[1]


def test_activations_are_megatrons_formula():
    # arXiv:2205.05198: s b h (34 + 5 a s / h); the second term is 80 for GPT-3 and 64 for MT-NLG.
    per_token = 2048 * 12288
    assert activation_bytes_per_layer(GPT3) == per_token * (34 + 80)
    assert activation_bytes_per_layer(on(GPT3, tensor=8)) == per_token * (10 + 24 // 8 + 80 // 8)
    mt_nlg = make(96, 20480, 128, 2048, 51_200, **SCORES, hidden_dropout=0.1, attention_dropout=0.1)
    assert activation_bytes_per_layer(on(mt_nlg, micro=2)) == 2 * 2048 * 20480 * (34 + 64)


def test_flash_attention_keeps_a_sum_per_query_and_head_instead_of_scores():
    flash = on(GPT3, causal_softmax=False)
    assert activation_bytes_per_layer(flash) == 2048 * (34 * 12288 + 4 * 96)


def test_without_dropout_no_masks_are_kept():
    plain = make(96, 12288, 96, 2048, 51_200, **SCORES)
    assert activation_bytes_per_layer(plain) == 2048 * 12288 * (32 + 32)


def test_recomputation_keeps_the_input_of_each_segment_and_one_segment_at_work():
    shape = make(4, 64, 4, 128, 100)
    hidden, layer = 2 * 128 * 64, activation_bytes_per_layer(shape)
    assert device_memory(on(shape, segment=1)).activations == 4 * hidden + layer
    assert device_memory(on(shape, segment=2)).activations == 2 * hidden + 2 * layer
    shared = device_memory(on(shape, segment=1, tensor=2, partitions_inputs=True))
    one = activation_bytes_per_layer(on(shape, tensor=2))
    assert shared.activations == 4 * hidden // 2 + one
    on_host = device_memory(on(shape, segment=1, inputs_on_host=True))
    assert (on_host.activations, on_host.host) == (layer, 4 * hidden)


def test_the_logits_of_a_large_vocabulary_outweigh_a_recomputed_layer():
    shape = make(1, 8, 2, 16, 1000)
    # the segment's input, the final norm's, the head's, logits and their gradient, in two bytes each
    inputs = 16 * (2 * 8 + 2 * 8 + 2 * 8)
    whole = device_memory(on(shape, segment=1, autocast="fp16"))
    assert whole.activations == inputs + 16 * 4 * 1000
    # logits, again in float32, the gradients of the matrix in float32, and of the hidden states
    chunks = device_memory(on(shape, segment=1))
    assert chunks.activations == inputs + 16 * (2 + 4) * 1000 + 8 * 4 * 1000 + 16 * 2 * 8


def test_the_loss_in_chunks_needs_no_more_logits_for_more_tokens():
    shape = make(1, 8, 2, 4096, 2**20)
    one, two = (device_memory(on(shape, micro=micro_batch, segment=1)).activations for micro_batch in (1, 2))
    # the three inputs, and the gradient of the hidden states
    assert two - one == 4096 * 4 * 2 * 8


def test_sequence_parallelism_splits_the_activations_between_matrices():
    # arXiv:2205.05198: s b h (34 + 5 a s / h) / t.
    setup = on(GPT3, tensor=8, splits_sequence=True)
    assert activation_bytes_per_layer(setup) == 2048 * 12288 * (34 + 80) // 8
    # Recomputed layers keep the gathered inputs of matrices until their backward pass.
    at_work = activation_bytes_per_layer(on(setup, segment=1))
    assert at_work == 2048 * 12288 * (6 / 8 + 4 + 24 / 8 + 80 / 8)
    shape = make(4, 64, 4, 128, 100)
    setup = on(shape, segment=1, tensor=2, splits_sequence=True)
    one = activation_bytes_per_layer(setup)
    assert device_memory(setup).activations == 4 * 2 * 128 * 64 // 2 + one


def test_the_first_stage_holds_the_activations_of_as_many_micro_batches_as_there_are_stages():
    shape = make(8, 64, 4, 128, 100)
    setup = on(shape, stages=4, accumulation=16)
    layer = activation_bytes_per_layer(setup)
    kept = [device_memory(setup, stage).activations for stage in range(4)]
    assert kept[:3] == [2 * layer * 4, 2 * layer * 3, 2 * layer * 2]
    assert device_memory(on(setup, accumulation=2), 0).activations == 2 * layer * 2


def test_with_one_micro_batch_gradients_take_the_place_of_activations():
    shape = make(8, 64, 4, 128, 100)
    once, twice = (device_memory(on(shape, accumulation=number)) for number in (1, 2))
    assert once.reused == once.gradients == twice.gradients > 0
    assert twice.reused == 0
    assert twice.total - once.total == once.gradients
    # The end of the backward pass is the peak: the gradients, and the activations of one layer.
    few_tokens = on(shape, length=8)
    memory = device_memory(few_tokens)
    assert memory.gradients > memory.activations
    assert memory.reused == memory.activations - activation_bytes_per_layer(few_tokens)
    assert device_memory(on(shape, data=2, zero=1, name="deepspeed")).reused == 0


def test_a_parallel_residual_stores_the_input_of_both_norms_once():
    one, two = (
        activation_bytes_per_layer(make(12, 768, 12, 1024, 50_257, gpt_j_residual=is_so))
        for is_so in (True, False)
    )
    assert two - one == 1024 * 2 * 768


def test_layers_are_compiled_on_gpus_except_at_stage_3():
    assert make().compiles_on("cuda")
    assert not make().compiles_on("cpu")
    assert not on(make(), zero=3, requested=True).compiles_on("cuda")
    swiglu = make(12, 768, 12, 1024, 50_257, activation="swiglu", norm="rmsnorm")
    stored = [activation_bytes_per_layer(on(swiglu, requested=is_so)) for is_so in (True, False)]
    # the activated gate
    assert stored[1] - stored[0] == 1024 * 2 * swiglu.model.layers[0].channel.width


# arXiv:1910.02054, figure 1: 7.5 billion parameters, 64 devices, Adam: 120, 31.4, 16.6 and 1.9 GB.
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_shares_as_published(stage, gigabytes):
    # 36 layers of width 4096 and a small vocabulary: 7.25 billion, scaled to the published 7.5.
    shape = make(36, 4096, 32, 1024, 128)
    memory = device_memory(on(shape, data=64, zero=stage, name="deepspeed"))
    states = memory.weights + memory.gradients + memory.optimizer
    assert states / total(shape) * 7.5 == pytest.approx(gigabytes, abs=0.05)


def test_parts_of_fully_shard_are_float32_and_whole_weights_exist_besides_below_stage_3():
    setup = on(make(), data=4, accumulation=2)
    part = 1872 // 4
    for stage, weights, gradients, optimizer in (
        (1, 2 * 1872, 2 * 1872, 12 * part),
        (2, 2 * 1872, 4 * part, 12 * part),
        # A layer, and the final norm and the tied embedding.
        (3, 2 * (872 + 16 + 80 + 32), 4 * part, 12 * part),
    ):
        found = device_memory(on(setup, zero=stage))
        assert (found.weights, found.gradients, found.optimizer) == (weights, gradients, optimizer), stage
    # A single micro-batch is reduced at once.
    found = device_memory(on(setup, zero=1, accumulation=1))
    assert found.gradients == 4 * part
    # One rank has nothing to partition.
    alone = on(setup, data=1)
    assert device_memory(on(alone, zero=3)) == device_memory(alone)


def test_ranks_that_divide_rows_store_their_rows_of_states_and_all_maxima_of_columns():
    setup = on(make(), data=2, zero=1)
    # Of each layer 8 x 24 + 8 x 8 + 2 x 8 x 32 elements in matrices, which have a momentum alone.
    matrices = 2 * (192 + 64 + 512)
    muon = device_memory(on(setup, optimizer=OPTIMIZER_FACTS["muon"]))
    assert muon.optimizer == 4 * (1872 + 2 * 1872 - matrices) // 2
    with_rows = device_memory(on(setup, optimizer=OPTIMIZER_FACTS["muon"], row_states=1))
    assert with_rows.optimizer == muon.optimizer + 4 * 2 * (24 + 8 + 32 + 8) // 2
    sm3 = device_memory(on(setup, optimizer=OPTIMIZER_FACTS["sm3"], states=0))
    rows = 10 + 4 + 16 + 2 * (32 + 24 + 24 + 8 + 8 + 32 + 32 + 8 + 8)
    columns = 8 + 8 + 2 * (8 + 8 + 8 + 32)
    assert sm3.optimizer == 4 * ((1872 + rows) // 2 + columns)


def test_float32_training_needs_no_master_weights():
    memory = device_memory(FLOAT32)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * 1872, 4 * 1872, 8 * 1872)


def test_averages_of_weights_are_as_large_as_master_weights_and_divided_as_they_are():
    for zero, name, part in ((0, "torch", 1872), (1, "torch", 468), (3, "torch", 468), (3, "deepspeed", 468)):
        setup = on(make(), data=4, zero=zero, name=name, saves_in_background=True)
        plain, averaged = device_memory(setup), device_memory(on(setup, averages_weights=True))
        assert averaged.optimizer - plain.optimizer == 4 * part
        assert averaged.snapshot - plain.snapshot == 4 * 468
        assert averaged.total - plain.total == 4 * part


def test_states_of_two_bytes_take_half_the_memory_of_both_moments():
    for zero, part in ((0, 1872), (1, 468), (3, 468)):
        setup = on(make(), data=4, zero=zero, saves_in_background=True)
        plain, halved = device_memory(setup), device_memory(on(setup, state_bytes=2))
        assert plain.optimizer - halved.optimizer == 4 * part
        assert plain.snapshot - halved.snapshot == 4 * 468


def test_replicas_that_compress_store_their_errors():
    """One number per parameter for what a replica lost, and this replica's share of one for the mean."""
    setup = on(FLOAT32, optimizer=ONE_BIT)
    assert device_memory(setup).optimizer == 8 * 1872
    alone, several = device_memory(setup), device_memory(on(setup, data=3))
    assert several.optimizer == (8 + 4) * 1872 + 4 * 624
    plain = device_memory(on(setup, data=3, optimizer=ADAM))
    # Besides the buckets of gradients, which both have: 15 bytes for each number that is averaged at once.
    assert several.buffers - plain.buffers == 15 * 1872
    assert alone.buffers == device_memory(on(setup, optimizer=ADAM)).buffers


def test_autocast_keeps_copies_of_the_weights_for_every_micro_batch_in_flight():
    setup = FLOAT32
    for changes, copies in (({}, 1), ({"stages": 2, "accumulation": 4}, 2), ({"segment": 1}, 1)):
        plain = on(setup, **changes)
        local = device_memory(plain).weights // 4
        cast = device_memory(on(plain, autocast="bf16"))
        assert cast.buffers - device_memory(plain).buffers == 2 * local * copies


def test_adapters_alone_have_gradients_and_states():
    plain = make(2, 64, 4, 8, 100)
    adapted = make(2, 64, 4, 8, 100, **adapters("qkv", "down", "gate"))
    # Of each layer: 4 x 64 and 192 x 4 of qkv, 4 x 256 and 64 x 4 of down; there is no gate.
    trained = 2 * 4 * (64 + 192 + 256 + 64)
    assert parameters(adapted) == {**parameters(plain), "adapters": trained}
    whole, memory = device_memory(plain), device_memory(adapted)
    assert memory.weights == whole.weights + 2 * trained
    assert (memory.gradients, memory.optimizer) == (2 * trained, (4 + 8) * trained)
    zero = device_memory(on(adapted, data=4, zero=2, name="deepspeed"))
    assert (zero.weights, zero.gradients, zero.optimizer) == (memory.weights, trained // 2, 3 * trained)
    assert device_memory(on(adapted, saves_in_background=True)).snapshot == 12 * trained


def test_tensor_parallel_ranks_split_one_matrix_of_each_adapter():
    adapted = make(1, 64, 4, 8, 100, **adapters("qkv", "down"))
    of_two = device_memory(on(adapted, tensor=2)).gradients
    # qkv: A whole, B halved; down: A halved, B whole.
    assert of_two == 2 * 4 * (64 + 192 // 2 + 256 // 2 + 64)


def test_offloading_moves_states_to_the_host():
    plain = on(make(), data=2, zero=2, name="deepspeed")
    memory = device_memory(on(plain, on_host=True))
    assert (memory.optimizer, memory.gradients, memory.host) == (0, 0, (12 + 2) * 936)
    stage3 = on(plain, zero=3, on_host=True, weights_on_host=True)
    memory = device_memory(stage3)
    assert (memory.weights, memory.optimizer, memory.host) == (0, 0, (12 + 2 + 2) * 936)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_an_asynchronous_save_copies_the_float32_weights_and_states_of_a_rank(zero_stage):
    setup = on(make(), data=2, zero=zero_stage, saves_in_background=True)
    assert device_memory(setup).snapshot == (4 + 4 + 4) * 936
    assert device_memory(on(setup, saves_states=False)).snapshot == 4 * 936
    assert device_memory(on(setup, saves_in_background=False)).snapshot == 0


def test_an_asynchronous_save_copies_all_that_only_this_replica_has():
    setup = on(make(), data=3, optimizer=ONE_BIT, saves_in_background=True)
    assert device_memory(setup).snapshot == (4 + 4 + 4) * 624 + 4 * 1872 + 4 * 624


def test_tensor_parallel_ranks_share_matrices_and_copy_the_rest():
    memory = device_memory(on(make(2, 8, 2, 4, 11), tensor=2))
    # Six of the eleven rows; per layer 192/2 + 24/2 + 64/2 + 8, 256/2 + 32/2 + 256/2 + 8 and norms of 32.
    assert memory.weights == 2 * (6 * 8 + 2 * (148 + 280 + 32) + 32 + 16)


def test_the_last_stage_holds_a_copy_of_a_tied_embedding():
    tied, untied = on(make(4), stages=2), on(make(4, no_weight_tying=True), stages=2)
    assert device_memory(tied, 1).weights == device_memory(untied, 1).weights
    # two layers of 288 + 552 + 32, the embedding and positions in front, the norm and the head behind
    assert device_memory(tied, 0).weights == 2 * (2 * 872 + 80 + 32)
    assert device_memory(tied, 1).weights == 2 * (2 * 872 + 16 + 80)


def test_operations_are_the_formula_of_megatron():
    # arXiv:2104.04473: 96 B s l h^2 (1 + s / 6h + V / 16lh) with recomputation, per token here.
    h, s, layers, vocab = 12288, 2048, 96, 51_200
    published = 96 * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert flops(GPT3, is_recomputed=True) == pytest.approx(published, rel=1e-12)
    assert flops(GPT3) == 72 * layers * h**2 + 12 * layers * s * h + 6 * vocab * h


def test_gpt3_takes_the_published_time():
    # arXiv:2104.04473, section 5.1: 300 billion tokens, 1024 A100 at 140 TFLOP/s with recomputation: 34 days.
    setup = on(GPT3, tensor=8, stages=8, data=16, accumulation=96, segment=1)
    result = estimate(setup)
    assert setup.samples == 1536
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
    shape = make(1, 8, 2, 256, 10, attention_config=[kind], sparsity_config={"num-random-blocks": 2})
    # matrices: 24 h^2 forward; the head 2 V h
    assert flops(shape) == 3 * (24 * 64 + 4 * keys * 8 + 2 * 10 * 8)


@pytest.mark.parametrize(
    ("kind", "settings", "keys"),
    [
        ("global", MASKED, 256),
        ("global", MASKED | {"sliding_window_width": 20}, 2 * 20 + 1),
        ("global", MASKED | {"sliding_window_width": 200}, 256),
        ("local", MASKED, 5 * 16),
        ("bigbird", MASKED | {"sparsity_config": {"num-random-blocks": 2}}, (3 + 1 + 2) * 16),
    ],
)
def test_windows_of_masked_models_reach_to_both_sides(kind, settings, keys):
    shape = make(1, 8, 2, 256, 10, attention_config=[kind], **settings)
    assert flops(shape) == 3 * (24 * 64 + 4 * keys * 8 + 2 * 10 * 8)


def test_gmlp_mixes_half_of_its_channels_over_all_positions():
    shape = make(1, attention_config=["gmlp"])
    assert flops(shape) == 3 * (2 * (8 * 64 + 32 * 8) + 2 * 4 * 32 + 2 * 10 * 8)


def llama_1b():
    return make(
        *(16, 2048, 32, 4096, 128_256),
        num_kv_heads=8,
        mlp_width=8192,
        activation="swiglu",
        norm="rmsnorm",
        pos_emb="rotary",
        use_bias_in_mlp=False,
        use_bias_in_attn_linear=False,
    )


@pytest.mark.parametrize(
    ("shape", "tokens", "seconds", "full", "causal"),
    [
        # 6 x (matrices + layers x length x hidden x 2 or 1) x tokens per second / 989e12, computed by hand.
        (make(24, 2048, 16, 2048, 50_304, no_weight_tying=True), 8 * 2048, 0.2917, 0.515, 0.481),
        (llama_1b(), 4 * 4096, 0.2843, 0.526, 0.479),
        (make(12, 768, 12, 2048, 50_304, no_weight_tying=True), 16 * 2048, 0.0753, 0.426, 0.376),
    ],
)
def test_utilization_by_both_conventions(shape, tokens, seconds, full, causal):
    for convention, expected in (("full", full), ("causal", causal)):
        rate = tokens / seconds * flops(shape, convention=convention)
        assert rate / 989e12 == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("kind", "settings", "counted"),
    [
        ("global", {}, 128),
        # A window of 64: all but the first queries see it.
        ("global", {"sliding_window_width": 63}, 64 - 64 * 64 / 512),
        # One that is longer than the sequence hides nothing more than the causal mask.
        ("global", {"sliding_window_width": 300}, 128),
        ("local", {}, 48 - 48 * 48 / 512),
        ("global", MASKED, 256),
        ("global", MASKED | {"sliding_window_width": 20}, 41),
    ],
)
def test_what_the_causal_mask_hides_is_not_counted_by_the_causal_convention(kind, settings, counted):
    shape = make(1, 8, 2, 256, 10, attention_config=[kind], **settings)
    expected = 3 * (24 * 64 + 4 * counted * 8 + 2 * 10 * 8)
    assert flops(shape, convention="causal") == expected
    result = estimate(shape)
    assert result.causal_flops_per_token == expected
    assert result.flops_per_token == flops(shape, convention="full") == flops(shape)


def test_a_causal_gmlp_layer_mixes_half_of_the_positions():
    shape = make(1, attention_config=["amlp"], gmlp_attn_dim=6)
    matrices = flops(shape) - 3 * (4 * 4 * (2 * 8 + 6))
    assert flops(shape, convention="causal") == matrices + 3 * (4 * 2 * (2 * 8 + 6))


@pytest.mark.parametrize(("stage", "sent"), [(0, 2 * 2), (1, 4), (2, 3 * 2 + 2), (3, 3 * (2 + 2 * 2))])
def test_data_parallel_bytes(stage, sent):
    shape = make()
    setup = on(shape, data=4, zero=stage, accumulation=3)
    assert communication_bytes(setup).data == sent * 1872 * 3 // 4


def test_recomputed_attention_keeps_no_scores():
    # arXiv:2205.05198: s b h 34 / t with selective recomputation; the scores of one layer exist at a time.
    setup = on(GPT3, tensor=8, splits_sequence=True, attention=True)
    assert activation_bytes_per_layer(setup) == 2048 * 12288 * 34 // 8
    shape = make(4, 64, 4, 128, 100, **SCORES, attention_dropout=0.1)
    layer, scores = activation_bytes_per_layer(on(shape, attention=True)), 5 * 4 * 128 * 128
    assert activation_bytes_per_layer(shape) == layer + scores
    assert device_memory(on(shape, attention=True)).activations == 4 * layer + scores
    assert flops(shape, recomputes_attention=True) == flops(shape) + 4 * 4 * 128 * 64


def test_model_parallel_bytes_are_those_of_the_collectives_of_a_step():
    shape = make(3)
    setup = on(shape, tensor=4, micro=5, accumulation=2)
    hidden = 2 * 4 * 5 * 8
    ring = 2 * hidden * 3 // 4
    # Two numbers per token and rank for the loss, and the norm of the gradients.
    others = 2 * (2 * 4 * 20 * 4 * 3 // 4) + 2 * 4 * 3 // 4
    assert communication_bytes(setup).model == 2 * (3 * 4 + 2) * ring + others
    # The last sum of a recomputed layer is not needed.
    recomputed = on(setup, segment=1)
    assert communication_bytes(recomputed).model == 2 * (3 * 5 + 2) * ring + others
    once = on(make(3, gpt_j_residual=True), tensor=4, micro=5, accumulation=2)
    norms = 3 * 4 * 8 * 2 * 2 * 3 // 4
    assert communication_bytes(once).model == 2 * (3 * 2 + 2) * ring + others + norms


def test_layers_with_adapters_send_for_each_branch():
    parallel, serial = (
        on(make(3, **adapters("qkv", rank=2), gpt_j_residual=is_so), tensor=4, micro=5, accumulation=2)
        for is_so in (True, False)
    )
    assert model_bytes(parallel) == model_bytes(serial)


def test_pipeline_bytes_are_activations_and_their_gradients():
    shape, hidden = make(4, no_weight_tying=True), 2 * 4 * 8
    assert communication_bytes(on(shape, stages=1)).pipe == 0
    assert communication_bytes(on(shape, stages=2, accumulation=6)).pipe == 6 * hidden
    assert communication_bytes(on(shape, stages=4, accumulation=6)).pipe == 6 * 2 * hidden
    assert communication_bytes(on(make(4), stages=4)).pipe == 2 * hidden + 2 * 80


def test_bubble():
    assert bubble_share(on(make(), stages=1, accumulation=3)) == 0
    assert bubble_share(on(make(), stages=4, accumulation=9)) == 3 / 12


def test_a_schedule_that_splits_the_backward_pass_keeps_gathered_inputs():
    setup = on(GPT3, tensor=8, stages=2, is_pipeline=True, splits_sequence=True)
    split = on(setup, schedule="zbv", chunks=2)
    kept = activation_bytes_per_layer(split) - activation_bytes_per_layer(setup)
    # Two inputs of split matrices, in two bytes, of which a rank otherwise keeps its part.
    assert kept == 2048 * 2 * 2 * 12288 * 7 // 8
    assert model_bytes(split) < model_bytes(setup)


def test_replicated_gradients_are_summed_once_per_update_except_by_deepspeeds_zero():
    setup = on(GPT3, tensor=2, splits_sequence=True, accumulation=3)

    def sums(**options: object) -> list[tuple[str, int]]:
        found = step_collectives(on(setup, **options))
        reduced = [each for each in found if each.operation == "all_reduce" and each.group == "model"]
        return [(each.part, each.calls) for each in reduced]

    # The second message is the norm of all gradients, which is not counted with ZeRO.
    assert sums() == [("update", 2)]
    assert sums(data=2, zero=1) == [("update", 1)]
    ((part, calls),) = sums(data=2, zero=1, name="deepspeed")
    assert part == "replicated parameters"
    assert calls > 3 * 96


def test_gradients_are_averaged_in_small_messages_from_the_head_to_the_embedding():
    shape = make(1, 1024, 16, 8, 2000, no_weight_tying=True)
    setup = on(shape, data=2)
    found = bucketed_parameters(setup)
    assert sum(found) == trained_parameters(setup, 0)
    # The head, the final norm and the last bias; then the last matrix, and the one before with its biases.
    assert found[:2] == [2000 * 1024 + 2 * 1024 + 1024, 1024 * 4096]
    assert max(found) == 1024 * 4096
    # Some are summed over tensor-parallel ranks first.
    later = bucketed_parameters(setup, later=4 * 1024)
    assert (later[-1], sum(later)) == (4 * 1024, sum(found))
    assert bucketed_parameters(on(setup, overlaps=False)) == [sum(found)]
    assert bucketed_parameters(setup, device="cpu") == [sum(found)]


@pytest.mark.parametrize("change", [{"zero": 1}, {"is_pipeline": True}, {"name": "deepspeed"}, {"data": 1}])
def test_setups_derived_from_one_that_averages_gradients_early_do_not_count_its_messages(change):
    setup = on(make(), data=2)
    assert setup.reduces_early("cuda")
    assert not on(setup, **change).reduces_early("cuda")


@pytest.mark.parametrize("segment", [None, 1])
def test_a_retrieval_model_stores_the_activations_of_two_texts(segment):
    """Those of the layers are twice those of another model; recomputed layers are those of one tower."""
    plain = on(make(6, 256, 4, 128, 2048, pos_emb="rotary", no_weight_tying=True), micro=4, segment=segment)
    layer, inputs = activation_bytes_per_layer(plain, device="cpu"), 4 * 4 * 128 * 256
    norm = 4 * 128 * 256 * 2
    for towers in (1, 2):
        head = Retrieval(size=64, shared=towers == 1)
        setup = replace(plain, model=replace(plain.model, head=head))
        assert activation_bytes_per_layer(setup, device="cpu") == 2 * layer
        kept = 2 * 6 * layer if segment is None else 2 * 6 * inputs * 2 // 4
        working = 0 if segment is None else 2 * layer // towers
        found = device_memory(setup, device="cpu").activations
        assert found == kept + max(working, 2 * norm)
