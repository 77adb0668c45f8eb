"""One run for every conversion: resolve its options, open the source, open the engine, write the target, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any, Final, Literal, Never, TypeAlias, TypeVar

from zb_hdf5 import ArgumentError
from zb_hdf5.console import Progress
from zb_hdf5.converters.batch_source import NOTE, BatchSource
from zb_hdf5.converters.batch_target import dry_run, shard_plan_of, write_batches
from zb_hdf5.converters.conversion import Conversion, refuse_unknown
from zb_hdf5.converters.document_target import dry_run_of_files, write_trainer_files
from zb_hdf5.converters.engines import (
    Engine,
    ProgressCalls,
    Workers,
    default_workers,
    end_unguarded_worker,
    open_engine,
)
from zb_hdf5.converters.options import Settings, ShuffleOptions, Target, TextOptions
from zb_hdf5.converters.record_source import RecordSource
from zb_hdf5.converters.reports import DryRun, FilesDryRun, Report
from zb_hdf5.converters.settings import refuse_replaced_sources, resolved
from zb_hdf5.converters.shard_plan import ShardPlan
from zb_hdf5.converters.shuffle import scatter_path
from zb_hdf5.converters.stream_target import TokensPlan, tokens_plan, write_documents
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.formats.document_source import CompletedSource, DocumentSource
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.trainers.trainer_formats import document_targets

#: Less than this is written by one process: starting others takes longer.
SMALL_BYTES: Final = 256 << 20
#: Memory that makes a worker worth its while.
WORKER_BYTES: Final = 192 << 20
#: Modules that each worker needs.
PRELOAD: Final = (
    "zb_hdf5.converters.shard_plan",
    "zb_hdf5.converters.foreign_source",
    "zb_hdf5.converters.npy_source",
    "zb_hdf5.formats.h5_writer",
    "zb_hdf5.store.shards",
)
#: A source, and the plan of its conversion.
Plan: TypeAlias = ShardPlan | TokensPlan
_Result = TypeVar("_Result")


def run(conversion: Conversion, shown: Progress | None = None) -> Report | None:
    """Convert; None in an MPI rank that has only served the first one. By default `conversion.progress` is called."""
    return _with_plan(conversion, shown or ProgressCalls(conversion.progress), _write)


def plan(conversion: Conversion) -> DryRun | FilesDryRun | None:
    """Return the shards that a conversion to batches would write, and the space that they need."""
    return _with_plan(conversion, ProgressCalls(), _describe)


def _write(plan: Plan, settings: Settings, workers: Workers) -> Report:
    if isinstance(plan, TokensPlan):
        is_of_trainer = settings.target.format in document_targets()
        return (write_trainer_files if is_of_trainer else write_documents)(plan, settings, workers)
    return write_batches(plan, settings, workers)


def _describe(plan: Plan, settings: Settings, workers: Workers) -> DryRun | FilesDryRun:
    if isinstance(plan, TokensPlan) and settings.target.format in document_targets():
        return dry_run_of_files(plan, settings, workers)
    if isinstance(plan, TokensPlan):
        raise ArgumentError(f"{plan.source.paths[0]}: rows of documents are known when their tokens are")
    return dry_run(plan, settings, workers)


def _with_plan(
    conversion: Conversion,
    shown: ProgressCalls | Progress,
    act: Callable[[Plan, Settings, Workers], _Result],
) -> _Result | None:
    """Resolve the options, plan the source, open the engine, and act; None in an MPI rank that has served others."""
    end_unguarded_worker()
    settings, open_source = resolved(conversion)
    executor = settings.work.executor
    with ExitStack() as stack:
        # of MPI ranks only the first one needs the source
        plan = None if executor == "mpi" else _planned(stack, open_source(), settings)
        engine: Engine | None = settings.engine
        if engine is None:
            workers = 1 if plan is None else _workers_of(plan, settings)
            engine = stack.enter_context(open_engine(executor, workers, PRELOAD))
        if engine is None:
            return None
        threads = settings.of(TextOptions).threads or max(1, default_workers() // engine.workers_per_node)
        return act(plan or _planned(stack, open_source(), settings), settings, Workers(engine, threads, shown))


def _planned(stack: ExitStack, found: Any, settings: Settings) -> Plan:
    """Enter a source that keeps files while it is used, and plan its conversion."""
    opened = stack.enter_context(found) if hasattr(found, "__enter__") else found
    source: BatchSource | DocumentSource = opened
    if not isinstance(opened, BatchSource | DocumentSource):
        source = CompletedSource(opened)
    target = settings.target
    if isinstance(source, BatchSource) and target.format in document_targets():
        source = RecordSource(source)
    if isinstance(source, BatchSource) and target.is_stream:
        raise ArgumentError(f"{source.paths[0]}: expected documents for a stream, found batches")
    written = (target.path, partial_path(target.path), partial_path(scatter_path(target.path)))
    refuse_replaced_sources(source.paths, written, target.path)
    settings.require_dtype(source.meta.dtype if isinstance(source, BatchSource) else source.dtype, source.paths[0])
    if target.note:
        source = _noted(source, target)
    return shard_plan_of(source, settings) if isinstance(source, BatchSource) else tokens_plan(source, settings)


def _noted(source: BatchSource | DocumentSource, target: Target) -> BatchSource | DocumentSource:
    """Return a source whose description has the note of a conversion; `ArgumentError` if its target has no place."""
    row = FORMATS.get(target.format)
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
    if isinstance(plan, TokensPlan):
        is_small = 0 < (plan.source.num_tokens or 0) * plan.source.dtype.itemsize < SMALL_BYTES
        wanted = 1 if is_small else default_workers()
        num_tasks = 1 if settings.target.is_one_file else len(plan.source.groups)
        return max(1, min(asked or wanted, num_tasks))
    if asked is not None:
        return asked
    source = plan.source
    if source.num_batches * source.meta.batch_bytes < SMALL_BYTES:
        return 1
    # records that are shuffled may be scattered first, by more processes than there are shards
    tasks = default_workers() if source.reorders else len(plan.cuts)
    return max(1, min(default_workers(), tasks, settings.of(ShuffleOptions).memory // WORKER_BYTES))


def convert(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | BatchSource | DocumentSource,
    target: str,
    destination: str | os.PathLike[str],
    *,
    source_format: str = "auto",
    layout: Literal["batches", "stream"] | None = None,
    tokenizer: str | None = None,
    text_column: str | None = None,
    ids_column: str | None = None,
    field_columns: tuple[str, ...] | None = None,
    rows: Literal["documents", "records"] | None = None,
    id_column: str | None = None,
    metadata_columns: tuple[str, ...] | None = None,
    boundary_token: str | None = None,
    no_boundary: bool | None = None,
    boundary_token_id: int | None = None,
    boundary: Literal["after", "before"] | None = None,
    max_document_tokens: int | None = None,
    packing: Literal["concat", "best-fit", "pad"] | None = None,
    like: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    shuffle: bool | None = None,
    dtype: Literal["auto", "keep", "uint32", "uint16"] | None = None,
    source_dtype: str | None = None,
    skip_bytes: int | None = None,
    vocab_size: int | None = None,
    remainder: Literal["drop", "pad", "error"] | None = None,
    pad_id: int | None = None,
    val_fraction: float | None = None,
    val_last_shard: bool | None = None,
    dataset: str | None = None,
    offsets: str | None = None,
    axes: str | None = None,
    channel: int | None = None,
    field_channels: Mapping[str, int] | None = None,
    memory: int | None = None,
    shuffle_method: Literal["auto", "direct", "two-pass"] | None = None,
    codec: str | None = None,
    live: bool | None = None,
    tokens_only: bool | None = None,
    note: str | None = None,
    shards: int | None = None,
    shard_size: int | None = None,
    shard_per_source: bool | None = None,
    workers: int | None = None,
    threads: int | None = None,
    executor: Literal["local", "mpi"] | None = None,
    shard_range: tuple[int, int] | None = None,
    resume: bool | None = None,
    force: bool | None = None,
    progress: Callable[[int], None] | None = None,
    engine: Engine | None = None,
    **unknown: Never,
) -> Report | None:
    """Convert tokens or documents to another format, as `zb convert` does.

    The options are those of the command, by the same names. An option that is None has the default of its kind of
    source, which `zb convert --from FORMAT --to FORMAT --help` names; one that the source has no use for is refused.

    Parameters
    ----------
    source
        One path or several, of files, folders or stores, or the URL of a store; or an open `BatchSource` or
        `DocumentSource`.
    target
        "hdf5", "batch" or "npy" for batches, "stream" for an HDF5 stream of documents, or "megatron", "datatrove",
        "bin", "llmc" or "olmo" for documents in the files of another trainer; "auto": the format whose suffix the
        destination has, "hdf5" for a folder.
    destination
        One file if it ends in the suffix of the format, else a folder of shards, of this machine or in a bucket: such
        a store is written to `<its name>-<digest>.upload` in the current folder, uploaded with its index last, and
        removed there.
    source_format
        "npy", "hdf5", "batch", "stream", "parquet", "jsonl", "text" or a format of another trainer, such as
        "megatron"; "auto": that of the first file.
    layout
        Of documents: "batches" for packed rows, or "stream" for the documents one after the other.
    tokenizer
        "byte", a file such as "tok.json" or "tok.tiktoken", or "tiktoken:NAME".
    text_column
        The column, or JSON key, that holds the text; None: "text".
    ids_column
        The column that has a list of ids in each row; None: "input_ids", else "tokens".
    field_columns
        The columns of lists that are aligned with the ids, such as ("labels", "loss_mask"); None: every other list of
        numbers.
    rows
        Of rows of ids: "documents" of any length, or "records": all have one length, that of a record, and stay whole.
    id_column
        The column, or JSON key, that names each document: no two the same.
    metadata_columns
        The columns that are kept of each document, such as ("author", "url").
    boundary_token
        The special token after each document; None: that of the tokenizer.
    no_boundary
        Put no token between documents.
    boundary_token_id
        The token between documents in 1-D arrays, such as 50256.
    boundary
        The side of each document that has its boundary token: "after" or "before".
    max_document_tokens
        The length at which longer documents are cut.
    packing
        The way in which documents become rows: "concat", "best-fit" or "pad".
    like
        A store from which shape, dtype, vocabulary size, shuffle, seed, remainder and number of shards are taken; an
        option that is given wins.
    batch_size
        Records of a batch.
    seq_len
        Tokens of a record.
    seed
        Decides the shuffle, and the draw of documents that are held out.
    shuffle
        Whether all records of a split are shuffled; False: they have the order of the source.
    dtype
        The stored dtype: "uint16" or "uint32"; "auto": the smaller one if the source or `vocab_size` proves it;
        "keep": that of the source.
    source_dtype
        The dtype of the ids in files without a header, such as "uint16"; `dtype` is the stored one.
    skip_bytes
        The bytes of each such file before its ids.
    vocab_size
        Ids at or above it are refused.
    remainder
        Records that do not fill the last batch: "drop" or "pad"; "error" refuses them.
    pad_id
        The token of padding.
    val_fraction
        The share of the documents, or of the records of arrays, that is held out as the split "val".
    val_last_shard
        Hold out the last source file as the split "val".
    dataset
        The name of a dataset in an HDF5 file of another program.
    offsets
        The dataset in it of the offsets, or the ends, of documents in the values.
    axes
        "batch,record,token" if the axes of the dataset are these, and no entry is a mask or labels.
    channel
        The entry of the second of its three axes that has the ids, such as 0 of ids, mask and labels.
    field_channels
        The entries that have fields, such as `{"loss_mask": 1, "labels": 2}`; it needs `channel`.
    memory
        Bytes that all processes of a node may take together.
    shuffle_method
        "direct" gathers record by record, "two-pass" only reads and writes in sequence; "auto": the faster one.
    codec
        Compresses the tokens: "zstd" or "gzip", with a level such as "zstd:3".
    live
        Let other processes read the committed batches.
    tokens_only
        Leave fields and documents behind, which `.batch` and `.npy` files do not hold.
    note
        Words for people, which the store keeps: its origin, its licence.
    shards
        The number of shards.
    shard_size
        The bytes of a shard.
    shard_per_source
        Of a stream: a shard for each source file, as without `shards`.
    workers
        Local processes.
    threads
        Threads that tokenize, for each process.
    executor
        Who does the work: "local" processes, or the ranks of "mpi".
    shard_range
        (i, n): write part i of n, counted from 0, only; then merge them with `zb index merge`.
    resume
        Keep the finished files of an interrupted run of the same arguments, and write the rest.
    force
        Replace an existing result, at the end and whole.
    progress
        Called with the number of tokens that were written since the last call.
    engine
        Runs the tasks instead of `workers` or `executor`.
    **unknown
        No other name is an option.

    Returns
    -------
    Report or None
        The report; None in an MPI rank that has only served the first one.

    Raises
    ------
    ExistsError
        If the destination exists.
    ConvertError
        If the disk has no space for it, or the source cannot be converted as asked.
    ArgumentError
        If the arguments contradict each other, or one has a name that no option has.

    Examples
    --------
    >>> report = convert("tokens", "hdf5", "train-h5", batch_size=32, seq_len=512)  # doctest: +SKIP
    """
    given: dict[str, Any] = locals()  # by the names of the fields of `Conversion`
    refuse_unknown(given.pop("unknown"))
    return run(Conversion(**given))
