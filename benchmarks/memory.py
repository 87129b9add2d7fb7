"""Compare the peak memory of tensors with the estimate, at each ZeRO stage of the torch engine.

    python benchmarks/memory.py                        # 100M parameters, fp32, 2 processes: 4 GiB
    python benchmarks/memory.py --precisions bf16 --stages 2 3
    python benchmarks/memory.py --hidden 256 --layers 4 --vocabulary 2048   # test this script
    python benchmarks/memory.py --teacher-layers 24    # of a student, with the teacher that it learns from

Real processes over gloo train two updates, by default of two micro-batches.
torch's MemTracker follows every tensor:
weights, gradients, optimizer states, activations and what operators need in between. The estimate is that of
`neox-config estimate`, without the memory that a GPU's libraries take.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UPDATES = 2
PRECISIONS = {"fp32": "fp32", "bf16": "bfloat16"}
MIB = 2**20


def settings_of(options: argparse.Namespace, stage: int, precision: str) -> dict[str, Any]:
    reduction = {
        "enabled": options.teacher_layers > 0,
        # Not there: the estimate takes it to be like the student.
        "teacher": "absent",
        "module_name_prefix": "layers",
        "teacher_layer": list(range(options.teacher_layers))[-options.layers :] or None,
        "distill": {"enabled": options.teacher_layers > 0, "hidden_states_weight": 0.1},
    }
    more = {"compression_training": {"layer_reduction": reduction}} if options.teacher_layers else {}
    return more | {
        "engine": "torch",
        "zero_optimization": {"stage": stage},
        "precision": PRECISIONS[precision],
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": max(1, options.hidden // 64),
        "seq_length": options.length,
        "max_position_embeddings": options.length,
        "pos_emb": "rotary",
        "make_vocab_size_divisible_by": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "train_iters": 1000,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    }


def add_teacher(model: Any, resolved: Any, groups: Any, options: argparse.Namespace) -> list[Any]:
    """Let the model learn from a larger one with new weights, which is returned."""
    from neox_model.assembly.choices import DTYPES
    from neox_model.assembly.model import build_stage
    from neox_model.extras.distillation.loss import Distillation

    section = resolved.config.compression.compression_training.layer_reduction
    if not section.enabled:
        return []
    size = resolved.config.model.replaced(num_layers=options.teacher_layers)
    theirs = resolved.replaced(model=size)
    teacher = build_stage(theirs.model, theirs.run, groups, vocab_size=options.vocabulary).eval()
    # The tracker requires gradients of all parameters; there are none, because the teacher runs without.
    for parameter in teacher.parameters():
        parameter.data = parameter.data.normal_(std=0.02).to(DTYPES[resolved.run.precision.weights])
    model.distillation = Distillation(
        list(teacher.stack),
        layers=list(enumerate(section.teacher_layer)),
        logits_share=section.distill.logits_share,
        temperature=section.distill.temperature,
        hidden_states_weight=section.distill.hidden_states_weight,
        group=groups.model,
    )
    return [teacher]


def measure(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    """Train every case as one rank; rank 0 reports the bytes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.processes)}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    import torch
    from torch import distributed
    from torch.distributed._tools.mem_tracker import MemTracker

    from neox_config import load_config, resolve
    from neox_config.estimate.memory import device_memory
    from neox_config.estimate.setup import setup_of
    from neox_model.assembly.model import build_model
    from neox_model.assembly.optimizer import build_optimizer
    from neox_model.engine.build import build_engine, prepare_engine
    from neox_model.optim.lr_schedule import LearningRateSchedule
    from neox_model.parallel.topology import create_groups
    from neox_model.processes import leave_processes
    from neox_model.torch_compat import init_process_group
    from neox_model.train.data.batch import Batch, as_batch
    from neox_model.train.step import EngineStep
    from neox_model.worker import exit_worker

    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", options.processes)
    init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    groups = create_groups(1, 0)

    def batches(tracker: MemTracker) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(rank)
        shape = (options.batch, options.length + 1)
        while True:
            # It accepts one pass of each module.
            tracker.reset_mod_stats()
            yield as_batch(torch.randint(options.vocabulary, shape, generator=generator))

    def peak_of(stage: int, precision: str) -> dict[str, Any]:
        path = Path(folder, f"{rank}.yml")
        # JSON is YAML.
        path.write_text(json.dumps(settings_of(options, stage, precision)))
        resolved = resolve(load_config([path]), devices=options.processes)
        prepare_engine(resolved.run)
        model = build_model(resolved.model, resolved.run, groups, vocab_size=options.vocabulary)
        optimizer = build_optimizer(
            resolved.update.optimizer, resolved.run, model, model_group=groups.model, data_group=groups.data
        )
        schedule = LearningRateSchedule(optimizer, resolved.update.curve)
        engine = build_engine(resolved.run, resolved.update, model, optimizer, schedule, groups=groups)
        teachers = add_teacher(model, resolved, groups, options)
        step, tracker = EngineStep(engine, accumulation=options.accumulation), MemTracker()
        masters = [holder for group in optimizer.param_groups for holder in group["params"]]
        tracker.track_external(model, optimizer, *masters, *teachers)
        data = batches(tracker)
        with tracker:
            for _ in range(UPDATES):
                step(data)
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        setup = setup_of(resolved, vocab_size=options.vocabulary)
        return {
            "name": f"ZeRO {stage}, {precision}",
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "measured": peak["Total"],
            "estimated": device_memory(setup, device="cpu").total,
        }

    for stage in options.stages:
        for precision in options.precisions:
            case = peak_of(stage, precision)
            if rank == 0:
                results.put(case)
    distributed.barrier()
    leave_processes()
    # The end of a process of multiprocessing would finalize Python while threads of gloo run.
    exit_worker(0)


def report(case: dict[str, Any]) -> None:
    measured, estimated = case["measured"], case["estimated"]
    print(
        f"{case['name']:16}{case['parameters'] / 1e6:10.1f} M{measured / MIB:12,.0f} MiB"
        f"{estimated / MIB:12,.0f} MiB{measured / estimated:8.3f}",
        flush=True,
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=list(range(4)))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp32"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="samples of a micro-batch (default: 2)")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per update (default: 2)")
    parser.add_argument(
        "--teacher-layers", type=int, default=0, help="layers of a teacher (default: 0, without a teacher)"
    )
    return parser.parse_args()


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
        print(f"{'':16}{'parameters':>12}{'measured':>16}{'estimated':>16}{'ratio':>8}", flush=True)
        missing = len(options.stages) * len(options.precisions)
        # A rank that fails leaves the others waiting.
        while missing and all(process.exitcode in (None, 0) for process in ranks):
            if not results.empty():
                report(results.get())
                missing -= 1
            time.sleep(0.1)
        for process in ranks:
            if missing:
                process.kill()
            process.join()
    if missing:
        sys.exit("a process failed; its error is above")


if __name__ == "__main__":
    main()
