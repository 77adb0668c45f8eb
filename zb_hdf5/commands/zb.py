"""`zb`: the group of all commands. `zb NAME` is the function `zb_NAME` of the file `zb_NAME.py`."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Final, NamedTuple

import click

from zb_hdf5.console import CommandGroup
from zb_hdf5.version import __version__


class CommandEntry(NamedTuple):
    """A command in the help of `zb`."""

    purpose: str  # a heading of the help
    summary: str
    place: str  # module and name: it is imported only when it is called


_MAKE: Final = "Make a store"
_LOOK: Final = "Look at it"
_CHECK: Final = "Check and mend it"
_TRAIN: Final = "Train from it"
#: In the order of the help.
COMMANDS: Final = {
    "convert": CommandEntry(
        _MAKE, "Convert tokens and text in any known format to another.", "zb_hdf5.converters.cli:convert_commands"
    ),
    "fetch": CommandEntry(
        _MAKE, "Download numbered files from a web server or a bucket.", "zb_hdf5.commands.zb_fetch:zb_fetch"
    ),
    "tokenizer": CommandEntry(_MAKE, "Make a tokenizer.", "zb_hdf5.commands.zb_tokenizer:zb_tokenizer"),
    "index": CommandEntry(
        _MAKE, "Merge the parts of a job array; write indexes and digests.", "zb_hdf5.commands.zb_index:zb_index"
    ),
    "fields": CommandEntry(
        _MAKE, "Show, finish and remove values that jobs have computed.", "zb_hdf5.commands.zb_fields:zb_fields"
    ),
    "info": CommandEntry(_LOOK, "Describe a file, store or unfinished conversion.", "zb_hdf5.commands.zb_info:zb_info"),
    "show": CommandEntry(_LOOK, "Show rows or documents as text.", "zb_hdf5.commands.zb_show:zb_show"),
    "report": CommandEntry(
        _LOOK, "Write a page with the statistics of a store.", "zb_hdf5.commands.zb_report:zb_report"
    ),
    "verify": CommandEntry(
        _CHECK, "Compare every batch with its stored digests.", "zb_hdf5.commands.zb_verify:zb_verify"
    ),
    "repair": CommandEntry(
        _CHECK, "Save the good batches or documents in a new file.", "zb_hdf5.commands.zb_repair:zb_repair"
    ),
    "doctor": CommandEntry(
        _CHECK, "Check this machine for problems that would stop training.", "zb_hdf5.commands.zb_doctor:zb_doctor"
    ),
    "bench": CommandEntry(
        _TRAIN, "Time the batches of a training from your own data.", "zb_hdf5.commands.zb_bench:zb_bench"
    ),
    "plan": CommandEntry(
        _TRAIN, "Plan the steps, bytes and opened files of a job.", "zb_hdf5.commands.zb_plan:zb_plan"
    ),
    "stage": CommandEntry(
        _TRAIN, "Copy the batches of a node's ranks to its own disk.", "zb_hdf5.commands.zb_stage:zb_stage"
    ),
    "cache": CommandEntry(_TRAIN, "Show and free the stores in a cache folder.", "zb_hdf5.commands.zb_cache:zb_cache"),
    "which": CommandEntry(
        _TRAIN, "Name the rows and documents of a training step or a batch.", "zb_hdf5.commands.zb_which:zb_which"
    ),
}


class ZbGroup(CommandGroup):
    """The commands of `COMMANDS`: the help lists them by their purpose, without an import of any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        command: click.Command = resolve_name(row.place)
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for purpose in dict.fromkeys(row.purpose for row in COMMANDS.values()):
            rows = [(f"{name:<{width}}", row.summary) for name, row in COMMANDS.items() if row.purpose == purpose]
            with formatter.section(purpose):
                formatter.write_dl(rows)


#: The commands that most people type first: an example of each, and its effect.
FIRST: Final = {
    "zb convert tokens/ train-h5": "make a store of .npy files, text, HDF5, or files of another trainer",
    "zb info train-h5": "name its shape, size and origin",
    "zb show train-h5": "look at rows as text",
    "zb verify train-h5": "compare every batch with its stored digests",
    "zb bench train-h5": "time the batches of a training from it",
}


@click.group(
    cls=ZbGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__)
@click.pass_context
def zb(ctx: click.Context) -> None:
    """Token batches in HDF5 and .batch files for language-model training.

    \b
    Example: zb convert tokens/ train-h5
    Example: zb info train-h5
    """
    if ctx.invoked_subcommand is not None:
        return
    width = max(map(len, FIRST))
    click.echo("Token batches in HDF5 and .batch files for language-model training.\n")
    for example, effect in FIRST.items():
        click.echo(f"  {example:<{width}}  {effect}")
    click.echo("\nzb --help lists all commands, and zb COMMAND --help explains one, with an example.")
