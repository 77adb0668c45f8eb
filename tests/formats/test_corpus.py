"""Corpora: what a path holds, its documents and splits, and the loaders over it."""

import multiprocessing
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice

import h5py
import numpy as np
import pytest
from commandline import report_of
from contract import is_refused
from modules import FILES, ROOT

from zb_hdf5 import (
    ArgumentError,
    BackendError,
    BatchIndexError,
    ClosedError,
    DocumentLoader,
    FormatError,
    HDF5ShardWriter,
    Loader,
    StateError,
    UnverifiableError,
    convert,
    made_up_corpus,
    open_corpus,
    open_reader,
    open_writer,
)
from zb_hdf5.commands.zb import zb
from zb_hdf5.files.checked import VERIFIED
from zb_hdf5.formats.access import VERIFIES
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.spec import crc32_path
from zb_hdf5.store.cache import column_of
from zb_hdf5.store.format_list import FORMATS, load_format

DOCUMENTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
IDS = [token for each in DOCUMENTS for token in (*each, 0)]


@pytest.fixture
def stream(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", dtype="uint16", boundary_token_id=0, fields={"mask": "u1"}) as writer:
        for number, ids in enumerate(DOCUMENTS):
            writer.write_document(
                ids, id=f"d{number}", metadata={"n": number}, spans=[(0, 1, number)], fields={"mask": [1] * len(ids)}
            )
    return tmp_path / "s.h5"


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f'{{"text": "{"abcdefgh" * (number + 1)}"}}\n' for number in range(40)))
    return path


def test_a_stream_is_its_tokens_its_documents_and_its_fields(stream):
    with open_corpus(stream) as corpus:
        assert (len(corpus), corpus.is_stream, corpus.windows) == (len(IDS), True, None)
        assert corpus.tokens[2:6].tolist() == IDS[2:6]
        assert corpus.tokens[-3:].tolist() == IDS[-3:]
        assert corpus.tokens[5:5].tolist() == corpus.tokens[6:2].tolist() == []
        assert [each.ids.tolist() for each in corpus.documents] == [[*each, 0] for each in DOCUMENTS]
        assert [each.id for each in corpus.documents[1:3]] == ["d1", "d2"]
        last = corpus.documents[-1]
        assert (last.number, last.length, last.metadata, last.source) == (3, 5, {"n": 3}, None)
        assert last.field("mask").tolist() == [1, 1, 1, 1, 0]
        spans = last.spans()
        assert (spans.starts.tolist(), spans.stops.tolist(), spans.values) == ([0], [1], [3])
        assert corpus.documents.number_of([0, 4, 6]).tolist() == [0, 1, 1]
        assert corpus.field("mask").tokens[:4].tolist() == [1, 1, 1, 0]


def test_a_document_is_its_corpus_and_its_number(stream, monkeypatch):
    with open_corpus(stream) as corpus, open_corpus(stream) as another:
        first, second = corpus.documents[:2]
        with monkeypatch.context() as patched:
            patched.setattr(corpus, "tokens", None)  # none is read for it
            assert first == corpus.documents[0] == corpus.documents[-len(DOCUMENTS)]
            assert first not in (second, another.documents[0], first.facts)
            assert {first, corpus.documents[0], second} == {first, second}
            assert corpus.documents.index(second) == 1
        one, same = pickle.loads(pickle.dumps([first, corpus.documents[0]]))
        assert one == same


def test_a_file_of_a_stream_is_a_document_and_records_have_none(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("a", "b"):
        np.save(tmp_path / "folder" / f"{name}.npy", np.arange(8, dtype=np.uint16))
    with open_corpus(tmp_path / "folder") as corpus, open_corpus(tmp_path / "folder" / "a.npy") as lone:
        assert (corpus.document_count, len(corpus.documents)) == (2, 2)
        assert [each.ids.tolist() for each in corpus.documents] == [[*range(8)]] * 2
        assert repr(lone.documents).endswith("a.npy', 1 document)")
        with DocumentLoader(corpus, collate="pad", batch_size=2, rank=0, world_size=1) as loader:
            assert next(loader)["tokens"].tolist() == [[*range(8)]] * 2
    np.save(tmp_path / "rows.npy", np.arange(64, dtype=np.uint16).reshape(8, 8))
    convert(tmp_path / "rows.npy", "hdf5", tmp_path / "store", batch_size=2, shards=2, workers=1)
    for path in ("rows.npy", "store"):
        with open_corpus(tmp_path / path) as records:
            assert (records.documents, records.document_count) == (None, 0)


def test_a_corpus_is_compared_with_another_corpus_alone(stream, tmp_path):
    ids = np.arange(2**18, dtype=np.uint32) % 2**16
    others = ids.astype(np.uint16)
    others[10_000] = 7  # between two places of the sample
    for name, each in {"a": ids.astype(np.uint16), "b": others, "c": ids}.items():
        np.save(tmp_path / f"{name}.npy", each)
    with open_corpus(tmp_path / "a.npy") as corpus, open_corpus(tmp_path / "b.npy") as other:
        assert corpus.fingerprint.startswith("sampled:")
        assert corpus.same_as(other)  # as the docstring tells of a sample
        with open_corpus(tmp_path / "c.npy") as wide:
            assert not corpus.same_as(wide)  # and of the same tokens
        for wrong in ("a.npy", None, corpus.batches(1, 4)):
            match = r"a\.npy: other must be a corpus, such as open_corpus\(path\) returns, found "
            is_refused(ArgumentError, lambda wrong=wrong: corpus.same_as(wrong), match=match)


def test_wrong_positions_and_documents_are_named(stream):
    with open_corpus(stream) as corpus:
        with pytest.raises(BatchIndexError, match="no document 4: it has 4, counted from 0"):
            _ = corpus.documents[np.int64(4)]
        with pytest.raises(ArgumentError, match="expected a slice of tokens without a step"):
            _ = corpus.tokens[::2]
        with pytest.raises(ArgumentError, match="expected a slice of tokens without a step"):
            _ = corpus.tokens[3]
        with pytest.raises(ArgumentError, match="pass batch_size and seq_len"):
            corpus.batches()
        with pytest.raises(ArgumentError, match="stride must be 1 to 4"):
            corpus.batches(1, 4, 5)


def test_batches_of_a_stream_have_any_stride(stream):
    with open_corpus(stream) as corpus:
        batches = corpus.batches(1, 4, 3)
        assert [batch[0].tolist() for batch in batches] == [IDS[start : start + 4] for start in (0, 3, 6, 9)]
        with open_reader(stream, batch_size=1, seq_len=3, overlap=1) as reader:
            assert reader.fingerprint == batches.fingerprint


def facts_of(documents, number):
    """Return all that is read of a document: its ids, metadata, spans and a field."""
    found = documents[number]
    return found.id, found.ids.tolist(), found.metadata, found.spans().values, found.field("mask").tolist()


def facts_in_a_fork(documents, results):
    """Put the facts of all documents as a fork reads them, which were open before."""
    results.put([facts_of(documents, number) for number in range(len(documents))])


def test_documents_are_read_by_threads_and_by_a_fork(stream):
    numbers = np.random.default_rng(5).integers(0, len(DOCUMENTS), 400).tolist()
    with open_corpus(stream) as corpus, open_corpus(stream) as alone:
        expected = [facts_of(alone.documents, number) for number in range(len(DOCUMENTS))]
        documents = corpus.documents  # nothing of them is read yet
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(partial(facts_of, documents), numbers))
        assert found == [expected[number] for number in numbers]
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=facts_in_a_fork, args=(documents, results))
        child.start()
        assert results.get(timeout=60) == expected
        child.join()


@pytest.mark.parametrize("backend", ["batch", "hdf5"])
@pytest.mark.parametrize("verify", VERIFIES)
def test_a_corpus_that_is_verified_is_another_one(backend, verify, tmp_path):
    path = tmp_path / f"lone{FORMATS[backend].suffix}"
    with open_writer(path, batch_size=2, seq_len=8, dtype="uint16") as writer:
        writer.write(np.arange(64).reshape(4, 2, 8))
    corpus = load_format(FORMATS[backend]).open(FoundFile(path=path, verify="none"))
    before = dict(vars(corpus))
    with corpus.with_verify(verify) as found:
        assert (found.verify, found.verified) == (verify, VERIFIED[verify])
        assert found.batches()[3].tolist() == np.arange(48, 64).reshape(2, 8).tolist()
        assert vars(corpus) == before
        assert (corpus.verify, corpus.verified) == ("none", "none")


def test_a_corpus_that_nothing_proves_is_closed(tmp_path):
    path = tmp_path / "lone.batch"
    with open_writer(path, batch_size=2, seq_len=8, dtype="uint16") as writer:
        writer.write(np.arange(64).reshape(4, 2, 8))
    crc32_path(path).unlink()
    corpus = load_format(FORMATS["batch"]).open(FoundFile(path=path))
    with pytest.raises(UnverifiableError, match=r"lone\.batch\.crc32 is missing"):
        corpus.with_verify("batch")
    with pytest.raises(ClosedError):
        _ = corpus.tokens[:1]


def test_a_pickled_corpus_reads_the_same(stream):
    with open_corpus(stream, access="pread") as corpus:
        copy = pickle.loads(pickle.dumps(corpus))
        document = pickle.loads(pickle.dumps(corpus.documents[1]))
        assert copy.tokens[:].tolist() == IDS
        assert document.ids.tolist() == [4, 5, 0]
        assert copy.same_as(corpus)
        assert copy != corpus
        copy.close()


def test_a_pickled_corpus_has_no_more_than_it_needs(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4096, dtype=np.uint16).reshape(-1, 32))
    convert(tmp_path / "x.npy", "hdf5", tmp_path / "out", batch_size=8)
    with open_reader(tmp_path / "out") as reader:
        first = reader[0].tolist()
        state = reader.corpus.__getstate__()
        assert not [name for name, value in state.items() if value is None or value in ({}, [])]
        small = len(pickle.dumps(reader)) - 2 * len(str(tmp_path))
        with pickle.loads(pickle.dumps(reader)) as other:
            assert other[0].tolist() == first
            assert (other.corpus.origin, other.corpus.columns) == (reader.corpus.origin, reader.corpus.columns)
            assert vars(other.corpus).keys() >= {"_fields", "_other_fields", "_sets", "_changing"}
    assert small < 1950  # bytes, of which 1,000 are the index


#: The path of a reader -> the bytes that it was pickled in before corpora had a class of their own.
PICKLED = {"pair": 2013, "s.h5": 1992, "npy": 2135, "o.h5": 922}


@pytest.mark.parametrize("name", PICKLED)
def test_a_pickled_reader_is_no_larger_than_one_without_a_corpus(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "pair":
        for suffix in (".bin", ".idx"):
            shutil.copy(ROOT / f"tests/data/trainers/megatron/int32/corpus_text_document{suffix}", f"pair{suffix}")
    elif name == "npy":
        (tmp_path / "npy").mkdir()
        for number in range(3):
            np.save(tmp_path / "npy" / f"{number}.npy", np.arange(500, dtype=np.uint16))
    elif name == "s.h5":
        with HDF5ShardWriter("s.h5", dtype="uint16") as writer:
            writer.write_documents(np.arange(96), [48, 48])
            writer.finish()
    else:
        with h5py.File("o.h5", "w") as h5:
            h5["tokens"] = np.arange(4096, dtype=np.uint16).reshape(-1, 16)
    shape = {} if name == "o.h5" else {"batch_size": 2, "seq_len": 4}
    with open_reader(name, **shape) as reader:
        pickled = pickle.dumps(reader)
        with pickle.loads(pickled) as other:
            assert (other.meta, other.fingerprint) == (reader.meta, reader.fingerprint)
            assert [*map(repr, (other, other.corpus))] == [*map(repr, (reader, reader.corpus))]
            np.testing.assert_array_equal(other[-1], reader[-1])
            assert other.corpus.opened.how == reader.corpus.opened.how
    assert len(pickled) <= PICKLED[name]


def test_a_pickled_corpus_is_opened_again_as_it_was(texts, tmp_path):
    convert(texts, "hdf5", tmp_path / "out", tokenizer="byte", val_fraction=0.3, batch_size=2, seq_len=64)
    with open_corpus(tmp_path / "out", access="pread", verify="batch", split="train") as corpus:
        copy = pickle.loads(pickle.dumps(corpus))
        assert copy.opened.how == corpus.opened.how
        assert (copy.access, copy.verify, copy.complete) == ("pread", "batch", True)
        assert copy.index.table == corpus.index.table
        assert copy.index.table.values["token_count"].flags.writeable
        with copy.split("val") as held_out:
            assert (held_out.access, held_out.file_splits) == ("pread", ["val"])
        copy.close()


def test_the_tokens_of_packed_documents_are_refused_with_their_stream(texts, tmp_path):
    convert(texts, "hdf5", tmp_path / "packed", tokenizer="byte", batch_size=2, seq_len=64)
    with open_corpus(tmp_path / "packed") as corpus:
        assert not corpus.is_stream
        found = corpus.documents[3]
        assert (found.row, found.length) == (4, 33)
        with pytest.raises(BackendError, match="was packed into rows, where its tokens lie in pieces"):
            _ = found.ids
        with pytest.raises(ArgumentError, match=r"expected seq_len=64, as its batches are stored, found 32"):
            corpus.batches(seq_len=32)


@pytest.mark.parametrize("packed", ["packed", "packed.h5"])
def test_rows_name_the_stream_that_they_were_packed_from_and_nothing_else(packed, stream, texts, tmp_path):
    convert(stream, "hdf5", tmp_path / packed, batch_size=1, seq_len=8)
    convert(texts, "hdf5", tmp_path / f"text-{packed}", tokenizer="byte", batch_size=2, seq_len=64)
    expected = {packed: str(stream), f"text-{packed}": "a token stream of the same documents"}
    for name, words in expected.items():
        with open_corpus(tmp_path / name) as corpus, pytest.raises(BackendError) as error:
            _ = corpus.documents[1].ids
        assert str(error.value) == (
            f"{tmp_path / name}: document 1 was packed into rows, where its tokens lie in pieces: open {words}"
        )


@pytest.mark.parametrize("kind", ["stream", "hdf5"])
def test_a_loader_over_a_corpus_of_several_splits_trains_on_train(kind, texts, tmp_path):
    shape = {"batch_size": 2, "seq_len": 64} if kind == "hdf5" else {}
    windows = {} if kind == "hdf5" else {"batch_size": 2, "seq_len": 64}
    convert(texts, kind, tmp_path / "out", tokenizer="byte", val_fraction=0.3, **shape)
    with open_corpus(tmp_path / "out") as corpus, corpus.split("val") as held_out:
        assert corpus.training_split == "train"
        with Loader(tmp_path / "out", **windows) as path, Loader(corpus, **windows) as same:
            assert same.state_dict() == path.state_dict()
            assert same.num_records == path.num_records
        with open_corpus(tmp_path / "out", split=None) as whole, Loader(whole, **windows) as every:
            assert every.batches.corpus.num_tokens == corpus.num_tokens
        assert 0 < held_out.num_tokens < corpus.num_tokens
        assert corpus.tokens[:4].tolist()  # each loader has closed its own corpus alone


@pytest.mark.parametrize("kind", ["stream", "hdf5"])
def test_a_split_of_a_store_that_was_replaced_is_refused(kind, texts, tmp_path):
    how = {"tokenizer": "byte", "val_fraction": 0.3}
    shape = {"batch_size": 2, "seq_len": 64}
    windows = shape if kind == "stream" else {}
    how |= shape if kind == "hdf5" else {}
    convert(texts, kind, tmp_path / "out", **how)
    with open_corpus(tmp_path / "out") as corpus:
        corpus.split("val").close()
        convert(texts, kind, tmp_path / "out", **how, seed=7, force=True)
        for use in (lambda: corpus.split("val"), lambda: Loader(corpus, **windows)):
            with pytest.raises(FormatError, match="was replaced since it was opened: its shards are others now"):
                use()


def test_a_loader_leaves_what_it_was_given_open(stream):
    with open_corpus(stream) as corpus:
        batches = corpus.batches(1, 4)
        for source in (corpus, batches):
            with Loader(source, batch_size=1, seq_len=4, shuffle="sequential") as loader:
                assert next(loader).tolist() == [IDS[:4]]
        assert batches[1].tolist() == [IDS[4:8]]


def test_an_argument_that_a_corpus_has_fixed_is_refused(stream):
    with open_corpus(stream) as corpus:
        for name, value in {"verify": "none", "access": "pread", "split": "val", "cache": "x"}.items():
            with pytest.raises(ArgumentError, match=f"{name}='{value}' is chosen when a corpus is opened"):
                Loader(corpus, batch_size=1, seq_len=4, **{name: value})


def test_a_split_of_a_file_alone_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(100, dtype=np.uint16))
    with open_corpus(tmp_path / "x.npy") as corpus, pytest.raises((ArgumentError, FormatError), match=r"split|val"):
        corpus.split("val")


def test_a_lone_file_of_another_program_resumes_with_batches_of_another_size(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5["ids"] = np.arange(4000, dtype=np.uint32).reshape(500, 8)
    how = {"seq_len": 8, "shuffle": "records", "rank": 0, "world_size": 1}
    for before, after in ((4, 10), (12, 4), (3, 48), (64, 7), (128, 4)):
        with (
            Loader(tmp_path / "x.h5", batch_size=before, **how) as first,
            Loader(tmp_path / "x.h5", batch_size=after, **how) as second,
        ):
            next(first)
            state = first.state_dict()
            rest = np.concatenate([next(first).numpy() for _ in range(len(first) - 1)])
            second.load_state_dict(state)
            found = np.concatenate([step.numpy() for step in second])
            shared = min(len(rest), len(found))
            assert shared > 200
            np.testing.assert_array_equal(found[:shared], rest[:shared])
    with h5py.File(tmp_path / "other.h5", "w") as h5:
        h5["ids"] = np.arange(1, 4001, dtype=np.uint32).reshape(500, 8)
    with Loader(tmp_path / "other.h5", batch_size=4, **how) as other, pytest.raises(StateError, match="fingerprint"):
        other.load_state_dict(state)


@pytest.mark.parametrize("before", [96, 100, 251])
@pytest.mark.parametrize("taken", ["first", "begun", "resized"])
def test_a_state_of_any_batch_size_is_resumed_at_another(before, taken, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5["ids"] = np.arange(8000, dtype=np.uint32).reshape(1000, 8)
    how = {"shuffle": "records", "rank": 0, "world_size": 1}
    with Loader(tmp_path / "x.h5", batch_size=before, seq_len=8, **how) as first:
        if taken != "begun":
            next(first)
        if taken == "resized":  # so that no step of the first size leads to the position
            first.set_batch_size(7)
            next(first)
        state = first.state_dict()
        rest = np.concatenate([next(first).numpy() for _ in range(2)])
    with open_reader(tmp_path / "x.h5", batch_size=32) as reader, Loader(reader, **how) as second:
        second.load_state_dict(state)
        found = np.concatenate([next(second).numpy() for _ in range(20)])
    shared = min(len(rest), len(found))
    np.testing.assert_array_equal(found[:shared], rest[:shared])


def test_the_names_that_a_corpus_has_replaced_are_gone():
    """A path is asked once: nothing in the package says again what a reader of one kind of path was."""
    gone = ("StoreReader", "CutReader", "RecordReader", "WindowReader", "TokenStream", "HDF5Reader", "BatchReader")
    gone += ("Opening", "Holder", "TrainerFormat", "DatasetChoice", "SourceKind", "class Choice", "def look")
    gone += ("def _look", "def look_at", "def _meet", "def _met", "flat_names", "_FarThread", "_Kept", "_meant_as_pair")
    gone += ("def beside", "begin_beside", "self._beside", "beside=")
    text = "\n".join(path.read_text() for path in FILES.values())
    assert not [name for name in gone if re.search(rf"\b{name}\b", text)]


@pytest.mark.parametrize("shuffle", ["sequential", "global", "records", ("block", 2)])
@pytest.mark.parametrize("documents", [False, True])
def test_windows_that_overlap_make_each_token_a_target_once(shuffle, documents, tmp_path):
    ids = np.random.default_rng(1).integers(1, 60_000, 1003).astype(np.uint16)
    with HDF5ShardWriter(tmp_path / "dna.h5", dtype="uint16", boundary_token_id=0) as writer:
        writer.write_document(ids[:-1])
    whole = np.append(ids[:-1], 0)
    how = {"targets": True, "documents": documents, "shuffle": shuffle, "rank": 0, "world_size": 1, "last": "short"}
    with open_corpus(tmp_path / "dna.h5") as corpus:
        batches = corpus.batches(batch_size=3, seq_len=40, stride=30, context_targets=False)
        assert batches[1][0].tolist() == whole[90:130].tolist()
        counts = np.zeros(len(whole), int)
        with Loader(batches, **how) as loader:
            num_records = loader.num_records
            for step in loader:
                x, y = (step["tokens"], step["targets"]) if documents else step
                assert x.shape[1] == y.shape[1] == 40
                for row, targets in zip(x.numpy(), y.numpy(), strict=True):
                    start = next(at for at in range(0, 1000, 30) if (whole[at : at + 40] == row).all())
                    is_target = targets != -100
                    np.testing.assert_array_equal(targets[is_target], whole[start + 1 : start + 41][is_target])
                    counts[start + 1 : start + 41] += is_target
        last = (num_records - 1) * 30 + 40
        assert counts.tolist() == [0] + [1] * last + [0] * (len(whole) - last - 1)


def test_windows_that_overlap_resume_exactly_and_are_counted(stream):
    with open_corpus(stream) as corpus:
        batches = corpus.batches(batch_size=2, seq_len=6, stride=2)
        with Loader(batches, targets=True, rank=0, world_size=1) as loader:
            next(loader)
            state = loader.state_dict()
            expected = [each.tolist() for each in next(loader)]
        again = corpus.batches(batch_size=1, seq_len=6, stride=2)
        with Loader(again, batch_size=2, targets=True, rank=0, world_size=1) as loader:
            loader.load_state_dict(state)
            assert [each.tolist() for each in next(loader)] == expected
        records = batches.num_records
    found = report_of(zb, "info", stream, "--batch-size", 2, "--seq-len", 6, "--stride", 2)
    assert found["epoch"]["records"] == records == (len(IDS) - 4) // 2


@pytest.mark.parametrize("shuffle", ["global", "records", ("block", 4), "sequential"])
def test_windows_that_overlap_go_on_in_every_order_on_another_number_of_ranks(shuffle, tmp_path):
    np.save(tmp_path / "flat.npy", np.arange(1, 801, dtype=np.uint16))
    with open_corpus(tmp_path / "flat.npy") as corpus:

        def first_tokens(size, rank, world_size, state=None, count=None):
            how = {"shuffle": shuffle, "targets": True, "rank": rank, "world_size": world_size}
            with Loader(corpus.batches(size, seq_len=40, stride=30), **how) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                found = [x[:, 0].tolist() for x, _ in islice(loader, count)]
                return found, loader.state_dict()

        whole = [*chain(*first_tokens(3, 0, 1)[0])]
        begun, state = first_tokens(3, 0, 1, count=4)
        ranks = [first_tokens(1, rank, 3, state)[0] for rank in range(3)]
    rest = [each for step in zip(*ranks, strict=True) for one in step for each in one]
    assert len(rest) == 12
    assert [*chain(*begun), *rest] == whole
    assert (sorted(whole) == whole) == (shuffle == "sequential")


def test_documents_are_a_source_of_grain(stream):
    grain = pytest.importorskip("grain")
    with open_corpus(stream) as corpus:
        source = grain.MapDataset.source(corpus.documents)
        assert [each.ids.tolist() for each in source] == [[*each, 0] for each in DOCUMENTS]
        shuffled = iter(source.shuffle(seed=1).map(lambda document: document.id).to_iter_dataset())
        first = next(shuffled)
        state = shuffled.get_state()
        rest = list(shuffled)
        shuffled.set_state(state)
        assert list(shuffled) == rest
        assert sorted([first, *rest]) == ["d0", "d1", "d2", "d3"]


def test_a_split_of_a_corpus_has_its_cache(texts, tmp_path):
    convert(texts, "hdf5", tmp_path / "out", tokenizer="byte", val_fraction=0.3, batch_size=2, seq_len=64)
    with open_corpus(tmp_path / "out", cache=tmp_path / "cache") as corpus, corpus.split("val") as held_out:
        assert corpus.is_cached
        assert held_out.is_cached
        with Loader(corpus, rank=0, world_size=1) as loader:
            assert loader.batches.corpus.is_cached
            list(loader)
        with (
            open_reader(tmp_path / "out", cache=tmp_path / "cache") as reader,
            Loader(reader, rank=0, world_size=1) as loader,
        ):
            assert loader.batches.corpus.is_cached


def test_a_cached_stream_keeps_its_cache_and_a_closed_corpus_opens_no_field(stream, tmp_path):
    with open_corpus(stream, cache=tmp_path / "cache") as corpus:
        assert corpus.refresh() == len(IDS)
        assert corpus.tokens[:].tolist() == IDS
        assert column_of(corpus).has(0)
    with pytest.raises(ClosedError, match="this corpus was closed"):
        corpus.field("mask")


def closed(path):
    """Return a corpus that was closed."""
    with open_corpus(path) as corpus:
        return corpus


@pytest.mark.parametrize("kind", ["stream", "batches", "records", "splits"])
def test_a_closed_corpus_makes_neither_batches_nor_a_loader(kind, stream, texts, tmp_path):
    if kind == "batches":
        with open_writer(tmp_path / "batches", backend="hdf5", batch_size=2, seq_len=8) as writer:
            writer.write(np.arange(64).reshape(4, 2, 8))
    elif kind == "records":
        np.save(tmp_path / "records.npy", np.arange(64, dtype=np.uint16).reshape(8, 8))
    elif kind == "splits":
        convert(texts, "hdf5", tmp_path / "splits", tokenizer="byte", val_fraction=0.3, batch_size=2, seq_len=64)
    path = {"stream": stream, "records": tmp_path / "records.npy"}.get(kind, tmp_path / kind)
    shape = {"batch_size": 1, "seq_len": 4} if kind == "stream" else {}
    with open_reader(path, **shape) as reader:
        pass
    match = f"^{re.escape(str(path))}: this corpus was closed: open its path again$"
    is_refused(
        ClosedError,
        lambda: closed(path).batches(**shape),
        lambda: Loader(closed(path), rank=0, world_size=1, **shape),
        lambda: Loader(reader, rank=0, world_size=1),
        lambda: DocumentLoader(closed(path), collate="pad", batch_size=1, rank=0, world_size=1),
        match=match,
    )


def test_shapes_that_are_not_possible_and_those_that_are_said_twice(stream):
    with pytest.raises(ArgumentError, match="seq_len must be at least 1, found 0"):
        open_reader(stream, batch_size=8, seq_len=0)
    with open_corpus(stream) as corpus:
        batches = corpus.batches(1, 4, stride=2, context_targets=False)
        with Loader(batches, seq_len=4, targets=True, rank=0, world_size=1) as loader:
            assert next(loader)[0].shape == (1, 4)
        labels = [row["labels"].tolist() for row in Loader(batches, rank=0, world_size=1).records()]
        assert labels == [IDS[:4], *[[-100, -100, *IDS[start + 2 : start + 4]] for start in range(2, len(IDS) - 3, 2)]]
        made = made_up_corpus(like=batches)
        assert (made.seq_len, made.stride) == (4, 2)
