"""`zb fetch`: downloads numbered files from a web server or a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zb_hdf5.console import FROM_0, FROM_1, LOCAL, NEW, Output, Progress, counted, format_bytes, output_options
from zb_hdf5.option_groups import GroupedCommand, option_group

_files_option = option_group("Files to fetch")
_work_option = option_group("Work")


@click.command("fetch", cls=GroupedCommand)
@click.argument("template", metavar="URL_TEMPLATE")
@_files_option("-n", "--count", required=True, type=FROM_1, help="Number of files.")
@_files_option("--first", type=FROM_0, default=0, help="Number of the first file.")
@_work_option("-w", "--workers", type=FROM_1, default=4, help="Files at the same time.")
@_files_option("-o", "--output", "folder", type=NEW, default=".", help="Folder for the files.")
@_files_option("--sha256-file", type=LOCAL, help="Expected digests, as sha256sum writes them.")
@output_options
def zb_fetch(count: int, sha256_file: Path | None, **how: Any) -> Output:
    """Download the numbered files of URL_TEMPLATE, whose number is a format field; continue an earlier run.

    \b
    Example: zb fetch "https://example.org/shard_{:05d}.parquet" -n 10 -o text/
    """
    from zb_hdf5.commands.downloads import fetch_shards, read_digests

    digests = None if sha256_file is None else read_digests(sha256_file)
    with Progress("fetch", 0, unit="B") as progress:
        reports = fetch_shards(count=count, sha256=digests, progress=progress.advance, **how)
    bad = [(report.path, report.problem) for report in reports if report.problem is not None]
    new = [report for report in reports if report.fetched]
    size = format_bytes(sum(report.byte_count for report in new))
    present = count - len(new) - len(bad)
    fetched = f"{len(new):,} of {counted(count, 'file')}, {size}; {present:,} were there already"
    files = [{**vars(report), "problem": report.problem and str(report.problem)} for report in reports]
    return Output(
        {"ok": not bad, "files": files},
        [*((path, f"FAILED: {problem}") for path, problem in bad), ("fetched", fetched)],
        exit_code=max((problem.exit_code for _, problem in bad), default=0),
    )
