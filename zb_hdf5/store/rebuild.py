"""The index of a store, made from the facts of its finished files, also where it was lost; and lost `.crc32` files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from zb_hdf5.documents.document_offsets import table_sha256
from zb_hdf5.documents.document_table import DocumentPart, DocumentTable, in_order, part_of
from zb_hdf5.documents.metadata import TableInfo
from zb_hdf5.documents.table_file import PiecesFile
from zb_hdf5.errors import ArgumentError, BackendError, ExistsError, FormatError, IncompleteError, Remedy, ZbError
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import RemotePath, local_path, open_file
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.formats.batch_writer import FieldDigest
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.corpus_file import CorpusFile
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.formats.native import ensure_crc32_file
from zb_hdf5.spec import (
    BATCHES_LAYOUT,
    DEFAULT_SPLIT,
    DOCUMENTS_PREFIX,
    DOCUMENTS_STORE_SUFFIX,
    INDEX_NAME,
    NOT_KNOWN,
    SHARD_PREFIX,
    STREAM_LAYOUT,
    UPLOAD_DIGEST,
    StoreMeta,
    pieces_path,
)
from zb_hdf5.store.both_formats import require_one_store
from zb_hdf5.store.format_list import FORMATS, backends, load_format
from zb_hdf5.store.index import ShardIndex, source_files
from zb_hdf5.store.recognition import detect_backend
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.unchecked_file import open_chunks

UNKNOWN_SHUFFLE: Final = "unknown"  # of an index made from shards that do not name theirs
REPAIRED: Final = ".repaired"  # in the name of a new file
_NAME: Final = re.compile(
    rf"{re.escape(SHARD_PREFIX)}(?P<number>\d+)(-of-(?P<count>\d+))?{UPLOAD_DIGEST}"
    rf"(?P<repaired>({re.escape(REPAIRED)})*)\.\w+"
)
#: Missing shards that a message names.
MAX_SHOWN: Final = 20
#: The facts of a store that files with a sidecar cannot hold.
ONLY_IN_SOME_FILES: Final = ("vocab_size", "tokenizer")
#: Called with the files that are done since the last call, and with all.
CountFiles = Callable[[int, int], None]


class PiecesFacts(NamedTuple):
    """The facts of a file of pieces that an index has, and the split whose documents it counts."""

    info: TableInfo
    split: str

    @classmethod
    def of(cls, file: PiecesFile) -> Self:
        """Return the facts of an open file."""
        return cls(TableInfo(file.num_bytes, file.sha256), file.split)


def index_files(
    paths: Sequence[str | os.PathLike[str]],
    *,
    splits: Mapping[str, str] | None = None,
    source: dict[str, Any] | None = None,
    shuffle: str | None = None,
    progress: CountFiles = lambda done, total: None,
) -> ShardIndex:
    """Return the index of files of one folder, of batches or of streams.

    Parameters
    ----------
    paths
        The files, in the order of their shards.
    splits
        Name of a file -> its split, for files that do not name it.
    source, shuffle
        The origin of the tokens and the record shuffle; None: as the files have them.
    progress
        Called with 1 after each file, and with the number of all.
    """
    # nothing is known yet of a file that lies on disk but its place
    files = [CorpusFile(path.parent, path.name) for path in map(local_path, paths)]
    if not files:
        raise ArgumentError("expected at least one file for an index, found none")
    entries: list[ShardEntry] = []
    metas: list[StoreMeta] = []
    max_tokens: list[int | None] = []
    table_digests: list[str] = []
    origin: dict[str, Any] = {}
    sources: list[Any] = []  # of a stream: each file names the sources of its own documents
    for file in files:
        path = file.path
        with open_chunks(path) as corpus:
            if not corpus.complete:
                raise IncompleteError(f"{path}: its writer has not finished", remedy=Remedy.REPAIR, at=path)
            metas.append(corpus.meta)
            max_tokens.append(corpus.max_token)
            table_digests.append(corpus.documents_sha256)
            expected, found = (_likeness(meta) for meta in (metas[0], metas[-1]))
            if found != expected:
                raise FormatError(f"{path}: expected {expected} as in {files[0].name}, found {found}")
            ensure_rows(corpus)
            entries.append(entry_of(corpus, corpus.origin.get("split", (splits or {}).get(file.name))))
            sources += source_files(corpus.origin.get("source", {}))
            origin |= corpus.origin
        progress(1, len(files))
    meta = replace(
        metas[0],
        total_records=sum(meta.total_records for meta in metas),
        document_count=sum(meta.document_count for meta in metas),
    )
    known = origin.get("source", {}) if source is None else source
    if source is None and "files" in known and metas[0].layout == STREAM_LAYOUT:
        known = {**known, "files": list(dict.fromkeys(sources))}
    shuffle = shuffle or origin.get("shuffle", "none" if origin else UNKNOWN_SHUFFLE)
    tables = document_tables(files, entries, table_digests)
    index = ShardIndex(meta, entries, shuffle, known, documents=tables)
    return index.with_max_token(max_tokens) if source is None else index


def document_tables(
    files: Sequence[CorpusFile], entries: Sequence[ShardEntry], digests: Sequence[str] | None = None
) -> tuple[DocumentPart, ...]:
    """Describe the document tables of streams, or in the folder of shards of batches.

    Parameters
    ----------
    digests
        The digest of the table beside each file, as the file has it; None: each file is opened for it.
    """
    if any(entry.pieces for entry in entries):
        tables = sorted(files[0].folder.glob(f"{DOCUMENTS_PREFIX}*{DOCUMENTS_STORE_SUFFIX}"))
        return tuple(in_order(map(part_of, tables)))
    parts: list[DocumentPart] = []
    for number, (file, entry) in enumerate(zip(files, entries, strict=True)):
        path = file.path
        if digests is not None:
            sha256 = digests[number]
        else:
            sha256 = table_sha256(path) if entry.backend == "hdf5" else ""
        table = DocumentTable.of_file(path, entry.sha256, sha256=sha256)
        if table is None:
            part = DocumentPart(path.name, 0, "", token_count=entry.token_count)
        else:
            part = table.parts[0]
            table.close()
        parts.append(part._replace(split=entry.split, document_count=entry.document_count))
    return tuple(part for part in in_order(parts) if part.sha256)


def _require_own_tables(folder: Path, old: ShardIndex, tables: Sequence[DocumentPart]) -> None:
    """Raise `FormatError` for a document table in the folder of a store whose old index has others alone.

    A table does not tell to which store it belongs, and each one moves the documents after it to other tokens. One that
    was made again has the name of the one before it.
    """
    known = {table.path for table in old.documents}
    other = next((table.path for table in tables if known and table.path not in known), None)
    if other is not None:
        raise FormatError(
            f"{folder / other}: is not of this store, or a copy: expected the document tables of {INDEX_NAME}, "
            f"{', '.join(sorted(known)[:MAX_SHOWN])}; move it away"
        )


def _likeness(meta: StoreMeta) -> str:
    """Return the facts that all files of a store share; a `.batch` has neither vocabulary nor tokenizer."""
    fields = "".join(f", {field.name} {field.dtype}{field.shape or ''}" for field in meta.fields)
    if meta.layout != STREAM_LAYOUT:
        return f"{meta.shape} {meta.dtype.name}{fields}"
    return (
        f"a stream of {meta.dtype.name} in chunks of {meta.chunk_tokens:,} tokens, boundary token "
        f"{meta.boundary_token_id}, vocabulary {meta.vocab_size:,}, tokenizer {meta.tokenizer or 'unknown'}{fields}"
    )


def ensure_rows(corpus: Corpus) -> None:
    """Write the crc32 rows of a file whose format keeps them in a sidecar, if it has none."""
    if FORMATS[corpus.backend].has_sidecar:
        ensure_crc32_file(corpus)


def entry_of(
    corpus: Corpus, split: str | None = None, *, sha256: str = "", pieces: PiecesFacts | None = None
) -> ShardEntry:
    """Describe a finished file; nothing is written.

    Parameters
    ----------
    corpus
        The whole file.
    split
        The split of the shard; None: as its pieces have it, else "train".
    sha256
        The sha256 of its tokens; "": as the file has it, or computed from its tokens.
    pieces
        The facts of its file of pieces; None: it is opened, if there is one.
    """
    is_stream = corpus.is_stream
    num_bytes = _num_bytes(corpus.path)
    fields = {field.name: corpus.field(field.name) for field in corpus.meta.fields}
    columns = dict(corpus.columns)
    digests = {}
    for name, field in fields.items():
        columns |= field.columns
        digests[name] = FieldDigest(num_bytes, field.sha256 or field.digests.tokens_sha256(), _crc32_of(field))
    if pieces is None and not is_stream and pieces_path(corpus.path).exists():
        num_records = corpus.num_units * corpus.meta.batch_size
        known = PiecesFile(corpus.path, num_records, corpus.meta.seq_len, tokens_sha256=corpus.sha256)
        with closing(known) as file:
            pieces = PiecesFacts.of(file)
    if pieces is not None:
        split = split or pieces.split
    document_count = corpus.meta.document_count
    return ShardEntry(
        path=corpus.path.name,
        backend=corpus.backend,
        num_bytes=num_bytes,
        num_batches=corpus.num_units,
        token_count=corpus.num_tokens,
        sha256=sha256 or corpus.sha256 or corpus.digests.tokens_sha256(),
        crc32=_crc32_of(corpus),
        document_count=document_count if document_count or is_stream else NOT_KNOWN,
        split=split or DEFAULT_SPLIT,
        columns=columns,
        fields=digests,
        pieces=None if pieces is None else pieces.info,
        compressed=corpus.compressed,
    )


def _num_bytes(path: Path) -> int:
    if not isinstance(path, RemotePath):
        return path.stat().st_size
    with open_file(path) as file:
        return file.seek(0, os.SEEK_END)


def _crc32_of(corpus: Corpus) -> int:
    rows = corpus.digests.crc32()
    return NOT_KNOWN if rows is None else crc32_of(rows)


# --- a lost index, or a lost `.crc32` --------------------------------------------------------------------------------


def rebuild_index(
    folder: str | os.PathLike[str], *, force: bool = False, progress: CountFiles = lambda done, total: None
) -> ShardIndex:
    """Write `shards.json` from the shards of `folder`, and return it.

    A `.repaired` shard replaces its original. For `.batch` files the index alone has the record shuffle, the source,
    the vocabulary, the tokenizer, and the splits if there are no pieces; for any files, the identity of a store written
    live. They are taken from the old index if it can still be read, and else are lost with it.

    Parameters
    ----------
    force
        Replace an index that can be read; accept that shards are missing.
    progress
        Called with 1 after each shard, and with the number of all.

    Raises
    ------
    ArgumentError
        If there is no such folder, or it has a store for each format.
    ExistsError
        If the index is valid.
    IncompleteError
        If shards are missing, by the numbers in their names, or one is not finished.
    FormatError
        If there are no shards, or they disagree, or the folder has a document table that the old index lacks.
    """
    folder = local_path(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder}: expected the folder of a store, found no folder")
    require_one_store(folder, "name the store whose index is to be made again")
    old = None
    with suppress(ZbError):
        old = ShardIndex.load(folder)
    if old is not None and not force:
        raise ExistsError(f"{folder / INDEX_NAME}: exists already, and is valid")
    paths = _shard_paths(folder, force)
    index = index_files(paths, progress=progress) if old is None else _index_like(old, paths, progress)
    index.save(folder)
    return index


def _index_like(old: ShardIndex, paths: list[Path], progress: CountFiles) -> ShardIndex:
    """Return the index of files, and the facts of the old index that they cannot hold."""
    known = {_number(shard.path): shard.split for shard in old.shards}
    splits = {path.name: known[_number(path.name)] for path in paths if _number(path.name) in known}
    index = index_files(paths, splits=splits, shuffle=old.shuffle, source=old.source, progress=progress)
    if index.meta.layout == BATCHES_LAYOUT:
        _require_own_tables(paths[0].parent, old, index.documents)
    kept = {name: getattr(index.meta, name) or getattr(old.meta, name) for name in ONLY_IN_SOME_FILES}
    # several shards of batches may have parts of a document
    if index.meta.layout == BATCHES_LAYOUT and known.keys() == {_number(path.name) for path in paths}:
        kept["document_count"] = old.meta.document_count
    # with other tokens, the state of a loader that read the store live no longer names the same records
    live_id = old.live_id if index.sha256 == old.sha256 else ""
    return replace(index, meta=replace(index.meta, **kept), live_id=live_id)


def add_crc32_file(path: str | os.PathLike[str]) -> Path | None:
    """Write the `<path>.crc32` of a file of a format that holds no crc32 rows; None if it has one."""
    path = local_path(path)
    with Look(path) as look:
        name = detect_backend(look) if path.is_file() else ""
    if not name or not FORMATS[name].has_sidecar:
        nouns = " or ".join(row.file_noun for row in backends().values() if row.has_sidecar)
        found = f", found a {name!r} file" if name else ""
        raise BackendError(f"{path}: expected {nouns}{found}")
    with load_format(FORMATS[name]).open(FoundFile(path=path)) as corpus:
        return ensure_crc32_file(corpus)


def _number(name: str) -> str:
    match = _NAME.fullmatch(name)
    return match["number"] if match else name


def _shard_paths(folder: Path, force: bool) -> list[Path]:
    """Return the shards in order of their numbers; `force` accepts that some are missing or not finished."""
    found, counts = _shards_by_number(folder)
    unfinished = sorted(path.name for path in folder.glob(f"{SHARD_PREFIX}*{PARTIAL_SUFFIX}"))
    waiting = [name for name in unfinished if not (folder / name.removesuffix(PARTIAL_SUFFIX)).exists()]
    if waiting and not force:
        raise IncompleteError(f"{folder}: {waiting[0]} is not finished", remedy=Remedy.REPAIR, at=folder / waiting[0])
    if not found:
        raise FormatError(f"{folder}: no file is called {SHARD_PREFIX}*: not a store; convert again")
    if len(counts) > 1:
        raise FormatError(
            f"{folder}: expected the shards of one store, found names of stores of {sorted(counts)} shards; move the "
            "others away"
        )
    absent = (number for number in range(counts.pop() or max(found) + 1) if number not in found)
    missing = list(islice(absent, MAX_SHOWN + 1))  # a name with a date makes billions of them
    if missing and not force:
        numbers = ", ".join(map(str, missing[:MAX_SHOWN])) + (", and more" if len(missing) > MAX_SHOWN else "")
        raise IncompleteError(f"{folder}: shards {numbers} are missing", remedy=Remedy.DO_WITHOUT)
    return [found[number] for number in sorted(found)]


def _shards_by_number(folder: Path) -> tuple[dict[int, Path], set[int]]:
    """Return number -> shard, and the numbers of all shards that their names give (0: none); a repaired one counts."""
    suffixes = {backend.suffix for backend in backends().values()}
    found: dict[int, Path] = {}
    counts = set()
    for path in sorted(folder.iterdir(), key=lambda path: path.name.count(REPAIRED)):
        match = _NAME.fullmatch(path.name)
        if match is None or path.suffix not in suffixes:
            continue
        number = int(match["number"])
        if number in found and not match["repaired"]:
            raise FormatError(f"{folder}: {found[number].name} and {path.name} have the same shard number; remove one")
        found[number] = path
        counts.add(int(match["count"] or 0))
    return found, counts
