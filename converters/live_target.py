"""`--live`: a conversion that others may read while it runs."""

from __future__ import annotations

import os
import time

from zb_hdf5.converters.document_parts import fitted, left_behind
from zb_hdf5.converters.plan import cut_into_shards, require_room
from zb_hdf5.converters.run import Report, refuse_bad_destination
from zb_hdf5.converters.shard import read_groups
from zb_hdf5.converters.shuffle import UNSHUFFLED, Shuffle
from zb_hdf5.converters.source import Source
from zb_hdf5.converters.task import Progress
from zb_hdf5.files.paths import local_path
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import NO_CODEC
from zb_hdf5.store.live import LiveStoreWriter


def convert_live(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    num_shards: int | None = None,
    shard_bytes: int | None = None,
    progress: Progress,
) -> Report:
    """Write all batches of `source` in their order to a live HDF5 store: committed batches may be read at once.

    One process writes. If it ends early, the committed batches stay, and `zb repair` makes a store of them.

    Raises
    ------
    ConvertError
        If the destination exists, or there is no room for it.
    """
    destination = local_path(destination)
    start_s = time.monotonic()
    source = fitted(source, LiveStoreWriter.backend, NO_CODEC)
    refuse_bad_destination(source.paths, destination)
    cuts = cut_into_shards(source, num_shards, shard_bytes)
    needed_bytes = FORMATS[LiveStoreWriter.backend].total_bytes(source.meta, source.num_batches)
    require_room(destination.absolute().parent, needed_bytes, len(cuts) + 2)
    source.check_reads()
    shard_batches = max(stop - start for start, stop in cuts)
    with LiveStoreWriter(
        destination, source.meta, shard_batches=shard_batches, shuffle=source.shuffle, source=source.description
    ) as writer:
        for group in read_groups(source, 0, source.num_batches):
            writer.write(group.tokens, group.fields)
            progress(group.tokens.size)
        info = writer.finish()
    source.token_counts.require_balance(info.token_count)
    seconds = time.monotonic() - start_s
    shuffle = Shuffle("direct", "one process gathers the records, as --live asks") if source.reorders else UNSHUFFLED
    shards = list(writer.index.shards)
    return Report(
        destination, source.meta, shards, info.max_token, source.token_counts, str(shuffle), seconds,
        left_behind=left_behind(source, keeps_fields=True, keeps_documents=False),
    )  # fmt: skip
