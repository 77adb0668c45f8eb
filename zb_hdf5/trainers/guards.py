"""The code of installed packages, called: an exception in it becomes an error that names the package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar, cast

from zb_hdf5.formats.document_source import (
    CompletedSource,
    DocumentFilter,
    DocumentGroup,
    DocumentSource,
    TokenizedDocuments,
    missing_members,
)
from zb_hdf5.formats.format import Format
from zb_hdf5.trainers.installed_formats import errors_of

_Kind = TypeVar("_Kind")


def guarded(kind: type[_Kind], package: str, name: str) -> type[_Kind]:
    """Return a class of a package, a format or a writer, whose public methods raise errors that name the package.

    Parameters
    ----------
    kind
        The class, as the package has it.
    package, name
        The package and the format, for messages.
    """
    members: dict[str, Any] = {}
    for each in ("__init__", *(each for each in dir(kind) if not each.startswith("_"))):
        method = inspect.getattr_static(kind, each)
        if isinstance(method, classmethod):
            members[each] = classmethod(_naming(method.__func__, package, name))
        elif inspect.isfunction(method):
            members[each] = _naming(method, package, name)
    return cast("type[_Kind]", type(kind.__name__, (kind,), members))


def guarded_format(kind: type[Format], package: str, name: str) -> type[Format]:
    """Return the class of a format as `guarded`, whose writer is guarded too."""

    class Guarded(guarded(kind, package, name)):  # type: ignore[misc]  # a class that is made
        @property
        def writer(self) -> type[Any]:
            with errors_of(package, name):
                return guarded(super().writer, package, name)

    return Guarded


def _naming(method: Callable[..., Any], package: str, name: str) -> Callable[..., Any]:
    """Return a method whose errors name a package."""

    @wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        with errors_of(package, name):
            return method(*args, **options)

    return called


class GuardedSource(CompletedSource):
    """A source of documents of a package, as a `DocumentSource`. Picklable, as that is.

    Parameters
    ----------
    source
        The source, as the package has it: any object that has the members without a default.
    package, name
        The package and the format, for messages.

    Raises
    ------
    PackageError
        If it lacks such members.
    """

    def __init__(self, source: Any, package: str, name: str) -> None:
        self._package = package
        self._name = name
        with errors_of(package, name):
            missing = missing_members(source)
            if missing:
                raise TypeError(
                    f"expected a source of documents, found a {type(source).__name__} without {', '.join(missing)}"
                )
        super().__init__(source)

    def __getattr__(self, name: str) -> Any:
        if name not in DocumentSource.__annotations__:
            return super().__getattr__(name)
        with errors_of(self._package, self._name):
            return super().__getattr__(name)

    def read(
        self, group: DocumentGroup, choose: DocumentFilter | None, num_threads: int
    ) -> Iterator[TokenizedDocuments]:
        with errors_of(self._package, self._name):
            yield from super().read(group, choose, num_threads)
