"""Copies that the kernel makes from file to file: the bytes of the slow way, and no damage copied along."""

import errno
import mmap
import os

import numpy as np
import pytest
from contents import batches_of, write_batches
from contract import random_tokens
from damage import flip_token
from interrupted import failing

from zb_hdf5 import ChecksumError, ZbError, open_reader, open_writer, verify_store
from zb_hdf5.converters.run import convert
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.formats.hdf5.h5_writer import HDF5Writer

SUFFIXES = {"hdf5": ".h5", "batch": ".batch"}
SHAPES = {"packed": (4, 1024), "padded": (3, 1000)}


@pytest.fixture(params=sorted(SHAPES))
def tokens(request):
    return random_tokens(40, *SHAPES[request.param])


def copy(source, backend, destination, target="batch"):
    convert(StoreSource(source, backend), target, destination)
    if destination.is_file():
        return {"": destination.read_bytes()}
    return {path.name: path.read_bytes() for path in sorted(destination.iterdir())}


@pytest.mark.parametrize("dtype", ["uint16", pytest.param("uint32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["hdf5", "batch"])
@pytest.mark.parametrize("backend", ["hdf5", "batch"])
@pytest.mark.parametrize("form", ["file", "store"])
@pytest.mark.thin
def test_the_fast_way_gives_the_bytes_of_the_slow_way(
    dtype, target, backend, form, tokens, tmp_path, write_file, write_store, monkeypatch
):
    tokens = tokens.astype(dtype)
    if form == "file":
        source = tmp_path / f"in{SUFFIXES[backend]}"
        write_file(source, tokens)
    else:
        source = write_store(tmp_path / "in", tokens, (7, 30), (backend,))
    name = f"out{SUFFIXES[target]}" if form == "file" else "out"
    real, calls = os.copy_file_range, []

    def counted(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(os, "copy_file_range", counted)
    (tmp_path / "fast").mkdir()
    fast = copy(source, backend, tmp_path / "fast" / name, target)
    slots_fit = target == "batch" or tokens[0].nbytes % mmap.PAGESIZE == 0  # HDF5 files have no padding
    if (form, backend) != ("file", "batch"):  # a lone .batch has nothing that would prove the copy
        assert bool(calls) == slots_fit
    for number in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY):
        monkeypatch.setattr(os, "copy_file_range", failing(number))
        (tmp_path / str(number)).mkdir()
        assert copy(source, backend, tmp_path / str(number) / name, target) == fast
    np.testing.assert_array_equal(batches_of(tmp_path / "fast" / name), tokens)


def test_nothing_to_copy_and_fewer_batches_than_expected(tmp_path):
    tokens = random_tokens(5, 4, 1024)
    write_batches(tmp_path / "in.batch", tokens)
    reader = open_reader(tmp_path / "in.batch")
    with open_writer(tmp_path / "a.h5", batch_size=4, seq_len=1024) as writer:
        assert writer.write_from(reader, 0, 0) == 0
        assert writer.write_from(reader, 0, 5) == 5  # of nobody knows how many: there is room ahead
    with open_writer(tmp_path / "b.h5", batch_size=4, seq_len=1024, expected_batches=1000) as writer:
        assert writer.write_from(reader, 0, 2) == 2
        writer.write(tokens[2:3])
        assert writer.write_from(reader, 3, 2) == 2
    reader.close()
    for name in ("a.h5", "b.h5"):
        assert [report.problem for report in verify_store(tmp_path / name)] == [None]
        np.testing.assert_array_equal(batches_of(tmp_path / name), tokens)
    assert (tmp_path / "b.h5").stat().st_size < 2 * tokens.nbytes + (1 << 20)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_commit_that_fails_is_not_tried_again(at, tmp_path, monkeypatch):
    tokens = random_tokens(40, 64, 4096)  # 1 MiB each: five groups
    write_batches(tmp_path / "in.batch", tokens)
    real, calls = HDF5Writer._modify, []

    def full(self, **attributes):
        calls.append(attributes)
        if len(calls) == at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, **attributes)

    writer = open_writer(tmp_path / "out.h5", batch_size=64, seq_len=4096, expected_batches=40)
    monkeypatch.setattr(HDF5Writer, "_modify", full)
    with open_reader(tmp_path / "in.batch") as reader, pytest.raises(OSError, match="No space left"):
        writer.write_from(reader, 0, 40)
    assert len(calls) in (at + 1, at + 2)  # what was digested besides may be committed or not, but not the same again
    assert len({call["num_batches"] for call in calls}) == len(calls)
    writer.abort()


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_copy_that_stops_in_the_middle_is_finished_by_hand(taken, tmp_path, write_store, monkeypatch):
    tokens = random_tokens(40, 64, 4096)  # 1 MiB each: five groups
    source = write_store(tmp_path / "in", tokens, (40,), ("batch",))
    expected = copy(source, "batch", tmp_path / "a", "hdf5")
    real, calls = os.copy_file_range, []

    def once(*arguments):
        if len(calls) == taken:
            raise OSError(errno.EXDEV, "no more")
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(os, "copy_file_range", once)
    assert copy(source, "batch", tmp_path / "b", "hdf5") == expected
    assert len(calls) == taken


@pytest.mark.parametrize("limit", [0, 4096, 5000, 100_000])  # no progress is no endless loop
@pytest.mark.thin
def test_short_copies_go_on(limit, tokens, tmp_path, write_file, monkeypatch):
    write_file(tmp_path / "in.h5", tokens)
    expected = copy(tmp_path / "in.h5", "hdf5", tmp_path / "a.batch")
    real = os.copy_file_range

    def short(source, target, count, *offsets):
        return real(source, target, min(count, limit), *offsets) if limit else 0

    monkeypatch.setattr(os, "copy_file_range", short)
    assert copy(tmp_path / "in.h5", "hdf5", tmp_path / "b.batch") == expected


@pytest.mark.parametrize("number", [0, 17, 39])
def test_damage_is_never_copied(number, tokens, tmp_path, write_file):
    write_file(tmp_path / "in.h5", tokens)
    flip_token(tmp_path / "in.h5", number, 5)
    with pytest.raises(ChecksumError, match=f"batch {number}"):
        copy(tmp_path / "in.h5", "hdf5", tmp_path / "out.batch")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


def test_a_source_cut_in_the_middle_and_a_full_disk_are_errors(tokens, tmp_path, write_file, monkeypatch):
    write_file(tmp_path / "in.h5", tokens)
    real = os.copy_file_range

    def cut(*arguments):
        os.truncate(tmp_path / "in.h5", os.path.getsize(tmp_path / "in.h5") // 2 + (1 << 19))
        return real(*arguments)

    for fault, error in ((failing(errno.ENOSPC), OSError), (cut, ZbError)):  # a full disk is no refusal
        monkeypatch.setattr(os, "copy_file_range", fault)
        with pytest.raises(error):
            copy(tmp_path / "in.h5", "hdf5", tmp_path / "out.batch")
        assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]
