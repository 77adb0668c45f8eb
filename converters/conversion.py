"""The one description of a conversion: each option is declared once, for `convert` and for the command line.

A class of options is a group of the help. A field of it is the option, with its type, its words, and who takes it; the
flag, the checks, the refusal by other sources and the value of a conversion follow from it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zb_hdf5.converters.option import Option, Pair, Role, Taking, by, option, read_as_option
from zb_hdf5.errors import ArgumentError, parse_size
from zb_hdf5.read_as import ARGUMENTS, ReadAs
from zb_hdf5.store.format_list import batch_format, document_targets
from zb_hdf5.text.dropped import DEFAULT_MAX_DROPPED

if TYPE_CHECKING:  # numpy is imported when something is converted: help does not need it
    from zb_hdf5.converters.engines import Engine

#: The characters of the longest note. It is a part of the text of a source, which is kept up to four times of this.
MAX_NOTE_CHARS: Final = 1000
#: The target of documents that are kept, one after the other.
STREAM: Final = "stream"
#: Memory of all processes of a node together, unless another size is given.
DEFAULT_MEMORY_BYTES: Final = 2 << 30
DEFAULT_SHARD_BYTES: Final = 1 << 30
#: By default a store has no more shards than this, whatever its size: a file is an inode, and quotas count them.
MOST_SHARDS: Final = 500
#: Records of a batch, unless another number is given.
DEFAULT_BATCH_SIZE: Final = 32
#: Tokens of a row of documents, unless another number is given.
DEFAULT_ROW_TOKENS: Final = 512
#: The dtypes of tokens that had none of ours before.
NEW_DTYPES: Final = ("auto", "uint32", "uint16", "uint8")
#: The dtypes of tokens that had one.
KEPT_DTYPES: Final = ("keep", "uint32", "uint16", "uint8")


class ShardRange(NamedTuple):
    """A share of the shards, that one job of an array writes: number `job` of `num_jobs`, counted from 0."""

    job: int
    num_jobs: int

    @property
    def in_text(self) -> str:
        """The share as it is typed."""
        return f"{self.job}/{self.num_jobs}"

    def shards(self, num_shards: int) -> range:
        """Return the numbers of its shards: consecutive ones."""
        return range(self.job * num_shards // self.num_jobs, (self.job + 1) * num_shards // self.num_jobs)


#: The share of a conversion that is not divided.
WHOLE: Final = ShardRange(0, 1)


@dataclass(frozen=True)
class InputOptions:
    """The sources, and how they are read."""

    tokenizer: str = option(
        "tokenizer",
        "byte, tok.json, tok.tiktoken, or tiktoken:NAME.",
        by(Role.TEXTS, default="", words="", required=True),
    )
    text_column: str = option("text", "Column, or JSON key, that holds the text.", by(Role.COLUMNS, default="text"))
    ids_column: str = option(
        "text",
        "Column that has a list of ids in each row.",
        by(Role.IDS, default="", words="input_ids, else tokens"),
    )
    field_columns: tuple[str, ...] | None = option(
        "names",
        "Columns of lists that are aligned with the ids, such as labels,loss_mask.",
        by(Role.IDS, words="every other list of numbers"),
    )
    rows: str = option(
        ("documents", "records"),
        "documents: of any length; records: all as long as a record, and kept whole.",
        by(Role.IDS, default="documents"),
    )
    id_column: str = option(
        "text",
        "Column, or JSON key, that names each document: no two the same.",
        by(Role.IDS, Role.COLUMNS, default="", words=""),
    )
    metadata_columns: tuple[str, ...] = option(
        "names",
        "Columns to keep of each document, such as author,url.",
        by(Role.IDS, Role.COLUMNS, default=(), words=""),
    )
    boundary_token: str | None = option(
        "text",
        "Special token after each document.",
        by(Role.TEXTS, words="<|endoftext|>"),
        instead_of="no_boundary",
    )
    no_boundary: bool = option("flag", "Put no token between documents.", by(Role.TEXTS, default=False))
    boundary_token_id: int | None = option(
        "natural",
        "The token between documents, such as 50256.",
        by(Role.KEPT, words="as stored"),
    )
    boundary: str = option(
        ("after", "before"),
        "Side of each document with its boundary token.",
        by(Role.KEPT, default="after"),
    )
    max_document_tokens: int | None = option(
        "positive", "Cut longer documents; the boundary token counts.", by(Role.IDS, Role.TEXTS)
    )
    max_dropped: float = option(
        "share",
        "Share of the lines, rows or files that may be dropped.",
        by(Role.TEXTS, default=DEFAULT_MAX_DROPPED),
    )
    max_line: int | None = option(
        "size",
        "Size of the longest line, or text file, such as 1GiB.",
        by(Role.IDS, Role.LINES, words="256MiB"),
    )
    source_dtype: str | None = read_as_option("source_dtype", by(Role.HEADERLESS, Role.IDS))
    skip_bytes: int = read_as_option("skip_bytes", by(Role.HEADERLESS, default=0, words=""))
    vocab_size: int = option(
        "positive",
        "Refuse ids at or above it.",
        by(Role.ARRAYS, Role.KEPT, Role.STREAM, Role.IDS, default=0, words=""),
    )
    dataset: str | None = read_as_option("dataset", by(Role.FOREIGN), by(Role.IDS, words="found by its content"))
    offsets: str | None = option(
        "text",
        "Dataset of the offsets, or the ends, of the documents in it.",
        by(Role.IDS, words="found by their content"),
    )
    axes: str | None = read_as_option("axes", by(Role.FOREIGN))
    channel: int | None = read_as_option("channel", by(Role.FOREIGN))
    field_channels: Mapping[str, int] | None = read_as_option("field_channels", by(Role.FOREIGN))
    unwritten: str | None = read_as_option("unwritten", by(Role.FOREIGN, Role.IDS))
    split: str | None = option(
        ("all",),
        "all: read all files as one, also where their names tell splits (train, val, test); these are kept else.",
        by(Role.ARRAYS, Role.DOCUMENTS),
    )

    @property
    def read_as(self) -> ReadAs:
        """How files are read that do not tell it; `ArgumentError` if the options contradict each other."""
        return _read_as(vars(self))

    @property
    def headerless(self) -> dict[str, Any]:
        """The entries of a source in `shards.json` that name ids without a header; none of files that have one."""
        return {} if self.source_dtype is None else {"source_dtype": self.source_dtype, "skip_bytes": self.skip_bytes}

    @property
    def suspects(self) -> tuple[str, ...]:
        """The options that an id outside of its range proves wrong."""
        return () if self.source_dtype is None else ("source_dtype", "vocab_size")

    @property
    def is_one_split(self) -> bool:
        """Whether all files are read as one, whatever their names tell."""
        from zb_hdf5.files.named_splits import ALL_SPLITS  # numpy, which the help of the commands does not need

        return self.split == ALL_SPLITS


@dataclass(frozen=True)
class LayoutOptions:
    """Records, batches and splits."""

    layout: str = option(
        ("batches", STREAM),
        "batches: packed rows; stream: the documents one after the other.",
        by(Role.TEXTS, default="batches"),
    )
    packing: str = option(("concat", "best-fit", "pad"), "How documents become rows.", by(Role.ROWS, default="concat"))
    like: str | os.PathLike[str] | None = option(  # noqa: RUF009 - which takes the type for a mutable one
        "store",
        "Take shape, dtype, vocabulary size, shuffle, seed, remainder and number of shards from this store; an option "
        "that is given wins.",
        by(Role.BATCHES),
        of_trainers=False,
    )
    batch_size: int | None = option(
        "positive",
        "Records per batch.",
        by(Role.ROWS, Role.ARRAYS, default=DEFAULT_BATCH_SIZE),
        by(Role.FOREIGN, words="32, or that of a dataset of batches"),
        by(Role.STORES, words="as stored"),
        by(Role.ANY_HDF5, words="as stored; 32 for records and streams of other programs"),
        where=Pair.makes_batches,
    )
    seq_len: int | None = option(
        "positive",
        "Tokens per record.",
        by(Role.ROWS, words="512; of records their length"),
        by(Role.ARRAYS, words="that of 2-D records, else 512"),
        by(Role.STORES, words="as stored; a divisor cuts each record"),
        by(Role.ANY_HDF5, words="as stored; 512 for streams of other programs"),
    )
    seed: int = option(
        "natural",
        "Seed of the shuffle, and of the draw of documents held out.",
        by(Role.ARRAYS, Role.ROWS, Role.HELD_OUT, default=42),
    )
    shuffle: bool = option(
        {"global": True, "none": False},
        "global: all records of a split; none: the order of the source.",
        by(Role.ARRAYS, Role.ROWS, default=True),
        where=Pair.makes_batches,
    )
    remainder: str = option(
        ("drop", "pad", "error"),
        "Records that do not fill the last batch.",
        by(Role.ROWS, default="pad"),
        by(Role.ARRAYS, default="drop"),
        by(Role.STORES, default="", words="drop", choices=("drop", "error")),  # "": no record is cut, and none is left
        by(Role.ANY_HDF5, default="", words="drop"),
        where=Pair.makes_batches,
    )
    pad_id: int | None = option(
        "natural",
        "The token of padding.",
        by(Role.ROWS, words="the boundary token, else 0"),
        by(Role.ARRAYS, default=0),
        where=Pair.makes_batches,
    )
    val_fraction: float = option(
        "fraction",
        "Share of the documents, or records of arrays, held out as split val.",
        by(Role.ARRAYS, Role.HELD_OUT, default=0.0),
        where=Pair.has_an_index,
    )
    val_last_shard: bool = option(
        "flag", "Hold out the last source file as split val.", by(Role.HELD_OUT, default=False)
    )

    @property
    def holds_out(self) -> bool:
        """Whether some documents or records are the split for validation."""
        return self.val_fraction > 0 or self.val_last_shard

    @property
    def batch_rows(self) -> int:
        """The rows of a batch."""
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    @property
    def row_tokens(self) -> int:
        """The tokens of a row."""
        return DEFAULT_ROW_TOKENS if self.seq_len is None else self.seq_len

    def of_records(self, record_tokens: int | None, source: object) -> LayoutOptions:
        """Return the options for rows that are the records of a source, where it has records.

        Raises
        ------
        ArgumentError
            If rows of another length were asked for.
        """
        if record_tokens is None:
            return self
        if self.seq_len not in (None, record_tokens):
            raise ArgumentError(
                f"{source}: seq_len must be {record_tokens:,}, the ids of each record, found {self.seq_len:,}",
                options=["seq_len"],
            )
        return replace(self, seq_len=record_tokens)


@dataclass(frozen=True)
class OutputOptions:
    """The files that are written."""

    dtype: str = option(
        ("auto", "keep", "uint32", "uint16", "uint8"),
        "Stored dtype.",
        by(
            Role.ARRAYS,
            Role.IDS,
            default="auto",
            words="auto: the smallest that the source or --vocab-size proves",
            choices=NEW_DTYPES,
        ),
        by(Role.TEXTS, default="auto", words="auto: the smallest for the tokenizer", choices=NEW_DTYPES),
        by(Role.KEPT, default="auto", words="auto: the smallest that --vocab-size proves, else that of the source"),
        by(Role.STREAM, default="keep", choices=KEPT_DTYPES),
        by(Role.STORES, default="keep", choices=KEPT_DTYPES),
        by(Role.ANY_HDF5, default="auto", words="keep; auto for files of other programs"),
    )
    codec: str = option(
        "codec",
        "Compress the tokens: zstd[:1-22] or gzip[:1-9].",
        by(Role.ANY, default="none"),
        where=Pair.has_a_codec,
        of_trainers=False,
        of_live=False,
    )
    live: bool = option(
        "flag",
        "Let other processes read the committed batches.",
        by(Role.ANY, default=False),
        where=Pair.may_grow,
        of_trainers=False,
    )
    tokens_only: bool = option(
        "flag",
        "Leave fields and documents behind, which such files do not hold.",
        by(Role.FOREIGN, Role.DOCUMENTS, default=False),
        where=Pair.may_leave_fields,
    )
    note: str = option(
        "text",
        "Words for people, which the store keeps: its origin, its licence.",
        by(Role.ANY, default="", words=""),
        where=Pair.has_an_index,
        of_trainers=False,
    )
    field_set: tuple[str, ...] | None = option(
        "names",
        "Field sets that are copied with the tokens, of a copy of the same records; none: leave all behind.",
        by(Role.STORES, Role.ANY_HDF5, words="all that are finished"),
        where=Pair.may_have_sets,
        of_live=False,
    )
    shards: int | None = option(
        "positive",
        "Number of shards.",
        by(Role.ANY, words="as many as the source; else 1 GiB or a source file each, and 500 at most"),
        instead_of="shard_size",
    )
    shard_size: int = option(
        "size",
        "Size of a shard, such as 1GiB.",
        by(Role.ANY, default=DEFAULT_SHARD_BYTES, words=""),
        where=Pair.has_shards_of_a_size,
        of_trainers=False,
    )
    shard_per_source: bool = option(
        "flag",
        "With --layout stream: a shard per source file, also of more than 500.",
        by(Role.TEXTS, default=False),
    )


@dataclass(frozen=True)
class WorkOptions:
    """The work of a conversion: who does it, which part of it, and what it may replace."""

    memory: int | None = option(
        "size",
        "Memory of all processes of this node together.",
        by(Role.ARRAYS, default=DEFAULT_MEMORY_BYTES, words="2GiB"),
        by(Role.STREAM, Role.KEPT, words="not bounded"),
        where=Pair.takes_memory,
    )
    shuffle_method: str = option(
        ("auto", "direct", "two-pass"),
        "direct: gather record by record; two-pass: only sequential reads and writes; auto: the faster one.",
        by(Role.ARRAYS, default="auto"),
        where=Pair.makes_batches,
    )
    workers: int | None = option(
        "positive",
        "Local processes.",
        by(Role.ANY, words="the cores; 1 for little work"),
        of_live=False,
    )
    threads: int | None = option(
        "positive", "Threads that tokenize, per process.", by(Role.TEXTS, words="its share of the cores")
    )
    executor: str = option(
        ("local", "mpi"),
        "Who does the work: local processes, or MPI ranks.",
        by(Role.ANY, default="local"),
        of_live=False,
    )
    shard_range: ShardRange = option(  # noqa: RUF009 - a named tuple cannot change
        "range",
        "Write part I of N (from 0) only; then run zb index merge.",
        by(Role.ANY, default=WHOLE, words=""),
        where=Pair.is_shared_out,
        of_live=False,
    )
    resume: bool = option(
        "flag",
        "Keep the finished files of an interrupted run of the same arguments, write the rest.",
        by(Role.ANY, default=False),
        of_live=False,
    )
    force: bool = option(
        "flag",
        "Replace an existing result, at the end and whole; also with --resume.",
        by(Role.ANY, default=False),
        of_live=False,
    )
    drop_field_set: tuple[str, ...] = option(
        "names",
        "Field sets of a replaced store, which are removed with it: others keep it from being replaced.",
        by(Role.ANY, default=(), words=""),
        of_live=False,
    )


#: The class of the options of each group of the help, and the subject of the group.
OPTION_CLASSES: Final[dict[str, type]] = {
    "from": InputOptions,
    "layout": LayoutOptions,
    "to": OutputOptions,
    "work": WorkOptions,
}
OPTION_GROUPS: Final[dict[str, str]] = {
    "from": "the sources, and how they are read",
    "layout": "records, batches and splits",
    "to": "the files that are written",
    "work": "who does it, and how it is reported",
}
#: All options, by their names, in the order of the help.
OPTIONS: Final[dict[str, Option]] = {
    each.name: replace(each.metadata["option"], group=group)
    for group, kind in OPTION_CLASSES.items()
    for each in fields(kind)
}
#: The options that are arguments of `ReadAs`.
READ_AS: Final = tuple(name for name in ARGUMENTS if name in OPTIONS)


def options_of(roles: Sequence[Role]) -> dict[str, Taking]:
    """Return how each option is taken by a source of some roles, of those that it takes."""
    found = {name: each.taking(roles) for name, each in OPTIONS.items()}
    return {name: taking for name, taking in found.items() if taking is not None}


def _read_as(options: Mapping[str, Any]) -> ReadAs:
    """Return how files are read, of all options by their names: those that `ReadAs` has, where they are given."""
    return ReadAs(**{name: options[name] for name in READ_AS if options.get(name) is not None})


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise `ArgumentError` for names that no option of a conversion has, with the nearest one."""
    for name in names:
        if name not in OPTIONS:
            near = get_close_matches(name, OPTIONS, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the options are {', '.join(OPTIONS)}"
            raise ArgumentError(f"a conversion has no option {name}; {hint}")


class Conversion:
    """A conversion as it is asked for: its source, its target, the layout of the result, and the work.

    It has each option of `OPTIONS` by its name, None where that is not given: then it has the default of the kind of
    source. One that the source has no use for is refused.

    Parameters
    ----------
    source
        One path or several, of files, folders or stores, or a URL of a store; a corpus of `open_corpus`; or an open
        `BatchSource` or `DocumentSource`.
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
    **options
        Options by their names. Sizes are numbers, or text such as "512MB" or "4GiB".
    """

    def __init__(
        self,
        source: Any,
        target: str,
        destination: Any,
        *,
        source_format: str = "auto",
        progress: Callable[[int], None] | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        refuse_unknown(options)
        self.source = source
        self.target = target
        self.destination = destination
        self.source_format = source_format
        self.progress = progress
        self.engine = engine
        self._options = {name: _of_kind(name, value) for name, value in options.items() if value is not None}

    def __getattr__(self, name: str) -> Any:
        """Return an option as it was given; None: it was not."""
        if name not in OPTIONS:
            raise AttributeError(f"a conversion has no {name}")
        return self._options.get(name)

    def changed(self, **others: Any) -> Conversion:
        """Return a conversion with other arguments or options."""
        named = {name: value for name, value in vars(self).items() if name != "_options"}
        return Conversion(**{**named, **self._options, **others})

    @property
    def given(self) -> set[str]:
        """The names of the options that have a value; a flag that is False has none."""
        return {name for name, value in self._options.items() if value or OPTIONS[name].kind != "flag"}

    @property
    def read_as(self) -> ReadAs:
        """How files are read that do not tell it; `ArgumentError` if the options contradict each other."""
        return _read_as(self._options)

    @property
    def is_stream(self) -> bool:
        """Whether documents are kept, and do not become rows."""
        return STREAM in (self.target, self.layout) or self.target in document_targets()

    def require_possible(self) -> None:
        """Raise `ArgumentError` for a value that no conversion takes, or for values that contradict each other."""
        for name, each in OPTIONS.items():
            if (value := getattr(self, name)) is not None:
                each.require(name, value)
        self._require_of_target()
        for name, each in OPTIONS.items():
            other = each.instead_of
            if {name, other} <= self.given:
                raise ArgumentError(f"pass either {name} or {other}, not both", options=[name, other])
        note = self.note or ""
        if len(note) > MAX_NOTE_CHARS:
            raise ArgumentError(
                f"note must have at most {MAX_NOTE_CHARS:,} characters, found {len(note):,}", options=["note"]
            )
        if self.executor not in (None, "local") and self.workers is not None:
            raise ArgumentError(
                f"workers belongs to executor local: {self.executor} brings its own", options=["workers", "executor"]
            )
        refused = [name for name, each in OPTIONS.items() if not each.of_live and name in self.given]
        if self.live and refused:
            raise ArgumentError(
                f"live is written by one process, into a new folder: leave out {', '.join(refused)}",
                options=["live", *refused],
            )

    def _require_of_target(self) -> None:
        """Raise `ArgumentError` for options that files of another trainer have no use for, where these are written."""
        unused = [name for name, each in OPTIONS.items() if not each.of_trainers and name in self.given]
        if self.layout == "batches":
            unused.append("layout")
        if unused and self.target in document_targets():
            raise ArgumentError(f"{self.target} files have no use for {', '.join(unused)}", options=unused)
        row = batch_format(self.target)
        if self.dtype == "uint8" and row is not None and not row.holds_uint8:
            raise row.lacks_uint8(self.destination)


def _of_kind(name: str, value: Any) -> Any:
    """Return the value of an option as all of its kind are: a size may be text, a share any two numbers."""
    kind = OPTIONS[name].kind
    if kind == "size":
        return _as_number(name, value)
    return _as_share(name, value) if kind == "range" else value


def _as_share(name: str, part: Any) -> ShardRange:
    """Return a share of the shards; `ArgumentError` for anything but a job and the number of jobs."""
    try:
        found = ShardRange(*map(operator.index, part))
    except TypeError:
        found = ShardRange(0, 0)
    if not 0 <= found.job < found.num_jobs:
        raise ArgumentError(f"{name} must be (i, n) with i from 0 to n - 1, found {part!r}", options=[name])
    return found


def _as_number(name: str, size: Any) -> Any:
    """Return a size as a number, whose text is "512MB" or "4GiB"."""
    try:
        return parse_size(size) if isinstance(size, str) else size
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}", options=[name]) from error
