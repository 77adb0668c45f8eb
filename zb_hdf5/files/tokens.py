"""Tokens, or the values of a field, by their positions: the one interface of all that holds them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ClosedError
from zb_hdf5.files.extents import Extents
from zb_hdf5.files.objects import IN_FLIGHT
from zb_hdf5.files.paths import Identity
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.spec import StoreMeta, TokenArray
from zb_hdf5.token_values import as_stored, signed

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


def whole_units(start: int, count: int, unit: int, num_tokens: int) -> tuple[int, int]:
    """Return where the whole units in a run begin and end; the last one is whole if the run ends with all tokens."""
    first, stop = -(-start // unit) * unit, start + count
    end = stop if stop == num_tokens else stop // unit * unit
    return (first, end) if first < end else (stop, stop)


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


class UnitTokens(Tokens):
    """Tokens of which whole units are read: decoded, or compared with their crc32. Each thread keeps the last one."""

    __slots__ = ("_local",)

    def __init__(self) -> None:
        self._local = threading.local()

    @abstractmethod
    def _read_units(self, start: int, out: TokenArray) -> None:
        """Fill 1-D `out` with the whole units from a position on."""

    def _unit(self, number: int) -> TokenArray:
        """Return a unit in a buffer of this thread, which keeps the last one: records of one batch come together."""
        local = self._local
        if getattr(local, "number", None) != number:
            local.number = None
            if not hasattr(local, "tokens"):
                local.tokens = np.empty(self.unit, self.dtype)
            start = number * self.unit
            local.count = min(self.unit, self.num_tokens - start)
            self._read_units(start, local.tokens[: local.count])
            local.number = number
        return local.tokens[: local.count]  # type: ignore[no-any-return]

    def read(self, runs: Iterable[TokenRun]) -> None:
        for start, out in runs:
            first, end = whole_units(start, len(out), self.unit, self.num_tokens)
            if first == end:
                self._read_parts(start, out)
                continue
            self._read_parts(start, out[: first - start])
            self._read_units(first, out[first - start : end - start])
            self._read_parts(end, out[end - start :])

    def _read_parts(self, start: int, out: TokenArray) -> None:
        """Fill 1-D `out` with tokens of units that are not asked for whole."""
        done = 0
        while done < len(out):
            number, within = divmod(start + done, self.unit)
            part = self._unit(number)[within : within + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        for row in starts.argsort().tolist():  # the rows of one unit follow each other
            self.read([(int(starts[row]), out[row])])


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
