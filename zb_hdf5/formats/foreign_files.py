"""HDF5 files of another program as a flat format: of each, the values of one dataset, whatever its axes are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from zb_hdf5.errors import BackendError, FormatError, Remedy, ZbError
from zb_hdf5.files.listing import listed
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.flat import FlatCorpus, FlatFormat
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.foreign import warn_of_mask
from zb_hdf5.formats.format import Found
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.h5_tokens import open_column, open_stored
from zb_hdf5.formats.inspection import find_column, find_foreign_column, is_ours
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import SHARD_PREFIX, STREAM_LAYOUT


class ForeignFiles(FlatFormat):
    """HDF5 files of another program, each with one dataset of tokens: a stream, records or batches. See `FlatFormat`.

    `read_as` names the dataset that is read of each file, and the sense of its axes.
    """

    sign: ClassVar[str] = "HDF5"

    def __init__(self, row: FormatRow, read_as: ReadAs = AS_STORED) -> None:
        super().__init__(row, read_as)
        self._known: dict[str, Column] = {}  # of the file by which a folder was recognised

    @property
    def name(self) -> str:
        """The name that HDF5 files have in states and reports, whoever has written them."""
        return "hdf5"

    def files(self, look: Look) -> list[str]:
        """See `FlatFormat`; a folder is of it if its first file is, or cannot be opened and has no name of ours."""
        if look.is_far:
            return []
        if look.is_dir:
            return self._ids_in(look, listed(look, *self.row.file_suffixes).texts)
        return [look.text] if self.fits(look) else []

    def fits(self, look: Look) -> bool:
        path = look.path
        if not self.row.has_magic(look):
            return False
        with suppress(ZbError):  # a file of ours, or another error: `facts` raises it again
            self._known[look.text] = find_foreign_column(path, self.read_as, look)
            return True
        try:
            return not is_ours(look)
        except FormatError:
            return not look.path.name.startswith(SHARD_PREFIX)

    def facts(self, look: Look) -> FlatFacts:
        return FlatFacts.of(self.take_known(look.text) or find_foreign_column(look.path, self.read_as, look))

    def take_known(self, path: str) -> Column | None:
        """Return the dataset of a file by which its folder was recognised, once; None: this was another file."""
        return self._known.pop(path, None)

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
        found = super().recognise(look, backend, split)
        if found is not None:
            warn_of_mask(self.read_as)
        return found

    def _require_asked(self, path: Path, backend: str) -> None:
        if backend not in ("auto", self.name):
            facts = f"{path}: asked for backend {backend!r}, found HDF5 files of another program"
            raise BackendError(facts, remedy=Remedy.OTHER_KIND, at=self.name)

    def facts_of(self, look: Look, files: Sequence[str]) -> tuple[FlatFacts, ...]:
        """Return the facts of each file at a path, by the dataset of the first one. Raises as `find_foreign_column`.

        Raises
        ------
        FormatError
            If one differs from that of the first file in its axes, its dtype or its fields.
        """
        first = self.take_known(files[0]) or find_foreign_column(any_path(files[0]), self.read_as, look.of(files[0]))
        read_as = replace(self.read_as, dataset=first.name)
        columns = [first]
        for file in files[1:]:
            columns.append(find_foreign_column(any_path(file), read_as))
            _require_alike(first, columns[-1])
        return tuple(map(FlatFacts.of, columns))

    def open(self, file: FoundFile) -> FlatCorpus:
        found, meta = file.of_stream
        column = found.column
        if column is None or (file.identity is not None and column.identity != file.identity):
            column = find_column(file.path, None, read_as=self.read_as, identity=file.identity)
        if meta.field is None:
            return FlatCorpus(file.path, meta, open_stored(column, file.access, file.look), file.digest)
        values = column.fields.get(meta.field.name)
        if values is None:
            raise FormatError(f"{file.path}: was replaced: expected {meta.column} in it, found none; open it again")
        return FlatCorpus(file.path, meta, open_column(values, file.access, file.look), None)


def _require_alike(first: Column, found: Column) -> None:
    """Raise `FormatError` if a file differs from the first one."""
    for describe in (_axes_of, _dtype_of, _fields_of):
        expected = describe(first)
        here = describe(found)
        if here != expected:
            raise FormatError(
                f"{found.path}: {found.name}: expected {expected}, as {first.path.name} has it, found {here}: move the "
                "others to another folder, or convert each kind by itself"
            )


def _axes_of(column: Column) -> str:
    meta = column.meta
    if meta.layout == STREAM_LAYOUT:
        return "a stream"
    if meta.batch_size == 1:
        return f"records of {meta.seq_len:,}"
    return f"batches of {meta.batch_size:,} x {meta.seq_len:,}"


def _dtype_of(column: Column) -> str:
    return column.dtype.str


def _fields_of(column: Column) -> str:
    named = (f"{field.name} {field.dtype}" for field in column.meta.fields)
    return f"the fields {', '.join(named)}" if column.meta.fields else "no fields"
