import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from neox_data.errors import DataError, IndexedDatasetError
from neox_data.indexed import IndexedDatasetWriter, open_indexed
from support.refusals import refused

# Three documents [1, 2], [3], [4, 5, 6] in uint16, byte for byte.
BIN = bytes.fromhex("0100 0200 0300 0400 0500 0600")
IDX = bytes.fromhex(
    "4d4d494449445800 00"
    "0100000000000000"
    "08"
    "0300000000000000"
    "0400000000000000"
    "02000000 01000000 03000000"
    "0000000000000000 0400000000000000 0600000000000000"
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000"
)


def test_written_bytes_match_the_format(write_dataset) -> None:
    prefix = write_dataset([[1, 2], [3], [4, 5, 6]])
    assert Path(f"{prefix}.bin").read_bytes() == BIN
    assert Path(f"{prefix}.idx").read_bytes() == IDX


def test_many_documents_at_once_are_the_same_as_one_by_one(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", dtype=np.uint16) as writer:
        writer.append_all(np.array([1, 2, 3]), [2, 1])
        writer.append_all([], [])
        writer.append_all([4, 5, 6], [3])
        assert (writer.num_documents, writer.num_tokens) == (3, 6)
    assert (tmp_path / "a.bin").read_bytes() == BIN
    assert (tmp_path / "a.idx").read_bytes() == IDX


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16"])
def test_written_documents_are_read_back(write_dataset, dtype: str) -> None:
    documents = [[5, 0, 100], [], [7]]
    dataset = open_indexed(write_dataset(documents, dtype))
    assert dataset.dtype == dtype
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents


def test_the_hash_of_the_tokens_is_known_unless_the_kernel_copied_them(write_dataset, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", dtype="u2") as writer:
        writer.append([1, 2])
        writer.append_all([3, 4, 5, 6], [1, 3])
    assert writer.bin_sha256 == hashlib.sha256(BIN).hexdigest()
    assert writer.largest_token == 6
    with IndexedDatasetWriter(tmp_path / "b", dtype="u2") as writer:
        writer.append([1, 2])
        writer.append_dataset(open_indexed(tmp_path / "a"))
    assert writer.bin_sha256 is None
    source = hashlib.sha256()
    with IndexedDatasetWriter(tmp_path / "c", dtype="u2") as writer:
        writer.append([9])
        writer.append_dataset(open_indexed(tmp_path / "a"), digest=source)
    assert source.hexdigest() == hashlib.sha256(BIN).hexdigest()
    assert writer.bin_sha256 == hashlib.sha256(b"\x09\0" + BIN).hexdigest()


def test_tokens_are_stored_while_more_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neox_data.indexed.writer._STORED_BYTES", 8)
    with IndexedDatasetWriter(tmp_path / "a", dtype="u2") as writer:
        for token in range(50):
            writer.append([token] * (token % 7))
    expected = [[token] * (token % 7) for token in range(50)]
    assert [row.tolist() for row in open_indexed(tmp_path / "a")] == expected


def test_a_dataset_without_documents_is_readable(write_dataset) -> None:
    dataset = open_indexed(write_dataset([]))
    assert (len(dataset), dataset.num_tokens, dataset.document_starts.tolist()) == (0, 0, [0])


def write_and_fail(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, dtype="u2") as writer:
        writer.append([9, 9, 9])
        raise RuntimeError("stop")


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with refused(RuntimeError, "stop"):
        write_and_fail(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_the_older_dataset(write_dataset) -> None:
    prefix = write_dataset([[1, 2]])
    with refused(RuntimeError, "stop"):
        write_and_fail(prefix)
    assert open_indexed(prefix)[0].tolist() == [1, 2]


def test_a_new_dataset_replaces_the_older_one(write_dataset) -> None:
    write_dataset([[1, 2]])
    assert open_indexed(write_dataset([[3]]))[0].tolist() == [3]


def test_a_killed_writer_leaves_no_dataset_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from neox_data.indexed import IndexedDatasetWriter\n"
        "with IndexedDatasetWriter(sys.argv[1], dtype='u2') as writer:\n"
        "    writer.append_all([7] * 100_000, [100_000])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    prefix = tmp_path / "a"
    done = subprocess.run([sys.executable, "-c", script, str(prefix)], check=False)
    assert done.returncode == -signal.SIGKILL
    with refused(IndexedDatasetError, code="missing-file"):
        open_indexed(prefix)
    with IndexedDatasetWriter(prefix, dtype="u2") as writer:
        writer.append([1, 2])
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]
    assert open_indexed(prefix)[0].tolist() == [1, 2]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_writer_that_is_killed_at_its_renames_never_pairs_the_new_tokens_with_the_old_index(
    write_dataset, renames: int
) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from neox_data.indexed import IndexedDatasetWriter\n"
        "rename, left = Path.replace, int(sys.argv[2])\n"
        "def replace(path, target):\n"
        "    global left\n"
        "    if not left: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    left -= 1\n"
        "    return rename(path, target)\n"
        "Path.replace = replace\n"
        "with IndexedDatasetWriter(sys.argv[1], dtype='u2') as writer:\n"
        "    writer.append_all([9, 9, 8], [1, 2])\n"
    )
    # As many tokens as the new one: its old index would fit the new .bin.
    prefix = write_dataset([[1, 2], [3]])
    done = subprocess.run([sys.executable, "-c", script, str(prefix), str(renames)], check=False)
    assert done.returncode == -signal.SIGKILL
    with refused(IndexedDatasetError, "corpus.idx", code="missing-file"):
        open_indexed(prefix)
    assert open_indexed(write_dataset([[5]]))[0].tolist() == [5]


def test_two_writers_of_one_dataset_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", dtype="u2") as first:
        with (
            refused(DataError, code="in-use"),
            IndexedDatasetWriter(tmp_path / "a", dtype="u2"),
        ):
            pass
        first.append([1])
    assert open_indexed(tmp_path / "a")[0].tolist() == [1]


def test_a_token_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with (
        refused(IndexedDatasetError, "token 65536", "uint16"),
        IndexedDatasetWriter(tmp_path / "a", dtype="u2") as writer,
    ):
        writer.append([1, 65_536])


def test_sizes_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with (
        refused(ValueError, "3 tokens", "4"),
        IndexedDatasetWriter(tmp_path / "a", dtype="u2") as writer,
    ):
        writer.append_all([1, 2, 3], [2, 2])
