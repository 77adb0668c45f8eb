"""Tokens that are stored as they are: extents of a local file, mapped or read by position, and of an object."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.extents import Extents
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.paths import Identity, RemotePath, cut_short, require_remote_access
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.files.ranges import LocalFile, Place, Range, map_side_by_side
from zb_hdf5.files.tokens import PlainFile, TokenRun, Tokens, Wait, gather_from, mapped_units
from zb_hdf5.spec import TokenArray

#: The access of objects.
REMOTE: Final = "remote"


def open_extents(
    path: Path,
    extents: Extents,
    dtype: np.dtype[Any],
    num_tokens: int,
    access: str,
    identity: Identity | None = None,
    num_bytes: int | None = None,
) -> FileTokens | ObjectTokens:
    """Open the extents of a file of this machine, or of an object."""
    if not isinstance(path, RemotePath):
        tokens = FileTokens(LocalFile(path, identity, access), extents, dtype, num_tokens)
        if access == "mmap":
            tokens.units()  # now
        return tokens
    require_remote_access(path, access)
    return ObjectTokens(RemoteObject(str(path), identity, num_bytes), extents, dtype, num_tokens)


def places_of(tokens: FileTokens | ObjectTokens, runs: Iterable[TokenRun]) -> Iterator[Range]:
    """Yield the bytes that runs fill."""
    for start, out in runs:
        if out.dtype != tokens.dtype:  # another size would count other bytes
            raise ArgumentError(f"{tokens.name}: expected an array of {tokens.dtype}, found {out.dtype}")
        number, within = divmod(start, tokens.unit)
        if within + len(out) <= tokens.unit:
            yield tokens.extents.offset(number) + within * tokens.dtype.itemsize, out
        else:
            yield from tokens.extents.places_of_tokens(start, out)


class FileTokens(Tokens):
    """The tokens in the extents of one local file. See `Tokens`."""

    # "mmap": all reads come from the mapping; "auto": runs are read by position, views and gathers take the mapping,
    # never on a network file system; "pread": nothing is mapped

    __slots__ = (
        "__weakref__", "_flat", "_views", "access", "dtype", "extents", "file", "identity", "name", "num_tokens",
        "plain", "unit",
    )  # fmt: skip
    wait = Wait.LOCAL

    def __init__(self, file: LocalFile, extents: Extents, dtype: np.dtype[Any], num_tokens: int) -> None:
        self.file, self.extents, self.dtype, self.num_tokens = file, extents, dtype, num_tokens
        self._reset()
        if file.size < extents.end:
            file.close()
            raise cut_short(file.path, f"at least {extents.end:,} bytes", file.size)
        if file.path.suffix == PARTIAL_SUFFIX:  # its writer is about to cut off what it allocated behind the last unit
            file.size = extents.end

    def _reset(self) -> None:
        self.unit, file = self.extents.batch_bytes // self.dtype.itemsize, self.file
        self.name, self.access, self.identity = file.name, file.access, file.identity
        self._views: dict[bool, list[TokenArray]] | None = None
        self._flat: TokenArray | None = None
        one_run = len(self.extents.runs) == 1
        self.plain = PlainFile(self.file, self.extents, self.dtype) if one_run else None

    def read(self, runs: Iterable[TokenRun]) -> None:
        if self.file.access == "mmap":
            runs = [run for run in runs if not self._copy(*run)]
        self.file.read_ranges(places_of(self, runs))

    def _copy(self, start: int, out: TokenArray) -> bool:
        view = self.view(start, len(out))
        if view is None:
            return False
        out[...] = view
        return True

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        flat = self.flat()
        if flat is None or not len(starts):
            self.file.read_ranges(self.extents.places_of_rows(starts, out))
        else:
            gather_from(flat, starts, out)

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        views = self.units(private)
        if not views:
            return None
        index, token = divmod(start, self.unit)
        number, row = self.extents.locate(index)
        units = views[number]
        if token + count <= self.unit:
            return units[row, token : token + count]
        if units.flags.c_contiguous and (row * self.unit + token + count) <= units.size:
            return units.reshape(-1)[row * self.unit + token :][:count]
        flat = None if private else self._joined_flat()
        return None if flat is None else flat[start : start + count]

    def units(self, private: bool = False) -> list[TokenArray]:
        """Return a view `(units, unit)` of the mapping for each run of extents; none where the file is not mapped."""
        known = self._views or {}
        views = known.get(private)
        if views is None:
            views = mapped_units(self.file, self.extents, self.dtype, private)
            self._views = known | {private: views}
        elif views:
            self.file.require_whole()
        return views

    def flat(self) -> TokenArray | None:
        runs = self.extents.runs
        if len(runs) == 1 and runs[0].stride == self.extents.batch_bytes:
            return self.view(0, self.num_tokens)
        return self._joined_flat()

    def _joined_flat(self) -> TokenArray | None:
        """Return all tokens, of runs that are whole pages, mapped side by side."""
        if self._flat is None:
            places = self.places()
            tokens = map_side_by_side(places) if places else None
            self._flat = None if tokens is None else tokens.view(self.dtype)[: self.num_tokens]
        elif self._flat is not None:
            self.file.require_whole()
        return self._flat

    def places(self) -> list[Place]:
        """Return the parts of the file that hold all tokens one after the other; none where it is not mapped."""
        if not self.file.size or not self.file.maps:
            return []
        self.file.require_whole()
        return [(self.file.fd, start, stop) for start, stop in self.extents.byte_ranges]

    def unchecked(self) -> FileTokens:
        return self

    def ready(self, starts: npt.NDArray[np.int64]) -> bool:
        page = bytearray(1)
        try:
            for start in starts.tolist():
                index, token = divmod(start, self.unit)
                offset = self.extents.offset(index) + token * self.dtype.itemsize
                if os.preadv(self.file.fd, (page,), offset, os.RWF_NOWAIT) != 1:
                    return False
        except (OSError, AttributeError):  # it would wait, or this system cannot answer
            return False
        return True

    def will_need(self, start: int, stop: int) -> None:
        itemsize, batch_bytes = self.dtype.itemsize, self.extents.batch_bytes
        while start < stop:
            index, token = divmod(start, self.unit)
            number, within = self.extents.locate(index)
            base, stride, num_units = self.extents.runs[number]
            together = num_units - within if batch_bytes <= stride < 2 * batch_bytes else 1
            end = min(stop, (index + together) * self.unit)
            last, rest = divmod(end - 1, self.unit)
            offset = base + within * stride + token * itemsize
            length = (last - index) * stride + (rest + 1 - token) * itemsize
            os.posix_fadvise(self.file.fd, offset, length, os.POSIX_FADV_WILLNEED)
            start = end

    def close(self) -> None:
        self._views, self._flat = None, None
        self.file.close()

    def __getstate__(self) -> tuple[Any, ...]:
        return self.file, self.extents, self.dtype, self.num_tokens

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.file, self.extents, self.dtype, self.num_tokens = state
        self._reset()


class ObjectTokens(Tokens):
    """The tokens in the extents of one object. See `Tokens`."""

    __slots__ = ("__weakref__", "_read_before", "dtype", "extents", "num_tokens", "source", "unit")
    access, wait = REMOTE, Wait.FAR

    def __init__(self, source: RemoteObject, extents: Extents, dtype: np.dtype[Any], num_tokens: int) -> None:
        self.source, self.extents, self.dtype, self.num_tokens = source, extents, dtype, num_tokens
        self.unit = extents.batch_bytes // dtype.itemsize
        self._read_before: dict[int, TokenArray] = {}

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.source.name

    @property
    def identity(self) -> Identity:  # type: ignore[override]
        return self.source.identity

    def remember(self, start: int, tokens: TokenArray) -> None:
        """Keep a unit that was read to prove the object, for its next read."""
        self._read_before[start] = tokens

    def read(self, runs: Iterable[TokenRun]) -> None:
        self.source.read_ranges(self.ranges_of(runs)[1])

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        self._read_before.clear()  # rows do not take these units up: they would be kept for ever
        self.source.read_ranges(list(self.extents.places_of_rows(starts, out)))

    def unchecked(self) -> ObjectTokens:
        return self

    def ranges_of(self, runs: Iterable[TokenRun]) -> tuple[RemoteObject, list[Range]]:
        """Return the bytes that `read` fetches, for reads of several objects at once; fill what is in memory."""
        before, self._read_before = self._read_before, {}
        missing = [(start, out) for start, out in runs if not (before and _fill_from(before.get(start), out))]
        return self.source, [part for start, out in missing for part in self.extents.places_of_tokens(start, out)]

    def close(self) -> None:
        self.source.close()

    def __getstate__(self) -> tuple[Any, ...]:
        return self.source, self.extents, self.dtype, self.num_tokens

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        ObjectTokens.__init__(self, *state)


def _fill_from(known: TokenArray | None, out: TokenArray) -> bool:
    """Fill `out` if as many tokens are known."""
    if known is None or len(known) != len(out):
        return False
    out[...] = known
    return True
