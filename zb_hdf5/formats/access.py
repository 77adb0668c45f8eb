"""The ways to read a file, `access`, and to check what is read, `verify`, by the names that users give."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from zb_hdf5.errors import require_choice

Access: TypeAlias = Literal["auto", "mmap", "pread", "h5py"]
ACCESSES: Final[tuple[Access, ...]] = get_args(Access)
Verify: TypeAlias = Literal["auto", "none", "batch", "store"]
VERIFIES: Final[tuple[Verify, ...]] = get_args(Verify)


def require_options(access: str, verify: str) -> None:
    """Raise `ArgumentError` unless both are known."""
    require_choice("access", access, ACCESSES)
    require_choice("verify", verify, VERIFIES)
