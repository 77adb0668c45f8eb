"""The one description of a conversion: each option is spelled once, for `convert` and for the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zb_hdf5.errors import ArgumentError
from zb_hdf5.formats.registry import AXES

if TYPE_CHECKING:  # numpy is imported when something is converted: help does not need it
    from zb_hdf5.converters.engines import Engine

#: Memory of all processes of a node together, unless another size is given.
DEFAULT_MEMORY_BYTES: Final = 2 << 30
#: The text of a source, of which a note is a part, is kept whole by a file up to four times of this.
MAX_NOTE_CHARS: Final = 1000
#: The target of documents that are kept as they are, one after the other.
STREAM: Final = "stream"


class Option(NamedTuple):
    """An option of a conversion: its name on the command line, its kind, and one or two sentences of help."""

    flag: str
    #: "positive", "natural", "fraction", "size", "text", "names", "codec", "part", "store" or "flag"; choices; or their
    #: values.
    kind: str | tuple[str, ...] | Mapping[str, Any]
    help: str

    def require(self, name: str, value: Any) -> None:
        """Raise `ArgumentError` for a value that is none of this kind."""
        least = {"positive": 1, "size": 1, "natural": 0}.get(str(self.kind))
        if least is not None and not hasattr(value, "__index__"):
            raise ArgumentError(f"{name} must be a whole number, found {value!r}")
        if least is not None and value < least:
            raise ArgumentError(f"{name} must be at least {least}, found {value}")
        if isinstance(self.kind, tuple) and value not in self.kind:
            raise ArgumentError(f"{name} must be one of {', '.join(self.kind)}, found {value!r}")


class Unset(NamedTuple):
    """The default of an option that depends on the data: None in the library, and these words in the help."""

    words: str


def _option(flag: str, kind: Any, text: str) -> Any:
    return field(default=None, kw_only=True, metadata={"option": Option(flag, kind, text)})


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
        "hdf5", "batch" or "npy" for batches, "stream" for an HDF5 stream of documents.
    destination
        One file if it ends in the format's suffix, else a folder of shards, of this machine or in a bucket: such a
        store is written to `<its name>.upload` in the current folder, uploaded with its index last, and removed there.
    source_format
        A name in `SOURCES`; "auto": that of the first file.
    progress
        Called with the number of tokens written since the last call.
    engine
        Runs the tasks instead of `workers` or `executor`.
    """

    source: Any
    target: str
    destination: Any
    source_format: str = field(default="auto", kw_only=True)
    layout: str | None = _option(
        "--layout", ("batches", STREAM), "batches: packed rows; stream: the documents one after the other."
    )
    tokenizer: str | None = _option("--tokenizer", "text", "byte, tok.json, tok.tiktoken, or tiktoken:NAME.")
    text_column: str | None = _option("--text-column", "text", "Column, or JSON key, that holds the text.")
    id_column: str | None = _option(
        "--id-column", "text", "Column, or JSON key, that names each document: no two the same."
    )
    metadata_columns: tuple[str, ...] | None = _option(
        "--metadata-columns", "names", "Columns to keep of each document, such as author,url."
    )
    boundary_token: str | None = _option("--boundary-token", "text", "Special token after each document.")
    no_boundary: bool | None = _option("--no-boundary", "flag", "Put no token between documents.")
    boundary_token_id: int | None = _option(
        "--boundary-token-id", "natural", "The token between documents, such as 50256."
    )
    boundary: str | None = _option("--boundary", ("after", "before"), "Side of each document with its boundary token.")
    max_document_tokens: int | None = _option("--max-document-tokens", "positive", "Cut longer documents.")
    packing: str | None = _option("--packing", ("concat", "best-fit", "pad"), "How documents become rows.")
    like: str | os.PathLike[str] | None = _option(  # noqa: RUF009 - which takes the type for a mutable one
        "--like",
        "store",
        "Take shape, dtype, vocabulary size, shuffle, seed, remainder and number of shards from this store; an option "
        "that is given wins.",
    )
    batch_size: int | None = _option("--batch-size", "positive", "Records per batch.")
    seq_len: int | None = _option("--seq-len", "positive", "Tokens per record.")
    seed: int | None = _option("--seed", "natural", "Seed of the shuffle, and of the draw of documents held out.")
    shuffle: bool | None = _option(
        "--shuffle", {"global": True, "none": False}, "global: all records of a split; none: the order of the source."
    )
    dtype: str | None = _option("--dtype", ("auto", "keep", "uint32", "uint16"), "Stored dtype.")
    vocab_size: int | None = _option("--vocab-size", "positive", "Refuse ids at or above it.")
    remainder: str | None = _option("--remainder", ("drop", "pad", "error"), "Records that do not fill the last batch.")
    pad_id: int | None = _option("--pad-id", "natural", "The token of padding.")
    val_fraction: float | None = _option(
        "--val-fraction", "fraction", "Share of the documents that is held out as split val."
    )
    val_last_shard: bool | None = _option("--val-last-shard", "flag", "Hold out the last source file as split val.")
    dataset: str | None = _option("--dataset", "text", "Name of a dataset in an HDF5 file of another program.")
    axes: str | None = _option("--axes", (AXES,), "The axes of the dataset are these: no entry is a mask or labels.")
    memory_bytes: int | None = _option("--memory", "size", "Memory of all processes of this node together.")
    shuffle_method: str | None = _option(
        "--shuffle-method",
        ("auto", "direct", "two-pass"),
        "direct: gather record by record; two-pass: only sequential reads and writes; auto: the faster one.",
    )
    codec: str | None = _option("--codec", "codec", "Compress the tokens: zstd[:1-22] or gzip[:1-9].")
    live: bool | None = _option("--live", "flag", "Let other processes read the committed batches.")
    tokens_only: bool | None = _option(
        "--tokens-only", "flag", "Leave fields and documents behind, which such files do not hold."
    )
    note: str | None = _option("--note", "text", "Words for people, which the store keeps: its origin, its licence.")
    num_shards: int | None = _option("--shards", "positive", "Number of shards.")
    shard_bytes: int | None = _option("--shard-size", "size", "Size of a shard, such as 1GiB.")
    shard_per_source: bool | None = _option(
        "--shard-per-source", "flag", "With --layout stream: a shard per source file, as without --shards."
    )
    workers: int | None = _option("--workers", "positive", "Local processes.")
    threads: int | None = _option("--threads", "positive", "Threads that tokenize, per process.")
    executor: str | None = _option("--executor", ("local", "mpi"), "Who does the work: local processes, or MPI ranks.")
    part: tuple[int, int] | None = _option(
        "--shard-range", "part", "Write part I of N (from 0) only; then run zb index merge."
    )
    resume: bool | None = _option(
        "--resume", "flag", "Keep the finished files of an interrupted run of the same arguments, write the rest."
    )
    overwrite: bool | None = _option(
        "--force", "flag", "Replace an existing result, at the end and whole; also with --resume."
    )
    progress: Callable[[int], None] | None = field(default=None, kw_only=True)
    engine: Engine | None = field(default=None, kw_only=True)

    @property
    def given(self) -> set[str]:
        """The names of the options that have a value; a flag that is False has none."""
        values = {name: getattr(self, name) for name in OPTIONS}
        return {name for name, value in values.items() if value is not None and (value or OPTIONS[name].kind != "flag")}

    @property
    def is_stream(self) -> bool:
        """Whether documents are kept as they are, and do not become rows."""
        return STREAM in (self.target, self.layout)

    def require_possible(self) -> None:
        """Raise `ArgumentError` for a value that no conversion takes."""
        for name, option in OPTIONS.items():
            if (value := getattr(self, name)) is not None:
                option.require(name, value)
        if self.part is not None and not 0 <= self.part[0] < self.part[1]:
            raise ArgumentError(f"part must be (i, n) with i from 0 to n - 1, found {tuple(self.part)}")
        if self.num_shards is not None and self.shard_bytes is not None:
            raise ArgumentError("pass either a number of shards or their size, not both")
        if len(self.note or "") > MAX_NOTE_CHARS:
            raise ArgumentError(f"note must have at most {MAX_NOTE_CHARS:,} characters, found {len(self.note or ''):,}")
        if self.executor not in (None, "local") and self.workers is not None:
            raise ArgumentError(f"--workers belongs to --executor local: {self.executor} brings its own")
        alone = ("workers", "executor", "part", "resume", "overwrite", "codec")
        if self.live and (given := [OPTIONS[name].flag for name in alone if name in self.given]):
            raise ArgumentError(f"--live is written by one process, into a new folder: leave out {', '.join(given)}")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Conversion:
        """Return the conversion with the defaults of its kind of source instead of None."""
        known = {name: value for name, value in defaults.items() if not isinstance(value, Unset)}
        return replace(self, **{name: value for name, value in known.items() if getattr(self, name) is None})


OPTIONS: Final[dict[str, Option]] = {
    each.name: each.metadata["option"] for each in fields(Conversion) if "option" in each.metadata
}
