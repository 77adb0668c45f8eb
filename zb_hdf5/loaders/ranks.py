"""Rank and world size of this process: from its arguments, or from its job."""

from __future__ import annotations

import os
import sys
from typing import Final

from zb_hdf5.errors import ArgumentError

#: What torchrun sets.
LAUNCHER_VARIABLES: Final = (("RANK", "WORLD_SIZE"),)
#: What Slurm sets for the tasks of a step, if this process is one of them: a batch script is rank 0 of SLURM_NTASKS
#: too, of which no other runs, and the shell of `salloc` can be a step of one task in a job of many.
STEP_VARIABLES: Final = (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS"))
STEP_VARIABLE: Final = "SLURM_STEP_ID"


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
    step = STEP_VARIABLES if STEP_VARIABLE in os.environ else ()
    for rank, world_size in (*LAUNCHER_VARIABLES, *step):
        if rank in os.environ and world_size in os.environ:
            try:
                return int(os.environ[rank]), int(os.environ[world_size])
            except ValueError as error:
                raise ArgumentError(f"environment variables {rank} and {world_size} are no numbers: {error}") from error
    return 0, 1
