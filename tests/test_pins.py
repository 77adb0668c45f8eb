"""Fingerprints, orders, states, reports, opens and written bytes of every kind of path, and plans. See `pins.py`."""

import json

import golden
import pins
import pytest

CASES = pins.cases()
PINNED = pins.load()
REMEDY = "run `python tests/pins.py` as its docstring says: it adds the new cases alone"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pins") / "kinds"
    pins.make_kinds(place)
    return place


def more_opens(case, pinned, found):
    """Return the files that are opened more often than before; those that are opened less often are taken over."""
    if "opens" not in found:
        return []
    before = pinned["opens"]
    more = {name: count for name, count in found["opens"].items() if count > before.get(name, 0)}
    found["opens"] = before
    return [f"{case}: opens of {name}: {before.get(name, 0)} -> {count}" for name, count in more.items()]


def test_every_case_is_pinned():
    assert CASES.keys() == PINNED.keys(), REMEDY


@pytest.mark.filterwarnings("ignore:channel 1 is taken")
@pytest.mark.parametrize("group", ["facts", "reports", "bytes", "plans"])
def test_facts_are_those_of_earlier_builds(group, folder):
    different = []
    for case, make in CASES.items():
        if case.startswith(f"{group}/"):
            found = json.loads(json.dumps(make(folder)))
            different += more_opens(case, PINNED[case], found)
            different += [f"{case}: {fact}" for fact in golden.differences({"": PINNED[case]}, {"": found})]
    assert not different
