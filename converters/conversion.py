"""The one description of a conversion: each option is spelled once, for `convert` and for the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zb_hdf5.errors import ArgumentError, parse_size
from zb_hdf5.read_as import AXES, UNWRITTEN
from zb_hdf5.store.format_list import document_targets

if TYPE_CHECKING:  # numpy is imported when something is converted: help does not need it
    from zb_hdf5.converters.engines import Engine

#: The text of a source, of which a note is a part, is kept whole by a file up to four times of this.
MAX_NOTE_CHARS: Final = 1000
#: The target of documents that are kept, one after the other.
STREAM: Final = "stream"
#: Options that a live store does not take: one process writes it into a new folder.
_NOT_LIVE: Final = ("workers", "executor", "shard_range", "resume", "force", "codec")
#: Options that files of another trainer have no use for.
_NOT_OF_TRAINERS: Final = ("codec", "live", "note", "shard_size", "like")


class ShardRange(NamedTuple):
    """A share of the shards, that one job of an array writes: number `job` of `num_jobs`, counted from 0."""

    job: int
    num_jobs: int

    def shards(self, num_shards: int) -> range:
        """Return the numbers of its shards: consecutive ones."""
        return range(self.job * num_shards // self.num_jobs, (self.job + 1) * num_shards // self.num_jobs)


#: The share of a conversion that is not divided.
WHOLE: Final = ShardRange(0, 1)


#: The groups of options in the help, and the subject of each.
OPTION_GROUPS: Final[dict[str, str]] = {
    "from": "the sources, and how they are read",
    "layout": "records, batches and splits",
    "to": "the files that are written",
    "work": "who does it, and how it is reported",
}


class Option(NamedTuple):
    """An option of a conversion.

    Attributes
    ----------
    group
        Its group in the help, a key of `OPTION_GROUPS`.
    kind
        The kind of its values: "positive", "natural", "fraction", "share", "size", "text", "tokenizer", "names",
        "channels", "codec", "range", "store" or "flag"; or the words that may be given; or such words, and the value
        that each stands for.
    help
        One or two sentences.
    """

    group: str
    kind: str | tuple[str, ...] | Mapping[str, Any]
    help: str

    def require(self, name: str, value: Any) -> None:
        """Raise `ArgumentError` for a value that is not of this kind."""
        least = {"positive": 1, "size": 1, "natural": 0}.get(str(self.kind))
        if least is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise ArgumentError(f"{name} must be a whole number, found {value!r}", options=[name])
        if least is not None and value < least:
            raise ArgumentError(f"{name} must be at least {least}, found {value}", options=[name])
        if self.kind == "share" and not 0 <= value <= 1:
            raise ArgumentError(f"{name} must be from 0 to 1, found {value}", options=[name])
        possible: list[Any] = []
        if isinstance(self.kind, tuple):
            possible = list(self.kind)
        elif isinstance(self.kind, Mapping):
            possible = list(self.kind.values())
        if possible and value not in possible:
            words = ", ".join(map(str, possible))
            raise ArgumentError(f"{name} must be one of {words}, found {value!r}", options=[name])


def _option(group: str, kind: Any, text: str) -> Any:
    return field(default=None, kw_only=True, metadata={"option": Option(group, kind, text)})


@dataclass(frozen=True)
class Conversion:
    """A conversion: its source, its target, the layout of the result, and the work.

    An option that is None has the default of its kind of source; one that the source has no use for is refused.

    Parameters
    ----------
    source
        One path or several, of files, folders or stores, or a URL of a store; or an open `BatchSource` or
        `DocumentSource`.
    target
        "hdf5", "batch" or "npy" for batches, "stream" for an HDF5 stream of documents, or a format of another trainer
        that has a writer in `FORMATS`; "auto": that whose suffix the destination has, "hdf5" for a folder.
    destination
        One file if it ends in the format's suffix, else a folder of shards, of this machine or in a bucket: such a
        store is written to `<its name>-<digest>.upload` in the current folder, uploaded with its index last, and
        removed there.
    source_format
        A name in `sources()`; "auto": that of the first file.
    progress
        Called with the number of tokens written since the last call.
    engine
        Runs the tasks instead of `workers` or `executor`.
    """

    source: Any
    target: str
    destination: Any
    source_format: str = field(default="auto", kw_only=True)
    # the sources, and how they are read
    tokenizer: str | None = _option("from", "tokenizer", "byte, tok.json, tok.tiktoken, or tiktoken:NAME.")
    text_column: str | None = _option("from", "text", "Column, or JSON key, that holds the text.")
    ids_column: str | None = _option("from", "text", "Column that has a list of ids in each row.")
    field_columns: tuple[str, ...] | None = _option(
        "from", "names", "Columns of lists that are aligned with the ids, such as labels,loss_mask."
    )
    rows: str | None = _option(
        "from", ("documents", "records"), "documents: of any length; records: all as long as a record, and kept whole."
    )
    id_column: str | None = _option("from", "text", "Column, or JSON key, that names each document: no two the same.")
    metadata_columns: tuple[str, ...] | None = _option(
        "from", "names", "Columns to keep of each document, such as author,url."
    )
    boundary_token: str | None = _option("from", "text", "Special token after each document.")
    no_boundary: bool | None = _option("from", "flag", "Put no token between documents.")
    boundary_token_id: int | None = _option("from", "natural", "The token between documents, such as 50256.")
    boundary: str | None = _option("from", ("after", "before"), "Side of each document with its boundary token.")
    max_document_tokens: int | None = _option("from", "positive", "Cut longer documents; the boundary token counts.")
    max_dropped: float | None = _option("from", "share", "Share of the lines, rows or files that may be no documents.")
    max_line: int | str | None = _option("from", "size", "Size of the longest line, or text file, such as 1GiB.")
    source_dtype: str | None = _option(
        "from", "text", "Dtype of ids in files without a header, or of bytes, as uint16."
    )
    skip_bytes: int | None = _option("from", "natural", "Bytes of each such file before its ids.")
    vocab_size: int | None = _option("from", "positive", "Refuse ids at or above it.")
    dataset: str | None = _option("from", "text", "Name of a dataset in an HDF5 file of another program.")
    offsets: str | None = _option("from", "text", "Dataset of the offsets, or the ends, of the documents in it.")
    axes: str | None = _option("from", AXES, "The axes of the dataset are these: no entry is a mask or labels.")
    channel: int | None = _option("from", "natural", "Entry of the second of its three axes that has the ids.")
    field_channels: Mapping[str, int] | None = _option("from", "channels", "Entry that has a field, as loss_mask=1.")
    unwritten: str | None = _option("from", UNWRITTEN, "Rows that were never written: take a fill value, or drop them.")
    split: str | None = _option(
        "from",
        ("all",),
        "all: read all files as one, also where their names tell splits (train, val, test); these are kept else.",
    )
    # records, batches and splits
    layout: str | None = _option(
        "layout", ("batches", STREAM), "batches: packed rows; stream: the documents one after the other."
    )
    packing: str | None = _option("layout", ("concat", "best-fit", "pad"), "How documents become rows.")
    like: str | os.PathLike[str] | None = _option(  # noqa: RUF009 - which takes the type for a mutable one
        "layout",
        "store",
        "Take shape, dtype, vocabulary size, shuffle, seed, remainder and number of shards from this store; an option "
        "that is given wins.",
    )
    batch_size: int | None = _option("layout", "positive", "Records per batch.")
    seq_len: int | None = _option("layout", "positive", "Tokens per record.")
    seed: int | None = _option("layout", "natural", "Seed of the shuffle, and of the draw of documents held out.")
    shuffle: bool | None = _option(
        "layout", {"global": True, "none": False}, "global: all records of a split; none: the order of the source."
    )
    remainder: str | None = _option("layout", ("drop", "pad", "error"), "Records that do not fill the last batch.")
    pad_id: int | None = _option("layout", "natural", "The token of padding.")
    val_fraction: float | None = _option(
        "layout", "fraction", "Share of the documents, or records of arrays, held out as split val."
    )
    val_last_shard: bool | None = _option("layout", "flag", "Hold out the last source file as split val.")
    # the files that are written
    dtype: str | None = _option("to", ("auto", "keep", "uint32", "uint16"), "Stored dtype.")
    codec: str | None = _option("to", "codec", "Compress the tokens: zstd[:1-22] or gzip[:1-9].")
    live: bool | None = _option("to", "flag", "Let other processes read the committed batches.")
    tokens_only: bool | None = _option("to", "flag", "Leave fields and documents behind, which such files do not hold.")
    note: str | None = _option("to", "text", "Words for people, which the store keeps: its origin, its licence.")
    shards: int | None = _option("to", "positive", "Number of shards.")
    shard_size: int | str | None = _option("to", "size", "Size of a shard, such as 1GiB.")
    shard_per_source: bool | None = _option(
        "to", "flag", "With --layout stream: a shard per source file, also of more than 500."
    )
    # who does it, and how it is reported
    memory: int | str | None = _option("work", "size", "Memory of all processes of this node together.")
    shuffle_method: str | None = _option(
        "work",
        ("auto", "direct", "two-pass"),
        "direct: gather record by record; two-pass: only sequential reads and writes; auto: the faster one.",
    )
    workers: int | None = _option("work", "positive", "Local processes.")
    threads: int | None = _option("work", "positive", "Threads that tokenize, per process.")
    executor: str | None = _option("work", ("local", "mpi"), "Who does the work: local processes, or MPI ranks.")
    shard_range: tuple[int, int] | None = _option(
        "work", "range", "Write part I of N (from 0) only; then run zb index merge."
    )
    resume: bool | None = _option(
        "work", "flag", "Keep the finished files of an interrupted run of the same arguments, write the rest."
    )
    force: bool | None = _option(
        "work", "flag", "Replace an existing result, at the end and whole; also with --resume."
    )
    progress: Callable[[int], None] | None = field(default=None, kw_only=True)
    engine: Engine | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Take sizes as numbers, whose text is "512MB" or "4GiB"."""
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.kind == "size" and isinstance(value, str):
                try:
                    object.__setattr__(self, name, parse_size(value))
                except ArgumentError as error:
                    raise ArgumentError(f"{name}: {error}", options=[name]) from error

    @property
    def given(self) -> set[str]:
        """The names of the options that have a value; a flag that is False has none."""
        values = {name: getattr(self, name) for name in OPTIONS}
        return {name for name, value in values.items() if value is not None and (value or OPTIONS[name].kind != "flag")}

    @property
    def is_stream(self) -> bool:
        """Whether documents are kept, and do not become rows."""
        return STREAM in (self.target, self.layout) or self.target in document_targets()

    def require_possible(self) -> None:
        """Raise `ArgumentError` for a value that no conversion takes, or for values that contradict each other."""
        for name, option in OPTIONS.items():
            if (value := getattr(self, name)) is not None:
                option.require(name, value)
        if self.shard_range is not None and not 0 <= self.shard_range[0] < self.shard_range[1]:
            raise ArgumentError(
                f"shard_range must be (i, n) with i from 0 to n - 1, found {tuple(self.shard_range)}",
                options=["shard_range"],
            )
        unused: list[str] = [name for name in _NOT_OF_TRAINERS if name in self.given]
        if self.layout == "batches":
            unused.append("layout")
        if unused and self.target in document_targets():
            raise ArgumentError(f"{self.target} files have no use for {', '.join(unused)}", options=unused)
        self._require_one_of("shards", "shard_size")
        self._require_one_of("boundary_token", "no_boundary")
        note = self.note or ""
        if len(note) > MAX_NOTE_CHARS:
            raise ArgumentError(
                f"note must have at most {MAX_NOTE_CHARS:,} characters, found {len(note):,}", options=["note"]
            )
        if self.executor not in (None, "local") and self.workers is not None:
            raise ArgumentError(
                f"workers belongs to executor local: {self.executor} brings its own", options=["workers", "executor"]
            )
        refused = [name for name in _NOT_LIVE if name in self.given]
        if self.live and refused:
            raise ArgumentError(
                f"live is written by one process, into a new folder: leave out {', '.join(refused)}",
                options=["live", *refused],
            )

    def _require_one_of(self, one: str, other: str) -> None:
        """Raise `ArgumentError` if two options are given of which each excludes the other."""
        if {one, other} <= self.given:
            raise ArgumentError(f"pass either {one} or {other}, not both", options=[one, other])


OPTIONS: Final[dict[str, Option]] = {
    each.name: each.metadata["option"] for each in fields(Conversion) if "option" in each.metadata
}


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise `ArgumentError` for names that no option of a conversion has, with the nearest one."""
    for name in names:
        near = get_close_matches(name, OPTIONS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the options are {', '.join(OPTIONS)}"
        raise ArgumentError(f"a conversion has no option {name}; {hint}")
