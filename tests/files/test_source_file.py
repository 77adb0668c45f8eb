"""A file of a source is opened once by each process, however often it is read, and closed when nobody needs it."""

import os
import pickle
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
from contents import take_place
from contract import is_refused
from descriptors import open_descriptors
from interpreter import run_program
from processes import forked

from zb_hdf5 import FormatError, IncompleteError
from zb_hdf5.files.look import Look
from zb_hdf5.files.source_file import SourceFile

DATA = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(DATA)
    return path


def test_it_is_opened_once_and_closed_with_the_last_reference(path):
    before = open_descriptors()
    file = SourceFile(path)
    assert open_descriptors() == before  # it is opened when it is read
    assert file.opened() is file.opened()
    assert len(open_descriptors() - before) == 1
    stream = file.opened().stream()
    del file
    assert stream.read() == DATA  # whoever reads it goes on
    del stream
    assert open_descriptors() == before


def test_a_closed_file_is_opened_again(path):
    before = open_descriptors()
    file = SourceFile(path)
    file.opened()
    file.close()
    assert open_descriptors() == before
    assert file.opened().stream().read() == DATA


def test_the_descriptor_of_a_look_is_read_on(path):
    look = Look(path)
    assert look.start[:2] == b"\0\1"
    file = SourceFile(path, look=look)
    path.unlink()  # it is not opened again
    assert file.opened() is look
    assert file.identity == look.identity


def test_a_pickled_copy_is_not_open_and_refuses_another_file(path):
    file = SourceFile(path)
    file.opened()
    copy = pickle.loads(pickle.dumps(file))
    assert copy.identity == file.identity
    take_place(path)
    assert file.opened().stream().read() == DATA  # the open one is read; `unreplaced` names the other one
    for one in (file, copy):
        is_refused(FormatError, lambda one=one: [*one.unreplaced([1])], match="changed since it was opened")
    is_refused(FormatError, copy.opened, match="changed since it was opened")


def test_streams_of_one_file_have_positions_of_their_own(path):
    file = SourceFile(path)

    def read(number):
        stream = file.opened().stream()
        stream.seek(number * 1000)
        parts = [stream.read(7) for _ in range(50)]
        assert stream.tell() == number * 1000 + 350
        return b"".join(parts)

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(read, range(8))] == [DATA[k * 1000 : k * 1000 + 350] for k in range(8)]


def test_a_stream_is_read_as_a_file_is(path):
    stream, file = Look(path).stream(), path.open("rb", buffering=0)
    with stream, file:
        for place in ((5, 0), (-3, 1), (-9, 2), (20_000, 0)):
            assert stream.seek(*place) == file.seek(*place) == stream.tell()
            assert stream.read(11) == file.read(11)
        out, expected = bytearray(8), bytearray(8)
        for each, found in ((stream, out), (file, expected)):
            each.seek(-4, 2)
            assert each.readinto(found) == 4
        assert out == expected


def test_a_file_that_was_written_in_place_is_read_as_it_is_now(path):
    file = SourceFile(path)
    assert file.opened().start[:4] == DATA[:4]
    path.write_bytes(b"new!" + DATA[4:])
    assert file.opened().stream().read(8) == b"new!" + DATA[4:8]


def test_a_mapping_of_a_file_that_was_cut_short_is_refused(path):
    file = SourceFile(path)
    assert file.opened().mapped()[:] == DATA
    os.truncate(path, 100)
    is_refused(IncompleteError, file.opened().mapped, match="expected at least 16,384 bytes, found 100")


def test_more_files_than_a_process_may_open_are_read():
    """The files that were read last stay open."""
    code = """
import os, tempfile
from pathlib import Path
from zb_hdf5.files.source_file import SourceFile
with tempfile.TemporaryDirectory() as folder:
    files = []
    for number in range(400):
        path = Path(folder, str(number))
        path.write_text(str(number))
        files.append(SourceFile(path))
    for _ in range(2):
        assert [int(file.opened().stream().read()) for file in files] == list(range(400))
    print(len(os.listdir("/proc/self/fd")))
    last = files[-1].opened()
    assert files[-1].opened() is last
"""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 100
    found = run_program(f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n{code}")
    assert int(found.stdout) < 100


def test_a_forked_child_reads_by_the_same_descriptor(path):
    file = SourceFile(path)
    file.opened()
    path.unlink()  # it is not opened again
    with forked(lambda: file.opened().stream().read() == DATA):
        assert file.opened().stream().read() == DATA
