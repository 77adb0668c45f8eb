"""Loaders over objects: many reads under way, in order, and in any process."""

import numpy as np
import pytest
import torch
from contents import write_stream
from contract import SAME_EPOCH, assert_same, check_loader, is_refused, random_tokens, taken
from reading import ordered
from torch.utils.data import DataLoader

from zb_hdf5 import Loader


@pytest.fixture
def web_store(web, write_store):
    """Return (local folder, proxy, url) of 40 batches of 64 KiB in 3 shards, with ids that int32 holds."""
    write_store(web.folder / "store", random_tokens(40, 16, 1024) >> 1, (7, 30))
    return web.folder / "store", web, f"{web.url}/store"


def assert_same_epochs(found, expected):
    for step, other in zip(found, expected, strict=True):
        assert torch.equal(step, other)


@pytest.mark.parametrize("shuffle", ["global", "records", "block", "sequential"])
@pytest.mark.parametrize("prefetch", ["auto", 0, 3])
@pytest.mark.thin
def test_every_order_yields_what_a_local_store_yields(served, write_store, tokens, shuffle, prefetch):
    write_store(served.folder / "store", tokens, (2, 5))
    options = {"shuffle": ordered(shuffle, 2), "rank": 0, "world_size": 1}
    far = f"{served.url}/store"
    with Loader(far, prefetch=prefetch, **options) as loader, Loader(served.folder / "store", **options) as local:
        assert_same_epochs(loader, local)
        loader.set_epoch(1), local.set_epoch(1)
        assert_same_epochs(loader, local)


def test_the_duties_of_a_loader(served, write_store):
    write_store(served.folder / "store", random_tokens(12, 2, 8), (5,))
    check_loader(lambda **options: Loader(f"{served.url}/store", seed=3, **options))


def test_other_shapes_targets_and_dtypes(web_store):
    local, _, url = web_store
    options = {"batch_size": 24, "seq_len": 512, "dtype": torch.int32, "targets": True}
    with Loader(url, **options) as loader, Loader(local, **options) as expected:
        for (x, y), (a, b) in zip(loader, expected, strict=True):
            assert torch.equal(x, a)
            assert torch.equal(y, b)


@pytest.mark.parametrize("last", ["fill", "short", "masked"])
@pytest.mark.thin
def test_the_last_step_is_that_of_a_local_store(web, last):
    write_stream(web.folder / "s.h5", np.arange(23 * 16 + 1), [100, 269], chunk_tokens=64)
    for rank in range(3):
        options = {"batch_size": 4, "seq_len": 16, "targets": True, "last": last, "rank": rank, "world_size": 3}
        for more in ({}, {"documents": True}):
            with (
                Loader(f"{web.url}/s.h5", **options, **more) as far,
                Loader(web.folder / "s.h5", **options, **more) as near,
            ):
                assert_same(taken(far, 2), taken(near, 2))


def test_many_reads_are_under_way_and_no_more_than_are_wanted(web_store):
    _, proxy, url = web_store
    proxy.fault = lambda number, method, name, span: {"wait": 0.05}
    with Loader(url) as loader:
        steps = sum(1 for _ in loader)
    assert steps == 40
    assert 8 < proxy.most_under_way <= 40
    # each batch once, those that touch together, and the crc32 of each shard
    assert 20 < sum(name.startswith("shard-") for _, name, _ in proxy.requests) <= 40 + 3
    proxy.reset()
    proxy.fault = lambda number, method, name, span: {"wait": 0.02}
    with Loader(url, prefetch=4, shuffle="sequential") as loader:
        assert sum(1 for _ in loader) == 40
    assert proxy.most_under_way <= 4 + 1


def test_an_error_is_raised_at_its_batch(web_store):
    local, proxy, url = web_store
    with Loader(url, shuffle="sequential") as loader, Loader(local, shuffle="sequential") as expected:
        places = [loader.batches.tokens.files.open(0, 0).tokens.extents.offset(number) for number in range(7)]

        def fault(number, method, name, span):
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            return {"status": 403} if name == "shard-00000.h5" and first <= places[5] <= last else None

        proxy.fault = fault
        found = iter(loader)
        for _, step in zip(range(5), expected, strict=False):
            assert torch.equal(next(found), step)
        is_refused(Exception, lambda: next(found), match=r"shard-00000.h5: access denied")
        assert loader.state_dict()["position"] == 5 * 16


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings(f"ignore:{SAME_EPOCH}:UserWarning")
def test_workers_of_a_data_loader(web_store, context):
    local, _, url = web_store
    with Loader(url) as loader, Loader(local) as expected:
        next(loader)  # the library is in use before the fork
        loader.set_epoch(1), expected.set_epoch(1)
        how = {"batch_size": None, "num_workers": 2, "multiprocessing_context": context}
        workers = DataLoader(loader.dataset(), **how)
        assert_same_epochs(workers, expected)
        assert_same_epochs(loader, expected)  # and after it


def test_a_state_is_that_of_the_local_store_also_within_a_stored_batch(web_store):
    local, _, url = web_store
    with Loader(url) as loader, Loader(local) as expected:
        for _ in range(5):
            next(loader)
        expected.load_state_dict(loader.state_dict())
        assert torch.equal(next(expected), next(loader))
        state = expected.state_dict() | {"position": 5}  # then steps are read by records
        loader.load_state_dict(state), expected.load_state_dict(state)
        assert_same_epochs(loader, expected)
