"""The error for a path whose tokens or text are known and not read in place, with the line that takes them in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from zb_hdf5.errors import ConvertError, FormatError, Remedy, conversion_call
from zb_hdf5.files.listing import folders_in, listed, own_files
from zb_hdf5.files.look import Look
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.files.signatures import signature_of
from zb_hdf5.files.ways import of_chats
from zb_hdf5.spec import SHARD_PREFIX, STREAM_LAYOUT
from zb_hdf5.store.format_list import FORMATS, flat_format, flat_formats, format_named
from zb_hdf5.store.found_store import stores_at
from zb_hdf5.store.recognition import flat_at, rows_at
from zb_hdf5.text.lacking_text import IDS_COLUMNS
from zb_hdf5.text.text_corpus import FILE_KINDS
from zb_hdf5.trainers.hf import HF, files_of
from zb_hdf5.trainers.id_tables import ParquetIds, kind_of_file
from zb_hdf5.trainers.row_columns import TEXT_COLUMN, RowColumns

#: Folders in a folder that are looked at, and those that a message names.
MAX_FOLDERS: Final = 16
FOLDERS_SHOWN: Final = 5
#: The tokenizer in a line to type: every machine has it.
ANY_TOKENIZER: Final = "byte"
#: The signatures of files of rows.
ROWS_NOUNS: Final = ("a Parquet file", "JSON", "an Arrow file", "an Arrow stream")
#: The ending of files that have ids alone: text is not read from them.
ARROW_SUFFIX: Final = ".arrow"
#: The signatures of files that belong to the index of their folder.
PART_NOUNS: Final = ("a shard of MDS", "a chunk of litdata")
_TEXT_SUFFIXES: Final = tuple(suffix for kind in FILE_KINDS.values() for suffix in kind.suffixes)


def not_in_place(look: Look) -> FormatError | None:
    """Return the error of a path whose tokens or text are not read in place, as its content or name tells.

    None: it is a store, or nothing is known of it.
    """
    return None if stores_at(look.path) else way_in(look) or _not_recognised(look)


def _not_recognised(look: Look) -> FormatError | None:
    """Return the error of a path that is named as files of flat formats are, and is of none of them; None: of another.

    For a folder, it is that of its first such file.
    """
    if look.is_far:
        return None
    path = look.path
    file = (_first_named_flat(look) or path) if look.is_dir else path
    name_of_file = file.name.lower()
    found = {name: flat_format(name) for name in flat_formats() if name_of_file.endswith(FORMATS[name].suffixes)}
    if not found:
        return None
    if line := _line_of_fairseq(look, file):
        return FormatError(f"{file}: expected an index of Megatron, found one of fairseq, without documents: {line}")
    signs = [f"{name} ({each.sign})" for name, each in found.items() if each is not None and each.sign]
    signed = " or ".join(signs)
    if file.is_file() and not look.of(file).num_bytes:
        return FormatError(f"{file}: expected a token file of {signed}, found an empty file")
    return FormatError(f"{file}: expected a token file of {signed}, found another file", remedy=Remedy.SOURCE_DTYPE)


def _first_named_flat(folder: Look) -> Path | None:
    """Return the first file in a folder that is named as files of flat formats are; None: there is none."""
    suffixes = tuple({FORMATS[name].suffix for name in flat_formats()})
    return next(iter(listed(folder, *suffixes).files), None)


def _line_of_fairseq(look: Look, path: Path) -> str:
    """Return the call for the ids of fairseq, whose index is named as that of Megatron is; "": of another file."""
    from zb_hdf5.trainers.megatron import fairseq_dtype  # which stores do not need

    index = path.with_suffix(".idx")
    if path.suffix not in (".bin", ".idx") or not index.is_file():
        return ""
    dtype = fairseq_dtype(look.of(index))
    ids = path.with_suffix(".bin")
    return conversion_call(ids, "stream", source_dtype=dtype, tokens_only=True) if dtype else ""


def way_in(look: Look) -> FormatError | None:
    """Return the error of a path that has tokens or text in a format that is converted first; None: of another path."""
    if look.is_far:
        return None
    if look.is_dir:
        return None if _is_of_a_store(look) else _of_folder(look)
    return way_of_documents(look) or _of_file(look)


def _is_of_a_store(folder: Look) -> bool:
    """Return whether a folder is a store that lost its index, or a conversion that is not finished."""
    is_unfinished = folder.path.name.endswith(PARTIAL_SUFFIX)
    return is_unfinished or any(file.name.startswith(SHARD_PREFIX) for file in own_files(folder))


def way_of_documents(look: Look) -> FormatError | None:
    """Return the error of a path in a format whose documents are read once, in order; None: of another path."""
    path = look.path
    found = rows_at(look)
    if found is None:
        return None
    if found.backend == HF:
        try:
            files_of(look)
        except ConvertError as error:  # of several splits: it has the line for one
            return FormatError(error.facts)
    noun = format_named(found.backend).noun
    return FormatError(f"{path}: has {noun}, which are not read in place: {conversion_call(path, STREAM_LAYOUT)}")


def _of_file(look: Look) -> FormatError | None:
    path = look.path
    signature = signature_of(look)
    if signature is None:
        return None
    is_of_rows = signature.noun in ROWS_NOUNS or path.name.endswith(_TEXT_SUFFIXES)
    if is_of_rows and (words := way_of_rows(look)):
        return FormatError(f"{path}: has rows, which are not read in place; {words}")
    if signature.way is not None:
        return FormatError(f"{path}: expected tokens, found {signature.words(path)}")
    if signature.noun in PART_NOUNS and rows_at(look.of(path.parent)):
        call = conversion_call(path.parent, STREAM_LAYOUT)
        return FormatError(f"{path}: expected the folder of a data set, found {signature.noun}: {call}")
    return None


def way_of_rows(source: Look) -> str:
    """Return the words for the ways from rows, or texts, to a stream; "": none is known.

    Parameters
    ----------
    source
        A file, or a folder of files; the first one decides.
    """
    first = source
    if source.is_dir:
        first = next(map(source.of, _texts_in(source)), source)
    path = first.path
    found = RowColumns.of(first)
    if found.chats and not found.ids:
        return of_chats(path, found.chats)
    words = []
    if found.text and not path.name.endswith(ARROW_SUFFIX):
        words.append(f"its text, in column {found.text!r}: {_call_for_text(source.path, first, found.text)}")
    if found.ids:
        words.append(f"its ids, in column {found.ids!r}: {_call_for_ids(source, found)}")
    return "; ".join(words)


def _texts_in(folder: Look) -> list[Path]:
    return [*listed(folder, *_TEXT_SUFFIXES).files]


def _call_for_text(source: Path, first: Look, column: str) -> str:
    path = first.path
    names: dict[str, str] = {} if column == TEXT_COLUMN else {"text_column": column}
    if not path.name.endswith(_TEXT_SUFFIXES):
        names["source_format"] = "parquet" if kind_of_file(first) is ParquetIds else "jsonl"
    return conversion_call(source, STREAM_LAYOUT, **names, tokenizer=ANY_TOKENIZER)


def _call_for_ids(source: Look, found: RowColumns) -> str:
    names = {} if found.ids in IDS_COLUMNS else {"ids_column": found.ids}
    rows = rows_at(source)
    if names or found.text == TEXT_COLUMN or rows is None or rows.backend != HF:
        names["source_format"] = HF
    return conversion_call(source.path, STREAM_LAYOUT, **names)


def _of_folder(look: Look) -> FormatError | None:
    if documents := way_of_documents(look):
        return documents
    folder = look.path
    inside = map(look.of, folders_in(look)[:MAX_FOLDERS])
    known = [each.path for each in inside if rows_at(each) or flat_at(each)]
    if known:
        named = ", ".join(each.name for each in known[:FOLDERS_SHOWN])
        call = conversion_call(known[0], STREAM_LAYOUT)
        return FormatError(f"{folder}: has the data sets {named}: convert each by itself: {call}")
    if _texts_in(look):
        call = conversion_call(folder, STREAM_LAYOUT, tokenizer=ANY_TOKENIZER)
        words = way_of_rows(look) or f"its text: {call}"
        return FormatError(f"{folder}: has text or rows, which are not read in place; {words}")
    first = _first_named_flat(look) or next(iter(own_files(look)), None)  # not a sidecar, such as a .csv.gz
    return None if first is None else _of_file(look.of(first))
