"""A store: a folder of shards and the `shards.json` that says what they are. The folder's listing says nothing.

`ShardIndex` is the file; `ShardedReader` is a reader over the shards' readers.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
from bisect import bisect_right
from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, BackendError, FormatError, IncompleteError
from zb_hdf5.publish import write_atomically
from zb_hdf5.reader import BatchReader, require_options
from zb_hdf5.source import BatchSource
from zb_hdf5.spec import (
    INDEX_FORMAT,
    INDEX_NAME,
    INDEX_VERSION,
    StoreMeta,
    TokenArray,
    combine_sha256,
    content_fingerprint,
    is_sha256,
    stored_dtype,
)
from zb_hdf5.store import BACKENDS

#: Shards that one reader holds open; a shard beyond that costs one open(2) when it is next read.
MAX_OPEN_SHARDS: Final = 128


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the index. `path` is relative to the folder, with "/" between parts."""

    path: str
    backend: str
    num_batches: int
    token_count: int
    sha256: str
    document_count: int = 0
    split: str = "train"
    complete: bool = True

    @classmethod
    def from_json(cls, value: Any, where: str) -> Self:
        """Check one element of `shards`."""
        if not (isinstance(value, dict) and _has_types(value, ENTRY_TYPES)):
            for key, kind in ENTRY_TYPES.items():
                _field(value, key, kind, where)  # says which one is wrong
        entry = cls(**{key: value[key] for key in ENTRY_TYPES})
        parts = entry.path.split("/")
        if not parts[0] or ".." in parts or not parts[-1]:
            raise FormatError(f"{where}: path {entry.path!r} leaves the folder of the store")
        if entry.document_count < 0:
            raise FormatError(f"{where}: expected document_count >= 0, found {entry.document_count}")
        if entry.backend not in BACKENDS:
            raise FormatError(f"{where}: expected backend {' or '.join(BACKENDS)}, found {entry.backend!r}")
        if not is_sha256(entry.sha256):
            raise FormatError(f"{where}: expected 64 hexadecimal digits in sha256, found {entry.sha256!r}")
        return entry


#: The keys of an entry, and the JSON types of their values.
ENTRY_TYPES: Final = {
    "path": str, "backend": str, "num_batches": int, "token_count": int, "sha256": str, "document_count": int,
    "split": str, "complete": bool,
}  # fmt: skip


@dataclass(frozen=True)
class ShardIndex:
    """The content of a `shards.json`.

    Attributes
    ----------
    meta
        What all shards share; `total_records` counts the records of the whole store.
    shards
        In batch order.
    shuffle
        Name of the record shuffle at write time, or "none".
    source
        Where the tokens came from; free JSON for people.
    """

    meta: StoreMeta
    shards: tuple[ShardEntry, ...]
    shuffle: str = "none"
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def num_batches(self) -> int:
        return sum(shard.num_batches for shard in self.shards)

    @property
    def sha256(self) -> str:
        """Digest of the store: over the shard digests, in order."""
        return combine_sha256(shard.sha256 for shard in self.shards)

    def to_json(self) -> str:
        """Return the text of the file."""
        meta = self.meta
        content = {
            "format": INDEX_FORMAT,
            "version": INDEX_VERSION,
            "layout": "batches",
            "dtype": meta.dtype.name,
            "batch_size": meta.batch_size,
            "seq_len": meta.seq_len,
            "seed": meta.seed,
            "shuffle": self.shuffle,
            "total_records": meta.total_records,
            "document_count": meta.document_count,
            "vocab_size": meta.vocab_size,
            "token_count": sum(shard.token_count for shard in self.shards),
            "tokenizer": json.loads(meta.tokenizer) if meta.tokenizer else None,
            "source": self.source,
            "sha256": self.sha256,
            "shards": [asdict(shard) for shard in self.shards],
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """Parse and check the text of a `shards.json`.

        Raises
        ------
        FormatError
            If it is not JSON, lacks a key, holds a value of another type, or contradicts itself.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path}: not JSON: {error}; restore it from a copy, or convert again") from error
        where = str(path)
        for key, expected in (("format", INDEX_FORMAT), ("version", INDEX_VERSION), ("layout", "batches")):
            found = _field(value, key, type(expected), where)
            if found != expected:
                raise FormatError(f"{where}: expected {key} {expected!r}, found {found!r}")
        entries = enumerate(_field(value, "shards", list, where))
        shards = tuple(ShardEntry.from_json(entry, f"{where}: shards[{i}]") for i, entry in entries)
        source = _field(value, "source", dict, where)
        index = cls(_index_meta(value, where), shards, _field(value, "shuffle", str, where), source)
        index._check_totals(value, where)
        return index

    def require_agreement(self, reader: BatchReader, entry: ShardEntry) -> None:
        """Raise `FormatError` if a shard is not what its entry says."""
        expected = {
            "num_batches": (entry.num_batches, reader.num_batches),
            "shape": (self.meta.shape, reader.meta.shape),
            "dtype": (self.meta.dtype, reader.dtype),
            "sha256": (entry.sha256, reader.sha256 or entry.sha256),
        }
        for name, (in_index, in_shard) in expected.items():
            if in_index != in_shard:
                raise FormatError(f"{reader.path}: {INDEX_NAME} says {name} {in_index}, the shard says {in_shard}")

    def _check_totals(self, value: dict[str, Any], where: str) -> None:
        for number, shard in enumerate(self.shards):
            expected = shard.num_batches * self.meta.batch_tokens
            if shard.num_batches < 0 or shard.token_count != expected:
                raise FormatError(
                    f"{where}: shards[{number}] ({shard.path}): expected {expected:,} tokens in {shard.num_batches:,} "
                    f"batches, found {shard.token_count:,}"
                )
        if not self.shards:
            raise FormatError(f"{where}: lists no shards")
        for key, found in (("sha256", self.sha256), ("token_count", sum(s.token_count for s in self.shards))):
            if value.get(key) != found:
                raise FormatError(f"{where}: expected {key} {value.get(key)!r}, its shards give {found!r}")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a `shards.json`, given itself or its folder."""
        path = path / INDEX_NAME if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise FormatError(
                f"{path.parent}: no {INDEX_NAME}: not a store, or its conversion did not finish; convert again"
            ) from error
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not JSON: {error}; restore it from a copy, or convert again") from error
        return cls.from_json(text, path)

    def save(self, folder: Path) -> None:
        """Write `shards.json` into `folder`, atomically."""
        write_atomically(folder / INDEX_NAME, self.to_json().encode("utf-8"))


class ShardedReader(BatchReader):
    """Reads a store as one sequence of batches. See `BatchReader` for what it offers.

    Opening reads `shards.json` and the first shard; every other shard is opened when it is first read.

    Parameters
    ----------
    path
        The folder, or its `shards.json`.
    backend
        "auto", or the backend that every shard must have.
    access
        As for `open_reader`.
    verify
        "none" or "batch"; `verify_store` checks a whole store at once.

    Raises
    ------
    FormatError
        If the index is malformed or names a file that is not there; also when a shard, at its first read, is not
        what the index says.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, backend: str = "auto", access: str = "auto", verify: str = "none"
    ) -> None:
        require_options(access, verify)
        path = Path(path)
        index = ShardIndex.load(path)
        folder = path if path.is_dir() else path.parent
        _require_files(folder, index)
        for shard in index.shards:
            if backend not in ("auto", shard.backend):
                raise BackendError(f"{folder / shard.path}: asked for backend {backend!r}, found {shard.backend!r}")
        source = ShardedSource(folder, index, access, verify)
        super().__init__(folder, index.meta, index.num_batches, source)
        self.index = index
        self.backend = " and ".join(sorted({shard.backend for shard in index.shards}))
        self.sha256 = index.sha256

    def _compute_fingerprint(self) -> str:
        return content_fingerprint((shard.sha256 for shard in self.index.shards), self.meta)


class ShardedSource:
    """Finds the shard of a batch in O(log shards), and keeps a bounded number of shards open.

    A hit takes no lock. A shard that must make room is only let go of: its descriptor closes when the last thread that
    still reads from it has finished, and its layout is kept, so that opening it again needs no look into HDF5.
    """

    def __init__(self, folder: Path, index: ShardIndex, access: str, verify: str) -> None:
        self._folder, self._index, self._access, self._verify = folder, index, access, verify
        self._starts = [0, *accumulate(shard.num_batches for shard in index.shards)]
        self._parked: dict[int, bytes] = {}
        self._reset()
        self.access = self._source(0).access

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._sources: list[BatchSource | None] = [None] * len(self._index.shards)
        self._opened: deque[int] = deque()

    def read(self, index: int) -> TokenArray:
        shard = bisect_right(self._starts, index) - 1
        return (self._sources[shard] or self._source(shard)).read(index - self._starts[shard])

    def read_into(self, index: int, out: TokenArray) -> None:
        shard = bisect_right(self._starts, index) - 1
        (self._sources[shard] or self._source(shard)).read_into(index - self._starts[shard], out)

    def read_range_into(self, start: int, out: TokenArray) -> None:
        done = 0
        while done < len(out):
            shard = bisect_right(self._starts, start + done) - 1
            take = min(len(out) - done, self._starts[shard + 1] - start - done)
            self._source(shard).read_range_into(start + done - self._starts[shard], out[done : done + take])
            done += take

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        per_batch = self._index.meta.batch_tokens // out.shape[1]
        starts = np.array(self._starts) * per_batch
        shards = np.searchsorted(starts, records, side="right") - 1
        for shard in np.unique(shards).tolist():
            here = np.flatnonzero(shards == shard)
            if len(here) == len(records):
                self._source(shard).gather_into(records - starts[shard], out)
            else:
                rows = np.empty((len(here), out.shape[1]), out.dtype)
                self._source(shard).gather_into(records[here] - starts[shard], rows)
                out[here] = rows

    def read_private(self, index: int) -> TokenArray:
        shard = bisect_right(self._starts, index) - 1
        return self._source(shard).read_private(index - self._starts[shard])

    def will_need(self, index: int) -> None:
        shard = bisect_right(self._starts, index) - 1
        self._source(shard).will_need(index - self._starts[shard])

    def is_cached(self, index: int) -> bool:
        shard = bisect_right(self._starts, index) - 1
        return self._source(shard).is_cached(index - self._starts[shard])

    def _source(self, shard: int) -> BatchSource:
        with self._lock:
            source = self._sources[shard]
            if source is None:
                parked = self._parked.pop(shard, None)
                source = pickle.loads(parked) if parked else self._open_shard(shard)
                if len(self._opened) == MAX_OPEN_SHARDS:
                    self._park(self._opened.popleft())
                self._opened.append(shard)
                self._sources[shard] = source
        return source

    def _open_shard(self, shard: int) -> BatchSource:
        entry = self._index.shards[shard]
        reader = BACKENDS[entry.backend].reader_class()(
            self._folder / entry.path, access=self._access, verify=self._verify
        )
        if not (entry.complete and reader.complete):
            raise IncompleteError(f"{reader.path}: its writer has not finished; convert again")
        self._index.require_agreement(reader, entry)
        return reader._source

    def _park(self, shard: int) -> None:
        self._parked[shard] = pickle.dumps(self._sources[shard])
        self._sources[shard] = None

    def close(self) -> None:
        for source in self._sources:
            if source is not None:
                source.close()
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            parked = self._parked | {i: pickle.dumps(s) for i, s in enumerate(self._sources) if s is not None}
        kept = {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_sources", "_opened")}
        return kept | {"_parked": parked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def _require_files(folder: Path, index: ShardIndex) -> None:
    """Raise `FormatError` if a shard is missing: one listing per folder, no stat per shard."""
    present = {
        parent: set(os.listdir(folder / parent)) if (folder / parent).is_dir() else set()
        for parent in {shard.path.rpartition("/")[0] for shard in index.shards}
    }
    missing = [s.path for s in index.shards if (p := s.path.rpartition("/"))[2] not in present[p[0]]]
    if missing:
        raise FormatError(
            f"{folder / INDEX_NAME}: names {missing[0]}, which is not there ({len(missing)} of {len(index.shards)} "
            "shards are missing); restore them, or convert again"
        )


def _index_meta(value: dict[str, Any], where: str) -> StoreMeta:
    names = ("batch_size", "seq_len", "seed", "total_records", "document_count", "vocab_size")
    tokenizer = value.get("tokenizer")
    if tokenizer is not None and not isinstance(tokenizer, dict):
        raise FormatError(f"{where}: tokenizer: expected an object or null, found {tokenizer!r}")
    try:
        return StoreMeta(
            dtype=stored_dtype(_field(value, "dtype", str, where)),
            tokenizer=json.dumps(tokenizer) if tokenizer else "",
            **{name: _field(value, name, int, where) for name in names},
        )
    except ArgumentError as error:
        raise FormatError(f"{where}: {error}") from error


def _has_types(value: dict[str, Any], types: dict[str, type[Any]]) -> bool:
    return [type(value.get(key)) for key in types] == list(types.values())


def _field(value: Any, key: str, kind: type[Any], where: str) -> Any:
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(value).__name__}")
    if key not in value:
        raise FormatError(f"{where}: key {key!r} is missing")
    found = value[key]
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise FormatError(f"{where}: {key}: expected {kind.__name__}, found {found!r}")
    return found
