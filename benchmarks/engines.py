"""Compare the torch engine with DeepSpeed's: tokens/s of one model on several processes of this machine.

    python benchmarks/engines.py                       # ZeRO 0, 1 and 3 in fp32 and bf16, 2 processes
    python benchmarks/engines.py --stages 1 --precisions bf16 --steps 30
    python benchmarks/engines.py --hidden 64 --layers 2 --steps 4   # test this script

Both engines are built in the same processes and train in turns, one step each, so that other load of the
machine disturbs both alike. The ratio is that of the median steps; the ratio of the processor times of all
processes depends less on other load.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WARM_UP = 3
VOCABULARY = 4096
ENGINES = ("torch", "deepspeed")
PRECISIONS = {"fp32": "fp32", "bf16": "bfloat16"}


def settings_of(options: argparse.Namespace, engine: str, stage: int, precision: str) -> dict[str, Any]:
    return {
        "engine": engine,
        "zero_optimization": {"stage": stage},
        "precision": PRECISIONS[precision],
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": 8,
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


def measure(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    """Train every case on both engines as one rank; rank 0 reports the times of the steps."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.processes)}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    import torch
    from torch import distributed

    from neox_config import load_config, resolve
    from neox_model.assembly.model import build_model
    from neox_model.assembly.optimizer import build_optimizer, build_schedule
    from neox_model.engine.build import build_engine, prepare_engine
    from neox_model.parallel.topology import create_groups
    from neox_model.train.data.batch import Batch, as_batch
    from neox_model.train.engine_step import EngineStep

    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", options.processes)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    groups = create_groups(1, 0)

    def started(engine: str, stage: int, precision: str) -> EngineStep:
        path = Path(folder, f"{rank}.yml")
        # JSON is YAML.
        path.write_text(json.dumps(settings_of(options, engine, stage, precision)))
        resolved = resolve(load_config([path]), devices=options.processes)
        prepare_engine(resolved)
        model = build_model(resolved, groups, vocab_size=VOCABULARY)
        optimizer = build_optimizer(resolved.config, model, model_group=groups.model, data_group=groups.data)
        schedule = build_schedule(resolved.config, optimizer, decay_iterations=1000)
        built = build_engine(resolved, model, optimizer, schedule, groups=groups)
        return EngineStep(built, accumulation=options.accumulation)

    def batches() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(rank)
        while True:
            yield as_batch(
                torch.randint(VOCABULARY, (options.batch, options.length + 1), generator=generator)
            )

    for stage in options.stages:
        for precision in options.precisions:
            steps = {engine: started(engine, stage, precision) for engine in ENGINES}
            data = {engine: batches() for engine in ENGINES}
            times: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
            for _ in range(options.steps):
                for engine in ENGINES:
                    distributed.barrier()
                    start, work = time.perf_counter(), time.process_time()
                    float(steps[engine](data[engine]).loss)
                    times[engine].append((time.perf_counter() - start, time.process_time() - work))
            case = {
                "name": f"ZeRO {stage}, {precision}",
                "seconds": {e: statistics.median(s for s, _ in times[e][WARM_UP:]) for e in ENGINES},
                "processor": {e: statistics.median(p for _, p in times[e][WARM_UP:]) for e in ENGINES},
            }
            if rank == 0:
                results.put(case)
    distributed.barrier()
    distributed.destroy_process_group()


def report(case: dict[str, Any], tokens: int) -> None:
    seconds, processor = case["seconds"], case["processor"]
    print(
        f"{case['name']:16}{tokens / seconds['torch']:16,.0f}{tokens / seconds['deepspeed']:12,.0f}"
        f"{seconds['deepspeed'] / seconds['torch']:8.2f}"
        f"{processor['deepspeed'] / processor['torch']:20.2f}",
        flush=True,
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 3])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=12, help=f"of which {WARM_UP} warm up (default: 12)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="samples of a micro-batch (default: 2)")
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
        tokens = options.processes * options.batch * options.accumulation * options.length
        print(f"{'':16}{'torch tokens/s':>16}{'DeepSpeed':>12}{'ratio':>8}{'by processor time':>20}")
        missing = len(options.stages) * len(options.precisions)
        # A rank that fails leaves the others waiting.
        while missing and all(process.exitcode in (None, 0) for process in ranks):
            if not results.empty():
                report(results.get(), tokens)
                missing -= 1
            time.sleep(0.1)
        for process in ranks:
            if missing:
                process.kill()
            process.join()
    if missing:
        raise SystemExit("a process failed; its error is above")
    print(f"load of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)


if __name__ == "__main__":
    main()
