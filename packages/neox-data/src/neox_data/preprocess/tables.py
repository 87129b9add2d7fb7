"""Read the rows of parquet files."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from neox_data.errors import CorpusError
from neox_data.pluralize import first_few
from neox_data.preprocess.texts import of_json
from neox_data.preprocess.unpack import DamageError

__all__ = ["rows_of"]

_ROWS_AT_ONCE = 1024
_MARK = b"PAR1"
_BUFFER_BYTES = 1 << 20


def rows_of(
    path: Path, keys: Sequence[str], remedy: str, optional: Sequence[str] = ()
) -> Iterator[tuple[Any, ...]]:
    """Yield the values of the columns `keys` and `optional`, row by row.

    Maps are objects, and texts of Arrow's type JSON are decoded. A cell with a text that is not UTF-8 is the
    bytes of this text.

    Args:
        path: the file.
        keys: names of columns.
        remedy: what the error about a missing one asks for.
        optional: names of more columns, whose values are None if the file lacks them.

    Raises:
        CorpusError: a column is missing.
        DamageError: the file is damaged, incomplete, or has fewer rows than its footer counts.
        OSError: the file cannot be read.
    """
    # Imported only when needed: it takes longer to import than everything else together.
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            present = file.schema_arrow.names
            if absent := [key for key in keys if key not in present]:
                found = first_few([repr(each) for each in present], 8)
                raise CorpusError(f"{path} has no column {absent[0]!r}; its columns are {found}; {remedy}")
            read = [*keys, *(key for key in optional if key in present)]
            _refuse_joined(path, file.metadata)
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=read):
                columns = [
                    _values(batch.column(key)) if key in read else [None] * len(batch)
                    for key in (*keys, *optional)
                ]
                number += len(batch)
                yield from zip(*columns, strict=True)
            if number != file.metadata.num_rows:
                raise DamageError(
                    f"it has {number:,} of the {file.metadata.num_rows:,} rows that its footer counts"
                )
    except OSError as error:
        if error.errno is None:
            raise DamageError(_first_line(error)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error
    except (ArrowException, ValueError, KeyError, IndexError, OverflowError) as error:
        raise DamageError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _values(column: Any) -> list[Any]:
    from pyarrow import types

    kinds = [*_kinds_in(column.type)]
    # Not for all columns: it takes several times as long.
    form = {"maps_as_pydicts": "strict"} if any(map(types.is_map, kinds)) else {}
    try:
        values: list[Any] = column.to_pylist(**form)
    except UnicodeDecodeError:
        values = [_value(cell, form) for cell in column]
    return [_decoded(value, column.type) for value in values] if any(map(_is_json, kinds)) else values


def _value(cell: Any, form: dict[str, str]) -> Any:
    try:
        return cell.as_py(**form)
    except UnicodeDecodeError as error:
        return error.object


def _kinds_in(kind: Any) -> Iterator[Any]:
    """Yield a type of Arrow, and all that it is made of."""
    yield kind
    for number in range(kind.num_fields):
        yield from _kinds_in(kind.field(number).type)


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == "arrow.json"


def _decoded(value: Any, kind: Any) -> Any:
    """Return a value with texts of the type JSON decoded; those that are not JSON stay text."""
    from pyarrow import types

    if isinstance(value, str) and _is_json(kind):
        with suppress(ValueError):
            return of_json(value)
    if isinstance(value, list):
        return [_decoded(each, kind.value_type) for each in value]
    if isinstance(value, dict):
        is_map = types.is_map(kind)
        return {
            key: _decoded(each, kind.item_type if is_map else kind.field(key).type)
            for key, each in value.items()
        }
    return value


def _refuse_joined(path: Path, metadata: Any) -> None:
    """Raise `DamageError` if several files were joined; the offsets of the last footer are wrong then."""
    end = len(_MARK)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for chunk in map(group.column, range(group.num_columns)):
            dictionary, data = chunk.dictionary_page_offset, chunk.data_page_offset
            begin = data if dictionary is None else min(dictionary, data)
            end = max(end, begin + chunk.total_compressed_size)
    stop = path.stat().st_size - metadata.serialized_size - 2 * len(_MARK)
    # Between the last column and the footer there may be indexes.
    with path.open("rb") as file:
        file.seek(end)
        last = b""
        while file.tell() < stop and (block := file.read(min(_BUFFER_BYTES, stop - file.tell()))):
            if _MARK + _MARK in last + block:
                raise DamageError("several parquet files are joined in it; pass them one by one")
            last = block[-2 * len(_MARK) :]
