"""The plan of a conversion of documents: what each file gets, for streams, for another trainer, or staged for rows."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5 import ArgumentError, ConvertError, StoreMeta
from zb_hdf5.converters.conversion import MOST_SHARDS, STREAM
from zb_hdf5.converters.journal import file_states, meta_to_json
from zb_hdf5.converters.least_dtype import at_least
from zb_hdf5.converters.plan import Plan, TargetFiles, Task, names_of_shards
from zb_hdf5.converters.routes import ShardDocuments, assign_documents, num_groups_of_first_split
from zb_hdf5.converters.settings import Settings
from zb_hdf5.converters.stream_target import FACTS_KEPT, WORK_DIGEST, WRITTEN_META, StreamFiles
from zb_hdf5.converters.trainer_target import TrainerFiles
from zb_hdf5.errors import Remedy
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.spec import DEFAULT_CHUNK_TOKENS, NO_BOUNDARY, NO_CODEC, STREAM_LAYOUT
from zb_hdf5.store.format_list import document_targets, format_named

#: (bytes of the source of one staged stream, the most of these): enough for the workers of some nodes, and not too many
#: files. The cuts do not depend on the workers: any number of them can go on with it.
STAGED: Final = ((4 << 20, 256), (64 << 20, 4096))
MIN_STAGED: Final = 2
#: Files of a shard: its tokens, and the documents or the pieces in it; and of a store: its folder, and the index.
FILES_OF_SHARD: Final = 2
FILES_OF_STREAMS: Final = 2


def plan_of_documents(source: DocumentSource, settings: Settings) -> Plan:
    """Deal the documents of a source to files: as asked, or for rows so that many workers have work.

    Raises
    ------
    ArgumentError
        If the source has several splits, and the target is one file.
    ConvertError
        If the format of the target would lose fields or facts of the documents.
    """
    is_of_bytes = source.dtype.itemsize == 1
    source = _with_dtype(source, at_least(source.dtype, settings))
    _require_boundary(source)
    if settings.target.format in document_targets():
        return _of_trainer(source, settings, is_of_bytes=is_of_bytes)
    is_staged = not settings.target.is_stream
    codec = NO_CODEC if is_staged else settings.target.codec
    routes = _staged(source, settings) if is_staged else _dealt(source, settings)
    meta = _meta_of(source, codec)
    identity = _identity(source, routes)
    decided = {**identity, "codec": codec}
    work = _work_digest(identity, _deciding(source, settings))
    facts = {
        **decided,
        "target": STREAM,
        WRITTEN_META: meta_to_json(meta),
        FACTS_KEPT: ["ids"] if source.has_ids else [],
        WORK_DIGEST: work,
    }
    is_auto = settings.target.dtype == "auto"
    return Plan(
        source=source,
        target=StreamFiles(),
        tasks=_tasks(source, routes, StreamFiles(), names_of_shards(len(routes), ".h5"), meta),
        decided=decided if is_staged else facts,  # tokens that are staged for rows fit any shape and shuffle of them
        facts=facts,
        description={**source.description, WORK_DIGEST: work},
        files=identity["files"],
        inodes=FILES_OF_SHARD * len(routes) + FILES_OF_STREAMS,
        lacks_vocab_size=source.dtype == np.uint32 and not source.vocab_size and is_auto,
    )


def _with_dtype(source: DocumentSource, dtype: np.dtype[Any]) -> DocumentSource:
    """Return a source whose ids are stored in a dtype."""
    if dtype == source.dtype:
        return source
    found = copy(source)
    found.dtype = dtype
    found.identity = {**source.identity, "dtype": dtype.name}
    return found


def _require_boundary(source: DocumentSource) -> None:
    """Raise `ArgumentError` if the dtype of the ids does not hold the boundary token: now, and not in each worker."""
    boundary = source.boundary_token_id
    if boundary is not None and boundary > np.iinfo(source.dtype).max:
        raise ArgumentError(
            f"{source.paths[0]}: expected a boundary token that {source.dtype.name} holds, found {boundary}: name a "
            "larger dtype",
            options=["dtype"],
        )


def _of_trainer(source: DocumentSource, settings: Settings, *, is_of_bytes: bool) -> Plan:
    """Return the plan of the files of another trainer.

    Parameters
    ----------
    is_of_bytes
        Whether the source has ids of one byte.
    """
    target = settings.target
    routes = _dealt(source, settings)
    files = TrainerFiles.of(target.format, source, _meta_of(source, NO_CODEC))
    if is_of_bytes:
        files.note_of_bytes(target.destination)
    names = _names_by_split(routes, files.writer.suffix)
    if target.is_one_file and len(routes) > 1:
        splits = dict.fromkeys(each.split for each in routes)
        raise ArgumentError(
            f"{target.path}: is one file, and the source has the splits {', '.join(splits)}: name a folder"
        )
    decided = {
        **_identity(source, routes),
        "target": target.format,
        WRITTEN_META: meta_to_json(files.written),
        FACTS_KEPT: list(files.facts),
    }
    return Plan(
        source=source,
        target=files,
        tasks=_tasks(source, routes, files, names, files.meta, source.num_tokens or 0),
        decided=decided,
        facts=decided,
        description=source.description,
        files=decided["files"],
        inodes=sum(len(files.files(name)) for name in names) + (not target.is_one_file),
        left_behind=_require_place(source, settings),
        lacks_vocab_size=not files.written.vocab_size and source.has_documents,  # records have that of their store
    )


def _meta_of(source: DocumentSource, codec: str) -> StoreMeta:
    """Return the tokens of a stream of the documents."""
    boundary = source.boundary_token_id
    return StoreMeta(
        batch_size=1,
        seq_len=DEFAULT_CHUNK_TOKENS,
        dtype=source.dtype,
        vocab_size=source.vocab_size,
        tokenizer=source.tokenizer,
        boundary_token_id=NO_BOUNDARY if boundary is None else boundary,
        layout=STREAM_LAYOUT,
        fields=tuple(source.fields),
        codec=codec,
    )


def _tasks(
    source: DocumentSource,
    routes: Sequence[ShardDocuments],
    target: TargetFiles,
    names: Sequence[Path],
    meta: StoreMeta,
    num_tokens: int = 0,
) -> list[Task]:
    """Return the work of each file; with the number of all tokens, also about how much disk it takes."""
    taken = sum(each.bytes_taken for each in routes) or 1.0
    num_bytes = num_tokens * meta.dtype.itemsize
    return [
        Task(
            source=source,
            part=each,
            target=target,
            path=name,
            meta=meta,
            amount=each.num_bytes,
            num_bytes=round(num_bytes * each.bytes_taken / taken),
        )
        for each, name in zip(routes, names, strict=True)
    ]


def _names_by_split(routes: Sequence[ShardDocuments], suffix: str) -> list[Path]:
    """Return the name of the file of each route: its split, and its number there."""
    totals = Counter(each.split for each in routes)
    numbers = Counter[str]()
    names = []
    for each in routes:
        names.append(Path(f"{each.split}-{numbers[each.split]:05}-of-{totals[each.split]:05}{suffix}"))
        numbers[each.split] += 1
    return names


def _identity(source: DocumentSource, routes: Sequence[ShardDocuments]) -> dict[str, Any]:
    """Return JSON of everything that decides the tokens of every file."""
    dealt = [
        [
            each.split,
            {"fraction": each.val_fraction, "seed": each.seed} if each.val_fraction else None,
            [group[:2] for group in each.groups],
            *([each.share] if each.share else []),
        ]
        for each in routes
    ]
    return {
        "source": source.description,
        **source.identity,
        "files": file_states(source.paths),
        "routing": hashlib.sha256(json.dumps(dealt).encode()).hexdigest(),
    }


def _work_digest(identity: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the digest over all that decides a store, but for the mtime of the sources."""
    sizes = {path: size for path, (size, _) in identity["files"].items()}
    return hashlib.sha256(json.dumps([{**identity, "files": sizes}, options]).encode()).hexdigest()


def _dealt(source: DocumentSource, settings: Settings) -> list[ShardDocuments]:
    """Deal documents to the files that were asked for, or to one for each file of the source."""
    target = settings.target
    keeps_files = source.has_shards or target.shard_per_source
    return _routes(
        source,
        settings,
        1 if target.is_one_file else target.shards,
        most=None if keeps_files else MOST_SHARDS,
    )


def _staged(source: DocumentSource, settings: Settings) -> list[ShardDocuments]:
    """Deal documents to streams that become rows, whose bytes do not depend on the cuts."""
    num_bytes = sum(path.stat().st_size for path in source.paths)
    wanted = max(MIN_STAGED, *(min(most, num_bytes // size) for size, most in STAGED))
    is_per_file = settings.layout.val_last_shard or not source.groups
    return _routes(source, settings, None if is_per_file else min(num_groups_of_first_split(source), wanted))


def _routes(
    source: DocumentSource, settings: Settings, count: int | None, most: int | None = None
) -> list[ShardDocuments]:
    layout = settings.layout
    return assign_documents(
        source,
        count,
        most=most,
        val_fraction=layout.val_fraction,
        val_last_shard=layout.val_last_shard,
        seed=layout.seed,
    )


def _deciding(source: DocumentSource, settings: Settings) -> dict[str, Any]:
    """Return the options that decide a store, besides its tokens; of rows None for one that is off."""
    target = settings.target
    codec = None if target.codec == NO_CODEC else target.codec
    if target.is_stream:
        return {} if codec is None else {"codec": codec}
    rows = settings.layout.of_records(source.record_tokens, source.paths[0])
    is_sized = target.has_requested_shards and target.shards is None
    return {
        "batch_size": rows.batch_rows,
        "seq_len": rows.row_tokens,
        "seed": rows.seed,
        "shuffle": rows.shuffle,
        "packing": rows.packing,
        "remainder": rows.remainder,
        "pad_id": rows.pad_id,
        "num_shards": target.shards,
        "shard_bytes": target.shard_size if is_sized else None,
        "val_fraction": rows.val_fraction,
        "val_last_shard": rows.val_last_shard or None,
        "codec": codec,
        "tokens_only": target.tokens_only or None,
    }


def _require_place(source: DocumentSource, settings: Settings) -> str:
    """Return the words for all that is left behind; `ConvertError` if the conversion does not allow it."""
    row = format_named(settings.target.format)
    lost = _left_behind(source, row)
    if lost and not settings.target.tokens_only:
        raise ConvertError(
            f"{source.paths[0]}: {row.noun} have no place for all of it: the conversion {lost}",
            remedy=Remedy.TOKENS_ONLY,
        )
    return lost


def _left_behind(source: DocumentSource, row: FormatRow) -> str:
    """Return the words for all that documents have and a format has no place for, or ""."""
    lost = []
    held = row.holds_fields
    names = [field.name for field in source.fields if held is not None and field.name not in held]
    if names:
        lost.append(f"the {'field' if len(names) == 1 else 'fields'} {', '.join(names)}")
    if source.has_ids and not row.holds_ids:
        lost.append("the ids of documents")
    if source.has_metadata and not row.holds_metadata:
        lost.append("the metadata of documents")
    if source.spans_codec:
        lost.append("the spans of documents")
    if source.left_out:
        lost.append(source.left_out)
    is_marked = source.boundary_token_id is not None
    if source.has_documents and not is_marked and (row.needs_boundary or not row.holds_documents):
        lost.append("the ends of documents, which no token marks")
    return f"leaves behind {' and '.join(lost)}" if lost else ""
