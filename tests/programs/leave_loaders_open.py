"""Ends with readers, and loaders in the middle of an epoch, in globals; a function keeps these to the last.

    python leave_loaders_open.py FOLDER IMPORTS

IMPORTS are the modules that are imported before all others, in that order: "torch,zb_hdf5", or "".
"""

import importlib
import sys

path, imports = sys.argv[1:]
for name in filter(None, imports.split(",")):
    globals()[name] = importlib.import_module(name)

from zb_hdf5 import FollowingLoader, Loader, open_reader  # noqa: E402

store = path + "/store"
ALONE = {"rank": 0, "world_size": 1}
loaders = [
    Loader(store, **ALONE),
    Loader(store, access="pread", **ALONE),
    Loader(store, access="h5py", **ALONE),
    Loader(store, shuffle="records", **ALONE),
    Loader(store, prefetch=2, **ALONE),
    Loader(store, cache=path + "/cache", **ALONE),
    Loader(path + "/packed.h5", documents=True, spans=True, **ALONE),
    Loader(path + "/stream.h5", batch_size=2, seq_len=8, documents=True, **ALONE),
    FollowingLoader(store, **ALONE),
]
iterators = [iter(loader) for loader in loaders]
steps = [(next(iterator), next(loader)) for iterator, loader in zip(iterators, loaders, strict=True)]
reader = open_reader(store)
views = list(reader)


def f():
    pass
