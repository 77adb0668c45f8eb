"""The interface of a writer of documents for another trainer, and the writer of files whose ids follow each other."""

from __future__ import annotations

import os
from abc import abstractmethod
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.errors import ClosedError, ConvertError
from zb_hdf5.files.checked import GROUP_BYTES, GroupDigest, TokenDigest
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.publishing import PartialFile, disk_errors, refuse_existing, write_fully
from zb_hdf5.files.ranges import Run
from zb_hdf5.formats.batch_writer import GROUPS_BEHIND, WRITE_BACK_BYTES, ShardInfo, Writer
from zb_hdf5.signals import deferred_signals
from zb_hdf5.spec import (
    DEFAULT_CHUNK_TOKENS,
    TOKENS,
    StoreMeta,
    TokenArray,
    find_bad_token,
    require_integers,
    token_limit,
)


class DocumentWriter(Writer):
    """Writes documents to one file of a format, and to the files that belong to it. Not thread-safe.

    All have the ending `.partial` until `finish` gives them their names, that of the file itself last. A context
    manager: leaving the block normally calls `close`, an exception calls `abort`.

    Parameters
    ----------
    path
        The file to publish.
    meta
        The tokens of the source: dtype, size of the vocabulary, tokenizer, boundary token, and the fields that
        the format keeps.
    overwrite
        Replace existing files at the end, by rename; otherwise one is an error.
    facts
        The facts of documents that all of them have and that the format keeps: "ids", "metadata".

    Attributes
    ----------
    backend
        The name of the format.
    suffix
        The ending of the file.
    folder_names
        The names of the files that `complete_folder` writes.
    token_count, document_count
        Tokens and documents taken so far.
    dtype
        The dtype of an id in the files.
    """

    backend: ClassVar[str]
    suffix: ClassVar[str]
    folder_names: ClassVar[tuple[str, ...]] = ()
    document_count = 0

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: StoreMeta,
        *,
        overwrite: bool = False,
        facts: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.path = Path(path)
        self.meta = meta
        self.facts = facts
        self._overwrite = overwrite
        self.dtype = self.dtype_of(meta)
        self._limit = token_limit(self.dtype, meta.vocab_size)

    def abort(self) -> None:
        """Remove the unfinished files. Files with the final names are untouched."""
        self._require_own_process(self.path)
        if self._open:
            self._open = False
            self._remove()

    def _require_open(self) -> None:
        self._require_own_process(self.path)
        if not self._open:
            raise ClosedError(f"{self.path}: this writer was closed")

    def _out_of_range(self, value: object, where: str) -> ConvertError:
        """Return the error of an id that the file cannot hold, or that is beyond the vocabulary."""
        size = self.meta.vocab_size
        reason = f"vocab_size {size:,}" if self._limit == size - 1 else self.dtype.name
        return ConvertError(f"{self.path}: token id {value} at {where} is outside 0..{self._limit:,} ({reason})")

    @abstractmethod
    def _remove(self) -> None:
        """Close and remove the unfinished files."""

    @classmethod
    @abstractmethod
    def dtype_of(cls, meta: StoreMeta) -> np.dtype[Any]:
        """Return the dtype of an id in the files, for tokens of a source."""

    @classmethod
    def files(cls, path: Path, meta: StoreMeta) -> list[Path]:
        """Return all files that are written for one: the file itself first."""
        return [path]

    @classmethod
    def sidecars(cls, path: Path) -> list[Path]:
        """Return all files that may belong to one; `files` has those that are written."""
        return []

    @classmethod
    def complete_folder(
        cls, folder: Path, shards: Sequence[WrittenShard], meta: StoreMeta, facts: Collection[str]
    ) -> None:
        """Write what belongs to all files of a folder, such as an index, before the folder has its name.

        Parameters
        ----------
        folder
            The folder, with whole files.
        shards
            The files, in order.
        meta, facts
            As for each of the writers.
        """

    @abstractmethod
    def write_documents(
        self,
        tokens: TokenArray,
        lengths: npt.NDArray[np.int64],
        fields: Mapping[str, npt.NDArray[Any]] | None = None,
        documents: DocumentRows | None = None,
    ) -> None:
        """Append many documents at once.

        Parameters
        ----------
        tokens
            1-D, of any integer dtype: the documents one after the other, boundary tokens already inside.
        lengths
            Tokens of each document.
        fields
            The values of the fields of `meta`, for each of the tokens.
        documents
            Sources, rows, ids, metadata and spans of the documents, as far as they are known.

        Raises
        ------
        ConvertError
            If the format cannot hold an id, or a document.
        OSError
            If the disk is full or fails.
        """


class WrittenShard(NamedTuple):
    """A file that a writer has finished."""

    path: Path
    split: str
    num_bytes: int
    document_count: int
    sha256: str


def by_split(folder: Path, files: Sequence[WrittenShard]) -> dict[str, tuple[Path, list[WrittenShard]]]:
    """Return the folder and the files of each split. Each of several gets a folder of its own; empty files go.

    Parameters
    ----------
    folder
        The folder that holds all files.
    files
        The files, in order.
    """
    splits: dict[str, list[WrittenShard]] = {}
    for file in files:
        if file.document_count:
            splits.setdefault(file.split, []).append(file)
        else:
            file.path.unlink()
    if len(splits) == 1:
        return {split: (folder, found) for split, found in splits.items()}
    moved = {}
    for split, found in splits.items():
        place = folder / split
        place.mkdir(exist_ok=True)
        for file in found:
            os.replace(file.path, place / file.path.name)
        moved[split] = place, [file._replace(path=place / file.path.name) for file in found]
    return moved


class AppendedFile:
    """A file under `.partial` whose bytes come one after the other.

    Parameters
    ----------
    path, overwrite, sidecars
        As for `PartialFile`.

    Attributes
    ----------
    num_bytes
        Its end: the next bytes begin there. A writer may leave room for a header.
    """

    def __init__(self, path: Path, *, overwrite: bool, sidecars: Iterable[Path] = ()) -> None:
        self.file = PartialFile(path, overwrite=overwrite, sidecars=sidecars)
        self.num_bytes = 0

    def append(self, data: npt.NDArray[Any] | bytes) -> None:
        """Write bytes at the end."""
        self.write_at(self.num_bytes, data)
        self.num_bytes += data.nbytes if isinstance(data, np.ndarray) else len(data)

    def write_at(self, offset: int, data: npt.NDArray[Any] | bytes) -> None:
        """Write bytes anywhere."""
        with disk_errors(self.file.partial_path):
            write_fully(self.file.fd, data, offset)


class FlatWriter(DocumentWriter):
    """Writes files whose ids follow each other in one dtype, with digests. See `DocumentWriter`."""

    #: The first byte of the first id: the header before it is written at the end.
    token_offset: ClassVar[int] = 0

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: StoreMeta,
        *,
        overwrite: bool = False,
        facts: Collection[str] = (),
    ) -> None:
        super().__init__(path, meta, overwrite=overwrite, facts=facts)
        self._crc32 = array("I")
        self._behind: deque[GroupDigest] = deque()  # groups whose digests are still computed
        self._unsent_bytes = 0
        self._parts: list[AppendedFile] = []
        self._digest = TokenDigest()
        with on_failure(self.abort), deferred_signals():  # a signal is met when `abort` would remove all of them
            sidecars = self.sidecars(self.path)
            self._parts.append(AppendedFile(self.path, overwrite=overwrite, sidecars=sidecars))
            for each in () if overwrite else sidecars:  # one that is not written would be read with the new ids
                refuse_existing(each)
            for each in self.files(self.path, meta)[1:]:
                self._parts.append(AppendedFile(each, overwrite=overwrite))
            self._ids, *self._others = self._parts
            self._ids.num_bytes = self.token_offset
            self._begin()

    @classmethod
    def dtype_of(cls, meta: StoreMeta) -> np.dtype[Any]:
        return small_dtype(meta)

    def write_documents(
        self,
        tokens: TokenArray,
        lengths: npt.NDArray[np.int64],
        fields: Mapping[str, npt.NDArray[Any]] | None = None,
        documents: DocumentRows | None = None,
    ) -> None:
        self._require_open()
        require_integers(tokens, self.path)
        step = GROUP_BYTES // self.dtype.itemsize
        for start in range(0, len(tokens), step):
            self._write_ids(tokens[start : start + step], start)
        self.document_count += len(lengths)
        self._take_documents(lengths, fields or {}, documents or DocumentRows())

    def _write_ids(self, tokens: TokenArray, start: int) -> None:
        """Append ids, and begin to digest them."""
        bad = find_bad_token(tokens, self._limit)
        if bad is not None:
            raise self._out_of_range(tokens[bad], f"index {start + bad:,}")
        stored = np.ascontiguousarray(tokens, self.dtype)
        group = self._digest.submit(stored[np.newaxis])
        self._behind.append(group)
        self._ids.append(stored)
        self._digest.accept(group)
        self.token_count += len(stored)
        self._wait_for_digests(GROUPS_BEHIND)
        self._unsent_bytes += stored.nbytes
        if self._unsent_bytes >= WRITE_BACK_BYTES:
            self._ids.file.start_write_back()
            self._unsent_bytes = 0

    def _wait_for_digests(self, most: int) -> None:
        """Wait until no more groups than this are still to be digested."""
        while len(self._behind) > most:
            group = self._behind.popleft()
            group.wait()
            self.max_token = max(self.max_token, group.max_token)
            self._crc32.extend(group.crc32)

    def finish(self) -> ShardInfo:
        """Complete the files, and give them their names."""
        self._require_open()
        self._open = False
        with on_failure(self._remove):
            self._wait_for_digests(0)
            self._complete()
            self._digest.close()
            self._ids.file.publish([part.file for part in self._others])
        return self._info()

    def _info(self) -> ShardInfo:
        """Return the facts of the files; the ids count as chunks of a stream."""
        num_chunks = -(-self.token_count // DEFAULT_CHUNK_TOKENS)
        run = Run(self.token_offset, DEFAULT_CHUNK_TOKENS * self.dtype.itemsize, num_chunks)
        return ShardInfo(
            self.path,
            self.backend,
            num_chunks,
            self.token_count,
            self.max_token,
            self._digest.sha256(),
            np.array(self._crc32, "<u4"),
            {TOKENS: (run,)} if num_chunks else {},
            self.document_count,
        )

    def _remove(self) -> None:
        self._digest.close()
        for part in self._parts:
            part.file.discard()

    def _begin(self) -> None:
        """Prepare the files that belong to that of the ids: `_others`, in the order of `files`."""

    def _take_documents(
        self,
        lengths: npt.NDArray[np.int64],
        fields: Mapping[str, npt.NDArray[Any]],
        documents: DocumentRows,
    ) -> None:
        """Take the facts of documents whose ids are written."""

    def _complete(self) -> None:
        """Write what is known at the end: headers, and files about all documents."""


def small_dtype(meta: StoreMeta, most: int = 1 << 16) -> np.dtype[Any]:
    """Return uint16 for ids of a vocabulary of at most this size, or that are stored so if it is not known."""
    is_small = meta.vocab_size <= most if meta.vocab_size else meta.dtype.itemsize <= 2
    return np.dtype("<u2" if is_small else "<u4")
