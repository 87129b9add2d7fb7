"""Files of published models, of earlier versions of transformers too, are read as it reads them."""

import copy

import pytest

from neox_config.spec.values import flat
from neox_model.convert.families import FAMILIES, family_of_config

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


def sizes(*numbers):
    return dict(zip(SIZES, numbers, strict=True))


def factors(count, step):
    return [1.0 + step * index for index in range(count)]


LONG = {"short_factor": factors(48, 0.02), "long_factor": factors(48, 0.5)}
CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    "AutoTokenizer": "Xenova/gpt-4o",
}
PHI3 = {"model_type": "phi3", **sizes(32, 3072, 32, 32, 8192), "hidden_act": "silu", "auto_map": CODE}
GEMMA2 = {
    **sizes(26, 2304, 8, 4, 9216), "model_type": "gemma2", "head_dim": 256, "sliding_window": 4096,
    "hidden_act": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192, "rope_theta": 10000.0, "cache_implementation": "hybrid",
}  # fmt: skip
GEMMA3 = {
    **sizes(26, 1152, 4, 1, 6912), "model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512,
    "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "attn_logit_softcapping": None,
    "max_position_embeddings": 32768, "cache_implementation": "hybrid",
}  # fmt: skip
OLMO3 = {
    **sizes(32, 4096, 32, 32, 11008), "model_type": "olmo3", "rope_theta": 500000, "sliding_window": 4096,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-06,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32,
    "beta_slow": 1, "attention_factor": 1.2079441541679836,
}  # fmt: skip
OPT = {
    "model_type": "opt", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
    "ffn_dim": 3072, "max_position_embeddings": 2048, "do_layer_norm_before": True, "prefix": "</s>",
    "_remove_final_layer_norm": False, "word_embed_proj_dim": 768, "dropout": 0.1, "layerdrop": 0.0,
}  # fmt: skip
SMOLLM3 = {
    **sizes(36, 2048, 16, 4, 11008), "model_type": "smollm3", "rope_theta": 5000000.0, "rope_scaling": None,
    "max_position_embeddings": 65536, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 28,
}  # fmt: skip
GPT_OSS = {
    **sizes(24, 2880, 64, 8, 2880), "model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "initial_context_length": 4096, "sliding_window": 128,
    "max_position_embeddings": 131072, "rope_theta": 150000, "swiglu_limit": 7.0, "attention_bias": True,
    "router_aux_loss_coef": 0.9, "rms_norm_eps": 1e-05, "hidden_act": "silu", "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
PUBLISHED = {
    "gpt-oss": (
        GPT_OSS,
        {"layers.channel.limit": 7.0, "layers.channel.alpha": 1.702, "layers.channel.chosen": 4,
         "layers.mixer.qkv_bias": True, "layers.mixer.sinks": True},
    ),
    "gpt-oss, the class's rotary embedding and windows": (
        {name: value for name, value in GPT_OSS.items() if name not in ("rope_scaling", "sliding_window")},
        {"layers.mixer.position.base": 150000.0},
    ),
    "Gemma 2": (GEMMA2, {"layers.mixer.softcap": 50.0, "head.softcap": 30.0, "layers.mixer.scale": None}),
    "Gemma 2, 27B": (
        GEMMA2 | {"head_dim": 128, "query_pre_attn_scalar": 144},
        {"layers.mixer.scale": 1 / 12},
    ),
    "Gemma 3": (GEMMA3, {"head.softcap": None}),
    "Gemma 3, scaled": (GEMMA3 | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}, {}),
    "Qwen3": (
        {
            **sizes(28, 1024, 16, 8, 3072), "model_type": "qwen3", "head_dim": 128, "rope_theta": 1000000,
            "max_position_embeddings": 40960, "max_window_layers": 28, "sliding_window": None,
            "use_sliding_window": False, "rope_scaling": None, "tie_word_embeddings": True,
        },
        {"layers.mixer.position.base": 1e6, "layers.mixer.head_width": 128, "layers.mixer.pattern": None},
    ),
    "OLMo 2": (
        {**OLMO3, "model_type": "olmo2", "max_position_embeddings": 4096, "rope_scaling": None},
        {"layers.norm_placement": "after", "layers.mixer.qk_norm": "width"},
    ),
    "OLMo 3": (OLMO3 | {"rope_scaling": YARN}, {"layers.mixer.position.base": 500000.0}),
    "SmolLM3": (SMOLLM3 | {"no_rope_layer_interval": 4}, {"layers.mixer.pattern": None}),
    "SmolLM3, windows": (SMOLLM3 | {"use_sliding_window": True, "sliding_window": 128}, {}),
    "Phi-3, 4k": (
        {**PHI3, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
         "rope_scaling": None, "sliding_window": 2047},
        {"layers.mixer.pattern.before": 2046},
    ),
    "Phi-3, 128k": (
        {**PHI3, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
         "rope_scaling": {**LONG, "type": "longrope"}, "sliding_window": 262144},
        {"layers.mixer.pattern": None},
    ),
    "Phi-3, the class's length": (
        {**PHI3, "max_position_embeddings": 131072, "rope_scaling": {**LONG, "type": "longrope"}},
        {"layers.mixer.pattern": None},
    ),
    "Phi-4-mini": (
        {**PHI3, **sizes(32, 3072, 24, 8, 8192), "max_position_embeddings": 131072,
         "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
         "tie_word_embeddings": True, "rope_scaling": {**LONG, "type": "longrope"}},
        {"layers.mixer.position.fraction": 0.75, "head.tied": True},
    ),
    "OPT": (OPT, {"layers.mixer.output_bias": True, "embedding.position.offset": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_older_entries_are_read_as_transformers_reads_them(name):
    import transformers  # Takes seconds.

    given, expected = PUBLISHED[name]
    family = family_of_config(given)
    kind = getattr(transformers, family.class_name).config_class
    theirs = kind.from_dict(copy.deepcopy({**given, "auto_map": None})).to_dict()
    found = family.read(given)
    assert found == family.read(theirs)
    values = flat(found)
    assert {path: values[path] for path in expected} == expected
    assert family.read(family.write(found)) == found


def kinds_of(name):
    layers = FAMILIES[PUBLISHED[name][0]["model_type"]].read(PUBLISHED[name][0]).layers
    return [(each.mixer.pattern is not None, each.mixer.position) for each in layers]


def test_layers_have_the_positions_of_their_kind():
    scaled, plain = (FAMILIES["gpt_oss"].read(PUBLISHED[name][0]) for name in list(PUBLISHED)[:2])
    assert scaled == plain
    assert [each.mixer.pattern is not None for each in plain.layers] == [True, False] * 12
    assert dict(plain.layers[0].mixer.position.scaling)["truncate"] is False
    for name, every in (("Gemma 3, scaled", 6), ("OLMo 3", 4)):
        for index, (slides, position) in enumerate(kinds_of(name), 1):
            assert slides == (index % every != 0), name
            assert bool(position.scaling) != slides, name
    bases = {position.base for slides, position in kinds_of("Gemma 3") if slides}
    assert bases == {10000.0}
    for index, (slides, position) in enumerate(kinds_of("SmolLM3, windows"), 1):
        assert slides == (position is None) == (index % 4 == 0)


def test_the_original_length_of_phi3_is_that_of_its_class():
    """The class has one outside the block, which counts."""
    values = {"max_position_embeddings": 131072, "rope_scaling": {**LONG, "type": "longrope"}}
    found = [
        FAMILIES["phi3"].read({**PHI3, **values, **more})
        for more in (
            {},
            {"original_max_position_embeddings": 8192},
            {"rope_scaling": {**values["rope_scaling"], "original_max_position_embeddings": 8192}},
        )
    ]
    lengths = [
        dict(each.layers[0].mixer.position.scaling)["original_max_position_embeddings"] for each in found
    ]
    assert lengths == [4096, 8192, 4096]
    older = {**PHI3, **values, "rope_scaling": {**LONG, "type": "su"}}
    assert FAMILIES["phi3"].read(older) == found[0]
    assert FAMILIES["phi3"].write(found[1])["original_max_position_embeddings"] == 8192
