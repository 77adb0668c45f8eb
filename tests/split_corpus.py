"""Files of a corpus with splits, in each format that is read in place."""

import struct

import h5py
import numpy as np

SHAPE = {"batch_size": 2, "seq_len": 5}
#: The name of each file, and its ids: a thousand times the number of its split.
FILES = {"fineweb_train_000001": 1, "fineweb_train_000002": 1, "fineweb_val_000000": 2, "fineweb_test_000000": 3}
TOKENS = {"train": 80, "val": 40, "test": 40}
FIRST_ID = {"train": 1000, "val": 2000, "test": 3000}


def ids_of(number):
    return (number * 1000 + np.arange(40)).astype("<u2")


def write_llmc(path, ids):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.with_suffix(".bin").write_bytes(header.tobytes() + ids.tobytes())


def write_megatron(path, ids):
    path.with_suffix(".bin").write_bytes(ids.tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2)
    index += np.array([len(ids)], "<i4").tobytes() + np.array([0, 0, 1], "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)


def write_datatrove(path, ids):
    path.with_suffix(".ds").write_bytes(ids.tobytes())
    path.with_suffix(".ds.index").write_bytes(np.array([len(ids)], "<u8").tobytes())


def write_npy(path, ids):
    np.save(path.with_suffix(".npy"), ids)


def write_raw(suffix):
    def write(path, ids):
        path.with_suffix(suffix).write_bytes(ids.tobytes())

    return write


def write_hdf5(path, ids):
    with h5py.File(path.with_suffix(".h5"), "w") as h5:
        h5["tokens"] = ids


def write_hdf5_records(path, ids):
    with h5py.File(path.with_suffix(".h5"), "w") as h5:
        h5["tokens"] = ids.reshape(-1, 5)


#: The writer of a file of each format, and the options by which a folder of them is opened.
FORMATS = {
    "llmc": (write_llmc, {}),
    "megatron": (write_megatron, {}),
    "datatrove": (write_datatrove, {}),
    "npy": (write_npy, {}),
    "nanogpt": (write_raw(".bin"), {"source_dtype": "uint16"}),
    "olmo": (write_raw(".npy"), {"source_dtype": "uint16"}),
    "hdf5": (write_hdf5, {}),
    "records": (write_hdf5_records, {}),
}


def shape_of(folder):
    """Return the shape that a loader of a folder needs: records have their own."""
    is_records = any(folder.glob("*.h5")) and h5py.File(next(folder.glob("*.h5"))).get("tokens").ndim == 2
    return {"batch_size": 2} if is_records else SHAPE
