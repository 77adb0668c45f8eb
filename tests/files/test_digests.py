"""crc32 by the fast library is that of zlib, whatever the callers pass."""

import zlib

import numpy as np
import pytest
from contract import is_refused
from hypothesis import given
from hypothesis import strategies as st
from processes import python

from zb_hdf5.files.checked import crc32_of, stored_crc32
from zb_hdf5.files.ranges import LocalFile, Run


@given(data=st.binary(max_size=3000), start=st.integers(0, 2**32 - 1), cut=st.integers(0, 70))
def test_it_is_the_crc32_of_zlib(data, start, cut):
    assert crc32_of(data, start) == zlib.crc32(data, start)
    view = memoryview(data)[min(cut, len(data)) :]  # at any address
    assert crc32_of(view) == zlib.crc32(view)
    assert crc32_of(data[cut:], crc32_of(data[:cut])) == zlib.crc32(data)


@pytest.mark.parametrize("values", [
    np.arange(3 * 5 * 7, dtype="<u2").reshape(3, 5, 7),
    np.zeros((2, 3), np.dtype([("score", "<f4"), ("tags", "u1", (3,))])),
    np.arange(1 << 17, dtype="<u4")[1:],
    np.zeros((0, 4), "<u4"),
    np.array(7, "<u8"),
], ids=["odd", "structured", "large", "empty", "scalar"])  # fmt: skip
def test_arrays(values):
    values.flags.writeable = False
    assert crc32_of(values) == zlib.crc32(values) == zlib.crc32(values.tobytes())


def test_strided_values_are_refused_by_both():
    for crc32 in (crc32_of, zlib.crc32):
        is_refused(ValueError, lambda crc32=crc32: crc32(np.arange(10)[::2]), match="contiguous")


def test_without_the_library_it_is_zlib():
    code = (
        "import sys; sys.modules['isal'] = None\nfrom zb_hdf5.files.checked import crc32_of\nprint(crc32_of.__module__)"
    )
    found = python(code, check=True)
    assert found.stdout.strip() == "zlib"
    pytest.importorskip("isal", reason="no wheel for this processor")
    assert crc32_of.__module__ != "zlib"


def test_ranges_beside_rows_that_are_known_are_read(tmp_path):
    stored = np.arange(5000, dtype="<u4")
    (tmp_path / "rows").write_bytes(stored.tobytes())
    rows, other = stored_crc32(LocalFile(tmp_path / "rows"), (Run(0, 16384, 2),), 4096), np.zeros(8, np.uint8)
    for _ in range(2):
        other[:] = 255
        np.testing.assert_array_equal(rows.all((4 * 4500, other)), stored[:4096])
        assert other.view("<u4").tolist() == [4500, 4501]
