"""`zb convert parquet-to-hdf5`, `jsonl-to-hdf5` and `text-to-hdf5`: text to stores of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import ExistingPath, NewPath, Progress, counted, output_options, print_report
from zb_hdf5.converters.options import (
    CODEC,
    EXECUTORS,
    FORCE,
    PACKING_OPTIONS,
    POSITIVE,
    SCHEDULER_FILE,
    TextCommandOptions,
    option,
    options_of,
    with_options,
)
from zb_hdf5.converters.stream_cli import rate_json, speed_of, streams_json, streams_lines
from zb_hdf5.text.corpus import FILE_KINDS

if TYPE_CHECKING:
    from zb_hdf5.converters.documents import DocumentSource
    from zb_hdf5.converters.run import Report, WorkOptions
    from zb_hdf5.converters.staging import IngestReport
    from zb_hdf5.converters.text_source import Recipe

AsJson = Callable[["Report"], dict[str, Any]]
AsLines = Callable[["Report", list[tuple[str, str]]], list[tuple[str, str]]]
#: A report as JSON and as lines, for `print_report`.
Printed = tuple[dict[str, Any], list[tuple[str, str]]]
#: The bytes to read, whether the result is there already, and what makes it.
Task = tuple[int, Callable[[], bool], Callable[["WorkOptions"], Printed]]


def add_text_commands(group: click.Group, as_json: AsJson, as_lines: AsLines) -> None:
    """Add the commands to the convert group, which says how the report of a conversion is printed."""
    for kind in FILE_KINDS:
        _add_command(group, kind, as_json, as_lines)


def _add_command(group: click.Group, kind: str, as_json: AsJson, as_lines: AsLines) -> None:
    file_kind = FILE_KINDS[kind]

    def run(src: tuple[Path, ...], dst: Path, **given: Any) -> None:
        from zb_hdf5.converters.engines import require_own_workers
        from zb_hdf5.converters.text_source import TextSource
        from zb_hdf5.text.corpus import open_documents, unknown_columns

        options = options_of(TextCommandOptions, given)
        _require_layout(options)
        metadata = [name.strip() for name in options.metadata_columns.split(",") if name.strip()]
        files = open_documents(src, kind, options.text_column, options.id_column, metadata)
        for name in unknown_columns(files):
            click.echo(f"note: {files[0].path}: no key {name!r} in its first lines", err=True)
        recipe = _recipe(options)
        require_own_workers(options.executor, options.workers)
        source = TextSource(files, kind, recipe)
        if options.layout == "stream":
            num_bytes, is_done, write = _to_streams(source, dst, options)
        else:
            num_bytes, is_done, write = _to_batches(source, dst, options, as_json, as_lines)
        if options.resume and not options.force and dst.is_dir() and is_done():
            already = f"{dst} already, made of these files in this way: nothing to do"
            report: Printed | None = ({"path": str(dst), "done": True}, [("there is", already)])
        else:
            report = _work(source, num_bytes, options, write)
        if report is not None:
            print_report(*report, as_json=options.as_json, quiet=options.quiet)

    run.__doc__ = (
        f"Convert {file_kind.noun} to an HDF5 store.\n\n"
        f"{file_kind.documents} Documents are tokenized, packed into rows of --seq-len tokens, and the rows are "
        "shuffled once, which needs as much disk again as the store meanwhile; or, with --layout stream, kept as they "
        "are, one after the other. A folder stands for all such files in and below it.\n\n\b\n"
        f"Example: zb convert {kind}-to-hdf5 {file_kind.example} train-h5 \\\n"
        "           --tokenizer tok.json --seq-len 2048 --packing best-fit"
    )
    own = [each for each in _OPTIONS if file_kind.has_columns or each not in _COLUMNS]
    command = with_options(own, output_options(run))
    command = click.argument("dst", type=NewPath())(command)
    command = click.argument("src", type=ExistingPath(), nargs=-1, required=True)(command)
    group.command(f"{kind}-to-hdf5")(command)


_COLUMNS: Final = [
    option("--text-column", str, "text", "Column, or JSON key, that holds the text."),
    click.option("--id-column", default="", help="Column, or JSON key, that names each document: no two the same."),
    click.option("--metadata-columns", default="", help="Columns to keep of each document, such as author,url."),
]
#: Options that make no sense for a stream.
_BATCHES_ONLY: Final = ("packing", "batch_size", "seq_len", "shuffle", "remainder", "pad_id")
_OPTIONS: Final = [
    option(
        "--layout",
        click.Choice(["batches", "stream"]),
        "batches",
        "batches: packed rows; stream: the documents one after the other.",
    ),
    click.option("--tokenizer", required=True, help="byte, tok.json, tok.tiktoken, or tiktoken:NAME."),
    *_COLUMNS,
    click.option("--boundary-token", help="Special token behind each document. [default: <|endoftext|>]"),
    click.option("--no-boundary", is_flag=True, help="Put no token between documents."),
    click.option("--max-document-tokens", type=POSITIVE, help="Cut longer documents."),
    *PACKING_OPTIONS,
    click.option(
        "--val-fraction",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        help="Share of the documents that is held out as split val.",
    ),
    click.option("--val-last-shard", is_flag=True, help="Hold out the last source file as split val."),
    click.option(
        "--shards",
        type=POSITIVE,
        help="Shards of the training split. [default: 1 GiB each; of streams: one per source file]",
    ),
    click.option(
        "--shard-per-source", is_flag=True, help="With --layout stream: a shard per source file, as without --shards."
    ),
    click.option("--workers", type=POSITIVE, help="Local processes. [default: the cores]"),
    click.option(
        "--threads", type=POSITIVE, help="Threads that tokenize, per process. [default: its share of the cores]"
    ),
    CODEC,
    option("--executor", EXECUTORS, "local", "Who tokenizes: local processes, MPI ranks, a dask cluster."),
    SCHEDULER_FILE,
    click.option("--resume", is_flag=True, help="Keep the finished work of an interrupted run, do the rest."),
    FORCE,
]


def _to_batches(
    source: DocumentSource, dst: Path, options: TextCommandOptions, as_json: AsJson, as_lines: AsLines
) -> Task:
    from zb_hdf5.converters.staging import TextOptions, ingest_batches, is_ingested, staging_plan
    from zb_hdf5.spec import NO_CODEC

    text = TextOptions(
        options.batch_size, options.seq_len, options.seed, options.shuffle == "global", options.packing,
        options.remainder, options.pad_id, options.shards, val_fraction=options.val_fraction,
        val_last_shard=options.val_last_shard, codec=options.codec or NO_CODEC,
    )  # fmt: skip

    def write(work: WorkOptions) -> Printed:
        report = ingest_batches(source, dst, text, work)
        conversion = report.conversion
        return {**as_json(conversion), **_as_json(report)}, as_lines(conversion, _lines(report))

    return staging_plan(source, text).num_bytes, lambda: is_ingested(source, dst, text), write


def _to_streams(source: DocumentSource, dst: Path, options: TextCommandOptions) -> Task:
    from zb_hdf5.converters.stream_target import StreamTarget
    from zb_hdf5.spec import NO_CODEC

    target = StreamTarget(
        options.shards, options.val_fraction, options.val_last_shard, options.seed, options.codec or NO_CODEC
    )
    plan = target.plan(source)

    def write(work: WorkOptions) -> Printed:
        report = target.write(source, dst, work)
        return streams_json(report), streams_lines(report)

    return plan.num_bytes, lambda: plan.is_result(dst), write


def _work(
    source: DocumentSource, num_bytes: int, options: TextCommandOptions, write: Callable[[WorkOptions], Printed]
) -> Printed | None:
    """Write a store; None in a rank of an MPI job that only serves the first one."""
    from zb_hdf5.converters.engines import default_workers, open_engine
    from zb_hdf5.converters.run import WorkOptions

    cores = default_workers()
    workers = max(1, min(options.workers or cores, len(source.groups)))
    with open_engine(options.executor, workers, options.scheduler_file) as engine:
        if engine is None:
            return None
        with Progress("tokenizing", num_bytes, enabled=not options.quiet, unit="B") as progress:
            work = WorkOptions(
                engine, options.force, options.resume, num_threads=options.threads or max(1, cores // workers),
                progress=progress.advance, kept=progress.keep, begin=progress.begin,
            )  # fmt: skip
            return write(work)


def _require_layout(options: TextCommandOptions) -> None:
    """Raise `ArgumentError` if an option was given that the layout has no use for."""
    from click.core import ParameterSource

    from zb_hdf5 import ArgumentError

    if options.layout == "stream":
        context = click.get_current_context()
        for name in _BATCHES_ONLY:
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
                raise ArgumentError(f"--{name.replace('_', '-')} belongs to --layout batches: a stream has no rows")
    if options.shard_per_source and options.layout != "stream":
        raise ArgumentError("--shard-per-source belongs to --layout stream: rows are shuffled over all sources")
    if options.shard_per_source and options.shards:
        raise ArgumentError("pass either --shards or --shard-per-source, not both")


def _recipe(options: TextCommandOptions) -> Recipe:
    from zb_hdf5 import ArgumentError
    from zb_hdf5.converters.text_source import Recipe
    from zb_hdf5.text.tokenizers import load_tokenizer

    spec, text = options.tokenizer, options.boundary_token
    if options.no_boundary:
        if text is not None:
            raise ArgumentError("pass either --boundary-token or --no-boundary, not both")
        return Recipe(spec, None, options.max_document_tokens)
    tokenizer = load_tokenizer(spec)
    boundary = tokenizer.boundary_token_id if text is None else tokenizer.special_token_id(text)
    if boundary is None:
        known = ", ".join(tokenizer.special_tokens) or "none"
        raise ArgumentError(f"tokenizer {spec}: pass --boundary-token (it has: {known}), or --no-boundary")
    return Recipe(spec, boundary, options.max_document_tokens)


def _as_json(report: IngestReport) -> dict[str, Any]:
    return {
        "documents": report.counts.documents,
        "documents_dropped": report.counts.dropped.counts,
        "documents_dropped_first": report.counts.dropped.first,
        "packing": report.packing,
        "batches_of_split": report.batches_of_split,
        "seconds": round(report.seconds, 3),
        **rate_json(report.counts.tokens.tokens_in, report.tokens_kept, report.seconds),
    }


def _lines(report: IngestReport) -> list[tuple[str, str]]:
    splits = ", ".join(
        f"{counted(count, 'batch', 'batches')} {split}" for split, count in report.batches_of_split.items()
    )
    return [
        ("documents", f"{report.counts.documents:,}, {report.packing} packing: {splits}"),
        ("speed", speed_of(report.counts.tokens.tokens_in, report.tokens_kept, report.seconds)),
        *report.counts.dropped.lines(),
    ]
