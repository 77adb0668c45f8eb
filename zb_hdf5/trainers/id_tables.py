"""Files with a list of ids in each row: Parquet, Arrow files and streams, JSON lines."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import row_of_source
from zb_hdf5.errors import ConvertError, FormatError, IncompleteError
from zb_hdf5.files.look import Look
from zb_hdf5.files.signatures import ARROW_MAGIC, ARROW_STREAM_MAGIC, PARQUET_MAGIC
from zb_hdf5.formats.id_source import (
    BLOCK_OF_IDS,
    MAX_BLOCK_ROWS,
    Columns,
    ColumnSelection,
    IdFile,
    IdRows,
    RowBlock,
    facts_of_rows,
    require_aligned,
)
from zb_hdf5.packages import require_package
from zb_hdf5.text.json_lines import JsonLinesFile, first_objects, parsed_json, require_lines
from zb_hdf5.text.parquet_file import column_values, has_binary, open_parquet

#: Bytes of the ids of record batches that one process reads together, about.
ARROW_GROUP_BYTES: Final = 32 << 20
#: The last bytes of a whole stream.
STREAM_END: Final = ARROW_STREAM_MAGIC + bytes(4)
#: The types of Arrow whose names numpy does not have. Its own `to_pandas_dtype` needs pandas in some versions.
ARROW_FLOATS: Final = {"halffloat": "float16", "float": "float32", "double": "float64"}
#: The dtypes of numbers in JSON.
JSON_DTYPES: Final[dict[str, np.dtype[Any]]] = {"i": np.dtype(np.int32), "f": np.dtype(np.float64), "b": np.dtype(bool)}


class TableIds(IdFile):
    """A file of record batches with a list of ids in each row.

    Parameters
    ----------
    look
        A look at the file, whose open descriptor is read from now on.
    wanted
        The columns that a conversion asks for.
    """

    #: Such files, for messages.
    noun: ClassVar[str]

    def __init__(self, look: Look, wanted: ColumnSelection) -> None:
        path = look.path
        super().__init__(path, look=look)
        schema = self._schema(self.opened())
        self.columns = wanted.columns(path, _kinds_of(schema, path))
        for name in self.columns.metadata:
            kind = schema.field(name).type
            if has_binary(kind):
                raise ConvertError(
                    f"{path}: column {name!r}: expected values that JSON has, found {kind}; name another column"
                )
        with _errors(path, self.noun):
            self.group_bytes = self._find_groups(schema)

    @classmethod
    def kinds(cls, look: Look) -> dict[str, np.dtype[Any] | str]:
        """Return for each column of a file the dtype of the numbers in its lists, or its type."""
        return _kinds_of(cls._schema(look), look.path)

    @classmethod
    @abstractmethod
    def _schema(cls, look: Look) -> Any:
        """Return the schema of a file."""

    @abstractmethod
    def _find_groups(self, schema: Any) -> list[int]:
        """Return the bytes of each group, about."""

    @abstractmethod
    def _first_row(self, number: int) -> int:
        """Return the number of the first row of a group, counted from 1."""

    @abstractmethod
    def _batches(self, number: int) -> Iterator[Any]:
        """Yield the record batches of a group, with the columns that are read."""

    def _rows(self, number: int) -> Iterator[IdRows]:
        first = self._first_row(number)
        read = 0
        batches = self._batches(number)
        while True:
            with _errors(self.path, self.noun):
                batch = next(batches, None)
                if batch is None:
                    return
                batch.validate(full=True)  # offsets beyond the values would be read as they are
                read += batch.nbytes
            if batch.num_rows:
                yield self._rows_of(batch, first, read)
            first += batch.num_rows

    def _rows_of(self, batch: Any, first: int, read: int) -> IdRows:
        columns = self.columns
        tokens, lengths = self._list_values(batch, columns.ids, first)
        fields = {}
        for name in columns.lists[1:]:
            fields[name], found = self._list_values(batch, name, first)
            others = np.flatnonzero(found != lengths)
            if len(others):
                row = int(others[0])
                where = row_of_source(self.path, first + row)
                require_aligned(where, name, columns.ids, int(lengths[row]), int(found[row]))
        documents = self._list_values(batch, columns.lengths, first) if columns.lengths else None
        more = [column_values(batch.column(name), f"{self.path}: column {name!r}") for name in columns.more]
        ids, metadata = facts_of_rows(self.path, columns, first, list(zip(*more, strict=True)))
        return IdRows(first, tokens, lengths, fields, ids, metadata, read, documents)

    def _list_values(self, batch: Any, name: str, first: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return the values of a column of lists, one after the other, and the length of each list; none is null."""
        column = batch.column(name)
        if column.null_count:
            row = first + int(np.flatnonzero(_is_null(column))[0])
            raise ConvertError(f"{row_of_source(self.path, row)}: column {name!r}: expected a list, found null")
        values = column.flatten()
        if hasattr(column, "offsets"):
            lengths = np.diff(_numpy_of(column.offsets)).astype(np.int64)
        else:
            lengths = np.full(len(column), column.type.list_size, np.int64)
        if values.null_count:
            place = int(np.flatnonzero(_is_null(values))[0])
            row = first + int(np.searchsorted(np.cumsum(lengths), place, side="right"))
            raise ConvertError(f"{row_of_source(self.path, row)}: column {name!r}: expected numbers, found null")
        return _numpy_of(values), lengths


@contextmanager
def _errors(path: Path, noun: str) -> Iterator[None]:
    """Name the file in the errors of pyarrow."""
    pyarrow = require_package("pyarrow", "text")
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).partition("\n")[0]
        raise FormatError(f"{path}: not a file of {noun}, or a damaged one: {reason}") from error


def _is_null(array: Any) -> npt.NDArray[np.bool_]:
    return _numpy_of(array.is_null())


def _numpy_of(array: Any) -> npt.NDArray[Any]:
    """Return the values of an array without nulls. Its own `to_numpy` imports pandas: a third of a second."""
    if str(array.type) == "bool":  # bits in Arrow
        return np.from_dlpack(array.cast("uint8")).view(np.bool_)
    return np.from_dlpack(array)


def _kinds_of(schema: Any, path: Path) -> dict[str, np.dtype[Any] | str]:
    """Return for each column the dtype of the numbers in its lists, or its type."""
    if len(set(schema.names)) < len(schema.names):
        raise FormatError(f"{path}: expected each column once, found {', '.join(schema.names)}")
    return {field.name: _kind_of(field.type) for field in schema}


def _kind_of(kind: Any) -> np.dtype[Any] | str:
    types = require_package("pyarrow.types", "text")
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    inner = kind.value_type if is_list else None
    if not is_list or not (types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)):
        return str(kind)
    return np.dtype(ARROW_FLOATS.get(str(inner), str(inner)))


class ParquetIds(TableIds):
    """A Parquet file. A row group is a group."""

    noun = "Parquet"

    @classmethod
    def _schema(cls, look: Look) -> Any:
        with _errors(look.path, cls.noun), open_parquet(look, BLOCK_OF_IDS) as file:
            return file.schema_arrow

    def _find_groups(self, schema: Any) -> list[int]:
        lists = self.columns.lists
        with open_parquet(self.opened(), BLOCK_OF_IDS) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            self._num_rows = [group.num_rows for group in groups]
            columns = [[group.column(k) for k in range(group.num_columns)] for group in groups]
            read = [[each for each in found if each.path_in_schema.partition(".")[0] in lists] for found in columns]
        self._num_tokens = [max((each.num_values for each in found), default=0) for found in read]
        return [sum(each.total_uncompressed_size for each in found) for found in read]

    def _first_row(self, number: int) -> int:
        first: int = sum(self._num_rows[:number], 1)
        return first

    def _batches(self, number: int) -> Iterator[Any]:
        columns = self.columns.names
        num_rows = _rows_of_block(self._num_rows[number], self._num_tokens[number])
        with open_parquet(self.opened(), BLOCK_OF_IDS) as file:
            yield from file.iter_batches(num_rows, row_groups=[number], columns=columns)


def _rows_of_block(num_rows: int, num_tokens: int) -> int:
    """Return how many rows of a group have about the ids of a block."""
    return max(1, min(MAX_BLOCK_ROWS, BLOCK_OF_IDS * num_rows // max(num_tokens, 1)))


class _Batches(NamedTuple):
    """Record batches that follow each other: a group."""

    first: int
    stop: int
    first_row: int
    num_bytes: int


class ArrowIds(TableIds):
    """An Arrow file, or an Arrow stream, as `save_to_disk` writes it. Record batches are put together to groups."""

    noun = "Arrow"

    @classmethod
    def _schema(cls, look: Look) -> Any:
        path = look.path
        end = STREAM_END if _is_stream(look) else ARROW_MAGIC
        if look.read(len(end), max(0, look.num_bytes - len(end))) != end:
            raise IncompleteError(f"{path}: expected the end of Arrow data in its last bytes: it was cut short")
        with _errors(path, cls.noun), _open_arrow(look) as (reader, _):
            return reader.schema

    def _find_groups(self, schema: Any) -> list[int]:
        self._fields = [schema.get_field_index(name) for name in self.columns.names]
        groups: list[_Batches] = []
        look = self.opened()
        with _open_arrow(look, [schema.get_field_index(self.columns.ids)]) as (reader, source):
            row = 1
            for number, batch in enumerate(_from(reader, 0)):
                batch.validate()
                if not groups or groups[-1].num_bytes >= ARROW_GROUP_BYTES:
                    groups.append(_Batches(number, number, row, 0))
                row += batch.num_rows
                groups[-1] = groups[-1]._replace(stop=number + 1, num_bytes=groups[-1].num_bytes + batch.nbytes)
            end = source.tell() if _is_stream(look) else source.size()
            if end != source.size():
                raise FormatError(f"{self.path}: expected one Arrow stream of {end:,} bytes, found {source.size():,}")
        self._groups = groups
        return [group.num_bytes for group in groups]

    def _first_row(self, number: int) -> int:
        return self._groups[number].first_row

    def _batches(self, number: int) -> Iterator[Any]:
        group = self._groups[number]
        with _open_arrow(self.opened(), self._fields) as (reader, _):
            for batch in islice(_from(reader, group.first), group.stop - group.first):
                batch.validate(full=True)
                num_tokens = len(batch.column(self.columns.ids).flatten())
                size = _rows_of_block(batch.num_rows, num_tokens)
                for start in range(0, batch.num_rows, size):
                    yield batch.slice(start, size)


def _is_stream(look: Look) -> bool:
    return look.read(len(ARROW_MAGIC), 0) != ARROW_MAGIC


@contextmanager
def _open_arrow(look: Look, fields: Sequence[int] = ()) -> Iterator[tuple[Any, Any]]:
    """Open a file, with some columns alone if they are numbered: a reader, and the bytes below it."""
    pyarrow = require_package("pyarrow", "text")
    options = pyarrow.ipc.IpcReadOptions(included_fields=sorted(fields))
    opener = pyarrow.ipc.open_stream if _is_stream(look) else pyarrow.ipc.open_file
    with pyarrow.BufferReader(look.mapped()) as source, opener(source, options=options) as reader:
        yield reader, source


def _from(reader: Any, first: int) -> Iterator[Any]:
    """Return the record batches from one on: of a file by their places, of a stream one after the other."""
    if hasattr(reader, "get_batch"):
        return map(reader.get_batch, range(first, reader.num_record_batches))
    return islice(reader, first, None)


class JsonLinesIds(IdFile):
    """A file of JSON lines, compressed (then one group) or not. A blank line is not a row.

    Parameters
    ----------
    look
        A look at the file.
    wanted
        The columns that a conversion asks for.
    columns
        Those of the first file, which all have to have; None: this is the first one.
    max_line
        The bytes of the longest line; None: `bound_bytes`.
    """

    def __init__(
        self, look: Look, wanted: ColumnSelection, columns: Columns | None = None, max_line: int | None = None
    ) -> None:
        path = look.path
        self._file = JsonLinesFile(path, max_line=max_line)
        super().__init__(path, self._file.identity)
        self.columns = columns or wanted.columns(path, _kinds_in(self._file.first_objects()))
        count = self._file.num_row_groups
        self.group_bytes = [self._file.text_bytes(number) for number in range(count)]

    @classmethod
    def kinds(cls, look: Look) -> dict[str, np.dtype[Any] | str]:
        """Return for each key the dtype of the numbers in its lists, or what else it has, by the first lines."""
        require_lines(look)
        return _kinds_in(first_objects(look))

    def close(self) -> None:
        self._file.close()

    def _rows(self, number: int) -> Iterator[IdRows]:
        block = RowBlock(self.path, self.columns, self._file.first_line(number))
        read = 0
        for line in self._file.lines(number):
            read += len(line)
            if not line or line.isspace():  # a mark alone is not a line
                yield from block.take(read)
                block.skip()
                continue
            row = self._parsed(line, block.where)
            lists = [_numbers(row, name, block.where, is_ids=name == self.columns.ids) for name in self.columns.lists]
            name = self.columns.lengths
            documents = _numbers(row, name, block.where, is_ids=True) if name else None
            block.add(lists, [row.get(name) for name in self.columns.more], documents)
            if block.is_full:
                yield from block.take(read)
        yield from block.take(read)

    def _parsed(self, line: bytes | bytearray, where: str) -> dict[str, Any]:
        try:
            row = parsed_json(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: expected a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise FormatError(f"{where}: expected a JSON object, found {bytes(line[:40])!r}")
        return row


def _kinds_in(rows: Iterable[Mapping[str, Any]]) -> dict[str, np.dtype[Any] | str]:
    """Return for each key of the first rows of a file what `JsonLinesIds.kinds` has."""
    kinds: dict[str, np.dtype[Any] | str | None] = {}
    for row in rows:
        for name, value in row.items():
            kinds[name] = _merged(kinds.get(name), value)
    return {name: "no values" if kind is None else kind for name, kind in kinds.items()}


def _numbers(row: Mapping[str, Any], name: str, where: str, is_ids: bool) -> npt.NDArray[Any]:
    """Return the numbers of a list; `ConvertError` if there is no list, or it has anything else."""
    value = row.get(name)
    found: npt.NDArray[Any] = np.empty(0, np.int64)
    if value != []:
        try:
            found = np.array(value)
        except ValueError:  # lists of several lengths
            found = np.empty((0, 0))
    kinds = "iu" if is_ids else "iufb"
    if not isinstance(value, list) or found.ndim != 1 or found.dtype.kind not in kinds:
        expected = "ids" if is_ids else "numbers"
        shown = f"{json.dumps(value):.60}" if name in row else "no such key"
        raise ConvertError(f"{where}: column {name!r}: expected a list of {expected}, found {shown}")
    return found


def _merged(kind: Any, value: Any) -> Any:
    """Return the kind of a key, as its values so far and one more have it; None where none of them tells it."""
    if isinstance(kind, str) or value is None or value == []:
        return kind
    found: Any = type(value).__name__
    if isinstance(value, list):
        found = _dtype_of_json(value[0])
    if kind is None:
        return found
    return np.result_type(kind, found) if isinstance(found, np.dtype) else kind  # a row that is refused when it is read


def _dtype_of_json(value: Any) -> np.dtype[Any] | str:
    """Return the dtype of a number in a list, or what else the list has."""
    letter = np.array(value).dtype.kind if isinstance(value, bool | int | float) else ""
    return JSON_DTYPES.get(letter, f"lists of {type(value).__name__}")


def kind_of_file(look: Look) -> type[ParquetIds | ArrowIds | JsonLinesIds]:
    """Return how a file is read: JSON lines by their name, others by their first bytes."""
    path = look.path
    if path.name.lower().endswith(JsonLinesFile.suffixes):
        return JsonLinesIds
    head = look.read(len(ARROW_MAGIC), 0)
    if head == ARROW_MAGIC or head.startswith(ARROW_STREAM_MAGIC):
        return ArrowIds
    if head.startswith(PARQUET_MAGIC):
        return ParquetIds
    raise FormatError(f"{path}: expected Parquet, Arrow, or the name of JSON lines (.jsonl), found {head!r}")
