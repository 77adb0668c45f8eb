"""The holders of tokens, one row for each kind of path; and `Opening`, which one look at a path makes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np

from zb_hdf5.errors import ArgumentError, BackendError, FormatError, IncompleteError, Remedy, require_choice
from zb_hdf5.files.listing import kept_listings, listed, name_below
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT, SplitFiles, named_splits, split_named, train_first
from zb_hdf5.files.paths import RemotePath, any_path, local_path, on_failure, require_remote_access
from zb_hdf5.files.publishing import require_present
from zb_hdf5.formats.access import require_options
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.batch_writer import FieldDigest
from zb_hdf5.formats.flat import FlatDigest, FlatTokens, require_alike
from zb_hdf5.formats.registry import FORMATS, backend_in, hdf5_files, no_known_file, require_datasets
from zb_hdf5.formats.windows import Windows
from zb_hdf5.read_as import AS_STORED, ReadAs, require_read_as
from zb_hdf5.spec import (
    BATCHES_LAYOUT,
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_SPLIT,
    NO_SHA256,
    NOT_COUNTED,
    NOT_KNOWN,
    STREAM_LAYOUT,
    StoreMeta,
    stored_dtype,
)
from zb_hdf5.store.both_formats import require_same_tokens, stores_by_format
from zb_hdf5.store.cut_reader import FLAT_DTYPE
from zb_hdf5.store.digests import FOREIGN_BACKEND, Digests, needs_no_digests
from zb_hdf5.store.flat_table import flat_table
from zb_hdf5.store.headerless import headerless_name
from zb_hdf5.store.index import ShardIndex, find_index, require_files
from zb_hdf5.store.lost_index import no_index
from zb_hdf5.store.record_reader import RecordReader
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.shards import StoreReader
from zb_hdf5.store.store_documents import StoreDocuments
from zb_hdf5.store.way_in import way_in
from zb_hdf5.store.window_reader import WindowReader
from zb_hdf5.trainers.installed_formats import noted
from zb_hdf5.trainers.trainer_formats import (
    INSTALLED,
    flat_files,
    flat_format,
    flat_names,
    installed_name_of,
    named_by_prefix,
    not_recognised,
    source_name_of,
)

if TYPE_CHECKING:  # h5py, which a finished store does not need
    from zb_hdf5.formats.h5_column import Column


class Shape(NamedTuple):
    """The shape of batches as it is asked for; None: any."""

    batch_size: int | None = None
    seq_len: int | None = None
    overlap: int = 0


#: No shape is asked for.
ANY_SHAPE: Final = Shape()


@dataclass(frozen=True)
class Opening:
    """A path as one look at it has found it, and how it is to be read. `opening_at` makes it, `open` gives its reader.

    Attributes
    ----------
    path
        The file or folder that is read: of a folder with a store for each format, the store that was chosen.
    holder
        The name of the row of `HOLDERS` that opens it.
    layout
        "batches" or "stream", as in `StoreMeta`.
    backend
        The format of its files; of a store with files of several formats, that of the first one.
    index
        The `shards.json` of a store, with all splits; None: no store.
    column
        The tokens of a lone HDF5 file; None: of another format, or of several files.
    files
        The files of ids that the look has found in no store, whatever their splits are.
    found
        The facts of those of the split that is read, where the look has opened them; (): they are still to be opened.
    splits
        The split of each of these.
    shape
        The shape of batches as it is asked for.
    access, verify, split, read_as
        The arguments of `open_reader`.
    """

    path: Path
    holder: str
    layout: str
    backend: str
    index: ShardIndex | None = None
    column: Column | None = None
    files: tuple[Path, ...] = ()
    found: tuple[FlatTokens, ...] = ()
    splits: tuple[str, ...] = ()
    shape: Shape = ANY_SHAPE
    access: str = "auto"
    verify: str = "auto"
    split: str | None = AUTO_SPLIT
    read_as: ReadAs = AS_STORED

    @property
    def foreign_dataset(self) -> str | None:
        """The dataset that is read of HDF5 files of another program; None of any other path."""
        column = self.found[0].column if self.found else self.column
        return column.name if column is not None and column.is_foreign else None

    @property
    def takes_digests(self) -> bool:
        """Whether its files hold no digests, so that they may have been made."""
        if isinstance(self.path, RemotePath):
            return False
        if self.column is not None:
            return self.column.is_foreign and self.column.sha256 is None
        return bool(self.found)

    def with_digests(self) -> Opening:
        """Return the opening of the same files, which are compared with digests that were made."""
        if self.column is None:
            return self
        from zb_hdf5.formats.foreign_files import ForeignFiles

        found = ForeignFiles(self.read_as).found([self.path])  # looks at its axes, too
        splits = (DEFAULT_SPLIT,) * len(found)
        return replace(self, holder=ForeignHolder.name, column=None, files=(self.path,), found=found, splits=splits)

    def open(self, index: ShardIndex | None = None) -> BatchReader:
        """Return the reader of its batches, or of the windows of its stream. Raises as `open_reader`.

        Parameters
        ----------
        index
            The index of its stream, if it is known; None: look into its files.
        """
        if self.layout == BATCHES_LAYOUT:
            return holder_named(self.holder).open_batches(self)
        if index is None:
            index = self.stream_index()
        batch_size, seq_len, overlap = self.shape
        if batch_size is None or seq_len is None:
            raise ArgumentError(f"{self.path}: is a token stream: pass batch_size and seq_len for windows over it")
        reader = self.open_windows(index, Windows.of(batch_size, seq_len, overlap))
        if not reader.num_records:
            reader.close()
            more = f" and {overlap} more" if overlap else ""
            raise ArgumentError(
                f"{self.path}: {reader.num_tokens:,} tokens do not fill one batch of 1 x {seq_len:,}{more}"
            )
        return reader

    def open_windows(self, index: ShardIndex, windows: Windows) -> WindowReader:
        """Return the reader of windows over the files of its stream, which may be too short for one."""
        if self.verify == "store":
            self.compare_digests()
        return WindowReader(
            self.path,
            index,
            windows,
            access=self.access,
            verify=self.verify,
            read_as=self.read_as,
            found=self.known,
        )

    def splits_there(self) -> list[str | None]:
        """Return the splits of a path whose files are all opened, that for training first; [None] if none are told.

        Raises
        ------
        ArgumentError
            If the names of its files tell none for sure.
        """
        if self.index is not None:
            return [*train_first(self.index.table.values["split"])]
        told = train_first(named_splits(self.files, [self.path]))
        return [*told] if len(told) > 1 else [None]

    @property
    def left_out(self) -> tuple[Path, ...]:
        """The files in and below the path that are named as tokens or text are, and that no split of it has."""
        # in a third of the time of pathlib
        endings = {f".{os.fspath(file).rpartition('.')[2].lower()}" for file in self.files}
        return listed(self.path, *sorted(endings)).left_out if endings else ()

    @property
    def known(self) -> Mapping[int, Column | FlatTokens]:
        """The facts of the files that the look has opened, by the numbers of the files."""
        if self.read_as.digests is not None:
            return {}  # the first read proves each file
        return {0: self.column} if self.column is not None else dict(enumerate(self.found))

    def stream_index(self) -> ShardIndex:
        """Return the index of the files of a stream, of the split that is asked for.

        Raises
        ------
        FormatError
            If it holds batches, or a file is missing.
        """
        if self.layout != STREAM_LAYOUT:
            raise FormatError(f"{self.path}: expected a token stream, found batches; open_reader opens them")
        return holder_named(self.holder).stream_index(self)

    def compare_digests(self) -> None:
        """Compare the digests of all files of the split, as `verify="store"` asks for. Raises as `open_reader`."""
        from zb_hdf5.store.verify import require_digests

        require_digests(self.path, self.split, self.read_as)


@kept_listings()
def opening_at(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    access: str = "auto",
    verify: str = "auto",
    read_as: ReadAs = AS_STORED,
    split: str | None = AUTO_SPLIT,
    shape: Shape = ANY_SHAPE,
) -> Opening:
    """Look at a path once, and return what opens it. The arguments are those of `open_reader`.

    Raises
    ------
    ArgumentError
        If an argument is not possible, axes are named of a stream, or `source_dtype` of files with a header.
    BackendError
        If the files have another format than `backend`, a dataset is named of anything but an HDF5 file, or digests of
        files that have their own.
    FormatError
        If it is neither a known file nor a store, or its tokens are damaged.
    NotFoundError
        If there is no such file or folder.
    """
    path = named_by_prefix(any_path(path))
    require_options(access, verify)
    _require_backend_name(backend)
    require_read_as(read_as)
    require_remote_access(path, access)
    require_present(path)
    with Look(path) as look:
        require_datasets(look, read_as)
        found = _held(look, backend, read_as, split)
        notes: list[str] = []
        if found is None:
            found = _of_installed(look, backend, split, notes)
        if found is None:
            raise noted(_unknown(look), notes)
    if found.index is not None and split == AUTO_SPLIT:
        split = None
    found = replace(found, shape=shape, access=access, verify=verify, read_as=read_as, split=split)
    if read_as.digests is None:
        return found
    if not found.takes_digests:
        raise needs_no_digests(path, read_as.digests)
    local_path(read_as.digests)
    return found.with_digests()


def _held(look: Look, backend: str, read_as: ReadAs, split: str | None) -> Opening | None:
    """Ask each kind of holder for a path, in the order of the table; None: none of them holds it."""
    if read_as.lacks_header:
        name = headerless_name(look, backend)
        return FlatHolder(name).find(look, name, read_as, split)
    for holder in HOLDERS.values():
        found = holder.find(look, backend, read_as, split)
        if found is not None:
            return found
    return None


def _require_backend_name(backend: str) -> None:
    """Raise `ArgumentError` for a backend that neither we nor an installed package have."""
    ours = tuple(dict.fromkeys(("auto", *FORMATS, *flat_names())))
    if backend in ours or flat_format(backend) is not None:
        return
    try:
        require_choice("backend", backend, ours)
    except ArgumentError as error:
        raise noted(error, INSTALLED.notes) from None


def _of_installed(look: Look, backend: str, split: str | None, notes: list[str]) -> Opening | None:
    """Return the opening of a path that no format of ours has, by a package; None: by none. Those that fail add notes.

    Parameters
    ----------
    backend
        The format that is asked for, or "auto".
    """
    name = installed_name_of(look, notes) if backend == "auto" else backend
    if name in HOLDERS or flat_format(name) is None:
        return None
    return FlatHolder(name).find(look, backend, AS_STORED, split)


def _unknown(look: Look) -> FormatError:
    """Return the error of a path that no format has."""
    return way_in(look) or not_recognised(look) or (no_index(look.path) if look.is_dir else no_known_file(look))


class Holder(ABC):
    """One kind of path that holds tokens: a row of `HOLDERS`."""

    name: str

    @abstractmethod
    def find(self, look: Look, backend: str, read_as: ReadAs, split: str | None) -> Opening | None:
        """Return the opening of a path of this kind; None if it is of another kind.

        Parameters
        ----------
        backend
            The format that is asked for, or "auto".
        read_as
            How files are read that do not tell it themselves.
        split
            The split that is asked for, for a holder whose look opens each file.
        """

    def open_batches(self, opening: Opening) -> BatchReader:
        """Return the reader of batches that are stored."""
        raise NotImplementedError

    def stream_index(self, opening: Opening) -> ShardIndex:
        """Return the index of the files of a stream."""
        raise NotImplementedError


class StoreHolder(Holder):
    """A folder with a `shards.json`, or the `shards.json` itself; or a folder with a store for each format."""

    name = "store"

    def find(self, look: Look, backend: str, read_as: ReadAs, split: str | None) -> Opening | None:
        path = look.path
        if find_index(path):
            index = ShardIndex.load(path)
        else:
            found = {
                name: ShardIndex.load(store) for name, store in stores_by_format(path).items() if find_index(store)
            }
            if not found:
                return None
            chosen = _chosen(path, backend, found)
            index = found[chosen]
            path = path / chosen
        if backend != "auto":
            _require_backend(path, backend, index)
        return Opening(path, self.name, index.meta.layout, index.table.values["backend"][0], index)

    def open_batches(self, opening: Opening) -> BatchReader:
        path = opening.path
        index = _index_of(opening)
        if isinstance(path, RemotePath) and not index.complete:
            raise IncompleteError(f"{path}: is still written: a store that grows is read on its own machine only")
        if opening.verify == "store":
            opening.compare_digests()
        folder = path if path.is_dir() else path.parent
        index = index.of_split(opening.split)
        require_files(folder, index)
        if index.complete:
            return StoreReader(folder, index, access=opening.access, verify=opening.verify)
        from zb_hdf5.store.live import LiveReader  # h5py, which a finished store does not need

        return LiveReader(folder, index, opening.access, opening.verify)

    def stream_index(self, opening: Opening) -> ShardIndex:
        path = opening.path
        index = _index_of(opening).of_split(opening.split)
        folder = path if path.is_dir() else path.parent
        values = index.table.values
        if not all(values["complete"]):
            name = values["path"][list(values["complete"]).index(False)]
            raise IncompleteError(f"{folder / name}: its writer has not finished; make it again")
        require_files(folder, index)
        return index


def _index_of(opening: Opening) -> ShardIndex:
    """Return the index of a store, which `StoreHolder.find` has loaded."""
    return cast(ShardIndex, opening.index)


def _chosen(folder: Path, backend: str, found: dict[str, ShardIndex]) -> str:
    """Return the format whose store is read, of a folder with one for each; "auto" takes HDF5."""
    chosen = backend
    if backend == "auto":
        chosen = "hdf5" if "hdf5" in found else next(iter(found))
    if chosen not in found:
        raise BackendError(f"{folder}: asked for backend {chosen!r}, found stores of {' and '.join(sorted(found))}")
    require_same_tokens(folder, {chosen: found[chosen], **found})
    return chosen


def _require_backend(path: Path, backend: str, index: ShardIndex) -> None:
    """Raise `BackendError` if a file of a store has another format than is asked for."""
    if index.meta.layout == STREAM_LAYOUT and backend != index.backends[0]:
        raise BackendError(f"{path}: asked for backend {backend!r}, found a {index.backends[0]!r} stream")
    folder = path if path.is_dir() else path.parent
    for name, found in zip(index.table.values["path"], index.table.values["backend"], strict=True):
        if found != backend:
            facts = f"{folder / name}: asked for backend {backend!r}, found {found!r}"
            raise BackendError(facts, remedy=Remedy.OTHER_KIND, at=found)


class FlatHolder(Holder):
    """A file of a flat format, or a folder of such files, as one stream, or as the records of all.

    Parameters
    ----------
    name
        The format, a row of `TRAINER_FORMATS`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def find(self, look: Look, backend: str, read_as: ReadAs, split: str | None) -> Opening | None:
        path = look.path
        files = tuple(flat_files(self.name, look, read_as))
        is_asked_for = backend == self.name and look.is_dir
        flat = flat_format(self.name, read_as) if files or is_asked_for else None  # its file is imported
        if flat is None:
            return None
        if backend not in ("auto", self.name):
            raise BackendError(f"{path}: asked for backend {backend!r}, found a {self.name!r} stream")
        if not files:
            raise FormatError(f"{path}: no {flat.suffixes[0]} files of the format {self.name!r} in this folder")
        in_split, splits = SplitFiles.at([path], files, split)
        found = tuple(map(flat.facts, look.each(in_split)))
        layout = STREAM_LAYOUT
        if flat.holds_records:
            found[0].require_axes(read_as.axes)
            layout = STREAM_LAYOUT if found[0].record_tokens is None else BATCHES_LAYOUT
        return Opening(path, self.name, layout, self.name, files=files, found=found, splits=tuple(splits))

    def open_batches(self, opening: Opening) -> BatchReader:
        index = self.stream_index(opening)
        if opening.verify == "store":
            opening.compare_digests()
        return RecordReader(
            opening.path,
            index,
            Windows.of(opening.shape.batch_size or 1, cast(int, opening.found[0].record_tokens)),
            read_as=opening.read_as,
            access=opening.access,
            verify=opening.verify,
            found=opening.known,
        )

    def stream_index(self, opening: Opening) -> ShardIndex:
        """Return the index of the files as chunks of one stream.

        Ids become uint16 where that holds the dtypes of all, else uint32.
        """
        read_as = opening.read_as
        found = opening.found
        digests: dict[str, FlatDigest] = {}
        if read_as.digests is not None:
            digests = Digests.load(read_as.digests).require_all(opening.path, self.name, found)
        dtypes = {each.dtype for each in found}
        require_alike(found)
        is_small = all(dtype.kind == "u" and dtype.itemsize <= 2 for dtype in dtypes)
        stored = stored_dtype("uint16" if is_small else "uint32")
        meta = StoreMeta(1, DEFAULT_CHUNK_TOKENS, stored, layout=STREAM_LAYOUT, fields=found[0].fields)
        source = {FLAT_DTYPE: np.result_type(*dtypes).str}
        folder = os.path.join(opening.path if opening.path.is_dir() else opening.path.parent, "")
        names = [os.fspath(each.path).removeprefix(folder) for each in found]
        if digests:
            made = digests
            digests = {name: made[name_below(opening.path, each.path)] for name, each in zip(names, found, strict=True)}
        table = flat_table(self.name, names, found, list(opening.splits), digests)
        return ShardIndex(meta, table, source=source, digests=digests, read_as=read_as)


class FileHolder(Holder):
    """One file of a format with batches, recognised by its magic bytes."""

    name = "file"

    def find(self, look: Look, backend: str, read_as: ReadAs, split: str | None) -> Opening | None:
        path = look.path
        if look.is_dir:
            return None
        found = backend_in(look)
        if not found:
            return None
        if backend not in ("auto", found):
            facts = f"{path}: asked for backend {backend!r}, found a {found!r} file"
            raise BackendError(facts, remedy=Remedy.OTHER_KIND, at=found)
        try:
            column = FORMATS[found].column_of(path, read_as)
        except FormatError as error:
            if error.remedy is Remedy.DATASET and not read_as.names_dataset and (name := source_name_of(look)):
                error.add_note(f"its documents as a whole are no dataset: convert reads them, as the format {name!r}")
            raise
        layout = BATCHES_LAYOUT if column is None else column.meta.layout
        return Opening(path, self.name, layout, found, column=column)

    def open_batches(self, opening: Opening) -> BatchReader:
        _require_no_split(opening)
        looked: dict[str, object] = {}
        if opening.column is not None:
            looked = {"column": opening.column, "read_as": opening.read_as}
        reader = FORMATS[opening.backend].open(opening.path, access=opening.access, verify=opening.verify, **looked)
        with on_failure(reader.close):
            if reader.foreign_dataset is not None:
                if opening.shape.batch_size is not None and reader.batch_size == 1:
                    reader.join_records(opening.shape.batch_size)
            elif reader.complete:
                reader.record_documents = StoreDocuments.of_file(reader, opening.verify, opening.access)
        return reader

    def stream_index(self, opening: Opening) -> ShardIndex:
        _require_no_split(opening)
        column = opening.column
        if column is None:
            raise FormatError(f"{opening.path}: expected a token stream, found batches")
        entry = ShardEntry(
            opening.path.name,
            opening.backend,
            0,
            column.num_units,
            column.num_tokens,
            column.sha256 or NO_SHA256,
            document_count=_documents_of(column),
            complete=column.complete,
            fields={field.name: FieldDigest() for field in column.meta.fields},
            compressed=column.compressed,
        )
        return ShardIndex(column.meta, [entry])


def _documents_of(column: Column) -> int:
    """Return the number of documents of a stream; `NOT_KNOWN`, or `NOT_COUNTED` where a field tells them apart."""
    if column.is_foreign:
        return NOT_COUNTED if column.told_by else NOT_KNOWN
    if column.complete:
        return column.meta.document_count
    from zb_hdf5.documents.document_offsets import DocumentOffsets

    # a killed writer may have been ahead with documents
    with closing(DocumentOffsets(column.path, column.num_tokens, column.identity)) as offsets:
        return len(offsets.rows()) - 1


def _require_no_split(opening: Opening) -> None:
    """Raise `ArgumentError` if a split is asked for that is neither that of a lone file nor that of its name."""
    path = opening.path
    asked = split_named(opening.split)
    if asked not in (None, AUTO_SPLIT, DEFAULT_SPLIT, *named_splits([path], [path])):
        raise ArgumentError(f"{path}: split={opening.split!r} needs a store, found one file without it in its name")


class ForeignHolder(Holder):
    """A folder of HDF5 files of another program: their streams as one, or the records or batches of all."""

    name = "foreign"

    def find(self, look: Look, backend: str, read_as: ReadAs, split: str | None) -> Opening | None:
        path = look.path
        if look.is_far or not look.is_dir or not hdf5_files(path):
            return None
        from zb_hdf5.formats.foreign import warn_of_mask
        from zb_hdf5.formats.foreign_files import ForeignFiles  # h5py, which a finished store does not need

        files = ForeignFiles().files(look)
        if not files:
            return None
        if backend not in ("auto", FOREIGN_BACKEND):
            facts = f"{path}: asked for backend {backend!r}, found HDF5 files of another program"
            raise BackendError(facts, remedy=Remedy.OTHER_KIND, at=FOREIGN_BACKEND)
        warn_of_mask(read_as)
        in_split, splits = SplitFiles.at([path], files, split)
        found = ForeignFiles(read_as).found(in_split)
        layout = cast("Column", found[0].column).meta.layout
        return Opening(path, self.name, layout, FOREIGN_BACKEND, files=tuple(files), found=found, splits=tuple(splits))

    def open_batches(self, opening: Opening) -> BatchReader:
        meta = cast("Column", opening.found[0].column).meta
        size = meta.batch_size
        if size == 1:
            size = opening.shape.batch_size or size
        if opening.verify == "store":
            opening.compare_digests()
        return RecordReader(
            opening.path,
            self.stream_index(opening),
            Windows.of(size, meta.seq_len),
            access=opening.access,
            verify=opening.verify,
            read_as=replace(opening.read_as, dataset=opening.foreign_dataset),
            found=opening.known,
        )

    def stream_index(self, opening: Opening) -> ShardIndex:
        """Return the index of the files as chunks of one stream, whatever the axes of their datasets are."""
        from zb_hdf5.formats.h5_tokens import require_access

        columns = [cast("Column", each.column) for each in opening.found]
        for column in columns:
            require_access(column, opening.access)
        first = columns[0]
        read_as = replace(opening.read_as, dataset=first.name)
        found = opening.found
        digests: dict[str, FlatDigest] = {}
        if read_as.digests is not None:
            made = Digests.load(read_as.digests)
            digests = made.require_all(opening.path, FOREIGN_BACKEND, found)
            made.require_dataset(read_as)
        names = [name_below(opening.path, each.path) for each in columns]
        meta = StoreMeta(
            1,
            DEFAULT_CHUNK_TOKENS,
            first.meta.dtype,
            layout=STREAM_LAYOUT,
            fields=first.meta.fields,
            unfit=tuple(sorted({each for column in columns for each in column.meta.unfit})),
        )
        table = flat_table(FOREIGN_BACKEND, names, found, list(opening.splits), digests)
        return ShardIndex(meta, table, digests=digests, read_as=read_as)


#: The one table of holders, in the order in which a path is compared with them. A flat format of another trainer is one
#: more row of `TRAINER_FORMATS`; another kind of path that is read in place is one more row here.
HOLDERS: Final[dict[str, Holder]] = {
    row.name: row for row in (StoreHolder(), *map(FlatHolder, flat_names()), FileHolder(), ForeignHolder())
}


def holder_named(name: str) -> Holder:
    """Return the holder of this name; one that is no row is that of a flat format of an installed package."""
    return HOLDERS.get(name) or FlatHolder(name)
