"""Orders are bijections, pinned for ever, and `global` is uniform. All seeds are fixed: no test depends on luck."""

import pickle
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zb_hdf5.loaders.order
from zb_hdf5 import ArgumentError
from zb_hdf5.loaders.order import (
    SHUFFLES,
    WRITE_EPOCH,
    BlockOrder,
    GlobalOrder,
    SequentialOrder,
    StepPlan,
    make_order,
    write_order,
)

SEEDS = [(0, 0), (42, 0), (42, 1), (2**64 - 1, 7), (3, WRITE_EPOCH)]
#: Two of them for every day.
EVERY_SEED = [pytest.param(*seed, marks=() if seed in SEEDS[2:4] else pytest.mark.slow) for seed in SEEDS]
TEN = np.arange(10)


@pytest.mark.parametrize(("seed", "epoch"), EVERY_SEED)
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.thin
def test_every_order_is_a_bijection(shuffle, seed, epoch):
    for n in range(1, 301):
        found = make_order(shuffle, n, seed=seed, epoch=epoch, block_size=7).indices(np.arange(n))
        assert found.dtype == np.int64
        np.testing.assert_array_equal(np.sort(found), np.arange(n), err_msg=f"n={n}")
        if shuffle == "global":
            order = GlobalOrder(n, seed, epoch)
            np.testing.assert_array_equal(order.positions(found), np.arange(n), err_msg=f"n={n}")
            np.testing.assert_array_equal(order.indices(order.positions(np.arange(n))), np.arange(n), err_msg=f"n={n}")


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_an_order_depends_on_nothing_but_its_arguments(shuffle):
    order, again = (make_order(shuffle, 1000, seed=5, epoch=2, block_size=64) for _ in range(2))
    expected = order.indices(np.arange(1000))
    backwards = np.array([int(order.indices(np.array(position))) for position in reversed(range(1000))])[::-1]
    np.testing.assert_array_equal(backwards, expected)  # position by position, in any sequence
    np.testing.assert_array_equal(again.indices(np.arange(1000).reshape(10, 100)), expected.reshape(10, 100))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(order)).indices(np.arange(1000)), expected)
    np.testing.assert_array_equal(order.indices(np.arange(1000, dtype=np.uint32)), expected)
    positions = np.arange(1000)
    found = order.indices(positions)
    found += 1
    np.testing.assert_array_equal(positions, np.arange(1000))
    for n in (0, 1, 100):
        assert make_order(shuffle, n, seed=1, epoch=1).indices(np.arange(0)).tolist() == []


def records_of(shuffle, num_batches, per_batch):
    """Return the records of an epoch, in their order."""
    how = {"seed": 42, "epoch": 1, "block_size": 3, "records_per_batch": per_batch}
    plan = StepPlan(make_order(shuffle, num_batches, **how), 1, 0, 1, True, per_batch, shuffle == "records", True)
    return plan.indices(np.arange(plan.num_records))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_orders_of_records_are_bijections_and_those_of_batches_keep_records_together(shuffle):
    for num_batches in (1, 2, 7, 40):
        for per_batch in (1, 3, 8):
            how = {"seed": 42, "epoch": 1, "block_size": 3}
            records = records_of(shuffle, num_batches, per_batch)
            np.testing.assert_array_equal(np.sort(records), np.arange(num_batches * per_batch))
            if shuffle == "records":
                expected = make_order("global", len(records), **how).indices(np.arange(len(records)))
            else:
                batches = make_order(shuffle, num_batches, **how).indices(np.arange(num_batches))
                expected = (batches[:, np.newaxis] * per_batch + np.arange(per_batch)).reshape(-1)
            np.testing.assert_array_equal(records, expected)


@pytest.mark.parametrize(("n", "seed", "epoch", "first", "last"), [
    (1, 42, 0, [0], 0),
    (5, 42, 0, [1, 0, 2, 4, 3], 3),
    (10, 42, 0, [1, 0, 7, 5, 3, 4, 2, 8, 9, 6], 6),
    (10, 42, 1, [0, 7, 6, 4, 2, 9, 8, 3, 5, 1], 1),
    (10, 0, 0, [4, 8, 9, 2, 7, 3, 1, 5, 0, 6], 6),
    (33, 42, 0, [26, 22, 15, 0, 19, 23, 20, 3, 28, 18], 31),
    (48, 42, 1, [27, 40, 17, 38, 25, 28, 33, 15, 31, 6], 2),
    (64, 42, 0, [51, 34, 59, 0, 19, 23, 52, 3, 54, 36], 7),
    (65, 7, 3, [22, 43, 14, 45, 20, 34, 16, 5, 17, 52], 27),
    (3275, 42, 0, [715, 1605, 1200, 2175, 532, 2314, 370, 2182, 2622, 3088], 1013),
    (1_000_003, 2**63 + 5, 12, [70074, 959802, 221347, 686348, 90333, 710872, 246797, 3919, 817681], 690402),
    (2**40, 1, 2, [915796282457, 457286235366, 466898753820, 617629534051, 697608050171], 391349765296),
    (10, 42, WRITE_EPOCH, [0, 5, 6, 7, 2, 9, 8, 4, 1, 3], 3),
    (64, 42, WRITE_EPOCH, [29, 23, 45, 42, 15, 38, 63, 11, 1, 22], 24),
    (104_829, 42, WRITE_EPOCH, [33913, 79046, 24793, 25453, 54336, 9213], None),
])  # fmt: skip
def test_global_order_is_pinned(n, seed, epoch, first, last):
    order = write_order(n, seed) if epoch == WRITE_EPOCH else make_order("global", n, seed=seed, epoch=epoch)
    assert order.indices(np.arange(len(first))).tolist() == first
    assert last is None or order.indices(np.array(n - 1)) == last


@pytest.mark.parametrize(("n", "seed", "epoch", "block_size", "first"), [
    (10, 42, 0, 3, [3, 4, 5, 9, 0, 1, 2, 6, 7, 8]),
    (10, 42, 1, 3, [6, 7, 8, 3, 4, 5, 9, 0, 1, 2]),
    (10, 43, 0, 4, [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]),
    (3275, 42, 0, 256, [2816, 2817, 2818, 2819]),
    (1, 0, 0, 256, [0]),
])  # fmt: skip
def test_block_order_is_pinned(n, seed, epoch, block_size, first):
    order = make_order("block", n, seed=seed, epoch=epoch, block_size=block_size)
    assert order.indices(np.arange(len(first))).tolist() == first


@given(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.data())
def test_large_stores_are_shuffled_within_range(n, seed, epoch, data):
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8)))
    order = GlobalOrder(n, seed, epoch)
    found = order.indices(positions)
    assert ((found >= 0) & (found < n)).all()
    np.testing.assert_array_equal(order.positions(found), positions)


def chi_square_excess(counts):
    """Return by how many standard deviations the chi-square of `counts` exceeds that of a uniform distribution."""
    counts = np.asarray(counts, dtype=float)
    expected = counts.mean()
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def orders(n, count):
    """Return the permutations of `count` seeds and epochs, one per row."""
    return np.array([GlobalOrder(n, seed, seed % 3).indices(np.arange(n)) for seed in range(count)])


@pytest.mark.parametrize("n", [33, 48, 64])
@pytest.mark.slow
def test_no_two_items_follow_each_other_more_often_than_others(n):
    """Halves of 3 bits had pairs that were a tenth too frequent, and at n = 64 even permutations only."""
    found = orders(n, 6000)
    pairs = np.bincount((found[:, :-1] * n + found[:, 1:]).reshape(-1), minlength=n * n).reshape(n, n)
    assert chi_square_excess(pairs[~np.eye(n, dtype=bool)]) < 5
    inversions = (found[:2000, :, None] > found[:2000, None, :]) & (np.arange(n)[:, None] < np.arange(n))
    assert abs(np.mean(inversions.sum(axis=(1, 2)) % 2) - 0.5) < 0.06


LONGEST = (pytest.mark.slow, pytest.mark.longest)
#: (n, how many seeds): few for every day, many by --slow
SAMPLES = [
    *(pytest.param(n, 700, marks=() if n == 33 else pytest.mark.slow) for n in (3, 4, 5, 8, 17, 33)),
    *(pytest.param(n, 6000, marks=LONGEST) for n in (3, 4, 5, 7, 9, 15, 16, 17, 65)),
    *(pytest.param(n, 6000, marks=pytest.mark.slow) for n in (8, 64)),
]


@pytest.mark.parametrize(("n", "seeds"), SAMPLES)
def test_orders_of_many_seeds_are_uniform(n, seeds):
    """Each index at each position, neighbouring positions, and of few batches each permutation: all equally likely."""
    found = orders(n, seeds)
    for column in found.T:
        assert chi_square_excess(np.bincount(column, minlength=n)) < 5
    for position in sorted({0, n // 2 - 1, n - 2}):
        pairs = np.bincount(found[:, position] * n + found[:, position + 1], minlength=n * n).reshape(n, n)
        assert chi_square_excess(pairs[~np.eye(n, dtype=bool)]) < 5
    if n <= 5:
        number = {permutation: i for i, permutation in enumerate(permutations(range(n)))}
        numbers = [number[tuple(row)] for row in found.tolist()]
        assert chi_square_excess(np.bincount(numbers, minlength=len(number))) < 5


@pytest.mark.parametrize(("n", "parities"), [(200, {False, True}), (256, {True}), (1024, {True})])
def test_orders_of_a_power_of_four_are_even_permutations_as_their_docs_state(n, parities):
    assert {is_even_permutation(order.tolist()) for order in orders(n, 20)} == parities


def is_even_permutation(order):
    """Return whether a permutation is made by an even number of swaps: its length less its cycles."""
    left, cycles = {*order}, 0
    while left:
        item = left.pop()
        cycles += 1
        while (item := order[item]) in left:
            left.remove(item)
    return (len(order) - cycles) % 2 == 0


@pytest.mark.parametrize("n", [100_000, 2**17])
def test_neighbours_in_a_long_epoch_and_epochs_are_independent(n):
    bins = 24
    coarse = GlobalOrder(n, 42, 0).indices(np.arange(n)) * bins // n
    for lag in (1, 2, 256):
        pairs = np.bincount(coarse[:-lag] * bins + coarse[lag:], minlength=bins * bins)
        assert chi_square_excess(pairs) < 5
    second = GlobalOrder(n, 42, 1).indices(np.arange(n)) * bins // n
    assert chi_square_excess(np.bincount(coarse * bins + second, minlength=bins * bins)) < 5


def test_seeds_and_epochs_give_different_orders_and_are_never_xored():
    pairs = [(seed, seed ^ 5) for seed in range(8)]
    assert len({tuple(GlobalOrder(100, seed, epoch).indices(np.arange(100))) for seed, epoch in pairs}) == 8
    pairs = [(seed, epoch) for seed in range(20) for epoch in range(20)]
    assert len({tuple(GlobalOrder(50, seed, epoch).indices(TEN)) for seed, epoch in pairs}) == len(pairs)
    epochs = [GlobalOrder(1000, 42, epoch).indices(TEN).tolist() for epoch in range(100)]
    assert write_order(1000, 42).indices(TEN).tolist() not in epochs
    first, second = (BlockOrder(1000, seed, epoch, 10).indices(np.arange(1000)) for seed, epoch in ((6, 3), (5, 0)))
    np.testing.assert_array_equal(first, second)  # but in ZeroBatch's blocks


def zerobatch_order(n, seed, epoch, block_size):
    """ZeroBatch v2's block shuffle, as it says it."""
    blocks = [list(range(start, min(start + block_size, n))) for start in range(0, n, block_size)]
    shuffled = np.random.RandomState(seed ^ epoch).permutation(len(blocks))
    return [index for block in shuffled for index in blocks[block]]


@given(st.integers(1, 400), st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(1, 500))
def test_block_order_is_that_of_zerobatch(n, seed, epoch, block_size):
    found = BlockOrder(n, seed, epoch, block_size).indices(np.arange(n))
    assert found.tolist() == zerobatch_order(n, seed, epoch, block_size)


def test_blocks_are_sequential_inside_and_those_of_nothing_and_unknown_orders_are_refused():
    found = BlockOrder(103, 1, 0, 10).indices(np.arange(103)).tolist()
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(found)) if b != a + 1), 103]
    blocks = [found[start:stop] for start, stop in pairwise(starts)]
    assert [100, 101, 102] in blocks
    assert found[-3:] != [100, 101, 102]  # it is shuffled with the others
    for block in blocks:
        assert block[0] % 10 == 0
        assert block == list(range(block[0], block[0] + len(block)))
    message = "shuffle must be one of global, records, block, sequential, found 'random'"
    with pytest.raises(ArgumentError, match=message):
        make_order("random", 10, seed=0, epoch=0)
    for block_size in (0, -1):
        with pytest.raises(ArgumentError, match="block_size must be at least 1"):
            BlockOrder(10, 0, 0, block_size)
    for order in (SequentialOrder(10), BlockOrder(10, 42, 3, 256)):  # one block is sequential
        assert order.indices(TEN).tolist() == TEN.tolist()


@pytest.mark.parametrize("n", [1, 2, 7, 64, 65, 1000, 5000, (1 << 16) + 3, 1 << 40])
def test_tables_of_round_functions_change_no_order(n, monkeypatch):
    """The last one has more items than tables hold."""
    order, positions = GlobalOrder(n, 7, 3), np.arange(n) if n < 1 << 40 else np.array([0, 5, n - 1])
    found = order.indices(positions)
    for _ in range(2):
        np.testing.assert_array_equal(order.indices(positions), found)
        np.testing.assert_array_equal(order.positions(found), positions)
        for some in range(0, len(positions), max(1, len(positions) // 50)):
            assert order.index(int(positions[some])) == found[some]
        monkeypatch.setattr(zb_hdf5.loaders.order, "TABLE_BITS", 0)
        monkeypatch.setattr(zb_hdf5.loaders.order, "TABLE_WORDS", 0)
