"""A stamped `.batch` file is read by HDF5, and stays the `.batch` file that it was."""

from __future__ import annotations

import fcntl
import os

import h5py
import numpy as np
import pytest

from zb_hdf5 import open_reader
from zb_hdf5.dual import build_face, check, is_stamped, stamp, unstamp
from zb_hdf5.errors import ArgumentError, FormatError, UnavailableError
from zb_hdf5.spec import StoreMeta, batch_file_bytes, pack_header, stored_dtype


@pytest.fixture
def path(tmp_path, write_file):
    path = tmp_path / "a.batch"
    write_file(path, np.arange(5 * 2 * 1024, dtype=np.uint32).reshape(5, 2, 1024))
    return path


def test_both_faces_have_the_same_tokens_and_unstamp_restores(path):
    before = path.read_bytes()
    stamp(path)
    check(path)
    with h5py.File(path) as file, open_reader(path, backend="batch") as reader:
        assert file["batches"].id.get_offset() == 4096
        for number in range(5):
            np.testing.assert_array_equal(file["batches"][number], reader[number])
    assert path.read_bytes()[4096:] == before[4096:]
    with pytest.raises(ArgumentError, match="already"):
        stamp(path)
    unstamp(path)
    assert path.read_bytes() == before
    with pytest.raises(ArgumentError, match="not stamped"):
        unstamp(path)


def test_a_torn_stamp_is_a_batch_file_and_no_hdf5_file(path):
    before = path.read_bytes()
    stamp(path)
    face = path.read_bytes()[512:4096]
    unstamp(path)
    order = [*range(8, len(face)), *range(8)]
    for written in [*range(0, len(face), 97), *range(len(face) - 8, len(face))]:
        torn = bytearray(before)
        for at in order[:written]:
            torn[512 + at] = face[at]
        path.write_bytes(torn)
        assert not is_stamped(path)
        assert not h5py.is_hdf5(path)
        with open_reader(path, backend="batch") as reader:
            assert reader[4][1, 1023] == 10239


def test_a_flipped_bit_is_found(path):
    stamp(path)
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="face"):
        check(path)


def test_padded_batches_are_refused(tmp_path, write_file, tokens):
    write_file(tmp_path / "p.batch", tokens)
    with pytest.raises(ArgumentError, match="whole pages"):
        stamp(tmp_path / "p.batch")


def test_a_tebibyte_shape_has_a_face(tmp_path):
    meta = StoreMeta(256, 1024, stored_dtype("uint32"))
    assert len(build_face(meta, 2**20, tmp_path)) == 3584
    assert batch_file_bytes(meta, 2**20) > 2**40
    assert pack_header(meta, 2**20)[512:] == bytes(3584)
    assert os.listdir(tmp_path) == []


def test_a_locked_file_is_refused_and_a_mapped_one_is_not(path):
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match="lock"):
            stamp(path)
    with open_reader(path, backend="batch", access="mmap") as reader:
        stamp(path)
        assert reader[4][1, 1023] == 10239


def test_a_sparse_tebibyte_file_is_stamped(tmp_path):
    path, meta = tmp_path / "big.batch", StoreMeta(256, 1024, stored_dtype("uint32"))
    path.write_bytes(pack_header(meta, 2**20))
    os.truncate(path, batch_file_bytes(meta, 2**20))
    stamp(path)
    with h5py.File(path) as file:
        assert file["batches"].shape == (2**20, 256, 1024)
        assert not file["batches"][2**20 - 1].any()
    assert path.stat().st_blocks * 512 < 2**20
