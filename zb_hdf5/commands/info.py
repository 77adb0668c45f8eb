"""`zb info` and `zb verify`: a store and the layout of its batches, an unfinished conversion, and a verdict."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5.console import Output, counted, format_bytes, format_count, message_of, typed
from zb_hdf5.converters.journal import journal_paths, read_journal
from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.errors import ArgumentError, ChecksumError, FormatError, UnavailableError, UnverifiableError, ZbError
from zb_hdf5.files.objects import object_size
from zb_hdf5.files.paths import RemotePath, any_path
from zb_hdf5.files.publishing import leftover_of_dead_writer
from zb_hdf5.files.ranges import Extents, network_file_system
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.spec import DEFAULT_SPLIT, NO_BOUNDARY, PAGE_BYTES, STREAM_LAYOUT
from zb_hdf5.store.index import ShardIndex, find_index, source_files
from zb_hdf5.store.opening import (
    NO_CHOICE,
    Choice,
    foreign_dataset,
    is_stream,
    open_for_loader,
    open_reader,
    open_stream,
)
from zb_hdf5.store.shards import StoreReader
from zb_hdf5.store.verify import Outcome, ShardReport
from zb_hdf5.text.tokenizers import tokenizer_named

#: Lines of a report: (name, text).
Lines = list[tuple[str, str]]

MAX_TABLES: Final = 64  # the sources of more are not counted: each table is opened for them
MAX_RUNS: Final = 16
#: The word for each outcome, and its sense for one file; the worst outcome is the first.
_OUTCOMES: Final = {
    Outcome.BAD: ("BAD", "the file is not as it was written, or not finished"),
    Outcome.UNVERIFIED: ("NOT VERIFIED", "there is nothing to compare the file with"),
    Outcome.VERIFIED: ("verified", "the file is as it was written"),
}


def describe(path: str | os.PathLike[str], choice: Choice = NO_CHOICE) -> dict[str, Any]:
    """Return a JSON-able description of a file or store."""
    path, dataset = any_path(path), choice["dataset"]
    is_tokens, local = is_stream(path, **choice), not isinstance(path, RemotePath)
    with open_stream(path, dataset=dataset) if is_tokens else open_reader(path, **choice) as opened:
        meta, index, files, own = opened.meta, None, [opened.path], {} if is_tokens else _describe_batches(opened)
        if isinstance(opened, StoreReader):
            files, index = opened.paths, opened.index if not is_tokens or find_index(path) else None
            own = own or _describe_stream(opened)
        return {
            "path": str(path),
            "dataset": foreign_dataset(path, dataset),
            **own,
            "dtype": meta.dtype.name,
            "vocab_size": meta.vocab_size or None,
            "max_token": opened.max_token,
            "tokenizer": tokenizer_named(meta.tokenizer) or None,
            "fields": {field.name: field.to_json() for field in meta.fields},
            "document_tables": _describe_documents(opened),
            "fingerprint": opened.token_fingerprint,
            "file_system": "objects" if isinstance(path, RemotePath) else network_file_system(path) or "local",
            "access": opened.access if local else "remote",
            "verified": opened.verified,
            "bytes": sum(map(_bytes_of, files)) if index is None or local else int(index.table.values["bytes"].sum()),
            "written": _written(path),
            **_describe_codec(opened),
            **(
                {"source": opened.origin.get("source")} if index is None else _describe_index(index, opened.num_batches)
            ),
        }


def _written(path: Path) -> str | None:
    """Return when a lone file or the `shards.json` of a store was written, as ISO 8601 has it; None: not known."""
    index = find_index(path)
    file = path if index is None else index
    if isinstance(file, RemotePath) or not file.is_file():
        return None
    return datetime.fromtimestamp(int(file.stat().st_mtime), UTC).isoformat()


def _describe_codec(opened: BatchReader) -> dict[str, Any]:
    """Return the codec and its ratio; empty without one."""
    files = opened.index.shards if isinstance(opened, StoreReader) else [opened]
    packed = [(file.compressed, file.token_count) for file in files if file.compressed is not None]
    if not packed:
        return {}
    stored = sum(each.num_bytes for each, _ in packed)
    plain = sum(tokens for _, tokens in packed) * opened.dtype.itemsize
    return {
        "codec": " and ".join(dict.fromkeys(each.codec for each, _ in packed)),
        "compressed_bytes": stored,
        "uncompressed_bytes": plain,
        "ratio": round(plain / stored, 3) if stored else None,
    }


def _bytes_of(file: Path) -> int:
    """Return the disk space of a file (allocated blocks, as a quota counts it): HDF5 shards have holes."""
    return object_size(str(file)) or 0 if isinstance(file, RemotePath) else file.stat().st_blocks * 512


def _describe_stream(store: StoreReader) -> dict[str, Any]:
    boundary = store.index.meta.boundary_token_id
    return {
        "kind": "stream",
        "num_files": len(store.paths),
        "tokens": store.num_tokens,
        "documents": store.document_count if store.has_documents or store.paths[0].suffix == ".npy" else None,
        "boundary_token_id": None if boundary == NO_BOUNDARY else boundary,
        "crc32": _has_crc32(store),
    }


def _has_crc32(stream: StoreReader) -> bool:
    """Return whether a stream has digests that `verify="batch"` compares its chunks with."""
    compared = stream.compared_tokens()
    if compared is not None:
        compared.close()
    return compared is not None


def _describe_batches(reader: BatchReader) -> dict[str, Any]:
    meta, is_store = reader.meta, isinstance(reader, StoreReader)
    return {
        "kind": "store" if is_store else "file",
        "backend": reader.backend,
        "state": "complete" if reader.complete else "growing: its writer is at work, or was killed",
        "batch_size": meta.batch_size,
        "seq_len": meta.seq_len,
        "num_batches": reader.num_batches,
        "tokens": reader.num_batches * meta.batch_tokens,
        "total_records": meta.total_records,
        "seed": meta.seed,
        "documents": meta.document_count or None,
        "pieces": reader.has_pieces,
        "sha256": reader.sha256,
        **({} if is_store else {"layout": describe_layout(getattr(reader, "extents", None), meta.batch_bytes)}),
    }


def describe_epoch(
    path: Path, batch_size: int | None, seq_len: int | None, world_size: int, **options: Any
) -> dict[str, int]:
    """Return the records of an epoch of a loader without targets, its steps, and the records that fill no step."""
    with open_for_loader(path, batch_size, seq_len, 0, split=DEFAULT_SPLIT, **options) as reader:
        shape = batch_size or reader.batch_size, seq_len or reader.seq_len
        if reader.seq_len % shape[1]:
            raise ArgumentError(f"{path}: seq_len must divide the stored {reader.seq_len:,}, found {shape[1]:,}")
        records = reader.num_records * (reader.seq_len // shape[1])
    steps, left_out = divmod(records, shape[0] * world_size)
    found = {"batch_size": shape[0], "seq_len": shape[1], "world_size": world_size, "records": records}
    return {**found, "steps": steps, "left_out": left_out}


def epoch_text(epoch: dict[str, int]) -> str:
    """Return the result of `describe_epoch` in words."""
    each = f"{epoch['batch_size']:,} x {epoch['seq_len']:,} on {counted(epoch['world_size'], 'rank')}"
    text = f"{counted(epoch['records'], 'record')}: {counted(epoch['steps'], 'step')} of {each}"
    if not epoch["left_out"]:
        return text
    return f"{text}, and {epoch['left_out']:,} that drop_last=True leaves out (last= reads them)"


def describe_layout(extents: Extents | None, batch_bytes: int) -> dict[str, Any] | None:
    """Return the first runs of the extents of a file, and whether each batch begins at a page; None without any."""
    if extents is None:
        return None
    return {
        "extents": [list(run) for run in extents.runs[:MAX_RUNS]],
        "runs": len(extents.runs),
        "batch_bytes": batch_bytes,
        "page_aligned": all(run.base % PAGE_BYTES == 0 and run.stride % PAGE_BYTES == 0 for run in extents.runs),
    }


def _describe_documents(opened: BatchReader) -> dict[str, Any] | None:
    """Return the facts of the first table of documents; None without one, or of offsets only."""
    try:
        table = opened.documents
        if not isinstance(table, DocumentTable) or not len(table) or not table.parts[0].sha256:
            return None
        file, first = table.file(0), table.document(0)
        names = {name for number in range(len(table.parts[:MAX_TABLES])) for name in table.file(number).sources}
        return {
            "count": len(table.parts),
            "documents": len(table),
            "ids": first.id is not None,
            "metadata": list(first.metadata),
            "sources": None if len(table.parts) > MAX_TABLES else len(names),
            "spans": file.spans_codec if file.has_spans else None,
        }
    except ZbError as error:
        return {"problem": str(error)}


def _describe_index(index: ShardIndex, num_batches: int) -> dict[str, Any]:
    """Return the facts of a `shards.json`; the batches of a stream are not counted."""
    names, of_stream = index.table.values["split"], index.meta.layout == STREAM_LAYOUT
    counts = [shard.num_batches for shard in index.shards]
    counts[-1] += num_batches - sum(counts)  # the index does not count a growing shard
    splits: dict[str, dict[str, Any]] = {}
    for split in dict.fromkeys(names):
        here = [number for number, name in enumerate(names) if name == split]
        if of_stream:
            shards = [index.shards[number] for number in here]
            sums = {
                "tokens": sum(max(shard.token_count, 0) for shard in shards),
                "documents": sum(max(shard.document_count, 0) for shard in shards),
            }
        else:
            sizes = [counts[number] for number in here]
            sums = {**_extremes(sizes), "num_batches": sum(sizes), "tokens": sum(sizes) * index.meta.batch_tokens}
        splits[split] = {"shards": len(here), **sums}
    found = {"splits": splits, "source": index.source}
    if of_stream:
        return found
    return {
        "shards": {"count": len(counts), **_extremes(counts)},
        **found,
        "shuffle": index.shuffle,
        "packing": index.source.get("packing"),
    }


def _extremes(batches: list[int]) -> dict[str, int]:
    return {"min_batches": min(batches), "max_batches": max(batches)}


def _origin_lines(d: dict[str, Any]) -> Lines:
    """Return the lines of the tokenizer and the source."""
    lines = []
    tokenizer, source = d["tokenizer"], d.get("source") or {}
    if tokenizer:
        kind, name = tokenizer.get("kind", ""), tokenizer.get("name", "unknown")
        lines.append(("tokenizer", name if kind in ("", name) else f"{kind}:{name}"))
        lines.append(("its digest", str(tokenizer.get("digest", "unknown"))))
    if d["vocab_size"]:
        lines.append(("vocabulary", f"{d['vocab_size']:,}"))
    if d["max_token"] is not None:
        lines.append(("largest id", f"{d['max_token']:,}"))
    if files := source_files(source):
        more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
        lines.append(("source", f"{source.get('format', 'unknown')}: {files[0]}{more}"))
    if source.get("note"):
        lines.append(("note", " ".join(str(source["note"]).split())))
    return lines


def _split_lines(d: dict[str, Any]) -> Lines:
    """Return a line for each split."""
    if d["kind"] == "store" and list(d["splits"]) == [DEFAULT_SPLIT]:
        return [("shards", f"{d['shards']['count']:,} of {_range_of_batches(d['splits'][DEFAULT_SPLIT])}")]
    lines = []
    for split, found in d.get("splits", {}).items():
        of = f" of {_range_of_batches(found)}" if "num_batches" in found else ""
        documents = f", {counted(found['documents'], 'document')}" if "documents" in found else ""
        lines.append((split, f"{counted(found['shards'], 'shard')}{of}, {found['tokens']:,} tokens{documents}"))
    return lines


def _range_of_batches(found: dict[str, int]) -> str:
    low, high = found["min_batches"], found["max_batches"]
    each = " each" if found["shards"] > 1 else ""
    return f"{low:,} to {high:,} batches" if low != high else counted(low, "batch") + each


def describe_lines(description: dict[str, Any]) -> Lines:
    """Return the description as (name, text) lines."""
    d = description
    size = f"{d['tokens']:,} {d['dtype']} ({format_count(d['tokens']).strip()}), {format_bytes(d['bytes'])} on disk"
    is_stream = d["kind"] == "stream"
    if is_stream:
        lines = [("kind", f"token stream in {counted(d['num_files'], 'file')}"), ("tokens", size)]
    else:
        shape = f"{d['num_batches']:,} of {d['batch_size']:,} x {d['seq_len']:,} {d['dtype']}"
        lines = [("kind", f"{d['backend']} {d['kind']}, {d['state']}"), ("batches", shape), ("tokens", size)]
        shuffled = f", shuffled with seed {d['seed']}" if d["seed"] else ""
        shuffled = ", not shuffled" if d.get("shuffle") == "none" else shuffled
        count = f"{d['total_records']:,}" if d["total_records"] else "unknown number"
        lines.append(("records", f"{count} before batching{shuffled}"))
    lines = [("dataset", d["dataset"])] * (d["dataset"] is not None) + lines
    lines = [("path", d["path"]), *lines, *_document_lines(d), *_field_lines(d), *_origin_lines(d), *_split_lines(d)]
    if "layout" in d:
        unpacked = "codec" in d and d["access"] != "h5py"
        lines.append(("layout", "a compressed chunk for each batch" if unpacked else layout_text(d["layout"])))
    if "codec" in d:
        sizes = f"{format_bytes(d['compressed_bytes'])} for {format_bytes(d['uncompressed_bytes'])} of tokens"
        lines.append(("codec", f"{d['codec']}: {sizes}, {d['ratio']} to 1"))
    mapped = ": batches in the page cache are read from a mapping, others by position"
    how = mapped if d["file_system"] == "local" else ": all tokens are read by position, none are mapped"
    how = how if d["access"] == "auto" else ""
    lines += [("access", f"{d['access']} ({d['file_system']} file system{how})"), ("reads", _reads_text(d))]
    lines += [("written", d["written"])] if d["written"] else []
    lines += [] if is_stream else [("sha256", d["sha256"] or "none stored")]
    short = re.sub(r"[0-9a-f]{64}", lambda match: f"{match[0][:16]}…", d["fingerprint"])  # `--json` has it whole
    return [*lines, ("fingerprint", short)]


def _document_lines(d: dict[str, Any]) -> Lines:
    """Return the number of documents, and their stored facts."""
    tables = d["document_tables"] or {}
    count = d["documents"] or tables.get("documents")
    if count is None and not tables:
        return []
    parts = [f"{count:,}" if count is not None else "unknown number"]
    if d["kind"] == "stream":
        parts.append("boundary token " + ("none" if d["boundary_token_id"] is None else str(d["boundary_token_id"])))
    elif d.get("packing"):
        parts.append(f"{d['packing']} packing")
    lines = [("documents", ", ".join(parts))]
    if "problem" in tables:
        return [*lines, ("", tables["problem"])]
    if tables:
        known = {
            "ids": tables["ids"],
            f"metadata ({', '.join(tables['metadata'])})": tables["metadata"],
            counted(tables["sources"] or 0, "source"): tables["sources"],
            f"spans ({tables['spans']})": tables["spans"],
        }
        stored = ", ".join(text for text, is_there in known.items() if is_there) or "their offsets"
        lines.append(("of them", f"{stored}, in {counted(tables['count'], 'table')}"))
    if d["kind"] != "stream":
        lines.append(("pieces", f"their ranges in the records are {'' if d['pieces'] else 'not '}stored"))
    return lines


def _field_lines(d: dict[str, Any]) -> Lines:
    shown = []
    for name, field in d["fields"].items():
        dtype = field["dtype"]
        text = np.dtype(dtype).name if isinstance(dtype, str) else str([part for part, *_ in dtype])
        shown.append(f"{name} {text}" + (str(field["shape"]) if field["shape"] else ""))
    return [("fields", ", ".join(shown))] if shown else []


def _reads_text(d: dict[str, Any]) -> str:
    """Return the reads that are compared with their crc32."""
    if d["verified"] != "none":
        return "each batch that is read whole is compared with its crc32"
    if d["kind"] == "stream" and d["crc32"]:
        return 'not checked: a window is less than a chunk; verify="batch" reads and checks whole chunks'
    grows = d["kind"] != "stream" and d["state"] != "complete"
    return "not checked: " + ("its writer has not finished" if grows else "no crc32 is stored")


def layout_text(layout: dict[str, Any] | None) -> str:
    """Return the result of `describe_layout` in words."""
    if layout is None:
        return "no plain extents: read through h5py"
    start, stride, *_ = (layout["extents"] or [[0, 0]])[0]
    aligned = "page-aligned" if layout["page_aligned"] else "not page-aligned"
    return f"{counted(layout['runs'], 'run')}, first at byte {start:,}, stride {stride:,}, {aligned}"


def interrupted(folder: Path) -> Output | None:
    """Return the description of a `.partial/` folder; None if no journal is in it."""
    if isinstance(folder, RemotePath) or not folder.is_dir():
        return None
    records = [read_journal(path) for path in journal_paths(folder).values()]
    if not records:
        return None
    at_work, state, next_step = True, "a conversion at work", "wait"
    with suppress(UnavailableError), leftover_of_dead_writer(folder):
        at_work, state, next_step = False, "an interrupted conversion", "go on with the same command and --resume"
    unit, total = records[0].unit, records[0].total
    finished = len(set().union(*(record.finished for record in records)))
    done = f"{finished:,} of {total:,} {unit} are finished; {next_step}"
    facts = {"path": str(folder), "kind": "unfinished conversion", "at_work": at_work, "unit": unit}
    return Output(
        {**facts, "finished": finished, "total": total},
        [("path", str(folder)), ("kind", state), ("state", done)],
    )


def verdict(path: Path, reports: list[ShardReport]) -> Output:
    """Return the result of a check: the bad files, how many are right, and the worst outcome; as JSON each file."""
    counts = Counter(report.outcome for report in reports)
    outcome = next(each for each in _OUTCOMES if counts[each])
    word, result = _OUTCOMES[outcome]
    if len(reports) > 1:
        others = {Outcome.UNVERIFIED: "could not be compared with anything", Outcome.BAD: "not"}
        result = f"{counts[Outcome.VERIFIED]:,} of {len(reports):,} files are as they were written"
        result += "".join(f", {counts[each]:,} {text}" for each, text in others.items() if each in counts)
    files = [
        {**vars(each), "outcome": each.outcome, "missing": _missing(each), "problem": _problem(each)}
        for each in reports
    ]
    codes = [_code_of(report.problem) for report in reports if report.problem is not None]
    code = max(codes, default=UnverifiableError.exit_code * (outcome is Outcome.UNVERIFIED))
    rows = [("path", str(path)), *_rows_of_files(path, reports), ("result", f"{word}: {result}")]
    return Output({"ok": outcome is Outcome.VERIFIED, "outcome": outcome, "files": files}, rows, exit_code=code)


def _code_of(error: ZbError) -> int:
    # damaged metadata is damage: elsewhere a malformed file may be a mistake of the user's
    damaged = isinstance(error, FormatError) and error.exit_code == FormatError.exit_code
    return ChecksumError.exit_code if damaged else error.exit_code


def _missing(report: ShardReport) -> str:
    return typed(report.missing, report.path)


def _problem(report: ShardReport) -> str | None:
    return None if report.problem is None else message_of(report.problem)


def _rows_of_files(path: Path, reports: list[ShardReport]) -> Iterator[tuple[str, str]]:
    """Yield the files that are bad, the first of those that lack the same digest, and the others by their number."""
    if len(reports) == 1:
        [report] = reports
        yield ("file" if report.path == str(path) else _name_in(path, report)), _line_of(report)
        return
    told = set[str]()
    for report in reports:
        if report.outcome is not Outcome.VERIFIED and (report.problem or report.missing not in told):
            yield _name_in(path, report), _line_of(report)
            told.add(report.missing)
    for name, is_table in (("shards", False), ("documents", True)):
        kind = [report for report in reports if bool(report.document_count) == is_table]
        good = [report for report in kind if report.outcome is Outcome.VERIFIED]
        if good:
            yield name, f"{len(good):,} of {len(kind):,} verified: {_amount_of(good)} ({_compared(good)})"


def _name_in(path: Path, report: ShardReport) -> str:
    """Return the name of a file by its place in the folder of a store."""
    found, folder = any_path(report.path), path if path.is_dir() else path.parent
    return str(found.relative_to(folder)) if found.is_relative_to(folder) else report.path


def _line_of(report: ShardReport) -> str:
    if report.problem is not None:
        return f"BAD: {_problem(report)}"
    amount = _amount_of([report])
    if report.missing:
        return ": ".join(filter(None, ("NOT VERIFIED", amount, _missing(report))))
    return f"verified: {amount or '0 tokens'} ({_compared([report])})"


def _amount_of(reports: list[ShardReport]) -> str:
    """Return how many documents, batches or tokens some files have; the first of these that there are."""
    documents, batches = sum(each.document_count for each in reports), sum(each.num_batches for each in reports)
    tokens = sum(each.token_count for each in reports)
    if documents:
        return counted(documents, "document")
    if batches:
        return counted(batches, "batch")
    return f"{format_count(tokens).strip()} tokens" if tokens else ""


def _compared(reports: list[ShardReport]) -> str:
    """Return the digests that agreed, and the fields that they covered."""
    checks = dict.fromkeys(check for report in reports for check in report.checks)
    fields = dict.fromkeys(name for report in reports for name in report.fields)
    return ", ".join([*checks, *(f"field {name}" for name in fields)])
