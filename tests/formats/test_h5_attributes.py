"""Tests of the attributes of HDF5 files: the fast reader of one gives the value that h5py gives."""

import h5py
import numpy as np
import pytest

from zb_hdf5.hdf5.h5_attributes import attribute, text_attribute

VALUES = {
    "one_byte": np.uint8(200),
    "negative": np.int64(-5),
    "big_endian": np.array(70_000, ">u4"),
    "large": np.uint64(2**64 - 1),
    "bytes": np.bytes_(b"zb-tokens"),
    "bytes_with_zero": np.bytes_(b"a\0b"),
    "no_bytes": h5py.Empty("S4"),
    "text": "grüße",
    "truth": np.True_,
    "float": np.float64(0.5),
    "numbers": np.arange(3),
    "one_number": np.array([7], "<u4"),
    "nothing": h5py.Empty("u4"),
}


@pytest.fixture
def h5(tmp_path):
    """A file with attributes of many types, at its root and at a dataset."""
    with h5py.File(tmp_path / "x.h5", "w") as written:
        owners = (written, written.create_dataset("tokens", data=np.arange(4)))
        for owner in owners:
            for name, value in VALUES.items():
                owner.attrs[name] = value
            owner.attrs.create("utf8", "grüße".encode(), dtype=h5py.string_dtype("utf-8", 16))
            owner.attrs.create("enum", 1, dtype=h5py.enum_dtype({"a": 0, "b": 1}, basetype="u1"))
            padded = h5py.h5t.C_S1.copy()
            padded.set_size(8)
            for name, pad in (("spaces", h5py.h5t.STR_SPACEPAD), ("terminated", h5py.h5t.STR_NULLTERM)):
                padded.set_strpad(pad)
                made = h5py.h5a.create(owner.id, name.encode(), padded, h5py.h5s.create(h5py.h5s.SCALAR))
                made.write(np.array(b"ab", "S8"))
    with h5py.File(tmp_path / "x.h5") as read:
        yield read


@pytest.mark.parametrize("owner", ["/", "tokens"])
def test_an_attribute_has_the_value_and_the_type_that_h5py_gives(h5, owner):
    attributes = h5[owner].attrs
    assert len(attributes) == len(VALUES) + 4
    for read_from in (h5[owner], h5) if owner == "/" else (h5[owner],):
        for name in (*attributes, "missing"):
            expected = attributes.get(name)
            found = attribute(read_from, name)
            assert type(found) is type(expected), name
            assert getattr(found, "dtype", None) == getattr(expected, "dtype", None), name
            assert np.array_equal(found, expected) if np.ndim(expected) else repr(found) == repr(expected), name


def test_the_text_of_an_attribute_is_empty_where_there_is_none(h5):
    assert text_attribute(h5, "missing") == ""
    assert text_attribute(h5, "utf8") == text_attribute(h5, "text") == "grüße"
