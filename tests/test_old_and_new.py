"""Batches and states stay those of an earlier build: `data/states.json` was made by one (old_and_new.py)."""

import json
from pathlib import Path

import old_and_new
import pytest

GOLDEN = json.loads((Path(__file__).parent / "data" / "states.json").read_text())


@pytest.mark.slow
def test_the_batches_and_the_states_are_those_of_the_earlier_build(tmp_path):
    """One test, for the stores are written once."""
    folders = tmp_path / "sources", tmp_path / "stores"
    old_and_new.make_sources(folders[0])
    old_and_new.make_stores(*folders)
    makes, different = old_and_new.cases(), []
    for case, golden in GOLDEN.items():
        found = old_and_new.result_of(makes[case], *folders)
        resumed = old_and_new.result_of(makes[case], *folders, state=golden["state"])
        different += [f"{case}: {fact}" for fact in old_and_new.differences(golden, found, "")]
        different += [
            f"{case}: {fact}" for fact in old_and_new.differences({"rest": golden["rest"]}, resumed, "resumed.")
        ]
    assert not different
