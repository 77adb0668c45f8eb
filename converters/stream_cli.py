"""`zb convert npy-to-stream`: 1-D `.npy` files to a store of token streams; and how such stores are reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zb_hdf5.console import ExistingPath, NewPath, Progress, counted, format_count, output_options, print_report
from zb_hdf5.converters.options import (
    EXECUTORS,
    FORCE,
    NATURAL,
    POSITIVE,
    SCHEDULER_FILE,
    RunOptions,
    option,
    options_of,
    with_options,
)

if TYPE_CHECKING:
    from zb_hdf5.converters.stream_target import StreamReport


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """How the tokens of `.npy` files are cut into documents."""

    boundary_token_id: int
    boundary: str
    dtype: str
    vocab_size: int


_OPTIONS = (
    click.option(
        "--boundary-token-id", type=NATURAL, required=True, help="The token that tells documents apart, such as 50256."
    ),
    option("--boundary", click.Choice(["behind", "front"]), "behind", "Where it stands in each document."),
    option(
        "--dtype",
        click.Choice(["auto", "uint32", "uint16"]),
        "auto",
        "auto: uint16 if the source or --vocab-size fits.",
    ),
    option("--vocab-size", NATURAL, 0, "Refuse ids at or above it; 0: not known."),
    click.option("--workers", type=POSITIVE, help="Local processes. [default: the cores]"),
    option("--executor", EXECUTORS, "local", "Who writes the shards: local processes, MPI ranks, a dask cluster."),
    SCHEDULER_FILE,
    click.option("--resume", is_flag=True, help="Keep the finished shards of an interrupted run, write the rest."),
    FORCE,
)


def add_stream_command(group: click.Group) -> None:
    """Add the command to the convert group."""

    def run(src: tuple[Path, ...], dst: Path, **given: Any) -> None:
        """Convert 1-D .npy files to a store of token streams.

        Each file becomes a shard. A boundary token tells the documents apart: they get a table, and are known by their
        file and place whatever is made of the stream later. A folder stands for all .npy files in and below it.

        \b
        Example: zb convert npy-to-stream tokens/ stream --boundary-token-id 50256
                 zb convert stream-to-hdf5 stream train-h5 --seq-len 2048
        """
        from zb_hdf5.converters.engines import default_workers, open_engine, require_own_workers
        from zb_hdf5.converters.npy_source import expand
        from zb_hdf5.converters.run import WorkOptions
        from zb_hdf5.converters.stream_target import npy_to_stream

        options = options_of(RunOptions, {**given, "shards": None})
        require_own_workers(options.executor, options.workers)
        files = expand(src)
        workers = min(options.workers or default_workers(), len(files))
        with open_engine(options.executor, workers, options.scheduler_file) as engine:
            if engine is None:
                return
            total = sum(file.stat().st_size for file in files)
            with Progress("cutting", total, enabled=not options.quiet, unit="B") as progress:
                work = WorkOptions(engine, options.force, options.resume, progress=progress.advance, kept=progress.keep)
                report = npy_to_stream(src, dst, work=work, **vars(options_of(CutOptions, given)))
        print_report(streams_json(report), streams_lines(report), as_json=options.as_json, quiet=options.quiet)

    command = with_options(_OPTIONS, output_options(run))
    command = click.argument("dst", type=NewPath())(command)
    command = click.argument("src", type=ExistingPath(), nargs=-1, required=True)(command)
    group.command("npy-to-stream")(command)


def speed_of(tokens: int, kept: int, seconds: float) -> str:
    """Rate what this run tokenized, not the tokens of an earlier run."""
    note = f" (kept {kept:,} tokens, tokenized {tokens - kept:,})" if kept else ""
    return f"{seconds:.2f} s{note}, {format_count((tokens - kept) / seconds)}tok/s"


def rate_json(tokens: int, kept: int, seconds: float) -> dict[str, int]:
    """Return the rate of this run, and how many tokens are those of an earlier one."""
    return {"tokens_kept": kept, "tokens_per_second": round((tokens - kept) / seconds)}


def streams_json(report: StreamReport) -> dict[str, Any]:
    """Return the report of a store of streams as JSON."""
    index = report.index
    return {
        "path": str(report.destination),
        "dtype": index.meta.dtype.name,
        "num_shards": len(index.shards),
        "shards_kept": report.shards_kept,
        "shards_written": len(index.shards) - report.shards_kept,
        "documents": index.meta.document_count,
        "documents_dropped": report.counts.dropped.counts,
        "documents_dropped_first": report.counts.dropped.first,
        "tokens_in": report.counts.tokens.tokens_in,
        "tokens_stored": index.token_count,
        "tokens_dropped": report.counts.tokens.dropped,
        "sha256": index.sha256,
        "seconds": round(report.seconds, 3),
        **rate_json(report.counts.tokens.tokens_in, report.tokens_kept, report.seconds),
    }


def streams_lines(report: StreamReport) -> list[tuple[str, str]]:
    """Return the report of a store of streams for people."""
    index, counts = report.index, report.counts.tokens
    cut = " + ".join(f"{tokens:,} {reason}" for reason, tokens in counts.dropped.items()) or "0"
    val = sum(shard.split != "train" for shard in index.shards)
    shards = counted(len(index.shards), "shard")
    if report.shards_kept:
        shards = f"kept {report.shards_kept:,} shards, wrote {len(index.shards) - report.shards_kept:,}"
    return [
        ("wrote", f"{report.destination} ({shards}{f', {val:,} of them val' if val else ''})"),
        ("documents", f"{index.meta.document_count:,}"),
        ("tokens", f"{counts.tokens_in:,} in = {index.token_count:,} stored + {cut} dropped"),
        ("sha256", index.sha256),
        ("speed", speed_of(counts.tokens_in, report.tokens_kept, report.seconds)),
        *report.counts.dropped.lines(),
    ]
