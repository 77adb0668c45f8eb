"""Which documents a step takes, and where they lie in a batch: equal to a reference, one document at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zb_hdf5.loaders import document_order, order
from zb_hdf5.loaders.document_order import Documents, LengthOrder, packed_steps
from zb_hdf5.loaders.order import GlobalOrder, StepPlan

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=60)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Compute few documents at once, so that the borders between the parts are met."""
    monkeypatch.setattr(order, "FIRST_BLOCK", 1)
    monkeypatch.setattr(order, "LAST_BLOCK", 3)
    monkeypatch.setattr(document_order, "PACKED_AT_ONCE", 5)


def offsets_of(lengths):
    return np.cumsum([0, *lengths]).astype(np.uint64)


def plan_of(order, batch_size, rank, world_size, drop_last):
    last = "drop" if drop_last else "fill"
    return StepPlan(order, batch_size, rank, world_size, last, batch_size, True, True)


@given(LENGTHS, st.integers(1, 9), st.sampled_from(["truncate", "drop"]))
def test_empty_and_long_documents_are_left_out_or_cut_and_counted(lengths, max_tokens, too_long):
    documents = Documents(offsets_of(lengths), max_tokens, too_long)
    most = max(lengths) if too_long == "truncate" else max_tokens
    kept = [number for number, length in enumerate(lengths) if 0 < length <= most]
    everyone = np.arange(documents.count)
    assert documents.numbers(everyone).tolist() == kept
    assert documents.starts(everyone).tolist() == [sum(lengths[:number]) for number in kept]
    assert documents.lengths(everyone).tolist() == [min(lengths[number], max_tokens) for number in kept]
    longer = [length - max_tokens for length in lengths if length > max_tokens]
    cut = (len(longer), sum(longer), 0) if too_long == "truncate" else (0, 0, len(longer))
    assert (documents.truncated_documents, documents.truncated_tokens, documents.dropped_documents) == cut


def packed(lengths, order, position, max_tokens):
    """Return the documents of each batch: a document that does not fit begins the next one."""
    batches, tokens = [], 0
    for document in order[position:]:
        if not batches or tokens + lengths[document] > max_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(document)
        tokens += lengths[document]
    return batches


@given(LENGTHS, st.integers(9, 30), st.integers(1, 4), st.booleans(), st.data())
def test_packed_steps_deal_out_batches_that_no_rank_changes(lengths, max_tokens, world_size, drop_last, data):
    lengths = [length or 1 for length in lengths]
    documents = Documents(offsets_of(lengths), max_tokens, "refuse")
    position = data.draw(st.integers(0, len(lengths)))
    order = GlobalOrder(len(lengths), 3, 1)
    plain = order.indices(np.arange(len(lengths))).tolist()
    expected = packed(lengths, plain, position, max_tokens)
    again = packed(lengths, plain, 0, max_tokens)
    if drop_last:
        expected = expected[: len(expected) // world_size * world_size]
    done = len(expected)
    while len(expected) % world_size:
        expected.append(again[(len(expected) - done) % len(again)])
    plans = [plan_of(order, 1, rank, world_size, drop_last) for rank in range(world_size)]
    ranks = [list(packed_steps(plan, documents, position, max_tokens)) for plan in plans]
    found = [part.tolist() for parts in zip(*ranks, strict=True) for part, _ in parts]
    assert found == expected
    taken = position + np.cumsum([0, *map(len, found)])[world_size::world_size]
    stops = np.minimum(len(lengths), taken).tolist()
    assert all([stop for _, stop in rank] == stops for rank in ranks)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 6), st.integers(0, 3))
def test_an_order_by_length_is_a_permutation_and_sorts_each_bucket(lengths, batch_size, bucket_batches, epoch):
    documents = Documents(offsets_of([length or 1 for length in lengths]), None, "refuse")
    order = LengthOrder(documents, batch_size, bucket_batches, seed=5, epoch=epoch)
    found = order.indices(np.arange(order.n))
    assert sorted(found.tolist()) == list(range(documents.count))
    assert [int(order.indices(np.array(position))) for position in range(order.n)] == found.tolist()
    size = batch_size * bucket_batches
    plain = GlobalOrder(order.n, 5, epoch).indices(np.arange(order.n))
    for first in range(0, order.n, size):
        bucket, members = found[first : first + size], plain[first : first + size]
        assert sorted(bucket.tolist()) == sorted(members.tolist())
        batches = [bucket[k : k + batch_size].tolist() for k in range(0, len(bucket), batch_size)]
        by_length = members[np.argsort(documents.lengths(members), kind="stable")].tolist()
        cut = [by_length[k : k + batch_size] for k in range(0, len(bucket), batch_size)]
        assert sorted(batches) == sorted(cut)


def test_the_order_by_length_never_changes():
    """It is a part of every state: these are the numbers of the first version."""
    documents = Documents(offsets_of([1 + 7 * number % 10 for number in range(20)]), None, "refuse")
    found = [LengthOrder(documents, 2, 4, seed=42, epoch=epoch).indices(np.arange(20)).tolist() for epoch in range(2)]
    assert found == [
        [8, 1, 11, 7, 19, 2, 15, 18, 14, 17, 10, 0, 12, 4, 3, 9, 16, 5, 13, 6],
        [0, 13, 12, 18, 9, 2, 14, 17, 8, 11, 10, 3, 5, 15, 1, 4, 6, 16, 19, 7],
    ]
