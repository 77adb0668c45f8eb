"""The shares of groups of documents in a store, or in some steps of all ranks: whose the tokens are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from zb_hdf5.commands.document_groups import DocumentGroups, GroupCounts
from zb_hdf5.commands.origins import opened_state
from zb_hdf5.console import Progress, counted, printable
from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.paths import any_path
from zb_hdf5.loaders.epoch_runs import EpochRun, runs_after, runs_before, runs_in_epoch, times_taken
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.mixture import MixedLoader
from zb_hdf5.loaders.order import IndexArray
from zb_hdf5.loaders.state import MAX_COUNT
from zb_hdf5.read_as import ReadAs
from zb_hdf5.store.opening import open_corpus

#: The name of documents that no name is stored of.
UNNAMED: Final = "(not known)"


class GroupShare(NamedTuple):
    """The share of a group.

    Attributes
    ----------
    store
        The store, or its name in a mixture.
    name
        The name of the group; None: of documents without one.
    tokens, documents
        Its tokens, and the documents that have them.
    epochs
        How often its tokens are there, of all in the store; None: it is a share of the store itself.
    """

    store: str
    name: str | None
    tokens: int
    documents: int
    epochs: float | None


class Shares(NamedTuple):
    """The shares of all groups, those with the most tokens first.

    Attributes
    ----------
    by
        "source", or "meta:<field set>".
    groups
        The shares.
    padding
        Tokens of padding, or of no document.
    """

    by: str
    groups: list[GroupShare]
    padding: int

    @classmethod
    def of(cls, by: str, store: str, names: list[str], counts: GroupCounts, whole: IndexArray | None) -> Self:
        """Return the shares in one store.

        Parameters
        ----------
        by
            As the attribute.
        store, names
            The store, and its groups.
        counts
            The tokens and documents of each group.
        whole
            The tokens of each group in the whole store; None: they are these.
        """
        totals = (counts.tokens if whole is None else whole).tolist()
        *tokens, padding = counts.tokens.tolist()
        rows = zip([*names, None], tokens, counts.documents.tolist(), totals, strict=False)
        groups = [
            GroupShare(store, name, size, documents, None if whole is None else size / total)
            for name, size, documents, total in rows
            if total
        ]
        return cls.joined(by, [cls(by, groups, padding)])

    @classmethod
    def joined(cls, by: str, found: Iterable[Shares]) -> Self:
        """Return the shares in several stores together."""
        parts = [*found]
        groups = sorted(chain.from_iterable(part.groups for part in parts), key=lambda each: -each.tokens)
        return cls(by, groups, sum(part.padding for part in parts))

    @property
    def tokens(self) -> int:
        """Tokens of all groups."""
        return sum(each.tokens for each in self.groups)

    def percent(self, share: GroupShare) -> float:
        """Return the share of a group in the tokens of all."""
        return 100 * share.tokens / max(1, self.tokens)

    def to_json(self) -> dict[str, Any]:
        groups = [{**each._asdict(), "percent": self.percent(each)} for each in self.groups]
        return {"by": self.by, "groups": groups, "padding": self.padding}

    def line(self) -> tuple[str, str]:
        """Return the tokens of all groups, and of padding, for people."""
        percent = 100 * self.padding / max(1, self.tokens + self.padding)
        text = f", and {self.padding:,} of padding ({percent:.1f}%)" if self.padding else ""
        return "counted", f"{counted(self.tokens, 'token')} of documents{text}"

    def table(self) -> Iterator[str]:
        """Yield a line for each group."""
        is_mixed = len({each.store for each in self.groups}) > 1
        of_steps = any(each.epochs is not None for each in self.groups)
        yield ""
        yield f"{'tokens':>18}  {'share':>7}  {'documents':>13}{'  epochs' if of_steps else ''}  {self.by}"
        for each in self.groups:
            epochs = "" if each.epochs is None else f"  {each.epochs:>6.2f}"
            name = UNNAMED if each.name is None else each.name
            shown = printable(f"{each.store}: {name}" if is_mixed else name)
            yield f"{each.tokens:>18,}  {self.percent(each):>6.2f}%  {each.documents:>13,}{epochs}  {shown}"


def shares_of_path(path: Path, by: str, read_as: ReadAs, split: str | None, progress: Progress) -> Shares:
    """Return the shares of groups in all records of a path, or in a whole stream."""
    with open_corpus(path, read_as=read_as, split=split) as corpus:
        groups = DocumentGroups.of(corpus, by)
        counts = groups.counts_of_all()
        if not corpus.is_stream:
            batches = corpus.batches()
            counts, _ = groups.counts_in(batches, np.ones(batches.num_records, np.uint32), batches.seq_len, progress)
    return Shares.of(by, str(path), groups.names, counts, None)


class StepsAsked(NamedTuple):
    """Steps of all ranks together: one of the three is not None.

    Attributes
    ----------
    between
        The first step, and the one after the last: of the epoch of a state, or of a mixture.
    last, following
        So many steps before a state, or after it.
    """

    between: tuple[int, int] | None
    last: int | None
    following: int | None

    @property
    def total(self) -> int:
        """How many steps they are."""
        first, stop = self.between or (0, self.last or self.following or 0)
        return stop - first

    def runs_of(self, loader: Loader[Any], world_size: int) -> Iterable[EpochRun]:
        """Return the positions that the steps take in the epochs of a loader."""
        if self.between is not None:
            return runs_in_epoch(loader, *self.between, world_size)
        if self.last is not None:
            return runs_before(loader, self.last, world_size)
        return runs_after(loader, self.total, world_size)

    def batches_of(self, mixed: MixedLoader[Any], world_size: int) -> tuple[int, int]:
        """Return the global positions of the first batch that the steps take of a mixture, and of that after them."""
        if self.between is not None:
            first, stop = self.between
            return first * world_size, stop * world_size
        position = sum(mixed.counts().values())
        size = self.total * world_size
        if self.last is None:
            return position, position + size
        if size > position:
            raise ArgumentError(
                f"{mixed.path}: expected at most {position // world_size:,} steps before the state, on "
                f"{counted(world_size, 'rank')}, found {self.last:,}"
            )
        return position - size, position


def shares_of_steps(
    stores: tuple[str, ...],
    state_path: Path,
    steps: StepsAsked,
    by: str,
    batch_size: int | None,
    world_size: int,
    read_as: ReadAs,
    split: str | None,
    progress: Progress,
) -> Shares:
    """Return the shares of groups in steps of all ranks, by the state of a loader or of a mixture."""
    _, end = steps.between or (0, steps.total)
    if end * world_size > MAX_COUNT:
        raise ArgumentError(f"expected steps up to {MAX_COUNT // world_size:,}, found {end:,}")
    with opened_state(stores, state_path, batch_size, read_as, split) as opened:
        if isinstance(opened, MixedLoader):
            runs = opened.runs(*steps.batches_of(opened, world_size))
            found = [_of_runs(by, name, loader, runs[name], progress) for name, loader in opened.loaders.items()]
            return Shares.joined(by, found)
        return _of_runs(by, str(any_path(stores[0])), opened, steps.runs_of(opened, world_size), progress)


def _of_runs(by: str, store: str, loader: Loader[Any], runs: Iterable[EpochRun], progress: Progress) -> Shares:
    """Return the shares of groups in the records that runs of epochs take, and close the store of the loader."""
    with loader.batches as batches:  # the mapped tables of all members of a mixture would fill the memory
        groups = DocumentGroups.of(batches.corpus, by)
        counts, whole = groups.counts_in(batches, times_taken(loader, runs), loader.seq_len, progress)
    return Shares.of(by, store, groups.names, counts, whole)
