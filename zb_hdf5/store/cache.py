"""A cache on a fast local disk, in front of the source of any reader: batches are kept when they are first read.

It may only ever make things faster. What it gives was compared with the crc32 that was taken when it was fetched, and
whatever goes wrong with its files is a read of the source. `cache_folder.py` has those files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.errors import ArgumentError, IncompleteError, UnavailableError
from zb_hdf5.files.paths import RemotePath, local_path
from zb_hdf5.files.sizes import parse_size
from zb_hdf5.files.tokens import TokenRun, Tokens, Wait, whole_units
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.cache_folder import CachedColumn, free_bytes, make_room, occupied_bytes

#: Batches that one gather fetches at the same time.
FETCHES: Final = 8
#: Of what is free on the disk, the percentage that a cache takes where nobody says how much.
FREE_PERCENT: Final = 90


@dataclass(frozen=True)
class Cache:
    """A cache folder. Several readers, processes and jobs may share one.

    Attributes
    ----------
    folder
        On a disk of this machine.
    max_bytes
        What all columns of all stores in it may occupy. Processes do not wait for each other, so each may exceed
        this by up to 64 MiB.
    """

    folder: Path
    max_bytes: int

    @classmethod
    def of(cls, folder: str | os.PathLike[str], max_bytes: int | str | None) -> Cache:
        """Make the folder; `max_bytes` is a number, a text such as "200GiB", or None.

        None: what the columns in it occupy already, and nine tenths of what is free on the disk.

        Raises
        ------
        ArgumentError
            If it cannot be made, or the size is none.
        """
        root = local_path(folder)
        size = parse_size(max_bytes) if isinstance(max_bytes, str) else max_bytes
        if size is not None and size < 1:
            raise ArgumentError(f"cache_bytes must be at least 1, found {size}")
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(root, size or occupied_bytes(root) + free_bytes(root) * FREE_PERCENT // 100)
        except OSError as error:
            raise _unusable(root, error) from error

    def attach(self, reader: BatchReader) -> None:
        """Put this cache in front of a reader's batches, and of those of its fields once they are opened.

        A reader with verify="none" reads the batches that are there, and adds none, which nobody would have compared.

        Raises
        ------
        ArgumentError
            If the reader still grows, nothing identifies its content, or the folder cannot be written.
        """
        if not reader.complete:
            raise ArgumentError(f"{reader.path}: still grows: expected a finished store for a cache; leave out cache")
        meta = replace(reader.meta, seq_len=reader.stride)  # of records that overlap each token is kept once
        name, size = self._name_of(reader), reader.num_batches * meta.batch_bytes
        if reader.verify == "none":
            warnings.warn(f"{reader.path}: verify='none' adds nothing to the cache {self.folder}", stacklevel=2)
            if not (self.folder / name).exists():
                return
        try:
            column = CachedColumn(self.folder, name, meta, reader.num_batches, self.max_bytes)
        except (OSError, UnavailableError, IncompleteError) as error:
            raise _unusable(self.folder, error) from error
        column.full = reader.verify == "none"
        with contextlib.suppress(OSError):
            make_room(self.folder, min(self.max_bytes, size - column.occupied_bytes), self.max_bytes)
        reader.tokens = Cached(reader.tokens, column, meta.batch_tokens, reader.num_batches)
        reader.in_front = self.attach

    def _name_of(self, reader: BatchReader) -> str:
        """Return the name of the column of a reader; with verify="none" that of compared batches if it exists."""
        if reader.verify == "none":
            name = _column_name(reader, compared=True)
            return name if (self.folder / name).exists() else _column_name(reader, compared=False)
        return _column_name(reader, compared=reader.verified in ("whole reads", "all reads"))


def _unusable(folder: Path, error: Exception) -> ArgumentError:
    return ArgumentError(f"{folder}: expected a cache folder that can be written: {error}; choose another, or none")


def _column_name(reader: BatchReader, *, compared: bool) -> str:
    """Return the name of a column's folder: another content has another name.

    The files count too where a fingerprint is only a sample, or where nobody compares the batches that are kept: those
    of a damaged file must not outlive it, and no reader with verify="batch" may find them.
    """
    meta, identity = reader.meta, reader.fingerprint
    if not compared:
        identity = f"unchecked:{identity}"
    if identity.startswith(("sampled:", "unchecked:")):
        identity += _files_of(reader)
    text = f"{identity}|{meta.column}|{reader.num_batches}x{meta.batch_size}x{meta.seq_len}|{meta.dtype!r}"
    return f"zb-cache-{hashlib.sha256(text.encode()).hexdigest()}"


def _files_of(reader: BatchReader) -> str:
    """Return what tells the file that is open, or the files of a folder, from others of the same size."""
    path = reader.path if isinstance(reader.path, RemotePath) else reader.path.absolute()
    if reader.tokens.identity:
        return f"{path}:{reader.tokens.identity}"
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [(file.name, os.stat(file)) for file in files]
    except OSError as error:
        raise ArgumentError(
            f"{path}: expected a store with digests, or a file of this machine, to keep it in a cache; leave out cache"
        ) from error
    return f"{path}:{[(name, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in found]}"


def column_of(reader: BatchReader) -> CachedColumn:
    """Return what a reader's cache holds.

    Raises
    ------
    ArgumentError
        If it has no cache.
    """
    if not isinstance(reader.tokens, Cached):
        raise ArgumentError(f"{reader.path}: expected a reader with a cache")
    return reader.tokens.column


class Cached(Tokens):
    """Tokens that keep whole units in a cache, and read them there the next time. See `Tokens`.

    A unit that is missing is fetched whole, also where only some rows of it are asked for, and at most once by a
    process whose threads all miss it. Once the cache is full, the rest is read as if there was no cache.

    Rows of a unit are compared with its crc32 when this process needs the first of them; whole units each time.

    Parameters
    ----------
    tokens
        Closed with this.
    column
        The units in the cache.
    unit, num_units
        Tokens of a unit of the cache, and how many units there are; tokens behind them pass by.
    """

    def __init__(self, tokens: Tokens, column: CachedColumn, unit: int, num_units: int) -> None:
        self.tokens, self.column, self.unit, self._num_units = tokens, column, unit, num_units
        self.num_tokens, self.dtype, self.name = tokens.num_tokens, tokens.dtype, tokens.name
        self.access, self.wait, self.identity = tokens.access, tokens.wait, tokens.identity
        self._fetching: dict[tuple[int, int], threading.Event] = {}

    def read(self, runs: Iterable[TokenRun]) -> None:
        missing: list[TokenRun] = []
        for start, out in runs:
            stop, kept = start + len(out), self._num_units * self.unit
            first, end = whole_units(start, min(stop, kept) - start, self.unit, kept) if start < kept else (stop, stop)
            for begin, part in ((start, out[: first - start]), (max(end, start), out[max(end - start, 0) :])):
                if len(part):
                    self._read_part(begin, part)
            missing += self._read_whole(first, out[first - start : end - start])
        if len(missing) == 1 and len(missing[0][1]) == self.unit:
            self._fetch(missing[0][0] // self.unit, missing[0][1])
        elif missing:
            self.tokens.read(missing)
            for start, out in missing:
                for number, unit in enumerate(out.reshape(-1, self.unit), start // self.unit):
                    self.column.put(number, unit)

    def _read_whole(self, start: int, out: TokenArray) -> Iterator[TokenRun]:
        """Fill the whole units that are in the cache; yield the runs of the others."""
        first = start // self.unit
        here = [self.column.read_into(first + number, unit) for number, unit in enumerate(out.reshape(-1, self.unit))]
        for is_here, run in groupby(range(len(here)), here.__getitem__):
            if not is_here:
                numbers = list(run)
                begin, stop = numbers[0] * self.unit, (numbers[-1] + 1) * self.unit
                yield start + begin, out[begin:stop]

    def _read_part(self, start: int, out: TokenArray) -> None:
        """Fill 1-D `out` with tokens of units that are not asked for whole."""
        while len(out):
            number, within = divmod(start, self.unit)
            part = out[: self.unit - within]
            if number >= self._num_units or not self._see([number]):
                self.tokens.read([(start, part)])
            else:
                self.column.rows.read([(start, part)])
            start, out = start + len(part), out[len(part) :]

    def _fetch(self, number: int, out: TokenArray) -> None:
        """Read a unit from the tokens and keep it, unless another thread does so at this moment."""
        key, done = (os.getpid(), number), threading.Event()  # those of the parent of a fork are never set
        others = self._fetching.setdefault(key, done)
        if others is not done:
            others.wait()
        try:
            if not self.column.read_into(number, out):  # another one has been here since
                self.tokens.read([(number * self.unit, out)])
                self.column.put(number, out)
        finally:
            if others is done:
                del self._fetching[key]
                done.set()

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        """Return tokens as a view of the cache, where they were compared with their crc32 and its disk is local."""
        number, within = divmod(start, self.unit)
        if number < self._num_units and within + count <= self.unit and self.column.seen[number]:
            try:
                return self.column.rows.view(start, count, private)
            except (OSError, IncompleteError):
                self.column.mend()
        return None

    def flat(self) -> None:
        """Return None: no mapping holds all tokens."""

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        firsts, lasts = starts // self.unit, (starts + out.shape[1] - 1) // self.unit
        inside = lasts < self._num_units
        needed = np.unique(np.concatenate([firsts[inside], lasts[inside]]))
        if not self.column.seen.take(needed).all():
            self._see(needed[~self.column.seen.take(needed)].tolist())
        here = inside.copy()
        here[inside] = self.column.seen[firsts[inside]] & self.column.seen[lasts[inside]]
        try:
            self._gather_parts(starts, out, here)
        except (OSError, IncompleteError):
            self.column.mend()
            self.tokens.gather(starts, out)

    def _gather_parts(self, starts: npt.NDArray[np.int64], out: TokenArray, here: npt.NDArray[np.bool_]) -> None:
        """Gather the rows of units that are in the cache there, and the others from the tokens."""
        for chosen, is_kept in ((~here, False), (here, True)):
            tokens = self.column.rows if is_kept and chosen.any() else self.tokens
            if chosen.all():
                tokens.gather(starts, out)
            elif chosen.any():
                rows = np.empty((int(chosen.sum()), out.shape[1]), out.dtype)
                tokens.gather(starts[chosen], rows)
                out[chosen] = rows

    def _see(self, units: list[int]) -> bool:
        """Have units in the cache, and compared with their crc32; return False if there was no room for all."""
        missing = [number for number in units if not self.column.read_into(number, self._buffer())]
        if len(missing) > 1 and not self.column.full:
            # threads of this call only: those of a pool would be missing after a fork
            with ThreadPoolExecutor(min(FETCHES, len(missing)), thread_name_prefix="zb-cache") as pool:
                list(pool.map(self._bring, missing))
        elif missing:
            self._bring(missing[0])
        return all(self.column.seen[number] for number in units)

    def _buffer(self) -> TokenArray:
        return np.empty(self.unit, self.dtype)

    def _bring(self, number: int) -> None:
        if not self.column.full:
            self._fetch(number, self._buffer())

    def ready(self, starts: npt.NDArray[np.int64]) -> bool:
        units = starts // self.unit
        if all(number < self._num_units and self.column.has(number) for number in units.tolist()):
            return self.column.rows.ready(starts)
        return self.wait is Wait.LOCAL and self.tokens.ready(starts)

    def will_need(self, start: int, stop: int) -> None:
        while start < stop:
            number = start // self.unit
            end = min(stop, (number + 1) * self.unit)
            is_here = number < self._num_units and self.column.has(number)
            (self.column.rows if is_here else self.tokens).will_need(start, end)
            start = end

    def close(self) -> None:
        self.column.close()
        self.tokens.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_fetching": {}}
