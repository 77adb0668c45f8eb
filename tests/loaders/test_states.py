"""States that were damaged or made up: a StateError that names the field, or an exact resume; never anything else."""

import copy
import json

import numpy as np
import pytest
from contents import write_batches, write_stream
from contract import is_refused
from damage import flip_token
from hypothesis import given
from hypothesis import strategies as st
from reading import begun, ordered

import zb_hdf5
from examples import examples
from zb_hdf5.loaders.loader import batches_of_state
from zb_hdf5.loaders.order import SHUFFLES, GlobalOrder
from zb_hdf5.store.repair import repair_store
from zb_hdf5.store.shards import Sharded

B = 2
S = 4
N = 15
RECORDS = N * B
ALONE = {"rank": 0, "world_size": 1}
LIVE = {"batch_size": B, "seq_len": S, "live": True, "shard_batches": 4}

VALUES = st.one_of(
    st.sampled_from([None, True, False, "", "1", [], {}, -1, 0, 1, 2, 0.5, 1.0, RECORDS, RECORDS + 1, float("nan")]),
    st.sampled_from([10**6, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 10**5000]),
    st.integers(0, 2 * RECORDS),
    st.text(max_size=3),
    st.floats(),
)


def paths_of(state):
    """Return the path to every value of a state, however deep."""
    items = ()
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, list):
        items = enumerate(state)
    return [path for key, value in items for path in [(key,), *((key, *rest) for rest in paths_of(value))]]


@st.composite
def damaged(draw, state):
    """Return a state with one to three values that are replaced, removed or added."""
    made = copy.deepcopy(state)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(paths_of(made)))
        place = made
        for key in path:
            place = place[key]
        change = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if change == "replace":
            place[last] = draw(VALUES)
        elif change == "remove":
            del place[last]
        elif isinstance(place, dict):
            place[draw(st.sampled_from(["", "more", 7, None]))] = draw(VALUES)
        else:
            place.append(draw(VALUES))
        if not made:
            break
    return made


def load(loader, state):
    """Load a state; if it is refused, say so, with an error that can be shown and a loader that is as before."""
    before = loader.state_dict()
    attributes = {name: value for name, value in vars(loader).items() if name != "_reading"}
    try:
        loader.load_state_dict(state)
    except zb_hdf5.StateError as error:
        message = str(error)
    else:
        return True
    assert "state" in message
    assert len(message) < 2000
    assert loader.state_dict() == before
    assert not [name for name, value in attributes.items() if getattr(loader, name) is not value]
    return False


def accepted(data, loader):
    """Return a damaged state that a loader takes, and then has itself; None where it refuses it."""
    state = data.draw(damaged(loader.state_dict()))
    if not load(loader, state):
        return None
    assert loader.state_dict() == state
    return state


def rows(batches):
    return [row.tolist() for batch in batches for row in batch]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two stores and a stream of the same shape."""
    folder = tmp_path_factory.mktemp("states")
    for number, name in enumerate(("a.h5", "b.batch")):
        write_batches(folder / name, number * 10_000 + np.arange(RECORDS * S).reshape(N, B, S))
    write_stream(folder / "stream.h5", np.arange(RECORDS * S))
    return folder


@pytest.mark.parametrize("position", [RECORDS + 1, 10**6, 2**63, 2**64, 10**40, pytest.param(10**5000, id="long")])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_position_behind_the_epoch_is_refused(shuffle, position, stores):
    with zb_hdf5.Loader(stores / "a.h5", shuffle=shuffle, **ALONE) as loader:
        state = loader.state_dict()
        for force in (False, True):
            with pytest.raises(
                zb_hdf5.StateError, match=rf"expected position in 0..{RECORDS}, the records of an epoch, found"
            ):
                loader.load_state_dict({**state, "position": position}, force=force)
        loader.load_state_dict({**state, "position": RECORDS})
        assert list(loader) == []
        assert len(list(loader)) == N


def test_a_fingerprint_too_long_to_show_is_refused(stores):
    with zb_hdf5.Loader(stores / "stream.h5", batch_size=B, seq_len=S, **ALONE) as loader:
        assert not load(loader, {**loader.state_dict(), "fingerprint": 10**5000})


@pytest.mark.parametrize("world_size", [1, 4, N + 3])
def test_records_that_fill_up_the_last_step_are_not_counted(world_size, stores):
    """So the end of an epoch is one position, on any number of ranks."""
    with zb_hdf5.Loader(stores / "a.h5", rank=0, world_size=world_size, batch_size=4, drop_last=False) as loader:
        for _ in loader:
            state = loader.state_dict()
        assert state["position"] == RECORDS
    for options in ({}, {"drop_last": False}, {"batch_size": 7}, {"rank": 2, "world_size": 3}):
        with zb_hdf5.Loader(stores / "a.h5", **{**ALONE, **options}) as other:
            other.load_state_dict(state)
            assert other.state_dict() == state
            assert list(other) == []


def follow(path):
    return zb_hdf5.FollowingLoader(path, timeout_s=30, **ALONE)


def test_a_follower_takes_positions_that_are_not_committed_yet_until_the_store_is_complete(tmp_path):
    tokens = np.arange(8 * B * S).reshape(8, B, S)
    with zb_hdf5.open_writer(tmp_path / "store", **LIVE) as writer:
        writer.write(tokens[:3])
        with follow(tmp_path / "store") as early, follow(tmp_path / "store") as wrong:
            state = early.state_dict() | {"position": 5 * B}
            early.load_state_dict(state)
            wrong.load_state_dict(state | {"position": 10**6})
            assert early.state_dict() == state
            with pytest.raises(zb_hdf5.StateError, match=r"epoch in 0\.\.0"):
                early.load_state_dict(state | {"epoch": 1})
            writer.write(tokens[3:])
            writer.finish()
            assert rows(early) == tokens[5:].reshape(-1, S).tolist()
            with pytest.raises(zb_hdf5.StateError, match=r"position 1,000,000 is past .*16 records"):
                list(wrong)
    with follow(tmp_path / "store") as late, pytest.raises(zb_hdf5.StateError, match=r"position in 0\.\.16"):
        late.load_state_dict(state | {"position": 17})


def test_a_batch_size_that_changes_keeps_the_position_and_ends_an_iteration_behind_a_filled_up_step(tmp_path):
    tokens = np.arange(5 * B * S).reshape(5, B, S)
    with zb_hdf5.open_writer(tmp_path / "store", **LIVE) as writer:
        writer.write(tokens)
        writer.finish()
    for kind in (zb_hdf5.Loader, zb_hdf5.FollowingLoader):
        with kind(tmp_path / "store", shuffle="sequential", **ALONE) as loader:
            loader.load_state_dict(loader.state_dict() | {"position": 4 * B})
            loader.set_batch_size(1)
            assert rows(loader) == tokens[4:].reshape(-1, S).tolist()
    with zb_hdf5.FollowingLoader(tmp_path / "store", batch_size=4, drop_last=False, **ALONE) as loader:
        steps = iter(loader)
        assert len([next(steps) for _ in range(3)]) == 3
        loader.set_batch_size(1)
        assert list(steps) == []


@pytest.mark.parametrize("source", ["a.h5", "b.batch", "stream.h5"])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@examples(40)
@given(data=st.data())
@pytest.mark.thin
def test_a_loader_refuses_a_state_or_resumes_exactly(source, shuffle, stores, data):
    shape = {"batch_size": 4, "seq_len": S} if source == "stream.h5" else {"batch_size": 3}
    options = {"shuffle": ordered(shuffle, 4), **shape, **ALONE}
    with zb_hdf5.Loader(stores / source, **options) as loader:
        next(iter(loader))
        if state := accepted(data, loader):
            again = [row for step in loader for row in step.tolist()]
            alone = begun(zb_hdf5.Loader(stores / source, **{**options, "batch_size": 1}), state["epoch"])
            with alone:
                alone.load_state_dict({**state, "position": 0})
                expected = rows(alone)[state["position"] :]
            assert again == expected[: len(again)]
            assert len(expected) - len(again) < loader.batch_size


@pytest.fixture(scope="module", autouse=True)
def _few_steps_ahead():
    """An iteration computes the order of 2,048 steps at once: hundreds of epochs of stores as small as these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zb_hdf5.loaders.mixture.ORDER_STEPS", 8)
        yield


def take(mixed, steps):
    return [batch for _, batch in zip(range(steps), mixed, strict=False)]


def mixture(stores):
    return zb_hdf5.MixedLoader({"a": stores / "a.h5", "b": stores / "b.batch"}, {"a": 3, "b": 1}, **ALONE)


def mixed_from_the_beginning(stores, state, steps):
    """Return the steps after a state the slow way: from step 0 on, with the weights of each segment in its turn."""
    weights = {segment["start"]: dict(zip("ab", segment["weights"], strict=True)) for segment in state["segments"]}
    with mixture(stores) as mixed:
        batches = iter(mixed)
        for step in range(state["position"] + steps):
            if step in weights:
                mixed.set_weights(weights[step])
                batches = iter(mixed)
            batch = next(batches)
            if step >= state["position"]:
                yield batch


@examples(60)
@given(data=st.data())
def test_a_mixture_refuses_a_state_or_resumes_exactly(stores, data):
    with mixture(stores) as mixed:
        take(mixed, 5)
        mixed.set_weights({"a": 1.0, "b": 2.0})
        take(mixed, 4)
        if state := accepted(data, mixed):
            assert sum(mixed.counts().values()) == state["position"]
            found = take(mixed, 3)
            if state["position"] < 100:
                assert rows(found) == rows(mixed_from_the_beginning(stores, state, 3))


@examples(60)
@given(data=st.data())
def test_a_dataset_and_its_sampler_refuse_a_state_or_resume_exactly(stores, data):
    with zb_hdf5.Loader(stores / "a.h5", **ALONE) as loader:
        dataset = loader.dataset()
        sampler = dataset.sampler
        next(iter(sampler))
        for part in (dataset, sampler):
            state = data.draw(damaged(part.state_dict()))
            if load(part, state):
                assert loader.epoch == state["epoch"]
                if part is sampler:
                    assert list(sampler) == list(range(state["step"], N))


def test_segments_that_contradict_each_other_are_refused(stores):
    with mixture(stores) as mixed:
        take(mixed, 5)
        mixed.set_weights({"a": 1, "b": 2})
        next(iter(mixed))
        state = mixed.state_dict()
        first, second = state["segments"]
        for segments, message in (
            ([], "expected segments .* from 0 on, found "),
            (None, "segments: .* not iterable"),
            ([None], "segments: state: expected a dict"),
            ([{}], "segments: "),
            ([second, first], "expected segments .* from 0 on, found "),
            ([second], "expected segments .* from 0 on, found "),
            ([first, {**second, "start": 0}], "expected segments .* from 0 on, found "),
            ([first, {**second, "start": 7}], "expected start in 0..6, the position"),
            ([first, {**second, "start": True}], "expected start in 0..6, the position"),
            ([first, {**second, "counts": [5, 0]}], r"'counts': \[4, 1\].* found .*'counts': \[5, 0\]"),
            ([first, {**second, "more": 0}], "expected segments .* from 0 on, found .*more"),
            ([first, {**second, "weights": [1.0]}], "segments: zip"),
            ([first, {**second, "weights": ["1", 2.0]}], "segments: weights: expected a number of at least 0"),
            ([first, {**second, "weights": [0.0, 1.0]}], "weights must be positive"),
            ([first, {**second, "weights": [1e-300, 1e-300]}], "weights must not all be below"),
        ):
            with pytest.raises(zb_hdf5.StateError, match=message):
                mixed.load_state_dict({**state, "segments": segments})
        assert mixed.state_dict() == state


@examples(100)
@given(data=st.data())
def test_a_document_loader_refuses_a_state_or_resumes_exactly(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "documents.h5"
    if not path.exists():
        write_stream(path, np.arange(RECORDS), [1] * RECORDS)
    with zb_hdf5.DocumentLoader(path, collate="pack", max_tokens=1, **ALONE) as loader:
        if state := accepted(data, loader):
            order = GlobalOrder(RECORDS, loader.seed, state["epoch"]).indices(np.arange(RECORDS)).tolist()
            assert [batch["documents"].item() for batch in loader] == order[state["position"] :]


#: Documents of each row group of the training split.
TEXTS = [["one", "two words", "three"], ["4"], ["five five five", "six"]]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Parquet files: two of the training split."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("text")
    for name, groups in (("a", TEXTS[:2]), ("b", TEXTS[2:]), ("c", [["held out"]])):
        with parquet.ParquetWriter(folder / f"{name}.parquet", arrow.schema([("text", arrow.string())])) as writer:
            for texts in groups:
                writer.write_table(arrow.table({"text": texts}))
    return folder


def text_loader(folder):
    return zb_hdf5.TextLoader(folder, tokenizer="byte", batch_size=1, seq_len=5, num_threads=1, **ALONE)


def tokens_from(state):
    """Return what comes at a place, or None if there is no such place."""
    group = state["row_group"]
    document = state["document"]
    token = state["token"]
    documents = [[256, *text.encode()] for text in TEXTS[group]]
    behind = document == len(documents) and token == 0
    if not behind and (document >= len(documents) or token >= len(documents[document])):
        return None
    rest = [token for tokens in documents[document:] for token in tokens][token:]
    epoch = [[256, *text.encode()] for texts in TEXTS for text in texts]
    later = [[256, *text.encode()] for texts in TEXTS[group + 1 :] for text in texts]
    return [*rest, *(token for tokens in later + epoch for token in tokens)]


@pytest.mark.parametrize("place", [
    {"token": 10**7}, {"document": 1, "token": 10}, {"row_group": 1, "document": 1, "token": 1},
    {"row_group": 1, "document": 2}, {"document": 10**40}, {"token": 10**40}, {"row_group": 3}, {"row_group": 10**40},
    {"epoch": 10**40},
])  # fmt: skip
def test_a_place_that_does_not_exist_is_refused_at_once(place, text):
    with text_loader(text) as loader:
        with pytest.raises(zb_hdf5.StateError, match="state: expected"):
            loader.load_state_dict(loader.state_dict() | place)
        assert loader.get_batch()[0].tolist() == tokens_from({"row_group": 0, "document": 0, "token": 0})[:5]


@examples(100)
@given(data=st.data())
def test_a_text_loader_refuses_a_state_or_resumes_exactly(text, data):
    with text_loader(text) as loader:
        loader.get_batch()
        state = loader.state_dict()
        if data.draw(st.booleans()):
            state = data.draw(damaged(state))
        else:
            state |= {name: data.draw(st.integers(0, 16)) for name in ("document", "token")}
            state |= {"row_group": data.draw(st.integers(0, 2)), "epoch": data.draw(st.integers(0, 3))}
            assert (tokens_from(state) is None) or load(loader, state)
        if load(loader, state):
            assert loader.state_dict() == state
            found = [token for _ in range(5) for token in loader.get_batch()[0].tolist()]
            assert found == tokens_from(state)[:25]


def test_a_reader_serves_no_fingerprint_but_its_own_stream(stores):
    with zb_hdf5.open_reader(stores / "stream.h5", batch_size=2, seq_len=4) as reader:

        def served(fingerprint):
            return batches_of_state(reader, {"fingerprint": fingerprint})

        def in_batches_of(size):
            return served(reader.fingerprint.replace(":2x4+0", f":{size}x4+0"))

        for batch_size in (0, 10**17, 10**40):
            assert in_batches_of(batch_size) is reader
        assert in_batches_of(5).batch_size == 5
        whole = in_batches_of(1_000_000)
        assert (whole.num_batches, whole.num_records) == (0, reader.num_records)
        for other in (None, 7, "", reader.fingerprint + "1", "x" + reader.fingerprint):
            assert served(other) is reader
        assert batches_of_state(reader, {}) is reader


def test_a_follower_jumps_over_batches_that_were_not_there_when_it_began(tmp_path):
    tokens = np.arange(10 * B * S).reshape(10, B, S)
    skip = [(0, 4 * B, 6 * B)]
    with zb_hdf5.open_writer(tmp_path / "store", **LIVE) as writer:
        writer.write(tokens[:3])
        with zb_hdf5.FollowingLoader(tmp_path / "store", timeout_s=30, skip=skip, **ALONE) as loader:
            found = [next(loader) for _ in range(3)]
            writer.write(tokens[3:])
            writer.finish()
            found += [next(loader) for _ in range(2)]
            state = loader.state_dict()
            found += [*iter(lambda: next(loader, None), None)]
    np.testing.assert_array_equal(np.stack(found), np.concatenate([tokens[:4], tokens[6:]]))
    with zb_hdf5.FollowingLoader(tmp_path / "store", skip=skip, **ALONE) as other:
        other.load_state_dict(state)
        np.testing.assert_array_equal(next(other), tokens[7])


def test_a_state_that_cannot_be_taken_over_changes_nothing(stores):
    with zb_hdf5.Loader(stores / "a.h5", **ALONE) as loader:
        before = loader.state_dict()
        for _ in range(2):
            with pytest.raises(zb_hdf5.StateError, match=r"state: .*holds no documents"):
                loader.load_state_dict({**before, "skip": [[0, 1, 2]], "mask_documents": [0]})
            assert loader.state_dict() == before
        assert len(list(loader)) == N


def refused_late(stores):
    """Yield loaders with states that each is refused when some of it is taken over already."""
    with zb_hdf5.Loader(stores / "a.h5", **ALONE) as loader:
        state = loader.state_dict()
        yield loader, {**state, "skip": [[0, 1, 2]], "mask_documents": [0]}
    windows = {"batch_size": 2, "seq_len": 4, **ALONE}
    with zb_hdf5.Loader(stores / "stream.h5", **windows | {"batch_size": 5}) as other:
        state = other.state_dict()
    with zb_hdf5.Loader(stores / "stream.h5", **windows) as loader:  # windows of the same stream in other batches
        yield loader, {**state, "position": 10**6}
        yield loader, {**state, "skip": [[0, 1, 2]], "mask_documents": [0]}
    with zb_hdf5.DocumentLoader(stores / "stream.h5", collate="pad", batch_size=1, **ALONE) as loader:
        state = loader.state_dict()
        yield loader, {**state, "skip": [[0, 0, 1]]}
        yield loader, {**state, "mask_documents": [0]}


def test_a_refused_state_leaves_each_attribute_as_it_was(stores):
    """The attributes that a state changes are a list: one that is missing there would keep a part of the state."""
    for loader, state in refused_late(stores):
        before = dict(vars(loader))
        with pytest.raises(zb_hdf5.StateError):
            loader.load_state_dict(state)
        after = vars(loader)
        assert after.keys() == before.keys()
        assert [name for name, value in before.items() if after[name] is not value] == []


@pytest.fixture
def sliding(tmp_path):
    write_stream(tmp_path / "s.h5", np.arange(1000), [1000], dtype="uint16")
    return lambda **options: zb_hdf5.SlidingWindowDataloader(zb_hdf5.open_corpus(tmp_path / "s.h5"), 16, 4, **options)


def test_random_windows_take_a_state_of_another_seed_by_force_only(sliding):
    with sliding(order="random", seed=1) as first, sliding(order="random", seed=2) as other:
        next(first)
        state = first.state_dict()
        is_refused(zb_hdf5.StateError, lambda: other.load_state_dict(state), match="seed")
        other.load_state_dict(state, force=True)
        assert other.state_dict()["position"] == 4
        with sliding(order="random", seed=2) as expected:
            next(expected)
            np.testing.assert_array_equal(next(other)[0], next(expected)[0])


def test_random_windows_begin_anywhere_and_never_end(sliding):
    with sliding(order="random") as loader:
        starts = np.concatenate([next(loader)[0][:, 0] for _ in range(3 * 984 // 4)])
    rounds = np.split(starts, 3)  # any range of 16 tokens and one more, each once before the next round
    np.testing.assert_array_equal(np.sort(rounds), [np.arange(984)] * 3)
    assert len({tuple(each[:20]) for each in [*rounds, np.arange(984)]}) == 4


@pytest.mark.parametrize("order", ["random", "epoch"])
def test_windows_that_could_not_be_read_come_with_the_next_call(sliding, order, monkeypatch):
    with sliding(order=order) as loader, sliding(order=order) as expected:
        with monkeypatch.context() as broken:
            broken.setattr(Sharded, "gather", lambda *_: 1 / 0)
            is_refused(ZeroDivisionError, lambda: next(loader))
        assert loader.state_dict() == expected.state_dict()
        np.testing.assert_array_equal(next(loader)[0], next(expected)[0])


#: Orders of 33 to 64 items, of which states of version 2 have one of their own.
OF_FEW = {
    "batches": lambda path: zb_hdf5.Loader(path, batch_size=1, seq_len=1, **ALONE),
    "records": lambda path: zb_hdf5.Loader(path, batch_size=1, seq_len=1, shuffle="records", **ALONE),
    "documents": lambda path: zb_hdf5.DocumentLoader(path, collate="pack", max_tokens=1, **ALONE),
    "lengths": lambda path: zb_hdf5.DocumentLoader(path, collate="pad", batch_size=1, shuffle="lengths", **ALONE),
}


def tokens_of(step):
    return (step["tokens"] if isinstance(step, dict) else step).item()


@pytest.mark.parametrize("kind", OF_FEW)
def test_a_state_of_version_2_goes_on_in_its_order_until_the_next_epoch(kind, tmp_path):
    count = 48
    write_stream(tmp_path / "x.h5", np.arange(count), [1] * count)
    with OF_FEW[kind](tmp_path / "x.h5") as loader:
        loader.set_epoch(5)
        new = [tokens_of(step) for step in loader]
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["version"] == 3
    with OF_FEW[kind](tmp_path / "x.h5") as loader:
        loader.load_state_dict({**state, "version": 2, "position": 0, "epoch": 4})
        old = [tokens_of(loader.get_batch()) for _ in range(count)]
        assert loader.state_dict()["version"] == 2
        if kind != "lengths":
            assert old == GlobalOrder(count, loader.seed, 4, version=2).indices(np.arange(count)).tolist()
        middle = {**state, "version": 2, "position": 20, "epoch": 4}
        loader.load_state_dict(json.loads(json.dumps(middle)))
        assert loader.state_dict() == middle
        assert [tokens_of(loader.get_batch()) for _ in range(count - 20)] == old[20:]
        assert [tokens_of(loader.get_batch()) for _ in range(count)] == new
        assert loader.state_dict() == state
        loader.load_state_dict(middle)
        loader.load_state_dict({**state, "position": 0})
        assert [tokens_of(step) for step in loader] == new
        with pytest.raises(zb_hdf5.StateError, match="state has version 4"):
            loader.load_state_dict({**state, "version": 4})
        assert loader.state_dict() == state


def test_a_data_loader_goes_on_in_the_order_of_version_2(tmp_path):
    write_stream(tmp_path / "x.h5", np.arange(48), [1] * 48)
    with OF_FEW["batches"](tmp_path / "x.h5") as loader:
        dataset = loader.dataset()
        state = {**dataset.state_dict(), "version": 2}
        dataset.load_state_dict(json.loads(json.dumps(state)))
        assert [dataset[step].item() for step in range(48)] == GlobalOrder(48, 42, 0, 2).indices(np.arange(48)).tolist()
        dataset.sampler.load_state_dict({**state, "kind": "steps", "step": 7})
        dataset.set_epoch(1)
        assert [dataset[step].item() for step in range(48)] == GlobalOrder(48, 42, 1).indices(np.arange(48)).tolist()


def records_left(loader):
    """Return the number of each record that a loader has left, for each step."""
    return [batch[:, 0].tolist() for batch in loader]


@pytest.mark.parametrize("shuffle", ["sequential", "global"])
def test_a_state_from_before_a_damaged_batch_goes_on_by_a_skip_and_not_after_a_repair(tmp_path, shuffle):
    """The page of questions tells so; `force=True` misses as many records as were lost, and a shuffle others too."""
    store = tmp_path / "store"
    tokens = np.repeat(np.arange(RECORDS, dtype=np.uint16), S).reshape(N, B, S)
    with zb_hdf5.open_writer(store, batch_size=B, seq_len=S, dtype="uint16", live=True, shard_batches=N) as writer:
        writer.write(tokens)
    how = {**ALONE, "shuffle": shuffle, "seed": 3}
    with zb_hdf5.Loader(store, **how) as loader:
        seen = [record for _ in range(4) for record in next(loader)[:, 0].tolist()]
        state = loader.state_dict()
        loader.load_state_dict(state)
        left = records_left(loader)
    lost = left[5]
    [shard] = store.glob("*.h5")
    flip_token(shard, lost[0] // B)
    with zb_hdf5.Loader(store, **how) as loader:
        loader.load_state_dict(state)
        is_refused(zb_hdf5.ChecksumError, lambda: records_left(loader))
        position = loader.state_dict()["position"]
    with zb_hdf5.Loader(store, **how, skip=[(0, position, position + B)]) as loader:
        loader.load_state_dict(state)
        assert records_left(loader) == left[:5] + left[6:]
    repair_store(store)
    with zb_hdf5.Loader(store, **how) as loader:
        is_refused(zb_hdf5.StateError, lambda: loader.load_state_dict(state), match="fingerprint")
        loader.load_state_dict(state, force=True)
        now = [record for step in records_left(loader) for record in step]
    missed = {record for step in left for record in step} - {*now}
    assert missed == {*lost} if shuffle == "sequential" else missed > {*lost}
    assert bool({*seen} & {*now}) == (shuffle == "global")
