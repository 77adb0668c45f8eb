"""The requests of remote stores: opening, and the first batch. Their numbers may fall, and never grow."""

import shutil

import pins
import pytest
from commandline import report_of
from reading import reading

from zb_hdf5 import Loader
from zb_hdf5.commands.zb import zb

#: Kind of path -> requests until the first batch is read, that of `shards.json` among them. Of files without a digest
#: sixteen are for the sample that the fingerprint is of.
MOST = {
    "store": 3,
    "store-batch": 3,
    "text-store": 3,
    "compressed": 6,
    "live": 3,
    "stream-store": 4,
    "lone-hdf5": 4,
    "lone-batch": 20,
    "lone-stream": 3,
    "records-hdf5": 22,
    "batches-hdf5": 19,
    "channels-hdf5": 22,
    "stream-hdf5": 19,
}
PINNED = pins.load()


@pytest.fixture(scope="module")
def folder(pinned_kinds):
    return pinned_kinds


def served_at(web, path):
    """Serve a file with those beside it, or a folder, and return its URL."""
    if path.is_dir():
        shutil.copytree(path, web.folder / path.name)
    for file in path.parent.glob(f"{path.name}*") if path.is_file() else ():
        shutil.copyfile(file, web.folder / file.name)
    return f"{web.url}/{path.name}"


@pytest.mark.filterwarnings("ignore:channel 1 is taken")
@pytest.mark.parametrize("name", MOST)
def test_opening_and_the_first_batch_take_so_many_requests(name, folder, web):
    kind = pins.kinds()[name]
    url = served_at(web, folder / kind.path)
    with Loader(url, **reading(kind.options), **kind.shape, rank=0, world_size=1, prefetch=0) as loader:
        next(iter(loader))
    is_store = (folder / kind.path).is_dir()
    assert sum(name.endswith("shards.json") for _, name, _ in web.requests) == is_store
    assert len(web.requests) <= MOST[name]


@pytest.mark.filterwarnings("ignore:channel 1 is taken")
@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("orders", [["global", "records"], pytest.param(pins.ORDERS, marks=pytest.mark.slow)])
def test_a_url_has_the_fingerprint_the_orders_and_the_states_of_the_same_path_here(orders, name, folder, web):
    kind = pins.kinds()[name]
    url = served_at(web, folder / kind.path)
    found = pins.without_live_id(pins.facts_read(url, kind, reading(kind.options), orders))
    assert found == {key: PINNED[f"facts/{name}"][key] for key in found}


@pytest.mark.parametrize("name", pins.SERVED)
def test_reports_over_a_bucket_are_those_of_earlier_builds(name, folder, s3, upload):
    upload(folder / pins.FETCHED, "s3://bucket")
    assert pins.reports_of_job(name, folder) == PINNED[f"served/{name}"]


def test_a_plan_of_a_store_at_a_url_has_steps_and_times_and_no_opened_files(folder, web):
    shutil.copytree(folder / pins.kinds()["store"].path, web.folder / "kind")
    with Loader(f"{web.url}/kind", rank=0, world_size=1) as loader:
        steps = len(loader)
    figures = report_of(zb, "plan", f"{web.url}/kind", "--ranks", 1)["figures"]
    assert figures["steps"] == {"value": steps, "how": "counted"}
    assert figures["first_batch_s"]["value"] > 0
    assert not [name for name in figures if name.startswith("opens")]
