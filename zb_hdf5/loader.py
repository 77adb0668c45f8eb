"""The loader: a reader, an order, a rank and a position. Written once, for every backend.

    reader (which bytes)  x  order (position -> index)  x  rank of world_size (which positions)  ->  int64 tensors

A position counts the batches that all ranks together have consumed in the epoch; rank r takes positions `start + r`,
`start + r + world_size`, ... so ranks never talk, and a checkpoint fits any number of them. Reading ahead in threads
and transfer to a device will stand between `_indices` and the tensors, in a room of their own (`prefetch.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zb_hdf5.errors import ArgumentError, StateError
from zb_hdf5.order import Order, make_order
from zb_hdf5.reader import BatchReader
from zb_hdf5.store import open_reader

if TYPE_CHECKING:
    import torch

STATE_VERSION: Final = 1
#: Positions whose indices are computed at once: enough to make numpy cheap, little enough to start at once.
ORDER_BLOCK: Final = 1024


class Loader:
    """Iterates over the batches of a store: one epoch per `iter`, as `torch.int64` tensors of shape (B, S).

    Parameters
    ----------
    source
        A path for `open_reader`, or a reader.
    backend, access, verify
        As for `open_reader`; without effect on a reader.
    shuffle
        "global": a uniform permutation of all batches. "block": ZeroBatch's shuffle of blocks of `block_size`
        consecutive batches. "sequential": as stored.
    seed, epoch
        What the order depends on, and nothing else: the same in every backend.
    rank, world_size
        Which share of each epoch this process takes. None: from `torch.distributed` if initialised, else the variables
        RANK and WORLD_SIZE, else SLURM_PROCID and SLURM_NTASKS, else 0 of 1. Ranks that must see the same data
        (tensor or pipeline parallel) pass their data-parallel rank.
    drop_last
        Every rank makes the same number of steps either way. True: the last `num_batches % world_size` batches of the
        epoch's order are left out. False: the last step is filled up from the start of the epoch's order.

    Raises
    ------
    ArgumentError
        If the arguments contradict each other, or the store has fewer batches than ranks.

    Notes
    -----
    A new iteration starts the epoch anew, except the first one after `load_state_dict`, which goes on where the state
    was taken. Not thread-safe; picklable.

    Examples
    --------
    >>> loader = Loader("data/train", seed=42)                          # doctest: +SKIP
    >>> for epoch in range(3):                                          # doctest: +SKIP
    ...     loader.set_epoch(epoch)
    ...     for batch in loader:
    ...         train(batch)
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | BatchReader,
        *,
        backend: str = "auto",
        access: str = "auto",
        verify: str = "none",
        shuffle: str = "global",
        block_size: int = 256,
        seed: int = 42,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = True,
    ) -> None:
        if not isinstance(source, BatchReader):
            source = open_reader(source, backend=backend, access=access, verify=verify)
        self.reader: BatchReader = source
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self.shuffle, self.block_size, self.seed, self.drop_last = shuffle, block_size, seed, drop_last
        self.epoch = -1  # none yet
        self.set_epoch(epoch)
        if len(self) == 0:
            raise ArgumentError(
                f"{self.reader.path}: {self.reader.num_batches:,} batches are too few for {self.world_size:,} ranks; "
                "write smaller batches, or pass drop_last=False"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over. A resumed position is kept if it belongs to this epoch."""
        if epoch < 0:
            raise ArgumentError(f"epoch must be at least 0, found {epoch}")
        if self.epoch != epoch:
            self.epoch = epoch
            self._order: Order = make_order(
                self.shuffle, self.reader.num_batches, seed=self.seed, epoch=epoch, block_size=self.block_size
            )
            self._position = 0
            self._resumed = False

    def __len__(self) -> int:
        """Steps of a whole epoch: the number of batches that this rank, like every rank, yields."""
        return _steps(self.reader.num_batches, self.world_size, self.drop_last)

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self._resumed:
            self._position = 0
        self._resumed = False
        read = self.reader.read_batch_torch
        for index in self._indices(self._position):
            batch = read(index)
            self._position += self.world_size
            yield batch

    def _indices(self, start: int) -> Iterator[int]:
        """Yield the store indices that this rank takes from position `start` to the end of the epoch."""
        n = self.reader.num_batches
        stop = start + _steps(n - start, self.world_size, self.drop_last) * self.world_size
        for first in range(start + self.rank, stop, ORDER_BLOCK * self.world_size):
            last = min(first + ORDER_BLOCK * self.world_size, stop)
            yield from self._order.indices(np.arange(first, last, self.world_size) % n).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: what was yielded, never what was read ahead.

        Plain JSON values, under 1 KB, the same on every rank after the same step, valid for any other world size.
        """
        return {**self._identity(), "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, in O(1), whatever the world size or backend was then.

        Raises
        ------
        StateError
            If the state is of other data, another seed or another order; the message names the field.
        """
        for name, expected in self._identity().items():
            found = state_dict.get(name)
            if found != expected:
                hint = "; open both with verify='store'" if str(found).startswith("sampled:") else ""
                raise StateError(f"{self.reader.path}: state has {name} {found!r}, this loader {expected!r}{hint}")
        epoch, position = state_dict.get("epoch"), state_dict.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or epoch < 0 or position < 0:
            raise StateError(f"state: expected epoch and position >= 0, found {epoch!r} and {position!r}")
        self.set_epoch(epoch)
        self._position = position
        self._resumed = True

    def _identity(self) -> dict[str, Any]:
        """What must agree for a position to mean the same batches."""
        return {
            "version": STATE_VERSION,
            "fingerprint": self.reader.fingerprint,
            "shuffle": self.shuffle,
            "block_size": self.block_size if self.shuffle == "block" else None,
            "seed": self.seed,
        }

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()


class BatchNativeLoader(Loader):
    """ZeroBatch v2's loader, under its own name and arguments: a `Loader` with the block shuffle.

    Parameters
    ----------
    path
        A `.batch` file, or anything else that `open_reader` takes.
    block_size
        Consecutive batches that stay together.
    shuffle
        False: as stored.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        block_size: int = 256,
        shuffle: bool = True,
        seed: int = 42,
        epoch: int = 0,
    ) -> None:
        order = "block" if shuffle else "sequential"
        super().__init__(path, shuffle=order, block_size=block_size, seed=seed, epoch=epoch, rank=0, world_size=1)


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world_size) from the arguments or, where both are None, from the job's environment.

    Raises
    ------
    ArgumentError
        Unless `0 <= rank < world_size`, or if only one of them is given.
    """
    if (rank is None) != (world_size is None):
        raise ArgumentError(f"pass both rank and world_size or neither, found rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        rank, world_size = _rank_of_job()
    if not 0 <= rank < world_size:
        raise ArgumentError(f"expected 0 <= rank < world_size, found rank {rank} of {world_size}")
    return rank, world_size


def _rank_of_job() -> tuple[int, int]:
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank, world_size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world_size in os.environ:
            try:
                return int(os.environ[rank]), int(os.environ[world_size])
            except ValueError as error:
                raise ArgumentError(f"environment variables {rank} and {world_size} are no numbers: {error}") from error
    return 0, 1


def _steps(num_batches: int, world_size: int, drop_last: bool) -> int:
    if num_batches <= 0:
        return 0
    return num_batches // world_size if drop_last else -(-num_batches // world_size)
