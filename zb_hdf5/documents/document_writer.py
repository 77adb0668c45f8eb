"""Writes document tables, and puts several together."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from contextlib import closing
from operator import index, le, lt
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document import EncodeAll, TableInfo, first_refused
from zb_hdf5.documents.document_table import NO_SOURCE, TEXT_COLUMNS, DocumentFile, DocumentRows, documents_path
from zb_hdf5.documents.table_file import TableWriter
from zb_hdf5.errors import ArgumentError, ConvertError, FormatError
from zb_hdf5.spec import DEFAULT_SPLIT, DOCUMENTS

#: Columns of some documents -> the value for one that has none; None: the end of the text before.
_NOTHING: Final = {"source": NO_SOURCE, "row": 0, **{f"{name}_ends": None for name in TEXT_COLUMNS}}
#: Documents that are moved from table to table at once.
BLOCK_DOCUMENTS: Final = 1 << 14
#: Documents that wait to be appended together, unless the values of their spans take more bytes than this.
WAITING_DOCUMENTS: Final = 1 << 10
WAITING_BYTES: Final = 8 << 20


class EncodedSpans(NamedTuple):
    """The spans of one document as they are stored: 64-bit starts, stops and lengths of values, and these joined."""

    starts: array[int]
    stops: array[int]
    lengths: array[int]
    data: bytes


class DocumentsWriter(TableWriter):
    """Takes documents in order, and publishes their table at `path`. Not thread-safe.

    `spans_codec` is the stored name of the encoding of the values of spans; `count` and `token_count` are those so far.
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
        sizes, rows = np.asarray(lengths, np.int64), rows or DocumentRows()
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

        `text` is the UTF-8 of its id, `metadata` the text of a JSON object; its spans count from its first token.
        """
        self._waiting.append((length, text, metadata, spans))
        self._waiting_bytes += len(spans.data) if spans else 0
        if len(self._waiting) == WAITING_DOCUMENTS or self._waiting_bytes > WAITING_BYTES:
            self._take_waiting()

    def _take_waiting(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
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
        """Append spans behind all earlier ones: their offsets in the document stream, and their encoded values."""
        self._append_spans(starts, stops, np.fromiter(map(len, values), np.int64, len(values)), b"".join(values))

    def _append_spans(
        self, starts: npt.NDArray[Any], stops: npt.NDArray[Any], lengths: npt.NDArray[np.int64], data: bytes
    ) -> None:
        if len(starts) == 0:
            return
        befores = np.concatenate([np.array([self._span_stop], starts.dtype), stops[:-1]])
        # a gap is a span without bytes: one lies before each span that does not begin where the last one ends
        gaps = (befores < starts) & ((np.arange(len(starts)) > 0) | (self._span_stop > 0))
        kept = np.stack([gaps, np.ones_like(gaps)], axis=1)
        self.append("span_starts", np.stack([befores, starts], axis=1)[kept])
        self.append_joined_texts("span_values", data, np.stack([np.zeros_like(lengths), lengths], axis=1)[kept])
        self._span_stop = int(stops[-1])

    def _fill(self, name: str) -> None:
        """Give the documents before no value in a column."""
        nothing, missing = _NOTHING[name], self.count - self.num_rows(name)
        if nothing is None:
            nothing = self.num_rows(name.removesuffix("_ends"))
        self.append(name, np.full(missing, nothing, np.uint64))

    def publish(self, **attributes: str | int) -> TableInfo:
        """Write the file; `tokens_sha256` is that of the one file that the table belongs to, "" in a store."""
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
        return super().publish(**known | attributes)

    def append_files(self, files: Iterable[DocumentFile]) -> None:
        """Append the documents of other tables with all their facts, and close each when it is done.

        Values of spans are moved as they are stored; `FormatError` where tables of several encodings have some.
        """
        for file in files:
            with closing(file):
                edges = file.offsets.astype(np.int64)
                for start in range(0, len(edges) - 1, BLOCK_DOCUMENTS):
                    stop = min(start + BLOCK_DOCUMENTS, len(edges) - 1)
                    rows = file.rows(start, stop)
                    if rows.spans and rows.spans.values:
                        self._take_codec(file)
                    self.append_documents(np.diff(edges[start : stop + 1]), rows)

    def _take_codec(self, file: DocumentFile) -> None:
        if self._span_stop and file.spans_codec != self.spans_codec:
            raise FormatError(
                f"{file.path}: expected spans encoded as {self.spans_codec!r}, found {file.spans_codec!r}: "
                "tables of several encodings cannot become one; keep them in stores of their own"
            )
        self.spans_codec = file.spans_codec


def write_joined(tables: Sequence[Path], path: Path, split: str, tokens_sha256: str) -> None:
    """Make one table of several for the one file that has their tokens; of none, remove that of an earlier file."""
    if not tables:
        documents_path(path).unlink(missing_ok=True)
        return
    with DocumentsWriter(documents_path(path)) as writer:
        writer.append_files(map(DocumentFile, tables))
        writer.publish(split=split, tokens_sha256=tokens_sha256)


def encoded_spans(
    spans: Sequence[tuple[int, int, object]], num_tokens: int, encode: EncodeAll, where: str
) -> EncodedSpans:
    """Check the spans of one document, and encode their values."""
    # whole lists at once: a loop over the spans takes as long as to write the tokens
    try:
        starts, stops, given = zip(*spans, strict=True)
        first_tokens, ends = array("q", starts), array("q", stops)
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
    """Raise `ArgumentError` for the first span that is none, empty, outside of its document or not behind the last."""
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
