"""Training on the CPU: ours through neox-launch, Hugging Face's GPT-NeoX and a plain PyTorch loop.

    python benchmarks/train.py                         # all contenders, twice, in turns
    python benchmarks/train.py --only ours/fp32 plain-compiled/fp32

4 layers, hidden 256, 8 heads, 512 tokens x 4 samples, vocabulary 50,304, rotary positions, parallel residual,
untied head; clipping at 1 and AdamW, the whole step. Each contender is a process of its own: its median step
after the warm-up, the processor time of a step (which other programs on the machine disturb less), and the
largest memory of it or of a process that it started. bf16 is bfloat16 weights with float32 masters for ours,
and autocast over float32 weights for the others.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCAB = 4, 256, 8, 512, 4, 50_304
WARM_UP = 4

OURS: dict[str, Any] = {
    "num-layers": LAYERS,
    "hidden-size": HIDDEN,
    "num-attention-heads": HEADS,
    "seq-length": LENGTH,
    "max-position-embeddings": LENGTH,
    "pos-emb": "rotary",
    "gpt-j-residual": True,
    "no-weight-tying": True,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "make-vocab-size-divisible-by": VOCAB,
    "tokenizer-type": "CharLevelTokenizer",
    "train-micro-batch-size-per-gpu": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "gradient-clipping": 1.0,
    "log-interval": 1,
    "eval-iters": 0,
}


# The contenders: functions of precision and number of steps that give the seconds of steps, elapsed and of
# the processor.
Times = dict[str, list[float]]


def ours(precision: str, steps: int) -> Times:
    """neox-launch, from command to end; a short run first, so that starting can be told from training."""
    before = _processor_time()
    launch(precision, WARM_UP)
    middle = _processor_time()
    first, seconds = launch(precision, steps)
    more = (_processor_time() - middle) - (middle - before)
    return {"seconds": seconds, "processor": [more / (steps - WARM_UP)] * steps, "first_step": [first]}


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def launch(precision: str, steps: int) -> tuple[float, list[float]]:
    """Seconds from the command to the end of the first step, and of each step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = OURS | {"train-iters": steps, "log-dir": name, "data-path": str(_corpus(folder))}
        config["precision"] = "bfloat16" if precision == "bf16" else "fp32"
        (folder / "job.yml").write_text(json.dumps(config))
        began = time.monotonic()
        launcher = Path(sys.executable).with_name("neox-launch")
        process = subprocess.Popen([launcher, "--config", folder / "job.yml"], stdout=subprocess.DEVNULL)
        record = folder / "metrics.jsonl"
        while process.poll() is None and not (record.exists() and record.stat().st_size):
            time.sleep(0.01)
        first_two = time.monotonic() - began
        if process.wait():
            raise SystemExit("neox-launch failed")
        lines = [json.loads(line) for line in record.read_text().splitlines()]
    seconds = [line["time/iteration"] for line in lines if "time/iteration" in line]
    # The first record is written when the second step is done.
    return first_two - seconds[1], seconds


def ours_in_a_plain_loop(precision: str, steps: int) -> Times:
    """The same model without DeepSpeed: what is left is the engine's own work."""
    from torch import nn

    from neox_launcher.config import load_config, resolve
    from neox_model.build.model import build_model
    from neox_model.parallel.groups import SINGLE, Groups

    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump(OURS | {"train-iters": steps}, file)
        file.flush()
        resolved = resolve(load_config([Path(file.name)]), devices=1)
    model = build_model(resolved, Groups(SINGLE, SINGLE, SINGLE, SINGLE, SINGLE), vocab_size=512)

    def loss(module: nn.Module, tokens: Any, labels: Any) -> Any:
        import torch

        return module(tokens, (labels, torch.ones(labels.shape)))

    return _loop(model, loss, precision, steps)


def hugging_face(precision: str, steps: int, *, is_compiled: bool) -> Times:
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=LENGTH,
        use_parallel_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        attn_implementation="sdpa",
        use_cache=False,
    )
    model: Any = GPTNeoXForCausalLM(config)
    if is_compiled:
        model = torch.compile(model)

    def loss(module: Any, tokens: Any, labels: Any) -> Any:
        logits = module(tokens).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return _loop(model, loss, precision, steps)


def plain(precision: str, steps: int, *, is_compiled: bool) -> Times:
    """What one writes by hand: scaled_dot_product_attention, fused AdamW, one cross entropy."""
    import torch
    from plain_gpt import PlainGPT

    model: Any = PlainGPT(layers=LAYERS, hidden=HIDDEN, heads=HEADS, length=LENGTH, vocabulary=VOCAB)
    if is_compiled:
        model = torch.compile(model)

    def loss(module: Any, tokens: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(module(tokens).float().flatten(0, 1), labels.flatten())

    return _loop(model, loss, precision, steps)


def _loop(model: Any, loss: Callable[..., Any], precision: str, steps: int) -> Times:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    seconds, processor = [], []
    for _ in range(steps):
        window = torch.randint(0, 512, (BATCH, LENGTH + 1), generator=generator)
        began, worked = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = loss(model, window[:, :-1].contiguous(), window[:, 1:].contiguous())
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value.item()
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - worked)
    return {"seconds": seconds, "processor": processor}


def _corpus(folder: Path) -> Path:
    import numpy as np

    from neox_data.indexed import IndexedDatasetWriter

    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus", dtype=np.uint16) as writer:
        for _ in range(100):
            writer.append(generator.integers(0, 512, size=10_000).astype(np.uint16))
    return folder / "corpus"


CONTENDERS: dict[str, Callable[[str, int], Times]] = {
    "ours": ours,
    "ours-without-deepspeed": ours_in_a_plain_loop,
    "hugging-face": lambda precision, steps: hugging_face(precision, steps, is_compiled=False),
    "hugging-face-compiled": lambda precision, steps: hugging_face(precision, steps, is_compiled=True),
    "plain": lambda precision, steps: plain(precision, steps, is_compiled=False),
    "plain-compiled": lambda precision, steps: plain(precision, steps, is_compiled=True),
}
PEERS = ("hugging-face", "hugging-face-compiled", "plain", "plain-compiled")


def measure(contender: str, steps: int) -> dict[str, float]:
    """Medians of a step in seconds, largest memory in MB; for ours, seconds from command to first step."""
    command = [sys.executable, __file__, "--contender", contender, "--steps", str(steps)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{contender} failed")
        output.seek(0)
        (times,) = [json.loads(line) for line in output if line.startswith("{")]
    first = {"first_step": times["first_step"][0]} if "first_step" in times else {}
    medians = {name: statistics.median(times[name][WARM_UP:]) for name in ("seconds", "processor")}
    return {**medians, **first, "memory": usage.ru_maxrss / 1024}


def report(best: dict[str, dict[str, float]]) -> None:
    print(
        f"{'contender':32}{'tokens/s':>10}{'ms/step':>10}{'processor ms':>14}{'MB':>8}{'first step, s':>15}"
    )
    for name, found in best.items():
        first = f"{found['first_step']:15.1f}" if "first_step" in found else ""
        rate = BATCH * LENGTH / found["seconds"]
        elapsed, worked = 1e3 * found["seconds"], 1e3 * found["processor"]
        print(f"{name:32}{rate:10,.0f}{elapsed:10.0f}{worked:14.0f}{found['memory']:8,.0f}{first}")
    for precision in ("fp32", "bf16"):
        peers = [f"{peer}/{precision}" for peer in PEERS if f"{peer}/{precision}" in best]
        mine = best.get(f"ours/{precision}")
        if mine is None:
            continue
        for peer in peers:
            ratios = [best[peer][clock] / mine[clock] for clock in ("seconds", "processor")]
            print(f"ours / {peer}: {ratios[0]:.2f} elapsed, {ratios[1]:.2f} by processor time")
        alone = best.get(f"ours-without-deepspeed/{precision}")
        if alone is not None:
            overhead = [1e3 * (mine[clock] - alone[clock]) for clock in ("seconds", "processor")]
            print(
                f"{precision}: DeepSpeed's overhead a step: {overhead[0]:.0f} ms, "
                f"{overhead[1]:.0f} ms of the processor"
            )


def main() -> None:
    names = [f"{name}/{precision}" for precision in ("fp32", "bf16") for name in CONTENDERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", default=names, choices=names, metavar="NAME")
    parser.add_argument("--contender", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        name, precision = options.contender.split("/")
        print(json.dumps(CONTENDERS[name](precision, options.steps)))
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    best: dict[str, dict[str, float]] = {}
    for turn in range(options.rounds):
        for name in options.only:
            found = measure(name, options.steps)
            told = f"{1e3 * found['seconds']:.0f} ms, {1e3 * found['processor']:.0f} of the processor"
            print(f"round {turn + 1}, {name}: {told}, {found['memory']:.0f} MB", file=sys.stderr)
            if name not in best or found["seconds"] < best[name]["seconds"]:
                best[name] = found
    report(best)


if __name__ == "__main__":
    main()
