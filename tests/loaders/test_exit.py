"""The end of an interpreter whose script has closed nothing: no noise, whatever is open."""

import pytest
from contents import numbered_batches
from processes import python
from source_tokens import make_stream

from zb_hdf5 import convert

IMPORTS = {"torch first": "import torch, zb_hdf5", "torch last": "import zb_hdf5, torch", "names only": ""}
#: Ends with readers, and loaders in the middle of an epoch, in globals; a function keeps these to the last.
SCRIPT = """
import sys
{imports}
from zb_hdf5 import FollowingLoader, Loader, open_reader
path = sys.argv[1]
store, how = path + "/store", {{"rank": 0, "world_size": 1}}
loaders = [
    Loader(store, **how),
    Loader(store, access="pread", **how),
    Loader(store, access="h5py", **how),
    Loader(store, shuffle="records", **how),
    Loader(store, prefetch=2, **how),
    Loader(store, cache=path + "/cache", **how),
    Loader(path + "/packed.h5", documents=True, spans=True, **how),
    Loader(path + "/stream.h5", batch_size=2, seq_len=8, documents=True, **how),
    FollowingLoader(store, **how),
]
iterators = [iter(loader) for loader in loaders]
steps = [(next(iterator), next(loader)) for iterator, loader in zip(iterators, loaders)]
reader = open_reader(store)
views = list(reader)
def f(): pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_store):
    path = tmp_path_factory.mktemp("exit")
    write_store(path / "store", numbered_batches(0, 6, (2, 8)).astype("<u2"), cuts=(2, 4))
    stream = make_stream(path / "stream.h5", [5, 17, 3, 8, 40, 1, 1, 22, 9, 30])
    size = {"batch_size": 3, "seq_len": 8, "pad_id": 0, "workers": 1}
    convert(stream, "hdf5", path / "packed.h5", shuffle=False, packing="concat", **size)
    return path


@pytest.mark.parametrize("imports", IMPORTS)
def test_an_interpreter_ends_without_noise(imports, folder):
    done = python(SCRIPT.format(imports=IMPORTS[imports]), folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
