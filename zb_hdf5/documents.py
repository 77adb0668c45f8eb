"""Documents of text: from Parquet by row group, from JSON lines, from plain text files; what is dropped is counted."""

from __future__ import annotations

import gzip
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from zb_hdf5.errors import ConvertError, FormatError, UnavailableError

#: A block ends with the document that reaches one of these: enough work for many threads, little memory.
BLOCK_DOCUMENTS: Final = 1024
BLOCK_CHARACTERS: Final = 8 << 20
#: How many of the dropped documents are remembered by place.
FIRST_DROPPED: Final = 5


class Reason(StrEnum):
    """Why a line, row or file is no document."""

    BAD_JSON = "bad JSON"
    MISSING = "no text"  # no such key, or null
    NOT_TEXT = "not text"  # a number, a list
    NOT_UTF8 = "not UTF-8"
    EMPTY = "empty"


@dataclass
class Dropped:
    """What was not taken for a document, by reason, and where the first of them stood."""

    counts: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    def add(self, reason: Reason, place: str) -> None:
        """Count one. `place` is a file and a line or row, counted from 1."""
        self.merge(Dropped({reason.value: 1}, [f"{place}: {reason.value}"]))

    def merge(self, later: Dropped) -> None:
        """Add what was dropped after this."""
        for reason, count in later.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
        self.first = [*self.first, *later.first][:FIRST_DROPPED]


class Block(NamedTuple):
    """Consecutive documents of one file, and what was dropped between them."""

    texts: list[str]
    dropped: Dropped


class DocumentFile(ABC):
    """One file of documents. Opened for each pass over it, and closed at its end.

    Attributes
    ----------
    path
        The file.
    """

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield all documents in order.

        Raises
        ------
        FormatError
            If the file as a whole cannot be read as what its name says.
        """


class ParquetFile(DocumentFile):
    """Documents in one column of text of a Parquet file, addressable by row group.

    Parameters
    ----------
    column
        Its name.

    Raises
    ------
    FormatError
        If it is no Parquet file.
    ConvertError
        If it has no such column, or one that is not of text.
    UnavailableError
        If pyarrow is not installed.
    """

    suffixes = (".parquet",)

    def __init__(self, path: Path, column: str = "text") -> None:
        super().__init__(path)
        self._column = column
        with self._open() as file:
            self.row_group_rows = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
            schema = file.schema_arrow
        if column not in schema.names:
            raise ConvertError(
                f"{path}: no column {column!r}; pass --text-column with one of: {', '.join(schema.names)}"
            )
        kind = schema.field(column).type
        if str(getattr(kind, "value_type", kind)) not in ("string", "large_string", "string_view"):
            raise ConvertError(f"{path}: column {column!r}: expected text, found {kind}; pass another --text-column")

    @property
    def num_row_groups(self) -> int:
        return len(self.row_group_rows)

    def blocks(self) -> Iterator[Block]:
        for number in range(self.num_row_groups):
            yield from self.row_group(number)

    def row_group(self, number: int) -> Iterator[Block]:
        """Yield the documents of one row group; memory holds one column of it at most."""
        row = sum(self.row_group_rows[:number])
        with self._open() as file, _parquet_errors(self.path):
            for batch in file.iter_batches(BLOCK_DOCUMENTS, row_groups=[number], columns=[self._column]):
                yield from _blocks(f"{self.path}: row", row + 1, _column_texts(batch.column(0)))
                row += batch.num_rows

    def _open(self) -> Any:
        try:
            parquet = import_module("pyarrow.parquet")
        except ImportError as error:
            raise UnavailableError("Parquet needs the package pyarrow: pip install 'zb_hdf5[text]'") from error
        with open(self.path, "rb"), _parquet_errors(self.path):  # a file that is not there is an OSError of its own
            return parquet.ParquetFile(self.path, memory_map=False, pre_buffer=False)


class JsonLinesFile(DocumentFile):
    """Documents in one field of the objects of a file of JSON lines, gzip-compressed or not.

    Parameters
    ----------
    column
        The key of the field.
    """

    suffixes = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")

    def __init__(self, path: Path, column: str = "text") -> None:
        super().__init__(path)
        self._column = column

    def blocks(self) -> Iterator[Block]:
        opened = gzip.open if self.path.suffix == ".gz" else open
        with opened(self.path, "rb") as file:
            try:
                yield from _blocks(f"{self.path}: line", 1, (self._text(line) for line in file))
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise FormatError(f"{self.path}: damaged or cut off: {error}") from error

    def _text(self, line: bytes) -> str | Reason:
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            return Reason.NOT_UTF8
        except (ValueError, RecursionError):
            return Reason.BAD_JSON
        if not isinstance(value, dict):
            return Reason.BAD_JSON
        text = value.get(self._column)
        if text is None:
            return Reason.MISSING
        return text if isinstance(text, str) else Reason.NOT_TEXT


class PlainTextFile(DocumentFile):
    """A whole file of UTF-8 is one document, line ends as they are."""

    suffixes = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js")

    def blocks(self) -> Iterator[Block]:
        try:
            text: str | Reason = self.path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            text = Reason.NOT_UTF8
        yield from _blocks(f"{self.path}: line", 1, [text])


def _blocks(place: str, first: int, texts: Iterable[str | Reason]) -> Iterator[Block]:
    """Group documents into blocks; number them from `first` on where they are dropped."""
    block, characters = Block([], Dropped()), 0
    for number, text in enumerate(texts, first):
        if isinstance(text, Reason) or not text:
            block.dropped.add(text if isinstance(text, Reason) else Reason.EMPTY, f"{place} {number:,}")
            continue
        block.texts.append(text)
        characters += len(text)
        if len(block.texts) == BLOCK_DOCUMENTS or characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = Block([], Dropped()), 0
    if block.texts or block.dropped.counts:
        yield block


def _column_texts(column: Any) -> list[str | Reason]:
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_scalar_text(scalar) for scalar in column]
    return [Reason.MISSING if value is None else value for value in values]


def _scalar_text(scalar: Any) -> str | Reason | None:
    try:
        text: str | None = scalar.as_py()
    except UnicodeDecodeError:
        return Reason.NOT_UTF8
    return text


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    """Say which file, and that it is the file."""
    try:
        yield
    except (import_module("pyarrow").ArrowException, OSError) as error:
        raise FormatError(f"{path}: not a Parquet file, or a damaged one: {error}") from error
