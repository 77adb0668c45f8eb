"""The table of the pieces of a shard or a lone file, in `<file>.pieces`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces, ends_of, pieces_path
from zb_hdf5.documents.table_file import TableFile, TableWriter
from zb_hdf5.errors import FormatError
from zb_hdf5.files.paths import any_path
from zb_hdf5.spec import PIECES, TABLES


class PiecesWriter(TableWriter):
    """Takes the pieces of records in order, for the file of batches at `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(pieces_path(path), PIECES)

    def append_pieces(self, pieces: Pieces) -> None:
        """Append the pieces of consecutive records."""
        self.append("ends", pieces.ends[1:].astype(np.uint64) + np.uint64(self.num_rows("offsets")))
        self.append("columns", pieces.columns)
        self.append("offsets", pieces.offsets)


class PiecesFile(TableFile):
    """Reads the pieces of a file of batches, whose digests and sizes are compared where they are known.

    `split` is the one whose document stream the offsets count. `FormatError` if the table belongs to other batches.
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
        super().__init__(pieces_path(any_path(path)), PIECES, sha256, verify)
        pairs = {
            "records": (num_records, self.num_rows("ends")),
            "seq_len": (seq_len, self.attributes["seq_len"]),
            "sha256 of the tokens": (tokens_sha256, self.attributes["tokens_sha256"] or None),
        }
        for name, (expected, found) in pairs.items():
            if None not in (expected, found) and expected != found:
                self.close()
                raise FormatError(
                    f"{self.path}: belongs to another file: expected {name} {expected}, found {found}; restore it"
                )
        if any(name not in self for name in TABLES[PIECES] if name != "crc32"):
            raise FormatError(f"{self.path}: expected datasets {', '.join(TABLES[PIECES])}; restore it")
        self.seq_len, self.split = seq_len, str(self.attributes["split"])

    def read_pieces(self, records: npt.NDArray[np.int64]) -> Pieces:
        """Return the pieces of any records, which the caller has checked."""
        if len(records) and records[-1] - records[0] == len(records) - 1 and (np.diff(records) == 1).all():
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
        first, last = ends.item(0), ends.item(-1)
        columns, offsets = self.read("columns", first, last), self.read("offsets", first, last)
        return self._checked(Pieces(ends - first, columns, offsets, self.seq_len))

    def _checked(self, pieces: Pieces) -> Pieces:
        """Raise `FormatError` unless each record has pieces, whose columns ascend from 0 and lie below `seq_len`."""
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
