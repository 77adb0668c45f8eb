"""A row of the list of formats: the facts of one format and the places of its code, which are imported when needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from zb_hdf5.errors import ArgumentError, Remedy
from zb_hdf5.files.look import Look

#: The endings of the names of HDF5 files; new ones have the first.
HDF5_SUFFIXES: Final = (".h5", ".hdf5", ".hdf", ".he5")


@dataclass(frozen=True, kw_only=True)
class FormatRow:
    """One format, in the list of all: its facts, read before its code is imported.

    Attributes
    ----------
    name
        Its name, as commands and states have it; of the format of a package, that of the entry point.
    noun
        Such files, in messages and in the help.
    suffixes
        The endings of paths that are looked into: of files, and of names in a folder. The first one is that of the
        ids, by which a folder is searched, and that of new files.
    place
        "module:Class" of its subclass of `Format`; "": nothing reads it, and `Format` itself writes it.
    writer
        "module:Class" of its writer: of documents, or of batches where it `takes_batches`; "": it is not written.
    is_flat
        Whether the class is a `FlatFormat`: read in place, and its documents are a source without more code.
    is_of_rows
        Whether the class is a `RowsFormat`: documents in rows, which are read once, in order, for a conversion.
    is_by_ending
        Whether a conversion finds its files by the endings of their names alone: text, and arrays, not all of which are
        read in place.
    options
        The options of a conversion that such documents take: names of those for rows of ids.
    lacks_header
        Whether its files may have no header: `source_dtype` then names the dtype of their ids.
    read_by
        The name of the row that reads the files of a target, if that is another one.
    holds_documents
        Whether its files tell documents apart.
    needs_boundary
        Whether the readers of a target of documents tell documents apart by a token between them.
    holds_ids, holds_metadata
        Whether a target of documents keeps the ids of documents, and their metadata.
    holds_fields
        The names of the fields that a target of documents keeps; None: any.
    takes_batches
        Whether batches are written to its files, one after the other. All attributes below are of such formats.
    holds_batches
        Whether a file has batches, and a folder is a store with a `shards.json`; else records without digests.
    file_noun
        A file of it, in messages.
    as_source, as_target
        Its name in the help of conversions, and an example of a path; None: no command.
    other_suffixes
        Suffixes of such files of another origin.
    magic
        "module:name" of the first bytes of a file; "": its suffix marks it.
    magic_offsets
        "module:name" of the offsets at which the magic bytes may stand; "": they are the first ones.
    has_axes
        Whether files of other programs have arrays of it whose axes may be told.
    tokens_only
        Whether a file has neither fields, documents, streams, codecs, datasets of other programs nor guarded counts,
        and does not grow.
    has_sidecar
        Whether the crc32 rows of a file are in a file of their own.
    holds_uint8
        Whether a file may have ids of one byte.
    uint16_note
        The trouble that other readers have with uint16 tokens.
    default_dtype
        The dtype of new tokens. "auto": the smaller one that fits; "uint32" if other readers know no other one.
    """

    name: str = ""
    noun: str
    suffixes: tuple[str, ...]
    place: str = ""
    writer: str = ""
    is_flat: bool = False
    is_of_rows: bool = False
    is_by_ending: bool = False
    options: tuple[str, ...] = ()
    lacks_header: bool = False
    read_by: str = ""
    holds_documents: bool = True
    needs_boundary: bool = False
    holds_ids: bool = False
    holds_metadata: bool = False
    holds_fields: tuple[str, ...] | None = ()
    takes_batches: bool = False
    holds_batches: bool = False
    file_noun: str = ""
    as_source: tuple[str, str] | None = None
    as_target: tuple[str, str] | None = None
    other_suffixes: tuple[str, ...] = ()
    magic: str = ""
    magic_offsets: str = ""
    has_axes: bool = False
    tokens_only: bool = False
    has_sidecar: bool = False
    holds_uint8: bool = False
    uint16_note: str = ""
    default_dtype: str = "auto"

    @property
    def suffix(self) -> str:
        """The ending of new files."""
        return self.suffixes[0]

    @property
    def file_suffixes(self) -> tuple[str, ...]:
        """The endings of its files, whoever has written them."""
        return (self.suffix, *self.other_suffixes)

    @property
    def takes_documents(self) -> bool:
        """Whether documents are written to its files."""
        return bool(self.writer) and not self.takes_batches

    def magic_bytes(self) -> bytes:
        """Return the first bytes of a file; b"": its suffix marks it."""
        found: bytes = named_part(self.magic) if self.magic else b""
        return found

    def has_magic(self, look: Look) -> bool:
        """Return whether a file carries the magic bytes of this format."""
        magic = self.magic_bytes()
        offsets = named_part(self.magic_offsets) if self.magic_offsets else (0,)
        return bool(magic) and any(_has_at(look, offset, magic) for offset in offsets)

    def lacks_uint8(self, path: Path) -> ArgumentError:
        """Return the error of ids of one byte that a file of this format cannot hold."""
        return ArgumentError(
            f"{path}: {self.name} files have no ids of one byte (dtype uint8)", remedy=Remedy.HDF5_FOR_UINT8
        )


def _has_at(look: Look, offset: int, magic: bytes) -> bool:
    """Return whether a file has some bytes at an offset; of an object its first bytes tell: more are a request."""
    if look.is_far or offset < len(look.start):
        return look.start.startswith(magic, offset)
    return look.read(len(magic), offset) == magic


@cache
def named_part(name: str) -> Any:
    """Import a part of a format by its "module:name", once: thousands of files are opened by it."""
    return resolve_name(name)
