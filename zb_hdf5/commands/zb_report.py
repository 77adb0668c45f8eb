"""`zb report`: writes a page with the statistics of a store."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zb_hdf5.commands.zb_show import SAMPLE
from zb_hdf5.console import (
    FROM_0,
    FROM_1,
    NEW,
    STORE,
    Output,
    Progress,
    dataset_options,
    output_options,
    tokenizer_option,
    typed_command,
)
from zb_hdf5.errors import ArgumentError
from zb_hdf5.option_groups import GroupedCommand, option_group

if TYPE_CHECKING:
    from zb_hdf5.read_as import ReadAs

_page_option = option_group("Page")
_counts_option = option_group("Counts and samples")


@click.command("report", cls=GroupedCommand)
@click.argument("path", type=STORE)
@_page_option("--output", "-o", type=NEW, required=True, help="HTML file to write.")
@_counts_option("--sample-batches", type=FROM_1, help="Look at so many batches, evenly spread. [default: all]")
@_counts_option("--sample", type=FROM_0, default=SAMPLE, help="Rows shown as text.")
@_counts_option("--seed", type=FROM_0, default=0, help="Draws the rows.")
@tokenizer_option
@_page_option("--force", is_flag=True, help="Replace an existing output.")
@dataset_options
@output_options
def zb_report(
    path: Path,
    output: Path,
    sample_batches: int | None,
    sample: int,
    seed: int,
    tokenizer: str | None,
    force: bool,
    read_as: ReadAs,
    split: str | None,
) -> Output:
    """Write a page with the statistics of PATH.

    It has histograms of tokens and of lengths of documents, tokens that are frequent or never used, repeated
    documents, and samples as text. Its first sentence tells whether the tokens agree with their
    crc32. It is one HTML file and needs no network. Only the time and the command differ when it is made again.

    \b
    Example: zb report data/train -o report.html
    """
    from zb_hdf5.commands.description import describe_open, open_to_describe
    from zb_hdf5.commands.page import Provenance, report_json, report_page
    from zb_hdf5.commands.rows import batches_to_look, chosen_rows, tokenizer_to_look
    from zb_hdf5.commands.set_summary import summaries_of
    from zb_hdf5.commands.statistics import measure
    from zb_hdf5.files.publishing import refuse_existing, write_atomically

    if not output.parent.is_dir():
        raise ArgumentError(f"{output}: expected a folder to write into, found no {output.parent}; make it first")
    if not force:
        refuse_existing(output)
    with open_to_describe(path, read_as, split) as opened:
        reader = batches_to_look(opened.corpus, read_as=read_as)
        known = tokenizer_to_look(reader, tokenizer)
        # the rows leave their files open, of which those that compare whole chunks take the descriptors
        rows = chosen_rows(reader, sample=sample, seed=seed) if reader.num_batches else []
        with Progress("report", 0) as progress:
            found = measure(reader, sample_batches, progress.advance)
        vocab_size = reader.meta.vocab_size or (known.vocab_size if known else 0)
        numbers = report_json(path, found, vocab_size) | {"field_sets": summaries_of(path)}
        making = Provenance(typed_command(), f"{datetime.now(UTC):%Y-%m-%d at %H:%M} UTC")
        page = report_page(numbers, found, reader, rows, known, describe_open(opened), making)
        write_atomically(output, page.encode("utf-8"))
    return Output(
        {"output": str(output), **numbers},
        [
            ("wrote", str(output)),
            ("looked at", f"{found.tokens:,} of {found.num_tokens:,} tokens"),
            ("repeated", f"{found.duplicates:,} of {found.units:,} {found.unit}s"),
        ],
    )
