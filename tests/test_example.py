"""examples/train_gpt.py: killed and resumed on another number of processes, it trains on exactly the same records."""

import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from contents import write_batches, write_stream

from zb_hdf5 import Loader
from zb_hdf5.commands.zb import zb

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"


SHAPE = ["--global-batch", "8", "--width", "16", "--layers", "1", "--vocab-size", "100", "--save-every", "5"]
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start(data, out, processes, steps):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launch, str(EXAMPLE), str(data), "--out", str(out), "--steps", str(steps), *SHAPE]
    return run(command, {})


def run(command, variables):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    outside = {name: value for name, value in outside.items() if name not in LAUNCHERS}
    environment = {**outside, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parent.parent), **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def data(tmp_path):
    tokens = np.random.default_rng(9).integers(0, 100, (100, 8, 32), dtype=np.uint16)
    write_batches(tmp_path / "t.h5", tokens, dtype="uint16")
    return tmp_path / "t.h5"


def logged(out, rank):
    path = out / f"log.rank{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def digest(rows):
    """Return what the example logs of these records."""
    return hashlib.sha256(np.ascontiguousarray(rows[:, :-1])).hexdigest()[:16]


@pytest.mark.slow
def test_killed_and_resumed_on_another_number_of_processes(data, tmp_path):
    out = tmp_path / "run"
    first = start(data, out, 2, 100_000)
    deadline = time.monotonic() + 90
    while len(logged(out, 0)) < 12 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    before = {rank: {record["step"]: record["data"] for record in logged(out, rank)} for rank in (0, 1)}
    assert max(before[0]) >= 12
    saved = max(step for step in before[0] if step % 5 == 0 and step < max(before[0]))
    second = start(data, out, 1, saved + 25)
    text, _ = second.communicate(timeout=120)
    assert second.returncode == 0, text
    assert "waited for data" in text
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    resumed_at = int(text.split("from step ")[1].split()[0])
    assert resumed_at % 5 == 0
    assert resumed_at >= 10

    loader = Loader(data, seed=1, rank=0, world_size=1, batch_size=8)
    steps = [loader.get_batch().numpy() for _ in range(max(saved + 25, max(before[0])))]
    for rank in (0, 1):
        assert before[rank] == {step: digest(steps[step - 1][4 * rank : 4 * rank + 4]) for step in before[rank]}
    after = {record["step"]: record["data"] for record in logged(out, 0)[len(before[0]) :]}
    assert after == {step: digest(steps[step - 1]) for step in range(resumed_at + 1, saved + 26)}


SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames n[1-2]" ] && printf '127.0.0.1\\n127.0.0.2\\n' && touch "$0.asked"
"""


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_tasks_of_srun_are_one_world(hosts, data, tmp_path):
    """Two processes with the variables that srun gives its tasks; of two hosts, `scontrol` names the first."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    job |= {"SLURM_STEP_NUM_NODES": str(hosts), "SLURM_STEP_NODELIST": "n[1-2]" if hosts == 2 else "n1"}
    job |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}" if hosts == 2 else os.environ["PATH"]}
    command = [sys.executable, str(EXAMPLE), str(data), "--out", str(tmp_path / "run"), "--steps", "6", *SHAPE]
    tasks = [run(command, {**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}) for rank in range(2)]
    texts = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], texts
    assert (tmp_path / "bin" / "scontrol.asked").exists() == (hosts == 2)
    assert "2 processes, from step 0 to 6, 100 steps an epoch" in texts[0]
    with Loader(data, seed=1, rank=0, world_size=1, batch_size=8) as loader:
        steps = [loader.get_batch().numpy() for _ in range(6)]
    for rank in range(2):
        expected = [digest(rows[4 * rank : 4 * rank + 4]) for rows in steps]
        assert [record["data"] for record in logged(tmp_path / "run", rank)] == expected


@pytest.mark.slow
def test_a_batch_script_without_srun_is_one_process(data, tmp_path):
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}
    command = [sys.executable, str(EXAMPLE), str(data), "--out", str(tmp_path / "run"), "--steps", "2", *SHAPE]
    task = run(command, job)
    text = task.communicate(timeout=120)[0]
    assert task.returncode == 0, text
    assert "1 processes, from step 0 to 2, 100 steps an epoch" in text


@pytest.fixture
def documents(tmp_path):
    """A stream of 60 documents of random tokens below 100."""
    rng = np.random.default_rng(4)
    lengths = rng.integers(3, 30, 60)
    write_stream(tmp_path / "s.h5", rng.integers(0, 100, lengths.sum()), lengths, vocab_size=100)
    return tmp_path / "s.h5"


@pytest.mark.slow
def test_the_logits_of_a_document_do_not_depend_on_its_row_mates(documents, monkeypatch):
    """With the masks they are those of the document alone; without them other row-mates change them."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from train_gpt import GPT, model_inputs

    wanted = ("cu_seqlens", "position_ids", "document_ids")
    with Loader(documents, batch_size=4, seq_len=48, targets=True, documents=wanted, rank=0, world_size=1) as loader:
        step = next(loader)
    torch.manual_seed(0)
    model = GPT(100, 48, 32, 2)
    x, _, mask, positions = model_inputs(step)
    with torch.no_grad():
        masked, plain = model.logits(x, mask, positions), model.logits(x)
        for number in range(int(step["document_ids"].max()) + 1):
            ours = step["document_ids"] == number
            others = torch.where(ours, x, (x + torch.randint(1, 100, x.shape)) % 100)  # each one is another token
            torch.testing.assert_close(model.logits(others, mask, positions)[ours], masked[ours])
            torch.testing.assert_close(model.logits(x[ours].unsqueeze(0))[0], masked[ours])
            if not ours[:, 0].any():  # something lies before it in its row
                assert (model.logits(others)[ours] - plain[ours]).abs().amax(-1).min() > 1e-3


@pytest.mark.slow
def test_it_trains_on_packed_text_with_document_masks(tmp_path):
    text, packed, out = (str(tmp_path / name) for name in ("text.jsonl", "packed", "run"))
    lines = [json.dumps({"text": f"document {number} " * (1 + number % 9)}) for number in range(300)]
    Path(text).write_text("\n".join(lines), encoding="utf-8")
    sizes = ["--seq-len", "128", "--batch-size", "8", "--packing", "best-fit"]
    done = CliRunner().invoke(zb, ["convert", "jsonl-to-hdf5", text, packed, "--tokenizer", "byte", *sizes])
    assert done.exit_code == 0, done.output
    command = [sys.executable, str(EXAMPLE), packed, "--out", out, "--document-masks", *SHAPE]
    task = run([*command, "--vocab-size", "257", "--steps", "20", "--lr", "0.03"], {})
    printed = task.communicate(timeout=120)[0]
    assert task.returncode == 0, printed
    losses = [record["loss"] for record in logged(Path(out), 0)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_demo_takes_no_more_steps_than_its_text_has():
    command = [sys.executable, str(EXAMPLE.with_name("demo.py")), "--steps", "5000"]
    refused = subprocess.run(command, cwd=EXAMPLE.parent.parent, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "5000 is not in the range 10<=x<=1000" in refused.stderr


@pytest.mark.parametrize("name", ["train_gpt", "pretrain_books"])
def test_a_run_without_matplotlib_ends_with_the_name_of_the_package(name, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # its import fails
    importlib.import_module(name).plot(tmp_path, tmp_path)
    assert capsys.readouterr().out == "no curve is drawn: pip install matplotlib\n"
    assert not list(tmp_path.iterdir())
