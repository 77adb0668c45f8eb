"""Pieces and document tables from text to a store, and from store to store: each token is that of its document."""

import json
import os
import re
import tracemalloc

import numpy as np
import pytest
from commandline import run, succeed
from contents import files_in
from damage import flip
from interrupted import Failing, Stops
from packed import require_same_pieces

from zb_hdf5 import FormatError, HDF5ShardWriter, ShardIndex, open_corpus, open_reader
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters import stream_target
from zb_hdf5.converters.arguments import convert as run_conversion
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.converters.engines import Engine, open_engine
from zb_hdf5.converters.packing import PACKINGS
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.converters.text_source import Recipe, TextSource
from zb_hdf5.documents.document_table import part_of
from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.documents.table_writer import DocumentsWriter
from zb_hdf5.spec import NO_DOCUMENT, documents_path, pieces_path
from zb_hdf5.text import json_lines
from zb_hdf5.text.text_corpus import open_documents

PAD, BOUNDARY = 0, 256
BYTES = Recipe("byte", BOUNDARY)


def run_convert(*arguments):
    return succeed(convert, *arguments).output


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Return the rows of two files of JSON lines, in several row groups; some lines are dropped."""
    monkeypatch.setattr(json_lines, "ROW_GROUP_BYTES", 1500)
    rng = np.random.default_rng(3)
    folder = tmp_path / "corpus"
    folder.mkdir()
    known = {}
    for name, count in (("a.jsonl", 70), ("b.jsonl", 40)):
        lines = []
        for row in range(1, count + 1):
            letters = "".join(map(chr, rng.integers(97, 123, rng.integers(0, 60)))) if row % 9 else ""
            text = f"{name}{row} {letters}" if row % 9 else ""
            value = {"text": text, "id": f"{name}-{row}", "author": f"é{row % 3}", "n": row}
            lines.append(json.dumps(value) + "\n")
            if text:
                known[str(folder / name), row] = value
        (folder / name).write_text("".join(lines))
    return folder, known


def texts_in(folder):
    return open_documents([folder], "jsonl", "text", "id", ["author", "n"])


def ingest(folder, destination, options, **work):
    source = TextSource(texts_in(folder), "jsonl", BYTES)
    return run_conversion(source, "hdf5", destination, workers=None if "engine" in work else 1, **options, **work)


def require_tokens(path, known, split=None):
    """Compare each token with the text of the document that the pieces and the table say it is of; count them."""
    with open_reader(path, split=split) as reader:
        pieces = reader.read_pieces(np.arange(reader.num_records))
        tokens = np.concatenate(list(reader)).astype(np.int64)
        table = reader.corpus.documents
        numbers = table.number_of(pieces.offsets)
        stops = np.append(pieces.columns[1:], 0)
        stops[pieces.ends[1:] - 1] = pieces.seq_len
        seen, covered = set(), 0
        for row, column, stop, offset, number in zip(
            pieces.rows, pieces.columns.tolist(), stops.tolist(), pieces.offsets.tolist(), numbers.tolist(), strict=True
        ):
            found = tokens[row, column:stop]
            if number < 0:
                assert offset == NO_DOCUMENT
                assert (found == PAD).all()
                continue
            document = table[number]
            value = known[document.source, document.row]
            assert (document.id, document.metadata) == (value["id"], {"author": value["author"], "n": value["n"]})
            text = [*value["text"].encode(), BOUNDARY]
            assert document.length == len(text)
            at = offset - document.offset
            assert found.tolist() == text[at : at + stop - column]
            seen.add(number)
            covered += stop - column
        assert len(seen) >= 0.8 * len(table)
        return covered


@pytest.mark.parametrize("packing", sorted(PACKINGS))
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.thin
def test_every_token_of_a_store_of_text_has_its_document(tmp_path, corpus, packing, shuffle):
    folder, known = corpus
    how = {"shuffle": shuffle, "packing": packing, "pad_id": PAD, "shards": 3, "val_fraction": 0.3}
    options = {"batch_size": 4, "seq_len": 32, "seed": 5, **how}
    report = ingest(folder, tmp_path / "out", options)
    index = ShardIndex.load(tmp_path / "out")
    assert [part.split for part in index.documents] == ["train", "val"]
    covered = {}
    run_convert("hdf5-to-hdf5", tmp_path / "out", tmp_path / "copy")
    for split in ("train", "val", None):
        require_tokens(tmp_path / "copy", known, split)
        covered[split] = require_tokens(tmp_path / "out", known, split)
        with open_reader(tmp_path / "out", split=split) as reader:
            assert reader.has_pieces
            if split is None:
                assert len(reader.corpus.documents) == report.counts.documents == len(known)
            rng = np.random.default_rng(0)
            some = rng.integers(0, reader.num_records, 30)  # from all shards, in any order, some twice
            whole = reader.read_pieces(np.arange(reader.num_records))
            require_same_pieces(reader.read_pieces(some), whole.take(some))
            halves = reader.read_pieces(np.arange(2 * reader.num_records), seq_len=16)
            assert halves.seq_len == 16
            assert halves.num_records == 2 * reader.num_records
    assert covered[None] == covered["train"] + covered["val"]
    cropped = sum(report.counts.dropped.values())
    assert covered[None] == report.counts.tokens_in - cropped


@pytest.mark.parametrize("num_shards", [None, 3])
@pytest.mark.thin
def test_every_token_of_streams_of_text_has_its_document(tmp_path, corpus, num_shards):
    folder, known = corpus
    source = TextSource(texts_in(folder), "jsonl", BYTES)
    run_conversion(source, "stream", tmp_path / "out", shards=num_shards, val_fraction=0.2, workers=1)
    for split in (None, "train", "val"):
        with open_corpus(tmp_path / "out", split=split) as store:
            table = store.documents
            assert len(table) == store.document_count
            for number in range(len(table)):
                document = table[number]
                value = known[document.source, document.row]
                assert document.id == value["id"]
                assert store.documents[number].ids.tolist() == [*value["text"].encode(), BOUNDARY]
                assert store.doc_offsets[number] == document.offset
            assert table.number_of(store.doc_offsets[:-1]).tolist() == list(range(len(table)))


@pytest.mark.parametrize("layout", ["batches", "stream"])
@pytest.mark.thin
def test_workers_and_resumes_give_the_same_tables(tmp_path, corpus, layout, monkeypatch):
    folder, _ = corpus
    monkeypatch.undo()  # other processes have row groups of the real size
    options = dict(batch_size=4, seq_len=32, seed=5, packing="best-fit", shards=3, val_fraction=0.3)

    def make(destination, **work):
        if layout == "batches":
            ingest(folder, destination, options, **work)
        else:
            source = TextSource(texts_in(folder), "jsonl", BYTES)
            how = {"workers": None if "engine" in work else 1, **work}
            run_conversion(source, "stream", destination, shards=2, **how)

    make(tmp_path / "whole")
    expected = files_in(tmp_path / "whole")
    assert any("documents" in name for name in expected)
    with open_engine("local", 2) as engine:
        make(tmp_path / "workers", engine=engine)
    assert files_in(tmp_path / "workers") == expected
    for tasks in (1, 1):
        with pytest.raises(Stops):
            make(tmp_path / "out", engine=Failing(tasks), resume=True)
    make(tmp_path / "out", resume=True)
    assert files_in(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out", "whole", "workers"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("ids", "message"), [
    (["a", None, "c"], r"(line|row) 2 of .*: column 'id': expected an id, a text or a whole number, found None"),
    (["a", "", "c"], r"(line|row) 2 of .*: column 'id': expected an id"),
    (["a", "b", "a"], r"(line|row) 3 of .*: the id 'a' was there before, in (line|row) 1 of "),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["batches", "stream"])
def test_bad_ids_are_refused(tmp_path, kind, ids, message, layout):
    path = write_table(tmp_path, kind, {"text": ["some text"] * 3, "id": ids})
    result = run_text(kind, path, tmp_path / "out", "--id-column", "id", "--layout", layout)
    assert result.exit_code == 1
    assert re.search(message, one_line(result.output)), result.output
    assert not (tmp_path / "out").exists()


def test_ids_are_compared_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_target, "BLOCK_IDS", 1 << 10)
    count = 30_000
    path = tmp_path / "documents-00000.tables"
    with DocumentsWriter(path) as writer:
        writer.append_documents(np.ones(count), DocumentRows(ids=[b"%d" % number for number in range(count)]))
        writer.publish()
    tracemalloc.start()
    try:
        stream_target.require_unique_ids(tmp_path, [part_of(path)])
        assert tracemalloc.get_traced_memory()[1] < 45 * count
    finally:
        tracemalloc.stop()


def one_line(text):
    return " ".join(text.split())


def write_table(folder, kind, columns):
    path = folder / f"x.{kind}"
    if kind == "jsonl":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        arrow = pytest.importorskip("pyarrow")
        arrow.parquet = pytest.importorskip("pyarrow.parquet")
        arrow.parquet.write_table(arrow.table(columns), path)
    return path


def run_text(kind, path, destination, *more):
    size = [] if "stream" in more else ["--batch-size", "1", "--seq-len", "4"]
    arguments = [f"{kind}-to-hdf5", path, destination, "--tokenizer", "byte", "--workers", 1, "--quiet", *size, *more]
    return run(convert, *arguments)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_of_any_type_are_kept(tmp_path, kind):
    columns = {"text": ["abc", "", "de"], "key": [7, 8, 9], "tags": [["x"], [], None], "score": [0.5, 1.5, None]}
    path = write_table(tmp_path, kind, columns)
    done = run_text(kind, path, tmp_path / "out", "--id-column", "key", "--metadata-columns", "tags,score")
    assert done.exit_code == 0, done.output
    with open_reader(tmp_path / "out") as reader:
        first, last = (reader.corpus.documents[number] for number in range(2))
    assert (first.row, first.id, first.metadata) == (1, "7", {"tags": ["x"], "score": 0.5})
    assert (last.row, last.id, last.metadata) == (3, "9", {"tags": None, "score": None})
    if kind == "parquet":
        done = run_text(kind, path, tmp_path / "two", "--metadata-columns", "author")
        assert "no column 'author' for its documents; its columns are: text" in one_line(done.output)


def test_undecodable_values_are_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    bad = arrow.array([b"ok", b"\xff"], arrow.binary()).view(arrow.string())
    parquet.write_table(arrow.table({"text": arrow.array(["abc", "def"]), "id": bad}), tmp_path / "x.parquet")
    done = run_text("parquet", tmp_path / "x.parquet", tmp_path / "out", "--id-column", "id")
    assert f"row 2 of {tmp_path}/x.parquet: column 'id' is not UTF-8" in one_line(done.output)
    (tmp_path / "x.jsonl").write_text('{"text": "abc", "id": "\\ud800"}\n')
    done = run_text("jsonl", tmp_path / "x.jsonl", tmp_path / "out", "--id-column", "id")
    assert rf"line 1 of {tmp_path}/x.jsonl: column 'id': the id '\ud800' is not valid Unicode" in one_line(done.output)


@pytest.fixture
def text_store(tmp_path, corpus):
    """Return a store of text of one split, and what is known of its documents."""
    ingest(corpus[0], tmp_path / "store", dict(batch_size=4, seq_len=32, pad_id=PAD, shards=3))
    return tmp_path / "store", corpus[1]


@pytest.mark.parametrize("shards", [[], ["--shards", 2]])
@pytest.mark.thin
def test_documents_survive_there_and_back(tmp_path, text_store, shards):
    source, known = text_store
    run_convert("hdf5-to-hdf5", source, tmp_path / "between", "--codec", "gzip", *shards)
    run_convert("hdf5-to-hdf5", tmp_path / "between", tmp_path / "back", "--workers", 2)
    with open_reader(source) as reader:
        expected = reader.read_pieces(np.arange(reader.num_records))
    for name in ("between", "back"):
        require_tokens(tmp_path / name, known)
        with open_reader(tmp_path / name) as reader:
            require_same_pieces(reader.read_pieces(np.arange(reader.num_records)), expected)
    if not shards:  # written once, the same from then on
        for path in source.glob("*.h5"):
            assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name


def test_documents_survive_one_file_and_a_job_array_until_a_file_without_takes_the_name(tmp_path, text_store):
    source, known = text_store
    one = tmp_path / "one.h5"
    run_convert("hdf5-to-hdf5", source, one)
    assert pieces_path(one).exists()
    require_tokens(one, known)
    run_convert("hdf5-to-hdf5", one, tmp_path / "again", "--shards", 4)
    run_convert("hdf5-to-hdf5", tmp_path / "again" / "shards.json", tmp_path / "copy")
    for name in ("again", "copy"):
        require_tokens(tmp_path / name, known)
    np.save(tmp_path / "x.npy", np.arange(64, dtype="u4"))
    run_convert("npy-to-hdf5", tmp_path / "x.npy", one, "--batch-size", 2, "--seq-len", 8, "--force")
    assert (pieces_path(one).exists(), documents_path(one).exists()) == (False, False)
    with open_reader(one) as reader:
        assert reader.corpus.documents is None
    run_convert("hdf5-to-hdf5", source, tmp_path / "whole")
    for part in (2, 0, 1, 3):
        run_convert("hdf5-to-hdf5", source, tmp_path / "out", "--shard-range", f"{part}/4")
    succeed(zb, "index", "merge", tmp_path / "out")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")
    require_tokens(tmp_path / "out", known)


def test_a_lone_batch_file_says_what_it_does_not_name(tmp_path):
    np.save(tmp_path / "in.npy", np.arange(256, dtype="<u2").reshape(16, 16))
    run_convert("npy-to-hdf5", tmp_path / "in.npy", tmp_path / "a.h5", "--batch-size", 4, "--vocab-size", 257)
    said = "does not name shuffle, split, source, pad_id, vocab_size, as such a file has no place for it"
    assert said in " ".join(run_convert("hdf5-to-batch", tmp_path / "a.h5", tmp_path / "b.batch").split())
    run_convert("batch-to-hdf5", tmp_path / "b.batch", tmp_path / "again.h5")
    with open_reader(tmp_path / "a.h5") as before, open_reader(tmp_path / "again.h5") as after:
        assert (after.corpus.sha256, after.meta.seed) == (before.corpus.sha256, before.meta.seed)
        assert before.corpus.origin["split"] == "train"
        assert "split" not in after.corpus.origin


def refused(*arguments):
    """Return what a conversion says that ends with code 1."""
    done = run(convert, *arguments)
    assert done.exit_code == 1
    return done.output


def test_a_store_of_tokens_only_made_of_documents_is_asked_for(tmp_path, text_store):
    source, _ = text_store
    lost = "leaves behind the places of documents in the records and the document table"
    for target in (tmp_path / "npy", tmp_path / "one.npy"):
        assert f"npy files hold tokens and nothing else: the conversion {lost}" in refused(
            "hdf5-to-npy", source, target
        )
        assert not target.exists()
    for target in (tmp_path / "batch", tmp_path / "one.batch"):
        said = refused("hdf5-to-batch", source, target)
        assert f"batch files hold tokens and nothing else: the conversion {lost}" in said
        assert not target.exists()
        assert lost in run_convert("hdf5-to-batch", source, target, "--tokens-only")
        with open_reader(source) as expected, open_reader(target, verify="batch") as reader:
            assert reader.corpus.documents is None
            assert reader.corpus.digests.tokens_sha256() == expected.corpus.digests.tokens_sha256()
    assert {path.suffix for path in (tmp_path / "batch").iterdir()} == {".batch", ".crc32", ".json"}
    assert lost in run_convert("hdf5-to-npy", source, tmp_path / "npy", "--tokens-only")
    assert all(path.suffix == ".npy" for path in (tmp_path / "npy").iterdir())


def test_a_resumed_copy_checks_its_pieces_and_those_of_another_store_are_refused(tmp_path, text_store, corpus):
    source, known = text_store

    def copy(engine):
        return run_conversion(StoreSource(source, "hdf5"), "hdf5", tmp_path / "out", engine=engine, resume=True)

    with pytest.raises(Stops):
        copy(Failing(2))
    [damaged, *_] = sorted((tmp_path / "out.partial").glob("*.pieces"))
    flip(damaged, -1)
    report = copy(Engine())
    assert report.kept.shards < 2
    require_tokens(tmp_path / "out", known)
    ingest(corpus[0], tmp_path / "other", dict(batch_size=4, seq_len=32, seed=9, shards=3))
    for path in source.glob("*.pieces"):
        os.replace(tmp_path / "other" / path.name, path)
    with open_reader(source) as reader, pytest.raises(FormatError, match="belongs to another store"):
        reader.read_pieces(np.arange(3))


@pytest.mark.parametrize("boundary", [-1, 9])
def test_documents_are_written_with_what_is_known_of_them(tmp_path, boundary):
    path = tmp_path / "x.h5"
    with HDF5ShardWriter(path, boundary_token_id=boundary, chunk_tokens=8) as writer:
        writer.write_document([1, 2, 3], id="first")
        writer.write_document([4] * 10, id="second", spans=[(0, 2, ["a"]), (2, 3, {"b": 1}), (9, 10, None)])
        writer.write_document([], id="third", metadata={"author": "ü"})
        writer.write_documents([5, 6, 7], [2, 1], documents=DocumentRows(ids=[b"d", b"e"]))
        writer.write_document([8, 8], id=5, spans=[(1, 2, "c")])
    assert sorted(os.listdir(tmp_path)) == ["x.h5", "x.h5.documents"]
    end = int(boundary >= 0)
    with open_corpus(path) as store:
        table = store.documents
        assert [table[number].id for number in range(6)] == ["first", "second", "third", "d", "e", "5"]
        assert table[2].metadata == {"author": "ü"}
        offsets = store.doc_offsets.tolist()
        assert [table[number].offset for number in range(6)] == offsets[:-1]
        second, last = offsets[1], offsets[5]
        spans = table.spans(0, store.num_tokens)
        edges = [(second, second + 2), (second + 2, second + 3), (second + 9, second + 10), (last + 1, last + 2)]
        assert list(zip(spans.starts.tolist(), spans.stops.tolist(), strict=True)) == edges
        assert spans.values == [["a"], {"b": 1}, None, "c"]
        assert table.spans(second + 3, second + 9).values == []
        assert table.number_of([offsets[1] - end, offsets[1]]).tolist() == [0 if end else 1, 1]


def test_a_stream_without_facts_has_no_table(tmp_path):
    path = tmp_path / "x.h5"
    with HDF5ShardWriter(path) as writer:
        writer.write_document([1, 2], id="a")
    assert documents_path(path).exists()
    writer = HDF5ShardWriter(tmp_path / "aborted.h5")
    writer.write_document([1], id="a")
    writer.abort()
    with HDF5ShardWriter(path, overwrite=True) as writer:
        writer.write_document([1, 2])
        writer.write_document([3])
    assert os.listdir(tmp_path) == ["x.h5"]
    with open_corpus(path) as store:
        assert store.documents[1].facts == (1, 2, 1, None, None, None, {})
        assert store.documents.number_of([0, 2]).tolist() == [0, 1]


@pytest.mark.parametrize("name", ["documents-mine.txt", "documents-00000.tables.txt", "documents-.tables"])
@pytest.mark.thin
def test_documents_of_others_are_not_replaced(tmp_path, text_store, name):
    run_convert("hdf5-to-hdf5", text_store[0], tmp_path / "out")
    (tmp_path / "out" / name).write_text("mine")
    done = run(convert, "hdf5-to-hdf5", text_store[0], tmp_path / "out", "--force")
    assert done.exit_code == 1
    assert f"holds '{name}', which is not part of a store" in one_line(done.output)
    (tmp_path / "out" / name).unlink()
    run_convert("hdf5-to-hdf5", text_store[0], tmp_path / "out", "--force")
