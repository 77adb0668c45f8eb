"""The table of the formats of other trainers: a row for each, read before the file of the format is imported.

A format plugs in here: one file with what it is, read in place if its ids lie flat, opened as a source of documents,
written as a target; and one row. The commands, the options and the messages follow from the row.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final, NamedTuple

from zb_hdf5.errors import FormatError
from zb_hdf5.files.paths import RemotePath

if TYPE_CHECKING:  # numpy, which the help of the commands does not need
    from zb_hdf5.formats.flat import FlatFormat


class TrainerFormat(NamedTuple):
    """A format of another trainer in the table: "module:name" of each part that it has, "" of one that it has not.

    Attributes
    ----------
    noun
        Such files, in messages and in the help.
    suffixes
        The endings of paths that are looked into: of files, and of names in a folder. The first one is that of the
        ids, by which a folder is searched.
    flat
        Its `FlatFormat`, which is read in place. Its documents are a source without more code.
    recognises
        Of a format that is not flat, a function of a path that returns whether it is one, by its content. A path that
        has none of the suffixes is not asked about.
    source
        A function of a list of paths, as they were given, and of `options` by name, which returns a `DocumentSource`.
    options
        The options of a conversion that `source` takes: names of fields of `FormatOptions`.
    writer
        Its `DocumentWriter`: it is a target.
    holds_documents
        Whether it tells documents apart.
    holds_ids
        Of a target: whether it keeps the ids and the metadata of documents.
    holds_fields
        Of a target: the names of the fields that it keeps; None: any.
    """

    noun: str
    suffixes: tuple[str, ...]
    flat: str = ""
    recognises: str = ""
    source: str = ""
    options: tuple[str, ...] = ()
    writer: str = ""
    holds_documents: bool = True
    holds_ids: bool = False
    holds_fields: tuple[str, ...] | None = ()


#: In the order in which a path is compared with them; three formats use `.bin`, and are told apart by their content.
TRAINER_FORMATS: Final[dict[str, TrainerFormat]] = {
    "npy": TrainerFormat(
        ".npy files of tokens", (".npy",), flat="zb_hdf5.formats.npy:NPY_ARRAYS", holds_documents=False
    ),
    "megatron": TrainerFormat(
        ".bin and .idx files of Megatron-LM", (".bin", ".idx"), flat="zb_hdf5.trainers.megatron:MEGATRON"
    ),
    "datatrove": TrainerFormat(".ds files of datatrove", (".ds",), flat="zb_hdf5.trainers.datatrove:DATATROVE"),
    "llmc": TrainerFormat(".bin files of llm.c", (".bin",), flat="zb_hdf5.trainers.llmc:LLMC", holds_documents=False),
}


def flat_names() -> list[str]:
    """Return the names of the formats that are read in place."""
    return [name for name, row in TRAINER_FORMATS.items() if row.flat]


def document_targets() -> list[str]:
    """Return the names of the formats that are written as documents."""
    return [name for name, row in TRAINER_FORMATS.items() if row.writer]


def flat_format(name: str) -> FlatFormat | None:
    """Return a flat format by its name; None for a format that is not flat."""
    row = TRAINER_FORMATS.get(name)
    return None if row is None or not row.flat else resolve_name(row.flat)


def source_name_of(path: Path) -> str:
    """Return the name of the format that a path holds, of those that are not read in place; "": none."""
    for name, row in TRAINER_FORMATS.items():
        if row.recognises and _has_suffix(path, row.suffixes) and resolve_name(row.recognises)(path):
            return name
    return ""


def _has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file ends in one of the suffixes, or a folder has a name that does."""
    if isinstance(path, RemotePath):
        return False
    if path.is_dir():
        return any(each.name.endswith(suffixes) for each in path.iterdir())
    return path.name.endswith(suffixes)


def flat_files(name: str, path: Path) -> list[Path]:
    """Return the files at a path that are a stream of a flat format, by their names and their content.

    Parameters
    ----------
    name
        The format, a row of `TRAINER_FORMATS` that is flat.
    path
        A file, or a folder of files.
    """
    suffixes = TRAINER_FORMATS[name].suffixes
    if isinstance(path, RemotePath):
        return []
    is_named = path.suffix in suffixes or (path.is_dir() and any(path.glob(f"*{suffixes[0]}")))
    found = flat_format(name) if is_named else None
    return [] if found is None else found.files(path)


def not_recognised(path: Path) -> FormatError | None:
    """Return the error of a file that ends as those of flat formats do, and is none of them; None for another file."""
    found = {name: flat_format(name) for name in flat_names() if path.suffix in TRAINER_FORMATS[name].suffixes}
    if not found:
        return None
    signs = " or ".join(f"{name} ({each.sign})" for name, each in found.items() if each is not None)
    return FormatError(f"{path}: expected a token file of {signs}, found neither; ids without a header are not read")


def flat_name_of(path: Path) -> str:
    """Return the name of the flat format that a path holds; "": none."""
    return next((name for name in flat_names() if flat_files(name, path)), "")
