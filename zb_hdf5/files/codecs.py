"""Compressed chunks, as the registered filters of HDF5 make them: packed and unpacked in threads, outside of HDF5."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ChecksumError, FormatError, Remedy
from zb_hdf5.files.checked import UnitTokens, fast_zlib
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.ranges import Extents, Ranges, Run
from zb_hdf5.files.tokens import Wait
from zb_hdf5.packages import no_package
from zb_hdf5.spec import EXTENTS_CHUNK_ROWS, TokenArray

#: `(stored, out)`: unpacks bytes into 1-D `out`; raises `ValueError` unless they unpack to exactly so many.
Unpack = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], None]
#: Bytes of the longest header of a frame of zstd.
MAX_FRAME_HEADER: Final = 18
#: Compressors and decompressors are not thread-safe, and one for each chunk would take a tenth of the time.
_local = threading.local()


class CompressedTokens(NamedTuple):
    """The codec of the tokens of a file, with its level, and the bytes that they take."""

    codec: str
    num_bytes: int


def require_codec(codec: str, what: object) -> None:
    """Raise `UnavailableError` if the library of a codec is not installed."""
    if codec.startswith("zstd"):
        try:
            import zstandard  # noqa: F401
        except ImportError as error:
            missing = f"{what}: codec {codec} needs the package zstandard: pip install 'zb_hdf5[codecs]'"
            raise no_package("zstandard", missing, error) from None


class Encoder:
    """Packs chunks, several at once, and hands them over in order.

    Parameters
    ----------
    codec
        With its level, such as "zstd:3".
    """

    def __init__(self, codec: str) -> None:
        name, _, level = codec.partition(":")
        self._name = name
        self._level = int(level)
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="zb-encode")

    def __call__(self, chunks: npt.NDArray[Any]) -> Iterator[tuple[Any, int]]:
        """Yield the bytes of each chunk, and HDF5's mask of the filters that were left out.

        A chunk that does not shrink is stored without compression.
        """
        return self._pool.map(self._pack, chunks)

    def _pack(self, chunk: npt.NDArray[Any]) -> tuple[Any, int]:
        chunk = np.ascontiguousarray(chunk)
        flat = chunk.reshape(-1).view(np.uint8)  # a structured dtype has no simple buffer
        if self._name == "gzip":
            packed = zlib.compress(flat, self._level)
        else:
            if not hasattr(_local, "compress"):  # each thread packs for one encoder
                import zstandard

                _local.compress = zstandard.ZstdCompressor(level=self._level).compress
            packed = _local.compress(flat)
        return (packed, 0) if len(packed) < chunk.nbytes else (chunk, 1)

    def close(self) -> None:
        self._pool.shutdown()


def chunk_decoder(codec: str) -> Unpack:
    """Return the function that unpacks the chunks of a codec. Thread-safe; it releases the interpreter lock."""
    return _inflate if codec.startswith("gzip") else _unpack_zstd


def _unpack_zstd(stored: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    import zstandard

    if not hasattr(_local, "unpack"):
        _local.unpack = zstandard.ZstdDecompressor().stream_reader
    try:
        stream = _local.unpack(stored)
        found = stream.readinto(out)  # a whole frame that fits is unpacked in one pass, into `out` itself
        more = len(stream.read(1))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    _require_size(found + more, out)


def read_packed(path: Path, codec: str, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Read a file that was compressed as a whole, by zstd.

    Parameters
    ----------
    path
        The file.
    codec
        With or without a level.
    num_bytes
        The bytes that it unpacks to.

    Raises
    ------
    ChecksumError
        If it does not unpack, or to another number of bytes. One that its header refutes takes no memory.
    """
    require_codec(codec, path)
    import zstandard

    stored = np.fromfile(path, np.uint8)
    try:
        claimed = zstandard.frame_content_size(stored[:MAX_FRAME_HEADER].tobytes())
        if claimed not in (num_bytes, -1):  # -1: the header has no size
            raise ValueError(f"expected {num_bytes:,} bytes, found {claimed:,} in its header")
        found = np.empty(num_bytes, np.uint8)
        _unpack_zstd(stored, found)
    except (ValueError, zstandard.ZstdError) as error:
        raise ChecksumError(f"{path}: is damaged: its zstd does not unpack: {error}") from error
    return found


def _inflate(stored: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    stream = fast_zlib.decompressobj()
    try:
        found = stream.decompress(stored, len(out) + 1)
    except (fast_zlib.error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if not stream.eof and len(found) <= len(out):
        raise ValueError(f"it ends after {len(found):,} bytes")
    _require_size(len(found), out)
    out[:] = np.frombuffer(found, np.uint8)


def _require_size(found: int, out: npt.NDArray[np.uint8]) -> None:
    if found != len(out):
        count = "more" if found > len(out) else f"{found:,}"
        raise ValueError(f"expected {len(out):,} bytes, found {count}")


class CodedChunks(NamedTuple):
    """The ranges of compressed chunks.

    Attributes
    ----------
    codec
        With its level, such as "zstd:3".
    table
        Shape (N, 2): the byte offset of each chunk, and the bytes that it takes. A chunk that takes as many bytes as it
        has without compression is stored without it.
    """

    codec: str
    table: npt.NDArray[np.int64]


def read_extents(ranges: Ranges, runs: Iterable[Run], num_chunks: int) -> npt.NDArray[np.int64]:
    """Read the table of a `CodedChunks`.

    Parameters
    ----------
    ranges
        The file of the table.
    runs
        The byte offsets of the chunks of the table itself.
    num_chunks
        The rows of the table.
    """
    rows = np.empty((num_chunks, 2), "<u8")
    extents = Extents(list(runs), EXTENTS_CHUNK_ROWS * rows.itemsize * 2)
    if extents.num_batches * EXTENTS_CHUNK_ROWS < num_chunks:
        raise FormatError(f"{ranges.name}: expected the extents of {num_chunks:,} chunks")
    ranges.read_ranges(list(extents.ranges_of_tokens(0, rows.reshape(-1))))
    return rows.astype(np.int64)


class Decoded(UnitTokens):
    """The compressed units of one file. See `Tokens`.

    Threads read in parallel: neither HDF5's lock nor the interpreter's is held while a chunk is decoded.

    Parameters
    ----------
    file
        The open file or object. It closes with these tokens.
    chunks
        The ranges of the units, each of which is one chunk.
    dtype, unit, num_tokens
        The stored dtype, the tokens of a unit, and all tokens; the last unit is stored whole.
    noun
        A unit, for messages.
    """

    __slots__ = (
        "_chunks",
        "_noun",
        "_unpack_chunk",
        "dtype",
        "file",
        "identity",
        "name",
        "num_tokens",
        "unit",
        "wait",
    )
    access = "pread"
    file: Ranges

    def __init__(
        self,
        file: Ranges,
        chunks: CodedChunks,
        dtype: np.dtype[Any],
        unit: int,
        num_tokens: int,
        noun: str,
    ) -> None:
        super().__init__()
        self.file = file
        self._chunks = chunks
        self._noun = noun
        self.dtype = dtype
        self.unit = unit
        self.num_tokens = num_tokens
        require_codec(chunks.codec, file.name)
        self.name = file.name
        self.identity = file.identity
        offsets, sizes = chunks.table.T
        bad = np.flatnonzero((offsets < 0) | (sizes < 1) | (sizes > file.num_bytes - offsets))
        if len(bad):
            raise FormatError(f"{file.name}: {noun} {bad[0]:,} is outside of the file; restore it")
        plain = unit * dtype.itemsize
        limit = plain + plain // 128 + 64  # gzip and zstd add less to noise
        if (largest := int(sizes.max(initial=0))) > limit:  # a sparse file is large enough for any claim
            raise FormatError(
                f"{file.name}: {noun} {int(sizes.argmax()):,}: expected at most {limit:,} bytes, found {largest:,}; "
                "restore it"
            )
        self._unpack_chunk = chunk_decoder(chunks.codec)
        self.wait = Wait.FAR if isinstance(file, RemoteObject) else Wait.DECODE

    def _read_units(self, start: int, out: TokenArray) -> None:
        """Fill `out` with whole units: one range for all that follow each other in the file."""
        first = start // self.unit
        count = -(-len(out) // self.unit)
        table = self._chunks.table[first : first + count]
        sizes = np.cumsum(table[:, 1])
        stored = np.empty(int(sizes[-1]), np.uint8)
        parts = []
        breaks = np.flatnonzero(table[1:, 0] != table[:-1, 0] + table[:-1, 1]) + 1
        for begin, stop in pairwise([0, *breaks.tolist(), count]):
            skip = int(sizes[begin] - table[begin, 1])
            parts.append((int(table[begin, 0]), stored[skip : int(sizes[stop - 1])]))
        self.file.read_ranges(parts)
        for number, (end, size) in enumerate(zip(sizes.tolist(), table[:, 1].tolist(), strict=True)):
            unit = out[number * self.unit : (number + 1) * self.unit]
            self._unpack(first + number, stored[end - size : end], unit.view(np.uint8))

    def _unpack(self, number: int, stored: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        size = self.unit * self.dtype.itemsize
        whole = out if len(out) == size else np.empty(size, np.uint8)  # the last chunk of a stream is stored whole
        if len(stored) == size:  # it did not shrink
            whole[:] = stored
        else:
            try:
                self._unpack_chunk(stored, whole)
            except ValueError as error:
                raise ChecksumError(
                    f"{self.name}: {self._noun} {number:,} is damaged: its {self._chunks.codec.partition(':')[0]} "
                    f"does not unpack: {error}",
                    remedy=Remedy.VERIFY,
                    at=self.name,
                ) from error
        if whole is not out:
            out[:] = whole[: len(out)]

    def close(self) -> None:
        self.file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoded, (self.file, self._chunks, self.dtype, self.unit, self.num_tokens, self._noun)
