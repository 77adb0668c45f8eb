"""The values of a field in the parts of a set, and fill values for records that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ChecksumError
from zb_hdf5.files.checked import Crc32Rows, UnitTokens, checked
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.look import Look
from zb_hdf5.files.pages import NO_PAGES, Pages, PagesWrapper
from zb_hdf5.files.ranges import Extents, open_ranges
from zb_hdf5.files.tokens import FileTokens, TokenRun, Tokens, Wait
from zb_hdf5.spec import SET_INDEX, TokenArray
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_files import ShardFiles
from zb_hdf5.store.shard_table import ShardEntry


class SetFiles(ShardFiles):
    """All parts of a finished set, with the values of a field. See `ShardFiles`.

    Every read is compared with the crc32 of its records, unless `verify` is "none".
    """

    def _open_by_file(
        self, path: Path, entry: ShardEntry, number: int, unit: int, identity: Identity | None, look: Look | None
    ) -> Tokens:
        raise ChecksumError(
            f"{path}: differs from {SET_INDEX}: it was changed after the field set was finished, or is damaged; "
            "restore it, or remove it and write its records again"
        )


class PartRows(NamedTuple):
    """The rows of one part: which records are written, and the crc32 of each for one field."""

    there: npt.NDArray[np.bool_]
    crc32: npt.NDArray[np.uint32]


class LackingFiles(ShardFiles):
    """The parts of a set that is not finished: the values of a field, and a fill value for all others.

    The values are those that were marked when the corpus was opened: parts that are written meanwhile change nothing.

    Parameters
    ----------
    rows
        The number of a part in `index` -> its rows; a part that nobody has begun is not there.
    fill
        The value for records that are missing.
    """

    def __init__(
        self,
        folder: Path,
        index: ShardIndex,
        access: str,
        verify: str,
        *,
        rows: Mapping[int, PartRows],
        fill: npt.NDArray[Any],
    ) -> None:
        self._fill = fill
        self._rows = rows
        super().__init__(folder, index, access, verify)

    def _open(self, number: int, start: int, look: Look | None = None) -> Tokens:
        entry = self.index.shards[number]
        unit = self.index.meta.batch_tokens
        if number not in self._rows:
            return FilledValues(None, np.zeros(entry.num_batches, bool), self._fill, unit, entry.token_count)
        there, crc32 = self._rows[number]
        path = self.folder / entry.path
        ranges = open_ranges(path, None, entry.num_bytes, self.asked)
        extents = Extents(entry.columns[self.index.meta.column], self.index.meta.batch_bytes)
        tokens: Tokens = FileTokens(ranges, extents, self.index.meta.dtype, entry.token_count)
        if self.verify != "none":
            tokens = checked(tokens, Crc32Rows(_KnownRows(crc32)), path, "record", "batch")
        found = FilledValues(tokens, there, self._fill, unit, entry.token_count)
        found.pages.share(self.residency)
        return found


class _KnownRows:
    """Returns rows of crc32 that were read before. Picklable."""

    def __init__(self, rows: npt.NDArray[np.uint32]) -> None:
        self._rows = rows

    def __call__(self, *_: object) -> npt.NDArray[np.uint32]:
        return self._rows


class FilledPages(PagesWrapper):
    """The pages of values of which some records are missing: to read these is not to wait.

    Parameters
    ----------
    pages
        The pages of the values.
    there
        Which records are there.
    unit
        The number of values of a record.
    """

    __slots__ = ("_there", "_unit")

    def __init__(self, pages: Pages, there: npt.NDArray[np.bool_], unit: int) -> None:
        super().__init__(pages)
        self._there = there
        self._unit = unit

    def ready(self, start: int) -> bool:
        return not self._there[start // self._unit] or self.pages.ready(start)


class FilledValues(UnitTokens):
    """Values of one part, with a fill value in the records that are missing. See `Tokens`.

    Parameters
    ----------
    tokens
        The values; None: all are missing.
    there
        Which records are there.
    fill
        The value of the others.
    unit, num_tokens
        The number of values of a record, and of all records.
    """

    access = "pread"
    wait = Wait.LOCAL
    identity = ()

    def __init__(
        self, tokens: Tokens | None, there: npt.NDArray[np.bool_], fill: npt.NDArray[Any], unit: int, num_tokens: int
    ) -> None:
        super().__init__()
        self._tokens = tokens
        self._there = there
        self._fill = fill
        self.dtype = fill.dtype
        self.unit = unit
        self.num_tokens = num_tokens
        self.name = "missing values" if tokens is None else tokens.name

    def _read_units(self, start: int, out: TokenArray) -> None:
        first = start // self.unit
        there: list[TokenRun] = []
        for number in range(-(-len(out) // self.unit)):
            part = out[number * self.unit : (number + 1) * self.unit]
            if self._there[first + number]:
                there.append((start + number * self.unit, part))
            else:
                part[...] = self._fill
        if self._tokens is not None and there:
            self._tokens.read(there)

    @property
    def pages(self) -> Pages:  # type: ignore[override]
        return FilledPages(NO_PAGES if self._tokens is None else self._tokens.pages, self._there, self.unit)

    def close(self) -> None:
        if self._tokens is not None:
            self._tokens.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return FilledValues, (self._tokens, self._there, self._fill, self.unit, self.num_tokens)
