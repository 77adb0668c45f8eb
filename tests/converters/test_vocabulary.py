"""The vocabulary of a store: the ids that were given or found, and the bytes that knowing it would save."""

import json
import re

import numpy as np
import pyarrow
import pytest
from commandline import run, succeed
from contents import batches_of
from pyarrow import parquet

from zb_hdf5 import ShardIndex, convert, open_reader, rebuild_index
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert_commands as command
from zb_hdf5.converters.merge import merge_parts

LARGEST = 49_999
ROWS = np.random.default_rng(8).integers(0, LARGEST, (64, 16), dtype=np.int64)
ROWS[5, 7] = LARGEST
SHAPE = {"batch_size": 4, "seq_len": 16}
#: uint32 tokens of all rows, less those in uint16.
SAVED = ROWS.size * 2
NOTE = (
    f"all ids fit uint16, the largest is 49,999: --vocab-size 50000 would store them in it and save {SAVED / 1024} KiB"
)


@pytest.fixture
def tokens(tmp_path):
    np.save(tmp_path / "tokens.npy", ROWS)
    return tmp_path / "tokens.npy"


def found(store):
    """Return the vocabulary and the largest id of a store by its index, and whether the former follows from it."""
    index = ShardIndex.load(store)
    return index.meta.vocab_size, index.max_token, index.without_max_token().meta.vocab_size


def in_parts(tokens, path):
    for number in range(2):
        convert(tokens, "hdf5", path, **SHAPE, shards=4, shard_range=(number, 2))
    merge_parts(path)


def interrupted(tokens, path):
    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tokens, "hdf5", path, **SHAPE, shards=4, progress=stop)
    convert(tokens, "hdf5", path, **SHAPE, shards=4, resume=True)


WAYS = {
    "at once": lambda tokens, path: convert(tokens, "hdf5", path, **SHAPE, shards=4),
    "parts": in_parts,
    "resumed": interrupted,
    "live": lambda tokens, path: convert(tokens, "hdf5", path, **SHAPE, live=True),
    "batch": lambda tokens, path: convert(tokens, "batch", path, **SHAPE),
    "compressed": lambda tokens, path: convert(tokens, "hdf5", path, **SHAPE, codec="gzip"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_index_records_the_largest_id_plus_one(tokens, tmp_path, way):
    WAYS[way](tokens, tmp_path / "store")
    assert found(tmp_path / "store") == (LARGEST + 1, LARGEST, 0)
    with open_reader(tmp_path / "store") as reader:
        assert reader.meta.vocab_size == LARGEST + 1
    described = succeed(zb, "info", tmp_path / "store").output
    assert re.search(r"^vocabulary +50,000 ids, the largest stored is 49,999$", described, re.MULTILINE)


def test_a_vocabulary_that_was_given_stays_and_the_largest_id_stands_beside_it(tokens, tmp_path):
    convert(tokens, "hdf5", tmp_path / "store", **SHAPE, vocab_size=50_257)
    assert found(tmp_path / "store") == (50_257, LARGEST, 50_257)
    described = succeed(zb, "info", tmp_path / "store").output
    assert re.search(r"^vocabulary +50,257 ids, the largest stored is 49,999$", described, re.MULTILINE)


def test_sources_of_all_kinds_record_it(tokens, tmp_path):
    convert(tokens, "hdf5", tmp_path / "store", **SHAPE)
    convert(tmp_path / "store", "hdf5", tmp_path / "of-store", batch_size=8)
    np.save(tmp_path / "flat.npy", ROWS.reshape(-1))
    convert(tmp_path / "flat.npy", "stream", tmp_path / "stream", boundary_token_id=LARGEST)
    convert(tmp_path / "stream", "hdf5", tmp_path / "of-stream", **SHAPE)
    for name in ("of-store", "stream", "of-stream"):
        assert found(tmp_path / name) == (LARGEST + 1, LARGEST, 0), name
    table = pyarrow.table({"text": ["once upon a time"] * 9})
    parquet.write_table(table, tmp_path / "text.parquet")
    convert(tmp_path / "text.parquet", "hdf5", tmp_path / "of-text", tokenizer="byte", batch_size=2, seq_len=16)
    assert found(tmp_path / "of-text") == (257, 256, 257)  # that of the tokenizer


def test_copies_find_it_again_and_there_and_back_gives_the_identical_files(tokens, tmp_path):
    for name, given in (("found", None), ("given", LARGEST + 1)):
        folder = tmp_path / name
        folder.mkdir()
        convert(tokens, "hdf5", folder / "h5", **SHAPE, shards=3, vocab_size=given)
        convert(folder / "h5", "batch", folder / "batch")
        convert(folder / "batch", "hdf5", folder / "again")
        files = [{path.name: path.read_bytes() for path in (folder / each).iterdir()} for each in ("h5", "again")]
        assert files[0] == files[1]
        assert found(folder / "batch") == (LARGEST + 1, LARGEST, given or 0)
        assert convert(tokens, "hdf5", folder / "h5", **SHAPE, shards=3, vocab_size=given, resume=True).kept.shards


def test_an_index_that_is_rebuilt_has_it_again(tokens, tmp_path):
    convert(tokens, "hdf5", tmp_path / "store", **SHAPE, shards=3)
    index = tmp_path / "store/shards.json"
    expected = index.read_bytes()
    rebuild_index(tmp_path / "store", force=True)
    assert index.read_bytes() == expected
    index.unlink()
    rebuild_index(tmp_path / "store")
    assert index.read_bytes() == expected


def test_a_lone_file_has_its_largest_id_and_no_vocabulary(tokens, tmp_path):
    convert(tokens, "hdf5", tmp_path / "lone.h5", **SHAPE)
    with open_reader(tmp_path / "lone.h5") as reader:
        assert (reader.meta.vocab_size, reader.corpus.max_token) == (0, LARGEST)
    described = succeed(zb, "info", tmp_path / "lone.h5").output
    assert re.search(r"^largest id +49,999$", described, re.MULTILINE)
    assert "vocabulary" not in described


# --- the bytes that a vocabulary would save ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "options", "is_noted"), [
    ("int64", (), True),
    ("int32", (), True),
    ("uint32", (), True),
    ("uint16", (), False),
    ("int64", ("--dtype", "uint32"), False),
    ("int64", ("--vocab-size", 50_257), False),
    ("int64", ("--vocab-size", 100_000), False),
])  # fmt: skip
def test_the_report_says_what_a_vocabulary_would_save(tmp_path, dtype, options, is_noted):
    np.save(tmp_path / "tokens.npy", ROWS.astype(dtype))
    arguments = ("npy-to-hdf5", tmp_path / "tokens.npy", tmp_path / "out", "--batch-size", 4, *options)
    report = json.loads(succeed(command, *arguments, "--json").output)
    assert report["uint16_would_save_bytes"] == (SAVED if is_noted else 0)
    lines = succeed(command, *arguments, "--force").output.splitlines()
    assert sum(NOTE in line for line in lines) == is_noted
    if is_noted:
        succeed(command, *arguments, "--force", "--vocab-size", 50_000)
        assert batches_of(tmp_path / "out").dtype == np.uint16


def test_ids_that_do_not_fit_and_parts_of_a_conversion_have_no_note(tmp_path):
    np.save(tmp_path / "tokens.npy", ROWS)
    arguments = ("npy-to-hdf5", tmp_path / "tokens.npy", tmp_path / "out", "--batch-size", 4, "--shards", 2)
    assert "fit uint16" not in succeed(command, *arguments, "--shard-range", "0/2").output
    np.save(tmp_path / "tokens.npy", ROWS + 20_000)
    assert "fit uint16" not in succeed(command, *arguments[:2], tmp_path / "large", "--batch-size", 4).output


def test_the_report_of_a_stream_says_it_too(tmp_path):
    np.save(tmp_path / "flat.npy", ROWS.reshape(-1))
    arguments = ("npy-to-stream", tmp_path / "flat.npy", tmp_path / "out", "--boundary-token-id", 7)
    assert NOTE in succeed(command, *arguments).output


def test_the_dry_run_reads_no_id_and_says_what_a_vocabulary_would_save(tokens, tmp_path):
    arguments = ("npy-to-hdf5", tokens, tmp_path / "out", "--batch-size", 4, "--dry-run")
    said = succeed(command, *arguments).output
    assert f"uint32: a --vocab-size of at most 65,536 would store uint16 and save {SAVED / 1024} KiB" in said
    assert json.loads(succeed(command, *arguments, "--json").output)["uint16_would_save_bytes"] == SAVED
    for options in (("--vocab-size", 50_000), ("--vocab-size", 70_000), ("--dtype", "uint32")):
        assert "would store" not in succeed(command, *arguments, *options).output


def test_the_help_promises_what_is_done():
    said = " ".join(run(command, "npy-to-hdf5", "--help").output.split())
    assert "auto: the smallest that the source or --vocab-size proves" in said
    said = " ".join(run(command, "npy-to-batch", "--help").output.split())
    assert "[default: uint32]" in said.partition("--dtype")[2].partition("--vocab-size")[0]
