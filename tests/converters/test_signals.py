"""Ctrl+C and SIGTERM at any moment of a conversion: it ends with the documented code, and nothing is half there."""

import json
import signal
import threading
from concurrent.futures import wait
from typing import NamedTuple

import numpy as np
import pytest
from commandline import succeed as run_well
from contents import files_in
from damage import flip
from interpreter import start_program
from processes import PROGRAMS, running

from zb_hdf5 import signals
from zb_hdf5.commands.zb import zb

LONGEST = (pytest.mark.slow, pytest.mark.longest)
S = 64
B = 32
NUM_BATCHES = 600
CODES = {2: 130, 15: 143}
SHAPE = ("--batch-size", B, "--seq-len", S, "--shards", 3)


class End(NamedTuple):
    signal: int
    code: int | str
    seconds: float
    published: bool
    errors: str


def succeed(*arguments):
    run_well(zb, *arguments)


@pytest.fixture
def source(tmp_path):
    records = np.arange(NUM_BATCHES * B).reshape(-1, 1) * 7 + np.arange(S)
    np.save(tmp_path / "in.npy", (records % 65536).astype("<u2"))
    return tmp_path / "in.npy"


def hammered(out, trials, longest_s, *command, seed=0):
    """Run trials of a command, of which each ends with a documented code and at most one message."""
    with running(start_program(PROGRAMS / "signal_forks.py", seed, trials, out, longest_s, *command)) as process:
        lines, errors = process.communicate(timeout=60 + 30 * trials)
    assert process.returncode == 0, errors
    ends = [End(*json.loads(line)) for line in lines.splitlines()]
    assert len(ends) == trials, f"{ends[-1]}\n{ends[-1].errors}"  # all of it: pytest cuts a long value
    for end in ends:
        assert "Traceback" not in end.errors, end
        assert "ignored" not in end.errors, end
    return ends


def hammer(tmp_path, trials, longest_s, source, *options, seed=0):
    """Convert under signals, each run going on with the one before; compare each result with an undisturbed one."""
    out = tmp_path / "out"
    whole = tmp_path / "whole"
    command = ("convert", "npy-to-hdf5", source)
    succeed(*command, whole, *SHAPE, *options, "--quiet")
    resumed = (*command, out, *SHAPE, *options, "--quiet", "--resume")
    ends = hammered(out, trials, longest_s, *resumed, seed=seed)
    for number, end in enumerate(ends):
        assert end.code == CODES[end.signal] or (end.code, end.published) == (0, True), end
        if end.published:
            assert files_in(tmp_path / f"done-{number}") == files_in(whole)
    succeed(*resumed)
    assert files_in(out) == files_in(whole)
    return ends


@pytest.mark.parametrize("trials", [5, pytest.param(1000, marks=LONGEST)])
def test_a_signal_to_a_conversion_of_one_process(trials, source, tmp_path):
    hammer(tmp_path, trials, 0.2, source, "--workers", 1)


@pytest.mark.parametrize("trials", [pytest.param(1, marks=pytest.mark.thin), pytest.param(1000, marks=LONGEST)])
def test_a_signal_to_the_parent_of_a_pool(trials, source, tmp_path):
    hammer(tmp_path, trials, 0.7, source, "--workers", 2)


@pytest.fixture
def commands(source, tmp_path):
    """Return the arguments of other commands by their names, each of which would take about half a second."""
    store = tmp_path / "store"
    texts = tmp_path / "text.jsonl"
    out = tmp_path / "out"
    succeed("convert", "npy-to-hdf5", source, store, *SHAPE, "--quiet")
    texts.write_text("".join(json.dumps({"text": f"{k} words " * 30}) + "\n" for k in range(20_000)))
    flip(store / "shard-00001-of-00003.h5", -100)
    return {
        "verify": ("verify", store, "--quiet"),
        "stage": ("stage", store, tmp_path / "cache", "--seed", 1),
        "repair": ("repair", store / "shard-00001-of-00003.h5", "--output", tmp_path / "good.h5", "--force"),
        "train": ("tokenizer", "train", texts, "-o", tmp_path / "t.json", "--vocab-size", 2000, "--force"),
        "text": ("convert", "jsonl-to-hdf5", texts, out, "--tokenizer", "byte", "--seq-len", S, "--resume"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("trials", [10, pytest.param(200, marks=LONGEST)])
@pytest.mark.parametrize("name", ["verify", "stage", "repair", "train", "text"])
def test_a_signal_to_another_command(name, trials, commands, tmp_path):
    for end in hammered(tmp_path / "out", trials, 0.5, *commands[name]):
        assert end.code in (CODES[end.signal], 3 if name == "verify" else 0), end


def test_a_signal_does_not_raise_in_the_wait_for_a_library(monkeypatch):
    """An exception as the wait takes the lock of its future would leave the lock to nobody, and both threads hang."""
    before = signal.getsignal(signal.SIGINT)
    stopped = threading.Event()
    undisturbed = []

    def wait_with_a_signal(futures, timeout_s):
        signal.raise_signal(signal.SIGINT)
        undisturbed.append(True)
        return wait(futures, timeout_s)

    monkeypatch.setattr(signals, "wait", wait_with_a_signal)
    with signals.unwinding_signals(), pytest.raises(KeyboardInterrupt):
        signals.run_in_thread(stopped.wait, stopped.set)
    assert undisturbed
    assert signal.getsignal(signal.SIGINT) is before
