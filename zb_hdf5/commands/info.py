"""`zb info`: describes a store, and how its batches lie on disk."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.console import counted, format_bytes, format_count, typed
from zb_hdf5.core.extents import Extents, network_file_system
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.opening import open_reader
from zb_hdf5.spec import DEFAULT_SPLIT, INDEX_NAME, NO_BOUNDARY, PAGE_BYTES
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.kinds import is_stream
from zb_hdf5.store.shards import ShardedReader
from zb_hdf5.store.tokens import MmapTokenStore
from zb_hdf5.text.readable import tokenizer_named


def describe(path: str | os.PathLike[str], dataset: str | None = None) -> dict[str, Any]:
    """Return a JSON-able description of a file or store.

    Raises
    ------
    FormatError, IncompleteError
        If it cannot be opened.
    """
    path = Path(path)
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
            "documents": meta.document_count or None,
            "tokenizer": tokenizer_named(meta.tokenizer) or None,
            "sha256": reader.sha256,
            "fingerprint": reader.fingerprint,
            "file_system": network_file_system(path) or "local",
            "access": reader.access,
            "bytes": _bytes_on_disk(reader),
        }
        if isinstance(reader, ShardedReader):
            description |= _describe_index(reader.index, reader.num_batches)
        else:
            description |= FORMATS[reader.backend].facts_of(path)
            description["layout"] = _layout(getattr(reader, "extents", None), meta.batch_bytes)
    return description


def _describe_index(index: ShardIndex, num_batches: int) -> dict[str, Any]:
    """Return what only the `shards.json` of a store knows."""
    sizes = [shard.num_batches for shard in index.shards]
    sizes[-1] += num_batches - sum(sizes)  # the index does not count a growing shard
    splits: dict[str, list[int]] = {}
    for shard, size in zip(index.shards, sizes, strict=True):
        splits.setdefault(shard.split, []).append(size)
    return {
        "shards": {"count": len(sizes), "min_batches": min(sizes), "max_batches": max(sizes)},
        "splits": {split: _describe_split(found, index.meta.batch_tokens) for split, found in splits.items()},
        "shuffle": index.shuffle,
        "packing": index.source.get("packing"),
        "source": index.source,
    }


def _describe_split(sizes: list[int], batch_tokens: int) -> dict[str, int]:
    return {
        "shards": len(sizes),
        "num_batches": sum(sizes),
        "min_batches": min(sizes),
        "max_batches": max(sizes),
        "tokens": sum(sizes) * batch_tokens,
    }


def _describe_stream_index(index: ShardIndex) -> dict[str, Any]:
    """Return what only the `shards.json` of a store of streams knows."""
    splits: dict[str, dict[str, int]] = {}
    for shard in index.shards:
        found = splits.setdefault(shard.split, {"shards": 0, "tokens": 0, "documents": 0})
        found["shards"] += 1
        found["tokens"] += shard.token_count
        found["documents"] += max(shard.document_count, 0)
    return {"splits": splits, "source": index.source}


def _describe_stream(path: Path) -> dict[str, Any]:
    with MmapTokenStore(path) as store:
        is_store = path.name == INDEX_NAME or (path / INDEX_NAME).exists()
        indexed = _describe_stream_index(ShardIndex.load(path)) if is_store else {}
        return {
            "path": str(path),
            "kind": "stream",
            "dtype": store.dtype.name,
            "num_files": len(store.paths),
            "tokens": store.num_tokens,
            "documents": store.document_count,
            "boundary_token_id": None if store.boundary_token_id == NO_BOUNDARY else store.boundary_token_id,
            "vocab_size": store.vocab_size or None,
            "tokenizer": tokenizer_named(store.tokenizer) or None,
            **indexed,
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
        ("what", f"token stream in {counted(d['num_files'], 'file')}"),
        ("tokens", size),
        ("documents", f"{d['documents']:,}, boundary token {boundary}"),
        *_origin_lines(d),
        *map(_stream_split_line, d.get("splits", {}).items()),
        ("access", _access_text(d["access"], d["file_system"])),
        ("fingerprint", _short_fingerprint(d["fingerprint"])),
    ]


def _stream_split_line(item: tuple[str, dict[str, int]]) -> tuple[str, str]:
    split, found = item
    size = f"{found['tokens']:,} tokens, {counted(found['documents'], 'document')}"
    return split, f"{counted(found['shards'], 'shard')}, {size}"


def _origin_lines(d: dict[str, Any]) -> list[tuple[str, str]]:
    """Say what made the tokens, and of what."""
    lines = []
    tokenizer, source = d["tokenizer"], d.get("source") or {}
    if tokenizer:
        kind, name = tokenizer.get("kind", ""), tokenizer.get("name", "unknown")
        lines.append(("tokenizer", name if kind in ("", name) else f"{kind}:{name}"))
        lines.append(("its digest", str(tokenizer.get("digest", "unknown"))))
    if d["vocab_size"]:
        lines.append(("vocabulary", f"{d['vocab_size']:,}"))
    files = source.get("files") or source.get("path")  # free JSON: whoever wrote the store chose the words
    files = files if isinstance(files, list) else [files] if files else []
    if files:
        more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
        lines.append(("source", f"{source.get('format', 'unknown')}: {files[0]}{more}"))
    return lines


def _short_fingerprint(fingerprint: str) -> str:
    """Shorten the digests, which `--json` has whole: a line of a terminal cannot hold them."""
    return re.sub(r"[0-9a-f]{64}", lambda match: f"{match[0][:16]}…", fingerprint)


def _split_lines(d: dict[str, Any]) -> list[tuple[str, str]]:
    """Say how the batches lie in shards: each split for itself."""
    splits = d["splits"]
    if list(splits) == [DEFAULT_SPLIT]:
        return [("shards", f"{splits[DEFAULT_SPLIT]['shards']:,} of {_range_of_batches(splits[DEFAULT_SPLIT])}")]
    return [
        (split, f"{counted(found['shards'], 'shard')} of {_range_of_batches(found)}, {found['tokens']:,} tokens")
        for split, found in splits.items()
    ]


def _range_of_batches(found: dict[str, int]) -> str:
    low, high = found["min_batches"], found["max_batches"]
    if low != high:
        return f"{low:,} to {high:,} batches"
    return counted(low, "batch", "batches") + (" each" if found["shards"] > 1 else "")


def describe_lines(description: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the description as (name, text) lines."""
    d = description
    if d["kind"] == "stream":
        return _stream_lines(d)
    lines = [
        ("path", d["path"]),
        ("what", f"{d['backend']} {d['kind']}, {d['state']}"),
        ("batches", f"{d['num_batches']:,} of {d['batch_size']:,} x {d['seq_len']:,} {d['dtype']}"),
        ("tokens", f"{d['tokens']:,} ({format_count(d['tokens']).strip()}), {format_bytes(d['bytes'])} on disk"),
        ("records", _records_text(d)),
    ]
    if d["documents"]:
        lines.append(("documents", f"{d['documents']:,}" + (f", {d['packing']} packing" if d.get("packing") else "")))
    lines += _origin_lines(d)
    if "splits" in d:
        lines += _split_lines(d)
    else:
        lines += [(name, typed(text, d["path"])) for name, text in FORMATS[d["backend"]].lines_of(d)]
        lines.append(("layout", _layout_text(d["layout"])))
    return [
        *lines,
        ("access", _access_text(d["access"], d["file_system"])),
        ("sha256", d["sha256"] or "none stored"),
        ("fingerprint", _short_fingerprint(d["fingerprint"])),
    ]


def _records_text(d: dict[str, Any]) -> str:
    count = f"{d['total_records']:,}" if d["total_records"] else "unknown number"
    if d.get("shuffle") == "none":
        return f"{count} before batching, not shuffled"
    return f"{count} before batching" + (f", shuffled with seed {d['seed']}" if d["seed"] else "")


def _access_text(access: str, file_system: str) -> str:
    meaning = {
        ("auto", True): ": converted tokens are read by position, the others from a mapping",
        ("auto", False): ": all tokens are read by position, none are mapped",
    }.get((access, file_system == "local"), "")
    return f"{access} ({file_system} file system{meaning})"


def _bytes_on_disk(reader: BatchReader) -> int:
    if isinstance(reader, ShardedReader):
        paths = [shard.file(reader.path) for shard in reader.index.shards]
    else:
        paths = [reader.path]
    return sum(path.stat().st_blocks * 512 for path in paths)  # as a quota counts: HDF5 shards have holes


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
    return f"{counted(layout['runs'], 'run')} of extents: first at byte {first[0]:,}, stride {first[1]:,}, {aligned}"
