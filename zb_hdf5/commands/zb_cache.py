"""`zb cache`: shows and removes the stores in the cache folder of a node."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from zb_hdf5.console import LOCAL, Output, counted, format_bytes, output_options


@click.group("cache")
def zb_cache() -> None:
    """Show and free the stores in a cache folder.

    \b
    Example: zb cache ls $TMPDIR/cache
    """


@zb_cache.command("ls", short_help="Show the stores in a cache folder.")
@click.argument("folder", type=LOCAL)
@output_options
def zb_cache_ls(folder: Path) -> Output:
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


@zb_cache.command("rm", short_help="Remove stores from a cache folder.")
@click.argument("folder", type=LOCAL)
@click.option("--store", help="Remove this path or URL only. [default: all stores]")
@output_options
def zb_cache_rm(folder: Path, store: str | None) -> Output:
    """Remove the stores that fill the cache FOLDER. Running loaders go on with the files that they have open.

    \b
    Example: zb cache rm $TMPDIR/cache
    """
    from zb_hdf5.store.cache import stores_in

    found = [each for each in stores_in(folder) if store in (None, each[1])]
    for path, *_ in found:
        shutil.rmtree(path)
    num_bytes = sum(size for *_, size in found)
    return Output(
        {"removed": [str(path) for path, *_ in found], "num_bytes": num_bytes},
        [("removed", f"{counted(len(found), 'store')}, {format_bytes(num_bytes)}")],
    )
