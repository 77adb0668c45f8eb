"""Compressed targets and sources of conversions, and stores in another layout."""

import json
from functools import partial

import numpy as np
import pytest
from commandline import report_of
from contents import batches_of, require_good, write_batches
from packed import require_same_pieces

from zb_hdf5 import ArgumentError, ShardIndex, convert, open_corpus, open_reader
from zb_hdf5.converters.cli import convert_commands as commands

run = partial(report_of, commands)
TEXTS = [f"{number} " + "once upon a time " * (number % 7) for number in range(120)]


def codecs_of(path):
    return [shard.compressed and shard.compressed.codec for shard in ShardIndex.load(path).shards]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": each, "id": str(k)}) + "\n" for k, each in enumerate(TEXTS)))
    return path


@pytest.fixture
def packed(text, tmp_path):
    """Return a compressed store of two splits with documents."""
    run("jsonl-to-hdf5", text, tmp_path / "packed", "--tokenizer", "byte", "--seq-len", 32, "--batch-size", 4,
        "--val-fraction", 0.3, "--id-column", "id", "--shards", 2, "--codec", "zstd")  # fmt: skip
    return tmp_path / "packed"


def test_text_becomes_compressed_batches_and_streams(text, packed, tmp_path):
    require_good(packed)
    assert set(codecs_of(packed)) == {"zstd:3"}
    run("jsonl-to-hdf5", text, tmp_path / "stream", "--tokenizer", "byte", "--layout", "stream", "--codec", "gzip:9")
    require_good(tmp_path / "stream")
    assert codecs_of(tmp_path / "stream") == ["gzip:9"]
    with open_corpus(tmp_path / "stream") as store:
        assert bytes(store.documents[5].ids[:-1].tolist()).decode() == TEXTS[5]
    run("stream-to-hdf5", tmp_path / "stream", tmp_path / "again", "--seq-len", 64, "--codec", "zstd:1")
    require_good(tmp_path / "again")
    assert codecs_of(tmp_path / "again") == ["zstd:1"]


def test_a_finished_store_of_another_codec_is_no_result(text, packed, tmp_path):
    again = ("jsonl-to-hdf5", text, packed, "--tokenizer", "byte", "--seq-len", 32, "--batch-size", 4,
             "--val-fraction", 0.3, "--id-column", "id", "--shards", 2, "--resume")  # fmt: skip
    assert run(*again, "--codec", "zstd:3")["done"]
    assert "exists already" in run(*again, "--codec", "zstd:4", code=1)
    copy = ("hdf5-to-hdf5", packed, tmp_path / "copy")
    run(*copy, "--codec", "gzip")
    assert run(*copy, "--codec", "gzip:6", "--resume")["shards_written"] == 0
    assert "not the result of this conversion" in run(*copy, "--resume", code=1)


@pytest.mark.parametrize("options", [{}, {"--codec": "gzip:1"}, {"--shards": None, "--dtype": "uint32"}], ids=str)
@pytest.mark.thin
def test_a_store_is_compressed_or_not_and_keeps_everything(options, packed, tmp_path):
    given = [word for name, value in options.items() if value for word in (name, value)]
    run("hdf5-to-hdf5", packed, tmp_path / "other", *given)
    require_good(tmp_path / "other")
    assert set(codecs_of(tmp_path / "other")) == {options.get("--codec")}
    with open_reader(packed) as old, open_reader(tmp_path / "other") as new:
        np.testing.assert_array_equal(np.stack(list(new)), np.stack(list(old)))
        for number in range(old.num_batches):
            require_same_pieces(new.read_batch_pieces(number), old.read_batch_pieces(number))
        assert [each.id for each in new.corpus.documents[:9]] == [each.id for each in old.corpus.documents[:9]]


@pytest.mark.parametrize(("batch_size", "seq_len"), [(3, 16), (1, 32), (10, 8), (4, 1)])
@pytest.mark.thin
def test_another_layout_keeps_records_and_documents_of_each_split(batch_size, seq_len, packed, tmp_path):
    report = run("hdf5-to-hdf5", packed, tmp_path / "new", "--batch-size", batch_size, "--seq-len", seq_len)
    require_good(tmp_path / "new")
    lost = 0
    for split in ("train", "val"):
        old, new = (batches_of(path, split=split).reshape(-1) for path in (packed, tmp_path / "new"))
        np.testing.assert_array_equal(new, old[: len(new)])
        lost += len(old) - len(new)
        assert len(old) - len(new) < batch_size * seq_len
        with open_reader(packed, split=split) as before, open_reader(tmp_path / "new", split=split) as after:
            assert after.meta.shape == (batch_size, seq_len)
            records = np.arange(after.num_records)
            require_same_pieces(after.read_pieces(records), before.read_pieces(records, seq_len))
    assert report["tokens_dropped"] == ({"remainder": lost} if lost else {})
    assert len(ShardIndex.load(tmp_path / "new").shards) == len(ShardIndex.load(packed).shards)


def test_compressed_batches_go_to_other_formats_and_layouts_with_fields_and_counts(tmp_path, tokens, write_file):
    plain = write_file(tmp_path / "plain.batch", tokens).path
    run("batch-to-hdf5", plain, tmp_path / "small.h5", "--codec", "zstd:9")
    run("hdf5-to-batch", tmp_path / "small.h5", tmp_path / "back.batch")
    assert (tmp_path / "back.batch").read_bytes() == plain.read_bytes()
    tokens = np.random.default_rng(2).integers(0, 300, (5, 4, 12)).astype("<u2")
    fields = {"mask": "u1", "pair": ("<f4", (2,))}
    values = {"mask": tokens % 2, "pair": np.stack([tokens, tokens + 1], -1).astype("f4")}
    write_batches(tmp_path / "x.h5", tokens, values, total_records=20, fields=fields)
    convert(tmp_path / "x.h5", "hdf5", tmp_path / "y.h5", batch_size=7, seq_len=6, codec="zstd", dtype="uint32")
    with open_reader(tmp_path / "y.h5") as reader:
        assert (reader.meta.shape, reader.dtype, reader.num_batches) == ((7, 6), np.dtype("<u4"), 5)
        assert (reader.meta.total_records, reader.meta.codec) == (40, "zstd:3")
        rows = tokens.reshape(-1, 6)[:35].reshape(5, 7, 6)
        np.testing.assert_array_equal(np.stack(list(reader)), rows)
        np.testing.assert_array_equal(np.stack(list(reader.field("mask"))), rows % 2)
        pairs = np.stack(list(reader.field("pair"))).reshape(5, 7, 6, 2)
        np.testing.assert_array_equal(pairs, np.stack([rows, rows + 1], -1))
    require_good(tmp_path / "y.h5")


def test_layouts_that_cannot_be_and_codecs_of_other_files_are_refused(packed, tmp_path):
    new = tmp_path / "new"
    assert "seq_len must divide the stored 32, found 5" in run("hdf5-to-hdf5", packed, new, "--seq-len", 5, code=2)
    said = run("hdf5-to-hdf5", packed, new, "--batch-size", 7, "--remainder", "error", code=1)
    assert f"records of {packed} (train) are not a multiple of batch_size 7" in said
    assert "do not fill one batch" in run("hdf5-to-hdf5", packed, new, "--batch-size", 100_000, code=1)
    assert "no record is left over" in run("hdf5-to-hdf5", packed, new, "--remainder", "drop", code=2)
    with pytest.raises(ArgumentError, match="seed, shuffle belong to"):
        convert(packed, "hdf5", new, shuffle=True, seed=3)
    assert not new.exists()
    said = run("hdf5-to-hdf5", packed, tmp_path / "live", "--live", "--codec", "zstd", code=2)
    assert "leave out --codec" in said
    assert "No such option" in run("hdf5-to-batch", packed, tmp_path / "x", "--codec", "zstd", code=2)
    assert "levels 1 to 22" in run("hdf5-to-hdf5", packed, tmp_path / "x", "--codec", "zstd:40", code=2)
    for target in ("batch", "npy"):
        with pytest.raises(ArgumentError, match=f"codec does not apply to an HDF5 store as {target}"):
            convert(packed, target, tmp_path / "x", codec="zstd", tokens_only=True)
    run("hdf5-to-hdf5", packed, tmp_path / "live", "--live")
    assert codecs_of(tmp_path / "live") == [None] * len(ShardIndex.load(tmp_path / "live").shards)
