"""The documents of Parquet files, by row group, of JSON lines, and of text files. Dropped documents are counted."""

from __future__ import annotations

import codecs
import json
import math
import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from itertools import chain, compress, islice, repeat
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, TypeAlias

from zb_hdf5.documents.metadata import id_bytes, metadata_bytes
from zb_hdf5.errors import ConvertError, FormatError, Remedy, conversion_call, counted
from zb_hdf5.files.bounded import lines_of
from zb_hdf5.files.forks import kept_property
from zb_hdf5.files.line_file import (
    GZIP_SUFFIX,
    JSON_SUFFIX,
    LINE_SUFFIXES,
    SUFFIXES_OF_JSON_LINES,
    ZSTD_SUFFIX,
    is_compressed,
    unpacked,
)
from zb_hdf5.files.paths import head_of, local_path, open_file, read_whole
from zb_hdf5.files.ways import of_chats
from zb_hdf5.packages import require_package

#: A block ends with the document that reaches one of these: enough work for many threads, little memory.
BLOCK_DOCUMENTS: Final = 1024
BLOCK_CHARACTERS: Final = 1 << 20
#: Lines of a file of JSON lines in which a key is looked for.
SAMPLE_LINES: Final = 1000
#: Keys of its objects that a message names.
KEYS_SHOWN: Final = 20
#: Columns that hold ids in place of text, in the order in which they are looked for.
IDS_COLUMNS: Final = ("input_ids", "tokens", "token_ids", "ids")
#: The types of lists of messages begin so, in JSON and in Arrow; and a list of ids has such a type.
CHAT_KINDS: Final = ("lists of dict", "list<item: struct<", "list<element: struct<", "large_list<item: struct<")
IDS_KIND: Final = re.compile(r"list<\w+: u?int\d+>")
#: Bytes of a file of JSON lines that one process reads at a time.
ROW_GROUP_BYTES: Final = 64 << 20
#: How many dropped documents are remembered with file and line.
FIRST_DROPPED: Final = 5
#: Bytes of files of JSON lines in which the key of the text is looked for.
SAMPLE_BYTES: Final = 256 << 20
#: The marks with which files of other encodings begin; the longer ones first, since they begin with shorter ones.
ENCODING_MARKS: Final = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
ENCODING_MARK_BYTES: Final = 4
#: Of so many bytes of UTF-16 that is mostly ASCII more than one is 0.
NUL_SHARE: Final = 4
#: A text, or why it is none, and the values of its other columns; None: a blank line.
Found: TypeAlias = "tuple[str | Reason, tuple[Any, ...]] | None"


class Reason(StrEnum):
    """The reason why a line, row or file gives no document."""

    BAD_JSON = "bad JSON"
    IN_ARRAY = "in a JSON array"
    SPREAD = "of JSON over several lines"
    SEVERAL = "with several JSON objects"
    NO_OBJECT = "without a JSON object"  # a number, a string
    UTF_16 = "of UTF-16"
    MISSING = "no text"  # no such key, or null
    NOT_TEXT = "not text"  # a number, a list
    NOT_UTF8 = "not UTF-8"
    EMPTY = "empty"
    REFUSED = "refused by the tokenizer"


#: The query of jq that writes one object in each line, by what the lines were in place of that.
WHOLE_JSON: Final = {Reason.IN_ARRAY: ".[]", Reason.SPREAD: ".", Reason.SEVERAL: "."}
#: The share of the lines, rows or files of text that may be no documents, unless another one is given.
DEFAULT_MAX_DROPPED: Final = 0.5


@dataclass
class Dropped:
    """How many texts were dropped, by reason, and the lines of the first ones."""

    counts: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, reason: Reason, path: Path, rows: Sequence[int]) -> Dropped:
        """Return the drops of some rows of a file, for one reason."""
        first = [f"{row_of_source(path, row)}: {reason}" for row in rows[:FIRST_DROPPED]]
        return cls({reason.value: len(rows)} if rows else {}, first)

    def merge(self, later: Dropped) -> None:
        """Add the drops of a later part."""
        for reason, count in later.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
        self.first = [*self.first, *later.first][:FIRST_DROPPED]

    @property
    def reasons(self) -> str:
        """The count of each reason, in words; "": nothing was dropped."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.counts.items())

    def lines(self) -> list[tuple[str, str]]:
        """Return the lines of a report: none if nothing was dropped."""
        return [("dropped", self.reasons), *(("", where) for where in self.first)] if self.counts else []

    def require_few(self, documents: int, most: float, path: Path) -> None:
        """Raise `ConvertError` if more than a share of all lines, rows or files were dropped.

        Parameters
        ----------
        documents
            How many of them were documents.
        most
            The share.
        path
            The first file, for messages.
        """
        dropped = sum(self.counts.values())
        total = dropped + documents
        if dropped > most * total:
            enough = math.ceil(100 * dropped / total) / 100
            raise ConvertError(
                f"{path}: expected at most {most:.0%} of the lines, rows or files to be dropped, found {dropped:,} of "
                f"{total:,} ({self.reasons}){self.cure(path)}; if it is right, pass max_dropped {enough:g}",
                options=["max_dropped"],
            )

    def cure(self, path: Path) -> str:
        """Return the words of a message with the command that makes good lines of JSON; "": no command does."""
        whole = next((query for reason, query in WHOLE_JSON.items() if reason.value in self.counts), "")
        if not whole:
            return ""
        reader = "zcat" if path.suffix == ".gz" else "cat"
        written = path.with_name(f"lines-{path.name.removesuffix('.gz')}")
        line = f"{reader} {shlex.quote(str(path))} | jq -c {shlex.quote(whole)} > {shlex.quote(str(written))}"
        return f"; expected one JSON object in each line, which this writes: {line}"


@dataclass
class Block:
    """Consecutive documents of one file, and the count of documents dropped between them."""

    texts: list[str] = field(default_factory=list)
    dropped: Dropped = field(default_factory=Dropped)
    rows: list[int] = field(default_factory=list)  # the row or line of each text, counted from 1
    ids: list[bytes] = field(default_factory=list)  # UTF-8; empty where no column of them was named, as is `metadata`
    metadata: list[bytes] = field(default_factory=list)  # the text of a JSON object for each document

    def only(self, keep: Sequence[bool]) -> Block:
        """Return the block with some of its documents: `keep` has a truth value for each."""
        return Block(
            list(compress(self.texts, keep)),
            self.dropped,
            list(compress(self.rows, keep)),
            list(compress(self.ids, keep)),
            list(compress(self.metadata, keep)),
        )


class DocumentFile(ABC):
    """One file of documents, in row groups: runs of documents, each of which can be read by itself.

    Parameters
    ----------
    path
        The file.
    column
        The column, or the key, of the text.
    id_column
        The column of the ids; "": the documents have none.
    metadata_columns
        The columns of the metadata.

    Attributes
    ----------
    suffixes
        Of the names of such files.
    noun, example, documents
        For the help: such files, a path of them, and the nature of a document in one sentence.
    has_columns
        A document is one of several values, and `column` names it.
    num_row_groups
        The row groups of the file.
    more_columns
        The columns that are read besides the text.
    """

    suffixes: ClassVar[tuple[str, ...]]
    noun: ClassVar[str]
    example: ClassVar[str]
    documents: ClassVar[str]
    has_columns: ClassVar[bool] = True
    num_row_groups: int

    def __init__(
        self,
        path: Path,
        column: str = "text",
        id_column: str = "",
        metadata_columns: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.column = column
        self.id_column = id_column
        self.metadata_columns = tuple(metadata_columns)
        self.more_columns = (id_column, *metadata_columns) if id_column else self.metadata_columns
        self._look()

    def _look(self) -> None:  # noqa: B027 - most files are looked at when they are read
        """Look at the file: count its row groups, and refuse one without the columns."""

    def blocks(self) -> Iterator[Block]:
        """Yield all documents in order."""
        for number in range(self.num_row_groups):
            yield from self.row_group(number)

    def text_bytes(self, number: int) -> int:
        """Return about how many bytes of text one row group has."""
        return -(-self.path.stat().st_size // self.num_row_groups)

    @abstractmethod
    def row_group(self, number: int) -> Iterator[Block]:
        """Yield the documents of one row group; `FormatError` for a damaged file, `ConvertError` for a bad id."""

    def _blocks(self, first: int, found: Iterable[Found]) -> Iterator[Block]:
        """Group documents into blocks; their rows are numbered from `first` on."""
        block = Block()
        characters = 0
        for number, each in enumerate(found, first):
            if each is None:
                continue
            text, more = each
            if isinstance(text := text or Reason.EMPTY, Reason):
                block.dropped.merge(Dropped.of(text, self.path, [number]))
                continue
            block.texts.append(text)
            block.rows.append(number)
            if more:
                self._add_more(block, more, row_of_source(self.path, number))
            characters += len(text)
            if len(block.texts) == BLOCK_DOCUMENTS or characters >= BLOCK_CHARACTERS:
                yield block
                block = Block()
                characters = 0
        if block.texts or block.dropped.counts:
            yield block

    def _add_more(self, block: Block, values: Sequence[Any], where: str) -> None:
        """Add the values of other columns of a document."""
        id, metadata = facts_of_document(self.id_column, self.metadata_columns, values, where)
        if self.id_column:
            block.ids.append(id)
        if self.metadata_columns:
            block.metadata.append(metadata)


def facts_of_document(
    id_column: str, metadata_columns: Sequence[str], values: Sequence[Any], where: str
) -> tuple[bytes, bytes]:
    """Return the id and the metadata of a document, as they are stored; b"" for what it has no column of.

    Parameters
    ----------
    id_column, metadata_columns
        As for `DocumentFile`.
    values
        The value of each of these columns, that of the id first.
    where
        The row, for messages.
    """
    columns = (id_column, *metadata_columns) if id_column else metadata_columns
    for name, value in zip(columns, values, strict=True):
        if isinstance(value, Reason):
            raise ConvertError(f"{where}: column {name!r} is {value}; name another column")
    named = dict(zip(columns, values, strict=True))
    id = id_bytes(values[0], f"{where}: column {id_column!r}") if id_column else b""
    metadata = metadata_bytes({name: named[name] for name in metadata_columns}, where) if metadata_columns else b""
    return id, metadata


class ParquetFile(DocumentFile):
    """Documents in one column of text of a Parquet file. More columns may have any type."""

    suffixes = (".parquet",)
    noun = "Parquet files of text"
    example = "corpus/"
    documents = "Each row is a document."

    def _look(self) -> None:
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
            raise _without_text(facts, schema.names, _chats_in(path, schema))
        for name in self.more_columns:
            if name not in schema.names:
                raise ConvertError(f"{path}: no column {name!r} for its documents; its columns are: {named}")
        kind = schema.field(self.column).type
        text = kind.value_type if hasattr(kind, "index_type") else kind  # of a dictionary
        if str(text) not in ("string", "large_string", "string_view"):
            way = _way_of_type(path, self.column, str(kind))
            raise ConvertError(f"{path}: column {self.column!r}: expected text, found {kind}; {way}")
        for name in self.metadata_columns:
            kind = schema.field(name).type
            if has_binary(kind):
                raise ConvertError(
                    f"{path}: column {name!r}: expected values that JSON has, found {kind}; name another column"
                )

    def text_bytes(self, number: int) -> int:
        return self._text_bytes[number]

    def row_group(self, number: int) -> Iterator[Block]:
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
        parquet = require_package("pyarrow.parquet", "text")
        with open_file(self.path), _parquet_errors(self.path):  # a file that is not there is an OSError of its own
            return parquet.ParquetFile(self.path, memory_map=False, pre_buffer=False)


class JsonLinesFile(DocumentFile):
    """Documents in one field of the objects of a file of JSON lines, compressed (then one row group) or not."""

    suffixes = LINE_SUFFIXES
    noun = "JSON lines of text"
    example = "corpus.jsonl"
    documents = "Each line (.jsonl, .ndjson, .json, also .gz or .zst) is a document."

    def _look(self) -> None:
        self.num_row_groups = 1
        if not is_compressed(self.path):
            self.num_row_groups = max(1, -(-self.path.stat().st_size // ROW_GROUP_BYTES))
        with unpacked(self.path) as file:
            _require_utf8(file.read(ENCODING_MARK_BYTES), self.path)

    def row_group(self, number: int) -> Iterator[Block]:
        """Yield the documents of the lines that begin in one range of bytes."""
        yield from self._blocks(self.first_line(number), map(self._document, self.lines(number)))

    def first_line(self, number: int) -> int:
        """Return the number of the first line of a row group, counted from 1."""
        return self._groups[number][1]

    def lines(self, number: int) -> Iterator[bytes | bytearray]:
        """Yield the lines that begin in one range of bytes; `FormatError` for a damaged file."""
        stop = self._groups[number + 1][0] if number + 1 < self.num_row_groups else None
        with unpacked(self.path) as file:
            if number:
                file.seek(self._groups[number][0])
            yield from map(_without_mark, _lines_until(file, self.path, stop))

    def first_objects(self) -> Iterator[dict[str, Any]]:
        """Yield the object of each of the first lines that hold one."""
        with unpacked(self.path) as lines:
            for line in islice(lines_of(lines, self.path), SAMPLE_LINES):
                with suppress(ValueError, RecursionError):  # no JSON
                    found = parsed_json(_without_mark(line))
                    if isinstance(found, dict):
                        yield found

    def has_text(self, max_bytes: int) -> bool | None:
        """Return whether one of the first lines `may_have_text`; None: they do not, and more lines follow."""
        with unpacked(self.path) as file:
            for line in lines_of(file, self.path):
                if file.tell() > max_bytes:
                    return None
                with suppress(ValueError, RecursionError):  # no JSON
                    found = parsed_json(_without_mark(line))
                    if isinstance(found, dict) and self.may_have_text(found):
                        return True
        return False

    def may_have_text(self, found: Mapping[str, Any]) -> bool:
        """Return whether the object of a line has the key of the text, and no list in place of text."""
        return self.column in found and not isinstance(found[self.column], list)

    @kept_property
    def _groups(self) -> list[tuple[int, int]]:
        """The byte offset and the number of the first line of each row group: one pass over the file finds all."""
        groups = [(0, 1)]
        line = 1
        with unpacked(self.path) as file:
            for start in range(ROW_GROUP_BYTES, self.num_row_groups * ROW_GROUP_BYTES, ROW_GROUP_BYTES):
                while data := file.read(max(0, min(start - 1 - file.tell(), 1 << 20))):
                    line += data.count(b"\n")
                if file.tell() < start:  # else one line fills the group
                    line += next(lines_of(file, self.path), b"").count(b"\n")
                groups.append((file.tell(), line))
        return groups

    def __getstate__(self) -> dict[str, Any]:
        """Count the lines first: else each process that reads a part of the file would count them."""
        return self.__dict__ | {"_groups": self._groups}

    def _document(self, line: bytes | bytearray) -> Found:
        if line.isspace():
            return None
        try:
            text_of_line = line.decode("utf-8")
        except UnicodeDecodeError:
            return _flaw_of_bytes(line), ()
        if isinstance(line, bytearray):
            line.clear()
        try:
            value = parsed_json(text_of_line)
        except (ValueError, RecursionError):
            return _flaw_of_line(text_of_line.strip()), ()
        if not isinstance(value, dict):
            return Reason.IN_ARRAY if isinstance(value, list) else Reason.NO_OBJECT, ()
        more = tuple(value.get(name) for name in self.more_columns)
        text = value.get(self.column)
        if text is None:
            return Reason.MISSING, more
        return text if isinstance(text, str) and not isinstance(text, Digits) else Reason.NOT_TEXT, more


class PlainTextFile(DocumentFile):
    """A whole file of UTF-8 is one document, with its line ends unchanged."""

    suffixes = (".txt",)
    noun = "plain text files"
    example = "books/"
    documents = "Each file is a document, and must fit in memory."
    has_columns = False

    num_row_groups = 1

    def _look(self) -> None:
        _require_utf8(head_of(self.path, ENCODING_MARK_BYTES)[0], self.path)

    def row_group(self, number: int) -> Iterator[Block]:
        data = read_whole(self.path)
        try:
            text: str | Reason = _without_mark(data).decode("utf-8")
        except UnicodeDecodeError:
            text = _flaw_of_bytes(data)
        yield from self._blocks(1, [(text, ())])


#: The one table of what documents are read from; each kind has its command of `zb convert`.
FILE_KINDS: Final[dict[str, type[DocumentFile]]] = {
    "parquet": ParquetFile,
    "jsonl": JsonLinesFile,
    "text": PlainTextFile,
}


def open_documents(
    paths: Sequence[str | os.PathLike[str]],
    kind: str | None = None,
    column: str = "text",
    id_column: str = "",
    metadata_columns: Sequence[str] = (),
) -> list[DocumentFile]:
    """Open document files; folders are searched recursively, sorted by path.

    Parameters
    ----------
    paths
        Files and folders, in the order of their documents.
    kind
        One of `FILE_KINDS`: files may have any name, and those in folders its suffixes. None: each file is of the kind
        that has its suffix.
    column, id_column, metadata_columns
        As for `DocumentFile`.

    Raises
    ------
    ConvertError
        If a path has no such files, a file is named twice, or lacks a column.
    """
    from zb_hdf5.files.listing import require_named_once  # numpy, which help does not need

    kinds = list(FILE_KINDS.values()) if kind is None else [FILE_KINDS[kind]]
    files = [file for path in map(local_path, paths) for file in _files_of(path, kind, kinds)]
    require_named_once(files, "documents")
    opened = []
    for file in files:
        opener = next(each for each in kinds if kind or file.name.lower().endswith(each.suffixes))
        opened.append(opener(file, column, id_column, metadata_columns))
    _require_text_key(opened)
    return opened


def _files_of(path: Path, kind: str | None, kinds: Sequence[type[DocumentFile]]) -> list[Path]:
    """Return the files of a path that are of a kind; raise `ConvertError` if there are none, or files of another."""
    from zb_hdf5.files.listing import listed  # numpy, which help does not need
    from zb_hdf5.files.publishing import require_present

    require_present(path)
    suffixes = tuple(suffix for each in kinds for suffix in each.suffixes)
    found = listed(path, *suffixes).files
    if kind is None and not path.is_dir():
        found = tuple(file for file in found if file.name.lower().endswith(suffixes))
    others = []
    for name, each in FILE_KINDS.items():
        inside = found or listed(path, *each.suffixes).files
        if name != kind and any(file.name.lower().endswith(each.suffixes) for file in inside):
            others.append(name)
    is_mistaken = kind is not None and bool(others) and "parquet" in (kind, *others)  # text may have any name
    if found and not is_mistaken:
        return [*found]
    facts = f"{path}: expected files that end in {', '.join(suffixes)}"
    if not found:
        facts += ", found none"
    if not others:
        raise ConvertError(facts)
    facts += f"; {FILE_KINDS[others[0]].suffixes[0]} files are there"
    raise ConvertError(facts, remedy=Remedy.OTHER_KIND, at=others[0])


def _require_text_key(files: Sequence[DocumentFile]) -> None:
    """Raise `ConvertError` if no line of files of JSON lines has the key of the text; it names the others.

    The first lines of every file are looked at, and then all lines, up to a number of bytes.
    """
    lines = [file for file in files if isinstance(file, JsonLinesFile)]
    if len(lines) < len(files):
        return
    keys: dict[str, Any] = {}  # with a value of each
    for found in chain.from_iterable(file.first_objects() for file in lines):
        if lines[0].may_have_text(found):
            return
        keys |= {name: value for name, value in found.items() if value or name not in keys}
    if not keys:
        return
    share = SAMPLE_BYTES // len(lines)
    has_text = {file.has_text(share) for file in lines}
    if True not in has_text:
        raise _without_text_key(lines, keys, is_all=None not in has_text)


def _without_text_key(files: Sequence[JsonLinesFile], keys: Mapping[str, Any], *, is_all: bool) -> ConvertError:
    """Return the error of files of JSON lines without text under its key.

    Parameters
    ----------
    files
        The files.
    keys
        Their keys, with a value of each.
    is_all
        All lines were looked at, and not the first ones only.
    """
    path, column = files[0].path, files[0].column
    count = counted(len(files), "file")
    if column in keys:
        way = _way_of_lists(path, {column: keys[column]}) or "name another key"
        return ConvertError(f"{path}: key {column!r}: expected text in the lines of {count}, found lists; {way}")
    lack = f"no key {column!r} in the first lines of {count}"
    if is_all:
        lack = f"no documents in {count} (no key {column!r} in its lines)"
    shown = ", ".join([*keys][:KEYS_SHOWN])
    texts = [name for name, value in keys.items() if isinstance(value, str) or name in IDS_COLUMNS]
    chats = _first_of(keys, dict)
    if chats:
        return _without_text(f"{path}: {lack}; its keys are: {shown}", texts, of_chats(path, chats))
    if texts:
        return _without_text(f"{path}: {lack}", texts, remedy=Remedy.TEXT_COLUMN)
    return ConvertError(f"{path}: {lack}; {_way_of_lists(path, keys) or f'none of its keys has text: {shown}'}")


def _way_of_lists(path: Path, keys: Mapping[str, Any]) -> str:
    """Return the way from JSON lines whose keys have values that are chats, or ids; "": none are."""
    chats = _first_of(keys, dict)
    if chats:
        return of_chats(path, chats)
    ids = _first_of(keys, int)
    return _way_of_ids(path, ids) if ids else ""


def _first_of(keys: Mapping[str, Any], kind: type) -> str:
    """Return the first key whose value is a list that begins with an item of a type; "": none is."""
    lists = {name: value for name, value in keys.items() if isinstance(value, list) and value}
    return next((name for name, value in lists.items() if isinstance(value[0], kind)), "")


def _way_of_ids(path: Path, column: str) -> str:
    call = conversion_call(path, "stream", source_format="hf", ids_column=column)
    return f"column {column!r} has ids: {call}"


def _way_of_type(path: Path, column: str, kind: str) -> str:
    """Return the way from a column of Parquet that has no text, by its type."""
    if kind.startswith(CHAT_KINDS):
        return of_chats(path, column)
    return _way_of_ids(path, column) if IDS_KIND.fullmatch(kind.removeprefix("large_")) else "name another column"


def _chats_in(path: Path, schema: Any) -> str:
    """Return the way from the first column of chats of a Parquet file; "": it has none."""
    kinds = {name: str(schema.field(name).type) for name in schema.names}
    return next((of_chats(path, name) for name, kind in kinds.items() if kind.startswith(CHAT_KINDS)), "")


def _without_text(facts: str, names: Iterable[str], chats: str = "", remedy: Remedy | None = None) -> ConvertError:
    """Return the error of files without the column of the text, whose columns may have ids, or `chats` a way."""
    found = [*names]
    ids = next((name for name in IDS_COLUMNS if name in found), "")
    if ids:
        return ConvertError(facts, remedy=Remedy.IDS, at=ids)
    if chats:
        return ConvertError(f"{facts}; {chats}")
    return ConvertError(facts, remedy=remedy, at=", ".join(found[:KEYS_SHOWN]))


def unknown_columns(files: Sequence[DocumentFile]) -> list[str]:
    """Return the metadata columns that the first lines of all files of JSON lines lack."""
    columns = set[str]()
    keys = set[str]()
    for jsonl in (file for file in files if isinstance(file, JsonLinesFile) and file.metadata_columns):
        columns |= {*jsonl.metadata_columns}
        for found in jsonl.first_objects():
            keys |= found.keys()
    return sorted(columns - keys) if keys else []


def row_of_source(source: str | os.PathLike[str] | None, row: int | None) -> str:
    """Return "line 18 of a.jsonl", or "row 18 of a.parquet"; the number counts from 1, as it is stored."""
    endings = {each.lower() for each in Path(source or "").suffixes}
    unit = "line" if endings & {*SUFFIXES_OF_JSON_LINES, JSON_SUFFIX, ".txt"} else "row"
    return f"{unit} {row or 0:,} of {source}"


class Digits(str):
    """A whole number with more digits than Python converts: its text."""


def parsed_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text; a whole number of thousands of digits does not hide the text beside it."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # the limit of Python
        return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int | Digits:
    try:
        return int(digits)
    except ValueError:
        return Digits(digits)


def _without_mark(data: bytes | bytearray) -> bytes | bytearray:
    """Return text without the byte order marks of UTF-8 that it begins with: files that are joined keep theirs."""
    while data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    return data


def _require_utf8(head: bytes, path: Path) -> None:
    """Raise `FormatError` if a file begins with the mark of another encoding."""
    for mark, encoding in ENCODING_MARKS.items():
        if head.startswith(mark):
            reader = {GZIP_SUFFIX: "zcat", ZSTD_SUFFIX: "zstdcat"}.get(path.suffix.lower(), "cat")
            written = path.with_name(f"utf8-{path.stem if is_compressed(path) else path.name}")
            line = f"{reader} {shlex.quote(str(path))} | iconv -f {encoding} -t UTF-8 > {shlex.quote(str(written))}"
            raise FormatError(f"{path}: expected UTF-8, found {encoding} by its first bytes; convert it: {line}")


def _flaw_of_bytes(data: bytes | bytearray) -> Reason:
    """Return why bytes are no UTF-8."""
    return Reason.UTF_16 if data.count(0) > len(data) // NUL_SHARE else Reason.NOT_UTF8


def _flaw_of_line(line: str) -> Reason:
    """Return why a line is no JSON object."""
    if line.count("\0") > len(line) // NUL_SHARE:
        return Reason.UTF_16
    if line == "]" or line.startswith("["):
        return Reason.IN_ARRAY
    if line in ("{", "}", "},", "],"):
        return Reason.SPREAD
    try:
        value, end = json.JSONDecoder(parse_int=_whole_number).raw_decode(line)
    except (ValueError, RecursionError):
        return Reason.BAD_JSON
    rest = line[end:].lstrip()
    if isinstance(value, dict):
        return Reason.IN_ARRAY if rest == "," else Reason.SEVERAL if rest.startswith("{") else Reason.BAD_JSON
    return Reason.SPREAD if isinstance(value, str) and rest.startswith(":") else Reason.BAD_JSON


def _lines_until(file: BinaryIO, path: Path, stop: int | None) -> Iterator[bytes | bytearray]:
    """Yield the lines that begin before byte `stop`."""
    byte_offset = file.tell()
    for line in lines_of(file, path):
        if stop is not None and byte_offset >= stop:
            return
        byte_offset += len(line)
        yield line


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
