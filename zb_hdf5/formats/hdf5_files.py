"""HDF5 files as a format: batch stores and streams of ours, and datasets of other programs; one look tells which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.foreign import warn_of_mask
from zb_hdf5.formats.foreign_files import ForeignFiles
from zb_hdf5.formats.format import Format, Found
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.formats.inspection import find_column
from zb_hdf5.read_as import AS_STORED, ReadAs


class HDF5Files(Format):
    """A lone HDF5 file, whoever has written it, or a folder of files of another program: see `ForeignFiles`."""

    def __init__(self, row: FormatRow, read_as: ReadAs = AS_STORED) -> None:
        super().__init__(row, read_as)
        self._in_folder = ForeignFiles(row, read_as)

    def files(self, look: Look) -> list[Path]:
        return self._in_folder.files(look) if look.is_dir else super().files(look)

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
        if look.is_dir:
            return self._in_folder.recognise(look, backend, split)
        found = super().recognise(look, backend, split)
        if found is None:
            return None
        warn_of_mask(self.read_as)
        column = find_column(look.path, None, read_as=self.read_as, look=look)
        return replace(found, layout=column.meta.layout, column=column, identity=column.identity)

    def total_records(self, look: Look) -> int:
        return find_column(look.path, look=look).meta.total_records

    def open(self, file: FoundFile) -> Corpus:
        meta = file.meta
        return HDF5Corpus(
            file.path,
            file.access,
            file.verify,
            None if meta is None else meta.layout,
            field="" if meta is None or meta.field is None else meta.field.name,
            read_as=self.read_as,
            identity=file.identity,
            column=file.column or self._in_folder.take_known(file.path),
            look=file.look,
        )
