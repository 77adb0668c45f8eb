"""A field set that was made later, as the fields of a corpus: found beside the tokens, and bound to them by digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, IncompleteError, counted
from zb_hdf5.field import Field
from zb_hdf5.files.ranges import Run
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.windows import Windows
from zb_hdf5.notes import note
from zb_hdf5.spec import BATCHES_LAYOUT, CRC32, CRC32_CHUNK_ROWS, NO_CODEC, NO_SHA256, SET_INDEX, StoreMeta
from zb_hdf5.store.bound_tokens import bound_files, require_bound, split_of
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.set_facts import SAMPLED, SetFacts
from zb_hdf5.store.set_index import SetIndex, parts_in
from zb_hdf5.store.set_place import facts_at, set_folder
from zb_hdf5.store.set_values import LackingFiles, PartRows, SetFiles
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.shards import Sharded


class SetCorpus(Corpus):
    """The values of one field of a field set, aligned with the tokens of a corpus. See `Corpus`.

    Attributes
    ----------
    facts
        The facts of the field set.
    about
        As `SetFacts` has it.
    set_sha256
        The digest of the set; "": it is not finished.
    """

    backend = "hdf5"

    def __init__(
        self, path: Path, meta: StoreMeta, tokens: Tokens, facts: SetFacts, set_sha256: str, verify: str
    ) -> None:
        super().__init__(path, meta, tokens)
        self.verify = verify
        self.facts = facts
        self.set_sha256 = set_sha256
        self.about = facts.about
        self.words = facts.words
        self.windows_of_set = Windows(1, facts.seq_len, facts.record_tokens) if facts.seq_len else None

    def meta_of(self, windows: Windows, num_batches: int) -> StoreMeta:
        return replace(self.meta, batch_size=windows.size, seq_len=windows.length)

    @property
    def tokens_of_unit(self) -> int:
        return self.facts.record_tokens

    @property
    def column_in_cache(self) -> str:
        return f"{self.facts.name}-{self.meta.column}-{self.set_sha256}"

    def compared_tokens(self) -> Tokens | None:
        return None if self.verify == "none" else self.tokens

    def cached(self, cache: Callable[[Corpus], Tokens]) -> Corpus:
        """Return this corpus with its values in a cache; values of documents, and of a set not finished, as they are.

        A value of a document is smaller than its mark in a cache is.
        """
        return super().cached(cache) if self.set_sha256 and not self.facts.is_of_documents else self


class FieldInPart(NamedTuple):
    """The values of one field in a part.

    Attributes
    ----------
    first, records
        The first record, and how many.
    path
        The name of the part; "": nobody has begun it.
    num_bytes
        The size of the part.
    offset, crc32_offset
        The places of the values and of the crc32 rows.
    crc32
        The crc32 of these rows, in a set that is finished.
    """

    first: int
    records: int
    path: str = ""
    num_bytes: int = 0
    offset: int = 0
    crc32_offset: int = 0
    crc32: int = 0


@dataclass(frozen=True)
class FoundSet:
    """A field set that was found, and fits the tokens of a corpus.

    Attributes
    ----------
    folder
        Its folder.
    facts
        Its facts.
    access, verify
        How its values are read, as for `open_corpus`.
    index
        The index of a set that is finished; None: records may be missing.
    fills
        The value of missing records for each field.
    """

    folder: Path
    facts: SetFacts
    access: str
    verify: str
    index: SetIndex | None
    fills: Mapping[str, float]

    def corpus_of(self, name: str) -> SetCorpus:
        """Open the values of a field."""
        field = self.facts.field(name)
        meta = StoreMeta(1, self.facts.items(field), field.dtype, layout=BATCHES_LAYOUT, codec=NO_CODEC, field=field)
        tokens = self._lacking(meta, field) if self.index is None else self._finished(self.index, meta, field)
        sha256 = "" if self.index is None else self.index.sha256
        return SetCorpus(self.folder, meta, tokens, self.facts, sha256, self.verify)

    def _finished(self, index: SetIndex, meta: StoreMeta, field: Field) -> Tokens:
        columns = [index.parts[key] for key in ("first", "records", "path", "bytes")]
        columns += [index.fields[field.name][key] for key in ("offset", "crc32_offset", "crc32")]
        entries = [self._entry(meta, field, FieldInPart(*each)) for each in zip(*columns, strict=True)]
        return Sharded(SetFiles(self.folder, ShardIndex(meta, entries), self.access, self.verify))

    def _entry(self, meta: StoreMeta, field: Field, part: FieldInPart) -> ShardEntry:
        """Describe the values of a field in a part as a shard, whose batches are records."""
        rows = Run(part.crc32_offset, 4 * CRC32_CHUNK_ROWS, -(-part.records // CRC32_CHUNK_ROWS))
        return ShardEntry(
            path=part.path,
            backend="hdf5",
            num_bytes=part.num_bytes,
            num_batches=part.records,
            token_count=self.facts.count(field, part.first, part.records),
            sha256=NO_SHA256,
            crc32=part.crc32,
            columns={meta.column: (Run(part.offset, meta.batch_bytes, part.records),), CRC32: (rows,)},
        )

    def _lacking(self, meta: StoreMeta, field: Field) -> Tokens:
        from zb_hdf5.store.value_part import ValuePart  # h5py, which finished values do not need

        fill = self._fill_of(field)
        parts: list[FieldInPart] = []
        rows: dict[int, PartRows] = {}
        done = 0
        for first, path in parts_in(self.folder):
            if first > done:
                parts.append(FieldInPart(done, first - done))
            with closing(ValuePart(path, self.facts)) as part:  # of thousands, so each is closed before the next one
                rows[len(parts)] = PartRows(part.is_there(), part.crc32(field))
            layout = part.layout
            places = layout.num_bytes, layout.values[field.name], layout.crc32[field.name]
            parts.append(FieldInPart(first, layout.records, path.name, *places))
            done = first + layout.records
        if done < self.facts.num_records:
            parts.append(FieldInPart(done, self.facts.num_records - done))
        index = ShardIndex(meta, [self._entry(meta, field, part) for part in parts])
        return Sharded(LackingFiles(self.folder, index, self.access, self.verify, rows=rows, fill=fill))

    def _fill_of(self, field: Field) -> npt.NDArray[Any]:
        """Return the value of a field in records that are missing."""
        if field.name in self.fills:
            return field.filled(self.fills[field.name])
        if field.fill is not None:
            return field.filled(field.fill)
        raise ArgumentError(
            f"{self.folder}: is not finished: expected a value of {field.name} for missing records in allow_missing, "
            f"found {dict(self.fills)}"
        )


def found_set(
    corpus: Corpus, name: str, path: Path | None = None, allow_missing: Mapping[str, float] | None = None
) -> FoundSet:
    """Find a field set of a corpus, and compare its tokens.

    Parameters
    ----------
    corpus
        The tokens.
    name
        The name of the set.
    path
        Its folder; None: where the sets of the corpus lie.
    allow_missing
        As for `Corpus.with_fields`.

    Raises
    ------
    NotFoundError
        If there is none of this name.
    ChecksumError
        If its values belong to other tokens.
    IncompleteError
        If values are missing.
    """
    folder = set_folder(corpus.path, name, split_of(corpus)) if path is None else path
    facts = facts_at(folder, name, corpus.path)
    facts.require_name(name, folder)
    new = require_bound(facts, bound_files(corpus), folder, corpus.path)
    if any(file.digest.startswith(SAMPLED) for file in facts.files):
        note(f"{folder}: bound by a sample: no digest of the tokens of {corpus.path} is stored")
    if new and facts.is_of_documents:
        raise IncompleteError(
            f"{folder}: has values for {counted(facts.num_documents, 'document')}, and {corpus.path} has more now: "
            "remove it, and make it again"
        )
    if new:
        facts = facts.grown(new)
    index = _whole_index(folder, facts, may_lack=allow_missing is not None)
    access = corpus.access if corpus.access in ("auto", "mmap", "pread") else "auto"
    verify = "none" if corpus.verify == "none" else "batch"
    return FoundSet(folder, facts, access, verify, index, dict(allow_missing or {}))


def _whole_index(folder: Path, facts: SetFacts, *, may_lack: bool) -> SetIndex | None:
    """Return the index of a set that was finished, and has values for all records; else None, or `IncompleteError`."""
    if (folder / SET_INDEX).exists():
        index = SetIndex.load(folder, facts)
        if index.has_all_of(facts):
            return index
        if may_lack:
            return None
        missing = max(1, facts.num_records - sum(index.parts["records"]))  # the last one may have more tokens now
        found = f"{counted(missing, 'record')} of later files are missing"
    elif may_lack:
        return None
    else:
        found = "it is not finished"
    raise IncompleteError(
        f"{folder}: {found}: expected values for {facts.num_records:,} records; finish it, or name the values of "
        "missing records in allow_missing"
    )
