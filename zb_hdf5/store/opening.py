"""The two functions that open a path, whatever it holds: a reader of batches, or a writer of one file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zb_hdf5.columns.reader import BatchReader, require_choice, require_options
from zb_hdf5.columns.writer import BatchWriter
from zb_hdf5.errors import ArgumentError, BackendError, IncompleteError
from zb_hdf5.field import Fields, parse_fields
from zb_hdf5.files.paths import RemotePath, any_path, local_path, require_remote_access
from zb_hdf5.files.publishing import PARTIAL_SUFFIX, partial_path
from zb_hdf5.formats.registry import BACKENDS, FORMATS, backend_of_suffix, detect_backend
from zb_hdf5.spec import DEFAULT_SPLIT, INDEX_NAME, NO_CODEC, StoreMeta, codec_named, stored_dtype
from zb_hdf5.store.kinds import is_stream, stream_format
from zb_hdf5.store.store_documents import attach_documents

if TYPE_CHECKING:
    from zb_hdf5.store.index import ShardIndex


def open_reader(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    access: str = "auto",
    verify: str = "auto",
    dataset: str | None = None,
    split: str | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    overlap: int = 0,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
) -> BatchReader:
    """Open a file, a folder with a `shards.json`, or the `shards.json` itself; or a token stream as batches of windows.

    Parameters
    ----------
    path
        Of this machine, or a URL: `s3://`, `gs://`, `az://`, `https://`. Of a store in a bucket `shards.json` is read,
        and nothing else; batches are ranged reads.
    backend
        "auto" looks at the magic bytes; "batch" or "hdf5" demands that format, "npy" a file or folder of 1-D arrays.
    access
        "mmap": batches are views of a mapping. "pread": batches are read into buffers; the process's memory does not
        grow with the file, and a file that is cut short is never a bus error. "h5py": through the HDF5 library. "auto":
        a file is mapped at the first call that needs a mapping (a view, int32 of uint32, records; whole batches of a
        loader, while they are in the page cache), but never on a network file system; whatever is copied into a buffer
        is read by position, and through h5py where batches are no plain extents. Mapped pages count as memory of the
        process until the kernel needs them.
    verify
        "auto": compare what is read whole into a buffer with its crc32 (batches, except through views of a mapping; no
        records, windows or batches of another size), where a crc32 is stored. "batch": compare whatever is read, for
        which whole batches, or chunks of a stream, are read. "store": check every digest before returning. "none".
        `reader.verified` says what is compared.
    dataset
        Name of a 3-D integer dataset in an HDF5 file of another origin, read through h5py.
    split
        Of a store, read the shards of this split only ("train", "val"); None: all shards. A lone file is "train".
    batch_size, seq_len, overlap
        Of a token stream (an HDF5 stream, a store of them, 1-D `.npy` files): the shape of its windows, and how many
        tokens each of them shares with the next. See `WindowReader`.
    cache, cache_bytes
        A folder on a fast local disk, in which batches are kept when they are first read, and how much it may hold in
        all (200 * 2**30 or "200GiB"; None: nine tenths of what is free). Several readers, processes and jobs may share
        it. What is read again comes from there as a copy, compared with its crc32. Not for a store that still grows.

    Raises
    ------
    ArgumentError
        If an argument is not possible, or the cache folder cannot be written.
    FormatError, IncompleteError, ChecksumError
        If the file is malformed, truncated, or fails `verify`.
    UnverifiableError
        If "batch" or "store" has nothing to compare with.
    BackendError
        If `backend` or `access` cannot serve this file.
    OSError
        If it cannot be opened.
    """
    shape = (batch_size, seq_len, overlap)
    options: dict[str, Any] = {"backend": backend, "access": access, "verify": verify, "dataset": dataset}
    options |= {"split": split, "cache": cache, "cache_bytes": cache_bytes}
    return _open_cached(path, shape, **options)[0]


def open_for_loader(
    path: str | os.PathLike[str], batch_size: int, seq_len: int, overlap: int, **options: Any
) -> tuple[BatchReader, bool]:
    """Open a path as `open_reader` does, whatever it holds; return whether the shape is that of the windows."""
    return _open_cached(path, (batch_size, seq_len, overlap), dataset=None, for_loader=True, **options)


def _open_cached(
    path: str | os.PathLike[str],
    shape: tuple[int | None, int | None, int],
    *,
    cache: str | os.PathLike[str] | None,
    cache_bytes: int | str | None,
    **options: Any,
) -> tuple[BatchReader, bool]:
    """Return the reader, behind a cache where one is asked for, and whether it is of windows of this shape."""
    if cache is None:
        if cache_bytes is not None:
            raise ArgumentError(f"{path}: cache_bytes={cache_bytes!r} needs a cache folder: pass cache")
        return _open(path, shape, **options)
    from zb_hdf5.store.cache import Cache

    folder = Cache.of(cache, cache_bytes)
    reader, is_shaped = _open(path, shape, **options)
    try:
        folder.attach(reader)
    except BaseException:
        reader.close()
        raise
    return reader, is_shaped


def _open(
    path: str | os.PathLike[str],
    shape: tuple[int | None, int | None, int],
    *,
    backend: str,
    access: str,
    verify: str,
    dataset: str | None,
    split: str | None,
    for_loader: bool = False,
) -> tuple[BatchReader, bool]:
    """Return the reader, and whether it is of windows of this shape."""
    require_options(access, verify)
    require_choice("backend", backend, ("auto", *FORMATS))
    path = any_path(path)
    require_remote_access(path, access)
    is_store = path.is_dir() or path.name == INDEX_NAME
    # of objects it is read once, and says all
    index = _load_index(path) if is_store and isinstance(path, RemotePath) else None
    shaped = shape[0] is not None and shape[1] is not None
    # without a shape a lone HDF5 file is taken for batches, which saves a look into it; its reader tells a stream
    unsure = shaped or path.suffix not in {row.suffix for row in BACKENDS.values()}
    if index.holds_stream if index else unsure and is_stream(path, backend):
        if not shaped:
            raise ArgumentError(f"{path}: is a token stream: pass batch_size and seq_len for windows over it")
        sizes = dict(zip(("batch_size", "seq_len", "overlap"), shape, strict=True))
        options = {**sizes, "split": split, "access": access, "verify": verify, "index": index}
        return _open_windows(path, backend, dataset, **options), True
    if (backend != "auto" and backend not in BACKENDS) or ((shaped or shape[2]) and not for_loader):
        raise ArgumentError(f"{path}: is no token stream: its batches have the shape that they were stored with")
    if is_store:
        if dataset is not None:
            raise BackendError(f"{path}: dataset={dataset!r} needs an HDF5 file, found a store")
        return _open_store(path, backend, access, verify, split, index), False
    return _open_file(path, backend, access, verify, dataset, split), False


def _load_index(path: Path) -> ShardIndex:
    from zb_hdf5.store.index import ShardIndex

    index = ShardIndex.load(path)
    if not index.complete:
        raise IncompleteError(f"{path}: is still written: a store that grows is read on its own machine only")
    return index


def _open_file(
    path: Path, backend: str, access: str, verify: str, dataset: str | None, split: str | None
) -> BatchReader:
    if split not in (None, DEFAULT_SPLIT) and path.exists():
        raise ArgumentError(f"{path}: split={split!r} needs a store, found one file")
    if not isinstance(path, RemotePath) and not path.exists() and partial_path(path).exists():
        raise FileNotFoundError(
            f"{path} is not finished: {path.name}{PARTIAL_SUFFIX} beside it is being written, or its writer died"
        )
    found = detect_backend(path)
    if backend not in ("auto", found):
        raise BackendError(f"{path}: asked for backend {backend!r}, found a {found!r} file")
    options = {} if dataset is None else {"dataset": dataset}
    if options and not BACKENDS[found].has_datasets:
        raise BackendError(f"{path}: dataset={dataset!r} needs an HDF5 file, found a {found!r} file")
    reader = BACKENDS[found].open(path, access=access, verify=verify, **options)
    return reader if dataset is not None else attach_documents(reader, verify)


def _open_windows(path: Path, backend: str, dataset: str | None, **options: Any) -> BatchReader:
    from zb_hdf5.store.windows import WindowReader

    index = options["index"]
    kind = index.table.values["backend"][0] if index else stream_format(path, backend)
    if backend not in ("auto", kind) or dataset is not None:
        raise BackendError(f"{path}: asked for backend {backend!r}, dataset {dataset!r}, found a {kind!r} stream")
    return WindowReader(path, **options)


def _open_store(
    path: Path, backend: str, access: str, verify: str, split: str | None, index: ShardIndex | None
) -> BatchReader:
    from zb_hdf5.store.index import ShardIndex
    from zb_hdf5.store.shards import ShardedReader

    if verify == "store":
        from zb_hdf5.store.verify import verify_store

        problems = [report.problem for report in verify_store(path, split=split) if report.problem]
        if problems:
            raise problems[0]
    options: dict[str, Any] = {"backend": backend, "access": access, "split": split}
    options["verify"] = "none" if verify == "store" else verify
    index = index or ShardIndex.load(path)
    if not index.complete:
        from zb_hdf5.store.live_reader import LiveReader  # h5py, which a finished store does not need

        return LiveReader(path, **options)
    reader = ShardedReader(path, index=index, **options)
    reader.verify = verify
    return reader


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
    fields: Fields | None = None,
    codec: str | None = None,
) -> BatchWriter:
    """Open a new file for writing; `backend="auto"` goes by the suffix (`.batch`, `.h5`).

    Parameters
    ----------
    dtype
        "uint32" or "uint16". In a `.batch` file uint16 is an extension: other ZeroBatch v2 readers take it for
        uint32.
    fields
        What is aligned with the tokens: name -> dtype, of one value or of a small array (`("f4", (8,))`), or a
        structured dtype. `write` then takes their values. HDF5 files hold them, `.batch` files do not.
    codec
        "zstd" or "gzip", with a level behind a colon, to compress the batches of an HDF5 file; None: they are stored as
        they are.
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
    meta = StoreMeta(
        batch_size, seq_len, stored_dtype(dtype), seed, total_records, vocab_size=vocab_size,
        fields=parse_fields(fields), codec=codec_named(codec),
    )  # fmt: skip
    if live:
        from zb_hdf5.store.live import LiveStoreWriter

        if backend not in ("auto", LiveStoreWriter.backend) or overwrite:
            raise ArgumentError(
                f"{path}: a live store has HDF5 shards and replaces nothing: leave out the other option"
            )
        return LiveStoreWriter(path, meta, shard_batches=shard_batches, durable=durable)
    if shard_batches:
        raise ArgumentError(f"{path}: shard_batches={shard_batches} is for live=True")
    if backend == "auto":
        backend = backend_of_suffix(path)
    require_choice("backend", backend, tuple(BACKENDS))
    _require_space(path, meta, expected_batches)
    return BACKENDS[backend].begin(path, meta, expected_batches=expected_batches, overwrite=overwrite, durable=durable)


def _require_space(path: Path, meta: StoreMeta, expected_batches: int) -> None:
    """Raise `ArgumentError` if the disk has less free space than the expected batches need."""
    columns = (meta, *(meta.of_field(field.name) for field in meta.fields))
    batch_bytes = sum(column.padded_batch_bytes for column in columns)
    needed = expected_batches * batch_bytes // (1 if meta.codec == NO_CODEC else 2)  # as a conversion estimates it
    if expected_batches and needed > (free := shutil.disk_usage(path.parent).free):
        raise ArgumentError(
            f"{path}: expected_batches={expected_batches:,} needs {needed:,} bytes, free are {free:,}; "
            "pass the number of batches that will be written, or 0 where it is unknown"
        )
