"""The dtypes of tokens: a loader gives the same steps of the same ids, whatever their dtype, their files and the way.

Of each kind the steps of ids of one byte are those of a store of uint32, and these are the ids themselves.
"""

import json

import numpy as np
import pytest
import torch
from byte_files import IDS, LENGTH
from contract import require_equal, steps_of
from dtype_files import CASES, OF_DOCUMENTS, RECORDS, ROWS, SHAPE, STREAMS, how_to_read, written
from torch.utils.data import DataLoader

from zb_hdf5 import Cache, DocumentLoader, Loader, open_corpus, verify_store
from zb_hdf5.loaders.order import SHUFFLES
from zb_hdf5.spec import TOKEN_DTYPES

#: Ways to read: each is tried in each order.
WAYS = {
    "plain": {},
    "targets": {"targets": True},
    "int32": {"dtype": torch.int32},
    "masked": {"last": "masked", "targets": True, "world_size": 2},
    "pread": {"access": "pread", "verify": "none"},
    "threads": {"prefetch": 2},
}


@pytest.fixture
def of(tmp_path):
    """Return a function that writes the files of a kind in a dtype, once for each folder."""

    def write(kind, dtype):
        folder = tmp_path / dtype
        folder.mkdir(exist_ok=True)
        return written(folder, kind, dtype)

    return write


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.thin
def test_the_steps_are_those_of_uint32_in_every_order_and_way(kind, dtype, of):
    path = of(kind, dtype)
    reading = how_to_read(kind, dtype)
    with open_corpus(path, **reading) as corpus:
        assert corpus.dtype == TOKEN_DTYPES[dtype].dtype
    plain = of("npy" if kind in STREAMS else "lone", "uint32")
    for how in WAYS.values():
        for shuffle in SHUFFLES:
            options = {**SHAPE, "shuffle": (shuffle, 3) if shuffle == "block" else shuffle, "seed": 5, **how}
            if "zip" in kind or kind == "zstd":
                options.pop("access", None)
            require_equal(steps_of(path, **options, **reading), steps_of(plain, **{**options, "access": "auto"}))
    found = torch.cat(
        [step.reshape(-1) for step in steps_of(path, **SHAPE, **reading, shuffle="sequential", last="short")]
    )
    np.testing.assert_array_equal(found.numpy(), IDS)


@pytest.mark.parametrize(
    "kind", ["lone", "live", "shards", "zstd", "stream", "npy", "megatron", "foreign", "foreign-gzip"]
)
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


@pytest.mark.parametrize(("kind", "dtype"), [case for case in CASES if case[0] in OF_DOCUMENTS])
def test_documents_are_those_of_uint32(kind, dtype, of):
    how = {"collate": ("pad", 8), "batch_size": 3, "pad_token_id": -1, "targets": True, "rank": 0, "world_size": 1}
    found = []
    windows = []
    for each in ((kind, dtype), ("stream", "uint32")):
        path = of(*each)
        reading = how_to_read(*each)
        with DocumentLoader(path, **how, **reading) as loader:
            found.append(list(loader))
        windows.append(steps_of(path, **SHAPE, **reading, documents=("cu_seqlens", "position_ids"), targets=True))
    require_equal(*found)
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
