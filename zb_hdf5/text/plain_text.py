"""A file of text that is one document."""

from __future__ import annotations

from collections.abc import Iterator

from zb_hdf5.errors import Remedy
from zb_hdf5.files.paths import head_of, read_whole
from zb_hdf5.text.document_file import Block, DocumentFile
from zb_hdf5.text.dropped import Reason
from zb_hdf5.text.utf8 import ENCODING_MARK_BYTES, flaw_of_bytes, require_utf8, without_mark


class PlainTextFile(DocumentFile):
    """A whole file of UTF-8 is one document, with its line ends unchanged."""

    suffixes = (".txt",)
    noun = "plain text files"
    example = "books/"
    documents = "Each file is a document, and must fit in memory."
    has_columns = False

    num_row_groups = 1

    def _read_head(self) -> None:
        require_utf8(head_of(self.path, ENCODING_MARK_BYTES)[0], self.path)

    def _row_group(self, number: int) -> Iterator[Block]:
        data = read_whole(self.path, self.max_line, Remedy.MAX_LINE)
        try:
            text: str | Reason = without_mark(data).decode("utf-8")
        except UnicodeDecodeError:
            text = flaw_of_bytes(data)
        yield from self._blocks(1, [(text, ())])
