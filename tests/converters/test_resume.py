"""Conversions by many processes, and what is left of them when they die: resumed, they give the same bytes."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from array_tokens import npy_source
from commandline import one_error, run
from commandline import report_of as json_of
from commandline import succeed as run_well
from contents import files_in
from contract import is_refused
from damage import flip
from interpreter import start_program
from interrupted import Failing, Recorded, Stops
from processes import wait_until

from zb_hdf5 import FormatError, ZbError, open_reader, verify_store
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters import engines as executors
from zb_hdf5.converters.arguments import convert as run_conversion
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.converters.conversion import WHOLE, Conversion
from zb_hdf5.converters.engines import Engine, open_engine
from zb_hdf5.converters.journal import journal_name, read_journal
from zb_hdf5.converters.run import run as run_one
from zb_hdf5.files.publishing import PartialDirectory

S, B = 64, 32
NUM_SHARDS = 6
OPTIONS = ("--batch-size", B, "--seq-len", S, "--shards", NUM_SHARDS)
CONVERT = "from zb_hdf5.converters.cli import convert_commands; convert_commands()"
#: Beside Python comes first: an MPI library from a wheel is the one that mpi4py takes.
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def save(path, num_batches=60, first=0):
    """Write records that are told by their number."""
    records = np.arange(first, first + num_batches * B).reshape(-1, 1) * 7 + np.arange(S)
    np.save(path, (records % 65536).astype("<u2"))
    return path


def succeed(*arguments):
    run_well(convert, *arguments, "--quiet")


def fail(code, *arguments):
    result = run(convert, *arguments)
    assert result.exit_code == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def begun(*arguments, script=CONVERT):
    return start_program(script, *arguments, new_session=True)


def interrupt(path, destination, num_shards, note="resume=True", **how):
    """Leave a conversion of which some shards are finished."""
    source, seen = npy_source([path], batch_size=B, seq_len=S, seed=42), []

    def progress(tokens):
        seen.append(tokens)
        if sum(seen) > num_shards * source.num_batches * source.meta.batch_tokens // NUM_SHARDS:
            raise Stops

    with pytest.raises(Stops) as caught:
        run_conversion(source, "hdf5", destination, shards=NUM_SHARDS, progress=progress, **how)
    assert note in caught.value.__notes__[0]
    return destination.with_name(destination.name + ".partial")


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "in.npy")


@pytest.fixture
def whole(source, tmp_path):
    """The files of an undisturbed run."""
    succeed("npy-to-hdf5", source, tmp_path / "whole", *OPTIONS)
    return files_in(tmp_path / "whole")


@pytest.mark.parametrize("command", ["npy-to-hdf5", "npy-to-batch", "hdf5-to-npy", "hdf5-to-batch"])
@pytest.mark.thin
def test_several_processes_write_the_same_bytes(command, source, whole, tmp_path):
    origin = (source, OPTIONS) if command.startswith("npy") else (tmp_path / "whole", ())
    for workers in (1, 3):
        succeed(command, origin[0], tmp_path / f"out{workers}", *origin[1], "--workers", workers)
    assert files_in(tmp_path / "out1") == files_in(tmp_path / "out3")


@pytest.mark.slow
@pytest.mark.skipif(MPIEXEC is None, reason="needs an MPI library")
def test_mpi_ranks_write_the_same_bytes(source, whole, tmp_path):
    pytest.importorskip("mpi4py")
    command = [MPIEXEC, "-n", "3", sys.executable, "-c", CONVERT, "npy-to-hdf5", source, tmp_path / "out", *OPTIONS]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1"}  # fmt: skip
    command = [*map(str, command), "--executor", "mpi", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_shards"] == NUM_SHARDS  # one report, of the first rank
    assert files_in(tmp_path / "out") == whole


# --- job arrays ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_jobs", [1, 2, 4, 6, 9])
@pytest.mark.thin
def test_the_jobs_of_an_array_write_the_same_bytes(num_jobs, source, whole, tmp_path):
    for job in reversed(range(num_jobs)):
        succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", f"{job}/{num_jobs}")
    if num_jobs > 1:
        assert not (tmp_path / "out").exists()
        assert merge(tmp_path).exit_code == 0
    assert files_in(tmp_path / "out") == whole


def test_a_part_without_a_shard_says_why(source, tmp_path):
    for part, is_told in (("0/2", True), ("1/2", False)):
        arguments = ("npy-to-hdf5", source, tmp_path / "out", "--batch-size", 4, "--shard-range", part)
        done = run(convert, *arguments)
        assert done.exit_code == 0
        assert ("this part has no shard, since there are fewer shards than parts" in done.output) is is_told


def merge(tmp_path):
    return run(zb, "index", "merge", tmp_path / "out")


def test_a_merge_says_what_is_missing(source, whole, tmp_path):
    for value in ("3", "3/3", "-1/3", "a/b", "/", "1/0"):
        assert "expected I/N" in fail(2, "npy-to-hdf5", source, tmp_path / "out", "--shard-range", value)
    nothing = merge(tmp_path)
    assert (nothing.exit_code, "no parts" in nothing.stderr) == (1, True)
    for name, parts in (("six", ("1/6", "4/6")), ("out", ("0/3", "2/3"))):
        for part in parts:
            succeed("npy-to-hdf5", source, tmp_path / name, *OPTIONS, "--shard-range", part)
    said = run(zb, "index", "merge", tmp_path / "six").stderr
    assert re.search(r"4 of 6 shards are missing, of parts 0,2-3,5 of 6; .*--array=0,2-3,5\)", said), said
    before, result = files_in(tmp_path / "out.partial"), merge(tmp_path)
    assert result.exit_code == 1
    said = r"2 of 6 shards are missing, of part 1 of 3; .*--shard-range I/N.*--array=1\)"
    assert re.search(said, result.stderr), result.stderr
    assert files_in(tmp_path / "out.partial") == before
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", "1/3")
    told = run(zb, "info", tmp_path / "out.partial").stdout
    assert f"6 of 6 shards are finished; publish them with 'zb index merge {tmp_path / 'out'}'" in told
    assert merge(tmp_path).exit_code == 0
    assert files_in(tmp_path / "out") == whole


@pytest.mark.parametrize(("change", "more", "message"), [
    (lambda source: None, ("--seed", 1), "another conversion"),
    (lambda source: save(source, first=1), (), "in.npy is ["),
])  # fmt: skip
def test_parts_of_different_conversions_do_not_merge(change, more, message, source, tmp_path):
    interrupt(source, tmp_path / "one", 2)
    result = run(zb, "index", "merge", tmp_path / "one")
    assert (result.exit_code, "a conversion without parts; run it again with --resume" in result.stderr) == (1, True)
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", "0/2")
    change(source)
    part = ("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", "1/2", *more)
    assert message in fail(1, *part)
    succeed(*part, "--force")
    result = merge(tmp_path)
    assert (result.exit_code, message in result.stderr) == (1, True)
    cure = "run 'zb convert ... --shard-range 1/2 --force' with the arguments of the others, then merge"
    assert result.stderr.endswith(f"; {cure}\n")


def test_a_part_is_done_once_and_a_merge_waits_for_no_one(source, tmp_path):
    part = ("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", "1/2")
    done = run(convert, *part)
    assert "stored by part 1 of 2" in done.stdout
    assert "3 of 6 finished" in fail(1, *part)
    before = files_in(tmp_path / "out.partial")
    succeed(*part, "--resume")
    succeed(*part, "--force")
    assert files_in(tmp_path / "out.partial") == before
    with PartialDirectory(tmp_path / "out", shared=True):
        result = merge(tmp_path)
        assert (result.exit_code, "another process" in result.stderr) == (5, True)
        succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", "0/2")
    assert merge(tmp_path).exit_code == 0


# --- resume ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_finished", [1, 3, 5])
def test_a_resumed_conversion_is_that_of_an_undisturbed_run(num_finished, source, whole, tmp_path):
    partial = interrupt(source, tmp_path / "out", num_finished)
    kept = shards_in(partial)
    assert len(kept) == num_finished
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--resume")
    assert files_in(tmp_path / "out") == whole
    assert shards_in(tmp_path / "out").items() >= kept.items()
    assert not partial.exists()


def report_of(*arguments):
    """Return the lines that a conversion prints."""
    lines = run_well(convert, *arguments).stdout.splitlines()
    return {line.split("  ")[0]: line.partition("  ")[2].strip() for line in lines}


def shards_in(folder):
    """Return the inode of each shard: a shard that is written again has another one."""
    return {path.name: path.stat().st_ino for path in folder.glob("shard-*")}


def keys_of(report, *keys):
    return {key: report[key] for key in keys}


COUNTS = ("shards_kept", "shards_written", "tokens_stored", "tokens_written")


def test_the_report_of_a_resumed_conversion_says_what_was_kept_and_rates_the_rest(source, tmp_path):
    text, out = (("npy-to-hdf5", source, tmp_path / name, *OPTIONS, "--resume") for name in ("text", "out"))
    for name in ("text", "out"):
        interrupt(source, tmp_path / name, 4)
    report = report_of(*text)
    assert report["wrote"] == f"{tmp_path / 'text'} (kept 4 shards, wrote 2)"
    assert "to check the kept shards" in report["speed"]
    done = report_of(*text)
    assert done["present"] == f"{tmp_path / 'text'} (kept 6 shards, wrote 0)"
    assert "tok/s" not in done["speed"]
    report = json_of(convert, *out)
    all_tokens = 60 * B * S
    assert keys_of(report, *COUNTS) == dict(zip(COUNTS, (4, 2, all_tokens, all_tokens // 3), strict=True))
    assert report["tokens_per_second"] >= report["tokens_written"] / report["seconds"] - 1
    done = json_of(convert, *out)
    assert keys_of(done, *COUNTS) == dict(zip(COUNTS, (6, 0, all_tokens, 0), strict=True))
    assert done["tokens_per_second"] is None


@pytest.mark.parametrize("how", [(), ("--live",)])
def test_a_copy_says_that_nothing_was_shuffled(how, whole, tmp_path):
    """The shuffle behind its source does not matter."""
    succeed("hdf5-to-batch", tmp_path / "whole", tmp_path / "batch")
    command = ("batch-to-hdf5", tmp_path / "batch") if how else ("hdf5-to-batch", tmp_path / "whole")
    report = report_of(*command, tmp_path / "copy", *how)
    assert report["shuffle"] == "none: batches are written in the order of the source"


def test_an_interrupted_conversion_is_not_thrown_away_unasked_and_progress_begins_with_what_was_kept(
    source, tmp_path, whole
):
    interrupt(source, tmp_path / "kept", 4)
    opened = npy_source([source], batch_size=B, seq_len=S, seed=42)
    shown = Recorded()
    run_one(Conversion(opened, "hdf5", tmp_path / "kept", shards=NUM_SHARDS, resume=True), shown)
    [amounts] = shown.amounts
    assert (amounts[0], sum(amounts[1:])) == (40 * B * S, 20 * B * S)
    partial = interrupt(source, tmp_path / "out", 2)
    before = files_in(partial)
    assert re.search("2 of 6 finished shards.*--resume", fail(1, "npy-to-hdf5", source, tmp_path / "out", *OPTIONS))
    assert files_in(partial) == before
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--force")
    assert files_in(tmp_path / "out") == whole


@pytest.mark.parametrize(("batch_size", "seq_len"), [(32, 64), (5, 33)])  # without and with padding between batches
@pytest.mark.parametrize("target", ["hdf5", "batch", "npy"])
@pytest.mark.thin
def test_every_byte_of_a_kept_shard_is_that_of_an_undisturbed_run(target, batch_size, seq_len, tmp_path):
    """Also those that no digest of tokens covers: junk behind the tokens, header, padding, sidecar."""
    np.save(tmp_path / "in.npy", np.arange(40 * batch_size * seq_len, dtype="<u4").reshape(-1, seq_len))
    options = {"batch_size": batch_size, "seq_len": seq_len, "seed": 42}

    def converted(name, engine=None, resume=False):
        opened = npy_source([tmp_path / "in.npy"], **options)
        path = tmp_path / name
        return run_conversion(opened, target, path, shards=8, engine=engine, resume=resume)

    converted("whole")
    whole = files_in(tmp_path / "whole")
    is_refused(Stops, lambda: converted("out", Failing(7)))
    partial = tmp_path / "out.partial"
    shards = sorted(path for path in partial.iterdir() if path.name.startswith("shard-"))
    kept = shards[0].stat().st_ino
    first = [path for path in shards if path.suffix != ".crc32"]
    with open(first[1], "ab") as file:
        file.write(b"junk")
    padding = {"batch": 4096 + 4 * batch_size * seq_len, "npy": 9}.get(target, 3000)
    flip(first[2], padding if (batch_size, target) != (32, "batch") else 100)
    first[3].write_bytes(b"damage")
    first[4].unlink()
    if target == "batch":
        sidecars = [path.with_name(f"{path.name}.crc32") for path in first]
        flip(sidecars[5], 2)
        sidecars[6].unlink()
    report = converted("out", resume=True)
    assert files_in(tmp_path / "out") == whole
    assert report.kept.shards == (1 if target == "batch" else 3)
    assert (tmp_path / "out" / shards[0].name).stat().st_ino == kept


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_line_of_the_journal_counts_as_unfinished(cut, source, whole, tmp_path):
    partial = interrupt(source, tmp_path / "out", 3)
    journal = partial / journal_name(WHOLE)
    journal.write_bytes(journal.read_bytes()[:-cut])
    (partial / "shards.json.partial").write_text("{")  # killed while the index is written
    assert len(read_journal(journal).finished) < 3
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--resume")
    assert files_in(tmp_path / "out") == whole


def test_a_journal_that_is_none_is_told_and_one_of_nothing_finished_binds_no_later_run(source, tmp_path, whole):
    partial = interrupt(source, tmp_path / "out", 3)
    journal = partial / journal_name(WHOLE)
    lines = journal.read_text().split("\n")
    for damaged in (["{", *lines[1:]], ["{}", *lines[1:]], ["[]", *lines[1:]], []):
        journal.write_text("\n".join(damaged))
        is_refused(FormatError, lambda: read_journal(journal), match="not a journal")
        assert "--force" in fail(1, "npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--resume")
        before = files_in(partial)
        assert "not a journal" in fail(1, "npy-to-hdf5", source, tmp_path / "out", *OPTIONS)
        assert files_in(partial) == before
    journal.write_text(lines[0] + "\n")
    succeed("npy-to-hdf5", source, tmp_path / "seven", *OPTIONS, "--seed", 7, "--resume")  # nothing is there
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--seed", 7, "--resume")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "seven")


@pytest.mark.parametrize(("options", "differs"), [
    (("--seed", 7), "its seed is 42, here it is 7"),
    (("--no-shuffle",), "its seed is 42, here it is 0"),
    (("--shards", 5), "it has 6 shards, cut otherwise than the 5 here"),
    (("--remainder", "pad"), "its remainder is"),
])  # fmt: skip
@pytest.mark.thin
def test_other_arguments_are_no_resume(options, differs, source, tmp_path):
    partial = interrupt(source, tmp_path / "out", 2)
    before = files_in(partial)
    message = fail(1, "npy-to-hdf5", source, tmp_path / "out", *OPTIONS, *options, "--resume")
    assert f"holds another conversion: {differs}" in message
    assert files_in(partial) == before


def test_a_source_that_has_more_bytes_than_before_is_no_resume(source, tmp_path):
    partial = interrupt(source, tmp_path / "out", 3)
    finished = {path.name: path.read_bytes() for path in partial.glob("shard-*")}
    os.truncate(source, 10**6)
    assert f"{source}: expected 245,888 bytes" in fail(1, "npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--resume")
    assert {path.name: path.read_bytes() for path in partial.glob("shard-*")} == finished


@pytest.mark.parametrize("change", [lambda path: os.utime(path, ns=(0, 0)), lambda path: save(path, first=3)])
def test_a_source_that_changed_is_no_resume(change, source, tmp_path):
    partial = interrupt(source, tmp_path / "out", 3)
    finished = {path.name: path.read_bytes() for path in partial.glob("shard-*")}
    change(source)
    message = fail(1, "npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--resume")
    assert "its " + str(source) in message
    assert "start over with --force" in message
    assert {path.name: path.read_bytes() for path in partial.glob("shard-*")} == finished


@pytest.mark.parametrize(("target", "change", "message"), [
    ("out", lambda path: os.utime(path, ns=(0, 0)), "changed while it was converted"),
    ("out", lambda path: os.truncate(path, 5000), r"in\.npy.*(cut short|changed)"),
    ("o.h5", lambda path: os.utime(path, ns=(0, 0)), "changed while it was converted"),
])  # fmt: skip
def test_a_source_that_changes_meanwhile_is_told(target, change, message, source, tmp_path):
    opened = npy_source([source], batch_size=B, seq_len=S, seed=42)
    how = {"shards": NUM_SHARDS} if target == "out" else {}
    with pytest.raises(ZbError, match=message):
        run_conversion(opened, "hdf5", tmp_path / target, progress=lambda _: change(source), **how)
    assert {path.name for path in tmp_path.iterdir()} - {"out.partial"} == {"in.npy"}


def test_resuming_what_is_done_changes_nothing(source, whole, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").iterdir()}
    (tmp_path / "whole" / journal_name(WHOLE)).write_text("a kill came between rename and removal")
    succeed("npy-to-hdf5", source, tmp_path / "whole", *OPTIONS, "--resume")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").iterdir()} == before
    assert "not the result of this conversion" in fail(
        1, "npy-to-hdf5", source, tmp_path / "whole", *OPTIONS, "--seed", 1, "--resume"
    )
    assert files_in(tmp_path / "whole") == whole


# --- the plan --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["hdf5", "batch"])
def test_a_dry_run_writes_nothing_and_says_what_would_be(target, source, tmp_path):
    command = (f"npy-to-{target}", source, tmp_path / "out", *OPTIONS)
    planned = json.loads(run(convert, *command, "--dry-run", "--json").stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["in.npy"]
    succeed(*command)
    sizes = [path.stat().st_size for path in (tmp_path / "out").iterdir()]
    assert planned["num_shards"] == NUM_SHARDS
    assert sum(sizes) <= planned["total_bytes"] + 8192 <= 1.1 * sum(sizes) + 8192
    assert len(sizes) <= planned["inodes"] <= len(sizes) + 3
    text = run(convert, *command, "--dry-run", "--force").stdout
    assert "6, the largest" in text


# --- processes that die ----------------------------------------------------------------------------------------
def processes_of(session):
    """Return the processes of a session, by /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def wait_for_a_shard(folder, process):
    """Wait until the journal of a conversion has a shard below its head."""
    journals = "journal-*.jsonl"
    wait_until(lambda: any(path.read_bytes().count(b"\n") > 1 for path in folder.glob(journals)), process, 0.005)


def wait_for_end_of(session):
    end = time.monotonic() + 20
    while processes_of(session):
        assert time.monotonic() < end, "workers outlive their parent"
        time.sleep(0.01)


def run_to_the_end(*arguments, code=0, **options):
    """Return the errors that a conversion prints, run in a process of its own."""
    with begun(*arguments, **options) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    return err


LONGEST = (pytest.mark.slow, pytest.mark.longest)


@pytest.mark.parametrize("trials", [1, pytest.param(12, marks=pytest.mark.slow), pytest.param(300, marks=LONGEST)])
def test_killed_at_any_moment_and_resumed_it_is_the_same(trials, source, whole, tmp_path):
    """A conversion by two processes is killed, resumed, killed again... until one run gets to its end."""
    command = ("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--workers", 2, "--quiet", "--resume")
    start_s = time.monotonic()
    run_to_the_end(*command)
    undisturbed_s = time.monotonic() - start_s
    chance, finished = random.Random(trials), 0
    shutil.rmtree(tmp_path / "out")
    for _ in range(trials):
        with begun(*command) as process:
            time.sleep(chance.uniform(0.5, 1.05) * undisturbed_s)
            process.kill()
            process.communicate(timeout=100)
        wait_for_end_of(process.pid)
        if (tmp_path / "out").exists():
            finished += 1
            assert {k: v for k, v in files_in(tmp_path / "out").items() if not k.startswith("journal")} == whole
            shutil.rmtree(tmp_path / "out")
    run_to_the_end(*command)
    assert files_in(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npy", "out", "whole"]
    assert [report.problem for report in verify_store(tmp_path / "out")] == [None] * NUM_SHARDS


class Quick:
    amount = 0

    def amount_done(self):
        return 0


def signal_us(task, progress):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)


def end_of_a_long_run(folder, end, code):
    """Do something to a conversion by two processes that has finished a shard; return its message and its command."""
    big = save(folder / "in.npy", num_batches=30_000)
    command = ("npy-to-hdf5", big, folder / "out", *OPTIONS[:-2], "--shard-size", "2MiB", "--workers", 2)
    with begun(*command) as process:
        wait_for_a_shard(folder / "out.partial", process)
        end(process.pid)
        _, err = process.communicate(timeout=100)
    assert (process.returncode, "Traceback" in err) == (code, False), err
    wait_for_end_of(process.pid)
    return err, command


@pytest.mark.parametrize(
    ("number", "send", "code"),
    [(signal.SIGINT, os.killpg, 130), (signal.SIGTERM, os.kill, 143), (signal.SIGTERM, os.killpg, 143)],
    ids=["Ctrl+C", "kill", "Slurm, to every process of a step"],
)
@pytest.mark.slow
def test_a_stopped_conversion_stops_its_workers_and_can_be_resumed(number, send, code, tmp_path):
    err, command = end_of_a_long_run(tmp_path, lambda pid: send(pid, number), code)
    assert "shards are finished" in err
    assert "go on with --resume" in err
    assert not list(tmp_path.glob("out.partial/*.partial"))
    succeed(*command, "--resume")
    succeed(*command[:2], tmp_path / "whole", *command[3:])
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


SIGINT_BLOCKED = """
import signal, threading
from multiprocessing import forkserver
from pathlib import Path
from zb_hdf5.converters.engines import open_engine

def blocks_sigint(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigBlk:")[1].split()[0], 16) & 1 << signal.SIGINT - 1)

with open_engine("local", 2):
    print(blocks_sigint(forkserver._forkserver._forkserver_pid), blocks_sigint("self"))
"""


def test_ctrl_c_while_workers_start_is_for_the_parent_alone():
    """Interpreters that are just starting have no handler of ours: they must not get it at all."""
    with begun(script=SIGINT_BLOCKED) as process:
        out, err = process.communicate(timeout=100)
    assert (out.split(), err) == (["True", "False"], "")


def kill_a_worker(session):
    for pid in set(processes_of(session)) - {session}:
        if any("out.partial" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()):
            return os.kill(pid, signal.SIGKILL)
    raise AssertionError("no worker has a shard open")


@pytest.mark.slow
def test_a_worker_that_dies_is_told_and_costs_one_shard(tmp_path):
    err, command = end_of_a_long_run(tmp_path, kill_a_worker, 5)
    assert "a worker process died" in err
    assert "--resume" in err
    succeed(*command, "--resume")
    with open_reader(tmp_path / "out") as reader:
        assert reader.num_batches == 30_000


UNGUARDED = """
import sys
from zb_hdf5 import convert
print("runs", flush=True)
convert(sys.argv[1], "hdf5", sys.argv[2], batch_size=32, seq_len=64, shards=4, workers=2)
"""


def test_a_script_that_its_workers_run_again_is_named(source, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, script, source, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1), done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"zb_hdf5.errors.ArgumentError: {script}: converts again when")
    assert "--resume" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"in.npy", "script.py"}
    guarded = UNGUARDED.replace("convert(sys", 'if __name__ == "__main__":\n    convert(sys')
    script.write_text(guarded)
    subprocess.run(command, check=True, timeout=100)
    with open_reader(tmp_path / "out") as reader:
        assert reader.num_batches == 60


SIZES_KIB = [pytest.param(1550 * k, marks=() if k == 10 else pytest.mark.slow) for k in range(1, 21)]


@pytest.mark.parametrize("size_kib", SIZES_KIB)
@pytest.mark.thin
def test_a_disk_that_fills_ends_in_one_error_and_can_be_resumed(size_kib, mount_disk, tmp_path):
    """The conversion writes 31 MiB of tokens; someone else takes more or less of the room while it runs."""
    disk = mount_disk(size_kib)
    source = save(tmp_path / "in.npy", num_batches=8000)
    arguments = ("npy-to-hdf5", source, disk / "out", *OPTIONS[:-2], "--shard-size", "4MiB", "--quiet")
    crowded = f"import zb_hdf5.converters.writing as writing\nwriting.require_room = lambda *_: None\n{CONVERT}"
    err = run_to_the_end(*arguments, script=crowded, code=1)
    assert err.startswith("Error: ")
    assert "No space left" in err
    assert not (disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
    run_to_the_end(*arguments, "--resume")
    with open_reader(disk / "out", verify="store") as reader:
        assert reader.num_batches == 8000
    assert [path.name for path in disk.iterdir()] == ["out"]


def test_a_task_that_has_not_begun_is_ended_as_the_others_and_signals_wait_for_the_locks_of_a_pool(monkeypatch):
    """A pool whose processes are gone gives all that it has the same error, which is refused by what was cancelled."""
    futures = []

    class Pool:
        def submit(self, *arguments):
            futures.append(Future())
            if len(futures) == 1:
                futures[0].set_running_or_notify_cancel()
            return futures[-1]

    def interrupt():
        for future in futures:
            future.set_exception(BrokenProcessPool())

    def leave(tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(executors.Pooled(Pool(), 1, SimpleNamespace(kill=interrupt)).run(signal_us, [Quick()] * 5, leave))
    assert len(futures) == 2
    assert all(future.done() for future in futures)
    # Python raises between any two steps, and a lock that is held then is held for ever
    inside, raised_inside = [], []
    real = executors.wait

    def wait(*arguments, **options):
        inside.append(True)
        try:
            return real(*arguments, **options)
        except KeyboardInterrupt:
            raised_inside.append(True)
            raise
        finally:
            inside.pop()

    monkeypatch.setattr(executors, "wait", wait)
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        list(executors.Pooled(pool, 1).run(signal_us, [Quick()] * 5, lambda tokens: None))
    assert (inside, raised_inside) == ([], [])
    assert signal.getsignal(signal.SIGINT) is before


def test_an_engine_that_is_left_early_ends_its_tasks(tmp_path):
    big = save(tmp_path / "in.npy", num_batches=5000)
    opened = npy_source([big], batch_size=B, seq_len=S, seed=1)
    before = threading.active_count()

    def fail(tokens):
        raise KeyboardInterrupt

    how = {"shard_size": 1 << 19, "progress": fail}
    with pytest.raises(KeyboardInterrupt), open_engine("local", 2) as engine:
        run_conversion(opened, "hdf5", tmp_path / "out", engine=engine, **how)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("out.partial/*.partial"))
    assert threading.active_count() == before
    assert Engine().workers == 1


# --- what reviewers broke --------------------------------------------------------------------------------------
def test_no_room_is_told_before_any_work_and_a_resume_that_fails_early_loses_no_finished_shard(
    source, whole, tmp_path, monkeypatch
):
    partial = interrupt(source, tmp_path / "out", 3)
    kept = shards_in(partial)
    command = ("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--resume")
    with monkeypatch.context() as crowded:
        crowded.setattr("zb_hdf5.converters.disk_room.free_room", lambda folder: {"bytes": 1000, "inodes": None})
        assert "are free" in fail(1, *command)
    assert "MiB per process is too little" in fail(2, *command, "--shuffle-method", "two-pass", "--memory", "70MiB")
    succeed(*command)
    assert files_in(tmp_path / "out") == whole
    assert shards_in(tmp_path / "out").items() >= kept.items()
    monkeypatch.setattr("zb_hdf5.converters.disk_room.free_room", lambda folder: {"bytes": 1000, "inodes": None})
    for name in ("new", "new.h5"):
        shards = OPTIONS if name == "new" else OPTIONS[:-2]
        away = tmp_path / "out" / ".." / name  # the message has the folder as one would name it
        message = fail(1, "npy-to-hdf5", source, away, *shards)
        assert "only 1000 bytes are free" in message
        assert ".." not in message
    monkeypatch.setattr("zb_hdf5.converters.disk_room.free_room", lambda folder: {"bytes": 1 << 40, "inodes": 3})
    assert "inodes" in fail(1, "npy-to-hdf5", source, tmp_path / "new", *OPTIONS)
    assert {path.name for path in tmp_path.iterdir()} == {"in.npy", "out", "whole"}


def test_a_source_in_the_way_of_the_work_and_odd_destinations_are_told_in_words(source, tmp_path, monkeypatch):
    succeed("npy-to-hdf5", source, tmp_path / "s.partial", *OPTIONS)
    before = files_in(tmp_path / "s.partial")
    assert "is or holds the source" in fail(1, "hdf5-to-batch", tmp_path / "s.partial", tmp_path / "s")
    assert files_in(tmp_path / "s.partial") == before
    monkeypatch.chdir(tmp_path)
    assert "no name of its own" in fail(2, "npy-to-hdf5", source, ".", *OPTIONS)
    assert "no name of its own" in one_error(run(zb, "index", "merge", "."), 2)
    assert "no such folder" in fail(1, "npy-to-hdf5", source, tmp_path / "a" / "b", *OPTIONS)
    os.mkfifo(tmp_path / "fifo.npy")
    assert "found neither" in fail(1, "npy-to-hdf5", tmp_path / "fifo.npy", tmp_path / "out", *OPTIONS)
    (tmp_path / "fifo.npy").unlink()
    assert "named 2 times" in fail(1, "npy-to-hdf5", source, source, tmp_path / "out", *OPTIONS)
    assert {path.name for path in tmp_path.iterdir()} == {"in.npy", "s.partial"}


def test_a_done_store_of_other_arguments_or_an_older_source_is_not_done(tmp_path):
    source = save(tmp_path / "in.npy", num_batches=61)
    np.save(source, np.load(source)[:-3])
    command = ("npy-to-batch", source, tmp_path / "out", *OPTIONS, "--remainder", "pad")
    succeed(*command)
    succeed(*command, "--resume")
    assert "not the result of this conversion" in fail(1, *command, "--pad-id", 9, "--resume")
    now = time.time_ns() + 10**9
    os.utime(source, ns=(now, now))
    assert "not the result of this conversion" in fail(1, *command, "--resume")


def test_a_done_store_is_compared_with_what_was_read_and_not_with_what_that_was_made_of(
    tmp_path, write_file, tokens, source, whole
):
    write_file(tmp_path / "a.h5", tokens)
    command = ("hdf5-to-batch", tmp_path / "a.h5", tmp_path / "out")
    succeed(*command)
    succeed(*command, "--resume")
    for age_ns in (-(10**12), 10**9):  # a file that was moved to this place keeps its time
        (tmp_path / "a.h5").unlink()
        write_file(tmp_path / "a.h5", tokens[::-1])
        now = time.time_ns() + age_ns
        os.utime(tmp_path / "a.h5", ns=(now, now))
        assert "not the result of this conversion" in fail(1, *command, "--resume")
    command = ("hdf5-to-batch", tmp_path / "whole", tmp_path / "copy")
    succeed(*command)
    source.unlink()
    found = json_of(convert, *command, "--resume")
    assert keys_of(found, "shards_kept", "max_token") == {"shards_kept": 6, "max_token": None}


def test_a_resumed_part_keeps_the_other_parts_and_one_of_another_split_finished_shards(source, whole, tmp_path):
    partial = interrupt(source, tmp_path / "out", 3)
    part = ("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", "0/2")
    assert "3 of 6 finished" in fail(1, *part)
    kept = shards_in(partial)
    succeed(*part, "--resume")
    assert shards_in(partial).items() >= kept.items()
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", "1/2", "--resume")
    assert merge(tmp_path).exit_code == 0
    assert files_in(tmp_path / "out") == whole
    shutil.rmtree(tmp_path / "out")
    for name in ("out", "one"):
        succeed("npy-to-hdf5", source, tmp_path / name, *OPTIONS, "--shard-range", "0/2")
    succeed("npy-to-hdf5", source, tmp_path / "one", *OPTIONS, "--resume")
    assert files_in(tmp_path / "one") == whole  # one job finishes what an array began
    (tmp_path / "out.partial" / "shard-00001-of-00006.h5").unlink()
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", "1/2", "--resume")
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", "0/2", "--resume")
    assert merge(tmp_path).exit_code == 0
    assert files_in(tmp_path / "out") == whole


def test_a_merge_looks_at_the_shards_and_publishes_no_others(source, whole, tmp_path):
    for job in range(4):
        succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS[:-1], 4, "--shard-range", f"{job}/4")
    for job in range(2):
        command = ("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--shard-range", f"{job}/2")
        succeed(*command, "--force")
    shard = tmp_path / "out.partial" / "shard-00001-of-00006.h5"
    data = shard.read_bytes()
    shard.write_bytes(b"")
    before = files_in(tmp_path / "out.partial")
    assert merge(tmp_path).exit_code != 0
    assert files_in(tmp_path / "out.partial") == before
    shard.write_bytes(data)
    assert merge(tmp_path).exit_code == 0
    assert files_in(tmp_path / "out") == whole
    assert merge(tmp_path).exit_code == 0  # a requeued merge has nothing to do


def test_a_replacement_goes_on_too(source, whole, tmp_path):
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--seed", 1)
    before = files_in(tmp_path / "out")
    interrupt(source, tmp_path / "out", 3, note="go on with resume=True and force=True", force=True)
    shard = tmp_path / "out.partial/shard-00000-of-00006.h5"
    inode = shard.stat().st_ino
    assert "pass --force" in fail(1, "npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--resume")
    assert files_in(tmp_path / "out") == before
    succeed("npy-to-hdf5", source, tmp_path / "out", *OPTIONS, "--resume", "--force")
    assert files_in(tmp_path / "out") == whole
    assert (tmp_path / "out" / shard.name).stat().st_ino == inode
