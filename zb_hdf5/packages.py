"""Packages that extras install, imported when something first needs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from zb_hdf5.errors import UnavailableError


def require_package(name: str, extra: str) -> Any:
    """Import a package, or a module of it, that an extra of this project installs; `UnavailableError` without it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UnavailableError(f"this needs the package {name.split('.')[0]}: pip install '.[{extra}]'") from error
