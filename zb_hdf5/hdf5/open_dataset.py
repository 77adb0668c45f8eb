"""A dataset that is open in this process: readers of one growing file share its handle."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any, Final

from zb_hdf5.files.identity import Identity
from zb_hdf5.hdf5.h5_file import open_h5_for_reading
from zb_hdf5.packages import h5py


class OpenDataset:
    """A dataset and its file, which is closed with the last of its readers."""

    def __init__(self, h5: h5py.File, name: str) -> None:
        self.h5 = h5
        self.stored = h5[name]
        weakref.finalize(self, h5.close).atexit = False


#: HDF5 breaks the chunk index of a dataset with two handles when one is refreshed: without an error, all of its chunks
#: are the first one until the next refresh. So all readers of a growing dataset share a handle, and at the moment of a
#: refresh nobody opens another one, to look at its attributes. A child shares the handles that it has inherited.
_growing = weakref.WeakValueDictionary[tuple[Any, ...], OpenDataset]()
#: Held by whoever opens a handle, looks into a file, or refreshes a dataset.
HANDLES: Final = threading.Lock()
# a child must not inherit it from a thread that it does not have
os.register_at_fork(before=HANDLES.acquire, after_in_parent=HANDLES.release, after_in_child=HANDLES.release)


def open_dataset(path: Path, name: str, identity: Identity, *, growing: bool) -> OpenDataset:
    """Open a dataset; that of a growing file is opened once in a process and its forks."""
    h5 = open_h5_for_reading(path, identity)
    if not growing:
        return OpenDataset(h5, name)
    status = os.fstat(h5.id.get_vfd_handle())
    key = status.st_dev, status.st_ino, name
    with HANDLES:
        found = _growing.get(key)
        if found is None:
            found = _growing[key] = OpenDataset(h5, name)
        else:
            h5.close()
        return found


def close_others(stored: h5py.Dataset) -> None:
    """Close all other handles of a growing dataset: their last reader is gone, and they are about to be closed.

    They are closed by a thread that has not come to it yet; in a child, by a thread that is not there.
    """
    if stored.file.id.get_intent() & h5py.h5f.ACC_RDWR:  # by a writer in this process, where a refresh does nothing
        return
    own = h5py.h5o.get_info(stored.id).addr
    for other in h5py.h5f.get_obj_ids(stored.file.id, h5py.h5f.OBJ_DATASET):
        if other.id != stored.id.id and h5py.h5o.get_info(other).addr == own:
            while other.valid:
                h5py.h5i.dec_ref(other)
