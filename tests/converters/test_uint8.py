"""Ids of one byte: stored by themselves where they are proved, and never where a token beside them has no place."""

import json
from pathlib import Path

import numpy as np
import pytest
from byte_files import IDS, LENGTH, write_megatron
from commandline import run, run_zb, succeed
from contract import is_refused
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from zb_hdf5 import (
    ArgumentError,
    ConvertError,
    HDF5ShardWriter,
    ShardIndex,
    convert,
    open_corpus,
    open_reader,
    open_writer,
    verify_store,
)
from zb_hdf5.commands.zb import zb
from zb_hdf5.store.rebuild import rebuild_index

LENGTHS = [20, 28] * (len(IDS) // 48)
SHAPE = {"batch_size": 4, "seq_len": LENGTH, "shuffle": False}
UINT8_LINE = "batch files have no ids of one byte (dtype uint8)"


@pytest.fixture
def npy(tmp_path):
    np.save(tmp_path / "in.npy", IDS)
    return tmp_path / "in.npy"


@pytest.fixture
def pair(tmp_path):
    write_megatron(tmp_path / "pair.bin", IDS, LENGTHS)
    return tmp_path / "pair.bin"


@pytest.fixture
def stream(tmp_path):
    with HDF5ShardWriter(tmp_path / "stream.h5", dtype="uint8", chunk_tokens=100) as writer:
        for part in np.split(IDS, np.cumsum(LENGTHS)[:-1]):
            writer.write_document(part)
    return tmp_path / "stream.h5"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {n} äöü"}) + "\n" for n in range(50)))
    return path


def ids_of(path, **how):
    with open_corpus(path, **how) as corpus:
        return corpus.tokens[0 : corpus.num_tokens]


def dtype_of(path):
    with open_corpus(path) as corpus:
        return corpus.dtype.name


# --- the choice ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("source", "options", "expected"), [
    ("npy", {}, "uint8"),
    ("npy", {"pad_id": 256}, "uint16"),
    ("npy", {"dtype": "uint16"}, "uint16"),
    ("pair", {"packing": "pad"}, "uint8"),
    ("pair", {"packing": "pad", "pad_id": 256}, "uint16"),
    ("stream", {"packing": "pad", "dtype": "uint16"}, "uint16"),
    ("stream", {"packing": "pad", "pad_id": 255}, "uint8"),
    ("text", {"tokenizer": "byte"}, "uint16"),
    ("text", {"tokenizer": "byte", "no_boundary": True}, "uint16"),
    ("text", {"tokenizer": "byte", "no_boundary": True, "dtype": "uint8"}, "uint8"),
])  # fmt: skip
def test_a_store_has_the_smallest_dtype_that_is_proved(source, options, expected, request, tmp_path):
    path = request.getfixturevalue(source)
    report = convert(path, "hdf5", tmp_path / "out", **{**SHAPE, **options})
    assert (report.meta.dtype.name, dtype_of(tmp_path / "out")) == (expected, expected)
    assert not [each.problem for each in verify_store(tmp_path / "out") if each.problem]


@pytest.mark.parametrize(("source", "options", "expected"), [
    ("npy", {"boundary_token_id": 7}, "uint8"),
    ("npy", {"boundary_token_id": 256}, "uint16"),
    ("pair", {}, "uint8"),
    ("pair", {"dtype": "uint32"}, "uint32"),
    ("text", {"tokenizer": "byte", "no_boundary": True, "dtype": "uint8"}, "uint8"),
])  # fmt: skip
def test_a_stream_has_the_smallest_dtype_that_is_proved(source, options, expected, request, tmp_path):
    path = request.getfixturevalue(source)
    convert(path, "stream", tmp_path / "out", **options)
    assert dtype_of(tmp_path / "out") == expected
    if source != "text":
        np.testing.assert_array_equal(ids_of(tmp_path / "out"), IDS)


def test_wider_ids_become_uint8_by_the_size_of_their_vocabulary(tmp_path):
    np.save(tmp_path / "in.npy", IDS.astype("<i8"))
    for size, expected in ((256, "uint8"), (257, "uint16")):
        convert(tmp_path / "in.npy", "hdf5", tmp_path / str(size), **SHAPE, vocab_size=size)
        assert dtype_of(tmp_path / str(size)) == expected
    is_refused(
        ConvertError,
        lambda: convert(tmp_path / "in.npy", "hdf5", tmp_path / "out", **SHAPE, vocab_size=255),
        match=r"token id 255 at index .* is outside 0\.\.254 \(vocab_size 255\)",
    )


def test_ids_that_do_not_fit_are_named(tmp_path, text):
    np.save(tmp_path / "in.npy", np.r_[IDS.astype("<u2"), np.full(LENGTH * 4, 300, "<u2")])
    is_refused(
        ConvertError,
        lambda: convert(tmp_path / "in.npy", "hdf5", tmp_path / "out", **SHAPE, dtype="uint8"),
        match=r"token id 300 at index .* is outside 0\.\.255 \(dtype uint8\)",
    )
    is_refused(
        ArgumentError,
        lambda: convert(text, "hdf5", tmp_path / "out", tokenizer="byte", dtype="uint8"),
        match="expected tokens that dtype uint8 holds, found one with the id 256.*no_boundary",
    )
    with open_writer(tmp_path / "own.h5", batch_size=1, seq_len=4, dtype="uint8") as writer:
        is_refused(ConvertError, lambda: writer.write(np.array([[1, 2, 256, 3]])), match="token id 256")
        writer.write(np.array([[1, 2, 255, 3]]))
    assert dtype_of(tmp_path / "own.h5") == "uint8"
    is_refused(
        ConvertError, lambda: HDF5ShardWriter(tmp_path / "s.h5", dtype="uint8", boundary_token_id=256), match="256"
    )


# --- targets without ids of one byte ------------------------------------------------------------------------------
def test_batch_files_refuse_them_and_name_hdf5(tmp_path, npy):
    is_refused(
        ArgumentError,
        lambda: open_writer(tmp_path / "x.batch", batch_size=1, seq_len=4, dtype="uint8"),
        lambda: convert(npy, "batch", tmp_path / "out", **SHAPE, dtype="uint8"),
        match=r"have no ids of one byte \(dtype uint8\); write HDF5: open_writer\('train.h5', ..., dtype='uint8'\)",
    )
    for command in (("npy-to-batch",), ("--to", "batch")):
        words = ["convert", *command[:1], npy, tmp_path / "out"] if len(command) == 1 else ["convert", npy, "out"]
        said = run_zb(*words, *(command if len(command) > 1 else ()), "--dtype", "uint8")
        assert said.exit_code == 2
        assert f"{UINT8_LINE}; write HDF5 with --to hdf5, or pass --dtype uint16" in " ".join(said.output.split())
    assert not (tmp_path / "out").exists()


def test_batch_files_of_kept_ids_get_uint16_which_a_note_says(tmp_path, stream, pair, npy, capsys):
    for number, path in enumerate((stream, pair)):
        convert(path, "batch", tmp_path / f"{number}.batch", packing="pad", **SHAPE, tokens_only=True)
        assert dtype_of(tmp_path / f"{number}.batch") == "uint16"
    convert(npy, "hdf5", tmp_path / "store", **SHAPE)
    convert(tmp_path / "store", "batch", tmp_path / "b")
    assert dtype_of(tmp_path / "b") == "uint16"
    np.testing.assert_array_equal(ids_of(tmp_path / "b"), ids_of(tmp_path / "store"))
    said = capsys.readouterr().err
    assert f"note: {tmp_path / 'b'}: ids of one byte become uint16: batch files have no smaller ones" in said


@pytest.mark.parametrize("source", ["stream", "pair", "npy"])
@pytest.mark.parametrize(("target", "suffix"), [
    ("megatron", ".bin"), ("datatrove", ".ds"), ("bin", ".bin"), ("llmc", ".bin"), ("olmo", ".npy"),
])  # fmt: skip
def test_other_trainers_get_uint16_which_a_note_says(source, target, suffix, request, tmp_path, capsys):
    path = request.getfixturevalue(source)
    options = {"boundary_token_id": 7} if source == "npy" else {"tokens_only": True}
    if source == "npy":
        options["tokens_only"] = target in ("bin", "llmc", "olmo")
    out = tmp_path / f"out{suffix}"
    assert convert(path, target, out, **options).to_json()["dtype"] == "uint16"
    assert capsys.readouterr().err.count(f"note: {out}: ids of one byte become uint16") == 1
    explicit = tmp_path / f"asked{suffix}"
    found = convert(path, target, explicit, **options, dtype="uint8").to_json()["dtype"]
    assert found == ("uint8" if target == "megatron" else "uint16")
    said = capsys.readouterr().err
    assert ("become uint16" in said) is (target != "megatron")
    if target == "megatron":
        assert dtype_of(explicit) == "uint8"
        np.testing.assert_array_equal(ids_of(explicit), IDS)
        assert explicit.read_bytes() == IDS.tobytes()


# --- what is done with a store --------------------------------------------------------------------------------------
def test_the_commands_take_a_store_of_uint8(tmp_path, npy):
    out = tmp_path / "out"
    for part in (1, 0):
        run(zb, "convert", "npy-to-hdf5", npy, out, "--batch-size", 4, "--seq-len", LENGTH, "--shards", 3,
            "--shard-range", f"{part}/2", code=0)  # fmt: skip
    succeed(zb, "index", "merge", out)
    facts = json.loads(succeed(zb, "info", out, "--json").output)
    assert (facts["dtype"], facts["max_token"]) == ("uint8", 255)
    succeed(zb, "verify", out)
    succeed(zb, "show", out, "--batch", 0)
    succeed(zb, "plan", out, "--ranks", 2)
    known = ShardIndex.load(out)
    (out / "shards.json").unlink()
    rebuild_index(out)
    assert ShardIndex.load(out).sha256 == known.sha256
    succeed(zb, "convert", "hdf5-to-npy", out, tmp_path / "back.npy")
    assert np.load(tmp_path / "back.npy").dtype == np.uint8
    assert known.meta.dtype == np.uint8


def test_a_live_store_that_was_cut_off_is_repaired(tmp_path):
    rows = IDS.reshape(-1, 4, LENGTH)
    writer = open_writer(tmp_path / "live", batch_size=4, seq_len=LENGTH, dtype="uint8", live=True, shard_batches=6)
    writer.write(rows[:10])
    with open_reader(tmp_path / "live") as reader:
        assert (reader.dtype, reader.num_batches) == (np.uint8, 10)
    writer.close()
    succeed(zb, "verify", tmp_path / "live")
    np.testing.assert_array_equal(ids_of(tmp_path / "live"), rows[:10].reshape(-1))


def test_the_hint_of_a_vocabulary_names_the_dtype_that_it_would_give(tmp_path):
    np.save(tmp_path / "in.npy", IDS.astype("<i4"))
    how = ("--batch-size", 4, "--seq-len", LENGTH)
    said = " ".join(succeed(zb, "convert", "npy-to-hdf5", tmp_path / "in.npy", tmp_path / "out", *how).output.split())
    assert "all ids fit uint8, the largest is 255: --vocab-size 256 would store them in it and save 4.2 KiB" in said


@examples(30)
@given(data=st.data())
def test_ids_go_to_hdf5_and_back(data, tmp_path_factory):
    """Equal tokens, digests and dtype: npy to HDF5 in any shape, codec and number of shards, and back."""
    folder = Path(tmp_path_factory.mktemp("round"))
    rows, length = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    ids = np.frombuffer(data.draw(st.binary(min_size=rows * length, max_size=rows * length)), np.uint8)
    np.save(folder / "in.npy", ids.reshape(rows, length) if length > 2 else ids)
    batch_size = data.draw(st.integers(1, rows))
    shards = data.draw(st.integers(1, rows // batch_size))
    codec = data.draw(st.sampled_from(["none", "zstd", "gzip:1"]))
    how = {"batch_size": batch_size, "seq_len": length, "shuffle": False, "shards": shards, "codec": codec}
    convert(folder / "in.npy", "hdf5", folder / "out", **how)
    convert(folder / "out", "npy", folder / "back.npy")
    back = np.load(folder / "back.npy")
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back.reshape(-1), ids[: back.size])
    assert back.size == rows // batch_size * batch_size * length
