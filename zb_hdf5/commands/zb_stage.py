"""`zb stage`: copies the batches that the ranks of a node will read in an epoch to its own disk."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import click

from zb_hdf5.console import (
    FROM_0,
    FROM_1,
    LOCAL,
    NEW,
    SIZE,
    STORE,
    Output,
    Parsed,
    Progress,
    counted,
    format_bytes,
    one_word,
    output_options,
)
from zb_hdf5.errors import ArgumentError
from zb_hdf5.option_groups import GroupedCommand, option_group
from zb_hdf5.packages import require_package


def ranks_named(text: str) -> list[range]:
    """Return the numbers of 8-15, or 0,4,8-15."""
    matches = [re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip()) for part in text.split(",")]
    ranks = [range(int(match[1]), int(match[2] or match[1]) + 1) for match in matches if match]
    if not all(ranks) or None in matches:
        raise ArgumentError(f"expected ranks such as 8-15 or 0,4,8-15, found {text!r}")
    return ranks


_order_option = option_group("Loader, as in training")
_node_option = option_group("Node")


@click.command("stage", cls=GroupedCommand)
@click.argument("store", type=STORE)
@click.argument("folder", type=NEW)
@_order_option("--state", "state_path", type=LOCAL, help="Loader state, as JSON: go on from there to the epoch's end.")
@_order_option("--seed", type=int, default=42, help="Seed of the loader; a state has its own.")
@_order_option(
    "--shuffle",
    type=click.Choice(["global", "records", "block", "sequential"]),
    default="global",
    help="Order of the loader; a state has its own.",
)
@_order_option("--epoch", type=FROM_0, default=0, help="Epoch of the loader; a state has its own.")
@_order_option("--batch-size", type=FROM_1, help="Batch size of the loader. [default: as stored]")
@_order_option("--seq-len", type=FROM_1, help="Record length of the loader. [default: as stored]")
@_order_option("--split", help="Split that the loader reads: train, val, test, or all. [default: that for training]")
@_order_option("--targets", is_flag=True, help="The loader of a token stream has targets=True.")
@_order_option("--field", "fields", multiple=True, help="Copy the values of this field too; may be given repeatedly.")
@_order_option(
    "--field-set", "sets", multiple=True, help="Copy the values of this field set too; may be given repeatedly."
)
@_node_option("--ranks", type=Parsed("ranks", ranks_named), help="The ranks of this node, such as 8-15. [default: all]")
@_node_option("--world-size", type=FROM_1, default=1, help="Ranks of the whole job.")
@_node_option("--cache-bytes", type=SIZE, help="Bytes that FOLDER may hold. [default: 90 % of the free space]")
@output_options
def zb_stage(
    store: Path,
    folder: Path,
    state_path: Path | None,
    batch_size: int | None,
    split: str | None,
    epoch: int,
    fields: tuple[str, ...],
    sets: tuple[str, ...],
    ranks: list[range] | None,
    world_size: int,
    cache_bytes: int | None,
    **order: Any,
) -> Output:
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
    from zb_hdf5.commands.origins import loader_of_state, read_state
    from zb_hdf5.commands.staging import stage_batches
    from zb_hdf5.files.named_splits import AUTO_SPLIT
    from zb_hdf5.loaders.loader import Loader
    from zb_hdf5.store.cache import Cache

    ranks = ranks or [range(world_size)]
    if (last := max(part[-1] for part in ranks)) >= world_size:
        raise click.UsageError(f"--ranks: expected ranks below --world-size {world_size}, found {last}")
    require_package("torch", "torch")  # before the folder is made
    cache = Cache(folder, cache_bytes)
    if state_path is not None:
        loader = loader_of_state((str(store),), read_state(state_path), state_path, batch_size, split=split)
    else:
        loader = Loader(store, rank=0, world_size=1, batch_size=batch_size, split=split or AUTO_SPLIT, **order)
        loader.set_epoch(epoch)
    with Progress("stage", 0, unit="B") as progress:
        report = stage_batches(loader, cache, fields, [*chain(*ranks)], world_size, progress, sets)
    lines = _lines_of(folder, report, report["unit"], " of tokens and fields" if fields else "", "staged")
    for name, of_set in report.get("field_sets", {}).items():
        lines += _lines_of(folder, of_set, "record", " of its fields", f"field set {name}")
    return Output(report, lines)


def _lines_of(folder: Path, report: dict[str, Any], noun: str, columns: str, title: str) -> list[tuple[str, str]]:
    """Return the lines of the units that were staged of some columns, and of those that the cache has no room for.

    Each column has units of its own, so that two fields of 8 records are 16 units.
    """
    units = report["units"]
    held = report["present"] + report["copied"]
    size = f"{counted(units, noun)}{columns}, {format_bytes(report['num_bytes'])}"
    lines = [(title, f"{held:,} of {size}; {report['present']:,} were there already")]
    if left := units - held:
        see = f"'zb cache ls {one_word(str(folder))}'"
        lines.append(("left out", f"{counted(left, noun)}{columns}: the cache or its disk is full; see {see}"))
    return lines
