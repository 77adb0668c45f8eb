"""`python -m benchmarks NAME`: measure; print tables, or write a report: one JSON, a page and plots made from it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from benchmarks import measure as m
from benchmarks.report import markdown, write

#: The parts of the report.
PARTS = ("peers", "read", "load", "field_sets", "beyond", "train", "convert", "remote")
#: Rounds of every row by default, and with --quick.
ROUNDS = 5
QUICK_ROUNDS = 1
QUICK_MIB = 8
#: Tables that `--ours` leaves out: they take minutes.
LONG = (
    "Many shards",
    "A cold disk",
    "Larger than memory",
    "Field sets larger than memory",
    "A small model, end to end",
)


def _pythons(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return library -> interpreter."""
    found = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or not os.access(path, os.X_OK):
            raise click.BadParameter(f"expected NAME=INTERPRETER, found {value!r}")
        found[name] = path
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("name", type=click.Choice((*PARTS, "report")))
@click.option("--quick", is_flag=True, help="Little data and few rounds: shows that it runs, no more.")
@click.option("--rounds", type=click.IntRange(1), help="Interleaved rounds of every row.")
@click.option(
    "--mib",
    type=click.IntRange(1),
    help="MiB of uint32 tokens, or of values, of each source. [default: 200]",
)
@click.option("--only", default="", help="Only the tables whose title has this text.")
@click.option("--ours", "is_ours", is_flag=True, help="No other libraries, and no table that takes minutes.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write report.md and report/ here.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures here.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Put the data on this disk.")
@click.option(
    "--python",
    "pythons",
    multiple=True,
    callback=_pythons,
    envvar="ZB_BENCHMARKS_PYTHON",
    metavar="NAME=INTERPRETER",
    help="Run a library of benchmarks/peers by this interpreter; several in ZB_BENCHMARKS_PYTHON, with spaces between.",
)
@click.option(
    "--old", type=click.Path(exists=True, path_type=Path), help="Compare with this checkout of another build."
)
def benchmarks(name: str, only: str, out: Path | None, json_path: Path | None, **options: Any) -> None:
    """Measure this package against bare reads and writes and other libraries, and with --old against another build.

    report: all parts. peers: loaders of other libraries. read: every backend and access, codecs, windows. load:
    loaders, documents, fields and spans, files of other trainers, large stores, cold disks. field_sets: values that
    are computed later. beyond: data larger than memory. train: a small model. convert: every conversion. remote: a
    store behind HTTP.
    """
    start_s = time.monotonic()
    parts = PARTS if name == "report" else (name,)
    asked = {part: _titles(part, only, options) for part in parts}
    if not any(asked.values()):
        known = "; ".join(title for part in parts for title in _titles(part, "", options))
        raise click.BadParameter(f"no title has {only!r}; the titles: {known}", param_hint="--only")
    tables: list[dict[str, Any]] = []
    facts = {"benchmark": name, "machine": m.machine(), "quick": options["quick"], "tables": tables}
    try:
        for part, titles in asked.items():
            tables.extend(_measured(part, titles, options) if titles else [])
    finally:  # what an hour has measured is not lost with the row that fails
        result = {**facts, "seconds": round(time.monotonic() - start_s)}
        if json_path:
            json_path.write_text(json.dumps(result, indent=1) + "\n")
        if out:
            click.echo(f"written: {write(result, out)}")
        else:
            click.echo(markdown(result, None))


def _titles(part: str, only: str, options: dict[str, Any]) -> list[str]:
    titles = import_module(f"benchmarks.{part}").TITLES
    left_out = (*(() if options["old"] else (m.AGAINST_OLD,)), *(LONG if options["is_ours"] else ()))
    return [title for title in titles if title not in left_out and only.lower() in title.lower()]


def _measured(part: str, titles: list[str], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tables of a part; in place of one that this machine cannot measure, the reason stands."""
    module = import_module(f"benchmarks.{part}")
    quick = options["quick"]
    folder = options["folder"]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="zb-benchmarks-", dir=folder) as scratch, ExitStack() as stack:
        checkouts = dict.fromkeys((m.ROOT, (options["old"] or m.ROOT).resolve()))
        builds = [m.Build(module.__name__, path) for path in checkouts]
        for build in builds:
            stack.callback(build.close)
        run = m.Run(
            folder=Path(scratch),
            builds=builds,
            quick=quick,
            rounds=options["rounds"] or (QUICK_ROUNDS if quick else ROUNDS),
            titles=titles,
            mib=options["mib"] or (QUICK_MIB if quick else module.MIB),
            pythons=options["pythons"],
            is_ours=options["is_ours"],
        )
        missing = list(titles)
        try:
            for table in module.measure(run):
                yield {"mib": run.mib, "note": module.NOTES[table["title"]], **table}
                missing.remove(table["title"])
        except (m.UnavailableRow, m.KilledError) as error:
            reason = error.reason if isinstance(error, m.KilledError) else str(error)
            for title in missing:
                yield {
                    "title": title,
                    "note": module.NOTES[title],
                    "mib": run.mib,
                    "rounds": 0,
                    "rows": [],
                    "skipped": {title: reason},
                }


if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
