"""Mixtures: exact shares, exact resume on any number of ranks, weights that change."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from contents import write_batches
from hypothesis import given
from hypothesis import strategies as st

import zb_hdf5.loaders.mixture
from examples import examples
from zb_hdf5 import ArgumentError, Loader, MixedLoader, StateError, open_reader
from zb_hdf5.loaders.mixture import Schedule

SIZES = {"web": 30, "code": 11, "maths": 5}
ALONE = {"rank": 0, "world_size": 1}


@pytest.fixture
def short_orders(monkeypatch):
    """Compute 16 steps ahead: 2048 would be hundreds of epochs of sources so small, and no seam would be seen."""
    monkeypatch.setattr(zb_hdf5.loaders.mixture, "ORDER_STEPS", 16)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Return readers whose tokens tell source, batch and record: 1,000,000 * source + 1,000 * batch + row."""
    folder = tmp_path_factory.mktemp("mixture")
    readers = {}
    for number, (name, size) in enumerate(SIZES.items()):
        tokens = number * 1_000_000 + 1000 * np.arange(size)[:, None, None] + np.arange(4)[None, :, None]
        path = folder / f"{name}{'.h5' if number % 2 else '.batch'}"
        write_batches(path, np.broadcast_to(tokens, (size, 4, 8)))
        readers[name] = open_reader(path)
    yield readers
    for reader in readers.values():
        reader.close()


WEIGHTS = {"web": 0.6, "code": 0.3, "maths": 0.1}


@examples(60)
@given(weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=8))
def test_every_source_is_within_one_batch_of_its_share_after_any_number(weights):
    schedule = Schedule(tuple(weights))
    n = min(2 * schedule.period, 3000)
    sources, ordinals = schedule.sources_of(np.arange(n))
    taken = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    shares = np.array(schedule.shares) / schedule.period
    assert np.max(np.abs(taken - np.arange(1, n + 1)[:, None] * shares)) < 1
    assert np.array_equal(ordinals, taken[np.arange(n), sources] - 1)
    for count in (0, 1, n // 2, n):
        assert schedule.counts(count) == (taken[count - 1].tolist() if count else [0] * len(weights))
    assert np.allclose(shares, np.array(weights) / sum(weights), atol=1 / 4096)


def test_golden_schedule():
    """Part of the checkpoint contract: a changed schedule under the same version breaks every running job."""
    assert Schedule((0.7, 0.3)).sources_of(np.arange(12))[0].tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert Schedule((0.6, 0.3, 0.1)).sources_of(np.arange(12))[0].tolist() == [0, 1, 0, 0, 1, 0, 2, 0, 1, 0, 0, 1]


def test_each_source_yields_its_own_shuffled_epochs(stores):
    mixed = MixedLoader(stores, WEIGHTS, seed=3, **ALONE)
    seen = {name: [] for name in SIZES}
    for batch in itertools.islice(mixed, 400):
        seen[list(SIZES)[int(batch[0, 0]) // 1_000_000]].append(batch)
    assert mixed.counts() == {name: len(batches) for name, batches in seen.items()}
    for name, batches in seen.items():
        epochs = range(len(batches) // SIZES[name] + 1)
        expected = [step for epoch in epochs for step in Loader(stores[name], seed=3, epoch=epoch, **ALONE)]
        assert all(torch.equal(a, b) for a, b in zip(batches, expected, strict=False))


@pytest.mark.usefixtures("short_orders")
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 2), (3, 5)])
@pytest.mark.thin
def test_resume_on_any_number_of_ranks_gives_the_same_global_sequence(stores, before, after, prefetch):
    def run(world_size, steps, state=None, change_at=None):
        how = {"world_size": world_size, "prefetch": prefetch}
        loaders = [MixedLoader(stores, WEIGHTS, rank=rank, **how) for rank in range(world_size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        iterators = [iter(loader) for loader in loaders]
        found = []
        for step in range(steps):
            if step == change_at:
                for loader in loaders:
                    loader.set_weights({"web": 1, "code": 1, "maths": 2})
            found += [next(iterator) for iterator in iterators]
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        for iterator in iterators:
            iterator.close()
        return found, states[0]

    total = 120
    whole, _ = run(1, total, change_at=24)
    first, state = run(before, 60 // before, change_at=24 // before)
    second, _ = run(after, (total - 60) // after, state)
    assert all(torch.equal(a, b) for a, b in zip(whole, first + second, strict=True))


@pytest.mark.usefixtures("short_orders")
def test_changed_weights_hold_from_their_step_on(stores):
    mixed = MixedLoader(stores, WEIGHTS, **ALONE)
    iterator = iter(mixed)
    for _ in range(50):
        next(iterator)
    before = mixed.counts()
    mixed.set_weights({"web": 1, "code": 1, "maths": 8})
    found = Counter(int(next(iterator)[0, 0]) // 1_000_000 for _ in range(100))
    assert found == {0: 10, 1: 10, 2: 80}
    assert mixed.counts() == {"web": before["web"] + 10, "code": before["code"] + 10, "maths": before["maths"] + 80}


@pytest.mark.usefixtures("short_orders")
def test_impossible_mixtures_are_refused(stores, tmp_path):
    for name, value in {"device": "cuda", "epoch": 3, "drop_last": False}.items():
        with pytest.raises(ArgumentError, match=name):
            MixedLoader(stores, WEIGHTS, **ALONE, **{name: value})
    for weights in ({"web": 1}, {**WEIGHTS, "web": 0}, {**WEIGHTS, "web": -1}, {**WEIGHTS, "web": float("nan")}):
        with pytest.raises(ArgumentError):
            MixedLoader(stores, weights, **ALONE)
    write_batches(tmp_path / "other.h5", np.zeros((3, 2, 8), np.uint32))
    with open_reader(tmp_path / "other.h5") as other:
        sources, weights = {"web": stores["web"], "other": other}, {"web": 1, "other": 1}
        with pytest.raises(ArgumentError, match="batch shape"):
            MixedLoader(sources, weights, **ALONE)
        mixed = MixedLoader(sources, weights, **ALONE, batch_size=2)
        assert next(iter(mixed)).shape == (2, 8)


def test_a_state_of_other_sources_or_of_another_order_of_them_is_refused(stores):
    """The state's shares are by place: the same sources in another order would swap them."""
    mixed = MixedLoader(stores, WEIGHTS, **ALONE)
    for other in (
        MixedLoader(stores, WEIGHTS, **ALONE, seed=1),
        MixedLoader({**stores, "web": stores["code"]}, WEIGHTS, **ALONE),
        MixedLoader(dict(reversed(stores.items())), WEIGHTS, **ALONE),
    ):
        with pytest.raises(StateError):
            mixed.load_state_dict(other.state_dict())
    mixed.load_state_dict(json.loads(json.dumps(mixed.state_dict(), sort_keys=True)))
