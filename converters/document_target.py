"""Documents to a store of streams, or to batches: their tokens are staged in raw files, and packed into rows."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5 import StoreMeta
from zb_hdf5.converters.batch_target import is_one_file, refuse_bad_destination, write_batches
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.documents import DocumentSource
from zb_hdf5.converters.engines import Workers
from zb_hdf5.converters.journal import how_to_go_on, refuse_interrupted, remove_journals
from zb_hdf5.converters.packed import PackedSource
from zb_hdf5.converters.reports import Done, Report, StreamReport
from zb_hdf5.converters.shard import SHARDS, with_largest_token
from zb_hdf5.converters.source import OpenFiles, TokenCounts, require_pad_id
from zb_hdf5.converters.token_files import TokensPlan, routes_of, write_raw_tokens, write_stream
from zb_hdf5.documents.document_table import DocumentFile, documents_path
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import PartialDirectory, ScratchDirectory, partial_path, refuse_existing, remove_scratch
from zb_hdf5.spec import NO_CODEC, SHARD_PREFIX, TokenArray
from zb_hdf5.store.streams import index_streams

#: The options that decide a store, besides its tokens.
_DECIDING: Final = (
    "batch_size", "seq_len", "seed", "shuffle", "packing", "remainder", "pad_id", "num_shards", "shard_bytes",
    "val_fraction", "val_last_shard", "codec", "tokens_only",
)  # fmt: skip
#: Bytes of the source of one staging file. The cuts do not depend on the workers: any number of them can go on with it.
STAGING_BYTES: Final = 64 << 20
#: Enough for the workers of some nodes, and not too many files.
MIN_STAGING_FILES: Final = 256
MAX_STAGING_FILES: Final = 4096


class StagingFile(NamedTuple):
    """Staged documents: raw tokens, and a table of the documents with the same name and a suffix."""

    path: Path
    split: str
    num_tokens: int
    token_counts: TokenCounts


def staging_path(folder: Path, number: int) -> Path:
    """Return the path of a staging file."""
    return folder / f"{SHARD_PREFIX}{number:05}.tokens"


class StagedTokens:
    """The staging files of one split as one document stream. See `DocumentStream`."""

    def __init__(self, files: Sequence[StagingFile], dtype: np.dtype[Any]) -> None:
        self.split = files[0].split
        self._tables = [documents_path(file.path) for file in files]
        self._open_files, self._itemsize = OpenFiles([file.path for file in files]), dtype.itemsize
        self._starts = [0, *accumulate(file.num_tokens for file in files)]
        self.num_tokens = self._starts[-1]

    def documents(self) -> Iterable[DocumentFile]:
        return map(DocumentFile, self._tables)

    def read_into(self, name: str, start: int, out: TokenArray) -> None:
        done = 0
        while done < len(out):
            number = bisect_right(self._starts, start + done) - 1
            begin = start + done - self._starts[number]
            take = min(len(out) - done, self._starts[number + 1] - start - done)
            self._open_files.read_into(number, begin * self._itemsize, out[done : done + take])
            done += take


class StagedSource(PackedSource):
    """Batches of the packed rows of staged documents."""

    def __init__(
        self,
        files: Sequence[StagingFile],
        folder: Path,
        meta: StoreMeta,
        options: Conversion,
        pad_id: int,
        description: dict[str, Any],
        paths: list[Path],
    ) -> None:
        counts = TokenCounts()
        for file in files:
            counts.add(file.token_counts)
        splits = dict.fromkeys(file.split for file in files)
        streams = [StagedTokens([file for file in files if file.split == split], meta.dtype) for split in splits]
        staged = [path for file in files for path in (file.path, documents_path(file.path))]
        super().__init__(
            streams, folder, meta, options, pad_id, description=description, paths=[*paths, *staged],
            token_counts=counts,
        )  # fmt: skip


def stage_and_write(source: DocumentSource, conversion: Conversion, workers: Workers) -> Report | Done:
    """Pack and shuffle documents into a batch store."""
    # their tokens lie in `<destination>.tokens.partial/` meanwhile: as much disk again as the store
    destination, start_s = Path(local_path(conversion.destination)), time.monotonic()
    refuse_bad_destination(source.paths, destination)
    meta = StoreMeta(
        conversion.batch_size or 0, conversion.seq_len or 0, source.dtype,
        (conversion.seed or 0) if conversion.shuffle else 0, 0, 0, source.vocab_size, source.tokenizer,
    )  # fmt: skip
    pad_id = source.boundary_token_id or 0 if conversion.pad_id is None else conversion.pad_id
    require_pad_id(pad_id, meta)
    plan, staging = staging_plan(source, conversion), destination.with_name(destination.name + ".tokens")
    if plan.is_made(destination, conversion):
        remove_scratch(staging)
        return Done(destination)
    _require_free(destination, conversion)
    with ScratchDirectory(staging) as folder:
        paths = [staging_path(folder.partial_path, number) for number in range(len(plan.routes))]
        made = plan.write(write_raw_tokens, paths, folder, conversion, workers)
        staged = [
            StagingFile(task.path, task.route.split, done.token_count, done.counts.tokens) for task, done in made.files
        ]
        meta = replace(meta, document_count=made.counts.documents)
        held_out = {"val_fraction": conversion.val_fraction, "val_seed": conversion.seed}
        described = {"packing": conversion.packing, **(held_out if conversion.val_fraction else {})}
        try:
            description = {**plan.description, **described}
            rows = StagedSource(staged, folder.partial_path, meta, conversion, pad_id, description, source.paths)
            report = write_batches(rows, replace(conversion, num_shards=None, shard_bytes=None), workers)
        except BaseException as error:
            error.add_note(f"the tokens are kept in {folder.partial_path}: {how_to_go_on(bool(conversion.overwrite))}")
            raise
    return replace(
        report, documents=made.counts, packing=conversion.packing or "", batches_of_split=rows.batches_of_split,
        documents_kept=made.tokens_kept, seconds=time.monotonic() - start_s,
    )  # fmt: skip


def staging_plan(source: DocumentSource, conversion: Conversion) -> TokensPlan:
    """Cut the documents so that many workers have work. The stored bytes do not depend on the cuts."""
    num_bytes = sum(path.stat().st_size for path in source.paths)
    wanted = max(MIN_STAGING_FILES, min(MAX_STAGING_FILES, num_bytes // STAGING_BYTES))
    count = None if conversion.val_last_shard or not source.groups else min(len(source.groups), wanted)
    deciding = {name: getattr(conversion, name) for name in _DECIDING}
    return TokensPlan(source, routes_of(source, conversion, count), deciding)


def _require_free(destination: Path, conversion: Conversion) -> None:
    """Refuse at once what `write_batches` would refuse after hours of tokenizing."""
    several = conversion.num_shards or conversion.shard_bytes or conversion.val_fraction or conversion.val_last_shard
    is_one_file(conversion.target, destination, several=bool(several))
    if not conversion.overwrite:
        refuse_existing(destination)
        if not conversion.resume:
            refuse_interrupted(partial_path(destination), SHARDS)


def write_streams(source: DocumentSource, conversion: Conversion, workers: Workers) -> StreamReport | Done:
    """Write a store of streams. Its bytes depend on the source and on the options, never on the workers."""
    destination, start_s = Path(local_path(conversion.destination)), time.monotonic()
    refuse_bad_destination(source.paths, destination)
    plan, codec = stream_plan(source, conversion), conversion.codec or NO_CODEC
    if plan.is_made(destination, conversion):
        return Done(destination)
    with PartialDirectory(destination, overwrite=bool(conversion.overwrite)) as folder:
        count = len(plan.routes)
        paths = [folder.partial_path / f"{SHARD_PREFIX}{number:05}-of-{count:05}.h5" for number in range(count)]
        made = plan.write(write_stream, paths, folder, conversion, workers, codec=codec)
        splits = {task.path.name: task.route.split for task, _ in made.files}
        described = with_largest_token(plan.description, (done.max_token for _, done in made.files))
        index = index_streams(paths, splits=splits, source=described)
        index.save(folder.partial_path)
        folder.on_published(remove_journals)
    return StreamReport(destination, index, made.counts, time.monotonic() - start_s, made.files_kept, made.tokens_kept)


def stream_plan(source: DocumentSource, conversion: Conversion) -> TokensPlan:
    """Deal the documents of a source to streams."""
    options: dict[str, Any] = {} if conversion.codec in (None, NO_CODEC) else {"codec": conversion.codec}
    return TokensPlan(source, routes_of(source, conversion, conversion.num_shards), options)
