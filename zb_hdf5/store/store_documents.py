"""The pieces and the documents of a store, a stream or a lone file, which its corpus has."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentPart, DocumentTable, in_order
from zb_hdf5.documents.pieces import Pieces, concatenate, ends_of, padding, pieces_of_windows
from zb_hdf5.documents.record_documents import RecordDocuments, pieces_of_parts
from zb_hdf5.errors import FormatError
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.identity import require_unreplaced
from zb_hdf5.files.known_files import KnownFiles
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.threads import ReadPool
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.files.turns import compute_once
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.row_documents import edges_in_stream, pieces_in_stream
from zb_hdf5.spec import DOCUMENTS_SUFFIX, INDEX_NAME, NO_SHA256, NOT_COUNTED, NOT_KNOWN, pieces_path
from zb_hdf5.store.format_list import format_without_digests
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_table import ShardEntry

if TYPE_CHECKING:  # h5py, which a store without documents does not need
    from zb_hdf5.documents.document_offsets import KnownOffsets
    from zb_hdf5.documents.table_file import PiecesFile
    from zb_hdf5.formats.h5_column import Column
    from zb_hdf5.store.shard_files import ShardFiles


class StoreDocuments(RecordDocuments):
    """The documents of the records of a store, over its splits one after the other, or of one file of batches.

    Parameters
    ----------
    folder
        The folder of the shards.
    index
        The shards.
    verify, access
        As for `open_reader`.
    lone
        The one file of batches, without a store; None: a store.
    """

    def __init__(
        self,
        folder: Path,
        index: ShardIndex,
        verify: str,
        access: str,
        lone: Path | None = None,
    ) -> None:
        super().__init__(folder, access)
        self._folder = folder
        self._index = index
        self._verify = verify
        self._lone = lone
        self._parts, bases = index.document_parts()
        self._starts = ends_of(index.table.values["num_batches"] * index.meta.batch_size)
        self._bases = [bases[split] for split in index.table.values["split"]]  # first token of each split in all

    @classmethod
    def of_file(cls, corpus: Corpus, verify: str, access: str) -> Self:
        """Return the documents of a corpus that is one file of batches."""
        sha256 = corpus.sha256 or NO_SHA256
        entry = ShardEntry(corpus.path.name, corpus.backend, 0, corpus.num_units, corpus.num_tokens, sha256)
        return cls(corpus.path.parent, ShardIndex(corpus.meta, [entry]), verify, access, corpus.path)

    @cached_per_process
    def has_pieces(self) -> bool:
        if self._lone is not None:
            return pieces_path(self._lone).exists()
        pieces = self._index.table.optional.get("pieces")
        return pieces is not None and bool((pieces["bytes"] >= 0).all())

    def read_pieces(self, starts: npt.NDArray[np.int64], length: int) -> Pieces:
        parts = self._index.meta.seq_len // length
        numbers = starts // length
        return self._of_records(numbers) if parts == 1 else pieces_of_parts(self._of_records, numbers, parts, length)

    def _of_records(self, records: npt.NDArray[np.int64]) -> Pieces:
        """Return the pieces of records as they are stored."""
        shards = self._starts.searchsorted(records, side="right") - 1
        first = int(shards[0]) if len(shards) else 0
        if np.count_nonzero(shards == first) == len(shards):
            return self._read_shard(first, records)
        order = shards.argsort(kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(shards[order])) + 1)
        parts = [self._read_shard(int(shards[group[0]]), records[group]) for group in groups]
        places = np.empty_like(order)  # `order.argsort()`, in a tenth of its time
        places[order] = np.arange(len(order))
        return concatenate(parts).take(places)

    def _read_shard(self, shard: int, records: npt.NDArray[np.int64]) -> Pieces:
        pieces: Pieces = self._files.get(shard, self.open).read_pieces(records - self._starts[shard])
        return pieces.moved(self._bases[shard])

    def check_pieces(self, shard: int) -> None:
        """Compare all pieces of a shard with their digests; `ChecksumError` if one differs."""
        self._files.get(shard, self.open).check()

    def open(self, shard: int) -> PiecesFile:
        from zb_hdf5.documents.table_file import PiecesFile

        entry = self._index.shards[shard]
        meta = self._index.meta
        return PiecesFile(
            self._folder / entry.path,
            entry.num_batches * meta.batch_size,
            meta.seq_len,
            sha256=entry.pieces.sha256 if entry.pieces else "",
            tokens_sha256=entry.sha256,
            verify=self._verify,
            access=self._access,
        )

    def _open_table(self) -> DocumentTable | None:
        if self._lone is not None:
            sha256 = self._index.table.values["sha256"][0]
            known = sha256.replace(NO_SHA256, "")
            return DocumentTable.of_file(self._lone, known, self._verify, access=self._access)
        if not self._parts:
            return None
        return DocumentTable(self._folder, self._parts, self._verify, access=self._access)


#: The edges of so many documents are kept in memory, 8 MiB: one search in all is faster than one in each file.
FEW_DOCUMENTS: Final = 1 << 20
#: So many files are looked into at once; each of more files when it is needed: a thousand take seconds.
FEW_FILES: Final = 64
#: Objects that are looked into at the same time.
FAR_THREADS: Final = 32


class StreamDocuments(RecordDocuments):
    """The documents of a stream.

    Parameters
    ----------
    path
        The stream: its file, its folder or its index.
    folder
        The folder that the paths of the index are relative to.
    index
        The index of its files.
    starts
        The first token of each file, and the end of the last one.
    identities
        The identities of the files that were open, and of their files of documents; another file of such a name is
        refused.
    verify, access
        As for `open_reader`.
    found
        The facts of files that were looked at, by their numbers.
    positions
        The position of each token in its document, where these tell the documents apart; None: they are stored.
    same_files
        The tokens: a file that is open there is not opened again. None: none are.
    """

    has_pieces = True

    def __init__(
        self,
        path: Path,
        folder: Path,
        index: ShardIndex,
        starts: Sequence[int],
        identities: KnownFiles,
        verify: str,
        access: str,
        found: Mapping[int, Column | FlatFacts] | None = None,
        positions: Tokens | None = None,
        same_files: ShardFiles | None = None,
    ) -> None:
        self._path = path
        self._folder = folder
        self._names: Sequence[str] = index.table.values["path"]  # a path for each would take longer than a header
        self._index = index
        self._starts = starts
        self._identities = identities
        self._found = found or {}
        self._positions = positions
        self._same_files = same_files
        self._verify = verify
        self._all: npt.NDArray[np.uint64] | None = None
        self._counts: npt.NDArray[np.int64] | None = None
        super().__init__(path, access)

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the documents of each file, and keep them. Raises as `FlatFormat.document_offsets`."""
        if self._counts is None:
            with compute_once(self):
                if self._counts is None:
                    self._counts = self._count()
        return self._counts

    def _count(self) -> npt.NDArray[np.int64]:
        stored = self._index.table.values["document_count"]
        counts: npt.NDArray[np.int64] = np.abs(stored)  # NOT_KNOWN is -1: one document
        for number in np.flatnonzero(stored == NOT_COUNTED).tolist():
            if self._positions is not None:
                counts[number] = len(self._rows(number)) - 1
                continue
            flat = self._flat(number)
            if flat is not None:
                found = self._facts_of(flat, number)
                with _documents_there(found.path):
                    counts[number] = flat.num_documents(found)
        return counts

    @cached_per_process
    def _keeps(self) -> bool:
        is_far = isinstance(self._path, RemotePath)  # each object takes a while
        return not is_far and int(self.counts().sum()) <= FEW_DOCUMENTS

    def read_pieces(self, starts: npt.NDArray[np.int64], length: int) -> Pieces:
        if not len(starts):
            return padding(0, length)
        if self._positions is not None:
            return self._told_pieces(self._positions, starts, length)
        edges, end = self.near(starts, length)
        return pieces_of_windows(edges, starts, length, end)

    def _told_pieces(self, positions: Tokens, starts: npt.NDArray[np.int64], length: int) -> Pieces:
        """Return the pieces of windows as the positions in them tell, without pieces of other tokens."""
        values = np.empty((len(starts), length), positions.dtype)
        positions.gather(starts, values)
        return pieces_in_stream(values, starts)

    def edges(self) -> npt.NDArray[np.uint64]:
        """Return where each document begins and the last one ends, shape (D + 1,), and keep it: 8 bytes for each."""
        if self._all is None:
            with compute_once(self):
                if self._all is None:
                    with ReadPool(FAR_THREADS, "zb-edges") as readers:
                        look = readers.map if isinstance(self._folder, RemotePath) else map
                        rows = look(self._rows, range(len(self._names)))
                        # sums, not views, which would keep the files mapped
                        ends = [each[1:] + np.uint64(start) for each, start in zip(rows, self._starts, strict=False)]
                    self._all = np.concatenate([np.zeros(1, np.uint64), *ends])
        return self._all

    def near(self, starts: npt.NDArray[np.int64], length: int) -> tuple[npt.NDArray[np.uint64], int]:
        """Return the part of `edges()` that windows need, by their first tokens, and where the last document ends."""
        if self._all is not None or (len(self._names) - len(self._files.known) <= FEW_FILES and self._keeps):
            edges = self.edges()
            return edges, int(edges[-1])
        ordered = np.sort(starts)
        is_first = np.append(True, ordered[1:] > ordered[:-1] + length)  # of windows that follow each other
        stops = ordered[np.roll(is_first, -1)] + length
        found: list[npt.NDArray[np.uint64]] = []
        done: dict[int, int] = {}  # rows of each file that were taken: what two runs need is there once
        for start, stop in zip(ordered[is_first].tolist(), stops.tolist(), strict=True):
            first = bisect_right(self._starts, start, hi=len(self._names)) - 1
            last = bisect_left(self._starts, stop, hi=len(self._names)) - 1
            for here in range(first, last + 1):
                rows = self._rows(here)
                base = self._starts[here]
                edges = np.array([max(0, start - base) + 1, stop - base], np.uint64)
                low, high = rows.searchsorted(edges).tolist()
                low = max(low - 1, done.get(here, 0))
                found.append(rows[low:high] + np.uint64(base))
                done[here] = max(low, high)
        last = len(self._names) - 1  # where no window reaches it, the end of all tokens will do
        end = self._starts[last] + int(self._rows(last)[-1]) if last in done else self._starts[-1]
        return np.concatenate(found), end

    def _rows(self, number: int) -> npt.NDArray[np.uint64]:
        return self._offsets_of(number).rows()

    def _offsets_of(self, number: int) -> KnownOffsets:
        """Return the offsets of one file, which stay open."""
        file: KnownOffsets = self._files.get(number, self.open)
        return file

    def close(self) -> None:
        super().close()
        self._all = None
        if self._positions is not None:
            self._positions.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_all": None, "_found": {}}  # a copy looks again

    def open(self, number: int) -> KnownOffsets:
        """Open the offsets of one file; the caller closes them."""
        from zb_hdf5.documents.document_offsets import KnownOffsets

        if self._positions is not None:
            edges = edges_in_stream(self._positions, *self._starts[number : number + 2])
            return KnownOffsets(self._folder / self._names[number], edges)
        flat = self._flat(number)
        if flat is not None:
            found = self._facts_of(flat, number)
            known = self._identities.get(number)
            with _documents_there(found.path):
                offsets = flat.document_offsets(found)
            if known is not None:  # the file of the ids is replaced last: then these are not its documents
                require_unreplaced(found.path, known)
            digest = self._index.digests.get(self._index.table.values["path"][number])
            if digest is not None and self._verify != "none":
                digest.require_documents(found.path, offsets)
            return KnownOffsets(found.path, offsets)
        return self._in_hdf5(number)

    def _in_hdf5(self, number: int) -> KnownOffsets:
        """Open the offsets that are in an HDF5 file, beside its tokens."""
        from zb_hdf5.documents.document_offsets import DocumentOffsets, KnownOffsets

        known = self._identities.get(number)
        num_tokens = self._starts[number + 1] - self._starts[number]
        facts = self._found.get(number)
        column = None if isinstance(facts, FlatFacts) else facts
        stored = None if column is None else column.offsets
        path = self._folder / self._names[number]
        if column is not None and column.is_foreign:  # one document
            if not isinstance(path, RemotePath):
                require_unreplaced(path, column.identity)
            return KnownOffsets(path, np.array([0, num_tokens], np.uint64))
        with nullcontext() if self._same_files is None else self._same_files.begin_look(number) as look:
            return DocumentOffsets(path, num_tokens, known, self._verify, self._access, stored, look)

    def _flat(self, number: int) -> FlatFormat | None:
        """Return the flat format of a file; None: it is of another one."""
        return format_without_digests(self._index.table.values["backend"][number], self._index.read_as)

    def _facts_of(self, flat: FlatFormat, number: int) -> FlatFacts:
        """Return the facts of a flat file; `FormatError` if they are not those with which it was opened."""
        known = self._found.get(number)
        if isinstance(known, FlatFacts):
            return known
        with Look(self._folder / self._names[number]) as look:
            found = flat.facts(look).as_known(self._identities.documents(number))
        num_tokens = self._starts[number + 1] - self._starts[number]
        if found.num_tokens != num_tokens:
            raise FormatError(
                f"{found.path}: was replaced: expected {num_tokens:,} tokens, found {found.num_tokens:,}; open it again"
            )
        if found.num_documents is None and self._index.table.values["document_count"][number] != NOT_KNOWN:
            raise _without_documents(found.path)
        return found

    def _open_table(self) -> DocumentTable:
        """Open the tables of the files; of one that has none, its offsets."""
        values = self._index.table.values
        known = {part.path.removesuffix(DOCUMENTS_SUFFIX): part for part in self._index.documents}
        table = None
        if self._path.is_file() and self._path.name != INDEX_NAME:
            tokens_sha256 = values["sha256"][0].replace(NO_SHA256, "")
            table = DocumentTable.of_file(self._path, tokens_sha256, self._verify, self._table_sha256(), self._access)
            known = {} if table is None else {self._path.name: table.parts[0]}
        counts = zip(np.diff(self._starts).tolist(), self.counts().tolist(), strict=True)
        parts = in_order(
            known.get(name, DocumentPart(name, 0, ""))._replace(split="", token_count=tokens, document_count=documents)
            for name, (tokens, documents) in zip(values["path"], counts, strict=True)
        )
        if table is not None:
            return table.with_parts(parts)
        folder = (self._folder / self._names[0]).parent
        return DocumentTable(folder, parts, self._verify, self._offsets_of, self._access)

    def _table_sha256(self) -> str:
        """Return the digest of the table beside a lone file, as the file has it; "": it has none."""
        values = self._index.table.values
        if not values["complete"][0] or values["backend"][0] != "hdf5":
            return ""
        found = self._found.get(0)
        if found is None or isinstance(found, FlatFacts):
            from zb_hdf5.documents.document_offsets import table_sha256

            return table_sha256(self._path)
        return found.documents_sha256


@contextmanager
def _documents_there(path: Path) -> Iterator[None]:
    """Raise `FormatError` if the file of the documents of a file is gone."""
    try:
        yield
    except FileNotFoundError as error:
        raise _without_documents(path) from error


def _without_documents(path: Path) -> FormatError:
    return FormatError(f"{path}: was replaced: expected the file of its documents beside it, found none; open it again")
