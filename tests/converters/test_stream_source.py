"""Token streams as a source of documents that are kept: our own, with all that they hold, and flat files."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from contract import is_refused
from damage import flip
from interrupted import Failing, Stops

from zb_hdf5 import ArgumentError, ConvertError, HDF5ShardWriter, convert, errors, open_corpus
from zb_hdf5.converters import stream_source
from zb_hdf5.store.verify import verify_store

GOLDEN = Path(__file__).parents[1] / "data" / "trainers"
LENGTHS = [3, 0, 700, 1, 260, 40, 5, 0, 90, 300, 2, 64, 1, 1, 0]
BOUNDARY = 7


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(stream_source, "GROUP_TOKENS", 256)
    monkeypatch.setattr(stream_source, "READ_TOKENS", 128)
    monkeypatch.setattr(stream_source, "READ_DOCUMENTS", 3)


def documents_of(number):
    """Return the documents of a file, as the arguments of `write_document`."""
    rng = np.random.default_rng(number)
    found = []
    for k, length in enumerate(LENGTHS):
        tokens = rng.integers(8, 900, length)
        spans = [(0, length // 2, {"n": k}), (length // 2, length, "rest")] if length > 2 else []
        mask = rng.integers(0, 2, length)
        found.append({"tokens": tokens, "fields": {"mask": mask}, "spans": spans, "id": f"{number}/{k}", "row": k})
    return found


@pytest.fixture
def files(tmp_path):
    """Write files of a stream with documents, fields, ids, metadata and spans."""
    (tmp_path / "in").mkdir()
    paths = []
    for number in range(3):
        paths.append(tmp_path / "in" / f"{number}.h5")
        how = {"chunk_tokens": 64, "boundary_token_id": BOUNDARY, "fields": {"mask": "u1"}, "vocab_size": 1000}
        with HDF5ShardWriter(paths[-1], **how) as writer:
            for each in documents_of(number):
                writer.write_document(
                    each["tokens"], each["fields"], spans=each["spans"], id=each["id"], metadata={"row": each["row"]}
                )
    return paths


def content_of(path, **how):
    """Return all that a stream says of its documents."""
    with open_corpus(path, **how) as stream:
        mask = stream.field("mask").tokens[0 : stream.num_tokens]
        found = []
        for number in range(stream.document_count):
            fact = stream.documents[number]
            stop = fact.offset + fact.length
            spans = stream.documents.spans(fact.offset, stop)
            ranges = [(int(a) - fact.offset, int(b) - fact.offset) for a, b, _ in zip(*spans, strict=True)]
            tokens = stream.documents[number].ids.tolist()
            found.append((fact.id, fact.metadata, tokens, mask[fact.offset : stop].tolist(), ranges, spans.values))
        return found


def test_all_that_documents_have_is_kept(files, tmp_path):
    report = convert(files, "stream", tmp_path / "out", shards=5, workers=1)
    assert (report.counts.documents, len(report.shards)) == (45, 5)
    expected = [each for path in files for each in content_of(path)]
    assert content_of(tmp_path / "out") == expected
    assert not [each.problem for each in verify_store(tmp_path / "out") if each.problem]
    with open_corpus(tmp_path / "out") as stream:
        assert (stream.meta.boundary_token_id, stream.meta.vocab_size) == (BOUNDARY, 1000)
    convert(tmp_path / "out", "stream", tmp_path / "again", shards=2, workers=1)
    assert content_of(tmp_path / "again") == expected


def test_held_out_documents_and_splits_are_kept_apart(files, tmp_path):
    convert(files, "stream", tmp_path / "out", shards=3, val_fraction=0.3, workers=1)
    parts = [content_of(tmp_path / "out", split=split) for split in ("train", "val")]
    expected = sorted(str(each) for path in files for each in content_of(path))
    assert sorted(str(each) for part in parts for each in part) == expected
    assert min(map(len, parts)) > 3
    convert(tmp_path / "out", "stream", tmp_path / "again", shards=2, workers=1)
    assert [content_of(tmp_path / "again", split=split) for split in ("train", "val")] == parts
    is_refused(
        ArgumentError,
        lambda: convert(tmp_path / "out", "stream", tmp_path / "no", val_fraction=0.1),
        match="has the splits train, val already",
    )


def test_rows_and_sources_of_documents_travel_along(tmp_path):
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}.txt").write_text("\n".join(f"{name} document {k}" for k in range(30)) + "\n")
    convert(tmp_path / "in", "stream", tmp_path / "stream", tokenizer="byte", shards=1, workers=1)
    convert(tmp_path / "stream", "stream", tmp_path / "again", shards=2, workers=1)
    places = []
    for path in (tmp_path / "stream", tmp_path / "again"):
        with open_corpus(path) as stream:
            facts = [stream.documents[k] for k in range(stream.document_count)]
            places.append([(fact.source, fact.row) for fact in facts])
    assert places[0] == places[1]
    assert len({source for source, _ in places[0]}) == 2


def test_an_interrupted_conversion_is_resumed(files, tmp_path):
    how = {"shards": 4, "workers": 1}
    is_refused(Stops, lambda: convert(files, "stream", tmp_path / "out", shards=4, engine=Failing(2)))
    assert convert(files, "stream", tmp_path / "out", **how, resume=True).kept.shards == 2
    convert(files, "stream", tmp_path / "whole", **how)
    assert (tmp_path / "out" / "shards.json").read_bytes() == (tmp_path / "whole" / "shards.json").read_bytes()


def test_damage_is_found_and_not_copied(files, tmp_path):
    with open_corpus(files[1]) as stream:
        tokens = stream.tokens[1000:1020].tobytes()
    data = files[1].read_bytes()
    flip(files[1], data.index(tokens))
    is_refused(errors.ChecksumError, lambda: convert(files, "stream", tmp_path / "out", workers=1), match="crc32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["megatron/uint16", "megatron/int32", "megatron/sentences", "datatrove/uint32"])
def test_flat_files_become_a_stream(name, tmp_path):
    truth = json.loads((GOLDEN / name / "truth.json").read_text())
    source_format = "auto" if name == "megatron/int32" else name.partition("/")[0]
    report = convert(GOLDEN / name, "stream", tmp_path / "out", source_format=source_format, shards=3, workers=1)
    assert report.counts.documents == 60
    with open_corpus(tmp_path / "out") as stream:
        tokens = stream.tokens[0 : stream.num_tokens]
        assert hashlib.sha256(tokens.astype(np.int64)).hexdigest() == truth["sha256"]
        assert np.diff(stream.doc_offsets).tolist() == truth["lengths"]
        fact = stream.documents[59]
    assert fact.row == 60
    assert Path(fact.source).parent == GOLDEN / name


def test_a_vocabulary_size_makes_ids_of_32_bits_smaller(tmp_path):
    source = GOLDEN / "megatron" / "int32"
    convert(source, "stream", tmp_path / "wide", workers=1)
    with open_corpus(tmp_path / "wide") as stream:
        assert stream.dtype == np.uint32
    again = lambda: convert(source, "stream", tmp_path / "out", vocab_size=5000, workers=1)  # noqa: E731
    is_refused(ConvertError, again, match=r"row \d+ of corpus_text_document.bin")


def write_llmc(path, ids):
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, len(ids)
    path.write_bytes(head.tobytes() + np.asarray(ids, "<u2").tobytes())
    return path


def test_files_without_documents_are_cut_at_a_boundary_token(tmp_path):
    ids = np.random.default_rng(1).integers(0, 40, 3000)
    source = write_llmc(tmp_path / "a.bin", ids)
    is_refused(
        ArgumentError, lambda: convert(source, "stream", tmp_path / "out"), match="tells no documents apart"
    )  # fmt: skip
    convert(source, "stream", tmp_path / "out", boundary_token_id=7, workers=1)
    with open_corpus(tmp_path / "out") as stream:
        np.testing.assert_array_equal(stream.tokens[0:3000], ids)
        assert stream.document_count == np.count_nonzero(ids == 7) + (ids[-1] != 7)
    convert(source, "stream", tmp_path / "named", source_format="stream", boundary_token_id=7, workers=1)
    with open_corpus(tmp_path / "out") as expected, open_corpus(tmp_path / "named") as found:
        assert found.same_as(expected)
        assert found.document_count == expected.document_count
    convert(source, "hdf5", tmp_path / "rows", boundary_token_id=7, seq_len=16, batch_size=2, workers=1)
    np.save(tmp_path / "a.npy", ids.astype(np.uint16))
    convert(tmp_path / "a.npy", "hdf5", tmp_path / "same", boundary_token_id=7, seq_len=16, batch_size=2, workers=1)
    digests = [json.loads((tmp_path / name / "shards.json").read_text())["sha256"] for name in ("rows", "same")]
    assert digests[0] == digests[1]


def test_a_boundary_token_that_is_named_is_looked_for(tmp_path):
    source = GOLDEN / "megatron" / "uint16"
    named = lambda: convert(source, "stream", tmp_path / "out", boundary_token_id=3, workers=1)  # noqa: E731
    is_refused(ConvertError, named, match=r"row 1 of .*: expected a document whose last token is 3, found token")


def test_streams_that_differ_are_converted_one_by_one(files, tmp_path):
    with HDF5ShardWriter(tmp_path / "other.h5", fields={"mask": "u1"}, vocab_size=1000) as writer:
        writer.write_document([1, 2], {"mask": [0, 1]})
    is_refused(
        ConvertError, lambda: convert([files[0], tmp_path / "other.h5"], "stream", tmp_path / "out"),
        match="expected the same boundary_token_id as in the others, 7, found -1",
    )  # fmt: skip


def test_a_file_that_is_named_twice_is_refused(files, tmp_path):
    ids = GOLDEN / "megatron" / "uint16" / "corpus_text_document.bin"
    report = convert(files, "stream", tmp_path / "store", workers=1)
    shard = tmp_path / "store" / report.shards[0].path
    for paths in ([tmp_path / "store", shard], [files[0], files[0]], [ids, ids.with_suffix(".idx")]):
        named = lambda paths=paths: convert(paths, "stream", tmp_path / "out")  # noqa: E731
        is_refused(ConvertError, named, match="is named 2 times")
