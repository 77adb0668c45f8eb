"""Puts the parts of a conversion together: the last step of a job array."""

from __future__ import annotations

from pathlib import Path

from converters.formats import FORMATS
from converters.journal import Record, journal_paths, meta_from_json, read_journal, require_same_plan
from converters.pipe import remove_journals
from converters.shard import FinishedShard
from zb_hdf5 import ConvertError, ShardIndex
from zb_hdf5.publish import PartialDirectory, partial_path


def merge_parts(destination: Path, *, overwrite: bool = False) -> ShardIndex:
    """Publish a folder whose shards were written by several jobs, each with its `--shard-range`.

    Raises
    ------
    ConvertError
        If there is nothing to merge, shards are missing, or the parts are not of one conversion. Nothing is changed.
    UnavailableError
        If a part is still being written.
    """
    waiting = partial_path(destination)
    if not journal_paths(waiting):
        raise ConvertError(f"{waiting}: no parts of a conversion there; run 'convert ... --shard-range I/N' first")
    with PartialDirectory(destination, overwrite=overwrite) as folder:
        folder.keep()
        record, finished = _collect(waiting)
        identity = record.identity
        index = ShardIndex(
            meta_from_json(identity["meta"]),
            tuple(done.entry for _, done in sorted(finished.items())),
            identity["shuffle"],
            identity["source"],
        )
        if FORMATS[identity["target"]].indexed:
            index.save(waiting)
        folder.on_published(remove_journals)
    return index


def _collect(folder: Path) -> tuple[Record, dict[int, FinishedShard]]:
    """Return the plan that all journals agree on, and every shard."""
    records = {path: read_journal(path) for path in journal_paths(folder).values()}
    first = next(iter(records.values()))
    finished: dict[int, FinishedShard] = {}
    for path, record in records.items():
        require_same_plan(record, first.identity, path)
        if record.files != first.files:
            raise ConvertError(f"{path}: the source changed between the jobs; run them again with --force")
        finished.update(record.finished)
    num_shards = len(first.identity["cuts"])
    missing = [k for k in range(num_shards) if k not in finished or not (folder / finished[k].entry.path).exists()]
    if missing:
        raise ConvertError(
            f"{folder}: {len(missing)} of {num_shards} shards are missing, the first is number {missing[0]}; run the "
            "jobs that write them again with --resume, then merge"
        )
    return first, finished
