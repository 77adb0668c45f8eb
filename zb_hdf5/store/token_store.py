"""A token stream over many files: one sequence of tokens, cut anywhere."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import (
    ArgumentError,
    BackendError,
    BatchIndexError,
    FormatError,
    IncompleteError,
    UnverifiableError,
)
from zb_hdf5.field import Field
from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.paths import Identity, RemotePath, any_path, require_remote_access
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.files.tokens import Converted, Tokens, Wait, open_extents
from zb_hdf5.formats.batch_reader import require_choice
from zb_hdf5.formats.hdf5.h5_reader import HDF5Reader
from zb_hdf5.formats.hdf5.inspection import Column, look_at_field, look_at_stream
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.spec import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_SPLIT,
    INDEX_NAME,
    NO_BOUNDARY,
    NO_CODEC,
    NOT_KNOWN,
    StoreMeta,
    TokenArray,
    combine_sha256,
)
from zb_hdf5.store.index import ShardIndex, find_index, require_files
from zb_hdf5.store.shards import Sharded, ShardOpener, sharded

FINGERPRINT_SAMPLES: Final = 16
SAMPLE_TOKENS: Final = 4096
#: Files whose first and last tokens a sampled fingerprint covers: a folder of thousands is not opened for it.
FINGERPRINT_FILES: Final = 64


def npy_files(path: Path) -> list[Path]:
    """Return a `.npy` file, or those of a folder in the order of their names; hidden ones are not looked at."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.glob("*.npy") if file.is_file() and not file.name.startswith("."))


def _header_of_stream(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return (shape, dtype, byte offset of the data) of a 1-D `.npy` file of integers."""
    shape, _, dtype, byte_offset = read_npy_header(path)
    if len(shape) != 1 or dtype.kind not in "iu":
        rows = "; rows are records: convert them to a store" * (len(shape) == 2 and dtype.kind in "iu")
        raise FormatError(f"{path}: expected a 1-D array of integers, found shape {shape} {dtype}{rows}")
    return shape, dtype, byte_offset


def open_npy(path: Path, access: str = "auto", identity: Identity | None = None) -> Tokens:
    """Open a 1-D `.npy` file of integers."""
    if access == "h5py":
        raise BackendError(f"{path}: access='h5py' needs an HDF5 file, found a .npy file")
    shape, dtype, byte_offset = _header_of_stream(path)
    num_bytes = shape[0] * dtype.itemsize
    extents = Extents([Run(byte_offset, num_bytes, 1)] if num_bytes else [], num_bytes)
    return open_extents(path, extents, dtype, shape[0], access, identity)


class StreamOpener:
    """Opens files of a stream that no index describes, by number, as tokens of one dtype. See `ShardOpener`."""

    def __init__(
        self, paths: Sequence[Path], counts: Sequence[int], access: str, verify: str, field: Field | None, dtype: Any,
        dataset: str | None,
    ) -> None:  # fmt: skip
        self._paths, self._counts, self._access, self._verify = paths, counts, access, verify
        self._field, self._dtype, self._dataset = field, dtype, dataset
        self.identities: dict[int, Identity] = {}

    def __call__(self, number: int, start: int) -> Tokens:
        path, expected = self._paths[number], self._counts[number]
        tokens = self._open(path, self.identities.get(number))
        if tokens.num_tokens != expected:
            tokens.close()
            raise FormatError(f"{path}: expected {expected:,} tokens, found {tokens.num_tokens:,}; it changed")
        self.identities[number] = tokens.identity
        return tokens if tokens.dtype == self._dtype else Converted(tokens, self._dtype)

    def _open(self, path: Path, identity: Identity | None) -> Tokens:
        if path.suffix == ".npy":
            if self._verify == "batch":
                raise UnverifiableError(
                    f"{path}: verify='batch' needs a stored crc32: .npy files have none; convert them"
                )
            return open_npy(path, self._access, identity)
        field = self._field
        if field is None:
            found = look_at_stream(path, identity, self._dataset)
        else:
            found = look_at_field(path, field.name, identity)
        return HDF5Reader(found, self._access, self._verify).tokens


class TokenStore:
    """The tokens of a stream as one sequence, whichever files they lie in; of their documents, the number only.

    Thread-safe, usable after fork, picklable. Files are opened when they are first read, and as many of them stay open
    as the process may have.

    Parameters
    ----------
    path
        An HDF5 stream, a folder with a `shards.json` of them, a 1-D `.npy` file, or a folder of such files in the order
        of their names (files of other suffixes are not looked at).
    split
        Split of a store whose shards alone are taken; None: all of them.
    access
        As for `open_reader`.
    verify
        "batch": read whole chunks, and compare each with its crc32. "auto", "none": tokens are read as they are asked
        for, which is seldom a whole chunk, and nothing is compared.
    dataset
        Name of a 1-D dataset of integers in an HDF5 file of another origin.

    Attributes
    ----------
    has_documents
        Whether it is stored where documents begin; else each file counts as one.
    num_tokens
        Up to `token_count` of each file: what fills up its last chunk is never seen.
    boundary_token_id, vocab_size, tokenizer
        As stored; -1, 0 and "" where unknown.

    Raises
    ------
    FormatError, IncompleteError
        If there are no tokens, or a file is not what it should be.
    UnverifiableError
        If `verify="batch"` has no crc32 to compare with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = None,
        access: str = "auto",
        verify: str = "auto",
        index: ShardIndex | None = None,
        dataset: str | None = None,
    ) -> None:
        require_choice("verify", verify, ("auto", "none", "batch"))
        self.path, self._split, self._access, self._verify = any_path(path), split, access, verify
        require_remote_access(self.path, access)
        self.boundary_token_id, self.vocab_size, self.tokenizer = NO_BOUNDARY, 0, ""
        self._sha256: list[str] = []
        self._index: ShardIndex | None = None
        self._field: Field | None = None
        self._dataset, self.has_documents = dataset, False
        self.fields: tuple[Field, ...] = ()
        self.codec, self.complete, self._chunk_tokens = NO_CODEC, True, DEFAULT_CHUNK_TOKENS
        self.compressed: CompressedTokens | None = None  # of a lone file
        self._identities: dict[int, Identity] = {}  # of the files that were open once
        folder = self.path.parent if self.path.name == INDEX_NAME else self.path
        if index is not None or find_index(self.path):
            counts = self._take_index((index or ShardIndex.load(folder)).of_split(split), folder)
        elif split not in (None, DEFAULT_SPLIT):
            raise ArgumentError(f"{self.path}: split={split!r} needs a store, found none")
        elif self.path.is_dir() or self.path.suffix == ".npy":
            counts = self._take_npy()
        else:
            counts = self._take_file(look_at_stream(self.path, None, dataset))
        self.tokens: Tokens = self._open_tokens(counts)
        self._starts, self.num_tokens = self.tokens.starts, self.tokens.num_tokens
        self._identities = self._opener.identities
        if verify == "batch":
            self.tokens.open_file(0, 0)  # names what is missing

    def _open_tokens(self, counts: list[int]) -> Sharded:
        self._opener: ShardOpener | StreamOpener
        how = "batch" if self._verify == "batch" else "none"
        if self._index is not None:
            self._opener = ShardOpener(self._folder, self._index, self._access, how)
            return sharded(self._opener)
        self._opener = StreamOpener(self.paths, counts, self._access, how, self._field, self.dtype, self._dataset)
        self._opener.identities.update(self._identities)
        local = Wait.LOCAL if self.codec == NO_CODEC else Wait.DECODE
        wait = Wait.FAR if isinstance(self.path, RemotePath) else local
        return Sharded(
            counts, self._opener, dtype=self.dtype, unit=self._chunk_tokens, name=str(self.path), access=None,
            wait=wait,
        )  # fmt: skip

    def _take_index(self, index: ShardIndex, folder: Path) -> list[int]:
        meta, values = index.meta, index.table.values
        if not all(values["complete"]):
            unfinished = next(shard for shard in index.shards if not shard.complete)
            raise IncompleteError(f"{folder / unfinished.path}: its writer has not finished; make it again")
        self._index, self._folder = index, folder
        self.has_documents = bool((values["document_count"] != NOT_KNOWN).all())
        self.document_count = int(np.where(values["document_count"] < 0, 1, values["document_count"]).sum())
        self._take_meta(meta)
        self._sha256 = values["sha256"]
        self.paths = [folder / path for path in values["path"]]
        if not isinstance(folder, RemotePath):  # of objects each would be asked for
            require_files(folder, index)
        counts: list[int] = values["token_count"].tolist()
        return counts

    def _take_meta(self, meta: StoreMeta) -> None:
        self.dtype: np.dtype[Any] = meta.dtype
        self._chunk_tokens = meta.chunk_tokens
        self.boundary_token_id, self.vocab_size = meta.boundary_token_id, meta.vocab_size
        self.tokenizer, self.fields, self.codec = meta.tokenizer, meta.fields, meta.codec

    def field(self, name: str) -> TokenStore:
        """Return the values of a field as a store of their own: each token counts as `size` values of it.

        Raises
        ------
        ArgumentError
            If there is no such field.
        """
        found = next((field for field in self.fields if field.name == name), None)
        if found is None:
            known = ", ".join(field.name for field in self.fields) or "none is"
            raise ArgumentError(f"{self.path}: expected a field that is stored ({known}), found {name!r}")
        other = TokenStore.__new__(TokenStore)
        other.__dict__.update(self.__dict__)
        other._field, other.dtype, other.fields, other._identities, other._sha256 = found, found.dtype, (), {}, []
        other._index = None if self._index is None else self._index.of_field(name)
        counts = np.diff(self._starts) * found.size
        other.tokens = other._open_tokens(counts.tolist())
        other._starts, other.num_tokens = other.tokens.starts, other.tokens.num_tokens
        return other

    def _take_npy(self) -> list[int]:
        self.paths = npy_files(self.path)
        self.document_count = len(self.paths)
        if not self.paths:
            raise FormatError(f"{self.path}: no .npy files in this folder")
        headers = [_header_of_stream(path) for path in self.paths]
        self.dtype = np.result_type(*(dtype for _, dtype, _ in headers))
        if self.dtype.kind not in "iu":
            raise FormatError(
                f"{self.path}: its files are of dtypes that no integer dtype covers, uint64 and a signed one"
            )
        return [shape[0] for shape, *_ in headers]

    def _take_file(self, found: Column) -> list[int]:
        self.has_documents, self._identities[0] = bool(found.marker), found.identity
        self.document_count = found.meta.document_count if self.has_documents else 1
        self.compressed = found.compressed
        self._take_meta(found.meta)
        self.paths = [self.path]
        self.complete = found.complete
        self._sha256 = [] if found.sha256 is None else [found.sha256]
        return [found.num_tokens]

    @property
    def access(self) -> str:
        """The I/O path of the first file: "auto", "mmap", "pread" or "h5py"; "remote" for objects."""
        return self.tokens.access

    def compared_tokens(self) -> Tokens | None:
        """Return the tokens, read in whole chunks that are compared with their crc32; None where there are none."""
        if self._verify == "batch":
            return self.tokens
        has_none = self._index.without_crc32() if self._index else not self.complete or self.paths[0].suffix == ".npy"
        if has_none:
            return None
        other = type(self).__new__(type(self))
        other.__dict__ = self.__dict__ | {"_verify": "batch"}
        return other._open_tokens(np.diff(self._starts).tolist())

    @property
    def verified(self) -> str:
        """The reads that are compared with their crc32: "all reads" or "none"."""
        return "all reads" if self._verify == "batch" else "none"

    @property
    def in_flight(self) -> tuple[int, int] | None:
        """See `BatchReader.in_flight`."""
        return self.tokens.in_flight

    @property
    def extents(self) -> Extents | None:
        """The ranges of the chunks in the first file; None if only HDF5 can read them."""
        return getattr(self.tokens.open_file(0, 0).unchecked(), "extents", None)

    def pieces(self, start: int, stop: int) -> list[tuple[Path, int, int]]:
        """Return the files that hold tokens `start` to `stop`, and for each of them which of its own tokens."""
        found = []
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            found.append((self.paths[number], start - first, end - first))
            start = end
        return found

    @property
    def fingerprint(self) -> str:
        """Identity of the content: over the stored digests, or "sampled:" over all sizes and some of the tokens."""
        if len(self._sha256) == len(self.paths):
            return f"tokens:{combine_sha256(self._sha256)}:{self.dtype.name}"
        digest = hashlib.sha256(f"{self._starts}:{self.dtype.str}".encode())
        for start in sorted(self._sampled_places()):
            end_of_file = self._starts[bisect_right(self._starts, start)]
            digest.update(np.ascontiguousarray(self.get_slice(start, min(start + SAMPLE_TOKENS, end_of_file))))
        return f"sampled:{digest.hexdigest()}"

    def _sampled_places(self) -> set[int]:
        """Return where tokens are looked at: evenly over all, and where some of the files begin and end."""
        last = max(0, self.num_tokens - SAMPLE_TOKENS)
        places = {last * k // (FINGERPRINT_SAMPLES - 1) for k in range(FINGERPRINT_SAMPLES)}
        for file in {(len(self.paths) - 1) * k // (FINGERPRINT_FILES - 1) for k in range(FINGERPRINT_FILES)}:
            start, stop = self._starts[file : file + 2]
            places |= {start, max(start, stop - SAMPLE_TOKENS)}
        return {place for place in places if place < self.num_tokens}

    def get_slice(self, start: int, stop: int) -> TokenArray:
        """Return tokens `start` to `stop`, 1-D of `dtype`; read-only where it is a view of a mapping.

        Raises
        ------
        BatchIndexError
            Unless `0 <= start <= stop <= num_tokens`.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise BatchIndexError(f"{self.path}: no tokens {start:,} to {stop:,}: it has {self.num_tokens:,}")
        out = self.tokens.view(start, stop - start) if start < stop else None
        if out is None:
            out = np.empty(stop - start, self.dtype)
            self.tokens.read([(start, out)])
        return out

    def gather_into(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)` of `dtype`, with the L tokens from each of `starts`."""
        self.tokens.gather(starts, out)

    def close(self) -> None:
        """Close the files. Views that were returned stay valid."""
        self.tokens.close()

    def __len__(self) -> int:
        return self.num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
