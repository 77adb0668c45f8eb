"""The records of files of another program, in one file or many, as batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zb_hdf5.files.paths import on_failure
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.flat_tokens import FlatTokens
from zb_hdf5.formats.windows import Windows
from zb_hdf5.read_as import ReadAs
from zb_hdf5.spec import BATCHES_LAYOUT, StoreMeta
from zb_hdf5.store.cut_reader import CutReader
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shards import ReadOptions

if TYPE_CHECKING:  # h5py, which a store with an index does not need
    from zb_hdf5.formats.h5_column import Column


class RecordReader(CutReader):
    """Reads the records of files of another program, all of one length, as batches. See `BatchReader`.

    A batch may have records of several files.

    Parameters
    ----------
    path
        The file, or the folder of the files.
    index
        The files that are read, as chunks of one stream.
    windows
        The records and batches, which do not overlap.
    read_as
        How the files are read; of HDF5 with the name of the dataset.
    access, verify, found
        As for `StoreReader`.
    """

    def __init__(
        self,
        path: Path,
        index: ShardIndex,
        windows: Windows,
        *,
        read_as: ReadAs,
        access: str = "auto",
        verify: str = "auto",
        found: Mapping[int, Column | FlatTokens] | None = None,
    ) -> None:
        how = ReadOptions(access=access, verify=verify, read_as=read_as)
        super().__init__(path, index, found=found, **how)
        self.foreign_dataset = read_as.dataset
        self.layout = BATCHES_LAYOUT
        with on_failure(self.close):
            self.cut(windows)

    def cut(self, windows: Windows) -> None:
        """Join the records to batches of another size."""
        stored = self.index.meta
        self.windows = windows
        self.num_batches, self.rest = windows.cut(self.tokens.num_tokens)
        self.meta = StoreMeta(
            windows.size,
            windows.length,
            stored.dtype,
            fields=stored.fields,
            field=stored.field,
            unfit=stored.unfit,
        )
        self._fingerprint = None
        self._fields = {}

    def _field_reader(self, name: str) -> BatchReader:
        return RecordReader(self.path, self.index.of_field(name), self.windows, **self._options)

    @property
    def token_fingerprint(self) -> str:
        return self.fingerprint if self._is_lone_hdf5 else self._sample()

    @property
    def _is_lone_hdf5(self) -> bool:
        return self.foreign_dataset is not None and len(self.paths) == 1

    def _compute_fingerprint(self) -> str:
        """Return that of `HDF5Reader` for one file of HDF5, so that states fit it; of others the sizes count, too."""
        if self._is_lone_hdf5:
            return BatchReader._compute_fingerprint(self)
        return f"{self.token_fingerprint}:{self.windows.in_text}"
