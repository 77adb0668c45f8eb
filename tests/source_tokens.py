"""A slow reference for what a step of a loader carries besides its tokens."""

import json

import numpy as np

from zb_hdf5 import HDF5ShardWriter

ALL = ("cu_seqlens", "max_seqlen", "seq_lens", "position_ids", "document_ids", "documents")
FIELDS = {"number": "u4", "pair": ("<u2", (2,))}


def spans_of(number, length):
    """Return the spans of a document: every other pair of tokens."""
    return [(start, min(start + 2, length), [number, start]) for start in range(0, length, 4) if number % 3]


def write_documents(writer, lengths, first, *, spans=spans_of, named=True):
    """Write documents of these lengths; `first` is the number of the first one and of its first token."""
    number, start = first
    for length in lengths:
        places = np.arange(start, start + length)
        values = {"number": places.astype("u4"), "pair": np.stack([places % 7, places % 11], axis=-1).astype("u2")}
        facts = {"id": f"doc-{number}", "metadata": {"place": start}} if named else {}
        writer.write_document(places + 1000, values, spans=spans(number, length), **facts)
        start += length
        number += 1
    return number, start


def make_stream(path, lengths, **how):
    with HDF5ShardWriter(path, chunk_tokens=16, fields=FIELDS) as writer:
        write_documents(writer, lengths, (0, 0), **how)
    return path


def span_at(lengths, place, spans):
    """Return the value of the span of a token of the stream, or None."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    number = int(np.searchsorted(starts, place, side="right")) - 1
    for start, stop, value in spans(number, int(lengths[number])):
        if start <= place - starts[number] < stop:
            return value
    return None


def check_step(step, lengths, *, seq_len, spans=spans_of):
    """Compare all values of tokens with their source: token t is `t + 1000`, its field `number` t, padding 0."""
    tokens = step["tokens"].numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)])
    places = np.where(tokens == 0, -1, tokens - 1000)
    number = np.searchsorted(starts, places, side="right") - 1
    np.testing.assert_array_equal(step["number"].numpy(), np.maximum(places, 0))
    expected = np.stack([np.maximum(places, 0) % 7, np.maximum(places, 0) % 11], axis=-1)
    np.testing.assert_array_equal(step["pair"].numpy(), expected)
    edges = []
    position = np.empty_like(places)
    segment = -1
    ids = np.empty_like(places)
    targets = np.empty_like(places)
    known = []
    for row in range(len(places)):
        for column in range(seq_len):
            here = places[row, column]
            before = places[row, column - 1] if column else None
            same = column and (
                (here == -1 and before == -1) or (here == before + 1 and here not in starts and here >= 0)
            )
            if not same:
                edges.append(row * seq_len + column)
                begin = column
                segment += 1
                known.append(number[row, column] if here >= 0 else -1)
            position[row, column] = column - begin
            ids[row, column] = segment if here >= 0 else -1
            after = places[row, column + 1] if column + 1 < seq_len else -1
            goes_on = here >= 0 and after == here + 1 and after not in starts
            targets[row, column] = after + 1000 if goes_on else -100
    edges.append(places.size)
    assert step["cu_seqlens"].tolist() == edges
    assert step["max_seqlen"] == max(np.diff(edges))
    assert step["seq_lens"].tolist() == np.diff(edges).tolist()
    np.testing.assert_array_equal(step["position_ids"], position)
    np.testing.assert_array_equal(step["document_ids"], ids)
    assert step["documents"].tolist() == known
    np.testing.assert_array_equal(step["targets"], targets)
    index = step["span_index"].numpy()
    found = step["spans"]
    for row in range(len(places)):
        for column in range(seq_len):
            expected = span_at(lengths, places[row, column], spans) if places[row, column] >= 0 else None
            assert (None if index[row, column] < 0 else found[index[row, column]]) == expected
    assert len({json.dumps(span) for span in found}) == len(found)
