"""Files of tokens that are made of documents: written by any number of processes, with a journal, proved by bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from zb_hdf5 import ConvertError
from zb_hdf5.converters.journal import AnyTask, CheckTask, Head, Journal
from zb_hdf5.converters.routing import DocumentCounts
from zb_hdf5.converters.run import WorkOptions
from zb_hdf5.converters.shard import require_unchanged
from zb_hdf5.converters.task import Progress, no_progress
from zb_hdf5.files.publishing import LockedFolder

#: What the files of tokens are called in the journal and in messages.
TOKEN_FILES: Final = "files of tokens"


@dataclass(frozen=True)
class FinishedTokens:
    """A file of tokens that is whole and on disk, and what became of its documents.

    Attributes
    ----------
    files_sha256
        Over all bytes of its files.
    """

    token_count: int
    counts: DocumentCounts
    files_sha256: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        counts = DocumentCounts.from_json(value["counts"])
        return cls(int(value["token_count"]), counts, str(value["files_sha256"]))


class WrittenTokens(NamedTuple):
    """All files of tokens, and what became of all documents; which of the files an earlier run had finished."""

    finished: list[FinishedTokens]
    counts: DocumentCounts
    kept: list[FinishedTokens]


def write_token_files(
    tasks: Mapping[int, AnyTask],
    write: Callable[[AnyTask, Progress], FinishedTokens],
    plan: dict[str, Any],
    folder: LockedFolder,
    work: WorkOptions,
    sources: Sequence[Path],
) -> WrittenTokens:
    """Write the file of each task, unless an interrupted run has finished it, and keep a journal of them.

    Parameters
    ----------
    plan
        JSON of all that decides the files: the journal of another plan is refused. Its "files" are the states of the
        sources.
    folder
        Where the journal lies.
    sources
        The files that are read.

    Raises
    ------
    ConvertError
        If there are no documents, a source has changed meanwhile, or an interrupted run has left something that is not
        to be gone on with.
    """
    head = Head(TOKEN_FILES, len(tasks), plan, {})
    journal = Journal(folder, head, tasks, FinishedTokens, overwrite=work.overwrite, resume=work.resume)
    journal.take_up(work.engine, is_intact)
    kept = list(journal.finished.values())
    work.kept(sum(done.token_count for done in kept))
    with journal.kept_for_resume():
        finished = journal.run(work.engine, write, journal.missing, work.progress)
    require_unchanged(sources, plan["files"])
    counts = DocumentCounts()
    for done in finished:
        counts.add(done.counts)
    if not counts.documents:
        raise ConvertError(f"{sources[0]}: {counts.no_documents(len(sources))}")
    return WrittenTokens(finished, counts, kept)


def is_intact(check: CheckTask[Any, FinishedTokens], progress: Progress = no_progress) -> bool:
    """Return whether a finished file still has every byte that it was finished with."""
    return files_sha256(check.task.paths) == check.finished.files_sha256


def files_sha256(paths: Iterable[Path]) -> str:
    """Return one digest over all bytes of some files; one that is not there counts as empty."""
    digests = []
    for path in paths:
        digest = hashlib.sha256()
        with suppress(FileNotFoundError), open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digests.append(digest)
    return combined(digests)


def combined(digests: Iterable[Any]) -> str:
    """Return one digest over the digests of files."""
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
