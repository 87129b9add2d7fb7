"""Under amp, generation and evaluation compute what the forward pass of training computes."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from neox_model.assembly.model import build_model
from neox_model.layers.attention.kv_cache import logits_in_parts
from neox_model.parallel.groups import SINGLE_PROCESS
from support.settings import resolved_from

VOCABULARY = 19
AMP = {"bf16": 2e-2, "fp16": 2e-3}


def built(amp: dict[str, Any]) -> torch.nn.Module:
    resolved = resolved_from({"amp": amp, "pos_emb": "rotary", "num_kv_heads": 2})
    return build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=VOCABULARY)


@pytest.mark.parametrize("dtype", AMP)
def test_evaluation_and_generation_equal_the_forward_pass_of_training(dtype):
    model, exact = built({"enabled": True, "dtype": dtype}), built({})
    tokens_BS = torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(3))
    inputs_BS, labels_BS = tokens_BS[:, :-1], tokens_BS[:, 1:]
    targets = labels_BS, torch.full(labels_BS.shape, 1 / labels_BS.numel())
    trained = model.train()(inputs_BS, targets).detach()
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs_BS, targets), trained)
        logits_BSV = model(inputs_BS)
        plain = exact.eval()(inputs_BS, targets)
        of_logits = cross_entropy(logits_BSV.float().flatten(0, 1), labels_BS.flatten())
    assert logits_BSV.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert float(of_logits) == pytest.approx(float(trained), rel=AMP[dtype])
    assert float(plain) == pytest.approx(float(trained), rel=AMP[dtype])
    assert not torch.equal(plain, trained)


@pytest.mark.parametrize("dtype", AMP)
def test_cached_generation_has_the_logits_of_the_whole_forward_pass(dtype):
    model = built({"enabled": True, "dtype": dtype}).eval()
    tokens = torch.randint(VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        whole_BSV = model(tokens)
    found = logits_in_parts(model, tokens, (0, 8, 9, 10, 11, 12))
    assert torch.allclose(found.float(), whole_BSV.float(), atol=AMP[dtype] * 4)
