"""The pieces of the records of a shard or a lone file, in `<file>.pieces`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces, ends_of
from zb_hdf5.errors import FormatError
from zb_hdf5.files.paths import any_path
from zb_hdf5.spec import PIECES, PIECES_SUFFIX, TABLES

if TYPE_CHECKING:
    from zb_hdf5.documents.table_file import TableInfo


def pieces_path(path: Path) -> Path:
    """Return the path of the pieces of a file of batches."""
    return path.with_name(path.name + PIECES_SUFFIX)


class PiecesWriter:
    """Takes the pieces of records in order, and publishes `<path>.pieces`. Not thread-safe.

    Parameters
    ----------
    path
        The file of batches that the pieces belong to.
    """

    def __init__(self, path: Path) -> None:
        from zb_hdf5.documents.table_file import TableWriter  # h5py

        self._table = TableWriter(pieces_path(path), PIECES)

    def append(self, pieces: Pieces) -> None:
        """Append the pieces of consecutive records."""
        self._table.append("ends", pieces.ends[1:].astype(np.uint64) + np.uint64(self._table.num_rows("offsets")))
        self._table.append("columns", pieces.columns)
        self._table.append("offsets", pieces.offsets)

    def publish(self, seq_len: int, split: str, tokens_sha256: str) -> TableInfo:
        """Write the file; `tokens_sha256` names the batches that it belongs to."""
        return self._table.publish(seq_len=seq_len, split=split, tokens_sha256=tokens_sha256)

    def close(self) -> None:
        """Give up the pieces that were not published."""
        self._table.close()


class PiecesFile:
    """Reads the pieces of one file of batches. Thread-safe, usable after fork, picklable.

    Parameters
    ----------
    path
        The file of batches.
    num_records, seq_len
        Of the batches; None: not known.
    sha256
        Digest of the table; "": not known.
    tokens_sha256
        Digest of the batches; None: not known.
    verify
        As for `TableFile`.

    Attributes
    ----------
    split
        The split whose document stream the offsets count.
    sha256, num_bytes
        Digest of the table, and its size.

    Raises
    ------
    FormatError, IncompleteError, ChecksumError
        If `<path>.pieces` is not there, damaged, or belongs to other batches.
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
        from zb_hdf5.documents.table_file import TableFile  # h5py

        self._table = table = TableFile(pieces_path(any_path(path)), PIECES, sha256, verify)
        known = table.attributes
        pairs = {
            "records": (num_records, table.num_rows("ends")),
            "seq_len": (seq_len, known["seq_len"]),
            "sha256 of the tokens": (tokens_sha256, known["tokens_sha256"] or None),
        }
        for name, (expected, found) in pairs.items():
            if None not in (expected, found) and expected != found:
                table.close()
                raise FormatError(
                    f"{table.path}: belongs to another file: expected {name} {expected}, found {found}; restore it"
                )
        if any(name not in table for name in TABLES[PIECES] if name != "crc32"):
            raise FormatError(f"{table.path}: expected datasets {', '.join(TABLES[PIECES])}; restore it")
        self.seq_len, self.split = int(known["seq_len"]), str(known["split"])
        self.sha256, self.num_bytes = table.sha256, table.num_bytes

    def read(self, records: npt.NDArray[np.int64]) -> Pieces:
        """Return the pieces of any records, which the caller has checked."""
        if len(records) == 0 or (records[-1] - records[0] == len(records) - 1 and (np.diff(records) == 1).all()):
            return self.read_run(*((int(records[0]), int(records[-1]) + 1) if len(records) else (0, 0)))
        before = self._table.gather("ends", np.maximum(records - 1, 0), (records > 0).astype(np.int64))
        starts = np.zeros(len(records), np.int64)
        starts[records > 0] = before.view(np.int64)
        counts = self._table.gather("ends", records, np.ones(len(records), np.int64)).view(np.int64) - starts
        columns, offsets = (self._table.gather(name, starts, counts) for name in ("columns", "offsets"))
        return self._checked(Pieces(ends_of(counts), columns, offsets, self.seq_len))

    def read_run(self, start: int, stop: int) -> Pieces:
        """Return the pieces of consecutive records, which the caller has checked: three reads."""
        ends = self._table.read("ends", max(0, start - 1), stop).view(np.int64)
        ends = ends if start else np.append(0, ends)
        first, last = ends.item(0), ends.item(-1)
        columns, offsets = self._table.read("columns", first, last), self._table.read("offsets", first, last)
        return self._checked(Pieces(ends - first, columns, offsets, self.seq_len))

    def _checked(self, pieces: Pieces) -> Pieces:
        """Raise `FormatError` unless each record has pieces, whose columns ascend from 0 and lie below `seq_len`."""
        if len(pieces.ends) == 1:
            return pieces
        # the method `min` does the same in twice the time
        if np.minimum.reduce(pieces.counts) < 1:
            raise self._table.damaged("its ends do not ascend")
        # ascending starts, and 0 as the first column of each record, leave no column at or above `seq_len`
        starts = pieces.starts
        ascending = np.logical_and.reduce(starts[1:] > starts[:-1]) and starts.item(-1) < pieces.num_tokens
        if not ascending or np.logical_or.reduce(pieces.columns[pieces.ends[:-1]]):
            raise self._table.damaged("its columns do not ascend")
        return pieces

    def check(self) -> None:
        """Compare the whole table with its digests. Raises `ChecksumError`."""
        self._table.check()

    def close(self) -> None:
        self._table.close()
