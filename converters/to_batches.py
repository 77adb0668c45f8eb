"""Text to a batch store: tokenized into staging files, packed into rows, then converted like any other source."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from zb_hdf5 import ArgumentError, StoreMeta
from zb_hdf5.converters import run as pipe
from zb_hdf5.converters.journal import how_to_go_on, refuse_interrupted
from zb_hdf5.converters.packed import PackedSource, PackOptions
from zb_hdf5.converters.routing import DocumentCounts, Recipe, plan_text_shards
from zb_hdf5.converters.run import WorkOptions
from zb_hdf5.converters.shard import SHARDS
from zb_hdf5.converters.source import TokenCounts
from zb_hdf5.converters.staging import StagedTokens, StagingFile, staging_paths, write_staging_file
from zb_hdf5.converters.text_plan import TextPlan
from zb_hdf5.converters.unique_ids import require_unique_ids
from zb_hdf5.files.publishing import ScratchDirectory, partial_path, refuse_existing, remove_scratch
from zb_hdf5.formats.document_file import documents_path
from zb_hdf5.spec import NO_CODEC
from zb_hdf5.text.corpus import DocumentFile

#: Text of one staging file. How it is cut does not depend on the workers: any number of them can go on with it.
STAGING_BYTES: Final = 64 << 20
#: Enough for the workers of some nodes, and not too many files.
MIN_STAGING_FILES: Final = 256
MAX_STAGING_FILES: Final = 4096


@dataclass(frozen=True)
class TextOptions(PackOptions):
    """The options of a batch store of text: also which documents are held out, and the codec with its level."""

    val_fraction: float = field(default=0.0, kw_only=True)
    val_last_shard: bool = field(default=False, kw_only=True)
    codec: str = field(default=NO_CODEC, kw_only=True)


@dataclass(frozen=True)
class IngestReport:
    """The counts of documents, and the report of the conversion; `tokens_kept` were not tokenized again."""

    conversion: pipe.Report
    counts: DocumentCounts
    packing: str
    batches_of_split: dict[str, int]
    seconds: float
    tokens_kept: int


class TextSource(PackedSource):
    """Batches of packed rows of tokenized text."""

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
        If the destination exists, or is or holds a source, or the text does not fill a batch.
    """
    destination, work = Path(destination), work or WorkOptions()
    start_s = time.monotonic()
    pipe.refuse_bad_destination([file.path for file in files], destination)
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
                source, "hdf5", destination, overwrite=work.overwrite, resume=work.resume, engine=work.engine,
                codec=options.codec,
            )  # fmt: skip
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
    several = options.num_shards or options.shard_bytes or options.val_fraction or options.val_last_shard
    pipe.is_one_file("hdf5", destination, several=bool(several))
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
        raise ArgumentError(f"pad_id must be below the vocabulary's {vocab_size:,}, found {pad_id}")
    return pad_id
