"""The end of an epoch: each record comes as often as `last` says, whatever the ranks, batch sizes and orders are."""

import contextlib
import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from contents import write_stream
from contract import assert_same, is_refused, taken
from hypothesis import given
from hypothesis import strategies as st
from reading import ordered, reading
from source_tokens import ALL, make_stream
from torch.utils.data import DataLoader

from examples import examples
from zb_hdf5 import ArgumentError, FollowingLoader, Loader, MixedLoader, convert, open_writer
from zb_hdf5.loaders.order import LASTS, SHUFFLES, make_order

S = 4
BLOCK = 2
ALONE = {"rank": 0, "world_size": 1}


def stream_of(path, num_windows, seq_len=S):
    """Write windows of `seq_len` tokens and one more: window r begins with token r * seq_len."""
    tokens = np.arange(num_windows * seq_len + 1)
    if path.suffix == ".npy":
        np.save(path, tokens)
    elif not path.exists():
        write_stream(path, tokens, [len(tokens)], chunk_tokens=64, dtype="uint32")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("last")


def records_of(step):
    """Return the records of a step that are not only there to fill it up; compare their tokens and targets."""
    inputs, targets = step
    assert inputs.shape == targets.shape
    real = (targets != -100).all(1)
    assert ((targets == -100).all(1) | real).all()
    records = inputs[real, 0] // S
    expected = records[:, None] * S + torch.arange(S)
    assert torch.equal(inputs[real], expected)
    assert torch.equal(targets[real], expected + 1)
    return records.tolist()


def order_of(num_records, batch_size, shuffle, epoch=0):
    """Return the order of an epoch the slow way: whole batches in their order, and behind them the rest."""
    num_batches = num_records // batch_size
    how = {"seed": 42, "epoch": epoch, "block_size": BLOCK, "records_per_batch": batch_size}
    order = make_order(shuffle, num_batches, **how)
    ordered = num_batches * batch_size
    if shuffle == "records":
        found = order.indices(np.arange(ordered)).tolist()
    else:
        found = [
            k * batch_size + row for k in order.indices(np.arange(num_batches)).tolist() for row in range(batch_size)
        ]
    return found + list(range(ordered, num_records))


def steps_of(order, position, batch_size, world_size, last):
    """Return the records of each step of each rank from a position on, the slow way."""
    step, found = batch_size * world_size, []
    for first in range(position, len(order), step):
        if last == "drop" and first + step > len(order):
            break
        wrapped = [place % len(order) if last == "fill" else place for place in range(first, first + step)]
        rows = [[order[place]] if place < len(order) else [] for place in wrapped]
        parts = [rows[rank * batch_size : (rank + 1) * batch_size] for rank in range(world_size)]
        found.append([list(itertools.chain.from_iterable(part)) for part in parts])
    return found


def windows(stack, path, batch_size):
    """Return one reader for many loaders: most of the time of a short epoch is the opening of its stream."""
    one = Loader(path, batch_size=batch_size, seq_len=S, targets=True, last="fill", **ALONE)
    return stack.enter_context(one).batches


def world(stack, source, world_size, **options):
    how = {"targets": True, "world_size": world_size, **options}
    how["shuffle"] = ordered(how.get("shuffle", "global"), BLOCK)
    return [stack.enter_context(Loader(source, rank=rank, **how)) for rank in range(world_size)]


def steps_in(loaders, count=None):
    """Return the records of each step of each rank; all make the same number of steps, of the shapes that they say."""
    ranks = [list(itertools.islice(loader, count)) for loader in loaders]
    for loader, steps in zip(loaders, ranks, strict=True):
        whole = steps[:-1] if loader.last == "short" else steps
        assert {len(inputs) for inputs, _ in whole} <= {loader.batch_size}
    return [[records_of(step) for step in steps] for steps in zip(*ranks, strict=True)]


# --- the tail of a stream ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tail.h5", "tail.npy"])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_the_windows_at_the_end_of_a_stream_are_read(name, shuffle, folder):
    path = stream_of(folder / name, 300)
    with Loader(path, batch_size=64, seq_len=S, targets=True, shuffle=ordered(shuffle, BLOCK), **ALONE) as loader:
        assert (len(loader), loader.num_records, loader.plan.num_left_out) == (4, 300, 44)
        assert repr(loader).endswith("num_records=300, last='drop', left_out=44)")
        state = loader.state_dict()
    for options in ({"drop_last": False}, {"last": "short"}, {"last": "masked"}):
        with Loader(
            path, batch_size=64, seq_len=S, targets=True, shuffle=ordered(shuffle, BLOCK), **options, **ALONE
        ) as loader:
            assert (len(loader), loader.num_records, loader.plan.num_left_out) == (5, 300, 0)
            for epoch in range(3):
                loader.set_epoch(epoch)
                found = [record for step in loader for record in records_of(step)]
                expected = order_of(300, 64, shuffle, epoch)
                assert found == expected + expected[: len(found) - 300]
                assert len(found) == (320 if "drop_last" in options else 300)
                assert loader.state_dict()["position"] == 300
    with Loader(path, batch_size=7, seq_len=S, targets=True, shuffle=ordered(shuffle, BLOCK), **ALONE) as loader:
        loader.load_state_dict(state)  # the order is that of 64
        assert (len(loader), loader.plan.num_left_out) == (42, 6)
        assert [record for step in loader for record in records_of(step)] == order_of(300, 64, shuffle)[:294]


@pytest.mark.parametrize("name", ["few.h5", "few.npy"])
def test_fewer_windows_than_one_batch_are_an_epoch_unless_they_are_left_out(name, folder):
    path = stream_of(folder / name, 300)
    how = {"batch_size": 301, "seq_len": S, "targets": True, **ALONE}
    is_refused(
        ArgumentError, lambda: Loader(path, **how), match="300 records are too few for 1 rank with batches of 301"
    )
    for last, shape in {"fill": 301, "short": 300, "masked": 301}.items():
        with Loader(path, last=last, **how) as loader:
            steps = list(loader)
            assert [len(inputs) for inputs, _ in steps] == [shape]
            assert records_of(steps[0])[:300] == list(range(300))
            state = loader.state_dict()
        with Loader(path, **{**how, "batch_size": 50}) as loader:
            loader.load_state_dict({**state, "position": 250})
            assert [records_of(step) for step in loader] == [list(range(250, 300))]


def test_records_of_another_program_that_fill_no_batch_are_read(folder):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "foreign.h5", "w") as file:
        file["ids"] = np.arange(10 * S).reshape(10, S)
    how = reading({"dataset": "ids", "batch_size": 4, "last": "short", "shuffle": "sequential", **ALONE})
    with Loader(folder / "foreign.h5", **how) as loader:
        found = list(loader)
        assert torch.equal(torch.cat(found), torch.arange(10 * S).reshape(10, S))
        assert [len(batch) for batch in found] == [4, 4, 2]
        assert len(loader.records()) == 10
        copied = pickle.loads(pickle.dumps(loader.dataset()))  # as a worker by spawn gets it
        assert len(copied) == len(found)
        assert all(torch.equal(copied[step], found[step]) for step in range(len(found)))


# --- each record as often as it should be ------------------------------------------------------------------------
CASES = list(itertools.product((1, 2, 3, 5, 8, 11, 13), (1, 2, 3, 5, 8, 14), (1, 2, 3), SHUFFLES))


def require_epochs(stack, source, num_records, batch_size, world_size, shuffle):
    """Compare an epoch for each value of `last` with the slow way, and those that go on from each of its steps."""
    order, reader = order_of(num_records, batch_size, shuffle), windows(stack, source, batch_size)
    for last in LASTS:
        expected = steps_of(order, 0, batch_size, world_size, last)
        how = {"shuffle": shuffle, "last": last}
        if not expected:
            with pytest.raises(ArgumentError, match="too few"):
                world(stack, reader, world_size, **how)
            continue
        loaders = world(stack, reader, world_size, **how)
        assert steps_in(loaders) == expected
        assert {len(loader) for loader in loaders} == {len(expected)}
        assert {loader.plan.num_left_out for loader in loaders} == {
            max(0, num_records - loaders[0].plan.step * len(expected))
        }
        for rank, loader in enumerate(loaders):
            items = loader.dataset()
            assert [records_of(items[step]) for step in range(len(items))] == [step[rank] for step in expected]
        counts = Counter(record for step in expected for part in step for record in part)
        assert last == "drop" or set(counts) == set(range(num_records))
        assert last not in ("short", "masked") or set(counts.values()) == {1}


@pytest.mark.parametrize("part", range(16))
@pytest.mark.thin
def test_each_record_comes_as_often_as_the_end_of_the_epoch_says(part, folder):
    for num_records, batch_size, world_size, shuffle in CASES[part::16]:
        path = stream_of(folder / f"{num_records}.h5", num_records)
        with contextlib.ExitStack() as stack:
            require_epochs(stack, path, num_records, batch_size, world_size, shuffle)


@examples(60)
@given(
    num_records=st.integers(1, 40), batch_sizes=st.tuples(*[st.integers(1, 9)] * 3),
    worlds=st.tuples(*[st.integers(1, 4)] * 3), shuffle=st.sampled_from(SHUFFLES),
    lasts=st.tuples(*[st.sampled_from(["fill", "short", "masked"])] * 3), data=st.data(),
)  # fmt: skip
def test_a_resume_at_any_step_reads_each_remaining_window_once(
    num_records, batch_sizes, worlds, shuffle, lasts, data, folder
):
    """Three runs share an epoch, each with ranks, a batch size and a last step of its own."""
    path = stream_of(folder / f"{num_records}.h5", num_records)
    order = order_of(num_records, batch_sizes[0], shuffle)
    state = None
    position = 0
    for turn in range(3):
        how = (batch_sizes[turn], worlds[turn], lasts[turn])
        expected = steps_of(order, position, *how)
        count = len(expected) if turn == 2 else data.draw(st.integers(0, len(expected)))
        with contextlib.ExitStack() as stack:
            reader = windows(stack, path, batch_sizes[turn])
            loaders = world(stack, reader, worlds[turn], shuffle=shuffle, last=lasts[turn])
            for loader in loaders if state else ():
                loader.load_state_dict(state)
            if count:
                assert steps_in(loaders, count) == expected[:count]
            position = min(num_records, position + count * batch_sizes[turn] * worlds[turn])
            states = [loader.state_dict() for loader in loaders]
        state = states[0]
        assert states.count(state) == worlds[turn]
        assert state["position"] == position
        assert "last" not in state
    assert position == num_records


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.thin
def test_every_step_of_an_epoch_is_where_another_run_goes_on(last, shuffle, folder):
    path, order = stream_of(folder / "23.h5", 23), order_of(23, 3, shuffle)
    with contextlib.ExitStack() as stack:
        readers = {batch_size: windows(stack, path, batch_size) for batch_size in (1, 2, 3, 5)}
        loaders, states = world(stack, readers[3], 2, shuffle=shuffle, last=last), []
        ranks = [iter(loader) for loader in loaders]
        for _ in range(len(loaders[0])):
            states.append(loaders[0].state_dict())
            for steps in ranks:
                next(steps)
        for (number, state), other, batch_size in itertools.product(enumerate(states), (1, 3), (1, 2, 5)):
            assert state["position"] == 6 * number
            resumed = world(stack, readers[batch_size], other, shuffle=shuffle, last="short")
            for loader in resumed:
                loader.load_state_dict(state)
            found = [record for step in steps_in(resumed) for part in step for record in part]
            assert sorted(found) == sorted(order[6 * number :])


def test_skipped_positions_are_no_records_of_the_last_step(folder):
    path, order = stream_of(folder / "23.h5", 23), order_of(23, 5, "global")
    skip = [(0, 3, 9), (0, 21, 22)]
    left = order[:3] + order[9:21] + order[22:]
    for last in LASTS:
        with contextlib.ExitStack() as stack:
            loaders = world(stack, path, 2, batch_size=3, seq_len=S, skip=skip, last=last)
            for loader in loaders:
                state = Loader(path, batch_size=5, seq_len=S, targets=True, **ALONE)
                loader.load_state_dict(stack.enter_context(state).state_dict())
            assert steps_in(loaders) == steps_of(left, 0, 3, 2, last)
            if last != "drop":
                assert loaders[0].state_dict()["position"] == 23


# --- values besides the tokens, and every way of reading ----------------------------------------------------------
LENGTHS = [5, 17, 3, 8, 40, 1, 1, 22, 9, 30, 13]  # of documents
L = 8  # tokens of a record
EVERYTHING = {"targets": True, "fields": ("number", "pair"), "documents": ALL, "spans": True}


@pytest.fixture(scope="module")
def noted(tmp_path_factory):
    """A stream with fields, documents and spans, and two shards of batches of 4 records of it, which have padding."""
    folder = tmp_path_factory.mktemp("noted")
    make_stream(folder / "stream.h5", LENGTHS)
    size = {"batch_size": 4, "seq_len": L, "pad_id": 0, "workers": 1}
    convert(folder / "stream.h5", "hdf5", folder / "store", packing="best-fit", shuffle=False, shards=2, **size)
    return folder


def values_of(step, number):
    """Return all values of one row of a step, the segments in it, and the span of each token."""
    tokens, edges = step["tokens"], step["cu_seqlens"].tolist()
    first, end = number * tokens.shape[1], (number + 1) * tokens.shape[1]
    segments = zip(edges, edges[1:], step["documents"].tolist(), step["seq_lens"].tolist(), strict=False)
    spans = [step["spans"][place] if place >= 0 else None for place in step["span_index"][number].tolist()]
    return (
        {name: step[name][number].tolist() for name in ("tokens", "targets", "number", "pair", "position_ids")},
        [place < 0 for place in step["document_ids"][number].tolist()],
        [(start - first, stop - first, *facts) for start, stop, *facts in segments if first <= start < stop <= end],
        spans,
    )


PADDING = (
    {"tokens": [0] * L, "targets": [-100] * L, "number": [0] * L, "pair": [[0, 0]] * L, "position_ids": [*range(L)]},
    [True] * L,
    [(0, L, -1, L)],
    [None] * L,
)


def opened(folder, name, **options):
    shape = {"batch_size": 4, "seq_len": L} if name == "stream.h5" else {}
    return Loader(folder / name, **{**shape, "shuffle": "global", **EVERYTHING, **options})


@pytest.mark.parametrize("name", ["stream.h5", "store"])
@pytest.mark.parametrize("last", ["fill", "short", "masked"])
@pytest.mark.parametrize("batch_size", [4, 3, 7, 50])
@pytest.mark.thin
def test_rows_have_the_values_of_their_records_and_the_others_are_padding(name, last, batch_size, noted):
    with opened(noted, name, shuffle="sequential", batch_size=1, rank=0, world_size=1) as one:
        rows = [values_of(step, 0) for step in one]
        assert len(rows) == one.num_records
    with opened(noted, name, rank=0, world_size=1) as loader:
        state, order = loader.state_dict(), loader.plan.indices(np.arange(loader.num_records)).tolist()
    assert sorted(order) == list(range(len(rows)))
    for world_size in (1, 3):
        for rank in range(world_size):
            how = {"batch_size": batch_size, "last": last, "rank": rank, "world_size": world_size}
            with opened(noted, name, **how) as loader:
                loader.load_state_dict(state)
                for step, expected in zip(loader, steps_of(order, 0, batch_size, world_size, last), strict=True):
                    expected = [rows[record] for record in expected[rank]]
                    padding = [PADDING] * (batch_size - len(expected)) if last == "masked" else []
                    assert len(step["tokens"]) == len(expected) + len(padding)
                    assert [values_of(step, row) for row in range(len(step["tokens"]))] == expected + padding
                    assert step["cu_seqlens"][-1] == step["tokens"].numel()
                    assert step["max_seqlen"] == max(np.diff(step["cu_seqlens"]), default=0)


WAYS = {
    "h5py": {"access": "h5py"},
    "pread": {"access": "pread"},
    "checked": {"verify": "batch"},
    "prefetch": {"prefetch": 3},
    "int32": {"dtype": torch.int32},
    "capacity": {"documents": [("cu_seqlens", 64)]},
    "masked documents": {"mask_documents": [4, 7]},
    "skip": {"skip": [(0, 2, 5)]},
    "tokens": {"documents": False, "fields": (), "spans": False},
    "tokens, int32": {"documents": False, "fields": (), "spans": False, "dtype": torch.int32},
    "tokens, prefetch": {"documents": False, "fields": (), "spans": False, "prefetch": 2, "access": "pread"},
    "fields": {"documents": False, "spans": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["stream.h5", "store"])
@pytest.mark.parametrize("last", ["fill", "short", "masked"])
@pytest.mark.thin
def test_every_way_of_reading_ends_an_epoch_alike(way, name, last, noted, thinned, tmp_path):
    """Blocks of steps against steps that are read by their numbers, and both against a loader of one row."""
    for rank in thinned((2, 1, 0), 3):
        how = {**WAYS[way], "last": last, "rank": rank, "world_size": 3}
        with opened(noted, name, **how) as loader:
            found = taken(loader, len(loader))
            requests = list(loader.plan.requests_from(0))
            assert_same(taken(map(loader.steps.read, requests), len(requests)), found)
            items = loader.dataset()
            assert_same(taken((items[step] for step in range(len(items))), len(items)), found)
            loaded = (tuple(step) if isinstance(step, list) else step for step in DataLoader(items, batch_size=None))
            assert_same(taken(loaded, len(items)), found)
            plain = {"capacity": {}, "int32": {}, "tokens, int32": {}}.get(way)
        if plain is None:
            with opened(noted, name, **{**how, "access": "h5py", "prefetch": 0, "verify": "none"}) as loader:
                assert_same(taken(loader, len(loader)), found)
        with opened(noted, name, cache=tmp_path / "cache", **how | {"verify": "auto", "access": "auto"}) as loader:
            assert_same(taken(loader, len(loader)), found)


@pytest.mark.parametrize("last", ["short", "masked"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*set_vital:UserWarning")
@pytest.mark.thin
def test_workers_of_a_data_loader_end_an_epoch_alike(last, noted):
    with opened(noted, "stream.h5", last=last, rank=2, world_size=3) as loader:
        found = taken(loader, len(loader))
        source = DataLoader(loader.dataset(), batch_size=None, num_workers=2)
        assert_same(taken(source, len(loader)), found)
        stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        for workers in (0, 2):
            source = stateful(loader.dataset(), batch_size=None, num_workers=workers)
            steps = iter(source)
            taken(steps, len(loader) - 1)
            state = source.state_dict()
            del steps, source
            resumed = stateful(loader.dataset(), batch_size=None, num_workers=workers)
            resumed.load_state_dict(state)
            assert_same(taken(resumed, 1), found[-1:])


def test_targets_alone_are_masked_in_the_dtype_of_the_tokens(folder):
    path = stream_of(folder / "23.h5", 23)
    for dtype in (torch.int64, torch.int32):
        with Loader(path, batch_size=6, seq_len=S, targets=True, last="masked", dtype=dtype, **ALONE) as loader:
            steps = list(loader)
            assert {part.dtype for step in steps for part in step} == {dtype}
            assert [tuple(inputs.shape) for inputs, _ in steps] == [(6, S)] * 4
            assert steps[-1][1][5:].tolist() == [[-100] * S]
            assert steps[-1][0][5:].tolist() == [[0] * S]


def test_a_follower_ends_with_its_store_as_any_loader(tmp_path):
    tokens = np.arange(5 * 2 * S).reshape(5, 2, S)
    with open_writer(tmp_path / "store", batch_size=2, seq_len=S, live=True, shard_batches=4) as writer:
        writer.write(tokens[:3])
        how = {"batch_size": 4, "targets": True, "rank": 0, "world_size": 1}
        with FollowingLoader(tmp_path / "store", last="short", **how) as loader:
            steps = iter(loader)
            found = [next(steps)]
            writer.write(tokens[3:])
            writer.finish()
            found += steps
        assert [len(inputs) for inputs, _ in found] == [4, 4, 2]
        rows = torch.cat([inputs for inputs, _ in found])
        np.testing.assert_array_equal(rows, tokens.reshape(-1, S)[:, :-1])
    with FollowingLoader(tmp_path / "store", last="masked", **how) as loader:
        assert [(targets != -100).all(1).sum() for _, targets in loader] == [4, 4, 2]


@pytest.mark.parametrize("last", ["short", "masked", "fill"])
def test_a_follower_of_a_finished_stream_counts_its_rest(last, folder):
    path = stream_of(folder / "23.h5", 23)
    how = {"batch_size": 6, "seq_len": S, "targets": True, "last": last, "rank": 0, "world_size": 1}
    with FollowingLoader(path, **how) as loader:
        assert [record for step in loader for record in records_of(step)][:23] == list(range(23))
        assert loader.state_dict()["position"] == 23
        loader.load_state_dict(loader.state_dict() | {"position": 20})
        assert [records_of(step)[:3] for step in loader] == [[20, 21, 22]]


def test_values_that_make_no_sense_are_refused(folder, noted):
    path = stream_of(folder / "23.h5", 23)
    how = {"batch_size": 2, "seq_len": S, **ALONE}
    is_refused(
        ArgumentError, lambda: Loader(path, last="all", **how), match="last must be one of drop, fill, short, masked"
    )
    is_refused(ArgumentError, lambda: Loader(path, last="masked", **how), match="needs targets=True")
    sources = {"a": path, "b": path}
    mixed = lambda: MixedLoader(sources, {"a": 1, "b": 1}, last="short", batch_size=2, seq_len=S)  # noqa: E731
    is_refused(ArgumentError, mixed, match="a mixture has no last")


def test_a_batch_size_that_changes_ends_the_epoch_with_the_rest_of_the_new_one(folder):
    path, order = stream_of(folder / "23.h5", 23), order_of(23, 6, "global")
    for last, sizes in {"drop": [6, 6, 4, 4], "short": [6, 6, 4, 4, 3], "masked": [6, 6, 4, 4, 3]}.items():
        found = []
        with Loader(path, batch_size=6, seq_len=S, targets=True, last=last, **ALONE) as loader:
            for step in loader:
                found.append(records_of(step))
                if len(found) == 2:
                    loader.set_batch_size(4)
            assert list(map(len, found)) == sizes
            assert list(itertools.chain.from_iterable(found)) == order[: sum(sizes)]
            assert loader.plan.num_left_out == (3 if last == "drop" else 0)
