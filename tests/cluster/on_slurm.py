"""Jobs on a Slurm cluster of this host."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from slurm_cluster import FOLDER_VARIABLE, missing

ROOT = Path(__file__).parents[2]
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})
#: How long anything here may take: a time limit of Slurm is a minute, and is looked at every half one.
PATIENCE_S = 150


class Slurm:
    """A running cluster, and the folder that its jobs work in."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.work = Path()

    def run(self, *command: str | Path) -> str:
        """Run a command to its end; return its output."""
        how = {"cwd": self.work, "env": self.environment, "timeout": PATIENCE_S}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, **how)
        assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def shell(self, lines: str) -> str:
        """Run lines of the documentation."""
        return self.run("bash", "-euc", lines)

    def submit(self, line: str) -> str:
        """Submit a job by a line of the documentation; return its number."""
        return self.shell(line).split()[-1]

    def state(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job; JobState of all parts of an array, without doubles."""
        said = re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "-o", job))
        return {**dict(said), "JobState": " ".join(sorted({value for name, value in said if name == "JobState"}))}

    def wait(self, job: str) -> str:
        """Wait until a job, and each part of an array, has ended; return its state. A requeued job starts at once."""
        for _ in within(f"the end of job {job}"):
            found = self.state(job)
            if {*found["JobState"].split()} <= ENDED:
                return found["JobState"]
            if found["JobState"] == "PENDING" and found["Restarts"] != "0":
                # Slurm lets it wait two minutes; at once, the end of its first run may be taken for that of its second
                time.sleep(3)
                subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], env=self.environment)
        raise AssertionError

    def freeze(self, job: str, journal: Path) -> None:
        """Stop the processes of a conversion when some of its shards are finished, and most are not."""
        for _ in within(f"finished shards in {journal}"):
            if journal.exists() and journal.read_text().count("\n") > 2:  # the first line is the plan
                break
        self.run("scancel", "--signal=STOP", f"{job}.0")  # a whole job would be in a state of its own

    def log(self, job: str) -> str:
        """Return what a job has printed."""
        return (self.work / f"slurm-{job}.out").read_text()

    def cut_power(self, node: str) -> None:
        """End a node with all that runs on it, as a power cut does, and tell Slurm, which would notice later."""
        pid = int((self.folder / f"{node}.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        for _ in within(f"the end of {node}"):
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                break
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=power")


def within(what: str) -> Iterator[None]:
    """Let the caller look again and again; fail when it has taken too long."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)
    pytest.fail(f"no {what} after {PATIENCE_S} s")


@contextmanager
def cluster() -> Iterator[Slurm]:
    """Start a cluster of two nodes; it ends with the block, or with this process."""
    if lacking := missing():
        pytest.skip(f"no Slurm here ({', '.join(lacking)} missing): apt-get install slurm-wlm munge")
    script = [sys.executable, Path(__file__).with_name("slurm_cluster.py")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # sbatch hands it on: zb is that of the tests
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*script, "sh", "-c", f"echo ${FOLDER_VARIABLE}; exec cat"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        folder = process.stdout.readline().strip()
        if not folder:
            pytest.fail(process.communicate()[1])
        inside = {name: value for name, value in environment.items() if not re.match("SLURM|SBATCH|SRUN", name)}
        yield Slurm(Path(folder), {**inside, "SLURM_CONF": f"{folder}/slurm.conf"})
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said


def digests(store: Path) -> dict[str, str]:
    """Return the sha256 of every file of a store."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(store.iterdir())}
