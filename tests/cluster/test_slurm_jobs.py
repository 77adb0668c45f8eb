"""On a real Slurm, every way to use an allocation of a conversion, and to lose it, gives the same bytes.

Under srun rank and world size come from Slurm: the tasks of a training together read each record once.
"""

import json
import re
import shutil

import numpy as np
import pytest
from on_slurm import ROOT, digests, within

from zb_hdf5 import Loader

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/slurm_jobs.md").read_text(encoding="utf-8")
#: The page is written for larger machines than this one. 128 shards, so that there is a middle to stop in.
SMALLER = {"0-15": "0-3", "train-h5 16": "train-h5 4", "--array=3 ": "--array=1 "}
SHARDS = "--shard-size 32KiB"
#: The options of the lines for an array.
OF_ARRAY = "--shards 64"
TASKS = "--nodes=2 --ntasks-per-node=2 "


def documented(word):
    """Return the line of the page about `train-h5` that has a word, with the numbers of this cluster."""
    lines = re.findall(r"^[^|\n]*sbatch .*$|(?<=`)sbatch .*?(?=`)", PAGE, re.MULTILINE)
    [line] = [line for line in lines if word in line and "train-h5" in line]
    for large, small in SMALLER.items():
        line = line.replace(large, small)
    return re.sub(r"(train-h5( \d+)?)(\)?)$", rf"\1 {SHARDS}\3", line.partition("#")[0].strip())


LOCAL = documented("local.sh")
JOURNAL = "train-h5.partial/journal-00000-of-00001.jsonl"


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
    require_store(slurm, slurm.submit(LOCAL), expected)


def test_an_array_and_its_merge(slurm, expected):
    lines = f"{documented('array=0-15')}\n{documented('afterok')}"
    require_store(slurm, slurm.submit(lines), expected, OF_ARRAY)


def test_an_array_of_documents_and_the_array_of_their_rows(slurm):
    [lines] = re.findall(r"^job=\S+ .*documents\.sh(?:.|\n)*?merge web-h5\"$", PAGE, re.MULTILINE)
    here = {"0-15": "0-3", " 16 ": " 4 ", "tok.json": "byte", "--shards 64": "--shards 8", "2048": "32 --batch-size 4"}
    for large, small in here.items():
        assert large in lines
        lines = lines.replace(large, small)
    (slurm.work / "text").mkdir()
    for number in range(8):
        rows = [{"text": f"document {row} of file {number}. " * (1 + row % 5)} for row in range(40)]
        (slurm.work / "text" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = slurm.submit(lines)
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    slurm.shell("zb convert text/ whole-h5 --tokenizer byte --seq-len 32 --batch-size 4 --to hdf5 --quiet")
    slurm.run("zb", "verify", "web-h5")
    found, expected = (json.loads((slurm.work / store / "shards.json").read_text()) for store in ("web-h5", "whole-h5"))
    assert found["sha256"] == expected["sha256"]
    assert found["token_count"] == expected["token_count"] > 0
    for store in ("web-stream", "web-h5", "whole-h5"):
        shutil.rmtree(slurm.work / store)


def test_mpi(slurm, expected):
    pytest.importorskip("mpi4py")
    require_store(slurm, slurm.submit(documented("mpi.sh").replace("sbatch ", f"sbatch {TASKS}")), expected)


def test_tasks_that_mpi_does_not_join_are_an_error(slurm):
    pytest.importorskip("mpi4py")
    job = slurm.submit(f"sbatch --nodes=1 --ntasks-per-node=2 examples/slurm/mpi.sh tokens/ train-h5 {SHARDS}")
    assert slurm.wait(job) == "FAILED"
    assert "srun has started 2 tasks, but each of them is an MPI world of one rank" in slurm.log(job)
    assert not (slurm.work / "train-h5").exists()


def submitted_and_frozen(slurm):
    """Submit a conversion of 128 shards; stop its processes when it has some of them."""
    job = slurm.submit(LOCAL)
    slurm.freeze(job, slurm.work / JOURNAL)
    assert not (slurm.work / "train-h5").exists()
    return job


def require_store(slurm, job, expected, *options):
    """Wait for a job, which must give the files of one process."""
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert digests(slurm.work / "train-h5") == expected(slurm, *options)


def finished(slurm, job, expected):
    """Wait for a job that goes on; return how many shards it had kept."""
    require_store(slurm, job, expected)
    assert not (slurm.work / "train-h5.partial").exists()
    kept, wrote = map(int, re.search(r"kept (\d+) shards?, wrote (\d+)", slurm.log(job)).groups())
    assert kept + wrote == 128
    assert wrote
    return kept


def test_a_requeued_job_goes_on(slurm, expected):
    job = submitted_and_frozen(slurm)
    slurm.run("scontrol", "requeue", job)
    assert finished(slurm, job, expected)
    assert slurm.state(job)["Restarts"] == "1"


@pytest.mark.parametrize("how", ["scancel {job}", "scancel --signal=KILL {job}.0"], ids=["cancelled", "step killed"])
def test_the_same_line_again_goes_on(how, slurm, expected):
    job = submitted_and_frozen(slurm)
    slurm.shell(how.format(job=job))
    assert slurm.wait(job) == ("FAILED" if "KILL" in how else "CANCELLED")
    assert finished(slurm, slurm.submit(LOCAL), expected)


def test_a_job_requeues_itself_before_its_time_is_over(slurm, expected):
    job = submitted_and_frozen(slurm)  # such as by a disk that hangs
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=1")
    for _ in within(f"a second run of job {job}"):
        if slurm.state(job)["Restarts"] == "1":
            break
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=10")  # a slow machine needs more than one minute
    assert finished(slurm, job, expected)
    assert slurm.state(job)["Restarts"] == "1"


def test_a_part_of_an_array_is_lost(slurm, expected):
    array, merge, again = map(documented, ("array=0-15", "afterok", "array=3"))
    job = slurm.submit(f"{array}\necho $job")
    slurm.freeze(f"{job}_1", slurm.work / "train-h5.partial/journal-00001-of-00004.jsonl")
    slurm.run("scancel", f"{job}_1")
    assert slurm.wait(job) == "CANCELLED COMPLETED"
    with pytest.raises(AssertionError, match=r"sbatch --array=1\)"):
        slurm.run("zb", "index", "merge", "train-h5")
    job = slurm.submit(again)
    assert slurm.wait(job) == "COMPLETED"
    require_store(slurm, slurm.submit(f"job={job}\n{merge}"), expected, OF_ARRAY)


def test_a_node_dies(own_cluster, expected):
    job = submitted_and_frozen(own_cluster)
    node = own_cluster.state(job)["BatchHost"]
    own_cluster.cut_power(node)
    assert finished(own_cluster, job, expected)
    assert own_cluster.state(job)["BatchHost"] != node


# --- training ----------------------------------------------------------------------------------------------------
#: A training loop of some steps, or to the end of the epoch; it prints the records that each task has read.
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
def training_store(slurm, write_store):
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


def test_the_tasks_read_the_epoch_together_also_when_another_number_goes_on(slurm, training_store):
    srun = ("srun", "--label", "--nodes=2")
    slurm.run(*srun, "--ntasks=2", "python", "loop.py", "none.json", "first", "5")
    first = steps_of(slurm, "first", 2)
    assert first == order_of(training_store, 16)[:5]
    slurm.run(*srun, "--ntasks=3", "python", "loop.py", "first.json", "rest", "100")
    rest = steps_of(slurm, "rest", 3)
    assert len(rest) == 10
    assert sorted(token for step in first + rest for token in step) == list(range(0, 320 * 16, 16))


def test_a_batch_script_alone_is_one_process(slurm, training_store):
    job = slurm.submit('sbatch --ntasks=2 --wrap "python loop.py none.json alone 2"')
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert steps_of(slurm, "alone", 1) == order_of(training_store, 8)[:2]


def test_the_example(slurm, training_store):
    page = (ROOT / "docs/trainers.md").read_text(encoding="utf-8")
    [line] = re.findall(r"^(srun .*examples/train_gpt\.py .*?) +#", page, re.MULTILINE)
    small = "--width 16 --layers 1 --vocab-size 5120 --global-batch 16"
    said = slurm.shell(line.replace("--steps 200", f"--steps 3 {small}"))
    assert "2 processes, from step 0 to 3" in said
    logs = [(slurm.work / f"run/log.rank{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    steps = [[json.loads(line)["step"] for line in log] for log in logs]
    assert steps == [[1, 2, 3]] * 2
    digests = {json.loads(line)["data"] for log in logs for line in log}
    assert len(digests) == 6  # each task has read other records in each step
