"""The table of the formats of other trainers: a row for each, read before the file of the format is imported.

A format plugs in here: one file with what it is, read in place if its ids lie flat, opened as a source of documents,
written as a target; and one row. The commands, the options and the messages follow from the row. Formats of installed
packages have such rows too, and are asked only where no format of this table is meant.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zb_hdf5.errors import ArgumentError, FormatError, Remedy, conversion_call
from zb_hdf5.files.line_file import LINE_SUFFIXES
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.formats.registry import FORMATS, HDF5Format, backend_in
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.trainers.installed_formats import Installed, errors_of, first_of, load_installed, noted

if TYPE_CHECKING:  # numpy, which the help of the commands does not need
    from zb_hdf5.formats.document_writer import DocumentWriter
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
        Its subclass of `FlatFormat`: it is read in place. Its documents are a source without more code.
    lacks_header
        Whether its files may have no header: `source_dtype` then names the dtype of their ids.
    read_by
        The name of the row that reads the files of a target, if that is another one.
    recognises
        Of a format that is not flat, a function of a `Look` at a path that returns whether it is one, by its content. A
        path that has none of the suffixes is not asked about.
    source
        A function of a list of paths, as they were given, and of `options` by name, which returns a `DocumentSource`.
    options
        The options of a conversion that `source` takes: names of fields of `FormatOptions`.
    writer
        Its `DocumentWriter`: it is a target.
    holds_documents
        Whether its files tell documents apart.
    needs_boundary
        Of a target: whether its readers tell documents apart by a token between them.
    holds_ids, holds_metadata
        Of a target: whether it keeps the ids of documents, and their metadata.
    holds_fields
        Of a target: the names of the fields that it keeps; None: any.
    """

    noun: str
    suffixes: tuple[str, ...]
    flat: str = ""
    lacks_header: bool = False
    read_by: str = ""
    recognises: str = ""
    source: str = ""
    options: tuple[str, ...] = ()
    writer: str = ""
    holds_documents: bool = True
    needs_boundary: bool = False
    holds_ids: bool = False
    holds_metadata: bool = False
    holds_fields: tuple[str, ...] | None = ()


#: The options of documents that are rows of ids, and of rows with several columns.
_ROW_OPTIONS: Final = ("rows", "dtype", "vocab_size", "max_document_tokens")
_COLUMN_OPTIONS: Final = ("ids_column", "field_columns", "id_column", "metadata_columns")
#: In the order in which a path is compared with them; three formats use `.bin`, and are told apart by their content.
TRAINER_FORMATS: Final[dict[str, TrainerFormat]] = {
    "npy": TrainerFormat(
        ".npy files of tokens", (".npy",), flat="zb_hdf5.formats.npy:NpyArrays", holds_documents=False
    ),
    "megatron": TrainerFormat(
        ".bin and .idx files of Megatron-LM",
        (".bin", ".idx"),
        flat="zb_hdf5.trainers.megatron:Megatron",
        writer="zb_hdf5.trainers.megatron:MegatronWriter",
    ),
    "datatrove": TrainerFormat(
        ".ds files of datatrove",
        (".ds",),
        flat="zb_hdf5.trainers.datatrove:Datatrove",
        writer="zb_hdf5.trainers.datatrove:DatatroveWriter",
        holds_fields=("loss_mask",),
    ),
    "olmo": TrainerFormat(
        "headerless .npy files of OLMo",
        (".npy",),
        flat="zb_hdf5.trainers.olmo:OlmoFiles",
        lacks_header=True,
        writer="zb_hdf5.trainers.olmo:OlmoWriter",
        needs_boundary=True,
        holds_ids=True,
    ),
    "bin": TrainerFormat(
        ".bin files of llm.c or nanoGPT",
        (".bin",),
        flat="zb_hdf5.trainers.bin:BinFiles",
        lacks_header=True,
        writer="zb_hdf5.trainers.bin:BinWriter",
        holds_documents=False,
    ),
    "llmc": TrainerFormat(
        ".bin files of llm.c, written with their header",
        (".bin",),
        read_by="bin",
        writer="zb_hdf5.trainers.bin:LlmcWriter",
        holds_documents=False,
    ),
    "hf": TrainerFormat(
        "Hugging Face's data sets of ids",
        (".arrow", ".parquet", *LINE_SUFFIXES, "state.json", "dataset_dict.json"),
        recognises="zb_hdf5.trainers.hf:is_hf",
        source="zb_hdf5.trainers.hf:open_hf",
        options=(*_ROW_OPTIONS, *_COLUMN_OPTIONS, "max_line"),
        writer="zb_hdf5.trainers.table_writers:ArrowWriter",
        holds_ids=True,
        holds_metadata=True,
        holds_fields=None,
    ),
    "parquet": TrainerFormat(
        "Parquet files of ids",
        (".parquet",),
        writer="zb_hdf5.trainers.table_writers:ParquetWriter",
        holds_ids=True,
        holds_metadata=True,
        holds_fields=None,
    ),
    "mds": TrainerFormat(
        "MDS folders of MosaicML streaming",
        ("index.json", ".mds"),
        recognises="zb_hdf5.trainers.mds:is_mds",
        source="zb_hdf5.trainers.mds:open_mds",
        options=(*_ROW_OPTIONS, *_COLUMN_OPTIONS, "source_dtype"),
        writer="zb_hdf5.trainers.mds_writer:MdsWriter",
        holds_ids=True,
        holds_metadata=True,
        holds_fields=None,
    ),
    "litdata": TrainerFormat(
        "folders of litdata",
        ("index.json",),
        recognises="zb_hdf5.trainers.litdata:is_litdata",
        source="zb_hdf5.trainers.litdata:open_litdata",
        options=_ROW_OPTIONS,
    ),
    "ragged": TrainerFormat(
        "HDF5 files of documents",
        (".h5", ".hdf5", ".hdf", ".he5"),
        recognises="zb_hdf5.trainers.ragged:is_ragged",
        source="zb_hdf5.trainers.ragged:open_ragged",
        options=(*_ROW_OPTIONS, "dataset", "offsets", "unwritten", "field_columns"),
        holds_fields=None,
    ),
}


#: The endings of ids and of their documents, of formats whose own programs leave them out of a path.
PREFIX_ENDINGS: Final = ((".bin", ".idx"), (".ds", ".ds.index"))
#: Words that stand where the name of a format does, and name none of these.
_OTHER_WORDS: Final = ("", "auto", "stream")
#: The formats of installed packages, once they were asked for.
INSTALLED: Final[Installed[TrainerFormat]] = Installed({}, {}, [])


@cache
def add_installed() -> None:
    """Load the formats of installed packages, once. Those that cannot be loaded become notes of `INSTALLED`."""
    found = load_installed(TrainerFormat, (*FORMATS, *TRAINER_FORMATS, *_OTHER_WORDS))
    INSTALLED.rows.update(found.rows)
    INSTALLED.packages.update(found.packages)
    INSTALLED.notes[:] = found.notes


def known_formats() -> dict[str, TrainerFormat]:
    """Return our formats, and those of installed packages if they were asked for."""
    return {**TRAINER_FORMATS, **INSTALLED.rows}


def row_named(name: str) -> TrainerFormat | None:
    """Return the row of a format; None if it has none. Packages are asked for a name that is none of ours."""
    row = TRAINER_FORMATS.get(name)
    if row is None and name not in FORMATS and name not in _OTHER_WORDS:
        add_installed()
        row = INSTALLED.rows.get(name)
    return row


def format_named(name: str) -> TrainerFormat:
    """Return the row of a format. Raises `ArgumentError` if it has none."""
    row = row_named(name)
    if row is None:
        raise noted(ArgumentError(f"expected the name of a format, found {name!r}"), INSTALLED.notes)
    return row


def package_of(name: str) -> str:
    """Return the package that has a format, with its version; "": this one."""
    return "" if name in TRAINER_FORMATS else INSTALLED.packages.get(name, "")


def flat_names() -> list[str]:
    """Return the names of our formats that are read in place."""
    return [name for name, row in TRAINER_FORMATS.items() if row.flat]


def document_targets() -> list[str]:
    """Return the names of the formats that are written as documents."""
    return [name for name, row in known_formats().items() if row.writer]


def flat_format(name: str, read_as: ReadAs = AS_STORED) -> FlatFormat | None:
    """Return a flat format by its name; None for a format that is not flat.

    Parameters
    ----------
    read_as
        How its files are read: the dtype of ids without a header.
    """
    row = row_named(name)
    if row is None or not row.flat:
        return None
    package = package_of(name)
    found: FlatFormat
    if not package:
        found = _part_of(row.flat)(row.suffixes, read_as)
        return found
    from zb_hdf5.trainers.guards import GuardedFlat  # numpy, which the help of the commands does not need

    with errors_of(package, name):
        found = resolve_name(row.flat)(row.suffixes, read_as)
        return GuardedFlat(found, package, name)


def format_without_digests(name: str, read_as: ReadAs | None) -> FlatFormat | None:
    """Return the format of files that hold no digests: a flat one, or HDF5 of another program, which has no row.

    Parameters
    ----------
    read_as
        How the files are read; None: they are those of a store, which hold digests.
    """
    if read_as is None:
        return None
    if name != HDF5Format.name:
        return flat_format(name, read_as)
    from zb_hdf5.formats.foreign_files import ForeignFiles  # h5py, which no other format needs

    return ForeignFiles(read_as)


@cache
def _part_of(name: str) -> Any:
    """Import a part of a format by its name, once: thousands of files are opened by it."""
    return resolve_name(name)


def document_writer(name: str) -> type[DocumentWriter]:
    """Return the writer of a format that is a target."""
    row = format_named(name)
    package = package_of(name)
    with errors_of(package, name):
        found: type[DocumentWriter] = resolve_name(row.writer)
    if not package:
        return found
    from zb_hdf5.trainers.guards import guarded_writer

    return guarded_writer(found, package, name)


def source_name_of(look: Look) -> str:
    """Return the name of our format that a path holds, of those that are not read in place; "": none."""
    return next((name for name in TRAINER_FORMATS if _recognises(name, look)), "")


def _recognises(name: str, look: Look) -> bool:
    """Return whether a format that is not read in place recognises a path."""
    row = row_named(name)
    if row is None or not row.recognises or not _has_suffix(look, row.suffixes):
        return False
    with errors_of(package_of(name), name):
        return bool(resolve_name(row.recognises)(look))


def installed_name_of(look: Look, notes: list[str]) -> str:
    """Return the name of the format of an installed package that a path holds; "": none. Those that fail add notes."""
    add_installed()
    notes += INSTALLED.notes
    return first_of(INSTALLED.rows, lambda name: bool(flat_files(name, look)) or _recognises(name, look), notes)


def _has_suffix(look: Look, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file ends in one of the suffixes, or a folder has files that do, in or below it.

    A hidden file in a folder that has such a name marks it, as `.zarray` does.
    """
    path = look.path
    if look.is_far:
        return False
    if look.is_dir:
        from zb_hdf5.files.listing import listed  # numpy, which the help of the commands does not need

        return bool(listed(path, *suffixes).names) or any((path / suffix).exists() for suffix in suffixes)
    return path.name.lower().endswith(suffixes)


def flat_files(name: str, look: Look, read_as: ReadAs = AS_STORED) -> list[Path]:
    """Return the files at a path that are a stream of a flat format, by their names and their content.

    Parameters
    ----------
    name
        The format, which is flat.
    look
        A look at a file, or at a folder of files.
    read_as
        How they are read: files without a header may have any suffix.
    """
    from zb_hdf5.files.listing import kept_listings  # numpy, which the help of the commands does not need

    row = row_named(name)
    if row is None or look.is_far:
        return []
    with kept_listings():
        is_named = read_as.lacks_header or _has_suffix(look, row.suffixes)
        found = flat_format(name, read_as) if is_named else None
        return [] if found is None else found.files(look)


def headerless_name_of(look: Look) -> str:
    """Return the name of the format of files without a header: by their suffix, or by those in a folder."""
    names = [name for name, row in TRAINER_FORMATS.items() if row.lacks_header]
    return next((name for name in names if _has_suffix(look, TRAINER_FORMATS[name].suffixes)), names[-1])


def not_recognised(look: Look) -> FormatError | None:
    """Return the error of a path that is named as files of flat formats are, and is of none of them; None: of another.

    Of a folder, it is that of its first such file.
    """
    from zb_hdf5.files.listing import listed  # numpy, which the help of the commands does not need

    if look.is_far:
        return None
    path = file = look.path
    if look.is_dir:
        suffixes = tuple({TRAINER_FORMATS[name].suffixes[0] for name in flat_names()})
        file = next(iter(listed(path, *suffixes).files), path)
    name_of_file = file.name.lower()
    found = {name: flat_format(name) for name in flat_names() if name_of_file.endswith(TRAINER_FORMATS[name].suffixes)}
    if not found:
        return None
    if line := _line_of_fairseq(look, file):
        return FormatError(f"{file}: expected an index of Megatron, found one of fairseq, without documents: {line}")
    signs = [f"{name} ({each.sign})" for name, each in found.items() if each is not None and each.sign]
    signed = " or ".join(signs)
    if file.is_file() and not look.of(file).num_bytes:
        return FormatError(f"{file}: expected a token file of {signed}, found an empty file")
    return FormatError(f"{file}: expected a token file of {signed}, found another file", remedy=Remedy.SOURCE_DTYPE)


def _line_of_fairseq(look: Look, path: Path) -> str:
    """Return the call for the ids of fairseq, whose index is named as that of Megatron is; "": of another file."""
    from zb_hdf5.trainers.megatron import fairseq_dtype

    index = path.with_suffix(".idx")
    if path.suffix not in (".bin", ".idx") or not index.is_file():
        return ""
    dtype = fairseq_dtype(look.of(index))
    ids = path.with_suffix(".bin")
    return conversion_call(ids, "stream", source_dtype=dtype, tokens_only=True) if dtype else ""


def named_by_prefix(path: Path) -> Path:
    """Return the file of ids that a path without an ending stands for, as `--data-path` of Megatron takes it.

    That is `corpus.bin` beside `corpus.idx`, or `corpus.ds` beside `corpus.ds.index`; any other path is returned.
    """
    if isinstance(path, RemotePath) or not path.name or path.exists():
        return path
    for ids, documents in PREFIX_ENDINGS:
        found = path.with_name(path.name + ids)
        if found.is_file() and path.with_name(path.name + documents).is_file():
            return found
    return path


def flat_name_of(look: Look) -> str:
    """Return the name of the flat format that a path holds, which has a header; "": none."""
    ours = next((name for name in flat_names() if flat_files(name, look)), "")
    if ours or is_store(look):
        return ours
    found = installed_name_of(look, [])
    return found if flat_format(found) is not None else ""


def is_store(look: Look) -> bool:
    """Return whether a path is a store, or a file with the magic bytes of one. No package reads a URL."""
    from zb_hdf5.spec import INDEX_NAME  # numpy, which the help of the commands does not need

    path = look.path
    if look.is_far:
        return True
    return (path / INDEX_NAME).exists() if look.is_dir else path.name == INDEX_NAME or bool(backend_in(look))


def flat_name_in(look: Look) -> str:
    """Return the name of the flat format of a file with a header, whatever its suffix is; "": none."""
    return next((name for name in flat_names() if (each := flat_format(name)) and each.recognises(look)), "")
