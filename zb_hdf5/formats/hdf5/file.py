"""HDF5 files: opened also where a cluster has no file locks, with clear errors; their common parts; their chunks."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import warnings
import weakref
from collections.abc import Iterator, Mapping
from errno import EIO
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError, IncompleteError, UnavailableError, ZbError
from zb_hdf5.files.codecs import CodedChunks
from zb_hdf5.files.objects import ObjectFile, RemoteObject
from zb_hdf5.files.paths import (
    Handle,
    Identity,
    RemotePath,
    identity_of,
    on_failure,
    require_bytes,
    require_identity,
    require_regular,
)
from zb_hdf5.files.publishing import NO_LOCKS, PARTIAL_SUFFIX, write_fully
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.spec import (
    CODECS,
    CRC32_CHUNK_ROWS,
    DESCRIPTIONS,
    EXTENTS_CHUNK_ROWS,
    HDF5_FORMAT,
    HDF5_VERSION,
    MAX_SOURCE_CHARS,
    NO_CODEC,
    OPTIONAL_ATTRIBUTES,
    STREAM_FORMAT,
    STREAM_LAYOUT,
    StoreMeta,
    crc32_column,
    extents_column,
    is_sha256,
)
from zb_hdf5.version import __version__

#: Optional root attributes that are numbers.
OPTIONAL_NUMBERS: Final = tuple(name for name in OPTIONAL_ATTRIBUTES if name != "tokenizer")
_ERRNO: Final = re.compile(r"errno = (\d+)")
#: Ranges of the superblock, version 3: the end of file, the bytes that the checksum covers, and their total.
_END_OF_FILE, _CHECKED, _SUPERBLOCK_BYTES = slice(28, 36), slice(0, 44), 48
#: The largest ratio by which zeros and ascending numbers shrink in the common filters.
FILTER_RATIO: Final = 4096
CREATOR: Final = f"zb_hdf5 {__version__} (h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version})"


def open_h5(path: Path | str, mode: str = "r", **options: Any) -> h5py.File:
    """Open an HDF5 file, or an object; if the file system has no locks, warn once and open without them."""
    file = ObjectFile(RemoteObject(str(path))) if isinstance(path, RemotePath) else None
    if file is not None:
        file.seek(0, os.SEEK_END)  # fetches the head: what waits below does so under the lock that all of HDF5 has
    elif mode == "r":
        require_regular(os.stat(path).st_mode, path)  # HDF5 would wait for ever for the other end of a FIFO
    try:
        h5 = h5py.File(file or path, mode, **options)
    except OSError as error:
        # HDF5 tolerates only ENOSYS from flock(2) by itself; clusters answer ENOLCK, EOPNOTSUPP, 524 or EIO
        if error.errno in NO_LOCKS and "lock file" in str(error):
            warnings.warn(f"{path}: this file system has no file locks; opening without them", stacklevel=2)
            return h5py.File(path, mode, locking=False, **options)
        raise _translate(error, path) from error
    h5.source = None if file is None else file.source
    return h5


def handle_of_h5(h5: h5py.File) -> Handle:
    """Return the handle by which the size and identity of an open file are asked for."""
    handle: Handle = getattr(h5, "source", None) or h5.id.get_vfd_handle()
    return handle


def open_h5_for_reading(path: Path, identity: Identity | None = None) -> h5py.File:
    """Open for reading, in SWMR mode if its writer is alive or was killed; `FormatError` if the identity differs.

    Also if there was such a `.partial` before, and it is not there any more.
    """
    try:
        h5 = open_h5(path)
    except UnavailableError:
        try:
            h5 = open_h5(path, swmr=True)
        except IncompleteError:  # its writer has made it longer after HDF5 looked at its size, and before it read that
            h5 = open_h5(path, swmr=True)
    except FileNotFoundError as error:
        if identity is None or not path.name.endswith(PARTIAL_SUFFIX):
            raise
        final = path.name.removesuffix(PARTIAL_SUFFIX)
        raise FormatError(
            f"{path}: is not there any more: its writer has finished it since this reader was made, or it was renamed; "
            f"open {final}"
        ) from error
    if identity is not None:
        with on_failure(h5.close):
            require_identity(handle_of_h5(h5), identity, path)
    return h5


def h5_identity(h5: h5py.File, *, growing: bool) -> Identity:
    """Return the identity by which an open file differs from another one that has its name later."""
    return identity_of(handle_of_h5(h5), growing=growing)


def require_version(h5: h5py.File, expected: int, path: Path) -> None:
    """Raise `FormatError` unless a file is of this version of its format."""
    found = h5.attrs.get("format_version")
    if np.ndim(found) != 0 or found != expected:
        raise FormatError(f"{path}: expected format_version {expected}, found {found}")


def require_stored(claimed_bytes: int, h5: h5py.File, stored: h5py.Dataset, path: Path) -> None:
    """Raise `IncompleteError` if a file is shorter than its data could be, by the ratio that a filter reaches."""
    filtered = stored.id.get_create_plist().get_nfilters() > 0
    claimed = claimed_bytes // FILTER_RATIO if filtered else claimed_bytes
    require_bytes(claimed, handle_of_h5(h5), path, f"{stored.name}")


@contextlib.contextmanager
def h5_damage(path: Path) -> Iterator[None]:
    """Turn the errors that h5py raises on damaged metadata, of many kinds, into `FormatError`; our own errors pass."""
    try:
        yield
    except (ZbError, FileNotFoundError, PermissionError):
        raise
    except (KeyError, RuntimeError, ValueError, OverflowError, TypeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's trouble, not the file's
        text = error.args[0] if error.args else error
        raise FormatError(f"{path}: HDF5 finds it damaged: {text}; restore it, or convert again") from error


def own_dataset(h5: h5py.File, path: Path, name: str) -> h5py.Dataset | None:
    """Return a dataset whose bytes are in this file, or None; `FormatError` if a link leads out of the file."""
    found = _follow(h5, path, name)  # other files were not opened by the user, and may be any that can be read
    if not isinstance(found, h5py.Dataset):
        return None
    if elsewhere := bytes_elsewhere(found):
        raise _leads_out(path, name, elsewhere)
    return found


def bytes_elsewhere(stored: h5py.Dataset) -> str:
    """Describe how the bytes of a dataset are kept in other files; "" if they are in its own."""
    creation: Any = stored.id.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL:
        return "is a virtual dataset"
    return "keeps its data in other files (external storage)" if creation.get_external_count() else ""


def _follow(group: Any, path: Path, name: str, soft_links: int = 16) -> Any:
    """Return the object at the end of links that stay in the file, or None."""
    for part in (part for part in name.split("/") if part not in ("", ".")):
        try:
            link = group.get(part, getlink=True) if isinstance(group, h5py.Group) else None
        except TypeError as error:  # neither hard, soft nor external
            raise _leads_out(path, part, "is a user-defined link") from error
        if link is None:
            return None
        if isinstance(link, h5py.SoftLink) and soft_links:
            group = _follow(group.file if link.path.startswith("/") else group, path, link.path, soft_links - 1)
        elif isinstance(link, h5py.HardLink):
            group = group[part]
        else:
            raise _leads_out(path, part, f"is a link to {getattr(link, 'filename', 'itself')}")
    return group


def _leads_out(path: Path, name: str, what: str) -> FormatError:
    return FormatError(
        f"{path}: {name!r} {what}; nothing outside of a file is followed: copy it into one file, as h5copy does"
    )


def require_rows(h5: h5py.File, path: Path, name: str, count: int) -> h5py.Dataset:
    """Return a 1-D dataset that has `count` rows, or more; `FormatError` if there is none."""
    stored = own_dataset(h5, path, name)
    if stored is None or stored.ndim != 1 or len(stored) < count:
        raise FormatError(f"{path}: expected a dataset {name!r} of {count:,} rows, found {stored!r}")
    require_stored(count * stored.dtype.itemsize, h5, stored, path)
    return stored


def text_of(value: object) -> object:
    """Decode a fixed-length text; leave anything else as it is."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def stored_sha256(value: object, where: object) -> str:
    """Return the digest in an attribute; `FormatError` if it is none."""
    sha256 = str(text_of(value))
    if not is_sha256(sha256):
        raise FormatError(f"{where}: expected 64 hexadecimal digits in sha256, found {sha256!r}")
    return sha256


def end_of_file(fd: int) -> int:
    """Return the end of the file as the superblock has it."""
    return int.from_bytes(os.pread(fd, _SUPERBLOCK_BYTES, 0)[_END_OF_FILE], "little")


def set_end_of_file(fd: int, end: int) -> None:
    """Change the end of a closed file in its superblock, in one write: HDF5 cannot move it back in SWMR mode."""
    superblock = bytearray(os.pread(fd, _SUPERBLOCK_BYTES, 0))
    superblock[_END_OF_FILE] = end.to_bytes(8, "little")
    superblock[_CHECKED.stop :] = _lookup3(superblock[_CHECKED]).to_bytes(4, "little")
    write_fully(fd, bytes(superblock), 0)


def _lookup3(data: bytes | bytearray) -> int:
    """Return HDF5's checksum of metadata: Bob Jenkins' lookup3, `hashlittle` with the initial value 0."""
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    words = np.frombuffer(bytes(data).ljust(-(-len(data) // 12) * 12, b"\0"), "<u4").tolist()
    for start in range(0, len(words), 3):
        a, b, c = ((x + word) & 0xFFFFFFFF for x, word in zip((a, b, c), words[start : start + 3], strict=True))
        if start + 3 < len(words):
            for turn in (4, 6, 8, 16, 19, 4):
                a = ((a - c) & 0xFFFFFFFF) ^ _rotated(c, turn)
                c = (c + b) & 0xFFFFFFFF
                a, b, c = b, c, a
    for turn in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotated(b, turn)) & 0xFFFFFFFF
        a, b, c = b, c, a
    return b  # the last one that was mixed


def _rotated(x: int, turn: int) -> int:
    return (x << turn | x >> (32 - turn)) & 0xFFFFFFFF


def creation_of(codec: str = NO_CODEC) -> Any:
    """Return the creation properties of a dataset: its chunks are allocated before they are written, or compressed."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if codec == NO_CODEC:
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    else:  # by us: HDF5 itself need not have the filter
        name, _, level = codec.partition(":")
        properties.set_filter(CODECS[name].filter_id, h5py.h5z.FLAG_OPTIONAL, (int(level),))
    return properties


class WriteFailure(OSError):
    """HDF5 failed to write a file: it can neither go on with it nor close it. See `WrittenFile`."""


@contextlib.contextmanager
def hdf5_writes(path: Path) -> Iterator[None]:
    """Turn the errors that h5py raises when the disk fails under HDF5 into one OSError with path and cause."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if getattr(error, "filename", None) is not None:
            raise
        found = _ERRNO.search(str(error))
        code = int(found[1]) if found else getattr(error, "errno", None) or EIO
        raise WriteFailure(code, f"{os.strerror(code)}, while HDF5 was writing", str(path)) from error


class WrittenFile:
    """A file that HDF5 writes: closed once at most, and never after HDF5 has failed to write it."""

    # HDF5 ends in a segmentation fault when a file whose close has failed is closed again, or its objects are, and
    # Python closes what it frees: they are kept to the end of the process

    def __init__(self, h5: h5py.File) -> None:
        self.h5, self.objects = h5, list[object]()  # those that stay open
        self._fd: int = h5.id.get_vfd_handle()  # to ask later may be a segmentation fault
        self._file = os.fstat(self._fd)
        _written.add(self)

    def close(self, *, has_failed: bool = False) -> None:
        """Close the file, unless HDF5 has failed to write it, or fails now."""
        if not self.h5.id.valid:
            return
        if not has_failed:
            with contextlib.suppress(OSError, RuntimeError):
                self.h5.close()
                return
        self._keep_open()
        self._let_go()

    def leave_to_parent(self) -> None:
        """In the child of a fork, have HDF5 read the file only; it closes it when the child ends, and would write."""
        if self.h5.id.valid:
            self._keep_open()
            with contextlib.suppress(OSError):
                reading = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
                os.dup2(reading, self._fd, inheritable=False)
                os.close(reading)
            atexit.register(self._let_go)  # a write that fails would be noise

    def _keep_open(self) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object([self.h5, self.objects]))

    def _let_go(self) -> None:
        """Put memory behind the descriptor of HDF5: nothing that it still writes reaches what was committed."""
        with contextlib.suppress(OSError):
            if not os.path.samestat(os.fstat(self._fd), self._file):
                return  # HDF5 has closed it
            # HDF5 takes a later file with the same inode for this one: the inode is kept, and with it the disk space
            os.open(f"/proc/self/fd/{self._fd}", os.O_PATH | os.O_CLOEXEC)
            memory = os.memfd_create("zb-failed-file", os.MFD_CLOEXEC)
            try:
                os.dup2(memory, self._fd, inheritable=False)
            finally:
                os.close(memory)


_written: Final = weakref.WeakSet[WrittenFile]()


def _leave_all_to_parent() -> None:
    for file in list(_written):
        file.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def create_texts(h5: h5py.File, **texts: str) -> None:
    """Create root attributes of fixed length."""
    # the heap of other texts has no checksum: one flipped bit there can send HDF5 2.0 into an endless loop
    for name, text in texts.items():
        data = text.encode("utf-8", "replace")
        h5.attrs.create(name, data, dtype=h5py.string_dtype("utf-8", max(1, len(data))))


def create_root(h5: h5py.File, meta: StoreMeta, origin: Mapping[str, Any]) -> None:
    """Create the attributes of the root group; `origin` has those of `ORIGIN_ATTRIBUTES` that are known."""
    is_stream, source = meta.layout == STREAM_LAYOUT, dict(origin.get("source") or {})
    texts = {"shuffle": origin.get("shuffle"), "split": origin.get("split"), "source": _source_text(source)}
    texts |= {"packing": source.get("packing"), "tokenizer": meta.tokenizer}
    create_texts(
        h5, format=STREAM_FORMAT if is_stream else HDF5_FORMAT, description=DESCRIPTIONS[meta.layout], creator=CREATOR,
        **{name: str(text) for name, text in texts.items() if text},
    )  # fmt: skip
    h5.attrs.create("format_version", HDF5_VERSION, dtype="<u4")
    numbers = {name: getattr(meta, name) or None for name in OPTIONAL_NUMBERS}
    if not is_stream:  # the marker of a stream has its shape, its boundary and the number of its documents
        numbers |= {"batch_size": meta.batch_size, "seq_len": meta.seq_len}
        numbers |= {name: source.get(name) for name in ("boundary_token_id", "pad_id")}
    for name, number in numbers.items():
        if isinstance(number, (int, np.integer)) and 0 <= number < 2**64:
            h5.attrs.create(name, number, dtype="<u8")


def _source_text(source: Mapping[str, Any]) -> str:
    """Return the JSON text of a source; of a long one, lists are replaced by their lengths."""
    text = json.dumps(source) if source else ""
    if len(text) <= MAX_SOURCE_CHARS:
        return text
    short = json.dumps({key: f"{len(v):,} in all" if isinstance(v, list) else v for key, v in source.items()})
    return short if len(short) <= MAX_SOURCE_CHARS else ""


def read_root(h5: h5py.File) -> dict[str, Any]:
    """Return the optional root attributes that describe all tokens of a file, as `StoreMeta` has them."""
    found: dict[str, Any] = {name: int(h5.attrs.get(name, 0)) for name in OPTIONAL_NUMBERS}
    return found | {"tokenizer": str(text_of(h5.attrs.get("tokenizer", "")))}


def read_origin(h5: h5py.File) -> dict[str, Any]:
    """Return the origin of the tokens that `create_root` was given, as far as it can be read."""
    texts = {name: str(text_of(h5.attrs[name])) for name in ("source", "shuffle", "split") if name in h5.attrs}
    try:
        source = json.loads(texts.pop("source", "{}"))
    except ValueError:
        return texts
    return texts | ({"source": source} if source and isinstance(source, dict) else {})


def _translate(error: OSError, path: Path | str) -> Exception:
    text = str(error)
    if "already open for" in text or isinstance(error, BlockingIOError):
        return UnavailableError(f"{path}: a writer has it open, or was killed: {text}")
    if "truncated file" in text or "eof" in text.lower():
        return IncompleteError(f"{path}: truncated: {text}; restore it, or convert again")
    if error.errno is not None:
        return error
    return FormatError(f"{path}: HDF5 cannot read it: {text}")


# --- the chunks of a dataset: their extents, asked of HDF5 once, their codec, the filters that this HDF5 lacks --------

#: The extents of the chunks of a dataset.
ChunkExtents: TypeAlias = Extents | CodedChunks


def chunk_offsets(stored: h5py.Dataset) -> npt.NDArray[np.int64]:
    """Return the byte offset of each chunk along the first axis, -1 where there is none."""
    return chunk_table(stored, -(-len(stored) // stored.chunks[0]))[:, 0]


def chunk_table(stored: h5py.Dataset, num_chunks: int) -> npt.NDArray[np.int64]:
    """Return byte offset, bytes and skipped filters of the first chunks along the first axis, (N, 3); -1: no chunk."""
    found: list[tuple[int, int, int, int]] = []  # by one `chunk_iter`: single questions take the square of the time
    stored.id.chunk_iter(lambda c: found.append((c.chunk_offset[0], c.byte_offset, c.size, c.filter_mask)))
    chunks = np.array(found, np.int64).reshape(-1, 4)
    numbers = chunks[:, 0] // stored.chunks[0]
    table = np.full((num_chunks, 3), -1, dtype=np.int64)
    table[numbers[numbers < num_chunks]] = chunks[numbers < num_chunks, 1:]
    return table


def chunk_extents(
    stored: h5py.Dataset, chunk_bytes: int, num_chunks: int, path: Path
) -> tuple[ChunkExtents | None, str]:
    """List the chunks once; return the extents of the first ones, or None and the obstacle."""
    codec = codec_of(stored)
    if codec is None:
        return None, "it is compressed or filtered"
    table = chunk_table(stored, num_chunks)
    missing = np.flatnonzero(table[:, 0] < 0)
    if len(missing):
        raise FormatError(f"{path}: batch {missing[0]:,} is committed but has no chunk; restore the file")
    if codec == NO_CODEC:
        return Extents.from_offsets(table[:, 0], chunk_bytes), ""
    own = int(np.prod(stored.chunks)) * stored.dtype.itemsize == chunk_bytes
    if not own or ((table[:, 2] != 0) != (table[:, 1] == chunk_bytes)).any():  # as no writer of ours leaves it
        return None, "it is compressed or filtered"
    return CodedChunks(codec, table[:, :2].copy()), "it is compressed"


def column_runs(
    h5: h5py.File, path: Path, column: str, extents: ChunkExtents | None, num_chunks: int
) -> dict[str, tuple[Run, ...]]:
    """Return the runs of the chunks of a column and of its crc32 rows, as far as a reader needs no HDF5."""
    if extents is None:
        return {}
    found = {column: tuple(extents.runs)} if isinstance(extents, Extents) else {}
    rows = own_dataset(h5, path, crc32_column(column))
    if rows is not None and len(rows) >= num_chunks and _is_table(rows, "<u4", (CRC32_CHUNK_ROWS,)):
        found[crc32_column(column)] = chunk_runs(rows)
    if isinstance(extents, CodedChunks):
        table: Any = own_dataset(h5, path, extents_column(column))
        own = _is_table(table, "<u8", (EXTENTS_CHUNK_ROWS, 2)) and table.shape == extents.table.shape
        if own and np.array_equal(table[:], extents.table):
            found[extents_column(column)] = chunk_runs(table)
    return {name: runs for name, runs in found.items() if runs or name == column}


def _is_table(stored: h5py.Dataset | None, dtype: str, chunks: tuple[int, ...]) -> bool:
    """Return whether a dataset has the chunks that we write, and no filters."""
    own = stored is not None and stored.chunks == chunks and stored.dtype == np.dtype(dtype)
    return own and codec_of(stored) == NO_CODEC


def chunk_runs(stored: h5py.Dataset) -> tuple[Run, ...]:
    """Return the runs of the chunks of an unfiltered dataset; nothing if one is not allocated."""
    offsets = chunk_offsets(stored)
    if (offsets < 0).any():
        return ()
    return tuple(Extents.from_offsets(offsets, int(np.prod(stored.chunks)) * stored.dtype.itemsize).runs)


def codec_of(stored: h5py.Dataset) -> str | None:
    """Return the codec of a dataset; None if it has filters that are no codec of ours."""
    creation: Any = stored.id.get_create_plist()
    if creation.get_nfilters() == 0:
        return NO_CODEC
    code, _, values, _ = creation.get_filter(0)
    names = [name for name, facts in CODECS.items() if facts.filter_id == code]
    if creation.get_nfilters() > 1 or not names:
        return None
    return f"{names[0]}:{values[0] if values else CODECS[names[0]].default_level}"


def register_filters(stored: h5py.Dataset) -> None:
    """Import the plugin that has the common filters, where a dataset needs one that HDF5 lacks."""
    if lacking_filters(stored):
        with contextlib.suppress(ImportError):
            import_module("hdf5plugin")  # registers them as it is imported


def unreadable(path: Path | str, what: str, stored: h5py.Dataset, error: Exception) -> ZbError:
    """Return the error of a failed read of a dataset: a filter is lacking, or `what` is damaged."""
    if lacking := lacking_filters(stored):
        return UnavailableError(
            f"{path}: this HDF5 installation lacks a filter that the file needs: {lacking[0]}; "
            "pip install '.[codecs]' has the common ones"
        )
    return FormatError(f"{path}: {what}: HDF5 cannot read it: {error}")


def lacking_filters(stored: h5py.Dataset) -> list[str]:
    """Name the filters that a dataset needs and this HDF5 library lacks."""
    creation: Any = stored.id.get_create_plist()
    found = (creation.get_filter(number) for number in range(creation.get_nfilters()))
    return [
        f"filter {code} ({name.decode('utf-8', 'replace')})"
        for code, _, _, name in found
        if not h5py.h5z.filter_avail(code)
    ]
