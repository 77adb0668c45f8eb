"""A server that stalls: whoever stops to read goes on at once, and no request begins after that."""

import contextlib
import os
import signal
import threading
import time

import pytest
from contract import random_tokens
from damage import write_streams
from descriptors import our_threads
from interpreter import start_program, start_training
from packed import write_packed
from processes import running, wait_until

from zb_hdf5 import DocumentLoader, IncompleteError, Loader, MixedLoader, convert

TOKENS = random_tokens(60, 4, 256)
#: Seconds of ZB_REMOTE_TIMEOUT, of which one request has the sixth part, and seconds in which all ends that is left.
LIMIT_S = 120
LATEST_S = 12
ONE_RANK = {"rank": 0, "world_size": 1}
WINDOWS = {**ONE_RANK, "batch_size": 4, "seq_len": 32, "shuffle": "sequential"}
#: Ways to read ahead, and in the thread of the caller.
LOADERS = {
    "default": lambda url, folder: Loader(f"{url}/batches", shuffle="sequential", **ONE_RANK),
    # with this seed the first step is in the first shard, and a later one of the six in the last
    "prefetch": lambda url, folder: Loader(f"{url}/batches", seed=7, prefetch=6, **ONE_RANK),
    "records": lambda url, folder: Loader(f"{url}/batches", shuffle="records", **ONE_RANK),
    "cache": lambda url, folder: Loader(f"{url}/batches", shuffle="sequential", cache=folder, **ONE_RANK),
    "windows": lambda url, folder: Loader(f"{url}/store", documents=True, spans=True, **WINDOWS),
    "documents": lambda url, folder: DocumentLoader(
        f"{url}/store", collate="pad", batch_size=4, shuffle="sequential", fields=("mask",), **ONE_RANK
    ),
    "mixture": lambda url, folder: MixedLoader(
        {name: f"{url}/batches" for name in "ab"}, {"a": 0.5, "b": 0.5}, prefetch=128, shuffle="sequential"
    ),
}
IN_THIS_THREAD = {
    "no prefetch": lambda url, folder: Loader(f"{url}/batches", shuffle="sequential", prefetch=0, **ONE_RANK),
    "no prefetch, records": lambda url, folder: Loader(f"{url}/batches", shuffle="records", prefetch=0, **ONE_RANK),
    "no prefetch, cache": lambda url, folder: Loader(f"{url}/batches", prefetch=0, cache=folder, **ONE_RANK),
    "data set": lambda url, folder: map(Loader(f"{url}/batches", **ONE_RANK).dataset().__getitem__, range(60)),
}
#: Beginnings of the names of the last shards.
LAST = ("shard-00001", "s1.h5")


class Stall:
    """A server that answers no request for the last shard as long as it stalls."""

    def __init__(self, web):
        self.web = web
        self.over = threading.Event()
        self.is_met = False

    def __call__(self, number, method, name, span):
        if name.startswith(LAST) and method == "GET":
            self.is_met = True
            self.over.wait(60)
            return {"hang_up": True}
        return None

    def begin(self):
        self.web.reset()
        self.web.fault = self

    def end(self):
        """Answer all requests with a failure, after which a reader would try again."""
        self.over.set()
        until(lambda: not self.web.under_way)
        until(lambda: not [thread for thread in our_threads() if thread.name != "zb-remote"])


def until(condition):
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def settled(value):
    """Return a value that has not changed for a while: a request that has begun may be on its way to the server."""
    seen = value()
    changed_s = time.monotonic()
    while time.monotonic() - changed_s < 0.3:
        time.sleep(0.02)
        if (found := value()) != seen:
            seen = found
            changed_s = time.monotonic()
    return seen


@pytest.fixture
def stall(web, write_store, monkeypatch):
    """Return the stall of a server with a batch store and a stream, of two shards each."""
    monkeypatch.setenv("ZB_REMOTE_TIMEOUT", str(LIMIT_S))
    write_store(web.folder / "batches", TOKENS, (40,))
    write_streams(web.folder)
    stall = Stall(web)
    yield stall
    stall.over.set()


@contextlib.contextmanager
def nothing_begins(stall):
    """Compare the requests before and after the failure of those that were under way: nobody makes another one."""
    start_s = time.monotonic()
    yield
    assert time.monotonic() - start_s < LATEST_S
    assert stall.web.under_way
    count = settled(lambda: len(stall.web.requests))
    stall.end()
    assert settled(lambda: len(stall.web.requests)) == count


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.thin
def test_a_loop_that_breaks_does_not_wait(kind, stall, tmp_path):
    loader = LOADERS[kind](stall.web.url, tmp_path / "cache")
    stall.begin()
    for _ in loader:
        until(lambda: stall.is_met)
        break
    with nothing_begins(stall):
        loader.close()


@pytest.mark.parametrize("kind", [*LOADERS, *IN_THIS_THREAD])
@pytest.mark.thin
def test_an_interrupt_does_not_wait(kind, stall, tmp_path):
    loader = (LOADERS | IN_THIS_THREAD)[kind](stall.web.url, tmp_path / "cache")
    stall.begin()

    def interrupt():
        until(lambda: stall.is_met)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with nothing_begins(stall), pytest.raises(KeyboardInterrupt):
        for _ in loader:
            pass
    thread.join()
    getattr(loader, "close", list)()


SCRIPT = """
import sys
from zb_hdf5 import Loader
reading = iter(Loader(sys.argv[1], shuffle="sequential", rank=0, world_size=1))
next(reading)
sys.stdin.readline()
"""


@pytest.mark.slow  # they import torch
@pytest.mark.parametrize("end", ["", "sys.exit()", "reading.close()"])
def test_the_end_of_a_script_does_not_wait(end, stall):
    stall.begin()
    with running(start_training(SCRIPT + end, f"{stall.web.url}/batches")) as process:
        wait_until(lambda: stall.is_met, process)
        assert process.communicate("\n", timeout=LATEST_S) == ("", "")
        assert (process.returncode, stall.over.is_set()) == (0, False)


@pytest.mark.parametrize("command", [
    "verify {url}/batches",
    pytest.param("stage {url}/batches {folder}", marks=pytest.mark.slow),
    "fetch {url}/batches/shard-{{:05d}}.h5 -n 2 -o {folder}",
    pytest.param("convert hdf5-to-batch {url}/batches {folder}/copy", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_interrupted_command_does_not_wait(command, stall, tmp_path):
    stall.begin()
    words = command.format(url=stall.web.url, folder=tmp_path).split()
    with running(start_program("from zb_hdf5.__main__ import zb; zb()", *words)) as process:
        wait_until(lambda: stall.is_met, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LATEST_S)
        assert (process.returncode, stall.over.is_set()) == (130, False), errors
        assert "Traceback" not in errors


def test_a_table_that_took_long_is_not_read_again(web, tmp_path, monkeypatch):
    """The steps of a block are not read one by one after all of them have waited for the server."""
    monkeypatch.setattr("zb_hdf5.loaders.step_values.REREAD_S", 0.05)
    write_packed(tmp_path / "packed.h5", [30, 40, 0, 7, 90, 3, 50, 61])
    convert(tmp_path / "packed.h5", "hdf5", web.folder / "packed", shards=1)
    cache = tmp_path / "cache"
    with Loader(f"{web.url}/packed", cache=cache, **ONE_RANK) as loader:
        batches = len(list(loader))
    with Loader(f"{web.url}/packed", cache=cache, documents=True, prefetch=0, **ONE_RANK) as loader:
        web.reset()
        web.fault = lambda number, method, name, span: {"wait": 0.1, "status": 404} if ".pieces" in name else None
        with pytest.raises(IncompleteError, match="pieces"):
            next(loader)
    assert batches > 1
    assert len([name for _, name, _ in web.requests if ".pieces" in name]) == 1
