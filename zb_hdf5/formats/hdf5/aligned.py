"""A growing HDF5 file of aligned columns: one chunk of each column for each batch, under one commit marker.

The order of writes survives a kill at any of them:

- All objects and attributes exist before SWMR starts, and are only modified after.
- HDF5 writes the header that holds the commit marker *before* the headers of other datasets that grew in the same
  flush: a kill between the two leaves the marker ahead. So all datasets are extended together, and flushed, before
  their data are written, and a commit changes the attributes of one dataset only. Compressed chunks cannot be allocated
  ahead: each changes an index, which is flushed before the marker. Rows behind the marker mean nothing; `complete` cuts
  them off.
- Data are written past HDF5's chunk cache: dirty data in it turn a full disk into a segmentation fault. Disk space is
  allocated before HDF5 is called.
- `file.flush()`, never the dataset's own, writes the superblock too.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ConvertError, Remedy
from zb_hdf5.files.codecs import CompressedTokens, Encoder, require_codec
from zb_hdf5.files.digests import batch_crc32s, crc32_array, crc32_of
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.publishing import PartialFile, write_fully
from zb_hdf5.formats.batch_writer import Columns, FieldDigest
from zb_hdf5.formats.hdf5.file import create_for_swmr, early_allocation, filtered, hdf5_writes
from zb_hdf5.formats.hdf5.places import chunk_offsets, chunk_runs, chunk_table
from zb_hdf5.formats.hdf5.superblock import end_of_file, set_end_of_file
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_LABELS,
    CRC32_CHUNK_ROWS,
    EXTENTS_CHUNK_ROWS,
    FIELD_ATTRIBUTES,
    HDF5_ALIGNMENT,
    NO_CODEC,
    NO_SHA256,
    StoreMeta,
    crc32_column,
    extents_column,
    field_column,
    field_name,
    meta_block_bytes,
)

#: Limit of the rows by which a table is extended: they keep their disk space.
TABLE_ROWS_AHEAD: Final = 1 << 19
#: Alignment of chunks that pages do not suit: of the largest item of a dtype.
TIGHT_ALIGNMENT: Final = 8
#: Disk space that is allocated ahead: to do it for each group takes a tenth of the time of a conversion.
RESERVE_BYTES: Final = 64 << 20


class ColumnSpec(NamedTuple):
    """Name, dtype, chunk shape and codec of a dataset."""

    name: str
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    codec: str = NO_CODEC

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk that is not compressed."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    def slot_bytes(self, alignment: int) -> int:
        """Return the bytes from one chunk to the next: HDF5 aligns no chunk that is smaller than the alignment."""
        small = self.chunk_bytes < alignment
        return self.chunk_bytes if small else -(-self.chunk_bytes // alignment) * alignment


class Rows:
    """A dataset of rows, written in whole chunks past HDF5's chunk cache; the last chunk is written again and again."""

    def __init__(self, h5: h5py.File, name: str, dtype: str, chunk_rows: int, *width: int) -> None:
        self.count = self.crc32 = 0
        self._tail = np.zeros((chunk_rows, *width), dtype)
        self.stored = _create(h5, ColumnSpec(name, np.dtype(dtype), self._tail.shape))

    def whole_chunks(self, count: int) -> int:
        """Return the number of rows in the chunks that `count` rows need."""
        return -(-count // len(self._tail)) * len(self._tail)

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Write `rows` behind those that are there; their chunks are allocated."""
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
    """A column of tokens, and the crc32 of each of its chunks; with `encode` also the extent of each chunk."""

    def __init__(self, h5: h5py.File, spec: ColumnSpec, encode: Encoder | None, alignment: int) -> None:
        self.name, self.chunk_rows = spec.name, spec.chunk_shape[0]
        self._zeros = (0,) * (len(spec.chunk_shape) - 1)
        self.stored = _create(h5, spec)
        self.crc32 = Rows(h5, crc32_column(spec.name), "<u4", CRC32_CHUNK_ROWS)
        self._encode = encode
        if encode is not None:
            self.extents = Rows(h5, extents_column(spec.name), "<u8", EXTENTS_CHUNK_ROWS, 2)
        self.chunk_bytes, self.slot_bytes = spec.chunk_bytes, spec.slot_bytes(alignment)
        self.offsets = np.empty(0, np.int64)  # of the allocated chunks

    def note_new_chunks(self) -> Iterator[tuple[int, int]]:
        """Find the offsets of the chunks that were allocated since; yield the ranges of bytes that they fill."""
        first, stop = len(self.offsets), -(-self.stored.shape[0] // self.chunk_rows)
        if stop > first:
            # two questions, not one for each chunk: HDF5 looks at all chunks to answer one
            begin, last = (self._offset(k * self.chunk_rows) for k in (first, stop - 1))
            new = begin + np.arange(stop - first) * self.slot_bytes
            if new[-1] != last:  # metadata lie between them
                new = chunk_offsets(self.stored)[first:]
            self.offsets = np.concatenate([self.offsets, new])
        return self.ranges(first, stop)

    def _offset(self, row: int) -> int:
        return int(self.stored.id.get_chunk_info_by_coord((row, *self._zeros)).byte_offset)

    def ranges(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each range of bytes that chunks fill one after the other."""
        offsets = self.offsets[first:stop]
        for run in np.split(offsets, np.flatnonzero(np.diff(offsets) != self.slot_bytes) + 1):
            if len(run):
                yield int(run[0]), int(run[-1]) + self.chunk_bytes

    def write(self, first: int, chunks: npt.NDArray[Any]) -> None:
        """Write whole chunks through HDF5: they count when the file's `commit` says so."""
        stored = zip(chunks, repeat(0)) if self._encode is None else self._encode(chunks)
        for number, (chunk, skipped) in enumerate(stored, first):
            self.stored.id.write_direct_chunk((number * self.chunk_rows, *self._zeros), chunk, skipped)

    def commit(self, crc32: list[int]) -> None:
        """Write the crc32 of the chunks that were written since."""
        self.crc32.append(crc32_array(crc32))

    def set_digest(self) -> None:
        """Do nothing: the digest of the tokens is an attribute of the commit."""

    def set_extents(self) -> int:
        """Store the extents of the compressed chunks; return the sum of their bytes."""
        table = chunk_table(self.stored, -(-len(self.stored) // self.chunk_rows))[:, :2]
        self.extents.stored.resize(len(table), axis=0)
        self.extents.append(table.astype("<u8"))
        return int(table[:, 1].sum())

    def runs(self, num_chunks: int) -> dict[str, tuple[Run, ...]]:
        """Return the runs of the datasets that a reader finds without HDF5."""
        if self._encode is None:  # to list the chunks takes HDF5 6 µs each
            own = {self.name: tuple(Extents.from_offsets(self.offsets[:num_chunks], self.chunk_bytes).runs)}
        else:
            own = {extents_column(self.name): chunk_runs(self.extents.stored)}
        return own | {crc32_column(self.name): chunk_runs(self.crc32.stored)}


class FieldColumn(Column):
    """The column of a field, which keeps its own digests."""

    def __init__(self, h5: h5py.File, spec: ColumnSpec, encode: Encoder | None, alignment: int) -> None:
        super().__init__(h5, spec, encode, alignment)
        self._sha256, self._waiting = hashlib.sha256(), list[int]()
        for name, dtype in FIELD_ATTRIBUTES.items():
            self.stored.attrs.create(name, NO_SHA256.encode(), dtype=dtype)

    def write(self, first: int, chunks: npt.NDArray[Any], digested: npt.NDArray[Any] | None = None) -> None:
        """Write whole chunks, and digest them, or `digested`: the values without those that fill up the last chunk."""
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
        """Return the facts about the column that the index keeps, of a file of `num_bytes`."""
        return FieldDigest(num_bytes, self._sha256.hexdigest(), self.crc32.crc32)


class AlignedFile:
    """A file that is being written: its columns are allocated together, ahead of their data, and committed together.

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
        Number of chunks to come, where known.
    durable
        Also flush to disk at each commit.
    commit_bytes
        Commit when at least so many bytes of the main column were written since; 0: each time.
    create
        Called with the new file, to add further objects before SWMR starts; returns its tables of rows.

    Attributes
    ----------
    num_chunks
        Chunks that are allocated.
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
        commit_bytes: int,
        create: Callable[[h5py.File], tuple[Rows, ...]],
    ) -> None:
        self._file, self._attributes, self._durable = file, attributes, durable
        self._commit_bytes, self._waiting_bytes = commit_bytes, 0
        self._waiting, self._latest = list[int](), dict[str, int | bytes]()  # crc32 of chunks, and the marker to come
        self.num_chunks = self._reserved = 0
        self._end = self._solid = 0  # of the file; the first byte behind everything that cannot be cut off
        self.failure: OSError | None = None
        self._codec = main.codec
        require_codec(main.codec, file.path)
        self._encode = None if main.codec == NO_CODEC else Encoder(main.codec)
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
        alignment = alignment_of([*fields, main])
        meta_bytes = meta_block_bytes(expected, 1 + len(fields))
        h5 = self._h5 = create_for_swmr(self._file.own_path, meta_bytes, alignment)
        self._tables = create(h5)
        self.fields = {field_name(spec.name): FieldColumn(h5, spec, self._encode, alignment) for spec in fields}
        self.main = Column(h5, main, self._encode, alignment)
        self._columns = [*self.fields.values(), self.main]
        for name, (dtype, value) in self._attributes.items():
            self.main.stored.attrs.create(name, value, dtype=dtype)
        for column in self._columns if main.name == BATCHES else ():
            for axis, label in enumerate(BATCHES_LABELS):
                column.stored.dims[axis].label = label
        self._allocate(expected, [1] * len(self._tables))
        for table in self._tables:  # a table of offsets begins with 0
            table.append(np.zeros(1, table.stored.dtype))
        h5.flush()
        h5.swmr_mode = True
        # opening them for each commit would take most of its time; SWMR cannot begin while one is open
        self._marker = {name: h5py.h5a.open(self.main.stored.id, name.encode()) for name in self._attributes}

    @contextlib.contextmanager
    def hdf5(self) -> Iterator[None]:
        """Make each failure inside HDF5 one OSError, and remember it: HDF5 cannot go on with such a file."""
        try:
            with hdf5_writes(self._file.partial_path):
                yield
        except OSError as error:
            self.failure = error
            raise

    def require_sound(self, written: str) -> None:
        """Raise `ConvertError` if an earlier write failed; `written` names the committed part."""
        if self.failure is not None:
            raise ConvertError(
                f"{self._file.path}: an earlier write failed ({self.failure}); the {written} that were committed "
                f"before it are in {self._file.partial_path}",
                remedy=Remedy.REPAIR,
                at=self._file.partial_path,
            )

    # --- allocation

    def _allocate(self, num_chunks: int, table_rows: Sequence[int]) -> None:
        """Extend all datasets, flush, and allocate the disk space of all metadata between the new chunks.

        Tables and crc32 rows come first, so that they never part the run of the chunks.
        """
        wanted = dict(zip(self._tables, table_rows, strict=True))
        wanted |= {column.crc32: num_chunks for column in self._columns}
        for table, count in wanted.items():
            table.stored.resize(table.whole_chunks(count), axis=0)
        for column in self._columns:
            column.stored.resize(num_chunks * column.chunk_rows, axis=0)
        end, self.num_chunks = self._h5.id.get_filesize(), num_chunks
        if os.fstat(self._file.fd).st_size < end:
            os.ftruncate(self._file.fd, end)  # before it is announced: HDF5 refuses a file that is shorter than it says
        self._h5.flush()
        if self._encode is None:
            start = self._end
            for begin, stop in sorted(run for column in self._columns for run in column.note_new_chunks()):
                self._fallocate(start, begin)
                self._solid, start = begin, stop
            if start < end:
                self._fallocate(start, end)
                self._solid = end
            self._end = end

    def _fallocate(self, begin: int, end: int) -> None:
        if begin < end:
            os.posix_fallocate(self._file.fd, begin, end - begin)

    def make_room(self, stop: int, ahead: int, table_rows: Sequence[int] = ()) -> None:
        """Allocate the chunks before `stop` and the rows of the tables, with their disk space.

        Parameters
        ----------
        ahead
            Number of chunks by which the file is extended if it must be.
        table_rows
            Number of rows that each table is to have.
        """
        there = self.num_chunks
        if stop > there or any(n > len(t.stored) for t, n in zip(self._tables, table_rows, strict=True)):
            if self._encode is None:  # a full disk is an error before HDF5 is called
                self._fallocate(self._end, self._end + meta_block_bytes(0))
            with self.hdf5():
                rows = [count + min(count, TABLE_ROWS_AHEAD) for count in table_rows]
                self._allocate(max(stop, there + ahead) if stop > there else there, rows)
        if stop > self._reserved:
            slot_bytes = sum(column.slot_bytes for column in self._columns)
            try:
                self._reserve(max(stop, min(self.num_chunks, stop + RESERVE_BYTES // slot_bytes)))
            except OSError:  # a disk that is nearly full may still hold this commit
                self._reserve(stop)

    def _reserve(self, stop: int) -> None:
        """Allocate the disk space of the chunks before `stop`: of compressed ones as if none of them shrank."""
        if self._encode is None:
            for column in self._columns:
                for begin, end in column.ranges(self._reserved, stop):
                    self._fallocate(begin, end)
        else:
            to_come = stop - self.main.crc32.count - len(self._waiting)
            self._fallocate_behind(to_come * sum(column.chunk_bytes for column in self._columns))
        self._reserved = stop

    def _fallocate_behind(self, count: int) -> None:
        """Allocate disk space behind the committed end of the file, for data and their metadata."""
        begin = end_of_file(self._file.fd)
        self._fallocate(begin, begin + count + meta_block_bytes(0))

    # --- writes

    def slots(self, first: int, count: int, slot_bytes: int) -> int | None:
        """Return the offset of chunk `first` of the main column, if `count` chunks lie in slots of this size."""
        if self._encode is not None:
            return None
        begin, last = self.main.offsets[[first, first + count - 1]].tolist()
        return begin if last - begin == (count - 1) * slot_bytes else None

    def end_at(self, rows: int) -> None:
        """Set the end of the columns before a last chunk is written that they do not fill.

        HDF5 would unpack a compressed chunk later, and pack it again, to clear the rest of it.
        """
        if self._encode is not None:
            with self.hdf5():
                for column in self._columns:
                    column.stored.resize(rows, axis=0)

    def write(self, first: int, chunks: npt.NDArray[Any]) -> None:
        """Write whole chunks of the main column: through HDF5 if they are compressed, else all neighbours at once.

        HDF5 would write them one by one, and hold the interpreter lock meanwhile; it keeps no sizes of plain chunks.
        """
        if self._encode is not None:
            with self.hdf5():
                self.main.write(first, chunks)
            return
        offsets = self.main.offsets[first : first + len(chunks)]
        cuts = [0, *(np.flatnonzero(np.diff(offsets) != self.main.chunk_bytes) + 1).tolist()]
        for start, stop in zip(cuts, [*cuts[1:], len(chunks)], strict=True):
            write_fully(self._file.fd, chunks[start:stop], int(offsets[start]))

    def commit(self, crc32: list[int], num_bytes: int, **attributes: int | bytes) -> None:
        """Make the chunks that were written since part of the file, now or with later ones: see `commit_bytes`.

        Parameters
        ----------
        crc32, num_bytes
            Of the chunks of the main column that were written since the last call.
        """
        self._waiting += crc32
        self._waiting_bytes, self._latest = self._waiting_bytes + num_bytes, attributes
        if self._waiting_bytes >= self._commit_bytes:
            self._commit_waiting()

    def _commit_waiting(self) -> None:
        if not self._latest:
            return
        crc32, attributes = self._waiting, self._latest
        self._waiting, self._latest, self._waiting_bytes = [], {}, 0
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
        """Commit, cut off all that was allocated ahead, write the last attributes, and close; return the runs."""
        self._commit_waiting()
        with self.hdf5():
            for column in self._columns:
                column.stored.resize(rows, axis=0)
                column.set_digest()
            for table in (*self._tables, *(column.crc32 for column in self._columns)):
                table.stored.resize(table.count, axis=0)
            if self._encode is not None:
                self._fallocate_behind(len(self._columns) * (num_chunks + EXTENTS_CHUNK_ROWS) * 16)
                num_bytes = [column.set_extents() for column in self._columns]
                self.compressed = CompressedTokens(self._codec, num_bytes[-1])
            self._h5.flush()  # before the marker is complete
            self.modify(**attributes)
            columns: Columns = {}
            for column in reversed(self._columns):
                columns |= column.runs(num_chunks)
            self._h5.close()
        if self._encode is not None:
            self._encode.close()
        self.cut_off(num_chunks)
        return columns

    def cut_off(self, num_chunks: int) -> None:
        """Give back the disk space behind the first chunks; the file is closed. HDF5 frees nothing in SWMR mode."""
        end = end_of_file(self._file.fd)
        if self._encode is None and end == self._end:
            offsets, chunk_bytes = self.main.offsets, self.main.chunk_bytes
            end = max(self._solid, int(offsets[num_chunks - 1]) + chunk_bytes if num_chunks else 0)
            set_end_of_file(self._file.fd, end)
        os.ftruncate(self._file.fd, end)

    def digests(self) -> dict[str, FieldDigest]:
        """Return the digests of each field of the complete file."""
        num_bytes = os.fstat(self._file.fd).st_size
        return {name: column.digest(num_bytes) for name, column in self.fields.items()}

    def close(self) -> None:
        """Close HDF5 without completing."""
        if self._encode is not None:
            self._encode.close()
        if self._h5 is not None:
            with contextlib.suppress(OSError, RuntimeError):  # HDF5 after a failed write: the committed part is on disk
                self._h5.close()


def alignment_of(columns: Sequence[ColumnSpec]) -> int:
    """Return the alignment of the chunks of a file: pages, unless that takes more than a hundredth of its size."""
    if columns[-1].codec != NO_CODEC:
        return 1
    padded, plain = sum(c.slot_bytes(HDF5_ALIGNMENT) for c in columns), sum(c.chunk_bytes for c in columns)
    return HDF5_ALIGNMENT if padded <= 1.01 * plain else TIGHT_ALIGNMENT


def _create(h5: h5py.File, spec: ColumnSpec) -> h5py.Dataset:
    shape, maxshape = (0, *spec.chunk_shape[1:]), (None, *spec.chunk_shape[1:])
    return h5.create_dataset(
        spec.name, shape, spec.dtype, maxshape=maxshape, chunks=spec.chunk_shape, fill_time="never",
        dcpl=early_allocation() if spec.codec == NO_CODEC else filtered(spec.codec),
    )  # fmt: skip


def field_specs(meta: StoreMeta, lead: tuple[int, ...]) -> list[ColumnSpec]:
    """Describe the columns of the fields of a file whose chunks of tokens have the shape `lead`."""
    return [
        ColumnSpec(field_column(field.name), field.dtype, (*lead, *field.shape), meta.codec) for field in meta.fields
    ]
