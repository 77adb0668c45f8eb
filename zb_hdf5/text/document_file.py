"""The interface of files of documents, and the blocks in which they give them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

from zb_hdf5.documents.metadata import id_bytes, metadata_bytes, row_of_source
from zb_hdf5.errors import ConvertError
from zb_hdf5.files.source_file import SourceFile
from zb_hdf5.text.dropped import Dropped, Reason

#: A block ends with the document that reaches one of these: enough work for many threads, little memory.
BLOCK_DOCUMENTS: Final = 1024
BLOCK_CHARACTERS: Final = 1 << 20
#: A text, or the reason why there is none, and the values of its other columns; None: a blank line.
FoundText: TypeAlias = "tuple[str | Reason, tuple[Any, ...]] | None"


@dataclass
class Block:
    """Consecutive documents of one file, and the count of documents dropped between them."""

    texts: list[str] = field(default_factory=list)
    dropped: Dropped = field(default_factory=Dropped)
    rows: list[int] = field(default_factory=list)  # the row or line of each text, counted from 1
    ids: list[bytes] = field(default_factory=list)  # UTF-8; empty where no column of them was named, as is `metadata`
    metadata: list[bytes] = field(default_factory=list)  # the text of a JSON object for each document

    def only(self, keep: Sequence[bool]) -> Block:
        """Return the block with some of its documents: `keep` has a truth value for each."""
        return Block(
            list(compress(self.texts, keep)),
            self.dropped,
            list(compress(self.rows, keep)),
            list(compress(self.ids, keep)),
            list(compress(self.metadata, keep)),
        )


class DocumentFile(SourceFile, ABC):
    """One file of documents, in row groups: runs of documents, each of which can be read by itself.

    Parameters
    ----------
    path
        The file.
    column
        The column, or the key, of the text.
    id_column
        The column of the ids; "": the documents have none.
    metadata_columns
        The columns of the metadata.
    max_line
        The bytes of the longest line, or of a file that is one document; None: `bound_bytes`.

    Attributes
    ----------
    suffixes
        The endings of the names of such files.
    noun, example, documents
        For the help: such files, a path of them, and the nature of a document in one sentence.
    has_columns
        A document is one of several values, and `column` names it.
    has_lines
        A line, or the file, is read whole.
    num_row_groups
        The row groups of the file.
    more_columns
        The columns that are read besides the text.
    """

    suffixes: ClassVar[tuple[str, ...]]
    noun: ClassVar[str]
    example: ClassVar[str]
    documents: ClassVar[str]
    has_columns: ClassVar[bool] = True
    has_lines: ClassVar[bool] = True
    num_row_groups: int

    def __init__(
        self,
        path: Path,
        column: str = "text",
        id_column: str = "",
        metadata_columns: Sequence[str] = (),
        max_line: int | None = None,
    ) -> None:
        super().__init__(path)
        self.max_line = max_line
        self.column = column
        self.id_column = id_column
        self.metadata_columns = tuple(metadata_columns)
        self.more_columns = (id_column, *metadata_columns) if id_column else self.metadata_columns
        self._read_head()

    def _read_head(self) -> None:
        """Read the head or the foot of the file: count its row groups, and refuse one without the columns."""

    def blocks(self) -> Iterator[Block]:
        """Yield all documents in order."""
        for number in range(self.num_row_groups):
            yield from self.row_group(number)

    def text_bytes(self, number: int) -> int:
        """Return about how many bytes of text one row group has."""
        return -(-self.identity.num_bytes // self.num_row_groups)

    def row_group(self, number: int) -> Iterator[Block]:
        """Yield the documents of one row group.

        Raises
        ------
        FormatError
            If the file is damaged, or another file has its name now.
        ConvertError
            If a document has a bad id.
        """
        yield from self.unreplaced(self._row_group(number))

    @abstractmethod
    def _row_group(self, number: int) -> Iterator[Block]:
        """Yield the documents of one row group. Raises as `row_group`."""

    def _blocks(self, first: int, found: Iterable[FoundText]) -> Iterator[Block]:
        """Group documents into blocks; their rows are numbered from `first` on."""
        block = Block()
        characters = 0
        for number, each in enumerate(found, first):
            if each is None:
                continue
            text, more = each
            if isinstance(text := text or Reason.EMPTY, Reason):
                block.dropped.merge(Dropped.of(text, self.path, [number]))
                continue
            block.texts.append(text)
            block.rows.append(number)
            if more:
                self._add_more(block, more, row_of_source(self.path, number))
            characters += len(text)
            if len(block.texts) == BLOCK_DOCUMENTS or characters >= BLOCK_CHARACTERS:
                yield block
                block = Block()
                characters = 0
        if block.texts or block.dropped.counts:
            yield block

    def _add_more(self, block: Block, values: Sequence[Any], where: str) -> None:
        """Add the values of other columns of a document."""
        id, metadata = facts_of_document(self.id_column, self.metadata_columns, values, where)
        if self.id_column:
            block.ids.append(id)
        if self.metadata_columns:
            block.metadata.append(metadata)


def facts_of_document(
    id_column: str, metadata_columns: Sequence[str], values: Sequence[Any], where: str
) -> tuple[bytes, bytes]:
    """Return the id and the metadata of a document, as they are stored; b"" for what it has no column of.

    Parameters
    ----------
    id_column, metadata_columns
        As for `DocumentFile`.
    values
        The value of each of these columns, that of the id first.
    where
        The row, for messages.
    """
    columns = (id_column, *metadata_columns) if id_column else metadata_columns
    for name, value in zip(columns, values, strict=True):
        if isinstance(value, Reason):
            raise ConvertError(f"{where}: column {name!r} is {value}; name another column")
    named = dict(zip(columns, values, strict=True))
    id = id_bytes(values[0], f"{where}: column {id_column!r}") if id_column else b""
    metadata = metadata_bytes({name: named[name] for name in metadata_columns}, where) if metadata_columns else b""
    return id, metadata
