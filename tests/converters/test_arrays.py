"""Arrays of tokens as records: those of a split for validation, and reads of rows wherever they lie."""

import itertools

import numpy as np
import pytest
from commandline import one_error, report_of, run_zb
from contents import batches_of, files_in
from contract import is_refused
from interrupted import Failing, Stops

from zb_hdf5 import ArgumentError, ConvertError, Loader, convert, open_reader, verify_store
from zb_hdf5.commands.zb import zb
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.files.tokens import open_extents
from zb_hdf5.loaders.order import write_order

S = 8
RECORDS = 103
SHAPE = {"batch_size": 4, "seq_len": S, "seed": 3, "workers": 1}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two arrays of records, which are numbered by their first token."""
    (tmp_path / "in").mkdir()
    tokens = np.arange(RECORDS * S, dtype="<u4").reshape(-1, S)
    np.save(tmp_path / "in" / "a.npy", tokens[:60])
    np.save(tmp_path / "in" / "b.npy", tokens[60:].astype(">u4"))
    return tmp_path / "in"


def numbers_of(path, split):
    return (batches_of(path, split=split)[:, :, 0] // S).reshape(-1).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_records_are_held_out_in_batches_of_their_own(shuffle, remainder, folder, tmp_path):
    options = {"val_fraction": 0.2, "shuffle": shuffle, "remainder": remainder, "shards": 3}
    report = convert(folder, "hdf5", tmp_path / "out", **SHAPE, **options)
    train = (RECORDS - 21) // 4  # 20.6 records are 21
    assert report.batches_of_split == {"train": train, "val": 25 + (remainder == "pad") - train}
    assert [shard.split for shard in report.shards] == ["train"] * 3 + ["val"]
    order = write_order(RECORDS, 3).indices(np.arange(RECORDS)) if shuffle else np.arange(RECORDS)
    assert numbers_of(tmp_path / "out", "train") == order[: 4 * train].tolist()
    held_out = numbers_of(tmp_path / "out", "val")
    left = order[4 * train :].tolist()
    assert held_out == (left[: len(left) // 4 * 4] if remainder == "drop" else [*left, 0])
    assert {each.outcome for each in verify_store(tmp_path / "out")} == {"verified"}
    with Loader(tmp_path / "out", split="val", rank=0, world_size=1) as loader:
        assert loader.num_records == len(held_out)
    assert sum(shard.token_count for shard in report.shards) + sum(report.counts.dropped.values()) == (
        report.counts.tokens_in + report.counts.padded
    )


def test_a_held_out_split_is_the_same_in_two_passes_by_parts_and_after_a_stop(folder, tmp_path):
    options = {**SHAPE, "val_fraction": 0.3, "shards": 2}
    convert(folder, "hdf5", tmp_path / "one", **options)
    convert(folder, "hdf5", tmp_path / "two", **options, shuffle_method="two-pass")
    parted = {name: value for name, value in options.items() if name != "workers"}
    flags = list(itertools.chain(*((f"--{name.replace('_', '-')}", value) for name, value in parted.items())))
    for part in ("0/2", "1/2"):
        run_zb("convert", "npy-to-hdf5", folder, tmp_path / "parts", *flags, "--shard-range", part, code=0)
    run_zb("index", "merge", tmp_path / "parts", code=0)
    stopped = {name: value for name, value in options.items() if name != "workers"}
    is_refused(Stops, lambda: convert(folder, "hdf5", tmp_path / "stopped", **stopped, engine=Failing(1)))
    report = convert(folder, "hdf5", tmp_path / "stopped", **options, resume=True)
    assert report.kept.shards == 1
    expected = files_in(tmp_path / "one")
    assert [files_in(tmp_path / name) == expected for name in ("two", "parts", "stopped")] == [True] * 3


def test_the_report_has_the_splits(folder, tmp_path):
    command = ("convert", "npy-to-hdf5", folder, tmp_path / "out", "--batch-size", 4, "--val-fraction", 0.2)
    assert report_of(zb, *command)["batches_of_split"] == {"train": 20, "val": 5}
    lines = [line.split() for line in run_zb(*command, "--force").stdout.splitlines()]
    assert any(line[0] == "splits" and line[1:] == ["20", "batches", "train,", "5", "batches", "val"] for line in lines)
    with open_reader(tmp_path / "out") as reader:
        assert reader.corpus.index.source["val_fraction"] == 0.2


@pytest.mark.parametrize(
    ("target", "name", "options", "error", "message"),
    [
        (
            "hdf5",
            "o",
            {"val_fraction": 0.01},
            ConvertError,
            "leaves 25 of 25 batches to train on: val needs at least 4 records for a batch, and gets 1: pass another",
        ),
        (
            "hdf5",
            "o",
            {"val_fraction": 0.99},
            ConvertError,
            "leaves 0 of 25 batches to train on: train needs at least 4 records, and gets 1: pass another",
        ),
        ("hdf5", "o", {"val_fraction": 1.0}, ArgumentError, "must be at least 0 and below 1"),
        ("hdf5", "o.h5", {"val_fraction": 0.2}, ConvertError, "is one file; name a folder"),
        ("hdf5", "o", {"val_fraction": 0.2, "live": True}, ArgumentError, "a live store has no splits"),
        ("npy", "o", {"val_fraction": 0.2}, ArgumentError, "val_fraction does not apply"),
        ("hdf5", "o", {"val_last_shard": True}, ArgumentError, "val_last_shard belongs to"),
    ],
)
def test_a_split_that_cannot_be_held_out_is_refused(target, name, options, error, message, folder, tmp_path):
    shape = SHAPE if "live" not in options else {key: value for key, value in SHAPE.items() if key != "workers"}
    is_refused(error, lambda: convert(folder, target, tmp_path / name, **shape, **options), match=message)
    assert not (tmp_path / name).exists()


def test_the_command_names_its_options(folder, tmp_path):
    message = one_error(run_zb("convert", "npy-to-hdf5", folder, tmp_path / "o", "--val-fraction", 0.01), 1)
    assert "--val-fraction 0.01 of 103 records in batches of 32" in message
    assert "or a smaller --batch-size" in message


@pytest.mark.parametrize("stride", [12, 20])
def test_rows_are_read_wherever_they_lie(stride, tmp_path):
    (tmp_path / "x").write_bytes(np.arange(1000, dtype="<u2").tobytes())
    extents = Extents([Run(10, 2 * stride, 40)], 24)
    units = np.array([[5 + stride * unit + column for column in range(12)] for unit in range(40)])
    tokens = open_extents(tmp_path / "x", extents, np.dtype("<u2"), 480, "pread")
    draws = np.random.default_rng(0)
    for length, starts in ((4, draws.integers(0, 476, 200)), (4, draws.permutation(120) * 4), (5, np.arange(96) * 5)):
        out = np.empty((len(starts), length), "<u2")
        tokens.gather(starts, out)
        np.testing.assert_array_equal(out, units.reshape(-1)[starts[:, np.newaxis] + np.arange(length)])
    with pytest.raises(IndexError):
        tokens.gather(np.array([3, 478]), np.empty((2, 4), "<u2"))
    tokens.close()


def test_files_of_another_format_in_a_folder_are_named_and_not_left_out_unseen(folder, tmp_path):
    (folder / "notes.md").touch()
    command = ("convert", folder, tmp_path / "out", "--batch-size", 4)
    assert "left out" not in run_zb(*command, code=0).stderr
    for name in ("c.bin", "d.parquet"):
        (folder / name).touch()
    said = run_zb(*command, "--force", code=0).stderr
    assert f"note: {folder}: 2 files are left out, the first is {folder}/c.bin" in said
