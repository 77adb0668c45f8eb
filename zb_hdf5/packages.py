"""Packages that extras install, imported when something first needs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zb_hdf5.errors import UnavailableError

if TYPE_CHECKING:
    import h5py as h5py
    import torch


def __getattr__(name: str) -> Any:
    """Import h5py when a module takes it from here: a broken one is an error in one line, as other packages are."""
    if name != "h5py":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(name)
    except Exception as error:  # a broken package raises anything
        raise no_package(name, f"this needs the package {name}, which zb_hdf5 is installed with", error) from None


class LaterModule:
    """A module that is imported when a name in it is first asked for, which few programs do.

    Annotations have it: `typing.get_type_hints` finds `torch.Tensor` in it, and an import of this package loads no
    torch.

    Parameters
    ----------
    name
        The name of the module.
    needs
        The package that it needs, which the extra of this name installs; "": none.
    """

    def __init__(self, name: str, needs: str = "") -> None:
        self._name = name
        self._needs = needs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of whoever looks at all names of a module
            raise AttributeError(f"module {self._name!r} has no attribute {name!r} before it is imported")
        if self._needs:
            require_package(self._needs, self._needs)
        return getattr(import_module(self._name), name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"


def require_package(name: str, extra: str) -> Any:
    """Import a package, or a module of it, that an extra of this project installs; `UnavailableError` without it."""
    try:
        return import_module(name)
    except Exception as error:  # a broken package raises anything
        package = name.partition(".")[0]
        raise no_package(package, f"this needs the package {package}: pip install 'zb_hdf5[{extra}]'", error) from None


def no_package(package: str, message: str, error: Exception) -> UnavailableError:
    """Return the error for a package that cannot be imported: a message if it is missing, or the reason.

    Parameters
    ----------
    package
        The package.
    message
        The message if it is not installed.
    error
        The error of its import.
    """
    try:
        is_installed = find_spec(package) is not None
    except (ImportError, ValueError):
        is_installed = False
    if not is_installed:
        return UnavailableError(message)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return UnavailableError(f"the package {package} is installed, and its import fails: {reason}; install it again")


@cache
def from_numpy() -> Callable[[Any], torch.Tensor]:
    """Import torch when it is first needed; an import statement would cost a fiftieth of each read."""
    convert: Callable[[Any], torch.Tensor] = require_package("torch", "torch").from_numpy
    return convert
