"""Reads one file of a token stream: HDF5 by extents or through h5py, or a 1-D `.npy` file of any integer dtype."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.core.extents import ExtentFile, Extents, Run
from zb_hdf5.core.files import Identity
from zb_hdf5.errors import BackendError, ConvertError, FormatError, IncompleteError
from zb_hdf5.formats.hdf5.file import (
    chunk_offsets,
    crc32_runs,
    h5_damage,
    h5_identity,
    open_h5_for_reading,
    own_dataset,
    require_stored,
)
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.spec import (
    CODE_BY_DTYPE,
    CRC32,
    DOC_OFFSETS,
    STREAM_FORMAT,
    STREAM_ROOT_ATTRIBUTES,
    STREAM_VERSION,
    TOKENS,
    TOKENS_ATTRIBUTES,
    TokenArray,
    is_sha256,
)


class StreamInspection(NamedTuple):
    """What one look into a stream file tells.

    Attributes
    ----------
    sha256
        None until its writer has finished.
    extents
        Where the chunks lie; None where they are compressed or still being written.
    identity
        Of the file that was looked into.
    crc32_runs
        Where the rows of crc32 lie; empty where that is not known.
    """

    dtype: np.dtype[Any]
    token_count: int
    document_count: int
    max_token: int
    boundary_token_id: int
    chunk_tokens: int
    doc_offsets_crc32: int
    vocab_size: int
    tokenizer: str
    sha256: str | None
    complete: bool
    extents: Extents | None
    identity: Identity
    crc32_runs: tuple[Run, ...]


class TokenFile(Protocol):
    """The tokens of one file. Thread-safe, fork-safe, picklable.

    Attributes
    ----------
    access
        As asked for: "auto", "mmap", "pread" or "h5py"; "h5py" too where only HDF5 can read it.
    identity
        What tells the file from another one that has its name later.
    """

    access: str
    identity: Identity
    dtype: np.dtype[Any]
    num_tokens: int

    def flat(self) -> TokenArray | None:
        """Return all tokens as one 1-D view, where there is one."""

    def read_into(self, start: int, out: TokenArray) -> None:
        """Fill 1-D `out`, of the file's dtype, with consecutive tokens."""

    def is_cached(self, start: int) -> bool:
        """Return whether a token can be read without waiting for a disk."""

    def will_need(self, start: int) -> None:
        """Have the kernel read the chunk of a token, without waiting for it."""

    def close(self) -> None:
        """Release the file."""


def is_stream_file(path: Path) -> bool:
    """Return whether an HDF5 file says that it is a token stream."""
    with h5_damage(path), open_h5_for_reading(path) as h5:
        return _text(h5.attrs.get("format")) == STREAM_FORMAT


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
    if found.extents is not None and access != "h5py":
        shape = (1, found.chunk_tokens)
        return ExtentTokens(
            ExtentFile(path, found.extents, shape, found.dtype, access, found.identity), found.token_count
        )
    if access in ("mmap", "pread"):
        why = "it is compressed" if found.complete else "its writer has not finished"
        raise BackendError(f"{path}: access={access!r} needs plain extents, but {why}; use access='h5py' or 'auto'")
    return H5pyTokens(path, found.token_count, found.dtype, found.identity)


def _open_npy(path: Path, access: str, identity: Identity | None) -> TokenFile:
    shape, _, dtype, byte_offset = read_npy_header(path)
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ConvertError(f"{path}: expected a 1-D array of integers, found shape {shape} {dtype}")
    extents = Extents([Run(byte_offset, shape[0] * dtype.itemsize, 1)] if shape[0] else [], shape[0] * dtype.itemsize)
    return ExtentTokens(ExtentFile(path, extents, (1, shape[0]), dtype, access, identity), shape[0])


class ExtentTokens:
    """Tokens read outside any format library. See `TokenFile`, and `ExtentFile` for views of files that change."""

    def __init__(self, file: ExtentFile, num_tokens: int) -> None:
        self._file, self.num_tokens = file, num_tokens
        self.access, self.dtype, self.identity = file.access, file.dtype, file.identity
        self._chunk_tokens = file.shape[1]

    def flat(self) -> TokenArray | None:
        tokens = self._file.flat()
        return None if tokens is None else tokens[: self.num_tokens]

    def read_into(self, start: int, out: TokenArray) -> None:
        tokens = self.flat()
        if tokens is None:
            self._file.read_tokens_into(start, out)
        else:
            out[...] = tokens[start : start + len(out)]

    def is_cached(self, start: int) -> bool:
        return self._file.is_cached(start // self._chunk_tokens)

    def will_need(self, start: int) -> None:
        self._file.will_need(start // self._chunk_tokens)

    def close(self) -> None:
        self._file.close()


class H5pyTokens:
    """Tokens through the HDF5 library: compressed files, and those that are still written. See `TokenFile`."""

    access = "h5py"

    def __init__(self, path: Path, num_tokens: int, dtype: np.dtype[Any], identity: Identity) -> None:
        self._path, self.num_tokens, self.dtype, self.identity = path, num_tokens, dtype, identity
        self._reset()

    def _reset(self) -> None:
        self._lock, self._pid = threading.Lock(), 0
        self._h5: h5py.File = None

    def _tokens(self) -> h5py.Dataset:
        with self._lock:
            if self._pid != os.getpid():
                self._h5, self._pid = open_h5_for_reading(self._path, self.identity), os.getpid()
            return self._h5[TOKENS]

    def flat(self) -> TokenArray | None:
        return None

    def read_into(self, start: int, out: TokenArray) -> None:
        with h5_damage(self._path):
            out[...] = self._tokens()[start : start + len(out)]

    def is_cached(self, start: int) -> bool:
        """Say yes: HDF5's global lock leaves nothing to gain from reading ahead."""
        return True

    def will_need(self, start: int) -> None:
        """Do nothing: where the bytes lie is known to HDF5 only."""

    def close(self) -> None:
        if self._h5 is not None and self._pid == os.getpid():
            self._h5.close()
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_path", "num_tokens", "dtype", "identity")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def inspect_stream(path: Path, identity: Identity | None = None) -> StreamInspection:
    """Look into an HDF5 stream file; if it was open before, then with the identity that it had.

    Raises
    ------
    FormatError, IncompleteError
        If it is no stream of this version, or contradicts itself.
    """
    with h5_damage(path), open_h5_for_reading(path, identity) as h5:
        stored = _checked_tokens(h5, path)
        found = {name: stored.attrs[name] for name in TOKENS_ATTRIBUTES}
        token_count, complete = int(found["token_count"]), bool(found["complete"])
        if token_count > len(stored):
            raise FormatError(f"{path}: expected {token_count:,} tokens, found room for {len(stored):,}")
        require_stored(token_count * stored.dtype.itemsize, h5, stored, path)
        chunk_tokens = int(found["chunk_tokens"])
        if chunk_tokens < 1 or (stored.chunks and stored.chunks[0] != chunk_tokens):
            raise FormatError(f"{path}: expected chunks of {chunk_tokens:,} tokens, found {stored.chunks}")
        _rows_of(h5, path, DOC_OFFSETS, int(found["document_count"]) + 1)
        sha256 = bytes(found["sha256"]).decode("ascii", "replace")
        if not is_sha256(sha256):
            raise FormatError(f"{path}: expected 64 hexadecimal digits in sha256, found {sha256!r}")
        return StreamInspection(
            stored.dtype,
            token_count,
            int(found["document_count"]),
            int(found["max_token"]),
            int(found["boundary_token_id"]),
            chunk_tokens,
            int(found["doc_offsets_crc32"]),
            int(h5.attrs["vocab_size"]),
            str(_text(h5.attrs["tokenizer"])),
            sha256 if complete else None,
            complete,
            _chunk_extents(stored, token_count, path) if complete else None,
            h5_identity(h5, growing=not complete),
            crc32_runs(own_dataset(h5, path, CRC32)) if complete else (),
        )


def _rows_of(h5: h5py.File, path: Path, name: str, count: int) -> h5py.Dataset:
    """Return a 1-D dataset that has `count` rows."""
    stored = own_dataset(h5, path, name)
    if stored is None or stored.ndim != 1 or len(stored) < count:
        raise IncompleteError(f"{path}: expected a dataset {name!r} of {count:,} rows, found {stored!r}")
    require_stored(count * stored.dtype.itemsize, h5, stored, path)
    return stored


def _checked_tokens(h5: h5py.File, path: Path) -> h5py.Dataset:
    found = _text(h5.attrs.get("format"))
    if found != STREAM_FORMAT:
        raise FormatError(f"{path}: expected root attribute format={STREAM_FORMAT!r}, found {found!r}")
    if h5.attrs.get("format_version") != STREAM_VERSION:
        raise FormatError(f"{path}: expected format_version {STREAM_VERSION}, found {h5.attrs.get('format_version')}")
    stored = own_dataset(h5, path, TOKENS)
    if stored is None or stored.ndim != 1 or stored.dtype not in CODE_BY_DTYPE:
        raise FormatError(f"{path}: expected a 1-D dataset {TOKENS!r} of uint16 or uint32, found {stored!r}")
    missing = [name for name in STREAM_ROOT_ATTRIBUTES if name not in h5.attrs]
    missing += [f"{TOKENS}/{name}" for name in TOKENS_ATTRIBUTES if name not in stored.attrs]
    if missing:
        raise FormatError(f"{path}: attribute {missing[0]!r} is missing")
    return stored


def _chunk_extents(stored: h5py.Dataset, token_count: int, path: Path) -> Extents | None:
    """Return where the chunks lie, or None where they are not plain."""
    if not stored.chunks or stored.id.get_create_plist().get_nfilters():
        return None
    chunk_tokens = stored.chunks[0]
    offsets = chunk_offsets(stored, -(-token_count // chunk_tokens))
    if np.any(offsets < 0):
        raise FormatError(f"{path}: a chunk of the {token_count:,} committed tokens is missing; restore the file")
    return Extents.from_offsets(offsets, chunk_tokens * stored.dtype.itemsize)


def read_doc_offsets(path: Path, identity: Identity | None = None) -> npt.NDArray[np.uint64]:
    """Return where the documents of an HDF5 stream begin and the last one ends, shape (D + 1,)."""
    with h5_damage(path), open_h5_for_reading(path, identity) as h5:
        count = int(_checked_tokens(h5, path).attrs["document_count"]) + 1
        offsets = np.asarray(_rows_of(h5, path, DOC_OFFSETS, count)[:count], dtype="<u8")
    if np.any(offsets[1:] < offsets[:-1]):
        raise FormatError(f"{path}: {DOC_OFFSETS} do not ascend; restore the file")
    return offsets


def read_chunk_crc32(path: Path, num_chunks: int, identity: Identity | None = None) -> npt.NDArray[np.uint32]:
    """Return the stored crc32 of each chunk."""
    with h5_damage(path), open_h5_for_reading(path, identity) as h5:
        return np.asarray(_rows_of(h5, path, CRC32, num_chunks)[:num_chunks], dtype="<u4")


def _text(value: object) -> object:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
