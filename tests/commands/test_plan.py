"""`zb plan`: each figure is that of the loaders of a job, and the opens are those that strace sees in real jobs."""

import re
from pathlib import Path

import h5py
import numpy as np
import opens
import pytest
from commandline import one_error, report_of, run_zb

from zb_hdf5 import Loader, convert
from zb_hdf5.commands import training_plan
from zb_hdf5.commands.zb import zb
from zb_hdf5.commands.zb_plan import NAMES_OF_FIGURES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a store of 8 shards, a store of streams, a folder of arrays and an HDF5 file of another program."""
    folder = tmp_path_factory.mktemp("plan")
    tokens = np.random.default_rng(1).integers(0, 50_000, (1_030, 16), dtype=np.uint16)
    np.save(folder / "records.npy", tokens)
    (folder / "arrays").mkdir()
    for number, part in enumerate(np.split(tokens[:1_024].reshape(-1), 4)):
        np.save(folder / "arrays" / f"{number}.npy", part)
    convert(folder / "records.npy", "hdf5", folder / "store", batch_size=4, shards=8, workers=1, shuffle=False)
    convert(folder / "arrays", "stream", folder / "streams", boundary_token_id=1, workers=1)
    with h5py.File(folder / "foreign.h5", "w") as h5:
        h5["tokens"] = tokens
    return folder


#: Path -> the shape of the batches.
KINDS = {
    "streams": {"batch_size": 2, "seq_len": 24},
    "arrays": {"batch_size": 2, "seq_len": 24},
    "foreign.h5": {"batch_size": 4},
}


def plan(path, ranks, shape, *arguments):
    """Return the values of a plan, and their origins."""
    options = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", value)]
    report = report_of(zb, "plan", path, "--ranks", ranks, *options, *arguments)
    figures = report["figures"]
    return tuple({name: each[key] for name, each in figures.items()} for key in ("value", "how"))


def test_steps_and_bytes_are_those_of_the_loader(folder):
    path = folder / "store"
    values, how = plan(path, 12, {"batch_size": 3}, "--step-time-s", 0.5, "--ranks-per-node", 8, "--steps", 100)
    with Loader(path, batch_size=3, rank=0, world_size=12) as loader:
        assert (values["records"], values["steps"]) == (loader.num_records, len(loader)) == (1_028, 28)
        assert values["left_out"] == loader.plan.num_left_out == 20
        assert values["bytes_per_step"] == next(loader).numel() * 2
    assert values["node_bytes_per_step"] == 8 * 3 * 16 * 2
    assert values["node_bytes_per_s"] == 2 * values["node_bytes_per_step"]
    assert values["bytes_per_s"] == 2 * 12 * 3 * 16 * 2
    assert values["tokens_per_step"] == 12 * 3 * 16
    assert values["node_bytes_per_epoch"] == 28 * 8 * 3 * 16 * 2
    assert values["epochs"] == pytest.approx(100 / 28)
    assert values["hours"] == pytest.approx(50 / 3600)
    assert values["index_bytes"] == (path / "shards.json").stat().st_size
    assert 0 < values["read_s"] < values["first_batch_s"]
    assert [name for name in how if how[name] == "measured"] == ["first_batch_s", "read_s"]
    assert {
        how[name] for name in ("records", "steps", "left_out", "opens_at_opening", "opens_of_all", "looks_at_opening")
    } == {"counted"}
    assert how["bytes_per_s"] == how["hours"] == "arithmetic"


def test_all_figures_have_a_line_that_names_their_origin(folder):
    values, how = plan(folder / "store", 12, {}, "--step-time-s", 0.5)
    lines = run_zb("plan", folder / "store", "--ranks", 12, "--step-time-s", 0.5, code=0).stdout.splitlines()
    assert [*values] == [*NAMES_OF_FIGURES]
    shown = [line.split(how[name])[0].strip() for name, line in zip(values, lines[2:], strict=True)]
    assert shown == [*NAMES_OF_FIGURES.values()]


def test_opens_of_many_ranks_are_those_of_some_of_them(folder, monkeypatch):
    exact, how = plan(folder / "store", 128, {"batch_size": 1})
    assert how["opens_of_all"] == "arithmetic"
    monkeypatch.setattr(training_plan, "COUNTED_RANKS", 128)
    counted, how = plan(folder / "store", 128, {"batch_size": 1})
    assert how["opens_of_all"] == "counted"
    assert exact["opens_of_all"] == pytest.approx(counted["opens_of_all"], rel=0.1)
    monkeypatch.setattr(training_plan, "COUNTED_STEPS", 1)
    shown = run_zb("plan", folder / "store", "--ranks", 2, "--shuffle", "sequential", code=0).stdout
    assert "at least " in shown


def test_a_job_that_is_too_large_for_the_data_is_refused(folder):
    text = one_error(run_zb("plan", folder / "store", "--ranks", 8_192), code=2)
    assert "1,028 records are too few for 8,192 ranks with batches of 4; pass a smaller" in text


@pytest.mark.slow
@pytest.mark.skipif(not opens.can_trace(), reason="needs strace, which counts what HDF5 opens")
@pytest.mark.parametrize("kind", KINDS)
def test_opens_of_streams_and_of_files_in_place_are_those_of_a_real_job(folder, kind, tmp_path):
    found = opens.ranks_of(tmp_path, folder / kind, [4], **KINDS[kind])
    values, _ = plan(folder / kind, 4, KINDS[kind])
    counts = [each.opens for each in found[4]]
    assert len(counts) == 4
    assert (max(counts), sum(counts)) == (values["opens_per_epoch"], values["opens_of_all"])


#: The page of large jobs, with a table of counts.
PAGE = Path(__file__).parents[2] / "docs" / "large_jobs.md"


def row_of_page(beginning):
    """Return the counts of a row of the table: of 1, 8 and 64 processes, and those of 10,000 by arithmetic."""
    [cells] = re.findall(rf"^\| {re.escape(beginning)}[^|]*\|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [int(cell.replace(",", "")) for cell in cells.split("|")]


@pytest.mark.slow
@pytest.mark.skipif(not opens.can_trace(), reason="needs strace")
def test_the_page_of_large_jobs_has_the_counts_of_real_jobs_and_of_their_plans(tmp_path):
    (tmp_path / "traces").mkdir()
    np.save(tmp_path / "records.npy", np.arange(16_384 * 512, dtype=np.uint16).reshape(16_384, 512))
    path = tmp_path / "store"
    convert(tmp_path / "records.npy", "hdf5", path, batch_size=8, shards=16, workers=1, shuffle=False)
    found = opens.ranks_of(tmp_path / "traces", path, [1, 8, 64], access="pread")
    for place, (ranks, traced) in enumerate(found.items()):
        values, _ = plan(path, ranks, {})
        counts = {
            "steps of each": values["steps"],
            "opens of each at opening": values["opens_at_opening"],
            "looks of each": max(each.looks for each in traced),
            "shards that each opens": max(each.opens for each in traced) - 2,
            "opens of all": sum(each.opens for each in traced),
            "reads of each in a step": values["reads_per_step"],
            "bytes of each in its steps": values["steps"] * values["bytes_per_step"],
            "bytes of each to prove": values["proof_bytes"],
        }
        assert counts == {name: row_of_page(name)[place] for name in counts}
        assert counts["opens of all"] == values["opens_of_all"]
        assert max(each.opens for each in traced) == values["opens_per_epoch"]
        assert {each.looks for each in traced} == {values["looks_at_opening"]}
        most = max(each.num_bytes for each in traced)
        assert most == counts["bytes of each in its steps"] + counts["bytes of each to prove"]


def test_the_figures_of_10_000_ranks_follow_from_the_counts():
    shards, batches, batch_bytes = 1_024, 2**43 // 2**16, 8 * 4_096 * 2
    row = {name: row_of_page(name) for name in ("steps", "opens of all", "bytes of each in", "bytes of each to")}
    assert row["steps"][3] == batches // 10_000
    assert row["opens of all"][3] == 10_000 * (2 + shards)
    assert row["bytes of each in"][3] == row["steps"][3] * batch_bytes
    assert row["bytes of each to"][3] == shards * batch_bytes + 4 * batches
