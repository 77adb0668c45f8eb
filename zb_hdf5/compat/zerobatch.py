"""ZeroBatch v2's own names and arguments, on top of this package: its reader, its loader and its two writers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import GROUP_BYTES
from zb_hdf5.converters.scatter import BucketReader, ScatterPlan, scatter_runs
from zb_hdf5.errors import ConvertError
from zb_hdf5.files.publishing import scratch_directory
from zb_hdf5.formats.batch_header import pack_header
from zb_hdf5.formats.native import BatchFileReader, BatchFileWriter
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.order import write_order
from zb_hdf5.spec import StoreMeta, TokenArray, stored_dtype
from zb_hdf5.token_values import as_stored

__all__ = ["BatchFileReader", "BatchNativeLoader", "write_batch_dataset", "write_batch_file"]


class BatchNativeLoader(Loader[Any]):
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
        Stored dtype: "uint32", or "uint16" for vocabularies up to 65,536: an extension, which other readers of
        `.batch` files take for uint32.

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
    memory_bytes: int = 1 << 30,
) -> int:
    """Write a `.batch` file from a stream of records; the file is byte for byte that of `write_batch_file`.

    The records pass through temporary files of the same size in `<output_path>.scatter.partial/`, written and read in
    sequence, so that neither the memory nor a slow disk limits how many there are.

    Parameters
    ----------
    tokens_iter
        Yields arrays of shape (seq_len,), exactly `total_records` of them.
    total_records
        How many records will come; the shuffle needs to know.
    memory_bytes
        What this process may take together with the program itself, at least about 100 MiB.

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
    plan = ScatterPlan.fit(order, seq_len, meta.dtype, [(0, num_batches * batch_size)], memory_bytes)
    records = _RecordStream(tokens_iter, meta, total_records)
    output_path = Path(output_path)
    scratch = scratch_directory(output_path.with_name(output_path.name + ".scatter"))
    with (
        BatchFileWriter(output_path, meta, expected_batches=num_batches, overwrite=overwrite) as writer,
        scratch as folder,
    ):
        for _ in scatter_runs(plan, range(plan.num_runs), records.read_into, folder):
            pass
        records.require_end()
        buckets = BucketReader(plan, folder)
        group = np.empty((max(1, GROUP_BYTES // meta.batch_bytes), *meta.shape), meta.dtype)
        for start in range(0, num_batches, len(group)):
            batches = group[: num_batches - start]
            buckets.read_into(start * batch_size, batches.reshape(-1, seq_len))
            writer.write(batches)
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


class _RecordStream:
    """Takes records from an iterator, checks them, and insists on exactly as many as were announced."""

    def __init__(self, tokens_iter: Iterable[npt.ArrayLike], meta: StoreMeta, total_records: int) -> None:
        self._records, self._meta, self._total = iter(tokens_iter), meta, total_records

    def read_into(self, first: int, rows: TokenArray) -> None:
        """Fill `rows` with the next records, of which the first has number `first`."""
        for number, row in enumerate(rows, first):
            try:
                record = np.asarray(next(self._records))
            except StopIteration:
                raise ConvertError(f"tokens_iter: expected {self._total:,} records, found {number:,}") from None
            if record.shape != row.shape:
                raise ConvertError(f"record {number:,}: expected shape {row.shape}, found {record.shape}")
            row[...] = as_stored(record, self._meta, f"record {number:,}")

    def require_end(self) -> None:
        """Raise `ConvertError` if there is one more."""
        for _ in self._records:
            raise ConvertError(f"tokens_iter: expected {self._total:,} records, found more")
