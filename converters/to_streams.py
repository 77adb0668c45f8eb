"""Text to a store of token streams: one HDF5 file per shard, in as many processes as there are."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zb_hdf5.converters.journal import remove_journals
from zb_hdf5.converters.routing import DocumentCounts, Recipe, plan_text_shards
from zb_hdf5.converters.run import WorkOptions, refuse_bad_destination
from zb_hdf5.converters.task import Progress, no_progress
from zb_hdf5.converters.text_plan import TextPlan, TokenizedText, TokenizeTask
from zb_hdf5.converters.token_files import FinishedTokens, files_sha256
from zb_hdf5.converters.unique_ids import require_unique_ids
from zb_hdf5.files.publishing import PartialDirectory
from zb_hdf5.formats.document_file import documents_path
from zb_hdf5.formats.hdf5.stream_writer import HDF5ShardWriter
from zb_hdf5.spec import NO_BOUNDARY, NO_CODEC, SHARD_PREFIX
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.streams import index_streams
from zb_hdf5.text.corpus import DocumentFile


def write_stream(task: TokenizeTask, progress: Progress = no_progress) -> FinishedTokens:
    """Tokenize the documents of one shard into its file."""
    counts, boundary = DocumentCounts(), task.recipe.boundary_token_id
    with HDF5ShardWriter(
        task.paths[0],
        dtype=task.dtype.name,
        boundary_token_id=NO_BOUNDARY if boundary is None else boundary,
        vocab_size=task.vocab_size,
        tokenizer=task.tokenizer,
        overwrite=True,
        codec=task.codec,
    ) as writer:
        for encoded in task.encode(counts, progress):
            writer.write_documents(encoded.tokens, encoded.lengths, documents=encoded.rows())
        info = writer.finish()
    return FinishedTokens(info.token_count, counts, files_sha256(task.paths))


@dataclass(frozen=True)
class StreamReport:
    """What was written, and how much of it was kept from an earlier run."""

    destination: Path
    index: ShardIndex
    counts: DocumentCounts
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
    codec
        With its level, of the files of tokens.
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
        codec: str = NO_CODEC,
    ) -> None:
        shards = plan_text_shards(
            files, num_shards, val_fraction=val_fraction, val_last_shard=val_last_shard, seed=seed
        )
        self._codec = codec
        self._plan = TextPlan(files, kind, recipe, shards, {} if codec == NO_CODEC else {"codec": codec})

    def is_done(self, destination: str | os.PathLike[str]) -> bool:
        """Return whether `destination` is what `run` would make; then the journal that a kill has left is removed."""
        return self._plan.is_result(Path(destination))

    def run(self, destination: str | os.PathLike[str], work: WorkOptions | None = None) -> StreamReport:
        """Write the store.

        Raises
        ------
        ConvertError
            If the destination exists, or is or holds a source, or there are no documents.
        """
        destination, work = Path(destination), work or WorkOptions()
        refuse_bad_destination([file.path for file in self._plan.files], destination)
        start_s = time.monotonic()
        num_shards = len(self._plan.shards)
        with PartialDirectory(destination, overwrite=work.overwrite) as folder:
            text = self._plan.tokenize(
                write_stream,
                lambda number: _paths(folder.partial_path / f"{SHARD_PREFIX}{number:05}-of-{num_shards:05}.h5"),
                folder,
                work,
                codec=self._codec,
            )
            if self._plan.files[0].id_column:
                require_unique_ids([task.paths[1] for task, _ in text.files if task.paths[1].exists()])
            index = self._index(text)
            index.save(folder.partial_path)
            folder.on_published(remove_journals)
        seconds = time.monotonic() - start_s
        return StreamReport(destination, index, text.counts, seconds, text.files_kept, text.tokens_kept)

    def _index(self, text: TokenizedText) -> ShardIndex:
        splits = {task.paths[0].name: task.shard.split for task, _ in text.files}
        return index_streams([task.paths[0] for task, _ in text.files], splits=splits, source=self._plan.source())


def _paths(path: Path) -> tuple[Path, Path]:
    """Return where a stream is, and the table of its documents."""
    return path, documents_path(path)
