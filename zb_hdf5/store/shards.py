"""The reader over a store's shards: one sequence of batches, whichever file they lie in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zb_hdf5.errors import BackendError, UnverifiableError
from zb_hdf5.files.checked import VERIFIED
from zb_hdf5.files.file_tokens import REMOTE
from zb_hdf5.files.paths import RemotePath, any_path, require_remote_access
from zb_hdf5.files.tokens import Wait
from zb_hdf5.formats.batch_reader import BatchReader, require_options
from zb_hdf5.formats.registry import BACKENDS
from zb_hdf5.spec import NO_CODEC, content_fingerprint, live_fingerprint
from zb_hdf5.store.index import ShardIndex, require_files
from zb_hdf5.store.proof import ShardOpener
from zb_hdf5.store.sharded import Sharded
from zb_hdf5.store.store_documents import StoreDocuments


def sharded(opener: ShardOpener, kind: type[Sharded] = Sharded) -> Sharded:
    """Return the tokens of a store, or of a field of it."""
    index, meta = opener.index, opener.index.meta
    far = isinstance(opener.folder, RemotePath)
    wait = Wait.FAR if far else Wait.LOCAL if meta.codec == NO_CODEC else Wait.DECODE
    return kind(
        index.table.values["token_count"].tolist(), opener, dtype=meta.dtype, unit=meta.batch_tokens,
        name=str(opener.folder), access=_access_of(opener), wait=wait,
    )  # fmt: skip


def _access_of(opener: ShardOpener) -> str | None:
    """Return the access of the shards, where no look into one is needed to tell."""
    index, column, access = opener.index, opener.index.meta.column, opener.access
    first = next((shard for shard in index.shards if shard.token_count), index.shards[0])
    if access == "h5py":
        return access if BACKENDS[first.backend].has_datasets else None
    if column in first.columns:
        return REMOTE if isinstance(opener.folder, RemotePath) else access
    return "pread" if first.is_placed(column) and access != "mmap" else None


class ShardedReader(BatchReader):
    """Reads a store as one sequence of batches. See `BatchReader` for what it offers."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        backend: str = "auto",
        access: str = "auto",
        verify: str = "auto",
        split: str | None = None,
        index: ShardIndex | None = None,
    ) -> None:
        require_options(access, verify)
        path = any_path(path)
        require_remote_access(path, access)
        index = (index or ShardIndex.load(path)).of_split(split)
        folder = path if path.is_dir() else path.parent
        if not isinstance(folder, RemotePath):  # of objects each would be asked for
            require_files(folder, index)
        backends = dict.fromkeys(index.table.values["backend"])
        if backend != "auto" and list(backends) != [backend]:
            other = next(shard for shard in index.shards if shard.backend != backend)
            raise BackendError(f"{folder / other.path}: asked for backend {backend!r}, found {other.backend!r}")
        if verify == "batch" and index.complete and (unknown := index.without_crc32()):
            raise UnverifiableError(f"{folder / unknown}: cannot be verified: the index knows no crc32 of its batches")
        super().__init__(folder, index.meta, index.num_batches, self._open_tokens(folder, index, access, verify))
        _ = self.tokens.access  # where the index does not tell, the first shard says what cannot be read
        self.index, self.complete = index, index.complete
        if index.complete:
            self.record_documents = StoreDocuments(folder, index, verify)
        self.backend = " and ".join(sorted(backends))
        self.sha256 = index.sha256 if index.complete else None
        self.verify = verify
        self._options: dict[str, Any] = {"access": access, "verify": verify}

    @staticmethod
    def _open_tokens(folder: Path, index: ShardIndex, access: str, verify: str) -> Sharded:
        return sharded(ShardOpener(folder, index, access, verify))

    @property
    def verified(self) -> str:
        """See `BatchReader`. Of a store in which one shard has no crc32, or still grows: "none"."""
        return "none" if self.index.without_crc32() else VERIFIED[self.verify]

    def _field_reader(self, name: str) -> BatchReader:
        """Read the values of a field as a store of its own, whose shards are the files that hold them."""
        return type(self)(self.path, index=self.index.of_field(name), **self._options)

    def _compute_fingerprint(self) -> str:
        if self.index.live_id:
            return live_fingerprint(self.index.live_id, self.meta)
        return content_fingerprint(self.index.table.values["sha256"], self.meta)
