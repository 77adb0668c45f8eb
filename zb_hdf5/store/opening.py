"""The functions that open a path: a reader of batches, a token stream, or a writer of one file."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict

from zb_hdf5.errors import ArgumentError, BackendError, IncompleteError, Remedy
from zb_hdf5.field import Fields, parse_fields
from zb_hdf5.files.paths import RemotePath, any_path, local_path, on_failure, require_remote_access
from zb_hdf5.files.publishing import require_present
from zb_hdf5.formats.batch_reader import BatchReader, require_choice, require_options
from zb_hdf5.formats.batch_writer import BatchWriter
from zb_hdf5.formats.registry import (
    AXES,
    FORMATS,
    backend_in,
    backend_of_suffix,
    backends,
    detect_backend,
    require_datasets,
)
from zb_hdf5.spec import (
    DEFAULT_SPLIT,
    INDEX_NAME,
    NO_CODEC,
    STREAM_LAYOUT,
    StoreMeta,
    codec_named,
    stored_dtype,
)
from zb_hdf5.store.both_formats import require_same_tokens, stores_by_format
from zb_hdf5.store.index import ShardIndex, find_index, require_files
from zb_hdf5.store.shards import StoreReader, stream_index
from zb_hdf5.store.store_documents import StoreDocuments
from zb_hdf5.store.token_stream import TokenStream


class Choice(TypedDict):
    """The dataset of an HDF5 file of another program, and its axes: see `open_reader`."""

    dataset: str | None
    axes: str | None


NO_CHOICE: Final = Choice(dataset=None, axes=None)


def open_reader(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    access: str = "auto",
    verify: str = "auto",
    dataset: str | None = None,
    axes: str | None = None,
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
        A path of this machine, or a URL: `s3://`, `gs://`, `az://`, `https://`. From a bucket `shards.json` is read,
        and nothing else; batches are ranged reads. Or a folder that has a store of the same tokens for each format,
        named by it: `books/hdf5/` and `books/batch/`.
    backend
        "auto" looks at the magic bytes; "batch" or "hdf5" demands that format, "npy" a file or folder of 1-D arrays. Of
        a folder with a store for each format it chooses the store; "auto" takes HDF5. States fit both.
    access
        "auto": a local file is mapped at the first call that needs a mapping (a view, int32 of uint32, records; whole
        batches of a loader, while they are in the page cache); whatever is copied into a buffer, and a file on a
        network file system, is read by position, and through h5py where batches are no plain extents. Mapped pages
        count as memory of the process, and a file that is cut short while a block of it is read can be a bus error.
        "pread": batches are read into buffers, without either. "mmap": batches are views of a mapping. "h5py": through
        the HDF5 library.
    verify
        "auto": compare each batch that is read whole into a buffer with its crc32, where one is stored (no view of a
        mapping, no records, windows or batches of another size). "batch": compare whatever is read, for which whole
        batches, or chunks of a stream, are read. "store": check every digest before returning. "none".
        `reader.verified` names the reads that are compared.
    dataset
        Name of an integer dataset in an HDF5 file of another origin, read through h5py: of three axes it holds batches,
        of two records (in batches of `batch_size`, by default 1), of one a token stream. None: the only integer dataset
        of such a file.
    axes
        "batch,record,token": the three axes of the dataset are these. None: a dataset whose second axis has two to four
        entries is refused where one of them looks like a mask or labels (see docs/formats.md).
    split
        Split of a store whose shards alone are read ("train", "val"); None: all shards. A lone file is "train".
    batch_size, seq_len, overlap
        For a token stream (an HDF5 stream, a store of them, 1-D `.npy` files): the shape of its windows, and how many
        tokens each of them shares with the next. See `StoreReader`.
    cache, cache_bytes
        A folder on a fast local disk, in which batches are kept when they are first read, and how much it may hold in
        all (200 * 2**30 or "200GiB"; None: nine tenths of the free space). Several readers, processes and jobs may
        share it. Later reads come from there as copies, compared with their crc32. Not for a store that still grows.

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
    NotFoundError
        If there is no such file or folder.
    OSError
        If it cannot be opened.
    """
    shape, is_stream_shape = (batch_size, seq_len, overlap), None not in (batch_size, seq_len) or overlap > 0
    reader = _open_cached(
        any_path(path), shape, is_stream_shape, cache=cache, cache_bytes=cache_bytes, backend=backend, split=split,
        access=access, verify=verify, dataset=dataset, axes=axes,
    )  # fmt: skip
    with on_failure(reader.close):
        if reader.rest and not reader.num_batches:
            raise ArgumentError(
                f"{path}: {reader.num_records:,} records do not fill one batch of {reader.batch_size:,} x "
                f"{reader.seq_len:,}; pass a smaller batch_size"
            )
    return reader


def open_stream(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    access: str = "auto",
    verify: str = "auto",
    dataset: str | None = None,
) -> TokenStream:
    """Open a token stream by its tokens and documents; `open_reader` gives it as batches of windows instead.

    Parameters
    ----------
    path
        An HDF5 stream, a folder with a `shards.json` of them, or its URL; a 1-D `.npy` file, or a folder of such files
        in the order of their names (files of other suffixes are not looked at).
    split
        Split of a store whose shards alone are read ("train", "val"); None: all shards.
    access
        As for `open_reader`.
    verify
        "auto": compare nothing, because tokens are read as they are asked for, which is seldom a whole chunk. "batch":
        read whole chunks, and compare each with its crc32. "store": check every digest before returning. "none".
    dataset
        Name of an integer dataset of one axis in an HDF5 file of another program; None: the only integer dataset of
        such a file.

    Returns
    -------
    TokenStream
        Has `len`, `get_slice(start, stop)`, `document(number)`, `doc_offsets`, `documents`, `field(name)`, `refresh`
        and `close`, and is a context manager.

    Raises
    ------
    ArgumentError
        If an argument is not possible.
    FormatError, IncompleteError, ChecksumError
        If a file is malformed, is no stream, is truncated, or fails `verify`.
    UnverifiableError
        If "batch" or "store" has nothing to compare with.
    BackendError
        If `access` cannot serve this file.
    NotFoundError
        If there is no such file or folder.

    Examples
    --------
    >>> with open_stream("pages.h5") as stream:  # doctest: +SKIP
    ...     tokens = stream.document(7)
    ...     author = stream.documents.document(7).metadata["author"]
    """
    return TokenStream(path, split=split, access=access, verify=verify, dataset=dataset)


def open_for_loader(
    path: str | os.PathLike[str], batch_size: int | None, seq_len: int | None, overlap: int, **options: Any
) -> BatchReader:
    """Open a path as `open_reader` does, whatever it holds: only a stream takes the shape, and needs no whole batch."""
    shape = (None, None, 0) if None in (batch_size, seq_len) else (batch_size, seq_len, overlap)
    return _open_cached(any_path(path), shape, False, **options)


#: Batch size, sequence length and overlap, as they are asked for.
_Shape: TypeAlias = tuple[int | None, int | None, int]


def _open_cached(
    path: Path, shape: _Shape, is_stream_shape: bool, *, cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None, backend: str = "auto", **given: Any,
) -> BatchReader:  # fmt: skip
    """Return the reader, behind a cache where one is asked for."""
    how: dict[str, Any] = {"access": "auto", "verify": "auto", "dataset": None, "axes": None, "split": None, **given}
    require_options(how["access"], how["verify"])
    require_choice("backend", backend, ("auto", *FORMATS))
    if how["axes"] is not None:
        require_choice("axes", how["axes"], (AXES,))
    require_remote_access(path, how["access"])
    if cache is None:
        if cache_bytes is not None:
            raise ArgumentError(f"{path}: cache_bytes={cache_bytes!r} needs a cache folder: pass cache")
        return _open(path, shape, is_stream_shape, backend, **how)
    from zb_hdf5.store.cache import Cache

    folder = Cache.of(cache, cache_bytes)
    reader = _open(path, shape, is_stream_shape, backend, **how)
    with on_failure(reader.close):
        folder.attach(reader)
    return reader


def _open(
    path: Path, shape: _Shape, is_stream_shape: bool, backend: str, *, split: str | None, axes: str | None, **how: Any
) -> BatchReader:
    """Open a path; `how` has access, verify and dataset. Only a stream is cut into a stream shape."""
    index, in_folder, dataset = None, path.is_dir() or path.name == INDEX_NAME, how["dataset"]
    require_present(path)
    require_datasets(path, dataset=dataset, axes=axes)
    if in_folder:
        path, backend, index = _of_backend(path, backend)
    # without a shape a lone HDF5 file is taken for batches, which saves a look into it; its reader refuses a stream
    suffixes = () if in_folder or None not in shape else [row.suffix for row in backends().values()]
    looks = in_folder or (dataset is None and path.suffix not in suffixes)
    if index.holds_stream if index else looks and is_stream(path, backend, axes=axes):
        return _open_windows(path, index, shape, backend, split, how)
    if (is_stream_shape or (backend != "auto" and backend not in backends())) and (in_folder or dataset is None):
        raise ArgumentError(f"{path}: is no token stream: its batches have the shape that they were stored with")
    if in_folder:
        return _open_store(path, index or ShardIndex.load(path), backend, split, how)
    return _open_file(path, shape, backend, split, axes, how)


def _of_backend(path: Path, backend: str) -> tuple[Path, str, ShardIndex | None]:
    """Return a store and its index: of this format if the folder has one for each, named by it; "auto": of HDF5."""
    if find_index(path):
        return path, backend, ShardIndex.load(path)
    found = {name: ShardIndex.load(store) for name, store in stores_by_format(path).items() if find_index(store)}
    if not found:
        return path, backend, None
    preferred = "hdf5" if "hdf5" in found else next(iter(found))
    name = preferred if backend == "auto" else backend
    if name not in found:
        raise BackendError(f"{path}: asked for backend {name!r}, found stores of {' and '.join(sorted(found))}")
    require_same_tokens(path, {name: found[name], **found})
    return path / name, name, found[name]


def _open_file(
    path: Path, shape: _Shape, backend: str, split: str | None, axes: str | None, how: dict[str, Any]
) -> BatchReader:
    if split not in (None, DEFAULT_SPLIT) and path.exists():
        raise ArgumentError(f"{path}: split={split!r} needs a store, found one file")
    found, dataset = detect_backend(path), how["dataset"]
    if backend not in ("auto", found):
        facts = f"{path}: asked for backend {backend!r}, found a {found!r} file"
        raise BackendError(facts, remedy=Remedy.OTHER_KIND, at=found)
    if dataset is not None and is_stream(path, dataset=dataset, axes=axes):
        return _open_windows(path, None, shape, backend, None, how)
    chosen = {} if FORMATS[found].tokens_only else {"dataset": dataset, "axes": axes}
    reader = FORMATS[found].open(path, access=how["access"], verify=how["verify"], **chosen)
    if reader.foreign_dataset is None:
        reader.record_documents = (
            StoreDocuments.of_file(reader, how["verify"], how["access"]) if reader.complete else None
        )
    elif shape[0] is not None and reader.batch_size == 1:  # records
        reader.meta = replace(reader.meta, batch_size=shape[0])
        reader.num_batches, reader.rest = divmod(reader.num_batches, shape[0])
    return reader


def _open_windows(
    path: Path, index: ShardIndex | None, shape: _Shape, backend: str, split: str | None, how: dict[str, Any]
) -> BatchReader:
    batch_size, seq_len, overlap = shape
    kind = index.table.values["backend"][0] if index else stream_format(path, backend, how["dataset"])
    if batch_size is None or seq_len is None:
        if kind == "npy":
            stream_index(path)  # raises for arrays that are no streams
        raise ArgumentError(f"{path}: is a token stream: pass batch_size and seq_len for windows over it")
    if backend not in ("auto", kind):
        raise BackendError(f"{path}: asked for backend {backend!r}, found a {kind!r} stream")
    _require_digests(path, split, how["verify"], how["dataset"])
    index, identities = stream_index(path, split, how["dataset"], index)
    return StoreReader(path, index, windows=(batch_size, seq_len, overlap), identities=identities, **how)


def _require_digests(path: Path, split: str | None, verify: str, dataset: str | None = None) -> None:
    if verify == "store":
        from zb_hdf5.store.verify import require_digests

        require_digests(path, split, dataset)


def _open_store(path: Path, index: ShardIndex, backend: str, split: str | None, how: dict[str, Any]) -> BatchReader:
    if isinstance(path, RemotePath) and not index.complete:
        raise IncompleteError(f"{path}: is still written: a store that grows is read on its own machine only")
    _require_digests(path, split, how["verify"])
    folder, index = path if path.is_dir() else path.parent, index.of_split(split)
    require_files(folder, index)
    for name, found in zip(index.table.values["path"], index.table.values["backend"], strict=True):
        if backend not in ("auto", found):
            facts = f"{folder / name}: asked for backend {backend!r}, found {found!r}"
            raise BackendError(facts, remedy=Remedy.OTHER_KIND, at=found)
    if index.complete:
        return StoreReader(folder, index, **how)
    from zb_hdf5.store.live import LiveReader  # h5py, which a finished store does not need

    return LiveReader(folder, index, how["access"], how["verify"])


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
        Fields of the tokens: name -> dtype, of one value or of a small array (`("f4", (8,))`), or a
        structured dtype. `write` then takes their values. HDF5 files hold them, `.batch` files do not.
    codec
        "zstd" or "gzip", with a level after a colon, to compress the batches of an HDF5 file; None: they are stored as
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
    require_choice("backend", backend, tuple(backends()))
    _require_space(path, meta, expected_batches)
    return FORMATS[backend].begin(path, meta, expected_batches=expected_batches, overwrite=overwrite, durable=durable)


def _require_space(path: Path, meta: StoreMeta, expected_batches: int) -> None:
    """Raise `ArgumentError` if the disk has less free space than the expected batches need."""
    batch_bytes = sum(column.padded_batch_bytes for column in (meta, *(meta.of_field(f.name) for f in meta.fields)))
    needed = expected_batches * batch_bytes // (1 if meta.codec == NO_CODEC else 2)  # as a conversion estimates it
    if expected_batches and needed > (free := shutil.disk_usage(path.parent).free):
        raise ArgumentError(
            f"{path}: expected_batches={expected_batches:,} needs {needed:,} bytes, free are {free:,}; "
            "pass the number of batches that will be written, or 0 where it is unknown"
        )


def is_stream(
    path: str | os.PathLike[str], backend: str = "auto", dataset: str | None = None, axes: str | None = None
) -> bool:
    """Return whether `path` is a token stream: `.npy`, a folder of `.npy` files, an HDF5 stream, a store of those.

    Raises
    ------
    ArgumentError
        If it is one, and `axes` names the three axes of batches.
    BackendError
        If a dataset, or its axes, are named of anything but an HDF5 file.
    """
    path = any_path(path)
    require_datasets(path, dataset=dataset, axes=axes)
    found = bool(stream_format(path, backend, dataset))
    if found and axes is not None:
        raise ArgumentError(f"{path}: is a token stream, which has one axis: leave out axes={axes!r}")
    return found


def foreign_dataset(path: Path, dataset: str | None = None) -> str | None:
    """Return the name of the dataset that is read of a lone HDF5 file of another program; None of any other path."""
    if path.is_dir() or path.name == INDEX_NAME or backend_in(path) != "hdf5":
        return None
    from zb_hdf5.formats.inspection import look_at

    column = look_at(path, None, dataset=dataset)
    return column.name if column.is_foreign else None


def stream_format(path: str | os.PathLike[str], backend: str = "auto", dataset: str | None = None) -> str:
    """Return the name of the format of a token stream's files, or "" if `path` is no stream."""
    path = any_path(path)
    if dataset is not None:
        from zb_hdf5.formats.inspection import look_at

        return "hdf5" if look_at(path, None, dataset=dataset).meta.layout == STREAM_LAYOUT else ""
    if find_index(path):
        index = ShardIndex.load(path)
        return str(index.table.values["backend"][0]) if index.holds_stream else ""
    arrays = {row.suffix: name for name, row in FORMATS.items() if not row.holds_batches}
    if path.is_dir():
        found = [name for suffix, name in arrays.items() if backend == name or any(path.glob(f"*{suffix}"))]
        return found[0] if found else ""
    if path.suffix in arrays or not path.is_file():
        return arrays.get(path.suffix, "")
    name = backend_in(path)
    return name if name and FORMATS[name].holds_stream(path) else ""
