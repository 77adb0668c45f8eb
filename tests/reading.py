"""Arguments of readers and loaders, of which those of `ReadAs` are given by their names, as a conversion takes them."""

from dataclasses import fields
from typing import Any

from zb_hdf5 import ReadAs
from zb_hdf5.files.look import Look
from zb_hdf5.store.format_list import FORMATS, load_format

NAMES = {each.name for each in fields(ReadAs)}


def reading(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with those of `ReadAs` as the one value that readers and loaders take."""
    named = {name: value for name, value in options.items() if name in NAMES}
    return {**{name: value for name, value in options.items() if name not in NAMES}, "read_as": ReadAs(**named)}


def ordered(shuffle: str, block_size: int) -> Any:
    """Return a shuffle as a loader takes it, with blocks of so many batches if it is that of blocks."""
    return (shuffle, block_size) if shuffle == "block" else shuffle


def begun(loader: Any, epoch: int) -> Any:
    """Return a loader at the beginning of an epoch."""
    loader.set_epoch(epoch)
    return loader


def looking(function, path):
    """Return what a function of a look finds at a path."""
    with Look(path) as look:
        return function(look)


def fits(name, path):
    """Return whether a format recognises a path by its content."""
    return looking(load_format(FORMATS[name]).fits, path)
