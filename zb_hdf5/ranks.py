"""Which share of the data is this process's: from its arguments, or from the job that it belongs to."""

from __future__ import annotations

import os
import sys

from zb_hdf5.errors import ArgumentError

#: What torchrun sets, then what Slurm sets.
RANK_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


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
    distributed = sys.modules.get("torch.distributed")  # not loaded means not initialised
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank, world_size in RANK_VARIABLES:
        if rank in os.environ and world_size in os.environ:
            try:
                return int(os.environ[rank]), int(os.environ[world_size])
            except ValueError as error:
                raise ArgumentError(f"environment variables {rank} and {world_size} are no numbers: {error}") from error
    return 0, 1
