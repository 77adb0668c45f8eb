"""Shared by all commands: errors become exit codes, reports go to stdout, progress goes to stderr.

Exit codes: 0 done · 1 failed · 2 usage · 3 integrity mismatch · 4 incomplete or truncated input · 5 environment ·
6 nothing to verify with · 130 interrupted (143 by SIGTERM, which Slurm sends before it kills).
"""

from __future__ import annotations

import ast
import difflib
import errno
import functools
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Self, TextIO, cast

import click

from zb_hdf5.errors import ArgumentError, Remedy, ZbError, parse_size
from zb_hdf5.errors import counted as counted  # for all commands
from zb_hdf5.errors import format_bytes as format_bytes
from zb_hdf5.files.urls import without_secrets
from zb_hdf5.option_groups import option_group
from zb_hdf5.pace import Pace
from zb_hdf5.read_as import ARGUMENTS, ReadAs
from zb_hdf5.signals import Terminated, end_by, unwinding_signals

BAR_WIDTH: Final = 30
#: The version of what `--json` prints: a key that goes, or has another sense, makes a new one; a new key does not.
JSON_VERSION: Final = 1
#: Between two lines of progress in a log.
LOG_INTERVAL_S: Final = 10.0

#: The command for each remedy: the library states facts only.
TYPED: Final = {
    Remedy.VERIFY: "run 'zb verify {at}'",
    Remedy.VERIFY_DIGESTS: "run 'zb verify {at} --digests FILE'",
    Remedy.REPAIR: "if no writer is at work on it, run 'zb repair {at}'",
    Remedy.REBUILD: "restore the index, or run 'zb index rebuild {at}'",
    Remedy.REBUILD_FORCE: "if the shards are the right ones, run 'zb index rebuild --force {at}'",
    Remedy.DO_WITHOUT: "restore them, or pass --force to do without",
    Remedy.LEAVE_OUT: "restore it, or pass --force to leave its {at} out of the store",
    Remedy.DROP_SETS: "pass --drop-field-set {at} to remove them, too, or choose another destination",
    Remedy.LEAVE_SETS: "pass --field-set none to leave them behind",
    Remedy.REPLACE: "pass --force to replace it",
    Remedy.RESUME: "'zb info {at}' shows its progress",
    Remedy.RESUME_OR_RESTART: "go on with --resume, or start over with --force",
    Remedy.RESUME_FORCED: "go on with --resume --force",
    Remedy.RESTART: "start over with --force",
    Remedy.SAME_OR_RESTART: "give the same arguments and source files, or start over with --force",
    Remedy.FEWER_WORKERS: "run the same command with --resume, and perhaps fewer --workers",
    Remedy.RESUME_WHOLE: "run it again with --resume",
    Remedy.PARTS_FIRST: "run 'zb convert ... --shard-range I/N' first",
    Remedy.MISSING_PARTS: "run the same 'zb convert ... --resume --shard-range I/N' for each (in a Slurm array: sbatch "
    "--array={at}), then merge",
    Remedy.OTHER_PART: "run 'zb convert ... --shard-range {at} --force' with the arguments of the others, then merge",
    Remedy.DROP_REMAINDER: "pass --remainder drop",
    Remedy.MPI_WORLD: "use srun --mpi=pmix or --mpi=pmi2, whichever this MPI library was built for (see 'srun "
    "--mpi=list')",
    Remedy.TOKENS_ONLY: "convert to HDF5, or pass --tokens-only to leave them behind",
    Remedy.ONE_KIND: "write these fields alike in all files, or pass --tokens-only to leave them behind",
    Remedy.DIGESTS: "make a file of digests with 'zb index digests {at} -o FILE', or convert them to a store",
    Remedy.CRC32: "restore it, or make one of the batches as they are now with 'zb index crc32 {at}'",
    Remedy.CONVERT: "'zb convert --list' shows what becomes a store",
    Remedy.DATASET: "pass --dataset to 'zb info', 'zb show' or 'zb convert', with one of its integer datasets: {at}",
    Remedy.CHANNELS: "pass the channel of the ids, and of their fields, such as --channel 0 --field-channel "
    "loss_mask=1 --field-channel labels=2; or --axes batch,record,token if all are records",
    Remedy.RECORD_AXES: "pass --axes record,token if each is a record",
    Remedy.UNWRITTEN: "pass --unwritten drop to leave them out, or --unwritten fill to take the fill value {at} for "
    "them",
    Remedy.FILL: "pass --unwritten fill to take the fill value {at} for them",
    Remedy.SOURCE_DTYPE: "if it has ids and no header, pass their dtype, such as --source-dtype uint16",
    Remedy.TEXT_COLUMN: "pass --text-column with one of their keys: {at}",
    Remedy.IDS: "its column {at} has ids: pass --from hf, and no --tokenizer",
    Remedy.TRAIN: "train both with 'zb tokenizer train TEXT -o {at} --force'",
    Remedy.TOKENIZER: "take the tokenizer.json of your model, or make one with 'zb tokenizer train TEXT -o tok.json'",
    Remedy.OTHER_KIND: "run 'zb convert {at}-to-hdf5 ...' for them",
    Remedy.REMAINDER: "pass --remainder drop, or --remainder pad if the source is not a store",
    Remedy.FILL_A_BATCH: "pass a smaller --batch-size, or --remainder pad if the source is not a store",
    Remedy.FILL_THE_SHARDS: "pass a smaller --shards",
    Remedy.RECORD_LENGTH: "pass --seq-len {at}",
    Remedy.KEEP_DTYPE: "leave out --dtype",
    Remedy.HDF5_FOR_UINT8: "write HDF5 with --to hdf5, or pass --dtype uint16",
    Remedy.MAX_LINE: "if it is right, pass --max-line 1GiB to 'zb convert' or 'zb tokenizer train'",
    Remedy.BOUND: "if it is right, run 'export ZB_MAX_LINE={at}' first",
    Remedy.FORCE: "'zb info {at}' shows the data",
}

#: The end of the message for a URL where a file of this machine is expected.
COPY_FIRST: Final = (
    "; copy it to this machine first: a store with 'zb convert hdf5-to-hdf5', other files with their own tool"
)
#: The end of the message for an error of the operating system, by its number.
_CURES: Final = {
    errno.ENOSPC: "; free some, or choose another output",
    errno.EDQUOT: "; free some, or choose another output",
    errno.EROFS: "; choose another output",
    errno.EACCES: "; ask for the right to it, or choose another place",
}
#: Characters that a shell does not take as a part of a word.
_SPECIAL: Final = re.compile(r"""[\s"'$`\\;&|<>()*?\[\]#~!]""")
#: A path in a command.
_IN_COMMAND: Final = re.compile(r"'zb [^']* \{at\}[^']*'")
#: A call of `convert` or `merge_parts` in a message: its texts have quotes of one kind or the other.
_CALL: Final = re.compile(
    r"""\b(?:convert|merge_parts)\((?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\([^()'"]*\)|[^()'"])*\)"""
)
#: Remedies whose commands take no URL.
LOCAL_ONLY: Final = frozenset({Remedy.REPAIR, Remedy.REBUILD, Remedy.REBUILD_FORCE, Remedy.CRC32})


#: The key of the words that were typed after the name of the program, in the `meta` of a context.
WORDS: Final = "zb_hdf5.words"


def typed_command() -> str:
    """Return the running command as it was typed, for a shell, without passwords in URLs."""
    context = click.get_current_context().find_root()
    return shlex.join(map(without_secrets, [context.info_name or "zb", *context.meta.get(WORDS, ())]))


class CommandGroup(click.Group):
    """A group whose commands always end with one of the exit codes above, and never with a traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta.setdefault(WORDS, tuple(args))  # of the outermost group
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        ctx.color = False if os.environ.get("NO_COLOR") else None  # None: colours are for terminals
        try:
            with unwinding_signals():
                return super().invoke(ctx)
        except (BrokenPipeError, click.exceptions.NoArgsIsHelpError):
            raise  # click itself ends quietly for `zb ... | head`, and shows the help of a group without a command
        except click.UsageError as error:
            raise click.UsageError(printable(without_secrets(error.format_message())), error.ctx) from error
        except (ZbError, MemoryError, OSError) as error:
            _fail(ctx, error, *_describe_error(error))
        except (KeyboardInterrupt, Terminated, SystemError) as error:
            _fail_by_signal(ctx, error)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = self.list_commands(ctx)
            alike = difflib.get_close_matches(args[0], names, 1) if args else []
            advice = [f"Did you mean '{ctx.command_path} {name}'?" for name in alike]
            cure = advice[0] if advice else f"Expected one of {', '.join(names)}."
            raise click.UsageError(f"{error.format_message()} {cure}", ctx) from error


#: The flags of arguments whose names they do not have.
OTHER_FLAGS: Final = {"source_format": "--from", "target": "--to", "field_channels": "--field-channel"}

#: The words of options that are true and no flags.
OTHER_WORDS: Final = {("shuffle", True): ("--shuffle", "global")}


def flag_of(name: str) -> str:
    """Return the flag of an option of this name on the command line."""
    return OTHER_FLAGS.get(name, f"--{name.replace('_', '-')}")


def message_of(error: ZbError) -> str:
    """Return the message of an error, with the command for its remedy, and the flags of the options that it names."""
    text = typed_call(typed(str(error), error.at) if error.remedy else str(error))
    for name in error.options:
        text = re.sub(rf"(?<![\w./-]){re.escape(name)}='([\w.-]+)'", rf"{flag_of(name)} \1", text)
        text = re.sub(rf"(?<![\w./-])(?<!zb ){re.escape(name)}(?!\w|[./=-]\w)", flag_of(name), text)  # `zb tokenizer`
    return text


def typed_call(text: str) -> str:
    """Replace each call of `convert` or `merge_parts` in a text with the command."""
    return _CALL.sub(lambda call: _command_of(call[0]), text)


def _command_of(call: str) -> str:
    """Return the command for a call of `convert` or `merge_parts`."""
    paths, named = _arguments_of(call)
    if call.startswith("merge_parts"):
        return shlex.join(["zb", "index", "merge", *paths])
    source, target, destination = paths
    sources = source if isinstance(source, list) else [source]
    command = ["zb", "convert", *sources, destination, flag_of("target"), target]
    for name, value in named.items():
        command += words_of_option(name, value)
    return shlex.join(command)


def words_of_option(name: str, value: Any) -> list[str]:
    """Return the words of an option with a value."""
    if isinstance(value, bool):
        return [*OTHER_WORDS.get((name, value), (flag_of(name if value else f"no_{name}"),))]
    if isinstance(value, dict):
        return [word for key, each in value.items() for word in (flag_of(name), f"{key}={each}")]
    if isinstance(value, tuple):  # a range of shards has two numbers, all others are names
        value = ("/" if name == "shard_range" else ",").join(map(str, value))
    return [flag_of(name), str(value)]


def _arguments_of(call: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call: texts, numbers, and a list of paths."""
    parsed = cast(ast.Call, ast.parse(call, mode="eval").body)
    named = {str(each.arg): ast.literal_eval(each.value) for each in parsed.keywords}
    return [ast.literal_eval(each) for each in parsed.args], named


def typed(text: str, at: str) -> str:
    """Replace the library's remedy at the end of a text with the matching command."""
    fitting = [remedy for remedy in Remedy if text.endswith(remedy.about(at))]
    if not fitting:
        return text
    found = max(fitting, key=lambda remedy: len(remedy.about(at)))  # one may end with the words of another
    facts = text.removesuffix(found.about(at))
    if "://" in at and found in LOCAL_ONLY:
        return f"{facts}{TYPED[found].format(at='COPY')}, where COPY is it, copied to this machine"
    return facts + TYPED[found].format(at=one_word(at) if _IN_COMMAND.search(TYPED[found]) else at)


def one_word(path: str) -> str:
    """Return a path as one word of a command that stands in single quotes: with spaces, in double ones."""
    if not _SPECIAL.search(path):
        return path
    return '"' + re.sub(r'(["\\$`])', r"\\\1", path) + '"'


def _fail(ctx: click.Context, error: BaseException, message: str, code: int) -> NoReturn:
    notes = [typed_call(typed(note, "")) for note in getattr(error, "__notes__", ())]
    lines = without_secrets("\n".join([f"Error: {message}", *notes])).split("\n")
    click.echo("\n".join(map(printable, lines)), err=True)
    ctx.exit(code)


def _describe_error(error: ZbError | MemoryError | OSError) -> tuple[str, int]:
    """Return the message of an error, and its exit code."""
    if isinstance(error, ZbError):
        return message_of(error), error.exit_code
    if isinstance(error, MemoryError):
        return f"out of memory: {error}", 1
    return _of_system(error), 1


def _of_system(error: OSError) -> str:
    """Return the message of an error of the operating system: the path, what it said, and a cure where there is one."""
    if error.filename is None or error.filename2 is not None or error.strerror is None:
        return str(error)
    cure = _CURES.get(error.errno or 0, "")
    return f"{os.fsdecode(error.filename)}: {error.strerror}{cure}"


def _fail_by_signal(ctx: click.Context, error: BaseException) -> NoReturn:
    """End a command that a signal has ended; any other `SystemError` is raised again."""
    end = end_by(error)
    if end is None:
        raise error
    _fail(ctx, error, end.message, end.exit_code)


class Output(NamedTuple):
    """The result of a command."""

    report: dict[str, Any]  # for programs
    lines: Sequence[tuple[str, str]]  # for people: names and texts
    text: Iterable[str] = ()  # for people, after the lines
    exit_code: int = 0


def output_options(command: Callable[..., Output | None]) -> Callable[..., None]:
    """Add `--json` and `--quiet`, and print the result of a command; None prints nothing."""

    @click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
    @click.option("--quiet", "-q", is_flag=True, help="Print neither progress nor report.")
    @functools.wraps(command)
    def run(as_json: bool, quiet: bool, **given: Any) -> None:
        found = command(**given)
        if found is not None:
            print_report(found, as_json=as_json, quiet=quiet)
            if found.exit_code:
                click.get_current_context().exit(found.exit_code)

    return run


@contextmanager
def as_notes() -> Iterator[None]:
    """Print warnings as notes for people."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: click.echo(f"note: {message}", err=True)
        yield


#: Adds an option for the tokens that are shown as text.
text_option: Final = option_group("Text")
tokenizer_option = text_option(
    "--tokenizer",
    help="byte, tok.json, tok.tiktoken, or tiktoken:NAME. "
    "[default: the one that the store names, if it is in its folder]",
)


def is_quiet() -> bool:
    """Return whether the running command was given --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.params.get("quiet"))


def print_report(found: Output, *, as_json: bool, quiet: bool) -> None:
    """Print a result on stdout: JSON for programs, or aligned lines for people; control characters are spelt out."""
    if as_json:
        report = {"version": JSON_VERSION, **found.report}
        click.echo(json.dumps(report, indent=1, default=repr))  # bytes are values of fields and spans
    elif not quiet:
        lines = [(printable(name), printable(text)) for name, text in found.lines]
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in chain(layout_report(lines, columns), found.text):
            click.echo(line)


def layout_report(lines: list[tuple[str, str]], columns: int | None = None) -> Iterator[str]:
    """Yield the lines of a report in two columns, wrapped to the columns of a terminal; None: no line is wrapped."""
    width = max((len(name) for name, _ in lines), default=0)
    for name, text in lines:
        head = f"{name:<{width}}  "
        if columns is None or len(head + text) <= columns:
            yield head + text
            continue
        indent = " " * len(head)
        if max(map(len, text.split()), default=0) > columns - len(head):  # a long word needs the whole line
            yield name
            head = indent = "  "
        wrapped = textwrap.wrap(
            text,
            columns,
            initial_indent=head,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield from wrapped or [head]


class PathOrUrl(click.Path):
    """A path on this machine, with `urls` also the URL of an object; one to read exists, or is a URL."""

    def __init__(self, *, urls: bool = False, new: bool = False) -> None:
        super().__init__(path_type=Path)
        self._urls = urls
        self._new = new

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from zb_hdf5.files.paths import any_path, is_url, local_path  # numpy, which help does not need

        try:
            if self._urls and is_url(value):
                return any_path(value)  # it is looked for when it is opened
            local_path(value)
        except ArgumentError as error:
            remedy = "" if self._new else COPY_FIRST
            self.fail(f"{error}{remedy}", param, ctx)
        path: Any = super().convert(value, param, ctx)
        if not self._new and not path.exists():
            from zb_hdf5.store.recognition import named_by_prefix

            if (found := named_by_prefix(path)) != path:
                return found
            self.fail(_missing(path), param, ctx)
        return path


def _missing(path: Path) -> str:
    """Return the message for a path where nothing is."""
    from zb_hdf5.files.publishing import named_alike, old_one_aside, partial_path

    aside = old_one_aside(path)
    partial = partial_path(path) if path.name else path
    if os.path.lexists(path) or not partial.exists():
        return f"{path}: no such file or folder{named_alike(path)}{aside}"
    look = f"see 'zb info {one_word(str(partial))}'"
    return f"{path} is not finished: {partial.name} is being written, or its writer died; {look}{aside}"


class Parsed(click.ParamType[Any]):
    """A value that `parse` reads from its text; an `ArgumentError` of it is wrong usage."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ArgumentError as error:
            self.fail(str(error), param, ctx)


class TokenizerName(click.ParamType[str]):
    """The name of a tokenizer; without one, the message has the command that makes one."""

    name = "text"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return f"T{TYPED[Remedy.TOKENIZER][1:]}."


def _parsed_groups(text: str) -> str:
    """Return the groups of documents that a text names: by their sources, or by the words of a field set."""
    if text != "source" and not re.fullmatch(r"meta:\w+", text):
        raise ArgumentError(f"expected source, or meta:NAME of a field set of 'zb fields make', found {text!r}")
    return text


#: Adds an option for the tokens of groups of documents.
shares_option: Final = option_group("Shares")
by_option: Final = shares_option(
    "--by",
    type=Parsed("source|meta:NAME", _parsed_groups),
    help="Count tokens by the sources of their documents, or by the words of a field set that 'zb fields make' made.",
)


def _named_channel(text: str) -> tuple[str, int]:
    """Return the field and the channel of NAME=N."""
    name, _, number = text.partition("=")
    if not (name.strip() and number.strip().isdecimal()):
        raise ArgumentError(f"{text!r} is not a channel of a field: expected NAME=N, such as loss_mask=1")
    return name.strip(), int(number)


def _channels_by_name(_: click.Context, __: click.Parameter, found: Any) -> dict[str, int] | None:
    """Return the channels of all fields, by their names; None: there are none."""
    named: dict[str, int] = {}
    for name, number in found or ():
        if name in named:
            raise click.BadParameter(f"{name} has a channel already: {named[name]}")
        named[name] = number
    return named or None


#: The facts of an option for the channels of fields.
CHANNEL_OPTION: Final[dict[str, Any]] = {
    "type": Parsed("NAME=N", _named_channel),
    "multiple": True,
    "callback": _channels_by_name,
}
#: A number of bytes: 4096, 64k, 512MB (10**6), 1GiB (2**30).
SIZE: Final = Parsed("size", parse_size)
SHARE: Final = click.FloatRange(0, 1)
FROM_0: Final = click.IntRange(0)
FROM_1: Final = click.IntRange(1)
#: A path on this machine, one that may be a URL, and one to write.
LOCAL: Any = PathOrUrl()
STORE: Any = PathOrUrl(urls=True)
NEW: Any = PathOrUrl(new=True)
#: The type of the values of an option, by its kind.
VALUE_TYPES: Final[Mapping[str, Any]] = {"text": str, "natural": FROM_0, "file": LOCAL}


def value_facts(kind: str | Collection[str], types: Mapping[str, Any] = VALUE_TYPES) -> dict[str, Any]:
    """Return the facts of an option whose values are of a kind, or some words."""
    if kind == "channels":
        return CHANNEL_OPTION
    return {"type": types[kind] if isinstance(kind, str) else click.Choice(list(kind))}


def foreign_options(*, without: Collection[str] = ()) -> Callable[..., Callable[..., Any]]:
    """Return a decorator that adds the options for files that do not tell how they are read: the fields of `ReadAs`.

    The command takes one `ReadAs` in place of the options.
    """
    foreign_option = option_group("Files of other programs")

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            asked = {name: given.pop(name) for name in ARGUMENTS if name in given}
            named = {name: value for name, value in asked.items() if value is not None}
            return command(read_as=ReadAs(**named), **given)

        for name, argument in reversed(ARGUMENTS.items()):
            if name not in without:
                words = " ".join(filter(None, [argument.help, argument.words and f"[default: {argument.words}]"]))
                foreign_option(flag_of(name), name, help=words, **value_facts(argument.kind))(run)
        return run

    return add


def dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for a split, and for files that do not tell how they are read: the command takes a `ReadAs`."""

    @foreign_options()
    @option_group("Splits")("--split", help="Split to read: train, val, test, or all. [default: as described above]")
    @functools.wraps(command)
    def run(**given: Any) -> Any:
        with as_notes():
            return command(**given)

    return run


class Progress:
    """A bar on a terminal; a plain line every `LOG_INTERVAL_S` seconds anywhere else, as in a Slurm log.

    Parameters
    ----------
    label
        The name of the work, in front of the bar.
    total
        Units that are 100 %; 0: not known yet.
    enabled
        Whether anything is shown; None: unless --quiet was given.
    unit
        "tok", "B" or another one.
    stream
        None: stderr.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        enabled: bool | None = None,
        unit: str = "tok",
        stream: TextIO | None = None,
    ) -> None:
        self._enabled = not is_quiet() if enabled is None else enabled
        self._stream = stream or sys.stderr
        self._bar = self._stream.isatty()
        self._lock = threading.Lock()
        self._is_open = False  # whether a line was shown, and the one of its end was not
        self.begin(label, total, unit)

    def begin(self, label: str, total: int, unit: str = "tok") -> None:
        """Begin another phase of the work, which ends the one before."""
        self._end()
        self._label = label
        self._total = total
        self._unit = unit
        self._done = 0
        self._kept = 0
        self._shown_s = time.monotonic()
        self._pace = Pace(self._shown_s)

    def advance(self, amount: int, total: int | None = None) -> None:
        """Count an amount as done, of a total that is better known by now; may be called from any thread."""
        with self._lock:
            self._done += amount
            if total is not None:
                self._total = total
            now_s = time.monotonic()
            if self._enabled and amount:
                self._pace.reach(now_s, self._done - self._kept)
            if self._enabled and now_s - self._shown_s >= (0.1 if self._bar else LOG_INTERVAL_S):
                self._shown_s = now_s
                self._show(now_s)

    def keep(self, amount: int) -> None:
        """Count an amount that was done before: towards the whole, and not towards the rate."""
        with self._lock:
            if self._done == self._kept:
                self._pace = Pace(time.monotonic())  # until now, the kept shards were checked
            self._done += amount
            self._kept += amount

    def finish(self) -> None:
        """Take the amount that is done for the whole: the rest is left out."""
        with self._lock:
            self._total = self._done

    def _show(self, now_s: float, is_over: bool = False) -> None:
        """Show the share, the rate, and the time that is left; or the time of all, of work that is over."""
        self._is_open = not is_over and not self._done >= self._total > 0
        percent = min(100, 100 * self._done // self._total) if self._total else 0  # 100 is all of it, and no less
        new = self._done - self._kept
        rate = self._pace.rate(now_s, new) if self._is_open else self._pace.overall(now_s, new)
        text = f"{percent:3}%  {format_count(rate)}{self._unit}/s"
        if not self._is_open:
            text += f"  in {format_seconds(now_s - self._pace.start_s)}"
        elif rate and self._total:  # else the time of the rest is not known
            text += f"  {format_seconds((self._total - self._done) / rate)} left"
        if self._bar:
            self._stream.write(f"\r\x1b[K{self._with_bar(percent, text)}")
        else:
            self._stream.write(f"{self._label}: {text.strip()}\n")
        self._stream.flush()

    def _with_bar(self, percent: int, text: str) -> str:
        """Return one line of the terminal: a longer one would be wrapped, and each of its changes leave a line."""
        columns = shutil.get_terminal_size().columns - 1
        width = max(0, min(BAR_WIDTH, columns - len(f"{self._label}  {text}")))
        full = "█" * (percent * width // 100)
        return f"{self._label} {full:·<{width}} {text}"[:columns]

    def _end(self) -> None:
        """Write a closing line into a log that has lines of this phase."""
        if self._is_open and not self._bar:
            self._show(time.monotonic(), is_over=True)
        self._is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end()
        if self._enabled and self._bar:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def format_count(value: float) -> str:
    """Return 1234567 as "1.23 M": three digits and a decimal prefix."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:  # it would round to 1000 of the smaller unit
            return f"{value / limit:.3g} {prefix}"
    return f"{value:.3g} "


def format_seconds(value: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def printable(text: str) -> str:
    """Return text in which each character that does not print is spelt out: "\\x1b", "\\u202e".

    So a terminal gets no commands from the data, and nothing is invisible or changes the direction of writing.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def columns_of(text: str) -> int:
    """Return how many columns of a terminal printable text fills."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)
