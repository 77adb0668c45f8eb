"""Opens the shards of a store where its index says that they lie, each proved by the unit that is read anyway."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ChecksumError, FormatError, IncompleteError, Remedy, UnverifiableError
from zb_hdf5.files.checked import Crc32Rows, checked
from zb_hdf5.files.decoded import CodedChunks, Decoded, ranges_of, read_extents
from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.file_tokens import FileTokens, ObjectTokens, open_extents
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.ranges import open_ranges
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.native import sidecar_rows
from zb_hdf5.formats.registry import BACKENDS
from zb_hdf5.spec import BATCHES_LAYOUT, CRC32, INDEX_NAME, NOT_KNOWN, TokenArray, extents_column
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.table import ShardEntry

if TYPE_CHECKING:
    from zb_hdf5.formats.batch_reader import BatchReader


class ShardOpener:
    """Opens the shards of an index, of tokens or of a field, by number: what `Sharded` is made of."""

    # a shard that was open once is known by its identity: it is not proved again, and another file is refused

    def __init__(self, folder: Path, index: ShardIndex, access: str, verify: str) -> None:
        self.folder, self.index, self.access, self.verify = folder, index, access, verify
        self.identities: dict[int, Identity] = {}

    @property
    def noun(self) -> str:
        return "batch" if self.index.meta.layout == BATCHES_LAYOUT else "chunk"

    def __call__(self, number: int, start: int) -> Tokens:
        """Open a shard, of which the token at `start` is about to be read."""
        entry, path = self.index.shards[number], self.folder / self.index.table.values["path"][number]
        known, unit = self.identities.get(number), start // self.index.meta.batch_tokens
        found = self._open_by_index(path, entry, unit, known) or self._open_by_file(path, entry, unit, known)
        self.identities[number] = found.identity
        return found

    def _open_by_index(self, path: Path, entry: ShardEntry, unit: int, identity: Identity | None) -> Tokens | None:
        """Open a shard without HDF5; None if the index does not say enough, or the file is not what it says."""
        if not self._is_placed(entry):
            return None
        meta = self.index.meta
        compressed = extents_column(meta.column) in entry.columns
        tokens = (self._open_compressed if compressed else self._open_plain)(path, entry, identity)
        if tokens is None:
            return None
        rows = _crc32_rows(tokens, path, entry)
        if identity is None:
            read = np.empty(min(meta.batch_tokens, entry.token_count - unit * meta.batch_tokens), meta.dtype)
            stored = _read_proof(tokens, rows, entry, unit, read)
            if self._problem(entry, stored, unit, read):
                tokens.close()
                return None
            if isinstance(tokens, ObjectTokens):
                tokens.remember(unit * meta.batch_tokens, read)
        return checked(tokens, rows, path, self.noun, self.verify)

    def _is_placed(self, entry: ShardEntry) -> bool:
        placed = entry.complete and self.access != "h5py" and entry.is_placed(self.index.meta.column)
        return placed and entry.crc32 != NOT_KNOWN and entry.token_count > 0

    def _open_plain(self, path: Path, entry: ShardEntry, identity: Identity | None) -> FileTokens | ObjectTokens | None:
        meta = self.index.meta
        extents = entry.extents(meta.column, meta.batch_bytes)
        strides = (meta.batch_bytes, meta.padded_batch_bytes)
        if extents is None or any(run.stride not in strides for run in extents.runs if run.num_batches > 1):
            return None  # one batch proves the places of all only where they follow each other as ours do
        try:
            tokens = open_extents(path, extents, meta.dtype, entry.token_count, self.access, identity, entry.num_bytes)
        except IncompleteError:
            return None
        if isinstance(tokens, ObjectTokens) or tokens.file.size == entry.num_bytes:
            return tokens
        tokens.close()
        return None

    def _open_compressed(self, path: Path, entry: ShardEntry, identity: Identity | None) -> Decoded | None:
        if entry.compressed is None or self.access == "mmap":
            return None
        meta, ranges = self.index.meta, open_ranges(path, identity, entry.num_bytes)
        try:
            if ranges.num_bytes == entry.num_bytes:
                table = read_extents(ranges, entry.columns[extents_column(meta.column)], entry.num_batches)
                chunks = CodedChunks(entry.compressed.codec, table)
                return Decoded(ranges, chunks, meta.dtype, meta.batch_tokens, entry.token_count, self.noun)
        except FormatError:
            pass
        except BaseException:
            ranges.close()
            raise
        ranges.close()
        return None

    def _open_by_file(self, path: Path, entry: ShardEntry, unit: int, identity: Identity | None) -> Tokens:
        """Open a shard by what its file says, and compare that with the index."""
        reader = self._reader(path, entry, identity)
        try:
            if not (entry.complete and reader.complete):
                raise IncompleteError(f"{reader.path}: its writer has not finished; convert again")
            expected, found = (entry.token_count, self.index.meta.dtype), (reader.token_count, reader.dtype)
            if self.index.holds_stream and found != expected:
                raise FormatError(
                    f"{path}: expected {expected[0]:,} tokens, found {found[0]:,} ({expected[1]}, {found[1]}); it "
                    f"changed, or {INDEX_NAME} is of another store"
                )
            if not self.index.holds_stream:
                self.index.require_agreement(reader, entry)
            if self._is_placed(entry) and not self.index.holds_stream:
                self.index.require_extents(reader, entry)
            if identity is None and entry.crc32 != NOT_KNOWN and entry.token_count:
                self._require_proof(reader, entry, unit)
            reader.check_reads(self.verify)
        except BaseException:
            reader.close()
            raise
        return reader.tokens

    def _reader(self, path: Path, entry: ShardEntry, identity: Identity | None) -> BatchReader:
        meta = self.index.meta
        if meta.field is None and meta.layout == BATCHES_LAYOUT:
            return BACKENDS[entry.backend].open(path, access=self.access, verify="none")
        from zb_hdf5.formats.hdf5.h5_reader import HDF5Reader  # h5py, which whoever has an index does not need
        from zb_hdf5.formats.hdf5.inspection import look_at_field, look_at_stream

        column = (
            look_at_stream(path, identity) if meta.field is None else look_at_field(path, meta.field.name, identity)
        )
        return HDF5Reader(column, self.access, "none")

    def _require_proof(self, reader: BatchReader, entry: ShardEntry, unit: int) -> None:
        """Raise `ChecksumError` unless the crc32 rows of a file are those of its entry, and a unit is what they say."""
        batch_tokens = self.index.meta.batch_tokens
        tokens = np.empty(min(batch_tokens, entry.token_count - unit * batch_tokens), reader.dtype)
        reader.tokens.read([(unit * batch_tokens, tokens)])
        problem = self._problem(entry, reader.stored_crc32(), unit, tokens)
        if problem:
            raise ChecksumError(
                f"{reader.path}: {problem}: the file is damaged, or belongs elsewhere",
                remedy=Remedy.VERIFY,
                at=reader.path.parents[entry.path.count("/")],
            )

    def _problem(self, entry: ShardEntry, rows: npt.NDArray[np.uint32] | None, unit: int, tokens: TokenArray) -> str:
        """Say what is not as in the index; "" if the file is proved."""
        if rows is None or crc32_of(rows) != entry.crc32:
            return f"its rows of crc32 are not those that {INDEX_NAME} knows of"
        found, expected = crc32_of(tokens), int(rows[unit])
        return "" if found == expected else f"{self.noun} {unit:,}: expected crc32 {expected:08x}, found {found:08x}"


def _crc32_rows(tokens: FileTokens | ObjectTokens | Decoded, path: Path, entry: ShardEntry) -> Crc32Rows:
    """Return the crc32 of each unit, where the index says that they lie, or of the sidecar of the shard."""
    ranges = ranges_of(tokens)
    if CRC32 not in entry.columns or ranges is None:
        return sidecar_rows(path, entry.num_batches)
    return Crc32Rows.placed(entry.num_batches, ranges, entry.columns[CRC32])


def _read_proof(
    tokens: FileTokens | ObjectTokens | Decoded, rows: Crc32Rows, entry: ShardEntry, unit: int, out: TokenArray
) -> npt.NDArray[np.uint32] | None:
    """Fill `out` with a unit, and return the crc32 of all; None: they cannot be read."""
    # an error from a server is raised; where too many files are open, the caller closes some and tries again
    try:
        if isinstance(tokens, ObjectTokens) and CRC32 in entry.columns:  # one wait for both
            return rows.all((tokens.extents.offset(unit), out))
        tokens.read([(unit * tokens.unit, out)])
        return rows.all()
    except (OSError, ChecksumError, FormatError, UnverifiableError, IndexError) as error:
        if isinstance(tokens, ObjectTokens) or getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE):
            tokens.close()
            raise
        return None
