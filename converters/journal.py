"""The journal of a conversion: its plan, and which of its files are finished. A kill costs a file per worker.

A conversion that fills `<dst>.partial/` keeps `journal-00000-of-00001.jsonl` there; of n jobs that share the
folder, job i keeps `journal-<i>-of-<n>.jsonl`. Its first line is the plan, then comes a line per finished file,
flushed to disk at once. The last line may be cut off by a kill: that file counts as unfinished.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from zb_hdf5 import ConvertError, FormatError, ShardEntry
from zb_hdf5.converters.engines import Engine, Progress, no_progress
from zb_hdf5.converters.source import Counts
from zb_hdf5.files.publishing import LockedFolder, remove, remove_journals, write_atomically
from zb_hdf5.spec import INDEX_NAME, JOURNAL_PREFIX

_NAME: Final = re.compile(rf"{JOURNAL_PREFIX}(\d+)-of-(\d+)\.jsonl")
#: Size in bytes and mtime in ns.
FileState = tuple[int, int]


@dataclass(frozen=True)
class Finished:
    """A file of a conversion that is whole and has its name."""

    entry: ShardEntry
    max_token: int | None  # None: not known
    frame_sha256: str = ""  # of all its bytes and sidecars but the tokens
    counts: Counts | None = None  # of its documents, where they are counted file by file

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the facts of which a journal has the `asdict`."""
        entry, counts = ShardEntry.from_json(value["entry"]), value["counts"] and Counts.from_json(value["counts"])
        return cls(entry, int(value["max_token"]), str(value["frame_sha256"]), counts)


@dataclass(frozen=True)
class CheckTask:
    """A finished file to look at once more."""

    task: Any  # that made it
    finished: Finished
    from_source: bool  # compare with the source as well, whose files have another mtime than before

    amount = 0  # checks show no progress

    def amount_done(self) -> int:
        return 0


class Part(NamedTuple):
    """Which share of the shards a job writes: number `job` of `num_jobs`, counted from 0."""

    job: int
    num_jobs: int

    def shards(self, num_shards: int) -> range:
        """Return the numbers of its shards: consecutive ones."""
        return range(self.job * num_shards // self.num_jobs, (self.job + 1) * num_shards // self.num_jobs)

    @property
    def journal_name(self) -> str:
        return f"{JOURNAL_PREFIX}{self.job:05}-of-{self.num_jobs:05}.jsonl"


WHOLE: Final = Part(0, 1)


@dataclass(frozen=True)
class Head:
    """The first line of a journal."""

    unit: str  # the word for the files in messages; conversions of different units have nothing in common
    total: int  # how many files there will be, of all jobs
    plan: dict[str, Any]  # JSON of all that decides their bytes
    files: dict[str, FileState]  # of the source; empty where `plan` has them: then any change is another conversion


class Record(NamedTuple):
    """The content of a journal."""

    head: Head
    finished: dict[int, Finished]


class Journal:
    """Runs the tasks that fill a `.partial/` folder, and records which are finished. Not thread-safe."""

    def __init__(
        self,
        folder: LockedFolder,
        head: Head,
        tasks: Mapping[int, Any],  # by number, those of `part`; each has the `paths` of its file and sidecars
        *,
        part: Part = WHOLE,
        overwrite: bool,
        resume: bool,
    ) -> None:
        self._folder, self._head, self._tasks = folder, head, tasks
        self._part, self._overwrite, self._resume = part, overwrite, resume
        self.finished: dict[int, Finished] = {}  # those of earlier runs after `take_up`, the others after `run`

    @property
    def missing(self) -> dict[int, Any]:
        """The tasks that are left to do."""
        return {number: task for number, task in self._tasks.items() if number not in self.finished}

    def take_up(self, engine: Engine, is_intact: Callable[[CheckTask, Progress], bool]) -> None:
        """Find what earlier runs have finished and is as it was then; remove all else that they have left."""
        recorded, changed = self._recorded() if self._resume or not self._overwrite else ({}, False)
        checks = [CheckTask(self._tasks[number], recorded[number], changed) for number in sorted(recorded)]
        with closing(engine.run(is_intact, checks, no_progress)) as results:
            intact = dict(results)
        self.finished = {number: recorded[number] for k, number in enumerate(sorted(recorded)) if intact[k]}
        self._remove_unfinished()
        path = self._folder.partial_path / self._part.journal_name
        lines = [json.dumps(asdict(self._head)), *map(_line, self.finished, self.finished.values())]
        write_atomically(path, ("\n".join(lines) + "\n").encode())
        self._remove_other_journals()

    def run(
        self,
        engine: Engine,
        write: Callable[[Any, Progress], Finished],
        tasks: Mapping[int, Any],
        progress: Progress,
    ) -> list[Finished]:
        """Do what is missing, and return all finished files in order."""
        path, numbers = self._folder.partial_path / self._part.journal_name, list(tasks)
        with closing(engine.run(write, tasks.values(), progress)) as results:
            for k, done in results:
                _append(path, _line(numbers[k], done))
                self.finished[numbers[k]] = done
                if done.entry.token_count:
                    self._folder.keep()
        return [self.finished[number] for number in self._tasks]

    @contextmanager
    def kept_for_resume(self) -> Iterator[None]:
        """Have an exception keep the finished files only, and name the way to go on with them."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError):
                self._remove_unfinished()
            if self.finished:
                error.add_note(
                    f"{len(self.finished):,} of {len(self._tasks):,} {self._head.unit} are finished, in "
                    f"{self._folder.partial_path}: {how_to_go_on(self._overwrite)}"
                )
            raise

    def _recorded(self) -> tuple[dict[int, Finished], bool]:
        """Return what earlier runs have recorded, whichever job, and whether a source file has another mtime since."""
        folder = self._folder.partial_path
        if journal_paths(folder):
            self._folder.keep()
        records = read_journals(folder, self._head.unit)
        finished = {k: done for record in records.values() for k, done in record.finished.items() if k in self._tasks}
        if finished and not self._resume:
            refuse_interrupted(folder, self._head.unit)
        changed = False
        if self._resume and (finished or self._part != WHOLE):  # else there is nothing to go on with
            for path, record in records.items():
                require_same(record.head.plan, self._head.plan, path)
                changed |= self._is_changed(record.head.files)
        return finished, changed

    def _is_changed(self, before: dict[str, FileState]) -> bool:
        """Return whether a source file has another mtime than before, and refuse another size."""
        for path, (size, _) in self._head.files.items():
            if path not in before or before[path][0] != size:
                raise ConvertError(
                    f"{path}: changed since the interrupted conversion: expected {before.get(path, ('no file',))[0]} "
                    f"bytes, found {size}; start over with --force"
                )
        return before != self._head.files

    def _remove_unfinished(self) -> None:
        """Remove what earlier runs of this part have left, but for finished files."""
        folder = self._folder.partial_path
        kept = {path.name for number in self.finished for path in self._tasks[number].paths}
        mine = tuple(path.name for task in self._tasks.values() for path in task.paths)
        journals = {path.name for path in journal_paths(folder).values()}
        for name in os.listdir(folder):
            # a journal stays until the new one is there
            if name not in kept and name not in journals and (self._part == WHOLE or name.startswith(mine)):
                remove(folder / name)

    def _remove_other_journals(self) -> None:
        """Remove the journals that the new one replaces, and with --force those of other plans."""
        for part, path in journal_paths(self._folder.partial_path).items():
            replaced = self._part == WHOLE or (self._overwrite and part.num_jobs != self._part.num_jobs)
            if part != self._part and replaced:
                path.unlink()


def is_result(store: Path, is_same: bool, sources: Iterable[Path]) -> bool:
    """Return whether a store needs no work: it is the same by its index, and no source file is newer."""
    made_ns = (store / INDEX_NAME).stat().st_mtime_ns if is_same else 0
    done = is_same and all(path.stat().st_mtime_ns <= made_ns for path in sources)
    if done:
        remove_journals(store)
    return done


def refuse_interrupted(folder: Path, unit: str) -> None:
    """Raise `ConvertError` if interrupted runs have finished something in a `.partial/` folder."""
    records = list(read_journals(folder, unit).values())
    if finished := {number for record in records for number in record.finished}:
        raise ConvertError(
            f"{folder}: an interrupted conversion with {len(finished):,} of {records[0].head.total:,} finished {unit} "
            "is there; go on with --resume, or start over with --force"
        )


def _append(path: Path, line: str) -> None:
    """Append a line to a journal; flushed to disk on return."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        data = (line + "\n").encode()
        while data:  # one call writes less on a disk that is nearly full
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(number: int, done: Finished) -> str:
    return json.dumps({"number": number, **asdict(done)})


def journal_paths(folder: Path) -> dict[Part, Path]:
    """Return the journals in a folder."""
    found = {}
    for path in sorted(folder.glob(f"{JOURNAL_PREFIX}*.jsonl")):
        if match := _NAME.fullmatch(path.name):
            found[Part(int(match[1]), int(match[2]))] = path
    return found


def read_journals(folder: Path, unit: str) -> dict[Path, Record]:
    """Read the journals in a folder; `ConvertError` if they are not of files of this `unit`."""
    return {path: read_journal(path, unit) for path in journal_paths(folder).values()}


def read_journal(path: Path, unit: str | None = None) -> Record:
    """Read a journal; a last line that a kill has cut off is left out."""
    try:
        first, *rest = path.read_text(encoding="utf-8").split("\n")[:-1]
        head = Head(**json.loads(first))
        if unit not in (None, head.unit):
            raise ConvertError(f"{path}: an interrupted conversion of another kind is there; start over with --force")
        files = {name: (int(state[0]), int(state[1])) for name, state in head.files.items()}
        finished = {int(row["number"]): Finished.from_json(row) for row in map(json.loads, rest)}
        return Record(replace(head, files=files), finished)
    except ConvertError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(f"{path}: not a journal of a conversion: {error}; start over with --force") from error


def require_same(found: dict[str, Any], plan: dict[str, Any], path: Path) -> None:
    """Raise `ConvertError` if a journal is of another conversion; the message has the first difference."""
    expected = json.loads(json.dumps(plan))
    if found != expected:
        facts = f"{path.parent}: holds another conversion: {_difference(found, expected)}"
        raise ConvertError(f"{facts}; give the same arguments, or start over with --force")


def _difference(was: Any, here: Any, name: str = "plan") -> str:
    """Return the first difference of two plans in words."""
    keys = [key for key in here if was.get(key) != here[key]] if type(was) is type(here) is dict else []
    if keys:
        return _difference(was.get(keys[0]), here[keys[0]], keys[0])
    if name == "cuts":
        return f"it has {len(was or ()):,} shards, cut otherwise than the {len(here):,} here"
    return f"its {name} is {_short(was)}, here it is {_short(here)}"


def how_to_go_on(overwrite: bool) -> str:
    """Return the options to run after an interruption."""
    return "go on with --resume --force" if overwrite else "go on with --resume, or start over with --force"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"
