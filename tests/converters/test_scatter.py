"""The shuffle in two passes: whatever the memory, runs and buckets, the records of a direct gather."""

import itertools
import os
import pickle
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
from array_tokens import npy_source
from commandline import run, succeed
from contents import files_in
from contract import is_refused
from damage import flip
from descriptors import resident_share
from hypothesis import given
from hypothesis import strategies as st
from processes import anonymous_bytes

import zb_hdf5
from examples import examples
from zb_hdf5.converters import shuffle
from zb_hdf5.converters.array_source import ArraySource
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.loaders.order import write_order
from zb_hdf5.spec import StoreMeta

L = 3


def plan_of(n, run_records, buckets, seed=1):
    order = write_order(n, seed)
    return shuffle.ScatterPlan(order, L, np.dtype("<u2"), run_records, tuple(buckets))


def numbered(n):
    return (np.arange(n)[:, np.newaxis] * 5 + np.arange(L)).astype("<u2")


class Numbered(BatchSource):
    """Batches of one record, which are read in their own order."""

    meta = StoreMeta(1, L, np.dtype("<u2"))
    num_batches = 0
    counts = None

    def __init__(self, records):
        self.description = {}
        self.identity = {}
        self.paths = []
        self.records = records

    def read_into(self, start, out):
        raise AssertionError("records are read one by one")

    def read_records(self, first, rows):
        rows[...] = self.records[first : first + len(rows)]


def scatter_all(plan, records, folder):
    for number in range(plan.num_runs):
        shuffle.scatter_run(shuffle.RunTask(Numbered(records), plan, number, plan.run_path(folder, number)))
    return folder


def read(plan, folder, first, count):
    """Return the records of consecutive positions."""
    rows = np.empty((count, 1, L), "<u2")
    shuffle.ScatteredBatches(Numbered(None), plan, folder).read_into(first, rows)
    return rows


@st.composite
def plans(draw):
    n = draw(st.integers(1, 400))
    limits = sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=9)))
    ranges = list(pairwise(limits))
    kept = draw(st.lists(st.booleans(), min_size=len(ranges), max_size=len(ranges)).filter(any))
    buckets = [pair for pair, keep in zip(ranges, kept, strict=True) if keep]  # jobs of an array leave some out
    return plan_of(n, draw(st.integers(1, n)), buckets, draw(st.integers(0, 2**63)))


@examples(50)
@given(plan=plans(), data=st.data())
def test_any_rows_of_any_plan_are_those_of_a_direct_gather(plan, data, tmp_path_factory):
    records = numbered(plan.order.n)
    folder = scatter_all(plan, records, tmp_path_factory.mktemp("runs"))
    reader = shuffle.ScatteredBatches(Numbered(None), plan, folder)
    for _ in range(3):
        start, stop = data.draw(st.sampled_from(plan.buckets))
        first = data.draw(st.integers(start, stop - 1))
        count = data.draw(st.integers(0, stop - first))
        rows = np.empty((count, 1, L), "<u2")
        reader.read_into(first, rows)
        np.testing.assert_array_equal(rows[:, 0], records[plan.order.indices(np.arange(first, first + count))])
    assert sum(path.stat().st_size for path in folder.iterdir()) == plan.temp_bytes
    reader = pickle.loads(pickle.dumps(reader))
    for (first, stop), (next_first, last) in pairwise(plan.buckets):  # rows may span buckets
        if stop == next_first:
            rows = np.empty((last - first, 1, L), "<u2")
            reader.read_into(first, rows)
            np.testing.assert_array_equal(rows[:, 0], records[plan.order.indices(np.arange(first, last))])


@pytest.mark.parametrize("record_tokens", [1 << 20, 1 << 21])
def test_records_larger_than_a_group_do_not_each_get_a_run(record_tokens):
    plan = shuffle.ScatterPlan.fit(write_order(2000, 1), record_tokens, np.dtype("<u4"), [(0, 2000)], 2 << 30)
    assert max(plan.num_runs, len(plan.buckets)) < 50


@pytest.mark.parametrize("cut", [1, 8, 100])
def test_a_run_file_cut_short_is_an_error(cut, tmp_path):
    plan = plan_of(100, 50, [(0, 100)])
    scatter_all(plan, numbered(100), tmp_path)
    path = plan.run_path(tmp_path, 1)
    os.truncate(path, path.stat().st_size - cut)
    is_refused(zb_hdf5.IncompleteError, lambda: read(plan, tmp_path, 0, 1), match="cut short")
    scatter_all(plan_of(100, 50, [(0, 60)], seed=2), numbered(100), tmp_path)  # of another plan
    is_refused(zb_hdf5.IncompleteError, lambda: read(plan, tmp_path, 0, 1))


@pytest.mark.parametrize("offset", range(0, 300, 23))
def test_a_flipped_bit_in_a_run_file_is_an_error(offset, tmp_path):
    plan = plan_of(100, 50, [(0, 60), (60, 100)])
    path = scatter_all(plan, numbered(100), tmp_path) / plan.run_path(tmp_path, 1).name
    flip(path, offset, 4)
    is_refused(zb_hdf5.ChecksumError, lambda: read(plan, tmp_path, 0, 100), match="did not keep")


@pytest.mark.parametrize("first", [9, 50, 70, 99])
def test_a_position_of_no_bucket_is_an_error(first, tmp_path):
    plan = plan_of(100, 50, [(10, 50), (60, 70)])
    with pytest.raises(zb_hdf5.BatchIndexError, match="no bucket"):
        read(plan, scatter_all(plan, numbered(100), tmp_path), first, 1)


@given(n=st.integers(1, 10**6), spare=st.integers(0, 10**7), tokens=st.integers(1, 5000), num_shards=st.integers(1, 20))
def test_a_fitted_plan_stays_within_its_memory(n, spare, tokens, num_shards):
    shards = sorted({n * k // num_shards for k in range(num_shards + 1)})
    ranges = list(pairwise(shards))
    record_bytes = 2 * tokens
    if spare < record_bytes + 48:
        with pytest.raises(zb_hdf5.ArgumentError, match="too little"):
            shuffle.ScatterPlan.fit(write_order(n, 0), tokens, np.dtype("<u2"), ranges, shuffle.PROCESS_BYTES + spare)
        return
    plan = shuffle.ScatterPlan.fit(write_order(n, 0), tokens, np.dtype("<u2"), ranges, shuffle.PROCESS_BYTES + spare)
    largest = max(stop - start for start, stop in plan.buckets)
    assert max(largest, plan.run_records) * record_bytes <= spare
    assert [bucket[0] for bucket in plan.buckets[1:]] == [bucket[1] for bucket in plan.buckets[:-1]]
    assert {start for start, _ in ranges} <= {start for start, _ in plan.buckets}  # no bucket spans shards


def save(path, num_records, seq_len=16, dtype="<i8"):
    np.save(path, (np.arange(num_records * seq_len).reshape(num_records, seq_len) % 60000).astype(dtype))
    return path


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("target", ["out.h5", "out"])
@pytest.mark.thin
def test_two_passes_give_the_bytes_of_a_direct_gather(remainder, workers, target, tmp_path):
    sources = [save(tmp_path / f"{k}.npy", 3001 + k) for k in range(3)]
    options = ["--batch-size", 8, "--seq-len", 16, "--remainder", remainder, "--quiet"]
    options += ["--workers", workers, *(() if "." in target else ("--shards", 4))]
    for method in ("direct", "two-pass"):
        (tmp_path / method).mkdir()
        succeed(convert, "npy-to-hdf5", *sources, tmp_path / method / target, *options, "--shuffle-method", method)
    assert files_in(tmp_path / "direct") == files_in(tmp_path / "two-pass")
    assert [path.name for path in (tmp_path / "two-pass").iterdir()] == [target]


def test_many_runs_and_buckets_through_the_source(tmp_path):
    opened = npy_source([save(tmp_path / "in.npy", 1000)], batch_size=8, seq_len=16, seed=3, remainder="pad", pad_id=7)
    plan = shuffle.ScatterPlan(opened.order, 16, opened.meta.dtype, 90, ((0, 333), (333, 500), (500, 1000)))
    for number in range(plan.num_runs):
        shuffle.scatter_run(shuffle.RunTask(opened, plan, number, plan.run_path(tmp_path, number)))
    scattered = shuffle.ScatteredBatches(opened, plan, tmp_path)
    found, expected = (np.empty((opened.num_batches, 8, 16), opened.meta.dtype) for _ in range(2))
    scattered.read_into(0, found)
    opened.read_into(0, expected)
    np.testing.assert_array_equal(found, expected)


def test_records_are_found_wherever_a_read_begins(tmp_path):
    sources = [save(tmp_path / f"{k}.npy", 300 + k, dtype=dtype) for k, dtype in enumerate(("<u2", "<i8", ">u4"))]
    opened = npy_source(sources, batch_size=8, seq_len=16, seed=3, remainder="pad", pad_id=7, dtype="uint16")
    records = np.concatenate([np.load(path).astype("<u2") for path in sources])
    expected = np.full((opened.num_batches * 8, 16), 7, "<u2")
    expected[: len(records)] = records[opened.order.indices(np.arange(len(records)))]
    reads = [(0, 3), (3, 4), (7, 1), (2, 9), (100, 13), (90, 20), (112, 1), (0, 113)]
    for cold, (start, count) in itertools.product((False, True), reads):
        opened.cold = cold
        found = np.empty((count, 8, 16), "<u2")
        opened.read_into(start, found)
        np.testing.assert_array_equal(found.reshape(-1, 16), expected[start * 8 : (start + count) * 8])


def test_auto_says_what_it_does_and_why_and_a_probe_tells_cold_from_warm(tmp_path, monkeypatch):
    opened = npy_source([save(tmp_path / "in.npy", 100_000)], batch_size=8, seq_len=16, seed=3)
    assert opened.probe(70_000) is None

    def dropped():
        """Drop the pages of the file; return whether they are gone: never so in a file system in memory."""
        fd = os.open(tmp_path / "in.npy", os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return resident_share(tmp_path / "in.npy") == 0

    def waits():
        """Return whether a read of a dropped page has to wait; it has the kernel fetch the page."""
        with open(tmp_path / "in.npy", "rb") as file:
            dropped()
            try:
                os.preadv(file.fileno(), [bytearray(1)], 70_000 * 16 * 8, os.RWF_NOWAIT)
            except BlockingIOError:
                return True
        return False

    if not dropped():
        assert opened.probe(70_000) is None
    elif any(waits() for _ in range(20)):  # else this disk has the page before the kernel can answer
        assert any(dropped() and (opened.probe(70_000) or 0) > 0 for _ in range(100))
    assert opened.probe(70_000) is None
    opened = npy_source([save(tmp_path / "in.npy", 1000)], batch_size=8, seq_len=16, seed=3)
    ranges = [(0, opened.num_batches)]
    assert str(shuffle.choose_shuffle(opened, "auto", ranges, 1 << 30, 1)).startswith("direct: 100% of a sample")
    monkeypatch.setattr(ArraySource, "probe", lambda self, record: 0.0001)
    assert "random read takes 0.10 ms" in str(shuffle.choose_shuffle(opened, "auto", ranges, 1 << 30, 1))
    assert opened.cold
    monkeypatch.setattr(ArraySource, "probe", lambda self, record: 0.008)
    chosen = shuffle.choose_shuffle(opened, "auto", ranges, 1 << 30, 1)
    assert str(chosen).startswith("two-pass: 100% of a sample are not in the page cache, and a random read takes 8.00")
    assert chosen.plan.temp_bytes == chosen.temp_bytes > 0
    plain = npy_source([tmp_path / "in.npy"], batch_size=8, seq_len=16, seed=3, shuffle=False)
    assert shuffle.choose_shuffle(plain, "auto", ranges, 1 << 30, 1).method == "none"


def test_a_stream_larger_than_memory_gives_the_file_of_an_array(tmp_path):
    records = numbered(1003)
    assert zb_hdf5.write_batch_file(tmp_path / "a.batch", records, 8, L, 5) == 125
    for number, spare in enumerate((600, 5000, 10**8)):  # few records in memory, some, all
        path = tmp_path / f"{number}.batch"
        stream = iter(records)
        assert (
            zb_hdf5.write_batch_dataset(path, stream, 1003, 8, L, 5, memory_bytes=shuffle.PROCESS_BYTES + spare) == 125
        )
        assert path.read_bytes() == (tmp_path / "a.batch").read_bytes()
    for wrong in (1002, 1004):
        with pytest.raises(zb_hdf5.ConvertError, match=f"expected {wrong:,} records"):
            zb_hdf5.write_batch_dataset(tmp_path / "b.batch", iter(records), wrong, 8, L, 5)
    assert len(list(tmp_path.glob("*.batch"))) == len(list(tmp_path.glob("*.batch.crc32"))) == 4
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize(("workers", "memory", "fits"), [(2, "64MiB", False), (2, "128MiB", True), (1, "64MiB", True)])
def test_memory_that_some_workers_cannot_keep_to_is_told(workers, memory, fits, tmp_path):
    source = save(tmp_path / "in.npy", 1000)
    command = ["npy-to-hdf5", source, tmp_path / "out", "--batch-size", 8, "--seq-len", 16, "--shards", 2]
    result = run(convert, *command, "--memory", memory, "--workers", workers)
    assert result.exit_code == (0 if fits else 2)
    assert ("64.0 MiB is too little for 2 processes" in result.stderr) is not fits
    assert (tmp_path / "out").exists() is fits


@pytest.mark.slow
def test_the_memory_of_all_workers_together_is_bounded(tmp_path):
    np.save(tmp_path / "in.npy", np.zeros((150 * 1024, 1024), "<u2"))
    command = ["npy-to-hdf5", tmp_path / "in.npy", tmp_path / "out", "--seq-len", 1024, "--quiet", "--shards", 8]
    command = [*map(str, command), "--workers", "2", "--memory", "128MiB", "--shuffle-method", "direct"]
    peak = 0
    code = "from zb_hdf5.converters.cli import convert_commands; convert_commands()"
    with subprocess.Popen([sys.executable, "-c", code, *command], start_new_session=True) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.02)
    assert process.returncode == 0
    assert 64 << 20 < peak <= 128 << 20


PEAK = """
import sys
from zb_hdf5.converters.cli import convert_commands as convert
code = convert.main(sys.argv[1:], standalone_mode=False)
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["direct", "two-pass"])
def test_memory_is_bounded(method, tmp_path):
    """A source of 400 MiB in a process that may take 200 MiB."""
    np.save(tmp_path / "in.npy", np.zeros((200 * 1024, 1024), "<u2"))
    command = ["npy-to-hdf5", tmp_path / "in.npy", tmp_path / "out.h5", "--seq-len", 1024, "--quiet"]
    command += ["--shuffle-method", method, "--memory", "200MiB"]
    done = subprocess.run([sys.executable, "-c", PEAK, *map(str, command)], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) <= 1.1 * 200 * 1024
    with zb_hdf5.open_reader(tmp_path / "out.h5") as reader:
        assert reader.num_records == 200 * 1024
