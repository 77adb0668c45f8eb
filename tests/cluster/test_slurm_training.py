"""Training under srun: rank and world size come from Slurm, and the tasks together read each record once."""

import json
import re

import numpy as np
import pytest
from on_slurm import ROOT

from zb_hdf5 import Loader

pytestmark = pytest.mark.slow

#: A training loop of some steps, or to the end of the epoch; it says what each task has read.
LOOP = """
import itertools, json, pathlib, sys
import numpy as np
from zb_hdf5 import Loader

state, out, steps = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with Loader("train-h5", seed=7, shuffle="global", batch_size=8) as loader:
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    read = [batch.numpy() for batch in itertools.islice(loader, steps)]
    np.save(f"{out}-{loader.rank}-of-{loader.world_size}", read)
    if loader.rank == 0:
        pathlib.Path(f"{out}.json").write_text(json.dumps(loader.state_dict()))
"""


@pytest.fixture
def store(slurm, write_store):
    """320 records, each of which has tokens of its own."""
    (slurm.work / "loop.py").write_text(LOOP)
    return write_store(slurm.work / "train-h5", np.arange(320 * 16, dtype="<u2").reshape(-1, 8, 16), (10, 30))


def steps_of(slurm, name, tasks):
    """Return which records all tasks together have read in each step, by their first token."""
    read = [np.load(slurm.work / f"{name}-{rank}-of-{tasks}.npy")[:, :, 0] for rank in range(tasks)]
    return [sorted(step) for step in np.concatenate(read, axis=1).tolist()]


def order_of(store, batch_size):
    with Loader(store, seed=7, shuffle="global", batch_size=batch_size, rank=0, world_size=1) as loader:
        return [sorted(batch[:, 0].tolist()) for batch in loader]


def test_the_tasks_read_the_epoch_together_also_when_another_number_goes_on(slurm, store):
    srun = ("srun", "--label", "--nodes=2")
    slurm.run(*srun, "--ntasks=2", "python", "loop.py", "none.json", "first", "5")
    first = steps_of(slurm, "first", 2)
    assert first == order_of(store, 16)[:5]
    slurm.run(*srun, "--ntasks=3", "python", "loop.py", "first.json", "rest", "100")
    rest = steps_of(slurm, "rest", 3)
    assert len(rest) == 10
    assert sorted(token for step in first + rest for token in step) == list(range(0, 320 * 16, 16))


def test_a_batch_script_alone_is_one_process(slurm, store):
    job = slurm.submit('sbatch --ntasks=2 --wrap "python loop.py none.json alone 2"')
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert steps_of(slurm, "alone", 1) == order_of(store, 8)[:2]


def test_the_example(slurm, store):
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    [line] = re.findall(r"^(srun .*examples/train_gpt\.py .*?) +#", page, re.MULTILINE)
    small = "--width 16 --layers 1 --vocab-size 5120 --global-batch 16"
    said = slurm.shell(line.replace("--steps 200", f"--steps 3 {small}"))
    assert "2 processes, from step 0 to 3" in said
    logs = [(slurm.work / f"run/log.rank{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    steps = [[json.loads(line)["step"] for line in log] for log in logs]
    assert steps == [[1, 2, 3]] * 2
    digests = {json.loads(line)["data"] for log in logs for line in log}
    assert len(digests) == 6  # each task has read other records in each step
