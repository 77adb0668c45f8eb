"""Copies of stores: the bytes of the original, and no damage copied along."""

import numpy as np
import pytest
from contents import batches_of
from contract import is_refused, random_tokens
from damage import flip_token

from zb_hdf5 import ChecksumError
from zb_hdf5.converters.run import convert
from zb_hdf5.converters.store_source import StoreSource

SUFFIXES = {"hdf5": ".h5", "batch": ".batch"}
SHAPES = {"packed": (4, 1024), "padded": (3, 1000)}


@pytest.fixture(params=sorted(SHAPES))
def tokens(request):
    return random_tokens(40, *SHAPES[request.param])


def copy(source, backend, destination, target="batch"):
    convert(StoreSource(source, backend), target, destination)
    if destination.is_file():
        return {"": destination.read_bytes()}
    return {path.name: path.read_bytes() for path in sorted(destination.iterdir())}


@pytest.mark.parametrize("target", ["hdf5", "batch"])
@pytest.mark.parametrize("backend", ["hdf5", "batch"])
def test_a_copy_of_a_copy_has_the_bytes_of_the_original(target, backend, tokens, tmp_path, write_file):
    source = tmp_path / f"in{SUFFIXES[backend]}"
    write_file(source, tokens)
    first = copy(source, backend, tmp_path / f"a{SUFFIXES[target]}", target)
    assert copy(tmp_path / f"a{SUFFIXES[target]}", target, tmp_path / f"b{SUFFIXES[target]}", target) == first
    np.testing.assert_array_equal(batches_of(tmp_path / f"a{SUFFIXES[target]}"), tokens)


@pytest.mark.parametrize("number", [0, 17, 39])
def test_damage_is_never_copied(number, tokens, tmp_path, write_file):
    write_file(tmp_path / "in.h5", tokens)
    flip_token(tmp_path / "in.h5", number, 5)
    is_refused(ChecksumError, lambda: copy(tmp_path / "in.h5", "hdf5", tmp_path / "out.batch"), match=f"batch {number}")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]
