"""Reading ahead: order, errors in their place, nothing left running, and state that counts what was yielded."""

import contextlib
import gc
import os
import signal
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from contents import write_batches
from contract import SAME_EPOCH, is_refused
from processes import in_forks

from zb_hdf5 import IncompleteError, Loader, open_reader
from zb_hdf5.files import threads
from zb_hdf5.files.file_systems import in_memory
from zb_hdf5.files.threads import ReadPool, read_ahead
from zb_hdf5.loaders import ahead
from zb_hdf5.loaders.ahead import HINTED_TOGETHER, BatchHints, hint_ahead
from zb_hdf5.loaders.steps import StepReader

ALONE = {"rank": 0, "world_size": 1}
TOKENS = np.random.default_rng(6).integers(0, 50_000, (60, 4, 32), dtype=np.uint32)


@pytest.fixture
def path(tmp_path):
    return write_batches(tmp_path / "t.h5", TOKENS).path


def prefetch_threads():
    gc.collect()
    return [thread for thread in threading.enumerate() if thread.name.startswith("zb-prefetch")]


def test_results_and_errors_come_in_order_and_no_read_begins_after_one_that_failed():
    begun = []

    def read(number):
        begun.append(number)
        time.sleep(0.002 * (number % 3))
        return number

    iterator = read_ahead(read, iter(range(50)), 4)
    assert next(iterator) == 0
    time.sleep(0.05)
    assert len(begun) <= 5
    assert list(iterator) == list(range(1, 50))

    def fail(number):
        if number == 7:
            raise IncompleteError("batch 7")
        return number

    iterator = read_ahead(fail, iter(range(20)), 4)
    assert [next(iterator) for _ in range(7)] == list(range(7))
    is_refused(IncompleteError, lambda: next(iterator), match="batch 7")
    assert not prefetch_threads()
    begun = []

    def fail_at_first(number):  # a server that is gone is not waited for once more by each read that was queued
        begun.append(number)
        time.sleep(0.05 if number == 0 else 0.2)
        if number == 0:
            raise OSError("gone")

    is_refused(OSError, lambda: list(read_ahead(fail_at_first, iter(range(10)), 2, threads=2)), match="gone")
    assert sorted(begun) == [0, 1]


def test_a_read_that_begins_late_is_not_cancelled_by_an_error_behind_it(monkeypatch):
    class Late(ReadPool):
        def submit(self, read, *request):
            return super().submit(lambda: time.sleep(0.05 * (request[-1] == 0)) or read(*request))

    def fail_at_second(number):
        if number == 1:
            raise OSError("gone")
        return number

    monkeypatch.setattr(threads, "ReadPool", Late)
    iterator = read_ahead(fail_at_second, iter(range(10)), 2, threads=2)
    assert next(iterator) == 0
    is_refused(OSError, lambda: next(iterator), match="gone")


@pytest.mark.parametrize("options", [{}, {"prefetch": 4}, {"dtype": torch.int32}, {"batch_size": 2}], ids=str)
@pytest.mark.parametrize("is_ready", [True, False])
def test_a_file_that_cannot_be_opened_is_an_error_of_its_own_step(
    options, is_ready, tmp_path, write_store, monkeypatch
):
    write_store(tmp_path / "store", np.tile(TOKENS, (5, 1, 1)), (250,))
    if not is_ready:
        monkeypatch.setattr(StepReader, "_is_ready", lambda *_: False)
    with Loader(tmp_path / "store", shuffle="sequential", **ALONE, **options) as loader:
        (tmp_path / "store/shard-00001.h5").unlink()
        np.testing.assert_array_equal(loader.dataset()[3], TOKENS.reshape(-1, loader.batch_size, 32)[3])
        steps = iter(loader)
        assert sum(1 for _ in islice(steps, 250 * 4 // loader.batch_size)) * loader.batch_size == 250 * 4
        is_refused(FileNotFoundError, lambda: next(steps), match="shard-00001.h5")


@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
def test_threads_end_with_the_epoch_a_break_an_exception_or_the_loader(path):
    loader = Loader(path, prefetch=4, **ALONE)
    assert len(list(loader)) == 60
    assert not prefetch_threads()
    for _ in loader:
        break
    assert not prefetch_threads()
    with contextlib.suppress(KeyError):
        for _ in loader:
            raise KeyError
    assert not prefetch_threads()
    iterator = iter(loader)
    next(iterator)
    assert prefetch_threads()
    loader.close()
    assert not prefetch_threads()
    assert list(iterator) == []
    loader = Loader(path, prefetch=4, **ALONE)
    iterator = iter(loader)
    next(iterator)
    del loader, iterator
    assert not prefetch_threads()


def test_ctrl_c_ends_a_prefetching_loop(path):
    """Whose end with a loader that still reads is in test_exit.py."""

    def interrupted():
        loader = Loader(path, prefetch=8, **ALONE)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            while True:
                loader.set_epoch(loader.epoch + 1)
                for _ in loader:
                    pass
        except KeyboardInterrupt:
            return True

    assert in_forks(interrupted) == [True]


def test_a_file_cut_while_it_is_read_ahead_is_an_error_at_its_batch(tmp_path):
    path = tmp_path / "t.batch"
    write_batches(path, TOKENS)
    loader = Loader(path, prefetch=4, access="pread", shuffle="sequential", rank=0, world_size=1)
    iterator = iter(loader)
    assert torch.equal(next(iterator), torch.from_numpy(TOKENS[0].astype(np.int64)))
    with open(path, "r+b") as file:
        file.truncate(4096 + 30 * 4096)
    is_refused(IncompleteError, lambda: list(iterator))
    assert 1 <= loader.state_dict()["position"] // 4 <= 30


@pytest.mark.skipif(not in_memory(Path("/dev/shm")), reason="/dev/shm is not a file system in memory")
def test_files_in_memory_need_no_announcement(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        write_batches(Path(folder) / "t.batch", TOKENS)
        with open_reader(Path(folder) / "t.batch") as reader:
            assert all(map(reader.is_ready, range(60)))
            monkeypatch.setattr(reader, "will_need", None)
            assert len(list(Loader(reader, **ALONE))) == len(reader)


@pytest.mark.parametrize("shuffle", ["global", "records"])
@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
def test_auto_announces_what_is_not_in_the_page_cache(path, monkeypatch, shuffle):
    with open_reader(path) as reader:
        loader = Loader(reader, shuffle=shuffle, **ALONE)
        plain = list(Loader(reader, shuffle=shuffle, prefetch=0, rank=0, world_size=1))
        assert all(reader.is_ready(i) for i in range(60))
        announced = []
        will_need, announce_records = reader.will_need, reader.announce_records

        def announce_batches(index, count=1):
            announced.extend(range(4 * index, 4 * (index + count)))
            will_need(index, count)

        def announce(records, length):
            announced.extend(records.tolist())
            announce_records(records, length)

        monkeypatch.setattr(reader, "will_need", announce_batches)
        monkeypatch.setattr(reader, "announce_records", announce)
        assert all(torch.equal(a, b) for a, b in zip(loader, plain, strict=True))
        assert not announced
        monkeypatch.setattr(reader, "are_cached", lambda records, length: False)
        assert all(torch.equal(a, b) for a, b in zip(loader, plain, strict=True))
        assert sorted(announced) == [*range(240)]
        assert not prefetch_threads()


@pytest.mark.parametrize("done", [0, 30])  # batches of the epoch
def test_the_read_ahead_of_an_opening_does_not_pass_for_a_warm_cache(path, done, monkeypatch):
    with open_reader(path) as reader:
        loader = Loader(reader, shuffle="sequential", rank=0, world_size=1)
        loader.load_state_dict(loader.state_dict() | {"position": 4 * done})
        announced = []
        monkeypatch.setattr(reader, "are_cached", lambda records, length: records[-1] < 4 * (done + 10))
        monkeypatch.setattr(reader, "will_need", lambda index, count: announced.extend(range(index, index + count)))
        assert len(list(loader)) == 60 - done
        assert announced == list(range(done, 60))


def announced_for(requests, records_per_batch, depth=64):
    """Return the hints for some requests, and check that each of them is read, in order."""
    announced = []
    hints = BatchHints([lambda *run: announced.append(run)], records_per_batch)
    found = hint_ahead(lambda one: one, hints.announce, iter(requests), depth)
    assert all(one is other for one, other in zip(found, requests, strict=True))
    return announced


def test_batches_that_follow_each_other_are_announced_together_and_again_only_after_many_others(monkeypatch):
    monkeypatch.setattr("zb_hdf5.loaders.ahead.HINTED_TOGETHER", 6)
    batches = [7, 100, 101, 3, 102, 2]
    assert announced_for(batches, 4) == [(2, 2), (7, 1), (100, 3)]
    records = [np.array([41, 4, 7, 400]), np.array([17, 30, 16, 18])]  # four in a batch
    assert announced_for(batches + records, 4)[3:] == [(1, 1), (4, 1), (10, 1)]  # but for 7 and 100
    monkeypatch.setattr("zb_hdf5.loaders.ahead.REMEMBERED_HINTS", 4)
    monkeypatch.setattr("zb_hdf5.loaders.ahead.HINTED_TOGETHER", 1)
    announced = announced_for([3, 1, 3, 1, 2, 0, 3, 9, 3, 9, 4, 3], 1)
    assert announced == [(number, 1) for number in [3, 1, 2, 0, 9, 3, 4]]


def test_auto_reads_ahead_in_threads_on_a_network_file_system(path, monkeypatch):
    with open_reader(path) as reader:
        loader = Loader(reader, rank=0, world_size=1)
        monkeypatch.setattr(reader, "are_cached", lambda records, length: False)
        monkeypatch.setattr("zb_hdf5.loaders.steps.is_on_network", lambda path: True)
        iterator = iter(loader)
        next(iterator)
        assert prefetch_threads()
        iterator.close()


def test_the_file_system_is_asked_for_once_by_a_loader_that_waits_in_each_epoch(path, monkeypatch):
    asked = []
    monkeypatch.setattr("zb_hdf5.loaders.steps.is_on_network", asked.append)
    with Loader(path, **ALONE) as loader:
        assert len(list(loader)) == 60
        assert asked == []
        monkeypatch.setattr(StepReader, "_is_ready", lambda *_: False)
        for epoch in (1, 2, 3):
            loader.set_epoch(epoch)
            assert len(list(loader)) == 60
    assert asked == [path]


def test_hints_come_before_their_reads():
    heard, found = [], []
    for number in hint_ahead(lambda number: number, heard.extend, iter(range(50)), 20):
        found.append(number)
        assert heard == list(range(min(50, -(-(number + 21) // HINTED_TOGETHER) * HINTED_TOGETHER)))
    assert found == list(range(50))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_device_gets_the_same_batches(path, dtype):
    for shuffle, batch_size in (("global", 4), ("records", 6)):
        how = {"dtype": dtype, "shuffle": shuffle, "batch_size": batch_size, **ALONE}
        for a, b in zip(Loader(path, device="cuda", **how), Loader(path, **how), strict=True):
            assert a.is_cuda
            assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_state_loaded_in_the_middle_of_an_iteration_turns_it(path, prefetch):
    """A rollback inside the training loop: what comes next is what the state says, and later states are right."""
    plain = list(Loader(path, prefetch=0, rank=0, world_size=1))
    loader = Loader(path, prefetch=prefetch, rank=0, world_size=1)
    found, state = [], None
    for number, batch in enumerate(loader):
        found.append(batch)
        if number == 3:
            state = loader.state_dict()
        if number == 9:
            loader.load_state_dict(state)
    expected = plain[:10] + plain[4:]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert loader.state_dict()["position"] == len(plain) * 4


@pytest.mark.parametrize(
    ("reads", "step_bytes", "memory", "steps"),
    [
        (1, 64 << 10, 1 << 40, 64),  # as ever for tokens
        (32, 64 << 10, 1 << 40, 32),
        (1, 6 << 20, 1 << 40, 10),  # 64 MiB of values
        (1, 6 << 20, 128 << 20, 2),  # an eighth of the memory
        (1, 6 << 20, 1 << 20, 1),
    ],
)
def test_steps_that_are_announced_do_not_fill_the_memory(reads, step_bytes, memory, steps, monkeypatch):
    monkeypatch.setattr(ahead, "memory_limit", lambda: memory)
    assert ahead.hinted_steps(reads, step_bytes) == steps
