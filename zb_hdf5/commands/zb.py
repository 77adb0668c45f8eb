"""`zb`: the group of all commands. Each command is in the file that has its name."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Final, NamedTuple

import click

from zb_hdf5.console import CommandGroup
from zb_hdf5.version import __version__


class Listed(NamedTuple):
    """A command in the help of `zb`."""

    summary: str
    place: str  # module and name: it is imported only when it is called


COMMANDS: Final = {
    "bench": Listed("Time the batches of a training from your own data.", "zb_hdf5.commands.bench:zb_bench"),
    "cache": Listed("Show and free the stores in a cache folder.", "zb_hdf5.commands.cache:zb_cache"),
    "convert": Listed("Convert .npy, HDF5, .batch and text to each other.", "zb_hdf5.converters.cli:convert_commands"),
    "doctor": Listed("Check this machine for problems that would stop training.", "zb_hdf5.commands.doctor:zb_doctor"),
    "fetch": Listed("Download numbered files from a web server or a bucket.", "zb_hdf5.commands.fetch:zb_fetch"),
    "index": Listed("Work on the `shards.json` of stores.", "zb_hdf5.commands.index:zb_index"),
    "info": Listed("Describe a file, store or unfinished conversion.", "zb_hdf5.commands.info:zb_info"),
    "repair": Listed("Save the good batches or documents in a new file.", "zb_hdf5.commands.repair:zb_repair"),
    "report": Listed("Write a page with the statistics of a store.", "zb_hdf5.commands.report:zb_report"),
    "show": Listed("Show rows or documents as text.", "zb_hdf5.commands.show:zb_show"),
    "stage": Listed("Copy the batches of a node's ranks to its own disk.", "zb_hdf5.commands.stage:zb_stage"),
    "tokenizer": Listed("Make a tokenizer.", "zb_hdf5.commands.tokenizer:zb_tokenizer"),
    "verify": Listed("Compare every batch with its stored digests.", "zb_hdf5.commands.verify:zb_verify"),
    "which": Listed("Name the rows and documents of a training step or a batch.", "zb_hdf5.commands.which:zb_which"),
}


class ZbGroup(CommandGroup):
    """The commands of `COMMANDS`: the help lists them without an import of any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        command: click.Command = resolve_name(row.place)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])


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
    """Token batches in HDF5 and .batch files: look at them, check them, convert them."""
    if ctx.invoked_subcommand is not None:
        return
    width = max(map(len, FIRST))
    click.echo("Token batches in HDF5 and .batch files for language-model training.\n")
    for example, effect in FIRST.items():
        click.echo(f"  {example:<{width}}  {effect}")
    click.echo("\nzb --help lists all commands, and zb COMMAND --help explains one, with an example.")
