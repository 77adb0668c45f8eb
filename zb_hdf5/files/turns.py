"""The turns that threads take at the same work."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any

from zb_hdf5.files.forks import OwnLock


class Turns:
    """Turns of threads at the same work: each piece of work has a key. Usable after fork; a pickled copy has none.

    A thread may take a turn while it has another one: no two keys share a lock.
    """

    def __init__(self) -> None:
        self._locks: dict[int, OwnLock] = {}
        self._failed: dict[int, tuple[float, Exception]] = {}

    @contextlib.contextmanager
    def of(self, key: int) -> Iterator[None]:
        """Wait for the turn of a block; raise the error with which another thread failed while this one waited."""
        asked_s = time.monotonic()
        lock = self._locks.setdefault(key, OwnLock())
        with lock:
            failed = self._failed.get(key)
            if failed is not None:
                failed_s, error = failed
                if failed_s > asked_s:
                    raise copy.copy(error)
                self._failed.pop(key, None)  # it is tried again
            try:
                yield
            except Exception as error:
                self._failed[key] = time.monotonic(), copy.copy(error)  # its traceback would hold files open
                raise
            finally:
                self._locks.pop(key, None)  # whoever waits has it; whoever comes finds the work done, or its error

    def __reduce__(self) -> tuple[Any, ...]:
        return Turns, ()


_FINDING = Turns()


def compute_once(owner: object) -> contextlib.AbstractContextManager[None]:
    """Return the lock under which one thread finds, for all of them, a fact that an object keeps from then on.

    Many threads begin to read a far store at once, and each would fetch the same. The threads that wait while one of
    them fails get the same error: each would try a server that is down for minutes.
    """
    return _FINDING.of(id(owner))
