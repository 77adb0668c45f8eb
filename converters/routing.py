"""Files of text as tokens: the shard of each document, and the tokens of its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError
from zb_hdf5.console import counted
from zb_hdf5.converters.source import TokenCounts
from zb_hdf5.formats.document_file import DocumentRows
from zb_hdf5.spec import DEFAULT_SPLIT
from zb_hdf5.text.corpus import Block, DocumentFile, Dropped
from zb_hdf5.text.tokenizers import TokenIds, Tokenizer, load_tokenizer, with_boundaries

TRAIN: Final = DEFAULT_SPLIT
VAL: Final = "val"


class Encoded(NamedTuple):
    """Documents as they are stored.

    Attributes
    ----------
    tokens, lengths
        All documents, one after the other, each with its boundary token; tokens of each.
    cut
        Tokens that were beyond `max_document_tokens`.
    source, block
        The file that they are from, and what else is known of them.
    """

    tokens: TokenIds
    lengths: npt.NDArray[np.int64]
    cut: int
    source: str = ""
    block: Block | None = None

    def rows(self) -> DocumentRows:
        """Return what is known of the documents, for their table."""
        block = self.block or Block()
        sources = np.zeros(len(self.lengths), np.uint32)
        rows = np.array(block.rows, np.uint64)
        return DocumentRows([self.source], sources, rows, block.ids or None, block.metadata or None)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the tokens of a document. Picklable.

    Attributes
    ----------
    tokenizer
        As for `load_tokenizer`.
    boundary_token_id
        Stands behind each document; None: nothing does.
    max_document_tokens
        A longer document is cut there, its boundary token not counted; None: never.
    """

    tokenizer: str
    boundary_token_id: int | None
    max_document_tokens: int | None = None

    def encode(self, tokenizer: Tokenizer, texts: Sequence[str], num_threads: int) -> Encoded:
        """Tokenize the texts of one block."""
        tokens, lengths = tokenizer.encode(texts, num_threads)
        cut = 0
        if self.max_document_tokens is not None and int(lengths.max(initial=0)) > self.max_document_tokens:
            kept = np.minimum(lengths, self.max_document_tokens)
            place = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            cut = len(tokens) - int(kept.sum())
            tokens, lengths = tokens[place < self.max_document_tokens], kept
        if self.boundary_token_id is not None:
            tokens, lengths = with_boundaries(tokens, lengths, self.boundary_token_id)
        return Encoded(tokens, lengths, cut)


class Group(NamedTuple):
    """A row group of a file: its documents all go to the same shard.

    Attributes
    ----------
    file_number
        Its place among all files of the conversion.
    number
        Its place in the file.
    """

    file: DocumentFile
    file_number: int
    number: int


@dataclass(frozen=True)
class Holdout:
    """Which documents are held out for validation: those of a fraction of places, drawn with a seed. Picklable.

    Whether a document is held out depends on its file's and row group's number and on its place in there, never on the
    shards, the workers or the other files' content.
    """

    fraction: float
    seed: int

    def keep(self, group: Group, blocks: Iterator[Block], split: str) -> Iterator[Block]:
        """Yield the blocks of a row group with the documents of one split."""
        words = [self.seed & 0xFFFFFFFF, self.seed >> 32, group.file_number, group.number]
        draws = np.random.RandomState(words)  # its numbers are frozen by NumPy's policy
        for block in blocks:
            held_out = draws.random_sample(len(block.texts)) < self.fraction
            wanted = held_out if split == VAL else ~held_out
            yield block.only(wanted.tolist(), block.dropped if split == TRAIN else Dropped())


@dataclass(frozen=True)
class ShardPlan:
    """The documents of one shard, in order. Picklable.

    Attributes
    ----------
    split
        Its name in `shards.json`.
    holdout
        None: all documents of the row groups belong to this shard.
    """

    groups: list[Group]
    split: str = TRAIN
    holdout: Holdout | None = None

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Yield the documents, and the file that they are from."""
        for group in self.groups:
            blocks = group.file.row_group(group.number)
            kept = blocks if self.holdout is None else self.holdout.keep(group, blocks, self.split)
            yield from ((str(group.file.path), block) for block in kept)


@dataclass
class DocumentCounts:
    """What became of the documents of a shard, and of their tokens."""

    documents: int = 0
    dropped: Dropped = field(default_factory=Dropped)
    tokens: TokenCounts = field(default_factory=TokenCounts)

    def no_documents(self, num_files: int) -> str:
        """Return the message that there were no documents, with the reasons."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.counts.items())
        return f"no documents in {counted(num_files, 'file')} ({reasons or 'they are empty'})"

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DocumentCounts:
        """Return what `dataclasses.asdict` was given."""
        return cls(int(value["documents"]), Dropped(**value["dropped"]), TokenCounts(**value["tokens"]))

    def add(self, later: DocumentCounts) -> None:
        """Add those of another shard."""
        self.documents += later.documents
        self.dropped.merge(later.dropped)
        self.tokens.add(later.tokens)


def encode_shard(plan: ShardPlan, recipe: Recipe, num_threads: int, counts: DocumentCounts) -> Iterator[Encoded]:
    """Yield the documents of a shard, tokenized block by block, and count them in `counts`."""
    tokenizer = load_tokenizer(recipe.tokenizer)
    for source, block in plan.blocks():
        counts.dropped.merge(block.dropped)
        if not block.texts:
            continue
        tokens, lengths, cut, *_ = recipe.encode(tokenizer, block.texts, num_threads)
        encoded = Encoded(tokens, lengths, cut, source, block)
        counts.documents += len(encoded.lengths)
        counts.tokens.tokens_in += len(encoded.tokens) + encoded.cut
        counts.tokens.drop("beyond --max-document-tokens", encoded.cut)
        yield encoded


def plan_text_shards(
    files: Sequence[DocumentFile],
    num_shards: int | None = None,
    *,
    val_fraction: float = 0.0,
    val_last_shard: bool = False,
    seed: int = 0,
) -> list[ShardPlan]:
    """Route documents to shards: consecutive row groups go to each, so that all shards together keep the order.

    Parameters
    ----------
    num_shards
        Of documents to train on; None: one per file.
    val_fraction
        Share of the documents that is held out, in one more shard, the last.
    val_last_shard
        Hold out the last shard.

    Raises
    ------
    ConvertError
        If there are fewer row groups than shards, or none.
    ArgumentError
        If the options contradict each other.
    """
    if not 0 <= val_fraction < 1:
        raise ArgumentError(f"--val-fraction must be at least 0 and below 1, found {val_fraction}")
    if not 0 <= seed < 2**64:
        raise ArgumentError(f"seed must be between 0 and 2**64 - 1, found {seed}")
    if val_fraction and val_last_shard:
        raise ArgumentError("pass either --val-fraction or --val-last-shard, not both")
    groups = [Group(file, number, k) for number, file in enumerate(files) for k in range(file.num_row_groups)]
    if not groups:
        raise ConvertError(f"{files[0].path}: {DocumentCounts().no_documents(len(files))}")
    runs = _run_per_file(groups) if num_shards is None else _cut_evenly(groups, num_shards)
    if val_last_shard:
        if len(runs) < 2:
            raise ConvertError("--val-last-shard leaves nothing to train on: there is 1 shard; pass --shards 2 or more")
        return [*map(ShardPlan, runs[:-1]), ShardPlan(runs[-1], VAL)]
    if val_fraction:
        holdout = Holdout(val_fraction, seed)
        return [*(ShardPlan(run, TRAIN, holdout) for run in runs), ShardPlan(groups, VAL, holdout)]
    return list(map(ShardPlan, runs))


def _run_per_file(groups: list[Group]) -> list[list[Group]]:
    runs: dict[int, list[Group]] = {}
    for group in groups:
        runs.setdefault(group.file_number, []).append(group)
    return list(runs.values())


def _cut_evenly(groups: list[Group], num_shards: int) -> list[list[Group]]:
    """Cut into runs of about the same number of bytes, none of them empty."""
    if num_shards > len(groups):
        raise ConvertError(f"{len(groups):,} row groups cannot fill {num_shards:,} shards; pass a smaller --shards")
    sizes = [group.file.path.stat().st_size / group.file.num_row_groups + 1 for group in groups]
    ends = np.cumsum(sizes)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_shards) / num_shards)
    low, high = np.arange(1, num_shards), len(groups) - np.arange(num_shards - 1, 0, -1)
    for k in range(num_shards - 1):  # at least one row group each
        cuts[k] = min(max(cuts[k], low[k], cuts[k - 1] + 1 if k else 0), high[k])
    return [groups[a:b] for a, b in pairwise([0, *cuts.tolist(), len(groups)])]
