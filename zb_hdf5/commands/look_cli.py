"""`zb show`, `zb report` and `zb which`: their words and options."""

from __future__ import annotations

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
def show(path: Path, all_tokens: bool, as_json: bool, quiet: bool, **given: Any) -> None:
    """Show rows or documents of PATH as text, with the boundaries of documents, fields and spans.

    Characters that do not print are spelt out. Colours are for terminals; NO_COLOR turns them off.

    \b
    Example: zb show data/train --batch 12 --tokenizer hf:tok.json
    Example: zb show stream.h5 --document 7 --all
    """
    from zb_hdf5.commands.rows import chosen_rows, open_to_look, tokenizer_to_look
    from zb_hdf5.commands.show import print_rows, rows_json

    batch, document, sample = (given[name] for name in ("batch", "document", "sample"))
    if sum(choice is not None for choice in (batch, document, sample)) > 1:
        raise click.UsageError("--batch, --document and --sample exclude each other: pass one")
    limit = None if all_tokens else given["tokens"]
    with open_to_look(path, given["batch_size"], given["seq_len"]) as reader:
        known = tokenizer_to_look(reader, given["tokenizer"])
        rows = chosen_rows(reader, batch, document, sample or SAMPLE, given["seed"])
        found = {"path": str(path), "tokenizer": known and known.spec, "rows": rows_json(rows, known, limit)}
        lines = [("path", str(path)), ("tokenizer", known.spec if known else NO_TOKENIZER)]
        print_report(found, lines, as_json=as_json, quiet=quiet)
        if not (as_json or quiet):
            print_rows(rows, known, limit=limit)


@click.command(short_help="Write a page with the statistics of a store.")
@click.argument("path", type=_PATH)
@click.option("--output", "-o", type=NewPath(), required=True, help="HTML file to write.")
@click.option("--sample-batches", type=click.IntRange(1), help="Look at so many batches, evenly spread. [default: all]")
@click.option("--sample", type=click.IntRange(0), default=SAMPLE, show_default=True, help="Rows shown as text.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Draws the rows.")
@click.option("--tokenizer", help=_TOKENIZER)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@output_options
def report(path: Path, output: Path, force: bool, as_json: bool, quiet: bool, **given: Any) -> None:
    """Write a page with the statistics of PATH.

    It has histograms of tokens and of lengths of documents, tokens that are frequent or never used, documents that are
    there twice, and samples as text. It is one HTML file, needs no network, and is the same for the same store.

    \b
    Example: zb report data/train -o report.html
    """
    from zb_hdf5.commands.report import report_json, report_page, vocabulary
    from zb_hdf5.commands.rows import open_to_look, rows_of, sample_of, tokenizer_to_look
    from zb_hdf5.commands.statistics import measure
    from zb_hdf5.files.publishing import refuse_existing, write_atomically

    if not output.parent.is_dir():
        raise ArgumentError(f"{output}: expected a folder to write into, found no {output.parent}; make it first")
    if not force:
        refuse_existing(output)
    with open_to_look(path) as reader:
        known = tokenizer_to_look(reader, given["tokenizer"])
        with Progress("report", 0, enabled=not quiet) as progress:
            found = measure(path, sample_batches=given["sample_batches"], progress=progress.advance)
        rows = rows_of(reader, sample_of(reader.num_records, given["sample"], given["seed"]))
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
@click.option("--text", is_flag=True, help="Print the text of the parts too.")
@click.option("--tokenizer", help=_TOKENIZER)
@click.option(
    "--all", "all_pieces", is_flag=True, help=f"All rows and text, not those of the first {PIECES_SHOWN} parts."
)
@output_options
def which(stores: tuple[str, ...], all_pieces: bool, as_json: bool, quiet: bool, **given: Any) -> None:
    """Name the shard, batch and rows of a training step, from the loader state of a checkpoint, or of a stored batch.

    Documents in them are named where they are stored.

    \b
    Example: zb which data/train --state loader.json --step 1200 --world-size 8
    Example: zb which web=data/web code=data/code --state mixed.json --step 1200
    Example: zb which data/train --batch 12 --text --tokenizer hf:tok.json
    Example: zb which stream.h5 --batch 12 --batch-size 8 --seq-len 1024
    """
    from zb_hdf5.commands.which import origin_of_batch, origins, print_origins

    batch, state_path, step = (given.pop(name) for name in ("batch", "state_path", "step"))
    world_size, seq_len = given.pop("world_size"), given.pop("seq_len")
    if batch is not None and state_path is None and step is None and len(stores) == 1:
        asked, found = {"batch": batch}, [origin_of_batch(stores[0], batch, seq_len=seq_len, **given)]
    elif batch is None and state_path is not None and step is not None:
        asked, found = {"step": step}, origins(stores, state_path, step, world_size=world_size, **given)
    else:
        raise click.UsageError("pass one STORE and --batch, or --state and --step")
    if as_json or quiet:
        report = {**asked, "batches": [each.to_json() for each in found]}
        print_report(report, [], as_json=as_json, quiet=quiet)
    else:
        print_origins(found, None if all_pieces else PIECES_SHOWN)
