"""`convert SOURCE-to-TARGET SRC DST`: parse, one call of `pipe.convert`, print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import CommandGroup, Progress, Size, format_bytes, format_count, output_options, print_report

if TYPE_CHECKING:
    from converters.pipe import Report, Source

#: format -> (how its name reads in help, an example of a path)
SOURCES: Final = {
    "npy": (".npy files of tokens", "tokens/"),
    "hdf5": ("an HDF5 store", "train-h5"),
    "batch": ("a .batch store", "train-batch"),
}
TARGETS: Final = {
    "npy": (".npy records", "records.npy"),
    "hdf5": ("an HDF5 store", "train-h5"),
    "batch": ("a .batch store", "train-batch"),
}
_PATH: Final = click.Path(path_type=Path)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def convert() -> None:
    """Convert token data between .npy, HDF5 batch stores and native .batch stores.

    A destination that ends in .h5, .batch or .npy is one file; any other name is a folder of shards. Nothing appears
    under its final name before it is whole. Also reachable as "zb convert".
    """


def _npy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    positive, natural = click.IntRange(1), click.IntRange(0)
    dtypes, remainders = click.Choice(["auto", "uint32", "uint16"]), click.Choice(["drop", "pad", "error"])
    options = (
        _option("--batch-size", positive, 32, "Records per batch."),
        _option("--seq-len", positive, 512, "Tokens per record."),
        _option("--seed", natural, 42, "Seed of the record shuffle."),
        click.option("--no-shuffle", is_flag=True, help="Keep the records in the order of the source."),
        _option("--dtype", dtypes, "auto", "auto: uint16 if the source or --vocab-size fits (HDF5), else uint32."),
        click.option("--vocab-size", type=positive, help="Refuse ids at or above it."),
        _option("--remainder", remainders, "drop", "What to do with records that do not fill the last batch."),
        _option("--pad-id", natural, 0, "The token that --remainder pad fills up with."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _option(name: str, kind: click.ParamType[Any], default: int | str, help_text: str) -> Callable[..., Any]:
    return click.option(name, type=kind, default=default, show_default=True, help=help_text)


def _shard_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--shard-size", type=Size(), help="Size of a shard, such as 1GiB.")(command)
    return click.option("--shards", type=click.IntRange(1), help="Number of shards.")(command)


def _add_command(source: str, target: str) -> None:
    """Register `source-to-target` with the options that its two ends have."""
    many = source == "npy"

    def run(src: tuple[Path, ...] | Path, dst: Path, **options: Any) -> None:
        from converters.npy_file import NpySource
        from converters.store_file import StoreSource

        output = {name: options.pop(name) for name in ("as_json", "quiet", "force")}
        shards = {"num_shards": options.pop("shards"), "shard_bytes": options.pop("shard_size")}
        opened: Source
        if isinstance(src, tuple):
            if target == "batch" and options["dtype"] == "auto":
                options["dtype"] = "uint32"  # what every reader of the format knows; uint16 is ours
            options["vocab_size"] = options["vocab_size"] or 0
            opened = NpySource(src, shuffle=not options.pop("no_shuffle"), **options)
        else:
            opened = StoreSource(src, source, options.get("dataset"))
        _run(opened, f"{source}-to-{target}", target, dst, shards, output)

    _, example_source = SOURCES[source]
    _, example_target = TARGETS[target]
    run.__doc__ = (
        f"Convert {SOURCES[source][0]} to {TARGETS[target][0]}.\n\n\b\n"
        f"Example: convert {source}-to-{target} {example_source} {example_target}"
        + (" --batch-size 32 --seq-len 512 --shards 4" if many else "")
    )
    command: Callable[..., Any] = output_options(run)
    command = click.option("--force", is_flag=True, help="Replace what exists, at the end and whole.")(command)
    command = _shard_options(command)
    if source == "hdf5":
        command = click.option("--dataset", help="A 3-D dataset of an HDF5 file that is no store of ours.")(command)
    command = _npy_options(command) if many else command
    command = click.argument("dst", type=_PATH)(command)
    command = click.argument("src", type=_PATH, nargs=-1 if many else 1, required=True)(command)
    convert.command(f"{source}-to-{target}")(command)


def _run(
    source: Source, name: str, target: str, dst: Path, shards: dict[str, int | None], output: dict[str, bool]
) -> None:
    from converters import pipe

    total = source.num_batches * source.meta.batch_tokens
    with Progress(name, total, enabled=not output["quiet"]) as progress:
        report = pipe.convert(source, target, dst, overwrite=output["force"], progress=progress.advance, **shards)
    print_report(_as_json(report), _as_lines(report), as_json=output["as_json"], quiet=output["quiet"])


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "path": str(report.destination),
        "batch_size": report.meta.batch_size,
        "seq_len": report.meta.seq_len,
        "dtype": report.meta.dtype.name,
        "num_batches": report.num_batches,
        "num_shards": len(report.shards),
        "tokens_in": report.accounts.tokens_in,
        "tokens_stored": report.tokens_stored,
        "tokens_padded": report.accounts.padded,
        "tokens_dropped": report.accounts.dropped,
        "max_token": max(shard.max_token for shard in report.shards),
        "sha256": report.sha256,
        "seconds": round(report.seconds, 3),
    }


def _as_lines(report: Report) -> list[tuple[str, str]]:
    accounts, meta = report.accounts, report.meta
    dropped = " + ".join(f"{tokens:,} {reason}" for reason, tokens in accounts.dropped.items()) or "0"
    padded = f" + {accounts.padded:,} padded" if accounts.padded else ""
    shards = "1 file" if report.destination.is_file() else f"{len(report.shards)} shards"
    rate = report.tokens_stored / report.seconds
    return [
        ("wrote", f"{report.destination} ({shards})"),
        ("batches", f"{report.num_batches:,} of {meta.batch_size} x {meta.seq_len} {meta.dtype.name}"),
        ("tokens", f"{accounts.tokens_in:,} in{padded} = {report.tokens_stored:,} stored + {dropped} dropped"),
        ("sha256", report.sha256),
        (
            "speed",
            f"{report.seconds:.2f} s, {format_count(rate)}tok/s, {format_bytes(rate * meta.dtype.itemsize)}/s",
        ),
    ]


for _source in SOURCES:
    for _target in TARGETS:
        if _source != _target:
            _add_command(_source, _target)
