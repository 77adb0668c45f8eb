"""One run for every conversion: resolve its options, open the source, open the engine, write the target, report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from zb_hdf5 import ArgumentError
from zb_hdf5.console import Progress
from zb_hdf5.converters.batch_plan import plan_of_batches
from zb_hdf5.converters.batch_source import NOTE, BatchSource
from zb_hdf5.converters.carried_sets import carried_sets
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.document_memory import DocumentMemory
from zb_hdf5.converters.document_plan import plan_of_documents
from zb_hdf5.converters.dry_run import dry_run
from zb_hdf5.converters.engines import (
    Engine,
    ProgressCalls,
    Workers,
    default_workers,
    end_unguarded_worker,
    open_engine,
)
from zb_hdf5.converters.packed_batches import PackedBatches
from zb_hdf5.converters.plan import Content, Plan, forget_received
from zb_hdf5.converters.record_source import RecordSource, documents_told
from zb_hdf5.converters.reports import DryRun, Report
from zb_hdf5.converters.resolution import left_out_of, refuse_replaced_sources, resolved
from zb_hdf5.converters.settings import Settings, Target
from zb_hdf5.converters.shuffle import scatter_path
from zb_hdf5.converters.writing import write
from zb_hdf5.files.listing import left_out_in_words
from zb_hdf5.files.publishing import partial_path, refuse_link
from zb_hdf5.formats.document_source import CompletedSource, DocumentSource
from zb_hdf5.formats.row_documents import DOCUMENTS_COLUMNS
from zb_hdf5.notes import note
from zb_hdf5.store.format_list import batch_format, document_targets

#: Less than this is written by one process: starting others takes longer.
SMALL_BYTES: Final = 256 << 20
#: Memory that makes a worker worth its while.
WORKER_BYTES: Final = 192 << 20
#: Modules that each worker needs.
PRELOAD: Final = (
    "zb_hdf5.converters.batch_target",
    "zb_hdf5.converters.source_records",
    "zb_hdf5.formats.h5_writer",
    "zb_hdf5.store.shards",
)
_Result = TypeVar("_Result")


def run(conversion: Conversion, shown: Progress | None = None) -> Report | None:
    """Convert; None in an MPI rank that has only served the first one. By default `conversion.progress` is called."""
    return _with_plan(conversion, shown or ProgressCalls(conversion.progress), _write)


def plan(conversion: Conversion) -> DryRun | None:
    """Return the shards that a conversion to batches would write, and the space that they need."""
    return _with_plan(conversion, ProgressCalls(), _described)


def _write(plan: Plan, settings: Settings, workers: Workers) -> Report:
    report = write(plan, settings, workers)
    left_behind = _joined(report.left_behind, plan.sets.left_behind)
    return replace(report, left_out=plan.left_out, left_behind=left_behind, field_sets=tuple(plan.sets.names))


def _described(plan: Plan, settings: Settings, workers: Workers) -> DryRun:
    found = dry_run(plan, settings, workers)
    left_behind = _joined(found.left_behind or "", plan.sets.left_behind) or found.left_behind
    return replace(found, left_behind=left_behind, field_sets=tuple(plan.sets.names) or None)


def _joined(*texts: str) -> str:
    return " and ".join(filter(None, texts))


def _with_plan(
    conversion: Conversion,
    shown: ProgressCalls | Progress,
    act: Callable[[Plan, Settings, Workers], _Result],
) -> _Result | None:
    """Resolve the options, plan the source, open the engine, and act; None in an MPI rank that has served others."""
    end_unguarded_worker()
    with ExitStack() as stack:
        stack.callback(forget_received)
        settings, open_source = resolved(conversion)
        executor = settings.work.executor
        # of MPI ranks only the first one needs the source
        plan = None if executor == "mpi" else _planned(stack, open_source(), settings)
        engine: Engine | None = settings.engine
        if engine is None:
            workers = 1 if plan is None else _workers_of(plan, settings)
            engine = stack.enter_context(open_engine(executor, workers, PRELOAD))
        if engine is None:
            return None
        plan = plan or _planned(stack, open_source(), settings)
        bound = settings.bound_bytes
        if bound is not None:
            _memory_of(plan, settings).require(bound, engine.workers_per_node)
        threads = settings.work.threads or max(1, default_workers() // engine.workers_per_node)
        return act(plan, settings, Workers(engine, threads, shown))


def _planned(stack: ExitStack, found: Any, settings: Settings) -> Plan:
    """Enter a source that keeps files while it is used, and plan its conversion."""
    opened = stack.enter_context(found) if hasattr(found, "__enter__") else found
    source: Content = opened
    if not isinstance(opened, BatchSource | DocumentSource | CompletedSource):
        source = cast(DocumentSource, CompletedSource(opened))
    target = settings.target
    if isinstance(source, BatchSource) and target.is_stream and _gives_documents(source, target):
        left = DOCUMENTS_COLUMNS if target.tokens_only else ()
        source = RecordSource(source, [field for field in source.meta.fields if field.name not in left])
    if isinstance(source, BatchSource) and target.is_stream:
        raise ArgumentError(f"{source.paths[0]}: expected documents for a stream, found batches")
    written = (target.path, partial_path(target.path), partial_path(scatter_path(target.path)))
    refuse_link(target.path)
    refuse_replaced_sources(source.paths, written, target.path)
    settings.require_dtype(source.meta.dtype if isinstance(source, BatchSource) else source.dtype, source.paths[0])
    if target.note:
        source = _with_note(source, target)
    left_out = left_out_of(settings, source.paths)  # before the result may lie beside its sources
    if left_out:
        note(f"{settings.paths[0]}: {left_out_in_words(left_out)}")
    if isinstance(source, BatchSource):
        plan = plan_of_batches(source, settings)
    else:
        plan = plan_of_documents(source, settings)
    sets = carried_sets(plan.source, settings)
    return replace(plan, sets=sets, inodes=plan.inodes + sets.inodes, left_out=left_out)


def _gives_documents(source: BatchSource, target: Target) -> bool:
    """Return whether batches become documents: each record one of another trainer, or those that a field tells."""
    return target.format in document_targets() or bool(documents_told(source))


def _with_note(source: Content, target: Target) -> Content:
    """Return a source whose description has the note of a conversion; `ArgumentError` if its target has no place."""
    row = batch_format(target.format)
    if row is not None and row.tokens_only and (not row.holds_batches or target.is_one_file):
        raise ArgumentError(f"{target.destination}: has no place for a note: write HDF5, or a folder of shards")
    noted = copy(source)
    noted.description = {**source.description, NOTE: target.note}
    if isinstance(noted, BatchSource) and noted.origin is not None:  # of a lone file, which a lone copy takes over
        noted.origin = {**noted.origin, "source": {**noted.origin.get("source", {}), NOTE: target.note}}
    return noted


def _workers_of(plan: Plan, settings: Settings) -> int:
    """Return the number of local processes that was asked for, or that a conversion is worth."""
    asked = settings.work.workers
    source: Content = plan.source
    if not isinstance(source, BatchSource):
        is_small = 0 < (source.num_tokens or 0) * source.dtype.itemsize < SMALL_BYTES
        wanted = 1 if is_small else default_workers()
        num_tasks = 1 if settings.target.is_one_file else max(len(source.groups), len(plan.tasks))
        most = max(1, min(asked or wanted, num_tasks))
    elif asked is not None or source.num_batches * source.meta.batch_bytes < SMALL_BYTES:
        most = asked or 1
    else:
        # records that are shuffled may be scattered first, by more processes than there are shards
        tasks = default_workers() if source.reorders else len(plan.tasks)
        most = max(1, min(default_workers(), tasks, settings.shuffle_bytes // WORKER_BYTES))
    bound = settings.bound_bytes
    if bound is None or asked is not None:
        return most
    return _memory_of(plan, settings).workers_within(bound, most)


def _memory_of(plan: Plan, settings: Settings) -> DocumentMemory:
    """Return the memory in which the documents of a conversion that may be bounded are read and packed."""
    source = plan.source
    return source.memory if isinstance(source, PackedBatches) else DocumentMemory.of_source(source, settings)
