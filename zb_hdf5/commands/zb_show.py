"""`zb show`: rows or documents as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import (
    FROM_0,
    FROM_1,
    STORE,
    Output,
    dataset_options,
    output_options,
    text_option,
    tokenizer_option,
)
from zb_hdf5.option_groups import GroupedCommand, option_group

if TYPE_CHECKING:
    from zb_hdf5.read_as import ReadAs

#: Rows of a sample by default.
SAMPLE: Final = 3
NO_TOKENIZER: Final = "not known here, so ids are shown; pass --tokenizer to see text"

_rows_option = option_group("Rows to show")


@click.command("show", cls=GroupedCommand)
@click.argument("path", type=STORE)
@_rows_option("--batch", type=FROM_0, help="Show the rows of this batch.")
@_rows_option("--document", type=FROM_0, help="Show this document.")
@_rows_option("--sample", type=FROM_1, help=f"Show so many rows from anywhere. [default: {SAMPLE}]")
@_rows_option("--seed", type=FROM_0, default=0, help="Draws the sample.")
@_rows_option(
    "--field-set", "sets", multiple=True, help="Show the values of this field set too; may be given repeatedly."
)
@tokenizer_option
@text_option("--tokens", type=FROM_1, default=256, help="Tokens shown of each row.")
@text_option("--all", "all_tokens", is_flag=True, help="Show all tokens of each row.")
@_rows_option("--batch-size", type=FROM_1, help="Rows of a batch of a token stream. [default: 1]")
@_rows_option("--seq-len", type=FROM_1, help="Tokens of a row of a token stream. [default: 512]")
@dataset_options
@output_options
def zb_show(
    path: Path, all_tokens: bool, sets: tuple[str, ...], read_as: ReadAs, split: str | None, **given: Any
) -> Output:
    """Show rows or documents of PATH as text, with the boundaries of documents, fields and spans.

    Characters that do not print are spelt out. Colours are for terminals; NO_COLOR turns them off.

    \b
    Example: zb show data/train --batch 12 --tokenizer tok.json
    Example: zb show stream.h5 --document 7 --all
    """
    from zb_hdf5.commands.row_values import drawn_values, shown_sets, values_in_row, values_json, with_values
    from zb_hdf5.commands.rows import chosen_rows, drawn_rows, open_to_look, rows_json, tokenizer_to_look

    batch, document, sample = (given[name] for name in ("batch", "document", "sample"))
    if sum(asked is not None for asked in (batch, document, sample)) > 1:
        raise click.UsageError("--batch, --document and --sample exclude each other: pass one")
    limit = None if all_tokens else given["tokens"]
    with open_to_look(path, given["batch_size"], given["seq_len"], read_as, split) as reader:
        known = tokenizer_to_look(reader, given["tokenizer"])
        rows = chosen_rows(reader, batch=batch, document=document, sample=sample or SAMPLE, seed=given["seed"])
        of_sets = shown_sets(reader, sets)
        values = [values_in_row(of_sets, row) for row in rows]
    rows = [with_values(*each) for each in zip(rows, values, strict=True)]
    shown = rows_json(rows, known, limit)
    if sets:
        shown = [{**row, **values_json(each)} for row, each in zip(shown, values, strict=True)]
    drawn = (
        line
        for row, each in zip(rows, values, strict=True)
        for line in (*drawn_rows([row], known, limit=limit), *drawn_values(row, each, known, all_tokens=all_tokens))
    )
    return Output(
        {"path": str(path), "tokenizer": known and known.spec, "rows": shown},
        [("path", str(path)), ("tokenizer", known.spec if known else NO_TOKENIZER)],
        drawn,
    )
