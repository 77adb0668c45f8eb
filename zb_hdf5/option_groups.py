"""Options below headings: the help of each command has them by their purpose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """An option that stands below a heading of its own in the help."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


def option_group(heading: str) -> Callable[..., Callable[[F], F]]:
    """Return `click.option` for the options below a heading."""
    return functools.partial(click.option, cls=GroupedOption, group=heading)


class GroupedCommand(click.Command):
    """A command whose help has its options by their purpose."""

    #: Headings that come first, in this order. All others come in the order of their options.
    headings: ClassVar[tuple[str, ...]] = ()
    #: The heading of options without one, such as --json; it comes last.
    last: ClassVar[str] = "Output and help"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.write_options(self.get_params(ctx), ctx, formatter)

    def write_options(
        self, parameters: Iterable[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write options, each below its heading; under a lone heading they are just options."""
        records: dict[str, list[tuple[str, str]]] = {heading: [] for heading in self.headings}
        last: list[tuple[str, str]] = []
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                heading = getattr(parameter, "group", self.last)
                (last if heading == self.last else records.setdefault(heading, [])).append(record)
        records.pop(self.last, None)
        shown = {heading: found for heading, found in records.items() if found}
        shown[self.last if shown else "Options"] = last
        for heading, found in shown.items():
            with formatter.section(heading):
                formatter.write_dl(found)
