"""Uploads that replace a store in a bucket: at each moment, and after each end, the old one or the new one is there."""

import re
import signal
from pathlib import Path

import numpy as np
import obstore
import pytest
from commandline import succeed
from contents import batches_of
from contract import is_refused, random_tokens
from interpreter import start_program
from processes import running

import zb_hdf5
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.resolution import staging_path
from zb_hdf5.files.paths import RemotePath

OLD = random_tokens(9, 3, 32)
NEW = random_tokens(11, 3, 32) + 7
URL = "s3://bucket/stores/train-h5"
CONVERT = "from zb_hdf5.converters.cli import convert_commands; convert_commands()"
CHANGES = ("PUT", "POST", "DELETE")


@pytest.fixture
def folders(s3, tmp_path, write_store, monkeypatch):
    """Return two stores of this machine, of which the first is in the bucket; the current folder is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    old = write_store(tmp_path / "old", OLD, (4,))
    new = write_store(tmp_path / "new", NEW, (4, 7))
    zb_hdf5.convert(old, "hdf5", URL)
    return old, new


def objects():
    """Return the names of all objects of the store."""
    return {each["path"] for each in obstore.store.from_url(URL).list().collect()}


def objects_of_the_index():
    return {"shards.json", *zb_hdf5.ShardIndex.load(URL).table.values["path"]}


def content():
    """Return the name and the bytes of each object of the store."""
    bucket = obstore.store.from_url(URL)
    return {name: bytes(obstore.get(bucket, name).bytes()) for name in objects()}


def put_back(before):
    """Have the objects of the store again, and no others."""
    bucket = obstore.store.from_url(URL)
    obstore.delete(bucket, sorted(objects() - before.keys()))
    for name, data in before.items():
        obstore.put(bucket, name, data)
    assert store_there() == "old"


def store_there():
    """Return which store a new reader reads, and compare each of its batches."""
    found = batches_of(URL)
    name = "old" if len(found) == len(OLD) else "new"
    np.testing.assert_array_equal(found, {"old": OLD, "new": NEW}[name])
    return name


def test_a_reader_finds_a_whole_store_at_each_moment_of_an_upload(s3, folders):
    found = []

    def look(number, method, name, span):
        if method in CHANGES:
            found.append((name, store_there()))

    s3.fault = look
    with zb_hdf5.open_reader(URL) as reader:
        np.testing.assert_array_equal(reader[0], OLD[0])  # the others are looked for when there are none
        zb_hdf5.convert(folders[1], "hdf5", URL, force=True)
        with pytest.raises((zb_hdf5.ZbError, OSError)):
            np.stack(list(reader))
    s3.reset()
    assert [name for name, _ in found][3] == "shards.json"
    assert [store for _, store in found] == ["old"] * 4 + ["new"]
    assert store_there() == "new"
    assert objects() == objects_of_the_index()


class Killed:
    """Sends a signal to a conversion at its k-th change of the bucket: before it, or when the bucket has done it.

    The conversion gets no answer to that change, and so cannot begin one that follows it.
    """

    def __init__(self, number, at, *, done):
        self.at = at
        self.number = number
        self.left = at
        self.done = done
        self.process = None

    def __call__(self, number, method, name, span):
        if method not in CHANGES or self.process is None:
            return None
        self.left -= 1
        if self.left:
            return None
        if self.done:
            return {"when_done": self.send}
        self.send()
        return {"hang_up": True}

    def send(self):
        self.process.send_signal(self.number)
        self.process.wait(60)


def converted(s3, source, *options, fault=None):
    """Run a conversion to the bucket, and return its exit code and its messages."""
    command = ("hdf5-to-hdf5", source, URL, "--force", "--quiet", *options)
    with running(start_program(CONVERT, *command)) as process:
        if fault is not None:
            fault.process, s3.fault = process, fault
        _, said = process.communicate(timeout=100)
    s3.reset()
    return process.returncode, said


CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143}
#: Three shards, the index, the deletion of old objects.
MOMENTS = [(at, done) for at in range(1, 6) for done in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--resume",), ()])
@pytest.mark.parametrize("number", CODES)
def test_a_signal_at_any_moment_of_an_upload_leaves_a_store(number, options, s3, folders, thinned):
    before = content()
    for at, done in thinned(MOMENTS):
        is_killed_and_goes_on(s3, folders[1], Killed(number, at, done=done), options)
        put_back(before)
    code, said = converted(s3, folders[0])
    assert (code, store_there()) == (0, "old"), said


#: The change that puts the index.
INDEX_PUT = 4


def store_after(kill):
    """Return the store that has to be there: the old one until the index is put, and then the new one."""
    return "new" if (kill.at, kill.done) >= (INDEX_PUT, True) else "old"


def is_killed_and_goes_on(s3, source, kill, options):
    code, said = converted(s3, source, fault=kill)
    assert code == CODES[kill.number], said
    assert "Traceback" not in said
    assert kill.left <= 0
    assert store_there() == store_after(kill)
    code, said = converted(s3, source, *options)
    assert (code, store_there()) == (0, "new"), said
    assert objects() == objects_of_the_index()
    assert not list(Path.cwd().iterdir())


def test_a_kill_before_the_index_is_put_leaves_the_old_store(s3, folders):
    is_killed_and_goes_on(s3, folders[1], Killed(signal.SIGKILL, 3, done=True), ("--resume",))


def test_sigterm_ends_an_upload_that_a_server_holds_up(s3, folders):
    kill = Killed(signal.SIGTERM, 2, done=False)
    code, said = converted(s3, folders[1], fault=kill)  # `kill` answers when the process has ended
    assert code == 143
    assert "go on with --resume --force" in said


def test_two_buckets_are_uploaded_from_folders_of_their_own(s3, folders):
    places = [RemotePath(f"s3://{bucket}/stores/train-h5") for bucket in ("one", "two")]
    one, two = map(staging_path, places)
    assert one != two
    assert re.fullmatch(r"train-h5-[0-9a-f]{8}\.upload", one.name)


def test_an_index_that_another_process_has_put_meanwhile_stays(s3, folders):
    other = obstore.store.from_url(URL).get("shards.json").bytes().to_bytes() + b"\n"
    done = []

    def put_another(number, method, name, span):
        if (method, name) == ("PUT", "shards.json") and not done:
            done.append(name)
            obstore.store.from_url(URL).put("shards.json", other)

    s3.fault = put_another
    is_refused(zb_hdf5.ExistsError, lambda: zb_hdf5.convert(folders[1], "hdf5", URL, force=True))
    assert obstore.store.from_url(URL).get("shards.json").bytes() == other
    s3.reset()
    zb_hdf5.convert(folders[1], "hdf5", URL, force=True, resume=True)
    assert store_there() == "new"
    assert objects() == objects_of_the_index()


def test_a_lost_answer_to_the_index_is_no_error(s3, folders):
    answered = []

    def lose(number, method, name, span):
        if (method, name) == ("PUT", "shards.json") and not answered:
            answered.append(name)
            return {"cut": 0, "then": lambda handler: handler.connection.shutdown(2)}
        return None

    s3.fault = lose
    zb_hdf5.convert(folders[1], "hdf5", URL, force=True)
    assert store_there() == "new"


def test_only_parts_of_the_old_store_are_removed(s3, folders):
    store = obstore.store.from_url(URL)
    leftover = "shard-00000-of-00009.0123abcd.h5"
    others = {"README.md", "run/shard-00000.h5", "documents.txt"}
    for name in (leftover, *others):
        store.put(name, b"a")
    zb_hdf5.convert(folders[1], "hdf5", URL, force=True)
    assert objects() == objects_of_the_index() | others


def test_force_without_resume_puts_damaged_objects_again(s3, folders):
    name = sorted(objects_of_the_index())[0]
    store = obstore.store.from_url(URL)
    size = store.head(name)["size"]
    store.put(name, bytes(size))
    zb_hdf5.convert(folders[0], "hdf5", URL, force=True)
    assert store_there() == "old"


@pytest.mark.parametrize("target", ["hdf5", "batch"])
def test_a_copy_of_a_bucket_is_an_ordinary_store(target, s3, folders, tmp_path):
    zb_hdf5.convert(folders[0], target, URL, force=True)
    store = obstore.store.from_url(URL)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in objects():
        (copy / name).write_bytes(store.get(name).bytes())
    (copy / "shards.json").unlink()
    succeed(zb, "index", "rebuild", copy)
    np.testing.assert_array_equal(batches_of(copy), OLD)
    zb_hdf5.convert(folders[1], target, copy, force=True)
    np.testing.assert_array_equal(batches_of(copy), NEW)
