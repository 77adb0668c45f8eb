"""The writing of a plan: one file, a folder of shards, a live store or a bucket; or rows of documents, in two steps.

There is no code per pair of formats. Files are written in `<dst>.partial/`, each is recorded in a journal when it is
whole, and the folder gets its name when all of them are: a kill costs one file per worker.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from zb_hdf5 import ConvertError, ShardIndex, StoreMeta
from zb_hdf5.converters.batch_plan import plan_of_batches, require_place_of_rows
from zb_hdf5.converters.batch_source import BatchSource, TokenCounts, read_groups, require_pad_id
from zb_hdf5.converters.batch_target import SHARDS
from zb_hdf5.converters.carried_sets import bind_sets
from zb_hdf5.converters.conversion import WHOLE, LayoutOptions, WorkOptions
from zb_hdf5.converters.disk_room import require_room
from zb_hdf5.converters.engines import Engine, Workers
from zb_hdf5.converters.journal import (
    NOTHING_KEPT,
    Finished,
    Journal,
    KeptShards,
    how_to_go_on,
    is_result,
    refuse_interrupted,
    require_unchanged,
)
from zb_hdf5.converters.packed_batches import PackedBatches
from zb_hdf5.converters.plan import BatchRange, Plan, SentOnce, Task, write_sent, write_task
from zb_hdf5.converters.reports import Done, Report
from zb_hdf5.converters.routes import require_documents
from zb_hdf5.converters.settings import Settings
from zb_hdf5.converters.shuffle import UNSHUFFLED, Shuffle, choose_shuffle, scattered
from zb_hdf5.converters.stream_target import WORK_DIGEST
from zb_hdf5.converters.upload import require_new, upload_and_remove
from zb_hdf5.errors import Remedy, ZbError
from zb_hdf5.files.paths import RemotePath, on_failure
from zb_hdf5.files.publishing import LockedFolder, PartialDirectory, partial_path, refuse_existing, refuse_result
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.spec import INDEX_NAME, SETS_FOLDER
from zb_hdf5.store.live import LiveStoreWriter
from zb_hdf5.store.set_place import refuse_lost_sets, replaceable_names, sets_folders, sets_in, sets_of

NOTHING_LEFT: Final = Shuffle("none", "nothing was left to do")


class Written(NamedTuple):
    """The files of a conversion, or of its part.

    Attributes
    ----------
    finished
        All files.
    shuffle
        The way in which their records were read.
    kept, tokens_kept
        The part that an earlier run had written, and the tokens of the documents in it.
    meta
        The shape in the index of a whole store; None: none was made.
    """

    finished: list[Finished]
    shuffle: Shuffle = UNSHUFFLED
    kept: KeptShards = NOTHING_KEPT
    tokens_kept: int = 0
    meta: StoreMeta | None = None


def write(plan: Plan, settings: Settings, workers: Workers) -> Report:
    """Write the files of a plan, or the part of them that was asked for. Their bytes never depend on the workers."""
    start_s = time.monotonic()
    target = settings.target
    source = plan.source
    if isinstance(source, BatchSource):
        _check_batches(plan, source)
    elif _is_made(plan, target.path, settings.work):
        _remove_staged(target.path)
        return Done.of(target.path)
    if not isinstance(source, BatchSource) and not target.is_stream:
        report = _write_rows(plan, source, settings, workers)
    elif isinstance(target.destination, RemotePath):
        report = _write_and_upload(plan, target.destination, settings, workers)
    else:
        report = _report(plan, _write_here(plan, settings, workers), settings)
    return replace(report, seconds=time.monotonic() - start_s)


def _check_batches(plan: Plan, source: BatchSource) -> None:
    """Compare whole shards where they stay whole, else each batch."""
    parts = [cast(BatchRange, task.part) for task in plan.tasks]
    if any(source.file_of(part.start, part.stop)[1] is None for part in parts):
        source.check_reads()


def _write_and_upload(plan: Plan, place: RemotePath, settings: Settings, workers: Workers) -> Report:
    """Write a store on this machine, upload it, and remove it here. With `resume` both go on where they were."""
    work = settings.work
    staging = settings.target.path
    require_new(place, staging, work)
    here = replace(settings, work=replace(work, force=work.force and not work.resume))
    report = _report(plan, _write_here(plan, here, workers), settings)
    upload_and_remove(staging, place, work, workers)
    return report


def _write_here(plan: Plan, settings: Settings, workers: Workers) -> Written:
    """Write the files of a plan to this machine."""
    if settings.target.live:
        return _write_live(plan, settings, workers)
    if settings.target.is_one_file:
        return _write_one(plan, settings, workers)
    return _write_folder(plan, settings, workers)


def _write_live(plan: Plan, settings: Settings, workers: Workers) -> Written:
    """Write all batches in their order to a live HDF5 store, in this process: committed batches may be read at once.

    If the process ends early, the committed batches stay, and `zb repair` makes a store of them.
    """
    source: BatchSource = plan.source
    path = settings.target.path
    require_room(path.absolute().parent, sum(task.num_bytes for task in plan.tasks), plan.inodes)
    source.check_reads()
    workers.shown.begin("writing", source.num_batches * source.meta.batch_tokens)
    parts = [cast(BatchRange, task.part) for task in plan.tasks]
    with LiveStoreWriter(
        path,
        source.meta,
        shard_batches=max(part.stop - part.start for part in parts),
        shuffle=source.shuffle,
        source=source.description,
    ) as writer:
        for group in read_groups(source, 0, source.num_batches):
            writer.write(group.tokens, group.fields)
            workers.shown.advance(group.tokens.size)
        info = writer.finish()
    shuffle = UNSHUFFLED
    if source.reorders:
        shuffle = Shuffle("direct", "one process gathers the records of a live store")
    return Written([Finished(entry, info.max_token) for entry in writer.index.shards], shuffle)


def _write_one(plan: Plan, settings: Settings, workers: Workers) -> Written:
    """Write the one file of a plan in this process."""
    path = settings.target.path
    overwrite = settings.work.force
    if not overwrite:
        refuse_result(path)
    if overwrite or plan.sets.sets:
        refuse_lost_sets(path, sets_of(path), settings.work.drop_field_set)
    task = plan.lone_task(path, overwrite, workers.num_threads)
    here = workers._replace(engine=Engine())
    with _sets_of_file(plan, path, workers), _readable(plan, [task], path, settings, here) as (source, shuffle):
        done = write_task(replace(task, source=source), workers.shown.advance)
    return Written([done], shuffle)


@contextmanager
def _sets_of_file(plan: Plan, path: Path, workers: Workers) -> Generator[None]:
    """Copy the field sets of a lone file, which is written meanwhile, and give them their place beside it."""
    [place] = sets_folders(path)
    made = partial_path(place)
    is_taken = path.exists() or bool(plan.sets.sets)  # a file that is gone may have left its sets
    with on_failure(lambda: shutil.rmtree(made, ignore_errors=True)):
        plan.sets.copy_to(made, WHOLE, workers.shown)
        yield
        plan.sets.remove_others(made)
        bind_sets(made, path)
    if is_taken and place.exists():
        shutil.rmtree(place)
    if plan.sets.sets:
        os.replace(made, place)


def _write_folder(plan: Plan, settings: Settings, workers: Workers) -> Written:
    """Fill the `.partial/` of a destination, and publish it if it is the whole."""
    work = settings.work
    destination = settings.target.path
    if not work.shard_range.shards(len(plan.tasks)):  # more jobs than files
        return Written([], NOTHING_LEFT)
    if isinstance(plan.source, BatchSource) and work.resume and not work.force and destination.exists():
        finished = _require_result(plan, destination)
        return Written(finished, NOTHING_LEFT, KeptShards.of(finished, 0.0))
    is_part = work.shard_range != WHOLE
    brings_sets = bool(plan.sets.sets)
    names = replaceable_names(destination, plan.target.names, work.drop_field_set, brings_sets=brings_sets)
    with PartialDirectory(destination, overwrite=work.force, shared=is_part, names=names) as folder:
        written = _fill(folder, plan, settings, workers)
        folder.keep()  # a set that was made meanwhile is not removed: with its name the next run goes on
        refuse_lost_sets(destination, sets_in(destination / SETS_FOLDER), work.drop_field_set)
        return written


def _fill(folder: LockedFolder, plan: Plan, settings: Settings, workers: Workers) -> Written:
    """Write the files that no earlier run has finished, note each in a journal, and complete a whole folder."""
    work = settings.work
    place = folder.partial_path
    numbers = work.shard_range.shards(len(plan.tasks))
    tasks = plan.tasks_in(place, numbers, workers.num_threads)
    journal = Journal(folder, plan.head(), tasks, work, workers)
    kept = dict(journal.finished)
    meta = None
    with journal.resumable():
        missing = journal.missing
        with _readable(plan, [*missing.values()], tasks[numbers[0]].path, settings, workers) as (source, shuffle):
            workers.shown.keep(sum(tasks[number].amount for number in kept))
            sent = SentOnce(source)
            tasks_left = {number: replace(task, source=sent) for number, task in missing.items()}
            finished = journal.run(write_sent, tasks_left)
        plan.sets.copy_to(place / SETS_FOLDER, work.shard_range, workers.shown)
        require_unchanged(plan.source.paths, plan.files)
        if not isinstance(plan.source, BatchSource):
            _require_documents(plan.source, finished, is_whole=work.shard_range == WHOLE)
        if 0 in numbers:
            plan.target.add_tables(place, plan.source)
        if work.shard_range == WHOLE:
            index = plan.target.index(place, plan.facts, finished)
            plan.target.complete(place, index)
            plan.sets.remove_others(place / SETS_FOLDER)
            bind_sets(place / SETS_FOLDER, place)
            meta = index.meta if plan.target.is_store else None
    tokens_kept = sum(done.counts.tokens_in for done in kept.values())
    return Written(finished, shuffle, journal.kept, tokens_kept, meta)


@contextmanager
def _readable(
    plan: Plan, tasks: Sequence[Task], path: Path, settings: Settings, workers: Workers
) -> Generator[tuple[Any, Shuffle]]:
    """Yield the source for some tasks, whose records may be shuffled beside a path first, and how they are read."""
    source = plan.source
    num_bytes = sum(task.num_bytes for task in tasks)
    folder = path.absolute().parent
    if not isinstance(source, BatchSource):
        require_room(folder, num_bytes, plan.inodes)
        workers.shown.begin("tokenizing" if source.tokenizer else "cutting", _total(plan, settings), "B")
        yield source, UNSHUFFLED
        return
    shuffle = NOTHING_LEFT
    if tasks:
        method = settings.work.shuffle_method
        cuts = [(part.start, part.stop) for part in (cast(BatchRange, task.part) for task in tasks)]
        shuffle = choose_shuffle(source, method, cuts, settings.shuffle_bytes, workers.engine.workers_per_node)
    of_sets = plan.sets.bytes_left(path.parent / SETS_FOLDER, settings.work.shard_range)
    require_room(folder, num_bytes + of_sets + shuffle.temp_bytes, plan.inodes, of_sets)
    with scattered(source, shuffle, path, workers) as readable:
        workers.shown.begin("writing", source.num_batches * source.meta.batch_tokens)
        yield readable, shuffle


def _total(plan: Plan, settings: Settings) -> int:
    """Return the bytes of the documents of this job."""
    numbers = settings.work.shard_range.shards(len(plan.tasks))
    return sum(plan.tasks[number].amount for number in numbers)


def _require_documents(source: DocumentSource, finished: Sequence[Finished], *, is_whole: bool) -> None:
    """Raise `ConvertError` if a source has no documents, or if most of its rows were none. A part may have none."""
    counts = _counts_of(finished)
    if is_whole:
        require_documents(source, counts)
    else:
        counts.documents_dropped.require_few(counts.documents, source.max_dropped, source.paths[0])


def _counts_of(finished: Sequence[Finished]) -> TokenCounts:
    """Return the counts of the documents of some files."""
    counts = TokenCounts()
    for done in finished:
        counts.add(done.counts)
    return counts


def _report(plan: Plan, written: Written, settings: Settings) -> Report:
    """Return the report of the files of this job."""
    source = plan.source
    target = settings.target
    part = settings.work.shard_range
    shards = [done.entry for done in written.finished]
    max_token = max((done.max_token for done in written.finished if done.max_token is not None), default=None)
    found = Report(
        destination=target.destination if part == WHOLE else partial_path(target.path),
        meta=written.meta or plan.tasks[0].meta,
        shards=shards,
        counts=source.counts if isinstance(source, BatchSource) else _counts_of(written.finished),
        seconds=0.0,
        max_token=max_token,
        part=part,
        kept=written.kept,
        left_behind=plan.left_behind,
        lacks_vocab_size=plan.lacks_vocab_size and plan.target.would_be_smaller(max_token or 0),
        documents_kept=written.tokens_kept,
        dtype=plan.target.dtype,
    )
    if isinstance(source, BatchSource):
        if part == WHOLE:
            source.counts.require_balance(found.tokens_stored)
        return replace(found, meta=source.meta, shuffle=str(written.shuffle))
    if not source.has_documents:
        found.counts.documents = 0
    return replace(found, encoder=source.encoder)


def _require_result(plan: Plan, destination: Path) -> list[Finished]:
    """Accept an existing destination as the result of the same conversion, or refuse it."""
    source: BatchSource = plan.source
    if (destination / INDEX_NAME).exists():
        index = ShardIndex.load(destination).without_max_token()  # it follows from the rest
        parts = [cast(BatchRange, task.part) for task in plan.tasks]
        shards = [(task.path.name, part.stop - part.start) for task, part in zip(plan.tasks, parts, strict=True)]
        digests = [source.file_of(part.start, part.stop)[1] for part in parts]
        same = (
            (index.meta, index.shuffle, index.source) == (source.meta, source.shuffle, source.description)
            and [(entry.path, entry.num_batches) for entry in index.shards] == shards
            and [known and entry.sha256 for known, entry in zip(digests, index.shards, strict=True)] == digests
        )
        if is_result(destination, same, map(Path, plan.files)):
            return [Finished(entry, None) for entry in index.shards]
    raise ConvertError(f"{destination}: exists already and is not the result of this conversion", remedy=Remedy.REPLACE)


def _is_made(plan: Plan, store: Path, work: WorkOptions) -> bool:
    """Return whether `resume` finds a store that was made of these documents as they are now, and in the same way."""
    if not work.resume or work.force or not store.is_dir():
        return False
    try:
        made = ShardIndex.load(store).source.get(WORK_DIGEST)
    except (OSError, ZbError):
        return False
    return is_result(store, made is not None and made == plan.description.get(WORK_DIGEST), plan.source.paths)


# --- rows of documents -------------------------------------------------------------------------------------------


def _staging(destination: Path) -> Path:
    """Return the path of the streams that become rows: as much disk again as the store."""
    return destination.with_name(destination.name + ".tokens")


def _remove_staged(destination: Path) -> None:
    """Remove the streams that a dead process has left."""
    staging = _staging(destination)
    if partial_path(staging).exists():
        with LockedFolder(staging):
            pass


def _write_rows(plan: Plan, source: DocumentSource, settings: Settings, workers: Workers) -> Report:
    """Pack and shuffle documents, whose tokens are staged meanwhile."""
    destination = settings.target.path
    work = settings.work
    options = settings.layout.of_records(source.record_tokens, source.paths[0])
    require_place_of_rows(source, settings.target)  # now, and not after hours of tokenizing
    require_pad_id_of(source, options)
    if not work.force:
        refuse_existing(destination)
        if not work.resume:
            refuse_interrupted(partial_path(destination), SHARDS)
    with LockedFolder(_staging(destination)) as folder:
        staged = _report(plan, _fill(folder, plan, settings, workers), settings)
        try:
            rows = PackedBatches(
                folder.partial_path,
                folder.partial_path,
                options,
                settings.target,
                description=_described(plan, settings),
                paths=source.paths,
                counts=staged.counts,
            )
            report = write(plan_of_batches(rows, settings), settings, workers)
        except BaseException as error:
            error.add_note(f"the tokens are kept in {folder.partial_path}: {how_to_go_on(work.force)}")
            raise
    return replace(
        report,
        packing=options.packing,
        documents_kept=staged.documents_kept,
        encoder=staged.encoder,
        lacks_vocab_size=staged.lacks_vocab_size,
    )


def require_pad_id_of(source: DocumentSource, options: LayoutOptions) -> None:
    """Raise `ArgumentError` if the tokens of a source cannot have that of the padding beside them."""
    pad_id = options.pad_id
    if pad_id is None:
        pad_id = source.boundary_token_id or 0
    meta = StoreMeta(options.batch_rows, options.row_tokens, source.dtype, vocab_size=source.vocab_size)
    require_pad_id(pad_id, meta)


def _described(plan: Plan, settings: Settings) -> dict[str, Any]:
    """Return the `source` entry of a store of rows."""
    val_fraction = settings.layout.val_fraction
    if not val_fraction:
        return plan.description
    return {**plan.description, "val_fraction": val_fraction, "val_seed": settings.layout.seed}
