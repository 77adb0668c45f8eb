"""The memory of a loader with documents is that of a batch, however many documents there are."""

import tracemalloc

import numpy as np
import pytest

from zb_hdf5 import HDF5ShardWriter, Loader, convert
from zb_hdf5.documents.document import DocumentRows
from zb_hdf5.store.streams import index_files

SHAPE, LENGTH, NUM_BATCHES = {"batch_size": 32, "seq_len": 512}, 8, 200
#: Documents of each batch.
DOCUMENTS = 32 * 512 // LENGTH


@pytest.fixture
def streams(tmp_path):
    """Return a store of ten streams; every other one has a table of its documents."""
    lengths = np.full(NUM_BATCHES * DOCUMENTS // 10, LENGTH)
    paths = [tmp_path / "streams" / f"shard-{number:05}.h5" for number in range(10)]
    paths[0].parent.mkdir()
    for number, path in enumerate(paths):
        rows = DocumentRows(ids=[b"%d" % k for k in range(len(lengths))]) if number % 2 else None
        with HDF5ShardWriter(path, dtype="uint16") as writer:
            writer.write_documents(np.zeros(lengths.sum(), np.uint16), lengths, documents=rows)
    index_files(paths).save(paths[0].parent)
    return paths[0].parent


def require_little_memory(store, **how):
    """Compare what Python and numpy allocate for a loader and an epoch with an offset for each document."""
    how |= {"rank": 0, "world_size": 1, "prefetch": 0, "documents": ("cu_seqlens", "documents")}
    with Loader(store, **how) as warm:
        warm.get_batch()  # what is loaded once
    tracemalloc.start()
    try:
        with Loader(store, **how) as loader:
            for _ in range(NUM_BATCHES):
                assert loader.get_batch()["documents"].numel() == DOCUMENTS
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * NUM_BATCHES * DOCUMENTS / 2, "less than half of an offset for each document"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_documents_of_streams(streams, monkeypatch):
    monkeypatch.setattr("zb_hdf5.store.store_documents.FEW_DOCUMENTS", 1000)
    for shuffle in ("global", "records"):
        require_little_memory(streams, shuffle=shuffle, **SHAPE)


def test_memory_does_not_grow_with_the_documents(streams, tmp_path):
    convert(streams, "hdf5", tmp_path / "store", packing="concat", shuffle=False, num_shards=10, **SHAPE)
    require_little_memory(tmp_path / "store")
