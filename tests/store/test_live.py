"""Live stores: real writers and followers in processes of their own; every batch is told by its number alone."""

import errno
import functools
import inspect
import json
import os
import pickle
import shutil
import threading
import time

import numpy as np
import pytest
from commandline import report_of, run, run_zb, succeed
from contract import is_refused
from damage import flip_stored
from descriptors import open_descriptors
from interpreter import run_program, start_program, start_training
from interrupted import failing
from numbered import numbered_batches
from processes import forked, in_forks, running

from zb_hdf5 import FollowingLoader, Loader, ShardIndex, errors, open_reader, open_writer, verify_store
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.files.publishing import PartialFile
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.formats.h5_writer import HDF5Writer
from zb_hdf5.formats.inspection import find_column
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.live import LiveCorpus, LiveStoreWriter
from zb_hdf5.store.repair import repair_store

B, S = 4, 16
SHAPE = {"batch_size": B, "seq_len": S, "dtype": "uint16"}


batches = functools.partial(numbered_batches, shape=(B, S))


def start_store(folder, shard_batches=4):
    return open_writer(folder, **SHAPE, live=True, shard_batches=shard_batches)


def follow(folder, timeout_s=30.0, **options):
    return FollowingLoader(folder, timeout_s=timeout_s, **{"rank": 0, "world_size": 1, **options})


def kill_store(folder, count, shard_batches=4):
    """Make the store that a writer leaves that was killed after `count` batches."""
    run_program(COMMON + WRITER, folder, shard_batches, count, "kill")
    return folder


def expect_batches(reader, count):
    assert reader.num_batches == count
    np.testing.assert_array_equal(np.stack(list(reader)), batches(0, count))


def expect_store(folder, count, *, complete):
    """Compare the batches of a folder; return the fingerprint."""
    with open_reader(folder) as reader:
        assert reader.complete is complete
        expect_batches(reader, count)
        return reader.fingerprint


# --- processes -------------------------------------------------------------------------------------------------
COMMON = f"""
import functools, os, sys, time
import numpy as np
from zb_hdf5 import open_reader, open_writer, UnavailableError
B, S = {B}, {S}
{inspect.getsource(numbered_batches)}
batches = functools.partial(numbered_batches, shape=(B, S))
folder, *arguments = sys.argv[1:]
"""

#: Commits groups of 1 to 9 batches, and says after each how many are committed; then finishes, or is killed.
WRITER = """
shard_batches, count, end = int(arguments[0]), int(arguments[1]), arguments[2]
draw = np.random.default_rng(0)
writer = open_writer(folder, batch_size=B, seq_len=S, dtype="uint16", live=True, shard_batches=shard_batches)
while writer.num_batches < count:
    writer.write(batches(writer.num_batches, min(int(draw.integers(1, 10)), count - writer.num_batches)))
    print(writer.num_batches, flush=True)
    if len(arguments) > 3:
        time.sleep(float(arguments[3]))
if end == "kill":
    os.kill(os.getpid(), 9)
writer.finish()
"""

#: Follows as one rank; every step must be what its number says. Prints the batches that it saw and how it ended.
FOLLOWER = """
from zb_hdf5 import FollowingLoader
rank, world_size, batch_size, timeout_s = map(int, arguments)
while not os.path.exists(folder + "/shards.json"):
    time.sleep(0.01)
loader = FollowingLoader(folder, timeout_s=timeout_s, rank=rank, world_size=world_size, batch_size=batch_size)
steps, end = 0, "finished"
try:
    for tokens in loader:
        first = (steps * world_size + rank) * batch_size
        rows = batches(first // B, batch_size // B + 2).reshape(-1, S)[first % B :][:batch_size]
        assert np.array_equal(tokens.numpy(), rows), f"step {steps}: found {tokens}, expected {rows}"
        steps += 1
except UnavailableError:
    end = "timeout"
print(steps, end)
"""

#: Reads at random what is committed, by a fresh reader now and then.
READER = """
while not os.path.exists(folder + "/shards.json"):
    time.sleep(0.01)
draw, reader, before, still = np.random.default_rng(1), open_reader(folder), 0, time.monotonic()
while time.monotonic() - still < float(arguments[0]) and not reader.complete:
    if draw.random() < 0.02:
        reader.close()
        reader = open_reader(folder)
    now = reader.refresh()
    assert now >= before, f"{now} batches after {before}"
    if now > before:
        before, still = now, time.monotonic()
    elif time.monotonic() - still > 0.5:  # the writer is at rest, or dead
        time.sleep(0.02)
    for number in draw.integers(0, now, 20 if now else 0).tolist():
        found = reader.read_batch(number)
        assert np.array_equal(found, batches(number, 1)[0]), f"batch {number}: found {found}"
print(before, "finished" if reader.complete else "timeout")
"""


def begun(code, *arguments, **options):
    return start_program(COMMON + code, *arguments, **options)


def follower(*arguments):
    return start_training(COMMON + FOLLOWER, *arguments)


def ended(process):
    """Return the two words that a follower prints last."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    count, end = out.split()
    return int(count), end


def acknowledged_in(said):
    """Return the last number in the output of a writer, which may have been killed while it wrote one."""
    return int(said.read_text().rpartition("\n")[0].rpartition("\n")[2] or 0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


# --- under load ------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "shard_batches"), [(0.5, 8), (3, 40), (3, 2), pytest.param(30, 400, marks=pytest.mark.longest)]
)
def test_followers_see_every_committed_batch_of_a_writer_that_is_killed(seconds, shard_batches, tmp_path):
    folder, said = tmp_path / "store", tmp_path / "said"
    with (
        open(said, "w") as file,
        running(
            begun(WRITER, folder, shard_batches, 1 << 40, "never", 0.001, stdout=file),
            follower(folder, 0, 1, B, 5),
            follower(folder, 1, 2, 7, 5),
            begun(READER, folder, 5),
        ) as (writer, *followers),
    ):
        while acknowledged_in(said) <= 2 * shard_batches:  # until it is at work in a third shard
            time.sleep(0.01)
            assert writer.poll() is None, writer.stderr.read()
        time.sleep(seconds)
        assert writer.poll() is None
        writer.kill()
        writer.wait()
        (whole, *ends), (steps, end), (read, reader_end) = map(ended, followers)
    assert [*ends, end, reader_end] == ["timeout"] * 3
    with open_reader(folder) as reader:
        committed = reader.num_batches
    expect_store(folder, committed, complete=False)
    assert acknowledged_in(said) <= committed
    assert (whole, read, steps) == (committed, committed, committed * B // (2 * 7))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "shard_batches"), [(88, 8), (41, 2)])
def test_all_ranks_make_the_same_steps_to_the_end(count, shard_batches, folder):
    with running(
        begun(WRITER, folder, shard_batches, count, "finish", 0.01),
        *(follower(folder, rank, 3, 6, 60) for rank in range(3)),
    ) as (writer, *followers):
        assert {ended(follower) for follower in followers} == {(count * B // 18, "finished")}
        assert writer.wait() == 0
    expect_store(folder, count, complete=True)
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".partial")]
    assert not [report.problem for report in verify_store(folder) if report.problem]


@pytest.mark.parametrize("count", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_shards_of_one_batch_are_renamed_under_many_readers(count, folder):
    readers = (begun(READER, folder, 60) for _ in range(3))
    with running(begun(WRITER, folder, 1, count, "finish"), *readers) as (writer, *readers):
        assert {ended(reader) for reader in readers} == {(count, "finished")}
        assert writer.wait() == 0


def test_a_growing_shard_that_is_first_read_before_its_last_cut_is_read_behind_it(tmp_path, monkeypatch):
    growing = tmp_path / "store/shard-00000.h5.partial"
    cut_off = HDF5Writer._cut_off
    readers = []
    sizes = []

    def read_before_the_cut(file, num_chunks):
        readers.append(HDF5Corpus(growing).batches())  # the file is complete, and maps
        for reader in readers:
            np.testing.assert_array_equal(reader.read_batch(2), batches(2, 1)[0])
        sizes.append(growing.stat().st_size)
        cut_off(file, num_chunks)
        sizes.append(growing.stat().st_size)

    monkeypatch.setattr(HDF5Writer, "_cut_off", read_before_the_cut)
    with start_store(tmp_path / "store", 8) as writer:
        writer.write(batches(0, 3))
        with HDF5Corpus(growing) as reader:
            readers.append(pickle.loads(pickle.dumps(reader.batches())))  # opens the file at its first read
    assert sizes[1] < sizes[0]
    for reader in readers:
        with reader:
            expect_batches(reader, 3)


# --- the loader ------------------------------------------------------------------------------------------------
def test_a_step_waits_for_the_records_of_all_ranks(tmp_path):
    with start_store(tmp_path / "store") as writer:
        writer.write(batches(0, 5))  # of 2 x 2 batches a step: one step and a half
        for rank in range(2):
            with follow(tmp_path / "store", 0.05, rank=rank, world_size=2, batch_size=2 * B) as loader:
                steps = iter(loader)
                expected = batches(0, 4).reshape(2, 2 * B, S)
                np.testing.assert_array_equal(next(steps).numpy(), expected[rank])
                told = r"no new batch for 0.05 s after 5 batches.*repair it"
                is_refused(errors.UnavailableError, functools.partial(next, steps), match=told)


@pytest.mark.parametrize("name", ["store", "x.h5.partial"])
def test_a_waiting_loader_goes_on_when_batches_come(name, tmp_path):
    path, seen = tmp_path / name, []
    writer = start_store(path) if name == "store" else open_writer(tmp_path / "x.h5", **SHAPE)
    with writer, follow(path) as loader:
        reading = threading.Thread(target=lambda: seen.extend(loader), name="zb-test-follow")
        reading.start()
        for number in range(10):
            writer.write(batches(number, 1)[0])
            time.sleep(0.005)
        writer.finish()
        reading.join()
    np.testing.assert_array_equal(np.stack(seen), batches(0, 10))


@pytest.mark.parametrize("drop_last", [True, False])
def test_drop_last_decides_about_the_rest_of_a_finished_store(drop_last, tmp_path):
    options = {"batch_size": 3 * B, "drop_last": drop_last}
    with start_store(tmp_path / "store") as writer, follow(tmp_path / "store", **options) as loader:
        steps = iter(loader)
        writer.write(batches(0, 7))
        found = [next(steps), next(steps)]
        writer.finish()
        found += list(steps)
    expected = np.concatenate([batches(0, 7), batches(0, 2)]).reshape(3, 3 * B, S)[: 2 if drop_last else 3]
    np.testing.assert_array_equal(np.stack(found), expected)
    with start_store(tmp_path / "empty") as writer, follow(tmp_path / "empty", drop_last=drop_last) as loader:
        writer.finish()
        assert list(loader) == []
    with open_reader(tmp_path / "empty") as reader:
        assert (reader.complete, reader.num_batches) == (True, 0)


def test_a_state_goes_on_while_the_store_grows_and_when_it_is_finished(folder, tmp_path):
    with start_store(folder) as writer:
        writer.write(batches(0, 6))
        with follow(folder) as loader:
            steps = iter(loader)
            next(steps)
            first = json.loads(json.dumps(loader.state_dict()))
            next(steps)
        with follow(folder, 0.01) as loader:
            loader.load_state_dict(first)
            steps = iter(loader)
            np.testing.assert_array_equal([next(steps).numpy() for _ in range(5)], batches(1, 5))
            late = loader.state_dict()
            is_refused(errors.UnavailableError, lambda: next(steps))
        writer.write(batches(6, 7))
        with follow(folder) as loader:
            loader.load_state_dict(late)
            np.testing.assert_array_equal(next(iter(loader)), batches(6, 1)[0])
    for made, options in ((FollowingLoader, {}), (Loader, {"shuffle": "sequential"})):
        with made(folder, rank=0, world_size=1, **options) as loader:
            loader.load_state_dict(late)
            np.testing.assert_array_equal(np.stack(list(loader)), batches(6, 7))
    with start_store(tmp_path / "other") as writer:
        writer.write(batches(0, 13))
    with follow(tmp_path / "other") as loader, pytest.raises(errors.StateError, match="fingerprint"):
        loader.load_state_dict(late)


def test_a_following_loader_refuses_other_orders_and_epochs(folder):
    with start_store(folder) as writer:
        writer.write(batches(0, 6))
        for options in ({"shuffle": "global"}, {"prefetch": 4}, {"device": "cuda"}, {"batch_size": 0}):
            is_refused(errors.ArgumentError, lambda options=options: follow(folder, **options))
        with follow(folder) as loader:
            assert type(loader) is FollowingLoader
            is_refused(TypeError, lambda: len(loader), match="has no length")
            is_refused(errors.ArgumentError, lambda: loader.set_epoch(1), match="one epoch")
        with pytest.raises(errors.ArgumentError, match="still grows"):  # its order would be another one a moment later
            Loader(folder, rank=0, world_size=1)
        with Loader(folder, shuffle="sequential", rank=0, world_size=1) as loader:
            assert len(loader) == 6


# --- the reader ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("access", ["auto", "h5py"])
def test_a_reader_shows_what_is_committed(access, folder):
    with start_store(folder) as writer, open_reader(folder, access=access) as reader:
        assert type(reader.corpus) is LiveCorpus
        named = reader.fingerprint
        assert named == f"live:{writer.index.live_id}:{B}x{S}:uint16"
        for count in (0, 1, 3, 4, 5, 13):
            writer.write(batches(writer.num_batches, count - writer.num_batches))
            assert reader.refresh() == count
            assert not reader.complete
            if count:
                expect_batches(reader, count)
                group = np.empty((count, B, S), np.uint16)
                reader.read_batches_into(0, group)
                np.testing.assert_array_equal(group, batches(0, count))
                rows = np.arange(count * B)[::-1].copy()
                found = reader.read_records_torch(rows, S, np.int64)
                np.testing.assert_array_equal(found, batches(0, count).reshape(-1, S)[::-1])
        copy = pickle.loads(pickle.dumps(reader))
        writer.finish()
        with copy:
            expect_batches(copy, 13)
            assert copy.refresh() == 13
            assert copy.complete
        assert reader.refresh() == 13
        assert (reader.complete, reader.fingerprint, reader.corpus.sha256) == (True, named, writer.index.sha256)
        expect_batches(reader, 13)
    assert expect_store(folder, 13, complete=True) == named


def test_a_closed_reader_follows_nothing(folder):
    with start_store(folder) as writer:
        writer.write(batches(0, 2))
        reader = open_reader(folder)
        expect_batches(reader, 2)
        reader.close()
        writer.write(batches(2, 1))
        before = open_descriptors()
        assert reader.refresh() == 2
        assert open_descriptors() == before


def test_two_readers_of_one_process_or_of_its_fork_read_the_same_growing_shard(tmp_path):
    """HDF5 breaks a dataset with two handles when one is refreshed: each chunk is the first one."""
    folder = kill_store(tmp_path / "store", 6, shard_batches=8)
    with open_reader(folder) as one:
        expect_store(folder, 6, complete=False)
        with forked(lambda: expect_store(folder, 6, complete=False)):
            pass
        assert one.refresh() == 6
        expect_batches(one, 6)


def test_a_forked_child_reads_a_shard_that_was_renamed_since(folder):
    with start_store(folder) as writer, open_reader(folder) as reader:
        writer.write(batches(0, 3))
        reader.refresh()
        expect_batches(reader, 3)
        writer.write(batches(3, 3))
        with forked(lambda: expect_batches(reader, 3) is None):
            pass


def test_a_child_looks_at_a_file_that_a_thread_of_its_parent_looked_at_when_it_was_forked(folder):
    with start_store(folder) as writer:
        writer.write(batches(0, 4))
    ended = threading.Event()
    thread = threading.Thread(target=lambda: [find_column(folder / "shard-00000.h5") for _ in iter(ended.is_set, True)])
    thread.start()
    try:
        found = in_forks(*[lambda: find_column(folder / "shard-00000.h5").complete] * 5, limit_s=20)
        assert found == [True] * 5
    finally:
        ended.set()
        thread.join()


def test_another_store_in_the_same_folder_is_an_error(tmp_path):
    with start_store(tmp_path / "store") as writer, open_reader(tmp_path / "store") as reader:
        writer.write(batches(0, 1))
        os.rename(tmp_path / "store", tmp_path / "old")
        with start_store(tmp_path / "store"), pytest.raises(errors.FormatError, match="was replaced"):
            reader.refresh()
        os.rename(tmp_path / "store", tmp_path / "new")
        os.rename(tmp_path / "old", tmp_path / "store")


# --- what commands say -----------------------------------------------------------------------------------------
def test_info_and_verify_of_a_growing_store(folder):
    with start_store(folder) as writer:
        writer.write(batches(0, 6))
        info = report_of(zb, "info", folder)
        assert info["state"].startswith("growing")
        assert (info["kind"], info["num_batches"], info["sha256"]) == ("store", 6, None)
        assert info["shards"] == {"count": 2, "min_batches": 2, "max_batches": 4}
        whole, growing = verify_store(folder)
        assert whole.problem is None
        assert growing.num_batches == 2
        assert isinstance(growing.problem, errors.IncompleteError)
        assert run_zb("verify", folder).exit_code == 4
        is_refused(errors.UnavailableError, lambda: repair_store(folder))
        assert not ShardIndex.load(folder).complete
    assert report_of(zb, "info", folder)["state"] == "complete"
    succeed(zb, "verify", folder)


@pytest.mark.parametrize("count", [1, 4, 6, 8])
@pytest.mark.thin
def test_repair_makes_a_killed_store_whole(count, tmp_path):
    folder = kill_store(tmp_path / "store", count)
    live_id, named = ShardIndex.load(folder).live_id, expect_store(folder, count, complete=False)
    assert run_zb("verify", folder).exit_code == 4
    succeed(zb, "repair", folder, "--dry-run")
    assert not ShardIndex.load(folder).complete
    succeed(zb, "repair", folder)
    index = ShardIndex.load(folder)
    assert (index.complete, index.live_id, len(index.shards)) == (True, live_id, -(-count // 4))
    succeed(zb, "verify", folder)
    assert expect_store(folder, count, complete=True) == named
    succeed(zb, "repair", folder)


def test_a_last_shard_that_was_renamed_and_not_yet_counted(tmp_path):
    """A kill between the two steps of finishing a shard leaves this."""
    folder = kill_store(tmp_path / "store", 6)
    growing = ShardIndex.load(folder)
    repair_store(folder)
    (folder / "shard-00001.h5.partial").unlink()
    growing.save(folder)
    expect_store(folder, 6, complete=False)
    assert [type(report.problem) for report in verify_store(folder)] == [type(None), errors.IncompleteError]
    assert [report.state for report in repair_store(folder)] == ["whole", "whole"]
    expect_store(folder, 6, complete=True)
    assert not [report.problem for report in verify_store(folder) if report.problem]


def test_repair_that_drops_batches_gives_the_store_another_name(tmp_path):
    folder, copy = kill_store(tmp_path / "store", 6), tmp_path / "copy"
    flip_stored(folder / "shard-00000.h5", batches(1, 1).astype("<u2"))
    shutil.copytree(folder, copy)
    repair_store(copy)
    with open_reader(copy) as reader:
        assert reader.fingerprint.startswith("sha256:")
        np.testing.assert_array_equal(np.stack(list(reader)), batches(0, 6)[[0, 2, 3, 4, 5]])
    with open_reader(folder) as reader:  # the repair in another process, under a reader's eyes
        shutil.copytree(copy, folder, dirs_exist_ok=True)
        is_refused(errors.FormatError, reader.refresh, match="replaced or repaired")


# --- the writer ------------------------------------------------------------------------------------------------
def test_an_exception_loses_nothing_that_was_committed(folder):

    def fail():
        with start_store(folder) as writer:
            writer.write(batches(0, 6))
            raise KeyError(writer)

    with pytest.raises(KeyError) as caught:
        fail()
    (writer,) = caught.value.args
    is_refused(errors.ClosedError, lambda: writer.write(batches(6, 1)))
    expect_store(folder, 6, complete=False)
    repair_store(folder)
    expect_store(folder, 6, complete=True)


def test_a_live_writer_keeps_four_bytes_for_each_batch(folder):
    with start_store(folder, 64) as writer:
        writer.write(batches(0, 256))
        assert memoryview(writer._crc32).nbytes == 4 * 256
        assert len(writer.crc32()) == 256


def test_a_failure_to_publish_loses_nothing_that_was_committed(folder, monkeypatch):
    writer = start_store(folder)
    writer.write(batches(0, 6))
    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "publish", failing(errno.ENOSPC))
        is_refused(OSError, lambda: writer.write(batches(6, 3)), match="No space")
    is_refused(errors.ClosedError, writer.finish, match="repair it")
    writer.abort()
    expect_store(folder, 8, complete=False)
    repair_store(folder)
    expect_store(folder, 8, complete=True)


def test_a_full_disk_loses_nothing_that_was_committed(mount_disk):
    store = mount_disk(8 << 10) / "store"
    writer, committed = start_store(store, 200), []

    def fill():
        while True:
            committed.append(writer.num_batches)
            writer.write(batches(committed[-1], 50))

    is_refused(OSError, fill, match="No space")
    writer.abort()
    with open_reader(store) as reader:
        assert not reader.complete
        assert reader.num_batches >= committed[-1] > 200
        expect_batches(reader, reader.num_batches)


def test_a_live_writer_refuses_bad_arguments_and_batches(tmp_path):
    (tmp_path / "there").mkdir()
    is_refused(errors.ConvertError, lambda: start_store(tmp_path / "there"), match="exists already")
    for options in ({}, {"shard_batches": 0}, {"shard_batches": 4, "backend": "batch"},
                    {"shard_batches": 4, "overwrite": True}):  # fmt: skip
        with pytest.raises(errors.ArgumentError):
            open_writer(tmp_path / "store", **SHAPE, live=True, **options)
    with pytest.raises(errors.ArgumentError, match="is for live=True"):
        open_writer(tmp_path / "x.h5", **SHAPE, shard_batches=4)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with start_store(tmp_path / "store") as writer:
        assert isinstance(writer, LiveStoreWriter)
        for wrong in (batches(0, 1)[:, :2], np.zeros(3), 7):
            is_refused(errors.ArgumentError, lambda wrong=wrong: writer.write(wrong), match="expected batches of shape")
        is_refused(errors.ConvertError, lambda: writer.write(np.full((B, S), -1)))
        writer.write(batches(0, 5))
    expect_store(tmp_path / "store", 5, complete=True)


@pytest.mark.parametrize(("key", "value"), [("live_id", ""), ("live_id", 3), ("complete", "no")])
def test_an_index_that_contradicts_itself_is_refused(key, value, tmp_path):
    with start_store(tmp_path / "store") as writer:
        writer.write(batches(0, 5))
        index = json.loads((tmp_path / "store" / INDEX_NAME).read_text())
        (tmp_path / "store" / INDEX_NAME).write_text(json.dumps({**index, key: value, "check": ""}))
        is_refused(errors.FormatError, lambda: open_reader(tmp_path / "store"), match=key)


def test_a_live_conversion_gives_the_batches_of_any_other(tmp_path):
    np.save(tmp_path / "in.npy", np.arange(480, dtype="<u2").reshape(48, 10))
    shape = ["--batch-size", "4", "--seq-len", "10"]
    for name, how in (("live", ["--live"]), ("plain", [])):
        command = ["npy-to-hdf5", tmp_path / "in.npy", tmp_path / name, *shape, "--shards", "5", *how]
        assert "shuffle  direct: " in succeed(convert, *command).stdout  # they gather the records in their new order
    with open_reader(tmp_path / "live") as live, open_reader(tmp_path / "plain") as plain:
        assert live.complete
        np.testing.assert_array_equal([np.array(b) for b in live], [np.array(b) for b in plain])
    assert [report.problem for report in verify_store(tmp_path / "live")] == [None] * 4
    for option in ("--resume", "--force", "--dry-run", "--workers=2", "--shard-range=0/2", "--executor=mpi"):
        result = run(convert, "npy-to-hdf5", tmp_path / "in.npy", tmp_path / "other", *shape, "--live", option)
        assert (result.exit_code, "--live is written by one process" in result.stderr) == (2, True)
    assert not (tmp_path / "other").exists()
