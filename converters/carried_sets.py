"""The field sets of a source that a conversion copies with its tokens, and the words for those that stay behind."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from zb_hdf5 import ArgumentError, ConvertError, open_corpus
from zb_hdf5.console import Progress
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.conversion import WHOLE, ShardRange
from zb_hdf5.converters.engines import ProgressCalls
from zb_hdf5.converters.settings import Settings
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.errors import ChecksumError, IncompleteError, Remedy
from zb_hdf5.field_sets.set_copy import bind_copy, copy_parts
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.store.bound_tokens import split_of
from zb_hdf5.store.format_list import batch_format
from zb_hdf5.store.found_set import found_set
from zb_hdf5.store.set_facts import SetFacts
from zb_hdf5.store.set_index import SetIndex
from zb_hdf5.store.set_place import set_folder, sets_folders, sets_in, sets_of

#: The reason for which a set of records stays behind, or a conversion is refused.
_OTHER_RECORDS: Final = "the result has other records, or another order"
#: The files of a set besides its parts, and its folders.
FILES_OF_SET: Final = 5


@dataclass(frozen=True)
class CarriedSet:
    """A finished field set of a source, which is copied.

    Attributes
    ----------
    folder, facts, index
        The set.
    """

    folder: Path
    facts: SetFacts
    index: SetIndex

    @property
    def place(self) -> Path:
        """Its folder in a folder of sets."""
        return Path(self.facts.name, self.facts.split)

    def parts_of(self, share: ShardRange) -> range:
        """Return the numbers of the parts that one of several jobs copies."""
        return share.shards(len(self.index.parts["path"]))

    def bytes_of(self, share: ShardRange) -> int:
        """Return the bytes of these parts."""
        return sum(self.index.parts["bytes"][number] for number in self.parts_of(share))


class CarriedSets(NamedTuple):
    """The field sets that a conversion copies, and those that it leaves behind.

    Attributes
    ----------
    sets
        Those that are copied.
    left_behind
        The words for the others, each with the reason; "": there are none.
    """

    sets: tuple[CarriedSet, ...] = ()
    left_behind: str = ""

    @property
    def names(self) -> list[str]:
        """The names and splits of those that are copied, as `zb info` has them."""
        return [f"{each.facts.name} ({each.facts.split})" for each in self.sets]

    @property
    def inodes(self) -> int:
        """The files and folders of all copies."""
        return sum(len(each.index.parts["path"]) + FILES_OF_SET for each in self.sets)

    @property
    def num_bytes(self) -> int:
        """The bytes of all copies."""
        return sum(each.bytes_of(WHOLE) for each in self.sets)

    def bytes_left(self, folder: Path, share: ShardRange) -> int:
        """Return the bytes of the parts of a job that are in no file of a folder of sets yet."""
        there = {file: file.stat().st_size for each in self.sets for file in _files_in(folder / each.place)}
        return sum(
            num_bytes
            for each in self.sets
            for number in each.parts_of(share)
            for name, num_bytes in [(each.index.parts["path"][number], each.index.parts["bytes"][number])]
            if there.get(folder / each.place / name) != num_bytes
        )

    def copy_to(self, folder: Path, share: ShardRange, shown: ProgressCalls | Progress) -> None:
        """Copy the parts of a job to a folder of sets."""
        if not self.sets:
            return
        shown.begin("copying field sets", sum(each.bytes_of(share) for each in self.sets), "B")
        for each in self.sets:
            copy_parts(each.folder, each.facts, each.index, folder / each.place, each.parts_of(share), shown.advance)

    def remove_others(self, folder: Path) -> None:
        """Remove the sets from a folder that an earlier run has copied to it, and this one does not."""
        for name, split in sets_in(folder):
            if Path(name, split) not in [each.place for each in self.sets]:
                shutil.rmtree(folder / name / split)


#: Nothing is copied, and nothing left behind.
NO_SETS: Final = CarriedSets()


def _files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def bind_sets(folder: Path, path: Path) -> None:
    """Bind all copied sets in a folder of these to the tokens of a finished path."""
    for name, split in sets_in(folder):
        with open_corpus(path) as corpus, _of_split(corpus, split) as tokens:
            bind_copy(folder / name / split, tokens)


@contextmanager
def _of_split(corpus: Corpus, split: str) -> Generator[Corpus]:
    """Yield the split of a corpus, which may be all of it."""
    try:
        is_all = split_of(corpus) == split
    except ArgumentError:  # it has several
        is_all = False
    with nullcontext(corpus) if is_all else corpus.split(split) as found:
        yield found


def carried_sets(source: BatchSource | DocumentSource, settings: Settings) -> CarriedSets:
    """Return the field sets that a conversion copies: those that were asked for, by default all that it can.

    Raises
    ------
    ConvertError
        If one that was asked for cannot be copied; or if none was, and the records of a store change.
    """
    asked = settings.target.field_set
    splits = {shard.split for shard in source.shards} if isinstance(source, StoreSource) else set[str]()
    there = [
        (path, name, split)
        for path in settings.paths
        for name, split in sets_of(path)
        if not splits or split in splits  # else that of a corpus of another split
    ]
    if asked is not None:
        names = {name for _, name, _ in there}
        if missing := [name for name in asked if name not in names]:
            known = ", ".join(sorted(names)) or "none"
            raise ConvertError(
                f"{settings.paths[0]}: expected field sets that it has ({known}), found {', '.join(missing)}",
                options=["field_set"],
            )
        there = [each for each in there if each[1] in asked]
    sets: list[CarriedSet] = []
    left: dict[str, list[str]] = {}
    shared = sets_folders(settings.target.path)
    reason = _reason_of(source, settings)
    keeps_documents = isinstance(source, BatchSource) and bool(source.document_files)
    for path, name, split in there:
        found = reason or _found(path, name, split, keeps_documents=keeps_documents)
        if isinstance(found, str):
            if asked:
                raise ConvertError(f"{path}: the field set {name} ({split}) cannot be copied: {found}")
            left.setdefault(found, []).append(f"{name} ({split})")
        elif found.folder.parent.parent not in shared:  # else both stores of a folder have it
            sets.append(found)
    if _OTHER_RECORDS in left and asked is None and _is_asked_of(source, settings):
        raise ConvertError(
            f"{settings.paths[0]}: its field sets {', '.join(left[_OTHER_RECORDS])} have values of its records, and "
            f"{_OTHER_RECORDS}",
            remedy=Remedy.LEAVE_SETS,
        )
    words = (f"leaves behind the field sets {', '.join(each)}: {why}" for why, each in left.items())
    return CarriedSets(tuple(sets), " and ".join(words))


def _is_asked_of(source: BatchSource | DocumentSource, settings: Settings) -> bool:
    """Return whether a conversion may choose among the field sets of its source: one of a store to batches."""
    row = batch_format(settings.target.format)
    return isinstance(source, StoreSource) and row is not None and row.holds_batches and not settings.target.live


def _reason_of(source: BatchSource | DocumentSource, settings: Settings) -> str:
    """Return the reason why the result of a conversion has no field set of its source; "": it may have."""
    row = batch_format(settings.target.format)
    if not (isinstance(source, BatchSource) and source.keeps_records):
        return _OTHER_RECORDS
    if row is None or not row.holds_batches:
        return f"they lie with stores, and {settings.target.format} files are none"
    return "a live store is written meanwhile" if settings.target.live else ""


def _found(path: Path, name: str, split: str, *, keeps_documents: bool) -> CarriedSet | str:
    """Return a set of a path that is finished, and belongs to its tokens; of another one the reason."""
    try:
        with open_corpus(path) as corpus, _of_split(corpus, split) as tokens:
            found = found_set(tokens, name, set_folder(path, name, split))
    except IncompleteError:
        return "not all of its values are written, or it was not finished"
    except (ChecksumError, ArgumentError):
        return "its values belong to other tokens"
    if found.facts.is_of_documents and not keeps_documents:
        return "its values belong to documents, which are left behind"
    return "it was not finished" if found.index is None else CarriedSet(found.folder, found.facts, found.index)
