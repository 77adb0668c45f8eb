"""Stores in another dtype: the same tokens, files that other readers understand, states that say why they differ."""

import json
import struct

import numpy as np
import pytest
from commandline import run
from contents import batches_of
from contract import random_tokens
from damage import flip_token

from zb_hdf5 import Loader, ShardIndex, StateError, verify_store
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.spec import HEADER_BYTES

NOTE = "other ZeroBatch v2 readers take the ids for uint32 and return wrong ones; --dtype uint32 writes"
ALONE = {"rank": 0, "world_size": 1}


def said_by(*arguments, code=0):
    """Run a conversion; return its output as one line."""
    return " ".join(run(convert, *arguments, code=code).output.split())


def read_as_zerobatch_v2(path):
    """Read a `.batch` as a reader does that knows no dtype but uint32, and no reserved field."""
    data = path.read_bytes()
    magic, version, batch_size, seq_len, count = struct.unpack_from("<8sIIIQ", data)
    assert (magic, version) == (b"LLMBATCH", 1)
    slot = -(-batch_size * seq_len * 4 // 4096) * 4096
    starts = range(HEADER_BYTES, HEADER_BYTES + count * slot, slot)
    rows = [np.frombuffer(data, "<u4", batch_size * seq_len, start) for start in starts]
    return np.stack(rows).reshape(count, batch_size, seq_len)


@pytest.fixture
def tokens():
    return random_tokens(9, 4, 512, "uint16")


@pytest.fixture
def cuts():
    return (4,)


@pytest.fixture(params=["hdf5", "batch"])
def backends(request):
    return (request.param,)


#: Backend of a store -> the command that converts it, and the one that converts it back.
COMMANDS = {"hdf5": ("hdf5-to-batch", "batch-to-hdf5"), "batch": ("batch-to-hdf5", "hdf5-to-batch")}


def command(store):
    return COMMANDS[ShardIndex.load(store).shards[0].backend]


@pytest.mark.parametrize("form", ["store", "shards", "file"])
def test_the_same_tokens_in_another_dtype_and_back(form, store, tmp_path, tokens):
    there, back = command(store)
    more = ["--shards", 3] if form == "shards" else []
    suffix = (".h5", ".batch")[there.endswith("batch")] if form == "file" else ""
    said_by(there, store, tmp_path / f"wide{suffix}", "--dtype", "uint32", *more)
    wide = batches_of(tmp_path / f"wide{suffix}")
    assert wide.dtype == np.uint32
    assert np.array_equal(wide, tokens)
    assert not [report.problem for report in verify_store(tmp_path / f"wide{suffix}") if report.problem]
    if form == "store":
        said_by(back, tmp_path / "wide", tmp_path / "narrow", "--dtype", "uint16")
        assert np.array_equal(batches_of(tmp_path / "narrow"), tokens)
        assert ShardIndex.load(tmp_path / "narrow").sha256 == ShardIndex.load(store).sha256


def test_a_converted_batch_file_is_what_other_readers_expect(tmp_path, tokens, write_store):
    store = write_store(tmp_path / "in", tokens, (), ("hdf5",))
    said_by("hdf5-to-batch", store, tmp_path / "kept.batch")
    said_by("hdf5-to-batch", store, tmp_path / "wide.batch", "--dtype", "uint32")
    assert np.array_equal(read_as_zerobatch_v2(tmp_path / "wide.batch"), tokens)
    with pytest.raises(ValueError, match="buffer"):  # the slots are half as long: wrong ids, and then no bytes left
        read_as_zerobatch_v2(tmp_path / "kept.batch")


def test_the_report_names_the_extension(tmp_path, tokens, write_store):
    store = write_store(tmp_path / "in", tokens, (), ("hdf5",))
    np.save(tmp_path / "t.npy", tokens.reshape(-1, 512))
    shape = ["--batch-size", 4, "--seq-len", 512]
    for name, extended, arguments in (
        ("kept", True, ["hdf5-to-batch", store]),
        ("wide", False, ["hdf5-to-batch", store, "--dtype", "uint32"]),
        ("npy16", True, ["npy-to-batch", tmp_path / "t.npy", *shape, "--dtype", "uint16"]),
        ("npy32", False, ["npy-to-batch", tmp_path / "t.npy", *shape]),
        ("hdf5", False, ["npy-to-hdf5", tmp_path / "t.npy", *shape]),
    ):
        assert (NOTE in said_by(*arguments, tmp_path / name)) is extended, name
        report = json.loads(said_by(*arguments, tmp_path / name, "--force", "--json"))
        assert (report["extension"] is not None) is extended, name


def test_a_token_that_does_not_fit_is_named(tmp_path, tokens, write_store):
    wide = tokens.astype(np.uint32)
    wide[5, 2, 7] = 70_000
    store = write_store(tmp_path / "in", wide, (4,), ("hdf5",))
    said = said_by("hdf5-to-batch", store, tmp_path / "out", "--dtype", "uint16", code=1)
    where = f"token id 70000 at index {2 * 512 + 7:,} of batch 5 does not fit uint16; leave out --dtype"
    assert where in said
    assert not (tmp_path / "out").exists()


def test_a_state_of_the_other_dtype_is_refused_with_that_reason(tmp_path, tokens, write_store):
    """And moves again once the store is converted back."""
    store = write_store(tmp_path / "in", tokens, (4,), ("hdf5",))
    said_by("hdf5-to-batch", store, tmp_path / "wide", "--dtype", "uint32")
    said_by("batch-to-hdf5", tmp_path / "wide", tmp_path / "again", "--dtype", "uint16")
    loader = Loader(store, seed=3, **ALONE)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [batch.tolist() for batch in _rest(store, state)]
    assert [batch.tolist() for batch in _rest(tmp_path / "again", state)] == expected
    with Loader(tmp_path / "wide", seed=3, **ALONE) as wide:
        expected_error = (
            r"the state is of other data \(.*\): state has dtype 'uint16', this loader 'uint32'; force=True"
        )
        with pytest.raises(StateError, match=expected_error):
            wide.load_state_dict(state)
        wide.load_state_dict(state, force=True)
        assert [batch.tolist() for batch in wide] == expected


def _rest(path, state):
    with Loader(path, seed=3, **ALONE) as loader:
        loader.load_state_dict(state)
        return list(loader)


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_another_dtype_is_another_conversion(resume, tmp_path, store):
    there, _ = command(store)
    said_by(there, store, tmp_path / "out")
    said = said_by(there, store, tmp_path / "out", "--dtype", "uint32", *resume, code=1)
    assert "exists already" in said
    flip_token(store / ShardIndex.load(store).shards[1].path, 0)
    assert "expected crc32" in said_by(there, store, tmp_path / "other", "--dtype", "uint32", code=3)
