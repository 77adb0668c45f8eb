"""Documents in a column of text of a Parquet file, by its row groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any

from zb_hdf5.errors import ConvertError, FormatError
from zb_hdf5.files.look import Look, LookStream
from zb_hdf5.packages import require_package
from zb_hdf5.text.document_file import BLOCK_DOCUMENTS, Block, DocumentFile
from zb_hdf5.text.dropped import Reason
from zb_hdf5.text.lacking_text import chats_in, way_of_type, without_text


class ParquetFile(DocumentFile):
    """Documents in one column of text of a Parquet file. More columns may have any type."""

    suffixes = (".parquet",)
    noun = "Parquet files of text"
    example = "corpus/"
    documents = "Each row is a document."
    has_lines = False

    def _read_head(self) -> None:
        with self._open() as file:
            self.num_row_groups = file.num_row_groups
            groups = [file.metadata.row_group(k) for k in range(file.num_row_groups)]
            self._rows = [group.num_rows for group in groups]
            self._text_bytes = [self._text_bytes_of(group) for group in groups]
            self._require_columns(file.schema_arrow)

    def _text_bytes_of(self, group: Any) -> int:
        columns = map(group.column, range(group.num_columns))
        sizes = {column.path_in_schema: column.total_uncompressed_size for column in columns}
        return int(sizes.get(self.column, 0))

    def _require_columns(self, schema: Any) -> None:
        """Raise `ConvertError` unless all columns are there, the text is text, and the metadata can be JSON."""
        path = self.path
        named = ", ".join(schema.names)
        if self.column not in schema.names:
            facts = f"{path}: no column {self.column!r} for the text; its columns are: {named}"
            raise without_text(facts, schema.names, chats_in(path, schema))
        for name in self.more_columns:
            if name not in schema.names:
                raise ConvertError(f"{path}: no column {name!r} for its documents; its columns are: {named}")
        kind = schema.field(self.column).type
        text = kind.value_type if hasattr(kind, "index_type") else kind  # of a dictionary
        if str(text) not in ("string", "large_string", "string_view"):
            way = way_of_type(path, self.column, str(kind))
            raise ConvertError(f"{path}: column {self.column!r}: expected text, found {kind}; {way}")
        for name in self.metadata_columns:
            kind = schema.field(name).type
            if has_binary(kind):
                raise ConvertError(
                    f"{path}: column {name!r}: expected values that JSON has, found {kind}; name another column"
                )

    def text_bytes(self, number: int) -> int:
        return self._text_bytes[number]

    def _row_group(self, number: int) -> Iterator[Block]:
        """Yield the documents of one row group; memory holds one column of it at most."""
        row = sum(self._rows[:number])
        names = list(dict.fromkeys([self.column, *self.more_columns]))
        with self._open() as file, _parquet_errors(self.path):
            for batch in file.iter_batches(BLOCK_DOCUMENTS, row_groups=[number], columns=names):
                values = {name: column_values(batch.column(name), f"{self.path}: column {name!r}") for name in names}
                texts = [Reason.MISSING if text is None else text for text in values[self.column]]
                columns = [values[name] for name in self.more_columns]
                more: Iterable[tuple[Any, ...]] = zip(*columns, strict=True) if columns else repeat((), len(texts))
                yield from self._blocks(row + 1, zip(texts, more, strict=True))
                row += batch.num_rows

    def _open(self) -> Any:
        require_package("pyarrow", "text")
        look = self.opened()  # a file that is not there is an OSError of its own
        with _parquet_errors(self.path):
            return open_parquet(look)


class _ParquetStream(LookStream):
    """The bytes of a Parquet file, read into memory of Arrow, which keeps it for the next read."""

    def read_buffer(self, size: int) -> Any:
        """Return the next bytes. Arrow calls it in place of `read`."""
        buffer = import_module("pyarrow").allocate_buffer(size)
        return buffer.slice(0, self.readinto(buffer))


def open_parquet(look: Look, buffer_size: int = 0) -> Any:
    """Open a Parquet file by the descriptor of a look.

    Parameters
    ----------
    buffer_size
        Bytes that are read at a time; 0: a column of a row group.
    """
    parquet = require_package("pyarrow.parquet", "text")
    return parquet.ParquetFile(_ParquetStream(look), pre_buffer=False, buffer_size=buffer_size)


def has_binary(kind: Any) -> bool:
    """Return whether values of a type of Parquet are bytes, or hold some."""
    if hasattr(kind, "index_type"):  # of a dictionary
        return has_binary(kind.value_type)
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return "binary" in str(kind).partition("<")[0] or any(map(has_binary, inner))


def column_values(column: Any, where: str) -> list[Any]:
    """Return the values of a column, `Reason.NOT_UTF8` for undecodable text; `ConvertError` for what Python lacks."""

    def value(scalar: Any) -> Any:
        try:
            return scalar.as_py()
        except UnicodeDecodeError:
            return Reason.NOT_UTF8

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [value(scalar) for scalar in column]
    except ValueError as error:  # times in nanoseconds without pandas
        raise ConvertError(f"{where}: {error}; or name another column") from error


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    """Name the file in the errors of pyarrow."""
    damaged = import_module("pyarrow").ArrowException  # now: a generator may end when nothing can be imported
    try:
        yield
    except (damaged, OSError) as error:
        raise FormatError(f"{path}: not a Parquet file, or a damaged one: {error}") from error
