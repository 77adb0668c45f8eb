"""`zb info`: describes a file, a store or an unfinished conversion."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zb_hdf5.console import FROM_1, STORE, Output, Progress, by_option, dataset_options, output_options
from zb_hdf5.option_groups import GroupedCommand, option_group

if TYPE_CHECKING:
    from zb_hdf5.read_as import ReadAs

_epoch_option = option_group("Epoch of a loader")


@click.command("info", cls=GroupedCommand)
@click.argument("path", type=STORE)
@_epoch_option(
    "--batch-size", type=FROM_1, help="Show the epoch of a loader with this batch size. [default: as stored]"
)
@_epoch_option("--seq-len", type=FROM_1, help="Show the epoch of a loader of so many tokens. [default: as stored]")
@_epoch_option(
    "--stride", type=FROM_1, help="Tokens from one record of a token stream to the next. [default: --seq-len]"
)
@_epoch_option("--world-size", type=FROM_1, help="Show the epoch of a loader on so many ranks. [default: 1]")
@by_option
@dataset_options
@output_options
def zb_info(
    path: Path,
    batch_size: int | None,
    seq_len: int | None,
    stride: int | None,
    world_size: int | None,
    by: str | None,
    read_as: ReadAs,
    split: str | None,
) -> Output:
    """Describe PATH: shape, tokens, documents, splits, and the layout of its batches.

    A .partial folder is described by the progress of its conversion. The exit code of a damaged store is that
    of the damage, as in zb verify; sizes and tables are looked at, and no batch is read.

    \b
    Example: zb info data/train
    Example: zb info stream.h5 --batch-size 64 --seq-len 1024 --world-size 8
    Example: zb info genome.h5 --batch-size 1 --seq-len 8192 --stride 7992
    Example: zb info text-h5 --by source
    """
    from zb_hdf5.commands.description import (
        describe_epoch,
        describe_lines,
        describe_open,
        epoch_text,
        interrupted,
        open_to_describe,
    )
    from zb_hdf5.commands.set_summary import set_line, summaries_of

    unfinished = interrupted(path)
    if unfinished is not None:
        return unfinished
    with open_to_describe(path, read_as, split) as opened:
        description = describe_open(opened)
        lines = describe_lines(description)
        if sets := {f"{each['name']} ({each['split']})": each for each in summaries_of(path)}:
            lines += [(f"field set {name}", set_line(each)) for name, each in sets.items()]
            description["field_sets"] = list(sets)
        if batch_size or seq_len or stride or world_size:
            epoch = describe_epoch(opened, batch_size, seq_len, stride, world_size or 1, read_as, split)
            lines.append(("epoch", epoch_text(epoch)))
            description["epoch"] = epoch
    text: Iterable[str] = ()
    if by is not None:
        from zb_hdf5.commands.shares import shares_of_path

        with Progress("count", 0, unit="records") as progress:
            shares = shares_of_path(path, by, read_as, split, progress)
        description |= shares.to_json()
        lines.append(shares.line())
        text = shares.table()
    return Output(description, lines, text, exit_code=description.get("exit_code", 0))
