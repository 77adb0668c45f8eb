"""Writes HDF5 files that grow: columns of chunks under one commit marker, and the batch store, of one chunk a batch.

The order of writes survives a kill at any of them:

- All objects and attributes exist before SWMR starts, and are only modified after.
- HDF5 writes the header that holds the commit marker *before* the headers of other datasets that grew in the same
  flush: a kill between the two leaves the marker ahead. So all datasets are extended together, and flushed, before
  their data are written, and a commit changes the attributes of one dataset only. Compressed chunks cannot be allocated
  ahead: each changes an index, which is flushed before the marker. Rows after the marker mean nothing; the end of the
  writer cuts them off.
- Data are written past HDF5's chunk cache: dirty data in it turn a full disk into a segmentation fault. Disk space is
  allocated before HDF5 is called.
- `file.flush()`, never the dataset's own, writes the superblock too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ConvertError, Remedy, counted
from zb_hdf5.files.checked import GroupDigest, crc32_of
from zb_hdf5.files.codecs import CompressedTokens, Encoder, require_codec
from zb_hdf5.files.publishing import disk_errors, write_fully
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.formats.batch_writer import FieldDigest, FileWriter, ShardInfo, TokenWriter
from zb_hdf5.hdf5.h5_attributes import create_attribute, create_root
from zb_hdf5.hdf5.h5_chunks import chunk_offsets, chunk_runs, chunk_table, creation_of
from zb_hdf5.hdf5.h5_file import open_h5
from zb_hdf5.hdf5.superblock import end_of_file, set_end_of_file
from zb_hdf5.hdf5.written_file import WriteFailure, WrittenFile, hdf5_writes
from zb_hdf5.packages import h5py
from zb_hdf5.spec import (
    BATCHES_ATTRIBUTES,
    BATCHES_LABELS,
    CRC32_CHUNK_ROWS,
    DOC_OFFSETS,
    DOC_OFFSETS_CHUNK_ROWS,
    DOCUMENTS_SHA256,
    EXTENTS_CHUNK_ROWS,
    FIELD_ATTRIBUTES,
    HDF5_ALIGNMENT,
    HDF5_LIBVER,
    NO_CODEC,
    NO_SHA256,
    SHA256_CHARS,
    STREAM_LAYOUT,
    StoreMeta,
    TokenArray,
    batches_ahead,
    crc32_column,
    extents_column,
    meta_block_bytes,
)

#: Limit of the rows by which a table is extended: they keep their disk space.
TABLE_ROWS_AHEAD: Final = 1 << 19
#: Alignment of chunks that pages do not suit: of the largest item of a dtype.
TIGHT_ALIGNMENT: Final = 8
#: Disk space that is allocated ahead: to do it for each group takes a tenth of the time of a conversion.
RESERVE_BYTES: Final = 64 << 20


class GrowingDataset:
    """A dataset of rows, written in whole chunks past HDF5's chunk cache; the last chunk is written again and again.

    Parameters
    ----------
    h5, name
        The file, and the name of the dataset to make.
    dtype
        The dtype of a value.
    chunk_rows
        Rows of a chunk.
    width
        The other axes of the dataset, such as 2 for pairs.
    """

    def __init__(self, h5: h5py.File, name: str, dtype: str, chunk_rows: int, *width: int) -> None:
        self.count = self.crc32 = 0
        self._tail = np.zeros((chunk_rows, *width), dtype)
        self.stored = _create(h5, name, self._tail.dtype, self._tail.shape)

    def resize(self, count: int) -> None:
        """Set the number of rows to that of the whole chunks that `count` rows need."""
        self.stored.resize(-(-count // len(self._tail)) * len(self._tail), axis=0)

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Write rows after the last one, in allocated chunks."""
        rows = np.ascontiguousarray(rows, self._tail.dtype)
        self.crc32 = crc32_of(rows, self.crc32)
        while len(rows):
            within = self.count % len(self._tail)
            taken = rows[: len(self._tail) - within]
            self._tail[within : within + len(taken)] = taken
            self._tail[within + len(taken) :] = 0
            self.stored.id.write_direct_chunk((self.count - within, *(0,) * (self._tail.ndim - 1)), self._tail)
            self.count += len(taken)
            rows = rows[len(taken) :]


class WrittenColumn:
    """A column of tokens or of a field that is written, and the crc32 of each of its chunks.

    Parameters
    ----------
    h5
        The file.
    meta
        Shape and dtype of its chunks.
    encode
        Compresses the chunks, whose extents are then stored too; None: they are stored as they come.
    alignment
        The alignment of the chunks in the file, in bytes.
    """

    def __init__(self, h5: h5py.File, meta: StoreMeta, encode: Encoder | None, alignment: int) -> None:
        lead = (meta.seq_len,) if meta.layout == STREAM_LAYOUT else (1, *meta.shape)
        if meta.field is not None:
            lead = (*lead[:-1], meta.seq_len // meta.field.size, *meta.field.shape)
        self.name = meta.column
        self.chunk_rows = lead[0]
        self._zeros = (0,) * (len(lead) - 1)
        self.stored = _create(h5, self.name, meta.dtype, lead, meta.codec)
        self.crc32 = GrowingDataset(h5, crc32_column(self.name), "<u4", CRC32_CHUNK_ROWS)
        self._encode = encode
        if encode is not None:
            self._extents = GrowingDataset(h5, extents_column(self.name), "<u8", EXTENTS_CHUNK_ROWS, 2)
        self.chunk_bytes = meta.batch_bytes
        self.slot_bytes = _slot_bytes(meta, alignment)
        self.offsets = np.empty(0, np.int64)  # of the allocated chunks
        self.waiting = list[int]()  # crc32 of chunks that are to be committed
        self.is_field = meta.field is not None
        self.sha256 = hashlib.sha256()  # of the values of a field
        if self.is_field:
            create_attribute(self.stored, "sha256", NO_SHA256.encode(), FIELD_ATTRIBUTES["sha256"])

    def note_new_chunks(self) -> Iterator[tuple[int, int]]:
        """Find the offsets of the chunks that were allocated since; yield the ranges of bytes that they fill."""
        first = len(self.offsets)
        stop = -(-self.stored.shape[0] // self.chunk_rows)
        if stop > first:
            # two questions, not one for each chunk: HDF5 looks at all chunks to answer one
            rows = [(number * self.chunk_rows, *self._zeros) for number in (first, stop - 1)]
            begin, last = (int(self.stored.id.get_chunk_info_by_coord(row).byte_offset) for row in rows)
            new = begin + np.arange(stop - first) * self.slot_bytes
            if new[-1] != last:  # metadata are between them
                new = chunk_offsets(self.stored)[first:]
            self.offsets = np.concatenate([self.offsets, new])
        return self.ranges(first, stop)

    def ranges(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each range of bytes that chunks fill one after the other."""
        offsets = self.offsets[first:stop]
        for run in np.split(offsets, np.flatnonzero(np.diff(offsets) != self.slot_bytes) + 1):
            if len(run):
                yield int(run[0]), int(run[-1]) + self.chunk_bytes

    def write(self, first: int, chunks: npt.NDArray[Any]) -> None:
        """Write whole chunks through HDF5."""
        stored = zip(chunks, repeat(0)) if self._encode is None else self._encode(chunks)
        for number, (chunk, skipped) in enumerate(stored, first):
            self.stored.id.write_direct_chunk((number * self.chunk_rows, *self._zeros), chunk, skipped)

    def digest(self, values: npt.NDArray[Any]) -> None:
        """Digest values of a field that were written."""
        values = np.ascontiguousarray(values)
        self.sha256.update(values)
        self.waiting += map(crc32_of, values)

    def set_extents(self) -> int:
        """Store the extents of the compressed chunks; return the sum of their bytes."""
        table = chunk_table(self.stored, -(-len(self.stored) // self.chunk_rows))[:, :2]
        self._extents.stored.resize(len(table), axis=0)
        self._extents.append(table.astype("<u8"))
        return int(table[:, 1].sum())

    def runs(self, num_chunks: int) -> dict[str, tuple[Run, ...]]:
        """Return the runs of the datasets that a reader finds without HDF5."""
        if self._encode is None:  # to list the chunks takes HDF5 6 µs each
            own = {self.name: tuple(Extents.from_offsets(self.offsets[:num_chunks], self.chunk_bytes).runs)}
        else:
            own = {extents_column(self.name): chunk_runs(self._extents.stored)}
        return own | {crc32_column(self.name): chunk_runs(self.crc32.stored)}


def _slot_bytes(meta: StoreMeta, alignment: int) -> int:
    """Return the bytes from one chunk to the next: HDF5 aligns no chunk that is smaller than the alignment."""
    size = meta.batch_bytes
    return size if size < alignment else -(-size // alignment) * alignment


def _alignment_of(columns: list[StoreMeta]) -> int:
    """Return the alignment of the chunks of a file: pages, unless that takes more than a hundredth of its size."""
    if columns[-1].codec != NO_CODEC:
        return 1
    padded = sum(_slot_bytes(column, HDF5_ALIGNMENT) for column in columns)
    plain = sum(column.batch_bytes for column in columns)
    return HDF5_ALIGNMENT if padded <= 1.01 * plain else TIGHT_ALIGNMENT


def _create(
    h5: h5py.File, name: str, dtype: np.dtype[Any], chunks: tuple[int, ...], codec: str = NO_CODEC
) -> h5py.Dataset:
    return h5.create_dataset(
        name,
        (0, *chunks[1:]),
        dtype,
        maxshape=(None, *chunks[1:]),
        chunks=chunks,
        fill_time="never",
        dcpl=creation_of(codec),
    )


class HDF5Writer(TokenWriter):
    """A growing HDF5 file: its columns are allocated together, ahead of their data, and committed together."""

    backend: ClassVar[str] = "hdf5"
    #: Attributes of the dataset of the tokens: its commit marker, and facts about the tokens.
    _attributes: ClassVar[Mapping[str, np.dtype[Any]]]

    _h5: Any = None
    _written: WrittenFile | None = None
    _encode: Encoder | None = None
    _offsets: GrowingDataset | None = None  # of documents
    _failure: BaseException | None = None
    _marker: Mapping[str, Any] = {}  # the attributes of the commit marker
    _columns: tuple[WrittenColumn, ...] = ()  # of the fields, and then of the tokens
    _num_chunks = 0  # chunks that are allocated
    _reserved = 0  # chunks that have their disk space
    _end = 0  # of the file
    _solid = 0  # the first byte after everything that cannot be cut off
    _waiting_bytes = 0  # of tokens that were written since the last commit

    def _begin(self) -> None:
        self._latest: Mapping[str, int | bytes] = {}  # the marker to come
        if self.meta.codec != NO_CODEC:
            require_codec(self.meta.codec, self._file.path)
            self._encode = Encoder(self.meta.codec)
        with self._file.unlocked(), self._hdf5():
            self._create_objects()  # at its end HDF5 holds no lock, and another "r+" would get in

    def _create_objects(self) -> None:
        metas = [*(self.meta.of_field(field.name) for field in self.meta.fields), self.meta]
        alignment = _alignment_of(metas)
        h5 = self._h5 = open_h5(
            self._file.own_path,
            "w",
            libver=HDF5_LIBVER,
            alignment_threshold=alignment,
            alignment_interval=alignment,
            meta_block_size=meta_block_bytes(self._expected_batches, len(metas)),
        )
        self._written = WrittenFile(h5)
        create_root(h5, self.meta, self._origin)
        if self.meta.layout == STREAM_LAYOUT:
            create_attribute(h5["/"], DOCUMENTS_SHA256, b"", f"S{SHA256_CHARS}")
            self._offsets = GrowingDataset(h5, DOC_OFFSETS, "<u8", DOC_OFFSETS_CHUNK_ROWS)
        self._columns = tuple(WrittenColumn(h5, meta, self._encode, alignment) for meta in metas)
        self._fields = {field.name: column for field, column in zip(self.meta.fields, self._columns, strict=False)}
        self._main = self._columns[-1]
        facts = ("boundary_token_id", "chunk_tokens")
        first = {"sha256": NO_SHA256.encode(), **{name: getattr(self.meta, name) for name in facts}}
        for name, dtype in self._attributes.items():
            create_attribute(self._main.stored, name, first.get(name, 0), dtype)
        if self._offsets is None:
            for column in self._columns:
                for axis, label in enumerate(BATCHES_LABELS):
                    column.stored.dims[axis].label = label
        self._allocate(self._expected_batches, 1)
        if self._offsets is not None:  # they begin with 0
            self._offsets.append(np.zeros(1, "<u8"))
        h5.flush()
        h5.swmr_mode = True
        # opening them for each commit would take most of its time; SWMR cannot begin while one is open
        self._marker = {name: h5py.h5a.open(self._main.stored.id, name.encode()) for name in self._attributes}

    @contextlib.contextmanager
    def _hdf5(self) -> Iterator[None]:
        """Make each failure inside HDF5 one OSError, and remember it: HDF5 cannot go on with such a file."""
        try:
            with hdf5_writes(self._file.partial_path):
                yield
        except OSError as error:
            self._failure = error
            raise

    def _require_open(self) -> None:
        super()._require_open()
        if self._failure is not None:
            kept = counted(len(self._crc32), self.meta.noun)
            raise ConvertError(
                f"{self._file.path}: an earlier write failed ({self._failure}); the {kept} that were committed before "
                f"it are in {self._file.partial_path}",
                remedy=Remedy.REPAIR,
                at=self._file.partial_path,
            )

    # --- allocation

    def _allocate(self, num_chunks: int, num_offsets: int) -> None:
        """Extend all datasets, flush, and allocate the disk space of all metadata between the new chunks."""
        if self._offsets is not None:  # tables and crc32 rows come first: they never part the run of the chunks
            self._offsets.resize(num_offsets)
        for column in self._columns:
            column.crc32.resize(num_chunks)
        for column in self._columns:
            column.stored.resize(num_chunks * column.chunk_rows, axis=0)
        self._num_chunks = num_chunks
        end = self._h5.id.get_filesize()
        if os.fstat(self._file.fd).st_size < end:
            os.ftruncate(self._file.fd, end)  # before it is announced: HDF5 refuses a file that is too short
        self._h5.flush()
        if self._encode is None:
            start = self._end
            for begin, stop in sorted(run for column in self._columns for run in column.note_new_chunks()):
                self._fallocate(start, begin)
                self._solid = begin
                start = stop
            if start < end:
                self._fallocate(start, end)
                self._solid = end
            self._end = end

    def _fallocate(self, begin: int, end: int) -> None:
        if begin < end:
            with disk_errors(self._file.partial_path):  # HDF5 has not failed, and can close the file
                os.posix_fallocate(self._file.fd, begin, end - begin)

    def _allocate_up_to(self, stop: int, num_offsets: int = 0) -> None:
        """Allocate the chunks before `stop` and so many offsets of documents, with their disk space."""
        there = self._num_chunks
        if stop > there or (self._offsets is not None and num_offsets > len(self._offsets.stored)):
            if self._encode is None:  # a full disk is an error before HDF5 is called
                self._fallocate(self._end, self._end + meta_block_bytes(0))
            with self._hdf5():
                ahead = there + batches_ahead(there, self.meta)
                offsets = num_offsets + min(num_offsets, TABLE_ROWS_AHEAD)
                self._allocate(max(stop, ahead) if stop > there else there, offsets)
        if stop > self._reserved:
            slot_bytes = sum(column.slot_bytes for column in self._columns)
            try:
                self._reserve(max(stop, min(self._num_chunks, stop + RESERVE_BYTES // slot_bytes)))
            except OSError:  # a disk that is nearly full may still hold this commit
                self._reserve(stop)

    def _reserve(self, stop: int) -> None:
        """Allocate the disk space of the chunks before `stop`: of compressed ones as if none of them shrank."""
        if self._encode is None:
            for column in self._columns:
                for begin, end in column.ranges(self._reserved, stop):
                    self._fallocate(begin, end)
        else:
            self._fallocate_behind((stop - len(self._crc32)) * sum(column.chunk_bytes for column in self._columns))
        self._reserved = stop

    def _fallocate_behind(self, count: int) -> None:
        """Allocate disk space after the committed end of the file, for data and their metadata."""
        begin = end_of_file(self._file.fd)
        self._fallocate(begin, begin + count + meta_block_bytes(0))

    # --- writes

    def _write_chunks(self, first: int, tokens: npt.NDArray[Any], fields: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write whole chunks: through HDF5 if they are compressed or of a field, else all neighbours at once.

        HDF5 would write plain chunks one by one, and hold the interpreter lock meanwhile; their sizes are not stored.
        """
        with self._hdf5():
            for name, values in fields.items():
                self._fields[name].write(first, values)
            if self._encode is not None:
                self._main.write(first, tokens)
                return
        extents = Extents.from_offsets(self._main.offsets[first : first + len(tokens)], self._main.chunk_bytes)
        for offset, part in extents.ranges_of_tokens(0, tokens.reshape(-1)):
            write_fully(self._file.fd, part, offset)

    def _commit_chunks(self, num_bytes: int, marker: Mapping[str, int | bytes]) -> None:
        """Make the chunks whose digests wait part of the file, now or with later ones: `commit_bytes`."""
        self._waiting_bytes += num_bytes
        self._latest = marker
        if self._waiting_bytes < self._commit_bytes:
            return
        with self._hdf5():
            for column in self._columns:
                column.crc32.append(np.array(column.waiting, "<u4"))
                column.waiting = []
            if self._encode is not None:  # each chunk has changed an index: all of them before the marker
                self._h5.flush()
            self._flush_to_disk()
            self._modify(**marker)
        self._waiting_bytes = 0
        self._latest = {}

    def _modify(self, **attributes: int | bytes) -> None:
        """Change attributes of the dataset of the tokens, and flush."""
        for name, value in attributes.items():
            self._marker[name].write(np.array(value, dtype=self._attributes[name]))
        self._h5.flush()
        self._flush_to_disk()

    def _flush_to_disk(self) -> None:
        """Write all that was given to the disk, if the writer is durable."""
        if self._durable:
            with disk_errors(self._file.partial_path):  # HDF5 has not failed, and can close the file
                os.fdatasync(self._file.fd)

    # --- the end

    def _complete(self, info: ShardInfo) -> ShardInfo:
        """Commit, cut off all that was allocated ahead, write the last attributes, and close."""
        if self._latest:
            self._commit_chunks(self._commit_bytes, self._latest)
        num_chunks = info.num_batches
        last: dict[str, int | bytes] = {"sha256": info.sha256.encode(), "complete": 1}
        with self._hdf5():
            for column in self._columns:
                column.stored.resize(info.token_count * column.chunk_rows // self.meta.batch_tokens, axis=0)
                if column.is_field:
                    column.stored.attrs.modify("sha256", np.bytes_(column.sha256.hexdigest()))
                column.crc32.stored.resize(num_chunks, axis=0)
            if self._offsets is not None:
                self._offsets.stored.resize(self._offsets.count, axis=0)
                last["doc_offsets_crc32"] = self._offsets.crc32
                info = info._replace(document_count=self._offsets.count - 1)
            if self._encode is not None:
                self._fallocate_behind(len(self._columns) * (num_chunks + EXTENTS_CHUNK_ROWS) * 16)
                num_bytes = [column.set_extents() for column in self._columns]
                info = info._replace(compressed=CompressedTokens(self.meta.codec, num_bytes[-1]))
            self._h5.flush()  # before the marker is complete
            self._modify(**last)
            columns = {name: runs for c in reversed(self._columns) for name, runs in c.runs(num_chunks).items()}
            self._h5.close()
        self._cut_off(num_chunks)
        size = os.fstat(self._file.fd).st_size
        fields = {name: FieldDigest(size, c.sha256.hexdigest(), c.crc32.crc32) for name, c in self._fields.items()}
        self._release()
        return info._replace(columns=columns, fields=fields)

    def _cut_off(self, num_chunks: int) -> None:
        """Give back the disk space after the first chunks; the file is closed. HDF5 frees nothing in SWMR mode."""
        end = end_of_file(self._file.fd)
        if self._encode is None and end == self._end:
            offsets = self._main.offsets
            chunk_bytes = self._main.chunk_bytes
            end = max(self._solid, int(offsets[num_chunks - 1]) + chunk_bytes if num_chunks else 0)
            set_end_of_file(self._file.fd, end)
        os.ftruncate(self._file.fd, end)

    def _release(self) -> None:
        if self._encode is not None:
            self._encode.close()
        if self._written is not None:
            self._written.objects += [self._columns, self._offsets, self._marker]
            self._written.close(has_failed=isinstance(self._failure, WriteFailure))  # the committed part is on disk


class HDF5BatchWriter(HDF5Writer, FileWriter):
    """Writes a `.h5` batch store in SWMR mode: other processes may follow `<path>.partial`. See `FileWriter`."""

    _attributes = BATCHES_ATTRIBUTES

    @staticmethod
    def stored_bytes(meta: StoreMeta, num_batches: int) -> int:
        crc32 = -(-num_batches // CRC32_CHUNK_ROWS) * CRC32_CHUNK_ROWS * 4
        tokens = num_batches * meta.padded_batch_bytes // (1 if meta.codec == NO_CODEC else 2)
        return meta_block_bytes(num_batches) + crc32 + HDF5_ALIGNMENT + tokens

    def _append(self, batches: TokenArray, fields: Mapping[str, npt.NDArray[Any]]) -> None:
        self._allocate_up_to(self.num_batches + len(batches))
        self._write_chunks(self.num_batches, batches, fields)
        for name, values in fields.items():
            self._fields[name].digest(values)

    def _commit(self, batches: TokenArray, group: GroupDigest) -> None:
        marker = {
            "num_batches": self.num_batches + len(batches),
            "token_count": self.token_count + batches.size,
            "max_token": max(self.max_token, group.max_token),
        }
        self._main.waiting += group.crc32
        self._commit_chunks(batches.nbytes, marker)
        self._count(batches, group)
