"""Run an epoch on as many processes as a job has ranks, at the same time: path, options as JSON, world sizes."""

import contextlib
import json
import os
import sys

import opens

from zb_hdf5 import Loader


def read_epoch(path, options, rank, world_size):
    """Read all batches of a rank; the trace of its calls begins with the size of the job."""
    with contextlib.suppress(OSError):
        os.open(f"{opens.MARK}{world_size}/", os.O_RDONLY)
    with Loader(path, rank=rank, world_size=world_size, **options) as loader:
        for _ in loader:
            pass


if __name__ == "__main__":
    path, options, *world_sizes = sys.argv[1:]
    with Loader(path, rank=0, world_size=1, **json.loads(options)) as loader:
        next(loader)  # imports all that a rank needs
    for world_size in map(int, world_sizes):
        children = []
        for rank in range(world_size):
            children.append(os.fork())
            if children[-1] == 0:
                read_epoch(path, json.loads(options), rank, world_size)
                os._exit(0)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(1)
