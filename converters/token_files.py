"""Files of tokens that are made of documents: written by any number of processes, with a journal, proved by bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from zb_hdf5 import ConvertError, StoreMeta
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.documents import DocumentCounts, DocumentSource, Encoded, Route, route
from zb_hdf5.converters.engines import Progress, Workers, no_progress
from zb_hdf5.converters.journal import CheckTask, Head, Journal, is_result
from zb_hdf5.converters.shard import COMMIT_BYTES, file_states, require_unchanged
from zb_hdf5.documents.document_table import DocumentTable, documents_path, part_of
from zb_hdf5.documents.document_writer import DocumentsWriter
from zb_hdf5.files.publishing import LockedFolder, disk_errors
from zb_hdf5.formats.hdf5.stream_writer import HDF5ShardWriter
from zb_hdf5.spec import INDEX_NAME, NO_BOUNDARY, NO_CODEC, bad_token_message, find_bad_token, token_limit
from zb_hdf5.text.corpus import row_of_source

#: The word for the files in the journal and in messages.
TOKEN_FILES: Final = "files of tokens"
#: Ids that are looked at together.
BLOCK_IDS: Final = 1 << 14


@dataclass(frozen=True)
class FinishedTokens:
    """A file of tokens that is whole and on disk, the counts of its documents, and the digest of all its bytes."""

    token_count: int
    counts: DocumentCounts
    files_sha256: str
    max_token: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        counts = DocumentCounts.from_json(value["counts"])
        return cls(int(value["token_count"]), counts, str(value["files_sha256"]), value["max_token"])


@dataclass(frozen=True)
class TokensTask:
    """The documents of one file of tokens, for any process. Picklable."""

    source: DocumentSource
    route: Route
    path: Path  # the table of its documents has its name and a suffix
    num_threads: int
    codec: str

    @property
    def paths(self) -> tuple[Path, Path]:
        return self.path, documents_path(self.path)

    @property
    def amount(self) -> int:
        return self.route.num_bytes

    def amount_done(self) -> int:
        """Return how many bytes of documents another process has read, by the note that it leaves."""
        with suppress(OSError, ValueError):
            return int(self._note.read_bytes())
        return 0

    @property
    def _note(self) -> Path:
        return self.path.with_name(self.path.name + ".progress")

    def read(self, counts: DocumentCounts, progress: Progress) -> Iterator[Encoded]:
        """Yield the documents, some at a time, and count them."""
        done = 0
        try:
            for encoded, read in self.route.read(self.source, self.num_threads, counts):
                yield encoded
                progress(read - done)
                done = read
                self._note.write_text(str(done))
            progress(self.amount - done)
        finally:
            self._note.unlink(missing_ok=True)


def write_stream(task: TokensTask, progress: Progress = no_progress) -> FinishedTokens:
    """Write the documents of one task to an HDF5 stream."""
    counts, source, boundary = DocumentCounts(), task.source, task.source.boundary_token_id
    with HDF5ShardWriter(
        task.path, dtype=source.dtype.name, boundary_token_id=NO_BOUNDARY if boundary is None else boundary,
        vocab_size=source.vocab_size, tokenizer=source.tokenizer, overwrite=True, codec=task.codec,
        origin={"source": source.description, "split": task.route.split},
        commit_bytes=COMMIT_BYTES,
    ) as writer:  # fmt: skip
        for encoded in task.read(counts, progress):
            try:
                writer.write_documents(encoded.tokens, encoded.lengths, documents=encoded.table_rows())
            except ConvertError as error:
                raise ConvertError(f"{encoded.source}: {error}") from error
        info = writer.finish()
    return FinishedTokens(info.token_count, counts, files_sha256(task.paths), info.max_token)


def write_raw_tokens(task: TokensTask, progress: Progress = no_progress) -> FinishedTokens:
    """Write the documents of one task as raw tokens, and their table."""
    counts, digest, source = DocumentCounts(), hashlib.sha256(), task.source
    path, table = task.paths
    with disk_errors(path), open(path, "wb") as tokens, DocumentsWriter(table) as documents:
        for encoded in task.read(counts, progress):
            _require_tokens(encoded, source)
            data = encoded.tokens.astype(source.dtype)
            tokens.write(data)
            digest.update(data)
            documents.append(encoded.lengths, encoded.table_rows())
        tokens.flush()
        os.fsync(tokens.fileno())
        documents.publish(task.route.split)
    with open(table, "rb") as written:
        sha256 = combined([digest, hashlib.file_digest(written, "sha256")])
    return FinishedTokens(documents.token_count, counts, sha256)


def _require_tokens(encoded: Encoded, source: DocumentSource) -> None:
    bad = find_bad_token(encoded.tokens, token_limit(source.dtype, source.vocab_size))
    if bad is not None:
        meta = StoreMeta(1, 1, source.dtype, vocab_size=source.vocab_size)
        document = int(np.searchsorted(np.cumsum(encoded.lengths), bad, side="right"))
        where = f"the document of {row_of_source(Path(encoded.source).name, encoded.rows[document])}"
        raise ConvertError(bad_token_message(encoded.source, where, encoded.tokens[bad], meta))


class TokenFiles(NamedTuple):
    """All files of tokens of a conversion."""

    files: list[tuple[TokensTask, FinishedTokens]]
    counts: DocumentCounts
    files_kept: int  # finished by an earlier run
    tokens_kept: int  # of documents, not made again


def routes_of(source: DocumentSource, conversion: Conversion, num_shards: int | None) -> list[Route]:
    """Deal the documents of a source to files of tokens, as a conversion asks. Raises as `route`."""
    seed = 42 if conversion.seed is None else conversion.seed
    held_out, last = conversion.val_fraction or 0.0, bool(conversion.val_last_shard)
    return route(source, num_shards, val_fraction=held_out, val_last_shard=last, seed=seed)


@dataclass(frozen=True)
class TokensPlan:
    """A source of documents, its routes, and JSON of what else decides the store that is made of the tokens."""

    source: DocumentSource
    routes: list[Route]
    options: dict[str, Any]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """JSON of everything that decides the tokens of every file."""
        routes = [
            [each.split, each.holdout and asdict(each.holdout), [group[:2] for group in each.groups]]
            for each in self.routes
        ]
        return {
            "source": self.source.description,
            **self.source.identity,
            "files": file_states(self.source.paths),
            "routing": hashlib.sha256(json.dumps(routes).encode()).hexdigest(),
        }

    @cached_property
    def description(self) -> dict[str, Any]:
        """The `source` entry of `shards.json`, with a digest over everything but the mtime of the sources."""
        sizes = {path: size for path, (size, _) in self.identity["files"].items()}
        work = hashlib.sha256(json.dumps([{**self.identity, "files": sizes}, self.options]).encode()).hexdigest()
        return {**self.source.description, "work": work}

    @property
    def num_bytes(self) -> int:
        """About how many bytes of documents are read, for progress."""
        return sum(each.num_bytes for each in self.routes)

    def is_made(self, store: Path, conversion: Conversion) -> bool:
        """Return whether `resume` finds a store that was made of these files as they are now, and in the same way."""
        if not conversion.resume or conversion.overwrite or not store.is_dir():
            return False
        try:
            same = json.loads((store / INDEX_NAME).read_bytes())["source"]["work"] == self.description["work"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return is_result(store, same, self.source.paths)

    def write(
        self,
        write: Callable[[TokensTask, Progress], FinishedTokens],
        paths: Sequence[Path],
        folder: LockedFolder,
        conversion: Conversion,
        workers: Workers,
        *,
        codec: str = NO_CODEC,
    ) -> TokenFiles:
        """Write each file of tokens into a folder, unless an interrupted run has finished it; keep a journal there."""
        source, plan = self.source, {**self.identity, "codec": codec}
        workers.shown.begin("tokenizing" if source.tokenizer else "cutting", self.num_bytes, "B")
        tasks = {
            number: TokensTask(source, each, path, workers.num_threads, codec)
            for number, (each, path) in enumerate(zip(self.routes, paths, strict=True))
        }
        head = Head(TOKEN_FILES, len(tasks), plan, {})
        journal = Journal(
            folder, head, tasks, FinishedTokens, overwrite=bool(conversion.overwrite), resume=bool(conversion.resume)
        )
        journal.take_up(workers.engine, is_intact)
        kept = dict(journal.finished)
        workers.shown.keep(sum(tasks[number].amount for number in kept))
        with journal.kept_for_resume():
            finished = journal.run(workers.engine, write, journal.missing, workers.shown.advance)
        require_unchanged(source.paths, plan["files"])
        counts = DocumentCounts()
        for done in finished:
            counts.add(done.counts)
        if not counts.documents:
            raise ConvertError(f"{source.paths[0]}: {counts.no_documents(len(source.paths))}")
        if source.has_ids:
            require_unique_ids([task.paths[1] for task in tasks.values() if task.paths[1].exists()])
        tokens_kept = sum(done.counts.tokens.tokens_in for done in kept.values())
        return TokenFiles(list(zip(tasks.values(), finished, strict=True)), counts, len(kept), tokens_kept)


def is_intact(check: CheckTask[TokensTask, FinishedTokens], progress: Progress = no_progress) -> bool:
    """Return whether a finished file still has every byte that it was finished with."""
    return files_sha256(check.task.paths) == check.finished.files_sha256


def files_sha256(paths: Iterable[Path]) -> str:
    """Return one digest over all bytes of some files; a missing one counts as empty."""
    digests = []
    for path in paths:
        digest = hashlib.sha256()
        with suppress(FileNotFoundError), open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digests.append(digest)
    return combined(digests)


def combined(digests: Iterable[Any]) -> str:
    """Return one digest over the digests of files."""
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def require_unique_ids(paths: Sequence[Path]) -> None:
    """Raise `ConvertError` if two documents of some tables have one id. Takes some 32 bytes for each document."""
    parts, first = [], 0
    for path in paths:
        part = part_of(path)
        parts.append(part._replace(path=str(path), first_document=first))
        first += part.document_count
    table = DocumentTable("", parts)
    try:
        digests = np.concatenate([_id_digests(table, number) for number in range(len(parts))])
        order = digests.argsort(kind="stable")
        for k in np.flatnonzero(np.diff(digests[order]) == 0).tolist():
            one, other = (table.document(int(number)) for number in order[k : k + 2])
            if one.id == other.id:
                raise ConvertError(
                    f"{row_of_source(other.source, other.row)}: the id {other.id!r} was there before, in "
                    f"{row_of_source(one.source, one.row)}: name a column whose values differ, or leave out --id-column"
                )
    finally:
        table.close()


def _id_digests(table: DocumentTable, number: int) -> np.ndarray:
    """Return 64 bits of the digest of each id of one table: equal ones are then compared themselves."""
    file, count, digests = table.file(number), table.parts[number].document_count, bytearray()
    for start in range(0, count, BLOCK_IDS):
        for text in file.rows(start, min(start + BLOCK_IDS, count)).ids or ():
            digests += hashlib.blake2b(text, digest_size=8).digest()
    return np.frombuffer(digests, "<u8")
