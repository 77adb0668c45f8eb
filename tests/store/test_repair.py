"""Killed writers, flipped bits, lost indices: repair keeps what holds, says what it drops, and touches nothing else."""

import errno
import json
import os
import random
import re
import shutil
import time
from dataclasses import replace

import h5py
import numpy as np
import pytest
from commandline import run_zb
from contents import batches_of, files_in, names, require_good, with_sidecar, write_batches
from contract import is_refused, random_tokens
from damage import flip, flip_stored, flip_token
from interpreter import start_program
from killed_writer import WRITER, batches
from processes import killed_after, running

import zb_hdf5
from zb_hdf5 import console
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.rebuild import rebuild_index
from zb_hdf5.store.repair import repair_file, repair_store

SHAPE = (4, 1024)


@pytest.fixture
def data():
    return random_tokens(9, *SHAPE).astype("<u2")


@pytest.mark.parametrize("delay_s", [0.03, 0.08, 0.15])
@pytest.mark.thin
def test_a_killed_writers_batches_are_published(delay_s, tmp_path):
    path, partial = tmp_path / "x.h5", tmp_path / "x.h5.partial"
    with running(start_program(WRITER, path)) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdout.readline()
        time.sleep(delay_s)
        is_refused(zb_hdf5.UnavailableError, lambda: repair_file(partial), match="another process is writing it")
        assert names(tmp_path) == [partial.name]
        process.kill()
        lines = process.stdout.read().split("\n")[:-1]
    before = partial.read_bytes()
    report = repair_file(partial)
    assert (report.state, report.dropped, report.output) == ("repaired", [], str(path))
    assert report.kept >= int(lines[-1] if lines else 1)
    require_good(path)
    np.testing.assert_array_equal(batches_of(path), batches(0, report.kept))
    assert partial.read_bytes() == before
    whole = files_in(tmp_path)
    repair_file(partial)
    assert files_in(tmp_path) == whole
    assert names(tmp_path) == [path.name, partial.name]


def leave_partial(path, data):
    """Leave what a killed writer leaves."""

    def write():
        writer = zb_hdf5.open_writer(path, batch_size=data.shape[1], seq_len=data.shape[2], dtype="uint16")
        writer.write(data)
        return writer

    killed_after(write)
    return path.with_name(path.name + ".partial")


def test_a_killed_copy_is_kept_up_to_its_last_commit(data, tmp_path):
    """Its dataset has room for batches that never came."""

    def write():
        shape = {"batch_size": 4, "seq_len": 1024, "dtype": "uint16"}
        writer = zb_hdf5.open_writer(tmp_path / "x.h5", **shape, expected_batches=9)
        writer.write(data[:6])
        writer._allocate_up_to(9)  # the first thing that the next call would do
        return writer

    killed_after(write)
    with h5py.File(tmp_path / "x.h5.partial", swmr=True) as h5:
        assert len(h5["batches"]) == 9
    report = repair_file(tmp_path / "x.h5.partial")
    assert (report.state, report.kept, report.dropped) == ("repaired", 6, [])
    np.testing.assert_array_equal(batches_of(tmp_path / "x.h5"), data[:6])
    require_good(tmp_path / "x.h5")


def test_an_unfinished_file_is_kept_up_to_the_first_bad_batch(data, tmp_path):
    partial = leave_partial(tmp_path / "x.h5", data)
    flip_stored(partial, data[5], 7)
    report = repair_file(partial)
    assert (report.kept, report.dropped) == (5, [5, 6, 7, 8])
    assert "batch 5 is bad" in report.reason
    np.testing.assert_array_equal(batches_of(tmp_path / "x.h5"), data[:5])


@pytest.mark.parametrize("suffix", [".h5", ".batch"])
def test_a_file_of_the_final_name_is_replaced_only_with_force(suffix, data, tmp_path, write_file):
    """The sidecar of a whole file does not hold the crc32 of its unfinished successor."""
    partial = leave_partial(tmp_path / f"x{suffix}", data)
    write_file(tmp_path / f"y{suffix}", data[:4] + 1)
    for path in tmp_path.glob("y.*"):
        path.rename(path.with_name(path.name.replace("y", "x")))
    before = files_in(tmp_path)
    is_refused(zb_hdf5.ConvertError, lambda: repair_file(partial), match="exists already; remove it")
    assert files_in(tmp_path) == before
    assert repair_file(partial, overwrite=True).kept == 9
    np.testing.assert_array_equal(batches_of(tmp_path / f"x{suffix}"), data)
    assert names(tmp_path) == [*with_sidecar(f"x{suffix}"), partial.name]


def test_the_batches_of_a_killed_batch_writer_are_kept(data, tmp_path):
    partial = leave_partial(tmp_path / "x.batch", data)
    is_refused(zb_hdf5.IncompleteError, lambda: zb_hdf5.open_reader(partial), match="its writer has not finished")
    os.truncate(partial, partial.stat().st_size - 100)
    result = run_zb("repair", partial, "--json")
    assert result.exit_code == 0, result.stderr
    assert "could not be checked" in json.loads(result.stdout)["files"][0]["reason"]
    np.testing.assert_array_equal(batches_of(tmp_path / "x.batch"), data[:8])


def test_a_truncated_batch_file_with_crc32_is_checked(data, tmp_path, write_file):
    info = write_file(tmp_path / "x.batch", data)
    flip(tmp_path / "x.batch", 4096 + 3 * data[0].nbytes)
    os.truncate(tmp_path / "x.batch", info.path.stat().st_size - 1)
    report = repair_file(tmp_path / "x.batch")
    assert (report.kept, report.dropped) == (7, [3])
    np.testing.assert_array_equal(batches_of(report.output), np.delete(data[:8], 3, axis=0))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.thin
def test_flipped_tokens_are_found_by_verify_and_dropped_by_repair(seed, data, tmp_path, write_file):
    path = write_file(tmp_path / "x.h5", data).path
    chance = random.Random(seed)
    bad = sorted(chance.sample(range(len(data)), chance.randint(1, 4)))
    for number in bad:
        flip_token(path, number, chance.randrange(data[0].nbytes))
    before = path.read_bytes()
    assert zb_hdf5.verify_store(path)[0].problem is not None
    dry = repair_file(path, dry_run=True)
    assert names(tmp_path) == ["x.h5"]
    report = repair_file(path)
    assert dry.dropped == report.dropped == bad
    assert path.read_bytes() == before
    np.testing.assert_array_equal(batches_of(report.output), np.delete(data, bad, axis=0))
    require_good(tmp_path / "x.repaired.h5")
    whole = files_in(tmp_path)
    assert repair_file(path).dropped == bad
    assert files_in(tmp_path) == whole


@pytest.mark.parametrize("suffix", [".h5", ".batch"])
def test_a_sector_that_cannot_be_read_costs_its_batch_only(suffix, data, tmp_path, write_file, monkeypatch):
    path, preadv = write_file(tmp_path / f"x{suffix}", data).path, os.preadv
    with zb_hdf5.open_reader(path) as reader:
        bad = reader.corpus.extents.offset(3) + 512

    def fail(fd, buffers, offset, *flags):
        if os.readlink(f"/proc/self/fd/{fd}") == str(path) and offset <= bad < offset + memoryview(buffers[0]).nbytes:
            raise OSError(number, os.strerror(number))
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", fail)
    number = errno.ESTALE  # nothing of the file can be read any more
    is_refused(OSError, lambda: repair_file(path), match="Stale")
    number = errno.EIO
    report = repair_file(path)
    assert (report.kept, report.dropped) == (8, [3])
    np.testing.assert_array_equal(batches_of(report.output), np.delete(data, 3, axis=0))


@pytest.mark.parametrize("kind", ["whole", "damaged", "unfinished", "store"])
def test_the_progress_of_a_repair_ends_at_all_of_it(kind, tmp_path, write_store, data):
    path = tmp_path / "x.h5"
    if kind == "store":
        path = write_store(tmp_path / "s", data, (3, 6))
        flip_token(path / "shard-00000.h5", 1)
    elif kind == "unfinished":
        path = leave_partial(path, data)
        flip_stored(path, data[5], 7)
    else:
        mask = (data % 2).astype("u1")
        write_batches(path, data, {"mask": mask}, fields={"mask": "u1"})
        if kind == "damaged":
            flip_token(path, 5)
    read, expected = [], []
    zb_hdf5.repair(path, progress=read.append, announce=expected.append)
    read_once = data.nbytes * 3 // 2 if kind in ("whole", "damaged") else data.nbytes
    assert expected[0] == read_once
    assert expected[-1] == sum(read)
    assert (sum(read) > read_once) == (kind != "whole"), "what is kept is read once more"


def test_repairs_and_indexes_made_anew_show_their_progress(data, tmp_path, write_store, monkeypatch):
    monkeypatch.setattr(console, "LOG_INTERVAL_S", 0)
    store = write_store(tmp_path / "s", data, (3, 6))
    shown = run_zb("repair", store).stderr.splitlines()
    assert shown[-1].startswith("repair: 100%")
    assert "B/s" in shown[0]
    (store / INDEX_NAME).unlink()
    shown = run_zb("index", "rebuild", store).stderr.splitlines()
    assert len(shown) == len(list(store.glob("*.h5")))
    assert shown[-1].startswith("rebuild: 100%")
    assert run_zb("index", "rebuild", store, "--force", "--quiet").stderr == ""


def test_a_whole_file_is_left_alone(data, tmp_path, write_file):
    path = write_file(tmp_path / "x.h5", data).path
    before = files_in(tmp_path)
    result = run_zb("repair", path)
    assert result.exit_code == 0
    assert "whole: 9 batches, none bad; nothing to do" in result.stdout
    assert files_in(tmp_path) == before


def test_a_full_disk_leaves_nothing(mount_disk, tmp_path):
    small_disk = mount_disk(8 << 10)
    write_batches(tmp_path / "x.h5", batches(0, 1100), dtype="uint16")  # of 4 KiB each: a copy does not fit
    shutil.copyfile(tmp_path / "x.h5", small_disk / "x.h5")
    flip_token(small_disk / "x.h5", 3)
    is_refused(OSError, lambda: repair_file(small_disk / "x.h5"), match=os.strerror(errno.ENOSPC))
    assert names(small_disk) == ["x.h5"]


def test_a_store_is_repaired(data, tmp_path, write_store):
    store = write_store(tmp_path / "s", data, (3, 6), ("hdf5", "batch"))
    assert {report.state for report in repair_store(store)} == {"whole"}
    flip_token(store / "shard-00000.h5", 1)
    flip_token(store / "shard-00001.batch", 2)
    before = files_in(store)
    reports = repair_store(store, dry_run=True)
    assert files_in(store) == before
    reports = repair_store(store)
    assert [report.dropped for report in reports] == [[1], [2], []]
    require_good(store)
    np.testing.assert_array_equal(batches_of(store), np.delete(data, [1, 5], axis=0))
    after = files_in(store)
    assert {report.state for report in repair_store(store)} == {"whole"}
    assert files_in(store) == after
    assert {**before, INDEX_NAME: after[INDEX_NAME]}.items() <= after.items()


@pytest.mark.parametrize("damage", ["lost", "garbled"])
def test_an_index_is_made_anew(damage, data, tmp_path, write_store):
    store = write_store(tmp_path / "s", data, (3, 6), ("hdf5", "batch"))
    (store / "shard-00001.batch.crc32").unlink()
    text = json.loads((store / INDEX_NAME).read_text())
    if damage == "lost":
        (store / INDEX_NAME).unlink()
    else:
        (store / INDEX_NAME).write_bytes(b"\xff{")
    assert run_zb("index", "rebuild", store).exit_code == 0
    assert json.loads((store / INDEX_NAME).read_text())["shards"] == text["shards"]
    require_good(store)
    np.testing.assert_array_equal(batches_of(store), data)
    is_refused(zb_hdf5.ConvertError, lambda: rebuild_index(store), match="exists already, and is valid")


def test_an_index_made_anew_keeps_what_only_the_old_one_knew(data, tmp_path, write_store):
    store = write_store(tmp_path / "s", data, (3,), ("batch",))
    old = zb_hdf5.ShardIndex.load(store)
    known = replace(old.meta, vocab_size=65536, tokenizer='{"name": "byte"}')
    replace(old, meta=known, live_id="a1b2").save(store)
    made = rebuild_index(store, force=True)
    assert (made.meta.vocab_size, made.meta.tokenizer, made.live_id) == (65536, known.tokenizer, "a1b2")
    assert made == zb_hdf5.ShardIndex.load(store)
    (store / made.shards[1].path).unlink()
    assert rebuild_index(store, force=True).live_id == ""  # other tokens: a state taken live names other records
    (store / INDEX_NAME).unlink()
    report = json.loads(run_zb("index", "rebuild", store, "--json").stdout)
    assert report["not_recovered"] == ["shuffle", "source", "splits", "vocab_size", "tokenizer"]


@pytest.mark.parametrize(("names", "missing"), [
    (["shard-00000-of-00005.h5", "shard-00002-of-00005.h5"], "shards 1, 3, 4 are missing"),
    (["shard-20240101120000.h5"], r"shards 0, 1, 2, .*, 19, and more are missing"),  # a date for a number
])  # fmt: skip
def test_missing_numbers_are_listed(names, missing, data, tmp_path, write_file):
    for name in names:
        write_file(tmp_path / name, data[:2])
    is_refused(zb_hdf5.IncompleteError, lambda: rebuild_index(tmp_path), match=missing)
    assert len(rebuild_index(tmp_path, force=True).shards) == len(names)


def test_an_index_is_looked_for_in_a_folder_only_and_made_of_shards_that_agree(data, tmp_path, write_file):
    (tmp_path / "s").mkdir()
    write_file(tmp_path / "s" / "shard-00000.h5", data)
    write_file(tmp_path / "s" / "shard-00001.h5", data.astype("<u4"))
    is_refused(zb_hdf5.ZbError, lambda: rebuild_index(tmp_path / "s"), match=r"expected \(4, 1024\) uint16")
    path = write_file(tmp_path / "x.h5", data).path
    for place in (path, tmp_path / "nothing"):
        with pytest.raises(zb_hdf5.FormatError, match=re.escape(f"{place}: no shards.json")):
            zb_hdf5.ShardIndex.load(place)
        with pytest.raises(zb_hdf5.ArgumentError, match=re.escape(f"{place}: expected the folder of a store")):
            rebuild_index(place)
