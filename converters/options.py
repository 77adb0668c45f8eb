"""What the convert commands can be told: options that several of them have, and what was given as typed objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from zb_hdf5.console import NewPath

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

POSITIVE, NATURAL = click.IntRange(1), click.IntRange(0)
SHUFFLES: Final = click.Choice(["global", "none"])
REMAINDERS: Final = click.Choice(["drop", "pad", "error"])
EXECUTORS: Final = click.Choice(["local", "mpi", "dask"])
SCHEDULER_FILE: Final = click.option(
    "--scheduler-file", type=NewPath(), help="File in which the dask scheduler has left its address."
)
FORCE: Final = click.option(
    "--force", is_flag=True, help="Replace what exists, at the end and whole; also with --resume."
)
NO_SHUFFLE: Final = click.option("--no-shuffle", "shuffle", flag_value="none", help="The same as --shuffle none.")


def option(name: str, kind: Any, default: Any, help_text: str) -> Callable[..., Any]:
    """Return an option whose help shows its default."""
    return click.option(name, type=kind, default=default, show_default=True, help=help_text)


def with_options(options: Iterable[Callable[..., Any]], command: Callable[..., Any]) -> Callable[..., Any]:
    """Add options to a command, in this order."""
    for each in reversed(list(options)):
        command = each(command)
    return command


class Codec(click.ParamType[str]):
    """zstd or gzip, with a level behind a colon."""

    name = "CODEC"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from zb_hdf5 import ArgumentError
        from zb_hdf5.spec import codec_named

        try:
            return codec_named(value)
        except ArgumentError as error:
            self.fail(str(error), param, ctx)


CODEC: Final = click.option(
    "--codec", type=Codec(), help="Compress the tokens: zstd[:1-22] or gzip[:1-9]. [default: none]"
)
TOKENS_ONLY: Final = click.option(
    "--tokens-only", is_flag=True, help="Leave fields and documents behind: .batch files hold tokens only."
)
#: How documents become batches, whether they are text or tokens already.
PACKING_OPTIONS: Final = (
    option("--packing", click.Choice(["concat", "best-fit", "pad"]), "concat", "How documents become rows."),
    option("--batch-size", POSITIVE, 32, "Rows per batch."),
    option("--seq-len", POSITIVE, 512, "Tokens per row."),
    option("--seed", NATURAL, 42, "Seed of the shuffle of rows; of text also of the draw of documents held out."),
    option("--shuffle", SHUFFLES, "global", "Order of the rows within a split."),
    NO_SHUFFLE,
    option("--remainder", REMAINDERS, "pad", "Rows that do not fill the last batch: leave out, fill up, or fail."),
    click.option("--pad-id", type=NATURAL, help="Token of padding. [default: the boundary token, else 0]"),
)
Options = TypeVar("Options", bound="DataclassInstance")


def options_of(kind: type[Options], given: dict[str, Any]) -> Options:
    """Return the options that a dataclass names, of all that a command was given."""
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every conversion is told: who works on it, and what happens to what is there."""

    shards: int | None
    workers: int | None
    executor: str
    scheduler_file: Path | None
    resume: bool
    force: bool
    as_json: bool
    quiet: bool


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(RunOptions):
    """What a conversion between formats is told besides.

    Attributes
    ----------
    memory, shuffle_method
        None where nothing is shuffled.
    """

    shard_size: int | None
    shard_range: tuple[int, int] | None
    dry_run: bool
    codec: str | None = None
    memory: int | None = None
    shuffle_method: str | None = None
    live: bool = False
    tokens_only: bool = False


@dataclass(frozen=True, kw_only=True)
class NpyOptions:
    """What is to be made of `.npy` files."""

    batch_size: int
    seq_len: int | None
    seed: int
    shuffle: str
    dtype: str
    vocab_size: int | None
    remainder: str
    pad_id: int


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How a store is read."""

    dataset: str | None = None
    dtype: str = "keep"
    batch_size: int | None = None
    seq_len: int | None = None
    remainder: str | None = None


@dataclass(frozen=True, kw_only=True)
class TextCommandOptions(RunOptions):
    """What is to be made of text; plain text files have no column."""

    layout: str
    tokenizer: str
    text_column: str = "text"
    id_column: str = ""
    metadata_columns: str = ""
    boundary_token: str | None
    no_boundary: bool
    max_document_tokens: int | None
    packing: str
    batch_size: int
    seq_len: int
    seed: int
    shuffle: str
    remainder: str
    pad_id: int | None
    val_fraction: float
    val_last_shard: bool
    shard_per_source: bool
    threads: int | None
    codec: str | None
