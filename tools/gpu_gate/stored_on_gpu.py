"""Count what layers store for the backward pass on a GPU, without a GPU, uncompiled and compiled.

    PYTHONPATH=tests:tools python -m gpu_gate.stored_on_gpu

Prints the bytes in JSON: architecture -> [uncompiled, compiled]. Tensors are FakeTensors of a CUDA device in
name (`gpu_gate.device`). A compiled layer stores what AOTAutograd's partition of its graph hands from the
forward to the backward pass.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_gate.device import load_stand_in

__all__ = ["ARCHITECTURES"]

_SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "train_micro_batch_size_per_gpu": 4,
    "precision": "bfloat16",
}
_NO_BIAS = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}

# Settings by name: models of one layer.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    name: _SIZES | settings
    for name, settings in {
        "GPT-NeoX": {"pos_emb": "rotary", "rotary_pct": 0.25, "gpt_j_residual": True},
        "Llama": {
            "pos_emb": "rotary",
            "norm": "rmsnorm",
            "activation": "swiglu",
            "num_kv_heads": 4,
            **_NO_BIAS,
        },
        "GPT-2": {"pos_emb": "learned", "hidden_dropout": 0.1},
        "grouped queries": {"pos_emb": "learned", "num_kv_heads": 4, "activation": "relu"},
        "scale norm": {"pos_emb": "none", "norm": "scalenorm", "activation": "softsign"},
        "gMLP": {"pos_emb": "none", "attention_config": [[["gmlp"], 1]]},
        "gMLP with RMS norm": {"pos_emb": "none", "norm": "rmsnorm", "attention_config": [[["gmlp"], 1]]},
    }.items()
}


def _count() -> dict[str, list[int]]:
    """Return the bytes by architecture."""
    # torch looks for CUDA when it is imported: `load_stand_in` must come first.
    from unittest import mock

    import torch
    from torch import Tensor
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx import GraphModule
    from torch.nn import functional

    from gpu_gate.layers import build_layer_of, inputs_of
    from gpu_gate.lowering import flash_attention, move_layer
    from neox_model.layers.attention import flex
    from neox_model.layers.residual_layer import ResidualLayer
    from neox_model.parallel import collectives, random
    from support.settings import resolved_from

    def bytes_of(tensors: Iterable[Any], weights: set[int]) -> int:
        """Return the memory of tensors that are not weights; views of the same memory count once."""
        memories = [each.untyped_storage() for each in tensors if isinstance(each, Tensor)]
        sizes = {memory._cdata: memory.nbytes() for memory in memories}
        return sum(size for memory, size in sizes.items() if memory not in weights)

    class FusedRMSNorm(torch.autograd.Function):
        """Stores what PyTorch's operator for GPUs does: the input, the weight, and a number per token."""

        @staticmethod
        def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(inputs, weight, inputs.new_empty(inputs.shape[:-1], dtype=torch.float32))
            return torch.empty_like(inputs)

    def rms_norm(inputs: Tensor, shape: Sequence[int], weight: Tensor, epsilon: float) -> Tensor:
        """Stand for the operator, which a CPU build computes with several."""
        normed: Tensor = FusedRMSNorm.apply(inputs, weight)
        return normed

    def uncompiled(layer: ResidualLayer, inputs: Sequence[Tensor | None]) -> int:
        kept: list[Tensor] = []

        def remember(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor)
        with hooks, mock.patch.object(functional, "rms_norm", rms_norm):
            layer.block(*inputs)
        return bytes_of(kept, {weight.untyped_storage()._cdata for weight in layer.parameters()})

    def compiled(layer: ResidualLayer, inputs: Sequence[Tensor | None]) -> int:
        found: list[int] = []
        shapes = {weight.shape for weight in layer.parameters()}

        def forward(graph: GraphModule, _: Sequence[Any]) -> Any:
            nodes = list(graph.graph.nodes)
            given = [node.meta["val"] for node in nodes if node.op == "placeholder"]
            weights = {one.untyped_storage()._cdata for one in given if getattr(one, "shape", None) in shapes}
            # The layer's output comes first.
            found.append(bytes_of((node.meta["val"] for node in nodes[-1].args[0][1:]), weights))
            return graph.forward

        backend = aot_autograd(
            fw_compiler=forward,
            bw_compiler=lambda graph, _: graph.forward,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            decompositions=select_decomp_table,
        )
        torch.compile(layer.block, backend=backend, dynamic=False, fullgraph=True)(*inputs)
        torch.compiler.reset()
        (stored,) = found
        return stored

    for function in (*collectives.COMPILE_DISABLED, *random.COMPILE_DISABLED, *flex.COMPILE_DISABLED):
        function.disable_compile()
    counted: dict[str, list[int]] = {}
    for name, settings in ARCHITECTURES.items():
        resolved = resolved_from(settings)
        layer = build_layer_of(resolved)
        attention = mock.patch.object(functional, "scaled_dot_product_attention", flash_attention)
        with FakeTensorMode(), attention:
            move_layer(layer)
            inputs = inputs_of(resolved, "cuda:0", torch.bfloat16, has_documents=False)
            counted[name] = [uncompiled(layer, inputs), compiled(layer, inputs)]
    return counted


def main() -> None:
    """Print the bytes of all architectures."""
    with tempfile.TemporaryDirectory() as folder:
        load_stand_in(Path(folder))
        json.dump(_count(), sys.stdout)


if __name__ == "__main__":
    main()
