"""Writers of table files: columns that grow, in memory or in temporary files, and are published as one file."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from operator import index, le, lt
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import (
    CUSTOM,
    JSON,
    NO_SOURCE,
    TEXT_COLUMNS,
    DocumentRows,
    EncodeValue,
    EncodeValues,
    TableInfo,
    first_refused,
)
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.table_file import BUFFER_BYTES, table_digest
from zb_hdf5.errors import ArgumentError, ConvertError, FormatError
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.paths import local_path, on_failure
from zb_hdf5.files.publishing import PartialFile, disk_errors, replaced, write_fully
from zb_hdf5.hdf5.h5_attributes import CREATOR, create_attribute, create_texts
from zb_hdf5.hdf5.h5_chunks import creation_of
from zb_hdf5.hdf5.h5_file import open_h5
from zb_hdf5.hdf5.written_file import WrittenFile, hdf5_writes
from zb_hdf5.spec import (
    CRC32,
    DEFAULT_SPLIT,
    DOCUMENTS,
    HDF5_LIBVER,
    PIECES,
    TABLES,
    TABLES_ANCHOR_TOKENS,
    TABLES_ANCHORS,
    TABLES_BLOCK_BYTES,
    TABLES_FORMAT,
    TABLES_VERSION,
    pieces_path,
)

_JSON_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
#: Stands between values that are encoded together. If it is in one of them too, each is encoded alone.
_BETWEEN: Final = "\x1e"
_BETWEEN_TEXT: Final = b',"\\u001e",'


class _Column:
    """Rows on their way to a file: a few in memory, more in a file that has no name."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.num_rows = 0
        self._file = SpooledTemporaryFile(BUFFER_BYTES, dir=str(folder))  # noqa: SIM115 - closed with the column

    def append(self, rows: npt.NDArray[Any] | bytes | bytearray) -> None:
        data = np.ascontiguousarray(rows, self.dtype).data.cast("B") if isinstance(rows, np.ndarray) else rows
        self._file.write(data)
        self.num_rows += len(data) // self.dtype.itemsize

    def crc32(self) -> list[int]:
        """Return the crc32 of each block."""
        self._file.seek(0)
        return [crc32_of(block) for block in iter(partial(self._file.read, TABLES_BLOCK_BYTES), b"")]

    def copy_to(self, fd: int, offset: int) -> None:
        self._file.seek(0)
        while data := self._file.read(BUFFER_BYTES):
            write_fully(fd, data, offset)
            offset += len(data)

    def close(self) -> None:
        self._file.close()


class TableWriter:
    """Takes the rows of a table of one kind, and publishes them as one file that replaces another. Not thread-safe.

    Memory holds some MiB of each dataset; the rest waits in temporary files in the folder of the file, which have no
    names: a kill leaves nothing but a `.partial`. A context manager: leaving the block gives the rows up.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self.path = local_path(path)
        self.kind = kind
        self._columns: dict[str, _Column] = {}
        self._anchors = {name: column for name, column in TABLES_ANCHORS.items() if column in TABLES[kind]}

    def append(self, name: str, rows: npt.ArrayLike) -> None:
        """Append rows to the dataset of this name, 1-D; rows of a column with anchors ascend."""
        column = self._column(name)
        values = np.asarray(rows, column.dtype)
        if name in self._anchors and len(values):
            anchor = self.num_rows(self._anchors[name])
            limits = np.arange(anchor, int(values[-1]) // TABLES_ANCHOR_TOKENS + 1, dtype=np.uint64)
            found = values.searchsorted(limits * np.uint64(TABLES_ANCHOR_TOKENS))
            self._write(self._anchors[name], (found + column.num_rows).astype("<u8"))
        self._write(name, values)

    def append_texts(self, name: str, texts: Sequence[bytes]) -> None:
        """Append byte strings of any lengths to `name`, and the end of each of them to `<name>_ends`."""
        self.append_joined_texts(name, b"".join(texts), np.fromiter(map(len, texts), np.int64, len(texts)))

    def append_joined_texts(self, name: str, data: bytes | bytearray, lengths: npt.NDArray[np.int64]) -> None:
        """Append byte strings that are joined, and have these lengths."""
        self.append(f"{name}_ends", np.uint64(self.num_rows(name)) + np.cumsum(lengths, dtype=np.uint64))
        self._write(name, data)

    def num_rows(self, name: str) -> int:
        """Return the rows of a dataset so far."""
        return self._columns[name].num_rows if name in self._columns else 0

    def publish(self, **attributes: str | int) -> TableInfo:
        """Write the file, with these attributes of its root group, and give it its name."""
        with replaced(self.path) as file:
            return self.write_to(file, **attributes)

    def write_to(self, file: PartialFile, **attributes: str | int) -> TableInfo:
        """Write all rows to a file that gets its name later, with these attributes of its root group."""
        for name, anchors in self._anchors.items():
            if name in self._columns:
                self._write(anchors, np.array([self.num_rows(name)], "<u8"))
        crc32 = np.array([value for name in sorted(self._columns) for value in self._columns[name].crc32()], "<u4")
        facts = {name: (column.dtype.str, column.num_rows) for name, column in self._columns.items()}
        self._write(CRC32, crc32)
        sha256 = table_digest(self.kind, attributes, facts, crc32)
        with closing(self):
            for name, offset in self._lay_out(file, {**attributes, "sha256": sha256}).items():
                self._columns[name].copy_to(file.fd, offset)
            num_bytes = os.fstat(file.fd).st_size
        return TableInfo(num_bytes, sha256)

    def _lay_out(self, file: PartialFile, attributes: Mapping[str, str | int]) -> dict[str, int]:
        """Make the file without its rows; return the offset of the rows of each dataset.

        The offsets are multiples of 8: at others numpy would copy a whole mapped array for one search in it.
        """
        layout = {"libver": HDF5_LIBVER, "alignment_threshold": 1, "alignment_interval": 8}
        with hdf5_writes(file.partial_path):
            written = WrittenFile(open_h5(file.own_path, "w", locking=False, **layout))
            with on_failure(lambda: written.close(has_failed=True)):
                offsets = self._create_objects(written, attributes)
                written.h5.close()
        return offsets

    def _create_objects(self, written: WrittenFile, attributes: Mapping[str, str | int]) -> dict[str, int]:
        """Make all objects of the file; return the offset of the rows of each dataset."""
        h5 = written.h5
        texts = {name: value for name, value in attributes.items() if isinstance(value, str)}
        numbers = {name: value for name, value in attributes.items() if not isinstance(value, str)}
        root = h5["/"]
        create_texts(root, format=TABLES_FORMAT, creator=CREATOR, kind=self.kind, **texts)
        create_attribute(root, "format_version", TABLES_VERSION, "<u4")
        for name, value in sorted(numbers.items()):  # the bytes of a file depend on the order
            create_attribute(root, name, value, "<u8")
        how = {"fill_time": "never", "dcpl": creation_of()}
        offsets = {}
        for name, column in sorted(self._columns.items()):
            stored = h5.create_dataset(name, (column.num_rows,), column.dtype, **how)
            written.objects.append(stored)
            if column.num_rows:
                offsets[name] = stored.id.get_offset()
        return offsets

    def _column(self, name: str) -> _Column:
        if name not in self._columns:
            self._columns[name] = _Column(self.path.parent, TABLES[self.kind][name])
        return self._columns[name]

    def _write(self, name: str, rows: npt.NDArray[Any] | bytes | bytearray) -> None:
        with disk_errors(self.path):  # the file that a column goes on in has no name
            self._column(name).append(rows)

    def close(self) -> None:
        """Give up the rows."""
        for column in self._columns.values():
            column.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PiecesWriter(TableWriter):
    """Takes the pieces of records in order, for the file of batches at `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(pieces_path(path), PIECES)

    def append_pieces(self, pieces: Pieces) -> None:
        """Append the pieces of consecutive records."""
        self.append("ends", pieces.ends[1:].astype(np.uint64) + np.uint64(self.num_rows("offsets")))
        self.append("columns", pieces.columns)
        self.append("offsets", pieces.offsets)


# --- the documents of a stream, a store or a lone file ----------------------------------------------------------------

#: Columns of some documents -> the value for one that has none; None: the end of the text before.
_NOTHING: Final = {"source": NO_SOURCE, "row": 0, **{f"{name}_ends": None for name in TEXT_COLUMNS}}
#: Documents that wait to be appended together, unless the values of their spans take more bytes than this.
WAITING_DOCUMENTS: Final = 1 << 10
WAITING_BYTES: Final = 8 << 20


class EncodedSpans(NamedTuple):
    """The spans of one document: 64-bit starts, stops and lengths of their encoded values, and the values joined."""

    starts: array[int]
    stops: array[int]
    lengths: array[int]
    data: bytes


class DocumentsWriter(TableWriter):
    """Takes documents in order, and publishes their table at `path`. Not thread-safe.

    `spans_codec` is the stored name of the encoding of the values of spans; `count` and `token_count` are the documents
    and tokens so far.
    """

    def __init__(self, path: str | os.PathLike[str], spans_codec: str = "json") -> None:
        super().__init__(path, DOCUMENTS)
        self.append("offsets", [0])
        self.spans_codec = spans_codec
        self._sources: dict[str, int] = {}
        self._names: Sequence[str] = ()
        self._own = np.array([NO_SOURCE], np.uint32)
        self._span_stop = 0
        self.count = self.token_count = self._waiting_bytes = 0
        self._waiting: list[tuple[int, bytes, bytes, EncodedSpans | None]] = []

    @property
    def has_more(self) -> bool:
        """Whether there is more than the offsets of the documents."""
        self._take_waiting()
        return any(self.num_rows(name) for name in (*_NOTHING, "span_starts"))

    def append_documents(self, lengths: npt.ArrayLike, rows: DocumentRows | None = None) -> None:
        """Append documents of these lengths."""
        self._take_waiting()
        sizes = np.asarray(lengths, np.int64)
        rows = rows or DocumentRows()
        for name, values in (("source", self._numbers(rows)), ("row", rows.rows)):
            if values is not None:
                self._fill(name)
                self.append(name, values)
        for name, texts in zip(TEXT_COLUMNS, (rows.ids, rows.metadata), strict=True):
            if texts is not None:
                self._fill(f"{name}_ends")
                self.append_texts(name, texts)
        if rows.spans is not None:
            base = np.uint64(self.token_count)
            self.append_spans(rows.spans.starts + base, rows.spans.stops + base, rows.spans.values)
        self.append("offsets", self.token_count + np.cumsum(sizes))
        self.count += len(sizes)
        self.token_count += int(sizes.sum())

    def add(self, length: int, text: bytes = b"", metadata: bytes = b"", spans: EncodedSpans | None = None) -> None:
        """Append one document; it waits for others, since rows are moved faster together.

        Parameters
        ----------
        length
            Tokens of the document.
        text
            The UTF-8 of its id; empty: it has none.
        metadata
            The text of a JSON object; empty: it has none.
        spans
            Its spans, counted from its first token; None: it has none.
        """
        self._waiting.append((length, text, metadata, spans))
        self._waiting_bytes += len(spans.data) if spans else 0
        if len(self._waiting) == WAITING_DOCUMENTS or self._waiting_bytes > WAITING_BYTES:
            self._take_waiting()

    def _take_waiting(self) -> None:
        waiting = self._waiting
        self._waiting = []
        self._waiting_bytes = 0
        if not waiting:
            return
        lengths, ids, metadata, spans = zip(*waiting, strict=True)
        firsts = self.token_count + np.cumsum((0, *lengths[:-1]))
        rows = DocumentRows(ids=ids if any(ids) else None, metadata=metadata if any(metadata) else None)
        self.append_documents(lengths, rows)
        if any(spans):
            bases = firsts.repeat([len(each.starts) if each else 0 for each in spans])
            *columns, data = (b"".join(column) for column in zip(*filter(None, spans), strict=True))
            starts, stops, sizes = (np.frombuffer(column, np.int64) for column in columns)
            self._append_spans(bases + starts, bases + stops, sizes, data)

    def _numbers(self, rows: DocumentRows) -> npt.NDArray[np.uint32] | None:
        """Return the sources of some documents by the numbers that they have in this table."""
        if rows.sources is None:
            return None
        if rows.names is not self._names:  # the next rows have the same ones, as a rule
            self._names = rows.names
            known = [self._sources.setdefault(name, len(self._sources)) for name in rows.names]
            self._own = np.array([*known, NO_SOURCE], np.uint32)
        return self._own[np.minimum(rows.sources, len(self._own) - 1)]

    def append_spans(self, starts: npt.NDArray[Any], stops: npt.NDArray[Any], values: Sequence[bytes]) -> None:
        """Append spans after all earlier ones: their offsets in the document stream, and their encoded values."""
        self._append_spans(starts, stops, np.fromiter(map(len, values), np.int64, len(values)), b"".join(values))

    def _append_spans(
        self, starts: npt.NDArray[Any], stops: npt.NDArray[Any], lengths: npt.NDArray[np.int64], data: bytes
    ) -> None:
        if len(starts) == 0:
            return
        befores = np.concatenate([np.array([self._span_stop], starts.dtype), stops[:-1]])
        # a gap is a span without bytes, before each span that does not begin where the last one ends
        gaps = (befores < starts) & ((np.arange(len(starts)) > 0) | (self._span_stop > 0))
        kept = np.stack([gaps, np.ones_like(gaps)], axis=1)
        self.append("span_starts", np.stack([befores, starts], axis=1)[kept])
        self.append_joined_texts("span_values", data, np.stack([np.zeros_like(lengths), lengths], axis=1)[kept])
        self._span_stop = int(stops[-1])

    def _fill(self, name: str) -> None:
        """Give the documents before no value in a column."""
        missing = self.count - self.num_rows(name)
        nothing = _NOTHING[name]
        if nothing is None:
            nothing = self.num_rows(name.removesuffix("_ends"))
        self.append(name, np.full(missing, nothing, np.uint64))

    def write_to(self, file: PartialFile, **attributes: str | int) -> TableInfo:
        """Write the file; `tokens_sha256` is the digest of the one file that the table belongs to, "" in a store."""
        self._take_waiting()
        for name in _NOTHING:
            if self.num_rows(name):
                self._fill(name)
        if self._sources:
            self.append_texts("sources", [name.encode("utf-8", "surrogateescape") for name in self._sources])
        if self._span_stop:
            self.append("span_starts", [self._span_stop])
            self.append_texts("span_values", [b""])
        known = {"split": DEFAULT_SPLIT, "spans_codec": self.spans_codec, "tokens_sha256": ""}
        return super().write_to(file, **known | attributes)

    def take_codec(self, codec: str, path: Path) -> None:
        """Take over the encoding of the spans that follow; `FormatError` if earlier spans have another one."""
        if self._span_stop and codec != self.spans_codec:
            raise FormatError(
                f"{path}: expected spans encoded as {self.spans_codec!r}, found {codec!r}: tables of several encodings "
                "cannot become one; keep them in stores of their own"
            )
        self.spans_codec = codec


def encoded_spans(
    spans: Sequence[tuple[int, int, object]], num_tokens: int, encode: EncodeValues, where: str
) -> EncodedSpans:
    """Check the spans of one document, and encode their values.

    It works on whole lists, since a loop over the spans takes as long as to write the tokens.

    Parameters
    ----------
    spans
        (start, stop, value) of each span, at least one.
    num_tokens
        Tokens of the document.
    encode
        Encodes any number of values.
    where
        Begins the message of an error.
    """
    try:
        starts, stops, given = zip(*spans, strict=True)
        first_tokens = array("q", starts)
        ends = array("q", stops)
        inside = starts[0] >= 0 and stops[-1] <= num_tokens
        ascend = all(map(lt, starts, stops)) and all(map(le, stops, starts[1:]))
    except (TypeError, ValueError, OverflowError):
        inside = ascend = False
    if not (inside and ascend):
        _refuse_spans(spans, num_tokens, where)
    try:
        values = encode(given)
    except Exception as error:  # whatever an encoder of the user raises
        number = first_refused(encode, given)
        raise ConvertError(
            f"{where}: the value of span {number:,} cannot be encoded: {error}; choose another spans_codec"
        ) from error
    if not all(values) or set(map(type, values)) != {bytes}:
        number, refused = next((k, v) for k, v in enumerate(values) if not v or type(v) is not bytes)
        raise ConvertError(
            f"{where}: the value of span {number:,} must be encoded to bytes, at least one, found {refused!r}; "
            "leave the span out, or choose another spans_codec"
        )
    return EncodedSpans(first_tokens, ends, array("q", map(len, values)), b"".join(values))


def _refuse_spans(spans: Sequence[tuple[int, int, object]], num_tokens: int, where: str) -> None:
    """Raise `ArgumentError` for the first wrong span: malformed, empty, outside of its document, or out of order."""
    before = 0
    for number, span in enumerate(spans):
        try:
            start, stop, _ = span
            is_good = before <= index(start) < index(stop) <= num_tokens
        except (TypeError, ValueError):
            is_good = False
        if not is_good:
            raise ArgumentError(
                f"{where}: span {number:,}: expected (start, stop, value) with whole numbers, {before:,} <= start < "
                f"stop <= {num_tokens:,}, found {span!r:.80}; they must ascend and not overlap: give a list as a value"
            )
        before = stop


def value_encoder(codec: str | EncodeValue) -> tuple[str, EncodeValues]:
    """Return the stored name of an encoding, "json" or "custom", and the function that encodes any number of values."""
    if callable(codec):
        return CUSTOM, lambda values: list(map(codec, values))
    if codec not in (JSON, CUSTOM):
        raise ArgumentError(f"spans_codec must be 'json' or a function that returns bytes, found {codec!r}")
    if codec == JSON:
        return JSON, _json_texts
    return CUSTOM, list


def _json_texts(values: Sequence[Any]) -> list[bytes]:
    """Encode many values in one call: half the time of a call for each."""
    encode = _JSON_ENCODER.encode
    separated: list[Any] = [_BETWEEN] * (2 * len(values) - 1)
    separated[::2] = values
    texts = encode(separated).encode("utf-8")[1:-1].split(_BETWEEN_TEXT)
    if len(texts) == len(values):
        return texts
    return [encode(value).encode("utf-8") for value in values]
