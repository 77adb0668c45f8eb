"""Writes the HDF5 batch store: one batch = one chunk = one extent, committed in an order that survives a kill.

`aligned.py` has the rules of that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.formats.batch_writer import Columns, FieldDigest, ShardInfo
from zb_hdf5.formats.file_writer import FileWriter
from zb_hdf5.formats.hdf5.aligned import AlignedFile, ColumnSpec, Rows, field_specs
from zb_hdf5.formats.hdf5.file import create_root
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_ATTRIBUTES,
    CRC32_CHUNK_ROWS,
    HDF5_ALIGNMENT,
    NO_CODEC,
    NO_SHA256,
    StoreMeta,
    TokenArray,
    batches_ahead,
    meta_block_bytes,
)

if TYPE_CHECKING:
    from zb_hdf5.files.digests import GroupDigest, PendingDigest


class HDF5BatchWriter(FileWriter):
    """Writes a `.h5` batch store in SWMR mode: other processes may open `<path>.partial` and follow.

    Committed means: after `write` returns, a kill of this process loses nothing of it (`durable=True`: nor does a
    power loss). Fields lie in the file, beside the tokens. See `FileWriter` for the parameters.
    """

    backend: ClassVar[str] = "hdf5"

    _opened: AlignedFile | None = None

    @staticmethod
    def stored_bytes(meta: StoreMeta, num_batches: int) -> int:
        crc32 = -(-num_batches // CRC32_CHUNK_ROWS) * CRC32_CHUNK_ROWS * 4
        tokens = num_batches * meta.padded_batch_bytes // (1 if meta.codec == NO_CODEC else 2)
        return meta_block_bytes(num_batches) + crc32 + HDF5_ALIGNMENT + tokens

    def _begin(self) -> None:
        lead = (1, *self.meta.shape)
        main = ColumnSpec(BATCHES, self.meta.dtype, lead, self.meta.codec)
        self._opened = self._aligned = AlignedFile(
            self._file, main, field_specs(self.meta, lead), batches_attributes(),
            expected=self._expected_batches, durable=self._durable, commit_bytes=self._commit_bytes,
            create=self._create_root,
        )  # fmt: skip

    def _create_root(self, h5: h5py.File) -> tuple[Rows, ...]:
        create_root(h5, self.meta, self._origin)
        return ()

    def _require_open(self) -> None:
        super()._require_open()
        self._aligned.require_sound(f"{self.num_batches:,} batches")

    def _make_room(self, stop: int) -> None:
        self._aligned.make_room(stop, batches_ahead(self._aligned.num_chunks, self.meta))

    def _write_fields(self, fields: Mapping[str, npt.NDArray[Any]], count: int) -> None:
        self._make_room(self.num_batches + count)
        with self._aligned.hdf5():
            for name, values in fields.items():
                self._aligned.fields[name].write(self.num_batches, values)

    def _append(self, batches: TokenArray, digest: PendingDigest) -> None:
        self._make_room(self.num_batches + len(batches))
        self._aligned.write(self.num_batches, batches)
        self._commit(batches, digest.result())

    def _room_for(self, first: int, count: int) -> int | None:
        self._make_room(first + count)
        return self._aligned.slots(first, count, self.meta.padded_batch_bytes)

    def _commit(self, batches: TokenArray, group: GroupDigest) -> None:
        token_count, max_token = self.token_count + batches.size, max(self.max_token, group.max_token)
        stop = self.num_batches + len(batches)
        marker = {"num_batches": stop, "token_count": token_count, "max_token": max_token}
        self._aligned.commit(group.crc32, batches.nbytes, **marker)
        self._count(batches, group)

    def _complete(self, info: ShardInfo) -> Columns:
        return self._aligned.complete(info.num_batches, info.num_batches, sha256=info.sha256.encode(), complete=1)

    def _field_digests(self) -> dict[str, FieldDigest]:
        return self._aligned.digests()

    def _compressed(self) -> CompressedTokens | None:
        return self._aligned.compressed

    def _release(self) -> None:
        if self._opened is not None:
            self._opened.close()


def batches_attributes() -> dict[str, tuple[np.dtype[Any], int | bytes]]:
    """Return the attributes of a growing dataset of batches, with their first values."""
    return {name: (dtype, NO_SHA256.encode() if name == "sha256" else 0) for name, dtype in BATCHES_ATTRIBUTES.items()}
