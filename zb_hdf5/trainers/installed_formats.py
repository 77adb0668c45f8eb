"""Formats of installed packages: an entry point for each, and the errors of code that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Final, NamedTuple, TypeVar

from zb_hdf5.errors import FormatError, ZbError
from zb_hdf5.formats.format_row import FormatRow

#: The group of the entry points. Each has the name of a format, and leads to its row, or to a function that returns it.
GROUP: Final = "zb_hdf5.formats"

_Error = TypeVar("_Error", bound=BaseException)


class PackageError(FormatError):
    """The code of a package has failed."""


class Installed(NamedTuple):
    """The formats of installed packages.

    Attributes
    ----------
    rows
        The row of each format, by its name.
    packages
        The package of each format, with its version.
    notes
        A sentence for each format that cannot be used.
    """

    rows: dict[str, FormatRow]
    packages: dict[str, str]
    notes: list[str]


def load_installed(taken: Collection[str]) -> Installed:
    """Load the formats of all installed packages. None of them stops it.

    Parameters
    ----------
    taken
        The names of our own formats, which no package replaces.
    """
    found = Installed({}, {}, [])
    for each in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, _package(entry))):
        package = _package(each)
        if each.name in taken or each.name in found.rows:
            found.notes.append(f"the package {package}: its format {each.name} has a name that is taken")
            continue
        try:
            row = _row_of(each)
        except Exception as error:  # whatever the code of a stranger raises
            found.notes.append(
                f"the package {package}: its format {each.name} cannot be loaded: {error_in_words(error)}"
            )
            continue
        found.rows[each.name] = replace(row, name=each.name)
        found.packages[each.name] = package
    return found


def _row_of(entry: EntryPoint) -> FormatRow:
    """Load the row of one entry point."""
    found = entry.load()
    row = found() if not isinstance(found, FormatRow) and callable(found) else found
    if not isinstance(row, FormatRow):
        raise TypeError(f"expected a {FormatRow.__name__}, found {row!r:.80}")
    return row


def _package(entry: EntryPoint) -> str:
    """Return the name and the version of the package that has an entry point."""
    return "unknown" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def error_in_words(error: BaseException) -> str:
    """Return the name and the first line of an error."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}".rstrip(": ")


@contextmanager
def errors_of(package: str, name: str) -> Iterator[None]:
    """Turn an exception in the code of a package into an error that names it; "": our own code, whose errors stay.

    Raises
    ------
    PackageError
        Instead of any exception that is neither an error of ours, nor of the system.
    """
    try:
        yield
    except (ZbError, OSError, MemoryError):
        raise
    except Exception as error:
        if not package:
            raise
        raise PackageError(f"the package {package}: its format {name} failed: {error_in_words(error)}") from error


def first_of(names: Iterable[str], asks: Callable[[str], bool], notes: list[str]) -> str:
    """Return the first name that a question is answered with yes for; "": none. A package that fails adds a note."""
    for name in names:
        try:
            if asks(name):
                return name
        except PackageError as error:
            notes.append(str(error))
    return ""


def with_notes(error: _Error, notes: Iterable[str]) -> _Error:
    """Return an error with notes for its reader."""
    for note in notes:
        error.add_note(note)
    return error
