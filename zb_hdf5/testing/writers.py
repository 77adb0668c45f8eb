"""What every writer must do, whatever its backend."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.columns.writer import BatchWriter, ShardInfo
from zb_hdf5.errors import ArgumentError, ClosedError, ConvertError
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.opening import open_reader
from zb_hdf5.testing.readers import check_reader
from zb_hdf5.testing.refusals import refuses

#: Returns the batches of what was finished, and their digest.
ReadBack: TypeAlias = Callable[[ShardInfo], tuple[TokenArray, str]]


def check_writer(
    make: Callable[[int], BatchWriter], read_back: ReadBack, expected: TokenArray, original: BatchReader
) -> None:
    """What every writer must do.

    `make(number)` begins a new file or store for `expected`; `read_back(info)` returns the batches and the digest of
    what was finished; `original` is a reader of the same batches.
    """
    check_writing(make(0), read_back, expected)
    check_appending(make(6), read_back, expected)
    check_copying(make(1), read_back, expected, original)
    check_writer_refusals(make(2), expected, original)
    check_finishing(make(3), expected)
    check_aborting(make(4), expected)
    left = make(5)
    with refuses(ZeroDivisionError):
        leave_with_an_error(left, expected[0])
    with refuses(ClosedError, match="closed"):
        left.finish()


def check_writer_of_fields(
    make: Callable[[int], BatchWriter], expected: TokenArray, values: Mapping[str, TokenArray]
) -> None:
    """What a writer must do besides, if it was begun with the fields that `values` names, shape `(N, B, S, ...)`.

    `make(number)` begins a new file or store for `expected`.
    """
    writer, first = make(0), {name: array[0] for name, array in values.items()}
    short = {name: array[:, :-1] for name, array in values.items()}
    for bad in (None, {}, first | {"no_such_field": first}, short):
        with refuses(ArgumentError, match="expected"):
            writer.write(expected[0], bad)
    check_written(writer, expected[:0])
    writer.write(expected[0], first)
    check_written(writer, expected[:1])
    writer.write(expected[1:], {name: array[1:] for name, array in values.items()})
    check_written(writer, expected)
    with open_reader(writer.finish().path) as reader:
        check_reader(reader, expected, values)
    left = make(1)
    left.write(expected[0], first)
    left.abort()
    with refuses(ClosedError, match="closed"):
        left.write(expected[0], first)


def leave_with_an_error(writer: BatchWriter, batch: TokenArray) -> None:
    with writer:
        writer.write(batch)
        raise ZeroDivisionError


def check_writing(writer: BatchWriter, read_back: ReadBack, expected: TokenArray) -> None:
    """One batch, several, other integer dtypes; each is counted and digested when `write` returns."""
    check_written(writer, expected[:0])
    writer.write(expected[0])
    check_written(writer, expected[:1])
    writer.write(expected[1:4].astype(np.int64))
    check_written(writer, expected[:4])
    writer.write(expected[4:])
    check_written(writer, expected)
    check_finished(writer, writer.finish(), read_back, expected)


def check_appending(writer: BatchWriter, read_back: ReadBack, expected: TokenArray) -> None:
    """Each batch is committed when `append` returns; its buffer may be filled again when the digests are there."""
    buffers = [np.empty_like(expected[0]) for _ in range(3)]
    waits = [writer.append(expected[:0])] * len(buffers)
    for number, batch in enumerate(expected):
        waits[number % 3]()
        buffers[number % 3][...] = batch
        waits[number % 3] = writer.append(buffers[number % 3])
        check_written(writer, expected[: number + 1])
    check_finished(writer, writer.finish(), read_back, expected)


def check_written(writer: BatchWriter, expected: TokenArray) -> None:
    assert isinstance(writer, BatchWriter)
    assert writer.backend in FORMATS
    assert (writer.meta.shape, writer.meta.dtype) == (expected.shape[1:], expected.dtype)
    assert (writer.num_batches, writer.token_count) == (len(expected), expected.size)
    assert writer.max_token == expected.max(initial=0)
    crc32 = writer.crc32()
    assert crc32.dtype == np.uint32
    assert crc32.tolist() == [zlib.crc32(batch.tobytes()) for batch in expected]
    assert len(writer.sha256()) == 64


def check_finished(writer: BatchWriter, info: ShardInfo, read_back: ReadBack, expected: TokenArray) -> None:
    assert isinstance(info, ShardInfo)
    assert info.path.exists()
    assert info.backend == writer.backend
    counts = (len(expected), expected.size, expected.max(initial=0))
    assert (info.num_batches, info.token_count, info.max_token) == counts
    assert info.sha256 == writer.sha256()
    assert info.crc32.tolist() == writer.crc32().tolist()
    check_written(writer, expected)
    found, sha256 = read_back(info)
    np.testing.assert_array_equal(found, expected)
    assert info.sha256 == sha256


def check_copying(writer: BatchWriter, read_back: ReadBack, expected: TokenArray, original: BatchReader) -> None:
    """Copied by the kernel or not: what `write_from` says is there, and the rest can be written."""
    assert writer.write_from(original, 0, 0) == 0
    done = writer.write_from(original, 0, len(expected) - 1)
    assert 0 <= done < len(expected)
    check_written(writer, expected[:done])
    writer.write(expected[done:])
    check_finished(writer, writer.finish(), read_back, expected)


def check_writer_refusals(writer: BatchWriter, expected: TokenArray, original: BatchReader) -> None:
    """Nothing of what is refused is written, and the writer goes on."""
    writer.write(expected[0])
    shape = expected.shape[1:]
    for bad in (expected[0, 0], expected[:, :, :-1], np.zeros((1, 1, *shape), expected.dtype)):
        with refuses(ArgumentError, match="expected batches of shape"):
            writer.write(bad)
    for bad in (np.full(shape, -1), np.full(shape, 2**40), np.zeros(shape, float)):
        with refuses(ConvertError):
            writer.write(bad)
    for start, count in ((-1, 1), (0, len(expected) + 1), (len(expected), 1)):
        with refuses(ArgumentError, match=r"expected .* batches, found"):
            writer.write_from(original, start, count)
    check_written(writer, expected[:1])
    writer.write(expected[1:])
    assert writer.finish().num_batches == len(expected)


def check_finishing(writer: BatchWriter, expected: TokenArray) -> None:
    """The block finishes what was not finished in it, and nothing can be written any more."""
    with writer as entered:
        assert entered is writer
        writer.write(expected)
    for use in (lambda: writer.write(expected[0]), lambda: writer.write(expected[:0]), writer.finish):
        with refuses(ClosedError, match="closed"):
            use()
    writer.abort()
    writer.close()
    check_written(writer, expected)


def check_aborting(writer: BatchWriter, expected: TokenArray) -> None:
    writer.write(expected[:2])
    writer.abort()
    writer.abort()
    for use in (lambda: writer.write(expected[0]), writer.finish):
        with refuses(ClosedError, match="closed"):
            use()
