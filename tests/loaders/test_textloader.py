"""The loader of text beside the slow way: tokenize everything, put it one after the other, cut."""

import gc
import json
import os
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from contract import is_refused
from descriptors import our_threads
from hypothesis import given
from hypothesis import strategies as st

from zb_hdf5 import ArgumentError, ConvertError, FormatError, StateError, TextLoader
from zb_hdf5.loaders.text_loader import paths_of_split
from zb_hdf5.text import document_file
from zb_hdf5.text.tokenizers import ByteTokenizer, EncodingTokenizer, load_tokenizer

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


def write_all(folder, texts, **how):
    for name, groups in texts.items():
        write_parquet(folder / name, groups, **how)


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
    write_all(path, texts)
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


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equal_to_the_slow_way(folder, texts, world_size, split):
    """Over several epochs, so that batches wrap around."""
    for rank in range(world_size):
        expected = reference(texts, rank, world_size, split)
        steps = len(expected) // (BATCH * SEQ)
        found = take(make(folder, rank, world_size, split=split), steps)
        np.testing.assert_array_equal(found.ravel(), expected[: found.size])
    once = reference(texts, 0, 1, split, epochs=1)
    with make(folder, split=split, batch_size=1, seq_len=3 * len(once)) as loader:  # a batch may span epochs
        assert isinstance(loader, TextLoader)
        for batch in islice(loader, 2):
            assert batch.dtype == torch.int64
            np.testing.assert_array_equal(batch.numpy().ravel(), np.tile(once, 3))


def test_targets_are_the_next_tokens_and_none_is_lost(folder, texts):
    expected = reference(texts, 0, 1)
    with make(folder, targets=True) as loader:
        for step, (x, y) in enumerate(islice(loader, 20)):
            start, stop = step * BATCH * SEQ, (step + 1) * BATCH * SEQ
            np.testing.assert_array_equal(x.numpy().ravel(), expected[start:stop])
            np.testing.assert_array_equal(y.numpy().ravel(), expected[start + 1 : stop + 1])


@given(piece=st.integers(1, 200), batch_size=st.integers(1, 5), seq_len=st.integers(1, 40), prefetch=st.integers(1, 5))
def test_batches_depend_on_nothing_but_the_text(folder, texts, piece, batch_size, seq_len, prefetch):
    """Not on how documents are grouped for the tokenizer, nor on how far ahead it is."""
    expected = reference(texts, 0, 1)
    previous, document_file.BLOCK_CHARACTERS = document_file.BLOCK_CHARACTERS, piece
    try:
        loader = make(folder, batch_size=batch_size, seq_len=seq_len, prefetch=prefetch, num_threads=2)
        found = take(loader, min(12, len(expected) // (batch_size * seq_len)))
    finally:
        document_file.BLOCK_CHARACTERS = previous
    np.testing.assert_array_equal(found.ravel(), expected[: found.size])


def test_another_boundary_and_column_and_the_rank_of_the_job(texts, tmp_path, folder, monkeypatch):
    write_all(tmp_path, texts, column="content")
    expected = reference(texts, 0, 1)
    found = take(make(tmp_path, text_column="content", tokenizer=load_tokenizer("byte")), 5)
    np.testing.assert_array_equal(found.ravel(), expected[: found.size])
    is_refused(ArgumentError, lambda: make(tmp_path, boundary_token="<bos>"), match="no special token '<bos>'")
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
    documents = [text for name in sorted(texts)[:-1] for group in texts[name] for text in group if text]
    expected = [token for text in documents for token in (trained.token_to_id("<bos>"), *trained.encode(text).ids)]
    spec = f"hf:{tmp_path / 'tokenizer.json'}"
    with make(folder, tokenizer=spec, boundary_token="<bos>", num_threads=4) as loader:
        found = [loader.get_batch().numpy().ravel() for _ in range(len(expected) // (BATCH * SEQ))]
    np.testing.assert_array_equal(np.concatenate(found), expected[: len(found) * BATCH * SEQ])


@pytest.mark.parametrize(("targets", "block"), [(False, 1024), (True, 2)])
def test_resumes_exactly_after_every_step(folder, monkeypatch, targets, block):
    """Also where a row group comes in several blocks."""
    monkeypatch.setattr("zb_hdf5.text.document_file.BLOCK_DOCUMENTS", block)
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


def test_a_state_is_small_fits_any_batch_shape_and_what_was_consumed_is_not_tokenized_again(folder, texts, monkeypatch):
    expected, once = reference(texts, 0, 1), reference(texts, 0, 1, epochs=1)
    with make(folder) as loader:
        for _ in range(9):
            loader.get_batch()
        state = loader.state_dict()
        assert len(json.dumps(state)) < 1024
        batches = iter(loader)
        first = next(batches)
        next(batches)
        loader.load_state_dict(state)
        assert torch.equal(next(batches), first)
        again = loader.state_dict()
        with pickle.loads(pickle.dumps(loader)) as copy:
            assert copy.state_dict() == again
            assert torch.equal(copy.get_batch(), next(batches))
    with make(folder, batch_size=3, seq_len=5, targets=True) as loader:
        loader.load_state_dict(state)
        x, y = loader.get_batch()
    start = 9 * BATCH * SEQ
    np.testing.assert_array_equal(x.numpy().ravel(), expected[start : start + 15])
    np.testing.assert_array_equal(y.numpy().ravel(), expected[start + 1 : start + 16])
    with make(folder, batch_size=1, seq_len=len(once)) as loader:
        loader.get_batch()
        state = loader.state_dict()
    assert state["epoch"] == 0
    with make(folder, batch_size=1, seq_len=len(once)) as loader:  # at the end of an epoch
        loader.load_state_dict(state)
        np.testing.assert_array_equal(loader.get_batch().numpy().ravel(), once)
        assert loader.epoch == 1
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


class OtherTokenizer(ByteTokenizer):
    def __init__(self):
        super().__init__()
        self.digest = "0" * 64


@pytest.mark.parametrize(("other", "message"), [
    ({"rank": 0, "world_size": 3}, "state has world_size 2, this loader 3"),
    ({"rank": 1, "world_size": 2}, "state has rank 0, this loader 1"),
    ({"split": "val"}, "state has fingerprint"),
    ({"tokenizer": OtherTokenizer()}, r"state has tokenizer .*, this loader '0+'"),
])  # fmt: skip
def test_the_state_of_another_share_or_tokenizer_is_refused(folder, other, message):
    with make(folder, 0, 2) as loader:
        state = loader.state_dict()
    with make(folder, **{"rank": 0, "world_size": 2, **other}) as loader:
        is_refused(StateError, lambda: loader.load_state_dict(state), match=message)
        assert loader.get_batch() is not None


@pytest.mark.parametrize(("name", "groups", "same_size"), [
    ("aa.parquet", [["new"]], False),
    ("a.parquet", [["t" * 99] * n for n in (3, 1, 2)], False),
    ("a.parquet", [["text"], ["text"] * 3], True),
], ids=["more", "larger", "other row groups"])  # fmt: skip
def test_the_state_of_other_files_is_refused(tmp_path, name, groups, same_size):
    first = tmp_path / "a.parquet"
    write_parquet(first, [["text"] * 3, ["text"]])
    write_parquet(tmp_path / "b.parquet", [["text"]])
    size = first.stat().st_size
    with make(tmp_path) as loader:
        state = loader.state_dict()
    write_parquet(tmp_path / name, groups)
    assert (first.stat().st_size == size) is (same_size or name != "a.parquet")
    with make(tmp_path) as loader, pytest.raises(StateError, match="state has fingerprint"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(("options", "error", "message"), [
    *(({name: 0}, ArgumentError, f"{name} must be .*at least 1, found 0")
      for name in ("batch_size", "seq_len", "num_threads", "prefetch")),
    ({"split": "more"}, ArgumentError, "split must be one of train, val, test"),
    ({"split": "val", "world_size": 4}, ArgumentError, "split 'val' has 3 row groups for 4 ranks"),
    ({"text_column": "body"}, ConvertError, r"a\.parquet: no column 'body'.*id, text"),
    ({"device": "mps"}, ArgumentError, "must be a CUDA device or the CPU, found mps"),
])  # fmt: skip
def test_options_that_cannot_work_are_refused_at_once(folder, tmp_path, options, error, message):
    is_refused(error, lambda: make(folder, **options), match=message)
    with make(folder, 2, 3, split="val"):
        pass
    is_refused(FileNotFoundError, lambda: make(tmp_path / "nothing"))
    write_parquet(tmp_path / "a.parquet", [["text"]])
    is_refused(ArgumentError, lambda: make(tmp_path), match=r"found 1 \.parquet files: the last one is")


def test_row_groups_without_a_document_and_errors_of_the_tokenizer_are_no_hang(tmp_path, folder):
    write_parquet(tmp_path / "a.parquet", [[None, ""], ["text"]])
    write_parquet(tmp_path / "b.parquet", [["text"]])
    with make(tmp_path, 0, 2) as loader, pytest.raises(FormatError, match="no row group of rank 0 has a document"):
        loader.get_batch()
    assert take(make(tmp_path, 1, 2), 1).size

    class Broken(ByteTokenizer):
        def _encode(self, texts):
            raise ZeroDivisionError("inside")

    with make(folder, tokenizer=Broken()) as loader, pytest.raises(ZeroDivisionError, match="inside"):
        next(iter(loader))


def test_a_document_that_the_tokenizer_refuses_is_left_out_and_a_state_goes_on_behind_it(tmp_path, capsys):
    class Strict(ByteTokenizer):
        def _encode(self, texts):
            refused = FormatError("refused")
            return [refused if "?" in text else ids for text, ids in zip(texts, super()._encode(texts), strict=True)]

    groups = [["abc", "?", "?", "de"], ["?"], ["fghij", "?"], ["klm"]]
    write_parquet(tmp_path / "a.parquet", groups)
    write_parquet(tmp_path / "b.parquet", [["val"]])
    good = {"a.parquet": [[text for text in group if text != "?"] for group in groups], "b.parquet": []}
    expected = reference(good, 0, 1, epochs=20)
    options = {"batch_size": 1, "seq_len": 3, "tokenizer": Strict()}
    with make(tmp_path, **options) as loader:
        for step in range(30):
            state = loader.state_dict()
            assert next(loader).ravel().tolist() == expected[3 * step : 3 * step + 3].tolist()
            with make(tmp_path, **options) as again:
                again.load_state_dict(state)
                assert next(again).ravel().tolist() == expected[3 * step : 3 * step + 3].tolist()
    told = [f"note: row {row} of {tmp_path}/a.parquet: refused by the tokenizer, and left out" for row in (2, 3, 5, 7)]
    assert capsys.readouterr().err.splitlines() == told


def test_a_text_of_a_million_spaces_is_encoded(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    pattern = r"\p{L}+|\s+(?!\S)|\s+"
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})
    write_parquet(tmp_path / "a.parquet", [["a", " " * 1_000_000 + "b"]])
    write_parquet(tmp_path / "b.parquet", [["val"]])
    with make(tmp_path, tokenizer=EncodingTokenizer(encoding), batch_size=1, seq_len=1_000_004) as loader:
        assert next(loader)[0].tolist() == [256, 97, 256, *[32] * 1_000_000, 98]


def test_damage_in_the_middle_is_raised_where_it_is_needed(texts, tmp_path):
    """Batches of whole row groups come first; the error has the file's name; the threads have ended. Or at once."""
    write_all(tmp_path, texts)
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
            is_refused(FormatError, lambda: loader.get_batch(), match=r"b\.parquet: .*damaged")
        assert loader.state_dict() == state
        assert not our_threads()
    os.truncate(tmp_path / "b.parquet", 300)
    is_refused(FormatError, lambda: make(tmp_path), match=r"b\.parquet: not a Parquet file, or a damaged one")


def test_threads_end_with_a_close_or_with_the_loader(folder, texts):
    loader = make(folder)
    loader.get_batch()
    assert our_threads()
    loader.close()
    assert not our_threads()
    loader.close()
    expected = reference(texts, 0, 1)[BATCH * SEQ : 2 * BATCH * SEQ]
    np.testing.assert_array_equal(loader.get_batch().numpy().ravel(), expected)
    loader.close()
    gc.disable()  # nothing refers to itself
    try:
        loader = make(folder)
        loader.get_batch()
        assert our_threads()
        del loader
        assert not our_threads()
    finally:
        gc.enable()


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


def test_the_names_of_the_files_tell_the_splits(tmp_path):
    for name in ("test-0", "train-0", "train-1", "validation-0"):
        write_parquet(tmp_path / f"{name}.parquet", [[name]])
    named = {split: [path.stem for path in paths_of_split(tmp_path, split)] for split in ("train", "val", "test")}
    assert named == {"train": ["train-0", "train-1"], "val": ["validation-0"], "test": ["test-0"]}
    (tmp_path / "test-0.parquet").unlink()
    with pytest.raises(ArgumentError, match=r"expected a split that its files have \(train, val\), found 'test'"):
        paths_of_split(tmp_path, "test")
    write_parquet(tmp_path / "more.parquet", [["more"]])
    with pytest.raises(ArgumentError, match="tell the splits of some only"):
        paths_of_split(tmp_path, "train")
