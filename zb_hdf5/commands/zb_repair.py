"""`zb repair`: saves the good batches or documents of a damaged or unfinished file or store."""

from __future__ import annotations

from pathlib import Path

import click

from zb_hdf5.console import LOCAL, NEW, Output, Progress, output_options
from zb_hdf5.option_groups import GroupedCommand, option_group

_new_option = option_group("New file")


@click.command("repair", cls=GroupedCommand)
@click.argument("path", type=LOCAL)
@_new_option("--output", type=NEW, help="New file; by default in the folder of PATH.")
@_new_option("--force", is_flag=True, help="Replace an existing output.")
@_new_option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@output_options
def zb_repair(path: Path, output: Path | None, force: bool, dry_run: bool) -> Output:
    """Save the good batches of PATH in a new file, or the good documents of a token stream.

    PATH itself is never changed.

    \b
    Example: zb repair data/train.h5.partial
    """
    from zb_hdf5.store.repair import repair
    from zb_hdf5.store.set_place import set_names

    with Progress("repair", 0, unit="B") as progress:
        reports = repair(
            path,
            output=output,
            overwrite=force,
            dry_run=dry_run,
            progress=progress.advance,
            announce=lambda total: progress.advance(0, total),
        )
    lines = [(report.path, report.line()) for report in reports]
    if sets := set_names(path):
        lines.append(("field sets", f"{', '.join(sets)}: stay with {path}, and are of its records alone"))
    return Output({"files": [vars(report) for report in reports]}, lines)
