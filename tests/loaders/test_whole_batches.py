"""Whole batches from the mapping: the same as by positioned reads, checked, and in any number of files."""

import os
import shutil

import numpy as np
import pytest
import torch
from contract import SAME_EPOCH, is_refused
from damage import fields_of, flip, flip_bits, flip_token, steps_of, tables_of, write_batches, write_streams
from interpreter import run_training
from packed import write_packed

from zb_hdf5 import ChecksumError, IncompleteError, Loader, convert, open_reader
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.loaders import whole_batches

ALONE = {"rank": 0, "world_size": 1}
NUM_BATCHES = 300


@pytest.fixture(scope="module", params=["uint32", "uint16"])
def many_shards(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    tokens = np.random.default_rng(3).integers(0, 60_000, (NUM_BATCHES * 2, 8), dtype=request.param)
    np.save(folder / "t.npy", tokens)
    options = {"batch_size": 2, "seq_len": 8, "dtype": request.param, "shards": 7}
    convert(folder / "t.npy", "hdf5", folder / "store", **options)
    return folder / "store"


def arrays(steps):
    return [np.stack([part.numpy() for part in (step if isinstance(step, tuple) else (step,))]) for step in steps]


@pytest.mark.parametrize("options", [{}, {"dtype": torch.int32}, {"targets": True}, {"verify": "batch"}])
@pytest.mark.parametrize("shuffle", ["global", "sequential"])
@pytest.mark.parametrize("access", ["auto", "pread"])
@pytest.mark.thin
def test_resolved_steps_give_what_threads_read(many_shards, options, shuffle, access, monkeypatch):
    monkeypatch.setattr(whole_batches, "MAX_OPEN", 3)
    for world_size in (1, 3):
        how = {"shuffle": shuffle, "rank": world_size - 1, "world_size": world_size, **options}
        with Loader(many_shards, access=access, **how) as loader, Loader(many_shards, prefetch=2, **how) as other:
            expected = arrays(other)
            assert len(expected) == NUM_BATCHES // world_size
            np.testing.assert_array_equal(arrays(loader), expected)
            dataset = loader.dataset()
            np.testing.assert_array_equal(arrays(dataset[step] for step in range(len(dataset))), expected)


def test_blocks_that_are_not_in_the_page_cache_are_read_by_position(many_shards, monkeypatch):
    with open_reader(many_shards) as reader:
        expected = arrays(Loader(reader, prefetch=0, **ALONE))
        for prefetch in (0, "auto"):
            loader = Loader(reader, prefetch=prefetch, **ALONE)
            asked = []
            hinted = []
            with monkeypatch.context() as patch:
                patch.setattr(reader, "are_cached", lambda records, length, asked=asked: bool(asked.append(records)))
                patch.setattr(reader, "will_need", lambda *batches, hinted=hinted: hinted.append(batches))
                np.testing.assert_array_equal(arrays(loader), expected)
            assert asked
            assert bool(hinted) == (prefetch == "auto")


@pytest.mark.parametrize(
    ("options", "is_found"),
    [({}, True), ({"verify": "none"}, False), ({"access": "pread"}, True), ({"verify": "batch"}, True)],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_flipped_bit_is_found(many_shards, options, is_found, dtype):
    shard = sorted(many_shards.glob("*.h5"))[4]
    with Loader(many_shards, dtype=dtype, **options, **ALONE) as loader:
        is_view = dtype == torch.int32 and loader.batches.dtype == np.uint32
        flip_token(shard, 3)
        try:
            for steps in (loader, map(loader.dataset().__getitem__, range(NUM_BATCHES))):
                if is_found and (options or not is_view):
                    with pytest.raises(ChecksumError, match=r"batch 3: expected crc32"):
                        list(steps)
                else:
                    assert len(list(steps)) == NUM_BATCHES
        finally:
            flip_token(shard, 3)


@pytest.mark.parametrize("in_cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_bytes_that_change_after_their_comparison_are_not_given(
    many_shards, in_cache, dtype, prefetch, tmp_path, monkeypatch
):
    how = {"dtype": dtype, "prefetch": prefetch, "shuffle": "sequential", "verify": "batch", **ALONE}
    expected = arrays(Loader(many_shards, **how))
    with open_reader(many_shards) as reader:
        num_bytes = reader.read_batch(0).nbytes
    copy = shutil.copytree(many_shards, tmp_path / "copy")
    files = sorted(copy.glob("shard-*.h5"))
    if in_cache:
        how["cache"] = tmp_path / "cache"
        assert len(list(Loader(copy, **how))) == NUM_BATCHES
        files = [path for path in how["cache"].rglob("batches-*") if path.suffix != ".marks"]
    places = {}  # of the bytes of each batch: its file, and its position there
    for path in files:
        content = path.read_bytes()
        places |= {content[at : at + num_bytes]: (path, at) for at in range(0, len(content), 2)}
    met = set()

    def changed(compared, found):
        content = compared.tobytes()
        if content in places:
            path, at = places[content]
            with open(path, "r+b") as file:
                os.pwrite(file.fileno(), b"\1" * num_bytes, at)
            met.add(content)
        return found

    monkeypatch.setattr(whole_batches, "crc32_of", lambda compared: changed(compared, crc32_of(compared)))
    with Loader(copy, **how) as loader:
        np.testing.assert_array_equal(arrays(loader), expected)
    assert len(met) == NUM_BATCHES


#: Sets a limit of descriptors.
LIMITED = """
import resource, sys
from zb_hdf5 import Loader
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
"""


#: Reads a store of many files in each way, and prints how many steps there were.
FEW_FILES = """
import torch
from zb_hdf5.files import pages, residency

def count_steps(**how):
    with Loader(sys.argv[2], rank=0, world_size=1, **how) as loader:
        data = loader.dataset()
        print(sum(1 for _ in loader) + sum(1 for _ in map(data.__getitem__, range(len(data)))))

unchecked = {"verify": "none", "dtype": torch.int32}
for how in ({}, {"prefetch": 0}, {"access": "pread"}, {"shuffle": "records"}, unchecked):
    count_steps(**how)
found = residency.memory_limit, pages.page_in_memory
residency.memory_limit, pages.page_in_memory = lambda: 0, lambda fd, offset: False
count_steps()  # past the page cache: batches under way keep no file open
residency.memory_limit, pages.page_in_memory = found
"""


#: Reads batches of records of more files than it may open, and the documents of a packed store.
FEW_FILES_TOGETHER = """
from zb_hdf5.commands.zb import zb
for how in ({}, {"access": "pread"}):
    with Loader(sys.argv[2], batch_size=40, shuffle="records", rank=0, world_size=1, **how) as loader:
        print(sum(int(batch.sum()) for batch in loader))
with Loader(sys.argv[3], documents=True, rank=0, world_size=1) as loader:
    print(sum(1 for _ in loader))
zb(["report", sys.argv[3], "-o", sys.argv[4], "--quiet"])
"""


@pytest.fixture(scope="module")
def hundred_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    np.save(folder / "t.npy", np.arange(1600, dtype=np.uint32).reshape(-1, 8))
    convert(folder / "t.npy", "hdf5", folder / "store", batch_size=2, seq_len=8, shards=100)
    return folder / "store"


def test_a_store_of_many_files_is_read_under_a_low_limit_of_descriptors(hundred_files):
    assert run_training(LIMITED + FEW_FILES, 24, hundred_files).stdout.split() == ["200"] * 6


def test_many_files_of_one_batch_and_tables_are_read_under_a_low_limit_of_descriptors(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(320, dtype=np.uint32).reshape(-1, 8))
    convert(tmp_path / "t.npy", "batch", tmp_path / "store", batch_size=1, shards=40, workers=1)
    write_packed(tmp_path / "packed.h5", [40] * 24)
    convert(tmp_path / "packed.h5", "hdf5", tmp_path / "packed", batch_size=1, shards=16, workers=1)
    paths = tmp_path / "store", tmp_path / "packed", tmp_path / "page.html"
    one, other, documents = run_training(LIMITED + FEW_FILES_TOGETHER, 32, *paths).stdout.split()
    assert one == other == str(sum(range(320)))
    assert int(documents) > 16


@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
def test_a_file_that_is_cut_short_is_an_error_of_the_next_block(many_shards):
    shard = sorted(many_shards.glob("*.h5"))[2]
    content = shard.read_bytes()
    with Loader(many_shards, **ALONE) as loader:
        assert len(list(loader)) == NUM_BATCHES
        os.truncate(shard, len(content) // 2)
        try:
            is_refused(IncompleteError, lambda: list(loader), match=r"cut short|expected at least")
            is_refused(IncompleteError, lambda: list(map(loader.dataset().__getitem__, range(NUM_BATCHES))))
        finally:
            shard.write_bytes(content)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_batches_in_a_cache_are_those_of_the_store_though_some_are_absent_or_damaged(many_shards, tmp_path, dtype):
    how = {"cache": tmp_path / "cache", "shuffle": "sequential", "dtype": dtype, **ALONE}
    expected = arrays(Loader(many_shards, shuffle="sequential", dtype=dtype, **ALONE))
    with Loader(many_shards, **how) as loader:
        for number in set(range(NUM_BATCHES)) - {100}:
            loader.batches.read_batch_torch(number)
    [data] = (path for path in tmp_path.rglob("batches-*") if path.suffix != ".marks")
    size = data.stat().st_size
    flip(data, size // 2)
    with Loader(many_shards, **how) as loader:
        np.testing.assert_array_equal(arrays(loader), expected)
        np.testing.assert_array_equal(arrays(map(loader.dataset().__getitem__, range(NUM_BATCHES))), expected)
        os.truncate(data, size // 3)
        np.testing.assert_array_equal(arrays(loader), expected)


@pytest.mark.parametrize("write", [write_batches, write_streams])
@pytest.mark.parametrize("verify", ["auto", "batch", "none"])
@pytest.mark.thin
def test_a_flipped_bit_of_a_table(write, verify, tmp_path, thinned):
    store, shape = write(tmp_path)
    tables = tables_of(store)
    assert len({path for path, *_ in tables}) >= 3
    found = flip_bits(tables, lambda: steps_of(store, **shape, verify=verify), thinned(range(100), 15))
    assert found["refused"] > 0
    assert verify == "none" or found["silent"] == 0, found


@pytest.mark.parametrize(
    ("write", "verify"), [(write_batches, "auto"), (write_batches, "batch"), (write_streams, "batch")]
)
@pytest.mark.thin
def test_a_flipped_bit_of_a_field(write, verify, tmp_path, thinned):
    store, shape = write(tmp_path)
    found = flip_bits(fields_of(store), lambda: steps_of(store, **shape, verify=verify), thinned(range(60), 10))
    assert found["refused"] > 0
    assert found["silent"] == 0, found


@pytest.mark.parametrize("write", [write_batches, write_streams])
@pytest.mark.parametrize("verify", ["auto", "batch"])
@pytest.mark.thin
def test_a_flipped_bit_of_a_cache_is_never_seen(write, verify, tmp_path, thinned):
    store, shape = write(tmp_path)
    shape |= {"cache": tmp_path / "cache", "verify": verify}
    steps_of(store, **shape)
    files = [path for path in sorted((tmp_path / "cache").rglob("*")) if path.is_file() and path.stat().st_size]
    files = [(path, 0, path.stat().st_size) for path in files]
    assert flip_bits(files, lambda: steps_of(store, **shape), thinned(range(60), 10)).keys() == {"same"}
