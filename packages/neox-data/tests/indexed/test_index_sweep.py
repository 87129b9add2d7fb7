"""Ten minutes of damaged .idx files: every one is read, or refused in a sentence; none crashes the reader."""

import logging
import random
import struct
import time
from pathlib import Path

import pytest

from neox_data.errors import IndexedDatasetError
from neox_data.indexed import open_indexed
from neox_data.indexed.verify import verify_indexed

pytestmark = pytest.mark.sweep

logger = logging.getLogger(__name__)

SECONDS = 600
# Numbers that counts and offsets are often got wrong with.
NUMBERS = (0, 1, 2, 7, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def list_index(sizes: list[int]) -> bytes:
    """Return an index in the cached layout."""
    count = len(sizes)
    starts = [sum(sizes[:n]) for n in range(count + 1)]
    words = [1, 8, 2, count, count, count + 1, *range(count + 1), *starts, *sizes, *range(count + 1)]
    return b"TNTIDX\0\0" + struct.pack(f"<{len(words)}q", *words)


def damaged(seed: bytes, choice: random.Random) -> bytes:
    data = bytearray(seed)
    for _ in range(choice.randint(1, 4)):
        place = choice.randrange(len(data) + 1)
        kind = choice.randrange(5)
        if kind == 0:
            data[place:] = b""
        elif kind == 1:
            data[place:place] = choice.randbytes(choice.randrange(1, 20))
        elif kind == 2:
            data[place : place + 8] = struct.pack("<Q", choice.choice(NUMBERS))
        elif kind == 3:
            data[place : place + 4] = struct.pack("<I", choice.choice(NUMBERS) % 2**32)
        elif place < len(data):
            data[place] ^= 1 << choice.randrange(8)
        if not data:
            return bytes(data)
    return bytes(data) if choice.randrange(50) else choice.randbytes(choice.randrange(200))


def read_all(prefix: Path) -> None:
    dataset = open_indexed(prefix)
    for sequence in range(min(len(dataset), 50)):
        dataset[sequence]
    verify_indexed(prefix)


def test_damaged_indices_are_refused_in_a_sentence(write_dataset) -> None:
    choice, tried, refused = random.Random(), 0, 0
    sizes = [2, 0, 5, 1]
    prefix = write_dataset([range(size) for size in sizes])
    path = Path(f"{prefix}.idx")
    seeds = (path.read_bytes(), list_index(sizes))
    for seed in seeds:
        path.write_bytes(seed)
        read_all(prefix)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        data = damaged(choice.choice(seeds), choice)
        path.write_bytes(data)
        tried += 1
        try:
            read_all(prefix)
        except IndexedDatasetError as error:
            refused += str(prefix) in str(error)
        except BaseException:
            pytest.fail(f"this index breaks the reader: {data.hex()}")
    logger.info("%d damaged indices, %d refused", tried, refused)
    assert refused > tried // 2
