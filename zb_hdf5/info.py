"""Describes a store for people: what it is, and how its batches lie on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from zb_hdf5.console import format_bytes, format_count
from zb_hdf5.extents import Extents, network_file_system
from zb_hdf5.native import Face, face_of
from zb_hdf5.reader import BatchReader
from zb_hdf5.shards import ShardedReader
from zb_hdf5.spec import NO_BOUNDARY, PAGE_BYTES
from zb_hdf5.store import is_stream, open_reader
from zb_hdf5.tokenstore import MmapTokenStore

#: What is said of the reserved bytes of a `.batch` header.
_FACES: Final[dict[str, list[tuple[str, str]]]] = {
    Face.NONE: [],
    Face.HDF5: [("face", "both .batch and HDF5: open_reader(..., backend='hdf5'), h5py and h5dump read it too")],
    Face.TORN: [("face", "an interrupted stamp: whole as .batch; 'convert batch-to-hdf5 --in-place' finishes it")],
}


def describe(path: Path, dataset: str | None = None) -> dict[str, Any]:
    """Return a JSON-able description of a file or store.

    Raises
    ------
    FormatError, IncompleteError
        If it cannot be opened.
    """
    if dataset is None and is_stream(path):
        return _describe_stream(path)
    with open_reader(path, dataset=dataset) as reader:
        meta = reader.meta
        description: dict[str, Any] = {
            "path": str(path),
            "kind": "store" if isinstance(reader, ShardedReader) else "file",
            "backend": reader.backend,
            "state": "complete" if reader.complete else "growing: its writer is at work, or was killed",
            "batch_size": meta.batch_size,
            "seq_len": meta.seq_len,
            "dtype": meta.dtype.name,
            "num_batches": reader.num_batches,
            "tokens": reader.num_batches * meta.batch_tokens,
            "total_records": meta.total_records,
            "seed": meta.seed,
            "vocab_size": meta.vocab_size or None,
            "sha256": reader.sha256,
            "fingerprint": reader.fingerprint,
            "file_system": network_file_system(path) or "local",
            "access": reader.access,
            "bytes": _bytes_on_disk(reader),
        }
        if isinstance(reader, ShardedReader):
            shards = reader.index.shards
            sizes = [shard.num_batches for shard in shards]
            sizes[-1] += reader.num_batches - sum(sizes)  # the index does not count a growing shard
            description["shards"] = {"count": len(shards), "min_batches": min(sizes), "max_batches": max(sizes)}
        else:
            description["face"] = str(face_of(path) if reader.backend == "batch" else Face.NONE)
            description["layout"] = _layout(getattr(reader, "extents", None), meta.batch_bytes)
    return description


def _describe_stream(path: Path) -> dict[str, Any]:
    with MmapTokenStore(path) as store:
        return {
            "path": str(path),
            "kind": "stream",
            "dtype": store.dtype.name,
            "num_files": len(store.paths),
            "tokens": store.num_tokens,
            "documents": store.document_count,
            "boundary_token_id": None if store.boundary_token_id == NO_BOUNDARY else store.boundary_token_id,
            "vocab_size": store.vocab_size or None,
            "tokenizer": store.tokenizer or None,
            "fingerprint": store.fingerprint,
            "file_system": network_file_system(path) or "local",
            "access": store.access,
            "bytes": sum(file.stat().st_blocks * 512 for file in store.paths),
        }


def _stream_lines(d: dict[str, Any]) -> list[tuple[str, str]]:
    size = f"{d['tokens']:,} {d['dtype']} ({format_count(d['tokens']).strip()}), {format_bytes(d['bytes'])} on disk"
    boundary = "none" if d["boundary_token_id"] is None else str(d["boundary_token_id"])
    return [
        ("path", d["path"]),
        ("what", f"token stream in {d['num_files']:,} files"),
        ("tokens", size),
        ("documents", f"{d['documents']:,}, boundary token {boundary}"),
        ("access", _access_text(d["access"], d["file_system"])),
        ("fingerprint", d["fingerprint"]),
    ]


def describe_lines(description: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the description as (name, text) lines."""
    d = description
    if d["kind"] == "stream":
        return _stream_lines(d)
    lines = [
        ("path", d["path"]),
        ("what", f"{d['backend']} {d['kind']}, {d['state']}"),
        ("batches", f"{d['num_batches']:,} of {d['batch_size']} x {d['seq_len']} {d['dtype']}"),
        ("tokens", f"{d['tokens']:,} ({format_count(d['tokens']).strip()}), {format_bytes(d['bytes'])} on disk"),
        ("records", f"{d['total_records'] or 'unknown'} before batching, seed {d['seed']}"),
    ]
    if d["vocab_size"]:
        lines.append(("vocabulary", f"{d['vocab_size']:,}"))
    if "shards" in d:
        shards = d["shards"]
        lines.append(
            ("shards", f"{shards['count']:,} of {shards['min_batches']:,} to {shards['max_batches']:,} batches")
        )
    else:
        lines += [*_FACES[d["face"]], ("layout", _layout_text(d["layout"]))]
    return [
        *lines,
        ("access", _access_text(d["access"], d["file_system"])),
        ("sha256", d["sha256"] or "none stored"),
        ("fingerprint", d["fingerprint"]),
    ]


def _access_text(access: str, file_system: str) -> str:
    meaning = {
        ("auto", True): ": what is converted is read by position, the rest from a mapping",
        ("auto", False): ": all is read by position, nothing is mapped",
    }.get((access, file_system == "local"), "")
    return f"{access} ({file_system} file system{meaning})"


def _bytes_on_disk(reader: BatchReader) -> int:
    if isinstance(reader, ShardedReader):
        paths = [shard.file(reader.path) for shard in reader.index.shards]
    else:
        paths = [reader.path]
    return sum(path.stat().st_blocks * 512 for path in paths)  # what a quota counts: HDF5 shards have holes


def _layout(extents: Extents | None, batch_bytes: int) -> dict[str, Any] | None:
    if extents is None:
        return None
    return {
        "extents": [list(run) for run in extents.runs[:16]],
        "runs": len(extents.runs),
        "batch_bytes": batch_bytes,
        "page_aligned": all(run.base % PAGE_BYTES == 0 and run.stride % PAGE_BYTES == 0 for run in extents.runs),
    }


def _layout_text(layout: dict[str, Any] | None) -> str:
    if layout is None:
        return "no plain extents: read through h5py"
    first = layout["extents"][0] if layout["extents"] else [0, 0, 0]
    aligned = "page-aligned" if layout["page_aligned"] else "not page-aligned"
    runs = "1 run" if layout["runs"] == 1 else f"{layout['runs']} runs"
    return f"{runs} of extents: first at byte {first[0]:,}, stride {first[1]:,}, {aligned}"
