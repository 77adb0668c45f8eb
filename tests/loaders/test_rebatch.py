"""Any batch size, any row, any sequence length that divides: the loader against plain numpy indexing."""

import json

import numpy as np
import pytest
import torch
from contents import write_batches, write_stream
from contract import is_refused
from hypothesis import given
from hypothesis import strategies as st
from reading import begun, ordered

from examples import examples
from zb_hdf5 import ArgumentError, Loader, StateError, open_reader

NUM_BATCHES = 40
BATCH_SIZE = 8
SEQ_LEN = 64
ALONE = {"rank": 0, "world_size": 1}
TOKENS = np.random.default_rng(5).integers(0, 50_000, (NUM_BATCHES, BATCH_SIZE, SEQ_LEN), dtype=np.uint32)


@pytest.fixture(scope="module", params=["hdf5-mmap", "hdf5-pread", "hdf5-h5py", "batch-mmap", "batch-pread"])
def opened(request, tmp_path_factory):
    backend, access = request.param.split("-")
    path = tmp_path_factory.mktemp("rebatch") / {"hdf5": "t.h5", "batch": "t.batch"}[backend]
    write_batches(path, TOKENS)
    with open_reader(path, access=access) as reader:
        yield reader


def epoch_of(reader, world_size, **options):
    """Return the tokens of an epoch in global order: step by step, rank by rank."""
    loaders = [Loader(reader, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    steps = list(zip(*(list(loader) for loader in loaders), strict=True))
    assert len(steps) == len(loaders[0])
    return torch.cat([batch for step in steps for batch in step]).numpy(), loaders[0]


@pytest.mark.parametrize("shuffle", ["global", "records", "block", "sequential"])
@pytest.mark.parametrize("batch_size", [8, 5, 24, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 16))])
@pytest.mark.parametrize("seq_len", [64, 16])
@pytest.mark.parametrize(("world_size", "prefetch"), [(3, 0), (2, 3), pytest.param(1, 0, marks=pytest.mark.slow)])
@pytest.mark.thin
def test_every_shape_yields_the_records_of_its_order(opened, shuffle, batch_size, seq_len, world_size, prefetch):
    options = {"shuffle": ordered(shuffle, 7), "batch_size": batch_size, "seq_len": seq_len, "prefetch": prefetch}
    found, loader = epoch_of(opened, world_size, **options)
    require_order(found, loader, seq_len)
    left_out = TOKENS.reshape(-1, seq_len).shape[0] - len(found)
    assert 0 <= left_out < batch_size * world_size


@examples(40)
@given(
    ramp=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=5),
    shuffle=st.sampled_from(["global", "records", "sequential"]),
    prefetch=st.sampled_from([0, 2]),
)
def test_batch_size_ramp_skips_and_repeats_nothing_across_resumes(ramp, shuffle, prefetch, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "ramp.batch"
    if not path.exists():
        write_batches(path, TOKENS)
    with open_reader(path) as reader:
        how = {"shuffle": shuffle, "prefetch": prefetch, **ALONE}
        seen, state = [], Loader(reader, **how).state_dict()
        for batch_size, steps in ramp:
            loader = Loader(reader, **how)
            loader.load_state_dict(json.loads(json.dumps(state)))
            loader.set_batch_size(batch_size)
            iterator = iter(loader)
            for _ in range(steps):
                seen.append(next(iterator))
                loader.set_batch_size(batch_size)
            iterator.close()
            state = loader.state_dict()
        found = torch.cat(seen).numpy()
        require_order(found, loader)
        assert state["position"] == len(found)


def test_batch_size_changes_in_the_middle_of_an_iteration_and_the_last_step_is_filled_from_the_start(opened):
    loader = Loader(opened, batch_size=4, prefetch=4, **ALONE)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch)
        if number == 4:
            loader.set_batch_size(10)
    assert {len(batch) for batch in seen[:5]} == {4}
    assert {len(batch) for batch in seen[5:]} == {10}
    require_order(torch.cat(seen).numpy(), loader)
    found, loader = epoch_of(opened, 3, shuffle="records", batch_size=7, drop_last=False)
    assert len(found) >= loader.num_records
    require_order(found, loader)


def test_impossible_shapes_and_states_and_records_of_other_lengths_are_refused(opened, tmp_path):
    sizes = {"seq_len": 48}, {"batch_size": 10**6}, {"batch_size": -1}
    for options in (*sizes, {"prefetch": -1}, {"prefetch": "much"}, {"dtype": torch.float32}):
        with pytest.raises(ArgumentError):
            Loader(opened, **ALONE, **options)
    loader = Loader(opened, **ALONE)
    is_refused(ArgumentError, lambda: loader.set_batch_size(0), match="batch_size must be at least 1, found 0")
    state = Loader(opened, seq_len=16, **ALONE).state_dict()
    loader = Loader(opened, **ALONE)
    is_refused(StateError, lambda: loader.load_state_dict(state), match="seq_len")
    loader.load_state_dict(state | {"position": 8}, force=True)
    assert loader.state_dict()["position"] == 8
    write_batches(tmp_path / "x.h5", np.zeros((2, 2, 8), np.int64))
    with Loader(tmp_path / "x.h5", seq_len=4, **ALONE) as loader, pytest.raises(ArgumentError, match="of 8 tokens"):
        loader.records()


def require_order(found, loader, seq_len=SEQ_LEN):
    """Compare an epoch, as far as it goes, with the records of the order of a loader, which begins again at its end."""
    positions = np.arange(len(found)) % loader.num_records
    expected = TOKENS.reshape(-1, seq_len)[loader.plan_of_epoch(0).indices(positions)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}])
def test_targets_are_the_records_shifted_by_one(options, opened):
    loader = Loader(opened, targets=True, **ALONE, **options)
    dataset = loader.dataset()
    plain = Loader(opened, **ALONE, **options)
    for number, ((x, y), batch) in enumerate(zip(loader, plain, strict=True)):
        assert torch.equal(x, batch[:, :-1])
        assert torch.equal(y, batch[:, 1:])
        assert all(map(torch.equal, dataset[number], (x, y)))


def test_int32_equals_int64_and_get_batch_goes_on_for_ever_through_the_epochs(opened):
    before = opened.path.read_bytes()
    narrow = Loader(opened, dtype=torch.int32, **ALONE)
    wide = Loader(opened, **ALONE)
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == torch.int32
        assert torch.equal(a.long(), b)
    batch = opened.read_batch_int32(3)
    assert (batch.data_ptr() == opened.read_batch_int32(3).data_ptr()) is (opened.access == "mmap")
    batch.zero_()
    assert opened.path.read_bytes() == before
    np.testing.assert_array_equal(opened.read_batch(3), TOKENS[3])
    loader = Loader(opened, **ALONE)
    found = [loader.get_batch() for _ in range(2 * NUM_BATCHES + 3)]
    expected = [batch for epoch in range(3) for batch in begun(Loader(opened, **ALONE), epoch)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=False))
    assert loader.state_dict()["epoch"] == 2
    resumed = Loader(opened, **ALONE)
    resumed.load_state_dict(loader.state_dict())
    assert torch.equal(resumed.get_batch(), loader.get_batch())


def test_a_hundred_thousand_ranks_share_without_a_cluster(opened):
    """Every rank's first step, without a process per rank: rank r of any world takes the r-th part of each step."""
    for world_size in (1, 7, NUM_BATCHES):
        firsts = [
            Loader(opened, rank=r, world_size=world_size).plan.requests_of_steps(np.array([0]))[0]
            for r in range(world_size)
        ]
        assert len(set(firsts)) == world_size
    records = NUM_BATCHES * BATCH_SIZE * SEQ_LEN
    for rank in (0, 1, 99_999):
        loader = Loader(opened, rank=rank, world_size=100_000, batch_size=1, seq_len=1, drop_last=False)
        assert len(loader) == -(-records // 100_000)
        first = loader.plan.requests_of_steps(np.array([0]))[0]
        assert first.tolist() == loader.plan_of_epoch(0).indices(np.array([rank % records])).tolist()


def test_a_stream_that_was_verified_stays_so_with_another_batch_size(tmp_path):
    write_stream(tmp_path / "s.h5", np.arange(640), [640], dtype="uint16")
    with Loader(tmp_path / "s.h5", batch_size=2, seq_len=16, **ALONE) as loader:
        state = loader.state_dict()
    with Loader(tmp_path / "s.h5", batch_size=4, seq_len=16, verify="store", **ALONE) as loader:
        loader.load_state_dict(state)
        assert (loader.batches.batch_size, loader.batches.verified) == (2, "store")
