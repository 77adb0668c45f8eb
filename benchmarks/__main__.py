"""`python -m benchmarks NAME`: measure, print tables with bars, keep the figures as JSON."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import click

from benchmarks.measure import AGAINST_OLD, ROOT, Build, Run, machine, report

NAMES = ("read", "load", "convert", "remote")
#: Rounds of every row by default, and with --quick.
ROUNDS = 5
QUICK_ROUNDS = 1


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("name", type=click.Choice(NAMES))
@click.option("--quick", is_flag=True, help="Little data and few rounds: shows that it runs, no more.")
@click.option("--rounds", type=click.IntRange(1), help="Interleaved rounds of every row.")
@click.option("--only", default="", help="Only the tables whose title has this text.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures here.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Put the data on this disk.")
@click.option(
    "--old", type=click.Path(exists=True, path_type=Path), help="Compare with this checkout of another build."
)
def benchmarks(
    name: str,
    quick: bool,
    rounds: int | None,
    only: str,
    json_path: Path | None,
    folder: Path | None,
    old: Path | None,
) -> None:
    """Measure this package on this machine, against bare reads and writes, and against another build with --old.

    read: every backend and access, codecs, windows. load: loaders, data sets, documents, fields and spans, large
    stores, cold disks. convert: every conversion. remote: a store behind HTTP.
    """
    module = import_module(f"benchmarks.{name}")
    known = [title for title in module.TITLES if old or title != AGAINST_OLD]
    titles = [title for title in known if only.lower() in title.lower()]
    if not titles:
        raise click.BadParameter(f"no title has {only!r}; the titles: {'; '.join(known)}", param_hint="--only")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="zb-benchmarks-", dir=folder) as scratch, ExitStack() as stack:
        builds = [Build(module.__name__, path) for path in dict.fromkeys((ROOT, (old or ROOT).resolve()))]
        for build in builds:
            stack.callback(build.close)
        run = Run(
            folder=Path(scratch),
            builds=builds,
            quick=quick,
            rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
            titles=titles,
        )
        tables = list(module.measure(run))
    result = {"benchmark": name, "machine": machine(), "quick": quick, "tables": tables}
    click.echo(report(result))
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
