"""A token stream over many files: one sequence of tokens, cut anywhere."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.checked import checked
from zb_hdf5.columns.codecs import CompressedTokens
from zb_hdf5.columns.ranges import REMOTE
from zb_hdf5.columns.reader import require_choice
from zb_hdf5.errors import ArgumentError, BatchIndexError, FormatError, IncompleteError
from zb_hdf5.field import Field
from zb_hdf5.files.extents import Extents
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.objects import IN_FLIGHT
from zb_hdf5.files.open_files import OpenFiles
from zb_hdf5.files.paths import RemotePath, any_path, require_remote_access
from zb_hdf5.formats.hdf5.file import read_crc32_of
from zb_hdf5.formats.hdf5.places import compressed_tokens
from zb_hdf5.formats.hdf5.stream_reader import StreamInspection, inspect_stream
from zb_hdf5.formats.hdf5.token_file import (
    ChunkTokens,
    ExtentTokens,
    TokenFile,
    open_checked_file,
    open_field_file,
    open_token_file,
)
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.spec import (
    DEFAULT_SPLIT,
    INDEX_NAME,
    NO_BOUNDARY,
    NO_CODEC,
    NOT_KNOWN,
    StoreMeta,
    TokenArray,
    combine_sha256,
    crc32_column,
)
from zb_hdf5.store.index import ShardIndex, find_index, require_files
from zb_hdf5.store.proof import open_proved, require_proof
from zb_hdf5.store.table import ShardEntry

FINGERPRINT_SAMPLES: Final = 16
SAMPLE_TOKENS: Final = 4096
#: Files whose first and last tokens a sampled fingerprint covers: a folder of thousands is not opened for it.
FINGERPRINT_FILES: Final = 64


def npy_files(path: Path) -> list[Path]:
    """Return a `.npy` file, or those of a folder in the order of their names; hidden ones are not looked at."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.glob("*.npy") if file.is_file() and not file.name.startswith("."))


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
        Of a store, take the shards of this split only; None: all of them.
    access
        As for `open_reader`.
    verify
        "batch": read whole chunks, and compare each with its crc32. "auto", "none": tokens are read as they are asked
        for, which is seldom a whole chunk, and nothing is compared.

    Attributes
    ----------
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
    ) -> None:
        require_choice("verify", verify, ("auto", "none", "batch"))
        self.path, self._split, self._access, self._verify = any_path(path), split, access, verify
        require_remote_access(self.path, access)
        self.boundary_token_id, self.vocab_size, self.tokenizer = NO_BOUNDARY, 0, ""
        self._sha256: list[str] = []
        self._index: ShardIndex | None = None
        self._field: Field | None = None
        self.fields: tuple[Field, ...] = ()
        self.codec, self.complete = NO_CODEC, True
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
            counts = self._take_file(inspect_stream(self.path))
        self._starts = [0, *accumulate(counts)]
        self._firsts = np.array(self._starts[:-1])
        self.num_tokens = self._starts[-1]
        self._reset()
        if verify == "batch":
            self._file(0, 0)  # says what is missing

    def _take_index(self, index: ShardIndex, folder: Path) -> list[int]:
        meta, values = index.meta, index.table.values
        if not all(values["complete"]):
            unfinished = next(shard for shard in index.shards if not shard.complete)
            raise IncompleteError(f"{folder / unfinished.path}: its writer has not finished; make it again")
        self._index = index
        self.document_count = int(np.maximum(values["document_count"], 0).sum())
        self._take_meta(meta)
        self._sha256 = values["sha256"]
        self.paths = [folder / path for path in values["path"]]
        if not isinstance(folder, RemotePath):  # of objects each would be asked for
            require_files(folder, index)
        counts: list[int] = values["token_count"].tolist()
        return counts

    def _take_meta(self, meta: StoreMeta) -> None:
        self.dtype: np.dtype[Any] = meta.dtype
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
        other.__setstate__(self.__getstate__())
        other._field, other.dtype, other.fields, other._identities, other._sha256 = found, found.dtype, (), {}, []
        other._index = None if self._index is None else self._index.of_field(name)
        other._starts = [start * found.size for start in self._starts]
        other._firsts, other.num_tokens = np.array(other._starts[:-1]), other._starts[-1]
        return other

    def _take_npy(self) -> list[int]:
        self.paths = npy_files(self.path)
        self.document_count = len(self.paths)
        if not self.paths:
            raise FormatError(f"{self.path}: no .npy files in this folder")
        headers = [read_npy_header(path) for path in self.paths]
        for path, (shape, _, dtype, _) in zip(self.paths, headers, strict=True):
            if len(shape) != 1 or dtype.kind not in "iu":
                raise FormatError(f"{path}: expected a 1-D array of integers, found shape {shape} {dtype}")
        self.dtype = np.result_type(*(dtype for _, _, dtype, _ in headers))
        if self.dtype.kind not in "iu":
            raise FormatError(
                f"{self.path}: its files are of dtypes that no integer dtype covers, uint64 and a signed one"
            )
        return [shape[0] for shape, *_ in headers]

    def _take_file(self, found: StreamInspection) -> list[int]:
        self.document_count, self._identities[0] = found.meta.document_count, found.identity
        self.compressed = compressed_tokens(found.places)
        self._take_meta(found.meta)
        self.paths = [self.path]
        self.complete = found.complete
        self._sha256 = [] if found.sha256 is None else [found.sha256]
        return [found.token_count]

    def _reset(self) -> None:
        self._files: OpenFiles[TokenFile] = OpenFiles(self._access, far=isinstance(self.path, RemotePath))

    @property
    def access(self) -> str:
        """The I/O path of the first file: "auto", "mmap", "pread" or "h5py"; "remote" for objects."""
        if isinstance(self.path, RemotePath) and self._index is not None and self._access != "h5py":
            return REMOTE  # without a look at the file
        return self._file(0, 0).access

    @property
    def verified(self) -> str:
        """What is compared with its crc32 when it is read: "all reads" or "none"."""
        return "all reads" if self._verify == "batch" else "none"

    @property
    def in_flight(self) -> tuple[int, int] | None:
        """See `BatchReader.in_flight`."""
        return IN_FLIGHT if isinstance(self.path, RemotePath) else None

    @property
    def extents(self) -> Extents | None:
        """Where the chunks of the first file lie in it; None where only HDF5 knows."""
        return self._file(0, 0).extents

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
        number = bisect_right(self._starts, start) - 1
        if start < stop <= self._starts[number + 1]:
            tokens = self._file(number, start).flat()
            if tokens is not None and tokens.dtype == self.dtype:
                return tokens[start - self._starts[number] : stop - self._starts[number]]
        out = np.empty(stop - start, self.dtype)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: TokenArray) -> None:
        """Fill 1-D `out` with consecutive tokens, across files."""
        done = 0
        while done < len(out):
            number = bisect_right(self._starts, start + done) - 1
            file, within = self._file(number, start + done), start + done - self._starts[number]
            part = out[done : done + self._starts[number + 1] - start - done]
            if file.dtype == out.dtype:
                file.read_into(within, part)
            else:
                tokens = np.empty(len(part), file.dtype)
                file.read_into(within, tokens)
                part[...] = tokens
            done += len(part)

    def gather_into(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)` of `dtype`, with the L tokens from each of `starts`."""
        length = out.shape[1]
        if len(self.paths) == 1 and self._gather_views(starts, out):
            return
        files = self._firsts.searchsorted(starts, side="right") - 1
        mapped: dict[int, TokenArray | None] = {}
        together: dict[int, list[tuple[int, TokenArray]]] = {}
        places = zip(files.tolist(), (starts - self._firsts[files]).tolist(), strict=True)
        for row, (number, start) in enumerate(places):
            if number not in mapped:
                mapped[number] = self._file(number, int(starts[row])).flat()
            tokens = mapped[number]
            if tokens is not None and start + length <= len(tokens):
                out[row] = tokens[start : start + length]
            elif self._firsts[number] + start + length <= self._starts[number + 1] and tokens is None:
                together.setdefault(number, []).append((start, out[row]))
            else:
                self.read_into(int(starts[row]), out[row])
        for number, runs in together.items():
            self._file(number, runs[0][0]).read_runs(runs)

    def _gather_views(self, starts: npt.NDArray[np.int64], out: TokenArray) -> bool:
        """Gather from a view that has every window of the one file as a row; False where it is not mapped."""
        tokens = self._file(0, 0).flat()
        if tokens is None or not len(starts) or int(starts.max()) + out.shape[1] > len(tokens):
            return False
        # what numpy's sliding_window_view returns, in a tenth of its time
        windows = np.ndarray(
            (len(tokens) - out.shape[1] + 1, out.shape[1]), tokens.dtype, tokens, 0, tokens.strides * 2
        )
        out[...] = windows[starts]
        return True

    def is_cached(self, start: int) -> bool:
        """Return whether a token can be read without waiting for a disk."""
        number = bisect_right(self._starts, start) - 1
        return self._file(number, start).is_cached(start - self._starts[number])

    def will_need(self, start: int, stop: int) -> None:
        """Announce that consecutive tokens will be read soon; the kernel may begin to fetch them."""
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            self._file(number, start).will_need(start - first, end - first)
            start = end

    def _file(self, number: int, start: int) -> TokenFile:
        """Return a file, of which token `start` of the store is about to be read."""
        known = self._files.known.get(number)
        return known or self._files.open(number, lambda number: self._open_file(number, start - self._starts[number]))

    def _open_file(self, number: int, start: int) -> TokenFile:
        path, expected = self.paths[number], self._starts[number + 1] - self._starts[number]
        before = self._identities.get(number)
        if self._index is None or not expected:
            file = self._open_named(path, before)
        else:
            file = self._open_shard(path, self._index.shards[number], self._index.meta, start, before)
        if file.num_tokens != expected:
            file.close()
            raise FormatError(
                f"{path}: expected {expected:,} tokens, found {file.num_tokens:,}; it changed, or {INDEX_NAME} is of "
                "another store"
            )
        self._identities[number] = file.identity
        return file

    def _open_shard(
        self, path: Path, entry: ShardEntry, meta: StoreMeta, start: int, identity: Identity | None
    ) -> TokenFile:
        """Open a shard by what the index says of it, without HDF5, if that is so; else by what the file says.

        The chunk of token `start` proves it, once: later it has an identity.
        """
        chunk = start // meta.chunk_tokens
        plain = None if self._access == "h5py" else open_proved(path, entry, meta, self._access, chunk, identity)
        if plain is not None:
            if self._verify != "batch":
                return ExtentTokens(plain[0], entry.token_count)
            source = checked(*plain, meta, path, self._verify, entry.token_count)
            return ChunkTokens(source, meta.shape, meta.dtype, entry.token_count, plain[0].identity)
        file = self._open_named(path, identity)
        if identity is None and file.num_tokens == entry.token_count and entry.crc32 != NOT_KNOWN:
            try:
                rows = read_crc32_of(path, file.identity, entry.num_batches, crc32_column(meta.column))
                first = chunk * meta.chunk_tokens
                tokens = np.empty(min(meta.chunk_tokens, entry.token_count - first), file.dtype)
                file.read_into(first, tokens)
                require_proof(path, entry, meta, rows, chunk, tokens)
            except BaseException:
                file.close()
                raise
        return file

    def _open_named(self, path: Path, identity: Identity | None) -> TokenFile:
        """Open a file by what it says of itself."""
        field = None if self._field is None else self._field.name
        if self._verify == "batch":
            return open_checked_file(path, field, identity)
        if field is not None:
            return open_field_file(path, field, self._access)
        return open_token_file(path, self._access, identity)

    def close(self) -> None:
        """Close the files. Views that were returned stay valid."""
        for file in self._files.files().values():
            file.close()
        self._reset()

    def __len__(self) -> int:
        return self.num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
