"""`zb stage`: copies the batches that the ranks of a node will read in an epoch to the cache of their loaders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import ExistingPath, NewPath, Progress, Size, counted, format_bytes, output_options, print_report

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from zb_hdf5.columns.reader import BatchReader
    from zb_hdf5.loaders.loader import Loader

_PATH: Any = ExistingPath()
_STORE: Any = ExistingPath(urls=True)
_RANGE: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
#: Reads of the store at the same time: enough to hide the time that a server needs to answer.
THREADS: Final = 8


class Ranks(click.ParamType[list[range]]):
    """Numbers of ranks: 8-15, or 0,4,8-15."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[range]:
        matches = [_RANGE.fullmatch(part.strip()) for part in str(value).split(",")]
        ranks = [range(int(match[1]), int(match[2] or match[1]) + 1) for match in matches if match]
        if not all(ranks) or None in matches:
            self.fail(f"{value!r} is no list of ranks such as 8-15", param, ctx)
        return ranks


@dataclass
class StageReport:
    """The share of the wanted batches that the cache holds.

    Attributes
    ----------
    batches, num_bytes
        That the ranks will read; the values of fields count as well.
    present
        Batches of these that were in the cache before.
    copied
        Batches that are in it now and were not.
    """

    batches: int = 0
    num_bytes: int = 0
    present: int = 0
    copied: int = 0

    def lines(self) -> list[tuple[str, str]]:
        size = f"{counted(self.batches, 'batch', 'batches')}, {format_bytes(self.num_bytes)}"
        lines = [("staged", f"{self.present + self.copied:,} of {size}; {self.present:,} were there already")]
        if left := self.batches - self.present - self.copied:
            lines.append(("left out", f"{counted(left, 'batch', 'batches')}: the cache or its disk is full"))
        return lines


@click.command(short_help="Copy what a node's ranks will read to its own disk.")
@click.argument("store", type=_STORE)
@click.argument("folder", type=NewPath())
@click.option("--state", "state_path", type=_PATH, help="Loader state, as JSON: go on from there to the epoch's end.")
@click.option("--seed", type=int, default=42, show_default=True, help="Seed of the loader; a state has its own.")
@click.option(
    "--shuffle",
    type=click.Choice(["global", "records", "block", "sequential"]),
    default="global",
    show_default=True,
    help="Order of the loader; a state has its own.",
)
@click.option("--epoch", type=click.IntRange(0), default=0, show_default=True, help="Where no state says it.")
@click.option("--batch-size", type=click.IntRange(1), help="Batch size of the loader. [default: as stored]")
@click.option("--seq-len", type=click.IntRange(1), help="Record length of the loader. [default: as stored]")
@click.option("--targets", is_flag=True, help="The loader of a token stream has targets=True.")
@click.option("--field", "fields", multiple=True, help="Copy the values of this field too; may be given repeatedly.")
@click.option("--ranks", type=Ranks(), help="The ranks of this node, such as 8-15. [default: all]")
@click.option("--world-size", type=click.IntRange(1), default=1, show_default=True, help="Ranks of the whole job.")
@click.option("--cache-bytes", type=Size(), help="What FOLDER may hold. [default: 90 % of the free space]")
@output_options
def stage(
    store: Path,
    folder: Path,
    state_path: Path | None,
    seed: int,
    shuffle: str,
    epoch: int,
    batch_size: int | None,
    seq_len: int | None,
    targets: bool,
    fields: tuple[str, ...],
    ranks: list[range] | None,
    world_size: int,
    cache_bytes: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
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
    from zb_hdf5.store.cache import Cache

    last = max(part[-1] for part in ranks or [range(1)])
    if last >= world_size:
        raise click.UsageError(f"--ranks: expected ranks below --world-size {world_size}, found {last}")
    cache = Cache.of(folder, cache_bytes)
    options = {"seed": seed, "shuffle": shuffle, "epoch": epoch, "seq_len": seq_len, "targets": targets}
    with _opened(store, state_path, batch_size, options) as loader:
        cache.attach(loader.reader)
        readers = [loader.reader, *map(loader.reader.field, fields)]
        of_node = list(chain(*(ranks or [range(world_size)])))
        needed = batches_of_ranks(loader, of_node, world_size)
        if not needed.size:  # the state is at the end of its epoch
            loader.set_epoch(loader.epoch + 1)
            needed = batches_of_ranks(loader, of_node, world_size)
        with Progress("stage", 0, enabled=not quiet, unit="B") as progress:
            report = stage_batches(readers, needed, progress)
    print_report(vars(report), report.lines(), as_json=as_json, quiet=quiet)


def _opened(store: Path, state_path: Path | None, batch_size: int | None, options: dict[str, Any]) -> Loader[Any]:
    from zb_hdf5.commands.which import loader_of_state, read_state
    from zb_hdf5.loaders.loader import Loader

    if state_path is not None:
        return loader_of_state((str(store),), read_state(state_path), state_path, batch_size)
    return Loader(store, batch_size=batch_size, rank=0, world_size=1, **options)


def batches_of_ranks(loader: Loader[Any], ranks: Iterable[int], world_size: int) -> npt.NDArray[np.int64]:
    """Return the stored batches that some ranks read from the loader's position to the end of its epoch, ascending."""
    import numpy as np

    position, needed = loader.state_dict()["position"], np.zeros(loader.reader.num_batches, bool)
    for rank in ranks:
        plan = replace(loader.plan, rank=rank, world_size=world_size)
        for request in plan.requests_from(position):
            needed[request if isinstance(request, int) else request // plan.records_per_batch] = True
    return np.flatnonzero(needed)


def stage_batches(readers: list[BatchReader], needed: npt.NDArray[np.int64], progress: Progress) -> StageReport:
    """Copy batches of readers with a cache into it, in the order of the store, until it is full."""
    from zb_hdf5.loaders.prefetch import read_ahead
    from zb_hdf5.store.cache import column_of

    report, columns = StageReport(), [column_of(reader) for reader in readers]
    missing = [needed[[not column.has(index) for index in needed.tolist()]] for column in columns]
    for reader, absent in zip(readers, missing, strict=True):
        num_bytes, present = len(needed) * reader.meta.batch_bytes, len(needed) - len(absent)
        report.batches, report.num_bytes = report.batches + len(needed), report.num_bytes + num_bytes
        report.present += present
        progress.advance(0, report.num_bytes)
        progress.keep(present * reader.meta.batch_bytes)
    for reader, column, absent in zip(readers, columns, missing, strict=True):
        read = partial(_copy, reader, progress)
        for _ in read_ahead(read, runs_of(absent, reader.meta.batch_bytes), 2 * THREADS, threads=THREADS):
            if column.full:
                break
        report.copied += sum(column.has(index) for index in absent.tolist())
    return report


def runs_of(batches: npt.NDArray[np.int64], batch_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the count of batches that follow each other, as many as are moved at once."""
    import numpy as np

    from zb_hdf5.columns.reader import GROUP_BYTES

    most = max(1, GROUP_BYTES // batch_bytes)
    edges = (np.flatnonzero(np.diff(batches) != 1) + 1).tolist()
    for start, stop in pairwise([0, *edges, len(batches)]):
        for first in range(start, stop, most):
            yield int(batches[first]), min(most, stop - first)


def _copy(reader: BatchReader, progress: Progress, run: tuple[int, int]) -> None:
    """Read a run of batches, which leaves them in the cache."""
    import numpy as np

    first, count = run
    reader.read_batches_into(first, np.empty((count, *reader.meta.shape), reader.dtype))
    progress.advance(count * reader.meta.batch_bytes)
