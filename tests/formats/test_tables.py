"""Tables files, and the pieces and documents in them, against slow references."""

import errno
import fcntl
import json
import os
import pickle
import tracemalloc
from contextlib import closing
from itertools import pairwise

import h5py
import numpy as np
import pytest
from contents import write_batches
from contract import is_refused
from descriptors import open_files
from hypothesis import given
from hypothesis import strategies as st
from interrupted import failing
from packed import tokens_of
from processes import forked

from examples import examples
from zb_hdf5 import BackendError, BatchIndexError, ChecksumError, FormatError, open_reader
from zb_hdf5.documents import document_table, table_writer
from zb_hdf5.documents.document_table import DocumentPart, DocumentTable, DocumentTableFile, join_documents
from zb_hdf5.documents.metadata import DocumentRows, value_decoder
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.table_file import PiecesFile, TableFile
from zb_hdf5.documents.table_writer import DocumentsWriter, PiecesWriter, TableWriter, encoded_spans, value_encoder
from zb_hdf5.errors import ArgumentError, ConvertError, IncompleteError, UnavailableError
from zb_hdf5.files.publishing import copy_published
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.spec import (
    DOCUMENTS,
    NO_DOCUMENT,
    PIECES,
    TABLES_ATTRIBUTES,
    TABLES_KIND_ATTRIBUTES,
    documents_path,
    pieces_path,
)

FACTS = {"seq_len": 8, "split": "train", "tokens_sha256": ""}


def some_tables(path, columns=(0, 3, 0), offsets=(0, 3, 90)):
    with TableWriter(path, PIECES) as writer:
        writer.append("columns", columns)
        writer.append("offsets", offsets)
        return writer.publish(**FACTS)


@st.composite
def pieces_of_records(draw):
    """Return (seq_len, one list of (column, offset) for each record)."""
    seq_len = draw(st.integers(1, 9))
    offsets = st.integers(0, 10**12) | st.just(NO_DOCUMENT)
    record = st.sets(st.integers(1, max(1, seq_len - 1)), max_size=4).map(lambda rest: [0, *sorted(rest)])
    record = st.just([0]) if seq_len == 1 else record
    rows = draw(st.lists(record, min_size=1, max_size=12))
    return seq_len, [[(column, draw(offsets)) for column in row] for row in rows]


def as_pieces(seq_len, rows):
    ends = np.cumsum([0, *map(len, rows)])
    flat = [piece for row in rows for piece in row]
    columns, offsets = zip(*flat, strict=True)
    return Pieces(ends, np.array(columns, "u4"), np.array(offsets, "u8"), seq_len)


def per_token(pieces):
    """Return the offset of each token, by a loop."""
    rows = [[NO_DOCUMENT if offset is None else offset for _, offset, _ in row] for row in tokens_of(pieces)]
    return np.array(rows, "u8")


# --- tables ----------------------------------------------------------------------------------------------------
def test_rows_that_were_appended_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(table_writer, "BUFFER_BYTES", 64)  # the columns go on in files
    path = tmp_path / "x.h5"
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, 2**32, n).astype("u4") for n in (0, 1, 700, 13)]
    with TableWriter(path, PIECES) as writer:
        for rows in columns:
            writer.append("columns", rows)
        info = writer.publish(**FACTS)
    assert os.listdir(tmp_path) == ["x.h5"]
    with closing(TableFile(path, PIECES, info.sha256)) as file:
        assert (file.num_bytes, file.sha256) == (path.stat().st_size, info.sha256)
        assert file.attributes == FACTS
        expected = np.concatenate(columns)
        np.testing.assert_array_equal(file.read("columns", 0, len(expected)), expected)
        np.testing.assert_array_equal(file.read("columns", 3, 500), expected[3:500])
        file.check()
        assert "ends" not in file
        copy = pickle.loads(pickle.dumps(file))
        np.testing.assert_array_equal(copy.read("columns", 0, 9), expected[:9])
        copy.close()
    with h5py.File(path) as h5:  # what other programs see
        np.testing.assert_array_equal(h5["columns"], expected)
        assert {*h5.attrs} == {*TABLES_ATTRIBUTES, *TABLES_KIND_ATTRIBUTES[PIECES]}


def test_the_same_rows_give_the_same_bytes(tmp_path):
    assert some_tables(tmp_path / "a.h5").sha256 == some_tables(tmp_path / "b.h5").sha256
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    copy_published(tmp_path / "a.h5", tmp_path / "c.h5")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "c.h5").read_bytes()
    info = some_tables(tmp_path / "a.h5", offsets=(0, 3, 91))
    is_refused(FormatError, lambda: TableFile(tmp_path / "b.h5", PIECES, info.sha256), match="belongs to another store")
    with TableWriter(tmp_path / "x.h5", DOCUMENTS) as writer:
        for name in ("source", "ids", "offsets", "row"):
            writer.append(name, np.arange(5))
        writer.publish(split="train", spans_codec="json", tokens_sha256="")
    with closing(TableFile(tmp_path / "x.h5", DOCUMENTS)) as file:  # a mapped column is aligned
        assert all(file.read(name, 0, 5).flags.aligned for name in ("source", "offsets", "row"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_attributes_lie_in_the_order_of_their_names(tmp_path):
    names = [f"number_{letter}" for letter in "fbdaec"]
    with PiecesWriter(tmp_path / "x.h5") as writer:
        writer.publish(**dict.fromkeys(names, 1))
    stored = (tmp_path / "x.h5.pieces").read_bytes()
    places = [stored.index(name.encode()) for name in sorted(names)]
    assert places == sorted(places)


def test_a_forked_reader_reads(tmp_path):
    some_tables(tmp_path / "x.h5")
    with closing(TableFile(tmp_path / "x.h5", PIECES)) as file, forked(lambda: file.read("offsets", 2, 3)[0] == 90):
        pass


@pytest.mark.parametrize(("damage", "message"), [
    (lambda h5: h5.attrs.modify("format", "other"), "expected root attribute format='zb-tables', found"),
    (lambda h5: h5.attrs.modify("format_version", 7), "expected format_version 2, found 7"),
    (lambda h5: h5.attrs.modify("kind", "documents"), "expected root attribute kind='pieces'"),
    (lambda h5: h5.attrs.pop("split"), "attribute 'split' is missing"),
    (lambda h5: h5.create_dataset("more", data=[1]), "found 'more'"),
    (lambda h5: h5.create_dataset("ends", data=np.zeros((2, 2), "u8")), "each 1-D"),
    (lambda h5: h5.create_dataset("ends", data=np.zeros(2, "i8")), "each 1-D"),
    (lambda h5: h5.create_dataset("ends", data=np.zeros(2, "u8"), chunks=(1,)), "is not contiguous"),
    (lambda h5: h5.attrs.modify("format_version", 1), "expected format_version 2, found 1"),
    (lambda h5: h5.create_dataset("ends", data=np.zeros(2, "u8")), "sha256 differs from its content"),
    (lambda h5: h5.attrs.modify("seq_len", 9), "sha256 differs from its content"),
])  # fmt: skip
def test_another_file_is_refused(tmp_path, damage, message):
    some_tables(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "a") as h5:
        damage(h5)
    with pytest.raises((FormatError, ChecksumError), match=message) as caught:
        TableFile(tmp_path / "x.h5", PIECES)
    assert str(tmp_path / "x.h5") in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path):
    some_tables(tmp_path / "x.h5", columns=np.zeros(5000))
    for size in (0, 5, 100, (tmp_path / "x.h5").stat().st_size - 1):
        os.truncate(tmp_path / "x.h5", size)
        is_refused(FormatError, lambda: TableFile(tmp_path / "x.h5", PIECES), match=r"x\.h5")
        some_tables(tmp_path / "x.h5", columns=np.zeros(5000))


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_damaged_byte_is_found(tmp_path_factory, place, mask):
    path = tmp_path_factory.mktemp("damage") / "x.h5"
    info = some_tables(path)
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= mask
    path.write_bytes(data)
    try:
        with closing(TableFile(path, PIECES, info.sha256)) as file:
            rows = [file.read(name, 0, 3).tolist() for name in ("columns", "offsets")]
            file.check()
            assert rows == [[0, 3, 0], [0, 3, 90]]  # a byte that means nothing
    except (FormatError, ChecksumError, UnavailableError):
        pass


@pytest.mark.parametrize(("owner", "name", "message"), [
    (table_writer, "write_fully", r"x\.h5\.partial"), (table_writer._Column, "append", r"No space left .*x\.h5"),
])  # fmt: skip
def test_a_full_disk_is_named_and_leaves_nothing(owner, name, message, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, name, failing(errno.ENOSPC))
    is_refused(OSError, lambda: some_tables(tmp_path / "x.h5"), match=message)
    assert os.listdir(tmp_path) == []


# --- pieces ----------------------------------------------------------------------------------------------------
def write_pieces(path, seq_len, rows, groups=3):
    writer = PiecesWriter(path)
    for start in range(0, len(rows), groups):
        writer.append_pieces(as_pieces(seq_len, rows[start : start + groups]))
    return writer.publish(seq_len=seq_len, split="train", tokens_sha256="")


@given(pieces_of_records(), st.lists(st.integers(0, 10**6), max_size=12), st.booleans())
def test_pieces_of_any_records(tmp_path_factory, stored, wanted, mapped):
    seq_len, rows = stored
    path = tmp_path_factory.mktemp("pieces") / "x.h5"
    info = write_pieces(path, seq_len, rows)
    records = np.array([number % len(rows) for number in wanted], np.int64)
    file = PiecesFile(path, len(rows), seq_len, sha256=info.sha256)
    if not mapped:  # as on a network file system
        file._file._maps = False
    found = file.read_pieces(records)
    expected = [rows[record] for record in records]
    assert found.ends.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    flat = [piece for row in expected for piece in row]
    assert list(zip(found.columns.tolist(), found.offsets.tolist(), strict=True)) == flat
    file.close()


def test_a_lone_file_has_the_pieces_beside_it(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "x.h5"
    rows = [[(0, 5)], [(0, 9), (3, 0)], [(0, NO_DOCUMENT)], [(0, 13), (7, 90)]]
    write_batches(path, rng.integers(0, 9, (2, 2, 8)))
    with open_reader(path) as reader:
        assert reader.corpus.documents is None
        with pytest.raises(BackendError, match=r"holds no documents .*convert again from text"):
            reader.read_pieces(np.arange(2))
    write_pieces(path, 8, rows)
    with open_reader(path) as reader:
        expected = per_token(as_pieces(8, rows))
        halves = reader.read_pieces(np.arange(8), seq_len=4)
        np.testing.assert_array_equal(per_token(reader.read_pieces(np.array([3, 1]))), expected[[3, 1]])
        np.testing.assert_array_equal(per_token(halves), expected.reshape(8, 4))
        for bad in ([4], [-1], [0, 9]):
            is_refused(BatchIndexError, lambda bad=bad: reader.read_pieces(np.array(bad)))
        is_refused(ArgumentError, lambda: reader.read_pieces(np.arange(2), seq_len=3), match="divide")
        again = pickle.loads(pickle.dumps(reader))
        assert again.read_pieces(np.arange(1)).offsets.tolist() == [5]
        again.close()
    write_pieces(path, 8, rows[:3])
    with open_reader(path) as reader, pytest.raises(FormatError, match="belongs to another file: expected records 4"):
        reader.read_pieces(np.arange(2))


def test_ends_that_do_not_ascend_are_damage(tmp_path):
    with TableWriter(pieces_path(tmp_path / "x.h5"), PIECES) as writer:
        writer.append("ends", [1, 9, 2])
        writer.append("columns", [0, 0, 0])
        writer.append("offsets", [0, 0, 0])
        writer.publish(**FACTS)
    file = PiecesFile(tmp_path / "x.h5", 3, 8)
    for records in ([0, 1], [1], [2, 0], [2]):
        is_refused(FormatError, lambda records=records: file.read_pieces(np.array(records)), match="damaged")
    file.close()
    pieces_path(tmp_path / "x.h5").unlink()
    is_refused(FormatError, lambda: PiecesFile(tmp_path / "x.h5", 3, 8), match="is not there")


# --- documents -------------------------------------------------------------------------------------------------
SPAN_VALUES = st.none() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=2)


@st.composite
def documents(draw):
    """Return documents as (length, source, row, id, metadata, spans), with or without each of them."""
    has = {name: draw(st.booleans()) for name in ("source", "ids", "metadata", "spans")}
    found = []
    for number in range(draw(st.integers(0, 12))):
        length = draw(st.integers(0, 9))
        edges = sorted(draw(st.sets(st.integers(0, length), max_size=6))) if has["spans"] and length else []
        spans = [(a, b, draw(SPAN_VALUES)) for a, b in pairwise(edges) if draw(st.booleans())]
        source = draw(st.sampled_from(["a.txt", "b.txt", "ü/c.txt"])) if has["source"] else None
        text = f"id-{number}" if has["ids"] and draw(st.booleans()) else None
        metadata = {"n": number} if has["metadata"] and draw(st.booleans()) else {}
        found.append((length, source, number + 1 if source else None, text, metadata, spans))
    return found


def rows_of(group, encode):
    """Return the rows of documents in a table: without names, ids or metadata where none of them has any."""
    _, sources, rows, ids, metadata, _ = zip(*group, strict=True)
    chosen = {}
    if sources[0]:
        chosen["names"] = sources
        chosen["sources"] = np.arange(len(group), dtype="u4")
        chosen["rows"] = np.array(rows, "u8")
    if any(ids):
        chosen["ids"] = [(each or "").encode() for each in ids]
    if any(metadata):
        chosen["metadata"] = [encode([each])[0] if each else b"" for each in metadata]
    return DocumentRows(**chosen)


def write_documents(path, found, together=2):
    encode = value_encoder("json")[1]
    with DocumentsWriter(path) as writer:
        for start in range(0, len(found), together):
            group = found[start : start + together]
            token = writer.token_count
            writer.append_documents([length for length, *_ in group], rows_of(group, encode))
            for length, *_, spans in group:
                starts, stops = (np.array([span[k] for span in spans], int) + token for k in (0, 1))
                writer.append_spans(starts, stops, encode([span[2] for span in spans]) if spans else [])
                token += length
        return writer.publish()


def require_documents(table, found):
    """Compare a table with the documents that it was made of, one by one and token by token."""
    assert len(table) == len(found)
    token = 0
    expected = []
    all_spans = []
    for number, (length, source, row, text, metadata, spans) in enumerate(found):
        document = table.document(number)
        assert document == (number, token, length, source, row, text, metadata)
        expected += [number] * length
        all_spans += [(a + token, b + token, value) for a, b, value in spans]
        token += length
    assert table.token_count == token
    assert table.number_of(np.arange(token)).tolist() == expected
    assert table.number_of([NO_DOCUMENT]).tolist() == [-1]
    apart = [[(k, k + 2) for k in range(first, token, step)] for first, step in ((0, 2), (0, 3), (1, 5))]
    alone = [[(k, k + 3)] for k in range(0, token, 1 + token // 100)]
    for stretches in [[(0, token)][:token], *alone, *apart]:
        got = table.spans_of(*(np.array([each[side] for each in stretches], np.uint64) for side in (0, 1)))
        wanted = [span for span in all_spans if any(span[0] < stop and span[1] > start for start, stop in stretches)]
        assert list(zip(got.starts.tolist(), got.stops.tolist(), got.values, strict=True)) == wanted
    assert table.spans(0, 0).values == table.spans(token, token).values == []
    assert table.spans(0, token).values == [value for *_, value in all_spans]
    assert table.spans(-5, 1 << 70).starts.tolist() == [span[0] for span in all_spans]
    assert table.spans(-5, -2).values == table.spans(token + 3, 1 << 70).values == []
    for number in (-1, len(found)):
        is_refused(BatchIndexError, lambda number=number: table.document(number), match="no document")
    is_refused(BatchIndexError, lambda: table.number_of([token]), match="no token")


@examples(50)
@given(documents(), st.integers(1, 4))
def test_documents_and_their_spans(tmp_path_factory, found, together):
    path = tmp_path_factory.mktemp("documents") / "x.h5"
    write_documents(documents_path(path), found, together)
    table = DocumentTable.of_file(path)
    require_documents(table, found)
    again = pickle.loads(pickle.dumps(table))
    require_documents(again, found)
    spans = table.spans(0, table.token_count).values
    table.spans(0, table.token_count).values.append("more")  # it is the user's own
    assert table.spans(0, table.token_count).values == spans
    for each in (table, again):
        each.close()


@examples(50)
@given(st.lists(documents(), min_size=1, max_size=4))
def test_several_tables_are_one(tmp_path_factory, groups):
    folder = tmp_path_factory.mktemp("documents")
    parts = []
    token = 0
    document = 0
    for number, found in enumerate(groups):
        info = write_documents(folder / f"{number}.h5", found)
        length = sum(each[0] for each in found)
        facts = (info.num_bytes, info.sha256, "train", token, length, document, len(found))
        parts.append(DocumentPart(f"{number}.h5", *facts))
        token += length
        document += len(found)
    table = DocumentTable(folder, parts)
    together = [each for found in groups for each in found]
    require_documents(table, together)
    table.close()
    with DocumentsWriter(folder / "all.h5.documents") as writer:
        join_documents(DocumentTable(folder, parts).each_file(), writer)
        writer.publish()
    joined = DocumentTable.of_file(folder / "all.h5")
    require_documents(joined, together)
    joined.close()


@pytest.fixture
def network(monkeypatch):
    """Make every file one of a network file system; return `bytes_of(call)`, the bytes that a call reads."""
    read = []

    def counting(file, wanted, read_ranges=LocalFile.read_ranges):
        wanted = list(wanted)
        read.extend(len(data) for _, data in wanted)
        return read_ranges(file, wanted)

    def bytes_of(call):
        read.clear()
        call()
        return sum(read)

    monkeypatch.setattr("zb_hdf5.files.ranges.network_file_system", lambda file: "nfs")
    monkeypatch.setattr(LocalFile, "read_ranges", counting)
    return bytes_of


def test_a_network_file_system_is_asked_for_few_bytes(tmp_path, network):
    found = [(2, None, None, None, {}, [(0, 1, number)]) for number in range(500)]
    write_documents(documents_path(tmp_path / "x.h5"), found)
    size = documents_path(tmp_path / "x.h5").stat().st_size
    table = DocumentTable.of_file(tmp_path / "x.h5")
    assert 0 < network(lambda: table.document(7)) < size, "the blocks that it touches, whole: they are compared"
    assert network(lambda: table.document(8)) == 16, "two offsets: their block was compared before"
    require_documents(table, found)
    assert len(pickle.dumps(table)) < 4000
    table.close()
    file = DocumentTableFile(documents_path(tmp_path / "x.h5"))
    with DocumentsWriter(tmp_path / "y.h5") as writer, closing(file):
        assert network(lambda: join_documents([file], writer)) < 2 * size


def test_an_open_table_is_not_locked(tmp_path):
    path = documents_path(tmp_path / "x.h5")
    write_documents(path, [(2, None, None, None, {}, [])])
    with closing(DocumentTableFile(path)) as table, path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert table.edge(1) == 2


@pytest.mark.parametrize("name", ["offsets", "span_starts"])
def test_a_lookup_is_a_few_rows_however_many_there_are(tmp_path, name, network):
    lengths = np.random.default_rng(0).integers(0, 4000, 20_000)
    with DocumentsWriter(tmp_path / "x") as writer:
        for part in np.split(lengths, 20):
            writer.append_documents(part)
        ends = np.cumsum(lengths).astype(np.uint64)
        writer.append_spans(np.append(0, ends[:-1])[lengths > 0], ends[lengths > 0], [b"1"] * int((lengths > 0).sum()))
        writer.publish()
    values = np.random.default_rng(1).integers(0, ends[-1] + 9, 40).astype(np.uint64)
    with closing(TableFile(tmp_path / "x", DOCUMENTS, verify="none")) as file:
        rows = file.read(name, 0, file.num_rows(name)).copy()
        for side in ("left", "right"):
            for value in values:
                found = []

                def search(value=value, found=found, side=side):
                    found.append(file.search(name, np.array([value]), side))

                count = network(search)
                assert found[0].tolist() == [rows.searchsorted(value, side)]
                assert count < 3000, "an offset takes 8 bytes, and 2**18 tokens have about 130 documents"
            np.testing.assert_array_equal(file.search(name, values, side), rows.searchsorted(values, side))


def test_descriptors_are_bounded_however_many_tables_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr("zb_hdf5.files.paths.descriptor_room", lambda needed: 6)
    parts = []
    for number in range(9):
        info = write_documents(tmp_path / f"{number}.h5", [(2, None, None, f"id {number}", {}, [(0, 1, number)])])
        parts.append(DocumentPart(f"{number}.h5", info.num_bytes, info.sha256, "train", 2 * number, 2, number, 1))
    table = DocumentTable(tmp_path, parts)
    for each in (table, pickle.loads(pickle.dumps(table))):
        for number in [*range(9), 0]:
            assert each.document(number).id == f"id {number}"
            assert each.spans(2 * number, 2 * number + 2).values == [number]
            assert each.number_of([2 * number]) == [number]
            assert sum(path.startswith(str(tmp_path)) for path in open_files().values()) <= 6
        each.close()


def test_a_table_of_another_file_is_refused(tmp_path):
    with DocumentsWriter(documents_path(tmp_path / "x.h5")) as writer:
        writer.append_documents([3])
        info = writer.publish(tokens_sha256="0" * 64)
    write_documents(documents_path(tmp_path / "y.h5"), [(3, None, None, "a", {}, [])])  # of a store
    for name, found in (("x.h5", "'?000"), ("y.h5", "none")):
        with pytest.raises(FormatError, match=f"belongs to another file: .* found {found}"):
            DocumentTable.of_file(tmp_path / name, "1" * 64)
    part = DocumentPart(documents_path(tmp_path / "x.h5").name, info.num_bytes, info.sha256, "train", 0, 9, 0, 2)
    with pytest.raises(FormatError, match="expected 2 documents, found 1"):
        DocumentTableFile(documents_path(tmp_path / "x.h5"), part)
    table = DocumentTable(tmp_path, [DocumentPart("none.h5", 1, "0" * 64, "train", 0, 9, 0, 2)])
    is_refused(IncompleteError, lambda: table.document(0), match="is not there")


# --- spans -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("codec", "value", "message"), [
    ("json", {1, 2}, r"x: the value of span 0 cannot be encoded: .* choose another spans_codec"),
    (str, 7, r"must be encoded to bytes, at least one, found '7'"),
    (lambda value: b"", 7, r"must be encoded to bytes, at least one, found b''"),
])  # fmt: skip
def test_values_that_cannot_be_encoded(codec, value, message):
    is_refused(ConvertError, lambda: encoded_spans([(0, 1, value)], 8, value_encoder(codec)[1], "x"), match=message)


def test_values_are_json_or_what_the_caller_makes_of_them():
    assert value_encoder("json") == ("json", value_encoder("json")[1])
    assert value_decoder("json", None, "s.h5")([b"[1]", b"2"]) == [[1], 2]
    name, encode = value_encoder(pickle.dumps)
    assert (name, value_decoder(name, pickle.loads, "s.h5")(encode([{1}]))) == ("custom", [{1}])
    assert value_decoder("custom", len, "s.h5")([b"abc"]) == [3]
    for stored in ("custom", "pickle"):
        with pytest.raises(BackendError, match=r"s\.h5: the spans were encoded by a function"):
            value_decoder(stored, None, "s.h5")
    for gone in ("pickle", "msgpack", "numpy", "str"):
        is_refused(
            ArgumentError, lambda gone=gone: value_encoder(gone), match="spans_codec must be 'json' or a function"
        )
        is_refused(ArgumentError, lambda gone=gone: value_decoder("json", gone, "s.h5"), match="expected a function")


def write_spans(path, starts, stops, values):
    """Write the spans of one document of nine tokens."""
    with DocumentsWriter(path) as writer:
        writer.append_documents([9])
        writer.append_spans(np.array(starts), np.array(stops), values)
        writer.publish()


@pytest.mark.parametrize("bad", [b"{", b"1,2", b"\xff"])
def test_a_value_that_cannot_be_decoded_names_its_span(tmp_path, bad):
    write_spans(documents_path(tmp_path / "x.h5"), [1, 4, 6], [2, 6, 7], [b"1", bad, b"2"])
    table = DocumentTable.of_file(tmp_path / "x.h5")
    assert table.spans(0, 4).values == [1]
    is_refused(FormatError, lambda: table.spans(0, 5), match="the span at token 4 cannot be decoded")
    assert table.spans(0, 5, codec=bytes).values == [b"1", bad]
    table.close()


@pytest.mark.parametrize("places", [[1, 7, 4, 6, 8], [1, 4, 3, 6, 8], [1, 2, 4, 6, 1 << 63], [1, 2, 4, 6, 11]])
@pytest.mark.parametrize("count", [1, 2])
def test_spans_that_do_not_ascend_are_damage(tmp_path, places, count):
    for number in range(count):
        write_spans(tmp_path / f"{number}.documents", [1, 2, 4, 6], [2, 4, 6, 8], [b"1", b"2", b"3", b"4"])
    with h5py.File(tmp_path / "0.documents", "r+") as h5:
        h5["span_starts"][...] = places
    parts = [document_table.part_of(tmp_path / f"{number}.documents") for number in range(count)]
    parts = [part._replace(first_token=9 * place, first_document=place) for place, part in enumerate(parts)]
    with closing(DocumentTable(tmp_path, parts)) as table, pytest.raises(ChecksumError, match="span_starts"):
        table.spans(0, 9 * count)
    table = DocumentTable(tmp_path, parts, verify="none")
    with closing(table), pytest.raises(FormatError, match="spans that ascend up to"):
        table.spans(0, 9 * count)


@pytest.mark.parametrize(
    "values", [["\x1e"], [1, "\x1e", 2], [["a", "\x1e", "b"]], ["", [], {}, None], ['"', '","', "ü"]], ids=repr
)
def test_json_values_are_told_apart_whatever_is_in_them(values):
    texts = value_encoder("json")[1](values)
    assert texts == [json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() for value in values]
    assert value_decoder("json", None, "s.h5")(texts) == values


@pytest.mark.parametrize(("stored", "damaged"), [
    (b"id-1", b"id-\xff"), (b'{"a": 1}', b'{"a": 1\x7f'), (b"[7]", b"[7]"),
])  # fmt: skip
def test_an_id_or_metadata_that_cannot_be_read_is_named(stored, damaged, tmp_path):
    with DocumentsWriter(tmp_path / "d.h5") as writer:
        metadata = [b'{"a": 1}', stored] if stored == b"[7]" else [b"", b'{"a": 1}']
        writer.append_documents(np.array([5, 5]), DocumentRows(ids=[b"id-0", b"id-1"], metadata=metadata))
        writer.publish()
    data = (tmp_path / "d.h5").read_bytes()
    assert data.count(stored) == 1
    (tmp_path / "d.h5").write_bytes(data.replace(stored, damaged))
    with closing(DocumentTableFile(tmp_path / "d.h5", verify="none")) as file:
        assert file.document(0).id == "id-0"
        is_refused(FormatError, lambda: file.document(1), match=r"d\.h5: document 1: expected .* found .*; verify it")


def test_large_values_of_spans_do_not_wait_for_many_documents(tmp_path):
    value = b"x" * 100_000
    with DocumentsWriter(tmp_path / "x.h5", "custom") as writer:
        tracemalloc.start()
        try:
            for _ in range(1000):
                writer.add(3, spans=encoded_spans([(0, 1, value)], 3, value_encoder("custom")[1], "x"))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        writer.publish()
    assert peak < 50_000_000, "half of the values"
    with closing(DocumentTableFile(tmp_path / "x.h5")) as file:
        assert file.spans(np.array([2997], np.uint64), np.array([3000], np.uint64), bytes).values == [value]


SEQ_LEN = 2048
LENGTH = 500
ROWS = 4000
TOKEN_BYTES = ROWS * SEQ_LEN * 2  # uint16


def test_pieces_take_a_fiftieth_of_the_tokens(tmp_path):
    tokens = ROWS * SEQ_LEN
    starts = np.union1d(np.arange(0, tokens, SEQ_LEN), np.arange(0, tokens, LENGTH))
    ends = starts.searchsorted(np.arange(0, tokens + 1, SEQ_LEN))
    writer = PiecesWriter(tmp_path / "x.h5")
    writer.append_pieces(Pieces(ends, (starts % SEQ_LEN).astype(np.uint32), starts.astype(np.uint64), SEQ_LEN))
    info = writer.publish(seq_len=SEQ_LEN, split="train", tokens_sha256="")
    assert pieces_path(tmp_path / "x.h5").stat().st_size == info.num_bytes
    assert info.num_bytes <= 0.02 * TOKEN_BYTES


def test_a_document_table_with_sources_and_rows_takes_little_more(tmp_path):
    count = ROWS * SEQ_LEN // LENGTH
    with DocumentsWriter(tmp_path / "d.h5") as writer:
        for start in range(0, count, 1000):
            some = min(1000, count - start)
            rows = np.arange(start + 1, start + some + 1, dtype=np.uint64)
            writer.append_documents([LENGTH] * some, DocumentRows(["a.parquet"], np.zeros(some, np.uint32), rows))
        info = writer.publish()
    assert (tmp_path / "d.h5").stat().st_size == info.num_bytes
    assert info.num_bytes <= 0.022 * TOKEN_BYTES
