"""Threads that read: they end with their work, and a wait that is left changes nothing of the caller."""

import signal
import sys
import threading
import time
from concurrent.futures import CancelledError
from functools import partial
from itertools import count

import numpy as np
import pytest
from descriptors import our_threads
from processes import forked

from zb_hdf5.files.threads import ReadPool, RequestPool, WorkCancelled, pause, read_ahead


@pytest.fixture
def far():
    """Return threads that wait for a server, which end with the test."""
    threads = RequestPool(8)
    yield threads
    threads.close()


class Answer:
    """A call that waits for its answer, and then fills an array of the caller."""

    def __init__(self):
        self.values = np.zeros(4)
        self.asked = threading.Semaphore(0)
        self.came = threading.Event()
        self.ended = threading.Semaphore(0)

    def __call__(self, work):
        self.asked.release()
        self.came.wait()
        try:
            with work:
                self.values += 1
        finally:
            self.ended.release()
        return "answer"


def test_a_call_is_made_in_some_threads(far):
    answer = Answer()
    answer.came.set()
    assert far.run(answer, 3) == ["answer"] * 3
    assert answer.values.tolist() == [3] * 4


def test_the_first_error_of_a_call_is_raised(far):
    with pytest.raises(ZeroDivisionError):
        far.run(lambda work: 1 / 0, 3)


@pytest.mark.parametrize("nested", [False, True])
def test_a_call_that_is_left_fills_nothing(nested, far):
    """Closing the readers wakes all threads below them, and arrays of the caller stay as they are."""
    answer, readers = Answer(), ReadPool(1, "zb-test")

    def read():
        if not nested:
            return far.run(answer, 2)
        with ReadPool(1, "zb-nested") as inner:
            return inner.map(lambda count: far.run(answer, count), [2])

    future = readers.submit(read)
    for _ in range(2):
        answer.asked.acquire()
    readers.close()
    assert {thread.name for thread in our_threads()} == {"zb-remote"}
    with pytest.raises(WorkCancelled):
        future.result()
    answer.came.set()
    for _ in range(2):
        answer.ended.acquire()
    assert answer.values.tolist() == [0] * 4


def test_calls_that_are_left_take_no_thread_from_later_ones(far):
    answers = [Answer() for _ in range(8)]
    for answer in answers:
        readers = ReadPool(1, "zb-test")
        readers.submit(far.run, answer, 8)
        answer.asked.acquire()
        readers.close()
    ready = Answer()
    ready.came.set()
    assert far.run(ready, 8) == ["answer"] * 8
    for answer in answers:
        answer.came.set()


def test_a_pause_ends_with_the_work():
    readers, begun = ReadPool(1, "zb-test"), threading.Event()

    def read():
        begun.set()
        pause(1000)

    readers.submit(read)
    begun.wait()
    readers.close()
    assert not our_threads()


def test_no_job_begins_after_the_close():
    readers = ReadPool(1, "zb-test")
    begun = threading.Semaphore(0)
    go = threading.Event()

    def read(number):
        begun.release()
        go.wait()
        return number

    futures = [readers.submit(read, number) for number in range(3)]
    begun.acquire()
    threading.Timer(0.1, go.set).start()
    readers.close()
    assert futures[0].result() == 0
    for future in futures[1:]:
        with pytest.raises(CancelledError):
            future.result()


class Signal(BaseException):
    """Raised at any moment, as the handler of a signal does."""


def interrupted(step, work):
    """Do work, raise `Signal` at a step of it, and return whether it did. A step: a line, a call or a return."""
    left = [step]

    def trace(frame, event, _):
        if not signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            left[0] -= 1
        if left[0] == 0:
            raise Signal
        return trace

    sys.settrace(trace)
    try:
        work()
    except Signal:
        return True
    finally:
        sys.settrace(None)
    return False


def test_no_thread_waits_for_one_that_a_signal_has_ended_at_any_step(thinned):
    """The lock of a `Condition` stays locked when the exception comes as its `__enter__` returns."""
    for step in thinned(range(1, 10_000)):
        readers = ReadPool(2, "zb-test")
        was_interrupted = interrupted(step, partial(readers.map, time.sleep, [0.002] * 2))
        closing = threading.Thread(target=readers.close)
        closing.start()
        closing.join(10)
        assert not closing.is_alive(), f"step {step}"
        if not was_interrupted:
            break
    else:
        pytest.fail("no step is the last one")


def test_a_fork_drops_an_iterator_whose_threads_it_does_not_have():
    reading = read_ahead(lambda number: number, count(), 4)
    assert next(reading) == 0
    with forked(lambda: reading.close() is None):
        assert next(reading) == 1
    reading.close()
