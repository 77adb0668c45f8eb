"""A column of an HDF5 file, as one look finds it: batches, a stream, a field, or a dataset that others have written."""

from __future__ import annotations

import math
import os
import threading
import weakref
from pathlib import Path
from typing import Any, Final, NamedTuple

import h5py
import numpy as np

from zb_hdf5.errors import ArgumentError, BackendError, FormatError, UnavailableError
from zb_hdf5.field import Field
from zb_hdf5.files.checked import UnitTokens
from zb_hdf5.files.codecs import CodedChunks, CompressedTokens, Decoded
from zb_hdf5.files.forks import OwnLock
from zb_hdf5.files.paths import Handle, Identity, cut_short, size_of
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.files.ranges import Extents, Run, open_ranges
from zb_hdf5.files.tokens import Tokens, Wait, open_extents
from zb_hdf5.formats.foreign import integer_datasets, to_choose
from zb_hdf5.hdf5.h5_attributes import read_marker, read_origin, read_root, stored_sha256, text_of
from zb_hdf5.hdf5.h5_chunks import ChunkExtents, chunk_extents, codec_of, column_runs, register_filters, unreadable
from zb_hdf5.hdf5.h5_dataset import our_tokens, own_dataset, require_rows, require_stored
from zb_hdf5.hdf5.h5_file import h5_damage, h5_identity, handle_of_h5, open_h5_for_reading
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_LAYOUT,
    CODE_BY_DTYPE,
    CRC32,
    DOC_OFFSETS,
    DTYPE_BY_NAME,
    EXTENTS,
    FIELDS_GROUP,
    HDF5_FORMAT,
    NO_CODEC,
    NO_SHA256,
    STREAM_FORMAT,
    STREAM_LAYOUT,
    TOKENS,
    StoreMeta,
    TokenArray,
    as_stored,
    field_column,
)


class Column(NamedTuple):
    """One dataset of an HDF5 file, as a look into the file has found it."""

    path: Path
    name: str
    meta: StoreMeta  # shape and dtype of a unit, and the origin of the tokens
    num_tokens: int  # values that are committed
    identity: Identity
    complete: bool = True
    sha256: str | None = None  # until its writer has finished, and where none is stored
    max_token: int | None = None  # the same
    extents: ChunkExtents | None = None  # the extents of the units; None: only HDF5 can read them
    obstacle: str = ""  # the reason why there are no plain extents, or no digests
    columns: dict[str, Any] = {}  # noqa: RUF012 - the extents of each column; nobody changes it
    marker: str = ""  # the dataset whose attributes are the commit marker; a dataset of another program has none
    has_crc32: bool = False
    origin: dict[str, Any] = {}  # noqa: RUF012 - see `create_root`

    @property
    def is_foreign(self) -> bool:
        """Whether another program has written the dataset."""
        return not self.marker

    @property
    def num_units(self) -> int:
        """Batches, or chunks of a stream."""
        return -(-self.num_tokens // self.meta.batch_tokens)

    @property
    def compressed(self) -> CompressedTokens | None:
        """The codec of compressed units, and their bytes."""
        found = self.extents
        return CompressedTokens(found.codec, int(found.table[:, 1].sum())) if isinstance(found, CodedChunks) else None

    def open(self, access: str) -> Tokens:
        """Open the values by their extents, or through h5py where those are not known."""
        meta, extents = self.meta, self.extents
        if isinstance(extents, Extents) and access != "h5py":
            return open_extents(self.path, extents, meta.dtype, self.num_tokens, access, self.identity)
        if isinstance(extents, CodedChunks) and access in ("auto", "pread"):
            ranges = open_ranges(self.path, self.identity, access=access)
            return Decoded(ranges, extents, meta.dtype, meta.batch_tokens, self.num_tokens, meta.noun)
        if access in ("mmap", "pread"):
            others = "'h5py' or 'auto'" if extents is None else "'pread', 'h5py' or 'auto'"
            raise BackendError(
                f"{self.path}: access={access!r} needs plain extents, but {self.obstacle}; use access={others}"
            )
        return H5pyTokens(self)


class OpenDataset:
    """A dataset and its file, which is closed with the last of its readers."""

    def __init__(self, h5: h5py.File, name: str) -> None:
        self.h5, self.stored = h5, h5[name]
        weakref.finalize(self, h5.close).atexit = False


#: HDF5 breaks the chunk index of a dataset with two handles when one is refreshed: without an error, all of its chunks
#: are the first one until the next refresh. So all readers of a growing dataset share a handle, and at the moment of a
#: refresh nobody opens another one, to look at its attributes. A child shares those that it has inherited.
_growing = weakref.WeakValueDictionary[tuple[Any, ...], OpenDataset]()
_handles = threading.Lock()
# a child must not inherit it from a thread that it does not have
os.register_at_fork(before=_handles.acquire, after_in_parent=_handles.release, after_in_child=_handles.release)


def open_dataset(column: Column) -> OpenDataset:
    """Open a dataset; that of a growing file is opened once in a process and its forks."""
    h5 = open_h5_for_reading(column.path, column.identity)
    if column.complete:
        return OpenDataset(h5, column.name)
    status = os.fstat(h5.id.get_vfd_handle())
    key = status.st_dev, status.st_ino, column.name
    with _handles:
        found = _growing.get(key)
        if found is None:
            found = _growing[key] = OpenDataset(h5, column.name)
        else:
            h5.close()
        return found


def close_others(stored: h5py.Dataset) -> None:
    """Close all other handles of a growing dataset: their last reader is gone, and they are about to be closed."""
    # by a thread that has not come to it yet; in a child, by one that is not there
    if stored.file.id.get_intent() & h5py.h5f.ACC_RDWR:  # by a writer in this process, where a refresh does nothing
        return
    own = h5py.h5o.get_info(stored.id).addr
    for other in h5py.h5f.get_obj_ids(stored.file.id, h5py.h5f.OBJ_DATASET):
        if other.id != stored.id.id and h5py.h5o.get_info(other).addr == own:
            while other.valid:
                h5py.h5i.dec_ref(other)


class H5pyTokens(UnitTokens):
    """The values of one dataset through the HDF5 library. See `Tokens`."""

    # opened at the first read of each process, for forks and pickles; all threads share the lock of HDF5

    access, wait = "h5py", Wait.LOCAL

    def __init__(self, column: Column) -> None:
        super().__init__()
        self._column, self.name, self.identity = column, str(column.path), column.identity
        self.dtype, self.unit, self.num_tokens = column.meta.dtype, column.meta.batch_tokens, column.num_tokens
        self._lock = OwnLock()
        self._open: OpenDataset | None = None
        self._stored: h5py.Dataset = None
        self._handle: Handle = -1
        self._direct, self._row_values, self._pid, self._size = False, 1, 0, 0

    def dataset(self) -> h5py.Dataset:
        """Return the dataset, opened in this process."""
        if self._pid == os.getpid():
            return self._stored
        with self._lock:
            if self._pid != os.getpid():
                path, meta = self._column.path, self._column.meta
                self._open = opened = open_dataset(self._column)
                self._stored = stored = opened.stored
                register_filters(stored)
                self._row_values = math.prod(stored.shape[1:])
                # an unfiltered chunk that is one unit is read past HDF5's chunk cache: 6 µs instead of 9 for 64 KiB
                rows = max(1, self.unit // max(1, self._row_values))
                is_unit = stored.chunks == (rows, *stored.shape[1:]) and rows * self._row_values == self.unit
                self._direct = is_unit and codec_of(stored) == NO_CODEC and stored.dtype == meta.dtype
                self._handle = handle_of_h5(opened.h5)
                # a growing file may end up shorter: its writer gives back the bytes that it had reserved, after it
                # has closed the file and before it renames it
                grows = opened.h5.swmr_mode or path.name.endswith(PARTIAL_SUFFIX)
                self._size = 0 if grows else size_of(self._handle)
                self._pid = os.getpid()
        return self._stored

    def _read_units(self, start: int, out: TokenArray) -> None:
        stored, name = self.dataset(), self._column.name
        self._check_size()
        try:
            with h5_damage(self._column.path):
                if self._direct and len(out) % self.unit == 0:
                    rows, zeros = self.unit // self._row_values, (0,) * (stored.ndim - 1)
                    for number, unit in enumerate(out.reshape(-1, self.unit), start // self.unit):
                        stored.id.read_direct_chunk((number * rows, *zeros), out=unit.view(np.uint8))
                    return
                values = self._row_values
                first, stop = start // values, -(-(start + len(out)) // values)
                found = stored[first:stop].reshape(-1)[start - first * values :][: len(out)]
                if self._column.meta.field is None:
                    what = f"{self.name}: {name} ({self._column.meta.noun} {start // self.unit:,})"
                    found = as_stored(found, self._column.meta, what)
                out[...] = found
        except (OSError, FormatError) as error:
            where = f"{self._column.meta.noun} {start // self.unit:,}"
            raise unreadable(self.name, where, stored, error) from error

    def _check_size(self) -> None:
        """Refuse a file that has become shorter: HDF5 returns zeros for missing bytes."""
        try:
            size = size_of(self._handle)
        except OSError as error:
            raise UnavailableError(
                f"{self.name}: the file system has lost the open file: {error.strerror}; if another node renamed it, "
                "follow a growing store on the node of its writer, or on a parallel file system"
            ) from error
        if size < self._size:
            raise cut_short(self._column.path, f"at least {self._size:,} bytes", size)

    def ready(self, start: int) -> bool:
        """Say yes: HDF5's global lock leaves nothing to gain from reading ahead in several threads."""
        return True

    def refresh(self) -> dict[str, Any]:
        """Return the commit marker by now: see `read_marker`."""
        # the marker of a field is that of the tokens, whose dataset is not refreshed here: a field sees as much as
        # their reader has seen
        stored, column = self.dataset(), self._column
        with h5_damage(column.path), _handles:
            close_others(stored)
            stored.refresh()  # the low-level refresh leaves h5py's cached shape stale
            state = read_marker(stored.file[column.marker], column.path)
            if state["complete"]:
                stored.refresh()  # a finish may have come between the parts of that look; now nothing changes any more
                state = read_marker(stored.file[column.marker], column.path)
            self.num_tokens = state["num_batches"] * self.unit  # here: of two looks the later one is never overwritten
        return state

    def close(self) -> None:
        if self._pid == os.getpid():
            self._open = None
        H5pyTokens.__init__(self, self._column._replace(num_tokens=self.num_tokens))

    def __reduce__(self) -> tuple[Any, ...]:
        return H5pyTokens, (self._column._replace(num_tokens=self.num_tokens),)


#: Tokens of a foreign stream that are read at once.
FOREIGN_CHUNK_TOKENS = 1 << 16
#: Dtypes of others whose bytes are those of the tokens that are read.
SAME_BYTES: Final = (*CODE_BY_DTYPE, np.dtype("<i4"))
#: The obstacle of a file that grows.
UNFINISHED = "its writer has not finished"


def _is_ours(h5: h5py.File) -> bool:
    """Return whether this project has written a file, also one whose attributes are damaged."""
    return str(text_of(h5.attrs.get("format"))).startswith("zb-") or CRC32 in h5


def _foreign_tokens(h5: h5py.File, path: Path) -> str | None:
    """Return the name of the tokens in a file of others: of a corpus, or of the only dataset of integers; or None."""
    if _is_corpus(h5, path):
        return TOKENS
    found = [] if _is_ours(h5) else list(integer_datasets(h5))
    return found[0] if len(found) == 1 else None


def _is_corpus(h5: h5py.File, path: Path) -> bool:
    """Return whether others have written 1-D `tokens` here, with their count and their sha256 as attributes."""
    stored = own_dataset(h5, path, TOKENS) if "format" not in h5.attrs else None
    if stored is None or stored.ndim != 1 or stored.dtype not in SAME_BYTES:
        return False
    return "token_count" in stored.attrs and "sha256" in stored.attrs


# --- batches and streams ---------------------------------------------------------------------------------------------


def look_at(
    path: Path,
    layout: str | None = BATCHES_LAYOUT,
    *,
    field: str = "",
    dataset: str | None = None,
    identity: Identity | None = None,
) -> Column:
    """Look into an HDF5 file, and return the column of its tokens or of a field.

    Parameters
    ----------
    layout
        "batches" or "stream": a file of the other layout is refused. None: any.
    field
        The field whose values are the column; "": the tokens.
    dataset
        A dataset of another program; None: the tokens of a file of ours, or the only integer dataset of another one.
    identity
        The identity that the file had before; another file of this name is refused. None: any file.
    """
    with h5_damage(path):
        h5 = open_h5_for_reading(path, identity)
    with h5_damage(path), _handles, h5:
        name = _foreign_tokens(h5, path) if dataset is None else dataset
        if name is not None:
            return _of_layout(layout, _foreign_column(h5, path, name))
        if layout is None:
            layout = STREAM_LAYOUT if text_of(h5.attrs.get("format")) == STREAM_FORMAT else BATCHES_LAYOUT
        column, stored = _own_column(h5, path, layout)
        if field:
            column, stored = _field_column(h5, column, field)
        return _with_extents(h5, column, stored) if column.complete else column


def token_dataset(h5: h5py.File, path: Path, layout: str) -> h5py.Dataset:
    """Return the dataset of the tokens; `FormatError` if the file is none of this layout and version."""
    found, is_stream = text_of(h5.attrs.get("format")), layout == STREAM_LAYOUT
    if not is_stream and found == STREAM_FORMAT:
        raise _is_no_batches(path)
    if found != (expected := STREAM_FORMAT if is_stream else HDF5_FORMAT):
        if _is_ours(h5):
            raise FormatError(f"{path}: expected root attribute format={expected!r}, found {found!r}")
        raise to_choose(h5, path, "is an HDF5 file of another program")
    return our_tokens(h5, path, layout)


def _is_no_batches(path: Path) -> FormatError:
    return FormatError(f"{path}: is a token stream: pass batch_size and seq_len for windows over it")


def _own_column(h5: h5py.File, path: Path, layout: str) -> tuple[Column, h5py.Dataset]:
    """Return the column of the tokens, without their extents, and its dataset."""
    stored, is_stream = token_dataset(h5, path, layout), layout == STREAM_LAYOUT
    found = read_marker(stored, path)
    try:
        more = read_root(h5)
        if is_stream:
            batch_size, seq_len = 1, found["chunk_tokens"]
            more |= {name: found[name] for name in ("document_count", "boundary_token_id")}
        else:
            batch_size, seq_len = int(h5.attrs["batch_size"]), int(h5.attrs["seq_len"])
        fields, codec = fields_in(h5, path, stored.ndim), codec_of(stored) or NO_CODEC
        meta = StoreMeta(batch_size, seq_len, stored.dtype, layout=layout, fields=fields, codec=codec, **more)
    except (ArgumentError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{path}: bad attributes: {error}") from error
    noun, count, unit = "batches", found.get("num_batches", 0), stored.shape[1:]
    if is_stream:
        noun, count, unit = "tokens", found["token_count"], (1, *(stored.chunks or (meta.seq_len,)))
    if unit != meta.shape:
        raise FormatError(f"{path}: {stored.name}: expected {noun} of {meta.shape}, found {unit}")
    if count > len(stored):
        raise FormatError(f"{path}: expected {count:,} {noun}, found space for {len(stored):,}")
    num_tokens, complete = count * (1 if is_stream else meta.batch_tokens), bool(found["complete"])
    require_stored(num_tokens * meta.dtype.itemsize, h5, stored, path)
    if is_stream:
        require_rows(h5, path, DOC_OFFSETS, found["document_count"] + 1)
    column = Column(
        path, meta.column, meta, num_tokens, h5_identity(h5, growing=not complete), complete, found["sha256"],
        max_token=found["max_token"] if complete else None, marker=meta.column, obstacle=UNFINISHED,
        origin=read_origin(h5),
        has_crc32=complete and (is_stream or own_dataset(h5, path, CRC32) is not None),
    )  # fmt: skip
    return column, stored


def _with_extents(h5: h5py.File, column: Column, stored: h5py.Dataset) -> Column:
    """Add the extents of the units, from one list of the chunks, or the obstacle to reading them without HDF5."""
    meta, count = column.meta, column.num_units
    extents: ChunkExtents | None = None
    if stored.chunks is None and stored.ndim == 3:
        base = stored.id.get_offset()
        extents = None if base is None else Extents([Run(base, meta.batch_bytes, count)], meta.batch_bytes)
        obstacle = "it is neither chunked nor contiguous in this file" if base is None else ""
    elif stored.chunks is None:
        obstacle = "it is not chunked"
    elif column.name == BATCHES and stored.chunks != (1, *meta.shape):
        obstacle = f"its chunks are {stored.chunks}, not one batch {(1, *meta.shape)}"
    else:
        extents, obstacle = chunk_extents(stored, meta.batch_bytes, count, column.path)
    columns = column_runs(h5, column.path, column.name, extents, count)
    return column._replace(extents=extents, obstacle=obstacle, columns=columns)


# --- datasets of another origin --------------------------------------------------------------------------------------


def _of_layout(layout: str | None, column: Column) -> Column:
    """Return a column if it has this layout (None: any); else raise `FormatError`."""
    if layout in (None, column.meta.layout):
        return column
    if layout == BATCHES_LAYOUT:
        raise _is_no_batches(column.path)
    raise FormatError(f"{column.path}: {column.name}: expected a 1-D stream, found batches of {column.meta.shape}")


def _foreign_column(h5: h5py.File, path: Path, dataset: str) -> Column:
    """Return a column of integers: a unit is one batch of three axes, one record of two, 65,536 tokens of one."""
    stored = own_dataset(h5, path, dataset)
    if stored is None or stored.ndim not in (1, 2, 3):
        raise to_choose(h5, path, f"expected a dataset {dataset!r} of one, two or three axes, found {stored!r}")
    if stored.dtype.kind not in "iu":
        raise FormatError(f"{path}: {dataset}: expected integers, found {stored.dtype}")
    dtype: np.dtype[Any] = stored.dtype if stored.dtype in CODE_BY_DTYPE else DTYPE_BY_NAME["uint32"]
    layout = STREAM_LAYOUT if stored.ndim == 1 else BATCHES_LAYOUT
    rows, length = {1: (1, FOREIGN_CHUNK_TOKENS), 2: (1, stored.shape[-1])}.get(stored.ndim, stored.shape[1:])
    count, sha256 = math.prod(stored.shape), None
    if stored.ndim == 1 and "token_count" in stored.attrs:  # the last chunk may be filled up
        found = int(stored.attrs["token_count"])
        if not 0 <= found <= count:
            raise FormatError(f"{path}: {dataset}: expected token_count from 0 to {count:,}, found {found:,}")
        count = found
        if "sha256" in stored.attrs and stored.dtype in SAME_BYTES:
            sha256 = stored_sha256(stored.attrs["sha256"], f"{path}: {dataset}")
    require_stored(count * stored.dtype.itemsize, h5, stored, path)
    identity, obstacle = h5_identity(h5, growing=False), f"{dataset!r} is a foreign dataset"
    meta = StoreMeta(rows, length, dtype, layout=layout)
    return Column(path, dataset, meta, count, identity, sha256=sha256, obstacle=obstacle)


# --- fields ----------------------------------------------------------------------------------------------------------


def fields_in(h5: h5py.File, path: Path, axes: int) -> tuple[Field, ...]:
    """Return the fields of a file, in the order of their names; the first axes of each are those of the tokens."""
    group = h5[FIELDS_GROUP] if isinstance(h5.get(FIELDS_GROUP, getlink=True), h5py.HardLink) else None
    if not isinstance(group, h5py.Group):
        return ()
    names = [name for name in sorted(group) if not name.endswith((f".{CRC32}", f".{EXTENTS}"))]
    found = [(name, own_dataset(h5, path, field_column(name))) for name in names]
    try:
        return tuple(Field(name, stored.dtype, stored.shape[axes:]) for name, stored in found if stored is not None)
    except ArgumentError as error:
        raise FormatError(f"{path}: {error}") from error


def _field_column(h5: h5py.File, tokens: Column, name: str) -> tuple[Column, h5py.Dataset]:
    """Return the column of one field of some tokens, and its dataset."""
    path, meta, fields = tokens.path, tokens.meta, [field.name for field in tokens.meta.fields]
    stored = own_dataset(h5, path, field_column(name))
    if stored is None or name not in fields:
        raise FormatError(f"{path}: expected a field {name!r}, found {fields}")
    for field in meta.fields:
        chunk = ((meta.seq_len,) if meta.layout == STREAM_LAYOUT else (1, *meta.shape)) + field.shape
        if (chunks := h5[field_column(field.name)].chunks) != chunk:
            raise FormatError(f"{path}: field {field.name}: expected chunks of {chunk}, found {chunks}")
    meta = meta.of_field(name)
    values = tokens.num_tokens * meta.batch_tokens // tokens.meta.batch_tokens
    require_stored(values * meta.dtype.itemsize, h5, stored, path)
    sha256 = stored_sha256(stored.attrs["sha256"], f"{path}: {meta.column}")
    known = sha256 if tokens.complete and sha256 != NO_SHA256 else None
    column = tokens._replace(name=meta.column, meta=meta, num_tokens=values, sha256=known, max_token=None, origin={})
    return column._replace(has_crc32=column.complete), stored
