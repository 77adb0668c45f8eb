"""examples/train_gpt.py: killed and resumed on another number of processes, it trains on exactly the same records."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from zb_hdf5 import Loader, open_writer

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"


def start(data, out, processes, steps):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    shape = ["--global-batch", "8", "--width", "16", "--layers", "1", "--vocab-size", "100", "--save-every", "5"]
    command = [sys.executable, *launch, str(EXAMPLE), str(data), "--out", str(out), "--steps", str(steps), *shape]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parent.parent)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def logged(out, rank):
    path = out / f"log.rank{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.slow
def test_killed_and_resumed_on_another_number_of_processes(tmp_path):
    data, out = tmp_path / "t.h5", tmp_path / "run"
    tokens = np.random.default_rng(9).integers(0, 100, (100, 8, 32), dtype=np.uint16)
    with open_writer(data, batch_size=8, seq_len=32, dtype="uint16") as writer:
        writer.write(tokens)
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

    def digest(rows):
        return hashlib.sha256(np.ascontiguousarray(rows[:, :-1])).hexdigest()[:16]

    loader = Loader(data, seed=1, rank=0, world_size=1, batch_size=8)
    steps = [loader.get_batch().numpy() for _ in range(max(saved + 25, max(before[0])))]
    for rank in (0, 1):
        assert before[rank] == {step: digest(steps[step - 1][4 * rank : 4 * rank + 4]) for step in before[rank]}
    after = {record["step"]: record["data"] for record in logged(out, 0)[len(before[0]) :]}
    assert after == {step: digest(steps[step - 1]) for step in range(resumed_at + 1, saved + 26)}
