"""Whole reads are compared with their crc32, whatever the format, and no more is read for it than that takes."""

from __future__ import annotations

import gc
import pickle
from collections import Counter
from contextlib import contextmanager

import h5py
import numpy as np
import pytest
import torch
from contents import label_batches, write_streams
from contract import check_closing, check_reader, is_refused, random_tokens
from damage import flip_stored
from reading import reading

import zb_hdf5.files.checked
from zb_hdf5 import DocumentLoader, Loader, ShardIndex, errors, open_corpus, open_reader
from zb_hdf5.files.checked import Crc32Rows
from zb_hdf5.spec import CRC32_CHUNK_ROWS

SHAPE = (4, 512)  # whole pages
STORED = {
    "batch": ("mmap", "pread", "auto"),
    "hdf5": ("mmap", "pread", "auto", "h5py"),
    "compressed hdf5": ("h5py", "auto"),
    "batch store": ("mmap", "pread", "auto"),
    "hdf5 store": ("mmap", "pread", "auto", "h5py"),
}
CASES = [(stored, access) for stored, accesses in STORED.items() for access in accesses]
each_case = pytest.mark.parametrize(("stored", "access"), CASES, ids=lambda value: value.replace(" ", "-"))

#: Reads of batch 5, and whether they read it whole into a buffer.
READS = {
    "into a buffer": (lambda r: r.read_into(5, np.empty(SHAPE, r.dtype)), True),
    "widened": (lambda r: r.read_into(5, np.empty(SHAPE, np.int64)), True),
    "a tensor": (lambda r: r.read_batch_torch(5), True),
    "many": (lambda r: r.read_batches_into(3, np.empty((4, *SHAPE), r.dtype)), True),
    "a batch": (lambda r: r.read_batch(5), None),  # unless it is a view
    "int32": (lambda r: r.read_batch_int32(5), None),
    "a record": (lambda r: r.read_record(5 * SHAPE[0] + 2), False),
    "short records": (lambda r: r.read_records_into(np.array([41, 44, 3]), np.empty((3, 256), r.dtype)), False),
}


@pytest.fixture
def expected():
    return random_tokens(8, *SHAPE)


@pytest.fixture
def stored_at(tmp_path, make_stored, expected):
    return lambda stored: make_stored(stored, tmp_path, expected, (3, 4))


def flip_middle(folder, tokens):
    flip_stored(folder, tokens, tokens.nbytes // 2, 4)


@pytest.mark.parametrize("verify", ["auto", "none", "batch", "store"])
@each_case
@pytest.mark.thin
def test_every_check_keeps_the_contract(stored, access, verify, stored_at, expected):
    reader = open_reader(stored_at(stored), access=access, verify=verify)
    verified = {"auto": "whole reads", "none": "none", "batch": "all reads", "store": "store"}
    assert reader.verified == verified[verify]
    check_reader(reader, expected)
    check_closing(reader, expected)


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize(("stored", "access"), [case for case in CASES if case[0] != "compressed hdf5"], ids=str)
@pytest.mark.thin
def test_a_flipped_bit_is_found_where_a_batch_is_read_whole(stored, access, how, stored_at, expected, tmp_path):
    path = stored_at(stored)
    with open_reader(path, access=access) as reader, open_reader(path, access=access, verify="batch") as strict:
        strict[4], reader[4]  # proves the shard while it is whole
        flip_middle(tmp_path, expected[5])
        read, whole = READS[how]
        if whole or (whole is None and access in ("pread", "h5py")):
            told = r"(one\.batch|hdf5\.h5|shard-00002).*batch [15]: expected crc32 [0-9a-f]{8}, found [0-9a-f]{8}"
            is_refused(errors.ChecksumError, lambda: read(reader), match=told)
        else:
            read(reader)
        is_refused(errors.ChecksumError, lambda: read(strict), match=r"batch [15]: expected crc32")
        with open_reader(path, access=access, verify="none") as unchecked:
            unchecked[4]
            read(unchecked)


@pytest.mark.parametrize("stored", ["batch store", "hdf5 store"])
def test_a_loader_finds_a_flipped_bit(stored, make_stored, expected, tmp_path):
    narrow = expected >> 1  # ids that int32 holds
    path = make_stored(stored, tmp_path, narrow, (3, 4))
    flip_middle(tmp_path, narrow[6])
    for options in ({}, {"access": "pread"}, {"prefetch": 2}, {"access": "pread", "dtype": torch.int32}):
        with pytest.raises(errors.ChecksumError, match="batch 2: expected"), Loader(path, **options) as loader:
            list(loader)


def test_fingerprints_and_states_do_not_depend_on_it(stored_at):
    path = stored_at("hdf5 store")
    states = []
    for verify in ("auto", "none", "batch", "store"):
        with Loader(path, verify=verify) as loader:
            next(loader)
            states.append(loader.state_dict())
            assert (loader.batches.verified == "store") == (verify == "store")
    assert all(state == states[0] for state in states)


def test_without_a_stored_crc32_nothing_is_checked_and_the_reader_says_so(tmp_path, expected, write_file):
    lone = write_file(tmp_path / "x.batch", expected).path
    lone.with_name("x.batch.crc32").unlink()
    with h5py.File(tmp_path / "foreign.h5", "w") as h5:
        h5["data"] = expected
        label_batches(h5["data"])
    for path, options in ((lone, {}), (tmp_path / "foreign.h5", reading({"dataset": "data"}))):
        with open_reader(path, **options) as reader:
            assert reader.verified == "none"
            np.testing.assert_array_equal(reader[2], expected[2])
        for verify in ("batch", "store"):
            with pytest.raises(errors.UnverifiableError):
                open_reader(path, verify=verify, **options)


def test_a_store_of_which_one_shard_has_no_crc32_says_so(tmp_path, expected, stored_at):
    folder = stored_at("hdf5 store")
    index = ShardIndex.load(folder)
    index.table.values["crc32"][1] = -1
    index.save(folder)
    with open_reader(folder) as reader:
        assert reader.verified == "none"
        np.testing.assert_array_equal(reader[3], expected[3])
    is_refused(errors.UnverifiableError, lambda: open_reader(folder, verify="batch"), match="shard-00001")


def test_a_batch_file_that_replaces_another_one_is_not_compared_with_its_crc32(tmp_path, expected, write_file):
    path = write_file(tmp_path / "x.batch", expected).path
    write_file(path, expected[::-1].copy(), overwrite=True)
    with open_reader(path, access="pread") as reader:
        assert reader.verified == "whole reads"
        np.testing.assert_array_equal(reader[0], expected[-1])


@contextmanager
def counted_reads(monkeypatch):
    """Count the bytes of crc32 rows that are read, by the file that they are read from."""
    counts: Counter[str] = Counter()
    read = zb_hdf5.files.checked._read_crc32

    def count(ranges, runs, num_rows, *others):
        counts[ranges.name] += 4 * num_rows
        return read(ranges, runs, num_rows, *others)

    with monkeypatch.context() as patch:
        patch.setattr(zb_hdf5.files.checked, "_read_crc32", count)
        yield counts


@pytest.mark.parametrize("verify", ["auto", "batch"])
def test_a_store_is_read_without_hdf5_and_its_rows_once(verify, stored_at, expected, monkeypatch):
    folder = stored_at("hdf5 store")
    with monkeypatch.context() as patch, counted_reads(monkeypatch) as counts:
        patch.setattr(h5py, "File", None)
        with open_reader(folder, verify=verify, access="pread") as reader:
            assert not counts
            reader.read_batch_torch(3)
            assert counts == {str(folder / "shard-00001.h5"): 4}
            for _ in range(2):
                np.testing.assert_array_equal(list(map(reader.read_batch_torch, range(8))), expected)
            assert sum(counts.values()) == 4 * 8


def test_rows_go_with_their_file(tmp_path, write_store):
    """Blocks that are read belong to an open file: what closes for others is not kept."""
    tokens = np.arange(CRC32_CHUNK_ROWS * 4, dtype="<u4").reshape(-1, 1, 2)
    folder = write_store(tmp_path / "store", tokens, (CRC32_CHUNK_ROWS,), ("hdf5",))
    with open_reader(folder, access="pread") as reader:
        list(reader)
        kept = [one for one in gc.get_objects() if type(one) is Crc32Rows]
        assert kept
        del kept
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Crc32Rows]


def test_windows_are_checked_by_whole_chunks_if_asked_for(tmp_path):
    tokens = np.arange(1250) % 997
    parts = [(part, None, {"mask": part % 3}) for part in np.split(tokens, [560])]  # the last chunk of each is shorter
    how = {"chunk_tokens": 100, "dtype": "uint16", "fields": {"mask": "u1"}}
    folder = write_streams(tmp_path / "streams", parts, **how)
    lone = folder / "shard-00001.h5"
    for path, own in ((folder, tokens), (lone, tokens[560:])):
        with open_reader(path, batch_size=2, seq_len=30, verify="batch") as reader:
            assert reader.verified == "all reads"
            found = np.concatenate([batch.reshape(-1) for batch in reader])
            np.testing.assert_array_equal(found, own[: len(found)])
            masks = np.concatenate([batch.reshape(-1) for batch in reader.field("mask")])
            np.testing.assert_array_equal(masks, own[: len(found)] % 3)
        with open_corpus(path, verify="batch") as store, pickle.loads(pickle.dumps(store)) as copy:
            np.testing.assert_array_equal(store.tokens[0 : len(own)], own)
            np.testing.assert_array_equal(copy.tokens[-3:], own[-3:])
    flip_middle(folder, tokens[900:950].astype("<u2"))
    for path, record, chunk in ((folder, 30, 3), (lone, 12, 3)):
        with open_reader(path, batch_size=2, seq_len=30, verify="batch") as reader:
            reader.read_record(record - 5)
            with pytest.raises(errors.ChecksumError, match=rf"shard-00001\.h5: chunk {chunk}: expected crc32"):
                reader.read_record(record)
        with open_reader(path, batch_size=2, seq_len=30) as reader:
            assert reader.verified == "none"
            reader.read_record(record - 5)  # proves the shard
            reader.read_record(record)
    with DocumentLoader(folder, collate="pad", batch_size=1, verify="batch", rank=0, world_size=1) as loader:
        is_refused(errors.ChecksumError, lambda: list(loader), match="chunk 3")
