"""Whole batches that memory cannot keep are read past the page cache: the same, checked, and with the same errors."""

import os
from itertools import islice

import numpy as np
import pytest
import torch
from contract import require_equal
from damage import flip_token
from processes import forked

from zb_hdf5 import ChecksumError, ClosedError, IncompleteError, Loader, convert
from zb_hdf5.files import direct_reads, pages, residency
from zb_hdf5.files.direct_reads import DirectReads
from zb_hdf5.files.paths import files_at_hand

NUM_BATCHES = 150
#: The name of a store, and the shape of its batches: of one in seven the bytes begin and end with a block.
STORES = {"hdf5": ("hdf5", 2, 1024, 5), "batch": ("batch", 2, 24, 3), "uint16": ("hdf5", 2, 24, 1)}
ALONE = {"rank": 0, "world_size": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for name, (backend, batch_size, seq_len, shards) in STORES.items():
        dtype = "uint16" if name == "uint16" else "uint32"
        found = np.random.default_rng(3).integers(0, 60_000, (NUM_BATCHES * batch_size, seq_len), dtype)
        np.save(folder / "t.npy", found)
        shape = {"batch_size": batch_size, "seq_len": seq_len, "dtype": dtype, "shards": shards}
        convert(folder / "t.npy", backend, folder / name, **shape)
    return folder


@pytest.fixture
def begun(folder, monkeypatch):
    """The reads past the page cache that were begun, while nothing is in memory and memory keeps nothing."""
    found = []
    real = DirectReads.begin

    def begin(reads, wanted):
        real(reads, wanted)
        found.extend((number, offset) for number, _, offset in wanted if reads.is_usable)

    monkeypatch.setattr(DirectReads, "begin", begin)
    monkeypatch.setattr(residency, "memory_limit", lambda: 0)
    for module in (pages, residency):
        monkeypatch.setattr(module, "page_in_memory", lambda fd, offset: False)
    return found


@pytest.fixture
def served(folder, begun):
    """As `begun`, where the temporary folder has such reads."""
    with Loader(folder / "hdf5", **ALONE) as loader:
        iterator = iter(loader)
        list(islice(iterator, 3))
        iterator.close()
    del begun[1:]
    if direct_reads.file_system(folder) not in direct_reads.FILE_SYSTEMS or not begun:
        pytest.skip("the temporary folder has no reads past the page cache")
    begun.clear()
    return begun


def expected_of(path, **how):
    with Loader(path, prefetch=2, **how, **ALONE) as loader:
        return list(loader)


@pytest.mark.parametrize("how", [{}, {"dtype": torch.int32}, {"targets": True}, {"verify": "batch", "access": "pread"}])
@pytest.mark.parametrize("name", STORES)
def test_they_are_the_batches_of_threads(name, how, folder, served):
    path = folder / name
    require_equal(list(Loader(path, **how, **ALONE)), expected_of(path, **how))
    assert len(served) == NUM_BATCHES


def test_a_system_without_such_reads_gets_hints(folder, begun, monkeypatch):
    def refuse(*_):
        raise OSError("no such call")

    monkeypatch.setattr(direct_reads, "_calls", refuse)
    announced = []
    with Loader(folder / "hdf5", **ALONE) as loader:
        monkeypatch.setattr(
            loader.batches, "will_need", lambda first, count: announced.extend(range(first, first + count))
        )
        require_equal(list(loader), expected_of(folder / "hdf5"))
    assert (begun, sorted(announced)) == ([], [*range(NUM_BATCHES)])


def test_fields_come_with_them(tmp_path, served):
    import h5py

    rows = np.random.default_rng(5).integers(0, 60_000, (200, 64), np.uint32)
    with h5py.File(tmp_path / "source.h5", "w") as h5:
        h5["input_ids"] = rows
        h5["loss_mask"] = (rows % 3 > 0).astype(np.uint8)
    convert(tmp_path / "source.h5", "hdf5", tmp_path / "store", batch_size=4, seq_len=64, dtype="uint32")
    how = {"fields": ("loss_mask",)}
    require_equal(list(Loader(tmp_path / "store", **how, **ALONE)), expected_of(tmp_path / "store", **how))
    assert len(served) == 50


@pytest.mark.parametrize("kind", ["system", "file system", "later"])
def test_where_they_are_refused_batches_are_announced_and_the_same(kind, folder, begun, monkeypatch):
    announced = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *found: announced.append(found))
    expected = expected_of(folder / "hdf5")
    if kind == "system":
        monkeypatch.setattr(direct_reads, "_call", lambda *_: -1)
    elif kind == "file system":
        monkeypatch.setattr(direct_reads, "FILE_SYSTEMS", ())
    else:
        real = DirectReads._submit
        monkeypatch.setattr(DirectReads, "_submit", lambda reads, *rest: min(5, real(reads, *(x[:5] for x in rest))))
    announced.clear()
    require_equal(list(Loader(folder / "hdf5", **ALONE)), expected)
    assert announced
    assert len(begun) < NUM_BATCHES


@pytest.mark.parametrize("share", [1, 2])
def test_what_memory_can_keep_is_left_in_memory(share, folder, served, monkeypatch):
    with Loader(folder / "hdf5", **ALONE) as loader:
        monkeypatch.setattr(residency, "memory_limit", lambda: loader.batches.corpus.num_tokens * 4 // share)
        list(loader)
    assert not served


def test_a_flipped_bit_is_found(folder, served):
    shard = sorted((folder / "hdf5").glob("*.h5"))[2]
    with Loader(folder / "hdf5", **ALONE) as loader:
        flip_token(shard, 3)
        try:
            with pytest.raises(ChecksumError, match=r"batch 3: expected crc32"):
                list(loader)
        finally:
            flip_token(shard, 3)
    assert served


def test_a_file_that_is_cut_short_is_an_error(folder, served):
    shard = sorted((folder / "hdf5").glob("*.h5"))[2]
    content = shard.read_bytes()
    with Loader(folder / "hdf5", **ALONE) as loader:
        steps = iter(loader)
        next(steps)
        os.truncate(shard, len(content) // 2)
        try:
            with pytest.raises(IncompleteError, match="cut short"):
                list(steps)
        finally:
            shard.write_bytes(content)
    assert served


def test_a_reader_that_is_closed_ends_the_iteration(folder, served):
    with Loader(folder / "hdf5", **ALONE) as loader:
        steps = iter(loader)
        next(steps)
        loader.batches.close()
        with pytest.raises(ClosedError, match="closed"):
            list(steps)
    assert served


def test_the_child_of_a_fork_goes_on_by_itself(folder, served):
    expected = expected_of(folder / "hdf5")
    with Loader(folder / "hdf5", **ALONE) as loader:
        steps = iter(loader)
        require_equal(list(islice(steps, 20)), expected[:20])
        with forked(lambda: require_equal(list(steps), expected[20:]) is None):
            require_equal(list(steps), expected[20:])
    assert served


def test_an_iteration_that_is_left_leaves_nothing_open(folder, served):
    before = set(os.listdir("/proc/self/fd"))
    with Loader(folder / "hdf5", **ALONE) as loader:
        steps = iter(loader)
        next(steps)
        assert len(set(os.listdir("/proc/self/fd")) - before) > min(5, files_at_hand(5))
        steps.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert served
