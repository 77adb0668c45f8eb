"""Documents to a batch store: their tokens are staged in raw files, packed into rows, and converted like any source."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5 import ArgumentError, StoreMeta
from zb_hdf5.converters.batch_target import is_one_file, refuse_bad_destination, write_batches
from zb_hdf5.converters.documents import DocumentSource, route
from zb_hdf5.converters.journal import how_to_go_on, refuse_interrupted
from zb_hdf5.converters.options import Conversion
from zb_hdf5.converters.packed import PackedSource
from zb_hdf5.converters.reports import Done, Report
from zb_hdf5.converters.shard import SHARDS
from zb_hdf5.converters.source import OpenFiles, TokenCounts
from zb_hdf5.converters.task import Workers
from zb_hdf5.converters.token_files import TokensPlan, write_raw_tokens
from zb_hdf5.documents.document_table import DocumentFile, documents_path
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import ScratchDirectory, partial_path, refuse_existing, remove_scratch
from zb_hdf5.spec import SHARD_PREFIX, TokenArray
from zb_hdf5.token_values import token_limit

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
    """Pack and shuffle documents into a batch store.

    The tokens lie in `<destination>.tokens.partial/` meanwhile: as much disk again as the store. An exception leaves
    them there; `resume` goes on with those that are whole, and with the finished shards.

    Raises
    ------
    ConvertError
        If the destination exists, or is or holds a source, or the documents do not fill a batch.
    """
    destination, start_s = Path(local_path(conversion.destination)), time.monotonic()
    refuse_bad_destination(source.paths, destination)
    plan, pad_id = staging_plan(source, conversion), _pad_id(source, conversion)
    if conversion.resume and not conversion.overwrite and destination.is_dir() and plan.is_result(destination):
        remove_scratch(_tokens_path(destination))
        return Done(destination)
    _require_free(destination, conversion)
    workers.shown.begin("tokenizing" if source.tokenizer else "cutting", plan.num_bytes, "B")
    with ScratchDirectory(_tokens_path(destination)) as folder:

        def path_of(number: int) -> Path:
            return staging_path(folder.partial_path, number)

        made = plan.write(write_raw_tokens, path_of, folder, conversion, workers)
        staged = [
            StagingFile(task.path, task.route.split, done.token_count, done.counts.tokens) for task, done in made.files
        ]
        meta = StoreMeta(
            conversion.batch_size or 0, conversion.seq_len or 0, source.dtype,
            (conversion.seed or 0) if conversion.shuffle else 0, 0, made.counts.documents, source.vocab_size,
            source.tokenizer,
        )  # fmt: skip
        try:
            description = {**plan.description, **_describe(conversion)}
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
    last = bool(conversion.val_last_shard)
    count = None if last or not source.groups else min(len(source.groups), wanted)
    routes = route(
        source, count, val_fraction=conversion.val_fraction or 0.0, val_last_shard=last, seed=conversion.seed or 0
    )
    return TokensPlan(source, routes, {name: getattr(conversion, name) for name in _DECIDING})


def _tokens_path(destination: Path) -> Path:
    """Return the name, without ".partial", of the folder for the tokens of a destination."""
    return destination.with_name(destination.name + ".tokens")


def _require_free(destination: Path, conversion: Conversion) -> None:
    """Refuse at once what `write_batches` would refuse after hours of tokenizing."""
    several = conversion.num_shards or conversion.shard_bytes or conversion.val_fraction or conversion.val_last_shard
    is_one_file(conversion.target, destination, several=bool(several))
    if not conversion.overwrite:
        refuse_existing(destination)
        if not conversion.resume:
            refuse_interrupted(partial_path(destination), SHARDS)


def _describe(conversion: Conversion) -> dict[str, Any]:
    held_out = {"val_fraction": conversion.val_fraction, "val_seed": conversion.seed}
    return {"packing": conversion.packing, **(held_out if conversion.val_fraction else {})}


def _pad_id(source: DocumentSource, conversion: Conversion) -> int:
    pad_id = conversion.pad_id if conversion.pad_id is not None else source.boundary_token_id or 0
    if not 0 <= pad_id <= token_limit(source.dtype, source.vocab_size):
        raise ArgumentError(f"pad_id must be below the vocabulary's {source.vocab_size:,}, found {pad_id}")
    return pad_id
