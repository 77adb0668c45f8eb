"""`zb index`: merges the parts of a job array, rebuilds a lost `shards.json`, and writes digests of other files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zb_hdf5.console import (
    FROM_1,
    LOCAL,
    NEW,
    Output,
    Progress,
    counted,
    foreign_options,
    output_options,
)
from zb_hdf5.converters.command_options import option_of
from zb_hdf5.option_groups import GroupedCommand, option_group
from zb_hdf5.store.format_list import FORMATS

if TYPE_CHECKING:
    from zb_hdf5.read_as import ReadAs
    from zb_hdf5.store.index import ShardIndex

_result_option = option_group("Result")
_digests_option = option_group("File of digests")
_work_option = option_group("Work")


@click.group("index")
def zb_index() -> None:
    """Work on the `shards.json` of stores, and on the digests of other files.

    \b
    Example: zb index rebuild data/train
    """


@zb_index.command("merge", cls=GroupedCommand, short_help="Publish the store that the jobs of an array have written.")
@click.argument("path", type=NEW)
@_result_option("--force", is_flag=True, help="Replace an existing result when the new one is whole.")
@option_of("drop_field_set")
@output_options
def zb_index_merge(path: Path, force: bool, drop_field_set: tuple[str, ...] | None) -> Output:
    """Publish PATH, whose shards were written by the jobs of an array with --shard-range.

    \b
    Example: zb index merge train-h5
    """
    from zb_hdf5.converters.merge import merge_parts
    from zb_hdf5.store.set_place import set_names

    with Progress("merge", 0, unit="files") as progress:
        merged = merge_parts(path, force=force, drop_field_set=drop_field_set or (), progress=progress.advance)
    report = {"path": str(path), "num_shards": len(merged.shards), "num_batches": merged.num_batches}
    lines = [("merged", f"{path}: {_size_of(merged)}"), ("sha256", merged.sha256)]
    if sets := set_names(path):
        lines.append(("field sets", f"{', '.join(sets)}: copied with the tokens"))
    return Output({**report, "sha256": merged.sha256}, lines)


@zb_index.command("rebuild", short_help="Rebuild a lost or outdated shards.json from its shards.")
@click.argument("folder", type=LOCAL)
@click.option("--force", is_flag=True, help="Replace a valid index; accept missing shards.")
@output_options
def zb_index_rebuild(folder: Path, force: bool) -> Output:
    """Rebuild the lost, damaged or outdated shards.json of FOLDER from its shards.

    It is outdated, and needs --force, when a shard was repacked or replaced since it was written.

    \b
    Example: zb index rebuild data/train
    """
    from zb_hdf5.store.rebuild import rebuild_index
    from zb_hdf5.store.set_place import set_names

    with Progress("rebuild", 0, unit="files") as progress:
        made = rebuild_index(folder, force=force, progress=progress.advance)
    lost = _lost_facts(made)
    report = {"folder": str(folder), "shards": len(made.shards), "sha256": made.sha256, "not_recovered": lost}
    lines = [("index", _size_of(made)), ("sha256", made.sha256)]
    if lost:
        text = f"{', '.join(lost)}: only the lost index had them"
        if "splits" in lost:
            text += "; all shards are train"
        lines.append(("not recovered", text))
    if sets := set_names(folder):
        lines.append(("field sets", f"{', '.join(sets)}: as they were; compared with the tokens when they are read"))
    return Output(report, lines)


def _lost_facts(index: ShardIndex) -> list[str]:
    """Return the facts of a rebuilt index that only the lost one had; shards with pieces name their split."""
    from zb_hdf5.store.rebuild import ONLY_IN_SOME_FILES, UNKNOWN_SHUFFLE

    if index.shuffle != UNKNOWN_SHUFFLE:
        return []
    lost = ["shuffle", "source"]
    if index.shards[0].pieces is None:
        lost.append("splits")
    if FORMATS[index.shards[0].backend].has_sidecar:
        lost += ONLY_IN_SOME_FILES
    return lost


def _size_of(index: ShardIndex) -> str:
    from zb_hdf5.spec import STREAM_LAYOUT  # numpy, which help does not need

    files = counted(len(index.shards), "shard")
    if index.meta.layout == STREAM_LAYOUT:
        return f"{files}, {index.token_count:,} tokens"
    return f"{files}, {counted(index.num_batches, 'batch')}"


@zb_index.command("crc32", short_help="Write the .crc32 file that verifies a lone .batch.")
@click.argument("files", type=LOCAL, nargs=-1, required=True)
@output_options
def zb_index_crc32(files: tuple[Path, ...]) -> Output:
    """Write FILE.batch.crc32 for each .batch file that has none.

    The new file holds the crc32 of each batch as it is now. From then on, 'zb verify' compares the .batch with it.

    \b
    Example: zb index crc32 data/train.batch
    """
    from zb_hdf5.store.rebuild import add_crc32_file

    written = [(path, add_crc32_file(path)) for path in files]
    return Output(
        {"written": [str(made) for _, made in written if made]},
        [(str(path), f"wrote {made.name}" if made else "has its .crc32 already") for path, made in written],
    )


@zb_index.command(
    "digests", cls=GroupedCommand, short_help="Write digests of files that hold none, to verify them with."
)
@click.argument("path", type=LOCAL)
@_digests_option("-o", "--output", type=NEW, required=True, help="The file to write, a JSON.")
@_digests_option("--force", is_flag=True, help="Replace an existing file of digests when the new one is whole.")
@_work_option("--workers", type=FROM_1, help="Files read at the same time. [default: the cores]")
@foreign_options(without=["digests"])
@output_options
def zb_index_digests(path: Path, output: Path, force: bool, workers: int | None, read_as: ReadAs) -> Output:
    """Write the digests of PATH: a sha256 of each file and a crc32 of each chunk, as they are now.

    PATH is a file of another trainer, or a folder of such files, which is read in place: .npy, Megatron, datatrove,
    OLMo, llm.c, nanoGPT, and HDF5 of other programs. From then on 'zb verify PATH --digests FILE' and the loaders
    (ReadAs(digests=FILE)) compare the files with it.

    \b
    Example: zb index digests corpus.idx -o corpus.digests.json
    """
    from zb_hdf5.store.digests import write_digests

    with Progress("digests", 0) as progress:
        made = write_digests(
            path,
            output,
            overwrite=force,
            workers=workers,
            read_as=read_as,
            progress=progress.advance,
            announce=lambda total: progress.advance(0, total),
        )
    size = f"{counted(len(made.files), 'file')}, {made.num_tokens:,} tokens"
    return Output(
        {
            "path": str(path),
            "digests": str(output),
            "backend": made.backend,
            "num_files": len(made.files),
            "tokens": made.num_tokens,
            "sha256": made.sha256,
        },
        [("digests", f"{output}: {size}"), ("sha256", made.sha256)],
    )
