"""The order of the records of several splits: each is shuffled by itself, and has batches of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.loaders.order import IndexArray, Permutation


class SplitOrder(Permutation):
    """The orders of several splits, one after the other; the records that no batch has come last.

    Parameters
    ----------
    orders
        The order of each split.
    stored
        The records of each split that batches have.
    """

    def __init__(self, orders: Sequence[Permutation], stored: Sequence[int]) -> None:
        sizes = [order.n for order in orders]
        self.n = sum(sizes)
        self._orders = list(orders)
        self._stored = np.array(stored, np.int64)
        #: The first record of each split in the source.
        self._bases = np.array([*accumulate(sizes[:-1], initial=0)], np.int64)
        runs = [*stored, *(size - count for size, count in zip(sizes, stored, strict=True))]
        #: The first position of each run: of the batches of each split, and of the rest of each.
        self._runs = np.array([*accumulate(runs[:-1], initial=0)], np.int64)

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        runs = self._runs.searchsorted(positions, side="right") - 1
        splits = runs % len(self._orders)
        within = positions - self._runs[runs] + np.where(runs >= len(self._orders), self._stored[splits], 0)
        return self._mapped(splits, within, lambda order, here: order.indices(here)) + self._bases[splits]

    def positions(self, indices: npt.NDArray[Any]) -> IndexArray:
        splits = self._bases.searchsorted(indices, side="right") - 1
        within = self._mapped(splits, indices - self._bases[splits], lambda order, here: order.positions(here))
        is_rest = within >= self._stored[splits]
        return within + np.where(
            is_rest, self._runs[splits + len(self._orders)] - self._stored[splits], self._runs[splits]
        )

    def _mapped(
        self, splits: IndexArray, values: IndexArray, of: Callable[[Permutation, IndexArray], IndexArray]
    ) -> IndexArray:
        """Return each value as the order of its split maps it."""
        found = np.empty(values.shape, np.int64)
        for number, order in enumerate(self._orders):
            here = splits == number
            if here.any():
                found[here] = of(order, values[here])
        return found
