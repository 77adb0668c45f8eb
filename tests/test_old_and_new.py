"""Batches and states stay those of an earlier build: `data/states.json` was made by one (old_and_new.py)."""

import json
from pathlib import Path

import old_and_new
import pytest

GOLDEN = json.loads((Path(__file__).parent / "data" / "states.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old-and-new")
    old_and_new.task_stores(str(folder / "sources"), str(folder / "stores"))
    return folder / "sources", folder / "stores"


@pytest.mark.parametrize("case", GOLDEN)
def test_the_batches_and_the_states_are_those_of_the_earlier_build(folders, case):
    make = old_and_new.cases()[case]
    assert old_and_new.result_of(make, *folders) == GOLDEN[case]
    assert old_and_new.result_of(make, *folders, state=GOLDEN[case]["state"])["rest"] == GOLDEN[case]["rest"]
