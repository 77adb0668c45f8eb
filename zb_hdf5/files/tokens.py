"""Tokens, or the values of a field, by their positions: their one interface, and those of a file or an object."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ClosedError
from zb_hdf5.files.objects import IN_FLIGHT, RemoteObject
from zb_hdf5.files.paths import Identity, RemotePath, cut_short, require_remote_access
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.files.ranges import Extents, LocalFile, Place, Range, map_side_by_side
from zb_hdf5.spec import StoreMeta, TokenArray, as_stored, signed

#: A position, and the 1-D array that the tokens from there on fill.
TokenRun: TypeAlias = tuple[int, TokenArray]


class Wait(Enum):
    """The cost of a read: none beyond the local disk, decoding, or an answer of a server."""

    LOCAL = "local"
    DECODE = "decode"
    FAR = "far"


class Rows(Protocol):
    """The crc32 of each unit."""

    @property
    def view(self) -> npt.NDArray[Any] | None: ...

    def __getitem__(self, number: int) -> int: ...


class PlainFile:
    """One local file of units at a constant stride, for reads of whole units without another layer.

    Thread-safe. It keeps the file open for as long as it is held: take a new one for each read of many files.

    Attributes
    ----------
    fd
        The descriptor: unit i is the `unit_bytes` at `base + i * stride`.
    size
        Bytes that the file must have. A mapping is touched only after `lseek(fd, 0, SEEK_END) >= size`, else
        `file.require_whole()` names the missing part.
    file
        The file; `file.maps`: whether it may be mapped, which is neither by access "pread" nor on a network file
        system.
    rows
        The crc32 of each unit, `rows[i]`, where whole reads are compared; `rows.view` is an array where they are
        mapped.
    """

    __slots__ = ("_dtype", "_extents", "_units", "base", "fd", "file", "rows", "size", "stride", "unit_bytes")

    def __init__(self, file: LocalFile, extents: Extents, dtype: np.dtype[Any]) -> None:
        self.file, self._extents, self._dtype, self.fd, self.size = file, extents, dtype, file.fd, file.size
        self.base, self.stride, _ = extents.runs[0]
        self.unit_bytes = extents.batch_bytes
        self.rows: Rows | None = None
        self._units: tuple[bool, TokenArray] | None = None

    def units(self, private: bool = False) -> TokenArray:
        """Return all units as a view `(units, unit)` of the mapping, of a file that may be mapped.

        Parameters
        ----------
        private
            True: writable and of the signed dtype; the file never changes.
        """
        units = self._units
        if units is None or units[0] != private:
            units = self._units = private, mapped_units(self.file, self._extents, self._dtype, private)[0]
        return units[1]


def mapped_units(file: LocalFile, extents: Extents, dtype: np.dtype[Any], private: bool) -> list[TokenArray]:
    """Return a view `(units, unit)` of the mapping for each run of extents; none where the file is not mapped."""
    data = file.flat(private)
    if data is None:
        return []
    itemsize, kind = dtype.itemsize, signed(dtype) if private else dtype
    unit = extents.batch_bytes // itemsize
    return [np.ndarray((n, unit), kind, data, base, (stride, itemsize)) for base, stride, n in extents.runs]


class Tokens(ABC):
    """Tokens, or values of a field, by their positions. Thread-safe; usable after fork; picklable.

    `close` must not race with reads.

    Attributes
    ----------
    num_tokens
        Positions are 0 to `num_tokens - 1`.
    dtype
        Type of a token.
    unit
        Tokens that are checked, cached or decoded together: those of a batch, or of a chunk of a stream. Units follow
        each other from position 0 on; the last one may be shorter.
    name
        Path or URL, in messages.
    access
        The I/O path: "auto", "mmap", "pread", "h5py", or "remote".
    wait
        The cause of the wait of a read.
    identity
        The facts that differ for a later file of the same name; () of many files.
    plain
        The local file that holds all units at a constant stride; None where there is none, or there are several.
    """

    __slots__ = ()
    plain: PlainFile | None = None
    num_tokens: int
    dtype: np.dtype[Any]
    unit: int
    name: str
    access: str
    wait: Wait
    identity: Identity

    @abstractmethod
    def read(self, runs: Iterable[TokenRun]) -> None:
        """Fill each 1-D array, C-contiguous and of the stored dtype, with the tokens from its position on.

        Raises
        ------
        IncompleteError
            If a file was cut short since it was opened.
        ChecksumError
            If a unit is not what was written, and that is checked.
        """

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(n, L)`, with the L tokens from each of `starts`, int64 `(n,)`. Raises as `read`."""
        self.read(zip(starts.tolist(), out, strict=True))

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        """Return consecutive tokens, 1-D, as a view of a mapping; None where no mapping holds them together.

        Parameters
        ----------
        private
            True: it is writable, and the file never changes. A later view of the same tokens shows what was written.
        """
        return None

    def flat(self) -> TokenArray | None:
        """Return all tokens as one read-only view of a mapping, or None. Not to be kept: ask again."""
        return self.view(0, self.num_tokens)

    def ready(self, starts: npt.NDArray[np.int64]) -> bool:
        """Return whether the tokens at `starts` can be read without waiting, as far as the system reports it."""
        return False

    def will_need(self, start: int, stop: int) -> None:  # noqa: B027 - most have no use for it
        """Announce that consecutive tokens will be read soon; the kernel may begin to fetch them."""

    def unchecked(self) -> Tokens | None:
        """Return the extents that gathers read without a check, for gathers from several files at once; or None."""
        return None

    def compare(self, runs: Iterable[TokenRun]) -> None:  # noqa: B027 - most have nothing to compare with
        """Compare the whole units in runs that `unchecked` has read. Raises as `read`."""

    @abstractmethod
    def close(self) -> None:
        """Release the files. Views that were returned stay valid."""

    @property
    def starts(self) -> list[int]:
        """The first position of each file, and the end of the last one."""
        return [0, self.num_tokens]

    @property
    def known(self) -> dict[int, Tokens]:
        """The files that are open, by their numbers: a look-up finds one without a lock."""
        return {0: self}

    def open_file(self, number: int, start: int) -> Tokens:
        """Return a file, of which the token at position `start` is about to be read; it is opened where it is not."""
        return self

    @property
    def in_flight(self) -> tuple[int, int] | None:
        """Bytes and reads to keep under way, where each read waits for a server; None: of a disk."""
        return IN_FLIGHT if self.wait is Wait.FAR else None


def gather_from(flat: TokenArray, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
    """Gather rows from one array of all tokens."""
    length = out.shape[1]
    rows, rest = np.divmod(starts, length)
    if len(flat) % length == 0 and not rest.any():
        flat.reshape(-1, length).take(rows, axis=0, out=out, mode="clip")  # "clip": `out` is filled without a buffer
        return
    # what numpy's sliding_window_view returns, in a tenth of its time
    windows = np.ndarray((len(flat) - length + 1, length), flat.dtype, flat, 0, flat.strides * 2)
    out[...] = windows[starts]


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


class ClosedTokens(Tokens):
    """The tokens of a closed reader: every use is an error, and open readers pay nothing for the check."""

    def __init__(self, tokens: Tokens) -> None:
        self.num_tokens, self.dtype, self.unit, self.name = tokens.num_tokens, tokens.dtype, tokens.unit, tokens.name
        self.access, self.wait, self.identity = tokens.access, tokens.wait, tokens.identity

    def _refuse(self, *_: object) -> Any:
        raise ClosedError(f"{self.name}: this reader was closed")

    read = gather = view = ready = will_need = _refuse  # type: ignore[assignment]

    def close(self) -> None:
        pass


class Converted(Tokens):
    """Tokens of another integer dtype. See `Tokens`."""

    def __init__(self, tokens: Tokens, dtype: np.dtype[Any], meta: StoreMeta | None = None) -> None:
        self._tokens, self._meta, self.dtype = tokens, meta, dtype
        self.num_tokens, self.unit, self.name = tokens.num_tokens, tokens.unit, tokens.name
        self.access, self.wait, self.identity = tokens.access, tokens.wait, tokens.identity

    def _convert(self, tokens: TokenArray, out: TokenArray, start: int) -> None:
        if self._meta is not None:
            tokens = as_stored(tokens, self._meta, f"{self.name} (windows from token {start:,})")
        out[...] = tokens

    def read(self, runs: Iterable[TokenRun]) -> None:
        for start, out in runs:
            tokens = np.empty(len(out), self._tokens.dtype)
            self._tokens.read([(start, tokens)])
            self._convert(tokens, out, start)

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        tokens = np.empty(out.shape, self._tokens.dtype)
        self._tokens.gather(starts, tokens)
        self._convert(tokens, out, int(starts[0]) if len(starts) else 0)

    def ready(self, starts: npt.NDArray[np.int64]) -> bool:
        return self._tokens.ready(starts)

    def will_need(self, start: int, stop: int) -> None:
        self._tokens.will_need(start, stop)

    def close(self) -> None:
        self._tokens.close()
