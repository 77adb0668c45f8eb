"""The statistics of a loader: batches, bytes and the time that was waited, by hand and by the loader."""

import pickle
import time

import numpy as np
import pytest
from packed import write_packed

from zb_hdf5 import DocumentLoader, HDF5ShardWriter, Loader, MixedLoader, open_writer
from zb_hdf5.loaders.stats import LoaderStats, bytes_of

BATCH, LENGTH, BATCHES = 4, 16, 6


@pytest.fixture
def masked_store(tmp_path):
    path = tmp_path / "store.h5"
    with open_writer(path, batch_size=BATCH, seq_len=LENGTH, fields={"mask": "u1"}) as writer:
        for number in range(BATCHES):
            tokens = np.full((BATCH, LENGTH), number, np.uint32)
            writer.append(tokens, {"mask": np.ones((BATCH, LENGTH), np.uint8)})
    return path


@pytest.mark.parametrize(
    ("options", "bytes_of_a_token"), [({}, 8), ({"targets": True}, 16), ({"fields": ["mask"]}, 9)], ids=str
)
def test_batches_and_bytes_are_counted_in_each_way_to_take_them(masked_store, options, bytes_of_a_token):
    length = LENGTH - bool(options.get("targets"))
    with Loader(masked_store, rank=0, world_size=1, **options) as loader:
        assert loader.stats() == LoaderStats(0, 0, 0.0, 0.0)
        assert len(list(loader)) == BATCHES
        loader.get_batch()
        next(loader)
        stats = loader.stats()
    assert stats.batches == BATCHES + 2
    assert stats.num_bytes == (BATCHES + 2) * BATCH * length * bytes_of_a_token
    assert 0 < stats.waited_s < stats.elapsed_s
    assert stats.fetched is None


def test_time_in_the_loop_is_no_time_that_was_waited(masked_store, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    with Loader(masked_store, rank=0, world_size=1) as loader:
        for _ in loader:
            now_s[0] += 1.0  # the step of a training
        first = loader.stats()
        assert (first.waited_s, first.elapsed_s, first.waited_share) == (0.0, BATCHES, 0.0)
        reading = loader.steps.read_all
        monkeypatch.setattr(loader.steps, "read_all", lambda *where: slowly(reading(*where), now_s))
        loader.get_batch()
        later = loader.stats().since(first)
    assert later == LoaderStats(1, BATCH * LENGTH * 8, 3.0, 3.0)
    assert str(later) == "1 batch, 0.0 MB/s, waited 3.00 of 3.00 s for data (100.0%)"


def slowly(reading, now_s):
    """Yield batches of which each takes three seconds."""
    for batch in reading:
        now_s[0] += 3.0
        yield batch


def test_a_copy_begins_anew(masked_store):
    with Loader(masked_store, rank=0, world_size=1) as loader:
        next(loader)
        with pickle.loads(pickle.dumps(loader)) as copy:
            assert copy.stats() == LoaderStats(0, 0, 0.0, 0.0)
            next(copy)
            assert (copy.stats().batches, loader.stats().batches) == (1, 1)


def test_units_that_a_cache_did_not_have_are_counted(masked_store, tmp_path):
    for expected in (BATCHES, 0):
        with Loader(masked_store, rank=0, world_size=1, cache=tmp_path / "cache") as loader:
            list(loader)
            assert loader.stats().fetched == expected
            assert f", {expected} fetched into the cache" in str(loader.stats())
            loader.set_epoch(1)
            list(loader)
            assert loader.stats().fetched == expected


def test_mixtures_and_documents_are_counted_too(masked_store, tmp_path):
    with MixedLoader({"a": masked_store}, {"a": 1.0}, rank=0, world_size=1) as mixture:
        next(mixture)
        assert mixture.stats().batches == 1
    stream = tmp_path / "stream.h5"
    with HDF5ShardWriter(stream) as writer:
        writer.write_document(np.arange(10))
    with DocumentLoader(stream, collate="pad", batch_size=1, rank=0, world_size=1) as loader:
        found = bytes_of(next(loader))
        assert loader.stats().num_bytes == found > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 3},
        {"batch_size": 5, "last": "short"},
        {"batch_size": 5, "last": "masked", "targets": True},
        {"documents": ["position_ids", "max_seqlen"]},
        {"documents": True, "targets": True},
        {"documents": [("cu_seqlens", 40)]},
        {"documents": ["documents", "seq_lens"], "batch_size": 3},
        {"spans": True},
    ],
    ids=str,
)
def test_the_bytes_of_equal_batches_are_those_of_each_of_them(options, tmp_path):
    path = write_packed(tmp_path / "packed.h5", [3, 9, 1, 14, 2, 7, 22, 5, 8, 11] * 3).path
    with Loader(path, rank=0, world_size=1, **options) as loader:
        expected = 0
        for step, batch in enumerate(loader):
            expected += bytes_of(batch)
            assert loader.stats().num_bytes == expected
            if step == 1:
                loader.set_batch_size(2)
        for _ in range(3):
            expected += bytes_of(next(loader))
        assert loader.stats().num_bytes == expected


def test_bytes_of_other_values_are_none():
    assert bytes_of({"tokens": np.zeros(3, np.int64), "spans": ["a"], "max_seqlen": 3}) == 24
