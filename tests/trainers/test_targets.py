"""Files for other trainers: byte for byte those of their own libraries, in one file and in folders of shards."""

import errno
import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from commandline import one_error, report_of, run_zb
from contract import is_refused
from damage import flip
from interrupted import Failing, Stops
from peers.truth import LARGE_VOCAB, SMALL_VOCAB, documents, loss_mask
from processes import killed_when
from reading import reading

from zb_hdf5 import HDF5ShardWriter, ReadAs, StoreMeta, convert, open_corpus, open_reader
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters import stream_source
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.merge import merge_parts
from zb_hdf5.converters.run import plan
from zb_hdf5.converters.sources import target_of
from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.errors import ArgumentError, ClosedError, ConvertError, ExistsError, FormatError, ZbError
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.formats import document_writer
from zb_hdf5.trainers import bin as trainer_bin
from zb_hdf5.trainers.megatron import MegatronWriter

GOLDEN = Path(__file__).parents[1] / "data" / "trainers"


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """Write the documents of the golden files into streams: with a small vocabulary, and with a large one."""
    folder = tmp_path_factory.mktemp("streams")
    for name, vocab_size in (("small", SMALL_VOCAB), ("large", LARGE_VOCAB)):
        dtype = "uint16" if name == "small" else "uint32"
        with HDF5ShardWriter(folder / f"{name}.h5", dtype=dtype, vocab_size=vocab_size) as writer:
            for document in documents(vocab_size):
                writer.write_document(document)
    tokenizer = json.dumps({"name": "made-up/tokenizer"})
    how = {"vocab_size": SMALL_VOCAB, "tokenizer": tokenizer, "fields": {"loss_mask": "u1"}}
    with HDF5ShardWriter(folder / "loss.h5", **how) as writer:
        for document in documents(SMALL_VOCAB):
            writer.write_document(document, {"loss_mask": loss_mask(document)})
    return folder


@pytest.mark.parametrize(("source", "golden"), [("small", "uint16"), ("large", "int32")])
def test_megatron(source, golden, streams, tmp_path):
    report = convert(streams / f"{source}.h5", "megatron", tmp_path / "corpus.bin")
    for ending in ("bin", "idx"):
        expected = (GOLDEN / "megatron" / golden / f"corpus_text_document.{ending}").read_bytes()
        assert (tmp_path / f"corpus.{ending}").read_bytes() == expected
    assert report.to_json()["dtype"] == golden
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


@pytest.mark.parametrize(("source", "golden"), [("small", "uint16"), ("large", "uint32"), ("loss", "loss")])
def test_datatrove(source, golden, streams, tmp_path):
    """The name of the tokenizer is in a stream, and in the golden files."""
    folder = GOLDEN / "datatrove" / golden
    convert(streams / f"{source}.h5", "datatrove", tmp_path / "00000_unshuffled.ds")
    for file in sorted(folder.glob("*.ds*")):
        expected = file.read_bytes()
        if source != "loss":
            expected = expected.replace(b"made-up/tokenizer", b"Unknown Tokenizer")
        assert (tmp_path / file.name).read_bytes() == expected
    assert len([*tmp_path.iterdir()]) == len([*folder.glob("*.ds*")])


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(stream_source, "GROUP_TOKENS", 1024)


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents_in(path):
    with open_corpus(path) as stream:
        return [stream.documents[number].ids.tolist() for number in range(stream.document_count)]


def test_a_folder_has_the_files_of_each_shard_and_split_and_nothing_else(streams, tmp_path):
    report = convert(streams / "small.h5", "megatron", tmp_path / "out", shards=3, val_fraction=0.2, workers=1)
    parts = ["train-00000-of-00003", "train-00001-of-00003", "train-00002-of-00003", "val-00000-of-00001"]
    assert [*files_of(tmp_path / "out")] == [f"{part}.{ending}" for part in parts for ending in ("bin", "idx")]
    found = [document for part in parts for document in documents_in(tmp_path / "out" / f"{part}.bin")]
    expected = [document.tolist() for document in documents(SMALL_VOCAB)]
    assert sorted(found) == sorted(expected)
    assert 0 < len(documents_in(tmp_path / "out" / "val-00000-of-00001.bin")) < 30
    facts = report.to_json()
    assert (facts["documents"], facts["num_shards"], facts["dtype"]) == (60, 4, "uint16")
    assert ("documents", "60: 3 shards train, 1 shard val") in report.lines()


def test_a_folder_is_read_in_place_in_order_whoever_writes_it(streams, tmp_path):
    convert(streams / "large.h5", "datatrove", tmp_path / "out", shards=4, workers=2)
    assert documents_in(tmp_path / "out") == [document.tolist() for document in documents(LARGE_VOCAB)]
    convert(streams / "large.h5", "datatrove", tmp_path / "again", shards=4, workers=1)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    with pytest.raises(ExistsError):
        convert(streams / "large.h5", "datatrove", tmp_path / "out", shards=2, workers=1)
    convert(streams / "large.h5", "datatrove", tmp_path / "out", shards=2, workers=1, force=True)
    assert len(files_of(tmp_path / "out")) == 6
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ConvertError, match=r"notes\.txt"):
        convert(streams / "large.h5", "datatrove", tmp_path / "out", workers=1, force=True)


@pytest.mark.parametrize("way", ["megatron", "datatrove", "stream"])
def test_documents_come_back_as_they_went(way, tmp_path):
    source = GOLDEN / "megatron" / "int32"
    convert(source, way, tmp_path / "there", shards=2, workers=1)
    convert(tmp_path / "there", "megatron", tmp_path / "back.bin")
    for ending in ("bin", "idx"):
        expected = (source / f"corpus_text_document.{ending}").read_bytes()
        assert (tmp_path / f"back.{ending}").read_bytes() == expected


def test_texts_and_cut_arrays_become_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one document"}\n{"text": "and another"}\n')
    convert(tmp_path / "a.jsonl", "megatron", tmp_path / "a.bin", tokenizer="byte")
    found = documents_in(tmp_path / "a.bin")
    assert [bytes(each[:-1]).decode() for each in found] == ["one document", "and another"]
    np.save(tmp_path / "b.npy", np.array([5, 6, 0, 7, 0, 8], np.uint16))
    convert(tmp_path / "b.npy", "megatron", tmp_path / "b.bin", boundary_token_id=0)
    assert documents_in(tmp_path / "b.bin") == [[5, 6, 0], [7, 0], [8]]
    with pytest.raises(ArgumentError, match=r"b\.npy: tells no documents apart: pass boundary_token_id"):
        convert(tmp_path / "b.npy", "megatron", tmp_path / "c.bin")
    convert(tmp_path / "b.npy", "megatron", tmp_path / "c.bin", tokens_only=True)
    assert documents_in(tmp_path / "c.bin") == [[5, 6, 0, 7, 0, 8]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(None, "int32"), (65_499, "uint16"), (65_500, "int32")])
@pytest.mark.thin
def test_the_dtype_is_that_of_megatron_itself(vocab_size, dtype, tmp_path):
    with HDF5ShardWriter(tmp_path / "in.h5", dtype="uint32") as writer:
        writer.write_document([1, 2, 65_000])
    report = convert(tmp_path / "in.h5", "megatron", tmp_path / "out.bin", vocab_size=vocab_size)
    assert report.to_json()["dtype"] == dtype
    assert documents_in(tmp_path / "out.bin") == [[1, 2, 65_000]]
    assert report.to_json()["uint16_would_save_bytes"] == (6 if vocab_size is None else 0)


def test_ids_that_megatron_cannot_hold_are_refused(tmp_path):
    with HDF5ShardWriter(tmp_path / "in.h5", dtype="uint32") as writer:
        writer.write_document([1, 2**31])
    with pytest.raises(ConvertError, match=r"token id 2147483648 at index 1 is outside 0\.\.2,147,483,647 \(int32\)"):
        convert(tmp_path / "in.h5", "megatron", tmp_path / "out.bin")
    with pytest.raises(ConvertError, match="vocab_size 100"):
        convert(tmp_path / "in.h5", "megatron", tmp_path / "out.bin", vocab_size=100)
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


def test_no_place_for_a_part_of_the_documents_is_an_error_that_names_it(tmp_path):
    with HDF5ShardWriter(tmp_path / "in.h5", fields={"mask": "u1", "loss_mask": "u1"}) as writer:
        writer.write_document(
            [1, 2], {"mask": [0, 1], "loss_mask": [1, 0]}, id="a", metadata={"x": 1}, spans=[(0, 1, "s")]
        )
    lost = "leaves behind the field mask and the ids of documents and the metadata of documents and the spans"
    with pytest.raises(ConvertError, match=lost):
        convert(tmp_path / "in.h5", "datatrove", tmp_path / "out.ds")
    report = convert(tmp_path / "in.h5", "datatrove", tmp_path / "out.ds", tokens_only=True)
    assert report.left_behind.startswith(lost)
    assert (tmp_path / "out.ds.loss").read_bytes() == b"\x01\x00"
    with pytest.raises(ConvertError, match="the fields loss_mask, mask"):
        convert(tmp_path / "in.h5", "megatron", tmp_path / "out.bin")


def test_a_loss_mask_is_of_zeros_and_ones(tmp_path):
    with HDF5ShardWriter(tmp_path / "in.h5", fields={"loss_mask": "f4"}) as writer:
        writer.write_document([1, 2], {"loss_mask": [1, 0.5]})
    with pytest.raises(ConvertError, match="expected a loss_mask of one 0 or 1 for each id"):
        convert(tmp_path / "in.h5", "datatrove", tmp_path / "out.ds")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


@pytest.mark.parametrize(("options", "words"), [
    ({"codec": "zstd"}, "megatron files have no use for codec"),
    ({"note": "mine"}, "no use for note"),
    ({"layout": "batches"}, "no use for layout"),
    ({"batch_size": 4}, "batch_size belongs to layout batches"),
    ({"shards": 2, "destination": "out.bin"}, "is one file"),
    ({"val_fraction": 0.1, "destination": "out.bin"}, "is one file"),
    ({"destination": "out.idx"}, r"expected a folder or a name that ends in \.bin"),
    ({"destination": "out.h5"}, r"expected a folder or a name that ends in \.bin"),
    ({"target": "llama"}, "target must be one of .*megatron"),
])  # fmt: skip
def test_options_without_use_are_refused(options, words, streams, tmp_path):
    given = {"target": "megatron", "destination": "out", **options}
    destination = tmp_path / given.pop("destination")
    is_refused(ZbError, lambda: convert(streams / "small.h5", given.pop("target"), destination, **given), match=words)
    assert not [*tmp_path.iterdir()]


def test_a_source_with_splits_is_a_folder(streams, tmp_path):
    convert(streams / "small.h5", "stream", tmp_path / "split", val_fraction=0.3, shards=1, workers=1)
    with pytest.raises(ArgumentError, match="the splits train, val: name a folder"):
        convert(tmp_path / "split", "megatron", tmp_path / "out.bin")
    convert(tmp_path / "split", "megatron", tmp_path / "out", workers=1)
    assert len(files_of(tmp_path / "out")) == 4


@pytest.mark.parametrize(("target", "how"), [("bin", {"source_dtype": "uint16"}), ("llmc", {})])
def test_held_out_documents_of_one_array_come_back_as_their_split(target, how, streams, tmp_path):
    options = {"val_fraction": 0.3, "shards": 2, "tokens_only": True, "workers": 1}
    convert(streams / "small.h5", target, tmp_path / "out", **options)
    convert(streams / "small.h5", "stream", tmp_path / "split", val_fraction=0.3, shards=2, workers=1)
    convert(tmp_path / "out", "stream", tmp_path / "back", boundary_token_id=0, workers=1, **how)
    for split in ("train", "val"):
        with open_corpus(tmp_path / "split", split=split) as stream:
            expected = stream.tokens[0 : stream.num_tokens]
        for path, opened in ((tmp_path / "out", how), (tmp_path / "back", {})):
            with open_corpus(path, split=split, **reading(opened)) as stream:
                np.testing.assert_array_equal(stream.tokens[0 : stream.num_tokens], expected)
    how = reading(how)
    with open_corpus(tmp_path / "out", **how) as default, open_corpus(tmp_path / "out", split="train", **how) as train:
        assert default.num_tokens == train.num_tokens


def test_existing_files_are_replaced_only_if_it_is_asked_for(streams, tmp_path):
    (tmp_path / "out.idx").write_bytes(b"of another")
    with pytest.raises(ExistsError, match=r"out\.idx"):
        convert(streams / "small.h5", "megatron", tmp_path / "out.bin")
    assert [*files_of(tmp_path)] == ["out.idx"]
    convert(streams / "small.h5", "megatron", tmp_path / "out.bin", force=True)
    with pytest.raises(ExistsError, match=r"out\.bin"):
        convert(streams / "small.h5", "megatron", tmp_path / "out.bin")
    assert len(documents_in(tmp_path / "out.bin")) == 60


def test_an_interrupted_conversion_is_resumed(streams, tmp_path):
    how = {"shards": 4, "workers": 1}
    is_refused(
        Stops, lambda: convert(streams / "small.h5", "megatron", tmp_path / "out", shards=4, engine=Failing(2))
    )  # fmt: skip
    with pytest.raises(ConvertError, match="2 of 4 finished files of tokens"):
        convert(streams / "small.h5", "megatron", tmp_path / "out", **how)
    report = convert(streams / "small.h5", "megatron", tmp_path / "out", **how, resume=True)
    assert report.kept.shards == 2
    convert(streams / "small.h5", "megatron", tmp_path / "whole", **how)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_finished_file_that_was_changed_is_written_again(streams, tmp_path):
    how = {"shards": 4, "workers": 1}
    for name in ("train-00000-of-00004.bin", "train-00001-of-00004.idx"):
        is_refused(
            Stops, lambda: convert(streams / "small.h5", "megatron", tmp_path / "out", shards=4, engine=Failing(2))
        )  # fmt: skip
        flip(tmp_path / "out.partial" / name, 40)
        assert convert(streams / "small.h5", "megatron", tmp_path / "out", **how, resume=True).kept.shards == 1
        assert len(documents_in(tmp_path / "out")) == 60
        shutil.rmtree(tmp_path / "out")


def contents_of(folder):
    """Return the bytes of all files in and below a folder, by their paths in it."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("target", ["megatron", "datatrove", "olmo", "llmc", "hf", "parquet", "mds"])
@pytest.mark.thin
def test_the_jobs_of_an_array_write_the_same_folder(target, streams, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(stream_source, "GROUP_TOKENS", 500)
    how = {"shards": 4, "val_fraction": 0.2, "tokens_only": True, "workers": 1}
    convert(streams / "loss.h5", target, tmp_path / "whole", **how)
    parts = tmp_path / "parts"
    for job in (2, 0):
        report = convert(streams / "loss.h5", target, parts, **how, shard_range=(job, 3))
        assert report.destination == partial_path(parts)
        message = one_error(run_zb("index", "merge", parts))
        assert "--resume --shard-range I/N' for each" in message
    assert not parts.exists()
    is_refused(ConvertError, lambda: convert(streams / "loss.h5", target, parts, **how | {"shards": 3},
                                             shard_range=(1, 3), resume=True), match="another conversion")  # fmt: skip
    convert(streams / "loss.h5", target, parts, **how, shard_range=(1, 3))
    merged = report_of(zb, "index", "merge", parts)
    assert merged["num_shards"] == 5
    assert contents_of(parts) == contents_of(tmp_path / "whole")
    assert not partial_path(parts).exists()


def test_parts_that_were_lost_or_cut_are_not_merged(streams, tmp_path):
    how = {"shards": 1, "val_fraction": 0.3, "workers": 1}
    for job in range(2):
        convert(streams / "small.h5", "megatron", tmp_path / "out", **how, shard_range=(job, 2))
    first = partial_path(tmp_path / "out") / "train-00000-of-00001.bin"
    whole = first.read_bytes()
    first.write_bytes(whole[:-2])
    is_refused(FormatError, lambda: merge_parts(tmp_path / "out"), match="00001.bin: expected .* bytes, as it was")
    first.write_bytes(whole)
    first.with_suffix(".idx").rename(tmp_path / "kept")
    is_refused(ConvertError, lambda: merge_parts(tmp_path / "out"), match="00001.idx: is missing")
    (tmp_path / "kept").rename(first.with_suffix(".idx"))
    (first.parent / "train-00000-of-00009.bin").touch()  # of an earlier plan
    assert merge_parts(tmp_path / "out").token_count == sum(map(len, documents(SMALL_VOCAB)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"{split}-00000-of-00001.{ending}" for split in ("train", "val") for ending in ("bin", "idx")
    ]


def test_one_file_has_no_parts_that_jobs_write(streams, tmp_path):
    part = lambda: convert(streams / "small.h5", "megatron", tmp_path / "x.bin", shard_range=(0, 2))  # noqa: E731
    is_refused(ConvertError, part, match="is one file; name a folder")


def test_a_killed_conversion_is_resumed_to_the_same_bytes(streams, tmp_path):
    how = {"shards": 8, "workers": 1}
    second = tmp_path / "out.partial" / "train-00001-of-00008.bin"
    killed_when(second.exists, lambda: convert(streams / "large.h5", "megatron", tmp_path / "out", **how))
    assert not (tmp_path / "out").exists()
    convert(streams / "large.h5", "megatron", tmp_path / "out", **how, resume=True)
    convert(streams / "large.h5", "megatron", tmp_path / "whole", **how)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("number", range(1, 5))
def test_a_full_disk_leaves_no_file(number, streams, tmp_path, monkeypatch):
    """The call with this number is the one that meets it: a write of ids, of an index, or a flush."""
    calls = []

    def fails_at(real):
        def call(*arguments):
            calls.append(arguments)
            if len(calls) == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        return call

    monkeypatch.setattr(document_writer, "write_fully", fails_at(document_writer.write_fully))
    monkeypatch.setattr(document_writer.os, "fsync", fails_at(os.fsync))
    with pytest.raises(OSError, match="No space left") as raised:
        convert(streams / "small.h5", "megatron", tmp_path / "out.bin")
    assert str(raised.value.filename).startswith(str(tmp_path / "out."))
    assert not [*tmp_path.iterdir()]


def test_a_writer_that_was_closed_takes_no_more(tmp_path):
    meta = StoreMeta(1, 16, np.dtype("<u2"), layout="stream")
    with MegatronWriter(tmp_path / "out.bin", meta) as writer:
        writer.write_documents(np.array([1, 2, 3]), np.array([2, 1]))
    with pytest.raises(ClosedError):
        writer.write_documents(np.array([1]), np.array([1]))
    assert documents_in(tmp_path / "out.bin") == [[1, 2], [3]]
    with pytest.raises(ConvertError, match="outside"), MegatronWriter(tmp_path / "again.bin", meta) as writer:
        writer.write_documents(np.array([1, -1]), np.array([2]))
    with MegatronWriter(tmp_path / "empty.bin", meta):
        pass
    assert documents_in(tmp_path / "empty.bin") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.bin", "empty.idx", "out.bin", "out.idx"]


def ids_in(path, dtype, offset=0):
    return np.fromfile(path, dtype, offset=offset).tolist()


def test_ids_alone_are_written_for_nanogpt(streams, tmp_path):
    source = GOLDEN / "bin" / "nanogpt" / "train.bin"
    with pytest.raises(ConvertError, match="leaves behind the ends of documents, which no token marks"):
        convert(streams / "small.h5", "bin", tmp_path / "out.bin")
    convert(streams / "small.h5", "bin", tmp_path / "out.bin", tokens_only=True)
    assert (tmp_path / "out.bin").read_bytes() == source.read_bytes()
    convert(streams / "large.h5", "bin", tmp_path / "large.bin", tokens_only=True)
    expected = np.concatenate(documents(LARGE_VOCAB)).tolist()
    assert ids_in(tmp_path / "large.bin", "<u4") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.bin", "out.bin"]


@pytest.mark.parametrize("golden", ["gpt2", "llama3"])
def test_the_header_of_llmc(golden, tmp_path):
    """A file that tells no documents apart has none to lose, and is cut where it is asked for."""
    files = sorted((GOLDEN / "bin" / golden).glob("*.bin"))
    convert(files, "llmc", tmp_path / "out", workers=1)
    assert list(files_of(tmp_path / "out").values()) == [file.read_bytes() for file in files]
    report = convert(files, "llmc", tmp_path / "cut", shards=5, workers=1)
    assert len(report.shards) == 5
    with open_corpus(tmp_path / "cut") as stream, open_corpus(files[0].parent) as whole:
        np.testing.assert_array_equal(
            stream.tokens[0:stream.num_tokens], whole.tokens[0:whole.num_tokens]
        )  # fmt: skip
    assert "documents" not in dict(report.lines())


def test_pieces_of_files_without_documents_are_held_out_once(tmp_path):
    ids = np.arange(50_000, dtype=np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    how = {"source_dtype": "uint16", "val_fraction": 0.2, "workers": 1}
    convert(tmp_path / "ids.bin", "llmc", tmp_path / "out", **how)
    parts = {path.name[:3]: np.fromfile(path, "<u2", offset=1024) for path in (tmp_path / "out").glob("*.bin")}
    assert sorted(np.concatenate([*parts.values()]).tolist()) == ids.tolist()
    assert 0.15 < len(parts["val"]) / len(ids) < 0.25
    convert(tmp_path / "ids.bin", "llmc", tmp_path / "several", shards=3, **how)
    assert np.array_equal(np.fromfile(next((tmp_path / "several").glob("val*")), "<u2", offset=1024), parts["val"])


def test_a_file_of_llmc_has_as_many_ids_as_its_header_can_count(streams, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_bin, "MAX_TOKENS", 19_343)
    with pytest.raises(ConvertError, match=r"at most 19,343 ids, .* pass a larger number of shards"):
        convert(streams / "small.h5", "llmc", tmp_path / "out.bin", tokens_only=True)
    convert(streams / "small.h5", "llmc", tmp_path / "out", tokens_only=True, shards=2, workers=1)
    assert len(files_of(tmp_path / "out")) == 2


def olmo_source(path, vocab_size, boundary_token_id=-1):
    """Write the documents of the golden files with the ids, sources and rows that they have there."""
    found = documents(vocab_size)
    names = [f'a "name", {number}'.encode() for number in range(len(found))]
    rows = DocumentRows(["part,\n0.json.gz"], np.zeros(len(found), "u4"), np.arange(len(found), dtype="u8"), names)
    with HDF5ShardWriter(
        path, dtype="uint32", vocab_size=vocab_size, boundary_token_id=boundary_token_id
    ) as writer:  # fmt: skip
        writer.write_documents(np.concatenate(found), [len(each) for each in found], documents=rows)
    return path


@pytest.mark.parametrize(("golden", "vocab_size"), [("uint16", SMALL_VOCAB), ("uint32", LARGE_VOCAB)])
@pytest.mark.thin
def test_olmo(golden, vocab_size, tmp_path):
    source = olmo_source(tmp_path / "in.h5", vocab_size)
    with pytest.raises(ConvertError, match="leaves behind the ends of documents, which no token marks"):
        convert(source, "olmo", tmp_path / "out.npy")
    convert(source, "olmo", tmp_path / "ids.npy", tokens_only=True)
    assert not (tmp_path / "ids.csv.gz").exists()
    source = olmo_source(tmp_path / "ended.h5", vocab_size, boundary_token_id=0)
    convert(source, "olmo", tmp_path / "out.npy")
    expected = GOLDEN / "olmo" / golden / "part-0-00000.npy"
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "ids.npy").read_bytes() == expected.read_bytes()
    rows = [gzip.decompress(each.with_suffix(".csv.gz").read_bytes()) for each in (expected, tmp_path / "out.npy")]
    assert rows[0] == rows[1]
    convert(source, "olmo", tmp_path / "again", workers=1)
    part = tmp_path / "again" / "train-00000-of-00001.csv.gz"
    assert part.read_bytes() == (tmp_path / "out.csv.gz").read_bytes()
    with open_corpus(tmp_path / "again", read_as=ReadAs(source_dtype=golden)) as stream:
        assert np.diff(stream.doc_offsets).tolist() == [len(each) for each in documents(vocab_size)]


def test_the_suffix_of_a_destination_chooses_a_format_where_it_is_of_one(streams, tmp_path):
    convert(streams / "small.h5", "auto", tmp_path / "out.ds")
    assert len(documents_in(tmp_path / "out.ds")) == 60
    with pytest.raises(ArgumentError, match=r"megatron and bin and llmc files end in \.bin"):
        convert(streams / "small.h5", "auto", tmp_path / "out.bin")
    assert target_of(tmp_path / "out.npy") == "npy"


@pytest.mark.parametrize("target", ["megatron", "bin", "llmc"])
def test_records_of_a_store_are_documents_of_other_trainers(target, tmp_path):
    """Those of padding are none, in each split."""
    ids = np.random.default_rng(3).integers(0, 900, (23, 8)).astype(np.uint16)
    np.save(tmp_path / "in.npy", ids)
    convert(tmp_path / "in.npy", "hdf5", tmp_path / "store", batch_size=4, shuffle=False, shards=2, remainder="pad")
    report = convert(tmp_path / "store", target, tmp_path / "out", workers=1)
    assert len(report.shards) == 2
    parts = ["train-00000-of-00002.bin", "train-00001-of-00002.bin"]
    if target == "megatron":
        assert [row for part in parts for row in documents_in(tmp_path / "out" / part)] == ids.tolist()
    offset = 1024 if target == "llmc" else 0
    assert [each for part in parts for each in ids_in(tmp_path / "out" / part, "<u2", offset)] == ids.ravel().tolist()
    assert "documents" not in report.to_json()
    convert(tmp_path / "store", target, tmp_path / "one.bin")
    assert ids_in(tmp_path / "one.bin", "<u2", offset) == ids.ravel().tolist()


def test_the_places_of_documents_in_records_are_left_behind_if_asked_for(streams, tmp_path):
    convert(streams / "loss.h5", "hdf5", tmp_path / "rows", seq_len=64, batch_size=2, packing="best-fit")
    with pytest.raises(ConvertError, match="leaves behind the places of documents in the records"):
        convert(tmp_path / "rows", "datatrove", tmp_path / "out.ds")
    report = convert(tmp_path / "rows", "datatrove", tmp_path / "out.ds", tokens_only=True)
    with open_reader(tmp_path / "rows") as reader:
        tokens = np.concatenate([reader.read_batch(k).ravel() for k in range(reader.num_batches)])
        mask = np.concatenate([reader.field("loss_mask").read_batch(k).ravel() for k in range(reader.num_batches)])
    assert ids_in(tmp_path / "out.ds", "<u2") == tokens[: report.tokens_stored].tolist()
    assert ids_in(tmp_path / "out.ds.loss", "u1") == mask[: report.tokens_stored].tolist()


def test_a_bucket_takes_no_files_of_other_trainers(streams):
    with pytest.raises(ZbError, match="s3"):
        convert(streams / "small.h5", "megatron", "s3://bucket/out")


def test_a_dry_run_names_the_files_and_the_space(streams, tmp_path):
    how = {"source": streams / "large.h5", "target": "megatron", "destination": tmp_path / "out", "shards": 3}
    facts = plan(Conversion(**how, val_fraction=0.2)).to_json()
    assert (facts["num_tokens"], facts["dtype"], facts["num_shards"]) == (19_344, "int32", 4)
    assert (facts["total_bytes"], facts["inodes"]) == (19_344 * 4, 9)
    assert not [*tmp_path.iterdir()]
    done = run_zb("convert", streams / "large.h5", tmp_path / "out", "--to", "megatron", "--dry-run", code=0)
    assert "19,344 of int32" in done.output
    (tmp_path / "a.jsonl").write_text('{"text": "one document"}\n')
    facts = plan(Conversion(tmp_path / "a.jsonl", "megatron", tmp_path / "out", tokenizer="byte")).to_json()
    assert (facts["num_tokens"], facts["dtype"], facts["is_estimate"]) == (len("one document") + 1, "uint16", False)
    (tmp_path / "out").mkdir()
    with pytest.raises(ExistsError):
        plan(Conversion(**how))


def test_several_files_and_held_out_documents_become_rows(tmp_path):
    for number, name in enumerate(("uint16", "sentences")):
        for file in (GOLDEN / "megatron" / name).glob("corpus*"):
            shutil.copy(file, tmp_path / f"{number}{file.suffix}")
    how = {"seq_len": 64, "batch_size": 4, "packing": "best-fit", "workers": 1}
    report = convert([tmp_path / "0.bin", tmp_path / "1.bin"], "hdf5", tmp_path / "rows", **how, val_fraction=0.2)
    assert report.counts.documents == 120
    assert {*report.batches_of_split} == {"train", "val"}
    assert report.counts.tokens_in == 2 * 19_344


def test_the_largest_id_of_a_store_bounds_its_vocabulary(tmp_path):
    """A store has it, and a lone file does not."""
    with HDF5ShardWriter(tmp_path / "in.h5", dtype="uint32") as writer:
        writer.write_document([1, 2, 65_498])
    convert(tmp_path / "in.h5", "stream", tmp_path / "store", workers=1)
    assert convert(tmp_path / "in.h5", "megatron", tmp_path / "lone.bin").to_json()["dtype"] == "int32"
    assert convert(tmp_path / "store", "megatron", tmp_path / "out.bin").to_json()["dtype"] == "uint16"
    assert documents_in(tmp_path / "out.bin") == [[1, 2, 65_498]]


def test_a_disk_that_is_too_small_has_no_file_at_the_end(tmp_path, mount_disk):
    """The number of tokens of a text is not known before, so that the disk is found full."""
    lines = [json.dumps({"text": "some words " * 400}) + "\n" for _ in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    disk = mount_disk(128)
    for destination in (disk / "out.bin", disk / "out"):
        with pytest.raises(OSError, match="No space left"):
            convert(tmp_path / "a.jsonl", "megatron", destination, tokenizer="byte", workers=1)
        assert not [*disk.iterdir()]
