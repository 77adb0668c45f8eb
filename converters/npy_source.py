"""`.npy` files of tokens: 2-D arrays are records, 1-D arrays are streams cut into records."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError, IncompleteError, StoreMeta
from zb_hdf5.converters.npy_files import OpenFiles
from zb_hdf5.converters.options import Conversion
from zb_hdf5.converters.source import REMAINDERS, Source, TokenCounts
from zb_hdf5.errors import Remedy
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.formats.batch_reader import require_choice
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.loaders.order import write_order
from zb_hdf5.spec import TokenArray, stored_dtype
from zb_hdf5.token_values import bad_token_message, find_bad_token, require_integers, token_limit

#: Tokens of a record, where neither the caller nor a 2-D array gives a number.
DEFAULT_SEQ_LEN: Final = 512
#: Positions of the order that are computed at once, also where a group of batches needs fewer: long arrays are fast.
ORDER_AHEAD: Final = 1 << 15


@dataclass(frozen=True)
class NpyFile:
    """One source array, seen as records of `seq_len` tokens."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    byte_offset: int
    fortran: bool
    num_records: int

    @classmethod
    def open(cls, path: Path, seq_len: int) -> NpyFile:
        """Read the header and check that it describes tokens.

        Raises
        ------
        FormatError, IncompleteError
            If it is no `.npy` file, or shorter than its header says.
        ConvertError
            If the array is not of integers, or has another shape than 1-D or `(records, seq_len)`.
        """
        shape, fortran, dtype, byte_offset = read_npy_header(path)
        if len(shape) not in (1, 2):
            raise ConvertError(f"{path}: expected a 1-D stream or 2-D records, found shape {shape}")
        if len(shape) == 2 and shape[1] != seq_len:
            raise ConvertError(
                f"{path}: expected records of {seq_len} tokens, found {shape[1]}",
                remedy=Remedy.RECORD_LENGTH,
                at=shape[1],
            )
        require_integers(np.empty(0, dtype), path)
        expected = byte_offset + math.prod(shape) * dtype.itemsize
        found = path.stat().st_size
        if found < expected:
            raise IncompleteError(f"{path}: expected {expected:,} bytes for shape {shape} {dtype}, found {found:,}")
        num_records = shape[0] if len(shape) == 2 else shape[0] // seq_len
        return cls(path, dtype, shape, byte_offset, fortran and len(shape) == 2, num_records)

    @property
    def num_tokens(self) -> int:
        return math.prod(self.shape)

    def map_columns(self) -> TokenArray:
        """Map the records of a file in Fortran order, whose tokens lie apart, shape `(num_records, seq_len)`."""
        return np.memmap(self.path, self.dtype, "r", self.byte_offset, self.shape, "F").view(np.ndarray)

    def offset_of(self, record: Any, seq_len: int) -> Any:
        """Return the byte offset of a record, or of an array of records, of a file in C order."""
        return self.byte_offset + record * (seq_len * self.dtype.itemsize)

    def where(self, record: int, column: int, seq_len: int) -> str:
        """Say where a token stands, in the array's own terms."""
        return f"index {record * seq_len + column:,}" if len(self.shape) == 1 else f"index [{record:,}, {column:,}]"


class NpySource(Source):
    """Batches of shuffled records from one or more `.npy` files.

    Parameters
    ----------
    paths
        Files, or folders whose `*.npy` files, also those in subfolders, are taken in the order of their paths.
    seq_len
        Tokens of a record; None: the length of the 2-D arrays, or 512 if there are none.
    dtype
        "uint32", "uint16", or "auto": uint16 where every id is known to fit, by source dtype or by `vocab_size`.
    remainder
        Of the records that do not fill the last batch: "drop", "pad" (with records of `pad_id`) or "error".
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        batch_size: int,
        seq_len: int | None = None,
        seed: int,
        shuffle: bool = True,
        dtype: str = "auto",
        vocab_size: int = 0,
        remainder: str = "drop",
        pad_id: int = 0,
    ) -> None:
        require_choice("remainder", remainder, REMAINDERS)
        self.paths = expand(paths)
        seq_len = seq_len or _record_length(self.paths)
        self._files = [NpyFile.open(path, seq_len) for path in self.paths]
        total = sum(file.num_records for file in self._files)
        stored = stored_dtype(self._auto_dtype(vocab_size) if dtype == "auto" else dtype)
        self.meta = StoreMeta(batch_size, seq_len, stored, seed if shuffle else 0, total, vocab_size=vocab_size)
        if not 0 <= pad_id <= token_limit(stored, vocab_size):
            raise ArgumentError(bad_token_message("pad_id", "the padding", pad_id, self.meta))
        self.shuffle, self.reorders = "global" if shuffle else "none", shuffle
        self.shard_batches: list[int] = []
        self.shard_splits: list[str] = []
        self.shard_records: list[int] = []
        self.shard_documents: list[int | None] = []
        how = {"remainder": remainder, "pad_id": pad_id}
        self.description = {"format": "npy", "files": [str(path) for path in self.paths], **how}
        self.identity: dict[str, Any] = {}
        self.pad_id = pad_id
        self.order = write_order(total, seed) if shuffle else None
        self.cold = False
        self._ordered = 0, np.empty(0, np.int64)  # the first of some positions, and the records that are stored there
        self._ends = np.cumsum([file.num_records for file in self._files])
        self._open_files = OpenFiles(self.paths)
        self._count_tokens(remainder)

    def _auto_dtype(self, vocab_size: int) -> str:
        small = all(file.dtype.kind == "u" and file.dtype.itemsize <= 2 for file in self._files)
        return "uint16" if small or 0 < vocab_size <= 2**16 else "uint32"

    def _count_tokens(self, remainder: str) -> None:
        """Decide which records are stored, and count the others."""
        meta, total = self.meta, self.meta.total_records
        self.token_counts = TokenCounts(sum(file.num_tokens for file in self._files))
        for file in self._files:
            self.token_counts.drop("file tail", file.num_tokens - file.num_records * meta.seq_len)
        rest = total % meta.batch_size
        if rest and remainder == "error":
            raise ConvertError(
                f"{total:,} records are no multiple of batch_size {meta.batch_size}: {rest} are left over",
                remedy=Remedy.REMAINDER,
            )
        self.num_batches = total // meta.batch_size
        if rest and remainder == "pad":
            self.num_batches += 1
            self.token_counts.padding_rows = meta.batch_size - rest
            self.token_counts.padded = self.token_counts.padding_rows * meta.seq_len
        else:
            self.token_counts.drop("remainder", rest * meta.seq_len)
        if self.num_batches == 0:
            raise ConvertError(
                f"{total:,} records of {meta.seq_len} tokens do not fill one batch of {meta.batch_size}",
                remedy=Remedy.FILL_A_BATCH,
            )

    def read_into(self, start: int, out: TokenArray) -> None:
        """Gather the records of consecutive batches."""
        rows = out.reshape(-1, self.meta.seq_len)
        first = start * self.meta.batch_size
        count = min(len(rows), self.meta.total_records - first)
        self._gather(self._records_at(first, count), rows[:count])
        rows[count:] = self.pad_id

    def _records_at(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return which records of the source are stored at consecutive positions."""
        if self.order is None:
            return np.arange(first, first + count)
        start, records = self._ordered
        if not start <= first <= first + count <= start + len(records):
            stop = min(first + max(count, ORDER_AHEAD), self.meta.total_records)
            start, records = self._ordered = first, self.order.indices(np.arange(first, stop))
        return records[first - start : first - start + count]

    def read_records(self, first: int, rows: TokenArray) -> None:
        """Read consecutive records in the order of the source."""
        self._gather(np.arange(first, first + len(rows)), rows)

    def probe(self, record: int) -> float | None:
        """Return how many seconds a read of a record took, or None if it came from the page cache."""
        number, inside = self._locate(record)
        file, fd = self._files[number], self._open_files.fd(number)
        offset = file.offset_of(inside, self.meta.seq_len)
        buffer = bytearray(self.meta.seq_len * file.dtype.itemsize)
        with contextlib.suppress(OSError):
            if os.preadv(fd, (buffer,), offset, os.RWF_NOWAIT) == len(buffer):
                return None
        start_s = time.perf_counter()
        os.preadv(fd, (buffer,), offset)
        return time.perf_counter() - start_s

    def _locate(self, record: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, record, side="right"))
        return number, record - int(self._ends[number] - self._files[number].num_records)

    def _gather(self, records: npt.NDArray[np.int64], rows: TokenArray) -> None:
        files = np.searchsorted(self._ends, records, side="right")
        for number in np.flatnonzero(np.bincount(files)).tolist():
            here = np.flatnonzero(files == number)
            inside = records[here] - (self._ends[number] - self._files[number].num_records)
            self._gather_from(number, inside, rows, here)

    def _gather_from(
        self, number: int, inside: npt.NDArray[np.int64], rows: TokenArray, here: npt.NDArray[np.int64]
    ) -> None:
        """Copy records `inside` one file to the output rows `here`, checked."""
        file, seq_len = self._files[number], self.meta.seq_len
        together = len(here) == int(here[-1] - here[0]) + 1
        places = slice(int(here[0]), int(here[-1]) + 1) if together else here
        direct = together and file.dtype == self.meta.dtype
        tokens = rows[places] if direct else np.empty((len(here), seq_len), file.dtype)
        self._take(number, inside, tokens)
        bad = find_bad_token(tokens, token_limit(self.meta.dtype, self.meta.vocab_size))
        if bad is not None:
            row, column = divmod(bad, seq_len)
            where = file.where(int(inside[row]), column, seq_len)
            raise ConvertError(bad_token_message(file.path, where, tokens[row, column], self.meta))
        if not direct:
            rows[places] = tokens

    def _take(self, number: int, inside: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out` with records of one file."""
        file = self._files[number]
        if file.fortran:
            out[...] = file.map_columns()[inside]
            return
        offsets = file.offset_of(inside, self.meta.seq_len)
        if np.all(np.diff(inside) == 1):
            self._open_files.read_into(number, int(offsets[0]), out)
            return
        offsets = offsets.tolist()
        for offset in offsets if self.cold else ():
            os.posix_fadvise(self._open_files.fd(number), offset, out[0].nbytes, os.POSIX_FADV_WILLNEED)
        self._open_files.gather_into(number, offsets, out)


def _record_length(paths: Sequence[Path]) -> int:
    """Return the length of the records in the first 2-D array."""
    shapes = (read_npy_header(path)[0] for path in paths)
    return next((shape[1] for shape in shapes if len(shape) == 2 and shape[1]), DEFAULT_SEQ_LEN)


def expand(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Replace folders by the `.npy` files in and below them, in the order of their paths.

    Raises
    ------
    ConvertError
        If a folder has none.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*.npy") if not _is_unfinished(file.relative_to(path)))
            if not inside:
                raise ConvertError(f"{path}: no .npy files in this folder, nor below it")
            files += inside
        elif path.is_file():
            files.append(path)
        elif path.exists():
            raise ConvertError(f"{path}: expected a file or folder, found neither")  # a FIFO would block for ever
        else:
            raise ConvertError(f"{path}: no such file or folder")
    for path, count in Counter(file.resolve() for file in files).items():
        if count > 1:
            raise ConvertError(f"{path}: is named {count} times; its tokens would be stored as often")
    return files


def _is_unfinished(path: Path) -> bool:
    return any(part.endswith(PARTIAL_SUFFIX) for part in path.parts)


def open_npy(paths: list[Path], conversion: Conversion) -> NpySource:
    """Open `.npy` files as a conversion asks."""
    names = ("batch_size", "seq_len", "seed", "shuffle", "remainder", "pad_id")
    how = {name: getattr(conversion, name) for name in names}
    dtype = FORMATS[conversion.target].default_dtype if conversion.dtype in (None, "auto") else conversion.dtype
    return NpySource(paths, dtype=dtype or "auto", vocab_size=conversion.vocab_size or 0, **how)
