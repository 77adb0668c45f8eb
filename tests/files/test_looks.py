"""One look at a path: what it keeps, and what it holds open."""

import os
import pickle

import numpy as np
import pytest
from contract import is_refused
from descriptors import open_descriptors

from zb_hdf5 import FormatError
from zb_hdf5.files.look import HEAD_BYTES, Look
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.store.found_corpus import corpus_of
from zb_hdf5.store.found_path import found_at


def test_a_file_is_opened_once_and_what_was_read_is_kept(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(256)) * 40)
    with Look(path) as look:
        assert not look.is_dir
        assert (len(look.start), look.num_bytes) == (HEAD_BYTES, 10_240)
        path.unlink()  # another name of the same path is not looked at again
        path.write_bytes(b"another file")
        assert look.read(4, 9_000) == bytes(range(40, 44))
        assert look.num_bytes == 10_240
    assert look.start[:3] == b"\0\1\2"  # after it was closed


def test_a_file_that_is_shorter_than_its_beginning_is_read_to_its_end(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    with Look(path) as look:
        assert (look.start, look.read(10, 1), look.read(10, 5000)) == (b"abc", b"bc", b"")
        assert (look.last(2), look.last(9)) == (b"bc", b"abc")


def test_the_end_of_a_file_is_read_by_the_open_that_tells_its_size(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(256)) * 40)
    monkeypatch.setattr(os, "stat", lambda *_: pytest.fail("looked at twice"))
    with Look(str(path)) as look:
        assert (look.last(3), look.num_bytes) == (b"\xfd\xfe\xff", 10_240)


def test_looks_at_many_files_hold_few_of_them_open(tmp_path):
    files = [tmp_path / f"{number}.bin" for number in range(20)]
    for file in files:
        file.write_bytes(b"x")
    with Look(tmp_path) as folder:
        assert folder.is_dir
        assert folder.of(files[3]).start == b"x"
        before = open_descriptors()
        most = 0
        for look in folder.each(files):
            assert look.start == b"x"
            most = max(most, len(open_descriptors() - before))
        assert most == 1
        assert folder.of(files[3]) is folder.of(files[3])


def test_a_special_file_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "a.bin")
    with Look(tmp_path / "a.bin") as look:
        is_refused(FormatError, lambda: look.num_bytes, match="found a FIFO")
        is_refused(FormatError, lambda: look.start, match="found a FIFO")


@pytest.mark.parametrize("name", ["ids.npy", "folder"])
def test_a_file_that_is_replaced_after_the_look_is_named(name, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (tmp_path / "ids.npy", folder / "ids.npy"):
        np.save(place, np.arange(1000, dtype=np.uint16))
    path = tmp_path / name
    found = found_at(path)
    for place in (tmp_path / "ids.npy", folder / "ids.npy"):
        np.save(tmp_path / "new.npy", np.arange(1000, dtype=np.uint16) + 5000)  # of the same size
        os.replace(tmp_path / "new.npy", place)
    is_refused(FormatError, lambda: corpus_of(found).tokens[:5], match="changed since it was opened")


def test_the_descriptor_of_a_look_goes_to_whoever_reads_on(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abcd" * 2000)
    before = open_descriptors()
    with Look(path) as look:
        assert look.release() is None  # nothing is open yet
        identity = look.identity
        assert look.start[:4] == b"abcd"
        path.unlink()  # it is not opened again
        file = LocalFile(path, identity, "pread", look)
    assert file.num_bytes == 8000
    file.close()
    assert open_descriptors() == before
    with Look(tmp_path / "b.bin") as look:
        (tmp_path / "b.bin").write_bytes(b"x")
        assert look.start == b"x"
        is_refused(
            FormatError, lambda: LocalFile(tmp_path / "b.bin", identity, "pread", look), match="at least 8,000 bytes"
        )
    assert open_descriptors() == before


def test_a_look_that_is_kept_stays_open_until_its_last_owner_is_gone(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abcd" * 2000)
    before = open_descriptors()
    with Look(tmp_path) as folder:
        assert folder.of(path).kept_open() is None  # it is not open yet
        assert folder.of(path).start[:4] == b"abcd"
        kept = folder.of(path).kept_open()
        other = tmp_path / "b.bin"
        other.write_bytes(b"abcd" * 2000)
        assert folder.of(other).kept_unread() is None
        assert folder.of(other).start[:4] == b"abcd"
        unread = folder.of(other).kept_unread()
    path.unlink()  # it is not opened again
    other.unlink()
    assert kept.is_open
    assert kept.read(4, 6000) == unread.read(4, 0) == b"abcd"
    assert not pickle.loads(pickle.dumps(kept)).is_open
    del kept, unread, folder
    assert open_descriptors() == before


def test_a_look_whose_descriptor_was_taken_leaves_room_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr("zb_hdf5.files.look.MAX_KEPT", 1)
    kept = []
    for name in "abc":
        (tmp_path / name).write_bytes(b"abcd")
        look = Look(tmp_path / name)
        assert look.start == b"abcd"
        kept.append(look.kept_open())
        assert kept[-1] is look
        os.close(look.release())
    other = Look(tmp_path / "a")
    assert other.start == b"abcd"
    assert other.kept_open() is other
    last = Look(tmp_path / "b")
    assert last.start == b"abcd"
    assert last.kept_open() is None  # the one that may be kept is open
    monkeypatch.setattr("zb_hdf5.files.look.MAX_KEPT", 2)
    assert last.kept_open() is last  # a limit that was raised is seen at once
    last.close()


def test_all_handles_are_closed_also_if_one_cannot_be(tmp_path):
    closed = []

    class Handle:
        def __init__(self, fails):
            self.fails = fails

        def close(self):
            closed.append(self)
            if self.fails:
                raise OSError(5, "no")

    look = Look(tmp_path)

    def use():
        with look.keeping_handles():
            look.handles.update(a=Handle(False), b=Handle(True), c=Handle(False))

    is_refused(OSError, use)
    assert (len(closed), look.handles) == (3, None)
