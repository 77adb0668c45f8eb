"""A field set: values that another job computes for finished tokens, written record by record beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from zb_hdf5.console import Progress
from zb_hdf5.errors import (
    ArgumentError,
    ClosedError,
    ConvertError,
    UnavailableError,
    counted,
)
from zb_hdf5.field import BFLOAT16, UNITS, Field
from zb_hdf5.field_sets.claimed_range import ClaimedRange, RecordRun, num_rows
from zb_hdf5.field_sets.missing_steps import MissingReader, StepOptions, WantedRecords, wanted_steps
from zb_hdf5.field_sets.set_upkeep import RangeState, damaged_records, finish_set, range_states, state_of
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.loaders.order import resolve_rank
from zb_hdf5.notes import note
from zb_hdf5.packages import from_numpy, require_package
from zb_hdf5.store.set_facts import SetFacts

_Step = TypeVar("_Step")
#: The variables of a job of an array in Slurm: its number, that of the first job, the step from one number to the
#: next, and how many jobs there are.
_ARRAY_VARIABLES: Final = tuple(f"SLURM_ARRAY_TASK_{each}" for each in ("ID", "MIN", "STEP", "COUNT"))


class FieldSet:
    """A field set, to which this process writes. `open_field_set` makes it.

    One process uses it, from one thread at a time, and not after a fork; any number of processes may write to the same
    set, each by an object of its own. A context manager: leaving the block gives up the claims on parts.

    Attributes
    ----------
    folder
        Its folder.
    facts
        Its facts. See `SetFacts`.
    corpus
        The tokens.
    """

    def __init__(self, folder: Path, facts: SetFacts, corpus: Corpus, stale_s: float, *, closes: bool) -> None:
        self.folder = folder
        self.facts = facts
        self.corpus = corpus
        self._stale_s = stale_s
        self._closes = closes
        self._ranges: dict[int, ClaimedRange] = {}  # by number: those that this process has
        self._again = (0, 0)  # records that are written once more
        self._to_rewrite: set[int] = set()  # ranges of this job whose records are still marked
        self._progress: Progress | None = None
        self._is_open = True

    # --- records that are missing ----------------------------------------------------------------------------------

    def missing(
        self,
        batch_size: int = 1,
        *,
        job: int | None = None,
        num_jobs: int | None = None,
        overwrite: tuple[int, int] | None = None,
        quiet: bool = False,
        **options: Unpack[StepOptions],
    ) -> Iterator[dict[str, Any]]:
        """Yield steps of records that nobody has written, part by part, each claimed by this process.

        The parts of this job come first, then those that nobody has claimed. It ends when nothing is unclaimed, and
        notes how many records others have. Each step is a dictionary as of a `Loader`, and has "records" (int64), the
        numbers that `write` takes; of a stream these are windows, and the last one may have fewer tokens. A set of
        documents gives their numbers alone. Records that are given and not written stay claimed until the set is
        closed.

        Parameters
        ----------
        batch_size
            Records of a step; a part may end with fewer.
        job, num_jobs
            The number of this job, and how many there are. None: those of Slurm's array, else rank and world size,
            else 0 of 1. Any others may go on later.
        overwrite
            The first record, and the end, of records that are given and written once more: of several jobs each takes
            those in its own parts. A finished set is to be finished again then.
        quiet
            Whether no progress is shown.
        **options
            `documents`, `fields`, `spans`, `dtype`, `device` and `prefetch`, as for `Loader`.

        Raises
        ------
        ArgumentError
            If the arguments are not possible.
        """
        order = self._begun(batch_size, job, num_jobs, overwrite)
        return self._read_by(partial(self._steps, batch_size, options), order, batch_size, quiet)

    def missing_records(
        self,
        batch_size: int = 1,
        *,
        job: int | None = None,
        num_jobs: int | None = None,
        overwrite: tuple[int, int] | None = None,
        quiet: bool = False,
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the numbers of records that nobody has written, as `missing` does, without their tokens or torch.

        Parameters
        ----------
        batch_size, job, num_jobs, overwrite, quiet
            As for `missing`. Raises as it does.

        Returns
        -------
        Iterator
            int64 arrays, shape (n,): the numbers of records, of the windows of a stream, or of documents.
        """
        order = self._begun(batch_size, job, num_jobs, overwrite)
        return self._read_by(lambda wanted: (some.numbers for some in wanted), order, batch_size, quiet)

    def _begun(
        self, batch_size: int, job: int | None, num_jobs: int | None, overwrite: tuple[int, int] | None
    ) -> list[int]:
        """Note the records that are written once more; return the numbers of all ranges, first of this job."""
        self._require_open()
        if batch_size < 1:
            raise ArgumentError(f"batch_size must be at least 1, found {batch_size}")
        job, num_jobs = _job_of(job, num_jobs)
        if not 0 <= job < num_jobs:
            raise ArgumentError(f"expected a job in 0..{num_jobs - 1}, found {job}")
        count = self.facts.num_cells
        first = count * job // num_jobs
        if overwrite is not None:
            self._again = _range_in(overwrite, self.facts.num_records)
            cells = range(self._again[0] // self.facts.part_records, -(-self._again[1] // self.facts.part_records))
            self._to_rewrite = {*cells} & {*range(first, count * (job + 1) // num_jobs)}
        return [*range(first, count), *range(first)]

    def _read_by(
        self, read: Callable[[Iterator[WantedRecords]], Iterator[_Step]], order: list[int], batch_size: int, quiet: bool
    ) -> Iterator[_Step]:
        """Yield all that a function makes of the records of some ranges that are missing, and show the progress."""
        label = f"field set {self.facts.name}"
        total = self.facts.num_records
        with Progress(label, total, enabled=False if quiet else None, unit=" records") as progress:
            self._progress = progress
            try:
                yield from read(self._wanted(order, batch_size, progress))
            finally:
                self._progress = None
        held = sum(state.missing for number, state in enumerate(self.ranges()) if number not in self._ranges)
        if held:
            note(f"{self.folder}: {counted(held, 'record')} of other jobs are not written yet")

    def _steps(
        self, batch_size: int, options: StepOptions, wanted: Iterator[WantedRecords]
    ) -> Iterator[dict[str, Any]]:
        """Return the steps of records that are wanted; of documents their numbers alone."""
        if self.facts.is_of_documents:
            return ({"documents": from_numpy()(some.numbers)} for some in wanted)
        return MissingReader(self.corpus, self.facts, batch_size, options).read_all(wanted)

    def _wanted(self, order: list[int], batch_size: int, progress: Progress) -> Iterator[WantedRecords]:
        """Claim ranges, and yield their missing records, until a pass over all claims none."""
        waiting = list(order)
        while waiting:
            left = []
            for number in waiting:
                first, stop = self.facts.cell(number)
                if self._is_complete(number):
                    progress.keep(stop - first)
                    continue
                found = self._claim(number)
                if found is None:
                    left.append(number)
                    continue
                records = found.missing()
                progress.keep(stop - first - len(records))
                yield from wanted_steps(self.facts, records, batch_size)
                if not len(records):
                    self._end_if_complete(number)
            if len(left) == len(waiting):
                return
            waiting = left

    def _is_complete(self, number: int) -> bool:
        """Return whether a range is written, and none of it is wanted again."""
        if number in self._ranges or number in self._to_rewrite:
            return False
        state = state_of(self.folder, self.facts, number)
        return not state.missing and not state.claim.exists()

    def _claim(self, number: int) -> ClaimedRange | None:
        """Claim a range, unless this process has it already; None if another one has it."""
        found = self._ranges.get(number)
        if found is None:
            found = ClaimedRange.take(self.folder, self.facts, number, self._stale_s)
            if found is None:
                return None
            self._ranges[number] = found
        if number in self._to_rewrite:
            found.forget(np.arange(max(found.first, self._again[0]), min(found.stop, self._again[1])))
            self._to_rewrite.remove(number)
        return found

    # --- values ----------------------------------------------------------------------------------------------------

    def write(self, records: Any, **values: Any) -> None:
        """Write the values of records: on return they are on the disk, and marked.

        A process that is killed meanwhile leaves the records of this call without a mark, and loses no others.

        Parameters
        ----------
        records
            Their numbers, shape (n,), as a step has them; of a set of documents the numbers of these.
        **values
            Each field of the set, as an array or a tensor: shape (n, tokens of a record, ...) of a token, (n, ...) of
            a record or a document. Values of tokens that are context only are left out.

        Raises
        ------
        ArgumentError
            If a field is missing, has another shape or dtype, or a record is already written.
        ConvertError
            If a value does not fit its dtype, or is NaN.
        UnavailableError
            If another process has the part, or has taken it over.
        OSError
            If the disk is full: records of this call are not marked then.
        """
        self._require_open()
        numbers = np.asarray(_as_array(records), np.int64).reshape(-1)
        stored = self._as_stored(numbers, values)
        runs = list(chain.from_iterable(self._runs(number, rows) for number, rows in stored))
        by_range: dict[int, list[RecordRun]] = {}
        for record, rows in runs:
            by_range.setdefault(record // self.facts.part_records, []).append((record, rows))
        for number, some in by_range.items():
            self._commit(number, some)

    def _commit(self, number: int, runs: list[RecordRun]) -> None:
        found = self._claim(number)
        if found is None:
            owner = state_of(self.folder, self.facts, number).owner
            raise UnavailableError(
                f"{self.folder}: record {runs[0][0]:,}: its part is written by {owner or 'another process'}"
            )
        for record, rows in runs:
            start = record - found.first
            there = found.there[start : start + num_rows(rows)]
            if there.any():
                written = record + int(there.argmax())
                self._end_if_complete(number)
                raise ArgumentError(
                    f"{self.folder}: record {written:,} is written: pass overwrite=({written}, {written + 1}) to "
                    "missing to write it once more"
                )
        found.commit(runs)
        if self._progress is not None:
            self._progress.advance(sum(num_rows(rows) for _, rows in runs))
        self._end_if_complete(number)

    def _end_if_complete(self, number: int) -> None:
        """End the claim on a range that is written."""
        found = self._ranges[number]
        if found.is_complete:
            del self._ranges[number]
            found.finish()

    def _as_stored(
        self, numbers: npt.NDArray[np.int64], values: Mapping[str, Any]
    ) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]]:
        """Yield records and their values as they are stored, in ascending order; first those that are whole."""
        names = [field.name for field in self.facts.fields]
        if sorted(values) != names:
            raise ArgumentError(f"{self.folder}: expected the fields {', '.join(names)}, found {', '.join(values)}")
        limit = self.facts.num_records - self.facts.context_records
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < max(1, limit)):
            raise ArgumentError(f"{self.folder}: expected records in 0..{limit - 1:,}, found {numbers}")
        if len(np.unique(numbers)) < len(numbers):
            raise ArgumentError(f"{self.folder}: expected each record once, found {numbers}")
        arrays = {field.name: self._checked(field, values[field.name], len(numbers)) for field in self.facts.fields}
        if (np.diff(numbers) < 0).any():
            order = numbers.argsort()
            numbers = numbers[order]
            arrays = {name: each[order] for name, each in arrays.items()}
        if not self.facts.seq_len:
            yield numbers, arrays
            return
        yield from self._new_of_windows(numbers, arrays)

    def _checked(self, field: Field, values: Any, count: int) -> npt.NDArray[Any]:
        """Return the values of a field, of the stored dtype, shape (n, tokens, ...) or (n, ...)."""
        found = _as_array(values, field.kind)
        if field.unit == UNITS[0]:
            tokens = found.shape[1] if found.ndim > 1 else 0
            window = self.facts.seq_len or self.facts.record_tokens
            is_tail = self.facts.seq_len > 0 and count == 1 and 0 < tokens <= window
            shape: tuple[int, ...] = (count, tokens if is_tail else window)
        else:
            shape = (count,)
        has_bits = field.kind == BFLOAT16 and found.dtype == field.dtype
        if has_bits and not field.allow_nan and bool(((found & 0x7FFF) > 0x7F80).any()):
            raise ConvertError(f"{self.folder}: field {field.name}: expected numbers, found NaN")
        return field.as_stored(found, shape, self.folder)

    def _new_of_windows(
        self, windows: npt.NDArray[np.int64], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]]:
        """Yield the records that are new in windows of a stream: the last one, and of the first window all.

        Some of the first window may be written already, by a job that was killed between their marks.
        """
        facts = self.facts
        for place, window in enumerate(windows.tolist()):
            tokens = facts.tokens_of(window, facts.context_records + 1)
            first = window + (facts.context_records if window else 0)
            records = range(first, window + -(-tokens // facts.record_tokens))
            new = records if window else [each for each in records if not self._has(each)] or records
            for record in new:
                start = (record - window) * facts.record_tokens
                rows = {}
                for field in facts.fields:
                    value = arrays[field.name][place : place + 1]
                    if field.unit == UNITS[0]:
                        if value.shape[1] != tokens:
                            raise ArgumentError(
                                f"{self.folder}: field {field.name}: window {window:,} has {tokens:,} tokens, found "
                                f"values of {value.shape[1]:,}"
                            )
                        value = value[:, start : start + facts.tokens_of(record)]
                    rows[field.name] = np.ascontiguousarray(value)
                yield np.array([record]), rows

    def _has(self, record: int) -> bool:
        """Return whether a record is written, if this process has its range, or gets it."""
        number = record // self.facts.part_records
        found = self._claim(number)
        if found is None:
            return False
        is_there = bool(found.there[record - found.first])
        self._end_if_complete(number)
        return is_there

    def _runs(self, numbers: npt.NDArray[np.int64], rows: Mapping[str, npt.NDArray[Any]]) -> Iterator[RecordRun]:
        """Yield runs of consecutive records, none of which crosses the end of a range."""
        ends = np.flatnonzero((np.diff(numbers) != 1) | (numbers[1:] % self.facts.part_records == 0)) + 1
        for start, stop in zip([0, *ends.tolist()], [*ends.tolist(), len(numbers)], strict=True):
            if start < stop:
                yield int(numbers[start]), {name: each[start:stop] for name, each in rows.items()}

    # --- the end ---------------------------------------------------------------------------------------------------

    def ranges(self) -> Iterator[RangeState]:
        """Yield the state of each range of records, from the marks and the claims as they are now."""
        return range_states(self.folder, self.facts)

    @property
    def num_missing(self) -> int:
        """Records that are not written."""
        return sum(state.missing for state in self.ranges())

    def finish(self) -> str:
        """See that all records are written, make the index of the set, and return its digest.

        Rows of crc32 are read, and no values. Any process may do it, also twice.

        Raises
        ------
        IncompleteError
            If a record is missing.
        UnavailableError
            If another process still writes.
        """
        self._require_open()
        for number in list(self._ranges):
            self._ranges.pop(number).end()
        return finish_set(self.folder, self.facts, self._stale_s)

    def verify(self) -> list[int]:
        """Read all values that are marked, and return the records whose crc32 differs."""
        return damaged_records(self.folder, self.facts)

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError(f"{self.folder}: this field set was closed")

    def close(self) -> None:
        """Give up the claims, and close the corpus if it was opened here; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            while self._ranges:
                self._ranges.popitem()[1].end()
        finally:
            if self._closes:
                self.corpus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        fields = ", ".join(field.name for field in self.facts.fields)
        return f"{type(self).__name__}({str(self.folder)!r}, {self.facts.num_records:,} records, fields: {fields})"


def _as_array(values: Any, kind: str = "") -> npt.NDArray[Any]:
    """Return a tensor or an array as an array; numbers of 16 bits that numpy lacks as their bits."""
    is_tensor = hasattr(values, "detach")
    found: Any = values.detach().cpu() if is_tensor else np.asarray(values)
    if kind == BFLOAT16 and (is_tensor or found.dtype.kind == "f"):
        torch = require_package("torch", "torch")
        tensor = found if is_tensor else torch.from_numpy(np.ascontiguousarray(found))
        return np.asarray(tensor.to(torch.bfloat16).view(torch.int16).numpy()).view(np.uint16)
    if is_tensor:
        found = (found.float() if str(found.dtype) == f"torch.{BFLOAT16}" else found).numpy()
    return np.asarray(found)


def _job_of(job: int | None, num_jobs: int | None) -> tuple[int, int]:
    """Return the number of this job, and how many there are."""
    if job is not None or num_jobs is not None:
        return job or 0, num_jobs or (job or 0) + 1
    of_array = [os.environ.get(name, "") for name in _ARRAY_VARIABLES]
    if all(map(str.isdecimal, of_array)):
        number, first, step, count = map(int, of_array)
        return (number - first) // max(1, step) % count, count
    return resolve_rank()


def _range_in(asked: tuple[int, int], num_records: int) -> tuple[int, int]:
    first, stop = asked
    if not 0 <= first < stop <= num_records:
        raise ArgumentError(f"overwrite: expected a range in 0..{num_records:,}, found {first:,} to {stop:,}")
    return first, stop
