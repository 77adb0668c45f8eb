"""Each object that a user holds has a short `repr`, without its place in memory."""

import contextlib
from itertools import chain

import numpy as np
import pytest

import zb_hdf5
from zb_hdf5.field_sets.claimed_range import ClaimedRange


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
    yield from (corpus.documents, corpus, corpus.tokens, corpus.index, *corpus.index.shards, corpus.meta)
    yield from (corpus.files, *corpus.files)
    yield corpus.known_as
    with zb_hdf5.Loader(store, rank=0, world_size=2) as loader:
        yield from (loader.dataset(), loader.dataset().sampler, loader.records(), loader.plan, loader.stats())
        yield from (loader.batches.corpus.digests, loader.batches.corpus.index, loader.steps, loader.batches.tokens)
        index = loader.batches.corpus.index
        yield from (index.shards, index.shards[0], index.meta, loader.batches.windows, loader.batches.tokens.pages)
    with zb_hdf5.DocumentLoader(stream, collate="pad", batch_size=4, rank=0, world_size=1) as loader:
        yield loader.documents
    yield zb_hdf5.open_writer(folder / "one.h5", batch_size=3, seq_len=10)
    yield zb_hdf5.HDF5ShardWriter(folder / "two.h5", dtype="uint16")
    yield zb_hdf5.load_tokenizer("byte")
    yield zb_hdf5.ShardedTokenizationPipeline(["a text"], num_shards=2)
    yield from (zb_hdf5.ReadAs(source_dtype="uint16"), zb_hdf5.Cache(folder / "cache"), zb_hdf5.StoreRecords(store))
    yield zb_hdf5.made_up_corpus(1000, vocab_size=10, batch_size=2, seq_len=4)
    yield from (*zb_hdf5.verify_store(store), *zb_hdf5.repair(store, dry_run=True))
    np.save(folder / "ids.npy", np.arange(64, dtype=np.uint16))
    yield zb_hdf5.write_digests(folder / "ids.npy", folder / "ids.json")
    yield zb_hdf5.MmapTokenStore(stream)


def of_growing(folder):
    yield zb_hdf5.open_writer(folder / "live", live=True, shard_batches=2, batch_size=3, seq_len=10)
    with zb_hdf5.FollowingLoader(folder / "live", timeout_s=1, rank=0, world_size=1) as loader:
        yield from (loader, loader.dataset(), loader.batches.tokens)


def of_field_sets(store, folder):
    fields = {"ids": ("i4", (8,)), "logprobs": ("f2", (8,))}
    with zb_hdf5.open_corpus(store) as corpus:
        yield zb_hdf5.plan_field_set(corpus, "planned", fields)
        with zb_hdf5.open_field_set(corpus, "teacher", fields, path=folder / "teacher") as taught:
            yield from (taught, taught.facts, *taught.facts.fields, *taught.ranges())
            with contextlib.closing(ClaimedRange.take(taught.folder, taught.facts, 0, stale_s=60)) as claimed:
                yield claimed


def test_an_object_is_one_line_with_its_class_and_no_place_in_memory(store, stream, corpus, tmp_path):
    """A corpus has three lines: where it is, what it has, and how it is compared."""
    found = (of_loaders(store, stream, corpus), of_data(store, stream, tmp_path), of_growing(tmp_path))
    for each in chain(*found, of_field_sets(store, tmp_path)):
        with contextlib.closing(each) if hasattr(each, "close") else contextlib.nullcontext():
            text = repr(each)
            assert text.startswith(f"{type(each).__name__}(")
            assert " at 0x" not in text
            assert max(map(len, text.splitlines())) < 300, text
            assert len(text.splitlines()) == (3 if isinstance(each, zb_hdf5.Corpus) else 1)
