"""Orders, batches and states are those of earlier builds. `golden.py` has the cases, and `data/` their results."""

import golden
import pytest

CASES = golden.cases()
STATES = golden.load("states")
DIGESTS = golden.load("digests")
REMEDY = "run `python tests/golden.py` as its docstring says: it adds the new cases alone"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden") / "sources"
    golden.make_sources(folder)
    return folder


@pytest.fixture(scope="module")
def stores(sources):
    folder = sources.parent / "stores"
    golden.make_stores(sources, folder)
    return folder


@pytest.fixture(scope="module")
def all_stores(sources, stores):
    golden.make_more_stores(sources, stores)
    return stores


def test_every_case_has_a_golden_digest_and_one_of_each_kind_its_whole_result():
    assert CASES.keys() == DIGESTS.keys(), REMEDY
    assert set(golden.GOLDEN) == STATES.keys(), REMEDY
    assert {case: golden.digest_of(result) for case, result in STATES.items()}.items() <= DIGESTS.items()


@pytest.mark.parametrize("case", golden.GOLDEN)
def test_the_batches_and_the_state_are_golden(case, sources, stores):
    found = golden.result_of(CASES[case], sources, stores)
    assert not list(golden.differences(STATES[case], found))
    rest = golden.resumed(CASES[case], sources, stores, STATES[case]["state"])
    assert rest == STATES[case]["rest"]


@pytest.mark.slow
@pytest.mark.parametrize("store", sorted({case.partition("/")[0] for case in CASES}))
def test_every_case_is_golden(store, sources, all_stores):
    different = []
    for case, make in CASES.items():
        if case.partition("/")[0] == store:
            found = golden.digest_of(golden.result_of(make, sources, all_stores))
            different += [f"{case}: {fact}" for fact in golden.differences(DIGESTS[case], found)]
    assert not different
