#!/usr/bin/env python3
"""A Slurm cluster of two nodes on this host, for as long as a command runs: `slurm_cluster.py COMMAND...`

    tests/cluster/slurm_cluster.py bash                       # to try things by hand; exit ends the cluster
    tests/cluster/slurm_cluster.py srun -N 2 hostname

munged, slurmctld and one slurmd for each node run under the user who calls, without systemd, on free ports, with all
their files in a temporary folder. Nothing in /etc is read or changed, and a Slurm that this host has is left alone.
The command runs with SLURM_CONF set, and its exit status is ours. Each node is a tree of processes under one that
adopts its orphans, as the first process of a machine does. So whatever ends this script (the end of the command, a
signal, SIGKILL), no process of the cluster is left. A SIGTERM to the process in `$ZB_SLURM_FOLDER/n1.pid` is what a
power cut is to node n1.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo")
FOLDER_VARIABLE = "ZB_SLURM_FOLDER"
NODES = 2
NODE_CPUS = 64  # more than the host has: the tasks of real jobs fit
READY_S = 60
END_S = 60
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

#: KillWait: how long a task that was told to end may take. MinJobAge: finished jobs can be asked about.
SLURM_CONF = """
ClusterName=zb
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/slurmctld
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdTimeout=120
KillWait=5
MinJobAge=600
JobRequeue=1
TmpFS={folder}/%n
NodeName=n[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} RealMemory=200000
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the programs that are not installed; Debian's packages slurm-wlm and munge have them all."""
    return [name for name in PROGRAMS if program(name) is None]


def program(name: str) -> str | None:
    """Return where a program is: daemons are not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def free_ports(count: int) -> list[int]:
    """Return consecutive ports that nobody listens on."""
    for _ in range(100):
        with ExitStack() as bound:
            try:
                first = bound.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                for port in range(first + 1, first + count):
                    bound.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return list(range(first, first + count))
    raise SystemExit(f"slurm_cluster: found no {count} free ports in a row")


def configure(folder: Path) -> None:
    """Write the files of munged and Slurm."""
    key = os.open(folder / "munge.key", os.O_WRONLY | os.O_CREAT, 0o600)
    with closing(os.fdopen(key, "wb")) as file:
        file.write(os.urandom(128))
    ports = free_ports(2 + NODES)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    text = SLURM_CONF.format(
        folder=folder, user=user, ports=ports, nodes=NODES, first=ports[2], last=ports[-1], cpus=NODE_CPUS
    )
    (folder / "slurm.conf").write_text(text)
    version = subprocess.run([program("slurmd") or "slurmd", "-V"], capture_output=True, text=True, check=True).stdout
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    # cgroups are not used here, but slurmd loads a plugin for them; "disabled" is known since 23.11
    plugin = "disabled" if release >= (23, 11) else "cgroup/v1"
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
    for name in ("slurmctld", *(f"n{number + 1}" for number in range(NODES))):
        (folder / name).mkdir()


def machine(name: str, folder: Path, *commands: list[str]) -> int:
    """Run commands as the descendants of a new process, which ends them all when it ends; return its id."""
    parent = os.getpid()
    if pid := os.fork():
        (folder / f"{name}.pid").write_text(str(pid))
        return pid
    try:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        adopt_orphans(signal.SIGTERM)
        if os.getppid() == parent:
            with open(folder / f"{name}.out", "ab") as out:
                for command in commands:
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
            while True:
                os.wait()
    except ChildProcessError:
        pass  # every command has ended by itself
    finally:
        end_descendants()
        os._exit(0)


def adopt_orphans(if_parent_ends: int = 0) -> None:
    """Become the parent of descendants whose own parent ends; get a signal when one's own parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1) or libc.prctl(PR_SET_PDEATHSIG, if_parent_ends):
        raise OSError(ctypes.get_errno(), "prctl")


def descendants() -> list[int]:
    """Return the processes under this one, as far as they were seen."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue  # it has just ended
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def end_descendants() -> None:
    """Kill what is under this process, until nothing is."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + END_S
    while (found := descendants()) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.01)


def start(folder: Path, environment: dict[str, str]) -> None:
    """Start all daemons, and wait until every node is idle."""
    configure(folder)
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    os.environ.clear()
    os.environ.update(environment)
    places = [f"--{option}={folder / name}" for option, name in files.items()]
    machine("keys", folder, [str(program("munged")), "--foreground", *places])
    wait_until((folder / "munge.socket").exists, folder)
    machine("head", folder, [str(program("slurmctld")), "-D"])
    for number in range(NODES):
        machine(f"n{number + 1}", folder, [str(program("slurmd")), "-D", "-N", f"n{number + 1}"])
    idle = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
    wait_until(lambda: len(subprocess.run(idle, capture_output=True).stdout.split()) == NODES, folder)


def wait_until(ready: Callable[[], bool], folder: Path) -> None:
    """Wait for daemons; show what they say if it takes too long."""
    deadline = time.monotonic() + READY_S
    while not ready():
        if time.monotonic() > deadline:
            said = {path.name: path.read_text(errors="replace").splitlines() for path in sorted(folder.glob("*.out"))}
            lines = [f"{name}: {line}" for name, found in said.items() for line in found[-8:]]
            raise SystemExit("\n".join([f"slurm_cluster: it did not start within {READY_S} s", *lines]))
        time.sleep(0.1)


def main() -> int:
    command = sys.argv[1:]
    if not command or command[0].startswith("-"):
        raise SystemExit(__doc__)
    if lacking := missing():
        raise SystemExit(f"slurm_cluster: no {', '.join(lacking)}: apt-get install slurm-wlm munge")
    # not under $TMPDIR: the path of a socket has at most 107 characters
    folder = Path(tempfile.mkdtemp(prefix="zb-slurm-", dir="/tmp"))
    folder.chmod(0o711)  # munged wants its socket to be within everybody's reach
    outside = {name: value for name, value in os.environ.items() if not re.match("SLURM|SBATCH|SRUN", name)}
    environment = {**outside, "SLURM_CONF": str(folder / "slurm.conf"), FOLDER_VARIABLE: str(folder)}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        adopt_orphans()
        start(folder, environment)
        return subprocess.run(command, env=environment).returncode
    finally:
        end_descendants()
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
