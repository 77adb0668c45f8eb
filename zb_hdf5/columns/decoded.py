"""Compressed batches of any file of which ranges can be read: unpacked outside of HDF5, into the caller's buffer."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.codecs import decoder, require_codec
from zb_hdf5.columns.ranges import Ranges, RangesReader
from zb_hdf5.columns.source import gather_from_batches
from zb_hdf5.errors import ChecksumError, FormatError, Remedy
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.identity import Identity
from zb_hdf5.spec import BATCHES_LAYOUT, EXTENTS_CHUNK_ROWS, StoreMeta, TokenArray


class CodedChunks(NamedTuple):
    """Where compressed chunks lie.

    Attributes
    ----------
    codec
        With its level.
    table
        Shape (N, 2), int64: the byte offset of each chunk, and how many bytes it has there. One that has as many as
        without compression is stored as it is.
    """

    codec: str
    table: npt.NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return int(self.table[:, 1].sum())


def read_extents(ranges: Ranges, runs: Iterable[Run], num_chunks: int) -> npt.NDArray[np.int64]:
    """Read the table of a `CodedChunks` from the places that an index names.

    Raises
    ------
    FormatError, OSError
        If it is not there.
    """
    rows = np.zeros((num_chunks, 2), "<u8")
    places = Extents(list(runs), EXTENTS_CHUNK_ROWS * rows.itemsize * 2)
    starts = range(0, num_chunks, EXTENTS_CHUNK_ROWS)
    if places.num_batches < len(starts):
        raise FormatError(f"{ranges.name}: expected the extents of {num_chunks:,} chunks")
    ranges.read_ranges([(places.offset(k), rows[start : start + EXTENTS_CHUNK_ROWS]) for k, start in enumerate(starts)])
    return rows.astype(np.int64)


class DecodedSource(RangesReader):
    """The compressed batches, or chunks of a stream, of one file. See `BatchSource`.

    Thread-safe, and as usable after a fork and as picklable as its `Ranges`. Threads read in parallel: neither HDF5's
    lock nor that of the interpreter is held while a chunk is unpacked.

    Parameters
    ----------
    ranges
        The file; closed with this source.
    chunks
        Where the batches lie in it.
    meta
        Shape and dtype of one batch.
    access
        What a reader says of it.
    identity
        Of a local file: what tells it from another one that has its name later.

    Raises
    ------
    FormatError
        If a chunk lies outside of the file.
    UnavailableError
        If the library of the codec is not installed.
    """

    wants_threads = True
    extents: Extents | None = None

    def __init__(
        self, ranges: Ranges, chunks: CodedChunks, meta: StoreMeta, access: str, identity: Identity = ()
    ) -> None:
        super().__init__(ranges)
        self._chunks, self._meta, self.access = chunks, meta, access
        self.identity = identity
        require_codec(chunks.codec, ranges.name)
        offsets, sizes = chunks.table.T
        bad = np.flatnonzero((offsets < 0) | (sizes < 1) | (sizes > ranges.num_bytes - offsets))
        if len(bad):
            raise FormatError(f"{ranges.name}: {self._noun} {bad[0]:,} lies outside of the file; restore it")
        limit = meta.batch_bytes + meta.batch_bytes // 128 + 64  # gzip and zstd add less to noise
        if (largest := int(sizes.max(initial=0))) > limit:  # a sparse file has room for any claim
            raise FormatError(
                f"{ranges.name}: {self._noun} {int(sizes.argmax()):,}: expected at most {limit:,} bytes, found "
                f"{largest:,}; restore it"
            )
        self._reset()

    def _reset(self) -> None:
        self._local = threading.local()
        self._decode = decoder(self._chunks.codec)

    @property
    def _noun(self) -> str:
        return "batch" if self._meta.layout == BATCHES_LAYOUT else "chunk"

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._meta.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self._meta.shape

    def read_into(self, index: int, out: TokenArray) -> None:
        """Fill `out` with one batch. Raises as `read_range_into`."""
        offset, size = self._chunks.table[index].tolist()
        whole = out.reshape(-1).view(np.uint8)
        stored = whole if size == len(whole) else self._scratch(size)  # it did not shrink
        self._ranges.read_ranges([(offset, stored)])
        if stored is not whole:
            self._unpack(index, stored, whole)

    def read_range_into(self, start: int, out: TokenArray) -> None:
        """Fill `out` with consecutive batches: one range for all that follow each other in the file.

        Raises
        ------
        ChecksumError
            If one is not what was packed; the message names it.
        """
        table = self._chunks.table[start : start + len(out)]
        ends = np.cumsum(table[:, 1])
        stored = self._scratch(int(ends[-1]))
        parts, first = [], 0
        breaks = np.flatnonzero(table[1:, 0] != table[:-1, 0] + table[:-1, 1]) + 1
        for stop in [*breaks.tolist(), len(out)]:
            begin = int(ends[first] - table[first, 1])
            parts.append((int(table[first, 0]), stored[begin : int(ends[stop - 1])]))
            first = stop
        self._ranges.read_ranges(parts)
        begin = 0
        for number, (end, batch) in enumerate(zip(ends.tolist(), out, strict=True), start):
            whole = batch.reshape(-1).view(np.uint8)
            if end - begin == len(whole):
                whole[:] = stored[begin:end]
            else:
                self._unpack(number, stored[begin:end], whole)
            begin = end

    def _unpack(self, number: int, stored: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        try:
            self._decode(stored, out)
        except ValueError as error:
            raise ChecksumError(
                f"{self._ranges.name}: {self._noun} {number:,} is damaged: its {self._chunks.codec.partition(':')[0]} "
                f"does not unpack: {error}",
                remedy=Remedy.VERIFY,
                at=self._ranges.name,
            ) from error

    def _scratch(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a buffer of this thread, which its next call fills again."""
        buffer: npt.NDArray[np.uint8] | None = getattr(self._local, "stored", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._local.stored = np.empty(num_bytes, np.uint8)
        return buffer[:num_bytes]

    def _remembered(self, number: int) -> TokenArray:
        """Return a batch in a buffer of this thread, which keeps the last one: records of one batch come together."""
        if getattr(self._local, "number", None) != number:
            self._local.number = None
            if not hasattr(self._local, "batch"):
                self._local.batch = np.empty(self._meta.shape, self._meta.dtype)
            self.read_into(number, self._local.batch)
            self._local.number = number
        return self._local.batch  # type: ignore[no-any-return]

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)`, with records of L tokens, from whole batches."""
        gather_from_batches(self._remembered, self._meta, records, out)

    def read_tokens_into(self, start: int, out: TokenArray) -> None:
        """Fill 1-D `out` with consecutive tokens, counted over all batches."""
        done = 0
        while done < len(out):
            number, within = divmod(start + done, self._meta.batch_tokens)
            part = self._remembered(number).reshape(-1)[within : within + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def read_runs_of_tokens(self, runs: Iterable[tuple[int, TokenArray]]) -> None:
        """Fill each 1-D array with consecutive tokens from its place on, counted over all batches."""
        for start, out in runs:
            self.read_tokens_into(start, out)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_local", "_decode")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
