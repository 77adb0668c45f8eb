"""Text to tokens and to token streams: every document is recovered, whatever the shards, workers and threads."""

import json
from functools import partial
from itertools import pairwise

import h5py
import numpy as np
import pytest
from commandline import report_of, run, succeed
from hypothesis import given
from hypothesis import strategies as st
from interrupted import Failing, Recorded, Stops

from zb_hdf5 import ArgumentError, ConvertError
from zb_hdf5.commands.info import interrupted
from zb_hdf5.converters.batch_target import merge_parts
from zb_hdf5.converters.cli import convert
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.document_target import tokens_plan
from zb_hdf5.converters.documents import TRAIN, VAL, Recipe, Route, TextSource, route
from zb_hdf5.converters.engines import open_engine
from zb_hdf5.converters.run import convert as run_conversion
from zb_hdf5.converters.run import run as run_one
from zb_hdf5.converters.source import Counts
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.spec import DOC_OFFSETS, TOKENS
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.text.corpus import open_documents
from zb_hdf5.text.tokenizers import load_tokenizer

pytest_plugins = ["corpus"]  # the fixtures `texts` and `files`

BYTES = Recipe("byte", 256)


def stored_documents(store, split=None):
    """Return the documents of a store as h5py and its offsets show them."""
    found = []
    for shard in ShardIndex.load(store).of_split(split).shards:
        with h5py.File(store / shard.path) as h5:
            tokens, offsets = h5[TOKENS][: shard.token_count], h5[DOC_OFFSETS][: shard.document_count + 1]
            found += [tokens[a:b].tolist() for a, b in pairwise(offsets)]
    return found


def writing(files, recipe=BYTES, **options):
    """Return `(destination, **work) -> report`."""
    return partial(run_conversion, TextSource(files, "jsonl", recipe), "stream", workers=1, **options)


def expected(texts, end=(256,)):
    return [[*text.encode(), *end] for text in texts]


@pytest.mark.parametrize("num_shards", [None, 1, 4])
@pytest.mark.parametrize("workers", [1, 2])
def test_documents_are_recovered_by_their_offsets(tmp_path, files, texts, num_shards, workers):
    write = writing(files, BYTES, num_shards=num_shards)
    with open_engine("local", workers) as engine:
        report = write(tmp_path / "out", engine=engine, threads=workers)
    assert stored_documents(tmp_path / "out") == expected(texts)
    index = ShardIndex.load(tmp_path / "out")
    assert (index.meta, list(index.shards)) == (report.meta, report.shards)
    assert len(index.shards) == (num_shards or 2)
    assert (index.meta.boundary_token_id, index.meta.vocab_size, index.meta.dtype.name) == (256, 257, "uint16")
    assert json.loads(index.meta.tokenizer)["name"] == "byte"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


def test_splits_boundaries_and_long_documents(tmp_path, files, texts):
    recipe = Recipe("byte", None, max_document_tokens=20)
    write = writing(files, recipe, num_shards=2, val_fraction=0.3, seed=1)
    report = write(tmp_path / "out")
    cut = [text[:20] for text in texts]
    train, val = (stored_documents(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(expected(cut, end=()))
    assert 20 < len(val) < 80
    assert report.counts.dropped == {"beyond --max-document-tokens": sum(map(len, texts)) - sum(map(len, cut))}


def test_the_destination_never_replaces_the_text(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/shard-00000.jsonl").write_text('{"text": "the only copy"}\n')
    write = writing(open_documents([tmp_path / "corpus"]), BYTES)
    with pytest.raises(ConvertError, match=r"corpus: is or holds the source .*shard-00000\.jsonl; choose another"):
        write(tmp_path / "corpus", overwrite=True)
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["shard-00000.jsonl"]
    (tmp_path / "out").mkdir()
    with pytest.raises(ConvertError, match="out: exists already"):
        write(tmp_path / "out")
    (tmp_path / "empty.jsonl").write_text("bad\n")
    with pytest.raises(ConvertError, match=r"no documents in 1 file \(1 bad JSON\)"):
        writing(open_documents([tmp_path / "empty.jsonl"]), BYTES)(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "empty.jsonl", "out"]


@pytest.mark.parametrize("layout", ["batches", "stream"])
def test_text_that_grows_under_the_run_is_told(tmp_path, files, layout):
    def grow(tokens):
        with open(files[1].path, "a") as file:
            file.write('{"text": "one more"}\n')

    class Growing(Recorded):
        advance = staticmethod(grow)

    layout, shape = ("stream", {}) if layout == "stream" else ("hdf5", {"batch_size": 2, "seq_len": 16})
    with pytest.raises(ConvertError, match=r"b\.jsonl: changed while it was converted"):
        run_one(Conversion(TextSource(files, "jsonl", BYTES), layout, tmp_path / "out", **shape), Growing())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_tasks", [0, 1, 3])
@pytest.mark.parametrize("damage", ["", "token", "junk"])
@pytest.mark.thin
def test_finished_shards_are_kept(num_tasks, damage, tmp_path, files, monkeypatch):
    write = writing(files, BYTES, num_shards=4)
    whole = write(tmp_path / "whole")
    with pytest.raises(Stops):
        write(tmp_path / "out", engine=Failing(num_tasks))
    waiting = partial_path(tmp_path / "out")
    assert waiting.exists() == (num_tasks > 0)
    if num_tasks:
        found = interrupted(waiting).report
        assert (found["unit"], found["finished"], found["total"]) == ("files of tokens", num_tasks, 4)
        with pytest.raises(ConvertError, match="conversion of another kind is there"):
            merge_parts(tmp_path / "out")
        with pytest.raises(
            ConvertError, match=f"with {num_tasks} of 4 finished files of tokens is there; go on with --resume"
        ):
            write(tmp_path / "out")
        if damage:
            path = waiting / whole.shards[0].path
            data = path.read_bytes()
            path.write_bytes(data.replace(b"\x00\x01", b"\x01\x01", 1) if damage == "token" else data + b"junk")
    done = []
    real = Route.read
    monkeypatch.setattr(Route, "read", lambda route, *rest: (done.append(route), real(route, *rest))[1])
    source, shown = TextSource(files, "jsonl", BYTES), Recorded()
    conversion = Conversion(source, "stream", tmp_path / "out", num_shards=4, resume=True, workers=1)
    again = run_one(conversion, shown)
    assert len(done) == 4 - num_tasks + (damage != "" and num_tasks > 0)
    assert again.kept.shards == 4 - len(done)
    total = tokens_plan(source, conversion).num_bytes
    assert (again.documents_kept > 0, sum(shown.amounts[0])) == (num_tasks - bool(damage) > 0, total)
    assert (again.meta, again.shards, again.counts) == (whole.meta, whole.shards, whole.counts)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    assert stored_documents(tmp_path / "out") == stored_documents(tmp_path / "whole")


def test_the_command(tmp_path, files, texts):
    options = ["--tokenizer", "byte", "--layout", "stream", "--shard-per-source"]
    command = ("jsonl-to-hdf5", tmp_path / "corpus", tmp_path / "out", *options)
    report = report_of(convert, *command)
    assert (report["documents"], report["num_shards"]) == (150, 2)
    assert report["sha256"] == ShardIndex.load(tmp_path / "out").sha256
    assert stored_documents(tmp_path / "out") == expected(texts)
    assert "documents  150: 2 shards train\n" in succeed(convert, *command, "--force").stdout
    result = run(convert, "jsonl-to-hdf5", tmp_path / "corpus", tmp_path / "two", *options, "--seq-len", 512)
    assert (result.exit_code, "--seq-len belongs to --layout batches" in result.output) == (2, True)


def encode(files, plan):
    """Return the documents of a shard as lists of ids, and their counts."""
    counts, found, before = Counts(), [], 0
    for encoded, read in plan.read(TextSource(files, "jsonl", BYTES), 1, counts):
        assert before <= read <= plan.num_bytes
        before = read
        found += [part.tolist() for part in np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])]
    return found, counts


@pytest.mark.parametrize("num_shards", [1, 4])
def test_held_out_documents_do_not_depend_on_the_shards(tmp_path, files, texts, num_shards):
    (tmp_path / "corpus" / "c.jsonl").write_text('bad\n{"text": ""}\n{"text": "the last"}\n')
    files = open_documents([tmp_path / "corpus"])

    def routed(num_shards=None, seed=7):
        return route(TextSource(files, "jsonl", BYTES), num_shards, val_fraction=0.2, seed=seed)

    *train, val = routed(num_shards)
    assert ([plan.split for plan in train], val.split) == ([TRAIN] * num_shards, VAL)
    kept = [document for plan in train for document in encode(files, plan)[0]]
    held_out, counts = encode(files, val)
    assert held_out == encode(files, routed()[-1])[0]
    assert sorted(kept + held_out) == sorted(expected([*texts, "the last"]))
    assert 15 <= len(held_out) <= 50
    assert not counts.documents_dropped.counts, "counted in the shards of the training documents"
    assert encode(files, routed(seed=8)[-1])[0] != held_out


@pytest.mark.parametrize("boundary", [None, 256])
@given(st.lists(st.text(min_size=1), min_size=1, max_size=8), st.integers(1, 12))
def test_long_documents_are_cut(boundary, texts, limit):
    tokens, lengths, cut = Recipe("byte", boundary, limit).encode(load_tokenizer("byte"), texts, 1)
    end = [] if boundary is None else [boundary]
    whole = [text.encode("utf-8", "surrogatepass") for text in texts]
    expected = [[*document[:limit], *end] for document in whole]
    assert tokens.tolist() == [token for document in expected for token in document]
    assert lengths.tolist() == [len(document) for document in expected]
    assert cut == sum(max(0, len(document) - limit) for document in whole)


def test_routing_errors(files):
    source, groups = TextSource(files, "jsonl", BYTES), sum(file.num_row_groups for file in files)
    with pytest.raises(ConvertError, match=f"{groups} row groups cannot fill {groups + 1} shards"):
        route(source, groups + 1)
    assert [len(plan.groups) for plan in route(source, groups)] == [1] * groups
    with pytest.raises(ArgumentError, match="must be at least 0 and below 1, found 1"):
        route(source, val_fraction=1)
    with pytest.raises(ArgumentError, match="not both"):
        route(source, val_fraction=0.1, val_last_shard=True)
    with pytest.raises(ConvertError, match="leaves nothing to train on"):
        route(source, 1, val_last_shard=True)
