"""Compare `preprocess_data` with a pool of tokenizers workers and with gigatoken's file API.

    python benchmarks/data_preprocess.py --megabytes 200

The corpus is the text of the standard library, repeated with the lines of each file in a different order, so
that caching documents does not help. Each side runs in a new process, one after another, including start-up.
The start is measured with 1 MB, against a process that only imports what `preprocess_data` imports.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pool
from pathlib import Path

from tokenizers import Tokenizer

from neox_data.indexed import IndexedDatasetWriter
from neox_data.preprocess.stdlib_corpus import write_stdlib_corpus
from neox_data.tokenizers.train import train_byte_level_bpe

TOKENIZER: list[Tokenizer] = []


def write_corpus(path: Path, num_bytes: int) -> None:
    write_stdlib_corpus(path.with_suffix(".once"))
    texts = [json.loads(line)["text"] for line in path.with_suffix(".once").open()]
    order, written = random.Random(0), 0
    with path.open("w") as file:
        while written < num_bytes:
            for text in texts:
                lines = text.split("\n")
                order.shuffle(lines)
                line = json.dumps({"text": "\n".join(lines)}) + "\n"
                file.write(line)
                written += len(line)
                if written >= num_bytes:
                    return


def start_worker(path: str) -> None:
    TOKENIZER.append(Tokenizer.from_file(path))


def encode_line(line: str) -> list[int]:
    return TOKENIZER[0].encode(json.loads(line)["text"]).ids


def run_pool(corpus: str, tokenizer: str, output: str, workers: str) -> None:
    """Encode one document at a time in a pool of processes, as GPT-NeoX and Megatron-LM do."""
    with (
        Pool(int(workers), start_worker, (tokenizer,)) as pool,
        open(corpus) as lines,
        IndexedDatasetWriter(output, dtype="u2") as writer,
    ):
        for ids in pool.imap(encode_line, lines, 25):
            writer.append(ids)


def run_limit(corpus: str, tokenizer: str, *_: str) -> None:
    """Encode the file with gigatoken, without writing the result."""
    import gigatoken

    gigatoken.Tokenizer(tokenizer).encode_files(gigatoken.JsonlFileSource([corpus]))


SIDES = {"pool": run_pool, "limit": run_limit}


def timed(words: list[str]) -> tuple[float, float, float]:
    """Return elapsed seconds, CPU seconds, and the peak memory of a process in megabytes."""
    started = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with status {status}")
    busy = usage.ru_utime + usage.ru_stime
    return time.perf_counter() - started, busy, usage.ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=20, help="size of the corpus")
    parser.add_argument(
        "--pool-megabytes", type=int, help="size for the pool, which is slow [default: the same]"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    sizes = {
        "ours": options.megabytes,
        "pool": options.pool_megabytes or options.megabytes,
        "limit": options.megabytes,
        "small": 1,
        "import": 1,
    }
    with tempfile.TemporaryDirectory() as name:
        folder, rates, busy_rates = Path(name), {}, {}
        tokenizer = folder / "tokenizer.json"
        write_corpus(folder / "train.jsonl", 5_000_000)
        texts = (json.loads(line)["text"] for line in (folder / "train.jsonl").open())
        train_byte_level_bpe(texts, vocab_size=8192, output=tokenizer)
        for side, megabytes in sizes.items():
            corpus, output = folder / f"{megabytes}.jsonl", folder / side
            if not corpus.exists():
                write_corpus(corpus, megabytes * 1_000_000)
            words = [
                sys.executable,
                __file__,
                side,
                str(corpus),
                str(tokenizer),
                str(output),
                str(options.workers),
            ]
            if side == "import":
                words = [sys.executable, "-c", "import neox_data.preprocess.cli"]
            elif side in ("ours", "small"):
                words = [sys.executable, "-m", "neox_data.preprocess", "--input", str(corpus)]
                words += ["--tokenizer-type", "HFTokenizer", "--vocab-file", str(tokenizer)]
                words += ["--workers", str(options.workers), "--output-prefix", str(output)]
            seconds, busy, memory = timed(words)
            size = corpus.stat().st_size / 1e6
            rates[side], busy_rates[side] = size / seconds, size / busy
            print(
                f"{side:6} {megabytes:6,} MB {seconds:8.2f} s {rates[side]:8.1f} MB/s {busy:8.2f} s CPU "
                f"{memory:6,.0f} MB peak"
            )
    # On a busy machine, compare the CPU times.
    for one, other in (("ours", "pool"), ("ours", "limit"), ("import", "small")):
        by_time, by_work = (kind[one] / kind[other] for kind in (rates, busy_rates))
        print(f"{one:6} / {other:5} {by_time:6.2f} by time, {by_work:6.2f} by time of the processors")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SIDES:
        SIDES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
