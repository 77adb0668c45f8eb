"""The tokens of one file of a stream: HDF5 by extents or through h5py, or a 1-D `.npy` file of any integer dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from zb_hdf5.columns.decoded import DecodedSource
from zb_hdf5.columns.ranges import RangeSource
from zb_hdf5.columns.source import BatchSource
from zb_hdf5.errors import (
    BackendError,
    ConvertError,
    UnverifiableError,
)
from zb_hdf5.files.extent_file import ExtentFile
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.identity import Identity
from zb_hdf5.formats.hdf5.fields import HDF5FieldReader
from zb_hdf5.formats.hdf5.file import (
    h5_damage,
)
from zb_hdf5.formats.hdf5.source import FileSource, H5pySource, open_source
from zb_hdf5.formats.hdf5.stream_reader import HDF5StreamReader, inspect_stream
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.spec import (
    TOKENS,
    TokenArray,
)


class TokenFile(Protocol):
    """The tokens of one file. Thread-safe, fork-safe, picklable.

    Attributes
    ----------
    access
        As asked for: "auto", "mmap", "pread" or "h5py"; "h5py" too where only HDF5 can read it.
    identity
        What tells the file from another one that has its name later.
    extents
        Where the chunks lie; None where only HDF5 knows.
    """

    access: str
    identity: Identity
    extents: Extents | None
    dtype: np.dtype[Any]
    num_tokens: int

    def flat(self) -> TokenArray | None:
        """Return all tokens as one 1-D view, where there is one."""

    def read_into(self, start: int, out: TokenArray) -> None:
        """Fill 1-D `out`, of the file's dtype, with consecutive tokens."""

    def read_runs(self, runs: Sequence[tuple[int, TokenArray]]) -> None:
        """Fill each 1-D array with consecutive tokens from its place on; all at once, where that is faster."""

    def is_cached(self, start: int) -> bool:
        """Return whether a token can be read without waiting for a disk."""

    def will_need(self, start: int, stop: int) -> None:
        """Have the kernel read consecutive tokens, at least one, without waiting for them."""

    def close(self) -> None:
        """Release the file."""


def open_token_file(path: Path, access: str = "auto", identity: Identity | None = None) -> TokenFile:
    """Open an HDF5 stream, or a 1-D `.npy` file; if it was open before, then with the identity that it had.

    Raises
    ------
    FormatError, IncompleteError
        If it is neither, or damaged.
    BackendError
        If `access` cannot serve it.
    """
    if path.suffix == ".npy":
        if access == "h5py":
            raise BackendError(f"{path}: access='h5py' needs an HDF5 file, found a .npy file")
        return _open_npy(path, access, identity)
    found = inspect_stream(path, identity)
    why = "it is compressed" if found.complete else "its writer has not finished"
    source = open_source(path, TOKENS, found.meta, found.places, why, access, found.identity)
    return _tokens_of(path, source, found.token_count, found.identity)


def open_checked_file(path: Path, field: str | None = None, identity: Identity | None = None) -> TokenFile:
    """Open an HDF5 stream, or the values of a field of it, and compare each chunk that is read with its crc32.

    Raises
    ------
    UnverifiableError
        If no crc32 is stored, or its writer has not finished.
    FormatError, IncompleteError
        If it is no stream, or damaged.
    """
    if path.suffix == ".npy":
        raise UnverifiableError(f"{path}: verify='batch' needs a stored crc32: .npy files have none; convert them")
    reader: HDF5StreamReader | HDF5FieldReader
    reader = HDF5StreamReader(path, identity) if field is None else HDF5FieldReader(path, field, verify="none")
    reader.check_reads("batch")
    return ChunkTokens(reader._source, reader.meta.shape, reader.dtype, reader.token_count, reader.identity)


def open_field_file(path: Path, name: str, access: str = "auto") -> TokenFile:
    """Open the values of a field of an HDF5 stream: each token counts as the values that it has.

    Raises as `open_token_file`.
    """
    reader = HDF5FieldReader(path, name, access=access, verify="none")
    return _tokens_of(path, cast(FileSource, reader._source), reader.token_count, reader.identity)


def _tokens_of(path: Path, source: FileSource, num_tokens: int, identity: Identity) -> TokenFile:
    if isinstance(source, H5pySource):
        return H5pyTokens(path, source, num_tokens, identity)
    return ExtentTokens(source, num_tokens)


def _open_npy(path: Path, access: str, identity: Identity | None) -> TokenFile:
    shape, _, dtype, byte_offset = read_npy_header(path)
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ConvertError(f"{path}: expected a 1-D array of integers, found shape {shape} {dtype}")
    extents = Extents([Run(byte_offset, shape[0] * dtype.itemsize, 1)] if shape[0] else [], shape[0] * dtype.itemsize)
    file = ExtentFile(path, extents, (1, shape[0]), dtype, access, identity)
    return ExtentTokens(file, shape[0])


class ExtentTokens:
    """Tokens read outside any format library. See `TokenFile`, and `ExtentFile` for views of files that change."""

    def __init__(self, file: ExtentFile | RangeSource | DecodedSource, num_tokens: int) -> None:
        self._file, self.num_tokens = file, num_tokens
        self.access, self.dtype, self.identity = file.access, file.dtype, file.identity
        self._chunk_tokens = file.shape[1]
        self.extents: Extents | None = file.extents

    def flat(self) -> TokenArray | None:
        tokens = self._file.flat()
        return None if tokens is None else tokens[: self.num_tokens]

    def read_into(self, start: int, out: TokenArray) -> None:
        tokens = self.flat()
        if tokens is None:
            self._file.read_runs_of_tokens([(start, out)])
        else:
            out[...] = tokens[start : start + len(out)]

    def read_runs(self, runs: Sequence[tuple[int, TokenArray]]) -> None:
        self._file.read_runs_of_tokens(runs)

    def is_cached(self, start: int) -> bool:
        return isinstance(self._file, ExtentFile) and self._file.is_cached(*divmod(start, self._chunk_tokens))

    def will_need(self, start: int, stop: int) -> None:
        if isinstance(self._file, ExtentFile):  # else whoever reads ahead does so in threads
            self._file.will_need_tokens(start, stop - start)

    def close(self) -> None:
        self._file.close()


class H5pyTokens:
    """Tokens through the HDF5 library: compressed files, and those that are still written. See `TokenFile`.

    Of a field each token counts as the values that it has.
    """

    access = "h5py"
    extents: Extents | None = None

    def __init__(self, path: Path, source: H5pySource, num_tokens: int, identity: Identity) -> None:
        self._path, self._source = path, source
        self.num_tokens, self.dtype, self.identity = num_tokens, source.dtype, identity

    def flat(self) -> TokenArray | None:
        return None

    def read_into(self, start: int, out: TokenArray) -> None:
        with h5_damage(self._path):
            stored = self._source.dataset()
            size = math.prod(stored.shape[1:])
            first, within = divmod(start, size)
            out[...] = stored[first : -(-(start + len(out)) // size)].reshape(-1)[within : within + len(out)]

    def read_runs(self, runs: Sequence[tuple[int, TokenArray]]) -> None:
        for start, out in runs:
            self.read_into(start, out)

    def is_cached(self, start: int) -> bool:
        """Say yes, as for batches through HDF5."""
        return True

    def will_need(self, start: int, stop: int) -> None:
        """Do nothing: where the bytes lie is known to HDF5 only."""

    def close(self) -> None:
        self._source.close()


class ChunkTokens:
    """Tokens of which only whole chunks are read, because each of them is compared with its crc32. See `TokenFile`.

    Parameters
    ----------
    chunks
        A source that compares what it reads; closed with this.
    shape, dtype
        Of a chunk.
    num_tokens
        In all of them.
    identity
        Of the file.
    """

    extents: Extents | None = None

    def __init__(
        self, chunks: BatchSource, shape: tuple[int, int], dtype: np.dtype[Any], num_tokens: int, identity: Identity
    ) -> None:
        self._chunks, self._shape, self.access = chunks, shape, chunks.access
        self.dtype, self.num_tokens, self.identity = dtype, num_tokens, identity
        self._last: tuple[int, TokenArray] | None = None  # windows that follow each other lie in one chunk

    def flat(self) -> TokenArray | None:
        return None

    def read_into(self, start: int, out: TokenArray) -> None:
        done = 0
        while done < len(out):
            number, within = divmod(start + done, self._shape[1])
            part = self._chunk(number)[within : within + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def read_runs(self, runs: Sequence[tuple[int, TokenArray]]) -> None:
        for start, out in runs:
            self.read_into(start, out)

    def _chunk(self, number: int) -> TokenArray:
        last = self._last
        if last is None or last[0] != number:
            tokens = np.empty(self._shape, self.dtype)
            self._chunks.read_into(number, tokens)
            last = self._last = number, tokens.reshape(-1)
        return last[1]

    def is_cached(self, start: int) -> bool:
        return self._chunks.is_cached(start // self._shape[1])

    def will_need(self, start: int, stop: int) -> None:
        first = start // self._shape[1]
        self._chunks.will_need(first, (stop - 1) // self._shape[1] + 1 - first)

    def close(self) -> None:
        self._chunks.close()
