"""Files of another trainer as a target: the files of each shard, and those that a folder of them has besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from re import escape
from typing import Any, ClassVar, Final

import numpy as np

from zb_hdf5 import ConvertError, ShardIndex, StoreMeta
from zb_hdf5.converters.batch_source import TokenCounts
from zb_hdf5.converters.engines import CountedWork
from zb_hdf5.converters.journal import Finished, meta_from_json, require_unchanged
from zb_hdf5.converters.plan import TargetFiles, Task
from zb_hdf5.converters.routes import require_documents
from zb_hdf5.converters.stream_target import (
    FACTS_KEPT,
    TOKEN_FILES,
    WRITTEN_META,
    facts_of,
    finished_documents,
    read_documents,
    refused,
)
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.formats.document_writer import DocumentWriter, WrittenShard
from zb_hdf5.formats.format import Format
from zb_hdf5.notes import note
from zb_hdf5.spec import DEFAULT_CHUNK_TOKENS, DTYPE_BY_NAME, STREAM_LAYOUT
from zb_hdf5.store.format_list import format_named, load_format

UINT8: Final = DTYPE_BY_NAME["uint8"]
UINT16: Final = DTYPE_BY_NAME["uint16"]


@dataclass(frozen=True)
class TrainerFiles(TargetFiles):
    """Files of a format of another trainer. See `TargetFiles`.

    Parameters
    ----------
    format
        The name of the format.
    written
        The tokens of the source, with the fields that the format keeps.
    facts
        The facts of documents that the source has and the format keeps.
    """

    unit: ClassVar[str] = TOKEN_FILES
    format: str
    written: StoreMeta
    facts: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, source: DocumentSource, meta: StoreMeta) -> TrainerFiles:
        """Return the files of a format for the documents of a source: the largest id bounds the vocabulary."""
        row = format_named(name)
        held = row.holds_fields
        fields = tuple(field for field in source.fields if held is None or field.name in held)
        largest = source.max_token
        vocab_size = source.vocab_size or (0 if largest is None else largest + 1)
        kept = {"ids": row.holds_ids and source.has_ids, "metadata": row.holds_metadata and source.has_metadata}
        facts = tuple(fact for fact, is_kept in kept.items() if is_kept)
        return cls(name, replace(meta, fields=fields, vocab_size=vocab_size), facts)

    @classmethod
    def of_journal(cls, plan: Mapping[str, Any]) -> TrainerFiles:
        """Return the files that the plan of a journal has."""
        return cls(plan["target"], meta_from_json(plan[WRITTEN_META]), tuple(plan[FACTS_KEPT]))

    @property
    def _code(self) -> Format:
        return load_format(format_named(self.format))

    @property
    def writer(self) -> type[DocumentWriter]:
        return self._code.writer

    @property
    def is_store(self) -> bool:
        return False

    @property
    def dtype(self) -> str:
        return self.writer.dtype_of(self.written).name

    def note_of_bytes(self, destination: Path) -> None:
        """Print a note if ids of one byte become ids of two in the files."""
        if self.writer.dtype_of(self.written).itemsize != UINT16.itemsize:
            return
        of_bytes = self.writer.dtype_of(replace(self.written, dtype=UINT8)).itemsize == UINT8.itemsize
        reason = f"{self.format} files have no smaller ones"
        if of_bytes:
            reason = "name uint8 as the dtype to keep one byte"
        note(f"{destination}: ids of one byte become uint16: {reason}")

    @property
    def meta(self) -> StoreMeta:
        """The ids in a file, which count as chunks of a stream."""
        itemsize = self.writer.dtype_of(self.written).itemsize
        return StoreMeta(1, DEFAULT_CHUNK_TOKENS, np.dtype(f"<u{itemsize}"), layout=STREAM_LAYOUT)

    @property
    def names(self) -> str:
        """A regular expression of the names of all files of a folder, and of those that a killed job has left.

        Files that may belong to the ids count, also those that this conversion does not write: it replaces the old
        folder.
        """
        writer = self.writer
        file = Path(f"x{writer.suffix}")
        endings = {path.name.partition(".")[2]: None for path in (*self.files(file), *writer.sidecars(file))}
        files = rf"[\w-]+-\d{{5}}-of-\d{{5}}\.({'|'.join(map(escape, endings))})"
        return rf"({'|'.join([files, *map(escape, writer.folder_names)])})(\.partial|\.progress)?"

    def files(self, path: Path) -> tuple[Path, ...]:
        return tuple(self.writer.files(path, self.written))

    def write(self, task: Task, work: CountedWork) -> Finished:
        source: DocumentSource = task.source
        counts = TokenCounts()
        names = [field.name for field in self.written.fields]
        with self._code.write(task.path, self.written, overwrite=task.overwrite, facts=self.facts) as writer:
            for encoded in read_documents(task, counts, work):
                fields = {name: encoded.fields[name] for name in names} if encoded.fields else {}
                try:
                    writer.write_documents(encoded.tokens, encoded.lengths, fields, facts_of(encoded))
                except ConvertError as error:
                    raise refused(encoded, source, error) from error
            if task.files is not None:
                require_documents(source, counts)
                require_unchanged(source.paths, task.files)
            info = writer.finish()
        return finished_documents(task, info, counts)

    def index(self, folder: Path, facts: Mapping[str, Any], finished: Sequence[Finished]) -> ShardIndex:
        index = ShardIndex(self.written, tuple(done.entry for done in finished))
        return index.with_max_token(done.max_token for done in finished)

    def complete(self, folder: Path, index: ShardIndex) -> None:
        shards = [
            WrittenShard(folder / each.path, each.split, each.num_bytes, each.document_count, each.sha256)
            for each in index.shards
        ]
        self.writer.complete_folder(folder, shards, self.written, self.facts)

    def would_be_smaller(self, max_token: int) -> bool:
        known = replace(self.written, vocab_size=max_token + 1)
        return self.writer.dtype_of(known).itemsize < self.writer.dtype_of(self.written).itemsize
