"""Token streams: written as documents, read as slices and windows, the same from HDF5 and from `.npy` files."""

import errno
import os
import pickle
from multiprocessing import get_context

import h5py
import numpy as np
import pytest
import torch
from commandline import run_zb
from contents import write_stream, write_streams
from contract import check_reader, is_refused
from damage import flip_stored
from descriptors import open_files
from hypothesis import given
from hypothesis import strategies as st
from interpreter import start_program
from interrupted import STREAM_WRITER, failing
from processes import running
from reading import ordered

from examples import examples
from zb_hdf5 import HDF5ShardWriter, Loader, MmapTokenStore, errors, open_corpus, open_reader, open_writer, verify_store
from zb_hdf5.compat import DatasetLoader, SlidingWindowDataloader
from zb_hdf5.formats.npy import NpyArrays
from zb_hdf5.loaders.order import SHUFFLES
from zb_hdf5.store.rebuild import index_files
from zb_hdf5.store.store_documents import StreamDocuments
from zb_hdf5.store.unchecked_file import open_chunks

TOKENS = np.random.default_rng(3).integers(0, 50_000, 5000)
LENGTHS = np.array([0, 7, 1, 300, 0, 1992, 2000, 700])  # of documents; they sum to 5000


def write(path, tokens=TOKENS, lengths=None, **options):
    return write_stream(path, tokens, lengths, **{"chunk_tokens": 256, "dtype": "uint16", **options})


def write_store(folder, parts, splits=(), **options):
    return write_streams(folder, parts, splits, **{"chunk_tokens": 256, "dtype": "uint16", **options})


def tokens_of(path, **options):
    with open_corpus(path, **options) as store:
        return np.array(store.tokens[0 : store.num_tokens])


def write_npy(folder, parts, dtype="<i8"):
    folder.mkdir()
    for number, tokens in enumerate(parts):
        np.save(folder / f"{number:03}.npy", np.asarray(tokens).astype(dtype))
    return folder


@pytest.fixture(params=["file", "store", "npy", "npy-folder", "gzip"])
def stream(request, tmp_path, gzip_copy):
    """The same 5,000 tokens in everything that a stream may be."""
    parts = np.split(TOKENS, [1, 700, 701, 3000])
    if request.param == "file":
        return write(tmp_path / "s.h5", TOKENS, LENGTHS).path
    if request.param == "store":
        return write_store(tmp_path / "store", parts)
    if request.param == "npy":
        np.save(tmp_path / "s.npy", TOKENS.astype(">u4"))
        return tmp_path / "s.npy"
    if request.param == "npy-folder":
        folder = write_npy(tmp_path / "folder", parts)
        (folder / "README.txt").write_text("no tokens")
        return folder
    return gzip_copy(write(tmp_path / "plain.h5").path, tmp_path / "s.h5")


# --- the writer ------------------------------------------------------------------------------------------------
def test_a_stream_file_is_what_every_hdf5_tool_reads(tmp_path):
    info = write(tmp_path / "s.h5", TOKENS, LENGTHS, boundary_token_id=7, vocab_size=50_257)
    assert (info.token_count, info.document_count, info.max_token) == (5000, 8, TOKENS.max())
    with h5py.File(tmp_path / "s.h5") as h5:
        stored = h5["tokens"]
        np.testing.assert_array_equal(stored[:], TOKENS)
        assert stored.chunks == (256,)
        assert stored.attrs["complete"] == 1
        assert stored.attrs["boundary_token_id"] == 7
        assert stored.attrs["token_count"] == 5000
        np.testing.assert_array_equal(h5["doc_offsets"][:], [0, *np.cumsum(LENGTHS)])
        assert len(h5["crc32"]) == 20


@examples(40)
@given(
    lengths=st.lists(st.integers(0, 90), max_size=12),
    chunk_tokens=st.sampled_from([7, 64, 256, 1000]),
    boundary=st.sampled_from([-1, 3]),
    data=st.data(),
)
def test_every_document_is_recovered(lengths, chunk_tokens, boundary, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("s") / "s.h5"
    documents = [TOKENS[data.draw(st.integers(0, 4000)) :][:length] for length in lengths]
    with HDF5ShardWriter(path, chunk_tokens=chunk_tokens, boundary_token_id=boundary) as writer:
        for document in documents:
            writer.write_document(document)
    end = [] if boundary < 0 else [boundary]
    with open_corpus(path) as store:
        assert store.document_count == len(documents)
        for number, document in enumerate(documents):
            np.testing.assert_array_equal(store.documents[number].ids, [*document, *end])
        whole = np.concatenate([np.empty(0, int), *[[*document, *end] for document in documents]])
        np.testing.assert_array_equal(store.tokens[0 : store.num_tokens], whole)
    assert [report.problem for report in verify_store(path)] == [None]


def test_the_pieces_in_which_tokens_come_do_not_matter(tmp_path):
    write(tmp_path / "a.h5", TOKENS, LENGTHS)
    with HDF5ShardWriter(tmp_path / "b.h5", chunk_tokens=256) as writer:
        for document in np.split(TOKENS, np.cumsum(LENGTHS)[:-1]):
            writer.write_document(document)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int8"])
def test_the_boundary_token_is_not_cut_to_the_dtype_of_a_document(dtype, tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", dtype="uint32", boundary_token_id=100_257) as writer:
        writer.write_document(np.array([1, 2], dtype))
        is_refused(errors.ArgumentError, lambda: writer.write_document(np.zeros((2, 2), dtype)), match="1-D")
    assert tokens_of(tmp_path / "s.h5").tolist() == [1, 2, 100_257]


def test_an_exception_publishes_nothing_and_closing_does_once(tmp_path):
    with pytest.raises(errors.ConvertError), HDF5ShardWriter(tmp_path / "s.h5") as writer:
        writer.write_document([*TOKENS, -1])
    assert list(tmp_path.iterdir()) == []
    writer = HDF5ShardWriter(tmp_path / "s.h5")
    writer.write_document(TOKENS)
    writer.close()
    writer.close()
    writer.abort()
    np.testing.assert_array_equal(tokens_of(tmp_path / "s.h5"), TOKENS)


def test_a_writer_that_failed_keeps_its_committed_chunks(tmp_path, monkeypatch):
    writer = HDF5ShardWriter(tmp_path / "s.h5", chunk_tokens=4)
    writer.write_documents(range(12), [4, 4, 4])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        is_refused(OSError, lambda: writer.write_documents(range(4), [4]), match="No space left")
    kept = r"the 3 chunks that were committed before it are in .*s\.h5\.partial"
    is_refused(errors.ConvertError, lambda: writer.write_document([1]), writer.close, match=kept)
    with open_chunks(tmp_path / "s.h5.partial") as reader:
        assert reader.num_tokens == 12
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_ids_that_are_there_twice_or_only_sometimes_are_refused(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5") as writer:
        writer.write_document([1, 2], id="a")
        for wrong in ({"id": "a"}, {}):
            with pytest.raises(errors.ConvertError, match="document 1: the "):
                writer.write_document([3], **wrong)
        writer.write_document([4], id="b")
    with open_corpus(tmp_path / "s.h5") as store:
        assert [store.documents[number].id for number in range(2)] == ["a", "b"]
        np.testing.assert_array_equal(store.tokens[0 : store.num_tokens], [1, 2, 4])
    with HDF5ShardWriter(tmp_path / "t.h5") as writer:
        writer.write_document([1])
        with pytest.raises(errors.ConvertError, match="document 1: the documents before it have no ids, found 'a'"):
            writer.write_document([2], id="a")


@pytest.mark.parametrize(("tokens", "lengths", "error"), [
    ([1, -1], [2], errors.ConvertError), ([1, 70_000], [2], errors.ConvertError), ([1, 99], [2], errors.ConvertError),
    ([1.5], [1], errors.ConvertError), ([[1, 2]], [2], errors.ArgumentError), ([1, 2], [1], errors.ArgumentError),
    ([1, 2], [3, -1], errors.ArgumentError),
])  # fmt: skip
def test_bad_tokens_are_refused_and_nothing_of_them_is_written(tokens, lengths, error, tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", vocab_size=99) as writer:
        is_refused(error, lambda: writer.write_documents(tokens, lengths))
        writer.write_document([5])
    np.testing.assert_array_equal(tokens_of(tmp_path / "s.h5"), [5])


@pytest.mark.parametrize("count", [1, 30, 500])
def test_a_killed_writer_keeps_its_committed_chunks(count, tmp_path):
    with running(start_program(STREAM_WRITER, tmp_path / "s.h5")) as process:
        written = [int(process.stdout.readline()) for _ in range(count)][-1]
        process.kill()
    assert not (tmp_path / "s.h5").exists()
    with open_corpus(tmp_path / "s.h5.partial") as store:
        assert store.num_tokens >= written // 512 * 512
        assert store.access == "h5py"
        np.testing.assert_array_equal(store.tokens[0 : store.num_tokens], np.arange(store.num_tokens) % 60000)
        for number in range(store.document_count):
            np.testing.assert_array_equal(
                store.documents[number].ids, np.arange(number * 100, number * 100 + 100) % 60000
            )
    result = run_zb("verify", tmp_path / "s.h5.partial")
    assert (result.exit_code, "has not finished" in result.stdout) == (4, True)


def test_documents_that_a_killed_writer_was_ahead_with_are_not_there(tmp_path):
    write(tmp_path / "s.h5", lengths=LENGTHS)
    with h5py.File(tmp_path / "s.h5", "r+") as h5:  # killed between its two counts of a commit
        for name, value in {"complete": 0, "token_count": 4500}.items():
            h5["tokens"].attrs.modify(name, value)
    with open_corpus(tmp_path / "s.h5") as store:
        assert store.document_count == len(store.documents) == 7
        assert store.doc_offsets.tolist() == store.documents.offsets.tolist() == np.cumsum([0, *LENGTHS[:7]]).tolist()
        assert store.documents.number_of([0, 4299, 4300]).tolist() == [1, 6, -1]
        assert store.documents[6].length == 2000
        is_refused(errors.BatchIndexError, lambda: store.documents[7].ids, match="it has 7")


@pytest.mark.parametrize("places", [[1, 7], [0, 60], [0, 3], [0, 1 << 63]])
def test_documents_that_do_not_lie_in_the_tokens_are_damage(places, tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.h5" for number in range(2)]
    for path in paths:
        write(path, np.arange(7))
    index_files(paths).save(tmp_path)
    with h5py.File(paths[0], "r+") as h5:
        h5["doc_offsets"][...] = places
    for few in (0, 10):
        monkeypatch.setattr("zb_hdf5.store.store_documents.FEW_DOCUMENTS", few)
        with open_reader(tmp_path, batch_size=1, seq_len=5) as reader:
            for read in (lambda: reader.read_pieces(np.arange(2)), lambda: reader.corpus.documents.offsets):
                is_refused(errors.FormatError, read, match=r"0\.h5: expected doc_offsets that ascend from 0 to 7")


@pytest.mark.slow
def test_a_full_disk_is_one_error(mount_disk):
    disk = mount_disk(4 << 10)
    is_refused(OSError, lambda: write(disk / "s.h5", np.tile(TOKENS, 1000)), match="No space left")
    assert list(disk.iterdir()) == []


# --- slices ----------------------------------------------------------------------------------------------------
def test_any_slice_is_that_of_the_array(stream):
    with open_corpus(stream) as store:
        assert (store.num_tokens, len(store)) == (5000, 5000)
        edges = (0, 1, 255, 257, 699, 700, 3001, 4999, 5000)
        for start, stop in ((start, stop) for start in edges for stop in edges if start <= stop):
            np.testing.assert_array_equal(store.tokens[start:stop], TOKENS[start:stop])
        for start, stop in [(-1, 3), (-3, None), (0, 5001), (6000, 7000), (4, 3), (None, -4990)]:
            np.testing.assert_array_equal(store.tokens[start:stop], TOKENS[start:stop])


@pytest.fixture(scope="module")
def three_shards(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("s") / "store", np.split(TOKENS, [9, 2000]))


@given(starts=st.lists(st.integers(0, 4900), min_size=1, max_size=20), length=st.integers(1, 100))
def test_any_windows_are_those_of_the_array(starts, length, three_shards):
    for access in ("mmap", "pread", "h5py"):
        with open_corpus(three_shards, access=access) as store:
            out = np.empty((len(starts), length), store.dtype)
            store.tokens.gather(np.array(starts), out)
            np.testing.assert_array_equal(out, [TOKENS[start : start + length] for start in starts])
            assert store.access == access


def test_a_store_of_many_files_keeps_few_of_them_open(tmp_path, monkeypatch):
    monkeypatch.setattr("zb_hdf5.files.paths.descriptor_room", lambda needed: 6)
    folder = write_npy(tmp_path / "folder", np.split(TOKENS, 50))
    with open_corpus(folder) as store:
        for _ in range(2):
            np.testing.assert_array_equal(store.tokens[0:5000], TOKENS)
        assert sum(name.endswith(".npy") for name in open_files().values()) <= 6  # a mapping has one too
    folder = write_store(tmp_path / "store", np.split(TOKENS, 25))
    counts = []
    opened = StreamDocuments.open
    monkeypatch.setattr(StreamDocuments, "open", lambda *args: counts.append(len(open_files())) or opened(*args))
    with open_corpus(folder) as store:
        assert store.doc_offsets[-1] == 5000
    assert max(counts) - counts[0] <= 6


@pytest.mark.thin
def test_a_store_survives_pickle_and_fork(stream):
    with open_corpus(stream) as store:
        np.testing.assert_array_equal(store.tokens[5:9], TOKENS[5:9])
        copy = pickle.loads(pickle.dumps(store))
        np.testing.assert_array_equal(copy.tokens[600:3100], TOKENS[600:3100])
        copy.close()
        with get_context("spawn").Pool(1) as pool:
            np.testing.assert_array_equal(pool.apply(store.tokens.__getitem__, (slice(600, 3100),)), TOKENS[600:3100])


def test_splits_are_read_apart(two_shards):
    np.testing.assert_array_equal(tokens_of(two_shards, split="val"), TOKENS[3000:])
    how = {"split": "val", "batch_size": 2, "seq_len": 10, "shuffle": "sequential", "rank": 0, "world_size": 1}
    with Loader(two_shards, **how) as loader:
        np.testing.assert_array_equal(next(iter(loader))[0], TOKENS[3000:3010])
    for path, split in ((two_shards, "test"), (two_shards / "shard-00000.h5", "val")):
        with pytest.raises(errors.ArgumentError, match="split"):
            open_corpus(path, split=split)


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros(3, "S1")])
def test_an_npy_file_of_another_kind_is_told(array, tmp_path):
    np.save(tmp_path / "a.npy", array)
    told = "expected an array of integers of one axis or two"
    is_refused(errors.ZbError, lambda: open_corpus(tmp_path / "a.npy"), match=told)
    for path in (tmp_path, tmp_path / "a.npy"):
        is_refused(errors.ZbError, lambda path=path: Loader(path), match=told)


def test_records_of_an_npy_file_are_no_stream(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 3), int))
    is_refused(errors.FormatError, lambda: MmapTokenStore(tmp_path / "a.npy"), match="expected a token stream, found b")
    with open_corpus(tmp_path / "a.npy") as corpus:
        assert (corpus.is_stream, corpus.windows) == (False, (1, 3, 3))


# --- windows as a reader ---------------------------------------------------------------------------------------
def test_overlapping_windows_are_slices(stream):
    with open_reader(stream, batch_size=3, seq_len=70, overlap=1) as reader:
        assert reader.num_batches == 4999 // 210
        assert reader.dropped_tokens == 4999 - reader.num_batches * 210
        assert reader.meta.shape == (3, 71)
        for number in (0, 7, reader.num_batches - 1):
            expected = [TOKENS[first : first + 71] for first in range(number * 210, number * 210 + 210, 70)]
            np.testing.assert_array_equal(reader.read_batch(number), expected)
            assert reader.read_batch_torch(number).dtype == torch.int64
        assert not reader.read_batch(0).flags.writeable


def test_windows_of_one_stream_are_one_dataset_in_every_form(tmp_path):
    """The same tokens in HDF5 and in a `.npy` file: the order and the batches are the same."""
    write(tmp_path / "s.h5")
    np.save(tmp_path / "s.npy", TOKENS)
    found = []
    for path in (tmp_path / "s.h5", tmp_path / "s.npy"):
        with Loader(path, batch_size=4, seq_len=16, seed=5, rank=0, world_size=1, targets=True) as loader:
            found.append([(x.numpy(), y.numpy()) for x, y in loader])
    np.testing.assert_array_equal(found[0], found[1])
    assert len(found[0]) == 4999 // 64
    starts = sorted(int(x[0, 0]) for x, _ in found[0])
    assert starts == sorted(TOKENS[k * 64] for k in range(len(found[0])))


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("targets", [False, True])
@pytest.mark.thin
def test_a_state_of_windows_fits_another_batch_size(shuffle, targets, tmp_path):
    """As one of batches does: this epoch and the next go on in the order of the batches of the first run."""
    write(tmp_path / "s.h5")

    def rows_of(batches):
        return [row.tolist() for batch in batches for row in (batch[0] if targets else batch)]

    def loader(batch_size, **options):
        options = {"rank": 0, "world_size": 1, "shuffle": ordered(shuffle, 5), "targets": targets, **options}
        return Loader(tmp_path / "s.h5", batch_size=batch_size, seq_len=16, **options)

    with loader(4) as alone:
        expected = [rows_of(alone)]
        alone.set_epoch(1)
        expected.append(rows_of(alone))
    assert len(expected[0]) == 5000 // 64 * 4
    with loader(4) as first:
        steps = iter(first)
        found = rows_of(next(steps) for _ in range(5))
        state = first.state_dict()
        steps.close()
    for batch_size in (1, 3, 4, 7):
        with loader(batch_size, drop_last=False) as resumed:
            before = resumed.state_dict()
            for broken in ({"position": 10**6}, {"seed": 7}, {"epoch": None}):
                is_refused(errors.StateError, lambda broken=broken: resumed.load_state_dict({**state, **broken}))
            assert resumed.state_dict() == before  # nothing was taken over
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            rest = rows_of(resumed)
            assert (found + rest)[: len(expected[0])] == expected[0]
            assert len(found + rest) - len(expected[0]) < batch_size
            resumed.set_epoch(1)
            assert rows_of(resumed)[: len(expected[1])] == expected[1]
            again = resumed.state_dict()
        with loader(2) as third:
            third.load_state_dict(again)
            assert third.state_dict() == again


def test_a_stream_needs_a_shape_and_a_store_has_one(tmp_path, tokens, write_file):
    write(tmp_path / "s.h5")
    np.save(tmp_path / "s.npy", TOKENS)
    for path in (tmp_path / "s.h5", tmp_path / "s.npy"):
        is_refused(errors.ZbError, lambda path=path: open_reader(path), match="pass batch_size and seq_len")
    with pytest.raises(errors.ArgumentError, match="do not fill one batch"):
        open_reader(tmp_path / "s.h5", batch_size=100, seq_len=51)
    with pytest.raises(errors.ArgumentError, match="5,000 tokens do not fill one batch of 1 x 5,000 and 1 more"):
        Loader(tmp_path / "s.h5", batch_size=1, seq_len=5000, targets=True)
    write_file(tmp_path / "b.h5", tokens)
    with pytest.raises(errors.ArgumentError, match="not a token stream"):
        open_reader(tmp_path / "b.h5", batch_size=1, seq_len=5)
    with open_reader(tmp_path / "s.h5", batch_size=1, seq_len=5, overlap=1) as reader:
        short = np.empty((1, 3), reader.dtype)
        is_refused(errors.ArgumentError, lambda: reader.read_records_into(np.array([0]), short))


def test_ids_that_no_model_has_are_told_when_they_are_met(tmp_path):
    np.save(tmp_path / "s.npy", np.array([1, 2, 3, -1, 5, 6]))
    with open_reader(tmp_path / "s.npy", batch_size=1, seq_len=2) as reader:
        np.testing.assert_array_equal(reader.read_batch(0), [[1, 2]])
        is_refused(errors.ConvertError, lambda: reader.read_batch(1), match="-1")


def test_each_difference_gives_another_fingerprint(tmp_path):
    folder = write_npy(tmp_path / "folder", np.split(TOKENS, 20))
    seen = set()
    for shape in ((2, 8, 1), (2, 9, 0), (3, 8, 1), (2, 8, 0)):
        with open_reader(folder, batch_size=shape[0], seq_len=shape[1], overlap=shape[2]) as reader:
            seen.add(reader.fingerprint)
    assert len(seen) == 4
    for number in range(20):  # each file counts, also where the others stay
        tokens = np.load(folder / f"{number:03}.npy")
        np.save(folder / f"{number:03}.npy", tokens + 1)
        with open_reader(folder, batch_size=2, seq_len=8) as reader:
            seen.add(reader.fingerprint)
    assert len(seen) == 24


def test_a_fingerprint_opens_some_of_many_files_and_counts_the_tokens_of_all(tmp_path, monkeypatch):
    folder = write_npy(tmp_path / "folder", [np.full(20 + number % 3, number) for number in range(500)])
    opened, real = [], NpyArrays.open
    monkeypatch.setattr(NpyArrays, "open", lambda self, found, *a: opened.append(found.path) or real(self, found, *a))
    with open_corpus(folder) as store:
        first = store.fingerprint
        assert {folder / "000.npy", folder / "499.npy"} <= set(opened)
        assert len(opened) <= 100
    np.save(folder / "251.npy", np.full(40, 251))  # another size, in a file that is not looked into
    with open_corpus(folder) as store:
        assert store.fingerprint != first


@pytest.mark.parametrize("backend", ["batch", "hdf5"])
def test_a_backend_that_was_named_is_never_replaced(backend, tmp_path):
    folder = write_npy(tmp_path / "folder", [TOKENS])
    with pytest.raises(errors.BackendError, match="found a 'npy' stream"):
        open_reader(folder, backend=backend, batch_size=2, seq_len=8)
    for verify, message in (("store", "hold no digests"), ("batch", "no digest is stored with it")):
        with pytest.raises(errors.UnverifiableError, match=message):
            open_reader(folder, batch_size=2, seq_len=8, verify=verify)


# --- the loaders of the seeds ----------------------------------------------------------------------------------
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_ranks_take_turns_across_files_and_wrap_for_ever(num_processes, tmp_path):
    folder = write_npy(tmp_path / "data", np.split(TOKENS, [10, 333, 2000]), "<u2")
    (folder / "notes.txt").write_text("not tokens")
    loaders = [DatasetLoader(2, 50, rank, num_processes, folder) for rank in range(num_processes)]
    steps = 4999 // 100 // num_processes
    for step in range(2 * steps + 3):
        for rank, loader in enumerate(loaders):
            x, y = loader.get_batch()
            first = ((step % steps) * num_processes + rank) * 100
            np.testing.assert_array_equal(x.flatten(), TOKENS[first : first + 100])
            np.testing.assert_array_equal(y.flatten(), TOKENS[first + 1 : first + 101])
    for loader in loaders:
        loader.close()


def test_too_few_tokens_and_windows_that_cannot_be_are_refused(tmp_path, three_shards):
    folder = write_npy(tmp_path / "few", [TOKENS[:10]])
    is_refused(errors.ArgumentError, lambda: DatasetLoader(2, 5, 0, 1, folder))
    (tmp_path / "empty").mkdir()
    is_refused(errors.FormatError, lambda: DatasetLoader(2, 5, 0, 1, tmp_path / "empty"), match=r"no \.npy files")
    with open_corpus(three_shards) as store:
        for window, options in ((5000, {}), (10, {"order": "sorted"})):
            with pytest.raises(errors.ArgumentError):
                SlidingWindowDataloader(store, window, 1, **options)


def test_sliding_windows_cover_an_epoch_once(stream):
    with open_corpus(stream) as store:
        batches = list(SlidingWindowDataloader(store, 33, 4, seed=9))
        assert len(batches) == len(SlidingWindowDataloader(store, 33, 4)) == 4999 // 33 // 4
        for inputs, targets in batches:
            assert inputs.shape == targets.shape == (4, 33)
            np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
        starts = [tuple(row) for inputs, _ in batches for row in inputs]
        every = {tuple(TOKENS[k * 33 : k * 33 + 33]) for k in range(4999 // 33)}
        assert len(set(starts)) == len(starts)
        assert set(starts) <= every
        again = [inputs for inputs, _ in SlidingWindowDataloader(store, 33, 4, seed=9)]
        np.testing.assert_array_equal(again, [inputs for inputs, _ in batches])
        other = [inputs for inputs, _ in SlidingWindowDataloader(store, 33, 4, seed=9, epoch=1)]
        assert not np.array_equal(other, again)


# --- verify, info, damage --------------------------------------------------------------------------------------
@pytest.fixture
def two_shards(tmp_path):
    """A store of 3,000 tokens to train with, and 2,000 to validate."""
    return write_store(tmp_path / "store", np.split(TOKENS, [3000]), ("train", "val"))


def test_verify_finds_the_first_bad_chunk_of_each_split_alone(two_shards):
    shard = two_shards / "shard-00001.h5"
    assert run_zb("verify", two_shards).exit_code == 0
    flip_stored(shard, TOKENS[3600:3650].astype("<u2"))
    result = run_zb("verify", two_shards)
    assert result.exit_code == 3
    assert "chunk 2 is the first bad one" in result.stdout
    assert [report.outcome for report in verify_store(two_shards, split="train")] == ["verified"]
    assert [report.outcome for report in verify_store(two_shards, split="val")] == ["bad"]
    is_refused(errors.ArgumentError, lambda: verify_store(two_shards, split="test"), match="split")
    open_reader(two_shards, batch_size=2, seq_len=9, split="train", verify="store").close()
    for split in ("val", None):
        with pytest.raises(errors.ZbError, match="chunk 2"):
            open_reader(two_shards, batch_size=2, seq_len=9, split=split, verify="store")


def test_a_stream_that_asks_for_all_digests_gets_them(two_shards):
    with open_corpus(two_shards, verify="store") as store:
        assert store.verified == "store"
    flip_stored(two_shards / "shard-00001.h5", TOKENS[3600:3650].astype("<u2"))
    with open_corpus(two_shards, verify="store", split="train") as store:
        assert len(store) == 3000
    for split in (None, "val"):
        with pytest.raises(errors.ChecksumError, match=r"shard-00001.h5: chunk 2 is the first bad one"):
            open_corpus(two_shards, verify="store", split=split)
    for wrong in ({"verify": "all"}, {"access": "disk"}):
        with pytest.raises(errors.ArgumentError, match=f"{next(iter(wrong))} must be one of"):
            open_corpus(two_shards, **wrong)


@pytest.mark.parametrize("name", ["crc32", "doc_offsets"])
def test_rows_that_are_missing_are_damage_as_in_a_file_of_batches(name, tmp_path):
    write(tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5", "a") as h5:
        del h5[name]
    problem = verify_store(tmp_path / "s.h5")[0].problem
    assert (type(problem), problem.exit_code) == (errors.FormatError, 1)
    assert f"expected a dataset '{name}' of " in str(problem)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.thin
def test_a_flipped_bit_is_found_or_changes_nothing(seed, tmp_path):
    write(tmp_path / "s.h5", TOKENS, LENGTHS)
    data = bytearray((tmp_path / "s.h5").read_bytes())
    used = np.flatnonzero(np.frombuffer(data, np.uint8))  # the holes between metadata and tokens hold nothing
    at = int(np.random.default_rng(seed).choice(used))
    data[at] ^= 1 << seed % 8
    (tmp_path / "s.h5").write_bytes(data)
    try:
        problem = verify_store(tmp_path / "s.h5")[0].problem
    except errors.ZbError as error:
        problem = error
    if problem is None:
        with open_corpus(tmp_path / "s.h5") as store:
            np.testing.assert_array_equal(store.tokens[0:5000], TOKENS)
            np.testing.assert_array_equal(store.doc_offsets, [0, *np.cumsum(LENGTHS)])


@pytest.mark.thin
def test_the_window_reader_obeys_the_contract(stream):
    with open_reader(stream, batch_size=2, seq_len=100) as reader:
        assert (reader.num_batches, reader.dropped_tokens) == (25, 0)
        expected = TOKENS[: reader.num_batches * 200].reshape(-1, 2, 100).astype(reader.dtype)
        check_reader(reader, expected)


def test_a_store_is_read_where_its_index_says_and_hdf5_is_not_asked(tmp_path, monkeypatch):
    folder = write_store(tmp_path / "store", np.split(TOKENS, [3000]))
    for access in ("auto", "mmap", "pread"):
        with monkeypatch.context() as patch:
            patch.setattr("zb_hdf5.formats.inspection.find_column", None)
            with open_corpus(folder, access=access) as store:
                for start in (4999, 2990):  # the last chunk of a shard holds fewer tokens
                    np.testing.assert_array_equal(store.tokens[start:5000], TOKENS[start:])
                again = pickle.loads(pickle.dumps(store))
            with again:
                np.testing.assert_array_equal(again.tokens[0:5000], TOKENS)


@pytest.mark.parametrize("access", ["auto", "h5py"])
def test_a_shard_of_other_tokens_or_a_damaged_chunk_is_told_at_the_first_read(access, tmp_path):
    folder = write_store(tmp_path / "store", np.split(TOKENS, [3000]))
    (folder / "shard-00001.h5").unlink()
    write(folder / "shard-00001.h5", TOKENS[:10])
    with open_corpus(folder, access=access) as store:
        is_refused(errors.FormatError, lambda: store.tokens[0:5000], match="its index has num_batches 8,")
    (folder / "shard-00001.h5").unlink()
    is_refused(errors.FormatError, lambda: open_corpus(folder), match="not there")
    write(folder / "shard-00001.h5", TOKENS[3000:] + 1)
    with h5py.File(folder / "shard-00000.h5", "r+") as h5:
        h5["tokens"][2900] += 1
    with open_corpus(folder, access=access) as store:
        with pytest.raises(errors.ChecksumError, match=r"shard-00000\.h5: chunk 11: expected crc32"):
            store.tokens[2817:2818]
        with pytest.raises(errors.FormatError, match=r"shard-00001\.h5: its index has sha256"):
            store.tokens[3000:5000]
        np.testing.assert_array_equal(store.tokens[0:2816], TOKENS[:2816])  # of a chunk that is whole


@examples(20)
@given(data=st.data())
def test_a_stream_in_several_runs_is_read_as_in_one(data, tmp_path_factory):
    """Its length was not known: between runs of chunks lie tables. Mapped side by side they are as one array."""
    folder = tmp_path_factory.mktemp("runs")
    rng, count = np.random.default_rng(data.draw(st.integers(0, 99))), data.draw(st.integers(150_000, 200_000))
    tokens = rng.integers(0, 60_000, count)
    with HDF5ShardWriter(folder / "s.h5", chunk_tokens=2048) as writer:
        for part in np.split(tokens, [5000, 40_000, 90_000]):
            writer.write_documents(part, [1] * len(part))
    with open_corpus(folder / "s.h5") as mapped, open_corpus(folder / "s.h5", access="pread") as slow:
        assert len(mapped.tokens.files.open(0, 0).extents.runs) > 1
        assert mapped.tokens.pages.are_ready([0]), "it was written just now"
        assert mapped.tokens.flat() is not None
        assert slow.tokens.flat() is None
        np.testing.assert_array_equal(mapped.tokens[0 : len(tokens)], tokens)
        length = data.draw(st.sampled_from([1, 512, 513, 2048, 50_000]))
        starts = np.array(data.draw(st.lists(st.integers(0, len(tokens) - length), min_size=1, max_size=40)))
        for store in (mapped, slow, pickle.loads(pickle.dumps(mapped))):
            out = np.empty((len(starts), length), "<u2")
            store.tokens.gather(starts, out)
            np.testing.assert_array_equal(out, tokens[starts[:, None] + np.arange(length)])
            start = int(starts[0])
            np.testing.assert_array_equal(store.tokens[start : start + length], tokens[start : start + length])


def test_a_stream_in_several_runs_that_was_cut_short_is_an_error(tmp_path):
    write(tmp_path / "s.h5", np.arange(120_000) % 60_000, [1] * 120_000, chunk_tokens=2048)
    with open_corpus(tmp_path / "s.h5") as store:
        assert len(store.tokens.files.open(0, 0).extents.runs) > 1
        store.tokens[0:10]
        os.truncate(tmp_path / "s.h5", (tmp_path / "s.h5").stat().st_size - 4096)
        is_refused(errors.IncompleteError, lambda: store.tokens[0:10], match="cut short")


@pytest.mark.parametrize("name", ["stream.h5", "stream.npy", "folder"])
def test_hints_name_the_bytes_that_will_be_read(name, tmp_path, monkeypatch):
    tokens = np.arange(40_000, dtype=np.uint16)
    if name == "stream.npy":
        np.save(tmp_path / name, tokens)
    elif name == "stream.h5":
        write_stream(tmp_path / name, tokens, chunk_tokens=4096)
    else:
        write_npy(tmp_path / name, np.split(tokens, [15_000]), "<u2")
    hinted = []

    def hear(fd, offset, length, advice):
        hinted.append(np.frombuffer(os.pread(fd, length, offset), np.uint16))

    monkeypatch.setattr(os, "posix_fadvise", hear)
    with open_reader(tmp_path / name, batch_size=8, seq_len=128, overlap=1) as reader:
        for index, count in ((0, 1), (14, 3), (reader.num_batches - 1, 1)):
            hinted.clear()
            reader.will_need(index, count)
            first = index * 1024
            np.testing.assert_array_equal(np.concatenate(hinted), tokens[first : first + count * 1024 + 1])


def test_batches_with_padding_between_them_are_announced_together(tmp_path, monkeypatch):
    with open_writer(tmp_path / "x.batch", batch_size=4, seq_len=1000) as writer:
        writer.write(np.zeros((20, 4, 1000), np.uint32))
    announced = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: announced.append((offset, length)))
    with open_reader(tmp_path / "x.batch") as reader:
        reader.will_need(2, 16)
        assert announced == [(4096 + 2 * reader.meta.padded_batch_bytes, 15 * reader.meta.padded_batch_bytes + 16_000)]
