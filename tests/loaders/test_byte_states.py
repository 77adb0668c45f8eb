"""Files of ids of one byte that are read in place: what an earlier build gave, which read them as larger ids."""

import json

import pytest
from byte_files import DATA, FILES, cases, fingerprints, result_of, resumed, write_files
from contract import is_refused

from zb_hdf5 import Loader, errors, open_corpus

KNOWN = json.loads(DATA.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("bytes")
    write_files(found)
    return found


@pytest.mark.parametrize("case", KNOWN["cases"])
def test_a_state_of_before_continues_with_the_same_batches(case, folder):
    known = KNOWN["cases"][case]
    make = cases()[case]
    assert resumed(make, folder, known["state"]) == known["rest"]
    found = result_of(make, folder)
    assert (found["whole"], found["rest"]) == (known["whole"], known["rest"])


def test_the_fingerprints_are_those_of_before(folder):
    assert fingerprints(folder) == KNOWN["fingerprints"]


@pytest.mark.parametrize("kind", FILES)
def test_the_ids_have_one_byte(kind, folder):
    name, how = FILES[kind]
    with open_corpus(folder / name, **{key: how[key] for key in how if key == "read_as"}) as corpus:
        assert (corpus.dtype, corpus.tokens.dtype) == ("u1", "u1")
    with Loader(folder / name, **how) as loader:
        assert loader.state_dict()["dtype"] == "uint8"


@pytest.mark.parametrize(("change", "match"), [
    ({"dtype": "int8"}, "state has dtype 'int8'"),
    ({"dtype": ["uint16"]}, "state has dtype"),
    ({"fingerprint": "sampled:0", "dtype": "uint16"}, "state has dtype 'uint16', this loader 'uint8'"),
    ({"fingerprint": "sampled:0", "dtype": "uint8"}, "state has fingerprint"),
])  # fmt: skip
def test_another_dtype_or_other_data_are_refused(change, match, folder):
    state = KNOWN["cases"]["npy-stream/global"]["state"] | change
    with cases()["npy-stream/global"](folder) as loader:
        is_refused(errors.StateError, lambda: loader.load_state_dict(state), match=match)
