"""`--dry-run`: the shards that a conversion would write, and the disk and memory that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zb_hdf5.console import format_bytes
from zb_hdf5.converters.document_parts import fitted
from zb_hdf5.converters.plan import Plan, cut_into_shards, free_room
from zb_hdf5.converters.run import is_one_file, refuse_bad_destination
from zb_hdf5.converters.shuffle import DEFAULT_MEMORY_BYTES, choose_shuffle
from zb_hdf5.converters.source import Source
from zb_hdf5.spec import NO_CODEC


def describe(
    source: Source,
    target: str,
    destination: Path,
    *,
    num_shards: int | None,
    shard_bytes: int | None,
    workers: int,
    shuffle_method: str = "auto",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    codec: str = NO_CODEC,
    tokens_only: bool = False,
) -> dict[str, Any]:
    """Return the shards that a conversion would write, and the free space.

    Raises
    ------
    ConvertError
        If the conversion would refuse the destination.
    """
    refuse_bad_destination(source.paths, destination)
    source = fitted(source, target, codec, tokens_only)
    one_file = is_one_file(target, destination, several=bool(num_shards or shard_bytes))
    cuts = [(0, source.num_batches)] if one_file else cut_into_shards(source, num_shards, shard_bytes)
    plan = Plan(source, target, cuts, {})
    workers = min(workers, len(cuts))
    shuffle = choose_shuffle(source, shuffle_method, cuts, memory_bytes, workers)
    sizes = [plan.shard_bytes(shard) for shard in range(len(cuts))]
    return {
        "path": str(destination),
        "num_batches": source.num_batches,
        "batch_size": source.meta.batch_size,
        "seq_len": source.meta.seq_len,
        "dtype": source.meta.dtype.name,
        "num_shards": len(cuts),
        "largest_shard_bytes": max(sizes),
        "total_bytes": sum(sizes),
        "inodes": 1 if one_file else plan.num_inodes(),
        "workers": workers,
        "memory_bytes": memory_bytes,
        "shuffle": str(shuffle),
        "temp_bytes": shuffle.temp_bytes,
        "free": free_room(destination.absolute().parent),
    }


def describe_lines(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the same for people."""
    free = planned["free"]
    shape = f"{planned['batch_size']:,} x {planned['seq_len']:,}"
    inodes = "an uncounted number" if free["inodes"] is None else f"{free['inodes']:,}"
    return [
        ("would write", planned["path"]),
        ("batches", f"{planned['num_batches']:,} of {shape} {planned['dtype']}"),
        ("shards", f"{planned['num_shards']:,}, the largest {format_bytes(planned['largest_shard_bytes'])}"),
        ("disk", f"{format_bytes(planned['total_bytes'])} of {format_bytes(free['bytes'])} that are free"),
        ("temporary", format_bytes(planned["temp_bytes"])),
        ("shuffle", planned["shuffle"]),
        ("inodes", f"{planned['inodes']:,} of {inodes} that are free"),
        ("workers", f"{planned['workers']}, at most {format_bytes(planned['memory_bytes'])} of memory together"),
    ]
