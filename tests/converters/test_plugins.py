"""The format of another trainer is one small file: flat tokens both ways, and documents."""

import json
import struct
import sys
from itertools import chain
from pathlib import Path

import megatron_format
import numpy as np
import pytest
import tok_format
from commandline import report_of, run_zb, succeed
from contents import batches_of
from contract import is_refused
from interrupted import Failing, Stops

import zb_hdf5
from zb_hdf5.commands.zb import zb
from zb_hdf5.loaders.order import write_order
from zb_hdf5.store.format_list import FORMATS
from zb_hdf5.store.verify import verify_store

TOKENS = np.random.default_rng(7).integers(0, 50_000, 40 * 16, dtype=np.uint16)
SHAPE = {"batch_size": 4, "seq_len": 16, "seed": 3}


@pytest.fixture(autouse=True)
def plugged_in(monkeypatch):
    """Plug both in, as a program does that then imports the commands."""
    before = dict(FORMATS)
    for name in ("tok", "megatron"):
        FORMATS.pop(name, None)
    monkeypatch.delitem(sys.modules, "zb_hdf5.converters.cli", raising=False)
    tok_format.plug_in()
    megatron_format.plug_in()
    yield
    FORMATS.clear()
    FORMATS.update(before)  # in their order, which decides for other tests


@pytest.mark.parametrize(("module", "most"), [(tok_format, 150), (megatron_format, 250)])
def test_a_format_is_one_small_file(module, most):
    assert len(Path(module.__file__).read_text(encoding="utf-8").splitlines()) <= most


@pytest.fixture
def tok(tmp_path):
    path = tmp_path / "in" / "tokens.tok"
    path.parent.mkdir()
    path.write_bytes(tok_format.HEADER.pack(tok_format.MAGIC, TOKENS.size) + TOKENS.tobytes())
    return path


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize("target", ["hdf5", "batch"])
def test_flat_tokens_are_shuffled_into_a_store(target, as_folder, tok, tmp_path):
    source = tok.parent if as_folder else tok
    report = zb_hdf5.convert(source, target, tmp_path / "here", **SHAPE, shards=3, dtype="uint16")
    assert (report.num_batches, report.counts.tokens_in) == (10, TOKENS.size)
    order = write_order(40, 3).indices(np.arange(40))
    np.testing.assert_array_equal(np.concatenate(batches_of(tmp_path / "here")), TOKENS.reshape(-1, 16)[order])
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
    options += ["--to", target, "--shards", 3, "--dtype", "uint16"]
    succeed(zb, "convert", source, tmp_path / "there", *options)
    assert [report.problem for report in verify_store(tmp_path / "there")] == [None] * 3
    index = json.loads((tmp_path / "there" / "shards.json").read_text())
    assert index == json.loads((tmp_path / "here" / "shards.json").read_text())
    assert index["source"]["format"] == "tok"


def test_flat_tokens_are_shuffled_in_two_passes_and_by_several_jobs(tok, tmp_path):
    zb_hdf5.convert(tok, "hdf5", tmp_path / "one", **SHAPE, shards=2)
    zb_hdf5.convert(tok, "hdf5", tmp_path / "two", **SHAPE, shards=2, shuffle_method="two-pass", workers=2)
    for part in ("0/2", "1/2"):
        options = ("--batch-size", 4, "--seq-len", 16, "--seed", 3, "--shards", 2, "--shard-range", part)
        succeed(zb, "convert", tok, tmp_path / "parts", *options)
    succeed(zb, "index", "merge", tmp_path / "parts")
    expected = (tmp_path / "one" / "shards.json").read_bytes()
    assert [(tmp_path / name / "shards.json").read_bytes() for name in ("two", "parts")] == [expected] * 2


def test_a_store_is_written_as_flat_tokens(tok, tmp_path):
    zb_hdf5.convert(tok, "hdf5", tmp_path / "store", **SHAPE, shuffle=False)
    report = zb_hdf5.convert(tmp_path / "store", "tok", tmp_path / "out.tok")
    assert report.tokens_stored == TOKENS.size
    assert (tmp_path / "out.tok").read_bytes() == tok.read_bytes()
    succeed(zb, "convert", tmp_path / "store", tmp_path / "again.tok")
    assert (tmp_path / "again.tok").read_bytes() == tok.read_bytes()
    zb_hdf5.convert(tok, "hdf5", tmp_path / "wide", **SHAPE, dtype="uint32")
    with pytest.raises(zb_hdf5.ArgumentError, match=r"\.tok files hold uint16 tokens, found uint32"):
        zb_hdf5.convert(tmp_path / "wide", "tok", tmp_path / "wide.tok")
    zb_hdf5.convert(tmp_path / "wide", "tok", tmp_path / "narrow.tok", dtype="uint16")
    assert (tmp_path / "narrow.tok").stat().st_size == tok.stat().st_size


@pytest.mark.parametrize(("data", "error", "message"), [
    (b"TOKEN", zb_hdf5.IncompleteError, "expected a header of 16 bytes, found 5"),
    (struct.pack("<8sQ", b"NOTHING!", 0), zb_hdf5.FormatError, "expected magic b'TOKENS16', found b'NOTHING!'"),
    (struct.pack("<8sQ", b"TOKENS16", 9) + b"12", zb_hdf5.IncompleteError, "9 tokens"),
])  # fmt: skip
def test_damaged_flat_files_are_refused(data, error, message, tmp_path):
    (tmp_path / "x.tok").write_bytes(data)
    is_refused(error, lambda: zb_hdf5.convert(tmp_path / "x.tok", "hdf5", tmp_path / "out", **SHAPE), match=message)
    assert not (tmp_path / "out").exists()


def test_the_help_and_the_refusals_name_the_format(tok, tmp_path):
    assert "--pad-id" in succeed(zb, "convert", "--from", "tok", "--to", "hdf5", "--help").stdout
    listed = report_of(zb, "convert", "--list")["formats"]
    assert [listed["tok"][name] for name in ("is_source", "is_target", "documents")] == [True, True, False]
    assert "No such command 'tok-to-hdf5'." in run_zb("convert", "tok-to-hdf5", tok, "out", code=2).stderr
    with pytest.raises(
        zb_hdf5.ArgumentError, match=r"tokenizer belongs to parquet, jsonl, text, found \.tok files of tokens"
    ):
        zb_hdf5.convert(tok, "hdf5", tmp_path / "out", tokenizer="byte")


#: Documents of one or more sequences each; the last one is empty.
DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[7], [8, 9, 10, 11]], [[12, 13]], [[]]]


def write_megatron(path, documents, code=8):
    """Write documents as Megatron does."""
    sequences = [sequence for document in documents for sequence in document]
    dtype = megatron_format.DTYPES[code]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * dtype.itemsize
    edges = np.cumsum([0, *map(len, documents)], dtype="<i8")
    path.write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    head = megatron_format.HEADER.pack(megatron_format.MAGIC, 1, code, len(sequences), len(edges))
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + offsets.astype("<i8").tobytes() + edges.tobytes())
    return path


def expected_documents(documents):
    return [list(chain(*document)) for document in documents]


@pytest.mark.parametrize("code", megatron_format.DTYPES)
@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.thin
def test_documents_are_kept_in_a_stream(code, block, tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_format, "BLOCK_TOKENS", block)
    (tmp_path / "in").mkdir()
    files = [write_megatron(tmp_path / "in" / f"{k}.bin", DOCUMENTS[2 * k :][:3], code) for k in range(2)]
    report = zb_hdf5.convert(tmp_path / "in", "stream", tmp_path / "stream", workers=1)
    expected = expected_documents(DOCUMENTS[:3] + DOCUMENTS[2:])
    assert (report.counts.documents, len(report.shards)) == (6, 2)
    with zb_hdf5.open_corpus(tmp_path / "stream") as store:
        assert [store.documents[k].ids.tolist() for k in range(store.document_count)] == expected
        places = [store.documents[k] for k in range(store.document_count)]
    assert [(place.source, place.row) for place in places] == [(str(file), k + 1) for file in files for k in range(3)]
    succeed(zb, "convert", *files, tmp_path / "again", "--to", "stream", "--workers", 1)
    assert not [each.problem for each in verify_store(tmp_path / "again") if each.problem]
    assert (tmp_path / "again" / "shards.json").read_bytes() == (tmp_path / "stream" / "shards.json").read_bytes()


def test_documents_become_rows_that_know_them(tmp_path):
    documents = [[list(range(10 * k, 10 * k + 1 + k % 5))] for k in range(40)]  # each fits in a row
    source = write_megatron(tmp_path / "in.bin", documents)
    how = {"batch_size": 3, "seq_len": 8, "packing": "best-fit", "val_fraction": 0.2, "seed": 5, "workers": 1}
    report = zb_hdf5.convert(source, "hdf5", tmp_path / "store", **how)
    assert report.counts.documents == 40
    assert set(report.batches_of_split) == {"train", "val"}
    with zb_hdf5.Loader(tmp_path / "store", shuffle="sequential", documents=("documents", "document_ids")) as loader:
        step = next(iter(loader))
    with zb_hdf5.open_reader(tmp_path / "store") as reader:
        document = reader.corpus.documents[int(step["documents"][0])]
    of_first = step["tokens"][step["document_ids"] == 0].tolist()
    assert of_first == documents[document.row - 1][0][: len(of_first)]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in how.items()]
    succeed(zb, "convert", source, tmp_path / "again", *options)
    assert (tmp_path / "again" / "shards.json").read_bytes() == (tmp_path / "store" / "shards.json").read_bytes()
    assert not [each.problem for each in verify_store(tmp_path / "again") if each.problem]


def test_an_interrupted_conversion_of_documents_is_resumed(tmp_path):
    (tmp_path / "in").mkdir()
    for k in range(3):
        write_megatron(tmp_path / "in" / f"{k}.bin", DOCUMENTS)
    is_refused(Stops, lambda: zb_hdf5.convert(tmp_path / "in", "stream", tmp_path / "out", engine=Failing(2)))
    report = zb_hdf5.convert(tmp_path / "in", "stream", tmp_path / "out", resume=True, workers=1)
    assert report.kept.shards == 2
    zb_hdf5.convert(tmp_path / "in", "stream", tmp_path / "whole", workers=1)
    assert (tmp_path / "out" / "shards.json").read_bytes() == (tmp_path / "whole" / "shards.json").read_bytes()


def test_a_damaged_index_and_ids_that_do_not_fit_are_refused(tmp_path):
    source = write_megatron(tmp_path / "in.bin", [[[1, 2]], [[3, -4]]], code=4)
    with pytest.raises(zb_hdf5.ConvertError, match=r"in\.bin: .*-4"):
        zb_hdf5.convert(source, "stream", tmp_path / "out")
    write_megatron(source, DOCUMENTS)
    index = source.with_suffix(".idx")
    for cut in (60, 30, 5):
        index.write_bytes(index.read_bytes()[:cut])
        with pytest.raises(zb_hdf5.IncompleteError, match=r"in\.idx: expected"):
            zb_hdf5.convert(source, "stream", tmp_path / "out")
    index.write_bytes(b"x" * 100)
    with pytest.raises(zb_hdf5.FormatError, match="expected the index of Megatron tokens"):
        zb_hdf5.convert(source, "stream", tmp_path / "out")
