"""Real file systems of which this host is only a client: two mounts of a folder are two nodes that share it."""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from commandline import succeed
from on_slurm import digests, within
from processes import output_of

from zb_hdf5 import FollowingLoader, Loader, UnavailableError, ZbError, open_corpus, open_reader, open_writer
from zb_hdf5.commands.zb import zb

pytestmark = pytest.mark.slow

SHARDS = 24
SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")


def bindfs(shared, mounted):
    return ["bindfs", "-f", str(shared), str(mounted)]


def sshfs(shared, mounted):
    """Speak to the server that sshd would start, without sshd."""
    server = next(filter(os.path.exists, SFTP_SERVERS), None)
    if server is None:
        pytest.skip("no sftp-server here: apt-get install openssh-sftp-server")
    script = mounted.with_suffix(".sh")
    script.write_text(f"#!/bin/sh\nexec {server}\n")
    script.chmod(0o755)
    return ["sshfs", "-f", "-o", f"ssh_command={script}", f"nohost:{shared}", str(mounted)]


class Mounts:
    """Mounts of one folder."""

    def __init__(self, kind, shared):
        self.kind = kind
        self.shared = shared
        self.running = {}

    def mount(self, name):
        """Mount the folder once more; return where."""
        mounted = self.shared.with_name(name)
        mounted.mkdir(exist_ok=True)
        if shutil.which(self.kind.__name__) is None:
            pytest.skip(f"no {self.kind.__name__} here: apt-get install {self.kind.__name__}")
        process = subprocess.Popen(self.kind(self.shared, mounted), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.running[mounted] = process
        for _ in within(f"mount at {mounted}"):
            if os.path.ismount(mounted):
                return mounted
            if process.poll() is not None:
                pytest.skip(f"FUSE is not allowed here: {process.stdout.read().decode().strip()}")

    def end(self, mounted):
        """Kill the file system, as a server that goes down."""
        with self.running.pop(mounted) as process:
            process.kill()
        subprocess.run(["fusermount3" if shutil.which("fusermount3") else "fusermount", "-quz", str(mounted)])


@pytest.fixture(params=[bindfs, sshfs], ids=lambda kind: kind.__name__)
def mounts(request, tmp_path):
    (tmp_path / "shared").mkdir()
    found = Mounts(request.param, tmp_path / "shared")
    yield found
    for mounted in [*found.running]:
        found.end(mounted)


def convert(source, target, *options):
    arguments = ["convert", "npy-to-hdf5", source, target, "--shards", SHARDS, "--workers", "2", *options]
    command = [sys.executable, "-c", "from zb_hdf5.commands.zb import zb; zb()", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def printed_by(*arguments):
    return succeed(zb, *arguments).output


def test_conversion_and_reading(mounts, work):
    node = mounts.mount("node")
    output_of(convert(work / "tokens", work / "local-h5"))
    output_of(convert(work / "tokens", node / "train-h5"))
    assert digests(mounts.shared / "train-h5") == digests(work / "local-h5")
    assert "verified" in printed_by("verify", node / "train-h5")
    assert "fuse file system: all tokens are read by position" in printed_by("info", node / "train-h5")
    assert re.search(r"file system +ok: fuse\n", printed_by("doctor", node / "train-h5"))
    with h5py.File(node / "train-h5/shard-00000-of-00024.h5") as h5, open_reader(work / "local-h5") as local:
        np.testing.assert_array_equal(h5["batches"][0], local.read_batch(0))
    with Loader(node / "train-h5", seed=1) as there, Loader(work / "local-h5", seed=1) as here:
        for ours, expected in zip(there, here, strict=True):
            np.testing.assert_array_equal(ours, expected)
        records = np.arange(5, 4000, 7)
        gathered = [np.zeros((len(records), 512), np.uint16) for _ in range(2)]
        for loader, rows in zip((there, here), gathered, strict=True):
            loader.batches.read_records_into(records, rows)
        np.testing.assert_array_equal(*gathered)
        assert str(node) not in Path("/proc/self/maps").read_text()


def test_files_that_each_mount_numbers_anew_are_read(mounts):
    np.save(mounts.shared / "0.npy", np.arange(1000, dtype=np.uint16))
    node = mounts.mount("node")
    with open_corpus(node) as corpus:
        sent = pickle.dumps(corpus)
        known = (node / "0.npy").stat()
    mounts.end(node)
    for number in range(5):
        mounts.mount(f"other-{number}")  # takes the number of the device
    assert mounts.mount("node") == node
    found = (node / "0.npy").stat()
    assert (found.st_size, found.st_mtime_ns) == (known.st_size, known.st_mtime_ns)
    assert (found.st_dev, found.st_ino) != (known.st_dev, known.st_ino)
    with pickle.loads(sent) as corpus:
        assert corpus.tokens[7:9].tolist() == [7, 8]


def test_one_writer_on_a_node(mounts, work):
    node = mounts.mount("node")
    with open_writer(node / "x.h5", batch_size=2, seq_len=4, dtype="uint16") as writer:
        writer.write(np.ones((1, 2, 4), np.uint16))
        with pytest.raises(UnavailableError, match="another process is writing it"):
            open_writer(node / "x.h5", batch_size=2, seq_len=4, dtype="uint16")
        writer.finish()
    assert re.search(r"locks +ok: flock works between the processes of this node", printed_by("doctor", node / "x.h5"))


def test_a_file_system_that_goes_down_while_a_conversion_writes(mounts, work):
    node = mounts.mount("node")
    journal = mounts.shared / "train-h5.partial/journal-00000-of-00001.jsonl"
    with convert(work / "tokens", node / "train-h5") as process:
        for _ in within(f"finished shards in {journal}"):
            if journal.exists() and journal.read_text().count("\n") > 2:
                break
        process.send_signal(signal.SIGSTOP)
        mounts.end(node)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "Error: " in err
    assert str(node) in err
    assert "Traceback" not in err
    node = mounts.mount("node")
    out = output_of(convert(work / "tokens", node / "train-h5", "--resume"))
    assert re.search(r"kept [1-9]\d* shards?, wrote [1-9]", out)
    output_of(convert(work / "tokens", work / "local-h5"))
    assert digests(mounts.shared / "train-h5") == digests(work / "local-h5")


#: A process of its own: it cannot close what it has open.
READ = """
import itertools, os, sys
from zb_hdf5 import Loader, open_reader
reader, steps = open_reader(sys.argv[1]), iter(Loader(sys.argv[1]))
reader.read_batch(0), next(steps)
print("open", flush=True)
sys.stdin.read()
for read in (lambda: reader.read_batch(1), lambda: reader.read_batch(100), lambda: list(steps)):
    try:
        read()
    except OSError as error:
        print(error, flush=True)
os._exit(0)
"""


def test_a_file_system_that_goes_down_under_a_reader(mounts, work):
    node = mounts.mount("node")
    output_of(convert(work / "tokens", node / "train-h5"))
    command = [sys.executable, "-c", READ, node / "train-h5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "open\n"
        mounts.end(node)
        said, _ = process.communicate(timeout=100)
    assert len(re.findall(r"^\[Errno \d+\].*train-h5/shard-\d+-of-\d+\.h5'$", said, re.MULTILINE)) == 3, said


def test_a_growing_store(mounts, work):
    writing = mounts.mount("writing")
    reading = mounts.mount("reading")
    tokens = np.arange(12 * 2 * 4, dtype=np.uint16).reshape(12, 2, 4)
    with open_writer(writing / "live", batch_size=2, seq_len=4, dtype="uint16", live=True, shard_batches=4) as writer:
        writer.write(tokens[:6])
        for folder in (writing, reading):
            with FollowingLoader(folder / "live", timeout_s=60, rank=0, world_size=1) as loader:
                steps = iter(loader)
                np.testing.assert_array_equal([next(steps) for _ in range(6)], tokens[:6])
        how = {"timeout_s": 60, "rank": 0, "world_size": 1}
        with FollowingLoader(writing / "live", **how) as same, FollowingLoader(reading / "live", **how) as other:
            follow = iter(same)
            follow_from_afar = iter(other)
            steps = [next(follow)]
            found = [next(follow_from_afar)]
            writer.write(tokens[6:])
            writer.finish()
            np.testing.assert_array_equal([*steps, *follow], tokens)
            # what another node has of a file that was renamed is up to the file system; never other tokens
            said = ""
            try:
                found += follow_from_afar
            except ZbError as error:
                said = str(error)
            np.testing.assert_array_equal(found, tokens[: len(found)])
            assert len(found) == 12 or said.startswith(f"{reading}/live/")
