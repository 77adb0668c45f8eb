"""The scripts of examples/slurm: they hand on what they are given, and a part can be done again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from contents import batches_of, write_batches
from processes import output_of

from zb_hdf5 import Loader, UnavailableError, open_reader
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.engines import require_one_world
from zb_hdf5.store.cache import column_of

SCRIPTS = Path(__file__).parents[2] / "examples/slurm"
#: What srun does for a job of one task on one node: the tests run where there is no Slurm.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
PYTHON = """#!/bin/bash
echo "$@" > trained
"""
ZB = f"""#!{sys.executable}
from zb_hdf5.commands.zb import zb
if __name__ == "__main__":
    zb()
"""
SCONTROL = """#!/bin/bash
[ "$1" != show ] || { echo "$SLURM_JOB_NODELIST"; exit; }
echo "$@" > requeued
kill $(cat zb.pid)
"""


@pytest.fixture
def job(tmp_path):
    """Return `job(script, *arguments, **variables)`, which starts a script as Slurm would start it in `tmp_path`."""
    venv = tmp_path / "venv/bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f'PATH="{venv}:$PATH"\n')
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("zb", ZB), ("python", PYTHON)):
        (venv / name).write_text(text)
        (venv / name).chmod(0o755)
    np.save(tmp_path / "tokens.npy", np.arange(64 * 33, dtype="<u2").reshape(64, 33))

    def start(script, *arguments, source="tokens.npy", **variables):
        environment = {**os.environ, "SLURM_JOB_ID": "7", "ZB_VENV": str(tmp_path / "venv"), **variables}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        command = ["bash", str(SCRIPTS / script), str(source), *map(str, arguments)]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)

    return start


OPTIONS = ("--seq-len", 33, "--batch-size", 4)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_every_script_is_bash(script):
    subprocess.run(["bash", "-n", script], check=True)
    head = script.read_text()
    assert "--open-mode=append" in head  # a requeue would truncate the log of what was before
    assert "--requeue" in head


def test_one_node_takes_options_and_goes_on(job, tmp_path):
    out = output_of(job("local.sh", "out", *OPTIONS, "--shard-size", "4KiB"))
    assert "2 shards" in out
    assert "kept 2 shards, wrote 0" in output_of(job("local.sh", "out", *OPTIONS, "--shard-size", "4KiB"))
    with open_reader(tmp_path / "out") as reader:
        assert reader.meta.shape == (4, 33)


@pytest.mark.slow
def test_a_part_of_an_array_is_written_again(job, tmp_path):
    def part(number):
        # an array that is submitted for one part has a count of its own: 1
        variables = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": "1"}
        return output_of(job("array.sh", "out", 4, *OPTIONS, "--shard-size", "1KiB", **variables))

    for number in (0, 3):
        assert f"part {number} of 4" in part(number)
    merge = ["index", "merge", str(tmp_path / "out")]
    assert "--array=1-2)" in CliRunner().invoke(zb, merge).stderr
    for number in (1, 2):
        part(number)
    assert CliRunner().invoke(zb, merge).exit_code == 0
    output_of(job("local.sh", "whole", *OPTIONS, "--shard-size", "4KiB"))
    np.testing.assert_array_equal(batches_of(tmp_path / "out"), batches_of(tmp_path / "whole"))


@pytest.mark.slow
def test_documents_become_a_stream_and_then_rows_in_two_arrays(job, tmp_path):
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / f"text/{name}.txt").write_text(f"words of {name} " * 99)

    def array(source, result, *options):
        for number in range(2):
            variables = {"SLURM_ARRAY_TASK_ID": str(number)}
            assert f"part {number} of 2" in output_of(
                job("documents.sh", result, 2, *options, source=source, **variables)
            )
        assert CliRunner().invoke(zb, ["index", "merge", str(tmp_path / result)]).exit_code == 0

    rows = ("--seq-len", 16, "--batch-size", 4, "--shards", 2)
    array("text", "stream", "--to", "stream", "--tokenizer", "byte")
    array("stream", "rows", *rows)
    words = map(str, ("convert", tmp_path / "text", tmp_path / "whole", "--tokenizer", "byte", *rows))
    assert CliRunner().invoke(zb, [*words]).exit_code == 0
    np.testing.assert_array_equal(batches_of(tmp_path / "rows"), batches_of(tmp_path / "whole"))


NODE = {"SLURM_NNODES": "4", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "1"}


def test_a_first_node_without_an_address_is_one_line_before_anything_begins(job, tmp_path):
    with job("train.sh", "run", **NODE, SLURM_JOB_NODELIST="n1.invalid") as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert errors.startswith("Error: n1.invalid has no address on ")
    assert errors.count("\n") == 1
    assert not (tmp_path / "trained").exists()


@pytest.mark.slow
def test_a_node_copies_what_its_ranks_will_read_and_trains_from_there(job, tmp_path):
    node = {**NODE, "SLURM_JOB_NODELIST": "localhost"}
    disk = tmp_path / "disk"
    tokens = np.random.default_rng(0).integers(0, 99, (32, 32, 8), np.uint16)
    write_batches(tmp_path / "train.h5", tokens, dtype="uint16")

    def train(*options, **where):
        return output_of(job("train.sh", "run", *options, source="train.h5", **node, **where))

    assert "staged  8 of 8 batches" in train("--steps", 9, SLURM_TMPDIR=str(disk), TMPDIR="/nowhere")
    trained = (tmp_path / "trained").read_text().split()
    expected = "examples/train_gpt.py train.h5 --out run --global-batch 256 --seed 1 --steps 9 --cache"
    assert trained == [*expected.split(), f"{disk}/zb-cache"]
    with Loader(tmp_path / "train.h5", seed=1, rank=2, world_size=8, cache=disk / "zb-cache") as loader:
        column = column_of(loader.batches)
        assert all(map(column.has, loader.plan.requests_of_steps(np.arange(len(loader)))))
        next(loader)
        (tmp_path / "run").mkdir()
        (tmp_path / "run/loader.json").write_text(json.dumps(loader.state_dict()))
    assert "staged  6 of 6 batches" in train(TMPDIR=str(tmp_path / "other"), SLURM_TMPDIR="")


def test_a_job_is_requeued_before_its_time_is_over(job, tmp_path):
    """Slurm sends USR1 to the shell alone, and ends the step of a job that is requeued."""
    slow = tmp_path / "venv/bin/zb"
    slow.write_text("#!/bin/bash\necho $$ > zb.tmp; mv zb.tmp zb.pid; exec sleep 100\n")
    with job("local.sh", "out") as process:
        while not (tmp_path / "zb.pid").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=60)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


@pytest.mark.parametrize(("size", "tasks"), [(1, "4"), (4, "4"), (1, "1"), (1, None)])
def test_tasks_that_mpi_does_not_join_are_told(size, tasks, monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    if tasks is not None:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    message = r"started 4 tasks, .* start the ranks with the process manager"
    alone = (size, tasks) == (1, "4")
    with pytest.raises(UnavailableError, match=message) if alone else contextlib.nullcontext():
        require_one_world(size)
