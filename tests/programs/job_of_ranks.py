"""Run an epoch on as many processes as a job has ranks, at the same time: JOBS WORLD_SIZE...

JOBS are JSON: name -> path, twin, options of the loader. A twin is a copy of the data, which is read before: it imports
all that a rank needs.
"""

import contextlib
import json
import os
import sys

import opens

from zb_hdf5 import Loader


def read_epoch(name, path, options, rank, world_size):
    """Read all batches of a rank; the trace of its calls has a mark before the loader, and one before the steps."""
    mark(name, world_size, rank)
    with Loader(path, rank=rank, world_size=world_size, **options) as loader:
        mark(name, world_size, rank)
        for _ in loader:
            pass


def mark(name, world_size, rank):
    """Try to open a path that has the number of a rank."""
    with contextlib.suppress(OSError):
        os.open(f"{opens.MARK}{name}/{world_size}/{rank}/", os.O_RDONLY)


def run_job(name, path, options, world_size):
    """Start all ranks of a job, and wait for their ends."""
    children = []
    for rank in range(world_size):
        children.append(os.fork())
        if children[-1] == 0:
            read_epoch(name, path, options, rank, world_size)
            os._exit(0)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(1)


if __name__ == "__main__":
    jobs, *world_sizes = sys.argv[1:]
    for name, (path, twin, options) in json.loads(jobs).items():
        with Loader(twin, rank=0, world_size=1, **options) as loader:
            next(loader)
        for world_size in map(int, world_sizes):
            run_job(name, path, options, world_size)
