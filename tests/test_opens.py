"""How often a file is opened when its path is used, counted by `strace`. See `opens.py`."""

import opens
import pytest

#: Of each kind and use the most opens of one file: no change makes them more.
MOST = {
    "store": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 6, "convert": 4},
    "records-hdf5": {"Loader": 3, "reader": 3, "info": 3, "show": 3, "verify": 6, "convert": 9},
    "records-npy": {"Loader": 4, "reader": 4, "info": 4, "show": 4, "verify": 3, "convert": 2},
    "megatron": {"Loader": 4, "reader": 4, "info": 5, "show": 7, "verify": 4, "convert": 8},
    "npy-folder": {"Loader": 4, "reader": 4, "info": 6, "show": 8, "verify": 3, "convert": 2},
}


@pytest.mark.slow
@pytest.mark.skipif(not opens.can_trace(), reason="needs strace, which counts what HDF5 opens")
def test_a_file_is_opened_no_more_often_than_before(tmp_path):
    found = opens.opens_of(tmp_path, list(MOST))
    most = {kind: {use: max(found[kind][use].values(), default=0) for use in uses} for kind, uses in MOST.items()}
    assert all(most[kind][use] <= bound for kind, uses in MOST.items() for use, bound in uses.items()), most
    assert min(min(uses.values()) for uses in most.values()) > 0  # strace has seen them
