"""The merge of a job array: one store of the shards that several jobs have written, each with its share of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zb_hdf5 import ConvertError, FormatError, ShardIndex
from zb_hdf5.converters.conversion import STREAM, ShardRange
from zb_hdf5.converters.document_target import names_of_files, written_files
from zb_hdf5.converters.journal import (
    Finished,
    journal_paths,
    meta_from_json,
    read_journal,
    read_journals,
    require_same,
)
from zb_hdf5.converters.shard_plan import PLAN_VERSION, SHARDS, files_of_shard
from zb_hdf5.converters.stream_target import FACTS_KEPT, TOKEN_FILES, WRITTEN_META, index_of_streams
from zb_hdf5.documents.document_table import DocumentPart, check_documents
from zb_hdf5.errors import Remedy
from zb_hdf5.files.publishing import PartialDirectory, partial_path, remove
from zb_hdf5.files.replaced_files import owner_of
from zb_hdf5.formats.registry import FORMATS, open_chunks
from zb_hdf5.spec import DOCUMENTS_PREFIX, INDEX_NAME, JOURNAL_PREFIX, SHARD_PREFIX
from zb_hdf5.store.agreement import require_agreement
from zb_hdf5.trainers.trainer_formats import document_writer


def merge_parts(
    destination: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda checked, total: None,
) -> ShardIndex:
    """Publish a folder whose shards were written by several jobs, each with its `shard_range`.

    Parameters
    ----------
    destination
        The folder that the jobs were given.
    force
        Replace an existing result when the new one is whole.
    progress
        Called with the files that were checked since the last call, and the number of all of them.

    Returns
    -------
    ShardIndex
        The index of the merged store; of files of another trainer, one that is not written.
    """
    destination = Path(destination)
    waiting = partial_path(destination)
    if not journal_paths(waiting) and (destination / INDEX_NAME).exists():
        return ShardIndex.load(destination)  # it was merged before
    if not journal_paths(waiting):
        raise ConvertError(f"{waiting}: no parts of a conversion there", remedy=Remedy.PARTS_FIRST)
    begun = read_journal(next(iter(journal_paths(waiting).values())))
    if begun.unit == TOKEN_FILES:
        if FACTS_KEPT not in begun.plan:
            raise ConvertError(f"{waiting}: expected parts, found a conversion without any", remedy=Remedy.RESUME_WHOLE)
        if begun.plan["target"] == STREAM:
            return _merge_streams(destination, force, progress)
        return _merge_files(destination, begun.plan, force=force)
    with PartialDirectory(destination, overwrite=force) as folder:
        folder.keep()
        plan, finished = _collect(waiting, SHARDS)
        indexed = FORMATS[plan["target"]].holds_batches
        index = ShardIndex(
            meta_from_json(plan[WRITTEN_META]),
            tuple(done.entry for _, done in sorted(finished.items())),
            plan["shuffle"],
            plan["source"],
            documents=tuple(DocumentPart(*part) for part in plan["documents"]) if indexed else (),
        ).with_max_token(done.max_token for done in finished.values())
        if indexed:
            _require_agreement(waiting, index, progress)
        _remove_earlier(waiting, index)
        if indexed:
            index.save(waiting)
    return index


def _merge_streams(destination: Path, force: bool, progress: Callable[[int, int], None]) -> ShardIndex:
    """Publish a store of streams, whose documents have different ids in all parts together."""
    waiting = partial_path(destination)
    with PartialDirectory(destination, overwrite=force) as folder:
        folder.keep()
        plan, found = _collect(waiting, TOKEN_FILES)
        finished = [done for _, done in sorted(found.items())]
        _require_documents(waiting, finished, [])
        index = index_of_streams(waiting, plan, finished)
        _require_agreement(waiting, index, progress)
        _remove_earlier(waiting, index)
        index.save(waiting)
    return index


def _merge_files(destination: Path, begun: dict[str, Any], *, force: bool) -> ShardIndex:
    """Publish a folder of files of another trainer. Their sizes are compared, and no byte of them is read."""
    waiting = partial_path(destination)
    writer = document_writer(begun["target"])
    written = meta_from_json(begun[WRITTEN_META])
    with PartialDirectory(destination, overwrite=force, names=names_of_files(writer, written)) as folder:
        folder.keep()
        plan, found = _collect(waiting, TOKEN_FILES)
        if plan != begun:
            raise ConvertError(f"{waiting}: another conversion has begun there meanwhile: merge again")
        finished = [done for _, done in sorted(found.items())]
        files = written_files(waiting, finished)
        named = [path for file in files for path in writer.files(file.path, written)]
        for file in files:
            if file.path.stat().st_size != file.num_bytes:
                raise FormatError(
                    f"{file.path}: expected {file.num_bytes:,} bytes, as it was written, found "
                    f"{file.path.stat().st_size:,}; write its part again"
                )
        _require_documents(waiting, finished, named)
        _remove_others(waiting, {path.name for path in named})
        writer.complete_folder(waiting, files, written, plan[FACTS_KEPT])
    return ShardIndex(written, tuple(done.entry for done in finished)).with_max_token(
        done.max_token for done in finished
    )


def _require_documents(folder: Path, finished: list[Finished], named: list[Path]) -> None:
    """Raise `ConvertError` if there are no documents in all files together, or a file of them is missing."""
    if not any(done.counts.documents for done in finished):
        raise ConvertError(f"{folder}: no documents in the files of all parts")
    for path in named:
        if not path.exists():
            raise ConvertError(f"{path}: is missing; write its part again", remedy=Remedy.RESUME_WHOLE)


def _remove_others(folder: Path, named: set[str]) -> None:
    """Remove files of an earlier plan."""
    for name in os.listdir(folder):
        if name not in named and not name.startswith(JOURNAL_PREFIX):
            remove(folder / name)


def _require_agreement(folder: Path, index: ShardIndex, progress: Callable[[int, int], None]) -> None:
    """Check every shard, and every table of documents, once more."""
    total = len(index.shards) + len(index.documents)
    for entry in index.shards:
        with open_chunks(folder / entry.path) as reader:
            require_agreement(index, entry, reader)
        progress(1, total)
    for part in index.documents:
        check_documents(folder / part.path, part)
        progress(1, total)


def _remove_earlier(folder: Path, index: ShardIndex) -> None:
    """Remove the shards and the tables of documents of an earlier plan."""
    named = {path.name for entry in index.shards for path in files_of_shard(Path(entry.path))}
    named |= {part.path for part in index.documents}
    for name in os.listdir(folder):
        if owner_of(name).startswith((SHARD_PREFIX, DOCUMENTS_PREFIX)) and name not in named:
            remove(folder / name)


def _collect(folder: Path, unit: str) -> tuple[dict[str, Any], dict[int, Finished]]:
    """Return the plan that all journals agree on, and every shard.

    Parameters
    ----------
    unit
        The word for the shards in the journals.
    """
    records = read_journals(folder, unit)
    first = next(iter(records.values()), None)
    if first is None:
        raise ConvertError(f"{folder}: another process has merged it")
    if unit == SHARDS and first.plan.get("version") != PLAN_VERSION:
        raise ConvertError(f"{folder}: was begun by another version", remedy=Remedy.RESTART)
    finished: dict[int, Finished] = {}
    for path, record in records.items():
        require_same(record.plan, first.plan, path)
        finished.update(record.finished)
    num_shards = first.total
    missing = [k for k in range(num_shards) if k not in finished or not (folder / finished[k].entry.path).exists()]
    if missing:
        raise _missing_shards(missing, folder, num_shards)
    return first.plan, finished


def _missing_shards(missing: list[int], folder: Path, num_shards: int) -> ConvertError:
    """Return the error for shards that no job has written; it names the parts that have them.

    Of parts of several sizes any will do, and most jobs were of the size that is most frequent.
    """
    facts = f"{folder}: {len(missing)} of {num_shards} shards are missing, of"
    [(num_jobs, _)] = Counter(part.num_jobs for part in journal_paths(folder)).most_common(1)
    if num_jobs == 1:
        return ConvertError(f"{facts} a conversion without parts", remedy=Remedy.RESUME_WHOLE)
    jobs = [job for job in range(num_jobs) if {*missing} & {*ShardRange(job, num_jobs).shards(num_shards)}]
    numbers = _ranges(jobs)
    noun = "part" if len(jobs) == 1 else "parts"
    return ConvertError(
        f"{facts} {noun} {numbers} of {num_jobs}",
        remedy=Remedy.MISSING_PARTS,
        at=numbers,
    )


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as Slurm writes them: "1,4-6"."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))
