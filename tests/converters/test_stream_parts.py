"""The parts of a job array: documents as a stream, and the two steps by which jobs write rows of them."""

import gzip
import json
import shlex
import shutil
import signal
from functools import partial

import h5py
import numpy as np
import pytest
from commandline import one_error, report_of, run_zb
from contents import batches_of, files_in, write_batches, write_stream
from contract import is_refused
from damage import flip
from interrupted import Failing, Stops, ended_after
from processes import killed_when

from zb_hdf5 import ArgumentError, ChecksumError, ConvertError, ShardIndex, convert
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.merge import merge_parts
from zb_hdf5.converters.text_source import Recipe, TextSource
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.spec import documents_path
from zb_hdf5.store.verify import verify_store
from zb_hdf5.text.text_corpus import open_documents

TEXT = {"tokenizer": "byte", "workers": 1}
JOBS = 3


def texts(name, count=40):
    return [f"document {number} of {name} " * (1 + number % 7) for number in range(count)]


def lines(name):
    rows = [{"text": text, "id": f"{name}-{k}"} for k, text in enumerate(texts(name))]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def corpus(tmp_path):
    """Return a folder with JSON lines in three files, of which each has 40 documents with ids."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl").write_bytes(lines(name))
    return folder


def in_parts(source, destination, *, jobs=JOBS, order=(), **options):
    """Write each part, and merge them."""
    for job in order or range(jobs):
        convert(source, "stream", destination, shard_range=(job, jobs), **options)
    return merge_parts(destination)


def require_same(source, tmp_path, **options):
    """See that the parts of a source are the undivided stream, byte for byte."""
    convert(source, "stream", tmp_path / "whole", **options)
    in_parts(source, tmp_path / "parts", **options)
    assert files_in(tmp_path / "parts") == files_in(tmp_path / "whole")
    assert not partial_path(tmp_path / "parts").exists()
    return ShardIndex.load(tmp_path / "parts")


@pytest.mark.parametrize("options", [
    {},
    {"shards": 5},
    {"shards": 7, "val_fraction": 0.2},
    {"val_fraction": 0.2, "seed": 7},
    {"val_last_shard": True},
    {"codec": "zstd", "note": "some words"},
    {"id_column": "id", "metadata_columns": ("text",)},
    {"max_document_tokens": 40, "no_boundary": True},
    {"shards": 2},
], ids=str)  # fmt: skip
@pytest.mark.thin
def test_the_parts_of_text_are_the_undivided_stream(options, corpus, tmp_path):
    index = require_same(corpus, tmp_path, **TEXT, **options)
    assert {report.outcome for report in verify_store(tmp_path / "parts")} == {"verified"}
    assert index.meta.document_count == 120
    assert len(index.shards) == options.get("shards", 3) + ("val_fraction" in options)


def test_a_seed_draws_other_documents_of_a_stream_to_hold_out(corpus, tmp_path):
    held = {}
    for seed in (42, 7):
        convert(corpus, "stream", tmp_path / str(seed), **TEXT, val_fraction=0.2, seed=seed)
        held[seed] = ShardIndex.load(tmp_path / str(seed)).of_split("val").sha256
    convert(corpus, "stream", tmp_path / "default", **TEXT, val_fraction=0.2)
    assert held[42] == ShardIndex.load(tmp_path / "default").of_split("val").sha256 != held[7]
    is_refused(ArgumentError, lambda: convert(corpus, "stream", tmp_path / "out", **TEXT, seed=7),
               match="seed belongs to layout batches: a stream has no rows")  # fmt: skip


def made_gzip(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines("a")))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines("b")))
    return TEXT


def made_parquet(folder):
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    parquet.write_table(table({"text": texts("a")}), folder / "a.parquet", row_group_size=7)
    return TEXT


def made_text(folder):
    for name in "abcdef":  # a file is one document, and each shard has one of its own
        (folder / f"{name}.txt").write_text("".join(texts(name)))
    return TEXT


def made_splits(folder):
    for name in ("train-0", "train-1", "validation"):
        (folder / f"{name}.jsonl").write_bytes(lines(name))
    return TEXT


def made_hf(folder):
    rows = [{"input_ids": [*range(1 + k)], "labels": [*range(1 + k)]} for k in range(50)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source_format": "hf", "vocab_size": 100}


def made_ragged(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file["ids"] = np.arange(300, dtype=np.uint16)
        file["offsets"] = np.array([0, 5, 90, 100, 180, 300])
    return {"source_format": "ragged"}


def made_npy(folder):
    for name in "ab":
        np.save(folder / f"{name}.npy", np.arange(400, dtype=np.uint16) % 23)
    return {"boundary_token_id": 0}


def made_streams(folder):
    write_stream(folder / "a.h5", np.arange(300, dtype=np.uint16), [5, 85, 10, 80, 120])
    return {}


@pytest.mark.parametrize("shards", [None, 5])
@pytest.mark.parametrize(
    "made", [made_gzip, made_parquet, made_text, made_splits, made_hf, made_ragged, made_npy, made_streams]
)
@pytest.mark.thin
def test_every_source_of_documents_has_parts(made, shards, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    options = made(folder)
    source = folder / "a.h5" if made is made_streams else folder
    assert len(require_same(source, tmp_path, **options, **({"shards": shards} if shards else {})).shards)


def test_a_job_tokenizes_its_files_alone(corpus, tmp_path, monkeypatch):
    read = TextSource.read
    numbers = []
    monkeypatch.setattr(
        TextSource, "read", lambda source, group, *rest: numbers.append(group.file_number) or read(source, group, *rest)
    )
    for job in range(JOBS):
        report = convert(corpus, "stream", tmp_path / "out", **TEXT, shard_range=(job, JOBS))
        assert report.to_json()["documents"] == 40
        assert report.destination == partial_path(tmp_path / "out")
    assert numbers == [0, 1, 2]


@pytest.mark.thin
def test_a_killed_job_goes_on_and_the_order_of_jobs_does_not_matter(corpus, tmp_path):
    (corpus / "b.jsonl").write_bytes(lines("b").replace(b"document", b"many words " * 3000))
    options = {**TEXT, "shards": 9, "id_column": "id"}
    convert(corpus, "stream", tmp_path / "whole", **options)
    out = tmp_path / "out"
    convert(corpus, "stream", out, **options, shard_range=(2, JOBS))
    part = {**options, "shard_range": (1, JOBS)}
    begun = partial_path(out) / "shard-00004-of-00009.h5.partial"
    killed_when(begun.exists, lambda: convert(corpus, "stream", out, **part))
    assert convert(corpus, "stream", out, **part, resume=True).kept.shards == 1
    message = one_error(run_zb("index", "merge", out))
    assert "3 of 9 shards are missing, of part 0 of 3" in message
    convert(corpus, "stream", out, **options, shard_range=(0, JOBS))
    assert report_of(zb, "index", "merge", out)["num_shards"] == 9
    assert files_in(out) == files_in(tmp_path / "whole")
    done = convert(corpus, "stream", out, **options, shard_range=(0, JOBS), resume=True)
    assert done.to_json()["done"]


@pytest.mark.parametrize("target", ["stream", "megatron"])
@pytest.mark.thin
def test_a_job_that_is_killed_behind_any_rename_goes_on(target, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines("a"))
    options = {**TEXT, "shards": 4}
    convert(tmp_path / "a.jsonl", target, tmp_path / "whole", **options)
    whole = files_in(tmp_path / "whole")
    job = partial(convert, tmp_path / "a.jsonl", target, tmp_path / "out", **options)
    step = 1
    while ended_after(step, signal.SIGKILL, lambda: job(shard_range=(1, 2))):
        for number in range(2):
            job(shard_range=(number, 2), resume=True)
        merge_parts(tmp_path / "out")
        assert files_in(tmp_path / "out") == whole
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "out."))] == []
        shutil.rmtree(tmp_path / "out")
        step += 1
    assert step > 8


def test_a_job_that_stops_keeps_its_finished_files(corpus, tmp_path):
    part = {"tokenizer": "byte", "shards": 6, "shard_range": (0, 2)}
    is_refused(Stops, lambda: convert(corpus, "stream", tmp_path / "out", **part, engine=Failing(2)))
    assert convert(corpus, "stream", tmp_path / "out", **part, workers=1, resume=True).kept.shards == 2


@pytest.mark.parametrize("other", [{"shards": 4}, {"max_document_tokens": 9}, {"codec": "zstd"}, {"note": "words"}])
def test_jobs_with_other_options_are_refused(other, corpus, tmp_path):
    options = {"shards": 3}
    convert(corpus, "stream", tmp_path / "out", **TEXT, **options, shard_range=(0, 2))
    is_refused(
        ConvertError,
        lambda: convert(corpus, "stream", tmp_path / "out", **TEXT, **options | other, shard_range=(1, 2), resume=True),
        lambda: convert(corpus, "stream", tmp_path / "out", **TEXT, **options | other, shard_range=(1, 2)),
        match="holds another conversion",
    )
    convert(corpus, "stream", tmp_path / "out", **TEXT, **options | other, shard_range=(1, 2), force=True)
    is_refused(
        ConvertError,
        lambda: merge_parts(tmp_path / "out"),
        match="part 1/2 holds another conversion than part 0/2: its .*, there it is .*; convert part 1/2 again with",
    )
    assert not (tmp_path / "out").exists()
    convert(corpus, "stream", tmp_path / "out", **TEXT, **options, shard_range=(1, 2), force=True)
    assert len(merge_parts(tmp_path / "out").shards) == 3


def test_a_changed_source_is_refused_by_the_merge(corpus, tmp_path):
    convert(corpus, "stream", tmp_path / "out", **TEXT, shard_range=(0, 2))
    (corpus / "b.jsonl").write_bytes(lines("b") * 2)
    convert(corpus, "stream", tmp_path / "out", **TEXT, shard_range=(1, 2), force=True)
    is_refused(
        ConvertError, lambda: merge_parts(tmp_path / "out"), match=r"its .*b\.jsonl is \[\d+, \d+\], there it is"
    )


def test_ids_that_two_parts_share_are_found_by_the_merge(corpus, tmp_path):
    (corpus / "c.jsonl").write_bytes(lines("a"))
    options = {**TEXT, "id_column": "id"}
    for job in range(JOBS):
        convert(corpus, "stream", tmp_path / "out", **options, shard_range=(job, JOBS))
    is_refused(ConvertError, lambda: merge_parts(tmp_path / "out"), match=r"c\.jsonl.*the id 'a-\d+' was there before")
    assert partial_path(tmp_path / "out").is_dir()


def test_the_lines_that_are_dropped_are_judged_part_by_part(corpus, tmp_path):
    bad = b"[1]\n" * 30
    (corpus / "b.jsonl").write_bytes(bad + lines("b"))
    (corpus / "c.jsonl").write_bytes(bad)
    part = lambda job, **more: convert(corpus, "stream", tmp_path / "out", **TEXT, shard_range=(job, JOBS), **more)  # noqa: E731
    assert part(0).counts.documents_dropped.counts == {}
    report = part(1)
    assert (report.counts.documents, sum(report.counts.documents_dropped.counts.values())) == (40, 30)
    is_refused(ConvertError, lambda: part(2), match=r"at most 50% of .* to be dropped, found 30 of 30 .*max_dropped 1")
    part(2, max_dropped=1.0, resume=True)
    assert merge_parts(tmp_path / "out").meta.document_count == 80
    convert(corpus, "stream", tmp_path / "whole", **TEXT)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


def test_parts_without_any_document_are_not_merged(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"[1]\n" * 30)
    for job in range(2):
        convert(tmp_path / "a.jsonl", "stream", tmp_path / "two", **TEXT, max_dropped=1.0, shard_range=(job, 2))
    is_refused(ConvertError, lambda: merge_parts(tmp_path / "two"), match="no documents in the files of all parts")


def test_more_jobs_than_files_and_a_run_without_parts(corpus, tmp_path):
    report = report_of(zb, "convert", corpus, tmp_path / "out", "--to", "stream", "--tokenizer", "byte",
                       "--shard-range", "0/9")  # fmt: skip
    assert (report["num_shards"], [*tmp_path.iterdir()]) == (0, [corpus])
    is_refused(Stops, lambda: convert(corpus, "stream", tmp_path / "out", tokenizer="byte", engine=Failing(1)))
    is_refused(ConvertError, lambda: merge_parts(tmp_path / "out"), match="2 of 3 shards are missing, of a conversion")


def test_damage_between_a_job_and_the_merge_is_found(corpus, tmp_path):
    for job in range(2):
        convert(corpus, "stream", tmp_path / "out", **TEXT, shard_range=(job, 2))
    table = documents_path(partial_path(tmp_path / "out") / "shard-00001-of-00003.h5")
    flip(table, table.stat().st_size // 2)
    is_refused((ChecksumError, ConvertError), lambda: merge_parts(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_command_of_text_takes_parts_of_a_stream(corpus, tmp_path):
    words = ("convert", "jsonl-to-hdf5", corpus, tmp_path / "out", "--layout", "stream", "--tokenizer", "byte")
    for job in range(2):
        report = report_of(zb, *words, "--shard-range", f"{job}/2")
    assert report["documents"] == 80
    run_zb("index", "merge", tmp_path / "out", code=0)
    convert(corpus, "stream", tmp_path / "whole", **TEXT)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


# --- rows --------------------------------------------------------------------------------------------------------
def is_refused_as(kind, use):
    with pytest.raises(kind) as raised:
        use()
    return raised.value


def typed(error):
    """Return the lines to type at the end of a refusal."""
    return [line for line in error.splitlines() if line.startswith("zb ")]


ROWS = ("--seq-len", 64, "--batch-size", 4, "--no-shuffle", "--packing", "best-fit")


@pytest.mark.parametrize("words", [
    (),
    ("--seq-len", 64, "--batch-size", 4, "--packing", "best-fit", "--seed", 3, "--val-fraction", 0.2, "--shards", 3),
    ("--seq-len", 32, "--batch-size", 4, "--val-last-shard", "--shards", 2, "--id-column", "id", "--note", "a b"),
    ("--seq-len", 64, "--no-shuffle", "--codec", "zstd", "--remainder", "drop", "--to", "hdf5"),
    ("--seq-len", 64, "--batch-size", 4, "--tokens-only", "--to", "batch", "--max-document-tokens", 50),
    ("--like", "shaped.h5", "--shuffle", "global", "--seq-len", 48),
], ids=lambda words: " ".join(map(str, words)))  # fmt: skip
@pytest.mark.thin
def test_the_lines_for_rows_in_parts_write_the_rows_of_one_step(words, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_batches(tmp_path / "shaped.h5", np.zeros((2, 4, 32), np.uint16), vocab_size=257, seed=5)
    options = ("--tokenizer", "byte", "--workers", 1, *words)
    refused = [run_zb("convert", "corpus", "out", *options, "--shard-range", part) for part in ("0/2", "1/2")]
    stream, merge_stream, rows, merge_rows = zip(*(typed(one_error(each, 2)) for each in refused), strict=True)
    for line in (*stream, merge_stream[0], *rows, merge_rows[0]):
        run_zb(*shlex.split(line)[1:], code=0)
    run_zb("convert", "corpus", "whole", *options, code=0)
    found, whole = ShardIndex.load(tmp_path / "out"), ShardIndex.load(tmp_path / "whole")
    assert found.sha256 == whole.sha256
    assert (found.meta, found.documents) == (whole.meta, whole.documents)
    assert [(each.split, each.sha256, each.crc32, each.pieces) for each in found.shards] == [
        (each.split, each.sha256, each.crc32, each.pieces) for each in whole.shards
    ]
    assert np.array_equal(batches_of(tmp_path / "out"), batches_of(tmp_path / "whole"))
    theirs = files_in(tmp_path / "whole")
    differ = {name for name, content in files_in(tmp_path / "out").items() if content != theirs[name]}
    assert all(name == "shards.json" or name.endswith(".h5") for name in differ)  # which name the source


@pytest.mark.parametrize("made", [made_hf, made_ragged, made_npy, made_parquet, made_splits])
@pytest.mark.thin
def test_every_source_of_documents_refuses_parts_of_rows_with_these_lines(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").mkdir()
    options = {**made(tmp_path / "source"), "seq_len": 16, "batch_size": 2}
    error = is_refused_as(ArgumentError, lambda: convert("source", "hdf5", "out", **options, shard_range=(0, 2)))
    for line, job in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0)):
        call = error.__notes__[line].replace("shard_range=(0,", f"shard_range=({job},")
        eval(call, {"convert": convert, "merge_parts": merge_parts})
    convert("source", "hdf5", "whole", **options)
    assert ShardIndex.load(tmp_path / "out").sha256 == ShardIndex.load(tmp_path / "whole").sha256
    assert list(tmp_path.glob("*.partial")) == []


def test_other_refusals_of_parts_come_first(corpus, tmp_path):
    how = {**TEXT, "shard_range": (0, 2)}
    is_refused(ConvertError, lambda: convert(corpus, "hdf5", tmp_path / "out.h5", **how), match="is one file")
    message = one_error(run_zb("convert", corpus, "s3://bucket/out", "--tokenizer", "byte", "--shard-range", "0/2"))
    assert typed(message) == []


def test_a_source_that_is_open_already_has_parts_of_a_stream_alone(corpus, tmp_path):
    source = TextSource(open_documents([corpus]), "jsonl", Recipe("byte", 256))
    refused = is_refused_as(ArgumentError, lambda: convert(source, "hdf5", tmp_path / "rows", shard_range=(0, 2)))
    assert "write a stream in parts, and the rows of that in parts" in str(refused)
    assert list(tmp_path.iterdir()) == [corpus]
    in_parts(source, tmp_path / "parts")
    convert(source, "stream", tmp_path / "whole")
    assert files_in(tmp_path / "parts") == files_in(tmp_path / "whole")
