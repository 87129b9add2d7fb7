"""`onnx_safe` models through torch's exporter: what the ONNX graph computes is what the model does."""

import numpy as np
import pytest
import torch

from neox_model.assembly.model import build_model
from neox_model.parallel.groups import SINGLE_PROCESS
from support.settings import specs_from
from support.tiers import slow_except

pytest.importorskip("onnxscript")
reference = pytest.importorskip("onnx.reference")

CASES = {
    "rotary, shared keys, gated": {
        "pos_emb": "rotary",
        "num_kv_heads": 2,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "bias_gelu_fusion": False,
        "rope_fusion": "auto",
    },
    "kinds and alibi": {
        "pos_emb": "alibi",
        "attention_config": ["bigbird", "amlp", "local"],
        "sparsity_config": {"block": 4},
        "activation": "mish",
        "norm": "scalenorm",
    },
    "rpe, layer scaling, untied": {
        "pos_emb": "rpe",
        "apply_query_key_layer_scaling": True,
        "no_weight_tying": True,
        "gpt_j_residual": True,
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", slow_except(CASES, "rpe, layer scaling, untied"))
def test_an_exported_model_computes_the_same_logits(case):
    model = build_model(*specs_from({**CASES[case], "onnx_safe": True}), SINGLE_PROCESS, vocab_size=11).eval()
    tokens = torch.randint(0, 11, (2, 12), generator=torch.Generator().manual_seed(0))
    exported = torch.onnx.export(model, (tokens,), dynamo=True, verbose=False)
    graph = reference.ReferenceEvaluator(exported.model_proto)
    (logits,) = graph.run(None, {graph.input_names[0]: tokens.numpy()})
    np.testing.assert_allclose(logits, model(tokens).detach().numpy(), atol=1e-5, rtol=1e-4)


def test_a_model_to_export_is_the_model_that_was_trained():
    settings = {"pos_emb": "rpe", "num_kv_heads": 3}
    tokens = torch.randint(0, 11, (2, 12))
    models = [
        build_model(*specs_from({**settings, "onnx_safe": safe}), SINGLE_PROCESS, vocab_size=11)
        for safe in (True, False)
    ]
    torch.testing.assert_close(models[0](tokens), models[1](tokens))
