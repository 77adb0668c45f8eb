"""A conversion as it is done: the options of each kind of source, of targets and of work, with types and defaults.

A class of options has some of those of `Conversion`, by the same names. Its values are the ones that were asked for,
else its defaults; None is the value of an option that was not asked for and depends on the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from zb_hdf5.converters.conversion import OPTIONS, WHOLE, Conversion, ShardRange
from zb_hdf5.errors import ArgumentError
from zb_hdf5.read_as import ReadAs
from zb_hdf5.text.dropped import DEFAULT_MAX_DROPPED

if TYPE_CHECKING:  # numpy, which the help of the commands does not need
    from zb_hdf5.converters.engines import Engine
    from zb_hdf5.converters.source_paths import SourcePaths

#: Memory of all processes of a node together, unless another size is given.
DEFAULT_MEMORY_BYTES: Final = 2 << 30
DEFAULT_SHARD_BYTES: Final = 1 << 30
#: By default a store has no more shards than this, whatever its size: a file is an inode, and quotas count them.
MOST_SHARDS: Final = 500
#: Tokens of a row of documents, unless another number is given.
DEFAULT_ROW_TOKENS: Final = 512

_Options = TypeVar("_Options")


class InWords(NamedTuple):
    """The words of the help for a default that depends on the data; "" for an option that is off."""

    words: str


def in_words(words: str, default: Any = None) -> Any:
    """Return a field of options, with words for its default in the help."""
    return field(default=default, metadata={"words": InWords(words)})


def off(default: Any) -> Any:
    """Return a field of options whose default is not named in the help."""
    return in_words("", default)


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the name and the default of each option of a class; `InWords` where the help has words for it."""
    return {each.name: each.metadata.get("words", each.default) for each in fields(kind) if each.name in OPTIONS}


def resolved_as(kind: type[_Options], conversion: Conversion) -> _Options:
    """Return the options of a class as a conversion asks for them, with the defaults of the class."""
    asked = {each.name: getattr(conversion, each.name) for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in asked.items() if value is not None})


# --- sources -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayOptions:
    """Files of arrays that become batches."""

    batch_size: int = 32
    seed: int = 42
    shuffle: bool = True
    seq_len: int | None = in_words("that of 2-D records, else 512")
    dtype: str = in_words("auto: uint16 if the source or --vocab-size proves it", "auto")
    vocab_size: int = off(0)
    remainder: str = "drop"
    pad_id: int = 0


@dataclass(frozen=True)
class ForeignOptions(ArrayOptions):
    """Datasets of other programs that become batches."""

    batch_size: int | None = in_words("32, or that of a dataset of batches")  # type: ignore[assignment]


@dataclass(frozen=True)
class ShuffleOptions:
    """The shuffle of records that are read from files of arrays."""

    memory: int = DEFAULT_MEMORY_BYTES
    shuffle_method: str = "auto"


@dataclass(frozen=True)
class BoundOptions:
    """Documents that are read, packed and written within a memory that may be bounded."""

    memory: int | None = in_words("not bounded")


@dataclass(frozen=True)
class CutOptions:
    """Files of 1-D arrays that boundary tokens cut into documents."""

    boundary_token_id: int = off(0)
    boundary: str = "after"
    dtype: str = in_words("auto: uint16 if the source or --vocab-size proves it", "auto")
    vocab_size: int = off(0)


@dataclass(frozen=True)
class HeaderlessOptions:
    """Files of another trainer, which may have no header."""

    source_dtype: str | None = off(None)
    skip_bytes: int = off(0)

    @property
    def read_as(self) -> ReadAs:
        """How they are read; `ArgumentError` if their ids are not named well."""
        return ReadAs(source_dtype=self.source_dtype, skip_bytes=self.skip_bytes)

    @property
    def described(self) -> dict[str, Any]:
        """The entries of the source in `shards.json` that name such ids; none of files that have a header."""
        return {} if self.source_dtype is None else {"source_dtype": self.source_dtype, "skip_bytes": self.skip_bytes}

    @property
    def suspects(self) -> tuple[str, ...]:
        """The options that an id outside of its range proves wrong."""
        return () if self.source_dtype is None else ("source_dtype", "vocab_size")


@dataclass(frozen=True)
class SplitNames:
    """Files whose names may tell splits."""

    split: str | None = off(None)

    @property
    def is_one(self) -> bool:
        """Whether all files are read as one, whatever their names tell."""
        from zb_hdf5.files.named_splits import ALL_SPLITS  # numpy, which the help of the commands does not need

        return self.split == ALL_SPLITS


@dataclass(frozen=True)
class FlatOptions(HeaderlessOptions):
    """Files of another trainer that tell no documents apart, and become records."""

    source_format: str = "auto"


@dataclass(frozen=True)
class KeptOptions(HeaderlessOptions, SplitNames):
    """Token streams, of any format that is read in place, whose documents are kept."""

    source_format: str = "auto"
    dtype: str = in_words("auto: uint16 if --vocab-size proves it, else that of the source", "auto")
    vocab_size: int = off(0)
    boundary_token_id: int | None = in_words("as stored")
    boundary: str = "after"


@dataclass(frozen=True)
class StoreOptions:
    """A store of batches; a batch size or a sequence length cuts its records anew."""

    source_format: str = "auto"
    dtype: str = "keep"
    batch_size: int | None = in_words("as stored")
    seq_len: int | None = in_words("as stored; a divisor cuts each record")
    remainder: str | None = in_words("drop")  # None: not asked for, as is right where no record is cut


@dataclass(frozen=True)
class DatasetOptions:
    """An HDF5 file of another program."""

    dataset: str | None = in_words("the only one of integers")
    axes: str | None = off(None)
    channel: int | None = off(None)
    field_channels: Mapping[str, int] | None = off(None)
    unwritten: str | None = off(None)

    @property
    def read_as(self) -> ReadAs:
        """How it is read; `ArgumentError` if the options contradict each other."""
        return ReadAs(
            dataset=self.dataset,
            axes=self.axes,
            channel=self.channel,
            field_channels=self.field_channels or {},
            unwritten=self.unwritten,
        )


@dataclass(frozen=True)
class AnyHDF5Options:
    """HDF5 files, ours or those of other programs: the words for the defaults where the two differ."""

    batch_size: int | None = in_words("as stored; 32 for records and streams of other programs")
    seq_len: int | None = in_words("as stored; 512 for streams of other programs")
    dtype: str = in_words("keep; auto for files of other programs")


@dataclass(frozen=True)
class LossOptions:
    """A source with fields and documents, which not every target holds."""

    tokens_only: bool = off(False)


@dataclass(frozen=True)
class StreamOptions(HeaderlessOptions, SplitNames):
    """A token stream whose documents become rows."""

    source_format: str = "auto"
    dtype: str = "keep"
    vocab_size: int = off(0)


@dataclass(frozen=True)
class FormatOptions:
    """The options of all formats of other trainers as sources. A row of `FORMATS` names those that it takes."""

    source_format: str = "auto"
    dtype: str = in_words("auto: uint16 if the source or --vocab-size proves it", "auto")
    vocab_size: int = off(0)
    source_dtype: str | None = off(None)
    ids_column: str = in_words("input_ids, else tokens", "")
    field_columns: tuple[str, ...] | None = in_words("every other list of numbers")
    id_column: str = off("")
    metadata_columns: tuple[str, ...] = off(())
    rows: str = "documents"
    dataset: str | None = in_words("found by its content")
    offsets: str | None = in_words("found by their content")
    unwritten: str | None = off(None)
    max_document_tokens: int | None = off(None)
    max_line: int | None = in_words("256MiB")


@dataclass(frozen=True)
class TextOptions:
    """Files of text, which is tokenized."""

    source_format: str = "auto"
    layout: str = "batches"
    tokenizer: str = off("")
    text_column: str = "text"
    id_column: str = off("")
    metadata_columns: tuple[str, ...] = off(())
    boundary_token: str | None = in_words("<|endoftext|>")
    no_boundary: bool = off(False)
    max_document_tokens: int | None = off(None)
    max_dropped: float = DEFAULT_MAX_DROPPED
    max_line: int | None = in_words("256MiB")
    shard_per_source: bool = off(False)
    threads: int | None = in_words("its share of the cores")


@dataclass(frozen=True)
class HeldOut:
    """The documents that are held out as the split for validation; the seed draws a fraction of them."""

    val_fraction: float = 0.0
    val_last_shard: bool = off(False)
    seed: int = 42

    def __bool__(self) -> bool:
        return self.val_fraction > 0 or self.val_last_shard


@dataclass(frozen=True)
class RowOptions:
    """Documents that become rows."""

    packing: str = "concat"
    batch_size: int = 32
    seed: int = 42
    shuffle: bool = True
    seq_len: int | None = in_words("512; of records their length")
    remainder: str = "pad"
    pad_id: int | None = in_words("the boundary token, else 0")

    @property
    def row_tokens(self) -> int:
        """The tokens of a row."""
        return DEFAULT_ROW_TOKENS if self.seq_len is None else self.seq_len

    def of_records(self, record_tokens: int | None, source: object) -> RowOptions:
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


# --- targets and work --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetOptions:
    """The files that a conversion writes."""

    shards: int | None = in_words("those of the source; else 1 GiB or a source file each, and 500 at most")
    shard_size: int = off(DEFAULT_SHARD_BYTES)
    note: str = off("")
    codec: str = in_words("none", "none")
    live: bool = off(False)


@dataclass(frozen=True)
class WorkOptions:
    """The work of a conversion: who does it, which part of it, and what it may replace."""

    workers: int | None = in_words("the cores; 1 for little work")
    executor: str = "local"
    shard_range: ShardRange = off(WHOLE)  # noqa: RUF009 - a named tuple cannot change
    resume: bool = off(False)
    force: bool = off(False)


@dataclass(frozen=True, kw_only=True)
class Target(TargetOptions):
    """The result of a conversion.

    Parameters
    ----------
    format
        The name of a file format, or "stream".
    is_stream
        Whether documents are kept, and do not become rows.
    destination
        The file or folder of the result, or the URL of a store.
    path
        The file or folder of this machine that is written: the destination, or the folder that is uploaded to it.
    is_one_file
        Whether it is one file, and not a folder of shards.
    is_cut
        Whether the number or the size of the shards was asked for.
    """

    format: str
    is_stream: bool
    destination: Path
    path: Path
    is_one_file: bool
    is_cut: bool


@dataclass(frozen=True)
class Settings:
    """A conversion as it is done.

    Parameters
    ----------
    paths
        The files, folders or stores of the source, or its URL; none of a source that is open already.
    options
        The options of the source: a value of each class of options that its kind has.
    target
        The result.
    work
        Who does the work, which part of it, and what it may replace.
    engine
        Runs the tasks instead of the engine that `work` names; None: that one.
    like
        The store that the result is to fit, and the dtype that its source has to give; None: any.
    looks
        All that was found at the paths.
    """

    paths: list[Path]
    options: tuple[object, ...]
    target: Target
    work: WorkOptions
    engine: Engine | None
    like: tuple[Path, str] | None
    looks: SourcePaths

    def of(self, kind: type[_Options]) -> _Options:
        """Return the options of a class; its defaults, where the kind of the source does not have it."""
        for each in self.options:
            if isinstance(each, kind):
                return each
        return kind()

    def require_dtype(self, dtype: Any, source: object) -> None:
        """Raise `ArgumentError` if a source that has a dtype of its own does not give that of `like`."""
        if self.like is None:
            return
        path, expected = self.like
        if dtype.name != expected:
            raise ArgumentError(f"{source}: gives tokens of {dtype.name}, and {path} has {expected}")


#: The options of any kind of source.
ALWAYS: Final = (TargetOptions, WorkOptions)


def defaults_of_all(kinds: tuple[type, ...]) -> Mapping[str, Any]:
    """Return the name and the default of each option of several classes."""
    return {name: default for kind in kinds for name, default in defaults_of(kind).items()}
