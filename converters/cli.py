"""`zb convert SOURCE-to-TARGET SRC DST`: parse, one call of `pipeline.run.convert`, print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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
from zb_hdf5.converters.in_place import in_place_options
from zb_hdf5.converters.text_cli import add_text_commands

if TYPE_CHECKING:
    from zb_hdf5.converters.pipeline.run import Report
    from zb_hdf5.converters.sources.source import Source

#: format -> (how its name reads in help, an example of a path)
SOURCES: Final = {
    "npy": (".npy files of tokens", "tokens/"),
    "hdf5": ("an HDF5 store", "train-h5"),
    "batch": ("a .batch store", "train-batch"),
}
TARGETS: Final = {
    "npy": (".npy records", "records.npy"),
    "hdf5": ("an HDF5 store", "train-h5"),
    "batch": ("a .batch store", "train-batch"),
}
#: Less than this is written by one process: starting others takes longer.
SMALL_BYTES: Final = 256 << 20
#: Memory that makes a worker worth its while.
WORKER_BYTES: Final = 192 << 20
DEFAULT_MEMORY: Final = 2 << 30


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
    positive, natural = click.IntRange(1), click.IntRange(0)
    dtypes, remainders = click.Choice(["auto", "uint32", "uint16"]), click.Choice(["drop", "pad", "error"])
    shuffles = click.Choice(["global", "none"])
    options = (
        _option("--batch-size", positive, 32, "Records per batch."),
        _option("--seq-len", positive, 512, "Tokens per record."),
        _option("--seed", natural, 42, "Seed of the record shuffle."),
        _option("--shuffle", shuffles, "global", "global: all records of all files; none: the order of the source."),
        click.option("--no-shuffle", "shuffle", flag_value="none", help="The same as --shuffle none."),
        _option("--dtype", dtypes, "auto", "auto: uint16 if the source or --vocab-size fits (HDF5), else uint32."),
        click.option("--vocab-size", type=positive, help="Refuse ids at or above it."),
        _option(
            "--remainder", remainders, "drop", "Records that do not fill the last batch: leave out, fill up, or fail."
        ),
        _option("--pad-id", natural, 0, "The token that --remainder pad fills up with."),
    )
    return _apply(options, command)


def shuffle_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a conversion that shuffles its records."""
    methods = click.Choice(["auto", "direct", "two-pass"])
    how = "direct: gather record by record; two-pass: only sequential reads and writes; auto: the faster one."
    options = (
        _option("--memory", Size(), "2GiB", "Memory of all processes of this node together."),
        _option("--shuffle-method", methods, "auto", how),
    )
    return _apply(options, command)


def _option(name: str, kind: click.ParamType[Any], default: int | str, help_text: str) -> Callable[..., Any]:
    return click.option(name, type=kind, default=default, show_default=True, help=help_text)


def _apply(options: tuple[Callable[..., Any], ...], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def work_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every conversion can be told about its shards, its processes and its output."""
    executors = click.Choice(["local", "mpi", "dask"])
    options = (
        click.option(
            "--shards", type=click.IntRange(1), help="Number of shards. [default: those of the source, or 1 GiB each]"
        ),
        click.option("--shard-size", type=Size(), help="Size of a shard, such as 1GiB."),
        click.option(
            "--workers", type=click.IntRange(1), help="Local processes. [default: the cores; 1 for little data]"
        ),
        _option("--executor", executors, "local", "Who writes the shards: local processes, MPI ranks, a dask cluster."),
        click.option("--scheduler-file", type=NewPath(), help="File in which the dask scheduler has left its address."),
        click.option(
            "--shard-range", type=ShardRange(), help="Write part I of N (from 0) only; then run zb index merge."
        ),
        click.option("--resume", is_flag=True, help="Keep the finished shards of an interrupted run, write the rest."),
        click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing."),
        click.option(
            "--force",
            is_flag=True,
            help="Replace an existing destination when the new one is whole; also with --resume.",
        ),
    )
    return _apply(options, output_options(command))


def _add_command(source: str, target: str) -> None:
    """Register `source-to-target` with the options that its two ends have."""
    many = source == "npy"

    def run(src: tuple[Path, ...] | Path, dst: Path, **options: Any) -> None:
        is_dual = options.pop("dual", False)

        def open_source(own: dict[str, Any]) -> Source:
            opened = _open(src, source, target, own)
            if is_dual:
                from zb_hdf5.formats.dual import require_whole_records

                require_whole_records(opened.meta, dst)  # before any work
            return opened

        name = f"{source}-to-{target}"
        if options.pop("live", False):
            _run_live(open_source, name, dst, options)
        else:
            run_conversion(open_source, name, "dual" if is_dual else target, dst, options)

    _, example_source = SOURCES[source]
    _, example_target = TARGETS[target]
    run.__doc__ = (
        f"Convert {SOURCES[source][0]} to {TARGETS[target][0]}.\n\n\b\n"
        f"Example: zb convert {source}-to-{target} {example_source} {example_target}"
        + (" \\\n           --batch-size 32 --seq-len 512 --shards 4" if many else "")
    )
    in_place = (source, target) == ("batch", "hdf5")
    command: Callable[..., Any] = work_options(in_place_options(run) if in_place else run)
    if {source, target} == {"hdf5", "batch"}:
        dtypes = click.Choice(["keep", "uint32", "uint16"])
        command = _option("--dtype", dtypes, "keep", "Stored dtype; uint16 .batch files are an extension.")(command)
    if target == "batch":
        command = click.option("--dual", is_flag=True, help="Write .batch files that are HDF5 files as well.")(command)
    if target == "hdf5":
        command = click.option("--live", is_flag=True, help="Let other processes read the committed batches.")(command)
    if source == "hdf5":
        command = click.option("--dataset", help="Name of the 3-D dataset, in an HDF5 file of another program.")(
            command
        )
    command = _npy_options(shuffle_options(command)) if many else command
    command = click.argument("dst", type=NewPath(), required=not in_place)(command)
    command = click.argument("src", type=ExistingPath(), nargs=-1 if many else 1, required=True)(command)
    convert.command(f"{source}-to-{target}")(command)


def _open(src: tuple[Path, ...] | Path, source: str, target: str, own: dict[str, Any]) -> Source:
    if isinstance(src, tuple):
        return _open_npy(src, target, **own)
    from zb_hdf5.converters.sources.store import StoreSource

    return StoreSource(src, source, own.get("dataset"), own.get("dtype", "keep"))


def _open_npy(paths: tuple[Path, ...], target: str, **options: Any) -> Source:
    from zb_hdf5.converters.sources.npy import NpySource

    if target == "batch" and options["dtype"] == "auto":
        options["dtype"] = "uint32"  # what every reader of the format knows; uint16 is ours
    options["vocab_size"] = options["vocab_size"] or 0
    return NpySource(paths, **{**options, "shuffle": options["shuffle"] == "global"})


def run_conversion(
    open_source: Callable[[dict[str, Any]], Source], name: str, target: str, dst: Path, options: dict[str, Any]
) -> None:
    """Convert and print, as `work_options` say; all other options belong to the source.

    In a rank of an MPI job that only serves the first one, it runs tasks and prints nothing.
    """
    from zb_hdf5.converters.pipeline import run as pipe
    from zb_hdf5.converters.pipeline.engines import open_engine, require_own_workers
    from zb_hdf5.converters.pipeline.journal import WHOLE, Part
    from zb_hdf5.converters.pipeline.shuffle import require_memory
    from zb_hdf5.converters.sources.registry import FORMATS

    names = ("as_json", "quiet", "workers", "executor", "scheduler_file", "dry_run", "force", "resume")
    work = {key: options.pop(key) for key in names}
    shards = {"num_shards": options.pop("shards"), "shard_bytes": options.pop("shard_size")}
    if "memory" in options:
        ways = {"memory_bytes": options.pop("memory"), "shuffle_method": options.pop("shuffle_method")}
    else:
        ways = {}
    shard_range = options.pop("shard_range")
    part = Part(*shard_range) if shard_range else WHOLE
    require_own_workers(work["executor"], work["workers"])
    source = None if work["executor"] == "mpi" else open_source(options)
    memory_bytes = int(ways.get("memory_bytes", DEFAULT_MEMORY))
    workers = 1 if source is None else _num_workers(source, work["workers"], memory_bytes)
    with open_engine(work["executor"], workers, work["scheduler_file"]) as engine:
        if engine is None:
            return
        source = source or open_source(options)
        if ways:
            one_file = dst.suffix == FORMATS[target].suffix  # written by this process alone
            require_memory(memory_bytes, 1 if one_file else engine.workers_per_node, source.meta.batch_bytes)
        if work["dry_run"]:
            from zb_hdf5.converters.pipeline.dry_run import describe, describe_lines
            from zb_hdf5.core.publishing import refuse_existing

            planned = describe(source, target, dst, **shards, **ways, workers=engine.workers)
            if not (work["force"] or work["resume"]):
                refuse_existing(dst)
            print_report(planned, describe_lines(planned), as_json=work["as_json"], quiet=work["quiet"])
            return
        total = source.num_batches * source.meta.batch_tokens
        with Progress(name, total, enabled=not work["quiet"]) as progress:
            report = pipe.convert(
                source, target, dst, **shards, overwrite=work["force"], resume=work["resume"], part=part,
                engine=engine, **ways, progress=progress.advance, kept=progress.keep,
            )  # fmt: skip
    print_report(_as_json(report), _as_lines(report), as_json=work["as_json"], quiet=work["quiet"])


def _run_live(open_source: Callable[[dict[str, Any]], Source], name: str, dst: Path, options: dict[str, Any]) -> None:
    from zb_hdf5.converters.pipeline.live import convert_live

    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    shards = {"num_shards": options.pop("shards"), "shard_bytes": options.pop("shard_size")}
    serial = {"workers": None, "executor": "local", "scheduler_file": None, "shard_range": None, "resume": False,
              "dry_run": False, "force": False}  # fmt: skip
    given = [f"--{key.replace('_', '-')}" for key, value in serial.items() if options.pop(key) != value]
    if given:
        raise click.UsageError(f"--live is written by one process, into a new folder: leave out {', '.join(given)}")
    for key in ("memory", "shuffle_method"):
        options.pop(key, None)
    source = open_source(options)
    with Progress(name, source.num_batches * source.meta.batch_tokens, enabled=not quiet) as progress:
        report = convert_live(source, dst, **shards, progress=progress.advance)
    print_report(_as_json(report), _as_lines(report), as_json=as_json, quiet=quiet)


def _num_workers(source: Source, asked: int | None, memory_bytes: int) -> int:
    from zb_hdf5.converters.pipeline.engines import default_workers

    if asked is not None:
        return asked
    if source.num_batches * source.meta.batch_bytes < SMALL_BYTES:
        return 1
    return max(1, min(default_workers(), memory_bytes // WORKER_BYTES))


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
        "tokens_in": report.accounts.tokens_in,
        "tokens_stored": report.tokens_stored,
        "tokens_written": report.tokens_written,
        "tokens_padded": report.accounts.padded,
        "padding_rows": report.accounts.padding_rows,
        "tokens_dropped": report.accounts.dropped,
        "max_token": report.max_token,
        "shuffle": report.shuffle,
        "sha256": report.sha256,
        "extension": _extension(report),
        "seconds": round(report.seconds, 3),
        "tokens_per_second": report.tokens_per_second and round(report.tokens_per_second),
    }


def _as_lines(report: Report) -> list[tuple[str, str]]:
    accounts, meta = report.accounts, report.meta
    dropped = " + ".join(f"{tokens:,} {reason}" for reason, tokens in accounts.dropped.items()) or "0"
    padded = f" + {accounts.padded:,} padded" if accounts.padded else ""
    shards = "1 file" if report.destination.is_file() else counted(len(report.shards), "shard")
    tokens = f"{accounts.tokens_in:,} in{padded} = {report.tokens_stored:,} stored + {dropped} dropped"
    if report.part.num_jobs > 1:
        tokens = f"{report.tokens_stored:,} stored by part {report.part.job} of {report.part.num_jobs}"
    if report.kept.shards:
        shards = f"kept {report.kept.shards:,} shards, wrote {len(report.shards) - report.kept.shards:,}"
    return [
        ("wrote" if report.tokens_written else "there is", f"{report.destination} ({shards})"),
        ("batches", f"{report.num_batches:,} of {meta.batch_size:,} x {meta.seq_len:,} {meta.dtype.name}"),
        ("tokens", tokens),
        *([("padding", _padding(report))] if accounts.padded and report.part.num_jobs == 1 else []),
        ("shuffle", report.shuffle),
        ("sha256", report.sha256),
        *([("note", extension)] if (extension := _extension(report)) else []),
        ("speed", _speed(report)),
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
    if report.meta.dtype.name == "uint16" and any(shard.backend == "batch" for shard in report.shards):
        return (
            "uint16 .batch files are an extension: other ZeroBatch v2 readers take the ids for uint32 and return wrong "
            "ones; --dtype uint32 writes what all of them read"
        )
    return None


def _padding(report: Report) -> str:
    """Say how much of the store is padding, and where it lies."""
    rows = report.accounts.padding_rows
    in_rows = report.accounts.padded - rows * report.meta.seq_len
    places = ([f"{in_rows:,} at the ends of rows"] if in_rows else []) + (
        [f"{rows:,} whole rows, which fill the last batch"] if rows else []
    )
    share = report.accounts.padded / report.tokens_stored
    return f"{share:.2%} of the stored tokens: {', '.join(places)}"


for _source in SOURCES:
    for _target in TARGETS:
        if _source != _target:
            _add_command(_source, _target)

add_text_commands(convert, _as_json, _as_lines)
