"""A claim on a part has one owner. That of a dead or silent one is taken over, and no half of a record counts."""

import errno
import fcntl
import os
import shutil
import signal
import time
from contextlib import closing

import numpy as np
import pytest
from interpreter import run_program, start_training
from processes import running

from zb_hdf5 import Loader, UnavailableError, convert, open_field_set
from zb_hdf5.field_sets.part_claim import PartClaim, claim_path, drop_leftovers, owner_of_claim, release_by_hand
from zb_hdf5.store.set_index import parts_in
from zb_hdf5.store.value_part import ValuePart

SEQ_LEN = 64
FIELDS = {"a": ("i4", (8,)), "b": "f2"}
#: A writer in a process of its own: it waits for a line before each step, if it is told so.
WRITER = """
import sys
import numpy as np
from zb_hdf5 import open_field_set

path, waits = sys.argv[1], sys.argv[2] == "waits"
with open_field_set(path, "t", {"a": ("i4", (8,)), "b": "f2"}, part_bytes=300_000) as found:
    for step in found.missing(batch_size=4, quiet=True):
        tokens = np.asarray(step["tokens"])
        found.write(step["records"], a=(tokens[..., None] * 8 + np.arange(8)).astype("i4"), b=tokens.astype("f2"))
        print(*step["records"].tolist(), flush=True)
        if waits:
            sys.stdin.readline()
"""


def values(tokens):
    tokens = np.asarray(tokens)
    return {"a": (tokens[..., None] * 8 + np.arange(8)).astype("i4"), "b": tokens.astype("f2")}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("claims")
    np.save(folder / "t.npy", np.random.default_rng(0).integers(0, 2000, (800, SEQ_LEN), dtype=np.uint16))
    convert(folder / "t.npy", "hdf5", folder / "store", batch_size=4)
    return folder / "store"


@pytest.fixture
def linked(tmp_path, source):
    """A store of its own: its files are links to one."""
    link_store(source, tmp_path / "store")
    return tmp_path / "store"


def link_store(source, path):
    path.mkdir()
    for each in source.iterdir():
        os.link(each, path / each.name)


def begin_writer(path, waits="runs"):
    return start_training(WRITER, path, waits)


def require_all(path):
    """Write what is missing, and see that every value is the one of its token."""
    with open_field_set(path, "t", FIELDS, part_bytes=300_000) as found:
        for step in found.missing(batch_size=8, quiet=True):
            found.write(step["records"], **values(step["tokens"]))
        found.finish()
        assert found.verify() == []
        assert not list(found.folder.glob("*.claim"))
    with Loader(path, fields=["t/a", "t/b"], shuffle="records") as loader:
        for step in loader:
            expected = values(step["tokens"])
            np.testing.assert_array_equal(step["t/a"], expected["a"])
            np.testing.assert_array_equal(step["t/b"], expected["b"])


def test_a_claim_has_one_owner_who_is_named(tmp_path):
    part = tmp_path / "part"
    claim = PartClaim.take(part)
    assert PartClaim.take(part) is None
    assert owner_of_claim(claim_path(part)).pid == os.getpid()
    claim.hold()
    claim.release()
    assert not list(tmp_path.iterdir())
    claim = PartClaim.take(part)
    assert not claim.is_taken_over
    claim.release()


@pytest.mark.parametrize("flock", ["works", "fails", "does nothing"])
def test_the_claim_of_a_dead_process_is_taken_over(tmp_path, monkeypatch, flock):
    """Whatever locks are there: none on some mounts, and on others each node has its own."""
    part = tmp_path / "part"
    code = "import sys; from pathlib import Path; from zb_hdf5.field_sets.part_claim import PartClaim as P\n"
    assert run_program(f"{code}P.take(Path(sys.argv[1]))", part).returncode == 0

    def fails(fd, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    if flock != "works":
        monkeypatch.setattr(fcntl, "flock", fails if flock == "fails" else lambda fd, kind: None)
    claim = PartClaim.take(part)
    assert claim.is_taken_over
    claim.release()
    assert not list(tmp_path.iterdir())


def test_a_live_owner_keeps_its_claim_until_it_is_silent_for_long(tmp_path):
    part = tmp_path / "part"
    first = PartClaim.take(part)
    assert PartClaim.take(part, stale_s=60) is None
    os.utime(claim_path(part), (time.time() - 61,) * 2)
    second = PartClaim.take(part, stale_s=60)
    assert second.is_taken_over
    with pytest.raises(UnavailableError, match="was taken over by process"):
        first.hold()
    first.release()  # which leaves the claim of the other one
    second.hold()
    second.release()


def test_a_file_of_a_killed_process_beside_a_claim_is_removed_once_it_is_old(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from zb_hdf5.field_sets.part_claim import PartClaim as P\n"
        "os.link = lambda *_: os._exit(9)\n"
        "P.take(Path(sys.argv[1]))\n"
    )
    assert run_program(code, tmp_path / "part").returncode == 9
    [left] = tmp_path.iterdir()
    drop_leftovers(tmp_path)
    assert left.exists()  # its maker may be about to claim
    os.utime(left, (time.time() - 3600,) * 2)
    claim = PartClaim.take(tmp_path / "part")
    drop_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [claim.path]
    claim.release()


def test_a_claim_is_released_by_hand(tmp_path):
    first = PartClaim.take(tmp_path / "part")
    assert release_by_hand(tmp_path / "part").pid == os.getpid()
    with pytest.raises(UnavailableError, match="was taken over by another process"):
        first.hold()
    first.release()
    assert release_by_hand(tmp_path / "part") is None
    second = PartClaim.take(tmp_path / "part")
    assert second.is_taken_over, "marks may be ahead of values: they are compared"
    second.release()
    assert not list(tmp_path.iterdir())


def test_a_writer_that_was_stopped_and_robbed_damages_nothing_when_it_goes_on(linked):
    with running(begin_writer(linked, "waits")) as writer:
        written = [int(number) for number in writer.stdout.readline().split()]
        writer.send_signal(signal.SIGSTOP)
        for claim in (linked / "fields/t/train").glob("*.claim"):
            os.utime(claim, (time.time() - 7200,) * 2)
        with open_field_set(linked, "t", FIELDS) as found:
            seen = []
            for step in found.missing(batch_size=8, quiet=True):
                found.write(step["records"], **values(step["tokens"]))
                seen += step["records"].tolist()
            assert sorted(seen + written) == [*range(800)]
            writer.send_signal(signal.SIGCONT)
            writer.communicate()
            assert writer.returncode == 1
            found.finish()
    require_all(linked)


def test_two_jobs_at_once_and_one_of_them_killed(linked):
    with running(begin_writer(linked), begin_writer(linked)) as writers:
        for _ in range(5):
            writers[0].stdout.readline()
        writers[0].kill()
        for writer in writers:
            writer.communicate()
        assert writers[1].returncode == 0
    require_all(linked)


#: Begins the code of a writer: on some mounts there are no locks, and on others each node has its own.
WITHOUT_LOCKS = {
    "fails": "def flock(*_): raise OSError(errno.ENOLCK, 'No locks available')",
    "does nothing": "def flock(*_): pass",
}


@pytest.mark.parametrize("flock", WITHOUT_LOCKS)
def test_two_live_writers_without_locks_write_each_record_once(linked, flock):
    code = f"import errno, fcntl\n{WITHOUT_LOCKS[flock]}\nfcntl.flock = flock\n{WRITER}"
    with running(*(start_training(code, linked, "runs") for _ in range(2))) as writers:
        found = [writer.communicate()[0].split() for writer in writers]
        assert [writer.returncode for writer in writers] == [0, 0]
    assert sorted(map(int, found[0] + found[1])) == [*range(800)]
    require_all(linked)


@pytest.mark.slow
def test_a_writer_that_is_stopped_at_any_moment_and_robbed_damages_nothing(source, tmp_path, thinned):
    """Between its values and its marks, too: when it goes on, its values are not the ones that count."""
    rng = np.random.default_rng(6)
    robbed = 0
    for turn in thinned(range(12), 4):
        path = tmp_path / str(turn)
        link_store(source, path)
        pid, report = forked_writer(path)
        with report:
            report.readline()
            time.sleep(float(rng.random()) * 0.02)
            os.kill(pid, signal.SIGSTOP)
            for claim in (path / "fields/t/train").glob("*.claim"):
                os.utime(claim, (time.time() - 7200,) * 2)
                robbed += 1
            with open_field_set(path, "t", FIELDS, part_bytes=300_000) as found:
                for step in found.missing(batch_size=8, quiet=True):
                    found.write(step["records"], **values(step["tokens"]))
                os.kill(pid, signal.SIGCONT)
                os.waitpid(pid, 0)
                found.finish()
        require_all(path)
    assert robbed > 0


def marked_in(found):
    """Return the records that are marked as written."""
    records = []
    for first, path in parts_in(found.folder):
        with closing(ValuePart(path, found.facts)) as part:
            records += (np.flatnonzero(part.is_there()) + first).tolist()
    return set(records)


def write_and_report(path, pipe):
    """Write what is missing; report that a commit begins, and after it its records."""
    with open_field_set(path, "t", FIELDS, part_bytes=300_000) as found:
        for step in found.missing(batch_size=4, quiet=True):
            arrays = values(step["tokens"])
            os.write(pipe, b"begins\n")
            found.write(step["records"], **arrays)
            os.write(pipe, " ".join(map(str, step["records"].tolist())).encode() + b"\n")


def forked_writer(path):
    """Fork a writer; return its process number, and its report as a file that the caller closes."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            write_and_report(path, writes)
        finally:
            os._exit(0)
    os.close(writes)
    return pid, os.fdopen(reads, buffering=1)


def killed_at(path, wait_s):
    """Fork a writer, and kill it so long after its first commit; return its report, and whether it was killed."""
    pid, report = forked_writer(path)
    with report:
        first = report.readline() + report.readline()
        time.sleep(wait_s)
        os.kill(pid, signal.SIGKILL)
        lines = (first + report.read()).splitlines()
    return lines, os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.mark.slow
@pytest.mark.longest
def test_three_hundred_kills_lose_no_record_that_was_written(source, tmp_path):
    """Each writer is killed at some moment, mostly inside a commit; a record that it has named is there, and right."""
    rng = np.random.default_rng(5)
    kills = inside = 0
    path = tmp_path / "store"
    for turn in range(600):
        if kills == 300:
            break
        if not path.exists():
            link_store(source, path)
        lines, was_killed = killed_at(path, float(rng.random()) * 0.02)
        kills += was_killed
        inside += was_killed and lines[-1] == "begins"
        with open_field_set(path, "t", FIELDS, part_bytes=300_000) as found:
            named = {int(number) for line in lines if line != "begins" for number in line.split()}
            assert named <= marked_in(found), turn
            assert found.verify() == [], turn
            is_near_its_end = found.num_missing < 200
        if is_near_its_end:
            require_all(path)
            shutil.rmtree(path)
    assert kills == 300
    assert inside > 100
