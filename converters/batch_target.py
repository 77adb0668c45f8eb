"""Batches to one file, a folder of shards, a live store or a bucket, from any source of batches.

There is no code per pair of formats. Shards are written in `<dst>.partial/`, each is recorded in a journal when it is
whole, and the folder gets its name when all of them are: a kill costs one shard per worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from zb_hdf5 import ConvertError, ShardIndex
from zb_hdf5.converters.batch_source import BatchSource, read_groups
from zb_hdf5.converters.conversion import WHOLE, ShardRange
from zb_hdf5.converters.engines import Engine, Workers
from zb_hdf5.converters.estimate import seconds_of_batches
from zb_hdf5.converters.journal import (
    NOTHING_KEPT,
    Finished,
    Journal,
    Kept,
    file_states,
    is_result,
    require_unchanged,
)
from zb_hdf5.converters.options import BoundOptions, LossOptions, Settings, ShuffleOptions
from zb_hdf5.converters.reports import UINT16_SAVES, DryRun, Report
from zb_hdf5.converters.shard_plan import (
    ShardPlan,
    ShardTask,
    cut_into_shards,
    free_room,
    kept_of,
    lack_of_room,
    require_one_split,
    require_room,
    write_shard,
)
from zb_hdf5.converters.shuffle import UNSHUFFLED, Shuffle, choose_shuffle, scattered
from zb_hdf5.converters.upload import require_new, upload_and_remove
from zb_hdf5.documents.document_table import check_documents
from zb_hdf5.documents.table_file import copy_table
from zb_hdf5.errors import ArgumentError, Remedy
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.publishing import PartialDirectory, partial_path, refuse_existing, refuse_result
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import INDEX_NAME, ORIGIN_ATTRIBUTES
from zb_hdf5.store.live import LiveStoreWriter
from zb_hdf5.store.rebuild import ONLY_IN_SOME_FILES

NOTHING_LEFT: Final = Shuffle("none", "nothing was left to do")


class Written(NamedTuple):
    """The shards of a conversion, or of its part; the way in which their records were read; and those kept."""

    shards: list[Finished]
    shuffle: Shuffle
    kept: Kept


def shard_plan_of(source: BatchSource, settings: Settings) -> ShardPlan:
    """Return the plan of a source as the target of a conversion stores it.

    Raises
    ------
    ArgumentError
        If the format of the target cannot hold such batches.
    ConvertError
        If it would lose fields or documents, or the batches cannot be cut into shards as asked.
    """
    target = settings.target
    row = FORMATS[target.format]
    if target.live and row.tokens_only:
        raise ArgumentError(f"{target.destination}: {target.format} files are never live")
    fitted = _fitted(source, settings)
    row.require(fitted.meta, target.path)
    if target.is_one_file:
        require_one_split(fitted, "name a folder of shards")
        cuts = [(0, fitted.num_batches)]
    else:
        cuts = cut_into_shards(fitted, target)
    lost = _left_behind(source, keeps_fields=not row.tokens_only, keeps_documents=not (row.tokens_only or target.live))
    if target.is_one_file and row.tokens_only:
        lost = " and ".join(filter(None, [lost, _nameless(fitted)]))
    return ShardPlan(fitted, target.format, cuts, file_states(fitted.paths), lost)


def write_batches(plan: ShardPlan, settings: Settings, workers: Workers) -> Report:
    """Write all batches of a plan, or the part of them that was asked for."""
    start_s = time.monotonic()
    source = plan.source
    target = settings.target
    if any(source.file_of(*cut)[1] is None for cut in plan.cuts):
        source.check_reads()  # damage is found by whole shards where they stay whole, else batch by batch
    if isinstance(target.destination, RemotePath):
        written = _write_and_upload(plan, target.destination, settings, workers)
    else:
        written = _write_here(plan, settings, workers)
    shards = [done.entry for done in written.shards]
    part = settings.work.shard_range
    if part == WHOLE:
        source.counts.require_balance(sum(shard.token_count for shard in shards))
    return Report(
        destination=target.destination if part == WHOLE else partial_path(target.path),
        meta=source.meta,
        shards=shards,
        counts=source.counts,
        seconds=time.monotonic() - start_s,
        shuffle=str(written.shuffle),
        max_token=max((done.max_token for done in written.shards if done.max_token is not None), default=None),
        part=part,
        kept=written.kept,
        left_behind=plan.left_behind,
        lacks_vocab_size=source.lacks_vocab_size,
    )


def dry_run(plan: ShardPlan, settings: Settings, workers: Workers) -> DryRun:
    """Return the shards that a conversion would write, and the space that they need."""
    target = settings.target
    if isinstance(target.destination, RemotePath):
        require_new(target.destination, target.path, settings.work)
    if not (settings.work.force or settings.work.resume):
        refuse_existing(target.path)
    source = plan.source
    meta = source.meta
    how = settings.of(ShuffleOptions)
    num_readers = 1 if target.is_one_file else workers.engine.workers_per_node
    shuffle = choose_shuffle(source, how.shuffle_method, plan.cuts, how.memory, num_readers)
    sizes = [plan.shard_bytes(shard) for shard in range(len(plan.cuts))]
    num_tokens = source.num_batches * meta.batch_tokens
    folder = target.path.absolute().parent
    free = free_room(folder)
    inodes = 1 if target.is_one_file else plan.num_inodes()
    num_workers = min(workers.engine.workers, len(plan.cuts))
    temp_bytes = shuffle.temp_bytes
    return DryRun(
        path=str(target.destination),
        num_batches=source.num_batches,
        batch_size=meta.batch_size,
        seq_len=meta.seq_len,
        dtype=meta.dtype.name,
        num_shards=len(plan.cuts),
        largest_shard_bytes=max(sizes),
        total_bytes=sum(sizes),
        uint16_would_save_bytes=num_tokens * UINT16_SAVES if source.lacks_vocab_size else 0,
        inodes=inodes,
        workers=num_workers,
        memory_bytes=settings.of(BoundOptions).memory or how.memory,
        shuffle=str(shuffle),
        temp_bytes=temp_bytes,
        free=free,
        lack=lack_of_room(folder, free, sum(sizes) + temp_bytes - kept_of(settings), inodes),
        seconds=seconds_of_batches(source, meta.codec, folder, workers=num_workers, temp_bytes=temp_bytes),
    )


def _fitted(source: BatchSource, settings: Settings) -> BatchSource:
    """Return a source as its target stores it: with its codec, and without fields and documents where it has none.

    `ConvertError` if a format of tokens only would lose them, and the conversion does not allow it.
    """
    row = FORMATS[settings.target.format]
    other = copy(source)
    fields = source.meta.fields
    if row.tokens_only:
        lost = _left_behind(source, keeps_fields=False, keeps_documents=False)
        if lost and not settings.of(LossOptions).tokens_only:
            raise ConvertError(
                f"{source.paths[0]}: {row.name} files hold tokens and nothing else: the conversion {lost}",
                remedy=Remedy.TOKENS_ONLY,
            )
        fields = ()
        other.has_pieces = False
        other.document_files = ()
        other.document_parts = ()
    other.meta = replace(source.meta, fields=fields, codec=settings.target.codec)
    return other


def _left_behind(source: BatchSource, *, keeps_fields: bool, keeps_documents: bool) -> str:
    """Return the words for all that a source has and a target cannot hold, or ""."""
    lost = []
    names = [field.name for field in source.meta.fields]
    if names and not keeps_fields:
        noun = "field" if len(names) == 1 else "fields"
        lost.append(f"the {noun} {', '.join(names)}")
    if source.has_pieces and not keeps_documents:
        lost.append("the places of documents in the records")
    if source.document_files and not keeps_documents:
        lost.append("the document table")
    return f"leaves behind {' and '.join(lost)}" if lost else ""


def _nameless(source: BatchSource) -> str:
    """Return the words for the facts about the tokens for which a lone file of tokens only has no place, or ""."""
    if not source.origin:
        return ""
    copies = set(source.origin.get("source") or {}) & set(ORIGIN_ATTRIBUTES)
    lost = [name for name in ONLY_IN_SOME_FILES if getattr(source.meta, name)]
    facts = [*source.origin, *sorted(copies), *lost]
    return f"does not name {', '.join(facts)}, as such a file has no place for it"


def _write_and_upload(plan: ShardPlan, place: RemotePath, settings: Settings, workers: Workers) -> Written:
    """Write a store on this machine, upload it, and remove it here. With `resume` both go on where they were."""
    work = settings.work
    staging = settings.target.path
    require_new(place, staging, work)
    here = replace(settings, work=replace(work, force=work.force and not work.resume))
    written = _write_here(plan, here, workers)
    upload_and_remove(staging, place, work, workers)
    return written


def _write_here(plan: ShardPlan, settings: Settings, workers: Workers) -> Written:
    """Write the files of a plan to this machine."""
    write: Callable[[ShardPlan, Settings, Workers], Written]
    if settings.target.live:
        write = _write_live
    elif settings.target.is_one_file:
        write = _write_file
    else:
        write = _write_folder
    return write(plan, settings, workers)


def _write_live(plan: ShardPlan, settings: Settings, workers: Workers) -> Written:
    """Write all batches in their order to a live HDF5 store, in this process: committed batches may be read at once.

    If the process ends early, the committed batches stay, and `zb repair` makes a store of them.
    """
    source = plan.source
    path = settings.target.path
    num_bytes = sum(plan.shard_bytes(shard) for shard in range(len(plan.cuts)))
    require_room(path.absolute().parent, num_bytes, plan.num_inodes())
    source.check_reads()
    workers.shown.begin("writing", source.num_batches * source.meta.batch_tokens)
    with LiveStoreWriter(
        path,
        source.meta,
        shard_batches=max(stop - start for start, stop in plan.cuts),
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
    return Written([Finished(entry, info.max_token) for entry in writer.index.shards], shuffle, NOTHING_KEPT)


def _write_file(plan: ShardPlan, settings: Settings, workers: Workers) -> Written:
    """Write the one file of a plan in this process."""
    source = plan.source
    [cut] = plan.cuts
    path = settings.target.path
    overwrite = settings.work.force
    if not overwrite:
        refuse_result(path)
    how = settings.of(ShuffleOptions)
    shuffle = choose_shuffle(source, how.shuffle_method, [cut], how.memory, workers=1)
    require_room(path.parent, plan.shard_bytes(0) + shuffle.temp_bytes, 1)
    with scattered(source, shuffle, path, workers._replace(engine=Engine())) as readable:
        workers.shown.begin("writing", source.num_batches * source.meta.batch_tokens)
        start, stop = cut
        task = ShardTask(
            source=readable,
            target=plan.target,
            path=path,
            start=start,
            stop=stop,
            meta=source.meta,
            in_store=False,
            split=plan.shards[0].split,
            overwrite=overwrite,
            files=plan.files,
        )
        done = write_shard(task, workers.shown.advance)
    return Written([done], shuffle, NOTHING_KEPT)


def _write_folder(plan: ShardPlan, settings: Settings, workers: Workers) -> Written:
    """Fill the `.partial/` of a destination, and publish it if it is the whole."""
    work = settings.work
    destination = settings.target.path
    shards = work.shard_range.shards(len(plan.cuts))
    if not shards:  # more jobs than shards
        return Written([], NOTHING_LEFT, NOTHING_KEPT)
    if work.resume and not work.force and destination.exists():
        finished = _require_result(plan, destination)
        return Written(finished, NOTHING_LEFT, Kept.of(finished, 0.0))
    with PartialDirectory(destination, overwrite=work.force, shared=work.shard_range != WHOLE) as folder:
        tasks = {shard: plan.task(shard, folder.partial_path) for shard in shards}
        journal = Journal(folder, plan.head(), tasks, work, workers)
        with journal.kept_for_resume():
            finished, shuffle = _write_missing(plan, journal, folder.partial_path, settings, workers)
            _add_tables(folder.partial_path, plan, work.shard_range, finished)
        return Written(finished, shuffle, journal.kept)


def _write_missing(
    plan: ShardPlan, journal: Journal, folder: Path, settings: Settings, workers: Workers
) -> tuple[list[Finished], Shuffle]:
    """Write the shards that are left to do, and return all of them, and how their records were read."""
    missing = journal.missing
    shuffle = NOTHING_LEFT
    if missing:
        how = settings.of(ShuffleOptions)
        cuts = [plan.cuts[shard] for shard in missing]
        shuffle = choose_shuffle(plan.source, how.shuffle_method, cuts, how.memory, workers.engine.workers_per_node)
    num_bytes = sum(plan.shard_bytes(shard) for shard in missing)
    require_room(folder, num_bytes + shuffle.temp_bytes, plan.num_inodes())
    first = settings.work.shard_range.shards(len(plan.cuts))[0]
    with scattered(plan.source, shuffle, folder / plan.name(first), workers) as source:
        workers.shown.begin("writing", source.num_batches * source.meta.batch_tokens)
        workers.shown.keep(journal.kept.tokens)
        tasks = {shard: replace(task, source=source) for shard, task in missing.items()}
        finished = journal.run(write_shard, tasks)
    require_unchanged(plan.source.paths, plan.files)
    return finished, shuffle


def _require_result(plan: ShardPlan, destination: Path) -> list[Finished]:
    """Accept an existing destination as the result of the same conversion, or refuse it."""
    source = plan.source
    if (destination / INDEX_NAME).exists():
        index = ShardIndex.load(destination).without_max_token()  # it follows from the rest
        shards = [(plan.name(shard), stop - start) for shard, (start, stop) in enumerate(plan.cuts)]
        digests = [source.file_of(*cut)[1] for cut in plan.cuts]
        same = (
            (index.meta, index.shuffle, index.source) == (source.meta, source.shuffle, source.description)
            and [(entry.path, entry.num_batches) for entry in index.shards] == shards
            and [known and entry.sha256 for known, entry in zip(digests, index.shards, strict=True)] == digests
        )
        if is_result(destination, same, map(Path, plan.files)):
            return [Finished(entry, None) for entry in index.shards]
    raise ConvertError(f"{destination}: exists already and is not the result of this conversion", remedy=Remedy.REPLACE)


def _add_tables(folder: Path, plan: ShardPlan, part: ShardRange, finished: list[Finished]) -> None:
    """Copy the document tables to the folder of the first shard, and write the `shards.json` of a whole store."""
    source = plan.source
    row = FORMATS[plan.target]
    if 0 in part.shards(len(plan.cuts)) and not row.tokens_only:
        for path, table in zip(source.document_files, source.document_parts, strict=True):
            copy_table(path, folder / table.path)
            check_documents(folder / table.path, table)
    if part == WHOLE and row.holds_batches:
        index = ShardIndex(
            source.meta,
            tuple(done.entry for done in finished),
            source.shuffle,
            source.description,
            documents=source.document_parts,
        )
        index.with_max_token(done.max_token for done in finished).save(folder)
