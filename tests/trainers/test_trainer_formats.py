"""A format of another trainer is one file and one row: its documents are a source of every target."""

from dataclasses import replace

import lines_format
import numpy as np
import pytest
from contract import is_refused

from zb_hdf5 import ArgumentError, FormatError, convert, open_corpus, open_reader
from zb_hdf5.converters.sources import sources, target_names
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format import NOT_IN_PLACE
from zb_hdf5.store.format_list import FORMATS, load_format

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12], [], [13, 14]] * 8


@pytest.fixture(autouse=True)
def plugged_in(monkeypatch):
    monkeypatch.setitem(FORMATS, "lines", lines_format.ROW)


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "in"
    found.mkdir()
    for number in range(2):
        lines = [" ".join(map(str, each)) for each in DOCUMENTS[number * 20 :][:20]]
        (found / f"{number}.lines").write_text("\n".join(lines) + "\n")
    return found


@pytest.mark.parametrize("source_format", ["auto", "lines"])
def test_documents_and_fields_of_a_row_are_kept_in_a_stream(source_format, folder, tmp_path):
    report = convert(folder, "stream", tmp_path / "stream", source_format=source_format, vocab_size=20, workers=1)
    assert (report.counts.documents, len(report.shards)) == (40, 2)
    with open_corpus(tmp_path / "stream") as stream:
        assert [stream.documents[k].ids.tolist() for k in range(40)] == DOCUMENTS
        assert (stream.dtype, stream.meta.vocab_size) == (np.uint16, 20)
        positions = stream.field("positions").tokens[0 : stream.num_tokens]
        assert positions.tolist() == [k for each in DOCUMENTS for k in range(len(each))]


def test_documents_of_a_row_become_rows(folder, tmp_path):
    files = sorted(folder.iterdir())
    how = {"batch_size": 2, "seq_len": 8, "packing": "best-fit", "val_fraction": 0.2, "workers": 1}
    report = convert(files, "hdf5", tmp_path / "store", **how)
    assert report.counts.documents == 40
    assert {*report.batches_of_split} == {"train", "val"}
    with open_reader(tmp_path / "store") as reader:
        assert [field.name for field in reader.meta.fields] == ["positions"]


def test_options_that_a_row_does_not_name_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "lines", replace(lines_format.ROW, options=()))
    is_refused(
        ArgumentError, lambda: convert(folder, "stream", tmp_path / "out", vocab_size=20),
        match=r"vocab_size belongs to npy, .*, found \.lines files of ids",
    )  # fmt: skip
    is_refused(
        ArgumentError, lambda: convert(folder, "stream", tmp_path / "out", tokenizer="byte"),
        match="tokenizer belongs to parquet, jsonl, text",
    )  # fmt: skip


def test_other_content_is_asked_for_by_name_or_not_found(folder, tmp_path):
    (folder / "0.lines").write_text("no ids")
    is_refused(FormatError, lambda: convert(folder, "stream", tmp_path / "out"), match="no shards.json")
    again = lambda: convert(folder, "stream", tmp_path / "out", source_format="lines", vocab_size=20)  # noqa: E731
    is_refused(FormatError, again, match=r"0\.lines: expected ids on lines")


def test_the_tables_name_every_source_and_target():
    kinds = sources()
    assert {"lines", "megatron", "datatrove", "bin", "olmo"} <= kinds.keys()
    assert {"hdf5", "batch", "npy", "stream"} <= {*target_names()}
    assert "vocab_size" in kinds["lines"].options_of("stream")
    assert not {"text_column", "tokenizer"} & {*kinds["megatron"].options_of("hdf5")}


class OneClass(lines_format.Lines):
    """A format that reads rows and writes the same ids to one file of another trainer."""

    written = 0

    def write(self, path, meta, **options):
        type(self).written += 1
        return super().write(path, meta, **options)


def test_one_class_recognises_reads_rows_and_writes(tmp_path, monkeypatch):
    row = replace(lines_format.ROW, place=f"{__name__}:OneClass", writer="zb_hdf5.trainers.bin:BinWriter")
    monkeypatch.setitem(FORMATS, "lines", row)
    (tmp_path / "a.lines").write_text("1 2 3\n4 5\n")
    with Look(tmp_path / "a.lines") as look:
        assert load_format(row).recognise(look).layout == NOT_IN_PLACE
    convert(tmp_path / "a.lines", "lines", tmp_path / "b.lines", workers=1, tokens_only=True)
    assert OneClass.written == 1
    assert np.fromfile(tmp_path / "b.lines", "<u4").tolist() == [1, 2, 3, 4, 5]
