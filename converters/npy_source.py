"""Files that hold one array of tokens each: 2-D arrays are records, 1-D arrays are cut into records or documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.array_source import ArrayFile, ArraySource, array_options, fitting_dtype
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.conversion import InputOptions
from zb_hdf5.converters.options import Settings
from zb_hdf5.converters.routes import told_splits
from zb_hdf5.converters.split_arrays import arrays_of_splits
from zb_hdf5.errors import ConvertError
from zb_hdf5.files.field_files import ids_at, require_one_dtype
from zb_hdf5.files.listing import files_at
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.files.tokens import TokenRun, Tokens, Wrapper, open_extents
from zb_hdf5.formats.document_source import Choose, DocumentGroup, DocumentSource, Encoded
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.spec import TokenArray, require_integers, stored_dtype

#: Tokens in which boundary tokens are looked for at once; documents that end in them are written together.
BLOCK_TOKENS: Final = 1 << 22
#: Tokens of a part of a file whose documents are a group.
PART_TOKENS: Final = 1 << 26
#: Shape, Fortran order, dtype, and byte offset of the data.
Header: TypeAlias = tuple[tuple[int, ...], bool, np.dtype[Any], int]


class ArrayKind(NamedTuple):
    """A kind of files with one array each. Another trainer's flat format is one of these and a row in `SOURCES`."""

    name: str
    suffix: str
    read_header: Callable[[Path], Header]  # raises FormatError, or IncompleteError for a short file

    def expand(self, paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
        """Replace folders by the files of ids in and below them, by path.

        Raises
        ------
        ConvertError
            If there are none, or one is named twice.
        FormatError
            If one is named as a field.
        """
        return ids_at(files_at(paths, self.suffix), paths)


NPY: Final = ArrayKind("npy", ".npy", read_npy_header)


class ArrayAt(ArrayFile):
    """An array in C or Fortran order from one byte of a file on, as the header of the file has it.

    Parameters
    ----------
    path
        The file.
    header
        Its header.
    """

    def __init__(self, path: Path, header: Header) -> None:
        shape, fortran, dtype, byte_offset = header
        if len(shape) not in (1, 2):
            raise ConvertError(f"{path}: expected a 1-D stream or 2-D records, found shape {shape}")
        require_integers(np.empty(0, dtype), path)
        super().__init__(path, shape, dtype)
        self.byte_offset = byte_offset
        self._fortran = fortran and len(shape) == 2

    def open(self) -> Tokens:
        num_bytes = self.num_tokens * self.dtype.itemsize
        extents = Extents([Run(self.byte_offset, num_bytes, 1)] if num_bytes else [], num_bytes)
        tokens = open_extents(self.path, extents, self.dtype, self.num_tokens, "pread")
        return ByColumns(tokens, self.map("F")) if self._fortran else tokens

    def map(self, order: Any = "C") -> TokenArray:
        """Map the array."""
        if not self.num_tokens:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.byte_offset, self.shape, order).view(np.ndarray)


class ByColumns(Wrapper):
    """Records in Fortran order: the tokens of one are not beside each other. Whole records are read. See `Tokens`.

    Parameters
    ----------
    tokens
        The tokens in the order of the file.
    records
        A mapping of the same file, shape (records, tokens of each).
    """

    def __init__(self, tokens: Tokens, records: TokenArray) -> None:
        self._wrap(tokens)
        self._records = records

    def read(self, runs: Iterable[TokenRun]) -> None:
        length = self._records.shape[1]
        for start, out in runs:
            out.reshape(-1, length)[...] = self._records[start // length :][: len(out) // length]

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        out[...] = self._records[starts // self._records.shape[1]]


class NpySource(ArraySource):
    """Batches of records from files of one array each, shuffled or not.

    Parameters
    ----------
    paths
        Files, and folders of them.
    kind
        The kind of the files.
    **options
        As for `ArraySource`.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, kind: ArrayKind = NPY, **options: Any) -> None:
        super().__init__([ArrayAt(path, kind.read_header(path)) for path in kind.expand(paths)], kind.name, **options)


class _Part(NamedTuple):
    """A part of a file: the documents that begin in it are a group."""

    start: int
    stop: int
    row: int  # of the first document that begins in it, counted from 1


class CutSource(DocumentSource):
    """1-D arrays, cut into documents at a boundary token, which is the last one of each, or the first one.

    Tokens before the first boundary token, or after the last one, are a document without one.

    Parameters
    ----------
    paths
        Files, and folders of them.
    options
        The boundary token, its side, and the size of the vocabulary.
    dtype
        The dtype; "auto": the smaller one if the files or the size of the vocabulary prove it.
    kind
        The kind of the files.
    """

    tokenizer = ""
    has_ids = False

    def __init__(self, paths: list[Path], options: InputOptions, dtype: str = "auto", kind: ArrayKind = NPY) -> None:
        self.paths = kind.expand(paths)
        self._boundary = options.boundary
        self.boundary_token_id = options.boundary_token_id or 0
        self.vocab_size = options.vocab_size
        self._files = []
        for path in self.paths:
            header = kind.read_header(path)
            if len(header[0]) != 1:
                raise ConvertError(
                    f"{path}: expected a 1-D stream of tokens, found shape {header[0]}; {kind.name}-to-hdf5 takes "
                    "records"
                )
            self._files.append(ArrayAt(path, header))
        require_one_dtype([(file.path, file.dtype) for file in self._files], paths)
        is_auto = dtype == "auto"
        self.dtype = stored_dtype(fitting_dtype(self._files, self.vocab_size) if is_auto else dtype)
        self._parts = [self._parts_of(number) for number in range(len(self._files))]
        self.groups = [
            DocumentGroup(number, group, size, size)
            for number, parts in enumerate(self._parts)
            for group, part in enumerate(parts)
            for size in [(part.stop - part.start) * self._files[number].dtype.itemsize]
        ]
        self.description = {
            "format": kind.name,
            "files": [str(path) for path in self.paths],
            "boundary_token_id": self.boundary_token_id,
            "boundary": self._boundary,
        }
        self.identity: dict[str, Any] = {"dtype": self.dtype.name, "vocab_size": self.vocab_size}

    def _parts_of(self, number: int) -> list[_Part]:
        """Cut a file into groups. A large one is read for it: documents are known by their rows in the file."""
        num_tokens = self._files[number].num_tokens
        parts: list[_Part] = []
        row = 1
        for start in range(0, max(1, num_tokens), PART_TOKENS):
            parts.append(_Part(start, min(start + PART_TOKENS, num_tokens), row))
            if parts[-1].stop < num_tokens:
                row += sum(map(len, self._starts(number, start, parts[-1].stop)))
        return parts

    def _starts(self, number: int, start: int, stop: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the first tokens of the documents that begin in a part of a file, those of a block at once."""
        tokens = self._files[number].map()
        shift = int(self._boundary == "after")
        for block in range(start, stop, BLOCK_TOKENS):
            first = max(block, 1)  # token 0 begins a document, whatever it is
            end = min(block + BLOCK_TOKENS, stop)
            found = np.flatnonzero(tokens[first - shift : end - shift] == self.boundary_token_id) + first
            yield found if block else np.concatenate([[0], found])

    def read(self, group: DocumentGroup, choose: Choose | None, num_threads: int) -> Iterator[Encoded]:
        file = self._files[group.file_number]
        part = self._parts[group.file_number][group.number]
        tokens = file.map()
        first = part.row
        for edges in self._edges(group.file_number, part):
            start = int(edges[0])
            stop = int(edges[-1])
            lengths = np.diff(edges)
            rows = np.arange(first, first + len(lengths), dtype=np.uint64)
            first += len(lengths)
            chosen = tokens[start:stop]
            if choose is not None:
                wanted = choose(len(lengths))
                chosen = chosen[np.repeat(wanted, lengths)]
                lengths = lengths[wanted]
                rows = rows[wanted]
            yield Encoded(chosen, lengths, str(file.path), rows, read=(stop - part.start) * file.dtype.itemsize)

    def _edges(self, number: int, part: _Part) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the starts of documents that begin in a part and end in one block, and the end of the last of them."""
        begun = np.empty(0, np.int64)
        for starts in self._starts(number, part.start, part.stop):
            edges = np.concatenate([begun, starts])
            if len(edges) > 1:
                yield edges
            begun = edges[-1:]
        if len(begun):
            num_tokens = self._files[number].num_tokens
            later = (int(starts[0]) for starts in self._starts(number, part.stop, num_tokens) if len(starts))
            yield np.append(begun, next(later, num_tokens))


def open_arrays(paths: list[Path], settings: Settings, kind: ArrayKind = NPY) -> BatchSource:
    """Open files of arrays as batches, as a conversion asks; its target decides the dtype of "auto"."""
    files = kind.expand(paths)
    return arrays_of_splits(files, files, settings, partial(NpySource, kind=kind), array_options(settings))


def open_cut(paths: list[Path], settings: Settings) -> CutSource:
    """Open files of arrays as documents, as a conversion asks."""
    source = CutSource(paths, settings.input, settings.target.dtype)
    source.splits = told_splits(source, settings)
    return source
