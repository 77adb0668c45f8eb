"""`zb show` and `zb report`: their words and options."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import click

from zb_hdf5.console import ExistingPath, NewPath, Progress, output_options, print_report

_PATH: Any = ExistingPath()
_TOKENIZER: Final = (
    "byte, tiktoken:NAME, tiktoken:FILE or hf:tokenizer.json. [default: the one that the store names, if it lies "
    "beside the store]"
)
#: Of a pipe or file.
PLAIN_COLUMNS: Final = 80
SAMPLE: Final = 3


@click.command(short_help="Show rows or documents as text.")
@click.argument("path", type=_PATH)
@click.option("--batch", type=click.IntRange(0), help="Show the rows of this batch.")
@click.option("--document", type=click.IntRange(0), help="Show this document of a token stream.")
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
        report = {"path": str(path), "tokenizer": known and known.spec, "rows": rows_json(rows, known, limit)}
        if as_json or quiet:
            print_report(report, [], as_json=as_json, quiet=quiet)
            return
        terminal = sys.stdout.isatty()
        columns = max(20, shutil.get_terminal_size().columns) if terminal else PLAIN_COLUMNS
        colour = terminal and not os.environ.get("NO_COLOR")
        if known is None:
            click.echo("ids: the store's tokenizer is not known here; pass --tokenizer to see text", err=True)
        for number, row in enumerate(rows):
            click.echo("\n" * (number > 0), nl=False)
            for line in row_lines(row, known, limit=limit, columns=columns, colour=colour):
                click.echo(line)
