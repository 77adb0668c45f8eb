"""Two conversions of one source that fit together: a folder with a store of the same tokens for each format."""

import json

import numpy as np
import pytest
import torch
from commandline import one_error, run_zb, succeed
from contents import batches_of, write_stream, write_streams
from contract import is_refused

from zb_hdf5 import (
    ArgumentError,
    ConvertError,
    FormatError,
    IncompleteError,
    Loader,
    ShardIndex,
    convert,
    open_reader,
    open_writer,
)
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.conversion import InputOptions
from zb_hdf5.converters.cut_source import CutSource
from zb_hdf5.converters.source_paths import SourcePaths
from zb_hdf5.read_as import AS_STORED

ALONE = {"rank": 0, "world_size": 1}
ROWS = np.random.default_rng(3).integers(0, 50_000, (203, 16), dtype=np.int64)


@pytest.fixture
def tokens(tmp_path):
    np.save(tmp_path / "tokens.npy", ROWS)
    (tmp_path / "books").mkdir()
    return tmp_path / "tokens.npy"


def layout(path):
    """Return all of an index that decides which batches there are."""
    index = ShardIndex.load(path)
    counts = [(entry.num_batches, entry.sha256, entry.split) for entry in index.shards]
    return index.meta, index.shuffle, counts


OPTIONS = {
    "default": (),
    "uint16": ("--vocab-size", 50_000),
    "shape": ("--batch-size", 7, "--seed", 5, "--shards", 3, "--vocab-size", 50_257),
    "padded": ("--batch-size", 8, "--remainder", "pad", "--pad-id", 9, "--vocab-size", 50_257),
    "in order": ("--batch-size", 5, "--no-shuffle", "--shard-size", "1KiB"),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("first", ["hdf5", "batch"])
@pytest.mark.thin
def test_the_folder_opens_with_both_formats_and_states_fit_both(first, options, tokens, tmp_path):
    books, second = tmp_path / "books", {"hdf5": "batch", "batch": "hdf5"}[first]
    succeed(zb, "convert", f"npy-to-{first}", tokens, books / first, *OPTIONS[options])
    succeed(zb, "convert", f"npy-to-{second}", tokens, books / second, "--like", books / first)
    assert layout(books / "hdf5") == layout(books / "batch")
    loaders = [Loader(books, backend=backend, **ALONE) for backend in ("hdf5", "batch")]
    for one, other in (loaders, loaders[::-1]):
        next(one)
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert torch.equal(next(one), next(other))
    for loader in loaders:
        loader.close()


def test_without_it_the_defaults_do_not_fit_and_opening_names_both(tokens, tmp_path):
    books = tmp_path / "books"
    for target, options in (("hdf5", {"vocab_size": 50_000}), ("batch", {})):
        convert(tokens, target, books / target, batch_size=8, **options)
    is_refused(FormatError, lambda: open_reader(books), match="expected the same tokens in hdf5 and batch")


def test_a_model_of_bytes_does_not_fit_a_format_without_them(tmp_path):
    np.save(tmp_path / "in.npy", np.arange(256, dtype=np.uint8))
    how = {"batch_size": 2, "seq_len": 16}
    (tmp_path / "books").mkdir()
    convert(tmp_path / "in.npy", "hdf5", tmp_path / "books" / "hdf5", **how)
    command = ("convert", "npy-to-batch", tmp_path / "in.npy", tmp_path / "books" / "batch", "--like")
    error = one_error(run_zb(*command, tmp_path / "books" / "hdf5"), 2)
    assert "has ids of one byte, and batch files have none" in error
    assert "to have the same tokens, make both with --dtype uint16" in error
    convert(tmp_path / "in.npy", "hdf5", tmp_path / "books" / "hdf5", **how, dtype="uint16", force=True)
    succeed(zb, *command, tmp_path / "books" / "hdf5")
    succeed(zb, "verify", tmp_path / "books")


def test_an_option_that_is_given_wins(tokens, tmp_path):
    convert(tokens, "hdf5", tmp_path / "model", batch_size=8, vocab_size=50_000, shards=3)
    report = convert(tokens, "batch", tmp_path / "out", like=tmp_path / "model", dtype="uint32", shards=2, seed=1)
    assert (report.meta.batch_size, report.meta.seq_len, report.meta.seed) == (8, 16, 1)
    assert (report.meta.dtype.name, len(report.shards)) == ("uint32", 2)
    report = convert(tokens, "batch", tmp_path / "sized", like=tmp_path / "model", shard_size=1 << 30)
    assert len(report.shards) == 1
    report = convert(tokens, "hdf5", tmp_path / "lone.h5", like=tmp_path / "model")
    assert (report.meta.batch_size, report.meta.dtype.name) == (8, "uint16")
    planned = succeed(zb, "convert", "npy-to-batch", tokens, tmp_path / "no", "--like", tmp_path / "model", "--dry-run")
    assert "25 of 8 x 16 uint16" in planned.output


def test_lone_files_and_both_formats_are_models_too(tokens, tmp_path):
    for number, (suffix, target) in enumerate((("h5", "batch"), ("batch", "hdf5"))):
        lone, made = tmp_path / f"{number}.{suffix}", tmp_path / f"{number}.{'batch' if suffix == 'h5' else 'h5'}"
        convert(tokens, "hdf5" if suffix == "h5" else "batch", lone, batch_size=4, seed=9, dtype="uint16")
        report = convert(tokens, target, made, like=lone)
        assert (report.meta.batch_size, report.meta.seed, report.meta.dtype.name) == (4, 9, "uint16")
        np.testing.assert_array_equal(batches_of(made), batches_of(lone))


def test_streams_and_stores_take_the_shape_of_another_store(tmp_path):
    documents = np.random.default_rng(1).integers(0, 500, 3000)
    write_stream(tmp_path / "s.h5", documents, [10] * 300, dtype="uint16", boundary_token_id=0)
    how = {"batch_size": 3, "seq_len": 32, "packing": "best-fit", "seed": 8, "pad_id": 1, "shards": 2}
    convert(tmp_path / "s.h5", "hdf5", tmp_path / "rows", **how)
    convert(tmp_path / "s.h5", "batch", tmp_path / "rows-batch", like=tmp_path / "rows", tokens_only=True)
    assert layout(tmp_path / "rows")[2] == layout(tmp_path / "rows-batch")[2]
    convert(tmp_path / "rows", "hdf5", tmp_path / "halves", batch_size=4, seq_len=16, shards=3, dtype="uint32")
    convert(tmp_path / "rows-batch", "batch", tmp_path / "halves-batch", like=tmp_path / "halves")
    assert layout(tmp_path / "halves")[2] == layout(tmp_path / "halves-batch")[2]


def test_the_splits_of_a_store_and_of_a_stream_stay(tmp_path):
    tokens = np.random.default_rng(2).integers(0, 500, 3000)
    parts = [(part, [10] * 100) for part in np.split(tokens, 3)]
    splits = ("train", "train", "val")
    write_streams(tmp_path / "stream", parts, splits, dtype="uint16", boundary_token_id=0)
    convert(tmp_path / "stream", "hdf5", tmp_path / "rows", batch_size=3, seq_len=32, shards=3)
    convert(tmp_path / "stream", "batch", tmp_path / "rows-batch", like=tmp_path / "rows", tokens_only=True)
    convert(tmp_path / "rows", "batch", tmp_path / "copy", like=tmp_path / "rows", tokens_only=True)
    expected = layout(tmp_path / "rows")[2]
    assert {split for *_, split in expected} == {"train", "val"}
    assert layout(tmp_path / "rows-batch")[2] == expected
    assert layout(tmp_path / "copy")[2] == expected


def test_a_source_that_cannot_give_the_dtype_is_refused(tmp_path, tokens):
    convert(tokens, "hdf5", tmp_path / "small", batch_size=4, dtype="uint16")
    ids = np.arange(100)
    ids[57] = 70_000
    write_stream(tmp_path / "wide.h5", ids, [10] * 10, dtype="uint32")
    how = {"like": tmp_path / "small", "batch_size": 1, "seq_len": 10, "shards": 1}
    with pytest.raises(ConvertError, match=r"expected token ids in 0\.\.65,535, found 70,000 at index 57"):
        convert(tmp_path / "wide.h5", "hdf5", tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
    write_stream(tmp_path / "fits.h5", np.arange(100), [10] * 10, dtype="uint32")
    assert convert(tmp_path / "fits.h5", "hdf5", tmp_path / "out", **how).meta.dtype == np.uint16


def test_what_is_no_store_is_refused(tokens, tmp_path):
    write_stream(tmp_path / "s.h5", np.arange(10))
    np.save(tmp_path / "flat.npy", ROWS.reshape(-1))
    (tmp_path / "empty").mkdir()
    for like, error, match in (
        (tmp_path / "s.h5", ArgumentError, "expected a store of batches, found a token stream"),
        (tmp_path / "flat.npy", ArgumentError, "expected a store of batches, found a token stream"),
        (tmp_path / "empty", FormatError, "not a store"),
    ):
        with pytest.raises(error, match=match):
            convert(tokens, "batch", tmp_path / "out", like=like)
        arguments = ("convert", "npy-to-batch", tokens, tmp_path / "out", "--like", like)
        assert str(like) in one_error(run_zb(*arguments))
    with (
        open_writer(tmp_path / "live", batch_size=4, seq_len=16, live=True, shard_batches=9),
        pytest.raises(IncompleteError, match="its writer has not finished"),
    ):
        convert(tokens, "batch", tmp_path / "out", like=tmp_path / "live")
    assert run_zb("convert", "npy-to-batch", tokens, tmp_path / "out", "--like", tmp_path / "none").exit_code == 2
    with pytest.raises(ArgumentError, match="like belongs to"):
        convert(tokens, "stream", tmp_path / "out", boundary_token_id=3, like=tmp_path / "live")
    _, files = SourcePaths().flat([tmp_path / "flat.npy"], "npy", AS_STORED)
    opened = CutSource(files, "npy", InputOptions(boundary_token_id=3))
    with pytest.raises(ArgumentError, match="is for batches, found a target of streams"):
        convert(opened, "stream", tmp_path / "out", like=tmp_path / "live")
    assert not (tmp_path / "out").exists()
