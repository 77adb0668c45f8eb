"""The pipe between formats: a source of batches, a plan of shards, a writer per shard, and a report that adds up.

A new format is one file in this folder and one row in `FORMATS`: there is no code per pair of formats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5 import (
    ArgumentError,
    BatchWriter,
    ChecksumError,
    ConvertError,
    ShardEntry,
    ShardIndex,
    ShardInfo,
    StoreMeta,
)
from zb_hdf5.publish import PartialDirectory, write_atomically
from zb_hdf5.reader import GROUP_BYTES
from zb_hdf5.spec import CRC32_SUFFIX, SHARD_PREFIX, TokenArray

DEFAULT_SHARD_BYTES: Final = 1 << 30
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Format:
    """A row of the registry.

    Attributes
    ----------
    suffix
        Of one file.
    writer
        "module:class" of its `BatchWriter`.
    indexed
        Whether a folder of such files is a store with a `shards.json`.
    """

    suffix: str
    writer: str
    indexed: bool

    def writer_class(self) -> type[BatchWriter]:
        module, _, name = self.writer.partition(":")
        return cast(type[BatchWriter], getattr(import_module(module), name))


FORMATS: Final = {
    "npy": Format(".npy", "converters.npy_file:NpyWriter", indexed=False),
    "hdf5": Format(".h5", "zb_hdf5:HDF5BatchWriter", indexed=True),
    "batch": Format(".batch", "zb_hdf5:BatchFileWriter", indexed=True),
}


@dataclass
class Accounts:
    """Where the tokens went: `tokens_in + padded == stored + dropped` or the conversion is wrong."""

    tokens_in: int = 0
    padded: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, tokens: int) -> None:
        """Count tokens that are not stored."""
        if tokens:
            self.dropped[reason] = self.dropped.get(reason, 0) + tokens

    def settle(self, stored: int) -> None:
        """Raise `ConvertError` unless the accounts balance."""
        if self.tokens_in + self.padded != stored + sum(self.dropped.values()):
            raise ConvertError(
                f"internal error: {self.tokens_in:,} tokens in + {self.padded:,} padded != {stored:,} stored + "
                f"{self.dropped} dropped; please report this"
            )


class Source(Protocol):
    """Batches to convert, in their final order.

    Attributes
    ----------
    meta
        Shape, dtype and origin of what will be stored.
    num_batches
        How many batches there are.
    shuffle
        Name of the record shuffle behind the order, or "none".
    shard_batches
        Batches per shard where the source has shards of its own, else empty.
    accounts
        Complete before the first batch is read.
    description
        For the `source` entry of `shards.json`.
    paths
        The files and folders that are read; the destination may not replace them.
    """

    meta: StoreMeta
    num_batches: int
    shuffle: str
    shard_batches: list[int]
    accounts: Accounts
    description: dict[str, Any]
    paths: list[Path]

    def read_into(self, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S)` of the stored dtype, with consecutive batches."""

    def sha256_of(self, start: int, stop: int) -> str | None:
        """Return the digest that the source has stored for these batches, or None."""

    def crc32_of(self, start: int, stop: int) -> npt.NDArray[np.uint32] | None:
        """Return the crc32 rows that the source has stored for these batches, or None."""

    def check_reads(self) -> None:
        """Compare each batch with its own digest as it is read, where the source has one: no `sha256_of` will do it."""


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    destination: Path
    meta: StoreMeta
    num_batches: int
    shards: list[ShardInfo]
    sha256: str
    accounts: Accounts
    seconds: float

    @property
    def tokens_stored(self) -> int:
        return self.num_batches * self.meta.batch_tokens


def convert(
    source: Source,
    target: str,
    destination: Path,
    *,
    num_shards: int | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda tokens: None,
) -> Report:
    """Write all batches of `source` to one file, or to a folder of shards.

    Parameters
    ----------
    target
        A name in `FORMATS`.
    destination
        One file if it ends in the format's suffix, else a folder.
    num_shards, shard_bytes
        How to cut a folder into shards; by default as the source is cut, or into shards of 1 GiB.
    overwrite
        Replace what exists, at the end and whole.
    progress
        Called with the number of tokens written since the last call.

    Raises
    ------
    ConvertError
        If the destination exists, or the source cannot be converted as asked. Nothing is left behind.
    """
    start_s = time.monotonic()
    row = FORMATS[target]
    _refuse_source_as_destination(source, destination)
    if destination.suffix == row.suffix:
        if num_shards or shard_bytes:
            raise ConvertError(f"{destination}: is one file; name a folder (no {row.suffix}) to write shards")
        cut = (0, source.num_batches)
        _prepare_checks(source, [cut])
        shards = [_write_file(source, row, destination, cut, source.meta, overwrite, progress)]
        sha256 = shards[0].sha256
    elif destination.suffix in {*(other.suffix for other in FORMATS.values()), ".hdf5", ".hdf", ".he5", ".npz"}:
        raise ConvertError(f"{destination}: expected a folder or a name that ends in {row.suffix}")
    else:
        cuts = plan_shards(source, num_shards, shard_bytes)
        _prepare_checks(source, cuts)
        shards, sha256 = _write_folder(source, row, destination, cuts, overwrite, progress)
    source.accounts.settle(sum(shard.token_count for shard in shards))
    seconds = time.monotonic() - start_s
    return Report(destination, source.meta, source.num_batches, shards, sha256, source.accounts, seconds)


def _refuse_source_as_destination(source: Source, destination: Path) -> None:
    place = destination.resolve()
    for path in source.paths:
        if place == path.resolve() or place in path.resolve().parents:
            raise ConvertError(f"{destination}: is or holds the source {path}; choose another output")


def plan_shards(source: Source, num_shards: int | None, shard_bytes: int | None) -> list[tuple[int, int]]:
    """Return (start, stop) of each shard, in batches: consecutive, and none empty.

    Raises
    ------
    ConvertError
        If there are fewer batches than shards.
    """
    total = source.num_batches
    if num_shards is not None and shard_bytes is not None:
        raise ArgumentError("pass either a number of shards or their size, not both")
    if num_shards is None and shard_bytes is None and source.shard_batches:
        stops = np.cumsum(source.shard_batches).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))
    if num_shards is None:
        per_shard = max(1, (shard_bytes or DEFAULT_SHARD_BYTES) // source.meta.batch_bytes)
        num_shards = max(1, -(-total // per_shard))
    if num_shards > total:
        raise ConvertError(f"{total:,} batches cannot fill {num_shards:,} shards; pass a smaller --shards")
    return [(k * total // num_shards, (k + 1) * total // num_shards) for k in range(num_shards)]


def _write_folder(
    source: Source, row: Format, destination: Path, cuts: list[tuple[int, int]], overwrite: bool, progress: Progress
) -> tuple[list[ShardInfo], str]:
    shards = []
    with PartialDirectory(destination, overwrite=overwrite) as folder:
        for number, cut in enumerate(cuts):
            path = folder.partial_path / f"{SHARD_PREFIX}{number:05}-of-{len(cuts):05}{row.suffix}"
            meta = _shard_meta(source, cut)
            info = _write_file(source, row, path, cut, meta, False, progress)
            if info.backend == "batch":  # an HDF5 shard holds its crc32 rows itself
                write_atomically(path.with_name(path.name + CRC32_SUFFIX), info.crc32.tobytes())
            shards.append(info)
        index = ShardIndex(source.meta, tuple(map(_entry, shards)), source.shuffle, source.description)
        if row.indexed:
            index.save(folder.partial_path)
    return shards, index.sha256


def _shard_meta(source: Source, cut: tuple[int, int]) -> StoreMeta:
    """Describe one shard: its part of `total_records`, so that the parts of all shards add up to the whole."""
    start, stop = cut
    records = (stop - start) * source.meta.batch_size
    if stop == source.num_batches:
        records = max(0, source.meta.total_records - start * source.meta.batch_size)
    return replace(source.meta, total_records=records if source.meta.total_records else 0)


def _entry(info: ShardInfo) -> ShardEntry:
    return ShardEntry(info.path.name, info.backend, info.num_batches, info.token_count, info.sha256)


def _write_file(
    source: Source,
    row: Format,
    path: Path,
    cut: tuple[int, int],
    meta: StoreMeta,
    overwrite: bool,
    progress: Progress,
) -> ShardInfo:
    start, stop = cut
    sha256, crc32 = source.sha256_of(start, stop), source.crc32_of(start, stop)
    # a copy whose every batch has the crc32 of the original has its sha256 too: hashing is what takes longest
    known = None if crc32 is None else sha256
    with row.writer_class()(
        path, meta, expected_batches=stop - start, overwrite=overwrite, known_sha256=known
    ) as writer:
        for batches in _read_ahead(source, start, stop):
            writer.write(batches)
            progress(batches.size)
        _require_intact(writer, cut, sha256, crc32)
        return writer.finish()


def _require_intact(
    writer: BatchWriter, cut: tuple[int, int], sha256: str | None, crc32: npt.NDArray[np.uint32] | None
) -> None:
    """Raise `ChecksumError` if what was read is not what the source says it holds."""
    start, stop = cut
    remedy = "run 'zb verify' on the source: copying would hide the damage"
    if crc32 is not None:
        found = writer.crc32()
        for bad in np.flatnonzero(found != crc32)[:1].tolist():
            raise ChecksumError(
                f"batch {start + bad:,} of the source: expected crc32 {crc32[bad]:08x}, "
                f"found {found[bad]:08x}; {remedy}"
            )
    if sha256 not in (None, writer.sha256()):
        raise ChecksumError(
            f"batches {start:,} to {stop - 1:,} of the source: expected sha256 {sha256}, "
            f"found {writer.sha256()}; {remedy}"
        )


def _prepare_checks(source: Source, cuts: list[tuple[int, int]]) -> None:
    """Make sure that damage in the source is found: by whole shards where they stay whole, else batch by batch."""
    if any(source.sha256_of(*cut) is None for cut in cuts):
        source.check_reads()


def _read_ahead(source: Source, start: int, stop: int) -> Iterator[TokenArray]:
    """Yield groups of batches; while one is written, the next is read. Each is valid until the next is asked for."""
    group = max(1, GROUP_BYTES // source.meta.batch_bytes)
    buffers = [np.empty((min(group, stop - start), *source.meta.shape), source.meta.dtype) for _ in range(2)]

    def read(number: int, first: int) -> TokenArray:
        out = buffers[number % 2][: min(group, stop - first)]
        source.read_into(first, out)
        return out

    with ThreadPoolExecutor(1, thread_name_prefix="zb-convert-read") as thread:
        pending = thread.submit(read, 0, start)
        for number, first in enumerate(range(start, stop, group), 1):
            batches = pending.result()
            if first + group < stop:
                pending = thread.submit(read, number, first + group)
            yield batches
