"""Documents to the files of another trainer: one file, or a folder with the files of each shard and split."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from re import escape

import numpy as np

from zb_hdf5 import ArgumentError, ConvertError, StoreMeta
from zb_hdf5.converters.batch_source import TokenCounts
from zb_hdf5.converters.conversion import WHOLE
from zb_hdf5.converters.engines import OnProgress, Workers, no_progress
from zb_hdf5.converters.estimate import estimate_of
from zb_hdf5.converters.journal import (
    NOTHING_KEPT,
    Finished,
    Kept,
    digests_of,
    meta_to_json,
    require_unchanged,
)
from zb_hdf5.converters.options import LossOptions, Settings
from zb_hdf5.converters.reports import FilesDryRun, Report
from zb_hdf5.converters.routes import require_documents
from zb_hdf5.converters.shard_plan import free_room, kept_of, lack_of_room, require_room
from zb_hdf5.converters.stream_target import (
    FACTS_KEPT,
    WRITTEN_META,
    TokensPlan,
    TokensTask,
    facts_of,
    planned_files,
    read_documents,
    refused,
)
from zb_hdf5.errors import Remedy
from zb_hdf5.files.publishing import PartialDirectory, partial_path, refuse_existing, refuse_result
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.formats.document_writer import DocumentWriter, WrittenShard
from zb_hdf5.spec import DEFAULT_CHUNK_TOKENS, NO_CODEC, STREAM_LAYOUT
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.trainers.trainer_formats import TrainerFormat, document_writer, format_named


@dataclass(frozen=True)
class FileTask(TokensTask):
    """The documents of one file of another trainer, for any process. Picklable. See `TokensTask`.

    Parameters
    ----------
    target
        The name of the format.
    is_lone
        It is the whole result, and has to have documents.
    overwrite
        Replace existing files.
    """

    target: str = ""
    is_lone: bool = False
    overwrite: bool = False

    @property
    def writer(self) -> type[DocumentWriter]:
        return document_writer(self.target)

    @property
    def written(self) -> StoreMeta:
        """The tokens of the source, with the fields that the format keeps. The largest id bounds the vocabulary."""
        kept = format_named(self.target).holds_fields
        fields = tuple(field for field in self.source.fields if kept is None or field.name in kept)
        largest = self.source.max_token
        vocab_size = self.source.vocab_size or (0 if largest is None else largest + 1)
        return replace(super().meta, fields=fields, vocab_size=vocab_size)

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts of documents that the source has and the format keeps."""
        row = format_named(self.target)
        kept = {
            "ids": row.holds_ids and self.source.has_ids,
            "metadata": row.holds_metadata and self.source.has_metadata,
        }
        return tuple(name for name, is_kept in kept.items() if is_kept)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.writer.files(self.path, self.written))

    @property
    def meta(self) -> StoreMeta:
        """The ids in the file, which count as chunks of a stream."""
        itemsize = self.writer.dtype_of(self.written).itemsize
        return StoreMeta(1, DEFAULT_CHUNK_TOKENS, np.dtype(f"<u{itemsize}"), layout=STREAM_LAYOUT)


def write_file(task: FileTask, progress: OnProgress = no_progress) -> Finished:
    """Write the documents of one task to a file of its format, and those that belong to it."""
    try:
        return _write_file(task, progress)
    finally:
        task.note.unlink(missing_ok=True)


def _write_file(task: FileTask, progress: OnProgress) -> Finished:
    counts = TokenCounts()
    names = [field.name for field in task.written.fields]
    with task.writer(task.path, task.written, overwrite=task.overwrite, facts=task.facts) as writer:
        for encoded in read_documents(task, counts, progress):
            fields = {name: encoded.fields[name] for name in names} if encoded.fields else {}
            try:
                writer.write_documents(encoded.tokens, encoded.lengths, fields, facts_of(encoded))
            except ConvertError as error:
                raise refused(encoded, task.source, error) from error
        if task.is_lone:
            require_documents(task.source, counts)
        info = writer.finish()
    entry = ShardEntry.of(info, task.route.split)
    frame, _ = digests_of(task, entry, frame_only=True)
    return Finished(entry, info.max_token, frame, counts)


def write_trainer_files(plan: TokensPlan, settings: Settings, workers: Workers) -> Report:
    """Write the files of another trainer. Their bytes never depend on the workers."""
    start_s = time.monotonic()
    source = plan.source
    target = settings.target
    lost = _require_place(source, settings)
    if target.is_one_file:
        tasks, finished, kept = _write_one(plan, settings, workers)
    else:
        tasks, finished, kept = _write_folder(plan, settings, workers)
    counts = TokenCounts()
    for done in finished:
        counts.add(done.counts)
    if not source.has_documents:
        counts.documents = 0
    part = settings.work.shard_range
    max_token = max((done.max_token or 0 for done in finished), default=0)
    return Report(
        destination=target.path if part == WHOLE else partial_path(target.path),
        meta=tasks[0].meta,
        shards=[done.entry for done in finished],
        counts=counts,
        seconds=time.monotonic() - start_s,
        max_token=max_token,
        part=part,
        kept=kept,
        left_behind=lost,
        documents_kept=kept.tokens,
        encoder=source.encoder,
        dtype=tasks[0].writer.dtype_of(tasks[0].written).name,
        lacks_vocab_size=_would_be_smaller(tasks[0], max_token),
    )


def dry_run_of_files(plan: TokensPlan, settings: Settings, workers: Workers) -> FilesDryRun:
    """Return the files that a conversion would write, and the space that they need."""
    source = plan.source
    target = settings.target
    if not settings.work.force and (target.is_one_file or not settings.work.resume):
        refuse_existing(target.path)
    lost = _require_place(source, settings)
    tasks = _tasks(plan, settings, workers)
    itemsize = tasks[0].meta.dtype.itemsize
    folder = target.path.absolute().parent
    num_workers = min(workers.engine.workers, len(tasks))
    found = estimate_of(source, workers.num_threads, folder, workers=num_workers)
    num_bytes = found.num_tokens * itemsize
    inodes = sum(len(task.paths) for task in tasks) + (not target.is_one_file)
    free = free_room(folder)
    return FilesDryRun(
        path=str(target.path),
        num_tokens=found.num_tokens,
        dtype=tasks[0].writer.dtype_of(tasks[0].written).name,
        num_shards=len(tasks),
        largest_shard_bytes=round(found.num_tokens * plan.largest_share) * itemsize,
        total_bytes=num_bytes,
        inodes=inodes,
        left_behind=lost,
        workers=num_workers,
        free=free,
        lack=lack_of_room(folder, free, num_bytes - kept_of(settings), inodes),
        seconds=found.seconds,
        is_estimate=not found.is_exact,
    )


def _require_place(source: DocumentSource, settings: Settings) -> str:
    """Return the words for all that is left behind; `ConvertError` if the conversion does not allow it."""
    row = format_named(settings.target.format)
    lost = _left_behind(source, row)
    if lost and not settings.of(LossOptions).tokens_only:
        raise ConvertError(
            f"{source.paths[0]}: {row.noun} have no place for all of it: the conversion {lost}",
            remedy=Remedy.TOKENS_ONLY,
        )
    return lost


def _left_behind(source: DocumentSource, row: TrainerFormat) -> str:
    """Return the words for all that documents have and a format has no place for, or ""."""
    lost = []
    held = row.holds_fields
    names = [field.name for field in source.fields if held is not None and field.name not in held]
    if names:
        lost.append(f"the {'field' if len(names) == 1 else 'fields'} {', '.join(names)}")
    if source.has_ids and not row.holds_ids:
        lost.append("the ids of documents")
    if source.has_metadata and not row.holds_metadata:
        lost.append("the metadata of documents")
    if source.spans_codec:
        lost.append("the spans of documents")
    if source.left_out:
        lost.append(source.left_out)
    is_marked = source.boundary_token_id is not None
    if source.has_documents and not is_marked and (row.needs_boundary or not row.holds_documents):
        lost.append("the ends of documents, which no token marks")
    return f"leaves behind {' and '.join(lost)}" if lost else ""


def _would_be_smaller(task: FileTask, max_token: int) -> bool:
    """Return whether the size of a vocabulary, which is not known, would have made the ids smaller."""
    written = task.written
    if written.vocab_size or not task.source.has_documents:  # records have the vocabulary of their store
        return False
    known = replace(written, vocab_size=max_token + 1)
    return task.writer.dtype_of(known).itemsize < task.writer.dtype_of(written).itemsize


def _write_one(plan: TokensPlan, settings: Settings, workers: Workers) -> tuple[list[FileTask], list[Finished], Kept]:
    """Write one file in this process."""
    target = settings.target
    [task] = _tasks(plan, settings, workers)
    if not task.overwrite:
        task.note.unlink(missing_ok=True)  # of a run that was killed at its end
        refuse_result(target.path)
    _require_room(plan, [task], target.path.absolute().parent)
    workers.shown.begin("writing", task.amount, "B")
    done = write_file(task, workers.shown.advance)
    require_unchanged(plan.source.paths, plan.identity["files"])
    return [task], [done], NOTHING_KEPT


def _write_folder(
    plan: TokensPlan, settings: Settings, workers: Workers
) -> tuple[list[FileTask], list[Finished], Kept]:
    """Fill a folder, or the part of it that was asked for. Its journal goes when the folder gets its name."""
    target = settings.target
    work = settings.work
    tasks = _tasks(plan, settings, workers)
    mine = {number: tasks[number] for number in work.shard_range.shards(len(tasks))}
    if not mine:  # more jobs than files
        return tasks, [], NOTHING_KEPT
    first = tasks[0]
    names = names_of_files(first.writer, first.written)
    is_part = work.shard_range != WHOLE
    with PartialDirectory(target.path, overwrite=work.force, names=names, shared=is_part) as folder:
        _require_room(plan, tasks, folder.partial_path)
        how = {"target": target.format, WRITTEN_META: meta_to_json(first.written), FACTS_KEPT: list(first.facts)}
        done = plan.complete(folder, mine, write_file, how, work, workers, planned_files(tasks))
        if not is_part:
            files = written_files(folder.partial_path, done.finished)
            first.writer.complete_folder(folder.partial_path, files, first.written, first.facts)
    return tasks, done.finished, done.kept


def written_files(folder: Path, finished: Iterable[Finished]) -> list[WrittenShard]:
    """Return the files of a folder as the writer of their format takes them."""
    entries = [done.entry for done in finished]
    return [
        WrittenShard(folder / each.path, each.split, each.num_bytes, each.document_count, each.sha256)
        for each in entries
    ]


def _tasks(plan: TokensPlan, settings: Settings, workers: Workers) -> list[FileTask]:
    """Return the task of each file."""
    target = settings.target
    if not target.is_one_file:
        names = _shard_names(plan, target.format)
        folder = partial_path(target.path)
        return [_task(plan, number, folder / name, settings, workers) for number, name in enumerate(names)]
    if len(plan.routes) > 1:
        splits = dict.fromkeys(route.split for route in plan.routes)
        raise ArgumentError(
            f"{target.path}: is one file, and the source has the splits {', '.join(splits)}: name a folder"
        )
    return [_task(plan, 0, target.path, settings, workers)]


def _task(plan: TokensPlan, number: int, path: Path, settings: Settings, workers: Workers) -> FileTask:
    return FileTask(
        source=plan.source,
        route=plan.routes[number],
        path=path,
        num_threads=workers.num_threads,
        codec=NO_CODEC,
        target=settings.target.format,
        is_lone=settings.target.is_one_file,
        overwrite=settings.target.is_one_file and settings.work.force,
    )


def _shard_names(plan: TokensPlan, target: str) -> list[str]:
    """Return the name of the file of each shard: its split, and its number there."""
    suffix = document_writer(target).suffix
    totals = Counter(route.split for route in plan.routes)
    numbers = Counter[str]()
    names = []
    for route in plan.routes:
        names.append(f"{route.split}-{numbers[route.split]:05}-of-{totals[route.split]:05}{suffix}")
        numbers[route.split] += 1
    return names


def names_of_files(writer: type[DocumentWriter], written: StoreMeta) -> str:
    """Return a regular expression of the names of all files of a folder, and of those that a killed job has left.

    Files that may belong to the ids count, also those that this conversion does not write: it replaces the old folder.

    Parameters
    ----------
    writer
        The writer of the format.
    written
        The tokens and the fields that are written.
    """
    file = Path(f"x{writer.suffix}")
    endings = {path.name.partition(".")[2]: None for path in (*writer.files(file, written), *writer.beside(file))}
    files = rf"[\w-]+-\d{{5}}-of-\d{{5}}\.({'|'.join(map(escape, endings))})"
    return rf"({'|'.join([files, *map(escape, writer.folder_names)])})(\.partial|\.progress)?"


def _require_room(plan: TokensPlan, tasks: Sequence[FileTask], folder: Path) -> None:
    """Raise `ConvertError` unless the disk has space for the ids of all jobs, if their number is known."""
    num_tokens = plan.source.num_tokens
    if num_tokens is not None:
        num_files = sum(len(task.paths) for task in tasks)
        require_room(folder, num_tokens * tasks[0].meta.dtype.itemsize, num_files)
