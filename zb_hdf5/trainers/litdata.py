"""litdata's chunks of tokens: `index.json` and `chunk-*.bin`, whole or compressed; each item is a document.

A chunk, little-endian: number of items N u4; where each item begins and the last one ends, u4 [N + 1]; the ids of all
items. Read are chunks that were written for its `TokensLoader`. Source: `litdata.streaming.writer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError, IncompleteError, ZbError
from zb_hdf5.files.codecs import read_packed
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format import Found, RowsFormat
from zb_hdf5.formats.id_source import BLOCK_OF_IDS, Columns, ColumnSelection, IdFile, IdRows, IdSource
from zb_hdf5.trainers.index_folder import (
    FOLDER_INDEX,
    MAX_FILE_BYTES,
    NUMBER_BYTES,
    ZSTD,
    Entry,
    folders_of,
    indexes_of,
    read_index,
    require_codec_of,
    require_files_once,
    require_present_file,
)

#: The name of the format.
LITDATA: Final = "litdata"
LOADER: Final = "TokensLoader"
#: Numbers of dtypes of integers, for tensors and for arrays.
TENSOR_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    11: np.dtype("u1"),
    12: np.dtype("i1"),
    13: np.dtype("<i2"),
    14: np.dtype("<i2"),
    15: np.dtype("<i4"),
    16: np.dtype("<i4"),
    17: np.dtype("<i8"),
    18: np.dtype("<i8"),
    20: np.dtype("<u2"),
}
ARRAY_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("i1"),
    1: np.dtype("<i2"),
    2: np.dtype("<i4"),
    3: np.dtype("<i8"),
    4: np.dtype("u1"),
    5: np.dtype("<u2"),
    6: np.dtype("<u4"),
    7: np.dtype("<u8"),
}
#: Data formats -> numbers of their dtypes.
DATA_FORMATS: Final = {"no_header_tensor": TENSOR_DTYPES, "no_header_numpy": ARRAY_DTYPES}


class Chunk(IdFile):
    """One chunk.

    Parameters
    ----------
    entry
        Its entry in the index.
    dtype
        The dtype of its ids.
    is_packed
        Whether its file is compressed.
    """

    def __init__(self, entry: Entry, dtype: np.dtype[Any], is_packed: bool) -> None:
        path = entry.file("filename")
        self.columns = Columns("", dtype)
        self._num_items = entry.number("chunk_size")
        if entry.values.get("dim") is None:
            raise FormatError(
                f"{entry.where}: expected the number of its ids in dim, found none: it was written without "
                f"{LOADER}; write it again with optimize(..., item_loader={LOADER}())"
            )
        self._num_tokens = entry.number("dim")
        self._is_packed = is_packed
        self._num_bytes = self._start + self._num_tokens * dtype.itemsize
        if self._num_bytes > MAX_FILE_BYTES:
            raise FormatError(f"{entry.where}: expected a chunk of less than 4 GiB, found {self._num_tokens:,} ids")
        super().__init__(path, require_present_file(path))
        size = self.identity.num_bytes
        if not is_packed and size != self._num_bytes:
            raise IncompleteError(
                f"{self.path}: expected {self._num_bytes:,} bytes for {self._num_tokens:,} ids, as {FOLDER_INDEX} has "
                f"it, found {size:,}"
            )
        self.group_bytes = [self._num_bytes]

    @property
    def _start(self) -> int:
        """The first byte of the ids."""
        return NUMBER_BYTES * (self._num_items + 2)

    def _rows(self, number: int) -> Iterator[IdRows]:
        dtype = self.columns.dtype
        content = self._content()
        count = int.from_bytes(content[:NUMBER_BYTES].tobytes(), "little")
        offsets = content[NUMBER_BYTES : self._start].view("<u4").astype(np.int64)
        lengths = np.diff(offsets) // dtype.itemsize
        is_whole = not (np.diff(offsets) % dtype.itemsize).any() and (lengths >= 0).all()
        if count != self._num_items or not is_whole or (offsets[0], offsets[-1]) != (self._start, len(content)):
            raise FormatError(
                f"{self.path}: expected {self._num_items:,} items from byte {self._start:,} to {len(content):,}, as "
                f"{FOLDER_INDEX} has it, found {count:,} from {offsets[0]:,} to {offsets[-1]:,}"
            )
        tokens = content[self._start :].view(dtype)
        ends = np.cumsum(lengths)
        cuts = np.searchsorted(ends, np.arange(BLOCK_OF_IDS, len(tokens) + BLOCK_OF_IDS, BLOCK_OF_IDS))
        edges = np.unique([0, *np.minimum(cuts + 1, count).tolist(), count])
        for first, stop in pairwise(edges.tolist()):
            start = int(ends[first] - lengths[first])
            end = int(ends[stop - 1])
            yield IdRows(first + 1, tokens[start:end], lengths[first:stop], {}, read=end * dtype.itemsize)

    def _content(self) -> npt.NDArray[np.uint8]:
        if self._is_packed:
            return read_packed(self.path, ZSTD, self._num_bytes)
        return np.memmap(self.path, np.uint8, "r", shape=self._num_bytes).view(np.ndarray)


def _dtype_of(config: Entry) -> np.dtype[Any]:
    """Return the dtype of the ids; `FormatError` for chunks that have anything else."""
    loader = config.values.get("item_loader") or LOADER
    if loader != LOADER:
        raise FormatError(f"{config.where}: expected chunks of ids for {LOADER}, found items for {loader}")
    if config.values.get("encryption"):
        raise FormatError(f"{config.where}: expected chunks of ids, found encrypted ones")
    data_format = config.values.get("data_format")
    names = data_format if isinstance(data_format, list) else []
    name, _, code = str(names[0] if len(names) == 1 else "").partition(":")
    dtype = DATA_FORMATS.get(name, {}).get(int(code) if code.isascii() and code.isdigit() else -1)
    if dtype is None:
        raise FormatError(
            f"{config.where}: expected ids in one of {', '.join(DATA_FORMATS)}, with a dtype of integers, found "
            f"{data_format!r:.80}"
        )
    return dtype


def open_litdata(
    paths: Sequence[Path],
    look: Look | None = None,
    *,
    rows: str = "documents",
    dtype: str = "auto",
    vocab_size: int = 0,
    max_document_tokens: int | None = None,
) -> IdSource:
    """Open folders of litdata as documents.

    Parameters
    ----------
    paths
        The folders, each with its index, or with a folder for each split.
    look
        The look by which the first of them was found; None: it is looked at.
    rows, dtype, vocab_size, max_document_tokens
        As for `IdSource`.

    Raises
    ------
    FormatError
        If the index or a chunk is damaged, or has other items than ids.
    """
    chunks: list[Chunk] = []
    indexes: list[Path] = []
    with Look(paths[0]) if look is None else nullcontext(look) as look:
        for index in indexes_of(paths, look):
            config = index.part("config")
            codec = str(config.values.get("compression") or "")
            require_codec_of(index.where, codec)
            entries = index.parts("chunks", "chunk")
            require_files_once(entries, "filename")
            chunks += [Chunk(entry, _dtype_of(config), bool(codec)) for entry in entries]
            indexes.append(index.folder / FOLDER_INDEX)
    return IdSource(
        chunks,
        LITDATA,
        ColumnSelection(),
        rows=rows,
        dtype=dtype,
        vocab_size=vocab_size,
        max_document_tokens=max_document_tokens,
        more_paths=indexes,
    )


class LitdataFolders(RowsFormat):
    """Folders of litdata."""

    def fits(self, look: Look) -> bool:
        try:
            index = read_index(folders_of(look)[0], look).values
        except (OSError, ZbError):
            return False
        return "config" in index and "chunks" in index

    def rows(self, found: Sequence[Found], **options: Any) -> IdSource:
        return open_litdata([each.path for each in found], found[0].look, **options)
