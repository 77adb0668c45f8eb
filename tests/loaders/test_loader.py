"""The loader: which rank sees which batch when, and that a stop is never noticed."""

import contextlib
import gc
import itertools
import json
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from contents import write_batches, write_stream
from contract import SAME_EPOCH, is_refused
from hypothesis import given
from hypothesis import strategies as st
from reading import begun, ordered

from examples import examples
from zb_hdf5 import ArgumentError, BatchNativeLoader, Loader, StateError, ZbError, open_reader, open_writer
from zb_hdf5.converters.arguments import convert
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.loaders.order import SHUFFLES, GlobalOrder, make_order, resolve_rank
from zb_hdf5.store.rebuild import add_crc32_file

B, S = 2, 4
N = 23
RECORDS = N * B
BLOCK = 5
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
SRUN = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}


def tokens_of(count):
    """Record r begins with token r * S."""
    return np.arange(count * B * S, dtype="<u4").reshape(count, B, S)


def rows(batch):
    """Return which records these are, having checked that they are exactly those."""
    records = batch[:, 0] // S
    assert torch.equal(batch, records[:, None] * S + torch.arange(S))
    return tuple(records.tolist())


def epoch_of(loader, steps=None):
    """Return the records of each batch of an epoch, or of its first `steps`; of none it makes no iterator."""
    return [] if steps == 0 else [rows(batch) for batch in itertools.islice(loader, steps)]


def flat(batches):
    return [record for batch in batches for record in batch]


def interleave(per_rank):
    """Return the global sequence: what all ranks together consumed, in order of position."""
    assert len({len(batches) for batches in per_rank}) == 1, "ranks make unequal numbers of steps"
    return flat(batch for step in zip(*per_rank, strict=True) for batch in step)


def order_of(count, shuffle, seed=42, epoch=0):
    order = make_order(shuffle, count, records_per_batch=B, seed=seed, epoch=epoch, block_size=BLOCK)
    if shuffle == "records":
        return order.indices(np.arange(count * B)).tolist()
    return [batch * B + row for batch in order.indices(np.arange(count)).tolist() for row in range(B)]


def batches_of(count, shuffle, **options):
    """Return the same as `epoch_of` for one rank: the order, cut into batches."""
    order = order_of(count, shuffle, **options)
    return [tuple(order[start : start + B]) for start in range(0, count * B, B)]


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    """The machine's own job variables are not the test's."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The same N batches in every backend, as one file and as shards."""
    folder = tmp_path_factory.mktemp("stores")
    for name in ("one.batch", "one.h5"):
        write_batches(folder / name, tokens_of(N))
    for backend, target in (("hdf5", "batch"), ("batch", "hdf5")):
        source = StoreSource(folder / f"one.{'h5' if backend == 'hdf5' else 'batch'}", backend)
        convert(source, target, folder / f"{target}-shards", shards=4)
    return {path.name: path for path in folder.iterdir()}


PLACES = ("one.batch", "one.h5", "batch-shards", "hdf5-shards")


@pytest.fixture
def open_loader():
    """Return `Loader` with small blocks and one rank; everything is closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_one(path, **options):
            options = {
                "rank": 0,
                "world_size": 1,
                **options,
                "shuffle": ordered(options.get("shuffle", "global"), BLOCK),
            }
            return stack.enter_context(contextlib.closing(Loader(path, **options)))

        yield open_one


def ranks(open_loader, path, world_size, **options):
    return [open_loader(path, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


# --- one epoch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("world_size", [*range(1, 9), N, N + 1, 2 * N + 3])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.thin
def test_ranks_share_an_epoch_that_ends_with_or_is_filled_up_from_its_start(
    shuffle, world_size, drop_last, stores, open_loader
):
    options = {"shuffle": shuffle, "drop_last": drop_last}
    if drop_last and world_size > N:
        with pytest.raises(ArgumentError, match=f"{RECORDS} records are too few for {world_size} ranks"):
            open_loader(stores["one.h5"], world_size=world_size, **options)
        return
    loaders = ranks(open_loader, stores["one.h5"], world_size, **options)
    per_rank = [epoch_of(loader) for loader in loaders]
    steps = N // world_size if drop_last else -(-N // world_size)
    assert [len(loader) for loader in loaders] == [len(found) for found in per_rank] == [steps] * world_size
    order = order_of(N, shuffle)
    assert interleave(per_rank) == [order[position % RECORDS] for position in range(steps * world_size * B)]


def test_impossible_arguments_are_named_and_a_store_without_batches_is_an_error(stores, tmp_path, open_loader):
    for options, name in (
        ({"shuffle": "random"}, "shuffle"), ({"verify": "all"}, "verify"),
        ({"shuffle": ("block", 0)}, "block_size"), ({"access": "fast"}, "access"),
        ({"backend": "zarr"}, "backend"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=name):
            open_loader(stores["one.h5"], **options)
    with open_writer(tmp_path / "empty.h5", batch_size=B, seq_len=S):
        pass
    for drop_last in (True, False):
        with pytest.raises(ArgumentError, match="too few"):
            open_loader(tmp_path / "empty.h5", drop_last=drop_last)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_blocks_of_the_order_join_without_a_seam(shuffle, stores, open_loader, monkeypatch):
    monkeypatch.setattr("zb_hdf5.loaders.order.FIRST_BLOCK", 1)
    monkeypatch.setattr("zb_hdf5.loaders.order.LAST_BLOCK", 3)
    for world_size in (1, 2, 5):
        per_rank = [epoch_of(loader) for loader in ranks(open_loader, stores["one.h5"], world_size, shuffle=shuffle)]
        assert interleave(per_rank) == order_of(N, shuffle)[: (N - N % world_size) * B]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_same_seed_is_the_same_epoch_in_every_backend_and_another_seed_or_epoch_another(
    shuffle, world_size, stores, open_loader
):
    found = [
        [
            epoch_of(begun(loader, 3))
            for loader in ranks(open_loader, stores[place], world_size, shuffle=shuffle, seed=7)
        ]
        for place in PLACES
    ]
    assert found.count(found[0]) == len(PLACES)
    assert interleave(found[0]) == order_of(N, shuffle, 7, 3)[: (N - N % world_size) * B]
    orders = [
        epoch_of(begun(open_loader(stores["one.h5"], shuffle=shuffle, seed=seed), epoch))
        for seed, epoch in ((1, 0), (1, 1), (6, 0), (6, 3))
    ]
    assert len(set(map(tuple, orders))) == (1 if shuffle == "sequential" else len(orders))
    assert all(sorted(flat(order)) == list(range(RECORDS)) for order in orders)


@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
def test_set_epoch_begins_an_epoch_and_iterating_again_repeats_it(stores, open_loader):
    loader = open_loader(stores["one.h5"])
    for epoch in (1, 5, 0):
        loader.set_epoch(epoch)
        assert loader.epoch == epoch
        assert epoch_of(loader) == batches_of(N, "global", epoch=epoch)
    is_refused(ArgumentError, lambda: loader.set_epoch(-1), match="epoch")
    assert loader.epoch == 0
    assert epoch_of(loader) == epoch_of(loader) == batches_of(N, "global")
    epoch_of(loader, 4)
    assert epoch_of(loader) == batches_of(N, "global")


class RepeatingLoader:
    """The loader of DeepSpeed that begins again at the end: the same lines."""

    def __init__(self, loader):
        self.loader = loader
        self.data_iter = iter(self.loader)

    def __next__(self):
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_an_epoch_that_is_read_again_is_warned_of_once_unless_its_order_is_that_of_the_store(
    shuffle, stores, open_loader
):
    for steps in (None, RepeatingLoader):
        loader = open_loader(stores["one.h5"], shuffle=shuffle)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if steps is None:
                found = [epoch_of(loader) for _ in range(3)]
            else:
                repeated = RepeatingLoader(loader)
                found = [[rows(next(repeated)) for _ in range(N)] for _ in range(3)]
        assert found == [batches_of(N, shuffle)] * 3
        told = [(each.category, each.filename) for each in caught]
        assert told == ([] if shuffle == "sequential" else [(UserWarning, __file__)])
        for each in caught:
            assert str(each.message).startswith(
                f"{stores['one.h5']}: epoch 0 was read to its end, and is read again in"
            )
            assert "set_epoch(e)" in str(each.message)
            assert "get_batch()" in str(each.message)


def test_epochs_that_are_read_once_are_not_warned_of(stores, open_loader):
    """Warnings are errors here."""
    loader = open_loader(stores["one.h5"])
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert epoch_of(loader) == batches_of(N, "global", epoch=epoch)
    for _ in range(2):  # after a state
        loader.load_state_dict(loader.state_dict() | {"position": 0})
        assert len(epoch_of(loader)) == N
    loader.set_epoch(0)
    for _ in range(3):  # a part of the epoch
        assert len(epoch_of(loader, 5)) == 5
    for _ in range(2):  # its steps as items, from a loader that has read them
        assert len(list(torch.utils.data.DataLoader(loader.dataset(), batch_size=None))) == N
    assert len(epoch_of(loader)) == N
    assert len(list(torch.utils.data.DataLoader(loader.dataset(), batch_size=None))) == N
    assert len(epoch_of(pickle.loads(pickle.dumps(loader)))) == N  # a copy has read nothing
    for _ in range(3 * N):
        loader.get_batch()
    assert loader.epoch == 3


# --- tensors and readers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", PLACES)
def test_batches_are_fresh_int64_tensors(place, stores, open_loader):
    first, second, *_ = list(open_loader(stores[place], shuffle="sequential"))
    for batch in (first, second):
        assert batch.dtype == torch.int64
        assert batch.shape == (B, S)
        assert batch.is_contiguous()
    first.zero_()
    assert rows(second) == (2, 3)


def test_a_reader_is_a_source_as_well_and_a_closed_loader_says_so(stores, open_loader):
    with open_reader(stores["one.h5"], access="pread") as reader:
        loader = open_loader(reader)
        assert loader.batches is reader
        assert epoch_of(loader) == batches_of(N, "global")
    loader = open_loader(stores["one.h5"])
    loader.close()
    is_refused(ZbError, lambda: next(iter(loader)), match="closed")


@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
def test_a_growing_file_does_not_change_a_running_epoch(tmp_path, open_loader, monkeypatch):
    real = GlobalOrder.indices

    def indices(self, positions):
        assert positions.max(initial=0) < self.n  # the walk through a cycle outside of 0..n-1 never ends
        return real(self, positions)

    monkeypatch.setattr(GlobalOrder, "indices", indices)
    with open_writer(tmp_path / "live.h5", batch_size=B, seq_len=S) as writer:
        writer.write(tokens_of(50)[:20])
        loader = open_loader(tmp_path / "live.h5.partial")
        iterator = iter(loader)
        found = [rows(next(iterator)) for _ in range(5)]
        writer.write(tokens_of(50)[20:])
        loader.batches.refresh()
        found += map(rows, iterator)
        assert sorted(flat(found)) == list(range(20 * B))
        again = epoch_of(loader)  # the same epoch: as it was, or of all that is there now
        assert sorted(flat(again)) in (list(range(20 * B)), list(range(50 * B)))
        loader.set_epoch(1)
        assert sorted(flat(epoch_of(loader))) == list(range(50 * B))


# --- ZeroBatch's own loader ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("block_size", "seed", "epoch"), [(5, 42, 0), (4, 1, 1), (1, 7, 2), (23, 0, 0), (100, 3, 9)])
def test_batch_native_loader_is_the_documented_block_shuffle(block_size, seed, epoch, stores):
    blocks = np.random.RandomState(seed ^ epoch).permutation(-(-N // block_size)).tolist()
    batches = [i for block in blocks for i in range(block * block_size, min((block + 1) * block_size, N))]
    with contextlib.closing(BatchNativeLoader(stores["one.batch"], block_size, True, seed, epoch)) as loader:
        assert len(loader) == N
        found = list(loader)
    assert [rows(batch) for batch in found] == [(B * number, B * number + 1) for number in batches]
    assert {batch.type() for batch in found} == {"torch.LongTensor"}


def test_batch_native_loader_has_zerobatch_defaults(stores, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # ZeroBatch's loader knows no ranks
    monkeypatch.setenv("WORLD_SIZE", "2")
    with contextlib.closing(BatchNativeLoader(stores["one.batch"])) as loader:
        assert (loader.block_size, loader.seed, loader.epoch, loader.shuffle) == (256, 42, 0, "block")
        assert sorted(flat(epoch_of(loader))) == list(range(RECORDS))
    with contextlib.closing(BatchNativeLoader(stores["one.batch"], shuffle=False)) as loader:
        assert epoch_of(loader) == batches_of(N, "sequential")


# --- state -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.thin
@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
def test_resuming_at_any_step_is_not_noticed(shuffle, drop_last, world_size, stores, open_loader):
    options = {"shuffle": shuffle, "drop_last": drop_last, "rank": world_size - 1, "world_size": world_size}
    loader = begun(open_loader(stores["one.h5"], **options), 4)
    expected = epoch_of(loader)
    for steps in range(len(loader) + 1):
        assert epoch_of(loader, steps) == expected[:steps]
        state = loader.state_dict() if steps else {**loader.state_dict(), "position": 0}
        resumed = open_loader(stores["one.h5"], **options)
        resumed.load_state_dict(state)
        if steps % 2:
            resumed.set_epoch(4)  # as a training loop does at the top of an epoch
        assert resumed.epoch == 4
        assert epoch_of(resumed) == expected[steps:]
        assert epoch_of(resumed) == expected  # and the next time around is a whole epoch
        resumed.set_epoch(5)
        assert interleave([epoch_of(resumed)]) != flat(expected) or shuffle == "sequential"


def test_a_run_over_epochs_that_stops_anywhere_sees_what_an_uninterrupted_one_sees(stores, open_loader, thinned):
    def train(loader, first_epoch, stop=None):
        seen = []
        for epoch in range(first_epoch, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                seen.append((epoch, rows(batch)))
                if len(seen) == stop:
                    return seen, json.dumps(loader.state_dict())
        return seen, json.dumps(loader.state_dict())

    whole, _ = train(open_loader(stores["one.h5"]), 0)
    assert len(whole) == 3 * N
    for stop in thinned(range(1, 3 * N + 1), 4):
        before, state = train(open_loader(stores["one.h5"]), 0, stop)
        resumed = open_loader(stores["one.h5"])
        resumed.load_state_dict(json.loads(state))
        after, _ = train(resumed, resumed.epoch)
        assert before + after == whole


def test_a_state_is_of_its_moment_until_another_epoch_begins(stores, open_loader):
    loaders = ranks(open_loader, stores["one.h5"], 3)
    for _ in zip(*loaders, strict=True):
        states = [loader.state_dict() for loader in loaders]
        assert states.count(states[0]) == 3
    loader = open_loader(stores["one.h5"])
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    next(iterator)
    assert (state["position"], loader.state_dict()["position"]) == (B, 2 * B)
    resumed = open_loader(stores["one.h5"])
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state  # before the first batch
    resumed.set_epoch(1)
    assert resumed.state_dict()["position"] == 0
    assert epoch_of(resumed) == batches_of(N, "global", epoch=1)


@examples(80)
@given(
    count=st.integers(1, 60),
    before=st.integers(1, 9),
    after=st.integers(1, 9),
    part=st.floats(0, 1),
    shuffle=st.sampled_from(SHUFFLES),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 5),
    drop_last=st.booleans(),
)
def test_any_stop_with_any_ranks_leaves_the_sequence_whole(
    many_batches, count, before, after, part, shuffle, seed, epoch, drop_last
):
    path, drop_last = many_batches(count), drop_last and count >= max(before, after)  # else there is no step
    options = {"shuffle": ordered(shuffle, BLOCK), "seed": seed, "drop_last": drop_last}
    order = order_of(count, shuffle, seed, epoch)
    with contextlib.ExitStack() as stack:

        def world(size, **more):
            loaders = [Loader(path, rank=rank, world_size=size, **options, **more) for rank in range(size)]
            for loader in loaders:
                stack.enter_context(contextlib.closing(loader))
                loader.set_epoch(epoch)
            return loaders

        first = world(before)
        steps = round(part * len(first[0]))
        found = interleave([epoch_of(loader, steps) for loader in first])
        states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
        assert states.count(states[0]) == before
        second = world(after)
        for loader in second:
            loader.load_state_dict(states[-1])
        found += interleave([epoch_of(loader) for loader in second])
    records = count * B
    assert found == [order[position % records] for position in range(len(found))]
    left = records - len(found)
    assert 0 <= left < max(before, after) * B if drop_last else 0 <= -left < max(before, after) * B


@pytest.fixture(scope="module")
def many_batches(tmp_path_factory):
    """Return `many_batches(count) -> path` of a store of so many batches."""
    folder = tmp_path_factory.mktemp("many")

    def make(count):
        path = folder / f"{count}.batch"
        if not path.exists():
            write_batches(path, tokens_of(count))
        return path

    return make


# --- states that fit, and states that do not -------------------------------------------------------------------
@pytest.mark.parametrize(("first", "second"), [("batch-shards", "hdf5-shards"), ("one.batch", "one.h5")])
@pytest.mark.parametrize("turned", [False, True])
def test_a_state_fits_the_same_tokens_in_the_other_backend(first, second, turned, stores, open_loader):
    first, second = (second, first) if turned else (first, second)
    if "one" in first:
        add_crc32_file(stores["one.batch"])
    how = {"verify": "store"} if "one" in first else {}  # a lone batch file has no other digest
    loader, other = open_loader(stores[first], **how), open_loader(stores[second], **how)
    before = epoch_of(loader, 9)
    other.load_state_dict(loader.state_dict())
    assert before + epoch_of(other) == batches_of(N, "global")


@pytest.mark.parametrize("place", PLACES)
def test_a_state_survives_another_access_and_moving_and_renaming_the_store(place, stores, tmp_path, open_loader):
    loader = open_loader(stores[place])
    epoch_of(loader, 3)
    assert loader.state_dict()["fingerprint"].startswith("sampled:") or place != "one.batch"  # which is good enough
    (tmp_path / place).symlink_to(stores[place])
    for other in (open_loader(tmp_path / place), open_loader(stores[place], access="pread")):
        other.load_state_dict(loader.state_dict())
        assert epoch_of(other) == batches_of(N, "global")[3:]


@pytest.mark.parametrize("suffix", [".h5", ".batch"])
def test_a_state_of_other_data_is_refused_and_a_sampled_fingerprint_with_the_way_out(
    suffix, stores, tmp_path, open_loader
):
    changed = tokens_of(N)
    changed[0, 0, 0] = 77
    write_batches(tmp_path / f"other{suffix}", changed)
    twin = stores["one.batch" if suffix == ".h5" else "one.h5"]
    for path, message in ((tmp_path / f"other{suffix}", "fingerprint"), (twin, r"fingerprint.*verify='store'")):
        with pytest.raises(StateError, match=message):
            open_loader(stores[f"one{suffix}"]).load_state_dict(open_loader(path).state_dict())


@pytest.mark.parametrize(("theirs", "ours", "field"), [
    ({"seed": 43}, {}, "seed"), ({"shuffle": "sequential"}, {}, "shuffle"), ({"shuffle": "block"}, {}, "shuffle"),
    ({"shuffle": ("block", 4)}, {"shuffle": "block"}, "block_size"),
])  # fmt: skip
def test_a_state_of_another_order_is_refused(theirs, ours, field, stores, open_loader):
    state, loader = open_loader(stores["one.h5"], **theirs).state_dict(), open_loader(stores["one.h5"], **ours)
    with pytest.raises(StateError, match=field) if field else contextlib.nullcontext():
        loader.load_state_dict(state)
    assert loader.state_dict() == open_loader(stores["one.h5"], **ours).state_dict()  # nothing was taken over


# --- which rank am I -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("environment", "expected"), [
    ({}, (0, 1)),
    ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
    (SRUN, (2, 4)),
    ({**SRUN, "SLURM_STEP_NUM_TASKS": "3"}, (2, 3)),
    ({"RANK": "3", "WORLD_SIZE": "8", **SRUN}, (3, 8)),
    ({"RANK": "3", **SRUN}, (2, 4)),
    ({"SLURM_NTASKS": "4"}, (0, 1)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (0, 1)),  # a batch script without srun: nobody reads the other half
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1)),
])  # fmt: skip
def test_the_environment_of_a_job_is_understood(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_rank(None, None) == expected


def test_torch_distributed_goes_before_the_environment_and_arguments_before_both(stores, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = {"is_available": True, "is_initialized": True, "get_rank": 1, "get_world_size": 4}
    for name, value in found.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert resolve_rank(None, None) == (1, 4)
    assert resolve_rank(1, 2) == (1, 2)
    with contextlib.closing(Loader(stores["one.h5"])) as loader:
        assert (loader.rank, loader.world_size) == (1, 4)
        assert epoch_of(loader) == batches_of(N, "global")[1 : N - N % 4 : 4]


@pytest.mark.parametrize(
    ("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (5, 3), (0, -1), ("", 2), ("x", 2), ("1.5", 2)]
)
def test_a_rank_outside_its_world_or_no_number_or_half_of_the_pair_is_an_error(rank, world_size, stores, monkeypatch):
    if isinstance(rank, int):
        is_refused(ArgumentError, lambda: resolve_rank(rank, world_size), match="rank")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    is_refused(ArgumentError, lambda: resolve_rank(None, None), match="rank" if isinstance(rank, int) else "RANK")
    for half in ((0, None), (None, 2)):
        for make in (resolve_rank, lambda rank, size: Loader(stores["one.h5"], rank=rank, world_size=size)):
            with pytest.raises(ArgumentError, match="both rank and world_size"):
                make(*half)


def test_a_loader_shows_where_it_stands(tmp_path):
    write_batches(tmp_path / "t.h5", np.zeros((5, 4, 8), np.uint32))
    with Loader(tmp_path / "t.h5", rank=0, world_size=2) as loader:
        next(loader)
        assert repr(loader) == (
            f"Loader({str(tmp_path / 't.h5')!r}, batch_size=4, seq_len=8, shuffle='global', seed=42, epoch=0, "
            "position=8, rank=0, world_size=2, num_records=20, last='drop', left_out=4)"
        )


@pytest.mark.parametrize("options", [{}, {"shuffle": "records"}, {"targets": True}, {"prefetch": 2}, {"batch_size": 3}])
@pytest.mark.parametrize("kind", ["batches", "stream"])
def test_a_loader_that_is_closed_is_freed_without_a_collection_of_garbage(kind, options, tmp_path):
    """It has the index of all shards; closed ones would also be counted among those that have open files."""
    tokens = tokens_of(N)
    if kind == "batches":
        write_batches(tmp_path / "a.h5", tokens)
    else:
        write_stream(tmp_path / "a.h5", tokens.reshape(-1))
        options = {"batch_size": B, "seq_len": S, **options}
    gc.collect()
    gc.disable()
    try:
        with Loader(tmp_path / "a.h5", rank=0, world_size=1, **options) as loader:
            for _ in loader:
                pass
        corpus = weakref.ref(loader.batches.corpus)
        del loader, _
        assert corpus() is None
    finally:
        gc.enable()
