"""Boundaries, positions, numbers and targets of documents: equal to a reference that looks at one token at a time."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from contract import is_refused
from hypothesis import given
from hypothesis import strategies as st
from packed import require_same_pieces, tokens_of

from zb_hdf5 import HDF5ShardWriter
from zb_hdf5.documents.document_offsets import DocumentOffsets
from zb_hdf5.documents.pieces import Pieces, concatenate, pieces_of_windows
from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.known_files import KnownFiles
from zb_hdf5.spec import NO_DOCUMENT, NO_SHA256, StoreMeta
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.store_documents import FEW_DOCUMENTS, StreamDocuments


@st.composite
def some_pieces(draw, seq_len=None, max_records=4):
    seq_len = seq_len or draw(st.integers(1, 12))
    ends = [0]
    columns = []
    offsets = []
    for _ in range(draw(st.integers(0, max_records))):
        inner = draw(st.sets(st.integers(1, seq_len - 1), max_size=5)) if seq_len > 1 else set()
        columns += [0, *sorted(inner)]
        offsets += [draw(st.one_of(st.just(NO_DOCUMENT), st.integers(0, 2**63))) for _ in range(1 + len(inner))]
        ends.append(len(columns))
    return Pieces(np.array(ends), np.array(columns, np.uint32), np.array(offsets, np.uint64), seq_len)


@given(st.data())
def test_records_are_taken_joined_and_narrowed(data):
    pieces = data.draw(some_pieces())
    rows = [[cell[1:] for cell in row] for row in tokens_of(pieces)]
    records = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    taken = pieces.take(np.array(records, np.int64))
    assert [[cell[1:] for cell in row] for row in tokens_of(taken)] == [rows[record] for record in records]
    require_same_pieces(concatenate([pieces.take(np.array([row])) for row in range(len(rows))] or [pieces]), pieces)
    for count in filter(lambda count: len(rows) % count == 0, range(1, len(rows) + 1)):
        parts = list(pieces.split(count))
        require_same_pieces(concatenate(parts), pieces)
        assert all(part.starts.tolist() == replace(part).starts.tolist() for part in parts)
    width = data.draw(st.integers(1, pieces.seq_len))
    narrow = pieces.first_columns(width)
    assert [[cell[1:] for cell in row] for row in tokens_of(narrow)] == [row[:width] for row in rows]


def test_pieces_of_several_lengths_are_refused():
    pieces = Pieces(np.array([0, 1]), np.zeros(1, np.uint32), np.zeros(1, np.uint64), 6)
    is_refused(ArgumentError, lambda: pieces.cut(4), match="must divide the 6 of the pieces, found 4")
    with pytest.raises(ArgumentError, match=r"of one length, found lengths \[3, 6\]"):
        concatenate([pieces, pieces.cut(3)])


@given(
    st.lists(st.integers(0, 6), max_size=12),
    st.lists(st.integers(0, 90), max_size=6),
    st.integers(1, 20),
    st.sampled_from(["uint64", "int64", "uint32"]),
)
def test_pieces_of_windows_are_those_of_their_tokens(lengths, starts, seq_len, dtype):
    doc_offsets = np.cumsum([0, *lengths]).astype(dtype)
    document_at = dict(enumerate(np.repeat(np.arange(len(lengths)), lengths).tolist()))
    found = pieces_of_windows(doc_offsets, np.array(starts, np.int64), seq_len, int(doc_offsets[-1]))
    ends = [0]
    columns = []
    offsets = []
    for start in starts:
        for column in range(seq_len):
            here, before = (document_at.get(start + place) for place in (column, column - 1))
            if column == 0 or here != before:
                columns.append(column)
                offsets.append(NO_DOCUMENT if here is None else start + column)
        ends.append(len(columns))
    expected = Pieces(np.array(ends), np.array(columns, np.uint32), np.array(offsets, np.uint64), seq_len)
    require_same_pieces(found, expected)


class _Listed:
    """Rows as they would be read from a file."""

    def __init__(self, rows):
        self._rows = np.array(rows, np.uint64)

    def rows(self):
        return self._rows

    def close(self):
        pass


def edges_of(starts, documents):
    """Return the documents of files whose tokens begin at `starts`: so many in the first file, by its index."""
    paths = [Path(f"{number}.h5") for number in range(len(starts) - 1)]
    entries = [
        ShardEntry(path.name, "hdf5", 0, 1, stop - start, NO_SHA256, document_count=0 if number else documents)
        for number, (path, (start, stop)) in enumerate(zip(paths, pairwise(starts), strict=True))
    ]
    index = ShardIndex(StoreMeta(1, 4096, np.dtype("<u4"), layout="stream"), entries)
    return StreamDocuments(Path("store"), Path("store"), index, starts, KnownFiles(), "auto", "auto")


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 200), min_size=1, max_size=6),
    st.integers(1, 20),
    st.integers(0, 5),
)
def test_edges_near_windows_give_the_pieces_that_all_edges_give(files, starts, seq_len, tail):
    tokens = [sum(lengths) for lengths in files]
    tokens[-1] += tail  # of a file whose writer was killed: tokens behind its last document
    ends = [0, *np.cumsum(tokens).tolist()]
    if not ends[-1]:
        return
    edges = edges_of(ends, FEW_DOCUMENTS + 1)
    edges.open = lambda number: _Listed(np.cumsum([0, *files[number]]))
    windows = np.array([start % ends[-1] for start in starts], np.int64)
    windows = np.minimum(windows, max(0, ends[-1] - seq_len))
    found, end = edges.near(windows, seq_len)
    whole = edges.edges()
    assert edges.near(windows, seq_len)[0] is whole  # once all are there
    assert whole.tolist() == np.cumsum([0, *(length for lengths in files for length in lengths)]).tolist()
    assert set(found.tolist()) <= set(whole.tolist())
    expected = pieces_of_windows(whole, windows, seq_len, int(whole[-1]))
    require_same_pieces(pieces_of_windows(found, windows, seq_len, end), expected)


def test_the_first_windows_of_many_files_open_only_theirs(monkeypatch):
    monkeypatch.setattr("zb_hdf5.store.store_documents.FEW_FILES", 2)
    opened = []
    edges = edges_of(list(range(0, 101, 10)), 20)
    edges.open = lambda number: opened.append(number) or _Listed([0, 4, 10])
    for number in range(7):
        for start, known in ((1, [0, 4]), (5, [4])):
            found, end = edges.near(np.array([10 * number + start]), 5)
            assert ((found - 10 * number).tolist(), end) == (known, 100)
        assert opened == list(range(number + 1))
    assert len(edges.near(np.array([70]), 5)[0]) < len(edges.near(np.array([3]), 8)[0])
    assert opened == list(range(10))  # each once


@pytest.mark.parametrize("count", [0, 1, 8191, 8192, 30_000])
def test_the_offsets_of_documents_are_mapped(tmp_path, count):
    path = tmp_path / "s.h5"
    with HDF5ShardWriter(path, chunk_tokens=4096) as writer:
        for start in range(0, count, 5000):
            lengths = np.arange(start, min(start + 5000, count)) % 3
            writer.write_documents(np.zeros(lengths.sum(), np.uint16), lengths)
    offsets = DocumentOffsets(path, int(np.sum(np.arange(count) % 3)))
    rows = offsets.rows()
    assert rows.tolist() == np.cumsum([0, *(np.arange(count) % 3)]).tolist()
    assert offsets._mapped is not None
    assert not rows.flags.writeable
    assert not rows.flags.owndata
    offsets.close()
    assert rows[0] == 0
