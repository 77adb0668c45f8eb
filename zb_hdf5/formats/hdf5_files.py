"""Lone HDF5 files as a format: batches and streams of ours, and datasets of other programs; one look tells which."""

from __future__ import annotations

from dataclasses import replace

from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.foreign import warn_of_mask
from zb_hdf5.formats.format import Format, Found
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.formats.inspection import find_column


class HDF5Files(Format):
    """A lone HDF5 file, whoever has written it: one look tells. Folders of files of another program: `ForeignFiles`."""

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
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
        corpus = HDF5Corpus(
            file.path,
            file.access,
            None if meta is None else meta.layout,
            field="" if meta is None or meta.field is None else meta.field.name,
            read_as=self.read_as,
            identity=file.identity,
            column=file.column,
            look=file.look,
        )
        return corpus.with_verify(file.verify)
