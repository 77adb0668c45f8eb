"""`zb plan`: each figure is that of the loaders of a job, and the opens are those that strace sees in real jobs."""

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
    "store": {},
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
    assert {how[name] for name in ("records", "steps", "left_out", "opens_at_opening", "opens_of_all")} == {"counted"}
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
def test_opens_are_those_of_real_jobs_of_1_8_and_64_processes(folder, kind, tmp_path):
    path = folder / kind
    found = opens.ranks_of(tmp_path, path, [1, 8, 64] if kind == "store" else [8], access="auto", **KINDS[kind])
    for ranks, traced in found.items():
        values, _ = plan(path, ranks, KINDS[kind])
        counts = [each.opens for each in traced]
        assert len(counts) == ranks
        assert (max(counts), sum(counts)) == (values["opens_per_epoch"], values["opens_of_all"])


@pytest.mark.slow
@pytest.mark.skipif(not opens.can_trace(), reason="needs strace")
@pytest.mark.parametrize("shuffle", ["global", "records"])
def test_bytes_are_those_of_real_jobs_and_a_batch_and_its_crc32_of_each_file(folder, shuffle, tmp_path):
    path = folder / "store"
    found = opens.ranks_of(tmp_path, path, [1, 4], access="pread", shuffle=shuffle)
    for ranks, traced in found.items():
        values, _ = plan(path, ranks, {}, "--shuffle", shuffle)
        for each in traced:
            files = each.opens - values["opens_at_opening"]
            with Loader(path, rank=0, world_size=1) as loader:
                reader = loader.reader
                crc32_bytes = 4 * reader.num_batches
                batch_bytes = reader.meta.batch_bytes
            read = values["steps"] * values["bytes_per_step"]
            assert files == 8
            assert each.num_bytes == read + files * batch_bytes + crc32_bytes
