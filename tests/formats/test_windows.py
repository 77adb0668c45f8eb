"""The cut of tokens into records and batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zb_hdf5 import errors
from zb_hdf5.formats.windows import Windows

SMALL = st.integers(1, 9)


@given(size=SMALL, seq_len=SMALL, overlap=st.integers(0, 4), num_tokens=st.integers(0, 300))
def test_windows_cover_the_tokens_up_to_the_last_whole_record(size, seq_len, overlap, num_tokens):
    windows = Windows.of(size, seq_len, overlap)
    num_batches, rest = windows.cut(num_tokens)
    records = num_batches * size + rest
    tokens = np.arange(num_tokens)
    expected = [tokens[k * seq_len : k * seq_len + seq_len + overlap] for k in range(records)]
    assert all(len(record) == windows.length for record in expected)
    assert records * seq_len + overlap + seq_len > num_tokens  # one record more would not fit
    assert 0 <= rest < size
    starts = windows.starts(np.arange(records), windows.length)
    assert starts.tolist() == [k * seq_len for k in range(records)]
    batches = windows.batches_in(tokens, num_batches)
    np.testing.assert_array_equal(
        batches.reshape(-1, windows.length), np.array(expected[: num_batches * size]).reshape(-1, windows.length)
    )


@given(size=SMALL, seq_len=SMALL, overlap=st.integers(0, 4))
def test_the_windows_of_a_fingerprint_are_those_that_it_was_made_of(size, seq_len, overlap):
    windows = Windows.of(size, seq_len, overlap)
    assert Windows.in_fingerprint(f"tokens:0123:{windows.in_text}") == windows


@pytest.mark.parametrize("fingerprint", [None, 7, "", "tokens:0123", "a:0x8+1", "a:8x-8+1", "a:8x8", "a:8x8+1:"])
def test_the_fingerprint_of_anything_else_is_refused(fingerprint):
    with pytest.raises(errors.ArgumentError, match="expected the fingerprint of windows"):
        Windows.in_fingerprint(fingerprint)


def test_records_are_cut_into_shorter_ones_only_where_they_do_not_overlap():
    assert Windows.of(2, 8).starts(np.arange(3), 4).tolist() == [0, 4, 8]
    with pytest.raises(errors.ArgumentError, match="records that overlap cannot be cut"):
        Windows.of(2, 8, 1).starts(np.arange(3), 3)
    with pytest.raises(errors.ArgumentError, match="overlap must be at least 0, found -1"):
        Windows.of(2, 8, -1)
