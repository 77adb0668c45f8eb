"""Locks and kept values for objects that threads share: the child of a fork never waits for a thread of its parent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

Value = TypeVar("Value")

_generation = 0  # the number of forks between the first process and this one


def _count_fork() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count_fork)


def generation() -> int:
    """Return a number that tells this process from its parents. The id of a process may come back."""
    return _generation


class OwnLock:
    """A lock that each process has for itself: in a pickled copy, or the child of a fork, it is free.

    One thread may take it several times.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: dict[int, threading.RLock] = {}  # by generation

    def __enter__(self) -> None:
        self._locks.setdefault(_generation, threading.RLock()).acquire()  # of two threads one brings the lock

    def __exit__(self, *_: object) -> None:
        self._locks[_generation].release()

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnLock, ()


class cached_per_process(Generic[Value]):
    """A property that is computed when it is first asked for, and then kept; two threads may both compute it.

    On Python 3.11 `functools.cached_property` has one lock for all instances: the child of a fork waits for ever if
    another thread of its parent held it.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Self | Value:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)  # from now on an attribute as any other
        return value

    if TYPE_CHECKING:

        def __set__(self, instance: object, value: Value) -> None:
            """Keep a value that was computed elsewhere."""
