"""File layouts of an indexed dataset.

`PREFIX.bin` contains the tokens of all sequences, one after another. `PREFIX.idx` contains the position of
each sequence; it has one of two layouts, identified by its first bytes. All values are little-endian and
packed. The reader and the writer use the tables below, and docs/formats.md shows them (a test compares).

Source: the files that Megatron-LM and GPT-NeoX write.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = [
    "DISPUTED_DTYPE_CODES",
    "DTYPES",
    "LAYOUTS",
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

# Codes 6 and 7 are float64 and float32, in an order that depends on the program that wrote the file.
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
        name: name of the field in the code.
        dtype: numpy dtype of an element.
        count: number of elements, as an expression of the header's counts.
        meaning: description for the documentation.
    """

    name: str
    dtype: str
    count: str
    meaning: str

    @property
    def num_bytes(self) -> str:
        """Size of the field for the documentation, such as `8` or `4*S`."""
        size = np.dtype(self.dtype).itemsize
        return str(size) if self.count == "1" else f"{size}*{self.count}"

    @property
    def type_name(self) -> str:
        """Type of an element for the documentation."""
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
        """Return the layout as a table for docs/formats.md."""
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
        Field("starts", "<i8", "S", "place of each sequence in the `.bin`, in bytes"),
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
        Field("starts", "<i8", "(N+1)", "place of each sequence in the `.bin`, in tokens"),
        Field("sizes", "<i8", "S", "length of each sequence in tokens"),
        Field("document_starts", "<i8", "D", "first sequence of each document, then N"),
    ),
)


LAYOUTS = (MMAP_INDEX, LIST_INDEX)


def dtype_code(dtype: np.dtype[np.generic]) -> int:
    """Return the code of `dtype` in an index.

    Raises:
        ValueError: the format has no code for this dtype.
    """
    for code, candidate in DTYPES.items():
        if candidate == dtype:
            return code
    raise ValueError(
        f"dtype {dtype} has no code in an indexed dataset; use {', '.join(map(str, DTYPES.values()))}"
    )


def token_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """Return the dtype of tokens for an (unpadded) vocabulary of `vocab_size` tokens."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def bin_path(prefix: Path | str) -> Path:
    """Return `PREFIX.bin`; the prefix may contain dots."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """Return `PREFIX.idx`; the prefix may contain dots."""
    return Path(f"{prefix}.idx")


def offsets_path(prefix: Path | str) -> Path:
    """Return `PREFIX.offsets`, with the position of each document in its source; see `neox_data.sources`."""
    return Path(f"{prefix}.offsets")


def manifest_path(prefix: Path | str) -> Path:
    """Return `PREFIX.manifest.json`, which describes the dataset's inputs; see `neox_data.manifest`."""
    return Path(f"{prefix}.manifest.json")
