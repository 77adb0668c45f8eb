"""The writer of MDS for MosaicML streaming: a shard for each file, and `index.json` beside them, or in each split.

A sample is a document: `tokens` has its ids as an array, a column of arrays has each field, `id` and `metadata` (JSON)
have what is known of it. The bytes of a shard are described in `mds.py`.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ConvertError
from zb_hdf5.files.checked import GROUP_BYTES
from zb_hdf5.files.publishing import disk_errors, fsync_directory, write_atomically
from zb_hdf5.formats.document_writer import WrittenShard, by_split, small_dtype
from zb_hdf5.formats.row_writer import ID_COLUMN, METADATA_COLUMN, RowWriter, WrittenRows, text_columns
from zb_hdf5.spec import StoreMeta
from zb_hdf5.trainers.index_folder import FOLDER_INDEX, MAX_FILE_BYTES, NUMBER_BYTES
from zb_hdf5.trainers.mds import ARRAY, MDS, MDS_DTYPES, MDS_VERSION

#: The encodings of the facts of documents.
_TEXT_ENCODINGS: Final = {ID_COLUMN: "str", METADATA_COLUMN: "json"}


class MdsWriter(RowWriter):
    """Writes a shard, whole and without hashes. `complete_folder` writes the index."""

    backend: ClassVar = MDS
    suffix: ClassVar = ".mds"
    folder_names: ClassVar = (FOLDER_INDEX,)
    ids_column: ClassVar = "tokens"

    @classmethod
    def dtype_of(cls, meta: StoreMeta) -> np.dtype[Any]:
        """Return uint16 for a vocabulary of at most 65,536, else int32: of uint32 torch makes few tensors."""
        small = small_dtype(meta)
        return small if small.itemsize == 2 else np.dtype("<i4")

    @classmethod
    def encodings(cls, meta: StoreMeta, facts: Collection[str]) -> dict[str, str]:
        """Return the encoding of each column, in the order in which a sample has them.

        Raises
        ------
        ConvertError
            If MDS has no arrays of the dtype of a field.
        """
        found = {cls.ids_column: f"{ARRAY}:{cls.dtype_of(meta).name}"}
        for field in meta.fields:
            dtype = _array_dtype(field.dtype)
            if dtype not in MDS_DTYPES.values():
                raise ConvertError(f"field {field.name}: MDS has no arrays of {field.dtype}")
            found[field.name] = f"{ARRAY}:{dtype.name}"
        found |= {column: _TEXT_ENCODINGS[column] for column in text_columns(facts).values()}
        return dict(sorted(found.items()))

    @classmethod
    def config(cls, meta: StoreMeta, facts: Collection[str]) -> dict[str, Any]:
        """Return the columns of a shard, as it and the index have them."""
        encodings = cls.encodings(meta, facts)
        return {
            "column_encodings": [*encodings.values()],
            "column_names": [*encodings],
            "column_sizes": [None] * len(encodings),
            "compression": None,
            "format": MDS,
            "hashes": [],
            "size_limit": None,
            "version": MDS_VERSION,
        }

    def _begin(self) -> None:
        self._config = json.dumps(self.config(self.meta, self.facts), sort_keys=True).encode()
        self._columns = [*self.encodings(self.meta, self.facts)]
        self._sizes = array("L")  # of the samples
        self._num_bytes = 0
        # the header, whose size is known at the end, comes before the samples
        self._samples = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 - closed by _complete, or _discard

    def _write_rows(self, rows: WrittenRows) -> None:
        edges = [0, *np.cumsum(rows.lengths).tolist()]
        columns: dict[str, Sequence[bytes]] = {**rows.texts}
        arrays = {self.ids_column: rows.tokens, **rows.fields}
        for name, values in arrays.items():
            stored = values.astype(_array_dtype(values.dtype), copy=False)
            columns[name] = [_array_bytes(stored[start:stop]) for start, stop in pairwise(edges)]
        parts: list[bytes] = []
        for sample in zip(*(columns[name] for name in self._columns), strict=True):
            sizes = [len(value) for value in sample]
            parts += [np.array(sizes, "<u4").tobytes(), *sample]
            self._sizes.append(NUMBER_BYTES * len(sizes) + sum(sizes))
            self._num_bytes += self._sizes[-1]
        if self._start + self._num_bytes > MAX_FILE_BYTES:
            raise ConvertError(f"{self.path}: a shard of MDS has less than 4 GiB: pass more shards", options=["shards"])
        with disk_errors(self._file.file.partial_path):
            self._samples.write(b"".join(parts))

    @property
    def _start(self) -> int:
        """The first byte of the first sample."""
        return NUMBER_BYTES * (len(self._sizes) + 2) + len(self._config)

    def _complete(self) -> None:
        offsets = np.fromiter(accumulate(self._sizes, initial=self._start), "<u4", len(self._sizes) + 1)
        self._file.append(np.array([len(self._sizes)], "<u4"))
        self._file.append(offsets)
        self._file.append(self._config)
        with disk_errors(self._file.file.partial_path):
            self._samples.seek(0)
            while data := self._samples.read(GROUP_BYTES):
                self._file.append(data)
            self._samples.close()

    def _discard(self) -> None:
        if hasattr(self, "_samples"):
            self._samples.close()

    @classmethod
    def complete_folder(
        cls, folder: Path, shards: Sequence[WrittenShard], meta: StoreMeta, facts: Collection[str]
    ) -> None:
        for place, files in by_split(folder, shards).values():
            entries = [
                {
                    **cls.config(meta, facts),
                    "raw_data": {"basename": file.path.name, "bytes": file.num_bytes, "hashes": {}},
                    "samples": file.document_count,
                    "zip_data": None,
                }
                for file in files
            ]
            index = json.dumps({"shards": entries, "version": MDS_VERSION}, sort_keys=True)
            write_atomically(place / FOLDER_INDEX, index.encode())
            fsync_directory(place)


def _array_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of an array of MDS for values: truth values are numbers there."""
    return np.dtype("u1") if dtype.kind == "b" else dtype.newbyteorder("<")


def _array_bytes(values: npt.NDArray[Any]) -> bytes:
    """Return an array with its shape in front, in the smallest dtype that holds all of its numbers."""
    largest = max(values.shape)
    code = next(code for code in range(4) if largest < 1 << (8 << code))
    shape = np.array(values.shape, f"<u{1 << code}").tobytes()
    return bytes([(values.ndim << 2) | code]) + shape + values.tobytes()
