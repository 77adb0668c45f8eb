"""`shards.json` of a stream store: which file holds which tokens, and of which split."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from zb_hdf5.core.publishing import write_atomically
from zb_hdf5.errors import ArgumentError, FormatError
from zb_hdf5.spec import (
    DEFAULT_SPLIT,
    INDEX_FORMAT,
    INDEX_NAME,
    INDEX_VERSION,
    NO_BOUNDARY,
    STREAM_LAYOUT,
    combine_sha256,
    is_sha256,
    stored_dtype,
)
from zb_hdf5.store.index import MAX_BYTES, parse_sealed, read_index_text, require_inside, seal


@dataclass(frozen=True)
class StreamEntry:
    """One stream file in the index. `path` is relative to the folder, with "/" between parts."""

    path: str
    token_count: int
    document_count: int
    sha256: str
    split: str = DEFAULT_SPLIT
    complete: bool = True

    @classmethod
    def from_json(cls, value: Any, where: str) -> Self:
        """Check one element of `shards`."""
        _require_types(value, _ENTRY_TYPES, where)
        entry = cls(**{key: value[key] for key in _ENTRY_TYPES})
        require_inside(entry.path, where)
        if not all(0 <= count < MAX_BYTES for count in (entry.token_count, entry.document_count)):
            raise FormatError(
                f"{where}: expected counts below 2**63, found {entry.token_count} tokens, "
                f"{entry.document_count} documents"
            )
        if not is_sha256(entry.sha256):
            raise FormatError(f"{where}: expected 64 hexadecimal digits in sha256, found {entry.sha256!r}")
        return entry


_ENTRY_TYPES: Final[dict[str, Any]] = {
    "path": str, "token_count": int, "document_count": int, "sha256": str, "split": str, "complete": bool,
}  # fmt: skip
_INDEX_TYPES: Final[dict[str, Any]] = {
    "format": str, "version": int, "layout": str, "dtype": str, "boundary_token_id": int, "vocab_size": int,
    "token_count": int, "document_count": int, "source": dict, "sha256": str, "shards": list,
}  # fmt: skip


@dataclass(frozen=True)
class StreamIndex:
    """The content of a stream store's `shards.json`.

    Attributes
    ----------
    dtype
        Of all shards.
    shards
        In token order.
    boundary_token_id, vocab_size, tokenizer
        As in each shard: -1, 0 and "" where there is none.
    source
        Where the tokens came from; free JSON for people.
    """

    dtype: np.dtype[Any]
    shards: tuple[StreamEntry, ...]
    boundary_token_id: int = NO_BOUNDARY
    vocab_size: int = 0
    tokenizer: str = ""
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def token_count(self) -> int:
        return sum(shard.token_count for shard in self.shards)

    @property
    def document_count(self) -> int:
        return sum(shard.document_count for shard in self.shards)

    @property
    def sha256(self) -> str:
        """Digest of the store: over the shard digests, in order."""
        return combine_sha256(shard.sha256 for shard in self.shards)

    def of_split(self, split: str | None) -> tuple[StreamEntry, ...]:
        """Return the shards of one split, or all of them.

        Raises
        ------
        ArgumentError
            If no shard is of that split.
        """
        found = tuple(shard for shard in self.shards if split in (None, shard.split))
        if not found:
            there = ", ".join(sorted({shard.split for shard in self.shards}))
            raise ArgumentError(f"expected a split that this store has ({there}), found {split!r}")
        return found

    def to_json(self) -> str:
        """Return the text of the file."""
        content = {
            "format": INDEX_FORMAT,
            "version": INDEX_VERSION,
            "layout": STREAM_LAYOUT,
            "dtype": self.dtype.name,
            "boundary_token_id": self.boundary_token_id,
            "vocab_size": self.vocab_size,
            "token_count": self.token_count,
            "document_count": self.document_count,
            "tokenizer": json.loads(self.tokenizer) if self.tokenizer else None,
            "source": self.source,
            "sha256": self.sha256,
        }
        head = json.dumps(content, indent=1).removesuffix("\n}")
        shards = ",\n  ".join(json.dumps(asdict(shard)) for shard in self.shards)
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
        _require_types(value, _INDEX_TYPES, where)
        for key, expected in (("format", INDEX_FORMAT), ("version", INDEX_VERSION), ("layout", STREAM_LAYOUT)):
            if value[key] != expected:
                raise FormatError(f"{where}: expected {key} {expected!r}, found {value[key]!r}")
        tokenizer = value.get("tokenizer")
        if tokenizer is not None and not isinstance(tokenizer, dict):
            raise FormatError(f"{where}: tokenizer: expected an object or null, found {tokenizer!r}")
        try:
            dtype = stored_dtype(value["dtype"])
        except ArgumentError as error:
            raise FormatError(f"{where}: {error}") from error
        shards = tuple(StreamEntry.from_json(e, f"{where}: shards[{i}]") for i, e in enumerate(value["shards"]))
        boundary, vocab_size = value["boundary_token_id"], value["vocab_size"]
        index = cls(dtype, shards, boundary, vocab_size, json.dumps(tokenizer) if tokenizer else "", value["source"])
        index._check_totals(value, where)
        return index

    def _check_totals(self, value: dict[str, Any], where: str) -> None:
        if not self.shards:
            raise FormatError(f"{where}: lists no shards")
        for key in ("token_count", "document_count", "sha256"):
            if value[key] != getattr(self, key):
                raise FormatError(f"{where}: expected {key} {value[key]!r}, its shards give {getattr(self, key)!r}")

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


def _require_types(value: Any, types: dict[str, Any], where: str) -> None:
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(value).__name__}")
    for key, kind in types.items():
        if key not in value:
            raise FormatError(f"{where}: key {key!r} is missing")
        if type(value[key]) is not kind:
            raise FormatError(f"{where}: {key}: expected {kind.__name__}, found {value[key]!r}")
