"""Rows to look at: each cell has the document, the place in it, the fields and the span of its source token."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed import write_packed

from zb_hdf5 import HDF5ShardWriter, open_reader
from zb_hdf5.commands import rows as rows_module
from zb_hdf5.commands.rows import PADDING, document_row, parts_of, rows_of, summary_of_field

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def cells_of(row):
    """Return (token, document, place, span) of each column of a row."""
    found = []
    for part in parts_of(row, None):
        for k, token in enumerate(part.tokens.tolist()):
            column = part.column + k
            [*span] = [value for start, stop, value in row.spans if start <= column < stop]
            is_text = part.document != PADDING
            found.append((token, part.document, part.within + k if is_text else 0, *span))
    return found


def expected_cells(packed, row):
    """Return the same from what was written."""
    return [
        (token, of, place, *(value for start, stop, value in packed.spans.get(of, []) if start <= place < stop))
        for token, of, place in packed.cells[row]
    ]


def require_fields(row, packed, places):
    """Compare the fields of a row with those that were written at (record, column) places."""
    assert set(row.fields) == set(packed.fields)
    for name, values in row.fields.items():
        expected = np.array([packed.fields[name][place] for place in places], values.dtype)
        np.testing.assert_array_equal(values, expected.reshape(values.shape))


@given(LENGTHS, st.integers(0, 999), st.just(".h5"), st.sampled_from([None, 4, 2]))
def test_cells_are_those_of_their_source(tmp_path_factory, lengths, seed, suffix, seq_len):
    packed = write_packed(tmp_path_factory.mktemp("p") / f"x{suffix}", lengths, seed=seed)
    size = seq_len or 8
    with open_reader(packed.path) as reader:
        asked = np.random.default_rng(seed).integers(0, reader.num_records * 8 // size, 5)
        for record, row in zip(asked.tolist(), rows_of(reader, asked, seq_len), strict=True):
            stored, first = record * size // 8, record * size % 8
            assert cells_of(row) == expected_cells(packed, stored)[first : first + size]
            require_fields(row, packed, [(stored, first + k) for k in range(size)])
            for number, document in row.known.items():
                assert (document.id, document.row, document.metadata) == (f"id-{number}", number + 1, {"n": number})
                assert document.source == f"{number % 2}.jsonl"


@given(LENGTHS, st.integers(0, 999), st.sampled_from([1, 3, 1 << 14]))
def test_a_document_is_put_together_from_its_pieces(tmp_path_factory, lengths, seed, records_at_once):
    packed = write_packed(tmp_path_factory.mktemp("p") / "x.h5", lengths, seed=seed)
    place_of = {cell[1:]: (r, c) for r, row in enumerate(packed.cells) for c, cell in enumerate(row)}
    with open_reader(packed.path) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "RECORDS_AT_ONCE", records_at_once)
        for number, tokens in enumerate(packed.documents):
            row = document_row(reader, number)
            held = packed.held(number)
            spans = packed.spans[number]
            assert cells_of(row) == [
                (token, number, place, *(value for a, b, value in spans if a <= place < b)) for place, token in held
            ]
            require_fields(row, packed, [place_of[number, place] for place, _ in held])
            lost = len(tokens) - len(held)
            assert (f"less {lost:,} tokens that are not in the store" in row.name) == (lost > 0)
            jumps = sum(place != before + 1 for (before, _), (place, _) in zip(held, held[1:], strict=False))  # noqa: RUF007
            assert len(parts_of(row, None)) == (jumps + 1 if held else 0)


def test_a_document_of_a_stream_has_its_fields_and_spans(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", fields={"mask": "u1", "vector": ("f4", (2,))}) as writer:
        for number in range(3):
            values = {"mask": np.arange(4) + number, "vector": np.arange(8).reshape(4, 2) + number}
            writer.write_document(np.arange(4), values, spans=[(1, 3, f"span {number}")], id=f"id-{number}")
    with open_reader(tmp_path / "s.h5", batch_size=1, seq_len=6) as reader:
        row = document_row(reader, 1)
        assert row.spans == [(1, 3, "span 1")]
        assert row.known[1].id == "id-1"
        assert row.fields["mask"].tolist() == [1, 2, 3, 4]
        assert row.fields["vector"].tolist() == (np.arange(8).reshape(4, 2) + 1).tolist()
        [_, window] = rows_of(reader, np.arange(2))  # tokens 6 to 12: half of document 1, and document 2
        assert window.spans == [(0, 1, "span 1"), (3, 5, "span 2")]
        assert window.fields["mask"].tolist() == [3, 4, 2, 3, 4, 5]


def test_spans_that_cannot_be_decoded_here_are_bytes(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", spans_codec=pickle.dumps) as writer:
        writer.write_document([1, 2, 3], spans=[(0, 2, {"a": 1})])
    with open_reader(tmp_path / "s.h5", batch_size=1, seq_len=3) as reader:
        [(start, stop, value)] = document_row(reader, 0).spans
    assert (start, stop, type(value)) == (0, 2, bytes)


@pytest.mark.parametrize(("values", "text"), [
    (np.array([b"a", b"a", b"b"]), "b'a' × 2, b'b' × 1"),
    (np.zeros(2, [("x", "u1"), ("y", "f4")]), "(0, 0.0) × 2"),
    (np.zeros((2, 3), "S2"), "bytes16[3]"),
    (np.zeros((2, 3), "f4"), "float32[3], 0.0 to 0.0"),
])  # fmt: skip
def test_fields_of_any_dtype_are_summed_up(values, text):
    assert summary_of_field(values) == text
