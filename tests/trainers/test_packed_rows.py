"""Packed rows of TRL and axolotl become the documents that their columns tell apart."""

import gzip
import json
from itertools import chain, pairwise

import h5py
import numpy as np
import pyarrow as pa
import pytest
from commandline import run_zb
from contract import is_refused
from mds_folder import array_of, write
from pyarrow import ipc, parquet

from zb_hdf5 import DocumentLoader, Loader, MixedLoader, ReadAs, convert, errors, open_corpus, open_reader
from zb_hdf5.formats import row_documents
from zb_hdf5.formats.row_documents import RowDocuments
from zb_hdf5.store import store_documents

#: The lengths of the documents of each row.
ROWS = [[5, 3, 1], [9], [1, 8], [2, 2, 2, 3], [], [4]]
LENGTHS = [each for row in ROWS for each in row] or [0]
IDS = [list(range(10 * row + 1, 10 * row + 1 + sum(lengths))) for row, lengths in enumerate(ROWS)]
ALL_IDS = [*chain(*IDS)]


def positions_of(lengths):
    return [place for length in lengths for place in range(length)]


def numbers_of(lengths):
    return [number for number, length in enumerate(lengths, 1) for _ in range(length)]


COLUMNS = {
    "seq_lengths": ROWS,
    "position_ids": [positions_of(row) for row in ROWS],
    "attention_mask": [numbers_of(row) for row in ROWS],
}


def table_of(column, **more):
    lists = pa.list_(pa.int32())
    columns = {"input_ids": pa.array(IDS, lists), column: pa.array(COLUMNS[column], lists)}
    return pa.table({**columns, **{name: pa.array(values) for name, values in more.items()}})


def to_parquet(path, table):
    parquet.write_table(table, path, row_group_size=2)


def to_arrow(path, table):
    with ipc.new_stream(path, table.schema) as file:
        for batch in table.to_batches(2):
            file.write_batch(batch)


def to_jsonl(path, table):
    text = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def to_ragged(path, table):
    with h5py.File(path, "w") as h5:
        for name in table.column_names:
            stored = h5.create_dataset(name, (len(IDS),), h5py.vlen_dtype("i4"))
            for row, values in enumerate(table[name].to_pylist()):
                stored[row] = values


def to_mds(path, table):
    columns = [[array_of(np.array(row, np.int32)) for row in column.to_pylist()] for column in table.columns]
    write(path, zip(*columns, strict=True), dict.fromkeys(table.column_names, "ndarray"))


WRITERS = {
    "a.parquet": to_parquet, "a.arrow": to_arrow, "a.jsonl": to_jsonl, "a.jsonl.gz": to_jsonl, "a.h5": to_ragged,
    "mds": to_mds,
}  # fmt: skip


def lengths_of(path):
    with open_corpus(path) as stream:
        return np.diff(stream.doc_offsets).tolist(), stream.tokens[0 : stream.num_tokens].tolist()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("column", COLUMNS)
def test_each_row_becomes_its_documents(name, column, tmp_path, capfd):
    WRITERS[name](tmp_path / name, table_of(column))
    report = convert(tmp_path / name, "stream", tmp_path / "out")
    found, ids = lengths_of(tmp_path / "out")
    assert ids == ALL_IDS
    assert [length for length in found if length] == LENGTHS
    assert report.to_json()["documents"] == len(found)
    assert f"its rows are packed: column '{column}' tells their documents apart" in capfd.readouterr().err


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.thin
def test_the_batches_have_the_boundaries_of_the_file(column, tmp_path):
    to_parquet(tmp_path / "a.parquet", table_of(column))
    convert(tmp_path / "a.parquet", "stream", tmp_path / "out")
    total = sum(LENGTHS)
    with Loader(tmp_path / "out", batch_size=1, seq_len=total, documents=True, shuffle="sequential") as loader:
        assert next(loader)["cu_seqlens"].tolist() == [0, *np.cumsum(LENGTHS).tolist()]


def test_a_document_has_the_row_the_id_and_the_metadata_of_its_row(tmp_path):
    to_parquet(tmp_path / "a.parquet", table_of("seq_lengths", name=list("abcdef")))
    convert(tmp_path / "a.parquet", "stream", tmp_path / "out", id_column="name", metadata_columns=("name",))
    with open_corpus(tmp_path / "out") as stream:
        rows = [stream.documents[number] for number in range(4)]
    assert [row.row for row in rows] == [1, 1, 1, 2]
    assert [row.id for row in rows] == ["a", "a/1", "a/2", "b"]
    assert [row.metadata["name"] for row in rows] == ["a", "a", "a", "b"]


def test_positions_stay_a_field_and_may_be_left_out_of_the_fields(tmp_path):
    to_parquet(tmp_path / "a.parquet", table_of("position_ids"))
    convert(tmp_path / "a.parquet", "stream", tmp_path / "kept")
    convert(tmp_path / "a.parquet", "stream", tmp_path / "bare", field_columns=())
    assert lengths_of(tmp_path / "kept") == lengths_of(tmp_path / "bare")
    with open_corpus(tmp_path / "kept") as stream:
        found = stream.field("position_ids").tokens[0 : len(ALL_IDS)].tolist()
    assert found == [*chain(*COLUMNS["position_ids"])]
    with open_corpus(tmp_path / "bare") as stream:
        assert not stream.fields


def test_records_stay_rows(tmp_path, capfd):
    table = pa.table({"input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]], "position_ids": [[0, 1, 0, 1], [0, 0, 1, 2]]})
    to_parquet(tmp_path / "a.parquet", table)
    convert(tmp_path / "a.parquet", "hdf5", tmp_path / "out", rows="records", batch_size=1, shuffle=False)
    with Loader(tmp_path / "out", shuffle="sequential") as loader:
        assert [batch.tolist() for batch in loader] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
    assert "tells their documents apart, which are left out: rows are records" in capfd.readouterr().err


def test_lengths_that_do_not_fit_name_the_row(tmp_path):
    table = pa.table({"input_ids": [[1, 2, 3], [4, 5]], "seq_lengths": [[1, 2], [1, 2]]})
    to_parquet(tmp_path / "a.parquet", table)
    is_refused(
        errors.ConvertError, lambda: convert(tmp_path / "a.parquet", "stream", tmp_path / "out"),
        match=r"row 2 of .*a\.parquet: column 'seq_lengths': expected lengths of 2 ids together, found 3",
    )  # fmt: skip


def test_a_negative_length_is_named(tmp_path):
    to_parquet(tmp_path / "a.parquet", pa.table({"input_ids": [[1], [1, 2, 3]], "seq_lengths": [[1], [4, -1]]}))
    is_refused(
        errors.ConvertError, lambda: convert(tmp_path / "a.parquet", "stream", tmp_path / "out"),
        match="column 'seq_lengths': expected lengths of at least 0, found -1",
    )  # fmt: skip


def documents_of(name, values):
    """Return the lengths of the documents of one row: a slow reference."""
    if name == "attention_mask":
        if max(values, default=0) < 2:
            return [len(values)]
        edges = [0, *(place for place in range(1, len(values)) if values[place] != values[place - 1])]
    else:
        end = len(values)
        while end > 1 and values[end - 1] == 0 and values[end - 2] == 0:
            end -= 1
        edges = [place for place in range(end) if not place or values[place] <= values[place - 1]]
    return np.diff([*edges, len(values)]).tolist() if values else [0]


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_documents_are_those_of_a_slow_reference(name):
    random = np.random.default_rng(5)
    for _ in range(300):
        rows = []
        for _ in range(random.integers(0, 6)):
            lengths = random.integers(1, 5, random.integers(0, 4)).tolist()
            values = positions_of(lengths) if name == "position_ids" else numbers_of(lengths)
            rows.append(values + [0] * int(random.integers(0, 4)))
        lengths = np.array([len(row) for row in rows], np.int64)
        values = np.array([*chain(*rows)], random.choice(["u1", "i4", "i8"]))
        found = RowDocuments.of(name, values, lengths, lengths)
        expected = [(length, number) for number, row in enumerate(rows) for length in documents_of(name, row)]
        assert list(zip(found.lengths.tolist(), found.rows.tolist(), strict=True)) == expected


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_a_mask_of_padding_divides_no_row(mask, tmp_path, capfd):
    to_parquet(tmp_path / "a.parquet", pa.table({"input_ids": [[1, 2, 3, 4]], "attention_mask": [mask]}))
    convert(tmp_path / "a.parquet", "stream", tmp_path / "out")
    assert lengths_of(tmp_path / "out") == ([4], [1, 2, 3, 4])
    assert "packed" not in capfd.readouterr().err


# --- records of HDF5, in place and converted -------------------------------------------------------------------------
#: The lengths of the documents of each record of 12 ids.
RECORDS = [[5, 3, 4], [12], [1, 8, 3], [2, 2, 2, 6], [11, 1], [6, 6], [4, 4, 4], [1, 1, 1, 9]]
RECORD_IDS = np.arange(8 * 12, dtype=np.uint16).reshape(8, 12)
TOLD_BY = {
    "position_ids": np.array([positions_of(row) for row in RECORDS], np.int64),
    "attention_mask": np.array([numbers_of(row) for row in RECORDS], np.uint8),
}
ONE_RANK = {"rank": 0, "world_size": 1}
DOCUMENT_NAMES = ("cu_seqlens", "document_ids", "documents")


def write_records(path, column, axes=2):
    shape = (8, 12) if axes == 2 else (4, 2, 12)
    with h5py.File(path, "w") as h5:
        h5["input_ids"] = RECORD_IDS.reshape(shape)
        h5[column] = TOLD_BY[column].reshape(shape)
    return path


def documents_in(batch):
    """Return the ids of each document of a batch."""
    edges = batch["cu_seqlens"].tolist()
    ids = batch["tokens"].reshape(-1).tolist()
    return [tuple(ids[start:stop]) for start, stop in pairwise(edges)]


def expected_documents(parts=1):
    found = []
    for ids, lengths in zip(RECORD_IDS.tolist(), RECORDS, strict=True):
        edges = {*np.cumsum([0, *lengths]).tolist(), *range(0, 13, 12 // parts)}
        found += [tuple(ids[start:stop]) for start, stop in pairwise(sorted(edges))]
    return sorted(found)


@pytest.mark.parametrize("column", TOLD_BY)
@pytest.mark.parametrize("shuffle", ["sequential", "global", "records", ("block", 2)])
@pytest.mark.parametrize("seq_len", [None, 6])
def test_records_of_hdf5_have_their_documents_in_place_in_each_order(column, shuffle, seq_len, tmp_path):
    path = write_records(tmp_path / "a.h5", column)
    options = {"batch_size": 2, "seq_len": seq_len, "documents": True, "shuffle": shuffle, **ONE_RANK}
    with Loader(path, **options) as loader:
        found = [document for batch in loader for document in documents_in(batch)]
        single = [document for step in range(len(loader)) for document in documents_in(loader.dataset()[step])]
    assert sorted(found) == sorted(single) == expected_documents(12 // (seq_len or 12))


@pytest.mark.parametrize("column", TOLD_BY)
def test_files_batches_stores_and_mixtures_have_the_same_documents(column, tmp_path):
    (tmp_path / "folder").mkdir()
    write_records(tmp_path / "folder" / "a.h5", column)
    batches = write_records(tmp_path / "b.h5", column, axes=3)
    store = tmp_path / "store"
    convert(tmp_path / "folder" / "a.h5", "hdf5", store, batch_size=2, shards=2, workers=1)
    how = {"documents": True, **ONE_RANK}
    for path, options in ((tmp_path / "folder", {"batch_size": 4}), (store, {}), (batches, {})):
        given = {"axes": "batch,record,token"} if path == batches else {}
        with Loader(path, read_as=ReadAs(**given), **options, **how) as loader:
            found = [document for batch in loader for document in documents_in(batch)]
        assert sorted(found) == expected_documents()
    with MixedLoader({"a": store}, {"a": 1}, **how) as loader:
        assert set(documents_in(next(loader))) <= {*expected_documents()}


@pytest.mark.parametrize("column", TOLD_BY)
def test_records_become_the_same_documents_when_they_are_converted(column, tmp_path, capfd):
    path = write_records(tmp_path / "a.h5", column)
    report = convert(path, "stream", tmp_path / "out")
    lengths, ids = lengths_of(tmp_path / "out")
    assert lengths == [*chain(*RECORDS)]
    assert ids == RECORD_IDS.reshape(-1).tolist()
    assert report.to_json()["documents"] == len(lengths)
    assert f"its records are packed: field '{column}' tells their documents apart" in capfd.readouterr().err
    with open_corpus(tmp_path / "out") as stream:
        np.testing.assert_array_equal(stream.field(column).tokens[0:96], TOLD_BY[column].reshape(-1))
    convert(path, "megatron", tmp_path / "a.bin", tokens_only=True)
    assert lengths_of(tmp_path / "a.bin")[0] == lengths
    convert(path, "stream", tmp_path / "ids", tokens_only=True)
    with open_corpus(tmp_path / "ids") as stream:
        assert (np.diff(stream.doc_offsets).tolist(), stream.meta.fields) == (lengths, ())


def test_targets_and_positions_stay_within_documents_in_place(tmp_path):
    path = write_records(tmp_path / "a.h5", "position_ids")
    options = {"batch_size": 8, "targets": True, "shuffle": "sequential", **ONE_RANK}
    with Loader(path, documents=("position_ids",), **options) as loader:
        batch = next(loader)
    ends = np.zeros((8, 12), bool)
    for row, lengths in enumerate(RECORDS):
        ends[row, np.cumsum(lengths) - 1] = True
    np.testing.assert_array_equal(batch["position_ids"], TOLD_BY["position_ids"])
    np.testing.assert_array_equal(batch["targets"], np.where(ends, -100, np.roll(RECORD_IDS.astype(int), -1)))
    with Loader(path, **options) as loader:  # as before, where no documents are asked for
        _, targets = next(loader)
    np.testing.assert_array_equal(targets, RECORD_IDS[:, 1:].astype(int))


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_a_mask_of_padding_tells_no_documents_of_records(mask, tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5:
        h5["input_ids"] = np.arange(12, dtype=np.uint16).reshape(3, 4)
        h5["attention_mask"] = np.array([mask] * 3, np.uint8)
    with open_reader(path) as reader:
        is_refused(errors.BackendError, lambda: reader.read_pieces(np.arange(3)), match="holds no documents")
    is_refused(errors.ArgumentError, lambda: convert(path, "stream", tmp_path / "out"), match="found batches")


# --- streams of HDF5, in place and converted -------------------------------------------------------------------------
#: The lengths of the documents of the streams of two files: ones of one token follow each other.
STREAMS = [[5, 1, 1, 1, 4], [1, 30, 2, 1, 1, 1]]
STREAM_LENGTHS = [*chain(*STREAMS)]
STREAM_IDS = np.arange(sum(STREAM_LENGTHS), dtype=np.uint16)


def write_stream_of_others(path, lengths, ids, **more):
    with h5py.File(path, "w") as h5:
        h5["input_ids"] = ids
        h5["position_ids"] = np.array(positions_of(lengths), np.int64)
        for name, values in more.items():
            h5[name] = values
    return path


@pytest.fixture(params=["file", "folder", "blocks"])
def told_stream(request, tmp_path, monkeypatch):
    """Return the path of a stream whose documents are told apart by positions, and the lengths of these."""
    if request.param == "blocks":
        monkeypatch.setattr(row_documents, "STREAM_BLOCK", 3)
    if request.param != "folder":
        return write_stream_of_others(tmp_path / "a.h5", STREAM_LENGTHS, STREAM_IDS)
    (tmp_path / "two").mkdir()
    for name, lengths, ids in zip("ab", STREAMS, np.split(STREAM_IDS, [sum(STREAMS[0])]), strict=True):
        write_stream_of_others(tmp_path / "two" / f"{name}.h5", lengths, ids)
    return tmp_path / "two"


def test_a_stream_of_hdf5_has_the_documents_that_its_positions_tell(told_stream, tmp_path, capfd):
    ends = np.cumsum(STREAM_LENGTHS)
    assert lengths_of(told_stream) == (STREAM_LENGTHS, STREAM_IDS.tolist())
    with open_corpus(told_stream) as stream:
        assert (stream.has_documents, stream.document_count, stream.told_by) == (True, len(ends), "position_ids")
        assert stream.documents[5].ids.tolist() == STREAM_IDS[ends[4] : ends[5]].tolist()
        numbers = stream.documents.number_of(np.arange(len(STREAM_IDS), dtype=np.uint64))
    assert numbers.tolist() == np.repeat(np.arange(len(ends)), STREAM_LENGTHS).tolist()
    with DocumentLoader(told_stream, max_tokens=64, collate="pack", **ONE_RANK) as loader:
        assert sum(len(batch["cu_seqlens"]) - 1 for batch in loader) == len(ends)
    for target in ("stream", "megatron", "hdf5"):
        options = {"batch_size": 1, "seq_len": 5, "shuffle": False} if target == "hdf5" else {"tokens_only": True}
        convert(told_stream, target, tmp_path / target, workers=1, **options)
        if target != "hdf5":
            assert lengths_of(tmp_path / target) == (STREAM_LENGTHS, STREAM_IDS.tolist())
    assert "field 'position_ids' tells its documents apart" in capfd.readouterr().err
    with open_corpus(tmp_path / "stream") as stream:
        assert stream.fields == ()
    pieces = [windows_of(path, 5, 0) for path in (told_stream, tmp_path / "hdf5")]
    assert pieces[0][: len(pieces[1])] == pieces[1]


def windows_of(path, seq_len, overlap):
    """Return the columns and the offsets of the pieces of each window."""
    shape = {} if path.name == "hdf5" else {"batch_size": 1, "seq_len": seq_len, "overlap": overlap}
    with open_reader(path, **shape) as reader:
        found = reader.read_pieces(np.arange(reader.num_records))
    rows = zip(found.columns.tolist(), found.offsets.tolist(), strict=True)
    parts = np.split(np.array([*rows]), found.ends[1:-1])
    return [part.tolist() for part in parts]


@pytest.mark.parametrize(("seq_len", "overlap"), [(1, 0), (6, 1), (47, 0)])
def test_windows_of_a_told_stream_are_those_of_its_conversion(seq_len, overlap, told_stream, tmp_path):
    convert(told_stream, "stream", tmp_path / "stream", workers=1)
    assert windows_of(told_stream, seq_len, overlap) == windows_of(tmp_path / "stream", seq_len, overlap)
    how = {"documents": DOCUMENT_NAMES, "fields": ("position_ids",), "targets": True, **ONE_RANK}
    for shuffle in ("sequential", "records"):
        steps = [
            [{name: np.asarray(value).tolist() for name, value in step.items()} for step in loader]
            for path in (told_stream, tmp_path / "stream")
            for loader in [Loader(path, batch_size=1, seq_len=seq_len, shuffle=shuffle, **how)]
        ]
        assert steps[0] == steps[1]


def test_the_first_windows_of_a_told_stream_read_no_other_positions(tmp_path, monkeypatch):
    path = write_stream_of_others(tmp_path / "a.h5", STREAM_LENGTHS, STREAM_IDS)
    monkeypatch.setattr(store_documents, "edges_in_stream", lambda *given: pytest.fail("all positions are read"))
    with Loader(path, batch_size=2, seq_len=4, documents=True, **ONE_RANK) as loader:
        next(loader)
    facts = json.loads(run_zb("info", path, "--json", code=0).stdout)
    assert (facts["documents"], facts["documents_field"]) == (None, "position_ids")
    assert "told apart by position_ids" in run_zb("info", path, code=0).stdout


def test_rows_of_positions_that_were_never_written_are_left_out_of_a_told_stream(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        for name, values in (("input_ids", STREAM_IDS), ("position_ids", positions_of(STREAM_LENGTHS))):
            stored = h5.create_dataset(name, (64,), "i8", chunks=(16,))
            stored[:48] = values
    assert lengths_of(tmp_path / "a.h5") == (STREAM_LENGTHS, STREAM_IDS.tolist())
