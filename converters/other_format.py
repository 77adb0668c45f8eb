"""The format that a source has, in place of the one that was named for it: the line to type for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from zb_hdf5.console import words_of_option
from zb_hdf5.converters.conversion import STREAM, Conversion
from zb_hdf5.converters.sources import source_named, target_of
from zb_hdf5.errors import Remedy, ZbError
from zb_hdf5.files.listing import folders_in, listed
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import RemotePath, any_path
from zb_hdf5.files.signatures import signature_of
from zb_hdf5.store.format_list import FORMATS, flat_format, format_named
from zb_hdf5.store.recognition import flat_at, headerless_name_of, rows_at
from zb_hdf5.store.way_in import MAX_FOLDERS

#: The dtype in a line to type for ids without a header, which nobody can tell from them.
ANY_DTYPE: Final = "uint16"


def line_for_other_format(conversion: Conversion, error: ZbError) -> str:
    """Return the words for the format that the first source has, with the line to type; "": none is known.

    Parameters
    ----------
    conversion
        A conversion that names the format of its sources.
    error
        The error with which it has ended.
    """
    given = conversion.source if isinstance(conversion.source, list | tuple) else [conversion.source]
    if conversion.source_format == "auto" or not given or not isinstance(given[0], str | os.PathLike):
        return ""
    first = any_path(given[0])
    if isinstance(first, RemotePath):
        return ""
    with suppress(OSError, ZbError), Look(first) as look:
        for place in _places(look):
            options = _options_at(look.of(place), conversion, error)
            if options:
                others = given[1:] if place == first else []
                return f"{_facts(place, options)}: {_line([place, *others], conversion, options)}"
    return ""


def _places(look: Look) -> list[Path]:
    """Return a path, and the first folders in it that have files."""
    return [look.path, *folders_in(look)[:MAX_FOLDERS]] if look.is_dir else [look.path]


def _options_at(look: Look, conversion: Conversion, error: ZbError) -> dict[str, str]:
    """Return the options that name the format of a path; none if it is the named one, or is not known."""
    named = conversion.source_format
    name = _name_at(look)
    if name:
        is_as_named = name == named or (named == STREAM and flat_format(name) is not None)
        return {} if is_as_named else {"source_format": name}
    row = None if error.remedy is Remedy.SOURCE_DTYPE else FORMATS.get(named)
    expected = row.suffixes if row is not None and row.is_by_ending else ()
    if conversion.source_dtype is None and _may_lack_header(look, expected):
        return {"source_format": headerless_name_of(look), "source_dtype": ANY_DTYPE}
    return {}


def _name_at(look: Look) -> str:
    """Return the name of the format of rows at a path, or of files whose ids follow each other; "": it has neither."""
    rows = rows_at(look)
    if rows is not None:
        return rows.backend
    flat = flat_at(look)
    return "" if flat is None else flat.code.name


def _may_lack_header(look: Look, expected: tuple[str, ...]) -> bool:
    """Return whether a path has a suffix of files without a header, other than those that are expected."""
    suffixes = {row.suffixes[0] for row in FORMATS.values() if row.lacks_header} - {*expected}
    path = look.path
    inside = [file for file in listed(look, *suffixes).files if path in (file, file.parent)]
    files = [file for file in inside if file.name.lower().endswith(tuple(suffixes))]
    return bool(files) and signature_of(look.of(files[0])) is None


def _facts(path: Path, options: dict[str, str]) -> str:
    noun = format_named(options["source_format"]).noun
    return f"{path}: may have {noun}; if {ANY_DTYPE} is their dtype" if len(options) > 1 else f"{path}: has {noun}"


def _line(sources: Sequence[str | os.PathLike[str]], conversion: Conversion, options: dict[str, str]) -> str:
    """Return the command of a conversion with other options."""
    destination = any_path(conversion.destination)
    if conversion.target not in ("auto", target_of(destination)):
        options = {**options, "target": conversion.target}
    words = ["zb", "convert", *map(str, map(any_path, sources)), str(destination)]
    kind = source_named(options["source_format"], conversion)
    known = {*kind.options_of_any_target(conversion.is_stream)} - {*options}
    given = {name: getattr(conversion, name) for name in sorted(conversion.given & known)}
    for name, value in {**options, **given}.items():
        words += words_of_option(name, value)
    return shlex.join(words)
