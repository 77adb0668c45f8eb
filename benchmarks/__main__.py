"""`python -m benchmarks NAME`: run, print tables and bars, keep the figures as JSON and as a picture."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

_FILE: Any = click.Path(dir_okay=False, path_type=Path)
_FOLDER: Any = click.Path(file_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def benchmarks() -> None:
    """Measure this package on this machine, beside the limits of the machine and other ways to do the same."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option("--quick", is_flag=True, help="Little data and few repeats: shows that it runs, no more."),
        click.option("--json", "json_path", type=_FILE, help="Write all figures to this file."),
        click.option("--plot", "plot_path", type=_FILE, help="Draw the main figures into this .png."),
        click.option("--folder", type=_FOLDER, help="Put the data here: names the disk. Default: a temporary folder."),
        click.option("--repeats", type=click.IntRange(1), help="Interleaved repeats of every row."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@contextlib.contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """Yield a new folder inside `folder`, removed at the end."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="zb-benchmarks-", dir=folder) as scratch:
        yield Path(scratch)


def _run(benchmark: Any, folder: Path | None, json_path: Path | None, plot_path: Path | None, **how: Any) -> None:
    """Measure, report, and keep what was asked for."""
    with _scratch(folder) as scratch:
        result = benchmark.measure(scratch, **how)
    click.echo(benchmark.report(result))
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    if plot_path:
        benchmark.plot(plot_path, result)


@benchmarks.command()
@_options
def read(**options: Any) -> None:
    """Tokens per second, latency, time to the first batch and memory of every way to read batches."""
    from benchmarks import read as benchmark

    _run(benchmark, **options)


@benchmarks.command()
@_options
def loader(**options: Any) -> None:
    """What the loader adds to a bare read, warm and cold; large stores; memory."""
    from benchmarks import loader as benchmark

    _run(benchmark, **options)


@benchmarks.command()
@_options
def paths(**options: Any) -> None:
    """A DataLoader, shuffled records, a cold epoch in each order, a store of many shards."""
    from benchmarks import paths as benchmark

    _run(benchmark, **options)


@benchmarks.command()
@_options
@click.option("--profile", is_flag=True, help="Measure the stages of a conversion one by one instead.")
def convert(profile: bool, **options: Any) -> None:
    """Bytes per second and memory of every converter, beside cp and sha256 of the same file."""
    from benchmarks import convert as benchmark

    stages = SimpleNamespace(measure=benchmark.measure_stages, report=benchmark.report_stages, plot=benchmark.plot)
    _run(stages if profile else benchmark, **options)


@benchmarks.command()
@_options
def tokenize(**options: Any) -> None:
    """Tokens per second of both tokenizer libraries, bare and through this package, by number of threads."""
    from benchmarks import tokenize as benchmark

    _run(benchmark, **options)


@benchmarks.command()
@_options
def window(**options: Any) -> None:
    """Microseconds per random window of a token stream, by the size of its chunks, through h5py and by extents."""
    from benchmarks import window as benchmark

    _run(benchmark, **options)


@benchmarks.command()
@_options
def spans(**options: Any) -> None:
    """What documents, fields and spans add to a step, and spans to writing."""
    from benchmarks import spans as benchmark

    _run(benchmark, **options)


@benchmarks.command()
@_options
@click.option("--text", type=click.Path(exists=True, path_type=Path), multiple=True, help="Parquet files of text.")
def codecs(**options: Any) -> None:
    """Bytes per token and tokens per second of each codec, beside h5py and on slow storage."""
    from benchmarks import codecs as benchmark

    _run(benchmark, **options)


@benchmarks.command()
@_options
def remote(**options: Any) -> None:
    """A store behind HTTP, beside the cap of the line and bare ranged reads."""
    from benchmarks import remote as benchmark

    _run(benchmark, **options)


if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
