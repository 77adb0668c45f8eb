"""Files as they were once written mean today what they meant then. `data/make_golden.py` made them."""

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from zb_hdf5 import ShardIndex, StoreMeta, open_corpus, open_reader, open_writer, verify_store
from zb_hdf5.store.rebuild import add_crc32_file

DATA = Path(__file__).parents[1] / "data"
TOKENS = np.array([
    [[0, 1, 2, 3, 5, 8, 13, 21], [50256, 65535, 65536, 2147483647, 2147483648, 4294967295, 34, 55]],
    [[89, 144, 233, 377, 610, 987, 1597, 2584], [7, 7, 7, 7, 0, 0, 0, 0]],
], np.uint32)  # fmt: skip
STORE_TOKENS = np.arange(0, 256, 4, np.uint16).reshape(4, 2, 8)
CONTENT = "sha256:1c44c001f2e57b3a3713ce25a75f6546e76e829c82ddece497ba20b085de548f:2x8:uint32"
SAMPLED = "sampled:e45aee2c35348d06b9f98d5ed5d872fefdd40bbc088b6234ba18cc4d8c623d61"
STORE = "sha256:f306e928b6b63b2233652a642ae905bdc99eb2ee8310bf16364dc2f15a7d5d62:2x8:uint16"


@pytest.mark.parametrize(("name", "access"), [
    ("v1.batch", "mmap"), ("v1.batch", "pread"), ("v3.h5", "mmap"), ("v3.h5", "pread"), ("v3.h5", "h5py"),
])  # fmt: skip
def test_files_are_read(name, access):
    with open_reader(DATA / name, access=access) as reader:
        assert reader.dtype == np.uint32
        assert (reader.meta.seed, reader.meta.total_records) == (42, 5)
        np.testing.assert_array_equal(np.stack(list(reader)), TOKENS)
        np.testing.assert_array_equal(reader.read_batch_torch(0).numpy(), TOKENS[0].astype(np.int64))
    assert [report.problem for report in verify_store(DATA / name)] == [None]


@pytest.mark.parametrize("access", ["auto", "h5py"])
@pytest.mark.parametrize(("codec", "filter_id"), [("gzip:6", 1), ("zstd:3", 32015)])
def test_compressed_files_are_read(codec, filter_id, access):
    path = DATA / f"v3-{codec.partition(':')[0]}.h5"
    expected = np.tile(TOKENS[:, :, :4], 2).repeat(2, 0)
    with open_reader(path, access=access, verify="batch") as reader, h5py.File(path) as h5:
        assert (reader.meta.codec, reader.meta.total_records) == (codec, 5)
        np.testing.assert_array_equal(np.stack(list(reader)), expected)
        assert h5["batches"].id.get_create_plist().get_filter(0)[0] == filter_id
        assert h5["extents"].dtype == np.dtype("<u8")
        assert (h5["extents"][:, 1] < 64).any(), "none is packed"
    assert [report.problem for report in verify_store(path)] == [None]


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("name", ["store", "store/shards.json"])
def test_stores_are_read(name, access):
    with open_reader(DATA / name, access=access, verify="batch") as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), STORE_TOKENS)
        assert reader.dtype == np.uint16
        assert reader.meta == StoreMeta(
            2,
            8,
            np.dtype("<u2"),
            seed=42,
            total_records=9,
            document_count=3,
            vocab_size=257,
            tokenizer='{"name": "bytes"}',
        )
    assert [report.problem for report in verify_store(DATA / "store")] == [None] * 2


@pytest.mark.parametrize(("name", "verify", "fingerprint"), [
    ("v3.h5", "none", CONTENT),
    ("v1.batch", "store", CONTENT),
    ("v1.batch", "none", SAMPLED),
    ("store", "none", STORE),
])  # fmt: skip
def test_checkpoints_still_match(name, verify, fingerprint, tmp_path):
    """A loader's state holds the fingerprint: were it computed otherwise, no run could be resumed."""
    path = DATA / name
    if (name, verify) == ("v1.batch", "store"):
        path = Path(shutil.copy(path, tmp_path))
        add_crc32_file(path)
    with open_reader(path, verify=verify) as reader:
        assert reader.fingerprint == fingerprint


def test_batch_files_are_still_written_byte_for_byte(tmp_path):
    with open_writer(tmp_path / "v1.batch", batch_size=2, seq_len=8, seed=42, total_records=5) as writer:
        writer.write(TOKENS)
    assert (tmp_path / "v1.batch").read_bytes() == (DATA / "v1.batch").read_bytes()
    shard = tmp_path / "shard.batch"
    with open_writer(shard, batch_size=2, seq_len=8, dtype="uint16", seed=42, total_records=2) as writer:
        writer.write(STORE_TOKENS[:1])
        info = writer.finish()
    assert shard.read_bytes() == (DATA / "store" / "shard-00000.batch").read_bytes()
    assert info.crc32.tobytes() == (DATA / "store" / "shard-00000.batch.crc32").read_bytes()


def described(path):
    """Return everything that an HDF5 store says, but for who wrote it."""
    with h5py.File(path, "r") as h5:
        found = {name: (d.shape, d.maxshape, d.chunks, d.dtype.str, d[:].tobytes()) for name, d in h5.items()}
        for owner, attributes in (("/", h5.attrs), ("batches", h5["batches"].attrs)):
            for name, value in attributes.items():
                found[owner, name] = (attributes.get_id(name).dtype.str, attributes.get_id(name).shape, str(value))
        del found["/", "creator"]
        return found


def test_hdf5_files_are_still_written_with_the_same_content(tmp_path):
    with open_writer(tmp_path / "v3.h5", batch_size=2, seq_len=8, seed=42, total_records=5) as writer:
        writer.write(TOKENS)
    assert described(tmp_path / "v3.h5") == described(DATA / "v3.h5")


def test_an_index_is_still_written_byte_for_byte():
    text = (DATA / "store" / "shards.json").read_text(encoding="utf-8")
    assert ShardIndex.from_json(text, DATA).to_json() == text


def test_streams_are_still_read():
    path = DATA / "v3-stream.h5"
    first = [89, 144, 233, 120, 96, 216, 55, 14]
    documents = [[*first, 7], [7], [*STORE_TOKENS.reshape(-1).tolist(), 7]]
    with open_corpus(path) as store:
        assert [store.documents[number].ids.tolist() for number in range(3)] == documents
        assert (store.num_tokens, store.meta.boundary_token_id, store.meta.vocab_size) == (9 + 1 + 65, 7, 257)
    with open_reader(path, batch_size=2, seq_len=8) as reader:
        np.testing.assert_array_equal(reader.read_batch(0)[0], first)
    [report] = verify_store(path)
    assert (report.problem, report.checks) == (None, ["crc32", "sha256", "documents"])
