"""The benchmarks run, check their own data, and give positive figures. Nothing here is about speed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure

ROOT = Path(__file__).resolve().parent.parent
READ_ROWS = {
    "limit", "limit uint16", "preadv loop", "np.memmap loop", "loader hdf5", "loader hdf5 mmap", "loader hdf5 uint16",
    "loader hdf5 uint16 mmap", "loader native", "loader native mmap", "hdf5 auto", "hdf5 mmap", "hdf5 pread",
    "hdf5 h5py", "native auto", "native mmap", "torch.load, fancy index", "DataLoader memmap __getitems__",
    "DataLoader TensorDataset", "int32 view", "loader hdf5 int32", "hdf5 mmap view (uint32)",
}  # fmt: skip
CONVERT_ROWS = {
    "sha256", "npy-to-hdf5 --no-shuffle", "npy-to-hdf5", "npy-to-batch", "hdf5-to-batch", "batch-to-hdf5",
    "hdf5-to-npy", "npy-to-hdf5 two-pass", "npy-to-hdf5, 1 worker", "npy-to-hdf5, 2 workers",
}  # fmt: skip


def run_benchmark(tmp_path, *arguments):
    """Run `python -m benchmarks` with --quick and --json; return (what it printed, its figures)."""
    path = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        *arguments,
        "--quick",
        "--json",
        str(path),
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run([*command, "--repeats", "1"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"], "the data is removed at the end"
    assert "NOT met" not in done.stdout, "too little was measured to judge by"
    return done.stdout, json.loads(path.read_text())


def test_a_long_run_says_what_it_does(capsys, monkeypatch):
    monkeypatch.setattr(measure, "SAY_S", 0.0)
    assert measure.run_fresh(abs, -3, preload="benchmarks.measure")[0] == 3
    assert "measuring abs" in capsys.readouterr().err


def assert_positive(row, *names):
    for name in names:
        assert 0 < row[name]["low"] <= row[name]["median"] <= row[name]["high"], (row["name"], name)


@pytest.mark.slow
def test_remote_measures_every_row(tmp_path):
    if shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("needs nginx (Debian: nginx-light)")
    _, figures = run_benchmark(tmp_path, "remote")
    names = [row["name"] for row in figures["rows"]]
    assert names[:3] == ["bare get_range", "no delay, int32", "no delay, int64"]
    for row in figures["rows"]:
        assert_positive(row, "bytes_per_s", "ratio")


@pytest.mark.slow
def test_read_measures_every_row(tmp_path):
    printed, figures = run_benchmark(tmp_path, "read")
    assert {row["name"] for row in figures["rows"]} == READ_ROWS
    for row in figures["rows"]:
        assert row["name"] in printed
        rates = (
            "one_pass_tokens_per_s",
            "warm_tokens_per_s",
            "second_epoch_tokens_per_s",
            "first_epoch_tokens_per_s",
            "cold_tokens_per_s",
        )
        assert_positive(row, *rates, "first_batch_ms", "cold_first_batch_ms", "rss_total_mib")
        assert 0 < row["latency_us"]["p50"] <= row["latency_us"]["p95"] <= row["latency_us"]["p99"]
    assert figures["tokens"] == 128 * 32 * 512
    bars = {
        epochs: {(ratio["name"], ratio["beside"]): ratio["bar"] for ratio in figures[epochs]}
        for epochs in ("one_pass_ratios", "ratios")
    }
    assert bars["one_pass_ratios"]["loader hdf5", "limit"] == 0.9
    assert bars["one_pass_ratios"]["loader hdf5 uint16", "limit uint16"] == 0.9
    assert bars["ratios"]["loader hdf5 mmap", "limit"] == 0.95
    assert bars["ratios"]["loader hdf5 int32", "int32 view"] == 0.5
    assert all(ratio["median"] > 0 for ratio in figures["one_pass_ratios"] + figures["ratios"])


@pytest.mark.slow
def test_convert_measures_every_row(tmp_path):
    printed, figures = run_benchmark(tmp_path, "convert")
    assert [size["mib"] for size in figures["sizes"]] == [16, 32]
    for size in figures["sizes"]:
        assert {row["name"] for row in size["rows"]} == CONVERT_ROWS
        for row in size["rows"]:
            assert row["name"] in printed
            assert_positive(
                row, "work_mib_per_s", "process_mib_per_s", "share_of_cp", "share_of_cp_fsync", "peak_rss_mib"
            )
    assert any("growth" in bar["name"] for bar in figures["bars"])


@pytest.mark.slow
def test_convert_profile_measures_stages(tmp_path):
    _, figures = run_benchmark(tmp_path, "convert", "--profile")
    assert {stage["kind"] for stage in figures["stages"]} == {"reader", "digest", "writer"}
    assert all(stage["mib_per_s"]["low"] > 0 for stage in figures["stages"])


@pytest.mark.slow
def test_loader_measures_every_figure(tmp_path):
    printed, figures = run_benchmark(tmp_path, "loader")
    assert {row["name"].split(", ")[-1] for row in figures["warm"]} == {
        "bare", "prefetch 0", "prefetch 2", "prefetch 8", "prefetch auto", "int32",
    }  # fmt: skip
    assert all(row["tokens_per_s"]["low"] > 0 for row in figures["warm"] + figures["records"])
    assert all(run["direct_bytes_per_s"] > 0 for run in figures["cold"])
    assert all(0 < found["state_bytes"] < 1024 for found in figures["first_batch"].values())
    assert {row["name"]: row["bar"] for row in figures["one_pass"] if row["bar"]} == {
        "int64": 0.9, "int64 uint16": 0.9, "int32": 0.5,
    }  # fmt: skip
    for row in figures["one_pass"]:
        assert_positive(row, "tokens_per_s", "of_floor")
    assert printed.count("not judged") == 8


@pytest.mark.slow
def test_tokenize_measures_both_libraries(tmp_path):
    pytest.importorskip("tiktoken")
    pytest.importorskip("tokenizers")
    printed, figures = run_benchmark(tmp_path, "tokenize")
    assert {row["kind"] for row in figures["rows"]} == {"tiktoken", "hf"}
    for row in figures["rows"]:
        assert row["name"] in printed
        assert_positive(row, "tokens_per_s", "bare_tokens_per_s")
        assert row["share"] > 0


@pytest.mark.slow
def test_window_measures_every_row(tmp_path):
    printed, figures = run_benchmark(tmp_path, "window")
    assert len(figures["rows"]) == 15
    for row in figures["rows"]:
        assert row["chunk"] in printed
        assert_positive(row, "warm_us", "cold_us", "read_amplification")


@pytest.mark.slow
def test_spans_measures_every_row(tmp_path):
    printed, figures = run_benchmark(tmp_path, "spans")
    assert {row["name"]: (row["beside"], row["bar"]) for row in figures["rows"] if row["bar"]} == {
        "spans, prefetch": ("windows, prefetch", 0.5), "cu_seqlens": ("batches", 0.6),
        "document_ids, position_ids": ("batches", 0.2), "field": ("batches", 0.45), "write with spans": ("write", 0.7),
    }  # fmt: skip
    assert {row["name"] for row in figures["rows"] if row["name"] == row["beside"]} == {
        "windows", "windows, prefetch", "batches", "write",
    }  # fmt: skip
    assert len(figures["rows"]) == 13
    for row in figures["rows"]:
        assert row["name"] in printed
        assert_positive(row, "per_s", "ratio")
    assert figures["over_seeks"]["median"] > 0
    assert figures["far"] is None or figures["far"]["together"] > figures["far"]["each"]


@pytest.mark.slow
def test_paths_measures_every_row(tmp_path):
    printed, figures = run_benchmark(tmp_path, "paths")
    assert [row["name"] for row in figures["warm"]] == [
        "DataLoader(loader.dataset())", "records, 1 shards", "records, 4 shards",
        'pread, verify="none"', 'pread, verify="auto"',
    ]  # fmt: skip
    assert [row["name"] for row in figures["cold"]] == ["O_DIRECT", "sequential", "block", "global"]
    assert all(row["of_memmap"]["low"] > 0 for row in figures["warm"])
    assert all(row["of_direct"]["low"] > 0 for row in figures["cold"])
    assert [row["shards"] for row in figures["many_shards"]] == [1, 100]
    assert all(row["opening_s"] > 0 < row["later_s"] for row in figures["many_shards"])
    assert all(row["name"] in printed for row in figures["warm"] + figures["cold"])


@pytest.mark.slow
def test_codecs_measures_each_of_them(tmp_path):
    pytest.importorskip("hdf5plugin")
    printed, figures = run_benchmark(tmp_path, "codecs")
    assert [row["name"] for row in figures["rows"]][:3] == ["none", "zstd:1", "zstd:3"]
    for row in figures["rows"]:
        assert_positive(row, "read_tokens_per_s", "read_2_tokens_per_s")
        assert (row["ratio"] > 1) == (row["name"] != "none")
    assert "not judged" in printed
