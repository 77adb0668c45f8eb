"""The abilities of each format, as the tables have them: read in place, converted, written, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from zb_hdf5.converters.conversion import STREAM
from zb_hdf5.converters.sources import Source, sources, target_names
from zb_hdf5.store.format_list import batch_format, row_named


class Capability(NamedTuple):
    """The abilities of one format.

    Attributes
    ----------
    in_place
        Whether `open_reader` and the loaders open it.
    is_source, is_target
        Whether it is converted, and whether it is written.
    documents, fields
        Whether it tells documents apart, and holds values that are aligned with the tokens.
    resume, shard_range
        Whether its conversion to batches can be resumed after a kill, and divided among jobs.
    shard_range_to_stream
        Whether its conversion to a stream can be divided among jobs.
    out_in_parts
        Whether a folder of it can be written by several jobs, each with its `shard_range`.
    """

    in_place: bool
    is_source: bool
    is_target: bool
    documents: bool
    fields: bool
    resume: bool
    shard_range: bool
    shard_range_to_stream: bool
    out_in_parts: bool


#: The heading of each ability.
HEADINGS: Final = ("in place", "in", "out", "documents", "fields", "--resume", "--shard-range", "out in parts")


def capabilities() -> dict[str, Capability]:
    """Return the abilities of all formats, by their names."""
    kinds = sources()
    written = target_names()
    return {
        name: _capability(name, kinds.get(name), is_target=name in written)
        for name in dict.fromkeys((*kinds, *written))
    }


def _capability(name: str, kind: Source | None, *, is_target: bool) -> Capability:
    ours = batch_format(name)
    theirs = row_named(name)
    options = {} if kind is None else kind.options_of("hdf5")
    holds_all = name == STREAM or (ours is not None and not ours.tokens_only)
    has_documents = kind is not None and kind.has_documents
    if theirs is not None:
        has_documents = theirs.holds_documents
    is_flat = theirs is not None and bool(theirs.is_flat or theirs.read_by)
    return Capability(
        in_place=holds_all or (ours is not None and ours.holds_batches) or is_flat,
        is_source=kind is not None,
        is_target=is_target,
        documents=holds_all or has_documents,
        fields=holds_all or (theirs is not None and theirs.holds_fields != ()),
        resume="resume" in options,
        shard_range="shard_range" in options and kind is not None and not kind.is_staged,
        shard_range_to_stream=kind is not None and (holds_all or kind.has_documents),
        out_in_parts=is_target,
    )


def _cells(found: Capability) -> list[str]:
    """Return the cells of a format: one tells whether jobs divide batches, else whether they divide a stream."""
    able = found._asdict()
    in_stream = able.pop("shard_range_to_stream")
    cells = {name: "yes" if value else "-" for name, value in able.items()}
    if in_stream and not found.shard_range:
        cells["shard_range"] = STREAM
    return [*cells.values()]


def capability_lines() -> list[tuple[str, str]]:
    """Return the abilities for people: the name of each format, and a column for each ability."""
    widths = [len(heading) for heading in HEADINGS]
    rows: list[tuple[str, Sequence[str]]] = [("format", HEADINGS)]
    rows += [(name, _cells(found)) for name, found in capabilities().items()]
    return [
        (name, "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
        for name, cells in rows
    ]
