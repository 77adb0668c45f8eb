"""The merge of a job array: one store of the shards that several jobs have written, each with its share of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zb_hdf5 import ConvertError, FormatError, ShardIndex
from zb_hdf5.converters.batch_plan import PLAN_VERSION
from zb_hdf5.converters.batch_target import BatchFiles
from zb_hdf5.converters.carried_sets import bind_sets
from zb_hdf5.converters.conversion import STREAM, ShardRange
from zb_hdf5.converters.journal import Finished, Record, difference_of_plans, journal_paths, read_journal
from zb_hdf5.converters.plan import TargetFiles
from zb_hdf5.converters.stream_target import FACTS_KEPT, TOKEN_FILES, StreamFiles
from zb_hdf5.converters.trainer_target import TrainerFiles
from zb_hdf5.documents.document_table import check_documents
from zb_hdf5.errors import Remedy
from zb_hdf5.files.publishing import PartialDirectory, partial_path, remove, require_name
from zb_hdf5.spec import INDEX_NAME, JOURNAL_PREFIX, SETS_FOLDER
from zb_hdf5.store.agreement import require_agreement
from zb_hdf5.store.set_place import replaceable_names
from zb_hdf5.store.unchecked_file import open_chunks


def merge_parts(
    destination: str | os.PathLike[str],
    *,
    force: bool = False,
    drop_field_set: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda checked, total: None,
) -> ShardIndex:
    """Publish a folder whose shards were written by several jobs, each with its `shard_range`.

    Parameters
    ----------
    destination
        The folder that the jobs were given.
    force
        Replace an existing result when the new one is whole.
    drop_field_set
        The names of field sets of a replaced store, which are removed with it.
    progress
        Called with the files that were checked since the last call, and the number of all of them.

    Returns
    -------
    ShardIndex
        The index of the merged store; of files of another trainer, one that is not written.
    """
    destination = Path(destination)
    require_name(destination)
    waiting = partial_path(destination)
    if not journal_paths(waiting) and (destination / INDEX_NAME).exists():
        return ShardIndex.load(destination)  # it was merged before
    if not journal_paths(waiting):
        raise ConvertError(f"{waiting}: no parts of a conversion there", remedy=Remedy.PARTS_FIRST)
    begun = read_journal(next(iter(journal_paths(waiting).values())))
    target = _target_of(waiting, begun)
    names = replaceable_names(destination, target.names, drop_field_set)
    with PartialDirectory(destination, overwrite=force, names=names) as folder:
        folder.keep()
        plan, finished = _collect(waiting, target.unit)
        if plan != begun.plan:
            raise ConvertError(f"{waiting}: another conversion has begun there meanwhile: merge again")
        if target.unit == TOKEN_FILES and not any(done.counts.documents for done in finished):
            raise ConvertError(f"{waiting}: no documents in the files of all parts")
        index = target.index(waiting, plan, finished)
        if target.is_store:
            _require_agreement(waiting, index, progress)
        elif isinstance(target, TrainerFiles):
            _require_sizes(waiting, target, finished)
        _remove_others(waiting, target, index)
        target.complete(waiting, index)
        bind_sets(waiting / SETS_FOLDER, waiting)
    return index


def _target_of(folder: Path, begun: Record) -> TargetFiles:
    """Return how the files of a journal are written."""
    plan = begun.plan
    if begun.unit != TOKEN_FILES:
        if plan.get("version") != PLAN_VERSION:
            raise ConvertError(f"{folder}: was begun by another version", remedy=Remedy.RESTART)
        return BatchFiles(plan["target"])
    if FACTS_KEPT not in plan:
        raise ConvertError(f"{folder}: expected parts, found a conversion without any", remedy=Remedy.RESUME_WHOLE)
    return StreamFiles() if plan["target"] == STREAM else TrainerFiles.of_journal(plan)


def _require_sizes(folder: Path, target: TrainerFiles, finished: list[Finished]) -> None:
    """Raise an error if a file has another size than was written, or one of those that belong to it is missing."""
    for entry in (done.entry for done in finished):
        path = folder / entry.path
        size = path.stat().st_size
        if size != entry.num_bytes:
            raise FormatError(
                f"{path}: expected {entry.num_bytes:,} bytes, as it was written, found {size:,}; write its part again"
            )
        for each in target.files(path):
            if not each.exists():
                raise ConvertError(f"{each}: is missing; write its part again", remedy=Remedy.RESUME_WHOLE)


def _remove_others(folder: Path, target: TargetFiles, index: ShardIndex) -> None:
    """Remove files of an earlier plan."""
    named = {path.name for entry in index.shards for path in target.files(folder / entry.path)}
    named |= {part.path for part in index.documents} | {SETS_FOLDER}
    for name in os.listdir(folder):
        if name not in named and not name.startswith(JOURNAL_PREFIX):
            remove(folder / name)


def _require_agreement(folder: Path, index: ShardIndex, progress: Callable[[int, int], None]) -> None:
    """Check every shard, and every table of documents, once more."""
    total = len(index.shards) + len(index.documents)
    for entry in index.shards:
        with open_chunks(folder / entry.path) as corpus:
            require_agreement(index, entry, corpus)
        progress(1, total)
    for part in index.documents:
        check_documents(folder / part.path, part)
        progress(1, total)


def _collect(folder: Path, unit: str) -> tuple[dict[str, Any], list[Finished]]:
    """Return the plan that all journals agree on, and every shard, in order.

    Parameters
    ----------
    unit
        The word for the shards in the journals.
    """
    records = {part: read_journal(path, unit) for part, path in journal_paths(folder).items()}
    if not records:
        raise ConvertError(f"{folder}: another process has merged it")
    of_first, first = next(iter(records.items()))
    finished: dict[int, Finished] = {}
    for part, record in records.items():
        if record.plan != first.plan:
            raise ConvertError(
                f"{folder}: part {part.in_text} holds another conversion than part {of_first.in_text}: "
                f"{difference_of_plans(record.plan, first.plan, 'there')}",
                remedy=Remedy.OTHER_PART,
                at=part.in_text,
            )
        finished.update(record.finished)
    num_shards = first.total
    missing = [k for k in range(num_shards) if k not in finished or not (folder / finished[k].entry.path).exists()]
    if missing:
        raise _missing_shards(missing, folder, num_shards)
    return first.plan, [done for _, done in sorted(finished.items())]


def _missing_shards(missing: list[int], folder: Path, num_shards: int) -> ConvertError:
    """Return the error for shards that no job has written; it names the parts that have them.

    Among parts of several sizes any will do, and most jobs were of the size that is most frequent.
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
