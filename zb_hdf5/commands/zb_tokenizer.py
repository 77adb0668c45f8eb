"""`zb tokenizer`: trains a tokenizer on text."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zb_hdf5.console import FROM_1, LOCAL, NEW, SHARE, SIZE, Output, Progress, is_quiet, output_options
from zb_hdf5.option_groups import GroupedCommand, option_group
from zb_hdf5.text.dropped import DEFAULT_MAX_DROPPED

_tokenizer_option = option_group("Tokenizer")
_corpus_option = option_group("Text")


@click.group("tokenizer")
def zb_tokenizer() -> None:
    """Make a tokenizer.

    \b
    Example: zb tokenizer train corpus/ --vocab-size 32768 -o tok.json
    """


@zb_tokenizer.command("train", cls=GroupedCommand, short_help="Train byte-level BPE on text.")
@click.argument("src", type=LOCAL, nargs=-1, required=True)
@_tokenizer_option("--output", "-o", type=NEW, required=True, help="tokenizer.json to write.")
@_tokenizer_option("--vocab-size", type=FROM_1, default=32768, help="Tokens, the boundary token included.")
@_corpus_option("--text-column", default="text", help="Column (or JSON key) that holds the text.")
@_corpus_option(
    "--max-dropped",
    type=SHARE,
    default=DEFAULT_MAX_DROPPED,
    help="Share of the lines, rows or files that may be dropped.",
)
@_corpus_option("--max-line", type=SIZE, help="Size of the longest line, or text file. [default: 256MiB]")
@_corpus_option("--split", help="Split to train on: train, val, test, or all. [default: that for training]")
@_tokenizer_option("--force", is_flag=True, help="Replace an existing result when the new one is whole.")
@output_options
def zb_tokenizer_train(
    src: tuple[Path, ...],
    output: Path,
    vocab_size: int,
    text_column: str,
    max_dropped: float,
    max_line: int | None,
    split: str | None,
    force: bool,
) -> Output:
    """Train byte-level BPE on the text of SRC: .parquet, .jsonl (.gz, .zst) and .txt files, and folders of them.

    Writes a tokenizer.json for Hugging Face tokenizers, and a .tiktoken file of ranks that encodes the same.
    Memory grows with the number of different words, not with the text.

    \b
    Example: zb tokenizer train corpus/ --vocab-size 32768 -o tok.json
    """
    from zb_hdf5.files.listing import counts_of_left_out, files_left_out, left_out_in_words
    from zb_hdf5.files.look import Look
    from zb_hdf5.files.named_splits import AUTO_SPLIT
    from zb_hdf5.text.text_corpus import open_documents
    from zb_hdf5.text.training import files_of_split, train_tokenizer

    look = Look(src[0])
    found = open_documents(src, column=text_column, max_line=max_line, look=look)
    read = [file.path for file in found]
    left_out = [file for path in src for file in files_left_out(look.of(path), read)]
    files = files_of_split(found, src, split or AUTO_SPLIT)
    total = 2 * sum(file.text_bytes(number) for file in files for number in range(file.num_row_groups))
    has_bars = not is_quiet() and sys.stderr.isatty()  # which the tokenizers library draws itself
    with Progress("training", total, enabled=False if has_bars else None, unit="B") as progress:
        report = train_tokenizer(
            files,
            output,
            vocab_size,
            max_dropped=max_dropped,
            overwrite=force,
            progress=progress.advance,
            show_bars=has_bars,
        )
    short = ""
    if report.vocab_size < vocab_size:
        short = f" of {vocab_size:,}: each word of the text is one token by then, so that no two are left to merge"
    return Output(
        {**report.to_json(), **counts_of_left_out(left_out)},
        [
            ("wrote", f"{report.path} and {report.ranks_path}"),
            ("tokens", f"{report.vocab_size:,}{short}"),
            ("trained on", f"{report.documents - report.held_out_documents:,} of {report.documents:,} documents"),
            ("bytes/token", f"{report.bytes_per_token:.3f} on the {report.held_out_documents:,} held out"),
            ("digest", report.digest),
            *([("note", left_out_in_words(left_out))] if left_out else []),
            *report.dropped.lines(),
        ],
    )
