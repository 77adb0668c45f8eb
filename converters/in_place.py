"""`zb convert batch-to-hdf5 --in-place`: `.batch` files become HDF5 files as well, where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from zb_hdf5.console import counted, print_report

#: What may be given besides --in-place: it writes no shards, so nothing else applies.
_OWN: Final = frozenset({"src", "in_place", "unstamp", "as_json", "quiet"})


def in_place_options(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--in-place` and `--unstamp` to a command `convert(src, dst, **options)`, whose DST is then optional."""

    @click.option(
        "--in-place",
        is_flag=True,
        help="Write HDF5 metadata into the header of SRC: no token moves, no DST.",
    )
    @click.option("--unstamp", is_flag=True, help="With --in-place: remove the metadata again, to the byte.")
    @click.pass_context
    def command(
        ctx: click.Context, /, src: Path, dst: Path | None, in_place: bool, unstamp: bool, **options: Any
    ) -> None:
        if in_place:
            _refuse_other_arguments(ctx)
            report = change_in_place(src, unstamp)
            print_report(report, _lines(report), as_json=options["as_json"], quiet=options["quiet"])
        elif unstamp:
            raise click.UsageError("--unstamp needs --in-place")
        elif dst is None:
            raise click.UsageError("Missing argument 'DST' (or --in-place, to keep the file where it is)")
        else:
            convert(src, dst, **options)

    command.__doc__ = f"{convert.__doc__}\nExample: zb convert batch-to-hdf5 --in-place train-batch"
    return command


def _refuse_other_arguments(ctx: click.Context) -> None:
    for parameter in ctx.command.params:
        given = ctx.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name not in _OWN:
            name = "DST" if parameter.name == "dst" else parameter.opts[0]
            raise click.UsageError(f"--in-place changes SRC where it is and takes no {name}")


def change_in_place(path: str | os.PathLike[str], unstamp: bool) -> dict[str, Any]:
    """Stamp, or unstamp, a `.batch` file or every shard of a store.

    A run over a store that was interrupted goes on when it is started again: shards that are done are left alone.

    Raises
    ------
    ArgumentError
        If there is nothing to do, or HDF5 cannot describe the slots. Nothing is changed then.
    FormatError, IncompleteError
        If a file is no whole `.batch` file. Nothing is changed then.
    UnavailableError
        If another process holds a file's lock.
    """
    path = Path(path)
    from zb_hdf5 import ArgumentError
    from zb_hdf5.formats import dual
    from zb_hdf5.formats.native import Face, face_of, read_header

    files = _files_of(path)
    metas = {file: read_header(file)[0] for file in files}
    done = Face.NONE if unstamp else Face.HDF5
    waiting = [file for file in files if face_of(file) is not done]
    if not waiting:
        raise ArgumentError(f"{path}: is {'not stamped' if unstamp else 'stamped already'}")
    if not unstamp:
        for file in waiting:
            dual.require_whole_records(metas[file], file)
    for file in waiting:
        dual.unstamp(file) if unstamp else dual.stamp(file)
    return {"path": str(path), "face": str(done), "files": len(files), "changed": len(waiting)}


def _files_of(path: Path) -> list[Path]:
    from zb_hdf5 import ArgumentError, ShardIndex
    from zb_hdf5.files.publishing import PARTIAL_SUFFIX
    from zb_hdf5.formats.registry import FORMATS
    from zb_hdf5.spec import INDEX_NAME

    if path.suffix == PARTIAL_SUFFIX:
        raise ArgumentError(f"{path}: its writer has not finished; --in-place needs a finished file or store")
    if not (path.is_dir() or path.name == INDEX_NAME):
        return [path]
    shards = ShardIndex.load(path).shards
    for shard in shards:
        if not FORMATS[shard.backend].stamped_as:
            raise ArgumentError(f"{path}: expected a store of .batch shards, found {shard.path}, {shard.backend!r}")
    folder = path if path.is_dir() else path.parent
    return [folder / shard.path for shard in shards]


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    is_stamped = report["face"] != "none"
    verb = "stamped" if is_stamped else "unstamped"
    what = "both .batch and HDF5" if is_stamped else ".batch only, as before"
    return [(verb, f"{report['path']} ({report['changed']:,} of {counted(report['files'], 'file')})"), ("now", what)]
