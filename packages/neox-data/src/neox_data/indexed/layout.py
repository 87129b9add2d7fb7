"""The bytes of an indexed dataset, as a table and as code.

`PREFIX.bin` holds the tokens of all sequences, one after another, and nothing else. `PREFIX.idx` says where
each begins; there are two layouts of it, told apart by their first bytes. Everything is little-endian and
packed. The tables below are what the reader and the writer work from, and docs/formats.md shows them (a test
compares).

Source: the files that Megatron-LM and GPT-NeoX write.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = [
    "DISPUTED_DTYPE_CODES",
    "DTYPES",
    "LIST_INDEX",
    "MMAP_INDEX",
    "VERSION",
    "Field",
    "IndexLayout",
    "bin_path",
    "dtype_code",
    "idx_path",
    "manifest_path",
    "offsets_path",
    "token_dtype",
]

VERSION = 1

# Codes 6 and 7 mean float64 and float32 in one order or the other, depending on who wrote the file.
DISPUTED_DTYPE_CODES = (6, 7)

DTYPES: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One row of a layout.

    Attributes:
        name: what the code calls it.
        dtype: numpy's name of one element.
        count: how many elements, in terms of the header's counts.
        meaning: one phrase for the documentation.
    """

    name: str
    dtype: str
    count: str
    meaning: str

    @property
    def num_bytes(self) -> str:
        """The field's size as the documentation states it, such as `8` or `4*S`."""
        size = np.dtype(self.dtype).itemsize
        return str(size) if self.count == "1" else f"{size}*{self.count}"

    @property
    def type_name(self) -> str:
        """The type of one element as the documentation states it."""
        dtype = np.dtype(self.dtype)
        return "bytes" if dtype.kind == "V" else dtype.name


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """The fixed header of an `.idx` file, then its arrays."""

    name: str
    magic: bytes
    header: tuple[Field, ...]
    arrays: tuple[Field, ...]

    @property
    def header_dtype(self) -> np.dtype[np.void]:
        """The header as one packed record."""
        return np.dtype([(field.name, field.dtype) for field in self.header])

    def markdown(self) -> str:
        """The layout as a table for docs/formats.md."""
        rows = [
            f"| {field.num_bytes} | {field.type_name} | {field.meaning} |"
            for field in (*self.header, *self.arrays)
        ]
        return "\n".join(["| bytes | type | content |", "| --- | --- | --- |", *rows])


MMAP_INDEX = IndexLayout(
    name="mmap",
    magic=b"MMIDIDX\x00\x00",
    header=(
        Field("magic", "V9", "1", "the letters `MMIDIDX` and two zero bytes"),
        Field("version", "<u8", "1", "version, always 1"),
        Field("dtype_code", "u1", "1", "dtype code of the tokens"),
        Field("num_sequences", "<u8", "1", "number of sequences, S"),
        Field("num_document_starts", "<u8", "1", "number of document-index entries, D"),
    ),
    arrays=(
        Field("sizes", "<i4", "S", "length of each sequence in tokens"),
        Field("offsets", "<i8", "S", "place of each sequence in the `.bin`, in bytes"),
        Field("document_starts", "<i8", "D", "first sequence of each document, then S"),
    ),
)

LIST_INDEX = IndexLayout(
    name="cached / lazy",
    magic=b"TNTIDX\x00\x00",
    header=(
        Field("magic", "V8", "1", "the letters `TNTIDX` and two zero bytes"),
        Field("version", "<u8", "1", "version, always 1"),
        Field("dtype_code", "<u8", "1", "dtype code of the tokens"),
        Field("token_bytes", "<u8", "1", "size of one token in bytes"),
        Field("num_sequences", "<u8", "1", "number of sequences, N"),
        Field("num_sizes", "<u8", "1", "number of sizes, S (= N: one dimension per sequence)"),
        Field("num_document_starts", "<u8", "1", "number of document-index entries, D"),
    ),
    arrays=(
        Field("dim_offsets", "<i8", "(N+1)", "place of each sequence's sizes among the sizes"),
        Field("data_offsets", "<i8", "(N+1)", "place of each sequence in the `.bin`, in tokens"),
        Field("sizes", "<i8", "S", "length of each sequence in tokens"),
        Field("document_starts", "<i8", "D", "first sequence of each document, then N"),
    ),
)


def dtype_code(dtype: np.dtype[np.generic]) -> int:
    """The code that stands for `dtype` in an index.

    Raises:
        ValueError: the format has no code for it.
    """
    for code, candidate in DTYPES.items():
        if candidate == dtype:
            return code
    raise ValueError(
        f"dtype {dtype} has no code in an indexed dataset; use {', '.join(map(str, DTYPES.values()))}"
    )


def token_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """The dtype in which tokens of an (unpadded) vocabulary of `vocab_size` are written."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def bin_path(prefix: Path | str) -> Path:
    """`PREFIX.bin`; the prefix may itself contain dots."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """`PREFIX.idx`; the prefix may itself contain dots."""
    return Path(f"{prefix}.idx")


def offsets_path(prefix: Path | str) -> Path:
    """`PREFIX.offsets`, which says where in its source each document begins; see `neox_data.sources`."""
    return Path(f"{prefix}.offsets")


def manifest_path(prefix: Path | str) -> Path:
    """`PREFIX.manifest.json`, which says what the dataset was made of; see `neox_data.manifest`."""
    return Path(f"{prefix}.manifest.json")
