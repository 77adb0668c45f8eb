"""A format: how its files are recognised and read; and what a look at a path has found."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from zb_hdf5.errors import ArgumentError, BackendError, FormatError, Remedy
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.listing import listed
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT, SplitFiles, named_splits, train_first
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.format_row import FormatRow, named_part
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import BATCHES_LAYOUT, StoreMeta

if TYPE_CHECKING:  # h5py among others, which no other format needs
    from zb_hdf5.formats.broken_file import BrokenFile
    from zb_hdf5.formats.corpus import Corpus
    from zb_hdf5.formats.document_source import DocumentSource
    from zb_hdf5.formats.h5_column import Column

#: The layout of a path that a conversion opens by its format alone: it is not read in place.
NOT_IN_PLACE: Final = ""


@dataclass(frozen=True)
class Found:
    """The findings of one look at a path, and how it is read. `found_at` makes it.

    Attributes
    ----------
    path
        The file or folder that is read: of a folder with a store for each format, the store that was chosen.
    backend
        The format of its files; of a store with files of several formats, that of the first one.
    layout
        "batches" or "stream", as in `StoreMeta`; `NOT_IN_PLACE`.
    files
        The files of ids in no store, whatever their splits are; (): a store, or one file with digests of its own.
    facts
        The facts of the files of the split that is read.
    splits
        The split of each of these.
    column
        The tokens of a lone HDF5 file; None: of another format, or of several files.
    identity
        The identity of a lone file of batches or chunks; None: of other files, whose facts have it.
    access, verify, split, read_as
        The arguments of `open_reader`.
    look
        The look at the file that is read first, which is open for whoever reads it; of a path that is not read in
        place, the look that has found it. None: it is opened again.
    """

    path: Path
    backend: str
    layout: str
    files: tuple[str, ...] = ()
    facts: tuple[FlatFacts, ...] = ()
    splits: tuple[str, ...] = ()
    column: Column | None = None
    identity: Identity | None = None
    access: str = "auto"
    verify: str = "auto"
    split: str | None = AUTO_SPLIT
    read_as: ReadAs = AS_STORED
    look: Look | None = field(default=None, compare=False, repr=False)

    def kept_open(self, look: Look) -> Self:
        """Return the same findings with the look at the file that is read first, which is left open for its reader."""
        first = self.look_at_first(look)
        return self if first is None else replace(self, look=first.kept_open())

    def look_at_first(self, look: Look) -> Look | None:
        """Return the look at the file that is read first, of a look at the path; None: its name is not known here."""
        if not self.facts:
            return look
        first = self.facts[0]
        return look.of(first.text) if first.num_tokens else None

    @property
    def foreign_dataset(self) -> str | None:
        """The dataset that is read of HDF5 files of another program; None of any other path."""
        column = self.facts[0].column if self.facts else self.column
        return column.name if column is not None and column.is_foreign else None

    def lone_file(self, look: Look | None) -> FoundFile:
        """Return a lone file, as it is opened; `look` is that by which it was found, if it is open."""
        return FoundFile(
            path=self.path,
            access=self.access,
            verify=self.verify,
            known=self.column,
            identity=self.identity,
            look=look,
        )

    @property
    def takes_digests(self) -> bool:
        """Whether its files hold no digests, so that they may have been made."""
        if isinstance(self.path, RemotePath):
            return False
        if self.column is not None:
            return self.column.is_foreign and self.column.sha256 is None
        return bool(self.facts)

    def splits_there(self) -> list[str | None]:
        """Return the splits of the files that are read, that for training first; [None] if none are told.

        Raises
        ------
        ArgumentError
            If the names of its files tell none for sure.
        """
        told = train_first(named_splits([each.text for each in self.facts], [self.path]))
        return [*told] if len(told) > 1 else [None]

    def of_split(self, split: str | None) -> Found:
        """Return what was found of one split, of a path whose files were all looked at; None: of all.

        Raises
        ------
        ArgumentError
            If no file is of the split, or the names of files tell no split for sure.
        """
        files, splits = SplitFiles.at([self.path], [each.text for each in self.facts], split)
        known = {each.text: each for each in self.facts}
        return replace(self, split=split, facts=tuple(known[file] for file in files), splits=tuple(splits))

    def left_out(self, look: Look) -> tuple[Path, ...]:
        """Return the files in and below the path that are named as tokens or text are, and that no split of it has.

        Parameters
        ----------
        look
            The look at the path.
        """
        # in a third of the time of pathlib; a folder of thousands of files has one ending, or a few
        parts = {file.rpartition(".")[2] for file in self.files}
        endings = {f".{part.lower()}" for part in parts}
        return listed(look, *sorted(endings)).left_out if endings else ()

    @property
    def known(self) -> Mapping[int, Column | FlatFacts]:
        """The facts of the files that the look has opened, by the numbers of the files."""
        if self.read_as.digests is not None:
            return {}  # the first read proves each file
        return {0: self.column} if self.column is not None else dict(enumerate(self.facts))


class Format:
    """The code of one format: a subclass for each, which its row in the list names. A class is used for many paths.

    It has four tasks, of which a format has some: `recognise` finds its files at a path, `open` reads one in place,
    `rows` reads those of a source once, in order, and `write` makes one. The defaults are right for a file of batches,
    which its magic bytes mark; `open` and `rows` have none. Text has no class: the conversion tokenizes it.

    Parameters
    ----------
    row
        The facts of the format.
    read_as
        How files are read that do not tell it themselves.
    """

    def __init__(self, row: FormatRow, read_as: ReadAs = AS_STORED) -> None:
        self.row = row
        self.read_as = read_as

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.row.name

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The endings of paths that are looked into; the first one is that of the ids."""
        return self.row.suffixes

    def fits(self, look: Look) -> bool:
        """Return whether a path is of this format, by its content."""
        return not look.is_dir and self.row.has_magic(look)

    def files(self, look: Look) -> list[str]:
        """Return the paths of the files at a path that are of this format, as text; none if the path is of another one.

        No facts are read, so that damaged files are among them.
        """
        return [look.text] if self.fits(look) else []

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
        """Return what a look finds at a path of this format; None: the path is of another one.

        Parameters
        ----------
        look
            A look at a file or folder.
        backend
            The format that is asked for, or "auto".
        split
            The split whose files are looked at, of files that each tell their facts.

        Raises
        ------
        BackendError
            If another format is asked for.
        FormatError, IncompleteError
            If the facts of the files cannot be read, or a folder lacks files of the format that is asked for.
        """
        if not self.files(look):
            return None
        self._require_asked(look.path, backend)
        return Found(look.path, self.name, BATCHES_LAYOUT, identity=look.identity)

    def _require_asked(self, path: Path, backend: str) -> None:
        """Raise `BackendError` if files of another format are asked for."""
        if backend not in ("auto", self.name):
            facts = f"{path}: asked for backend {backend!r}, found a {self.name!r} file"
            raise BackendError(facts, remedy=Remedy.OTHER_KIND, at=self.name)

    def none_in(self, folder: Path) -> FormatError:
        """Return the error of a folder that lacks files of the format that is asked for."""
        return FormatError(f"{folder}: no {self.suffixes[0]} files of the format {self.name!r} in this folder")

    def open(self, file: FoundFile) -> Corpus:
        """Open one file. `verify` of a part of a store is "none": whoever asks for it compares what is read.

        Raises
        ------
        FormatError, IncompleteError, BackendError, UnverifiableError
            As `open_corpus`, and if another file has its name now.
        """
        raise NotImplementedError

    def total_records(self, look: Look) -> int:
        """Return the records of a file of batches; the last batch may be filled up. Raises as `open`."""
        with self.open(FoundFile(path=look.path, verify="none", look=look)) as corpus:
            return corpus.meta.total_records

    def rows(self, found: Sequence[Found], **options: Any) -> DocumentSource:
        """Return the documents of the paths of a source, which are read once, in order.

        Parameters
        ----------
        found
            The findings at each path, in order. The first one has the look by which it was found: files that it has
            opened are not opened again, and its `of` has their identities, and the looks at the other paths. It ends
            after this call.
        options
            Those of the conversion that the row names.

        Raises
        ------
        ConvertError
            If a path has no such files, or has files that do not go together.
        FormatError
            If a file is damaged.
        """
        raise NotImplementedError  # of a format that is read in place

    @property
    def writer(self) -> type[Any]:
        """The class of its writer, which the row names: a `FileWriter` or a `DocumentWriter`."""
        found: type[Any] = named_part(self.row.writer)
        return found

    def write(self, path: str | os.PathLike[str], meta: StoreMeta, **options: Any) -> Any:
        """Begin a file, which its writer publishes when it ends, and return the writer.

        Parameters
        ----------
        path
            The file to publish.
        meta
            The tokens in it.
        options
            Those of a `FileWriter`, where the format takes batches, or of a `DocumentWriter`.

        Raises
        ------
        ArgumentError
            If a file of batches cannot hold such tokens, or the fields of `meta`.
        """
        if self.row.takes_batches:
            self.require(meta, Path(path))
            if meta.fields and self.row.tokens_only:
                raise ArgumentError(f"{path}: {self.name} files hold tokens only: write fields to an HDF5 file")
        return self.writer(path, meta, **options)

    def require(self, meta: StoreMeta, path: Path) -> None:
        """Raise `ArgumentError` if a file cannot hold such batches."""
        if meta.codec != "none" and self.row.tokens_only:
            raise ArgumentError(f"{path}: {self.name} files are never compressed: leave out the codec {meta.codec}")
        if meta.dtype.itemsize == 1 and not self.row.holds_uint8:
            raise self.row.lacks_uint8(path)

    def total_bytes(self, meta: StoreMeta, num_batches: int) -> int:
        """Return about how many bytes so many batches and their fields take."""
        fields = (meta.of_field(field.name).padded_batch_bytes for field in meta.fields)
        tokens: int = self.writer.stored_bytes(meta, num_batches)
        return tokens + num_batches * sum(fields)

    def open_broken(self, path: Path) -> BrokenFile | None:
        """Open a damaged or unfinished file; None: it is read as a whole one is."""
        return None

    def count(self, look: Look) -> tuple[int, str]:
        """Return the number of tokens of a file without digests, and the reason why it cannot be verified."""
        raise NotImplementedError  # of a format with digests


class RowsFormat(Format, ABC):
    """A format whose documents are read once, in order, by a conversion: it is not read in place."""

    @abstractmethod
    def fits(self, look: Look) -> bool:
        """Return whether a path, which ends as the row has it, is of this format, by its content."""

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
        """Return a path that is not read in place, with the look that has read of it; None: it is of another format."""
        if not self.fits(look):
            return None
        self._require_asked(look.path, backend)
        return Found(look.path, self.name, NOT_IN_PLACE, look=look)

    @abstractmethod
    def rows(self, found: Sequence[Found], **options: Any) -> DocumentSource:
        """Return the documents of the paths of a source. See `Format`."""
