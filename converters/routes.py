"""The routes of documents: which of them go to one file of tokens, and which are held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

import numpy as np

from zb_hdf5 import ArgumentError, ConvertError
from zb_hdf5.console import counted
from zb_hdf5.converters.batch_source import TokenCounts
from zb_hdf5.converters.options import Settings, SplitNames
from zb_hdf5.errors import Remedy
from zb_hdf5.files.named_splits import named_splits, train_first
from zb_hdf5.formats.document_source import Choose, DocumentGroup, DocumentSource, Encoded
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import DEFAULT_SPLIT
from zb_hdf5.text.corpus import Dropped

TRAIN: Final = DEFAULT_SPLIT
VAL: Final = "val"


@dataclass(frozen=True)
class Route:
    """The documents of one file of tokens, in order: all of the groups, or those of one split. Picklable.

    A share `val_fraction` is held out for validation. The draw depends on the seed, on the numbers of the file and of
    the group and on the position in it, never on the shards, the workers or the content of other files.
    """

    groups: list[DocumentGroup]
    split: str = TRAIN
    val_fraction: float = 0.0
    seed: int = 0

    @property
    def num_bytes(self) -> int:
        """About how many bytes of documents are read."""
        return sum(group.num_bytes for group in self.groups)

    def read(self, source: DocumentSource, num_threads: int, counts: TokenCounts) -> Iterator[tuple[Encoded, int]]:
        """Yield (documents, bytes read so far), and count them; dropped rows count in the training split only."""
        before = 0
        for group in self.groups:
            choose = self._chooser(group) if self.val_fraction else None
            for encoded in source.read(group, choose, num_threads):
                deliver_signals()
                counts.documents += len(encoded.lengths)
                counts.tokens_in += len(encoded.tokens) + encoded.cut
                counts.drop("cut from long documents", encoded.cut)
                if choose is None or self.split == TRAIN:
                    counts.documents_dropped.merge(encoded.dropped or Dropped())
                counts.documents_dropped.merge(encoded.refused or Dropped())
                counts.documents_lossy += encoded.lossy
                counts.characters_lost += encoded.lost
                if len(encoded.lengths):
                    yield encoded, before + min(encoded.read, group.num_bytes)
            before += group.num_bytes

    def _chooser(self, group: DocumentGroup) -> Choose:
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

    Parameters
    ----------
    source
        The documents.
    num_shards
        How many files there are for training; None: one for each file of the source.
    val_fraction
        The share of the documents that is held out in one more shard, the last.
    val_last_shard
        Whether the last shard is held out.
    seed
        Decides which documents are held out.
    """
    if not 0 <= val_fraction < 1:
        raise ArgumentError(
            f"val_fraction must be at least 0 and below 1, found {val_fraction}", options=["val_fraction"]
        )
    if not 0 <= seed < 2**64:
        raise ArgumentError(f"seed must be between 0 and 2**64 - 1, found {seed}", options=["seed"])
    if val_fraction and val_last_shard:
        raise ArgumentError(
            "pass either val_fraction or val_last_shard, not both", options=["val_fraction", "val_last_shard"]
        )
    if not source.groups:
        require_documents(source, TokenCounts())
    splits = _groups_by_split(source)
    if len(splits) > 1:
        if val_fraction or val_last_shard:
            raise ArgumentError(
                f"the source has the splits {', '.join(splits)} already: leave out val_fraction and val_last_shard, or "
                "pass split='all'",
                options=["val_fraction", "val_last_shard", "split"],
            )
        return _routes_of_splits(source.paths[0], splits, num_shards)
    runs = _cut(source.paths[0], source.groups, num_shards)
    if val_last_shard:
        if len(runs) < 2:
            raise ConvertError(
                "val_last_shard leaves nothing to train on: there is 1 shard; ask for 2 shards or more",
                options=["val_last_shard", "shards"],
            )
        return [*map(Route, runs[:-1]), Route(runs[-1], VAL)]
    if val_fraction:
        train = [Route(run, TRAIN, val_fraction, seed) for run in runs]
        return [*train, Route(source.groups, VAL, val_fraction, seed)]
    [split] = splits
    return [Route(run, split) for run in runs]


def told_splits(source: DocumentSource, settings: Settings) -> list[str]:
    """Return the split of each file of a source, as their names tell; [] where they tell one or none, or all is one."""
    if settings.of(SplitNames).is_one or not source.groups:
        return []
    count = 1 + max(group.file_number for group in source.groups)
    told = named_splits(source.paths[:count], settings.paths) if count <= len(source.paths) else []
    return told if len({*told}) > 1 else []


def _groups_by_split(source: DocumentSource) -> dict[str, list[DocumentGroup]]:
    """Return the groups of each split of a source, that for training first."""
    found: dict[str, list[DocumentGroup]] = {}
    for group in source.groups:
        split = source.splits[group.file_number] if source.splits else TRAIN
        found.setdefault(split, []).append(group)
    return {split: found[split] for split in train_first(found)}


def num_groups_of_first_split(source: DocumentSource) -> int:
    """Return how many parts the documents have that are dealt to the shards which are asked for."""
    return len(next(iter(_groups_by_split(source).values())))


def _routes_of_splits(path: Path, splits: dict[str, list[DocumentGroup]], num_shards: int | None) -> list[Route]:
    """Deal each split to files of its own, of about the same weight: the first one to `num_shards`."""
    weights = {split: sum(group.weight for group in groups) for split, groups in splits.items()}
    first = next(iter(splits))
    routes = []
    for split, groups in splits.items():
        count = num_shards
        if num_shards is not None and split != first:
            count = max(1, min(len(groups), round(num_shards * weights[split] / max(1.0, weights[first]))))
        routes += [Route(run, split) for run in _cut(path, groups, count)]
    return routes


def _cut(path: Path, groups: list[DocumentGroup], num_shards: int | None) -> list[list[DocumentGroup]]:
    """Cut into the runs of each file: as many as are asked for, or one for each file of the source."""
    if num_shards is not None:
        return _cut_evenly(path, groups, num_shards)
    return [list(run) for _, run in groupby(groups, key=lambda group: group.file_number)]


def require_documents(source: DocumentSource, counts: TokenCounts) -> None:
    """Raise `ConvertError` if a source has no documents, or if most of its rows were none."""
    path = source.paths[0]
    dropped = counts.documents_dropped
    if not counts.documents:
        number = counted(len(source.paths), "file")
        reasons = dropped.reasons or "they are empty"
        raise ConvertError(f"{path}: no documents in {number} ({reasons}){dropped.cure(path)}")
    dropped.require_few(counts.documents, source.max_dropped, path)


def _cut_evenly(path: Path, groups: list[DocumentGroup], num_shards: int) -> list[list[DocumentGroup]]:
    """Cut into runs of about the same weight, none of them empty."""
    if num_shards > len(groups):
        raise ConvertError(
            f"{path}: each of {num_shards:,} shards needs a part of the source of its own, and it is read in "
            f"{counted(len(groups), 'part')}",
            remedy=Remedy.FILL_THE_SHARDS,
        )
    ends = np.cumsum([group.weight + 1 for group in groups])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_shards) / num_shards)
    for k in range(num_shards - 1):  # at least one group each
        least = max(k + 1, cuts[k - 1] + 1 if k else 0)
        most = len(groups) - (num_shards - 1 - k)
        cuts[k] = min(max(cuts[k], least), most)
    return [groups[a:b] for a, b in pairwise([0, *cuts.tolist(), len(groups)])]
