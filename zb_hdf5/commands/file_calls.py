"""The calls by which this process opens, looks at and reads the files of some data, for `zb plan`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zb_hdf5.hdf5.h5_file import OPEN_H5
from zb_hdf5.spec import INDEX_NAME


@dataclass
class FileCalls:
    """The calls of some time.

    Attributes
    ----------
    opens
        Opened files and folders.
    looks
        Facts that were asked for by a path.
    num_bytes, index_bytes
        Bytes that were read, and how many of them are bytes of an index.
    opens_by_hdf5
        The opens that HDF5 made: its reads are not among `num_bytes`.
    """

    opens: int = 0
    looks: int = 0
    num_bytes: int = 0
    index_bytes: int = 0
    opens_by_hdf5: int = 0


_hearer: Callable[[str, tuple[Any, ...]], None] | None = None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _hearer is not None:
        _hearer(event, arguments)


@cache
def _listen() -> None:
    """Have Python call `_hear`: for ever, so once."""
    sys.addaudithook(_hear)


@contextmanager
def file_calls(path: Path) -> Iterator[FileCalls]:
    """Return the calls that are made meanwhile for files and folders at or below a path.

    The files that HDF5 opens have an event of their own; it looks at each by its path. A file that Python reads with a
    buffer, such as an index, is read whole.
    """
    global _hearer
    found = FileCalls()
    begin = _beginning_of(path)
    whole: list[str] = []

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.scandir", "os.listdir", OPEN_H5) or not _is_below(arguments[0], begin):
            return
        if event == "open" and arguments[1] is not None:  # the `open` of Python, around the one that is counted
            whole.append(arguments[0])
            return
        found.opens += 1
        if event == OPEN_H5:
            found.opens_by_hdf5 += 1
            found.looks += 1

    def looked(place: Any) -> None:
        found.looks += _is_below(place, begin)

    def read(num_bytes: int) -> None:
        found.num_bytes += num_bytes

    _listen()
    _hearer = heard
    try:
        with _traced_calls(looked, read):
            yield found
    finally:
        _hearer = None
    sizes = {each: os.path.getsize(each) for each in whole}
    found.num_bytes += sum(sizes[each] for each in whole)
    found.index_bytes = sum(size for each, size in sizes.items() if each.endswith(f"/{INDEX_NAME}"))


@contextmanager
def _traced_calls(looked: Callable[[Any], None], read: Callable[[int], None]) -> Iterator[None]:
    """Tell of the calls of `os` that no event of the audit hook tells of: they are replaced meanwhile."""
    calls = {name: getattr(os, name) for name in ("stat", "read", "pread", "preadv")}

    def traced_stat(place: Any, *arguments: Any, **options: Any) -> os.stat_result:
        looked(place)
        found: os.stat_result = calls["stat"](place, *arguments, **options)
        return found

    def traced(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            done = call(*arguments)
            read(done if isinstance(done, int) else len(done))
            return done

        return run

    try:
        for name, call in calls.items():
            setattr(os, name, traced_stat if name == "stat" else traced(call))
        yield
    finally:
        for name, call in calls.items():
            setattr(os, name, call)


def _is_below(place: Any, begin: str) -> bool:
    return isinstance(place, str | os.PathLike) and os.fspath(place).startswith(begin)


def _beginning_of(path: Path) -> str:
    """Return the beginning of the paths of all files of some data: of a lone file others may have another ending."""
    beginning = os.fspath(path if path.is_dir() or path.name == INDEX_NAME else path.with_suffix(""))
    return beginning.removesuffix(f"/{INDEX_NAME}")
