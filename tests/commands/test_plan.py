"""`zb plan`: each figure is that of the loaders of a job, and the opens are those that strace sees in real jobs."""

import re
import shutil
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
    """A folder with stores of 8 shards, a store of streams, and files that are read in place."""
    folder = tmp_path_factory.mktemp("plan")
    tokens = np.random.default_rng(1).integers(0, 50_000, (1_030, 16), dtype=np.uint16)
    np.save(folder / "records.npy", tokens)
    (folder / "arrays").mkdir()
    (folder / "megatron").mkdir()
    for number, part in enumerate(np.split(tokens[:1_020].reshape(-1), 4)):  # 85 batches of 48 tokens
        np.save(folder / "arrays" / f"{number}.npy", part)
        how = {"boundary_token_id": int(part[-1]), "workers": 1}
        convert(folder / "arrays" / f"{number}.npy", "megatron", folder / "megatron" / f"{number}.bin", **how)
    convert(folder / "records.npy", "hdf5", folder / "store", batch_size=4, shards=8, workers=1, shuffle=False)
    convert(folder / "records.npy", "batch", folder / "batch", batch_size=4, shards=8, workers=1, shuffle=False)
    convert(folder / "arrays", "stream", folder / "streams", boundary_token_id=1, workers=1)
    with h5py.File(folder / "foreign.h5", "w") as h5:
        h5["tokens"] = tokens
    return folder


#: Path -> the shape of the batches.
KINDS = {
    "batch": {},
    "streams": {"batch_size": 2, "seq_len": 24},
    "arrays": {"batch_size": 2, "seq_len": 24},
    "megatron": {"batch_size": 2, "seq_len": 24},
    "foreign.h5": {"batch_size": 1},
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
    assert values["opening_bytes"] == values["index_bytes"] == (path / "shards.json").stat().st_size
    assert values["node_opening_bytes"] == 8 * values["opening_bytes"]
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


@pytest.mark.parametrize(("kind", "is_least"), [("arrays", False), ("megatron", True)])
def test_indexes_that_are_read_in_steps_make_the_opens_the_least(folder, tmp_path, kind, is_least):
    """The sample of the fingerprint meets 64 files at most: of the others, each index is read with the first ids."""
    for number in range(200):
        for file in (folder / kind).glob("0.*"):
            shutil.copy(file, tmp_path / f"{number:03}{file.suffix}")
    shown = run_zb("plan", tmp_path, "--ranks", 2, "--batch-size", 2, "--seq-len", 24, code=0).stdout
    assert ("at least " in shown) == is_least


def test_a_job_that_is_too_large_for_the_data_is_refused(folder):
    text = one_error(run_zb("plan", folder / "store", "--ranks", 8_192), code=2)
    assert "1,028 records are too few for 8,192 ranks with batches of 4; pass a smaller" in text


#: The sizes of the jobs that are traced, and the ranks of a node.
WORLD_SIZES = (1, 8, 64)
RANKS_OF_NODE = 8


def of_nodes(calls):
    """Return the calls of the ranks of each node together."""
    return [opens.Calls.of(calls[first : first + RANKS_OF_NODE]) for first in range(0, len(calls), RANKS_OF_NODE)]


def counts_of(traced):
    """Return what was counted in a real job, by the names of the figures of its plan."""
    opening = [each.opening for each in traced]
    whole = [opens.Calls.of(each) for each in traced]
    assert len(set(opening)) == 1
    return {
        "opens_at_opening": opening[0].opens,
        "node_opens_at_opening": of_nodes(opening)[0].opens,
        "looks_at_opening": opening[0].looks,
        "node_looks_at_opening": of_nodes(opening)[0].looks,
        "opening_bytes": opening[0].num_bytes,
        "node_opening_bytes": of_nodes(opening)[0].num_bytes,
        "opens_per_epoch": max(each.opens for each in whole),
        "node_opens_per_epoch": max(each.opens for each in of_nodes(whole)),
        "opens_of_all": sum(each.opens for each in whole),
    }


#: Path -> the opens of a rank at opening, as the page of large jobs has them: of 4 files.
AT_OPENING = {"streams": 2, "arrays": 2 * 4, "megatron": 1 + 2 * 4}
#: Path -> the reads of each file that is opened in steps: of a unit, and of crc32 values, which may be another file.
PROOFS = {"streams": 2, "batch": 1}


def require_steps_as_planned(traced, values, num_proofs):
    """In steps all that is read are the batches, and the proofs of files that are opened.

    Nothing is looked at, but for the file system, once, by a rank that waits for a page: the kernel may take pages away
    meanwhile.
    """
    steps = [each.steps for each in traced]
    of_batches = values["steps"] * values["bytes_per_step"]
    proof_bytes, node_proof_bytes = (values.get(name, 0) for name in ("proof_bytes", "node_proof_bytes"))
    assert max(each.num_bytes for each in steps) == of_batches + proof_bytes
    assert (
        max(each.num_bytes for each in of_nodes(steps))
        == min(len(steps), RANKS_OF_NODE) * of_batches + node_proof_bytes
    )
    for each in steps:
        assert each.looks <= 1
        assert each.reads == values["steps"] * values["reads_per_step"] + num_proofs * each.opens


@pytest.mark.slow
@pytest.mark.skipif(not opens.can_trace(), reason="needs strace, which counts what HDF5 opens")
def test_calls_of_streams_and_of_files_in_place_are_those_of_real_jobs(folder, tmp_path):
    """All kinds in one trace: the process that starts the ranks imports torch, which takes most of its time."""
    jobs = {kind: (folder / kind, {"access": "pread", **shape}) for kind, shape in KINDS.items()}
    for kind, of_sizes in opens.ranks_of(tmp_path, jobs, WORLD_SIZES).items():
        for ranks, traced in of_sizes.items():
            twin = opens.twin_of(folder / kind, tmp_path / kind / str(ranks))  # no fact of it is known
            values, _ = plan(twin, ranks, KINDS[kind])
            counts = counts_of(traced)
            assert counts["opens_at_opening"] == AT_OPENING.get(kind, 2), kind
            if kind == "foreign.h5":  # HDF5 does not tell what it reads
                del counts["opening_bytes"], counts["node_opening_bytes"]
            assert counts == {name: values[name] for name in counts}, kind
            require_steps_as_planned(traced, values, PROOFS.get(kind, 0))


#: The page of large jobs, with a table of counts.
PAGE = Path(__file__).parents[2] / "docs" / "large_jobs.md"


def rows_of_page():
    """Return the counts of each row of the table: of 1, 8 and 64 processes, and those of 10,000 by arithmetic."""
    rows = re.findall(r"^\| (\w[^|:,]*)[^|]*\| ([\d,| ]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name.strip(): [int(cell.replace(",", "")) for cell in cells.split("|")] for name, cells in rows}


@pytest.mark.slow
@pytest.mark.skipif(not opens.can_trace(), reason="needs strace")
def test_the_page_of_large_jobs_has_the_counts_of_real_jobs_and_of_their_plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the index names the source
    np.save("records.npy", np.arange(16_384 * 512, dtype=np.uint16).reshape(16_384, 512))
    path = tmp_path / "store"
    convert("records.npy", "hdf5", path, batch_size=8, shards=16, workers=1, shuffle=False)
    [found] = opens.ranks_of(tmp_path, {"store": (path, {"access": "pread"})}, WORLD_SIZES).values()
    rows = rows_of_page()
    for place, (ranks, traced) in enumerate(found.items()):
        values, _ = plan(path, ranks, {})
        counts = counts_of(traced)
        assert counts == {name: values[name] for name in counts}
        require_steps_as_planned(traced, values, 2)
        of_batches = values["steps"] * values["bytes_per_step"]
        shown = {
            "steps of each": values["steps"],
            "opens of each at opening": counts["opens_at_opening"],
            "opens of a node at opening": counts["node_opens_at_opening"],
            "looks of each at opening": counts["looks_at_opening"],
            "looks of a node at opening": counts["node_looks_at_opening"],
            "bytes of each at opening": counts["opening_bytes"],
            "bytes of a node at opening": counts["node_opening_bytes"],
            "shards that each opens": counts["opens_per_epoch"] - counts["opens_at_opening"],
            "opens of a node in the epoch": counts["node_opens_per_epoch"],
            "opens of all in the epoch": counts["opens_of_all"],
            "reads of each in a step": values["reads_per_step"],
            "bytes of each in its steps": of_batches,
            "bytes of a node in its steps": min(ranks, RANKS_OF_NODE) * of_batches,
            "bytes of each to prove the shards": values["proof_bytes"],
            "bytes of a node to prove the shards": values["node_proof_bytes"],
        }
        assert shown == {name: row[place] for name, row in rows.items()}


def test_the_figures_of_10_000_ranks_follow_from_the_counts():
    shards, batches, batch_bytes = 1_024, 2**43 // 2**16, 8 * 4_096 * 2
    row = {name: counts[3] for name, counts in rows_of_page().items()}
    assert row["steps of each"] == batches // 10_000
    assert row["bytes of each at opening"] == shards * 200
    assert row["shards that each opens"] == shards
    assert row["opens of all in the epoch"] == 10_000 * (2 + shards)
    assert row["bytes of each in its steps"] == row["steps of each"] * batch_bytes
    assert row["bytes of each to prove the shards"] == shards * batch_bytes + 4 * batches
    of_each = {name.replace("of each", "of a node"): count for name, count in row.items() if "of each" in name}
    of_each["opens of a node in the epoch"] = 2 + shards
    found = {name: count for name, count in row.items() if "of a node" in name}
    assert found == {name: RANKS_OF_NODE * of_each[name] for name in found}
