"""The plan of a conversion: its files, and the work of each, which any process, on any node, can do by itself."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias
from uuid import uuid4

from zb_hdf5 import ShardIndex, StoreMeta
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.carried_sets import NO_SETS, CarriedSets
from zb_hdf5.converters.engines import CountedWork, OnProgress, no_progress, work_noted_in
from zb_hdf5.converters.journal import PLANNED, FileState, Finished, Planned, Record
from zb_hdf5.converters.routes import ShardDocuments
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.spec import DEFAULT_SPLIT, NOT_KNOWN, SHARD_PREFIX

#: That which is converted: batches, or documents.
Content: TypeAlias = BatchSource | DocumentSource
#: Tokens that are committed together: the unit of resume is the file, and others may read a part of a large one.
COMMIT_BYTES: Final = 1 << 30


class BatchRange(NamedTuple):
    """The batches of one file, which follow each other.

    Attributes
    ----------
    start, stop, split
        Its batches.
    documents
        The number of documents that begin in it; None: not known.
    """

    start: int
    stop: int
    split: str = DEFAULT_SPLIT
    documents: int | None = None


class TargetFiles(ABC):
    """The files of a target: how a task is written to one, and all that a folder of them has besides. Picklable.

    Attributes
    ----------
    unit
        The word for the files in the journal and in messages.
    """

    unit: ClassVar[str]

    @property
    def names(self) -> str:
        """A regular expression of the names of all files of a folder; "": they are the files of a store."""
        return ""

    @property
    def is_store(self) -> bool:
        """Whether a folder of them keeps its index, and is a store."""
        return True

    @property
    def dtype(self) -> str:
        """The dtype of the ids in the files, where a store has no such dtype; "": that of a task."""
        return ""

    @abstractmethod
    def files(self, path: Path) -> tuple[Path, ...]:
        """Return the file of a task, and those that may belong to it."""

    @abstractmethod
    def write(self, task: Task, work: CountedWork) -> Finished:
        """Read all of a task from its source, write its file, and publish it."""

    def add_tables(self, folder: Path, source: Any) -> None:
        """Add the documents of a source that are in no file of a task to the folder of the first task."""
        return

    @abstractmethod
    def index(self, folder: Path, facts: Mapping[str, Any], finished: Sequence[Finished]) -> ShardIndex:
        """Return the index of a folder with all files. Raises `ConvertError` if they do not fit together.

        Parameters
        ----------
        folder
            The folder, before it has its name.
        facts
            Those of the plan; of a merge, `decided` as the journals have it.
        finished
            All files, in order.
        """

    def complete(self, folder: Path, index: ShardIndex) -> None:
        """Write all that a folder has besides the files of the tasks: of a store its index."""
        if self.is_store:
            index.save(folder)

    def would_be_smaller(self, max_token: int) -> bool:
        """Return whether ids of at most this one would have been written in fewer bytes, had that been known."""
        return True


@dataclass(frozen=True)
class Task:
    """One file to write. Picklable.

    Parameters
    ----------
    source
        All that is converted.
    part
        The batches, or the documents, of the file.
    target
        How it is written.
    path
        The file.
    meta
        The tokens in the file.
    amount
        The work: tokens of batches, or bytes of documents.
    num_bytes
        About how much disk it takes; 0: not known.
    num_threads
        Threads that tokenize.
    overwrite
        Whether an existing file is replaced.
    files
        For a lone file, which is the whole result: the files of the source must still be like this before it is
        published. None: it belongs to a folder.
    finished
        The facts with which the file is compared once more.
    """

    source: Any
    part: BatchRange | ShardDocuments
    target: TargetFiles
    path: Path
    meta: StoreMeta
    amount: int
    num_bytes: int = 0
    num_threads: int = 1
    overwrite: bool = False
    files: dict[str, FileState] | None = None
    finished: Finished | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file, and those that may belong to it."""
        return self.target.files(self.path)

    @property
    def is_lone(self) -> bool:
        """Whether it is the whole result."""
        return self.files is not None

    @property
    def note(self) -> Path | None:
        """The file that tells other processes how far this one is; a lone file is written by the one that waits."""
        return None if self.is_lone else self.path.with_name(self.path.name + ".progress")

    def amount_done(self) -> int:
        """Return how much another process has done, by the note that it leaves."""
        return 0 if self.note is None else work_noted_in(self.note)

    @property
    def planned(self) -> Planned:
        """The facts of the file that a journal must not change."""
        name = self.path.name
        part = self.part
        if isinstance(part, ShardDocuments):
            return Planned(name, part.split)
        documents = NOT_KNOWN if part.documents is None else part.documents
        return Planned(name, part.split, part.stop - part.start, self.amount, documents)


class SentOnce:
    """The source of many tasks, which a process that gets them unpickles once: so it opens a file once for all of them.

    Parameters
    ----------
    source
        The source.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._key = uuid4().hex

    @cached_per_process
    def _pickled(self) -> bytes:
        return pickle.dumps(self.source, pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._key, self._pickled)


#: The last source that this process got, by its key: none of the process that sends it.
_RECEIVED: Final[dict[str, SentOnce]] = {}


def _received(key: str, pickled: bytes) -> SentOnce:
    """Return the source of a task that another process has sent."""
    if key not in _RECEIVED:
        _RECEIVED.clear()
        _RECEIVED[key] = SentOnce(pickle.loads(pickled))
    return _RECEIVED[key]


def forget_received() -> None:
    """Close the files of the last source that this process got, as a rank of an MPI job does at the end of its work."""
    _RECEIVED.clear()


def write_sent(task: Task, progress: OnProgress = no_progress) -> Finished:
    """Write the files of a task whose source is `SentOnce`."""
    return write_task(replace(task, source=task.source.source), progress)


def write_task(task: Task, progress: OnProgress = no_progress) -> Finished:
    """Write the file of a task, and those that belong to it."""
    note = task.note
    try:
        return task.target.write(task, CountedWork(task.amount, progress, note))
    finally:
        if note is not None:
            note.unlink(missing_ok=True)


@dataclass(frozen=True)
class Plan:
    """The files of a conversion, and all that decides them.

    Parameters
    ----------
    source
        All that is converted, as the target stores it.
    target
        How its files are written.
    tasks
        The work of each file, whose path is its name.
    decided
        JSON of all that decides the bytes of the files: the files of the source stand for their content.
    facts
        That, and all else that the index has of the source.
    description
        The `source` entry of the index.
    files
        The state of every source file when the plan was made.
    inodes
        About how many files and folders the conversion makes.
    left_behind
        The words for all that the source has and the target does not hold; "": it holds everything.
    lacks_vocab_size
        Whether the size of a vocabulary, which is not known, might have made the ids smaller.
    sets
        The field sets of the source.
    left_out
        The files of tokens or text in the folders of the source that are not converted.
    """

    source: Any
    target: TargetFiles
    tasks: list[Task]
    decided: dict[str, Any]
    facts: dict[str, Any]
    description: dict[str, Any]
    files: dict[str, FileState]
    inodes: int
    left_behind: str = ""
    lacks_vocab_size: bool = False
    sets: CarriedSets = NO_SETS
    left_out: tuple[Path, ...] = ()

    def head(self) -> Record:
        """Return the first line of the journal."""
        return Record(self.target.unit, {**self.decided, PLANNED: [task.planned for task in self.tasks]})

    def tasks_in(self, folder: Path, numbers: Iterable[int], num_threads: int) -> dict[int, Task]:
        """Return some of the tasks, by their numbers, whose files are in a folder."""
        tasks = {number: self.tasks[number] for number in numbers}
        return {
            number: replace(task, path=folder / task.path.name, num_threads=num_threads)
            for number, task in tasks.items()
        }

    def lone_task(self, path: Path, overwrite: bool, num_threads: int) -> Task:
        """Return the one task, whose file is the result."""
        [task] = self.tasks
        return replace(task, path=path, overwrite=overwrite, num_threads=num_threads, files=self.files)


def names_of_shards(count: int, suffix: str) -> list[Path]:
    """Return the names of so many files of a store."""
    return [Path(f"{SHARD_PREFIX}{number:05}-of-{count:05}{suffix}") for number in range(count)]
