"""Measure forward and backward of a layer of experts: as their number grows, and against other layers.

Every comparison runs both sides in one process with one thread, in turns, and is the median of the ratios of
seven pairs in CPU time, which depends little on other load. Peers: an MLP with as many parameters as all
experts, the loop over experts, and transformers' OLMoE (of its implementations not batched_mm, which takes a
hundred times as long on CPUs). Also the time of each part of the layer.

    python benchmarks/experts.py [growth] [peers] [parts]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.initialization import build_init_method, initialize_parameters
from neox_model.layers.experts import ExpertBlocks, Experts, Router, grouped_product, looped_product
from neox_model.layers.mlp import GatedMLP

LENGTH, BATCH, WIDTH, INNER, CHOSEN = 512, 4, 256, 256, 2
# So many that gradients of weights, whose memory grows with the number of experts, take little of the time.
GROWTH_LENGTH = 2048
NUMBERS = (4, 8, 16, 32, 64)
NUMBER = 32
PAIRS = 7
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INIT = build_init_method("normal", std=0.02, hidden_size=WIDTH, num_layers=2)
OPTIONS: dict[str, Any] = {"activation": functional.silu, "init": INIT, "output_init": INIT}

Run = Callable[[], None]


def experts(number: int, dtype: torch.dtype, product: Any = grouped_product, length: int = LENGTH) -> Run:
    """Return a function that runs our layer."""
    blocks = partial(ExpertBlocks, hidden_size=WIDTH, width=INNER, is_gated=True, product=product, **OPTIONS)
    router = partial(Router, WIDTH, number, chosen=CHOSEN, init=INIT)
    return _passes(_initialized(Experts(WIDTH, router=router, blocks=blocks, init=INIT)), dtype, length)


def dense(number: int, dtype: torch.dtype, length: int) -> Run:
    """Return a function that runs an MLP with as many parameters as all experts."""
    return _passes(_initialized(GatedMLP(WIDTH, number * INNER, bias=False, **OPTIONS)), dtype, length)


def olmoe(number: int, dtype: torch.dtype, implementation: str) -> Run:
    """Return a function that runs the layer of transformers."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    config = OlmoeConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_experts=number, num_experts_per_tok=CHOSEN
    )
    config._experts_implementation = implementation
    layer = OlmoeSparseMoeBlock(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return _passes(layer, dtype)


def _initialized(layer: nn.Module) -> nn.Module:
    initialize_parameters(layer, seed=1)
    return layer


def _passes(layer: nn.Module, dtype: torch.dtype, length: int = LENGTH) -> Run:
    layer = layer.to(dtype).train()
    inputs = torch.randn(length, BATCH, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs.requires_grad_()
    gradient = torch.ones_like(inputs)

    def run() -> None:
        found = layer(inputs)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        output.backward(gradient)
        inputs.grad = None
        layer.zero_grad()

    return run


def seconds(run: Run) -> float:
    """Return the CPU time of a call."""
    began = time.process_time()
    run()
    return time.process_time() - began


def compare(ours: Run, peer: Run) -> tuple[float, float, float]:
    """Return the median seconds of both, and the median of the pairs' ratios, the peer's to ours."""
    for run in (ours, peer):
        run()
    pairs = []
    for number in range(PAIRS):
        order = (ours, peer) if number % 2 else (peer, ours)
        pairs.append({run: seconds(run) for run in order})
    one, other = (statistics.median(pair[run] for pair in pairs) for run in (ours, peer))
    return one, other, statistics.median(pair[peer] / pair[ours] for pair in pairs)


def growth() -> None:
    """Print times with more and more experts, relative to those with the fewest, in float32."""
    dtype, length = torch.float32, GROWTH_LENGTH
    print(f"growth: {length * BATCH:,} tokens")
    fewest, smallest = experts(NUMBERS[0], dtype, length=length), dense(NUMBERS[0], dtype, length)
    for number in NUMBERS:
        ours, _, ratio = compare(experts(number, dtype, length=length), fewest)
        mlp, _, dense_ratio = compare(dense(number, dtype, length), smallest)
        print(
            f"{number:>3} experts {1e3 * ours:7.1f} ms, {1 / ratio:5.2f} x the fewest; "
            f"MLP of the same size {1e3 * mlp:8.1f} ms, {1 / dense_ratio:5.2f} x the smallest"
        )


def peers() -> None:
    """Print our speed relative to the loop, and to each implementation of transformers."""
    for name, dtype in TYPES.items():
        ours = experts(NUMBER, dtype)
        others = {"loop over experts": experts(NUMBER, dtype, looped_product)} | {
            f"transformers, {kind}": olmoe(NUMBER, dtype, kind) for kind in ("eager", "grouped_mm")
        }
        for title, peer in others.items():
            one, other, ratio = compare(ours, peer)
            print(
                f"{name:<9} ours {1e3 * one:7.1f} ms; {title:<25} {1e3 * other:8.1f} ms; speed {ratio:5.2f}"
            )


def parts() -> None:
    """Print the operators that take the most time."""
    from torch.profiler import ProfilerActivity, profile

    for name, dtype in TYPES.items():
        run = experts(NUMBER, dtype)
        run()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(PAIRS):
                run()
        events = profiler.key_averages()
        whole = sum(event.self_cpu_time_total for event in events)
        for event in sorted(events, key=lambda event: -event.self_cpu_time_total)[:12]:
            print(f"{name:<9} {event.key:<44} {event.self_cpu_time_total / whole:6.1%}")


def main() -> None:
    """Print the chosen comparisons."""
    sections = {"growth": growth, "peers": peers, "parts": parts}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help="; ".join(sections))
    torch.set_num_threads(1)
    print(f"{LENGTH * BATCH:,} tokens, width {WIDTH}, {CHOSEN} experts of {INNER} per token, one thread")
    for name in parser.parse_args().sections or sections:
        sections[name]()


if __name__ == "__main__":
    main()
