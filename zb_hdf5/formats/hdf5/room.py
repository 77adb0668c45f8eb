"""Room in an HDF5 file, ahead of what is written to it: a commit then changes one object header and nothing else.

HDF5 writes the header that holds the commit marker *before* the headers of other datasets that grew in the same flush:
a kill between the two leaves the marker ahead. So all datasets are extended together, and flushed, before their data
are written. A kill of the writer leaves rows behind the marker, which mean nothing; `finish` cuts them off.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from errno import EIO
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.publishing import write_fully
from zb_hdf5.formats.hdf5.places import chunk_offsets
from zb_hdf5.spec import CODECS, CRC32_CHUNK_ROWS, HDF5_ALIGNMENT, NO_CODEC, StoreMeta, meta_block_bytes

#: Disk space that is reserved ahead: reserving for each group takes a tenth of the time of a conversion.
RESERVE_BYTES: Final = 64 << 20
#: Of the superblock, version 3, at byte 0: its end of file, the bytes that its checksum covers, and their checksum.
_END_OF_FILE, _CHECKED, _SUPERBLOCK_BYTES = slice(28, 36), slice(0, 44), 48
_ERRNO: Final = re.compile(r"errno = (\d+)")


def stored_bytes(meta: StoreMeta, num_batches: int) -> int:
    """Return about how many bytes a file of these batches has; compressed tokens take half as many, or less."""
    crc32 = -(-num_batches // CRC32_CHUNK_ROWS) * CRC32_CHUNK_ROWS * 4
    tokens = num_batches * meta.padded_batch_bytes // (1 if meta.codec == NO_CODEC else 2)
    return meta_block_bytes(num_batches) + crc32 + HDF5_ALIGNMENT + tokens


class Places:
    """Where the chunks of one growing dataset lie, which is allocated early and never filled."""

    def __init__(self, stored: h5py.Dataset) -> None:
        self.stored = stored
        self.chunk_bytes = int(np.prod(stored.chunks)) * stored.dtype.itemsize
        small = self.chunk_bytes < HDF5_ALIGNMENT
        self.slot_bytes = self.chunk_bytes if small else -(-self.chunk_bytes // HDF5_ALIGNMENT) * HDF5_ALIGNMENT
        self.offsets = np.empty(0, np.int64)

    def learn(self) -> int:
        """Learn where the new chunks are; return the number of the first of them."""
        first, rows = len(self.offsets), self.stored.chunks[0]
        stop = -(-self.stored.shape[0] // rows)
        if stop > first:
            # two questions, not one for each chunk: HDF5 looks at all chunks to answer one
            begin, last = (self._offset(k * rows) for k in (first, stop - 1))
            new = begin + np.arange(stop - first) * self.slot_bytes
            if new[-1] != last:  # metadata lie between them
                new = chunk_offsets(self.stored)[first:]
            self.offsets = np.concatenate([self.offsets, new])
        return first

    def _offset(self, row: int) -> int:
        place = (row, *(0 for _ in self.stored.chunks[1:]))
        return int(self.stored.id.get_chunk_info_by_coord(place).byte_offset)

    def runs(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the bytes that chunks lie in, each run of them in one."""
        offsets = self.offsets[first:stop]
        for run in np.split(offsets, np.flatnonzero(np.diff(offsets) != self.slot_bytes) + 1):
            if len(run):
                yield int(run[0]), int(run[-1]) + self.chunk_bytes


class Room:
    """The places of the chunks of growing datasets, which are allocated before there are bytes for them.

    Parameters
    ----------
    h5
        The file that is being written.
    stored
        Its large datasets, which have as many chunks each; the surplus of the last one can be cut off.
    fd
        A descriptor of the file.
    """

    def __init__(self, h5: h5py.File, stored: Sequence[h5py.Dataset], fd: int) -> None:
        self._h5, self._places, self._fd = h5, [Places(dataset) for dataset in stored], fd
        self._end = 0  # of the file
        self._solid = 0  # nothing before this byte can be cut off
        self._reserved = 0  # chunks whose disk space is taken

    @property
    def num_chunks(self) -> int:
        """Chunks that have a place."""
        return len(self._places[-1].offsets)

    def extend(self, lengths: Mapping[h5py.Dataset, int]) -> None:
        """Extend datasets, flush, and take the disk space of all metadata that lie in between.

        Parameters
        ----------
        lengths
            In the order in which room is made: the large datasets last, in their order.
        """
        self._take_space_between(_extend(self._h5, self._fd, lengths))

    def _take_space_between(self, end: int) -> None:
        """Learn where the new chunks are; reserve what lies around them."""
        new = sorted(run for places in self._places for run in places.runs(places.learn(), len(places.offsets)))
        start = self._end
        for begin, run_end in new:
            self._reserve(start, begin)
            self._solid, start = begin, run_end
        if start < end:
            self._reserve(start, end)
            self._solid = end
        self._end = end

    def _reserve(self, begin: int, end: int) -> None:
        if begin < end:
            os.posix_fallocate(self._fd, begin, end - begin)

    def require_metadata_space(self) -> None:
        """See that the disk has room for the metadata of the next extension, before HDF5 is touched."""
        self._reserve(self._end, self._end + meta_block_bytes(0))

    def reserve(self, stop: int) -> None:
        """Take the disk space of the chunks before `stop`: a full disk is an error before HDF5 is touched."""
        if stop <= self._reserved:
            return
        ahead = min(self.num_chunks, stop + RESERVE_BYTES // sum(places.slot_bytes for places in self._places))
        try:
            self._reserve_chunks(ahead)
        except OSError:  # a disk that is nearly full may still hold this commit
            self._reserve_chunks(stop)

    def _reserve_chunks(self, stop: int) -> None:
        for places in self._places:
            for begin, end in places.runs(self._reserved, stop):
                self._reserve(begin, end)
        self._reserved = stop

    def place(self, first: int, count: int, slot_bytes: int) -> int | None:
        """Return the offset of chunk `first` of the last dataset, if it and those behind it lie in slots of this size.

        None where they do not.
        """
        begin, last = self._places[-1].offsets[[first, first + count - 1]].tolist()
        return begin if last - begin == (count - 1) * slot_bytes else None

    def write(self, first: int, chunks: npt.NDArray[Any]) -> None:
        """Write chunks of the last dataset to their places, from number `first` on, all that lie together at once.

        HDF5 would write them one by one, and hold the interpreter lock meanwhile; it keeps no sizes of such chunks.
        """
        places = self._places[-1]
        offsets = places.offsets[first : first + len(chunks)]
        cuts = [0, *(np.flatnonzero(np.diff(offsets) != places.chunk_bytes) + 1).tolist()]
        for start, stop in zip(cuts, [*cuts[1:], len(chunks)], strict=True):
            write_fully(self._fd, chunks[start:stop], int(offsets[start]))

    def runs_of(self, stored: h5py.Dataset, num_chunks: int) -> tuple[Run, ...] | None:
        """Return where the first chunks of a dataset lie, if that is known: to list them takes HDF5 6 µs each."""
        for places in self._places:
            if places.stored == stored:
                return tuple(Extents.from_offsets(places.offsets[:num_chunks], places.chunk_bytes).runs)
        return None

    def cut_off(self, num_chunks: int) -> None:
        """Give back what lies behind the first chunks; the file is closed. HDF5 itself frees nothing in SWMR mode."""
        end, last = end_of_file_address(self._fd), self._places[-1]
        if end == self._end:
            kept = int(last.offsets[num_chunks - 1]) + last.chunk_bytes if num_chunks else 0
            end = max(self._solid, kept)
            _set_end_of_file(self._fd, end)
        os.ftruncate(self._fd, end)


class LooseRoom:
    """Disk space for the chunks of growing datasets that are compressed: how many bytes a chunk takes is known late.

    Each chunk is placed behind all others when it is written. See `Room` for the functions that both have.
    """

    def __init__(self, h5: h5py.File, stored: Sequence[h5py.Dataset], fd: int) -> None:
        self._h5, self._stored, self._fd = h5, stored, fd
        self._chunk_bytes = sum(Places(dataset).chunk_bytes for dataset in stored)
        self._chunks = 0  # that space was taken for
        self._solid = 0  # the disk space before this byte is taken

    @property
    def num_chunks(self) -> int:
        """Chunks that the datasets have room for."""
        return -(-len(self._stored[-1]) // int(self._stored[-1].chunks[0]))

    def extend(self, lengths: Mapping[h5py.Dataset, int]) -> None:
        """Extend datasets, and flush."""
        _extend(self._h5, self._fd, lengths)

    def require_metadata_space(self) -> None:
        """See that the disk has room for the metadata of the next extension."""
        self.reserve_bytes(0)

    def reserve(self, stop: int) -> None:
        """Take the disk space of the chunks before `stop`, as if none of them shrank."""
        if stop > self._chunks:
            self.reserve_bytes((stop - self._chunks) * self._chunk_bytes)
            self._chunks = stop

    def reserve_bytes(self, count: int) -> None:
        """Take disk space behind what is committed, for data and their metadata."""
        begin = end_of_file_address(self._fd)
        needed = begin + count + meta_block_bytes(0)
        if needed <= self._solid:
            return
        try:
            os.posix_fallocate(self._fd, begin, max(needed - begin, RESERVE_BYTES))
            self._solid = max(needed, begin + RESERVE_BYTES)
        except OSError:  # a disk that is nearly full may still hold this commit
            os.posix_fallocate(self._fd, begin, needed - begin)
            self._solid = needed

    def place(self, first: int, count: int, slot_bytes: int) -> None:
        """Return nothing: no bytes are copied into a compressed file."""

    def runs_of(self, stored: h5py.Dataset, num_chunks: int) -> None:
        """Return nothing: only HDF5 knows the places of compressed chunks."""

    def cut_off(self, num_chunks: int) -> None:
        """Give back what was taken ahead; the file is closed."""
        os.ftruncate(self._fd, end_of_file_address(self._fd))


def _extend(h5: h5py.File, fd: int, lengths: Mapping[h5py.Dataset, int]) -> int:
    """Extend datasets, and flush; return the end of the file."""
    for dataset, length in lengths.items():
        dataset.resize(length, axis=0)
    end: int = h5.id.get_filesize()
    if os.fstat(fd).st_size < end:
        os.ftruncate(fd, end)  # before it is announced: HDF5 refuses a file that is shorter than it says
    h5.flush()
    return end


def early_allocation() -> Any:
    """Return the creation properties of a dataset whose chunks have places before they have bytes."""
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return early


def filtered(codec: str) -> Any:
    """Return the creation properties of a dataset whose chunks are compressed by us.

    The filter is an optional one, so that HDF5 itself need not have it here.
    """
    name, _, level = codec.partition(":")
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_filter(CODECS[name].filter_id, h5py.h5z.FLAG_OPTIONAL, (int(level),))
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return properties


@contextlib.contextmanager
def hdf5_writes(path: Path) -> Iterator[None]:
    """Turn what h5py raises when the disk fails under HDF5 into one OSError with path and cause."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if getattr(error, "filename", None) is not None:
            raise
        found = _ERRNO.search(str(error))
        code = int(found[1]) if found else getattr(error, "errno", None) or EIO
        raise OSError(code, f"{os.strerror(code)}, while HDF5 was writing", str(path)) from error


def end_of_file_address(fd: int) -> int:
    """Return the end of the file as the superblock has it."""
    return int.from_bytes(os.pread(fd, _SUPERBLOCK_BYTES, 0)[_END_OF_FILE], "little")


def _set_end_of_file(fd: int, end: int) -> None:
    """Change the end of a closed file in its superblock: one write, checksum included."""
    superblock = bytearray(os.pread(fd, _SUPERBLOCK_BYTES, 0))
    superblock[_END_OF_FILE] = end.to_bytes(8, "little")
    superblock[_CHECKED.stop :] = lookup3(superblock[_CHECKED]).to_bytes(4, "little")
    write_fully(fd, bytes(superblock), 0)


def lookup3(data: bytes | bytearray) -> int:
    """Return HDF5's checksum of metadata: Bob Jenkins' lookup3, `hashlittle` with the initial value 0."""
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    words = np.frombuffer(bytes(data).ljust(-(-len(data) // 12) * 12, b"\0"), "<u4").tolist()
    for start in range(0, len(words), 3):
        x, y, z = words[start : start + 3]
        a, b, c = (a + x) & 0xFFFFFFFF, (b + y) & 0xFFFFFFFF, (c + z) & 0xFFFFFFFF
        a, b, c = _final(a, b, c) if start + 3 == len(words) else _mix(a, b, c)
    return c


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for turn in (4, 6, 8, 16, 19, 4):
        a = ((a - c) & 0xFFFFFFFF) ^ _rotated(c, turn)
        c = (c + b) & 0xFFFFFFFF
        a, b, c = b, c, a
    return a, b, c


def _final(a: int, b: int, c: int) -> tuple[int, int, int]:
    for turn in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotated(b, turn)) & 0xFFFFFFFF
        a, b, c = b, c, a
    return c, a, b


def _rotated(x: int, turn: int) -> int:
    return (x << turn | x >> (32 - turn)) & 0xFFFFFFFF
