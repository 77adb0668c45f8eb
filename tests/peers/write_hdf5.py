"""h5py of any version: records in the layouts of HDF5, and documents by their offsets: python write_hdf5.py FOLDER."""

import sys
from pathlib import Path

import h5py
import numpy as np
from truth import LARGE_VOCAB, SMALL_VOCAB, documents, loss_mask, write_truth

LAYOUTS = {
    "contiguous": {},
    "chunks": {"chunks": (8, 64)},
    "cut chunks": {"chunks": (8, 40)},
    "gzip": {"chunks": (8, 64), "compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"chunks": (8, 64), "compression": "lzf"},
    "grows": {"chunks": (8, 64), "maxshape": (None, 64)},
}
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
for libver in ("earliest", "latest"):
    for dtype, vocab_size in (("<u2", SMALL_VOCAB), (">i8", LARGE_VOCAB)):
        found = documents(vocab_size)
        ids = np.concatenate(found)
        masks = np.concatenate([loss_mask(document) for document in found])
        rows = len(ids) // 64
        with h5py.File(str(folder / f"{libver}-{dtype[1:]}.h5"), "w", libver=libver) as h5:
            for name, how in LAYOUTS.items():
                group = h5.create_group(name)
                group.create_dataset("input_ids", data=ids[: rows * 64].reshape(rows, 64).astype(dtype), **how)
                group.create_dataset("loss_mask", data=masks[: rows * 64].reshape(rows, 64), **how)
            group = h5.create_group("documents")
            group.create_dataset("input_ids", data=ids.astype(dtype))
            group.create_dataset("doc_offsets", data=np.cumsum([0] + [len(each) for each in found]))
write_truth(folder, found, vocab_size=[SMALL_VOCAB, LARGE_VOCAB], layouts=list(LAYOUTS), hdf5=h5py.version.hdf5_version)
