"""The index of a store: the `shards.json` that names its shards. The listing of the folder does not count.

It has one array for each key, and a shard's entry is made when somebody asks for it: 50,000 shards are parsed in a
twentieth of the time that one object for each would take.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Self, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentPart
from zb_hdf5.documents.metadata import TableInfo
from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError, Remedy, counted
from zb_hdf5.field import Field
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.objects import names_below
from zb_hdf5.files.paths import RemotePath, any_path, local_path, open_file
from zb_hdf5.files.publishing import PARTIAL_SUFFIX, partial_path, write_atomically
from zb_hdf5.files.ranges import Run
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.batch_writer import FieldDigest, ShardInfo
from zb_hdf5.formats.registry import FORMATS, backends
from zb_hdf5.spec import (
    CODECS,
    CRC32,
    DEFAULT_SPLIT,
    EXTENTS,
    INDEX_COLUMN_KEYS,
    INDEX_DOCUMENTS_KEYS,
    INDEX_FIELD_KEYS,
    INDEX_FORMAT,
    INDEX_META_KEYS,
    INDEX_NAME,
    INDEX_OPTIONAL_KEYS,
    INDEX_SHARD_KEYS,
    INDEX_VERSION,
    NO_CODEC,
    NO_SHA256,
    NOT_KNOWN,
    SHA256_CHARS,
    SHARD_PREFIX,
    SPLITS,
    STREAM_LAYOUT,
    StoreMeta,
    combine_sha256,
    content_fingerprint,
    crc32_column,
    extents_column,
    is_file_name,
    is_hexadecimal,
    is_sha256,
    stored_dtype,
)

#: Key of `shards` -> the type of each element of its array; and the source of its values in an entry.
_SHARD_KINDS: Final = {key: kind for key, (_, kind) in INDEX_SHARD_KEYS.items()}
_FACTS: Final = attrgetter(*(name for name, _ in INDEX_SHARD_KEYS.values()))
#: Section of the index -> attribute of an entry, and the row of a shard that has none.
_OPTIONAL: Final[dict[str, tuple[str, Any]]] = {
    "pieces": ("pieces", TableInfo(NOT_KNOWN, NO_SHA256)),
    "codecs": ("compressed", CompressedTokens(NO_CODEC, NOT_KNOWN)),
}
#: The largest id of a store, in the `source` entry of its index: of no shard, and of no copy before it is written.
MAX_TOKEN: Final = "max_token"
#: Beside it where no vocabulary size was given: the index has the one that follows from the largest id.
FOUND_VOCABULARY: Final = ("vocab_size", "max_token + 1")


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the index.

    Attributes
    ----------
    path
        Relative to the folder, with "/" between parts.
    num_bytes
        Size of the file; 0 while it grows.
    num_batches
        Batches of a batch store, chunks of a stream.
    sha256
        sha256 of the token bytes; 64 zeros while it grows.
    crc32
        crc32 of the rows of crc32, in the shard or its sidecar: it proves that the shard is the right one, and the rows
        prove each batch. -1: not known.
    document_count
        Documents whose first token lies in the shard; -1: not known.
    columns
        Ranges of the chunks of each column in the file, as runs, so that a reader need not ask HDF5. A column whose
        ranges are not known is not named.
    fields
        The digests of each field, and the size of the file that it lies in.
    pieces
        Its file of pieces, in the same folder; None: it has none.
    compressed
        Its codec, and the bytes of its tokens; None: it has none.
    """

    path: str
    backend: str
    num_bytes: int
    num_batches: int
    token_count: int
    sha256: str
    crc32: int = NOT_KNOWN
    document_count: int = NOT_KNOWN
    split: str = DEFAULT_SPLIT
    complete: bool = True
    columns: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    fields: dict[str, FieldDigest] = field(default_factory=dict)
    pieces: TableInfo | None = None
    compressed: CompressedTokens | None = None

    @classmethod
    def of(cls, info: ShardInfo, split: str = DEFAULT_SPLIT, document_count: int | None = None) -> Self:
        """Describe a file that was just written."""
        known = info.document_count if document_count is None else document_count
        return cls(
            info.path.name, info.backend, info.path.stat().st_size, info.num_batches, info.token_count, info.sha256,
            crc32_of(info.crc32), NOT_KNOWN if known is None else known, split, columns=info.columns,
            fields=info.fields, compressed=info.compressed,
        )  # fmt: skip

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the entry of which a journal has the `asdict`: the index keeps its arrays otherwise."""
        columns = {name: tuple(Run(*run) for run in runs) for name, runs in value["columns"].items()}
        fields = {name: FieldDigest(*facts) for name, facts in value["fields"].items()}
        pieces = TableInfo(*value["pieces"]) if value["pieces"] else None
        compressed = CompressedTokens(*value["compressed"]) if value["compressed"] else None
        return cls(**{**value, "columns": columns, "fields": fields, "pieces": pieces, "compressed": compressed})

    def file(self, folder: str | os.PathLike[str]) -> Path:
        """Return where its bytes are now: a growing shard's are in its `.partial` until it is published."""
        path = any_path(folder) / self.path
        return partial_path(path) if not self.complete and partial_path(path).exists() else path

    def is_placed(self, column: str) -> bool:
        """Return whether the index has the ranges of the chunks of a column, or the range of their table."""
        return column in self.columns or (self.compressed is not None and extents_column(column) in self.columns)


@dataclass(eq=False)
class ShardTable(Sequence[ShardEntry]):
    """The shards of an index, one array for each key. An entry is made when it is asked for."""

    values: dict[str, Any]  # key of `shards` -> a value for each shard
    columns: dict[str, RunTable]  # column -> its runs
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)  # field -> key of `FieldDigest` -> as `values`
    optional: dict[str, dict[str, Any]] = field(default_factory=dict)  # section that a shard has -> key -> as `values`

    @classmethod
    def of(cls, entries: Iterable[ShardEntry]) -> Self:
        entries = list(entries)
        values = _arrays(list(map(_FACTS, entries)), _SHARD_KINDS)
        names = dict.fromkeys(name for entry in entries for name in entry.columns)
        columns = {name: RunTable.of([entry.columns.get(name) for entry in entries]) for name in names}
        fields = {
            name: _arrays([entry.fields.get(name, FieldDigest()) for entry in entries], INDEX_FIELD_KEYS)
            for name in sorted({name for entry in entries for name in entry.fields})
        }
        optional = {
            section: _arrays([getattr(entry, name) or none for entry in entries], INDEX_OPTIONAL_KEYS[section])
            for section, (name, none) in _OPTIONAL.items()
            if any(getattr(entry, name) for entry in entries)
        }
        return cls(values, columns, fields, optional)

    def __len__(self) -> int:
        return len(self.values["path"])

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self[k] for k in range(*number.indices(len(self))))
        values = {name: kind(self.values[key][number]) for key, (name, kind) in INDEX_SHARD_KEYS.items()}
        for section, (name, none) in _OPTIONAL.items():
            row = _row(self.optional.get(section), INDEX_OPTIONAL_KEYS[section], number)
            values[name] = None if not row or row[0] == none[0] else type(none)(*row)
        runs = {name: column.of_shard(number) for name, column in self.columns.items()}
        fields = {name: FieldDigest(*_row(facts, INDEX_FIELD_KEYS, number)) for name, facts in self.fields.items()}
        columns = {name: found for name, found in runs.items() if found is not None}
        return ShardEntry(**values, columns=columns, fields=fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def to_json(self) -> dict[str, Any]:
        """Return the keys "shards" and "columns", and those of sections that shards have."""
        columns = {name: runs.to_json() for name, runs in self.columns.items()}
        optional = {section: plain_arrays(arrays) for section, arrays in self.optional.items()}
        return {"shards": plain_arrays(self.values), "columns": columns, **optional}

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str) -> Self:
        """Check and take the keys "shards" and "columns" of a parsed index."""
        values = require_arrays(require_field(value, "shards", dict, where), _SHARD_KINDS, f"{where}: shards")
        optional = {
            section: require_arrays(value[section], kinds, f"{where}: {section}", len(values["path"]))
            for section, kinds in INDEX_OPTIONAL_KEYS.items()
            if section in value
        }
        for codec in dict.fromkeys(optional.get("codecs", {}).get("codec", ())):
            if codec.partition(":")[0] not in (NO_CODEC, *CODECS):
                raise FormatError(f"{where}: codecs: expected one of {', '.join(CODECS)}, found {codec!r}")
        require_paths(values["path"], where)
        require_sha256(values["sha256"], where)
        if unknown := sorted(set(values["split"]) - set(SPLITS)):
            raise FormatError(f"{where}: shards: expected split {' or '.join(SPLITS)}, found {unknown[0]!r}")
        for key, array in values.items():
            least = NOT_KNOWN if key in ("crc32", "document_count") else 0
            if isinstance(array, np.ndarray) and (array < least).any():
                raise FormatError(f"{where}: shards: expected {key} >= {least}, found {array.min()}")
        counts, fields = values["num_batches"], {}
        columns = {  # the rows of crc32 and of extents are those of all batches, in chunks of their own
            name: RunTable.from_json(
                column, len(counts), None if name.endswith((CRC32, EXTENTS)) else counts, f"{where}: columns: {name}"
            )
            for name, column in require_field(value, "columns", dict, where).items()
        }
        for name, facts in require_field({"fields": {}} | value, "fields", dict, where).items():
            fields[name] = require_arrays(facts, INDEX_FIELD_KEYS, f"{where}: fields: {name}", len(counts))
            require_sha256(fields[name]["sha256"], f"{where}: fields: {name}")
        return cls(values, columns, fields, optional)


def _row(arrays: dict[str, Any] | None, kinds: Mapping[str, type[Any]], number: int) -> list[Any]:
    """Return the values of one shard; none where there are no arrays."""
    return [kind(arrays[key][number]) for key, kind in kinds.items()] if arrays else []


def require_sha256(digests: list[str], where: str) -> None:
    """Raise `FormatError` if a text is no digest."""
    if set(map(len, digests)) - {SHA256_CHARS} or not is_hexadecimal("".join(digests)):
        bad = next((digest for digest in digests if not is_sha256(digest)), "")
        raise FormatError(f"{where}: expected {SHA256_CHARS} hexadecimal digits in sha256, found {bad!r}")


def _arrays(rows: Sequence[tuple[Any, ...]], kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Return one array for each key, of rows that have a value for each."""
    arrays = {key: [row[number] for row in rows] for number, key in enumerate(kinds)}
    return {key: np.array(arrays[key], np.int64) if kind is int else arrays[key] for key, kind in kinds.items()}


class RunTable:
    """The runs of one column in all shards, as flat arrays: how many each shard has (-1: not known), and the runs."""

    def __init__(self, counts: npt.NDArray[np.int64], runs: npt.NDArray[np.int64]) -> None:
        self._counts, self._runs = counts, runs  # (shards,), (runs, 3)
        self._firsts = np.concatenate([[0], np.cumsum(np.maximum(counts, 0))])

    @classmethod
    def of(cls, runs_of_shards: list[tuple[Run, ...] | None]) -> Self:
        counts = [-1 if runs is None else len(runs) for runs in runs_of_shards]
        flat = [run for runs in runs_of_shards for run in runs or ()]
        return cls(np.array(counts, np.int64), np.array(flat, np.int64).reshape(-1, 3))

    def of_shard(self, number: int) -> tuple[Run, ...] | None:
        if self._counts[number] < 0:
            return None
        return _equal_runs(self._runs[self._firsts[number] : self._firsts[number + 1]].tobytes())

    def overlaps(self, chunk_bytes: int) -> bool:
        """Return whether chunks of this size would lie over each other in a run."""
        return bool(((self._runs[:, 1] < chunk_bytes) & (self._runs[:, 2] > 1)).any())

    def to_json(self) -> dict[str, list[int]]:
        arrays = (self._counts, *self._runs.T)
        return {key: array.tolist() for key, array in zip(INDEX_COLUMN_KEYS, arrays, strict=True)}

    @classmethod
    def from_json(cls, value: Any, num_shards: int, chunks: npt.NDArray[np.int64] | None, where: str) -> Self:
        """Check and take one element of `columns`, whose runs hold `chunks` of each shard where that is known."""
        counts, *arrays = (_require_array(value, key, int, where) for key in INDEX_COLUMN_KEYS)
        if len(counts) != num_shards or {len(array) for array in arrays} != {int(np.maximum(counts, 0).sum())}:
            raise FormatError(f"{where}: expected the runs of each of {num_shards:,} shards")
        found = cls(counts, np.stack(arrays, axis=1))
        if (counts < -1).any() or (found._runs < 0).any():
            raise FormatError(f"{where}: expected natural numbers")
        sums = np.diff(np.concatenate([[0], np.cumsum(found._runs[:, 2])])[found._firsts])
        if chunks is not None and (sums != chunks)[counts >= 0].any():
            shard = int(((sums != chunks) & (counts >= 0)).argmax())
            raise FormatError(
                f"{where}: expected runs of {chunks[shard]:,} batches in shard {shard:,}, found {sums[shard]:,}"
            )
        return found


@lru_cache(64)
def _equal_runs(rows: bytes) -> tuple[Run, ...]:
    """Return the runs of these rows: one object for all shards of a conversion, of which thousands may be open."""
    return tuple(Run(*run) for run in np.frombuffer(rows, np.int64).reshape(-1, 3).tolist())


def require_field(value: Any, key: str, kind: type[Any], where: str) -> Any:
    """Return a value of a JSON object; raise `FormatError` unless it is there and of its type."""
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(value).__name__}")
    if key not in value:
        raise FormatError(f"{where}: key {key!r} is missing")
    found = value[key]
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise FormatError(f"{where}: {key}: expected {kind.__name__}, found {found!r}")
    return found


def plain_arrays(values: dict[str, Any]) -> dict[str, list[Any]]:
    """Return arrays as JSON has them."""
    return {key: array if isinstance(array, list) else array.tolist() for key, array in values.items()}


def require_arrays(value: Any, kinds: Mapping[str, type[Any]], where: str, length: int | None = None) -> dict[str, Any]:
    """Return the arrays of a JSON object; raise `FormatError` unless they are of their types and of one length."""
    values = {key: _require_array(value, key, kind, where) for key, kind in kinds.items()}
    if len({len(array) for array in values.values()} | ({length} if length is not None else set())) != 1:
        lengths = ", ".join(f"{key} {len(array):,}" for key, array in values.items())
        expected = "arrays of one length" if length is None else f"arrays of {length:,} elements"
        raise FormatError(f"{where}: expected {expected}, found {lengths}")
    return values


def require_paths(paths: list[str], where: str) -> None:
    """Raise `FormatError` if a path is no name of a file, or leaves the folder of the store."""
    together = "/".join(paths)  # one look at all of them: there may be a hundred thousand
    suspect = ".." in together or "//" in f"/{together}/" or not is_file_name(together)
    for path in paths if suspect else ():
        if not (set(path.split("/")).isdisjoint({"", ".."}) and is_file_name(path)):
            raise FormatError(
                f"{where}: path {path!r} leaves the folder of the store, or is no name of a file", remedy=Remedy.REBUILD
            )


def _require_array(value: Any, key: str, kind: type[Any], where: str) -> Any:
    """Return an array of a JSON object whose elements all have one type: of whole numbers as int64."""
    found: list[Any] = require_field(value, key, list, where)
    if set(map(type, found)) - {kind}:
        number = next(number for number, element in enumerate(found) if type(element) is not kind)
        raise FormatError(f"{where}: {key}[{number}]: expected {kind.__name__}, found {found[number]!r}")
    try:
        return np.array(found, np.int64) if kind is int else found
    except OverflowError as error:
        raise FormatError(f"{where}: {key}: {error}") from error


# --- the index -----------------------------------------------------------------------------------------------------

#: Before the digest of all that stands before it: the last key of the file.
_CHECK: Final = ',\n "check": "'


@dataclass(frozen=True)
class ShardIndex:
    """The content of a `shards.json`.

    Attributes
    ----------
    meta
        The facts that all shards share; its counts are those of the whole store.
    shards
        In the order of their batches or tokens. Any sequence of entries is taken, and kept as a `ShardTable`.
    shuffle
        Name of the record shuffle at write time, or "none".
    source
        The origin of the tokens; free JSON for people.
    complete
        False while a live writer adds shards; then the last entry may be a growing shard, of 0 batches as far as the
        index has: the commit marker in its file is the truth.
    live_id
        Identity of a store that was written live; empty for any other.
    documents
        The document tables, those of each split in the order of their tokens.
    """

    meta: StoreMeta
    shards: Sequence[ShardEntry]
    shuffle: str = "none"
    source: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    live_id: str = ""
    documents: tuple[DocumentPart, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.shards, ShardTable):
            object.__setattr__(self, "shards", ShardTable.of(self.shards))
        codecs = self.table.optional.get("codecs", {}).get("codec", ())
        codec = next((each for each in codecs if each != NO_CODEC), NO_CODEC)  # of the first shard that has any
        if self.meta.codec != codec:
            object.__setattr__(self, "meta", replace(self.meta, codec=codec))

    @property
    def table(self) -> ShardTable:
        """The shards, as one array for each key."""
        return cast(ShardTable, self.shards)

    @property
    def num_batches(self) -> int:
        return int(self.table.values["num_batches"].sum())

    @property
    def token_count(self) -> int:
        return int(self.table.values["token_count"].sum())

    @property
    def sha256(self) -> str:
        """Digest of the store: over the shard digests, in order."""
        return combine_sha256(self.table.values["sha256"])

    def of_split(self, split: str | None) -> Self:
        """Return the index of the shards of one split, in order; None: of all shards.

        Raises
        ------
        ArgumentError
            If no shard is of that split.
        """
        splits = self.table.values["split"]
        known = dict.fromkeys(splits)
        if split is None or list(known) == [split]:
            return self
        if split not in known:
            raise ArgumentError(f"expected a split that this store has ({', '.join(known)}), found {split!r}")
        documents = tuple(part for part in self.documents if part.split == split)
        shards = [self.shards[number] for number, name in enumerate(splits) if name == split]
        return replace(self, shards=shards, documents=documents)

    @property
    def max_token(self) -> int | None:
        """The largest id; None: not known."""
        found = self.source.get(MAX_TOKEN)
        return found if isinstance(found, int) else None

    def with_max_token(self, of_shards: Iterable[int | None]) -> Self:
        """Return the index with the largest id, and with the vocabulary size that follows from it if none was given.

        Parameters
        ----------
        of_shards
            The largest id of each shard. One that is not known (None) leaves the index as it is.
        """
        largest = [*of_shards]
        known = [token for token in largest if token is not None]
        if not known or len(known) < len(largest):
            return self
        index = self.without_max_token()
        max_token = max(known)
        source = {**index.source, MAX_TOKEN: max_token}
        if index.meta.vocab_size:
            return replace(index, source=source)
        name, reason = FOUND_VOCABULARY
        meta = replace(index.meta, vocab_size=max_token + 1)
        return replace(index, meta=meta, source={**source, name: reason})

    def without_max_token(self) -> Self:
        """Return the index as it was before its largest id was known: with the vocabulary size that was given, or 0."""
        name, reason = FOUND_VOCABULARY
        is_found = self.source.get(name) == reason
        added = {MAX_TOKEN, name} if is_found else {MAX_TOKEN}
        source = {key: value for key, value in self.source.items() if key not in added}
        vocab_size = 0 if is_found else self.meta.vocab_size
        return replace(self, meta=replace(self.meta, vocab_size=vocab_size), source=source)

    def document_parts(self) -> tuple[list[DocumentPart], dict[str, int]]:
        """Return the document tables as parts of one stream, split after split, and where each split begins in it."""
        parts: list[DocumentPart] = []
        tokens: dict[str, int] = {}
        token = document = 0
        for split in dict.fromkeys(self.table.values["split"]):
            tokens[split] = token
            parts += [
                part._replace(first_token=token + part.first_token, first_document=document + part.first_document)
                for part in self.documents
                if part.split == split
            ]
            if parts:
                token = parts[-1].first_token + parts[-1].token_count
                document = parts[-1].first_document + parts[-1].document_count
        return parts, tokens

    def to_json(self) -> str:
        meta = self.meta
        content: dict[str, Any] = {
            "format": INDEX_FORMAT,
            "version": INDEX_VERSION,
            "layout": meta.layout,
            "dtype": meta.dtype.name,
            **{key: getattr(meta, key) for key in INDEX_META_KEYS[meta.layout]},
            "shuffle": self.shuffle,
            "token_count": self.token_count,
            "tokenizer": json.loads(meta.tokenizer) if meta.tokenizer else None,
            "source": self.source,
            "sha256": self.sha256,
        }
        if self.live_id:
            content |= {"complete": self.complete, "live_id": self.live_id}
        head = json.dumps(content, indent=1).removesuffix("\n}")
        parts = self.table.to_json()
        if meta.fields:
            digests = self.table.fields
            parts["fields"] = {each.name: each.to_json() | plain_arrays(digests[each.name]) for each in meta.fields}
        if self.documents:
            arrays = map(list, zip(*self.documents, strict=True))
            parts["documents"] = dict(zip(INDEX_DOCUMENTS_KEYS, arrays, strict=True))
        tables = ",\n ".join(
            f'"{name}": {{\n  ' + ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in part.items())
            + "\n }" if part else f'"{name}": {{}}'
            for name, part in parts.items()
        )  # fmt: skip
        body = f"{head},\n {tables}"
        return f'{body}{_CHECK}{_digest(body)}"\n}}\n'

    @property
    def has_digests(self) -> bool:
        """Whether the sha256 of each shard is known."""
        return NO_SHA256 not in self.table.values["sha256"]

    def without_crc32(self) -> str:
        """Return the path of the first shard whose index has no crc32 of its batches; "" if there is none."""
        unknown = np.flatnonzero(self.table.values["crc32"] == NOT_KNOWN)
        return str(self.table.values["path"][unknown[0]]) if len(unknown) else ""

    def of_field(self, name: str) -> Self:
        """Return the index of a field: the same batches, of its values, in the files that they lie in.

        Raises
        ------
        ArgumentError
            If there is no such field.
        """
        meta, table = self.meta.of_field(name), self.table
        counts = table.values["token_count"] * (meta.batch_tokens // self.meta.batch_tokens)
        values = {**table.values, "token_count": counts, **table.fields[name]}
        codecs = {section: arrays for section, arrays in table.optional.items() if section == "codecs"}
        extents = extents_column(meta.column)
        stored = {meta.column: meta.column, CRC32: crc32_column(meta.column), extents: extents}
        columns = {column: table.columns[each] for column, each in stored.items() if each in table.columns}
        return replace(self, meta=meta, shards=ShardTable(values, columns, {}, codecs))

    @classmethod
    def from_json(cls, text: str, path: str | os.PathLike[str]) -> Self:
        """Parse and check the text of a `shards.json`.

        Raises
        ------
        FormatError
            If it is not JSON, lacks a key, holds a value of another type, or contradicts itself.
        """
        value, where = _parse_sealed(text, path), str(path)
        if isinstance(value, dict) and isinstance(value.get("shards"), list):
            return cls(*_corpus_shards(value, any_path(path)))
        for key, expected in (("format", INDEX_FORMAT), ("version", INDEX_VERSION)):
            found = require_field(value, key, type(expected), where)
            if found != expected:
                raise FormatError(f"{where}: expected {key} {expected!r}, found {found!r}")
        table = ShardTable.from_json(value, where)
        shuffle, source = require_field(value, "shuffle", str, where), require_field(value, "source", dict, where)
        types: dict[str, type[Any]] = {"complete": bool, "live_id": str}  # of a store written live
        live = {key: require_field(value, key, types[key], where) for key in types.keys() & value.keys()}
        documents = _documents_from_json(value["documents"], f"{where}: documents") if "documents" in value else ()
        index = cls(_index_meta(value, where), table, shuffle, source, **live, documents=documents)
        index._check_totals(value, where)
        return index

    def _check_totals(self, value: dict[str, Any], where: str) -> None:
        if not self.shards:
            raise FormatError(f"{where}: lists no shards")
        batches, tokens = self.table.values["num_batches"], self.table.values["token_count"]
        per_batch = self.meta.batch_tokens
        missing = batches * per_batch - tokens  # of the last chunk of a stream
        bad = (missing < 0) | (missing >= (per_batch if self.meta.layout == STREAM_LAYOUT else 1))
        if bad.any():
            shard = self.shards[int(bad.argmax())]
            raise FormatError(
                f"{where}: {shard.path}: expected tokens of {shard.num_batches:,} batches of {per_batch:,}, found "
                f"{shard.token_count:,}"
            )
        for name in dict.fromkeys(self.table.values["backend"]):
            if name not in FORMATS or not FORMATS[name].holds_batches:
                raise FormatError(f"{where}: expected backend {' or '.join(backends())}, found {name!r}")
        column = self.table.columns.get(self.meta.column)
        if column is not None and column.overlaps(self.meta.batch_bytes):
            raise FormatError(f"{where}: columns: batches lie over each other", remedy=Remedy.REBUILD)
        if not self.complete and not (self.live_id and all(self.table.values["complete"][:-1])):
            raise FormatError(f"{where}: is not complete: expected a live_id, and that only its last shard grows")
        for key in ("sha256", "token_count"):
            if value.get(key) != getattr(self, key):
                raise FormatError(f"{where}: expected {key} {value.get(key)!r}, its shards give {getattr(self, key)!r}")

    def require_agreement(self, reader: BatchReader, entry: ShardEntry, *, placed: bool = True) -> None:
        """Raise `FormatError` if a shard differs from its entry; `placed`: or has its batches at other offsets."""
        is_known = reader.sha256 is not None and entry.sha256 != NO_SHA256
        num_batches, token_count = reader.num_batches, reader.token_count
        if not entry.complete:  # its writer may have gone on since
            num_batches, token_count = min(num_batches, entry.num_batches), min(token_count, entry.token_count)
        expected: dict[str, tuple[Any, Any]] = {
            "num_batches": (entry.num_batches, num_batches),
            "shape": (self.meta.shape, reader.meta.shape),
            "dtype": (self.meta.dtype, reader.dtype),
            "sha256": (entry.sha256, reader.sha256 if is_known else entry.sha256),
            "token_count": (entry.token_count, token_count),
        }
        if self.holds_stream and entry.complete and entry.document_count != NOT_KNOWN:
            expected["document_count"] = (entry.document_count, reader.meta.document_count)
        for name, (in_index, in_shard) in expected.items():
            if in_index != in_shard:
                raise FormatError(f"{reader.path}: its index has {name} {in_index}, the file has {in_shard}")
        names = (self.meta.column, extents_column(self.meta.column))
        if placed and any(name in entry.columns and entry.columns[name] != reader.columns.get(name) for name in names):
            how = "have no plain extents in it" if reader.extents is None else "lie at other offsets of it"
            raise FormatError(
                f"{reader.path}: is the shard that {INDEX_NAME} names, but its batches {how}: it was repacked or "
                "compressed after the index was written",
                remedy=Remedy.REBUILD_FORCE,
                at=reader.path.parents[entry.path.count("/")],
            )

    @property
    def holds_stream(self) -> bool:
        """Whether its shards are token streams."""
        return self.meta.layout == STREAM_LAYOUT

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a `shards.json`, given itself or its folder."""
        path = any_path(path)
        path = path if path.name == INDEX_NAME else path / INDEX_NAME
        try:
            if isinstance(path, RemotePath):
                return cls.from_json(path.read_bytes().decode("utf-8"), path)
            with open_file(path) as file:
                return cls.from_json(file.read().decode("utf-8"), path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _no_index(path.parent) from error
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not JSON: {error}; restore it from a copy, or convert again") from error
        except FormatError as error:
            error.at = error.at or str(path.parent)  # an error from inside lacks the folder
            raise

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `shards.json` into `folder`, atomically."""
        write_atomically(local_path(folder) / INDEX_NAME, self.to_json().encode("utf-8"))


def _documents_from_json(value: Any, where: str) -> tuple[DocumentPart, ...]:
    """Check and take the key "documents"."""
    arrays = plain_arrays(require_arrays(value, INDEX_DOCUMENTS_KEYS, where))
    require_paths(arrays["path"], where)
    require_sha256(arrays["sha256"], where)
    parts = tuple(DocumentPart(*row) for row in zip(*arrays.values(), strict=True))
    ends: dict[str, tuple[int, int]] = {}
    for part in parts:
        token, document = ends.get(part.split, (0, 0))
        if part.first_token < token or part.first_document < document or min(part.token_count, part.document_count) < 0:
            raise FormatError(f"{where}: {part.path}: lies over the table before it", remedy=Remedy.REBUILD)
        ends[part.split] = part.first_token + part.token_count, part.first_document + part.document_count
    return parts


def source_files(source: dict[str, Any]) -> list[Any]:
    """Return the files of a source, which is free JSON of its writer."""
    files = source.get("files") or source.get("path")
    return files if isinstance(files, list) else [files] if files else []


def find_index(path: Path) -> Path | None:
    """Return the `shards.json` that a path names, or that lies in it, if there is one; a server is not asked."""
    if path.name == INDEX_NAME:
        return path
    known = path.is_dir() if isinstance(path, RemotePath) else (path / INDEX_NAME).exists()
    return path / INDEX_NAME if known else None


def stores_by_format(folder: Path) -> dict[str, Path]:
    """Return format -> store, of a folder that has a store of the same tokens for each format, named by it.

    Any other path has none. A store whose index was lost counts.
    """
    if isinstance(folder, RemotePath) or not folder.is_dir() or find_index(folder):
        return {}
    places = {name: folder / name for name in backends()}
    return {
        name: place
        for name, place in places.items()
        if (place / INDEX_NAME).exists() or any(place.glob(f"{SHARD_PREFIX}*"))
    }


def require_same_tokens(folder: Path, stores: Mapping[str, ShardIndex]) -> None:
    """Raise `FormatError` unless the stores of a folder, by their formats, have the same tokens, shards and shape."""
    known = {name: content_fingerprint(index.table.values["sha256"], index.meta) for name, index in stores.items()}
    for name, other in pairwise(known):
        if known[name] != known[other]:
            raise FormatError(
                f"{folder}: expected the same tokens in {name} and {other}, found fingerprints {known[name]} and "
                f"{known[other]}; convert one of them again"
            )


def require_one_store(folder: Path, advice: str) -> None:
    """Raise `ArgumentError` for a folder that has a store for each format; `advice` is the end of the message."""
    if stores := stores_by_format(folder):
        places = " and ".join(map(str, stores.values()))
        raise ArgumentError(f"{folder}: has a store for each format: {places}; {advice}")


def require_files(folder: Path, index: ShardIndex) -> None:
    """Raise `FormatError` if a shard is missing: one listing per folder, no stat per shard, no question for objects."""
    if isinstance(folder, RemotePath):
        return
    paths = index.table.values["path"]
    paths = paths if index.complete else paths[:-1]  # the last one may be a `.partial`
    present = {
        parent: set(os.listdir(folder / parent)) if (folder / parent).is_dir() else set()
        for parent in {path.rpartition("/")[0] for path in paths}
    }
    missing = [path for path in paths if (p := path.rpartition("/"))[2] not in present[p[0]]]
    if missing:
        raise FormatError(
            f"{folder / INDEX_NAME}: names {missing[0]}, which is not there ({len(missing):,} of {len(index.shards):,} "
            "shards are missing); restore them, or convert again"
        )


#: Names of a folder that a message shows.
NAMES_SHOWN: Final = 5


def _no_index(folder: Path) -> FormatError:
    if folder.name.endswith(PARTIAL_SUFFIX):
        return IncompleteError(f"{folder}: its conversion is not finished", remedy=Remedy.RESUME, at=folder)
    if isinstance(folder, RemotePath):
        return _no_index_in_a_bucket(folder)
    if not folder.is_dir():
        return FormatError(f"{folder}: no {INDEX_NAME}: there is no such folder")
    with os.scandir(folder) as entries:
        is_folder = {entry.name: entry.is_dir() for entry in entries}
    if any(name.startswith(SHARD_PREFIX) for name in is_folder):
        return _lost_index(folder)
    facts = f"{folder}: no {INDEX_NAME} and no shards: not a store, but {_content(folder, is_folder)}"
    return FormatError(facts, remedy=Remedy.CONVERT, at=folder)


def _lost_index(folder: Path) -> FormatError:
    return FormatError(f"{folder}: no {INDEX_NAME}: its index was lost", remedy=Remedy.REBUILD, at=folder)


def _no_index_in_a_bucket(folder: Path) -> FormatError:
    """Return the error for a URL, which a mistake in it gives more often than an index that was lost."""
    names = names_below(str(folder))
    if names is None:  # a web server, or a bucket that does not list
        return FormatError(f"{folder}: no {INDEX_NAME}: the URL has a mistake, or the index was lost")
    if not names:
        return FormatError(f"{folder}: no {INDEX_NAME}, and nothing else: look for a mistake in the URL")
    if any(name.startswith(SHARD_PREFIX) for name in names):
        return _lost_index(folder)
    return FormatError(f"{folder}: no {INDEX_NAME} and no shards: not a store, but {_listed(names)}")


def _content(folder: Path, is_folder: Mapping[str, bool]) -> str:
    """Describe a folder that is no store by the stores in it, or by its files; `is_folder` is by name."""
    if not is_folder:
        return "an empty folder"
    stores = sorted(name for name, inner in is_folder.items() if inner and (folder / name / INDEX_NAME).exists())
    if stores:
        return f"a folder with the store{'s' if len(stores) > 1 else ''} {_listed(stores)}"
    kinds = Counter("folder" if inner else f"{Path(name).suffix} file".strip() for name, inner in is_folder.items())
    return f"a folder with {_listed([counted(count, kind) for kind, count in sorted(kinds.items())])}"


def _listed(names: list[str]) -> str:
    """Return the first names of a folder, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _parse_sealed(text: str, path: str | os.PathLike[str]) -> Any:
    """Parse the text of an index; where it has a digest, it must be the right one."""
    body, check, digest = text.rpartition(_CHECK)
    if check and digest[:64] != _digest(body):
        raise FormatError(
            f'{path}: damaged, or edited by hand (then remove the key "check"): its text does not have the digest in '
            "its last key",
            remedy=Remedy.REBUILD,
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}; restore it from a copy, or convert again") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _corpus_shards(value: dict[str, Any], path: Path) -> tuple[StoreMeta, list[ShardEntry]]:
    """Take the index of a corpus of others: rows with path, token_count and sha256 of HDF5 files in its folder."""
    from zb_hdf5.formats.inspection import look_at  # h5py, which our own index does not need

    kinds: dict[str, type[Any]] = {"path": str, "token_count": int, "sha256": str}
    rows = [[require_field(row, key, kind, str(path)) for key, kind in kinds.items()] for row in value["shards"]]
    if not rows:
        raise FormatError(f"{path}: lists no shards")
    names = [name.rpartition("/")[2] for name, *_ in rows]  # the folder may have moved since it was written
    require_paths(names, str(path))
    for name, count, sha256 in rows:
        if count < 0 or not is_sha256(sha256):
            raise FormatError(f"{path}: {name}: expected a token_count and a sha256, found {count}, {sha256!r}")
    meta = look_at(path.parent / names[0], STREAM_LAYOUT).meta
    return meta, [
        ShardEntry(name, "hdf5", 0, -(-count // meta.chunk_tokens), count, sha256)
        for name, (_, count, sha256) in zip(names, rows, strict=True)
    ]


def _index_meta(value: dict[str, Any], where: str) -> StoreMeta:
    layout = require_field(value, "layout", str, where)
    if layout not in INDEX_META_KEYS:
        raise FormatError(f"{where}: expected layout {' or '.join(INDEX_META_KEYS)}, found {layout!r}")
    tokenizer = value.get("tokenizer")
    if tokenizer is not None and not isinstance(tokenizer, dict):
        raise FormatError(f"{where}: tokenizer: expected an object or null, found {tokenizer!r}")
    numbers = {key: require_field(value, key, int, where) for key in INDEX_META_KEYS[layout]}
    fields = require_field({"fields": {}} | value, "fields", dict, where)
    if layout == STREAM_LAYOUT:
        numbers |= {"batch_size": 1, "seq_len": numbers.pop("chunk_tokens")}
    try:
        return StoreMeta(
            dtype=stored_dtype(require_field(value, "dtype", str, where)),
            tokenizer=json.dumps(tokenizer) if tokenizer else "",
            layout=layout,
            fields=tuple(Field.from_json(*item) for item in sorted(fields.items())),
            **numbers,
        )
    except ArgumentError as error:
        raise FormatError(f"{where}: {error}") from error
