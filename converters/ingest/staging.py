"""Tokenized text on its way to a store: raw token files in a `.partial/` folder, and the packed rows made of them."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.ingest.packing import PACKINGS, Packing, pieces_of
from zb_hdf5.converters.ingest.routing import DocumentCounts
from zb_hdf5.converters.ingest.text_plan import FinishedTokens, TokenizeTask, combined
from zb_hdf5.converters.pipeline.task import Progress, no_progress
from zb_hdf5.converters.sources.open_files import OpenFiles
from zb_hdf5.converters.sources.source import TokenCounts
from zb_hdf5.core.order import Order
from zb_hdf5.core.pieces import Pieces
from zb_hdf5.core.publishing import naming
from zb_hdf5.formats.document_writer import DocumentsWriter, join_documents
from zb_hdf5.formats.documents import DocumentFile, documents_path
from zb_hdf5.spec import DOCUMENTS_PREFIX, SHARD_PREFIX, TokenArray


class StagingFile(NamedTuple):
    """Tokenized documents on disk: raw tokens, and beside them the table of the documents."""

    path: Path
    split: str
    num_tokens: int
    token_counts: TokenCounts


def staging_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """Return where a staging file is, and the table of its documents."""
    path = folder / f"{SHARD_PREFIX}{number:05}.tokens"
    return path, documents_path(path)


def write_staging_file(task: TokenizeTask, progress: Progress = no_progress) -> FinishedTokens:
    """Tokenize the documents of one staging file."""
    counts, digest = DocumentCounts(), hashlib.sha256()
    path, table = task.paths
    with naming(path), open(path, "wb") as tokens, DocumentsWriter(table) as documents:
        for encoded in task.encode(counts, progress):
            data = encoded.tokens.astype(task.dtype)
            tokens.write(data)
            digest.update(data)
            documents.append(encoded.lengths, encoded.rows())
        tokens.flush()
        os.fsync(tokens.fileno())
        documents.publish(task.shard.split)
    with open(table, "rb") as written:
        return FinishedTokens(documents.token_count, counts, combined([digest, hashlib.file_digest(written, "sha256")]))


class PackedRows:
    """The rows of one split, read from its staging files in any order. Picklable: the plan lies on disk beside them.

    Parameters
    ----------
    files
        Those of this split: together one stream of documents.
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
    """

    def __init__(
        self,
        files: Sequence[StagingFile],
        folder: Path,
        number: int,
        packing: str,
        seq_len: int,
        dtype: np.dtype[Any],
        pad_id: int,
    ) -> None:
        self._open_files, self._dtype, self._pad_id = OpenFiles([file.path for file in files]), dtype, pad_id
        self._starts = [0, *accumulate(file.num_tokens for file in files)]
        self._table: DocumentFile | None = None
        self._prefix = folder / f"{SHARD_PREFIX}plan-{files[0].split}"
        with DocumentsWriter(folder / f"{DOCUMENTS_PREFIX}{number:05}.h5") as writer:
            join_documents([documents_path(file.path) for file in files], writer)
            self.table = writer.publish(files[0].split)
        edges = self._edges().astype(np.int64)
        document_lengths = edges[1:] - edges[:-1]
        self._seq_len = seq_len
        packed = PACKINGS[packing](document_lengths, seq_len)
        for name in ("offsets", "lengths", "first"):
            _save(self._plan_path(name), getattr(packed, name))
        self.num_rows = packed.num_rows
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

    def gather_into(self, rows: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(len(rows), seq_len)`, with rows in any order."""
        plan, seq_len = self._packing(), out.shape[1]
        pieces, counts = self._pieces_of(rows)
        lengths = plan.lengths[pieces]
        before = np.cumsum(lengths) - lengths
        in_row = np.repeat(np.arange(len(rows)), counts)
        columns = before - before[np.cumsum(counts) - counts][in_row]
        if int(lengths.sum()) < out.size:
            out[...] = self._pad_id
        flat = out.reshape(-1)
        places = (in_row * seq_len + columns).tolist()
        for offset, length, place in zip(plan.offsets[pieces].tolist(), lengths.tolist(), places, strict=True):
            self._read_into(offset, flat[place : place + length])

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

    def _read_into(self, offset: int, out: TokenArray) -> None:
        """Copy consecutive tokens of the stream, which may lie in several files."""
        done = 0
        while done < len(out):
            number = bisect_right(self._starts, offset + done) - 1
            begin = offset + done - self._starts[number]
            take = min(len(out) - done, self._starts[number + 1] - offset - done)
            self._open_files.read_into(number, begin * self._dtype.itemsize, out[done : done + take])
            done += take

    def _packing(self) -> Packing:
        if self._plan is None:
            arrays = [np.load(self._plan_path(name), mmap_mode="r") for name in ("offsets", "lengths", "first")]
            offsets, lengths, first = (array.view(np.ndarray) for array in arrays)
            self._plan = Packing(offsets, lengths, first, 0, 0)
        return self._plan


def _save(path: Path, array: npt.NDArray[np.int64]) -> None:
    """Write a `.npy` file. On a full disk numpy's own writer says neither which file nor why."""
    with naming(path), open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array))


class SplitRows(NamedTuple):
    """One split of a store: its rows, in the order in which they are stored, and how many batches they fill."""

    split: str
    rows: PackedRows
    order: Order
    num_batches: int
