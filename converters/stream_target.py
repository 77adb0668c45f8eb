"""Documents to a store of HDF5 token streams, one file for each route."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zb_hdf5.converters.cut_source import CutSource
from zb_hdf5.converters.documents import DocumentCounts, DocumentSource, route
from zb_hdf5.converters.journal import remove_journals
from zb_hdf5.converters.npy_source import expand
from zb_hdf5.converters.run import WorkOptions, refuse_bad_destination
from zb_hdf5.converters.token_files import TokensPlan, write_stream
from zb_hdf5.files.publishing import PartialDirectory
from zb_hdf5.spec import NO_CODEC, SHARD_PREFIX
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.streams import index_streams


@dataclass(frozen=True)
class StreamReport:
    """The store that was written, and how much of it was kept from an earlier run."""

    destination: Path
    index: ShardIndex
    counts: DocumentCounts
    seconds: float
    shards_kept: int = 0
    tokens_kept: int = 0


@dataclass(frozen=True)
class StreamTarget:
    """Which documents go to which stream. This depends on the source and on these options, never on the workers.

    Attributes
    ----------
    num_shards, val_fraction, val_last_shard, seed
        As for `route`.
    codec
        With its level.
    """

    num_shards: int | None = None
    val_fraction: float = 0.0
    val_last_shard: bool = False
    seed: int = 42
    codec: str = NO_CODEC

    def plan(self, source: DocumentSource) -> TokensPlan:
        """Deal the documents of a source to streams. Raises as `route`."""
        split = {"val_fraction": self.val_fraction, "val_last_shard": self.val_last_shard, "seed": self.seed}
        routes = route(source, self.num_shards, **split)  # type: ignore[arg-type]
        options: dict[str, Any] = {} if self.codec == NO_CODEC else {"codec": self.codec}
        return TokensPlan(source, routes, options)

    def write(
        self, source: DocumentSource, destination: str | os.PathLike[str], work: WorkOptions | None = None
    ) -> StreamReport:
        """Write the store.

        Raises
        ------
        ConvertError
            If the destination exists, or is or holds a source, or there are no documents.
        """
        destination, work = Path(destination), work or WorkOptions()
        refuse_bad_destination(source.paths, destination)
        start_s = time.monotonic()
        plan = self.plan(source)
        with PartialDirectory(destination, overwrite=work.overwrite) as folder:

            def path_of(number: int) -> Path:
                return folder.partial_path / f"{SHARD_PREFIX}{number:05}-of-{len(plan.routes):05}.h5"

            made = plan.write(write_stream, path_of, folder, work, codec=self.codec)
            splits = {task.path.name: task.route.split for task, _ in made.files}
            index = index_streams([task.path for task, _ in made.files], splits=splits, source=plan.description)
            index.save(folder.partial_path)
            folder.on_published(remove_journals)
        seconds = time.monotonic() - start_s
        return StreamReport(destination, index, made.counts, seconds, made.files_kept, made.tokens_kept)


def npy_to_stream(
    sources: Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    boundary_token_id: int,
    boundary: str = "behind",
    dtype: str = "auto",
    vocab_size: int = 0,
    work: WorkOptions | None = None,
) -> StreamReport:
    """Convert 1-D `.npy` files to a store of HDF5 token streams, a shard for each file.

    The tokens stay as they are. Their documents get a table, with the file of each and its row there: packed into
    batches later (`stream-to-hdf5`), they are still told apart.

    Parameters
    ----------
    sources
        Files, or folders whose `.npy` files are taken in the order of their paths.
    boundary_token_id, boundary, dtype, vocab_size
        As for `CutSource`.

    Raises
    ------
    ArgumentError, ConvertError
        If a file has another shape, an id does not fit, no file has a token, or the destination exists, or is or
        holds a file of the source.
    FormatError, IncompleteError
        If a file is no whole `.npy` file.
    """
    paths = expand(sources)
    refuse_bad_destination(paths, Path(destination))
    source = CutSource(paths, boundary_token_id, boundary, dtype, vocab_size)
    return StreamTarget().write(source, destination, work)
