"""`zb doctor`: finds problems that would stop or slow down training on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zb_hdf5.console import STORE, Output, dataset_options, output_options
from zb_hdf5.errors import UnavailableError
from zb_hdf5.option_groups import GroupedCommand

if TYPE_CHECKING:
    from zb_hdf5.read_as import ReadAs


@click.command("doctor", cls=GroupedCommand)
@click.argument("path", type=STORE)
@dataset_options
@output_options
def zb_doctor(path: Path, read_as: ReadAs, split: str | None) -> Output:
    """Check this machine for problems that stop or slow down training from PATH. Exit code 5: one stops it.

    \b
    Example: zb doctor data/train
    """
    from zb_hdf5.commands.findings import diagnose

    findings = diagnose(path, read_as, split)
    is_bad = any(finding.state == "problem" for finding in findings)
    return Output(
        {"ok": not is_bad, "findings": [vars(finding) for finding in findings]},
        [(finding.name, finding.line()) for finding in findings],
        exit_code=UnavailableError.exit_code if is_bad else 0,
    )
