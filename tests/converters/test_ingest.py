"""Text to batch stores: every token is where its document says, whatever the workers; nothing is left half-done."""

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from commandline import one_error, report_of, run, succeed
from contents import batches_of, files_in, write_stream
from contract import is_refused
from hypothesis import assume, example, given
from hypothesis import strategies as st
from interpreter import start_program
from interrupted import Failing, Recorded, Stops
from packed import places_of
from processes import wait_until

import zb_hdf5
from zb_hdf5.commands.zb_tokenizer import zb_tokenizer as tokenizer_group
from zb_hdf5.converters import document_plan
from zb_hdf5.converters.arguments import convert as run_conversion
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.converters.conversion import WHOLE, Conversion, LayoutOptions
from zb_hdf5.converters.engines import Engine, open_engine
from zb_hdf5.converters.journal import journal_name
from zb_hdf5.converters.packed_batches import PackedBatches
from zb_hdf5.converters.packing import BUFFER_DOCUMENTS, PACKINGS, best_fit, concat, pad
from zb_hdf5.converters.resolution import resolved
from zb_hdf5.converters.routes import ShardDocuments
from zb_hdf5.converters.run import run as run_one
from zb_hdf5.converters.text_source import Recipe, TextSource
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.loaders.order import write_order
from zb_hdf5.spec import NOT_KNOWN, documents_path
from zb_hdf5.store.rebuild import index_files, rebuild_index
from zb_hdf5.text.text_corpus import open_documents
from zb_hdf5.text.tokenizers import load_tokenizer

pytest_plugins = ["corpus"]  # the fixtures `texts` and `files`

BYTES = Recipe("byte", 256)
run_convert = partial(run, convert)


def layout(batch_size, seq_len, seed=42, shuffle=True, **more):
    return {"batch_size": batch_size, "seq_len": seq_len, "seed": seed, "shuffle": shuffle, **more}


SMALL = layout(batch_size=2, seq_len=16, seed=5)
STREAM = {"target": "stream"}


@pytest.fixture(autouse=True)
def many_streams(monkeypatch):
    """Stage these few rows in as many streams as those of a large source."""
    monkeypatch.setattr(document_plan, "MIN_STAGED", 8)


def stream_of(texts):
    return np.array([token for text in texts for token in [*text.encode(), 256]])


def expected_rows(texts, packing, seq_len, pad_id=256):
    """Return the packed rows of documents, in the order of the packing."""
    stream = stream_of(texts)
    plan = PACKINGS[packing](np.array([len(text) + 1 for text in texts]), seq_len)
    rows = np.full((plan.num_rows, seq_len), pad_id)
    for offset, length, row, column in zip(plan.offsets, plan.lengths, *places_of(plan), strict=True):
        rows[row, column : column + length] = stream[offset : offset + length]
    return rows


def read_rows(path):
    return np.concatenate(batches_of(path))


def ingest(files, destination, recipe=BYTES, options=SMALL, engine=None, **how):
    source, how = TextSource(files, "jsonl", recipe), {"target": "hdf5", **options, **how}
    return run_conversion(source, destination=destination, engine=engine or Engine(), **how)


@pytest.mark.parametrize("packing", sorted(PACKINGS))
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.thin
def test_stored_rows_are_the_packed_documents(tmp_path, files, texts, packing, shuffle):
    options = layout(2, 16, seed=5, packing=packing, shuffle=shuffle, shards=3)
    report = ingest(files, tmp_path / "out", options=options)
    rows = expected_rows(texts, packing, 16)
    order = write_order(len(rows), 5).indices(np.arange(len(rows))) if shuffle else np.arange(len(rows))
    found = read_rows(tmp_path / "out")
    assert np.array_equal(found[: len(rows)], rows[order])
    assert len(found) == -(-len(rows) // 2) * 2
    assert np.all(found[len(rows) :] == 256)
    index = zb_hdf5.ShardIndex.load(tmp_path / "out")
    assert len(index.shards) == 3
    assert (index.shuffle, index.meta.document_count) == ("global" if shuffle else "none", 150)
    assert json.loads(index.meta.tokenizer)["name"] == "byte"
    assert index.source["packing"] == packing
    counts = report.counts
    assert counts.tokens_in == len(stream_of(texts))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]
    sizes = [shard.num_batches for shard in index.shards]
    assert max(sizes) - min(sizes) <= 1
    if packing == "best-fit":  # in rows of 64 tokens each document is whole
        ingest(files, tmp_path / "out.h5", options=layout(2, 64, packing=packing))
        parts = read_rows(tmp_path / "out.h5").clip(0, 255).astype(np.uint8).tobytes().split(b"\xff")
        assert sorted(part.decode() for part in parts if part) == sorted(texts)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.thin
def test_workers_threads_and_force_do_not_change_a_byte(tmp_path, files, workers):
    (tmp_path / "out.tokens").mkdir()  # which is not a folder of ours
    (tmp_path / "out.tokens/mine").write_text("x")
    with open_engine("local", workers) as engine:
        report = ingest(files, tmp_path / "out", engine=engine, threads=workers)
    assert ingest(files, tmp_path / "again").sha256 == report.sha256
    assert ingest(files, tmp_path / "out", force=True).sha256 == report.sha256
    assert ingest(files, tmp_path / "out", resume=True).to_json() == {"path": str(tmp_path / "out"), "done": True}
    assert (tmp_path / "out.tokens/mine").read_text() == "x"


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_counts_the_text_and_then_the_tokens(tmp_path, files, workers):
    source, shown = TextSource(files, "jsonl", BYTES), Recorded()
    report = run_one(Conversion(source, "hdf5", tmp_path / "out", workers=workers, **SMALL), shown)
    (_, total, unit), (_, num_tokens, _) = shown.phases
    assert (total, unit) == (sum(group.num_bytes for group in source.groups), "B")
    assert num_tokens == report.tokens_stored
    assert [sum(amounts) for amounts in shown.amounts] == [total, num_tokens]
    assert len(files) < len(shown.amounts[0])


def test_progress_of_a_file_that_is_one_row_group_moves_on(tmp_path, monkeypatch):
    monkeypatch.setattr("zb_hdf5.console.LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr("zb_hdf5.text.document_file.BLOCK_DOCUMENTS", 10)
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "x" * 100}) + "\n") * 100)
    how = ("--tokenizer", "byte", "--seq-len", 64, "--workers", 1)
    shown = run_convert("jsonl-to-hdf5", tmp_path / "a.jsonl", tmp_path / "out", *how).stderr
    shares = re.findall(r"tokenizing: +(\d+)%", shown)
    assert len(set(shares)) >= 10
    assert "writing: 100%" in shown
    assert "0%  0 B/s  0:00 left" not in shown


@pytest.mark.parametrize("last", [True, False])
def test_splits_are_frozen_and_kept(tmp_path, files, texts, last):
    held_out = {"val_last_shard": True} if last else {"val_fraction": 0.3}
    options = layout(2, 16, shuffle=False, shards=2, **held_out)
    report = ingest(files, tmp_path / "out", options=options)
    index = zb_hdf5.ShardIndex.load(tmp_path / "out")
    splits = [shard.split for shard in index.shards]
    assert splits == sorted(splits)
    assert splits.count("train") == 2
    held_out_by = {key: index.source[key] for key in ("val_fraction", "val_seed") if key in index.source}
    assert held_out_by == ({} if last else {"val_fraction": 0.3, "val_seed": 42})
    train = report.batches_of_split["train"] * 2
    rows = read_rows(tmp_path / "out")
    if last:
        for stored, part in ((rows[:train], texts[:90]), (rows[train:], texts[90:])):
            expected = expected_rows(part, "concat", 16)
            assert np.array_equal(stored[: len(expected)], expected)
            assert np.all(stored[len(expected) :] == 256)
    succeed(convert, "hdf5-to-batch", tmp_path / "out", tmp_path / "copy", "--tokens-only")
    assert [shard.split for shard in zb_hdf5.ShardIndex.load(tmp_path / "copy").shards] == splits
    for target, *more in (("other", "--shards", "2"), ("one.batch",)):
        result = run_convert("hdf5-to-batch", tmp_path / "out", tmp_path / target, "--tokens-only", *more)
        assert "has the splits train, val, which must not be mixed" in one_error(result, 1)


def test_remainders(tmp_path, files, texts):
    rows = expected_rows(texts, "concat", 16)
    size = next(size for size in range(3, 40) if len(rows) % size)
    for remainder in ("drop", "pad"):
        options = layout(size, 16, shuffle=False, remainder=remainder, pad_id=7)
        ingest(files, tmp_path / f"{remainder}.h5", options=options)
    whole = len(rows) // size * size
    assert np.array_equal(read_rows(tmp_path / "drop.h5"), rows[:whole])
    padded = read_rows(tmp_path / "pad.h5")
    assert np.array_equal(padded[: len(rows)], rows)
    assert np.all(padded[len(rows) :] == 7)
    assert len(padded) == whole + size
    with pytest.raises(zb_hdf5.ConvertError, match=r"packed rows \(train\) are not a multiple of batch_size"):
        ingest(files, tmp_path / "other", options=layout(size, 16, remainder="error"))
    with pytest.raises(zb_hdf5.ConvertError, match="do not fill one batch of 100000"):
        ingest(files, tmp_path / "other", options=layout(100_000, 16, remainder="drop"), resume=True)
    # the tokens are kept for other arguments
    ingest(files, tmp_path / "other", options=layout(size, 16, shuffle=False, remainder="drop"), resume=True)
    assert np.array_equal(read_rows(tmp_path / "other"), rows[:whole])
    assert not list(tmp_path.glob("*.partial"))


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.sampled_from(sorted(PACKINGS)),
    st.sampled_from(["pad", "drop"]),
    st.integers(1, 7),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 5),
)
@example([512] * 20, "best-fit", "pad", 16, 512, True, 0)  # 4 rows were dropped by default
def test_the_counts_balance(tmp_path_factory, lengths, packing, remainder, batch_size, seq_len, shuffle, num_val):
    """Tokens in + padding = stored + dropped, counted in the batches: padding is 0 here, and no token is."""
    folder = tmp_path_factory.mktemp("staging")
    parts = {"train": lengths[num_val:], "val": lengths[:num_val]}
    staged = [write_stream_of(folder, split, part) for split, part in parts.items() if sum(part)]
    assume(staged)
    index_files(staged, splits={path.name: path.stem for path in staged}).save(folder)
    options = layout(batch_size, seq_len, shuffle=shuffle, packing=packing, remainder=remainder)
    try:
        target = resolved(Conversion(folder, "hdf5", folder / "out", source_format="stream"))[0].target
        source = PackedBatches(folder, folder, LayoutOptions(**options), target)
    except zb_hdf5.ConvertError:  # not one batch of a split
        return
    stored = np.empty((source.num_batches, batch_size, seq_len), np.uint32)
    source.read_into(0, stored)
    counts = source.counts
    counts.require_balance(stored.size)
    assert counts.tokens_in == sum(lengths)
    assert np.count_nonzero(stored == 0) == counts.padded
    assert np.count_nonzero(stored) == counts.tokens_in - sum(counts.dropped.values())
    records = stored.any(axis=2)
    assert source.meta.total_records == records.sum()
    assert counts.padding_rows == (~records).sum()
    if packing == "best-fit" and remainder == "pad":
        assert not counts.dropped
    shards = [stored[start:stop] for start, stop in source.cuts]
    assert [shard.records for shard in source.shards] == [shard.any(axis=2).sum() for shard in shards]
    assert [shard.documents for shard in source.shards] == [np.count_nonzero(shard == 1) for shard in shards]


def write_stream_of(folder, split, lengths):
    """Write documents of these lengths, which begin with token 1 and go on with 2."""
    documents = [np.array([1] + [2] * (length - 1), np.uint32) for length in lengths if length]
    return write_stream(folder / f"{split}.h5", np.concatenate(documents), lengths, dtype="uint32").path


@pytest.mark.parametrize("packing", sorted(PACKINGS))
@pytest.mark.thin
def test_shards_say_which_documents_begin_in_them(tmp_path, packing):
    rng = np.random.default_rng(7)
    texts = ["#" + "x" * rng.integers(0, 70) for _ in range(150)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = open_documents([tmp_path / "a.jsonl"])
    options = layout(4, 16, packing=packing, shards=3, val_fraction=0.2)
    ingest(files, tmp_path / "out", options=options)
    index = zb_hdf5.ShardIndex.load(tmp_path / "out")
    begun = []
    for shard in index.shards:
        rows = read_rows(tmp_path / "out" / shard.path)
        begun.append(np.count_nonzero(rows == ord("#")))
        with zb_hdf5.open_reader(tmp_path / "out" / shard.path) as reader:
            assert reader.meta.document_count == begun[-1]
            assert reader.meta.total_records == np.count_nonzero((rows != 256).any(axis=1))
    assert [shard.document_count for shard in index.shards] == begun
    assert index.meta.document_count == 150
    assert sum(begun) == 150 or (packing == "concat" and sum(begun) > 145)  # the stream's last tokens fill no row
    counted = json.loads((tmp_path / "out/shards.json").read_text())["shards"]["document_count"]
    assert counted == begun
    succeed(convert, "hdf5-to-batch", tmp_path / "out", tmp_path / "copy", "--tokens-only")
    succeed(convert, "batch-to-hdf5", tmp_path / "copy", tmp_path / "back")
    for copy in ("copy", "back"):
        assert [shard.document_count for shard in zb_hdf5.ShardIndex.load(tmp_path / copy).shards] == begun
        assert not [report.problem for report in zb_hdf5.verify_store(tmp_path / copy) if report.problem]
    for shard in index.shards:
        assert (tmp_path / "back" / shard.path).read_bytes() == (tmp_path / "out" / shard.path).read_bytes()
    rebuilt = rebuild_index(tmp_path / "back", force=True)
    assert [shard.document_count for shard in rebuilt.shards] == begun
    assert rebuilt.meta.total_records == index.meta.total_records


def test_shards_that_are_cut_anew_do_not_say_which_documents_they_hold(tmp_path, files):
    ingest(files, tmp_path / "out", options=layout(2, 16, shards=3))
    succeed(convert, "hdf5-to-batch", tmp_path / "out", tmp_path / "copy", "--shards", "2", "--tokens-only")
    index = json.loads((tmp_path / "copy/shards.json").read_text())
    assert (index["document_count"], index["shards"]["document_count"]) == (150, [NOT_KNOWN, NOT_KNOWN])


def test_the_report_says_what_is_padding_and_names_dropped_lines_and_no_row_is_dropped_by_default(tmp_path):
    """Twenty documents of a row each, in batches of 16: the last 4 rows were dropped."""
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "x" * 511}) + "\n") * 20)
    how = [tmp_path / "a.jsonl", "--tokenizer", "byte", "--batch-size", 16, "--packing", "best-fit"]
    report = report_of(convert, "jsonl-to-hdf5", how[0], tmp_path / "out", *how[1:])
    assert report["tokens_dropped"] == {}
    assert (report["tokens_in"], report["tokens_padded"], report["padding_rows"]) == (20 * 512, 12 * 512, 12)
    assert zb_hdf5.ShardIndex.load(tmp_path / "out").meta.total_records == 20
    told = run_convert("jsonl-to-hdf5", how[0], tmp_path / "two", *how[1:])
    said = "37.50% of the stored tokens, 12 whole rows to fill the last batch among them"
    assert said in " ".join(told.output.split())
    path = tmp_path / "b.jsonl"
    path.write_text('{"text": "' + "x" * 100 + '", "author": "A"}\nbad\n{"text": ""}\n' + '{"text": "y"}\n' * 2)
    options = ("--tokenizer", "byte", "--batch-size", 1, "--seq-len", 8, "--metadata-columns", "author")
    result = run_convert("jsonl-to-hdf5", path, tmp_path / "lines", *options)
    assert result.exit_code == 0
    assert "dropped    1 bad JSON, 1 empty\n" in result.stdout
    assert f"           line 2 of {path}: bad JSON\n" in result.stdout


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_metadata_that_no_document_has_are_refused(kind, tmp_path):
    rows = [{"text": "a text", "author": "A"}] * 2000
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "last", "late": 1}]))
    how = (path, tmp_path / "out", "--to", "stream", "--tokenizer", "byte", "--metadata-columns")
    error = one_error(run_convert(*how, "author,nope"), 1)
    assert f"{path}: no {'key' if kind == 'jsonl' else 'column'} 'nope' for its documents; " in error
    assert error.endswith("are: text, author")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if kind == "jsonl":  # a key that few lines have, and not one of the first, is no mistake
        succeed(convert, *how, "author,late")


@pytest.mark.parametrize("count", [2, 3000])
def test_ids_that_come_twice_are_refused_and_no_cure_is_named_that_fails(count, tmp_path):
    """Among the first documents before any is tokenized, else when all are; `--force` with another column goes on."""
    ids = [*range(count), count - 2]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {k}", "id": id, "k": k}) + "\n" for k, id in enumerate(ids)))
    how = ["jsonl-to-hdf5", path, tmp_path / "out", "--tokenizer", "byte", "--seq-len", 8, "--batch-size", 1]
    error = one_error(run_convert(*how, "--id-column", "id"), 1)
    expected = f"line {count + 1:,} of {path}: the id '{count - 2}' was there before, in line {count - 1:,} of {path}: "
    assert expected in error
    assert "or leave out --id-column" in error
    assert "--resume" not in error
    is_tokenized = count > 2000
    assert ("start over with --force" in error) == is_tokenized
    assert [file.name for file in tmp_path.iterdir() if file != path] == ["out.tokens.partial"] * is_tokenized
    succeed(convert, *how, "--id-column", "k", *(["--force"] if is_tokenized else []))


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_text_for_files_of_tokens_only_is_refused_before_it_is_tokenized(dry_run, tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "x" * 7}) + "\n") * 30)
    how = [tmp_path / "a.jsonl", tmp_path / "out.npy", "--tokenizer", "byte", "--seq-len", 8, "--batch-size", 1]
    error = one_error(run_convert(*how, *dry_run), 1)
    assert "npy files hold tokens and nothing else: the conversion leaves behind the places of documents" in error
    assert "pass --tokens-only to leave them behind" in error
    assert "--resume" not in error
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
    succeed(convert, *how, *dry_run, "--tokens-only")


def test_the_report_names_one_row_of_padding_as_one(tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "x" * 7}) + "\n") * 3)
    how = ("--tokenizer", "byte", "--batch-size", 4, "--seq-len", 8, "--packing", "best-fit")
    told = run_convert("jsonl-to-hdf5", tmp_path / "a.jsonl", tmp_path / "out", *how)
    assert "25.00% of the stored tokens, 1 whole row to fill the last batch among them" in " ".join(told.output.split())


@pytest.fixture
def dump(tmp_path):
    """A dump as Wikidata has it: lines of an array, of which the last object alone ends without a comma."""
    path = tmp_path / "a dump.jsonl"
    objects = [json.dumps({"text": f"document {number}"}) for number in range(40)]
    path.write_text("[\n" + ",\n".join(objects) + "\n]\n")
    return path


AS_BYTES = ("--tokenizer", "byte", "--seq-len", 8, "--batch-size", 1)


@pytest.mark.parametrize(("to", "name"), [
    ("hdf5", "out"), ("batch", "out.batch"), ("stream", "out"), ("megatron", "out"), ("megatron", "out.bin"),
])  # fmt: skip
def test_more_than_half_of_the_lines_dropped_is_an_error(tmp_path, dump, to, name):
    how = ["--from", "jsonl", "--to", to, dump, tmp_path / name, *AS_BYTES[: 2 if to in ("stream", "megatron") else 6]]
    how += ["--tokens-only"] if to == "batch" else []
    error = one_error(run_convert(*how), 1)
    assert "to be dropped, found 41 of 42 (41 in a JSON array)" in error
    assert "if it is right, pass --max-dropped 0.98" in error
    assert not (tmp_path / name).exists()
    is_kept = "--resume" in error
    assert is_kept == (name != "out.bin")
    again = ["--resume"] if is_kept else []
    report = report_of(convert, *how, "--max-dropped", 0.98, *again)
    assert (report["documents"], report["documents_dropped"]) == (1, {"in a JSON array": 41})
    assert report["tokens_kept"] == (len("document 39") + 1 if is_kept else 0)


def test_the_line_for_an_array_writes_the_documents(tmp_path, dump):
    error = one_error(run_convert("--to", "stream", dump, tmp_path / "out", *AS_BYTES[:2]), 1)
    line = error.partition("which this writes: ")[2].partition("; if it is right")[0]
    if shutil.which("jq"):
        subprocess.run(["/bin/sh", "-c", line], check=True, timeout=60)
    else:
        assert line == f"cat '{dump}' | jq -c '.[]' > '{tmp_path}/lines-a dump.jsonl'"
        (tmp_path / "lines-a dump.jsonl").write_text("\n".join(map(json.dumps, json.loads(dump.read_text()))))
    report = report_of(convert, "--to", "stream", tmp_path / "lines-a dump.jsonl", tmp_path / "new", *AS_BYTES[:2])
    assert (report["documents"], report["documents_dropped"]) == (40, {})


def write_tokenizer(path, model):
    none = dict.fromkeys(["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"])
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], **none, "model": model}))


def documents_of(store):
    """Return the documents of a store of streams as h5py shows them."""
    found = []
    for path in sorted(store.glob("*.h5")):
        with h5py.File(path) as h5:
            tokens, offsets = h5["tokens"][:], h5["doc_offsets"][:]
            found += [tokens[a:b].tolist() for a, b in pairwise(offsets[offsets <= len(tokens)])]
    return [each for each in found if each]


@pytest.mark.parametrize("options", [[], ["--val-fraction", 0.5]])
def test_characters_without_a_token_are_counted(tmp_path, options):
    pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path / "tok.json", {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []})
    lines = ["a世b", "ab", "界", "", "aab?!"] * 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    how = ["--to", "stream", tmp_path / "a.jsonl", tmp_path / "out", "--tokenizer", tmp_path / "tok.json", *options]
    result = run_convert(*how, "--no-boundary", code=0)
    assert "the tokenizer has no token for 80 characters of 60 documents, which are lost" in result.stdout
    assert result.stderr.count("characters that it has no token for are lost") == 1
    report = report_of(convert, *how, "--no-boundary", "--force")
    assert (report["documents"], report["documents_lossy"], report["characters_lost"]) == (80, 60, 80)


@pytest.mark.parametrize("options", [[], ["--val-fraction", 0.5]])
def test_a_document_that_the_tokenizer_refuses_is_dropped_with_its_row(tmp_path, options):
    pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path / "tok.json", {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "?"})
    lines = ["a", "b", "c", "a"] * 20
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(lines))
    )
    how = ["--tokenizer", tmp_path / "tok.json", "--no-boundary", "--id-column", "id", *options]
    report = report_of(convert, "--to", "stream", tmp_path / "a.jsonl", tmp_path / "out", *how)
    assert (report["documents"], report["documents_dropped"]) == (60, {"refused by the tokenizer": 20})
    first = [f"line {number} of {tmp_path}/a.jsonl: refused by the tokenizer" for number in range(3, 80, 4)]
    assert {*report["documents_dropped_first"]} <= {*first}
    ids = [[0 if text == "a" else 1] for text in lines if text != "c"]
    assert sorted(documents_of(tmp_path / "out")) == sorted(ids)


@pytest.mark.slow
def test_a_million_spaces_in_a_document_do_not_end_the_job(tmp_path):
    pytest.importorskip("tiktoken")
    texts = ["one two", "\t" * 1_000_000, "three"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"{text} x"}) + "\n" for text in texts))
    succeed(tokenizer_group, "train", tmp_path / "train.jsonl", "-o", tmp_path / "tok.json", "--vocab-size", 300)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for spec in ("tok.json", "tok.tiktoken"):
        how = ["--to", "stream", tmp_path / "a.jsonl", tmp_path / spec.replace(".", "-"), "--threads", 2]
        report = report_of(convert, *how, "--tokenizer", tmp_path / spec)
        assert (report["documents"], report["documents_dropped"]) == (3, {})
        ids = [document[:-1] for document in documents_of(how[3])]
        assert [load_tokenizer(str(tmp_path / spec)).decode(each) for each in ids] == texts


@pytest.mark.parametrize("dropped", [1.5, -0.1])
def test_the_share_of_dropped_lines_is_a_share(tmp_path, dump, dropped):
    expected = rf"max_dropped must be from 0 to 1, found {dropped}"
    with pytest.raises(zb_hdf5.ArgumentError, match=expected):
        zb_hdf5.convert(dump, "stream", tmp_path / "out", tokenizer="byte", max_dropped=dropped)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("out", SMALL, "out: exists already"),
    ("out", STREAM, "out: exists already"),
    ("new", layout(2, 16, packing="tight"), "packing must be one of concat, best-fit, pad, found 'tight'"),
    ("new", layout(2, 16, pad_id=257), r"pad_id: token id 257 at the padding is outside 0\.\.256"),
    ("two.h5", layout(2, 16, val_fraction=0.1), "is one file; name a folder"),
    ("new", layout(2, 16, shards=10**6), "batches cannot fill 1,000,000 shards"),
])  # fmt: skip
def test_errors_come_before_the_work(tmp_path, files, name, options, message):
    (tmp_path / "out").mkdir()
    with pytest.raises((zb_hdf5.ConvertError, zb_hdf5.ArgumentError), match=message):
        ingest(files, tmp_path / name, options=options)
    (tmp_path / "corpus/bad.jsonl").write_text("{\nbad\n")
    how = options if options is STREAM else SMALL
    expected = r"no documents in 1 file \(1 of JSON over several lines, 1 bad JSON\)"
    with pytest.raises(zb_hdf5.ConvertError, match=expected):
        ingest(open_documents([tmp_path / "corpus/bad.jsonl"]), tmp_path / "bad", options=how)
    kept = ["new.tokens.partial"] if "shards" in options else []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", *kept, "out"]


@pytest.mark.parametrize(("name", "options", "message"), [
    *(("corpus", options, r"corpus: is or holds the source .*shard-0\.jsonl; choose another output")
      for options in (SMALL, STREAM)),
    ("out.npy", SMALL, r"out\.npy: expected a folder or a name that ends in \.h5"),
    ("out.h5", SMALL | {"shard_size": 64}, r"out\.h5: is one file; name a folder"),
    *((f"out{suffix}", STREAM, rf"out{suffix}: expected the name of a folder, for the files of the stream")
      for suffix in (".h5", ".hdf5", ".batch", ".npy", ".bin")),
    ("no/out", SMALL, "no such folder"),
])  # fmt: skip
def test_a_bad_destination_is_refused_before_the_work(tmp_path, monkeypatch, name, options, message):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/shard-0.jsonl").write_text('{"text": "the only copy"}\n')
    done = tokenized(monkeypatch)
    with pytest.raises(zb_hdf5.ConvertError, match=message):
        ingest(open_documents([tmp_path / "corpus"]), tmp_path / name, options=options, force=True)
    assert not done
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["corpus", "corpus/shard-0.jsonl"]


@pytest.mark.parametrize("how", [[], ["--layout", "stream"], ["--val-fraction", "0.5"], ["--val-last-shard"]])
def test_a_parquet_file_without_row_groups_has_no_documents(tmp_path, how):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.ParquetWriter(tmp_path / "a.parquet", arrow.schema([("text", arrow.string())])).close()
    result = run_convert("parquet-to-hdf5", tmp_path / "a.parquet", tmp_path / "out", "--tokenizer", "byte", *how)
    assert (result.exit_code, f"{tmp_path / 'a.parquet'}: no documents in 1 file" in result.stderr) == (1, True)
    with pytest.raises(zb_hdf5.ConvertError, match="no documents in 1 file"):
        ingest(open_documents([tmp_path / "a.parquet"]), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def tokenized(monkeypatch):
    """Return a list that grows with each file of tokens that is made."""
    real, routes = ShardDocuments.read, []

    def read(route, *rest):
        routes.append(route)
        yield from real(route, *rest)

    monkeypatch.setattr(ShardDocuments, "read", read)
    return routes


@pytest.mark.parametrize("num_tasks", [0, 1, 3, 5, 7])
@pytest.mark.thin
def test_finished_tokens_and_shards_are_kept(num_tasks, tmp_path, files, monkeypatch):
    options = SMALL | {"shards": 4}
    whole = ingest(files, tmp_path / "whole", options=options)
    is_refused(Stops, lambda: ingest(files, tmp_path / "out", options=options, engine=Failing(num_tasks)))
    waiting = partial_path(tmp_path / "out.tokens")
    assert waiting.exists() == (num_tasks > 0)
    if num_tasks:
        with pytest.raises(zb_hdf5.ConvertError, match=r"interrupted conversion .*go on with resume=True"):
            ingest(files, tmp_path / "out", options=options)
    done = tokenized(monkeypatch)
    again = ingest(files, tmp_path / "out", options=options, resume=True)
    assert len(done) == max(0, 4 - num_tasks)
    assert (again.documents_kept > 0) is (num_tasks > 0)
    assert (again.documents_kept == whole.counts.tokens_in) is (not done)
    assert again.kept.shards == max(0, num_tasks - 4)
    assert (again.sha256, again.counts) == (whole.sha256, whole.counts)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out", "whole"]


@pytest.mark.parametrize("num_tasks", [2, 5])
@pytest.mark.thin
def test_a_replacement_goes_on_too(num_tasks, tmp_path, files, monkeypatch):
    options = SMALL | {"shards": 4, "pad_id": 7, "packing": "pad"}
    whole = ingest(files, tmp_path / "whole", options=options)
    ingest(files, tmp_path / "out")
    before = files_in(tmp_path / "out")
    with pytest.raises(Stops) as caught:
        ingest(files, tmp_path / "out", options=options, engine=Failing(num_tasks), force=True)
    assert any("go on with resume=True and force=True" in note for note in caught.value.__notes__)
    with pytest.raises(zb_hdf5.ConvertError, match="out: exists already"):
        ingest(files, tmp_path / "out", options=options, resume=True)
    assert files_in(tmp_path / "out") == before
    done = tokenized(monkeypatch)
    ingest(files, tmp_path / "out", options=options, resume=True, force=True)
    assert len(done) == max(0, 4 - num_tasks)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")
    assert whole.counts.padded
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out", "whole"]


@pytest.mark.parametrize("damage", ["flip", "cut", "lose", "lengths", "table"])
@pytest.mark.thin
def test_damaged_tokens_are_made_again(damage, tmp_path, files, monkeypatch):
    whole = ingest(files, tmp_path / "whole")
    is_refused(Stops, lambda: ingest(files, tmp_path / "out", engine=Failing(3)))
    [path] = partial_path(tmp_path / "out.tokens").glob("shard-00001-*.h5")
    lengths = documents_path(path)
    data = bytearray(path.read_bytes())
    if damage == "lose":
        path.unlink()
    elif damage == "lengths":
        lengths.write_bytes(b"")
    elif damage == "table":
        lengths.write_bytes(lengths.read_bytes()[:-1] + b"\xff")
    else:
        data[7] ^= 4
        path.write_bytes(data[:-2] if damage == "cut" else data)
    done = tokenized(monkeypatch)
    assert ingest(files, tmp_path / "out", resume=True).sha256 == whole.sha256
    assert len(done) == 2


def test_tokens_of_other_documents_are_not_gone_on_with(tmp_path, files):
    is_refused(Stops, lambda: ingest(files, tmp_path / "out", engine=Failing(1)))
    waiting = partial_path(tmp_path / "out.tokens")
    journal = waiting / journal_name(WHOLE)
    for name, recipe in (("boundary_token_id", Recipe("byte", None)), ("max_document_tokens", Recipe("byte", 256, 7))):
        with pytest.raises(zb_hdf5.ConvertError, match=f"holds another conversion: its {name} is"):
            ingest(files, tmp_path / "out", recipe=recipe, resume=True)
    with pytest.raises(zb_hdf5.ConvertError, match="holds another conversion: its routing is"):
        ingest(files, tmp_path / "out", options=SMALL | {"val_fraction": 0.2}, resume=True)
    os.utime(files[0].path, ns=(1, 1))
    with pytest.raises(zb_hdf5.ConvertError, match=r"holds another conversion: its .*/a.jsonl is \[.*, here it is"):
        ingest(files, tmp_path / "out", resume=True)
    journal.write_text("not json\n")
    with pytest.raises(zb_hdf5.FormatError, match="start over with force=True"):
        ingest(files, tmp_path / "out", resume=True)
    assert len(list(waiting.iterdir())) > 1
    ingest(files, tmp_path / "out", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


@pytest.mark.slow
def test_every_kind_of_file_gives_the_same_store(tmp_path, texts):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"body": texts}), tmp_path / "a.parquet", row_group_size=40)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    (tmp_path / "txt").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / f"txt/{number:03}.txt").write_text(text)
    options = ["--tokenizer", "byte", "--batch-size", 2, "--seq-len", 16]
    column = ["--text-column", "body"]
    digests = set()
    for kind, source, more in (("parquet", "a.parquet", column), ("jsonl", "a.jsonl", column), ("text", "txt", [])):
        report = report_of(convert, f"{kind}-to-hdf5", tmp_path / source, tmp_path / f"{kind}-store", *options, *more)
        assert (report["documents"], report["documents_dropped"]) == (150, {})
        digests.add(report["sha256"])
    assert len(digests) == 1


@pytest.mark.parametrize("layout", ["batches", "stream"])
@pytest.mark.thin
def test_resume_of_a_finished_store_says_so(layout, tmp_path, files):
    own = ["--batch-size", 2, "--seq-len", 16] if layout == "batches" else []
    command = ["jsonl-to-hdf5", tmp_path / "corpus", tmp_path / "out", "--tokenizer", "byte", "--layout", layout, *own]
    assert run_convert(*command).exit_code == 0
    before = files_in(tmp_path / "out")
    left = tmp_path / "out" / journal_name(WHOLE)  # by a kill behind the renaming
    left.write_text("{}\n")
    result = run_convert(*command, "--resume")
    assert (result.exit_code, "nothing to do" in result.stdout) == (0, True), result.output
    assert files_in(tmp_path / "out") == before
    other = run_convert(*command, "--resume", "--max-document-tokens", 9)
    assert (other.exit_code, "out: exists already" in other.stderr) == (1, True)
    assert run_convert(*command, "--resume", "--force").exit_code == 0
    assert files_in(tmp_path / "out") == before
    os.utime(files[0].path)  # what was written now is newer than the store
    assert run_convert(*command, "--resume").exit_code == 1
    assert run_convert(*command, "--executor", "mpi", "--workers", 2).exit_code == 2


def test_the_two_layouts_leave_each_other_alone(tmp_path, files):
    batches, stream = (partial(ingest, files, options=how) for how in (SMALL | {"shards": 4}, STREAM))
    for name, one, other, tasks in (("out", stream, batches, 1), ("new", batches, stream, 6)):
        with pytest.raises(Stops):
            one(tmp_path / name, engine=Failing(tasks))
        before = files_in(partial_path(tmp_path / name))
        for resume in (False, True):
            with pytest.raises(
                zb_hdf5.ConvertError, match="conversion of another kind is there; start over with force=True"
            ):
                other(tmp_path / name, resume=resume)
        assert files_in(partial_path(tmp_path / name)) == before
    batches(tmp_path / "out", force=True)
    assert not list((tmp_path / "out").glob("journal*"))


@pytest.mark.parametrize(("options", "code", "message"), [
    (["--tokenizer", "nonsense"], 2, "expected byte"),
    (["--tokenizer", "byte", "--boundary-token", "<s>"], 2, "no special token '<s>'"),
    (["--tokenizer", "byte", "--boundary-token", "<s>", "--no-boundary"], 2, "not both"),
    (["--tokenizer", "byte", "--text-column", "body"], 1, "no documents in 1 file ("),
    (["--tokenizer", "byte", "--val-fraction", "0.1", "--val-last-shard"], 2, "not both"),
    (["--tokenizer", "byte", "--val-last-shard"], 1, "leaves nothing to train on"),
    (["--tokenizer", "byte", "--seed", 2**64], 2, "seed must be between 0 and 2**64 - 1, found 1844"),
    (["--tokenizer", "byte", "--seed", 2**64, "--val-fraction", "0.1"], 2, "seed must be between 0 and 2**64 - 1"),
    (["--tokenizer", "byte", "--shard-per-source"], 2, "belongs to --layout stream"),
    (["--tokenizer", "byte", "--layout", "stream", "--shard-per-source", "--shards", 2], 2, "not both"),
    ([], 2, "Missing option '--tokenizer'. Take the tokenizer.json of your model, or make one with 'zb tokenizer t"),
])  # fmt: skip
def test_usage_errors(tmp_path, options, code, message):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    result = run_convert("jsonl-to-hdf5", tmp_path / "a.jsonl", tmp_path / "out", *options)
    assert (result.exit_code, message in result.output) == (code, True), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def has_bytes(folder):
    """Return whether a file in a folder has bytes; one that gets another name at this moment is looked at later."""
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):
            if path.stat().st_size:
                return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.thin
def test_a_killed_ingest_leaves_nothing_under_the_final_name(tmp_path, number):
    text = "many words " * 20
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}\n' * 300_000)
    command = ("jsonl-to-hdf5", tmp_path / "a.jsonl", tmp_path / "out", "--tokenizer", "byte")
    waiting = partial_path(tmp_path / "out.tokens")
    with start_program("from zb_hdf5.converters.cli import convert_commands; convert_commands()", *command) as process:
        wait_until(lambda: has_bytes(waiting), process, 0.01)
        process.send_signal(number)
        process.communicate()
    left = {path.name for path in tmp_path.iterdir()} - {"a.jsonl"}
    assert left <= {waiting.name}  # tokens that are finished are kept for --resume
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}\n' * 100)
    succeed(convert, *command, "--force")
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "out"}


@pytest.mark.slow
def test_real_text_packs_well(tmp_path):
    """Best-fit loses nothing of Python's sources and pads less than 2 %; a document a row loses most of them."""
    files = open_documents(sorted(Path(json.__file__).parent.parent.glob("*.py")), "text")
    for packing, lost in (("best-fit", False), ("pad", True)):
        options = layout(4, 2048, packing=packing, remainder="pad")
        counts = run_conversion(TextSource(files, "text", BYTES), "hdf5", tmp_path / packing, **options).counts
        assert (sum(counts.dropped.values()) > 0.5 * counts.tokens_in) is lost
        assert (counts.padded < 0.02 * counts.tokens_in) or lost


def test_a_loader_reads_one_split(tmp_path, files):
    options = layout(2, 16, val_fraction=0.3, shards=2)
    counts = ingest(files, tmp_path / "out", options=options).batches_of_split
    stored = batches_of(tmp_path / "out")
    how = {"rank": 0, "world_size": 1, "shuffle": "sequential"}
    train = np.stack([batch.numpy() for batch in zb_hdf5.Loader(tmp_path / "out", **how)])
    val = np.stack([batch.numpy() for batch in zb_hdf5.Loader(tmp_path / "out", split="val", **how)])
    assert (len(train), len(val)) == (counts["train"], counts["val"])
    assert np.array_equal(np.concatenate([train, val]), stored)
    refused = rf"{tmp_path}/out: expected a split that this store has \(train, val\), found 'test'"
    with pytest.raises(zb_hdf5.ArgumentError, match=refused):
        zb_hdf5.open_reader(tmp_path / "out", split="test")
    [shard] = [shard.path for shard in zb_hdf5.ShardIndex.load(tmp_path / "out").shards if shard.split == "val"]
    with pytest.raises(zb_hdf5.ArgumentError, match="split='val' needs a store, found one file"):
        zb_hdf5.open_reader(tmp_path / "out" / shard, split="val")
    with zb_hdf5.open_reader(tmp_path / "out" / shard, split="train") as reader:
        assert reader.num_batches == counts["val"]
    state = zb_hdf5.Loader(tmp_path / "out", **how).state_dict()
    is_refused(zb_hdf5.StateError, lambda: zb_hdf5.Loader(tmp_path / "out", split="val", **how).load_state_dict(state))


@pytest.mark.parametrize("size_kib", [100, 300, 612, 620, 632, 640])
def test_a_disk_that_fills_is_one_message_with_path_and_cause(size_kib, mount_disk, tmp_path):
    """The tokens take 600 KiB, the tables of the documents 2 x 30, the plan 36: the disk fills in one of them."""
    disk = mount_disk(size_kib)
    (tmp_path / "in.jsonl").write_text((json.dumps({"text": "x" * 199}) + "\n") * 1536)
    arguments = ["jsonl-to-hdf5", tmp_path / "in.jsonl", disk / "out", "--tokenizer", "byte", "--seq-len", 200]
    result = run_convert(*arguments, "--quiet", "--workers", "1")
    assert result.exit_code == 1
    said = rf"Error: {disk}/out\.tokens\.partial/(shard|doc)[^:]*: No space left on device.*; free some"
    assert re.match(said, result.stderr.splitlines()[0])


# --- packing, as a pure function of the lengths of documents -----------------------------------------------------
LENGTHS = st.lists(st.integers(0, 70), max_size=60).map(lambda lengths: np.array(lengths, np.int64))
SEQ_LENS = st.integers(1, 40)


def rows_of(packing, stream):
    """Return each row as a list of its pieces' tokens."""
    pieces = [stream[a : a + n].tolist() for a, n in zip(packing.offsets, packing.lengths, strict=True)]
    return [pieces[a:b] for a, b in zip(packing.first[:-1], packing.first[1:], strict=True)]


def best_fit_by_hand(sizes, seq_len):
    """The algorithm as the textbook has it: one piece after the other, into the fullest row that has room."""
    room = []
    for size in sorted(sizes, reverse=True):
        fits = [(left, row) for row, left in enumerate(room) if left >= size]
        row = min(fits)[1] if fits else len(room)
        room[row:] = room[row:] or [seq_len]
        room[row] -= size
    return sorted(room)


@given(LENGTHS, SEQ_LENS, st.sampled_from(sorted(PACKINGS)))
def test_every_packing_is_consistent(lengths, seq_len, name):
    packing = PACKINGS[name](lengths, seq_len)
    assert packing.tokens_kept <= packing.num_rows * seq_len
    assert packing.tokens_kept <= lengths.sum()
    assert np.all(packing.lengths > 0)
    rows, columns = places_of(packing)
    ends = columns + packing.lengths
    assert np.all(ends <= seq_len)
    same_row = np.diff(rows) == 0
    assert np.array_equal(columns[1:][same_row], ends[:-1][same_row])
    covered = np.concatenate(
        [np.arange(a, a + n) for a, n in zip(packing.offsets, packing.lengths, strict=True)] or [[]]
    )
    assert len(np.unique(covered)) == len(covered), "a token in two rows"


@given(LENGTHS, SEQ_LENS)
def test_concat_is_plain_slicing_and_pad_gives_each_document_a_row(lengths, seq_len):
    stream = np.arange(lengths.sum())
    whole = len(stream) // seq_len * seq_len
    expected = stream[:whole].reshape(-1, seq_len).tolist()
    assert [piece for row in rows_of(concat(lengths, seq_len), stream) for piece in row] == expected
    documents = np.split(stream, np.cumsum(lengths)[:-1]) if len(lengths) else []
    expected = [[document[:seq_len].tolist()] for document in documents if len(document)]
    assert rows_of(pad(lengths, seq_len), stream) == expected


@given(LENGTHS, SEQ_LENS)
@example(np.array([3, 3, 3, 3, 3, 3, 3], np.int64), 10)
def test_best_fit_is_the_textbook_algorithm(lengths, seq_len):
    packing = best_fit(lengths, seq_len)
    sizes = [min(seq_len, n - k) for n in lengths.tolist() for k in range(0, n, seq_len)]
    used = np.bincount(places_of(packing)[0], packing.lengths, minlength=packing.num_rows).astype(int)
    assert sorted((seq_len - used).tolist()) == best_fit_by_hand(sizes, seq_len)


@given(LENGTHS, SEQ_LENS, st.none() | st.integers(1, 20))
def test_best_fit_loses_nothing_and_splits_only_what_is_longer_than_a_row(lengths, seq_len, buffer_documents):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zb_hdf5.converters.packing.BUFFER_DOCUMENTS", buffer_documents or BUFFER_DOCUMENTS)
        packing = best_fit(lengths, seq_len)
    assert packing.tokens_kept == lengths.sum()
    assert np.all(places_of(packing)[1] + packing.lengths <= seq_len)
    starts = np.cumsum(lengths) - lengths
    number = np.searchsorted(starts, packing.offsets, side="right") - 1
    into = packing.offsets - starts[number]
    assert np.all(into % seq_len == 0), "a piece begins elsewhere than at a document or a multiple of seq_len"
    assert np.array_equal(packing.lengths, np.minimum(lengths[number] - into, seq_len))


@pytest.mark.parametrize("seq_len", [512, 2048])
def test_best_fit_of_web_like_lengths_wastes_little(seq_len):
    lengths = np.random.default_rng(1).lognormal(6, 1.2, 200_000).astype(np.int64) + 1
    packing = best_fit(lengths, seq_len)
    assert packing.tokens_kept > 0.999 * packing.num_rows * seq_len
    cropped = np.maximum(lengths - seq_len, 0).sum()
    assert cropped > 0.1 * lengths.sum(), "the lengths are too easy to prove anything"
