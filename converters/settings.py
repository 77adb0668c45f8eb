"""A conversion as it is done: each option with the value that was asked for, else the default of its source.

None: the value follows from the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zb_hdf5.converters.conversion import (
    DEFAULT_MEMORY_BYTES,
    OPTION_CLASSES,
    OPTIONS,
    Conversion,
    InputOptions,
    LayoutOptions,
    OutputOptions,
    WorkOptions,
)
from zb_hdf5.converters.option import Role, may_be_bounded
from zb_hdf5.errors import ArgumentError

if TYPE_CHECKING:  # numpy, which the help of the commands does not need
    from zb_hdf5.converters.engines import Engine
    from zb_hdf5.converters.source_paths import SourcePaths

_Options = TypeVar("_Options")


def resolved_as(kind: type[_Options], roles: Sequence[Role], conversion: Conversion) -> _Options:
    """Return the options of a class as a conversion asks for them, with the defaults of its source.

    Parameters
    ----------
    roles
        Those of the source; an option that none of them takes has the default of its first taker.
    """
    values: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]
        taking = OPTIONS[each.name].taking(roles)
        value = getattr(conversion, each.name)
        if value is not None:
            values[each.name] = value
        elif taking is not None:
            values[each.name] = taking.default
    return kind(**values)


@dataclass(frozen=True, kw_only=True)
class Target(OutputOptions):
    """The result of a conversion.

    Parameters
    ----------
    format
        The name of a file format, or "stream".
    is_stream
        Whether documents are kept, and do not become rows.
    destination
        The file or folder of the result, or the URL of a store.
    path
        The file or folder of this machine that is written: the destination, or the folder that is uploaded to it.
    is_one_file
        Whether it is one file, and not a folder of shards.
    has_requested_shards
        Whether the number or the size of the shards was asked for.
    """

    format: str
    is_stream: bool
    destination: Path
    path: Path
    is_one_file: bool
    has_requested_shards: bool


@dataclass(frozen=True)
class Settings:
    """A conversion as it is done.

    Parameters
    ----------
    paths
        The files, folders or stores of the source, or its URL; none of a source that is open already.
    source_format
        The format of the source.
    roles
        The roles of the source, which have decided its defaults.
    input
        How the source is read.
    layout
        The records, batches and splits of the result.
    target
        The result.
    work
        Who does the work, which part of it, and what it may replace.
    engine
        Runs the tasks instead of the engine that `work` names; None: that one.
    like
        The store that the result is to fit, and the dtype that its source has to give; None: any.
    looks
        All that was found at the paths.
    """

    paths: list[Path]
    source_format: str
    roles: Sequence[Role]
    input: InputOptions
    layout: LayoutOptions
    target: Target
    work: WorkOptions
    engine: Engine | None
    like: tuple[Path, str] | None
    looks: SourcePaths

    @property
    def bound_bytes(self) -> int | None:
        """The memory that a conversion of documents may take; None: any."""
        return self.work.memory if may_be_bounded(self.roles) else None

    @property
    def shuffle_bytes(self) -> int:
        """The memory that a shuffle of records may take."""
        if self.work.memory is None or may_be_bounded(self.roles):
            return DEFAULT_MEMORY_BYTES
        return self.work.memory

    def option(self, name: str) -> Any:
        """Return the value of an option."""
        groups = (self.input, self.layout, self.target, self.work)
        return getattr(groups[[*OPTION_CLASSES].index(OPTIONS[name].group)], name)

    def require_dtype(self, dtype: Any, source: object) -> None:
        """Raise `ArgumentError` if a source that has a dtype of its own does not give that of `like`."""
        if self.like is None:
            return
        path, expected = self.like
        if dtype.name != expected:
            raise ArgumentError(f"{source}: gives tokens of {dtype.name}, and {path} has {expected}")
