"""The documents of files and folders: of Parquet, of JSON lines and of text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import ConvertError, Remedy, counted, parse_size
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import local_path
from zb_hdf5.text.document_file import DocumentFile
from zb_hdf5.text.json_lines import JsonLinesFile
from zb_hdf5.text.lacking_text import KEYS_SHOWN, without_text_key
from zb_hdf5.text.parquet_file import ParquetFile
from zb_hdf5.text.plain_text import PlainTextFile

#: Bytes of files of JSON lines in which the key of the text is looked for.
SAMPLE_BYTES: Final = 256 << 20
#: The one table of what documents are read from; each kind has its command of `zb convert`.
FILE_KINDS: Final[dict[str, type[DocumentFile]]] = {
    "parquet": ParquetFile,
    "jsonl": JsonLinesFile,
    "text": PlainTextFile,
}


def open_documents(
    paths: Sequence[str | os.PathLike[str]],
    kind: str | None = None,
    column: str = "text",
    id_column: str = "",
    metadata_columns: Sequence[str] = (),
    max_line: int | str | None = None,
    look: Look | None = None,
) -> list[DocumentFile]:
    """Open document files; folders are searched recursively, sorted by path.

    Parameters
    ----------
    paths
        Files and folders, in the order of their documents.
    kind
        One of `FILE_KINDS`: files may have any name, and those in folders its suffixes. None: each file is of the kind
        that has its suffix.
    column, id_column, metadata_columns
        As for `DocumentFile`.
    max_line
        The size of the longest line, or of a text file, such as "1GiB"; None: `ZB_MAX_LINE`, or 256 MiB.
    look
        A look at the first path, whose `of` has those at the others; None: each is looked at.

    Raises
    ------
    ConvertError
        If a path has no such files, a file is named twice, or lacks a column, or no line of JSON has a key of the
        metadata.
    """
    from zb_hdf5.files.listing import require_named_once  # numpy, which help does not need

    most = parse_size(max_line) if isinstance(max_line, str) else max_line
    kinds = list(FILE_KINDS.values()) if kind is None else [FILE_KINDS[kind]]
    looks = map(Look if look is None else look.of, map(local_path, paths))
    files = [file for each in looks for file in _files_of(each, kind, kinds)]
    require_named_once(files, "documents")
    opened = []
    for file in files:
        opener = next(each for each in kinds if kind or file.name.lower().endswith(each.suffixes))
        opened.append(opener(file, column, id_column, metadata_columns, most))
    _require_text_key(opened)
    _require_metadata_keys(opened)
    return opened


def _files_of(look: Look, kind: str | None, kinds: Sequence[type[DocumentFile]]) -> list[Path]:
    """Return the files of a path that are of a kind; raise `ConvertError` if there are none, or files of another."""
    from zb_hdf5.files.listing import listed  # numpy, which help does not need
    from zb_hdf5.files.publishing import require_present

    path = look.path
    require_present(path)
    suffixes = tuple(suffix for each in kinds for suffix in each.suffixes)
    found = listed(look, *suffixes).files
    if kind is None and not look.is_dir:
        found = tuple(file for file in found if file.name.lower().endswith(suffixes))
    others = []
    for name, each in FILE_KINDS.items():
        inside = found or listed(look, *each.suffixes).files
        if name != kind and any(file.name.lower().endswith(each.suffixes) for file in inside):
            others.append(name)
    is_mistaken = kind is not None and bool(others) and "parquet" in (kind, *others)  # text may have any name
    if found and not is_mistaken:
        return [*found]
    facts = f"{path}: expected files that end in {', '.join(suffixes)}"
    if not found:
        facts += ", found none"
    if not others:
        raise ConvertError(facts)
    facts += f"; {FILE_KINDS[others[0]].suffixes[0]} files are there"
    raise ConvertError(facts, remedy=Remedy.OTHER_KIND, at=others[0])


def _require_text_key(files: Sequence[DocumentFile]) -> None:
    """Raise `ConvertError` if no line of files of JSON lines has the key of the text; it names the others.

    The first lines of every file are looked at, and then all lines, up to a number of bytes.
    """
    lines = [file for file in files if isinstance(file, JsonLinesFile)]
    if len(lines) < len(files):
        return
    keys: dict[str, Any] = {}  # with a value of each
    for found in chain.from_iterable(file.first_objects() for file in lines):
        if lines[0].may_have_text(found):
            return
        keys |= {name: value for name, value in found.items() if value or name not in keys}
    if not keys:
        return
    share = SAMPLE_BYTES // len(lines)
    has_text = {file.has_one(file.may_have_text, share) for file in lines}
    if True not in has_text:
        raise without_text_key(lines, keys, is_all=None not in has_text)


def _require_metadata_keys(files: Sequence[DocumentFile]) -> None:
    """Raise `ConvertError` if no line of files of JSON lines has a key of the metadata; it names the others.

    As many lines are looked at as for the key of the text.
    """
    lines = [file for file in files if isinstance(file, JsonLinesFile)]
    if not files or len(lines) < len(files):
        return
    missing = dict.fromkeys(lines[0].metadata_columns)
    keys: dict[str, None] = {}
    for found in chain.from_iterable(file.first_objects() for file in lines if missing):
        keys |= dict.fromkeys(found)
    share = SAMPLE_BYTES // len(lines)
    for name in missing.keys() - keys if keys else ():
        if not any(file.has_one(partial(_has_key, name), share) for file in lines):
            named = ", ".join([*keys][:KEYS_SHOWN])
            raise ConvertError(
                f"{files[0].path}: no key {name!r} for its documents; the keys in {counted(len(files), 'file')} are: "
                f"{named}"
            )


def _has_key(name: str, found: Mapping[str, Any]) -> bool:
    """Return whether the object of a line has a key."""
    return name in found
