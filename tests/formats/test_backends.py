"""One contract over every backend and every access, alone and against each other."""

import re
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import h5py
import numpy as np
import pytest
from contents import BACKENDS_OF, batches_of
from contract import check_closing, check_reader, is_refused, random_tokens, read_everything
from hypothesis import given
from hypothesis import strategies as st
from processes import forked
from reading import reading

from examples import examples
from zb_hdf5 import ArgumentError, BackendError, ReadAs, open_reader
from zb_hdf5.files.threads import ReadPool, WorkCancelled, pause
from zb_hdf5.formats import corpus
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.spec import TOKEN_DTYPES

#: name of what is stored -> the accesses that can serve it
ACCESSES = {
    "batch": ("mmap", "pread"),
    "hdf5": ("mmap", "pread", "h5py"),
    "compressed hdf5": ("pread", "h5py"),
    "foreign hdf5": ("mmap", "pread", "h5py"),
    "compressed foreign hdf5": ("h5py",),
    "batch store": ("mmap", "pread"),
    "hdf5 store": ("mmap", "pread", "h5py"),
    "compressed store": ("pread", "h5py"),
    "mixed store": ("mmap", "pread"),
}
CASES = [(stored, access) for stored, accesses in ACCESSES.items() for access in accesses]
SHAPES = {"padded": (5, 3, 10), "whole pages": (4, 4, 1024), "one token": (3, 1, 1)}
each_case = pytest.mark.parametrize(("stored", "access"), CASES, ids=lambda value: value.replace(" ", "-"))


def open_stored(stored, path, access, verify="none", **options):
    dataset = "group/data" if stored.endswith("foreign hdf5") else None
    return open_reader(path, access=access, verify=verify, read_as=ReadAs(dataset=dataset), **options)


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: "x".join(map(str, shape)))
@each_case
@pytest.mark.thin
def test_reader_keeps_the_contract(stored, access, shape, dtype, tmp_path, make_stored):
    if dtype == "uint8" and ("batch" in stored or "mixed" in stored):
        pytest.skip(".batch files have no ids of one byte")
    expected = random_tokens(*shape, dtype)
    path = make_stored(stored, tmp_path, expected, (1, 2))
    reader = open_stored(stored, path, access)
    assert reader.access == access
    check_reader(reader, expected)
    check_closing(reader, expected)


@each_case
@pytest.mark.thin
def test_reader_behind_a_cache_keeps_the_contract(stored, access, tokens, tmp_path, make_stored):
    path = make_stored(stored, tmp_path, tokens)
    for _ in ("while the cache is filled", "when it is full"):
        reader = open_stored(stored, path, access, verify="auto", cache=tmp_path / "cache")
        check_reader(reader, tokens)
        check_closing(reader, tokens)


@st.composite
def stores(draw):
    """Return (tokens, cuts) of a small store."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9)))
    tokens = random_tokens(*shape, draw(st.sampled_from(["uint32", "uint16"])), draw(st.integers(0, 99)))
    return tokens, sorted(draw(st.lists(st.integers(0, shape[0]), max_size=3)))


@examples(15)
@given(stores())
def test_every_access_reads_what_was_written(tmp_path_factory, make_stored, store):
    expected, cuts = store
    folder = tmp_path_factory.mktemp("example")
    for stored, accesses in ACCESSES.items():
        path = make_stored(stored, folder, expected, cuts)
        for access in accesses:
            with open_stored(stored, path, access) as reader:
                np.testing.assert_array_equal(np.stack(list(reader)), expected)


@each_case
@pytest.mark.thin
def test_forked_child_reads_through_an_inherited_reader(stored, access, tokens, tmp_path, make_stored):
    with open_stored(stored, make_stored(stored, tmp_path, tokens), access) as reader:
        reader.read_batch(2)  # whatever is opened lazily is open now
        with forked(lambda: np.array_equal(np.stack(list(reader)), tokens)):
            np.testing.assert_array_equal(np.stack(list(reader)), tokens)  # at the same time as the child
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)


@pytest.mark.slow
def test_spawned_process_reads_every_kind_of_reader(tokens, tmp_path, make_stored):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for number, (stored, access) in enumerate(CASES):
            folder = tmp_path / str(number)
            folder.mkdir()
            with open_stored(stored, make_stored(stored, folder, tokens), access) as reader:
                np.testing.assert_array_equal(pool.submit(read_everything, reader).result(timeout=60), tokens)


def read_at_random(reader, expected, seed, start):
    """Read batches in every way, and return how many of them were not as expected."""
    out = np.empty(expected.shape[1:], np.int64)
    pair = np.empty((2, *expected.shape[1:]), expected.dtype)
    generator = np.random.default_rng(seed)
    start.wait()
    bad = 0
    for index in generator.integers(0, len(expected) - 1, 60).tolist():
        bad += not np.array_equal(reader.read_batch(index), expected[index])
        reader.read_into(index, out)
        bad += not np.array_equal(out, expected[index])
        reader.read_batches_into(index, pair)
        bad += not np.array_equal(pair, expected[index : index + 2])
        bad += not np.array_equal(reader.read_batch_torch(index).numpy(), expected[index])
    return bad


def check_threads(reader, expected, threads=8):
    start = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(read_at_random, reader, expected, seed, start) for seed in range(threads)]
        assert sum(job.result() for job in jobs) == 0


@each_case
@pytest.mark.thin
def test_eight_threads_share_one_reader(stored, access, tmp_path, make_stored):
    expected = random_tokens(12, 3, 50)
    with open_stored(stored, make_stored(stored, tmp_path, expected), access) as reader:
        check_threads(reader, expected)


@pytest.mark.parametrize(("backends", "access"), [
    (("batch",), "mmap"),
    pytest.param(("batch",), "pread", marks=pytest.mark.slow),
    pytest.param(("batch", "hdf5"), "mmap", marks=pytest.mark.slow),
    (("batch", "hdf5"), "pread"),
    pytest.param(("hdf5",), "h5py", marks=pytest.mark.slow),
])  # fmt: skip
def test_eight_threads_share_more_shards_than_may_be_open(backends, access, tmp_path, monkeypatch, write_store):
    monkeypatch.setattr("zb_hdf5.files.paths.descriptor_room", lambda needed: 6)
    expected = random_tokens(24, 3, 50)
    folder = write_store(tmp_path / "store", expected, range(2, 24, 2), backends)
    with open_reader(folder, access=access) as reader:
        check_threads(reader, expected)


def fingerprint(path, **options):
    with open_reader(path, **options) as reader:
        return reader.fingerprint


def test_a_read_of_all_batches_ends_when_nobody_wants_it(tmp_path, write_file, tokens, monkeypatch):
    monkeypatch.setattr(corpus, "GROUP_BYTES", 1)
    path = write_file(tmp_path / "x.h5", tokens).path
    begun = threading.Event()
    seen = []

    def read():
        for first, _ in reader.corpus.groups():
            seen.append(first)
            begun.set()
            with pytest.raises(WorkCancelled):
                pause(20)

    with open_reader(path) as reader:
        assert [first for first, _ in reader.corpus.groups()] == [*range(len(tokens))]
        readers = ReadPool(1, "zb-test")
        answer = readers.submit(read)
        begun.wait()
        readers.close()
        with pytest.raises(WorkCancelled):
            answer.result()
    assert seen == [0]


def test_the_same_batches_have_one_fingerprint_in_every_form(tokens, tmp_path, make_stored, write_file, gzip_copy):
    for cuts in ((1, 3), ()):  # a file has that of a store of one shard
        folder = tmp_path / str(len(cuts))
        folder.mkdir()
        folders = {stored: make_stored(stored, folder, tokens, cuts) for stored in BACKENDS_OF}
        found = {fingerprint(path, access=access) for stored, path in folders.items() for access in ACCESSES[stored]}
        if not cuts:
            h5, batch = (write_file(folder / name, tokens, seed=3).path for name in ("one.h5", "one.batch"))
            found |= {fingerprint(h5, access=access) for access in ACCESSES["hdf5"]}
            found |= {fingerprint(gzip_copy(h5, folder / "gzip.h5")), fingerprint(batch, verify="store")}
        assert len(found) == 1
        assert found.pop().startswith("sha256:")


def test_fingerprints_differ_by_token_order_shape_dtype_and_cut(tmp_path, write_store):
    tokens = random_tokens(4, 2, 6, "uint16")
    variants = [
        (tokens, ()),
        (tokens, (2,)),
        (tokens[::-1], ()),
        (tokens.reshape(4, 3, 4), ()),
        (tokens.reshape(2, 4, 6), ()),
        (tokens.astype("uint32"), ()),
        (tokens ^ (np.arange(48) == 47).reshape(tokens.shape).astype("uint16"), ()),
    ]
    folders = [write_store(tmp_path / str(i), np.ascontiguousarray(t), cuts) for i, (t, cuts) in enumerate(variants)]
    assert len({fingerprint(folder) for folder in folders}) == len(variants)


@pytest.mark.parametrize("stored", ["batch", "foreign hdf5"])
def test_without_a_digest_the_fingerprint_is_sampled_and_says_so(stored, tokens, tmp_path, make_stored):
    path = make_stored(stored, tmp_path, tokens)
    with open_stored(stored, path, "auto") as reader:
        sampled = reader.fingerprint
    assert sampled.startswith("sampled:")
    changed = tokens.copy()
    changed[3, 1, 1] ^= 1
    path.unlink()
    with open_stored(stored, make_stored(stored, tmp_path, changed), "auto") as other:
        assert other.fingerprint != sampled


@pytest.mark.parametrize(("stored", "access", "reason"), [
    ("compressed hdf5", "mmap", "it is compressed"),
    ("compressed foreign hdf5", "mmap", "it is compressed or filtered"),
    ("compressed foreign hdf5", "pread", "it is compressed or filtered"),
])  # fmt: skip
def test_an_access_asked_for_never_falls_back(stored, access, reason, tokens, tmp_path, make_stored):
    path = make_stored(stored, tmp_path, tokens)
    with pytest.raises(BackendError, match=reason) as caught:
        open_stored(stored, path, access)
    assert str(path) in str(caught.value)
    assert re.search("use access=.*'h5py'", str(caught.value))


@pytest.mark.parametrize(("stored", "options", "error", "message"), [
    *((stored, {"access": "h5py"}, ArgumentError, "not by h5py") for stored in ("batch", "batch store")),
    ("batch", {"backend": "hdf5"}, BackendError, "asked for backend 'hdf5'"),
    ("hdf5", {"backend": "batch"}, BackendError, "asked for backend 'batch'"),
    ("mixed store", {"backend": "hdf5"}, BackendError, "asked for backend 'hdf5'"),
    *(("hdf5", {name: "nonsense"}, ArgumentError, f"{name} must be one of .*found 'nonsense'")
      for name in ("backend", "access", "verify")),
    ("batch", {"dataset": "group/data"}, BackendError, "needs an HDF5 file"),
    ("hdf5 store", {"dataset": "group/data"}, BackendError, None),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(stored, options, error, message, tokens, tmp_path, make_stored):
    path = make_stored(stored, tmp_path, tokens)
    is_refused(error, lambda: open_reader(path, **reading(options)), match=message)


@pytest.mark.parametrize("stored", ["batch", "hdf5", "batch store", "hdf5 store"])
def test_the_backend_asked_for_is_served(stored, tokens, tmp_path, make_stored):
    with open_reader(make_stored(stored, tmp_path, tokens), backend=stored.split()[0]) as reader:
        assert reader.corpus.backend == stored.split()[0]


def test_a_missing_file_is_the_systems_own_error(tmp_path):
    is_refused(FileNotFoundError, lambda: open_reader(tmp_path / "nothing.h5"), match=r"nothing\.h5")


@pytest.mark.parametrize("num_bytes", [512, 8192])
def test_hdf5_behind_a_user_block_is_read(num_bytes, tokens, tmp_path, make_stored):
    path = tmp_path / "block.h5"
    with h5py.File(path, "w", userblock_size=num_bytes) as h5, h5py.File(make_stored("hdf5", tmp_path, tokens)) as old:
        h5.attrs.update(old.attrs)
        for name in old:
            old.copy(name, h5)
    for access in ACCESSES["hdf5"]:
        np.testing.assert_array_equal(batches_of(path, access=access), tokens)
        with HDF5Corpus(path, access=access) as corpus:
            assert corpus.sha256
