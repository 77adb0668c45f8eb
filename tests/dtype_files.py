"""The same ids in each kind of files and each dtype: of this package, of other trainers and of other programs."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from byte_files import IDS, LENGTH, write_megatron
from contents import write_batches as write_file
from contents import write_streams

from zb_hdf5 import HDF5ShardWriter, ReadAs, open_writer
from zb_hdf5.spec import TOKEN_DTYPES
from zb_hdf5.store.rebuild import index_files

ROWS = IDS.reshape(-1, 4, LENGTH)
RECORDS = IDS.reshape(-1, LENGTH)
LENGTHS = [0, *[20, 28] * (len(IDS) // 48)]
SHAPE = {"batch_size": 4, "seq_len": LENGTH}


def write_batches(path, dtype, **how):
    with open_writer(path, **SHAPE, dtype=dtype, **how) as writer:
        writer.write(ROWS)


def write_shards(path, dtype):
    path.mkdir()
    paths = [path / f"shard-{number}.h5" for number in range(3)]
    for shard, part in zip(paths, np.split(ROWS, [2, 9]), strict=True):
        write_file(shard, part.astype(dtype))
    index_files(paths).save(path)


def write_stream(path, dtype, **how):
    with HDF5ShardWriter(path, dtype=dtype, chunk_tokens=100, **how) as writer:
        for part in np.split(IDS, np.cumsum(LENGTHS)[:-1]):
            writer.write_document(part)


def write_stream_shards(path, dtype):
    parts = [(part, [len(part) - 20, 20]) for part in np.split(IDS, [336, 1200])]
    write_streams(path, parts, dtype=dtype, chunk_tokens=100)


def write_npy(path, dtype, ids=IDS):
    np.save(path, ids.astype(dtype))


def write_pair(path, dtype):
    stored = {"uint8": ("u1", 1), "uint16": ("<u2", 8), "uint32": ("<i4", 4)}[dtype]
    write_megatron(path, IDS.astype(stored[0]), LENGTHS, stored[1])


def write_foreign(path, dtype, rows=RECORDS, **how):
    with h5py.File(path, "w") as h5:
        h5.create_dataset("tokens", data=rows.astype(dtype), **how)


def write_raw(path, dtype):
    path.write_bytes(IDS.astype(TOKEN_DTYPES[dtype].dtype).tobytes())


def write_llmc(path, dtype):
    header = np.zeros(256, "<i4")
    header[:3] = {"uint16": (20240520, 1), "uint32": (20240801, 7)}[dtype] + (len(IDS),)
    write_raw(path, dtype)
    path.write_bytes(header.tobytes() + path.read_bytes())


def write_datatrove(path, dtype):
    write_raw(path, dtype)
    path.with_name(f"{path.name}.index").write_bytes(np.cumsum(LENGTHS).astype("<u8").tobytes())


def write_olmo(path, dtype):
    write_raw(path, dtype)
    stops = np.cumsum(LENGTHS)
    lines = [
        f"{stop - length},{stop},{number},f,{number}"
        for number, (stop, length) in enumerate(zip(stops, LENGTHS, strict=True))
    ]
    path.with_suffix(".csv.gz").write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))


class Kind(NamedTuple):
    """A kind of files: the name of its file or folder, and the function of a path and a dtype that writes it."""

    name: str
    write: Callable[[Path, str], None]
    #: The dtypes that such a file can have.
    dtypes: tuple[str, ...] = tuple(TOKEN_DTYPES)
    #: The file has no header, so that whoever opens it names the dtype.
    headerless: bool = False


KINDS = {
    "lone": Kind("lone.h5", write_batches),
    "batch": Kind("lone.batch", write_batches, ("uint16", "uint32")),
    "live": Kind("live", lambda path, dtype: write_batches(path, dtype, live=True, shard_batches=4)),
    "shards": Kind("shards", write_shards),
    "zstd": Kind("zstd.h5", lambda path, dtype: write_batches(path, dtype, codec="zstd")),
    "stream": Kind("stream.h5", write_stream),
    "stream-shards": Kind("streams", write_stream_shards),
    "gzip-stream": Kind("gzip.h5", lambda path, dtype: write_stream(path, dtype, codec="gzip")),
    "npy": Kind("stream.npy", write_npy),
    "records": Kind("records.npy", lambda path, dtype: write_npy(path, dtype, RECORDS)),
    "megatron": Kind("pair.bin", write_pair),
    "datatrove": Kind("tokens.ds", write_datatrove, ("uint16", "uint32")),
    "llm.c": Kind("train_000001.bin", write_llmc, ("uint16", "uint32")),
    "nanogpt": Kind("train.bin", write_raw, headerless=True),
    "olmo": Kind("part-0-00000.npy", write_olmo, headerless=True),
    "foreign": Kind("foreign.h5", write_foreign),
    "foreign-stream": Kind("ids.h5", lambda path, dtype: write_foreign(path, dtype, IDS)),
    "foreign-gzip": Kind(
        "chunks.h5", lambda path, dtype: write_foreign(path, dtype, chunks=(7, 11), compression="gzip")
    ),
}
#: Kinds whose windows are shuffled as those of a stream are.
STREAMS = (
    *("stream", "stream-shards", "gzip-stream", "npy", "megatron", "datatrove", "llm.c", "nanogpt", "olmo"),
    "foreign-stream",
)
#: Kinds that tell the documents apart, which are the same in each.
OF_DOCUMENTS = ("stream", "gzip-stream", "megatron", "datatrove", "olmo")
#: Each kind in each dtype that its files can have.
CASES = [(kind, dtype) for kind, each in KINDS.items() for dtype in each.dtypes]


def written(folder: Path, kind: str, dtype: str) -> Path:
    """Return the path of files of a kind in a folder, which are written if they are not there."""
    path = folder / KINDS[kind].name
    if not path.exists():
        KINDS[kind].write(path, dtype)
    return path


def how_to_read(kind: str, dtype: str) -> dict[str, Any]:
    """Return the arguments of whoever opens files of a kind."""
    return {"read_as": ReadAs(source_dtype=dtype)} if KINDS[kind].headerless else {}
