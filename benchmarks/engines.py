"""Compare the torch engine with DeepSpeed's and with PyTorch's DDP and FSDP2, on several processes.

    python benchmarks/engines.py                       # ZeRO 0, 1 and 3 in fp32 and bf16, 2 processes
    python benchmarks/engines.py --stages 1 --precisions bf16 --steps 30
    python benchmarks/engines.py --pipeline 2 --stages 0 1 --accumulation 8  # pipelines of both engines
    python benchmarks/engines.py --hidden 64 --layers 2 --vocabulary 512 --steps 4   # test this script

Each case is trained by both engines, and by the plain model of `plain_gpt.py` under DDP (ZeRO 0) or FSDP2
(ZeRO 1: weights stay gathered until the backward pass; ZeRO 3: they are gathered twice), with PyTorch's
fused AdamW, the same attention, clipping at 1 and without compilation. In bf16, DDP runs under autocast, and
FSDP2 gathers weights and reduces gradients in bfloat16.

All are built in the same processes and train in turns, one step each, so that other load of the machine
disturbs them alike. A ratio is how many times faster the torch engine is, by the median steps; the one by the
processor times of rank 0 depends less on other load.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WARM_UP = 3

HEADS = 8
# The first is compared with the others; the plain model is no pipeline.
CONTENDERS = ("torch", "deepspeed", "plain")
IN_PIPELINES = CONTENDERS[:2]
TITLES = {"torch": "torch", "deepspeed": "DeepSpeed", "plain": "DDP, FSDP2"}
PRECISIONS = {"fp32": "fp32", "bf16": "bfloat16"}


def settings_of(options: argparse.Namespace, engine: str, stage: int, precision: str) -> dict[str, Any]:
    return {
        "engine": engine,
        "zero_optimization": {"stage": stage},
        "pipe_parallel_size": options.pipeline,
        "precision": PRECISIONS[precision],
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": HEADS,
        "seq_length": options.length,
        "max_position_embeddings": options.length,
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "gpt_j_residual": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "train_iters": 1000,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    }


def contenders(options: argparse.Namespace) -> tuple[str, ...]:
    return IN_PIPELINES if options.pipeline else CONTENDERS


def plain_step(options: argparse.Namespace, stage: int, precision: str) -> Callable[[Iterator[Any]], Any]:
    """Return a function that trains the plain model for one step under DDP or FSDP2 and returns the loss."""
    import torch
    from plain_gpt import PlainGPT
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    model: Any = PlainGPT(
        layers=options.layers,
        hidden=options.hidden,
        heads=HEADS,
        length=options.length,
        vocabulary=options.vocabulary,
    )
    is_half = precision == "bf16"
    if stage == 0:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if is_half else MixedPrecisionPolicy()
        for module in (*model.layers, model):
            fully_shard(module, reshard_after_forward=stage == 3, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def set_reduces(reduces: bool) -> None:
        if stage == 0:
            model.require_backward_grad_sync = reduces
        else:
            model.set_requires_gradient_sync(reduces)

    def step(windows: Iterator[Any]) -> Any:
        total: Any = 0.0
        for number in range(1, options.accumulation + 1):
            set_reduces(number == options.accumulation)
            window = next(windows)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half and stage == 0):
                logits = model(window[:, :-1].contiguous())
            loss = functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
            (loss / options.accumulation).backward()
            total += loss.detach() / options.accumulation
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def measure(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    """Train every case with every contender as one rank; rank 0 reports the times of the steps."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.processes)}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    import torch
    from torch import distributed

    from neox_config import load_config, resolve
    from neox_model.assembly.model import build_model
    from neox_model.assembly.optimizer import build_optimizer
    from neox_model.engine.build import build_engine, prepare_engine
    from neox_model.optim.lr_schedule import LearningRateSchedule
    from neox_model.parallel.topology import create_groups
    from neox_model.processes import leave_processes
    from neox_model.torch_compat import init_process_group
    from neox_model.train.data.batch import as_batch
    from neox_model.train.step import EngineStep
    from neox_model.worker import exit_worker

    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", options.processes)
    init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    groups = create_groups(1, options.pipeline)

    def engine_step(engine: str, stage: int, precision: str) -> Callable[[Iterator[Any]], Any]:
        path = Path(folder, f"{rank}.yml")
        # JSON is YAML.
        path.write_text(json.dumps(settings_of(options, engine, stage, precision)))
        resolved = resolve(load_config([path]), devices=options.processes)
        prepare_engine(resolved.run)
        model = build_model(resolved.model, resolved.run, groups, vocab_size=options.vocabulary)
        optimizer = build_optimizer(
            resolved.update.optimizer, resolved.run, model, model_group=groups.model, data_group=groups.data
        )
        schedule = LearningRateSchedule(optimizer, resolved.update.curve)
        built = build_engine(resolved.run, resolved.update, model, optimizer, schedule, groups=groups)
        step = EngineStep(built, accumulation=options.accumulation)
        return lambda windows: step(as_batch(window) for window in windows).loss

    def step_of(contender: str, stage: int, precision: str) -> Callable[[Iterator[Any]], Any]:
        if contender == "plain":
            return plain_step(options, stage, precision)
        return engine_step(contender, stage, precision)

    def windows() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(groups.data.rank)
        while True:
            yield torch.randint(options.vocabulary, (options.batch, options.length + 1), generator=generator)

    for stage, precision in itertools.product(options.stages, options.precisions):
        steps = {name: step_of(name, stage, precision) for name in contenders(options)}
        times = times_in_turns(steps, {name: windows() for name in steps}, options.steps)
        if rank == 0:
            results.put({"name": f"ZeRO {stage}, {precision}", **times})
    distributed.barrier()
    leave_processes()
    # The end of a process of multiprocessing would finalize Python while threads of gloo run.
    exit_worker(0)


def times_in_turns(
    steps: dict[str, Callable[[Iterator[Any]], Any]], data: dict[str, Iterator[Any]], number: int
) -> dict[str, dict[str, float]]:
    """Run `number` steps of each contender in turns; return the median elapsed and processor times, in s."""
    from torch import distributed

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(number):
        for name, step in steps.items():
            distributed.barrier()
            start, work = time.perf_counter(), time.process_time()
            float(step(data[name]))
            times[name].append((time.perf_counter() - start, time.process_time() - work))
    return {
        kind: {name: statistics.median(pair[index] for pair in times[name][WARM_UP:]) for name in steps}
        for index, kind in enumerate(("seconds", "processor"))
    }


def ratios(times: dict[str, float]) -> list[float]:
    """Return how many times faster the first contender is than each other."""
    first, *others = times.values()
    return [other / first for other in others]


def report(case: dict[str, Any], tokens: int) -> None:
    seconds = case["seconds"]
    speeds = "".join(f"{tokens / seconds[name]:12,.0f}" for name in seconds)
    columns = "".join(f"{ratio:12.2f}" for ratio in (*ratios(seconds), *ratios(case["processor"])))
    print(f"{case['name']:14}{speeds}{columns}", flush=True)


def summary(cases: list[dict[str, Any]]) -> None:
    for label, kind in (("elapsed", "seconds"), ("processor", "processor")):
        found = [ratio for case in cases for ratio in ratios(case[kind])]
        mean = math.exp(statistics.fmean(map(math.log, found)))
        print(f"ratios by {label} time: geometric mean {mean:.2f}, least {min(found):.2f}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 3])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--pipeline", type=int, default=0, help="pipeline stages (default: no pipeline)")
    parser.add_argument("--steps", type=int, default=12, help=f"of which {WARM_UP} warm up (default: 12)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--batch", type=int, default=4, help="samples of a micro-batch (default: 4)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step (default: 1)")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} that warm up")
    return options


def main() -> None:
    options = parsed()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure, args=(rank, options, folder, results))
            for rank in range(options.processes)
        ]
        for process in ranks:
            process.start()
        replicas = options.processes // max(1, options.pipeline)
        tokens = replicas * options.batch * options.accumulation * options.length
        titles = [TITLES[name] for name in contenders(options)]
        compared = [f"/{title}" for title in titles[1:]]
        header = (*titles, *compared, *("processor" for _ in compared))
        print(f"{'tokens/s':14}" + "".join(f"{name:>12}" for name in header))
        cases: list[dict[str, Any]] = []
        missing = len(options.stages) * len(options.precisions)
        # A rank that fails leaves the others waiting.
        while missing and all(process.exitcode in (None, 0) for process in ranks):
            if not results.empty():
                cases.append(results.get())
                report(cases[-1], tokens)
                missing -= 1
            time.sleep(0.1)
        for process in ranks:
            if missing:
                process.kill()
            process.join()
    if missing:
        raise SystemExit("a process failed; its error is above")
    summary(cases)
    print(f"load of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)


if __name__ == "__main__":
    main()
