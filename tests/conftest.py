"""Fixtures: tokens, factories of files and stores, and guards that turn a leak into a failure."""

import gc
import os
import shutil
import signal
import subprocess
import time
from itertools import combinations, pairwise
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from zlib import crc32

import numpy as np
import pins
import pytest
from contents import BACKENDS_OF, label_batches, write_batches
from descriptors import open_descriptors, open_files, our_threads
from hypothesis import settings
from interpreter import shared_interpreters

from zb_hdf5 import ShardEntry, ShardIndex, StoreMeta
from zb_hdf5.converters.run import PRELOAD
from zb_hdf5.spec import BATCHES, SHARD_PREFIX, TOKENS
from zb_hdf5.store.format_list import FORMATS

pytest.register_assert_rewrite("contract")  # before its import: a failed check shows its values

#: One of so many cases of a test is tried without --slow, and by .ci/run.
QUICK_SHARE, CI_SHARE = 5, 3
#: Examples of a property: with --slow, by .ci/run, and without.
ALL_EXAMPLES, CI_EXAMPLES, QUICK_EXAMPLES = 100, 50, 10
#: One of so many parameter sets of a test with the mark `thin`.
THIN_SHARE = 12


# Before torch is imported, here or in a process that a test starts: on a busy machine its threads wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in the background with Ctrl+C ignored, and our children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def is_ci(config):
    """Return whether the longest tests are left out, as .ci/run does."""
    return config.getoption("--slow") and config.getoption("markexpr") == "not longest"


def pytest_configure(config):
    examples = ALL_EXAMPLES if config.getoption("--slow") else QUICK_EXAMPLES
    if is_ci(config):
        examples = CI_EXAMPLES
    settings.register_profile("zb", deadline=None, derandomize=True, print_blob=True, max_examples=examples)
    settings.load_profile("zb")


def covering(items, together):
    """Return so few parameter sets of a test that any so many values of different parameters are in one of them."""
    # by their ids: for pytest, each of the sets has values of its own
    values = {item: {*combinations(enumerate(item.callspec._idlist), together)} for item in items}
    left = set().union(*values.values())
    chosen = set()
    while left:
        most = max(values, key=lambda item: len(left & values[item]))
        left -= values.pop(most)
        chosen.add(most)
    return chosen


def crossed_cases(items):
    """Return the parameter sets of each test that has several parameters."""
    cases = {}
    for item in items:
        crossed = len(item.callspec._idlist) > 1 if hasattr(item, "callspec") else False
        if crossed and not ("thin" in item.keywords or "slow" in item.keywords):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return cases.values()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    seen = set()
    all_cases = config.getoption("--slow")
    for of_test in crossed_cases(items):
        for item in {*of_test} - covering(of_test, 1):
            item.add_marker(pytest.mark.slow)
        if is_ci(config):
            for item in {*of_test} - covering(of_test, 2):
                item.add_marker(pytest.mark.longest)
    for item in items:
        if item.get_closest_marker("thin"):
            # by a digest: every twelfth would take the same value of a parameter again and again
            if item.function in seen and crc32(item.name.encode()) % THIN_SHARE:
                item.add_marker(pytest.mark.slow)
            seen.add(item.function)
        if all_cases and (getattr(item.obj, "is_hypothesis_test", False) or "thinned" in item.fixturenames):
            item.add_marker(pytest.mark.slow)
    if not all_cases:
        slow = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave what the imports make out of every collection of garbage: the guards below collect after many tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def pinned_kinds(tmp_path_factory):
    """Return the folder of every kind of path of `pins.py`, made once; nobody writes there."""
    place = tmp_path_factory.mktemp("pins") / "kinds"
    pins.make_kinds(place)
    return place


@pytest.fixture
def thinned(request):
    """Return `thinned(cases, share=5) -> list`: all of them with --slow, else every fifth; every third in .ci/run."""
    all_cases = CI_SHARE if is_ci(request.config) else 1
    slow = request.config.getoption("--slow")
    return lambda cases, share=QUICK_SHARE: list(cases)[:: all_cases if slow else share]


@pytest.fixture(scope="session", autouse=True)
def _processes_of_the_session():
    """Start them now: they hold pipes to the end of the session, whichever test would have started them."""
    resource_tracker.ensure_running()
    forkserver.set_forkserver_preload(list(PRELOAD))  # or each worker of each conversion would import the package
    forkserver.ensure_running()
    with shared_interpreters():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.failed = getattr(item, "failed", False) or report.failed
    return report


def left_open(before, counts=lambda path: True):
    """Return the descriptors that are still open after some seconds: threads of libraries close theirs late."""
    for attempt in range(31):
        leaked = {fd: path for fd, path in open_files().items() if fd not in before and counts(path)}
        if not leaked:
            break
        if attempt:
            gc.unfreeze()  # an object may be older than its module's tests
            time.sleep(0.1)
        gc.collect()
    return leaked


@pytest.fixture(scope="module", autouse=True)
def _no_descriptor_left_by_module(request, _processes_of_the_session):
    gc.freeze()  # what earlier modules have imported: a collection took up to 0.7 s, and now takes a tenth
    before = open_descriptors()
    failed = request.session.testsfailed
    yield
    if open_descriptors() - before and request.session.testsfailed == failed:
        leaked = left_open(before)
        assert not leaked, f"left open by this module: {leaked}"


@pytest.fixture(autouse=True)
def _no_descriptor_left_by_test(request, tmp_path_factory, _no_descriptor_left_by_module):
    """Files in a folder of the whole module may be open for the next test; the module's own guard looks at them."""
    own = str(request.getfixturevalue("tmp_path")) if "tmp_path" in request.fixturenames else None
    shared = str(tmp_path_factory.getbasetemp())
    before = open_descriptors()
    yield
    if open_descriptors() - before and not request.node.failed:  # a failed test's traceback keeps what it had
        leaked = left_open(before, lambda path: not path.startswith(shared) or (own and own in path))
        assert not leaked, f"left open: {leaked}"


@pytest.fixture(autouse=True)
def _no_leaked_thread(request):
    before = our_threads()
    yield
    if our_threads() - before and not request.node.failed:
        gc.collect()
        for thread in our_threads() - before:
            thread.join(5)  # it may be ending at this moment
        leaked = our_threads() - before
        assert not leaked, f"left running: {leaked}"


@pytest.fixture
def mount_disk(tmp_path):
    """Return `mount_disk(size_kib, name="disk") -> folder`: a file system of that size, to the end of the test."""
    mounted = []

    def mount(size_kib, name="disk"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder)]
        if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command).returncode:
            pytest.skip("needs root to mount a small tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def tokens():
    """Seven batches of 3 x 10 uint32 tokens, the same in every run; read-only."""
    from contract import random_tokens  # it imports torch: 2 s of the process that only hands out the tests

    made = random_tokens(7, 3, 10)
    made.flags.writeable = False
    return made


@pytest.fixture(scope="session")
def write_file():
    """Return `write_file(path, tokens, **options) -> ShardInfo`; the suffix chooses the backend."""
    return write_batches


@pytest.fixture(scope="session")
def write_store(write_file):
    """Return `write_store(folder, tokens, cuts, backends, **options) -> folder`; shards take backends in turn."""

    def write(folder, tokens, cuts=(), backends=("hdf5",), **options):
        folder = Path(folder)
        folder.mkdir()
        limits = [0, *cuts, len(tokens)]
        entries = []
        for number, (start, stop) in enumerate(pairwise(limits)):
            backend = backends[number % len(backends)]
            path = folder / f"{SHARD_PREFIX}{number:05}{FORMATS[backend].suffix}"
            entries.append(ShardEntry.of(write_file(path, tokens[start:stop], **options)))
        ShardIndex(StoreMeta(*tokens.shape[1:], tokens.dtype), tuple(entries)).save(folder)
        return folder

    return write


@pytest.fixture
def cuts():
    """The batches at which `store` begins another shard; a module overrides it."""
    return (2, 5)


@pytest.fixture
def backends():
    """The formats that the shards of `store` take in turn; a module overrides it."""
    return ("hdf5",)


@pytest.fixture
def store(tmp_path, tokens, cuts, backends, write_store):
    """A store of `tokens`, in a folder of this test. A module that needs another one overrides those three."""
    return write_store(tmp_path / "store", tokens, cuts, backends)


@pytest.fixture(scope="session")
def gzip_copy():
    """Return `gzip_copy(source, target)`: the same objects in a new file, as h5repack does, the tokens compressed."""
    h5py = pytest.importorskip("h5py")

    def copy(source, target, compression="gzip"):
        with h5py.File(source, "r") as old, h5py.File(target, "w") as new:
            new.attrs.update(old.attrs)
            [main] = {BATCHES, TOKENS} & set(old)
            stored = old[main]
            compressed = new.create_dataset(main, data=stored[:], chunks=stored.chunks, compression=compression)
            for name, value in stored.attrs.items():
                compressed.attrs.create(name, value, dtype=np.asarray(value).dtype)
            for name in set(old) - {main}:
                old.copy(name, new)
        return target

    return copy


@pytest.fixture(scope="session")
def make_stored(write_file, write_store, gzip_copy):
    """Return `make_stored(stored, folder, tokens, cuts) -> path`: batches in each kind of file and store."""
    h5py = pytest.importorskip("h5py")

    def make(stored, folder, tokens, cuts=(1, 3)):
        name = stored.replace(" ", "-")
        if stored in BACKENDS_OF:
            return write_store(folder / name, tokens, cuts, BACKENDS_OF[stored])
        if stored == "compressed store":
            return write_store(folder / name, tokens, cuts, codec="zstd")
        if stored == "batch":
            return write_file(folder / "one.batch", tokens).path
        if stored.endswith("foreign hdf5"):
            with h5py.File(folder / "foreign.h5", "w") as h5:
                packed = "gzip" if stored.startswith("compressed") else None
                label_batches(h5.create_dataset("group/data", data=tokens, compression=packed))
            return folder / "foreign.h5"
        path = write_file(folder / f"{name}.h5", tokens).path
        return gzip_copy(path, folder / "gzip.h5") if stored == "compressed hdf5" else path

    return make
