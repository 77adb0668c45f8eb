"""A part of a field set: an HDF5 file that is made whole, closed, and then filled by position, record by record.

Each field has a contiguous dataset and a crc32 for each record; a mark has the tokens of a record once it is written.
No HDF5 handle is open while values are written, so that HDF5's own tools open the file meanwhile, and a kill leaves no
more than the records of one call without a mark.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError, IncompleteError
from zb_hdf5.field import Field
from zb_hdf5.files.c_library import libc
from zb_hdf5.files.checked import GROUP_BYTES, crc32_of
from zb_hdf5.files.large_array import large_array
from zb_hdf5.files.paths import on_failure, regular
from zb_hdf5.files.publishing import disk_errors, published, write_fully
from zb_hdf5.files.ranges import read_fully
from zb_hdf5.hdf5.h5_attributes import CREATOR, create_attribute, create_texts, require_version, text_of
from zb_hdf5.hdf5.h5_chunks import creation_of
from zb_hdf5.hdf5.h5_dataset import is_plain, own_dataset
from zb_hdf5.hdf5.h5_file import h5_damage, open_h5
from zb_hdf5.hdf5.written_file import WrittenFile, hdf5_writes
from zb_hdf5.packages import h5py
from zb_hdf5.spec import (
    CRC32,
    HDF5_LIBVER,
    MARKS,
    PAGE_BYTES,
    VALUES_FORMAT,
    VALUES_GROUP,
    VALUES_VERSION,
)
from zb_hdf5.store.set_facts import SetFacts

#: fallocate(2) on a file system that cannot reserve space: it is taken as it is written.
_RESERVES_NOTHING: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})


class PartLayout(NamedTuple):
    """The places of all bytes in a part.

    Attributes
    ----------
    first, records
        Its first record, and how many it has.
    num_bytes
        The size of the file.
    values, crc32
        Field -> the byte offset of its values, and that of its crc32 rows.
    marks
        The byte offset of the marks.
    """

    first: int
    records: int
    num_bytes: int
    values: dict[str, int]
    crc32: dict[str, int]
    marks: int


def make_part(path: Path, facts: SetFacts, first: int, records: int) -> None:
    """Make a part without values, reserve its space, and give it its name.

    Raises
    ------
    ExistsError
        If there is such a file.
    OSError
        If the disk lacks the space.
    """
    with published(path, overwrite=False) as file:
        layout = {"libver": HDF5_LIBVER, "alignment_threshold": PAGE_BYTES, "alignment_interval": PAGE_BYTES}
        with hdf5_writes(file.partial_path):
            written = WrittenFile(open_h5(file.own_path, "w", locking=False, **layout))
            with on_failure(partial(written.close, has_failed=True)):
                _create(written, facts, first, records)
                written.h5.close()
        _reserve(file.fd)


def _create(written: WrittenFile, facts: SetFacts, first: int, records: int) -> None:
    """Make all objects of a part, whose bytes depend on nothing else."""
    h5 = written.h5
    root = h5["/"]
    create_texts(
        root,
        format=VALUES_FORMAT,
        creator=CREATOR,
        set=facts.name,
        split=facts.split,
        about=facts.about,
        note=facts.note,
    )
    create_attribute(root, "format_version", VALUES_VERSION, "<u4")
    create_attribute(root, "first_record", first, "<u8")
    how = {"fill_time": "never", "dcpl": creation_of()}
    for field in facts.fields:
        stored = h5.create_dataset(f"{VALUES_GROUP}/{field.name}", (records, *facts.shape(field)), field.dtype, **how)
        written.objects.append(stored)
        create_texts(stored, unit=field.unit, **({"zb_dtype": field.kind} if field.kind else {}))
        rows = h5.create_dataset(f"{CRC32}/{field.name}", (records,), "<u4", **how)
        written.objects.append(rows)
    # last: a part that a full disk has cut short has no marks
    marks = h5.create_dataset(MARKS, (records,), "<u4", fill_time="alloc", dcpl=_filled())
    written.objects.append(marks)


def _filled() -> Any:
    """Return the creation properties of the marks: zeros, on the disk from the beginning."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_ALLOC)
    return properties


def _reserve(fd: int) -> None:
    """Reserve the space of all bytes of a file, without a write into any; `OSError` if the disk lacks it."""
    fallocate = getattr(libc(), "fallocate", None)
    if fallocate is None:  # not Linux
        return
    size = os.fstat(fd).st_size
    if fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        if number not in _RESERVES_NOTHING:
            raise OSError(number, os.strerror(number))


def read_layout(path: Path, facts: SetFacts) -> PartLayout:
    """Read the places of all bytes in a part.

    Raises
    ------
    FormatError
        If the file is not a part of this set.
    """
    # its maker keeps a lock for a moment after it has its name, and no one has it open as HDF5 later
    with h5_damage(path), open_h5(path, locking=False) as h5:
        found = text_of(h5.attrs.get("format")), text_of(h5.attrs.get("set")), text_of(h5.attrs.get("split"))
        if found != (VALUES_FORMAT, facts.name, facts.split):
            raise FormatError(f"{path}: expected a part of the field set {facts.name} ({facts.split}), found {found}")
        require_version(h5, VALUES_VERSION, path)
        first = int(h5.attrs["first_record"])
        marks, records = _place(h5, path, MARKS, np.dtype("<u4"), None)
        values, crc32 = {}, {}
        for field in facts.fields:
            shape = (records, *facts.shape(field))
            values[field.name], _ = _place(h5, path, f"{VALUES_GROUP}/{field.name}", field.dtype, shape)
            crc32[field.name], _ = _place(h5, path, f"{CRC32}/{field.name}", np.dtype("<u4"), (records,))
    return PartLayout(first, records, path.stat().st_size, values, crc32, marks)


def _place(h5: Any, path: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> tuple[int, int]:
    """Return the byte offset and the rows of a contiguous dataset; `FormatError` if there is none such."""
    stored = own_dataset(h5, path, name)
    if stored is None:
        raise FormatError(f"{path}: expected a dataset {name}, found none")
    found = (stored.dtype, stored.shape)
    fits = stored.dtype == dtype and (stored.ndim == 1 if shape is None else stored.shape == shape)
    offset = stored.id.get_offset() if is_plain(stored) and stored.chunks is None else None
    if not fits or (offset is None and stored.size):
        raise FormatError(f"{path}: {name}: expected contiguous {dtype} of shape {shape}, found {found}")
    return offset or 0, stored.shape[0]


class ValuePart:
    """An open part: its rows of crc32 and its marks are read and written by position. Not thread-safe.

    Parameters
    ----------
    path
        The file.
    facts
        The field set.
    layout
        The places in it; None: they are looked for.
    writable
        Whether records may be written.
    """

    def __init__(
        self, path: Path, facts: SetFacts, layout: PartLayout | None = None, *, writable: bool = False
    ) -> None:
        self.path = path
        self.facts = facts
        self.layout = read_layout(path, facts) if layout is None else layout
        self.fd = regular(path, os.O_RDWR if writable else os.O_RDONLY)
        with on_failure(self.close):
            if os.fstat(self.fd).st_size < self.layout.num_bytes:
                raise IncompleteError(
                    f"{path}: expected {self.layout.num_bytes:,} bytes, found {os.fstat(self.fd).st_size:,}: the file "
                    "was cut short; restore it"
                )

    # --- rows ------------------------------------------------------------------------------------------------------

    def marks(self) -> npt.NDArray[np.uint32]:
        """Return the marks of all records, as they are now."""
        return self._rows(self.layout.marks)

    def crc32(self, field: Field) -> npt.NDArray[np.uint32]:
        """Return the crc32 of each record of a field, as they are now."""
        return self._rows(self.layout.crc32[field.name])

    def _rows(self, offset: int) -> npt.NDArray[np.uint32]:
        rows = np.zeros(self.layout.records, "<u4")
        read_fully(self.fd, rows, offset)
        return rows

    def is_there(self) -> npt.NDArray[np.bool_]:
        """Return which records are written, as far as their marks tell."""
        return np.asarray(self.marks() == self.facts.marks(self.layout.first, self.layout.records))

    # --- values ----------------------------------------------------------------------------------------------------

    def _place(self, field: Field, row: int) -> int:
        return self.layout.values[field.name] + row * self.facts.items(field) * field.dtype.itemsize

    def write(self, row: int, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the values of consecutive records, without their marks.

        Parameters
        ----------
        row
            The first record, counted from that of the part.
        values
            Field -> C-contiguous values, one row for each record.
        """
        with disk_errors(self.path):
            for field in self.facts.fields:
                write_fully(self.fd, values[field.name].reshape(-1).view(np.uint8), self._place(field, row))

    def flush(self) -> None:
        """Bring all that was written to the disk."""
        with disk_errors(self.path):
            os.fdatasync(self.fd)

    def mark(self, row: int, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the crc32 of consecutive records whose values are on the disk, and then their marks."""
        records = len(values[self.facts.fields[0].name])
        with disk_errors(self.path):
            for field in self.facts.fields:
                crc32 = np.fromiter(map(crc32_of, values[field.name]), "<u4", records)
                write_fully(self.fd, crc32, self.layout.crc32[field.name] + 4 * row)
            marks = self.facts.marks(self.layout.first + row, records)
            write_fully(self.fd, marks, self.layout.marks + 4 * row)

    def unmark(self, rows: npt.NDArray[np.int64]) -> None:
        """Take back the marks of some records."""
        with disk_errors(self.path):
            for row in rows.tolist():
                write_fully(self.fd, np.zeros(1, "<u4"), self.layout.marks + 4 * row)
        self.flush()

    def damaged(self) -> npt.NDArray[np.int64]:
        """Read the values of all records that are marked; return those whose crc32 differs, from that of the part."""
        there = self.is_there()
        bad = np.zeros(len(there), bool)
        for field in self.facts.fields:
            crc32 = self.crc32(field)
            for row, values in self._groups(field):
                for number, each in enumerate(values, row):
                    if there[number] and crc32_of(each) != crc32[number]:
                        bad[number] = True
        return bad.nonzero()[0]

    def _groups(self, field: Field) -> Iterator[tuple[int, list[npt.NDArray[Any]]]]:
        """Yield the values of some records at a time, one array for each, with the number of the first."""
        items = self.facts.items(field)
        step = max(1, GROUP_BYTES // max(1, items * field.dtype.itemsize))
        group = large_array((step * items,), field.dtype)
        for row in range(0, self.layout.records, step):
            records = min(step, self.layout.records - row)
            count = self.facts.count(field, self.layout.first + row, records)
            read_fully(self.fd, group[:count].view(np.uint8), self._place(field, row))
            yield row, [group[k * items : min((k + 1) * items, count)] for k in range(records)]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with suppress(OSError):
                os.close(fd)
