"""`zb convert SRC... DST`, and the command of each pair: parse, run one `Conversion`, print its report."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from zb_hdf5.console import WORDS, CommandGroup, Output, PathOrUrl, Progress, as_notes, output_options
from zb_hdf5.converters.command_options import (
    GROUP_HEADINGS,
    ConversionCommand,
    no_shuffle_option,
    option_of,
    option_values,
    with_default,
)
from zb_hdf5.converters.conversion import OPTIONS, STREAM, Conversion
from zb_hdf5.converters.option import Taking
from zb_hdf5.converters.sources import source_named, sources, target_names
from zb_hdf5.errors import ConvertError, ZbError
from zb_hdf5.option_groups import GroupedOption
from zb_hdf5.store.format_list import INSTALLED, add_installed, batch_format

#: The pairs that have a command of their own, in which scripts are written. A format that is added gets none.
PAIRS: Final = (
    "npy-to-hdf5",
    "npy-to-batch",
    "npy-to-stream",
    "hdf5-to-hdf5",
    "hdf5-to-batch",
    "hdf5-to-npy",
    "batch-to-hdf5",
    "batch-to-npy",
    "stream-to-hdf5",
    "stream-to-batch",
    "parquet-to-hdf5",
    "jsonl-to-hdf5",
    "text-to-hdf5",
)
#: Words for ImageMagick: the name of an image, also below a URL or with its size behind, and an option such as -resize.
IMAGE: Final = re.compile(r"\.(png|jpe?g|gif|webp|tiff?|bmp|svg|pdf|heic|ico|eps|ps)(\[|$)", re.IGNORECASE)
LONG_OPTION: Final = re.compile(r"-[a-z]{2}")
#: A word that is meant as a pair.
PAIR_WORD: Final = re.compile(r"\w+-to-\w+")


class ConvertGroup(CommandGroup):
    """The commands of `PAIRS`; all else is the one command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] in self.commands:
            return super().parse_args(ctx, args)
        return super().parse_args(ctx, ["--", *args])  # no option is of the group itself

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        word = args[0] if args[0] in self.commands else _pair_word(ctx, args)
        if word and not ctx.resilient_parsing:
            if word != args[0] and word in self.commands:
                ctx.fail(f"{word!r} must be the first word: {ctx.command_path} {word} [OPTIONS] SRC... DST")
            return super().resolve_command(ctx, [word, *args[1:]])
        return ("", convert_any, args) if not word else super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        hint = "" if ctx.parent is not None else _hint_of_imagemagick(ctx.meta[WORDS])
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise click.UsageError(f"{error.message} {hint}".rstrip(), error.ctx) from error
        except click.exceptions.Exit as end:
            if end.exit_code and hint:
                click.echo(f"note: {hint}", err=True)
            raise

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with convert_any.make_context("", [], parent=ctx, resilient_parsing=True) as inner:
            convert_any.format_help(inner, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> Any:
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            with convert_any.make_context("", [], parent=ctx, resilient_parsing=True) as inner:
                return convert_any.shell_complete(inner, incomplete)
        pairs = super().shell_complete(ctx, incomplete) if incomplete else []
        return [CompletionItem(incomplete, type="file"), *pairs]


def _hint_of_imagemagick(words: Sequence[str]) -> str:
    """Return the place of ImageMagick's program, if words are meant for it; "": they are not.

    The script `convert` takes its place in an environment. An image is not a source, and no option of ours that begins
    with one dash has more than a letter.
    """
    if not any(IMAGE.search(word) or LONG_OPTION.match(word) for word in words):
        return ""
    own = Path(sys.argv[0]).resolve()
    folders = os.get_exec_path()
    found = [path for folder in folders if (path := Path(folder, "convert")).is_file() and path.resolve() != own]
    return f"ImageMagick's program of this name is {found[0] if found else '/usr/bin/convert'}"


def _pair_word(ctx: click.Context, args: list[str]) -> str:
    """Return the word before the first path of a command line that is meant as a pair; "": there is none."""
    given, _, _ = convert_any.make_parser(ctx).parse_args([*args])
    sources_given = given.get("src")
    named = sources_given if isinstance(sources_given, tuple) and sources_given else (given.get("dst"),)
    for word in named:
        if not isinstance(word, str) or Path(word).exists():
            return ""
        if PAIR_WORD.fullmatch(word):
            return word
    return ""


@click.group(
    "convert",
    cls=ConvertGroup,
    short_help="Convert tokens and text in any known format to another.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def convert_commands() -> None:
    """Convert tokens and text in any known format to another one."""


class _NamedAsItsGroup(click.Context):
    """The context of the one command, which is called by the name of the group."""

    @property
    def command_path(self) -> str:
        return "" if self.parent is None else self.parent.command_path


class OneCommand(ConversionCommand):
    """The command of all formats. Its help has the options in groups, of the formats that are named before --help."""

    context_class = _NamedAsItsGroup

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        takings = _takings_of(ctx.params.get("source_format"), ctx.params.get("target"))
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        shown = [each for each in options if each.name in takings or each.name not in OPTIONS]
        self.write_options([with_default(each, takings.get(str(each.name), ())) for each in shown], ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        text = f"Pairs are commands of their own: {', '.join(PAIRS)}."
        formatter.write_paragraph()
        for line in textwrap.wrap(text, formatter.width, break_on_hyphens=False):
            formatter.write(f"{line}\n")


def _takings_of(source_format: str | None, target: str | None) -> dict[str, list[Taking]]:
    """Return the options of a source and a target, and how each is taken; None: of all sources, or targets."""
    names = sources() if source_format is None else (source_format,)
    targets = target_names() if target is None else (target,)
    found: dict[str, list[Taking]] = {}
    for name in names:
        for written in targets:
            kind = source_named(name, Conversion((), written, None))
            for option, taking in kind.options_of(written).items():
                found.setdefault(option, []).append(taking)
    return found


class FormatName(click.ParamType[str]):
    """The name of a format, of those that are sources or of those that are targets."""

    name = "format"

    def __init__(self, known: Callable[[], Iterable[str]]) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self._known():
            add_installed()
        names = tuple(self._known())
        if value not in names:
            notes = "".join(f"\n{note}" for note in INSTALLED.notes)
            self.fail(f"{value!r} is not a format: expected one of {', '.join(names)}{notes}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
        from click.shell_completion import CompletionItem

        add_installed()
        return [CompletionItem(name) for name in self._known() if name.startswith(incomplete)]


class _Sources(PathOrUrl):
    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "Pass the sources, then DST."  # a lone path is taken for DST


def _all_options(command: Callable[..., Any]) -> Any:
    """Add every option of a conversion to a command."""
    for name in reversed(OPTIONS):
        command = option_of(name)(command)
        if name == "shuffle":
            command = no_shuffle_option(command)
    return command


@click.command(cls=OneCommand)
@click.argument("src", type=_Sources(urls=True), nargs=-1, metavar="SRC...")
@click.argument("dst", type=PathOrUrl(urls=True, new=True), required=False, metavar="DST")
@click.option(
    "--from",
    "source_format",
    cls=GroupedOption,
    group=GROUP_HEADINGS["from"],
    type=FormatName(sources),
    is_eager=True,  # --help after it shows the options of this format
    help="Format of the sources. [default: that of the first one, by its name and content]",
)
@click.option(
    "--to",
    "target",
    cls=GroupedOption,
    group=GROUP_HEADINGS["to"],
    type=FormatName(target_names),
    is_eager=True,
    help="Format that is written. [default: that of the suffix of DST; hdf5 for a folder]",
)
@_all_options
@click.option("--dry-run", is_flag=True, help="Describe the result, and write nothing.")
@click.option("--list", "is_listed", is_flag=True, help="List the formats and their abilities.")
@output_options
def convert_any(
    src: tuple[Path, ...],
    dst: Path | None,
    source_format: str | None,
    target: str | None,
    dry_run: bool,
    is_listed: bool,
    **given: Any,
) -> Output | None:
    """Convert tokens and text in any known format to another one.

    The formats follow from the names and the content of the sources, and from the name of DST: one that ends in .h5,
    .batch or .npy is one file, any other name is a folder of HDF5 shards. Nothing appears under its final name before
    it is whole; --resume continues an interrupted conversion. After --from and --to, --help shows the options of these
    formats only. The command "convert" alone is the same.

    \b
    Example: zb convert tokens/ train-h5 --batch-size 32 --shards 4
    """
    if is_listed:
        from zb_hdf5.converters.capabilities import capabilities, capability_lines  # numpy, which help does not need

        add_installed()
        return Output({"formats": {name: each._asdict() for name, each in capabilities().items()}}, capability_lines())
    if not src or dst is None:
        raise click.UsageError("Missing argument 'SRC...'. Pass the sources, then DST.")
    conversion = Conversion(src, target or "auto", dst, source_format=source_format or "auto", **option_values(given))
    return _run(conversion, dry_run)


def _add_pair(name: str) -> None:
    """Register the command of a source and a target, with the options that both have."""
    source_format, _, target = name.partition("-to-")
    kind = source_named(source_format, Conversion((), target, None))
    row = batch_format(target)

    def command(src: Any, dst: Path, dry_run: bool = False, **given: Any) -> Output | None:
        return _run(Conversion(src, target, dst, source_format=source_format, **option_values(given)), dry_run)

    result, example_target = (row and row.as_target) or ("a store of token streams", STREAM)
    if target == source_format:
        example_target = "relaid --batch-size 64"
    only = " --tokens-only" if row is not None and row.tokens_only else ""
    example = kind.example.format(name=name, target=example_target, tokens_only=only)
    more = f"{kind.note}\n\n" if kind.note else ""
    command.__doc__ = f"Convert {kind.noun} to {result}.\n\n{more}\b\nExample: zb convert {name} {example}"
    decorated: Callable[..., Any] = output_options(command)
    options = kind.options_of(target)
    decorated = click.option("--dry-run", is_flag=True, help="Describe the result, and write nothing.")(decorated)
    for each, taking in reversed(options.items()):
        is_of_batch = (each, target) == ("dtype", "batch")
        note = "Other readers of .batch files take uint32 only; uint8 needs HDF5." if is_of_batch else ""
        decorated = option_of(each, taking, note=note)(decorated)
        if each == "shuffle":
            decorated = no_shuffle_option(decorated)
    urls = row is not None and row.holds_batches and not kind.has_documents
    decorated = click.argument("dst", type=PathOrUrl(urls=urls, new=True))(decorated)
    source = click.argument("src", type=_Sources(urls=kind.urls), nargs=-1 if kind.several else 1, required=True)
    convert_commands.command(name, cls=ConversionCommand)(source(decorated))


def _run(conversion: Conversion, dry_run: bool) -> Output | None:
    """Convert, and return the report; None for a rank of an MPI job that only serves the first one."""
    from zb_hdf5.converters import run
    from zb_hdf5.converters.other_format import line_for_other_format  # numpy, which help does not need

    if conversion.live and dry_run:
        raise click.UsageError("--live is written by one process, into a new folder: leave out --dry-run")
    try:
        with as_notes():
            if dry_run:
                planned = run.plan(conversion)
                code = 0 if planned is None or not planned.lack else ConvertError.exit_code
                return None if planned is None else Output(planned.to_json(), planned.lines(), exit_code=code)
            with Progress("opening", 0) as progress:
                report = run.run(conversion, progress)
    except ZbError as error:
        line = line_for_other_format(conversion, error)
        if line:
            error.add_note(line)
        raise
    return None if report is None else Output(report.to_json(), report.lines())


for _name in PAIRS:
    _add_pair(_name)
