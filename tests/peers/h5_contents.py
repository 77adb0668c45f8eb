"""The contents of an HDF5 file, as any version of h5py reads them: run by Python 3.6 and later."""

import hashlib

import h5py
import numpy as np

#: h5py before 2.10 does not read UTF-8 texts of a fixed length, which our attributes are (h5py#719).
READS_TEXTS = h5py.version.version_tuple[:2] >= (2, 10)
SIGNATURE = b"\x89HDF\r\n\x1a\n"


def hdf5_files(folder):
    """Return the HDF5 files below a folder, whatever their names end in."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:8] == SIGNATURE)


def contents(path):
    """Return the shape, dtype and sha256 of each dataset, and the attributes of each object."""
    found = {}
    with h5py.File(str(path), "r") as h5:
        found["/"] = {"attributes": _attributes(h5)}

        def look(name, item):
            found[name] = {"attributes": _attributes(item)}
            if isinstance(item, h5py.Dataset):
                values = np.ascontiguousarray(item[()])
                digest = hashlib.sha256(values.tobytes()).hexdigest()
                found[name].update(shape=list(item.shape), dtype=values.dtype.str, sha256=digest)

        h5.visititems(look)
    return found


def datasets(found):
    """Return contents without attributes."""
    return {name: {key: facts[key] for key in facts if key != "attributes"} for name, facts in found.items()}


def _attributes(item):
    if not READS_TEXTS:
        return {}
    return {name: [_text(each) for each in np.ravel(item.attrs[name]).tolist()] for name in sorted(item.attrs)}


def _text(value):
    """Return a value as text: h5py 2 gives bytes for some texts for which h5py 3 gives str."""
    return value.decode() if isinstance(value, bytes) else str(value)
