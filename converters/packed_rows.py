"""The packed rows of a document stream: what is read from it for each of them, in any order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5 import FormatError
from zb_hdf5.converters.packing import PACKINGS, Packing, pieces_of
from zb_hdf5.documents.document_table import DocumentFile, documents_name
from zb_hdf5.documents.document_writer import DocumentsWriter, join_documents
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.files.publishing import disk_errors
from zb_hdf5.loaders.order import Order
from zb_hdf5.spec import SHARD_PREFIX, TokenArray


class DocumentStream(Protocol):
    """The documents of one split, one after the other. Picklable.

    Attributes
    ----------
    split, num_tokens
        The name of the split, and the tokens of all its documents.
    """

    split: str
    num_tokens: int

    def documents(self) -> Iterable[DocumentFile]:
        """Open the tables of the documents, one after the other."""

    def read_into(self, name: str, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, ...)`, from token `start` on: with tokens (""), or with the values of a field."""


class PackedRows:
    """The rows of one split, read from its documents in any order. Picklable: the plan lies on disk beside them.

    Parameters
    ----------
    stream
        The documents.
    folder
        Where the plan is kept, and the table of all documents of the split.
    number
        Of the split.
    pad_id
        Fills what the pieces of a row leave of it.

    Attributes
    ----------
    table
        The table of the documents.
    documents
        How many documents begin in each row. Stays in this process.

    Raises
    ------
    FormatError
        If the documents of the stream are not all of its tokens.
    """

    def __init__(
        self, stream: DocumentStream, folder: Path, number: int, packing: str, seq_len: int, pad_id: int
    ) -> None:
        self._stream, self._pad_id, self._seq_len = stream, pad_id, seq_len
        self._table: DocumentFile | None = None
        self._prefix = folder / f"{SHARD_PREFIX}plan-{stream.split}"
        with DocumentsWriter(folder / documents_name(number)) as writer:
            join_documents(stream.documents(), writer)
            if writer.token_count != stream.num_tokens:
                raise FormatError(
                    f"the split {stream.split!r}: expected documents of {stream.num_tokens:,} tokens, found "
                    f"{writer.token_count:,}: tokens belong to no document; write the stream again"
                )
            self.table = writer.publish(stream.split)
        edges = self._edges().astype(np.int64)
        document_lengths = edges[1:] - edges[:-1]
        packed = PACKINGS[packing](document_lengths, seq_len)
        for name in ("offsets", "lengths", "first"):
            _save(self._plan_path(name), getattr(packed, name))
        self.num_rows, self.num_documents = packed.num_rows, len(document_lengths)
        self.tokens_kept, self.tokens_cropped = packed.tokens_kept, packed.tokens_cropped
        self.documents = packed.documents_begun(document_lengths)
        self._plan: Packing | None = None

    def _plan_path(self, name: str) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}-{name}.npy")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "documents": None, "_plan": None, "_table": None}

    def _edges(self) -> npt.NDArray[np.uint64]:
        """Return where each document begins in the stream, and the last one ends."""
        if self._table is None:
            self._table = DocumentFile(self.table.path)
        return self._table.offsets

    def tokens_in(self, rows: npt.NDArray[np.int64]) -> int:
        """Return how many tokens, padding aside, some rows hold."""
        pieces, _ = self._pieces_of(rows)
        return int(self._packing().lengths[pieces].sum())

    def gather_into(self, name: str, rows: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(len(rows), seq_len, ...)`, with rows in any order: tokens (""), or values of a field."""
        plan, seq_len = self._packing(), out.shape[1]
        pieces, counts = self._pieces_of(rows)
        lengths = plan.lengths[pieces]
        before = np.cumsum(lengths) - lengths
        in_row = np.repeat(np.arange(len(rows)), counts)
        columns = before - before[np.cumsum(counts) - counts][in_row]
        if int(lengths.sum()) < len(rows) * seq_len:
            self.fill(name, out)
        flat = out.reshape(-1, *out.shape[2:])
        places = (in_row * seq_len + columns).tolist()
        for offset, length, place in zip(plan.offsets[pieces].tolist(), lengths.tolist(), places, strict=True):
            self._stream.read_into(name, offset, flat[place : place + length])

    def fill(self, name: str, out: TokenArray) -> None:
        """Fill `out` with padding; the values of a field are 0 there."""
        out[...] = np.zeros((), out.dtype) if name else self._pad_id

    def read_pieces(self, rows: npt.NDArray[np.int64]) -> Pieces:
        """Return which parts of documents lie in some rows: what was packed is cut where a document begins."""
        plan = self._packing()
        packed, counts = self._pieces_of(rows)
        return pieces_of(plan.offsets[packed], plan.lengths[packed], counts, self._edges(), self._seq_len)

    def _pieces_of(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the pieces of some rows, in order, and how many each row has."""
        first = self._packing().first
        begin, counts = first[rows], first[rows + 1] - first[rows]
        return np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum()), counts

    def _packing(self) -> Packing:
        if self._plan is None:
            arrays = [np.load(self._plan_path(name), mmap_mode="r") for name in ("offsets", "lengths", "first")]
            offsets, lengths, first = (array.view(np.ndarray) for array in arrays)
            self._plan = Packing(offsets, lengths, first, 0)
        return self._plan


def _save(path: Path, array: npt.NDArray[np.int64]) -> None:
    """Write a `.npy` file. On a full disk numpy's own writer says neither which file nor why."""
    with disk_errors(path), open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array))


class SplitRows(NamedTuple):
    """One split of a store: its rows, in the order in which they are stored, and how many batches they fill."""

    split: str
    rows: PackedRows
    order: Order
    num_batches: int
