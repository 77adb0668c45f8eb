"""The batches and files of stores, written in one call and read for comparisons."""

import os
from pathlib import Path

import numpy as np

from zb_hdf5 import HDF5ShardWriter, open_reader, open_writer, verify_store
from zb_hdf5.commands.rows import open_to_look
from zb_hdf5.commands.statistics import measure
from zb_hdf5.spec import BATCHES_LABELS
from zb_hdf5.store.rebuild import index_files

BACKENDS_OF = {"batch store": ("batch",), "hdf5 store": ("hdf5",), "mixed store": ("batch", "hdf5")}


def files_in(folder):
    """Return everything below a folder, or a lone file, byte for byte."""
    paths = [folder, *folder.rglob("*")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def take_place(path, content=None):
    """Put another file of the same size and time in the place of one, with the same content if none is given."""
    known = path.stat()
    other = path.with_name(f".other-{path.name}")
    other.write_bytes(path.read_bytes() if content is None else content)
    assert other.stat().st_size == known.st_size
    os.utime(other, ns=(known.st_atime_ns, known.st_mtime_ns))
    os.replace(other, path)
    assert path.stat().st_mtime_ns == known.st_mtime_ns
    assert path.stat().st_ino != known.st_ino


def label_batches(stored):
    """Label the axes of an HDF5 dataset as those of batches: no option has to tell them."""
    for axis, label in zip(stored.dims, BATCHES_LABELS, strict=True):
        axis.label = label


def names(folder):
    """Return the names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def with_sidecar(name):
    """Return the names that a finished file has in its folder."""
    return [name, f"{name}.crc32"] if name.endswith(".batch") else [name]


def require_good(path):
    assert {(report.outcome, report.problem) for report in verify_store(path)} == {("verified", None)}


def batches_of(path, **options):
    with open_reader(path, **options) as reader:
        return np.array(list(reader))


def write_batches(path, tokens, values=None, **options):
    """Write batches to one file of their shape, of uint32 unless they have fewer bits. Return the `ShardInfo`."""
    dtype = tokens.dtype.name if tokens.dtype.name in ("uint16", "uint8") else "uint32"
    shape = {"batch_size": tokens.shape[1], "seq_len": tokens.shape[2], "dtype": dtype}
    with open_writer(path, **{**shape, **options}) as writer:
        writer.write(tokens, values)
        return writer.finish()


def write_stream(path, tokens, lengths=None, values=None, **options):
    """Write documents of these lengths, by default one, and the values of fields; return the `StreamInfo`."""
    with HDF5ShardWriter(path, **options) as writer:
        writer.write_documents(tokens, [len(tokens)] if lengths is None else lengths, values)
        return writer.finish()


def write_streams(folder, parts, splits=(), source=None, **options):
    """Write a store of streams: each part is the tokens of one shard, or (tokens, lengths of its documents, values)."""
    folder.mkdir()
    paths = [folder / f"shard-{number:05}.h5" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write_stream(path, *(part if isinstance(part, tuple) else (part,)), **options)
    splits = dict(zip([path.name for path in paths], splits, strict=False))
    index_files(paths, **{"splits": splits} if splits else {}, **{"source": source} if source else {}).save(folder)
    return Path(folder)


def write_books(folder, tokens, write_store):
    """Write a folder with one store for each format, of the same tokens."""
    folder.mkdir()
    for name in ("batch", "hdf5"):
        write_store(folder / name, tokens, (4,), (name,))
    return folder


def measured(path, sample_batches=None, progress=lambda tokens, total: None):
    """Return the statistics of a path, as `zb report` measures them."""
    with open_to_look(path) as reader:
        return measure(reader, sample_batches, progress)
