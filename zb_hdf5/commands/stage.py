"""`zb stage`: copies the batches that the ranks of a node will read in an epoch to the cache of their loaders."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import SIZE, ExistingPath, NewPath, Output, Parsed, Progress, counted, format_bytes, output_options
from zb_hdf5.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from zb_hdf5.files.tokens import Tokens
    from zb_hdf5.formats.batch_reader import BatchReader
    from zb_hdf5.loaders.loader import Loader

_PATH: Any = ExistingPath()
_STORE: Any = ExistingPath(urls=True)
_RANGE: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
#: Reads of the store at the same time: enough to hide the time that a server needs to answer.
THREADS: Final = 8


def ranks_named(text: str) -> list[range]:
    """Return the numbers of 8-15, or 0,4,8-15."""
    matches = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    ranks = [range(int(match[1]), int(match[2] or match[1]) + 1) for match in matches if match]
    if not all(ranks) or None in matches:
        raise ArgumentError(f"{text!r} is no list of ranks such as 8-15")
    return ranks


@click.command(short_help="Copy the batches of a node's ranks to its own disk.")
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
@click.option(
    "--epoch", type=click.IntRange(0), default=0, show_default=True, help="Epoch of the loader; a state has its own."
)
@click.option("--batch-size", type=click.IntRange(1), help="Batch size of the loader. [default: as stored]")
@click.option("--seq-len", type=click.IntRange(1), help="Record length of the loader. [default: as stored]")
@click.option("--targets", is_flag=True, help="The loader of a token stream has targets=True.")
@click.option("--field", "fields", multiple=True, help="Copy the values of this field too; may be given repeatedly.")
@click.option("--ranks", type=Parsed("ranks", ranks_named), help="The ranks of this node, such as 8-15. [default: all]")
@click.option("--world-size", type=click.IntRange(1), default=1, show_default=True, help="Ranks of the whole job.")
@click.option("--cache-bytes", type=SIZE, help="What FOLDER may hold. [default: 90 % of the free space]")
@output_options
def stage(store: Path, folder: Path, ranks: list[range] | None, world_size: int, **given: Any) -> Output:
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
    folder_of_node, fields = Cache.of(folder, given.pop("cache_bytes")), given.pop("fields")
    with _opened(store, **given) as loader:
        folder_of_node.attach(loader.reader)
        readers = [loader.reader, *map(loader.reader.field, fields)]
        of_node = list(chain(*(ranks or [range(world_size)])))
        needed = batches_of_ranks(loader, of_node, world_size)
        if not needed.size:  # the state is at the end of its epoch
            loader.set_epoch(loader.epoch + 1)
            needed = batches_of_ranks(loader, of_node, world_size)
        with Progress("stage", 0, unit="B") as progress, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a full cache, which the report names
            report = stage_units(readers, needed, progress)
    units, held = report["units"], report["present"] + report["copied"]
    size = f"{counted(units, 'unit')}, {format_bytes(report['num_bytes'])}"
    lines = [("staged", f"{held:,} of {size}; {report['present']:,} were there already")]
    if left := units - held:
        lines.append(("left out", f"{counted(left, 'unit')}: the cache or its disk is full; see 'zb cache'"))
    return Output(report, lines)


def _opened(store: Path, state_path: Path | None, batch_size: int | None, **options: Any) -> Loader[Any]:
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


def stage_units(readers: list[BatchReader], needed: npt.NDArray[np.int64], progress: Progress) -> dict[str, int]:
    """Copy the units of batches, or chunks of a stream, to the caches of their readers, until these are full.

    Returns how many "units" and "num_bytes" the ranks will read, and how many units were "present" and are "copied".
    """
    from zb_hdf5.loaders.steps import read_ahead
    from zb_hdf5.store.cache import column_of

    report, todo = dict.fromkeys(("units", "num_bytes", "present", "copied"), 0), []
    for reader in readers:
        column, units = column_of(reader), units_of(reader, needed)
        absent = units[[not column.has(number) for number in units.tolist()]]
        unit_bytes, present = reader.tokens.unit * reader.dtype.itemsize, len(units) - len(absent)
        report["units"] += len(units)
        report["num_bytes"] += len(units) * unit_bytes
        report["present"] += present
        progress.advance(0, report["num_bytes"])
        progress.keep(present * unit_bytes)
        todo.append((reader, column, absent, unit_bytes))
    for reader, column, absent, unit_bytes in todo:
        read = partial(_copy, reader.tokens, progress)
        for _ in read_ahead(read, runs_of(absent, unit_bytes), 2 * THREADS, threads=THREADS):
            if column.full:
                break
        report["copied"] += sum(column.has(number) for number in absent.tolist())
    return report


def units_of(reader: BatchReader, batches: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the units of the tokens that lie in some batches, ascending."""
    import numpy as np

    unit, batch_tokens = reader.tokens.unit, reader.batch_size * reader.stride
    firsts = batches * batch_tokens // unit
    lasts = (np.minimum((batches + 1) * batch_tokens + reader.overlap, reader.tokens.num_tokens) - 1) // unit
    most = int((lasts - firsts).max(initial=0)) + 1
    return np.unique(np.minimum(firsts[:, np.newaxis] + np.arange(most), lasts[:, np.newaxis]))


def runs_of(units: npt.NDArray[np.int64], unit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the count of units that follow each other, as many as are moved at once."""
    import numpy as np

    from zb_hdf5.formats.batch_reader import GROUP_BYTES

    most = max(1, GROUP_BYTES // unit_bytes)
    edges = (np.flatnonzero(np.diff(units) != 1) + 1).tolist()
    for start, stop in pairwise([0, *edges, len(units)]):
        for first in range(start, stop, most):
            yield int(units[first]), min(most, stop - first)


def _copy(tokens: Tokens, progress: Progress, run: tuple[int, int]) -> None:
    """Read a run of units, which leaves them in the cache."""
    import numpy as np

    start = run[0] * tokens.unit
    out = np.empty(min(run[1] * tokens.unit, tokens.num_tokens - start), tokens.dtype)
    tokens.read([(start, out)])
    progress.advance(out.nbytes)


@click.group(short_help="Show and free the stores in a cache folder.")
def cache() -> None:
    """Show and free the stores in a cache folder."""


@cache.command("ls", short_help="Show the stores in a cache folder.")
@click.argument("folder", type=_PATH)
@output_options
def show_stores(folder: Path) -> Output:
    """Show which stores fill the cache FOLDER.

    \b
    Example: zb cache ls $TMPDIR/cache
    """
    from zb_hdf5.store.cache import stores_in

    found = stores_in(folder)
    report = {"stores": [{"folder": str(path), "store": store, "num_bytes": size} for path, store, size in found]}
    lines = [(path.name[:17], f"{format_bytes(size)} of {store}") for path, store, size in found]
    lines.append(("all", f"{counted(len(found), 'store')}, {format_bytes(sum(size for *_, size in found))}"))
    return Output(report, lines)


@cache.command("rm", short_help="Remove stores from a cache folder.")
@click.argument("folder", type=_PATH)
@click.option("--store", help="Remove this path or URL only. [default: all stores]")
@output_options
def remove_stores(folder: Path, store: str | None) -> Output:
    """Remove the stores that fill the cache FOLDER. Running loaders go on with the files that they have open.

    \b
    Example: zb cache rm $TMPDIR/cache
    """
    from zb_hdf5.store.cache import stores_in

    found = [each for each in stores_in(folder) if store in (None, each[1])]
    for path, *_ in found:
        shutil.rmtree(path)
    num_bytes = sum(size for *_, size in found)
    report = {"removed": [str(path) for path, *_ in found], "num_bytes": num_bytes}
    return Output(report, [("removed", f"{counted(len(found), 'store')}, {format_bytes(num_bytes)}")])
