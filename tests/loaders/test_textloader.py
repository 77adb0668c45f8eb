"""The loader of text beside the slow way: tokenize everything, put it one after the other, cut."""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zb_hdf5 import ArgumentError, ConvertError, FormatError, StateError, TextLoader
from zb_hdf5.loaders import text_loader as module
from zb_hdf5.text.tokenizers import ByteTokenizer, load_tokenizer

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")

ROOT = Path(__file__).parents[2]
#: Documents per row group of each file; the last file is split "val".
FILES = {"a.parquet": [3, 1, 4], "b.parquet": [2, 0, 5], "c.parquet": [1, 2, 1]}
BATCH, SEQ = 2, 7


def make_text(rng):
    return "".join(chr(c) for c in rng.integers(97, 123, rng.integers(1, 60)))


def write_parquet(path, groups, column="text"):
    schema = pa.schema([("id", pa.int64()), (column, pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for texts in groups:
            table = pa.table({"id": list(range(len(texts))), column: pa.array(texts, pa.string())}, schema)
            writer.write_table(table, row_group_size=max(1, len(texts)))


@pytest.fixture(scope="module")
def texts():
    """Row groups of texts per file, in which some texts are empty or missing."""
    rng = np.random.default_rng(5)
    made = {name: [[make_text(rng) for _ in range(n)] for n in groups] for name, groups in FILES.items()}
    made["a.parquet"][2][1:3] = ["", None]
    return made


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    for name, groups in texts.items():
        write_parquet(path / name, groups)
    (path / "d.parquet.partial").write_bytes(b"not yet")
    return path


def reference(texts, rank, world_size, split="train", epochs=4):
    """Return the tokens of a rank in its first epochs, by the simplest code there is."""
    names = sorted(texts)[:-1] if split == "train" else sorted(texts)[-1:]
    groups = [group for name in names for group in texts[name]][rank::world_size]
    one = [token for group in groups for text in group if text for token in (256, *text.encode())]
    return np.array(one * epochs)


def make(folder, rank=0, world_size=1, **options):
    options = {"tokenizer": "byte", "batch_size": BATCH, "seq_len": SEQ, "num_threads": 1, **options}
    return TextLoader(folder, rank=rank, world_size=world_size, **options)


def take(loader, steps):
    with loader:
        return torch.stack([loader.get_batch() for _ in range(steps)]).numpy()


# --- what is yielded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equal_to_the_slow_way(folder, texts, world_size, split):
    """Over several epochs, so that batches wrap around."""
    for rank in range(world_size):
        expected = reference(texts, rank, world_size, split)
        steps = len(expected) // (BATCH * SEQ)
        found = take(make(folder, rank, world_size, split=split), steps)
        np.testing.assert_array_equal(found.ravel(), expected[: found.size])


def test_the_argument_of_the_loader_chooses(folder):
    with make(folder) as loader:
        assert isinstance(loader, TextLoader)
        assert loader.get_batch().dtype == torch.int64
        assert [batch.shape for batch in islice(loader, 3)] == [(BATCH, SEQ)] * 3


def test_targets_are_the_next_tokens_and_none_is_lost(folder, texts):
    expected = reference(texts, 0, 1)
    with make(folder, targets=True) as loader:
        for step, (x, y) in enumerate(islice(loader, 20)):
            start, stop = step * BATCH * SEQ, (step + 1) * BATCH * SEQ
            np.testing.assert_array_equal(x.numpy().ravel(), expected[start:stop])
            np.testing.assert_array_equal(y.numpy().ravel(), expected[start + 1 : stop + 1])


def test_ranks_share_all_row_groups(folder, texts):
    """An epoch of three ranks holds each document once."""
    whole = sorted(bytes(part).decode() for part in documents_of(reference(texts, 0, 1, epochs=1)))
    ranks = [reference(texts, rank, 3, epochs=1) for rank in range(3)]
    found = []
    for rank, expected in enumerate(ranks):
        tokens = take(make(folder, rank, 3, batch_size=1, seq_len=1), len(expected)).ravel()
        found += [bytes(part).decode() for part in documents_of(tokens)]
    assert sorted(found) == whole


def documents_of(tokens):
    return [part[1:].astype(np.uint8) for part in np.split(tokens, np.flatnonzero(tokens == 256)) if len(part)]


@given(piece=st.integers(1, 200), batch_size=st.integers(1, 5), seq_len=st.integers(1, 40), prefetch=st.integers(1, 5))
def test_batches_depend_on_nothing_but_the_text(folder, texts, piece, batch_size, seq_len, prefetch):
    """Not on how documents are grouped for the tokenizer, nor on how far ahead it is."""
    expected = reference(texts, 0, 1)
    previous, module.PIECE_CHARACTERS = module.PIECE_CHARACTERS, piece
    try:
        loader = make(folder, batch_size=batch_size, seq_len=seq_len, prefetch=prefetch, num_threads=2)
        found = take(loader, min(12, len(expected) // (batch_size * seq_len)))
    finally:
        module.PIECE_CHARACTERS = previous
    np.testing.assert_array_equal(found.ravel(), expected[: found.size])


def test_a_batch_may_span_epochs(folder, texts):
    once = reference(texts, 0, 1, epochs=1)
    found = take(make(folder, batch_size=1, seq_len=3 * len(once)), 2)
    np.testing.assert_array_equal(found.ravel(), np.tile(once, 6))


def test_another_boundary_and_column(texts, tmp_path):
    for name, groups in texts.items():
        write_parquet(tmp_path / name, groups, column="content")
    expected = reference(texts, 0, 1)
    found = take(make(tmp_path, text_column="content", tokenizer=load_tokenizer("byte")), 5)
    np.testing.assert_array_equal(found.ravel(), expected[: found.size])
    with pytest.raises(ArgumentError, match="no special token '<bos>'"):
        make(tmp_path, boundary_token="<bos>")


def test_the_rank_is_that_of_the_job(folder, texts, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = take(make(folder, None, None), 5)
    np.testing.assert_array_equal(found.ravel(), reference(texts, 1, 2)[: found.size])


def test_a_trained_tokenizer_with_many_threads(folder, texts, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<bos>"], show_progress=False)
    known = [text for name in FILES for group in texts[name] for text in group if text]
    trained.train_from_iterator(known, trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    names = sorted(texts)[:-1]
    documents = [text for name in names for group in texts[name] for text in group if text]
    expected = [token for text in documents for token in (trained.token_to_id("<bos>"), *trained.encode(text).ids)]
    spec = f"hf:{tmp_path / 'tokenizer.json'}"
    with make(folder, tokenizer=spec, boundary_token="<bos>", num_threads=4) as loader:
        found = [loader.get_batch().numpy().ravel() for _ in range(len(expected) // (BATCH * SEQ))]
    np.testing.assert_array_equal(np.concatenate(found), expected[: len(found) * BATCH * SEQ])


# --- resuming --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("targets", "block"), [(False, 1024), (True, 2)])
def test_resumes_exactly_after_every_step(folder, monkeypatch, targets, block):
    """Also where a row group comes in several blocks."""
    monkeypatch.setattr("zb_hdf5.text.corpus.BLOCK_DOCUMENTS", block)
    steps = 60

    def tokens_of(step):
        return torch.stack(step) if targets else step

    with make(folder, 1, 2, targets=targets) as loader:
        states, batches = [loader.state_dict()], []
        for _ in range(steps):
            batches.append(tokens_of(loader.get_batch()))
            states.append(loader.state_dict())
    assert states[-1]["epoch"] >= 2
    for k, state in enumerate(states[:-2]):
        with make(folder, 1, 2, targets=targets) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.state_dict() == state
            for expected, after in zip(batches[k : k + 2], states[k + 1 : k + 3], strict=True):
                assert torch.equal(tokens_of(loader.get_batch()), expected)
                assert loader.state_dict() == after


def test_resumes_at_the_end_of_an_epoch(folder, texts):
    once = reference(texts, 0, 1, epochs=1)
    with make(folder, batch_size=1, seq_len=len(once)) as loader:
        loader.get_batch()
        state = loader.state_dict()
    assert state["epoch"] == 0
    with make(folder, batch_size=1, seq_len=len(once)) as loader:
        loader.load_state_dict(state)
        np.testing.assert_array_equal(loader.get_batch().numpy().ravel(), once)
        assert loader.epoch == 1


def test_a_state_fits_any_batch_shape(folder, texts):
    expected = reference(texts, 0, 1)
    with make(folder) as loader:
        for _ in range(9):
            loader.get_batch()
        state = loader.state_dict()
    with make(folder, batch_size=3, seq_len=5, targets=True) as loader:
        loader.load_state_dict(state)
        x, y = loader.get_batch()
    start = 9 * BATCH * SEQ
    np.testing.assert_array_equal(x.numpy().ravel(), expected[start : start + 15])
    np.testing.assert_array_equal(y.numpy().ravel(), expected[start + 1 : start + 16])


def test_a_running_iteration_follows_the_state(folder):
    with make(folder) as loader:
        state, batches = loader.state_dict(), iter(loader)
        first = next(batches)
        next(batches)
        loader.load_state_dict(state)
        assert torch.equal(next(batches), first)


def test_a_state_is_small_and_plain(folder):
    with make(folder) as loader:
        loader.get_batch()
        state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1024


def test_what_was_consumed_is_not_tokenized_again(folder, texts, monkeypatch):
    with make(folder) as loader:
        for _ in range(9):
            loader.get_batch()
        state = loader.state_dict()
    assert state["row_group"] >= 1
    assert state["document"] >= 1
    seen = []
    original = ByteTokenizer._encode
    monkeypatch.setattr(ByteTokenizer, "_encode", lambda self, some: seen.extend(some) or original(self, some))
    with make(folder) as loader:
        loader.load_state_dict(state)
        loader.get_batch()
    groups = [group for name in sorted(texts) for group in texts[name]]
    left = [text for text in groups[state["row_group"]] if text][state["document"] :]
    assert seen[: len(left)] == left


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rank": 0, "world_size": 3}, "state has world_size 2, this loader 3; each rank has its own row groups"),
        ({"rank": 1, "world_size": 2}, "state has rank 0, this loader 1; each rank saves"),
        ({"split": "val"}, "state has fingerprint"),
    ],
)
def test_the_state_of_another_share_is_refused(folder, other, message):
    with make(folder, 0, 2) as loader:
        state = loader.state_dict()
    with make(folder, **{"rank": 0, "world_size": 2, **other}) as loader:
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(state)
        assert loader.get_batch() is not None


def test_the_state_of_another_tokenizer_is_refused(folder):
    class Other(ByteTokenizer):
        def __init__(self):
            super().__init__()
            self.digest = "0" * 64

    with make(folder, tokenizer=Other()) as other:
        state = other.state_dict()
    with make(folder) as loader, pytest.raises(StateError, match=r"state has tokenizer '0+', this .*; the same text"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "groups"), [("aa.parquet", [["new"]]), ("a.parquet", [["t" * 99] * n for n in (3, 1, 2)])]
)
def test_the_state_of_other_files_is_refused(texts, tmp_path, name, groups):
    """One more, or one of another size."""
    write_parquet(tmp_path / "a.parquet", [["text"] * 3, ["text"], ["text"] * 2])
    write_parquet(tmp_path / "b.parquet", [["text"]])
    with make(tmp_path) as loader:
        state = loader.state_dict()
    write_parquet(tmp_path / name, groups)
    with make(tmp_path) as loader, pytest.raises(StateError, match=r"state has fingerprint .*files were added"):
        loader.load_state_dict(state)


def test_the_state_of_other_row_groups_in_files_of_the_same_size_is_refused(tmp_path):
    groups = [["text"] * 3, ["text"]]
    write_parquet(tmp_path / "a.parquet", groups)
    write_parquet(tmp_path / "b.parquet", groups)
    size = (tmp_path / "a.parquet").stat().st_size
    with make(tmp_path) as loader:
        state = loader.state_dict()
    write_parquet(tmp_path / "a.parquet", groups[::-1])
    assert (tmp_path / "a.parquet").stat().st_size == size
    with make(tmp_path) as loader, pytest.raises(StateError, match="state has fingerprint"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"row_group": 1}, {"row_group": 99}, {"token": -1}, {"epoch": None}, {"document": 1.0}, {"epoch": True}]
)
def test_a_malformed_state_is_refused(folder, change):
    with make(folder, 0, 2) as loader, pytest.raises(StateError, match=f"expected {next(iter(change))} "):
        loader.load_state_dict({**loader.state_dict(), **change})


# --- what cannot work ------------------------------------------------------------------------------------------


def test_fewer_row_groups_than_ranks_is_an_error_and_no_hang(folder):
    with make(folder, 2, 3, split="val"):
        pass
    with pytest.raises(ArgumentError, match="split 'val' has 3 row groups for 4 ranks"):
        make(folder, 0, 4, split="val")


def test_row_groups_without_a_document_are_an_error_and_no_hang(tmp_path):
    write_parquet(tmp_path / "a.parquet", [[None, ""], ["text"]])
    write_parquet(tmp_path / "b.parquet", [["text"]])
    with make(tmp_path, 0, 2) as loader, pytest.raises(FormatError, match="no row group of rank 0 has a document"):
        loader.get_batch()
    assert take(make(tmp_path, 1, 2), 1).size


@pytest.mark.parametrize("split", ["train", "test"])
def test_splits_that_are_not_there(tmp_path, split):
    write_parquet(tmp_path / "a.parquet", [["text"]])
    message = "split must be one of train, val" if split == "test" else "found 1 .parquet files: the last one is"
    with pytest.raises(ArgumentError, match=message):
        make(tmp_path, split=split)


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "num_threads", "prefetch"])
def test_sizes_below_one(folder, name):
    with pytest.raises(ArgumentError, match=f"{name} must be .*at least 1, found 0"):
        make(folder, **{name: 0})


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        make(tmp_path / "nothing")


def test_a_missing_column(folder):
    with pytest.raises(ConvertError, match=r"a\.parquet: no column 'body'.*id, text"):
        make(folder, text_column="body")


def test_a_truncated_file(texts, tmp_path):
    for name, groups in texts.items():
        write_parquet(tmp_path / name, groups)
    os.truncate(tmp_path / "b.parquet", 300)
    with pytest.raises(FormatError, match=r"b\.parquet: not a Parquet file, or a damaged one"):
        make(tmp_path)


def test_damage_in_the_middle_is_raised_where_it_is_needed(texts, tmp_path):
    """Batches of whole row groups come first; the error has the file's name; the threads have ended."""
    for name, groups in texts.items():
        write_parquet(tmp_path / name, groups)
    with make(tmp_path) as loader:
        start = pq.ParquetFile(tmp_path / "b.parquet").metadata.row_group(0).column(1).dictionary_page_offset
        with open(tmp_path / "b.parquet", "r+b") as file:
            file.seek(start)
            file.write(b"\xff" * 40)
        before = sum(1 + len(text) for group in texts["a.parquet"] for text in group if text)
        for _ in range(before // (BATCH * SEQ)):
            loader.get_batch()
        state = loader.state_dict()
        for _ in range(2):  # again, from the same place
            with pytest.raises(FormatError, match=r"b\.parquet: .*damaged"):
                loader.get_batch()
        assert loader.state_dict() == state
        assert not our_threads()


def test_an_error_of_the_tokenizer_arrives_as_it_is(folder):
    class Broken(ByteTokenizer):
        def _encode(self, texts):
            raise ZeroDivisionError("inside")

    with make(folder, tokenizer=Broken()) as loader, pytest.raises(ZeroDivisionError, match="inside"):
        next(iter(loader))


# --- lifetimes -------------------------------------------------------------------------------------------------


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("zb-")]


def test_close_ends_the_threads_and_may_be_followed_by_more(folder, texts):
    loader = make(folder)
    loader.get_batch()
    assert our_threads()
    loader.close()
    assert not our_threads()
    loader.close()
    expected = reference(texts, 0, 1)[BATCH * SEQ : 2 * BATCH * SEQ]
    np.testing.assert_array_equal(loader.get_batch().numpy().ravel(), expected)
    loader.close()


def test_a_dropped_loader_ends_its_threads_at_once(folder):
    """Without the garbage collector: nothing refers to itself."""
    gc.disable()
    try:
        loader = make(folder)
        loader.get_batch()
        assert our_threads()
        del loader
        assert not our_threads()
    finally:
        gc.enable()


def test_pickled_with_its_place(folder, texts):
    with make(folder) as loader:
        loader.get_batch()
        copy = pickle.loads(pickle.dumps(loader))
    expected = reference(texts, 0, 1)[BATCH * SEQ : 2 * BATCH * SEQ]
    np.testing.assert_array_equal(take(copy, 1).ravel(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("last", ["", "\nbatches = iter(loader); next(batches); circle = [loader]; circle += [circle]"])
def test_a_process_that_never_closes_ends_quietly(last, folder):
    code = (
        "import sys; from zb_hdf5 import TextLoader\n"
        "loader = TextLoader(sys.argv[1], tokenizer='byte', batch_size=2, seq_len=7, prefetch=9)\n"
        f"print(loader.get_batch().shape){last}"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "torch.Size([2, 7])\n", "")


def test_on_the_way_to_a_device(folder, texts, monkeypatch):
    """Without a device: a thread pins, and the consumer moves."""

    def pinned(tensor):
        assert threading.current_thread() is not threading.main_thread()
        return tensor + 1

    def moved(tensor, device):
        assert threading.current_thread() is threading.main_thread()
        return tensor - 1

    monkeypatch.setattr(module, "cuda_device", lambda device: torch.device(device))
    monkeypatch.setattr("zb_hdf5.loaders.prefetch.pinned", pinned)
    monkeypatch.setattr("zb_hdf5.loaders.prefetch.moved", moved)
    found = take(make(folder, device="cuda"), 20)
    np.testing.assert_array_equal(found.ravel(), reference(texts, 0, 1)[: found.size])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device(folder, texts):
    expected = reference(texts, 0, 1)
    with make(folder, device="cuda", targets=True) as loader:
        for step, (x, y) in enumerate(islice(loader, 30)):
            assert x.is_cuda
            assert x.dtype == torch.int64
            start = step * BATCH * SEQ
            np.testing.assert_array_equal(x.cpu().numpy().ravel(), expected[start : start + x.numel()])
            np.testing.assert_array_equal(y.cpu().numpy().ravel(), expected[start + 1 : start + 1 + y.numel()])


def test_a_device_that_is_not_there(folder):
    with pytest.raises(ArgumentError, match="must be a CUDA device or the CPU, found mps"):
        make(folder, device="mps")
