"""Packages that extras install, imported when something first needs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zb_hdf5.errors import UnavailableError

if TYPE_CHECKING:
    import torch


def require_package(name: str, extra: str) -> Any:
    """Import a package, or a module of it, that an extra of this project installs; `UnavailableError` without it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UnavailableError(f"this needs the package {name.split('.')[0]}: pip install '.[{extra}]'") from error


@cache
def from_numpy() -> Callable[[Any], torch.Tensor]:
    """Import torch when it is first needed; an import statement would cost a fiftieth of each read."""
    convert: Callable[[Any], torch.Tensor] = require_package("torch", "torch").from_numpy
    return convert
