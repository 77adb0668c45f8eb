"""The dtypes of tokens: a loader gives the same steps of the same ids, whatever their dtype, their files and the way.

Of each kind the steps of ids of one byte are those of a store of uint32, and these are the ids themselves.
"""

import json

import h5py
import numpy as np
import pytest
import torch
from byte_files import IDS, LENGTH, write_megatron
from contract import require_equal, steps_of
from torch.utils.data import DataLoader

from zb_hdf5 import Cache, DocumentLoader, HDF5ShardWriter, Loader, open_corpus, open_writer, verify_store
from zb_hdf5.loaders.order import SHUFFLES
from zb_hdf5.spec import TOKEN_DTYPES

ROWS = IDS.reshape(-1, 4, LENGTH)
RECORDS = IDS.reshape(-1, LENGTH)
LENGTHS = [0, *[20, 28] * (len(IDS) // 48)]
SHAPE = {"batch_size": 4, "seq_len": LENGTH}
#: Ways to read: each is tried in each order.
WAYS = {
    "plain": {},
    "targets": {"targets": True},
    "int32": {"dtype": torch.int32},
    "masked": {"last": "masked", "targets": True, "world_size": 2},
    "pread": {"access": "pread", "verify": "none"},
    "threads": {"prefetch": 2},
}


def write_batches(path, dtype, **how):
    with open_writer(path, **SHAPE, dtype=dtype, **how) as writer:
        writer.write(ROWS)
    return path


def write_stream(path, dtype, **how):
    with HDF5ShardWriter(path, dtype=dtype, chunk_tokens=100, **how) as writer:
        for part in np.split(IDS, np.cumsum(LENGTHS)[:-1]):
            writer.write_document(part)
    return path


def write_npy(path, dtype, ids=IDS):
    np.save(path, ids.astype(dtype))
    return path


def write_pair(path, dtype):
    stored = {"uint8": ("u1", 1), "uint16": ("<u2", 8), "uint32": ("<i4", 4)}[dtype]
    write_megatron(path, IDS.astype(stored[0]), LENGTHS, stored[1])
    return path


def write_foreign(path, dtype, rows=RECORDS, **how):
    with h5py.File(path, "w") as h5:
        h5.create_dataset("tokens", data=rows.astype(dtype), **how)
    return path


#: Kind of files -> its name, and the function that writes it.
KINDS = {
    "lone": ("lone.h5", write_batches),
    "live": ("live", lambda path, dtype: write_batches(path, dtype, live=True, shard_batches=4)),
    "zstd": ("zstd.h5", lambda path, dtype: write_batches(path, dtype, codec="zstd")),
    "stream": ("stream.h5", write_stream),
    "gzip-stream": ("gzip.h5", lambda path, dtype: write_stream(path, dtype, codec="gzip")),
    "npy": ("stream.npy", write_npy),
    "records": ("records.npy", lambda path, dtype: write_npy(path, dtype, RECORDS)),
    "megatron": ("pair.bin", write_pair),
    "foreign": ("foreign.h5", write_foreign),
    "foreign-stream": ("ids.h5", lambda path, dtype: write_foreign(path, dtype, IDS)),
    "foreign-gzip": ("chunks.h5", lambda path, dtype: write_foreign(path, dtype, chunks=(7, 11), compression="gzip")),
}
STREAMS = ("stream", "gzip-stream", "npy", "megatron", "foreign-stream")


@pytest.fixture
def of(tmp_path):
    """Return a function that writes the files of a kind in a dtype, once for each folder."""

    def write(kind, dtype):
        name, writer = KINDS[kind]
        folder = tmp_path / dtype
        folder.mkdir(exist_ok=True)
        return writer(folder / name, dtype) if not (folder / name).exists() else folder / name

    return write


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin
def test_the_steps_are_those_of_uint32_in_every_order_and_way(kind, dtype, of):
    path = of(kind, dtype)
    with open_corpus(path) as corpus:
        assert corpus.dtype == TOKEN_DTYPES[dtype].dtype
    plain = of("npy" if kind in STREAMS else "lone", "uint32")
    for how in WAYS.values():
        for shuffle in SHUFFLES:
            options = {**SHAPE, "shuffle": (shuffle, 3) if shuffle == "block" else shuffle, "seed": 5, **how}
            if "zip" in kind or kind == "zstd":
                options.pop("access", None)
            require_equal(steps_of(path, **options), steps_of(plain, **{**options, "access": "auto"}))
    found = torch.cat([step.reshape(-1) for step in steps_of(path, **SHAPE, shuffle="sequential", last="short")])
    np.testing.assert_array_equal(found.numpy(), IDS)


@pytest.mark.parametrize("kind", ["lone", "live", "zstd", "stream", "npy", "megatron", "foreign", "foreign-gzip"])
def test_ids_of_one_byte_are_read_record_by_record_by_data_loaders_and_from_a_cache(kind, of, tmp_path):
    path = of(kind, "uint8")
    plain = of("lone", "uint32")
    with open_corpus(path) as corpus:
        reader = corpus.batches(batch_size=SHAPE["batch_size"], seq_len=LENGTH)
        records = np.array([7, 0, 59, 7])
        rows = np.empty((4, LENGTH), np.uint8)
        reader.read_records_into(records, rows)
        np.testing.assert_array_equal(rows, RECORDS[records])
        signed = np.empty((4, LENGTH), np.int8)
        reader.read_into(3, signed)
        np.testing.assert_array_equal(signed.view(np.uint8), ROWS[3])
        assert reader.read_batch_int32(3).tolist() == ROWS[3].tolist()
    how = {"seed": 5, "rank": 0, "world_size": 1}
    with Loader(path, **SHAPE, **how) as loader, Loader(plain, **how) as other:
        found = list(DataLoader(loader.dataset(), batch_size=None))
        require_equal(found, list(other))
        records = loader.records()
        assert records[5]["input_ids"].tolist() == RECORDS[5].tolist()
    expected = steps_of(plain, seed=5)
    for _ in range(2):
        require_equal(steps_of(path, **SHAPE, seed=5, cache=Cache(tmp_path / "cache", "1MiB")), expected)


@pytest.mark.parametrize("kind", ["stream", "gzip-stream", "megatron"])
def test_documents_of_ids_of_one_byte(kind, of):
    how = {"collate": ("pad", 8), "batch_size": 3, "pad_token_id": -1, "targets": True, "rank": 0, "world_size": 1}
    found = []
    for dtype in ("uint8", "uint32"):
        with DocumentLoader(of(kind, dtype), **how) as loader:
            found.append(list(loader))
    require_equal(*found)
    windows = [
        steps_of(of(kind, each), **SHAPE, documents=("cu_seqlens", "position_ids"), targets=True)
        for each in ("uint8", "uint32")
    ]
    require_equal(*windows)


def test_windows_that_overlap(of):
    found = []
    for kind, dtype in (("npy", "uint8"), ("stream", "uint8"), ("npy", "uint32")):
        with open_corpus(of(kind, dtype)) as corpus:
            batches = corpus.batches(batch_size=2, seq_len=32, stride=20, context_targets=False)
            found.append(steps_of(batches, shuffle="records", targets=True))
    require_equal(found[0], found[2])
    require_equal(found[1], found[2])


def test_a_state_of_uint16_does_not_fit_a_store_of_uint8(of, tmp_path):
    """The fingerprint decides: that of a store is the digest of its bytes."""
    with Loader(of("lone", "uint16"), rank=0, world_size=1) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    with (
        Loader(of("lone", "uint8"), rank=0, world_size=1) as loader,
        pytest.raises(ValueError, match="state has dtype"),
    ):
        loader.load_state_dict(state)


def test_the_digests_of_a_store_of_uint8_find_a_changed_byte(of):
    path = of("live", "uint8")
    assert not [report.problem for report in verify_store(path) if report.problem]
    shard = min(path.glob("*.h5"))
    content = bytearray(shard.read_bytes())
    content[content.index(ROWS[1].tobytes()) + 5] ^= 1
    shard.write_bytes(content)
    assert [report.problem for report in verify_store(path) if report.problem]
