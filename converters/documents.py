"""Sources of documents: files of text or tokens, in groups that any process can read by itself, and their routes.

Text is tokenized block by block, each document with its boundary token.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError
from zb_hdf5.console import counted
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.source import Counts
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import DEFAULT_SPLIT, TokenArray, stored_dtype
from zb_hdf5.text.corpus import DocumentFile, Dropped, open_documents, unknown_columns
from zb_hdf5.text.tokenizers import TokenIds, Tokenizer, load_tokenizer, with_boundaries

TRAIN: Final = DEFAULT_SPLIT
VAL: Final = "val"
#: Given a number of documents, returns which of the next ones are wanted.
Choose: TypeAlias = Callable[[int], npt.NDArray[np.bool_]]


class Encoded(NamedTuple):
    """Consecutive documents as tokens, one after the other, each with its boundary token."""

    tokens: TokenArray
    lengths: npt.NDArray[np.int64]
    source: str  # the file that they are from
    rows: npt.NDArray[np.uint64]  # that of each document in it, counted from 1
    ids: Sequence[bytes] | None = None  # UTF-8 of each id; None: they have none
    metadata: Sequence[bytes] | None = None  # the text of a JSON object for each; None: they have none
    cut: int = 0  # tokens that were beyond the limit of a document
    dropped: Dropped | None = None  # rows that were no documents
    read: int = 0  # bytes of the group that were read so far, of its `num_bytes`


class Group(NamedTuple):
    """A part of a file of documents, numbered in the file as that in the conversion. All of it goes to one shard.

    `weight` is its share of the work, by which groups are dealt to shards; `num_bytes` are read, about, for progress.
    """

    file_number: int
    number: int
    weight: float
    num_bytes: int


@runtime_checkable
class DocumentSource(Protocol):
    """Documents to convert, in order. Picklable: other processes read their groups themselves.

    `description` is for the `source` entry of `shards.json`, `identity` JSON of all that decides the tokens but the
    bytes of `paths`. `boundary_token_id` is None where no token ends a document. `encoder` names the file that makes
    the tokens of text, where it is not the tokenizer itself.
    """

    paths: list[Path]
    groups: list[Group]
    dtype: np.dtype[Any]
    vocab_size: int
    tokenizer: str
    encoder: str = ""
    boundary_token_id: int | None
    has_ids: bool
    description: dict[str, Any]
    identity: dict[str, Any]

    def read(self, group: Group, choose: Choose | None, num_threads: int) -> Iterator[Encoded]:
        """Yield the documents of a group, or those that are chosen, some at a time."""


@dataclass(frozen=True)
class Route:
    """The documents of one file of tokens, in order: all of the groups, or those of one split. Picklable.

    A share `val_fraction` is held out for validation. The draw depends on the seed, on the numbers of the file and of
    the group and on the position in it, never on the shards, the workers or the content of other files.
    """

    groups: list[Group]
    split: str = TRAIN
    val_fraction: float = 0.0
    seed: int = 0

    @property
    def num_bytes(self) -> int:
        """About how many bytes of documents are read."""
        return sum(group.num_bytes for group in self.groups)

    def read(self, source: DocumentSource, num_threads: int, counts: Counts) -> Iterator[tuple[Encoded, int]]:
        """Yield (documents, bytes read so far), and count them; dropped rows count in the training split only."""
        before = 0
        for group in self.groups:
            choose = self._chooser(group) if self.val_fraction else None
            for encoded in source.read(group, choose, num_threads):
                deliver_signals()
                counts.documents += len(encoded.lengths)
                counts.tokens_in += len(encoded.tokens) + encoded.cut
                counts.drop("beyond --max-document-tokens", encoded.cut)
                if choose is None or self.split == TRAIN:
                    counts.documents_dropped.merge(encoded.dropped or Dropped())
                if len(encoded.lengths):
                    yield encoded, before + min(encoded.read, group.num_bytes)
            before += group.num_bytes

    def _chooser(self, group: Group) -> Choose:
        words = [self.seed & 0xFFFFFFFF, self.seed >> 32, group.file_number, group.number]
        draws = np.random.RandomState(words)  # its numbers are frozen by NumPy's policy
        return lambda count: (draws.random_sample(count) < self.val_fraction) == (self.split == VAL)


def route(
    source: DocumentSource,
    num_shards: int | None = None,
    *,
    val_fraction: float = 0.0,
    val_last_shard: bool = False,
    seed: int = 0,
) -> list[Route]:
    """Deal documents to files of tokens: consecutive groups go to each, so that all together keep the order.

    `num_shards` are for training, one per file where there is no number. A share `val_fraction` of the documents is
    held out in one more shard, the last, or the last shard is.
    """
    if not 0 <= val_fraction < 1:
        raise ArgumentError(f"--val-fraction must be at least 0 and below 1, found {val_fraction}")
    if not 0 <= seed < 2**64:
        raise ArgumentError(f"seed must be between 0 and 2**64 - 1, found {seed}")
    if val_fraction and val_last_shard:
        raise ArgumentError("pass either --val-fraction or --val-last-shard, not both")
    if not source.groups:
        raise ConvertError(f"{source.paths[0]}: {no_documents(source, Dropped())}")
    by_file = groupby(source.groups, key=lambda group: group.file_number)
    runs = [list(run) for _, run in by_file] if num_shards is None else _cut_evenly(source.groups, num_shards)
    if val_last_shard:
        if len(runs) < 2:
            raise ConvertError("--val-last-shard leaves nothing to train on: there is 1 shard; pass --shards 2 or more")
        return [*map(Route, runs[:-1]), Route(runs[-1], VAL)]
    if val_fraction:
        drawn = val_fraction, seed
        return [*(Route(run, TRAIN, *drawn) for run in runs), Route(source.groups, VAL, *drawn)]
    return list(map(Route, runs))


def no_documents(source: DocumentSource, dropped: Dropped) -> str:
    """Return the message that a source has no documents, with the reasons."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.counts.items())
    return f"no documents in {counted(len(source.paths), 'file')} ({reasons or 'they are empty'})"


def _cut_evenly(groups: list[Group], num_shards: int) -> list[list[Group]]:
    """Cut into runs of about the same weight, none of them empty."""
    if num_shards > len(groups):
        raise ConvertError(f"{len(groups):,} row groups cannot fill {num_shards:,} shards; pass a smaller --shards")
    ends = np.cumsum([group.weight + 1 for group in groups])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_shards) / num_shards)
    low, high = np.arange(1, num_shards), len(groups) - np.arange(num_shards - 1, 0, -1)
    for k in range(num_shards - 1):  # at least one group each
        cuts[k] = min(max(cuts[k], low[k], cuts[k - 1] + 1 if k else 0), high[k])
    return [groups[a:b] for a, b in pairwise([0, *cuts.tolist(), len(groups)])]


# --- text ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the tokens of a document. Picklable."""

    tokenizer: str
    boundary_token_id: int | None
    max_document_tokens: int | None = None

    def encode(
        self, tokenizer: Tokenizer, texts: Sequence[str], num_threads: int
    ) -> tuple[TokenIds, npt.NDArray[np.int64], int]:
        """Return the tokens of some texts, the length of each, and the number of tokens that were cut off."""
        tokens, lengths = tokenizer.encode(texts, num_threads)
        cut = 0
        if self.max_document_tokens is not None and int(lengths.max(initial=0)) > self.max_document_tokens:
            kept = np.minimum(lengths, self.max_document_tokens)
            column = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            cut = len(tokens) - int(kept.sum())
            tokens, lengths = tokens[column < self.max_document_tokens], kept
        if self.boundary_token_id is not None:
            tokens, lengths = with_boundaries(tokens, lengths, self.boundary_token_id)
        return tokens, lengths, cut


@lru_cache(1)
def _loaded(spec: str, digest: str) -> Tokenizer:
    """Return the tokenizer of a conversion: a process loads it once, and not for each of many small files."""
    return load_tokenizer(spec)


class TextSource(DocumentSource):
    """Files of text, tokenized by a recipe. See `DocumentSource`."""

    def __init__(self, files: Sequence[DocumentFile], kind: str, recipe: Recipe) -> None:
        self._files, self._recipe = list(files), recipe
        tokenizer = load_tokenizer(recipe.tokenizer)
        self.paths = [file.path for file in files]
        self.groups = [
            Group(number, k, file.path.stat().st_size / file.num_row_groups, file.text_bytes(k))
            for number, file in enumerate(files)
            for k in range(file.num_row_groups)
        ]
        self.vocab_size = tokenizer.vocab_size
        self.dtype = stored_dtype("uint16" if self.vocab_size <= 2**16 else "uint32")
        self.tokenizer, self.boundary_token_id = json.dumps(tokenizer.description), recipe.boundary_token_id
        self._digest, self.encoder = tokenizer.digest, tokenizer.encoder if tokenizer.encoder != tokenizer.name else ""
        self.has_ids = bool(files[0].id_column)
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

    def read(self, group: Group, choose: Choose | None, num_threads: int) -> Iterator[Encoded]:
        tokenizer, file, read = _loaded(self._recipe.tokenizer, self._digest), self._files[group.file_number], 0
        for block in file.row_group(group.number):
            read += sum(map(len, block.texts))
            chosen = block if choose is None else block.only(choose(len(block.texts)).tolist())
            tokens, lengths, cut = self._recipe.encode(tokenizer, chosen.texts, num_threads)
            rows = np.array(chosen.rows, np.uint64)
            yield Encoded(tokens, lengths, str(file.path), rows, chosen.ids, chosen.metadata, cut, block.dropped, read)


def open_text(paths: list[Path], conversion: Conversion) -> TextSource:
    """Open files of text as a conversion asks."""
    if conversion.shard_per_source and (conversion.num_shards or not conversion.is_stream):
        raise ArgumentError(
            "pass either --shards or --shard-per-source, not both" if conversion.is_stream else
            "--shard-per-source belongs to --layout stream: rows are shuffled over all sources"
        )  # fmt: skip
    kind, columns = conversion.source_format, conversion.metadata_columns or ()
    files = open_documents(paths, kind, conversion.text_column or "text", conversion.id_column or "", columns)
    for name in unknown_columns(files):
        warnings.warn(f"{files[0].path}: no key {name!r} in its first lines", stacklevel=2)
    return TextSource(files, kind, _recipe(conversion))


def _recipe(conversion: Conversion) -> Recipe:
    spec, text = conversion.tokenizer or "", conversion.boundary_token
    if conversion.no_boundary:
        if text is not None:
            raise ArgumentError("pass either --boundary-token or --no-boundary, not both")
        return Recipe(spec, None, conversion.max_document_tokens)
    tokenizer = load_tokenizer(spec)
    boundary = tokenizer.boundary_token_id if text is None else tokenizer.special_token_id(text)
    if boundary is None:
        known = ", ".join(tokenizer.special_tokens) or "none"
        raise ArgumentError(f"tokenizer {spec}: pass --boundary-token (it has: {known}), or --no-boundary")
    return Recipe(spec, boundary, conversion.max_document_tokens)
