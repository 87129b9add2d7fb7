"""Python's standard library as a corpus for benchmarks, made by the commands of neox-data."""

import subprocess
import sys
from pathlib import Path

__all__ = ["make_corpus", "make_dataset", "make_tokenizer"]

_DATA = [sys.executable, "-m", "neox_data"]


def make_corpus(work: Path) -> Path:
    """Return the file with all texts, which is made if it does not exist."""
    work.mkdir(parents=True, exist_ok=True)
    corpus = work / "stdlib.jsonl"
    if not corpus.exists():
        _run([*_DATA, "stdlib-corpus", str(corpus)])
    return corpus


def make_tokenizer(corpus: Path, entries: int, *options: str) -> Path:
    """Return the file of a tokenizer trained on the corpus, which is made if it does not exist.

    Args:
        corpus: the texts.
        entries: size of the vocabulary.
        options: further ones of `neox-data train-tokenizer`.
    """
    vocabulary = corpus.with_name("tokenizer.json")
    if not vocabulary.exists():
        words = ["train-tokenizer", "--input", str(corpus), "--vocab-size", str(entries)]
        _run([*_DATA, *words, *options, "--output", str(vocabulary)])
    return vocabulary


def make_dataset(texts: Path, vocabulary: Path) -> str:
    """Return the prefix of the texts' dataset, which is made if it does not exist."""
    prefix = texts.with_suffix("")
    if not Path(f"{prefix}_text_document.bin").exists():
        options = ["--tokenizer-type", "HFTokenizer", "--vocab-file", str(vocabulary), "--append-eod"]
        command = [sys.executable, "-m", "neox_data.preprocess", "--input", str(texts)]
        _run([*command, *options, "--output-prefix", str(prefix)])
    return f"{prefix}_text_document"


def _run(command: list[str]) -> None:
    """Run a command, whose output is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
