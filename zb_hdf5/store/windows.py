"""Windows over a token stream: a stream as a reader of records that are cut from it when they are read."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from zb_hdf5.errors import ArgumentError, UnverifiableError, ZbError
from zb_hdf5.files.paths import any_path
from zb_hdf5.files.tokens import Converted, Tokens
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.spec import DTYPE_BY_NAME, StoreMeta
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.stream_documents import MmapTokenStore, WindowDocuments
from zb_hdf5.store.verify import verify_store

#: What the fingerprint of a `WindowReader` ends with: records in a batch, tokens from one to the next, shared tokens.
_WINDOWS: Final = re.compile(r":([1-9]\d{0,17})x([1-9]\d{0,17})\+(\d{1,18})$")


class WindowReader(BatchReader):
    """Batches of consecutive windows of a stream. `BatchReader` describes its functions."""

    # a record begins each `seq_len` tokens; with overlap=1 its last token is the first one of the next, so that targets
    # miss none; "auto" compares nothing, since a window is less than a chunk; "batch" reads whole chunks

    backend = "stream"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batch_size: int,
        seq_len: int,
        overlap: int = 0,
        split: str | None = None,
        access: str = "auto",
        verify: str = "auto",
        index: ShardIndex | None = None,
        dataset: str | None = None,
    ) -> None:
        if overlap < 0:
            raise ArgumentError(f"overlap must be at least 0, found {overlap}")
        if verify == "store" and dataset is not None:
            raise UnverifiableError(f"{path}: cannot be verified: a dataset of another origin has no digests")
        if verify == "store":
            require_digests(any_path(path), split)
        how = "none" if verify == "store" else verify
        store = MmapTokenStore(path, split=split, access=access, verify=how, index=index, dataset=dataset)
        self._set_windows(store, batch_size, seq_len, overlap)
        self.verify = verify

    def _set_windows(self, store: MmapTokenStore, batch_size: int, seq_len: int, overlap: int) -> None:
        self.store = store
        small = store.dtype.kind == "u" and store.dtype.itemsize <= 2
        dtype = DTYPE_BY_NAME["uint16" if small else "uint32"]
        num_batches = max(0, store.num_tokens - overlap) // seq_len // batch_size if batch_size * seq_len > 0 else 0
        meta = StoreMeta(
            batch_size,
            seq_len + overlap,
            dtype,
            total_records=num_batches * batch_size,
            vocab_size=store.vocab_size,
            tokenizer=store.tokenizer,
            fields=store.fields,
        )
        if num_batches == 0:
            raise ArgumentError(
                f"{store.path}: {store.num_tokens:,} tokens do not fill one batch of {batch_size:,} x {seq_len:,}"
                + (f" and {overlap} more" if overlap else "")
            )
        _ = store.access  # opens the first file, which says what cannot be read
        super().__init__(store.path, meta, num_batches, _as_windows(store.tokens, meta), seq_len)
        self.record_documents = WindowDocuments(store, meta.seq_len, seq_len)
        self.dropped_tokens = store.num_tokens - overlap - num_batches * batch_size * seq_len

    @property
    def token_fingerprint(self) -> str:
        return self.store.fingerprint

    def compared_tokens(self) -> Tokens | None:
        tokens = self.store.compared_tokens() if self.verify in ("auto", "batch") else None
        return None if tokens is None else _as_windows(tokens, self.meta)

    @property
    def verified(self) -> str:
        return self.verify if self.verify == "store" else self.store.verified

    @property
    def overlap(self) -> int:
        return self.seq_len - self.stride

    @property
    def has_padding(self) -> bool:
        return False

    def _field_reader(self, name: str) -> BatchReader:
        meta = self.meta.of_field(name)
        stride = self.stride * meta.seq_len // self.meta.seq_len
        return BatchReader(self.path, meta, self.num_batches, self.store.field(name).tokens, stride)

    def _compute_fingerprint(self) -> str:
        # the batch size too: a shuffle of batches means other records with another one
        return f"{self.store.fingerprint}:{self.meta.batch_size}x{self.stride}+{self.meta.seq_len - self.stride}"

    def serving(self, fingerprint: object) -> WindowReader:
        """Return a reader of the same windows in batches of another size, if the fingerprint says so."""
        other = WindowReader.__new__(WindowReader)
        try:
            batch_size = windows_of(fingerprint)[0]
            other._set_windows(self.store, batch_size, self.stride, self.meta.seq_len - self.stride)
        except ZbError:  # the stream has no batch of that size
            return self
        if not other.fingerprint == fingerprint != self.fingerprint:
            return self
        other.verify = self.verify
        if self.in_front is not None:
            self.in_front(other)
        return other

    def first_token(self, record: int, seq_len: int) -> int:
        """Return where a record of `seq_len` tokens, a divisor of those of a window, begins in the stream."""
        window, part = divmod(record, self.seq_len // seq_len)
        return window * self.stride + part * seq_len


def _as_windows(tokens: Tokens, meta: StoreMeta) -> Tokens:
    return tokens if tokens.dtype == meta.dtype else Converted(tokens, meta.dtype, meta)


def windows_of(fingerprint: object) -> tuple[int, int, int]:
    """Return batch size, sequence length and overlap of the reader that has this fingerprint."""
    found = _WINDOWS.search(fingerprint) if isinstance(fingerprint, str) else None
    if found is None:
        raise ArgumentError(f"expected the fingerprint of windows of a token stream, found {fingerprint!r}")
    batch_size, seq_len, overlap = map(int, found.groups())
    return batch_size, seq_len, overlap


def require_digests(path: Path, split: str | None = None) -> None:
    """Compare a stream with its digests."""
    for report in verify_store(path, split=split):
        if report.problem:
            raise report.problem
        if report.missing:
            raise UnverifiableError(f"{report.path}: cannot be verified: {report.missing}")
