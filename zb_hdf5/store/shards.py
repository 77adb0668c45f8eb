"""The shards of a store as one sequence of batches: each is opened, and proved, when it is first read."""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import (
    BatchIndexError,
    ChecksumError,
    ClosedError,
    FormatError,
    IncompleteError,
    Remedy,
    UnverifiableError,
    ZbError,
)
from zb_hdf5.files.checked import Checked, Crc32Rows, checked, crc32_of, stored_crc32, take_units
from zb_hdf5.files.codecs import CodedChunks, Decoded, read_extents
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.known_files import KnownFiles
from zb_hdf5.files.look import Look
from zb_hdf5.files.mapping import map_side_by_side
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.paths import OpenFiles, RemotePath, files_at_hand, on_failure
from zb_hdf5.files.ranges import Extents, LocalFile, open_ranges
from zb_hdf5.files.residency import Residency
from zb_hdf5.files.tokens import FileTokens, StoredIds, TokenRun, Tokens, Wait, expect, gather_from, read_together
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.formats.native import sidecar_rows
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import (
    CRC32,
    INDEX_NAME,
    NO_CODEC,
    NOT_KNOWN,
    STREAM_LAYOUT,
    TokenArray,
    extents_column,
)
from zb_hdf5.store.agreement import require_agreement
from zb_hdf5.store.format_list import FORMATS, batch_format, format_without_digests, load_format
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_table import ShardEntry

if TYPE_CHECKING:  # h5py, which a store with an index does not need
    from zb_hdf5.formats.h5_column import Column

#: The part of a read that is in one file.
_Part = TypeVar("_Part")
#: Files that are mapped side by side at most: the size of each is asked for before each gather.
MAX_JOINED: Final = 64
#: A row of so many bytes is read into its place by a call of its own: to put rows into order would copy them once more.
LARGE_ROW_BYTES: Final = 32 << 10


class Sharded(Tokens):
    """The tokens of the shards of an index, or the values of a field, one shard after the other. See `Tokens`.

    A shard that was open once is known by its identity: it is not proved again, and another file is refused.

    Parameters
    ----------
    folder
        The folder that the paths of the index are relative to.
    access, verify, read_as
        As for `open_reader`.
    found
        The facts of files that were looked at, by the numbers of the files.
    same_files
        Other values of the same files: a file that is open there is not opened again. None: there are none.
    name
        The opened path, for messages; "": the folder.
    identities
        The identities of the same files, where other values of them are known; None: those that `found` has.
    """

    identity = ()
    #: All that follows from other attributes, or is of this process.
    _not_copied: ClassVar = frozenset(
        (
            "_files",
            "_known",
            "_joined",
            "residency",
            "_firsts",
            "num_tokens",
            "found",
            "_is_closed",
            "dtype",
            "unit",
            "wait",
        )
    )

    def __init__(
        self,
        folder: Path,
        index: ShardIndex,
        access: str,
        verify: str,
        read_as: ReadAs = AS_STORED,
        found: Mapping[int, Column | FlatFacts] | None = None,
        same_files: Sharded | None = None,
        *,
        name: str = "",
        identities: KnownFiles | None = None,
    ) -> None:
        self.folder = folder
        self.index = index
        self.asked = access
        self.read_as = read_as
        self._verify = verify
        self._same_files = same_files
        self.found = dict(found or {})
        self.identities = KnownFiles() if identities is None else identities
        for number, each in self.found.items():
            self.identities.note(number, each.identity)
            if isinstance(each, FlatFacts):
                self.identities.note_documents(number, each.documents_identity)
        self.name = name or str(folder)
        self._begin()
        self._access = self._known_access()
        self.number(index.table.values["token_count"].tolist())
        self._reset()

    def reopened(self, index: ShardIndex, found: Mapping[int, Column | FlatFacts]) -> Sharded:
        """Return the tokens of a newer index, read in the same way; none of its files is open yet."""
        return Sharded(self.folder, index, self.asked, self._verify, self.read_as, found, name=self.name)

    def _begin(self) -> None:
        """Take the facts of the tokens from the index."""
        meta = self.index.meta
        self.dtype = meta.dtype
        self.unit = meta.batch_tokens
        self.wait = Wait.LOCAL if meta.codec == NO_CODEC else Wait.DECODE
        if isinstance(self.folder, RemotePath):
            self.wait = Wait.FAR
        self._is_closed = False

    def _known_access(self) -> str | None:
        """Return the access of the shards, if no look into one is needed."""
        index = self.index
        if self.asked != "h5py" and not index.table.columns:
            return None
        column = index.meta.column
        has_tokens = index.table.values["token_count"] > 0
        first = index.shards[int(has_tokens.argmax())]
        if self.asked == "h5py":
            row = batch_format(first.backend)
            return self.asked if row is not None and not row.tokens_only else None
        if column in first.columns:
            return RemoteObject.access if self.wait is Wait.FAR else self.asked
        return "pread" if first.has_extents(column) and self.asked != "mmap" else None

    def number(self, counts: Iterable[int]) -> None:
        """Give every token its position, from the counts of the files; a store that grows does so again."""
        self._start_at([0, *accumulate(counts)])

    def _start_at(self, starts: list[int]) -> None:
        """Take the first token of each file, and the end of the last one."""
        self._starts = starts
        self._firsts = np.array(starts[:-1], np.int64)
        self.num_tokens = starts[-1]

    def _reset(self) -> None:
        joined = self._joined = dict[int, tuple[TokenArray, list[FileTokens]] | None]()  # by the number of files
        # a file that was let go would stay open in a mapping of all
        self._files: OpenFiles[Tokens] = OpenFiles(self._access or "auto", far=self.wait is Wait.FAR)
        self._files.let_go = joined.clear
        self.residency = Residency(self.num_tokens * self.dtype.itemsize)
        self._known = self._files.known

    @property
    def access(self) -> str:  # type: ignore[override]
        if self._access is None:
            first = next((k for k in range(len(self._firsts)) if self._starts[k] < self._starts[k + 1]), 0)
            self._access = self.open_file(first, self._starts[first]).access
        return self._access

    @property
    def starts(self) -> list[int]:
        return self._starts

    @property
    def known(self) -> dict[int, Tokens]:
        return self._known

    def open_file(self, number: int, start: int) -> Tokens:
        """Return a file. Its token at position `start` of all is about to be read."""
        known = self._known.get(number)
        if known is not None:
            return known
        files = self._files
        file = files.open(number, partial(self._open, start=start))
        if self._is_closed:  # meanwhile, by another thread
            files.close()
            raise ClosedError(f"{self.name}: this corpus was closed")
        return file

    def open_found(self, look: Look) -> None:
        """Open the first file by the look that has found it, whose descriptor is taken."""
        self._files.open(0, partial(self._open, start=0, look=look))

    def found_of(self, field: str) -> dict[int, Column | FlatFacts]:
        """Return the facts of the values of a field, of files that were looked at: one look finds all fields."""
        if not self.found:
            return {}
        # with h5py, which a store with an index does not need
        from zb_hdf5.formats.inspection import column_with_fields

        of_field: dict[int, Column | FlatFacts] = {}
        for number, each in self.found.items():
            if not isinstance(each, FlatFacts):
                known = self.found[number] = column_with_fields(each)
                if field in known.fields:
                    of_field[number] = known.fields[field]
            elif each.column is not None:  # values of any other flat file lie in a file of their own
                of_field[number] = each
        return of_field

    def _locate(self, start: int) -> tuple[Tokens, int]:
        """Return the file of a token, and its position there."""
        number = bisect_right(self._starts, start, hi=len(self._starts) - 1) - 1
        return self.open_file(number, start), start - self._starts[number]

    def read(self, runs: Iterable[TokenRun]) -> None:
        runs = list(runs)
        if len(runs) == 1:  # a batch of one file: a third of the time
            start, out = runs[0]
            number = bisect_right(self._starts, start) - 1
            if start < self._starts[-1] and start + len(out) <= self._starts[number + 1]:
                file = self._known.get(number) or self.open_file(number, start)
                file.read([(start - self._starts[number], out)])
                return
        parts: dict[int, list[TokenRun]] = {}
        firsts: dict[int, int] = {}
        for start, out in runs:
            if not 0 <= start <= self._starts[-1] - len(out):
                raise BatchIndexError(
                    f"{self.name}: expected tokens up to {self._starts[-1]:,}, found {start:,} to {start + len(out):,}"
                )
            done = 0
            while done < len(out):
                number = bisect_right(self._starts, start + done) - 1
                within = start + done - self._starts[number]
                left = self._starts[number + 1] - start - done
                parts.setdefault(number, []).append((within, out[done : done + left]))
                firsts.setdefault(number, start + done)
                done += min(left, len(out) - done)
        for some in self._groups([*parts]):
            self._read_parts([(self.open_file(number, firsts[number]), parts[number]) for number in some])

    def _read_parts(self, reads: Sequence[tuple[Tokens, list[TokenRun]]]) -> None:
        """Read runs of some files, of objects at the same time."""
        is_done = len(reads) > 1 and not self._compares_all and read_together(reads)
        for file, runs in reads:
            if not is_done:
                file.read(runs)
            elif isinstance(file, Checked):
                file.compare(runs)

    def _groups(self, parts: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
        """Yield the parts of a read, one of each file, whose files are open together: all, if these are objects."""
        most = len(parts) if self.wait is Wait.FAR else files_at_hand(len(parts))
        for start in range(0, len(parts), max(1, most)):
            yield parts[start : start + most]

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        if self.wait is Wait.LOCAL and not self.residency.in_memory:
            expect(self, starts.tolist(), [out.shape[1]] * len(starts))
        if len(self._firsts) == 1:
            self.open_file(0, int(starts[0]) if len(starts) else 0).gather(starts, out)
            return
        is_compared = self._compares_all and out.shape[1] == self.unit and self._are_units(starts)
        flat = self._flat_of_all() if is_compared else self.flat()
        if flat is not None:
            self.residency.watch_some(self._take_units if is_compared else gather_from, flat, starts, out)
            return
        order = starts.argsort()  # the rows of one file then follow each other
        ascending = starts[order]
        if self._compares_all and self.wait is Wait.LOCAL and out.itemsize * out.shape[1] >= LARGE_ROW_BYTES:
            self.read(zip(ascending.tolist(), map(out.__getitem__, order.tolist()), strict=True))
            return
        rows = np.empty_like(out)
        numbers = self._firsts.searchsorted(ascending, side="right") - 1
        crossing = ascending + out.shape[1] > np.array(self._starts)[numbers + 1]
        parts: list[tuple[int, int, int]] = []
        stop = 0
        for (number, crosses), group in groupby(zip(numbers.tolist(), crossing.tolist(), strict=True)):
            start = stop
            stop += len(list(group))
            if crosses:
                self.read(zip(ascending[start:stop].tolist(), rows[start:stop], strict=True))
            else:
                parts.append((number, start, stop))
        for together in self._groups(parts):
            self._gather_parts(together, ascending, rows)
        out[order] = rows
        self.flat()  # for the next gather

    def _are_units(self, starts: npt.NDArray[np.int64]) -> bool:
        """Return whether positions, and all files, begin with a unit."""
        return not ((starts % self.unit).any() or (self._firsts % self.unit).any())

    def _take_units(self, flat: TokenArray, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Copy units from the mapping of all files, and compare each as its file does it."""
        take_units(flat, starts // self.unit, out, self._compare_crc32)

    def _compare_crc32(self, numbers: npt.NDArray[np.int64], found: Sequence[int]) -> None:
        """Compare the crc32 of units that were read, which have these numbers among all."""
        crc32 = np.array(found, np.uint32)
        firsts = self._firsts // self.unit
        files = firsts.searchsorted(numbers, side="right") - 1
        for number in np.unique(files).tolist():
            file = self.open_file(number, self._starts[number])
            if isinstance(file, Checked):
                mine = files == number
                file.compare_crc32(numbers[mine] - firsts[number], crc32[mine].tolist())

    def _gather_parts(
        self, parts: Iterable[tuple[int, int, int]], starts: npt.NDArray[np.int64], rows: TokenArray
    ) -> None:
        """Fill rows from some files: a part is the number of a file, and the first row and the end of its rows."""
        reads = [
            (self.open_file(number, int(starts[first])), starts[first:stop] - self._starts[number], rows[first:stop])
            for number, first, stop in parts
        ]
        rows_of = [(file, zip(within.tolist(), some, strict=True)) for file, within, some in reads]
        if self._compares_all or not read_together(rows_of):
            for file, within, some in reads:
                file.gather(within, some)

    def flat(self) -> TokenArray | None:
        """Return all tokens of few files as one view: mapped side by side, once all are open; else None."""
        count = len(self._firsts)
        if count == 1:
            return self.open_file(0, 0).flat() if self.num_tokens else None
        return None if self._compares_all else self._flat_of_all()

    def _flat_of_all(self) -> TokenArray | None:
        """Return the tokens of several files as one view, also of those that are compared; None as `flat`."""
        count = len(self._firsts)
        may_wait = self.asked == "auto" and not self.residency.in_memory
        if may_wait or count > MAX_JOINED or len(self._known) < count or self.asked == "pread":
            return None
        if count not in self._joined:
            self._joined[count] = self._join([self._known[number] for number in range(count)])
        joined = self._joined[count]
        if joined is None:
            return None
        for file in joined[1]:
            file.file.require_whole()
        return joined[0]

    def stored_ids(self) -> StoredIds | None:
        return self.open_file(0, 0).stored_ids() if len(self._firsts) == 1 else super().stored_ids()

    def _join(self, known: Sequence[Tokens]) -> tuple[TokenArray, list[FileTokens]] | None:
        """Map the files side by side; None if one may not be mapped, or does not fill whole pages."""
        files = [file for file in (each.resolve() for each in known) if file is not None]
        parts = [file.parts() for file in files]
        if len(files) < len(known) or not all(parts) or any(file.dtype != self.dtype for file in files):
            return None
        tokens = map_side_by_side(list(chain.from_iterable(parts)))
        if tokens is None or tokens.nbytes != self.num_tokens * self.dtype.itemsize:
            return None
        return tokens.view(self.dtype), files

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        if start >= self.num_tokens:
            return None
        file, within = self._locate(start)
        return file.view(within, count, private) if within + count <= file.num_tokens else None

    def ready(self, start: int) -> bool:
        try:
            file, within = self._locate(start)
        except (ZbError, OSError):  # its read raises this, and waits for nothing
            return True
        return file.ready(within)

    def will_gather(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        parts: dict[int, tuple[list[int], list[int]]] = {}
        for start, count in zip(starts, counts, strict=True):
            while count > 0:
                number = bisect_right(self._starts, start, hi=len(self._starts) - 1) - 1
                within = start - self._starts[number]
                take = min(count, self._starts[number + 1] - start)
                if take < 1:
                    break
                mine = parts.setdefault(number, ([], []))
                mine[0].append(within)
                mine[1].append(take)
                start += take
                count -= take
        with suppress(ZbError, OSError):  # raised by the read
            for number, mine in parts.items():
                self.open_file(number, self._starts[number] + mine[0][0]).will_gather(*mine)

    def will_need(self, start: int, stop: int) -> None:
        with suppress(ZbError, OSError):  # raised by the read
            while start < stop:
                file, within = self._locate(start)
                take = min(stop - start, file.num_tokens - within)
                file.will_need(within, within + take)
                start += take

    def close(self) -> None:
        self._is_closed = True
        self._files.close()
        self.found.clear()  # and with the facts the files that are open for whoever reads the documents
        self._access = self._access or "auto"  # nothing is opened any more to find out
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self._not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.found = {}  # a copy looks again
        self._begin()
        self._start_at(self._starts)
        self._reset()

    @property
    def _compares_all(self) -> bool:
        """Whether all reads are compared with their crc32, in whole units."""
        return self._verify == "batch"

    # --- the files ------------------------------------------------------------------------------------------------

    def _open(self, number: int, start: int, look: Look | None = None) -> Tokens:
        """Open a shard. Its token at position `start` of all is about to be read."""
        entry = self.index.shards[number]
        path = self.path_of(number)
        known = self.identities.get(number)
        unit = (start - self._starts[number]) // self.unit
        with self._look_at_same_file(number) if look is None else nullcontext(look) as look:
            found = self._open_by_index(path, entry, unit, known, look)
            if found is None:
                found = self._open_by_file(path, entry, number, unit, known, look)
        self.identities.note(number, found.identity)
        found.share(self.residency)
        return found

    def begin_look(self, number: int) -> AbstractContextManager[Look | None]:
        """Return a look at a file that is open, by a copy of its descriptor; None: it is not open, or an object."""
        known = self.known.get(number)
        file = None if known is None else known.file
        if isinstance(file, LocalFile) and file.path == self.path_of(number):
            return file.begin_look()
        return nullcontext()

    def _look_at_same_file(self, number: int) -> AbstractContextManager[Look | None]:
        """Return a look at a file that other values are read from; None: it is not open, or they have other files."""
        if self._same_files is None or self._same_files.path_of(number) != self.path_of(number):
            return nullcontext()
        return self._same_files.begin_look(number)

    def path_of(self, number: int) -> Path:
        """Return the path of a file."""
        path: Path = self.folder / self.index.table.values["path"][number]
        return path

    def _open_by_index(
        self, path: Path, entry: ShardEntry, unit: int, identity: Identity | None, look: Look | None
    ) -> Tokens | None:
        """Open a shard without HDF5; None if the index lacks facts, or the file differs from them."""
        tokens = self._open_extents(path, entry, identity, look) if self._opens_by_index(entry) else None
        if tokens is None:
            return None
        runs = entry.columns.get(CRC32)
        count = entry.num_batches
        rows = sidecar_rows(path, count) if runs is None else stored_crc32(tokens.file, runs, count)
        try:
            problem = "" if identity else self._problem(tokens, rows, entry, unit)
        except (OSError, ChecksumError, FormatError, UnverifiableError, IndexError) as error:
            # an error from a server is raised; where too many files are open, the caller closes some and tries again
            if self.wait is Wait.FAR or getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE):
                tokens.close()
                raise
            problem = repr(error)
        if problem:
            tokens.close()
            return None
        return checked(tokens, rows, path, self.index.meta.noun, self._verify)

    def _opens_by_index(self, entry: ShardEntry) -> bool:
        known = entry.complete and entry.crc32 != NOT_KNOWN and entry.token_count > 0
        return known and self.asked != "h5py" and entry.has_extents(self.index.meta.column)

    def _open_extents(
        self, path: Path, entry: ShardEntry, identity: Identity | None, look: Look | None
    ) -> FileTokens | Decoded | None:
        meta = self.index.meta
        table = entry.columns.get(extents_column(meta.column))
        runs = entry.columns.get(meta.column, ())
        strides = (meta.batch_bytes, meta.padded_batch_bytes)
        if any(run.stride not in strides for run in runs if run.num_batches > 1):
            return None  # one batch proves the places of all only where they follow each other as ours do
        if table is not None and (entry.compressed is None or self.asked == "mmap"):
            return None
        ranges = open_ranges(path, identity, entry.num_bytes, self.asked, look)
        found: FileTokens | Decoded | None = None
        try:
            # an object is proved by its content: to ask for its size would be one request more
            if (table is not None or self.wait is not Wait.FAR) and ranges.num_bytes != entry.num_bytes:
                return None
            if table is None or entry.compressed is None:
                found = FileTokens(ranges, Extents(runs, meta.batch_bytes), meta.dtype, entry.token_count)
            else:
                chunks = CodedChunks(entry.compressed.codec, read_extents(ranges, table, entry.num_batches))
                found = Decoded(ranges, chunks, meta.dtype, meta.batch_tokens, entry.token_count, meta.noun)
        except FormatError:
            return None
        finally:
            if found is None:
                ranges.close()
        return found

    def _open_by_file(
        self, path: Path, entry: ShardEntry, number: int, unit: int, identity: Identity | None, look: Look | None
    ) -> Tokens:
        """Open a shard by the facts of its file, and compare them with the index."""
        flat = format_without_digests(entry.backend, self.index.read_as)
        code = flat or load_format(FORMATS[entry.backend], self.read_as)
        with Look(path) if look is None else nullcontext(look) as look:
            file = code.open(
                FoundFile(
                    path=path,
                    access=self.asked,
                    verify="none",
                    meta=self.index.meta,
                    known=self.found.get(number) if flat is None else self._facts(flat, number, look),
                    identity=identity,
                    digest=self.index.digests.get(entry.path),
                    look=look,
                )
            )
        with on_failure(file.close):
            is_expected = file.complete if entry.complete else self.index.meta.layout == STREAM_LAYOUT
            if not is_expected:
                raise IncompleteError(f"{file.path}: its writer has not finished; convert again")
            has_extents = self._opens_by_index(entry) and self.index.meta.layout != STREAM_LAYOUT
            require_agreement(self.index, entry, file, has_extents=has_extents)
            is_known = identity is not None or entry.crc32 == NOT_KNOWN or not entry.token_count
            rows = None if is_known else file.crc32_rows()
            problem = "" if is_known else self._problem(file.tokens, rows, entry, unit)
            if problem:
                is_alone = flat is not None and len(self.index.shards) == 1  # others may lie in its folder
                raise ChecksumError(
                    f"{file.path}: {problem}: the file is damaged, or belongs elsewhere",
                    remedy=Remedy.VERIFY if rows is None else rows.remedy,
                    at=file.path if is_alone else file.path.parents[entry.path.count("/")],
                )
        return file.with_verify(self._verify).tokens

    def _facts(self, flat: FlatFormat, number: int, look: Look) -> FlatFacts:
        """Return the facts of a flat file, which a copy looks for again."""
        found = self.found.get(number)
        if isinstance(found, FlatFacts):
            return found
        return flat.facts(look).as_known(self.identities.documents(number))

    def _problem(self, tokens: Tokens, rows: Crc32Rows | None, entry: ShardEntry, unit: int) -> str:
        """Read a unit and the crc32 of all, and return how they differ from the index; "" if the file is proved."""
        start = unit * self.unit
        read = np.empty(min(self.unit, entry.token_count - start), tokens.dtype)
        found: npt.NDArray[np.uint32] | None = None
        if rows is not None and isinstance(tokens, FileTokens) and self.wait is Wait.FAR and CRC32 in entry.columns:
            found = rows.all((tokens.extents.offset(unit), read))  # one wait for both
        else:
            tokens.read([(start, read)])
            found = found if rows is None else rows.all()
        if found is None or crc32_of(found) != entry.crc32:
            return f"its rows of crc32 are not those in {INDEX_NAME}"
        expected = int(found[unit])
        crc32 = crc32_of(read)
        if crc32 != expected:
            return f"{self.index.meta.noun} {unit:,}: expected crc32 {expected:08x}, found {crc32:08x}"
        if isinstance(tokens, FileTokens) and self.wait is Wait.FAR:
            tokens.remember(start, read)
        return ""
