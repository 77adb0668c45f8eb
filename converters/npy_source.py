"""Files that hold one array of tokens each: 2-D arrays are records, 1-D arrays are cut into records or documents."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.batch_source import BatchSource, TokenCounts, batches_of, require_pad_id
from zb_hdf5.converters.options import ArrayOptions, CutOptions, Settings
from zb_hdf5.errors import ConvertError, Remedy
from zb_hdf5.files.paths import OpenFiles
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.formats.document_source import Choose, DocumentGroup, DocumentSource, Encoded
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.loaders.order import write_order
from zb_hdf5.spec import (
    StoreMeta,
    TokenArray,
    bad_token_message,
    find_bad_token,
    require_integers,
    stored_dtype,
    token_limit,
)

#: Tokens of a record, where neither the caller nor a 2-D array gives a number.
DEFAULT_SEQ_LEN: Final = 512
#: Tokens in which boundary tokens are looked for at once; documents that end in them are written together.
BLOCK_TOKENS: Final = 1 << 22
#: Shape, Fortran order, dtype, and byte offset of the data.
Header: TypeAlias = tuple[tuple[int, ...], bool, np.dtype[Any], int]


class ArrayKind(NamedTuple):
    """A kind of files with one array each. Another trainer's flat format is one of these and a row in `SOURCES`."""

    name: str
    suffix: str
    read_header: Callable[[Path], Header]  # raises FormatError, or IncompleteError for a short file

    def expand(self, paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
        """Replace folders by the files in and below them, by path; `ConvertError` for none, or one named twice."""
        files: list[Path] = []
        for path in map(Path, paths):
            if path.is_dir():
                found = [
                    file
                    for file in sorted(path.rglob(f"*{self.suffix}"))
                    if PARTIAL_SUFFIX not in {parent.suffix for parent in file.relative_to(path).parents}
                ]
                if not found:
                    raise ConvertError(f"{path}: no {self.suffix} files in this folder, nor below it")
                files += found
            elif path.is_file():
                files.append(path)
            else:  # a FIFO would block for ever
                expected = "expected a file or folder, found neither" if path.exists() else "no such file or folder"
                raise ConvertError(f"{path}: {expected}")
        for path, count in Counter(file.resolve() for file in files).items():
            if count > 1:
                raise ConvertError(f"{path}: is named {count} times; its tokens would be stored as often")
        return files


NPY: Final = ArrayKind("npy", ".npy", read_npy_header)


@dataclass(frozen=True)
class ArrayFile:
    """One source array, as records of `seq_len` tokens."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    byte_offset: int
    fortran: bool
    num_records: int

    @classmethod
    def open(cls, path: Path, header: Header, seq_len: int) -> ArrayFile:
        """Check that a header describes tokens: `ConvertError` if not."""
        shape, fortran, dtype, byte_offset = header
        if len(shape) not in (1, 2):
            raise ConvertError(f"{path}: expected a 1-D stream or 2-D records, found shape {shape}")
        if len(shape) == 2 and shape[1] != seq_len:
            raise ConvertError(
                f"{path}: expected records of {seq_len} tokens, found {shape[1]}",
                remedy=Remedy.RECORD_LENGTH,
                at=shape[1],
            )
        require_integers(np.empty(0, dtype), path)
        num_records = shape[0] if len(shape) == 2 else shape[0] // seq_len
        return cls(path, dtype, shape, byte_offset, fortran and len(shape) == 2, num_records)

    @property
    def num_tokens(self) -> int:
        return math.prod(self.shape)

    def map(self, order: Any = "C") -> TokenArray:
        """Map the array."""
        if not self.num_tokens:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.byte_offset, self.shape, order).view(np.ndarray)

    def offset_of(self, record: Any, seq_len: int) -> Any:
        """Return the byte offset of a record, or of an array of records, of a file in C order."""
        return self.byte_offset + record * (seq_len * self.dtype.itemsize)


def _fitting_dtype(files: Sequence[ArrayFile], vocab_size: int) -> str:
    small = all(file.dtype.kind == "u" and file.dtype.itemsize <= 2 for file in files)
    return "uint16" if small or 0 < vocab_size <= 2**16 else "uint32"


class NpySource(BatchSource):
    """Batches of records from files of one array each, shuffled or not.

    Parameters
    ----------
    paths
        Files, and folders of them.
    batch_size
        Records of a batch.
    seq_len
        Tokens of a record; None: the length of the 2-D arrays, or 512 if there are none.
    seed
        Decides the order of shuffled records.
    shuffle
        Whether the records are shuffled.
    dtype
        The stored dtype; "auto": uint16 if the arrays or the vocabulary size prove that it holds all ids.
    vocab_size
        Ids at or above it are refused; 0: those that do not fit the dtype.
    remainder
        "drop" or "pad" for records that do not fill the last batch; "error" refuses them.
    pad_id
        The token of padding.
    kind
        The kind of the files.
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
        kind: ArrayKind = NPY,
    ) -> None:
        self.paths = kind.expand(paths)
        headers = [kind.read_header(path) for path in self.paths]
        lengths = (shape[1] for shape, *_ in headers if len(shape) == 2 and shape[1])
        seq_len = seq_len or next(lengths, DEFAULT_SEQ_LEN)
        self._files = [ArrayFile.open(path, each, seq_len) for path, each in zip(self.paths, headers, strict=True)]
        total = sum(file.num_records for file in self._files)
        stored = stored_dtype(_fitting_dtype(self._files, vocab_size) if dtype == "auto" else dtype)
        self.lacks_vocab_size = dtype == "auto" and stored == np.uint32 and not vocab_size
        self.meta = StoreMeta(batch_size, seq_len, stored, seed if shuffle else 0, total, vocab_size=vocab_size)
        require_pad_id(pad_id, self.meta)
        self.shuffle = "global" if shuffle else "none"
        self.reorders = shuffle
        self.description = {
            "format": kind.name,
            "files": [str(path) for path in self.paths],
            "remainder": remainder,
            "pad_id": pad_id,
        }
        self.identity: dict[str, Any] = {}
        self.pad_id = pad_id
        self.order = write_order(total, seed) if shuffle else None
        self._ends = np.cumsum([file.num_records for file in self._files])
        self._open_files: OpenFiles[LocalFile] = OpenFiles("pread")  # touched pages of a mapping count as own memory
        self._count_tokens(remainder)

    def _count_tokens(self, remainder: str) -> None:
        """Decide which records are stored, and count the others."""
        meta = self.meta
        total = meta.total_records
        self.counts = TokenCounts(sum(file.num_tokens for file in self._files))
        for file in self._files:
            self.counts.drop("file tail", file.num_tokens - file.num_records * meta.seq_len)
        self.num_batches, rest = batches_of(total, meta, remainder)
        if rest and remainder == "pad":
            self.counts.padding_rows = meta.batch_size - rest
            self.counts.padded = self.counts.padding_rows * meta.seq_len
        else:
            self.counts.drop("remainder", rest * meta.seq_len)

    def read_into(self, start: int, out: TokenArray) -> None:
        rows = out.reshape(-1, self.meta.seq_len)
        first = start * self.meta.batch_size
        count = min(len(rows), self.meta.total_records - first)
        positions = np.arange(first, first + count)
        self._gather(positions if self.order is None else self.order.indices(positions), rows[:count])
        rows[count:] = self.pad_id

    def read_records(self, first: int, rows: TokenArray) -> None:
        self._gather(np.arange(first, first + len(rows)), rows)

    def probe(self, record: int) -> float | None:
        number = int(np.searchsorted(self._ends, record, side="right"))
        file = self._files[number]
        fd = self._open(number).fd
        offset = file.offset_of(record - int(self._ends[number] - file.num_records), self.meta.seq_len)
        buffer = bytearray(self.meta.seq_len * file.dtype.itemsize)
        with contextlib.suppress(OSError):
            if os.preadv(fd, (buffer,), offset, os.RWF_NOWAIT) == len(buffer):
                return None
        start_s = time.perf_counter()
        os.preadv(fd, (buffer,), offset)
        return time.perf_counter() - start_s

    def _open(self, number: int) -> LocalFile:
        return self._open_files.get(number, lambda number: LocalFile(self.paths[number], access="pread"))

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
        file = self._files[number]
        seq_len = self.meta.seq_len
        together = len(here) == int(here[-1] - here[0]) + 1
        target = slice(int(here[0]), int(here[-1]) + 1) if together else here
        direct = together and file.dtype == self.meta.dtype
        tokens = rows[target] if direct else np.empty((len(here), seq_len), file.dtype)
        self._take(number, inside, tokens)
        bad = find_bad_token(tokens, token_limit(self.meta.dtype, self.meta.vocab_size))
        if bad is not None:
            row, column = divmod(bad, seq_len)
            record = int(inside[row])
            index = f"{record * seq_len + column:,}" if len(file.shape) == 1 else f"[{record:,}, {column:,}]"
            raise ConvertError(bad_token_message(file.path, f"index {index}", tokens[row, column], self.meta))
        if not direct:
            rows[target] = tokens

    def _take(self, number: int, inside: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out` with records of one file."""
        file = self._files[number]
        if file.fortran:  # the tokens of a record are not beside each other
            out[...] = file.map("F")[inside]
            return
        opened = self._open(number)
        offsets = file.offset_of(inside, self.meta.seq_len).tolist()
        if bool(np.all(np.diff(inside) == 1)):  # they follow each other
            opened.read_ranges([(offsets[0], out)])
            return
        if self.cold:
            for offset in offsets:
                os.posix_fadvise(opened.fd, offset, out[0].nbytes, os.POSIX_FADV_WILLNEED)
        opened.read_ranges(zip(offsets, out, strict=True))


class CutSource(DocumentSource):
    """1-D arrays, cut into documents at a boundary token, which is the last one of each, or the first one.

    Tokens before the first boundary token, or after the last one, are a document without one.

    Parameters
    ----------
    paths
        Files, and folders of them.
    options
        The boundary token, its side, and the dtype.
    kind
        The kind of the files.
    """

    tokenizer = ""
    has_ids = False

    def __init__(self, paths: list[Path], options: CutOptions, kind: ArrayKind = NPY) -> None:
        self.paths = kind.expand(paths)
        self._boundary = options.boundary
        self.boundary_token_id = options.boundary_token_id
        self.vocab_size = options.vocab_size
        self._files = []
        for path in self.paths:
            header = kind.read_header(path)
            if len(header[0]) != 1:
                raise ConvertError(
                    f"{path}: expected a 1-D stream of tokens, found shape {header[0]}; {kind.name}-to-hdf5 takes "
                    "records"
                )
            self._files.append(ArrayFile.open(path, header, 1))
        is_auto = options.dtype == "auto"
        self.dtype = stored_dtype(_fitting_dtype(self._files, self.vocab_size) if is_auto else options.dtype)
        sizes = [file.num_tokens * file.dtype.itemsize for file in self._files]
        self.groups = [DocumentGroup(number, 0, size, size) for number, size in enumerate(sizes)]
        self.description = {
            "format": kind.name,
            "files": [str(path) for path in self.paths],
            "boundary_token_id": self.boundary_token_id,
            "boundary": self._boundary,
        }
        self.identity: dict[str, Any] = {"dtype": self.dtype.name, "vocab_size": self.vocab_size}

    def read(self, group: DocumentGroup, choose: Choose | None, num_threads: int) -> Iterator[Encoded]:
        file = self._files[group.file_number]
        tokens = file.map()
        first = 1
        for start, lengths in _cut(tokens, self.boundary_token_id, self._boundary):
            stop = start + int(lengths.sum())
            rows = np.arange(first, first + len(lengths), dtype=np.uint64)
            first += len(lengths)
            chosen = tokens[start:stop]
            if choose is not None:
                wanted = choose(len(lengths))
                chosen = chosen[np.repeat(wanted, lengths)]
                lengths = lengths[wanted]
                rows = rows[wanted]
            yield Encoded(chosen, lengths, str(file.path), rows, read=stop * file.dtype.itemsize)


def _cut(tokens: TokenArray, boundary_token_id: int, boundary: str) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield the documents of a stream, many at a time: the offset of the first one, and their lengths."""
    start = 0
    for block in range(0, len(tokens), BLOCK_TOKENS):
        found = np.flatnonzero(tokens[block : block + BLOCK_TOKENS] == boundary_token_id) + block
        edges = found if boundary == "before" else found + 1
        edges = edges[edges > start]
        if len(edges):
            yield start, np.diff(edges, prepend=start)
            start = int(edges[-1])
    if start < len(tokens):
        yield start, np.array([len(tokens) - start])


def open_arrays(paths: list[Path], settings: Settings, kind: ArrayKind = NPY) -> NpySource:
    """Open files of arrays as batches, as a conversion asks; its target decides the dtype of "auto"."""
    options = settings.of(ArrayOptions)
    dtype = options.dtype
    if dtype == "auto":
        dtype = FORMATS[settings.target.format].default_dtype
    return NpySource(
        paths,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        seed=options.seed,
        shuffle=options.shuffle,
        dtype=dtype,
        vocab_size=options.vocab_size,
        remainder=options.remainder,
        pad_id=options.pad_id,
        kind=kind,
    )


def open_cut(paths: list[Path], settings: Settings) -> CutSource:
    """Open files of arrays as documents, as a conversion asks."""
    return CutSource(paths, settings.of(CutOptions))
