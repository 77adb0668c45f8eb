"""One flipped bit in a table of documents is an error of ours, or changes nothing that a loader gives."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from packed import write_packed
from source_tokens import ALL, spans_of

from zb_hdf5 import HDF5ShardWriter, Loader, convert
from zb_hdf5.errors import ZbError
from zb_hdf5.store.streams import index_streams

HOW = {"rank": 0, "world_size": 1, "documents": ALL, "spans": True, "targets": True, "seed": 3, "prefetch": 0}
LENGTHS = np.random.default_rng(7).integers(1, 60, 150).tolist()


def write_batches(folder):
    write_packed(folder / "packed.h5", LENGTHS)
    convert(folder / "packed.h5", "hdf5", folder / "store", num_shards=2)
    return folder / "store", {}


def write_streams(folder):
    store, number = folder / "store", 0
    store.mkdir()
    paths = [store / f"s{shard}.h5" for shard in range(2)]
    for path in paths:
        with HDF5ShardWriter(path, chunk_tokens=256) as writer:
            for length in LENGTHS[number : number + 75]:
                writer.write_document(np.arange(length), spans=spans_of(number, length), id=number)
                number += 1
    index_streams(paths).save(store)
    return store, {"batch_size": 4, "seq_len": 32}


def table_bytes(folder):
    """Return (path, first byte, bytes) of each table, and of the offsets of documents in a stream."""
    found = [(path, 0, path.stat().st_size) for path in folder.iterdir() if ".pieces" in path.name]
    found += [(path, 0, path.stat().st_size) for path in folder.iterdir() if "documents" in path.name]
    for path in folder.glob("s?.h5"):
        with h5py.File(path) as h5:
            chunk = h5["doc_offsets"].id.get_chunk_info(0)
            found.append((path, chunk.byte_offset, h5["doc_offsets"].size * 8))
    return found


def steps_of(store, verify, shape):
    with Loader(store, **HOW, **shape, verify=verify) as loader:
        return list(loader)


def are_equal(steps, others):
    if len(steps) != len(others):
        return False
    pairs = [(value, other[name]) for step, other in zip(steps, others, strict=True) for name, value in step.items()]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("write", [write_batches, write_streams])
@pytest.mark.parametrize("verify", ["auto", "batch", "none"])
def test_a_flipped_bit_is_never_silent_and_never_an_error_of_others(write, verify, tmp_path, thinned):
    store, shape = write(tmp_path)
    expected, tables = steps_of(store, verify, shape), table_bytes(store)
    assert len({path for path, *_ in tables}) >= 3
    found = {"same": 0, "refused": 0, "silent": 0}
    for number in thinned(range(150), 10):
        rng = np.random.default_rng(number)
        path, first, size = tables[number % len(tables)]
        whole = path.read_bytes()
        data = bytearray(whole)
        data[first + int(rng.integers(size))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            found["same" if are_equal(steps_of(store, verify, shape), expected) else "silent"] += 1
        except ZbError:
            found["refused"] += 1
        path.write_bytes(whole)
    assert found["refused"] > 0
    if verify != "none":
        assert found["silent"] == 0, found
