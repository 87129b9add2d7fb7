"""Measure forward and backward of the loss of 2,048 tokens over 50,304 entries, from hidden states or logits.

The peer is a matrix product and torch's cross entropy of float32 logits. Each implementation runs in a new
process with one thread; CPU time, which depends little on other load, and the growth of memory are measured.

    python benchmarks/loss.py
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TOKENS, WIDTH, VOCABULARY = 2048, 256, 50_304
RUNS = 3
WAYS = ("peer: torch", "through our logits", "from hidden states")
TYPES = ("float32", "bfloat16")


def loss_of(way: str) -> Callable[..., Any]:
    """Return a function of (hidden_SBD, weight_VD, targets) that computes the loss."""
    from torch.nn import functional

    from neox_model.layers.lm_head import LMLoss, compute_logits
    from neox_model.parallel.groups import SINGLE_RANK

    ours = LMLoss(VOCABULARY)

    def peer(hidden: Any, weight: Any, targets: Any) -> Any:
        logits = functional.linear(hidden.transpose(0, 1), weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets[0].flatten())

    def logits(hidden: Any, weight: Any, targets: Any) -> Any:
        return ours(compute_logits(hidden, weight, SINGLE_RANK), targets)

    return dict(zip(WAYS, (peer, logits, ours.of_hidden), strict=True))[way]


def measure(way: str, dtype: str) -> dict[str, float]:
    """Return the CPU seconds of a pass and the growth of memory in MiB; runs in a new process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = torch.randn(TOKENS // 4, 4, WIDTH, dtype=kind, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.02).to(kind).requires_grad_()
    targets = (torch.randint(0, VOCABULARY, (4, TOKENS // 4)), torch.full((4, TOKENS // 4), 1 / TOKENS))
    loss, seconds = loss_of(way), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(RUNS):
        started = time.process_time()
        value = loss(hidden, weight, targets)
        value.backward()
        seconds.append(time.process_time() - started)
        hidden.grad = weight.grad = None
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": statistics.median(seconds), "memory": grown / 1024, "loss": value.item()}


def main() -> None:
    """Print time and memory of each implementation, and the ratios to the peer."""
    print(f"{TOKENS:,} tokens, width {WIDTH}, {VOCABULARY:,} entries, one thread, median of {RUNS}")
    for dtype in TYPES:
        peer = None
        for way in WAYS:
            command = [sys.executable, __file__, way, dtype]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            found = json.loads(
                subprocess.run(command, check=True, capture_output=True, env=environment).stdout
            )
            peer = peer or found
            slower, larger = (found[what] / peer[what] for what in ("seconds", "memory"))
            print(
                f"{dtype:<9} {way:<20} {found['seconds']:6.2f} s ({slower:.2f} x peer)"
                f"  {found['memory']:7,.0f} MiB ({larger:.2f} x peer)  loss {found['loss']:.5f}"
            )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
