"""One run for every conversion: open the source, open the engine, write the target, report."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

from zb_hdf5 import ArgumentError
from zb_hdf5.console import Progress
from zb_hdf5.converters.batch_source import NOTE, BatchSource
from zb_hdf5.converters.batch_target import dry_run, write_batches
from zb_hdf5.converters.conversion import DEFAULT_MEMORY_BYTES, OPTIONS, STREAM, Conversion
from zb_hdf5.converters.document_source import DocumentSource
from zb_hdf5.converters.engines import (
    ProgressCalls,
    Workers,
    default_workers,
    end_unguarded_worker,
    open_engine,
)
from zb_hdf5.converters.likeness import require_dtype_of_like, with_likeness
from zb_hdf5.converters.reports import Done, Report
from zb_hdf5.converters.shard_plan import cut_into_shards
from zb_hdf5.converters.sources import PACKED, WORK, kind_of, refuse_unused_options
from zb_hdf5.converters.stream_target import write_documents
from zb_hdf5.files.paths import any_path
from zb_hdf5.files.publishing import require_present
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import codec_named

#: Less than this is written by one process: starting others takes longer.
SMALL_BYTES: Final = 256 << 20
#: Memory that makes a worker worth its while.
WORKER_BYTES: Final = 192 << 20
#: Modules that each worker needs.
PRELOAD: Final = (
    "zb_hdf5.converters.shard_plan", "zb_hdf5.converters.npy_source", "zb_hdf5.formats.h5_writer",
    "zb_hdf5.store.shards",
)  # fmt: skip
P = ParamSpec("P")
_Result = TypeVar("_Result")


def run(conversion: Conversion, shown: Progress | None = None) -> Report | Done | None:
    """Convert; None in an MPI rank that has only served the first one. By default `conversion.progress` is called."""
    return _with_source(conversion, shown or ProgressCalls(conversion.progress), _write)


def plan(conversion: Conversion) -> dict[str, Any] | None:
    """Return JSON of the shards that a conversion to batches would write, and of the space that it needs."""
    return _with_source(conversion, ProgressCalls(), _describe)


def _write(source: BatchSource | DocumentSource, conversion: Conversion, workers: Workers) -> Report | Done:
    if isinstance(source, DocumentSource):
        return write_documents(source, conversion, workers)
    return write_batches(source, conversion, workers)


def _describe(source: BatchSource | DocumentSource, conversion: Conversion, workers: Workers) -> dict[str, Any]:
    if isinstance(source, DocumentSource):
        raise ArgumentError(f"{source.paths[0]}: rows of documents are known when their tokens are")
    return dry_run(source, conversion, workers)


def _with_source(
    conversion: Conversion, shown: ProgressCalls | Progress, act: Callable[..., _Result]
) -> _Result | None:
    """Open the source and the engine, fill in all defaults, and act; None in an MPI rank that has served others."""
    end_unguarded_worker()
    conversion, open_source = _prepared(conversion)
    with ExitStack() as stack:
        executor = conversion.executor or "local"
        # of MPI ranks only the first one needs the source
        source = None if executor == "mpi" else _entered(stack, open_source(), conversion)
        engine = conversion.engine
        if engine is None:
            asked = conversion.workers or (1 if source is None else _workers_of(source, conversion))
            if isinstance(source, DocumentSource):
                asked = max(1, min(asked, len(source.groups)))
            engine = stack.enter_context(open_engine(executor, asked, PRELOAD))
        if engine is None:
            return None
        threads = conversion.threads or max(1, default_workers() // engine.workers_per_node)
        source = source or _entered(stack, open_source(), conversion)
        return act(source, conversion, Workers(engine, threads, shown))


def _entered(stack: ExitStack, found: Any, conversion: Conversion) -> BatchSource | DocumentSource:
    """Enter a source that keeps files while it is used, and refuse one that its target does not take."""
    source = stack.enter_context(found) if hasattr(found, "__enter__") else found
    if isinstance(source, BatchSource):
        if conversion.is_stream:
            raise ArgumentError(f"{source.paths[0]}: expected documents for a stream, found batches")
        FORMATS[conversion.target].require(source.meta, conversion.destination)  # before any work
    dtype = source.meta.dtype if isinstance(source, BatchSource) else source.dtype
    require_dtype_of_like(conversion, dtype, source.paths[0])
    found = cast("BatchSource | DocumentSource", source)
    return found if conversion.note is None else _noted(found, conversion)


def _noted(source: BatchSource | DocumentSource, conversion: Conversion) -> BatchSource | DocumentSource:
    """Return a source whose description has the note of a conversion; `ArgumentError` if its target has no place."""
    row, destination = FORMATS.get(conversion.target), Path(conversion.destination)
    if row is not None and row.tokens_only and (not row.holds_batches or destination.suffix == row.suffix):
        raise ArgumentError(f"{destination}: has no place for a note: write HDF5, or a folder of shards")
    noted = copy(source)
    noted.description = {**source.description, NOTE: conversion.note}
    if isinstance(noted, BatchSource) and noted.origin is not None:  # of a lone file, which a lone copy takes over
        noted.origin = {**noted.origin, "source": {**noted.origin.get("source", {}), NOTE: conversion.note}}
    return noted


def _prepared(conversion: Conversion) -> tuple[Conversion, Callable[[], Any]]:
    """Return a conversion with the defaults of its source, and a function that opens the source."""
    if conversion.target not in (*FORMATS, STREAM):
        raise ArgumentError(f"target must be one of {', '.join((*FORMATS, STREAM))}, found {conversion.target!r}")
    conversion.require_possible()
    source, codec = conversion.source, conversion.codec and codec_named(conversion.codec)
    conversion = replace(conversion, destination=any_path(conversion.destination), codec=codec)
    if not isinstance(source, str | os.PathLike | Sequence):
        if not isinstance(source, BatchSource | DocumentSource) and not hasattr(source, "__enter__"):
            raise ArgumentError(f"source: expected a path, or an open source, found {source!r:.80}")
        defaults = PACKED if isinstance(source, DocumentSource) else {}
        return with_likeness(conversion, {**defaults, **WORK}).with_defaults(defaults), lambda: source
    paths = [any_path(each) for each in ([source] if isinstance(source, str | os.PathLike) else source)]
    if not paths:
        raise ArgumentError("source: expected one path or more, found none")
    for path in paths:
        require_present(path)
    name, kind = kind_of(paths[0], conversion)
    if len(paths) > 1 and not kind.several:
        raise ArgumentError(f"source: expected one {name} file or store, found {len(paths)}")
    refuse_unused_options(paths[0], kind, conversion)
    options = kind.options_of(conversion.target)
    conversion = with_likeness(conversion, options, kind.choices).with_defaults(options)
    conversion = replace(conversion, source_format=name)
    return conversion, lambda: kind.open(paths, conversion)


def _workers_of(source: BatchSource | DocumentSource, conversion: Conversion) -> int:
    """Return how many local processes a conversion is worth."""
    if isinstance(source, DocumentSource):
        return default_workers()
    if source.num_batches * source.meta.batch_bytes < SMALL_BYTES:
        return 1
    # records that are shuffled may be scattered first, by more processes than there are shards
    tasks = default_workers() if source.reorders else len(cut_into_shards(source, conversion))
    return max(1, min(default_workers(), tasks, (conversion.memory_bytes or DEFAULT_MEMORY_BYTES) // WORKER_BYTES))


def _runner(make: Callable[P, Conversion]) -> Callable[P, Any]:
    """Return a function with the parameters of `Conversion` that runs it."""

    def convert(*args: P.args, **kwargs: P.kwargs) -> Any:
        return run(make(*args, **kwargs))

    lines = [f"    {name}\n        {each.help}" for name, each in OPTIONS.items()]
    convert.__doc__ = f"{_INTRODUCTION}\n" + "\n".join(lines) + _REST
    convert.__signature__ = inspect.signature(make)  # type: ignore[attr-defined]
    return convert


_INTRODUCTION: Final = """Convert tokens or documents to another format, as `zb convert` does.

    Parameters
    ----------
    source, target, destination, source_format, progress, engine
        As for `Conversion`."""
_REST: Final = """

    Returns
    -------
    Report, Done or None
        The report; None in an MPI rank that has only served the first one.

    Raises
    ------
    ExistsError
        If the destination exists.
    ConvertError
        If the disk has no space for it, or the source cannot be converted as asked.
    ArgumentError
        If the arguments contradict each other.

    Examples
    --------
    >>> report = convert("tokens", "hdf5", "train-h5", batch_size=32, seq_len=512)  # doctest: +SKIP
    """
convert = _runner(Conversion)
