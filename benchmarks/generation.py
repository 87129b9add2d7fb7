"""Generate with our batched, cached decoder and with transformers' `generate`: same weights and prompts.

16 prompts of 32 to 256 tokens are continued by 128 tokens each, with the shape of 125M (GPT-NeoX, rotary) in
float32; transformers pads the prompts at their start. The contenders take turns in one process. Reported are
elapsed and processor time, the fastest round of each, and the ratio to the faster of transformers' caches.
Greedy tokens of all must be equal, apart from ties.

    python benchmarks/generation.py [--rounds 2] [--threads 1] [--shape tiny] [--profile]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

SHAPES = {
    "125M": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50_304, "new": 128},
    "tiny": {"layers": 2, "width": 64, "heads": 4, "vocabulary": 512, "new": 16},
}
PROMPTS, SHORTEST, LONGEST = 16, 32, 256
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 0.0},
    "top_k 50": {"temperature": 0.9, "top_k": 50, "top_p": 0.0},
    "top_p 0.95": {"temperature": 0.9, "top_k": 0, "top_p": 0.95},
}
PARTS = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

Run = Callable[[list[list[int]], int, dict[str, Any]], list[list[int]]]


def their_name(name: str) -> str:
    """Return transformers' name of our parameter."""
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        return f"gpt_neox.layers.{index}.{PARTS[part]}.{kind}"
    names = {"embedding.word_embeddings": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm"}
    part, kind = name.rsplit(".", 1)
    return f"{names.get(part, part)}.{kind}"


def build_peer(shape: dict[str, int]) -> Any:
    """Return transformers' model with random weights."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = transformers.GPTNeoXConfig(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["width"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        intermediate_size=4 * shape["width"],
        rope_parameters=rope,
        max_position_embeddings=2048,
        use_parallel_residual=True,
        bos_token_id=0,
        eos_token_id=None,
    )
    return transformers.GPTNeoXForCausalLM(config).eval()


def build_ours(shape: dict[str, int], peer: Any) -> Any:
    """Return our forward pass with the peer's weights."""
    from neox_config import load_config, resolve
    from neox_model.assembly.model import build_stage
    from neox_model.generate.forward import Forward
    from neox_model.parallel.groups import SINGLE_PROCESS
    from neox_model.parallel.logical import named_logical_parameters

    settings = {
        "num_layers": shape["layers"],
        "hidden_size": shape["width"],
        "num_attention_heads": shape["heads"],
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "pos_emb": "rotary",
        "rotary_pct": 0.25,
        "gpt_j_residual": True,
        "no_weight_tying": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "train_iters": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yml"
        path.write_text(json.dumps(settings, allow_nan=False))
        resolved = resolve(load_config([path]), devices=1)
    model = build_stage(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=shape["vocabulary"])
    weights = dict(peer.named_parameters())
    with torch.no_grad():
        for name, parameter in named_logical_parameters(model):
            parameter.copy_(weights[their_name(name)])
    return Forward(
        model.eval(),
        hidden_size=shape["width"],
        vocab_size=shape["vocabulary"],
        model_vocab_size=resolved.model.embedding.entries(shape["vocabulary"]),
    )


def run_ours(forward: Any, prompts: list[list[int]], new: int, way: dict[str, Any]) -> list[list[int]]:
    """Return the new tokens of every prompt."""
    from neox_model.generate.batch import Batch, Request
    from neox_model.generate.sampling import Sampling

    batch = Batch(forward, slots=len(prompts), capacity=LONGEST + new)
    places = batch.admit(
        [
            Request(prompt=prompt, sampling=Sampling(**way, seed=number), maximum_tokens=new)
            for number, prompt in enumerate(prompts)
        ]
    )
    for _ in range(new - 1):
        batch.step()
    found = batch.read()
    return [found[place].tokens for place in places]


def run_peer(
    model: Any, cache: str, prompts: list[list[int]], new: int, way: dict[str, Any]
) -> list[list[int]]:
    """Return the new tokens of every prompt."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling: dict[str, Any] = {"do_sample": False}
    if way["temperature"] > 0.0:
        # 0 and 1.0 switch their filters off.
        sampling = {
            "do_sample": True,
            "temperature": way["temperature"],
            "top_k": way["top_k"],
            "top_p": way["top_p"] or 1.0,
        }
    found = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        cache_implementation=cache,
        disable_compile=True,
        **sampling,
    )
    return found[:, longest:].tolist()


def measure(run: Run, prompts: list[list[int]], new: int, way: dict[str, Any]) -> tuple[float, float, Any]:
    """Return elapsed seconds, processor seconds and the tokens."""
    elapsed, processor = time.perf_counter(), time.process_time()
    tokens = run(prompts, new, way)
    return time.perf_counter() - elapsed, time.process_time() - processor, tokens


def equal_tokens(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """Return how many rows are equal."""
    return f"{sum(one == other for one, other in zip(ours, theirs, strict=True))} of {len(ours)} rows equal"


def main() -> None:
    """Print the times of every contender and way, and the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", choices=SHAPES, default="125M")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--profile", action="store_true", help="profile ours, greedy, instead")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    shape = SHAPES[chosen.shape]
    new = shape["new"]
    peer = build_peer(shape)
    ours = build_ours(shape, peer)
    lengths = torch.linspace(SHORTEST, LONGEST, PROMPTS).long()[torch.randperm(PROMPTS)].tolist()
    prompts = [torch.randint(1, shape["vocabulary"], (length,)).tolist() for length in lengths]
    if chosen.profile:
        with torch.profiler.profile() as profile:
            run_ours(ours, prompts, 16, WAYS["greedy"])
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        return
    contenders: dict[str, Run] = {"ours": partial(run_ours, ours)}
    if not chosen.only_ours:
        contenders |= {
            f"transformers, {cache}": partial(run_peer, peer, cache) for cache in ("dynamic", "static")
        }
    print(f"{PROMPTS} prompts of {SHORTEST} to {LONGEST} tokens, {new} new ones, {chosen.threads} threads")
    for run in contenders.values():
        run(prompts, 2, WAYS["greedy"])
    for name in chosen.ways:
        found: dict[str, list[tuple[float, float, Any]]] = {contender: [] for contender in contenders}
        for _ in range(chosen.rounds):
            for contender, run in contenders.items():
                found[contender].append(measure(run, prompts, new, WAYS[name]))
        report(name, found, new)


def report(name: str, found: dict[str, list[tuple[float, float, Any]]], new: int) -> None:
    """Print the fastest round of each contender, and the ratios to the faster peer."""
    best = {who: [min(run[column] for run in runs) for column in (0, 1)] for who, runs in found.items()}
    for who, (elapsed, processor) in best.items():
        print(
            f"{name:12} {who:24} {elapsed:7.2f} s elapsed, {processor:7.2f} s processor, "
            f"{PROMPTS * new / elapsed:7.1f} tokens/s"
        )
    peers = [times for who, times in best.items() if who != "ours"]
    if peers:
        ratios = [min(peer[column] for peer in peers) / best["ours"][column] for column in (0, 1)]
        print(f"{name:12} ratio: {ratios[0]:.2f} elapsed, {ratios[1]:.2f} processor")
    if name == "greedy":
        for who, runs in found.items():
            print(f"{name:12} {who}: {equal_tokens(found['ours'][0][2], runs[0][2])}")


if __name__ == "__main__":
    main()
