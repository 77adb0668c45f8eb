"""The memory of a loader with documents is that of a batch, however many documents there are."""

import tracemalloc

import numpy as np
import pytest

from zb_hdf5 import HDF5ShardWriter, Loader, open_writer
from zb_hdf5.converters import run as pipe
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.documents.document_table import DocumentRows, documents_path
from zb_hdf5.documents.document_writer import DocumentsWriter
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.table_file import PiecesWriter
from zb_hdf5.store.streams import index_files

BATCH_SIZE, SEQ_LEN, LENGTH = 32, 512, 8


def write(path, num_batches):
    """Write batches of documents of `LENGTH` tokens, in one file."""
    tokens = np.zeros((num_batches, BATCH_SIZE, SEQ_LEN), np.uint16)
    with open_writer(
        path, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, dtype="uint16", expected_batches=num_batches
    ) as writer:
        writer.write(tokens)
        sha256 = writer.sha256()
    starts = np.arange(0, tokens.size, LENGTH)
    ends = np.arange(0, len(starts) + 1, SEQ_LEN // LENGTH)
    pieces = PiecesWriter(path)
    pieces.append_pieces(Pieces(ends, (starts % SEQ_LEN).astype(np.uint32), starts.astype(np.uint64), SEQ_LEN))
    pieces.publish(seq_len=SEQ_LEN, split="train", tokens_sha256=sha256)
    with DocumentsWriter(documents_path(path)) as writer:
        writer.append_documents(np.full(len(starts), LENGTH))
        writer.publish(tokens_sha256=sha256)
    return len(starts)


def peak_of(store, steps, **shape):
    """Return the largest number of bytes that Python and numpy have allocated for a loader and some steps."""
    with Loader(store, rank=0, world_size=1, prefetch=0, documents=("cu_seqlens", "documents"), **shape) as warm:
        warm.get_batch()  # what is loaded once
    tracemalloc.start()
    try:
        with Loader(store, rank=0, world_size=1, prefetch=0, documents=("cu_seqlens", "documents"), **shape) as loader:
            for _ in range(steps):
                assert loader.get_batch()["documents"].numel() == BATCH_SIZE * SEQ_LEN // LENGTH
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def write_streams(folder, num_batches):
    """Write the same documents as token streams; every other one has a table of its documents beside it."""
    count = num_batches * BATCH_SIZE * SEQ_LEN // LENGTH // 10
    paths = [folder / f"shard-{number:05}.h5" for number in range(10)]
    folder.mkdir()
    for number, path in enumerate(paths):
        rows = DocumentRows(ids=[b"%d" % k for k in range(count)]) if number % 2 else None
        with HDF5ShardWriter(path, dtype="uint16") as writer:
            writer.write_documents(np.zeros(count * LENGTH, np.uint16), np.full(count, LENGTH), documents=rows)
    index_files(paths).save(folder)
    return 10 * count


@pytest.mark.slow
@pytest.mark.parametrize("num_batches", [200])
def test_memory_does_not_grow_with_the_documents_of_streams(num_batches, tmp_path, monkeypatch):
    monkeypatch.setattr("zb_hdf5.store.store_documents.FEW_DOCUMENTS", 1000)
    count = write_streams(tmp_path / "store", num_batches)
    assert count > 400_000
    for shuffle in ("global", "records"):
        peak = peak_of(tmp_path / "store", num_batches, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, shuffle=shuffle)
        assert peak < 8 * count / 2, "less than half of an offset for each document"


@pytest.mark.parametrize("num_batches", [200])
def test_memory_does_not_grow_with_the_documents(num_batches, tmp_path):
    count = write(tmp_path / "x.h5", num_batches)
    assert count > 400_000
    pipe.convert(StoreSource(tmp_path / "x.h5", "hdf5"), "hdf5", tmp_path / "store", num_shards=10)
    peak = peak_of(tmp_path / "store", num_batches)
    assert peak < 8 * count / 2, "less than half of an offset for each document"
