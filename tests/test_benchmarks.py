"""The benchmarks run, and give positive figures in every row. Nothing here is about speed."""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Rows of each benchmark.
ROWS = {"read": 20, "load": 40, "convert": 13, "remote": 3}


def measured(name, *options):
    command = [sys.executable, "-m", "benchmarks", name, "--quick", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_measured(tmp_path, name):
    if name == "remote" and shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("needs nginx (Debian: nginx-light)")
    path = tmp_path / "figures.json"
    done = measured(name, "--json", path, "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"], "the data is removed at the end"
    assert "NOT met" not in done.stdout, "too little was measured to judge by"
    rows = [row for table in json.loads(path.read_text())["tables"] for row in table["rows"]]
    assert len(rows) == ROWS[name]
    for row in rows:
        assert row["name"] in done.stdout
        assert all(0 < low <= high for low, _, high in row["figures"].values() if low)


@pytest.mark.parametrize("name", ROWS)
def test_a_name_of_no_table_is_refused_with_all_names(name):
    done = measured(name, "--only", "nonsense")
    known = [title for title in import_module(f"benchmarks.{name}").TITLES if title != "Against the older build"]
    assert done.returncode == 2
    assert "; ".join(known) in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_name_measures_one_table_and_an_older_build_is_measured_beside_this_one(tmp_path):
    done = measured("read", "--only", "windows")
    assert done.stdout.count("###") == 1, done.stderr
    assert "### Windows of 2048 tokens of a stream (1 round)" in done.stdout
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "zb_hdf5").symlink_to(ROOT / "zb_hdf5")
    done = measured("convert", "--only", "streams", "--old", tmp_path / "old")
    assert done.returncode == 0, done.stderr
    assert "parquet-to-hdf5, old" in done.stdout
