"""The description of a file, a store and the layout of its batches, or an unfinished conversion."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5.commands.verdict import code_of_damage
from zb_hdf5.console import (
    Output,
    counted,
    format_bytes,
    format_count,
    one_word,
)
from zb_hdf5.converters.conversion import WHOLE
from zb_hdf5.converters.journal import journal_paths, read_journal
from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.errors import ArgumentError, ChecksumError, IncompleteError, UnavailableError, ZbError
from zb_hdf5.files.file_systems import network_file_system
from zb_hdf5.files.listing import counts_of_left_out
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT, train_first
from zb_hdf5.files.objects import object_size
from zb_hdf5.files.paths import RemotePath, any_path, on_failure
from zb_hdf5.files.publishing import leftover_of_dead_writer
from zb_hdf5.files.ranges import Extents
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.corpus_file import CorpusFile
from zb_hdf5.formats.format import Found
from zb_hdf5.loaders.stored_targets import problem_of_targets
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import DEFAULT_SPLIT, NO_BOUNDARY, PAGE_BYTES, STREAM_LAYOUT
from zb_hdf5.store.found_corpus import corpus_of
from zb_hdf5.store.found_path import found_at, look_of
from zb_hdf5.store.found_store import FoundStore
from zb_hdf5.store.index import ShardIndex, find_index, source_files
from zb_hdf5.store.opening import corpus_for_training, note_left_out, open_for_loader
from zb_hdf5.store.store_corpus import StoreCorpus
from zb_hdf5.text.tokenizers import tokenizer_named

#: Lines of a report: (name, text).
Lines = list[tuple[str, str]]

#: The sources of more tables are not counted: each table is opened for them.
MAX_TABLES: Final = 64
MAX_RUNS: Final = 16
#: The state of a store that its writer has finished, as far as it was looked at.
COMPLETE: Final = "complete"
DAMAGED: Final = "damaged"
#: Splits that have a line of their own.
SPLITS_SHOWN: Final = 3


class OpenPath(NamedTuple):
    """A path that is open to be described.

    Attributes
    ----------
    path
        The path, as it was asked for.
    look
        The look at it, which has ended.
    found
        The findings of the look.
    corpus
        Its corpus, of the split that is asked for.
    """

    path: Path
    look: Look
    found: Found
    corpus: Corpus


@contextmanager
def open_to_describe(
    path: str | os.PathLike[str], read_as: ReadAs = AS_STORED, split: str | None = None
) -> Iterator[OpenPath]:
    """Open a file or store in a block."""
    path = any_path(path)
    with look_of(path) as look:
        found = found_at(look.path, look=look, read_as=read_as, split=split)
        if split is None:
            found.splits_there()  # names what a loader would refuse
        opened = corpus_of(found, look)
    with opened as corpus:
        yield OpenPath(path, look, found, corpus)


def describe(path: str | os.PathLike[str], read_as: ReadAs = AS_STORED, split: str | None = None) -> dict[str, Any]:
    """Return a JSON-able description of a file or store."""
    with open_to_describe(path, read_as, split) as opened:
        return describe_open(opened)


def describe_open(opened: OpenPath) -> dict[str, Any]:
    """Return the description of a file or store that is open."""
    path, _, _, corpus = opened
    if not isinstance(corpus, StoreCorpus):
        return _describe(opened, _describe_batches(corpus), None)
    if corpus.is_stream:
        index = corpus.index if find_index(path) else None
        return _describe(opened, _describe_stream(corpus), index)
    own = _describe_batches(corpus)
    if corpus.is_cut:
        own |= {"kind": "folder" if path.is_dir() else "file", "num_files": len(corpus.files)}
        return _describe(opened, own, None)
    return _describe(opened, own, corpus.index)


def _describe(described: OpenPath, own: dict[str, Any], index: ShardIndex | None) -> dict[str, Any]:
    """Return the facts of any corpus, after its `own` ones: the facts of batches, or of a stream."""
    path, look, found, opened = described
    meta = opened.meta
    is_remote = isinstance(path, RemotePath)
    if is_remote and index is not None:  # a request for the size of each shard would take a while
        num_bytes = int(index.table.values["bytes"].sum())
        size_problem = None
    else:
        known = [_size_of(file) for file in opened.files]
        num_bytes = sum(file.disk_bytes for file in known)
        size_problem = _other_size(index, known)
    if index is None:
        origin = {"source": opened.origin.get("source"), **_described_splits(opened)}
    else:
        origin = _describe_index(index, opened.num_units)
    tables, table_problem = _describe_documents(opened)
    damage = table_problem or size_problem
    return {
        "path": str(path),
        "dataset": found.foreign_dataset,
        **own,
        **_describe_reads(found),
        "dtype": meta.dtype.name,
        "vocab_size": meta.vocab_size or None,
        "max_token": opened.max_token,
        "tokenizer": tokenizer_named(meta.tokenizer) or None,
        "fields": {field.name: field.to_json() for field in meta.fields},
        "document_tables": tables,
        "fingerprint": _fingerprint_of(opened),
        "file_system": "objects" if is_remote else network_file_system(path) or "local",
        "access": "remote" if is_remote else opened.access,
        "verified": opened.verified,
        "bytes": num_bytes,
        "size_problem": str(size_problem) if size_problem else None,
        "written": _written(path),
        **_describe_codec(opened),
        **origin,
        **({"target_problem": problem} if (problem := _target_problem(opened)) else {}),
        **counts_of_left_out(found.left_out(look)),
        **({"state": DAMAGED, "exit_code": code_of_damage(damage)} if damage else {}),
    }


def _describe_reads(found: Found) -> dict[str, Any]:
    """Return how datasets of another program are read: by their extents, past HDF5, or not; {} of other paths.

    Among several files it is the first one that only HDF5 can read; else the first one.
    """
    columns = [*(each.column for each in found.facts), found.column]
    foreign = [column for column in columns if column is not None and column.is_foreign]
    if not foreign:
        return {}
    column = next((each for each in foreign if not isinstance(each.extents, Extents)), foreign[0])
    extents = column.extents if isinstance(column.extents, Extents) else None
    return {
        "layout": describe_layout(extents, column.meta.batch_tokens * column.dtype.itemsize),
        "stored_dtype": column.dtype.str,
        "past_hdf5": extents is not None,
        "obstacle": column.obstacle or None,
    }


class _Size(NamedTuple):
    """The size of a file, and its disk space (allocated blocks, as a quota counts it): HDF5 shards have holes."""

    name: str
    num_bytes: int
    disk_bytes: int


def _size_of(file: CorpusFile) -> _Size:
    """Ask once for the size of a file, or of an object, which has no holes."""
    if isinstance(file.folder, RemotePath):
        num_bytes = object_size(os.fspath(file.path)) or 0
        return _Size(file.name, num_bytes, num_bytes)
    found = os.stat(f"{file.folder}/{file.name}")  # a path of each of 100,000 shards would take longer than its size
    return _Size(file.name, found.st_size, found.st_blocks * 512)


def _other_size(index: ShardIndex | None, files: list[_Size]) -> ZbError | None:
    """Return the error of the first shard that is not as long as the index has it, as after a copy that was cut."""
    if index is None:
        return None
    for file, expected in zip(files, index.table.values["bytes"].tolist(), strict=True):
        if expected not in (0, file.num_bytes):  # 0: it grows
            kind = IncompleteError if file.num_bytes < expected else ChecksumError
            return kind(f"{os.path.basename(file.name)}: expected {expected:,} bytes, found {file.num_bytes:,}")
    return None


def _written(path: Path) -> str | None:
    """Return when a lone file or the `shards.json` of a store was written, as ISO 8601 has it; None: not known."""
    index = find_index(path)
    file = path if index is None else index
    if isinstance(file, RemotePath) or not file.is_file():
        return None
    return datetime.fromtimestamp(int(file.stat().st_mtime), UTC).isoformat()


def _describe_codec(opened: Corpus) -> dict[str, Any]:
    """Return the codec and its ratio; empty without one."""
    packed = opened.compressed_files
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


def _describe_stream(store: StoreCorpus) -> dict[str, Any]:
    boundary = store.index.meta.boundary_token_id
    is_counted = (store.has_documents and not store.told_by) or store.backend == "npy"  # else a field is read for it
    return {
        "kind": "stream",
        "backend": store.backend,
        "num_files": len(store.files),
        "tokens": store.num_tokens,
        "documents": store.document_count if is_counted else None,
        **({"documents_field": store.told_by} if store.told_by else {}),
        "boundary_token_id": None if boundary == NO_BOUNDARY else boundary,
        "crc32": _has_crc32(store),
    }


def _has_crc32(stream: StoreCorpus) -> bool:
    """Return whether a stream has digests that `verify="batch"` compares its chunks with."""
    compared = stream.compared_tokens()
    if compared is not None:
        compared.close()
    return compared is not None


def _target_problem(corpus: Corpus) -> str:
    """Return the reason why targets cannot be read; "": they can."""
    return problem_of_targets(corpus.batches(1, 1) if corpus.is_stream else corpus.batches())


def _fingerprint_of(corpus: Corpus) -> str:
    """Return the fingerprint of a stream, or that of stored batches, as states have it."""
    return corpus.fingerprint if corpus.is_stream else corpus.known_as.in_cache(corpus.batches())


def _describe_batches(corpus: Corpus) -> dict[str, Any]:
    meta = corpus.meta
    is_store = isinstance(corpus, StoreCorpus)
    return {
        "kind": "store" if is_store else "file",
        "backend": " and ".join(sorted(corpus.backends)),
        "state": COMPLETE if corpus.complete else "growing: its writer is at work, or was killed",
        "batch_size": meta.batch_size,
        "seq_len": meta.seq_len,
        "num_batches": corpus.num_units,
        "tokens": corpus.num_tokens,
        "total_records": meta.total_records,
        "seed": meta.seed,
        "documents": meta.document_count or None,
        "pieces": corpus.has_pieces,
        "sha256": corpus.sha256,
        **({} if is_store else {"layout": describe_layout(corpus.extents, meta.batch_bytes)}),
    }


def describe_epoch(
    opened: OpenPath,
    batch_size: int | None,
    seq_len: int | None,
    stride: int | None,
    world_size: int,
    read_as: ReadAs,
    split: str | None,
) -> dict[str, int]:
    """Return the records of an epoch of a loader without targets, its steps, and the records that fill no step.

    A loader reads one split, that for training: of other ones, its files are opened for it, or refused.
    """
    path, look, found, corpus = opened
    is_own = split is None and found.splits_there() not in ([None], [DEFAULT_SPLIT])
    if not is_own:
        note_left_out(found, look)
        batches, is_own = open_for_loader(corpus, batch_size, seq_len)
    elif isinstance(found, FoundStore):  # whose index is read
        training = corpus_for_training(found, AUTO_SPLIT)
        with on_failure(training.close):
            batches, _ = open_for_loader(training, batch_size, seq_len)
    else:
        batches, is_own = open_for_loader(path, batch_size, seq_len, read_as=read_as, split=AUTO_SPLIT)
    with batches if is_own else nullcontext():
        if stride is not None:
            batches = batches.corpus.batches(batch_size, seq_len, stride)
        rows = batch_size or batches.batch_size
        length = seq_len or batches.seq_len
        if batches.seq_len % length:
            raise ArgumentError(f"{path}: seq_len must divide the stored {batches.seq_len:,}, found {length:,}")
        records = batches.num_records * (batches.seq_len // length)
    steps, left_out = divmod(records, rows * world_size)
    return {
        "batch_size": rows,
        "seq_len": length,
        "world_size": world_size,
        "records": records,
        "steps": steps,
        "left_out": left_out,
    }


def epoch_text(epoch: dict[str, int]) -> str:
    """Return the result of `describe_epoch` in words."""
    each = f"{epoch['batch_size']:,} x {epoch['seq_len']:,} on {counted(epoch['world_size'], 'rank')}"
    text = f"{counted(epoch['records'], 'record')}: {counted(epoch['steps'], 'step')} of {each}"
    if not epoch["left_out"]:
        return text
    return f'{text}, and {epoch["left_out"]:,} that last="drop" leaves out (another last= reads them)'


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


def _describe_documents(opened: Corpus) -> tuple[dict[str, Any] | None, ZbError | None]:
    """Return the facts of the first table of documents, None without one or of offsets only; and its damage."""
    if isinstance(opened, StoreCorpus) and opened.told_by:
        return None, None
    try:
        table = opened.document_table
        if not isinstance(table, DocumentTable) or not len(table) or not table.parts[0].sha256:
            return None, None
        file = table.file(0)
        first = table.document(0)
        names = {name for number in range(len(table.parts[:MAX_TABLES])) for name in table.file(number).sources}
        found = {
            "count": len(table.parts),
            "documents": len(table),
            "ids": first.id is not None,
            "metadata": list(first.metadata),
            "sources": None if len(table.parts) > MAX_TABLES else len(names),
            "spans": file.spans_codec if file.has_spans else None,
        }
    except ZbError as error:
        return {"problem": str(error)}, error
    return found, None


def _described_splits(opened: Corpus) -> dict[str, Any]:
    """Return the splits of files in no store, whose names tell several; else {}."""
    sizes = list(zip(opened.file_splits, map(int, np.diff(opened.file_edges)), strict=True))
    splits = train_first(split for split, _ in sizes)
    if len(splits) < 2:
        return {}
    counts = Counter(split for split, _ in sizes)
    tokens = {name: sum(size for split, size in sizes if split == name) for name in splits}
    return {"splits": {name: {"files": counts[name], "tokens": tokens[name]} for name in splits}}


def _describe_index(index: ShardIndex, num_batches: int) -> dict[str, Any]:
    """Return the facts of a `shards.json`; the batches of a stream are not counted."""
    table = index.table.values  # an array for each fact: an entry for each shard would take ten times as long
    names = table["split"]
    of_stream = index.meta.layout == STREAM_LAYOUT
    counts = table["num_batches"].tolist()
    counts[-1] += num_batches - sum(counts)  # the index does not count a growing shard
    splits: dict[str, dict[str, Any]] = {}
    for split in dict.fromkeys(names):
        here = [number for number, name in enumerate(names) if name == split]
        if of_stream:
            sums = {
                "tokens": int(table["token_count"][here].clip(0).sum()),
                "documents": int(table["document_count"][here].clip(0).sum()),
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
    tokenizer = d["tokenizer"]
    source = d.get("source") or {}
    if tokenizer:
        kind = tokenizer.get("kind", "")
        name = tokenizer.get("name", "unknown")
        spec = name if kind in ("", name) else f"{kind}:{name}"
        lines.append(("tokenizer", f"{spec}, digest {_short(str(tokenizer.get('digest', 'unknown')))}"))
    largest = d["max_token"]
    if d["vocab_size"]:
        stored = "" if largest is None else f", the largest stored is {largest:,}"
        lines.append(("vocabulary", f"{counted(d['vocab_size'], 'id')}{stored}"))
    elif largest is not None:
        lines.append(("largest id", f"{largest:,}"))
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
        text = counted(found["shards"], "shard") if "shards" in found else counted(found["files"], "file")
        if "num_batches" in found:
            text += f" of {_range_of_batches(found)}"
        text += f", {found['tokens']:,} tokens"
        if "documents" in found:
            text += f", {counted(found['documents'], 'document')}"
        lines.append((split, text))
    more = len(lines) - SPLITS_SHOWN
    if more > 1:
        lines[SPLITS_SHOWN:] = [("", f"and {more:,} more splits, which --json lists")]
    return lines


def _range_of_batches(found: dict[str, int]) -> str:
    low = found["min_batches"]
    high = found["max_batches"]
    if low != high:
        return f"{low:,} to {high:,} batches"
    return f"{counted(low, 'batch')} each" if found["shards"] > 1 else counted(low, "batch")


def describe_lines(description: dict[str, Any]) -> Lines:
    """Return the description as (name, text) lines."""
    d = description
    lines = [("path", d["path"])]
    if d["dataset"] is not None:
        lines.append(("dataset", d["dataset"]))
    lines += _shape_lines(d)
    if "files_left_out" in d:
        lines.append(("left out", f"{counted(d['files_left_out'], 'file')}, the first is {d['first_left_out']}"))
    lines += _document_lines(d)
    lines += _field_lines(d)
    if "target_problem" in d:
        lines.append(("no targets", d["target_problem"]))
    lines += _origin_lines(d)
    lines += _split_lines(d)
    lines += _storage_lines(d)
    lines += [("health", _health_text(d)), ("fastest", _fastest_text(d))]
    if d["written"]:
        lines.append(("written", f"{datetime.fromisoformat(d['written']):%Y-%m-%d %H:%M:%S} UTC"))
    return [*lines, ("fingerprint", _short(d["fingerprint"]))]


def _short(text: str) -> str:
    """Return a text with the beginnings of its digests, which `--json` has whole."""
    return re.sub(r"[0-9a-f]{64}", lambda match: f"{match[0][:16]}…", text)


def problem_of(d: dict[str, Any]) -> str | None:
    """Return the damage that a description has met; None: none was met, which is not a proof."""
    found: str | None = (d["document_tables"] or {}).get("problem") or d["size_problem"]
    return found


def is_finished(d: dict[str, Any]) -> bool:
    """Return whether the writer of a described store has ended its work."""
    return d.get("state", COMPLETE) in (COMPLETE, DAMAGED)


def _health_text(d: dict[str, Any]) -> str:
    """Return whether it is whole, and the command that verifies it."""
    if problem := problem_of(d):
        advice = ": 'zb verify' names the batches that are lost" if problem == d["size_problem"] else ""
        return f"damaged: {problem}{advice}"
    if not is_finished(d):
        return "not finished: its writer is at work, or was killed"
    if d["verified"] == "none" and not d.get("crc32") and not d.get("sha256"):
        return "complete, no digest is stored: 'zb verify' names the way to one"
    return "complete, not verified now: 'zb verify' compares all of it"


def _fastest_text(d: dict[str, Any]) -> str:
    """Return the reads that are the fastest of it, or what would make them so."""
    if d["file_system"] != "local":
        return "copied to the node's own disk: by 'zb stage', or cache= of a loader"
    if d["access"] == "h5py" and is_finished(d):
        return "converted: 'zb convert' makes batches that need no HDF5 lock"
    if d["kind"] == "stream":
        return "rows of any length, in any order; 'zb bench' times them"
    shape = f"{d['batch_size']:,} x {d['seq_len']:,}"
    if "codec" in d:
        return f"whole batches, {shape}; without a codec none is decoded"
    return f"whole batches, {shape}, in any order; 'zb bench' times them"


def _shape_lines(d: dict[str, Any]) -> Lines:
    """Return the kind, the shape, and the numbers of tokens and records."""
    rounded = f" ({format_count(d['tokens']).strip()})" if d["tokens"] >= 1000 else ""
    size = f"{d['tokens']:,} {d['dtype']}{rounded}, {format_bytes(d['bytes'])} on disk"
    if d["kind"] == "stream":
        return [("kind", f"{d['backend']} token stream in {counted(d['num_files'], 'file')}"), ("tokens", size)]
    if d["total_records"]:
        records = f"{d['total_records']:,} before batching"
    else:
        records = f"{d['num_batches'] * d['batch_size']:,} in the batches"
    if d.get("shuffle") == "none":
        records += ", not shuffled"
    elif d["seed"]:
        records += f", shuffled with seed {d['seed']}"
    state = "" if d["state"] == DAMAGED else f", {d['state']}"  # the line of its health has the damage
    return [
        ("kind", f"{d['backend']} {d['kind']}{_files_text(d)}{state}"),
        ("batches", f"{d['num_batches']:,} of {d['batch_size']:,} x {d['seq_len']:,} {d['dtype']}"),
        ("tokens", size),
        ("records", records),
    ]


def _files_text(d: dict[str, Any]) -> str:
    """Return the number of the files in a folder without an index; "" of anything else."""
    return f" of {counted(d['num_files'], 'file')}" if d["kind"] == "folder" else ""


def _storage_lines(d: dict[str, Any]) -> Lines:
    """Return how the batches lie on disk, how they are read, and which reads are checked."""
    lines = []
    if "layout" in d:
        is_unpacked = "codec" in d and d["access"] != "h5py"
        text = "a compressed chunk for each batch" if is_unpacked else layout_text(d["layout"], d.get("obstacle"))
        lines.append(("layout", f"{text}: read past HDF5" if d.get("past_hdf5") else text))
    if "codec" in d:
        sizes = f"{format_bytes(d['compressed_bytes'])} for {format_bytes(d['uncompressed_bytes'])} of tokens"
        lines.append(("codec", f"{d['codec']}: {sizes}, {d['ratio']} to 1"))
    return [*lines, ("access", _access_text(d)), ("reads", _reads_text(d))]


def _access_text(d: dict[str, Any]) -> str:
    """Return the way of reading, and the place."""
    if d["file_system"] == "objects":
        return "ranged reads of objects"
    place = f"{d['file_system']} file system"
    if d["access"] != "auto":
        return f"{d['access']} ({place})"
    if d["file_system"] == "local":
        return f"auto ({place}: batches in the page cache are read from a mapping, others by position)"
    return f"auto ({place}: all tokens are read by position, none are mapped)"


def _document_lines(d: dict[str, Any]) -> Lines:
    """Return the number of documents, and their stored facts."""
    if "documents_field" in d:
        return [("documents", f"told apart by {d['documents_field']}")]
    tables = d["document_tables"] or {}
    count = d["documents"] or tables.get("documents")
    if count is None and not tables:
        return []
    parts = [f"{count:,}" if count is not None else "unknown number"]
    if d["kind"] == "stream":
        boundary = d["boundary_token_id"]
        parts.append(f"boundary token {'none' if boundary is None else boundary}")
    elif d.get("packing"):
        parts.append(f"{d['packing']} packing")
    if d["kind"] != "stream":
        parts.append(f"their places in the records are {'stored' if d['pieces'] else 'not stored'}")
    lines = [("documents", ", ".join(parts))]
    if "problem" in tables:
        return [*lines, ("", tables["problem"])]
    if tables:
        stored = ", ".join(_stored_of_documents(tables)) or "their offsets"
        lines.append(("document facts", f"{stored}, in {counted(tables['count'], 'table')}"))
    return lines


def _stored_of_documents(tables: dict[str, Any]) -> Iterator[str]:
    """Yield the facts of documents that their tables have."""
    if tables["ids"]:
        yield "ids"
    if tables["metadata"]:
        yield f"metadata ({', '.join(tables['metadata'])})"
    if tables["sources"]:
        yield counted(tables["sources"], "source")
    if tables["spans"]:
        yield f"spans ({tables['spans']})"


def _field_lines(d: dict[str, Any]) -> Lines:
    shown = []
    for name, field in d["fields"].items():
        dtype = field["dtype"]
        text = np.dtype(dtype).name if isinstance(dtype, str) else str([part for part, *_ in dtype])
        shape = str(field["shape"]) if field["shape"] else ""
        shown.append(f"{name} {text}{shape}")
    return [("fields", ", ".join(shown))] if shown else []


def _reads_text(d: dict[str, Any]) -> str:
    """Return the reads that are compared with their crc32."""
    if d["verified"] != "none":
        return "each batch that is read whole is compared with its crc32"
    if d["kind"] == "stream" and d["crc32"]:
        return 'not checked: a window is less than a chunk; verify="batch" reads and checks whole chunks'
    if not is_finished(d):
        return "not checked: its writer has not finished"
    return "not checked: no crc32 is stored"


def layout_text(layout: dict[str, Any] | None, obstacle: str | None = None) -> str:
    """Return the result of `describe_layout` in words, or the obstacle to reading extents."""
    if layout is None:
        return f"read through h5py: {obstacle}" if obstacle else "no plain extents: read through h5py"
    start, stride, *_ = (layout["extents"] or [[0, 0]])[0]
    aligned = "page-aligned" if layout["page_aligned"] else "not page-aligned"
    return f"{counted(layout['runs'], 'run')}, first at byte {start:,}, stride {stride:,}, {aligned}"


def interrupted(folder: Path) -> Output | None:
    """Return the description of a `.partial/` folder; None if no journal is in it."""
    if isinstance(folder, RemotePath) or not folder.is_dir():
        return None
    journals = journal_paths(folder)
    records = [read_journal(path) for path in journals.values()]
    if not records:
        return None
    at_work = True
    with suppress(UnavailableError), leftover_of_dead_writer(folder):
        at_work = False
    kind = "a conversion at work" if at_work else "an interrupted conversion"
    unit = records[0].unit
    total = records[0].total
    finished = len(set().union(*(record.finished for record in records)))
    is_array = any(part != WHOLE for part in journals)
    merge = f"'zb index merge {one_word(str(folder.with_suffix('')))}'"
    next_step = "go on with the same command and --resume"
    if at_work:
        next_step = "wait"
    elif is_array:
        is_whole = finished == total
        next_step = f"publish them with {merge}" if is_whole else f"{next_step} for each part, then with {merge}"
    report = {
        "path": str(folder),
        "kind": "unfinished conversion",
        "at_work": at_work,
        "unit": unit,
        "finished": finished,
        "total": total,
    }
    state = f"{finished:,} of {total:,} {unit} are finished; {next_step}"
    return Output(report, [("path", str(folder)), ("kind", kind), ("state", state)])
