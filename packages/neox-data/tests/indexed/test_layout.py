from pathlib import Path

import numpy as np
import pytest

from neox_data.indexed.layout import DTYPES, LIST_INDEX, MMAP_INDEX, dtype_code, token_dtype
from neox_data.samples.index_cache import IndexFiles
from support.refusals import refused

FORMATS = Path(__file__).parents[4] / "docs" / "formats.md"


def test_headers_have_the_documented_sizes() -> None:
    assert MMAP_INDEX.header_dtype.itemsize == 9 + 8 + 1 + 8 + 8
    assert LIST_INDEX.header_dtype.itemsize == 8 + 8 + 16 + 16 + 8


def test_tokens_are_16_bits_wide_below_65500_entries() -> None:
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32


def test_dtype_codes_match_the_format() -> None:
    names = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
    assert {name: dtype_code(np.dtype(name)) for name in names} == names


def test_a_type_without_code_is_refused() -> None:
    with refused(ValueError, "float32 has no"):
        dtype_code(np.dtype("float32"))


@pytest.mark.parametrize("layout", [MMAP_INDEX, LIST_INDEX], ids=lambda layout: layout.name)
def test_the_documentation_shows_the_table_of_the_code(layout) -> None:
    assert layout.markdown() in FORMATS.read_text()


def test_the_documentation_shows_the_codes_and_the_cache_names() -> None:
    text = FORMATS.read_text()
    assert ", ".join(f"{code} {dtype.name}" for code, dtype in DTYPES.items()) in text
    files = IndexFiles.beside(Path("PREFIX"), name="{name}", num_samples=0, seq_length=0, seed=0)
    assert files.stem.replace("_0ns_0sl_0s_", "_{n}ns_{L}sl_{seed}s_") in text
