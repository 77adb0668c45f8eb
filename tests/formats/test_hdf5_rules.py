"""Rules of HDF5 that the writer lives by, each broken once in an experiment: a test fails when one is forgotten."""

import errno
import os

import h5py
import numpy as np
import pytest
from contents import batches_of
from contract import is_refused, random_tokens
from interpreter import run_program
from interrupted import failing

from zb_hdf5 import open_writer
from zb_hdf5.formats.h5_writer import HDF5Writer
from zb_hdf5.hdf5.superblock import end_of_file


@pytest.fixture
def tokens():
    return random_tokens(7, 4, 1024)  # 16 KiB a batch: HDF5 aligns no smaller chunk than a page


@pytest.fixture
def writer(tmp_path, tokens):
    with open_writer(tmp_path / "x.h5", batch_size=4, seq_len=1024) as writer:
        writer.write(tokens[:2])
        yield writer


def test_no_attribute_is_made_after_swmr_has_begun(writer, tokens, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an attribute made in SWMR mode can wreck the writer")

    for name in ("create", "__setitem__", "__delitem__"):
        monkeypatch.setattr(h5py.AttributeManager, name, refuse)
    writer.write(tokens[2:])
    assert writer.finish().num_batches == len(tokens)


def test_a_commit_brings_the_superblock_along(writer, tokens, tmp_path):
    partial = tmp_path / "x.h5.partial"
    fd = os.open(partial, os.O_RDONLY)
    try:
        before = end_of_file(fd)
        writer.write(np.concatenate([tokens] * 3))
        assert end_of_file(fd) >= before + 2 * tokens.nbytes  # more than the 16 batches that had room
    finally:
        os.close(fd)


def test_room_is_taken_before_hdf5_is_touched(writer, tokens, tmp_path, monkeypatch):
    more = np.concatenate([tokens] * 3)  # 16 batches have room already
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        is_refused(OSError, lambda: writer.write(more), match=os.strerror(errno.ENOSPC))
    assert len(writer._main.stored) == 16
    writer.write(more)
    path = writer.finish().path
    np.testing.assert_array_equal(batches_of(path), np.concatenate([tokens[:2], more]))


@pytest.mark.parametrize("expected", [0, 40], ids=["in several runs", "in one"])
@pytest.mark.parametrize("shape", [(4, 1024), (3, 700), (2, 10)], ids=["whole pages", "padded", "small"])
def test_batches_written_past_hdf5_give_the_bytes_that_hdf5_writes(shape, expected, tmp_path, monkeypatch):
    tokens = random_tokens(40, *shape)
    parts = [tokens[:1], tokens[1:1], tokens[1:20], tokens[20:]]
    meta = {"batch_size": shape[0], "seq_len": shape[1], "expected_batches": expected}
    with open_writer(tmp_path / "fast.h5", **meta) as writer:
        for part in parts:
            writer.write(part)
    calls = []

    def write_through_hdf5(writer, first, chunks, fields):
        calls.append(first)
        writer._main.write(first, chunks)

    monkeypatch.setattr(HDF5Writer, "_write_chunks", write_through_hdf5)
    with open_writer(tmp_path / "slow.h5", **meta) as writer:
        for part in parts:
            writer.write(part)
    assert calls == [0, 1, 20]
    assert (tmp_path / "fast.h5").read_bytes() == (tmp_path / "slow.h5").read_bytes()
    with h5py.File(tmp_path / "fast.h5") as h5:
        np.testing.assert_array_equal(h5["batches"][...].reshape(tokens.shape), tokens)


@pytest.mark.parametrize("mode", ["r+", "a"])
@pytest.mark.thin
def test_a_live_file_cannot_be_opened_for_writing(mode, writer, tmp_path):
    """Mode "w" is not here: HDF5 2.0 is refused the lock as well, but has cut the file to nothing before it asks."""
    code = "import h5py, sys; h5py.File(sys.argv[1], sys.argv[2])"
    done = run_program(code, tmp_path / "x.h5.partial", mode)
    assert done.returncode != 0
    assert "errno = 11" in done.stderr
    code = "import h5py, sys; print(h5py.File(sys.argv[1], 'r', swmr=True)['batches'].attrs['num_batches'])"
    found = run_program(code, tmp_path / "x.h5.partial")
    assert found.stdout == "2\n", found.stderr
