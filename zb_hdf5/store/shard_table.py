"""The shards of an index: one array for each key, and an entry of a shard when somebody asks for it.

50,000 shards are parsed in a twentieth of the time that one JSON object for each would take.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from zb_hdf5.documents.metadata import TableInfo
from zb_hdf5.errors import FormatError, counted
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.paths import any_path
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.files.ranges import Run
from zb_hdf5.formats.batch_writer import FieldDigest, ShardInfo
from zb_hdf5.spec import (
    CODECS,
    CRC32,
    DEFAULT_SPLIT,
    EXTENTS,
    INDEX_FIELD_KEYS,
    INDEX_OPTIONAL_KEYS,
    INDEX_SHARD_KEYS,
    NO_CODEC,
    NO_SHA256,
    NOT_KNOWN,
    SPLITS,
    extents_column,
)
from zb_hdf5.store.parsed_arrays import plain_arrays, require_arrays, require_field, require_paths, require_sha256
from zb_hdf5.store.run_table import RunTable

#: Key of `shards` -> the type of each element of its array.
_SHARD_KINDS: Final = {key: kind for key, (_, kind) in INDEX_SHARD_KEYS.items()}
#: The values of an entry, in the order of these keys.
_FACTS: Final = attrgetter(*(name for name, _ in INDEX_SHARD_KEYS.values()))
#: Section of the index -> attribute of an entry, and the row of a shard that has none.
_OPTIONAL: Final[dict[str, tuple[str, Any]]] = {
    "pieces": ("pieces", TableInfo(NOT_KNOWN, NO_SHA256)),
    "codecs": ("compressed", CompressedTokens(NO_CODEC, NOT_KNOWN)),
}


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
        Documents whose first token is in the shard; -1: not known.
    columns
        Ranges of the chunks of each column in the file, as runs, so that a reader need not ask HDF5. A column whose
        ranges are not known is not named.
    fields
        The digests of each field, and the size of the file that has it.
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

    def __repr__(self) -> str:
        size = f"{self.num_batches:,} batches, {self.token_count:,} tokens, {self.num_bytes:,} bytes"
        return f"{type(self).__name__}({self.path!r}, {size}, split={self.split!r}, complete={self.complete})"

    @classmethod
    def of(cls, info: ShardInfo, split: str = DEFAULT_SPLIT, document_count: int | None = None) -> Self:
        """Describe a file that was just written.

        Parameters
        ----------
        info
            The facts that its writer returned.
        split
            The split of the shard.
        document_count
            Documents whose first token is in the shard; None: as `info` has it.
        """
        if document_count is None:
            document_count = info.document_count
        return cls(
            path=info.path.name,
            backend=info.backend,
            num_bytes=info.path.stat().st_size,
            num_batches=info.num_batches,
            token_count=info.token_count,
            sha256=info.sha256,
            crc32=crc32_of(info.crc32),
            document_count=NOT_KNOWN if document_count is None else document_count,
            split=split,
            columns=info.columns,
            fields=info.fields,
            compressed=info.compressed,
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the entry that a journal has as an `asdict`: the index keeps its arrays otherwise."""
        columns = {name: tuple(Run(*run) for run in runs) for name, runs in value["columns"].items()}
        fields = {name: FieldDigest(*facts) for name, facts in value["fields"].items()}
        pieces = TableInfo(*value["pieces"]) if value["pieces"] else None
        compressed = CompressedTokens(*value["compressed"]) if value["compressed"] else None
        return cls(**{**value, "columns": columns, "fields": fields, "pieces": pieces, "compressed": compressed})

    def file(self, folder: str | os.PathLike[str]) -> Path:
        """Return the path of its bytes now: a growing shard is in its `.partial` until it is published."""
        path = any_path(folder) / self.path
        return partial_path(path) if not self.complete and partial_path(path).exists() else path

    def has_extents(self, column: str) -> bool:
        """Return whether the index has the ranges of the chunks of a column, or the range of their table."""
        return column in self.columns or (self.compressed is not None and extents_column(column) in self.columns)


@dataclass(eq=False)
class ShardTable(Sequence[ShardEntry]):
    """The shards of an index, one array for each key. An entry is made when it is asked for.

    Attributes
    ----------
    values
        Key of `shards` -> a value for each shard.
    columns
        Column -> its runs.
    fields
        Field -> key of `FieldDigest` -> a value for each shard.
    optional
        Section that some shards have ("pieces", "codecs") -> key -> a value for each shard.
    """

    values: dict[str, Any]
    columns: dict[str, RunTable]
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    optional: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(len(self), 'shard')}, {self.values['token_count'].sum():,} tokens)"

    @classmethod
    def of(cls, entries: Iterable[ShardEntry]) -> Self:
        entries = list(entries)
        values = _arrays(list(map(_FACTS, entries)), _SHARD_KINDS)
        names = dict.fromkeys(name for entry in entries for name in entry.columns)
        columns = {name: RunTable.of([entry.columns.get(name) for entry in entries]) for name in names}
        fields = {}
        for name in sorted({name for entry in entries for name in entry.fields}):
            facts = [entry.fields.get(name, FieldDigest()) for entry in entries]
            fields[name] = _arrays(facts, INDEX_FIELD_KEYS)
        optional = {}
        for section, (name, none) in _OPTIONAL.items():
            found = [getattr(entry, name) for entry in entries]
            if any(found):
                optional[section] = _arrays([each or none for each in found], INDEX_OPTIONAL_KEYS[section])
        return cls(values, columns, fields, optional)

    @classmethod
    def of_files(cls, paths: list[str], fields: Iterable[str] = (), **facts: Any) -> Self:
        """Return the table of files without an index, whose columns are not known.

        Parameters
        ----------
        paths
            Their paths, relative to the folder.
        fields
            The names of their fields, which have no digests.
        **facts
            The other facts of an entry, by their names: an array of them, or the one value that all have.
        """
        values: dict[str, Any] = {}
        for key, (name, kind) in INDEX_SHARD_KEYS.items():
            value = paths if name == "path" else facts[name]
            if kind is int:
                values[key] = np.full(len(paths), value, np.int64)
            else:
                values[key] = value if isinstance(value, list) else [value] * len(paths)
        names = list(fields)
        unknown = _arrays([FieldDigest()] * len(paths), INDEX_FIELD_KEYS) if names else {}
        return cls(values, {}, dict.fromkeys(names, unknown))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle whole numbers as their bytes: an array of one shard takes 50 more, and six are in every reader."""
        values = {key: each.tobytes() if isinstance(each, np.ndarray) else each for key, each in self.values.items()}
        return _table_of, (values, self.columns, self.fields, self.optional)

    def __len__(self) -> int:
        return len(self.values["path"])

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self[k] for k in range(*number.indices(len(self))))
        values = {name: kind(self.values[key][number]) for key, (name, kind) in INDEX_SHARD_KEYS.items()}
        for section, (name, none) in _OPTIONAL.items():
            row = _row(self.optional.get(section), INDEX_OPTIONAL_KEYS[section], number)
            values[name] = None if not row or row[0] == none[0] else type(none)(*row)
        columns = {}
        for name, column in self.columns.items():
            runs = column.of_shard(number)
            if runs is not None:
                columns[name] = runs
        fields = {}
        for name, facts in self.fields.items():
            fields[name] = FieldDigest(*_row(facts, INDEX_FIELD_KEYS, number))
        return ShardEntry(**values, columns=columns, fields=fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def to_json(self) -> dict[str, Any]:
        """Return the sections "shards" and "columns", and the optional ones that shards have."""
        columns = {name: runs.to_json() for name, runs in self.columns.items()}
        optional = {section: plain_arrays(arrays) for section, arrays in self.optional.items()}
        return {"shards": plain_arrays(self.values), "columns": columns, **optional}

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str) -> Self:
        """Check and take the keys "shards" and "columns" of a parsed index."""
        values = require_arrays(require_field(value, "shards", dict, where), _SHARD_KINDS, f"{where}: shards")
        _require_values(values, where)
        num_batches = values["num_batches"]
        columns = {}
        for name, column in require_field(value, "columns", dict, where).items():
            # crc32 and extents have a row for each batch, in chunks of their own
            chunks = None if name.endswith((CRC32, EXTENTS)) else num_batches
            columns[name] = RunTable.from_json(column, len(num_batches), chunks, f"{where}: columns: {name}")
        fields = {}
        for name, facts in require_field({"fields": {}} | value, "fields", dict, where).items():
            fields[name] = require_arrays(facts, INDEX_FIELD_KEYS, f"{where}: fields: {name}", len(num_batches))
            require_sha256(fields[name]["sha256"], f"{where}: fields: {name}")
        return cls(values, columns, fields, _optional_sections(value, len(num_batches), where))


def _table_of(values: dict[str, Any], *sections: Any) -> ShardTable:
    """Return a table that was pickled."""
    arrays = {key: np.frombuffer(each, np.int64).copy() for key, each in values.items() if isinstance(each, bytes)}
    return ShardTable({**values, **arrays}, *sections)


def _require_values(values: dict[str, Any], where: str) -> None:
    """Raise `FormatError` if a value of a shard is not possible."""
    require_paths(values["path"], where)
    require_sha256(values["sha256"], where)
    if unknown := sorted(set(values["split"]) - set(SPLITS)):
        raise FormatError(f"{where}: shards: expected split {' or '.join(SPLITS)}, found {unknown[0]!r}")
    for key, array in values.items():
        least = NOT_KNOWN if key in ("crc32", "document_count") else 0
        if isinstance(array, np.ndarray) and array.min(initial=least) < least:
            raise FormatError(f"{where}: shards: expected {key} >= {least}, found {array.min()}")


def _optional_sections(value: dict[str, Any], num_shards: int, where: str) -> dict[str, dict[str, Any]]:
    """Check and take the sections that only some indexes have."""
    found = {}
    for section, kinds in INDEX_OPTIONAL_KEYS.items():
        if section in value:
            found[section] = require_arrays(value[section], kinds, f"{where}: {section}", num_shards)
    for codec in dict.fromkeys(found.get("codecs", {}).get("codec", ())):
        if codec.partition(":")[0] not in (NO_CODEC, *CODECS):
            raise FormatError(f"{where}: codecs: expected one of {', '.join(CODECS)}, found {codec!r}")
    return found


def _row(arrays: dict[str, Any] | None, kinds: Mapping[str, type[Any]], number: int) -> list[Any]:
    """Return the values of one shard; none where there are no arrays."""
    return [kind(arrays[key][number]) for key, kind in kinds.items()] if arrays else []


def _arrays(rows: Sequence[tuple[Any, ...]], kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Return one array for each key, of rows that have a value for each."""
    arrays = {key: [row[number] for row in rows] for number, key in enumerate(kinds)}
    return {key: np.array(arrays[key], np.int64) if kind is int else arrays[key] for key, kind in kinds.items()}
