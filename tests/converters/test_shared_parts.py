"""`--shards N` of a source that is read in fewer parts than N: streams, and files of other trainers."""

import json

import numpy as np
import pytest
from commandline import report_of
from contents import files_in, write_stream
from interrupted import Failing, Stops
from reading import reading

from zb_hdf5 import convert, open_corpus
from zb_hdf5.converters.cli import convert_commands
from zb_hdf5.converters.merge import merge_parts
from zb_hdf5.store.format_list import document_targets

TEXTS = [f"document {number} " * (1 + number % 7) for number in range(100)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def ids_of_texts():
    return [token for text in TEXTS for token in (*text.encode(), 256)]


@pytest.mark.parametrize("target", ["stream", *sorted(document_targets())])
@pytest.mark.thin
def test_text_in_one_part_becomes_as_many_shards_as_are_asked_for(corpus, tmp_path, target):
    report = report_of(convert_commands, corpus, tmp_path / "out", "--to", target, "--tokenizer", "byte", "--shards", 8)
    assert (report["num_shards"], report["documents"]) == (8, 100)
    assert report["tokens_stored"] == len(ids_of_texts())


@pytest.mark.parametrize("target", ["stream", "megatron", "datatrove", "llmc", "olmo"])
def test_a_stream_of_one_file_becomes_shards_that_read_as_it_does(tmp_path, target):
    lengths = [5, 1, 300, 7, 2, 2, 90, 4, 4, 80]
    ids = np.arange(sum(lengths), dtype=np.uint16)
    write_stream(tmp_path / "one.h5", ids, lengths)
    lossy = {} if target in ("stream", "megatron", "datatrove") else {"tokens_only": True}
    report = convert(tmp_path / "one.h5", target, tmp_path / "out", shards=4, **lossy)
    assert [shard.token_count for shard in report.shards] != [len(ids)]
    assert len(report.shards) == 4
    assert all(shard.token_count for shard in report.shards)
    names = {"source_dtype": "uint16"} if target == "olmo" else {}
    with open_corpus(tmp_path / "out", **reading(names)) as stream:
        found = np.empty(stream.num_tokens, stream.tokens.dtype)
        stream.tokens.read([(0, found)])
    assert np.array_equal(found, ids)


def test_parts_stops_and_workers_give_the_same_files(corpus, tmp_path):
    options = {"tokenizer": "byte", "shards": 5}
    convert(corpus, "megatron", tmp_path / "one", workers=1, **options)
    convert(corpus, "megatron", tmp_path / "workers", workers=2, **options)
    with pytest.raises(Stops):
        convert(corpus, "megatron", tmp_path / "stopped", engine=Failing(2), **options)
    convert(corpus, "megatron", tmp_path / "stopped", resume=True, **options)
    for job in range(3):
        convert(corpus, "megatron", tmp_path / "parts", shard_range=(job, 3), **options)
    merge_parts(tmp_path / "parts")
    expected = files_in(tmp_path / "one")
    assert len(expected) == 10
    for name in ("workers", "stopped", "parts"):
        assert files_in(tmp_path / name) == expected


@pytest.mark.parametrize("target", ["llmc", "bin"])
def test_ids_without_documents_are_cut_anywhere(tmp_path, target):
    np.arange(5000, dtype="<u2").tofile(tmp_path / "train.bin")
    how = {"source_dtype": "uint16", "tokens_only": True}
    report = convert(tmp_path / "train.bin", target, tmp_path / "out", shards=3, **how)
    assert [shard.token_count for shard in report.shards]
    assert sum(shard.token_count for shard in report.shards) == 5000
    assert max(shard.token_count for shard in report.shards) < 1.1 * 5000 / 3
