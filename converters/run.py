"""A conversion: a source of batches, a plan of shards, an engine that writes them, a report that adds up.

There is no code per pair of formats. Shards are written in `<dst>.partial/`, each is recorded in a journal when it is
whole, and the folder gets its name when all of them are: a kill costs one shard per worker.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, cast

from zb_hdf5 import ArgumentError, ConvertError, ShardEntry, ShardIndex, StoreMeta
from zb_hdf5.converters.document_parts import copy_documents, fitted, left_behind
from zb_hdf5.converters.engines import Inline
from zb_hdf5.converters.journal import WHOLE, Journal, Part, is_result, remove_journals
from zb_hdf5.converters.plan import Plan, require_one_split, require_room
from zb_hdf5.converters.shard import (
    FinishedShard,
    ShardTask,
    file_states,
    is_intact,
    require_unchanged,
    write_shard,
)
from zb_hdf5.converters.shuffle import (
    DEFAULT_MEMORY_BYTES,
    Shuffle,
    choose_shuffle,
    halved,
    scatter_path,
    scattered,
)
from zb_hdf5.converters.source import Source, TokenCounts
from zb_hdf5.converters.task import Engine, Progress, no_phases, no_progress
from zb_hdf5.files.paths import RemotePath, any_path, is_url
from zb_hdf5.files.publishing import PartialDirectory, partial_path, refuse_existing
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import DEFAULT_SPLIT, INDEX_NAME, NO_CODEC, combine_sha256
from zb_hdf5.store.upload import require_new, upload_store

NOTHING_LEFT: Final = Shuffle("none", "nothing was left to do")


class Kept(NamedTuple):
    """The part that a resumed conversion did not write again: shards, their tokens, and the time to check them."""

    shards: int
    tokens: int
    seconds: float

    @classmethod
    def of(cls, finished: Iterable[FinishedShard], seconds: float) -> Self:
        """Count shards that were found finished."""
        tokens = [done.token_count for done in finished]
        return cls(len(tokens), sum(tokens), seconds if tokens else 0.0)


NOTHING_KEPT: Final = Kept(0, 0, 0.0)


@dataclass(frozen=True)
class WorkOptions:
    """How the work is done: none of it shows in the result. See `convert`.

    Attributes
    ----------
    num_threads
        Threads that tokenize, in each process.
    begin
        `(label, total tokens) -> progress` of a later phase.
    """

    engine: Engine = field(default_factory=Inline)
    overwrite: bool = False
    resume: bool = False
    part: Part = WHOLE
    shuffle_method: str = "auto"
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    num_threads: int = 1
    progress: Progress = no_progress
    kept: Progress = no_progress
    begin: Callable[[str, int], Progress] = no_phases

    def choose_shuffle(self, source: Source, cuts: list[tuple[int, int]]) -> Shuffle:
        """Decide how to get at the records of some shards."""
        return choose_shuffle(source, self.shuffle_method, cuts, self.memory_bytes, self.engine.workers_per_node)


@dataclass(frozen=True)
class Report:
    """The report of a conversion.

    Attributes
    ----------
    destination
        What was written; for a part of a conversion the `.partial` folder that it belongs to.
    shards
        Those of this conversion, or of this part.
    max_token
        None: not known, of a result that was there already.
    token_counts
        Of the whole conversion, also in the report of a part.
    shuffle
        How the records were read, and why that way.
    kept
        The part that an earlier run had written.
    left_behind
        What the source has and the target has no place for; "": nothing.
    """

    destination: Path
    meta: StoreMeta
    shards: list[ShardEntry]
    max_token: int | None
    token_counts: TokenCounts
    shuffle: str
    seconds: float
    part: Part = WHOLE
    kept: Kept = NOTHING_KEPT
    left_behind: str = ""

    @property
    def num_batches(self) -> int:
        return sum(shard.num_batches for shard in self.shards)

    @property
    def tokens_stored(self) -> int:
        return self.num_batches * self.meta.batch_tokens

    @property
    def tokens_written(self) -> int:
        """Those that this run has written."""
        return self.tokens_stored - self.kept.tokens

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of this run, without the time for checking kept shards; None if it wrote nothing."""
        return self.tokens_written / (self.seconds - self.kept.seconds) if self.tokens_written else None

    @property
    def sha256(self) -> str:
        """Digest of the one file, or over the digests of the shards."""
        one_file = self.destination.is_file()
        return self.shards[0].sha256 if one_file else combine_sha256(shard.sha256 for shard in self.shards)


def convert(
    source: Source,
    target: str,
    destination: str | os.PathLike[str],
    *,
    num_shards: int | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    part: Part = WHOLE,
    engine: Engine | None = None,
    shuffle_method: str = "auto",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    codec: str = NO_CODEC,
    tokens_only: bool = False,
    progress: Progress = no_progress,
    kept: Progress = no_progress,
) -> Report:
    """Write all batches of `source` to one file, or to a folder of shards.

    Parameters
    ----------
    target
        A name in `FORMATS`.
    destination
        One file if it ends in the format's suffix, else a folder; or the URL of a folder in a bucket: the store is
        written to `<its name>.upload` in the current folder, uploaded with its index last, and removed there.
    num_shards, shard_bytes
        How to cut a folder into shards; by default as the source is cut, or into shards of 1 GiB.
    overwrite
        Replace what exists, at the end and whole.
    resume
        Go on with an interrupted conversion of the same arguments, `overwrite` included: its finished shards are kept
        if their digests still hold. The result is that of an undisturbed run.
    part
        Which share of the shards to write; `merge.merge_parts` publishes when all parts are there.
    engine
        Who writes the shards; by default this process.
    shuffle_method
        How shuffled records are read; a name in `shuffle.SHUFFLE_METHODS`. The result is the same.
    memory_bytes
        What all processes of this node may take together, where records are shuffled.
    codec
        With its level, of what is written.
    tokens_only
        Leave fields and documents behind where the target holds tokens only; else that is an error.
    progress
        Called with the number of tokens written since the last call.
    kept
        Called with the number of tokens that need not be written, before the first is written.

    Raises
    ------
    ConvertError
        If the destination exists, there is no room for it, or the source cannot be converted as asked.
    """
    if is_url(destination):
        options = {
            "num_shards": num_shards, "shard_bytes": shard_bytes, "overwrite": overwrite, "resume": resume,
            "part": part, "engine": engine, "shuffle_method": shuffle_method, "memory_bytes": memory_bytes,
            "codec": codec, "tokens_only": tokens_only, "progress": progress, "kept": kept,
        }  # fmt: skip
        return _convert_and_upload(source, target, cast(RemotePath, any_path(destination)), options)
    destination = Path(destination)
    start_s = time.monotonic()
    refuse_bad_destination(source.paths, destination)
    keeps = not FORMATS[target].tokens_only
    lost = left_behind(source, keeps_fields=keeps, keeps_documents=keeps)
    source = fitted(source, target, codec, tokens_only)
    FORMATS[target].require(source.meta, destination)
    work = WorkOptions(
        engine or Inline(), overwrite, resume, part, shuffle_method, memory_bytes, progress=progress, kept=kept
    )
    if is_one_file(target, destination, several=bool(num_shards or shard_bytes) or part != WHOLE):
        finished, shuffle = _write_file(source, target, destination, replace(work, engine=Inline()))
        was_kept = NOTHING_KEPT
    else:
        plan = Plan.make(source, target, num_shards, shard_bytes)
        _prepare_checks(source, plan.cuts)
        finished, shuffle, was_kept = _write_folder(plan, destination, work)
    shards = [done.entry for done in finished]
    if part == WHOLE:
        source.token_counts.require_balance(sum(shard.token_count for shard in shards))
    place = destination if part == WHOLE else partial_path(destination)
    seconds = time.monotonic() - start_s
    max_token = max((done.max_token for done in finished if done.max_token is not None), default=None)
    return Report(
        place, source.meta, shards, max_token, source.token_counts, str(shuffle), seconds, part, was_kept, lost,
    )  # fmt: skip


def place_of(destination: str | os.PathLike[str], target: str, *, part: Part, overwrite: bool) -> Path:
    """Return where on this machine a store is written: of a URL the folder from which it is uploaded.

    Raises
    ------
    ArgumentError, ConvertError
        If no such store can be uploaded there.
    ExistsError
        If there is one behind the URL, and `overwrite` is False.
    """
    if not is_url(destination):
        return Path(destination)
    place = cast(RemotePath, any_path(destination))
    if part != WHOLE:
        raise ConvertError(f"{place}: parts are merged on one machine: write a folder, and upload what is merged")
    if not FORMATS[target].indexed:
        raise ConvertError(f"{place}: expected a format that has stores, found {target}")
    require_new(place, overwrite=overwrite)
    return Path(f"{place.name}.upload")


def _convert_and_upload(source: Source, target: str, destination: RemotePath, options: dict[str, Any]) -> Report:
    """Write a store on this machine, upload it, and remove it here. With `resume` both go on where they were."""
    overwrite, start_s = options["overwrite"], time.monotonic()
    staging = place_of(destination, target, part=options["part"], overwrite=overwrite)
    report = convert(source, target, staging, **options | {"overwrite": overwrite and not options["resume"]})
    upload_store(staging, destination, overwrite=overwrite)
    shutil.rmtree(staging)
    return replace(report, destination=destination, seconds=time.monotonic() - start_s)


def is_one_file(target: str, destination: Path, *, several: bool) -> bool:
    """Return whether a destination is one file, and not a folder of shards.

    Parameters
    ----------
    several
        Whether shards were asked for.

    Raises
    ------
    ConvertError
        If its name contradicts the arguments.
    """
    suffix = FORMATS[target].suffix
    if destination.suffix == suffix and several:
        raise ConvertError(f"{destination}: is one file; name a folder (no {suffix}) to write shards")
    taken = {other for row in FORMATS.values() for other in (row.suffix, *row.other_suffixes)}
    if destination.suffix in taken - {suffix}:
        raise ConvertError(f"{destination}: expected a folder or a name that ends in {suffix}")
    return destination.suffix == suffix


def refuse_bad_destination(sources: Iterable[Path], destination: Path) -> None:
    """Raise `ConvertError` if the destination has no folder to be in, or is or holds a source."""
    if not destination.absolute().parent.is_dir():
        raise ConvertError(f"{destination.absolute().parent}: no such folder; make it first, or choose another output")
    if not destination.name:
        raise ArgumentError(f"{destination}: has no name of its own; give the folder or file to write")
    places = {
        path.resolve() for path in (destination, partial_path(destination), partial_path(scatter_path(destination)))
    }
    for path in sources:
        if places & {path.resolve(), *path.resolve().parents}:
            raise ConvertError(f"{destination}: is or holds the source {path}; choose another output")


def _prepare_checks(source: Source, cuts: list[tuple[int, int]]) -> None:
    """Make sure that damage in the source is found: by whole shards where they stay whole, else batch by batch."""
    if any(source.sha256_of(*cut) is None for cut in cuts):
        source.check_reads()


def _write_file(source: Source, target: str, path: Path, work: WorkOptions) -> tuple[list[FinishedShard], Shuffle]:
    require_one_split(source, "name a folder of shards")
    cut = (0, source.num_batches)
    files = file_states(source.paths)
    _prepare_checks(source, [cut])
    if not work.overwrite:
        refuse_existing(path)
    shuffle = work.choose_shuffle(source, [cut])
    progress = halved(work.progress, shuffle)
    needed_bytes = FORMATS[target].total_bytes(source.meta, source.num_batches) + shuffle.temp_bytes
    require_room(path.parent, needed_bytes, 1)
    with scattered(source, shuffle, path, work.engine, progress) as readable:
        task = ShardTask(
            readable, target, path, *cut, source.meta, in_store=False, overwrite=work.overwrite, files=files,
            split=(source.shard_splits or [DEFAULT_SPLIT])[0],
        )  # fmt: skip
        return [write_shard(task, progress)], shuffle


def _write_folder(plan: Plan, destination: Path, work: WorkOptions) -> tuple[list[FinishedShard], Shuffle, Kept]:
    """Fill the `.partial/` of a destination, and publish it if it is the whole."""
    shards = work.part.shards(len(plan.cuts))
    if not shards:  # more jobs than shards
        return [], NOTHING_LEFT, NOTHING_KEPT
    if work.resume and not work.overwrite and destination.exists():
        finished = _require_result(plan, destination)
        return finished, NOTHING_LEFT, Kept.of(finished, 0.0)
    with PartialDirectory(destination, overwrite=work.overwrite, shared=work.part != WHOLE) as folder:
        start_s = time.monotonic()
        journal = Journal(
            folder, plan.head(), {shard: plan.task(shard, folder.partial_path) for shard in shards}, FinishedShard,
            part=work.part, overwrite=work.overwrite, resume=work.resume,
        )  # fmt: skip
        journal.take_up(work.engine, is_intact)
        kept = Kept.of(journal.finished.values(), time.monotonic() - start_s)
        work.kept(kept.tokens)
        with journal.kept_for_resume():
            finished, shuffle = _write_missing(plan, journal, folder.partial_path, work)
            if 0 in shards:
                copy_documents(plan.source, folder.partial_path)
            if work.part == WHOLE:
                save_index(folder.partial_path, plan, finished)
                # the journal goes along and is removed under the final name: a kill just before loses no shard
                folder.on_published(remove_journals)
        return finished, shuffle, kept


def _write_missing(
    plan: Plan, journal: Journal[ShardTask, FinishedShard], folder: Path, work: WorkOptions
) -> tuple[list[FinishedShard], Shuffle]:
    missing = journal.missing
    shuffle = work.choose_shuffle(plan.source, [plan.cuts[shard] for shard in missing]) if missing else NOTHING_LEFT
    progress = halved(work.progress, shuffle)
    require_room(folder, sum(map(plan.shard_bytes, missing)) + shuffle.temp_bytes, plan.num_inodes())
    first = work.part.shards(len(plan.cuts))[0]
    with scattered(plan.source, shuffle, folder / plan.name(first), work.engine, progress) as source:
        tasks = {shard: replace(task, source=source) for shard, task in missing.items()}
        finished = journal.run(work.engine, write_shard, tasks, progress)
    require_unchanged(plan.source.paths, plan.files)
    return finished, shuffle


def _require_result(plan: Plan, destination: Path) -> list[FinishedShard]:
    """Accept an existing destination as the result of the same conversion, or refuse it."""
    source = plan.source
    if (destination / INDEX_NAME).exists():
        index = ShardIndex.load(destination)
        same = (index.meta, index.shuffle, index.source) == (source.meta, source.shuffle, source.description)
        shards = [(plan.name(shard), stop - start) for shard, (start, stop) in enumerate(plan.cuts)]
        same = same and [(entry.path, entry.num_batches) for entry in index.shards] == shards
        digests = [source.sha256_of(*cut) for cut in plan.cuts]
        found = [known and entry.sha256 for known, entry in zip(digests, index.shards, strict=False)]
        same = same and found == digests
        if is_result(destination, same, map(Path, plan.files)):
            return [FinishedShard(entry, None) for entry in index.shards]
    raise ConvertError(f"{destination}: exists already and is no result of this conversion; pass --force to replace it")


def save_index(folder: Path, plan: Plan, finished: list[FinishedShard]) -> None:
    """Write the `shards.json` of a folder, where its format has one."""
    if FORMATS[plan.target].indexed:
        source, entries = plan.source, tuple(done.entry for done in finished)
        ShardIndex(source.meta, entries, source.shuffle, source.description, documents=source.document_parts).save(
            folder
        )
