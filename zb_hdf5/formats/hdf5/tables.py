"""Tables: HDF5 files of contiguous datasets, written once and read by their places, without the HDF5 library.

Pieces and documents are of any number, so that they lie in files of their own, beside the tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, Final, NamedTuple, Self

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ChecksumError, FormatError, IncompleteError, Remedy
from zb_hdf5.files.identity import handle_of, open_file, require_bytes, size_of
from zb_hdf5.files.paths import RemotePath, any_path, local_path
from zb_hdf5.files.publishing import PartialFile, disk_errors, write_fully
from zb_hdf5.files.ranges import FetchedFile, LocalFile, copy_range
from zb_hdf5.formats.hdf5.file import (
    CREATOR,
    create_texts,
    early_allocation,
    h5_damage,
    h5_identity,
    handle_of_h5,
    hdf5_writes,
    open_h5,
    open_h5_for_reading,
    own_dataset,
    stored_sha256,
)
from zb_hdf5.spec import (
    HDF5_LIBVER,
    SHA256_CHARS,
    TABLES,
    TABLES_ATTRIBUTES,
    TABLES_FORMAT,
    TABLES_KIND_ATTRIBUTES,
    TABLES_VERSION,
)

#: What a column keeps in memory before it goes on in a temporary file, and what is copied or digested at once.
BLOCK_BYTES: Final = 4 << 20
#: A smaller file is compared with its digests when it is opened.
COMPARED_BYTES: Final = 64 << 20
COMPARED_AT_ONCE: Final = 256 << 10


class TablesInfo(NamedTuple):
    """A tables file that was published: where, how large, and the digest of all that it says."""

    path: Path
    num_bytes: int
    sha256: str


class _Place(NamedTuple):
    """Where the rows of a dataset lie, and the digest of their bytes."""

    offset: int
    dtype: np.dtype[Any]
    num_rows: int
    sha256: str

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.dtype.itemsize


class _Column:
    """Rows on their way to a file: a few in memory, more in a file that has no name."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.dtype, self.num_rows, self.sha256 = np.dtype(dtype), 0, hashlib.sha256()
        self._file = SpooledTemporaryFile(BLOCK_BYTES, dir=str(folder))  # noqa: SIM115 - closed with the column

    def append(self, rows: npt.NDArray[Any] | bytes | bytearray) -> None:
        data = np.ascontiguousarray(rows, self.dtype).data.cast("B") if isinstance(rows, np.ndarray) else rows
        self._file.write(data)
        self.sha256.update(data)
        self.num_rows += len(data) // self.dtype.itemsize

    def copy_to(self, fd: int, offset: int) -> None:
        self._file.seek(0)
        while data := self._file.read(BLOCK_BYTES):
            write_fully(fd, data, offset)
            offset += len(data)

    def close(self) -> None:
        self._file.close()


class TablesWriter:
    """Takes the rows of tables, and publishes them as one file. Not thread-safe.

    Memory holds some MiB of each dataset; what is more waits in temporary files in the folder of the file, which have
    no names: a kill leaves nothing but a `.partial`. A context manager: leaving the block gives them up.

    Parameters
    ----------
    path
        The file to publish; one that is there is replaced, at the end and whole.
    kind
        A key of `TABLES`.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self.path, self.kind = local_path(path), kind
        self._columns: dict[str, _Column] = {}

    def append(self, name: str, rows: npt.ArrayLike) -> None:
        """Append rows to the dataset of this name, 1-D."""
        column = self._column(name)
        with disk_errors(self.path):  # the file that a column goes on in has no name
            column.append(np.asarray(rows, column.dtype))

    def append_texts(self, name: str, texts: Sequence[bytes]) -> None:
        """Append byte strings of any lengths to `name`, and where each of them ends to `<name>_ends`."""
        self.append_joined_texts(name, b"".join(texts), np.fromiter(map(len, texts), np.int64, len(texts)))

    def append_joined_texts(self, name: str, data: bytes | bytearray, lengths: npt.NDArray[np.int64]) -> None:
        """Append byte strings that lie one behind the other, and have these lengths."""
        self.append(f"{name}_ends", np.uint64(self.num_rows(name)) + np.cumsum(lengths, dtype=np.uint64))
        with disk_errors(self.path):
            self._column(name).append(data)

    def num_rows(self, name: str) -> int:
        """Return how many rows a dataset has so far."""
        return self._columns[name].num_rows if name in self._columns else 0

    def publish(self, **attributes: str | int) -> TablesInfo:
        """Write the file and give it its name.

        Parameters
        ----------
        attributes
            Of the root group: whole numbers and texts.

        Raises
        ------
        UnavailableError
            If another process is writing the same file.
        OSError
            If the disk is full or fails; then nothing has the name.
        """
        file = PartialFile(self.path, overwrite=True)
        try:
            with disk_errors(file.partial_path):
                for name, offset in self._lay_out(file, attributes).items():
                    self._columns[name].copy_to(file.fd, offset)
                num_bytes = os.fstat(file.fd).st_size
            file.publish()
        except BaseException:
            file.discard()
            raise
        finally:
            self.close()
        facts = {name: (column.dtype.str, column.num_rows) for name, column in self._columns.items()}
        digests = {name: column.sha256.hexdigest() for name, column in self._columns.items()}
        return TablesInfo(self.path, num_bytes, _digest(self.kind, attributes, facts, digests))

    def _lay_out(self, file: PartialFile, attributes: Mapping[str, str | int]) -> dict[str, int]:
        """Make all objects of the file, and return where the rows of each dataset go."""
        # a place that is no multiple of 8 would have numpy copy a whole mapped array for one search in it
        layout = {"libver": HDF5_LIBVER, "alignment_threshold": 1, "alignment_interval": 8}
        with (
            hdf5_writes(file.partial_path),
            open_h5(file.own_path, "w", locking=False, **layout) as h5,
        ):
            create_texts(h5, format=TABLES_FORMAT, creator=CREATOR, kind=self.kind)
            h5.attrs.create("format_version", TABLES_VERSION, dtype="<u4")
            create_texts(h5, **{name: value for name, value in attributes.items() if isinstance(value, str)})
            for name, value in attributes.items():
                if not isinstance(value, str):
                    h5.attrs.create(name, value, dtype="<u8")
            stored = {name: _create(h5, name, column) for name, column in self._columns.items()}
            return {name: each.id.get_offset() for name, each in stored.items() if len(each)}

    def _column(self, name: str) -> _Column:
        if name not in self._columns:
            self._columns[name] = _Column(self.path.parent, TABLES[self.kind][name])
        return self._columns[name]

    def close(self) -> None:
        """Give up the rows."""
        for column in self._columns.values():
            column.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(h5: h5py.File, name: str, column: _Column) -> h5py.Dataset:
    rows = h5.create_dataset(name, (column.num_rows,), column.dtype, fill_time="never", dcpl=early_allocation())
    rows.attrs.create("sha256", column.sha256.hexdigest().encode(), dtype=f"S{SHA256_CHARS}")
    return rows


class TablesFile:
    """Reads a tables file. HDF5 looks at it once, when it is opened, and holds no lock afterwards.

    Thread-safe, usable after fork, picklable: a copy opens the file by its path, and refuses another one. `close` must
    not race with reads.

    Parameters
    ----------
    path
        The file.
    kind
        A key of `TABLES`: what it is expected to hold.
    sha256
        The digest that it is expected to have; "": not known. It covers the stored digest of each dataset, so that a
        file of another store is refused.
    verify
        "none": no bytes are compared. Else those of a file below 64 MiB are compared with their digests now; `check`
        compares those of any file.

    Attributes
    ----------
    attributes
        Of the root group.
    sha256, num_bytes
        Digest of all that the file says, and its size.

    Raises
    ------
    FormatError, IncompleteError
        If it is not there, no such file, damaged, cut short or of another store.
    ChecksumError
        If its bytes differ from their digests.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, sha256: str = "", verify: str = "auto") -> None:
        self.path, self.kind = any_path(path), kind
        try:
            with h5_damage(self.path), open_h5_for_reading(self.path) as h5:
                self.attributes = _attributes(h5, self.path, kind)
                self._places = {name: _place(h5, self.path, name, kind) for name in h5}
                identity = h5_identity(h5, growing=False)
                self.num_bytes: int = identity[0]
                end = max((place.offset + place.num_bytes for place in self._places.values()), default=0)
                require_bytes(end, handle_of_h5(h5), self.path, "its tables")
        except FileNotFoundError as error:
            raise IncompleteError(f"{self.path}: is not there; restore it, or convert again") from error
        facts = {name: (place.dtype.str, place.num_rows) for name, place in self._places.items()}
        digests = {name: place.sha256 for name, place in self._places.items()}
        self.sha256 = _digest(kind, self.attributes, facts, digests)
        if sha256 not in ("", self.sha256):
            raise FormatError(
                f"{self.path}: belongs to another store, or was made anew: expected tables of sha256 {sha256}, found "
                f"{self.sha256}; restore it"
            )
        self._columns: dict[str, npt.NDArray[Any]] = {}
        file_class = FetchedFile if isinstance(self.path, RemotePath) else LocalFile
        self._file = file_class(self.path, identity)
        if verify != "none" and self.num_bytes < COMPARED_BYTES:
            try:
                self.check()
            except BaseException:
                self.close()
                raise

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def num_rows(self, name: str) -> int:
        """Return how many rows a dataset has; 0 if there is none of this name."""
        return self._places[name].num_rows if name in self._places else 0

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return all rows of a dataset, read-only: a view of a mapping; on a network file system a copy, which is kept.

        Do not touch a view after another process has cut the file in place: that is a bus error.
        """
        data = self._file.flat()  # each time: it notices a file that was cut
        if data is not None:
            return self._view(name, data)
        if name not in self._columns:
            self._columns[name] = self.read(name, 0, self._places[name].num_rows)
        return self._columns[name]

    def _view(self, name: str, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if name not in self._columns:
            place = self._places[name]
            self._columns[name] = data[place.offset : place.offset + place.num_bytes].view(place.dtype)
        return self._columns[name]

    @property
    def is_mapped(self) -> bool:
        """Whether `column` is a view: not on a network file system."""
        return self._file.flat() is not None

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return some rows of a dataset, read-only, in one positioned read.

        Raises
        ------
        FormatError
            If it has no such rows: what points there is damaged.
        """
        return np.frombuffer(self._read(name, start, stop), self._places[name].dtype)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        place = self._place_of(name, start, stop)
        itemsize = place.dtype.itemsize
        return self._file.read_bytes(place.offset + start * itemsize, (stop - start) * itemsize)

    def _place_of(self, name: str, start: int, stop: int) -> _Place:
        place = self._places[name]
        if not 0 <= start <= stop <= place.num_rows:
            raise FormatError(
                f"{self.path}: {name} has {place.num_rows:,} rows, something in it points to {start:,} to {stop:,}: "
                "it is damaged",
                remedy=Remedy.VERIFY,
                at=self.path.parent,
            )
        return place

    def read_texts(self, name: str, start: int, stop: int) -> list[bytes]:
        """Return some byte strings: at most two reads, however many they are."""
        edges, data = self.read_joined_texts(name, start, stop)
        return [data[a:b] for a, b in pairwise(edges.tolist())]

    def read_joined_texts(self, name: str, start: int, stop: int) -> tuple[npt.NDArray[np.uint64], bytes]:
        """Return some byte strings, one behind the other, and where each begins and the last one ends."""
        first = max(0, start - 1)
        mapped = self._file.flat()
        if mapped is None:
            edges = self.read(f"{name}_ends", first, stop)
        else:  # a third of the time
            self._place_of(f"{name}_ends", first, stop)
            edges = self._view(f"{name}_ends", mapped)[first:stop]
        if not start:
            edges = np.append(np.uint64(0), edges)
        begin = edges[0]
        return edges - begin, self._read(name, int(begin), int(edges[-1]))

    def check(self) -> None:
        """Read all rows, and compare each dataset with its digest.

        Raises
        ------
        ChecksumError
            If one differs.
        """
        for name, place in self._places.items():
            digest, rows = hashlib.sha256(), COMPARED_AT_ONCE // place.dtype.itemsize
            for start in range(0, place.num_rows, rows):
                digest.update(self.read(name, start, min(start + rows, place.num_rows)))
            if digest.hexdigest() != place.sha256:
                raise ChecksumError(
                    f"{self.path}: {name}: expected sha256 {place.sha256}, found {digest.hexdigest()}; restore it"
                )

    def close(self) -> None:
        """Close the file. Views stay valid."""
        self._columns = {}
        self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": {}}


def _attributes(h5: h5py.File, path: Path, kind: str) -> dict[str, str | int]:
    """Return the attributes of a tables file of one kind."""
    found = {name: _plain(value) for name, value in h5.attrs.items()}
    for name, expected in (("format", TABLES_FORMAT), ("format_version", TABLES_VERSION), ("kind", kind)):
        if found.get(name) != expected:
            raise FormatError(f"{path}: expected root attribute {name}={expected!r}, found {found.get(name)!r}")
    missing = [name for name in TABLES_KIND_ATTRIBUTES[kind] if name not in found]
    if missing:
        raise FormatError(f"{path}: attribute {missing[0]!r} is missing")
    return {name: value for name, value in found.items() if name not in TABLES_ATTRIBUTES}


def _plain(value: Any) -> str | int:
    return (
        value.decode("utf-8", "replace")
        if isinstance(value, bytes)
        else value
        if isinstance(value, str)
        else int(value)
    )


def _place(h5: h5py.File, path: Path, name: str, kind: str) -> _Place:
    """Return where a dataset lies, of those that a tables file of this kind may have."""
    rows, dtype = own_dataset(h5, path, name), TABLES[kind].get(name)
    if rows is None or dtype is None or rows.ndim != 1 or rows.dtype != np.dtype(dtype):
        raise FormatError(f"{path}: expected datasets {', '.join(TABLES[kind])}, each 1-D, found {name!r}: {rows!r}")
    offset = rows.id.get_offset()
    if rows.chunks or (offset is None and len(rows)):
        raise FormatError(f"{path}: {name!r} does not lie in one piece: it was repacked by another tool; restore it")
    sha256 = stored_sha256(rows.attrs.get("sha256", b""), f"{path}: {name}")
    return _Place(offset or 0, rows.dtype, len(rows), sha256)


def _digest(
    kind: str, attributes: Mapping[str, str | int], facts: Mapping[str, tuple[str, int]], digests: Mapping[str, str]
) -> str:
    """Return the digest of all that a tables file says, from the digests of its datasets."""
    columns = [[name, *facts[name], digests[name]] for name in sorted(facts)]
    text = json.dumps([kind, sorted(attributes.items()), columns])
    return hashlib.sha256(text.encode()).hexdigest()


def copy_tables(source: Path, target: Path) -> None:
    """Copy a published file, or an object, whole; what has the name of the target is replaced.

    Raises
    ------
    UnavailableError
        If another process is writing the target.
    """
    file = PartialFile(target, overwrite=True)
    try:
        with open_file(source) as original, disk_errors(file.partial_path):
            handle = handle_of(original)
            if not isinstance(handle, int) or not copy_range(handle, file.fd, size_of(handle), 0, 0):
                os.ftruncate(file.fd, 0)
                with open(file.fd, "wb", closefd=False) as copy:
                    shutil.copyfileobj(original, copy, BLOCK_BYTES)
        file.publish()
    except BaseException:
        file.discard()
        raise
