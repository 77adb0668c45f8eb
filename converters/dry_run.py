"""The dry run of a plan: the files that a conversion would write, and the space and time that they need."""

from __future__ import annotations

from typing import Any, cast

from zb_hdf5 import StoreMeta
from zb_hdf5.converters.batch_plan import number_of_shards, require_place_of_rows
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.disk_room import free_room, kept_of, lack_of_room
from zb_hdf5.converters.document_plan import FILES_OF_SHARD, FILES_OF_STREAMS
from zb_hdf5.converters.engines import Workers
from zb_hdf5.converters.estimate import estimate_of, seconds_of_batches
from zb_hdf5.converters.plan import BatchRange, Plan
from zb_hdf5.converters.reports import UINT16_SAVES, DryRun
from zb_hdf5.converters.routes import ShardDocuments
from zb_hdf5.converters.settings import Settings
from zb_hdf5.converters.shuffle import choose_shuffle
from zb_hdf5.converters.upload import require_new
from zb_hdf5.converters.writing import require_pad_id_of
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.publishing import refuse_existing
from zb_hdf5.formats.document_source import DocumentSource


def dry_run(plan: Plan, settings: Settings, workers: Workers) -> DryRun:
    """Return the files that a conversion would write, and the space that they need."""
    target = settings.target
    work = settings.work
    if isinstance(target.destination, RemotePath):
        require_new(target.destination, target.path, work)
    if not work.force and (target.is_one_file or not work.resume):
        refuse_existing(target.path)
    if isinstance(plan.source, BatchSource):
        return _of_batches(plan, plan.source, settings, workers)
    return _of_documents(plan, plan.source, settings, workers)


def _of_batches(plan: Plan, source: BatchSource, settings: Settings, workers: Workers) -> DryRun:
    target = settings.target
    meta = source.meta
    memory = settings.shuffle_bytes
    num_readers = 1 if target.is_one_file else workers.engine.workers_per_node
    cuts = [(part.start, part.stop) for part in (cast(BatchRange, task.part) for task in plan.tasks)]
    shuffle = choose_shuffle(source, settings.work.shuffle_method, cuts, memory, num_readers)
    sizes = [task.num_bytes for task in plan.tasks]
    num_bytes = sum(sizes) + plan.sets.num_bytes
    folder = target.path.absolute().parent
    free = free_room(folder)
    num_workers = min(workers.engine.workers, len(cuts))
    temp_bytes = shuffle.temp_bytes
    num_tokens = source.num_batches * meta.batch_tokens
    return DryRun(
        path=str(target.destination),
        num_batches=source.num_batches,
        batch_size=meta.batch_size,
        seq_len=meta.seq_len,
        dtype=meta.dtype.name,
        num_shards=len(cuts),
        largest_shard_bytes=max(sizes),
        total_bytes=num_bytes,
        uint16_would_save_bytes=num_tokens * UINT16_SAVES if source.lacks_vocab_size else 0,
        inodes=plan.inodes,
        workers=num_workers,
        memory_bytes=settings.bound_bytes or memory,
        shuffle=str(shuffle),
        temp_bytes=temp_bytes,
        free=free,
        lack=lack_of_room(folder, free, num_bytes + temp_bytes - kept_of(settings), plan.inodes, plan.sets.num_bytes),
        seconds=seconds_of_batches(source, meta.codec, folder, workers=num_workers, temp_bytes=temp_bytes),
    )


def _of_documents(plan: Plan, source: DocumentSource, settings: Settings, workers: Workers) -> DryRun:
    target = settings.target
    folder = target.path.absolute().parent
    num_workers = min(workers.engine.workers, len(plan.tasks))
    is_staged = not target.is_stream
    found = estimate_of(source, workers.num_threads, folder, workers=num_workers, is_staged=is_staged)
    num_bytes = found.num_tokens * plan.tasks[0].meta.dtype.itemsize
    files: dict[str, Any] = {
        "num_shards": len(plan.tasks),
        "largest_shard_bytes": round(num_bytes * _largest_share(plan)),
        "inodes": plan.inodes,
    }
    if is_staged:
        files = _rows(source, num_bytes, settings)
    free = free_room(folder)
    temp_bytes = num_bytes if is_staged else 0
    return DryRun(
        path=str(target.destination),
        num_tokens=found.num_tokens,
        dtype=plan.target.dtype or source.dtype.name,
        total_bytes=num_bytes,
        left_behind=plan.left_behind,
        workers=num_workers,
        free=free,
        lack=lack_of_room(folder, free, num_bytes + temp_bytes - kept_of(settings), files["inodes"]),
        seconds=found.seconds,
        is_estimate=not found.is_exact,
        temp_bytes=temp_bytes,
        **files,
    )


def _largest_share(plan: Plan) -> float:
    """Return the share of the largest file, of the bytes of all."""
    taken = [cast(ShardDocuments, task.part).bytes_taken for task in plan.tasks]
    return max(taken) / max(1, sum(taken))


def _rows(source: DocumentSource, num_bytes: int, settings: Settings) -> dict[str, Any]:
    """Return the facts of the store of rows that documents become."""
    target = settings.target
    options = settings.layout.of_records(source.record_tokens, source.paths[0])
    require_place_of_rows(source, target)
    require_pad_id_of(source, options)
    meta = StoreMeta(options.batch_rows, options.row_tokens, source.dtype)
    count = number_of_shards(max(1, num_bytes // meta.batch_bytes), meta, target)
    return {
        "num_shards": count,
        "largest_shard_bytes": -(-num_bytes // count),
        "inodes": 1 if target.is_one_file else FILES_OF_SHARD * count + FILES_OF_STREAMS,
        "rows": f"of {meta.seq_len:,} tokens in batches of {meta.batch_size:,}, by {options.packing} packing",
    }
