"""Schedules: shares that hold after any number of batches, and places that are found again."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from zb_hdf5 import ArgumentError
from zb_hdf5.loaders.schedule import ExactSchedule, PeriodicSchedule, Tally, exact_weights, is_periodic, schedule_of

WEIGHTS = st.lists(
    st.one_of(st.floats(0, 1000), st.sampled_from([0.0, 1e-9, 5e-324, 1e-300, 1.0, 1e300, 1 / 3])),
    min_size=1,
    max_size=8,
).filter(any)


def begin(weights):
    return Tally(0, (0,) * len(weights))


def require_shares(sources, place, weights):
    """See that each source is within one batch of its share after each of some batches that follow a place."""
    exact = exact_weights(tuple(weights))
    counts = list(place.counts)
    for position, source in enumerate(sources.tolist(), start=place.position + 1):
        counts[source] += 1
        for weight, count in zip(exact, counts, strict=True):
            assert abs(count * sum(exact) - position * weight) < sum(exact)


@examples(60)
@given(weights=WEIGHTS)
def test_every_source_is_within_one_batch_of_its_share_after_any_number(weights):
    schedule = ExactSchedule(tuple(weights), begin(weights))
    sources = schedule.sources_from(begin(weights), 400)
    require_shares(sources, begin(weights), weights)
    assert all(weights[source] for source in set(sources.tolist()))
    counts = np.bincount(sources[:150], minlength=len(weights)).tolist()
    place = schedule.place_at(150, begin(weights))
    assert place == Tally(150, tuple(counts)) == schedule.place_of(150, counts)
    np.testing.assert_array_equal(schedule.sources_from(place, 250), sources[150:])


@examples(60)
@given(weights=WEIGHTS, position=st.integers(10**7, 10**15))
def test_shares_hold_far_from_the_start_too(weights, position):
    exact = exact_weights(tuple(weights))
    counts = [int(position * weight / sum(exact)) for weight in exact]
    late = sorted(range(len(exact)), key=lambda i: (counts[i] + 1) / exact[i] if exact[i] else float("inf"))
    for source in late[: position - sum(counts)]:
        counts[source] += 1
    schedule = ExactSchedule(tuple(weights), begin(weights))
    place = schedule.place_of(position, counts)
    require_shares(schedule.sources_from(place, 200), place, weights)


@pytest.mark.slow
@pytest.mark.longest
def test_shares_hold_at_each_of_ten_million_places():
    weights = (0.1234567, 0.3456789, 0.5308644, 1e-7)
    place, exact = begin(weights), exact_weights(weights)
    shares = np.array([float(weight / sum(exact)) for weight in exact])
    schedule = ExactSchedule(weights, place)
    while place.position < 10**7:
        sources = schedule.sources_from(place, 100_000)
        taken = place.counts + np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
        positions = place.position + np.arange(1, len(sources) + 1)
        assert np.abs(taken - positions[:, None] * shares).max() < 1
        place = Tally(int(positions[-1]), tuple(taken[-1].tolist()))
    assert place == schedule.place_at(10**7, begin(weights))


@examples(60)
@given(parts=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_a_period_has_the_sources_of_the_exact_rule(parts):
    weights = tuple(map(float, parts))
    periodic, exact = PeriodicSchedule(weights, begin(weights)), ExactSchedule(weights, begin(weights))
    assert is_periodic(weights)
    n = 2 * periodic.period + 5
    sources = exact.sources_from(begin(weights), n)
    np.testing.assert_array_equal(periodic.sources_from(begin(weights), n), sources)
    place = periodic.place_at(n // 3, begin(weights))
    assert place == exact.place_at(n // 3, begin(weights)) == periodic.place_of(n // 3, None)
    np.testing.assert_array_equal(periodic.sources_from(place, n - n // 3), sources[n // 3 :])


def test_golden_schedule():
    """Part of the checkpoint contract: a changed schedule under the same version breaks every running job."""
    for weights, expected in (
        ((0.7, 0.3), [0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1]),
        ((0.6, 0.3, 0.1), [0, 1, 0, 0, 1, 0, 2, 0, 1, 0, 0, 1]),
        ((0.70000001, 0.3), [0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1]),
        ((0.6180339887498949, 0.0, 0.3819660112501051), [0, 2, 0, 2, 0, 0, 2, 0, 0, 2, 0, 2]),
    ):
        schedule = schedule_of(weights, begin(weights), 3)
        assert schedule.sources_from(begin(weights), 12).tolist() == expected


def test_weights_stand_for_the_fractions_that_people_mean_and_are_never_rounded():
    assert exact_weights((0.7, 0.3, 1 / 3, 1e-9)) == (
        Fraction(7, 10), Fraction(3, 10), Fraction(1, 3), Fraction(1e-9)
    )  # fmt: skip
    assert is_periodic((0.7, 0.3))
    assert is_periodic((1 / 3, 2 / 3))
    for weights in ((1.0, 1e-9), (0.333333, 0.666667), (1.0, 0.0), (1e12, 1.0)):
        assert not is_periodic(weights)
    for weights in ((0.0,), (), (-1.0, 2.0), (float("inf"),), (float("nan"), 1.0)):
        with pytest.raises(ArgumentError, match="weights must"):
            schedule_of(weights, begin(weights), 3)
    with pytest.raises(ArgumentError, match="take a state nearer to it"):
        ExactSchedule((1.0, 1e-9), begin((1, 1))).place_at(2**40, begin((1, 1)))
