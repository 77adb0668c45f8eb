"""The end of an interpreter whose script has closed nothing: no noise, whatever is open."""

import pytest
from numbered import numbered_batches
from processes import PROGRAMS, python
from source_tokens import make_stream

from zb_hdf5 import convert

IMPORTS = {"torch first": "torch,zb_hdf5", "torch last": "zb_hdf5,torch", "names only": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_store):
    path = tmp_path_factory.mktemp("exit")
    write_store(path / "store", numbered_batches(0, 6, (2, 8)).astype("<u2"), cuts=(2, 4))
    stream = make_stream(path / "stream.h5", [5, 17, 3, 8, 40, 1, 1, 22, 9, 30])
    size = {"batch_size": 3, "seq_len": 8, "pad_id": 0, "workers": 1}
    convert(stream, "hdf5", path / "packed.h5", shuffle=False, packing="concat", **size)
    return path


@pytest.mark.parametrize(
    "imports",
    ["torch first", *(pytest.param(name, marks=pytest.mark.slow) for name in IMPORTS if name != "torch first")],
)
def test_an_interpreter_ends_without_noise(imports, folder):
    done = python(PROGRAMS / "leave_loaders_open.py", folder, IMPORTS[imports])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
