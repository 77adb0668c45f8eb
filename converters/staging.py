"""Documents to a batch store: their tokens are staged in raw files, packed into rows, and converted like any source."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5 import ArgumentError, StoreMeta
from zb_hdf5.converters import run as pipe
from zb_hdf5.converters.documents import DocumentCounts, DocumentSource, route
from zb_hdf5.converters.journal import how_to_go_on, refuse_interrupted
from zb_hdf5.converters.npy_files import OpenFiles
from zb_hdf5.converters.packed import PackedSource, PackOptions
from zb_hdf5.converters.run import WorkOptions
from zb_hdf5.converters.shard import SHARDS
from zb_hdf5.converters.source import TokenCounts
from zb_hdf5.converters.token_files import TokensPlan, write_raw_tokens
from zb_hdf5.documents.document_table import DocumentFile, documents_path
from zb_hdf5.files.publishing import ScratchDirectory, partial_path, refuse_existing, remove_scratch
from zb_hdf5.spec import NO_CODEC, SHARD_PREFIX, TokenArray

#: Bytes of the source of one staging file. The cuts do not depend on the workers: any number of them can go on with it.
STAGING_BYTES: Final = 64 << 20
#: Enough for the workers of some nodes, and not too many files.
MIN_STAGING_FILES: Final = 256
MAX_STAGING_FILES: Final = 4096


@dataclass(frozen=True)
class TextOptions(PackOptions):
    """The options of a batch store of documents: also those held out, and the codec with its level."""

    val_fraction: float = field(default=0.0, kw_only=True)
    val_last_shard: bool = field(default=False, kw_only=True)
    codec: str = field(default=NO_CODEC, kw_only=True)


@dataclass(frozen=True)
class IngestReport:
    """The counts of documents, and the report of the conversion; `tokens_kept` were not made again."""

    conversion: pipe.Report
    counts: DocumentCounts
    packing: str
    batches_of_split: dict[str, int]
    seconds: float
    tokens_kept: int


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
        options: PackOptions,
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


def staging_plan(source: DocumentSource, options: TextOptions) -> TokensPlan:
    """Cut the documents so that many workers have work. The stored bytes do not depend on the cuts."""
    num_bytes = sum(path.stat().st_size for path in source.paths)
    wanted = max(MIN_STAGING_FILES, min(MAX_STAGING_FILES, num_bytes // STAGING_BYTES))
    count = None if options.val_last_shard or not source.groups else min(len(source.groups), wanted)
    routes = route(
        source, count, val_fraction=options.val_fraction, val_last_shard=options.val_last_shard, seed=options.seed
    )
    return TokensPlan(source, routes, asdict(options))


def ingest_batches(
    source: DocumentSource,
    destination: str | os.PathLike[str],
    options: TextOptions,
    work: WorkOptions | None = None,
) -> IngestReport:
    """Pack and shuffle documents into an HDF5 batch store.

    The tokens lie in `<destination>.tokens.partial/` meanwhile: as much disk again as the store. An exception leaves
    them there; `resume` goes on with those that are whole, and with the finished shards.

    Raises
    ------
    ConvertError
        If the destination exists, or is or holds a source, or the documents do not fill a batch.
    """
    destination, work = Path(destination), work or WorkOptions()
    start_s = time.monotonic()
    pipe.refuse_bad_destination(source.paths, destination)
    _require_free(destination, options, work)
    plan, pad_id = staging_plan(source, options), _pad_id(source, options)
    with ScratchDirectory(_tokens_path(destination)) as folder:
        made = plan.write(write_raw_tokens, lambda number: staging_path(folder.partial_path, number), folder, work)
        meta = StoreMeta(
            options.batch_size, options.seq_len, source.dtype, options.seed if options.shuffle else 0, 0,
            made.counts.documents, source.vocab_size, source.tokenizer,
        )  # fmt: skip
        staged = [
            StagingFile(task.path, task.route.split, done.token_count, done.counts.tokens) for task, done in made.files
        ]
        try:
            description = {**plan.description, **_describe(options)}
            rows = StagedSource(staged, folder.partial_path, meta, options, pad_id, description, source.paths)
            report = pipe.convert(
                rows, "hdf5", destination, overwrite=work.overwrite, resume=work.resume, engine=work.engine,
                codec=options.codec, progress=work.begin("writing", rows.num_batches * meta.batch_tokens),
            )  # fmt: skip
        except BaseException as error:
            error.add_note(f"the tokens are kept in {folder.partial_path}: {how_to_go_on(work.overwrite)}")
            raise
    seconds = time.monotonic() - start_s
    return IngestReport(report, made.counts, options.packing, rows.batches_of_split, seconds, made.tokens_kept)


def is_ingested(source: DocumentSource, destination: Path, options: TextOptions) -> bool:
    """Return whether `destination` is the result of `ingest_batches`; then remove the leftovers of a kill."""
    if not staging_plan(source, options).is_result(destination):
        return False
    remove_scratch(_tokens_path(destination))
    return True


def _tokens_path(destination: Path) -> Path:
    """Return the name, without ".partial", of the folder for the tokens of a destination."""
    return destination.with_name(destination.name + ".tokens")


def _require_free(destination: Path, options: TextOptions, work: WorkOptions) -> None:
    """Refuse at once what `pipe.convert` would refuse after hours of tokenizing."""
    several = options.num_shards or options.shard_bytes or options.val_fraction or options.val_last_shard
    pipe.is_one_file("hdf5", destination, several=bool(several))
    if not work.overwrite:
        refuse_existing(destination)
        if not work.resume:
            refuse_interrupted(partial_path(destination), SHARDS)


def _describe(options: TextOptions) -> dict[str, Any]:
    held_out = {"val_fraction": options.val_fraction, "val_seed": options.seed} if options.val_fraction else {}
    return {"packing": options.packing, **held_out}


def _pad_id(source: DocumentSource, options: TextOptions) -> int:
    pad_id = options.pad_id if options.pad_id is not None else source.boundary_token_id or 0
    if not 0 <= pad_id < (source.vocab_size or int(np.iinfo(source.dtype).max) + 1):
        raise ArgumentError(f"pad_id must be below the vocabulary's {source.vocab_size:,}, found {pad_id}")
    return pad_id
