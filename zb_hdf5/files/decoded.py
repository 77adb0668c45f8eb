"""Compressed chunks of a file or object: decoded outside of HDF5, into the caller's buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ChecksumError, FormatError, Remedy
from zb_hdf5.files.codecs import decoder, require_codec
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.file_tokens import FileTokens, ObjectTokens
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.ranges import Ranges
from zb_hdf5.files.tokens import Tokens, UnitTokens, Wait
from zb_hdf5.spec import EXTENTS_CHUNK_ROWS, TokenArray


class CodedChunks(NamedTuple):
    """Where compressed chunks lie."""

    codec: str  # with its level
    table: npt.NDArray[np.int64]  # (N, 2): the offset of each chunk, and its bytes there: as many as plain, if it is

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return int(self.table[:, 1].sum())


def read_extents(ranges: Ranges, runs: Iterable[Run], num_chunks: int) -> npt.NDArray[np.int64]:
    """Read the table of a `CodedChunks` from the places that an index names."""
    rows = np.zeros((num_chunks, 2), "<u8")
    places = Extents(list(runs), EXTENTS_CHUNK_ROWS * rows.itemsize * 2)
    starts = range(0, num_chunks, EXTENTS_CHUNK_ROWS)
    if places.num_batches < len(starts):
        raise FormatError(f"{ranges.name}: expected the extents of {num_chunks:,} chunks")
    ranges.read_ranges([(places.offset(k), rows[start : start + EXTENTS_CHUNK_ROWS]) for k, start in enumerate(starts)])
    return rows.astype(np.int64)


class Decoded(UnitTokens):
    """The compressed units of one file. See `Tokens`."""

    # threads read in parallel: neither the lock of HDF5 nor that of the interpreter is held while a chunk is decoded

    __slots__ = ("_chunks", "_decode", "_noun", "dtype", "num_tokens", "ranges", "unit", "wait")
    access = "pread"

    def __init__(
        self, ranges: Ranges, chunks: CodedChunks, dtype: np.dtype[Any], unit: int, num_tokens: int, noun: str
    ) -> None:
        super().__init__()
        self.ranges, self._chunks, self._noun = ranges, chunks, noun
        self.dtype, self.unit, self.num_tokens = dtype, unit, num_tokens
        require_codec(chunks.codec, ranges.name)
        offsets, sizes = chunks.table.T
        bad = np.flatnonzero((offsets < 0) | (sizes < 1) | (sizes > ranges.num_bytes - offsets))
        if len(bad):
            raise FormatError(f"{ranges.name}: {noun} {bad[0]:,} lies outside of the file; restore it")
        plain = unit * dtype.itemsize
        limit = plain + plain // 128 + 64  # gzip and zstd add less to noise
        if (largest := int(sizes.max(initial=0))) > limit:  # a sparse file has room for any claim
            raise FormatError(
                f"{ranges.name}: {noun} {int(sizes.argmax()):,}: expected at most {limit:,} bytes, found {largest:,}; "
                "restore it"
            )
        self._decode = decoder(chunks.codec)
        self.wait = Wait.FAR if isinstance(ranges, RemoteObject) else Wait.DECODE

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.ranges.name

    @property
    def identity(self) -> Identity:  # type: ignore[override]
        return self.ranges.identity

    def _read_units(self, start: int, out: TokenArray) -> None:
        """Fill `out` with whole units: one range for all that follow each other in the file."""
        first, count = start // self.unit, -(-len(out) // self.unit)
        table = self._chunks.table[first : first + count]
        sizes = np.cumsum(table[:, 1])
        stored = self._scratch("stored", int(sizes[-1]))
        parts, begin = [], 0
        breaks = np.flatnonzero(table[1:, 0] != table[:-1, 0] + table[:-1, 1]) + 1
        for stop in [*breaks.tolist(), count]:
            skip = int(sizes[begin] - table[begin, 1])
            parts.append((int(table[begin, 0]), stored[skip : int(sizes[stop - 1])]))
            begin = stop
        self.ranges.read_ranges(parts)
        begin = 0
        for number, end in enumerate(sizes.tolist()):
            unit = out[number * self.unit : (number + 1) * self.unit]
            self._unpack(first + number, stored[begin:end], unit.view(np.uint8))
            begin = end

    def _unpack(self, number: int, stored: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        size = self.unit * self.dtype.itemsize
        whole = out if len(out) == size else self._scratch("whole", size)  # the last chunk of a stream is stored whole
        if len(stored) == size:  # it did not shrink
            whole[:] = stored
        else:
            try:
                self._decode(stored, whole)
            except ValueError as error:
                raise ChecksumError(
                    f"{self.name}: {self._noun} {number:,} is damaged: its {self._chunks.codec.partition(':')[0]} "
                    f"does not unpack: {error}",
                    remedy=Remedy.VERIFY,
                    at=self.name,
                ) from error
        if whole is not out:
            out[:] = whole[: len(out)]

    def _scratch(self, name: str, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a buffer of this thread, which its next call fills again."""
        buffer: npt.NDArray[np.uint8] | None = getattr(self._local, name, None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = np.empty(num_bytes, np.uint8)
            setattr(self._local, name, buffer)
        return buffer[:num_bytes]

    def close(self) -> None:
        self.ranges.close()

    def __getstate__(self) -> tuple[Any, ...]:
        return self.ranges, self._chunks, self.dtype, self.unit, self.num_tokens, self._noun

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        Decoded.__init__(self, *state)


def ranges_of(tokens: Tokens) -> Ranges | None:
    """Return the file in which tokens lie, where it is read without HDF5."""
    if isinstance(tokens, FileTokens):
        return tokens.file
    if isinstance(tokens, ObjectTokens):
        return tokens.source
    return tokens.ranges if isinstance(tokens, Decoded) else None
