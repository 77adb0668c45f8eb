"""Files of text as a source of documents: tokenized block by block, each document with its boundary token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, FormatError
from zb_hdf5.converters.conversion import InputOptions
from zb_hdf5.converters.routes import told_splits
from zb_hdf5.converters.settings import Settings
from zb_hdf5.converters.stream_target import repeated_id
from zb_hdf5.documents.metadata import row_of_source
from zb_hdf5.formats.document_source import DocumentFilter, DocumentGroup, SourceOfFiles, TokenizedDocuments
from zb_hdf5.spec import dtype_of_ids, stored_dtype
from zb_hdf5.text.document_file import Block, DocumentFile
from zb_hdf5.text.dropped import DEFAULT_MAX_DROPPED, Dropped, Reason
from zb_hdf5.text.text_corpus import open_documents
from zb_hdf5.text.tokenizers import TokenIds, Tokenizer, load_tokenizer, with_boundaries


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the tokens of a document. Picklable."""

    tokenizer: str
    boundary_token_id: int | None
    max_document_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.text_tokens == 0:
            raise ArgumentError(
                "max_document_tokens must be at least 2, a token and the boundary token, found 1",
                options=["max_document_tokens"],
            )

    @property
    def text_tokens(self) -> int | None:
        """The most tokens of the text of a document: the boundary token counts too. None: any number."""
        has_boundary = self.boundary_token_id is not None
        return None if self.max_document_tokens is None else self.max_document_tokens - has_boundary

    def joined(self, documents: Sequence[TokenIds]) -> tuple[TokenIds, npt.NDArray[np.int64], int]:
        """Return the tokens of documents, the length of each, and the number of tokens that were cut off."""
        most = self.text_tokens
        kept = [each[:most] for each in documents]
        cut = sum(map(len, documents)) - sum(map(len, kept))
        tokens = np.concatenate([np.empty(0, np.uint32), *kept])
        lengths = np.array([len(each) for each in kept], np.int64)
        if self.boundary_token_id is not None:
            tokens, lengths = with_boundaries(tokens, lengths, self.boundary_token_id)
        return tokens, lengths, cut


@lru_cache(1)
def _loaded(spec: str, digest: str) -> Tokenizer:
    """Return the tokenizer of a conversion: a process loads it once, and not for each of many small files."""
    return load_tokenizer(spec)


class TextSource(SourceOfFiles):
    """Files of text, tokenized by a recipe. See `SourceOfFiles`.

    Parameters
    ----------
    files
        The files, in order.
    kind
        The name of their format.
    recipe
        The tokenizer and the boundary token.
    max_dropped
        The share of the lines, rows or files that may be dropped.
    dtype
        The stored dtype; "auto": the smallest one that holds the vocabulary, special tokens too.

    Raises
    ------
    ArgumentError
        If the dtype does not hold a token that may come.
    """

    def __init__(
        self,
        files: Sequence[DocumentFile],
        kind: str,
        recipe: Recipe,
        max_dropped: float = DEFAULT_MAX_DROPPED,
        dtype: str = "auto",
    ) -> None:
        self._files: list[DocumentFile] = list(files)
        self._recipe = recipe
        self.max_dropped = max_dropped
        tokenizer = load_tokenizer(recipe.tokenizer)
        self.paths = [file.path for file in files]
        self.groups = [
            DocumentGroup(number, k, file.identity.num_bytes / file.num_row_groups, file.text_bytes(k))
            for number, file in enumerate(files)
            for k in range(file.num_row_groups)
        ]
        self.vocab_size = tokenizer.vocab_size
        self.dtype = dtype_of_ids(self.vocab_size) if dtype == "auto" else _dtype_for(tokenizer, recipe, dtype)
        self.tokenizer = json.dumps(tokenizer.description)
        self.boundary_token_id = recipe.boundary_token_id
        self._digest = tokenizer.digest
        if tokenizer.encoder != tokenizer.name:
            self.encoder = tokenizer.encoder
        self.has_ids = bool(files[0].id_column)
        self.has_metadata = bool(files[0].metadata_columns)
        self.description = {
            "format": kind,
            "files": [str(path) for path in self.paths],
            "boundary_token_id": recipe.boundary_token_id,
            "max_document_tokens": recipe.max_document_tokens,
        }
        self.identity = {
            "text_column": files[0].column,
            "more_columns": [files[0].id_column, *files[0].metadata_columns],
            "tokenizer": dict(tokenizer.description),
        }
        if dtype != "auto" or self.dtype.itemsize == 1:
            self.identity["dtype"] = self.dtype.name  # else it follows from the tokenizer, as in earlier versions
        if recipe.text_tokens != recipe.max_document_tokens:
            self.identity["cut"] = "with boundary"  # an earlier version did not count it

    def read(
        self, group: DocumentGroup, choose: DocumentFilter | None, num_threads: int
    ) -> Iterator[TokenizedDocuments]:
        tokenizer = _loaded(self._recipe.tokenizer, self._digest)
        file = self._files[group.file_number]
        read = 0
        for block in file.row_group(group.number):
            read += sum(map(len, block.texts))
            chosen = block if choose is None else block.only(choose(len(block.texts)).tolist())
            found = tokenizer.encode_each(chosen.texts, num_threads)
            is_encoded = [not isinstance(each, FormatError) for each in found]
            rows = [row for row, is_good in zip(chosen.rows, is_encoded, strict=True) if not is_good]
            refused = Dropped.of(Reason.REFUSED, file.path, rows)
            chosen = chosen.only(is_encoded)
            lost = [count for count in map(tokenizer.num_unknown, chosen.texts) if count]
            tokens, lengths, cut = self._recipe.joined([each for each in found if not isinstance(each, FormatError)])
            yield TokenizedDocuments(
                tokens=tokens,
                lengths=lengths,
                source=str(file.path),
                rows=np.array(chosen.rows, np.uint64),
                ids=chosen.ids,
                metadata=chosen.metadata,
                cut=cut,
                dropped=block.dropped,
                read=read,
                refused=refused,
                lossy=len(lost),
                lost=sum(lost),
            )


def _dtype_for(tokenizer: Tokenizer, recipe: Recipe, name: str) -> np.dtype[Any]:
    """Return a stored dtype; `ArgumentError` if a token of the text, or the boundary token, does not fit it.

    Special tokens at the end of the vocabulary come from no text.
    """
    dtype = stored_dtype(name)
    special = {*tokenizer.special_tokens.values()}
    largest = tokenizer.vocab_size - 1
    while largest in special:
        largest -= 1
    largest = max(largest, recipe.boundary_token_id or 0)
    if largest > np.iinfo(dtype).max:
        raise ArgumentError(
            f"tokenizer {recipe.tokenizer}: expected tokens that dtype {name} holds, found one with the id "
            f"{largest:,}: leave out dtype, or pass a larger one; no_boundary leaves out the boundary token",
            options=["dtype", "no_boundary"],
        )
    return dtype


def open_text(paths: list[Path], settings: Settings) -> TextSource:
    """Open files of text as a conversion asks."""
    options = settings.input
    kind = settings.source_format
    columns = options.text_column, options.id_column, options.metadata_columns
    files = open_documents(paths, kind, *columns, options.max_line, settings.looks.look_of(paths[0]))
    _require_different_ids(files[0])
    source = TextSource(files, kind, _recipe(options), options.max_dropped, settings.target.dtype)
    source.splits = told_splits(source, settings)
    return source


def _require_different_ids(file: DocumentFile) -> None:
    """Raise `ConvertError` if two of the first documents have one id: now, and not when all are tokenized."""
    if not file.id_column or not file.num_row_groups:
        return
    rows: dict[bytes, int] = {}
    first = next(file.row_group(0), Block())
    for row, id in zip(first.rows, first.ids, strict=True):
        if id in rows:
            where = row_of_source(file.path, row), row_of_source(file.path, rows[id])
            raise repeated_id(id.decode("utf-8", "replace"), *where)
        rows[id] = row


def _recipe(options: InputOptions) -> Recipe:
    """Return the recipe of a conversion; `ArgumentError` if the tokenizer has no boundary token, and none is named."""
    if options.no_boundary:
        return Recipe(options.tokenizer, None, options.max_document_tokens)
    tokenizer = load_tokenizer(options.tokenizer)
    if options.boundary_token is None:
        boundary = tokenizer.boundary_token_id
    else:
        boundary = tokenizer.special_token_id(options.boundary_token)
    if boundary is None:
        known = ", ".join(tokenizer.special_tokens) or "none"
        raise ArgumentError(
            f"tokenizer {options.tokenizer}: pass boundary_token (it has: {known}), or no_boundary",
            options=["boundary_token", "no_boundary"],
        )
    return Recipe(options.tokenizer, boundary, options.max_document_tokens)
