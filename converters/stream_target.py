"""Documents to a store of HDF5 token streams, one file for each route."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from zb_hdf5.converters.batch_target import refuse_bad_destination
from zb_hdf5.converters.documents import DocumentSource, route
from zb_hdf5.converters.journal import remove_journals
from zb_hdf5.converters.options import Conversion
from zb_hdf5.converters.reports import Done, StreamReport
from zb_hdf5.converters.shard import with_largest_token
from zb_hdf5.converters.task import Workers
from zb_hdf5.converters.token_files import TokensPlan, write_stream
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import PartialDirectory
from zb_hdf5.spec import NO_CODEC, SHARD_PREFIX
from zb_hdf5.store.streams import index_streams


def write_streams(source: DocumentSource, conversion: Conversion, workers: Workers) -> StreamReport | Done:
    """Write a store of streams. Its bytes depend on the source and on the options, never on the workers.

    Raises
    ------
    ConvertError
        If the destination exists, or is or holds a source, or there are no documents.
    """
    destination, start_s = Path(local_path(conversion.destination)), time.monotonic()
    refuse_bad_destination(source.paths, destination)
    plan, codec = stream_plan(source, conversion), conversion.codec or NO_CODEC
    if conversion.resume and not conversion.overwrite and destination.is_dir() and plan.is_result(destination):
        return Done(destination)
    workers.shown.begin("tokenizing" if source.tokenizer else "cutting", plan.num_bytes, "B")
    with PartialDirectory(destination, overwrite=bool(conversion.overwrite)) as folder:

        def path_of(number: int) -> Path:
            return folder.partial_path / f"{SHARD_PREFIX}{number:05}-of-{len(plan.routes):05}.h5"

        made = plan.write(write_stream, path_of, folder, conversion, workers, codec=codec)
        splits = {task.path.name: task.route.split for task, _ in made.files}
        described = with_largest_token(plan.description, (done.max_token for _, done in made.files))
        index = index_streams([task.path for task, _ in made.files], splits=splits, source=described)
        index.save(folder.partial_path)
        folder.on_published(remove_journals)
    return StreamReport(destination, index, made.counts, time.monotonic() - start_s, made.files_kept, made.tokens_kept)


def stream_plan(source: DocumentSource, conversion: Conversion) -> TokensPlan:
    """Deal the documents of a source to streams. Raises as `route`."""
    routes = route(
        source,
        conversion.num_shards,
        val_fraction=conversion.val_fraction or 0.0,
        val_last_shard=bool(conversion.val_last_shard),
        seed=42 if conversion.seed is None else conversion.seed,
    )
    options: dict[str, Any] = {} if conversion.codec in (None, NO_CODEC) else {"codec": conversion.codec}
    return TokensPlan(source, routes, options)
