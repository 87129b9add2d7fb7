"""The contenders of `train.py`, each in a new process: ours, Hugging Face's GPT-NeoX, a plain loop."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Warm-up iterations, not measured.
WARM_UP = 4
_PROFILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The trained model: a GPT-NeoX with parallel residual, rotary embeddings and an untied head.

    Args:
        batch: samples of a micro-batch.
        accumulation: micro-batches per update of the contenders in a plain loop.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    vocabulary: int
    precision: str
    device: str
    steps: int
    accumulation: int = 1
    profiles: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the configuration of ours."""
        return {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "seq-length": self.length,
            "max-position-embeddings": self.length,
            "pos-emb": "rotary",
            "gpt-j-residual": True,
            "no-weight-tying": True,
            "hidden-dropout": 0.0,
            "attention-dropout": 0.0,
            "make-vocab-size-divisible-by": self.vocabulary,
            "tokenizer-type": "CharLevelTokenizer",
            "train-micro-batch-size-per-gpu": self.batch,
            "num-gpus": 1,
            "precision": "bfloat16" if self.precision == "bf16" else "fp32",
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "gradient-clipping": 1.0,
            "log-interval": 1,
            "eval-iters": 0,
            "train-iters": self.steps,
        }


# Elapsed and CPU seconds of steps; for ours also from the command to the end of the first step.
Times = dict[str, list[float]]


def ours(job: Job, **settings: Any) -> Times:
    """Run neox-launch; a short run first, to measure the start separately."""
    settings = job.settings() | settings
    before = _processor_time()
    _launch(settings | {"train-iters": WARM_UP})
    middle = _processor_time()
    first, seconds = _launch(settings)
    more = (_processor_time() - middle) - (middle - before)
    processor = more / max(1, job.steps - WARM_UP)
    return {"seconds": seconds, "processor": [processor] * job.steps, "first_step": [first]}


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _launch(settings: dict[str, Any]) -> tuple[float, list[float]]:
    """Return the seconds from the command to the end of the first step, and of each step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = {"log-dir": name, "data-path": str(random_corpus(folder))}
        (folder / "job.yml").write_text(json.dumps(settings | places))
        began = time.monotonic()
        launcher = Path(sys.executable).with_name("neox-launch")
        process = subprocess.Popen([launcher, "--config", folder / "job.yml"], stdout=subprocess.DEVNULL)
        record = folder / "metrics.jsonl"
        while process.poll() is None and not (record.exists() and "loss/train" in record.read_text()):
            time.sleep(0.01)
        first_two = time.monotonic() - began
        if process.wait():
            raise SystemExit("neox-launch failed")
        lines = [json.loads(line) for line in record.read_text().splitlines()]
    seconds = [line["time/iteration"] for line in lines if "time/iteration" in line]
    # The first record is written after the second step.
    return first_two - seconds[1], seconds


def ours_in_a_plain_loop(job: Job) -> Times:
    """Train the same model without DeepSpeed; the difference is the engine's overhead."""
    from neox_config import load_config, resolve
    from neox_model.assembly.model import build_model
    from neox_model.parallel.groups import SINGLE_PROCESS

    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump(job.settings(), file)
        file.flush()
        resolved = resolve(load_config([Path(file.name)]), devices=1)
    model = build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=512)

    def loss(module: Any, tokens: Any, labels: Any) -> Any:
        import torch

        return module(tokens, (labels, torch.ones(labels.shape, device=labels.device)))

    return _loop(job, model, loss)


def hugging_face(job: Job, *, is_compiled: bool) -> Times:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=job.vocabulary,
        hidden_size=job.hidden,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        intermediate_size=4 * job.hidden,
        max_position_embeddings=job.length,
        use_parallel_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        attn_implementation="sdpa",
        use_cache=False,
    )
    return _loop(
        job, GPTNeoXForCausalLM(config), _loss_of(lambda output: output.logits), is_compiled=is_compiled
    )


def plain(job: Job, *, is_compiled: bool) -> Times:
    """Train the plain PyTorch model: scaled_dot_product_attention, fused AdamW, cross entropy."""
    from plain_gpt import PlainGPT

    model = PlainGPT(
        layers=job.layers, hidden=job.hidden, heads=job.heads, length=job.length, vocabulary=job.vocabulary
    )
    return _timed(job, plain_step(job, model, PLAIN_FORMS["plain-compiled" if is_compiled else "plain"]))


def plain_step(job: Job, model: Any, form: "Form") -> Callable[[], Any]:
    """Return a function that trains a model for one update and returns the loss, on the device.

    Args:
        job: how it is trained.
        model: computes logits of tokens.
        form: how it is run.
    """
    return _step_of(job, form(model.to(job.device), job.precision), _loss_of(lambda output: output))


Form = Callable[[Any, str], Any]
"""From a model on its device and a precision, the model in the form in which it is run."""


def _unchanged(model: Any, precision: str) -> Any:
    return model


def _compiled(model: Any, precision: str) -> Any:
    import torch

    return torch.compile(model)


def fully_sharded(model: Any, precision: str, *, is_compiled: bool = True) -> Any:
    """Return a plain model under FSDP2, with each layer compiled alone, as torchtitan runs its models.

    Requires a process group.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    weights = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    policy = MixedPrecisionPolicy(param_dtype=weights, reduce_dtype=torch.float32)
    for layer in model.layers:
        if is_compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


PLAIN_FORMS: dict[str, Form] = {
    "plain": _unchanged,
    "plain-compiled": _compiled,
    "plain-fsdp2": fully_sharded,
}


def _loss_of(logits_of: Callable[[Any], Any]) -> Callable[..., Any]:
    def loss(module: Any, tokens: Any, labels: Any) -> Any:
        from torch.nn import functional

        logits = logits_of(module(tokens))
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return loss


def _loop(job: Job, model: Any, loss: Callable[..., Any], *, is_compiled: bool = False) -> Times:
    form = _compiled if is_compiled else _unchanged
    return _timed(job, _step_of(job, form(model.to(job.device), job.precision), loss))


def _step_of(job: Job, model: Any, loss: Callable[..., Any]) -> Callable[[], Any]:
    import torch
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 casts by its MixedPrecisionPolicy, and reduces gradients after the last micro-batch.
    is_sharded = isinstance(model, FSDPModule)
    autocasts = job.precision == "bf16" and not is_sharded
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)

    def step() -> Any:
        total = torch.zeros((), device=job.device)
        for number in range(job.accumulation):
            if is_sharded:
                model.set_requires_gradient_sync(number == job.accumulation - 1)
            window = torch.randint(0, 512, (job.batch, job.length + 1), generator=generator).to(job.device)
            with torch.autocast(job.device, torch.bfloat16, enabled=autocasts):
                value = loss(model, window[:, :-1].contiguous(), window[:, 1:].contiguous())
            (value / job.accumulation).backward()
            total += value.detach() / job.accumulation
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _timed(job: Job, step: Callable[[], Any]) -> Times:
    times: Times = {"seconds": [], "processor": []}
    for _ in range(job.steps):
        began, worked = time.perf_counter(), time.process_time()
        step().item()
        times["seconds"].append(time.perf_counter() - began)
        times["processor"].append(time.process_time() - worked)
    if job.profiles:
        _profile(job, step)
    return times


def _profile(job: Job, step: Callable[[], Any]) -> None:
    """Profile some steps by operator."""
    import torch

    with torch.profiler.profile() as found:
        for _ in range(_PROFILED):
            step()
    order = "self_cpu_time_total" if job.device == "cpu" else "self_device_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=20), file=sys.stderr)


def random_corpus(folder: Path) -> Path:
    """Write a dataset of a million random tokens below 512; return its prefix."""
    import numpy as np

    from neox_data.indexed import IndexedDatasetWriter

    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus", dtype=np.uint16) as writer:
        for _ in range(100):
            writer.append(generator.integers(0, 512, size=10_000).astype(np.uint16))
    return folder / "corpus"


# "auto" of the kernels runs trials, which are part of the time to the first step.
_KERNELS = {"rope-fusion": "auto", "layernorm-fusion": "auto", "bias-dropout-fusion": "auto"}
CONTENDERS: dict[str, Callable[[Job], Times]] = {
    "ours": partial(ours, compile=False),
    "ours-compiled": partial(ours, compile=True),
    "ours-kernels": partial(ours, compile=False, **_KERNELS),
    "ours-without-deepspeed": ours_in_a_plain_loop,
    "hugging-face": partial(hugging_face, is_compiled=False),
    "hugging-face-compiled": partial(hugging_face, is_compiled=True),
    "plain": partial(plain, is_compiled=False),
    "plain-compiled": partial(plain, is_compiled=True),
}
PEERS = ("hugging-face", "hugging-face-compiled", "plain", "plain-compiled")
