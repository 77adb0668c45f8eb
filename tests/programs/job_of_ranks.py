"""Run an epoch on as many processes as a job has ranks, at the same time: PATH TWIN OPTIONS WORLD_SIZE...

OPTIONS of the loader are JSON. TWIN is a copy of the data, which is read before: it imports all that a rank needs.
"""

import contextlib
import json
import os
import sys

import opens

from zb_hdf5 import Loader


def read_epoch(path, options, rank, world_size):
    """Read all batches of a rank; the trace of its calls has a mark before the loader, and one before the steps."""
    mark(world_size, rank)
    with Loader(path, rank=rank, world_size=world_size, **options) as loader:
        mark(world_size, rank)
        for _ in loader:
            pass


def mark(world_size, rank):
    """Try to open a path that has the number of a rank."""
    with contextlib.suppress(OSError):
        os.open(f"{opens.MARK}{world_size}/{rank}/", os.O_RDONLY)


if __name__ == "__main__":
    path, twin, options, *world_sizes = sys.argv[1:]
    with Loader(twin, rank=0, world_size=1, **json.loads(options)) as loader:
        next(loader)
    for world_size in map(int, world_sizes):
        children = []
        for rank in range(world_size):
            children.append(os.fork())
            if children[-1] == 0:
                read_epoch(path, json.loads(options), rank, world_size)
                os._exit(0)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(1)
