"""The requests of remote stores: opening, and the first batch. Their numbers may fall, and never grow."""

import shutil

import pins
import pytest
from commandline import report_of

from zb_hdf5 import Loader
from zb_hdf5.commands.zb import zb

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


def test_a_plan_of_a_store_at_a_url_has_steps_and_times_and_no_opened_files(folder, web):
    shutil.copytree(folder / pins.kinds()["store"].path, web.folder / "kind")
    with Loader(f"{web.url}/kind", rank=0, world_size=1) as loader:
        steps = len(loader)
    figures = report_of(zb, "plan", f"{web.url}/kind", "--ranks", 1)["figures"]
    assert figures["steps"] == {"value": steps, "how": "counted"}
    assert figures["first_batch_s"]["value"] > 0
    assert not [name for name in figures if name.startswith("opens")]
