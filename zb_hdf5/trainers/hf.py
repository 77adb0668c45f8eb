"""Hugging Face's data sets of ids: a row is a document, its ids are a list in one column, labels or masks in others.

Read are `save_to_disk` folders (`dataset_info.json`, `state.json`, `data-*.arrow`), and Arrow files, Parquet and JSON
lines. The library itself is not needed, and nothing is unpickled. Source: `datasets.arrow_dataset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import ArgumentError, ConvertError, FormatError, IncompleteError, ZbError, conversion_call
from zb_hdf5.files.line_file import JSON_SUFFIX
from zb_hdf5.files.listing import is_lone_json, listed
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import are_splits
from zb_hdf5.files.publishing import require_present
from zb_hdf5.formats.format import Found, RowsFormat
from zb_hdf5.formats.id_source import Columns, ColumnSelection, IdFile, IdSource
from zb_hdf5.spec import STREAM_LAYOUT, is_file_name
from zb_hdf5.text.json_lines import JsonLinesFile
from zb_hdf5.trainers.id_tables import JsonLinesIds, kind_of_file
from zb_hdf5.trainers.index_folder import json_object
from zb_hdf5.trainers.row_columns import RowColumns

#: The name of the format.
HF: Final = "hf"
#: The files of a folder of `save_to_disk`: the state of its table, its columns, and the splits of several.
STATE_NAME: Final = "state.json"
INFO_NAME: Final = "dataset_info.json"
SPLITS_NAME: Final = "dataset_dict.json"
#: The key of each by which a saved data set is known: a folder of tokens may have a `state.json` of a loader.
SAVED_KEYS: Final = {STATE_NAME: "_data_files", SPLITS_NAME: "splits"}
#: The endings of files in a folder: files of one row are of one kind.
FILE_SUFFIXES: Final[tuple[tuple[str, ...], ...]] = ((".parquet",), (".arrow",), JsonLinesFile.suffixes)


def files_of(look: Look) -> list[Path]:
    """Return the files of a data set, in the order of its rows.

    Parameters
    ----------
    look
        A look at a file, a folder of `save_to_disk`, or a folder with files of one kind in and below it.

    Raises
    ------
    ConvertError
        If a folder has several data sets whose names tell no splits, or files of several kinds, or none.
    IncompleteError
        If a file of a saved data set is missing.
    """
    path = look.path
    require_present(path)
    if not look.is_dir:
        return [path]
    if (path / STATE_NAME).exists():
        return _saved_files(path)
    if (path / INFO_NAME).exists():
        raise ConvertError(
            f"{path}: expected {STATE_NAME} beside {INFO_NAME}, as save_to_disk writes it: name the files of one split"
        )
    folders = _folders_of(look)
    if folders:
        return [file for folder in folders for file in files_of(look.of(folder))]
    found = [[*files] for kind in FILE_SUFFIXES if (files := listed(look, *kind).files)]
    if not found:
        suffixes = ", ".join(suffix for kind in FILE_SUFFIXES for suffix in kind)
        raise ConvertError(f"{path}: expected files that end in {suffixes}, found none")
    if len(found) > 1:
        names = " and ".join(files[0].name for files in found)
        raise ConvertError(f"{path}: expected files of one kind, found {names}: name the files of one")
    return found[0]


def _folders_of(look: Look) -> list[Path]:
    """Return the folders of `save_to_disk` in and below another one, each of which is a split; [] if it has none.

    Raises
    ------
    ConvertError
        If their names tell no splits.
    """
    path = look.path
    if (path / SPLITS_NAME).exists():
        splits = _strings(json_object(path / SPLITS_NAME).get("splits"), path / SPLITS_NAME)
        found = [path / split for split in splits]
        has = f"the splits {', '.join(splits)}"
    else:
        found = [file.parent for file in listed(look, STATE_NAME).files if file.name == STATE_NAME]
        has = "several data sets"
    if found and not are_splits(found, path):
        raise ConvertError(f"{path}: has {has}: name the folder of one: {conversion_call(found[0], STREAM_LAYOUT)}")
    return found


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a folder of `save_to_disk`: other files there are caches of the library."""
    state = json_object(folder / STATE_NAME)
    if state.get("_indices_data_files"):
        raise ConvertError(
            f"{folder / STATE_NAME}: expected rows in their order, found a table of their numbers: save it again with "
            "a newer version of datasets"
        )
    entries = state.get("_data_files")
    rows = entries if isinstance(entries, list) else []
    names = _strings([row.get("filename") if isinstance(row, dict) else None for row in rows], folder / STATE_NAME)
    files = [folder / name for name in names]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise IncompleteError(f"{missing}: expected a file, as {STATE_NAME} has it, found none")
    return files


def _strings(value: Any, path: Path) -> list[str]:
    """Return names of files beside a path; `FormatError` for anything else, such as a path elsewhere."""
    names = value if isinstance(value, list) else []
    if not names or not all(isinstance(name, str) and is_file_name(name) and Path(name).name == name for name in names):
        raise FormatError(f"{path}: expected the names of files beside it, found {value!r:.80}")
    return names


def open_hf(
    paths: Sequence[Path],
    look: Look | None = None,
    *,
    ids_column: str = "",
    field_columns: Sequence[str] | None = None,
    id_column: str = "",
    metadata_columns: Sequence[str] = (),
    rows: str = "documents",
    dtype: str = "auto",
    vocab_size: int = 0,
    max_document_tokens: int | None = None,
    max_line: int | None = None,
) -> IdSource:
    """Open data sets of ids as documents.

    Parameters
    ----------
    paths
        Files and folders, in the order of their rows.
    look
        The look by which the first of them was found; None: it is looked at.
    ids_column, field_columns, id_column, metadata_columns
        As for `ColumnSelection`.
    rows, dtype, vocab_size, max_document_tokens
        As for `IdSource`.
    max_line
        The bytes of the longest line; None: `bound_bytes`.

    Raises
    ------
    ArgumentError
        If `max_line` is named for files without lines.
    ConvertError
        If a path has no such files, or a file lacks a column, or two have not the same fields.
    FormatError
        If a file is damaged.
    """
    wanted = ColumnSelection(ids_column, field_columns, id_column, metadata_columns)
    files: list[IdFile] = []
    columns: Columns | None = None
    with Look(paths[0]) if look is None else nullcontext(look) as look:
        found = [file for path in paths for file in files_of(look.of(path))]
    for each in map(Look, found):  # a table is read by it; else it is not open
        kind = kind_of_file(each)
        if kind is JsonLinesIds:
            files.append(JsonLinesIds(each, wanted, columns, max_line))
            columns = files[0].columns
        else:
            files.append(kind(each, wanted))
    if max_line is not None and columns is None:
        raise ArgumentError(f"{paths[0]}: max_line is for JSON lines: leave it out", options=["max_line"])
    return IdSource(
        files,
        HF,
        wanted,
        rows=rows,
        dtype=dtype,
        vocab_size=vocab_size,
        max_document_tokens=max_document_tokens,
    )


def _has_key(path: Path, key: str) -> bool:
    """Return whether a file is there, and a JSON object with a key."""
    return path.exists() and key in json_object(path)


class HuggingFace(RowsFormat):
    """Data sets of Hugging Face: rows with lists of ids, and folders of `save_to_disk`, of one split or several."""

    def fits(self, look: Look) -> bool:
        """Return whether a path has lists of ids and no text, or is a folder of `save_to_disk`."""
        path = look.path
        if path.name.lower().endswith(JSON_SUFFIX) and not is_lone_json(path.name):
            return False
        try:
            if look.is_dir and any(_has_key(path / name, key) for name, key in SAVED_KEYS.items()):
                return True
            first = files_of(look)[0]
        except (OSError, ZbError):
            return False
        return RowColumns.of(look.of(first)).are_ids

    def rows(self, found: Sequence[Found], **options: Any) -> IdSource:
        return open_hf([each.path for each in found], found[0].look, **options)
