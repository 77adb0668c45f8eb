"""Fields, pieces, documents and spans come from objects as they come from files."""

import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import contents
import numpy as np
import pytest
import torch
from contract import random_tokens
from damage import are_equal, fields_of, flip_bits, steps_of, tables_of, write_batches, write_streams
from h5py._objects import phil
from packed import FIELDS, write_packed
from source_tokens import ALL

from zb_hdf5 import DocumentLoader, HDF5ShardWriter, Loader, MixedLoader, convert, open_reader
from zb_hdf5.errors import UnavailableError
from zb_hdf5.formats.batches import Batches
from zb_hdf5.store.rebuild import index_files

HOW = {"documents": ALL, "spans": True, "rank": 0, "world_size": 1}
LENGTHS = [30, 40, 0, 7, 90, 3, 50, 61]


def assert_same(found, expected):
    """Compare all steps of two loaders of dictionaries."""
    found = list(found)
    expected = list(expected)
    assert expected
    assert [step.keys() for step in found] == [step.keys() for step in expected]
    assert are_equal(found, expected)


def write_documents(path):
    """Write batches with all that can lie beside them to a file, or to a store of three shards."""
    lone = path if path.suffix else path.with_name("packed.h5")
    write_packed(lone, LENGTHS)
    if lone != path:
        convert(lone, "hdf5", path, shards=3)


@pytest.fixture(params=["lone.h5", "store"])
def batches(served, request):
    """Return (local path, url) of batches with all that can lie beside them."""
    write_documents(served.folder / request.param)
    return served.folder / request.param, f"{served.url}/{request.param}"


@pytest.mark.parametrize("shape", [{}, {"batch_size": 4}, {"batch_size": 3, "seq_len": 4}])
@pytest.mark.parametrize("shuffle", ["global", "records"])
@pytest.mark.thin
def test_batches_bring_all_that_lies_beside_them(batches, shape, shuffle):
    local, url = batches
    options = {**HOW, "fields": tuple(FIELDS), "targets": True, "shuffle": shuffle, **shape}
    with Loader(url, **options) as loader, Loader(local, **options) as expected:
        assert_same(loader, expected)


def test_a_conversion_keeps_the_documents(batches, tmp_path):
    local, url = batches
    convert(url, "hdf5", tmp_path / "copy")
    with open_reader(tmp_path / "copy") as copy, open_reader(url) as far, open_reader(local) as expected:
        assert len(far.corpus.documents) == len(LENGTHS)
        for number in range(len(LENGTHS)):
            document = expected.corpus.documents[number].facts
            assert copy.corpus.documents[number].facts == far.corpus.documents[number].facts == document
        assert copy.corpus.document_table.token_count == expected.corpus.document_table.token_count
        rows = np.arange(expected.num_records)
        np.testing.assert_array_equal(copy.read_pieces(rows).offsets, expected.read_pieces(rows).offsets)


@pytest.fixture
def streams(served):
    """Return (local folder, url) of a stream in two shards, with spans and a field."""
    return write_streams(served.folder)[0], f"{served.url}/store"


@pytest.mark.parametrize("shuffle", ["global", "records"])
@pytest.mark.thin
def test_windows_bring_all_that_lies_beside_them(streams, shuffle):
    local, url = streams
    options = {**HOW, "fields": ("mask",), "shuffle": shuffle, "batch_size": 2, "seq_len": 16}
    with Loader(url, **options) as loader, Loader(local, **options) as expected:
        assert_same(loader, expected)


@pytest.mark.parametrize("sizes", [{"collate": "pad", "batch_size": 3}, {"collate": "pack", "max_tokens": 100}])
@pytest.mark.thin
def test_documents_bring_all_that_lies_beside_them(streams, sizes):
    local, url = streams
    options = {"spans": True, "fields": ("mask",), "rank": 0, "world_size": 1, **sizes}
    with DocumentLoader(url, **options) as loader, DocumentLoader(local, **options) as expected:
        assert_same(loader, expected)


def test_many_batches_of_a_mixture_are_read_at_once(web, write_store):
    for number, name in enumerate("ab"):
        write_store(web.folder / name, random_tokens(20, 4, 1024, seed=number), (20,))
    web.fault = lambda number, method, name, span: {"wait": 0.05}
    options = {"weights": {"a": 1.0, "b": 2.0}, "rank": 0, "world_size": 1}
    far, near = ({name: f"{place}/{name}" for name in "ab"} for place in (web.url, web.folder))
    with MixedLoader(far, **options) as loader, MixedLoader(near, **options) as expected:
        for step, other, _ in zip(loader, expected, range(60), strict=False):
            assert torch.equal(step, other)
    assert web.most_under_way > 8


def test_many_batches_of_documents_are_read_at_once(web):
    with HDF5ShardWriter(web.folder / "stream.h5", dtype="uint16") as writer:
        for number in range(200):
            writer.write_document(np.full(50, number))
    web.fault = lambda number, method, name, span: {"wait": 0.02}
    with DocumentLoader(f"{web.url}/stream.h5", collate="pad", batch_size=4, shuffle="sequential") as loader:
        rows = torch.cat([step["tokens"] for step in loader])
    assert rows[:, 0].tolist() == list(range(200))
    assert web.most_under_way > 8


def test_the_offsets_of_documents_of_many_shards_are_read_at_once(web):
    contents.write_streams(web.folder / "store", [np.arange(number + 1) for number in range(12)], chunk_tokens=64)
    web.fault = lambda *request: {"wait": 0.02}
    with DocumentLoader(f"{web.url}/store", collate="pad", batch_size=1) as loader:
        assert web.most_under_way > 4
        assert np.diff(loader.corpus.doc_offsets).tolist() == list(range(1, 13))


@pytest.fixture(params=["lone.h5", "store", "stream.h5", "plain.h5", "streams"])
def beside(web, request):
    """Return (proxy, open loader by its name) of all that may lie beside tokens."""
    folder, name = web.folder, request.param
    if name in ("lone.h5", "store"):
        write_documents(folder / name)
    else:
        paths = [folder / "streams" / f"{number}.h5" for number in range(2)] if name == "streams" else [folder / name]
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            with HDF5ShardWriter(path, chunk_tokens=64) as writer:
                for length in LENGTHS:
                    spans = [(0, 3, "a")] if length and name != "plain.h5" else ()
                    writer.write_document(np.arange(length), spans=spans)
        if name == "streams":
            index_files(paths).save(folder / name)
    batches = name in ("lone.h5", "store")
    shape = {"fields": tuple(FIELDS)} if batches else {"batch_size": 1, "seq_len": 16}
    spans = {} if name == "plain.h5" else {"spans": True}
    how = {"documents": ALL, "rank": 0, "world_size": 1, **spans, **shape}
    return web, lambda **options: Loader(f"{web.url}/{name}", **how, **options)


@pytest.mark.thin
def test_no_thread_waits_for_a_server_under_the_lock_of_hdf5(beside):
    proxy, open_loader = beside
    waits = []

    def look(number, method, name, span):
        is_free = phil.acquire(blocking=False)  # in a thread of the server: not for whoever holds it
        if is_free:
            phil.release()
        else:
            waits.append((name, span))

    proxy.fault = look
    with open_loader(prefetch=0) as loader:  # nobody else holds it
        list(loader)
    assert not waits


@pytest.mark.parametrize("is_copy", [False, True], ids=["loader", "copy"])
@pytest.mark.thin
def test_many_threads_fetch_what_lies_beside_the_tokens_once(beside, is_copy):
    proxy, open_loader = beside

    def requests(threads):
        loader = open_loader()
        if is_copy:  # as in a worker of a DataLoader: nothing is open
            loader, original = pickle.loads(pickle.dumps(loader)), loader
            original.close()
        with loader, ThreadPoolExecutor(threads) as pool:
            proxy.requests.clear()
            list(pool.map(loader.steps.read, range(8)))
        # not of the batches and their fields: each thread may read the few checksums that it needs first
        return Counter(found for _, found, _ in proxy.requests if not found.endswith(".h5"))

    alone = requests(1)
    proxy.fault = lambda *request: {"wait": 0.02}  # time for others to ask for the same
    assert requests(8) == alone


@pytest.mark.parametrize("beside", ["lone.h5", "store"], indirect=True)
@pytest.mark.thin
def test_threads_that_wait_for_a_table_share_the_error_of_the_one_that_fetches_it(beside, monkeypatch):
    proxy, open_loader = beside
    real = Batches.read_batch_pieces

    def failed_requests(threads):
        arrived = Barrier(threads)
        with open_loader() as loader, ThreadPoolExecutor(threads) as pool:
            proxy.requests.clear()
            proxy.fault = lambda number, method, name, span: (
                {"status": 500, "wait": 0.05} if name.endswith(".pieces") else None
            )
            with monkeypatch.context() as patch:
                patch.setattr(Batches, "read_batch_pieces", lambda *of: arrived.wait(60) >= 0 and real(*of))
                for read in [pool.submit(loader.steps.read, 0) for _ in range(threads)]:
                    assert isinstance(read.exception(), UnavailableError)
            found = [name for _, name, _ in proxy.requests if name.endswith(".pieces")]
            proxy.fault = lambda *request: None
            loader.steps.read(0)
        return len(found)

    alone = failed_requests(1)
    assert failed_requests(8) <= 2 * alone  # else each tries for minutes, one after the other


@pytest.mark.parametrize("write", [write_batches, write_streams])
@pytest.mark.parametrize("verify", ["auto", "batch"])
@pytest.mark.thin
def test_a_flipped_bit_of_an_object(write, verify, served, thinned):
    store, shape = write(served.folder)
    # windows of streams compare their fields with "batch" only
    ranges = tables_of(store) + (fields_of(store) if verify == "batch" or write is write_batches else [])
    found = flip_bits(ranges, lambda: steps_of(f"{served.url}/store", **shape, verify=verify), thinned(range(60), 10))
    assert found["refused"] > 0
    assert found["silent"] == 0, found
