"""A flat format: files whose ids follow each other in one dtype, which are read in place: a token stream, or records.

Such files hold no digests; they may have been made, and kept in a file of their own.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, BackendError, FormatError, IncompleteError, Remedy
from zb_hdf5.field import LOSS_MASK, Field
from zb_hdf5.files.by_columns import ByColumns
from zb_hdf5.files.checked import Crc32Rows
from zb_hdf5.files.field_files import ids_among, require_no_fields
from zb_hdf5.files.foreign_ids import ForeignIds
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.listing import listed
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT, SplitFiles
from zb_hdf5.files.ranges import Extents, Range, Run
from zb_hdf5.files.signatures import signature_of
from zb_hdf5.files.tokens import FileTokens, Tokens, open_extents
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.flat_digest import FlatDigest
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.format import Format, Found
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.spec import NOT_COUNTED, StoreMeta

#: Sequences or documents without ids in a file, at most.
MAX_EMPTY: Final = 1 << 22
#: A loss mask of one byte for each id, in a file of its own.
LOSS_FIELD: Final = Field(LOSS_MASK, np.dtype("u1"))


class FlatCorpus(Corpus):
    """A flat file as the chunks of a stream. See `Corpus`.

    Digests cover the ids as the file has them, which `groups` yields. Those of `with_verify` have the dtype of the
    stream.

    Parameters
    ----------
    path, meta
        The file and its chunks.
    tokens
        The ids as the file has them.
    digest
        Its digests; None: none were made.
    num_documents
        As `FlatFacts` has them.
    """

    cure: ClassVar[str] = "restore it"

    def __init__(
        self,
        path: Path,
        meta: StoreMeta,
        tokens: Tokens,
        digest: FlatDigest | None,
        num_documents: int | None = None,
    ) -> None:
        super().__init__(path, meta, tokens)
        self._num_documents = num_documents
        self._digest = digest
        if digest is not None:
            self.sha256 = digest.sha256

    @property
    def document_count(self) -> int:
        return 0 if self._num_documents in (None, NOT_COUNTED) else self._num_documents

    def crc32_rows(self) -> Crc32Rows | None:
        return None if self._digest is None else Crc32Rows(partial(_rows_of, self._digest), Remedy.VERIFY_DIGESTS)

    def missing_digests(self) -> str:
        return f"no digest is stored with it; {Remedy.DIGESTS.about(str(self.path))}"

    def _as_read(self, tokens: Tokens) -> Tokens:
        return tokens if tokens.dtype == self.meta.dtype else ForeignIds(tokens, self.meta)


def _rows_of(digest: FlatDigest, *others: Range) -> npt.NDArray[np.uint32]:
    """Return the rows of a digest; no file of this machine is read together with others."""
    return digest.rows()


class FlatFormat(Format, ABC):
    """The files of one flat format: how they are recognised, and what they hold. One file of the package has one.

    Attributes
    ----------
    sign
        The content by which its files are recognised, for messages; "": the format has no signature.
    holds_records
        Whether its files may hold records, as `facts` has found it.
    documents_suffix
        The ending of the file of documents beside one of ids, which may be absent; "": there is no such file.
    """

    sign: ClassVar[str]
    holds_records: ClassVar[bool] = False
    documents_suffix: ClassVar[str] = ""

    @abstractmethod
    def fits(self, look: Look) -> bool:
        """Return whether a file that ends as the ids do is of this format, by its content; one without header is."""

    def files(self, look: Look) -> list[str]:
        """Return the files of the ids at a path, in the order of `listed`; none if the path holds none.

        A folder is of the format if its first file of ids is: one of another format is an error of `facts`, so that
        none is left out without a word. Files that are named as fields are none of ids.

        Parameters
        ----------
        look
            A look at a file, or at a folder with such files in and below it.

        Raises
        ------
        FormatError
            If a file of a folder is named as a field that no file of ids has.
        """
        if not look.is_dir:
            is_named = self.read_as.lacks_header or look.text.lower().endswith(self.suffixes[0])
            return [look.text] if is_named and self.fits(look) else []
        return self._ids_in(look, listed(look, self.suffixes[0]).texts)

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
        path = look.path
        files = self.files(look)
        if not files:
            if backend == self.name and look.is_dir:
                raise self.none_in(path)
            return None
        self._require_asked(path, backend)
        in_split, splits = SplitFiles.at([path], files, split)
        facts = self.facts_of(look, in_split)
        if self.holds_records:
            facts[0].require_axes(self.read_as.axes)
        return Found(path, self.name, facts[0].layout, tuple(files), facts, tuple(splits))

    def _require_asked(self, path: Path, backend: str) -> None:
        if backend not in ("auto", self.name):
            raise BackendError(f"{path}: asked for backend {backend!r}, found a {self.name!r} stream")

    def facts_of(self, look: Look, files: Sequence[str]) -> tuple[FlatFacts, ...]:
        """Return the facts of each file at a path. Raises as `facts`."""
        return tuple(map(self.facts, look.each(files)))

    def _ids_in(self, folder: Look, files: Sequence[str]) -> list[str]:
        """Return the files of ids in a folder; none if the first one is of another format."""
        ids = ids_among(files, [folder.text])
        first = next(iter(ids or files), None)
        if first is None or not self.fits(folder.of(first)):
            return []
        require_no_fields(files, ids, self.field_files(ids))
        return ids

    def field_files(self, ids: Sequence[str]) -> list[str]:
        """Return the files of fields that belong to files of ids, of those that end as these do."""
        return []

    @abstractmethod
    def facts(self, look: Look) -> FlatFacts:
        """Return the facts of a file, from its headers and sizes alone.

        Raises
        ------
        FormatError
            If it is of another format or version, or its parts do not fit together.
        IncompleteError
            If it was cut short, or a part of it is missing.
        """

    def sidecars(self, path: Path) -> list[Path]:
        """Return the other files that belong to a file of ids, and are there."""
        return []

    def file_of_field(self, path: Path, name: str) -> Path:
        """Return the file of the values of a field, which `facts` has found: for each id, one after the other."""
        raise NotImplementedError

    def facts_without_header(self, look: Look) -> FlatFacts:
        """Return the facts of a file that has ids and nothing else, from its size. Raises as `facts`.

        Raises
        ------
        ArgumentError
            If it begins as a file of a known format does.
        """
        dtype = self.read_as.ids_dtype
        skip_bytes = self.read_as.skip_bytes
        path = look.path
        signature = signature_of(look)
        size = look.num_bytes
        if signature is not None and not signature.holds_ids(dtype.itemsize, skip_bytes):
            found = signature.words(path) + (": leave it out" if signature.way is None else "")
            raise ArgumentError(
                f"{path}: source_dtype is for files without a header, found {found}",
                options=["source_dtype"],
            )
        num_bytes = size - skip_bytes
        if num_bytes < 0:
            raise IncompleteError(f"{path}: expected at least the {skip_bytes:,} bytes of skip_bytes, found {size:,}")
        if num_bytes % dtype.itemsize:
            raise IncompleteError(
                f"{path}: expected a multiple of {dtype.itemsize} bytes, for ids of {dtype.name}, found "
                f"{num_bytes:,}: it was cut short, or source_dtype or skip_bytes is another one"
            )
        count = num_bytes // dtype.itemsize
        return FlatFacts(look.text, count, dtype, skip_bytes, identity=look.identity)

    def num_documents(self, found: FlatFacts) -> int:
        """Return the number of documents of a file, which `facts` may leave uncounted. Raises as `document_offsets`."""
        known = found.num_documents
        return len(self.document_offsets(found)) - 1 if known is None or known == NOT_COUNTED else known

    def document_offsets(self, found: FlatFacts) -> npt.NDArray[np.uint64]:
        """Return where each document of a file begins and the last one ends, shape (D + 1,), checked.

        Raises
        ------
        FormatError
            If they do not ascend from 0 to the number of tokens.
        """
        return np.array([0, found.num_tokens], np.uint64)

    def open(self, file: FoundFile) -> FlatCorpus:
        """Open a file as the chunks of a stream. No read is checked before `with_verify`, which its user needs.

        Ids become the dtype of the chunks, and one that does not fit is an error when it is read.
        """
        found, meta = file.of_stream
        path = file.path
        if file.access == "h5py":
            raise BackendError(f"{path}: access='h5py' needs an HDF5 file, found a {self.suffixes[0]} file")
        if meta.field is not None:
            return self._open_field(found, meta, file)
        ids = open_ids(path, found, file.access, file.identity, file.look)
        return FlatCorpus(path, meta, ids, file.digest, found.num_documents)

    def _open_field(self, found: FlatFacts, meta: StoreMeta, file: FoundFile) -> FlatCorpus:
        """Open the values of a field. No digests are made of them."""
        field = meta.field
        if field is None or field not in found.fields:
            raise FormatError(f"{found.path}: was replaced: expected {meta.column} with it, found none; open it again")
        path = self.file_of_field(found.path, field.name)
        tokens = _open_run(path, field.dtype, found.num_tokens * field.size, file.access, file.identity)
        return FlatCorpus(path, meta, tokens, None, found.num_documents)


def require_few_empty(path: str | os.PathLike[str], count: int, noun: str, num_tokens: int) -> None:
    """Raise `FormatError` for so many sequences or documents without ids that their table would fill the memory."""
    if count > num_tokens + MAX_EMPTY:
        raise FormatError(
            f"{path}: expected at most {MAX_EMPTY:,} empty {noun}, found {count:,} {noun} of {num_tokens:,} ids"
        )


def require_mask(path: str | os.PathLike[str], num_tokens: int) -> None:
    """Raise `IncompleteError` unless a file has the byte of a loss mask for each of so many ids."""
    num_bytes = os.stat(path).st_size
    if num_bytes != num_tokens:
        raise IncompleteError(f"{path}: expected a byte for each of {num_tokens:,} ids, found {num_bytes:,} bytes")


def open_ids(
    path: Path, found: FlatFacts, access: str, identity: Identity | None = None, look: Look | None = None
) -> Tokens:
    """Open the ids of a flat file as the file has them. None of them is compared with the range of ids.

    Parameters
    ----------
    path, found
        The file, and its facts.
    identity, look
        As `FoundFile` has them.
    """
    known = identity or found.identity
    tokens = _open_run(path, found.dtype, found.num_tokens, access, known, found.byte_offset, look)
    return ByColumns(tokens, path, found.byte_offset, found.record_tokens or 1) if found.by_columns else tokens


def _open_run(
    path: Path,
    dtype: np.dtype[Any],
    count: int,
    access: str,
    identity: Identity | None,
    byte_offset: int = 0,
    look: Look | None = None,
) -> FileTokens:
    """Open values that follow each other in a file."""
    num_bytes = count * dtype.itemsize
    extents = Extents([Run(byte_offset, num_bytes, 1)] if num_bytes else [], num_bytes)
    return open_extents(path, extents, dtype, count, access, identity, look=look)
