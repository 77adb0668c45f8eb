"""A range of records of a field set that this process has claimed: its parts, and the commits of values to them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ExistsError
from zb_hdf5.field_sets.part_claim import PartClaim
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.publishing import fsync_directory
from zb_hdf5.spec import SET_INDEX
from zb_hdf5.store.set_facts import SetFacts, part_name
from zb_hdf5.store.set_index import parts_in
from zb_hdf5.store.value_part import ValuePart, make_part

#: The first record of a run of consecutive ones, and field -> their values, C-contiguous, one row for each.
RecordRun: TypeAlias = tuple[int, dict[str, npt.NDArray[Any]]]


class ClaimedRange:
    """The parts of a range of records, which no other process writes. `take` makes it. Not thread-safe.

    Attributes
    ----------
    first, stop
        The records.
    there
        Which of them are written.
    """

    def __init__(self, folder: Path, facts: SetFacts, number: int, claim: PartClaim) -> None:
        self.first, self.stop = facts.cell(number)
        self._folder = folder
        self._facts = facts
        self._claim = claim
        self._parts: list[ValuePart] = []
        with on_failure(self.close):
            self._open_parts()
            if claim.is_taken_over:
                self._drop_damaged()
            self.there = np.concatenate([part.is_there() for part in self._parts])

    @classmethod
    def take(cls, folder: Path, facts: SetFacts, number: int, stale_s: float) -> Self | None:
        """Claim a range by its number, and make the parts that it lacks; None if another process has it.

        Raises
        ------
        OSError
            If the disk lacks the space of a part.
        """
        claim = PartClaim.take(folder / part_name(facts.cell(number)[0]), stale_s)
        if claim is None:
            return None
        with on_failure(claim.release):
            return cls(folder, facts, number, claim)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._folder)!r}, records {self.first:,} to {self.stop:,})"

    def _open_parts(self) -> None:
        """Open the parts of the range, and make those that it lacks: the tokens may have grown since it had one."""
        there = [(first, path) for first, path in parts_in(self._folder) if self.first <= first < self.stop]
        done = self.first
        for first, path in [*there, (self.stop, None)]:
            if done < first:
                self._make(done, first)
                done = first
            if path is not None:
                self._parts.append(ValuePart(path, self._facts, writable=True))
                done = first + self._parts[-1].layout.records
        self._firsts = [part.layout.first for part in self._parts]

    def _make(self, first: int, stop: int) -> None:
        path = self._folder / part_name(first)
        with suppress(ExistsError):  # by the owner of a claim that was taken over
            make_part(path, self._facts, first, stop - first)
        self._parts.append(ValuePart(path, self._facts, writable=True))

    def _drop_damaged(self) -> None:
        """Compare all marked records with their crc32; those that differ are missing again."""
        for part in self._parts:
            self._unmark(part, part.damaged())

    def _unmark(self, part: ValuePart, rows: npt.NDArray[np.int64]) -> None:
        """Take back the marks of some rows of a part: a set that lacks records is not finished, and has no index."""
        if len(rows):
            (self._folder / SET_INDEX).unlink(missing_ok=True)
            fsync_directory(self._folder)
            part.unmark(rows)

    def missing(self) -> npt.NDArray[np.int64]:
        """Return the records that are not written."""
        return np.flatnonzero(~self.there) + self.first

    def forget(self, records: npt.NDArray[np.int64]) -> None:
        """Take back the marks of records, which are to be written again."""
        self._claim.hold()
        for part in self._parts:
            first, stop = part.layout.first, part.layout.first + part.layout.records
            rows = records[(records >= first) & (records < stop)] - first
            self._unmark(part, rows[part.is_there()[rows]])
        self.there[records - self.first] = False

    def commit(self, runs: Sequence[RecordRun]) -> None:
        """Write the values of runs of consecutive records, flush them together, and then mark them.

        Parameters
        ----------
        runs
            The first record of each run, and field -> C-contiguous values, one row for each record.

        Raises
        ------
        UnavailableError
            If another process has taken over the claim.
        """
        self._claim.hold()
        pieces = [piece for record, values in runs for piece in self._in_parts(record, values)]
        for part, row, values in pieces:
            part.write(row, values)
        touched = {id(part): part for part, _, _ in pieces}.values()
        for part in touched:
            part.flush()
        self._claim.hold()
        for part, row, values in pieces:
            part.mark(row, values)
            start = part.layout.first + row - self.first
            self.there[start : start + num_rows(values)] = True

    def _in_parts(
        self, record: int, values: Mapping[str, npt.NDArray[Any]]
    ) -> list[tuple[ValuePart, int, dict[str, npt.NDArray[Any]]]]:
        """Return the values of a run of records in each part."""
        found = []
        done = 0
        while done < num_rows(values):
            part = self._parts[bisect_right(self._firsts, record + done) - 1]
            row = record + done - part.layout.first
            take = min(num_rows(values) - done, part.layout.records - row)
            found.append((part, row, {name: rows[done : done + take] for name, rows in values.items()}))
            done += take
        return found

    @property
    def is_complete(self) -> bool:
        return bool(self.there.all())

    def finish(self) -> None:
        """End the claim on a range whose records are all written.

        After a claim that was taken over while its owner may have been alive, all values are read once more.
        """
        if self._claim.is_taken_over:
            self._drop_damaged()
            self.there = np.concatenate([part.is_there() for part in self._parts])
        self.end()

    def end(self) -> None:
        """Bring the rows of what was written to the disk, and end the claim: nobody compares the values then.

        If the disk refuses, whoever takes the range next compares them.
        """
        try:
            for part in self._parts:
                part.flush()
        except OSError:
            self._claim.let_go()
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Close the parts, and end the claim."""
        for part in self._parts:
            part.close()
        self._claim.release()


def num_rows(values: Mapping[str, npt.NDArray[Any]]) -> int:
    """Return how many records some values are of."""
    return len(next(iter(values.values())))
