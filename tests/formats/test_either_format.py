"""Files of batches, `.batch` and HDF5 alike: written once, replaced, cut, damaged, and read as they were."""

import contextlib
import functools
import gc
import itertools
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from contents import batches_of, files_in
from contract import is_refused
from descriptors import is_mapped, open_files

import zb_hdf5

ACCESSES = ("auto", "mmap", "pread")


@pytest.fixture(params=["x.batch", "x.h5"])
def path(request, tmp_path):
    return tmp_path / request.param


@pytest.fixture
def written(path, tokens, write_file):
    return write_file(path, tokens).path


def open_new(path, **options):
    return zb_hdf5.open_writer(path, **{"batch_size": 3, "seq_len": 10, **options})


def reads_of(reader, number):
    """Return every way to read a batch whole."""
    return (
        lambda: reader.read_batch(number),
        lambda: reader.read_batch_torch(number),
        lambda: reader.read_into(number, np.zeros((3, 10), reader.dtype)),
        lambda: reader.read_into(number, np.zeros((3, 10), f"i{reader.dtype.itemsize}")),
        lambda: reader.read_into(number, np.zeros((3, 10), np.int64)),
        lambda: reader.read_batches_into(number, np.zeros((1, 3, 10), reader.dtype)),
        lambda: reader.read_batch_int32(number),
        lambda: reader.read_record(3 * number + 2),
        lambda: reader.read_records_into(np.array([3 * number + 2]), np.zeros((1, 10), reader.dtype)),
        lambda: list(reader),
    )


def test_nothing_has_its_final_name_before_it_is_whole(path, tokens):
    with open_new(path) as writer:
        writer.write(tokens)
        assert not path.exists()
        is_refused((FileNotFoundError, zb_hdf5.FormatError), lambda: zb_hdf5.open_reader(path))
    assert not list(path.parent.glob("*.partial"))
    np.testing.assert_array_equal(batches_of(path, verify="store"), tokens)


def test_ids_at_or_above_the_vocabulary_are_refused(path):
    with open_new(path, batch_size=1, seq_len=2, vocab_size=100) as writer:
        writer.write([[0, 99]])
        is_refused(zb_hdf5.ConvertError, lambda: writer.write([[0, 100]]), match="token id 100 at index 1")
    np.testing.assert_array_equal(batches_of(path), [[[0, 99]]])  # batches before it are kept


def test_a_second_writer_of_one_path_is_told(path, tokens):
    with open_new(path) as writer:
        writer.write(tokens[:2])
        is_refused(zb_hdf5.UnavailableError, lambda: open_new(path), match="another process is writing it")
        writer.write(tokens[2:])
    np.testing.assert_array_equal(batches_of(path, verify="store"), tokens)


def test_the_leftover_of_a_dead_writer_is_replaced(path, tokens, write_file):
    Path(f"{path}.partial").write_bytes(b"leftover" * 500_000)
    np.testing.assert_array_equal(batches_of(write_file(path, tokens, durable=True).path, verify="store"), tokens)
    assert path.stat().st_size < 2 << 20


def test_a_file_that_exists_is_replaced_only_on_request(written, tokens, write_file):
    before = files_in(written.parent)
    is_refused(zb_hdf5.ConvertError, lambda: write_file(written, tokens[:2]), match="exists already")
    assert files_in(written.parent) == before
    write_file(written, tokens[:2], overwrite=True)
    np.testing.assert_array_equal(batches_of(written), tokens[:2])
    assert files_in(written.parent).keys() == before.keys()


@pytest.mark.parametrize("way", ["abort", "a bad id", "an error of the caller"])
def test_a_replacement_that_is_not_finished_leaves_what_was_there(way, written, tokens):
    before = files_in(written.parent)
    error = {"a bad id": zb_hdf5.ConvertError, "an error of the caller": ZeroDivisionError}.get(way)
    with pytest.raises(error) if error else contextlib.nullcontext():  # noqa: SIM117
        with open_new(written, overwrite=True) as writer:
            writer.write(tokens[:1])
            if way == "abort":
                writer.abort()
            elif way == "a bad id":
                writer.write(np.concatenate([tokens.astype(np.int64), np.full((1, 3, 10), -1)]))
            else:
                raise error
    assert files_in(written.parent) == before


@pytest.mark.parametrize("access", ACCESSES)
def test_a_file_of_no_batches_is_a_file(access, path):
    with open_new(path) as writer:
        assert writer.finish().num_batches == 0
    with zb_hdf5.open_reader(path, access=access) as reader:
        assert (len(reader), list(reader)) == (0, [])
        is_refused(IndexError, lambda: reader.read_batch(0))


@pytest.mark.parametrize("access", ACCESSES)
def test_a_reader_of_a_file_cut_since_is_not_unpickled_and_leaves_nothing_open(access, written):
    with zb_hdf5.open_reader(written, access=access) as reader:
        data = pickle.dumps(reader)
    os.truncate(written, written.stat().st_size - 4096)
    with pytest.raises(zb_hdf5.IncompleteError, match=r"cut short|truncated") as caught:
        pickle.loads(data)
    assert str(written) not in open_files().values(), f"for as long as the error lives: {caught.value}"


@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("left", [0, 100, 4096, -4096, "one byte less than the batch"])
@pytest.mark.thin
def test_a_file_cut_under_a_reader_is_an_error_and_no_bus_error(left, access, path, tokens, write_file):
    for dtype, first in itertools.product(("uint32", "uint16"), ("read_batch", "read_batch_torch")):
        write_file(path, tokens.astype(dtype), overwrite=True)
        with zb_hdf5.open_reader(path, access=access) as reader:
            getattr(reader, first)(0)  # a tensor does not need a mapping, and an array does
            size = reader.meta.batch_bytes - 4097 if isinstance(left, str) else left
            os.truncate(path, size % path.stat().st_size)
            is_refused(zb_hdf5.IncompleteError, *reads_of(reader, len(reader) - 1), match="cut short")


@pytest.mark.parametrize("access", ACCESSES)
def test_a_file_replaced_or_removed_under_a_reader_stays_the_old_one(access, written, tokens, write_file):
    open_it = functools.partial(zb_hdf5.open_reader, written, access=access, verify="none")
    with open_it() as reader, open_it() as unread:
        view = reader.read_batch(3)
        write_file(written, tokens[::-1], overwrite=True)
        for each in (reader, unread):
            np.testing.assert_array_equal(np.stack(list(each)), tokens)
        np.testing.assert_array_equal(view, tokens[3])
        with open_it() as new, open_it() as other:
            written.unlink()
            np.testing.assert_array_equal(np.stack(list(new)), tokens[::-1])
            np.testing.assert_array_equal(other.read_batch_int32(1), tokens[-2].view("i4"))


def test_mmap_gives_views_and_pread_copies(written):
    with zb_hdf5.open_reader(written, access="mmap") as reader:
        assert np.shares_memory(reader.read_batch(3), reader.read_batch(3))
        assert not np.shares_memory(reader.read_batch(3), reader.read_batch(4))
        view = reader.read_batch(0)
    assert is_mapped(written)
    del view
    gc.collect()
    assert not is_mapped(written)
    with zb_hdf5.open_reader(written, access="pread") as reader:
        assert not np.shares_memory(reader.read_batch(3), reader.read_batch(3))
