import struct
from pathlib import Path

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.verify import verify_indexed
from support.refusals import refused


def change(path: Path, place: int, form: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, place, value)
    path.write_bytes(data)


def test_a_sound_dataset_passes(write_dataset) -> None:
    assert len(verify_indexed(write_dataset([[1, 2], [], [3]], "int32"))) == 3


def test_an_empty_dataset_passes(write_dataset) -> None:
    assert len(verify_indexed(write_dataset([]))) == 0


def test_overlapping_sequences_are_found(write_dataset) -> None:
    prefix = write_dataset([[1, 2], [3], [4, 5]])
    change(Path(f"{prefix}.idx"), 34 + 12 + 8, "<q", 2)
    with refused(IndexedDatasetError, "corpus.idx", "sequence 1"):
        verify_indexed(prefix)


def test_a_falling_document_index_is_found(write_dataset) -> None:
    prefix = write_dataset([[1, 2], [3], [4, 5]])
    change(Path(f"{prefix}.idx"), 34 + 36 + 8, "<q", 3)
    with refused(IndexedDatasetError, "corpus.idx", "document index"):
        verify_indexed(prefix)


def test_a_negative_token_is_found(write_dataset) -> None:
    prefix = write_dataset([[1, 2], [3]], "int32")
    change(Path(f"{prefix}.bin"), 8, "<i", -5)
    with refused(IndexedDatasetError, "corpus.bin", "token 2", "(-5)"):
        verify_indexed(prefix)
