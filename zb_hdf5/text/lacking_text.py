"""The error for files that have no text under the name of their column or key, with the way to their ids or chats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import ConvertError, Remedy, conversion_call, counted
from zb_hdf5.files.ways import of_chats
from zb_hdf5.text.document_file import DocumentFile

#: Keys of its objects that a message names.
KEYS_SHOWN: Final = 20
#: Columns that hold ids in place of text, in the order in which they are looked for.
IDS_COLUMNS: Final = ("input_ids", "tokens", "token_ids", "ids")
#: The types of lists of messages begin so, in JSON and in Arrow; and a list of ids has such a type.
CHAT_KINDS: Final = ("lists of dict", "list<item: struct<", "list<element: struct<", "large_list<item: struct<")
IDS_KIND: Final = re.compile(r"list<\w+: u?int\d+>")


def without_text_key(files: Sequence[DocumentFile], keys: Mapping[str, Any], *, is_all: bool) -> ConvertError:
    """Return the error of files of JSON lines without text under its key.

    Parameters
    ----------
    files
        The files.
    keys
        Their keys, with a value of each.
    is_all
        All lines were looked at, and not the first ones only.
    """
    path, column = files[0].path, files[0].column
    count = counted(len(files), "file")
    if column in keys:
        way = _way_of_lists(path, {column: keys[column]}) or "name another key"
        return ConvertError(f"{path}: key {column!r}: expected text in the lines of {count}, found lists; {way}")
    lack = f"no key {column!r} in the first lines of {count}"
    if is_all:
        lack = f"no documents in {count} (no key {column!r} in its lines)"
    shown = ", ".join([*keys][:KEYS_SHOWN])
    texts = [name for name, value in keys.items() if isinstance(value, str) or name in IDS_COLUMNS]
    chats = _first_of(keys, dict)
    if chats:
        return without_text(f"{path}: {lack}; its keys are: {shown}", texts, of_chats(path, chats))
    if texts:
        return without_text(f"{path}: {lack}", texts, remedy=Remedy.TEXT_COLUMN)
    return ConvertError(f"{path}: {lack}; {_way_of_lists(path, keys) or f'none of its keys has text: {shown}'}")


def _way_of_lists(path: Path, keys: Mapping[str, Any]) -> str:
    """Return the way from JSON lines whose keys have values that are chats, or ids; "": none are."""
    chats = _first_of(keys, dict)
    if chats:
        return of_chats(path, chats)
    ids = _first_of(keys, int)
    return _way_of_ids(path, ids) if ids else ""


def _first_of(keys: Mapping[str, Any], kind: type) -> str:
    """Return the first key whose value is a list that begins with an item of a type; "": none is."""
    lists = {name: value for name, value in keys.items() if isinstance(value, list) and value}
    return next((name for name, value in lists.items() if isinstance(value[0], kind)), "")


def _way_of_ids(path: Path, column: str) -> str:
    call = conversion_call(path, "stream", source_format="hf", ids_column=column)
    return f"column {column!r} has ids: {call}"


def way_of_type(path: Path, column: str, kind: str) -> str:
    """Return the way from a column of Parquet that has no text, by its type."""
    if kind.startswith(CHAT_KINDS):
        return of_chats(path, column)
    return _way_of_ids(path, column) if IDS_KIND.fullmatch(kind.removeprefix("large_")) else "name another column"


def chats_in(path: Path, schema: Any) -> str:
    """Return the way from the first column of chats of a Parquet file; "": it has none."""
    kinds = {name: str(schema.field(name).type) for name in schema.names}
    return next((of_chats(path, name) for name, kind in kinds.items() if kind.startswith(CHAT_KINDS)), "")


def without_text(facts: str, names: Iterable[str], chats: str = "", remedy: Remedy | None = None) -> ConvertError:
    """Return the error of files without the column of the text, whose columns may have ids, or `chats` a way."""
    found = [*names]
    ids = next((name for name in IDS_COLUMNS if name in found), "")
    if ids:
        return ConvertError(facts, remedy=Remedy.IDS, at=ids)
    if chats:
        return ConvertError(f"{facts}; {chats}")
    return ConvertError(facts, remedy=remedy, at=", ".join(found[:KEYS_SHOWN]))
