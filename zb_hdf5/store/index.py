"""The index of a store: the `shards.json` that names its shards. The listing of the folder does not count."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self, cast

import numpy as np

from zb_hdf5.documents.document_table import DocumentPart
from zb_hdf5.errors import ArgumentError, FormatError, Remedy, counted
from zb_hdf5.field import Field
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.named_splits import split_named, train_first
from zb_hdf5.files.paths import RemotePath, any_path, local_path
from zb_hdf5.files.publishing import write_atomically
from zb_hdf5.formats.corpus_file import CorpusFiles
from zb_hdf5.formats.flat_digest import FlatDigest
from zb_hdf5.read_as import ReadAs
from zb_hdf5.spec import (
    CRC32,
    DEFAULT_SPLIT,
    INDEX_DOCUMENTS_KEYS,
    INDEX_FORMAT,
    INDEX_META_KEYS,
    INDEX_NAME,
    INDEX_VERSION,
    NO_CODEC,
    NO_SHA256,
    NOT_KNOWN,
    STREAM_LAYOUT,
    StoreMeta,
    combine_sha256,
    crc32_column,
    extents_column,
    stored_dtype,
)
from zb_hdf5.store.format_list import FORMATS, backends
from zb_hdf5.store.lost_index import no_index
from zb_hdf5.store.parsed_arrays import plain_arrays, require_arrays, require_field, require_paths, require_sha256
from zb_hdf5.store.sealed_text import parse_sealed, read_text, sealed_text
from zb_hdf5.store.shard_table import ShardEntry, ShardTable

#: The largest id of a store, in the `source` entry of its index: of no shard, and of no copy before it is written.
MAX_TOKEN: Final = "max_token"
#: Beside it where no vocabulary size was given: the index has the one that follows from the largest id.
FOUND_VOCABULARY: Final = ("vocab_size", "max_token + 1")


@dataclass(frozen=True)
class ShardIndex:
    """The content of a `shards.json`.

    Attributes
    ----------
    meta
        The facts that all shards share; its counts are counts of the whole store.
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
        The document tables, in each split in the order of their tokens.
    digests
        Path -> the digests of a file that holds none, where they were made. They are in no `shards.json`.
    read_as
        How the files are read, of an index that is made of files in no store; None: of a `shards.json`.
    """

    meta: StoreMeta
    shards: Sequence[ShardEntry]
    shuffle: str = "none"
    source: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    live_id: str = ""
    documents: tuple[DocumentPart, ...] = ()
    digests: Mapping[str, FlatDigest] = field(default_factory=dict, compare=False, repr=False)
    read_as: ReadAs | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        meta = self.meta
        content = f"{self.num_batches} batches of {meta.batch_size} x {meta.seq_len}"
        if meta.layout == STREAM_LAYOUT:
            content = f"{self.token_count} tokens"
        shards = counted(len(self.shards), "shard")
        return f"{type(self).__name__}({content} {meta.dtype.name} in {shards}, complete={self.complete})"

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

    @cached_per_process
    def sha256(self) -> str:
        """Digest of the store: over the shard digests, in order."""
        return combine_sha256(self.table.values["sha256"])

    def of_split(self, split: str | None, path: str | os.PathLike[str] = INDEX_NAME) -> Self:
        """Return the index of the shards of one split, named by any of its words, in order; None: of all shards.

        Parameters
        ----------
        path
            The store, for messages.

        Raises
        ------
        ArgumentError
            If no shard is of that split.
        """
        splits = self.table.values["split"]
        known = dict.fromkeys(splits)
        split = split_named(split)
        if split is None or list(known) == [split]:
            return self
        if split not in known:
            raise ArgumentError(f"{path}: expected a split that this store has ({', '.join(known)}), found {split!r}")
        documents = tuple(part for part in self.documents if part.split == split)
        shards = [self.shards[number] for number, name in enumerate(splits) if name == split]
        return replace(self, shards=shards, documents=documents)

    def files(self, folder: str | os.PathLike[str]) -> CorpusFiles:
        """Return the files of the shards in the folder of the store. A growing one is looked for where its bytes are.

        None is opened, and none is made before it is asked for. Repairs and checks go over these, and not over those of
        a corpus: a damaged store has none.
        """
        folder = any_path(folder)
        values = self.table.values
        names = values["path"]
        if not self.complete:
            growing = self.shards[-1].file(folder)
            names = [*names[:-1], os.fspath(growing.relative_to(folder))]
        return CorpusFiles(folder, names, values["token_count"], values["sha256"], self.digests)

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
        """Return the document tables as parts of one stream, split after split, and its first token of each split."""
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
        """Return the text of the `shards.json`: each array on one line, and last the digest of all before it."""
        return sealed_text(self._facts(), self._sections())

    def _facts(self) -> dict[str, Any]:
        """Return the keys of the whole store."""
        meta = self.meta
        facts: dict[str, Any] = {
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
            facts |= {"complete": self.complete, "live_id": self.live_id}
        return facts

    def _sections(self) -> dict[str, dict[str, Any]]:
        """Return the keys that have an array for each of theirs."""
        sections = self.table.to_json()
        if self.meta.fields:
            digests = self.table.fields
            sections["fields"] = {
                field.name: field.to_json() | plain_arrays(digests[field.name]) for field in self.meta.fields
            }
        if self.documents:
            arrays = map(list, zip(*self.documents, strict=True))
            sections["documents"] = dict(zip(INDEX_DOCUMENTS_KEYS, arrays, strict=True))
        return sections

    @property
    def has_digests(self) -> bool:
        """Whether the sha256 of each shard is known."""
        return NO_SHA256 not in self.table.values["sha256"]

    def without_crc32(self) -> str:
        """Return the path of the first shard for which the index has no crc32 of its batches; "": it has all."""
        unknown = np.flatnonzero(self.table.values["crc32"] == NOT_KNOWN)
        return str(self.table.values["path"][unknown[0]]) if len(unknown) else ""

    def of_field(self, name: str) -> Self:
        """Return the index of a field: the same batches, of its values, in the files that hold them.

        Raises
        ------
        ArgumentError
            If there is no such field.
        """
        meta = self.meta.of_field(name)
        table = self.table
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
        value = parse_sealed(text, path, Remedy.REBUILD)
        where = str(path)
        if isinstance(value, dict) and isinstance(value.get("shards"), list):
            from zb_hdf5.store.foreign_index import foreign_shards  # h5py, which our own index does not need

            return cls(*foreign_shards(value, any_path(path)))
        for key, expected in (("format", INDEX_FORMAT), ("version", INDEX_VERSION)):
            found = require_field(value, key, type(expected), where)
            if found != expected:
                raise FormatError(f"{where}: expected {key} {expected!r}, found {found!r}")
        index = cls(
            shards=ShardTable.from_json(value, where),
            shuffle=require_field(value, "shuffle", str, where),
            source=require_field(value, "source", dict, where),
            complete=require_field({"complete": True} | value, "complete", bool, where),
            live_id=require_field({"live_id": ""} | value, "live_id", str, where),
            documents=_documents_from_json(value["documents"], f"{where}: documents") if "documents" in value else (),
            meta=_meta_from_json(value, where),
        )
        index._check_totals(value, where)
        return index

    def _check_totals(self, value: dict[str, Any], where: str) -> None:
        """Raise `FormatError` if the index contradicts itself; `value` is its parsed text."""
        if not self.shards:
            raise FormatError(f"{where}: lists no shards")
        self._check_counts(where)
        for name in dict.fromkeys(self.table.values["backend"]):
            if name not in FORMATS or not FORMATS[name].holds_batches:
                raise FormatError(f"{where}: expected backend {' or '.join(backends())}, found {name!r}")
        column = self.table.columns.get(self.meta.column)
        if column is not None and column.overlaps(self.meta.batch_bytes):
            raise FormatError(f"{where}: columns: batches overlap", remedy=Remedy.REBUILD)
        if not self.complete and not (self.live_id and all(self.table.values["complete"][:-1])):
            raise FormatError(f"{where}: is not complete: expected a live_id, and that only its last shard grows")
        for key in ("sha256", "token_count"):
            if value.get(key) != getattr(self, key):
                raise FormatError(f"{where}: expected {key} {value.get(key)!r}, its shards give {getattr(self, key)!r}")

    def _check_counts(self, where: str) -> None:
        """Raise `FormatError` if the tokens of a shard do not fill its batches; only the last of a stream may lack."""
        batches = self.table.values["num_batches"]
        tokens = self.table.values["token_count"]
        per_batch = self.meta.batch_tokens
        missing = batches * per_batch - tokens
        most = per_batch - 1 if self.meta.layout == STREAM_LAYOUT else 0
        bad = (missing < 0) | (missing > most)
        if bad.any():
            shard = self.shards[int(bad.argmax())]
            raise FormatError(
                f"{where}: {shard.path}: expected tokens of {shard.num_batches:,} batches of {per_batch:,}, found "
                f"{shard.token_count:,}"
            )

    @property
    def backends(self) -> list[str]:
        """The formats of its shards, in their order."""
        return list(dict.fromkeys(self.table.values["backend"]))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a `shards.json`, given itself or its folder."""
        path = any_path(path)
        path = path if path.name == INDEX_NAME else path / INDEX_NAME
        try:
            return cls.from_json(read_text(path), path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise no_index(path.parent) from error
        except FormatError as error:
            error.at = error.at or str(path.parent)  # an error from inside lacks the folder
            raise

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `shards.json` into `folder`, atomically."""
        write_atomically(local_path(folder) / INDEX_NAME, self.to_json().encode("utf-8"))


def find_index(path: Path) -> Path | None:
    """Return the `shards.json` that a path names or contains, if there is one; a server is not asked."""
    if path.name == INDEX_NAME:
        return path
    known = path.is_dir() if isinstance(path, RemotePath) else (path / INDEX_NAME).exists()
    return path / INDEX_NAME if known else None


def splits_of(path: Path) -> list[str]:
    """Return the splits of a store, that for training first; of anything else its one split."""
    if find_index(path) is None:
        return [DEFAULT_SPLIT]
    return train_first(ShardIndex.load(path).table.values["split"])


def require_files(folder: Path, index: ShardIndex) -> None:
    """Raise `FormatError` if a shard is missing: one listing per folder, no stat per shard, no question for objects."""
    if isinstance(folder, RemotePath):
        return
    paths = index.table.values["path"]
    if not index.complete:
        paths = paths[:-1]  # the last one may be a `.partial`
    there: set[str] = set()
    for parent in {path.rpartition("/")[0] for path in paths}:
        with suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(folder / parent)
            there.update([f"{parent}/{name}" for name in names] if parent else names)
    missing = [path for path in paths if path not in there]
    if missing:
        raise FormatError(
            f"{folder / INDEX_NAME}: names {missing[0]}, which is not there ({len(missing):,} of {len(index.shards):,} "
            "shards are missing); restore them, or convert again"
        )


def source_files(source: dict[str, Any]) -> list[Any]:
    """Return the files of a source, which is free JSON of its writer."""
    files = source.get("files") or source.get("path")
    if isinstance(files, list):
        return files
    return [files] if files else []


def _documents_from_json(value: Any, where: str) -> tuple[DocumentPart, ...]:
    """Check and take the key "documents"."""
    arrays = plain_arrays(require_arrays(value, INDEX_DOCUMENTS_KEYS, where))
    require_paths(arrays["path"], where)
    require_sha256(arrays["sha256"], where)
    parts = tuple(DocumentPart(*row) for row in zip(*arrays.values(), strict=True))
    ends: dict[str, tuple[int, int]] = {}
    for part in parts:
        token, document = ends.get(part.split, (0, 0))
        is_possible = part.token_count >= 0 and part.document_count >= 0
        if not is_possible or part.first_token < token or part.first_document < document:
            raise FormatError(f"{where}: {part.path}: overlaps the table before it", remedy=Remedy.REBUILD)
        end_token = part.first_token + part.token_count
        end_document = part.first_document + part.document_count
        ends[part.split] = (end_token, end_document)
    return parts


def _meta_from_json(value: dict[str, Any], where: str) -> StoreMeta:
    """Check and take the keys of the whole store."""
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
