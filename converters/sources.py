"""The kinds of sources of a conversion: one row for each, with its options and its opener.

A format plugs in here: a function that opens its files, as a `BatchSource` or a `DocumentSource`, and one row in
`SOURCES`. Its command follows from the row, and its options from its roles. Documents of other trainers have a row in
`FORMATS`, from which their row here follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from zb_hdf5.converters.conversion import OPTIONS, STREAM, Conversion, options_of
from zb_hdf5.converters.option import Pair, Role, Taking, is_staged
from zb_hdf5.errors import ArgumentError, FormatError, ZbError
from zb_hdf5.files.line_file import JSON_SUFFIX
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.read_as import ReadAs
from zb_hdf5.store.format_list import (
    FORMATS,
    INSTALLED,
    batch_format,
    batch_formats,
    document_targets,
    flat_format,
    format_named,
    known_formats,
    row_named,
)
from zb_hdf5.store.recognition import flat_files, installed_name_of, is_store, source_name_of
from zb_hdf5.text.text_corpus import FILE_KINDS
from zb_hdf5.trainers.installed_formats import noted

if TYPE_CHECKING:  # numpy, which the help of the commands does not need
    from zb_hdf5.converters.source_paths import SourcePaths
    from zb_hdf5.formats.format import Found


@dataclass(frozen=True)
class SourceKind:
    """A kind of source, a row of `SOURCES`: its command and its options follow from it.

    Parameters
    ----------
    noun
        Such a source, in messages and in the help.
    example
        The arguments of an example in the help; `{target}` and `{tokens_only}` are filled in.
    opener
        "module:name" of a function of (paths, settings), which returns a `BatchSource` or a `DocumentSource`, or a
        context manager of one.
    roles
        Its roles in a conversion: it takes the options of all.
    ids_options
        Those of the options of `Role.IDS` that it takes.
    note
        More text in the help.
    several
        Whether it takes several paths.
    urls
        Whether it takes a URL.
    suffixes
        Those of its files, by which they are found.
    """

    noun: str
    example: str
    opener: str
    roles: tuple[Role, ...]
    ids_options: tuple[str, ...] = ()
    note: str = ""
    several: bool = False
    urls: bool = False
    suffixes: tuple[str, ...] = ()

    @property
    def has_documents(self) -> bool:
        """Whether it tells documents apart, which become rows, or are kept."""
        return Role.DOCUMENTS in self.roles

    @property
    def is_staged(self) -> bool:
        """Whether its documents become a stream before they become rows, which are cut from the whole stream."""
        return is_staged(self.roles)

    def roles_as(self, is_stream: bool) -> tuple[Role, ...]:
        """Return its roles for batches, or for a stream."""
        rows = (Role.ROWS,) if self.has_documents else ()
        return (*self.roles, *(() if is_stream else (*rows, Role.BATCHES)), Role.ANY)

    def options_of(self, target: str) -> dict[str, Taking]:
        """Return the options that apply to a target, and how it takes each."""
        pair = Pair(self.roles, target)
        found = self.options_of_any_target(pair.is_stream)
        dtype = found.get("dtype")
        if dtype is not None and dtype.default == "auto" and pair.default_dtype != "auto":
            found["dtype"] = dtype._replace(words=pair.default_dtype)
        return {name: taking for name, taking in found.items() if OPTIONS[name].applies(pair)}

    def options_of_any_target(self, is_stream: bool) -> dict[str, Taking]:
        """Return the options that apply to some target; a target refuses those that it lacks."""
        found = options_of(self.roles_as(is_stream))
        is_narrowed = Role.IDS in self.roles
        return {
            name: taking
            for name, taking in found.items()
            if not is_narrowed or Role.IDS not in taking.roles or name in self.ids_options
        }

    def row_options(self) -> set[str]:
        """Return the names of the options that apply to rows only."""
        rows = (Role.ROWS,) if self.has_documents else ()
        return {*options_of((*rows, Role.BATCHES))}

    def open(self, paths: list[Path], settings: Any) -> Any:
        """Open the source."""
        return resolve_name(self.opener)(paths, settings)


def _text(name: str) -> SourceKind:
    kind = FILE_KINDS[name]
    return SourceKind(
        noun=kind.noun,
        example=f"{kind.example} {{target}} \\\n           --tokenizer tok.json --seq-len 2048 --packing best-fit",
        opener="zb_hdf5.converters.text_source:open_text",
        roles=(
            *(Role.DOCUMENTS, Role.HELD_OUT, Role.TEXTS),
            *((Role.COLUMNS,) if kind.has_columns else ()),
            *((Role.LINES,) if kind.has_lines else ()),
        ),
        note=f"{kind.documents} Documents are tokenized, packed into rows of --seq-len tokens, and the rows are "
        "shuffled once, which needs as much disk again as the store meanwhile; or, with --layout stream, kept as they "
        "are, one after the other. A folder stands for all such files in and below it.",
        several=True,
        suffixes=kind.suffixes,
    )


#: The one table of sources. A format of another trainer is one more row, and a function that opens its files.
SOURCES: Final[dict[str, SourceKind]] = {
    "npy": SourceKind(
        noun=".npy files of tokens",
        example="tokens/ {target} \\\n           --batch-size 32 --shards 4",
        opener="zb_hdf5.converters.npy_source:open_arrays",
        roles=(Role.ARRAYS,),
        several=True,
        suffixes=(".npy",),
    ),
    STREAM: SourceKind(
        noun="a token stream of documents",
        example="stream {target} \\\n           --seq-len 2048 --packing best-fit{tokens_only}",
        opener="zb_hdf5.converters.packed_source:open_packed",
        roles=(Role.DOCUMENTS, Role.STREAM, Role.HEADERLESS),
        note="The documents are packed into rows of --seq-len tokens, with their fields, spans, ids and metadata.",
    ),
    **{name: _text(name) for name in FILE_KINDS},
}
#: 1-D arrays that a boundary token cuts into documents: another way to read the files of "npy".
CUT: Final = SourceKind(
    noun="1-D .npy files",
    example="tokens/ stream --boundary-token-id 50256",
    opener="zb_hdf5.converters.npy_source:open_cut",
    roles=(Role.DOCUMENTS, Role.CUT),
    note="Each file becomes a shard. A boundary token tells the documents apart: they get a table, and are known by "
    "their file and row there in all that is made of the stream. A folder stands for all .npy files in and below it.",
    several=True,
)
#: Datasets of other programs: another way to read the files of "hdf5".
FOREIGN: Final = SourceKind(
    noun="HDF5 files of other programs",
    example="",
    opener="zb_hdf5.converters.foreign_source:open_foreign",
    roles=(Role.ARRAYS, Role.FOREIGN),
    several=True,
    urls=True,
)
#: The format of which there are stores, and files of other programs; those of them that hold documents.
_HDF5: Final = "hdf5"
_HF: Final = "hf"
_RAGGED: Final = "ragged"
#: The kind of JSON lines of text.
_LINES: Final = "jsonl"


#: Files of ids of which none tells documents apart: records are cut from them.
FLAT: Final = SourceKind(
    noun="token files without documents",
    example="train.bin {target}",
    opener="zb_hdf5.converters.flat_source:open_flat",
    roles=(Role.ARRAYS, Role.HEADERLESS),
    several=True,
)
#: Token streams whose documents are kept: those of `STREAM` and of every format that is read in place.
KEPT: Final = SourceKind(
    noun="token streams of documents",
    example="stream {target}",
    opener="zb_hdf5.converters.stream_source:open_kept",
    roles=(Role.DOCUMENTS, Role.HELD_OUT, Role.KEPT, Role.HEADERLESS),
    several=True,
)


def sources() -> dict[str, SourceKind]:
    """Return all kinds of sources: stores of each format that has a reader, formats of other trainers, `SOURCES`."""
    found = {name: _kind_of_format(name) for name in (*batch_formats(), *SOURCES, *known_formats())}
    return {name: kind for name, kind in found.items() if kind is not None}


def _kind_of_format(name: str) -> SourceKind | None:
    """Return the kind of the sources of a format; None if it has none. One that a program plugs in goes first."""
    if name in SOURCES:
        return SOURCES[name]
    of_trainer = row_named(name)
    if of_trainer is not None and of_trainer.read_by:
        return _kind_of_format(of_trainer.read_by)
    if of_trainer is not None and (of_trainer.has_documents or of_trainer.is_flat):
        return _of_trainer(of_trainer) if of_trainer.has_documents else _flat(of_trainer)
    row = batch_format(name)
    if row is None or not row.holds_batches or not row.as_source:
        return None
    return _any_hdf5(_store(row)) if name == _HDF5 else _store(row)


def target_names() -> tuple[str, ...]:
    """Return the names of all targets: formats of batches, "stream", and formats of other trainers."""
    return tuple(dict.fromkeys((*batch_formats(), STREAM, *document_targets())))


def target_of(destination: Path) -> str:
    """Return the format that a destination names by its suffix; "hdf5" if it names none: a folder.

    Formats of batches go first: `.npy` is an array with a header.

    Raises
    ------
    ArgumentError
        If several formats of other trainers have this suffix.
    """
    found = [name for name in target_names() if destination.suffix in _suffixes_of(name)]
    if len(found) > 1 and found[0] not in batch_formats():
        raise ArgumentError(
            f"{destination}: {' and '.join(found)} files end in {destination.suffix}: pass target with one of them",
            options=["target"],
        )
    return found[0] if found else "hdf5"


def _suffixes_of(target: str) -> tuple[str, ...]:
    row = batch_format(target)
    if row is not None:
        return row.file_suffixes
    of_trainer = row_named(target)
    return () if of_trainer is None else of_trainer.suffixes[:1]


def _store(row: FormatRow) -> SourceKind:
    noun, example = row.as_source or ("", "")
    return SourceKind(
        noun=noun,
        example=f"{example} {{target}}",
        opener="zb_hdf5.converters.store_source:open_stores",
        roles=(Role.STORES,) if row.tokens_only else (Role.FOREIGN, Role.STORES),
        urls=True,
    )


def _any_hdf5(store: SourceKind) -> SourceKind:
    """Return the kind for the commands of HDF5 files: a look at the first path tells which of two it is."""
    return replace(
        store,
        example=f"{store.example}\n         zb convert {{name}} their-h5/ theirs --dataset tokens",
        roles=(Role.ARRAYS, Role.FOREIGN, Role.STORES, Role.ANY_HDF5),
        note="Files of other programs, and folders of them, are shuffled like arrays: a dataset of one axis is a "
        "stream, one of two axes has records, one of three batches.",
        several=True,
    )


def _of_trainer(row: FormatRow) -> SourceKind:
    return SourceKind(
        noun=row.noun,
        example="",
        opener="zb_hdf5.converters.trainer_source:open_trainer_documents",
        roles=(Role.DOCUMENTS, Role.HELD_OUT, Role.IDS),
        ids_options=row.options,
        several=True,
        suffixes=row.suffixes,
    )


def _flat(row: FormatRow) -> SourceKind:
    """Return the kind of a flat format: a token stream, or arrays if its files tell no documents apart."""
    return replace(SOURCES[STREAM] if row.holds_documents else FLAT, noun=row.noun)


def kind_of(path: Path, conversion: Conversion, looks: SourcePaths) -> tuple[str, SourceKind]:
    """Return the kind of a source: by its name, its suffix, or the content of its files.

    Parameters
    ----------
    looks
        Keeps what is found at the path.
    """
    with Look(path) as look:
        return _kind_at(look, conversion, looks)


def _kind_at(look: Look, conversion: Conversion, looks: SourcePaths) -> tuple[str, SourceKind]:
    name = conversion.source_format
    if name == "auto":
        name = _found(look, conversion, looks)
    elif (row := row_named(name)) is not None and row.read_by:
        name = row.read_by
    if _lacks_documents(name, conversion):
        return name, FLAT
    if name == "npy" and conversion.target in document_targets() and _has_records(look):
        return name, SOURCES[name]
    if name not in ("auto", _HDF5):
        return name, kind_named(name, conversion)
    return (_HDF5, FOREIGN) if _is_of_others(look, conversion, looks) else (name, _store(FORMATS[_HDF5]))


def _is_of_others(look: Look, conversion: Conversion, looks: SourcePaths) -> bool:
    """Return whether a path has HDF5 files of another program."""
    from zb_hdf5.converters.foreign_source import is_of_others  # h5py, which help does not need

    try:
        return looks.at(look.path, read_as=_read_as(conversion)).foreign_dataset is not None
    except ZbError:  # whoever opens it says so
        return is_of_others(look)


def _read_as(conversion: Conversion) -> ReadAs:
    """Return how a conversion asks for files to be read; `ArgumentError` if its options contradict each other."""
    return ReadAs(
        dataset=conversion.dataset,
        axes=conversion.axes,
        channel=conversion.channel,
        field_channels=conversion.field_channels or {},
        unwritten=conversion.unwritten,
    )


def _lacks_documents(name: str, conversion: Conversion) -> bool:
    """Return whether batches are made of files without a header of which none has documents: records are cut."""
    row = row_named(name)
    if row is None or not row.lacks_header or not row.holds_documents or conversion.source_dtype is None:
        return False
    if conversion.is_stream or conversion.boundary_token_id is not None or conversion.packing is not None:
        return False
    from zb_hdf5.files.paths import any_path

    flat = flat_format(name, ReadAs(source_dtype=conversion.source_dtype, skip_bytes=conversion.skip_bytes or 0))
    given = conversion.source if isinstance(conversion.source, list | tuple) else [conversion.source]
    if flat is None:
        return False
    files: list[Path] = []
    for path in given:
        with Look(any_path(path)) as look:
            files += flat.files(look)
    return bool(files) and not any(flat.beside(file) for file in files)


def _has_records(look: Look) -> bool:
    """Return whether the first `.npy` file at a path is an array of two axes."""
    from zb_hdf5.formats.npy import npy_header

    files = flat_files("npy", look)
    return bool(files) and len(npy_header(look.of(files[0]))[0]) == 2


def kind_named(name: str, conversion: Conversion) -> SourceKind:
    """Return the kind of a source of a format; "auto": a store of any.

    Raises
    ------
    ArgumentError
        If it is no format that is a source.
    """
    if _is_kept(name, conversion):
        return KEPT
    if name == "npy" and (conversion.is_stream or conversion.boundary_token_id is not None):
        return CUT
    kind = _kind_of_format(_HDF5 if name == "auto" else name)
    if kind is None:
        unknown = f"source_format must be one of auto, {', '.join(sources())}, found {name!r}"
        raise noted(ArgumentError(unknown, options=["source_format"]), INSTALLED.notes)
    return kind


def _is_kept(name: str, conversion: Conversion) -> bool:
    """Return whether a source is a token stream whose documents are kept as they lie."""
    row = None if name in SOURCES else row_named(name)  # one that a program plugs in goes first
    is_in_place = name == STREAM or (row is not None and row.is_flat)
    if name == "npy":  # to a stream, and with a boundary token, it is cut into documents
        return conversion.target in document_targets() and conversion.boundary_token_id is None
    several = isinstance(conversion.source, list | tuple) and len(conversion.source) > 1
    has_more = (several or bool(conversion.val_fraction)) and (row is None or row.holds_documents)
    return is_in_place and (conversion.is_stream or conversion.boundary_token_id is not None or has_more)


def _found(look: Look, conversion: Conversion, looks: SourcePaths) -> str:
    """Return the name of the kind of a source that no option names."""
    from zb_hdf5.store.recognition import headerless_name

    path = look.path
    if conversion.source_dtype is None and _is_of_ours(look, conversion, looks):
        return _name_of_found(looks.at(path, read_as=_read_as(conversion)))
    name = _name_of_trainer(look, conversion)
    takes_dtype = bool(name) and "source_dtype" in format_named(name).options
    if conversion.source_dtype is not None and not takes_dtype:
        return headerless_name(look)
    if name and conversion.tokenizer is None:
        return name
    for known, kind in SOURCES.items():  # a tokenizer asks for text, also where ids lie beside it
        if _is_named_as(path, kind.suffixes):
            return known
    if name:
        return name
    if conversion.dataset is not None or _is_of_others(look, conversion, looks):
        return "auto"
    try:
        return _name_of_found(looks.at(path))
    except FormatError:
        name = "" if is_store(look) else _read_by_conversions(look, conversion)
        if not name:
            raise
        return name


def _is_of_ours(look: Look, conversion: Conversion, looks: SourcePaths) -> bool:
    """Return whether a path is a store or a file of ours, which no other format is asked about."""
    if look.path.name.lower().endswith(SOURCES["npy"].suffixes) or not is_store(look):
        return False
    try:
        return looks.at(look.path, read_as=_read_as(conversion)).foreign_dataset is None
    except ZbError:  # whoever opens it says so
        return False


def _name_of_found(found: Found) -> str:
    """Return the name of the kind of a source that is read in place: "auto" for batches."""
    from zb_hdf5.spec import STREAM_LAYOUT

    if flat_format(found.backend) is not None:
        return found.backend
    return STREAM if found.layout == STREAM_LAYOUT and found.foreign_dataset is None else "auto"


def _read_by_conversions(look: Look, conversion: Conversion) -> str:
    """Return the name of the kind of a source that nothing reads in place: of a package, or of lines in a `.json`."""
    name = installed_name_of(look, [])
    if name:
        return name
    path = look.path
    from zb_hdf5.files.listing import is_lone_json

    is_of_lines = _holds(path, (JSON_SUFFIX,)) or (path.is_file() and is_lone_json(path.name))
    if not is_of_lines:
        return ""
    return _LINES if conversion.ids_column is None else _HF


def _name_of_trainer(look: Look, conversion: Conversion) -> str:
    """Return the name of the format of another trainer that recognises a source; "" if none does."""
    path = look.path
    name = source_name_of(look)
    if name == _RAGGED and conversion.dataset is not None and conversion.offsets is None:
        from zb_hdf5.trainers.ragged import names_documents

        return name if names_documents(path, conversion.dataset) else ""  # a dataset of ids has records, or a stream
    if not name and conversion.ids_column is not None and _is_named_as(path, format_named(_HF).suffixes):
        return _HF  # a column of ids is named: its rows are no text
    return name


def _is_named_as(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file, or one in or below a folder, has one of the suffixes; a plain `.json` may be anything."""
    known = tuple(suffix for suffix in suffixes if suffix != JSON_SUFFIX)
    return bool(known) and (path.name.lower().endswith(known) or _holds(path, known))


def _holds(folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a folder holds files that end so. Folders inside it count too, but not those inside a store."""
    from zb_hdf5.files.listing import listed

    return folder.is_dir() and bool(listed(folder, *suffixes).names)


def _lacks_required(path: Path, kind: SourceKind, name: str) -> ArgumentError:
    """Return the error of a source without an option that it needs."""
    from zb_hdf5.store.way_in import way_of_rows  # numpy, which the help of the commands does not need

    with Look(path) as look:
        words = way_of_rows(look) if kind.suffixes else ""
    maker = ", which 'zb tokenizer train' makes of text" if name == "tokenizer" else ""
    more = f"; {words}" if words else ""
    return ArgumentError(f"{path}: {kind.noun} need {name}{maker}{more}", options=[name])


def refuse_unused_options(path: Path, kind: SourceKind, conversion: Conversion) -> None:
    """Raise `ArgumentError` for options that were given and that this source has no use for."""
    unknown = sorted(conversion.given - _possible(kind, conversion))
    rows = [name for name in unknown if conversion.is_stream and name in kind.row_options()]
    if rows:
        raise ArgumentError(
            f"{', '.join(rows)} belongs to layout batches: a stream has no rows", options=[*rows, "layout"]
        )
    if unknown:
        belong = "belong" if len(unknown) > 1 else "belongs"
        facts = f"{path}: {', '.join(unknown)} {belong} to {_owners(unknown)}, found {kind.noun}"
        raise _unused(facts, kind, conversion, unknown)
    refused_later = {"shard_range"} if kind.is_staged else set()
    takings = kind.options_of(conversion.target)
    unknown = sorted(conversion.given - {*takings} - refused_later)
    if unknown:
        does = "do" if len(unknown) > 1 else "does"
        facts = f"{conversion.destination}: {', '.join(unknown)} {does} not apply to {kind.noun} as {conversion.target}"
        raise _unused(facts, kind, conversion, unknown)
    _require_taken(path, kind, conversion, takings)
    if conversion.shard_per_source:
        if not conversion.is_stream:
            raise ArgumentError(
                "shard_per_source belongs to layout stream: rows are shuffled over all sources",
                options=["shard_per_source", "layout"],
            )
        if conversion.shards:
            raise ArgumentError(
                "pass either shards or shard_per_source, not both", options=["shards", "shard_per_source"]
            )


def _require_taken(path: Path, kind: SourceKind, conversion: Conversion, takings: dict[str, Taking]) -> None:
    """Raise `ArgumentError` for values that this source does not take, and if it lacks one that it needs."""
    for name, taking in takings.items():
        value = getattr(conversion, name)
        if taking.choices and value not in (None, *taking.choices):
            words = ", ".join(taking.choices)
            raise ArgumentError(f"{path}: {name} must be one of {words}, found {value!r}", options=[name])
    for name, taking in takings.items():
        if taking.required and getattr(conversion, name) is None:
            raise _lacks_required(path, kind, name)


def _possible(kind: SourceKind, conversion: Conversion) -> set[str]:
    """Return the names of the options that apply to batches, or to a stream, of any format."""
    known = {*kind.options_of_any_target(conversion.is_stream)}
    draws = not conversion.is_stream or conversion.val_fraction
    return known if draws else known - {"seed"}


def _unused(facts: str, kind: SourceKind, conversion: Conversion, names: list[str]) -> ArgumentError:
    """Return the error for options that do not apply, with those that do."""
    known = sorted(kind.options_of(conversion.target))
    if "memory" in names and "workers" in known:
        facts += "; fewer workers take less"
    if conversion.is_stream and "layout" in names:
        facts += f"; target {STREAM} writes a token stream"
        names = [*names, "target"]
    return ArgumentError(f"{facts}; the options are {', '.join(known)}", options=[*names, *known])


def _owners(names: list[str]) -> str:
    """Return the kinds of sources that take all of these options, in words."""
    kinds = {**sources(), _HDF5: _store(FORMATS[_HDF5]), f"{_HDF5} of other programs": FOREIGN}
    owners = [name for name, kind in kinds.items() if {*names} <= {*kind.options_of_any_target(is_stream=False)}]
    return ", ".join(owners) or "other conversions"
