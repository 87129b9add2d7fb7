"""A server of an imported model of the kinds of classes: texts and scores are those of transformers."""

import subprocess
import sys

import pytest

from support.distributed import run_ranks
from support.harness_tasks import MODEL, OFFLINE
from support.hf_models import write_model
from support.served import serving

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

ROPE = {"rope_type": "default", "rope_theta": 500.0}
# Of all pairs of channels. Every request has more tokens than the original length.
LONG = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 5.0], "rope_type": "longrope"}
FAMILIES = {
    "gemma3_text": {
        "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 12,
        "rope_parameters": {"full_attention": {**ROPE, "rope_type": "linear", "factor": 2.0}},
    },
    "olmo3": {
        "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                **ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    },
    "phi3": {
        "original_max_position_embeddings": 8,
        "rope_parameters": {**ROPE, **LONG, "original_max_position_embeddings": 8},
    },
    "opt": {"ffn_dim": 40},
    "qwen3_moe": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    },
}  # fmt: skip
PAIRS = [
    ("import random from", " settings"),
    ("def write_model(", "folder):\n    return None"),
    ("for value in tokenizer", " folder" * 3),
]
PROMPTS = ["def write_model", "import random\n" * 3, "return the tokenizer for"]


def answers(theirs: str, url: str) -> list[list[list[object]]]:
    """Return scores and texts of the harness's own backend, and of its client of a server."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        base_url=url,
        model="imported",
        tokenizer=theirs,
        tokenizer_backend="huggingface",
        batch_size=1,
        max_length=80,
        max_retries=1,
    )
    models = [HFLM(theirs, device="cpu", dtype="float32", batch_size=1, softmax_dtype="float32"), client]
    settings = {"until": ["\n\n"], "max_gen_toks": 16, "temperature": 0.0}
    pairs = [Instance("loglikelihood", {}, arguments=pair, idx=0) for pair in PAIRS]
    texts = [Instance("generate_until", {}, arguments=(each, dict(settings)), idx=0) for each in PROMPTS]
    return [[model.loglikelihood(pairs), model.generate_until(texts)] for model in models]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_harness_finds_the_scores_and_texts_of_transformers(tmp_path, family):
    sizes = dict(MODEL) if family != "opt" else {
        name: value
        for name, value in MODEL.items()
        if name not in ("num_key_value_heads", "intermediate_size")
    }  # fmt: skip
    write_model(tmp_path / "theirs", family, {**sizes, "vocab_size": 280, **FAMILIES[family]}, seed=2)
    convert = [sys.executable, "-P", "-m", "neox_model.convert", "from-hf", "theirs", "--output", "imported"]
    subprocess.run(convert, cwd=tmp_path, check=True, timeout=300)
    with serving(tmp_path, config=("imported/model.yml",)) as server:
        theirs, ours = run_ranks(
            answers,
            size=1,
            timeout_seconds=300,
            environment={**OFFLINE, "HF_HOME": str(tmp_path / "cache")},
            theirs=str(tmp_path / "theirs"),
            url=f"http://127.0.0.1:{server.port}/v1/completions",
        )[0]
    for (expected, was_greedy), (found, is_greedy) in zip(theirs[0], ours[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
        assert is_greedy == was_greedy
    assert ours[1] == theirs[1]
    assert len(set(ours[1])) == len(PROMPTS)
