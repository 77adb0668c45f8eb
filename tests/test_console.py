"""The console: sizes, numbers for people, the progress bar, and the handler of SIGTERM."""

import contextlib
import errno
import io
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import click
import numpy as np
import pytest
from click.testing import CliRunner
from contents import write_batches
from hypothesis import given
from hypothesis import strategies as st
from interpreter import run_program
from processes import python

from zb_hdf5 import console, open_reader
from zb_hdf5.commands.zb import zb
from zb_hdf5.console import SIZE, CommandGroup, Output, Progress, counted, format_bytes, format_count
from zb_hdf5.errors import FormatError
from zb_hdf5.signals import Terminated


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


class Clock:
    """Time that passes when it is told to."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    return clock


@pytest.fixture
def bar(clock):
    """Return `bar(total, *steps)`: what a progress bar shows of steps, each of seconds, a method and its arguments."""

    def shown(total, *steps, name="convert", stream=Terminal, **options):
        with Progress(name, total, stream=(opened := stream()), **options) as progress:
            for seconds, method, *arguments in steps:
                clock.now += seconds
                getattr(progress, method)(*arguments)
        return opened.getvalue()

    return shown


def test_a_terminal_shows_one_line_clears_it_and_is_not_flooded(bar):
    text = bar(100, *[(1, "advance", 10)] * 10)
    assert "\n" not in text
    updates = text.split("\r\x1b[K")
    assert updates[0] == ""  # every update begins by clearing the line
    assert len(updates) == 12
    assert updates[-1] == ""  # and the last one leaves it clear
    assert all(update.startswith("convert ") for update in updates[1:-1])
    assert "100%" in updates[-2]
    assert bar(10**6, *[(0.001, "advance", 100)] * 10**4).count("\r") <= 102


def test_the_bar_fills_and_the_numbers_are_right_also_of_what_was_kept_and_of_a_total_that_comes_late(bar):
    shown = bar(4000, (10, "advance", 1000))
    assert " 25%  100 tok/s  0:30 left" in shown
    assert shown.count("█") == int(0.25 * console.BAR_WIDTH)
    shown = bar(10**13, (3000, "advance", 10**11), name="npy-to-batch")
    assert max(len(update) for update in shown.split("\r\x1b[K")) < 80
    first = (1, "advance", 10)
    assert not re.search("100%|left", bar(0, first, unit="B"))
    assert " 25%  100 B/s  0:30 left" in bar(0, first, (9, "advance", 990, 4000), name="fetch", unit="B")
    assert " 75%  100 tok/s  0:10 left" in bar(4000, (50, "keep", 2000), (10, "advance", 1000))  # 50 s to look at it
    nothing = (17, "advance", 0), (0, "keep", 50), (1, "advance", 0)
    assert "left" not in bar(100, *nothing)
    assert re.search(" 60%  .* left", bar(100, *nothing, (1, "advance", 10)))


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_a_bar_is_no_longer_than_the_line_of_the_terminal(bar, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = bar(1000, *[(60, "advance", 100)] * 9).split("\r\x1b[K")[1:-1]
    assert {len(line) < columns for line in lines} == {True}
    assert all(f" {percent}%" in line for percent, line in zip(range(10, 100, 10), lines, strict=True) if columns > 20)
    assert ("·" * 5 in lines[0]) is (columns == 80)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "a/b.partial"),
            "a/b.partial: No space left on device; free some",
        ),
        (OSError(errno.EROFS, "Read-only file system", "a"), "a: Read-only file system; choose another output"),
        (OSError(errno.EIO, "Input/output error", "a"), "a: Input/output error"),
        (OSError("of a library"), "of a library"),
    ],
)
def test_an_error_of_the_system_is_a_path_and_its_words(error, expected):
    @click.group(cls=CommandGroup)
    def group():
        pass

    @group.command()
    def fails():
        raise error

    done = CliRunner().invoke(group, ["fails"])
    assert (done.exit_code, done.stderr.startswith(f"Error: {expected}")) == (1, True), done.stderr


def test_a_log_gets_plain_lines_now_and_then(bar):
    shown = bar(100, *[(1, "advance", 2)] * 50, stream=io.StringIO)
    lines = shown.splitlines()
    assert len(lines) == 5
    assert all(re.fullmatch(r"convert: \d+%  .*tok/s  .* left", line) for line in lines[:-1])
    assert not {"\r", "\x1b"} & set(shown)
    assert lines[-1] == "convert: 100%  2 tok/s  in 0:50"


def test_odd_totals_are_shown_without_fuss_and_disabled_progress_and_short_work_in_a_log_are_silent(bar):
    for total, done in ((0, 0), (0, 5), (100, 0), (100, 500)):
        assert re.search(r"\b(0|100)%", bar(total, (20, "advance", done), stream=io.StringIO))
    for stream, seconds, enabled in ((io.StringIO, 100, False), (Terminal, 100, False), (io.StringIO, 5, True)):
        assert bar(100, (seconds, "advance", 100), stream=stream, enabled=enabled) == ""


@pytest.fixture
def estimates(clock):
    """Return `estimates(parts)`: by the percent, the seconds that a log names as left, and those that are."""

    def found(parts):
        stream = io.StringIO()
        ends = [0.0, *itertools.accumulate(parts)]
        told = {}
        with Progress("verify", len(parts), stream=stream) as progress:
            for number, seconds in enumerate(parts, 1):
                clock.now += seconds
                progress.advance(1)
                line = stream.getvalue()
                stream.seek(stream.truncate(0))
                if match := re.fullmatch(r"verify: (\d+)%.*  (?:(\d+):)?(\d+):(\d+) left\n", line):
                    percent, hours, minutes, seconds_left = (int(each or 0) for each in match.groups())
                    told[percent] = (3600 * hours + 60 * minutes + seconds_left, ends[-1] - ends[number])
        return told

    return found


@pytest.mark.parametrize(("parts", "percents", "tolerance"), [
    ([1.0] * 1000, (10, 50, 90), 0.02),
    ([0.1] * 500 + [1.0] * 500, (70, 90), 0.05),  # the first half was in the page cache
    ([0.0] * 49 + [50.0] + [0.0] * 49 + [50.0] + ([0.0] * 49 + [50.0]) * 18, (50, 90), 0.15),  # bursts
], ids=["steady", "throttled", "bursts"])  # fmt: skip
def test_the_time_that_is_left_is_that_of_the_rest(estimates, parts, percents, tolerance):
    told = estimates(parts)
    for percent in percents:
        found, expected = told[min(told, key=lambda each: abs(each - percent))]
        assert abs(found - expected) <= tolerance * expected + 1, (percent, found, expected)


def test_a_log_names_the_end_of_each_phase_and_no_share_is_rounded_up_to_all(clock):
    stream = io.StringIO()
    with Progress("tokenizing", 1000, unit="B", stream=stream) as progress:
        for amount in (500, 499, 1):
            clock.now += 9
            progress.advance(amount)
        progress.begin("writing", 10)
        clock.now += 1
        progress.advance(10)
        progress.begin("uploading", 10)
        clock.now += 11
        progress.advance(4)
    assert stream.getvalue().splitlines() == [
        "tokenizing: 99%  55.5 B/s  0:00 left",
        "tokenizing: 100%  37 B/s  in 0:27",  # writing took too little time for a line
        "uploading: 40%  0.364 tok/s  0:16 left",
        "uploading: 40%  0.364 tok/s  in 0:11",  # all there was to do
    ]


def test_a_log_has_no_end_of_work_that_failed(clock):
    stream = io.StringIO()
    with contextlib.suppress(OSError), Progress("convert", 10, stream=stream) as progress:
        clock.now += 20
        progress.advance(5)
        raise OSError("no")
    assert stream.getvalue() == "convert: 50%  0.25 tok/s  0:20 left\n"


def test_a_terminal_is_cleared_after_an_error_too(clock):
    stream = Terminal()

    def work():
        with Progress("convert", 100, stream=stream) as progress:
            clock.now += 1
            progress.advance(1)
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        work()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_threads_advance_together(clock, capsys):
    with Progress("convert", 8 * 2000) as progress, ThreadPoolExecutor(8) as pool:
        for _ in pool.map(progress.advance, [1] * 16_000):
            pass
        clock.now += 20
        progress.advance(0)
    out, err = capsys.readouterr()
    assert (out, err.startswith("convert: 100%")) == ("", True)


def test_sizes_are_understood_or_refused():
    for text, expected in {
        "4096": 4096, "1": 1, "64k": 64_000, "64K": 64_000, "64kB": 64_000, "64KiB": 65_536, "512MB": 512_000_000,
        "1GiB": 2**30, "1gib": 2**30, "1Gi": 2**30, "1.5GiB": 3 * 2**29, "0.5k": 500, "2T": 2 * 10**12, "2TiB": 2**41,
        " 7 MB ": 7_000_000, 123: 123,
    }.items():  # fmt: skip
        assert SIZE.convert(text, None, None) == expected
    refused = ["0", "0.0", "0GiB", "0.5", "0.0001k", "x", "", "-1", "1e3", "GiB", "1iB", "1PB", "1 2", "1,5GB", "nan"]
    for text in refused:
        with pytest.raises(click.BadParameter, match="size"):
            SIZE.convert(text, None, None)


@pytest.mark.parametrize(("form", "value", "expected"), [
    *((format_count, *case) for case in (
        (0, "0 "), (7, "7 "), (999, "999 "), (1000, "1 k"), (1234, "1.23 k"), (1_234_567, "1.23 M"),
        (45_600_000, "45.6 M"), (2e9, "2 G"), (3.5e12, "3.5 T"),
    )),
    *((format_bytes, *case) for case in (
        (0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"),
        (3 * 2**29, "1.5 GiB"), (2**40, "1.0 TiB"), (5000 * 2**40, "5000.0 TiB"),
    )),
    *((console.format_seconds, *case) for case in (
        (0, "0:00"), (0.4, "0:00"), (9, "0:09"), (59.7, "1:00"), (61, "1:01"), (3599.6, "1:00:00"),
        (3725, "1:02:05"), (360000, "100:00:00"),
    )),
    *((lambda count: counted(count, "batch", "batches"), *case) for case in (
        (0, "0 batches"), (1, "1 batch"), (2, "2 batches"), (1234, "1,234 batches"),
    )),
    (lambda count: counted(count, "run"), 1, "1 run"), (lambda count: counted(count, "run"), 2, "2 runs"),
])  # fmt: skip
def test_numbers_for_people(form, value, expected):
    assert form(value) == expected


@given(st.floats(0, 9.9e14))
def test_counts_are_short_right_and_without_exponent(value):
    number, prefix = re.fullmatch(r"([\d.]+) ([kMGT]?)", format_count(value) if value >= 0.001 else "0 ").groups()
    shown = float(number) * 1000 ** " kMGT".find(prefix or " ")
    assert len(number) <= 8
    assert math.isclose(shown, value, rel_tol=0.006, abs_tol=0.006)
    assert not any("e" in format_count(edge) for edge in (999.7, 999_999, 999_999_999, 10**12 - 1))


@click.group(cls=CommandGroup)
def group():
    """A group to call what the test gives it."""


@group.command()
@click.pass_obj
def call(work):
    """Call the object."""
    work()


def run_in_group(work):
    """Run work as a command does; return its result."""
    return CliRunner().invoke(group, ["call"], obj=work)


def end(*_):
    raise AssertionError("the handler of before")


@pytest.mark.parametrize("fails", [False, True])
def test_the_handler_of_sigterm_is_restored(fails):
    previous = signal.signal(signal.SIGTERM, end)
    try:

        def work():
            assert signal.getsignal(signal.SIGTERM) is not end
            if fails:
                raise OSError("no")

        assert run_in_group(work).exit_code == int(fails)
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_work_that_a_signal_ends_is_unwound_and_its_error_names_the_way_on(number, code, word):
    def work():
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        except BaseException as error:
            error.add_note("go on with --resume")
            raise

    done = run_in_group(work)
    lines = done.stderr.strip().splitlines()
    assert done.exit_code == code
    assert lines == [f"Error: {word}; nothing unfinished was left under its final name", "go on with --resume"]


def test_groups_nest_restore_in_turn_and_work_outside_the_main_thread():
    previous = signal.getsignal(signal.SIGTERM)

    def work():
        mine = signal.getsignal(signal.SIGTERM)
        assert run_in_group(lambda: None).exit_code == 0
        assert signal.getsignal(signal.SIGTERM) is mine

    assert run_in_group(work).exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is previous
    codes = []

    def call_group():
        codes.append(group.main(["call"], obj=lambda: None, standalone_mode=False))

    thread = threading.Thread(target=call_group)
    thread.start()
    thread.join()
    assert codes == [None]


LONG = [("path", "a/b"), ("fingerprint", "sampled:" + 64 * "a"), ("result", "word " * 40)]


def test_a_report_fits_the_terminal_and_no_report_and_no_error_commands_it(capsysbinary):
    lines = list(console.layout_report(LONG, 80))
    assert max(map(len, lines)) <= 80
    assert lines[:3] == ["path         a/b", "fingerprint", "  sampled:" + 64 * "a"]
    assert all(line.startswith(" " * 13 + "word") for line in lines[4:])
    assert " ".join(lines).split() == " ".join(word for line in LONG for word in line).split()
    assert list(console.layout_report([("a", " " * 90), ("b", "c")], 80)) == ["a  ", "b  c"]
    assert list(console.layout_report(LONG)) == [f"{name:<11}  {text}" for name, text in LONG]  # in a pipe
    name = "a\x1b]0;b\x07\udcff"
    spelt = rb"a\x1b]0;b\x07\udcff"
    console.print_report(Output({}, [(name, name)]), as_json=False, quiet=False)
    assert capsysbinary.readouterr().out == spelt + b"  " + spelt + b"\n"

    def work():
        raise FormatError(f"{name}: found nothing\nof a file")

    assert run_in_group(work).stderr == f"Error: {spelt.decode()}: found nothing\nof a file\n"


#: Runs a console script that is interrupted at the moment when it imports a module.
INTERRUPTED_IMPORT = """
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from zb_hdf5.__main__ import {script}
sys.argv[0] = {script!r}
{script}()
"""


@pytest.mark.parametrize(("script", "arguments", "module"), [
    ("zb", ["info", "."], "click"), ("zb", ["info", "."], "zb_hdf5.commands.zb"), ("zb", ["info", "."], "numpy"),
    ("zb", ["info", "."], "numpy.linalg"), ("zb", ["verify", "."], "h5py"), ("zb", ["stage", ".", "x"], "numpy.lib"),
    ("convert", ["npy-to-hdf5", ".", "x"], "click"), ("convert", ["npy-to-hdf5", ".", "x"], "numpy.lib"),
])  # fmt: skip
@pytest.mark.thin
def test_ctrl_c_in_an_import_ends_with_130_and_no_traceback(script, arguments, module):
    code = INTERRUPTED_IMPORT.format(name=module, script=script)
    done = python(code, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (130, 1), done.stderr
    assert done.stderr.startswith("Error: interrupted")


def test_ctrl_c_outside_of_imports_unwinds():
    code = "import signal; from zb_hdf5.signals import unwinding_signals\nwith unwinding_signals():\n"
    code += "  try:\n    signal.raise_signal(signal.SIGINT)\n  except KeyboardInterrupt:\n    print('unwound')"
    done = run_program(code)
    assert done.stdout == "unwound\n"


SWALLOWED = """
import signal, sys, time, click
from zb_hdf5.console import CommandGroup
from zb_hdf5 import __main__ as scripts
class Finalizer:
    def __del__(self):
        signal.raise_signal({number})
group = CommandGroup("group")
@group.command()
def work():
    Finalizer()
    time.sleep(60)
scripts.handle_signals()
group(["work"])
"""


@pytest.mark.parametrize(("number", "code", "word"), [(15, 143, "terminated"), (2, 130, "interrupted")])
def test_a_signal_whose_exception_a_finalizer_has_swallowed_is_sent_again(number, code, word):
    done = run_program(SWALLOWED.format(number=number), timeout=50)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert done.stderr.startswith(f"Error: {word};")


@pytest.mark.parametrize(
    ("error", "code", "word"), [(KeyboardInterrupt, 130, "interrupted"), (Terminated, 143, "term")]
)
def test_a_signal_of_which_a_library_made_another_error_has_its_own_end(error, code, word):
    def work():
        raise SystemError("FastRLock.__exit__ returned a result with an exception set") from error()

    done = run_in_group(work)
    assert (done.exit_code, done.stderr.startswith(f"Error: {word}")) == (code, True)
    assert isinstance(run_in_group(lambda: (_ for _ in ()).throw(SystemError("other"))).exception, SystemError)


def test_a_wrong_argument_does_not_command_the_terminal():
    for arguments in (["info", "no\x1b[31mne"], ["in\x1b[31mfo"], ["info", "--\x1b[31m", "."]):
        result = CliRunner().invoke(zb, arguments)
        assert result.exit_code == 2
        assert "\x1b" not in result.stderr
        assert "\\x1b[31m" in result.stderr
    result = CliRunner().invoke(zb, ["convert", "npy-to-hdf", "tokens", "zz"])
    assert (result.exit_code, "npy-to-hdf5" in result.stderr) == (2, True)  # those that exist


# --- outputs that are closed, or are no UTF-8 -------------------------------------------------------------------------
def zb_in_shell(line, *arguments, **environment):
    """Run `zb` by a line of a shell, in which "$@" stands for the command."""
    command = ["/bin/sh", "-c", line, "sh", sys.executable, "-m", "zb_hdf5", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=120)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii:strict", "euc-jp"])
@pytest.mark.parametrize("command", [["info"], ["show", "--tokenizer", "byte"], ["show", "--json"], ["info", "--json"]])
@pytest.mark.thin
def test_a_terminal_without_utf_8_gets_what_it_can_show(tmp_path, encoding, command):
    folder = tmp_path / "北京"
    folder.mkdir()
    text = "naïve 東京 🙂 — § done".encode()
    write_batches(folder / "in.h5", np.frombuffer(text, np.uint8).astype(np.uint32).reshape(1, 1, -1))
    done = zb_in_shell('"$@"', *command[:1], folder / "in.h5", *command[1:], PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"done" in done.stdout or "--tokenizer" not in command


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.thin
def test_a_closed_output_ends_no_command(tmp_path, closed):
    np.save(tmp_path / "a.npy", np.arange(4096, dtype=np.uint16))
    how = ["convert", tmp_path / "a.npy", tmp_path / "out.h5", "--seq-len", 64, "--batch-size", 4, "--workers", 2]
    done = zb_in_shell(f'"$@" {closed}', *how)
    assert done.returncode == 0
    expected = np.sort(np.arange(4096, dtype=np.uint16))
    with open_reader(tmp_path / "out.h5") as reader:
        assert np.array_equal(np.sort(np.concatenate([reader[k].ravel() for k in range(len(reader))])), expected)
    assert zb_in_shell(f'"$@" {closed}', "info", tmp_path / "nothing.h5").returncode == 2
