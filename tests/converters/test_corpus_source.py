"""Conversions of an open corpus: its path is read as it was opened, to the same bytes as a conversion of the path."""

import shutil

import numpy as np
import pins
import pytest
from contents import files_in
from contract import is_refused
from reading import reading
from split_corpus import FILES, FORMATS, ids_of

from zb_hdf5 import (
    ArgumentError,
    ChecksumError,
    ClosedError,
    ConvertError,
    Field,
    FormatError,
    IncompleteError,
    ReadAs,
    ShardIndex,
    convert,
    open_corpus,
    open_field_set,
    open_writer,
    verify_store,
    write_digests,
)

#: The options of a conversion of each kind of path, and its target, besides the options by which it is read.
CASES = {
    "store": {},
    "store-batch": {},
    "lone-hdf5": {},
    "lone-batch": {},
    "both-formats": {},
    "both-formats-batch": {},
    "text-store": {},
    "live": {},
    "stream-store": {"seq_len": 32},
    "lone-stream": {"seq_len": 32},
    "records-hdf5": {"batch_size": 4},
    "records-hdf5-folder": {"batch_size": 4, "val_fraction": 0.25},
    "batches-hdf5": {},
    "channels-hdf5-folder": {"batch_size": 4},
    "records-npy": {"batch_size": 4},
    "records-npy-folder": {"batch_size": 4, "val_fraction": 0.25},
    "megatron": {"seq_len": 32},
    "megatron-folder": {"seq_len": 32, "packing": "best-fit"},
    "datatrove-folder": {"seq_len": 32},
    "llmc": {"seq_len": 32},
    "olmo": {"seq_len": 32},
    "nanogpt": {"seq_len": 32},
    "npy": {"seq_len": 32},
    "npy-folder": {"seq_len": 32},
    "stream-hdf5-folder": {"seq_len": 32},
}
#: Those whose documents are kept as a stream.
STREAMS = {
    "stream-store": {},
    "lone-stream": {},
    "megatron-folder": {},
    "datatrove": {},
    "llmc": {"boundary_token_id": 50256},
    "npy-folder": {"boundary_token_id": 0},
}


@pytest.fixture(scope="module")
def folder(pinned_kinds):
    return pinned_kinds


def named(options):
    """Return the options of a reader as a conversion takes them."""
    other = {"backend": "source_format"}
    return {other.get(name, name): value for name, value in options.items() if name != "split"}


@pytest.mark.filterwarnings("ignore:channel 1 is taken")
@pytest.mark.parametrize("kind", CASES)
def test_a_corpus_gives_the_bytes_of_its_path(kind, folder, tmp_path):
    found = pins.kinds()[kind]
    given = {name: value for name, value in found.options.items() if name != "split"}
    path = folder / found.path
    convert(path, "hdf5", tmp_path / "of path", **CASES[kind], **named(given))
    with open_corpus(path, **reading(given)) as corpus:
        convert(corpus, "hdf5", tmp_path / "of corpus", **CASES[kind])
        assert len(corpus.tokens[:1]) == 1  # it stays open
    assert files_in(tmp_path / "of corpus") == files_in(tmp_path / "of path")


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("target", ["stream", "megatron"])
def test_a_corpus_of_documents_gives_the_stream_of_its_path(kind, target, folder, tmp_path):
    found = pins.kinds()[kind]
    path = folder / found.path
    options = {**STREAMS[kind], "tokens_only": True} if target == "megatron" else STREAMS[kind]
    convert(path, target, tmp_path / "of path", **options, **named(found.options))
    with open_corpus(path, **reading(found.options)) as corpus:
        convert(corpus, target, tmp_path / "of corpus", **options)
    assert files_in(tmp_path / "of corpus") == files_in(tmp_path / "of path")


@pytest.mark.parametrize("name", FORMATS)
def test_a_corpus_of_a_split_has_the_files_of_that_split(name, tmp_path):
    write, options = FORMATS[name]
    source = tmp_path / "corpus"
    source.mkdir()
    for file, number in FILES.items():
        write(source / file, ids_of(number))
    shape = {"batch_size": 2, "seq_len": 5, "shuffle": False}
    for split, first in {"train": 1000, "val": 2000}.items():
        with open_corpus(source, split=split, **reading(options)) as corpus:
            expected = corpus.tokens[:]
            convert(corpus, "hdf5", tmp_path / split, **shape)
        assert expected[0] == first
        with open_corpus(tmp_path / split) as result:
            assert result.tokens[:].tolist() == expected.tolist()
    with open_corpus(source, split="all", **reading(options)) as corpus:
        convert(corpus, "hdf5", tmp_path / "all", **shape)
    convert(source, "hdf5", tmp_path / "all of path", split="all", **shape, **options)
    assert files_in(tmp_path / "all") == files_in(tmp_path / "all of path")
    assert set(ShardIndex.load(tmp_path / "all").table.values["split"]) == {"train"}


@pytest.mark.parametrize("target", ["hdf5", "stream"])
def test_a_corpus_of_a_split_of_a_store_keeps_the_split_and_its_documents(target, tmp_path):
    for number, name in enumerate(("train", "val")):
        (tmp_path / "texts" / name).mkdir(parents=True)
        rows = "".join(f'{{"text": "{number} {k} {"x" * (7 * k % 40)}", "id": "{number}-{k}"}}\n' for k in range(60))
        (tmp_path / "texts" / name / "a.jsonl").write_text(rows)
    shape = {"batch_size": 2, "seq_len": 16} if target == "hdf5" else {}
    convert(tmp_path / "texts", target, tmp_path / "S", tokenizer="byte", id_column="id", **shape)
    with open_corpus(tmp_path / "S", split="val") as corpus:
        expected = corpus.tokens[:].tolist()
        ids = [document.id for document in corpus.documents]
        convert(corpus, target, tmp_path / "val")
    with open_corpus(tmp_path / "val") as result:
        assert result.tokens[:].tolist() == expected
        assert [document.id for document in result.documents] == ids
    assert len(ids) == 60
    assert set(ShardIndex.load(tmp_path / "val").table.values["split"]) == {"val"}
    assert {report.problem for report in verify_store(tmp_path / "val")} == {None}


def test_the_field_sets_of_a_split_are_copied_with_it(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(64 * 16, dtype=np.uint16).reshape(64, 16))
    convert(tmp_path / "t.npy", "hdf5", tmp_path / "S", batch_size=4, val_fraction=0.25)
    fields = [Field("score", np.dtype("f4"))]
    for split in ("train", "val"):
        with open_corpus(tmp_path / "S", split=split) as tokens, open_field_set(tokens, "teacher", fields) as found:
            for step in found.missing(4, quiet=True):
                found.write(step["records"], score=step["tokens"].numpy().astype(np.float32))
            found.finish()
    with open_corpus(tmp_path / "S", split="val") as corpus:
        report = convert(corpus, "hdf5", tmp_path / "val")
        assert report.field_sets == ("teacher (val)",)
        added = corpus.with_fields("teacher")
        is_refused(ArgumentError, lambda: convert(added, "hdf5", tmp_path / "more"), match="the field set teacher")
    with open_corpus(tmp_path / "val", split="val") as copy:
        assert copy.field("teacher/score").tokens[:].tolist() == copy.tokens[:].tolist()


@pytest.mark.parametrize(
    "given",
    [
        {"source_format": "npy"},
        {"split": "all"},
        {"dataset": "tokens"},
        {"axes": "record,token"},
        {"source_dtype": "uint16"},
        {"unwritten": "drop"},
    ],
)
def test_an_option_that_a_corpus_has_fixed_is_refused_beside_it(given, folder, tmp_path):
    with open_corpus(folder / "flat" / "npy-records") as corpus:
        words = f"npy-records: {next(iter(given))}: chosen when a corpus is opened: pass it to open_corpus"
        is_refused(ArgumentError, lambda: convert(corpus, "hdf5", tmp_path / "out", **given), match=words)


def test_what_is_no_corpus_of_a_path_is_refused_with_what_to_pass(folder, tmp_path):
    with open_corpus(folder / "h5") as corpus:
        batches = corpus.batches()
        is_refused(ArgumentError, lambda: convert(batches, "hdf5", tmp_path / "out"), match="found batches of")
        is_refused(ArgumentError, lambda: convert([corpus] * 2, "hdf5", tmp_path / "out"), match="path")
    is_refused(ClosedError, lambda: convert(corpus, "hdf5", tmp_path / "out"))
    with open_writer(tmp_path / "f.h5", batch_size=2, seq_len=4, fields={"mask": "u1"}) as writer:
        writer.write(np.ones((3, 2, 4), np.uint32), {"mask": np.ones((3, 2, 4), np.uint8)})
    with open_corpus(tmp_path / "f.h5") as corpus:
        values = corpus.field("mask")
        is_refused(ArgumentError, lambda: convert(values, "hdf5", tmp_path / "out"), match="values of a field")


def test_a_corpus_that_still_grows_is_refused_as_its_path_is(folder, tmp_path):
    path = folder / pins.kinds()["live-growing"].path
    with open_corpus(path) as corpus:
        for source in (path, corpus):
            is_refused(
                IncompleteError, lambda source=source: convert(source, "hdf5", tmp_path / "out"), match="not finished"
            )


def test_tokens_that_are_others_by_now_are_not_converted(folder, tmp_path):
    shutil.copytree(folder / "flat" / "npy", tmp_path / "npy")
    with open_corpus(tmp_path / "npy") as corpus:
        file = corpus.files[0].path
        ids = np.load(file)
        np.save(tmp_path / "other.npy", ids[::-1])
        (tmp_path / "other.npy").replace(file)
        is_refused((FormatError, ConvertError), lambda: convert(corpus, "hdf5", tmp_path / "out", seq_len=32))
    assert not (tmp_path / "out").exists()


def test_digests_of_a_corpus_are_compared_before_it_is_converted(folder, tmp_path):
    shutil.copytree(folder / "flat" / "npy", tmp_path / "npy")
    write_digests(tmp_path / "npy", tmp_path / "digests.json")
    how = {"read_as": ReadAs(digests=tmp_path / "digests.json")}
    with open_corpus(tmp_path / "npy", **how) as corpus:
        convert(corpus, "hdf5", tmp_path / "good", seq_len=32)
    convert(tmp_path / "npy", "hdf5", tmp_path / "of path", seq_len=32)
    assert files_in(tmp_path / "good") == files_in(tmp_path / "of path")
    file = sorted((tmp_path / "npy").iterdir())[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    with open_corpus(tmp_path / "npy", **how) as corpus:
        is_refused(ChecksumError, lambda: convert(corpus, "hdf5", tmp_path / "bad", seq_len=32))


def test_a_cached_corpus_is_converted_from_its_files(folder, tmp_path):
    with open_corpus(folder / "h5", cache=tmp_path / "cache") as corpus:
        convert(corpus, "hdf5", tmp_path / "of corpus")
    convert(folder / "h5", "hdf5", tmp_path / "of path")
    assert files_in(tmp_path / "of corpus") == files_in(tmp_path / "of path")
