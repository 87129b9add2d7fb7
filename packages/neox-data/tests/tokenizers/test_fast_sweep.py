"""gigatoken against the tokenizers library at length: random strings, and real text of this machine."""

import logging
import random
import site
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_data.tokenizers.fast import fast_encoder
from neox_data.tokenizers.train import train_byte_level_bpe

pytestmark = pytest.mark.sweep

logger = logging.getLogger(__name__)

NUM_STRINGS, NUM_BYTES = 100_000, 50_000_000
ENDINGS = (".py", ".txt", ".md", ".rst", ".html", ".json", ".c", ".h", ".cpp", ".po", ".xml", ".svg")
# First and last characters of scripts and kinds that tokenizers treat specially.
SCRIPTS = (
    (0x00, 0x7F), (0x80, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF),
    (0xE00, 0xEFF), (0x1100, 0x11FF), (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x2BFF), (0x3000, 0x30FF),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0xFB00, 0xFEFF), (0xFF00, 0xFFFF),
    (0x1F000, 0x1FAFF), (0x10000, 0x10FFFF),
)  # fmt: skip


def random_string(choice: random.Random) -> str:
    parts = []
    for _ in range(choice.randint(0, 12)):
        first, last = choice.choice(SCRIPTS)
        parts += [chr(choice.randint(first, last)) for _ in range(choice.randint(0, 10))]
        parts.append(
            choice.choice(["", " ", "  ", "\n", "\t", "'s", " 12", "<|endoftext|>", "\r\n\n", "\u00a0"])
        )
    return "".join(parts)


def real_texts() -> Iterator[str]:
    left = NUM_BYTES
    roots = [Path(sysconfig.get_path("stdlib")), *map(Path, site.getsitepackages()), Path("/usr/share")]
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in ENDINGS and path.is_file() and path.stat().st_size < 2_000_000:
                text = path.read_bytes().decode(errors="ignore")
                left -= len(text.encode())
                yield text
                if left <= 0:
                    return


def vocabulary() -> Iterator[str]:
    choice = random.Random(0)
    for number, text in enumerate(real_texts()):
        if number % 40 == 0:
            yield text
    for _ in range(2_000):
        yield random_string(choice)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    path = folder / "tokenizer.json"
    train_byte_level_bpe(vocabulary(), vocab_size=12_000, output=path)
    (folder / "bpe").mkdir()
    vocab, merges = LibraryTokenizer.from_file(str(path)).model.save(str(folder / "bpe"))
    return {
        "HFTokenizer": build_tokenizer("HFTokenizer", vocab_file=path),
        "GPT2BPETokenizer": build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges),
        "HFGPT2Tokenizer": build_tokenizer("HFGPT2Tokenizer", vocab_file=folder),
    }


KINDS = ["HFTokenizer", "GPT2BPETokenizer", "HFGPT2Tokenizer"]


@pytest.mark.parametrize("kind", KINDS)
def test_random_strings_give_the_same_ids(tokenizers, kind: str) -> None:
    choice, encoder = random.Random(), fast_encoder(tokenizers[kind], list)
    for _ in range(NUM_STRINGS // 1000):
        encoder.check([random_string(choice) for _ in range(1000)])


def test_every_character_between_others_gives_the_same_ids(tokenizers) -> None:
    encoder = fast_encoder(tokenizers["HFTokenizer"], list)
    characters = [chr(number) for number in range(0x110000) if not 0xD800 <= number <= 0xDFFF]
    for first in range(0, len(characters), 5000):
        encoder.check([f"a {one}'s{one}1{one}!" for one in characters[first : first + 5000]])


@pytest.mark.parametrize("kind", KINDS)
def test_real_text_gives_the_same_ids(tokenizers, kind: str) -> None:
    encoder, num_bytes, batch = fast_encoder(tokenizers[kind], list), 0, []
    for text in real_texts():
        batch.append(text)
        num_bytes += len(text.encode())
        if len(batch) == 200:
            encoder.check(batch)
            batch = []
    encoder.check(batch)
    logger.info("%s: %d bytes", kind, num_bytes)
    assert num_bytes >= NUM_BYTES * 0.9
