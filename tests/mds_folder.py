"""Folders of MDS, written byte by byte."""

import json
import struct

import numpy as np

from zb_hdf5.trainers.mds import MDS_DTYPES


def array_of(values, dtype=None, shape_code=2):
    """Return the bytes of an array with its shape, and with its dtype in front unless that is named."""
    codes = {kind: code for code, kind in MDS_DTYPES.items()}
    head = b"" if dtype else bytes([codes[values.dtype]])
    kinds = "BHIQ"[shape_code] * values.ndim
    return head + struct.pack(f"<B{kinds}", (values.ndim << 2) | shape_code, *values.shape) + values.tobytes()


def write(folder, samples, encodings, sizes=None, **entry):
    """Write samples as one shard: each has the bytes of its columns."""
    folder.mkdir(exist_ok=True)
    sizes = sizes or [None] * len(encodings)
    rows = []
    for sample in samples:
        lengths = [len(value) for value, size in zip(sample, sizes, strict=True) if size is None]
        rows.append(struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(sample))
    start = 4 * (len(rows) + 2) + 2
    offsets = np.cumsum([start, *map(len, rows)]).astype("<u4")
    data = struct.pack("<I", len(rows)) + offsets.tobytes() + b"{}" + b"".join(rows)
    (folder / "shard.00000.mds").write_bytes(data)
    shard = {
        "column_names": [*encodings],
        "column_encodings": [*encodings.values()],
        "column_sizes": sizes,
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
        "samples": len(rows),
        "version": 2,
        "zip_data": None,
    }
    (folder / "index.json").write_text(json.dumps({"shards": [shard | entry], "version": 2}))
    return folder
