"""Which backend serves which file, and the two functions that open one.

A new backend is one file with a reader and a writer, and one row in `BACKENDS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from zb_hdf5.columns.reader import BatchReader, require_choice, require_options
from zb_hdf5.columns.writer import BatchWriter, FileWriter
from zb_hdf5.core.files import regular
from zb_hdf5.core.publishing import PARTIAL_SUFFIX, partial_path
from zb_hdf5.errors import ArgumentError, BackendError, ConvertError, FormatError
from zb_hdf5.spec import BATCH_MAGIC, DEFAULT_SPLIT, HDF5_MAGIC, INDEX_NAME, STREAM_LAYOUT, StoreMeta, stored_dtype

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Backend:
    """A row of the registry: a file format and the code that serves it.

    Attributes
    ----------
    suffix
        Of the files it writes.
    magic, magic_offsets
        The bytes that tell its files, and where they may stand.
    reader, writer
        "module:class", imported when first needed.
    """

    suffix: str
    magic: bytes
    magic_offsets: tuple[int, ...]
    reader: str
    writer: str

    def reader_class(self) -> Callable[..., BatchReader]:
        return cast(Callable[..., BatchReader], _load(self.reader))

    def writer_class(self) -> type[FileWriter]:
        return cast(type[FileWriter], _load(self.writer))


BACKENDS: Final = {
    "batch": Backend(
        ".batch", BATCH_MAGIC, (0,), "zb_hdf5.formats.native:BatchFileReader", "zb_hdf5.formats.native:BatchFileWriter"
    ),
    "hdf5": Backend(
        ".h5",
        HDF5_MAGIC,
        (0, 512, 1024, 2048),  # behind a user block HDF5 doubles the offset; nobody uses more
        "zb_hdf5.formats.hdf5.reader:HDF5BatchReader",
        "zb_hdf5.formats.hdf5.writer:HDF5BatchWriter",
    ),
}


def detect_backend(path: str | os.PathLike[str]) -> str:
    """Return the name of the backend that serves a file unless another one is asked for. Raises as below."""
    return detect_backends(path)[0]


def detect_backends(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the backends whose magic bytes the file carries: both for a stamped `.batch`.

    Raises
    ------
    FormatError
        If no backend knows the file.
    """
    path = Path(path)
    with open(path, "rb", opener=regular) as file:
        head = file.read(4096)
    found = [
        name
        for name, backend in BACKENDS.items()
        if any(head.startswith(backend.magic, offset) for offset in backend.magic_offsets)
    ]
    if found:
        return found
    raise FormatError(
        f"{path}: no known file: expected a .batch file (magic {BATCH_MAGIC!r}), an HDF5 file or a {INDEX_NAME}, "
        f"found {head[:8]!r}"
    )


def is_stream(path: str | os.PathLike[str], backend: str = "auto") -> bool:
    """Return whether `path` is a token stream: `.npy`, a folder of `.npy` files, an HDF5 stream, a store of those."""
    path = Path(path)
    index = path if path.name == INDEX_NAME else path / INDEX_NAME
    if index.exists():
        return cast(str, _load("zb_hdf5.store.index:layout_of")(index)) == STREAM_LAYOUT
    if path.is_dir():
        return backend == "npy" or any(path.glob("*.npy"))
    if path.suffix == ".npy" or not path.is_file():
        return path.suffix == ".npy"
    with open(path, "rb", opener=regular) as file:
        is_hdf5 = file.read(len(HDF5_MAGIC)) == HDF5_MAGIC
    return is_hdf5 and bool(_load("zb_hdf5.formats.hdf5.stream_reader:is_stream_file")(path))


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder of this machine.

    Raises
    ------
    ArgumentError
        If it is a URL: a path would lose one of its slashes, and then not be found.
    """
    if _URL.match(os.fspath(path)):
        raise ArgumentError(f"{path}: is a URL: expected a file or folder of this machine")
    return Path(path)


def open_reader(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    access: str = "auto",
    verify: str = "none",
    dataset: str | None = None,
    split: str | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    overlap: int = 0,
) -> BatchReader:
    """Open a file, a folder with a `shards.json`, or the `shards.json` itself; or a token stream as batches of windows.

    Parameters
    ----------
    backend
        "auto" looks at the magic bytes; "batch" or "hdf5" demands that format, "npy" a file or folder of 1-D arrays.
        A stamped `.batch` is both; "auto" takes it for a `.batch`.
    access
        "mmap": batches are views of a mapping. "pread": batches are read into buffers; the process's memory does not
        grow with the file, and a file that changes is never a bus error. "h5py": through the HDF5 library. "auto":
        what is converted is read by position, and the file is mapped at the first call that needs a mapping (a view,
        int32 of uint32, records), but never on a network file system; h5py where batches are no plain extents.
    verify
        "none"; "batch": compare each batch with its stored crc32 when it is read; "store": check every digest before
        returning.
    dataset
        Name of a 3-D integer dataset in an HDF5 file of another origin, read through h5py.
    split
        Of a store, read the shards of this split only ("train", "val"); None: all shards. A lone file is "train".
    batch_size, seq_len, overlap
        Of a token stream (an HDF5 stream, a store of them, 1-D `.npy` files): the shape of its windows, and how many
        tokens each of them shares with the next. See `WindowReader`.

    Raises
    ------
    FormatError, IncompleteError, ChecksumError
        If the file is malformed, truncated, or fails `verify`.
    BackendError
        If `backend` or `access` cannot serve this file.
    OSError
        If it cannot be opened.
    """
    require_options(access, verify)
    require_choice("backend", backend, ("auto", *BACKENDS, "npy"))
    path = local_path(path)
    shaped = batch_size is not None and seq_len is not None
    # without a shape a lone HDF5 file is taken for batches, which saves a look into it; its reader tells a stream
    if (shaped or path.suffix not in (".h5", ".batch")) and is_stream(path, backend):
        if not shaped:
            raise ArgumentError(f"{path}: is a token stream: pass batch_size and seq_len for windows over it")
        shape = {"batch_size": batch_size, "seq_len": seq_len, "overlap": overlap}
        return _open_windows(path, backend, dataset, **shape, split=split, access=access, verify=verify)
    if backend == "npy" or shaped or overlap:
        raise ArgumentError(f"{path}: is no token stream: its batches have the shape that they were stored with")
    if path.is_dir() or path.name == INDEX_NAME:
        if dataset is not None:
            raise BackendError(f"{path}: dataset={dataset!r} needs an HDF5 file, found a store")
        return _open_store(path, backend, access, verify, split)
    if split not in (None, DEFAULT_SPLIT) and path.exists():
        raise ArgumentError(f"{path}: split={split!r} needs a store, found one file")
    if not path.exists() and partial_path(path).exists():
        raise FileNotFoundError(
            f"{path} is not finished: {path.name}{PARTIAL_SUFFIX} beside it is being written, or its writer died"
        )
    detected = detect_backends(path)
    found = detected[0] if backend == "auto" else backend
    if found not in detected:
        raise BackendError(f"{path}: asked for backend {backend!r}, found a {detected[0]!r} file")
    options = {} if dataset is None else {"dataset": dataset}
    if options and found != "hdf5":
        raise BackendError(f"{path}: dataset={dataset!r} needs an HDF5 file, found a {found!r} file")
    return BACKENDS[found].reader_class()(path, access=access, verify=verify, **options)


def _open_windows(path: Path, backend: str, dataset: str | None, **options: Any) -> BatchReader:
    kind = "npy" if path.suffix == ".npy" or (path.is_dir() and not (path / INDEX_NAME).exists()) else "hdf5"
    if backend not in ("auto", kind) or dataset is not None:
        raise BackendError(f"{path}: asked for backend {backend!r}, dataset {dataset!r}, found a {kind!r} stream")
    return cast(BatchReader, _load("zb_hdf5.views.windows:WindowReader")(path, **options))


def _open_store(path: Path, backend: str, access: str, verify: str, split: str | None) -> BatchReader:
    if verify == "store":
        problems = [report.problem for report in _load("zb_hdf5.store.verify:verify_store")(path) if report.problem]
        if problems:
            raise problems[0]
        verify = "none"
    options: dict[str, Any] = {"backend": backend, "access": access, "verify": verify, "split": split}
    index = _load("zb_hdf5.store.index:ShardIndex").load(path)
    if not index.complete:
        return cast(BatchReader, _load("zb_hdf5.loaders.following:LiveReader")(path, **options))
    return cast(BatchReader, _load("zb_hdf5.store.shards:ShardedReader")(path, index=index, **options))


def open_writer(
    path: str | os.PathLike[str],
    *,
    batch_size: int,
    seq_len: int,
    backend: str = "auto",
    dtype: str = "uint32",
    seed: int = 0,
    total_records: int = 0,
    vocab_size: int = 0,
    expected_batches: int = 0,
    overwrite: bool = False,
    durable: bool = False,
    live: bool = False,
    shard_batches: int = 0,
) -> BatchWriter:
    """Open a new file for writing; `backend="auto"` goes by the suffix (`.batch`, `.h5`).

    Parameters
    ----------
    dtype
        "uint32" or "uint16". In a `.batch` file uint16 is an extension of ours: other ZeroBatch v2 readers take it for
        uint32.
    live
        Return a `LiveStoreWriter` of the folder `path`, with HDF5 shards of `shard_batches` batches.

    Returns
    -------
    BatchWriter
        A context manager with `write(batches)`: a `FileWriter`, or a `LiveStoreWriter`.

    Examples
    --------
    >>> with open_writer("train.h5", batch_size=32, seq_len=512, dtype="uint16") as writer:  # doctest: +SKIP
    ...     for batch in batches:
    ...         writer.write(batch)
    """
    path = local_path(path)
    meta = StoreMeta(batch_size, seq_len, stored_dtype(dtype), seed, total_records, vocab_size=vocab_size)
    if live:
        if backend not in ("auto", "hdf5") or overwrite:
            raise ArgumentError(
                f"{path}: a live store has HDF5 shards and replaces nothing: leave out the other option"
            )
        live_writer = cast(Callable[..., BatchWriter], _load("zb_hdf5.store.live:LiveStoreWriter"))
        return live_writer(path, meta, shard_batches=shard_batches, durable=durable)
    if shard_batches:
        raise ArgumentError(f"{path}: shard_batches={shard_batches} is for live=True")
    if backend == "auto":
        backend = backend_of_suffix(path)
    require_choice("backend", backend, tuple(BACKENDS))
    return BACKENDS[backend].writer_class()(
        path, meta, expected_batches=expected_batches, overwrite=overwrite, durable=durable
    )


def backend_of_suffix(path: str | os.PathLike[str]) -> str:
    """Return the backend that writes files with the suffix of `path`.

    Raises
    ------
    ConvertError
        If none does.
    """
    path = Path(path)
    for name, backend in BACKENDS.items():
        if path.suffix == backend.suffix:
            return name
    suffixes = " or ".join(backend.suffix for backend in BACKENDS.values())
    raise ConvertError(f"{path}: expected a name that ends in {suffixes}, or backend=")


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
