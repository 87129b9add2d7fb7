"""preprocess_data killed at random moments and resumed until it ends gives what an undisturbed run gives."""

import json
import logging
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

logger = logging.getLogger(__name__)

KILLS = 20
SMALL_SHARDS = (
    "from neox_data.preprocess import cli, shards\n"
    "shards.preprocess_resumably.__kwdefaults__['shard_bytes'] = 1 << 25\n"
    "cli.main()\n"
)


def test_killed_and_resumed_is_undisturbed(tmp_path: Path, tokenizer_json: Path) -> None:
    choice = random.Random()
    (tmp_path / "in").mkdir()
    for number in range(12):
        with (tmp_path / "in" / f"{number:02}.jsonl").open("w") as file:
            while file.tell() < 24 << 20:
                words = (choice.choice(("the", "fox", "def", "x", "\u4f60", "12", "\n")) for _ in range(300))
                file.write(json.dumps({"text": " ".join(words)}) + "\n")

    def command(output: str) -> list[str]:
        program = [sys.executable, "-c", SMALL_SHARDS]
        words = ["--input", "in", "--tokenizer-type", "HFTokenizer", "--vocab-file", str(tokenizer_json)]
        return [*program, *words, "--append-eod", "--resume", "--output-prefix", output]

    started = time.monotonic()
    subprocess.run(command("undisturbed"), cwd=tmp_path, check=True, capture_output=True)
    seconds = time.monotonic() - started
    kills = 0
    while kills < KILLS:
        process = subprocess.Popen(
            command("out"), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            _, errors = process.communicate(timeout=choice.uniform(0.3, min(1.2 * seconds, 20)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0, errors
        compare(tmp_path)
        for path in tmp_path.glob("out_*"):
            path.unlink()
    subprocess.run(command("out"), cwd=tmp_path, check=True, capture_output=True)
    compare(tmp_path)
    assert not (tmp_path / "out.shards").exists()
    logger.info("%d kills of a run of %.1f s", kills, seconds)


def compare(folder: Path) -> None:
    for ending in ("bin", "idx", "offsets", "manifest.json"):
        out, expected = (folder / f"{name}_text_document.{ending}" for name in ("out", "undisturbed"))
        assert out.read_bytes() == expected.read_bytes(), ending
