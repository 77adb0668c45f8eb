"""The one list of formats: ours, of other trainers, and of installed packages; asked for by their names.

A format plugs in here: one file with its `Format`, and one row. The commands, the options and the messages follow from
the row; its code is imported when a path ends or begins as the row has it. A store is none of them: it has files of
these formats, and its `shards.json` has their names.
"""

from __future__ import annotations

import os
from functools import cache
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final, cast

from zb_hdf5.errors import ArgumentError, ConvertError
from zb_hdf5.files.line_file import LINE_SUFFIXES
from zb_hdf5.formats.format_row import HDF5_SUFFIXES, FormatRow, named_part
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.text.text_corpus import FILE_KINDS
from zb_hdf5.trainers.installed_formats import Installed, errors_of, load_installed, with_notes

if TYPE_CHECKING:  # numpy, which the help of the commands does not need
    from zb_hdf5.formats.flat import FlatFormat
    from zb_hdf5.formats.format import Format

#: The name of HDF5 files, whoever has written them, as states and reports have it; that of the row of such files that
#: another program has written; and that of arrays with a header of numpy.
HDF5: Final = "hdf5"
FOREIGN: Final = "foreign-hdf5"
NPY: Final = "npy"
#: The options of documents that are rows of ids, and of rows with several columns.
_ROW_OPTIONS: Final = ("rows", "dtype", "vocab_size", "max_document_tokens")
_COLUMN_OPTIONS: Final = ("ids_column", "field_columns", "id_column", "metadata_columns")
#: In the order in which a path is compared with them. A store comes before all: it has files that others would take.
#: Files of ids come first: three formats of them use `.bin`, and are told apart by their content; ids may begin as
#: another file does by chance, so that the name of the file and those beside it tell more than its first bytes. Then
#: come files that their first bytes mark, whatever their names are. Files of rows come last, since they are not read in
#: place, and a look at their columns takes longest. Formats of packages come after ours.
#:
#: A conversion reads rows and text, too, and asks for them earlier: `in_order_of_sources` has its order.
_OURS: Final = (
    FormatRow(
        name=NPY,
        noun=".npy files of tokens",
        suffixes=(".npy",),
        place="zb_hdf5.formats.npy:NpyArrays",
        writer="zb_hdf5.formats.npy:NpyWriter",
        is_flat=True,
        holds_documents=False,
        takes_batches=True,
        file_noun="a .npy file",
        as_source=(".npy files of tokens", "tokens/"),
        as_target=(".npy records", "records.npy"),
        other_suffixes=(".npz",),
        is_by_ending=True,
        has_axes=True,
        tokens_only=True,
        holds_uint8=True,
    ),
    FormatRow(
        name="megatron",
        noun=".bin and .idx files of Megatron-LM",
        suffixes=(".bin", ".idx"),
        place="zb_hdf5.trainers.megatron:Megatron",
        writer="zb_hdf5.trainers.megatron:MegatronWriter",
        is_flat=True,
    ),
    FormatRow(
        name="datatrove",
        noun=".ds files of datatrove",
        suffixes=(".ds",),
        place="zb_hdf5.trainers.datatrove:Datatrove",
        writer="zb_hdf5.trainers.datatrove:DatatroveWriter",
        is_flat=True,
        holds_fields=("loss_mask",),
    ),
    FormatRow(
        name="olmo",
        noun="headerless .npy files of OLMo",
        suffixes=(".npy",),
        place="zb_hdf5.trainers.olmo:OlmoFiles",
        writer="zb_hdf5.trainers.olmo:OlmoWriter",
        is_flat=True,
        lacks_header=True,
        needs_boundary=True,
        holds_ids=True,
    ),
    FormatRow(
        name="bin",
        noun=".bin files of llm.c or nanoGPT",
        suffixes=(".bin",),
        place="zb_hdf5.trainers.bin:BinFiles",
        writer="zb_hdf5.trainers.bin:BinWriter",
        is_flat=True,
        lacks_header=True,
        holds_documents=False,
    ),
    FormatRow(
        name="llmc",
        noun=".bin files of llm.c, written with their header",
        suffixes=(".bin",),
        writer="zb_hdf5.trainers.bin:LlmcWriter",
        read_by="bin",
        holds_documents=False,
    ),
    FormatRow(
        name="batch",
        noun=".batch files",
        suffixes=(".batch",),
        place="zb_hdf5.formats.native:LoneBatches",
        writer="zb_hdf5.formats.native:BatchFileWriter",
        holds_documents=False,
        takes_batches=True,
        holds_batches=True,
        file_noun="a .batch file",
        as_source=("a .batch store", "train-batch"),
        as_target=("a .batch store", "train-batch"),
        magic="zb_hdf5.spec:BATCH_MAGIC",
        tokens_only=True,
        has_sidecar=True,
        uint16_note="uint16 .batch files are an extension: other ZeroBatch v2 readers take the ids for uint32 and "
        "return wrong ones",
        default_dtype="uint32",
    ),
    FormatRow(
        name=HDF5,
        noun="HDF5 files",
        suffixes=HDF5_SUFFIXES[:1],
        place="zb_hdf5.formats.hdf5_files:HDF5Files",
        writer="zb_hdf5.formats.h5_writer:HDF5BatchWriter",
        takes_batches=True,
        holds_batches=True,
        file_noun="an HDF5 file",
        as_source=("an HDF5 store", "train-h5"),
        as_target=("an HDF5 store", "train-h5"),
        other_suffixes=HDF5_SUFFIXES[1:],
        magic="zb_hdf5.spec:HDF5_MAGIC",
        magic_offsets="zb_hdf5.spec:HDF5_OFFSETS",
        has_axes=True,
        holds_uint8=True,
    ),
    FormatRow(
        name=FOREIGN,
        noun="HDF5 files of other programs",
        suffixes=HDF5_SUFFIXES[:1],
        place="zb_hdf5.formats.foreign_files:ForeignFiles",
        other_suffixes=HDF5_SUFFIXES[1:],
        magic="zb_hdf5.spec:HDF5_MAGIC",
        magic_offsets="zb_hdf5.spec:HDF5_OFFSETS",
    ),
    FormatRow(
        name="hf",
        noun="Hugging Face's data sets of ids",
        suffixes=(".arrow", ".parquet", *LINE_SUFFIXES, "state.json", "dataset_dict.json"),
        place="zb_hdf5.trainers.hf:HuggingFace",
        writer="zb_hdf5.trainers.table_writers:ArrowWriter",
        is_of_rows=True,
        options=(*_ROW_OPTIONS, *_COLUMN_OPTIONS, "max_line"),
        holds_ids=True,
        holds_metadata=True,
        holds_fields=None,
    ),
    FormatRow(
        name="parquet",
        noun="Parquet files of ids",  # as a target: as a source, they have text
        suffixes=FILE_KINDS["parquet"].suffixes,
        writer="zb_hdf5.trainers.table_writers:ParquetWriter",
        is_by_ending=True,
        holds_ids=True,
        holds_metadata=True,
        holds_fields=None,
    ),
    *(
        FormatRow(name=name, noun=FILE_KINDS[name].noun, suffixes=FILE_KINDS[name].suffixes, is_by_ending=True)
        for name in ("jsonl", "text")
    ),
    FormatRow(
        name="mds",
        noun="MDS folders of MosaicML streaming",
        suffixes=("index.json", ".mds"),
        place="zb_hdf5.trainers.mds:MdsFolders",
        writer="zb_hdf5.trainers.mds_writer:MdsWriter",
        is_of_rows=True,
        options=(*_ROW_OPTIONS, *_COLUMN_OPTIONS, "source_dtype"),
        holds_ids=True,
        holds_metadata=True,
        holds_fields=None,
    ),
    FormatRow(
        name="litdata",
        noun="folders of litdata",
        suffixes=("index.json",),
        place="zb_hdf5.trainers.litdata:LitdataFolders",
        is_of_rows=True,
        options=_ROW_OPTIONS,
    ),
    FormatRow(
        name="ragged",
        noun="HDF5 files of documents",
        suffixes=HDF5_SUFFIXES,
        place="zb_hdf5.trainers.ragged:RaggedFiles",
        is_of_rows=True,
        options=(*_ROW_OPTIONS, "dataset", "offsets", "unwritten", "field_columns"),
        holds_fields=None,
    ),
)
#: The one list of our formats, by their names, in the order in which a path is compared with them.
FORMATS: Final[dict[str, FormatRow]] = {row.name: row for row in _OURS}
#: Words that stand where the name of a format does, and name none of these.
_OTHER_WORDS: Final = ("", "auto", "stream")
#: The formats of installed packages, once they were asked for.
INSTALLED: Final[Installed] = Installed({}, {}, [])


@cache
def add_installed() -> None:
    """Load the formats of installed packages, once. Those that cannot be loaded become notes of `INSTALLED`."""
    found = load_installed((*FORMATS, *_OTHER_WORDS))
    INSTALLED.rows.update(found.rows)
    INSTALLED.packages.update(found.packages)
    INSTALLED.notes[:] = found.notes


def known_formats() -> dict[str, FormatRow]:
    """Return our formats, and the formats of installed packages if they were asked for."""
    return {**FORMATS, **INSTALLED.rows}


def row_named(name: str) -> FormatRow | None:
    """Return the row of a format; None if it has none. Packages are asked for a name that is none of ours."""
    row = FORMATS.get(name)
    if row is None and name not in _OTHER_WORDS:
        add_installed()
        row = INSTALLED.rows.get(name)
    return row


def format_named(name: str) -> FormatRow:
    """Return the row of a format. Raises `ArgumentError` if it has none."""
    row = row_named(name)
    if row is None:
        raise with_notes(ArgumentError(f"expected the name of a format, found {name!r}"), INSTALLED.notes)
    return row


def package_of(name: str) -> str:
    """Return the package that has a format, with its version; "": this one."""
    return "" if name in FORMATS else INSTALLED.packages.get(name, "")


def in_order_of_sources(*, asks_for_text: bool = False) -> list[FormatRow]:
    """Return our formats in the order in which a conversion asks for the source at a path.

    Stores and files of ours come before all. Then come files of rows: an HDF5 file of documents also has datasets that
    are read in place, and a folder of rows files of ids. Then come arrays and text, by the endings of their names: they
    need not be such as are read in place. The files that are read in place are left, in the order of the list. Behind
    all of these come formats of packages, and lines in a plain `.json`, since most of those have facts.

    Parameters
    ----------
    asks_for_text
        A tokenizer is named: files that may have text come before rows of ids.
    """
    first, second = ("is_by_ending", "is_of_rows") if asks_for_text else ("is_of_rows", "is_by_ending")
    return sorted(FORMATS.values(), key=attrgetter(first, second), reverse=True)  # stable


# --- some of the list ----------------------------------------------------------------------------------------------


def batch_formats() -> dict[str, FormatRow]:
    """Return our formats to whose files batches are written: formats of batches first, then formats of records."""
    taking = [row for row in FORMATS.values() if row.takes_batches]
    return {row.name: row for row in sorted(taking, key=lambda row: not row.holds_batches)}


def batch_format(name: str) -> FormatRow | None:
    """Return the row of a format to whose files batches are written; None: documents are, or nothing."""
    row = FORMATS.get(name)
    return row if row is not None and row.takes_batches else None


def backends() -> dict[str, FormatRow]:
    """Return the formats whose files are opened as batches."""
    return {name: row for name, row in FORMATS.items() if row.holds_batches}


def flat_formats() -> list[str]:
    """Return the names of our formats whose ids follow each other, which are read in place."""
    return [name for name, row in FORMATS.items() if row.is_flat]


def document_targets() -> list[str]:
    """Return the names of the formats that are written as documents."""
    return [name for name, row in known_formats().items() if row.takes_documents]


def backend_of_suffix(path: str | os.PathLike[str]) -> str:
    """Return the backend that writes files with the suffix of `path`."""
    names = {row.suffix: name for name, row in backends().items()}
    suffix = Path(path).suffix
    if suffix not in names:
        raise ConvertError(f"{path}: expected a name that ends in {' or '.join(names)}, or backend=")
    return names[suffix]


# --- their code ----------------------------------------------------------------------------------------------------


def load_format(row: FormatRow, read_as: ReadAs = AS_STORED) -> Format:
    """Return the code of a format, which is imported. Errors in that of a package name the package.

    Parameters
    ----------
    read_as
        How its files are read that do not tell it themselves.
    """
    package = package_of(row.name)
    if package:
        return _load_installed(row, read_as, package)
    if row.place:
        found: Format = named_part(row.place)(row, read_as)
        return found
    from zb_hdf5.formats.format import Format  # numpy, which the help of the commands does not need

    return Format(row, read_as)  # it is written, and not read


def _load_installed(row: FormatRow, read_as: ReadAs, package: str) -> Format:
    """Return the code of a format of a package, whose errors name the package."""
    # numpy, which the help of the commands does not need
    from zb_hdf5.formats.flat import FlatFormat
    from zb_hdf5.formats.format import Format, RowsFormat
    from zb_hdf5.trainers.guards import guarded_format

    expected: type[Format] = Format
    if row.is_flat:
        expected = FlatFormat
    elif row.is_of_rows:
        expected = RowsFormat
    with errors_of(package, row.name):
        kind = resolve_name(row.place) if row.place else Format
        if not (isinstance(kind, type) and issubclass(kind, expected)):
            raise TypeError(f"expected a {expected.__name__}, found {kind!r:.80}")
        return guarded_format(kind, package, row.name)(row, read_as)


def flat_format(name: str, read_as: ReadAs = AS_STORED) -> FlatFormat | None:
    """Return a flat format by its name; None for a format that is not flat. See `load_format`."""
    row = row_named(name)
    if row is None or not row.is_flat:
        return None
    return cast("FlatFormat", load_format(row, read_as))


def format_without_digests(name: str, read_as: ReadAs | None) -> FlatFormat | None:
    """Return the format of files that hold no digests: a flat one, or HDF5 of another program.

    Parameters
    ----------
    read_as
        How the files are read; None: they are files of a store, which hold digests.
    """
    if read_as is None:
        return None
    if name == HDF5:
        return cast("FlatFormat", load_format(FORMATS[FOREIGN], read_as))
    return flat_format(name, read_as)
