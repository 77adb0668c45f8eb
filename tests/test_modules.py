"""The modules whose functions run for the jobs that users do most: their numbers only go down."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent

#: The most modules that a job may run.
MOST = {"opening": 14, "a later batch": 6, "npy to hdf5": 29, "parquet to hdf5": 43}

#: Runs what prepares, then counts the modules of a folder whose functions run with a hook, in all threads.
COUNT = """
import sys, threading
prepare, code, folder = sys.argv[1:]
space, paths = {}, set()
exec(prepare, space)

def count(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(folder) and code.co_flags & 2:  # a function, no body of a class
        paths.add(code.co_filename)

threading.setprofile(count)
sys.setprofile(count)
exec(code, space)
sys.setprofile(None)
print(*sorted(paths), sep="\\n")
"""
STEP = "loader = Loader(store, rank=0, world_size=1)\nsteps = iter(loader)\nnext(steps)"
CONVERT = "convert(source, 'hdf5', store, batch_size=4, seq_len=16, workers=1, overwrite=True, **options)"


def modules_run(prepare, code, **values):
    """Return the modules of the package whose functions run in `code`."""
    prepare = "\n".join([*(f"{name} = {value!r}" for name, value in values.items()), prepare])
    command = [sys.executable, "-c", COUNT, prepare, code, str(ROOT / "zb_hdf5")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
def test_the_jobs_of_users_run_few_modules(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    np.save(tmp_path / "x.npy", np.arange(1024, dtype=np.uint16).reshape(64, 16))
    parquet.write_table(pyarrow.table({"text": ["a few words"] * 100}), tmp_path / "x.parquet")
    store, prepare = str(tmp_path / "store"), "from zb_hdf5 import Loader, convert"
    text = {"source_format": "parquet", "tokenizer": "byte"}
    found = {
        "parquet to hdf5": modules_run(prepare, CONVERT, source=str(tmp_path / "x.parquet"), store=store, options=text),
        "npy to hdf5": modules_run(prepare, CONVERT, source=str(tmp_path / "x.npy"), store=store, options={}),
        "opening": modules_run(prepare, STEP, store=store),
        "a later batch": modules_run(f"{prepare}\n{STEP}", "next(steps)", store=store),
    }
    assert all(found.values())
    assert not {job: paths for job, paths in found.items() if len(paths) > MOST[job]}
