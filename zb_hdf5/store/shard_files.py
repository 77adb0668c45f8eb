"""The files of a store, one shard each: a file is opened, and proved, when it is first read."""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import (
    ChecksumError,
    FormatError,
    IncompleteError,
    Remedy,
    UnverifiableError,
)
from zb_hdf5.files.checked import Crc32Rows, checked, crc32_of, stored_crc32
from zb_hdf5.files.codecs import CodedChunks, Decoded, read_extents
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.known_files import KnownFiles
from zb_hdf5.files.look import Look
from zb_hdf5.files.mapping import map_side_by_side
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.paths import OpenFiles, RemotePath, on_failure
from zb_hdf5.files.ranges import Extents, LocalFile, open_ranges
from zb_hdf5.files.residency import Residency
from zb_hdf5.files.tokens import FileTokens, Tokens, Wait, corpus_closed
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

#: Files that are mapped side by side at most: the size of each is asked for before each gather.
MAX_JOINED: Final = 64


class ShardFiles:
    """The files of the shards of an index, or of the values of a field. See `TokenFiles`.

    A shard that was open once is known by its identity: it is not proved again, and another file is refused.
    Thread-safe, but for `close`; usable after fork; picklable: a copy has no open file.

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
        The opened path, for messages; None: the folder.
    identities
        The identities of the same files, where other values of them are known; None: those that `found` has.

    Attributes
    ----------
    starts, firsts
        The first position of each file; `starts`, a list, has also the end of the last one.
    known
        The files that are open, by their numbers.
    residency
        The findings of reads about the pages of all files.
    wait
        The cost of a read.
    asked
        The access that was asked for.
    """

    #: All that follows from other attributes, or is of this process.
    _not_copied: ClassVar = frozenset(
        ("_open_files", "known", "_joined", "residency", "firsts", "found", "_is_closed", "wait")
    )
    #: A copy gets these only where they are set.
    _access: str | None = None
    _name: str | None = None
    _same_files: ShardFiles | None = None

    def __init__(
        self,
        folder: Path,
        index: ShardIndex,
        access: str,
        verify: str,
        read_as: ReadAs = AS_STORED,
        found: Mapping[int, Column | FlatFacts] | None = None,
        same_files: ShardFiles | None = None,
        *,
        name: str | None = None,
        identities: KnownFiles | None = None,
    ) -> None:
        self.folder = folder
        self.index = index
        self.asked = access
        self.verify = verify
        self.read_as = read_as
        self._same_files = same_files
        self.identities = KnownFiles() if identities is None else identities
        known = found or {}
        self.identities.note_all(
            {number: each.identity for number, each in known.items()},
            {number: each.documents_identity for number, each in known.items() if isinstance(each, FlatFacts)},
        )
        self._name = name
        self.wait = self._wait()
        self._access = self._known_access()
        self.number(index.table.values["token_count"].tolist())
        self._begin(known)

    @property
    def name(self) -> str:
        """The opened path, for messages."""
        return self._name or str(self.folder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self.firsts):,} files, {len(self.known):,} open)"

    def reopened(self, index: ShardIndex, found: Mapping[int, Column | FlatFacts]) -> ShardFiles:
        """Return the files of a newer index, read in the same way; none of them is open yet."""
        return ShardFiles(self.folder, index, self.asked, self.verify, self.read_as, found, name=self._name)

    def _wait(self) -> Wait:
        if isinstance(self.folder, RemotePath):
            return Wait.FAR
        return Wait.LOCAL if self.index.meta.codec == NO_CODEC else Wait.DECODE

    def _begin(self, found: Mapping[int, Column | FlatFacts]) -> None:
        """Begin without an open file."""
        self.found = dict(found)
        self._is_closed = False
        joined = self._joined = dict[int, tuple[TokenArray, list[FileTokens]] | None]()  # by the number of files
        # a file that was let go would stay open in a mapping of all
        self._open_files: OpenFiles[Tokens] = OpenFiles(self._access or "auto", far=self.wait is Wait.FAR)
        self._open_files.let_go = joined.clear
        self.known = self._open_files.known
        self.residency = Residency(self.starts[-1] * self.index.meta.dtype.itemsize)

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
        self.starts = [0, *accumulate(counts)]
        self.firsts: npt.NDArray[np.int64] = np.array(self.starts[:-1], np.int64)

    @property
    def access(self) -> str:
        """The access to the files; the first one is opened to find it out, if the index does not tell."""
        if self._access is None:
            first = next((k for k in range(len(self.firsts)) if self.starts[k] < self.starts[k + 1]), 0)
            self._access = self.open(first, self.starts[first]).access
        return self._access

    @property
    def compares_all(self) -> bool:
        """Whether all reads are compared with their crc32, in whole units."""
        return self.verify == "batch"

    def open(self, number: int, start: int) -> Tokens:
        """Return a file. Its token at position `start` of all is about to be read."""
        known = self.known.get(number)
        if known is not None:
            return known
        file = self._open_files.open(number, partial(self._open, start=start))
        if self._is_closed:  # meanwhile, by another thread
            self._open_files.close()
            raise corpus_closed(self.name)
        return file

    def open_found(self, look: Look) -> None:
        """Open the first file by the look that has found it, whose descriptor is taken."""
        self._open_files.open(0, partial(self._open, start=0, look=look))

    def locate(self, start: int) -> tuple[Tokens, int]:
        """Return the file of a token, and its position there."""
        number = bisect_right(self.starts, start, hi=len(self.starts) - 1) - 1
        return self.open(number, start), start - self.starts[number]

    def side_by_side(self) -> TokenArray | None:
        """Return the tokens of few files, once all are open, as one view: they are mapped one after the other.

        None: there is no such view, or its reads may wait for a disk. Nothing in it is compared.
        """
        count = len(self.firsts)
        may_wait = self.asked == "auto" and not self.residency.in_memory
        if may_wait or count > MAX_JOINED or len(self.known) < count or self.asked == "pread":
            return None
        if count not in self._joined:
            self._joined[count] = self._join([self.known[number] for number in range(count)])
        joined = self._joined[count]
        if joined is None:
            return None
        for file in joined[1]:
            file.file.require_whole()
        return joined[0]

    def _join(self, known: Sequence[Tokens]) -> tuple[TokenArray, list[FileTokens]] | None:
        """Map the files side by side; None if one may not be mapped, or does not fill whole pages."""
        dtype = self.index.meta.dtype
        files = [file for file in (each.resolve() for each in known) if file is not None]
        parts = [file.parts() for file in files]
        if len(files) < len(known) or not all(parts) or any(file.dtype != dtype for file in files):
            return None
        tokens = map_side_by_side(list(chain.from_iterable(parts)))
        if tokens is None or tokens.nbytes != self.starts[-1] * dtype.itemsize:
            return None
        return tokens.view(dtype), files

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

    def close(self) -> None:
        """Close all files."""
        self._is_closed = True
        self._open_files.close()
        self._joined.clear()
        self.found.clear()  # and with the facts the files that are open for whoever reads the documents
        self._access = self._access or "auto"  # nothing is opened any more to find out

    def __getstate__(self) -> dict[str, Any]:
        copied = {key: value for key, value in self.__dict__.items() if key not in self._not_copied}
        return {key: value for key, value in copied.items() if value is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.wait = self._wait()
        self.firsts = np.array(self.starts[:-1], np.int64)
        self._begin({})  # a copy looks again

    # --- one file -------------------------------------------------------------------------------------------------

    def _open(self, number: int, start: int, look: Look | None = None) -> Tokens:
        """Open a shard. Its token at position `start` of all is about to be read."""
        entry = self.index.shards[number]
        path = self.path_of(number)
        known = self.identities.get(number)
        unit = (start - self.starts[number]) // self.index.meta.batch_tokens
        with self._look_at_same_file(number) if look is None else nullcontext(look) as look:
            found = self._open_by_index(path, entry, unit, known, look)
            if found is None:
                found = self._open_by_file(path, entry, number, unit, known, look)
        self.identities.note(number, found.identity)
        found.pages.share(self.residency)
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
        return checked(tokens, rows, path, self.index.meta.noun, self.verify)

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
        return file.with_verify(self.verify).tokens

    def _facts(self, flat: FlatFormat, number: int, look: Look) -> FlatFacts:
        """Return the facts of a flat file, which a copy looks for again."""
        found = self.found.get(number)
        if isinstance(found, FlatFacts):
            return found
        return flat.facts(look).as_known(self.identities.documents(number))

    def _problem(self, tokens: Tokens, rows: Crc32Rows | None, entry: ShardEntry, unit: int) -> str:
        """Read a unit and the crc32 of all, and return how they differ from the index; "" if the file is proved."""
        start = unit * self.index.meta.batch_tokens
        read = np.empty(min(self.index.meta.batch_tokens, entry.token_count - start), tokens.dtype)
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
