"""Reads a store while it grows: a reader that shows what is committed now."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import FormatError, UnavailableError
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.hdf5.h5_reader import HDF5BatchReader, open_field
from zb_hdf5.spec import INDEX_NAME, StoreMeta
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.proof import ShardOpener
from zb_hdf5.store.sharded import Sharded
from zb_hdf5.store.shards import ShardedReader, sharded
from zb_hdf5.store.table import ShardEntry

#: Waits between the attempts to open a file that its writer may be closing or renaming.
RETRY_WAITS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


class LiveReader(ShardedReader):
    """Reads a growing store: what is committed now. See `BatchReader` for what it offers.

    `refresh` shows more. `complete` turns True when the writer has finished the store; a writer that was killed leaves
    it False. The fingerprint is the same from the first batch to the last, and that of the finished store.

    Parameters
    ----------
    path, options
        As for `ShardedReader`. A growing shard is read through h5py, and is not checked: "batch" refuses it.

    Raises
    ------
    FormatError
        If the index is malformed or names a file that is not there; at `refresh`, also if this is another store now.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        path = local_path(path)
        index = path / INDEX_NAME if path.is_dir() else path
        # before the index is read: never too new; one that was read already may be too old
        self._seen = None if "index" in options else _signature(index)
        super().__init__(path, **options)
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _open_tokens(folder: Path, index: ShardIndex, access: str, verify: str) -> Sharded:
        return sharded(ShardOpener(folder, index, access, verify), LiveTokens)

    def _newest_index(self) -> ShardIndex:
        index = ShardIndex.load(self.path)
        return index if self.meta.field is None else index.of_field(self.meta.field.name)

    def refresh(self) -> int:
        """See what the writer has committed since; return `num_batches`."""
        if not self.complete and isinstance(self.tokens, LiveTokens):
            for wait_s in RETRY_WAITS_S:
                with contextlib.suppress(FileNotFoundError):  # an empty last shard goes when the store is finished
                    return self._look(self.tokens)
                time.sleep(wait_s)
            self._look(self.tokens)
        return self.num_batches

    def _look(self, tokens: LiveTokens) -> int:
        seen = _signature(self.path / INDEX_NAME)
        index = self.index if seen == self._seen else self._newest_index()
        if index.live_id != self.index.live_id:  # its batches may have other numbers
            raise FormatError(
                f"{self.path}: was replaced or repaired: expected live_id {self.index.live_id!r}, "
                f"found {index.live_id!r}; open it again"
            )
        self.num_batches = tokens.follow(index)
        self.index, self._seen = index, seen
        if index.complete:
            self.complete, self.sha256 = True, index.sha256
        for field in self._fields.values():  # after the tokens: they are never behind them
            field.refresh()
        return self.num_batches


class LiveTokens(Sharded):
    """The tokens of a growing store. See `Sharded`.

    The growing shard stays open: after it is published, it cannot be found under the name `.partial` again.
    """

    _open_file: ShardOpener

    def _reset(self) -> None:
        super()._reset()
        self._lock = threading.Lock()
        self._followed: tuple[int, str, BatchReader] | None = None  # process, shard, its reader

    def follow(self, index: ShardIndex) -> int:
        """See what was committed since, under the newest index; return how many batches there are."""
        counts = index.table.values["num_batches"].tolist()
        if not index.shards[-1].complete:
            counts[-1] = self._growing(index.shards[-1]).refresh()
        with self._lock:
            self._open_file.index = index
            self.number(count * self.unit for count in counts)  # a batch keeps its number
        return sum(counts)

    def open_file(self, number: int, start: int) -> Tokens:
        """Return a file, of which the token at position `start` of all is about to be read."""
        entry = self._open_file.index.shards[number]
        return super().open_file(number, start) if entry.complete else self._growing(entry).tokens

    def _growing(self, entry: ShardEntry) -> BatchReader:
        """Return the reader of the growing shard, opened once in each process.

        That of the last one closes when no thread reads from it any more.
        """
        opener = self._open_file
        with self._lock:
            process = os.getpid()
            if self._followed is None or self._followed[:2] != (process, entry.path):
                reader = _open_growing(opener.folder / entry.path, opener.index.meta, opener.access, opener.verify)
                if (reader.meta.shape, reader.dtype) != (opener.index.meta.shape, opener.index.meta.dtype):
                    reader.close()
                    raise FormatError(
                        f"{reader.path}: {INDEX_NAME} says {opener.index.meta.shape}, found {reader.meta.shape}"
                    )
                self._followed = process, entry.path, reader
            return self._followed[2]

    def close(self) -> None:
        if self._followed is not None:
            self._followed[2].close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_followed", "_lock")}


def _open_growing(path: Path, meta: StoreMeta, access: str, verify: str) -> BatchReader:
    """Open the growing shard `path`, or its field that `meta` describes, under the name that it has at this moment.

    Raises
    ------
    FileNotFoundError
        If it has neither name.
    """
    for wait_s in RETRY_WAITS_S:
        with contextlib.suppress(FormatError, UnavailableError):  # opened while it was closed, perhaps
            return _open_now(path, meta, access, verify)
        time.sleep(wait_s)
    return _open_now(path, meta, access, verify)


def _open_now(path: Path, meta: StoreMeta, access: str, verify: str) -> BatchReader:
    open_file: Callable[..., BatchReader]
    open_file = HDF5BatchReader if meta.field is None else partial(open_field, name=meta.field.name)
    with contextlib.suppress(FileNotFoundError):
        return open_file(partial_path(path), access=access, verify=verify)
    return open_file(path, access=access, verify=verify)


def _signature(path: Path) -> tuple[int, int, int]:
    """Return what tells one version of a file from the next: it is replaced, never changed."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size
