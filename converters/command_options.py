"""The options of a conversion as options of a command: their types, their groups, and their defaults in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Final

import click

from zb_hdf5.console import SHARE, SIZE, STORE, VALUE_TYPES, Parsed, TokenizerName, flag_of, value_facts
from zb_hdf5.converters.conversion import OPTION_GROUPS, OPTIONS
from zb_hdf5.converters.option import Option, Taking
from zb_hdf5.errors import ArgumentError
from zb_hdf5.option_groups import GroupedCommand, GroupedOption

#: The word for no names, of an option that has some by default.
NO_NAMES: Final = "none"
#: The heading of each group of options in the help.
GROUP_HEADINGS: Final = {group: f"{group.capitalize()} ({subject})" for group, subject in OPTION_GROUPS.items()}


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
    """Return the names in a text; "none" stands for no name."""
    return () if text == NO_NAMES else tuple(name.strip() for name in text.split(",") if name.strip())


#: The type of the values of an option, by its kind.
TYPES: Final[Mapping[str, Any]] = {
    **VALUE_TYPES,
    "positive": click.IntRange(1),
    "fraction": click.FloatRange(0, 1, max_open=True),
    "share": SHARE,
    "size": SIZE,
    "tokenizer": TokenizerName(),
    "names": Parsed("NAME,...", _names),
    "codec": Parsed("CODEC", _codec),
    "range": Parsed("I/N", _part),
    "store": STORE,
}


class ConversionCommand(GroupedCommand):
    """A command that converts: its help has the groups of `OPTION_GROUPS`."""

    headings = tuple(GROUP_HEADINGS.values())
    last = GROUP_HEADINGS["work"]


def option_of(name: str, taking: Taking | None = None, *, note: str = "") -> Callable[..., Any]:
    """Return the option of a command for an option of a conversion.

    Parameters
    ----------
    name
        A key of `OPTIONS`.
    taking
        How the source of the command takes it; its default ends the help. None: the command has all sources.
    note
        One more sentence of help.
    """
    option = OPTIONS[name]
    words = [option.help, note, _default_of(option, [taking] if taking else [])]
    facts: dict[str, Any] = {"is_flag": True, "default": None}
    if option.kind != "flag":
        facts = value_facts((taking and taking.choices) or option.kind, TYPES)
    return click.option(
        flag_of(name),
        name,
        cls=GroupedOption,
        group=GROUP_HEADINGS[option.group],
        **facts,
        required=taking is not None and taking.required,
        help=" ".join(filter(None, words)),
    )


def with_default(parameter: click.Option, takings: Iterable[Taking]) -> click.Option:
    """Return an option whose help ends with its default, if it has the same one everywhere."""
    if parameter.name not in OPTIONS or parameter.is_flag:
        return parameter
    shown = copy(parameter)
    shown.help = " ".join(filter(None, [parameter.help, _default_of(OPTIONS[str(parameter.name)], takings)]))
    return shown


def _default_of(option: Option, takings: Iterable[Taking]) -> str:
    """Return the end of a help, with the default that an option has; "": it has none, or several."""
    found = {option.words_of(each) for each in takings} - {""}
    return f"[default: {found.pop()}]" if len(found) == 1 else ""


no_shuffle_option: Final = click.option(
    "--no-shuffle",
    "shuffle",
    cls=GroupedOption,
    group=GROUP_HEADINGS[OPTIONS["shuffle"].group],
    flag_value="none",
    help="The same as --shuffle none.",
)


def option_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given, with the values that their words stand for."""
    return {name: OPTIONS[name].value_of(value) for name, value in given.items() if value is not None}
