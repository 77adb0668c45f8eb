"""The functions that open a path: a reader of batches, a token stream, or a writer of one file."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zb_hdf5.errors import ArgumentError, require_choice
from zb_hdf5.field import Fields, parse_fields
from zb_hdf5.files.listing import kept_listings, left_out_in_words
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.paths import local_path, on_failure
from zb_hdf5.formats.access import Access, Verify
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.batch_writer import BatchWriter
from zb_hdf5.formats.format import Found
from zb_hdf5.notes import note
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import BATCHES_LAYOUT, DEFAULT_SPLIT, NO_CODEC, StoreMeta, codec_named, stored_dtype
from zb_hdf5.store.format_list import FORMATS, backend_of_suffix, backends
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.found_reader import ANY_SHAPE, Shape, reader_of
from zb_hdf5.store.found_store import FoundStore
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.token_stream import TokenStream

if TYPE_CHECKING:
    from zb_hdf5.store.cache import Cache


def split_of_training(found: Found, split: str | None) -> str | None:
    """Return the split that a loader reads of a path: of a store, "auto" is the one for training."""
    return DEFAULT_SPLIT if isinstance(found, FoundStore) and split == AUTO_SPLIT else split


def open_reader(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    access: Access = "auto",
    verify: Verify = "auto",
    read_as: ReadAs = AS_STORED,
    split: str | None = AUTO_SPLIT,
    batch_size: int | None = None,
    seq_len: int | None = None,
    overlap: int = 0,
    cache: str | os.PathLike[str] | Cache | None = None,
) -> BatchReader:
    """Open a file, a folder with a `shards.json`, or the `shards.json` itself; or a token stream as batches of windows.

    Parameters
    ----------
    path
        A path of this machine, or a URL: `s3://`, `gs://`, `az://`, `https://`. From a bucket `shards.json` is read,
        and nothing else; batches are ranged reads. Or a folder that has a store of the same tokens for each format,
        named by it: `books/hdf5/` and `books/batch/`. Or a folder of HDF5 files of another program, in the order of
        their names: streams as one, or the records or batches of all, of the same dtype, length and fields.
    backend
        "auto" looks at the magic bytes; "batch" or "hdf5" demands that format. "npy" demands a file or folder of
        arrays, "megatron", "datatrove", "olmo" or "bin" token files of that trainer (see docs/in_place.md). Of a folder
        with a store for each format it chooses the store; "auto" takes HDF5. States fit both.
    access
        "auto": a local file is mapped at the first call that needs a mapping (a view, int32 of uint32, records; whole
        batches of a loader, while they are in the page cache); whatever is copied into a buffer, and a file on a
        network file system, is read by position, and through h5py where batches have no plain extents. Mapped pages
        count as memory of the process, and a file that is cut short while a block of it is read can be a bus error.
        "pread": batches are read into buffers, without either. "mmap": batches are views of a mapping. "h5py": through
        the HDF5 library.
    verify
        "auto": compare each batch that is read whole into a buffer with its crc32, where one is stored (no view of a
        mapping, no records, windows or batches of another size). "batch": compare whatever is read, for which whole
        batches, or chunks of a stream, are read. "store": check every digest before returning. "none".
        `reader.verified` names the reads that are compared.
    read_as
        How files are read that do not tell it themselves: HDF5 files of other programs, files without a header, and
        digests that were made of either. See `ReadAs`.
    split
        Split whose shards alone are read: "train", "val" or "test", by any of the words of `SPLIT_OF_WORD`; None or
        "all": all. A folder of files in no store has those splits that the names in it tell, and "auto" reads the files
        for training there, or those of its only split; of a store it reads all shards. A lone file is "train" too.
    batch_size, seq_len, overlap
        For a token stream (an HDF5 stream, a store of them, 1-D `.npy` files, token files of another trainer): the
        shape of its windows, and how many tokens each of them shares with the next. See `WindowReader`. Of a dataset
        of records `batch_size` are joined to a batch. Stored batches have no other shape than their own.
    cache
        A folder on a fast local disk, in which batches are kept when they are first read; or `Cache(folder, "200GiB")`,
        which bounds it: else it takes nine tenths of the free space. Several readers, processes and jobs may share it.
        Later reads come from there as copies, compared with their crc32. Not for a store that still grows.

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
    found = found_at(path, backend=backend, access=access, verify=verify, read_as=read_as, split=split)
    return open_found(found, Shape(batch_size, seq_len, overlap), cache)


def open_found(
    found: Found,
    shape: Shape = ANY_SHAPE,
    cache: str | os.PathLike[str] | Cache | None = None,
    index: ShardIndex | None = None,
) -> BatchReader:
    """Open what a look has found, as `open_reader` does; `index` is that of its stream, if it is known."""
    _refuse_shape_of_windows(found, shape)
    reader = _open_cached(found, shape, cache, index)
    with on_failure(reader.close):
        _require_shape(found, shape, reader)
        if reader.rest and not reader.num_batches:
            raise ArgumentError(
                f"{found.path}: {reader.num_records:,} records do not fill one batch of {reader.batch_size:,} x "
                f"{reader.seq_len:,}; pass a smaller batch_size"
            )
    return reader


def _refuse_shape_of_windows(found: Found, shape: Shape) -> None:
    """Raise `ArgumentError` if stored batches are asked for as windows. Named records have a shape that is compared."""
    batch_size, seq_len, overlap = shape
    is_whole = batch_size is not None and seq_len is not None and not found.read_as.names_dataset
    if found.layout == BATCHES_LAYOUT and (overlap > 0 or is_whole):
        raise ArgumentError(f"{found.path}: is no token stream: its batches have the shape that they were stored with")


def _require_shape(found: Found, shape: Shape, reader: BatchReader) -> None:
    """Raise `ArgumentError` if stored batches have another shape than the one that is asked for."""
    if found.layout != BATCHES_LAYOUT:
        return
    stored = {"batch_size": reader.batch_size, "seq_len": reader.seq_len}
    asked = {"batch_size": shape.batch_size, "seq_len": shape.seq_len}
    for name, expected in stored.items():
        if asked[name] not in (None, expected):
            raise ArgumentError(
                f"{found.path}: expected {name}={expected}, as its batches are stored, found {asked[name]}; leave "
                "it out, or let a loader cut and join the records",
                options=[name],
            )


def open_stream(
    path: str | os.PathLike[str],
    *,
    split: str | None = AUTO_SPLIT,
    access: Access = "auto",
    verify: Verify = "auto",
    read_as: ReadAs = AS_STORED,
) -> TokenStream:
    """Open a token stream by its tokens and documents; `open_reader` gives it as batches of windows instead.

    Parameters
    ----------
    path
        An HDF5 stream, a folder with a `shards.json` of them, or its URL; a 1-D `.npy` file or a token file of another
        trainer or program, or a folder of such files in and below it, in the order of their names (files of other
        suffixes are not looked at).
    split
        As for `open_reader`.
    access
        As for `open_reader`.
    verify
        "auto": compare nothing, because tokens are read as they are asked for, which is seldom a whole chunk. "batch":
        read whole chunks, and compare each with its crc32. "store": check every digest before returning. "none".
    read_as
        As for `open_reader`; a dataset has one axis.

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
        If a file is malformed or truncated, holds no stream, or fails `verify`.
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
    return TokenStream(path, split=split, access=access, verify=verify, read_as=read_as)


@kept_listings()
def open_for_loader(
    path: str | os.PathLike[str],
    batch_size: int | None = None,
    seq_len: int | None = None,
    overlap: int = 0,
    *,
    backend: str = "auto",
    access: Access = "auto",
    verify: Verify = "auto",
    read_as: ReadAs = AS_STORED,
    split: str | None = AUTO_SPLIT,
    cache: str | os.PathLike[str] | Cache | None = None,
) -> BatchReader:
    """Open a path as `open_reader` does, whatever it holds: only a stream takes the shape, and needs no whole batch.

    For a store, "auto" is the split for training. Files of a folder that are left out are noted.
    """
    is_whole = batch_size is not None and seq_len is not None
    found = found_at(path, backend=backend, access=access, verify=verify, read_as=read_as, split=split)
    found = replace(found, split=split_of_training(found, split))
    if found.left_out:
        note(f"{path}: {left_out_in_words(found.left_out)}")
    return _open_cached(found, Shape(batch_size, seq_len, overlap) if is_whole else ANY_SHAPE, cache)


def _open_cached(
    found: Found, shape: Shape, cache: str | os.PathLike[str] | Cache | None, index: ShardIndex | None = None
) -> BatchReader:
    """Return the reader, with a cache in front of it if there is one."""
    if cache is None:
        return reader_of(found, shape, index)
    from zb_hdf5.store.cache import Cache  # with what writes files, which few readers need

    folder = Cache.of(cache)
    reader = reader_of(found, shape, index)
    with on_failure(reader.close):
        folder.attach(reader)
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
        batch_size,
        seq_len,
        stored_dtype(dtype),
        seed,
        total_records,
        vocab_size=vocab_size,
        fields=parse_fields(fields),
        codec=codec_named(codec),
    )
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
            f"{path}: expected_batches={expected_batches:,} needs {needed:,} bytes, only {free:,} are free; "
            "pass the number of batches that will be written, or 0 where it is unknown"
        )
