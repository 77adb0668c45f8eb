"""Data sets of Hugging Face: rows of ids become documents or records, whatever holds them, and nothing is believed."""

import gzip
import json
import pickle
import shutil
import struct

import numpy as np
import pytest
from contract import is_refused
from id_documents import GOLDEN, documents_of, labels_of, loss_mask_of, truth_of
from interpreter import run_program
from interrupted import Failing, Stops
from reading import fits

from zb_hdf5 import (
    ArgumentError,
    ConvertError,
    DocumentLoader,
    FormatError,
    IncompleteError,
    convert,
    open_corpus,
    open_reader,
)
from zb_hdf5.errors import NotFoundError
from zb_hdf5.formats import id_source
from zb_hdf5.trainers import id_tables
from zb_hdf5.trainers.hf import open_hf

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

HF = GOLDEN / "hf"
ROWS = [[1, 2, 3], [4], [], [5, 6, 7, 8], [9], [10, 11]]
LABELS = [[token - 101 for token in row] for row in ROWS]


def table_of(rows=ROWS, kind=None, **columns):
    """Return a table with a list of ids in each row, and more columns."""
    kind = kind or pa.list_(pa.int32())
    return pa.table({"input_ids": pa.array(rows, kind), **columns})


def write(path, table, row_group_size=2):
    """Write a table as the name of a path says: parquet, stream or file of Arrow, or JSON lines."""
    kind = path.name.partition(".")[2]
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=row_group_size)
    elif kind == "stream.arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, row_group_size)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_table(table, row_group_size)
    else:
        data = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    return path


KINDS = ("a.parquet", "a.arrow", "a.stream.arrow", "a.jsonl", "a.jsonl.gz")


@pytest.fixture(params=KINDS)
def path(request, tmp_path):
    """A path of each kind of file."""
    return tmp_path / request.param


@pytest.mark.parametrize("name", ["saved", "corpus.parquet"])
def test_golden_data_sets_are_read_as_they_were_written(name):
    found = documents_of(open_hf([HF / name], id_column="url"))
    sha256, lengths = truth_of(HF)
    assert found.sha256 == sha256
    assert [len(each) for each in found.tokens] == lengths
    assert found.fields == {
        "attention_mask": [[1] * length for length in lengths],
        "labels": labels_of(found.tokens),
        "loss_mask": loss_mask_of(found.tokens),
    }
    assert found.ids == [f"https://example.org/{number}".encode() for number in range(60)]


def test_golden_json_lines_are_the_first_rows():
    first = documents_of(open_hf([HF / "corpus.jsonl"]))
    expected = documents_of(open_hf([HF / "saved"], field_columns=["labels"]))
    assert (first.tokens, first.fields["labels"]) == (expected.tokens[:10], expected.fields["labels"][:10])


def test_every_kind_of_file_has_the_same_documents(path, monkeypatch):
    columns = {"labels": pa.array(LABELS, pa.list_(pa.int64())), "weights": [[0.5] * len(row) for row in ROWS]}
    more = {"name": [f"n{k}" for k in range(6)], "size": range(6), "url": ["x"] * 6}
    write(path, table_of(**columns, **more))
    monkeypatch.setattr(id_tables, "ARROW_GROUP_BYTES", 20)
    monkeypatch.setattr(id_source, "MAX_BLOCK_ROWS", 2)
    how = {"id_column": "name", "metadata_columns": ["url", "size"]}
    source = open_hf([path], **how)
    assert [(field.name, field.dtype) for field in source.fields] == [("labels", np.int32), ("weights", np.float64)]
    found = documents_of(pickle.loads(pickle.dumps(source)))
    assert (found.tokens, found.fields["labels"], found.rows) == (ROWS, LABELS, [*range(1, 7)])
    assert found.fields["weights"] == columns["weights"]
    assert found.ids == [name.encode() for name in more["name"]]
    assert found.metadata == [{"url": "x", "size": k} for k in range(6)]
    assert {group.file_number for group in source.groups} == {0}
    assert (len(source.groups) > 1) == ("jsonl" not in path.name)
    backwards = [documents_of(source, [group]) for group in reversed(source.groups)]
    assert [row for part in reversed(backwards) for row in part.rows] == found.rows
    chosen = documents_of(source, choose=lambda count: np.arange(count) % 2 == 0)
    assert all(row in ROWS for row in chosen.tokens)
    assert [ROWS[row - 1] for row in chosen.rows] == chosen.tokens
    assert [LABELS[row - 1] for row in chosen.rows] == chosen.fields["labels"]
    assert chosen.ids == [f"n{row - 1}".encode() for row in chosen.rows]


#: The ids of a column of lists, and their stored dtype.
STORED = {"uint16": np.uint16, "uint8": np.uint8, "int64": np.uint32}


@pytest.mark.parametrize("kind", [pa.large_list(pa.uint16()), pa.list_(pa.int64()), pa.list_(pa.uint8(), 2)], ids=str)
@pytest.mark.parametrize("name", KINDS[:3])
def test_lists_of_any_width_are_ids(kind, name, tmp_path):
    rows = [[1, 2], [3, 4], [5, 250]]
    write(tmp_path / name, table_of(rows, kind), row_group_size=3)
    source = open_hf([tmp_path / name])
    assert documents_of(source).tokens == rows
    assert source.dtype == next(dtype for name, dtype in STORED.items() if name in str(kind))
    assert open_hf([tmp_path / name], vocab_size=300).dtype == (np.uint8 if "uint8" in str(kind) else np.uint16)
    assert open_hf([tmp_path / name], vocab_size=256).dtype == np.uint8
    assert open_hf([tmp_path / name], dtype="uint32").dtype == np.uint32


def test_blocks_and_groups_are_small(tmp_path, monkeypatch):
    monkeypatch.setattr(id_tables, "BLOCK_OF_IDS", 50)
    monkeypatch.setattr(id_source, "BLOCK_OF_IDS", 50)
    rows = [[k] * 10 for k in range(100)]
    for name in KINDS:
        source = open_hf([write(tmp_path / name, table_of(rows), row_group_size=40)])
        blocks = [encoded for group in source.groups for encoded in source.read(group, None, 1)]
        assert {len(each.tokens) for each in blocks} == {50}
        assert sum(group.num_bytes for group in source.groups) > 0


def test_labels_and_masks_are_fields_and_document_ids_are_left_out(path):
    numbers = [list(range(len(row))) for row in ROWS]
    bools = pa.array([[True] * len(row) for row in ROWS], pa.list_(pa.bool_()))
    words = [["a"] * len(row) for row in ROWS]
    write(path, table_of(document_ids=numbers, position_ids=numbers, mask=bools, words=words, **{"a b": numbers}))
    with pytest.warns(UserWarning, match="column '(document_ids|a b)' is left out: expected a name") as warned:
        source = open_hf([path])
    assert len(warned) == 2
    assert [field.name for field in source.fields] == ["mask", "position_ids"]
    assert documents_of(source).fields["mask"] == bools.to_pylist()
    assert open_hf([path], field_columns=[]).fields == ()
    is_refused(ArgumentError, lambda: open_hf([path], field_columns=["document_ids"]), match="found 'document_ids'")
    is_refused(
        ConvertError, lambda: open_hf([path], field_columns=["words"]), match="expected lists of numbers, found l"
    )


def test_another_column_of_ids_is_named(path):
    write(path, table_of(tokens=[[*row, 7] for row in ROWS]).rename_columns(["ids", "tokens"]))
    assert documents_of(open_hf([path], field_columns=[])).tokens == [[*row, 7] for row in ROWS]
    assert documents_of(open_hf([path], ids_column="ids", field_columns=[])).tokens == ROWS


def test_long_documents_are_cut_with_their_fields(path):
    write(path, table_of(labels=LABELS))
    source = open_hf([path], max_document_tokens=2)
    found = documents_of(source)
    assert (found.tokens, found.fields["labels"]) == ([row[:2] for row in ROWS], [row[:2] for row in LABELS])
    assert sum(encoded.cut for group in source.groups for encoded in source.read(group, None, 1)) == 3


# --- records -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
def test_records_stay_whole_and_are_shuffled(packing, tmp_path):
    source = HF / "records.parquet"
    rows = documents_of(open_hf([source])).tokens
    how = {"batch_size": 5, "vocab_size": 50_257, "workers": 1, "source_format": "hf", "rows": "records"}
    report = convert(source, "hdf5", tmp_path / "out", **how, val_fraction=0.3, packing=packing)
    assert (report.meta.seq_len, report.counts.documents, report.meta.dtype) == (64, 53, np.uint16)
    stored = []
    for split in ("train", "val"):
        with open_reader(tmp_path / "out", split=split) as reader:
            found = np.concatenate([reader.read_batch(k) for k in range(reader.num_batches)]).tolist()
        stored += [row for row in found if any(row)]
    assert sorted(stored) == sorted(rows)
    assert stored != rows
    with pytest.raises(ArgumentError, match=r"records\.parquet: seq_len must be 64, the ids of each record, found 32"):
        convert(source, "hdf5", tmp_path / "other", **how, seq_len=32)


def test_rows_of_several_lengths_are_no_records(path):
    write(path, table_of([[1, 2], [3, 4], [5]]))
    source = open_hf([path], rows="records")
    is_refused(
        ConvertError, lambda: documents_of(source),
        match=r"(row|line) 3 of .*: expected a record of 2 ids, as the first row has, found 1; rows of several lengths",
    )  # fmt: skip
    write(path, table_of([[], []]))
    is_refused(ConvertError, lambda: open_hf([path], rows="records"), match="a record is empty|found no values")
    write(path, table_of([]))
    is_refused(ConvertError, lambda: open_hf([path], rows="records"), match="expected (records|a column)")


# --- what is refused ---------------------------------------------------------------------------------------------

INT = pa.list_(pa.int32())


@pytest.mark.parametrize(("table", "message"), [
    (lambda: table_of([[1.5]], pa.list_(pa.float32())), "'input_ids': expected lists of ids, found lists of float"),
    (lambda: table_of(["a", "b"], pa.string()), "'input_ids': expected lists of ids, found str"),
    (lambda: pa.table({"x": [1]}), "'token_ids' or 'ids' of lists of ids, found the columns x; name it"),
    (lambda: table_of([[[1]], [[2]]], pa.list_(INT)), "'input_ids': expected lists of ids, found list"),
], ids=["floats", "text", "none", "nested"])  # fmt: skip
def test_columns_that_are_no_ids_are_refused(table, message, path):
    write(path, table())
    is_refused(ConvertError, lambda: open_hf([path]), match=message)


@pytest.mark.parametrize(("rows", "columns", "message"), [
    ([[1], None, [3]], {}, r"column 'input_ids': expected a list( of ids)?, found null"),
    ([[1], [2, None]], {}, r"column 'input_ids': expected (numbers|a list of ids), found (null|\[2, null\])"),
    ([[1], [2, 3]], {"labels": [[1], [2]]}, "column 'labels': expected 2 values, as 'input_ids' has, found 1; name"),
    ([[1], [2]], {"labels": [[1], [2**40]]}, "field labels: 1099511627776 does not fit int32"),
], ids=["null", "null inside", "ragged", "too large"])  # fmt: skip
def test_rows_that_are_no_documents_are_named(rows, columns, message, path):
    write(path, table_of(rows, **columns))
    source = open_hf([path])
    is_refused(ConvertError, lambda: documents_of(source), match=rf"(row|line) 2 of \S*: {message}")


def test_negative_ids_are_named(path, tmp_path):
    write(path, table_of([[1], [2, -100]]))
    is_refused(
        ConvertError, lambda: convert(open_hf([path]), "stream", tmp_path / "out", workers=1),
        match=r"token id -100 at the document of (row|line) 2 of a",
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("line", "message"), [
    ('{"input_ids": [1', "expected a JSON object: "),
    ("[1]", r"expected a JSON object, found b'\[1\]'"),
    ('{"input_ids": [1, 2.5]}', r"column 'input_ids': expected a list of ids, found \[1, 2.5\]"),
    ('{"input_ids": [[1], [2, 3]]}', r"column 'input_ids': expected a list of ids, found \[\[1\], "),
    ('{"input_ids": ["a"]}', r"column 'input_ids': expected a list of ids, found \[\"a\"\]"),
    ('{"input_ids": [18446744073709551616]}', "column 'input_ids': expected a list of ids"),
    ('{"input_ids": 7}', "column 'input_ids': expected a list of ids, found 7"),
    ('{"input_ids": [1]}', "column 'm': expected a list of numbers, found no such key"),
])  # fmt: skip
def test_lines_that_are_no_rows_are_named(line, message, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1], "m": [1]}\n' + line)
    source = open_hf([tmp_path / "a.jsonl"])
    is_refused((ConvertError, FormatError), lambda: documents_of(source), match=rf"line 2 of \S*: {message}")


def test_blank_lines_are_no_rows_and_count(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"input_ids": [1]}\n\n\n{"input_ids": [2]}\n\n')
    found = documents_of(open_hf([tmp_path / "a.jsonl"]))
    assert (found.tokens, found.rows) == ([[1], [2]], [2, 5])


def test_metadata_that_json_lacks_is_refused(tmp_path):
    write(tmp_path / "a.parquet", table_of(blob=[b"x"] * 6, when=pa.array([None] * 6, pa.timestamp("ns"))))
    how = {"metadata_columns": ["blob"]}
    is_refused(ConvertError, lambda: open_hf([tmp_path / "a.parquet"], **how), match="column 'blob': expected values")
    for how in ({"ids_column": "x"}, {"id_column": "x"}, {"field_columns": ["x"]}):
        with pytest.raises(ConvertError, match="expected a column 'x', found the columns input_ids, blob, when"):
            open_hf([tmp_path / "a.parquet"], **how)


def test_files_with_other_fields_are_refused(tmp_path):
    one = write(tmp_path / "one.parquet", table_of(labels=LABELS))
    two = write(tmp_path / "two.parquet", table_of(labels=pa.array(LABELS, pa.list_(pa.int16()))))
    is_refused(
        ConvertError, lambda: open_hf([tmp_path]),
        match=r"two\.parquet: expected the fields of one\.parquet, labels \(int32\), found labels \(int16\)",
    )  # fmt: skip
    assert len(open_hf([one, two], field_columns=[]).groups) == 6
    is_refused(ConvertError, lambda: open_hf([one, one]), match="is named 2 times")


# --- damaged files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_was_cut_short_is_refused_wherever_it_ends(name, tmp_path):
    path = write(tmp_path / name, table_of([[*range(100)]] * 20), row_group_size=5)
    data = path.read_bytes()
    for end in (len(data) - 2, len(data) - 8, len(data) // 2 - 3, len(data) // 3, 9, 0):
        path.write_bytes(data[:end])
        is_refused((FormatError, ConvertError), lambda: documents_of(open_hf([path])), match=name)
    path.write_bytes(data)
    assert len(documents_of(open_hf([path])).tokens) == 20


def test_offsets_outside_of_the_values_are_not_followed(tmp_path):
    path = write(tmp_path / "a.stream.arrow", table_of([[111, 222], [333]]))
    data = path.read_bytes()
    place = data.index(struct.pack("<iii", 0, 2, 3))
    for offsets in ((0, 2, 1 << 28), (0, 1 << 30, 3), (-5, 2, 3)):
        path.write_bytes(data[:place] + struct.pack("<iii", *offsets) + data[place + 12 :])
        is_refused(
            FormatError, lambda: documents_of(open_hf([path])), match=r"a\.stream\.arrow: not a file of Arrow, or a"
        )


def test_two_streams_in_one_file_are_refused(tmp_path):
    path = write(tmp_path / "a.stream.arrow", table_of())
    path.write_bytes(path.read_bytes() * 2)
    is_refused(FormatError, lambda: open_hf([path]), match="expected one Arrow stream of [0-9,]+ bytes, found")


def test_columns_of_one_name_are_refused(tmp_path):
    path = write(tmp_path / "a.arrow", table_of(x=[1] * 6).rename_columns(["input_ids", "input_ids"]))
    is_refused(FormatError, lambda: open_hf([path]), match="expected each column once, found input_ids, input_ids")


# --- folders -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A copy of a folder of `save_to_disk`."""
    return shutil.copytree(HF / "saved", tmp_path / "saved")


def test_a_saved_folder_has_the_files_of_its_state_alone(saved):
    shutil.copy(saved / "data-00000-of-00002.arrow", saved / "cache-1234.arrow")
    assert documents_of(open_hf([saved])).sha256 == truth_of(HF)[0]
    (saved / "data-00001-of-00002.arrow").unlink()
    is_refused(
        IncompleteError, lambda: open_hf([saved]), match="data-00001-of-00002.arrow: expected a file, as state.json"
    )


@pytest.mark.parametrize(("state", "error", "message"), [
    ("{", FormatError, "state.json: expected JSON"),
    ("[]", FormatError, "state.json: expected a JSON object, found list"),
    ("{}", FormatError, "state.json: expected the names of files beside it, found "),
    ('{"_data_files": [{"filename": "../secret.arrow"}]}', FormatError, "expected the names of files beside it"),
    ('{"_data_files": [7]}', FormatError, "expected the names of files beside it"),
    ('{"_indices_data_files": [{"filename": "indices.arrow"}]}', ConvertError, "found a table of their numbers"),
])  # fmt: skip
def test_a_state_that_lies_is_refused(state, error, message, saved):
    (saved / "state.json").write_text(state)
    is_refused(error, lambda: open_hf([saved]), match=message)


def test_a_folder_of_several_data_sets_names_them(saved, tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "more"]}')
    is_refused(ConvertError, lambda: open_hf([tmp_path]), match="has the splits train, more: name the folder of one")
    (tmp_path / "dataset_dict.json").unlink()
    is_refused(
        ConvertError,
        lambda: open_hf([tmp_path]),
        match=r"has several data sets: name the folder of one: convert.*saved",
    )
    (saved / "state.json").unlink()
    is_refused(ConvertError, lambda: open_hf([saved]), match="expected state.json beside dataset_info.json")
    (saved / "dataset_info.json").unlink()
    write(tmp_path / "saved" / "x.parquet", table_of())
    is_refused(
        ConvertError, lambda: open_hf([tmp_path]), match="expected files of one kind, found x.parquet and data-0"
    )
    (tmp_path / "empty").mkdir()
    is_refused(ConvertError, lambda: open_hf([tmp_path / "empty"]), match="expected files that end in .parquet, .arrow")
    is_refused(NotFoundError, lambda: open_hf([tmp_path / "none"]))
    (tmp_path / "x.bin").write_bytes(b"whatever")
    is_refused(FormatError, lambda: open_hf([tmp_path / "x.bin"]), match="expected Parquet, Arrow, or the name of JSON")


def test_files_of_a_folder_follow_each_other_by_name(tmp_path):
    for name, rows in (("b", [[3]]), ("a", [[1], [2]])):
        write(tmp_path / f"{name}.jsonl", table_of(rows))
    source = open_hf([tmp_path])
    assert documents_of(source).tokens == [[1], [2], [3]]
    assert [group.file_number for group in source.groups] == [0, 1]


@pytest.mark.parametrize(("table", "expected"), [
    (lambda: table_of(), True),
    (lambda: table_of(text=["x"] * 6), False),
    (lambda: table_of(["x"], pa.string()), False),
    (lambda: pa.table({"content": ["x"]}), False),
])  # fmt: skip
def test_ids_are_told_from_text_by_the_columns(table, expected, path):
    write(path, table())
    assert fits("hf", path) == fits("hf", path.parent) == expected


# --- conversions -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_documents_fields_and_ids_are_kept_by_any_number_of_workers(tmp_path):
    for workers in (1, 2):
        out = tmp_path / str(workers)
        convert(HF / "saved", "stream", out, id_column="url", vocab_size=50_257, workers=workers)
    assert (tmp_path / "1" / "shards.json").read_bytes() == (tmp_path / "2" / "shards.json").read_bytes()
    with open_corpus(tmp_path / "1") as stream:
        documents = [stream.documents[k].ids.tolist() for k in range(60)]
        labels = stream.field("labels").tokens[0 : stream.num_tokens].tolist()
        place = stream.documents[40]
        assert (stream.dtype, stream.meta.vocab_size) == (np.uint16, 50_257)
    assert labels == [label for each in labels_of(documents) for label in each]
    assert (place.id, place.source) == ("https://example.org/40", str(HF / "saved" / "data-00001-of-00002.arrow"))


def test_rows_know_their_labels_and_padding_has_none(tmp_path):
    how = {"seq_len": 700, "batch_size": 2, "packing": "pad", "field_columns": ("labels", "loss_mask"), "workers": 1}
    report = convert(HF / "corpus.parquet", "hdf5", tmp_path / "out", **how)
    assert report.counts.padded > 0
    assert report.to_json()["uint16_would_save_bytes"] == 2 * report.tokens_stored
    with open_reader(tmp_path / "out") as reader:
        assert [field.name for field in reader.meta.fields] == ["labels", "loss_mask"]
        for number in range(reader.num_batches):
            tokens = reader.read_batch(number).astype(np.int64)
            labels = reader.field("labels").read_batch(number)
            mask = reader.field("loss_mask").read_batch(number)
            np.testing.assert_array_equal(labels, np.where(mask == 1, tokens, -100))


def test_a_conversion_is_resumed_and_holds_out(tmp_path):
    path = write(tmp_path / "a.parquet", table_of([[k] * 5 for k in range(40)]), row_group_size=4)
    how = {"source_format": "hf", "shards": 5, "val_fraction": 0.25}
    is_refused(Stops, lambda: convert(path, "stream", tmp_path / "out", engine=Failing(2), **how))
    report = convert(path, "stream", tmp_path / "out", resume=True, workers=1, **how)
    assert (report.kept.shards, report.counts.documents) == (2, 40)
    with open_corpus(tmp_path / "out", split="val") as held:
        assert 0 < held.document_count < 20


def test_a_tokenizer_asks_for_text_and_a_missing_text_names_the_ids(tmp_path):
    path = write(tmp_path / "a.parquet", table_of(words=["some text"] * 6))
    convert(path, "stream", tmp_path / "text", tokenizer="byte", text_column="words", workers=1)
    for source_format in ("auto", "parquet"):
        with pytest.raises(ConvertError, match="its column input_ids has ids: pass source_format='hf'"):
            convert(path, "stream", tmp_path / "out", tokenizer="byte", source_format=source_format)
    write(tmp_path / "a.jsonl", table_of())
    with pytest.raises(ConvertError, match="its column input_ids has ids: pass source_format='hf'"):
        convert(tmp_path / "a.jsonl", "stream", tmp_path / "out", tokenizer="byte")


@pytest.mark.parametrize("name", ["labels", "loss_mask"])
@pytest.mark.parametrize("kind", ["numbers of rows", "lists of lists", "lists of bytes"])
def test_a_column_of_targets_that_is_no_field_is_refused(name, kind, tmp_path):
    values = {
        "numbers of rows": pa.array(range(len(ROWS))),
        "lists of lists": pa.array([[[label] for label in row] for row in LABELS], pa.list_(pa.list_(pa.int64()))),
        "lists of bytes": pa.array([[b"1"] * len(row) for row in ROWS], pa.list_(pa.binary())),
    }[kind]
    path = write(tmp_path / "a.parquet", table_of(**{name: values}))
    how = {"source_format": "hf", "workers": 1, "vocab_size": 100}
    is_refused(
        ConvertError,
        lambda: convert(path, "stream", tmp_path / "s", **how),
        match=f"column '{name}': expected lists of one number for each id, found .*name the columns of values",
    )
    convert(path, "stream", tmp_path / "s", field_columns=(), **how)
    with open_corpus(tmp_path / "s") as stream:
        assert stream.tokens[0 : stream.num_tokens].tolist() == [token for row in ROWS for token in row]


def test_labels_of_doubles_train(tmp_path):
    labels = [[-100.0 if place < 1 else float(token) for place, token in enumerate(row)] for row in ROWS]
    path = write(tmp_path / "a.parquet", table_of(labels=labels))
    convert(path, "stream", tmp_path / "s", source_format="hf", workers=1, vocab_size=100)
    how = {"collate": "pack", "max_tokens": 100, "targets": True, "shuffle": "sequential", "rank": 0, "world_size": 1}
    with DocumentLoader(tmp_path / "s", **how) as loader:
        found = next(iter(loader))["targets"].tolist()
    assert found == [2, 3, -100, -100, 6, 7, 8, -100, -100, 11, -100]


def test_pandas_is_not_imported(tmp_path):
    """It takes a third of a second, and pyarrow 17 fails without it where it is asked for its dtypes."""
    table = table_of(loss_mask=[[True] * len(row) for row in ROWS])
    parquet.write_table(table, tmp_path / "a.parquet")
    program = """
import sys
from zb_hdf5 import convert, open_corpus
convert("a.parquet", "stream", "stream", workers=1)
with open_corpus("stream") as stream:
    print(stream.tokens[0:11].tolist(), [field.dtype.name for field in stream.fields], "pandas" in sys.modules)
"""
    done = run_program(program, folder=tmp_path)
    assert (done.stdout, done.stderr) == (f"{[*range(1, 12)]} ['bool'] False\n", "")
