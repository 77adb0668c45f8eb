"""The fingerprint of tokens: their identity in states, in journals, and in the names of caches.

Each text is part of checkpoints: none of them ever changes for the same tokens.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.windows import Windows
from zb_hdf5.spec import SAMPLED_AS, StoreMeta, TokenArray, content_fingerprint, shape_in_fingerprint

#: Batches that a sampled fingerprint covers, at most.
FINGERPRINT_SAMPLES: Final = 16
#: Places that the fingerprint of tokens covers, evenly over all.
FINGERPRINT_PLACES: Final = 16
#: Tokens that it covers at each place.
TOKENS_OF_A_PLACE: Final = 4096
#: Files whose ends it covers too.
FINGERPRINT_FILES: Final = 64


class SampledBatches(Protocol):
    """The facts of batches that their fingerprint has, and some of the batches."""

    @property
    def num_batches(self) -> int: ...
    @property
    def meta(self) -> StoreMeta: ...
    @property
    def windows(self) -> Windows: ...
    def read_into(self, index: int, out: TokenArray) -> None: ...


class Known(Enum):
    """The facts by which tokens are known: one row of `Fingerprint.in_batches` and `Fingerprint.in_cache` for each."""

    STORED = auto()  # batches, by the digests of their shards
    LIVE = auto()  # batches of a store that was written live, by its id
    LONE = auto()  # batches of one file without a digest, by some of them
    STREAM = auto()  # windows over the tokens, by a digest, or by some tokens
    RECORDS = auto()  # records in files of another program, by some tokens
    MADE_UP = auto()  # tokens that are computed, by the way that they are


@dataclass(frozen=True)
class Fingerprint:
    """The identity of the tokens of a corpus: alone, in batches of some shape, or as documents.

    Attributes
    ----------
    by
        The facts by which the tokens are known.
    content
        Returns the text of the tokens; "": none is known without reading them.
    sample
        Returns the text of some tokens, which are read for it.
    digests
        The sha256 of the tokens of each shard, in order: of stored batches.
    """

    by: Known
    content: Callable[[], str]
    sample: Callable[[], str]
    digests: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(by={self.by.name})"

    @property
    def of_tokens(self) -> str:
        """The text of the tokens, whatever the shape of their batches is."""
        return self.content() or self.sample()

    def of_documents(self, offsets: npt.NDArray[np.uint64]) -> str:
        """Return the text of the documents of a stream: the same tokens with other boundaries are other documents.

        Parameters
        ----------
        offsets
            The start of each document and the end of the last one.
        """
        return f"{self.of_tokens}:{len(offsets) - 1}:{crc32_of(offsets.data):08x}"

    def in_batches(self, batches: SampledBatches) -> str:
        """Return the text of the tokens in batches of some shape."""
        match self.by:
            case Known.STORED:
                return content_fingerprint(self.digests, batches.meta)
            case Known.LIVE:
                return f"{self.content()}:{shape_in_fingerprint(batches.meta)}"
            case Known.LONE:
                return sampled_batches(batches)
            case Known.STREAM | Known.MADE_UP:
                return f"{self.of_tokens}:{batches.windows.in_text}"
            case Known.RECORDS:
                return f"{self.sample()}:{batches.windows.in_text}"

    def in_cache(self, batches: SampledBatches) -> str:
        """Return the text by which a cache keeps the tokens: all windows of a stream, and all records, share one."""
        match self.by:
            case Known.STREAM:
                return self.of_tokens
            case Known.RECORDS:
                return self.sample()
            case _:
                return self.in_batches(batches)


def content_text(sha256: str, dtype: np.dtype[Any]) -> str:
    """Return the text of tokens by the digest of their bytes."""
    return f"tokens:{sha256}:{dtype.name}"


def sampled_batches(batches: SampledBatches) -> str:
    """Return the text of batches by their shape, and by some of them, evenly over all."""
    n = batches.num_batches
    sample = {i * (n - 1) // (FINGERPRINT_SAMPLES - 1) for i in range(FINGERPRINT_SAMPLES)} if n else set()
    meta = batches.meta
    dtype = SAMPLED_AS.get(meta.dtype, meta.dtype)
    text = f"{n}:{meta.batch_size}:{meta.seq_len}:{dtype.name}:{meta.seed}:{meta.total_records}"
    digest = hashlib.sha256(text.encode())
    batch = np.empty(meta.shape, meta.dtype)
    for number in sorted(sample):
        batches.read_into(number, batch)  # a copy: nothing is mapped for it
        digest.update(batch.astype(dtype, copy=False))
    return f"sampled:{digest.hexdigest()}"


def sampled_tokens(tokens: Tokens, starts: list[int], dtype: np.dtype[Any]) -> str:
    """Return the text of tokens by all sizes, and by some of them, evenly over all and at the ends of some files.

    Parameters
    ----------
    tokens
        The tokens.
    starts
        The first token of each file, and the end of the last one.
    dtype
        The dtype that the ids have in it: of flat files that of the files.
    """
    last_file = len(starts) - 2
    last = max(0, tokens.num_tokens - TOKENS_OF_A_PLACE)
    places = {last * k // (FINGERPRINT_PLACES - 1) for k in range(FINGERPRINT_PLACES)}
    for file in {last_file * k // (FINGERPRINT_FILES - 1) for k in range(FINGERPRINT_FILES)}:
        places |= {starts[file], max(starts[file], starts[file + 1] - TOKENS_OF_A_PLACE)}
    digest = hashlib.sha256(f"{starts}:{dtype.str}".encode())
    for start in sorted(place for place in places if place < tokens.num_tokens):
        stop = min(start + TOKENS_OF_A_PLACE, starts[bisect_right(starts, start)])
        part = np.empty(stop - start, tokens.dtype)
        tokens.read([(start, part)])  # by position: to map a file takes longer than to read so little of it
        digest.update(np.ascontiguousarray(part, dtype))
    return f"sampled:{digest.hexdigest()}"
