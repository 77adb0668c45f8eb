"""What every reader must do, whatever its backend and access."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.errors import ArgumentError, BatchIndexError, ClosedError
from zb_hdf5.spec import TokenArray
from zb_hdf5.testing.refusals import refuses


def check_reader(reader: BatchReader, expected: TokenArray, fields: Mapping[str, TokenArray] | None = None) -> None:
    """Check everything that leaves the reader open; `check_read_only_buffers` and `check_byte_order` come apart.

    `fields` has the values of each field that is stored, shape `(N, B, S, ...)`.
    """
    check_description(reader, expected)
    check_read_batch(reader, expected)
    check_torch(reader, expected)
    check_read_into(reader, expected)
    check_read_into_refusals(reader, expected)
    check_read_batches_into(reader, expected)
    check_read_batches_into_refusals(reader, expected)
    check_records(reader, expected)
    check_int32(reader, expected)
    check_hints(reader, expected)
    check_indices(reader, expected)
    check_sequence(reader, expected)
    check_pickling(reader, expected)
    check_fields(reader, fields or {})


def check_fields(reader: BatchReader, expected: Mapping[str, TokenArray]) -> None:
    """The values of a field are read like tokens; where each chunk has a crc32, it is the right one."""
    assert [field.name for field in reader.meta.fields] == sorted(expected)
    for field in reader.meta.fields:
        values, found = expected[field.name], reader.field(field.name)
        assert reader.field(field.name) is found
        assert (found.meta.field, found.dtype) == (field, values.dtype)
        batches = values.reshape(len(values), *found.meta.shape)
        check_sequence(found, batches)
        check_read_batches_into(found, batches)
        numbers = np.random.default_rng(0).integers(0, found.num_records, 23)
        out = np.zeros((len(numbers), found.seq_len), found.dtype)
        found.read_records_into(numbers, out)
        np.testing.assert_array_equal(out, batches.reshape(-1, found.seq_len)[numbers])
        crc32 = found.stored_crc32()
        if crc32 is not None:  # a store leaves them to its shards
            assert crc32.tolist() == [zlib.crc32(batch.tobytes()) for batch in batches]
    with refuses(ArgumentError, match="expected a field"):
        reader.field("no_such_field")


def check_description(reader: BatchReader, expected: TokenArray) -> None:
    num_batches, batch_size, seq_len = expected.shape
    assert (reader.num_batches, reader.batch_size, reader.seq_len) == (num_batches, batch_size, seq_len)
    assert reader.dtype == expected.dtype
    assert reader.meta.shape == (batch_size, seq_len)
    assert reader.complete
    assert reader.refresh() == num_batches
    assert reader.access in ("auto", "mmap", "pread", "h5py", "remote")
    assert str(num_batches) in repr(reader)
    assert reader.fingerprint == reader.fingerprint


def check_read_batch(reader: BatchReader, expected: TokenArray) -> None:
    for index, batch in enumerate(expected):
        found = reader.read_batch(index)
        assert found.shape == batch.shape
        assert found.dtype == batch.dtype
        np.testing.assert_array_equal(found, batch)
        assert not found.flags.writeable
        with refuses(ValueError, match="read-only"):
            found[0, 0] = 1
    first, last = reader.read_batch(0), reader.read_batch(len(expected) - 1)  # neither overwrites the other
    np.testing.assert_array_equal(first, expected[0])
    np.testing.assert_array_equal(last, expected[-1])


def check_torch(reader: BatchReader, expected: TokenArray) -> None:
    import torch  # not needed by a spawned process that imports this module

    kept = [reader.read_batch_torch(index) for index in range(len(expected))]
    for found, batch in zip(kept, expected, strict=True):
        assert found.dtype == torch.int64
        assert tuple(found.shape) == batch.shape
        np.testing.assert_array_equal(found.numpy(), batch.astype(np.int64))
    kept[0].zero_()  # the caller's own copy
    np.testing.assert_array_equal(reader.read_batch(0), expected[0])


def check_read_into(reader: BatchReader, expected: TokenArray) -> None:
    """The stored dtype, its signed twin (the same bits) and int64 (the same values)."""
    stored = expected.dtype
    for dtype in (stored, np.dtype(f"i{stored.itemsize}"), np.dtype(np.int64)):
        for index, batch in enumerate(expected):
            out = np.full(batch.shape, 7, dtype)
            reader.read_into(index, out)
            np.testing.assert_array_equal(out, batch.astype(dtype))


def check_read_into_refusals(reader: BatchReader, expected: TokenArray) -> None:
    shape, stored = expected.shape[1:], expected.dtype
    other_size = np.dtype("u2" if stored.itemsize == 4 else "u4")
    for out in (
        np.zeros((shape[0] + 1, shape[1]), stored),
        np.zeros((shape[0], shape[1] + 1), stored),
        np.zeros(shape[0] * shape[1], stored),
        np.zeros((1, *shape), stored),
        *with_gaps(shape, stored),
        *(np.zeros(shape, dtype) for dtype in ("f4", "f8", "u8", "i1", ">i8", other_size)),
    ):
        before = out.copy()
        with refuses(ArgumentError, match="read_into needs"):
            reader.read_into(0, out)
        np.testing.assert_array_equal(out, before)


def with_gaps(shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[npt.NDArray[Any]]:
    """Return one array of that shape that is not contiguous; none for a single token, which has no gaps."""
    array = np.zeros((shape[0], 2 * shape[1]), dtype)[:, ::2]
    return [] if array.flags.c_contiguous else [array]


def check_read_batches_into(reader: BatchReader, expected: TokenArray) -> None:
    num_batches = len(expected)
    for start in range(num_batches):
        for count in range(num_batches - start + 1):
            out = np.zeros((count, *expected.shape[1:]), expected.dtype)
            reader.read_batches_into(start, out)
            np.testing.assert_array_equal(out, expected[start : start + count])


def check_read_batches_into_refusals(reader: BatchReader, expected: TokenArray) -> None:
    shape, stored, num_batches = expected.shape[1:], expected.dtype, len(expected)
    for start, count in ((-1, 1), (num_batches, 1), (0, num_batches + 1), (num_batches - 1, 2)):
        with refuses(BatchIndexError):
            reader.read_batches_into(start, np.zeros((count, *shape), stored))
    for out in (
        np.zeros((1, *shape), np.int64),
        np.zeros((1, *shape), stored.newbyteorder(">")),
        np.zeros((1, shape[0], shape[1] + 1), stored),
        *(batch[np.newaxis] for batch in with_gaps(shape, stored)),
    ):
        with refuses(ArgumentError, match="read_batches_into needs"):
            reader.read_batches_into(0, out)


def check_read_only_buffers(reader: BatchReader, expected: TokenArray) -> None:
    reads: list[tuple[Callable[..., None], Any, tuple[int, ...]]] = [
        (reader.read_into, 0, expected.shape[1:]),
        (reader.read_batches_into, 0, (1, *expected.shape[1:])),
        (reader.read_records_into, np.arange(3), (3, expected.shape[2])),
    ]
    for read, first, shape in reads:
        out = np.zeros(shape, expected.dtype)
        out.flags.writeable = False
        with refuses(ArgumentError):
            read(first, out)
        assert not out.any()


def check_byte_order(reader: BatchReader, expected: TokenArray) -> None:
    """A buffer of the other byte order is refused, never filled with swapped tokens."""
    stored = expected.dtype
    for kind in "ui":
        out = np.zeros(expected.shape[1:], f">{kind}{stored.itemsize}")
        with refuses(ArgumentError):
            reader.read_into(0, out)


def check_records(reader: BatchReader, expected: TokenArray) -> None:
    """One record, many in any order, and shorter ones that divide a record."""
    num_batches, batch_size, seq_len = expected.shape
    assert reader.num_records == num_batches * batch_size
    for number, record in enumerate(expected.reshape(-1, seq_len)):
        found = reader.read_record(number)
        np.testing.assert_array_equal(found, record)
        assert not found.flags.writeable
    for bad in (-1, num_batches * batch_size):
        with refuses(BatchIndexError):
            reader.read_record(bad)
    for length in (length for length in range(1, seq_len + 1) if seq_len % length == 0):
        rows = expected.reshape(-1, length)
        for numbers in (
            np.arange(len(rows)),
            np.arange(len(rows))[::-1],
            np.random.default_rng(length).integers(0, len(rows), 23),
            np.arange(0),
        ):
            out = np.zeros((len(numbers), length), expected.dtype)
            reader.read_records_into(numbers, out)
            np.testing.assert_array_equal(out, rows[numbers])
        for numbers in (np.array([0, len(rows)]), np.array([-1, 0])):
            with refuses(BatchIndexError):
                reader.read_records_into(numbers, np.zeros((2, length), expected.dtype))
    for shape, dtype in (((1, seq_len + 1), expected.dtype), ((2, seq_len), expected.dtype), ((1, seq_len), np.int64)):
        with refuses(ArgumentError, match="read_records_into needs"):
            reader.read_records_into(np.arange(1), np.zeros(shape, dtype))


def check_int32(reader: BatchReader, expected: TokenArray) -> None:
    import torch

    for index, batch in enumerate(expected):
        found = reader.read_batch_int32(index)
        assert found.dtype == torch.int32
        np.testing.assert_array_equal(found.numpy(), batch.astype(np.int32))


def check_hints(reader: BatchReader, expected: TokenArray) -> None:
    """They change nothing but speed, and know their limits."""
    for index, batch in enumerate(expected):
        reader.will_need(index)
        assert reader.is_cached(index) in (True, False)
        np.testing.assert_array_equal(reader.read_batch(index), batch)
    if len(expected):
        reader.will_need(0, len(expected))
    for hint in (reader.will_need, reader.is_cached, lambda count: reader.will_need(0, count + 1)):
        with refuses(BatchIndexError):
            hint(len(expected))


def check_indices(reader: BatchReader, expected: TokenArray) -> None:
    num_batches = len(expected)
    out = np.zeros(expected.shape[1:], expected.dtype)
    for bad in (num_batches, -1, -num_batches - 1, 10**30, np.int64(num_batches)):
        for read in (reader.read_batch, reader.read_batch_torch, lambda index: reader.read_into(index, out)):
            with refuses(BatchIndexError, match=f"expected an index in 0..{num_batches - 1:,}"):
                read(bad)
    for bad in (num_batches, -num_batches - 1):
        with refuses(IndexError):
            reader[bad]
    no_numbers: list[Any] = [0.0, "0", None]
    for other in no_numbers:
        with refuses(TypeError):
            reader.read_batch(other)
    for number in (np.int64(num_batches - 1), np.uint8(num_batches - 1)):
        np.testing.assert_array_equal(reader.read_batch(number), expected[-1])
    for back in range(1, num_batches + 1):
        np.testing.assert_array_equal(reader[-back], expected[-back])


def check_sequence(reader: BatchReader, expected: TokenArray) -> None:
    assert len(reader) == len(expected)
    np.testing.assert_array_equal(np.stack(list(reader)), expected)
    np.testing.assert_array_equal(np.stack(list(reader)), expected)  # again from the start


def check_pickling(reader: BatchReader, expected: TokenArray) -> None:
    data = pickle.dumps(reader)
    for _ in range(2):
        with pickle.loads(data) as copy:
            assert type(copy) is type(reader)
            assert (copy.access, copy.fingerprint) == (reader.access, reader.fingerprint)
            np.testing.assert_array_equal(np.stack(list(copy)), expected)
            np.testing.assert_array_equal(copy.read_batch_torch(0).numpy(), expected[0].astype(np.int64))
    np.testing.assert_array_equal(reader.read_batch(0), expected[0])  # the original is as it was


def check_closing(reader: BatchReader, expected: TokenArray) -> None:
    """Close the reader, and check that what it gave away outlives it while nothing else can be had from it."""
    with reader as entered:
        assert entered is reader
        kept = [reader.read_batch(index) for index in range(len(expected))]
    np.testing.assert_array_equal(np.stack(kept), expected)
    out = np.zeros(expected.shape[1:], expected.dtype)
    for use in (
        lambda: reader.read_batch(0),
        lambda: reader[0],
        lambda: reader.read_batch_torch(0),
        lambda: reader.read_into(0, out),
        lambda: reader.read_into(0, out.astype(np.int64)),
        lambda: reader.read_batches_into(0, out[np.newaxis]),
        lambda: reader.read_batch_int32(0),
        lambda: reader.read_record(0),
        lambda: reader.read_records_into(np.arange(len(out)), out),
        lambda: reader.is_cached(0),
        lambda: list(reader),
    ):
        with refuses(ClosedError, match="closed"):
            use()
    reader.close()
    reader.close()
    np.testing.assert_array_equal(np.stack(kept), expected)


def read_everything(reader: BatchReader) -> TokenArray:
    """Return all batches: a function that a spawned process can import."""
    with reader:
        return np.stack(list(reader))
