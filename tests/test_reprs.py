"""Each object that a user holds says what it is."""

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


def test_loaders(store, stream, corpus):
    alone = {"rank": 0, "world_size": 1}
    with zb_hdf5.Loader(store, seed=7, **alone) as loader:
        assert repr(loader).startswith(f"Loader('{store}', batch_size=3, seq_len=10, shuffle='global', seed=7, epoch=0")
    weights = {"web": 0.75, "books": 0.25}
    with zb_hdf5.MixedLoader(dict.fromkeys(weights, store), weights, **alone) as loader:
        next(loader)
        assert f"{weights}, batch_size=3, seq_len=10, position=1, rank=0, world_size=1)" in repr(loader)
        assert str(store) in repr(loader)
    with zb_hdf5.DocumentLoader(stream, collate="pad", batch_size=4, **alone) as loader:
        assert repr(loader) == (
            f"DocumentLoader('{stream}', collate='pad', batch_size=4, max_tokens=None, shuffle='global', seed=42, "
            "epoch=0, rank=0, world_size=1)"
        )
    with zb_hdf5.TextLoader(corpus, tokenizer="byte", batch_size=2, seq_len=8, **alone) as loader:
        assert repr(loader) == (
            f"TextLoader('{corpus}', tokenizer='byte', split='train', batch_size=2, seq_len=8, epoch=0, rank=0, "
            "world_size=1)"
        )


def test_readers_and_writers(store, tmp_path, tokens):
    with zb_hdf5.open_reader(store) as reader:
        assert f"'{store}', num_batches=7, batch_size=3, seq_len=10, dtype=uint32" in repr(reader)
    shape = {"batch_size": 3, "seq_len": 10}
    with zb_hdf5.open_writer(tmp_path / "one.h5", **shape) as writer:
        writer.write(tokens)
        assert repr(writer).endswith(f"('{tmp_path / 'one.h5'}', dtype=uint32, token_count=210, open)")
    assert repr(writer).endswith("token_count=210, ended)")
    with zb_hdf5.open_writer(tmp_path / "live", live=True, shard_batches=2, **shape) as writer:
        assert (
            repr(writer)
            == f"LiveStoreWriter('{tmp_path / 'live'}', dtype=uint32, token_count=0, shard_batches=2, open)"
        )


def test_parts_of_loaders_and_streams_are_one_line_without_a_place_in_memory(store, stream):
    with zb_hdf5.Loader(store, rank=0, world_size=2) as loader:
        dataset = f"BatchDataset('{store}', 3 batches of 3 records, epoch=0, rank=0, world_size=2)"
        assert repr(loader.dataset()) == dataset
        assert repr(loader.dataset().sampler) == f"StepSampler({dataset}, next step 0)"
        assert repr(loader.records()) == f"RecordDataset('{store}', 21 records of 10 tokens)"
        objects = [loader.plan, loader.stats(), loader.batches.corpus.digests]
    with zb_hdf5.Loader(stream, batch_size=2, seq_len=9, documents=True, rank=0, world_size=1) as loader:
        assert repr(loader.records()).endswith(" records of 9 tokens, documents=True)")
        objects += [loader.batches.corpus.record_documents, loader.batches.corpus.index]
    with zb_hdf5.open_corpus(stream) as found:
        assert repr(found).splitlines() == [
            f"StoreCorpus('{stream}')",
            "  a token stream: 435 tokens of uint16 in 1 file",
            "  fields: none; access='auto', compared with a crc32: none",
        ]
        assert repr(found.documents) == f"CorpusDocuments('{stream}', 29 documents)"
    assert not [text for text in map(repr, objects) if "\n" in text or " at 0x" in text or len(text) > 250]


def test_a_conversion_and_an_index(tmp_path):
    np.save(tmp_path / "t.npy", [[7] * 8] * 9)
    how = {"batch_size": 2, "seq_len": 8, "shards": 2, "workers": 1}
    report = zb_hdf5.convert(tmp_path / "t.npy", "hdf5", tmp_path / "out", **how)
    assert (
        repr(report)
        == f"Report('{tmp_path / 'out'}', 2 shards: 4 of 2 x 8 uint32, 72 in = 64 stored + 8 remainder dropped)"
    )
    index = zb_hdf5.ShardIndex.load(tmp_path / "out")
    assert repr(index) == "ShardIndex(4 batches of 2 x 8 uint32 in 2 shards, complete=True)"


def test_tokenizers():
    tokenizer = zb_hdf5.load_tokenizer("byte")
    assert repr(tokenizer) == f"ByteTokenizer('byte', vocab_size=257, digest='{tokenizer.digest[:8]}')"
    pipeline = zb_hdf5.ShardedTokenizationPipeline(["a text"], num_shards=2)
    assert repr(pipeline) == "ShardedTokenizationPipeline(tokenizer='byte', num_shards=2)"
