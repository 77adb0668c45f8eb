"""Kills, interrupts, full disks and races, in real processes: nothing that looks whole is not, and nothing is lost."""

import contextlib
import errno
import hashlib
import os
import random
import shutil
import signal
import time
from itertools import product

import numpy as np
import pytest
from contents import files_in, names, require_good, with_sidecar, write_batches
from contract import is_refused
from interpreter import run_program, start_program
from interrupted import failing
from killed_writer import COMMON, WRITER, B, S, batches
from processes import running, wait_until

from zb_hdf5 import ConvertError, ZbError, errors, open_reader, open_writer
from zb_hdf5.files.publishing import PartialDirectory, PartialFile
from zb_hdf5.store.rebuild import add_crc32_file

SHAPE = ("--batch-size", B, "--seq-len", S, "--no-shuffle", "--quiet")
TARGETS = ["out.h5", "out.batch", "out-h5", "out-batch"]  # two files, two folders
#: The files that a stopped conversion leaves for --resume.
PARTS = {"out-h5.partial", "out-batch.partial"}
CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
LONGEST = (pytest.mark.slow, pytest.mark.longest)


def slow(values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def mostly_slow(quick, *axes):
    """Return all combinations of the values of some axes; those that are not in `quick` are slow."""
    every = list(product(*axes))
    assert set(quick) <= set(every)
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in every]


# --- helpers ---------------------------------------------------------------------------------------------------
CONVERT = "from zb_hdf5.converters.cli import convert_commands; convert_commands()"
#: Before CONVERT: there is room at the start, and others take it.
CROWDED = "import zb_hdf5.converters.writing; zb_hdf5.converters.writing.require_room = lambda *_: None\n"


def ended(code, *arguments):
    """Run code to its end; return (exit code, stdout, stderr)."""
    done = run_program(code, *arguments)
    return done.returncode, done.stdout, done.stderr


def let_go(*processes):
    """Let processes that are ready go on, all at the same moment."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def size_of(path):
    """Return the bytes of a file, or of a folder's files, while they come and go."""
    try:
        return sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else [path]))
    except FileNotFoundError:
        return 0


def save(path, num_batches, first=0):
    """Write the source of a small conversion."""
    np.save(path, batches(first, num_batches).reshape(-1, S).astype("<u2"))
    return path


def endless(path):
    """Write the source of a conversion that does not end by itself: 4 GiB of zeros, none of them on disk."""
    with open(path, "wb") as file:
        header = {"descr": "<u2", "fortran_order": False, "shape": (2**32 // (2 * S), S)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 2**32)
    return path


def check_whole(path, expected=None):
    """Check every digest, and the tokens where they are known."""
    require_good(path)
    with open_reader(path) as reader:
        assert reader.complete
        found = np.array([np.array(batch) for batch in reader])
    if expected is not None:
        np.testing.assert_array_equal(found, expected)
    return found


def one_error(text):
    assert text.startswith("Error: ")
    assert text.count("Error: ") == 1
    assert "Traceback" not in text
    return text


def conversion(source, destination, *options):
    """Return the arguments of a conversion; a folder gets many small shards."""
    small = () if destination.suffix else ("--shard-size", "4MiB")
    backend = "batch" if "batch" in destination.name else "hdf5"
    return (f"npy-to-{backend}", source, destination, *SHAPE, *small, *options)


# --- kill -9 of a writer ---------------------------------------------------------------------------------------
def kill_a_writer(path, chance, at_work=False):
    """Kill a writer at a random moment, or when it is at work; return how many batches it had acknowledged."""
    with running(start_program(WRITER, path)) as process:
        assert process.stdout.readline() == "ready\n"
        count = int(process.stdout.readline()) if at_work else 0
        time.sleep(chance.uniform(0, 0.12))
        process.kill()
        lines = process.stdout.read().split("\n")[:-1]  # a last line may be cut
        assert process.wait() == -9
    return int(lines[-1]) if lines else count


@pytest.mark.parametrize("trials", [3, pytest.param(15, marks=pytest.mark.slow), pytest.param(60, marks=LONGEST)])
@pytest.mark.parametrize("suffix", [".h5", ".batch"])
def test_a_killed_writer_leaves_no_file_under_the_final_name_and_hdf5_what_it_acknowledged(trials, suffix, tmp_path):
    chance, acknowledged = random.Random(trials), []
    for trial in range(trials):
        path, partial = tmp_path / f"{trial}{suffix}", tmp_path / f"{trial}{suffix}.partial"
        acknowledged.append(kill_a_writer(path, chance, at_work=trial == 0))
        assert names(tmp_path) == [partial.name]
        if suffix == ".batch":
            with pytest.raises(ZbError):
                open_reader(partial)
        else:
            with open_reader(partial) as reader:
                assert not reader.complete
                assert reader.num_batches >= acknowledged[-1]
                np.testing.assert_array_equal(np.array(list(reader)).reshape(-1, B, S), batches(0, reader.num_batches))
        write_batches(path, batches(5, 3), dtype="uint16")
        check_whole(path, batches(5, 3))
        assert names(tmp_path) == with_sidecar(path.name)
        for left in tmp_path.iterdir():
            left.unlink()
    assert sum(acknowledged) > 0


# --- signals to a conversion -----------------------------------------------------------------------------------
def signal_a_conversion(number, destination, source, *options):
    """Send a signal to a conversion that is well under way; return (exit code, stderr)."""
    partial = destination.with_name(destination.name + ".partial")
    with running(start_program(CONVERT, *conversion(source, destination, *options))) as process:
        wait_until(lambda: size_of(partial) > 9 << 20, process)
        time.sleep(random.uniform(0, 0.05))
        process.send_signal(number)
        _, err = process.communicate(timeout=100)
        return process.returncode, err


STOPPED = [(signal.SIGKILL, "out-h5"), (signal.SIGTERM, "out.h5"), (signal.SIGINT, "out-batch")]


@pytest.mark.parametrize(("number", "target"), mostly_slow(STOPPED, CODES, TARGETS))
@pytest.mark.thin
def test_a_stopped_conversion_leaves_nothing_that_looks_whole(number, target, tmp_path):
    destination = tmp_path / target
    code, err = signal_a_conversion(number, destination, endless(tmp_path / "in.npy"))
    assert code == CODES[number]
    assert "Traceback" not in err
    assert not destination.exists()
    if number == signal.SIGINT:
        assert "interrupted" in one_error(err)
    if number != signal.SIGKILL:
        assert set(names(tmp_path)) - PARTS == {"in.npy"}  # finished shards are kept for --resume
    save(tmp_path / "small.npy", 4)
    assert ended(CONVERT, *conversion(tmp_path / "small.npy", destination, "--force")) == (0, "", "")
    check_whole(destination, batches(0, 4))
    assert names(tmp_path) == ["in.npy", *with_sidecar(target), "small.npy"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("target", ["out.h5", "out-batch"])
@pytest.mark.slow
def test_a_stopped_conversion_with_force_does_not_touch_what_was_there(number, target, tmp_path):
    destination = tmp_path / target
    save(tmp_path / "old.npy", 4)
    assert ended(CONVERT, *conversion(tmp_path / "old.npy", destination))[0] == 0
    before = files_in(destination)
    code, _ = signal_a_conversion(number, destination, endless(tmp_path / "in.npy"), "--force")
    assert code == CODES[number]
    assert files_in(destination) == before
    if number != signal.SIGKILL:
        assert set(names(tmp_path)) - PARTS == {"in.npy", "old.npy", target}


@pytest.mark.parametrize("trials", [1, pytest.param(4, marks=pytest.mark.slow), pytest.param(60, marks=LONGEST)])
@pytest.mark.parametrize("target", ["out.h5", "out-batch"])
@pytest.mark.thin
def test_a_conversion_stopped_at_any_moment_is_whole_or_was_never_there(trials, target, tmp_path):
    save(tmp_path / "in.npy", 3000)
    destination, chance = tmp_path / target, random.Random(trials)
    for trial in range(trials):
        number = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        command = conversion(tmp_path / "in.npy", destination, "--resume")
        with running(start_program(READY + CONVERT, *command)) as process:
            let_go(process)
            time.sleep(chance.uniform(0, 0.15))
            process.send_signal(number)
            process.communicate(timeout=100)
        if destination.exists():
            check_whole(destination, batches(0, 3000))
            assert names(tmp_path) == ["in.npy", *with_sidecar(target)], trial
            shutil.rmtree(destination) if destination.is_dir() else destination.unlink()
    assert ended(CONVERT, *command) == (0, "", "")
    check_whole(destination, batches(0, 3000))


@pytest.mark.parametrize("trials", [1, pytest.param(4, marks=pytest.mark.slow), pytest.param(60, marks=LONGEST)])
@pytest.mark.parametrize("target", ["out.batch", *slow(["out-h5"])])
def test_a_replacement_killed_at_any_moment_leaves_the_old_or_the_new(trials, target, tmp_path):
    sources = [(save(tmp_path / f"{k}.npy", 1500 + k, first=k), batches(k, 1500 + k)) for k in range(2)]
    destination, chance = tmp_path / target, random.Random(trials)
    assert ended(CONVERT, *conversion(sources[0][0], destination))[0] == 0
    for trial in range(trials):
        source = sources[(trial + 1) % 2][0]
        command = conversion(source, destination, "--force")
        with running(start_program(READY + CONVERT, *command)) as process:
            let_go(process)
            time.sleep(chance.uniform(0, 0.12))
            process.kill()
        for aside in tmp_path.glob(f".{target}.replaced-*"):
            if not destination.exists():  # killed between two renames: the old one is whole beside its place
                (aside / target).rename(destination)
            shutil.rmtree(aside)
        if destination.is_file():  # killed between the two renames of a file and its sidecar: it has none
            add_crc32_file(destination)
        found = check_whole(destination)
        assert any(np.array_equal(found, expected) for _, expected in sources)
    assert ended(CONVERT, *command) == (0, "", "")
    check_whole(destination, sources[trials % 2][1])  # with the sidecar that the conversion wrote
    assert not list(tmp_path.glob(f"{target}.partial"))


# --- a full disk -----------------------------------------------------------------------------------------------
@pytest.fixture
def small_disk(mount_disk):
    """A file system of 8 MiB."""
    return mount_disk(8 << 10)


@pytest.mark.parametrize("target", [TARGETS[0], *slow(TARGETS[1:])])
def test_a_full_disk_ends_a_conversion_with_one_clear_message(target, small_disk, tmp_path):
    source = endless(tmp_path / "in.npy")
    command = conversion(source, small_disk / target)
    assert "are free" in one_error(ended(CONVERT, *command)[2])
    assert names(small_disk) == []
    code, out, err = ended(CROWDED + CONVERT, *command)
    assert (code, out) == (1, "")
    assert os.strerror(errno.ENOSPC) in one_error(err)
    assert set(names(small_disk)) <= PARTS


@pytest.mark.parametrize("target", ["out.h5", *slow(["out-batch"])])
def test_a_full_disk_does_not_touch_what_was_there(target, small_disk, tmp_path):
    save(tmp_path / "old.npy", 4)
    assert ended(CONVERT, *conversion(tmp_path / "old.npy", small_disk / target))[0] == 0
    before = files_in(small_disk / target)
    command = conversion(endless(tmp_path / "in.npy"), small_disk / target, "--force")
    assert ended(CROWDED + CONVERT, *command)[0] == 1
    assert files_in(small_disk / target) == before
    assert set(names(small_disk)) - PARTS == {target}


FILL = f"""{COMMON}
import sys
from zb_hdf5 import open_writer
writer = open_writer(sys.argv[1], batch_size=B, seq_len=S, dtype="uint16")
try:
    while True:
        writer.write(batches(writer.num_batches, 3))
except OSError as error:
    print(error.errno, writer.num_batches, flush=True)
sys.stdin.readline()
getattr(writer, sys.argv[2])()
print("ended", flush=True)
"""


@pytest.mark.parametrize("end", ["finish", *slow(["abort"])])
def test_batches_committed_before_the_disk_was_full_stay_readable(end, small_disk):
    with running(start_program(FILL, small_disk / "x.h5", end)) as process:
        number, count = map(int, process.stdout.readline().split())
        assert number == errno.ENOSPC
        assert count > 1000
        with open_reader(small_disk / "x.h5.partial") as reader:
            np.testing.assert_array_equal(list(reader), batches(0, count))
        out, err = process.communicate("\n", timeout=100)
    assert (process.returncode, out, err) == (0, "ended\n", "")
    if end == "abort":
        assert names(small_disk) == []
    else:
        assert names(small_disk) == ["x.h5"]
        check_whole(small_disk / "x.h5", batches(0, count))


@pytest.mark.parametrize(("suffix", "call"), [
    (".h5", "posix_fallocate"), (".batch", "pwrite"), (".batch", "fdatasync"),
])  # fmt: skip
def test_a_failed_write_can_be_repeated(suffix, call, tmp_path, monkeypatch):
    """Space was made: the digests must not count the group that failed."""
    how = {"batch_size": B, "seq_len": S, "dtype": "uint16", "durable": call == "fdatasync"}
    with open_writer(tmp_path / f"x{suffix}", **how) as writer:
        writer.write(batches(0, 2))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(errno.ENOSPC))
            patch.setattr(os, "fstat", lambda fd: os.stat(os.devnull))  # nothing is reserved yet
            with pytest.raises(OSError, match="No space left"):
                writer.write(batches(2, 64))  # more than there is room for
        assert writer.num_batches == 2
        writer.write(batches(2, 64))
        info = writer.finish()
    expected = batches(0, 66).astype("<u2")
    check_whole(tmp_path / f"x{suffix}", expected)
    assert info.sha256 == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize("suffix", [".h5", ".batch"])
def test_groups_before_the_one_that_fails_stay_committed_and_digested(suffix, tmp_path, monkeypatch):
    """Their sha256 is still on its way when the disk is full."""
    pwrite, left = os.pwrite, [3]

    def nearly_full(fd, data, offset):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    monkeypatch.setattr("zb_hdf5.formats.batch_writer.GROUP_BYTES", 2 * B * S * 2)
    with open_writer(tmp_path / f"x{suffix}", batch_size=B, seq_len=S, dtype="uint16") as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", nearly_full)
            is_refused(OSError, lambda: writer.append(batches(0, 20)), match="No space left")
        assert writer.num_batches == 6
        assert writer.sha256() == hashlib.sha256(batches(0, 6).astype("<u2")).hexdigest()
        writer.append(batches(6, 14))
        info = writer.finish()
    expected = batches(0, 20).astype("<u2")
    check_whole(tmp_path / f"x{suffix}", expected)
    assert info.sha256 == hashlib.sha256(expected).hexdigest()


# --- races -----------------------------------------------------------------------------------------------------
READY = """
import sys
import zb_hdf5.converters.source_records, zb_hdf5.converters.store_source
import zb_hdf5.formats.h5_writer, zb_hdf5.formats.native
print("ready", flush=True)
sys.stdin.readline()
"""


FORCES = [(), ("--force",), ("--force", "--workers", 2)]
RACES = [(FORCES[0], "out-h5"), (FORCES[2], "out-h5")]


@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=LONGEST)])
@pytest.mark.parametrize(("force", "target"), mostly_slow(RACES, FORCES, TARGETS))
def test_one_of_two_conversions_into_one_destination_wins(rounds, target, force, tmp_path):
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        commands = []
        for k in range(2):
            save(folder / f"{k}.npy", 40, first=k)
            commands.append(conversion(folder / f"{k}.npy", folder / target, *force))
        with running(*(start_program(READY + CONVERT, *command) for command in commands)) as both:
            let_go(*both)
            errors = [process.communicate(timeout=100)[1] for process in both]
        codes = [process.returncode for process in both]
        assert 0 in codes, errors
        if not force:
            assert codes.count(0) == 1
        assert not force or 1 not in codes, errors
        for code, err in zip(codes, errors, strict=True):
            assert code in (0, 1, 5), err
            assert err == "" if code == 0 else one_error(err)
        found = check_whole(folder / target)
        winners = [batches(k, 40) for k in range(2) if codes[k] == 0]
        assert any(np.array_equal(found, expected) for expected in winners)
        assert names(folder) == ["0.npy", "1.npy", *with_sidecar(target)], errors


RIVAL = f"""{COMMON}
import sys
from zb_hdf5 import open_writer
sys.stdin.readline()
try:
    writer = open_writer(sys.argv[1], batch_size=B, seq_len=S, dtype="uint16")
    print("open", flush=True)
    sys.stdin.readline()
    writer.write(batches(7, 6))
    writer.finish()
    print("published", flush=True)
except Exception as error:
    print(repr(error), flush=True)
"""


def test_a_rival_between_a_file_and_its_sidecar_does_no_damage(tmp_path, monkeypatch):
    path, real = tmp_path / "x.batch", os.replace

    def replace(source, target):
        real(source, target)
        if str(target) == f"{path}.crc32":  # the next step names the file
            monkeypatch.undo()
            with pytest.raises(errors.UnavailableError, match="another process is writing it"):
                write_batches(path, batches(7, 6), dtype="uint16", overwrite=True)

    monkeypatch.setattr(os, "replace", replace)
    write_batches(path, batches(1, 6), dtype="uint16")
    check_whole(path, batches(1, 6))
    assert names(tmp_path) == with_sidecar("x.batch")


@pytest.mark.parametrize("moment", ["locked", "unlocked", "created", "shared"])
@pytest.mark.thin
def test_a_rival_at_the_handover_of_the_lock_does_no_damage(moment, tmp_path, monkeypatch):
    """An HDF5 writer gives its lock to the library and takes it back: whoever gets in between, one publishes."""
    path = tmp_path / "x.h5"
    real = PartialFile.unlocked
    theirs = []
    with running(start_program(RIVAL, path)) as rival:

        def reach(name):
            if name == moment and not theirs:
                rival.stdin.write("\n")
                rival.stdin.flush()
                theirs.append(rival.stdout.readline().strip())

        @contextlib.contextmanager
        def with_a_rival(self):
            reach("locked")
            with real(self):
                reach("unlocked")
                yield
                reach("created")
            reach("shared")

        monkeypatch.setattr(PartialFile, "unlocked", with_a_rival)
        mine = "published"
        try:
            write_batches(path, batches(1, 6), dtype="uint16")
        except ZbError as error:
            mine = repr(error)
        out, err = rival.communicate("\n", timeout=100)
    theirs += out.splitlines()
    assert err == ""
    assert [mine, *theirs].count("published") == 1, [mine, *theirs]
    assert mine == "published" or mine.startswith("UnavailableError"), mine  # it can be tried again
    check_whole(path, batches(1 if mine == "published" else 7, 6))
    assert names(tmp_path) == ["x.h5"]


# --- files that change under a reader --------------------------------------------------------------------------
READER = """
import sys, time
from zb_hdf5 import ZbError, open_reader
path, access, way = sys.argv[1:]
reader = open_reader(path, access=access)
read = getattr(reader, way)
for index in range(len(reader)):
    read(index)
print("ready", flush=True)
if access == "mmap":
    sys.stdin.readline()  # a bus error cannot be ruled out between the check and the touch: not at the same time
end = time.monotonic() + 2
try:
    while time.monotonic() < end:
        for index in range(len(reader)):
            int(read(index)[0, 0])
    print("none, and the last batch begins with", int(read(len(reader) - 1)[0, 0]))
except ZbError as error:
    print(type(error).__name__, error)
"""


CHANGES = {
    "truncate": lambda path: os.truncate(path, path.stat().st_size // 2),
    "overwrite": lambda path: path.write_bytes(b"something else\n" * 1000),
    "empty": lambda path: path.write_bytes(b""),
}
WAYS = [
    (".h5", "pread", "read_batch_torch"),
    (".batch", "pread", "read_batch_torch"),
    (".h5", "mmap", "read_batch"),
    (".batch", "mmap", "read_batch"),
    (".h5", "h5py", "read_batch"),
]
CUTS = [*(("truncate", way) for way in WAYS[2:]), ("overwrite", WAYS[1]), ("empty", WAYS[0])]


@pytest.mark.parametrize(("change", "how"), mostly_slow(CUTS, CHANGES, WAYS))
@pytest.mark.thin
def test_a_file_cut_under_a_reader_is_an_error_and_no_signal(change, how, tmp_path):
    suffix, access, way = how
    if change != "truncate":
        way = "read_batch"  # importing torch takes longer than all the rest
    path = tmp_path / f"x{suffix}"
    write_batches(path, batches(0, 300), dtype="uint16")
    with running(start_program(READER, path, access, way)) as reader:
        assert reader.stdout.readline() == "ready\n"
        if access != "mmap":
            time.sleep(random.uniform(0, 0.02))
        CHANGES[change](path)
        out, err = reader.communicate("\n", timeout=100)
    assert reader.returncode == 0, err
    assert err == ""
    assert out.split()[0] in ("IncompleteError", "FormatError", "ChecksumError")  # HDF5 returns zeros for what is cut
    assert str(path) in out


def test_a_partial_folder_with_foreign_files_is_not_emptied(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious.txt").write_text("precious")
    with pytest.raises(ConvertError, match=r"precious\.txt"), PartialDirectory(tmp_path / "out"):
        pass
    assert (tmp_path / "out.partial" / "precious.txt").read_text() == "precious"
