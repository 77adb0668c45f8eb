"""Batches to one file, a folder of shards, a live store or a bucket, from any source of batches.

There is no code per pair of formats. Shards are written in `<dst>.partial/`, each is recorded in a journal when it is
whole, and the folder gets its name when all of them are: a kill costs one shard per worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from zb_hdf5 import ArgumentError, ConvertError, ShardIndex
from zb_hdf5.console import format_bytes
from zb_hdf5.converters.batch_source import BatchSource, read_groups
from zb_hdf5.converters.conversion import DEFAULT_MEMORY_BYTES, Conversion
from zb_hdf5.converters.engines import Engine, Workers
from zb_hdf5.converters.journal import (
    NOTHING_KEPT,
    WHOLE,
    Finished,
    Journal,
    Kept,
    ShardRange,
    file_states,
    is_result,
    require_unchanged,
    shard_range_of,
)
from zb_hdf5.converters.reports import UINT16_SAVES, Report
from zb_hdf5.converters.shard_plan import (
    ShardPlan,
    ShardTask,
    cut_into_shards,
    free_room,
    require_one_split,
    require_room,
    write_shard,
)
from zb_hdf5.converters.shuffle import UNSHUFFLED, Shuffle, choose_shuffle, scatter_path, scattered
from zb_hdf5.converters.upload import require_new, staging_path, upload_and_remove
from zb_hdf5.documents.document_table import check_documents
from zb_hdf5.documents.table_file import copy_table
from zb_hdf5.errors import Remedy
from zb_hdf5.files.paths import RemotePath, any_path, is_url, local_path
from zb_hdf5.files.publishing import PartialDirectory, partial_path, refuse_existing
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import INDEX_NAME, NO_CODEC, ORIGIN_ATTRIBUTES
from zb_hdf5.store.live import LiveStoreWriter
from zb_hdf5.store.rebuild import ONLY_IN_SOME_FILES

NOTHING_LEFT: Final = Shuffle("none", "nothing was left to do")


def write_batches(source: BatchSource, conversion: Conversion, workers: Workers) -> Report:
    """Write all batches of a source as a conversion asks."""
    keeps = not FORMATS[conversion.target].tokens_only
    if conversion.live and not keeps:
        raise ArgumentError(f"{conversion.destination}: {conversion.target} files are never live")
    if is_url(conversion.destination) and not conversion.live:
        return _write_and_upload(source, conversion, workers)
    destination, part, start_s = local_path(conversion.destination), shard_range_of(conversion), time.monotonic()
    lost = left_behind(source, keeps_fields=keeps, keeps_documents=keeps and not conversion.live)
    plan, one_file = _planned(source, destination, conversion)
    source = plan.source
    if one_file and not keeps:
        lost = " and ".join(filter(None, [lost, _nameless(source)]))
    if any(source.file_of(*cut)[1] is None for cut in plan.cuts):
        source.check_reads()  # damage is found by whole shards where they stay whole, else batch by batch
    write = _write_live if conversion.live else _write_file if one_file else _write_folder
    finished, shuffle, was_kept = write(plan, destination, conversion, workers)
    shards = [done.entry for done in finished]
    if part == WHOLE:
        source.counts.require_balance(sum(shard.token_count for shard in shards))
    max_token = max((done.max_token for done in finished if done.max_token is not None), default=None)
    return Report(
        destination if part == WHOLE else partial_path(destination), source.meta, shards, source.counts,
        time.monotonic() - start_s, str(shuffle), max_token, part, was_kept, lost,
        lacks_vocab_size=source.lacks_vocab_size,
    )  # fmt: skip


def _planned(source: BatchSource, destination: Path, conversion: Conversion) -> tuple[ShardPlan, bool]:
    """Return the plan of a source as its target stores it, and whether it is one file."""
    refuse_bad_destination(source.paths, destination)
    source = fitted(source, conversion.target, conversion.codec or NO_CODEC, bool(conversion.tokens_only))
    FORMATS[conversion.target].require(source.meta, destination)
    one_file, cuts = is_one_file(conversion, destination), [(0, source.num_batches)]
    if one_file:
        require_one_split(source, "name a folder of shards")
    else:
        cuts = cut_into_shards(source, conversion)
    return ShardPlan(source, conversion.target, cuts, file_states(source.paths)), one_file


def dry_run(source: BatchSource, conversion: Conversion, workers: Workers) -> dict[str, Any]:
    """Return the shards that a conversion would write, and the free space, as JSON."""
    destination = local_path_of(conversion)
    plan, one_file = _planned(source, destination, conversion)
    if not (conversion.overwrite or conversion.resume):
        refuse_existing(destination)
    meta, cuts = plan.source.meta, plan.cuts
    node, memory_bytes = 1 if one_file else workers.engine.workers_per_node, conversion.memory_bytes
    shuffle = choose_shuffle(plan.source, conversion.shuffle_method, cuts, memory_bytes, node)
    sizes = [plan.shard_bytes(shard) for shard in range(len(cuts))]
    num_tokens = source.num_batches * meta.batch_tokens
    return {
        "path": str(conversion.destination),
        "num_batches": plan.source.num_batches,
        "batch_size": meta.batch_size,
        "seq_len": meta.seq_len,
        "dtype": meta.dtype.name,
        "num_shards": len(cuts),
        "largest_shard_bytes": max(sizes),
        "total_bytes": sum(sizes),
        "uint16_would_save_bytes": num_tokens * UINT16_SAVES if source.lacks_vocab_size else 0,
        "inodes": 1 if one_file else plan.num_inodes(),
        "workers": min(workers.engine.workers, len(cuts)),
        "memory_bytes": memory_bytes or DEFAULT_MEMORY_BYTES,
        "shuffle": str(shuffle),
        "temp_bytes": shuffle.temp_bytes,
        "free": free_room(destination.absolute().parent),
    }


def dry_run_lines(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the description of `describe` for people."""
    free = planned["free"]
    saved = planned["uint16_would_save_bytes"]
    shape = f"{planned['batch_size']:,} x {planned['seq_len']:,}"
    inodes = "an uncounted number" if free["inodes"] is None else f"{free['inodes']:,}"
    smaller = f"uint32: a --vocab-size of at most 65,536 would store uint16 and save {format_bytes(saved)}"
    return [
        ("would write", planned["path"]),
        ("batches", f"{planned['num_batches']:,} of {shape} {planned['dtype']}"),
        *([("dtype", smaller)] if saved else []),
        ("shards", f"{planned['num_shards']:,}, the largest {format_bytes(planned['largest_shard_bytes'])}"),
        ("disk", f"{format_bytes(planned['total_bytes'])} of {format_bytes(free['bytes'])} that are free"),
        ("temporary", format_bytes(planned["temp_bytes"])),
        ("shuffle", planned["shuffle"]),
        ("inodes", f"{planned['inodes']:,} of {inodes} that are free"),
        ("workers", f"{planned['workers']}, at most {format_bytes(planned['memory_bytes'])} of memory together"),
    ]


def fitted(source: BatchSource, target: str, codec: str, tokens_only: bool = False) -> BatchSource:
    """Return a source as a target stores it: with its codec, and without fields and documents where it has none.

    `ConvertError` if a format of tokens only would lose them, and `tokens_only` does not allow it.
    """
    row, other = FORMATS[target], copy(source)
    if row.tokens_only:
        lost = left_behind(source, keeps_fields=False, keeps_documents=False)
        if lost and not tokens_only:
            raise ConvertError(
                f"{source.paths[0]}: {row.name} files hold tokens and nothing else: the conversion {lost}",
                remedy=Remedy.TOKENS_ONLY,
            )
        other.has_pieces, other.document_files, other.document_parts = False, (), ()
    other.meta = replace(source.meta, fields=() if row.tokens_only else source.meta.fields, codec=codec)
    return other


def left_behind(source: BatchSource, *, keeps_fields: bool, keeps_documents: bool) -> str:
    """Return the words for all that a source has and a target cannot hold, or ""."""
    names = [field.name for field in source.meta.fields]
    parts = {
        f"the field{'s' * (len(names) > 1)} {', '.join(names)}": bool(names) and not keeps_fields,
        "the places of documents in the records": source.has_pieces and not keeps_documents,
        "the document table": bool(source.document_files) and not keeps_documents,
    }
    lost = [what for what, there in parts.items() if there]
    return f"leaves behind {' and '.join(lost)}" if lost else ""


def _nameless(source: BatchSource) -> str:
    """Return the words for the facts about the tokens for which a lone file of tokens only has no place, or ""."""
    origin = source.origin or {}
    copies = set(origin.get("source") or {}) & set(ORIGIN_ATTRIBUTES)
    facts = [*origin, *sorted(copies), *(name for name in ONLY_IN_SOME_FILES if getattr(source.meta, name))]
    return f"does not name {', '.join(facts)}, as such a file has no place for it" if origin else ""


def local_path_of(conversion: Conversion) -> Path:
    """Return the path on this machine at which a store is written: of a URL the folder that is uploaded."""
    if not is_url(conversion.destination):
        return Path(conversion.destination)
    remote = cast(RemotePath, any_path(conversion.destination))
    if shard_range_of(conversion) != WHOLE:
        raise ConvertError(f"{remote}: parts are merged on one machine: write a folder, and upload the merged store")
    if not FORMATS[conversion.target].holds_batches:
        raise ConvertError(f"{remote}: expected a format that has stores, found {conversion.target}")
    require_new(remote, conversion)
    return staging_path(remote)


def _write_and_upload(source: BatchSource, conversion: Conversion, workers: Workers) -> Report:
    """Write a store on this machine, upload it, and remove it here. With `resume` both go on where they were."""
    start_s, staging = time.monotonic(), local_path_of(conversion)
    replaced = conversion.overwrite and not conversion.resume
    report = write_batches(source, replace(conversion, destination=staging, overwrite=replaced), workers)
    remote = cast(RemotePath, any_path(conversion.destination))
    upload_and_remove(staging, remote, conversion, workers)
    return replace(report, destination=remote, seconds=time.monotonic() - start_s)


def _write_live(
    plan: ShardPlan, destination: Path, conversion: Conversion, workers: Workers
) -> tuple[list[Finished], Shuffle, Kept]:
    """Write all batches in their order to a live HDF5 store, in this process: committed batches may be read at once."""
    # if the process ends early, the committed batches stay, and `zb repair` makes a store of them
    source, cuts = plan.source, plan.cuts
    require_room(destination.absolute().parent, sum(map(plan.shard_bytes, range(len(cuts)))), plan.num_inodes())
    source.check_reads()
    workers.shown.begin("writing", source.num_batches * source.meta.batch_tokens)
    shard_batches = max(stop - start for start, stop in cuts)
    with LiveStoreWriter(
        destination, source.meta, shard_batches=shard_batches, shuffle=source.shuffle, source=source.description
    ) as writer:
        for group in read_groups(source, 0, source.num_batches):
            writer.write(group.tokens, group.fields)
            workers.shown.advance(group.tokens.size)
        info = writer.finish()
    shuffle = Shuffle("direct", "one process gathers the records, as --live asks") if source.reorders else UNSHUFFLED
    return [Finished(entry, info.max_token) for entry in writer.index.shards], shuffle, NOTHING_KEPT


def is_one_file(conversion: Conversion, destination: Path) -> bool:
    """Return whether a destination is one file, and not a folder of shards."""
    suffix, held_out = FORMATS[conversion.target].suffix, conversion.val_fraction or conversion.val_last_shard
    several = conversion.num_shards or conversion.shard_bytes or held_out or shard_range_of(conversion) != WHOLE
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
    written = (destination, partial_path(destination), partial_path(scatter_path(destination)))
    taken = {path.resolve() for path in written}
    for path in sources:
        if taken & {path.resolve(), *path.resolve().parents}:
            raise ConvertError(f"{destination}: is or holds the source {path}; choose another output")


def _write_file(
    plan: ShardPlan, path: Path, conversion: Conversion, workers: Workers
) -> tuple[list[Finished], Shuffle, Kept]:
    """Write the one file of a plan in this process."""
    source, [cut] = plan.source, plan.cuts
    if not conversion.overwrite:
        refuse_existing(path)
    shuffle = choose_shuffle(source, conversion.shuffle_method, [cut], conversion.memory_bytes, workers=1)
    require_room(path.parent, plan.shard_bytes(0) + shuffle.temp_bytes, 1)
    with scattered(source, shuffle, path, workers._replace(engine=Engine())) as readable:
        workers.shown.begin("writing", source.num_batches * source.meta.batch_tokens)
        task = ShardTask(
            readable, conversion.target, path, *cut, source.meta, in_store=False, files=plan.files,
            overwrite=bool(conversion.overwrite), split=plan.shards[0].split,
        )  # fmt: skip
        return [write_shard(task, workers.shown.advance)], shuffle, NOTHING_KEPT


def _write_folder(
    plan: ShardPlan, destination: Path, conversion: Conversion, workers: Workers
) -> tuple[list[Finished], Shuffle, Kept]:
    """Fill the `.partial/` of a destination, and publish it if it is the whole."""
    part, overwrite = shard_range_of(conversion), bool(conversion.overwrite)
    shards = part.shards(len(plan.cuts))
    if not shards:  # more jobs than shards
        return [], NOTHING_LEFT, NOTHING_KEPT
    if conversion.resume and not overwrite and destination.exists():
        finished = _require_result(plan, destination)
        return finished, NOTHING_LEFT, Kept.of(finished, 0.0)
    with PartialDirectory(destination, overwrite=overwrite, shared=part != WHOLE) as folder:
        tasks = {shard: plan.task(shard, folder.partial_path) for shard in shards}
        journal = Journal(folder, plan.head(), tasks, conversion, workers)
        with journal.kept_for_resume():
            finished, shuffle = _write_missing(plan, journal, folder.partial_path, conversion, workers)
            _add_tables(folder.partial_path, plan, part, finished)
        return finished, shuffle, journal.kept


def _write_missing(
    plan: ShardPlan, journal: Journal, folder: Path, conversion: Conversion, workers: Workers
) -> tuple[list[Finished], Shuffle]:  # fmt: skip
    missing, shuffle = journal.missing, NOTHING_LEFT
    if missing:
        cuts, node = [plan.cuts[shard] for shard in missing], workers.engine.workers_per_node
        shuffle = choose_shuffle(plan.source, conversion.shuffle_method, cuts, conversion.memory_bytes, node)
    require_room(folder, sum(map(plan.shard_bytes, missing)) + shuffle.temp_bytes, plan.num_inodes())
    first = shard_range_of(conversion).shards(len(plan.cuts))[0]
    with scattered(plan.source, shuffle, folder / plan.name(first), workers) as source:
        workers.shown.begin("writing", source.num_batches * source.meta.batch_tokens)
        workers.shown.keep(journal.kept.tokens)
        tasks = {shard: replace(task, source=source) for shard, task in missing.items()}
        finished = journal.run(write_shard, tasks)
    require_unchanged(plan.source.paths, plan.files)
    return finished, shuffle


def _require_result(plan: ShardPlan, destination: Path) -> list[Finished]:
    """Accept an existing destination as the result of the same conversion, or refuse it."""
    source = plan.source
    if (destination / INDEX_NAME).exists():
        index = ShardIndex.load(destination).without_max_token()  # it follows from the rest
        shards = [(plan.name(shard), stop - start) for shard, (start, stop) in enumerate(plan.cuts)]
        digests = [source.file_of(*cut)[1] for cut in plan.cuts]
        same = (
            (index.meta, index.shuffle, index.source) == (source.meta, source.shuffle, source.description)
            and [(entry.path, entry.num_batches) for entry in index.shards] == shards
            and [known and entry.sha256 for known, entry in zip(digests, index.shards, strict=True)] == digests
        )
        if is_result(destination, same, map(Path, plan.files)):
            return [Finished(entry, None) for entry in index.shards]
    raise ConvertError(f"{destination}: exists already and is no result of this conversion; pass --force to replace it")


def _add_tables(folder: Path, plan: ShardPlan, part: ShardRange, finished: list[Finished]) -> None:
    """Copy the document tables to the folder of the first shard, and write the `shards.json` of a whole store."""
    source, row = plan.source, FORMATS[plan.target]
    if 0 in part.shards(len(plan.cuts)) and not row.tokens_only:
        for path, table in zip(source.document_files, source.document_parts, strict=True):
            copy_table(path, folder / table.path)
            check_documents(folder / table.path, table)
    if part == WHOLE and row.holds_batches:
        entries = tuple(done.entry for done in finished)
        index = ShardIndex(
            source.meta, entries, source.shuffle, source.description, documents=source.document_parts
        )  # fmt: skip
        index.with_max_token(done.max_token for done in finished).save(folder)
