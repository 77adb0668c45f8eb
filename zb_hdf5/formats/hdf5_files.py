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
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.formats.inspection import find_column


class HDF5Files(Format):
    """A lone HDF5 file, whoever has written it, or a folder of files of another program: see `ForeignFiles`."""

    def files(self, look: Look) -> list[Path]:
        return ForeignFiles(self.row, self.read_as).files(look) if look.is_dir else super().files(look)

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
        if look.is_dir:
            return ForeignFiles(self.row, self.read_as).recognise(look, backend, split)
        found = super().recognise(look, backend, split)
        if found is None:
            return None
        warn_of_mask(self.read_as)
        column = find_column(look.path, None, read_as=self.read_as)
        return replace(found, layout=column.meta.layout, column=column, identity=column.identity)

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
            column=file.column,
            look=file.look,
        )
