"""Each object that a user holds says what it is."""

import contextlib

import numpy as np
import pytest

import zb_hdf5


@pytest.fixture
def corpus(tmp_path):
    """Return a folder of Parquet files with texts, as `TextLoader` reads it."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        parquet.write_table(pyarrow.table({"text": ["some words"] * 20}), folder / f"{name}.parquet")
    return folder


@pytest.fixture
def stream(tmp_path):
    with zb_hdf5.HDF5ShardWriter(tmp_path / "stream.h5", dtype="uint16") as writer:
        for length in range(1, 30):
            writer.write_document([length] * length)
    return tmp_path / "stream.h5"


def of_loaders(store, stream, corpus):
    alone = {"rank": 0, "world_size": 1}
    yield zb_hdf5.Loader(store, **alone)
    yield zb_hdf5.MixedLoader({"web": store, "books": store}, {"web": 0.75, "books": 0.25}, **alone)
    yield zb_hdf5.DocumentLoader(stream, collate="pad", batch_size=4, **alone)
    yield zb_hdf5.TextLoader(corpus, tokenizer="byte", batch_size=2, seq_len=8, **alone)


def of_data(store, stream, folder):
    yield zb_hdf5.open_reader(store)
    corpus = zb_hdf5.open_corpus(stream)
    yield from (corpus.documents, corpus)
    with zb_hdf5.Loader(store, rank=0, world_size=2) as loader:
        yield from (loader.dataset(), loader.dataset().sampler, loader.records(), loader.plan, loader.stats())
        yield from (loader.batches.corpus.digests, loader.batches.corpus.index)
    yield zb_hdf5.open_writer(folder / "one.h5", batch_size=3, seq_len=10)
    yield zb_hdf5.open_writer(folder / "live", live=True, shard_batches=2, batch_size=3, seq_len=10)
    yield zb_hdf5.load_tokenizer("byte")
    yield zb_hdf5.ShardedTokenizationPipeline(["a text"], num_shards=2)


def test_an_object_is_one_line_with_its_class_and_no_place_in_memory(store, stream, corpus, tmp_path):
    """A corpus has three lines: where it is, what it has, and how it is compared."""
    for each in (*of_loaders(store, stream, corpus), *of_data(store, stream, tmp_path)):
        with contextlib.closing(each) if hasattr(each, "close") else contextlib.nullcontext():
            text = repr(each)
            assert text.startswith(f"{type(each).__name__}(")
            assert " at 0x" not in text
            assert max(map(len, text.splitlines())) < 300, text
            assert len(text.splitlines()) == (3 if isinstance(each, zb_hdf5.Corpus) else 1)
            assert (str(store) in text) or not isinstance(each, zb_hdf5.Loader | zb_hdf5.MixedLoader)


def test_a_report_says_what_was_stored(tmp_path):
    np.save(tmp_path / "t.npy", [[7] * 8] * 9)
    how = {"batch_size": 2, "seq_len": 8, "shards": 2, "workers": 1}
    report = zb_hdf5.convert(tmp_path / "t.npy", "hdf5", tmp_path / "out", **how)
    assert "72 in = 64 stored + 8 remainder dropped" in repr(report)
