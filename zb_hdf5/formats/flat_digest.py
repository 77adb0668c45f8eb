"""The digests that were made of one file of ids, which holds none."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ChecksumError


class FlatDigest(NamedTuple):
    """The digests of one flat file, over its ids as it has them.

    Attributes
    ----------
    num_bytes
        The size of the file.
    dtype
        The dtype of an id in the file, as numpy spells it: "<u2".
    num_tokens
        Its ids.
    sha256
        The digest of the bytes of all ids.
    documents_sha256
        The digest of `FlatFormat.document_offsets`, as u8; "" if the file counts as one document.
    crc32
        The crc32 of each chunk of the stream, in `CRC32_DIGITS` hexadecimal digits, one after the other.
    """

    num_bytes: int
    dtype: str
    num_tokens: int
    sha256: str
    documents_sha256: str
    crc32: str

    def rows(self) -> npt.NDArray[np.uint32]:
        """Return the crc32 of each chunk."""
        return np.frombuffer(bytes.fromhex(self.crc32), ">u4").astype("<u4")

    def require_documents(self, path: Path, offsets: npt.NDArray[np.uint64]) -> None:
        """Raise `ChecksumError` unless the documents of the file at a path are those that were digested."""
        found = documents_sha256(offsets)
        if self.documents_sha256 not in ("", found):
            raise ChecksumError(
                f"{path}: its documents are others: expected sha256 {self.documents_sha256}, found {found}; restore "
                "the file that has them"
            )


def documents_sha256(offsets: npt.NDArray[np.uint64]) -> str:
    """Return the sha256 of the offsets of documents, shape (D + 1,), as u8."""
    return hashlib.sha256(np.ascontiguousarray(offsets, "<u8")).hexdigest()
