"""Field sets on full disks, with few descriptors, after moves, flips and kills: nothing wrong is given, or counted."""

import fcntl
import os
import pickle
import shutil
import subprocess
import time
from contextlib import closing, suppress

import numpy as np
import pytest
import torch
from descriptors import open_descriptors
from interpreter import run_training

from zb_hdf5 import (
    ChecksumError,
    ConvertError,
    FormatError,
    IncompleteError,
    Loader,
    ZbError,
    convert,
    open_corpus,
    open_field_set,
)
from zb_hdf5.converters import writing
from zb_hdf5.field import has_nan
from zb_hdf5.files import tokens
from zb_hdf5.store.set_index import parts_in
from zb_hdf5.store.value_part import read_layout

SEQ_LEN = 8
RECORDS = 4800
FIELDS = {"a": ("i4", (4,)), "b": "f4"}
NAMES = ["t/a", "t/b"]
#: A part has 1,600 records: its rows of crc32 and its marks fill pages of their own.
PART_BYTES = 256_000
SOME_PARTS = 3


def values(tokens):
    tokens = np.asarray(tokens)
    return {"a": (tokens[..., None] * 4 + np.arange(4)).astype("i4"), "b": tokens.astype("f4")}


def require_values(step, names=NAMES):
    expected = values(step["tokens"])
    for name in names:
        np.testing.assert_array_equal(step[name], expected[name[-1]])


def write_missing(source, part_bytes=PART_BYTES, **options):
    with open_field_set(source, "t", FIELDS, part_bytes=part_bytes, **options) as found:
        for step in found.missing(64, quiet=True):
            found.write(step["records"], **values(step["tokens"]))
        return found.finish()


def write_steps(found, steps):
    for step in steps:
        found.write(step["records"], v=step["tokens"].float())


def require_all(path, folder):
    """See that each value of a set in another folder is the one of its token."""
    with open_corpus(path) as corpus, closing(corpus.with_fields("t", path=folder)) as some:
        for order in ("global", "records"):
            with Loader(some, fields=NAMES, shuffle=order) as loader:
                for step in loader:
                    require_values(step)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    tokens = np.random.default_rng(1).integers(0, 2**16, (RECORDS, SEQ_LEN), dtype=np.uint16)
    np.save(folder / "rows.npy", tokens)
    convert(folder / "rows.npy", "hdf5", folder / "store", batch_size=32, shards=2)
    return folder / "store"


@pytest.fixture
def fresh(tmp_path, source):
    shutil.copytree(source, tmp_path / "store")
    return tmp_path / "store"


# --- descriptors -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hundreds_of_parts_need_few_descriptors(fresh):
    """One record more than two hundred parts; a process that may open 32 files writes, finishes and reads them."""
    code = """
import resource, sys
import numpy as np
from zb_hdf5 import Loader, open_corpus, open_field_set
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
path, part_bytes = sys.argv[1], 24 * 8 * 4 * 4
for finishes in (False, True):
    with open_field_set(path, "t", {"a": ("i4", (4,))}, part_bytes=part_bytes) as found:
        for number, step in enumerate(found.missing(64, quiet=True)):
            tokens = np.asarray(step["tokens"])
            found.write(step["records"], a=(tokens[..., None] * 4 + np.arange(4)).astype("i4"))
            if not finishes and number == 140:
                break
        if finishes:
            found.finish()
    with open_corpus(path) as corpus:
        some = corpus.with_fields("t", allow_missing=None if finishes else {"a": -1})
        for order in ("records", "global"):
            there = 0
            with Loader(some, fields=["t/a"], shuffle=order, prefetch=0) as loader:
                for step in loader:
                    rows = (step["t/a"] != -1).all(dim=(1, 2))
                    expected = step["tokens"].numpy()[..., None] * 4 + np.arange(4)
                    assert (step["t/a"].numpy() == expected)[rows].all()
                    there += int(rows.sum())
            print(there)
print(found.facts.num_cells)
"""
    done = run_training(code, fresh)
    assert done.returncode == 0, done.stderr
    some, again, *rest, parts = map(int, done.stdout.split())
    assert some == again > 2000
    assert rest == [RECORDS, RECORDS]
    assert parts >= 150


def test_a_corpus_and_its_copy_with_fields_close_each_other(fresh):
    write_missing(fresh)
    before = open_descriptors()
    for closes_first in (True, False):
        corpus = open_corpus(fresh)
        some = corpus.with_fields("t")
        with Loader(some, fields=NAMES) as loader:
            require_values(next(iter(loader)))
        (corpus if closes_first else some).close()
        assert open_descriptors() == before


# --- a full disk -----------------------------------------------------------------------------------------------------


def fill_up(disk, but=0):
    """Take the space of a disk, but for some pages."""
    free = os.statvfs(disk)
    (disk / "junk").write_bytes(bytes(max(0, free.f_bavail - but) * free.f_bsize))


def punch(path, offset):
    """Give back the page at an offset, as on a file system that reserves nothing."""
    page = str(offset // 4096 * 4096)
    subprocess.run(["fallocate", "-p", "-o", page, "-l", "4096", path], check=True)


def test_a_full_disk_is_named_and_marks_nothing_that_is_half(fresh, mount_disk):
    disk = mount_disk(8 << 10)
    folder = disk / "set"
    with open_field_set(fresh, "t", FIELDS, path=folder, part_bytes=PART_BYTES) as found:
        for but, suffix in ((0, "claim"), (10, "partial")):
            fill_up(disk, but)
            with pytest.raises(OSError, match=rf"No space left on device: '.*part-000000000000\.values\.{suffix}"):
                next(found.missing(64, quiet=True))
            assert [path.name for path in folder.iterdir()] == ["set.json"]
            (disk / "junk").unlink()
        steps = found.missing(64, quiet=True)
        step = next(steps)
        [(_, path)] = parts_in(folder)
        layout = read_layout(path, found.facts)
        for place in (layout.values["a"], layout.values["b"], layout.crc32["b"], layout.marks):
            punch(path, place)
            fill_up(disk)
            with pytest.raises(OSError, match=r"No space left on device: '.*part-000000000000\.values'"):
                found.write(step["records"], **values(step["tokens"]))
            assert found.num_missing == RECORDS
            (disk / "junk").unlink()
        while step is not None:
            found.write(step["records"], **values(step["tokens"]))
            step = next(steps, None)
        fill_up(disk)
        with pytest.raises(OSError, match=r"No space left on device: '.*index\.json"):
            found.finish()
        assert not (folder / "index.json").exists()
        (disk / "junk").unlink()
        found.finish()
        assert found.verify() == []


# --- other places and other tokens -----------------------------------------------------------------------------------


def test_a_set_moves_with_its_store_and_without_it(fresh, tmp_path):
    write_missing(fresh)
    fresh.rename(tmp_path / "moved")
    with Loader(tmp_path / "moved", fields=NAMES) as loader:
        require_values(next(iter(loader)))
    (tmp_path / "moved/fields/t/train").rename(tmp_path / "alone")
    require_all(tmp_path / "moved", tmp_path / "alone")


def test_a_store_that_may_not_be_written_has_its_set_elsewhere(fresh, tmp_path):
    for path in (*fresh.iterdir(), fresh):
        path.chmod(path.stat().st_mode & ~0o222)
    before = sorted(os.listdir(fresh))
    write_missing(fresh, path=tmp_path / "set")
    assert sorted(os.listdir(fresh)) == before
    require_all(fresh, tmp_path / "set")


def test_a_store_on_a_disk_that_may_only_be_read_has_its_set_elsewhere(fresh, tmp_path, mount_disk):
    disk = mount_disk(4096)
    shutil.copytree(fresh, disk / "store")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        write_missing(disk / "store")
    write_missing(disk / "store", path=tmp_path / "set")
    require_all(disk / "store", tmp_path / "set")


def test_a_store_or_a_part_that_was_replaced_is_refused(fresh, tmp_path):
    write_missing(fresh)
    np.save(tmp_path / "o.npy", np.ones((RECORDS, SEQ_LEN), np.uint16))
    convert(tmp_path / "o.npy", "hdf5", tmp_path / "other", batch_size=32, shards=2)
    shutil.copytree(fresh / "fields", tmp_path / "other/fields")
    with pytest.raises(ChecksumError, match="belong to other tokens"):
        Loader(tmp_path / "other", fields=NAMES)
    first, second, *_ = [path for _, path in parts_in(fresh / "fields/t/train")]
    with open_corpus(fresh) as corpus:
        some = corpus.with_fields("t")
        corpus.field(NAMES[0])
        shutil.copyfile(second, first)
        with Loader(some, fields=NAMES, shuffle="sequential") as loader, pytest.raises((ChecksumError, FormatError)):
            list(loader)


def test_a_store_that_is_replaced_meanwhile_gives_no_wrong_value_and_takes_none(fresh, tmp_path):
    """Its loader goes on with the old files, or ends in an error; its writer ends in one."""
    write_missing(fresh)
    np.save(tmp_path / "o.npy", np.arange(RECORDS * SEQ_LEN, dtype=np.uint16).reshape(RECORDS, SEQ_LEN) % 50)
    with Loader(fresh, fields=NAMES, shuffle="records") as loader, open_field_set(fresh, "u", {"v": "f4"}) as found:
        steps = iter(loader)
        require_values(next(steps))
        wanted = found.missing(4, quiet=True)
        step = next(wanted)
        found.write(step["records"], v=step["tokens"].float())
        how = {"batch_size": 32, "shards": 2, "force": True, "drop_field_set": ("t", "u")}
        convert(tmp_path / "o.npy", "hdf5", fresh, **how)
        with suppress(ZbError, OSError):
            for step in steps:
                require_values(step)
        with pytest.raises((ZbError, OSError)):
            write_steps(found, wanted)
    assert not (fresh / "fields").exists()


def test_a_set_that_is_made_while_its_store_is_replaced_is_not_lost(fresh, tmp_path, monkeypatch):
    np.save(tmp_path / "o.npy", np.ones((RECORDS, SEQ_LEN), np.uint16))
    fill = writing._fill

    def fill_while_a_job_begins(*arguments):
        open_field_set(fresh, "late", {"v": "f4"}).close()
        return fill(*arguments)

    monkeypatch.setattr(writing, "_fill", fill_while_a_job_begins)
    how = {"batch_size": 32, "shards": 2, "workers": 1, "force": True}
    before = (fresh / "shards.json").read_bytes()
    with pytest.raises(ConvertError, match="has the field sets late, whose values would be lost"):
        convert(tmp_path / "o.npy", "hdf5", fresh, **how)
    assert (fresh / "shards.json").read_bytes() == before
    monkeypatch.undo()
    convert(tmp_path / "o.npy", "hdf5", fresh, **how, resume=True, drop_field_set=("late",))
    assert not (fresh / "fields").exists()


def test_a_part_that_was_cut_short_is_refused(fresh):
    write_missing(fresh)
    path = parts_in(fresh / "fields/t/train")[1][1]
    index = path.with_name("index.json")
    text = index.read_text()
    for size in (path.stat().st_size - 1, 4096, 0):
        os.truncate(path, size)
        for order in ("global", "records"):
            with Loader(fresh, fields=NAMES, shuffle=order) as loader, pytest.raises((ChecksumError, IncompleteError)):
                list(loader)
        index.unlink()  # then the marks of the parts are read
        with open_corpus(fresh) as corpus, pytest.raises((FormatError, IncompleteError)):
            corpus.with_fields("t", allow_missing={"a": 0, "b": 0}).field("t/a")
        index.write_text(text)
        with open_field_set(fresh, "t") as found, pytest.raises((FormatError, IncompleteError)):
            found.finish()


@pytest.mark.parametrize("verify", ["auto", "none"])
@pytest.mark.parametrize("order", ["global", "records"])
def test_a_part_that_is_cut_short_while_it_is_mapped_is_an_error(fresh, order, verify, monkeypatch):
    """A process that touched the pages that are gone would be killed."""
    monkeypatch.setattr(tokens, "LARGE_RUN_BYTES", 1)
    write_missing(fresh)
    path = parts_in(fresh / "fields/t/train")[1][1]

    def read():
        with Loader(fresh, fields=NAMES, shuffle=order, verify=verify) as loader:
            for step in loader:  # all parts are mapped then
                require_values(step)
            os.truncate(path, 4096)
            loader.set_epoch(1)
            with pytest.raises(IncompleteError, match="was cut short"):
                list(loader)

    assert code_of(child(read)) == 0


def test_tokens_that_the_last_record_lacks_are_missing(tmp_path):
    """A stream grew by less than a record: as many records as before, and no value for its new tokens."""
    folder = tmp_path / "more"
    folder.mkdir()
    tokens = np.random.default_rng(3).integers(0, 2**16, 5000).astype(np.uint16)
    np.save(folder / "0.npy", tokens[:4980])
    write_missing(folder, seq_len=64)
    np.save(folder / "1.npy", tokens[4980:4990])
    for _ in range(2):
        with pytest.raises(IncompleteError, match="1 record of later files are missing"):
            Loader(folder, batch_size=2, seq_len=50, fields=NAMES)
        with open_field_set(folder, "t") as found:  # which notes the tokens that came
            assert found.num_missing == 1
    write_missing(folder, seq_len=64)
    with Loader(folder, batch_size=2, seq_len=50, fields=NAMES) as loader:
        for step in loader:
            require_values(step)


def test_readers_of_a_set_that_is_written_keep_what_they_found(fresh):
    with open_field_set(fresh, "t", FIELDS, part_bytes=PART_BYTES) as found:
        steps = found.missing(64, quiet=True)
        written = 0
        for _ in range(20):
            step = next(steps)
            found.write(step["records"], **values(step["tokens"]))
            written += 64
        with open_corpus(fresh) as corpus:
            some = corpus.with_fields("t", allow_missing={"a": -7, "b": -7})
            with Loader(some, fields=NAMES, shuffle="records") as loader:
                there = 0
                for step in loader:
                    rows = (step["t/b"] != -7).all(dim=1)
                    require_values({name: each[rows] for name, each in step.items()})
                    there += int(rows.sum())
                    if (more := next(steps, None)) is not None:
                        found.write(more["records"], **values(more["tokens"]))
        assert there == written


# --- processes -------------------------------------------------------------------------------------------------------


def child(work):
    """Return the id of a child that does some work; it ends with 0 if the work did."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_processes_that_make_a_set_at_one_moment_share_it(fresh):
    at = time.monotonic() + 0.3

    def make():
        while time.monotonic() < at:
            pass
        with open_field_set(fresh, "t", FIELDS, part_bytes=PART_BYTES) as found:
            for step in found.missing(64, quiet=True):
                found.write(step["records"], **values(step["tokens"]))

    assert [code_of(pid) for pid in [child(make) for _ in range(6)]] == [0] * 6
    assert sorted(os.listdir(fresh / "fields/t/train"))[SOME_PARTS:] == ["set.json"]
    write_missing(fresh)
    with Loader(fresh, fields=NAMES) as loader:
        for step in loader:
            require_values(step)


def test_a_part_is_opened_while_its_maker_still_has_its_lock(fresh):
    """It has its name a moment before the lock of its maker ends."""
    with open_field_set(fresh, "t", FIELDS, part_bytes=PART_BYTES) as found:
        next(found.missing(64, quiet=True))
        [(_, path)] = parts_in(found.folder)
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert found.num_missing == RECORDS


def test_a_corpus_with_sets_is_forked_and_pickled(fresh):
    write_missing(fresh)
    with open_corpus(fresh) as corpus:
        some = corpus.with_fields("t")
        with Loader(some, fields=NAMES, shuffle="records") as loader:
            require_values(next(loader))

            def read():
                for step in loader:
                    require_values(step)

            assert code_of(child(read)) == 0
            with pickle.loads(pickle.dumps(loader)) as copied:
                require_values(next(copied))


def test_a_claim_of_a_killed_node_is_taken_over_once_it_is_old(fresh):
    """Another host made it, or nothing was written into it yet: its age alone counts."""
    with open_field_set(fresh, "t", FIELDS, part_bytes=PART_BYTES) as found:
        claim = found.folder / "part-000000000000.values.claim"
        for text in ("", '{"host": "elsewhere", "boot": "", "pid": 1, "started": "", "job": "", "token": ""}'):
            claim.write_text(text)
            assert next(found.missing(64, quiet=True))["records"][0] > 0
            os.utime(claim, (time.time() - 7200,) * 2)
            assert next(found.missing(64, quiet=True))["records"][0] == 0
            found.close()
            assert not claim.exists()
            found = open_field_set(fresh, "t")
        found.close()


# --- values ----------------------------------------------------------------------------------------------------------


def test_numbers_of_sixteen_bits_from_tensors_and_arrays(fresh):
    teacher = lambda tokens: torch.as_tensor(tokens)[..., None] / 3  # noqa: E731
    for name, dtype, given in (
        ("a", "f2", lambda found: found.bfloat16()),
        ("b", "bfloat16", lambda found: found.numpy()),
        ("c", "bfloat16", lambda found: found.numpy().astype("f8")),
    ):
        with open_field_set(fresh, name, {"x": (dtype, (1,))}) as found:
            for step in found.missing(600, quiet=True):
                found.write(step["records"], x=given(teacher(step["tokens"] % 1000)))
            found.finish()
        with Loader(fresh, fields=[f"{name}/x"]) as loader:
            step = next(loader)
        assert torch.equal(step[f"{name}/x"].float(), teacher(step["tokens"] % 1000).bfloat16().float())


def test_not_a_number_is_found_by_its_bits():
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    assert [has_nan(each) for each in every.reshape(-1, 1)] == np.isnan(every).tolist()
    assert has_nan(every[::2])
    assert not has_nan(every[:0])
    assert has_nan(np.array([1.0, np.nan]))


def test_records_in_any_order_are_written_to_their_places(fresh):
    with open_field_set(fresh, "t", FIELDS, part_bytes=PART_BYTES) as found:
        tokens = {
            int(n): each
            for s in found.missing(64, quiet=True)
            for n, each in zip(s["records"], s["tokens"], strict=True)
        }
        numbers = np.random.default_rng(3).permutation(RECORDS)
        for some in np.split(numbers, 12):
            found.write(some, **values(np.stack([tokens[number] for number in some.tolist()])))
        found.finish()
    with Loader(fresh, fields=NAMES) as loader:
        for step in loader:
            require_values(step)


def test_a_dataset_of_records_has_the_values_of_fields(fresh):
    write_missing(fresh)
    with Loader(fresh, fields={"ids": "t/a", "t/b": "t/b"}) as loader:
        records = loader.records()
        assert records[0].keys() == {"input_ids", "labels", "ids", "t/b"}
        for batch in torch.utils.data.DataLoader(records, batch_size=100):
            step = {"tokens": batch["input_ids"], "t/a": batch["ids"], "t/b": batch["t/b"]}
            require_values(step)


# --- the long ones ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_hundred_flips_give_no_wrong_value(tmp_path):
    """In values and in rows of crc32; in whole batches, records, and, of a stream, windows."""
    tokens = np.random.default_rng(1).integers(0, 2**16, (960, SEQ_LEN), dtype=np.uint16)
    np.save(tmp_path / "rows.npy", tokens)
    np.save(tmp_path / "flat.npy", tokens.reshape(-1))
    fresh = tmp_path / "store"
    convert(tmp_path / "rows.npy", "hdf5", fresh, batch_size=32, shards=2)
    write_missing(fresh, part_bytes=PART_BYTES // 5)
    write_missing(tmp_path / "flat.npy", part_bytes=PART_BYTES // 5, seq_len=64, stride=16)
    rng = np.random.default_rng(4)
    refused = 0
    for path, count in ((fresh, 200), (tmp_path / "flat.npy", 100)):
        sets = path / "fields" if path == fresh else tmp_path / "flat.npy.fields"
        with open_field_set(path, "t") as found:
            facts = found.facts
        parts = [(part, read_layout(part, facts)) for _, part in parts_in(sets / "t/train")]
        for number in range(count):
            part, layout = parts[number % len(parts)]
            field = facts.fields[number % 2]
            in_rows = number % 5 == 0
            start = layout.crc32[field.name] if in_rows else layout.values[field.name]
            each = 4 if in_rows else facts.items(field) * field.dtype.itemsize
            place = start + int(rng.integers(layout.records * each * 9 // 10))
            flip(part, place, 1 << int(rng.integers(8)))
            shape = {} if path == fresh else {"batch_size": 40, "seq_len": (24, 64)[number % 2]}
            shape["access"] = ("auto", "mmap", "pread")[number % 3]
            orders = ("global", "records") if path == fresh else ("records",)
            for shuffle in orders:
                with Loader(path, shuffle=shuffle, fields=NAMES, **shape) as loader, pytest.raises(ChecksumError):
                    list(map(require_values, loader))
                refused += 1
            flip(part, place, 0)
    assert refused == 500


BEFORE = {}


def flip(path, place, bits):
    """Flip bits of a byte, or put it back; the file keeps its time."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(place)
        if bits:
            BEFORE[path, place] = file.read(1)
        file.seek(place)
        file.write(bytes([BEFORE[path, place][0] ^ bits]))
    os.utime(path, ns=times)
