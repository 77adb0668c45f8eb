"""The crc32 of units: compared as they are read, and computed as they are written, with the sha256 of a shard."""

from __future__ import annotations

import hashlib
import threading
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import BatchIndexError, ChecksumError, Remedy
from zb_hdf5.files.pages import Pages, PagesWrapper
from zb_hdf5.files.paths import any_path
from zb_hdf5.files.ranges import Extents, Range, Ranges, Run
from zb_hdf5.files.threads import ReadPool, SignalSafeFuture
from zb_hdf5.files.tokens import FileTokens, TokenRun, Tokens, Wait, Wrapper
from zb_hdf5.spec import CRC32_CHUNK_ROWS, TokenArray

try:  # crc32 of 64 KiB in 1.4 µs with AVX-512, else in 6, where zlib takes 19; it unpacks two to three times as fast
    from isal import isal_zlib

    fast_zlib: Any = isal_zlib
except ImportError:  # it has no wheel for this processor
    fast_zlib = zlib

#: `zlib.crc32`: of any C-contiguous buffer, from a start value on. It releases the interpreter lock above 5 KiB.
crc32_of: Final[Callable[..., int]] = fast_zlib.crc32
#: Bytes that fit into the cache of one processor core.
CACHED_BYTES: Final = 512 << 10
#: Bytes that are moved or digested at once: large enough for the disk, small enough for the cache.
GROUP_BYTES: Final = 4 << 20


def whole_units(start: int, count: int, unit: int, num_tokens: int) -> tuple[int, int]:
    """Return the first position and the end of the whole units in a run; both are the end of the run without any.

    Parameters
    ----------
    start, count
        The run.
    unit
        Tokens of a unit.
    num_tokens
        All tokens: the last unit, which may have fewer tokens, is whole if the run ends with it.
    """
    stop = start + count
    first = -(-start // unit) * unit
    end = stop if stop == num_tokens else stop // unit * unit
    return (first, end) if first < end else (stop, stop)


def take_units(
    flat: TokenArray,
    numbers: npt.NDArray[np.int64],
    out: TokenArray,
    compare: Callable[[npt.NDArray[np.int64], Sequence[int]], None],
) -> None:
    """Copy units in any order from a mapping, and compute the crc32 of some while they are in the processor's cache.

    Parameters
    ----------
    flat
        All tokens.
    numbers
        The numbers of the units.
    out
        Is filled with a unit in each row. The last unit of all may have fewer tokens: then it is none of these.
    compare
        Gets the numbers and the crc32 of all of them.
    """
    unit = out.shape[1]
    take = flat[: len(flat) - len(flat) % unit].reshape(-1, unit).take
    step = max(1, CACHED_BYTES // (unit * out.itemsize))
    found: list[int] = []
    for first in range(0, len(out), step):
        part = out[first : first + step]
        take(numbers[first : first + step], 0, part, "clip")  # "clip": `part` is filled without a buffer
        found += map(crc32_of, part)
    compare(numbers, found)


class UnitTokens(Tokens):
    """Tokens that are read in whole units: decoded, or compared with their crc32. Each thread keeps the last unit."""

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
            local.count = max(0, min(self.unit, self.num_tokens - start))
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
        """Fill 1-D `out` with tokens, each from the buffer of its whole unit."""
        done = 0
        while done < len(out):
            number, within = divmod(start + done, self.unit)
            part = self._unit(number)[within : within + len(out) - done]
            if not len(part):
                raise BatchIndexError(f"{self.name}: expected tokens up to {self.num_tokens:,}, found {start + done:,}")
            out[done : done + len(part)] = part
            done += len(part)

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        if not len(starts):
            return
        order = starts.argsort()  # the rows of one unit follow each other
        ascending = starts[order]
        units, places = np.divmod(ascending, self.unit)
        columns = np.arange(out.shape[1])
        for first, stop in pairwise([0, *(np.flatnonzero(units[1:] != units[:-1]) + 1).tolist(), len(order)]):
            if stop - first > 1:
                unit = self._unit(int(units[first]))
                if places[stop - 1] + len(columns) <= len(unit):
                    out[order[first:stop]] = unit[places[first:stop, np.newaxis] + columns]
                    continue
            rows = map(out.__getitem__, order[first:stop].tolist())
            self.read(zip(ascending[first:stop].tolist(), rows, strict=True))


#: The reads that a reader with this `verify` compares.
VERIFIED: Final = {"auto": "whole reads", "batch": "all reads", "store": "store", "none": "none"}


class Crc32Rows:
    """The stored crc32 of each unit: a view of the mapping, else read when first asked for and kept with the file.

    Parameters
    ----------
    read
        Returns all rows, and reads the ranges that it gets at the same time. It must be picklable.
    remedy
        The cure where a unit differs.
    """

    __slots__ = ("_read", "_rows", "remedy")  # one for each of perhaps 50,000 open files

    def __init__(self, read: Callable[..., npt.NDArray[np.uint32]], remedy: Remedy = Remedy.VERIFY) -> None:
        self._read = read
        self.remedy = remedy
        self._rows: npt.NDArray[np.uint32] | None = None

    def all(self, *others: Range) -> npt.NDArray[np.uint32]:
        """Return all rows. `others` are ranges of the same file, which are read at the same time."""
        if self._rows is None or others:
            self._rows = self._read(*others)
        return self._rows

    def crc32_lookup(self) -> Callable[[int], int]:
        """Return a function from the number of a unit to its crc32."""
        return (self.all() if self._rows is None else self._rows).item

    def __reduce__(self) -> tuple[Any, ...]:
        return Crc32Rows, (self._read, self.remedy)


def stored_crc32(file: Ranges, runs: tuple[Run, ...], num_rows: int) -> Crc32Rows:
    """Return the crc32 rows that a file holds: a view if they are one array, and the file may be mapped.

    Parameters
    ----------
    file
        The file of the rows.
    runs
        The byte offsets of their chunks, of `CRC32_CHUNK_ROWS` rows each.
    num_rows
        The number of rows, which may end inside the last chunk.
    """
    return Crc32Rows(partial(_read_crc32, file, runs, num_rows))


def _read_crc32(file: Ranges, runs: tuple[Run, ...], num_rows: int, *others: Range) -> npt.NDArray[np.uint32]:
    extents = Extents(runs, 4 * CRC32_CHUNK_ROWS)
    if num_rows and not others and len(extents.byte_ranges) == 1:
        data = file.mapping()
        base = extents.runs[0].base
        if data is not None and base + 4 * num_rows <= len(data):
            return np.ndarray(num_rows, "<u4", data, base)
    rows = np.empty(num_rows, "<u4")
    file.read_ranges([*others, *extents.ranges_of_tokens(0, rows)])
    return rows


class UnitPages(PagesWrapper):
    """The pages of tokens that are read in whole units.

    Parameters
    ----------
    pages
        The pages of the tokens.
    unit, num_tokens
        Tokens of a unit, and all tokens: the last unit may have fewer.
    """

    __slots__ = ("_num_tokens", "_unit")

    def __init__(self, pages: Pages, unit: int, num_tokens: int) -> None:
        super().__init__(pages)
        self._unit = unit
        self._num_tokens = num_tokens

    def will_gather(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        firsts = [start - start % self._unit for start in starts]
        stops = [min(end + -end % self._unit, self._num_tokens) for end in ends]
        self.pages.will_gather(firsts, [stop - first for first, stop in zip(firsts, stops, strict=True)])


class Checked(Wrapper, UnitTokens):
    """Tokens of one file whose whole units are compared with their crc32, while they are in the processor's cache.

    Parameters
    ----------
    tokens
        The tokens of the file.
    rows
        The stored crc32 of each unit.
    path, noun
        The file, and a unit of it, for messages.
    strict
        False: units that are read whole into a buffer are compared; views and gathers are not. True: whole units are
        read and compared for every read, and nothing is a view.
    unit
        Tokens of a unit that has a crc32; None: as the tokens have it.
    """

    __slots__ = (
        "_noun",
        "_path",
        "_strict",
        "access",
        "dtype",
        "identity",
        "name",
        "num_tokens",
        "rows",
        "tokens",
        "unit",
        "wait",
    )

    def __init__(
        self, tokens: Tokens, rows: Crc32Rows, path: Path, noun: str, strict: bool, unit: int | None = None
    ) -> None:
        if strict:  # else no buffer of each thread: it takes 750 bytes for each of perhaps thousands of open files
            super().__init__()
        self._wrap(tokens)
        self.unit = unit or tokens.unit
        self.rows = rows
        self._path = str(path)
        self._noun = noun
        self._strict = strict
        file = tokens.resolve()
        if file is not None and file.unit == self.unit:
            file.crc32_lookup = rows.crc32_lookup

    def read(self, runs: Iterable[TokenRun]) -> None:
        runs = list(runs)
        if self._strict and not all(self._is_whole(start, start + len(out)) for start, out in runs):
            UnitTokens.read(self, runs)
            return
        if self.wait is not Wait.LOCAL or not self._strict:
            self.tokens.read(runs)
            self.compare(runs)
            return
        flat = self.tokens.flat()
        parts = [part for run in runs for part in self._parts(*run)]
        if flat is not None:
            self.tokens.pages.residency.watch_some(self._take, flat, parts)
            return
        for part in parts:
            self.tokens.read([part])
            self.compare([part])

    def _parts(self, start: int, out: TokenArray) -> Iterator[TokenRun]:
        """Yield parts of a run that are whole units, and fit into the processor's cache where several do."""
        step = max(1, CACHED_BYTES // (self.unit * self.dtype.itemsize)) * self.unit
        if len(out) <= step:
            yield start, out
            return
        done = 0
        while done < len(out):
            take = step - (start + done) % self.unit
            yield start + done, out[done : done + take]
            done += take

    def _is_whole(self, start: int, stop: int) -> bool:
        """Return whether positions begin with a unit, and end with one."""
        return start % self.unit == 0 and (stop % self.unit == 0 or stop == self.num_tokens)

    def compare(self, runs: Iterable[TokenRun]) -> None:
        """Compare the whole units in runs that were read from the file. Raises as `read`."""
        unit = self.unit
        num_tokens = self.num_tokens
        for start, out in runs:
            first, end = whole_units(start, len(out), unit, num_tokens)
            if first < end:
                self.compare_units(first, out[first - start : end - start])

    def _read_units(self, start: int, out: TokenArray) -> None:
        self.tokens.read([(start, out)])
        self.compare_units(start, out)

    def compare_units(self, start: int, out: TokenArray) -> None:
        """Compare whole units that were read from a position on."""
        unit = self.unit
        first = start // unit
        if len(out) <= unit:
            self._compare_one(first, crc32_of(out))
            return
        whole = len(out) - len(out) % unit
        found = [*map(crc32_of, out[:whole].reshape(-1, unit))]  # a loop of Python took three times as long
        if whole < len(out):  # the last unit of all
            found.append(crc32_of(out[whole:]))
        self.compare_crc32(np.arange(first, first + len(found)), found)

    def compare_crc32(self, numbers: npt.NDArray[np.int64], found: Sequence[int]) -> None:
        """Compare the crc32 of units that were read, which have these numbers."""
        if self.rows.all()[numbers].tolist() != found:
            for number, crc32 in zip(numbers.tolist(), found, strict=True):
                self._compare_one(number, crc32)

    def _compare_one(self, number: int, found: int) -> None:
        expected = self.rows.crc32_lookup()(number)
        if found != expected:
            raise ChecksumError(
                f"{self._path}: {self._noun} {number:,}: expected crc32 {expected:08x}, found {found:08x}",
                remedy=self.rows.remedy,
                at=any_path(self._path),
            )

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        if self._strict and (out.shape[1] % self.unit or (starts % self.unit).any()):
            UnitTokens.gather(self, starts, out)
            return
        flat = self.tokens.flat() if self._strict else None
        if flat is None or not len(starts):
            self.tokens.gather(starts, out)
            if self._strict:
                self.compare(zip(starts.tolist(), out, strict=True))
        elif out.shape[1] == self.unit:
            self.tokens.pages.residency.watch_some(take_units, flat, starts // self.unit, out, self.compare_crc32)
        else:
            self.tokens.pages.residency.watch_some(self._take, flat, zip(starts.tolist(), out, strict=True))

    def _take(self, flat: TokenArray, runs: Iterable[TokenRun]) -> None:
        """Copy whole units from a mapping, and compare some while they are in the processor's cache."""
        for start, out in runs:
            out[...] = flat[start : start + len(out)]
            self.compare_units(start, out)

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        return None if self._strict else self.tokens.view(start, count, private)

    def flat(self) -> TokenArray | None:
        return None if self._strict else self.tokens.flat()

    @property
    def pages(self) -> Pages:  # type: ignore[override]
        pages = self.tokens.pages
        return UnitPages(pages, self.unit, self.num_tokens) if self._strict else pages

    def resolve(self) -> FileTokens | None:
        return self.tokens.resolve()

    def __reduce__(self) -> tuple[Any, ...]:
        return Checked, (self.tokens, self.rows, any_path(self._path), self._noun, self._strict, self.unit)


def checked(
    tokens: Tokens, rows: Crc32Rows | None, path: Path, noun: str, verify: str, unit: int | None = None
) -> Tokens:
    """Return tokens that are compared with their crc32 as they are read, or the tokens themselves.

    Parameters
    ----------
    tokens, rows, path, noun, unit
        As for `Checked`; without rows nothing is compared.
    verify
        "auto": units that are read whole are compared. "batch": all reads are. Else nothing is.
    """
    if rows is None or verify not in ("auto", "batch"):
        return tokens
    return Checked(tokens, rows, path, noun, verify == "batch", unit)


class GroupDigest(NamedTuple):
    """The digests of one group of batches, which two threads compute.

    A commit needs the crc32 of its batches, and not the sha256, which takes ten times as long: the sha256 of a group is
    computed while the next groups are written.
    """

    sha256: SignalSafeFuture[Any]  # the running sha256, of this group and all before it
    rest: SignalSafeFuture[tuple[list[int], int]]  # the crc32 of each batch, and the largest token

    @property
    def crc32(self) -> list[int]:
        return self.rest.result()[0]

    @property
    def max_token(self) -> int:
        return self.rest.result()[1]

    def wait(self) -> None:
        """Wait for both threads; from then on the group may change."""
        self.sha256.wait()
        self.rest.wait()


class TokenDigest:
    """The digests of batches of tokens as they are stored, in order, without padding.

    One caller submits a group, leaves it unchanged until `wait` returns, and accepts it before it submits the next one.

    Parameters
    ----------
    known_sha256
        The sha256 of all batches, for a copy, whose every crc32 is compared. It is not computed then.
    """

    def __init__(self, known_sha256: str | None = None) -> None:
        self._known_sha256 = known_sha256
        self._sha256: SignalSafeFuture[Any] = SignalSafeFuture()
        self._sha256.give(hashlib.sha256())
        self._last: GroupDigest | None = None
        self._hashing = ReadPool(1, "zb-digest")
        self._rest = ReadPool(1, "zb-digest")

    def submit(self, batches: TokenArray) -> GroupDigest:
        """Start digesting `batches`, shape `(count, B, S)`, C-contiguous and of the stored dtype."""
        sha256 = self._sha256
        if self._known_sha256 is None:
            sha256 = self._hashing.submit(_hash, sha256, batches)
        self._last = GroupDigest(sha256, self._rest.submit(_crc32s_and_max, batches))
        return self._last

    def accept(self, group: GroupDigest) -> None:
        """Add a group that is on disk to the running sha256. A group whose write failed is never accepted."""
        self._sha256 = group.sha256

    def sha256(self) -> str:
        """Hexadecimal sha256 of all accepted groups."""
        return self._known_sha256 or self._sha256.result().hexdigest()

    def close(self) -> None:
        """Wait for the threads and end them."""
        if self._last is not None:  # each thread works in the order of the groups
            self._last.wait()
        self._hashing.close()
        self._rest.close()


def _hash(before: SignalSafeFuture[Any], batches: TokenArray) -> Any:
    sha256 = before.result().copy()
    sha256.update(batches)
    return sha256


def _crc32s_and_max(batches: TokenArray) -> tuple[list[int], int]:
    found: list[int] = []
    max_token = 0
    step = max(1, CACHED_BYTES // max(1, batches[:1].nbytes))
    for start in range(0, len(batches), step):  # the second pass over a part finds it in the cache
        part = batches[start : start + step]
        found += map(crc32_of, part)
        max_token = max(max_token, int(part.max(initial=0)))
    return found, max_token
