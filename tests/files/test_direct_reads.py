"""Reads past the page cache: the bytes of the file, or none where the kernel refuses, and nothing left open."""

import errno
import os

import numpy as np
import pytest
from processes import forked

from zb_hdf5.files import direct_reads
from zb_hdf5.files.direct_reads import ALIGNED, DirectReads
from zb_hdf5.files.ranges import LocalFile

NUM_BYTES = 5000
CONTENT = np.random.default_rng(1).bytes(6 * ALIGNED + 700)


def is_served(file):
    try:
        reads = DirectReads((1,), np.dtype(np.uint8), 1)
    except OSError:
        return False
    reads.begin([(0, file, 0)])
    found = reads.take() is not None
    reads.close()
    return found


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    file = LocalFile(path)
    if not is_served(file):
        file.close()
        pytest.skip("this system, or the temporary folder, has no reads past the page cache")
    yield file
    file.close()


def taken(reads):
    found = reads.take()
    return None if found is None else found.tobytes()


def test_reads_of_any_offset_give_the_bytes_in_their_order(file):
    last = len(CONTENT) - NUM_BYTES
    offsets = [0, ALIGNED, 1, last, 8192, 4095, last - 1, 20_000]
    reads = DirectReads((NUM_BYTES // 2,), np.dtype(np.uint16), 3)
    for offset in offsets[:2]:
        reads.begin([(0, file, offset)])
    for offset, later in zip(offsets, [*offsets[2:], None, None], strict=True):
        assert taken(reads) == CONTENT[offset : offset + NUM_BYTES]
        if later is not None:
            reads.begin([(0, file, later)])
    assert reads.is_usable
    reads.close()


def test_a_read_beyond_the_end_has_no_bytes_and_later_ones_are_refused(file):
    reads = DirectReads((NUM_BYTES // 2,), np.dtype(np.uint16), 4)
    last = len(CONTENT) - NUM_BYTES
    reads.begin([(0, file, offset) for offset in (last, last + 1, 0)])
    assert taken(reads) == CONTENT[last:]
    assert reads.is_usable
    assert taken(reads) is None
    assert not reads.is_usable
    assert taken(reads) == CONTENT[:NUM_BYTES], "it was under way"
    reads.begin([(0, file, 0)])
    assert taken(reads) is None
    reads.close()


@pytest.mark.parametrize("kind", ["file system", "descriptor"])
def test_a_file_that_cannot_be_read_so_has_no_bytes(file, kind, monkeypatch):
    reads = DirectReads((NUM_BYTES // 2,), np.dtype(np.uint16), 2)
    if kind == "file system":
        monkeypatch.setattr(direct_reads, "FILE_SYSTEMS", ())
    else:
        file.close()
    reads.begin([(0, file, 0)])
    assert taken(reads) is None
    assert not reads.is_usable
    reads.close()


@pytest.mark.parametrize("machine", ["x86_64", "another"])
def test_a_system_that_refuses_all_of_them_is_an_error(machine, monkeypatch):
    monkeypatch.setattr(direct_reads.platform, "machine", lambda: machine)
    direct_reads._calls.cache_clear()
    if machine == "x86_64":
        monkeypatch.setattr(direct_reads, "_call", lambda *_: -1)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - of any number
        DirectReads((NUM_BYTES // 2,), np.dtype(np.uint16), 2)
    assert machine == "x86_64" or caught.value.errno == errno.ENOSYS
    direct_reads._calls.cache_clear()


def test_more_files_than_may_be_open_are_read_and_closed(file, tmp_path, monkeypatch):
    monkeypatch.setattr(direct_reads, "MAX_DIRECT_FILES", 2)
    before = set(os.listdir("/proc/self/fd"))
    reads = DirectReads((NUM_BYTES // 2,), np.dtype(np.uint16), 8)
    for _ in range(2):
        reads.begin([(number, file, number) for number in range(4)])
        for number in range(4):
            assert taken(reads) == CONTENT[number : number + NUM_BYTES]
        assert len(set(os.listdir("/proc/self/fd")) - before) <= 2
    reads.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_child_of_a_fork_has_none_and_disturbs_none(file):
    reads = DirectReads((NUM_BYTES // 2,), np.dtype(np.uint16), 8)
    reads.begin([(0, file, number) for number in range(5)])
    assert taken(reads) == CONTENT[:NUM_BYTES]
    while None in reads._results[:5]:
        reads._wait()

    def child():
        assert taken(reads) is None, "it is there, but the parent goes on to fill the memory"
        reads.begin([(0, file, 0)])
        assert taken(reads) is None
        own = DirectReads((NUM_BYTES // 2,), np.dtype(np.uint16), 8)
        own.begin([(0, file, 7)])
        reads.close()
        assert taken(own) == CONTENT[7 : 7 + NUM_BYTES]
        own.close()
        return True

    with forked(child):
        pass
    for number in range(1, 5):
        assert taken(reads) == CONTENT[number : number + NUM_BYTES]
    reads.close()
