"""The journal of tokenizing: which files of tokens are finished. It makes a kill cost one file per worker.

`journal-tokens.jsonl` lies beside the files: its first line says what is tokenized and how, then comes a line per
finished file. When it is gone on with, each file is compared with its digest before it counts again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from zb_hdf5 import ConvertError, FormatError
from zb_hdf5.converters.ingest.routing import Recipe, ShardPlan, Tally, describe_files
from zb_hdf5.converters.pipeline.engines import Engine
from zb_hdf5.converters.pipeline.journal import (
    append_line,
    how_to_go_on,
    refuse_other_journals,
    remove_journals,
    require_same,
)
from zb_hdf5.converters.pipeline.shard import Progress, file_states
from zb_hdf5.core.publishing import LockedFolder, write_atomically
from zb_hdf5.spec import INDEX_NAME, JOURNAL_PREFIX
from zb_hdf5.text.documents import DocumentFile

JOURNAL_NAME: Final = f"{JOURNAL_PREFIX}tokens.jsonl"
Task = TypeVar("Task", bound=Any)


class FinishedTokens(NamedTuple):
    """A file of tokens that is whole and on disk, and what became of its documents.

    Attributes
    ----------
    sha256
        Of the tokens of a stream; of all bytes of a spool.
    file_sha256
        Of all bytes of a stream's file.
    kept
        Whether an earlier run has made it.
    """

    token_count: int
    sha256: str
    tally: Tally
    file_sha256: str = ""
    kept: bool = False

    def as_kept(self) -> FinishedTokens:
        """Return the same, of an earlier run."""
        return self._replace(kept=True)

    @staticmethod
    def tokens_kept(files: Iterable[FinishedTokens]) -> int:
        """Return how many tokens of text were not tokenized again."""
        return sum(file.tally.accounts.tokens_in for file in files if file.kept)


def tokenize(
    write: Callable[[Task, Progress], FinishedTokens],
    tasks: Sequence[Task],
    folder: LockedFolder,
    identity: dict[str, Any],
    *,
    engine: Engine,
    overwrite: bool,
    resume: bool,
    progress: Progress,
    kept: Progress,
) -> list[FinishedTokens]:
    """Run one task per file of tokens, and keep a journal of them in `folder`.

    Parameters
    ----------
    write
        Writes the file of a task, unless that of `task.before` is still there and has its digest: then `kept` is set.
    tasks
        Dataclasses with `before: FinishedTokens | None`.
    identity
        What decides the tokens of each task.
    overwrite
        Drop what an interrupted run has finished, if it is not gone on with.
    resume
        Go on with it.
    progress, kept
        Called with the number of tokens that were made, or found made, since the last call.

    Raises
    ------
    ConvertError
        If an interrupted run has finished something and neither was asked for, or if it was another conversion.
    """
    path = folder.partial_path / JOURNAL_NAME
    before = {}
    if resume or not overwrite:
        refuse_other_journals(folder, JOURNAL_NAME)
        before = _finished_before(path, folder, identity, resume)
    if not before:
        folder.clear()
    write_atomically(
        path, "".join(f"{line}\n" for line in [json.dumps(identity), *map(_line, before.items())]).encode()
    )
    finished: dict[int, FinishedTokens] = {}
    try:
        given = [replace(task, before=before.get(number)) for number, task in enumerate(tasks)]
        with closing(engine.run(write, given, progress)) as results:
            for number, done in results:
                append_line(path, _line((number, done)))
                if done.kept:
                    kept(done.token_count)
                finished[number] = done
                if done.token_count:
                    folder.keep()
    except BaseException as error:
        if before or finished:
            error.add_note(
                f"{len(finished):,} of {len(tasks):,} files of tokens are finished, in {folder.partial_path}: "
                f"{how_to_go_on(overwrite)}"
            )
        raise
    return [done for _, done in sorted(finished.items())]


def describe_work(
    files: Sequence[DocumentFile], kind: str, recipe: Recipe, tokenizer: dict[str, Any], plans: Sequence[ShardPlan]
) -> dict[str, Any]:
    """Return what decides the tokens of every file, as JSON has it."""
    routes = [
        [
            plan.split,
            plan.holdout and asdict(plan.holdout),
            [(group.file_number, group.number) for group in plan.groups],
        ]
        for plan in plans
    ]
    return {
        "source": describe_files(files, kind, recipe),
        "text_column": files[0].column,
        "tokenizer": tokenizer,
        "files": file_states([file.path for file in files]),
        "routing": hashlib.sha256(json.dumps(routes).encode()).hexdigest(),
    }


def digest_of_work(work: dict[str, Any], options: dict[str, Any]) -> str:
    """Return a digest of all that decides a store, but for the time when its sources were changed last."""
    sizes = {path: size for path, (size, _) in work["files"].items()}
    return hashlib.sha256(json.dumps([{**work, "files": sizes}, options]).encode()).hexdigest()


def is_made_of(store: Path, files: Sequence[DocumentFile], digest: str) -> bool:
    """Return whether a store was made of these files as they are now, and in the same way; then it needs no journal."""
    index = store / INDEX_NAME
    try:
        made_ns = index.stat().st_mtime_ns
        same = bool(json.loads(index.read_bytes())["source"]["work"] == digest)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if same := same and all(file.path.stat().st_mtime_ns <= made_ns for file in files):
        remove_journals(store)
    return same


def _finished_before(
    path: Path, folder: LockedFolder, identity: dict[str, Any], resume: bool
) -> dict[int, FinishedTokens]:
    if not path.exists():
        return {}
    try:
        found, finished = _read(path)
    except FormatError:
        folder.keep()
        raise
    if not finished:
        return {}
    folder.keep()
    if not resume:
        raise ConvertError(
            f"{folder.partial_path}: an interrupted conversion with {len(finished):,} finished files of tokens is "
            "there; go on with --resume, or start over with --force"
        )
    require_same(found, identity, path)
    return finished


def count_finished(path: Path) -> int:
    """Return how many files of tokens a journal says are finished."""
    return len(_read(path)[1])


def _line(item: tuple[int, FinishedTokens]) -> str:
    number, done = item
    content = {"token_count": done.token_count, "sha256": done.sha256, "file_sha256": done.file_sha256}
    return json.dumps({"file": number, **content, "tally": asdict(done.tally)})


def _read(path: Path) -> tuple[dict[str, Any], dict[int, FinishedTokens]]:
    """Return what was tokenized, and what is finished; a last line that a kill has torn is left out."""
    try:
        head, *rest = path.read_text(encoding="utf-8").split("\n")[:-1]
        finished = {}
        for text in rest:
            line = json.loads(text)
            tally = Tally.from_json(line["tally"])
            file_sha256 = str(line.get("file_sha256", ""))  # of an earlier version: that stream is made again
            finished[int(line["file"])] = FinishedTokens(
                int(line["token_count"]), str(line["sha256"]), tally, file_sha256
            )
        return dict(json.loads(head)), finished
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: not a journal of tokenizing: {error}; start over with --force") from error
