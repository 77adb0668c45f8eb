"""The plan of a conversion: its shards, their source files, and whether there is space for them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5 import ArgumentError, ConvertError, StoreMeta
from zb_hdf5.console import format_bytes
from zb_hdf5.converters.journal import FileState, Head
from zb_hdf5.converters.shard import SHARDS, ShardTask, file_states
from zb_hdf5.converters.source import Source
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import DEFAULT_SPLIT, SHARD_PREFIX

DEFAULT_SHARD_BYTES: Final = 1 << 30
PLAN_VERSION: Final = 1


@dataclass(frozen=True)
class Plan:
    """The shards of a conversion into a folder, and their source files.

    Attributes
    ----------
    cuts
        (start, stop) of each shard, in batches.
    files
        Size in bytes and mtime in ns of every source file when the plan was made.
    """

    source: Source
    target: str
    cuts: list[tuple[int, int]]
    files: dict[str, FileState]

    @classmethod
    def make(cls, source: Source, target: str, num_shards: int | None, shard_bytes: int | None) -> Plan:
        """Cut the batches of `source` into shards.

        Raises
        ------
        ConvertError
            If there are fewer batches than shards.
        """
        return cls(source, target, cut_into_shards(source, num_shards, shard_bytes), file_states(source.paths))

    def identity(self) -> dict[str, Any]:
        """Return JSON of all that decides the bytes of the shards, but for the content of the source files."""
        meta = asdict(self.source.meta) | {"dtype": self.source.meta.dtype.name}
        meta["fields"] = {field.name: field.to_json() for field in self.source.meta.fields}
        return {
            "version": PLAN_VERSION,
            "target": self.target,
            "meta": meta,
            "shuffle": self.source.shuffle,
            "source": self.source.description,
            "identity": self.source.identity,
            "cuts": [list(cut) for cut in self.cuts],
            "has_pieces": self.source.has_pieces,
            "documents": [list(part) for part in self.source.document_parts],
        }

    def head(self) -> Head:
        return Head(SHARDS, len(self.cuts), self.identity(), self.files)

    def name(self, shard: int) -> str:
        return f"{SHARD_PREFIX}{shard:05}-of-{len(self.cuts):05}{FORMATS[self.target].suffix}"

    def task(self, shard: int, folder: Path) -> ShardTask:
        """Return the work of one shard."""
        start, stop = self.cuts[shard]
        meta, documents = self._shard_meta(shard), self._shard_documents(shard)
        splits = self.source.shard_splits or [DEFAULT_SPLIT]
        split = splits[shard] if len(splits) == len(self.cuts) else splits[0]
        in_store = FORMATS[self.target].indexed
        path = folder / self.name(shard)
        return ShardTask(self.source, self.target, path, start, stop, meta, in_store, split, documents)

    def _shard_meta(self, shard: int) -> StoreMeta:
        """Describe one shard: its part of `total_records`, so that the parts of all shards add up to the whole."""
        meta, (start, stop) = self.source.meta, self.cuts[shard]
        records = (stop - start) * meta.batch_size
        if self.source.shard_records and self._keeps_shards:
            records = self.source.shard_records[shard]
        elif stop == self.source.num_batches:
            records = max(0, meta.total_records - start * meta.batch_size)
        documents = self._shard_documents(shard) or 0
        return replace(meta, total_records=records if meta.total_records else 0, document_count=documents)

    def _shard_documents(self, shard: int) -> int | None:
        """Return how many documents begin in a shard; None if that is not known."""
        known = self.source.shard_documents
        return known[shard] if known and self._keeps_shards else None

    @cached_property
    def _keeps_shards(self) -> bool:
        """Whether the shards are those of the source."""
        return self.cuts == list(pairwise([0, *np.cumsum(self.source.shard_batches).tolist()]))

    def shard_bytes(self, shard: int) -> int:
        """Return about how much disk a shard takes."""
        start, stop = self.cuts[shard]
        return FORMATS[self.target].total_bytes(self.source.meta, stop - start)

    def num_inodes(self) -> int:
        """Return how many files and folders the conversion makes."""
        row, source = FORMATS[self.target], self.source
        per_shard = 1 + row.has_sidecar + source.has_pieces
        return per_shard * len(self.cuts) + len(source.document_parts) + 3  # the folder, its index, the journal


def cut_into_shards(source: Source, num_shards: int | None, shard_bytes: int | None) -> list[tuple[int, int]]:
    """Return (start, stop) of each shard, in batches: consecutive, and none empty."""
    total = source.num_batches
    if num_shards is not None and shard_bytes is not None:
        raise ArgumentError("pass either a number of shards or their size, not both")
    if num_shards is not None or shard_bytes is not None:
        require_one_split(source, "leave out --shards and --shard-size")
    if num_shards is None and shard_bytes is None and source.shard_batches:
        return list(pairwise([0, *np.cumsum(source.shard_batches).tolist()]))
    if num_shards is None:
        per_shard = max(1, (shard_bytes or DEFAULT_SHARD_BYTES) // source.meta.batch_bytes)
        num_shards = max(1, -(-total // per_shard))
    if num_shards > total:
        raise ConvertError(f"{total:,} batches cannot fill {num_shards:,} shards; pass a smaller --shards")
    return [(k * total // num_shards, (k + 1) * total // num_shards) for k in range(num_shards)]


def require_one_split(source: Source, remedy: str) -> None:
    """Raise `ConvertError` if shards of several splits would be mixed."""
    splits = list(dict.fromkeys(source.shard_splits))
    if len(splits) > 1:
        raise ConvertError(f"the source has the splits {', '.join(splits)}, which must not be mixed: {remedy}")


def require_room(folder: Path, needed_bytes: int, num_inodes: int) -> None:
    """Raise `ConvertError` unless the file system of `folder` has space for the bytes that will be written."""
    free = free_room(folder)
    if needed_bytes > free["bytes"]:
        raise ConvertError(
            f"{folder}: needs {format_bytes(needed_bytes)}, free are {format_bytes(free['bytes'])}; make room, or "
            "choose another output"
        )
    if free["inodes"] is not None and num_inodes > free["inodes"]:
        raise ConvertError(f"{folder}: needs {num_inodes:,} inodes, free are {free['inodes']:,}; use fewer shards")


def free_room(folder: Path) -> dict[str, Any]:
    """Return free bytes and inodes for this user; None where the file system does not count inodes."""
    status = os.statvfs(folder)
    return {"bytes": status.f_bavail * status.f_frsize, "inodes": status.f_favail if status.f_files else None}
