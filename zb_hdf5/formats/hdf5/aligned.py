"""A growing HDF5 file of aligned columns: one chunk of each column for each batch, under one commit marker.

Every rule here was paid for with an experiment: all objects and attributes exist before SWMR starts and are only
modified after; data goes past HDF5's chunk cache (dirty data in it turns a full disk into a segmentation fault); all
datasets are extended, and room is reserved, before the data are written, so that a commit modifies the attributes of
one dataset only (of compressed chunks, which have no place ahead, an index as well: that is flushed first);
`file.flush()`, never the dataset's own, brings the superblock along.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.writer import Columns, FieldDigest
from zb_hdf5.errors import ConvertError, Remedy
from zb_hdf5.files.codecs import CompressedTokens, Encoder, require_codec
from zb_hdf5.files.digests import batch_crc32s, crc32_array, crc32_of
from zb_hdf5.files.publishing import PartialFile
from zb_hdf5.formats.hdf5.file import create_for_swmr
from zb_hdf5.formats.hdf5.places import chunk_runs, chunk_table
from zb_hdf5.formats.hdf5.room import LooseRoom, Room, early_allocation, filtered, hdf5_writes
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_LABELS,
    CRC32_CHUNK_ROWS,
    EXTENTS_CHUNK_ROWS,
    FIELD_ATTRIBUTES,
    NO_CODEC,
    NO_SHA256,
    StoreMeta,
    crc32_column,
    extents_column,
    field_column,
    field_name,
    meta_block_bytes,
)

#: By how many rows a table is extended at most: they keep their disk space.
TABLE_ROWS_AHEAD: Final = 1 << 19


class ColumnSpec(NamedTuple):
    """What is created for a column: a dataset whose chunks have this shape and codec."""

    name: str
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    codec: str = NO_CODEC


class Rows:
    """A dataset of rows that is written in whole chunks past HDF5's chunk cache; the last one is written again."""

    def __init__(self, h5: h5py.File, name: str, dtype: str, chunk_rows: int, *width: int) -> None:
        self.count = self.crc32 = 0
        self._tail = np.zeros((chunk_rows, *width), dtype)
        self.stored = _create(h5, ColumnSpec(name, np.dtype(dtype), self._tail.shape))

    def whole_chunks(self, count: int) -> int:
        """Return how many rows the chunks of `count` rows have room for."""
        return -(-count // len(self._tail)) * len(self._tail)

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Write `rows` behind those that are there; there is room for them."""
        chunk_rows = len(self._tail)
        self.crc32 = crc32_of(np.ascontiguousarray(rows, self._tail.dtype), self.crc32)
        while len(rows):
            within = self.count % chunk_rows
            taken = rows[: chunk_rows - within]
            self._tail[within : within + len(taken)] = taken
            self._tail[within + len(taken) :] = 0
            self.count += len(taken)
            self.stored.id.write_direct_chunk(
                (self.count - len(taken) - within, *(0,) * (self._tail.ndim - 1)), self._tail
            )
            rows = rows[len(taken) :]


class Column:
    """A column of tokens, and the crc32 of each of its chunks; with `encode` also where each of them lies."""

    def __init__(self, h5: h5py.File, spec: ColumnSpec, encode: Encoder | None) -> None:
        self.name, self.chunk_rows = spec.name, spec.chunk_shape[0]
        self._zeros = (0,) * (len(spec.chunk_shape) - 1)
        self.stored = _create(h5, spec)
        self.crc32 = Rows(h5, crc32_column(spec.name), "<u4", CRC32_CHUNK_ROWS)
        self._encode = encode
        if encode is not None:
            self.extents = Rows(h5, extents_column(spec.name), "<u8", EXTENTS_CHUNK_ROWS, 2)

    def write(self, first: int, chunks: npt.NDArray[Any]) -> None:
        """Write whole chunks to their places: they count when the file's `commit` says so."""
        stored = zip(chunks, repeat(0)) if self._encode is None else self._encode(chunks)
        for number, (chunk, skipped) in enumerate(stored, first):
            self.stored.id.write_direct_chunk((number * self.chunk_rows, *self._zeros), chunk, skipped)

    def commit(self, crc32: list[int]) -> None:
        """Write the crc32 of the chunks that were written since."""
        self.crc32.append(crc32_array(crc32))

    def set_digest(self) -> None:
        """Do nothing: the digest of the tokens is an attribute of the commit."""

    def set_extents(self) -> int:
        """Store where the compressed chunks lie; return how many bytes they have together."""
        table = chunk_table(self.stored, -(-len(self.stored) // self.chunk_rows))[:, :2]
        self.extents.stored.resize(len(table), axis=0)
        self.extents.append(table.astype("<u8"))
        return int(table[:, 1].sum())

    @property
    def places(self) -> tuple[h5py.Dataset, ...]:
        """The datasets whose own places say where this column lies."""
        return (self.stored if self._encode is None else self.extents.stored, self.crc32.stored)


class FieldColumn(Column):
    """The column of a field, which keeps its own digests."""

    def __init__(self, h5: h5py.File, spec: ColumnSpec, encode: Encoder | None) -> None:
        super().__init__(h5, spec, encode)
        self._sha256, self._waiting = hashlib.sha256(), list[int]()
        for name, dtype in FIELD_ATTRIBUTES.items():
            self.stored.attrs.create(name, NO_SHA256.encode(), dtype=dtype)

    def write(self, first: int, chunks: npt.NDArray[Any], digested: npt.NDArray[Any] | None = None) -> None:
        """Write whole chunks, and digest them, or what of them is `digested`: what fills up the last one is not."""
        super().write(first, chunks)
        values = np.ascontiguousarray(chunks if digested is None else digested)
        self._waiting += batch_crc32s(values)
        self._sha256.update(values)

    def commit(self, crc32: list[int]) -> None:
        super().commit(self._waiting)
        self._waiting = []

    def set_digest(self) -> None:
        """Store the sha256 of all values."""
        self.stored.attrs.modify("sha256", np.array(self._sha256.hexdigest().encode(), FIELD_ATTRIBUTES["sha256"]))

    def digest(self, num_bytes: int) -> FieldDigest:
        """Return what the index keeps of the column, of a file of `num_bytes`."""
        return FieldDigest(num_bytes, self._sha256.hexdigest(), self.crc32.crc32)


class AlignedFile:
    """A file that is being written: its columns are extended together, ahead of their data, and committed together.

    Parameters
    ----------
    file
        Of the final name.
    main
        The column whose dataset has the commit marker.
    fields
        The other columns.
    attributes
        Of the main dataset: name -> (dtype, first value), all created here.
    expected
        How many chunks will come, where known.
    durable
        Also flush to disk at each commit.
    create
        Called with the new file, to add what else it needs before SWMR starts; returns its tables of rows.

    Attributes
    ----------
    compressed
        Of a complete file that has a codec: it, and the bytes that the main column takes.
    """

    compressed: CompressedTokens | None = None

    def __init__(
        self,
        file: PartialFile,
        main: ColumnSpec,
        fields: Sequence[ColumnSpec],
        attributes: Mapping[str, tuple[np.dtype[Any], int | bytes]],
        *,
        expected: int,
        durable: bool,
        create: Callable[[h5py.File], tuple[Rows, ...]],
    ) -> None:
        self._file, self._attributes, self._durable = file, attributes, durable
        self.failure: OSError | None = None
        codec = self._codec = main.codec
        require_codec(codec, file.path)
        self._encode = None if codec == NO_CODEC else Encoder(codec)
        self._h5: Any = None
        file.unlock()
        try:
            with self.hdf5():
                self._create(main, fields, create, expected)
        except BaseException:
            self.close()
            raise
        file.share_lock()  # from here on HDF5 holds no lock, and another "r+" would get in

    def _create(
        self,
        main: ColumnSpec,
        fields: Sequence[ColumnSpec],
        create: Callable[[h5py.File], tuple[Rows, ...]],
        expected: int,
    ) -> None:
        meta_bytes = (len(fields) + 1) * meta_block_bytes(expected)
        h5 = self._h5 = create_for_swmr(self._file.own_path, meta_bytes, aligned=self._encode is None)
        self._tables = create(h5)
        self.fields = {field_name(spec.name): FieldColumn(h5, spec, self._encode) for spec in fields}
        self.main = Column(h5, main, self._encode)
        for name, (dtype, value) in self._attributes.items():
            self.main.stored.attrs.create(name, value, dtype=dtype)
        if main.name == BATCHES:
            for column in (self.main, *self.fields.values()):
                for axis, label in enumerate(BATCHES_LABELS):
                    column.stored.dims[axis].label = label
        self._columns = [*self.fields.values(), self.main]
        room: type[Room | LooseRoom] = Room if self._encode is None else LooseRoom
        self.room = room(h5, [column.stored for column in self._columns], self._file.fd)
        self._extend(expected, [1] * len(self._tables))
        for table in self._tables:  # a table of places begins with 0
            table.append(np.zeros(1, table.stored.dtype))
        h5.flush()
        h5.swmr_mode = True
        # opening them for each commit would take most of its time; SWMR cannot begin while one is open
        self._marker = {name: h5py.h5a.open(self.main.stored.id, name.encode()) for name in self._attributes}

    @contextlib.contextmanager
    def hdf5(self) -> Iterator[None]:
        """Make what fails inside HDF5 one OSError, and remember it: HDF5 cannot go on with such a file."""
        try:
            with hdf5_writes(self._file.partial_path):
                yield
        except OSError as error:
            self.failure = error
            raise

    def require_sound(self, written: str) -> None:
        """Raise `ConvertError` if an earlier write failed; `written` says what was committed before."""
        if self.failure is not None:
            raise ConvertError(
                f"{self._file.path}: an earlier write failed ({self.failure}); the {written} that were committed "
                f"before it are in {self._file.partial_path}",
                remedy=Remedy.REPAIR,
                at=self._file.partial_path,
            )

    def _extend(self, num_chunks: int, table_rows: Sequence[int]) -> None:
        """Make room for chunks and their crc32, and for rows of the tables, in front of them.

        What lies in front never parts the run of the chunks.
        """
        wanted = dict(zip(self._tables, table_rows, strict=True))
        wanted |= {column.crc32: num_chunks for column in self._columns}
        rows = {table.stored: table.whole_chunks(count) for table, count in wanted.items()}
        self.room.extend(rows | {column.stored: num_chunks * column.chunk_rows for column in self._columns})

    def make_room(self, stop: int, ahead: int, table_rows: Sequence[int] = ()) -> None:
        """See that chunks before `stop` and rows of the tables have places and disk space.

        Parameters
        ----------
        ahead
            By how many chunks the file is extended if it must be.
        table_rows
            How many rows each table is to have.
        """
        there = self.room.num_chunks
        if stop > there or any(n > len(t.stored) for t, n in zip(self._tables, table_rows, strict=True)):
            self.room.require_metadata_space()
            with self.hdf5():
                rows = [count + min(count, TABLE_ROWS_AHEAD) for count in table_rows]
                self._extend(max(stop, there + ahead) if stop > there else there, rows)
        self.room.reserve(stop)

    def end_at(self, rows: int) -> None:
        """Say where the columns end, before a last chunk is written that they do not fill.

        Later, HDF5 would unpack that chunk, and pack it again, to clear what lies behind the end.
        """
        if self._encode is not None:
            with self.hdf5():
                for column in self._columns:
                    column.stored.resize(rows, axis=0)

    def write(self, first: int, chunks: npt.NDArray[Any]) -> None:
        """Write whole chunks of the main column to their places: past HDF5, unless they are compressed."""
        if isinstance(self.room, LooseRoom):
            with self.hdf5():
                self.main.write(first, chunks)
        else:
            self.room.write(first, chunks)

    def commit(self, crc32: list[int], **attributes: int | bytes) -> None:
        """Make the chunks that were written since part of the file; `crc32` are those of the main column."""
        with self.hdf5():
            for column in self._columns:
                column.commit(crc32)
            if self._encode is not None:  # each chunk has changed an index: all of them before the marker
                self._h5.flush()
        if self._durable:
            os.fdatasync(self._file.fd)
        self.modify(**attributes)

    def modify(self, **attributes: int | bytes) -> None:
        """Change attributes of the main dataset, and flush."""
        with self.hdf5():
            for name, value in attributes.items():
                self._marker[name].write(np.array(value, dtype=self._attributes[name][0]))
            self._h5.flush()
        if self._durable:
            os.fdatasync(self._file.fd)

    def complete(self, num_chunks: int, rows: int, **attributes: int | bytes) -> Columns:
        """Cut off what was extended ahead, write the last attributes, and close; return where the columns lie."""
        with self.hdf5():
            for column in self._columns:
                column.stored.resize(rows, axis=0)
                column.set_digest()
            for table in (*self._tables, *(column.crc32 for column in self._columns)):
                table.stored.resize(table.count, axis=0)
            if isinstance(self.room, LooseRoom):
                self.room.reserve_bytes(len(self._columns) * (num_chunks + EXTENTS_CHUNK_ROWS) * 16)
                num_bytes = [column.set_extents() for column in self._columns]
                self.compressed = CompressedTokens(self._codec, num_bytes[-1])
            self._h5.flush()  # before the file says that it is complete
            self.modify(**attributes)
            columns = {}
            for column in reversed(self._columns):
                for stored in column.places:
                    known = self.room.runs_of(stored, num_chunks)
                    columns[stored.name.strip("/")] = chunk_runs(stored) if known is None else known
            self._h5.close()
        self._end_encoding()
        self.room.cut_off(num_chunks)
        return columns

    def _end_encoding(self) -> None:
        if self._encode is not None:
            self._encode.close()

    def digests(self) -> dict[str, FieldDigest]:
        """Return the digests of each field of the complete file."""
        num_bytes = os.fstat(self._file.fd).st_size
        return {name: column.digest(num_bytes) for name, column in self.fields.items()}

    def close(self) -> None:
        """Close HDF5 without completing."""
        self._end_encoding()
        if self._h5 is not None:
            with contextlib.suppress(OSError, RuntimeError):  # HDF5 after a failed write; what was committed is on disk
                self._h5.close()


def _create(h5: h5py.File, spec: ColumnSpec) -> h5py.Dataset:
    shape, maxshape = (0, *spec.chunk_shape[1:]), (None, *spec.chunk_shape[1:])
    return h5.create_dataset(
        spec.name, shape, spec.dtype, maxshape=maxshape, chunks=spec.chunk_shape, fill_time="never",
        dcpl=early_allocation() if spec.codec == NO_CODEC else filtered(spec.codec),
    )  # fmt: skip


def field_specs(meta: StoreMeta, lead: tuple[int, ...]) -> list[ColumnSpec]:
    """Return what is created for the fields of a file whose chunks of tokens have the shape `lead`."""
    return [
        ColumnSpec(field_column(field.name), field.dtype, (*lead, *field.shape), meta.codec) for field in meta.fields
    ]
