"""Text to token streams: every document is recovered from its offsets, whatever the shards, workers and threads."""

import json
from itertools import pairwise

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from interrupted import Failing, Stops

from zb_hdf5 import ConvertError
from zb_hdf5.converters.cli import convert
from zb_hdf5.converters.ingest import to_streams as stream_text
from zb_hdf5.converters.ingest.routing import Recipe
from zb_hdf5.converters.ingest.to_streams import ShardedTokenizationPipeline
from zb_hdf5.converters.pipeline.engines import Inline, open_engine
from zb_hdf5.core.publishing import partial_path
from zb_hdf5.spec import DOC_OFFSETS, TOKENS
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.text import documents
from zb_hdf5.text.documents import open_documents

BYTES = Recipe("byte", 256)


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(4)
    return ["".join(map(chr, rng.integers(97, 123, rng.integers(1, 60)))) for _ in range(150)]


@pytest.fixture
def files(tmp_path, texts, monkeypatch):
    """Return two files of JSON lines, of several row groups each."""
    monkeypatch.setattr(documents, "ROW_GROUP_BYTES", 2000)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, part in (("a", texts[:90]), ("b", texts[90:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return open_documents([folder])


def stored_documents(store, split=None):
    """Return the documents of a store as h5py and its offsets show them."""
    found = []
    for shard in ShardIndex.load(store).of_split(split).shards:
        with h5py.File(store / shard.path) as h5:
            tokens, offsets = h5[TOKENS][: shard.token_count], h5[DOC_OFFSETS][: shard.document_count + 1]
            found += [tokens[a:b].tolist() for a, b in pairwise(offsets)]
    return found


def expected(texts, end=(256,)):
    return [[*text.encode(), *end] for text in texts]


@pytest.mark.parametrize("num_shards", [None, 1, 4])
@pytest.mark.parametrize("workers", [1, 2])
def test_documents_are_recovered_by_their_offsets(tmp_path, files, texts, num_shards, workers):
    pipeline = ShardedTokenizationPipeline(files, "jsonl", BYTES, num_shards=num_shards)
    with open_engine("local", workers) as engine:
        report = pipeline.run(tmp_path / "out", engine=engine, num_threads=workers)
    assert stored_documents(tmp_path / "out") == expected(texts)
    index = ShardIndex.load(tmp_path / "out")
    assert index == report.index
    assert len(index.shards) == (num_shards or 2)
    assert (index.meta.boundary_token_id, index.meta.vocab_size, index.meta.dtype.name) == (256, 257, "uint16")
    assert json.loads(index.meta.tokenizer)["name"] == "byte"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


def test_splits_boundaries_and_long_documents(tmp_path, files, texts):
    recipe = Recipe("byte", None, max_document_tokens=20)
    pipeline = ShardedTokenizationPipeline(files, "jsonl", recipe, num_shards=2, val_fraction=0.3, seed=1)
    report = pipeline.run(tmp_path / "out", engine=Inline())
    cut = [text[:20] for text in texts]
    train, val = (stored_documents(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(expected(cut, end=()))
    assert 20 < len(val) < 80
    assert report.tally.accounts.dropped == {"beyond --max-document-tokens": sum(map(len, texts)) - sum(map(len, cut))}


@pytest.mark.parametrize("num_tasks", [0, 1, 3])
@pytest.mark.parametrize("damage", ["", "token", "junk"])
def test_finished_shards_are_kept(num_tasks, damage, tmp_path, files, monkeypatch):
    pipeline = ShardedTokenizationPipeline(files, "jsonl", BYTES, num_shards=4)
    whole = pipeline.run(tmp_path / "whole", engine=Inline())
    with pytest.raises(Stops):
        pipeline.run(tmp_path / "out", engine=Failing(num_tasks))
    waiting = partial_path(tmp_path / "out")
    assert waiting.exists() == (num_tasks > 0)
    if num_tasks:
        with pytest.raises(
            ConvertError, match=f"with {num_tasks} finished files of tokens is there; go on with --resume"
        ):
            pipeline.run(tmp_path / "out", engine=Inline())
        if damage:
            path = waiting / whole.index.shards[0].path
            data = path.read_bytes()
            path.write_bytes(data.replace(b"\x00\x01", b"\x01\x01", 1) if damage == "token" else data + b"junk")
    done = []
    real = stream_text.encode_shard
    monkeypatch.setattr(stream_text, "encode_shard", lambda plan, *rest: (done.append(plan), real(plan, *rest))[1])
    made, kept = [], []
    again = pipeline.run(tmp_path / "out", engine=Inline(), resume=True, progress=made.append, kept=kept.append)
    assert len(done) == 4 - num_tasks + (damage != "" and num_tasks > 0)
    assert again.shards_kept == 4 - len(done)
    assert (again.tokens_kept, sum(made) + sum(kept)) == (sum(kept), whole.index.token_count)
    assert (again.index, again.tally) == (whole.index, whole.tally)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    assert stored_documents(tmp_path / "out") == stored_documents(tmp_path / "whole")


def test_errors(tmp_path, files):
    pipeline = ShardedTokenizationPipeline(files, "jsonl", BYTES)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConvertError, match="out: exists already"):
        pipeline.run(tmp_path / "out", engine=Inline())
    (tmp_path / "empty.jsonl").write_text("bad\n")
    pipeline = ShardedTokenizationPipeline(open_documents([tmp_path / "empty.jsonl"]), "jsonl", BYTES)
    with pytest.raises(ConvertError, match=r"no documents in 1 file \(1 bad JSON\)"):
        pipeline.run(tmp_path / "new", engine=Inline())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "empty.jsonl", "out"]


def test_the_command(tmp_path, files, texts):
    options = ["--tokenizer", "byte", "--layout", "stream", "--shard-per-source"]
    run = CliRunner().invoke
    result = run(convert, ["jsonl-to-hdf5", str(tmp_path / "corpus"), str(tmp_path / "out"), *options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["documents"], report["num_shards"]) == (150, 2)
    assert report["sha256"] == ShardIndex.load(tmp_path / "out").sha256
    assert stored_documents(tmp_path / "out") == expected(texts)
    result = run(convert, ["jsonl-to-hdf5", str(tmp_path / "corpus"), str(tmp_path / "out"), *options, "--force"])
    assert result.exit_code == 0, result.output
    assert "documents  150\n" in result.stdout
    more = [*options, "--seq-len", "512"]
    result = run(convert, ["jsonl-to-hdf5", str(tmp_path / "corpus"), str(tmp_path / "two"), *more])
    assert (result.exit_code, "--seq-len belongs to --layout batches" in result.output) == (2, True)
