"""How often a file is opened when its path is used, counted by `strace`. See `opens.py`."""

import opens
import pytest

#: Of each kind and use the most opens of one file of ids, and of one index or sidecar: no change makes them more. A
#: file is opened once to look at it, and its reader takes the descriptor; a later file of a folder is opened once more
#: to be read, and an HDF5 file also by the library, once. So no number is larger than 2.
MOST = {
    "store": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 2, "convert": 1},
    "lone-hdf5": {"Loader": 2, "reader": 2, "info": 2, "show": 2, "verify": 2, "convert": 2},
    "lone-batch": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 1, "convert": 2},
    "text-store": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 2, "convert": 2},
    "lone-stream": {"Loader": 2, "reader": 2, "info": 2, "show": 2, "verify": 2, "convert": 2},
    "stream-store": {"Loader": 1, "reader": 1, "info": 1, "show": 2, "verify": 2, "convert": 2},
    "stream-hdf5": {"Loader": 2, "reader": 2, "info": 2, "show": 2, "verify": 2, "convert": 2},
    "records-hdf5": {"Loader": 2, "reader": 2, "info": 2, "show": 2, "verify": 2, "convert": 2},
    "records-hdf5-folder": {"Loader": 2, "reader": 2, "info": 2, "show": 2, "verify": 2, "convert": 2},
    "channels-hdf5-folder": {"Loader": 2, "reader": 2, "info": 2, "show": 2, "verify": 2, "convert": 2},
    "records-npy": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 1, "convert": 2},
    "megatron": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 1, "convert": 1},
    "megatron-folder": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 1, "convert": 1},
    "datatrove": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 1, "convert": 1},
    "llmc": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 1, "convert": 2},
    "olmo": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 1, "convert": 2},
    "olmo-folder": {"Loader": 2, "reader": 1, "info": 2, "show": 1, "verify": 1, "convert": 2},
    "nanogpt": {"Loader": 1, "reader": 1, "info": 1, "show": 1, "verify": 1, "convert": 2},
    "npy-folder": {"Loader": 2, "reader": 1, "info": 2, "show": 1, "verify": 2, "convert": 2},
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
