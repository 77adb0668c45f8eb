"""The spans behind pieces, against a search for the span of each token."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zb_hdf5.documents.document import Spans
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.spans import spans_of_pieces
from zb_hdf5.spec import NO_DOCUMENT

STREAM = 30


@st.composite
def spans_in_the_stream(draw):
    """Return spans, ascending and apart, some of which touch."""
    edges = sorted(draw(st.sets(st.integers(0, STREAM), max_size=12)))
    spans = [(a, b) for a, b in pairwise(edges) if draw(st.booleans())]
    return Spans(*(np.array([span[k] for span in spans], np.uint64) for k in (0, 1)), [f"{a}-{b}" for a, b in spans])


@st.composite
def pieces_of_the_stream(draw):
    """Return pieces of records: stretches of the stream in any order, also twice, and padding."""
    seq_len, ends, columns, offsets = draw(st.integers(1, 6)), [0], [], []
    for _ in range(draw(st.integers(1, 6))):
        starts = [0, *sorted(draw(st.sets(st.integers(1, seq_len - 1), max_size=3)))] if seq_len > 1 else [0]
        columns += starts
        offsets += [draw(st.integers(0, STREAM - seq_len) | st.just(NO_DOCUMENT)) for _ in starts]
        ends.append(len(columns))
    return Pieces(np.array(ends), np.array(columns, np.uint32), np.array(offsets, np.uint64), seq_len)


class Reading:
    """Reads the spans of stretches, and keeps which stretches it was asked for."""

    def __init__(self, spans):
        self.spans, self.asked = spans, []

    def __call__(self, starts, stops):
        self.asked.append(list(zip(starts.tolist(), stops.tolist(), strict=True)))
        asked = self.asked[-1]
        kept = [
            place
            for place, (begin, end) in enumerate(
                zip(self.spans.starts.tolist(), self.spans.stops.tolist(), strict=True)
            )
            if any(begin < stop and end > start for start, stop in asked)
        ]
        return Spans(self.spans.starts[kept], self.spans.stops[kept], [self.spans.values[place] for place in kept])


def value_of(spans, token):
    for start, stop, value in zip(spans.starts.tolist(), spans.stops.tolist(), spans.values, strict=True):
        if start <= token < stop:
            return value
    return None


@given(spans_in_the_stream(), pieces_of_the_stream())
def test_each_token_has_the_span_of_its_source_token(spans, pieces):
    read = Reading(spans)
    values, index = spans_of_pieces(pieces, read)
    assert index.dtype == np.int32
    assert index.shape == (pieces.num_records, pieces.seq_len)
    tokens = np.full(pieces.num_tokens, -1)
    edges = [*pieces.starts.tolist(), pieces.num_tokens]
    for offset, start, stop in zip(pieces.offsets.tolist(), edges, edges[1:], strict=False):
        tokens[start:stop] = -1 if offset == NO_DOCUMENT else np.arange(offset, offset + stop - start)
    found = [values[number] if number >= 0 else None for number in index.ravel().tolist()]
    assert found == [value_of(spans, token) if token >= 0 else None for token in tokens.tolist()]
    here = set(tokens.tolist())  # each span once, in the order of the stream, and no other
    assert values == [
        value
        for start, stop, value in zip(spans.starts.tolist(), spans.stops.tolist(), spans.values, strict=True)
        if here & set(range(start, stop))
    ]
    [asked] = read.asked
    assert all(stop < start for (_, stop), (start, _) in pairwise(asked))
