"""datatrove's token files, which nanotron reads: `.ds` has the ids, `.ds.index` the ends of the documents.

The ends are counted in ids, u8 [D]. `.ds.metadata` names the tokenizer and the bytes of an id, and `.ds.loss` has a
loss mask of one byte for each id. Files have no magic: the bytes of an id follow from the two sizes. Source:
`datatrove.pipeline.tokens`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.errors import ConvertError, FormatError, IncompleteError
from zb_hdf5.field import LOSS_MASK, Field
from zb_hdf5.files.identity import require_unreplaced
from zb_hdf5.files.listing import may_have
from zb_hdf5.files.look import Look
from zb_hdf5.formats.document_writer import FlatWriter
from zb_hdf5.formats.flat import LOSS_FIELD, FlatFormat, require_few_empty, require_mask
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.spec import StoreMeta
from zb_hdf5.text.tokenizers import tokenizer_named

#: Bytes of an id -> dtype.
DTYPE_BY_BYTES: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
END_BYTES: Final = 8
INDEX_SUFFIX: Final = ".index"
METADATA_SUFFIX: Final = ".metadata"
LOSS_SUFFIX: Final = ".loss"
#: The bytes of metadata that are read, and the bytes of an id and the number of ids in them.
METADATA_BYTES: Final = 4096
METADATA: Final = re.compile(rb"[^\n]*\|(\d{1,2})\n(\d{1,18})(?:\n|$)")
UNKNOWN_TOKENIZER: Final = "Unknown Tokenizer"
UNIT_PREFIXES: Final = ("", "k", "M", "G", "T", "P", "E")


class Datatrove(FlatFormat):
    """`.ds` files of datatrove, each with its `.ds.index`."""

    sign: ClassVar = "a .ds.index beside it"

    def fits(self, look: Look) -> bool:
        """Return whether it ends as nothing else does; `facts` names what is missing."""
        return look.text.lower().endswith(self.suffixes[0])

    def facts(self, look: Look) -> FlatFacts:
        return self._facts(look, may_have_loss=True)

    def facts_of(self, look: Look, files: Sequence[str]) -> tuple[FlatFacts, ...]:
        """See `FlatFormat`. Of thousands of files none is asked for its loss mask where the listing has not one."""
        may_have_loss = not look.is_dir or may_have(look, LOSS_SUFFIX)
        return tuple(self._facts(each, may_have_loss=may_have_loss) for each in look.each(files))

    def _facts(self, look: Look, *, may_have_loss: bool) -> FlatFacts:
        path = look.text
        index = f"{look.text}{INDEX_SUFFIX}"
        ends = look.of(index)
        try:
            last = ends.last(END_BYTES)
        except FileNotFoundError as error:
            name = os.path.basename(index)
            raise IncompleteError(f"{path}: expected the ends of documents in {name}, found no file") from error
        num_documents, rest = divmod(ends.num_bytes, END_BYTES)
        if rest:
            raise IncompleteError(
                f"{index}: expected {END_BYTES} bytes for each document, found {ends.num_bytes:,} bytes"
            )
        num_tokens = int.from_bytes(last, "little")
        require_few_empty(index, num_documents, "documents", num_tokens)
        size = look.num_bytes
        for itemsize, dtype in DTYPE_BY_BYTES.items():
            if size == num_tokens * itemsize:
                _require_metadata(look, num_tokens, itemsize)
                fields = _fields_of(look.text, num_tokens) if may_have_loss else ()
                return FlatFacts(
                    path,
                    num_tokens,
                    dtype,
                    num_documents=num_documents,
                    fields=fields,
                    identity=look.identity,
                    documents_identity=ends.identity,
                    documents=ends.kept_unread(),
                )
        raise IncompleteError(
            f"{path}: expected {num_tokens:,} ids of 2 or 4 bytes, as {os.path.basename(index)} has it, found "
            f"{size:,} bytes: it was cut short, or belongs to another index"
        )

    def file_of_field(self, path: Path, name: str) -> Path:
        return path.with_name(f"{path.name}{LOSS_SUFFIX}")

    def sidecars(self, path: Path) -> list[Path]:
        return sorted(file for file in path.parent.glob(f"{escape(path.name)}.*") if file.is_file())

    def document_offsets(self, found: FlatFacts) -> npt.NDArray[np.uint64]:
        index = f"{found.text}{INDEX_SUFFIX}"
        known = require_unreplaced(index, found.documents_identity)
        with found.look_at_documents(index) as look:
            ends = np.frombuffer(look.read(known.num_bytes, 0), "<u8")
        offsets = np.concatenate([np.zeros(1, np.uint64), ends])
        if int(offsets[-1]) != found.num_tokens or (offsets[1:] < offsets[:-1]).any():
            raise FormatError(f"{index}: expected ends of documents that ascend to {found.num_tokens:,}, found others")
        return offsets


def _require_metadata(look: Look, num_tokens: int, itemsize: int) -> None:
    """Raise `FormatError` if the metadata of a file have other bytes of an id, or another number of ids.

    An index that was cut at half of its end fits ids of twice as many bytes. Files without metadata are read by their
    sizes alone.
    """
    metadata = f"{look.text}{METADATA_SUFFIX}"
    try:
        found = METADATA.match(look.of(metadata).read(METADATA_BYTES, 0))
    except FileNotFoundError:
        return
    if found is None:
        return
    bytes_of_id, count = int(found[1]), int(found[2])
    if (bytes_of_id, count) != (itemsize, num_tokens):
        raise FormatError(
            f"{look.path}: expected {count:,} ids of {bytes_of_id} bytes, as {os.path.basename(metadata)} has it, "
            f"found {num_tokens:,} of {itemsize} by its index: one of them was cut short, or belongs to another file"
        )


def _fields_of(path: str, num_tokens: int) -> tuple[Field, ...]:
    """Return the loss mask of a file, if it has one."""
    loss = f"{path}{LOSS_SUFFIX}"
    try:
        require_mask(loss, num_tokens)
    except FileNotFoundError:
        return ()
    return (LOSS_FIELD,)


class DatatroveWriter(FlatWriter):
    """Writes a `.ds` with its index, its metadata and, where there is a field `loss_mask`, its loss mask."""

    backend: ClassVar = "datatrove"
    suffix: ClassVar = ".ds"

    @classmethod
    def files(cls, path: Path, meta: StoreMeta) -> list[Path]:
        index, metadata, loss = cls.sidecars(path)
        return [path, index, metadata, loss] if meta.fields else [path, index, metadata]

    @classmethod
    def sidecars(cls, path: Path) -> list[Path]:
        return [path.with_name(path.name + ending) for ending in (INDEX_SUFFIX, METADATA_SUFFIX, LOSS_SUFFIX)]

    def _take_documents(
        self,
        lengths: npt.NDArray[np.int64],
        fields: Mapping[str, npt.NDArray[Any]],
        documents: DocumentRows,
    ) -> None:
        ends = self.token_count - int(lengths.sum()) + np.cumsum(lengths)
        self._others[0].append(ends.astype("<u8"))
        for values in fields.values():
            mask = values.astype("u1")
            if values.shape != (int(lengths.sum()),) or (mask != values).any() or mask.max(initial=0) > 1:
                raise ConvertError(f"{self.path}: expected a {LOSS_MASK} of one 0 or 1 for each id, found others")
            self._others[2].append(mask)

    def _complete(self) -> None:
        tokenizer = str(tokenizer_named(self.meta.tokenizer).get("name", UNKNOWN_TOKENIZER)).replace("|", " ")
        lines = [f"{tokenizer}|{self.dtype.itemsize}", str(self.token_count), f"{_in_metric(self.token_count)}T"]
        self._others[1].append("\n".join(lines).encode())


def _in_metric(count: int) -> str:
    """Return three digits of a count and the prefix of its unit, as datatrove writes them."""
    exponent = len(str(count)) - 1
    value = count / 1000 ** (exponent // 3)
    if round(value, 2 - exponent % 3) >= 10 ** (exponent % 3 + 1):  # 999,999 is 1.00 M
        exponent += 1
        value = count / 1000 ** (exponent // 3)
    return f"{value:.{2 - exponent % 3}f} {UNIT_PREFIXES[exponent // 3]}"
