"""The journal of a conversion: what is being made, and which shards are finished. It makes a kill cost one shard.

A conversion that fills `<dst>.partial/` keeps `journal-00000-of-00001.jsonl` there; of n jobs that share the
folder, job i keeps `journal-<i>-of-<n>.jsonl`. Its first line is the plan, then comes a line per finished shard,
flushed to disk at once. The last line may be torn by a kill: that shard counts as unfinished.
"""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, NamedTuple

from zb_hdf5 import ConvertError, FormatError, ShardEntry, StoreMeta
from zb_hdf5.converters.pipeline.plan import Plan
from zb_hdf5.converters.pipeline.shard import FileState, FinishedShard
from zb_hdf5.core.publishing import LockedFolder, write_atomically
from zb_hdf5.spec import JOURNAL_PREFIX, stored_dtype

#: What the journals of shards are called, among those of other work.
SHARD_JOURNALS: Final = f"{JOURNAL_PREFIX}[0-9]*"
_NAME: Final = re.compile(rf"{JOURNAL_PREFIX}(\d+)-of-(\d+)\.jsonl")


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


class Record(NamedTuple):
    """What a journal says."""

    identity: dict[str, Any]
    files: dict[str, FileState]
    finished: dict[int, FinishedShard]


class Journal:
    """Writes one journal. Not thread-safe: only the process that gives out the shards writes it."""

    def __init__(self, folder: Path, part: Part, plan: Plan, finished: dict[int, FinishedShard]) -> None:
        self._path = folder / part.journal_name
        head = {"plan": plan.identity(), "files": plan.files}
        lines = [json.dumps(head), *(_line(shard, done) for shard, done in sorted(finished.items()))]
        write_atomically(self._path, ("\n".join(lines) + "\n").encode())

    def add(self, shard: int, done: FinishedShard) -> None:
        """Record a shard that has its final name; flushed to disk on return."""
        append_line(self._path, _line(shard, done))


def append_line(path: Path, line: str) -> None:
    """Append a line to a journal; flushed to disk on return."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        data = (line + "\n").encode()
        while data:  # one call writes less on a disk that is nearly full
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(shard: int, done: FinishedShard) -> str:
    rest = {"max_token": done.max_token, "frame_sha256": done.frame_sha256}
    return json.dumps({"shard": shard, "entry": done.entry.to_json(), **rest})


def journal_paths(folder: Path) -> dict[Part, Path]:
    """Return the journals in a folder."""
    found = {}
    for path in sorted(folder.glob(f"{JOURNAL_PREFIX}*.jsonl")):
        if match := _NAME.fullmatch(path.name):
            found[Part(int(match[1]), int(match[2]))] = path
    return found


def remove_journals(folder: Path) -> None:
    """Remove the journals of a store that is whole."""
    for path in folder.glob(f"{JOURNAL_PREFIX}*"):
        path.unlink()


def refuse_other_journals(folder: LockedFolder, own: str) -> None:
    """Raise `ConvertError` if the folder holds the journal of work of another kind, not of names like `own`."""
    for path in sorted(folder.partial_path.glob(f"{JOURNAL_PREFIX}*.jsonl")):
        if not fnmatch(path.name, own):
            folder.keep()
            raise ConvertError(f"{path}: an interrupted conversion of another kind is there; start over with --force")


def read_journal(path: Path) -> Record:
    """Read a journal; a last line that a kill has torn is left out.

    Raises
    ------
    FormatError
        If it is not a journal.
    """
    try:
        head, *rest = path.read_text(encoding="utf-8").split("\n")[:-1]
        plan = json.loads(head)
        finished = {}
        for text in rest:
            line = json.loads(text)
            entry = ShardEntry.from_json(line["entry"])
            frame_sha256 = str(line.get("frame_sha256", ""))  # of an earlier version: that shard is written again
            finished[int(line["shard"])] = FinishedShard(entry, int(line["max_token"]), frame_sha256)
        files = {name: (int(state[0]), int(state[1])) for name, state in plan["files"].items()}
        return Record(dict(plan["plan"]), files, finished)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(f"{path}: not a journal of a conversion: {error}; start over with --force") from error


def require_same(found: dict[str, Any], identity: dict[str, Any], path: Path) -> None:
    """Raise `ConvertError` if a journal is of another conversion; the message says what differs."""
    expected = json.loads(json.dumps(identity))
    if found != expected:
        name = next((key for key in expected if found.get(key) != expected[key]), "version")
        raise ConvertError(
            f"{path.parent}: holds another conversion: its {name} is {_short(found.get(name))}, here it is "
            f"{_short(expected[name])}; give the same arguments, or start over with --force"
        )


def how_to_go_on(overwrite: bool) -> str:
    """Say what to run after an interruption."""
    return "go on with --resume --force" if overwrite else "go on with --resume, or start over with --force"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"


def meta_from_json(value: dict[str, Any]) -> StoreMeta:
    """Return the meta that a plan's identity holds."""
    return StoreMeta(**{**value, "dtype": stored_dtype(value["dtype"])})
