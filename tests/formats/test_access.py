"""The accesses of a file: when bytes are read by position, and when the file is mapped."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from contract import random_tokens, read_records
from descriptors import is_mapped
from source_tokens import ALL, make_stream

from zb_hdf5 import ArgumentError, Loader, convert, open_corpus, open_reader
from zb_hdf5.files.file_systems import network_file_system
from zb_hdf5.store.rebuild import index_files

SHAPE = (32, 64)
BACKENDS = (("batch",), ("hdf5",), ("batch", "hdf5"))


def bytes_read():
    """Return how many bytes this process has read by system calls; a page of a mapping is not counted."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture(params=["uint32", "uint16"])
def tokens(request):
    return random_tokens(6, *SHAPE, request.param)


@pytest.fixture
def cuts():
    return (2, 4)


@pytest.fixture(params=BACKENDS, ids="-".join)
def backends(request):
    return request.param


CONVERSIONS = {
    "int64": lambda reader, i: reader.read_batch_torch(i).numpy(),
    "into int64": lambda reader, i: fill(reader, i, np.int64),
    "into stored": lambda reader, i: fill(reader, i, reader.dtype),
    "into signed": lambda reader, i: fill(reader, i, f"i{reader.dtype.itemsize}"),
}
MAPPINGS = {
    "view": lambda reader, i: reader[i],
    "record": lambda reader, i: np.stack([reader.read_record(i * SHAPE[0] + row) for row in range(SHAPE[0])]),
    "gather": lambda reader, i: read_records(reader, range(i * SHAPE[0], (i + 1) * SHAPE[0])),
}


def fill(reader, index, dtype):
    out = np.zeros(SHAPE, dtype)
    reader.read_into(index, out)
    return out


def narrow(reader, index):
    return reader.read_batch_int32(index).numpy()


def all_of(reader, read):
    found = np.stack([read(reader, index) for index in range(len(reader))])
    signed = np.dtype(f"i{reader.dtype.itemsize}")
    return found.view(reader.dtype) if found.dtype == signed else found


@pytest.mark.parametrize("verify", ["none", "auto", "batch"])
@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.thin
def test_a_lone_file_is_mapped_for_conversions_only_where_its_crc32_rows_are(
    name, verify, tokens, tmp_path, write_file
):
    path = write_file(tmp_path / "x.h5", tokens).path
    with open_reader(path, verify=verify) as reader:
        np.testing.assert_array_equal(all_of(reader, CONVERSIONS[name]), tokens)
        assert reader.fingerprint
        assert is_mapped(path) is (verify != "none")


def test_auto_maps_nothing_for_the_fingerprint_of_a_lone_file(tokens, tmp_path, write_file):
    path = write_file(tmp_path / "x.batch", tokens).path
    with open_reader(path) as reader, open_reader(path, access="mmap") as mapped:
        assert reader.fingerprint == mapped.fingerprint
        assert reader.fingerprint.startswith("sampled:")
    with Loader(path, rank=0, world_size=1):
        assert not is_mapped(path)


@pytest.mark.parametrize("read", [*MAPPINGS.values(), narrow])
@pytest.mark.thin
def test_auto_maps_at_the_first_call_that_needs_it(read, tokens, tmp_path, write_file):
    path = write_file(tmp_path / "x.batch", tokens).path
    with open_reader(path, verify="none") as reader:
        reader.read_batch_torch(0)
        assert not is_mapped(path)
        np.testing.assert_array_equal(all_of(reader, read), tokens)
        assert is_mapped(path) is (read is not narrow or tokens.itemsize == 4)  # uint16 is widened
        np.testing.assert_array_equal(reader.read_batch_torch(5).numpy(), tokens[5])
    assert not is_mapped(path)


@pytest.mark.parametrize("access", ["auto", "pread"])
@pytest.mark.parametrize("read", [*CONVERSIONS.values(), *MAPPINGS.values(), narrow])
@pytest.mark.thin
def test_auto_on_a_network_file_system_and_pread_map_nothing(access, read, store, tokens, monkeypatch, tmp_path):
    if access == "auto":
        monkeypatch.setattr("zb_hdf5.files.ranges.network_file_system", lambda file: "nfs")
    with open_reader(store, access=access) as reader:
        np.testing.assert_array_equal(all_of(reader, read), tokens)
        assert not is_mapped(store)
    np.save(tmp_path / "stream.npy", np.arange(100, dtype=np.uint16))
    with open_corpus(tmp_path / "stream.npy", access=access) as tokens:
        np.testing.assert_array_equal(tokens.tokens[10:20], np.arange(10, 20))
        assert not is_mapped(tmp_path)


def test_a_file_system_that_does_not_answer_is_no_local_one(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.close(descriptor)
    assert network_file_system(descriptor) == "unreachable"
    assert network_file_system(tmp_path / "missing") is None


@pytest.mark.parametrize(("access", "factor"), [("mmap", 0), ("auto", 1), ("pread", 1)])
@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.thin
def test_mmap_reads_nothing_by_system_calls(name, access, factor, tokens, tmp_path, write_file):
    path = write_file(tmp_path / "x.h5", tokens).path
    with open_reader(path, access=access) as reader:
        assert is_mapped(path) is (access == "mmap")
        before = bytes_read()
        counting = bytes_read() - before  # what the counting itself reads
        all_of(reader, CONVERSIONS[name])
        assert bytes_read() - before - 2 * counting == pytest.approx(factor * tokens.nbytes, abs=200)


def test_an_array_of_another_dtype_is_refused(store):
    with open_reader(store) as reader, pytest.raises(ArgumentError, match="expected an array of uint"):
        reader.tokens.read([(0, np.empty(64, np.uint64))])


def test_threads_that_map_at_once_share_one_private_mapping(tmp_path, write_file):
    path = write_file(tmp_path / "x.batch", random_tokens(2, *SHAPE, "uint32")).path
    for _ in range(20):
        with open_reader(path) as reader, ThreadPoolExecutor(4) as pool:
            ready = threading.Barrier(4)
            read = lambda _, ready=ready, reader=reader: ready.wait() >= 0 and reader.read_batch_int32(0)  # noqa: E731
            found = list(pool.map(read, range(4)))
            found[0][0, 0] = -7
            assert [int(batch[0, 0]) for batch in found] == [-7] * 4, "what one writes, all see"
            del found[:]


LENGTHS = [5, 17, 3, 8, 40, 1, 1, 22, 9, 30]
KINDS_WITH_DOCUMENTS = ("store", "lone", "stream", "stream store", "compressed")


@pytest.fixture(scope="module")
def with_documents(tmp_path_factory):
    """Return a folder with batches and streams that have documents, fields and spans, by their kinds."""
    folder = tmp_path_factory.mktemp("documents")
    stream = make_stream(folder / "stream.h5", LENGTHS)
    streams = folder / "streams"
    streams.mkdir()
    index_files([make_stream(streams / f"shard-{number:05}.h5", LENGTHS) for number in range(2)]).save(streams)
    size = {"batch_size": 3, "seq_len": 8, "pad_id": 0, "workers": 1, "shuffle": False, "packing": "concat"}
    convert(stream, "hdf5", folder / "store", shards=2, **size)
    convert(stream, "hdf5", folder / "compressed", codec="gzip", **size)
    convert(stream, "hdf5", folder / "lone.h5", **size)
    return {
        "store": folder / "store",
        "lone": folder / "lone.h5",
        "stream": stream,
        "stream store": streams,
        "compressed": folder / "compressed",
    }


@pytest.mark.parametrize("kind", KINDS_WITH_DOCUMENTS)
@pytest.mark.thin
def test_pread_maps_neither_tokens_nor_documents(kind, with_documents):
    path = with_documents[kind]

    def mapped():
        return {
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(path.parent) in line
        }

    def steps_of(access):
        how = {"batch_size": 3, "seq_len": 8, "rank": 0, "world_size": 1, "targets": True, "fields": ("number",)}
        with Loader(path, access=access, shuffle="records", documents=ALL, spans=True, **how) as loader:
            steps = list(loader)
            documents = loader.batches.corpus.documents
            facts = [each.facts for each in documents]
            assert loader.batches.corpus.document_table.token_count == int(documents.offsets[-1])
            return steps, facts, mapped()

    steps, facts, files = steps_of("pread")
    assert not files
    expected, known, _ = steps_of("auto")
    assert facts == known
    for found, step in zip(steps, expected, strict=True):
        assert found["spans"] == step["spans"]
        for name in ("tokens", "targets", "cu_seqlens", "documents", "span_index", "number"):
            np.testing.assert_array_equal(found[name], step[name])
    assert steps_of("auto")[2] or kind == "compressed"
