"""The open files of all stores of a process: as many as the process may have. The least recently used ones close."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

File = TypeVar("File")

#: Descriptors that are left for everything else that the process opens.
SPARE_DESCRIPTORS: Final = 256
#: Python's mmap has a descriptor of its own.
DESCRIPTORS_PER_MAPPED_FILE: Final = 2
#: An object has no descriptor, and 16 KiB of crc32 rows: so few are held that these are at most 64 MiB.
DESCRIPTORS_PER_OBJECT: Final = 8
#: Descriptors that stores hold however low the limit is.
MIN_DESCRIPTORS: Final = 16
#: Mappings that Linux allows a process, if its limit cannot be read.
DEFAULT_MAX_MAPPINGS: Final = 65_530


_LOCK = threading.RLock()  # a finalizer may close a store in the middle of all this
_OPENING = [threading.Lock() for _ in range(64)]
_FINDING = [threading.RLock() for _ in range(64)]  # files may open under one of these, and not the other way round
_FAILED: dict[int, tuple[tuple[int, ...], float, Exception]] = {}  # what went wrong last under each of these locks
_STORES: weakref.WeakSet[OpenFiles[Any]] = weakref.WeakSet()


class OpenFiles(Generic[File]):
    """The open files of one store, by their numbers. Thread-safe; usable after fork."""

    # `known.get(number)` is a plain look-up, which notes no time: when no more files may be open, the older half of
    # `known` rests; a resting file that is asked for moves back, the others close, the oldest first. A dropped file
    # closes its descriptor when the last thread that reads from it has finished. To open a far file costs reads from
    # a server: one thread opens it, and others wait.

    def __init__(
        self,
        access: str,
        let_go: Callable[[int, File], None] = lambda number, file: None,
        *,
        far: bool = False,
    ) -> None:
        self.known: dict[int, File] = {}
        self.resting: dict[int, File] = {}
        mapped = 1 if access == "pread" else DESCRIPTORS_PER_MAPPED_FILE
        self._descriptors = DESCRIPTORS_PER_OBJECT if far else mapped
        self._let_go, self._far = let_go, far
        with _LOCK:
            _STORES.add(self)

    def open(self, number: int, open_file: Callable[[int], File]) -> File:
        """Return a file that is not among the known ones; of two threads that open the same one, one keeps it."""
        with _in_turn(_OPENING, (id(self), number)) if self._far else contextlib.nullcontext():
            return self._open(number, open_file)

    def _open(self, number: int, open_file: Callable[[int], File]) -> File:
        with _LOCK:
            file = self.known.get(number) or self.resting.pop(number, None)
            if file is not None:
                self.known[number] = file
                return file
        file = open_with_room(partial(open_file, number))  # without the lock: on a network this takes a while
        with _LOCK:
            file = self.known.setdefault(number, file)
            held = _held()
            allowed = descriptor_room(held)
            if held >= allowed:
                _make_room(allowed)
        return file

    def files(self) -> dict[int, File]:
        """Return all that are open."""
        with _LOCK:
            return self.resting | self.known

    def held(self) -> int:
        """Return how many descriptors these files take. This and what follows: under the lock."""
        return self._descriptors * (len(self.known) + len(self.resting))

    def rest(self) -> None:
        """Put the older half of the known files to rest."""
        for number in list(self.known)[: (len(self.known) + 1) // 2]:
            self.resting[number] = self.known.pop(number)

    def close_oldest(self) -> None:
        """Let go of the file that has rested longest."""
        number = next(iter(self.resting))
        self._let_go(number, self.resting.pop(number))


def finding(owner: object) -> contextlib.AbstractContextManager[None]:
    """Return the lock under which one thread finds, for all of them, what an object keeps from then on."""
    # many threads begin to read a far store at once, and each would fetch the same; those that wait while one fails get
    # the same error, for each would try a server that is down for minutes
    return _in_turn(_FINDING, (id(owner),))


@contextlib.contextmanager
def _in_turn(locks: Sequence[Any], key: tuple[int, ...]) -> Iterator[None]:
    lock, asked_s = locks[hash(key) % len(locks)], time.monotonic()
    with lock:
        of, failed_s, error = _FAILED.get(id(lock), (None, 0.0, None))
        if error is not None and of == key and failed_s > asked_s:
            raise copy.copy(error)
        try:
            yield
        except Exception as error:
            _FAILED[id(lock)] = key, time.monotonic(), copy.copy(error)  # its traceback would hold files open
            raise


def open_with_room(open_file: Callable[[], File]) -> File:
    """Open a file; where the process may open no more, stores let go of some of theirs before."""
    try:
        return open_file()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    with _LOCK:  # others have taken more than was left for them
        _make_room(_held() // 2)
    return open_file()


def descriptor_room(needed: int) -> int:
    """Return how many descriptors all stores may hold; where more are needed, raise the process's soft limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and needed >= soft - SPARE_DESCRIPTORS and soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a system may have a lower limit than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return room_under(soft)


def room_under(limit: int) -> int:
    """Return how many descriptors all stores may hold of a process that may have `limit` of them."""
    mappings = _max_mappings() // 2  # a file may be mapped twice, and others map things too
    allowed = mappings if limit == resource.RLIM_INFINITY else min(mappings, limit - SPARE_DESCRIPTORS)
    return max(allowed, MIN_DESCRIPTORS)


@cache
def _max_mappings() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return DEFAULT_MAX_MAPPINGS


def _held() -> int:
    return sum(store.held() for store in _STORES)


def _make_room(allowed: int) -> None:
    """Close files until no more descriptors than `allowed` are held."""
    while True:
        stores = list(_STORES)
        resting, known = sum(len(store.resting) for store in stores), sum(len(store.known) for store in stores)
        if 4 * resting < known:  # before they must close: files in use have time to move back
            for store in stores:
                store.rest()
        if _held() <= allowed:
            return
        max(stores, key=lambda store: len(store.resting)).close_oldest()


def _renew_locks() -> None:
    global _LOCK, _OPENING, _FINDING
    _LOCK, _OPENING = threading.RLock(), [threading.Lock() for _ in _OPENING]
    _FINDING = [threading.RLock() for _ in _FINDING]


os.register_at_fork(after_in_child=_renew_locks)  # another thread of the parent may have held it
