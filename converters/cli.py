"""`zb convert SOURCE-to-TARGET SRC DST`: parse, run one `Conversion`, print its report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from zb_hdf5.console import (
    SIZE,
    STORE,
    CommandGroup,
    Output,
    Parsed,
    PathOrUrl,
    Progress,
    flag_of,
    output_options,
)
from zb_hdf5.converters.conversion import OPTIONS, STREAM, Conversion, Option
from zb_hdf5.converters.options import DEFAULT_MEMORY_BYTES, InWords
from zb_hdf5.converters.sources import CUT, SourceKind, sources
from zb_hdf5.errors import ArgumentError
from zb_hdf5.formats.registry import FORMATS


@click.group(
    "convert",
    cls=CommandGroup,
    short_help="Convert .npy, HDF5, .batch and text to each other.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def convert_commands() -> None:
    """Convert tokens in .npy files, text, token streams and stores to HDF5, .batch, .npy or token streams.

    A destination that ends in .h5, .batch or .npy is one file; any other name is a folder of shards. Nothing appears
    under its final name before it is whole; --resume continues an interrupted conversion. The command "convert" alone
    is the same.
    """


def _part(text: str) -> tuple[int, int]:
    """Return I and N of I/N: the I-th of N parts, counted from 0."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise ArgumentError(f"{text!r} is not a part such as 3/16: expected I/N with 0 <= I < N")
    return int(first), int(count)


def _codec(text: str) -> str:
    from zb_hdf5.spec import codec_named  # numpy, which help does not need

    return codec_named(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


#: The type of the values of an option, by its kind.
TYPES: Final[Mapping[str, Any]] = {
    "positive": click.IntRange(1),
    "natural": click.IntRange(0),
    "fraction": click.FloatRange(0, 1, max_open=True),
    "size": SIZE,
    "text": str,
    "names": Parsed("NAME,...", _names),
    "codec": Parsed("CODEC", _codec),
    "range": Parsed("I/N", _part),
    "store": STORE,
}


def _click_option(name: str, each: Option, default: Any, target: str, kind: SourceKind) -> Callable[..., Any]:
    """Return the option of a command, whose help ends with the default."""
    if each.kind == "flag":
        return click.option(flag_of(name), name, is_flag=True, default=None, help=each.help)
    shown = _shown(default, each.kind)
    text = each.help
    if name == "dtype" and target == "batch":
        text += " Other readers of .batch files take uint32 only."
    if shown:
        text += f" [default: {shown}]"
    values = kind.choices.get(name, each.kind)
    return click.option(
        flag_of(name),
        name,
        type=TYPES[values] if isinstance(values, str) else click.Choice(list(values)),
        required=name == kind.required,
        help=text,
    )


def _shown(default: Any, kind: Any) -> str:
    """Return the words for a default in the help."""
    if isinstance(default, InWords):
        return default.words
    if isinstance(kind, Mapping):
        return next(str(word) for word, value in kind.items() if value == default)
    return "2GiB" if default == DEFAULT_MEMORY_BYTES else str(default)


class _Sources(PathOrUrl):
    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "Pass the sources, then DST."  # a lone path is taken for DST


def _add_command(source_format: str, kind: SourceKind, target: str) -> None:
    """Register the command of a source and a target, with the options that both have."""
    name = f"{source_format}-to-{target}"
    row = FORMATS.get(target)

    def command(src: Any, dst: Path, dry_run: bool = False, **given: Any) -> Output | None:
        given = {each: _meant(each, value) for each, value in given.items() if value is not None}
        return _run(Conversion(src, target, dst, source_format=source_format, **given), dry_run)

    result, example_target = (row and row.as_target) or ("a store of token streams", STREAM)
    if target == source_format:
        example_target = "relaid --batch-size 64"
    only = " --tokens-only" if row is not None and row.tokens_only else ""
    example = kind.example.format(target=example_target, tokens_only=only)
    note = f"{kind.note}\n\n" if kind.note else ""
    command.__doc__ = f"Convert {kind.noun} to {result}.\n\n{note}\b\nExample: zb convert {name} {example}"
    decorated: Callable[..., Any] = output_options(command)
    options = kind.options_of(target)
    if "shard_range" in options and target != STREAM:
        decorated = click.option("--dry-run", is_flag=True, help="Describe the result, and write nothing.")(decorated)
    for each, default in reversed(options.items()):
        decorated = _click_option(each, OPTIONS[each], default, target, kind)(decorated)
        if each == "shuffle":
            no_shuffle = click.option("--no-shuffle", each, flag_value="none", help="The same as --shuffle none.")
            decorated = no_shuffle(decorated)
    urls = row is not None and row.holds_batches and not kind.rows
    decorated = click.argument("dst", type=PathOrUrl(urls=urls, new=True))(decorated)
    source = click.argument("src", type=_Sources(urls=kind.urls), nargs=-1 if kind.several else 1, required=True)
    convert_commands.command(name)(source(decorated))


def _meant(name: str, value: Any) -> Any:
    """Return the value that a choice stands for."""
    kind = OPTIONS[name].kind
    return kind[value] if isinstance(kind, Mapping) else value


def _run(conversion: Conversion, dry_run: bool) -> Output | None:
    """Convert, and return the report; None for a rank of an MPI job that only serves the first one."""
    from zb_hdf5.converters import run

    if conversion.live and dry_run:
        raise click.UsageError("--live is written by one process, into a new folder: leave out --dry-run")
    if dry_run:
        planned = run.plan(conversion)
        return None if planned is None else Output(planned.to_json(), planned.lines())
    with Progress("opening", 0) as progress, warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: click.echo(f"note: {message}", err=True)
        report = run.run(conversion, progress)
    return None if report is None else Output(report.to_json(), report.lines())


_BATCHES: Final = tuple(name for name, row in FORMATS.items() if row.as_target and row.holds_batches)
for _format, _kind in ((name, kind) for name, kind in sources().items() if kind.is_paired):
    for _target in _kind.targets or _BATCHES:
        if _target != _format or not FORMATS[_target].tokens_only:
            _add_command(_format, _kind, _target)
_add_command("npy", CUT, STREAM)
