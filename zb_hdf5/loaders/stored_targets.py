"""Targets that a store has in its fields: `labels`, and a `loss_mask` of the tokens that count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import IGNORED_TARGET
from zb_hdf5.errors import ArgumentError
from zb_hdf5.field import LABELS, LOSS_MASK, Field
from zb_hdf5.files.forks import kept_property
from zb_hdf5.formats.batch_reader import BatchReader

#: Records that are looked at in each of three places: at the start, in the middle and at the end.
SAMPLED_RECORDS: Final = 16
#: Fields of targets, one value for each token, and the kinds of their dtypes.
_DTYPE_KINDS: Final = {LABELS: "iu", LOSS_MASK: "biuf"}


def has_targets(reader: BatchReader) -> bool:
    """Return whether a store has fields of which its targets follow."""
    return any(_is_of_targets(field) for field in reader.meta.fields)


def _is_of_targets(field: Field) -> bool:
    return not field.shape and field.dtype.kind in _DTYPE_KINDS.get(field.name, "")


def values_of(column: BatchReader, records: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return records by their numbers, shape (records, seq_len): of the tokens, or of a field of one value for each."""
    out = np.empty((len(records), column.seq_len), column.dtype)
    column.read_records_into(records, out)
    return out


class StoredTargets:
    """The targets of the records of a store, if it has fields of them.

    Trainers write labels in two ways: the label of a position is its own token, as in `transformers`, whose models
    shift; or it is the token after it, as in files for Cerebras. The labels themselves tell which: they are compared
    with the tokens, where they count.

    Parameters
    ----------
    reader
        The store.

    Raises
    ------
    ArgumentError
        If the labels are neither.
    """

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader
        found = {field.name for field in reader.meta.fields if _is_of_targets(field)}
        self._has_labels = LABELS in found
        self._has_mask = LOSS_MASK in found
        if self._has_labels and reader.num_records:
            _ = self._is_next  # an error is raised now

    @kept_property
    def _is_next(self) -> bool:
        """Whether the label of a position is the token after it, and the mask that of the label."""
        reader = self._reader
        last = max(0, reader.num_records - SAMPLED_RECORDS)
        firsts = dict.fromkeys((0, last // 2, last))
        records = np.concatenate(
            [np.arange(first, min(first + SAMPLED_RECORDS, reader.num_records)) for first in firsts]
        )
        tokens = values_of(reader, records).astype(np.int64)
        labels = values_of(reader.field(LABELS), records).astype(np.int64)
        counts = labels >= 0
        if self._has_mask:
            counts &= values_of(reader.field(LOSS_MASK), records) != 0
        if np.array_equal(labels[counts], tokens[counts]):
            return False
        is_next = counts[:, :-1]
        if np.array_equal(labels[:, :-1][is_next], tokens[:, 1:][is_next]):
            return True
        raise ArgumentError(
            f"{reader.path}: targets: expected {LABELS} that are the tokens, or the next ones, found others; read them "
            f"as a field: fields=({LABELS!r},)"
        )

    @property
    def fields(self) -> list[str]:
        """The names of the fields that are read."""
        return [LABELS] * self._has_labels + [LOSS_MASK] * self._has_mask

    def put_into(self, found: npt.NDArray[np.int64], values: Callable[[str], npt.NDArray[Any]]) -> None:
        """Put the stored targets in place of the next tokens, of which those that are none stay so.

        Parameters
        ----------
        found
            The next token of each token, or -100: shape (rows, seq_len).
        values
            Returns the values of a field for these tokens, of the same shape.
        """
        if self._has_labels:
            labels = self._of_targets(values(LABELS)).astype(np.int64)
            has_target = found != IGNORED_TARGET
            found[has_target] = np.where(labels < 0, IGNORED_TARGET, labels)[has_target]
        if self._has_mask:
            found[self._of_targets(values(LOSS_MASK)) == 0] = IGNORED_TARGET

    def labels_of(
        self, tokens: npt.NDArray[np.int64], values: Callable[[str], npt.NDArray[Any]]
    ) -> npt.NDArray[np.int64]:
        """Return the label of each token, shape (rows, seq_len), for models that shift them: -100 where there is none.

        Parameters
        ----------
        tokens
            The tokens, which are the labels of a store that has a mask only.
        values
            As for `put_into`.
        """
        found = self._of_tokens(values(LABELS).astype(np.int64)) if self._has_labels else tokens.copy()
        found[found < 0] = IGNORED_TARGET
        if self._has_mask:
            found[self._of_tokens(values(LOSS_MASK)) == 0] = IGNORED_TARGET
        if self._has_labels and self._is_next:
            found[:, 0] = IGNORED_TARGET  # no token before it predicts the first one
        return found

    def _of_tokens(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value that belongs to each token as the target of the one before it."""
        return np.roll(values, 1, axis=1) if self._has_labels and self._is_next else values

    def _of_targets(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value that belongs to the target of each token: its own, or that of the next token."""
        return values if self._has_labels and self._is_next else np.roll(values, -1, axis=1)
