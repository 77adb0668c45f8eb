"""1-D arrays of tokens as a source of documents: a boundary token ends, or begins, each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError
from zb_hdf5.converters.documents import Choose, DocumentSource, Encoded, Group
from zb_hdf5.converters.npy_source import NpyFile, expand
from zb_hdf5.converters.options import Conversion
from zb_hdf5.formats.batch_reader import require_choice
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.spec import TokenArray, stored_dtype

#: The place of the boundary token in its document.
BOUNDARIES: Final = ("behind", "front")
#: Tokens that are looked at together; documents that end in them are written together.
BLOCK_TOKENS: Final = 1 << 22


class CutSource(DocumentSource):
    """1-D `.npy` files, cut into documents at a boundary token. See `DocumentSource`.

    Parameters
    ----------
    boundary_token_id
        The token that stands once in each document, and nowhere else.
    boundary
        "behind": it is the last token of a document; "front": the first one. Tokens before the first boundary token,
        or behind the last one, are a document without one.
    dtype
        "uint16", "uint32", or "auto": uint16 where the dtype of the files or `vocab_size` shows that every id fits.
    vocab_size
        If known (not 0), larger ids are refused.

    Raises
    ------
    ArgumentError, ConvertError
        If a file has another shape, or an option is impossible.
    """

    tokenizer, has_ids = "", False

    def __init__(
        self, paths: list[Path], boundary_token_id: int, boundary: str = "behind", dtype: str = "auto",
        vocab_size: int = 0,
    ) -> None:  # fmt: skip
        require_choice("boundary", boundary, BOUNDARIES)
        require_choice("dtype", dtype, ("auto", "uint16", "uint32"))
        if boundary_token_id < 0:
            raise ArgumentError(f"boundary_token_id: expected the id of a token, found {boundary_token_id}")
        self.paths, self.boundary_token_id, self._boundary = paths, boundary_token_id, boundary
        self._files = [_open(path) for path in paths]
        small = all(file.dtype.kind == "u" and file.dtype.itemsize <= 2 for file in self._files)
        fitting = "uint16" if small or 0 < vocab_size <= 2**16 else "uint32"
        self.dtype, self.vocab_size = stored_dtype(fitting if dtype == "auto" else dtype), vocab_size
        sizes = [file.num_tokens * file.dtype.itemsize for file in self._files]
        self.groups = [Group(number, 0, size, size) for number, size in enumerate(sizes)]
        how = {"boundary_token_id": boundary_token_id, "boundary": boundary}
        self.description = {"format": "npy", "files": [str(path) for path in paths], **how}
        self.identity: dict[str, Any] = {"dtype": self.dtype.name, "vocab_size": vocab_size}

    def read(self, group: Group, choose: Choose | None, num_threads: int) -> Iterator[Encoded]:
        file, first = self._files[group.file_number], 1
        tokens: TokenArray = np.empty(0, file.dtype)
        if file.num_tokens:
            tokens = np.memmap(file.path, file.dtype, "r", file.byte_offset, file.shape)
        for start, lengths in cut(tokens, self.boundary_token_id, self._boundary):
            stop = start + int(lengths.sum())
            rows = np.arange(first, first + len(lengths), dtype=np.uint64)
            first += len(lengths)
            chosen = tokens[start:stop]
            if choose is not None:
                wanted = choose(len(lengths))
                chosen, lengths, rows = chosen[np.repeat(wanted, lengths)], lengths[wanted], rows[wanted]
            yield Encoded(chosen, lengths, str(file.path), rows, read=stop * file.dtype.itemsize)


def _open(path: Path) -> NpyFile:
    shape, *_ = read_npy_header(path)
    if len(shape) != 1:
        raise ConvertError(f"{path}: expected a 1-D stream of tokens, found shape {shape}; npy-to-hdf5 takes records")
    return NpyFile.open(path, 1)


def cut(tokens: TokenArray, boundary_token_id: int, boundary: str) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield the documents of a stream, many at a time: the offset of the first one, and their lengths."""
    start = 0
    for block in range(0, len(tokens), BLOCK_TOKENS):
        found = np.flatnonzero(tokens[block : block + BLOCK_TOKENS] == boundary_token_id) + block
        edges = found if boundary == "front" else found + 1
        edges = edges[edges > start]
        if len(edges):
            yield start, np.diff(edges, prepend=start)
            start = int(edges[-1])
    if start < len(tokens):
        yield start, np.array([len(tokens) - start])


def open_cut(paths: list[Path], conversion: Conversion) -> CutSource:
    """Open `.npy` files as a conversion asks."""
    return CutSource(
        expand(paths), conversion.boundary_token_id or 0, conversion.boundary or "behind", conversion.dtype or "auto",
        conversion.vocab_size or 0,
    )  # fmt: skip
