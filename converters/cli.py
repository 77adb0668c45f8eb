"""`zb convert SOURCE-to-TARGET SRC DST`: parse, one call of `pipeline.run.convert`, print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zb_hdf5.console import (
    CommandGroup,
    ExistingPath,
    NewPath,
    Progress,
    Size,
    counted,
    format_bytes,
    format_count,
    output_options,
    print_report,
)
from zb_hdf5.converters.options import (
    CODEC,
    EXECUTORS,
    FORCE,
    NATURAL,
    NO_SHUFFLE,
    PACKING_OPTIONS,
    POSITIVE,
    REMAINDERS,
    SCHEDULER_FILE,
    SHUFFLES,
    TOKENS_ONLY,
    ConvertOptions,
    NpyOptions,
    StoreOptions,
    option,
    options_of,
    with_options,
)
from zb_hdf5.converters.stream_cli import add_stream_command
from zb_hdf5.converters.text_cli import add_text_commands
from zb_hdf5.formats.registry import FORMATS, FileFormat

if TYPE_CHECKING:
    from zb_hdf5.converters.journal import Part
    from zb_hdf5.converters.run import Report
    from zb_hdf5.converters.source import Source


@click.group(
    cls=CommandGroup,
    short_help="Convert .npy, HDF5, .batch and text to each other.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def convert() -> None:
    """Convert token data between .npy, HDF5 batch stores and native .batch stores.

    A destination that ends in .h5, .batch or .npy is one file; any other name is a folder of shards. Nothing appears
    under its final name before it is whole; --resume continues an interrupted conversion. The command "convert" alone
    is the same.
    """


class ShardRange(click.ParamType[tuple[int, int]]):
    """I/N: the I-th of N parts, counted from 0."""

    name = "I/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        first, _, count = str(value).partition("/")
        if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
            self.fail(f"{value!r} is no part such as 3/16: expected I/N with 0 <= I < N", param, ctx)
        return int(first), int(count)


def _npy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    dtypes = click.Choice(["auto", "uint32", "uint16"])
    options = (
        option("--batch-size", POSITIVE, 32, "Records per batch."),
        click.option("--seq-len", type=POSITIVE, help="Tokens per record. [default: that of 2-D records, else 512]"),
        option("--seed", NATURAL, 42, "Seed of the record shuffle."),
        option("--shuffle", SHUFFLES, "global", "global: all records of all files; none: the order of the source."),
        NO_SHUFFLE,
        option("--dtype", dtypes, "auto", "auto: uint16 if the source or --vocab-size fits (HDF5), else uint32."),
        click.option("--vocab-size", type=POSITIVE, help="Refuse ids at or above it."),
        option(
            "--remainder", REMAINDERS, "drop", "Records that do not fill the last batch: leave out, fill up, or fail."
        ),
        option("--pad-id", NATURAL, 0, "The token that --remainder pad fills up with."),
    )
    return with_options(options, command)


def shuffle_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a conversion that shuffles its records."""
    methods = click.Choice(["auto", "direct", "two-pass"])
    how = "direct: gather record by record; two-pass: only sequential reads and writes; auto: the faster one."
    options = (
        option("--memory", Size(), "2GiB", "Memory of all processes of this node together."),
        option("--shuffle-method", methods, "auto", how),
    )
    return with_options(options, command)


def work_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every conversion can be told about its shards, its processes and its output."""
    options = (
        click.option("--shards", type=POSITIVE, help="Number of shards. [default: those of the source, or 1 GiB each]"),
        click.option("--shard-size", type=Size(), help="Size of a shard, such as 1GiB."),
        click.option("--workers", type=POSITIVE, help="Local processes. [default: the cores; 1 for little data]"),
        option("--executor", EXECUTORS, "local", "Who writes the shards: local processes, MPI ranks, a dask cluster."),
        SCHEDULER_FILE,
        click.option(
            "--shard-range", type=ShardRange(), help="Write part I of N (from 0) only; then run zb index merge."
        ),
        click.option("--resume", is_flag=True, help="Keep the finished shards of an interrupted run, write the rest."),
        click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing."),
        FORCE,
    )
    return with_options(options, output_options(command))


def _add_command(source: FileFormat, target: FileFormat) -> None:
    """Register `source-to-target` with the options that its two ends have."""
    name = f"{source.name}-to-{target.name}"
    from_arrays = not source.holds_batches

    def run(src: tuple[Path, ...] | Path, dst: Path, **given: Any) -> None:
        options = options_of(ConvertOptions, given)

        def open_source() -> Source:
            opened = (
                _open_arrays(src, target, options_of(NpyOptions, given))
                if isinstance(src, tuple)
                else _open_store(src, source, options_of(StoreOptions, given))
            )
            target.require(opened.meta, dst)  # before any work
            return opened

        if options.live:
            _run_live(open_source, name, dst, options)
        else:
            run_conversion(open_source, name, target.name, dst, options)

    what, example_source = source.as_source or ("", "")
    result, example_target = target.as_target or ("", "")
    more = " relaid --batch-size 64" if source == target else f" {example_target}"
    more += " \\\n           --batch-size 32 --shards 4" if from_arrays else ""
    run.__doc__ = f"Convert {what} to {result}.\n\n\b\nExample: zb convert {name} {example_source}{more}"
    command: Callable[..., Any] = work_options(run)
    for each in _format_options(source, target):
        command = each(command)
    command = _npy_options(shuffle_options(command)) if from_arrays else command
    command = click.argument("dst", type=NewPath(urls=target.indexed))(command)
    command = click.argument(
        "src", type=ExistingPath(urls=not from_arrays), nargs=-1 if from_arrays else 1, required=True
    )(command)
    convert.command(name)(command)


def _add_stream_command(target: FileFormat) -> None:
    """Register `stream-to-target`: documents that are tokens already, to packed batches."""
    name = f"stream-to-{target.name}"

    def run(src: Path, dst: Path, **given: Any) -> None:
        options = options_of(ConvertOptions, given)
        with ExitStack() as stack:  # the plan lies on disk until the store is written

            def open_source() -> Source:
                from zb_hdf5.converters.packed import PackOptions
                from zb_hdf5.converters.stream_source import open_stream

                shards = {"num_shards": options.shards, "shard_bytes": options.shard_size}
                packing = options_of(PackOptions, {**given, **shards, "shuffle": given["shuffle"] == "global"})
                part = _part_of(options)
                source = stack.enter_context(open_stream(src, target.name, dst, packing, given["dtype"], part))
                target.require(source.meta, dst)  # before any work
                return source

            run_conversion(open_source, name, target.name, dst, replace(options, shards=None, shard_size=None))

    result, example = target.as_target or ("", "")
    run.__doc__ = (
        f"Convert a token stream of documents to {result}.\n\n"
        "The documents are packed into rows of --seq-len tokens, with their fields, spans, ids and metadata.\n\n\b\n"
        f"Example: zb convert {name} stream {example} \\\n           --seq-len 2048 --packing best-fit"
        + " --tokens-only"
        * target.tokens_only
    )
    command: Callable[..., Any] = work_options(run)
    command = TOKENS_ONLY(command) if target.tokens_only else command
    command = CODEC(command) if target.holds_codecs else command
    dtypes = click.Choice(["keep", "uint32"])
    command = option("--dtype", dtypes, "keep", f"Stored dtype.{_dtype_note(target)}")(command)
    command = with_options(PACKING_OPTIONS, command)
    command = click.argument("dst", type=NewPath())(command)
    command = click.argument("src", type=ExistingPath())(command)
    convert.command(name)(command)


def _dtype_note(target: FileFormat) -> str:
    return " Other readers of .batch files take uint32 only." if target.uint16_note else ""


def _part_of(options: ConvertOptions) -> Part:
    from zb_hdf5.converters.journal import WHOLE, Part

    return Part(*options.shard_range) if options.shard_range else WHOLE


def _format_options(source: FileFormat, target: FileFormat) -> Iterator[Callable[..., Any]]:
    """Yield the options that the facts of the two formats ask for."""
    if source.holds_batches and target.holds_batches:
        dtypes = click.Choice(["keep", "uint32", "uint16"])
        yield option("--dtype", dtypes, "keep", f"Stored dtype.{_dtype_note(target)}")
        yield click.option("--batch-size", type=POSITIVE, help="Records per batch. [default: as stored]")
        divides = "Tokens per record, a divisor of the stored length: each record is cut into several."
        yield click.option("--seq-len", type=POSITIVE, help=f"{divides} [default: as stored]")
        left = click.Choice(["drop", "error"])
        yield click.option("--remainder", type=left, help="Records that do not fill the last batch. [default: drop]")
    if target.holds_codecs:
        yield CODEC
    if source.holds_batches and target.tokens_only and target.indexed:
        yield TOKENS_ONLY
    if target.can_grow:
        yield click.option("--live", is_flag=True, help="Let other processes read the committed batches.")
    if source.has_datasets:
        yield click.option("--dataset", help="Name of the 3-D dataset, in an HDF5 file of another program.")


def _open_store(path: Path, source: FileFormat, options: StoreOptions) -> Source:
    from zb_hdf5.converters.relaid_source import open_store

    layout = {"batch_size": options.batch_size, "seq_len": options.seq_len, "remainder": options.remainder}
    return open_store(path, source.name, options.dataset, options.dtype, **layout)  # type: ignore[arg-type]


def _open_arrays(paths: tuple[Path, ...], target: FileFormat, options: NpyOptions) -> Source:
    from zb_hdf5.converters.npy_source import NpySource

    dtype = target.default_dtype if options.dtype == "auto" else options.dtype
    how = {"vocab_size": options.vocab_size or 0, "shuffle": options.shuffle == "global", "dtype": dtype}
    return NpySource(paths, **{**asdict(options), **how})


def run_conversion(
    open_source: Callable[[], Source], name: str, target: str, dst: Path, options: ConvertOptions
) -> None:
    """Convert and print.

    In a rank of an MPI job that only serves the first one, it runs tasks and prints nothing.
    """
    from zb_hdf5.converters import run as pipe
    from zb_hdf5.converters.conversion import workers_of
    from zb_hdf5.converters.engines import open_engine, require_own_workers
    from zb_hdf5.converters.shuffle import DEFAULT_MEMORY_BYTES, require_memory
    from zb_hdf5.spec import NO_CODEC

    require_own_workers(options.executor, options.workers)
    source = None if options.executor == "mpi" else open_source()
    memory_bytes = options.memory or DEFAULT_MEMORY_BYTES
    workers = 1 if source is None else options.workers or workers_of(source, memory_bytes)
    with open_engine(options.executor, workers, options.scheduler_file) as engine:
        if engine is None:
            return
        source = source or open_source()
        if options.memory:
            one_file = dst.suffix == FORMATS[target].suffix  # written by this process alone
            require_memory(memory_bytes, 1 if one_file else engine.workers_per_node, source.meta.batch_bytes)
        method = options.shuffle_method or "auto"
        if options.dry_run:
            from zb_hdf5.converters.dry_run import describe, describe_lines
            from zb_hdf5.files.publishing import refuse_existing

            place = pipe.place_of(dst, target, part=_part_of(options), overwrite=options.force)
            planned = describe(
                source, target, place, num_shards=options.shards, shard_bytes=options.shard_size,
                workers=engine.workers, shuffle_method=method, memory_bytes=memory_bytes,
                codec=options.codec or NO_CODEC, tokens_only=options.tokens_only,
            ) | {"path": str(dst)}  # fmt: skip
            if not (options.force or options.resume):
                refuse_existing(place)
            print_report(planned, describe_lines(planned), as_json=options.as_json, quiet=options.quiet)
            return
        total = source.num_batches * source.meta.batch_tokens
        with Progress(name, total, enabled=not options.quiet) as progress:
            report = pipe.convert(
                source, target, dst, num_shards=options.shards, shard_bytes=options.shard_size,
                overwrite=options.force, resume=options.resume,
                part=_part_of(options), engine=engine,
                shuffle_method=method, memory_bytes=memory_bytes, codec=options.codec or NO_CODEC,
                tokens_only=options.tokens_only, progress=progress.advance, kept=progress.keep,
            )  # fmt: skip
    print_report(_as_json(report), _as_lines(report), as_json=options.as_json, quiet=options.quiet)


def _run_live(open_source: Callable[[], Source], name: str, dst: Path, options: ConvertOptions) -> None:
    from zb_hdf5.converters.live_target import convert_live

    serial = {"workers": None, "executor": "local", "scheduler_file": None, "shard_range": None, "resume": False,
              "dry_run": False, "force": False, "codec": None}  # fmt: skip
    given = [f"--{key.replace('_', '-')}" for key, value in serial.items() if getattr(options, key) != value]
    if given:
        raise click.UsageError(f"--live is written by one process, into a new folder: leave out {', '.join(given)}")
    source = open_source()
    with Progress(name, source.num_batches * source.meta.batch_tokens, enabled=not options.quiet) as progress:
        report = convert_live(
            source, dst, num_shards=options.shards, shard_bytes=options.shard_size, progress=progress.advance
        )
    print_report(_as_json(report), _as_lines(report), as_json=options.as_json, quiet=options.quiet)


def _as_json(report: Report) -> dict[str, Any]:
    part = {} if report.part.num_jobs == 1 else {"part": list(report.part)}
    return {
        "path": str(report.destination),
        **part,
        "batch_size": report.meta.batch_size,
        "seq_len": report.meta.seq_len,
        "dtype": report.meta.dtype.name,
        "num_batches": report.num_batches,
        "num_shards": len(report.shards),
        "shards_kept": report.kept.shards,
        "shards_written": len(report.shards) - report.kept.shards,
        "tokens_in": report.token_counts.tokens_in,
        "tokens_stored": report.tokens_stored,
        "tokens_written": report.tokens_written,
        "tokens_padded": report.token_counts.padded,
        "padding_rows": report.token_counts.padding_rows,
        "tokens_dropped": report.token_counts.dropped,
        "max_token": report.max_token,
        "shuffle": report.shuffle,
        "sha256": report.sha256,
        "extension": _extension(report),
        "left_behind": report.left_behind,
        "seconds": round(report.seconds, 3),
        "tokens_per_second": report.tokens_per_second and round(report.tokens_per_second),
    }


def _as_lines(report: Report, text: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """Return the report for people.

    Parameters
    ----------
    text
        What became of text, with the speed of the whole; then the conversion was only the last part of the work.
    """
    counts, meta = report.token_counts, report.meta
    dropped = " + ".join(f"{tokens:,} {reason}" for reason, tokens in counts.dropped.items()) or "0"
    padded = f" + {counts.padded:,} padded" if counts.padded else ""
    shards = "1 file" if report.destination.is_file() else counted(len(report.shards), "shard")
    tokens = f"{counts.tokens_in:,} in{padded} = {report.tokens_stored:,} stored + {dropped} dropped"
    if report.part.num_jobs > 1:
        tokens = f"{report.tokens_stored:,} stored by part {report.part.job} of {report.part.num_jobs}"
    if report.kept.shards:
        shards = f"kept {report.kept.shards:,} shards, wrote {len(report.shards) - report.kept.shards:,}"
    return [
        ("wrote" if report.tokens_written else "there is", f"{report.destination} ({shards})"),
        ("batches", f"{report.num_batches:,} of {meta.batch_size:,} x {meta.seq_len:,} {meta.dtype.name}"),
        ("tokens", tokens),
        *([("padding", _padding(report))] if counts.padded and report.part.num_jobs == 1 else []),
        *([] if text else [("shuffle", report.shuffle)]),
        ("sha256", report.sha256),
        *[("note", note) for note in (_extension(report), report.left_behind) if note],
        *(text or [("speed", _speed(report))]),
    ]


def _speed(report: Report) -> str:
    """Rate what this run wrote, not the shards that it kept."""
    rate = report.tokens_per_second
    if rate is None:
        return f"{report.seconds:.2f} s, nothing was left to write"
    checks = f" ({report.kept.seconds:.2f} s to check the kept shards)" if report.kept.shards else ""
    bytes_rate = format_bytes(rate * report.meta.dtype.itemsize)
    return f"{report.seconds:.2f} s{checks}, {format_count(rate)}tok/s, {bytes_rate}/s"


def _extension(report: Report) -> str | None:
    """Say what other readers of the format do not know of the files; None if there is nothing."""
    notes = {FORMATS[shard.backend].uint16_note for shard in report.shards} - {""}
    if report.meta.dtype.name == "uint16" and notes:
        return f"{'; '.join(sorted(notes))}; --dtype uint32 writes what all of them read"
    return None


def _padding(report: Report) -> str:
    """Say how much of the store is padding, and where it lies."""
    rows = report.token_counts.padding_rows
    in_rows = report.token_counts.padded - rows * report.meta.seq_len
    places = ([f"{in_rows:,} at the ends of rows"] if in_rows else []) + (
        [f"{rows:,} whole rows, which fill the last batch"] if rows else []
    )
    share = report.token_counts.padded / report.tokens_stored
    return f"{share:.2%} of the stored tokens: {', '.join(places)}"


for _source in FORMATS.values():
    for _target in FORMATS.values():
        if (_source != _target or _target.holds_codecs) and _source.as_source and _target.as_target:
            _add_command(_source, _target)
for _target in FORMATS.values():
    if _target.as_target and _target.indexed:
        _add_stream_command(_target)

add_stream_command(convert)
add_text_commands(convert, _as_json, _as_lines)
