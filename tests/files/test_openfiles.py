"""Files stay open as long as the process has room for them; what is counted here are openings, not seconds."""

import errno
import gc
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from contract import is_refused, random_tokens
from interpreter import run_program
from processes import forked
from reading import looking

import zb_hdf5.files.paths
from zb_hdf5 import open_reader
from zb_hdf5.errors import BatchIndexError
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.formats.npy import npy_header

SHARDS = 100
#: Reads a store under limits of descriptors, and prints how often each shard was opened and the soft limit at the end.
CHILD = """
import collections, json, os, resource, sys
folder, access, soft, hard, taken = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
import numpy as np
from zb_hdf5 import open_reader
import zb_hdf5.formats.native
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
foreign = [os.open(folder, os.O_RDONLY) for _ in range(taken)]
opened = collections.Counter()
sys.addaudithook(lambda event, args: opened.update([str(args[0])]) if event == "open" and args[1] is None else None)
total = 0
with open_reader(folder, access=access) as reader:
    for epoch in range(3):
        for index in np.random.default_rng(epoch).permutation(len(reader)).tolist():
            total += int(np.array(reader.read_batch(index), np.int64).sum()) + int(reader.read_batch(0)[0, 0]) * 0
shards = [count for path, count in opened.items() if ".batch" in path and "crc32" not in path]
first = [count for path, count in opened.items() if "shard-00000.batch" in path]
print(json.dumps([total, len(shards), max(shards), max(first), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))
"""


@pytest.fixture(scope="module")
def expected():
    return random_tokens(SHARDS, 2, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, expected, write_store):
    return write_store(tmp_path_factory.mktemp("many") / "store", expected, range(1, SHARDS), ("batch",))


def read_under_limits(folder, access, soft, hard, taken=0):
    return json.loads(run_program(CHILD, folder, access, soft, hard, taken).stdout)


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_store_that_needs_it_raises_the_soft_limit_and_opens_each_shard_once(access, folder, expected):
    total, shards, most, _, soft = read_under_limits(folder, access, 300, 2000)
    assert total == 3 * int(expected.astype(np.int64).sum())
    # by what the index says: no look at its header
    assert (shards, most, soft) == (SHARDS, 1, 2000)
    if access == "pread":
        assert read_under_limits(folder, access, 700, 2000)[-1] == 700  # it needs no more


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_beyond_the_hard_limit_the_least_recently_used_shard_closes(access, folder, expected):
    total, _, most, first, soft = read_under_limits(folder, access, 300, 310)
    assert total == 3 * int(expected.astype(np.int64).sum())
    assert soft == 310
    assert most > 1
    assert first == 1  # it is read before every other one
    assert read_under_limits(folder, access, 400, 400, taken=370)[0] == total  # others have taken the rest


def test_all_stores_of_a_process_share_its_room(folder, expected, monkeypatch):
    monkeypatch.setattr("zb_hdf5.files.paths.descriptor_room", lambda needed: 20)
    before = len(os.listdir("/proc/self/fd"))
    with open_reader(folder, access="pread") as one, open_reader(folder, access="pread") as two:
        for index in np.random.default_rng(0).integers(0, SHARDS, 300).tolist():
            np.testing.assert_array_equal(one.read_batch(index), expected[index])
            np.testing.assert_array_equal(two.read_batch(SHARDS - 1 - index), expected[SHARDS - 1 - index])
            assert len(os.listdir("/proc/self/fd")) <= before + 20


def test_a_store_that_is_dropped_closes_its_files_and_frees_its_room(folder):
    gc.collect()  # the stores of other tests must not go meanwhile
    before, stores = len(os.listdir("/proc/self/fd")), len(zb_hdf5.files.paths._STORES)
    reader = open_reader(folder, access="pread")
    for index in range(SHARDS):
        reader.read_batch(index)
    del reader
    assert (len(os.listdir("/proc/self/fd")), len(zb_hdf5.files.paths._STORES)) == (before, stores)


def test_a_process_that_holds_no_store_says_that_it_has_no_descriptor(monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("zb_hdf5.files.paths._STORES", ())  # a process that holds no store says so
    is_refused(OSError, lambda: zb_hdf5.files.paths.open_with_room(refuse), match="Too many open files")


def test_threads_that_ask_for_one_file_open_it_once(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    files = zb_hdf5.files.paths.OpenFiles("pread")
    opened = []
    has_met = threading.Event()

    def open_file(number):
        opened.append(number)
        if len(opened) > 1:
            has_met.set()
        has_met.wait(0.2)  # for a second thread that does not wait for this one
        return open(tmp_path / "x", "rb")

    start = threading.Barrier(8)

    def ask():
        start.wait()
        return files.get(0, open_file)

    with ThreadPoolExecutor(8) as pool:
        found = {each.result() for each in [pool.submit(ask) for _ in range(8)]}
    files.close()
    assert (len(found), opened) == (1, [0])


def test_a_file_that_one_thread_fails_to_open_is_opened_by_the_next():
    files = zb_hdf5.files.paths.OpenFiles("pread")

    def fail(number):
        raise FileNotFoundError(errno.ENOENT, "no such file")

    is_refused(FileNotFoundError, lambda: files.get(0, fail), match="no such file")
    with open(os.devnull, "rb") as file:
        assert files.get(0, lambda number: file) is file
    files.close()


def test_a_thread_opens_any_file_while_it_opens_any_other(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    outer, inner = (zb_hdf5.files.paths.OpenFiles("auto", far=True) for _ in range(2))
    opened = []

    def open_one(number):
        return open(tmp_path / "x", "rb")

    def open_both(number):
        inner.get(5 * number + 1, open_one)
        opened.append(number)
        return open_one(number)

    thread = threading.Thread(target=lambda: [outer.get(number, open_both) for number in range(400)], daemon=True)
    thread.start()
    thread.join(20)  # it waited for itself for ever where both had the same lock
    assert opened == [*range(400)]
    outer.close()
    inner.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_while_a_file_is_opened_reads_on(folder, expected):
    with open_reader(folder, access="pread") as reader, zb_hdf5.files.paths._LOCK:
        done = []
        thread = threading.Thread(target=lambda: done.append(_read_in_a_fork(reader, expected)))
        thread.start()
        thread.join(30)
    assert done == [True]


def _read_in_a_fork(reader, expected):
    with forked(lambda: np.array_equal(reader.read_batch(7), expected[7])):
        return True


@pytest.mark.parametrize("dtype", ["<u2", ">u4", "|u1", "<i8"])
@pytest.mark.parametrize("count", [0, 1, 10**5])
def test_the_header_of_a_stream_is_read_without_its_array(dtype, count, tmp_path):
    np.save(tmp_path / "t.npy", np.zeros(count, dtype))
    assert looking(npy_header, tmp_path / "t.npy") == ((count,), False, np.dtype(dtype), 128)


def test_chunks_at_one_place_have_ranges_of_their_own():
    assert Extents([Run(4096, 0, 2)], 4096).byte_ranges == [(4096, 8192), (4096, 8192)]


@pytest.mark.parametrize("runs", [[Run(64, 32, 9)], [Run(64, 32, 4), Run(512, 64, 5)]])
@pytest.mark.parametrize("start", [71, 72, 200])
def test_tokens_behind_the_last_extent_are_an_error(runs, start):
    extents = Extents(runs, 32)
    with pytest.raises(BatchIndexError, match="after the last one"):
        list(extents.ranges_of_tokens(start, np.empty(2, "<u4")))
    assert [offset for offset, _ in extents.ranges_of_tokens(71, np.empty(1, "<u4"))] == [
        runs[-1].base + (runs[-1].num_batches - 1) * runs[-1].stride + 28
    ]
