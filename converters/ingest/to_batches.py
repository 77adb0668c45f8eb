"""Text to a batch store: tokenized into staging files, packed into rows, then converted like any other source."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5 import ArgumentError, ConvertError, StoreMeta
from zb_hdf5.columns.reader import require_choice
from zb_hdf5.converters.ingest.packing import PACKINGS
from zb_hdf5.converters.ingest.routing import TRAIN, DocumentCounts, Recipe, plan_text_shards
from zb_hdf5.converters.ingest.staging import PackedRows, SplitRows, StagingFile, staging_paths, write_staging_file
from zb_hdf5.converters.ingest.text_plan import TextPlan
from zb_hdf5.converters.ingest.unique_ids import require_unique_ids
from zb_hdf5.converters.pipeline import run as pipe
from zb_hdf5.converters.pipeline.journal import how_to_go_on, refuse_interrupted
from zb_hdf5.converters.pipeline.plan import DEFAULT_SHARD_BYTES
from zb_hdf5.converters.pipeline.run import WorkOptions
from zb_hdf5.converters.pipeline.shard import SHARDS
from zb_hdf5.converters.sources.source import REMAINDERS, Source, TokenCounts
from zb_hdf5.core.order import GlobalOrder, SequentialOrder, write_order
from zb_hdf5.core.pieces import Pieces, concatenate, padding
from zb_hdf5.core.publishing import ScratchDirectory, partial_path, refuse_existing, remove_scratch
from zb_hdf5.formats.documents import documents_path, part_of
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import TokenArray
from zb_hdf5.text.documents import DocumentFile

#: Text of one staging file. How it is cut does not depend on the workers: any number of them can go on with it.
STAGING_BYTES: Final = 64 << 20
#: Enough for the workers of some nodes, and not too many files.
MIN_STAGING_FILES: Final = 256
MAX_STAGING_FILES: Final = 4096


@dataclass(frozen=True)
class TextOptions:
    """The options of a batch store of text.

    Attributes
    ----------
    packing
        A name in `PACKINGS`.
    shuffle
        Whether the packed rows of each split are stored in a uniformly random order.
    remainder
        Of the rows that do not fill the last batch of a split: "pad" (with rows of `pad_id`: no token is lost), "drop"
        or "error".
    pad_id
        The token of padding; None: the boundary token, or 0 if there is none.
    num_shards
        Of the training split; None: shards of 1 GiB.
    """

    batch_size: int
    seq_len: int
    seed: int = 42
    shuffle: bool = True
    packing: str = "concat"
    remainder: str = "pad"
    pad_id: int | None = None
    num_shards: int | None = None
    val_fraction: float = 0.0
    val_last_shard: bool = False


@dataclass(frozen=True)
class IngestReport:
    """The counts of documents, and the report of the conversion; `tokens_kept` were not tokenized again."""

    conversion: pipe.Report
    counts: DocumentCounts
    packing: str
    batches_of_split: dict[str, int]
    seconds: float
    tokens_kept: int


class TextSource(Source):
    """Batches of packed rows of tokenized text, split after split, each in its own order."""

    order: GlobalOrder | None = None  # of more than one split there is no order of all rows
    has_pieces = True

    def __init__(
        self,
        files: Sequence[StagingFile],
        folder: Path,
        meta: StoreMeta,
        options: TextOptions,
        pad_id: int,
        description: dict[str, Any],
        paths: list[Path],
    ) -> None:
        self.paths = [*paths, *(path for file in files for path in (file.path, documents_path(file.path)))]
        self.shuffle, self.reorders = "global" if options.shuffle else "none", options.shuffle
        self.description = description
        self._options, self._pad_id = options, pad_id
        self.token_counts = TokenCounts()
        for file in files:
            self.token_counts.add(file.token_counts)
        self._splits = [
            self._pack(number, split, [file for file in files if file.split == split], folder, meta)
            for number, split in enumerate(dict.fromkeys(file.split for file in files))
        ]
        self.document_files = [part.rows.table.path for part in self._splits]
        self.document_parts = tuple(part_of(path) for path in self.document_files)
        self.num_batches = sum(part.num_batches for part in self._splits)
        self.meta = meta
        self.shard_batches, self.shard_splits = self._cut()
        self.shard_records, self.shard_documents = self._count()
        self.meta = replace(meta, total_records=sum(self.shard_records))
        self.identity = {"packing": options.packing, "pad_id": pad_id, "splits": self.batches_of_split}

    @property
    def batches_of_split(self) -> dict[str, int]:
        """The number of batches of each split."""
        return {part.split: part.num_batches for part in self._splits}

    def _pack(self, number: int, split: str, files: list[StagingFile], folder: Path, meta: StoreMeta) -> SplitRows:
        """Pack the documents of a split, and count what is not stored."""
        options = self._options
        rows = PackedRows(files, folder, number, options.packing, meta.seq_len, meta.dtype, self._pad_id)
        order = write_order(rows.num_rows, options.seed) if options.shuffle else SequentialOrder(rows.num_rows)
        self.token_counts.drop("cropped by packing", rows.tokens_cropped)
        num_batches, rest = divmod(rows.num_rows, meta.batch_size)
        left_out = 0
        if rest and options.remainder == "error":
            raise ConvertError(
                f"{rows.num_rows:,} packed rows ({split}) are no multiple of batch_size {meta.batch_size}: {rest} are "
                "left over; pass --remainder drop or pad"
            )
        if rest and options.remainder == "pad":
            num_batches += 1
            self.token_counts.padding_rows += meta.batch_size - rest
        elif rest:
            last = order.indices(np.arange(rows.num_rows - rest, rows.num_rows))
            left_out = rows.tokens_in(last)
            self.token_counts.drop("remainder", left_out)
        if num_batches == 0:
            raise ConvertError(
                f"{rows.num_rows:,} rows of {meta.seq_len} tokens ({split}) do not fill one batch of "
                f"{meta.batch_size}; pass a smaller --batch-size, or --remainder pad"
            )
        self.token_counts.padded += num_batches * meta.batch_tokens - (rows.tokens_kept - left_out)
        return SplitRows(split, rows, order, num_batches)

    def _cut(self) -> tuple[list[int], list[str]]:
        """Return the batches and the split of each shard: none has two splits."""
        train = self._splits[0].num_batches
        per_shard = max(1, DEFAULT_SHARD_BYTES // self.meta.batch_bytes)
        num_shards = self._options.num_shards or -(-train // per_shard)
        if num_shards > train:
            raise ConvertError(f"{train:,} batches cannot fill {num_shards:,} shards; pass a smaller --shards")
        largest = -(-train // num_shards)
        batches, splits = [], []
        for part in self._splits:
            count = num_shards if part.split == TRAIN else -(-part.num_batches // largest)
            stops = [(k + 1) * part.num_batches // count for k in range(count)]
            batches += np.diff([0, *stops]).tolist()
            splits += [part.split] * count
        return batches, splits

    def _count(self) -> tuple[list[int], list[int | None]]:
        """Return the rows that hold a token and the documents that begin, of each shard."""
        size = self.meta.batch_size
        records: list[int] = []
        documents: list[int | None] = []
        for part in self._splits:
            batches = [
                count for count, split in zip(self.shard_batches, self.shard_splits, strict=True) if split == part.split
            ]
            for start, stop in pairwise([0, *np.cumsum(batches).tolist()]):
                rows = part.order.indices(np.arange(start * size, min(stop * size, part.rows.num_rows)))
                records.append(len(rows))
                documents.append(int(part.rows.documents[rows].sum()))
        return records, documents

    def read_into(self, start: int, out: TokenArray) -> None:
        """Gather the rows of consecutive batches."""
        done = 0
        first = 0
        for part in self._splits:
            here = start + done - first
            if done < len(out) and here < part.num_batches:
                count = min(len(out) - done, part.num_batches - here)
                self._read_split(part, here, out[done : done + count])
                done += count
            first += part.num_batches

    def read_pieces(self, start: int, stop: int) -> Pieces:
        """Return the pieces of the rows of batches of one split; rows behind its last one are padding."""
        first, size = 0, self.meta.batch_size
        for part in self._splits:
            if start < first + part.num_batches:
                break
            first += part.num_batches
        rows = np.arange((start - first) * size, min((stop - first) * size, part.rows.num_rows))
        found = part.rows.read_pieces(part.order.indices(rows))
        missing = (stop - start) * size - len(rows)
        return concatenate([found, padding(missing, self.meta.seq_len)]) if missing else found

    def _read_split(self, part: SplitRows, start: int, out: TokenArray) -> None:
        rows = out.reshape(-1, self.meta.seq_len)
        first = start * self.meta.batch_size
        count = min(len(rows), part.rows.num_rows - first)
        part.rows.gather_into(part.order.indices(np.arange(first, first + count)), rows[:count])
        rows[count:] = self._pad_id


def ingest_batches(
    files: Sequence[DocumentFile],
    kind: str,
    destination: str | os.PathLike[str],
    recipe: Recipe,
    options: TextOptions,
    work: WorkOptions | None = None,
) -> IngestReport:
    """Tokenize, pack and shuffle documents into an HDF5 batch store.

    The tokens lie in `<destination>.tokens.partial/` meanwhile: as much disk again as the store. An exception leaves
    them there; `resume` goes on with those that are whole, and with the finished shards.

    Parameters
    ----------
    kind
        A name in `FILE_KINDS`, for the `source` entry of `shards.json`.

    Raises
    ------
    ConvertError
        If the destination exists, or the text does not fill a batch.
    """
    destination, work = Path(destination), work or WorkOptions()
    start_s = time.monotonic()
    require_choice("packing", options.packing, tuple(PACKINGS))
    require_choice("remainder", options.remainder, REMAINDERS)
    _require_free(destination, options, work)
    plan = _plan(files, kind, recipe, options)
    pad_id = _pad_id(recipe, options, plan.vocab_size)
    with ScratchDirectory(_tokens_path(destination)) as folder:
        text = plan.tokenize(
            write_staging_file, lambda number: staging_paths(folder.partial_path, number), folder, work
        )
        meta = StoreMeta(
            options.batch_size, options.seq_len, plan.dtype, options.seed if options.shuffle else 0, 0,
            text.counts.documents, plan.vocab_size, plan.tokenizer,
        )  # fmt: skip
        staged = [
            StagingFile(task.paths[0], task.shard.split, done.token_count, done.counts.tokens)
            for task, done in text.files
        ]
        description, paths = plan.source(**_describe(options)), [file.path for file in files]
        try:
            source = TextSource(staged, folder.partial_path, meta, options, pad_id, description, paths)
            if files[0].id_column:
                require_unique_ids(source.document_files)
            report = pipe.convert(
                source, "hdf5", destination, overwrite=work.overwrite, resume=work.resume, engine=work.engine
            )
        except BaseException as error:
            error.add_note(f"the tokens are kept in {folder.partial_path}: {how_to_go_on(work.overwrite)}")
            raise
    seconds = time.monotonic() - start_s
    return IngestReport(report, text.counts, options.packing, source.batches_of_split, seconds, text.tokens_kept)


def is_ingested(
    files: Sequence[DocumentFile], kind: str, destination: str | os.PathLike[str], recipe: Recipe, options: TextOptions
) -> bool:
    """Return whether `destination` is the result of `ingest_batches`; then remove the leftovers of a kill."""
    destination = Path(destination)
    if not _plan(files, kind, recipe, options).is_result(destination):
        return False
    remove_scratch(_tokens_path(destination))
    return True


def _tokens_path(destination: Path) -> Path:
    """Return the name, without ".partial", of the folder for the tokens of a destination."""
    return destination.with_name(destination.name + ".tokens")


def _require_free(destination: Path, options: TextOptions, work: WorkOptions) -> None:
    """Say at once what `pipe.convert` would say after hours of tokenizing."""
    if destination.suffix == FORMATS["hdf5"].suffix and (
        options.num_shards or options.val_fraction or options.val_last_shard
    ):
        raise ConvertError(f"{destination}: is one file; name a folder (no .h5) to write shards or splits")
    if not work.overwrite:
        refuse_existing(destination)
        if not work.resume:
            refuse_interrupted(partial_path(destination), SHARDS)


def _plan(files: Sequence[DocumentFile], kind: str, recipe: Recipe, options: TextOptions) -> TextPlan:
    """Cut the documents so that many workers have work. The stored bytes do not depend on the cuts."""
    num_groups = sum(file.num_row_groups for file in files)
    text_bytes = sum(file.path.stat().st_size for file in files)
    wanted = max(MIN_STAGING_FILES, min(MAX_STAGING_FILES, text_bytes // STAGING_BYTES))
    count = None if options.val_last_shard else min(num_groups, wanted)
    shards = plan_text_shards(
        files, count, val_fraction=options.val_fraction, val_last_shard=options.val_last_shard, seed=options.seed
    )
    return TextPlan(files, kind, recipe, shards, asdict(options))


def _describe(options: TextOptions) -> dict[str, Any]:
    held_out = {"val_fraction": options.val_fraction, "val_seed": options.seed} if options.val_fraction else {}
    return {"packing": options.packing, **held_out}


def _pad_id(recipe: Recipe, options: TextOptions, vocab_size: int) -> int:
    pad_id = options.pad_id if options.pad_id is not None else recipe.boundary_token_id or 0
    if not 0 <= pad_id < vocab_size:
        raise ArgumentError(f"--pad-id must be below the vocabulary's {vocab_size:,}, found {pad_id}")
    return pad_id
