"""Files of other formats that somebody gives for tokens, with the ids that are in them."""

import bz2
import gzip
import json
import lzma
import pickle
import shutil
import struct
import subprocess
import tarfile

import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import ipc, parquet

IDS = np.arange(4000) * 7 % 300 + 5
DOCUMENTS = IDS.reshape(80, 50).tolist()
TABLE = pa.table({"input_ids": pa.array(DOCUMENTS, pa.list_(pa.int32()))})
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
CHAT_TEXT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"


def raw(path, dtype="<u2"):
    path.write_bytes(IDS.astype(dtype).tobytes())


def safetensors(path):
    head = json.dumps({"ids": {"dtype": "I32", "shape": [4000], "data_offsets": [0, 16000]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + IDS.astype("<i4").tobytes())


def tar(path):
    raw(path.with_name("ids.npy"))
    np.save(path.with_name("ids.npy"), IDS)
    with tarfile.open(path, "w") as archive:
        archive.add(path.with_name("ids.npy"), "ids.npy")
    path.with_name("ids.npy").unlink()


def packed(pack):
    def write(path):
        np.save(path.with_suffix(""), IDS)
        path.write_bytes(pack(path.with_suffix("").read_bytes()))
        path.with_suffix("").unlink()

    return write


def zstd(data):
    return subprocess.run(["zstd", "-c"], input=data, capture_output=True, check=True).stdout


def lines_of(key, rows=DOCUMENTS):
    return lambda path: path.write_text("".join(json.dumps({key: row}) + "\n" for row in rows))


def csv_of_numbers(path):
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in DOCUMENTS))


def items(dtype="<i4", head=b""):
    """Return the bytes of a chunk of litdata, or of a shard of MDS whose columns are `head`."""
    begin = 4 * (len(DOCUMENTS) + 2) + len(head)
    offsets = begin + np.arange(len(DOCUMENTS) + 1) * 50 * np.dtype(dtype).itemsize
    count = np.uint32(len(DOCUMENTS)).tobytes()
    return count + offsets.astype("<u4").tobytes() + head + IDS.astype(dtype).tobytes()


def litdata(path):
    path.mkdir()
    (path / "chunk-0-0.bin").write_bytes(items())
    chunk = {"chunk_bytes": len(items()), "chunk_size": 80, "dim": 4000, "filename": "chunk-0-0.bin"}
    config = {"compression": None, "data_format": ["no_header_tensor:16"], "item_loader": "TokensLoader"}
    (path / "index.json").write_text(json.dumps({"chunks": [chunk], "config": config}))


def mds(path):
    path.mkdir()
    data = items(head=b'{"column_names": ["ids"]}')
    (path / "shard.00000.mds").write_bytes(data)
    shard = {
        "column_encodings": ["ndarray:int32:50"], "column_names": ["ids"], "column_sizes": [200], "compression": None,
        "format": "mds", "hashes": [], "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
        "samples": len(DOCUMENTS), "version": 2, "zip_data": None,
    }  # fmt: skip
    (path / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))


def frames_of_chats(path):
    line = json.dumps({"messages": CHAT}).encode() + b"\n"
    compress = pytest.importorskip("zstandard").compress
    path.write_bytes(compress(line) + compress(line))


def arrow_folder(path):
    path.mkdir()
    with ipc.new_stream(path / "data-00000-of-00001.arrow", TABLE.schema) as file:
        file.write_table(TABLE)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (path / "dataset_info.json").write_text("{}")


def splits(path):
    path.mkdir()
    (path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    arrow_folder(path / "train")


def arrow(path):
    with ipc.new_file(path, TABLE.schema) as file:
        file.write_table(TABLE)


def stream_of_arrow(path):
    with ipc.new_stream(path, TABLE.schema) as file:
        file.write_table(TABLE)


def fairseq(path):
    raw(path.with_suffix(".bin"))
    lengths = np.full(80, 50, "<i4")
    offsets = np.arange(80, dtype="<i8") * 100
    path.write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 8, 80) + lengths.tobytes() + offsets.tobytes())


def litgpt(path):
    path.write_bytes(struct.pack("<7sQBQ", b"LITPKDS", 1, 8, 4000) + IDS.astype("<u2").tobytes())


def crc32c(data):
    crc = 0xFFFFFFFF
    for bit in np.unpackbits(np.frombuffer(data, "u1"), bitorder="little").tolist():
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 != bit else 0)
    return crc ^ 0xFFFFFFFF


def tfrecord(path):
    assert crc32c(b"123456789") == 0xE3069283
    crc = crc32c(struct.pack("<Q", 16))
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    path.write_bytes(struct.pack("<QI", 16, masked) + bytes(20))


def int24(path):
    with h5py.File(path, "w") as h5:
        kind = h5py.h5t.STD_I32LE.copy()
        kind.set_precision(24)
        kind.set_size(3)
        stored = h5py.h5d.create(h5.id, b"tokens", kind, h5py.h5s.create_simple((len(IDS),)))
        stored.write(h5py.h5s.ALL, h5py.h5s.ALL, IDS, mtype=h5py.h5t.NATIVE_INT64)


def table_of_hdf5(path):
    with h5py.File(path, "w") as h5:
        h5["table"] = np.array([(each, 0.5) for each in IDS], [("ids", "<i4"), ("weight", "<f4")])


def arrays_of_hdf5(path):
    with h5py.File(path, "w") as h5:
        h5.create_dataset("rows", (80,), np.dtype(("<i4", (50,))))[...] = IDS.reshape(80, 50)


def folder_of(write, name):
    def make(path):
        path.mkdir()
        write(path / name)

    return make


def parquet_of(**columns):
    return lambda path: parquet.write_table(pa.table(columns), path)


#: Name, its writer, and the result of its line: "ids" in a stream or an array, or a text.
DOORS = {
    "a.npz": (lambda path: np.savez(path, ids=IDS, other=IDS), "ids"),
    "a b.npz": (lambda path: np.savez(path, ids=IDS), "ids"),
    "a.pt": (lambda path: torch.save(torch.tensor(IDS), path), "ids"),
    "old.pt": (lambda path: torch.save(torch.tensor(IDS), path, _use_new_zipfile_serialization=False), "ids"),
    "a.pkl": (lambda path: path.write_bytes(pickle.dumps(IDS)), "ids"),
    "a.safetensors": (safetensors, "ids"),
    "int24.h5": (int24, "ids"),
    "table.h5": (table_of_hdf5, "ids"),
    "arrays.h5": (arrays_of_hdf5, "ids"),
    "rows.npy": (lambda path: np.save(path, np.asfortranarray(IDS.reshape(80, 50))), "records"),
    "n.csv": (csv_of_numbers, "ids"),
    "n.json": (lambda path: path.write_text(json.dumps(IDS.tolist())), "ids"),
    "t.csv": (lambda path: path.write_text('id,text\n1,"hello, world"\n'), "hello, world"),
    "a.tar": (tar, "ids"),
    "a.npy.gz": (packed(gzip.compress), "ids"),
    "a.npy.bz2": (packed(bz2.compress), "ids"),
    "a.npy.xz": (packed(lzma.compress), "ids"),
    "a.npy.zst": (packed(zstd), "ids"),
    "lit.bin": (litgpt, "ids"),
    "a.idx": (fairseq, "ids"),
    "a.parquet": (lambda path: parquet.write_table(TABLE, path), "ids"),
    "both.parquet": (parquet_of(text=["hi"] * 80, token_ids=pa.array(DOCUMENTS, pa.list_(pa.int32()))), "ids"),
    "text.parquet": (parquet_of(text=["hello, world"]), "hello, world"),
    "body.parquet": (parquet_of(body=["hello, world"]), "hello, world"),
    "chat.parquet": (parquet_of(messages=[CHAT]), CHAT_TEXT),
    "a.arrow": (arrow, "ids"),
    "stream.arrow": (stream_of_arrow, "ids"),
    "ids.jsonl": (lines_of("ids"), "ids"),
    "token_ids.jsonl": (lines_of("token_ids"), "ids"),
    "mine.jsonl": (lines_of("mine"), "ids"),
    "text.jsonl": (lines_of("text", ["hello, world"]), "hello, world"),
    "chat.jsonl": (lines_of("messages", [CHAT]), CHAT_TEXT),
    "chat.jsonl.gz": (
        lambda path: path.write_bytes(gzip.compress(json.dumps({"messages": CHAT}).encode())), CHAT_TEXT,
    ),
    "chat.jsonl.zst": (frames_of_chats, CHAT_TEXT * 2),
    "book.md": (lambda path: path.write_text("It was a dark night.\n" * 9), "It was a dark night.\n" * 9),
    "text.jsonl.gz": (
        lambda path: path.write_bytes(gzip.compress(b'{"text": "hello, world"}\n')), "hello, world",
    ),
    "litdata": (litdata, "ids"),
    "saved": (arrow_folder, "ids"),
    "splits": (splits, "ids"),
    "mds": (mds, "ids"),
    "several": (folder_of(litdata, "one"), "ids"),
    "several mds": (folder_of(mds, "one"), "ids"),
    "chats": (folder_of(lines_of("messages", [CHAT]), "a.jsonl"), CHAT_TEXT),
    "tables": (folder_of(lambda path: parquet.write_table(TABLE, path), "a.parquet"), "ids"),
    "texts": (folder_of(lambda path: path.write_text("hello, world, again"), "a.txt"), "hello, world, again"),
    "arrays": (folder_of(lambda path: np.savez(path, ids=IDS), "a.npz"), "ids"),
}  # fmt: skip


def made(name, folder):
    """Write the file of a door, and return its path."""
    if name.endswith(".zst") and shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    path = folder / name
    DOORS[name][0](path)
    return path
