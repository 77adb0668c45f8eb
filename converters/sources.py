"""The kinds of sources of a conversion: one row for each, with its options, their defaults and its opener.

A format plugs in here: a function that opens its files, as a `BatchSource` or a `DocumentSource`, and one row in
`SOURCES`. Its command and its options follow from the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from zb_hdf5.converters.conversion import DEFAULT_MEMORY_BYTES, STREAM, Conversion, Unset
from zb_hdf5.errors import ArgumentError
from zb_hdf5.formats.registry import FORMATS, FileFormat
from zb_hdf5.text.corpus import FILE_KINDS

#: The default of an option that is off, or has no value.
NONE: Final = Unset("")
#: Work of any kind of source.
WORK: Final[Mapping[str, Any]] = {
    "num_shards": Unset("those of the source, or 1 GiB each"), "shard_bytes": NONE,
    "workers": Unset("the cores; 1 for little work"), "executor": "local", "part": NONE, "resume": NONE,
    "overwrite": NONE, "note": NONE, "codec": Unset("none"), "live": NONE,
}  # fmt: skip
_SHUFFLED: Final = {"batch_size": 32, "seed": 42, "shuffle": True}
_ARRAYS: Final[Mapping[str, Any]] = {
    "like": NONE, **_SHUFFLED, "seq_len": Unset("that of 2-D records, else 512"),
    "dtype": Unset("auto: uint16 if the source or --vocab-size proves it"),
    "vocab_size": NONE, "remainder": "drop", "pad_id": 0, "memory_bytes": DEFAULT_MEMORY_BYTES,
    "shuffle_method": "auto",
}  # fmt: skip
#: Documents that become rows.
PACKED: Final[Mapping[str, Any]] = {
    "like": NONE, "packing": "concat", **_SHUFFLED, "seq_len": 512, "remainder": "pad",
    "pad_id": Unset("the boundary token, else 0"),
}  # fmt: skip
_STORE: Final[Mapping[str, Any]] = {
    "like": NONE, "dtype": "keep", "batch_size": Unset("as stored"),
    "seq_len": Unset("as stored; a divisor cuts each record"), "remainder": Unset("drop"),
}  # fmt: skip
_AUTO: Final = {"dtype": ("auto", "uint32", "uint16")}
_TEXT: Final[Mapping[str, Any]] = {
    "layout": "batches", "tokenizer": NONE, "text_column": "text", "id_column": NONE, "metadata_columns": NONE,
    "boundary_token": Unset("<|endoftext|>"), "no_boundary": NONE, "max_document_tokens": NONE, "val_fraction": 0.0,
    "val_last_shard": NONE, "shard_per_source": NONE, "threads": Unset("its share of the cores"),
}  # fmt: skip


@dataclass(frozen=True)
class SourceKind:
    """A kind of source, a row of `SOURCES`: its command and its options follow from it."""

    noun: str  # such a source, in messages and in the help
    example: str  # arguments of an example in the help
    opener: str  # "module:name" of `(paths, conversion) -> BatchSource | DocumentSource`, or a context manager of one
    targets: tuple[str, ...]  # those that have a command; none: every format that holds batches
    options: Mapping[str, Any]  # the name of each option that applies, and its default
    rows: Mapping[str, Any] = field(default_factory=dict)  # more of them, of documents that become rows
    note: str = ""  # more text in the help
    several: bool = False  # whether it takes several paths
    urls: bool = False
    required: str = ""  # the option that has to be given
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of an option, where not all are possible
    suffixes: tuple[str, ...] = ()  # of its files, by which they are found

    def options_of(self, target: str) -> dict[str, Any]:
        """Return the options that apply to a target, and their defaults."""
        found = {**self.options, **({} if target == STREAM else self.rows), **WORK}
        row = FORMATS.get(target)
        if row is not None and row.default_dtype != "auto" and isinstance(found.get("dtype"), Unset):
            found["dtype"] = Unset(row.default_dtype)
        absent = {
            "codec": row is not None and row.tokens_only,
            "live": row is None or row.tokens_only or bool(self.rows),
            "note": row is not None and not row.holds_batches,
            "tokens_only": row is None or not row.tokens_only,
            "shard_bytes": bool(self.rows) and self.several,
            "part": bool(self.rows) and self.several,
        }
        return {name: default for name, default in found.items() if not absent.get(name)}

    def open(self, paths: list[Path], conversion: Conversion) -> Any:
        """Open the source."""
        return resolve_name(self.opener)(paths, conversion)


def _text(name: str) -> SourceKind:
    kind = FILE_KINDS[name]
    columns = ("text_column", "id_column", "metadata_columns")
    options = {key: value for key, value in _TEXT.items() if kind.has_columns or key not in columns}
    return SourceKind(
        kind.noun, f"{kind.example} {{target}} \\\n           --tokenizer tok.json --seq-len 2048 --packing best-fit",
        "zb_hdf5.converters.text_source:open_text", ("hdf5",), options, PACKED,
        f"{kind.documents} Documents are tokenized, packed into rows of --seq-len tokens, and the rows are "
        "shuffled once, which needs as much disk again as the store meanwhile; or, with --layout stream, kept as they "
        "are, one after the other. A folder stands for all such files in and below it.",
        several=True, required="tokenizer", suffixes=kind.suffixes,
    )  # fmt: skip


#: The one table of sources. A format of another trainer is one more row, and a function that opens its files.
SOURCES: Final[dict[str, SourceKind]] = {
    "npy": SourceKind(
        ".npy files of tokens", "tokens/ {target} \\\n           --batch-size 32 --shards 4",
        "zb_hdf5.converters.npy_source:open_arrays", (), _ARRAYS, several=True, choices=_AUTO, suffixes=(".npy",),
    ),
    STREAM: SourceKind(
        "a token stream of documents", "stream {target} \\\n           --seq-len 2048 --packing best-fit{tokens_only}",
        "zb_hdf5.converters.packed:open_packed", (), {"dtype": "keep", "tokens_only": NONE}, PACKED,
        "The documents are packed into rows of --seq-len tokens, with their fields, spans, ids and metadata.",
        choices={"dtype": ("keep", "uint32")},
    ),
    **{name: _text(name) for name in FILE_KINDS},
}  # fmt: skip
#: 1-D arrays that a boundary token cuts into documents: another way to read the files of "npy".
CUT: Final = SourceKind(
    "1-D .npy files", "tokens/ stream --boundary-token-id 50256",
    "zb_hdf5.converters.npy_source:CutSource", (STREAM,),
    {"boundary_token_id": NONE, "boundary": "after", "dtype": _ARRAYS["dtype"], "vocab_size": NONE},
    PACKED,
    "Each file becomes a shard. A boundary token tells the documents apart: they get a table, and are known by "
    "their file and row there in all that is made of the stream. A folder stands for all .npy files in and below it.",
    several=True, required="boundary_token_id", choices=_AUTO,
)  # fmt: skip


def sources() -> dict[str, SourceKind]:
    """Return all kinds of sources: those of `SOURCES`, and the stores of each format that has a reader."""
    stores = {name: _store(row) for name, row in FORMATS.items() if row.holds_batches and row.as_source}
    return {**stores, **SOURCES}


def _store(row: FileFormat) -> SourceKind:
    noun, example = row.as_source or ("", "")
    rich = {} if row.tokens_only else {"dataset": Unset("the only one of integers"), "axes": NONE, "tokens_only": NONE}
    return SourceKind(
        noun, f"{example} {{target}}", "zb_hdf5.converters.store_source:open_stores",
        tuple(name for name, each in FORMATS.items() if each.as_target),
        {**_STORE, **rich}, urls=True,
        choices={"dtype": ("keep", "uint32", "uint16"), "remainder": ("drop", "error")},
    )  # fmt: skip


def kind_of(path: Path, conversion: Conversion) -> tuple[str, SourceKind]:
    """Return the kind of a source: by its name, its suffix, or the content of its files."""
    name = conversion.source_format
    if name == "auto":
        name = _found(path, conversion.dataset)
    if name == "npy" and (conversion.is_stream or conversion.boundary_token_id is not None):
        return name, CUT
    kinds = sources()
    if name != "auto" and name not in kinds:
        raise ArgumentError(f"source_format must be one of auto, {', '.join(kinds)}, found {name!r}")
    return name, kinds["hdf5" if name == "auto" else name]


def _found(path: Path, dataset: str | None) -> str:
    from zb_hdf5.spec import STREAM_LAYOUT
    from zb_hdf5.store.holders import look

    for name, kind in SOURCES.items():
        if path.name.endswith(kind.suffixes) or any(_holds(path, suffix) for suffix in kind.suffixes):
            return name
    if dataset is not None:
        return "auto"
    opening = look(path)
    return STREAM if opening.layout == STREAM_LAYOUT and opening.foreign_dataset is None else "auto"


def _holds(folder: Path, suffix: str) -> bool:
    """Return whether a folder holds files of this suffix. Folders inside it count too, but not those inside a store."""
    from zb_hdf5.files.paths import is_url
    from zb_hdf5.spec import INDEX_NAME

    if is_url(folder) or not folder.is_dir():
        return False
    return any(folder.glob(f"*{suffix}" if (folder / INDEX_NAME).exists() else f"**/*{suffix}"))


def refuse_unused_options(path: Path, kind: SourceKind, conversion: Conversion) -> None:
    """Raise `ArgumentError` for options that were given and that this source has no use for."""
    known = {**kind.options, **({} if conversion.is_stream else kind.rows), **WORK}  # a target refuses what it lacks
    unknown = sorted(conversion.given - known.keys())
    rows = [name for name in unknown if conversion.is_stream and name in kind.rows]
    if rows:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in rows)
        raise ArgumentError(f"{flags} belongs to --layout batches: a stream has no rows")
    if unknown:
        others = [name for name, each in sources().items() if {*unknown} <= {*each.options, *each.rows}]
        belong = "belong" if len(unknown) > 1 else "belongs"
        owner = f"to {', '.join(others)}" if others else "to other conversions"
        raise ArgumentError(f"{path}: {', '.join(unknown)} {belong} {owner}, found {kind.noun}")
    for name, choices in kind.choices.items():
        if (value := getattr(conversion, name)) not in (None, *choices):
            raise ArgumentError(f"{path}: {name} must be one of {', '.join(choices)}, found {value!r}")
    if kind.required and getattr(conversion, kind.required) is None:
        raise ArgumentError(f"{path}: {kind.noun} need {kind.required}")
