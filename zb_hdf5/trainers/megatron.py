"""Megatron-LM's indexed datasets, which NeMo and GPT-NeoX use too: `.bin` has the ids, `.idx` the documents.

The layout of `.idx`, little-endian: magic, version u8, code of the dtype u1, sequences N u8, edges of documents u8;
then the length of each sequence i4 [N], its byte offset in `.bin` i8 [N], and the edges of the documents in sequences,
i8 [D + 1]. A multimodal file has the mode of each sequence after them, i1 [N]. Source: `megatron.core.datasets`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.errors import ConvertError, FormatError, IncompleteError
from zb_hdf5.files.paths import regular
from zb_hdf5.formats.document_writer import FlatWriter, small_dtype
from zb_hdf5.formats.flat import FlatFormat, FlatTokens
from zb_hdf5.spec import StoreMeta

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
#: Magic, version, code of the dtype, number of sequences, number of edges of documents.
HEADER: Final = struct.Struct("<9sQBQQ")
#: Code -> dtype of the ids; the codes 6 and 7 are of floats.
ID_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
#: Bytes of a sequence in `.idx`: its length and its offset.
SEQUENCE_BYTES: Final = 12
EDGE_BYTES: Final = 8
#: Ids of a vocabulary of at most this size become uint16, as Megatron decides.
SMALL_VOCAB_SIZE: Final = 65_499
#: Ids of a sequence at most.
MAX_LENGTH: Final = 2**31 - 1
#: Rows of an `.idx` that are computed at once.
ROWS_AT_ONCE: Final = 1 << 20


class _Index(NamedTuple):
    """The header of an `.idx`, whose size fits it."""

    path: Path
    dtype: np.dtype[Any]
    num_sequences: int
    num_edges: int

    @property
    def offsets_at(self) -> int:
        """The first byte of the offsets of the sequences."""
        return HEADER.size + 4 * self.num_sequences

    @property
    def edges_at(self) -> int:
        """The first byte of the edges of the documents."""
        return HEADER.size + SEQUENCE_BYTES * self.num_sequences


class Megatron(FlatFormat):
    """`.bin` and `.idx` files of Megatron-LM. A document may have several sequences, whose ids follow each other."""

    sign: ClassVar = "an .idx beside it that begins with MMIDIDX"

    def files(self, path: Path) -> list[Path]:
        """Return the `.bin` files: an `.idx` stands for the one beside it."""
        return super().files(path.with_suffix(".bin") if path.suffix == ".idx" else path)

    def recognises(self, path: Path) -> bool:
        try:
            with open(path.with_suffix(".idx"), "rb", opener=regular) as file:
                return file.read(len(MAGIC)) == MAGIC
        except FileNotFoundError:
            return False

    def look(self, path: Path) -> FlatTokens:
        index = _read_header(path.with_suffix(".idx"))
        num_documents = index.num_edges - 1
        end = 0
        with open(index.path, "rb", opener=regular) as file:
            if index.num_sequences:
                file.seek(index.offsets_at - 4)
                length = int.from_bytes(file.read(4), "little", signed=True)
                file.seek(index.edges_at - 8)
                offset = int.from_bytes(file.read(8), "little", signed=True)
                end = offset + length * index.dtype.itemsize
                if length < 0 or offset < 0:
                    raise FormatError(
                        f"{index.path}: expected the last sequence in {path.name}, found {length:,} ids at byte "
                        f"{offset:,}"
                    )
            file.seek(index.edges_at)
            first_edge = int.from_bytes(file.read(EDGE_BYTES), "little", signed=True)
            file.seek(index.edges_at + num_documents * EDGE_BYTES)
            last_edge = int.from_bytes(file.read(EDGE_BYTES), "little", signed=True)
        if (first_edge, last_edge) != (0, index.num_sequences):
            raise FormatError(
                f"{index.path}: expected documents from sequence 0 to {index.num_sequences:,}, found {first_edge:,} to "
                f"{last_edge:,}"
            )
        num_bytes = path.stat().st_size
        if num_bytes != end:
            raise IncompleteError(
                f"{path}: expected {end:,} bytes, as {index.path.name} has it, found {num_bytes:,}: it was cut short, "
                "or belongs to another index"
            )
        return FlatTokens(path, end // index.dtype.itemsize, index.dtype, num_documents=num_documents)

    def beside(self, path: Path) -> list[Path]:
        return [path.with_suffix(".idx")]

    def document_offsets(self, found: FlatTokens) -> npt.NDArray[np.uint64]:
        index = _read_header(found.path.with_suffix(".idx"))
        with open(index.path, "rb", opener=regular) as file:
            file.seek(HEADER.size)
            lengths = np.fromfile(file, "<i4", index.num_sequences)
            offsets = np.fromfile(file, "<i8", index.num_sequences)
            edges = np.fromfile(file, "<i8", index.num_edges)
        ends = np.zeros(index.num_sequences + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        is_whole = (lengths >= 0).all() and np.array_equal(offsets, ends[:-1] * index.dtype.itemsize)
        if not is_whole or ends[-1] != found.num_tokens:
            raise FormatError(f"{index.path}: expected sequences that follow each other in {found.path.name}")
        if (np.diff(edges) < 0).any():
            raise FormatError(f"{index.path}: expected edges of documents that ascend, found others")
        starts: npt.NDArray[np.uint64] = ends[edges].astype(np.uint64)
        return starts


def _read_header(path: Path) -> _Index:
    """Return the header of an `.idx`. Raises as `FlatFormat.look`."""
    with open(path, "rb", opener=regular) as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise IncompleteError(f"{path}: expected a header of {HEADER.size} bytes, found {len(head)}")
    magic, version, code, num_sequences, num_edges = HEADER.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise FormatError(f"{path}: expected an index of Megatron, version {VERSION}, found {head[:17]!r}")
    if code not in ID_DTYPES:
        raise FormatError(
            f"{path}: expected ids of a dtype with code {', '.join(map(str, ID_DTYPES))}, found code {code}"
        )
    if num_edges < 1:
        raise FormatError(f"{path}: expected the edges of its documents, found none")
    index = _Index(path, ID_DTYPES[code], num_sequences, num_edges)
    end = index.edges_at + num_edges * EDGE_BYTES
    num_bytes = path.stat().st_size
    if num_bytes == end + num_sequences and num_sequences:
        raise FormatError(f"{path}: has the mode of each sequence: multimodal data are not read")
    if num_bytes != end:
        raise IncompleteError(
            f"{path}: expected {end:,} bytes for {num_sequences:,} sequences and {num_edges - 1:,} documents, found "
            f"{num_bytes:,}"
        )
    return index


class MegatronWriter(FlatWriter):
    """Writes a `.bin` and its `.idx`: each document is one sequence."""

    backend: ClassVar = "megatron"
    suffix: ClassVar = ".bin"

    @classmethod
    def dtype_of(cls, meta: StoreMeta) -> np.dtype[Any]:
        """Return the dtype that Megatron itself takes: it has no uint32."""
        is_small = small_dtype(meta, SMALL_VOCAB_SIZE).itemsize == 2
        return np.dtype("<u2" if is_small else "<i4")

    @classmethod
    def files(cls, path: Path, meta: StoreMeta) -> list[Path]:
        return [path, path.with_suffix(".idx")]

    def _begin(self) -> None:
        self._others[0].num_bytes = HEADER.size

    def _take_documents(
        self,
        lengths: npt.NDArray[np.int64],
        fields: Mapping[str, npt.NDArray[Any]],
        documents: DocumentRows,
    ) -> None:
        longest = int(lengths.max(initial=0))
        if longest > MAX_LENGTH:
            raise ConvertError(
                f"{self.path}: expected documents of at most {MAX_LENGTH:,} ids, which an .idx can hold, found one of "
                f"{longest:,}"
            )
        self._others[0].append(lengths.astype("<i4"))

    def _complete(self) -> None:
        """Write the header, and what follows from the lengths, which are in the file already."""
        index = self._others[0]
        count = self.document_count
        end = 0
        for first in range(0, count, ROWS_AT_ONCE):
            size = min(ROWS_AT_ONCE, count - first)
            lengths = np.frombuffer(os.pread(index.file.fd, 4 * size, HEADER.size + 4 * first), "<i4")
            ends = end + np.cumsum(lengths, dtype=np.int64)
            index.append(((ends - lengths) * self.dtype.itemsize).astype("<i8"))
            end = int(ends[-1])
        for first in range(0, count + 1, ROWS_AT_ONCE):
            index.append(np.arange(first, min(first + ROWS_AT_ONCE, count + 1), dtype="<i8"))
        code = next(code for code, dtype in ID_DTYPES.items() if dtype == self.dtype)
        index.write_at(0, HEADER.pack(MAGIC, VERSION, code, count, count + 1))
