"""Requests of a store to several shards at once: gathers of records, and hints."""

import gc
import mmap
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from contract import is_refused, random_tokens, read_records
from descriptors import is_mapped, resident_share
from processes import python

from zb_hdf5 import IncompleteError, open_reader

SHAPE = (4, 512)  # whole pages in both dtypes
CUTS = (1, 4, 9)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or mmap.PAGESIZE != 4096, reason="shards are side by side on pages of 4 KiB"
)


@pytest.fixture(params=["uint16", "uint32"])
def tokens(request):
    return random_tokens(12, *SHAPE, request.param)


@pytest.fixture
def cuts():
    return CUTS


@pytest.fixture(params=[("hdf5",), ("batch",), ("batch", "hdf5")], ids="-".join)
def backends(request):
    return request.param


def gather_all(reader):
    """Read every record once: all shards are open then."""
    return read_records(reader, range(reader.num_records))


def side_by_side(folder):
    """Return how many mappings of tokens alone, without what stands before them, begin where another one ends."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    mappings = [line[0].split("-") for line in lines if str(folder) in line[-1] and int(line[2], 16)]
    ranges = sorted((int(start, 16), int(end, 16)) for start, end in mappings)
    return sum(before[1] == after[0] for before, after in pairwise(ranges))


@pytest.mark.parametrize("length", [SHAPE[1], 256, 1])
@pytest.mark.thin
def test_a_gather_over_shards_gives_the_records_of_each(length, store, tokens):
    rows = tokens.reshape(-1, length)
    numbers = np.random.default_rng(0).integers(0, len(rows), (20, 32))
    numbers[:, :2] = 0, len(rows) - 1
    with open_reader(store) as reader, open_reader(store, access="pread") as slow:
        gather_all(reader)
        assert side_by_side(store) >= len(CUTS)
        for some in numbers:
            found = read_records(reader, some, length)
            np.testing.assert_array_equal(found, rows[some])
            np.testing.assert_array_equal(found, read_records(slow, some, length))
        np.testing.assert_array_equal(read_records(reader, [], length), rows[:0])
        tokens = reader.read_records_torch(numbers[0], length, np.int64).numpy()
        np.testing.assert_array_equal(tokens, rows[numbers[0]])


@pytest.mark.parametrize("options", [{"access": "pread"}, {"access": "h5py"}, {"verify": "batch"}], ids=str)
def test_shards_that_may_not_be_mapped_are_not(options, tmp_path, tokens, write_store):
    folder = write_store(tmp_path / "store", tokens, CUTS)
    with open_reader(folder, **options) as reader:
        for _ in range(3):
            np.testing.assert_array_equal(gather_all(reader), tokens.reshape(-1, SHAPE[1]))
        assert side_by_side(folder) == 0


def test_one_batch_that_is_asked_for_opens_one_shard(tmp_path, tokens, write_store):
    folder = write_store(tmp_path / "store", tokens, CUTS)
    for number in (1, 2, 3):
        (folder / f"shard-{number:05}.h5").write_bytes(b"damaged")
    with open_reader(folder) as reader:
        assert len(reader) == 12
        np.testing.assert_array_equal(reader.read_batch(0), tokens[0])
        for _ in range(3):
            np.testing.assert_array_equal(read_records(reader, [2, 0]), tokens[0, [2, 0]])


@pytest.mark.parametrize("shard", range(4))
def test_a_shard_that_was_cut_short_is_an_error_and_no_bus_error(shard, tmp_path, write_store):
    folder = write_store(tmp_path / "store", random_tokens(12, *SHAPE), CUTS, ("batch",))
    with open_reader(folder) as reader:
        gather_all(reader)
        path = folder / f"shard-{shard:05}.batch"
        os.truncate(path, path.stat().st_size - 4096)
        is_refused(IncompleteError, lambda: gather_all(reader), match=rf"{path.name}.*cut short")


@pytest.mark.thin
def test_nothing_stays_mapped_when_a_reader_is_closed_or_dropped(store):
    fds = len(os.listdir("/proc/self/fd"))
    for close in (True, False):
        reader = open_reader(store)
        gather_all(reader)
        assert side_by_side(store)
        if close:
            reader.close()
        del reader
        gc.collect()
        assert not is_mapped(store)
        assert len(os.listdir("/proc/self/fd")) == fds


def test_files_that_must_make_room_are_not_held(tmp_path, write_store, monkeypatch):
    expected = random_tokens(12, *SHAPE)
    folder = write_store(tmp_path / "store", expected, CUTS)
    other = write_store(tmp_path / "other", expected, range(1, 12))
    with open_reader(folder) as reader, open_reader(other) as crowd:
        gather_all(reader)
        assert side_by_side(folder)
        monkeypatch.setattr("zb_hdf5.files.paths.descriptor_room", lambda needed: 4)
        for index in range(12):
            crowd.read_batch_torch(index)
        assert len([fd for fd in os.scandir("/proc/self/fd") if str(folder) in os.path.realpath(fd.path)]) <= 2
        for _ in range(3):
            np.testing.assert_array_equal(gather_all(reader), expected.reshape(-1, SHAPE[1]))


@pytest.mark.thin
def test_threads_that_gather_at_once_agree(store, tokens):
    rows = tokens.reshape(-1, SHAPE[1])
    for _ in range(10):
        with open_reader(store) as reader, ThreadPoolExecutor(4) as pool:
            ready = threading.Barrier(4)

            def read(_, ready=ready, reader=reader):
                ready.wait()
                for _ in range(5):
                    np.testing.assert_array_equal(gather_all(reader), rows)
                    found = read_records(reader, range(2 * len(rows)), 256)
                    np.testing.assert_array_equal(found, rows.reshape(-1, 256))

            assert list(pool.map(read, range(4))) == [None] * 4


def test_a_reader_that_is_never_closed_does_not_disturb_the_end(tmp_path, write_store):
    store = write_store(tmp_path / "store", random_tokens(12, *SHAPE), CUTS)
    code = f"""
import threading, numpy as np
from zb_hdf5 import open_reader
reader = open_reader({str(store)!r})
def read():
    while True:
        reader.read_records_torch(np.arange(reader.num_records), reader.seq_len, np.int64)
threading.Thread(target=read, daemon=True).start()
import time; time.sleep(0.2)
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shape", [SHAPE, (4, 1000)])
def test_batches_that_are_announced_together_come_into_the_page_cache(shape, tmp_path, write_store):
    expected = random_tokens(12, *shape)
    folder = write_store(tmp_path / "store", expected, CUTS, ("batch", "hdf5"))
    with open_reader(folder, access="pread") as reader:  # no page that is mapped can be dropped
        for index in range(12):
            reader.read_batch_torch(index)  # all shards are open: to open one reads some of its batches
        for path in folder.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if any(resident_share(path) for path in folder.glob("shard-*")):
            pytest.skip("this file system drops no pages")
        reader.will_need(1, 10)  # not is_cached: on newer kernels its question has the page read
        end_s = time.monotonic() + 10
        for number, count in enumerate((0, 3, 5, 2)):  # of the whole shards 1 and 2, and some of the last
            path = folder / f"shard-{number:05}.{('batch', 'h5')[number % 2]}"
            while resident_share(path) * path.stat().st_size < count * reader.meta.batch_bytes:
                assert time.monotonic() < end_s
                time.sleep(0.01)
