"""One reader of a growing store, shared by threads, followers, forks and pickles, beside a real writer."""

import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import h5py
import numpy as np
import pytest
from contents import write_stream
from contract import is_refused
from interpreter import start_program
from numbered import numbered_batches
from processes import in_forks, killed_after, output_of, running

from zb_hdf5 import FollowingLoader, HDF5ShardWriter, errors, open_corpus, open_reader, open_writer
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.spec import BATCHES

B, S = 2, 8
SHAPE = {"batch_size": B, "seq_len": S, "dtype": "uint16"}
ROWS = numbered_batches(0, 1, (B, S))[0]

#: Commits one batch after the other, and finishes at the end of its input.
WRITER = f"""
import select, sys
from numbered import numbered_batches
from zb_hdf5 import open_writer
path, shard_batches = sys.argv[1], int(sys.argv[2])
how = {{"live": True, "shard_batches": shard_batches}} if shard_batches else {{}}
with open_writer(path, batch_size={B}, seq_len={S}, dtype="uint16", **how) as writer:
    print("begun", flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        writer.write(numbered_batches(writer.num_batches, 1, ({B}, {S})))
    print(writer.num_batches)
"""


def expect_batch(reader, number):
    found = reader.read_batch(number)
    assert np.array_equal(found, (ROWS + number * 31) % 65536), f"batch {number}: found {found}"


def read_and_refresh(reader, reads, seed):
    """Read committed batches at random; what is seen never becomes less."""
    draw, before = random.Random(seed), 0
    for _ in range(reads):
        if draw.random() < 0.05:
            reader.refresh()
        count = reader.num_batches
        assert count >= before, f"{count} batches after {before}"
        before = count
        if count:
            # mostly the newest one, which an older look does not have
            expect_batch(reader, count - 1 if draw.random() < 0.7 else draw.randrange(count))
    return before


def copy_and_fork(reader, ended):
    """Read through pickled copies and in forks, while other threads refresh the reader."""
    seed = 0
    while not ended.is_set():
        seed += 1
        with pickle.loads(pickle.dumps(reader)) as copy:
            seen = reader.num_batches
            assert copy.refresh() >= seen
            read_and_refresh(copy, 20, seed)
        assert in_forks(lambda: bool(read_and_refresh(reader, 20, 0)) or True, limit_s=20) == [True]
    return seed


def follow(reader, steps):
    """Take steps of a loader over the shared reader, each of which must be what its number says."""
    loader = FollowingLoader(reader, timeout_s=60, rank=0, world_size=1)
    for number, batch in enumerate(loader):
        assert np.array_equal(batch.numpy(), (ROWS + number * 31) % 65536), f"step {number}: found {batch}"
        if number == steps:
            break
    return steps


@pytest.fixture
def quick_switches():
    """Let threads take turns a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def hammer(path, reads, shard_batches):
    """Read a store, or a lone file, in five threads and two followers, with copies and forks, while it grows."""
    seen = path if shard_batches else path.with_name(path.name + ".partial")
    with running(start_program(WRITER, path, shard_batches)) as writer:
        assert writer.stdout.readline() == "begun\n"
        with open_reader(seen) as reader, ThreadPoolExecutor(10, thread_name_prefix="zb-test") as pool:
            ended = threading.Event()
            readers = [pool.submit(read_and_refresh, reader, reads // 5, seed) for seed in range(5)]
            followers = [pool.submit(follow, reader, reads // 20) for _ in range(2)]
            copies = pool.submit(copy_and_fork, reader, ended)
            try:
                for each in (*readers, *followers):
                    each.result()
            finally:
                ended.set()
                wait([copies])  # a child opens a lone file under the name that it has while it grows
                writer.stdin.close()
            assert copies.result()
        return int(output_of(writer))


@pytest.mark.parametrize("reads", [1_000, pytest.param(500_000, marks=[pytest.mark.slow, pytest.mark.longest])])
@pytest.mark.parametrize("shard_batches", [40, 0])
@pytest.mark.usefixtures("quick_switches")
def test_a_shared_reader_of_a_growing_store_gives_the_batches_that_were_committed(reads, shard_batches, tmp_path):
    path = tmp_path / ("store" if shard_batches else "lone.h5")
    count = hammer(path, reads, shard_batches)
    with open_reader(path) as reader:
        assert (reader.complete, reader.num_batches) == (True, count)


def test_a_handle_that_is_about_to_be_closed_does_not_break_a_refresh(tmp_path):
    """HDF5 breaks a dataset with two handles when one is refreshed: each chunk is the first one."""
    path = tmp_path / "x.h5.partial"
    killed_after(lambda: open_writer(tmp_path / "x.h5", **SHAPE).write(numbered_batches(0, 6, (B, S))))
    with open_reader(path) as reader, h5py.File(path, "r") as h5:
        late = h5[BATCHES]
        assert reader.refresh() == 6
        for number in range(6):
            expect_batch(reader, number)
        assert not late.id.valid


@pytest.mark.parametrize("name", ["x.h5", "x.batch", "store"])
@pytest.mark.parametrize("access", ["auto", "pread"])
def test_a_batch_that_is_not_all_there_is_an_error_and_never_zeros(name, access, tmp_path, write_file, write_store):
    stored = numbered_batches(0, 3, (B, S)).astype("<u2")
    path = tmp_path / name
    if name == "store":
        write_store(path, stored, cuts=(1,))
    else:
        write_file(path, stored)
    with open_reader(path, access=access) as reader:
        reader.corpus.num_tokens += 2 * B * S  # as if it had forgotten some of its tokens
        group = np.empty((3, B, S), "<u2")
        uses = [
            lambda: reader.read_batches_into(2, group),
            lambda: reader.read_batch_torch(3),
            lambda: reader.read_into(4, group[0]),
            lambda: reader[4],
        ]
        is_refused(errors.IncompleteError, *uses, match=r"expected \d+ tokens from batch \d on, found")


def test_a_copy_and_a_child_of_a_reader_whose_file_was_renamed_name_the_file_to_open(tmp_path):
    def is_told(use):
        is_refused(errors.FormatError, lambda: use.read_batch(0), match=r"x.h5.partial: is not .* open x.h5$")
        return True

    with open_writer(tmp_path / "x.h5", **SHAPE) as writer:
        writer.write(numbered_batches(0, 1, (B, S)))
        reader = open_reader(tmp_path / "x.h5.partial")
    with reader:
        expect_batch(reader, 0)
        assert is_told(pickle.loads(pickle.dumps(reader)))
        assert in_forks(lambda: is_told(reader)) == [True]


def test_the_padding_of_the_last_chunk_of_a_stream_is_never_shown(tmp_path):
    with HDF5Corpus(write_stream(tmp_path / "s.h5", np.arange(1, 20), chunk_tokens=8).path, layout=None) as corpus:
        assert (corpus.num_units, corpus.num_tokens) == (3, 19)
        groups = [(first, chunks.copy()) for first, chunks in corpus.groups()]
        assert [(first, chunks.shape) for first, chunks in groups] == [(0, (2, 1, 8)), (2, (1, 1, 3))]
        np.testing.assert_array_equal(np.concatenate([chunks.reshape(-1) for _, chunks in groups]), np.arange(1, 20))


@pytest.mark.usefixtures("quick_switches")
def test_a_shared_reader_of_a_growing_stream_gives_the_tokens_that_were_committed(tmp_path):
    def read_and_refresh(store, seed):
        draw, before = random.Random(seed), 0
        for _ in range(60):
            if draw.random() < 0.3:
                store.refresh()
            count = store.num_tokens
            assert count >= before, f"{count} tokens after {before}"
            before = count
            start = draw.randrange(count)
            found = store.tokens[start:count]
            assert np.array_equal(found, np.arange(start, count)), f"{start} to {count}: found {found}"

    with HDF5ShardWriter(tmp_path / "s.h5", chunk_tokens=64, dtype="uint32") as writer:
        writer.write_document(np.arange(64))
        with (
            open_corpus(tmp_path / "s.h5.partial") as store,
            ThreadPoolExecutor(4, thread_name_prefix="zb-test") as pool,
        ):
            readers = [pool.submit(read_and_refresh, store, seed) for seed in range(4)]
            while not all(reader.done() for reader in readers):
                writer.write_document(np.arange(writer.token_count, writer.token_count + 64))
            for reader in readers:
                reader.result()
            assert store.refresh() == writer.token_count


def test_a_stream_that_grows_keeps_its_windows(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", chunk_tokens=64, dtype="uint32") as writer:
        writer.write_document(np.arange(64))
        with open_corpus(tmp_path / "s.h5.partial") as stream:
            windows = stream.batches(2, 16)
            assert (len(windows), stream.document_count) == (2, 1)
            writer.write_document(np.arange(64, 128))
            assert stream.refresh() == 128
            assert (len(windows), stream.document_count) == (4, 2)
            np.testing.assert_array_equal(windows.read_batch(3), np.arange(96, 128).reshape(2, 16))
            np.testing.assert_array_equal(stream.documents[1].ids, np.arange(64, 128))
