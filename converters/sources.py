"""The sources of a conversion: how each format is taken, by the options that it takes; and the one of a path.

There are four ways to take one: a corpus as records, a corpus as documents, texts, and rows of ids. Those of a format
follow from its row in `FORMATS`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from zb_hdf5.converters.conversion import OPTIONS, STREAM, Conversion, options_of
from zb_hdf5.converters.option import Pair, Role, Taking, is_staged
from zb_hdf5.errors import ArgumentError, FormatError, ZbError
from zb_hdf5.files.line_file import JSON_SUFFIX
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.read_as import AS_STORED, ReadAs
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
from zb_hdf5.trainers.installed_formats import with_notes

if TYPE_CHECKING:  # numpy, which the help of the commands does not need
    from zb_hdf5.converters.source_paths import SourcePaths
    from zb_hdf5.formats.format import Found


class TakenAs(Enum):
    """The way in which a source is taken: "module:name" of a function of (paths, settings), which opens it.

    The function returns a `BatchSource` or a `DocumentSource`, or a context manager of one.
    """

    RECORDS = "zb_hdf5.converters.source_records:open_as_records"
    DOCUMENTS = "zb_hdf5.converters.source_documents:open_as_documents"
    TEXTS = "zb_hdf5.converters.text_source:open_text"
    ROWS = "zb_hdf5.converters.trainer_source:open_rows"


@dataclass(frozen=True)
class Source:
    """A source of a conversion: its command and its options follow from it.

    Parameters
    ----------
    taken_as
        The way in which it is taken.
    noun
        Such a source, in messages and in the help.
    example
        The arguments of an example in the help; `{target}` and `{tokens_only}` are filled in.
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

    taken_as: TakenAs
    noun: str
    example: str
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
        return resolve_name(self.taken_as.value)(paths, settings)


#: The formats whose files are taken in several ways; and HDF5, which is of other programs too.
_NPY: Final = "npy"
_HDF5: Final = "hdf5"
_HF: Final = "hf"
_RAGGED: Final = "ragged"
#: The kind of JSON lines of text.
_LINES: Final = "jsonl"
#: The formats whose files are found by their endings alone.
FOUND_BY_ENDING: Final = (_NPY, *FILE_KINDS)

# --- a corpus as records -----------------------------------------------------------------------------------------


def _stored(row: FormatRow) -> Source:
    """Return stores of a format."""
    noun, example = row.as_source or ("", "")
    roles = (Role.STORES,) if row.tokens_only else (Role.FOREIGN, Role.STORES)
    return Source(TakenAs.RECORDS, noun, f"{example} {{target}}", roles, urls=True)


def _any_hdf5() -> Source:
    """Return HDF5 files for the commands: a look at the first path tells which of two they are."""
    store = _stored(FORMATS[_HDF5])
    return replace(
        store,
        example=f"{store.example}\n         zb convert {{name}} their-h5/ theirs --dataset tokens",
        roles=(Role.ARRAYS, Role.FOREIGN, Role.STORES, Role.ANY_HDF5),
        note="Files of other programs, and folders of them, are shuffled like arrays: a dataset of one axis is a "
        "stream, one of two axes has records, one of three batches.",
        several=True,
    )


#: Datasets of other programs: another way to read the files of "hdf5".
FOREIGN_HDF5: Final = Source(
    TakenAs.RECORDS,
    "HDF5 files of other programs",
    "",
    (Role.ARRAYS, Role.FOREIGN),
    several=True,
    urls=True,
)
#: Files of ids of which none tells documents apart.
WITHOUT_DOCUMENTS: Final = Source(
    TakenAs.RECORDS,
    "token files without documents",
    "train.bin {target}",
    (Role.ARRAYS, Role.HEADERLESS),
    several=True,
)
_ARRAYS: Final = Source(
    TakenAs.RECORDS,
    ".npy files of tokens",
    "tokens/ {target} \\\n           --batch-size 32 --shards 4",
    (Role.ARRAYS,),
    several=True,
    suffixes=(".npy",),
)

# --- a corpus as documents ---------------------------------------------------------------------------------------

#: One stream, whose documents become rows where it lies.
PACKED: Final = Source(
    TakenAs.DOCUMENTS,
    "a token stream of documents",
    "stream {target} \\\n           --seq-len 2048 --packing best-fit{tokens_only}",
    (Role.DOCUMENTS, Role.STREAM, Role.HEADERLESS),
    note="The documents are packed into rows of --seq-len tokens, with their fields, spans, ids and metadata.",
)
#: Streams of ours, and of every format that is read in place, whose documents are kept.
_KEPT: Final = Source(
    TakenAs.DOCUMENTS,
    "token streams of documents",
    "stream {target}",
    (Role.DOCUMENTS, Role.HELD_OUT, Role.KEPT, Role.HEADERLESS),
    several=True,
)
#: 1-D arrays that a boundary token cuts into documents.
_CUT: Final = Source(
    TakenAs.DOCUMENTS,
    "1-D .npy files",
    "tokens/ stream --boundary-token-id 50256",
    (Role.DOCUMENTS, Role.CUT),
    note="Each file becomes a shard. A boundary token tells the documents apart: they get a table, and are known by "
    "their file and row there in all that is made of the stream. A folder stands for all .npy files in and below it.",
    several=True,
)

# --- texts, and rows of ids --------------------------------------------------------------------------------------


def _texts(name: str) -> Source:
    kind = FILE_KINDS[name]
    return Source(
        TakenAs.TEXTS,
        kind.noun,
        f"{kind.example} {{target}} \\\n           --tokenizer tok.json --seq-len 2048 --packing best-fit",
        (
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


def _rows(row: FormatRow) -> Source:
    """Return rows of ids in files of another trainer."""
    return Source(
        TakenAs.ROWS,
        row.noun,
        "",
        (Role.DOCUMENTS, Role.HELD_OUT, Role.IDS),
        ids_options=row.options,
        several=True,
        suffixes=row.suffixes,
    )


def sources() -> dict[str, Source]:
    """Return the sources of all formats: batches first, then streams and texts, then formats of other trainers."""
    names = dict.fromkeys((*batch_formats(), _NPY, STREAM, *FILE_KINDS, *known_formats()))
    found = {name: _source_of_format(name) for name in names}
    return {name: source for name, source in found.items() if source is not None}


def _source_of_format(name: str) -> Source | None:
    """Return how the files of a format are taken where nothing else is asked for; None: they are not a source."""
    own = {_NPY: _ARRAYS, STREAM: PACKED}
    if name in own:
        return own[name]
    if name in FILE_KINDS:
        return _texts(name)
    row = row_named(name)
    if row is None:
        return None
    if row.read_by:
        return _source_of_format(row.read_by)
    if row.is_of_rows:
        return _rows(row)
    if row.is_flat:
        return replace(PACKED if row.holds_documents else WITHOUT_DOCUMENTS, noun=row.noun)
    if not row.holds_batches or not row.as_source:
        return None
    return _any_hdf5() if name == _HDF5 else _stored(row)


def suffixes_of(name: str) -> tuple[str, ...]:
    """Return the endings of the files of a format, by which it is found."""
    source = _source_of_format(name)
    return () if source is None else source.suffixes


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


def source_at(path: Path, conversion: Conversion, looks: SourcePaths) -> tuple[str, Source]:
    """Return the format of a source, and how it is taken: by its name, its suffix, or the content of its files.

    Parameters
    ----------
    looks
        Keeps what is found at the path.
    """
    with Look(path) as look:
        return _source_at(look, conversion, looks)


def _source_at(look: Look, conversion: Conversion, looks: SourcePaths) -> tuple[str, Source]:
    name = conversion.source_format
    if name == "auto":
        name = _found(look, conversion, looks)
    elif (row := row_named(name)) is not None and row.read_by:
        name = row.read_by
    if _lacks_documents(name, conversion):
        return name, WITHOUT_DOCUMENTS
    if name == _NPY and conversion.target in document_targets() and _has_records(look):
        return name, _ARRAYS
    if name not in ("auto", _HDF5):
        return name, source_named(name, conversion)
    if looks.is_foreign_hdf5(look, _read_as(conversion)):
        return _HDF5, FOREIGN_HDF5
    return name, _stored(FORMATS[_HDF5])


def _read_as(conversion: Conversion) -> ReadAs:
    """Return how a conversion asks for files to be read. Options that contradict each other are refused later."""
    try:
        return conversion.read_as
    except ArgumentError:
        return AS_STORED


def _lacks_documents(name: str, conversion: Conversion) -> bool:
    """Return whether batches are made of files without a header of which none has documents: records are cut."""
    row = row_named(name)
    read_as = _read_as(conversion)
    if row is None or not row.lacks_header or not row.holds_documents or not read_as.lacks_header:
        return False
    if conversion.is_stream or conversion.boundary_token_id is not None or conversion.packing is not None:
        return False
    from zb_hdf5.files.paths import any_path

    flat = flat_format(name, read_as)
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

    files = flat_files(_NPY, look)
    return bool(files) and len(npy_header(look.of(files[0]))[0]) == 2


def source_named(name: str, conversion: Conversion) -> Source:
    """Return how the files of a format are taken for a conversion; "auto": a store of any.

    Raises
    ------
    ArgumentError
        If it is not a format that is a source.
    """
    if _is_kept(name, conversion):
        return _KEPT
    if name == _NPY and (conversion.is_stream or conversion.boundary_token_id is not None):
        return _CUT
    source = _source_of_format(_HDF5 if name == "auto" else name)
    if source is None:
        unknown = f"source_format must be one of auto, {', '.join(sources())}, found {name!r}"
        raise with_notes(ArgumentError(unknown, options=["source_format"]), INSTALLED.notes)
    return source


def _is_kept(name: str, conversion: Conversion) -> bool:
    """Return whether a source is a token stream whose documents are kept as they lie."""
    row = row_named(name)
    is_in_place = name == STREAM or (row is not None and row.is_flat)
    if name == _NPY:  # to a stream, and with a boundary token, it is cut into documents
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
    name = _name_of_rows(look, conversion)
    takes_dtype = bool(name) and "source_dtype" in format_named(name).options
    if conversion.source_dtype is not None and not takes_dtype:
        with suppress(ZbError):  # whoever opens it says so
            looks.at(path, read_as=_read_as(conversion), look=look)
        return headerless_name(look)
    if name and conversion.tokenizer is None:
        return name
    for known in FOUND_BY_ENDING:  # a tokenizer asks for text, also where ids lie beside it
        if _is_named_as(path, suffixes_of(known)):
            return known
    if name:
        return name
    if conversion.dataset is not None or looks.is_foreign_hdf5(look, _read_as(conversion)):
        return "auto"
    try:
        return _name_of_found(looks.at(path, look=look))
    except FormatError:
        name = "" if is_store(look) else _read_by_conversions(look, conversion)
        if not name:
            raise
        return name


def _is_of_ours(look: Look, conversion: Conversion, looks: SourcePaths) -> bool:
    """Return whether a path is a store or a file of ours, which no other format is asked about."""
    endings = tuple(ending for row in batch_formats().values() if row.holds_batches for ending in row.file_suffixes)
    is_named = look.is_dir or look.path.name.endswith((".json", *endings))  # no other file is opened for this
    if not is_named or not is_store(look):
        return False
    try:
        return looks.at(look.path, read_as=_read_as(conversion), look=look).foreign_dataset is None
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


def _name_of_rows(look: Look, conversion: Conversion) -> str:
    """Return the name of the format of another trainer that recognises a source; "" if none does."""
    path = look.path
    name = source_name_of(look)
    if name == _RAGGED and conversion.dataset is not None and conversion.offsets is None:
        from zb_hdf5.trainers.ragged import names_documents

        return name if names_documents(path, conversion.dataset) else ""  # a dataset of ids has records, or a stream
    if not name and conversion.ids_column is not None and _is_named_as(path, format_named(_HF).suffixes):
        return _HF  # a column of ids is named: its rows are not text
    return name


def _is_named_as(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file, or one in or below a folder, has one of the suffixes; a plain `.json` may be anything."""
    known = tuple(suffix for suffix in suffixes if suffix != JSON_SUFFIX)
    return bool(known) and (path.name.lower().endswith(known) or _holds(path, known))


def _holds(folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a folder holds files that end so. Folders inside it count too, but not those inside a store."""
    from zb_hdf5.files.listing import listed

    return folder.is_dir() and bool(listed(folder, *suffixes).names)


def _lacks_required(path: Path, kind: Source, name: str) -> ArgumentError:
    """Return the error of a source without an option that it needs."""
    from zb_hdf5.store.way_in import way_of_rows  # numpy, which the help of the commands does not need

    with Look(path) as look:
        words = way_of_rows(look) if kind.suffixes else ""
    maker = ", which 'zb tokenizer train' makes of text" if name == "tokenizer" else ""
    more = f"; {words}" if words else ""
    return ArgumentError(f"{path}: {kind.noun} need {name}{maker}{more}", options=[name])


def refuse_unused_options(path: Path, kind: Source, conversion: Conversion) -> None:
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


def _require_taken(path: Path, kind: Source, conversion: Conversion, takings: dict[str, Taking]) -> None:
    """Raise `ArgumentError` for values that this source does not take, and if it lacks one that it needs."""
    for name, taking in takings.items():
        value = getattr(conversion, name)
        if taking.choices and value not in (None, *taking.choices):
            words = ", ".join(taking.choices)
            raise ArgumentError(f"{path}: {name} must be one of {words}, found {value!r}", options=[name])
    for name, taking in takings.items():
        if taking.required and getattr(conversion, name) is None:
            raise _lacks_required(path, kind, name)


def _possible(kind: Source, conversion: Conversion) -> set[str]:
    """Return the names of the options that apply to batches, or to a stream, of any format."""
    known = {*kind.options_of_any_target(conversion.is_stream)}
    draws = not conversion.is_stream or conversion.val_fraction
    return known if draws else known - {"seed"}


def _unused(facts: str, kind: Source, conversion: Conversion, names: list[str]) -> ArgumentError:
    """Return the error for options that do not apply, with those that do."""
    known = sorted(kind.options_of(conversion.target))
    if "memory" in names and "workers" in known:
        facts += "; fewer workers take less"
    if conversion.is_stream and "layout" in names:
        facts += f"; target {STREAM} writes a token stream"
        names = [*names, "target"]
    near = dict.fromkeys(each for name in names for each in get_close_matches(name, known, n=1))
    hint = f"the nearest that does is {', '.join(near)}; " if near else ""
    return ArgumentError(f"{facts}; {hint}the options are {', '.join(known)}", options=[*names, *known])


def _owners(names: list[str]) -> str:
    """Return the kinds of sources that take all of these options, in words."""
    kinds = {**sources(), _HDF5: _stored(FORMATS[_HDF5]), f"{_HDF5} of other programs": FOREIGN_HDF5}
    owners = [name for name, kind in kinds.items() if {*names} <= {*kind.options_of_any_target(is_stream=False)}]
    return ", ".join(owners) or "other conversions"
