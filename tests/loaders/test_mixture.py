"""Mixtures: exact shares, exact resume on any number of ranks, weights that change."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from contents import write_batches, write_stream
from reading import begun

import zb_hdf5.loaders.mixture
from zb_hdf5 import ArgumentError, ClosedError, Loader, MixedLoader, StateError, convert, open_reader
from zb_hdf5.loaders.order import GlobalOrder

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


def test_each_source_yields_its_own_shuffled_epochs(stores):
    mixed = MixedLoader(stores, WEIGHTS, seed=3, **ALONE)
    seen = {name: [] for name in SIZES}
    for batch in itertools.islice(mixed, 400):
        seen[list(SIZES)[int(batch[0, 0]) // 1_000_000]].append(batch)
    assert mixed.counts() == {name: len(batches) for name, batches in seen.items()}
    for name, batches in seen.items():
        epochs = range(len(batches) // SIZES[name] + 1)
        expected = [step for epoch in epochs for step in begun(Loader(stores[name], seed=3, **ALONE), epoch)]
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
    for name, value in {"device": "cuda", "last": "fill", "drop_last": False}.items():
        with pytest.raises(ArgumentError, match=name):
            MixedLoader(stores, WEIGHTS, **ALONE, **{name: value})
    nothing = dict.fromkeys(WEIGHTS, 0)
    for weights in ({"web": 1}, nothing, {**WEIGHTS, "web": -1}, {**WEIGHTS, "web": float("nan")}):
        with pytest.raises(ArgumentError):
            MixedLoader(stores, weights, **ALONE)
    mixed = MixedLoader(stores, WEIGHTS, **ALONE)
    for value in ("0.5", "much", None, float("nan"), [1], np.arange(2), 1j, -1, 10**400):
        with pytest.raises(ArgumentError, match=r"^weights: expected a number of at least 0 for 'web', found "):
            mixed.set_weights({**WEIGHTS, "web": value})
    with pytest.raises(ArgumentError, match="weights must map the names of sources to numbers, found"):
        mixed.set_weights([*WEIGHTS])
    mixed.set_weights({**WEIGHTS, "web": np.float32(0.5)})
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


@pytest.mark.parametrize("shuffle", ["global", "records"])
def test_closed_sources_are_refused(shuffle, tmp_path):
    write_batches(tmp_path / "x.h5", np.zeros((8, 2, 8), np.uint32))
    with open_reader(tmp_path / "x.h5") as reader:
        pass
    with pytest.raises(ClosedError, match=r"x\.h5: this corpus was closed"):
        next(iter(MixedLoader({"x": reader}, {"x": 1}, shuffle=shuffle, **ALONE)))


def numbers_of(batch):
    """Return the windows or batches that a batch has, by their first tokens."""
    return batch[:, 0].tolist()


@pytest.mark.parametrize(("weights", "expected"), [
    ({"web": 1, "code": 1e-9, "maths": 0}, [2000, 0, 0]),
    ({"web": 0.9999996, "code": 4e-7, "maths": 0}, [2000, 0, 0]),
    ({"web": 1, "code": 1, "maths": 3e-7}, [1000, 1000, 0]),
    ({"web": 0, "code": 2, "maths": 0}, [0, 2000, 0]),
    ({"web": 1e300, "code": 1e300, "maths": 1e-300}, [1000, 1000, 0]),
])  # fmt: skip
def test_a_source_of_a_tiny_weight_or_of_none_gives_next_to_nothing(stores, weights, expected):
    mixed = MixedLoader(stores, weights, rank=1, world_size=4)
    for _ in itertools.islice(mixed, 500):
        pass
    assert list(mixed.counts().values()) == expected


def test_weight_0_switches_a_source_off_and_it_goes_on_where_it_was(stores):
    def given(world_size, state=None):
        mixed = MixedLoader(
            stores, {"web": 1 / 3, "code": 0.6180339887498949, "maths": 1e-9}, rank=0, world_size=world_size
        )
        if state:
            mixed.load_state_dict(json.loads(json.dumps(state)))
        return mixed

    whole = given(1)
    found = [batch for _, batch in zip(range(30), whole, strict=False)]
    before = whole.counts()
    whole.set_weights({"web": 0, "code": 1, "maths": 0})
    found += [batch for _, batch in zip(range(10), whole, strict=False)]
    state = whole.state_dict()
    assert state["version"] == 3
    assert whole.counts() == {**before, "code": before["code"] + 10}
    whole.set_weights({"web": 0.123456789, "code": 0, "maths": 0.3})
    found += [batch for _, batch in zip(range(20), whole, strict=False)]
    again = given(1, state)
    assert again.state_dict() == state
    again.set_weights({"web": 0.123456789, "code": 0, "maths": 0.3})
    for batch in found[40:50]:
        assert torch.equal(next(again), batch)
    two = given(2, again.state_dict())
    for batch in found[50:60:2]:
        assert torch.equal(next(two), batch)
    damaged = {**state, "counts": [count + 2 * (-1) ** number for number, count in enumerate(state["counts"])]}
    with pytest.raises(StateError, match="counts"):
        whole.load_state_dict(damaged)


def test_shares_of_earlier_states_go_on_until_the_weights_are_set(stores):
    weights = {"web": 0.1234567, "code": 0.3456789, "maths": 0.5308644}
    segment = {"start": 0, "weights": [*weights.values()], "counts": [0, 0, 0]}
    mixed = MixedLoader(stores, weights, **ALONE)
    state = mixed.state_dict()
    del state["counts"]
    earlier = {**state, "version": 2, "segments": [segment], "position": 100_000}
    mixed.load_state_dict(earlier)
    assert mixed.state_dict() == earlier
    before = {"web": 12347, "code": 34564, "maths": 53089}  # 3.9 from its share
    assert mixed.counts() == before
    mixed.set_weights(weights)
    for _ in itertools.islice(mixed, 1000):
        pass
    assert all(abs(mixed.counts()[name] - before[name] - 1000 * weight) < 1 for name, weight in weights.items())
    state = json.loads(json.dumps(mixed.state_dict()))
    assert [each.get("version") for each in state["segments"]] == [2, None]
    again = MixedLoader(stores, weights, **ALONE)
    again.load_state_dict(state)
    assert torch.equal(next(again), next(mixed))


STREAM_WINDOWS = 25
SIZE = 8


@pytest.fixture
def streams(tmp_path):
    """Return streams of which the windows of 4 tokens do not fill batches of 8."""
    for number, name in enumerate(("a", "b")):
        write_stream(tmp_path / f"{name}.h5", 1000 * number + np.arange(STREAM_WINDOWS * 4), [STREAM_WINDOWS * 4])
    return {name: tmp_path / f"{name}.h5" for name in ("a", "b")}


def windows_of(streams, world_size=1, **options):
    options = {"batch_size": SIZE, "seq_len": 4, "seed": 5, **options}
    weights = {"a": 0.75, "b": 0.25}
    return [MixedLoader(streams, weights, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


@pytest.mark.usefixtures("short_orders")
@pytest.mark.parametrize("shuffle", ["global", "records", "block", "sequential"])
def test_each_epoch_of_a_source_has_each_window_once(streams, shuffle):
    [mixed] = windows_of(streams, shuffle=shuffle, prefetch=3)
    batches = [next(mixed) for _ in range(200)]
    for number, count in enumerate(mixed.counts().values()):
        seen = [each % 1000 // 4 for batch in batches if batch[0, 0] // 1000 == number for each in numbers_of(batch)]
        assert len(seen) == count * SIZE
        for start in range(0, len(seen) - STREAM_WINDOWS + 1, STREAM_WINDOWS):
            assert sorted(seen[start : start + STREAM_WINDOWS]) == list(range(STREAM_WINDOWS))
    alone = dict(batch_size=SIZE, seq_len=4, seed=5, shuffle=shuffle, last="short", **ALONE)
    expected = [
        each for epoch in range(2) for step in begun(Loader(streams["a"], **alone), epoch) for each in numbers_of(step)
    ]
    first = [each for batch in batches if batch[0, 0] < 1000 for each in numbers_of(batch)]
    assert first[: len(expected)] == expected


@pytest.mark.usefixtures("short_orders")
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_windows_at_the_ends_of_epochs_come_again_on_other_ranks(streams, before, after):
    def run(world_size, steps, state=None):
        loaders = windows_of(streams, world_size, targets=True)
        for loader in loaders:
            if state:
                loader.load_state_dict(json.loads(json.dumps(state)))
        found = [next(loader)[1] for _ in range(steps) for loader in loaders]
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        return found, states[0]

    whole, _ = run(1, 60)
    first, state = run(before, 30 // before)
    second, _ = run(after, 30 // after, state)
    assert all(torch.equal(a, b) for a, b in zip(whole, first + second, strict=True))


def test_an_earlier_state_leaves_the_last_windows_out_until_the_weights_are_set(streams):
    [mixed] = windows_of(streams, shuffle="sequential")
    state = mixed.state_dict()
    del state["counts"]
    earlier = {**state, "version": 2, "position": 8}
    mixed.load_state_dict(earlier)
    assert mixed.state_dict() == earlier
    of_a = [batch for batch in itertools.islice(mixed, 16) if batch[0, 0] < 1000]
    assert torch.cat(of_a)[:, 0].tolist() == 4 * [*range(0, 24 * 4, 4)]
    mixed.set_weights({"a": 1, "b": 0})
    middle = json.loads(json.dumps(mixed.state_dict()))
    found = torch.cat([next(mixed) for _ in range(25)])[:, 0].tolist()
    assert found == 8 * [*range(0, 25 * 4, 4)]
    mixed.load_state_dict(middle)
    assert numbers_of(next(mixed)) == found[:8]


def test_sources_of_33_to_64_batches_keep_the_order_of_earlier_states_for_an_epoch(tmp_path):
    write_batches(tmp_path / "x.h5", np.arange(40)[:, None, None])
    with MixedLoader({"x": tmp_path / "x.h5"}, {"x": 1}, **ALONE) as mixed:
        state = mixed.state_dict()
        assert (state["version"], state["sources"][0]["version"]) == (2, 3)
        earlier = {**state, "sources": [{**state["sources"][0], "version": 2}], "position": 45}
        mixed.load_state_dict(json.loads(json.dumps(earlier)))
        assert mixed.state_dict() == earlier
        old, new = (
            GlobalOrder(40, 42, epoch, version).indices(np.arange(40)).tolist() for epoch, version in ((1, 2), (2, 3))
        )
        assert [next(mixed).item() for _ in range(75)] == (old[5:] + new)
        assert mixed.state_dict() == {**state, "position": 120}


def test_a_step_names_its_store_and_the_sources_of_its_documents(tmp_path):
    for store in ("web", "code"):
        for part in range(2):
            line = json.dumps({"text": f"{store}{part} " * 9}) + "\n"
            (tmp_path / f"{store}-{part}.jsonl").write_text(line * 9)
        files = [tmp_path / f"{store}-{part}.jsonl" for part in range(2)]
        convert(files, "hdf5", tmp_path / store, tokenizer="byte", seq_len=32, batch_size=2, workers=1)
    paths = {store: tmp_path / store for store in ("web", "code")}
    seen = set()
    with MixedLoader(paths, {"web": 1.0, "code": 2.0}, documents=("sources", "seq_lens")) as mixed:
        for _ in range(6):
            step = next(mixed)
            names = mixed.sources[step["store"]]
            for row in step["tokens"].tolist():
                text = bytes(each for each in row if each < 256).decode()
                assert step["store"] in text
            for place in step["sources"].tolist():
                assert place < 0 or step["store"] in names[place]
            seen.add(step["store"])
    assert seen == {"web", "code"}
    with MixedLoader(paths, {"web": 1.0, "code": 2.0}, documents=("seq_lens",)) as mixed:
        assert "store" not in next(mixed)
