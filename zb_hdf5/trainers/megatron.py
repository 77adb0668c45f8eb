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
from zb_hdf5.files.identity import FileIdentity, require_unreplaced
from zb_hdf5.files.look import Look
from zb_hdf5.files.signatures import MEGATRON_MAGIC
from zb_hdf5.formats.document_writer import FlatWriter, small_dtype
from zb_hdf5.formats.flat import FlatCorpus, FlatFormat, require_few_empty
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.spec import MEGATRON_INDEX_SUFFIX, StoreMeta

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
#: The header of fairseq, which counts no edges, and the dtypes of its codes.
FAIRSEQ_HEADER: Final = struct.Struct("<9sQBQ")
FAIRSEQ_DTYPES: Final = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    8: "uint16",
    9: "uint32",
    10: "uint64",
}
#: The length of a sequence, and the edge of a document.
LENGTH: Final = struct.Struct("<i")
EDGE: Final = struct.Struct("<q")
#: The offset of the last sequence, and the first edge, which follows it.
OFFSET_AND_EDGE: Final = struct.Struct("<qq")
#: Ids of a vocabulary of at most this size become uint16, as Megatron decides.
SMALL_VOCAB_SIZE: Final = 65_499
#: Ids of a sequence at most.
MAX_LENGTH: Final = 2**31 - 1
#: Sequences whose order is checked at once: so few that they stay in the cache of a core.
ROWS_CHECKED: Final = 1 << 14
#: Indexes whose order was checked, at most: they are kept by their paths and identities.
MAX_IN_ORDER: Final = 4096
_in_order: set[tuple[str, FileIdentity]] = set()
#: Rows of an `.idx` that are computed at once.
ROWS_AT_ONCE: Final = 1 << 20


def fairseq_dtype(index: Look) -> str:
    """Return the dtype of ids that an index of fairseq has; "" for another index. Its magic is that of Megatron.

    It has a length and an offset of each sequence, and no documents.
    """
    if len(index.start) < FAIRSEQ_HEADER.size:
        return ""
    _, version, code, num_sequences = FAIRSEQ_HEADER.unpack_from(index.start)
    is_whole = index.num_bytes == FAIRSEQ_HEADER.size + num_sequences * (LENGTH.size + EDGE.size)
    return FAIRSEQ_DTYPES.get(code, "") if version == VERSION and is_whole else ""


class _Index(NamedTuple):
    """An `.idx` that is looked at, whose size fits its header."""

    look: Look
    dtype: np.dtype[Any]
    num_sequences: int
    num_edges: int

    @property
    def offsets_at(self) -> int:
        """The first byte of the offsets of the sequences."""
        return HEADER.size + LENGTH.size * self.num_sequences

    @property
    def edges_at(self) -> int:
        """The first byte of the edges of the documents."""
        return HEADER.size + (LENGTH.size + EDGE.size) * self.num_sequences

    @property
    def path(self) -> Path:
        """Its path."""
        return self.look.path

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return self.path.name

    def end_of_ids(self) -> int:
        """Return the byte of `.bin` at which the last sequence ends, from the ends of each table.

        Raises
        ------
        FormatError
            If that is nowhere, or the documents do not have all sequences.
        """
        length = 0
        if self.num_sequences:
            (length,) = LENGTH.unpack(self.look.read(LENGTH.size, self.offsets_at - LENGTH.size))
        edges_at = self.edges_at
        offset, first = OFFSET_AND_EDGE.unpack(self.look.read(OFFSET_AND_EDGE.size, edges_at - EDGE.size))
        (last,) = EDGE.unpack(self.look.read(EDGE.size, edges_at + (self.num_edges - 1) * EDGE.size))
        if (first, last) != (0, self.num_sequences):
            raise FormatError(
                f"{self.path}: expected documents from sequence 0 to {self.num_sequences:,}, found {first:,} to "
                f"{last:,}"
            )
        if not self.num_sequences:
            return 0
        if length < 0 or offset < 0:
            raise FormatError(
                f"{self.path}: expected the last sequence in its .bin, found {length:,} ids at byte {offset:,}"
            )
        return int(offset + length * self.dtype.itemsize)

    def require_rows(self, first: int, count: int, start: int) -> int:
        """Return the byte at which a run of sequences ends; `FormatError` unless each begins where the last one ends.

        Parameters
        ----------
        first, count
            The sequences.
        start
            The byte at which the first one has to begin.
        """
        lengths = np.frombuffer(self.look.read(LENGTH.size * count, HEADER.size + LENGTH.size * first), "<i4")
        offsets = np.frombuffer(self.look.read(EDGE.size * count, self.offsets_at + EDGE.size * first), "<i8")
        ends = lengths * np.int64(self.dtype.itemsize)
        ends += offsets
        expected = np.concatenate([np.array([start]), ends[:-1]])
        if not np.array_equal(offsets, expected) or lengths.min() < 0:
            is_bad = (offsets != expected) | (lengths < 0)
            number = int(np.flatnonzero(is_bad)[0])
            raise FormatError(
                f"{self.path}: expected sequences that follow each other from the first id of its .bin to the last, "
                f"found sequence {first + number:,} of {lengths[number]:,} ids at byte {offsets[number]:,}, after one "
                f"that ends at {expected[number]:,}: a part of a file, or another order, is not read; restore the "
                "index that was written with it"
            )
        return int(ends[-1])


class Megatron(FlatFormat):
    """`.bin` and `.idx` files of Megatron-LM. A document may have several sequences, whose ids follow each other."""

    sign: ClassVar = "an .idx beside it that begins with MMIDIDX"

    def files(self, look: Look) -> list[str]:
        """Return the `.bin` files: an `.idx` stands for the one beside it."""
        path = look.path
        if path.suffix.lower() == MEGATRON_INDEX_SUFFIX:
            look = look.of(path.with_suffix(".BIN" if path.suffix.isupper() else ".bin"))
        return super().files(look)

    def fits(self, look: Look) -> bool:
        index = look.of(_index_of(look.text))
        try:
            return index.start.startswith(MEGATRON_MAGIC) and not fairseq_dtype(index)
        except FileNotFoundError:
            return False

    def facts(self, look: Look) -> FlatFacts:
        path = look.text
        name = _index_of(look.text)
        index = _index_at(look.of(name), path)
        end = index.end_of_ids()
        try:
            num_bytes = look.num_bytes
        except FileNotFoundError as error:
            raise IncompleteError(f"{path}: expected the ids of {index.name} in it, found no file") from error
        if num_bytes != end:
            raise IncompleteError(
                f"{path}: expected {end:,} bytes, as {index.name} has it, found {num_bytes:,}: it was cut short, or "
                "belongs to another index"
            )
        num_tokens = end // index.dtype.itemsize
        require_few_empty(name, index.num_sequences, "sequences", num_tokens)
        require_few_empty(name, index.num_edges - 1, "documents", num_tokens)
        return FlatFacts(
            path,
            num_tokens,
            index.dtype,
            num_documents=index.num_edges - 1,
            identity=look.identity,
            documents_identity=index.look.identity,
            documents=index.look.kept_unread(),
        )

    def sidecars(self, path: Path) -> list[Path]:
        return [Path(_index_of(path))]

    def open(self, file: FoundFile) -> FlatCorpus:
        _require_in_order(file.of_stream[0])
        return super().open(file)

    def document_offsets(self, found: FlatFacts) -> npt.NDArray[np.uint64]:
        _require_in_order(found)
        with found.look_at_documents(_index_of(found.text)) as look:
            index = _index_at(look, found.text)
            lengths = np.frombuffer(look.read(LENGTH.size * index.num_sequences, HEADER.size), "<i4")
            edges = np.frombuffer(look.read(EDGE.size * index.num_edges, index.edges_at), "<i8")
        ends = np.zeros(index.num_sequences + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        if ends[-1] != found.num_tokens:
            raise FormatError(
                f"{index.path}: expected {found.num_tokens:,} ids, as before, found {ends[-1]:,}: it changed"
            )
        if (edges[1:] < edges[:-1]).any():  # `np.diff` would wrap
            raise FormatError(f"{index.path}: expected edges of documents that ascend, found others")
        starts: npt.NDArray[np.uint64] = ends[edges].astype(np.uint64)
        return starts


def _index_of(path: str | Path) -> str:
    """Return the path of the `.idx` beside a file of ids, as text: a folder has thousands of them."""
    name = os.fspath(path)
    if name.endswith(".BIN"):
        return f"{name[:-4]}{MEGATRON_INDEX_SUFFIX.upper()}"
    return f"{name[:-4] if name.lower().endswith('.bin') else name}{MEGATRON_INDEX_SUFFIX}"


def _require_in_order(found: FlatFacts) -> None:
    """Raise `FormatError` if the index of a file of ids was replaced, or names a part of the file, or another order.

    That takes 4 ns for each sequence, and is done before ids are read: the facts have only the ends of the tables. It
    is done once for each file that an index is.
    """
    name = _index_of(found.text)
    known = name, require_unreplaced(name, found.documents_identity)
    if known in _in_order:
        return
    with found.look_at_documents(name) as look:
        index = _index_at(look, found.text)
        end = 0
        for first in range(0, index.num_sequences, ROWS_CHECKED):
            end = index.require_rows(first, min(ROWS_CHECKED, index.num_sequences - first), end)
    if len(_in_order) >= MAX_IN_ORDER:
        _in_order.clear()
    _in_order.add(known)


def _index_at(look: Look, ids: str) -> _Index:
    """Return the `.idx` of a file of ids, whose size fits its header. Raises as `FlatFormat.facts`."""
    try:
        head = look.start[: HEADER.size]
    except FileNotFoundError as error:
        raise FormatError(
            f"{ids}: expected an .idx file next to the .bin file, found none; "
            "restore it, or move this one to another folder"
        ) from error
    num_bytes = look.num_bytes
    if len(head) < HEADER.size:
        raise IncompleteError(f"{look.path}: expected a header of {HEADER.size} bytes, found {len(head)}")
    magic, version, code, num_sequences, num_edges = HEADER.unpack(head)
    if magic != MEGATRON_MAGIC or version != VERSION:
        raise FormatError(f"{look.path}: expected an index of Megatron, version {VERSION}, found {head[:17]!r}")
    if code not in ID_DTYPES:
        raise FormatError(
            f"{look.path}: expected ids of a dtype with code {', '.join(map(str, ID_DTYPES))}, found code {code}"
        )
    if num_edges < 1:
        raise FormatError(f"{look.path}: expected the edges of its documents, found none")
    index = _Index(look, ID_DTYPES[code], num_sequences, num_edges)
    end = index.edges_at + num_edges * EDGE.size
    if num_bytes == end + num_sequences and num_sequences:
        raise FormatError(f"{look.path}: has the mode of each sequence: multimodal data are not read")
    if num_bytes != end:
        raise IncompleteError(
            f"{look.path}: expected {end:,} bytes for {num_sequences:,} sequences and {num_edges - 1:,} documents, "
            f"found {num_bytes:,}"
        )
    return index


class MegatronWriter(FlatWriter):
    """Writes a `.bin` and its `.idx`: each document is one sequence."""

    backend: ClassVar = "megatron"
    suffix: ClassVar = ".bin"

    @classmethod
    def dtype_of(cls, meta: StoreMeta) -> np.dtype[Any]:
        """Return the dtype that Megatron itself takes: it has no uint32, and never chooses uint8."""
        if meta.dtype.itemsize == 1:
            return meta.dtype
        is_small = small_dtype(meta, SMALL_VOCAB_SIZE).itemsize == 2
        return np.dtype("<u2" if is_small else "<i4")

    @classmethod
    def files(cls, path: Path, meta: StoreMeta) -> list[Path]:
        return [path, *cls.sidecars(path)]

    @classmethod
    def sidecars(cls, path: Path) -> list[Path]:
        return [path.with_suffix(MEGATRON_INDEX_SUFFIX)]

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
        index.write_at(0, HEADER.pack(MEGATRON_MAGIC, VERSION, code, count, count + 1))
