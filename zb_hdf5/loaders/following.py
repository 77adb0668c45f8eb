"""Reads a store while it grows: a reader that shows what is committed, and a loader that waits for what comes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.columns.source import BatchSource
from zb_hdf5.core.publishing import partial_path
from zb_hdf5.errors import ArgumentError, FormatError, StateError, UnavailableError
from zb_hdf5.formats.hdf5.reader import HDF5BatchReader
from zb_hdf5.loaders.loader import Loader, Request
from zb_hdf5.loaders.states import MAX_COUNT
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.index import ShardEntry, ShardIndex
from zb_hdf5.store.shards import ShardedReader, ShardedSource

#: Waits between the attempts to open a file that its writer may be closing or renaming.
RETRY_WAITS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
#: A waiting loader looks again after the first of these times, and then after twice as long, up to the second.
POLL_S: Final = (0.01, 1.0)


class LiveReader(ShardedReader):
    """Reads a growing store: what is committed now. See `BatchReader` for what it offers.

    `refresh` shows more. `complete` turns True when the writer has finished the store; a writer that was killed leaves
    it False. The fingerprint is the same from the first batch to the last, and that of the finished store.

    Parameters
    ----------
    path, options
        As for `ShardedReader`. A growing shard is read through h5py, and has no digests to verify by batch.

    Raises
    ------
    FormatError
        If the index is malformed or names a file that is not there; at `refresh`, also if this is another store now.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        path = Path(path)
        self._seen = _signature(path / INDEX_NAME if path.is_dir() else path)  # before the index is read: never too new
        super().__init__(path, **options)
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _open_source(folder: Path, index: ShardIndex, access: str, verify: str) -> LiveSource:
        return LiveSource(folder, index, access, verify)

    def refresh(self) -> int:
        """See what the writer has committed since; return `num_batches`."""
        if not self.complete and isinstance(self._source, LiveSource):
            for wait_s in RETRY_WAITS_S:
                with contextlib.suppress(FileNotFoundError):  # an empty last shard goes when the store is finished
                    return self._look(self._source)
                time.sleep(wait_s)
            self._look(self._source)
        return self.num_batches

    def _look(self, source: LiveSource) -> int:
        seen = _signature(self.path / INDEX_NAME)
        index = self.index if seen == self._seen else ShardIndex.load(self.path)
        if index.live_id != self.index.live_id:  # its batches may have other numbers
            raise FormatError(
                f"{self.path}: was replaced or repaired: expected live_id {self.index.live_id!r}, "
                f"found {index.live_id!r}; open it again"
            )
        self.num_batches = source.refresh(index)
        self.index, self._seen = index, seen
        if index.complete:
            self.complete, self.sha256 = True, index.sha256
        return self.num_batches


class LiveSource(ShardedSource):
    """The shards of a growing store. The growing one is never let go of: under its first name it is found only once."""

    def _reset(self) -> None:
        super()._reset()
        self._followed: tuple[int, str, HDF5BatchReader] | None = None  # process, shard, its reader

    def refresh(self, index: ShardIndex) -> int:
        """See what was committed since, under the newest index; return how many batches there are."""
        counts = [shard.num_batches for shard in index.shards]
        if not index.shards[-1].complete:
            counts[-1] = self._follow(index.shards[-1]).refresh()
        with self._lock:
            self._index = index
            self._number(counts)  # a batch keeps its number
        return self._starts[-1]

    def _source(self, shard: int) -> BatchSource:
        entry = self._index.shards[shard]
        return super()._source(shard) if entry.complete else self._follow(entry)._source

    def _follow(self, entry: ShardEntry) -> HDF5BatchReader:
        """Return the reader of the growing shard, opened once in each process.

        That of the last one closes when no thread reads from it any more.
        """
        with self._lock:
            process = os.getpid()
            if self._followed is None or self._followed[:2] != (process, entry.path):
                reader = _open_growing(self._folder / entry.path, self._access, self._verify)
                if (reader.meta.shape, reader.dtype) != (self._index.meta.shape, self._index.meta.dtype):
                    reader.close()
                    raise FormatError(
                        f"{reader.path}: {INDEX_NAME} says {self._index.meta.shape}, found {reader.meta.shape}"
                    )
                self._followed = process, entry.path, reader
            return self._followed[2]

    def close(self) -> None:
        if self._followed is not None:
            self._followed[2].close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_followed"}


class FollowingLoader(Loader):
    """Iterates over a store, or a lone `.h5.partial`, while its writer adds to it: one epoch, in stored order.

    A step is given out when the records of all ranks are committed, so all ranks make the same steps, however far
    apart they look. The iteration ends with the store, where `drop_last` decides about the rest. No step is read ahead.

    A state taken here goes on in any loader over the same store, growing or finished. One of a lone file is of no use
    after the file has grown: such a file has no name for what it will be.

    Parameters
    ----------
    source, options
        As for `Loader`, but for `shuffle`, which is "sequential", and `epoch`, which is 0.
    timeout_s
        How long to wait without a new batch.

    Raises
    ------
    ArgumentError
        If an option asks for another order, or for reading ahead.
    UnavailableError
        From the iteration, if nothing came for `timeout_s`.
    """

    _last_epoch = 0

    def __init__(
        self,
        source: str | os.PathLike[str] | BatchReader,
        *,
        follow: bool = True,
        timeout_s: float = 600.0,
        shuffle: str = "sequential",
        prefetch: int | str = 0,
        device: Any = None,
        **options: Any,
    ) -> None:
        if shuffle != "sequential":
            raise ArgumentError(
                f'follow=True needs shuffle="sequential", found {shuffle!r}: what comes cannot be shuffled'
            )
        if prefetch not in (0, "auto") or device is not None:
            raise ArgumentError("follow=True reads nothing ahead: leave out prefetch and device")
        self.timeout_s = timeout_s
        super().__init__(source, shuffle=shuffle, prefetch=0, **options)

    def set_epoch(self, epoch: int) -> None:
        """Accept epoch 0: the store grows once."""
        if epoch != 0:
            raise ArgumentError(f"follow=True makes one epoch, 0, found {epoch}; open the finished store for more")
        super().set_epoch(epoch)

    def set_batch_size(self, batch_size: int) -> None:
        """Change the batch size from the next step on, also in the middle of an iteration: nothing is skipped."""
        if batch_size < 1:
            raise ArgumentError(f"batch_size must be at least 1, found {batch_size}")
        if batch_size != self.batch_size:
            self.batch_size = batch_size
            self._position = min(self._position, self._end_of_epoch(self.epoch, self.reader))  # if it was filled up
            self._course += 1

    def __len__(self) -> int:
        # not a ZbError: list() asks for a length, and goes on without one after a TypeError only
        raise TypeError(f"{self.reader.path}: a loader that follows has no length: nobody knows how much will come")

    def _steps_from(self, position: int, batch_size: int) -> int:
        left, step = max(0, self.num_records - position), batch_size * self.world_size
        return left // step if self.drop_last or not self.reader.complete else -(-left // step)

    def _end_of_epoch(self, epoch: int, reader: BatchReader) -> int:
        if not reader.complete:
            return MAX_COUNT  # what the state has seen may not be visible here yet
        return reader.num_batches * self._records_per_batch

    def _requests(self, position: int, batch_size: int) -> Iterator[Request]:
        start = position
        while self._wait(position, batch_size):
            for request in super()._requests(position, batch_size):
                yield request
                position += batch_size * self.world_size
        if start > self.num_records:
            raise StateError(
                f"{self.reader.path}: state: expected position in 0..{self.num_records:,}, the records of the store "
                f"that is complete now, found {start:,}"
            )

    def _wait(self, position: int, batch_size: int) -> bool:
        """Wait until there is a step at `position`; return False if there will be none."""
        pause_s, last = POLL_S[0], time.monotonic()
        while not self._steps_from(position, batch_size):
            if self.reader.complete:
                return False
            before = self.num_records
            self.reader.refresh()
            self._order = self.order_of_epoch(self.epoch)
            if self.num_records > before:
                pause_s, last = POLL_S[0], time.monotonic()
            elif not self.reader.complete:
                self._pause(pause_s, time.monotonic() - last)
                pause_s = min(2 * pause_s, POLL_S[1])
        return True

    def _pause(self, pause_s: float, waited_s: float) -> None:
        if waited_s >= self.timeout_s:
            raise UnavailableError(
                f"{self.reader.path}: no new batch for {self.timeout_s:g} s after {self.reader.num_batches:,} batches: "
                f"its writer may have died: then run 'zb repair {self.reader.path}'; or pass a larger timeout_s"
            )
        time.sleep(min(pause_s, self.timeout_s - waited_s))


def _open_growing(path: Path, access: str, verify: str) -> HDF5BatchReader:
    """Open the growing shard `path`, under the name that it has at this moment.

    Raises
    ------
    FileNotFoundError
        If it has neither name.
    """
    for wait_s in RETRY_WAITS_S:
        with contextlib.suppress(FormatError, UnavailableError):  # opened while it was closed, perhaps
            return _open_now(path, access, verify)
        time.sleep(wait_s)
    return _open_now(path, access, verify)


def _open_now(path: Path, access: str, verify: str) -> HDF5BatchReader:
    with contextlib.suppress(FileNotFoundError):
        return HDF5BatchReader(partial_path(path), access=access, verify=verify)
    return HDF5BatchReader(path, access=access, verify=verify)


def _signature(path: Path) -> tuple[int, int, int]:
    """Return what tells one version of a file from the next: it is replaced, never changed."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size
