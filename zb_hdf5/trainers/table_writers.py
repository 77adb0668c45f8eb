"""Writers of tables for Hugging Face's libraries: Parquet files, and folders of Arrow that `load_from_disk` opens.

A row is a document: `input_ids` has its ids, int32, a column of lists has each field, `id` and `metadata` (JSON) have
what is known of it. A folder of two splits has a folder for each, as a `DatasetDict`.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ConvertError
from zb_hdf5.files.publishing import disk_errors, fsync_directory, write_atomically
from zb_hdf5.formats.document_writer import WrittenShard, by_split
from zb_hdf5.formats.row_writer import RowWriter, WrittenRows, text_columns
from zb_hdf5.packages import require_package
from zb_hdf5.spec import StoreMeta
from zb_hdf5.trainers.hf import INFO_NAME, SPLITS_NAME, STATE_NAME


class ListWriter(RowWriter):
    """Writes rows by pyarrow."""

    ids_column: ClassVar = "input_ids"

    @classmethod
    def dtype_of(cls, meta: StoreMeta) -> np.dtype[Any]:
        """Return int32, as tokenizers give it to data sets: of other dtypes trainers make no tensors."""
        return np.dtype("<i4")

    _table: Any = None
    _stream: BinaryIO | None = None

    def _begin(self) -> None:
        pyarrow = require_package("pyarrow", "text")
        columns = [(self.ids_column, _list_of(self.dtype, ()))]
        for field in self.meta.fields:
            try:
                columns.append((field.name, _list_of(field.dtype, field.shape)))
            except (pyarrow.ArrowException, NotImplementedError) as error:
                raise ConvertError(f"{self.path}: field {field.name}: Arrow has no {field.dtype}") from error
        columns += [(name, pyarrow.string()) for name in text_columns(self.facts).values()]
        self._schema = pyarrow.schema(columns)
        stream = os.fdopen(os.dup(self._file.file.fd), "wb")
        self._stream = stream
        self._table = self._open_table(stream, self._schema)

    @abstractmethod
    def _open_table(self, stream: BinaryIO, schema: Any) -> Any:
        """Return a writer of record batches."""

    def _write_rows(self, rows: WrittenRows) -> None:
        pyarrow = require_package("pyarrow", "text")
        edges = list(accumulate(rows.lengths.tolist(), initial=0))
        if edges[-1] > np.iinfo(np.int32).max:
            raise ConvertError(f"{self.path}: a document has {edges[-1]:,} ids, and a row holds fewer than 2**31")
        offsets = pyarrow.array(edges, pyarrow.int32())
        values = [rows.tokens, *(rows.fields[field.name] for field in self.meta.fields)]
        arrays = [pyarrow.ListArray.from_arrays(offsets, _array_of(each)) for each in values]
        arrays += [pyarrow.array([text.decode("utf-8") for text in texts]) for texts in rows.texts.values()]
        with disk_errors(self._file.file.partial_path):
            self._table.write_batch(pyarrow.record_batch(arrays, schema=self._schema))

    def _complete(self) -> None:
        with disk_errors(self._file.file.partial_path):
            self._table.close()
            if self._stream is not None:
                self._stream.close()

    def _discard(self) -> None:
        pyarrow = require_package("pyarrow", "text")
        for each in (self._table, self._stream):
            if each is not None:
                with suppress(OSError, ValueError, pyarrow.ArrowException):  # the disk may be full still
                    each.close()


def _list_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return the type of a column of lists."""
    pyarrow = require_package("pyarrow", "text")
    kind = pyarrow.from_numpy_dtype(dtype)
    for size in reversed(shape):
        kind = pyarrow.list_(kind, size)
    return pyarrow.list_(kind)


def _array_of(values: npt.NDArray[Any]) -> Any:
    """Return values as an array of Arrow: of small arrays, lists of one size."""
    pyarrow = require_package("pyarrow", "text")
    found = pyarrow.array(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        found = pyarrow.FixedSizeListArray.from_arrays(found, values.shape[axis])
    return found


class ParquetWriter(ListWriter):
    """Writes a Parquet file. Its name in a folder has the split, as `load_dataset` looks for it."""

    backend: ClassVar = "parquet"
    suffix: ClassVar = ".parquet"

    def _open_table(self, stream: BinaryIO, schema: Any) -> Any:
        parquet = require_package("pyarrow.parquet", "text")
        return parquet.ParquetWriter(stream, schema)


class ArrowWriter(ListWriter):
    """Writes an Arrow stream, as `save_to_disk` does. `complete_folder` makes the folder one of a `Dataset`."""

    backend: ClassVar = "hf"
    suffix: ClassVar = ".arrow"
    folder_names: ClassVar = (STATE_NAME, INFO_NAME, SPLITS_NAME)

    def _open_table(self, stream: BinaryIO, schema: Any) -> Any:
        return require_package("pyarrow", "text").ipc.new_stream(stream, schema)

    @classmethod
    def complete_folder(
        cls, folder: Path, shards: Sequence[WrittenShard], meta: StoreMeta, facts: Collection[str]
    ) -> None:
        splits = by_split(folder, shards)
        for split, (place, files) in splits.items():
            state: dict[str, Any] = {
                "_data_files": [{"filename": file.path.name} for file in files],
                "_fingerprint": _fingerprint(files),
                "_format_columns": None,
                "_format_kwargs": {},
                "_format_type": None,
                "_output_all_columns": False,
                "_split": split,
            }
            info = {"citation": "", "description": "", "homepage": "", "license": ""}  # its columns are in the files
            _write_json(place / STATE_NAME, state)
            _write_json(place / INFO_NAME, info)
            fsync_directory(place)
        if len(splits) > 1:
            _write_json(folder / SPLITS_NAME, {"splits": [*splits]})


def _fingerprint(files: Sequence[WrittenShard]) -> str:
    """Return 16 hexadecimal digits that stand for the content of files, in the caches of the library."""
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()[:16]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
