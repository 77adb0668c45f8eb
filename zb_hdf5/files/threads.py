"""Threads that read, also ahead, and waits for servers: work that nobody wants any more is left, and begins no more.

`read_ahead` reads for loaders, conversions and commands. `ReadPool` run the reads of one iterator or call. They end
with it and are joined, so no file is read, and no array is filled, after the caller has gone on. `RequestPool` make the
requests. No signal wakes a client that waits for a server, and nothing cancels it: so the caller waits beside it, in a
way that Ctrl+C and `ReadPool.close` interrupt, and leaves the request alone; its result is dropped. All of them are
daemons: the end of the interpreter waits for no server.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar, cast

from zb_hdf5.errors import ClosedError
from zb_hdf5.files.forks import generation
from zb_hdf5.signals import deliver_signals, start_thread

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")
#: More threads than this do not make one process read faster: the calls between the reads hold the interpreter lock.
MAX_THREADS: Final = 4
#: Seconds of one wait at most: a signal that comes right before a wait does not wake it.
LOOK_S: Final = 0.5
#: An answer, and the call that gives it; None: the thread ends.
_Job: TypeAlias = "tuple[SignalSafeFuture[Any], Callable[..., Any], tuple[Any, ...]] | None"


class WorkCancelled(BaseException):
    """Raised inside a thread when the result of its work is no longer needed; no caller sees it."""


class _Here(threading.local):
    """The work that a thread does: None in threads of other people."""

    work: CancellableWork | None = None


_here: Final = _Here()


class CancellableWork:
    """Work that can be left, with all parts that other threads do of it. Thread-safe.

    As a context it is a moment in which it cannot be left: for what changes the arrays of the caller.
    """

    def __init__(self) -> None:
        self.is_left = False
        self._is_over = False
        self._changing = threading.Lock()
        self._over = threading.Lock()
        self._over.acquire()
        self._parts: set[CancellableWork] = set()
        self._whole = _here.work
        if self._whole is not None:
            self._whole._take(self)

    def _take(self, part: CancellableWork) -> None:
        self._parts.add(part)
        if self.is_left:  # `leave` may not have seen this part
            part.leave()

    def wait(self, limit_s: float = math.inf) -> None:
        """Wait until the work is over, or for some seconds; raise `WorkCancelled` if it is left."""
        end_s = time.monotonic() + limit_s
        while not self._over.acquire(timeout=min(LOOK_S, max(0.0, end_s - time.monotonic()))):
            deliver_signals()
            if time.monotonic() >= end_s:
                break
        if self.is_left:
            raise WorkCancelled

    def end(self) -> None:
        """Wake the thread that waits."""
        with self._changing:
            self._wake()

    def leave(self) -> None:
        """Wake the thread that waits, and have the work end by itself, without a result."""
        with self._changing:
            self.is_left = True
            self._wake()
        for part in self._parts.copy():
            part.leave()

    def _wake(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._over.release()

    def forget(self) -> None:
        """Leave the work, and take it out of the work that it was a part of."""
        self.leave()
        if self._whole is not None:
            self._whole._parts.discard(self)

    def __enter__(self) -> None:
        self._changing.acquire()
        if self.is_left:
            self._changing.release()
            raise WorkCancelled

    def __exit__(self, *_: object) -> None:
        self._changing.release()


def raise_if_cancelled() -> None:
    """Raise `WorkCancelled` in a thread whose work is left."""
    if _here.work is not None and _here.work.is_left:
        raise WorkCancelled


def pause(seconds: float) -> None:
    """Sleep; raise `WorkCancelled` as soon as the work of this thread is left."""
    waiting = CancellableWork()
    try:
        waiting.wait(seconds)
    finally:
        waiting.forget()


class _RequestJob(CancellableWork, Generic[_Result]):
    """One call in some far threads at the same time, and their results."""

    def __init__(self, call: Callable[[CancellableWork], _Result], count: int) -> None:
        super().__init__()
        self._call = call
        self.count = count
        self.results: list[_Result] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        """Make the call in this thread, and note its end."""
        try:
            self.results.append(self._call(self))
        except BaseException as error:
            self.errors.append(error)
        if len(self.results) + len(self.errors) == self.count:
            self.end()


class _RequestThread(threading.Thread):
    """A thread that runs one errand after the other, whenever it is sent."""

    def __init__(self, threads: RequestPool, errand: _RequestJob[Any]) -> None:
        super().__init__(name="zb-remote", daemon=True)
        self._threads = threads
        self._go = threading.Lock()
        self._errand: _RequestJob[Any] | None = errand

    def send(self, errand: _RequestJob[Any] | None) -> None:
        """Give it an errand to run; None: it ends."""
        self._errand = errand
        self._go.release()

    def run(self) -> None:
        while True:
            self._go.acquire()
            errand = self._errand
            self._errand = None
            if errand is None:
                return
            _here.work = errand
            errand.run()
            _here.work = errand = None  # its results are the caller's
            self._threads.rest(self)


class RequestPool:
    """Threads that wait for one server, made when they are needed. Thread-safe; a fork needs its own.

    Parameters
    ----------
    most
        Threads of all calls at the same time. Threads that were left are not counted: a server that stalls must not
        keep a later call from its threads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._closed = False
        self._resting: list[_RequestThread] = []
        self._errands: set[_RequestJob[Any]] = set()

    def run(self, call: Callable[[CancellableWork], _Result], count: int = 1) -> list[_Result]:
        """Return the results of a call, made in several threads; raise its first error.

        `WorkCancelled`, or the exception of a signal, leaves the threads alone.

        Parameters
        ----------
        call
            It gets the work that it is a part of.
        count
            Threads that make the call, at most.
        """
        if isinstance(_here.work, _RequestJob):  # in a far thread
            return [call(_here.work)]
        if count > 1:
            count = max(1, min(count, self._most - sum(errand.count for errand in tuple(self._errands))))
        errand = _RequestJob(call, count)
        self._errands.add(errand)
        try:
            for _ in range(count):
                self._send(errand)
            errand.wait()
        finally:
            errand.forget()
            self._errands.discard(errand)
        try:
            if errand.errors:
                raise errand.errors[0]
            return errand.results
        finally:
            errand.errors = []  # no circle with the traceback, which would keep what the caller holds

    def _send(self, errand: _RequestJob[Any]) -> None:
        try:
            thread = self._resting.pop()
        except IndexError:
            start_thread(_RequestThread(self, errand))
        else:
            thread.send(errand)

    def rest(self, thread: _RequestThread) -> None:
        """Keep a thread for the next errand."""
        self._resting.append(thread)
        if self._closed:
            self.close()

    def close(self) -> None:
        """End the threads: each after its errand."""
        self._closed = True
        while self._resting:
            with contextlib.suppress(IndexError):  # another thread has taken it
                self._resting.pop().send(None)


class SignalSafeFuture(Generic[_Result]):
    """The result of a call in another thread, or its error, when it is there. Thread-safe.

    A `Future` has a lock of Python. A signal that raises while the main thread takes it would leave it locked for ever,
    and the thread that has the result would wait for it, and the main thread for the end of that thread.
    """

    def __init__(self) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_there = False
        self._pending = threading.Lock()
        self._pending.acquire()

    def give(self, result: _Result) -> None:
        """Set the result, and wake whoever waits."""
        self._result = result
        self._is_there = True  # first: a signal may end a waiting thread between its two steps with the lock
        self._pending.release()

    def fail(self, error: BaseException) -> None:
        """Set the error, and wake whoever waits."""
        self._error = error
        self._is_there = True
        self._pending.release()

    def wait(self) -> None:
        """Wait for the result or the error. A signal is met soon, whenever it comes."""
        while not self._is_there:
            if self._pending.acquire(timeout=LOOK_S):
                self._pending.release()  # for the others
            else:
                deliver_signals()

    def result(self) -> _Result:
        """Wait, and return the result, or raise the error."""
        self.wait()
        if self._error is None:
            return cast(_Result, self._result)
        try:
            raise self._error
        finally:
            del self  # no circle with the traceback, which would keep what the caller holds


class _Reader(threading.Thread):
    """A thread that runs jobs until one is None, which it leaves to the others."""

    def __init__(self, work: CancellableWork, jobs: SimpleQueue[_Job], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._jobs = jobs
        #: Whether it is inside a request, in which it may be left.
        self.is_away = False

    def run(self) -> None:
        _here.work = self._work
        while (job := self._jobs.get()) is not None:
            answer, function, arguments = job
            if self._work.is_left:
                answer.fail(CancelledError())
            else:
                try:
                    answer.give(function(*arguments))
                except BaseException as error:
                    answer.fail(error)
            del job, answer, function, arguments  # while it waits for the next one, nothing is kept
        self._jobs.put(None)


def in_reader() -> bool:
    """Return whether this thread is one of `ReadPool`."""
    return isinstance(threading.current_thread(), _Reader)


def request_here(request: Callable[[], _Result]) -> _Result:
    """Make a request in this thread, one of `ReadPool`, which may be left inside: it must not hold a lock.

    A far thread beside it would take a tenth of the time of a small read.
    """
    reader = cast(_Reader, threading.current_thread())
    reader.is_away = True
    try:
        raise_if_cancelled()  # `ReadPool.close` looks at `is_away` after it has left the work
        return request()
    finally:
        reader.is_away = False
        raise_if_cancelled()


class ReadPool:
    """Threads that run the reads of one iterator or call, and end with it. To be used by one thread.

    Parameters
    ----------
    most
        Threads at the same time.
    name
        The name of each thread.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._work = CancellableWork()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._threads: list[_Reader] = []
        #: Begins no read any more, leaves the waits for servers, and waits for the reads of this machine.
        self.close = weakref.finalize(self, _end, os.getpid(), self._work, self._jobs, self._threads)

    def submit(self, function: Callable[..., _Result], *arguments: Any) -> SignalSafeFuture[_Result]:
        """Call a function in a thread, in the order of these calls. After a close it fails by `CancelledError`."""
        answer: SignalSafeFuture[_Result] = SignalSafeFuture()
        self._jobs.put((answer, function, arguments))
        if len(self._threads) < self._most:
            self._threads.append(_Reader(self._work, self._jobs, self._name))
            start_thread(self._threads[-1])
        return answer

    def map(self, function: Callable[..., _Result], *arguments: Iterable[Any]) -> list[_Result]:
        """Return the results of a function for each of some arguments, in order; raise the first error."""
        answers = [self.submit(function, *each) for each in zip(*arguments, strict=False)]
        return [answer.result() for answer in answers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(pid: int, work: CancellableWork, jobs: SimpleQueue[_Job], threads: Sequence[_Reader]) -> None:
    if pid != os.getpid():  # the threads belong to the parent of a fork
        return
    work.forget()
    jobs.put(None)
    for thread in threads:  # one that a signal kept from its start is not alive; this one may have dropped the iterator
        if thread.is_alive() and not thread.is_away and thread is not threading.current_thread():
            thread.join()


def require_process(process: int) -> None:
    """Raise `ClosedError` unless this process has this number: see `generation`."""
    if process != generation():
        raise ClosedError("this iteration reads ahead in threads of the parent process: begin another one in its child")


def read_ahead(
    read: Callable[[_Key], _Result],
    requests: Iterator[_Key],
    depth: int,
    *,
    threads: int = MAX_THREADS,
    size: Callable[[_Key], int] = lambda request: 1,
) -> Generator[_Result]:
    """Yield `read(request)` for each request, in order, and read later ones meanwhile in threads.

    The threads end with the iterator: it waits for a read of this machine that has begun, and leaves a wait for a
    server. No other read begins then, nor does a later one than a read that failed, which may have waited for a server.
    The child of a fork has none of the threads, and would wait for ever: it gets an error.

    Parameters
    ----------
    read
        Reads one request; called in the threads.
    requests
        Taken from in the thread that iterates.
    depth
        The sizes of all requests that are read ahead, at most. 0: nothing is read ahead, and there are no threads.
    threads
        Threads that read at the same time, at most.
    size
        The size of a request; by default each counts 1.
    """
    if not depth:
        yield from map(read, requests)
        return
    failed = math.inf  # the number of the first one

    def read_unless_failed(number: int, request: _Key) -> _Result:
        nonlocal failed
        if number > failed:
            raise CancelledError
        try:
            return read(request)
        except BaseException:
            failed = min(failed, number)
            raise

    process = generation()
    pending: deque[tuple[int, SignalSafeFuture[_Result]]] = deque()
    ahead = 0
    with ReadPool(min(depth, threads), "zb-prefetch") as readers:
        for number, request in enumerate(requests):
            pending.append((size(request), readers.submit(read_unless_failed, number, request)))
            ahead += pending[-1][0]
            while ahead > depth:
                count, answer = pending.popleft()
                ahead -= count
                yield answer.result()
                require_process(process)
        while pending:
            yield pending.popleft()[1].result()
            require_process(process)
