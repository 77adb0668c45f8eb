"""The memory that a process may use is that of its control groups, of both versions, or of the machine."""

import os

import pytest

from zb_hdf5.files import memory_limit as module
from zb_hdf5.files.memory_limit import memory_limit

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        ("0::/a/b\n", {"a/memory.max": "9000", "a/b/memory.max": "4000\n"}, 4000),
        ("0::/of the host\n", {"memory.max": "3000"}, 3000),  # in a container
        ("9:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "2000"}, 2000),
        ("9:memory:/job\n0::/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, MACHINE),
        ("1:cpu:/\n", {}, MACHINE),
        ("no groups", {}, MACHINE),
    ],
)
def test_the_least_limit_counts(groups, files, expected, tmp_path, monkeypatch):
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(groups)
    monkeypatch.setattr(module, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(module, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(module, "CONTROL_GROUPS_V1", tmp_path / "groups" / "memory")
    assert memory_limit() == expected
