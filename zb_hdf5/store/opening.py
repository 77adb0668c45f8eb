"""The functions that open a path: a corpus, its batches, or a writer of one file."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from zb_hdf5.errors import ArgumentError, require_choice, whole_number
from zb_hdf5.field import Fields, parse_fields
from zb_hdf5.files.listing import left_out_in_words
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.paths import any_path, local_path, on_failure
from zb_hdf5.formats.access import Access, Verify
from zb_hdf5.formats.batch_writer import BatchWriter, FileWriter
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.format import Found
from zb_hdf5.formats.windows import Windows
from zb_hdf5.notes import note
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import DEFAULT_SPLIT, NO_CODEC, StoreMeta, codec_named, stored_dtype
from zb_hdf5.store.cache import Cache
from zb_hdf5.store.format_list import FORMATS, backend_of_suffix, backends, load_format
from zb_hdf5.store.found_corpus import corpus_of
from zb_hdf5.store.found_path import found_at, look_of
from zb_hdf5.store.found_store import FoundStore


def split_of_training(found: Found, split: str | None) -> str | None:
    """Return the split that a loader reads of a path: of a store, "auto" is the one for training."""
    return DEFAULT_SPLIT if isinstance(found, FoundStore) and split == AUTO_SPLIT else split


def open_corpus(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    access: Access = "auto",
    verify: Verify = "auto",
    split: str | None = AUTO_SPLIT,
    cache: str | os.PathLike[str] | Cache | None = None,
    read_as: ReadAs = AS_STORED,
) -> Corpus:
    """Open what a path holds: its tokens, fields and documents. Files are opened when they are first read.

    Parameters
    ----------
    path
        A file, a folder with a `shards.json`, or the `shards.json` itself; a 1-D or 2-D `.npy` file or a token file of
        another trainer or program, or a folder of such files in and below it, in the order of their names. A path of
        this machine, or a URL: `s3://`, `gs://`, `az://`, `https://`. From a bucket `shards.json` is read, and nothing
        else; batches are ranged reads. Or a folder that has a store of the same tokens for each format, named by it:
        `books/hdf5/` and `books/batch/`. Or a folder of HDF5 files of another program: streams as one, or the records
        or batches of all, of the same dtype, length and fields.
    backend
        "auto" looks at the magic bytes; "batch" or "hdf5" demands that format. "npy" demands a file or folder of
        arrays, "megatron", "datatrove", "olmo" or "bin" token files of that trainer (see docs/in_place.md). In a
        folder with a store for each format it chooses the store; "auto" takes HDF5. States fit both.
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
        `corpus.verified` names the reads that are compared.
    split
        Split whose shards alone are read: "train", "val" or "test", by any of the words of `SPLIT_OF_WORD`; None or
        "all": all. A folder of files in no store has those splits that the names in it tell, and "auto" reads the files
        for training there, or the files of its only split; of a store it reads all shards, and a loader over it the
        shards for training. A lone file is "train" too.
    cache
        A folder on a fast local disk, in which batches are kept when they are first read; or `Cache(folder, "200GiB")`,
        which bounds it: else it takes nine tenths of the free space. Several processes and jobs may share it.
        Later reads come from there as copies, compared with their crc32. Not for a store that still grows.
    read_as
        How files are read that do not tell it themselves: HDF5 files of other programs, files without a header, and
        digests that were made of either. See `ReadAs`.

    Returns
    -------
    Corpus
        `corpus.tokens[a:b]`, `corpus.documents`, `corpus.field(name)`, `corpus.batches(batch_size, seq_len)`. A context
        manager.

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

    Examples
    --------
    >>> with open_corpus("pages.h5") as corpus:  # doctest: +SKIP
    ...     tokens = corpus.tokens[1000:2000]
    ...     author = corpus.documents[7].metadata["author"]
    ...     first = corpus.batches(batch_size=8, seq_len=1024)[0]
    """
    how = HowToOpen(backend=backend, access=access, verify=verify, read_as=read_as, split=split)
    return _open_cached(path, how, cache)


def _open_cached(path: str | os.PathLike[str], how: HowToOpen, cache: str | os.PathLike[str] | Cache | None) -> Corpus:
    """Open a corpus as `open_corpus`."""
    corpus = _open(path, how, cache)
    if cache is None:
        return corpus
    with on_failure(corpus.close):
        return Cache.of(cache).over(corpus.batches(1, 1) if corpus.is_stream else corpus.batches())


class HowToOpen(TypedDict, total=False):
    """The arguments of `open_corpus` but for its path and its cache."""

    backend: str
    access: Access
    verify: Verify
    read_as: ReadAs
    split: str | None


def _open(path: str | os.PathLike[str], how: HowToOpen, cache: str | os.PathLike[str] | Cache | None) -> Corpus:
    """Open a corpus as `open_corpus`, without its cache, which other splits of the path get, too."""
    with look_of(path) as look:
        found = found_at(look.path, look=look, **how)
        opened = OpenedByPath(path, how, cache)
        return corpus_of(found, look, opened=opened, training_split=_training_split(found, how["split"]))


@dataclass(frozen=True)
class OpenedByPath:
    """The path of a corpus, and how it was opened. See `OpenedAs`."""

    path: str | os.PathLike[str]
    how: HowToOpen
    cache: str | os.PathLike[str] | Cache | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values that are not defaults; the path is the object that the corpus has, and is pickled once."""
        given = {name: value for name, value in self.how.items() if value != _USUAL.get(name)}
        return _opened_by, (any_path(self.path), given, self.cache)

    def open(self, split: str | None) -> Corpus:
        """Open another split of the same path."""
        return _open_cached(self.path, {**self.how, "split": split}, self.cache)


#: The defaults of `open_corpus`.
_USUAL: Final[HowToOpen] = {
    "backend": "auto",
    "access": "auto",
    "verify": "auto",
    "read_as": AS_STORED,
    "split": AUTO_SPLIT,
}


def _opened_by(
    path: str | os.PathLike[str], given: HowToOpen, cache: str | os.PathLike[str] | Cache | None
) -> OpenedByPath:
    """Return a path that was pickled without the defaults."""
    return OpenedByPath(path, {**_USUAL, **given}, cache)


def _training_split(found: Found, split: str | None) -> str | None:
    """Return the split that a loader reads of a corpus which has more; None: all that it has."""
    if not isinstance(found, FoundStore) or split != AUTO_SPLIT:
        return None
    return None if {*found.index.table.values["split"]} == {DEFAULT_SPLIT} else DEFAULT_SPLIT


def _behind_cache(batches: Batches, cache: str | os.PathLike[str] | Cache | None) -> Batches:
    """Return batches with a cache in front of their corpus, if there is one."""
    return batches if cache is None else batches.with_windows(batches.windows, Cache.of(cache).over(batches))


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
) -> Batches:
    """Open a path as batches: the short form of `open_corpus` and `Corpus.batches`.

    Parameters
    ----------
    path, backend, access, verify, read_as, split, cache
        As for `open_corpus`.
    batch_size, seq_len, overlap
        For a token stream (an HDF5 stream, a store of them, 1-D `.npy` files, token files of another trainer): the
        shape of its windows, and how many tokens more each of them shares with the next. From a dataset of records
        `batch_size` are joined to a batch. Stored batches have no other shape than their own.

    Returns
    -------
    Batches
        `close` closes the corpus, too.

    Raises
    ------
    ArgumentError
        As `open_corpus`, and if the tokens fill no batch.
    FormatError, IncompleteError, ChecksumError, UnverifiableError, BackendError, NotFoundError, OSError
        As `open_corpus`.
    """
    how = HowToOpen(backend=backend, access=access, verify=verify, read_as=read_as, split=split)
    corpus = _open(path, how, cache)
    with on_failure(corpus.close):
        return _behind_cache(shaped_batches(corpus, batch_size, seq_len, overlap, read_as), cache)


def shaped_batches(
    corpus: Corpus, batch_size: int | None, seq_len: int | None, overlap: int = 0, read_as: ReadAs = AS_STORED
) -> Batches:
    """Return the batches of a corpus in the shape that is asked for, as `open_reader`.

    Raises
    ------
    ArgumentError
        If the corpus has no batch of that shape.
    """
    path = corpus.path
    overlap = whole_number("overlap", overlap)
    is_whole = batch_size is not None and seq_len is not None and not read_as.names_dataset  # whose shape is compared
    if not corpus.is_stream and (overlap > 0 or is_whole):
        raise ArgumentError(f"{path}: not a token stream: its batches have the shape that they were stored with")
    if corpus.is_stream:
        batches = _windows_over(corpus, batch_size, seq_len, overlap)
    else:
        batches = corpus.batches(batch_size, seq_len)
    if batches.rest and not batches.num_batches:
        raise ArgumentError(
            f"{path}: {batches.num_records:,} records do not fill one batch of {batches.batch_size:,} x "
            f"{batches.seq_len:,}; pass a smaller batch_size"
        )
    return batches


def _windows_over(corpus: Corpus, batch_size: int | None, seq_len: int | None, overlap: int) -> Batches:
    """Return the windows of a stream, which has one batch or more.

    Parameters
    ----------
    overlap
        Tokens that each window has more than `seq_len`, and shares with the next.
    """
    windows = corpus.windows_of(batch_size, seq_len)
    batches = Batches(corpus, Windows.of(windows.size, windows.length, overlap))
    if not batches.num_records:
        more = f" and {overlap} more" if overlap else ""
        raise ArgumentError(
            f"{corpus.path}: {corpus.num_tokens:,} tokens do not fill one batch of 1 x {seq_len:,}{more}"
        )
    return batches


def open_for_loader(
    source: str | os.PathLike[str] | Corpus | Batches,
    batch_size: int | None = None,
    seq_len: int | None = None,
    overlap: int = 0,
    *,
    cache: str | os.PathLike[str] | Cache | None = None,
    **asked: Unpack[HowToOpen],
) -> tuple[Batches, bool]:
    """Return the batches that a loader reads, and whether they were opened here, so that the loader closes them.

    A stream takes the shape, and needs no whole batch; of a store with several splits the one for training is read.

    Raises
    ------
    ArgumentError
        If something is asked for that an open corpus has fixed already.
    ClosedError
        If the corpus was closed.
    """
    if isinstance(source, Corpus | Batches):
        _refuse_fixed(source, asked, cache)
        return _of_open(source, batch_size, seq_len, overlap)
    with look_of(source) as look:
        found = found_at(look.path, look=look, **asked)
        note_left_out(found, look)
        corpus = corpus_for_training(found, asked.get("split", AUTO_SPLIT), look)
    with on_failure(corpus.close):
        return _behind_cache(_batches_over(corpus, batch_size, seq_len, overlap), cache), True


def corpus_for_training(found: Found, split: str | None, look: Look | None = None) -> Corpus:
    """Open a split of what was found, "auto": that for training. The caller closes it.

    Parameters
    ----------
    look
        As for `corpus_of`.
    """
    return corpus_of(replace(found, split=split_of_training(found, split)), look)


def note_left_out(found: Found, look: Look) -> None:
    """Note the files of a folder that a loader leaves out. Both are of one path."""
    if left_out := found.left_out(look):
        note(f"{found.path}: {left_out_in_words(left_out)}")


def _of_open(
    source: Corpus | Batches, batch_size: int | None, seq_len: int | None, overlap: int
) -> tuple[Batches, bool]:
    """Return the batches of an open corpus, or of its split for training, which is then opened here."""
    corpus = source if isinstance(source, Corpus) else source.corpus
    corpus.require_open()
    split = corpus.training_split
    if split is not None:
        corpus = corpus.split(split)
    with on_failure(corpus.close) if split is not None else nullcontext():
        if isinstance(source, Corpus):
            return _batches_over(corpus, batch_size, seq_len, overlap), split is not None
        batches = source.for_targets() if overlap else source
        return (batches if split is None else batches.with_windows(batches.windows, corpus)), split is not None


def _batches_over(corpus: Corpus, batch_size: int | None, seq_len: int | None, overlap: int) -> Batches:
    """Return the batches of a corpus; those that are stored keep their shape, and single records are joined."""
    if corpus.is_stream:
        return _windows_over(corpus, batch_size, seq_len, overlap)
    joins = corpus.joins_records and batch_size is not None and seq_len is not None
    return corpus.batches(batch_size if joins else None)


def _refuse_fixed(source: Corpus | Batches, asked: HowToOpen, cache: str | os.PathLike[str] | Cache | None) -> None:
    """Raise `ArgumentError` for an argument that is chosen when a corpus is opened."""
    given = {name: value for name, value in asked.items() if value != _USUAL.get(name)}
    if cache is not None:
        given["cache"] = cache
    for name, value in given.items():
        raise ArgumentError(
            f"{source.path}: {name}={value!r} is chosen when a corpus is opened: pass it to "
            "open_corpus or open_reader, or pass the path to the loader",
            options=[name],
        )


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
        "uint32", "uint16" or "uint8". In a `.batch` file uint16 is an extension: other ZeroBatch v2 readers take it for
        uint32; such files have no uint8.
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
    how = {"expected_batches": expected_batches, "overwrite": overwrite, "durable": durable}
    writer: FileWriter = load_format(FORMATS[backend]).write(path, meta, **how)
    return writer


def _require_space(path: Path, meta: StoreMeta, expected_batches: int) -> None:
    """Raise `ArgumentError` if the disk has less free space than the expected batches need."""
    batch_bytes = sum(column.padded_batch_bytes for column in (meta, *(meta.of_field(f.name) for f in meta.fields)))
    needed = expected_batches * batch_bytes // (1 if meta.codec == NO_CODEC else 2)  # as a conversion estimates it
    if expected_batches and needed > (free := shutil.disk_usage(path.parent).free):
        raise ArgumentError(
            f"{path}: expected_batches={expected_batches:,} needs {needed:,} bytes, only {free:,} are free; "
            "pass the number of batches that will be written, or 0 where it is unknown"
        )
