"""Fields beside a file whose format has no place for them: one `<file>.fields.h5`, written and published before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.file_writer import FileWriter, as_batches
from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.columns.writer import BatchWriter, Columns, FieldArrays, FieldDigest, ShardInfo
from zb_hdf5.errors import ConvertError
from zb_hdf5.files.publishing import PartialFile, disk_errors
from zb_hdf5.formats.hdf5.aligned import AlignedFile, Rows, field_specs
from zb_hdf5.formats.hdf5.file import CREATOR, create_texts
from zb_hdf5.formats.hdf5.writer import batches_attributes
from zb_hdf5.formats.sidecar import fields_path
from zb_hdf5.spec import FIELDS_FORMAT, HDF5_VERSION, StoreMeta, batches_ahead
from zb_hdf5.token_values import as_stored


class FieldsFile:
    """Writes a file of fields only: a chunk of each for each batch. Not thread-safe.

    Parameters
    ----------
    path
        The file to publish.
    meta
        Shape of the batches, and their fields.
    expected_batches, overwrite, durable
        As for `FileWriter`.
    """

    def __init__(
        self, path: Path, meta: StoreMeta, *, expected_batches: int = 0, overwrite: bool = False, durable: bool = False
    ) -> None:
        self._meta, self.num_batches, self._open = meta, 0, True
        self._file = PartialFile(path, overwrite=overwrite)
        lead = (1, *meta.shape)
        try:
            self._aligned = AlignedFile(
                self._file, None, field_specs(meta, lead), batches_attributes(),
                expected=expected_batches, durable=durable, create=self._create_root,
            )  # fmt: skip
        except BaseException:
            self._file.discard()
            raise

    def _create_root(self, h5: h5py.File) -> tuple[Rows, ...]:
        create_texts(h5, format=FIELDS_FORMAT, creator=CREATOR)
        h5.attrs.create("format_version", HDF5_VERSION, dtype="<u4")
        for name in ("batch_size", "seq_len"):
            h5.attrs.create(name, getattr(self._meta, name), dtype="<u8")
        return ()

    def require_sound(self) -> None:
        """Raise `ConvertError` if an earlier write failed in HDF5."""
        self._aligned.require_sound(f"values of {self.num_batches:,} batches")

    def write(self, fields: dict[str, npt.NDArray[Any]], count: int) -> None:
        """Append and commit the values of `count` batches, each as it is stored."""
        stop = self.num_batches + count
        with disk_errors(self._file.partial_path):
            self._aligned.make_room(stop, batches_ahead(self._aligned.room.num_chunks, self._meta))
            with self._aligned.hdf5():
                for name, values in fields.items():
                    self._aligned.fields[name].write(self.num_batches, values)
            self._aligned.commit([], num_batches=stop, token_count=stop * self._meta.batch_tokens)
        self.num_batches = stop

    def complete(self) -> tuple[Columns, dict[str, FieldDigest]]:
        """Complete the file, which has no name yet; return where its columns lie, and their digests."""
        with disk_errors(self._file.partial_path):
            columns = self._aligned.complete(self.num_batches, self.num_batches, complete=1)
        return columns, self._aligned.digests()

    def publish(self) -> None:
        """Give the complete file its name."""
        self._file.publish()
        self._open = False

    def abort(self) -> None:
        """Remove the file, also under its final name."""
        if self._open:
            self._open = False
            self._aligned.close()
            self._file.discard()
        else:
            self._file.path.unlink(missing_ok=True)


class WriterWithFields(BatchWriter):
    """Writes tokens in any format, and their fields beside them. See `BatchWriter`.

    Parameters
    ----------
    writer_class
        Of the file of tokens.
    path, meta, options
        As for `FileWriter`.
    """

    def __init__(self, writer_class: type[FileWriter], path: Path, meta: StoreMeta, **options: Any) -> None:
        self.meta, self.backend = meta, writer_class.backend  # type: ignore[misc]
        self._path, self._overwrite, self._open = path, bool(options.get("overwrite")), True
        self._tokens = writer_class(path, replace(meta, fields=()), **options)
        kept = {key: options[key] for key in ("expected_batches", "overwrite", "durable") if key in options}
        try:
            self._fields = FieldsFile(fields_path(path), meta, **kept)
        except BaseException:
            self._tokens.abort()
            raise

    @property
    def num_batches(self) -> int:
        """Batches whose tokens and fields are committed."""
        return self._tokens.num_batches

    @property
    def token_count(self) -> int:
        return self._tokens.token_count

    @property
    def max_token(self) -> int:
        return self._tokens.max_token

    def write(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> None:
        """Append batches. See `BatchWriter.write`."""
        self.append(batches, fields)()

    def append(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> Callable[[], None]:
        """Append batches: the values of their fields first, so that no batch is without them."""
        self._require_equal()
        tokens, values = as_batches(batches, fields, self.meta, self._path)
        stored = as_stored(tokens, self.meta, f"{self._path} (batch {self.num_batches:,})")
        if len(stored):
            self._fields.write(values, len(stored))
        return self._tokens.append(stored)

    def _require_equal(self) -> None:
        self._tokens._require_open()
        self._fields.require_sound()
        if self._fields.num_batches != self.num_batches:
            raise ConvertError(
                f"{self._path}: an earlier write failed: {self._fields.num_batches:,} batches have fields, "
                f"{self.num_batches:,} have tokens; write the file again"
            )

    def write_from(self, reader: BatchReader, start: int, count: int) -> int:
        """Copy nothing: the fields are in another file."""
        return 0

    def sha256(self) -> str:
        return self._tokens.sha256()

    def crc32(self) -> npt.NDArray[np.uint32]:
        return self._tokens.crc32()

    def finish(self) -> ShardInfo:
        """Complete both files, then publish the fields, and then the tokens."""
        self._require_equal()
        self._open = False
        try:
            columns, digests = self._fields.complete()
            info = self._tokens.finish(self._publish_fields)
        except BaseException:
            self._fields.abort()
            self._tokens.abort()
            raise
        return info._replace(columns=info.columns | columns, fields=digests)

    def _publish_fields(self) -> None:
        """Give the fields their name; tokens that are replaced go first, so that they never have the fields of others.

        A kill leaves the new tokens as a complete `.partial`, and fields that belong to it.
        """
        if self._overwrite:
            with disk_errors(self._path):  # a full disk says so while the old tokens are there
                for writer in (self._fields, self._tokens):
                    os.fsync(writer._file.fd)
            self._path.unlink(missing_ok=True)
        self._fields.publish()

    def abort(self) -> None:
        """Remove the unfinished files."""
        if self._open:
            self._open = False
            self._fields.abort()
            self._tokens.abort()
