"""The index of a finished field set: its parts, the places of their values, and the digest of all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError, IncompleteError, NotFoundError, counted
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.spec import SET_FIELD_KEYS, SET_FORMAT, SET_INDEX, SET_PARTS_KEYS, SET_VERSION
from zb_hdf5.store.parsed_arrays import plain_arrays, require_arrays, require_field
from zb_hdf5.store.sealed_text import parse_sealed, read_text, sealed_text
from zb_hdf5.store.set_facts import SetFacts, first_in_name, require_format


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
