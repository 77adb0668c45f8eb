"""Compressed chunks, as HDF5's registered filters make them: packed and unpacked in threads, outside of HDF5's lock."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import UnavailableError
from zb_hdf5.spec import NO_CODEC

try:  # two to three times as fast as zlib
    from isal import isal_zlib

    inflating: Any = isal_zlib
except ImportError:  # pragma: no cover - where it has no wheel
    inflating = zlib

#: Fills `out` with what `stored` unpacks to, both 1-D of bytes; raises `ValueError` if it is anything else.
Decode = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], None]
#: What compresses and decompresses is not thread-safe, and costs more to make than to use.
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
            raise UnavailableError(
                f"{what}: codec {codec} needs the package zstandard: pip install 'zb_hdf5[codecs]'"
            ) from error


class Encoder:
    """Packs chunks, several at once, and hands them over in order."""

    def __init__(self, codec: str) -> None:
        name, _, level = codec.partition(":")
        self._name, self._level = name, int(level)
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="zb-encode")

    def __call__(self, chunks: npt.NDArray[Any]) -> Iterator[tuple[Any, int]]:
        """Yield the bytes of each chunk, and the mask of HDF5's filters that they were not sent through."""
        # a chunk that does not shrink is stored as it is
        return self._pool.map(self._pack, chunks)

    def _pack(self, chunk: npt.NDArray[Any]) -> tuple[Any, int]:
        chunk = np.ascontiguousarray(chunk)
        flat = chunk.reshape(-1).view(np.uint8)  # a structured dtype has no simple buffer
        packed = zlib.compress(flat, self._level) if self._name == "gzip" else _zstd_compressor(self._level)(flat)
        return (packed, 0) if len(packed) < chunk.nbytes else (chunk, 1)

    def close(self) -> None:
        self._pool.shutdown()


def _zstd_compressor(level: int) -> Callable[[Any], bytes]:
    import zstandard

    made: dict[int, Any] = _local.__dict__.setdefault("compressors", {})
    if level not in made:
        made[level] = zstandard.ZstdCompressor(level=level).compress
    return made[level]  # type: ignore[no-any-return]


def decoder(codec: str) -> Decode:
    """Return what unpacks the chunks of a codec. Thread-safe; the decoders release the interpreter lock."""
    if codec == NO_CODEC:
        raise ValueError("chunks without a codec need no decoder")
    return _inflate if codec.startswith("gzip") else _unpack_zstd


def _unpack_zstd(stored: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    import zstandard

    try:
        make = _local.zstd
    except AttributeError:
        make = _local.zstd = zstandard.ZstdDecompressor().stream_reader
    try:
        stream = make(stored)
        found = stream.readinto(out)  # a whole frame with room for it is unpacked in one pass, into `out` itself
        more = len(stream.read(1))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    _require_size(found + more, out)


def _inflate(stored: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    stream = inflating.decompressobj()
    try:
        found = stream.decompress(stored, len(out) + 1)
    except (inflating.error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if not stream.eof and len(found) <= len(out):
        raise ValueError(f"it ends after {len(found):,} bytes")
    _require_size(len(found), out)
    out[:] = np.frombuffer(found, np.uint8)


def _require_size(found: int, out: npt.NDArray[np.uint8]) -> None:
    if found != len(out):
        raise ValueError(f"expected {len(out):,} bytes, found {'more' if found > len(out) else f'{found:,}'}")
