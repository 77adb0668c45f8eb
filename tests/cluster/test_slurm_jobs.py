"""Conversions on a real Slurm: every way to use an allocation, and every way to lose it, give the same bytes."""

from __future__ import annotations

import re
import shutil

import pytest
from on_slurm import ROOT, digests

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/slurm.md").read_text(encoding="utf-8")
#: The page is written for larger machines than this one. 64 shards, so that there is a middle.
SMALLER = {"0-15": "0-3", "train-h5 16": "train-h5 4", "--array=3 ": "--array=1 "}
SHARDS = "--shard-size 64KiB"
SHARDS_OF_ARRAY = "--shards 8"
TASKS = "--nodes=2 --ntasks-per-node=2 "


def documented(word):
    """Return the line of the page that has a word, with the numbers of this cluster."""
    [line] = [line for line in re.findall(r"^[^|\n]*sbatch .*$|(?<=`)sbatch .*?(?=`)", PAGE, re.MULTILINE) if word in line]
    for large, small in SMALLER.items():
        line = line.replace(large, small)
    return re.sub(r"(train-h5( \d+)?)(\)?)$", rf"\1 {SHARDS}\3", line.partition("#")[0].strip())


LOCAL = documented("local.sh")


@pytest.fixture(scope="module")
def expected():
    """The digests of the store that one process makes, without Slurm."""
    known = {}

    def digests_of(slurm, options=SHARDS):
        if options not in known:
            whole = slurm.work / "whole-h5"
            slurm.shell(f"zb convert npy-to-hdf5 tokens/ {whole} --quiet {options}")
            known[options] = digests(whole)
            shutil.rmtree(whole)
        return known[options]

    return digests_of


def test_one_node(slurm, expected):
    job = slurm.submit(LOCAL)
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert digests(slurm.work / "train-h5") == expected(slurm)


def test_an_array_and_its_merge(slurm, expected):
    lines = f"{documented('array=0-15')}\n{documented('afterok')}"
    merge = slurm.submit(lines.replace(SHARDS, SHARDS_OF_ARRAY))
    assert slurm.wait(merge) == "COMPLETED", slurm.log(merge)
    assert digests(slurm.work / "train-h5") == expected(slurm, SHARDS_OF_ARRAY)


def test_mpi(slurm, expected):
    pytest.importorskip("mpi4py")
    job = slurm.submit(documented("mpi.sh").replace("sbatch ", f"sbatch {TASKS}"))
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert digests(slurm.work / "train-h5") == expected(slurm)


def test_tasks_that_mpi_does_not_join_are_an_error(slurm):
    pytest.importorskip("mpi4py")
    job = slurm.submit(f"sbatch --nodes=1 --ntasks-per-node=2 examples/slurm/mpi.sh tokens/ train-h5 {SHARDS}")
    assert slurm.wait(job) == "FAILED"
    assert "srun has started 2 tasks, but each of them is an MPI world of one rank" in slurm.log(job)
    assert not (slurm.work / "train-h5").exists()


def test_dask(slurm, expected):
    pytest.importorskip("distributed")
    job = slurm.submit(documented("dask.sh").replace("sbatch ", f"sbatch {TASKS}"))
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert digests(slurm.work / "train-h5") == expected(slurm)
