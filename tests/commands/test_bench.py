"""`zb bench`: each setting gives equal tokens, in turns, and the fastest safe one is named."""

import json

import h5py
import numpy as np
import pytest
import torch
from commandline import one_error, report_of, run_zb

from zb_hdf5 import ChecksumError, HDF5ShardWriter, convert, open_reader, open_writer
from zb_hdf5.commands import timing
from zb_hdf5.commands.zb import zb

SETTINGS = ["Loader(path)", 'verify="none"', 'access="mmap"', 'access="pread"', "prefetch=4", "DataLoader, 2 workers"]
OTHERS = ["dtype=torch.int32", 'shuffle="records"', "bare mapping"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a store of two shards, one file, a stream and a file of 1-D ids, all with the same tokens."""
    folder = tmp_path_factory.mktemp("bench")
    tokens = np.random.default_rng(1).integers(0, 50_000, (64, 16), dtype=np.uint16)
    np.save(folder / "records.npy", tokens)
    np.save(folder / "ids.npy", tokens.reshape(-1))
    convert(folder / "records.npy", "hdf5", folder / "store", batch_size=4, seq_len=16, shards=2, workers=1)
    convert(folder / "records.npy", "batch", folder / "x.batch", batch_size=4, seq_len=16, workers=1)
    with h5py.File(folder / "foreign.h5", "w") as h5:
        h5["tokens"] = tokens
    with HDF5ShardWriter(folder / "stream.h5") as writer:
        writer.write_document(tokens.reshape(-1))
    return folder


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(timing.os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.mark.parametrize(("layout", "shape"), [("stream", ("--batch-size", 2, "--seq-len", 16)), ("hdf5", ())])
def test_a_store_with_splits_is_timed_by_the_split_that_loaders_read(tmp_path, layout, shape, monkeypatch):
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 1)
    monkeypatch.setattr(timing, "_data_loader", lambda path, options, workers: timing._open_loader(path, options))
    (tmp_path / "ids").mkdir()
    for number, (name, size) in enumerate({"train": 2048, "val": 512}.items()):
        np.save(tmp_path / "ids" / f"{name}.npy", np.arange(size, dtype=np.uint16) + number * 10_000)
    records = {} if layout == "stream" else {"batch_size": 2, "seq_len": 16, "shuffle": False}
    convert(tmp_path / "ids", layout, tmp_path / "store", boundary_token_id=9_999, workers=1, **records)
    for split, steps in {(): 64, ("--split", "val"): 16, ("--split", "all"): 80}.items():
        assert report_of(zb, "bench", tmp_path / "store", "--seconds", 1, *shape, *split)["steps"] == steps


@pytest.mark.parametrize("name", ["store", "x.batch", "stream.h5", "ids.npy"])
def test_each_setting_is_timed_and_gives_the_same_tokens(folder, name, monkeypatch):
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 1)
    monkeypatch.setattr(timing, "_data_loader", lambda path, options, workers: timing._open_loader(path, options))
    shape = ("--batch-size", 4, "--seq-len", 16) if name in ("stream.h5", "ids.npy") else ()
    report = report_of(zb, "bench", folder / name, "--seconds", 1, *shape)
    is_checked = not shape  # windows of a stream are not
    settings = SETTINGS if is_checked else [each for each in SETTINGS if each != 'verify="none"']
    assert [row["way"] for row in report["rows"]] == [*settings, *OTHERS]
    assert report["steps"] == 16
    for row in report["rows"]:
        assert row["rounds"] == 1
        assert 0 < row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]
        assert 0 < row["step_us_p50"] <= row["step_us_p99"]
        assert row["first_batch_ms"] > 0
    assert report["rows"][0]["is_checked"] is is_checked
    assert "choose" in run_zb("bench", folder / name, "--seconds", 1, *shape, code=0).stdout


def test_batches_that_are_joined_of_records_have_no_bare_mapping(folder, monkeypatch):
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 1)
    monkeypatch.setattr(timing, "_data_loader", lambda path, options, workers: timing._open_loader(path, options))
    joined = report_of(zb, "bench", folder / "foreign.h5", "--seconds", 1, "--batch-size", 4)
    assert "bare mapping" not in [row["way"] for row in joined["rows"]]
    stored = report_of(zb, "bench", folder / "foreign.h5", "--seconds", 1)
    assert "bare mapping" in [row["way"] for row in stored["rows"]]


def test_a_compressed_file_of_another_program_has_no_settings_of_plain_extents(folder, monkeypatch):
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 1)
    monkeypatch.setattr(timing, "_data_loader", lambda path, options, workers: timing._open_loader(path, options))
    with h5py.File(folder / "foreign.h5") as plain, h5py.File(folder / "packed.h5", "w") as packed:
        packed.create_dataset("tokens", data=plain["tokens"][:], compression="gzip", chunks=(8, 16))
    report = report_of(zb, "bench", folder / "packed.h5", "--seconds", 1, "--batch-size", 4)
    assert [row["way"] for row in report["rows"]] == [SETTINGS[0], *SETTINGS[4:], *OTHERS[:2]]


@pytest.mark.parametrize("number", [0, 63])
@pytest.mark.parametrize("name", ["store", "x.h5", "foreign.h5"])
def test_ids_that_int32_does_not_hold_are_not_timed_as_int32(name, number, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 1)
    monkeypatch.setattr(timing, "_data_loader", lambda path, options, workers: timing._open_loader(path, options))
    for largest, listed in ((2**31 - 1, True), (2**31, False)):
        tokens = np.zeros((64, 16), np.uint32)
        tokens[number, 3] = largest
        if name == "store":
            np.save(tmp_path / "records.npy", tokens)
            how = {"batch_size": 4, "seq_len": 16, "shards": 2, "workers": 1, "force": True}
            convert(tmp_path / "records.npy", "hdf5", tmp_path / name, **how)
        elif name == "x.h5":
            with open_writer(tmp_path / name, batch_size=4, seq_len=16, overwrite=True) as writer:
                writer.write(tokens.reshape(-1, 4, 16))
        else:
            with h5py.File(tmp_path / name, "w") as h5:
                h5["tokens"] = tokens.astype("i8")
        report = report_of(zb, "bench", tmp_path / name, "--seconds", 1, "--batch-size", 4)
        assert ("dtype=torch.int32" in [row["way"] for row in report["rows"]]) is listed


@pytest.mark.slow
def test_a_data_loader_with_workers_and_three_rounds(folder):
    report = report_of(zb, "bench", folder / "store", "--seconds", 1)
    assert min(row["rounds"] for row in report["rows"]) >= 3
    assert "DataLoader, 2 workers" in [row["way"] for row in report["rows"]]


def test_other_tokens_are_an_error_before_anything_is_timed(folder):
    reader = open_reader(folder / "store")
    ways = timing.ways_of(folder / "store", reader, {})
    timing.require_equal(ways[:1], folder / "store")
    wrong = timing.Way("another", lambda: (iter([torch.zeros((4, 16))] * 4), lambda: None), is_checked=True)
    with pytest.raises(ChecksumError, match="another: expected the batches of Loader"):
        timing.require_equal([ways[0], wrong], folder / "store")
    reader.close()


def row(way, rate, is_checked=True, kind="setting", spread=1.0):
    figures = {"tokens_per_s": rate, "tokens_per_s_min": rate, "tokens_per_s_max": rate * spread}
    return {"way": way, "is_checked": is_checked, "kind": kind, **figures}


def test_the_advice_is_the_fastest_setting_that_checks_as_much():
    rows = [row(timing.DEFAULT, 100), row("unchecked", 900, is_checked=False), row("limit", 950, kind="limit")]
    assert timing.advice([*rows, row("near", 109)]).startswith("the defaults: no other setting that checks as much")
    assert timing.advice([*rows, row("far", 150)]) == "far is 1.5 times as fast as the default here, and checks as much"


def test_rows_that_are_noise_are_not_judged():
    """By the load on two cores, or by the spread of a setting; that of another order or of the limit tells nothing."""
    rows = [row(timing.DEFAULT, 100e6), row("prefetch=4", 183e6), row("bare", 100e6, kind="limit", spread=9)]
    assert timing.noise(rows, 1.0) == ""
    assert timing.noise(rows, 18.2) == "a load of 18.2 on 2 cores before the first round"
    rows[1] = row("prefetch=4", 183e6, spread=5.75)
    assert timing.noise(rows, 0.0) == "prefetch=4 had 183 to 1,052 M tokens/s from round to round"


@pytest.mark.parametrize(("load", "chosen"), [(0.1, "the defaults"), (18.0, "not judged: a load of 18.0 on 2 cores")])
def test_the_advice_of_a_busy_machine_is_none(load, chosen, folder, monkeypatch):
    monkeypatch.setattr(timing, "measured", lambda ways, *_: [timing.WayTimes(w, [0.1], [np.ones(3)]) for w in ways])
    monkeypatch.setattr(timing, "require_equal", lambda *_: None)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert f"\nchoose  {chosen}" in run_zb("bench", folder / "store", code=0).stdout


def test_rounds_are_made_in_turns_and_end_with_the_time(monkeypatch):
    seen = []
    shares = []
    now_s = [0.0]
    monkeypatch.setattr(timing, "_pass", lambda times, steps: seen.append(times.way.name))
    monkeypatch.setattr(timing.time, "monotonic", lambda: now_s[0])

    def progress(share):
        now_s[0] += 1.0
        shares.append(share)

    ways = [timing.Way(name, lambda: None, is_checked=True) for name in "ABC"]
    timing.measured(ways, 4, 0.5, progress)
    assert "".join(seen) == "ABCCBAABC"
    assert shares[1:] == pytest.approx([number / 9 for number in range(2, 10)])
    seen.clear()
    shares.clear()
    timing.measured(ways, 4, 10.0, progress)
    assert "".join(seen) == "ABCCBAABCCBA"
    assert (shares == sorted(shares), shares[-2] < 1.0, shares[-1]) == (True, True, 1.0)
    shares.clear()
    timing.measured(ways, 4, 1e6, progress)
    assert shares == pytest.approx([number / 27 for number in range(1, 28)])


def test_one_batch_is_too_little_to_time(tmp_path):
    with open_writer(tmp_path / "x.h5", batch_size=1, seq_len=8) as writer:
        writer.write(np.zeros((1, 1, 8), np.uint32))
    assert "expected at least 2 batches to time, found 1" in one_error(run_zb("bench", tmp_path / "x.h5"))


def test_the_report_is_json(folder, monkeypatch):
    monkeypatch.setattr(timing, "measured", lambda ways, *_: [timing.WayTimes(w, [0.1], [np.ones(3)]) for w in ways])
    monkeypatch.setattr(timing, "require_equal", lambda *_: None)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    found = json.loads(run_zb("bench", folder / "store", "--json", code=0).stdout)
    assert (found["advice"].startswith("the defaults"), found["judged"]) == (True, True)
