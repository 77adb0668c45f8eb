"""The benchmarks run, and give positive figures in every row; few modules run in the jobs that users do most."""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from commandline import run

from benchmarks.__main__ import benchmarks

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
    done = run(benchmarks, name, "--quick", "--only", "nonsense")
    known = [title for title in import_module(f"benchmarks.{name}").TITLES if title != "Against the older build"]
    assert done.exit_code == 2
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


# --- functions ---------------------------------------------------------------------------------------------------
#: The most functions of the package that a job may run. Files are not counted: each is one noun, and may be short.
MOST = {"opening": 240, "a later batch": 4, "npy to hdf5": 472, "parquet to hdf5": 827}

#: Runs a preparation, then lists the functions of a folder that run with a hook, in all threads.
COUNT = """
import sys, threading
prepare, code, folder = sys.argv[1:]
space, found = {}, set()
exec(prepare, space)

def count(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(folder) and code.co_flags & 2:  # a function, no body of a class
        found.add(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}")

threading.setprofile(count)
sys.setprofile(count)
exec(code, space)
sys.setprofile(None)
print(*sorted(found), sep="\\n")
"""
STEP = "loader = Loader(store, rank=0, world_size=1)\nsteps = iter(loader)\nnext(steps)"
CONVERT = "convert(source, 'hdf5', store, batch_size=4, seq_len=16, workers=1, force=True, **options)"


def functions_run(prepare, code, **values):
    """Return the functions of the package that run in `code`, each with its file and line."""
    prepare = "\n".join([*(f"{name} = {value!r}" for name, value in values.items()), prepare])
    command = [sys.executable, "-c", COUNT, prepare, code, str(ROOT / "zb_hdf5")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
def test_the_jobs_of_users_run_few_functions(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    np.save(tmp_path / "x.npy", np.arange(1024, dtype=np.uint16).reshape(64, 16))
    parquet.write_table(pyarrow.table({"text": ["a few words"] * 100}), tmp_path / "x.parquet")
    store = str(tmp_path / "store")
    prepare = "from zb_hdf5 import Loader, convert"
    text = {"source_format": "parquet", "tokenizer": "byte"}
    parquet_path = str(tmp_path / "x.parquet")
    found = {
        "parquet to hdf5": functions_run(prepare, CONVERT, source=parquet_path, store=store, options=text),
        "npy to hdf5": functions_run(prepare, CONVERT, source=str(tmp_path / "x.npy"), store=store, options={}),
        "opening": functions_run(prepare, STEP, store=store),
        "a later batch": functions_run(f"{prepare}\n{STEP}", "next(steps)", store=store),
    }
    assert all(found.values())
    assert not {job: (len(names), names) for job, names in found.items() if len(names) > MOST[job]}
    assert len({name.partition(":")[0] for name in found["a later batch"]}) == 2
