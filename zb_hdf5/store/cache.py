"""A cache on a fast local disk in front of the tokens of any corpus: units are kept when they are first read.

A store has a folder, and each column of it two files there. The data file is sparse, with unit i at i times the bytes
of a unit. The `.marks` file has 8 bytes for each unit: a mark, and the crc32 of its bytes. The bytes are written first,
and then the mark; bytes that differ from their crc32 count as absent. So processes share the files without a lock, and
a kill at any moment, a full disk, a flipped bit or a file that is cut short costs a read of the store and nothing else.

The files are read by position and never mapped: to touch a mapped hole of a file in a RAM disk takes a page of it, and
to touch a part that another process has cut off is a bus error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError, format_bytes, parse_size
from zb_hdf5.files.checked import UnitTokens, crc32_of
from zb_hdf5.files.identity import identity_of
from zb_hdf5.files.pages import Pages
from zb_hdf5.files.paths import RemotePath, local_path, read_whole
from zb_hdf5.files.publishing import write_fully
from zb_hdf5.files.ranges import Extents, LocalFile, Run, read_fully
from zb_hdf5.files.threads import LOOK_S, raise_if_cancelled
from zb_hdf5.files.tokens import FileTokens, TokenRun, Tokens, Wait, Wrapper
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.spec import U32_MAX, TokenArray

#: The folder of a store; nothing else in a cache folder is ever touched.
STORE_NAME: Final = re.compile(r"zb-cache-[0-9a-f]{64}")
#: The file that has the path or URL of the store.
SOURCE: Final = "source"
#: The upper half of a mark; the lower half is the crc32.
MARK: Final = 0x7A626331
MARK_BYTES: Final = 8
#: The errors of a disk that is full.
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
#: Marks that are read together: a block of steps needs many of them.
MARKS_AT_ONCE: Final = 1 << 14
#: A process writes a 64th of the bytes that are left before it measures the folder again.
GRANT_SHARE: Final = 64
#: The most bytes that it writes before that.
GRANT_BYTES: Final = 64 << 20


class CachedColumn:
    """The units of one column in a cache folder; any of them may be absent.

    Once it is open no error of the disk is raised: units that cannot be read are absent, and after a unit that cannot
    be read or written no further one is kept, with one warning.

    Parameters
    ----------
    folder
        The folder of the store in the cache folder; it is made.
    name
        The name of the data file.
    tokens
        The tokens of the store: unit, dtype and number are theirs.
    max_bytes
        The most bytes that all stores in the cache folder may occupy.

    Attributes
    ----------
    full
        Whether no further unit is kept.
    seen
        The units that this process has compared with their crc32.
    rows
        The data file as tokens, while it is open.
    """

    rows: FileTokens

    def __init__(self, folder: Path, name: str, tokens: Tokens, max_bytes: int) -> None:
        self._path = folder / name
        self._max_bytes = max_bytes
        self._unit = tokens.unit
        self._dtype = tokens.dtype
        self._bytes = tokens.unit * tokens.dtype.itemsize
        self._num_units = -(-tokens.num_tokens // tokens.unit)
        self._reset()
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / SOURCE, "wb", opener=lambda path, flags: _open_file(Path(path))) as file:
            file.write(os.fsencode(tokens.name))
            file.truncate()
        self._open()

    def _reset(self) -> None:
        self.full = False
        self.seen: npt.NDArray[np.bool_] = np.zeros(self._num_units, bool)
        self._granted = self._written = 0
        self._fd = self._marks_fd = -1
        #: Closes the open files, the last one first.
        self._closers: list[Callable[[], object]] = []

    def _open(self) -> None:
        self._fd = self._keep_open(self._path)
        self._marks_fd = self._keep_open(self._path.with_name(self._path.name + ".marks"))
        self._mend_size()
        extents = Extents([Run(0, self._bytes, self._num_units)], self._bytes)
        file = LocalFile(self._path, identity_of(self._fd, growing=True), "pread")
        self.rows = FileTokens(file, extents, self._dtype, self._num_units * self._unit)
        self._closers.append(self.rows.close)

    def _keep_open(self, path: Path) -> int:
        """Open a file until `close`, or the end of this object."""
        fd = _open_file(path)
        self._closers.append(weakref.finalize(self, os.close, fd))
        return fd

    @property
    def is_open(self) -> bool:
        """Whether the files are open."""
        return bool(self._closers)

    def _mend_size(self) -> None:
        size = self._num_units * self._bytes
        if os.fstat(self._fd).st_size < size:
            os.ftruncate(self._fd, size)

    def crc32_lookup(self) -> Callable[[int], int]:
        """Return a function from a unit to its crc32, -1 where it is absent; it reads many marks at once, now."""
        if self._num_units > MARKS_AT_ONCE:
            return self.__getitem__
        size = self._num_units * MARK_BYTES
        try:
            marks = np.frombuffer(os.pread(self._marks_fd, size, 0).ljust(size, b"\0"), "<i8")
        except OSError as error:
            self._leave(error)
            marks = np.zeros(self._num_units, np.int64)
        return np.where(marks >> 32 == MARK, marks & U32_MAX, -1).item

    def has(self, number: int) -> bool:
        """Return whether a unit has a mark."""
        return self[number] >= 0

    def __getitem__(self, number: int) -> int:
        """Return the crc32 of a unit; -1 where it is absent."""
        try:
            mark = int.from_bytes(os.pread(self._marks_fd, MARK_BYTES, number * MARK_BYTES), "little")
        except OSError as error:
            self._leave(error)
            return -1
        return mark & U32_MAX if mark >> 32 == MARK else -1

    def read_into(self, number: int, out: TokenArray) -> bool:
        """Fill 1-D `out` with a unit and compare it with its crc32; return False if it is absent or damaged."""
        if (expected := self[number]) < 0:
            return False
        try:
            read_fully(self._fd, out, number * self._bytes)
        except OSError as error:
            self._leave(error)
            return False
        good = self.seen[number] = crc32_of(out) == expected
        return good

    def put(self, number: int, tokens: TokenArray) -> None:
        """Keep a unit if it fits."""
        data = tokens.view(np.uint8)  # a structured dtype has no simple buffer
        mark = (MARK << 32 | crc32_of(data)).to_bytes(MARK_BYTES, "little")
        try:
            if not self.full and not self._take_room():
                self._leave()
            if not self.full:
                if os.fstat(self._fd).st_size < self._num_units * self._bytes:
                    self.mend()  # else a write behind the cut would make zeros of units that were seen
                write_fully(self._fd, data, number * self._bytes)
                write_fully(self._marks_fd, mark, number * MARK_BYTES)
        except OSError as error:
            self._leave(error)
        self.seen[number] = not self.full

    def _leave(self, error: OSError | None = None) -> None:
        """Keep nothing from now on; warn once, with the error of the disk, or with the stores that fill the cache."""
        if self.full:
            return
        self.full = True
        root = self._path.parent.parent
        if error is not None and error.errno not in FULL:
            text = f"{root}: the cache cannot be used ({error.strerror}): the store is read in its place"
        else:
            held = ""
            with contextlib.suppress(OSError):  # it was removed
                held = ", by " + ", ".join(f"{format_bytes(size)} of {source}" for _, source, size in stores_in(root))
            text = f"{root}: the cache is full, or its disk{held}: further reads keep nothing"
        warnings.warn(text, stacklevel=2)

    def _take_room(self) -> bool:
        """Return whether one more unit may be written."""
        if self._granted < self._bytes:
            # the disk counts all processes; without its answer our own share counts
            left = self._max_bytes - max(occupied_bytes(self._path.parent.parent), self._written)
            if left < self._bytes:
                return False
            self._granted = max(self._bytes, min(left // GRANT_SHARE, GRANT_BYTES))
        self._granted -= self._bytes
        self._written += self._bytes
        return True

    def mend(self) -> None:
        """Forget the units that were seen: the file was cut short, or cannot be read."""
        self.seen[:] = False
        with contextlib.suppress(OSError):
            self._mend_size()

    def close(self) -> None:
        """Close the files."""
        for close in reversed(self._closers):
            close()
        self._reset()
        self.full = True

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_path", "_max_bytes", "_unit", "_dtype", "_bytes", "_num_units")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        try:
            self._open()
        except OSError as error:
            self._leave(error)
            self.close()
        except IncompleteError:  # another process cuts it at this moment
            self.close()


def _open_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def stores_in(root: Path) -> list[tuple[Path, str, int]]:
    """Return the folder of each store in a cache folder, its path or URL, and the bytes that it occupies."""
    found = []
    with os.scandir(root) as entries:
        folders = sorted(Path(entry.path) for entry in entries if STORE_NAME.fullmatch(entry.name))
    for folder in folders:
        with contextlib.suppress(OSError, FormatError):  # removed at this moment, or not ours
            size = sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))
            found.append((folder, read_whole(folder / SOURCE).decode("utf-8", "replace"), size))
    return found


def occupied_bytes(root: Path) -> int:
    """Return the bytes that all stores in a cache folder occupy on the disk."""
    return sum(size for *_, size in stores_in(root))


#: Bytes of the units that one gather fetches at the same time.
FETCH_BYTES: Final = 32 << 20
#: The percentage of the free space of the disk that a cache takes by default.
FREE_PERCENT: Final = 90


@dataclass(frozen=True)
class Cache:
    """A folder on a fast local disk that keeps batches when they are first read, and the size of all in it.

    Several processes and jobs may share one folder, also for different stores.

    Parameters
    ----------
    folder
        The folder; it is made when a corpus is opened with it.
    max_bytes
        The most bytes that it may hold in all: `200 * 2**30` or "200GiB". None: what it holds already, and nine tenths
        of the free space of its disk. Processes do not wait for each other: each may exceed it by up to 64 MiB.

    Raises
    ------
    ArgumentError
        If the folder is a URL, or the size is none.

    Examples
    --------
    >>> loader = Loader("s3://bucket/train", cache=Cache("/scratch/cache", "200GiB"))  # doctest: +SKIP
    """

    folder: str | os.PathLike[str]
    max_bytes: int | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", local_path(self.folder))
        if isinstance(self.max_bytes, str):
            object.__setattr__(self, "max_bytes", parse_size(self.max_bytes))
        elif self.max_bytes is not None and (
            isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int) or self.max_bytes < 1
        ):
            raise ArgumentError(f"max_bytes must be a whole number of at least 1, found {self.max_bytes!r}")

    @classmethod
    def of(cls, cache: str | os.PathLike[str] | Cache) -> Cache:
        """Return a cache; that of a folder has the default size."""
        return cache if isinstance(cache, Cache) else cls(cache)

    def budget(self) -> int:
        """Make the folder, and return the most bytes that all stores in it may occupy."""
        root = Path(self.folder)
        try:
            root.mkdir(parents=True, exist_ok=True)
            if self.max_bytes is not None:
                return int(self.max_bytes)
            return occupied_bytes(root) + shutil.disk_usage(root).free * FREE_PERCENT // 100
        except OSError as error:
            raise _unusable(root, error) from error

    def over(self, batches: Batches) -> Corpus:
        """Return the corpus of batches with this cache in front of its tokens, and of the values of its fields.

        With verify="none" the units in the cache are read, and none is added, since nobody has compared it.
        """
        corpus = batches.corpus
        if not corpus.complete:
            raise ArgumentError(f"{corpus.path}: still grows: expected a finished store for a cache; leave out cache")
        if corpus.verify == "none":
            warnings.warn(f"{corpus.path}: verify='none' adds nothing to the cache {self.folder}", stacklevel=2)
        return corpus.cached(partial(self._tokens_of, self.budget(), corpus.known_as.in_cache(batches)))

    def _tokens_of(self, max_bytes: int, fingerprint: str, corpus: Corpus) -> Tokens:
        """Return the tokens of a corpus, kept in the folder of the corpus with this fingerprint; its own if they fail.

        Its column is the one of the tokens or of a field.
        """
        tokens = corpus.tokens
        source = corpus.compared_tokens()
        root = Path(self.folder)
        folder = root / _folder_name(fingerprint, corpus, compared=source is not None)
        if corpus.verify == "none":
            compared = root / _folder_name(fingerprint, corpus, compared=True)
            folder = compared if compared.exists() else folder
            if not folder.exists():
                return tokens
        name = f"{corpus.column_in_cache.replace('/', '-')}-{tokens.unit}{tokens.dtype.str}"
        try:
            column = CachedColumn(folder, name, tokens, max_bytes)
        except IncompleteError:  # of another process, at this moment
            self._leave_out("its files are being cut short")
            return tokens
        except OSError as error:
            if error.errno not in FULL:
                raise _unusable(root, error) from error
            self._leave_out("its disk is full")
            return tokens
        column.full = corpus.verify == "none"
        kind = ComparedCache if corpus.verified == "all reads" else Cached
        return kind(tokens, source or tokens, column)

    def _leave_out(self, problem: str) -> None:
        warnings.warn(f"{self.folder}: {problem}: the store is read without a cache", stacklevel=2)


def _unusable(folder: Path, error: Exception) -> ArgumentError:
    return ArgumentError(f"{folder}: expected a cache folder that can be written: {error}; choose another, or none")


def _folder_name(identity: str, corpus: Corpus, *, compared: bool) -> str:
    """Return the name of a store's folder: another content has another name, and windows of one stream the same.

    The files count too where a fingerprint is only a sample, or nobody compares the units: units of a damaged file must
    not outlive it, and nothing that is opened with verify="batch" may find them.
    """
    if not compared:
        identity = f"unchecked:{identity}"
    if identity.startswith(("sampled:", "unchecked:")):
        identity += _files_of(corpus)
    return f"zb-cache-{hashlib.sha256(identity.encode()).hexdigest()}"


def _files_of(corpus: Corpus) -> str:
    """Return the facts that differ for other files, or folders of files, of the same size."""
    path = corpus.path if isinstance(corpus.path, RemotePath) else corpus.path.absolute()
    if corpus.tokens.identity:
        return f"{path}:{corpus.tokens.identity[:2]}"  # the size and the time of a file, or of an object its ETag
    try:
        found = [(file.name, os.stat(file)) for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    except OSError as error:
        raise ArgumentError(
            f"{path}: expected a store with digests, or a file of this machine, to keep it in a cache; leave out cache"
        ) from error
    return f"{path}:{[(name, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in found]}"


def column_of(corpus: Corpus) -> CachedColumn:
    """Return the column of the cache of a corpus."""
    if not isinstance(corpus.tokens, Cached):
        raise ArgumentError(f"{corpus.path}: expected a corpus with a cache")
    return corpus.tokens.column


def num_fetched(corpus: Corpus) -> int | None:
    """Return the units that a corpus has fetched into its cache; None: it has none."""
    return corpus.tokens.num_fetched if isinstance(corpus.tokens, Cached) else None


class CachedPages(Pages):
    """The pages of a cache that is open, and of the tokens behind it where it lacks a unit.

    Parameters
    ----------
    column
        The units in the cache folder.
    tokens
        The tokens of the store.
    """

    __slots__ = ("_column", "_tokens")

    def __init__(self, column: CachedColumn, tokens: Tokens) -> None:
        super().__init__(column.rows.pages.residency)
        self._column = column
        self._tokens = tokens

    def ready(self, start: int) -> bool:
        tokens = self._tokens
        if self._column.has(start // tokens.unit):
            return self._column.rows.pages.ready(start)
        return tokens.wait is Wait.LOCAL and tokens.pages.ready(start)

    def will_gather(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        units = [start // self._tokens.unit for start in starts]
        kept = {number for number in {*units} if self._column.has(number)}  # each mark is a read
        for tokens, is_kept in ((self._column.rows, True), (self._tokens, False)):
            chosen = [(number in kept) is is_kept for number in units]
            tokens.pages.will_gather(list(compress(starts, chosen)), list(compress(counts, chosen)))

    def will_need(self, start: int, stop: int) -> None:
        unit = self._tokens.unit
        while start < stop:
            number = start // unit
            end = min(stop, (number + 1) * unit)
            (self._column.rows if self._column.has(number) else self._tokens).pages.will_need(start, end)
            start = end


class Cached(Wrapper):
    """Tokens that keep whole units in a cache, and read them there the next time. See `Tokens`.

    A missing unit is fetched whole, at most once by a process whose threads all miss it. Parts of a unit are read once
    this process has compared the whole of it, and whole units are compared each time. Once the cache is full, nothing
    is added.

    Parameters
    ----------
    tokens
        The tokens of the store, for units that are not kept.
    source
        The same tokens, compared at each read: the units that are kept are read from it.
    column
        The units in the cache folder.
    """

    def __init__(self, tokens: Tokens, source: Tokens, column: CachedColumn) -> None:
        self._wrap(tokens)
        self.source = source
        self.column = column
        self._fetching: dict[tuple[int, int], threading.Event] = {}
        self._num_fetched: dict[int, int] = {}  # of each thread, so that no two change one number

    @property
    def num_fetched(self) -> int:
        """The units that this process has read from the store, since the cache did not have them."""
        return sum(self._num_fetched.copy().values())

    def resolve(self) -> FileTokens | None:
        """Return the data file of the cache, which has the units with a crc32 other than -1; None if it is closed."""
        if not self.column.is_open:
            return None
        rows = self.column.rows
        return FileTokens(rows.file, rows.extents, self.dtype, rows.num_tokens, self.column.crc32_lookup)

    @property
    def pages(self) -> Pages:  # type: ignore[override]
        return CachedPages(self.column, self.tokens) if self.column.is_open else self.tokens.pages

    def _size(self, number: int) -> int:
        return min(self.unit, self.num_tokens - number * self.unit)

    def read(self, runs: Iterable[TokenRun]) -> None:
        missing: list[TokenRun] = []
        parts: list[TokenRun] = []
        for start, out in self._by_unit(runs):
            number, within = divmod(start, self.unit)
            if within or len(out) < self._size(number):
                parts.append((start, out))
            elif not self.column.read_into(number, out):
                missing.append((start, out))
        if missing:
            self._fetch(missing)
        if parts:
            self._see({start // self.unit for start, _ in parts})
            self._read_parts_of_units(parts)

    def _read_parts_of_units(self, parts: list[TokenRun]) -> None:
        """Fill each array with some tokens of one unit, which was seen if it is in the cache."""
        for start, out in parts:
            self.gather(np.array([start]), out[np.newaxis])

    def _by_unit(self, runs: Iterable[TokenRun]) -> Iterator[TokenRun]:
        for start, out in runs:
            while len(out):
                left = self.unit - start % self.unit
                yield start, out[:left]
                start += left
                out = out[left:]

    def _fetch(self, missing: list[TokenRun]) -> None:
        """Read whole units together and keep them, but for those that another thread fetches at this moment."""
        mine: list[TokenRun] = []
        others: list[tuple[int, TokenArray, threading.Event]] = []
        begun: dict[int, threading.Event] = {}
        pid = os.getpid()  # events of the parent of a fork are never set
        try:
            for start, out in missing:
                done = threading.Event()
                known = self._fetching.setdefault((pid, start), done)
                if known is not done:
                    others.append((start, out, known))
                    continue
                begun[start] = done
                if not self.column.read_into(start // self.unit, out):  # another thread has been here since
                    mine.append((start, out))
            self.source.read(mine)
            for start, out in mine:
                self.column.put(start // self.unit, out)
            thread = threading.get_ident()
            self._num_fetched[thread] = self._num_fetched.get(thread, 0) + len(mine)
        finally:
            for start, done in begun.items():
                del self._fetching[pid, start]
                done.set()
        for start, out, known in others:
            while not known.wait(LOOK_S):
                raise_if_cancelled()
            if not self.column.read_into(start // self.unit, out):
                self.tokens.read([(start, out)])

    def _see(self, units: Iterable[int]) -> None:
        """Take units into the cache, and compare them with their crc32, as far as they fit."""
        numbers = [number for number in units if not self.column.seen[number]]
        together = max(1, FETCH_BYTES // (self.unit * self.dtype.itemsize))
        for first in range(0, len(numbers), together):
            runs = [(number, np.empty(self._size(number), self.dtype)) for number in numbers[first : first + together]]
            missing = [(number * self.unit, out) for number, out in runs if not self.column.read_into(number, out)]
            if missing and not self.column.full:
                self._fetch(missing)

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        if out.shape[1] > self.unit:
            self.read(zip(starts.tolist(), out, strict=True))
            return
        firsts = starts // self.unit
        lasts = (starts + out.shape[1] - 1) // self.unit
        seen = self.column.seen
        if not (seen.take(firsts).all() and seen.take(lasts).all()):
            self._see(np.unique(np.concatenate([firsts, lasts])).tolist())
        here = seen[firsts] & seen[lasts]
        if here.any():
            try:
                _gather_some(self.column.rows, starts, out, here)
            except (OSError, IncompleteError):
                self.column.mend()
                here[:] = False
        if not here.all():
            _gather_some(self.tokens, starts, out, ~here)

    def close(self) -> None:
        self.column.close()
        self.source.close()
        self.tokens.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_fetching": {}, "_num_fetched": {}}


class ComparedCache(Cached, UnitTokens):
    """A cache in front of tokens that are all compared: each read of it is compared, and no unit is taken for seen.

    A part of a unit is copied from a buffer of this thread, which the whole unit was read into and compared in.
    """

    def __init__(self, tokens: Tokens, source: Tokens, column: CachedColumn) -> None:
        Cached.__init__(self, tokens, source, column)
        UnitTokens.__init__(self)

    def _read_units(self, start: int, out: TokenArray) -> None:
        Cached.read(self, [(start, out)])

    def _read_parts_of_units(self, parts: list[TokenRun]) -> None:
        for start, out in parts:
            self._read_parts(start, out)

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        self.read((int(starts[row]), out[row]) for row in starts.argsort().tolist())  # by their units

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        UnitTokens.__init__(self)


def _gather_some(tokens: Tokens, starts: npt.NDArray[np.int64], out: TokenArray, chosen: npt.NDArray[np.bool_]) -> None:
    if chosen.all():
        tokens.gather(starts, out)
    else:
        rows = np.empty((np.count_nonzero(chosen), out.shape[1]), out.dtype)
        tokens.gather(starts[chosen], rows)
        out[chosen] = rows
