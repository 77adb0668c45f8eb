"""Packing, as a pure function of the lengths of documents: what is in which row, and that nothing gets lost."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packed import places_of

from zb_hdf5.converters import packed as pack
from zb_hdf5.converters.packed import PACKINGS, best_fit, concat, pad

LENGTHS = st.lists(st.integers(0, 70), max_size=60).map(lambda lengths: np.array(lengths, np.int64))
SEQ_LEN = st.integers(1, 40)


def rows_of(packing, stream):
    """Return each row as a list of its pieces' tokens."""
    pieces = [stream[a : a + n].tolist() for a, n in zip(packing.offsets, packing.lengths, strict=True)]
    return [pieces[a:b] for a, b in zip(packing.first[:-1], packing.first[1:], strict=True)]


def best_fit_by_hand(sizes, seq_len):
    """The algorithm as the textbook has it: one piece after the other, into the fullest row that has room."""
    room = []
    for size in sorted(sizes, reverse=True):
        fits = [(left, row) for row, left in enumerate(room) if left >= size]
        row = min(fits)[1] if fits else len(room)
        room[row:] = room[row:] or [seq_len]
        room[row] -= size
    return sorted(room)


@given(LENGTHS, SEQ_LEN, st.sampled_from(sorted(PACKINGS)))
def test_every_packing_is_consistent(lengths, seq_len, name):
    packing = PACKINGS[name](lengths, seq_len)
    assert packing.tokens_kept <= packing.num_rows * seq_len
    assert packing.tokens_kept <= lengths.sum()
    assert np.all(packing.lengths > 0)
    rows, columns = places_of(packing)
    ends = columns + packing.lengths
    assert np.all(ends <= seq_len)
    same_row = np.diff(rows) == 0
    assert np.array_equal(columns[1:][same_row], ends[:-1][same_row])
    covered = np.concatenate(
        [np.arange(a, a + n) for a, n in zip(packing.offsets, packing.lengths, strict=True)] or [[]]
    )
    assert len(np.unique(covered)) == len(covered), "a token in two rows"


@given(LENGTHS, SEQ_LEN)
def test_concat_is_plain_slicing_and_pad_gives_each_document_a_row(lengths, seq_len):
    stream = np.arange(lengths.sum())
    whole = len(stream) // seq_len * seq_len
    expected = stream[:whole].reshape(-1, seq_len).tolist()
    assert [piece for row in rows_of(concat(lengths, seq_len), stream) for piece in row] == expected
    documents = np.split(stream, np.cumsum(lengths)[:-1]) if len(lengths) else []
    expected = [[document[:seq_len].tolist()] for document in documents if len(document)]
    assert rows_of(pad(lengths, seq_len), stream) == expected


@given(LENGTHS, SEQ_LEN)
@example(np.array([3, 3, 3, 3, 3, 3, 3], np.int64), 10)
def test_best_fit_is_the_textbook_algorithm(lengths, seq_len):
    packing = best_fit(lengths, seq_len)
    sizes = [min(seq_len, n - k) for n in lengths.tolist() for k in range(0, n, seq_len)]
    used = np.bincount(places_of(packing)[0], packing.lengths, minlength=packing.num_rows).astype(int)
    assert sorted((seq_len - used).tolist()) == best_fit_by_hand(sizes, seq_len)


@given(LENGTHS, SEQ_LEN, st.none() | st.integers(1, 20))
def test_best_fit_loses_nothing_and_splits_only_what_is_longer_than_a_row(lengths, seq_len, buffer_documents):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "BUFFER_DOCUMENTS", buffer_documents or pack.BUFFER_DOCUMENTS)
        packing = best_fit(lengths, seq_len)
    assert packing.tokens_kept == lengths.sum()
    assert np.all(places_of(packing)[1] + packing.lengths <= seq_len)
    starts = np.cumsum(lengths) - lengths
    number = np.searchsorted(starts, packing.offsets, side="right") - 1
    into = packing.offsets - starts[number]
    assert np.all(into % seq_len == 0), "a piece begins elsewhere than at a document or a multiple of seq_len"
    assert np.array_equal(packing.lengths, np.minimum(lengths[number] - into, seq_len))


@pytest.mark.parametrize("seq_len", [512, 2048])
def test_best_fit_of_web_like_lengths_wastes_little(seq_len):
    lengths = np.random.default_rng(1).lognormal(6, 1.2, 200_000).astype(np.int64) + 1
    packing = best_fit(lengths, seq_len)
    assert packing.tokens_kept > 0.999 * packing.num_rows * seq_len
    cropped = np.maximum(lengths - seq_len, 0).sum()
    assert cropped > 0.1 * lengths.sum(), "the lengths are too easy to prove anything"
