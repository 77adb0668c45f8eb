"""A field set that was made later, as the fields of a corpus: found beside the tokens, and bound to them by digests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import (
    ArgumentError,
    ChecksumError,
    ConvertError,
    FormatError,
    IncompleteError,
    NotFoundError,
    Remedy,
    counted,
)
from zb_hdf5.field import Field
from zb_hdf5.files.checked import Crc32Rows, UnitTokens, checked, crc32_of
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import Identity, RemotePath
from zb_hdf5.files.ranges import Extents, Run, open_ranges
from zb_hdf5.files.tokens import FileTokens, TokenRun, Tokens, Wait
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.windows import Windows
from zb_hdf5.notes import note
from zb_hdf5.spec import (
    BATCHES_LAYOUT,
    CRC32,
    CRC32_CHUNK_ROWS,
    DEFAULT_SPLIT,
    INDEX_NAME,
    NO_CODEC,
    NO_SHA256,
    SET_FACTS,
    SET_FIELD_KEYS,
    SET_FORMAT,
    SET_GROWN,
    SET_INDEX,
    SET_PARTS_KEYS,
    SET_VERSION,
    SETS_FOLDER,
    SETS_SUFFIX,
    VALUES_PREFIX,
    StoreMeta,
    TokenArray,
)
from zb_hdf5.store.both_formats import stores_by_format
from zb_hdf5.store.index import ShardIndex, find_index
from zb_hdf5.store.parsed_arrays import plain_arrays, require_arrays, require_field
from zb_hdf5.store.sealed_text import parse_sealed, read_text, sealed_text
from zb_hdf5.store.set_facts import SAMPLED, BoundFile, SetFacts, first_in_name, require_format
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.shards import Sharded
from zb_hdf5.store.store_corpus import StoreCorpus

#: Places that the digest of a sample covers, evenly over the tokens of a file, and the tokens of each.
SAMPLED_PLACES: Final = 16
SAMPLED_TOKENS: Final = 4096


# --- the place of a set, and its tokens ------------------------------------------------------------------------------


def sets_folder(path: Path) -> Path:
    """Return the folder of the field sets of a path: in a store, or beside a file or folder of another program.

    A folder with a store for each format has them beside both, since the tokens of these are the same.
    """
    folder = path.parent if path.name == INDEX_NAME else path
    if isinstance(folder, RemotePath):
        return folder / SETS_FOLDER
    if find_index(folder) is None:
        return folder.with_name(folder.name + SETS_SUFFIX)
    if len(stores_by_format(folder.parent)) > 1:
        return folder.parent / SETS_FOLDER
    return folder / SETS_FOLDER


def set_folder(path: Path, name: str, split: str) -> Path:
    """Return the folder of one field set of a path."""
    return sets_folder(path) / name / split


def sets_of(path: Path) -> list[tuple[str, str]]:
    """Return the names and splits of the field sets that lie with a path, in order."""
    folder = sets_folder(path)
    if isinstance(folder, RemotePath) or not folder.is_dir():
        return []
    return sorted((found.parent.parent.name, found.parent.name) for found in folder.glob(f"*/*/{SET_FACTS}"))


def facts_at(folder: Path, name: str, path: Path) -> SetFacts:
    """Read the facts of the field set in a folder.

    Parameters
    ----------
    folder
        The folder.
    name, path
        The name of the set, and the path of its tokens, for the message.

    Raises
    ------
    NotFoundError
        If there is none.
    """
    if not (folder / SET_FACTS).exists():
        there = ", ".join(f"{each} ({split})" for each, split in sets_of(path)) or "none"
        raise NotFoundError(f"{folder}: there is no field set {name!r}; of {path} there are: {there}")
    return SetFacts.load(folder)


def replaceable_names(folder: Path, names: str, dropped: Sequence[str] = ()) -> str:
    """Return a regular expression of the names that replacing a folder may remove, with those of its field sets.

    Parameters
    ----------
    folder
        The folder.
    names
        That of the names without field sets; "": those of a store alone.
    dropped
        The field sets that are removed with it.

    Raises
    ------
    ConvertError
        If it has other field sets: their values would be lost.
    """
    there = sets_of(folder)
    if not there or sets_folder(folder).parent != folder:
        return names
    if kept := sorted({name for name, _ in there} - set(dropped)):
        raise ConvertError(
            f"{folder}: has the field sets {', '.join(kept)}, whose values would be lost with its tokens",
            remedy=Remedy.DROP_SETS,
            at=",".join(kept),
        )
    folders = {each for pair in there for each in pair}
    known = (SET_FACTS, SET_INDEX, SET_GROWN, VALUES_PREFIX)
    files = rf"\.?({'|'.join(map(re.escape, known))})[.\w]*"
    of_sets = "|".join([SETS_FOLDER, *map(re.escape, folders), files])
    return f"({names})|({of_sets})" if names else of_sets


def split_of(corpus: Corpus) -> str:
    """Return the one split of a corpus; `ArgumentError` if it has several."""
    splits = set(corpus.index.table.values["split"]) if isinstance(corpus, StoreCorpus) else set()
    if len(splits) > 1 or corpus.training_split is not None:
        raise ArgumentError(
            f"{corpus.path}: has several splits, and a field set is of one: take corpus.split({DEFAULT_SPLIT!r})"
        )
    return splits.pop() if splits else str(corpus.origin.get("split") or DEFAULT_SPLIT)


def bound_files(corpus: Corpus) -> tuple[BoundFile, ...]:
    """Return the files of the tokens of a corpus, each with its digest, or that of a sample where none is stored.

    Raises
    ------
    ArgumentError
        If the corpus still grows.
    """
    if not corpus.complete:
        raise ArgumentError(f"{corpus.path}: still grows: values belong to tokens that are finished")
    found = []
    start = 0
    for name, num_tokens, sha256 in corpus.file_facts():
        digest = sha256 or sampled_digest(corpus.tokens, start, start + num_tokens)
        found.append(BoundFile(name, num_tokens, digest))
        start += num_tokens
    return tuple(found)


def sampled_digest(tokens: Tokens, start: int, stop: int) -> str:
    """Return the digest of some tokens in a range, evenly over all of it, and of their number."""
    digest = hashlib.sha256(f"{stop - start}:{tokens.dtype.str}".encode())
    last = max(start, stop - SAMPLED_TOKENS)
    for place in sorted({start + (last - start) * k // (SAMPLED_PLACES - 1) for k in range(SAMPLED_PLACES)}):
        part = np.empty(min(SAMPLED_TOKENS, stop - place), tokens.dtype)
        if len(part):
            tokens.read([(place, part)])
            digest.update(part)
    return f"{SAMPLED}{digest.hexdigest()}"


def require_bound(facts: SetFacts, files: Sequence[BoundFile], where: Path, path: Path) -> tuple[BoundFile, ...]:
    """Return the files of a corpus that a field set has not seen yet, which come after the files that it has.

    Raises
    ------
    ChecksumError
        If the values belong to other tokens.
    """
    for number, expected in enumerate(facts.files):
        found = files[number] if number < len(files) else BoundFile("no file", 0, "")
        if not expected.is_same(found):
            raise ChecksumError(
                f"{where}: its values belong to other tokens than those of {path}: expected {expected.name} of "
                f"{expected.num_tokens:,} tokens ({expected.digest[:16]}), found {found.name} of "
                f"{found.num_tokens:,} tokens ({found.digest[:16] or 'no digest'})"
            )
    return tuple(files[len(facts.files) :])


# --- the index of a finished set -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetIndex:
    """The content of the `index.json` of a finished set.

    Attributes
    ----------
    parts
        Key -> a value for each part, in the order of their records.
    fields
        Field -> key -> a value for each part.
    sha256
        The digest of the set: over the facts of all parts.
    """

    parts: dict[str, list[Any]]
    fields: dict[str, dict[str, list[Any]]]

    @property
    def sha256(self) -> str:
        return hashlib.sha256("".join(self.parts["sha256"]).encode()).hexdigest()

    def has_all_of(self, facts: SetFacts) -> bool:
        """Return whether there are values for all tokens: the last record of a stream grows with it."""
        return bool(sum(self.parts["tokens"]) == facts.tokens_of(0, facts.num_records))

    def to_json(self) -> str:
        facts = {"format": SET_FORMAT, "version": SET_VERSION, "sha256": self.sha256}
        of_fields = {f"field {name}": arrays for name, arrays in self.fields.items()}
        return sealed_text(facts, {"parts": self.parts, **of_fields})

    @classmethod
    def load(cls, folder: Path, facts: SetFacts) -> Self:
        """Read the index of a set; `NotFoundError` if it is not finished."""
        path = folder / SET_INDEX
        if not path.exists():
            raise NotFoundError(f"{path}: there is no such file: the field set {facts.name} is not finished")
        value = parse_sealed(read_text(path), path)
        where = str(path)
        require_format(value, where)
        parts = _arrays(value, "parts", SET_PARTS_KEYS, where)
        fields = {field.name: _arrays(value, f"field {field.name}", SET_FIELD_KEYS, where) for field in facts.fields}
        if [first_in_name(name) for name in parts["path"]] != parts["first"]:
            raise FormatError(f"{where}: expected the names of parts, found {parts['path']}; restore it")
        return cls(parts, fields)


def _arrays(value: Any, section: str, kinds: Mapping[str, type[Any]], where: str) -> dict[str, list[Any]]:
    """Return the arrays of a section of the index; `FormatError` unless they are of their types and of one length."""
    found = require_field(value, section, dict, where)
    return plain_arrays(require_arrays(found, kinds, f"{where}: {section}"))


def part_digest(facts: SetFacts, first: int, records: int, crc32: Mapping[str, npt.NDArray[np.uint32]]) -> str:
    """Return the digest of a part: over its facts and the crc32 of all records, so that no value is read for it."""
    digest = hashlib.sha256(f"{facts.name}:{facts.split}:{facts.about}:{first}:{records}".encode())
    for field in facts.fields:
        digest.update(f":{field.name}:{field.dtype.str}:{facts.shape(field)}:".encode())
        digest.update(crc32[field.name])
    return digest.hexdigest()


def parts_in(folder: Path) -> list[tuple[int, Path]]:
    """Return the parts in the folder of a set, each with its first record, in order."""
    found = ((first_in_name(path.name), path) for path in folder.iterdir())
    return sorted((first, path) for first, path in found if first is not None)


# --- values ----------------------------------------------------------------------------------------------------------


class SetValues(Sharded):
    """The values of a field of a finished set, in all of its parts. See `Tokens`.

    Every read is compared with the crc32 of its records, unless `verify` is "none".
    """

    def _open_by_file(
        self, path: Path, entry: ShardEntry, number: int, unit: int, identity: Identity | None, look: Look | None
    ) -> Tokens:
        raise ChecksumError(
            f"{path}: differs from {SET_INDEX}: it was changed after the field set was finished, or is damaged; "
            "restore it, or remove it and write its records again"
        )


class PartRows(NamedTuple):
    """The rows of one part: which records are written, and the crc32 of each for one field."""

    there: npt.NDArray[np.bool_]
    crc32: npt.NDArray[np.uint32]


class LackingValues(Sharded):
    """The values of a field of a set that is not finished, and a fill value for all others. See `Tokens`.

    They are those that were marked when the corpus was opened: parts that are written meanwhile change nothing.

    Parameters
    ----------
    rows
        The number of a part in `index` -> its rows; a part that nobody has begun is not there.
    fill
        The value for records that are missing.
    """

    def __init__(
        self,
        folder: Path,
        index: ShardIndex,
        access: str,
        verify: str,
        *,
        rows: Mapping[int, PartRows],
        fill: npt.NDArray[Any],
    ) -> None:
        self._fill = fill
        self._rows = rows
        super().__init__(folder, index, access, verify)

    def _open(self, number: int, start: int, look: Look | None = None) -> Tokens:
        entry = self.index.shards[number]
        unit = self.index.meta.batch_tokens
        if number not in self._rows:
            return FilledValues(None, np.zeros(entry.num_batches, bool), self._fill, unit, entry.token_count)
        there, crc32 = self._rows[number]
        path = self.folder / entry.path
        ranges = open_ranges(path, None, entry.num_bytes, self.asked)
        extents = Extents(entry.columns[self.index.meta.column], self.index.meta.batch_bytes)
        tokens: Tokens = FileTokens(ranges, extents, self.dtype, entry.token_count)
        if self._verify != "none":
            tokens = checked(tokens, Crc32Rows(_Kept(crc32)), path, "record", "batch")
        found = FilledValues(tokens, there, self._fill, unit, entry.token_count)
        tokens.share(self.residency)
        return found


class _Kept:
    """Returns rows of crc32 that were read before. Picklable."""

    def __init__(self, rows: npt.NDArray[np.uint32]) -> None:
        self._rows = rows

    def __call__(self, *_: object) -> npt.NDArray[np.uint32]:
        return self._rows


class FilledValues(UnitTokens):
    """Values of one part, with a fill value in the records that are missing. See `Tokens`.

    Parameters
    ----------
    tokens
        The values; None: all are missing.
    there
        Which records are there.
    fill
        The value of the others.
    unit, num_tokens
        The values of a record, and those of all.
    """

    access = "pread"
    wait = Wait.LOCAL
    identity = ()

    def __init__(
        self, tokens: Tokens | None, there: npt.NDArray[np.bool_], fill: npt.NDArray[Any], unit: int, num_tokens: int
    ) -> None:
        super().__init__()
        self._tokens = tokens
        self._there = there
        self._fill = fill
        self.dtype = fill.dtype
        self.unit = unit
        self.num_tokens = num_tokens
        self.name = "missing values" if tokens is None else tokens.name

    def _read_units(self, start: int, out: TokenArray) -> None:
        first = start // self.unit
        there: list[TokenRun] = []
        for number in range(-(-len(out) // self.unit)):
            part = out[number * self.unit : (number + 1) * self.unit]
            if self._there[first + number]:
                there.append((start + number * self.unit, part))
            else:
                part[...] = self._fill
        if self._tokens is not None and there:
            self._tokens.read(there)

    def close(self) -> None:
        if self._tokens is not None:
            self._tokens.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return FilledValues, (self._tokens, self._there, self._fill, self.unit, self.num_tokens)


class SetCorpus(Corpus):
    """The values of one field of a field set, aligned with the tokens of a corpus. See `Corpus`.

    Attributes
    ----------
    facts
        The facts of the field set.
    about
        As `SetFacts` has it.
    """

    backend = "hdf5"

    def __init__(self, path: Path, meta: StoreMeta, tokens: Tokens, facts: SetFacts) -> None:
        super().__init__(path, meta, tokens)
        self.facts = facts
        self.about = facts.about
        self.words = facts.words
        self.windows_of_set = Windows(1, facts.seq_len, facts.record_tokens) if facts.seq_len else None

    def meta_of(self, windows: Windows, num_batches: int) -> StoreMeta:
        return replace(self.meta, batch_size=windows.size, seq_len=windows.length)


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
        return SetCorpus(self.folder, meta, tokens, self.facts)

    def _finished(self, index: SetIndex, meta: StoreMeta, field: Field) -> Tokens:
        columns = [index.parts[key] for key in ("first", "records", "path", "bytes")]
        columns += [index.fields[field.name][key] for key in ("offset", "crc32_offset", "crc32")]
        entries = [self._entry(meta, field, FieldInPart(*each)) for each in zip(*columns, strict=True)]
        return SetValues(self.folder, ShardIndex(meta, entries), self.access, self.verify)

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
        return LackingValues(self.folder, index, self.access, self.verify, rows=rows, fill=fill)

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
    new = require_bound(facts, bound_files(corpus), folder, corpus.path)
    if any(file.digest.startswith(SAMPLED) for file in facts.files):
        note(f"{folder}: bound by a sample: no digest of the tokens of {corpus.path} is stored")
    if new:
        facts = facts.grown(new)
    index = _whole_index(folder, facts) if allow_missing is None else None
    access = corpus.access if corpus.access in ("auto", "mmap", "pread") else "auto"
    verify = "none" if corpus.verify == "none" else "batch"
    return FoundSet(folder, facts, access, verify, index, dict(allow_missing or {}))


def _whole_index(folder: Path, facts: SetFacts) -> SetIndex:
    """Return the index of a set; `IncompleteError` unless it was finished, and has values for all records."""
    if (folder / SET_INDEX).exists():
        index = SetIndex.load(folder, facts)
        if index.has_all_of(facts):
            return index
        missing = max(1, facts.num_records - sum(index.parts["records"]))  # the last one may have more tokens now
        found = f"{counted(missing, 'record')} of later files are missing"
    else:
        found = "it is not finished"
    raise IncompleteError(
        f"{folder}: {found}: expected values for {facts.num_records:,} records; finish it, or name the values of "
        "missing records in allow_missing"
    )


def index_of(folder: Path, facts: SetFacts) -> SetIndex:
    """Read the rows of all parts, and return the index of the set; `IncompleteError` if a record is missing."""
    from zb_hdf5.store.value_part import ValuePart  # h5py, which finished values do not need

    parts: dict[str, list[Any]] = {key: [] for key in SET_PARTS_KEYS}
    fields: dict[str, dict[str, list[Any]]] = {
        field.name: {key: [] for key in SET_FIELD_KEYS} for field in facts.fields
    }
    done = missing = 0
    for first, path in parts_in(folder):
        with closing(ValuePart(path, facts)) as part:
            missing += max(0, first - done) + int((~part.is_there()).sum())
            crc32 = {field.name: part.crc32(field) for field in facts.fields}
        layout = part.layout
        done = first + layout.records
        tokens = facts.tokens_of(first, layout.records)
        digest = part_digest(facts, first, layout.records, crc32)
        row = (path.name, layout.num_bytes, first, layout.records, tokens, digest)
        for key, value in zip(SET_PARTS_KEYS, row, strict=True):
            parts[key].append(value)
        for field in facts.fields:
            name = field.name
            facts_of = (layout.values[name], layout.crc32[name], crc32_of(crc32[name]))
            for key, value in zip(SET_FIELD_KEYS, facts_of, strict=True):
                fields[name][key].append(value)
    missing += facts.num_records - done
    if missing:
        raise IncompleteError(
            f"{folder}: expected values for {facts.num_records:,} records, {counted(missing, 'record')} are missing"
        )
    return SetIndex(parts, fields)
