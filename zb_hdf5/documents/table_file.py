"""Table files: HDF5 files of contiguous datasets, with a crc32 for each 64 KiB of each; the file of pieces."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces, ends_of, ranges
from zb_hdf5.errors import ChecksumError, FormatError, IncompleteError, Remedy
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.paths import RemotePath, access_to_tables, any_path, on_failure, require_bytes
from zb_hdf5.files.ranges import LocalFile, Ranges, open_ranges
from zb_hdf5.hdf5.h5_attributes import require_version, text_of
from zb_hdf5.hdf5.h5_dataset import own_dataset
from zb_hdf5.hdf5.h5_file import h5_damage, h5_identity, handle_of_h5, look_by_h5, open_h5_for_reading
from zb_hdf5.packages import h5py
from zb_hdf5.spec import (
    CRC32,
    NO_SHA256,
    PIECES,
    TABLES,
    TABLES_ANCHOR_TOKENS,
    TABLES_ANCHORS,
    TABLES_ATTRIBUTES,
    TABLES_BLOCK_BYTES,
    TABLES_FORMAT,
    TABLES_KIND_ATTRIBUTES,
    TABLES_VERSION,
    pieces_path,
)

Side: TypeAlias = Literal["left", "right"]
#: Bytes of a column that stay in memory before it goes on in a temporary file, and that are copied at once.
BUFFER_BYTES: Final = 4 << 20
#: A smaller object is fetched whole when it is opened; of a larger one ranges are read.
FETCHED_BYTES: Final = 64 << 20
#: Rows that are searched all at once, 8 MiB of them: in a tenth of the time that looks near each value take.
FEW_ROWS: Final = 1 << 20


class _Dataset(NamedTuple):
    """The offset of a dataset's rows in the file, and the number of its first block among the blocks of the file."""

    offset: int
    dtype: np.dtype[Any]
    num_rows: int
    block: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.dtype.itemsize

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // TABLES_BLOCK_BYTES)

    def blocks(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """Return the first block of some rows in the dataset, and the end of the last one; also of many ranges."""
        size = self.dtype.itemsize
        return start * size // TABLES_BLOCK_BYTES, -(-stop * size // TABLES_BLOCK_BYTES)


class TableFile:
    """Reads the columns of a table file of one kind by their names. Thread-safe; `close` must not race with reads.

    HDF5 looks at the file once, when it is opened, and holds no lock afterwards. Each block of 64 KiB is compared with
    its crc32 when it is first touched, and each range of a large object at every read. Usable after fork, picklable: a
    copy opens the file by its path, and refuses another one. A view must not be touched after another process has cut
    the file in place: that is a bus error.

    Parameters
    ----------
    path
        The file, or a URL.
    kind
        "pieces" or "documents".
    sha256
        The expected digest; "": not known.
    verify
        "none": no block is compared.
    access
        "pread": nothing is mapped.

    Attributes
    ----------
    attributes
        The attributes of the root group.
    sha256
        The digest of the file.
    num_bytes
        The size of the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        sha256: str = "",
        verify: str = "auto",
        access: str = "auto",
    ) -> None:
        self.path = any_path(path)
        self.kind = kind
        try:
            with h5_damage(self.path), open_h5_for_reading(self.path) as h5:
                self.attributes, self.sha256 = _attributes(h5, self.path, kind)
                identity = h5_identity(h5, growing=False)
                self._datasets = _datasets(h5, self.path, kind)
                end = max(dataset.offset + dataset.num_bytes for dataset in self._datasets.values())
                last = self._datasets.pop(CRC32)
                require_bytes(end, handle_of_h5(h5), self.path, "its tables")
                self._crc32: npt.NDArray[np.uint32] = h5[CRC32][:]
                self.num_bytes: int = identity[0]
                self._is_far = isinstance(self.path, RemotePath) and self.num_bytes >= FETCHED_BYTES
                self._file = self._open(h5, identity, access)
        except FileNotFoundError as error:
            raise IncompleteError(f"{self.path}: is not there; restore it, or convert again") from error
        with on_failure(self.close):
            self._require_digest(last.block, sha256)
        #: The blocks of a dataset that were not compared, until all were.
        self._pending: dict[str, npt.NDArray[np.bool_]] = {}
        if verify != "none":
            self._pending = {name: np.ones(dataset.num_blocks, np.bool_) for name, dataset in self._datasets.items()}

    def _open(self, h5: h5py.File, identity: Identity, access: str) -> Ranges:
        """Open the rows: of a file of this machine by the descriptor that HDF5 has."""
        if self._is_far:
            return open_ranges(self.path, identity)
        return LocalFile(self.path, identity, access_to_tables(access), look_by_h5(h5, self.path))

    def _require_digest(self, num_blocks: int, sha256: str) -> None:
        """Raise an error unless the file has the digest that it says, and that is expected."""
        facts = {name: (dataset.dtype.str, dataset.num_rows) for name, dataset in self._datasets.items()}
        found = table_digest(self.kind, self.attributes, facts, self._crc32)
        if len(self._crc32) != num_blocks or found != self.sha256:
            raise ChecksumError(f"{self.path}: its sha256 differs from its content: it is damaged; restore it")
        if sha256 not in ("", self.sha256):
            raise FormatError(
                f"{self.path}: belongs to another store, or was made again: expected tables of sha256 {sha256}, found "
                f"{self.sha256}; restore it"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._datasets

    def num_rows(self, name: str) -> int:
        """Return the rows of a column; 0 if there is no such column."""
        return self._datasets[name].num_rows if name in self._datasets else 0

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows as a view of a mapping, or a copy by one positioned read; `FormatError` if there are none."""
        dataset = self._datasets[name]
        if not 0 <= start <= stop <= dataset.num_rows:
            raise self.damaged(f"{name} has {dataset.num_rows:,} rows, a row of it points to {start:,} to {stop:,}")
        rows = self._mapped(dataset)
        if rows is None:
            return self._read_runs(name, [(start, stop)])[0]
        pending = self._pending.get(name)
        if pending is not None:
            first, last = dataset.blocks(start, stop)
            self._compare(name, rows, (pending[first:last].nonzero()[0] + first).tolist())
        return rows[start:stop]

    def read_texts(self, name: str, start: int, stop: int) -> list[bytes]:
        """Return some byte strings: at most two reads, however many they are."""
        edges, data = self.read_joined_texts(name, start, stop)
        return [data[a:b] for a, b in pairwise(edges.tolist())]

    def read_joined_texts(self, name: str, start: int, stop: int) -> tuple[npt.NDArray[np.uint64], bytes]:
        """Return some byte strings, joined, and the offset at which each begins and the last one ends."""
        edges = self.read(f"{name}_ends", max(0, start - 1), stop)
        if not start:
            edges = np.append(np.uint64(0), edges)
        return edges - edges[0], self.read(name, int(edges[0]), int(edges[-1])).tobytes()

    def damaged(self, problem: str) -> FormatError:
        """Return the error of a table whose rows contradict each other."""
        return FormatError(f"{self.path}: {problem}: it is damaged", remedy=Remedy.VERIFY, at=self.path.parent)

    def gather(
        self, names: Sequence[str], starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64] | None = None
    ) -> list[npt.NDArray[Any]]:
        """Return rows `starts[i]` to `starts[i] + counts[i]` for all i, joined, of each dataset.

        Parameters
        ----------
        names
            The datasets.
        starts
            The first row of each range.
        counts
            The rows of each range; None: one each.
        """
        sizes = np.ones_like(starts) if counts is None else counts
        stops = starts + sizes
        num_rows = min(map(self.num_rows, names))
        if len(starts) and (np.minimum.reduce(starts | sizes) < 0 or np.maximum.reduce(stops) > num_rows):
            raise self.damaged(f"{names[0]} has {num_rows:,} rows, a row of it points beyond them")
        wanted = starts if counts is None else ranges(starts, sizes)
        found = []
        for name in names:
            dataset = self._datasets[name]
            pending = self._pending.get(name)
            rows = self._mapped(dataset)
            if rows is None:
                runs = self._read_runs(name, list(zip(starts.tolist(), stops.tolist(), strict=True)))
                found.append(np.concatenate([*runs, np.empty(0, dataset.dtype)]))
                continue
            if pending is not None:
                firsts, lasts = dataset.blocks(starts, stops)
                touched = ranges(firsts, np.maximum(lasts - firsts, 0))
                self._compare(name, rows, np.unique(touched[pending[touched]]).tolist())
            found.append(rows[wanted])
        return found

    def search(
        self, name: str, values: npt.NDArray[np.uint64], side: Literal["left", "right"]
    ) -> npt.NDArray[np.int64]:
        """Return the result of `searchsorted` in a column that ascends."""
        anchors = self.num_rows(TABLES_ANCHORS[name]) - 1
        if anchors < 1:
            return np.zeros(len(values), np.int64)
        if self.num_rows(name) <= FEW_ROWS and self._mapped(self._datasets[name]) is not None:
            return self.read(name, 0, self.num_rows(name)).searchsorted(values, side)
        # of many rows, or from afar, the few between two anchors around each value are read
        windows = np.minimum(values // np.uint64(TABLES_ANCHOR_TOKENS), np.uint64(anchors - 1)).astype(np.int64)
        windows, where = np.unique(windows, return_inverse=True)
        [limits] = self.gather([TABLES_ANCHORS[name]], windows, np.full(len(windows), 2))
        lows, highs = limits.astype(np.int64).reshape(-1, 2).T
        [rows] = self.gather([name], lows, highs - lows)
        ends = ends_of(highs - lows)
        found = np.clip(rows.searchsorted(values, side), ends[where], ends[where + 1])
        return lows[where] + found - ends[where]

    def check(self) -> None:
        """Compare the whole table with its digests; `ChecksumError` if one differs."""
        for name, dataset in self._datasets.items():
            for block in range(dataset.num_blocks):
                start = block * TABLES_BLOCK_BYTES
                data = np.empty(min(TABLES_BLOCK_BYTES, dataset.num_bytes - start), np.uint8)
                self._file.read_ranges([(dataset.offset + start, data)])
                self._require(name, block, data)

    def _mapped(self, dataset: _Dataset) -> npt.NDArray[Any] | None:
        """Return a view of all rows of a dataset; None where the file may not be mapped."""
        data = None if self._is_far else self._file.mapping()  # notices a file that was cut
        return None if data is None else np.ndarray(dataset.num_rows, dataset.dtype, data, dataset.offset)

    def _read_runs(self, name: str, runs: Sequence[tuple[int, int]]) -> list[npt.NDArray[Any]]:
        """Return runs of rows by positioned reads: whole blocks, where some of them were not compared."""
        dataset = self._datasets[name]
        pending = self._pending.get(name)
        wanted: list[tuple[int, npt.NDArray[np.uint8]]] = []
        parts: list[tuple[npt.NDArray[Any], Sequence[int]]] = []
        for start, stop in runs:
            begin = start * dataset.dtype.itemsize
            end = stop * dataset.dtype.itemsize
            first, last = dataset.blocks(start, stop)
            compared = pending is None or not pending[first:last].any()
            low = begin if compared else first * TABLES_BLOCK_BYTES
            high = end if compared else min(last * TABLES_BLOCK_BYTES, dataset.num_bytes)
            data = np.empty(high - low, np.uint8)
            wanted.append((dataset.offset + low, data))
            parts.append((data[begin - low : end - low].view(dataset.dtype), () if compared else range(first, last)))
        self._file.read_ranges([part for part in wanted if len(part[1])])
        for (_, data), (_, blocks) in zip(wanted, parts, strict=True):
            for at, block in zip(range(0, len(data), TABLES_BLOCK_BYTES), blocks, strict=False):
                self._require(name, block, data[at : at + TABLES_BLOCK_BYTES])
        return [rows for rows, _ in parts]

    def _compare(self, name: str, rows: npt.NDArray[Any], blocks: Iterable[int]) -> None:
        """Compare blocks of a mapped dataset."""
        for block in blocks:
            start = block * TABLES_BLOCK_BYTES
            self._require(name, block, rows.view(np.uint8)[start : start + TABLES_BLOCK_BYTES])

    def _require(self, name: str, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Raise `ChecksumError` unless a block has its crc32."""
        expected = int(self._crc32[self._datasets[name].block + block])
        found = crc32_of(data)
        if found != expected:
            raise ChecksumError(
                f"{self.path}: {name}: block {block:,}: expected crc32 {expected:#010x}, found {found:#010x}; restore "
                "it, or convert again"
            )
        pending = self._pending.get(name)
        if pending is not None and not self._is_far:
            pending[block] = False
            if not pending.any():
                self._pending.pop(name, None)

    def close(self) -> None:
        self._file.close()


def _attributes(h5: h5py.File, path: Path, kind: str) -> tuple[dict[str, str | int], str]:
    """Return the attributes of a table file of one kind, and its digest."""
    found: dict[str, str | int] = {
        name: str(text_of(value)) if isinstance(value, (bytes, str)) else int(value) for name, value in h5.attrs.items()
    }
    for name, expected in (("format", TABLES_FORMAT), ("kind", kind)):
        if found.get(name) != expected:
            raise FormatError(f"{path}: expected root attribute {name}={expected!r}, found {found.get(name)!r}")
    require_version(h5, TABLES_VERSION, path)
    missing = [name for name in (*TABLES_ATTRIBUTES, *TABLES_KIND_ATTRIBUTES[kind]) if name not in found]
    if missing:
        raise FormatError(f"{path}: attribute {missing[0]!r} is missing")
    return {name: found[name] for name in found if name not in TABLES_ATTRIBUTES}, str(found["sha256"])


def _datasets(h5: h5py.File, path: Path, kind: str) -> dict[str, _Dataset]:
    """Return the datasets by their names, the crc32 rows last."""
    datasets: dict[str, _Dataset] = {}
    block = 0
    for name in (*sorted(set(h5) - {CRC32}), CRC32):
        rows = own_dataset(h5, path, name)
        dtype = TABLES[kind].get(name)
        if rows is None or dtype is None or rows.ndim != 1 or rows.dtype != np.dtype(dtype):
            raise FormatError(
                f"{path}: expected datasets {', '.join(TABLES[kind])}, each 1-D, found {name!r}: {rows!r}"
            )
        offset = rows.id.get_offset()
        if rows.chunks or (offset is None and len(rows)):
            raise FormatError(f"{path}: {name!r} is not contiguous: it was repacked by another tool; restore it")
        datasets[name] = _Dataset(offset or 0, rows.dtype, len(rows), block)
        block += datasets[name].num_blocks
    return datasets


def table_digest(
    kind: str, attributes: Mapping[str, str | int], facts: Mapping[str, tuple[str, int]], crc32: npt.NDArray[np.uint32]
) -> str:
    """Return the digest of a whole table: of its attributes, its datasets and the crc32 of their blocks."""
    text = json.dumps([kind, sorted(attributes.items()), sorted([name, *fact] for name, fact in facts.items())])
    return hashlib.sha256(text.encode() + crc32.tobytes()).hexdigest()


# --- the pieces of a shard or of a lone file, in `<file>.pieces` ------------------------------------------------------


class PiecesFile(TableFile):
    """Reads the pieces of a file of batches; `FormatError` if the table belongs to other batches.

    Parameters
    ----------
    path
        The file of batches.
    num_records
        Records of the file; None: not known.
    seq_len
        Tokens of a record.
    sha256
        The expected digest of the pieces; "": not known.
    tokens_sha256
        The sha256 of the tokens of the file; None: not known.
    verify, access
        As for `TableFile`.

    Attributes
    ----------
    split
        The split whose document stream the offsets count.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_records: int | None,
        seq_len: int,
        *,
        sha256: str = "",
        tokens_sha256: str | None = None,
        verify: str = "auto",
        access: str = "auto",
    ) -> None:
        super().__init__(pieces_path(any_path(path)), PIECES, sha256, verify, access)
        pairs = {
            "records": (num_records, self.num_rows("ends")),
            "seq_len": (seq_len, self.attributes["seq_len"]),
            "sha256 of the tokens": (tokens_sha256, self.attributes["tokens_sha256"]),
        }
        for name, (expected, found) in pairs.items():
            if not {None, "", NO_SHA256} & {expected, found} and expected != found:
                self.close()
                raise FormatError(
                    f"{self.path}: belongs to another file: expected {name} {expected}, found {found}; restore it"
                )
        if any(name not in self for name in TABLES[PIECES] if name != "crc32"):
            raise FormatError(f"{self.path}: expected datasets {', '.join(TABLES[PIECES])}; restore it")
        self.seq_len = seq_len
        self.split = str(self.attributes["split"])

    def read_pieces(self, records: npt.NDArray[np.int64]) -> Pieces:
        """Return the pieces of any records, which the caller has checked."""
        if np.count_nonzero(records[1:] - records[:-1] == 1) == len(records) - 1:  # `np.diff` takes twice as long
            return self.read_run(int(records[0]), int(records[-1]) + 1)
        rows = np.concatenate([np.maximum(records - 1, 0), records])
        starts, ends = self.gather(["ends"], rows)[0].view(np.int64).reshape(2, -1)
        starts[records == 0] = 0
        counts = ends - starts
        columns, offsets = self.gather(["columns", "offsets"], starts, counts)
        return self._checked(Pieces(ends_of(counts), columns, offsets, self.seq_len))

    def read_run(self, start: int, stop: int) -> Pieces:
        """Return the pieces of consecutive records, which the caller has checked: three reads."""
        ends = self.read("ends", max(0, start - 1), stop).view(np.int64)
        ends = ends if start else np.append(0, ends)
        first = ends.item(0)
        last = ends.item(-1)
        columns = self.read("columns", first, last)
        offsets = self.read("offsets", first, last)
        return self._checked(Pieces(ends - first, columns, offsets, self.seq_len))

    def _checked(self, pieces: Pieces) -> Pieces:
        """Raise `FormatError` unless each record has pieces, whose columns ascend from 0 and are below `seq_len`."""
        if len(pieces.ends) == 1:
            return pieces
        if np.count_nonzero(pieces.counts > 0) < pieces.num_records:  # of small arrays, counts take a third of `min`
            raise self.damaged("its ends do not ascend")
        # ascending starts, and 0 as the first column of each record, leave no column at or above `seq_len`
        starts = pieces.starts
        ascending = np.count_nonzero(starts[1:] > starts[:-1]) == len(starts) - 1
        if not ascending or starts.item(-1) >= pieces.num_tokens or np.count_nonzero(pieces.columns[pieces.ends[:-1]]):
            raise self.damaged("its columns do not ascend")
        return pieces
