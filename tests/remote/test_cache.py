"""The cache: whatever happens to its files, each token is the right one, and nothing is fetched twice that was kept."""

import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import report_of, run_zb, succeed
from contents import batches_of, write_batches, write_stream, write_streams
from contract import SAME_EPOCH, check_reader, is_refused, random_tokens, read_records
from damage import flip, flip_stored
from processes import forked, in_forks, killed_when
from torch.utils.data import DataLoader

from zb_hdf5 import ArgumentError, Batches, ChecksumError, DocumentLoader, Loader, MixedLoader, open_reader, open_writer
from zb_hdf5.commands.zb import zb
from zb_hdf5.errors import UnverifiableError
from zb_hdf5.files.tokens import Tokens, Wait
from zb_hdf5.store.cache import Cache, column_of, occupied_bytes

BATCHES = random_tokens(48, 4, 1024)  # 16 KiB each
NARROW = BATCHES >> 1  # ids that int32 holds
ONE_RANK = {"rank": 0, "world_size": 1}


class Counted(Tokens):
    """Tokens that note which batches are read whole, and of which some rows."""

    def __init__(self, tokens, wait_s=0.0):
        self._tokens, self._wait_s = tokens, wait_s
        for name in ("num_tokens", "dtype", "unit", "name", "access", "identity"):
            setattr(self, name, getattr(tokens, name))
        self.wait = Wait.LOCAL
        self.whole = []
        self.rows = []

    def read(self, runs):
        for start, out in runs:
            first = start // self.unit
            stop = -(-(start + len(out)) // self.unit)
            noted = self.whole if len(out) % self.unit == 0 else self.rows
            noted += range(first, stop)
            time.sleep(self._wait_s)
            self._tokens.read([(start, out)])

    def gather(self, starts, out):
        self.rows += (starts // self.unit).tolist()
        self._tokens.gather(starts, out)

    def close(self):
        self._tokens.close()


def counted(path, folder, max_bytes="64MiB", wait_s=0.0, **options):
    """Return a reader with a cache, and the tokens behind it."""
    reader = open_reader(path, **options)
    tokens = reader.corpus.tokens = Counted(reader.tokens, wait_s)
    return Batches(Cache(folder, max_bytes).over(reader), reader.windows), tokens


@pytest.fixture(scope="module")
def origin(tmp_path_factory, write_store):
    return write_store(tmp_path_factory.mktemp("source") / "store", BATCHES, (10, 31))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def fill(store, folder, **options):
    with counted(store, folder, **options)[0] as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), BATCHES)


def files_of(folder):
    (marks,) = folder.glob("zb-cache-*/*.marks")
    return marks.with_suffix("") if marks.with_suffix("").exists() else marks.with_name(marks.name[:-6]), marks


def check_all(reader, times=1):
    """Read all batches and records in every way."""
    rows = BATCHES.reshape(-1, 1024)
    for _ in range(times):
        for index in np.random.default_rng(1).permutation(len(BATCHES)).tolist():
            np.testing.assert_array_equal(reader.read_batch_torch(index).numpy(), BATCHES[index])
        numbers = np.random.default_rng(2).integers(0, len(rows), 40)
        np.testing.assert_array_equal(read_records(reader, numbers), rows[numbers])
        for index in range(0, len(BATCHES), 7):
            np.testing.assert_array_equal(reader.read_batch(index), BATCHES[index])
            np.testing.assert_array_equal(reader.read_batch_int32(index).numpy(), BATCHES[index].view(np.int32))
        whole = np.empty_like(BATCHES)
        reader.read_batches_into(0, whole)
        np.testing.assert_array_equal(whole, BATCHES)


def check_cached(store, folder, times=1):
    """Read all through a cache; return the tokens behind it."""
    reader, source = counted(store, folder)
    with reader:
        check_all(reader, times)
    return source


# --- what is fetched -------------------------------------------------------------------------------------------
def test_each_batch_is_fetched_once_whatever_reads_it(origin, folder):
    source = check_cached(origin, folder, times=2)
    assert (sorted(source.whole), source.rows) == (list(range(len(BATCHES))), [])
    source = check_cached(origin, folder)
    assert (source.whole, source.rows) == ([], [])


@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
def test_records_bring_whole_batches_and_each_of_them_once(origin, folder):
    reader, source = counted(origin, folder)
    with reader, Loader(reader, shuffle="records", prefetch=4, **ONE_RANK) as loader:
        first = [step.numpy() for step in loader]
        assert (sorted(source.whole), source.rows) == (list(range(len(BATCHES))), [])
        again = [step.numpy() for step in loader]
        assert len(source.whole) == len(BATCHES)
    np.testing.assert_array_equal(first, again)
    with Loader(origin, shuffle="records", **ONE_RANK) as plain:
        np.testing.assert_array_equal(first, [step.numpy() for step in plain])


def test_threads_that_miss_a_batch_fetch_it_once(origin, folder):
    reader, source = counted(origin, folder, wait_s=0.02)
    together = threading.Barrier(8)
    out = np.empty((8, *BATCHES.shape[1:]), reader.dtype)

    def read(number):
        together.wait()
        if number % 2:
            reader.read_into(5, out[number])
        else:
            reader.read_records_into(np.arange(20, 24), out[number])

    with reader, ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert source.whole == [5]
    np.testing.assert_array_equal(out, np.stack([BATCHES[5]] * 8))


def test_an_error_of_the_source_is_raised_and_nothing_is_kept(origin, folder):
    reader, source = counted(origin, folder)
    read = source.read
    source.read = lambda runs: (_ for _ in ()).throw(OSError("cut off"))
    with reader:
        for _ in range(2):
            is_refused(OSError, lambda: reader.read_batch_torch(3), match="cut off")
            is_refused(OSError, lambda: reader.read_record(12), match="cut off")
        source.read = read
        np.testing.assert_array_equal(reader.read_batch_torch(3).numpy(), BATCHES[3])


def test_two_processes_share_a_folder(origin, folder):
    def read_share(rank):
        reader, source = counted(origin, folder)
        with reader, Loader(reader, rank=rank, world_size=2) as loader:
            steps = [step.numpy() for step in loader]
            expected = [BATCHES[batch] for batch in loader.plan.requests_of_steps(np.arange(len(loader)))]
            np.testing.assert_array_equal(steps, expected)
        return source.whole

    first, second = in_forks(partial(read_share, 0), partial(read_share, 1))
    assert sorted(first + second) == list(range(len(BATCHES)))
    assert in_forks(partial(read_share, 1), partial(read_share, 0)) == [[], []]


def test_a_batch_that_a_running_process_has_missed_is_found_when_another_one_brings_it(origin, folder):
    reader, source = counted(origin, folder)
    with reader:
        reader.read_batch(0)
        fill(origin, folder)
        check_all(reader)
    assert source.whole == [0]


# --- columns ---------------------------------------------------------------------------------------------------
FIELDS = {"mask": "u1", "weight": np.dtype([("a", "<f4"), ("b", "<i8")])}


def test_fields_are_kept_beside_the_tokens(tmp_path, folder):
    tokens = random_tokens(6, 4, 16)
    values = {}
    for number, (field, dtype) in enumerate(FIELDS.items()):
        noise = np.random.default_rng(number).integers(0, 256, (*tokens.shape, np.dtype(dtype).itemsize), np.uint8)
        values[field] = noise.view(dtype)[..., 0]
        if field == "weight":
            values[field]["a"] = 1.5  # no NaN, which is not equal to itself
    write_batches(tmp_path / "x.h5", tokens, values, fields=FIELDS)
    for _ in range(2):
        with open_reader(tmp_path / "x.h5", cache=folder) as reader:
            check_reader(reader, tokens, values)
    assert len(list(folder.iterdir())) == 1
    assert len(list(folder.glob("*/*.marks"))) == 1 + len(FIELDS)
    with open_reader(tmp_path / "x.h5", cache=folder) as reader:
        for each in (reader, *map(reader.field, FIELDS)):
            assert all(map(column_of(each.corpus).has, range(len(tokens))))


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "stream.h5"
    write_stream(path, random_tokens(1, 1, 5000, "uint16").reshape(-1), [2000, 3000], dtype="uint16", chunk_tokens=512)
    return path


def test_windows_are_kept_and_the_same(stream, folder):
    options = {"batch_size": 4, "seq_len": 64, "targets": True, "shuffle": "records", **ONE_RANK}
    with Loader(stream, **options) as plain:
        expected = [x.numpy() for x, _ in plain]
        state = plain.state_dict()
    for _ in range(2):
        with Loader(stream, cache=folder, **options) as loader:
            np.testing.assert_array_equal([x.numpy() for x, _ in loader], expected)
    with Loader(stream, cache=folder, **{**options, "batch_size": 8}) as other:
        other.load_state_dict(state)  # of batches of another size, which have the same column
        assert column_of(other.batches.corpus).has(0)
    assert len(list(folder.glob("*/*.marks"))) == 1


def test_a_mixture_keeps_all_its_sources(origin, stream, tmp_path, folder, write_file):
    other = write_file(tmp_path / "other.h5", random_tokens(9, 4, 1024)).path
    sources = {"a": origin, "b": other}
    weights = {"a": 0.7, "b": 0.3}
    mixed = MixedLoader(sources, weights, cache=folder, **ONE_RANK)
    plain = MixedLoader(sources, weights, **ONE_RANK)
    with mixed, plain:
        for _ in range(40):
            np.testing.assert_array_equal(next(mixed).numpy(), next(plain).numpy())
    assert len(list(folder.iterdir())) == 2


def test_files_that_only_a_sample_identifies_are_told_apart(tmp_path, folder, write_file):
    """The fingerprint of a lone `.batch` covers 16 batches: these two differ in another one."""
    tokens = random_tokens(64, 2, 8)
    other = tokens.copy()
    other[1] += 1
    for name, expected in (("a.batch", tokens), ("b.batch", other), ("a.batch", tokens)):
        if not (tmp_path / name).exists():
            write_file(tmp_path / name, expected)
        np.testing.assert_array_equal(batches_of(tmp_path / name, cache=folder), expected)
    write_file(tmp_path / "a.batch", other, overwrite=True)
    np.testing.assert_array_equal(batches_of(tmp_path / "a.batch", cache=folder), other)


# --- what was compared -----------------------------------------------------------------------------------------
def flip_tokens(path, stored):
    """Flip a bit of a token that is stored as these bytes; return a function that restores the file."""
    data = path.read_bytes()
    flip_stored(path, stored)
    return lambda: path.write_bytes(data)


def test_batches_that_a_job_without_checks_read_are_not_kept(tmp_path, write_file, folder):
    path = write_file(tmp_path / "x.h5", BATCHES).path
    restore = flip_tokens(path, BATCHES[7])
    with pytest.warns(UserWarning, match="verify='none' adds nothing to the cache"):
        reader = open_reader(path, cache=folder, verify="none")
    with reader:
        assert not np.array_equal(reader[7], BATCHES[7])
    assert not list(folder.iterdir())
    restore()
    np.testing.assert_array_equal(batches_of(path, cache=folder, verify="batch"), BATCHES)


def test_a_job_without_checks_reads_what_is_there(origin, folder):
    fill(origin, folder)
    with pytest.warns(UserWarning, match="adds nothing"):
        reader, source = counted(origin, folder, verify="none")
    with reader:
        check_all(reader)
    assert (source.whole, source.rows) == ([], [])


@pytest.mark.parametrize("kind", ["lone", "store"])
def test_windows_are_kept_in_whole_chunks_that_were_compared(kind, tmp_path, folder):
    tokens = random_tokens(1, 1, 5000).reshape(-1)
    path = tmp_path / "streams"
    write_streams(path, np.split(tokens, [1700] if kind == "store" else []), dtype="uint32", chunk_tokens=512)
    file = path / "shard-00000.h5"
    path = path if kind == "store" else file
    restore = flip_tokens(file, tokens[1000:1100])
    windows = {"batch_size": 4, "seq_len": 64, "cache": folder}
    for verify in ("auto", "batch"):
        with open_reader(path, verify=verify, **windows) as reader, pytest.raises(ChecksumError, match="chunk 1"):
            list(reader)
    restore()
    expected = tokens[: 19 * 256].reshape(-1, 4, 64)
    for verify in ("auto", "batch"):
        np.testing.assert_array_equal(batches_of(path, verify=verify, **windows), expected)
    shutil.rmtree(path) if kind == "store" else path.write_bytes(b"")


def test_data_without_crc32_are_another_column(tmp_path, folder):
    tokens = np.arange(5000, dtype=np.uint32)
    np.save(tmp_path / "x.npy", tokens)
    options = {"batch_size": 4, "seq_len": 64, "cache": folder}
    with open_reader(tmp_path / "x.npy", **options) as reader:
        np.testing.assert_array_equal(reader.read_batch(0), tokens[:256].reshape(4, 64))
        assert column_of(reader.corpus).has(0)
    tokens[7] = 99
    np.save(tmp_path / "x.npy", tokens)
    os.utime(tmp_path / "x.npy", (1, 1))
    with open_reader(tmp_path / "x.npy", **options) as reader:
        assert not column_of(reader.corpus).has(0)
        np.testing.assert_array_equal(reader.read_batch(0), tokens[:256].reshape(4, 64))
    is_refused(UnverifiableError, lambda: open_reader(tmp_path / "x.npy", verify="batch", **options))


# --- objects ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["store", "lone.h5", "lone.batch"])
def test_objects_are_asked_for_once(name, web, tokens, write_store, write_file, folder):
    if name == "store":
        write_store(web.folder / name, tokens, (2, 5), ("hdf5", "batch"))
    else:
        write_file(web.folder / name, tokens)
    with open_reader(f"{web.url}/{name}", cache=folder) as reader:
        check_reader(reader, tokens)
    web.reset()
    with open_reader(f"{web.url}/{name}", cache=folder) as reader:
        reader.fingerprint  # noqa: B018  (a sample of a lone .batch)
        asked = len(web.requests)
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)
        assert len(web.requests) == asked


def test_an_object_that_is_replaced_is_another_column(web, write_file, folder):
    first = random_tokens(64, 2, 8)
    second = first.copy()
    second[1] += 1  # not in the sample that is the fingerprint of a lone .batch
    for time_s, expected in enumerate((first, second)):
        write_file(web.folder / "x.batch", expected, overwrite=True)
        os.utime(web.folder / "x.batch", (time_s, time_s))  # an ETag of nginx is the size and the whole second
        np.testing.assert_array_equal(batches_of(f"{web.url}/x.batch", cache=folder), expected)


@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
def test_a_loader_reads_what_is_in_the_cache_without_threads(served, write_store, tokens, folder, monkeypatch):
    write_store(served.folder / "store", tokens)
    with Loader(f"{served.url}/store", cache=folder, **ONE_RANK) as loader:
        first = [step.numpy() for step in loader]
        monkeypatch.setattr("zb_hdf5.loaders.far_batches.read_ahead", None)
        monkeypatch.setattr("zb_hdf5.loaders.ahead.read_ahead", None)
        np.testing.assert_array_equal(first, [step.numpy() for step in loader])


def test_a_store_behind_a_url_is_staged_and_diagnosed(served, write_store, tokens, folder):
    write_store(served.folder / "store", tokens, (2,))
    assert report_of(zb, "stage", f"{served.url}/store", folder, "--quiet")["copied"] == len(tokens)
    (served.folder / "store" / "shard-00000.h5").unlink()
    with open_reader(f"{served.url}/store", cache=folder) as reader:
        np.testing.assert_array_equal(np.stack([reader.read_batch_torch(k).numpy() for k in range(2)]), tokens[:2])
    done = run_zb("doctor", f"{served.url}/store")
    assert (done.exit_code, "no such object" in done.output) == (1, True)
    write_store(served.folder / "other", tokens, (2,))
    found = {finding["name"]: finding for finding in report_of(zb, "doctor", f"{served.url}/other")["findings"]}
    assert {finding["state"] for finding in found.values()} <= {"ok", "note"}
    assert report_of(zb, "bench", f"{served.url}/other", "--seconds", 1)["steps"] == len(tokens)


# --- processes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_share_it(method, origin, folder):
    with Loader(origin, cache=folder, shuffle="records", **ONE_RANK) as loader:
        steps = DataLoader(loader.dataset(), batch_size=None, num_workers=2, multiprocessing_context=method)
        found = [step.numpy() for step in steps]
        column = column_of(loader.batches.corpus)
        assert all(map(column.has, range(len(BATCHES))))
        np.testing.assert_array_equal(found, [step.numpy() for step in loader])


def test_a_fork_while_a_thread_fetches_does_not_wait_for_it(origin, folder):
    reader, source = counted(origin, folder, wait_s=0.3)
    with reader, ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(reader.read_batch_torch, 7)
        while not source.whole:
            time.sleep(0.001)
        with forked(lambda: signal.alarm(20) == 0 and np.array_equal(reader.read_batch_torch(7).numpy(), BATCHES[7])):
            pass
        np.testing.assert_array_equal(fetching.result().numpy(), BATCHES[7])


def test_a_kill_at_any_moment_costs_no_more_than_what_was_under_way(origin, folder, tmp_path):
    said = tmp_path / "said"
    seen = set()

    def read_some(order):
        reader, _ = counted(origin, folder, wait_s=0.001)
        with open(said, "wb", buffering=0) as file:
            for index in order:
                reader.read_batch_torch(index)
                file.write(bytes([index]))

    for attempt in range(6):
        order = np.random.default_rng(attempt).permutation(len(BATCHES)).tolist()
        said.write_bytes(b"")
        killed_when(lambda most=3 * attempt: said.stat().st_size > most, partial(read_some, order))
        seen.update(said.read_bytes())
    assert seen
    assert not seen & set(check_cached(origin, folder).whole)


# --- damage ----------------------------------------------------------------------------------------------------
DAMAGE = {
    "a bit of the data": lambda data, marks: flip(data, 5 * BATCHES[0].nbytes + 777),
    "a bit of a crc32": lambda data, marks: flip(marks, 5 * 8 + 2),
    "a bit of a mark": lambda data, marks: flip(marks, 5 * 8 + 6),
    "data cut short": lambda data, marks: os.truncate(data, 20 * BATCHES[0].nbytes + 100),
    "no data": lambda data, marks: os.truncate(data, 0),
    "marks cut short": lambda data, marks: os.truncate(marks, 100),
    "no marks": lambda data, marks: os.truncate(marks, 0),
    "noise for marks": lambda data, marks: marks.write_bytes(random.Random(3).randbytes(8 * len(BATCHES))),
    "marks without data": lambda data, marks: (os.truncate(data, 0), os.truncate(data, BATCHES.nbytes)),
    "another column's marks": lambda data, marks: marks.write_bytes(marks.read_bytes()[8:]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=[name.replace(" ", "-") for name in DAMAGE])
@pytest.mark.parametrize("moment", ["before", "while it is open", "after a first look"])
@pytest.mark.thin
def test_damage_costs_reads_and_never_a_token(damage, moment, origin, folder):
    fill(origin, folder)
    files = files_of(folder)
    if moment == "before":
        damage(*files)
    with open_reader(origin, cache=folder) as reader:
        if moment == "after a first look":
            check_all(reader)
        if moment != "before":
            damage(*files)
        if moment == "after a first look" and files[0].stat().st_size == BATCHES.nbytes:
            for index, batch in enumerate(BATCHES):  # what was compared once is mapped: the rest of the contract holds
                np.testing.assert_array_equal(reader.read_batch_torch(index).numpy(), batch)
        else:
            check_all(reader)
    check_cached(origin, folder)
    assert check_cached(origin, folder).whole == []  # what was damaged was fetched again, once


def test_a_folder_that_is_removed_under_a_reader_does_not_disturb_it(origin, folder):
    with counted(origin, folder)[0] as reader:
        reader.read_batch_torch(0)
        data = pickle.dumps(reader)
        shutil.rmtree(folder)
        check_all(reader)
        with pytest.warns(UserWarning, match=f"{folder}: the cache cannot be used .No such file") as warned:
            copy = pickle.loads(data)
        assert len(warned) == 1
        with copy:
            check_all(copy)


# --- disks -----------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*the cache is full")
def test_a_full_disk_ends_the_filling_and_nothing_else(origin, mount_disk):
    disk = mount_disk(400)
    for _ in range(2):
        reader, source = counted(origin, disk / "cache")
        with reader:
            check_all(reader, times=2)
            column = column_of(reader.corpus)
            kept = [index for index in range(len(BATCHES)) if column.has(index)]
            assert column.full
            assert 10 < len(kept) < 25
    assert not set(kept) & set(source.whole)


def test_a_folder_that_cannot_be_written_is_one_error_at_the_beginning(origin, mount_disk):
    disk = mount_disk(4096)
    with counted(origin, disk / "cache")[0] as reader:
        data = pickle.dumps(reader)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(ArgumentError, match=rf"{disk}/cache: expected a cache folder that can be written: .*ead-only"):
        open_reader(origin, cache=disk / "cache")
    with pytest.raises(ArgumentError, match="expected a cache folder that can be written"):
        Loader(origin, cache=disk / "other", **ONE_RANK)
    with pytest.warns(UserWarning, match="cannot be used .Read-only file system"):
        copy = pickle.loads(data)  # of a worker: later than at the beginning it is not an error
    with copy:
        check_all(copy)
        assert column_of(copy.corpus).full


#: The ways to read that take whole batches, records, or some values of them from a cache.
WAYS = {
    "whole batches": {},
    "in threads": {"prefetch": 3},
    "int32": {"dtype": torch.int32},
    "records": {"shuffle": "records"},
    "pread": {"access": "pread"},
    "every read": {"shuffle": "records", "verify": "batch"},
}


def steps_of(path, **how):
    """Return the steps of an epoch as one array."""
    with Loader(path, **how, **ONE_RANK) as loader:
        return np.stack([step.numpy() for step in loader])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, write_store):
    """A store whose every batch takes whole pages of a RAM disk, of 768 KiB, with ids that int32 holds."""
    return write_store(tmp_path_factory.mktemp("whole") / "store", NARROW, (10, 31))


@pytest.mark.filterwarnings("ignore:.*the cache is full")
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.thin
def test_a_ram_disk_smaller_than_the_store_ends_the_filling_and_nothing_else(how, whole, mount_disk):
    disk = mount_disk(700)
    expected = steps_of(whole, **how)

    def read():
        return all(np.array_equal(steps_of(whole, cache=disk / "cache", **how), expected) for _ in range(2))

    assert in_forks(read) == [True]
    assert occupied_bytes(disk / "cache") > 500 << 10


@pytest.mark.filterwarnings("ignore:.*the cache is full")
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_the_size_of_a_cache_holds_on_a_ram_disk(how, whole, mount_disk):
    disk = mount_disk(4096)
    limit = 44 * BATCHES[0].nbytes
    for _ in range(2):
        np.testing.assert_array_equal(
            steps_of(whole, cache=Cache(disk / "cache", limit), **how), steps_of(whole, **how)
        )
    assert limit / 2 < occupied_bytes(disk / "cache") <= limit


@pytest.mark.filterwarnings("ignore:.*its files are being cut short")
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.thin
def test_a_cache_file_that_is_cut_all_the_time_is_no_bus_error(how, whole, folder):
    expected = steps_of(whole, **how)
    steps_of(whole, cache=folder, **how)
    data, _ = files_of(folder)

    def read():
        return [np.array_equal(steps_of(whole, cache=folder, **how), expected) for _ in range(10)]

    def cut():
        for number in range(2000):
            os.truncate(data, number % 7 * BATCHES[0].nbytes)
            time.sleep(0.0001)
        return True

    found, _ = in_forks(read, cut)
    assert len(found) == 10
    if how != {"shuffle": "records"}:  # "auto" compares the batch of a record once
        assert all(found)


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_what_was_cut_off_a_cache_comes_from_the_store_again(how, whole, folder):
    expected = steps_of(whole, **how)
    steps_of(whole, cache=folder, **how)
    with Loader(whole, cache=folder, **how, **ONE_RANK) as loader:
        steps = iter(loader)
        found = [next(steps).numpy() for _ in range(3)]  # which have seen some batches, and not all
        os.truncate(files_of(folder)[0], BATCHES[0].nbytes * 5)
        np.testing.assert_array_equal([*found, *(step.numpy() for step in steps)], expected)
    np.testing.assert_array_equal(steps_of(whole, cache=folder, **how), expected)


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_no_file_of_a_cache_is_mapped(how, whole, folder):
    for _ in range(2):
        with Loader(whole, cache=folder, **how, **ONE_RANK) as loader:
            for _ in loader:
                assert str(folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
@pytest.mark.parametrize("kind", ["records", "windows", "documents"])
def test_what_changes_in_a_cache_after_a_first_look_is_not_given_where_each_read_is_compared(kind, tmp_path, folder):
    if kind == "records":
        path = write_batches(tmp_path / "x.h5", BATCHES).path
        make = partial(Loader, path, shuffle="records")
    else:
        path = tmp_path / "stream.h5"
        write_stream(path, random_tokens(1, 1, 10_000, "uint16").reshape(-1), [2000, 3000, 5000], chunk_tokens=512)
        windows = partial(Loader, path, batch_size=4, seq_len=64, shuffle="records")
        make = windows if kind == "windows" else partial(DocumentLoader, path, batch_size=1, collate="pad")

    def read(loader):
        return [(step["tokens"] if isinstance(step, dict) else step).numpy().tolist() for step in loader]

    with make(**ONE_RANK) as loader:
        expected = read(loader)
    with make(cache=folder, verify="batch", **ONE_RANK) as loader:
        assert read(loader) == expected
        data, _ = files_of(folder)
        for at in range(0, data.stat().st_size, 512):
            flip(data, at)
        assert read(loader) == expected


@pytest.mark.filterwarnings("error")
def test_a_folder_that_is_removed_while_it_is_filled_is_one_warning(whole, folder):
    with Loader(whole, cache=Cache(folder, "700KiB"), shuffle="sequential", **ONE_RANK) as loader:
        steps = iter(loader)
        found = [next(steps).numpy()]
        shutil.rmtree(folder)
        with pytest.warns(UserWarning, match="the cache cannot be used") as warned:
            found += [step.numpy() for step in steps]
    np.testing.assert_array_equal(found, NARROW)
    assert [str(each.message) for each in warned] == [
        f"{folder}: the cache cannot be used (No such file or directory): the store is read in its place"
    ]


@pytest.mark.parametrize("shuffle", ["sequential", "records"])
def test_a_copy_whose_cache_cannot_be_opened_reads_the_store(whole, folder, shuffle):
    with open_reader(whole, cache=folder) as reader:
        pickled = pickle.dumps(reader)
    shutil.rmtree(folder)
    folder.write_bytes(b"")  # and is a file now
    with pytest.warns(UserWarning, match="the cache cannot be used"):
        copy = pickle.loads(pickled)
    with copy:
        copy.will_need(0)
        assert copy.is_ready(0)
        found = steps_of(copy, shuffle=shuffle, seed=3)
    np.testing.assert_array_equal(found, steps_of(whole, shuffle=shuffle, seed=3))


def test_a_copy_without_its_cache_asks_no_server_whether_a_batch_is_ready(web, tokens, write_store, folder):
    write_store(web.folder / "store", tokens, (2, 5), ("hdf5", "batch"))
    with open_reader(f"{web.url}/store", cache=folder) as reader:
        pickled = pickle.dumps(reader)
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    with pytest.warns(UserWarning, match="the cache cannot be used"):
        copy = pickle.loads(pickled)
    with copy:
        web.reset()
        assert not copy.is_ready(0)
        assert not web.requests
        np.testing.assert_array_equal(np.stack(list(copy)), tokens)


def test_a_disk_that_is_full_from_the_beginning_is_one_warning(whole, mount_disk):
    disk = mount_disk(64)
    (disk / "cache").mkdir()
    with suppress(OSError), open(disk / "rest", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.warns(UserWarning, match="its disk is full: the store is read without a cache") as warned:
        np.testing.assert_array_equal(steps_of(whole, cache=disk / "cache", shuffle="sequential"), NARROW)
    assert len(warned) == 1


# --- room ------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*the cache is full")
def test_it_fills_up_to_its_size_and_then_stops(origin, folder):
    limit = 20 * BATCHES[0].nbytes
    for _ in range(2):
        reader, source = counted(origin, folder, limit)
        with reader:
            check_all(reader, times=2)
            column = column_of(reader.corpus)
            assert 15 <= sum(map(column.has, range(len(BATCHES)))) <= 20
            assert occupied_bytes(folder) <= limit
            assert column.full
    assert source.rows  # of what is not kept, no more is read than asked for


@pytest.mark.filterwarnings("ignore:.*the cache is full")
def test_processes_that_fill_one_folder_keep_its_size(origin, folder):
    limit = 30 * BATCHES[0].nbytes

    def read_all(number):
        with open_reader(origin, cache=Cache(folder, limit)) as reader:
            order = np.random.default_rng(number).permutation(len(BATCHES)).tolist()
            return all(np.array_equal(reader.read_batch_torch(index), BATCHES[index]) for index in order)

    assert in_forks(*(partial(read_all, number) for number in range(4))) == [True] * 4
    assert occupied_bytes(folder) <= limit + 4 * BATCHES[0].nbytes


def test_a_full_cache_names_what_fills_it_once_and_is_freed_by_a_command(origin, tmp_path, write_file, folder):
    other = write_file(tmp_path / "other.h5", random_tokens(9, 4, 1024)).path
    limit = 20 * BATCHES[0].nbytes
    with open_reader(other, cache=folder) as reader:
        list(reader)
    with (
        open_reader(origin, cache=Cache(folder, limit)) as reader,
        pytest.warns(UserWarning, match="full") as found,
    ):
        check_all(reader, times=2)
    (message,) = [str(each.message) for each in found]
    assert re.search(rf"cache is full.*KiB of {other}", message)
    (folder / "mine").write_text("keep")
    (folder / "zb-cache-notes").mkdir()
    listed = report_of(zb, "cache", "ls", folder)
    assert {each["store"] for each in listed["stores"]} == {str(origin), str(other)}
    succeed(zb, "cache", "rm", folder, "--store", other)
    assert len(list(folder.iterdir())) == 3
    with open_reader(origin, cache=folder) as reader:
        assert run_zb("cache", "rm", folder).stdout.startswith("removed  1 store, ")
        check_all(reader)
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "zb-cache-notes"]


# --- arguments -------------------------------------------------------------------------------------------------
def test_sizes_are_numbers_or_texts(origin, tmp_path):
    folder = tmp_path / "cache"
    assert Cache(folder, "2GiB").max_bytes == 2**31
    assert Cache(str(folder), 12345) == Cache(folder, 12345) == pickle.loads(pickle.dumps(Cache(folder, 12345)))
    for bad in (0, -1, "much", "0 GiB", 1.5):
        is_refused(ArgumentError, lambda bad=bad: Cache(folder, bad))
    assert not folder.exists()  # a value makes nothing
    assert 0 < Cache(folder).budget() <= shutil.disk_usage(folder).total
    is_refused(ArgumentError, lambda: open_reader(origin, cache="s3://bucket/cache"), match="is a URL")
    (tmp_path / "file").touch()
    is_refused(ArgumentError, lambda: open_reader(origin, cache=tmp_path / "file"), match="expected a cache folder")
    with open_reader(origin) as reader:
        is_refused(ArgumentError, lambda: column_of(reader.corpus), match="expected a corpus with a cache")


def test_a_store_that_grows_is_refused(tmp_path, folder):
    with open_writer(tmp_path / "live", batch_size=4, seq_len=16, live=True, shard_batches=2) as writer:
        writer.write(random_tokens(3, 4, 16))
        is_refused(ArgumentError, lambda: open_reader(tmp_path / "live", cache=folder), match="still grows")
    with open_reader(tmp_path / "live", cache=folder) as reader:
        check_reader(reader, random_tokens(3, 4, 16))
