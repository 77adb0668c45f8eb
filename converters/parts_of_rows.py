"""Rows of documents that several jobs write: refused in one step, with the lines of the two steps that do it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zb_hdf5 import ArgumentError
from zb_hdf5.converters.conversion import STREAM, WHOLE, Conversion
from zb_hdf5.converters.sources import PACKED, Source
from zb_hdf5.errors import conversion_call, merge_call

#: The options of each of the two steps, if they are given.
_OF_BOTH: Final[tuple[str, ...]] = ("memory", "workers", "executor", "resume", "force")
#: Those of the result, which a stream on the way to it has too.
_OF_RESULT: Final[tuple[str, ...]] = ("codec", "note", "shards")
#: The ending of the name of that stream.
STREAM_SUFFIX: Final = "-stream"


def refuse_parts_of_rows(conversion: Conversion, kind: Source | None) -> None:
    """Raise `ArgumentError` for a part of rows that are cut from all documents together.

    Parameters
    ----------
    conversion
        The conversion of documents, whose destination is a folder.
    kind
        The kind of its source; None: it is open already, and no line can name it.
    """
    if conversion.shard_range in (None, WHOLE) or conversion.is_stream:
        return
    path = conversion.destination
    error = ArgumentError(
        f"{path}: expected shard_range of a stream, found {conversion.target}: rows are cut from all documents "
        "together and shuffled, so that no job can write its part before all are tokenized; write a stream in parts, "
        "and the rows of that in parts" + ("" if kind is None else ", with these lines, each convert in every job:"),
        options=["shard_range"],
    )
    if kind is not None:
        for line in _lines(conversion, kind):
            error.add_note(line)
    raise error


def _lines(conversion: Conversion, kind: Source) -> list[str]:
    """Return the calls that write the stream, merge it, write the rows, and merge these."""
    given = {name: getattr(conversion, name) for name in sorted(conversion.given - {"layout", "shard_range"})}
    part = tuple(conversion.shard_range or WHOLE)
    both = {name: given[name] for name in _OF_BOTH if name in given}
    if conversion.val_fraction and "seed" in given:  # it draws the documents, and shuffles their rows
        both["seed"] = given["seed"]
    first = _chosen(given, kind.options_of(STREAM), leave_out=("seed", *_OF_RESULT, *both))
    if conversion.source_format != "auto":
        first["source_format"] = conversion.source_format
    if not conversion.val_last_shard:  # which is the last file of the source
        first["shards"] = part[1]
    second = _chosen(given, PACKED.options_of(conversion.target), leave_out=(*first, *both))
    if "shards" in given:
        second["shards"] = given["shards"]
    path: Path = conversion.destination
    stream = path.with_name(path.name + STREAM_SUFFIX)
    return [
        conversion_call(conversion.source, STREAM, stream, **first, **both, shard_range=part),
        merge_call(stream),
        conversion_call(stream, conversion.target, path, **second, **both, shard_range=part),
        merge_call(path),
    ]


def _chosen(given: Mapping[str, Any], known: Mapping[str, Any], leave_out: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of one step."""
    return {name: value for name, value in given.items() if name in known and name not in leave_out}
