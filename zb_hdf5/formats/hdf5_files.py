"""HDF5 files as a format: batch stores and streams of ours, and datasets of other programs; one look tells which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zb_hdf5.errors import Remedy, UnverifiableError
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.foreign import NO_DIGESTS, warn_of_mask
from zb_hdf5.formats.foreign_files import ForeignFiles
from zb_hdf5.formats.format import Format, Found
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.formats.inspection import find_column
from zb_hdf5.read_as import AS_STORED
from zb_hdf5.spec import BATCHES_LAYOUT, StoreMeta


class HDF5Files(Format):
    """A lone HDF5 file, whoever has written it, or a folder of files of another program: see `ForeignFiles`."""

    def files(self, look: Look) -> list[Path]:
        return ForeignFiles(self.row, self.read_as).files(look) if look.is_dir else super().files(look)

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
        if look.is_dir:
            return ForeignFiles(self.row, self.read_as).recognise(look, backend, split)
        return super().recognise(look, backend, split)

    def found_file(self, look: Look) -> Found:
        warn_of_mask(self.read_as)
        column = find_column(look.path, None, read_as=self.read_as)
        return Found(look.path, self.name, column.meta.layout, column=column)

    def open_found(self, found: Found, look: Look | None) -> Corpus:
        return HDF5Corpus(found.path, found.access, found.verify, column=found.column, read_as=found.read_as, look=look)

    def open_file(self, path: Path, **options: Any) -> Corpus:
        return HDF5Corpus(path, **options)

    def open_column(
        self,
        path: Path,
        meta: StoreMeta,
        access: str,
        *,
        identity: Identity | None = None,
        column: Column | None = None,
        look: Look | None = None,
    ) -> Corpus:
        if meta.field is None and meta.layout == BATCHES_LAYOUT:
            return HDF5Corpus(path, access, "none", identity=identity)
        return HDF5Corpus(
            path,
            access,
            "none",
            meta.layout,
            field="" if meta.field is None else meta.field.name,
            read_as=self.read_as,
            identity=identity,
            column=column,
            look=look,
        )

    def open_chunks(self, look: Look) -> Corpus:
        path = look.path
        read_as = self.read_as if self.read_as.names_dataset else AS_STORED
        corpus = HDF5Corpus(path, verify="none", layout=None, read_as=read_as, look=look)
        if corpus.foreign_dataset is not None and corpus.sha256 is None:
            corpus.close()
            facts = f"{path}: {corpus.foreign_dataset}: {NO_DIGESTS}"
            raise UnverifiableError(facts, remedy=Remedy.DIGESTS, at=path)
        return corpus
