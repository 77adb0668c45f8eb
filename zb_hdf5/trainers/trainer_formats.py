"""The table of flat formats: a row for each, by which a path is looked at before the file of the format is imported."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Final, NamedTuple

from zb_hdf5.errors import FormatError
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.formats.flat import FlatFormat


class TrainerFormat(NamedTuple):
    """A flat format in the table.

    Attributes
    ----------
    suffixes
        The endings of paths that are looked into; the first one is that of the ids, by which a folder is searched.
    format
        "module:name" of its `FlatFormat`.
    """

    suffixes: tuple[str, ...]
    format: str


#: In the order in which a path is compared with them; three formats use `.bin`, and are told apart by their content.
TRAINER_FORMATS: Final[dict[str, TrainerFormat]] = {
    "npy": TrainerFormat((".npy",), "zb_hdf5.formats.npy:NPY_ARRAYS"),
    "megatron": TrainerFormat((".bin", ".idx"), "zb_hdf5.trainers.megatron:MEGATRON"),
    "datatrove": TrainerFormat((".ds",), "zb_hdf5.trainers.datatrove:DATATROVE"),
    "llmc": TrainerFormat((".bin",), "zb_hdf5.trainers.llmc:LLMC"),
}


def flat_format(name: str) -> FlatFormat | None:
    """Return a flat format by its name; None for a format that is not flat."""
    row = TRAINER_FORMATS.get(name)
    return None if row is None else resolve_name(row.format)


def flat_files(name: str, path: Path) -> list[Path]:
    """Return the files at a path that are a stream of a flat format, by their names and their content.

    Parameters
    ----------
    name
        The format, a row of `TRAINER_FORMATS`.
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
    found = [(name, flat_format(name)) for name, row in TRAINER_FORMATS.items() if path.suffix in row.suffixes]
    if not found:
        return None
    signs = " or ".join(f"{name} ({each.sign})" for name, each in found if each is not None)
    return FormatError(f"{path}: expected a token file of {signs}, found neither; ids without a header are not read")


def flat_name_of(path: Path) -> str:
    """Return the name of the flat format that a path holds; "": none."""
    return next((name for name in TRAINER_FORMATS if flat_files(name, path)), "")
