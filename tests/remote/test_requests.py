"""The requests of remote stores: opening, and the first batch. Their numbers may fall, and never grow."""

import shutil

import pins
import pytest

from zb_hdf5 import Loader

#: Kind of path -> requests until the first batch is read, that of `shards.json` among them.
MOST = {"store": 3, "store-batch": 3, "text-store": 3, "stream-store": 4, "compressed": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("requests") / "kinds"
    pins.make_kinds(place)
    return place


@pytest.mark.parametrize("name", MOST)
def test_opening_and_the_first_batch_take_so_many_requests(name, folder, web):
    kind = pins.kinds()[name]
    shutil.copytree(folder / kind.path, web.folder / "kind")
    options = {**kind.options, **kind.shape, "rank": 0, "world_size": 1, "prefetch": 0}
    with Loader(f"{web.url}/kind", **options) as loader:
        next(iter(loader))
    assert sum(name.endswith("shards.json") for _, name, _ in web.requests) == 1
    assert len(web.requests) <= MOST[name]
