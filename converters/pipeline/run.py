"""A conversion: a source of batches, a plan of shards, an engine that writes them, a report that adds up.

There is no code per pair of formats. Shards are written in `<dst>.partial/`, each is recorded in a journal when it is
whole, and the folder gets its name when all of them are: a kill costs one shard per worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from zb_hdf5 import ArgumentError, ConvertError, ShardEntry, ShardIndex, StoreMeta
from zb_hdf5.converters.pipeline.engines import Engine, Inline
from zb_hdf5.converters.pipeline.journal import (
    SHARD_JOURNALS,
    WHOLE,
    Journal,
    Part,
    how_to_go_on,
    journal_paths,
    read_journal,
    refuse_other_journals,
    remove_journals,
    require_same,
)
from zb_hdf5.converters.pipeline.plan import Plan, require_one_split, require_room, stored_bytes
from zb_hdf5.converters.pipeline.shard import (
    CheckTask,
    FinishedShard,
    ShardTask,
    file_states,
    is_intact,
    no_progress,
    write_shard,
)
from zb_hdf5.converters.pipeline.shuffle import (
    DEFAULT_MEMORY_BYTES,
    Shuffle,
    choose_shuffle,
    halved,
    scatter_path,
    scattered,
)
from zb_hdf5.converters.sources.registry import FORMATS
from zb_hdf5.converters.sources.source import Accounts, Source
from zb_hdf5.core.publishing import PartialDirectory, partial_path, refuse_existing, remove
from zb_hdf5.formats.native import Face, face_of
from zb_hdf5.spec import CRC32_SUFFIX, INDEX_NAME, combine_sha256

OTHER_SUFFIXES: Final = frozenset({".hdf5", ".hdf", ".he5", ".npz"})
Progress = Callable[[int], None]


class Kept(NamedTuple):
    """The part that a resumed conversion did not write again: shards, their tokens, and the time to check them."""

    shards: int
    tokens: int
    seconds: float


NOTHING_KEPT: Final = Kept(0, 0, 0.0)


@dataclass(frozen=True)
class Report:
    """The report of a conversion.

    Attributes
    ----------
    destination
        What was written; for a part of a conversion the `.partial` folder that it belongs to.
    shards
        Those of this conversion, or of this part.
    accounts
        Of the whole conversion, also in the report of a part.
    shuffle
        How the records were read, and why that way.
    kept
        The part that an earlier run had written.
    """

    destination: Path
    meta: StoreMeta
    shards: list[ShardEntry]
    max_token: int
    accounts: Accounts
    shuffle: str
    seconds: float
    part: Part = WHOLE
    kept: Kept = NOTHING_KEPT

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
    progress: Progress = no_progress,
    kept: Progress = no_progress,
) -> Report:
    """Write all batches of `source` to one file, or to a folder of shards.

    Parameters
    ----------
    target
        A name in `FORMATS`.
    destination
        One file if it ends in the format's suffix, else a folder.
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
    progress
        Called with the number of tokens written since the last call.
    kept
        Called with the number of tokens that need not be written, before the first is written.

    Raises
    ------
    ConvertError
        If the destination exists, there is no room for it, or the source cannot be converted as asked.
    """
    destination = Path(destination)
    start_s = time.monotonic()
    was_kept = NOTHING_KEPT
    refuse_bad_destination(source, destination)
    if is_one_file(target, destination, several=bool(num_shards or shard_bytes) or part != WHOLE):
        ways = _Ways(Inline(), shuffle_method, memory_bytes, progress, kept)
        finished, shuffle = _write_file(source, target, destination, overwrite, ways)
    else:
        plan = Plan.make(source, target, num_shards, shard_bytes)
        _prepare_checks(source, plan.cuts)
        ways = _Ways(engine or Inline(), shuffle_method, memory_bytes, progress, kept)
        folder = _Folder(plan, destination, overwrite, part, ways)
        if part.shards(len(plan.cuts)):
            finished, shuffle = folder.resume() if resume else folder.begin(), folder.shuffle
        else:  # more jobs than shards
            finished, shuffle = [], folder.shuffle
        was_kept = folder.kept
    shards = [done.entry for done in finished]
    if part == WHOLE:
        source.accounts.settle(sum(shard.token_count for shard in shards))
    place = destination if part == WHOLE else partial_path(destination)
    seconds = time.monotonic() - start_s
    max_token = max((done.max_token for done in finished), default=0)
    return Report(place, source.meta, shards, max_token, source.accounts, str(shuffle), seconds, part, was_kept)


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
    if destination.suffix in {*(other.suffix for other in FORMATS.values()), *OTHER_SUFFIXES} - {suffix}:
        raise ConvertError(f"{destination}: expected a folder or a name that ends in {suffix}")
    return destination.suffix == suffix


def refuse_bad_destination(source: Source, destination: Path) -> None:
    """Raise `ConvertError` if the destination has no folder to be in, or is or holds a source."""
    if not destination.absolute().parent.is_dir():
        raise ConvertError(f"{destination.absolute().parent}: no such folder; make it first, or choose another output")
    if not destination.name:
        raise ArgumentError(f"{destination}: has no name of its own; give the folder or file to write")
    places = {
        path.resolve() for path in (destination, partial_path(destination), partial_path(scatter_path(destination)))
    }
    for path in source.paths:
        if places & {path.resolve(), *path.resolve().parents}:
            raise ConvertError(f"{destination}: is or holds the source {path}; choose another output")


def _prepare_checks(source: Source, cuts: list[tuple[int, int]]) -> None:
    """Make sure that damage in the source is found: by whole shards where they stay whole, else batch by batch."""
    if any(source.sha256_of(*cut) is None for cut in cuts):
        source.check_reads()


class _Ways(NamedTuple):
    """Settings of the work that do not change the result."""

    engine: Engine
    shuffle_method: str
    memory_bytes: int
    progress: Progress
    kept: Progress

    def choose(self, source: Source, cuts: list[tuple[int, int]]) -> Shuffle:
        return choose_shuffle(source, self.shuffle_method, cuts, self.memory_bytes, self.engine.workers_per_node)


def _write_file(
    source: Source, target: str, path: Path, overwrite: bool, ways: _Ways
) -> tuple[list[FinishedShard], Shuffle]:
    require_one_split(source, "name a folder of shards")
    cut = (0, source.num_batches)
    files = file_states(source.paths)
    _prepare_checks(source, [cut])
    if not overwrite:
        refuse_existing(path)
    shuffle = ways.choose(source, [cut])
    progress = halved(ways.progress, shuffle)
    require_room(path.parent, stored_bytes(source.meta, source.num_batches, target) + shuffle.temp_bytes, 1)
    with scattered(source, shuffle, path, ways.engine, progress) as readable:
        task = ShardTask(readable, target, path, *cut, source.meta, sidecar=False, overwrite=overwrite, files=files)
        return [write_shard(task, progress)], shuffle


class _Folder:
    """Fills the `.partial/` of one destination."""

    def __init__(self, plan: Plan, destination: Path, overwrite: bool, part: Part, ways: _Ways) -> None:
        self._plan, self._destination, self._overwrite = plan, destination, overwrite
        self._part, self._ways = part, ways
        self.kept = NOTHING_KEPT
        self.shuffle = Shuffle("none", "nothing was left to do")
        self._shards = part.shards(len(plan.cuts))

    def begin(self) -> list[FinishedShard]:
        """Start from nothing."""
        with self._open() as folder:
            if not self._overwrite:
                refuse_other_journals(folder, SHARD_JOURNALS)
            journals = journal_paths(folder.partial_path)
            if journals and not self._overwrite:
                folder.keep()
            done = 0 if self._overwrite else len(self._recorded(journals.values()))
            if done:
                raise ConvertError(
                    f"{folder.partial_path}: an interrupted conversion with {done:,} of {len(self._plan.cuts):,} "
                    "finished shards is there; go on with --resume, or start over with --force"
                )
            self._remove_unfinished(folder, {})
            return self._write(folder, {})

    def resume(self) -> list[FinishedShard]:
        """Continue an interrupted conversion, if there is one."""
        if self._destination.exists() and not self._overwrite:
            return self._already_done()
        with self._open() as folder:
            refuse_other_journals(folder, SHARD_JOURNALS)
            folder.keep()
            start_s = time.monotonic()
            finished = self._finished_before(folder)
            self._keep(finished.values(), time.monotonic() - start_s)
            self._remove_unfinished(folder, finished)
            return self._write(folder, finished)

    def _keep(self, finished: Iterable[FinishedShard], seconds: float) -> None:
        tokens = [done.entry.token_count for done in finished]
        self.kept = Kept(len(tokens), sum(tokens), seconds)

    def _open(self) -> PartialDirectory:
        return PartialDirectory(self._destination, overwrite=self._overwrite, shared=self._part != WHOLE)

    def _write(self, folder: PartialDirectory, finished: dict[int, FinishedShard]) -> list[FinishedShard]:
        try:
            return self._write_missing(folder, finished)
        except BaseException as error:
            with suppress(OSError):
                self._remove_unfinished(folder, finished)
            if finished:
                error.add_note(
                    f"{len(finished):,} of {len(self._shards):,} shards are finished, in {folder.partial_path}: "
                    f"{how_to_go_on(self._overwrite)}"
                )
            raise

    def _write_missing(self, folder: PartialDirectory, finished: dict[int, FinishedShard]) -> list[FinishedShard]:
        plan, path = self._plan, folder.partial_path
        missing = [shard for shard in self._shards if shard not in finished]
        if missing:
            self.shuffle = self._ways.choose(plan.source, [plan.cuts[shard] for shard in missing])
        progress = halved(self._ways.progress, self.shuffle)
        require_room(path, sum(map(plan.shard_bytes, missing)) + self.shuffle.temp_bytes, plan.num_inodes())
        journal = Journal(path, self._part, plan, finished)
        self._remove_other_journals(folder)
        self._ways.kept(self.kept.tokens)
        with scattered(
            plan.source, self.shuffle, path / plan.name(self._shards[0]), self._ways.engine, progress
        ) as source:
            tasks = (replace(plan.task(shard, path), source=source) for shard in missing)
            with closing(self._ways.engine.run(write_shard, tasks, progress)) as results:
                for number, done in results:
                    journal.add(missing[number], done)
                    finished[missing[number]] = done
                    folder.keep()
        plan.require_unchanged_sources()
        in_order = [finished[shard] for shard in self._shards]
        if self._part == WHOLE:
            save_index(path, plan, in_order)
            # the journal goes along and is removed under the final name: a kill just before loses no shard
            folder.on_published(remove_journals)
        return in_order

    def _recorded(self, journals: Iterable[Path]) -> set[int]:
        """Return which of the shards to write are finished, whichever job has recorded them."""
        return {shard for path in journals for shard in read_journal(path).finished if shard in self._shards}

    def _finished_before(self, folder: PartialDirectory) -> dict[int, FinishedShard]:
        """Return the shards that earlier runs have finished and that are still intact."""
        plan, touched = self._plan, False
        recorded: dict[int, FinishedShard] = {}
        for path in journal_paths(folder.partial_path).values():
            record = read_journal(path)
            require_same(record.identity, plan.identity(), path)
            touched |= self._is_touched(record.files)
            recorded.update((shard, done) for shard, done in record.finished.items() if shard in self._shards)
        shards = sorted(recorded)
        tasks = [CheckTask(plan.task(k, folder.partial_path), recorded[k], touched) for k in shards]
        with closing(self._ways.engine.run(is_intact, tasks, no_progress)) as results:
            intact = dict(results)
        return {shard: recorded[shard] for number, shard in enumerate(shards) if intact[number]}

    def _is_touched(self, before: dict[str, tuple[int, int]]) -> bool:
        """Return whether a source file has another mtime than before, and refuse another size."""
        for path, (size, _) in self._plan.files.items():
            if path not in before or before[path][0] != size:
                raise ConvertError(
                    f"{path}: changed since the interrupted conversion: expected {before.get(path, ('no file',))[0]} "
                    f"bytes, found {size}; start over with --force"
                )
        return before != self._plan.files

    def _remove_unfinished(self, folder: PartialDirectory, finished: dict[int, FinishedShard]) -> None:
        """Remove what earlier runs of this part have left, but for finished shards."""
        kept = {name for done in finished.values() for name in (done.entry.path, done.entry.path + CRC32_SUFFIX)}
        mine = tuple(self._plan.name(shard) for shard in self._shards)
        journals = {path.name for path in journal_paths(folder.partial_path).values()}
        for name in os.listdir(folder.partial_path):
            # a journal stays until the new one is there
            if name not in kept and name not in journals and (self._part == WHOLE or name.startswith(mine)):
                remove(folder.partial_path / name)

    def _remove_other_journals(self, folder: PartialDirectory) -> None:
        """Remove the journals that the new one replaces, and with --force those of other plans."""
        for part, path in journal_paths(folder.partial_path).items():
            replaced = self._part == WHOLE or (self._overwrite and part.num_jobs != self._part.num_jobs)
            if part != self._part and replaced:
                path.unlink()

    def _already_done(self) -> list[FinishedShard]:
        """Accept an existing destination as the result of the same conversion, or refuse it."""
        plan, source = self._plan, self._plan.source
        if (self._destination / INDEX_NAME).exists():
            index = ShardIndex.load(self._destination)
            same = (index.meta, index.shuffle, index.source) == (source.meta, source.shuffle, source.description)
            shards = [(plan.name(shard), stop - start) for shard, (start, stop) in enumerate(plan.cuts)]
            same = same and [(entry.path, entry.num_batches) for entry in index.shards] == shards
            if same and not self._is_outdated():
                remove_journals(self._destination)
                done = [FinishedShard(entry, 0) for entry in index.shards]
                self._keep(done, 0.0)
                return done
        raise ConvertError(
            f"{self._destination}: exists already and is no result of this conversion; pass --force to replace it"
        )

    def _is_outdated(self) -> bool:
        """Return whether a source file is newer than the finished store, or a shard lacks its HDF5 metadata."""
        made_ns = (self._destination / INDEX_NAME).stat().st_mtime_ns
        sources = map(Path, self._plan.source.description.get("files", []))
        faceless = self._plan.target == "dual" and any(
            face_of(self._destination / self._plan.name(shard)) != Face.HDF5 for shard in self._shards
        )
        return faceless or any(path.stat().st_mtime_ns > made_ns for path in sources)


def save_index(folder: Path, plan: Plan, finished: list[FinishedShard]) -> None:
    """Write the `shards.json` of a folder, where its format has one."""
    if FORMATS[plan.target].indexed:
        source, entries = plan.source, tuple(done.entry for done in finished)
        ShardIndex(source.meta, entries, source.shuffle, source.description).save(folder)
