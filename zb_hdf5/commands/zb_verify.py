"""`zb verify`: compares every batch with its stored digests."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from zb_hdf5.console import FROM_1, STORE, Output, Progress, dataset_options, output_options
from zb_hdf5.errors import FormatError, Remedy
from zb_hdf5.option_groups import GroupedCommand, option_group

if TYPE_CHECKING:
    from zb_hdf5.read_as import ReadAs

#: Remedies of errors that are not a verdict: the path is neither a store nor a part of one, or its dataset is not told.
_WRONG_PATH: Final = (Remedy.CONVERT, Remedy.CHANNELS, Remedy.DATASET, Remedy.SOURCE_DTYPE)

_work_option = option_group("Work")


@click.command("verify", cls=GroupedCommand)
@click.argument("path", type=STORE)
@_work_option("--workers", type=FROM_1, help="Shards checked at the same time. [default: the cores]")
@dataset_options
@output_options
def zb_verify(path: Path, workers: int | None, read_as: ReadAs, split: str | None) -> Output:
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
    from zb_hdf5.commands.verdict import verdict
    from zb_hdf5.store.set_place import sets_of
    from zb_hdf5.store.shard_report import ShardReport
    from zb_hdf5.store.verify import verify_store

    try:
        with Progress("verify", 0) as progress:
            reports = verify_store(
                path,
                workers=workers,
                progress=progress.advance,
                announce=lambda total: progress.advance(0, total),
                read_as=read_as,
                split=split,
            )
    except FormatError as error:  # of the index: there is no shard to report on
        is_of_others = error.remedy in _WRONG_PATH or _has_way_in(path)
        if is_of_others or read_as.digests is not None:
            raise
        reports = [ShardReport(str(path), problem=error)]
    found = verdict(path, reports)
    lines = [(f"field set {name}", f"not compared: {_check_of_set(path, name, of)}") for name, of in sets_of(path)]
    return found._replace(lines=[*found.lines, *lines])


def _check_of_set(path: Path, name: str, split: str) -> str:
    """Return how the values of a field set are compared."""
    from zb_hdf5.files.paths import RemotePath
    from zb_hdf5.spec import DEFAULT_SPLIT

    if isinstance(path, RemotePath):
        return "loaders compare each record of it that they read"
    options = [] if split == DEFAULT_SPLIT else ["--split", split]
    return shlex.join(["zb", "fields", "verify", str(path), name, *options])


def _has_way_in(path: Path) -> bool:
    """Return whether a path has tokens or text that are converted first."""
    from zb_hdf5.files.look import Look
    from zb_hdf5.store.way_in import way_in

    with Look(path) as look:
        return way_in(look) is not None
