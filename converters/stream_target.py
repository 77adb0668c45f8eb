"""Token streams as a target: the file of each, the table of its documents, and the index of a store of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np

from zb_hdf5 import ConvertError, HDF5ShardWriter, ShardEntry, ShardIndex, StoreMeta
from zb_hdf5.converters.batch_source import TokenCounts, out_of_range
from zb_hdf5.converters.engines import CountedWork
from zb_hdf5.converters.journal import Finished, digests_of, meta_from_json
from zb_hdf5.converters.plan import COMMIT_BYTES, TargetFiles, Task
from zb_hdf5.converters.routes import ShardDocuments
from zb_hdf5.documents.document_table import DocumentPart, DocumentTable, in_order, part_of
from zb_hdf5.documents.metadata import JSON, DocumentRows, row_of_source
from zb_hdf5.errors import Remedy
from zb_hdf5.formats.batch_writer import ShardInfo
from zb_hdf5.formats.document_source import DocumentSource, TokenizedDocuments
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import bad_token_message, documents_path, find_bad_token, token_limit

#: The word for the files of documents in the journal and in messages.
TOKEN_FILES: Final = "files of tokens"
#: The keys of the plan of a folder that jobs can share: the tokens that are written, and the facts of documents.
WRITTEN_META: Final = "meta"
FACTS_KEPT: Final = "facts"
#: That of the digest over all that decides a store of streams, which its index has.
WORK_DIGEST: Final = "work"
#: Ids that are looked at together.
BLOCK_IDS: Final = 1 << 14


@dataclass(frozen=True)
class StreamFiles(TargetFiles):
    """HDF5 files of token streams, each with the table of its documents. See `TargetFiles`."""

    unit: ClassVar[str] = TOKEN_FILES

    def files(self, path: Path) -> tuple[Path, ...]:
        return path, documents_path(path)

    def write(self, task: Task, work: CountedWork) -> Finished:
        source: DocumentSource = task.source
        meta = task.meta
        counts = TokenCounts()
        writer = HDF5ShardWriter(
            task.path,
            dtype=meta.dtype.name,
            boundary_token_id=meta.boundary_token_id,
            vocab_size=meta.vocab_size,
            tokenizer=meta.tokenizer,
            overwrite=True,
            codec=meta.codec,
            origin=_origin(task),
            commit_bytes=COMMIT_BYTES,
            fields=meta.fields,
            spans_codec=source.spans_codec or JSON,
        )
        with writer:
            for encoded in read_documents(task, counts, work):
                try:
                    writer.write_documents(encoded.tokens, encoded.lengths, encoded.fields, documents=facts_of(encoded))
                except ConvertError as error:
                    raise refused(encoded, source, error) from error
            info = writer.finish()
        return finished_documents(task, info, counts)

    def index(self, folder: Path, facts: Mapping[str, Any], finished: Sequence[Finished]) -> ShardIndex:
        """See `TargetFiles`: the documents of all files together have different ids."""
        splits = {documents_path(folder / done.entry.path): done.entry.split for done in finished}
        tables = [part_of(path) for path in splits if path.exists()]
        if "ids" in facts[FACTS_KEPT]:
            require_unique_ids(folder, tables)
        meta = meta_from_json(facts[WRITTEN_META])
        return ShardIndex(
            replace(meta, document_count=sum(done.entry.document_count for done in finished)),
            [done.entry for done in finished],
            source={**facts["source"], WORK_DIGEST: facts[WORK_DIGEST]},
            documents=tuple(in_order(part._replace(split=splits[folder / part.path]) for part in tables)),
        ).with_max_token(done.max_token for done in finished)


def _origin(task: Task) -> dict[str, Any]:
    """Return the origin of the tokens, with the names of those files alone that the documents are from."""
    source: DocumentSource = task.source
    route = cast(ShardDocuments, task.part)
    described = dict(source.description)
    if described.get("files") == [str(path) for path in source.paths]:
        numbers = dict.fromkeys(group.file_number for group in route.groups)
        described["files"] = [str(source.paths[number]) for number in numbers]
    return {"source": described, "split": route.split}


def read_documents(task: Task, counts: TokenCounts, work: CountedWork) -> Iterator[TokenizedDocuments]:
    """Yield the documents of a task, count them, and note how far they were read when the next ones are asked for."""
    for encoded, read in cast(ShardDocuments, task.part).read(task.source, task.num_threads, counts):
        yield encoded
        work.reach(read / max(1, task.amount))
    work.reach(1.0)


def finished_documents(task: Task, info: ShardInfo, counts: TokenCounts) -> Finished:
    """Return the facts of a file of documents that was written."""
    entry = ShardEntry.of(info, task.part.split)
    frame, _ = digests_of(task, entry, frame_only=True)
    return Finished(entry, info.max_token, frame, counts)


def facts_of(encoded: TokenizedDocuments) -> DocumentRows:
    """Return the facts of documents, as a writer takes them."""
    return DocumentRows(
        [encoded.source],
        np.zeros(len(encoded.lengths), np.uint32),
        encoded.rows,
        encoded.ids or None,
        encoded.metadata or None,
        encoded.spans,
    )


def refused(encoded: TokenizedDocuments, source: DocumentSource, error: ConvertError) -> ConvertError:
    """Return the error of documents that a writer has refused: it names the first token that cannot be stored."""
    message = _named_token(encoded, source)
    if message:
        return out_of_range(message, source.suspects)
    return ConvertError(f"{encoded.source}: {error}", options=error.options)


def _named_token(encoded: TokenizedDocuments, source: DocumentSource) -> str:
    """Name the document of the first token that cannot be stored; "" if all can."""
    meta = StoreMeta(batch_size=1, seq_len=1, dtype=source.dtype, vocab_size=source.vocab_size)
    bad = find_bad_token(encoded.tokens, token_limit(meta.dtype, meta.vocab_size))
    if bad is None:
        return ""
    document = int(np.searchsorted(np.cumsum(encoded.lengths), bad, side="right"))
    where = f"the document of {row_of_source(Path(encoded.source).name, encoded.rows[document])}"
    return bad_token_message(encoded.source, where, encoded.tokens[bad], meta)


def require_unique_ids(folder: Path, tables: Sequence[DocumentPart]) -> None:
    """Raise `ConvertError` if two documents of some tables have one id. Takes some 32 bytes for each document."""
    digests = bytearray()  # 64 bits of that of each id: equal ones are then compared themselves
    with closing(DocumentTable(folder, in_order(tables))) as table:
        for number, part in enumerate(table.parts):
            stop = 0
            while stop < part.document_count:
                deliver_signals()
                start = stop
                stop = table.file(number).within_texts(start, min(start + BLOCK_IDS, part.document_count))
                rows = table.file(number).rows(start, stop)
                for text in rows.ids or ():
                    digests += hashlib.blake2b(text, digest_size=8).digest()
        found = np.frombuffer(digests, "<u8")
        order = found.argsort(kind="stable")
        for k in np.flatnonzero(np.diff(found[order]) == 0).tolist():
            one, other = (table.document(int(number)) for number in order[k : k + 2])
            if one.id == other.id:
                where = row_of_source(other.source, other.row), row_of_source(one.source, one.row)
                raise repeated_id(str(one.id), *where, remedy=Remedy.RESTART)


def repeated_id(text: str, where: str, before: str, remedy: Remedy | None = None) -> ConvertError:
    """Return the error of two documents that have one id.

    Parameters
    ----------
    text
        The id.
    where, before
        The rows of the second and of the first document.
    remedy
        The cure for what was written by then.
    """
    return ConvertError(
        f"{where}: the id {text!r} was there before, in {before}: name a column whose values differ, or leave out "
        "id_column",
        remedy=remedy,
        options=["id_column"],
    )
