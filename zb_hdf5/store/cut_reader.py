"""Batches that are cut out of the tokens of files, one or many, and are no units of these."""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from bisect import bisect_right
from typing import ClassVar, Final

import numpy as np

from zb_hdf5.errors import ArgumentError, UnverifiableError
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.windows import Windows
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shards import Sharded, StoreReader

#: Places that a sampled fingerprint covers, evenly over all tokens.
FINGERPRINT_PLACES: Final = 16
#: Tokens that it covers at each place.
TOKENS_OF_A_PLACE: Final = 4096
#: Files whose ends it covers too.
FINGERPRINT_FILES: Final = 64
#: The key of the stored dtype in the source of an index that is made of flat files.
FLAT_DTYPE: Final = "dtype"


class CutReader(StoreReader):
    """Reads batches that are cut out of the tokens of files. See `BatchReader`.

    They are no chunks: `verify="auto"` compares nothing, and "batch" reads whole chunks.
    """

    _auto_compares: ClassVar[bool] = False

    @abstractmethod
    def cut(self, windows: Windows) -> None:
        """Cut the tokens into other batches."""

    def _require_crc32(self) -> None:
        if self.index.without_crc32():
            self._shards.open_file(0, 0)  # names what is missing

    def _attach(self, index: ShardIndex) -> None:
        """Do nothing: documents follow from the cut, and a digest of all tokens is none of the batches."""

    def compared_tokens(self) -> Tokens | None:
        if self.verify != "auto":
            return super().compared_tokens()
        known = self._shards
        if self.index.read_as is not None and not self.index.digests:
            return None  # files of other programs, of which no digests were made
        tokens = Sharded(known.folder, self.index, known.asked, "batch", known.read_as)
        tokens.identities = known.identities
        try:
            tokens.open_file(0, 0)
        except UnverifiableError:
            return None
        return tokens

    def _sample(self) -> str:
        """Return a fingerprint: all sizes, and some tokens, evenly over all and at the ends of some of the files."""
        starts = self._shards.starts
        last_file = len(starts) - 2
        last = max(0, self.tokens.num_tokens - TOKENS_OF_A_PLACE)
        places = {last * k // (FINGERPRINT_PLACES - 1) for k in range(FINGERPRINT_PLACES)}
        for file in {last_file * k // (FINGERPRINT_FILES - 1) for k in range(FINGERPRINT_FILES)}:
            places |= {starts[file], max(starts[file], starts[file + 1] - TOKENS_OF_A_PLACE)}
        dtype = np.dtype(self.index.source.get(FLAT_DTYPE, self.dtype.str))
        digest = hashlib.sha256(f"{starts}:{dtype.str}".encode())
        for start in sorted(place for place in places if place < self.tokens.num_tokens):
            stop = min(start + TOKENS_OF_A_PLACE, starts[bisect_right(starts, start)])
            part = np.empty(stop - start, self.dtype)
            self.tokens.read([(start, part)])  # by position: to map a file takes longer than to read so little of it
            digest.update(np.ascontiguousarray(part, dtype))
        return f"sampled:{digest.hexdigest()}"

    def serving(self, fingerprint: object) -> BatchReader:
        """Return a reader of the same windows in batches of another size, if the fingerprint is of such."""
        if fingerprint == self.fingerprint:
            return self
        other = copy.copy(self)
        try:
            other.cut(self.windows.resized(Windows.in_fingerprint(fingerprint).size))
        except ArgumentError:  # no stream has batches of that size
            return self
        return other if other.num_records and other.fingerprint == fingerprint else self
