"""Writes document tables, and puts several together."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from contextlib import closing
from operator import index, le, lt
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document import TableInfo
from zb_hdf5.documents.document_table import NO_SOURCE, TEXT_COLUMNS, DocumentFile, DocumentRows, documents_path
from zb_hdf5.documents.spans import EncodeAll, first_refused
from zb_hdf5.documents.table_file import TableWriter
from zb_hdf5.errors import ArgumentError, ConvertError, FormatError
from zb_hdf5.spec import DEFAULT_SPLIT, DOCUMENTS

#: The values of a column for the documents that have none.
_NOTHING: Final = {"source": NO_SOURCE, "row": 0}
#: Documents that are moved from table to table at once.
BLOCK_DOCUMENTS: Final = 1 << 14
#: Documents that wait to be appended together, unless the values of their spans take more bytes than this.
WAITING_DOCUMENTS: Final = 1 << 10
WAITING_BYTES: Final = 8 << 20


class EncodedSpans(NamedTuple):
    """Spans as they are stored: 64-bit starts, stops and lengths of values, and the values one behind the other."""

    starts: array[int]
    stops: array[int]
    lengths: array[int]
    data: bytes | bytearray


class DocumentsWriter:
    """Takes documents in order, and publishes their table at `path`. Not thread-safe.

    `spans_codec` is the stored name of the encoding of the values of spans; `count` and `token_count` are those so far.
    """

    def __init__(self, path: str | os.PathLike[str], spans_codec: str = "json") -> None:
        self._table, self.spans_codec = TableWriter(path, DOCUMENTS), spans_codec
        self._table.append("offsets", [0])
        self._sources: dict[str, int] = {}
        self._names: Sequence[str] = ()
        self._own = np.array([NO_SOURCE], np.uint32)
        self._span_stop = 0
        self.count = self.token_count = 0
        self._waiting: list[tuple[int, bytes, bytes]] = []  # length, id and metadata of each document
        self._waiting_tokens = 0
        self._forget_waiting_spans()

    @property
    def path(self) -> Path:
        """The file to publish."""
        return self._table.path

    @property
    def has_more(self) -> bool:
        """Whether there is more than the offsets of the documents."""
        self._take_waiting()
        return any(self._table.num_rows(name) for name in (*_NOTHING, "ids_ends", "metadata_ends", "span_starts"))

    @property
    def has_spans(self) -> bool:
        """Whether a document has had a span."""
        return self._span_stop > 0

    def append(self, lengths: npt.ArrayLike, rows: DocumentRows | None = None) -> None:
        """Append documents of these lengths."""
        self._take_waiting()
        sizes, rows = np.asarray(lengths, np.int64), rows or DocumentRows()
        for name, values in (("source", self._numbers(rows)), ("row", rows.rows)):
            if values is not None:
                self._fill(name)
                self._table.append(name, values)
        for name, texts in (("ids", rows.ids), ("metadata", rows.metadata)):
            if texts is not None:
                self._fill(name)
                self._table.append_texts(name, texts)
        if rows.spans is not None:
            base = np.uint64(self.token_count)
            self.append_spans(rows.spans.starts + base, rows.spans.stops + base, rows.spans.values)
        self._table.append("offsets", self.token_count + np.cumsum(sizes))
        self.count += len(sizes)
        self.token_count += int(sizes.sum())

    def add(self, length: int, text: bytes = b"", metadata: bytes = b"", spans: EncodedSpans | None = None) -> None:
        """Append one document; it waits for others, since rows are moved faster together.

        `text` is the UTF-8 of its id, `metadata` the text of a JSON object; its spans count from its first token.
        """
        if spans is not None:
            starts, stops, lengths, data = self._waiting_spans
            # at once: thousands of small values that wait for each other leave the processor's cache
            starts += spans.starts
            stops += spans.stops
            lengths += spans.lengths
            data += spans.data
            self._bases.append((self.token_count + self._waiting_tokens, len(spans.starts)))
        self._waiting.append((length, text, metadata))
        self._waiting_tokens += length
        if len(self._waiting) == WAITING_DOCUMENTS or len(self._waiting_spans.data) > WAITING_BYTES:
            self._take_waiting()

    def _take_waiting(self) -> None:
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        if not waiting:
            return
        lengths, ids, metadata = zip(*waiting, strict=True)
        self.append(lengths, DocumentRows(ids=ids if any(ids) else None, metadata=metadata if any(metadata) else None))
        if self._bases:
            bases = np.repeat(*np.array(self._bases).T)
            *columns, data = self._waiting_spans
            starts, stops, sizes = (np.frombuffer(column, np.int64) for column in columns)
            self._append_spans(bases + starts, bases + stops, sizes, data)
            self._forget_waiting_spans()

    def _forget_waiting_spans(self) -> None:
        self._waiting_spans = EncodedSpans(array("q"), array("q"), array("q"), bytearray())
        self._bases: list[tuple[int, int]] = []  # first token of each document that has some, and how many

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
        """Append spans behind all earlier ones: their offsets in the document stream, and their encoded values."""
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        self._append_spans(starts, stops, lengths, b"".join(values))

    def _append_spans(
        self,
        starts: npt.NDArray[Any],
        stops: npt.NDArray[Any],
        lengths: npt.NDArray[np.int64],
        data: bytes | bytearray,
    ) -> None:
        if len(starts) == 0:
            return
        befores = np.concatenate([np.array([self._span_stop], starts.dtype), stops[:-1]])
        # a gap is a span without bytes: one lies before each span that does not begin where the last one ends
        gaps = (befores < starts) & ((np.arange(len(starts)) > 0) | (self._span_stop > 0))
        kept = np.stack([gaps, np.ones_like(gaps)], axis=1)
        self._table.append("span_starts", np.stack([befores, starts], axis=1)[kept])
        self._table.append_joined_texts("span_values", data, np.stack([np.zeros_like(lengths), lengths], axis=1)[kept])
        self._span_stop = int(stops[-1])

    def _fill(self, name: str) -> None:
        """Give the documents before no value in a column."""
        if name in TEXT_COLUMNS:
            missing = self.count - self._table.num_rows(f"{name}_ends")
            self._table.append(f"{name}_ends", np.full(missing, self._table.num_rows(name), np.uint64))
        else:
            self._table.append(name, np.full(self.count - self._table.num_rows(name), _NOTHING[name], np.uint64))

    def publish(self, split: str = DEFAULT_SPLIT, tokens_sha256: str = "") -> TableInfo:
        """Write the file; `tokens_sha256` is that of the one file that the table belongs to, "" in a store."""
        self._take_waiting()
        for name in (*_NOTHING, *TEXT_COLUMNS):
            if self._table.num_rows(f"{name}_ends" if name in TEXT_COLUMNS else name):
                self._fill(name)
        if self._sources:
            self._table.append_texts("sources", [name.encode("utf-8", "surrogateescape") for name in self._sources])
        if self._span_stop:
            self._table.append("span_starts", [self._span_stop])
            self._table.append_texts("span_values", [b""])
        return self._table.publish(split=split, spans_codec=self.spans_codec, tokens_sha256=tokens_sha256)

    def close(self) -> None:
        """Give up the documents that were not published."""
        self._table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join_documents(files: Iterable[DocumentFile], writer: DocumentsWriter) -> None:
    """Append the documents of several tables with all their facts, and close each when it is done.

    Values of spans are moved as they are stored; `FormatError` where tables of several encodings have some.
    """
    for file in files:
        with closing(file):
            _append_file(file, writer)


def write_joined(tables: Sequence[Path], path: Path, split: str, tokens_sha256: str) -> None:
    """Make one table of several for the one file that has their tokens; of none, remove that of an earlier file."""
    if not tables:
        documents_path(path).unlink(missing_ok=True)
        return
    with DocumentsWriter(documents_path(path)) as writer:
        join_documents(map(DocumentFile, tables), writer)
        writer.publish(split, tokens_sha256)


def _append_file(file: DocumentFile, writer: DocumentsWriter) -> None:
    edges = file.offsets.astype(np.int64)
    for start in range(0, len(edges) - 1, BLOCK_DOCUMENTS):
        stop = min(start + BLOCK_DOCUMENTS, len(edges) - 1)
        rows = file.rows(start, stop)
        if rows.spans and rows.spans.values and file.spans_codec != writer.spans_codec:
            if writer.has_spans:
                raise FormatError(
                    f"{file.path}: expected spans encoded as {writer.spans_codec!r}, found {file.spans_codec!r}: "
                    "tables of several encodings cannot become one; keep them in stores of their own"
                )
            writer.spans_codec = file.spans_codec
        writer.append(np.diff(edges[start : stop + 1]), rows)


def encoded_spans(
    spans: Sequence[tuple[int, int, object]], num_tokens: int, encode: EncodeAll, where: str
) -> EncodedSpans:
    """Check the spans of one document, and encode their values."""
    # whole lists at once: a loop over the spans takes as long as to write the tokens
    try:
        starts, stops, given = zip(*spans, strict=True)
        first_tokens, ends = array("q", starts), array("q", stops)
    except (TypeError, ValueError, OverflowError):
        _refuse_places(spans, num_tokens, where)
        raise
    inside = all(map(lt, starts, stops)) and starts[0] >= 0 and stops[-1] <= num_tokens
    if not inside or not all(map(le, stops, starts[1:])):
        _refuse_places(spans, num_tokens, where)
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


def _refuse_places(spans: Sequence[tuple[int, int, object]], num_tokens: int, where: str) -> None:
    """Raise `ArgumentError` for the first span that is none, empty, outside of its document or not behind the last."""
    before = 0
    for number, span in enumerate(spans):
        try:
            start, stop = map(index, span[:2])
            _, _, _ = span
        except (TypeError, ValueError):
            raise ArgumentError(
                f"{where}: span {number:,}: expected (start, stop, value) with whole numbers, found {span!r:.80}"
            ) from None
        if not before <= start < stop <= num_tokens:
            inside = 0 <= start < stop <= num_tokens
            advice = "spans must ascend and not overlap: give a list as the value of one span"
            advice = advice if inside else f"expected 0 <= start < stop <= {num_tokens:,}"
            raise ArgumentError(f"{where}: span {number:,} is tokens {start:,} to {stop:,}: {advice}")
        before = stop
