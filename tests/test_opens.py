"""How often a file is opened when its path is used, counted by `strace`. See `opens.py`."""

import opens
import pytest

#: Of each kind the most opens of one file of ids, and of one index or sidecar, in each of `opens.USES`: no change makes
#: them more. A file is opened once to look at it, and its reader takes the descriptor; a later file of a folder is
#: opened once more to be read, and an HDF5 file also by the library, once. 0: the command lacks a needed option.
MOST = {
    "store": "1 1 1 1 1 1 2 1 1 1 1 1 1 2",
    "lone-hdf5": "2 2 2 2 2 2 2 2 2 2 2 2 2 2",
    "lone-batch": "1 1 1 1 1 1 1 1 1 1 1 1 1 2",
    "text-store": "1 1 1 1 1 1 2 2 1 1 1 1 1 2",
    "lone-stream": "2 2 2 2 2 2 2 2 2 2 2 2 2 2",
    "stream-store": "1 1 1 1 2 2 2 2 2 1 1 1 1 2",
    "stream-hdf5": "2 2 2 2 2 2 2 2 2 2 2 2 2 2",
    "records-hdf5": "2 2 2 2 2 2 2 2 2 2 2 2 2 2",
    "records-hdf5-folder": "2 2 2 2 2 2 2 2 2 2 2 2 2 2",
    "channels-hdf5-folder": "2 2 2 2 2 2 2 2 2 2 2 0 2 2",
    "records-npy": "1 1 1 1 1 1 1 2 1 1 1 1 1 1",
    "megatron": "1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    "megatron-folder": "1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    "datatrove": "1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    "llmc": "1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    "olmo": "1 1 1 1 1 1 1 1 1 1 1 0 1 1",
    "olmo-folder": "2 1 2 2 1 1 1 2 2 1 2 0 2 2",
    "nanogpt": "1 1 1 1 1 1 1 1 1 1 1 0 1 1",
    "npy-folder": "2 1 2 2 1 1 1 2 2 1 2 2 2 2",
}
#: The same of kinds that a conversion alone reads: by all of its processes together.
MOST_ONCE = {
    "text-jsonl": 2,
    "text-gzip": 2,
    "text-plain": 2,
    "text-parquet": 2,
    "text-workers": 2 + opens.WORKERS,
    "mds": 1,
    "litdata": 1,
    "ids-saved": 2,
    "ids-jsonl": 2,
    "ids-parquet": 2,
    "ids-workers": 2 + opens.WORKERS,
    "ragged": 2,
}
#: The cells of more than two opens, and the reason of each.
REASONS = {
    ("text-workers", "convert"): "each of two more processes opens it once, whatever groups it reads",
    ("ids-workers", "convert"): "as text-workers",
}

#: The endings of indexes and sidecars: a use that opens one opens it once.
BESIDE = ("shards.json", "index.json", ".idx", ".ds.index", ".documents", ".pieces", ".tables", ".crc32")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not opens.can_trace(), reason="needs strace, which counts what HDF5 opens"),
]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return kind -> use -> how often each file is opened."""
    return opens.opens_of(tmp_path_factory.mktemp("opens"), [*MOST, *MOST_ONCE])


def bounds():
    """Return the most opens of one file, by kind and use."""
    found = {
        (kind, use): int(most) for kind, row in MOST.items() for use, most in zip(opens.USES, row.split(), strict=True)
    }
    return found | {(kind, "convert"): most for kind, most in MOST_ONCE.items()}


def test_a_file_is_opened_no_more_often_than_before(traced):
    most = {(kind, use): max(traced[kind][use].values(), default=0) for kind, use in bounds()}
    assert {cell: (most[cell], bound) for cell, bound in bounds().items() if most[cell] > bound} == {}
    unseen = {cell for cell, bound in bounds().items() if not bound}
    assert {cell for cell, found in most.items() if not found} == unseen  # strace has seen all others


def test_each_cell_of_more_than_two_opens_has_a_reason():
    assert {cell for cell, bound in bounds().items() if bound > 2} == {*REASONS}


def test_indexes_and_sidecars_are_opened_once(traced):
    found = {}
    for kind, use in bounds():
        for path, count in traced[kind][use].items():
            for ending in filter(path.endswith, BESIDE):
                found[kind, use, ending] = max(count, found.get((kind, use, ending), 0))
    assert {cell: count for cell, count in found.items() if count > 1} == {}
    assert {ending for *_, ending in found} == {*BESIDE}  # strace has seen one of each
    assert {use for kind, use, _ in found if kind == "lone-stream"} >= {"info", "show", "verify", "convert"}
