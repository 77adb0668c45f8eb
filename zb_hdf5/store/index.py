"""The index of a store: the `shards.json` that says what its shards are. The folder's listing says nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Self

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.columns.writer import ShardInfo
from zb_hdf5.core.extents import Extents, Run
from zb_hdf5.core.files import regular
from zb_hdf5.core.publishing import PARTIAL_SUFFIX, partial_path, write_atomically
from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError
from zb_hdf5.formats.registry import BACKENDS
from zb_hdf5.spec import (
    DEFAULT_SPLIT,
    INDEX_FORMAT,
    INDEX_NAME,
    INDEX_VERSION,
    StoreMeta,
    combine_sha256,
    is_sha256,
    stored_dtype,
)

#: No file is larger; what claims to be is damaged.
MAX_BYTES: Final = 2**63
_LAYOUT: Final = re.compile(rb'"layout": "(\w+)"')
#: Before the digest of all that stands before it: the last key of the file.
_CHECK: Final = ',\n "check": "'


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the index.

    Attributes
    ----------
    path
        Relative to the folder, with "/" between parts.
    document_count
        Documents whose first token lies in the shard; None, and no key, where that is not known.
    extents
        Where its batches lie in the file, so that a reader need not ask HDF5; empty where that is not known.
    crc32_ends
        crc32 of its first and last batch: a reader compares them before it takes a file for this shard.
    """

    path: str
    backend: str
    num_batches: int
    token_count: int
    sha256: str
    split: str = DEFAULT_SPLIT
    complete: bool = True
    extents: list[list[int]] = field(default_factory=list)
    crc32_ends: list[int] = field(default_factory=list)
    document_count: int | None = None

    @classmethod
    def of(cls, info: ShardInfo, split: str = DEFAULT_SPLIT, document_count: int | None = None) -> Self:
        """Describe a file that was just written."""
        ends = info.crc32[[0, -1]].tolist() if info.num_batches else []
        return cls(
            info.path.name, info.backend, info.num_batches, info.token_count, info.sha256, split=split,
            extents=[list(run) for run in info.runs], crc32_ends=ends, document_count=document_count,
        )  # fmt: skip

    def file(self, folder: str | os.PathLike[str]) -> Path:
        """Return where its bytes are now: a growing shard's are in its `.partial` until it is published."""
        folder = Path(folder)
        path = folder / self.path
        growing = not self.complete and partial_path(path).exists()
        return partial_path(path) if growing else path

    def to_json(self) -> str:
        """Return one line."""
        content = {key: getattr(self, key) for key in _ENTRY_KEYS if getattr(self, key) is not None}
        content |= {key: value for key in ("extents", "crc32_ends") if (value := getattr(self, key))}
        return json.dumps(content)

    @classmethod
    def from_json(cls, value: Any, where: str) -> Self:
        """Check one element of `shards`."""
        try:
            values = _ENTRY_VALUES(value)
        except (KeyError, TypeError):
            values = ()
        if tuple(map(type, values)) != tuple(ENTRY_TYPES.values()):
            for key, kind in ENTRY_TYPES.items():
                _field(value, key, kind, where)  # says which one is wrong
        # checked by `places` when the shard is opened: there may be a hundred thousand of them
        documents = _field(value, "document_count", int, where) if "document_count" in value else None
        entry = cls(*values, value.get("extents", []), value.get("crc32_ends", []), documents)  # type: ignore[call-arg]
        require_inside(entry.path, where)
        if documents is not None and documents < 0:
            raise FormatError(f"{where}: expected document_count >= 0, found {documents}")
        if entry.backend not in BACKENDS:
            raise FormatError(f"{where}: expected backend {' or '.join(BACKENDS)}, found {entry.backend!r}")
        if not is_sha256(entry.sha256):
            raise FormatError(f"{where}: expected 64 hexadecimal digits in sha256, found {entry.sha256!r}")
        return entry

    def places(self, batch_bytes: int, where: object) -> Extents:
        """Return `extents`, checked as far as it can be without the file.

        Raises
        ------
        FormatError
            If they are no places of `num_batches` batches.
        """
        try:
            runs = [Run(*run) for run in self.extents]
            first, last = self.crc32_ends
            if any(type(number) is not int or number < 0 for run in runs for number in (*run, first, last)):
                raise ValueError("expected natural numbers")
            if any(run.stride < batch_bytes for run in runs if run.num_batches > 1):
                raise ValueError("batches lie over each other")
            if sum(run.num_batches for run in runs) != self.num_batches:
                raise ValueError(f"expected {self.num_batches} batches")
        except (TypeError, ValueError) as error:
            raise FormatError(f"{where}: extents {self.extents!r}: {error}; run 'zb index rebuild'") from error
        return Extents(runs, batch_bytes)


#: The keys of an entry, and the JSON types of their values.
ENTRY_TYPES: Final = {
    "path": str, "backend": str, "num_batches": int, "token_count": int, "sha256": str, "split": str,
    "complete": bool,
}  # fmt: skip
#: All of them in the order of the file.
_ENTRY_KEYS: Final = (
    "path", "backend", "num_batches", "token_count", "sha256", "document_count", "split", "complete",
)  # fmt: skip
#: The keys that a store written live has as well.
_LIVE_TYPES: Final[dict[str, type[Any]]] = {"complete": bool, "live_id": str}
_ENTRY_VALUES: Final[Callable[[Any], tuple[Any, ...]]] = itemgetter(*ENTRY_TYPES)


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
    complete
        False while a live writer adds shards; then the last entry may be a growing shard, of 0 batches as far as the
        index knows: the commit marker in its file is the truth.
    live_id
        Identity of a store that was written live; empty for any other.
    """

    meta: StoreMeta
    shards: tuple[ShardEntry, ...]
    shuffle: str = "none"
    source: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    live_id: str = ""

    @property
    def num_batches(self) -> int:
        return sum(shard.num_batches for shard in self.shards)

    @property
    def sha256(self) -> str:
        """Digest of the store: over the shard digests, in order."""
        return combine_sha256(shard.sha256 for shard in self.shards)

    def of_split(self, split: str | None) -> Self:
        """Return the index of the shards of one split, in order; None: of all shards.

        Raises
        ------
        ArgumentError
            If no shard is of that split.
        """
        shards = tuple(shard for shard in self.shards if split in (None, shard.split))
        if not shards:
            known = ", ".join(dict.fromkeys(shard.split for shard in self.shards))
            raise ArgumentError(f"expected a split that this store has ({known}), found {split!r}")
        return replace(self, shards=shards)

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
        }
        if self.live_id:
            content |= {"complete": self.complete, "live_id": self.live_id}
        head = json.dumps(content, indent=1).removesuffix("\n}")
        shards = ",\n  ".join(shard.to_json() for shard in self.shards)
        return seal(f'{head},\n "shards": [\n  {shards}\n ]')

    @classmethod
    def from_json(cls, text: str, path: str | os.PathLike[str]) -> Self:
        """Parse and check the text of a `shards.json`.

        Raises
        ------
        FormatError
            If it is not JSON, lacks a key, holds a value of another type, or contradicts itself.
        """
        value = parse_sealed(text, path)
        where = str(path)
        for key, expected in (("format", INDEX_FORMAT), ("version", INDEX_VERSION), ("layout", "batches")):
            found = _field(value, key, type(expected), where)
            if found != expected:
                raise FormatError(f"{where}: expected {key} {expected!r}, found {found!r}")
        entries = enumerate(_field(value, "shards", list, where))
        shards = tuple(ShardEntry.from_json(entry, f"{where}: shards[{i}]") for i, entry in entries)
        source = _field(value, "source", dict, where)
        live = {key: _field(value, key, kind, where) for key, kind in _LIVE_TYPES.items() if key in value}
        index = cls(_index_meta(value, where), shards, _field(value, "shuffle", str, where), source, **live)
        index._check_totals(value, where)
        return index

    def require_agreement(self, reader: BatchReader, entry: ShardEntry) -> None:
        """Raise `FormatError` if a shard is not what its entry says."""
        expected: dict[str, tuple[Any, Any]] = {
            "num_batches": (entry.num_batches, reader.num_batches),
            "shape": (self.meta.shape, reader.meta.shape),
            "dtype": (self.meta.dtype, reader.dtype),
            "sha256": (entry.sha256, reader.sha256 or entry.sha256),
        }
        for name, (in_index, in_shard) in expected.items():
            if in_index != in_shard:
                raise FormatError(f"{reader.path}: {INDEX_NAME} says {name} {in_index}, the shard says {in_shard}")

    def require_extents(self, reader: BatchReader, entry: ShardEntry) -> None:
        """Raise `FormatError` if the batches of a shard, which is the right one, do not lie where its entry says."""
        found = [list(run) for run in reader.extents.runs] if reader.extents is not None else None
        if entry.extents and found != entry.extents:
            how = "have no plain places in it" if found is None else "lie in other places of it"
            raise FormatError(
                f"{reader.path}: is the shard that {INDEX_NAME} names, but its batches {how}: it was repacked or "
                "compressed after the index was written; "
                f"run 'zb index rebuild --force {reader.path.parents[entry.path.count('/')]}'"
            )

    def _check_totals(self, value: dict[str, Any], where: str) -> None:
        for number, shard in enumerate(self.shards):
            expected = shard.num_batches * self.meta.batch_tokens
            if not 0 <= expected < MAX_BYTES or shard.token_count != expected:
                raise FormatError(
                    f"{where}: shards[{number}] ({shard.path}): expected {expected:,} tokens in {shard.num_batches:,} "
                    f"batches, found {shard.token_count:,}"
                )
        if not self.shards:
            raise FormatError(f"{where}: lists no shards")
        if not self.complete and not (self.live_id and all(shard.complete for shard in self.shards[:-1])):
            raise FormatError(f"{where}: is not complete: expected a live_id, and that only its last shard grows")
        for key, found in (("sha256", self.sha256), ("token_count", sum(s.token_count for s in self.shards))):
            if value.get(key) != found:
                raise FormatError(f"{where}: expected {key} {value.get(key)!r}, its shards give {found!r}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a `shards.json`, given itself or its folder."""
        path = Path(path)
        path = path / INDEX_NAME if path.is_dir() else path
        return cls.from_json(read_index_text(path), path)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `shards.json` into `folder`, atomically."""
        folder = Path(folder)
        write_atomically(folder / INDEX_NAME, self.to_json().encode("utf-8"))


def require_inside(path: str, where: str) -> None:
    """Raise `FormatError` unless `path` names a file in the folder of the store."""
    parts = path.split("/")
    if not parts[0] or ".." in parts or not parts[-1]:
        raise FormatError(f"{where}: path {path!r} leaves the folder of the store")
    try:
        named = "\0" not in path and bool(path.encode("utf-8"))
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        named = False
    if not named:
        raise FormatError(f"{where}: path {path!r} is no name of a file; restore the index, or run 'zb index rebuild'")


def read_index_text(path: Path) -> str:
    """Read a `shards.json`."""
    try:
        with open(path, encoding="utf-8", newline="", opener=regular) as file:
            return file.read()
    except FileNotFoundError as error:
        raise _no_index(path.parent) from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not JSON: {error}; restore it from a copy, or convert again") from error


def _no_index(folder: Path) -> FormatError:
    if folder.name.endswith(PARTIAL_SUFFIX):
        return IncompleteError(f"{folder}: its conversion is not finished; 'zb info {folder}' says how far it is")
    return FormatError(
        f"{folder}: no {INDEX_NAME}: not a store, or its index was lost: then run 'zb index rebuild {folder}'"
    )


def layout_of(path: Path) -> str:
    """Return the layout that an index begins with, without reading all of it; "" if it names none."""
    with open(path, "rb", opener=regular) as file:
        match = _LAYOUT.search(file.read(512))
    return match[1].decode() if match else ""


def seal(body: str) -> str:
    """Close the JSON text of an index with a digest of all that stands before it."""
    return f'{body}{_CHECK}{_digest(body)}"\n}}\n'


def parse_sealed(text: str, path: str | os.PathLike[str]) -> Any:
    """Parse the text of an index; where it has a digest, it must be the right one."""
    body, check, digest = text.rpartition(_CHECK)
    if check and digest[:64] != _digest(body):
        raise FormatError(
            f"{path}: damaged, or edited by hand: its text does not have the digest in its last key; restore it, "
            "run 'zb index rebuild', or remove the key \"check\" if you have edited it"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}; restore it from a copy, or convert again") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


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


def _field(value: Any, key: str, kind: type[Any], where: str) -> Any:
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(value).__name__}")
    if key not in value:
        raise FormatError(f"{where}: key {key!r} is missing")
    found = value[key]
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise FormatError(f"{where}: {key}: expected {kind.__name__}, found {found!r}")
    return found
