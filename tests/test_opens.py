"""How often a file is opened when its path is used, counted by `strace`. See `opens.py`."""

import opens
import pytest

#: Of each kind and use the most opens of one file of ids, and of one index or sidecar: no change makes them more. A
#: file is opened once to look at it and once to be read, a lone file of batches once for both, an HDF5 file also by the
#: library; a second look of the library finds the fields of a stream, a third one the offsets of its documents. A
#: conversion opens each shard of a store for its digests, and compares a stream with its own first.
MOST = {
    "store": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 2, "convert": 3},
    "lone-hdf5": {"Loader": 2, "reader": 2, "info": 2, "show": 2, "verify": 2, "convert": 3},
    "lone-batch": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 1, "convert": 2},
    "text-store": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 2, "convert": 5},
    "lone-stream": {"Loader": 2, "reader": 2, "info": 2, "show": 4, "verify": 4, "convert": 8},
    "stream-store": {"Loader": 1, "reader": 1, "info": 1, "show": 2, "verify": 3, "convert": 4},
    "stream-hdf5": {"Loader": 2, "reader": 2, "info": 2, "show": 3, "verify": 2, "convert": 4},
    "records-hdf5": {"Loader": 2, "reader": 2, "info": 2, "show": 2, "verify": 4, "convert": 4},
    "records-hdf5-folder": {"Loader": 3, "reader": 3, "info": 3, "show": 3, "verify": 5, "convert": 4},
    "records-npy": {"Loader": 2, "reader": 2, "info": 2, "show": 2, "verify": 2, "convert": 2},
    "megatron": {"Loader": 2, "reader": 1, "info": 1, "show": 2, "verify": 2, "convert": 2},
    "megatron-folder": {"Loader": 2, "reader": 1, "info": 1, "show": 2, "verify": 2, "convert": 2},
    "datatrove": {"Loader": 1, "reader": 1, "info": 1, "show": 2, "verify": 1, "convert": 2},
    "llmc": {"Loader": 2, "reader": 2, "info": 2, "show": 3, "verify": 2, "convert": 2},
    "olmo": {"Loader": 2, "reader": 2, "info": 2, "show": 3, "verify": 2, "convert": 3},
    "olmo-folder": {"Loader": 2, "reader": 2, "info": 2, "show": 3, "verify": 3, "convert": 3},
    "nanogpt": {"Loader": 2, "reader": 2, "info": 2, "show": 3, "verify": 3, "convert": 2},
    "npy-folder": {"Loader": 2, "reader": 2, "info": 2, "show": 3, "verify": 2, "convert": 2},
}

#: Of each use of a stream the opens of the table of documents beside it.
DOCUMENTED = {"info": 1, "show": 1, "verify": 1, "convert": 2}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not opens.can_trace(), reason="needs strace, which counts what HDF5 opens"),
]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return kind -> use -> how often each file is opened."""
    return opens.opens_of(tmp_path_factory.mktemp("opens"), list(MOST))


def test_a_file_is_opened_no_more_often_than_before(traced):
    most = {kind: {use: max(traced[kind][use].values(), default=0) for use in uses} for kind, uses in MOST.items()}
    assert all(most[kind][use] <= bound for kind, uses in MOST.items() for use, bound in uses.items()), most
    assert min(min(uses.values()) for uses in most.values()) > 0  # strace has seen them


def test_documents_beside_a_stream_are_opened_once_to_be_read_and_once_to_be_compared(traced):
    uses = traced["lone-stream"]
    found = {use: max(count for path, count in uses[use].items() if path.endswith(".documents")) for use in DOCUMENTED}
    assert found == DOCUMENTED
