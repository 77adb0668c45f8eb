"""`zb`: the commands that look at stores, check them and convert them."""

from __future__ import annotations

import functools
import re
import shutil
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import (
    FROM_0,
    FROM_1,
    LOCAL,
    NEW,
    SIZE,
    STORE,
    CommandGroup,
    Output,
    Parsed,
    Progress,
    counted,
    format_bytes,
    is_quiet,
    output_options,
)
from zb_hdf5.errors import ArgumentError, FormatError, Remedy, UnavailableError
from zb_hdf5.formats.registry import AXES
from zb_hdf5.version import __version__

if TYPE_CHECKING:
    from zb_hdf5.store.index import ShardIndex
    from zb_hdf5.store.opening import Choice

_TOKENIZER: Final = (
    "byte, tok.json, tok.tiktoken, or tiktoken:NAME. [default: the one that the store names, if it is in its folder]"
)
SAMPLE: Final = 3
ROWS_SHOWN: Final = 16
NO_TOKENIZER: Final = "not known here, so ids are shown; pass --tokenizer to see text"


def dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--dataset` and `--axes`, for HDF5 files of other programs; the command gets both as its `choice`."""

    @click.option("--dataset", help="Dataset of an HDF5 file of another program. [default: the only one of integers]")
    @click.option("--axes", type=click.Choice([AXES]), help="Its axes are these: no entry is a mask or labels.")
    @functools.wraps(command)
    def run(dataset: str | None, axes: str | None, **given: Any) -> Any:
        return command(choice={"dataset": dataset, "axes": axes}, **given)

    return run


class ZbGroup(CommandGroup):
    """Adds `convert`, which lives outside this package and is imported only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "convert"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "convert":
            from zb_hdf5.converters.cli import convert_commands

            return convert_commands
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=ZbGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__)
def zb() -> None:
    """Token batches in HDF5 and .batch files: look at them, check them, convert them."""


@zb.command(short_help="Describe a file, store or unfinished conversion.")
@click.argument("path", type=STORE)
@dataset_options
@click.option("--batch-size", type=FROM_1, help="Show the epoch of a loader with this batch size. [default: as stored]")
@click.option("--seq-len", type=FROM_1, help="Show the epoch of a loader of so many tokens. [default: as stored]")
@click.option("--world-size", type=FROM_1, help="Show the epoch of a loader on so many ranks. [default: 1]")
@output_options
def info(path: Path, batch_size: int | None, seq_len: int | None, world_size: int | None, choice: Choice) -> Output:
    """Describe PATH: shape, tokens, documents, splits, and the layout of its batches.

    A .partial folder is described by the progress of its conversion.

    \b
    Example: zb info data/train
    Example: zb info stream.h5 --batch-size 64 --seq-len 1024 --world-size 8
    """
    from zb_hdf5.commands.info import describe, describe_epoch, describe_lines, epoch_text, interrupted

    if found := interrupted(path):
        return found
    description = describe(path, choice)
    lines = describe_lines(description)
    if batch_size or seq_len or world_size:
        epoch = describe_epoch(path, batch_size, seq_len, world_size or 1, **choice)
        return Output({**description, "epoch": epoch}, [*lines, ("epoch", epoch_text(epoch))])
    return Output(description, lines)


@zb.command(short_help="Show rows or documents as text.")
@click.argument("path", type=STORE)
@click.option("--batch", type=FROM_0, help="Show the rows of this batch.")
@click.option("--document", type=FROM_0, help="Show this document.")
@click.option("--sample", type=FROM_1, help=f"Show so many rows from anywhere. [default: {SAMPLE}]")
@click.option("--seed", type=FROM_0, default=0, help="Draws the sample.")
@click.option("--tokenizer", help=_TOKENIZER)
@click.option("--tokens", type=FROM_1, default=256, help="Tokens shown of each row.")
@click.option("--all", "all_tokens", is_flag=True, help="Show all tokens of each row.")
@click.option("--batch-size", type=FROM_1, help="Rows of a batch of a token stream. [default: 1]")
@click.option("--seq-len", type=FROM_1, help="Tokens of a row of a token stream. [default: 512]")
@dataset_options
@output_options
def show(path: Path, all_tokens: bool, choice: Choice, **given: Any) -> Output:
    """Show rows or documents of PATH as text, with the boundaries of documents, fields and spans.

    Characters that do not print are spelt out. Colours are for terminals; NO_COLOR turns them off.

    \b
    Example: zb show data/train --batch 12 --tokenizer tok.json
    Example: zb show stream.h5 --document 7 --all
    """
    from zb_hdf5.commands.rows import chosen_rows, drawn_rows, open_to_look, rows_json, tokenizer_to_look

    batch, document, sample = (given[name] for name in ("batch", "document", "sample"))
    if sum(choice is not None for choice in (batch, document, sample)) > 1:
        raise click.UsageError("--batch, --document and --sample exclude each other: pass one")
    limit = None if all_tokens else given["tokens"]
    with open_to_look(path, given["batch_size"], given["seq_len"], choice) as reader:
        known = tokenizer_to_look(reader, given["tokenizer"])
        rows = chosen_rows(reader, batch, document, sample or SAMPLE, given["seed"])
    return Output(
        {"path": str(path), "tokenizer": known and known.spec, "rows": rows_json(rows, known, limit)},
        [("path", str(path)), ("tokenizer", known.spec if known else NO_TOKENIZER)],
        drawn_rows(rows, known, limit=limit),
    )


@zb.command(short_help="Write a page with the statistics of a store.")
@click.argument("path", type=STORE)
@click.option("--output", "-o", type=NEW, required=True, help="HTML file to write.")
@click.option("--sample-batches", type=FROM_1, help="Look at so many batches, evenly spread. [default: all]")
@click.option("--sample", type=FROM_0, default=SAMPLE, help="Rows shown as text.")
@click.option("--seed", type=FROM_0, default=0, help="Draws the rows.")
@click.option("--tokenizer", help=_TOKENIZER)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@dataset_options
@output_options
def report(path: Path, output: Path, force: bool, choice: Choice, **given: Any) -> Output:
    """Write a page with the statistics of PATH.

    It has histograms of tokens and of lengths of documents, tokens that are frequent or never used, documents that are
    there twice, and samples as text. It is one HTML file, needs no network, and is the same for the same files and
    times.

    \b
    Example: zb report data/train -o report.html
    """
    from zb_hdf5.commands.report import report_json, report_page
    from zb_hdf5.commands.rows import chosen_rows, open_to_look, tokenizer_to_look
    from zb_hdf5.commands.statistics import measure
    from zb_hdf5.files.publishing import refuse_existing, write_atomically

    if not output.parent.is_dir():
        raise ArgumentError(f"{output}: expected a folder to write into, found no {output.parent}; make it first")
    if not force:
        refuse_existing(output)
    with open_to_look(path, choice=choice) as reader:
        known = tokenizer_to_look(reader, given["tokenizer"])
        with Progress("report", 0) as progress:
            found = measure(reader, given["sample_batches"], progress.advance)
        rows = chosen_rows(reader, None, None, given["sample"], given["seed"])
        numbers = report_json(path, found, reader.meta.vocab_size or (known.vocab_size if known else 0))
        write_atomically(output, report_page(numbers, found, reader, rows, known, choice).encode("utf-8"))
    return Output(
        {"output": str(output), **numbers},
        [
            ("wrote", str(output)),
            ("looked at", f"{found.tokens:,} of {found.num_tokens:,} tokens"),
            ("repeated", f"{found.duplicates:,} of {found.units:,} {found.unit}s"),
        ],
    )


@zb.command(short_help="Name the rows and documents of a training step or a batch.")
@click.argument("stores", nargs=-1, required=True, metavar="STORE | NAME=STORE...")
@click.option("--batch", type=FROM_0, help="A stored batch of STORE; needs no state.")
@click.option("--state", "state_path", type=LOCAL, help="A loader's state_dict() as JSON.")
@click.option("--step", type=FROM_0, help="Step of the state's epoch (of the run, if mixed).")
@click.option(
    "--batch-size", type=FROM_1, help="Records per rank and step, or of --batch of a stream. [default: stored, 1]"
)
@click.option("--seq-len", type=FROM_1, help="Tokens of a row of --batch of a token stream. [default: 512]")
@click.option("--world-size", type=FROM_1, default=1, help="Ranks of the run.")
@click.option("--text", is_flag=True, help="Print the text of the parts too.")
@click.option("--tokenizer", help=_TOKENIZER)
@click.option("--all", "all_rows", is_flag=True, help=f"Print all rows and text, not the first {ROWS_SHOWN} rows.")
@dataset_options
@output_options
def which(stores: tuple[str, ...], all_rows: bool, **given: Any) -> Output:
    """Name the shard, batch and rows of a training step, from the loader state of a checkpoint, or of a stored batch.

    Documents in them are named where they are stored.

    \b
    Example: zb which data/train --state loader.json --step 1200 --world-size 8
    Example: zb which web=data/web code=data/code --state mixed.json --step 1200
    Example: zb which data/train --batch 12 --text --tokenizer tok.json
    Example: zb which stream.h5 --batch 12 --batch-size 8 --seq-len 1024
    """
    from zb_hdf5.commands.which import drawn_origins, origin_of_batch, origins, shard_lines

    batch, state_path, step = (given.pop(name) for name in ("batch", "state_path", "step"))
    world_size, seq_len = given.pop("world_size"), given.pop("seq_len")
    if batch is not None and state_path is None and step is None and len(stores) == 1:
        asked, found = {"batch": batch}, [origin_of_batch(stores[0], batch, seq_len=seq_len, **given)]
    elif batch is None and state_path is not None and step is not None:
        asked, found = {"step": step}, origins(stores, state_path, step, world_size=world_size, **given)
    else:
        raise click.UsageError("pass one STORE and --batch, or --state and --step")
    return Output(
        {**asked, "batches": [each.to_json() for each in found]},
        shard_lines(found),
        drawn_origins(found, None if all_rows else ROWS_SHOWN),
    )


def ranks_named(text: str) -> list[range]:
    """Return the numbers of 8-15, or 0,4,8-15."""
    matches = [re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip()) for part in text.split(",")]
    ranks = [range(int(match[1]), int(match[2] or match[1]) + 1) for match in matches if match]
    if not all(ranks) or None in matches:
        raise ArgumentError(f"{text!r} is no list of ranks such as 8-15")
    return ranks


@zb.command(short_help="Copy the batches of a node's ranks to its own disk.")
@click.argument("store", type=STORE)
@click.argument("folder", type=NEW)
@click.option("--state", "state_path", type=LOCAL, help="Loader state, as JSON: go on from there to the epoch's end.")
@click.option("--seed", type=int, default=42, help="Seed of the loader; a state has its own.")
@click.option(
    "--shuffle", type=click.Choice(["global", "records", "block", "sequential"]), default="global",
    help="Order of the loader; a state has its own.",
)  # fmt: skip
@click.option("--epoch", type=FROM_0, default=0, help="Epoch of the loader; a state has its own.")
@click.option("--batch-size", type=FROM_1, help="Batch size of the loader. [default: as stored]")
@click.option("--seq-len", type=FROM_1, help="Record length of the loader. [default: as stored]")
@click.option("--targets", is_flag=True, help="The loader of a token stream has targets=True.")
@click.option("--field", "fields", multiple=True, help="Copy the values of this field too; may be given repeatedly.")
@click.option("--ranks", type=Parsed("ranks", ranks_named), help="The ranks of this node, such as 8-15. [default: all]")
@click.option("--world-size", type=FROM_1, default=1, help="Ranks of the whole job.")
@click.option("--cache-bytes", type=SIZE, help="What FOLDER may hold. [default: 90 % of the free space]")
@output_options
def stage(store: Path, folder: Path, ranks: list[range] | None, world_size: int, **given: Any) -> Output:
    """Copy the batches of STORE that the ranks of this node will read in an epoch to FOLDER.

    STORE is a path, or a URL such as s3://bucket/train. Loaders with cache=FOLDER then read the batches there. Those
    that are there are not copied again: the command can be killed, and run again. A state at the end of its epoch
    stands for the next epoch.

    \b
    Example: zb stage data/train $TMPDIR/cache --seed 42 --batch-size 32 \\
               --ranks 8-15 --world-size 64
             zb stage data/train $TMPDIR/cache --state loader.json \\
               --ranks 8-15 --world-size 64
    """
    from zb_hdf5.commands.stage import stage_batches

    ranks = ranks or [range(world_size)]
    if (last := max(part[-1] for part in ranks)) >= world_size:
        raise click.UsageError(f"--ranks: expected ranks below --world-size {world_size}, found {last}")
    with Progress("stage", 0, unit="B") as progress:
        report = stage_batches(store, folder, chain(*ranks), world_size, progress, **given)
    units, held = report["units"], report["present"] + report["copied"]
    size = f"{counted(units, report['unit'])}, {format_bytes(report['num_bytes'])}"
    lines = [("staged", f"{held:,} of {size}; {report['present']:,} were there already")]
    if left := units - held:
        lines.append(("left out", f"{counted(left, report['unit'])}: the cache or its disk is full; see 'zb cache'"))
    return Output(report, lines)


@zb.group()
def cache() -> None:
    """Show and free the stores in a cache folder."""


@cache.command(short_help="Show the stores in a cache folder.")
@click.argument("folder", type=LOCAL)
@output_options
def ls(folder: Path) -> Output:
    """Show which stores fill the cache FOLDER.

    \b
    Example: zb cache ls $TMPDIR/cache
    """
    from zb_hdf5.store.cache import stores_in

    found = stores_in(folder)
    report = {"stores": [{"folder": str(path), "store": store, "num_bytes": size} for path, store, size in found]}
    lines = [(path.name[:17], f"{format_bytes(size)} of {store}") for path, store, size in found]
    lines.append(("all", f"{counted(len(found), 'store')}, {format_bytes(sum(size for *_, size in found))}"))
    return Output(report, lines)


@cache.command(short_help="Remove stores from a cache folder.")
@click.argument("folder", type=LOCAL)
@click.option("--store", help="Remove this path or URL only. [default: all stores]")
@output_options
def rm(folder: Path, store: str | None) -> Output:
    """Remove the stores that fill the cache FOLDER. Running loaders go on with the files that they have open.

    \b
    Example: zb cache rm $TMPDIR/cache
    """
    from zb_hdf5.store.cache import stores_in

    found = [each for each in stores_in(folder) if store in (None, each[1])]
    for path, *_ in found:
        shutil.rmtree(path)
    num_bytes = sum(size for *_, size in found)
    return Output(
        {"removed": [str(path) for path, *_ in found], "num_bytes": num_bytes},
        [("removed", f"{counted(len(found), 'store')}, {format_bytes(num_bytes)}")],
    )


@zb.command(short_help="Compare every batch with its stored digests.")
@click.argument("path", type=STORE)
@click.option("--workers", type=FROM_1, help="Shards checked at the same time. [default: the cores]")
@dataset_options
@output_options
def verify(path: Path, workers: int | None, choice: Choice) -> Output:
    """Compare every batch and shard of PATH with its stored digests.

    \b
    Exit codes:
      0  verified: every file is as it was written
      3  bad: the first bad batch of each damaged file is named
      4  bad: a file is truncated, missing, or not finished
      5  this machine cannot read it (a lock, a missing HDF5 filter)
      6  not verified: no digest is stored; the report names the missing one

    \b
    Example: zb verify data/train
    """
    from zb_hdf5.commands.info import verdict
    from zb_hdf5.store.verify import ShardReport, verify_store

    try:
        with Progress("verify", 0) as progress:
            reports = verify_store(
                path, workers=workers, progress=progress.advance, announce=lambda total: progress.advance(0, total),
                **choice,
            )  # fmt: skip
    except FormatError as error:  # of the index: there is no shard to report on
        # neither a store nor a part of one, or a dataset of another program that is another one
        if error.remedy in (Remedy.CONVERT, Remedy.AXES, Remedy.DATASET):
            raise
        reports = [ShardReport(str(path), problem=error)]
    return verdict(path, reports)


@zb.command(short_help="Save the good batches or documents in a new file.")
@click.argument("path", type=LOCAL)
@click.option("--output", type=NEW, help="New file; by default in the folder of PATH.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@output_options
def repair(path: Path, output: Path | None, force: bool, dry_run: bool) -> Output:
    """Save the good batches of PATH in a new file, or the good documents of a token stream.

    PATH itself is never changed.

    \b
    Example: zb repair data/train.h5.partial
    """
    from zb_hdf5.store.repair import repair as repair_path

    reports = repair_path(path, output=output, overwrite=force, dry_run=dry_run)
    return Output({"files": [vars(report) for report in reports]}, [(each.path, each.line()) for each in reports])


@zb.group()
def tokenizer() -> None:
    """Make a tokenizer."""


@tokenizer.command(short_help="Train byte-level BPE on text.")
@click.argument("src", type=LOCAL, nargs=-1, required=True)
@click.option("--output", "-o", type=NEW, required=True, help="tokenizer.json to write.")
@click.option("--vocab-size", type=FROM_1, default=32768, help="Tokens, the boundary token included.")
@click.option("--text-column", default="text", help="Column (or JSON key) that holds the text.")
@click.option("--force", is_flag=True, help="Replace an existing result when the new one is whole.")
@output_options
def train(src: tuple[Path, ...], output: Path, vocab_size: int, text_column: str, force: bool) -> Output:
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
    bars = not is_quiet() and sys.stderr.isatty()  # those that the tokenizers library draws itself
    with Progress("training", total, enabled=False if bars else None, unit="B") as progress:
        report = train_tokenizer(
            files, output, vocab_size, overwrite=force, progress=progress.advance, show_bars=not is_quiet()
        )
    return Output(
        report.to_json(),
        [
            ("wrote", f"{report.path} and {report.ranks_path}"),
            ("tokens", f"{report.vocab_size:,}"),
            ("trained on", f"{report.documents - report.held_out_documents:,} of {report.documents:,} documents"),
            ("bytes/token", f"{report.bytes_per_token:.3f} on the {report.held_out_documents:,} held out"),
            ("digest", report.digest),
            *report.dropped.lines(),
        ],
    )


@zb.group()
def index() -> None:
    """Work on the `shards.json` of stores."""


@index.command(short_help="Publish the store that the jobs of an array have written.")
@click.argument("path", type=NEW)
@click.option("--force", is_flag=True, help="Replace an existing result when the new one is whole.")
@output_options
def merge(path: Path, force: bool) -> Output:
    """Publish PATH, whose shards were written by the jobs of an array with --shard-range.

    \b
    Example: zb index merge train-h5
    """
    from zb_hdf5.converters.merge import merge_parts

    merged = merge_parts(path, overwrite=force)
    report = {"path": str(path), "num_shards": len(merged.shards), "num_batches": merged.num_batches}
    return Output(
        {**report, "sha256": merged.sha256},
        [("merged", f"{path}: {_size(merged)}"), ("sha256", merged.sha256)],
    )


@index.command(short_help="Rebuild a lost or outdated shards.json from its shards.")
@click.argument("folder", type=LOCAL)
@click.option("--force", is_flag=True, help="Replace a valid index; accept missing shards.")
@output_options
def rebuild(folder: Path, force: bool) -> Output:
    """Rebuild the lost, damaged or outdated shards.json of FOLDER from its shards.

    It is outdated, and needs --force, when a shard was repacked or replaced since it was written.

    \b
    Example: zb index rebuild data/train
    """
    from zb_hdf5.formats.registry import FORMATS
    from zb_hdf5.store.rebuild import ONLY_IN_SOME_FILES, UNKNOWN_SHUFFLE, rebuild_index

    made = rebuild_index(folder, force=force)
    lost = ["shuffle", "source", "splits"] if made.shuffle == UNKNOWN_SHUFFLE else []
    lost = lost[: 3 if made.shards[0].pieces is None else 2]
    if lost and FORMATS[made.shards[0].backend].has_sidecar:
        lost += ONLY_IN_SOME_FILES
    report = {"folder": str(folder), "shards": len(made.shards), "sha256": made.sha256, "not_recovered": lost}
    lines = [("index", _size(made)), ("sha256", made.sha256)]
    if lost:
        text = f"{', '.join(lost)}: only the lost index had them" + "; all shards are train" * ("splits" in lost)
        lines.append(("not recovered", text))
    return Output(report, lines)


@index.command(short_help="Write the .crc32 file that verifies a lone .batch.")
@click.argument("files", type=LOCAL, nargs=-1, required=True)
@output_options
def crc32(files: tuple[Path, ...]) -> Output:
    """Write FILE.batch.crc32 for each .batch file that has none.

    The new file holds the crc32 of each batch as it is now. From then on, 'zb verify' compares the .batch with it.

    \b
    Example: zb index crc32 data/train.batch
    """
    from zb_hdf5.store.rebuild import add_crc32_file

    written = [(path, add_crc32_file(path)) for path in files]
    return Output(
        {"written": [str(made) for _, made in written if made]},
        [(str(path), f"wrote {made.name}" if made else "has its .crc32 already") for path, made in written],
    )


@zb.command(short_help="Check this machine for problems that would stop training.")
@click.argument("path", type=STORE)
@dataset_options
@output_options
def doctor(path: Path, choice: Choice) -> Output:
    """Check this machine for problems that stop or slow down training from PATH. Exit code 5: one stops it.

    \b
    Example: zb doctor data/train
    """
    from zb_hdf5.commands.doctor import diagnose

    findings = diagnose(path, choice)
    bad = any(finding.state == "problem" for finding in findings)
    return Output(
        {"ok": not bad, "findings": [vars(finding) for finding in findings]},
        [(finding.name, finding.line()) for finding in findings],
        exit_code=UnavailableError.exit_code * bad,
    )


@zb.command(short_help="Download numbered files from a web server or a bucket.")
@click.argument("template", metavar="URL_TEMPLATE")
@click.option("-n", "--count", required=True, type=FROM_1, help="Number of files.")
@click.option("--first", type=FROM_0, default=0, help="Number of the first file.")
@click.option("-w", "--workers", type=FROM_1, default=4, help="Files at the same time.")
@click.option("-o", "--output", "folder", type=NEW, default=".", help="Folder for the files.")
@click.option("--sha256-file", type=LOCAL, help="Expected digests, as sha256sum writes them.")
@output_options
def fetch(count: int, sha256_file: Path | None, **how: Any) -> Output:
    """Download the numbered files of URL_TEMPLATE, whose number is a format field; continue an earlier run.

    \b
    Example: zb fetch "https://example.org/shard_{:05d}.parquet" -n 10 -o text/
    """
    from zb_hdf5.commands.fetch import fetch_shards, read_digests

    digests = None if sha256_file is None else read_digests(sha256_file)
    with Progress("fetch", 0, unit="B") as progress:
        reports = fetch_shards(count=count, sha256=digests, progress=progress.advance, **how)
    bad = [(report.path, report.problem) for report in reports if report.problem is not None]
    size = format_bytes(sum(report.byte_count for report in reports if report.fetched))
    new = sum(report.fetched for report in reports)
    fetched = f"{new:,} of {counted(count, 'file')}, {size}; {count - new - len(bad):,} were there already"
    files = [{**vars(report), "problem": report.problem and str(report.problem)} for report in reports]
    return Output(
        {"ok": not bad, "files": files},
        [*((path, f"FAILED: {problem}") for path, problem in bad), ("fetched", fetched)],
        exit_code=max((problem.exit_code for _, problem in bad), default=0),
    )


def _size(index: ShardIndex) -> str:
    return f"{counted(len(index.shards), 'shard')}, {counted(index.num_batches, 'batch', 'batches')}"
