"""Digests of files that hold none, such as files of another trainer: made once, and kept in a file of their own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import numpy as np

from zb_hdf5.errors import ArgumentError, BackendError, ConvertError, FormatError, IncompleteError, counted
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.identity import require_unreplaced
from zb_hdf5.files.listing import name_below
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import local_path, open_file
from zb_hdf5.files.publishing import published, require_present, write_fully
from zb_hdf5.files.threads import ReadPool
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_digest import FlatDigest, documents_sha256
from zb_hdf5.formats.flat_facts import FlatFacts, require_alike
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.read_as import AS_STORED, ReadAs, require_read_as
from zb_hdf5.spec import (
    CRC32_DIGITS,
    DEFAULT_CHUNK_TOKENS,
    DIGESTS_FILE_KEYS,
    DIGESTS_FORMAT,
    DIGESTS_VERSION,
    STREAM_LAYOUT,
    StoreMeta,
    combine_sha256,
    is_file_name,
    is_hexadecimal,
    stored_dtype,
)
from zb_hdf5.store.format_list import HDF5, flat_format, flat_formats, format_without_digests
from zb_hdf5.store.found_store import stores_at
from zb_hdf5.store.parsed_arrays import require_arrays, require_field, require_sha256
from zb_hdf5.store.recognition import files_in_place, named_by_prefix, require_datasets
from zb_hdf5.store.sealed_text import parse_sealed, read_text, sealed_text
from zb_hdf5.store.way_in import not_in_place

#: The chunks that digests are of: of the ids as each file has them.
CHUNKS_OF_FLAT_FILES: Final = StoreMeta(1, DEFAULT_CHUNK_TOKENS, stored_dtype("uint32"), layout=STREAM_LAYOUT)
#: Bytes of a file of digests that have its format.
_HEAD_BYTES: Final = 64
#: Names of files that a message has.
_MAX_NAMES: Final = 3
#: The formats of files that hold no digests.
_DIGESTED: Final = f"{', '.join(flat_formats())}, HDF5 of other programs"
#: The key of the ids of a record, which a header has, and no digest covers.
RECORD_TOKENS: Final = "record_tokens"
_AGAIN: Final = "make its digests again if it is the right one"

#: Called with a number of tokens.
Count: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class Digests:
    """The content of a file of digests.

    Attributes
    ----------
    path
        The file itself, for messages.
    backend
        The flat format of the files.
    files
        Name -> the digests of the file, in the order of the stream.
    read_as
        The dataset of HDF5 files of another program.
    record_tokens
        The ids of a record, of other files that hold records; None: they are streams, or HDF5 files.
    """

    path: Path
    backend: str
    files: Mapping[str, FlatDigest]
    read_as: ReadAs = AS_STORED
    record_tokens: int | None = None

    def __repr__(self) -> str:
        content = f"{self.num_tokens:,} tokens in {counted(len(self.files), 'file')}"
        return f"{type(self).__name__}({str(self.path)!r}, {content}, backend={self.backend!r})"

    @property
    def num_tokens(self) -> int:
        """Ids of all files."""
        return sum(digest.num_tokens for digest in self.files.values())

    @property
    def sha256(self) -> str:
        """Digest over the sha256 of the files, in order."""
        return combine_sha256(digest.sha256 for digest in self.files.values())

    def require(self, found: FlatFacts, name: str) -> FlatDigest:
        """Return the digests of a file.

        Parameters
        ----------
        found
            The file.
        name
            Its name from the folder on that was digested.

        Raises
        ------
        FormatError
            If there are none, or they are digests of another file, as its size and its header tell.
        """
        digest = self.files.get(name)
        if digest is None:
            known = ", ".join(list(self.files)[:_MAX_NAMES])
            more = len(self.files) - _MAX_NAMES
            others = f"{known} and {more:,} more" if more > 0 else known
            raise FormatError(f"{self.path}: expected the digests of {name}, found digests of {others}; {_AGAIN}")
        for fact, expected, here in (
            ("bytes", digest.num_bytes, found.path.stat().st_size),
            ("ids", digest.num_tokens, found.num_tokens),
            ("dtype", digest.dtype, found.dtype.str),
            (RECORD_TOKENS, self.record_tokens, found.record_tokens),
        ):
            if here != expected:
                raise FormatError(
                    f"{found.path}: expected {fact} {expected}, as {self.path.name} has it, found {here}; restore it, "
                    f"or {_AGAIN}"
                )
        return digest

    def require_all(self, path: Path, backend: str, found: Iterable[FlatFacts]) -> dict[str, FlatDigest]:
        """Return the digests of all files at a path, by `name_below`. Raises as `require`, and if a file is missing."""
        self.require_format(backend)
        names = [(name_below(path, each.path), each) for each in found]
        digests = {name: self.require(each, name) for name, each in names}
        if path.is_dir():
            for problem in self.missing(path, digests).values():
                raise problem
        return digests

    def require_format(self, backend: str) -> None:
        """Raise `FormatError` if these are digests of files of another format."""
        if backend != self.backend:
            raise FormatError(f"{self.path}: expected digests of {backend!r} files, found {self.backend!r}")

    def as_digested(self, code: FlatFormat) -> FlatFormat:
        """Return a format that reads files as they were digested: the digests have the dataset of HDF5 files.

        Raises
        ------
        FormatError
            If these are digests of files of another format, or of another dataset than the one that is named.
        """
        self.require_format(code.name)
        if code.name != HDF5:
            return code
        asked = code.read_as
        if asked.names_dataset:
            self.require_dataset(replace(asked, dataset=asked.dataset or self.read_as.dataset))
        return type(code)(code.row, self.read_as)

    def require_dataset(self, read_as: ReadAs) -> None:
        """Raise `FormatError` if these are digests of another dataset, or channel of it."""
        expected = (read_as.dataset, read_as.channel)
        known = (self.read_as.dataset, self.read_as.channel)
        if known != expected:
            raise FormatError(
                f"{self.path}: expected digests of {_named(*expected)}, found digests of {_named(*known)}; {_AGAIN}"
            )

    def missing(self, folder: Path, found: Iterable[str]) -> dict[str, IncompleteError]:
        """Return the path of each file that is not in a folder, and the error for it.

        Parameters
        ----------
        found
            The names of files that are there.
        """
        absent = {name for name in self.files.keys() - set(found) if not (folder / name).exists()}
        return {
            str(folder / name): IncompleteError(
                f"{folder / name}: is not there, and {self.path.name} has digests of it; restore it"
            )
            for name in sorted(absent)
        }

    def to_json(self) -> str:
        """Return the text of the file: each array on one line, and last the digest of all before it."""
        facts: dict[str, Any] = {
            "format": DIGESTS_FORMAT,
            "version": DIGESTS_VERSION,
            "backend": self.backend,
            "chunk_tokens": DEFAULT_CHUNK_TOKENS,
            "token_count": self.num_tokens,
            "sha256": self.sha256,
        }
        if self.backend == HDF5:
            known = self.read_as
            facts |= {"dataset": known.dataset, "axes": known.axes, "channel": known.channel}
            if known.unwritten is not None:
                facts["unwritten"] = known.unwritten
        if self.record_tokens is not None:
            facts[RECORD_TOKENS] = self.record_tokens
        rows = [(name, *digest) for name, digest in self.files.items()]
        arrays = dict(zip(DIGESTS_FILE_KEYS, map(list, zip(*rows, strict=True)), strict=True))
        return sealed_text(facts, {"files": arrays})

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """Parse and check the text of such a file. Raises as `load`."""
        value = parse_sealed(text, path)
        where = str(path)
        facts = {"format": DIGESTS_FORMAT, "version": DIGESTS_VERSION, "chunk_tokens": DEFAULT_CHUNK_TOKENS}
        for key, expected in facts.items():
            found = require_field(value, key, type(expected), where)
            if found != expected:
                raise FormatError(f"{where}: expected {key} {expected!r}, found {found!r}")
        backend = require_field(value, "backend", str, where)
        is_foreign = backend == HDF5
        if not is_foreign and flat_format(backend) is None:
            known = " or ".join([*flat_formats(), HDF5])
            raise FormatError(f"{where}: expected backend {known}, found {backend!r}")
        arrays = require_arrays(require_field(value, "files", dict, where), DIGESTS_FILE_KEYS, f"{where}: files")
        names, *columns = (array if isinstance(array, list) else array.tolist() for array in arrays.values())
        _require_names(names, where)
        files = {name: FlatDigest(*row) for name, row in zip(names, zip(*columns, strict=True), strict=True)}
        record_tokens = require_field(value, RECORD_TOKENS, int, where) if RECORD_TOKENS in value else None
        read_as = _dataset_in(value, where) if is_foreign else AS_STORED
        digests = cls(path, backend, files, read_as, record_tokens)
        digests._check(where)
        for key, expected in (("token_count", digests.num_tokens), ("sha256", digests.sha256)):
            if value.get(key) != expected:
                raise FormatError(f"{where}: expected {key} {value.get(key)!r}, its files give {expected!r}")
        return digests

    def _check(self, where: str) -> None:
        """Raise `FormatError` if a value is not possible."""
        for name, digest in self.files.items():
            require_sha256([digest.sha256, digest.documents_sha256 or digest.sha256], f"{where}: {name}")
            if min(digest.num_bytes, digest.num_tokens) < 0:
                raise FormatError(f"{where}: {name}: expected sizes from 0 on, found {digest.num_tokens:,} tokens")
            num_chunks = -(-digest.num_tokens // DEFAULT_CHUNK_TOKENS)
            if len(digest.crc32) != num_chunks * CRC32_DIGITS or not is_hexadecimal(digest.crc32):
                raise FormatError(
                    f"{where}: {name}: expected the crc32 of {num_chunks:,} chunks in {CRC32_DIGITS} hexadecimal "
                    f"digits each, found {len(digest.crc32):,} characters"
                )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file of digests.

        Raises
        ------
        FormatError
            If it is none, or it is damaged.
        NotFoundError
            If there is no such file.
        """
        path = local_path(path)
        require_present(path)
        return cls.from_json(read_text(path), path)


def _named(dataset: str | None, channel: int | None) -> str:
    """Return a dataset, or a channel of it, in words."""
    return f"dataset {dataset!r}" if channel is None else f"channel {channel} of dataset {dataset!r}"


def _dataset_in(value: Any, where: str) -> ReadAs:
    """Return the dataset that parsed digests are of."""
    name = require_field(value, "dataset", str, where)
    try:
        return ReadAs(name, axes=value.get("axes"), channel=value.get("channel"), unwritten=value.get("unwritten"))
    except ArgumentError as error:
        raise FormatError(f"{where}: {error}") from error


def _require_names(names: list[str], where: str) -> None:
    """Raise `FormatError` unless each name is that of another file in or below one folder."""
    if not names:
        raise FormatError(f"{where}: lists no files")
    for name in names:
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or not is_file_name(name):
            raise FormatError(f"{where}: expected the names of files of one folder, found {name!r}")
    if len(set(names)) < len(names):
        raise FormatError(f"{where}: has a file twice")


def needs_no_digests(path: Path, digests: object) -> BackendError:
    """Return the error for digests of files that are not read in place, or hold their own."""
    return BackendError(
        f"{path}: digests={str(digests)!r} is for files that hold none ({_DIGESTED}), found others; leave it out",
        options=("digests",),
    )


def files_without_digests(look: Look, read_as: ReadAs) -> tuple[FlatFormat, list[str]] | None:
    """Return the files at a path that hold no digests, and their format; None if they are others."""
    found = None if stores_at(look.path) else files_in_place(look, read_as)
    flat = None if found is None else format_without_digests(found.code.name, read_as)
    files = [] if flat is None else flat.files(look)
    return (flat, files) if flat is not None and files else None


def _has_digests(path: Path) -> BackendError:
    return BackendError(
        f"{path}: expected files that hold no digests and are read in place ({_DIGESTED}), found others: stores "
        "have digests"
    )


def write_digests(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    read_as: ReadAs = AS_STORED,
    workers: int | None = None,
    progress: Count = lambda tokens: None,
    announce: Count = lambda tokens: None,
) -> Digests:
    """Write the digests of files of other programs, as they are now: a sha256 of each, a crc32 of each chunk.

    From then on corpora, loaders and `verify_store` compare the files with them, by `ReadAs(digests=...)`. Nothing is
    written before all files were read. Each thread takes 4 MiB, and 16 bytes for each document of its file.

    Parameters
    ----------
    path
        A file that is read in place, or a folder of such files: see `open_corpus`.
    destination
        The file to write, a JSON.
    overwrite
        It may exist, if it is a file of digests, and is replaced in one step.
    read_as
        How the files are read. No digests are made of their fields.
    workers
        Threads, one for each file; by default one per core that this process may use.
    progress
        Called with the number of ids read since the last call, from any of the threads.
    announce
        Called once with the number of ids that there are.

    Raises
    ------
    BackendError
        If the path holds digests already.
    FormatError, IncompleteError
        If it is not read in place; if a file is malformed or cut short, or changes meanwhile.
    ExistsError, ConvertError
        If the destination exists, and may not be replaced.
    """
    path = named_by_prefix(local_path(path))
    require_present(path)
    require_read_as(read_as)
    if read_as.digests is not None:
        raise ArgumentError(f"{path}: digests are what is made here, found digests={str(read_as.digests)!r}")
    read_as = replace(read_as, field_channels={})
    with Look(path) as look, look.keeping_handles():
        require_datasets(look, read_as)
        at_path = files_without_digests(look, read_as)
        if at_path is None:
            raise not_in_place(look) or _has_digests(path)
        flat, files = at_path
        found = flat.facts_of(look, files)
        first = look.of(files[0]).kept_open()
    column = found[0].column
    if column is not None:
        if column.sha256 is not None:
            raise _has_digests(column.path)
        read_as = replace(read_as, dataset=column.name)
    if flat.holds_records:
        require_alike(found)
        found[0].require_axes(read_as.axes)
    destination = local_path(destination)
    if overwrite:
        _refuse_other_file(destination)
    with published(destination, overwrite=overwrite) as file:
        announce(sum(each.num_tokens for each in found))
        with ReadPool(workers or len(os.sched_getaffinity(0)), "zb-digests") as readers:
            made = readers.map(partial(_digest_of, flat, progress), found, [first, *[None] * (len(found) - 1)])
        of_files = {name_below(path, each.path): one for each, one in zip(found, made, strict=True)}
        record_tokens = next((each.record_tokens for each in found), None)
        digests = Digests(destination, flat.name, of_files, read_as, record_tokens)
        write_fully(file.fd, digests.to_json().encode("utf-8"), 0)
    return digests


def _refuse_other_file(path: Path) -> None:
    """Raise `ConvertError` if a file that would be replaced is not a file of digests."""
    if not path.is_file():
        return
    with open_file(path) as file:
        head = file.read(_HEAD_BYTES)
    if f'"format": "{DIGESTS_FORMAT}"'.encode() not in head:
        raise ConvertError(f"{path}: is not a file of digests; remove it yourself, or choose another output")


def _digest_of(flat: FlatFormat, progress: Count, found: FlatFacts, look: Look | None) -> FlatDigest:
    """Read a file, by the descriptor of a look at it if there is one, and return its digests."""
    path = found.path
    sha256 = hashlib.sha256()
    crc32: list[int] = []
    with flat.open(FoundFile(path=path, meta=CHUNKS_OF_FLAT_FILES, known=found, look=look)) as corpus:
        for _, chunks in corpus.groups():
            sha256.update(chunks)
            crc32 += map(crc32_of, chunks)
            progress(chunks.size)
        documents = "" if found.num_documents is None else documents_sha256(flat.document_offsets(found))
        try:
            require_unreplaced(path, corpus.tokens.identity)
        except FormatError as error:
            raise IncompleteError(f"{path}: was changed while its digests were made; wait for its writer") from error
        num_bytes = corpus.tokens.identity[0]
    rows = np.array(crc32, ">u4").tobytes().hex()
    return FlatDigest(num_bytes, found.dtype.str, found.num_tokens, sha256.hexdigest(), documents, rows)
