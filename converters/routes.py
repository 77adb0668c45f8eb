"""The routes of documents: which of them go to one file of tokens, and which are held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import groupby, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError
from zb_hdf5.console import counted
from zb_hdf5.converters.batch_source import TokenCounts
from zb_hdf5.converters.settings import Settings
from zb_hdf5.errors import Remedy
from zb_hdf5.files.named_splits import named_splits, train_first
from zb_hdf5.formats.document_source import DocumentGroup, DocumentSource, TokenizedDocuments
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import DEFAULT_SPLIT
from zb_hdf5.text.dropped import Dropped

TRAIN: Final = DEFAULT_SPLIT
VAL: Final = "val"


class Share(NamedTuple):
    """Consecutive documents of a group that several files share, of all that it has."""

    first: int
    stop: int
    total: int

    def owns(self, number: int) -> bool:
        """Return whether the dropped rows before a document, or behind the last one, count here."""
        return self.first <= number < self.stop or number == self.stop == self.total


class Chooser:
    """Names the documents of a group that are wanted, as a source asks for them. See `DocumentFilter`.

    Parameters
    ----------
    route
        The wanted documents.
    group
        The group.
    """

    def __init__(self, route: ShardDocuments, group: DocumentGroup) -> None:
        self._route = route
        words = [route.seed & 0xFFFFFFFF, route.seed >> 32, group.file_number, group.number]
        self._draws = np.random.RandomState(words)  # its numbers are frozen by NumPy's policy
        self.before = self.seen = 0  # documents before the last block, and behind it

    def __call__(self, count: int) -> npt.NDArray[np.bool_]:
        self.before, self.seen = self.seen, self.seen + count
        wanted = np.ones(count, bool)
        if self._route.val_fraction:
            is_val = self._route.split == VAL
            wanted = (self._draws.random_sample(count) < self._route.val_fraction) == is_val
        if self._route.share is not None:
            wanted[: max(0, self._route.share.first - self.before)] = False
            wanted[max(0, self._route.share.stop - self.before) :] = False
        return wanted

    @property
    def is_done(self) -> bool:
        """Whether all that follows counts elsewhere."""
        share = self._route.share
        return share is not None and share.stop <= self.seen < share.total


@dataclass(frozen=True)
class ShardDocuments:
    """The documents of one file of tokens, in order: all of the groups, or the documents of one split. Picklable.

    A share `val_fraction` is held out for validation. The draw depends on the seed, on the numbers of the file and of
    the group and on the position in it, never on the shards, the workers or the content of other files.
    """

    groups: list[DocumentGroup]
    split: str = TRAIN
    val_fraction: float = 0.0
    seed: int = 0
    share: Share | None = None  # of the only group; None: all of the groups

    @property
    def num_bytes(self) -> int:
        """About how many bytes of documents are read."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def bytes_taken(self) -> int:
        """About how many of these are taken."""
        share = self.share
        return self.num_bytes if share is None else self.num_bytes * (share.stop - share.first) // share.total

    def read(
        self, source: DocumentSource, num_threads: int, counts: TokenCounts
    ) -> Iterator[tuple[TokenizedDocuments, int]]:
        """Yield (documents, bytes read so far), and count them; dropped rows count in the training split only."""
        before = 0
        for group in self.groups:
            chooser = Chooser(self, group) if self.val_fraction or self.share else None
            for encoded in source.read(group, chooser, num_threads):
                deliver_signals()
                self._count(encoded, chooser, counts)
                if len(encoded.lengths):
                    yield encoded, before + min(encoded.read, group.num_bytes)
                if chooser is not None and chooser.is_done:
                    break
            before += group.num_bytes

    def _count(self, encoded: TokenizedDocuments, chooser: Chooser | None, counts: TokenCounts) -> None:
        counts.documents += len(encoded.lengths)
        counts.tokens_in += len(encoded.tokens) + encoded.cut
        counts.drop("cut from long documents", encoded.cut)
        is_owner = self.share is None or chooser is None or self.share.owns(chooser.before)
        if is_owner and (not self.val_fraction or self.split == TRAIN):
            counts.documents_dropped.merge(encoded.dropped or Dropped())
        counts.documents_dropped.merge(encoded.refused or Dropped())
        counts.documents_lossy += encoded.lossy
        counts.characters_lost += encoded.lost


def assign_documents(
    source: DocumentSource,
    num_shards: int | None = None,
    *,
    most: int | None = None,
    val_fraction: float = 0.0,
    val_last_shard: bool = False,
    seed: int = 0,
) -> list[ShardDocuments]:
    """Deal documents to files of tokens: consecutive groups go to each, so that all together keep the order.

    Parameters
    ----------
    source
        The documents.
    num_shards
        How many files there are for training; None: one for each file of the source.
    most
        How many there are at most in that case, of all splits together; None: any number.
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
        return _routes_of_splits(source, splits, num_shards, most)
    if val_last_shard:
        return _last_held_out(source, num_shards, most)
    runs = _cut(source, source.groups, num_shards, most)
    if val_fraction:
        train = [replace(run, val_fraction=val_fraction, seed=seed) for run in runs]
        return [*train, ShardDocuments(source.groups, VAL, val_fraction, seed)]
    [split] = splits
    return [replace(run, split=split) for run in runs]


def _last_held_out(source: DocumentSource, num_shards: int | None, most: int | None) -> list[ShardDocuments]:
    """Deal documents to files, and hold out the last one: the last file of the source, or the last shard."""
    if num_shards is None:
        last = source.groups[-1].file_number
        first = next(number for number, group in enumerate(source.groups) if group.file_number == last)
        runs = [*_cut(source, source.groups[:first], None, most and most - 1), ShardDocuments(source.groups[first:])]
    else:
        runs = _cut(source, source.groups, num_shards, None)
    if len(runs) < 2:
        raise ConvertError(
            "val_last_shard leaves nothing to train on: there is 1 shard; ask for 2 shards or more",
            options=["val_last_shard", "shards"],
        )
    return [*runs[:-1], replace(runs[-1], split=VAL)]


def told_splits(source: DocumentSource, settings: Settings) -> list[str]:
    """Return the split of each file of a source, as their names tell; [] where they tell one or none, or all is one."""
    if settings.input.is_one_split or not source.groups:
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


def _routes_of_splits(
    source: DocumentSource, splits: dict[str, list[DocumentGroup]], num_shards: int | None, most: int | None
) -> list[ShardDocuments]:
    """Deal each split to files of its own, of about the same weight: the first one to `num_shards`."""
    weights = {split: sum(group.weight for group in groups) for split, groups in splits.items()}
    first = next(iter(splits))
    routes = []
    for split, groups in splits.items():
        count = num_shards
        if num_shards is not None and split != first:
            count = max(1, min(len(groups), round(num_shards * weights[split] / max(1.0, weights[first]))))
        share = most and max(1, most * _num_files(groups) // _num_files(source.groups))
        routes += [replace(run, split=split) for run in _cut(source, groups, count, share)]
    return routes


def _num_files(groups: list[DocumentGroup]) -> int:
    return len({group.file_number for group in groups})


def _cut(
    source: DocumentSource, groups: list[DocumentGroup], num_shards: int | None, most: int | None
) -> list[ShardDocuments]:
    """Cut into the runs of each file: as many as are asked for, or one for each file of the source, up to `most`."""
    if num_shards is None and most is not None and _num_files(groups) > most:
        num_shards = most
    if num_shards is None:
        return [ShardDocuments(list(run)) for _, run in groupby(groups, key=lambda group: group.file_number)]
    if num_shards > len(groups):
        return _shared(source, groups, num_shards)
    return [*map(ShardDocuments, _cut_evenly(groups, num_shards))]


def _shared(source: DocumentSource, groups: list[DocumentGroup], num_shards: int) -> list[ShardDocuments]:
    """Cut groups into more runs than there are groups: the documents of heavy ones are counted, and shared."""
    shares = [1] * len(groups)
    counts = dict[int, int]()
    heaviest = [(-group.weight, number) for number, group in enumerate(groups)]
    heapify(heaviest)
    for _ in range(num_shards - len(groups)):
        while heaviest:
            _, number = heappop(heaviest)
            if number not in counts:
                counts[number] = _num_documents(source, groups[number])
            if counts[number] > shares[number]:
                break
        else:
            raise ConvertError(
                f"{source.paths[0]}: each of {num_shards:,} shards needs a document of its own, found "
                f"{counted(sum(counts.values()), 'document')}",
                remedy=Remedy.FILL_THE_SHARDS,
            )
        shares[number] += 1
        heappush(heaviest, (-groups[number].weight / shares[number], number))
    routes = []
    for number, group in enumerate(groups):
        count = counts.get(number, 0)
        edges = pairwise(k * count // shares[number] for k in range(shares[number] + 1))
        is_shared = shares[number] > 1
        routes += [ShardDocuments([group], share=Share(*each, count) if is_shared else None) for each in edges]
    return routes


def _num_documents(source: DocumentSource, group: DocumentGroup) -> int:
    """Return how many documents a group has: none is tokenized."""
    found = 0

    def none(count: int) -> npt.NDArray[np.bool_]:
        nonlocal found
        found += count
        return np.zeros(count, bool)

    for _ in source.read(group, none, 1):
        deliver_signals()
    return found


def require_documents(source: DocumentSource, counts: TokenCounts) -> None:
    """Raise `ConvertError` if a source has no documents, or if most of its rows were none."""
    path = source.paths[0]
    dropped = counts.documents_dropped
    if not counts.documents:
        number = counted(len(source.paths), "file")
        reasons = dropped.reasons or "they are empty"
        raise ConvertError(f"{path}: no documents in {number} ({reasons}){dropped.cure(path)}")
    dropped.require_few(counts.documents, source.max_dropped, path)


def _cut_evenly(groups: list[DocumentGroup], num_shards: int) -> list[list[DocumentGroup]]:
    """Cut into runs of about the same weight, none of them empty."""
    ends = np.cumsum([group.weight + 1 for group in groups])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_shards) / num_shards)
    for k in range(num_shards - 1):  # at least one group each
        least = max(k + 1, cuts[k - 1] + 1 if k else 0)
        most = len(groups) - (num_shards - 1 - k)
        cuts[k] = min(max(cuts[k], least), most)
    return [groups[a:b] for a, b in pairwise([0, *cuts.tolist(), len(groups)])]
