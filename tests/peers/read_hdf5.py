"""An old h5py reads the files of this build, and copies their objects into files of its own.

python read_hdf5.py FOLDER COPIES, with Python 3.6 and later. HDF5 1.8 has to refuse them.
"""

import json
import sys
from pathlib import Path

import h5py
import numpy as np
from h5_contents import READS_TEXTS, contents, datasets

folder, copies = Path(sys.argv[1]), Path(sys.argv[2])
version = h5py.version.hdf5_version
expected = json.loads((folder / "contents.json").read_text())


def copy(source, target):
    """Copy all objects and the attributes of the root: as a repack, in the format that this HDF5 writes by default."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(str(source), "r") as old, h5py.File(str(target), "w") as new:
        for name in old:
            old.copy(name, new)
        for name in old.attrs:  # by their own types: h5py would make other ones of the texts
            attribute = h5py.h5a.open(old.id, name.encode())
            created = h5py.h5a.create(new.id, name.encode(), attribute.get_type(), attribute.get_space())
            value = np.empty(attribute.shape, attribute.dtype)
            attribute.read(value)
            created.write(value)


if h5py.version.hdf5_version_tuple < (1, 10):
    for name in expected:
        try:
            h5py.File(str(folder / name), "r")
        except OSError:
            continue
        sys.exit(f"{name}: expected to be refused by HDF5 {version}")
    print(f"HDF5 {version} (h5py {h5py.__version__}) refuses all {len(expected)} files of this build")
    sys.exit(0)
for name, found in expected.items():
    read = contents(folder / name)
    if (read if READS_TEXTS else datasets(read)) != (found if READS_TEXTS else datasets(found)):
        sys.exit(f"{name}: HDF5 {version} reads other contents")
    if READS_TEXTS:
        copy(folder / name, copies / name)
scope = "" if READS_TEXTS else ", without the texts of their attributes"
print(f"HDF5 {version} (h5py {h5py.__version__}) reads all {len(expected)} files of this build{scope}")
