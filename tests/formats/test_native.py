"""The `.batch` file: what ZeroBatch's two functions write, and what a reader makes of damaged files."""

import os

import numpy as np
import pytest
from commandline import one_error, run_zb
from contents import batches_of, write_batches
from contract import is_refused, random_tokens
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from zb_hdf5 import StoreMeta, errors, open_reader, open_writer, write_batch_dataset, write_batch_file
from zb_hdf5.formats.native import BatchFileWriter
from zb_hdf5.loaders.order import write_order

SIZE = 4096 + 7 * 4096  # of the file of the `tokens` fixture


@pytest.fixture
def path(tmp_path, tokens, write_file):
    return write_file(tmp_path / "x.batch", tokens).path


def records(count, seq_len=10, dtype="uint32", seed=0):
    """Return records that are all different."""
    made = random_tokens(count, 1, seq_len, dtype, seed)[:, 0]
    made[:, 0] = np.arange(count)
    return made


@examples(25)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_array_and_stream_give_the_same_file(tmp_path_factory, count, batch_size, seq_len, seed):
    folder = tmp_path_factory.mktemp("example")
    batch_size = min(batch_size, count)
    source = random_tokens(count, 1, seq_len)[:, 0]
    found = [
        write_batch_file(folder / "a.batch", source, batch_size, seq_len, seed),
        write_batch_dataset(folder / "b.batch", iter(source), count, batch_size, seq_len, seed),
    ]
    assert found == [count // batch_size] * 2
    assert (folder / "a.batch").read_bytes() == (folder / "b.batch").read_bytes()


@pytest.mark.parametrize(("count", "batch_size"), [(23, 5), (20, 5), (5, 5), (64, 1)])
@pytest.mark.parametrize("seed", [1, 42])
def test_written_batches_are_the_shuffled_records_but_for_the_remainder(count, batch_size, seed, tmp_path):
    source = records(count)
    kept = count - count % batch_size
    assert write_batch_file(tmp_path / "x.batch", source, batch_size, 10, seed) == kept // batch_size
    expected = source[write_order(count, seed).indices(np.arange(kept))]
    np.testing.assert_array_equal(batches_of(tmp_path / "x.batch").reshape(-1, 10), expected)
    with open_reader(tmp_path / "x.batch") as reader:
        assert reader.meta == StoreMeta(batch_size, 10, np.dtype("<u4"), seed=seed, total_records=count)


@pytest.mark.parametrize("source", ["<i8", ">i4", "<u2", "u8"])
def test_any_integer_dtype_and_lists_are_sources(source, tmp_path):
    tokens = np.arange(60).reshape(6, 10)
    write_batch_file(tmp_path / "a.batch", tokens.astype(source), 2, 10, 1)
    write_batch_dataset(tmp_path / "b.batch", tokens.tolist(), 6, 2, 10, 1)
    assert (tmp_path / "a.batch").read_bytes() == (tmp_path / "b.batch").read_bytes()


@pytest.mark.parametrize(("dtype", "count"), [("uint16", 20), ("uint32", 2000)])  # 8 MB: more than one group in both
def test_arrays_memory_maps_and_streams_of_either_dtype_give_the_same_file(dtype, count, tmp_path):
    source = records(count, 1024, dtype)
    np.save(tmp_path / "source.npy", source)
    mapped = np.load(tmp_path / "source.npy", mmap_mode="r")
    write_batch_file(tmp_path / "a.batch", source, 2, 1024, 5, dtype=dtype)
    write_batch_dataset(tmp_path / "b.batch", source, count, 2, 1024, 5, dtype=dtype)
    write_batch_file(tmp_path / "c.batch", mapped, 2, 1024, 5, dtype=dtype)
    found = [(tmp_path / f"{name}.batch").read_bytes() for name in "abc"]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 4096 + count // 2 * 1024 * 2 * np.dtype(dtype).itemsize
    with open_reader(tmp_path / "a.batch") as reader:
        assert reader.dtype == dtype


def broken():
    yield from records(5)
    raise ZeroDivisionError


@pytest.mark.parametrize(("stream", "message"), [
    (lambda: records(19), "expected 20 records, found 19"),
    (lambda: records(21), "expected 20 records, found more"),
    (lambda: [*records(10), np.zeros(9, np.uint32)], r"record 10: expected shape \(10,\), found \(9,\)"),
    (lambda: records(20).reshape(10, 2, 10), r"record 0: expected shape \(10,\), found \(2, 10\)"),
    (lambda: [*records(19).astype(int), np.full(10, -1)], "record 19: token id -1 at index 0"),
    (lambda: [*records(19).astype(int), np.full(10, 2**32)], "record 19: token id 4294967296"),
    (lambda: records(20).astype("f4"), "record 0: expected token ids of an integer dtype, found float32"),
    (lambda: (), "expected 20 records, found 0"),
])  # fmt: skip
def test_a_bad_stream_is_an_error_and_leaves_nothing(stream, message, tmp_path):
    with pytest.raises(errors.ConvertError, match=message):
        write_batch_dataset(tmp_path / "x.batch", iter(stream()), 20, 4, 10, 1)
    with pytest.raises(ZeroDivisionError):  # of the stream itself
        write_batch_dataset(tmp_path / "x.batch", broken(), 20, 4, 10, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("source", "message"), [
    (records(20, 9), r"expected shape \(num_records, 10\), found \(20, 9\)"),
    (records(20)[0], r"found \(10,\)"),
    (records(3), "3 records do not fill one batch of 4"),
    (records(0), "0 records do not fill one batch of 4"),
    (np.full((20, 10), -1), "token id -1"),
    (np.full((20, 10), 2**32), "token id 4294967296"),
    (records(20).astype(float), "integer dtype"),
])  # fmt: skip
def test_a_bad_array_is_an_error_and_leaves_nothing(source, message, tmp_path):
    is_refused(errors.ConvertError, lambda: write_batch_file(tmp_path / "x.batch", source, 4, 10, 1), match=message)
    assert list(tmp_path.iterdir()) == []


def from_array(path, source, *how, **options):
    return write_batch_file(path, source, *how, **options)


def from_stream(path, source, *how, **options):
    return write_batch_dataset(path, iter(source), len(source), *how, **options)


each_way = pytest.mark.parametrize("write", [from_array, from_stream])


@each_way
def test_ids_above_uint16_and_seeds_above_32_bits_are_refused_and_leave_nothing(write, tmp_path):
    with pytest.raises(errors.ConvertError, match="dtype uint16"):
        write(tmp_path / "x.batch", np.full((8, 10), 65536), 4, 10, 1, dtype="uint16")
    for seed in (2**32, 2**64 - 1):
        with pytest.raises(errors.FormatError, match="seed"):
            write(tmp_path / "x.batch", records(8), 4, 10, seed)
        with pytest.raises(errors.FormatError, match="seed"):  # before any work: the records have no end
            write_batch_dataset(tmp_path / "x.batch", iter(int, 1), 8, 4, 10, seed)
    assert list(tmp_path.iterdir()) == []


@each_way
def test_a_file_that_exists_is_replaced_only_on_request(write, path):
    before = path.read_bytes()
    is_refused(errors.ConvertError, lambda: write(path, records(8), 4, 10, 1, overwrite=False), match="exists already")
    assert path.read_bytes() == before
    write(path, records(8), 4, 10, 1, overwrite=True)
    assert len(batches_of(path)) == 2
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name, f"{path.name}.crc32"]


def test_the_suffix_chooses_the_backend(tmp_path):
    with pytest.raises(errors.ConvertError, match=r"expected a name that ends in \.batch or \.h5"):
        open_writer(tmp_path / "x.bin", batch_size=1, seq_len=1)
    with open_writer(tmp_path / "x.bin", batch_size=1, seq_len=1, backend="batch") as writer:
        assert isinstance(writer, BatchFileWriter)


@pytest.mark.parametrize("size", [8, 40, 4095, 4096, 4097, 8192, 8193, SIZE - 4096, SIZE - 1, SIZE + 1, SIZE + 4096])
def test_a_file_that_is_cut_is_incomplete_and_a_longer_one_no_batch_file(size, path):
    os.truncate(path, size)
    message = f"found {size}|found {size:,}" if size < SIZE else f"expected {SIZE:,} bytes, found {size:,}"
    with pytest.raises(errors.FormatError, match=message) as caught:
        open_reader(path)
    assert isinstance(caught.value, errors.IncompleteError) == (size < SIZE)


@pytest.mark.parametrize("size", [0, 27, 29, 32])
def test_a_sidecar_of_another_length_is_a_format_error(size, path):
    path.with_name("x.batch.crc32").write_bytes(bytes(size))
    is_refused(errors.FormatError, lambda: open_reader(path, verify="batch"), match=f"expected 28 bytes, found {size}")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_a_crc32_file_is_a_file(make, tmp_path):
    write_batches(tmp_path / "x.batch", np.zeros((2, 2, 8), np.uint32))
    sidecar = tmp_path / "x.batch.crc32"
    sidecar.unlink()
    make(sidecar)
    message = one_error(run_zb("index", "crc32", tmp_path / "x.batch"))
    assert message == f"{sidecar}: expected a file, found a folder, a FIFO or a device; remove it"
