"""The facts of a field set: its fields, the tokens that they belong to, and its cut into records and parts."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, FormatError
from zb_hdf5.field import UNITS, Field
from zb_hdf5.files.publishing import disk_errors, fsync_directory, write_fully
from zb_hdf5.spec import ABOUT, SET_FACTS, SET_FORMAT, SET_GROWN, SET_VERSION, VALUES_PREFIX, VALUES_SUFFIX
from zb_hdf5.store.parsed_arrays import plain_arrays, require_array, require_arrays, require_field
from zb_hdf5.store.sealed_text import parse_sealed, read_text, sealed_text

#: Bytes of a part, unless a set has fewer than so many parts of that size.
VALUES_BYTES: Final = 8 << 30
MOST_PARTS: Final = 1024
LEAST_VALUES_BYTES: Final = 64 << 20
#: Before a digest that covers a sample of the tokens of a file without a stored digest.
SAMPLED: Final = "sampled:"


class BoundFile(NamedTuple):
    """One file of the tokens that a field set belongs to.

    Attributes
    ----------
    name
        Its path, for messages: it may move.
    num_tokens
        Its tokens.
    digest
        The sha256 of its tokens; where none is stored, that of a sample of them behind "sampled:".
    """

    name: str
    num_tokens: int
    digest: str

    def is_same(self, other: BoundFile) -> bool:
        """Return whether another file has the same tokens, whatever its name."""
        return self[1:] == other[1:]


@dataclass(frozen=True)
class SetFacts:
    """The content of a `set.json`, which never changes, and of the files that name tokens which came later.

    Attributes
    ----------
    name, split
        The name of the set, and the split of its tokens.
    fields
        In the order of their names.
    about
        "next": a value at a token is about the token after it. "token": it is about that token.
    record_tokens
        Tokens of a record, which is written and marked as one: of a stream the new ones of a window. 0: its fields
        belong to documents, and a record is a document.
    seq_len
        Tokens of a window of a stream; 0 for stored records.
    num_documents
        Documents, of a set of these; else 0.
    part_records
        Records of each part but the last one.
    files
        The files of the tokens, in order.
    tokenizer
        The description of the tokenizer of the tokens; "": not known.
    maker
        Whatever names the maker of the values: model, revision, commit.
    note
        Free text.
    words
        The words of codes, in a set that has codes of words; else empty.
    """

    name: str
    split: str
    fields: tuple[Field, ...]
    about: str
    record_tokens: int
    seq_len: int
    num_documents: int
    part_records: int
    files: tuple[BoundFile, ...]
    tokenizer: str = ""
    maker: str = ""
    note: str = ""
    words: tuple[str, ...] = ()

    def __repr__(self) -> str:
        content = f"{self.num_records:,} records, fields: {', '.join(field.name for field in self.fields)}"
        return f"{type(self).__name__}({self.name!r}, split={self.split!r}, {content})"

    def __post_init__(self) -> None:
        if self.about not in ABOUT:
            raise ArgumentError(f"about must be one of {', '.join(ABOUT)}, found {self.about!r}")
        if not self.fields:
            raise ArgumentError(f"field set {self.name}: expected a field or more, found none")

    # --- the cut into records --------------------------------------------------------------------------------------

    @property
    def is_of_documents(self) -> bool:
        """Whether the values belong to documents."""
        return self.record_tokens == 0

    @property
    def num_tokens(self) -> int:
        return sum(file.num_tokens for file in self.files)

    @property
    def num_records(self) -> int:
        """Records; the last one of a stream may have fewer tokens."""
        return self.num_documents if self.is_of_documents else -(-self.num_tokens // self.record_tokens)

    @property
    def context_records(self) -> int:
        """Records before the new one in a window of a stream, which are its context."""
        return self.seq_len // self.record_tokens - 1 if self.seq_len else 0

    def items(self, field: Field) -> int:
        """Return the values of a record."""
        return field.size * (self.record_tokens if field.unit == UNITS[0] else 1)

    def shape(self, field: Field) -> tuple[int, ...]:
        """Return the shape of the values of a record."""
        return (self.record_tokens, *field.shape) if field.unit == UNITS[0] else field.shape

    def tokens_of(self, first: int, records: int = 1) -> int:
        """Return the tokens of some records, of which the last one of a stream may have fewer; of documents 1 each."""
        if self.is_of_documents:
            return records
        start = first * self.record_tokens
        return min(start + records * self.record_tokens, self.num_tokens) - start

    def marks(self, first: int, records: int) -> npt.NDArray[np.uint32]:
        """Return the marks of some records that are written: the tokens of each."""
        found = np.full(records, self.record_tokens or 1, np.uint32)
        if records:
            found[-1] = self.tokens_of(first + records - 1)
        return found

    def count(self, field: Field, first: int, records: int) -> int:
        """Return the values of some records."""
        return (self.tokens_of(first, records) if field.unit == UNITS[0] else records) * field.size

    @property
    def record_bytes(self) -> int:
        return sum(self.items(field) * field.dtype.itemsize for field in self.fields)

    def field(self, name: str) -> Field:
        """Return a field by its name; `ArgumentError` if there is none."""
        for field in self.fields:
            if field.name == name:
                return field
        stored = ", ".join(field.name for field in self.fields)
        raise ArgumentError(f"expected a field of the field set {self.name} ({stored}), found {name!r}")

    # --- parts -----------------------------------------------------------------------------------------------------

    @property
    def num_cells(self) -> int:
        """Ranges of `part_records` records; each is one part, or several if the tokens grew meanwhile."""
        return -(-self.num_records // self.part_records)

    def cell(self, number: int) -> tuple[int, int]:
        """Return the first record of a range, and its end."""
        first = number * self.part_records
        return first, min(first + self.part_records, self.num_records)

    # --- comparison ------------------------------------------------------------------------------------------------

    def require_name(self, name: str, where: Path) -> None:
        """Raise `ArgumentError` unless the set in a folder has this name."""
        if self.name != name:
            raise ArgumentError(f"{where}: expected the field set {name!r}, found {self.name!r}")

    def require_same(self, asked: SetFacts, where: Path) -> None:
        """Raise `ArgumentError` unless a job asks for the set that another one has made."""
        for key in ("name", "fields", "about", "record_tokens", "seq_len", "num_documents", "maker", "words"):
            found, expected = getattr(asked, key), getattr(self, key)
            if found != expected:
                raise ArgumentError(f"{where}: this field set was made with {key}={expected!r}, found {key}={found!r}")

    def grown(self, files: Sequence[BoundFile]) -> Self:
        """Return the facts with files of tokens that came later."""
        return replace(self, files=(*self.files, *files))

    def cut(self, part_records: int) -> Self:
        """Return the facts with parts of so many records."""
        return replace(self, part_records=part_records)

    # --- on disk ---------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        facts = {
            "format": SET_FORMAT,
            "version": SET_VERSION,
            **{key: getattr(self, key) for key in SET_KEYS},
            "words": list(self.words),
            "fields": {field.name: field.to_json() for field in self.fields},
        }
        return sealed_text(facts, {"files": files_to_json(self.files)})

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """Return the facts in a text; `FormatError` if it has none, or damaged ones."""
        where = str(path)
        value = parse_sealed(text, path)
        require_format(value, where)
        facts = {key: require_field(value, key, kind, where) for key, kind in SET_KEYS.items()}
        words = require_array(value, "words", str, where)
        files = files_from_json(require_field(value, "files", dict, where), where)
        fields = require_field(value, "fields", dict, where)
        try:
            found = tuple(Field.from_json(name, each) for name, each in sorted(fields.items()))
            return cls(fields=found, files=files, words=tuple(words), **facts)
        except ArgumentError as error:
            raise FormatError(f"{path}: {error}; restore it") from error

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the facts of the set in a folder, and the files of its tokens that came later."""
        path = folder / SET_FACTS
        found = cls.from_json(read_text(path), path)
        for later in grown_files(folder):
            files = require_field(parse_sealed(read_text(later), later), "files", dict, str(later))
            found = found.grown(files_from_json(files, str(later)))
        return found


#: Key of `set.json` -> its type, besides the keys of fields, files and words.
SET_KEYS: Final[dict[str, type[Any]]] = {
    "name": str,
    "split": str,
    "about": str,
    "record_tokens": int,
    "seq_len": int,
    "num_documents": int,
    "part_records": int,
    "tokenizer": str,
    "maker": str,
    "note": str,
}


#: Key of `files` -> JSON type of each element.
_FILE_KEYS: Final = {"name": str, "num_tokens": int, "digest": str}


def require_format(value: Any, where: str) -> None:
    """Raise `FormatError` unless JSON is of a field set, in the version of this package."""
    for key, expected in (("format", SET_FORMAT), ("version", SET_VERSION)):
        found = require_field(value, key, type(expected), where)
        if found != expected:
            raise FormatError(f"{where}: expected {key} {expected!r}, found {found!r}")


def files_to_json(files: Iterable[BoundFile]) -> dict[str, list[Any]]:
    """Return files as one array for each of their facts."""
    columns = zip(*files, strict=True) if files else ((), (), ())
    return dict(zip(BoundFile._fields, map(list, columns), strict=True))


def files_from_json(value: dict[str, Any], where: str) -> tuple[BoundFile, ...]:
    """Return the files whose arrays JSON has; `FormatError` if it has others."""
    arrays = plain_arrays(require_arrays(value, _FILE_KEYS, where))
    return tuple(map(BoundFile, *arrays.values()))


def grown_files(folder: Path) -> Iterator[Path]:
    """Yield the files that name tokens which came later, in order."""
    number = 1
    while (path := folder / f"{SET_GROWN}{number:05}.json").exists():
        yield path
        number += 1


def publish_new(path: Path, text: str) -> bool:
    """Give a text its name, whole, unless the name is taken: of several jobs exactly one returns True."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with disk_errors(path):
            write_fully(fd, text.encode(), 0)
            os.fsync(fd)
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        os.close(fd)
        aside.unlink()
    fsync_directory(path.parent)
    return True


def part_name(first: int) -> str:
    """Return the name of the part that begins with a record."""
    return f"{VALUES_PREFIX}{first:012}{VALUES_SUFFIX}"


def first_in_name(name: str) -> int | None:
    """Return the first record of the part of this name; None: it is none of a part."""
    digits = name.removeprefix(VALUES_PREFIX).removesuffix(VALUES_SUFFIX)
    return int(digits) if name == f"{VALUES_PREFIX}{digits}{VALUES_SUFFIX}" and digits.isdecimal() else None


def records_in_part(num_records: int, record_bytes: int, batch_records: int, part_bytes: int | None) -> int:
    """Return the records of each part: whole stored batches, whatever the number of jobs.

    Parameters
    ----------
    num_records, record_bytes
        The records of the set, and the bytes of their values.
    batch_records
        The records of a stored batch.
    part_bytes
        The bytes of a part, about. None: 8 GiB, or a 1,024th of the set where that is less, but 64 MiB at least.
    """
    if part_bytes is None:
        part_bytes = max(LEAST_VALUES_BYTES, min(VALUES_BYTES, -(-num_records * record_bytes // MOST_PARTS)))
    return max(1, part_bytes // max(1, record_bytes * batch_records)) * batch_records


def maker_text(maker: object) -> str:
    """Return the text of whatever names the maker of the values."""
    if isinstance(maker, str):
        return maker
    try:
        return json.dumps(maker, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"maker: expected text, or what JSON has, found {maker!r}") from error
