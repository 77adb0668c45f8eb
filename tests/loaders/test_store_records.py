"""Records by their numbers, as dictionaries of arrays; and grain over them."""

import pickle

import numpy as np
import pytest

from zb_hdf5 import (
    ArgumentError,
    BackendError,
    BatchIndexError,
    HDF5ShardWriter,
    Loader,
    StoreRecords,
    convert,
    open_corpus,
)


@pytest.fixture(scope="module")
def packed_store(tmp_path_factory):
    """Return a store of packed documents with a mask, metadata and two splits."""
    folder = tmp_path_factory.mktemp("records")
    rows = "".join(
        f'{{"input_ids": {[*range(number % 90 + 1, number % 90 + 12 + number % 5)]}, "loss_mask": '
        f'{[1] * 8 + [0] * (3 + number % 5)}, "url": "u{number}"}}\n'
        for number in range(120)
    )
    (folder / "ids.jsonl").write_text(rows)
    how = {"batch_size": 4, "seq_len": 32, "packing": "best-fit", "val_fraction": 0.2, "workers": 1}
    convert(folder / "ids.jsonl", "hdf5", folder / "out", source_format="hf", metadata_columns=["url"], **how)
    return folder / "out"


@pytest.fixture
def stream(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", dtype="uint16") as writer:
        for length in range(3, 20):
            writer.write_document(range(length))
    return tmp_path / "s.h5"


def test_a_record_is_that_of_the_loader_as_arrays(packed_store):
    with (
        StoreRecords(packed_store, documents=("position_ids",)) as source,
        Loader(packed_store, documents=True) as loader,
    ):
        records = loader.records()
        assert len(source) == len(records) > 20
        for number in (0, 7, -1):
            expected = {name: values.numpy() for name, values in records[number].items()}
            assert source[number].keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_array_equal(source[number][name], values)
        assert [each["input_ids"].tolist() for each in source] == [each["input_ids"].tolist() for each in records]
        assert [each["labels"].tolist() for each in source[3:5]] == [source[n]["labels"].tolist() for n in (3, 4)]
        assert repr(source) == f"StoreRecords('{packed_store}', {len(source)} records of 32 tokens)"
        copy = pickle.loads(pickle.dumps(source))
        np.testing.assert_array_equal(copy[2]["labels"], source[2]["labels"])
        copy.close()
        for number in (len(source), -len(source) - 1):
            with pytest.raises(BatchIndexError, match="no record"):
                source[number]


def test_fields_documents_and_metadata_come_with_a_record(packed_store):
    with StoreRecords(packed_store, split="val", fields=("loss_mask",), documents=True, metadata=True) as source:
        urls = set()
        for record in source:
            numbers, parts = record["document_ids"], record["metadata"]
            assert [*np.unique(numbers[numbers >= 0])] == [*range(sum(map(bool, parts)))]
            begins = np.flatnonzero(record["position_ids"] == 0)
            assert len(begins) == len(parts)
            assert (record["labels"][begins] == -100).all()
            is_text = numbers >= 0
            assert (record["labels"][~is_text] == -100).all()
            assert record["loss_mask"].shape == (32,)
            for number, part in enumerate(parts):
                if part:
                    first = int(part["url"][1:]) % 90 + 1
                    ids = record["input_ids"][numbers == number]
                    assert ids.tolist() == [*range(first, first + len(ids))]
                    urls.add(part["url"])
        assert len(urls) > 10


def test_a_stream_needs_the_length_of_its_records_and_a_store_has_one(packed_store, stream):
    with StoreRecords(stream, seq_len=8, documents=True) as source, open_corpus(stream) as corpus:
        ids = corpus.tokens[:]
        assert len(source) == len(ids) // 8
        assert [number for each in source for number in each["input_ids"].tolist()] == ids[: len(source) * 8].tolist()
        with StoreRecords(corpus.batches(1, 8)) as same:
            assert same[1]["input_ids"].tolist() == source[1]["input_ids"].tolist()
        assert corpus.tokens[:2].tolist() == [0, 1]  # the source has closed nothing
    with pytest.raises(ArgumentError, match="is a token stream: pass seq_len for windows over it"):
        StoreRecords(stream)
    with pytest.raises(ArgumentError, match="expected seq_len=32, as its records are stored, found 16"):
        StoreRecords(packed_store, seq_len=16)


def test_what_a_store_lacks_is_named(packed_store, tmp_path):
    from contents import write_batches

    write_batches(tmp_path / "t.h5", np.zeros((2, 2, 8), np.uint16), dtype="uint16")
    with pytest.raises(BackendError, match="holds no documents"):
        StoreRecords(tmp_path / "t.h5", metadata=True)
    with pytest.raises(ArgumentError, match="expected a field that is stored"):
        StoreRecords(packed_store, fields=("nothing",))
    with pytest.raises(ArgumentError, match="fields must be names of fields"):
        StoreRecords(packed_store, fields="loss_mask")
    with pytest.raises(ArgumentError, match="documents must be True or names of position_ids, document_ids"):
        StoreRecords(packed_store, documents="position_ids")
    with pytest.raises(ArgumentError, match="documents must be one of"):
        StoreRecords(packed_store, documents=("cu_seqlens",))


def test_grain_shuffles_batches_and_resumes_records(packed_store):
    grain = pytest.importorskip("grain")
    with StoreRecords(packed_store, fields=("loss_mask",), documents=True) as source:
        data = grain.MapDataset.source(source).shuffle(seed=1).batch(4).to_iter_dataset()
        batches = iter(data)
        first = next(batches)
        assert {name: values.shape for name, values in first.items()} == dict.fromkeys(
            ("input_ids", "labels", "loss_mask", "position_ids", "document_ids"), (4, 32)
        )
        state = batches.get_state()
        rest = [batch["input_ids"].tolist() for batch in batches]
        resumed = iter(data)
        resumed.set_state(state)
        assert [batch["input_ids"].tolist() for batch in resumed] == rest
        rows = sorted(row for batch in [first["input_ids"].tolist(), *rest] for row in batch)
        assert rows == sorted(each["input_ids"].tolist() for each in source)


def test_a_state_of_an_elastic_iterator_of_grain_fits_more_shards(packed_store):
    grain = pytest.importorskip("grain")
    with StoreRecords(packed_store) as source:
        data = grain.MapDataset.source(source).shuffle(seed=1)

        def shards(count):
            options = (grain.sharding.ShardOptions(shard_index=shard, shard_count=count) for shard in range(count))
            return [grain.experimental.ElasticIterator(data, 6, each) for each in options]

        [alone] = shards(1)
        next(alone)
        parts = shards(3)
        for part in parts:
            part.set_state(alone.get_state())
        rows = np.stack([next(part)["input_ids"] for part in parts], 1).reshape(6, -1)
        assert np.array_equal(rows, next(alone)["input_ids"])
