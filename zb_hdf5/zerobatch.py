"""ZeroBatch v2's own names and arguments, on top of this package: its loader and its two writers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ConvertError
from zb_hdf5.loader import Loader
from zb_hdf5.native import BatchFileWriter
from zb_hdf5.order import GlobalOrder, write_order
from zb_hdf5.publish import PartialFile, write_fully
from zb_hdf5.reader import GROUP_BYTES
from zb_hdf5.spec import HEADER_BYTES, StoreMeta, TokenArray, as_stored, batch_file_bytes, pack_header, stored_dtype


class BatchNativeLoader(Loader):
    """ZeroBatch v2's loader, under its own name and arguments: a `Loader` with the block shuffle.

    Parameters
    ----------
    path
        A `.batch` file, or anything else that `open_reader` takes.
    block_size
        Consecutive batches that stay together.
    shuffle
        False: as stored.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        block_size: int = 256,
        shuffle: bool = True,
        seed: int = 42,
        epoch: int = 0,
    ) -> None:
        order = "block" if shuffle else "sequential"
        super().__init__(path, shuffle=order, block_size=block_size, seed=seed, epoch=epoch, rank=0, world_size=1)


def write_batch_file(
    output_path: str | os.PathLike[str],
    tokens_array: npt.ArrayLike,
    batch_size: int,
    seq_len: int,
    seed: int,
    *,
    dtype: str = "uint32",
    overwrite: bool = False,
) -> int:
    """Shuffle records, group them into batches, and write a `.batch` file.

    Parameters
    ----------
    output_path
        The file to publish.
    tokens_array
        Shape (num_records, seq_len), any integer dtype. A memory map is gathered from, never loaded whole.
    batch_size, seq_len
        Records per batch, tokens per record. The last `num_records % batch_size` shuffled records are dropped.
    seed
        Of the record shuffle (`order.write_order`).
    dtype
        Stored dtype: "uint32", or "uint16" for vocabularies up to 65,536.

    Returns
    -------
    int
        Number of batches.

    Raises
    ------
    ConvertError
        If the array has another shape, holds an id that does not fit, or has fewer records than one batch.
    """
    tokens = np.asanyarray(tokens_array)
    if tokens.ndim != 2 or tokens.shape[1] != seq_len:
        raise ConvertError(f"tokens_array: expected shape (num_records, {seq_len}), found {tokens.shape}")
    meta, num_batches = _plan(output_path, len(tokens), batch_size, seq_len, seed, dtype)
    order = write_order(len(tokens), seed)
    group = max(1, GROUP_BYTES // meta.batch_bytes)
    with BatchFileWriter(output_path, meta, expected_batches=num_batches, overwrite=overwrite) as writer:
        for start in range(0, num_batches, group):
            stop = min(start + group, num_batches)
            records = order.indices(np.arange(start * batch_size, stop * batch_size))
            writer.write(tokens[records].reshape(-1, batch_size, seq_len))
    return num_batches


def write_batch_dataset(
    output_path: str | os.PathLike[str],
    tokens_iter: Iterable[npt.ArrayLike],
    total_records: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    *,
    dtype: str = "uint32",
    overwrite: bool = False,
) -> int:
    """Write a `.batch` file from a stream of records; the file is byte for byte that of `write_batch_file`.

    Each record goes straight to its shuffled place in the file, so memory stays flat whatever `total_records` is.

    Parameters
    ----------
    tokens_iter
        Yields arrays of shape (seq_len,), exactly `total_records` of them.
    total_records
        How many records will come; the shuffle needs to know.

    Returns
    -------
    int
        Number of batches.

    Raises
    ------
    ConvertError
        If a record has another shape or an id that does not fit, or if more or fewer records come.
    """
    meta, num_batches = _plan(output_path, total_records, batch_size, seq_len, seed, dtype)
    order = write_order(total_records, seed)
    file = PartialFile(output_path, overwrite=overwrite)
    try:
        os.posix_fallocate(file.fd, 0, batch_file_bytes(meta, num_batches))
        for first, records in _record_groups(tokens_iter, meta, total_records):
            _scatter(file.fd, records, first, order, meta, num_batches)
        write_fully(file.fd, pack_header(meta, num_batches), 0)
    except BaseException:
        file.discard()
        raise
    file.publish()
    return num_batches


def _plan(
    path: object, total_records: int, batch_size: int, seq_len: int, seed: int, dtype: str
) -> tuple[StoreMeta, int]:
    meta = StoreMeta(batch_size, seq_len, stored_dtype(dtype), seed, total_records)
    num_batches = total_records // batch_size
    if num_batches == 0:
        raise ConvertError(f"{path}: {total_records:,} records do not fill one batch of {batch_size:,}")
    pack_header(meta, num_batches)
    return meta, num_batches


def _record_groups(
    tokens_iter: Iterable[npt.ArrayLike], meta: StoreMeta, total_records: int
) -> Iterator[tuple[int, TokenArray]]:
    """Yield (number of the first record, checked records) in groups, and insist on exactly `total_records`."""
    group: list[TokenArray] = []
    count = 0
    rows = max(1, GROUP_BYTES // (meta.seq_len * 8))
    for count, item in enumerate(tokens_iter, 1):
        record = np.asarray(item)
        if record.shape != (meta.seq_len,):
            raise ConvertError(f"record {count - 1:,}: expected shape ({meta.seq_len},), found {record.shape}")
        if count > total_records:
            raise ConvertError(f"tokens_iter: expected {total_records:,} records, found more")
        group.append(as_stored(record, meta, f"record {count - 1:,}"))
        if len(group) == rows:
            yield count - len(group), np.stack(group)
            group.clear()
    if count != total_records:
        raise ConvertError(f"tokens_iter: expected {total_records:,} records, found {count:,}")
    if group:
        yield count - len(group), np.stack(group)


def _scatter(fd: int, records: TokenArray, first: int, order: GlobalOrder, meta: StoreMeta, num_batches: int) -> None:
    """Write each record at the place that the shuffle gives it; drop those behind the last whole batch."""
    record_bytes = meta.seq_len * meta.dtype.itemsize
    places = order.positions(np.arange(first, first + len(records)))
    batch, row = np.divmod(places, meta.batch_size)
    offsets = HEADER_BYTES + batch * meta.padded_batch_bytes + row * record_bytes
    for record, offset in zip(records[batch < num_batches], offsets[batch < num_batches].tolist(), strict=True):
        write_fully(fd, record, offset)
