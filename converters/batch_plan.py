"""The plan of a conversion to batches: the shards that a source of batches is cut into, and all that is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from zb_hdf5 import ArgumentError, ConvertError, StoreMeta
from zb_hdf5.converters.batch_source import BatchSource, SourceShard
from zb_hdf5.converters.batch_target import BatchFiles
from zb_hdf5.converters.conversion import MOST_SHARDS
from zb_hdf5.converters.journal import file_states, meta_to_json
from zb_hdf5.converters.plan import BatchRange, Plan, Task, names_of_shards
from zb_hdf5.converters.settings import Settings, Target
from zb_hdf5.errors import Remedy
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.spec import DEFAULT_SPLIT, ORIGIN_ATTRIBUTES
from zb_hdf5.store.format_list import FORMATS, load_format
from zb_hdf5.store.rebuild import ONLY_IN_SOME_FILES

#: Of the first line of a journal: a plan of another version is that of another conversion.
PLAN_VERSION: Final = 2
#: The folder of a store, its index, and the journal.
FILES_OF_STORE: Final = 3


def plan_of_batches(source: BatchSource, settings: Settings) -> Plan:
    """Return the plan of a source as the target of a conversion stores it.

    Raises
    ------
    ArgumentError
        If the format of the target cannot hold such batches.
    ConvertError
        If it would lose fields or documents, or the batches cannot be cut into shards as asked.
    """
    target = settings.target
    row = FORMATS[target.format]
    if target.live and row.tokens_only:
        raise ArgumentError(f"{target.destination}: {target.format} files are never live")
    fitted = _fitted(source, settings)
    load_format(row).require(fitted.meta, target.path)
    if target.is_one_file:
        require_one_split(fitted, "name a folder of shards")
        cuts = [(0, fitted.num_batches)]
    else:
        cuts = cut_into_shards(fitted, target)
    lost = _left_behind(source, keeps_fields=not row.tokens_only, keeps_documents=not (row.tokens_only or target.live))
    if target.is_one_file and row.tokens_only:
        lost = " and ".join(filter(None, [lost, _nameless(fitted)]))
    files = file_states(fitted.paths)
    decided = _decided(fitted, target.format, cuts, files)
    per_shard = 1 + row.has_sidecar + fitted.has_pieces
    return Plan(
        source=fitted,
        target=BatchFiles(target.format),
        tasks=_tasks(fitted, target, cuts),
        decided=decided,
        facts=decided,
        description=fitted.description,
        files=files,
        inodes=1 if target.is_one_file else per_shard * len(cuts) + len(fitted.document_parts) + FILES_OF_STORE,
        left_behind=lost,
        lacks_vocab_size=fitted.lacks_vocab_size,
    )


def _decided(source: BatchSource, target: str, cuts: list[tuple[int, int]], files: dict[str, Any]) -> dict[str, Any]:
    """Return JSON of all that decides the bytes of the shards."""
    return {
        "version": PLAN_VERSION,
        "target": target,
        "meta": meta_to_json(source.meta),
        "shuffle": source.shuffle,
        "source": source.description,
        "identity": source.identity,
        "cuts": [list(cut) for cut in cuts],
        "has_pieces": source.has_pieces,
        "documents": [list(part) for part in source.document_parts],
        "files": files,
    }


def _tasks(source: BatchSource, target: Target, cuts: list[tuple[int, int]]) -> list[Task]:
    """Return the work of each shard; a lone file has the facts of the whole source."""
    code = load_format(FORMATS[target.format])
    names = names_of_shards(len(cuts), code.row.suffix)
    tasks = []
    for path, each, (start, stop) in zip(names, _shards(source, cuts), cuts, strict=True):
        tasks.append(
            Task(
                source=source,
                part=BatchRange(start, stop, each.split, None if target.is_one_file else each.documents),
                target=BatchFiles(target.format),
                path=path,
                meta=source.meta if target.is_one_file else _meta_of(source, each, start, stop),
                amount=(stop - start) * source.meta.batch_tokens,
                num_bytes=code.total_bytes(source.meta, stop - start),
            )
        )
    return tasks


def _meta_of(source: BatchSource, shard: SourceShard, start: int, stop: int) -> StoreMeta:
    """Return the shape of a shard, with its documents and its records: the shapes of all add up to the whole."""
    meta = source.meta
    records = shard.records
    if records is None:
        rest = max(0, meta.total_records - start * meta.batch_size)
        records = rest if stop == source.num_batches else (stop - start) * meta.batch_size
    return replace(meta, total_records=meta.total_records and records, document_count=shard.documents or 0)


def _shards(source: BatchSource, cuts: list[tuple[int, int]]) -> Sequence[SourceShard]:
    """Return the batches of the source, or as its batches are cut, which are then of one split."""
    if cuts == source.cuts:
        return source.shards
    split = source.shards[0].split if source.shards else DEFAULT_SPLIT
    return [SourceShard(stop - start, split) for start, stop in cuts]


def cut_into_shards(source: BatchSource, target: Target) -> list[tuple[int, int]]:
    """Return (start, stop) of each shard, in batches: consecutive, and none empty."""
    if source.is_cut or (source.shards and not target.has_requested_shards):
        return source.cuts
    if target.has_requested_shards:
        require_one_split(source, "leave out shards and shard_size", options=["shards", "shard_size"])
    total = source.num_batches
    count = number_of_shards(total, source.meta, target)
    return [*pairwise(k * total // count for k in range(count + 1))]


def number_of_shards(num_batches: int, meta: StoreMeta, target: Target) -> int:
    """Return the number of shards that was asked for, or that their size gives: by default at most `MOST_SHARDS`."""
    per_shard = max(1, target.shard_size // meta.batch_bytes)
    by_size = -(-num_batches // per_shard)
    count = target.shards or (by_size if target.has_requested_shards else min(by_size, MOST_SHARDS))
    if count > num_batches:
        raise ConvertError(f"{num_batches:,} batches cannot fill {count:,} shards", remedy=Remedy.FILL_THE_SHARDS)
    return count


def require_one_split(source: BatchSource, cure: str, options: Sequence[str] = ()) -> None:
    """Raise `ConvertError` if shards of several splits would be mixed.

    Parameters
    ----------
    source
        The batches that become one sequence.
    cure
        The cure that the caller has.
    options
        The names of options in the cure.
    """
    splits = list(dict.fromkeys(shard.split for shard in source.shards))
    if len(splits) > 1:
        raise ConvertError(
            f"the source has the splits {', '.join(splits)}, which must not be mixed: {cure}", options=options
        )


def _fitted(source: BatchSource, settings: Settings) -> BatchSource:
    """Return a source as its target stores it: with its codec, and without fields and documents where it has none.

    `ConvertError` if a format of tokens only would lose them, and the conversion does not allow it.
    """
    codec = settings.target.codec
    if not FORMATS[settings.target.format].tokens_only:
        return source.with_codec(codec)
    require_place(source.paths[0], _left_behind(source, keeps_fields=False, keeps_documents=False), settings.target)
    return source.with_tokens_only().with_codec(codec)


def require_place(path: Path, lost: str, target: Target) -> None:
    """Raise `ConvertError` if something would be lost in files of tokens only, and the conversion does not allow it.

    Parameters
    ----------
    path
        The source.
    lost
        The words for all that it has besides, or "".
    """
    if lost and not target.tokens_only:
        raise ConvertError(
            f"{path}: {target.format} files hold tokens and nothing else: the conversion {lost}",
            remedy=Remedy.TOKENS_ONLY,
        )


def require_place_of_rows(source: DocumentSource, target: Target) -> None:
    """Raise as `require_place` if the target cannot hold all that the rows of some documents have."""
    if FORMATS[target.format].tokens_only:
        names = [field.name for field in source.fields]
        require_place(source.paths[0], _in_words(names, has_pieces=True, has_documents=True), target)


def _left_behind(source: BatchSource, *, keeps_fields: bool, keeps_documents: bool) -> str:
    """Return the words for all that a source has and a target cannot hold, or ""."""
    return _in_words(
        [] if keeps_fields else [field.name for field in source.meta.fields],
        has_pieces=source.has_pieces and not keeps_documents,
        has_documents=bool(source.document_files) and not keeps_documents,
    )


def _in_words(names: Sequence[str], *, has_pieces: bool, has_documents: bool) -> str:
    """Return the words for fields and documents that are left behind, or ""."""
    lost = []
    if names:
        noun = "field" if len(names) == 1 else "fields"
        lost.append(f"the {noun} {', '.join(names)}")
    if has_pieces:
        lost.append("the places of documents in the records")
    if has_documents:
        lost.append("the document table")
    return f"leaves behind {' and '.join(lost)}" if lost else ""


def _nameless(source: BatchSource) -> str:
    """Return the words for the facts about the tokens for which a lone file of tokens only has no place, or ""."""
    if not source.origin:
        return ""
    copies = set(source.origin.get("source") or {}) & set(ORIGIN_ATTRIBUTES)
    lost = [name for name in ONLY_IN_SOME_FILES if getattr(source.meta, name)]
    facts = [*source.origin, *sorted(copies), *lost]
    return f"does not name {', '.join(facts)}, as such a file has no place for it"
