"""Tokens, or the values of a field, by their positions: the one interface, and the tokens of a file or an object."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ClosedError
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.look import Look
from zb_hdf5.files.mapping import FilePart, map_side_by_side
from zb_hdf5.files.objects import RemoteObject, read_objects
from zb_hdf5.files.pages import NO_PAGES, FilePages, Pages
from zb_hdf5.files.paths import cut_short, require_remote_access
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.files.ranges import Extents, LocalFile, Range, Ranges, open_ranges
from zb_hdf5.spec import TokenArray, signed

#: A position, and the 1-D array that the tokens from there on fill.
TokenRun: TypeAlias = tuple[int, TokenArray]
#: A file: a view of all units (None: it is not mapped), their crc32 by number, the descriptor and the size.
UnitAccess: TypeAlias = tuple[TokenArray | None, Callable[[int], int] | None, int, int]
#: A run of so many bytes that is in memory is copied from the mapping.
LARGE_RUN_BYTES: Final = 1 << 20


class Wait(Enum):
    """The cost of a read: none beyond the local disk, decoding, or an answer of a server."""

    LOCAL = "local"
    DECODE = "decode"
    FAR = "far"


class StoredIds(NamedTuple):
    """All tokens of a file in one view, unsigned: a negative id is a large one.

    Attributes
    ----------
    ids
        The view. Its dtype may be wider than that of the tokens.
    limit
        The largest id: whoever takes ids compares them with it, and reads those that are larger by `Tokens.read`, which
        raises the error. None: each value is an id.
    """

    ids: TokenArray
    limit: int | None = None

    def has_others(self, ids: TokenArray) -> bool:
        """Return whether some of the view are not ids."""
        return self.limit is not None and ids.size > 0 and bool(ids.max() > self.limit)


class Tokens(ABC):
    """Tokens, or values of a field, by their positions. Thread-safe, but for `close`; usable after fork; picklable.

    A subclass has the attributes, `read` and `close`. All else has a default that is right for any tokens: rows are
    read by `read`, there is no mapping, there are no pages, and these tokens are their only file.

    Attributes
    ----------
    num_tokens
        Positions are 0 to `num_tokens - 1`.
    dtype
        The stored dtype of a token.
    unit
        Tokens that are checked, cached or decoded together, from position 0 on; the last unit may have fewer.
    name
        The path or URL, for messages.
    access
        "auto", "mmap", "pread", "h5py", or "remote".
    wait
        The cost of a read.
    identity
        The facts that differ for a later file of the same name; () for the tokens of many files.
    file
        The one file that holds all tokens, if it is read without HDF5; else None.
    pages
        The pages of the files, which are looked for in memory and announced to the kernel; `NO_PAGES`: there are none.
    """

    __slots__ = ()
    num_tokens: int
    dtype: np.dtype[Any]
    unit: int
    name: str
    access: str
    wait: Wait
    identity: Identity
    file: Ranges | None = None
    pages: Pages = NO_PAGES

    @abstractmethod
    def read(self, runs: Iterable[TokenRun]) -> None:
        """Fill each 1-D array, C-contiguous and of the stored dtype, with the tokens from its position on.

        Raises
        ------
        IncompleteError
            If a file was cut short since it was opened.
        ChecksumError
            If a unit that is checked is damaged.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.num_tokens:,} of {self.dtype.name})"

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(n, L)`, with the L tokens from each of `starts`, int64 `(n,)`. Raises as `read`."""
        self.read(zip(starts.tolist(), out, strict=True))

    def __getitem__(self, run: slice) -> TokenArray:
        """Return consecutive tokens: 1-D, read-only where it is a view of a mapping. Ends are cut as of a list.

        Raises
        ------
        ArgumentError
            If it is one position, or a slice with a step.
        """
        if not isinstance(run, slice) or run.step not in (None, 1):
            raise ArgumentError(f"{self.name}: expected a slice of tokens without a step, found [{run!r}]")
        start, stop, _ = run.indices(self.num_tokens)
        found = self.view(start, stop - start) if start < stop else None
        if found is None:
            found = np.empty(max(0, stop - start), self.dtype)
            self.read([(start, found)] if start < stop else [])
        return found

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        """Return consecutive tokens, 1-D, as a view of a mapping; None if no mapping holds them together.

        Parameters
        ----------
        start, count
            The first position, and the number of tokens.
        private
            The view is writable, and the file never changes. A later private view of the same tokens shows the values
            that were written.
        """
        return None

    def flat(self) -> TokenArray | None:
        """Return all tokens as one read-only view of a mapping, for reads in any order; or None.

        With access "auto" it is None, too, until a look has found the tokens in memory, and after a read of the mapping
        that had to wait: `pages.residency` has it. Ask again for each use: do not keep it.
        """
        return self.view(0, self.num_tokens)

    def stored_ids(self) -> StoredIds | None:
        """Return all tokens as one view of a mapping, as they are stored; None as `flat`. Ask again for each use."""
        flat = self.flat()
        return None if flat is None else StoredIds(flat)

    def resolve(self) -> FileTokens | None:
        """Return the same tokens as one file has them, for short cuts: whoever reads them compares what this would.

        None: they are in several files, or are decoded or changed on their way.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the files. Views that were returned stay valid."""

    @property
    def files(self) -> TokenFiles:
        """The files that hold the tokens: these are their only file."""
        return OneFile(self)


class TokenFiles(Protocol):
    """The files of some tokens, in order. Thread-safe."""

    @property
    def starts(self) -> list[int]:
        """The first position of each file, and the end of the last one."""

    @property
    def known(self) -> dict[int, Tokens]:
        """The files that are open, by their numbers: a look-up finds one without a lock."""

    def open(self, number: int, start: int) -> Tokens:
        """Return a file by its number, and open it if it is not open.

        The token at position `start`, which is in this file, is about to be read.
        """


class OneFile:
    """Tokens that are their only file. See `TokenFiles`."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    @property
    def starts(self) -> list[int]:
        return [0, self._tokens.num_tokens]

    @property
    def known(self) -> dict[int, Tokens]:
        return {0: self._tokens}

    def open(self, number: int, start: int) -> Tokens:
        return self._tokens


def gather_from(flat: TokenArray, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
    """Gather rows from one array of all tokens."""
    length = out.shape[1]
    rows, rest = np.divmod(starts, length)
    if len(flat) % length == 0 and not rest.any():
        flat.reshape(-1, length).take(rows, axis=0, out=out, mode="clip")  # "clip": `out` is filled without a buffer
        return
    # what numpy's sliding_window_view returns, in a tenth of its time
    out[...] = np.ndarray((len(flat) - length + 1, length), flat.dtype, flat, 0, flat.strides * 2)[starts]


def open_extents(
    path: Path,
    extents: Extents,
    dtype: np.dtype[Any],
    num_tokens: int,
    access: str,
    identity: Identity | None = None,
    num_bytes: int | None = None,
    look: Look | None = None,
) -> FileTokens:
    """Open the extents of a file of this machine, or of an object.

    Parameters
    ----------
    path
        The path of the file, or the URL of the object.
    extents
        The byte offsets of its units.
    dtype, num_tokens
        The stored dtype, and the number of tokens: the last unit may be longer than its tokens.
    access
        "mmap", "pread" or "auto"; an object takes "auto" only.
    identity, num_bytes, look
        As for `open_ranges`.
    """
    require_remote_access(path, access)
    tokens = FileTokens(open_ranges(path, identity, num_bytes, access, look), extents, dtype, num_tokens)
    if access == "mmap":
        tokens.units()  # now
    return tokens


class FileTokens(Tokens):
    """The tokens in the extents of one file or object, which is open for as long as they are held. See `Tokens`.

    With access "mmap" all reads come from the mapping. With "auto" runs are read by position; views take the mapping,
    and gathers where the pages are in memory, but not on a network file system. With "pread", and "remote" for an
    object, nothing is mapped. Gathers of pages that are not in memory announce all of their rows before the first read.

    Parameters
    ----------
    file
        The open file or object. It closes with these tokens.
    extents, dtype, num_tokens
        As for `open_extents`.
    crc32_lookup
        Returns a function from the number of a unit to its crc32; None: it has none, or nobody compares it.
    """

    __slots__ = (
        "__weakref__",
        "_flat",
        "_pages",
        "_read_before",
        "_unit_access",
        "_views",
        "access",
        "crc32_lookup",
        "dtype",
        "extents",
        "file",
        "name",
        "num_tokens",
        "unit",
        "wait",
    )
    file: Ranges

    def __init__(
        self,
        file: Ranges,
        extents: Extents,
        dtype: np.dtype[Any],
        num_tokens: int,
        crc32_lookup: Callable[[], Callable[[int], int]] | None = None,
    ) -> None:
        self.file = file
        self.extents = extents
        self.dtype = dtype
        self.num_tokens = num_tokens
        self.unit = extents.batch_bytes // dtype.itemsize
        self.name = file.name
        self.access = file.access
        self.wait = Wait.FAR if isinstance(file, RemoteObject) else Wait.LOCAL
        self.crc32_lookup = crc32_lookup
        #: Views of the units, read-only and private; None: not mapped yet.
        self._views: tuple[list[TokenArray] | None, list[TokenArray] | None] = (None, None)
        self._unit_access: UnitAccess | None = None
        self._flat: TokenArray | None = None
        self._read_before: TokenRun | None = None
        self._pages: Pages | None = None
        if isinstance(file, RemoteObject):
            return
        if file.size < extents.end:
            file.close()
            raise cut_short(file.path, f"at least {extents.end:,} bytes", file.size)
        if file.name.endswith(PARTIAL_SUFFIX):  # its writer is about to cut off the space after the last unit
            file.size = extents.end

    @property
    def identity(self) -> Identity:  # type: ignore[override]
        return self.file.identity

    @property
    def pages(self) -> Pages:  # type: ignore[override]
        if self._pages is None:
            file = self.file
            facts = self.extents, self.dtype.itemsize, self.num_tokens
            self._pages = FilePages(file, *facts) if isinstance(file, LocalFile) else NO_PAGES
        return self._pages

    def remember(self, start: int, tokens: TokenArray) -> None:
        """Keep a unit that was read to prove an object, for the next read."""
        self._read_before = start, tokens

    def unit_of_object(self, number: int) -> TokenArray:
        """Return a whole unit, read-only: the bytes of one answer, or the bytes that were read to prove the object."""
        known = self._read_before
        if known is not None and known[0] == number * self.unit:
            self._read_before = None
            return known[1]
        offset = self.extents.offset(number)
        answer = cast(RemoteObject, self.file).read(offset, offset + self.extents.batch_bytes, alone=True)
        return np.frombuffer(answer, self.dtype)

    def read(self, runs: Iterable[TokenRun]) -> None:
        if self.access == "mmap":
            runs = [run for run in runs if not self._copy(*run)]
        elif self._pages is not None and self._pages.residency.in_memory:
            runs = [run for run in runs if not self._copy_large(*run)]
        self.file.read_ranges(self.ranges_of(runs))

    def ranges_of(self, runs: Iterable[TokenRun]) -> Iterator[Range]:
        """Yield the byte ranges of runs. The unit that was read to prove an object is copied, and needs no range."""
        for start, out in runs:
            if out.dtype != self.dtype:  # another size would count other bytes
                raise ArgumentError(f"{self.name}: expected an array of {self.dtype}, found {out.dtype}")
            known = self._read_before
            if known is not None and (known[0] == start or len(out) != self.unit):  # others leave it to its own read
                self._read_before = None
                if known[0] == start and len(known[1]) == len(out):
                    out[...] = known[1]
                    continue
            number, within = divmod(start, self.unit)
            if within + len(out) <= self.unit:
                yield self.extents.offset(number) + within * out.itemsize, out
            else:
                yield from self.extents.ranges_of_tokens(start, out)

    def _copy(self, start: int, out: TokenArray) -> bool:
        view = self.view(start, len(out))
        if view is None:
            return False
        out[...] = view
        return True

    def _copy_large(self, start: int, out: TokenArray) -> bool:
        """Copy a long run that is in memory from the mapping, in two thirds of the time of a read; False if it is not.

        A short one is not worth the faults of the pages that nobody has read from the mapping yet.
        """
        if out.nbytes < LARGE_RUN_BYTES or out.dtype != self.dtype:
            return False
        flat = self.flat()
        if flat is None or start + len(out) > len(flat):  # the read raises the error
            return False
        self.pages.residency.watch_some(np.copyto, out, flat[start : start + len(out)])
        return True

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        self._read_before = None  # rows do not take it up: it would be kept for ever
        self.pages.expect_rows(starts, out.shape[1])
        flat = self.flat()
        if flat is None or not len(starts):
            self.file.read_ranges(self.extents.ranges_of_rows(starts, out))
        else:
            self.pages.residency.watch_some(gather_from, flat, starts, out)

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        views = self.units(private)
        if not views or start >= self.num_tokens:  # a read of tokens that are not there raises the error
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
        """Return a view `(units, unit)` of the mapping for each run of extents; none if the file is not mapped.

        Parameters
        ----------
        private
            The views are writable and of the signed dtype, and the file never changes.
        """
        views = self._views[private]
        if views is None:
            views = self._mapped_units(private)
            self._views = (self._views[0], views) if private else (views, self._views[1])
        elif views:
            self.file.require_whole()
        return views

    def _mapped_units(self, private: bool) -> list[TokenArray]:
        data = self.file.mapping(private)
        if data is None:
            return []
        dtype = signed(self.dtype) if private else self.dtype
        return [
            np.ndarray((num_units, self.unit), dtype, data, base, (stride, dtype.itemsize))
            for base, stride, num_units in self.extents.runs
        ]

    def unit_access(self, private: bool) -> UnitAccess:
        """Return view, crc32 look-up, descriptor and size, for reads of units; the file's size is asked for again.

        The file has one run. They are one tuple for each file: with thousands of files, each further object would be
        a miss of the processor's cache.

        Parameters
        ----------
        private
            As for `units`. Such views are not compared: they have no look-up.
        """
        found = self._unit_access
        if found is not None and not private:
            _, _, fd, size = found
            if os.lseek(fd, 0, os.SEEK_END) < size:
                self.file.require_whole()
            return found
        views = self.units(private)
        view = views[0] if views else None
        crc32 = None if private or self.crc32_lookup is None else self.crc32_lookup()
        size = 0 if isinstance(self.file, RemoteObject) else self.file.size
        found = (view, crc32, self.file.fd, size)
        if not private and self.wait is not Wait.FAR:
            self._unit_access = found
        return found

    def flat(self) -> TokenArray | None:
        if self.access == "auto" and not self.pages.residency.in_memory:
            return None
        return self._joined_flat()

    def _joined_flat(self) -> TokenArray | None:
        """Return all tokens, mapped for reads in any order: several runs side by side, if they are pages."""
        if self._flat is None:
            data = map_side_by_side(self.parts())
            self._flat = None if data is None else data.view(self.dtype)[: self.num_tokens]
        else:
            self.file.require_whole()
        return self._flat

    def parts(self) -> list[FilePart]:
        """Return the parts of the file that hold all tokens one after the other; none if it may not be mapped."""
        if not self.file.maps or not self.file.num_bytes:
            return []
        self.file.require_whole()
        return [FilePart(self.file.fd, start, stop) for start, stop in self.extents.byte_ranges]

    def resolve(self) -> FileTokens:
        return self

    def close(self) -> None:
        self._views = (None, None)
        self._flat = None
        self._unit_access = None
        self.file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileTokens, (self.file, self.extents, self.dtype, self.num_tokens)


def read_together(reads: Sequence[tuple[Tokens, Iterable[TokenRun]]]) -> bool:
    """Read runs of several objects at the same time, and compare nothing.

    Return False, and read nothing, unless each of the tokens are in a single object.
    """
    found = [
        (file.file, file, runs)
        for tokens, runs in reads
        if (file := tokens.resolve()) is not None and isinstance(file.file, RemoteObject)
    ]
    if len(found) < len(reads):
        return False
    read_objects([(source, list(file.ranges_of(runs))) for source, file, runs in found])
    return True


class Wrapper(Tokens):
    """Other tokens, with some reads done in another way. See `Tokens`."""

    __slots__ = ()
    tokens: Tokens

    def _wrap(self, tokens: Tokens) -> None:
        """Take over the attributes of other tokens."""
        wrapper: Any = self  # the slots belong to a subclass
        wrapper.tokens = tokens
        wrapper.num_tokens = tokens.num_tokens
        wrapper.dtype = tokens.dtype
        wrapper.unit = tokens.unit
        wrapper.name = tokens.name
        wrapper.access = tokens.access
        wrapper.wait = tokens.wait
        wrapper.identity = tokens.identity

    @property
    def file(self) -> Ranges | None:  # type: ignore[override]
        return self.tokens.file

    @property
    def pages(self) -> Pages:  # type: ignore[override]
        return self.tokens.pages

    def close(self) -> None:
        self.tokens.close()


def corpus_closed(name: object) -> ClosedError:
    """Return the error of a use after `close`."""
    return ClosedError(f"{name}: this corpus was closed: open its path again")


class ClosedTokens(Wrapper):
    """The tokens of a closed reader: every use is an error, and open readers pay nothing for the check."""

    file = None

    def __init__(self, tokens: Tokens) -> None:
        self._wrap(tokens)
        del self.tokens  # and with them their mapping and its file

    def _refuse(self, *_: object) -> Any:
        raise corpus_closed(self.name)

    read = gather = view = _refuse  # type: ignore[assignment]
    pages = property(_refuse)

    def close(self) -> None:
        pass


class Converted(Wrapper):
    """Tokens as another dtype, which holds all of them. See `Tokens`.

    Parameters
    ----------
    tokens
        The tokens as they are stored.
    dtype
        The dtype of the tokens as they are read.
    """

    def __init__(self, tokens: Tokens, dtype: np.dtype[Any]) -> None:
        self._wrap(tokens)
        self.dtype = dtype

    def read(self, runs: Iterable[TokenRun]) -> None:
        for start, out in runs:
            tokens = np.empty(len(out), self.tokens.dtype)
            self.tokens.read([(start, tokens)])
            out[...] = tokens

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        tokens = np.empty(out.shape, self.tokens.dtype)
        self.tokens.gather(starts, tokens)
        out[...] = tokens
