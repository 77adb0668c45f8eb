"""`zb which`: names the rows and documents of a training step or a batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import (
    FROM_0,
    FROM_1,
    LOCAL,
    Output,
    Parsed,
    Progress,
    by_option,
    counted,
    dataset_options,
    output_options,
    shares_option,
    text_option,
    tokenizer_option,
)
from zb_hdf5.errors import ArgumentError
from zb_hdf5.option_groups import GroupedCommand, option_group

if TYPE_CHECKING:
    from zb_hdf5.read_as import ReadAs

#: Rows that are printed.
ROWS_SHOWN: Final = 16

_place_option = option_group("Step or batch")


def _parsed_steps(text: str) -> tuple[int, int]:
    """Return the first of some steps, and the one after the last."""
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    first, stop = map(int, found.groups()) if found else (0, 0)
    if first >= stop:
        raise ArgumentError(f"expected two numbers that ascend, such as 0:20000, found {text!r:.80}")
    return first, stop


def _files(_: click.Context, __: click.Parameter, incomplete: str) -> list[Any]:
    """Let the shell complete the name of a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


@click.command("which", cls=GroupedCommand)
@click.argument("stores", nargs=-1, required=True, metavar="STORE | NAME=STORE...", shell_complete=_files)
@_place_option("--batch", type=FROM_0, help="A stored batch of STORE; needs no state.")
@_place_option("--state", "state_path", type=LOCAL, help="A loader's state_dict() as JSON.")
@_place_option("--step", type=FROM_0, help="Step of the state's epoch (of the run, if mixed).")
@_place_option(
    "--batch-size",
    type=FROM_1,
    help="Records per rank and step, or of --batch of a stream. [default: stored, 1]",
)
@_place_option("--seq-len", type=FROM_1, help="Tokens of a row of --batch of a token stream. [default: 512]")
@_place_option("--world-size", type=FROM_1, default=1, help="Ranks of the run.")
@by_option
@shares_option(
    "--steps",
    "between",
    type=Parsed("FIRST:STOP", _parsed_steps),
    help="Steps of --by, counted as --step: 0:20000 are 20,000.",
)
@shares_option("--next", "following", type=FROM_1, help="Steps of --by after the state, into later epochs too.")
@shares_option("--last", type=FROM_1, help="Steps of --by before the state, in its epoch.")
@text_option("--text", is_flag=True, help="Print the text of the parts too.")
@tokenizer_option
@text_option("--all", "all_rows", is_flag=True, help=f"Print all rows and text, not the first {ROWS_SHOWN} rows.")
@dataset_options
@output_options
def zb_which(
    stores: tuple[str, ...],
    batch: int | None,
    state_path: Path | None,
    step: int | None,
    batch_size: int | None,
    seq_len: int | None,
    world_size: int,
    by: str | None,
    between: tuple[int, int] | None,
    following: int | None,
    last: int | None,
    read_as: ReadAs,
    split: str | None,
    text: bool,
    tokenizer: str | None,
    all_rows: bool,
) -> Output:
    """Name the shard, batch and rows of a training step, from the loader state of a checkpoint, or of a stored batch.

    Documents in them are named where they are stored. With --by the tokens of many steps of all ranks are counted by
    the sources of their documents, and no token is read.

    \b
    Example: zb which data/train --state loader.json --step 1200 --world-size 8
    Example: zb which web=data/web code=data/code --state mixed.json --step 1200
    Example: zb which data/train --batch 12 --text --tokenizer tok.json
    Example: zb which stream.h5 --batch 12 --batch-size 8 --seq-len 1024
    Example: zb which text-h5 --state text.json --steps 0:20 --by source
    Example: zb which text-h5 --state text.json --next 50 --by meta:lang
    """
    asked_steps = [each for each in (between, last, following) if each is not None]
    if by is not None or asked_steps:
        if by is None or len(asked_steps) != 1 or state_path is None or step is not None or batch is not None or text:
            raise click.UsageError("pass --by with --state and one of --steps, --next and --last")
        from zb_hdf5.commands.shares import StepsAsked, shares_of_steps

        steps = StepsAsked(between, last, following)
        with Progress("count", 0, unit="records") as progress:
            shares = shares_of_steps(stores, state_path, steps, by, batch_size, world_size, read_as, split, progress)
        lines = [("steps", f"{steps.total:,} of {counted(world_size, 'rank')}"), shares.line()]
        return Output({"steps": steps.total, "world_size": world_size, **shares.to_json()}, lines, shares.table())
    from zb_hdf5.commands.origins import drawn_origins, origin_of_batch, origins, shard_lines

    asked: dict[str, int]
    if batch is not None and state_path is None and step is None and len(stores) == 1:
        asked = {"batch": batch}
        found = [origin_of_batch(stores[0], batch, batch_size, seq_len, read_as, split, text=text, tokenizer=tokenizer)]
    elif batch is None and state_path is not None and step is not None:
        asked = {"step": step}
        found = origins(
            stores, state_path, step, batch_size, world_size, read_as, split, text=text, tokenizer=tokenizer
        )
    else:
        raise click.UsageError("pass one STORE and --batch, or --state and --step")
    return Output(
        {**asked, "batches": [each.to_json() for each in found]},
        shard_lines(found),
        drawn_origins(found, None if all_rows else ROWS_SHOWN),
    )
