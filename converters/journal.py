"""The journal of a conversion: its plan, and which of its files are finished. A kill costs a file per worker.

A conversion that fills `<dst>.partial/` keeps `journal-00000-of-00001.jsonl` there; of n jobs that share the
folder, job i keeps `journal-<i>-of-<n>.jsonl`. Its first line is the plan, then comes a line per finished file,
flushed to disk at once. The last key of a line is the digest of all before it: a line that a kill has cut off, or that
somebody has changed, is not believed, and its file counts as unfinished.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from zb_hdf5 import ConvertError, FormatError, ShardEntry, StoreMeta
from zb_hdf5.converters.batch_source import TokenCounts
from zb_hdf5.converters.conversion import WHOLE, ShardRange, WorkOptions
from zb_hdf5.converters.engines import OnProgress, Workers, no_progress
from zb_hdf5.errors import Remedy
from zb_hdf5.field import Field
from zb_hdf5.files.checked import GROUP_BYTES
from zb_hdf5.files.paths import RemotePath, read_whole, regular
from zb_hdf5.files.publishing import LockedFolder, remove, remove_journals, write_atomically, write_fully
from zb_hdf5.files.replaced_files import owner_of
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import INDEX_NAME, JOURNAL_PREFIX, SETS_FOLDER, stored_dtype

#: Before the digest of a line, its last key.
_CHECK: Final = ', "check": "'
#: The errors of a line that has its digest, and is of another build.
_UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
_NAME: Final = re.compile(rf"{JOURNAL_PREFIX}(\d+)-of-(\d+)\.jsonl")
#: Size in bytes and mtime in ns.
FileState = tuple[int, int]


def meta_to_json(meta: StoreMeta) -> dict[str, Any]:
    """Return a shape as the plan of a journal has it."""
    facts = asdict(meta)
    del facts["unfit"]  # of other programs: nothing that is written is
    fields = {field.name: field.to_json() for field in meta.fields}
    return facts | {"dtype": meta.dtype.name, "fields": fields}


def meta_from_json(value: dict[str, Any]) -> StoreMeta:
    """Return the shape that a plan has as `meta_to_json`."""
    fields = tuple(Field.from_json(*item) for item in value["fields"].items())
    return StoreMeta(**{**value, "dtype": stored_dtype(value["dtype"]), "fields": fields})


@dataclass(frozen=True)
class Finished:
    """A file of a conversion that is whole and has its name."""

    entry: ShardEntry
    max_token: int | None  # None: not known
    frame_sha256: str = ""  # of all its bytes and sidecars but the tokens
    counts: TokenCounts = field(default_factory=TokenCounts)  # of its documents, which are counted file by file

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the facts that a journal has as an `asdict`."""
        return cls(
            entry=ShardEntry.from_json(value["entry"]),
            max_token=int(value["max_token"]),
            frame_sha256=str(value["frame_sha256"]),
            counts=TokenCounts.from_json(value["counts"]),
        )


def is_intact(task: Any, progress: OnProgress = no_progress) -> bool:
    """Return whether the finished file of a task still has every byte."""
    try:
        frame, tokens = digests_of(task, task.finished.entry)
    except OSError:
        return False
    return frame == task.finished.frame_sha256 and tokens in ("", task.finished.entry.sha256)


def digests_of(task: Any, entry: ShardEntry, *, frame_only: bool = False) -> tuple[str, str]:
    """Return the digests of all bytes of a file and its sidecars but the tokens, and of these, if they are placed."""
    path, *sidecars = task.paths
    meta = task.meta
    frame = hashlib.sha256()
    tokens = hashlib.sha256()
    end = 0  # of the tokens so far
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for start, stop in chain(_token_ranges(meta, entry), [(size, size)]):
            if start > end:
                frame.update(f"{end} {start} ".encode())
                _digest_bytes(frame, file, end, start)
            if not frame_only:
                _digest_bytes(tokens, file, start, stop)
            end = stop
    for sidecar in sidecars:
        with suppress(FileNotFoundError), open(sidecar, "rb") as file:
            frame.update(hashlib.file_digest(file, "sha256").digest())
    has_tokens = meta.column in entry.columns and not frame_only
    return frame.hexdigest(), tokens.hexdigest() if has_tokens else ""


def _token_ranges(meta: StoreMeta, entry: ShardEntry) -> Iterator[tuple[int, int]]:
    """Yield where batches that follow each other begin and end; none are known: all bytes count as the frame."""
    left = entry.token_count * meta.dtype.itemsize
    for first, stride, count in entry.columns.get(meta.column, ()):
        whole = count if stride == meta.batch_bytes else 1
        for start in range(first, first + count * stride, whole * stride):
            size = min(left, whole * meta.batch_bytes)
            yield start, start + size
            left -= size


def _digest_bytes(digest: Any, file: io.FileIO, start: int, stop: int) -> None:
    for piece in range(start, stop, GROUP_BYTES):
        deliver_signals()
        file.seek(piece)
        digest.update(file.read(min(GROUP_BYTES, stop - piece)))


def _own(path: str, flags: int) -> int:
    """Open a journal: not a link, which another user may have put in its place."""
    return regular(path, flags | os.O_NOFOLLOW)


def journal_name(part: ShardRange) -> str:
    """Return the name of the journal of a job."""
    return f"{JOURNAL_PREFIX}{part.job:05}-of-{part.num_jobs:05}.jsonl"


def file_states(paths: Iterable[Path]) -> dict[str, FileState]:
    """Return (size in bytes, mtime in ns) of every file; a folder counts with the files in it."""
    states = {}
    for path in paths:
        if isinstance(path, RemotePath):
            continue  # its reader looks at the ETag
        files = [path]
        if not path.is_file():
            files = sorted(each for each in path.iterdir() if each.is_file())
        for file in files:
            status = file.stat()
            states[str(file)] = (status.st_size, status.st_mtime_ns)
    return states


def require_unchanged(paths: Iterable[Path], before: dict[str, FileState]) -> None:
    """Raise `ConvertError` if a file has changed."""
    for path, found in file_states(paths).items():
        if found != before.get(path):
            raise ConvertError(
                f"{path}: changed while it was converted: expected (size, mtime_ns) {before.get(path)}, found "
                f"{found}; convert again"
            )


class Planned(NamedTuple):
    """The facts of a file that the plan decides, which a journal must not change; None: not before it is written."""

    path: str
    split: str
    num_batches: int | None = None
    token_count: int | None = None
    document_count: int | None = None

    def allows(self, entry: ShardEntry) -> bool:
        """Return whether a finished file is the one that was planned."""
        return all(planned in (None, getattr(entry, name)) for name, planned in self._asdict().items())


#: The key of a plan that has a `Planned` for each file.
PLANNED: Final = "planned"
#: The key of a plan that has the state of each file of the source.
_FILES: Final = "files"


@dataclass(frozen=True)
class Record:
    """The content of a journal: its first line, and the finished files."""

    unit: str  # the word for the files in messages; conversions of different units have nothing in common
    plan: dict[str, Any]  # JSON of all that decides their bytes, the size and mtime of each source file too
    finished: dict[int, Finished] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many files there will be, of all jobs."""
        return len(self.plan[PLANNED])

    def add(self, line: bytes) -> None:
        """Take the finished file of a line, if the line can be believed."""
        row = _content(line)
        if row is None:
            return
        with suppress(*_UNREADABLE):
            number = int(row["number"])
            done = Finished.from_json(row)
            if number in range(self.total) and Planned(*self.plan[PLANNED][number]).allows(done.entry):
                self.finished[number] = done


class KeptShards(NamedTuple):
    """The part that a resumed conversion did not write again: shards, their tokens, and the time to check them."""

    shards: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, finished: Iterable[Finished], seconds: float) -> Self:
        """Count shards that were found finished."""
        tokens = [done.entry.token_count for done in finished]
        return cls(len(tokens), sum(tokens), seconds if tokens else 0.0)


NOTHING_KEPT: Final = KeptShards()


class Journal:
    """Runs the tasks that fill a `.partial/` folder, and records which are finished. Not thread-safe.

    It begins with those that earlier runs have finished and that are as they were then: `kept` counts them. All else
    that these have left is removed.

    Parameters
    ----------
    folder
        The folder that is filled.
    head
        The plan, which is the first line.
    tasks
        The tasks of this job, by their numbers in the plan. Each has the `paths` of its file and sidecars.
    work
        The part of this job, and whether it goes on or starts over.
    workers
        The processes that run the tasks.
    """

    def __init__(
        self,
        folder: LockedFolder,
        head: Record,
        tasks: Mapping[int, Any],
        work: WorkOptions,
        workers: Workers,
    ) -> None:
        start_s = time.monotonic()
        self._folder = folder
        self._head = head
        self._tasks = tasks
        self._workers = workers
        self._part = work.shard_range
        self._overwrite = work.force
        self._path = folder.partial_path / journal_name(work.shard_range)
        recorded: dict[int, Finished] = {}
        if work.resume or not work.force:  # else it starts over
            recorded = self._recorded(work.resume)
        self.finished = self._intact(recorded)
        self.kept = KeptShards.of(self.finished.values(), time.monotonic() - start_s)
        self._remove_unfinished()
        first = _sealed({"unit": self._head.unit, "plan": self._head.plan})
        lines = [first, *map(_line, self.finished, self.finished.values())]
        write_atomically(self._path, ("\n".join(lines) + "\n").encode())
        self._remove_other_journals()

    @property
    def missing(self) -> dict[int, Any]:
        """The tasks that are left to do."""
        return {number: task for number, task in self._tasks.items() if number not in self.finished}

    def run(self, write: Callable[[Any, OnProgress], Finished], tasks: Mapping[int, Any]) -> list[Finished]:
        """Do the missing work, and return all finished files in order."""
        numbers = list(tasks)
        workers = self._workers
        with closing(workers.engine.run(write, tasks.values(), workers.shown.advance)) as results:
            for k, done in results:
                with open(self._path, "r+b", buffering=0, opener=_own) as file:
                    write_fully(file.fileno(), f"{_line(numbers[k], done)}\n".encode(), file.seek(0, os.SEEK_END))
                    os.fsync(file.fileno())
                self.finished[numbers[k]] = done
                if done.entry.token_count:
                    self._folder.keep()
        return [self.finished[number] for number in self._tasks]

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Keep finished files on an exception, and name the way to resume with them."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError):
                self._remove_unfinished()
            if self.finished and getattr(error, "remedy", None) is not Remedy.RESTART:  # which `resume` meets again
                share = f"{len(self.finished):,} of {len(self._tasks):,}" if self.missing else "all"
                error.add_note(
                    f"{share} {self._head.unit} are finished, in {self._folder.partial_path}: "
                    f"{how_to_go_on(self._overwrite)}"
                )
            raise

    def _recorded(self, resume: bool) -> dict[int, Finished]:
        """Return the records of earlier runs of all jobs."""
        folder = self._folder.partial_path
        if journal_paths(folder):
            self._folder.keep()
        records = read_journals(folder, self._head.unit)
        finished: dict[int, Finished] = {}
        for record in records.values():
            for number, done in record.finished.items():
                if number in self._tasks:
                    finished[number] = done
        if finished and not resume:
            refuse_interrupted(folder, self._head.unit)
        is_part = self._part != WHOLE
        for path, record in records.items():
            # the other parts are merged with this one; without them or `resume` there is nothing to go on with
            if (resume and (finished or is_part)) or (is_part and path != self._path):
                require_same(record.plan, self._head.plan, path)
        return finished

    def _intact(self, recorded: dict[int, Finished]) -> dict[int, Finished]:
        """Check the files of earlier runs, and return the records of those that are as they were written."""
        numbers = sorted(recorded)
        checks = [replace(self._tasks[number], finished=recorded[number]) for number in numbers]
        with closing(self._workers.engine.run(is_intact, checks, no_progress)) as results:
            is_good = dict(results)
        finished: dict[int, Finished] = {}
        for k, number in enumerate(numbers):
            if is_good[k]:
                finished[number] = recorded[number]
        return finished

    def _remove_unfinished(self) -> None:
        """Remove the leftovers of earlier runs of this part, but for finished files."""
        folder = self._folder.partial_path
        kept = {SETS_FOLDER}  # whose parts are compared with their digests
        mine: list[str] = []
        for number, task in self._tasks.items():
            names = [path.name for path in task.paths]
            mine += names
            if number in self.finished:
                kept.update(names)
        for path in journal_paths(folder).values():  # a journal stays until the new one is there
            kept.add(path.name)
        beginnings = tuple(mine)
        for name in os.listdir(folder):
            is_mine = self._part == WHOLE or owner_of(name).startswith(beginnings)
            if is_mine and name not in kept:
                remove(folder / name)

    def _remove_other_journals(self) -> None:
        """Remove the journals that the new one replaces, and with `force` the journals of other plans."""
        for part, path in journal_paths(self._folder.partial_path).items():
            replaced = self._part == WHOLE or (self._overwrite and part.num_jobs != self._part.num_jobs)
            if part != self._part and replaced:
                path.unlink()


def is_result(store: Path, is_same: bool, sources: Iterable[Path]) -> bool:
    """Return whether a store needs no work: it is the same by its index, and no source file is newer."""
    if not is_same:
        return False
    made_ns = (store / INDEX_NAME).stat().st_mtime_ns
    if any(path.stat().st_mtime_ns > made_ns for path in sources):
        return False
    remove_journals(store)
    return True


def refuse_interrupted(folder: Path, unit: str) -> None:
    """Raise `ConvertError` if interrupted runs have finished something in a `.partial/` folder."""
    records = list(read_journals(folder, unit).values())
    if finished := {number for record in records for number in record.finished}:
        raise ConvertError(
            f"{folder}: an interrupted conversion with {len(finished):,} of {records[0].total:,} finished {unit} "
            "is there",
            remedy=Remedy.RESUME_OR_RESTART,
        )


def _line(number: int, done: Finished) -> str:
    return _sealed({"number": number, **asdict(done)})


def _sealed(content: dict[str, Any]) -> str:
    """Return a line: JSON, with the digest of all before it as the last key."""
    body = json.dumps(content).removesuffix("}")
    return f'{body}{_CHECK}{_digest(body.encode())}"}}'


def _content(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line; None if it is not one that was written here."""
    body, check, digest = line.rpartition(_CHECK.encode())
    if not check or digest != f'{_digest(body)}"}}'.encode():
        return None
    with suppress(*_UNREADABLE):
        return dict(json.loads(line))
    return None


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def journal_paths(folder: Path) -> dict[ShardRange, Path]:
    """Return the journals in a folder."""
    paths = sorted(folder.glob(f"{JOURNAL_PREFIX}*.jsonl"))
    return {ShardRange(int(name[1]), int(name[2])): path for path in paths if (name := _NAME.fullmatch(path.name))}


def read_journals(folder: Path, unit: str) -> dict[Path, Record]:
    """Read the journals in a folder; `ConvertError` if they are not of files of this `unit`."""
    return {path: read_journal(path, unit) for path in journal_paths(folder).values()}


def read_journal(path: Path, unit: str | None = None) -> Record:
    """Read a journal; lines that cannot be believed are left out. `FormatError` if the first one is among them."""
    first, *rest = read_whole(path).split(b"\n")[:-1] or [b""]
    head = _content(first)
    if head is None or not head.keys() >= {"unit", "plan"} or PLANNED not in head["plan"]:
        raise FormatError(f"{path}: not a journal of a conversion: its first line is damaged", remedy=Remedy.RESTART)
    found = Record(head["unit"], head["plan"])
    if unit not in (None, found.unit):
        raise ConvertError(f"{path}: an interrupted conversion of another kind is there", remedy=Remedy.RESTART)
    for line in rest:
        found.add(line)
    return found


def require_same(found: dict[str, Any], plan: dict[str, Any], path: Path) -> None:
    """Raise `ConvertError` if a journal is of another conversion; the message has the first difference."""
    expected = json.loads(json.dumps(plan))
    if lacking := _files_lacking(found, expected):
        raise ConvertError(
            f"{path.parent}: holds another conversion: an earlier version began it, whose plan lacks {lacking[0]}",
            remedy=Remedy.RESTART,
        )
    if found != expected:
        raise ConvertError(
            f"{path.parent}: holds another conversion: {difference_of_plans(found, expected)}",
            remedy=Remedy.SAME_OR_RESTART,
        )


def _files_lacking(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the source files that a plan lacks, if it is another one in nothing else; [] if it is.

    Files that have tokens or documents decide more than their own state. Files beside them, such as an index, may have
    been changed unseen since an earlier version began.
    """
    before, now = found.get(_FILES) or {}, expected.get(_FILES) or {}
    is_same_else = {**found, _FILES: now} == expected and before.items() <= now.items()
    return sorted(now.keys() - before.keys()) if is_same_else else []


def difference_of_plans(was: Any, other: Any, place: str = "here", name: str = "plan") -> str:
    """Return the first difference of two plans in words.

    Parameters
    ----------
    was, other
        The plans, or two values of one key in them.
    place
        The place of the other plan, in words.
    name
        The key.
    """
    if isinstance(was, dict) and isinstance(other, dict):
        for key, value in other.items():
            if was.get(key) != value:
                return difference_of_plans(was.get(key), value, place, key)
    if name == "cuts":
        return f"it has {len(was or ()):,} shards, cut otherwise than the {len(other):,} {place}"
    return f"its {name} is {_short(was)}, {place} it is {_short(other)}"


def how_to_go_on(overwrite: bool) -> str:
    """Return the cure after an interruption, by whether the result replaces another one."""
    return str(Remedy.RESUME_FORCED if overwrite else Remedy.RESUME_OR_RESTART)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"
