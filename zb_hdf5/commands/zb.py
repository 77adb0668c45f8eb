"""`zb`: the commands that look at stores, check them and convert them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zb_hdf5.commands.look_cli import report, show, which
from zb_hdf5.commands.stage import cache, stage
from zb_hdf5.console import (
    CommandGroup,
    ExistingPath,
    NewPath,
    Progress,
    counted,
    format_bytes,
    output_options,
    print_report,
)
from zb_hdf5.errors import FormatError, UnavailableError
from zb_hdf5.version import __version__

if TYPE_CHECKING:
    from zb_hdf5.commands.fetch import FetchReport
    from zb_hdf5.spec import StoreMeta
    from zb_hdf5.store.index import ShardIndex

_PATH: Any = ExistingPath()
_STORE: Any = ExistingPath(urls=True)


class ZbGroup(CommandGroup):
    """Adds `convert`, which lives outside this package and is imported only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "convert"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "convert":
            from zb_hdf5.converters.cli import convert

            return convert
        return super().get_command(ctx, cmd_name)


@click.group(cls=ZbGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def zb() -> None:
    """Token batches in HDF5 and .batch files: look at them, check them, convert them."""


@zb.command(short_help="Describe a file, store or unfinished conversion.")
@click.argument("path", type=_STORE)
@click.option("--dataset", help="Name of the 3-D dataset, in an HDF5 file of another program.")
@output_options
def info(path: Path, dataset: str | None, as_json: bool, quiet: bool) -> None:
    """Describe PATH: shape, tokens, documents, splits, and the layout of its batches.

    A .partial folder is described by the progress of its conversion.

    \b
    Example: zb info data/train
    """
    from zb_hdf5.commands.info import describe, describe_lines
    from zb_hdf5.converters.interrupted import describe_interrupted, interrupted_lines

    if interrupted := describe_interrupted(path):
        print_report(interrupted, interrupted_lines(interrupted), as_json=as_json, quiet=quiet)
        return
    description = describe(path, dataset)
    print_report(description, describe_lines(description), as_json=as_json, quiet=quiet)


zb.add_command(show)
zb.add_command(report)
zb.add_command(which)
zb.add_command(stage)
zb.add_command(cache)


@zb.command(short_help="Compare every batch with its stored digests.")
@click.argument("path", type=_STORE)
@click.option("--workers", type=click.IntRange(1), help="Shards checked at the same time. [default: the cores]")
@output_options
@click.pass_context
def verify(ctx: click.Context, path: Path, workers: int | None, as_json: bool, quiet: bool) -> None:
    """Compare every batch and shard of PATH with its stored digests.

    \b
    Exit codes:
      0  verified: every file is as it was written
      3  bad: the first bad batch of each damaged file is named
      4  bad: a file is truncated, missing, or not finished
      5  this machine cannot read it (a lock, a missing HDF5 filter)
      6  not verified: no digest is stored; the report says which is missing

    \b
    Example: zb verify data/train
    """
    from zb_hdf5.commands.verdict import exit_code, verdict_json, verdict_lines
    from zb_hdf5.store.verify import verify_store
    from zb_hdf5.store.verify_report import ShardReport

    try:
        with Progress("verify", 0, enabled=not quiet) as progress:
            reports = verify_store(
                path, workers=workers, progress=progress.advance, announce=lambda total: progress.advance(0, total)
            )
    except FormatError as error:  # of the index: there is no shard to report on
        reports = [ShardReport(str(path), problem=error)]
    print_report(verdict_json(reports), verdict_lines(path, reports), as_json=as_json, quiet=quiet)
    ctx.exit(exit_code(reports))


@zb.command(short_help="Save the good batches or documents in a new file.")
@click.argument("path", type=_PATH)
@click.option("--output", type=NewPath(), help="New file; by default in the folder of PATH.")
@click.option("--batch-size", type=click.IntRange(1), help="Records per batch, if the .batch header was never written.")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens per record, if that header was never written.")
@click.option(
    "--dtype", type=click.Choice(["uint16", "uint32"]), help="Stored dtype, if that header was never written."
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--dry-run", is_flag=True, help="Print what would be done; write nothing.")
@output_options
def repair(
    path: Path,
    output: Path | None,
    batch_size: int | None,
    seq_len: int | None,
    dtype: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Save the good batches of PATH in a new file, or the good documents of a token stream.

    PATH itself is never changed.

    \b
    Example: zb repair data/train.h5.partial
    """
    from zb_hdf5.store.repair import repair as repair_path

    shape = _shape_of_options(batch_size, seq_len, dtype)
    reports = repair_path(path, output=output, shape=shape, overwrite=force, dry_run=dry_run)
    lines = [(report.path, report.line()) for report in reports]
    print_report({"files": [vars(report) for report in reports]}, lines, as_json=as_json, quiet=quiet)


def _shape_of_options(batch_size: int | None, seq_len: int | None, dtype: str | None) -> StoreMeta | None:
    """Return the shape that the options give, or None if none is given; all three belong together."""
    from zb_hdf5.spec import StoreMeta, stored_dtype

    if batch_size is None and seq_len is None and dtype is None:
        return None
    if batch_size is None or seq_len is None or dtype is None:
        raise click.UsageError("--batch-size, --seq-len and --dtype belong together: pass all three")
    return StoreMeta(batch_size, seq_len, stored_dtype(dtype))


@zb.group()
def tokenizer() -> None:
    """Make a tokenizer."""


@tokenizer.command(short_help="Train byte-level BPE on text.")
@click.argument("src", type=_PATH, nargs=-1, required=True)
@click.option("--output", "-o", type=NewPath(), required=True, help="tokenizer.json to write.")
@click.option(
    "--vocab-size",
    type=click.IntRange(1),
    default=32768,
    show_default=True,
    help="Tokens, the boundary token included.",
)
@click.option("--text-column", default="text", show_default=True, help="Column (or JSON key) that holds the text.")
@click.option("--force", is_flag=True, help="Replace an existing result when the new one is whole.")
@output_options
def train(
    src: tuple[Path, ...], output: Path, vocab_size: int, text_column: str, force: bool, as_json: bool, quiet: bool
) -> None:
    """Train byte-level BPE on the text of SRC: .parquet, .jsonl, .jsonl.gz and .txt files, and folders of them.

    Writes a tokenizer.json for Hugging Face tokenizers, and a .tiktoken file of ranks that encodes the same.
    Memory grows with the number of different words, not with the text.

    \b
    Example: zb tokenizer train corpus/ --vocab-size 32768 -o tok.json
    """
    from zb_hdf5.text.corpus import open_documents
    from zb_hdf5.text.training import train_tokenizer

    files = open_documents(src, column=text_column)
    total = 2 * sum(file.text_bytes(number) for file in files for number in range(file.num_row_groups))
    in_log = not quiet and not sys.stderr.isatty()  # on a terminal the tokenizers library draws its own bars
    with Progress("training", total, enabled=in_log, unit="B") as progress:
        report = train_tokenizer(
            files, output, vocab_size, overwrite=force, progress=progress.advance, show_bars=not quiet
        )
    lines = [
        ("wrote", f"{report.path} and {report.ranks_path}"),
        ("tokens", f"{report.vocab_size:,}"),
        ("trained on", f"{report.documents - report.held_out_documents:,} of {report.documents:,} documents"),
        ("bytes per token", f"{report.bytes_per_token:.3f} on the {report.held_out_documents:,} held out"),
        ("digest", report.digest),
        *report.dropped.lines(),
    ]
    print_report(report.to_json(), lines, as_json=as_json, quiet=quiet)


@zb.group()
def index() -> None:
    """Work on the `shards.json` of stores."""


@index.command(short_help="Publish the store that the jobs of an array have written.")
@click.argument("path", type=NewPath())
@click.option("--force", is_flag=True, help="Replace an existing result when the new one is whole.")
@output_options
def merge(path: Path, force: bool, as_json: bool, quiet: bool) -> None:
    """Publish PATH, whose shards were written by the jobs of an array with --shard-range.

    \b
    Example: zb index merge train-h5
    """
    from zb_hdf5.converters.merge import merge_parts

    merged = merge_parts(path, overwrite=force)
    report = {"path": str(path), "num_shards": len(merged.shards), "num_batches": merged.num_batches}
    lines = [("merged", f"{path}: {_size(merged)}")]
    print_report({**report, "sha256": merged.sha256}, [*lines, ("sha256", merged.sha256)], as_json=as_json, quiet=quiet)


@index.command(short_help="Rebuild a lost or outdated shards.json from its shards.")
@click.argument("folder", type=_PATH)
@click.option("--force", is_flag=True, help="Replace a valid index; accept missing shards.")
@output_options
def rebuild(folder: Path, force: bool, as_json: bool, quiet: bool) -> None:
    """Rebuild the lost, damaged or outdated shards.json of FOLDER from its shards.

    It is outdated, and needs --force, when a shard was repacked or replaced since it was written.

    \b
    Example: zb index rebuild data/train
    """
    from zb_hdf5.formats.registry import BACKENDS
    from zb_hdf5.store.rebuild import ONLY_IN_SOME_FILES, UNKNOWN_SHUFFLE, rebuild_index

    made = rebuild_index(folder, force=force)
    lost = ["shuffle", "source", "splits"] if made.shuffle == UNKNOWN_SHUFFLE else []
    if lost and BACKENDS[made.shards[0].backend].has_sidecar:
        lost += ONLY_IN_SOME_FILES
    report = {"folder": str(folder), "shards": len(made.shards), "sha256": made.sha256, "not_recovered": lost}
    lines = [("index", _size(made)), ("sha256", made.sha256)]
    if lost:
        lines.append(("not recovered", f"{', '.join(lost)}: only the lost index had them; all shards are train"))
    print_report(report, lines, as_json=as_json, quiet=quiet)


@index.command(short_help="Write the .crc32 file that verifies a lone .batch.")
@click.argument("files", type=_PATH, nargs=-1, required=True)
@output_options
def crc32(files: tuple[Path, ...], as_json: bool, quiet: bool) -> None:
    """Write FILE.batch.crc32 for each .batch file that has none.

    The new file holds the crc32 of each batch as it is now. From then on, 'zb verify' compares the .batch with it.

    \b
    Example: zb index crc32 data/train.batch
    """
    from zb_hdf5.store.rebuild import add_crc32_file

    written = [(path, add_crc32_file(path)) for path in files]
    lines = [(str(path), f"wrote {made.name}" if made else "has its .crc32 already") for path, made in written]
    report = {"written": [str(made) for _, made in written if made]}
    print_report(report, lines, as_json=as_json, quiet=quiet)


@zb.command(short_help="Check this machine for problems that would stop training.")
@click.argument("path", type=_STORE)
@output_options
@click.pass_context
def doctor(ctx: click.Context, path: Path, as_json: bool, quiet: bool) -> None:
    """Check this machine for problems that stop or slow down training from PATH. Exit code 5: one stops it.

    \b
    Example: zb doctor data/train
    """
    from zb_hdf5.commands.doctor import diagnose

    findings = diagnose(path)
    bad = any(finding.state == "problem" for finding in findings)
    lines = [(finding.name, finding.line()) for finding in findings]
    report = {"ok": not bad, "findings": [vars(finding) for finding in findings]}
    print_report(report, lines, as_json=as_json, quiet=quiet)
    if bad:
        ctx.exit(UnavailableError.exit_code)


@zb.command(short_help="Download numbered files over HTTP.")
@click.argument("url_template")
@click.option("-n", "--count", required=True, type=click.IntRange(1), help="Number of files.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Number of the first file.")
@click.option("-w", "--workers", type=click.IntRange(1), default=4, show_default=True, help="Files at the same time.")
@click.option("-o", "--output", type=NewPath(), default=".", show_default=True, help="Folder for the files.")
@click.option("--sha256-file", type=_PATH, help="Expected digests, as sha256sum writes them.")
@output_options
@click.pass_context
def fetch(
    ctx: click.Context,
    url_template: str,
    count: int,
    first: int,
    workers: int,
    output: Path,
    sha256_file: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Download the numbered files of URL_TEMPLATE, whose number is a format field; continue an earlier run.

    \b
    Example: zb fetch "https://example.org/shard_{:05d}.parquet" -n 10 -o text/
    """
    from zb_hdf5.commands.fetch import fetch_shards, read_digests

    digests = None if sha256_file is None else read_digests(sha256_file)
    with Progress("fetch", 0, enabled=not quiet, unit="B") as progress:
        reports = fetch_shards(
            url_template, count, output, first=first, workers=workers, sha256=digests, progress=progress.advance
        )
    bad = [report.problem for report in reports if report.problem is not None]
    lines = [(report.path, f"FAILED: {report.problem}") for report in reports if report.problem is not None]
    size = format_bytes(sum(report.byte_count for report in reports if report.fetched))
    new = sum(report.fetched for report in reports)
    there = count - new - len(bad)
    lines.append(("fetched", f"{new:,} of {counted(count, 'file')}, {size}; {there:,} were there already"))
    print_report(
        {"ok": not bad, "files": [_as_json(report) for report in reports]}, lines, as_json=as_json, quiet=quiet
    )
    if bad:
        ctx.exit(max(problem.exit_code for problem in bad))


def _size(index: ShardIndex) -> str:
    return f"{counted(len(index.shards), 'shard')}, {counted(index.num_batches, 'batch', 'batches')}"


def _as_json(report: FetchReport) -> dict[str, Any]:
    return {**vars(report), "problem": None if report.problem is None else str(report.problem)}
