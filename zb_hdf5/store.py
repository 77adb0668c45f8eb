"""Which backend serves which file, and the two functions that open one.

A new backend is one file with a reader and a writer, and one row in `BACKENDS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from zb_hdf5.errors import ArgumentError, BackendError, ConvertError, FormatError
from zb_hdf5.publish import PARTIAL_SUFFIX, partial_path
from zb_hdf5.reader import BatchReader, require_choice, require_options
from zb_hdf5.spec import BATCH_MAGIC, DEFAULT_SPLIT, HDF5_MAGIC, INDEX_NAME, StoreMeta, stored_dtype
from zb_hdf5.writer import BatchWriter


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

    def writer_class(self) -> type[BatchWriter]:
        return cast(type[BatchWriter], _load(self.writer))


BACKENDS: Final = {
    "batch": Backend(".batch", BATCH_MAGIC, (0,), "zb_hdf5.native:BatchFileReader", "zb_hdf5.native:BatchFileWriter"),
    "hdf5": Backend(
        ".h5",
        HDF5_MAGIC,
        (0, 512, 1024, 2048),  # behind a user block HDF5 doubles the offset; nobody uses more
        "zb_hdf5.h5read:HDF5BatchReader",
        "zb_hdf5.h5write:HDF5BatchWriter",
    ),
}


def detect_backend(path: Path) -> str:
    """Return the name of the backend whose magic bytes the file carries.

    Raises
    ------
    FormatError
        If no backend knows the file.
    """
    with open(path, "rb") as file:
        head = file.read(4096)
    for name, backend in BACKENDS.items():
        if any(head.startswith(backend.magic, offset) for offset in backend.magic_offsets):
            return name
    raise FormatError(
        f"{path}: no known file: expected a .batch file (magic {BATCH_MAGIC!r}), an HDF5 file or a {INDEX_NAME}, "
        f"found {head[:8]!r}"
    )


def open_reader(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    access: str = "auto",
    verify: str = "none",
    dataset: str | None = None,
    split: str | None = None,
) -> BatchReader:
    """Open a file, a folder with a `shards.json`, or the `shards.json` itself.

    Parameters
    ----------
    backend
        "auto" looks at the magic bytes; "batch" or "hdf5" demands that format.
    access
        "mmap": batches are views of a mapping. "pread": batches are read into buffers; the process's memory does not
        grow with the file, and a file that changes is never a bus error. "h5py": through the HDF5 library. "auto":
        pread on network file systems, mmap on local ones, h5py where batches are no plain extents.
    verify
        "none"; "batch": compare each batch with its stored crc32 when it is read; "store": check every digest before
        returning.
    dataset
        Name of a 3-D integer dataset in an HDF5 file of another origin, read through h5py.
    split
        Of a store, read the shards of this split only ("train", "val"); None: all shards. A lone file is "train".

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
    require_choice("backend", backend, ("auto", *BACKENDS))
    path = Path(path)
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
    found = detect_backend(path)
    if backend not in ("auto", found):
        raise BackendError(f"{path}: asked for backend {backend!r}, found a {found!r} file")
    options = {} if dataset is None else {"dataset": dataset}
    if options and found != "hdf5":
        raise BackendError(f"{path}: dataset={dataset!r} needs an HDF5 file, found a {found!r} file")
    return BACKENDS[found].reader_class()(path, access=access, verify=verify, **options)


def _open_store(path: Path, backend: str, access: str, verify: str, split: str | None) -> BatchReader:
    if verify == "store":
        problems = [report.problem for report in _load("zb_hdf5.verify:verify_store")(path) if report.problem]
        if problems:
            raise problems[0]
        verify = "none"
    reader = _load("zb_hdf5.shards:ShardedReader")(path, backend=backend, access=access, verify=verify, split=split)
    return cast(BatchReader, reader)


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
) -> BatchWriter:
    """Open a new file for writing; `backend="auto"` goes by the suffix (`.batch`, `.h5`).

    Returns
    -------
    BatchWriter
        A context manager with `write(batches)`.

    Examples
    --------
    >>> with open_writer("train.h5", batch_size=32, seq_len=512, dtype="uint16") as writer:  # doctest: +SKIP
    ...     for batch in batches:
    ...         writer.write(batch)
    """
    meta = StoreMeta(batch_size, seq_len, stored_dtype(dtype), seed, total_records, vocab_size=vocab_size)
    if backend == "auto":
        backend = backend_of_suffix(Path(path))
    require_choice("backend", backend, tuple(BACKENDS))
    return BACKENDS[backend].writer_class()(
        path, meta, expected_batches=expected_batches, overwrite=overwrite, durable=durable
    )


def backend_of_suffix(path: Path) -> str:
    """Return the backend that writes files with the suffix of `path`.

    Raises
    ------
    ConvertError
        If none does.
    """
    for name, backend in BACKENDS.items():
        if path.suffix == backend.suffix:
            return name
    suffixes = " or ".join(backend.suffix for backend in BACKENDS.values())
    raise ConvertError(f"{path}: expected a name that ends in {suffixes}, or backend=")


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
