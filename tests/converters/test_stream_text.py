"""Text and `.npy` files to token streams: every document is recovered, whatever the shards, workers and threads."""

import json
import re
from collections import Counter
from functools import partial
from itertools import chain, pairwise

import h5py
import numpy as np
import pytest
from commandline import report_of, run, succeed
from contract import is_refused
from hypothesis import given
from hypothesis import strategies as st
from interrupted import Failing, Recorded, Stops

from examples import examples
from zb_hdf5 import ArgumentError, ConvertError, Loader, ShardIndex, convert, open_corpus
from zb_hdf5.commands.description import interrupted
from zb_hdf5.converters import cut_source
from zb_hdf5.converters.arguments import convert as run_conversion
from zb_hdf5.converters.batch_source import TokenCounts
from zb_hdf5.converters.cli import convert_commands as commands
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.document_plan import plan_of_documents
from zb_hdf5.converters.engines import open_engine
from zb_hdf5.converters.merge import merge_parts
from zb_hdf5.converters.resolution import resolved
from zb_hdf5.converters.routes import TRAIN, VAL, ShardDocuments, assign_documents
from zb_hdf5.converters.run import plan
from zb_hdf5.converters.run import run as run_one
from zb_hdf5.converters.text_source import Recipe, TextSource
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.spec import DOC_OFFSETS, TOKENS
from zb_hdf5.store.verify import verify_store
from zb_hdf5.text.dropped import Dropped
from zb_hdf5.text.text_corpus import open_documents
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
    write = writing(files, BYTES, shards=num_shards)
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
    write = writing(files, recipe, shards=2, val_fraction=0.3, seed=1)
    report = write(tmp_path / "out")
    cut = [text[:20] for text in texts]
    train, val = (stored_documents(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(expected(cut, end=()))
    assert 20 < len(val) < 80
    assert report.counts.dropped == {"cut from long documents": sum(map(len, texts)) - sum(map(len, cut))}


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
    write = writing(files, BYTES, shards=4)
    whole = write(tmp_path / "whole")
    is_refused(Stops, lambda: write(tmp_path / "out", engine=Failing(num_tasks)))
    waiting = partial_path(tmp_path / "out")
    assert waiting.exists() == (num_tasks > 0)
    if num_tasks:
        found = interrupted(waiting).report
        assert (found["unit"], found["finished"], found["total"]) == ("files of tokens", num_tasks, 4)
        is_refused(ConvertError, lambda: merge_parts(tmp_path / "out"), match="of a conversion without parts; run it")
        with pytest.raises(
            ConvertError, match=f"with {num_tasks} of 4 finished files of tokens is there; go on with resume=True"
        ):
            write(tmp_path / "out")
        if damage:
            path = waiting / whole.shards[0].path
            data = path.read_bytes()
            path.write_bytes(data.replace(b"\x00\x01", b"\x01\x01", 1) if damage == "token" else data + b"junk")
    done = []
    real = ShardDocuments.read
    monkeypatch.setattr(ShardDocuments, "read", lambda route, *rest: (done.append(route), real(route, *rest))[1])
    source, shown = TextSource(files, "jsonl", BYTES), Recorded()
    conversion = Conversion(source, "stream", tmp_path / "out", shards=4, resume=True, workers=1)
    again = run_one(conversion, shown)
    assert len(done) == 4 - num_tasks + (damage != "" and num_tasks > 0)
    assert again.kept.shards == 4 - len(done)
    total = sum(task.amount for task in plan_of_documents(source, resolved(conversion)[0]).tasks)
    assert (again.documents_kept > 0, sum(shown.amounts[0])) == (num_tasks - bool(damage) > 0, total)
    assert (again.meta, again.shards, again.counts) == (whole.meta, whole.shards, whole.counts)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    assert stored_documents(tmp_path / "out") == stored_documents(tmp_path / "whole")


def test_the_command(tmp_path, files, texts):
    options = ["--tokenizer", "byte", "--layout", "stream", "--shard-per-source"]
    command = ("jsonl-to-hdf5", tmp_path / "corpus", tmp_path / "out", *options)
    report = report_of(commands, *command)
    assert (report["documents"], report["num_shards"]) == (150, 2)
    assert report["sha256"] == ShardIndex.load(tmp_path / "out").sha256
    assert stored_documents(tmp_path / "out") == expected(texts)
    assert "documents  150: 2 shards train\n" in succeed(commands, *command, "--force").stdout
    result = run(commands, "jsonl-to-hdf5", tmp_path / "corpus", tmp_path / "two", *options, "--seq-len", 512)
    assert (result.exit_code, "--seq-len belongs to --layout batches" in result.output) == (2, True)


def encode(files, plan):
    """Return the documents of a shard as lists of ids, and their counts."""
    counts = TokenCounts()
    found = []
    before = 0
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
        return assign_documents(TextSource(files, "jsonl", BYTES), num_shards, val_fraction=0.2, seed=seed)

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
@given(st.lists(st.text(min_size=1), min_size=1, max_size=8), st.integers(2, 12))
def test_long_documents_are_cut_and_the_boundary_counts(boundary, texts, limit):
    encoded = load_tokenizer("byte").encode_each(texts)
    tokens, lengths, cut = Recipe("byte", boundary, limit).joined(encoded)
    end = [] if boundary is None else [boundary]
    whole = [text.encode("utf-8", "surrogatepass") for text in texts]
    expected = [[*document[: limit - len(end)], *end] for document in whole]
    assert lengths.max() <= limit
    assert tokens.tolist() == [token for document in expected for token in document]
    assert lengths.tolist() == [len(document) for document in expected]
    assert cut == sum(max(0, len(document) + len(end) - limit) for document in whole)
    is_refused(ArgumentError, lambda: Recipe("byte", 256, 1), match="must be at least 2")


@pytest.mark.parametrize("val_fraction", [0.0, 0.3])
@pytest.mark.parametrize("num_shards", [1, 3, 7, 40, 150])
def test_any_number_of_shards_has_all_documents_in_order(files, texts, num_shards, val_fraction):
    with open(files[0].path, "a") as file:
        file.write('bad\n\n{"text": ""}\n')
    files = open_documents([each.path for each in files])
    source = TextSource(files, "jsonl", BYTES)
    routes = assign_documents(source, num_shards, val_fraction=val_fraction, seed=3)
    train = routes[:num_shards]
    parts = [encode(files, each) for each in train]
    found = [document for documents, _ in parts for document in documents]
    whole = [
        document
        for each in assign_documents(source, val_fraction=val_fraction, seed=3)
        for document in encode(files, each)[0]
    ]
    num_train = len(found)
    assert found == whole[:num_train]
    assert all(documents for documents, _ in parts) or val_fraction
    dropped = Dropped()
    for _, counts in parts:
        dropped.merge(counts.documents_dropped)
    assert dropped.counts == {"bad JSON": 1, "empty": 1}
    if val_fraction:
        assert encode(files, routes[-1])[0] == whole[num_train:]
        assert sorted(whole) == sorted(expected(texts))


@pytest.mark.parametrize(("options", "shards"), [
    ({}, 500),
    ({"shard_per_source": True}, 502),
    ({"shards": 501}, 501),
    ({"val_last_shard": True}, 500),
    ({"target": "megatron"}, 500),
])  # fmt: skip
def test_a_stream_of_many_files_has_500_shards_by_default(options, shards, tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(502):
        (tmp_path / "corpus" / f"{number:03}.txt").write_text(f"document {number}")
    given = {"source_format": "text", "tokenizer": "byte", **options}
    planned = plan(Conversion(tmp_path / "corpus", given.pop("target", "stream"), tmp_path / "out", **given))
    assert planned.num_shards == shards


def test_shards_of_several_files_have_all_documents_in_order(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    for number in range(12):
        (tmp_path / ("train" if number < 9 else "val") / f"{number:02}.txt").write_text(str(number))
    source = TextSource(open_documents([tmp_path]), "text", BYTES)
    files = [[group.file_number for group in each.groups] for each in assign_documents(source, most=5)]
    assert (len(files), [*chain(*files)]) == (5, [*range(12)])
    held_out = assign_documents(source, most=5, val_last_shard=True)
    assert [(len(each.groups), each.split) for each in held_out[-2:]] == [(len(held_out[-2].groups), TRAIN), (1, VAL)]
    assert len(held_out) == 5
    source.splits = [TRAIN] * 9 + [VAL] * 3
    assert Counter(each.split for each in assign_documents(source, most=4)) == {TRAIN: 3, VAL: 1}
    assert Counter(each.split for each in assign_documents(source, most=12)) == {TRAIN: 9, VAL: 3}


def test_routing_errors(files):
    source, groups = TextSource(files, "jsonl", BYTES), sum(file.num_row_groups for file in files)
    message = "each of 151 shards needs a document of its own, found 150 documents"
    with pytest.raises(ConvertError, match=f"^{re.escape(str(source.paths[0]))}: {message}"):
        assign_documents(source, 151)
    assert [len(plan.groups) for plan in assign_documents(source, groups)] == [1] * groups
    is_refused(
        ArgumentError, lambda: assign_documents(source, val_fraction=1), match="must be at least 0 and below 1, found 1"
    )
    is_refused(ArgumentError, lambda: assign_documents(source, val_fraction=0.1, val_last_shard=True), match="not both")
    is_refused(
        ConvertError, lambda: assign_documents(source, 1, val_last_shard=True), match="leaves nothing to train on"
    )


# --- streams of .npy files ---------------------------------------------------------------------------------------
END = 9


def reference(tokens, boundary):
    """Cut a list of tokens one by one."""
    documents, current = [], []
    for token in tokens:
        if boundary == "before" and token == END and current:
            documents.append(current)
            current = []
        current.append(token)
        if boundary == "after" and token == END:
            documents.append(current)
            current = []
    return [*documents, current] if current else documents


def save(folder, *streams, dtype="u2"):
    folder.mkdir()
    for number, tokens in enumerate(streams):
        np.save(folder / f"part-{number}.npy", np.array(tokens, dtype))
    return folder


@examples(20)
@given(
    st.lists(st.lists(st.integers(0, END), max_size=40), min_size=1, max_size=3).filter(any),
    st.sampled_from(["after", "before"]),
    st.integers(1, 7),
    st.integers(1, 30),
)
def test_documents_are_those_of_a_cut_token_by_token(tmp_path_factory, streams, boundary, block, part):
    folder = tmp_path_factory.mktemp("npy")
    source = save(folder / "tokens", *streams)
    before = cut_source.BLOCK_TOKENS, cut_source.PART_TOKENS
    cut_source.BLOCK_TOKENS, cut_source.PART_TOKENS = block, part  # documents straddle blocks and parts
    try:
        report = convert([source], "stream", folder / "stream", boundary_token_id=END, boundary=boundary, workers=1)
    finally:
        cut_source.BLOCK_TOKENS, cut_source.PART_TOKENS = before
    expected = [(number, document) for number, tokens in enumerate(streams) for document in reference(tokens, boundary)]
    assert report.counts.documents == len(expected)
    with open_corpus(folder / "stream") as store:
        assert store.meta.boundary_token_id == END
        assert [store.documents[k].ids.tolist() for k in range(store.document_count)] == [each for _, each in expected]
        places = [store.documents[k] for k in range(store.document_count)]
    assert [place.source for place in places] == [str(source / f"part-{number}.npy") for number, _ in expected]
    counts = [0] * len(streams)
    for place, (number, _) in zip(places, expected, strict=True):
        counts[number] += 1
        assert place.row == counts[number]
    assert not [each.problem for each in verify_store(folder / "stream") if each.problem]


def test_a_large_file_is_cut_into_parts_for_many_shards(tmp_path, monkeypatch):
    tokens = np.random.default_rng(2).integers(0, END + 1, 2000)
    source = save(tmp_path / "tokens", tokens)
    convert([source], "stream", tmp_path / "one", boundary_token_id=END, workers=1)
    monkeypatch.setattr(cut_source, "PART_TOKENS", 100)
    report = convert([source], "stream", tmp_path / "many", boundary_token_id=END, shards=6, workers=1)
    assert len(report.shards) == 6
    facts = []
    for name in ("one", "many"):
        with open_corpus(tmp_path / name) as store:
            documents = [each.facts for each in store.documents]
            facts.append((store.tokens[0:2000].tolist(), documents))
    assert facts[0] == facts[1]


def test_arrays_are_taken_as_the_files_of_any_trainer_are(tmp_path):
    tokens = np.random.default_rng(2).integers(0, END + 1, 2000)
    source = save(tmp_path / "tokens", tokens[:900], tokens[900:])
    with pytest.raises(ArgumentError, match=r"part-0\.npy: tells no documents apart: pass boundary_token_id"):
        convert(source / "part-0.npy", "stream", tmp_path / "out")
    report = convert(source, "stream", tmp_path / "whole", tokens_only=True, workers=1)
    assert report.counts.documents == 2
    how = {"boundary_token_id": END, "dtype": "keep", "vocab_size": 200, "workers": 1}
    report = convert(source, "stream", tmp_path / "held", val_fraction=0.2, **how)
    with open_corpus(tmp_path / "held", split=None) as store:
        assert (store.dtype, store.num_tokens) == (np.uint16, len(tokens))
        assert 0 < store.split("val").document_count < report.counts.documents / 2
    with pytest.raises(ArgumentError, match="memory bounds documents whose number is known"):
        convert(source, "hdf5", tmp_path / "out", boundary_token_id=END, memory="2GiB")


def test_packed_batches_know_their_documents(tmp_path):
    streams = [[1, 2, END, 3, END], [4, 5, 6, 7, END, 8]]
    convert([save(tmp_path / "tokens", *streams)], "stream", tmp_path / "stream", boundary_token_id=END)
    how = {"batch_size": 3, "seq_len": 4, "shuffle": False, "packing": "concat", "remainder": "pad"}
    convert(tmp_path / "stream", "hdf5", tmp_path / "batches", **how)
    with Loader(tmp_path / "batches", shuffle="sequential", documents=("documents", "document_ids")) as loader:
        step = next(iter(loader))
    assert step["tokens"].tolist() == [[1, 2, END, 3], [END, 4, 5, 6], [END, END, END, END]]
    assert step["document_ids"].tolist() == [[0, 0, 0, 1], [2, 3, 3, 3], [-1] * 4]
    assert step["documents"].tolist() == [0, 1, 1, 2, -1]


def test_an_interrupted_run_goes_on(tmp_path):
    source = save(tmp_path / "tokens", [1, END, 2], [3, END], [4, END])
    with pytest.raises(Stops):
        convert([source], "stream", tmp_path / "stream", boundary_token_id=END, engine=Failing(2))
    with pytest.raises(ConvertError, match="resume"):
        convert([source], "stream", tmp_path / "stream", boundary_token_id=END)
    with pytest.raises(ConvertError, match="other"):
        convert([source], "stream", tmp_path / "stream", boundary_token_id=1, resume=True)
    report = convert([source], "stream", tmp_path / "stream", boundary_token_id=END, resume=True)
    assert report.kept.shards == 2
    arguments = ["npy-to-stream", source, tmp_path / "whole", "--boundary-token-id", END]
    assert "documents  4" in succeed(commands, *arguments).output
    assert ShardIndex.load(tmp_path / "whole").sha256 == report.sha256
    again = run(commands, *arguments)
    assert (again.exit_code, "exists" in again.output) == (1, True)


@pytest.mark.parametrize(("tokens", "how", "message"), [
    (np.array([[1, 2]]), {}, r"expected a 1-D stream of tokens, found shape \(1, 2\)"),
    (np.array([1.0]), {}, "integer"),
    (np.array([], "u2"), {}, "no documents in 1 file"),
    (np.array([1, 7]), {"vocab_size": 7}, r"a\.npy: .*7"),
    (np.array([1, 70_000]), {"dtype": "uint16"}, r"a\.npy: .*70,?000"),
])  # fmt: skip
def test_arrays_that_cannot_be_cut_are_refused(tmp_path, tokens, how, message):
    np.save(tmp_path / "a.npy", tokens)
    with pytest.raises((ConvertError, ArgumentError), match=message):
        convert([tmp_path / "a.npy"], "stream", tmp_path / "stream", boundary_token_id=1, **how)
    assert not (tmp_path / "stream").exists()
