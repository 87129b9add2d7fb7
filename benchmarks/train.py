"""Compare training steps of neox-launch, Hugging Face's GPT-NeoX and a plain PyTorch loop.

    python benchmarks/train.py                              # on the CPU, all contenders, twice
    python benchmarks/train.py --only ours/fp32 plain-compiled/fp32
    python benchmarks/train.py --shape 125M                 # one GPU, bf16
    python benchmarks/train.py --shape 1.3B --only ours/bf16 ours-compiled/bf16 hugging-face-compiled/bf16
    python benchmarks/train.py --shape tiny --rounds 1 --steps 6  # test this script

Rotary embeddings, parallel residual, untied head, 50,304 entries (tiny: 512), clipping at 1, AdamW; the whole
step is measured. Each contender runs in a new process: median step after the warm-up, CPU time of a step
(which depends little on other load), and the largest memory of it or of a process that it started; on a GPU,
memory according to nvidia-smi. bf16 is bfloat16 weights with float32 masters for ours, and autocast over
float32 weights for the others.

MFU is 6 x (parameters of the matrices + k x layers x length x hidden) operations per token, forward and
backward, without recomputation, times tokens per second, divided by the device's peak. k is 2 for MFU (full):
attention as if every token saw the whole sequence. k is 1 for MFU (causal): without what the mask hides.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from typing import Any

from train_contenders import CONTENDERS, PEERS, WARM_UP, Job

from neox_config import Text, load_config, resolve
from neox_config.estimate import Convention, flops_per_token

CONVENTIONS: tuple[Convention, ...] = ("full", "causal")
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"layers": 4, "hidden": 256, "heads": 8, "length": 512, "batch": 4, "vocabulary": 50_304},
    "125M": {"layers": 12, "hidden": 768, "heads": 12, "length": 2048, "batch": 16, "vocabulary": 50_304},
    "1.3B": {"layers": 24, "hidden": 2048, "heads": 16, "length": 2048, "batch": 8, "vocabulary": 50_304},
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "length": 64, "batch": 2, "vocabulary": 512},
}
PRECISIONS = {"cpu": ("fp32", "bf16")}
# Dense bfloat16 TFLOP/s by device name of nvidia-smi; the first match is used.
PEAK_TFLOPS = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
# On a CPU, ours uses neither compilation nor kernels unless selected.
GPU_ONLY = ("ours-compiled", "ours-kernels")
_POLL_SECONDS = 0.2


class MemoryOfGpu(threading.Thread):
    """Peak memory, in MB, used on the first GPU within the context."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0.0
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            self.most = max(self.most, float(_ask_gpu("memory.used") or 0))

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def _ask_gpu(what: str) -> str | None:
    """Return a value of the first GPU; None without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None


def operations_per_token(job: Job) -> list[int]:
    """Return the operations of forward and backward, by each convention."""
    resolved = resolve(load_config([], texts=[Text(json.dumps(job.settings()), "job")]), devices=1)
    model, length = resolved.model, resolved.run.batch.length
    entries = model.embedding.entries(job.vocabulary)
    return [
        flops_per_token(model, entries=entries, length=length, convention=convention)
        for convention in CONVENTIONS
    ]


def measure(contender: str, job: Job) -> dict[str, float] | None:
    """Return the medians of a step in seconds, peak memory in MB; for ours, seconds to the first step.

    Return None if the contender fails; it has printed the error.
    """
    command = [sys.executable, __file__, "--contender", contender, "--job", json.dumps(asdict(job))]
    gpu = MemoryOfGpu()
    if job.device == "cuda":
        gpu.start()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if job.device == "cuda":
            gpu.stop()
        if process.returncode:
            return None
        output.seek(0)
        (times,) = [json.loads(line) for line in output if line.startswith("{")]
    first = {"first_step": times["first_step"][0]} if "first_step" in times else {}
    medians = {name: statistics.median(times[name][WARM_UP:]) for name in ("seconds", "processor")}
    memory = gpu.most if job.device == "cuda" else usage.ru_maxrss / 1024
    return {**medians, **first, "memory": memory}


def report(best: dict[str, dict[str, float]], job: Job, peak_tflops: float | None) -> None:
    head = f"{'contender':32}{'tokens/s':>10}{'ms/step':>10}{'processor ms':>14}{'MB':>8}"
    shares = [f"MFU ({convention}) %" for convention in CONVENTIONS]
    print(f"{head}{shares[0]:>15}{shares[1]:>15}{'first step, s':>15}")
    operations = operations_per_token(job)
    for name, found in best.items():
        first = f"{found['first_step']:15.1f}" if "first_step" in found else ""
        rate = job.batch * job.length / found["seconds"]
        share = "".join(
            f"{100 * rate * each / (1e12 * peak_tflops):15.1f}" if peak_tflops else f"{'':15}"
            for each in operations
        )
        elapsed, worked = 1e3 * found["seconds"], 1e3 * found["processor"]
        print(f"{name:32}{rate:10,.0f}{elapsed:10.1f}{worked:14.0f}{found['memory']:8,.0f}{share}{first}")
    for name, mine in best.items():
        if name.startswith("ours"):
            _compare(name, mine, best)


def _compare(name: str, mine: dict[str, float], best: dict[str, dict[str, float]]) -> None:
    contender, _, precision = name.partition("/")
    for peer in PEERS:
        other = best.get(f"{peer}/{precision}")
        if other is not None:
            ratios = [other[clock] / mine[clock] for clock in ("seconds", "processor")]
            print(f"{name} against {peer}: {ratios[0]:.2f} elapsed, {ratios[1]:.2f} by processor time")
    alone = best.get(f"ours-without-deepspeed/{precision}")
    if contender == "ours" and alone is not None:
        overhead = [1e3 * (mine[clock] - alone[clock]) for clock in ("seconds", "processor")]
        print(f"{precision}: DeepSpeed's overhead per step: {overhead[0]:.0f} ms, {overhead[1]:.0f} ms CPU")


def parsed() -> argparse.Namespace:
    names = [f"{name}/{precision}" for precision in ("fp32", "bf16") for name in CONTENDERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="cpu", help="what is trained (default: cpu)")
    parser.add_argument("--batch", type=int, help="samples of a step (default: the shape's)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU where there is one; cpu for shape cpu"
    )
    parser.add_argument("--steps", type=int, default=14, help=f"of which {WARM_UP} warm up (default: 14)")
    parser.add_argument("--rounds", type=int, default=2, help="runs per contender (default: 2)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the processor")
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME/PRECISION", help="some contenders")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for MFU (default: by its name)")
    parser.add_argument("--profile", choices=names, metavar="NAME/PRECISION", help="instead: its operators")
    parser.add_argument("--contender", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} that warm up")
    if options.profile is not None and options.profile.split("/")[0] in ("ours", *GPU_ONLY):
        parser.error("what neox-launch starts is not profiled; ours-without-deepspeed is the same model")
    return options


def chosen(options: argparse.Namespace, device: str) -> list[str]:
    if options.only is not None:
        return list(options.only)
    contenders = [name for name in CONTENDERS if device == "cuda" or name not in GPU_ONLY]
    precisions = PRECISIONS.get(options.shape, ("bf16",))
    return [f"{name}/{precision}" for precision in precisions for name in contenders]


def main() -> None:
    options = parsed()
    if options.contender:
        name = options.contender.split("/")[0]
        print(json.dumps(CONTENDERS[name](Job(**json.loads(options.job)))))
        return
    gpu = None if options.shape == "cpu" else _ask_gpu("name")
    device = options.device or ("cpu" if gpu is None else "cuda")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shape = SHAPES[options.shape] | ({} if options.batch is None else {"batch": options.batch})
    print(f"{options.shape} {shape} on {gpu if device == 'cuda' else 'the CPU'}", file=sys.stderr)
    if options.profile is not None:
        precision = options.profile.split("/")[1]
        job = Job(**shape, precision=precision, device=device, steps=options.steps, profiles=True)
        measure(options.profile, job)
        return
    best: dict[str, dict[str, float]] = {}
    for turn in range(options.rounds):
        for name in chosen(options, device):
            job = Job(**shape, precision=name.split("/")[1], device=device, steps=options.steps)
            found = measure(name, job)
            if found is None:
                print(f"round {turn + 1}, {name}: failed", file=sys.stderr)
                continue
            times = f"{1e3 * found['seconds']:.0f} ms, {1e3 * found['processor']:.0f} ms CPU"
            print(f"round {turn + 1}, {name}: {times}, {found['memory']:.0f} MB", file=sys.stderr)
            if name not in best or found["seconds"] < best[name]["seconds"]:
                best[name] = found
    peaks = [peak for known, peak in PEAK_TFLOPS.items() if gpu is not None and known in gpu]
    peak = options.peak_tflops or (peaks[0] if peaks and device == "cuda" else None)
    report(best, job, peak)


if __name__ == "__main__":
    main()
