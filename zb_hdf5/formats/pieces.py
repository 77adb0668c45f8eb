"""The pieces of a shard or a lone file: which parts of documents lie in its records, in `<file>.pieces.h5`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces, concatenate, ends_of, ranges
from zb_hdf5.errors import FormatError, Remedy
from zb_hdf5.files.paths import any_path
from zb_hdf5.spec import PIECES, PIECES_SUFFIX, TABLES

if TYPE_CHECKING:
    from zb_hdf5.formats.hdf5.tables import TablesInfo


def pieces_path(path: Path) -> Path:
    """Return where the pieces of a file of batches are."""
    return path.with_name(path.name + PIECES_SUFFIX)


class PiecesWriter:
    """Takes the pieces of records in order, and publishes `<path>.pieces.h5`. Not thread-safe.

    Parameters
    ----------
    path
        The file of batches that the pieces belong to.
    """

    def __init__(self, path: Path) -> None:
        from zb_hdf5.formats.hdf5.tables import TablesWriter  # h5py

        self._tables = TablesWriter(pieces_path(path), PIECES)

    def append(self, pieces: Pieces) -> None:
        """Append the pieces of consecutive records."""
        self._tables.append("ends", pieces.ends[1:].astype(np.uint64) + np.uint64(self._tables.num_rows("offsets")))
        self._tables.append("columns", pieces.columns)
        self._tables.append("offsets", pieces.offsets)

    def publish(self, seq_len: int, split: str, tokens_sha256: str) -> TablesInfo:
        """Write the file; `tokens_sha256` names the batches that it belongs to."""
        return self._tables.publish(seq_len=seq_len, split=split, tokens_sha256=tokens_sha256)

    def close(self) -> None:
        """Give up the pieces that were not published."""
        self._tables.close()


class PiecesFile:
    """Reads the pieces of one file of batches. Thread-safe, usable after fork, picklable.

    Parameters
    ----------
    path
        The file of batches.
    num_records, seq_len
        What it holds; None: not known.
    sha256
        Digest of its tables; "": not known.
    tokens_sha256
        Digest of the batches; None: not known.
    verify
        As for `TablesFile`.

    Raises
    ------
    FormatError, IncompleteError
        If `<path>.pieces.h5` is not there, damaged, or belongs to other batches.
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
    ) -> None:
        from zb_hdf5.formats.hdf5.tables import TablesFile  # h5py

        place = pieces_path(any_path(path))
        self._views: tuple[Any, Any, Any] | None = None
        self._tables = TablesFile(place, PIECES, sha256, verify)
        known = self._tables.attributes
        expected = {"records": num_records, "seq_len": seq_len, "sha256 of the tokens": tokens_sha256}
        found = {
            "records": self._tables.num_rows("ends"),
            "seq_len": known["seq_len"],
            "sha256 of the tokens": known["tokens_sha256"] or None,
        }
        for name, value in found.items():
            if value is not None and expected[name] is not None and value != expected[name]:
                raise FormatError(
                    f"{place}: belongs to another file: expected {name} {expected[name]}, found {value}; restore it"
                )
        self.seq_len, self._num_pieces = int(known["seq_len"]), self._tables.num_rows("offsets")
        if any(name not in self._tables for name in TABLES[PIECES]):
            raise FormatError(f"{place}: expected datasets {', '.join(TABLES[PIECES])}; restore it")

    @property
    def split(self) -> str:
        """The split whose document stream the offsets count."""
        return str(self._tables.attributes["split"])

    @property
    def sha256(self) -> str:
        return self._tables.sha256

    @property
    def num_bytes(self) -> int:
        return self._tables.num_bytes

    def read(self, records: npt.NDArray[np.int64]) -> Pieces:
        """Return the pieces of any records, which the caller has checked.

        Three reads of consecutive bytes for each run of consecutive records; where the file may be mapped, records that
        lie apart are gathered at once.
        """
        breaks = np.flatnonzero(np.diff(records) != 1) + 1
        if len(breaks) and self._tables.is_mapped:
            return self._gather(records)
        runs = np.split(records, breaks) if len(records) else []
        parts = [self.read_run(int(run[0]), int(run[-1]) + 1) for run in runs]
        return concatenate(parts) if parts else self.read_run(0, 0)

    def read_run(self, start: int, stop: int) -> Pieces:
        """Return the pieces of consecutive records, which the caller has checked: views where the file is mapped."""
        if self._tables.is_mapped:
            ends, columns, offsets = self._views or self._columns()
            known = ends[start - 1 : stop] if start else np.append(0, ends[:stop])
            counts, first, last = self._counts(known)
            columns, offsets = columns[first:last], offsets[first:last]
        else:
            known = self._tables.read("ends", max(0, start - 1), stop).view(np.int64)
            known = known if start else np.append(0, known)
            counts, first, last = self._counts(known)
            columns, offsets = (self._tables.read(name, first, last) for name in ("columns", "offsets"))
        pieces = Pieces(known - first, columns, offsets, self.seq_len)
        pieces.counts = counts  # computed already
        return self._checked(pieces)

    def _counts(self, ends: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int, int]:
        """Return how many pieces each record has, and which of the file they are."""
        counts = ends[1:] - ends[:-1]
        first, last = ends.item(0), ends.item(-1)
        self._require(counts, last)
        return counts, first, last

    def _columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """Return views of all rows of a mapped file."""
        if self._views is None:
            ends, columns, offsets = (self._tables.column(name) for name in ("ends", "columns", "offsets"))
            self._views = ends.view(np.int64), columns, offsets
        return self._views

    def _gather(self, records: npt.NDArray[np.int64]) -> Pieces:
        ends, columns, offsets = self._columns()
        stops = ends[records]
        starts = np.where(records > 0, ends[records - 1], 0).astype(np.int64)
        counts = stops - starts
        self._require(counts, int(stops.max()))
        index = ranges(starts, counts)
        return self._checked(Pieces(ends_of(counts), columns[index], offsets[index], self.seq_len))

    def _require(self, counts: npt.NDArray[np.int64], stop: int) -> None:
        """Raise `FormatError` if the numbers that were read cannot be: they would point anywhere."""
        # the method `min` does the same in twice the time
        if (len(counts) and np.minimum.reduce(counts) < 1) or not 0 <= stop <= self._num_pieces:
            raise self._damaged("ends")

    def _checked(self, pieces: Pieces) -> Pieces:
        """Raise `FormatError` unless the columns of each record ascend from 0 and lie below `seq_len`."""
        starts = pieces.starts
        if len(starts) == 0:
            return pieces
        # ascending starts, and 0 as the first column of each record, leave no column at or above `seq_len`
        ascending = np.logical_and.reduce(starts[1:] > starts[:-1]) and starts.item(-1) < pieces.num_tokens
        if not ascending or np.logical_or.reduce(pieces.columns[pieces.ends[:-1]]):
            raise self._damaged("columns")
        return pieces

    def _damaged(self, name: str) -> FormatError:
        return FormatError(
            f"{self._tables.path}: its {name} do not ascend: it is damaged",
            remedy=Remedy.VERIFY,
            at=self._tables.path.parent,
        )

    def check(self) -> None:
        """Compare all that it says with its digests.

        Raises
        ------
        ChecksumError
            If something is not as it was written.
        """
        self._tables.check()

    def close(self) -> None:
        self._views = None
        self._tables.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": None}
