"""Children that are forked while threads of the parent read and refresh: none waits for a lock of such a thread."""

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401 - before any thread does: a child waits for ever for an import that a thread was at
from contract import is_refused
from numbered import numbered_batches
from processes import in_forks, killed_after
from source_tokens import ALL, make_stream

import zb_hdf5
from zb_hdf5 import Loader, convert, errors, open_reader, open_writer
from zb_hdf5.files.forks import OwnLock, cached_per_process, generation

HOW = {"rank": 0, "world_size": 1, "shuffle": "records", "seed": 7}
EVERYTHING = {"targets": True, "documents": ALL, "spans": True}
LIVE_SHAPE = (2, 8)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Return a stream, packed batches of it, and a store whose writer was killed while it grew."""
    folder = tmp_path_factory.mktemp("stores")
    stream = make_stream(folder / "stream.h5", [5, 17, 3, 8, 40, 1, 1, 22, 9, 30])
    size = {"batch_size": 3, "seq_len": 8, "pad_id": 0, "workers": 1}
    convert(stream, "hdf5", folder / "packed.h5", shuffle=False, packing="concat", **size)
    live = {"batch_size": 2, "seq_len": 8, "dtype": "uint16", "live": True, "shard_batches": 4}
    killed_after(lambda: open_writer(folder / "live", **live).write(numbered_batches(0, 6, LIVE_SHAPE)))
    return stream, folder / "packed.h5", folder / "live"


def read_all(readers):
    """Read one epoch of each finished reader with all that it has, and a growing one to its end."""
    *finished, live = readers
    for reader in finished:
        steps = Loader(reader, **HOW, **EVERYTHING)
        assert len([step["tokens"] for step in steps]) == len(steps)
    assert live.refresh() == 6
    np.testing.assert_array_equal(np.stack(list(live)), numbered_batches(0, 6, LIVE_SHAPE))
    return True


@pytest.mark.parametrize("forks", [5, pytest.param(1_000, marks=[pytest.mark.slow, pytest.mark.longest])])
def test_no_child_waits_for_a_thread_that_it_does_not_have(forks, stores):
    stream, packed, live = stores
    ended, before = threading.Event(), sys.getswitchinterval()

    def read_on(make):
        while not ended.is_set():
            make()

    def read_ahead():
        with Loader(packed, prefetch=3, **HOW, **EVERYTHING) as loader:
            list(loader)

    with (
        open_reader(stream, batch_size=3, seq_len=8, overlap=1) as windows,
        open_reader(packed) as batches,
        open_reader(live) as growing,
        ThreadPoolExecutor(4, thread_name_prefix="zb-test") as pool,
    ):
        readers = windows, batches, growing
        sys.setswitchinterval(1e-5)
        try:
            threads = [pool.submit(read_on, lambda: read_all(readers)) for _ in range(2)]
            threads += [pool.submit(read_on, growing.refresh), pool.submit(read_on, read_ahead)]
            for _ in range(forks // 10):
                assert in_forks(*[lambda: read_all(readers)] * 10, limit_s=60) == [True] * 10
        finally:
            ended.set()
            sys.setswitchinterval(before)
        for thread in threads:
            thread.result()


def test_a_child_does_not_wait_for_steps_that_its_parent_reads_ahead(stores):
    with Loader(stores[1], prefetch=0, **HOW) as loader:
        expected = [step.tolist() for step in loader]
    with Loader(stores[1], prefetch=3, **HOW) as loader:
        steps = iter(loader)
        assert next(steps).tolist() == expected[0]

        def go_on():
            is_refused(errors.ClosedError, lambda: next(steps), match="begin another one")
            return next(loader).tolist()

        assert in_forks(go_on, limit_s=20) == [expected[1]]
        assert [step.tolist() for step in steps] == expected[1:]


def test_a_child_and_a_copy_have_locks_of_their_own_that_nobody_holds():
    lock, number = OwnLock(), generation()
    with lock, lock:  # a thread takes it twice
        copy = pickle.loads(pickle.dumps(lock))
        assert in_forks(lambda: [takes(lock), takes(copy), generation()], limit_s=20) == [[True, True, number + 1]]
        assert takes(copy)
    assert takes(lock)


def takes(lock):
    """Take a lock in another thread."""
    found = []

    def take():
        with lock:
            found.append(True)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(5)
    return found == [True]


def test_a_kept_property_is_computed_once_and_needs_no_lock():
    class Square:
        computed = 0

        @cached_per_process
        def area(self):
            """The area."""
            self.computed += 1
            return 4

    square = Square()
    assert (square.area, square.area, square.computed) == (4, 4, 1)
    assert (vars(square)["area"], Square.area.__doc__) == (4, "The area.")


def test_nothing_takes_the_lock_that_all_objects_of_a_class_share():
    """`functools.cached_property` has one on Python 3.11."""
    files = [path for path in Path(zb_hdf5.__file__).parent.rglob("*.py") if path.name != "forks.py"]
    assert not [path for path in files if "cached_property" in path.read_text()]
