"""One path, several formats: a folder with a store for each, and datasets that others have written."""

import hashlib
import json

import h5py
import numpy as np
import pytest
import torch
from contents import batches_of, label_batches, write_books
from contract import is_refused, random_tokens
from descriptors import open_files
from reading import reading

from zb_hdf5 import Loader, ReadAs, convert, errors, open_corpus, open_reader, verify_store

ONE_RANK = {"rank": 0, "world_size": 1}


@pytest.fixture
def books(tmp_path, write_store):
    """A folder with one store for each format, of the same tokens."""
    tokens = random_tokens(6, 4, 64)
    return write_books(tmp_path / "books", tokens, write_store), tokens


def test_the_backend_chooses_the_store_and_states_fit_both(books):
    folder, tokens = books
    for backend, found in (("auto", "hdf5"), ("hdf5", "hdf5"), ("batch", "batch")):
        with open_reader(folder, backend=backend) as reader:
            assert (reader.corpus.backend, reader.path) == (found, folder / found)
            np.testing.assert_array_equal(np.stack(list(reader)), tokens)
    with Loader(folder, backend="batch", **ONE_RANK) as first, Loader(folder, backend="hdf5", **ONE_RANK) as second:
        next(first)
        second.load_state_dict(first.state_dict())
        assert torch.equal(next(first), next(second))
    with pytest.raises(errors.BackendError, match="asked for backend 'npy', found stores of batch and hdf5"):
        open_reader(folder, backend="npy")


def test_stores_of_different_tokens_are_refused(books, write_store):
    folder, tokens = books
    write_store(folder.parent / "other", tokens + 1, (4,), ("batch",)).rename(folder.parent / "moved")
    (folder / "batch").rename(folder.parent / "old")
    (folder.parent / "moved").rename(folder / "batch")
    is_refused(errors.FormatError, lambda: open_reader(folder), match="expected the same tokens in hdf5 and batch")


@pytest.mark.parametrize("what", [{"fields": ["mask"]}, {"documents": True}])
def test_batch_files_are_refused_by_name_for_what_they_cannot_hold(what, books):
    with (
        pytest.raises(errors.ZbError, match="backend 'batch' holds tokens and nothing else"),
        Loader(books[0], backend="batch", **what, **ONE_RANK) as loader,
    ):
        next(loader)


@pytest.fixture
def foreign(tmp_path):
    """A file of another origin: the same tokens as a stream, as records and as batches."""
    tokens = random_tokens(6, 4, 64).astype(np.int64)
    with h5py.File(tmp_path / "foreign.h5", "w") as h5:
        h5.create_dataset("stream", data=tokens.reshape(-1), chunks=(100,), compression="gzip")
        h5["records"], h5["batches"] = tokens.reshape(-1, 64), tokens
        label_batches(h5["batches"])
        h5["text"], h5["weights"] = np.zeros((3, 3), "S2"), np.zeros((2, 3, 10))
        h5.create_group("group")
    return tmp_path / "foreign.h5", tokens


def test_a_foreign_dataset_is_a_stream_records_or_batches_by_its_axes(foreign):
    path, tokens = foreign
    np.testing.assert_array_equal(batches_of(path, read_as=ReadAs(dataset="batches")), tokens)
    with open_reader(path, read_as=ReadAs(dataset="records"), batch_size=4) as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)
        np.testing.assert_array_equal(reader.read_record(9), tokens.reshape(-1, 64)[9])
    with open_reader(path, read_as=ReadAs(dataset="records")) as reader:
        assert (reader.batch_size, reader.num_batches) == (1, 24)
    with open_reader(path, read_as=ReadAs(dataset="records"), batch_size=4, seq_len=64) as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)
    with open_reader(path, read_as=ReadAs(dataset="stream"), batch_size=3, seq_len=50, overlap=1) as reader:
        flat, starts = tokens.reshape(-1), np.arange(reader.num_batches * 3) * 50
        expected = flat[starts[:, np.newaxis] + np.arange(51)].reshape(-1, 3, 51)
        np.testing.assert_array_equal(np.stack(list(reader)), expected)
        assert reader.num_batches == (len(flat) - 1) // 50 // 3
    for error, message, options in (
        (errors.ArgumentError, "is a token stream: pass batch_size and seq_len", {"dataset": "stream"}),
        (errors.ArgumentError, "batch_size must be between 1 and", {"dataset": "records", "batch_size": 0}),
        (errors.FormatError, "text: expected integers, found", {"dataset": "text"}),
        (errors.FormatError, "weights: expected integers, found float64", {"dataset": "weights"}),
        (errors.FormatError, "expected a dataset 'nothing' of one, two or three axes", {"dataset": "nothing"}),
        (
            errors.FormatError,
            r"batches \(6, 4, 64\) int64, records \(24, 64\) int64, stream",
            {"dataset": "nothing"},
        ),
        (errors.FormatError, "expected a dataset 'group' of one, two or three axes", {"dataset": "group"}),
    ):
        is_refused(error, lambda options=options: open_reader(path, **reading(options)), match=message)


@pytest.mark.parametrize("dataset", ["stream", "records", "batches"])
def test_a_loader_over_a_foreign_dataset(dataset, foreign):
    path, tokens = foreign
    shape = {"batch_size": 3, "seq_len": 64}
    with Loader(path, read_as=ReadAs(dataset=dataset), shuffle="sequential", **shape, **ONE_RANK) as loader:
        found = torch.stack(list(loader)).numpy()
    np.testing.assert_array_equal(found.reshape(-1, 64), tokens.reshape(-1, 64)[: len(found) * 3])
    with Loader(path, read_as=ReadAs(dataset=dataset), targets=True, **shape, **ONE_RANK) as loader:
        x, y = next(loader)
        assert x.shape == (3, 64 if dataset == "stream" else 63)
        assert torch.equal(x[:, 1:], y[:, :-1])


@pytest.fixture
def corpus(tmp_path):
    """Return the folder of a corpus as the lesson writes it, with the row of each file in an index, and its tokens."""
    rows = []
    start = 0
    folder = tmp_path / "corpus"
    parts = []
    folder.mkdir()
    for number, count in enumerate((1000, 777)):
        tokens = random_tokens(1, 1, count).reshape(-1).astype(np.uint16)
        path, sha256 = folder / f"shard-{number:04}.h5", hashlib.sha256(tokens.tobytes()).hexdigest()
        with h5py.File(path, "w", libver="latest") as h5:
            stored = h5.create_dataset("tokens", (1024,), "<u2", maxshape=(None,), chunks=(512,))
            stored[:count] = tokens
            stored.attrs.update({"token_count": count, "document_count": 3, "sha256": sha256})
        parts.append(tokens)
        row = {"shard_id": path.stem, "path": f"elsewhere/{path.name}", "token_count": count, "document_count": 3}
        rows.append(row | {"sha256": sha256, "global_start": start})
        start += count
    index = {"chunk_size": 512, "shards": rows, "total_tokens": start, "version": 1}
    (folder / "shards.json").write_text(json.dumps(index, indent=2))
    return folder, np.concatenate(parts)


def test_the_files_of_the_lesson_open_up_to_their_token_count(corpus):
    folder, expected = corpus
    for path, tokens in ((folder, expected), (folder / "shard-0000.h5", expected[:1000])):
        with open_corpus(path) as store:
            assert (store.num_tokens, store.has_documents) == (len(tokens), False)
            np.testing.assert_array_equal(store.tokens[0 : len(tokens)], tokens)
        with open_reader(path, batch_size=2, seq_len=50, verify="store") as reader:
            rows = len(tokens) // 100 * 2
            np.testing.assert_array_equal(np.concatenate(list(reader)), tokens[: rows * 50].reshape(rows, 50))
        with Loader(path, batch_size=2, seq_len=50, targets=True, **ONE_RANK) as loader:
            assert len(list(loader)) == (len(tokens) - 1) // 100
        assert {(report.outcome, "sha256" in report.checks) for report in verify_store(path)} == {("verified", True)}


@pytest.mark.parametrize("damage", ["token", "count", "index", "missing"])
def test_damage_to_the_files_of_the_lesson_is_found(damage, corpus):
    corpus, _ = corpus
    path, index = corpus / "shard-0001.h5", corpus / "shards.json"
    if damage == "index":
        index.write_text(index.read_text().replace('"sha256": "', '"sha256": "0', 1).replace("shard-0000.h5", "x.h5"))
    elif damage == "missing":
        path.unlink()
    else:
        with h5py.File(path, "r+") as h5:
            h5["tokens"][5] ^= damage == "token"
            h5["tokens"].attrs["token_count"] -= damage == "count"
    if damage == "index":
        with pytest.raises(errors.FormatError, match=r"x\.h5: expected a token_count and a sha256"):
            verify_store(corpus)
        return
    assert [report.outcome for report in verify_store(corpus)] == ["verified", "bad"]
    if damage != "token":
        with pytest.raises(errors.FormatError), open_corpus(corpus) as store:
            store.tokens[1000:1100]


def test_a_path_of_the_lesson_names_a_file_of_its_folder(corpus):
    corpus, _ = corpus
    index = corpus / "shards.json"
    index.write_text(index.read_text().replace("shard-0001.h5", ".."))
    is_refused(errors.FormatError, lambda: open_corpus(corpus), match="leaves the folder")


@pytest.mark.parametrize("target", ["hdf5", "batch", "npy"])
@pytest.mark.parametrize("dataset", ["stream", "records", "batches"])
def test_data_sets_of_others_are_converted(dataset, target, foreign, tmp_path):
    path, tokens = foreign
    shape = {"stream": {"batch_size": 2, "seq_len": 32}, "records": {"batch_size": 2}}.get(dataset, {})
    options = {"source_format": "hdf5", "dataset": dataset, "shuffle": False, **shape}
    out = tmp_path / {"hdf5": "out.h5", "batch": "out.batch", "npy": "out.npy"}[target]
    convert(path, target, out, **options)
    if target == "npy":
        np.testing.assert_array_equal(np.load(out).reshape(-1), tokens.reshape(-1))
        return
    np.testing.assert_array_equal(batches_of(out, verify="store").reshape(-1), tokens.reshape(-1))


def test_the_corpus_of_the_lesson_is_converted_after_a_check(corpus, tmp_path):
    corpus, tokens = corpus
    shape = {"source_format": "hdf5", "batch_size": 4, "seq_len": 32, "workers": 1}
    with pytest.raises(errors.ArgumentError, match="is a token stream: pass seq_len"):
        convert(corpus, "hdf5", tmp_path / "out", source_format="hdf5")
    with pytest.raises(errors.ArgumentError, match="expected a stream with documents, found none"):
        convert(corpus, "hdf5", tmp_path / "out", seq_len=32)
    with pytest.raises(errors.ConvertError, match="tokens do not fill a batch"):
        convert(corpus, "hdf5", tmp_path / "out", remainder="error", **shape)
    report = convert(corpus, "hdf5", tmp_path / "out", **shape)
    assert report.num_batches == 1777 // 128
    np.testing.assert_array_equal(batches_of(tmp_path / "out").reshape(-1), tokens[: 13 * 128])
    with h5py.File(corpus / "shard-0001.h5", "r+") as h5:
        h5["tokens"][5] ^= 1
    is_refused(errors.ChecksumError, lambda: convert(corpus, "hdf5", tmp_path / "again", **shape))


@pytest.mark.parametrize("dataset", ["records", "batches"])
def test_stored_batches_have_no_other_shape_than_their_own(dataset, foreign):
    path, _ = foreign
    for how, found in (
        ({"seq_len": 32}, "expected seq_len=64, as its batches are stored, found 32"),
        ({"batch_size": 4, "seq_len": 32}, "expected seq_len=64, as its batches are stored, found 32"),
        ({"overlap": 1}, "not a token stream"),
    ):
        is_refused(
            errors.ArgumentError, lambda how=how: open_reader(path, read_as=ReadAs(dataset=dataset), **how), match=found
        )
    if dataset == "batches":
        with pytest.raises(errors.ArgumentError, match="expected batch_size=4, as its batches are stored, found 3"):
            open_reader(path, read_as=ReadAs(dataset=dataset), batch_size=3)
    with open_reader(path, read_as=ReadAs(dataset=dataset), batch_size=4, seq_len=64) as reader:
        assert (reader.batch_size, reader.seq_len, reader.num_batches) == (4, 64, 6)


@pytest.mark.parametrize(("name", "dataset"), [("foreign.h5", "x"), ("stream.npy", None)])
def test_a_refused_shape_leaves_no_file_open(name, dataset, tmp_path):
    tokens = np.arange(64, dtype="u4")
    np.save(tmp_path / "stream.npy", tokens)
    with h5py.File(tmp_path / "foreign.h5", "w") as h5:
        h5["x"] = tokens.reshape(-1, 8)
    with pytest.raises(errors.ArgumentError) as refusal:  # it is kept: its traceback holds the reader
        open_reader(tmp_path / name, read_as=ReadAs(dataset=dataset), batch_size=-1, seq_len=8)
    assert str(tmp_path / name) not in open_files().values(), refusal
