"""The native `.batch` file (ZeroBatch v2): one 4096-byte header, then one page-aligned slot per batch; its `.crc32`.

Offsets are arithmetic: batch i begins at `4096 + i * padded_batch_bytes`.
"""

from __future__ import annotations

import os
import struct
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError, Remedy, UnverifiableError, require_choice
from zb_hdf5.files.checked import Crc32Rows, crc32_of
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import any_path, open_file, open_with_room, read_whole, regular
from zb_hdf5.files.publishing import disk_errors, write_atomically, write_fully
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.files.tokens import FileTokens, open_extents
from zb_hdf5.formats.access import ACCESSES
from zb_hdf5.formats.batch_writer import FileWriter, ShardInfo
from zb_hdf5.formats.broken_file import BrokenFile
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.format import Format
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.spec import (
    BATCH_MAGIC,
    BATCH_VERSION,
    BATCHES,
    CODE_BY_DTYPE,
    DTYPE_BY_CODE,
    HEADER_BYTES,
    U32_MAX,
    StoreMeta,
    TokenArray,
    crc32_path,
)

#: (offset, struct code, field) in file order; little-endian, no alignment gaps; reserved from byte 40 on.
BATCH_HEADER_FIELDS: Final = (
    (0, "8s", "magic"),
    (8, "I", "version"),
    (12, "I", "batch_size"),
    (16, "I", "seq_len"),
    (20, "Q", "num_batches"),
    (28, "I", "dtype"),
    (32, "I", "seed"),
    (36, "I", "total_records"),
)
#: The number of batches of a file whose writer has not finished.
UNFINISHED: Final = 2**64 - 1
#: The shape and origin of the batches, and their number.
BatchHeader: TypeAlias = tuple[StoreMeta, int]
_HEADER: Final = struct.Struct("<" + "".join(code for _, code, _ in BATCH_HEADER_FIELDS))


class BatchCorpus(Corpus):
    """A `.batch` file, read by "mmap" or "pread". See `Corpus`; `open_corpus` describes the options.

    Without its `<path>.crc32`, `with_verify("auto")` checks nothing, and "batch" and "store" raise `UnverifiableError`.
    "store" also turns the sampled fingerprint into one of content.
    """

    backend = "batch"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        access: str = "auto",
        identity: Identity | None = None,
        look: Look | None = None,
    ) -> None:
        require_choice("access", access, ACCESSES)
        path = any_path(path)
        if access == "h5py":
            raise ArgumentError(f"{path}: a .batch file is read by mmap or pread, not by h5py")
        with Look(path) if look is None else nullcontext(look) as look:
            meta, num_batches = checked_header(look.start[:HEADER_BYTES], look.num_bytes, path)
            tokens = _open_slots(path, meta, num_batches, access, identity or look.identity, look)
        super().__init__(path, meta, tokens)
        self.extents = tokens.extents
        self.columns = {BATCHES: (slots_of(meta, num_batches),)}

    def crc32_rows(self) -> Crc32Rows | None:
        return self._sidecar if crc32_path(self.path).exists() else None

    @cached_per_process
    def _sidecar(self) -> Crc32Rows:
        return sidecar_rows(self.path, self.num_units)

    def missing_digests(self) -> str:
        return f"{crc32_path(self.path).name} is missing; {Remedy.CRC32}"


class LoneBatches(Format):
    """Lone `.batch` files, and the `.batch` files of a store."""

    def open(self, file: FoundFile) -> Corpus:
        corpus = BatchCorpus(file.path, access=file.access, identity=file.identity, look=file.look)
        return corpus.with_verify(file.verify)

    def open_broken(self, path: Path) -> BrokenFile:
        return open_broken(path)


class BatchFileWriter(FileWriter):
    """Writes a `.batch` file, the number of its batches at the end, and their crc32 to `<path>.crc32`."""

    backend: ClassVar[str] = "batch"

    @staticmethod
    def stored_bytes(meta: StoreMeta, num_batches: int) -> int:
        return batch_file_bytes(meta, num_batches) + 4 * num_batches

    def _begin(self) -> None:
        write_fully(self._file.fd, pack_header(self.meta, UNFINISHED), 0)

    def _append(self, batches: TokenArray, fields: object) -> None:
        offset = batch_file_bytes(self.meta, self.num_batches)
        slot_bytes = self.meta.padded_batch_bytes
        is_packed = slot_bytes == self.meta.batch_bytes
        for number, part in enumerate([batches] if is_packed else batches):  # the padding stays a hole
            write_fully(self._file.fd, part, offset + number * slot_bytes)

    def _complete(self, info: ShardInfo) -> ShardInfo:
        os.ftruncate(self._file.fd, batch_file_bytes(self.meta, info.num_batches))  # up to the last slot's padding
        write_fully(self._file.fd, pack_header(self.meta, info.num_batches), 0)
        sidecar = self.begin_sidecar(crc32_path(self._file.path))
        with disk_errors(sidecar.partial_path):
            write_fully(sidecar.fd, info.crc32.tobytes(), 0)
        return info._replace(columns={BATCHES: (slots_of(self.meta, info.num_batches),)})


def slots_of(meta: StoreMeta, num_batches: int) -> Run:
    """Return the extents of the batches of a `.batch` file."""
    return Run(HEADER_BYTES, meta.padded_batch_bytes, num_batches)


def _open_slots(
    path: Path,
    meta: StoreMeta,
    num_batches: int,
    access: str,
    identity: Identity | None = None,
    look: Look | None = None,
) -> FileTokens:
    extents = Extents([slots_of(meta, num_batches)], meta.batch_bytes)
    return open_extents(path, extents, meta.dtype, num_batches * meta.batch_tokens, access, identity, look=look)


def checked_header(header: bytes, size: int, path: Path) -> BatchHeader:
    """Return (meta, num_batches) of the first bytes of a `.batch` file of so many bytes, which fit its size."""
    meta, num_batches = unpack_header(header, path)
    if num_batches == UNFINISHED:
        raise IncompleteError(f"{path}: its writer has not finished", remedy=Remedy.REPAIR, at=path)
    expected = batch_file_bytes(meta, num_batches)
    if size != expected:
        kind = IncompleteError if size < expected else FormatError
        raise kind(
            f"{path}: the header announces {num_batches:,} batches of {meta.batch_size} x {meta.seq_len} "
            f"{meta.dtype.name}: expected {expected:,} bytes, found {size:,}; write or copy the file again"
        )
    return meta, num_batches


def open_broken(path: Path) -> BrokenFile:
    """Open the whole slots of a damaged or unfinished file."""
    with open(path, "rb", opener=regular) as file:
        header = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    meta, announced = unpack_header(header, path)
    slots = max(0, size - HEADER_BYTES) // meta.padded_batch_bytes
    stored = read_any_crc32_file(path)
    reasons = []
    if announced == UNFINISHED:
        reasons.append("its writer has not finished")
    elif size != batch_file_bytes(meta, announced):
        reasons.append(f"it should have {announced:,} batches, and has {slots:,} whole slots")
        slots = min(slots, announced)
    if stored is not None and len(stored) < slots:
        reasons.append(f"only {len(stored):,} of {slots:,} batches have a crc32")
        slots = len(stored)
    if stored is None and reasons:
        reasons.append("its .crc32 is missing: the batches could not be checked")
    tokens = _open_slots(path, meta, slots, "pread")
    corpus = Corpus(path, meta, tokens, backend="batch", complete=announced != UNFINISHED)
    return BrokenFile(corpus, stored, "; ".join(reasons))


def pack_header(meta: StoreMeta, num_batches: int) -> bytes:
    """Return the 4096 header bytes of a `.batch` file; `FormatError` if a number does not fit its 32 bits."""
    for name in ("seed", "total_records"):
        value = getattr(meta, name)
        if value > U32_MAX:
            raise FormatError(
                f"{name} {value:,} does not fit the 32 bits of a .batch header (at most {U32_MAX:,}); "
                "use the hdf5 backend, or shard the store"
            )
    fields = _HEADER.pack(
        BATCH_MAGIC,
        BATCH_VERSION,
        meta.batch_size,
        meta.seq_len,
        num_batches,
        CODE_BY_DTYPE[meta.dtype],
        meta.seed,
        meta.total_records,
    )
    return fields.ljust(HEADER_BYTES, b"\0")


def unpack_header(header: bytes, path: object) -> tuple[StoreMeta, int]:
    """Return (meta, num_batches) from the first 4096 bytes of a `.batch` file."""
    if header[:8] != BATCH_MAGIC:
        raise FormatError(f"{path}: not a .batch file: expected magic {BATCH_MAGIC!r}, found {header[:8]!r}")
    if len(header) < HEADER_BYTES:
        raise IncompleteError(f"{path}: expected a header of {HEADER_BYTES} bytes, found {len(header)}")
    _, version, batch_size, seq_len, num_batches, code, seed, total_records = _HEADER.unpack_from(header)
    if version != BATCH_VERSION:
        raise FormatError(f"{path}: expected .batch version {BATCH_VERSION}, found {version}")
    if code not in DTYPE_BY_CODE:
        raise FormatError(
            f"{path}: expected dtype code {' or '.join(map(str, DTYPE_BY_CODE))}, found {code}; "
            "was it written by a newer version?"
        )
    try:
        meta = StoreMeta(batch_size, seq_len, DTYPE_BY_CODE[code], seed, total_records)
    except ArgumentError as error:
        raise FormatError(f"{path}: bad header: {error}") from error
    return meta, num_batches


def batch_file_bytes(meta: StoreMeta, num_batches: int) -> int:
    """Return the exact size of a `.batch` file, and so the offset of batch `num_batches`."""
    return HEADER_BYTES + num_batches * meta.padded_batch_bytes


# --- the crc32 rows of a file that cannot hold them: raw uint32 in `<file>.crc32` ------------------------------------


def sidecar_rows(path: Path, num_batches: int) -> Crc32Rows:
    """Return the rows of `<path>.crc32`, read when they are needed; `UnverifiableError` if there is no such file."""
    return Crc32Rows(partial(_read_sidecar, path, num_batches))


def _read_sidecar(path: Path, num_batches: int) -> npt.NDArray[np.uint32]:
    sidecar = crc32_path(path)
    try:
        with open_with_room(partial(open_file, sidecar)) as file:
            size = file.seek(0, os.SEEK_END)
            if size != 4 * num_batches:
                raise FormatError(f"{sidecar}: expected {4 * num_batches:,} bytes, found {size:,}")
            file.seek(0)
            return np.frombuffer(file.read(size), "<u4")
    except FileNotFoundError as error:
        raise UnverifiableError(
            f"{path}: cannot be verified: {sidecar.name} is missing", remedy=Remedy.CRC32, at=path
        ) from error


def read_any_crc32_file(path: Path) -> npt.NDArray[np.uint32] | None:
    """Return all whole rows of the sidecar of a damaged or unfinished file, or None if it has none."""
    if not (sidecar := crc32_path(path)).exists():
        return None
    data = read_whole(sidecar)
    return np.frombuffer(data[: len(data) // 4 * 4], dtype="<u4")


def ensure_crc32_file(corpus: Corpus) -> Path | None:
    """Write the `<path>.crc32` of a file that has none, and return its path; None: it had one."""
    sidecar = crc32_path(corpus.path)
    if sidecar.is_file():
        return None
    if sidecar.exists():
        raise FormatError(f"{sidecar}: expected a file, found a folder, a FIFO or a device; remove it")
    rows = [crc32_of(batch) for _, batches in corpus.groups() for batch in batches]
    write_atomically(sidecar, np.array(rows, "<u4").tobytes())
    return sidecar
