"""The native `.batch` file (ZeroBatch v2): one 4096-byte header, then one page-aligned slot per batch.

Offsets are arithmetic: batch i lies at `4096 + i * padded_batch_bytes`. The format is in `spec.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ConvertError, FormatError, IncompleteError
from zb_hdf5.extents import ExtentFile, Extents, Run, auto_access
from zb_hdf5.order import GlobalOrder, write_order
from zb_hdf5.publish import PartialFile
from zb_hdf5.reader import GROUP_BYTES, BatchReader, require_options
from zb_hdf5.source import CheckedSource
from zb_hdf5.spec import (
    CRC32_SUFFIX,
    HEADER_BYTES,
    StoreMeta,
    TokenArray,
    as_stored,
    batch_file_bytes,
    pack_header,
    stored_dtype,
    unpack_header,
)
from zb_hdf5.writer import BatchWriter, ShardInfo

if TYPE_CHECKING:
    from zb_hdf5.digest import PendingDigest


class BatchFileReader(BatchReader):
    """Reads a `.batch` file. See `BatchReader` for what it offers.

    Parameters
    ----------
    path
        The file.
    access
        "mmap", "pread" or "auto".
    verify
        "batch" needs the `<path>.crc32` that a store keeps beside its shards; "store" digests the whole file first,
        which also turns the sampled fingerprint into one of content.

    Raises
    ------
    FormatError, IncompleteError
        If the header is malformed, or its sizes do not fit the file.
    """

    backend = "batch"

    def __init__(self, path: str | os.PathLike[str], *, access: str = "auto", verify: str = "none") -> None:
        require_options(access, verify)
        path = Path(path)
        if access == "h5py":
            raise ArgumentError(f"{path}: a .batch file is read by mmap or pread, not by h5py")
        meta, num_batches = read_header(path)
        extents = Extents([Run(HEADER_BYTES, meta.padded_batch_bytes, num_batches)], meta.batch_bytes)
        source = ExtentFile(path, extents, meta.shape, meta.dtype, auto_access(path) if access == "auto" else access)
        super().__init__(path, meta, num_batches, source)
        self.extents = extents
        if verify == "batch":
            self._source = CheckedSource(source, meta, read_crc32_file(path, num_batches), path)
        elif verify == "store":
            self.require_sha256()


class BatchFileWriter(BatchWriter):
    """Writes a `.batch` file: slots one after the other, the header at the end."""

    backend: ClassVar[str] = "batch"

    def _begin(self) -> None:
        pack_header(self.meta, 0)  # refuses a seed or total_records that does not fit, before any work
        self._padded = np.zeros(0, dtype=np.uint8)

    def _append(self, batches: TokenArray, digest: PendingDigest) -> None:
        write_fully(self._file.fd, self._slots(batches), batch_file_bytes(self.meta, self.num_batches))
        if self._durable:
            os.fdatasync(self._file.fd)
        self._count(batches, digest.result())

    def _slots(self, batches: TokenArray) -> npt.NDArray[np.uint8]:
        """Return the bytes of the batches' slots, zero padded."""
        raw = batches.view(np.uint8).reshape(len(batches), -1)
        if self.meta.batch_bytes == self.meta.padded_batch_bytes:
            return raw
        if len(self._padded) < len(batches):
            self._padded = np.zeros((len(batches), self.meta.padded_batch_bytes), dtype=np.uint8)
        slots = self._padded[: len(batches)]
        slots[:, : raw.shape[1]] = raw
        return slots

    def _complete(self, info: ShardInfo) -> None:
        write_fully(self._file.fd, pack_header(self.meta, info.num_batches), 0)

    def _release(self) -> None:
        pass


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


def read_header(path: Path) -> tuple[StoreMeta, int]:
    """Return (meta, num_batches) of a `.batch` file whose header fits its size."""
    with open(path, "rb") as file:
        meta, num_batches = unpack_header(file.read(HEADER_BYTES), path)
        size = os.fstat(file.fileno()).st_size
    expected = batch_file_bytes(meta, num_batches)
    if size != expected:
        kind = IncompleteError if size < expected else FormatError
        raise kind(
            f"{path}: the header announces {num_batches:,} batches of {meta.batch_size} x {meta.seq_len} "
            f"{meta.dtype.name}: expected {expected:,} bytes, found {size:,}; write or copy the file again"
        )
    return meta, num_batches


def read_crc32_file(path: Path, num_batches: int) -> npt.NDArray[np.uint32]:
    """Return the crc32 of each batch from `<path>.crc32`.

    Raises
    ------
    FormatError
        If the file is missing or has another length.
    """
    crc32_path = path.with_name(path.name + CRC32_SUFFIX)
    try:
        data = crc32_path.read_bytes()
    except FileNotFoundError as error:
        raise FormatError(f"{path}: has no {crc32_path.name} beside it to verify its batches with") from error
    if len(data) != 4 * num_batches:
        raise FormatError(f"{crc32_path}: expected {4 * num_batches:,} bytes, found {len(data):,}")
    return np.frombuffer(data, dtype="<u4")


def write_fully(fd: int, data: npt.NDArray[Any] | bytes, offset: int) -> None:
    """Write all of `data` at `offset`: one call of the kernel takes less than 2 GiB, and less on a full disk."""
    buffer = memoryview(data).cast("B")
    while buffer:
        written = os.pwrite(fd, buffer, offset)
        buffer, offset = buffer[written:], offset + written
