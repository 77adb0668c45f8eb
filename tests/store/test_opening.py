"""One path, several formats: a folder with a store for each, and datasets that others have written."""

import h5py
import numpy as np
import pytest
import torch
from contract import random_tokens

from zb_hdf5 import ArgumentError, BackendError, FormatError, Loader, ZbError, open_reader

ONE_RANK = {"rank": 0, "world_size": 1}


@pytest.fixture
def books(tmp_path, write_store):
    """A folder with one store for each format, of the same tokens."""
    tokens = random_tokens(6, 4, 64)
    (tmp_path / "books").mkdir()
    for name in ("batch", "hdf5"):
        write_store(tmp_path / "books" / name, tokens, (4,), (name,))
    return tmp_path / "books", tokens


def test_the_backend_chooses_the_store_and_states_fit_both(books):
    folder, tokens = books
    for backend, found in (("auto", "hdf5"), ("hdf5", "hdf5"), ("batch", "batch")):
        with open_reader(folder, backend=backend) as reader:
            assert (reader.backend, reader.path) == (found, folder / found)
            np.testing.assert_array_equal(np.stack(list(reader)), tokens)
    with Loader(folder, backend="batch", **ONE_RANK) as first, Loader(folder, backend="hdf5", **ONE_RANK) as second:
        next(first)
        second.load_state_dict(first.state_dict())
        assert torch.equal(next(first), next(second))
    with pytest.raises(BackendError, match="asked for backend 'npy', found stores of batch and hdf5"):
        open_reader(folder, backend="npy")


def test_stores_of_different_tokens_are_refused(books, write_store):
    folder, tokens = books
    write_store(folder.parent / "other", tokens + 1, (4,), ("batch",)).rename(folder.parent / "moved")
    (folder / "batch").rename(folder.parent / "old")
    (folder.parent / "moved").rename(folder / "batch")
    with pytest.raises(FormatError, match="expected the same tokens in hdf5 and batch"):
        open_reader(folder)


@pytest.mark.parametrize("what", [{"fields": ["mask"]}, {"documents": True}])
def test_batch_files_are_refused_by_name_for_what_they_cannot_hold(what, books):
    with (
        pytest.raises(ZbError, match="backend 'batch' holds tokens and nothing else"),
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
        h5["text"] = np.zeros((3, 3), "S2")
    return tmp_path / "foreign.h5", tokens


def test_a_foreign_dataset_is_a_stream_records_or_batches_by_its_axes(foreign):
    path, tokens = foreign
    with open_reader(path, dataset="batches") as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)
    with open_reader(path, dataset="records", batch_size=4) as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)
        np.testing.assert_array_equal(reader.read_record(9), tokens.reshape(-1, 64)[9])
    with open_reader(path, dataset="records") as reader:
        assert (reader.batch_size, reader.num_batches) == (1, 24)
    with open_reader(path, dataset="stream", batch_size=3, seq_len=50, overlap=1) as reader:
        flat, starts = tokens.reshape(-1), np.arange(reader.num_batches * 3) * 50
        expected = flat[starts[:, np.newaxis] + np.arange(51)].reshape(-1, 3, 51)
        np.testing.assert_array_equal(np.stack(list(reader)), expected)
        assert reader.num_batches == (len(flat) - 1) // 50 // 3
    with pytest.raises(ArgumentError, match="is a token stream: pass batch_size and seq_len"):
        open_reader(path, dataset="stream")
    with pytest.raises(FormatError, match="expected integers, found"):
        open_reader(path, dataset="text")
    with pytest.raises(FormatError, match="its integer datasets: batches, records, stream"):
        open_reader(path, dataset="nothing")


@pytest.mark.parametrize("dataset", ["stream", "records", "batches"])
def test_a_loader_over_a_foreign_dataset(dataset, foreign):
    path, tokens = foreign
    shape = {"batch_size": 3, "seq_len": 64}
    with Loader(path, dataset=dataset, shuffle="sequential", **shape, **ONE_RANK) as loader:
        found = torch.stack(list(loader)).numpy()
    np.testing.assert_array_equal(found.reshape(-1, 64), tokens.reshape(-1, 64)[: len(found) * 3])
    with Loader(path, dataset=dataset, targets=True, **shape, **ONE_RANK) as loader:
        x, y = next(loader)
        assert x.shape == (3, 64 if dataset == "stream" else 63)
        assert torch.equal(x[:, 1:], y[:, :-1])
