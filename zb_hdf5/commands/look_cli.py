"""`zb show`, `zb report` and `zb which`: their words and options."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import click

from zb_hdf5.console import ExistingPath, NewPath, Progress, output_options, print_report
from zb_hdf5.errors import ArgumentError

_PATH: Any = ExistingPath(urls=True)
_TOKENIZER: Final = (
    "byte, tiktoken:NAME, tiktoken:FILE or hf:tokenizer.json. [default: the one that the store names, if it is in "
    "its folder]"
)
#: Columns of a pipe or file.
PLAIN_COLUMNS: Final = 80
SAMPLE: Final = 3
PIECES_SHOWN: Final = 64
NO_TOKENIZER: Final = "not known here, so ids are shown; pass --tokenizer to see text"


@click.command(short_help="Show rows or documents as text.")
@click.argument("path", type=_PATH)
@click.option("--batch", type=click.IntRange(0), help="Show the rows of this batch.")
@click.option("--document", type=click.IntRange(0), help="Show this document.")
@click.option("--sample", type=click.IntRange(1), help=f"Show so many rows from anywhere. [default: {SAMPLE}]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Draws the sample.")
@click.option("--tokenizer", help=_TOKENIZER)
@click.option("--tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens shown of each row.")
@click.option("--all", "all_tokens", is_flag=True, help="Show all tokens of each row.")
@click.option("--batch-size", type=click.IntRange(1), help="Rows of a batch of a token stream. [default: 1]")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens of a row of a token stream. [default: 512]")
@output_options
def show(
    path: Path,
    batch: int | None,
    document: int | None,
    sample: int | None,
    seed: int,
    tokenizer: str | None,
    tokens: int,
    all_tokens: bool,
    batch_size: int | None,
    seq_len: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show rows or documents of PATH as text, with the boundaries of documents, fields and spans.

    Characters that do not print are spelt out. Colours are for terminals; NO_COLOR turns them off.

    \b
    Example: zb show data/train --batch 12 --tokenizer hf:tok.json
    Example: zb show stream.h5 --document 7 --all
    """
    from zb_hdf5.commands.show import chosen_rows, open_to_look, row_lines, rows_json, tokenizer_to_look

    if sum(choice is not None for choice in (batch, document, sample)) > 1:
        raise click.UsageError("--batch, --document and --sample exclude each other: pass one")
    limit = None if all_tokens else tokens
    with open_to_look(path, batch_size, seq_len) as reader:
        known = tokenizer_to_look(reader, tokenizer)
        rows = chosen_rows(reader, batch, document, sample or SAMPLE, seed)
        if as_json or quiet:
            shown = rows_json(rows, known, limit)
            found = {"path": str(path), "tokenizer": known and known.spec, "rows": shown}
            print_report(found, [], as_json=as_json, quiet=quiet)
            return
        lines = [("path", str(path)), ("tokenizer", known.spec if known else NO_TOKENIZER)]
        print_report({}, lines, as_json=False, quiet=False)
        terminal = sys.stdout.isatty()
        columns = max(20, shutil.get_terminal_size().columns) if terminal else PLAIN_COLUMNS
        colour = terminal and not os.environ.get("NO_COLOR")
        for row in rows:
            click.echo()
            for line in row_lines(row, known, limit=limit, columns=columns, colour=colour):
                click.echo(line)


@click.command(short_help="Write a page with the statistics of a store.")
@click.argument("path", type=_PATH)
@click.option("--output", "-o", type=NewPath(), required=True, help="HTML file to write.")
@click.option("--sample-batches", type=click.IntRange(1), help="Look at so many batches, evenly spread. [default: all]")
@click.option("--sample", type=click.IntRange(0), default=SAMPLE, show_default=True, help="Rows shown as text.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Draws the rows.")
@click.option("--tokenizer", help=_TOKENIZER)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@output_options
def report(
    path: Path,
    output: Path,
    sample_batches: int | None,
    sample: int,
    seed: int,
    tokenizer: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write a page with the statistics of PATH.

    It has histograms of tokens and of lengths of documents, tokens that are frequent or never used, documents that are
    there twice, and samples as text. It is one HTML file, needs no network, and is the same for the same store.

    \b
    Example: zb report data/train -o report.html
    """
    from zb_hdf5.commands.report import report_json, report_page, vocabulary
    from zb_hdf5.commands.rows import rows_of, sample_of
    from zb_hdf5.commands.show import open_to_look, tokenizer_to_look
    from zb_hdf5.commands.statistics import measure
    from zb_hdf5.files.publishing import refuse_existing, write_atomically

    if not output.parent.is_dir():
        raise ArgumentError(f"{output}: expected a folder to write into, found no {output.parent}; make it first")
    if not force:
        refuse_existing(output)
    with open_to_look(path) as reader:
        known = tokenizer_to_look(reader, tokenizer)
        with Progress("report", 0, enabled=not quiet) as progress:
            found = measure(path, sample_batches=sample_batches, progress=progress.advance)
        rows = rows_of(reader, sample_of(reader.num_records, sample, seed))
        write_atomically(output, report_page(path, found, reader, rows, known).encode("utf-8"))
        numbers = report_json(path, found, vocabulary(reader, known))
    lines = [
        ("wrote", str(output)),
        ("looked at", f"{found.tokens:,} of {found.num_tokens:,} tokens"),
        ("repeated", f"{found.duplicates.units:,} of {found.units:,} {found.unit}s"),
    ]
    print_report({"output": str(output), **numbers}, lines, as_json=as_json, quiet=quiet)


@click.command(short_help="Name the rows and documents of a training step or a batch.")
@click.argument("stores", nargs=-1, required=True, metavar="STORE | NAME=STORE...")
@click.option("--batch", type=click.IntRange(0), help="A stored batch of STORE; needs no state.")
@click.option("--state", "state_path", type=ExistingPath(), help="A loader's state_dict() as JSON.")
@click.option("--step", type=click.IntRange(0), help="Step of the state's epoch (of the run, if mixed).")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Records per rank and step, or of --batch of a stream. [default: stored, 1]",
)
@click.option("--seq-len", type=click.IntRange(1), help="Tokens of a row of --batch of a token stream. [default: 512]")
@click.option("--world-size", type=click.IntRange(1), default=1, show_default=True, help="Ranks of the run.")
@click.option("--text", is_flag=True, help="Print the text of the documents' parts too.")
@click.option("--tokenizer", help=_TOKENIZER)
@click.option("--all", "all_pieces", is_flag=True, help=f"Name all parts of documents, not the first {PIECES_SHOWN}.")
@output_options
def which(
    stores: tuple[str, ...],
    batch: int | None,
    state_path: Path | None,
    step: int | None,
    batch_size: int | None,
    seq_len: int | None,
    world_size: int,
    text: bool,
    tokenizer: str | None,
    all_pieces: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Name the shard, batch and rows of a training step, from the loader state of a checkpoint, or of a stored batch.

    Documents in them are named where they are stored.

    \b
    Example: zb which data/train --state loader.json --step 1200 --world-size 8
    Example: zb which web=data/web code=data/code --state mixed.json --step 1200
    Example: zb which data/train --batch 12 --text --tokenizer hf:tok.json
    Example: zb which stream.h5 --batch 12 --batch-size 8 --seq-len 1024
    """
    from zb_hdf5.commands.which import origins, origins_lines, origins_of_batch

    if batch is not None and state_path is None and step is None and len(stores) == 1:
        asked, found = {"batch": batch}, origins_of_batch(stores[0], batch, batch_size, seq_len, tokenizer, text)
    elif batch is None and state_path is not None and step is not None:
        asked = {"step": step}
        found = origins(stores, state_path, step, batch_size, world_size, tokenizer, text)
    else:
        raise click.UsageError("pass one STORE and --batch, or --state and --step")
    lines = origins_lines(found, None if all_pieces else PIECES_SHOWN)
    print_report({**asked, "batches": found}, lines, as_json=as_json, quiet=quiet)
