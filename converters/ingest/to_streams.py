"""Text to a store of token streams: one HDF5 file per shard, in as many processes as there are."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zb_hdf5 import ConvertError
from zb_hdf5.converters.ingest.journal import FinishedTokens, describe_work, digest_of_work, is_made_of, tokenize
from zb_hdf5.converters.ingest.routing import Recipe, ShardPlan, Tally, describe_files, encode_shard, plan_text_shards
from zb_hdf5.converters.pipeline.engines import Engine
from zb_hdf5.converters.pipeline.journal import remove_journals
from zb_hdf5.converters.pipeline.shard import Progress, no_progress
from zb_hdf5.core.publishing import PartialDirectory, partial_path
from zb_hdf5.formats.hdf5.stream_writer import HDF5ShardWriter
from zb_hdf5.spec import NO_BOUNDARY, SHARD_PREFIX, stored_dtype
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.streams import index_streams
from zb_hdf5.text.documents import DocumentFile
from zb_hdf5.text.tokenizers import Tokenizer, load_tokenizer, token_dtype


@dataclass(frozen=True)
class StreamTask:
    """One shard to tokenize and write. Picklable."""

    path: Path
    plan: ShardPlan
    recipe: Recipe
    dtype: str
    vocab_size: int
    tokenizer: str
    num_threads: int
    before: FinishedTokens | None = None

    def tokens_done(self) -> int:
        """Return how far another process is, by the size of its file; one that was there tells nothing."""
        for path in (self.path, partial_path(self.path)) if self.before is None else ():
            with contextlib.suppress(OSError):
                return path.stat().st_size // stored_dtype(self.dtype).itemsize
        return 0


def write_stream(task: StreamTask, progress: Progress = no_progress) -> FinishedTokens:
    """Tokenize the documents of one shard into its file, unless that is there and intact."""
    if task.before is not None and task.path.exists() and _file_sha256(task.path) == task.before.file_sha256:
        return task.before.as_kept()
    tally = Tally()
    boundary = task.recipe.boundary_token_id
    with HDF5ShardWriter(
        task.path,
        dtype=task.dtype,
        boundary_token_id=NO_BOUNDARY if boundary is None else boundary,
        vocab_size=task.vocab_size,
        tokenizer=task.tokenizer,
        overwrite=True,
    ) as writer:
        for encoded in encode_shard(task.plan, task.recipe, task.num_threads, tally):
            writer.write_documents(encoded.tokens, encoded.lengths)
            progress(len(encoded.tokens))
        info = writer.finish()
    return FinishedTokens(info.token_count, info.sha256, tally, _file_sha256(task.path))


def _file_sha256(path: Path) -> str:
    """Return the digest of all bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class StreamReport:
    """What was written, and how much of it was kept from an earlier run."""

    destination: Path
    index: ShardIndex
    tally: Tally
    seconds: float
    shards_kept: int = 0
    tokens_kept: int = 0


class ShardedTokenizationPipeline:
    """Tokenizes files of documents into a store of token streams.

    Which document goes to which shard depends on the files and the arguments here, never on the workers: consecutive
    documents go to each shard, and all shards together are the documents in the order of the files.

    Parameters
    ----------
    files, kind
        The documents, and what `shards.json` calls their format.
    recipe
        What becomes of a text.
    num_shards, val_fraction, val_last_shard, seed
        As for `plan_text_shards`.
    """

    def __init__(
        self,
        files: Sequence[DocumentFile],
        kind: str,
        recipe: Recipe,
        *,
        num_shards: int | None = None,
        val_fraction: float = 0.0,
        val_last_shard: bool = False,
        seed: int = 42,
    ) -> None:
        self._files, self._kind, self._recipe = files, kind, recipe
        self._tokenizer: Tokenizer = load_tokenizer(recipe.tokenizer)
        self._plans = plan_text_shards(
            files, num_shards, val_fraction=val_fraction, val_last_shard=val_last_shard, seed=seed
        )
        self._work = describe_work(files, kind, recipe, dict(self._tokenizer.description), self._plans)

    def is_done(self, destination: str | os.PathLike[str]) -> bool:
        """Return whether `destination` is what `run` would make; then the journal that a kill has left is removed."""
        destination = Path(destination)
        return is_made_of(destination, self._files, digest_of_work(self._work, {}))

    def run(
        self,
        destination: str | os.PathLike[str],
        *,
        engine: Engine,
        num_threads: int = 1,
        overwrite: bool = False,
        resume: bool = False,
        progress: Progress = no_progress,
        kept: Progress = no_progress,
    ) -> StreamReport:
        """Write the store.

        Parameters
        ----------
        num_threads
            Threads that tokenize, in each process.
        overwrite
            Replace what exists, at the end and whole.
        resume
            Go on with what an interrupted run has finished.

        Raises
        ------
        ConvertError
            If the destination exists, or there are no documents.
        """
        destination = Path(destination)
        start_s = time.monotonic()
        with PartialDirectory(destination, overwrite=overwrite) as folder:
            tasks = [self._task(number, folder.partial_path, num_threads) for number in range(len(self._plans))]
            finished = tokenize(
                write_stream, tasks, folder, self._work, engine=engine, overwrite=overwrite, resume=resume,
                progress=progress, kept=kept,
            )  # fmt: skip
            tally = Tally()
            for shard in finished:
                tally.merge(shard.tally)
            if not tally.documents:
                raise ConvertError(f"{self._files[0].path}: {tally.no_documents(len(self._files))}")
            index = self._index(tasks)
            index.save(folder.partial_path)
            folder.on_published(remove_journals)
        shards_kept, tokens_kept = sum(shard.kept for shard in finished), FinishedTokens.tokens_kept(finished)
        return StreamReport(destination, index, tally, time.monotonic() - start_s, shards_kept, tokens_kept)

    def _task(self, number: int, folder: Path, num_threads: int) -> StreamTask:
        path = folder / f"{SHARD_PREFIX}{number:05}-of-{len(self._plans):05}.h5"
        tokenizer = self._tokenizer
        return StreamTask(
            path, self._plans[number], self._recipe, token_dtype(tokenizer), tokenizer.vocab_size,
            json.dumps(tokenizer.description), num_threads,
        )  # fmt: skip

    def _index(self, tasks: Sequence[StreamTask]) -> ShardIndex:
        splits = {task.path.name: task.plan.split for task in tasks}
        source = {**describe_files(self._files, self._kind, self._recipe), "work": digest_of_work(self._work, {})}
        return index_streams([task.path for task in tasks], splits=splits, source=source)
