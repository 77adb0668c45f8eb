"""Documents to a store of streams, or to batches: a store of streams is staged, and packed into rows."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5 import ConvertError, HDF5ShardWriter, ShardEntry, ShardIndex, StoreMeta
from zb_hdf5.converters.batch_source import TokenCounts, out_of_range, require_pad_id
from zb_hdf5.converters.batch_target import shard_plan_of, write_batches
from zb_hdf5.converters.conversion import STREAM, WHOLE
from zb_hdf5.converters.engines import OnProgress, Workers, no_progress, noted_work
from zb_hdf5.converters.estimate import estimate_of
from zb_hdf5.converters.journal import (
    NOTHING_KEPT,
    PLANNED,
    Finished,
    Journal,
    Kept,
    Planned,
    Record,
    digests_of,
    file_states,
    how_to_go_on,
    is_result,
    meta_from_json,
    meta_to_json,
    refuse_interrupted,
    require_unchanged,
)
from zb_hdf5.converters.options import (
    MOST_SHARDS,
    CutOptions,
    FormatOptions,
    HeldOut,
    LossOptions,
    RowOptions,
    Settings,
    TextOptions,
    WorkOptions,
)
from zb_hdf5.converters.packed_source import PackedSource
from zb_hdf5.converters.reports import Done, FilesDryRun, Report
from zb_hdf5.converters.routes import Route, num_groups_of_first_split, require_documents, route
from zb_hdf5.converters.shard_plan import COMMIT_BYTES, SHARDS, free_room, kept_of, lack_of_room, number_of_shards
from zb_hdf5.documents.document_table import DocumentPart, DocumentTable, in_order, part_of
from zb_hdf5.documents.metadata import JSON, DocumentRows, row_of_source
from zb_hdf5.errors import ZbError
from zb_hdf5.files.forks import kept_property
from zb_hdf5.files.publishing import LockedFolder, PartialDirectory, fresh_file, partial_path, refuse_existing
from zb_hdf5.formats.document_source import DocumentSource, Encoded
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import (
    DEFAULT_CHUNK_TOKENS,
    NO_BOUNDARY,
    NO_CODEC,
    SHARD_PREFIX,
    STREAM_LAYOUT,
    bad_token_message,
    documents_path,
    find_bad_token,
    token_limit,
)

#: The word for the files in the journal and in messages.
TOKEN_FILES: Final = "files of tokens"
#: The keys of the plan of a folder that jobs can share: the tokens that are written, and the facts of documents.
WRITTEN_META: Final = "meta"
FACTS_KEPT: Final = "facts"
#: That of the digest over all that decides a store of streams, which its index has.
WORK_DIGEST: Final = "work"
#: Files of a shard: its tokens, and the documents or the pieces in it; and of a store: its folder, and the index.
FILES_OF_SHARD: Final = 2
FILES_OF_STORE: Final = 2
#: Ids that are looked at together.
BLOCK_IDS: Final = 1 << 14


@dataclass(frozen=True)
class TokensTask:
    """The documents of one file of tokens, for any process. Picklable.

    Parameters
    ----------
    source
        All documents.
    route
        Those of the file.
    path
        The file to write; the table of its documents has its name and a suffix.
    num_threads
        Threads that tokenize.
    codec
        The codec of its chunks.
    finished
        The facts with which the file is compared once more.
    """

    source: DocumentSource
    route: Route
    path: Path
    num_threads: int
    codec: str
    finished: Finished | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file, and those that belong to it."""
        return self.path, documents_path(self.path)

    @property
    def meta(self) -> StoreMeta:
        boundary = self.source.boundary_token_id
        return StoreMeta(
            batch_size=1,
            seq_len=DEFAULT_CHUNK_TOKENS,
            dtype=self.source.dtype,
            vocab_size=self.source.vocab_size,
            tokenizer=self.source.tokenizer,
            boundary_token_id=NO_BOUNDARY if boundary is None else boundary,
            layout=STREAM_LAYOUT,
            fields=tuple(self.source.fields),
            codec=self.codec,
        )

    def origin(self) -> dict[str, Any]:
        """Return the origin of the tokens, with the names of those files alone that the documents are from."""
        described = dict(self.source.description)
        if described.get("files") == [str(path) for path in self.source.paths]:
            numbers = dict.fromkeys(group.file_number for group in self.route.groups)
            described["files"] = [str(self.source.paths[number]) for number in numbers]
        return {"source": described, "split": self.route.split}

    @property
    def amount(self) -> int:
        return self.route.num_bytes

    def amount_done(self) -> int:
        """Return how many bytes of documents another process has read, by the note that it leaves."""
        return noted_work(self.note)

    @property
    def note(self) -> Path:
        return self.path.with_name(self.path.name + ".progress")


def write_stream(task: TokensTask, progress: OnProgress = no_progress) -> Finished:
    """Write the documents of one task to an HDF5 stream."""
    try:
        return _write_stream(task, progress)
    finally:
        task.note.unlink(missing_ok=True)


def _write_stream(task: TokensTask, progress: OnProgress) -> Finished:
    source = task.source
    meta = task.meta
    counts = TokenCounts()
    writer = HDF5ShardWriter(
        task.path,
        dtype=meta.dtype.name,
        boundary_token_id=meta.boundary_token_id,
        vocab_size=meta.vocab_size,
        tokenizer=meta.tokenizer,
        overwrite=True,
        codec=meta.codec,
        origin=task.origin(),
        commit_bytes=COMMIT_BYTES,
        fields=meta.fields,
        spans_codec=source.spans_codec or JSON,
    )
    with writer:
        for encoded in read_documents(task, counts, progress):
            try:
                writer.write_documents(encoded.tokens, encoded.lengths, encoded.fields, documents=facts_of(encoded))
            except ConvertError as error:
                raise refused(encoded, source, error) from error
        info = writer.finish()
    entry = ShardEntry.of(info, task.route.split)
    frame, _ = digests_of(task, entry, frame_only=True)
    return Finished(entry, info.max_token, frame, counts)


def read_documents(task: TokensTask, counts: TokenCounts, progress: OnProgress) -> Iterator[Encoded]:
    """Yield the documents of a task, count them, and note how far they were read when the next ones are asked for."""
    done = 0
    with open(fresh_file(task.note), "wb", buffering=0) as note:
        for encoded, read in task.route.read(task.source, task.num_threads, counts):
            yield encoded
            progress(read - done)
            done = read
            os.pwrite(note.fileno(), b"%020d" % done, 0)  # a file that is cut and written again waits for the disk
    progress(task.amount - done)


def facts_of(encoded: Encoded) -> DocumentRows:
    """Return the facts of documents, as a writer takes them."""
    return DocumentRows(
        [encoded.source],
        np.zeros(len(encoded.lengths), np.uint32),
        encoded.rows,
        encoded.ids or None,
        encoded.metadata or None,
        encoded.spans,
    )


def refused(encoded: Encoded, source: DocumentSource, error: ConvertError) -> ConvertError:
    """Return the error of documents that a writer has refused: it names the first token that cannot be stored."""
    message = _named_token(encoded, source)
    if message:
        return out_of_range(message, source.suspects)
    return ConvertError(f"{encoded.source}: {error}", options=error.options)


def _named_token(encoded: Encoded, source: DocumentSource) -> str:
    """Name the document of the first token that cannot be stored; "" if all can."""
    meta = StoreMeta(batch_size=1, seq_len=1, dtype=source.dtype, vocab_size=source.vocab_size)
    bad = find_bad_token(encoded.tokens, token_limit(meta.dtype, meta.vocab_size))
    if bad is None:
        return ""
    document = int(np.searchsorted(np.cumsum(encoded.lengths), bad, side="right"))
    where = f"the document of {row_of_source(Path(encoded.source).name, encoded.rows[document])}"
    return bad_token_message(encoded.source, where, encoded.tokens[bad], meta)


def planned_files(tasks: Iterable[TokensTask]) -> list[Planned]:
    """Return the facts of the files of some tasks that a journal must not change."""
    return [Planned(task.path.name, task.route.split) for task in tasks]


class Completed(NamedTuple):
    """The files of a conversion of documents, the counts of all documents, and the part that was there already."""

    finished: list[Finished]
    counts: TokenCounts
    kept: Kept
    documents_kept: int


@dataclass(frozen=True)
class TokensPlan:
    """The files of tokens that a conversion of documents writes.

    Parameters
    ----------
    source
        The documents.
    routes
        The documents of each file.
    options
        JSON of the other options that decide the store of its tokens.
    """

    source: DocumentSource
    routes: list[Route]
    options: dict[str, Any]

    @kept_property
    def identity(self) -> dict[str, Any]:
        """JSON of everything that decides the tokens of every file."""
        routes = [
            [
                each.split,
                {"fraction": each.val_fraction, "seed": each.seed} if each.val_fraction else None,
                [group[:2] for group in each.groups],
                *([each.share] if each.share else []),
            ]
            for each in self.routes
        ]
        return {
            "source": self.source.description,
            **self.source.identity,
            "files": file_states(self.source.paths),
            "routing": hashlib.sha256(json.dumps(routes).encode()).hexdigest(),
        }

    @kept_property
    def description(self) -> dict[str, Any]:
        """The `source` entry of `shards.json`, with a digest over everything but the mtime of the sources."""
        sizes = {path: size for path, (size, _) in self.identity["files"].items()}
        work = hashlib.sha256(json.dumps([{**self.identity, "files": sizes}, self.options]).encode()).hexdigest()
        return {**self.source.description, WORK_DIGEST: work}

    @property
    def largest_share(self) -> float:
        """The share of the largest file, of the bytes of all."""
        taken = [each.bytes_taken for each in self.routes]
        return max(taken) / max(1, sum(taken))

    def is_made(self, store: Path, work: WorkOptions) -> bool:
        """Return whether `resume` finds a store that was made of these files as they are now, and in the same way."""
        if not work.resume or work.force or not store.is_dir():
            return False
        try:
            made = ShardIndex.load(store).source.get(WORK_DIGEST)
        except (OSError, ZbError):
            return False
        return is_result(store, made == self.description[WORK_DIGEST], self.source.paths)

    def write(self, folder: LockedFolder, settings: Settings, workers: Workers, codec: str) -> Report:
        """Make a folder a store of streams, with a journal; those that an interrupted run has finished are kept."""
        tasks = self._tasks(folder.partial_path, workers.num_threads, codec)
        part = settings.work.shard_range
        mine = {number: tasks[number] for number in part.shards(len(tasks))}
        meta = tasks[0].meta
        facts = self._index_facts(meta)
        # tokens that are staged for rows fit any shape and shuffle of them
        how = {"codec": codec, **(facts if settings.target.is_stream else {})}
        planned = planned_files(tasks.values())
        made = self.complete(folder, mine, write_stream, how, settings.work, workers, planned)
        if part == WHOLE:
            index = index_of_streams(folder.partial_path, {**self.identity, **facts}, made.finished)
            index.save(folder.partial_path)
            meta = index.meta
        return self._report(folder.path, settings, meta, made)

    def nothing_to_write(self, settings: Settings, workers: Workers) -> Report:
        """Return the report of a job that has no shard: there are more jobs than shards."""
        path = settings.target.path
        meta = self._tasks(partial_path(path), workers.num_threads, settings.target.codec)[0].meta
        return self._report(path, settings, meta, Completed([], TokenCounts(), NOTHING_KEPT, 0))

    def _report(self, path: Path, settings: Settings, meta: StoreMeta, made: Completed) -> Report:
        """Return the report of the streams of this job."""
        source = self.source
        part = settings.work.shard_range
        is_auto = settings.of(CutOptions).dtype == settings.of(FormatOptions).dtype == "auto"
        return Report(
            destination=path if part == WHOLE else partial_path(path),
            meta=meta,
            shards=[done.entry for done in made.finished],
            counts=made.counts,
            seconds=0.0,
            max_token=max((done.max_token for done in made.finished if done.max_token is not None), default=None),
            part=part,
            kept=made.kept,
            documents_kept=made.documents_kept,
            encoder=source.encoder,
            lacks_vocab_size=source.dtype == np.uint32 and not source.vocab_size and is_auto,
        )

    def _index_facts(self, meta: StoreMeta) -> dict[str, Any]:
        """Return JSON of all that an index of streams needs besides their files. See `index_of_streams`."""
        return {
            "target": STREAM,
            WRITTEN_META: meta_to_json(meta),
            FACTS_KEPT: ["ids"] if self.source.has_ids else [],
            WORK_DIGEST: self.description[WORK_DIGEST],
        }

    def complete(
        self,
        folder: LockedFolder,
        tasks: Mapping[int, TokensTask],
        write: Callable[[Any, OnProgress], Finished],
        how: dict[str, Any],
        work: WorkOptions,
        workers: Workers,
        planned: Sequence[Planned],
    ) -> Completed:
        """Do the tasks that no earlier run has finished, and note each in a journal.

        Parameters
        ----------
        folder
            The folder of the files.
        tasks
            One for each route of this job, by its number.
        write
            Does a task.
        how
            JSON of all that decides the bytes of the files, besides the documents and their routes.
        planned
            The files of all jobs.
        """
        source = self.source
        num_bytes = sum(task.amount for task in tasks.values())
        workers.shown.begin("tokenizing" if source.tokenizer else "cutting", num_bytes, "B")
        head = Record(TOKEN_FILES, {**self.identity, **how, PLANNED: planned})
        journal = Journal(folder, head, tasks, work, workers)
        kept = dict(journal.finished)
        workers.shown.keep(sum(tasks[number].amount for number in kept))
        counts = TokenCounts()
        with journal.kept_for_resume():
            finished = journal.run(write, journal.missing)
            require_unchanged(source.paths, self.identity["files"])
            for done in finished:
                counts.add(done.counts)
            if work.shard_range == WHOLE:
                require_documents(source, counts)
            else:  # a part may have no documents
                counts.documents_dropped.require_few(counts.documents, source.max_dropped, source.paths[0])
        tokens_kept = sum(done.counts.tokens_in for done in kept.values())
        return Completed(finished, counts, journal.kept, tokens_kept)

    def _tasks(self, folder: Path, num_threads: int, codec: str) -> dict[int, TokensTask]:
        """Return the task of each file, by its number."""
        count = len(self.routes)
        return {
            number: TokensTask(
                source=self.source,
                route=each,
                path=folder / f"{SHARD_PREFIX}{number:05}-of-{count:05}.h5",
                num_threads=num_threads,
                codec=codec,
            )
            for number, each in enumerate(self.routes)
        }


def index_of_streams(folder: Path, plan: Mapping[str, Any], finished: Sequence[Finished]) -> ShardIndex:
    """Return the index of a store of streams, whose documents have different ids.

    Parameters
    ----------
    folder
        The folder of the files.
    plan
        The plan of its journal.
    finished
        All files, in order.
    """
    splits = {documents_path(folder / done.entry.path): done.entry.split for done in finished}
    tables = [part_of(path) for path in splits if path.exists()]
    if "ids" in plan[FACTS_KEPT]:
        require_unique_ids(folder, tables)
    meta = meta_from_json(plan[WRITTEN_META])
    index = ShardIndex(
        replace(meta, document_count=sum(done.entry.document_count for done in finished)),
        [done.entry for done in finished],
        source={**plan["source"], WORK_DIGEST: plan[WORK_DIGEST]},
        documents=tuple(in_order(part._replace(split=splits[folder / part.path]) for part in tables)),
    )
    return index.with_max_token(done.max_token for done in finished)


def require_unique_ids(folder: Path, tables: Sequence[DocumentPart]) -> None:
    """Raise `ConvertError` if two documents of some tables have one id. Takes some 32 bytes for each document."""
    digests = bytearray()  # 64 bits of that of each id: equal ones are then compared themselves
    with closing(DocumentTable(folder, in_order(tables))) as table:
        for number, part in enumerate(table.parts):
            stop = 0
            while stop < part.document_count:
                deliver_signals()
                start = stop
                stop = table.file(number).within_texts(start, min(start + BLOCK_IDS, part.document_count))
                rows = table.file(number).rows(start, stop)
                for text in rows.ids or ():
                    digests += hashlib.blake2b(text, digest_size=8).digest()
        found = np.frombuffer(digests, "<u8")
        order = found.argsort(kind="stable")
        for k in np.flatnonzero(np.diff(found[order]) == 0).tolist():
            one, other = (table.document(int(number)) for number in order[k : k + 2])
            if one.id == other.id:
                raise ConvertError(
                    f"{row_of_source(other.source, other.row)}: the id {other.id!r} was there before, in "
                    f"{row_of_source(one.source, one.row)}: name a column whose values differ, or leave out id_column",
                    options=["id_column"],
                )


#: (bytes of the source of one staged stream, the most of these): enough for the workers of some nodes, and not too many
#: files. The cuts do not depend on the workers: any number of them can go on with it.
STAGED: Final = ((4 << 20, 256), (64 << 20, 4096))
MIN_STAGED: Final = 2


def write_documents(plan: TokensPlan, settings: Settings, workers: Workers) -> Report:
    """Write a store of streams, or of packed and shuffled rows. Its bytes never depend on the workers."""
    start_s = time.monotonic()
    target = settings.target
    staging = target.path.with_name(target.path.name + ".tokens")
    if plan.is_made(target.path, settings.work):
        if partial_path(staging).exists():
            with LockedFolder(staging):  # removes what a dead process has left
                pass
        return Done.of(target.path)
    part = settings.work.shard_range
    if not part.shards(len(plan.routes)):
        report = plan.nothing_to_write(settings, workers)
    elif target.is_stream:
        with PartialDirectory(target.path, overwrite=settings.work.force, shared=part != WHOLE) as folder:
            report = plan.write(folder, settings, workers, target.codec)
    else:
        report = _write_rows(plan, staging, settings, workers)
    return replace(report, seconds=time.monotonic() - start_s)


def dry_run_of_documents(plan: TokensPlan, settings: Settings, workers: Workers) -> FilesDryRun:
    """Return the streams, or the store of rows, that a conversion would write, and the space that they need."""
    source = plan.source
    target = settings.target
    if not (settings.work.force or settings.work.resume):
        refuse_existing(target.path)
    folder = target.path.absolute().parent
    num_workers = min(workers.engine.workers, len(plan.routes))
    found = estimate_of(source, workers.num_threads, folder, workers=num_workers, is_staged=not target.is_stream)
    num_bytes = found.num_tokens * source.dtype.itemsize
    num_shards = len(plan.routes)
    largest = round(num_bytes * plan.largest_share)
    rows = ""
    if not target.is_stream:
        options = settings.of(RowOptions).of_records(source.record_tokens, source.paths[0])
        _require_pad_id_of(source, options)
        meta = StoreMeta(options.batch_size, options.row_tokens, source.dtype)
        num_shards = number_of_shards(max(1, num_bytes // meta.batch_bytes), meta, target)
        largest = -(-num_bytes // num_shards)
        rows = f"of {meta.seq_len:,} tokens in batches of {meta.batch_size:,}, by {options.packing} packing"
    free = free_room(folder)
    inodes = 1 if target.is_one_file and not target.is_stream else FILES_OF_SHARD * num_shards + FILES_OF_STORE
    temp_bytes = 0 if target.is_stream else num_bytes
    return FilesDryRun(
        path=str(target.destination),
        num_tokens=found.num_tokens,
        dtype=source.dtype.name,
        num_shards=num_shards,
        largest_shard_bytes=largest,
        total_bytes=num_bytes,
        inodes=inodes,
        left_behind="",
        workers=num_workers,
        free=free,
        lack=lack_of_room(folder, free, num_bytes + temp_bytes - kept_of(settings), inodes),
        seconds=found.seconds,
        is_estimate=not found.is_exact,
        rows=rows,
        temp_bytes=temp_bytes,
    )


def _write_rows(plan: TokensPlan, staging: Path, settings: Settings, workers: Workers) -> Report:
    """Pack and shuffle documents, whose tokens are staged meanwhile: as much disk again as the store."""
    source = plan.source
    destination = settings.target.path
    work = settings.work
    options = settings.of(RowOptions).of_records(source.record_tokens, source.paths[0])
    _require_pad_id_of(source, options)  # now, and not after hours of tokenizing
    if not work.force:
        refuse_existing(destination)
        if not work.resume:
            refuse_interrupted(partial_path(destination), SHARDS)
    with LockedFolder(staging) as folder:
        made = plan.write(folder, settings, workers, NO_CODEC)
        try:
            rows = PackedSource(
                folder.partial_path,
                folder.partial_path,
                options,
                settings.target,
                description=_described(plan, settings),
                paths=source.paths,
                counts=made.counts,
            )
            report = write_batches(shard_plan_of(rows, settings), settings, workers)
        except BaseException as error:
            error.add_note(f"the tokens are kept in {folder.partial_path}: {how_to_go_on(work.force)}")
            raise
    return replace(
        report,
        packing=options.packing,
        documents_kept=made.documents_kept,
        encoder=made.encoder,
        lacks_vocab_size=made.lacks_vocab_size,
    )


def _require_pad_id_of(source: DocumentSource, options: RowOptions) -> None:
    """Raise `ArgumentError` if the tokens of a source cannot have that of the padding beside them."""
    pad_id = options.pad_id
    if pad_id is None:
        pad_id = source.boundary_token_id or 0
    meta = StoreMeta(options.batch_size, options.row_tokens, source.dtype, vocab_size=source.vocab_size)
    require_pad_id(pad_id, meta)


def _described(plan: TokensPlan, settings: Settings) -> dict[str, Any]:
    """Return the `source` entry of a store of rows."""
    val_fraction = settings.of(HeldOut).val_fraction
    if not val_fraction:
        return plan.description
    return {**plan.description, "val_fraction": val_fraction, "val_seed": settings.of(RowOptions).seed}


def tokens_plan(source: DocumentSource, settings: Settings) -> TokensPlan:
    """Deal the documents of a source to streams: as asked, or for rows so that many workers have work."""
    target = settings.target
    held_out = settings.of(HeldOut)
    if target.is_stream:
        count = 1 if target.is_one_file else target.shards
        keeps_files = source.has_shards or settings.of(TextOptions).shard_per_source
        most = None if keeps_files else MOST_SHARDS
        options: dict[str, Any] = {} if target.codec == NO_CODEC else {"codec": target.codec}
    else:  # the stored bytes do not depend on the cuts
        num_bytes = sum(path.stat().st_size for path in source.paths)
        wanted = max(MIN_STAGED, *(min(most, num_bytes // size) for size, most in STAGED))
        is_per_file = held_out.val_last_shard or not source.groups
        most = None
        count = None if is_per_file else min(num_groups_of_first_split(source), wanted)
        options = _deciding(settings, source)
    routes = route(
        source,
        count,
        most=most,
        val_fraction=held_out.val_fraction,
        val_last_shard=held_out.val_last_shard,
        seed=held_out.seed,
    )
    return TokensPlan(source, routes, options)


def _deciding(settings: Settings, source: DocumentSource) -> dict[str, Any]:
    """Return the options that decide a store of rows, besides its tokens; None of one that is off."""
    target = settings.target
    rows = settings.of(RowOptions).of_records(source.record_tokens, source.paths[0])
    held_out = settings.of(HeldOut)
    is_sized = target.is_cut and target.shards is None
    return {
        "batch_size": rows.batch_size,
        "seq_len": rows.row_tokens,
        "seed": rows.seed,
        "shuffle": rows.shuffle,
        "packing": rows.packing,
        "remainder": rows.remainder,
        "pad_id": rows.pad_id,
        "num_shards": target.shards,
        "shard_bytes": target.shard_size if is_sized else None,
        "val_fraction": held_out.val_fraction,
        "val_last_shard": held_out.val_last_shard or None,
        "codec": None if target.codec == NO_CODEC else target.codec,
        "tokens_only": settings.of(LossOptions).tokens_only or None,
    }
