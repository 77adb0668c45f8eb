"""The sources of a conversion: how each format is taken, and by which options.

There are four ways to take one: a corpus as records, a corpus as documents, texts, and rows of ids. Those of a format
follow from its row in `FORMATS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from zb_hdf5.converters.conversion import OPTIONS, STREAM, Conversion, options_of
from zb_hdf5.converters.option import Pair, Role, Taking, is_staged
from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.store.format_list import (
    FOREIGN,
    FORMATS,
    HDF5,
    INSTALLED,
    NPY,
    batch_format,
    batch_formats,
    document_targets,
    known_formats,
    row_named,
)
from zb_hdf5.text.text_corpus import FILE_KINDS
from zb_hdf5.trainers.installed_formats import with_notes


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
    """

    taken_as: TakenAs
    noun: str
    example: str
    roles: tuple[Role, ...]
    ids_options: tuple[str, ...] = ()
    note: str = ""
    several: bool = False
    urls: bool = False

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


# --- a corpus as records -----------------------------------------------------------------------------------------


def _stored(row: FormatRow) -> Source:
    """Return stores of a format."""
    noun, example = row.as_source or ("", "")
    roles = (Role.STORES,) if row.tokens_only else (Role.FOREIGN, Role.STORES)
    return Source(TakenAs.RECORDS, noun, f"{example} {{target}}", roles, urls=True)


def _any_hdf5() -> Source:
    """Return HDF5 files for the commands: a look at the first path tells which of two they are."""
    return replace(
        STORED_HDF5,
        example=f"{STORED_HDF5.example}\n         zb convert {{name}} their-h5/ theirs --dataset tokens",
        roles=(Role.ARRAYS, Role.FOREIGN, Role.STORES, Role.ANY_HDF5),
        note="Files of other programs, and folders of them, are shuffled like arrays: a dataset of one axis is a "
        "stream, one of two axes has records, one of three batches.",
        several=True,
    )


#: HDF5 files of ours, as a look has told.
STORED_HDF5: Final = _stored(FORMATS[HDF5])
#: Datasets of other programs: another way to read the files of "hdf5".
FOREIGN_HDF5: Final = Source(
    TakenAs.RECORDS,
    FORMATS[FOREIGN].noun,
    "",
    (Role.ARRAYS, Role.FOREIGN),
    several=True,
    urls=True,
)
#: Files of ids that do not tell documents apart.
WITHOUT_DOCUMENTS: Final = Source(
    TakenAs.RECORDS,
    "token files without documents",
    "train.bin {target}",
    (Role.ARRAYS, Role.HEADERLESS),
    several=True,
)
ARRAYS: Final = Source(
    TakenAs.RECORDS,
    ".npy files of tokens",
    "tokens/ {target} \\\n           --batch-size 32 --shards 4",
    (Role.ARRAYS,),
    several=True,
)

#: Arrays of two axes, where documents are asked for.
RECORDS: Final = replace(ARRAYS, noun="2-D .npy files of records")

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
#: 1-D arrays as such streams.
_KEPT_ARRAYS: Final = replace(
    _KEPT,
    noun="1-D .npy files",
    example="tokens/ stream --boundary-token-id 50256",
    roles=(Role.DOCUMENTS, Role.HELD_OUT, Role.KEPT),
    note="Each file becomes a shard. A boundary token tells the documents apart: they get a table, and are known by "
    "their file and row there in all that is made of the stream. A folder stands for all .npy files in and below it.",
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
    )


# --- how each format is taken ------------------------------------------------------------------------------------


class _FormatSources(NamedTuple):
    """How the files of a format are taken.

    Attributes
    ----------
    to_batches
        The source of batches.
    as_documents
        The source where documents are kept, held out, cut, or taken from several streams; None: that of batches.
    """

    to_batches: Source
    as_documents: Source | None = None

    def for_conversion(self, conversion: Conversion) -> Source:
        """Return how a conversion takes them."""
        if self.as_documents is None:
            return self.to_batches
        several = isinstance(conversion.source, list | tuple) and len(conversion.source) > 1
        is_one_stream = Role.STREAM in self.to_batches.roles
        has_more = is_one_stream and (several or bool(conversion.val_fraction))
        is_cut = conversion.boundary_token_id is not None
        return self.as_documents if conversion.is_stream or is_cut or has_more else self.to_batches


def _of_format(name: str) -> _FormatSources | None:
    """Return how the files of a format are taken; None: they are not a source."""
    if name == STREAM:
        return _FormatSources(PACKED, _KEPT)
    if name in FILE_KINDS:
        return _FormatSources(_texts(name))
    row = row_named(name)
    if row is None:
        return None
    if row.read_by:
        return _of_format(row.read_by)
    if row.is_of_rows:
        return _FormatSources(_rows(row))
    if name == NPY:
        return _FormatSources(ARRAYS, _KEPT_ARRAYS)
    if row.is_flat:
        return _FormatSources(replace(PACKED if row.holds_documents else WITHOUT_DOCUMENTS, noun=row.noun), _KEPT)
    if name == HDF5:
        return _FormatSources(_any_hdf5())
    return _FormatSources(_stored(row)) if row.holds_batches and row.as_source else None


def sources() -> dict[str, Source]:
    """Return the sources of all formats: batches first, then streams and texts, then formats of other trainers."""
    names = dict.fromkeys((*batch_formats(), NPY, STREAM, *FILE_KINDS, *known_formats()))
    found = {name: _of_format(name) for name in names}
    return {name: each.to_batches for name, each in found.items() if each is not None}


def source_named(name: str, conversion: Conversion) -> Source:
    """Return how the files of a format are taken for a conversion; "auto": a store of any.

    Raises
    ------
    ArgumentError
        If it is not a format that is a source.
    """
    found = _of_format(HDF5 if name == "auto" else name)
    if found is None:
        unknown = f"source_format must be one of auto, {', '.join(sources())}, found {name!r}"
        raise with_notes(ArgumentError(unknown, options=["source_format"]), INSTALLED.notes)
    return found.for_conversion(conversion)


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


def may_lack_documents(name: str, conversion: Conversion) -> bool:
    """Return whether batches are made of files without a header: these have no documents, and records are cut."""
    row = row_named(name)
    if row is None or not row.lacks_header or not row.holds_documents or conversion.source_dtype is None:
        return False
    is_of_documents = conversion.boundary_token_id is not None or conversion.packing is not None
    return not conversion.is_stream and not is_of_documents


def _lacks_required(look: Look, kind: Source, name: str) -> ArgumentError:
    """Return the error of a source without an option that it needs."""
    from zb_hdf5.store.way_in import way_of_rows  # numpy, which the help of the commands does not need

    with look:
        words = way_of_rows(look) if kind.taken_as is TakenAs.TEXTS else ""
    lack = f"{kind.noun} need {name}"
    if name == "tokenizer":
        lack = f"{kind.noun} need tokenizer, which 'zb tokenizer train' makes of text"
    more = f"; {words}" if words else ""
    return ArgumentError(f"{look.path}: {lack}{more}", options=[name])


def refuse_unused_options(look: Look, kind: Source, conversion: Conversion) -> None:
    """Raise `ArgumentError` for options that were given and that a source, by the look at it, has no use for."""
    unknown = sorted(conversion.given - _possible(kind, conversion))
    rows = [name for name in unknown if conversion.is_stream and name in kind.row_options()]
    if rows:
        raise ArgumentError(
            f"{', '.join(rows)} belongs to layout batches: a stream has no rows", options=[*rows, "layout"]
        )
    if unknown:
        belong = "belong" if len(unknown) > 1 else "belongs"
        facts = f"{look.path}: {', '.join(unknown)} {belong} to {_owners(unknown)}, found {kind.noun}"
        raise _unused(facts, kind, conversion, unknown)
    refused_later = {"shard_range"} if kind.is_staged else set()
    takings = kind.options_of(conversion.target)
    unknown = sorted(conversion.given - {*takings} - refused_later)
    if unknown:
        does = "do" if len(unknown) > 1 else "does"
        facts = f"{conversion.destination}: {', '.join(unknown)} {does} not apply to {kind.noun} as {conversion.target}"
        raise _unused(facts, kind, conversion, unknown)
    _require_taken(look, kind, conversion, takings)
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


def _require_taken(look: Look, kind: Source, conversion: Conversion, takings: dict[str, Taking]) -> None:
    """Raise `ArgumentError` for values that this source does not take, and if it lacks one that it needs."""
    for name, taking in takings.items():
        value = getattr(conversion, name)
        if taking.choices and value not in (None, *taking.choices):
            words = ", ".join(taking.choices)
            raise ArgumentError(f"{look.path}: {name} must be one of {words}, found {value!r}", options=[name])
    for name, taking in takings.items():
        if taking.required and getattr(conversion, name) is None:
            raise _lacks_required(look, kind, name)


def _possible(kind: Source, conversion: Conversion) -> set[str]:
    """Return the names of the options that apply to batches, or to a stream, of any format."""
    known = {*kind.options_of_any_target(conversion.is_stream)}
    draws = not conversion.is_stream or conversion.val_fraction
    return known if draws else known - {"seed"}


def _unused(facts: str, kind: Source, conversion: Conversion, names: list[str]) -> ArgumentError:
    """Return the error for options that do not apply, with those that do."""
    known = sorted(kind.options_of(conversion.target))
    near = dict.fromkeys(each for name in names for each in get_close_matches(name, known, n=1))
    hint = f"the nearest that does is {', '.join(near)}; " if near else ""
    facts += f"; leave {'them' if len(names) > 1 else 'it'} out"
    if "memory" in names and "workers" in known:
        facts += "; fewer workers take less"
    if conversion.is_stream and "layout" in names and kind.has_documents:
        facts += f": target {STREAM} writes a token stream"
        names = [*names, "target"]
    return ArgumentError(f"{facts}; {hint}the options are {', '.join(known)}", options=[*names, *known])


def _owners(names: list[str]) -> str:
    """Return the kinds of sources that take all of these options, in words."""
    kinds = {**sources(), HDF5: STORED_HDF5, f"{HDF5} of other programs": FOREIGN_HDF5}
    owners = [name for name, kind in kinds.items() if {*names} <= {*kind.options_of_any_target(is_stream=False)}]
    if not owners:  # of streams, those whose documents are kept
        kept = (_KEPT_ARRAYS, _KEPT)
        owners = [kind.noun for kind in kept if {*names} <= {*kind.options_of_any_target(is_stream=False)}]
    return ", ".join(owners) or "other conversions"
