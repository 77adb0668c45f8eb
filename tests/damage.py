"""Stores with everything that belongs to tokens, and single flipped bits in their files."""

from collections import Counter

import h5py
import numpy as np
import torch
from packed import FIELDS, write_packed
from source_tokens import ALL, spans_of

from zb_hdf5 import HDF5ShardWriter, Loader, convert, open_reader
from zb_hdf5.errors import ZbError
from zb_hdf5.store.rebuild import index_files

HOW = {"rank": 0, "world_size": 1, "documents": ALL, "spans": True, "targets": True, "seed": 3, "prefetch": 0}
LENGTHS = np.random.default_rng(7).integers(0, 60, 150).tolist()


def write_batches(folder):
    write_packed(folder / "packed.h5", LENGTHS, seq_len=32, batch_size=4)
    convert(folder / "packed.h5", "hdf5", folder / "store", shards=2)
    return folder / "store", {"fields": tuple(FIELDS)}


def write_streams(folder):
    store = folder / "store"
    number = 0
    paths = [store / f"s{shard}.h5" for shard in range(2)]
    store.mkdir()
    for path in paths:
        with HDF5ShardWriter(path, chunk_tokens=256, fields={"mask": "u1"}) as writer:
            for length in LENGTHS[number : number + 75]:
                tokens = np.arange(length)
                writer.write_document(tokens, spans=spans_of(number, length), id=number, fields={"mask": tokens % 3})
                number += 1
    index_files(paths).save(store)
    return store, {"fields": ("mask",), "batch_size": 4, "seq_len": 32}


def _datasets_below(h5, name):
    """Return the dataset of a name, or the datasets of the group of this name; none, if the file has neither."""
    if name not in h5:
        return []
    if isinstance(h5[name], h5py.Group):
        return list(h5[name].values())
    return [h5[name]]


def datasets_of(store, *names):
    """Return (path, first byte, bytes) of the chunks of datasets, and of the datasets of groups, in each shard."""
    found = []
    for path in sorted(store.glob("*.h5")):
        with h5py.File(path) as h5:
            for name in names:
                for data in _datasets_below(h5, name):
                    chunks = [data.id.get_chunk_info(number) for number in range(data.id.get_num_chunks())]
                    found += [(path, chunk.byte_offset, chunk.size) for chunk in chunks]
    return found


def tables_of(store):
    """Return (path, first byte, bytes) of each table, and of the offsets of documents in a stream."""
    files = [path for path in sorted(store.iterdir()) if ".pieces" in path.name or "documents" in path.name]
    return [(path, 0, path.stat().st_size) for path in files] + datasets_of(store, "doc_offsets")


def fields_of(store):
    """Return (path, first byte, bytes) of the chunks of fields, and of all crc32 values."""
    return datasets_of(store, "fields", "crc32")


def steps_of(store, **options):
    with Loader(store, **HOW, **options) as loader:
        return list(loader)


def are_equal(steps, others):
    same = {True: torch.equal, False: np.array_equal}
    pairs = [(a, b[name]) for step, b in zip(steps, others, strict=True) for name, a in step.items()]
    return all(same[isinstance(a, torch.Tensor)](a, b) if hasattr(a, "shape") else a == b for a, b in pairs)


def flip_bits(ranges, read, numbers):
    """Flip one bit in a range of a file for each number, read, and restore it; count what came of it."""
    expected = read()
    found = Counter()
    for number in numbers:
        rng = np.random.default_rng(number)
        path, first, size = ranges[number % len(ranges)]
        whole = path.read_bytes()
        data = bytearray(whole)
        data[first + int(rng.integers(size))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            found["same" if are_equal(read(), expected) else "silent"] += 1
        except ZbError:
            found["refused"] += 1
        path.write_bytes(whole)
    return found


def flip(path, offset, mask=1):
    """Flip bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def flip_stored(place, values, within=0, mask=1):
    """Flip bits of one byte of stored values, in a file or in the one file below a folder that has them."""
    stored = values.tobytes()
    paths = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    [path] = [path for path in paths if stored in path.read_bytes()]
    flip(path, path.read_bytes().index(stored) + within, mask)


def flip_token(path, number, within=1):
    """Flip a bit of one byte of batch `number` of a file."""
    with open_reader(path) as reader:
        offset = reader.corpus.extents.offset(number)
    flip(path, offset + within)
